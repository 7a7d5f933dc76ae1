//! Precedence of sources, and the source that each value reports.

use std::time::Duration;

use clap::Command;
use config::{Auto, ByteSize, Config, Dtype, Section, Source, args_for, from_matches};

use crate::{load, map};

#[test]
fn flags_win_over_the_environment_over_the_file_over_the_defaults() {
    let file = "[node]\nslots = 1\n";
    let variable = [("BATON_NODE_SLOTS", "2")];
    let flag = [("node.slots", "3")];
    assert_eq!(load("", &[], &[]).unwrap().node.slots, Auto::Derived);
    assert_eq!(load(file, &[], &[]).unwrap().node.slots, Auto::Set(1));
    assert_eq!(load(file, &variable, &[]).unwrap().node.slots, Auto::Set(2));
    let all = load(file, &variable, &flag).unwrap();
    assert_eq!(all.node.slots, Auto::Set(3));
    assert_eq!(all.source_of("node.slots"), Source::Flag { name: "node-slots".into() });
}

#[test]
fn every_kind_of_value_is_read_from_toml_and_from_text_alike() {
    let toml = r#"
        [model]
        path = "models/a.gguf"
        dtype = "f32"
        [router]
        http = "0.0.0.0:80"
        body_bytes_max = "1MiB"
        timeout = "90s"
        [node]
        kv_memory = 2147483648
        step_tokens = 1_024
        threads = 3
        [cluster]
        prefill = ["http://a:1", "b:2"]
        decode = []
        [telemetry]
        otlp = "collector:4317"
    "#;
    let text = [
        ("BATON_MODEL_PATH", "models/a.gguf"),
        ("BATON_MODEL_DTYPE", "f32"),
        ("BATON_ROUTER_HTTP", "0.0.0.0:80"),
        ("BATON_ROUTER_BODY_BYTES_MAX", "1048576"),
        ("BATON_ROUTER_TIMEOUT", "90 s"),
        ("BATON_NODE_KV_MEMORY", "2GiB"),
        ("BATON_NODE_STEP_TOKENS", "1024"),
        ("BATON_NODE_THREADS", "3"),
        ("BATON_CLUSTER_PREFILL", "http://a:1, b:2"),
        ("BATON_CLUSTER_DECODE", ""),
        ("BATON_TELEMETRY_OTLP", "http://collector:4317"),
    ];
    for config in [load(toml, &[], &[]).unwrap(), load("", &text, &[]).unwrap()] {
        assert_eq!(config.model.required_path().unwrap().to_string(), "models/a.gguf");
        assert_eq!(config.model.served_name().unwrap(), "a");
        assert_eq!(config.model.dtype, Dtype::F32);
        assert_eq!(config.router.http.to_string(), "0.0.0.0:80");
        assert_eq!(config.router.body_bytes_max, ByteSize::mib(1));
        assert_eq!(config.router.timeout, Duration::from_secs(90));
        assert_eq!(config.node.kv_memory, Some(ByteSize::gib(2)));
        assert_eq!((config.node.step_tokens, config.node.threads), (Auto::Set(1024), Some(3)));
        let urls: Vec<_> = config.cluster.prefill.iter().map(ToString::to_string).collect();
        assert_eq!(urls, ["http://a:1", "http://b:2"]);
        assert!(config.cluster.decode.is_empty());
        assert_eq!(config.telemetry.otlp.unwrap().as_str(), "http://collector:4317");
    }
}

#[test]
fn an_empty_variable_or_flag_unsets_what_the_file_had_set() {
    let file = "[telemetry]\notlp = \"collector:4317\"\n";
    assert!(load(file, &[], &[]).unwrap().telemetry.otlp.is_some());
    assert!(load(file, &[("BATON_TELEMETRY_OTLP", "")], &[]).unwrap().telemetry.otlp.is_none());
    assert!(load(file, &[], &[("telemetry.otlp", "")]).unwrap().telemetry.otlp.is_none());
}

#[test]
fn explaining_lists_each_value_with_its_source() {
    let config = load("\n[node]\n\nslots = 8\n", &[("BATON_NODE_ID", "d-1")], &[]).unwrap();
    let text = config.explain(&[Section::Node]);
    let line = |key: &str| text.lines().find(|line| line.starts_with(key)).unwrap().to_owned();
    assert!(line("node.slots").contains(".toml line 4"), "{text}");
    assert!(line("node.slots").contains(" 8 "), "{text}");
    assert!(line("node.id").contains(" d-1 "), "{text}");
    assert!(line("node.id").ends_with(" environment BATON_NODE_ID"), "{text}");
    assert!(line("node.step_tokens").ends_with("default"), "{text}");
    assert_eq!(text.lines().count(), Section::Node.settings().len());
}

#[test]
fn without_anything_every_value_is_its_default() {
    let loaded = load("", &[], &[]).unwrap();
    let default = Config::default();
    assert_eq!(loaded.model, default.model);
    assert_eq!(loaded.router, default.router);
    assert_eq!(loaded.node, default.node);
    assert_eq!(loaded.transfer, default.transfer);
    assert_eq!(loaded.cluster, default.cluster);
    assert_eq!(loaded.telemetry, default.telemetry);
}

#[test]
fn auto_is_accepted_in_each_way_and_shown() {
    let file = "[node]\nstep_tokens = \"auto\"\nitl_max = \"auto\"\n\
                [transfer]\nchunk_bytes = \"auto\"\n";
    let config = load(file, &[("BATON_NODE_SLOTS", "auto")], &[("node.waiting_max", "auto")]);
    let config = config.unwrap();
    let node = &config.node;
    assert_eq!([node.step_tokens, node.slots, node.waiting_max], [Auto::Derived; 3]);
    assert_eq!((node.itl_max, config.transfer.chunk_bytes), (Auto::Derived, Auto::Derived));
    let line = config.explain(&[Section::Node]);
    let line = line.lines().find(|line| line.starts_with("node.slots")).unwrap();
    assert!(line.contains(" auto ") && line.ends_with("BATON_NODE_SLOTS"), "{line}");
    // A set value overrides an `auto` of lower precedence, and vice versa.
    let node = load(file, &[], &[("node.step_tokens", "64"), ("node.itl_max", "30ms")]);
    let node = node.unwrap().node;
    assert_eq!(node.step_tokens, Auto::Set(64));
    assert_eq!(node.itl_max, Auto::Set(Duration::from_millis(30)));
    let unset = load("[node]\nslots = 8\n", &[], &[("node.slots", "auto")]).unwrap();
    assert_eq!(unset.node.slots, Auto::Derived);
}

#[test]
fn a_smaller_limit_lowers_the_defaults_that_depend_on_it() {
    let config =
        load("", &[], &[("router.timeout_max", "60s"), ("router.requests_max", "8")]).unwrap();
    assert_eq!((config.router.timeout, config.router.waiting_max), (Duration::from_secs(60), 8));
    let text = config.explain(&[Section::Router]);
    let waiting = text.lines().find(|line| line.starts_with("router.waiting_max")).unwrap();
    assert!(waiting.contains(" 8 ") && waiting.ends_with("default"), "{waiting}");
}

#[test]
fn former_name_of_a_setting_is_accepted_with_a_warning() {
    let file = "[transfer]\nnccl_blocks = 7";
    let command = args_for(Command::new("node"), &[Section::Transfer]);
    let matches = command.get_matches_from(["node", "--transfer-nccl-blocks", "7"]);
    for (config, source) in [
        (load(file, &[], &[]), "line 2"),
        (load("", &[("BATON_TRANSFER_NCCL_BLOCKS", "7")], &[]), "BATON_TRANSFER_NCCL_BLOCKS"),
        (from_matches(&matches, map(&[]), &[Section::Transfer]), "--transfer-nccl-blocks"),
    ] {
        let config = config.unwrap();
        assert_eq!(config.transfer.nccl_max_ctas, 7);
        let [warning] = config.warnings() else { panic!("{:?}", config.warnings()) };
        assert!(warning.starts_with("transfer.nccl_blocks ("), "{warning}");
        assert!(warning.contains(source), "{warning}");
        assert!(warning.ends_with("transfer.nccl_max_ctas"), "{warning}");
    }
    // The secret was in section [transfer], which routers do not read.
    let file = "[transfer]\nsecret = \"0123456789abcdef\"";
    let config = load(file, &[], &[]).unwrap();
    assert_eq!(config.cluster.required_secret().unwrap().reveal(), "0123456789abcdef");
    let [warning] = config.warnings() else { panic!("{:?}", config.warnings()) };
    assert!(
        warning.starts_with("transfer.secret (") && warning.ends_with("cluster.secret"),
        "{warning}"
    );
    let both = [("transfer.nccl_blocks", "7"), ("transfer.nccl_max_ctas", "8")];
    assert_eq!(load("", &[], &both).unwrap().transfer.nccl_max_ctas, 8);
    assert!(load("", &[], &[]).unwrap().warnings().is_empty());
}
