//! Mutual TLS between the services of a cluster.
//!
//! All services present a certificate of the same CAs, and each certificate has the cluster's name.
//! The name stands for membership: addresses of nodes change, and a CA may also sign certificates
//! of services that are not members.

use std::{path::Path, sync::Arc};

use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, ServerConfig,
    SignatureScheme,
    client::{
        Resumption, danger::HandshakeSignatureValid, verify_server_cert_signed_by_trust_anchor,
        verify_server_name,
    },
    crypto::ring,
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::{CertifiedKey, SingleCertAndKey},
    version::TLS13,
};

use crate::{
    certificate::certified_key,
    client::roots,
    reload::{Reloaded, SettingFile},
};

const CERT: &str = "cluster.tls_cert";
const KEY: &str = "cluster.tls_key";
const CA: &str = "cluster.tls_ca";

/// Configurations of both ends of a connection between two services. Both present and require a
/// certificate.
#[derive(Debug)]
pub struct ClusterTls {
    /// The name that every certificate of the cluster has.
    pub name: ServerName<'static>,
    pub server: Arc<ServerConfig>,
    pub client: Arc<ClientConfig>,
}

impl ClusterTls {
    /// Reads certificate, key and CA certificates. The error names file and setting.
    pub fn read(cert: &Path, key: &Path, ca: &Path, name: &str) -> Result<Reloaded<Self>, String> {
        let name = ServerName::try_from(name.to_owned())
            .map_err(|_| format!("invalid cluster.tls_name {name:?}; expected a DNS name"))?;
        let files = [(CERT, cert), (KEY, key), (CA, ca)];
        let files = files.map(|(setting, path)| SettingFile::new(setting, path)).into();
        Reloaded::read(files, move |files, contents, _| {
            let [cert, key, ca] = [0, 1, 2].map(|index| (&files[index], &contents[index][..]));
            Self::new(cert, key, ca, &name, UnixTime::now())
        })
    }

    fn new(
        cert: (&SettingFile, &[u8]),
        key: (&SettingFile, &[u8]),
        ca: (&SettingFile, &[u8]),
        name: &ServerName<'static>,
        now: UnixTime,
    ) -> Result<Self, String> {
        let certified = certified_key(cert, key, now)?;
        let roots = Arc::new(roots(ca.0, ca.1)?);
        let provider = Arc::new(ring::default_provider());
        let inner =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let inner = inner.map_err(|error| ca.0.error(error))?;
        check_own(&certified, &roots, &*inner, name, now)
            .map_err(|problem| cert.0.error(problem))?;
        let certified = Arc::new(SingleCertAndKey::from(certified));
        let verifier = Arc::new(MemberVerifier { inner, name: name.clone() });
        let supported = |error: Error| error.to_string();
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(supported)?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(certified.clone());
        // Some gRPC clients accept only a server that offers HTTP/2. Clients of other protocols
        // name none.
        server.alpn_protocols = vec![b"h2".to_vec()];
        // Every connection checks the certificates, and a server sends nothing of its own accord.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(supported)?
            .with_root_certificates(roots)
            .with_client_cert_resolver(certified);
        client.resumption = Resumption::disabled();
        Ok(Self { name: name.clone(), server: Arc::new(server), client: Arc::new(client) })
    }
}

/// Checks that the peers of this service will accept its certificate.
fn check_own(
    certified: &CertifiedKey,
    roots: &RootCertStore,
    clients: &dyn ClientCertVerifier,
    name: &ServerName<'_>,
    now: UnixTime,
) -> Result<(), String> {
    let (own, intermediates) = certified.cert.split_first().expect("the chain is not empty");
    let own = ParsedCertificate::try_from(own).map_err(|error| error.to_string())?;
    let provider = ring::default_provider();
    let algorithms = provider.signature_verification_algorithms.all;
    verify_server_cert_signed_by_trust_anchor(&own, roots, intermediates, now, algorithms)
        .map_err(|error| format!("{error}; expected a certificate of a CA in {CA}"))?;
    clients
        .verify_client_cert(&certified.cert[0], intermediates, now)
        .map_err(|error| format!("{error}; expected a certificate for servers and clients"))?;
    verify_server_name(&own, name).map_err(|_| {
        let name = name.to_str();
        format!("the certificate lacks the name {name:?} of cluster.tls_name; expected it in the subject alternative names")
    })
}

/// Verifies that a client's certificate is signed by a CA of the cluster and has the cluster's
/// name.
#[derive(Debug)]
struct MemberVerifier {
    inner: Arc<dyn ClientCertVerifier>,
    name: ServerName<'static>,
}

impl ClientCertVerifier for MemberVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        client: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.inner.verify_client_cert(client, intermediates, now)?;
        verify_server_name(&ParsedCertificate::try_from(client)?, &self.name)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::{io, time::Duration};

    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa,
        KeyPair, date_time_ymd,
    };
    use rustls::{ClientConnection, ServerConnection};

    use super::*;

    const NAME: &str = "baton";

    fn authority() -> CertifiedIssuer<'static, KeyPair> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    /// Returns certificate and key in PEM.
    fn pair(
        authority: &CertifiedIssuer<'static, KeyPair>,
        change: impl FnOnce(&mut CertificateParams),
    ) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([NAME.to_owned(), "other".to_owned()]).unwrap();
        change(&mut params);
        (params.signed_by(&key, authority).unwrap().pem(), key.serialize_pem())
    }

    fn now() -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs(1_750_000_000))
    }

    fn tls(pair: &(String, String), ca: &str, name: &str) -> Result<ClusterTls, String> {
        let file = |setting| SettingFile::new(setting, Path::new("/file.pem"));
        let (cert, key, ca_file) = (file(CERT), file(KEY), file(CA));
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let (cert, key) = ((&cert, pair.0.as_bytes()), (&key, pair.1.as_bytes()));
        ClusterTls::new(cert, key, (&ca_file, ca.as_bytes()), &name, now())
    }

    #[test]
    fn invalid_certificate_is_rejected_with_its_file_and_setting() {
        let (ours, theirs) = (authority(), authority());
        let valid = pair(&ours, |_| {});
        tls(&valid, &ours.pem(), NAME).unwrap();
        // A CA that replaces the other one.
        tls(&valid, &format!("{}{}", theirs.pem(), ours.pem()), NAME).unwrap();
        let expired = pair(&ours, |it| it.not_after = date_time_ymd(2025, 6, 10));
        let unnamed = pair(&ours, |it| it.subject_alt_names.clear());
        let server_only = pair(&ours, |it| {
            it.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        });
        let mixed = (valid.0.clone(), pair(&ours, |_| {}).1);
        for (pair, ca, name, expected) in [
            (
                &expired,
                ours.pem(),
                NAME,
                "invalid cluster.tls_cert /file.pem: the certificate expired within the last 6 days",
            ),
            (
                &valid,
                theirs.pem(),
                NAME,
                "invalid cluster.tls_cert /file.pem: invalid peer certificate: ",
            ),
            (
                &valid,
                ours.pem(),
                "third",
                "invalid cluster.tls_cert /file.pem: the certificate lacks the name \"third\" of cluster.tls_name",
            ),
            (
                &unnamed,
                ours.pem(),
                NAME,
                "invalid cluster.tls_cert /file.pem: the certificate lacks the name \"baton\"",
            ),
            (
                &server_only,
                ours.pem(),
                NAME,
                "invalid cluster.tls_cert /file.pem: invalid peer certificate: ",
            ),
            (
                &mixed,
                ours.pem(),
                NAME,
                "invalid cluster.tls_key /file.pem: the key belongs to another certificate; expected the key of cluster.tls_cert /file.pem",
            ),
            (&valid, "x".to_owned(), NAME, "invalid cluster.tls_ca /file.pem: no certificate"),
        ] {
            let error = tls(pair, &ca, name).expect_err(expected);
            assert!(error.starts_with(expected), "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
        let missing = Path::new("/nowhere/file.pem");
        let error = ClusterTls::read(missing, missing, missing, NAME).err().unwrap();
        assert!(error.starts_with("cannot read cluster.tls_cert /nowhere/file.pem: "), "{error}");
        let error = ClusterTls::read(missing, missing, missing, "a b").err().unwrap();
        assert_eq!(error, "invalid cluster.tls_name \"a b\"; expected a DNS name");
    }

    /// Connects in memory. Returns the errors of client and server.
    fn connect(client: &ClusterTls, server: &ClusterTls) -> [Option<Error>; 2] {
        connect_with(client.client.clone(), server)
    }

    fn connect_with(client: Arc<ClientConfig>, server: &ClusterTls) -> [Option<Error>; 2] {
        let mut client = ClientConnection::new(client, server.name.clone()).unwrap();
        let mut server = ServerConnection::new(server.server.clone()).unwrap();
        let mut errors = [None, None];
        for _ in 0..4 {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).unwrap();
            }
            server.read_tls(&mut io::Cursor::new(&bytes)).unwrap();
            errors[1] = errors[1].take().or(server.process_new_packets().err());
            let mut bytes = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut bytes).unwrap();
            }
            client.read_tls(&mut io::Cursor::new(&bytes)).unwrap();
            errors[0] = errors[0].take().or(client.process_new_packets().err());
        }
        errors
    }

    #[test]
    fn members_accept_only_members() {
        let (ours, theirs) = (authority(), authority());
        let member = tls(&pair(&ours, |_| {}), &ours.pem(), NAME).unwrap();
        let other_member = tls(&pair(&ours, |_| {}), &ours.pem(), NAME).unwrap();
        assert_eq!(connect(&member, &other_member), [None, None]);

        // The CA signed a certificate for another purpose.
        let named = |name: &'static str| {
            pair(&ours, |it| *it = CertificateParams::new([name.to_owned()]).unwrap())
        };
        let outsider = tls(&named("web"), &ours.pem(), "web").unwrap();
        assert!(matches!(connect(&outsider, &member), [Some(_), Some(_)]));
        let mut expecting = tls(&named("web"), &ours.pem(), "web").unwrap();
        expecting.name = member.name.clone();
        assert!(matches!(connect(&member, &expecting), [Some(_), Some(_)]));

        let stranger = tls(&pair(&theirs, |_| {}), &theirs.pem(), NAME).unwrap();
        assert!(matches!(connect(&stranger, &member), [Some(_), Some(_)]));
        assert!(matches!(connect(&member, &stranger), [Some(_), Some(_)]));

        let mut roots = RootCertStore::empty();
        roots.add(ours.der().clone()).unwrap();
        let without = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let [_, error] = connect_with(Arc::new(without), &member);
        assert_eq!(error, Some(Error::NoCertificatesPresented));
    }
}
