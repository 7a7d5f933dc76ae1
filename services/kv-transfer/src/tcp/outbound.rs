//! The sending end of a data connection: the thread that makes it and writes chunks, and one that only
//! waits for the connection's end. A receiver says nothing here, so a read that returns is the first
//! sign that it has died.

use std::{
    io::{self, Read},
    net::{Shutdown, SocketAddr, TcpStream},
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
    let addresses = shared.resolver.resolve(endpoint).map_err(io::Error::other)?;
    loop {
        let error = match connect_once(shared, peer, &addresses, deadline) {
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

/// Tries each address until `deadline`, the first in any case.
fn connect_once(
    shared: &Shared,
    peer: Epoch,
    addresses: &[SocketAddr],
    deadline: Instant,
) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in addresses {
        let made = TcpStream::connect_timeout(address, CONNECT_TIMEOUT).and_then(|mut stream| {
            stream.set_nodelay(true)?;
            handshake::connect(&mut stream, &shared.keys, shared.me, peer)
                .map_err(io::Error::other)?;
            Ok(stream)
        });
        match made {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
        if Instant::now() >= deadline {
            break;
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicU64};

    use crossbeam_channel::bounded;

    use super::*;
    use crate::{config::ClusterSecret, notice::Keys, resolve::Resolver, transport::Report};

    #[test]
    fn a_name_that_nobody_has_ends_the_connection() {
        let (reports, reported) = bounded(4);
        let shared = Shared {
            me: Epoch(1),
            keys: Keys::derive(&ClusterSecret::new("the secret of this test").unwrap()),
            reports,
            resolver: Resolver::system(),
            counters: Arc::default(),
            connections: AtomicU64::new(0),
        };
        let outbox = Outbox::new(shared.number_connection());
        run(&shared, &outbox, Epoch(2), "tcp://nowhere.invalid:9");
        let Ok(Report::Ended { peer, connection, reason }) = reported.try_recv() else {
            panic!("its end is reported");
        };
        assert_eq!((peer, connection), (Epoch(2), outbox.connection()));
        assert!(
            reason.contains("it was not made: ") && reason.contains("nowhere.invalid"),
            "{reason}"
        );
    }
}
