//! KV over sockets, directly between blocks in host memory, or through pinned memory of the blocks
//! of GPUs ([`staging`](super::staging)). Used by hosts without a GPU and by pairs on different
//! hosts.
//!
//! A sender opens one connection, and further ones of the same group while several chunks are
//! queued. Each connection is a sequence of frames ([`frame`]), one per chunk. Each end of a
//! connection has one thread that moves bytes: `writer` from borrowed blocks, `reader` into posted
//! blocks. Each chunk's xxh3 is part of `DONE`. The end of the first connection, and that of a
//! connection that has carried a chunk, ends the group: a chunk counts as sent once the kernel has
//! its bytes, and the kernel loses them with the connection.

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

/// Pause before a further connection is opened again.
const RECONNECT_PAUSE: Duration = Duration::from_secs(1);
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

/// Sends chunks until the outbox is closed or a connection fails. Uses up to `connections_max`
/// connections: `first`, and further ones that `connect` opens while several chunks are queued. A
/// further connection is optional: it is opened again after it could not be opened, or has ended
/// before its first chunk. `connect` returns `None` once the outbox is closed.
pub(in crate::data) fn send_chunks(
    outgoing: &Outgoing<'_>,
    first: Connected,
    connections_max: usize,
    connect: impl Fn(usize) -> io::Result<Option<Connected>> + Sync,
) -> io::Result<()> {
    let outbox = outgoing.outbox;
    outgoing.shared.staging.prepare();
    let use_further = |number| {
        while outbox.await_need(number) {
            let used = match connect(number) {
                Ok(Some(connected)) => use_connection(outgoing, number, connected),
                Ok(None) => return,
                Err(error) => Err(error),
            };
            if let Err(error) = used {
                tracing::warn!(%error, peer = %outgoing.peer, number, "cannot use a further tcp connection");
            }
            if !outbox.pause(RECONNECT_PAUSE) {
                return;
            }
        }
    };
    thread::scope(|scope| {
        for number in 1..connections_max {
            let named = thread::Builder::new().name("kv-data-out".to_owned());
            if let Err(error) = named.spawn_scoped(scope, move || use_further(number)) {
                tracing::warn!(%error, number, "cannot start a thread for a further tcp connection");
                break;
            }
        }
        use_connection(outgoing, 0, first)
    })
}

/// Writes frames to one connection until the outbox is closed or a connection ends. The receiver
/// sends nothing on this connection, so a separate thread waits in a read to detect its death. An
/// error ends the group.
fn use_connection(
    outgoing: &Outgoing<'_>,
    number: usize,
    (mut stream, tls): Connected,
) -> io::Result<()> {
    let outbox = outgoing.outbox;
    stream.set_write_timeout(Some(POLL))?;
    let watched = stream.try_clone()?;
    thread::scope(|scope| {
        let watch = || {
            if let Some(reason) = watch(outbox, watched) {
                outbox.lose_connection(number, reason);
            }
        };
        let watching = thread::Builder::new()
            .name("kv-data-watch".to_owned())
            .spawn_scoped(scope, watch)
            .map(drop);
        let written = watching.and_then(|()| match tls {
            Some(mut tls) => {
                let written = writer::write_frames(outgoing, number, &mut tls);
                // TLS requires it: without it the receiver cannot tell this end from a truncated
                // stream.
                tls.conn.send_close_notify();
                let _ = tls.flush();
                written
            }
            None => writer::write_frames(outgoing, number, &mut stream),
        });
        if let Err(error) = &written {
            // Before the watcher, which would name the consequence.
            outbox.break_off(error.to_string());
        }
        // Stops the watcher. Fails only if the connection has already closed.
        let _ = stream.shutdown(Shutdown::Both);
        written
    })
}

/// Waits for the end of a connection and returns its reason; `None` once the outbox is closed.
fn watch(outbox: &Outbox, mut stream: TcpStream) -> Option<String> {
    loop {
        match stream.set_read_timeout(Some(WATCH)).and_then(|()| stream.read(&mut [0; 1])) {
            Ok(0) => return Some("the peer closed the connection".to_owned()),
            Ok(_) => {
                let reason = "protocol error: the peer sent data on a send-only connection";
                return Some(reason.to_owned());
            }
            Err(error) if is_pause(&error) => {}
            Err(error) => return Some(error.to_string()),
        }
        if outbox.is_closed() {
            return None;
        }
    }
}
