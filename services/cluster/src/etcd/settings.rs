//! Settings for connecting to etcd, taken from the configuration.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use config::Password;

/// Maximum size of a PEM file in bytes; a certificate chain has a few KiB.
const PEM_BYTES_MAX: u64 = 1 << 20;

/// Endpoints, credentials and key prefix.
#[derive(Clone)]
pub struct EtcdSettings {
    pub(super) endpoints: Vec<String>,
    /// Key prefix without a trailing slash.
    pub(super) prefix: String,
    pub(super) user: Option<(String, Password)>,
    pub(super) tls: Option<Tls>,
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
    #[error("{key} = {path}: {reason}", path = path.display())]
    File { key: &'static str, path: PathBuf, reason: io::Error },
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
            tls: Tls::read(cluster)?,
            ttl: cluster.etcd_ttl,
        }))
    }

    /// Returns the endpoints as text for messages.
    pub(super) fn endpoints(&self) -> String {
        self.endpoints.join(",")
    }
}

impl Tls {
    fn read(cluster: &config::Cluster) -> Result<Option<Self>, EtcdError> {
        if !cluster.etcd.iter().any(config::ServerUrl::is_https) {
            return Ok(None);
        }
        let ca = pem("cluster.etcd_ca", cluster.etcd_ca.as_deref())?;
        let identity = match (&cluster.etcd_cert, &cluster.etcd_key) {
            (None, None) => None,
            (cert, key) => Some((
                pem("cluster.etcd_cert", cert.as_deref())?,
                pem("cluster.etcd_key", key.as_deref())?,
            )),
        };
        Ok(Some(Self { ca, identity }))
    }
}

fn pem(key: &'static str, path: Option<&Path>) -> Result<Vec<u8>, EtcdError> {
    let path = path.ok_or(EtcdError::Missing { key })?;
    let wrong = |reason| EtcdError::File { key, path: path.to_owned(), reason };
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(PEM_BYTES_MAX).read_to_end(&mut bytes))
        .map_err(wrong)?;
    // The TLS library validates PEM blocks but accepts a file without any.
    if !bytes.windows(11).any(|window| window == b"-----BEGIN ") {
        return Err(wrong(io::Error::new(io::ErrorKind::InvalidData, "the file has no PEM block")));
    }
    Ok(bytes)
}
