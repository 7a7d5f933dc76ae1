//! Tests that secrets are loaded and never shown.

use std::{fs, os::unix::fs::PermissionsExt};

use config::{Cluster, Section};

use crate::{file, load, refusal};

const SECRET: &str = "correct-horse-battery-staple";

#[test]
fn a_secret_is_not_in_any_output() {
    let toml = format!("[cluster]\nsecret = \"{SECRET}\"\n");
    let config = load(&toml, &[], &[]).unwrap();
    assert_eq!(config.cluster.required_secret().unwrap().reveal(), SECRET);
    let outputs = [format!("{config:?}"), format!("{config:#?}"), config.explain(Section::ALL)];
    for output in outputs {
        assert!(!output.contains("horse"), "{output}");
        assert!(output.contains("(hidden)"), "{output}");
    }
}

#[test]
fn a_secret_is_not_in_any_error() {
    let too_short = refusal("[cluster]\nsecret = \"horse\"\n", &[], &[]);
    let wrong_type = refusal("[cluster]\nsecret = [\"horse\"]\n", &[], &[]);
    let bad_toml = refusal("[cluster]\nsecret = \"horse\n", &[], &[]);
    let bad_toml_after = refusal("[cluster]\nsecret = \"horse\" x\n", &[], &[]);
    let variable = refusal("", &[("BATON_CLUSTER_SECRET", "horse")], &[]);
    let flag = refusal("", &[], &[("cluster.secret", "horse")]);
    for message in [too_short, wrong_type, bad_toml, bad_toml_after, variable, flag] {
        assert!(!message.contains("horse"), "{message}");
    }
}

#[test]
fn a_password_of_any_length_is_read_and_never_shown() {
    let config = load("[cluster]\netcd_password = \"horse\"\n", &[], &[]).unwrap();
    assert_eq!(config.cluster.etcd_password.as_ref().unwrap().reveal(), "horse");
    let wrong_type = refusal("[cluster]\netcd_password = [\"horse\"]\n", &[], &[]);
    for shown in [format!("{config:?}"), config.explain(Section::ALL), wrong_type] {
        assert!(!shown.contains("horse"), "{shown}");
    }
}

#[test]
fn a_secret_file_is_read_without_its_line_end() {
    let file = file(format!("{SECRET}\n"));
    let cluster = Cluster { secret_file: Some(file.path().into()), ..Cluster::default() };
    assert_eq!(cluster.required_secret().unwrap().reveal(), SECRET);
}

#[test]
fn file_with_a_secret_for_every_user_is_reported_with_its_mode() {
    let file = file(SECRET);
    let path = file.path().to_str().unwrap();
    let warnings = |key: &str, mode: u32| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let cert = [("router.tls_cert", "/cert.pem"), ("cluster.tls_cert", "/cert.pem")];
        let section = key.split('.').next().unwrap();
        let mut flags = vec![(key, path)];
        flags.extend(cert.iter().filter(|(key, _)| key.starts_with(section)));
        if key.starts_with("cluster") {
            flags.extend([("cluster.tls_ca", "/ca.pem"), ("cluster.tls_key", "/key.pem")]);
        }
        if key == "cluster.tls_key" {
            flags.retain(|flag| *flag != ("cluster.tls_key", "/key.pem"));
        }
        if key == "cluster.etcd_key" {
            flags.extend([("cluster.etcd", "https://a:1"), ("cluster.etcd_ca", "/ca.pem")]);
            flags.push(("cluster.etcd_cert", "/cert.pem"));
        }
        load("", &[], &flags).unwrap().warnings().to_vec()
    };
    for key in ["cluster.secret_file", "cluster.tls_key", "cluster.etcd_key", "router.tls_key"] {
        for mode in [0o600, 0o640, 0o400] {
            assert_eq!(warnings(key, mode), [""; 0], "{key}");
        }
        for mode in [0o644, 0o604, 0o602, 0o666] {
            let [warning] = &warnings(key, mode)[..] else { panic!("{key} {mode:o}") };
            for words in [key, path, &format!("has mode {mode:04o}")] {
                assert!(warning.contains(words), "{warning:?} lacks {words:?}");
            }
            assert!(!warning.contains("horse"), "{warning}");
        }
    }
    // The reader of the file reports a missing file.
    let missing = [("cluster.secret_file", "/nowhere/secret")];
    assert!(load("", &[], &missing).unwrap().warnings().is_empty());
}

#[test]
fn missing_or_short_secret_error_names_the_settings() {
    let none = Cluster::default().required_secret().unwrap_err().to_string();
    assert!(none.contains("cluster.secret_file is not set"), "{none}");
    let short = file("horse");
    let cluster = Cluster { secret_file: Some(short.path().into()), ..Cluster::default() };
    let message = cluster.required_secret().unwrap_err().to_string();
    assert!(message.contains("at least 16 bytes") && !message.contains("horse"), "{message}");
    let path = short.path().to_str().unwrap();
    let both = refusal("", &[], &[("cluster.secret", SECRET), ("cluster.secret_file", path)]);
    assert!(both.contains("are both set"), "{both}");
}
