//! API keys: `baton keys new` makes one, and the commands that call a router send one.

use std::{fmt::Write, fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use http::HeaderValue;
use sha2::{Digest, Sha256};

/// Variable with the key.
const VARIABLE: &str = "BATON_API_KEY";
const KEY_BYTES: usize = 32;

#[derive(Subcommand)]
pub enum KeysCommand {
    /// Makes an API key. Prints the key to standard error, once, and its entry for the file of router.keys or
    /// router.admin_keys to standard output.
    New {
        /// Name of the key in metrics and logs: letters, digits, '.', '_' and '-', at most 64 characters.
        #[arg(value_parser = parse_name)]
        name: String,
    },
}

fn parse_name(name: &str) -> Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let is_valid = (1..=64).contains(&name.len()) && name.bytes().all(plain);
    let allowed = "expected 1 to 64 letters, digits, '.', '_' and '-'";
    is_valid.then(|| name.to_owned()).ok_or_else(|| allowed.to_owned())
}

pub fn run(command: KeysCommand) -> Result<()> {
    let KeysCommand::New { name } = command;
    let mut random = [0; KEY_BYTES];
    getrandom::fill(&mut random).context("the system has no randomness")?;
    let key = format!("baton-{}", hex(&random));
    eprintln!("API key, shown only now: {key}");
    print!("{}", entry(&name, &key));
    Ok(())
}

fn entry(name: &str, key: &str) -> String {
    let hash = hex(&Sha256::digest(key));
    format!("[[key]]\nname = \"{name}\"\nsha256 = \"{hash}\"\n")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Flags of commands that call a router.
#[derive(Args, Clone, Default)]
pub struct ApiKeyArgs {
    /// File with the API key for the router. Without the flag the variable BATON_API_KEY has the key, if the router
    /// needs one.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
}

impl ApiKeyArgs {
    /// Returns the value of the header `authorization`.
    pub fn authorization(&self) -> Result<Option<HeaderValue>> {
        let (source, key) = match &self.api_key_file {
            Some(file) => {
                let key = fs::read_to_string(file)
                    .with_context(|| format!("cannot read --api-key-file {}", file.display()))?;
                (format!("--api-key-file {}", file.display()), key)
            }
            None => match std::env::var(VARIABLE) {
                Ok(key) => (VARIABLE.to_owned(), key),
                Err(std::env::VarError::NotPresent) => return Ok(None),
                Err(error) => return Err(error).context(VARIABLE),
            },
        };
        let key = key.trim();
        let is_visible = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
        ensure!(is_visible, "invalid {source}: expected a key of visible ASCII characters");
        let mut value = HeaderValue::try_from(format!("Bearer {key}"))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_has_the_hash_of_the_key() {
        let hash = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let expected = format!("[[key]]\nname = \"team-a\"\nsha256 = \"{hash}\"\n");
        assert_eq!(entry("team-a", "abc"), expected);
        assert!(parse_name("team-a").is_ok());
        assert!(parse_name("a b").is_err() && parse_name("").is_err() && parse_name("\"").is_err());
    }

    #[test]
    fn key_is_read_from_a_file_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let args = ApiKeyArgs { api_key_file: Some(path.clone()) };
        let missing = args.authorization().unwrap_err().to_string();
        assert!(missing.starts_with("cannot read --api-key-file"), "{missing}");
        fs::write(&path, "baton-1\n").unwrap();
        let value = args.authorization().unwrap().unwrap();
        assert_eq!(
            (value.as_bytes(), format!("{value:?}").as_str()),
            (&b"Bearer baton-1"[..], "Sensitive")
        );
        fs::write(&path, "se cret").unwrap();
        let invalid = args.authorization().unwrap_err().to_string();
        assert!(invalid.contains("visible ASCII") && !invalid.contains("cret"), "{invalid}");
    }
}
