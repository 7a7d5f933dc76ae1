//! Tests that secrets are loaded and never shown.

use config::{Section, Transfer};

use crate::{file, load, refusal};

const SECRET: &str = "correct-horse-battery-staple";

#[test]
fn a_secret_is_not_in_any_output() {
    let toml = format!("[transfer]\nsecret = \"{SECRET}\"\n");
    let config = load(&toml, &[], &[]).unwrap();
    assert_eq!(config.transfer.required_secret().unwrap().reveal(), SECRET);
    let outputs = [format!("{config:?}"), format!("{config:#?}"), config.explain(Section::ALL)];
    for output in outputs {
        assert!(!output.contains("horse"), "{output}");
        assert!(output.contains("(hidden)"), "{output}");
    }
}

#[test]
fn a_secret_is_not_in_any_error() {
    let too_short = refusal("[transfer]\nsecret = \"horse\"\n", &[], &[]);
    let wrong_type = refusal("[transfer]\nsecret = [\"horse\"]\n", &[], &[]);
    let bad_toml = refusal("[transfer]\nsecret = \"horse\n", &[], &[]);
    let bad_toml_after = refusal("[transfer]\nsecret = \"horse\" x\n", &[], &[]);
    let variable = refusal("", &[("BATON_TRANSFER_SECRET", "horse")], &[]);
    let flag = refusal("", &[], &[("transfer.secret", "horse")]);
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
    let transfer = Transfer { secret_file: Some(file.path().into()), ..Transfer::default() };
    assert_eq!(transfer.required_secret().unwrap().reveal(), SECRET);
}

#[test]
fn missing_or_short_secret_error_names_the_settings() {
    let none = Transfer::default().required_secret().unwrap_err().to_string();
    assert!(none.contains("transfer.secret_file is not set"), "{none}");
    let short = file("horse");
    let transfer = Transfer { secret_file: Some(short.path().into()), ..Transfer::default() };
    let message = transfer.required_secret().unwrap_err().to_string();
    assert!(message.contains("at least 16 bytes") && !message.contains("horse"), "{message}");
    let path = short.path().to_str().unwrap();
    let both = refusal("", &[], &[("transfer.secret", SECRET), ("transfer.secret_file", path)]);
    assert!(both.contains("are both set"), "{both}");
}
