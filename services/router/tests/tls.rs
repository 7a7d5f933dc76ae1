//! TLS on the ports of clients.

mod common;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
};

use common::{
    Cluster,
    client::{DEADLINE, eventually},
    long_prompt, settings,
};
use proto::v1::{
    GenerateRequest, TokenIds, generate_request::Prompt, inference_client::InferenceClient,
};
use rcgen::{CertificateParams, KeyPair};
use router::RouterSettings;
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::transport::{Certificate, Channel, ClientTlsConfig};

const ANSWER: &str = " one two three";

/// Writes a new certificate with its key, and returns the certificate in PEM.
fn write_pair(folder: &Path) -> String {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let cert = params.self_signed(&key).unwrap().pem();
    std::fs::write(folder.join("tls.crt"), &cert).unwrap();
    std::fs::write(folder.join("tls.key"), key.serialize_pem()).unwrap();
    cert
}

/// Returns settings with a certificate, which is in the folder and in PEM.
fn with_tls() -> (TempDir, String, RouterSettings) {
    let folder = tempfile::tempdir().unwrap();
    let cert = write_pair(folder.path());
    let mut settings = settings();
    settings.router.tls_cert = Some(folder.path().join("tls.crt"));
    settings.router.tls_key = Some(folder.path().join("tls.key"));
    (folder, cert, settings)
}

/// Starts a router without waiting for its node, because the common client does not speak TLS.
fn start(settings: RouterSettings) -> Cluster {
    let (prefill, decode) = Cluster::nodes(0, 1, ANSWER);
    let model =
        router::ModelSource { name: common::node::MODEL.to_owned(), text: common::model_text() };
    Cluster::begin(settings, vec![model], prefill, decode)
}

/// Connects with TLS and trusts only this certificate.
async fn connect(
    address: SocketAddr,
    cert: &str,
    protocols: &[&str],
) -> io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(cert.as_bytes()).unwrap()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    let connected = TlsConnector::from(Arc::new(config)).connect(name, stream);
    timeout(DEADLINE, connected).await.expect("the handshake ends")
}

/// Sends these bytes and returns what the peer sends until it closes the connection.
async fn answer<S>(mut stream: S, bytes: &[u8]) -> Vec<u8>
where
    S: AsyncReadExt + AsyncWriteExt + Unpin,
{
    stream.write_all(bytes).await.unwrap();
    let mut received = Vec::new();
    // The peer may reset the connection after its last byte.
    let _ = timeout(DEADLINE, stream.read_to_end(&mut received)).await.expect("the peer closes");
    received
}

const GET_LIVE: &[u8] = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

async fn is_live(cluster: &Cluster, cert: &str) -> bool {
    match connect(cluster.router.http, cert, &["http/1.1"]).await {
        Ok(stream) => answer(stream, GET_LIVE).await.starts_with(b"HTTP/1.1 200"),
        Err(_) => false,
    }
}

#[tokio::test]
async fn both_ports_speak_tls_and_negotiate_the_protocol() {
    let (_folder, cert, settings) = with_tls();
    let cluster = start(settings);
    assert!(is_live(&cluster, &cert).await);
    for (offered, chosen) in
        [(&["h2", "http/1.1"][..], Some("h2")), (&["http/1.1"], Some("http/1.1")), (&[], None)]
    {
        for address in [cluster.router.http, cluster.router.grpc] {
            let stream = connect(address, &cert, offered).await.unwrap();
            let negotiated = stream.get_ref().1.alpn_protocol();
            assert_eq!(negotiated, chosen.map(str::as_bytes), "{offered:?}");
        }
    }
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&cert))
        .domain_name("localhost");
    let url = format!("https://{}", cluster.router.grpc);
    let channel = Channel::from_shared(url).unwrap().tls_config(tls).unwrap();
    let mut client = InferenceClient::new(channel.connect().await.unwrap());
    let request = || GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: long_prompt() })),
        ..Default::default()
    };
    eventually("the node is up", async || client.generate(request()).await.is_ok()).await;
    let mut stream = client.generate(request()).await.unwrap().into_inner();
    let mut messages = 0;
    while stream.message().await.unwrap().is_some() {
        messages += 1;
    }
    assert!(messages > 1);
}

#[tokio::test]
async fn clients_without_tls_or_with_an_old_version_are_rejected() {
    let (_folder, cert, settings) = with_tls();
    let cluster = start(settings);
    // A client hello of TLS 1.0 with one cipher suite.
    let hello = |extensions: &[u8]| {
        let bytes = extensions.len() as u8;
        let mut hello = vec![22, 3, 1, 0, 45 + bytes, 1, 0, 0, 41 + bytes, 3, 1];
        hello.extend([7; 32]);
        hello.extend([0, 0, 2, 0xc0, 0x13, 1, 0]);
        hello.extend(extensions);
        hello
    };
    let signature_algorithms = [0, 8, 0, 13, 0, 4, 0, 2, 4, 3];
    let large = [GET_LIVE, &[b'x'; 30_000]].concat();
    for address in [cluster.router.http, cluster.router.grpc] {
        for plain in [GET_LIVE, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &large] {
            let received = answer(TcpStream::connect(address).await.unwrap(), plain).await;
            let received = String::from_utf8(received).unwrap();
            assert!(received.starts_with("HTTP/1.1 400 "), "{received:?}");
            assert!(
                received.ends_with("\r\n\r\nthis port speaks TLS; expected https"),
                "{received}"
            );
        }
        // The alerts handshake_failure and protocol_version.
        for (extensions, alert) in [(&[][..], 40), (&signature_algorithms, 70)] {
            let stream = TcpStream::connect(address).await.unwrap();
            let received = answer(stream, &hello(extensions)).await;
            assert_eq!(received.first(), Some(&21), "{received:?}");
            // The level of a fatal alert is 2.
            assert_eq!(received.get(5..7), Some(&[2, alert][..]), "{received:?}");
        }
        // A client that does not trust the certificate.
        let other = write_pair(tempfile::tempdir().unwrap().path());
        assert!(connect(address, &other, &[]).await.is_err());
    }
    assert!(is_live(&cluster, &cert).await);
}

#[tokio::test]
async fn tls_to_a_plain_port_is_rejected() {
    let cluster = start(settings());
    let cert = write_pair(tempfile::tempdir().unwrap().path());
    for address in [cluster.router.http, cluster.router.grpc] {
        assert!(connect(address, &cert, &["h2"]).await.is_err());
    }
    assert_eq!(cluster.client.get("/live").await.status, 200);
}

#[tokio::test]
async fn changed_certificate_is_served() {
    let (folder, old, settings) = with_tls();
    let cluster = start(settings);
    let grpc_has = async |cert: &str| connect(cluster.router.grpc, cert, &["h2"]).await.is_ok();
    assert!(is_live(&cluster, &old).await && grpc_has(&old).await);
    let new = write_pair(folder.path());
    eventually("the new certificate is served", async || is_live(&cluster, &new).await).await;
    assert!(grpc_has(&new).await);
    assert!(!is_live(&cluster, &old).await && !grpc_has(&old).await);
}

#[tokio::test]
async fn admin_port_speaks_tls_unless_its_address_is_a_loopback_address() {
    const GET_NODES: &[u8] =
        b"GET /v1/nodes HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    for (address, has_tls) in [("0.0.0.0:0", true), ("127.0.0.1:0", false)] {
        let (_folder, cert, mut settings) = with_tls();
        settings.router.admin = address.parse().unwrap();
        let cluster = start(settings);
        let admin = SocketAddr::from((Ipv4Addr::LOCALHOST, cluster.router.admin.port()));
        let plain = answer(TcpStream::connect(admin).await.unwrap(), GET_NODES).await;
        assert_eq!(plain.starts_with(b"HTTP/1.1 400 "), has_tls, "{address}");
        assert_eq!(plain.starts_with(b"HTTP/1.1 200 "), !has_tls, "{address}");
        match connect(admin, &cert, &["http/1.1"]).await {
            Ok(stream) => {
                assert!(has_tls, "{address}");
                assert!(answer(stream, GET_NODES).await.starts_with(b"HTTP/1.1 200 "));
            }
            Err(error) => assert!(!has_tls, "{address}: {error}"),
        }
    }
}
