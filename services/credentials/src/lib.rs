//! Certificates for TLS, and values from files that are read again after a change.
//!
//! [`Reloaded`] keeps a value that was made from files and replaces it when the files change.
//! [`server_config`] reads a server's certificate, [`client_config`] and [`client_config_for`] what
//! a client trusts, and [`ClusterTls`] both for connections between services. Sockets and
//! handshakes are left to the callers. Each error is one line with file and setting, and never
//! quotes the content of a file.

#![forbid(unsafe_code)]

mod certificate;
mod client;
mod cluster;
mod reload;

pub use certificate::server_config;
pub use client::{client_config, client_config_for};
pub use cluster::ClusterTls;
pub use reload::{Reload, ReloadOutcome, ReloadTask, Reloaded, SettingFile};
