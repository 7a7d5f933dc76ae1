//! Reading and writing with deadlines, on blocking sockets with short timeouts.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

/// How long a thread sits in one system call before it looks whether it is still wanted.
pub const LOOK: Duration = Duration::from_millis(50);

/// True for the ways in which a timeout or a signal shows.
pub fn is_pause(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn too_late(doing: &str) -> io::Error {
    io::Error::new(ErrorKind::TimedOut, format!("{doing} took too long"))
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
        stream.set_read_timeout(Some(rest.min(LOOK)))?;
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
        stream.set_write_timeout(Some(rest.min(LOOK)))?;
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if is_pause(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
