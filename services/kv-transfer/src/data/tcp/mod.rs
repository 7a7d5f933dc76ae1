//! KV through a socket: from the arena's blocks into the arena's blocks, for hosts without a GPU and
//! for pairs on different hosts.
//!
//! A sequence of frames ([`frame`]). Either end has one thread that moves bytes: `writer` straight
//! from borrowed blocks, `reader` straight into the posted ones. Each chunk's xxh3 travels in the
//! signed `DONE`.

pub mod frame;
mod reader;
mod writer;

use std::{
    io::{self, Read},
    net::{Shutdown, TcpStream},
    thread,
    time::Duration,
};

pub(in crate::data) use reader::read_frames;

use super::{Shared, outbox::Outbox, stream::is_pause};

/// How long the watcher sits in one read.
const WATCH: Duration = Duration::from_secs(1);

/// Until the outbox is closed or the connection ends. A receiver says nothing here, so a read that
/// returns is the first sign that it has died: one thread only waits for that.
pub(in crate::data) fn send_chunks(
    shared: &Shared,
    outbox: &Outbox,
    mut stream: TcpStream,
) -> io::Result<()> {
    let watched = stream.try_clone()?;
    thread::scope(|scope| {
        thread::Builder::new()
            .name("kv-data-watch".to_owned())
            .spawn_scoped(scope, || watch(outbox, watched))?;
        let written = writer::write_frames(shared, outbox, &mut stream);
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
