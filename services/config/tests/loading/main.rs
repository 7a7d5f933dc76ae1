//! Loading as a service does it, from maps instead of the process.

mod command_line;
mod precedence;
mod refusals;
mod schema;
mod secrets;

use std::{collections::BTreeMap, io::Write};

use config::{Config, ConfigError, LoadInput};
use tempfile::NamedTempFile;

/// Creates a file that lives as long as the test.
fn file(text: impl AsRef<[u8]>) -> NamedTempFile {
    let mut file = NamedTempFile::with_suffix(".toml").unwrap();
    file.write_all(text.as_ref()).unwrap();
    file
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
}

/// Loads a configuration. `flags` have keys such as `node.slots`.
fn load(
    text: &str,
    environment: &[(&str, &str)],
    flags: &[(&str, &str)],
) -> Result<Config, ConfigError> {
    let file = file(text);
    Config::load(LoadInput {
        file: Some(file.path().into()),
        environment: map(environment),
        flags: map(flags),
    })
}

/// Returns the message of a configuration that must not load.
fn refusal(text: &str, environment: &[(&str, &str)], flags: &[(&str, &str)]) -> String {
    match load(text, environment, flags) {
        Ok(_) => panic!("the configuration loaded"),
        Err(error) => error.to_string(),
    }
}
