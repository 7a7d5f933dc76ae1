//! Connections of gRPC callers: how many at a time, and how long one may stay silent at first.
//!
//! Once a caller has sent the HTTP/2 preface, keep-alive tells whether it lives; before that nothing
//! would, so a connection that does not greet in time is closed.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{Stream, stream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Sleep, sleep},
};
use tonic::transport::server::Connected;
use tracing::warn;

/// Some routers, each with a few; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 256;
/// As long as a notice listener waits for its peers' greetings.
const GREETING_WITHIN: Duration = Duration::from_secs(5);
/// `PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n`.
const PREFACE_BYTES: usize = 24;
/// After a failed accept: out of descriptors, most likely.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Accepts for ever.
pub(crate) fn incoming(listener: TcpListener) -> impl Stream<Item = io::Result<Connection>> {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    stream::unfold((listener, places), |(listener, places)| async move {
        let connection = accept(&listener, &places).await;
        Some((Ok(connection), (listener, places)))
    })
}

async fn accept(listener: &TcpListener, places: &Arc<Semaphore>) -> Connection {
    let place = places.clone().acquire_owned().await.expect("the semaphore is never closed");
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Tokens are small and wait for nothing. A connection that is gone already says
                // so when it is read.
                let _ = stream.set_nodelay(true);
                return Connection::new(stream, place);
            }
            Err(error) => {
                warn!(%error, "could not accept a gRPC connection");
                sleep(ACCEPT_AGAIN_AFTER).await;
            }
        }
    }
}

/// One caller's connection.
pub(crate) struct Connection {
    stream: TcpStream,
    greeting: Option<Greeting>,
    _place: OwnedSemaphorePermit,
}

/// The preface is not complete.
struct Greeting {
    bytes_missing: usize,
    deadline: Pin<Box<Sleep>>,
}

impl Connection {
    fn new(stream: TcpStream, place: OwnedSemaphorePermit) -> Self {
        let deadline = Box::pin(sleep(GREETING_WITHIN));
        let greeting = Greeting { bytes_missing: PREFACE_BYTES, deadline };
        Self { stream, greeting: Some(greeting), _place: place }
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
        if let Some(greeting) = &mut this.greeting {
            let count = buffer.filled().len() - filled;
            greeting.bytes_missing = greeting.bytes_missing.saturating_sub(count);
            if greeting.bytes_missing == 0 {
                this.greeting = None;
            } else if greeting.deadline.as_mut().poll(context).is_ready() {
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
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Connected for Connection {
    type ConnectInfo = Option<SocketAddr>;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.peer_addr().ok()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn pair() -> (TcpStream, Connection) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let places = Arc::new(Semaphore::new(1));
        (client, accept(&listener, &places).await)
    }

    #[tokio::test]
    async fn a_connection_that_greets_may_be_silent_later() {
        let (mut client, mut connection) = pair().await;
        client.write_all(&[7; PREFACE_BYTES]).await.unwrap();
        connection.read_exact(&mut [0; PREFACE_BYTES]).await.unwrap();
        tokio::time::pause();
        tokio::time::advance(10 * GREETING_WITHIN).await;
        tokio::time::resume();
        client.write_all(&[8]).await.unwrap();
        assert_eq!(connection.read_u8().await.unwrap(), 8);
    }

    #[tokio::test]
    async fn a_connection_that_does_not_greet_in_time_fails() {
        for sent in [0, 1, PREFACE_BYTES - 1] {
            let (mut client, mut connection) = pair().await;
            client.write_all(&vec![7; sent]).await.unwrap();
            connection.read_exact(&mut vec![0; sent]).await.unwrap();
            // The clock jumps to the deadline when nothing else is to be done.
            tokio::time::pause();
            let error = connection.read_u8().await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "after {sent} bytes");
            tokio::time::resume();
        }
    }
}
