//! Errors name the invalid key or value and the valid ones.

use config::{Config, LoadInput, Model, Problem};

use crate::{file, load, refusal};

#[test]
fn a_typo_in_a_key_names_the_key_and_the_nearest_valid_one() {
    let message = refusal("[node]\nstep_token = 5\n", &[], &[]);
    assert!(message.contains("unknown key node.step_token ("), "{message}");
    assert!(message.contains(".toml line 2)"), "{message}");
    assert!(message.ends_with("the nearest valid key is node.step_tokens"), "{message}");
}

#[test]
fn a_misplaced_key_is_rejected_with_its_section() {
    let elsewhere = refusal("[router]\nstep_tokens = 5\n", &[], &[]);
    assert!(elsewhere.ends_with("the nearest valid key is node.step_tokens"), "{elsewhere}");
    let nowhere = refusal("step_tokens = 5\n", &[], &[]);
    assert!(nowhere.contains("unknown key step_tokens"), "{nowhere}");
    assert!(nowhere.ends_with("the nearest valid key is node.step_tokens"), "{nowhere}");
    let scalar = refusal("node = 5\n", &[], &[]);
    assert!(scalar.contains("unknown key node "), "{scalar}");
}

#[test]
fn a_typo_in_a_section_names_the_nearest_valid_one() {
    let message = refusal("[ruoter]\nhttp = \"1.2.3.4:5\"\n", &[], &[]);
    assert!(message.contains("unknown section [ruoter]"), "{message}");
    assert!(message.ends_with("the nearest valid section is [router]"), "{message}");
}

#[test]
fn a_typo_in_an_environment_variable_is_rejected() {
    for (name, nearest) in [
        ("BATON_NODE_STEP_TOKEN", "BATON_NODE_STEP_TOKENS"),
        ("BATON_ROUTER_HTPP", "BATON_ROUTER_HTTP"),
        ("BATON_NOED_SLOTS", "BATON_NODE_SLOTS"),
    ] {
        let message = refusal("", &[(name, "5")], &[]);
        assert!(message.contains(name) && message.ends_with(nearest), "{message}");
    }
}

#[test]
fn public_admin_address_needs_keys_of_operators() {
    let public = ("BATON_ROUTER_ADMIN", "0.0.0.0:8002");
    let message = refusal("", &[public], &[]);
    assert!(
        message.contains("router.admin (environment BATON_ROUTER_ADMIN) = 0.0.0.0:8002"),
        "{message}"
    );
    assert!(message.contains("set router.admin_keys"), "{message}");
    load("", &[public, ("BATON_ROUTER_ADMIN_KEYS", "/keys.toml")], &[]).unwrap();
    load("", &[("BATON_ROUTER_ADMIN", "[::1]:8002"), ("BATON_API_KEY", "baton-1")], &[]).unwrap();
}

#[test]
fn secret_that_crosses_a_network_unencrypted_is_reported() {
    let warnings =
        |flags: &[(&str, &str)]| load("", &[], flags).unwrap().warnings().to_vec().join(" and ");
    let public = [("router.admin", "0.0.0.0:8002"), ("router.admin_keys", "/keys.toml")];
    let text = warnings(&public);
    assert!(text.contains("router.admin (flag --router-admin) = 0.0.0.0:8002"), "{text}");
    assert!(text.ends_with("the keys of operators cross the network unencrypted"), "{text}");
    let cert = [("router.tls_cert", "/tls.crt"), ("router.tls_key", "/tls.key")];
    assert_eq!(warnings(&[public, cert].concat()), "");
    assert_eq!(warnings(&[("router.admin_keys", "/keys.toml")]), "");

    let user = [("cluster.etcd_user", "u"), ("cluster.etcd_password", "p")];
    for remote in ["a:2379", "127.0.0.1:2379,10.0.0.9:2379", "[fd00::1]:2379"] {
        let text = warnings(&[&user[..], &[("cluster.etcd", remote)]].concat());
        assert!(text.contains("cluster.etcd (flag --cluster-etcd) has http://"), "{text}");
        assert!(text.ends_with("etcd_password crosses the network unencrypted"), "{text}");
    }
    for local in ["localhost:2379", "127.0.0.1:2379,[::1]:2379"] {
        assert_eq!(warnings(&[&user[..], &[("cluster.etcd", local)]].concat()), "");
    }
    let https = [("cluster.etcd", "https://a:2379"), ("cluster.etcd_ca", "ca.pem")];
    assert_eq!(warnings(&[user, https].concat()), "");
    assert_eq!(warnings(&[("cluster.etcd", "a:2379")]), "");
}

#[test]
fn certificate_of_the_router_needs_its_key() {
    let message = refusal("", &[("BATON_ROUTER_TLS_CERT", "/tls.crt")], &[]);
    assert!(message.contains("is set without router.tls_key; give both"), "{message}");
    let both = [("BATON_ROUTER_TLS_CERT", "/tls.crt"), ("BATON_ROUTER_TLS_KEY", "/tls.key")];
    load("", &both, &[]).unwrap();
}

#[test]
fn variables_that_are_not_settings_are_left_alone() {
    let foreign = [
        ("PATH", "/bin"),
        ("BATON_TEST_MODEL", "x.gguf"),
        ("BATON_CONFIG", "whatever"),
        // Kubernetes sets these for services named baton-router and baton-node-x.
        ("BATON_ROUTER_SERVICE_HOST", "10.0.0.1"),
        ("BATON_ROUTER_SERVICE_PORT_HTTP", "8000"),
        ("BATON_ROUTER_PORT", "tcp://10.0.0.1:8000"),
        ("BATON_ROUTER_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("BATON_NODE_X_SERVICE_PORT", "1"),
    ];
    load("", &foreign, &[]).unwrap();
}

#[test]
fn a_bad_value_names_key_value_source_and_what_is_allowed() {
    let message = refusal("", &[], &[("node.slots", "-3")]);
    let expected = "invalid node.slots: \"-3\" (flag --node-slots); \
                    allowed: auto or a whole number from 1 to 4096";
    assert_eq!(message, expected);
    let message = refusal("", &[("BATON_MODEL_DTYPE", "fp16")], &[]);
    let expected = "invalid model.dtype: \"fp16\" (environment BATON_MODEL_DTYPE); \
                    allowed: f32, bf16, q8 or fp8";
    assert_eq!(message, expected);
    let message = refusal("[router]\n\ntimeout = 600\n", &[], &[]);
    assert!(message.starts_with("invalid router.timeout: 600 ("), "{message}");
    assert!(message.contains("line 3"), "{message}");
    assert!(message.contains("a duration with its unit such as 500ms"), "{message}");
    assert!(message.ends_with("from 1s to 24h"), "{message}");
}

#[test]
fn wrong_types_and_numbers_out_of_range_are_refused() {
    for text in [
        "[node]\nslots = \"64\"",
        "[node]\nslots = 64.0",
        "[node]\nslots = true",
        "[node]\nslots = [64]",
        "[node]\nslots = 0",
        "[node]\nslots = -1",
        "[node]\nslots = 99999999999999999999",
        "[node.slots]\nx = 1",
        "[node]\nid = 7",
        "[node]\ncpus = \"0-3,2\"",
        "[node]\ncpus = 3",
        "[node]\nnuma_node = -1",
        "[node]\nspeculate_step_tokens = 4097",
        "[node]\nkv_memory = \"1\"",
        "[node]\nkv_memory = \"1 elephant\"",
        "[node]\ngrpc = \"localhost\"",
        "[node]\ngrpc = \"127.0.0.1:99999\"",
        "[cluster]\nprefill = \"http://a:1\"",
        "[cluster]\nprefill = [1]",
        "[cluster]\nprefill = [\"https://a:1\"]",
        "[cluster]\netcd = [\"ftp://a:1\"]",
        "[cluster]\netcd_prefix = \"a b\"",
        "[cluster]\netcd_ttl = \"1s\"",
        "[telemetry]\nlog = \"\"",
    ] {
        let message = refusal(text, &[], &[]);
        assert!(message.starts_with("invalid ") && message.contains("allowed: "), "{message}");
        assert!(!message.contains('\n'), "one clear line: {message}");
    }
}

#[test]
fn invalid_values_of_lower_precedence_are_rejected() {
    let message = refusal("[node]\nslots = 0\n", &[], &[("node.slots", "8")]);
    assert!(message.starts_with("invalid node.slots: 0 "), "{message}");
}

#[test]
fn all_problems_are_reported_together() {
    let text = "[node]\nslots = 0\nstep_token = 1\n[cluser]\n";
    let error = load(text, &[("BATON_ROUTER_TIMEOUT", "soon")], &[]).unwrap_err();
    assert_eq!(error.problems.len(), 4, "{error}");
}

#[test]
fn values_that_do_not_fit_each_other_are_refused_with_their_sources() {
    let ngram = refusal("[node]\nspeculate_ngram_min = 9\n", &[], &[]);
    assert!(ngram.contains("node.speculate_ngram_max (default) = 8"), "{ngram}");
    let chunk = refusal("[node]\nchunk_tokens = 1024\n", &[], &[("node.step_tokens", "512")]);
    assert!(chunk.contains("node.chunk_tokens (") && chunk.contains("line 2"), "{chunk}");
    assert!(chunk.contains("node.step_tokens (flag --node-step-tokens) = 512"), "{chunk}");
    let many: Vec<_> = (0..65).map(|index| format!("a{index}=x")).collect();
    let many = many.join(",");
    for (flags, named) in [
        (vec![("node.slots", "1024"), ("node.step_tokens", "512")], "node.step_tokens"),
        (vec![("node.cpus", "0-1,4"), ("node.threads", "4")], "the 3 CPUs of node.cpus"),
        (vec![("node.cpus", "0-1"), ("node.numa_node", "0")], "give one"),
        (
            vec![("model.adapters", "a=x,b=y"), ("model.adapter_slots", "1")],
            "has 2 adapters, more than model.adapter_slots (flag --model-adapter-slots) = 1",
        ),
        (vec![("model.adapters", &many)], "has 65 adapters, more than model.adapter_slots"),
        (vec![("router.timeout", "2h")], "router.timeout_max"),
        (vec![("transfer.control", "0.0.0.0:7000")], "transfer.advertise"),
        (vec![("cluster.prefill", "a:1"), ("cluster.decode", "a:1")], "http://a:1"),
    ] {
        let message = refusal("", &[], &flags);
        assert!(message.contains(named), "{message}");
    }
}

#[test]
fn duplicate_and_unknown_model_names_are_rejected() {
    let models = [("model.path", "m/first.gguf"), ("router.models", "second=m/2.gguf,third=m/3")];
    // `baton up` finds the first model after it has read the settings.
    load("", &[], &[("router.aliases", "latest=first")]).unwrap();
    let with = |key, value| [&models[..], &[(key, value)]].concat();
    let config = load("", &[], &with("router.aliases", "latest=second,best=first")).unwrap();
    assert_eq!((config.router.models.len(), config.router.aliases.len()), (2, 2));
    for (flags, words) in [
        (with("router.models", "first=x"), ["router.models", "\"first\""]),
        (with("router.models", "a=x,a=y"), ["router.models", "\"a\""]),
        (with("router.aliases", "latest=fourth"), ["fourth", "first, second, third"]),
        (with("router.aliases", "latest=second,latest=third"), ["latest=third", "taken"]),
        (with("router.aliases", "first=second"), ["first=second", "taken"]),
        // An alias must name a model, not another alias.
        (with("router.aliases", "a=second,b=a"), ["b=a", "no model"]),
        (with("router.aliases", "second"), ["router.aliases", "NAME=VALUE"]),
        (with("router.tool_formats", "second=xml"), ["second=xml", "auto, deepseek_v3, "]),
        (with("router.reasoning_formats", "second=xml"), ["second=xml", "auto, none, think, "]),
        // The first model has model.tool_format.
        (with("router.tool_formats", "first=hermes"), ["first=hermes", "second, third"]),
        (with("router.chat_templates", "fourth=x"), ["router.chat_templates", "second, third"]),
        (with("router.chat_templates", "third=x,third=y"), ["router.chat_templates", "twice"]),
    ] {
        let message = refusal("", &[], &flags);
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }
}

#[test]
fn etcd_settings_that_do_not_fit_each_other_are_refused_in_one_line() {
    let (http, https) = (("cluster.etcd", "a:2379"), ("cluster.etcd", "https://a:2379"));
    let ca = ("cluster.etcd_ca", "ca.pem");
    for (flags, named) in [
        (vec![http, ("cluster.decode", "b:1")], "list the nodes or use etcd"),
        (vec![http, ca], "is not https"),
        (vec![https], "cluster.etcd_ca"),
        (vec![("cluster.etcd", "a:1,https://b:1"), ca], "one scheme"),
        (vec![http, ("cluster.etcd_user", "u")], "without cluster.etcd_password"),
        (vec![http, ("cluster.etcd_password", "p")], "without cluster.etcd_user"),
        (vec![https, ca, ("cluster.etcd_key", "k")], "without cluster.etcd_cert"),
        (vec![http, ("node.grpc", "0.0.0.0:1")], "transfer.advertise"),
    ] {
        let message = refusal("", &[], &flags);
        assert!(message.contains(named) && !message.contains('\n'), "{message}");
    }
    let whole = [https, ca, ("cluster.etcd_cert", "c"), ("cluster.etcd_key", "k")];
    load("", &[], &whole).unwrap();
}

#[test]
fn unusable_configuration_files_are_rejected_with_the_reason() {
    let absent = LoadInput { file: Some("no/such.toml".into()), ..LoadInput::default() };
    assert!(matches!(
        Config::load(absent).unwrap_err().problems[..],
        [Problem::FileUnreadable { .. }]
    ));
    let not_text = file([0xff, 0xfe, 0x00]);
    let large = file(vec![b'#'; (1 << 20) + 1]);
    let folder = tempfile::tempdir().unwrap();
    for path in [not_text.path(), large.path(), folder.path()] {
        let input = LoadInput { file: Some(path.into()), ..LoadInput::default() };
        let message = Config::load(input).unwrap_err().to_string();
        assert!(message.contains(path.to_str().unwrap()), "{message}");
    }
    let broken = refusal("[node]\nslots = = 3\n", &[], &[]);
    assert!(broken.contains("line 2 is not TOML"), "{broken}");
    let twice = refusal("[node]\nslots = 3\nslots = 4\n", &[], &[]);
    assert!(twice.contains("is not TOML"), "{twice}");
}

#[test]
fn a_missing_path_names_every_way_to_give_it() {
    let message = Model::default().required_path().unwrap_err().to_string();
    let expected = "model.path is not set; give flag --model-path, environment BATON_MODEL_PATH, \
                    or the key in the file";
    assert_eq!(message, expected);
}

#[test]
fn kv_in_another_format_than_f32_activations_is_refused() {
    for kv in ["bf16", "fp8"] {
        let flags = [("model.dtype", "f32"), ("model.kv_dtype", kv)];
        let error = refusal("", &[], &flags);
        assert!(error.contains(&format!(" = {kv} with model.dtype (")), "{error}");
        assert!(load("", &[], &flags[1..]).is_ok());
    }
    assert!(load("", &[], &[("model.dtype", "f32"), ("model.kv_dtype", "auto")]).is_ok());
}
