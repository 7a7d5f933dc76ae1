//! A client's TCP connection with the deadlines that hyper leaves to its caller: what it begins with
//! must come soon, and a client that does not read loses its connection.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, Sleep, sleep, sleep_until},
};

/// What an HTTP/2 connection begins with. Until it is whole, or is something else, no other clock
/// runs.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Why a connection ended, for the records of its requests: they are dropped with it and could not
/// tell a client that left from one that did not read.
#[derive(Clone, Debug, Default)]
pub struct ConnectionEnd(Arc<AtomicBool>);

impl ConnectionEnd {
    /// Written before the connection ends, read when its requests are dropped.
    pub fn is_unread(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    fn set_unread(&self) {
        self.0.store(true, Ordering::Release);
    }
}

pub struct ClientConnection {
    stream: TcpStream,
    end: ConnectionEnd,
    /// What was read has nothing to do with a clock of ours any more: `None`.
    opening: Option<Opening>,
    write_max: Duration,
    /// Runs while a write waits for the client.
    write: Option<Pin<Box<Sleep>>>,
}

/// Nothing, or a beginning of the preface, was read.
struct Opening {
    preface_bytes: usize,
    timer: Pin<Box<Sleep>>,
}

impl Opening {
    /// Whether more of the preface must follow.
    fn goes_on(&mut self, bytes: &[u8]) -> bool {
        let rest = &PREFACE[self.preface_bytes..];
        self.preface_bytes += bytes.len();
        bytes.len() < rest.len() && rest.starts_with(bytes)
    }
}

impl ClientConnection {
    pub fn new(
        stream: TcpStream,
        opening_max: Duration,
        write_max: Duration,
        end: ConnectionEnd,
    ) -> Self {
        let opening = Opening { preface_bytes: 0, timer: Box::pin(sleep(opening_max)) };
        Self { stream, end, opening: Some(opening), write_max, write: None }
    }

    /// Passes on what a write came to; one that waits too long fails.
    fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.write = None;
            return written;
        }
        let deadline = Instant::now() + self.write_max;
        let timer = self.write.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        ready!(timer.as_mut().poll(cx));
        self.end.set_unread();
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl AsyncRead for ClientConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let Some(opening) = &mut self.opening else { return read };
        if read.is_ready() {
            let bytes = &buffer.filled()[before..];
            // Nothing at all is the end of the stream.
            if bytes.is_empty() || !opening.goes_on(bytes) {
                self.opening = None;
            }
            return read;
        }
        ready!(opening.timer.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client sends nothing")))
    }
}

impl AsyncWrite for ClientConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    async fn pair(opening_max: Duration, write_max: Duration) -> (ClientConnection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        let end = ConnectionEnd::default();
        (ClientConnection::new(server, opening_max, write_max, end), client)
    }

    /// Time enough for the few bytes of a test on a busy machine.
    const SHORT: Duration = Duration::from_secs(1);
    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_client_that_sends_nothing_is_let_go() {
        let (mut server, _client) = pair(SHORT, LONG).await;
        let error = server.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn after_its_beginning_reading_may_take_as_long_as_it_likes() {
        let post = b"PO";
        let almost = [&PREFACE[..20], b"?"].concat();
        for beginning in [b"a", &post[..], &almost, PREFACE] {
            let (mut server, mut client) = pair(SHORT, LONG).await;
            for byte in beginning {
                client.write_u8(*byte).await.unwrap();
                assert_eq!(server.read_u8().await.unwrap(), *byte);
            }
            let waiting = tokio::time::timeout(SHORT * 2, server.read_u8()).await;
            assert!(waiting.is_err(), "{waiting:?}");
        }
    }

    #[tokio::test]
    async fn a_client_that_sends_half_a_preface_is_let_go() {
        for length in [1, 3, PREFACE.len() - 1] {
            let (mut server, mut client) = pair(SHORT, LONG).await;
            client.write_all(&PREFACE[..length]).await.unwrap();
            let mut read = vec![0; length];
            server.read_exact(&mut read).await.unwrap();
            assert_eq!(read, PREFACE[..length]);
            let error = server.read_u8().await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "after {length} bytes");
        }
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_is_let_go() {
        let (mut server, _client) = pair(LONG, SHORT).await;
        let endless = vec![0; 1 << 20];
        let error = loop {
            assert!(!server.end.is_unread());
            if let Err(error) = server.write_all(&endless).await {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(server.end.is_unread());
    }
}
