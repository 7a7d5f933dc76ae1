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
        in_flight::GivenBack,
        outbox::{Job, Outbox},
        stream::{check_progress, is_pause, move_bytes},
        tls,
    },
    Payload,
    frame::Header,
};
use crate::{api::TransferId, transport::ChunkId};

/// Slices hashed and written at a time, and the size of each: 256 KiB still are in the L2 cache when
/// the kernel copies them.
const PIECE_SLICES: usize = 16;
const SLICE_BYTES: usize = 16 << 10;

/// Writes frames until the outbox is closed or the connection ends.
pub fn write_frames(outgoing: &Outgoing<'_>, stream: &mut impl Write) -> io::Result<()> {
    let outbox = outgoing.outbox;
    while let Some(job) = outbox.next(1) {
        let chunk = job.chunk;
        let written = write_frame(outbox, stream, job);
        // `write_frame` drops the blocks in every case.
        let given_back = match (outbox.give_back(chunk), &written) {
            (GivenBack::Wanted(_), Ok(Payload::Whole(moved))) => GivenBack::Wanted(*moved),
            // The end of the connection fails the transfer.
            (GivenBack::Wanted(_), _) => GivenBack::Cancelled,
            (given_back, _) => given_back,
        };
        outgoing.report(chunk, given_back);
        if let Payload::Cut { rest } = written? {
            // The next frame must start where the reader expects it.
            fill(outbox, stream, rest)?;
        }
    }
    Ok(())
}

/// Writes one frame and releases its blocks.
fn write_frame(outbox: &Outbox, stream: &mut impl Write, job: Job) -> io::Result<Payload> {
    let ChunkId { transfer, index } = job.chunk;
    let payload_bytes: u64 = job.blocks.iter().map(|block| block.byte_count() as u64).sum();
    let header = Header { transfer, chunk: index, payload_bytes }.to_bytes();
    let staged = staged(&job.blocks)?;
    let views: Vec<&[u8]> = match &staged {
        None => job.blocks.iter().filter_map(BlockRead::host_view).collect(),
        Some(copies) => copies.iter().map(Vec::as_slice).collect(),
    };
    let slices = slices(&views);
    let mut pieces = slices.chunks(PIECE_SLICES);
    let mut hash = Xxh3::new();
    let mut rest = header.len() as u64 + payload_bytes;
    // The header is written together with the first piece.
    let mut head = Some(&header[..]);
    while rest > 0 {
        let piece = pieces.next().unwrap_or_default();
        piece.iter().for_each(|slice| hash.update(slice));
        let mut slices: Vec<IoSlice<'_>> =
            head.take().into_iter().chain(piece.iter().copied()).map(IoSlice::new).collect();
        if !write_piece(outbox, transfer, stream, &mut slices, &mut rest)? {
            return Ok(Payload::Cut { rest });
        }
    }
    tls::flush(stream)?;
    Ok(Payload::Whole(Moved { integrity: hash.digest(), bytes: payload_bytes }))
}

/// Copies GPU blocks to host memory; `None` if the blocks are in host memory.
fn staged(blocks: &[BlockRead]) -> io::Result<Option<Vec<Vec<u8>>>> {
    if blocks.iter().all(|block| block.host_view().is_some()) {
        return Ok(None);
    }
    let copy = |block: &BlockRead| {
        let mut copy = vec![0; block.byte_count()];
        block.copy_to_host(&mut copy).map(|()| copy)
    };
    blocks.iter().map(copy).collect::<Result<_, _>>().map(Some).map_err(io::Error::other)
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
