//! Settings for connecting to etcd, taken from the configuration.

use std::{path::PathBuf, sync::Arc, time::Duration};

use config::Password;
use credentials::{Reload, ReloadOutcome, Reloaded, SettingFile};

/// Endpoints, credentials and key prefix.
#[derive(Clone)]
pub struct EtcdSettings {
    pub(super) endpoints: Vec<String>,
    /// Key prefix without a trailing slash.
    pub(super) prefix: String,
    pub(super) user: Option<(String, Password)>,
    tls: Option<Arc<Reloaded<Tls>>>,
    /// Lease time of a record.
    pub(super) ttl: Duration,
}

/// Contents of the PEM files.
#[derive(Clone)]
pub(super) struct Tls {
    pub ca: Vec<u8>,
    /// Certificate and key.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

/// Error of the etcd settings or credentials. An unreachable etcd is not an error here.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// A PEM file is missing or invalid.
    #[error("{0}")]
    File(String),
    #[error("{key} is not set; cluster.etcd requires it")]
    Missing { key: &'static str },
    #[error(
        "cluster.etcd = {endpoints} refuses {user}: {reason}; check cluster.etcd_user and cluster.etcd_password"
    )]
    Refused { endpoints: String, user: String, reason: String },
    #[error("cluster.etcd = {endpoints} is not trusted: {reason}; check cluster.etcd_ca")]
    Untrusted { endpoints: String, reason: String },
    #[error("cluster.etcd = {endpoints} cannot be used: {reason}")]
    Unusable { endpoints: String, reason: String },
    #[error("the operating system gave no random bits: {reason}")]
    NoRandomness { reason: String },
}

impl EtcdSettings {
    /// Reads the settings and PEM files. Returns `None` for a static list of members.
    pub fn read(cluster: &config::Cluster) -> Result<Option<Self>, EtcdError> {
        if cluster.etcd.is_empty() {
            return Ok(None);
        }
        let user = match (&cluster.etcd_user, &cluster.etcd_password) {
            (None, _) => None,
            (Some(_), None) => return Err(EtcdError::Missing { key: "cluster.etcd_password" }),
            (Some(user), Some(password)) => Some((user.clone(), password.clone())),
        };
        Ok(Some(Self {
            endpoints: cluster.etcd.iter().map(|url| url.as_str().to_owned()).collect(),
            prefix: cluster.etcd_prefix.as_str().to_owned(),
            user,
            tls: read_tls(cluster)?,
            ttl: cluster.etcd_ttl,
        }))
    }

    /// Reads the PEM files again, because certificates are replaced before they expire. Returns
    /// their last valid contents.
    pub(super) async fn tls(&self) -> Option<Arc<Tls>> {
        let tls = self.tls.clone()?;
        let files = tls.clone();
        match tokio::task::spawn_blocking(move || files.reload()).await {
            Ok(ReloadOutcome::Replaced) => {
                tracing::info!(settings = tls.settings(), "reloaded files");
            }
            Ok(ReloadOutcome::Invalid(error)) => {
                tracing::warn!("{error}; the previous content stays in use");
            }
            // The call fails only if the runtime stops.
            Ok(ReloadOutcome::Unchanged) | Err(_) => {}
        }
        Some(tls.current())
    }

    /// Returns the endpoints as text for messages.
    pub(super) fn endpoints(&self) -> String {
        self.endpoints.join(",")
    }
}

fn read_tls(cluster: &config::Cluster) -> Result<Option<Arc<Reloaded<Tls>>>, EtcdError> {
    if !cluster.etcd.iter().any(config::ServerUrl::is_https) {
        return Ok(None);
    }
    let file = |key: &'static str, path: &Option<PathBuf>| match path {
        Some(path) => Ok(SettingFile::new(key, path)),
        None => Err(EtcdError::Missing { key }),
    };
    let mut files = vec![file("cluster.etcd_ca", &cluster.etcd_ca)?];
    if cluster.etcd_cert.is_some() || cluster.etcd_key.is_some() {
        files.push(file("cluster.etcd_cert", &cluster.etcd_cert)?);
        files.push(file("cluster.etcd_key", &cluster.etcd_key)?);
    }
    let tls = Reloaded::read(files, parse_tls).map_err(EtcdError::File)?;
    Ok(Some(Arc::new(tls)))
}

fn parse_tls(
    files: &[SettingFile],
    contents: &[Vec<u8>],
    _before: Option<&Tls>,
) -> Result<Tls, String> {
    for (file, content) in files.iter().zip(contents) {
        // The TLS library validates PEM blocks but accepts a file without any.
        if !content.windows(11).any(|window| window == b"-----BEGIN ") {
            return Err(file.error("the file has no PEM block"));
        }
    }
    let identity = contents.get(1).cloned().zip(contents.get(2).cloned());
    Ok(Tls { ca: contents[0].clone(), identity })
}
