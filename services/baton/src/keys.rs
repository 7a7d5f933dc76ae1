//! `baton keys new` makes an API key.

use std::fmt::Write;

use anyhow::{Context, Result};
use clap::Subcommand;
use ring::digest::{SHA256, digest};

const KEY_BYTES: usize = 32;

#[derive(Subcommand)]
pub enum KeysCommand {
    /// Creates an API key. Prints the key to standard error, once, and its entry for the file of
    /// router.keys or router.admin_keys to standard output.
    New {
        /// Name of the key in metrics and logs: letters, digits, '.', '_' and '-', at most 64
        /// characters.
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
    getrandom::fill(&mut random).context("cannot generate a key: no random numbers")?;
    let key = format!("baton-{}", hex(&random));
    eprintln!("API key, shown only now: {key}");
    print!("{}", entry(&name, &key));
    Ok(())
}

fn entry(name: &str, key: &str) -> String {
    let hash = hex(digest(&SHA256, key.as_bytes()).as_ref());
    format!("[[key]]\nname = \"{name}\"\nsha256 = \"{hash}\"\n")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
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
}
