//! Connections of gRPC callers: their maximum number, and the time-out of the HTTP/2 preface.
//!
//! HTTP/2 keep-alive detects a dead caller only after the preface. So a connection that does not send
//! its preface within the time-out is closed. With certificates the time-out includes the TLS handshake.
//!
//! A step yields tokens for many calls of one connection. A write waits until every task that is ready
//! has run, so that one system call sends the tokens of all of them.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{
    Stream, StreamExt,
    future::BoxFuture,
    stream::{self, FuturesUnordered},
};
use membership::Tls;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore},
    task::yield_now,
    time::{Sleep, sleep},
};
use tonic::transport::server::Connected;
use tracing::warn;

use crate::transport::Transport;

/// Maximum number of connections: a few per router. Further connections wait in the kernel's accept queue.
const CONNECTIONS_MAX: usize = 256;
/// Time-out of the HTTP/2 connection preface, as long as the time-out of a peer's ZeroMQ handshake.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(5);
/// Length of the HTTP/2 connection preface, `PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n`.
const PREFACE_BYTES: usize = 24;
/// Pause after a failed accept: most likely no file descriptor is free.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Returns an endless stream of accepted connections.
pub(crate) fn incoming(
    listener: TcpListener,
    tls: Option<Tls>,
) -> impl Stream<Item = io::Result<Connection>> {
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    stream::unfold((listener, tls, permits), |(listener, tls, permits)| async move {
        let connection = accept(&listener, tls.as_ref(), &permits).await;
        Some((Ok(connection), (listener, tls, permits)))
    })
}

async fn accept(listener: &TcpListener, tls: Option<&Tls>, permits: &Arc<Semaphore>) -> Connection {
    let permit = permits.clone().acquire_owned().await.expect("the semaphore is never closed");
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Tokens are small and must not wait for more bytes. A closed connection fails when
                // it is read.
                let _ = stream.set_nodelay(true);
                return Connection::new(Transport::new(stream, tls), permit);
            }
            Err(error) => {
                warn!(%error, "cannot accept a gRPC connection");
                sleep(ACCEPT_AGAIN_AFTER).await;
            }
        }
    }
}

/// One caller's connection.
pub(crate) struct Connection {
    stream: Transport,
    preface: Option<Preface>,
    /// Completes when the runtime has run every ready task. A set of one future, so that other events that wake the
    /// connection do not poll it.
    turn: FuturesUnordered<BoxFuture<'static, ()>>,
    /// `turn` has completed since the last flush, so bytes may be written.
    may_write: bool,
    _permit: OwnedSemaphorePermit,
}

/// A preface that is not complete yet.
struct Preface {
    bytes_missing: usize,
    deadline: Pin<Box<Sleep>>,
}

impl Connection {
    fn new(stream: Transport, permit: OwnedSemaphorePermit) -> Self {
        let deadline = Box::pin(sleep(PREFACE_TIMEOUT));
        let preface = Preface { bytes_missing: PREFACE_BYTES, deadline };
        Self {
            stream,
            preface: Some(preface),
            turn: FuturesUnordered::new(),
            may_write: false,
            _permit: permit,
        }
    }

    /// Completes when every ready task has run, and from then on until the next flush.
    fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if !self.may_write {
            if self.turn.is_empty() {
                self.turn.push(Box::pin(yield_now()));
            }
            ready!(self.turn.poll_next_unpin(context));
            self.may_write = true;
        }
        Poll::Ready(())
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let filled = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        if let Some(preface) = &mut this.preface {
            let count = buffer.filled().len() - filled;
            preface.bytes_missing = preface.bytes_missing.saturating_sub(count);
            if preface.bytes_missing == 0 {
                this.preface = None;
            } else if preface.deadline.as_mut().poll(context).is_ready() {
                let silent = "no HTTP/2 preface in time";
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, silent)));
            }
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_turn(context));
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_turn(context));
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.may_write = false;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Connected for Connection {
    type ConnectInfo = Option<SocketAddr>;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.peer_address()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    use super::*;

    async fn pair() -> (TcpStream, Connection) {
        pair_with(None).await
    }

    async fn pair_with(tls: Option<&Tls>) -> (TcpStream, Connection) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let permits = Arc::new(Semaphore::new(1));
        (client, accept(&listener, tls, &permits).await)
    }

    /// Returns the certificate of a cluster of one service.
    fn certificate() -> Tls {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, pem: String| {
            std::fs::write(folder.path().join(name), pem).unwrap();
            folder.path().join(name)
        };
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["baton".to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let cert = CertificateParams::new(["baton".to_owned()]).unwrap();
        let cert = file("crt", cert.signed_by(&key, &authority).unwrap().pem());
        let (key, ca) = (file("key", key.serialize_pem()), file("ca", authority.pem()));
        Arc::new(credentials::ClusterTls::read(&cert, &key, &ca, "baton").unwrap())
    }

    #[tokio::test]
    async fn caller_without_tls_is_told_and_disconnected() {
        let (mut client, mut connection) = pair_with(Some(&certificate())).await;
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        let error = connection.read_u8().await.unwrap_err();
        assert!(error.to_string().contains("does not speak TLS"), "{error}");
        drop(connection);
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        // GOAWAY with INADEQUATE_SECURITY.
        assert_eq!((answer.len(), answer[12], answer[25]), (26, 7, 12), "{answer:?}");
    }

    #[tokio::test]
    async fn garbage_in_place_of_a_handshake_is_rejected() {
        // A record of TLS 1.0 with an unknown handshake message.
        let garbage = [&[22, 3, 1, 0, 4][..], &[1, 2, 3, 4]].concat();
        let (mut client, mut connection) = pair_with(Some(&certificate())).await;
        client.write_all(&garbage).await.unwrap();
        client.shutdown().await.unwrap();
        connection.read_u8().await.unwrap_err();
    }

    #[tokio::test]
    async fn tls_handshake_counts_against_the_time_out_of_the_preface() {
        for sent in [&[][..], &[22], &[22, 3, 1, 2, 0]] {
            let (mut client, mut connection) = pair_with(Some(&certificate())).await;
            client.write_all(sent).await.unwrap();
            // The paused clock jumps to the deadline.
            tokio::time::pause();
            let error = connection.read_u8().await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "after {sent:?}");
            tokio::time::resume();
        }
    }

    #[tokio::test]
    async fn connection_may_be_idle_after_its_preface() {
        let (mut client, mut connection) = pair().await;
        client.write_all(&[7; PREFACE_BYTES]).await.unwrap();
        connection.read_exact(&mut [0; PREFACE_BYTES]).await.unwrap();
        tokio::time::pause();
        tokio::time::advance(10 * PREFACE_TIMEOUT).await;
        tokio::time::resume();
        client.write_all(&[8]).await.unwrap();
        assert_eq!(connection.read_u8().await.unwrap(), 8);
    }

    #[tokio::test]
    async fn write_waits_until_every_ready_task_has_run() {
        let (mut client, mut connection) = pair().await;
        for byte in 0..3 {
            let ready = tokio::spawn(async {});
            connection.write_u8(byte).await.unwrap();
            assert!(ready.is_finished());
            connection.flush().await.unwrap();
            assert_eq!(client.read_u8().await.unwrap(), byte);
        }
    }

    #[tokio::test]
    async fn connection_without_a_preface_fails_after_the_time_out() {
        for sent in [0, 1, PREFACE_BYTES - 1] {
            let (mut client, mut connection) = pair().await;
            client.write_all(&vec![7; sent]).await.unwrap();
            connection.read_exact(&mut vec![0; sent]).await.unwrap();
            // The paused clock jumps to the deadline.
            tokio::time::pause();
            let error = connection.read_u8().await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "after {sent} bytes");
            tokio::time::resume();
        }
    }
}
