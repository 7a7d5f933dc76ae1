//! Reads and writes with deadlines, on blocking sockets with short time-outs.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use crate::config::LEASE;

/// Longest wait of one system call before the thread checks whether it should stop.
pub const POLL: Duration = Duration::from_millis(50);

/// Returns whether the error is a time-out or an interrupted call.
pub fn is_pause(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn too_late(doing: &str) -> io::Error {
    io::Error::new(ErrorKind::TimedOut, format!("{doing} timed out"))
}

/// Fails if the peer has moved no byte of a frame for a lease, even if its heartbeats continue.
pub fn check_progress(since: Instant, problem: &str) -> io::Result<()> {
    if since.elapsed() < LEASE {
        return Ok(());
    }
    let reason = format!("{problem} of a frame for {} s", LEASE.as_secs());
    Err(io::Error::new(ErrorKind::TimedOut, reason))
}

/// Fills `bytes` or fails, by `deadline`.
pub fn read_exact_by(
    stream: &mut TcpStream,
    mut bytes: &mut [u8],
    deadline: Instant,
) -> io::Result<()> {
    while !bytes.is_empty() {
        let rest = deadline.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return Err(too_late("reading"));
        }
        stream.set_read_timeout(Some(rest.min(POLL)))?;
        match stream.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if is_pause(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all of `bytes` or fails, by `deadline`.
pub fn write_all_by(stream: &mut TcpStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let rest = deadline.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return Err(too_late("writing"));
        }
        stream.set_write_timeout(Some(rest.min(POLL)))?;
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if is_pause(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
