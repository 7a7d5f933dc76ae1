//! Command-line flags, and the only function that reads the process's arguments and environment.

use std::{env, ffi::OsString, io::Write, path::PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::{
    error::{ConfigError, Problem},
    hub,
    input::{CACHE_VARIABLES, Environment, Flags, LoadInput},
    json_schema::json_schema,
    load::{Config, Section},
    section::Setting,
};

const FILE_FLAG: &str = "config";
const FILE_VARIABLE: &str = "BATON_CONFIG";
/// Program that downloads models, in the folder of the services.
const FETCHER: &str = "baton";
const EXPLAIN_FLAG: &str = "explain-config";
const SCHEMA_FLAG: &str = "config-schema";

/// Configuration and command-line arguments of this process.
pub struct ProcessConfig {
    pub config: Config,
    /// Parsed arguments, for flags of one service.
    pub matches: ArgMatches,
}

/// Reads the arguments and the environment of this process, and the file that they name.
///
/// `main` calls this function first; no other function of this crate reads arguments or
/// environment. `--help`, `--version`, `--config-schema`, `--explain-config` and invalid flags end
/// the process here.
pub fn from_process(command: Command, sections: &[Section]) -> Result<ProcessConfig, ConfigError> {
    let matches = args_for(command, sections).get_matches();
    if matches.get_flag(SCHEMA_FLAG) {
        print_and_exit(&format!("{:#}\n", json_schema(sections)));
    }
    let environment = environment_of(env::vars_os())?;
    let mut config = from_matches(&matches, environment, sections)?;
    let program = env::current_exe().ok();
    config.hub = config.hub.fetched_by(program.map(|program| program.with_file_name(FETCHER)));
    if matches.get_flag(EXPLAIN_FLAG) {
        print_and_exit(&config.explain(sections));
    }
    Ok(ProcessConfig { config, matches })
}

fn print_and_exit(text: &str) -> ! {
    // Ignore errors: the reader may have closed the pipe.
    let _ = write!(std::io::stdout(), "{text}");
    std::process::exit(0)
}

/// Adds `--config`, `--config-schema`, `--explain-config` and the flags of these sections to a
/// command.
pub fn args_for(command: Command, sections: &[Section]) -> Command {
    let mut command = command
        .arg(
            Arg::new(FILE_FLAG)
                .long(FILE_FLAG)
                .value_name("FILE")
                .value_parser(clap::value_parser!(PathBuf))
                .help("A TOML file with the settings below")
                .long_help(format!(
                    "A TOML file with the settings below. Flags win over the environment, the \
                     environment over the file, the file over the defaults.\nEnvironment: {FILE_VARIABLE}."
                )),
        )
        .arg(
            Arg::new(EXPLAIN_FLAG)
                .long(EXPLAIN_FLAG)
                .action(ArgAction::SetTrue)
                .help("Prints every setting with its value and the source of the value, then exits"),
        )
        .arg(
            Arg::new(SCHEMA_FLAG)
                .long(SCHEMA_FLAG)
                .action(ArgAction::SetTrue)
                .help("Prints the JSON Schema of the TOML file, then exits"),
        );
    for section in sections {
        let about = section.about();
        let heading = format!("[{}] {}", section.name(), about.trim_end_matches('.'));
        for setting in section.settings() {
            let arg = |setting: &Setting| {
                Arg::new(setting.key())
                    .long(setting.flag())
                    .value_name(setting.placeholder)
                    .value_parser(clap::builder::StringValueParser::new())
                    .allow_negative_numbers(true)
            };
            let described = arg(&setting)
                .help(format!("{} [default: {}]", setting.summary(), setting.default))
                .long_help(setting.explanation())
                .help_heading(heading.clone());
            command =
                command.arg(described).args(setting.former().map(|former| arg(&former).hide(true)));
        }
    }
    command
}

/// Loads from parsed arguments and a map of variables. `--config` names the file, otherwise
/// `BATON_CONFIG`.
pub fn from_matches(
    matches: &ArgMatches,
    environment: Environment,
    sections: &[Section],
) -> Result<Config, ConfigError> {
    let flags: Flags = sections
        .iter()
        .flat_map(|section| section.settings())
        .flat_map(|setting| [setting.former(), Some(setting)].into_iter().flatten())
        .filter_map(|setting| {
            let text = matches.get_one::<String>(&setting.key())?;
            Some((setting.key(), text.clone()))
        })
        .collect();
    let named = environment.get(FILE_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    let file = matches.get_one::<PathBuf>(FILE_FLAG).cloned().or(named);
    Config::load(LoadInput { file, environment, flags })
}

/// Collects the variables that begin with `BATON_` and those that locate the caches; a value that
/// is not UTF-8 is an error.
pub fn environment_of(
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> Result<Environment, ConfigError> {
    let mut environment = Environment::new();
    let mut problems = Vec::new();
    for (name, value) in variables {
        let Ok(name) = name.into_string() else { continue };
        let is_ours = name.starts_with("BATON_")
            || hub::VARIABLES.contains(&name.as_str())
            || CACHE_VARIABLES.contains(&name.as_str());
        if !is_ours {
            continue;
        }
        match value.into_string() {
            Ok(value) => drop(environment.insert(name, value)),
            Err(_) => problems.push(Problem::Conflict {
                message: format!("environment {name} is not UTF-8; expected UTF-8 text"),
            }),
        }
    }
    if problems.is_empty() { Ok(environment) } else { Err(ConfigError { problems }) }
}
