//! Reads and writes with deadlines, on blocking sockets with short time-outs.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use rustls::StreamOwned;

use crate::config::LEASE;

/// Longest wait of one system call before the thread checks whether it should stop.
pub(super) const POLL: Duration = Duration::from_millis(50);

/// Returns whether the caller should repeat the call: its poll interval has passed, or a signal
/// interrupted it. `ErrorKind::TimedOut` is a failure: the kernel has given up the connection.
pub(super) fn is_pause(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Fails if the peer has moved no byte of a frame for a lease, even if its heartbeats continue.
pub(super) fn check_progress(since: Instant, problem: &str) -> io::Result<()> {
    if since.elapsed() < LEASE {
        return Ok(());
    }
    let reason = format!("{problem} of a frame for {} s", LEASE.as_secs());
    Err(io::Error::new(ErrorKind::TimedOut, reason))
}

/// Reads or writes `bytes` bytes whose contents do not matter. Calls `step` with the number of
/// bytes left, until `closed` returns true. Fails as [`check_progress`] does.
pub(super) fn move_bytes(
    mut bytes: u64,
    problem: &str,
    closed: impl Fn() -> bool,
    mut step: impl FnMut(usize) -> io::Result<usize>,
) -> io::Result<()> {
    let mut progress = Instant::now();
    while bytes > 0 && !closed() {
        match step(usize::try_from(bytes).unwrap_or(usize::MAX)) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => (bytes, progress) = (bytes - count as u64, Instant::now()),
            Err(error) if is_pause(&error) => check_progress(progress, problem)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A connection whose time-outs can be set.
pub(super) trait SetTimeout {
    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()>;
    fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()>;
}

impl SetTimeout for TcpStream {
    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(timeout)
    }

    fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_write_timeout(timeout)
    }
}

impl<C, T: Read + Write + SetTimeout> SetTimeout for StreamOwned<C, T> {
    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.sock.set_read_timeout(timeout)
    }

    fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.sock.set_write_timeout(timeout)
    }
}

/// Fills `bytes` or fails, by `deadline`.
pub(super) fn read_exact_by(
    stream: &mut (impl Read + SetTimeout),
    bytes: &mut [u8],
    deadline: Instant,
) -> io::Result<()> {
    all_by(bytes.len(), deadline, "reading", |done, timeout| {
        stream.set_read_timeout(Some(timeout))?;
        stream.read(&mut bytes[done..])
    })
}

/// Writes all of `bytes` or fails, by `deadline`.
pub(super) fn write_all_by(
    stream: &mut (impl Write + SetTimeout),
    bytes: &[u8],
    deadline: Instant,
) -> io::Result<()> {
    all_by(bytes.len(), deadline, "writing", |done, timeout| {
        stream.set_write_timeout(Some(timeout))?;
        stream.write(&bytes[done..])
    })
}

/// Calls `step` with the number of bytes done and a time-out until `count` bytes are done. Fails at
/// `deadline`.
fn all_by(
    count: usize,
    deadline: Instant,
    doing: &str,
    mut step: impl FnMut(usize, Duration) -> io::Result<usize>,
) -> io::Result<()> {
    let mut done = 0;
    while done < count {
        let rest = deadline.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return Err(io::Error::new(ErrorKind::TimedOut, format!("{doing} timed out")));
        }
        match step(done, rest.min(POLL)) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(moved) => done += moved,
            Err(error) if is_pause(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
