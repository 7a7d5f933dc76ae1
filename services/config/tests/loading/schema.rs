//! The schema itself: explained, consistent, and free of collisions.

use std::collections::BTreeSet;

use config::{Config, LoadInput, Section, Setting};

use crate::map;

fn settings() -> Vec<Setting> {
    Section::ALL.iter().flat_map(|section| section.settings()).collect()
}

#[test]
fn example_configuration_is_valid() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/baton.toml");
    let config = Config::load(LoadInput { file: Some(file), ..LoadInput::default() }).unwrap();
    assert_eq!(config.cluster.decode.len(), 1);
    assert_eq!(config.model.name.as_deref(), Some("smollm2-135m"));
}

#[test]
fn every_setting_has_one_name_everywhere() {
    let setting =
        settings().into_iter().find(|setting| setting.key() == "node.step_tokens").unwrap();
    assert_eq!(setting.flag(), "node-step-tokens");
    assert_eq!(setting.env(), "BATON_NODE_STEP_TOKENS");
    let flags: BTreeSet<_> = settings().iter().map(Setting::flag).collect();
    let variables: BTreeSet<_> = settings().iter().map(Setting::env).collect();
    assert_eq!((flags.len(), variables.len()), (settings().len(), settings().len()));
}

#[test]
fn every_setting_has_a_description_and_a_reason_for_its_default() {
    for setting in settings() {
        let key = setting.key();
        assert!(setting.summary().ends_with('.'), "{key}: {}", setting.summary());
        assert!(setting.why.ends_with('.'), "{key}: {}", setting.why);
        assert!(setting.why.len() > 10, "{key}: {}", setting.why);
        assert!(!setting.allowed.is_empty(), "{key}");
    }
    for section in Section::ALL {
        assert!(section.about().ends_with('.'), "{}", section.about());
    }
}

#[test]
fn every_default_is_itself_allowed() {
    let shown = settings()
        .into_iter()
        .filter(|setting| !["unset", "empty"].contains(&setting.default.as_str()))
        .map(|setting| (setting.key(), setting.default))
        .collect();
    let loaded = Config::load(LoadInput { flags: shown, ..LoadInput::default() }).unwrap();
    assert_eq!(loaded.node, Config::default().node);
    assert_eq!(loaded.router, Config::default().router);
}

#[test]
fn no_variable_is_one_that_kubernetes_sets_for_a_service() {
    // A service named baton-node would bring BATON_NODE_PORT and BATON_NODE_SERVICE_HOST.
    for setting in settings() {
        let name = setting.env();
        let links =
            name.ends_with("_PORT") || name.contains("_SERVICE_") || name.contains("_PORT_");
        assert!(!links, "{name}");
    }
}

#[test]
fn every_setting_can_be_given_in_each_way() {
    for setting in settings() {
        let text = match setting.placeholder {
            "N" if setting.default != "unset" => setting.default.as_str(),
            "N" => "64",
            "BYTES" => "1MiB",
            "BOOL" => "false",
            "DURATION" => "2s",
            "CPUS" => "0-3,8",
            "ADDR:PORT" => "127.0.0.1:1234",
            "URL" => "http://host:1",
            "LIST" if setting.name == "models" => "other=path",
            // There is no model that they could name.
            "LIST" if ["aliases", "chat_templates", "tool_formats"].contains(&setting.name) => "",
            "LIST" => "http://host:1",
            "SECRET" => "0123456789abcdef",
            "WORD" => setting.default.as_str(),
            "TEXT" | "PATH" => "info",
            other => panic!("{other} is a new kind of value: give it a sample here"),
        };
        let flags = map(&[(&setting.key(), text)]);
        let environment = map(&[(&setting.env(), text)]);
        Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap();
        Config::load(LoadInput { environment, ..LoadInput::default() }).unwrap();
    }
}
