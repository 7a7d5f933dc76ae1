//! Writes the chunks of an outbox to its connection, directly from the blocks.

use std::{
    io::{self, IoSlice, Write},
    time::Instant,
};

use kernels::BlockRead;
use xxhash_rust::xxh3::Xxh3;

use super::{
    super::{
        Moved, Outgoing,
        in_flight::ChunkOutcome,
        outbox::{Job, Outbox},
        stream::{check_progress, is_pause, move_bytes},
        tls,
    },
    Payload,
    frame::{HEADER_BYTES, Header},
};
use crate::{api::TransferId, transport::ChunkId};

/// Slices hashed and written at a time, and the size of each: 256 KiB still are in the L2 cache
/// when the kernel copies them.
const PIECE_SLICES: usize = 16;
const SLICE_BYTES: usize = 16 << 10;

/// Writes frames until the outbox is closed, or connection `number` or its group has ended.
pub(super) fn write_frames(
    outgoing: &Outgoing<'_>,
    number: usize,
    stream: &mut impl Write,
) -> io::Result<()> {
    let outbox = outgoing.outbox;
    while let Some(job) = outbox.next_of_connection(number) {
        let chunk = job.chunk;
        let written = write_frame(outgoing, stream, job);
        // `write_frame` drops the blocks in every case.
        let outcome = match (outbox.end_chunk(chunk), &written) {
            (ChunkOutcome::Moved(_), Ok(Payload::Whole(moved))) => ChunkOutcome::Moved(*moved),
            // The end of the connection fails the transfer.
            (ChunkOutcome::Moved(_), _) => ChunkOutcome::Cancelled,
            (outcome, _) => outcome,
        };
        outgoing.report(chunk, outcome);
        if let Payload::Cut { rest } = written? {
            // The next frame must start where the reader expects it.
            fill(outbox, stream, rest)?;
        }
    }
    Ok(())
}

/// Writes one frame and releases its blocks.
fn write_frame(outgoing: &Outgoing<'_>, stream: &mut impl Write, job: Job) -> io::Result<Payload> {
    let Job { chunk: ChunkId { transfer, index }, blocks } = job;
    let payload_bytes: u64 = blocks.iter().map(|block| block.byte_count() as u64).sum();
    let header = Header { transfer, chunk: index, payload_bytes }.to_bytes();
    let mut frame = Frame {
        outbox: outgoing.outbox,
        transfer,
        stream,
        hash: Xxh3::new(),
        header: Some(header),
        rest: header.len() as u64 + payload_bytes,
    };
    let is_host = blocks.iter().all(|block| block.host_view().is_some());
    let is_whole = if is_host {
        frame.write(&blocks.iter().filter_map(BlockRead::host_view).collect::<Vec<_>>())?
    } else {
        outgoing.shared.staging.send(blocks, |views| frame.write(views))?
    };
    if !is_whole {
        return Ok(Payload::Cut { rest: frame.rest });
    }
    tls::flush(frame.stream)?;
    Ok(Payload::Whole(Moved { integrity: frame.hash.digest(), bytes: payload_bytes }))
}

/// A frame that is being written.
struct Frame<'a, W> {
    outbox: &'a Outbox,
    transfer: TransferId,
    stream: &'a mut W,
    hash: Xxh3,
    /// `None` once written together with the first piece.
    header: Option<[u8; HEADER_BYTES]>,
    /// Bytes that are not written yet.
    rest: u64,
}

impl<W: Write> Frame<'_, W> {
    /// Writes the next part of the payload. Returns false if the transfer was cancelled meanwhile.
    fn write(&mut self, views: &[&[u8]]) -> io::Result<bool> {
        for piece in slices(views).chunks(PIECE_SLICES) {
            piece.iter().for_each(|slice| self.hash.update(slice));
            let header = self.header.take();
            let header = header.as_ref().map(|header| &header[..]);
            let mut slices: Vec<IoSlice<'_>> =
                header.into_iter().chain(piece.iter().copied()).map(IoSlice::new).collect();
            let Self { outbox, transfer, stream, rest, .. } = self;
            if !write_piece(outbox, *transfer, *stream, &mut slices, rest)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns false if the transfer was cancelled meanwhile.
fn write_piece(
    outbox: &Outbox,
    transfer: TransferId,
    stream: &mut impl Write,
    mut slices: &mut [IoSlice<'_>],
    rest: &mut u64,
) -> io::Result<bool> {
    let mut progress = Instant::now();
    while !slices.is_empty() {
        match stream.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                *rest -= count as u64;
                IoSlice::advance_slices(&mut slices, count);
                progress = Instant::now();
            }
            Err(error) if is_pause(&error) => {
                check_progress(progress, "the peer accepted no byte")?
            }
            Err(error) => return Err(error),
        }
        if outbox.is_cancelled(transfer) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes zeros in place of the rest of a cancelled frame.
fn fill(outbox: &Outbox, stream: &mut impl Write, bytes: u64) -> io::Result<()> {
    let zeros = [0; 16 << 10];
    let write = |most: usize| stream.write(&zeros[..most.min(zeros.len())]);
    move_bytes(bytes, "the peer accepted no byte", || outbox.is_closed(), write)
}

/// Splits the views, so that `PIECE_SLICES` slices have at most 256 KiB.
fn slices<'a>(views: &[&'a [u8]]) -> Vec<&'a [u8]> {
    views.iter().flat_map(|view| view.chunks(SLICE_BYTES)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_are_bounded_and_cover_all_bytes(
            lengths in prop::collection::vec(0usize..700_000, 0..40),
        ) {
            let bytes: Vec<Vec<u8>> = lengths
                .iter()
                .enumerate()
                .map(|(index, length)| vec![index as u8; *length])
                .collect();
            let views: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
            let (slices, mut joined) = (slices(&views), Vec::new());
            for piece in slices.chunks(PIECE_SLICES) {
                prop_assert!(piece.concat().len() <= 256 << 10);
                joined.extend(piece.concat());
            }
            prop_assert_eq!(joined, bytes.concat());
        }
    }
}
