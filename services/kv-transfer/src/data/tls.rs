//! TLS on the data connections of `tcp`: the sender is the TLS client and writes, the listener only
//! reads.

use std::{
    io::{self, BufReader, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use credentials::ClusterTls;
use rustls::{ClientConnection, ConnectionCommon, ServerConnection, SideData, StreamOwned};

use super::stream::{POLL, SetTimeout, check_progress, is_pause};

/// Bytes that one system call reads. rustls asks for 4 KiB at a time.
const READ_BYTES: usize = 256 << 10;
/// Bytes that a sender encrypts before it writes them: as many as it hashes at a time.
const WRITE_BYTES: usize = 256 << 10;
/// Purpose of the bytes that bind a tag to its TLS connection.
const BINDING_LABEL: &[u8] = b"EXPORTER-baton-kv";
const BINDING_BYTES: usize = 32;

/// The sending end.
pub(super) type TlsSender = StreamOwned<ClientConnection, TcpStream>;
/// The receiving end.
pub(super) type TlsReceiver = StreamOwned<ServerConnection, Buffered>;

/// A socket whose reads are buffered.
pub(super) struct Buffered(BufReader<TcpStream>);

impl Read for Buffered {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Buffered {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.get_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.get_mut().flush()
    }
}

impl SetTimeout for Buffered {
    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.get_ref().set_read_timeout(timeout)
    }

    fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.get_ref().set_write_timeout(timeout)
    }
}

/// Runs the sender's handshake. Also returns keying material (RFC 5705) that only the two ends of
/// the connection know.
pub(super) fn connect(
    tls: &ClusterTls,
    stream: &TcpStream,
    deadline: Instant,
) -> io::Result<(TlsSender, [u8; BINDING_BYTES])> {
    let mut session =
        ClientConnection::new(tls.client.clone(), tls.name.clone()).map_err(io::Error::other)?;
    let mut stream = stream.try_clone()?;
    shake_hands(&mut session, &mut stream, deadline)?;
    session.set_buffer_limit(Some(WRITE_BYTES));
    let binding = binding(&session)?;
    Ok((StreamOwned::new(session, stream), binding))
}

/// Runs the listener's handshake, as [`connect`].
pub(super) fn accept(
    tls: &ClusterTls,
    stream: &TcpStream,
    deadline: Instant,
) -> io::Result<(TlsReceiver, [u8; BINDING_BYTES])> {
    let mut session = ServerConnection::new(tls.server.clone()).map_err(io::Error::other)?;
    let mut stream = Buffered(BufReader::with_capacity(READ_BYTES, stream.try_clone()?));
    shake_hands(&mut session, &mut stream, deadline)?;
    let binding = binding(&session)?;
    Ok((StreamOwned::new(session, stream), binding))
}

fn shake_hands<S: SideData>(
    session: &mut ConnectionCommon<S>,
    stream: &mut (impl Read + Write + SetTimeout),
    deadline: Instant,
) -> io::Result<()> {
    stream.set_read_timeout(Some(POLL))?;
    stream.set_write_timeout(Some(POLL))?;
    let mut stream = Until { stream, deadline };
    while session.is_handshaking() || session.wants_write() {
        match session.complete_io(&mut stream) {
            Ok(_) => {}
            Err(error) if is_pause(&error) => {}
            Err(error) => return Err(error),
        }
        if Instant::now() >= deadline {
            return Err(timed_out());
        }
    }
    Ok(())
}

/// A stream that fails after its deadline. Needed because `complete_io` does not return before the
/// end of the handshake while bytes keep arriving.
struct Until<'a, T> {
    stream: &'a mut T,
    deadline: Instant,
}

impl<T> Until<'_, T> {
    fn check(&self) -> io::Result<()> {
        if Instant::now() < self.deadline { Ok(()) } else { Err(timed_out()) }
    }
}

impl<T: Read> Read for Until<'_, T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.check()?;
        self.stream.read(bytes)
    }
}

impl<T: Write> Write for Until<'_, T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.check()?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake timed out")
}

fn binding<S: SideData>(session: &ConnectionCommon<S>) -> io::Result<[u8; BINDING_BYTES]> {
    session
        .export_keying_material([0; BINDING_BYTES], BINDING_LABEL, None)
        .map_err(io::Error::other)
}

/// Writes the bytes that were encrypted but not written yet.
pub(super) fn flush(stream: &mut impl Write) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match stream.flush() {
            Ok(()) => return Ok(()),
            Err(error) if is_pause(&error) => {
                check_progress(start, "the peer did not accept the end")?
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread};

    use rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::ServerName};

    use super::*;

    /// A peer that sends a handshake record of 16 KiB, one byte after the other.
    struct Dripping {
        sent: usize,
    }

    impl Read for Dripping {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            thread::sleep(Duration::from_millis(1));
            bytes[0] = [0x16, 3, 3, 0x40, 0].get(self.sent).copied().unwrap_or(0);
            self.sent += 1;
            Ok(1)
        }
    }

    impl Write for Dripping {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl SetTimeout for Dripping {
        fn set_read_timeout(&self, _: Option<Duration>) -> io::Result<()> {
            Ok(())
        }

        fn set_write_timeout(&self, _: Option<Duration>) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn handshake_with_a_peer_that_sends_byte_by_byte_ends_at_its_deadline() {
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
        let name = ServerName::try_from("node").unwrap();
        let mut session = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut peer = Dripping { sent: 0 };
        let deadline = Instant::now() + Duration::from_millis(100);
        let error = shake_hands(&mut session, &mut peer, deadline).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        assert!(peer.sent < 1 << 14, "{} bytes", peer.sent);
    }
}
