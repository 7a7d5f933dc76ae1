//! KV over sockets, directly between blocks in host memory, or through pinned memory of the blocks of GPUs
//! ([`staging`](super::staging)). Used by hosts without a GPU and by pairs on different hosts.
//!
//! A sender opens one connection, and further ones of the same group while several chunks are queued. Each connection
//! is a sequence of frames ([`frame`]), one per chunk. Each end of a connection has one thread that moves bytes:
//! `writer` from borrowed blocks, `reader` into posted blocks. Each chunk's xxh3 is part of `DONE`. The end of one
//! connection ends the group.

pub mod frame;
mod reader;
mod writer;

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    thread,
    time::Duration,
};

pub(in crate::data) use reader::read_frames;

use super::{
    Moved, Outgoing,
    outbox::Outbox,
    stream::{POLL, is_pause},
    tls::TlsSender,
};

/// Time-out of one read of the watcher.
const WATCH: Duration = Duration::from_secs(1);

/// Result of reading or writing the payload of a frame.
enum Payload {
    /// The blocks are released.
    Whole(Moved),
    /// Cancelled: the blocks are released, and `rest` bytes of the frame remain.
    Cut { rest: u64 },
}

/// A connection after its handshake.
pub(in crate::data) type Connected = (TcpStream, Option<TlsSender>);

/// Sends chunks until the outbox is closed or a connection ends. Uses up to `connections_max` connections: `first`, and
/// further ones that `connect` opens while several chunks are queued. `connect` returns `None` once the outbox is closed.
pub(in crate::data) fn send_chunks(
    outgoing: &Outgoing<'_>,
    first: Connected,
    connections_max: usize,
    connect: impl Fn() -> io::Result<Option<Connected>> + Sync,
) -> io::Result<()> {
    let outbox = outgoing.outbox;
    outgoing.shared.staging.prepare();
    let use_another = |number| {
        if !outbox.await_need(number) {
            return;
        }
        match connect() {
            Ok(Some(connected)) => {
                if let Err(error) = use_connection(outgoing, number, connected) {
                    outbox.break_off(error.to_string());
                }
            }
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(%error, peer = %outgoing.peer, number, "cannot open a further tcp connection");
            }
        }
    };
    thread::scope(|scope| {
        for number in 1..connections_max {
            thread::Builder::new()
                .name("kv-data-out".to_owned())
                .spawn_scoped(scope, move || use_another(number))?;
        }
        let written = use_connection(outgoing, 0, first);
        if let Err(error) = &written {
            // Ends the other connections.
            outbox.break_off(error.to_string());
        }
        written
    })
}

/// Writes frames to one connection until the outbox is closed or a connection ends. The receiver sends nothing on this
/// connection, so a separate thread waits in a read to detect its death.
fn use_connection(
    outgoing: &Outgoing<'_>,
    number: usize,
    (mut stream, tls): Connected,
) -> io::Result<()> {
    stream.set_write_timeout(Some(POLL))?;
    let watched = stream.try_clone()?;
    thread::scope(|scope| {
        thread::Builder::new()
            .name("kv-data-watch".to_owned())
            .spawn_scoped(scope, || watch(outgoing.outbox, watched))?;
        let written = match tls {
            Some(mut tls) => {
                let written = writer::write_frames(outgoing, number, &mut tls);
                // TLS requires it: without it the receiver cannot tell this end from a truncated stream.
                tls.conn.send_close_notify();
                let _ = tls.flush();
                written
            }
            None => writer::write_frames(outgoing, number, &mut stream),
        };
        // Stops the watcher. Fails only if the connection has already closed.
        let _ = stream.shutdown(Shutdown::Both);
        written
    })
}

fn watch(outbox: &Outbox, mut stream: TcpStream) {
    let reason = loop {
        match stream.set_read_timeout(Some(WATCH)).and_then(|()| stream.read(&mut [0; 1])) {
            Ok(0) => break "the peer closed the connection".to_owned(),
            Ok(_) => {
                break "protocol error: the peer sent data on a send-only connection".to_owned();
            }
            Err(error) if is_pause(&error) => {}
            Err(error) => break error.to_string(),
        }
        if outbox.is_closed() {
            return;
        }
    };
    outbox.break_off(reason);
}
