//! The bytes of a gRPC connection: TCP, or TLS once its handshake has ended.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll, ready},
};

use membership::Tls;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{Accept, TlsAcceptor, server::TlsStream};

/// First byte of a TLS connection: the type of a handshake record.
const HANDSHAKE: u8 = 22;
/// Answer to a caller that does not speak TLS: empty SETTINGS of HTTP/2, and GOAWAY with the error
/// INADEQUATE_SECURITY.
const INADEQUATE_SECURITY: [u8; 26] =
    [0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12];

pub(crate) struct Transport(State);

enum State {
    Plain(TcpStream),
    /// The first byte shows whether the caller speaks TLS.
    First(TcpStream, Tls),
    Handshake(Box<Accept<TcpStream>>),
    Tls(Box<TlsStream<TcpStream>>),
    Failed,
}

impl Transport {
    /// Returns the transport of an accepted connection. The handshake runs in its first reads and writes.
    pub fn new(stream: TcpStream, tls: Option<&Tls>) -> Self {
        Self(match tls {
            Some(tls) => State::First(stream, tls.clone()),
            None => State::Plain(stream),
        })
    }

    /// Returns the caller's address before the handshake.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        match &self.0 {
            State::Plain(stream) | State::First(stream, _) => stream.peer_addr().ok(),
            State::Handshake(_) | State::Tls(_) | State::Failed => None,
        }
    }

    /// Completes the handshake.
    fn poll_open(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            self.0 = match &mut self.0 {
                State::Plain(_) | State::Tls(_) => return Poll::Ready(Ok(())),
                State::Failed => return Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
                State::First(stream, _) => {
                    let mut first = [0];
                    let mut buffer = ReadBuf::new(&mut first);
                    let count = ready!(stream.poll_peek(context, &mut buffer))?;
                    match std::mem::replace(&mut self.0, State::Failed) {
                        State::First(stream, tls) if count == 1 && first == [HANDSHAKE] => {
                            let acceptor = TlsAcceptor::from(tls.current().server.clone());
                            State::Handshake(Box::new(acceptor.accept(stream)))
                        }
                        State::First(stream, _) => {
                            reject_plain(&stream);
                            let problem = "the caller does not speak TLS";
                            return Poll::Ready(Err(io::Error::other(problem)));
                        }
                        other => other,
                    }
                }
                State::Handshake(accept) => match ready!(Pin::new(&mut **accept).poll(context)) {
                    Ok(stream) => State::Tls(Box::new(stream)),
                    Err(error) => {
                        tracing::debug!(%error, "TLS handshake failed");
                        self.0 = State::Failed;
                        return Poll::Ready(Err(error));
                    }
                },
            };
        }
    }
}

fn reject_plain(stream: &TcpStream) {
    tracing::debug!("a caller does not speak TLS");
    // Without reading, the caller would see a broken connection instead of the answer.
    let _ = stream.try_read(&mut [0; 4096]);
    let _ = stream.try_write(&INADEQUATE_SECURITY);
}

/// Calls a method of the open stream.
macro_rules! with_open {
    ($self:ident, $context:ident, $method:ident $(, $argument:expr)*) => {{
        ready!($self.poll_open($context))?;
        match &mut $self.0 {
            State::Plain(stream) => Pin::new(stream).$method($context $(, $argument)*),
            State::Tls(stream) => Pin::new(&mut **stream).$method($context $(, $argument)*),
            State::First(..) | State::Handshake(_) | State::Failed => {
                Poll::Ready(Err(io::ErrorKind::NotConnected.into()))
            }
        }
    }};
}

impl AsyncRead for Transport {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        with_open!(self, context, poll_read, buffer)
    }
}

impl AsyncWrite for Transport {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        with_open!(self, context, poll_write, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        with_open!(self, context, poll_write_vectored, parts)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        with_open!(self, context, poll_flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        with_open!(self, context, poll_shutdown)
    }
}
