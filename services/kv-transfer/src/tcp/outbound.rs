//! The sending end of a data connection: the thread that makes it and writes chunks, and one that only
//! waits for the connection's end. A receiver says nothing here, so a read that returns is the first
//! sign that it has died.

use std::{
    io::{self, Read},
    net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs},
    thread,
    time::{Duration, Instant},
};

use super::{Shared, handshake, outbox::Outbox, stream::is_pause, writer::write_frames};
use crate::{api::Epoch, config::LEASE};

const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long the watcher sits in one read.
const WATCH: Duration = Duration::from_secs(1);
const CONNECT_PAUSE: Duration = Duration::from_millis(50);

/// The writer thread, from connecting to the end of the connection.
pub fn run(shared: &Shared, outbox: &Outbox, peer: Epoch, endpoint: &str) {
    let reason = match connect(shared, outbox, peer, endpoint) {
        Ok(Some(stream)) => match use_connection(shared, outbox, stream) {
            Ok(()) => "it was closed".to_owned(),
            Err(error) => error.to_string(),
        },
        Ok(None) => "it was closed".to_owned(),
        Err(error) => format!("it was not made: {error}"),
    };
    if let Some(reason) = outbox.end(reason) {
        let reason = format!("data connection to {endpoint}: {reason}");
        shared.report_end(peer, outbox.connection(), reason);
    }
}

/// Tries for one lease; `None` when the outbox was closed meanwhile.
fn connect(
    shared: &Shared,
    outbox: &Outbox,
    peer: Epoch,
    endpoint: &str,
) -> io::Result<Option<TcpStream>> {
    let deadline = Instant::now() + LEASE;
    loop {
        let error = match connect_once(shared, peer, endpoint) {
            Ok(stream) => return Ok(outbox.connected(&stream)?.then_some(stream)),
            Err(error) => error,
        };
        // A peer that has greeted us listens: when nobody does any more it is gone. What else fails
        // may be a listener that is busy with strangers.
        if error.kind() == io::ErrorKind::ConnectionRefused || Instant::now() >= deadline {
            return Err(error);
        }
        if !outbox.pause(CONNECT_PAUSE) {
            return Ok(None);
        }
    }
}

fn connect_once(shared: &Shared, peer: Epoch, endpoint: &str) -> io::Result<TcpStream> {
    let host_and_port = endpoint.strip_prefix("tcp://").unwrap_or(endpoint);
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    let addresses: Vec<SocketAddr> = host_and_port.to_socket_addrs()?.collect();
    for address in addresses {
        let made = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).and_then(|mut stream| {
            stream.set_nodelay(true)?;
            handshake::connect(&mut stream, &shared.keys, shared.me, peer)
                .map_err(io::Error::other)?;
            Ok(stream)
        });
        match made {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Until the outbox is closed or the connection ends.
fn use_connection(shared: &Shared, outbox: &Outbox, mut stream: TcpStream) -> io::Result<()> {
    let watched = stream.try_clone()?;
    thread::scope(|scope| {
        thread::Builder::new()
            .name("kv-data-watch".to_owned())
            .spawn_scoped(scope, || watch(outbox, watched))?;
        let written = write_frames(shared, outbox, &mut stream);
        // Ends the watcher. Fails only when the connection is gone already.
        let _ = stream.shutdown(Shutdown::Both);
        written
    })
}

fn watch(outbox: &Outbox, mut stream: TcpStream) {
    let reason = loop {
        match stream.set_read_timeout(Some(WATCH)).and_then(|()| stream.read(&mut [0; 1])) {
            Ok(0) => break "the peer closed it".to_owned(),
            Ok(_) => break "the peer spoke where it has nothing to say".to_owned(),
            Err(error) if is_pause(&error) => {}
            Err(error) => break error.to_string(),
        }
        if outbox.is_closed() {
            return;
        }
    };
    outbox.break_off(reason);
}
