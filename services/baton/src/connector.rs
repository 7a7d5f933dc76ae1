//! Connections of HTTP and gRPC clients: TCP, with TLS for https.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use credentials::client_config;
use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::{
    client::legacy::connect::{Connected, Connection},
    rt::TokioIo,
};
use rustls::{CertificateError, ClientConfig, Error, InvalidMessage, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;
use tower::Service;

/// Opens connections to the hosts of URLs.
#[derive(Clone)]
pub(crate) struct Connector {
    tls: Arc<ClientConfig>,
    connect_timeout: Duration,
    /// Address to connect to in place of the addresses of the URL's host.
    address: Option<SocketAddr>,
}

impl Connector {
    /// Returns a connector that trusts Mozilla's root certificates. The time-out includes the
    /// handshake.
    pub(crate) fn new(connect_timeout: Duration) -> Self {
        let tls = client_config(None).expect("the built-in root certificates are valid");
        Self { tls: Arc::new(tls), connect_timeout, address: None }
    }

    pub(crate) fn with_tls(self, tls: ClientConfig) -> Self {
        Self { tls: Arc::new(tls), ..self }
    }

    /// Offers HTTP/2 only, for gRPC.
    pub(crate) fn for_http2(self) -> Self {
        let mut tls = (*self.tls).clone();
        tls.alpn_protocols = vec![b"h2".to_vec()];
        self.with_tls(tls)
    }

    pub(crate) fn at(self, address: SocketAddr) -> Self {
        Self { address: Some(address), ..self }
    }

    async fn connect(self, uri: Uri) -> io::Result<ConnectorStream> {
        let invalid = |problem: String| io::Error::new(io::ErrorKind::InvalidInput, problem);
        let is_https = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => {
                let expected = "http://HOST:PORT or https://HOST:PORT";
                return Err(invalid(format!("invalid URL {uri}; expected {expected}")));
            }
        };
        let host =
            uri.host().ok_or_else(|| invalid(format!("invalid URL {uri}: it has no host")))?;
        let host = host.trim_matches(['[', ']']);
        let port = uri.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        let open = async {
            let stream = match self.address {
                Some(address) => TcpStream::connect(address).await?,
                None => TcpStream::connect((host, port)).await?,
            };
            stream.set_nodelay(true)?;
            if !is_https {
                return Ok(ConnectorStream::new(stream));
            }
            let name = ServerName::try_from(host.to_owned()).map_err(|_| {
                invalid(format!("invalid host {host:?}; expected a DNS name or an IP address"))
            })?;
            let stream = TlsConnector::from(self.tls).connect(name, stream).await;
            stream.map(ConnectorStream::new).map_err(|error| io::Error::other(tls_problem(&error)))
        };
        tokio::time::timeout(self.connect_timeout, open).await.map_err(|_| {
            let problem = format!("no connection within {:?}", self.connect_timeout);
            io::Error::new(io::ErrorKind::TimedOut, problem)
        })?
    }
}

/// Returns the reason why a handshake failed, with what was expected where that is known.
fn tls_problem(error: &io::Error) -> String {
    let problem = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    let expected = match problem {
        Some(Error::InvalidMessage(InvalidMessage::InvalidContentType)) => {
            return "the server does not speak TLS; expected an http:// URL".to_owned();
        }
        Some(Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            "; expected a certificate of a trusted CA, or --ca with the certificate of its CA"
        }
        _ => "",
    };
    format!("TLS: {error}{expected}")
}

impl Service<Uri> for Connector {
    type Response = ConnectorStream;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<ConnectorStream>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A connection, with or without TLS.
pub(crate) struct ConnectorStream(TokioIo<Box<dyn Io>>);

impl ConnectorStream {
    fn new(stream: impl Io + 'static) -> Self {
        Self(TokioIo::new(Box::new(stream)))
    }
}

impl Connection for ConnectorStream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for ConnectorStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl Write for ConnectorStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
