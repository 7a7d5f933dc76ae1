//! Flags and help.

use clap::{Command, error::ErrorKind};
use config::{Config, ConfigError, Section, args_for, from_matches};

use crate::{file, map};

const ROUTER: [Section; 4] =
    [Section::Model, Section::Router, Section::Cluster, Section::Telemetry];

fn command() -> Command {
    args_for(Command::new("baton-router").version("1"), &ROUTER)
}

fn run(arguments: &[&str], environment: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let arguments = ["baton-router"].iter().chain(arguments);
    let matches = command().try_get_matches_from(arguments).unwrap();
    from_matches(&matches, map(environment), &ROUTER)
}

#[test]
fn flags_reach_their_settings() {
    let config = run(&["--router-attempts-max", "7", "--cluster-decode=a:1,b:2"], &[]).unwrap();
    assert_eq!(config.router.attempts_max, 7);
    assert_eq!(config.cluster.decode.len(), 2);
}

#[test]
fn the_file_is_named_by_flag_or_variable_and_the_flag_wins() {
    let (one, two) = (file("[router]\nattempts_max = 1\n"), file("[router]\nattempts_max = 2\n"));
    let variable = [("BATON_CONFIG", one.path().to_str().unwrap())];
    assert_eq!(run(&[], &variable).unwrap().router.attempts_max, 1);
    let flag = ["--config", two.path().to_str().unwrap()];
    assert_eq!(run(&flag, &variable).unwrap().router.attempts_max, 2);
}

#[test]
fn a_negative_number_is_rejected_as_a_value_not_as_a_flag() {
    let message = run(&["--router-attempts-max", "-1"], &[]).unwrap_err().to_string();
    assert!(message.contains("invalid router.attempts_max: \"-1\""), "{message}");
    assert!(message.contains("flag --router-attempts-max"), "{message}");
}

#[test]
fn a_typo_in_a_flag_is_refused_with_the_nearest_one() {
    let error = command().try_get_matches_from(["x", "--router-attempt-max", "1"]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownArgument);
    assert!(error.to_string().contains("--router-attempts-max"), "{error}");
}

#[test]
fn help_shows_the_sections_in_use_with_default_reason_and_other_names() {
    let long = command().term_width(400).render_long_help().to_string();
    assert!(long.contains("--router-body-bytes-max <BYTES>"), "{long}");
    assert!(long.contains("Default: 4MiB. A prompt of 128 Ki tokens takes about 1 MiB"), "{long}");
    assert!(long.contains("Allowed: a size such as 512KiB"), "{long}");
    assert!(long.contains("BATON_ROUTER_BODY_BYTES_MAX"), "{long}");
    assert!(long.contains("[router] The router: its addresses"), "{long}");
    assert!(!long.contains("--node-slots"), "a router has no slots");
    let short = command().term_width(400).render_help().to_string();
    assert!(short.contains("[default: 127.0.0.1:8000]"), "{short}");
}

#[test]
fn one_file_serves_services_with_other_sections() {
    let shared = file("[node]\nslots = 8\n[router]\nattempts_max = 2\n");
    let config = run(&["--config", shared.path().to_str().unwrap()], &[]).unwrap();
    assert_eq!((config.node.slots, config.router.attempts_max), (config::Auto::Set(8), 2));
}
