//! Connection to a trainer: lines of JSON and fixed messages, with deadlines. If the connection
//! closes, the trainer has died.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    thread,
    time::{Duration, Instant},
};

use serde::de::DeserializeOwned;
use tokio::runtime;
use tokio_util::sync::CancellationToken;

use super::address::{TrainerAddress, TrainerError};
use crate::weights::receive::ReceiveError;

/// Time-out of a connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// Interval of checks for cancellation while the node waits for the trainer.
pub(super) const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time of busy polling for a message: a trainer packs a chunk in less than a millisecond.
const SPIN: Duration = Duration::from_millis(1);
const LINE_BYTES_MAX: usize = 16 << 20;

#[derive(Debug)]
pub(super) enum TrainerStream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl TrainerStream {
    fn set_nonblocking(&self, is_nonblocking: bool) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_nonblocking(is_nonblocking),
            Self::Tcp(stream) => stream.set_nonblocking(is_nonblocking),
        }
    }

    fn set_timeouts(&self, read: Duration, write: Duration) -> io::Result<()> {
        match self {
            Self::Unix(stream) => {
                stream.set_read_timeout(Some(read))?;
                stream.set_write_timeout(Some(write))
            }
            Self::Tcp(stream) => {
                use rustix::net::sockopt;
                stream.set_nodelay(true)?;
                // TCP keep-alive for the connection between updates: it fails 25 s after the
                // trainer's host is lost.
                sockopt::set_socket_keepalive(stream, true)?;
                sockopt::set_tcp_keepidle(stream, Duration::from_secs(10))?;
                sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
                sockopt::set_tcp_keepcnt(stream, 3)?;
                stream.set_read_timeout(Some(read))?;
                stream.set_write_timeout(Some(write))
            }
        }
    }

    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(out),
            Self::Tcp(stream) => stream.read(out),
        }
    }

    /// Returns whether the peer has neither closed the connection nor sent anything.
    pub(super) fn is_idle(&self) -> bool {
        self.peek().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Reads bytes that stay readable.
    fn peek(&self) -> io::Result<usize> {
        use rustix::net::{RecvFlags, recv};
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let mut byte = [0];
        let (count, _) = match self {
            Self::Unix(stream) => recv(stream, &mut byte, flags),
            Self::Tcp(stream) => recv(stream, &mut byte, flags),
        }?;
        Ok(count)
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.write_all(bytes),
            Self::Tcp(stream) => stream.write_all(bytes),
        }
    }
}

pub(super) struct TrainerConnection<'a> {
    stream: TrainerStream,
    cancelled: &'a CancellationToken,
}

impl<'a> TrainerConnection<'a> {
    pub(super) fn open(
        address: &TrainerAddress,
        cancelled: &'a CancellationToken,
    ) -> Result<Self, ReceiveError> {
        let failed = |cause: String| TrainerError::Connect { address: address.clone(), cause };
        // The queue of a trainer that accepts no more may be full.
        let connect = tokio::time::timeout(CONNECT_MAX, connect(address));
        let stream =
            match runtime::Handle::current().block_on(cancelled.run_until_cancelled(connect)) {
                None => return Err(ReceiveError::Cancelled),
                Some(Err(_)) => return Err(TrainerError::Silent(CONNECT_MAX).into()),
                Some(Ok(stream)) => stream.map_err(|error| failed(error.to_string()))?,
            };
        let prepared = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_timeouts(CANCEL_POLL_INTERVAL, CONNECT_MAX));
        prepared.map_err(|error| failed(error.to_string()))?;
        Ok(Self { stream, cancelled })
    }

    /// Uses the stream of an earlier connection.
    pub(super) fn new(stream: TrainerStream, cancelled: &'a CancellationToken) -> Self {
        Self { stream, cancelled }
    }

    pub(super) fn into_stream(self) -> TrainerStream {
        self.stream
    }

    /// Reads a line of JSON.
    pub(super) fn line<T: DeserializeOwned>(
        &mut self,
        at_most: Duration,
    ) -> Result<T, ReceiveError> {
        let until = Instant::now() + at_most;
        let invalid = |reason: String| TrainerError::Declaration { reason };
        let (mut line, mut part) = (Vec::new(), vec![0; 64 << 10]);
        while line.last() != Some(&b'\n') {
            let count = self.read(&mut part, until, at_most)?;
            line.extend_from_slice(&part[..count]);
            if line.len() > LINE_BYTES_MAX {
                return Err(invalid(format!("it exceeds {LINE_BYTES_MAX} bytes")).into());
            }
        }
        let line = serde_json::from_slice(&line);
        Ok(line.map_err(|error| invalid(error.to_string()))?)
    }

    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<(), ReceiveError> {
        self.stream.write_all(bytes).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                TrainerError::Closed.into()
            }
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                TrainerError::Silent(CONNECT_MAX).into()
            }
            _ => TrainerError::Io(error).into(),
        })
    }

    /// Fills `out`.
    pub(super) fn receive(
        &mut self,
        out: &mut [u8],
        at_most: Duration,
    ) -> Result<(), ReceiveError> {
        let until = Instant::now() + at_most;
        let spin_until = Instant::now() + SPIN;
        while self.stream.peek().is_err() && Instant::now() < spin_until {
            thread::yield_now();
        }
        let mut end = 0;
        while end < out.len() {
            end += self.read(&mut out[end..], until, at_most)?;
        }
        Ok(())
    }

    /// Reads at least one byte.
    fn read(
        &mut self,
        out: &mut [u8],
        until: Instant,
        at_most: Duration,
    ) -> Result<usize, ReceiveError> {
        loop {
            if self.cancelled.is_cancelled() {
                return Err(ReceiveError::Cancelled);
            }
            // A peer may send single bytes without end.
            if Instant::now() > until {
                return Err(TrainerError::Silent(at_most).into());
            }
            match self.stream.read(out) {
                Ok(0) => return Err(TrainerError::Closed.into()),
                Ok(count) => return Ok(count),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock
                    | io::ErrorKind::TimedOut
                    | io::ErrorKind::Interrupted => {}
                    io::ErrorKind::ConnectionReset => return Err(TrainerError::Closed.into()),
                    _ => return Err(TrainerError::Io(error).into()),
                },
            }
        }
    }

    /// Sleeps for `duration`. Fails early if the update is cancelled or the trainer closes the
    /// connection.
    pub(super) fn pause(&self, duration: Duration) -> Result<(), ReceiveError> {
        let until = Instant::now() + duration;
        loop {
            self.check()?;
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Ok(());
            }
            thread::sleep(rest.min(CANCEL_POLL_INTERVAL));
        }
    }

    /// Returns whether the update is cancelled or the trainer has closed the connection.
    pub(super) fn is_over(&self) -> bool {
        self.check().is_err()
    }

    /// Fails if the update is cancelled, or if the trainer has closed the connection: it may have
    /// ended and freed its memory before the copies.
    pub(super) fn check(&self) -> Result<(), ReceiveError> {
        if self.cancelled.is_cancelled() {
            return Err(ReceiveError::Cancelled);
        }
        match self.stream.peek() {
            Ok(0) => Err(TrainerError::Closed.into()),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                Err(TrainerError::Closed.into())
            }
            Err(error) => Err(TrainerError::Io(error).into()),
        }
    }
}

async fn connect(address: &TrainerAddress) -> io::Result<TrainerStream> {
    match address {
        TrainerAddress::Ipc(socket) => {
            let stream = tokio::net::UnixStream::connect(socket).await?;
            Ok(TrainerStream::Unix(stream.into_std()?))
        }
        TrainerAddress::Nccl { host, .. } => {
            let stream = tokio::net::TcpStream::connect(host).await?;
            Ok(TrainerStream::Tcp(stream.into_std()?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `end` while the connection pauses. Checks that the pause ends early.
    fn pause_until(
        connection: &TrainerConnection<'_>,
        end: impl FnOnce(),
    ) -> Result<(), ReceiveError> {
        const PAUSE: Duration = Duration::from_secs(30);
        let begun = Instant::now();
        thread::scope(|scope| {
            let pausing = scope.spawn(|| connection.pause(PAUSE));
            // By then the pause has made its first check, as a rule. If not, this check ends the
            // pause.
            thread::sleep(2 * CANCEL_POLL_INTERVAL);
            end();
            let paused = pausing.join().unwrap();
            assert!(begun.elapsed() < PAUSE, "the pause did not end early");
            paused
        })
    }

    #[test]
    fn pause_ends_when_the_update_is_cancelled_or_the_trainer_leaves() {
        let cancelled = CancellationToken::new();
        let (node, trainer) = UnixStream::pair().unwrap();
        let connection = TrainerConnection::new(TrainerStream::Unix(node), &cancelled);
        connection.pause(Duration::from_micros(1)).unwrap();
        let left = pause_until(&connection, || drop(trainer)).unwrap_err();
        assert!(left.to_string().contains("the trainer closed the connection"), "{left}");
        let (node, _trainer) = UnixStream::pair().unwrap();
        let connection = TrainerConnection::new(TrainerStream::Unix(node), &cancelled);
        let paused = pause_until(&connection, || cancelled.cancel());
        assert!(matches!(paused, Err(ReceiveError::Cancelled)));
    }
}
