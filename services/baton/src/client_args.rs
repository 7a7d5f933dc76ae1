//! Flags of the commands that call a router: the API key and the CA certificates of TLS.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context, Error, Result, ensure};
use clap::Args;
use credentials::{SettingFile, client_config, client_config_for};
use http::HeaderValue;

use crate::{connector::Connector, http_client::HttpClient};

/// Variable with the key.
const VARIABLE: &str = "BATON_API_KEY";

/// Flags of commands that call a router.
#[derive(Args, Clone, Default)]
pub(crate) struct ClientArgs {
    /// File with the API key for the router. Without the flag the variable BATON_API_KEY has the
    /// key, if the router needs one.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// PEM file with the CA certificates to trust for https URLs. [default: Mozilla's root
    /// certificates]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// PEM file with the router's certificate, the only one to trust for https URLs. Its names need
    /// not match the URL.
    #[arg(long, value_name = "FILE", conflicts_with = "ca")]
    server_cert: Option<PathBuf>,
}

impl ClientArgs {
    /// Returns the client that sends the key. The time-out is that of a connection.
    pub(crate) fn client(&self, connect_timeout: Duration) -> Result<HttpClient> {
        Ok(HttpClient::new(self.connector(connect_timeout)?).with_key(self.authorization()?))
    }

    pub(crate) fn connector(&self, connect_timeout: Duration) -> Result<Connector> {
        let connector = Connector::new(connect_timeout);
        let tls = match (&self.ca, &self.server_cert) {
            (Some(ca), _) => client_config(Some(&SettingFile::new("--ca", ca))),
            (None, Some(cert)) => client_config_for(&SettingFile::new("--server-cert", cert)),
            (None, None) => return Ok(connector),
        };
        Ok(connector.with_tls(tls.map_err(Error::msg)?))
    }

    /// Returns the value of the header `authorization`.
    pub(crate) fn authorization(&self) -> Result<Option<HeaderValue>> {
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
    fn key_is_read_from_a_file_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let args = ClientArgs { api_key_file: Some(path.clone()), ..ClientArgs::default() };
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
