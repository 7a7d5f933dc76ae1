//! Certificate chains and private keys from PEM files, and the checks of both.

use std::sync::Arc;

use rustls::{
    CertificateError, Error, InconsistentKeys, RootCertStore, ServerConfig,
    client::verify_server_cert_signed_by_trust_anchor,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::ParsedCertificate,
    sign::{CertifiedKey, SingleCertAndKey},
};

use crate::reload::SettingFile;

/// Returns the configuration of a server whose clients have no certificate. `protocols` are those
/// of ALPN.
pub fn server_config(
    (cert_file, cert): (&SettingFile, &[u8]),
    (key_file, key): (&SettingFile, &[u8]),
    protocols: &[&[u8]],
    now: UnixTime,
) -> Result<ServerConfig, String> {
    let certified = certified_key((cert_file, cert), (key_file, key), now)?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(config)
}

/// Parses the certificates of a file.
pub(crate) fn certificates(
    file: &SettingFile,
    pem: &[u8],
    expected: &str,
) -> Result<Vec<CertificateDer<'static>>, String> {
    // The errors of the PEM parser may quote a line of the file.
    CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .ok()
        .filter(|chain: &Vec<_>| !chain.is_empty())
        .ok_or_else(|| file.error(format_args!("no certificate; expected {expected}")))
}

/// Parses chain and key. Checks that the first certificate is valid now and that the key belongs to
/// it.
pub(crate) fn certified_key(
    (cert_file, cert): (&SettingFile, &[u8]),
    (key_file, key): (&SettingFile, &[u8]),
    now: UnixTime,
) -> Result<CertifiedKey, String> {
    let chain = certificates(cert_file, cert, "a chain in PEM, the server's first")?;
    check_validity(&chain[0], now).map_err(|problem| cert_file.error(problem))?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| {
        key_file
            .error("no private key; expected an unencrypted key in PEM (PKCS#8, PKCS#1 or SEC1)")
    })?;
    let key = ring::default_provider().key_provider.load_private_key(key).map_err(|_| {
        key_file.error("unsupported private key; expected RSA, ECDSA P-256 or P-384, or Ed25519")
    })?;
    let certified = CertifiedKey::new(chain, key);
    match certified.keys_match() {
        Ok(()) => Ok(certified),
        Err(Error::InconsistentKeys(InconsistentKeys::KeyMismatch)) => {
            let (setting, cert) = (cert_file.setting, cert_file.path.display());
            Err(key_file.error(format_args!(
                "the key belongs to another certificate; expected the key of {setting} {cert}"
            )))
        }
        Err(error) => Err(cert_file.error(error)),
    }
}

/// Checks the period in which the certificate is valid.
fn check_validity(cert: &CertificateDer<'_>, now: UnixTime) -> Result<(), String> {
    let parsed = ParsedCertificate::try_from(cert).map_err(|error| error.to_string())?;
    // Without trusted CAs no certificate passes, but the verifier checks the period first.
    let none = RootCertStore::empty();
    let algorithms = ring::default_provider().signature_verification_algorithms.all;
    let verified = verify_server_cert_signed_by_trust_anchor(&parsed, &none, &[], now, algorithms);
    let days =
        |from: UnixTime, to: UnixTime| to.as_secs().saturating_sub(from.as_secs()).div_ceil(86_400);
    match verified {
        Err(Error::InvalidCertificate(CertificateError::ExpiredContext { time, not_after })) => {
            let days = days(not_after, time);
            Err(format!(
                "the certificate expired within the last {days} days; expected a valid one"
            ))
        }
        Err(Error::InvalidCertificate(CertificateError::NotValidYetContext {
            time,
            not_before,
        })) => {
            let days = days(time, not_before);
            Err(format!("the certificate becomes valid within {days} days; expected a valid one"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, time::Duration};

    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    /// Returns certificate and key in PEM.
    fn pair(change: impl FnOnce(&mut CertificateParams)) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        change(&mut params);
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    #[test]
    fn invalid_certificate_or_key_is_rejected_with_its_file_and_setting() {
        let now = UnixTime::since_unix_epoch(Duration::from_secs(1_750_000_000));
        let (cert, key) = pair(|_| {});
        let (other_cert, _) = pair(|_| {});
        let (expired, expired_key) = pair(|it| it.not_after = date_time_ymd(2025, 6, 10));
        let (early, early_key) = pair(|it| it.not_before = date_time_ymd(2025, 7, 1));
        let garbage = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_owned();
        let file = |setting, path: &str| SettingFile::new(setting, Path::new(path));
        let (cert_file, key_file) =
            (file("router.tls_cert", "/c.pem"), file("router.tls_key", "/k.pem"));
        let read = |cert: &str, key: &str| {
            server_config((&cert_file, cert.as_bytes()), (&key_file, key.as_bytes()), &[], now)
        };
        read(&cert, &key).unwrap();
        // A file may have text around the PEM, and the key in the same file.
        let both = format!("text\n{cert}{key}");
        read(&both, &both).unwrap();
        let no_key = "invalid router.tls_key /k.pem: no private key";
        for (cert, key, expected) in [
            (&key, &key, "invalid router.tls_cert /c.pem: no certificate"),
            (&"x".to_owned(), &key, "invalid router.tls_cert /c.pem: no certificate"),
            (
                &cert.replace("-----END", "-----"),
                &key,
                "invalid router.tls_cert /c.pem: no certificate",
            ),
            (&garbage, &key, "invalid router.tls_cert /c.pem: "),
            (&cert, &cert, no_key),
            (&cert, &key.replace("-----END", "-----"), no_key),
            (
                &other_cert,
                &key,
                "invalid router.tls_key /k.pem: the key belongs to another certificate; expected the key of router.tls_cert /c.pem",
            ),
            (
                &expired,
                &expired_key,
                "invalid router.tls_cert /c.pem: the certificate expired within the last 6 days",
            ),
            (
                &early,
                &early_key,
                "invalid router.tls_cert /c.pem: the certificate becomes valid within 16 days",
            ),
        ] {
            let error = read(cert, key).expect_err(expected);
            assert!(error.starts_with(expected), "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }
}
