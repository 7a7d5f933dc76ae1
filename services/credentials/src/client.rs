//! Configurations of TLS clients without a certificate of their own.

use std::sync::Arc;

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
};

use crate::{certificate::certificates, reload::SettingFile};

/// Returns the configuration of a client that trusts the CA certificates of this file, or Mozilla's
/// root certificates without a file.
pub fn client_config(authorities: Option<&SettingFile>) -> Result<ClientConfig, String> {
    let roots = match authorities {
        Some(file) => roots(file, &file.read()?)?,
        None => RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() },
    };
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// Parses the CA certificates of a file.
pub(crate) fn roots(file: &SettingFile, pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(file, pem, "CA certificates in PEM")? {
        roots.add(authority).map_err(|error| file.error(error))?;
    }
    Ok(roots)
}

/// Returns the configuration of a client that trusts one server: the owner of the first certificate
/// of this file, whatever names the certificate has.
pub fn client_config_for(cert: &SettingFile) -> Result<ClientConfig, String> {
    let chain = certificates(cert, &cert.read()?, "a chain in PEM, the server's first")?;
    let provider = Arc::new(ring::default_provider());
    let verifier = OneServer {
        certificate: chain.into_iter().next().expect("the chain is not empty"),
        provider: provider.clone(),
    };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let config = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
    Ok(config.with_no_client_auth())
}

/// Accepts one certificate. The signature of the handshake proves that the server has its key.
#[derive(Debug)]
struct OneServer {
    certificate: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for OneServer {
    fn verify_server_cert(
        &self,
        server: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match *server == self.certificate {
            true => Ok(ServerCertVerified::assertion()),
            false => {
                Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
            }
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
