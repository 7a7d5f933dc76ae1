//! Connections of gRPC callers: their maximum number, the TLS handshake, and the time-out of the
//! HTTP/2 preface.
//!
//! A caller is a stranger until its certificate or the token of a call is verified. Strangers give
//! way to new connections ([`PortListener`]). HTTP/2 keep-alive detects a dead caller only after
//! the preface, so a connection that does not send its preface within the time-out is closed. The
//! TLS handshake has a time-out of its own: an HTTP/2 server writes before it reads, and would wait
//! for a handshake without looking at the time-out of the preface.
//!
//! A step yields tokens for many calls of one connection. A write waits until every task that is
//! ready has run, so that one system call sends the tokens of all of them.

use std::{
    future::{Future, ready},
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{
    Stream, StreamExt,
    future::BoxFuture,
    stream::{self, FuturesUnordered},
};
use listener::{
    ClientStream, ConnectionClose, ConnectionSlot, HANDSHAKE_MAX, PortListener, SlotHandle,
    SlotLimits, handshake,
};
use membership::Tls;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    task::yield_now,
    time::{Sleep, sleep},
};
use tokio_util::either::Either;
use tonic::transport::server::Connected;

/// A few connections per router. A router keeps its connection, so there is no reserve: beyond,
/// further connections wait in the kernel's accept queue.
const LIMITS: SlotLimits =
    SlotLimits { ordinary_max: 256, reserved_max: 0, closing_max: 64, authenticates: true };
/// Time-out of the HTTP/2 connection preface, as long as the time-out of a peer's ZeroMQ handshake.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(5);
/// Length of the HTTP/2 connection preface, `PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n`.
const PREFACE_BYTES: usize = 24;
/// Answer to a caller that does not speak TLS: empty SETTINGS of HTTP/2, and GOAWAY with the error
/// INADEQUATE_SECURITY.
const INADEQUATE_SECURITY: [u8; 26] =
    [0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12];

/// Returns an endless stream of accepted connections, after their TLS handshakes.
pub(crate) fn incoming(
    listener: TcpListener,
    tls: Option<Tls>,
) -> impl Stream<Item = io::Result<CallerConnection>> {
    let accepted = stream::unfold(PortListener::new(listener, LIMITS), |listener| async {
        Some((listener.accept().await, listener))
    });
    accepted
        .map(move |(stream, slot)| open(stream, slot, tls.clone()))
        .buffer_unordered(LIMITS.ordinary_max)
        .filter_map(|opened| ready(opened.map(Ok)))
}

/// Performs the TLS handshake, if there are certificates. Returns `None` if the connection has
/// ended.
async fn open(
    stream: TcpStream,
    slot: ConnectionSlot,
    tls: Option<Tls>,
) -> Option<CallerConnection> {
    let Some(tls) = tls else { return Some(CallerConnection::new(Either::Left(stream), slot)) };
    let config = tls.current().server.clone();
    let stream = tokio::select! {
        _ = slot.closing() => return None,
        stream = handshake(config, stream, HANDSHAKE_MAX, &INADEQUATE_SECURITY) => stream?,
    };
    // The handshake verified the certificate of a member.
    keep_authenticated(&slot);
    Some(CallerConnection::new(stream, slot))
}

/// Keeps the connection of an authenticated caller: its streams last, so it never counts as idle.
pub(crate) fn keep_authenticated(slot: &SlotHandle) {
    if slot.authenticate() {
        slot.begin_request(false);
    }
}

/// One caller's connection.
pub(crate) struct CallerConnection {
    stream: ClientStream,
    slot: ConnectionSlot,
    /// Completes when the connection must close.
    closing: BoxFuture<'static, ConnectionClose>,
    preface: Option<IncompletePreface>,
    /// Completes when the runtime has run every ready task. A set of one future, so that other
    /// events that wake the connection do not poll it.
    ready_tasks: FuturesUnordered<BoxFuture<'static, ()>>,
    /// `ready_tasks` has completed since the last flush, so bytes may be written.
    may_write: bool,
}

/// A preface that is not complete yet.
struct IncompletePreface {
    bytes_missing: usize,
    deadline: Pin<Box<Sleep>>,
}

impl CallerConnection {
    fn new(stream: ClientStream, slot: ConnectionSlot) -> Self {
        let deadline = Box::pin(sleep(PREFACE_TIMEOUT));
        let preface = IncompletePreface { bytes_missing: PREFACE_BYTES, deadline };
        Self {
            stream,
            closing: Box::pin(slot.closing()),
            slot,
            preface: Some(preface),
            ready_tasks: FuturesUnordered::new(),
            may_write: false,
        }
    }

    /// Completes when every ready task has run, and from then on until the next flush.
    fn poll_ready_tasks(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if !self.may_write {
            if self.ready_tasks.is_empty() {
                self.ready_tasks.push(Box::pin(yield_now()));
            }
            ready!(self.ready_tasks.poll_next_unpin(context));
            self.may_write = true;
        }
        Poll::Ready(())
    }

    /// Fails when the connection must close.
    fn check_time(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.closing.as_mut().poll(context).is_ready() {
            let closed = "the port has too many connections";
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, closed));
        }
        if let Some(preface) = &mut self.preface
            && preface.deadline.as_mut().poll(context).is_ready()
        {
            let silent = "no HTTP/2 preface in time";
            return Err(io::Error::new(io::ErrorKind::TimedOut, silent));
        }
        Ok(())
    }
}

impl AsyncRead for CallerConnection {
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
            }
        }
        this.check_time(context)?;
        read
    }
}

impl AsyncWrite for CallerConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_ready_tasks(context));
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_ready_tasks(context));
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
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

impl Connected for CallerConnection {
    type ConnectInfo = SlotHandle;

    /// Returns the connection's slot, for
    /// [`AuthenticateLayer`](crate::authentication::AuthenticateLayer).
    fn connect_info(&self) -> SlotHandle {
        self.slot.handle()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn pair() -> (TcpStream, CallerConnection) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut incoming = Box::pin(incoming(listener, None));
        (client, incoming.next().await.unwrap().unwrap())
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
