//! KV over a socket, copied directly between the arenas' blocks. Used by hosts without a GPU and by
//! pairs on different hosts.
//!
//! The stream is a sequence of frames ([`frame`]). Each end has one thread that moves bytes:
//! `writer` from borrowed blocks, `reader` into posted blocks. Each chunk's xxh3 is part of `DONE`.

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

/// Sends chunks until the outbox is closed or the connection ends. The receiver sends nothing on
/// this connection, so a separate thread waits in a read to detect its death.
pub(in crate::data) fn send_chunks(
    outgoing: &Outgoing<'_>,
    mut stream: TcpStream,
    tls: Option<TlsSender>,
) -> io::Result<()> {
    stream.set_write_timeout(Some(POLL))?;
    let watched = stream.try_clone()?;
    thread::scope(|scope| {
        thread::Builder::new()
            .name("kv-data-watch".to_owned())
            .spawn_scoped(scope, || watch(outgoing.outbox, watched))?;
        let written = match tls {
            Some(mut tls) => {
                let written = writer::write_frames(outgoing, &mut tls);
                // TLS requires it: without it the receiver cannot tell this end from a truncated stream.
                tls.conn.send_close_notify();
                let _ = tls.flush();
                written
            }
            None => writer::write_frames(outgoing, &mut stream),
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
