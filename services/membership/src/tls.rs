//! The certificates of the cluster, and connections to nodes with them.

use std::{io, sync::Arc};

use credentials::{ClusterTls, Reloaded};
use http::Uri;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::either::Either;

/// Configuration of the connections between services, replaced when its files change.
pub type Tls = Arc<Reloaded<ClusterTls>>;

/// Reads the certificates; `None` if no setting names one. The error names file and setting.
pub fn read_tls(cluster: &config::Cluster) -> Result<Option<Tls>, String> {
    let (Some(cert), Some(key), Some(ca)) = (&cluster.tls_cert, &cluster.tls_key, &cluster.tls_ca)
    else {
        return Ok(None);
    };
    ClusterTls::read(cert, key, ca, &cluster.tls_name).map(|tls| Some(Arc::new(tls)))
}

/// A connection to a node's gRPC server, with TLS if the cluster has certificates.
pub type NodeStream = Either<TcpStream, BufReader<TlsStream<TcpStream>>>;

/// Connects to the gRPC server of a node. The caller bounds the time.
pub async fn connect(url: &Uri, tls: Option<&Tls>) -> io::Result<NodeStream> {
    let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
    let stream = TcpStream::connect((host, url.port_u16().unwrap_or(80))).await?;
    stream.set_nodelay(true)?;
    let Some(tls) = tls else { return Ok(Either::Left(stream)) };
    let tls = tls.current();
    let stream = TlsConnector::from(tls.client.clone()).connect(tls.name.clone(), stream).await;
    let mut stream = BufReader::new(stream.map_err(problem)?);
    // The node checks the certificate of this service after this service's part of the handshake.
    // Then it sends the first bytes of HTTP/2, or an alert with the reason.
    if stream.fill_buf().await.map_err(problem)?.is_empty() {
        return Err(io::Error::other("the node closed the connection after the TLS handshake"));
    }
    Ok(Either::Right(stream))
}

/// Adds to an error of TLS what was expected.
fn problem(error: io::Error) -> io::Error {
    let cause = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let expected = match cause {
        None => return error,
        Some(rustls::Error::InvalidMessage(_)) => {
            "the node does not speak TLS; expected cluster.tls_cert on the node too"
        }
        Some(_) => {
            "expected certificates of one cluster on both services: equal cluster.tls_ca and cluster.tls_name"
        }
    };
    io::Error::other(format!("TLS: {error}; {expected}"))
}
