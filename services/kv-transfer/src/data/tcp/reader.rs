//! Reads frames into the blocks posted for them.

use std::{
    io::{self, Read},
    time::{Duration, Instant},
};

use kernels::BlockWrite;
use xxhash_rust::xxh3::Xxh3;

use super::{
    super::{
        Incoming, Moved,
        inbox::Inbox,
        invalid,
        stream::{POLL, SetTimeout, check_progress, is_pause, move_bytes, read_exact_by},
    },
    Payload,
    frame::{HEADER_BYTES, Header},
};
use crate::{api::TransferId, config::LEASE, transport::ChunkId};

/// Largest unwanted frame that is skipped; a larger one closes the connection.
const DRAIN_BYTES_MAX: u64 = 256 << 20;

/// Most bytes read and hashed at a time.
const PIECE_BYTES: usize = 256 << 10;

/// Time-out of one read on an idle connection.
const IDLE_POLL: Duration = Duration::from_secs(1);

/// Receives frames until the peer closes the connection between two frames, or an error occurs.
/// Sets `has_frames` once a header has arrived.
pub(in crate::data) fn read_frames(
    incoming: &Incoming<'_>,
    stream: &mut (impl Read + SetTimeout),
    has_frames: &mut bool,
) -> io::Result<()> {
    let Incoming { inbox, .. } = *incoming;
    while let Some(header) = read_header(inbox, stream)? {
        *has_frames = true;
        let chunk = ChunkId { transfer: header.transfer, index: header.chunk };
        let Some(blocks) = incoming.take(chunk) else {
            // The transfer was cancelled here while the frame was in flight.
            if header.payload_bytes > DRAIN_BYTES_MAX {
                let reason = format!(
                    "cannot skip an unwanted frame of {} bytes; expected at most 256 MiB",
                    header.payload_bytes
                );
                return Err(invalid(reason));
            }
            drain(inbox, stream, header.payload_bytes)?;
            continue;
        };
        // `read_payload` drops the guards of the blocks, so that the report may give them another
        // owner.
        let read = read_payload(incoming, stream, &header, blocks);
        let written = match &read {
            Ok(Payload::Whole(moved)) => Ok(*moved),
            Ok(Payload::Cut { .. }) => Err("the data connection was closed".to_owned()),
            Err(error) => Err(format!("chunk {}: {error}", header.chunk)),
        };
        incoming.report(chunk, written);
        if let Payload::Cut { rest } = read? {
            drain(inbox, stream, rest)?;
        }
    }
    Ok(())
}

/// Returns `None` if the connection closes before the first byte of a header.
fn read_header(inbox: &Inbox, stream: &mut (impl Read + SetTimeout)) -> io::Result<Option<Header>> {
    let mut bytes = [0; HEADER_BYTES];
    stream.set_read_timeout(Some(IDLE_POLL))?;
    let first = loop {
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(None),
            Ok(count) => break count,
            Err(error) if is_pause(&error) => {
                if inbox.is_closed() {
                    return Ok(None);
                }
            }
            // A peer that was killed ends TLS without a message.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
    };
    read_exact_by(stream, &mut bytes[first..], Instant::now() + LEASE)?;
    stream.set_read_timeout(Some(POLL))?;
    let header = Header::from_bytes(&bytes);
    header.map(Some).ok_or_else(|| invalid("invalid frame header".to_owned()))
}

fn read_payload(
    incoming: &Incoming<'_>,
    stream: &mut impl Read,
    header: &Header,
    mut blocks: Vec<BlockWrite>,
) -> io::Result<Payload> {
    let posted_bytes: u64 = blocks.iter().map(|block| block.byte_count() as u64).sum();
    if posted_bytes != header.payload_bytes {
        let reason = format!(
            "frame of {} bytes; expected the {posted_bytes} bytes that were posted",
            header.payload_bytes
        );
        return Err(invalid(reason));
    }
    let mut frame = Frame {
        inbox: incoming.inbox,
        transfer: header.transfer,
        stream,
        hash: Xxh3::new(),
        rest: header.payload_bytes,
    };
    let is_host = blocks.iter_mut().all(|block| block.host_view_mut().is_some());
    let is_whole = if is_host {
        let views = blocks.iter_mut().filter_map(BlockWrite::host_view_mut);
        frame.read(&mut views.collect::<Vec<_>>())?
    } else {
        incoming.shared.staging.receive(blocks, |views| frame.read(views))?
    };
    if !is_whole {
        return Ok(Payload::Cut { rest: frame.rest });
    }
    Ok(Payload::Whole(Moved { integrity: frame.hash.digest(), bytes: header.payload_bytes }))
}

/// The payload of a frame that is being read.
struct Frame<'a, R> {
    inbox: &'a Inbox,
    transfer: TransferId,
    stream: &'a mut R,
    hash: Xxh3,
    /// Bytes that are not read yet.
    rest: u64,
}

impl<R: Read> Frame<'_, R> {
    /// Fills the views with the next bytes. Returns false if the transfer was cancelled meanwhile.
    fn read(&mut self, views: &mut [&mut [u8]]) -> io::Result<bool> {
        let mut progress = Instant::now();
        for piece in views.iter_mut().flat_map(|view| view.chunks_mut(PIECE_BYTES)) {
            let mut done = 0;
            while done < piece.len() {
                if self.inbox.is_cancelled(self.transfer) {
                    return Ok(false);
                }
                match self.stream.read(&mut piece[done..]) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(count) => {
                        // Hash the bytes while they are in the CPU cache.
                        self.hash.update(&piece[done..done + count]);
                        done += count;
                        self.rest -= count as u64;
                        progress = Instant::now();
                    }
                    Err(error) if is_pause(&error) => check_progress(progress, "received no byte")?,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(true)
    }
}

/// Skips the rest of an unwanted frame.
fn drain(inbox: &Inbox, stream: &mut impl Read, bytes: u64) -> io::Result<()> {
    let mut scratch = [0; 64 << 10];
    let read = |most: usize| stream.read(&mut scratch[..most.min(64 << 10)]);
    move_bytes(bytes, "received no byte", || inbox.is_closed(), read)
}
