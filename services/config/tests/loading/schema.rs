//! The schema itself: explained, consistent, and free of collisions.

use std::{collections::BTreeSet, net::SocketAddr};

use config::{Config, LoadInput, Section, Setting, json_schema};

use crate::{load, map};

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
fn every_port_listens_on_a_loopback_address_by_default() {
    let ports: Vec<(String, SocketAddr)> = settings()
        .iter()
        .filter_map(|setting| Some((setting.key(), setting.default.parse().ok()?)))
        .collect();
    for key in ["router.http", "router.grpc", "router.admin", "node.grpc", "transfer.data"] {
        assert!(ports.iter().any(|(port, _)| port == key), "{key}: {ports:?}");
    }
    assert!(ports.iter().all(|(_, address)| address.ip().is_loopback()), "{ports:?}");
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
            "DURATION" => "20s",
            "CPUS" => "0-3,8",
            "ADDR:PORT" => "127.0.0.1:1234",
            "URL" => "http://host:1",
            "LIST" if ["models", "adapters"].contains(&setting.name) => "other=path",
            // There is no model that they could name.
            "LIST"
                if ["aliases", "chat_templates", "tool_formats", "reasoning_formats"]
                    .contains(&setting.name) =>
            {
                ""
            }
            "LIST" => "http://host:1",
            "SECRET" => "0123456789abcdef",
            "WORD" => setting.default.as_str(),
            "TEXT" | "PATH" => "info",
            other => panic!("{other} is a new kind of value: give it a sample here"),
        };
        let mut flags = map(&[(&setting.key(), text)]);
        let mut environment = map(&[(&setting.env(), text)]);
        if setting.name.starts_with("tls_") {
            // A certificate and its key need each other.
            for key in [
                "router.tls_cert",
                "router.tls_key",
                "cluster.tls_cert",
                "cluster.tls_key",
                "cluster.tls_ca",
            ] {
                flags.extend(map(&[(key, text)]));
                let variable = format!("BATON_{}", key.replace('.', "_").to_uppercase());
                environment.extend(map(&[(&variable, text)]));
            }
        }
        Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap();
        Config::load(LoadInput { environment, ..LoadInput::default() }).unwrap();
    }
}

fn schema_of(key: &str) -> serde_json::Value {
    let setting = settings().into_iter().find(|setting| setting.key() == key).unwrap();
    let schema = json_schema(Section::ALL);
    schema["properties"][setting.section]["properties"][setting.name].clone()
}

/// Returns whether a value fits the keywords that the schemas use.
fn fits(schema: &serde_json::Value, value: &serde_json::Value) -> bool {
    if let Some(any) = schema["anyOf"].as_array() {
        return any.iter().any(|schema| fits(schema, value));
    }
    if let Some(words) = schema["enum"].as_array() {
        return words.contains(value);
    }
    if !schema["const"].is_null() {
        return schema["const"] == *value;
    }
    match schema["type"].as_str().unwrap() {
        "boolean" => value.is_boolean(),
        "integer" => value.as_u64().is_some_and(|number| {
            let bound = |name: &str| schema[name].as_u64().unwrap();
            (bound("minimum")..=bound("maximum")).contains(&number)
        }),
        "array" => {
            value.as_array().is_some_and(|list| list.iter().all(|it| fits(&schema["items"], it)))
        }
        "string" => value.as_str().is_some_and(|text| {
            let pattern = schema["pattern"].as_str().unwrap_or("");
            let length_min = schema["minLength"].as_u64().unwrap_or(0);
            regex::Regex::new(pattern).unwrap().is_match(text) && text.len() as u64 >= length_min
        }),
        other => panic!("{other} is a new type: check it here"),
    }
}

#[test]
fn json_schema_agrees_with_the_loader() {
    for (key, toml, is_allowed) in [
        ("router.attempts_max", "4", true),
        ("router.attempts_max", "17", false),
        ("router.attempts_max", "4.0", false),
        ("router.attempts_max", "'4'", false),
        ("router.body_bytes_max", "4096", true),
        ("router.body_bytes_max", "512", false),
        ("router.body_bytes_max", "'4MiB'", true),
        ("router.body_bytes_max", "'4 kb'", true),
        ("router.body_bytes_max", "'4 apples'", false),
        ("router.timeout", "'500ms'", false),
        ("router.timeout", "'10m'", true),
        ("router.timeout", "10", false),
        ("router.http", "'[::]:80'", true),
        ("router.http", "'localhost:80'", false),
        ("router.policy", "'cache-aware'", true),
        ("router.policy", "'random'", false),
        ("router.aliases", "['a=b', 'c']", false),
        ("node.slots", "'auto'", true),
        ("node.slots", "64", true),
        ("node.slots", "0", false),
        ("node.kv_memory", "''", true),
        ("node.kv_memory", "'1GiB'", true),
        ("node.prefix_cache", "false", true),
        ("node.prefix_cache", "'false'", false),
        ("node.cpus", "'0-3,8'", true),
        ("node.cpus", "'0-'", false),
        ("cluster.decode", "['decode-0.decode:50061', 'http://[::1]:9']", true),
        ("cluster.decode", "['dns:decode:50061']", true),
        ("cluster.decode", "['dns:decode']", false),
        ("cluster.decode", "['https://a:1']", false),
        ("cluster.decode", "'a:1'", false),
        ("cluster.etcd", "['https://a:1']", true),
        ("cluster.etcd_prefix", "'a//b'", false),
    ] {
        let (section, name) = key.split_once('.').unwrap();
        let text = format!("[{section}]\n{name} = {toml}\n");
        let loaded = load(&text, &[], &[]).map_err(|error| error.to_string());
        // Some values are allowed alone and then conflict with others.
        let is_loaded = !loaded.is_err_and(|error| error.contains(&format!("invalid {key}:")));
        let value: toml::Table = text.parse().unwrap();
        let value = serde_json::to_value(&value[section][name]).unwrap();
        let out_of_reach = key == "router.timeout" && toml == "'500ms'";
        assert_eq!(is_loaded, is_allowed, "{text}");
        assert_eq!(fits(&schema_of(key), &value), is_allowed || out_of_reach, "{text}");
    }
}

#[test]
fn json_schema_describes_every_setting_and_allows_its_default() {
    let schema = json_schema(Section::ALL);
    assert_eq!(schema["additionalProperties"], false);
    for setting in settings() {
        let section = &schema["properties"][setting.section];
        assert_eq!(section["additionalProperties"], false);
        let described = &section["properties"][setting.name];
        let text = described["description"].as_str().unwrap();
        assert!(text.contains(&setting.summary()) && text.contains(setting.why), "{text}");
        let default = &described["default"];
        assert_eq!(default.is_null(), setting.default == "unset", "{}", setting.key());
        assert!(default.is_null() || fits(described, default), "{described:#}");
    }
    assert_eq!(schema["properties"]["cluster"]["properties"]["secret"]["writeOnly"], true);
    assert!(json_schema(&[Section::Router])["properties"]["node"].is_null());
}
