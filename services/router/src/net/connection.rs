//! A client's TCP connection with the deadlines that hyper leaves to its caller: the first byte
//! must come soon, and a client that does not read loses its connection.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, Sleep, sleep, sleep_until},
};

pub struct ClientConnection {
    stream: TcpStream,
    /// Runs until the first byte is here.
    first_byte: Option<Pin<Box<Sleep>>>,
    write_max: Duration,
    /// Runs while a write waits for the client.
    write: Option<Pin<Box<Sleep>>>,
}

impl ClientConnection {
    pub fn new(stream: TcpStream, first_byte_max: Duration, write_max: Duration) -> Self {
        Self { stream, first_byte: Some(Box::pin(sleep(first_byte_max))), write_max, write: None }
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
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl AsyncRead for ClientConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let Some(timer) = &mut self.first_byte else { return read };
        if read.is_ready() {
            self.first_byte = None;
            return read;
        }
        ready!(timer.as_mut().poll(cx));
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

    async fn pair(first_byte_max: Duration, write_max: Duration) -> (ClientConnection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        (ClientConnection::new(server, first_byte_max, write_max), client)
    }

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_client_that_sends_nothing_is_let_go() {
        let (mut server, _client) = pair(SHORT, LONG).await;
        let error = server.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn after_the_first_byte_reading_may_take_as_long_as_it_likes() {
        let (mut server, mut client) = pair(SHORT, LONG).await;
        client.write_all(b"a").await.unwrap();
        assert_eq!(server.read_u8().await.unwrap(), b'a');
        let waiting = tokio::time::timeout(SHORT * 3, server.read_u8()).await;
        assert!(waiting.is_err(), "{waiting:?}");
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_is_let_go() {
        let (mut server, _client) = pair(LONG, SHORT).await;
        let endless = vec![0; 1 << 20];
        let error = loop {
            if let Err(error) = server.write_all(&endless).await {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
