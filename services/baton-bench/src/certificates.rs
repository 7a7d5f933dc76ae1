//! `baton-bench certificates`: the certificate of a CA and a certificate that it signs, for
//! measurements with TLS.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Error, Result};
use clap::Args;
use credentials::{ClusterTls, Reloaded};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// The names of the certificate: a host for clients, and the cluster.
pub(crate) const NAMES: [&str; 2] = ["localhost", "baton"];

#[derive(Args)]
pub(crate) struct CertificatesArgs {
    /// Folder for ca.crt, tls.crt and tls.key.
    folder: PathBuf,
}

pub(crate) fn run(args: CertificatesArgs) -> Result<()> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let names = NAMES.map(str::to_owned);
    let cert = CertificateParams::new(names)?.signed_by(&key, &authority)?;
    fs::create_dir_all(&args.folder)?;
    let [ca_file, cert_file, key_file] = files(&args.folder);
    for (file, pem) in
        [(ca_file, authority.pem()), (cert_file, cert.pem()), (key_file, key.serialize_pem())]
    {
        fs::write(&file, pem).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

/// Returns the files of CA certificate, certificate and key.
pub(crate) fn files(folder: &Path) -> [PathBuf; 3] {
    ["ca.crt", "tls.crt", "tls.key"].map(|name| folder.join(name))
}

/// Reads the certificate as that of a cluster.
pub(crate) fn cluster_tls(folder: &Path) -> Result<Arc<Reloaded<ClusterTls>>> {
    let [ca, cert, key] = files(folder);
    ClusterTls::read(&cert, &key, &ca, NAMES[1]).map(Arc::new).map_err(Error::msg)
}
