//! The chunks of one outgoing transfer, in prompt order.

use std::ops::Range;

use kernels::BlockId;

use crate::{api::TransferId, control};

/// Maximum number of chunks of a transfer that are announced but not yet given to the transport. A
/// step writes several chunks at the same time: on GPUs of 32 MiB each by default, by `tcp` of 8
/// MiB. The receiver should have posted its receives by then.
const AHEAD_MAX: usize = 8;
/// [`AHEAD_MAX`] before the first block is written. Smaller, because all waiting sequences of a
/// node may be in this state: the announcements of 256 sequences take half of the peer's queue.
const FIRST_AHEAD_MAX: usize = 4;

/// The reserved blocks, split into chunks. Each chunk passes through the values of `State` in
/// order. Chunks are announced before their blocks are written, so the receiver has usually posted
/// the receive by then.
#[derive(Debug)]
pub(super) struct Chunks {
    chunks: Vec<Chunk>,
    chunk_blocks: usize,
    /// Block indices in the prompt: start of the reservation, end of the written blocks, end of the
    /// reservation.
    first_block: u32,
    next_block: u32,
    end_block: u32,
    /// Index of the first waiting chunk.
    waiting_from: usize,
    /// All chunks before this index were given to the transport.
    started_to: usize,
    /// Number of chunks in `State::Announced`.
    announced: usize,
    /// Number of chunks in `State::Announced` or `State::Clear`.
    ahead: usize,
    /// Number of chunks in `State::InFlight`.
    in_flight: usize,
}

#[derive(Debug)]
struct Chunk {
    announcement: control::Chunk,
    /// The blocks written so far.
    blocks: Vec<BlockId>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not announced.
    Waiting,
    /// `CHUNK` was sent.
    Announced,
    /// `CTS` has arrived.
    Clear,
    /// All blocks are written, and the transport has the chunk.
    InFlight,
    /// No longer read by the transport.
    Sent { integrity: u64 },
}

impl Chunks {
    /// Splits the reserved blocks of the prompt into chunks of at most `chunk_bytes_max`, and at
    /// least one block.
    pub(super) fn new(
        transfer: TransferId,
        reserved: Range<u32>,
        block_bytes: usize,
        chunk_bytes_max: usize,
    ) -> Self {
        let chunk_blocks = (chunk_bytes_max / block_bytes.max(1)).max(1);
        let begins = reserved.clone().step_by(chunk_blocks);
        let chunk = |(chunk, first_block)| {
            let block_count = (chunk_blocks as u32).min(reserved.end - first_block);
            let bytes = u64::from(block_count) * block_bytes as u64;
            Chunk {
                announcement: control::Chunk { transfer, chunk, first_block, block_count, bytes },
                blocks: Vec::new(),
                state: State::Waiting,
            }
        };
        Self {
            chunks: (0..).zip(begins).map(chunk).collect(),
            chunk_blocks,
            first_block: reserved.start,
            next_block: reserved.start,
            end_block: reserved.end,
            waiting_from: 0,
            started_to: 0,
            announced: 0,
            ahead: 0,
            in_flight: 0,
        }
    }

    /// Adds a written range. Skips blocks before the reservation; after that each range must start
    /// where the previous one ended. Fails otherwise.
    pub(super) fn add(&mut self, first_block: u32, blocks: &[BlockId]) -> Result<(), String> {
        let skipped = self.next_block.saturating_sub(first_block) as usize;
        let end_block = first_block as usize + blocks.len();
        let rest = blocks.get(skipped..).unwrap_or_default();
        let is_first = self.next_block == self.first_block;
        let in_order = first_block <= self.next_block && (skipped == 0 || is_first);
        if !in_order || (!rest.is_empty() && end_block > self.end_block as usize) {
            return Err(format!(
                "invalid range: blocks {first_block} to {end_block} were written; expected {} to {}",
                self.next_block, self.end_block
            ));
        }
        for block in rest {
            let chunk = (self.next_block - self.first_block) as usize / self.chunk_blocks;
            self.chunks[chunk].blocks.push(*block);
            self.next_block += 1;
        }
        Ok(())
    }

    /// Marks the next waiting chunk as announced and returns it. Returns `None` if enough chunks
    /// are ahead.
    pub(super) fn announce(&mut self) -> Option<&control::Chunk> {
        let is_begun = self.next_block > self.first_block;
        if self.ahead >= if is_begun { AHEAD_MAX } else { FIRST_AHEAD_MAX } {
            return None;
        }
        let chunk = self.chunks.get_mut(self.waiting_from)?;
        chunk.state = State::Announced;
        self.waiting_from += 1;
        self.announced += 1;
        self.ahead += 1;
        Some(&chunk.announcement)
    }

    /// Returns the announced chunks whose `CTS` has not arrived.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = &control::Chunk> {
        let ahead = self.chunks[self.started_to..self.waiting_from].iter();
        let unanswered = ahead.filter(|chunk| chunk.state == State::Announced);
        unanswered.map(|chunk| &chunk.announcement)
    }

    pub(super) fn has_unanswered(&self) -> bool {
        self.announced > 0
    }

    /// Marks a chunk whose `CTS` has arrived. Returns false if it was marked before. Fails if the
    /// chunk was not announced.
    pub(super) fn clear(&mut self, chunk: u32) -> Result<bool, String> {
        match self.chunks.get_mut(chunk as usize) {
            None | Some(Chunk { state: State::Waiting, .. }) => {
                Err(format!("CTS for chunk {chunk}, which was not announced"))
            }
            Some(Chunk { state: state @ State::Announced, .. }) => {
                *state = State::Clear;
                self.announced -= 1;
                Ok(true)
            }
            Some(_) => Ok(false),
        }
    }

    /// Returns the next chunk that is written and has a `CTS`, with its blocks, and marks it as
    /// given to the transport.
    pub(super) fn start_next(&mut self) -> Option<(u32, Vec<BlockId>)> {
        let is_due = |chunk: &Chunk| {
            chunk.state == State::Clear
                && chunk.blocks.len() == chunk.announcement.block_count as usize
        };
        let ahead = &self.chunks[self.started_to..self.waiting_from];
        let index = self.started_to + ahead.iter().position(is_due)?;
        let started = &mut self.chunks[index];
        started.state = State::InFlight;
        let blocks = started.blocks.clone();
        self.ahead -= 1;
        self.in_flight += 1;
        let is_started =
            |chunk: &Chunk| matches!(chunk.state, State::InFlight | State::Sent { .. });
        while self.chunks.get(self.started_to).is_some_and(is_started) {
            self.started_to += 1;
        }
        Some((index as u32, blocks))
    }

    pub(super) fn sent(&mut self, chunk: u32, integrity: u64) {
        if let Some(sent) = self.chunks.get_mut(chunk as usize)
            && sent.state == State::InFlight
        {
            sent.state = State::Sent { integrity };
            self.in_flight -= 1;
        }
    }

    /// Returns whether the transport may still read blocks of this transfer.
    pub(super) fn are_read(&self) -> bool {
        self.in_flight > 0
    }

    /// Returns the blocks of the prompt that the node still has to write.
    pub(super) fn due(&self) -> Range<u32> {
        self.next_block..self.end_block
    }

    /// Returns one integrity value per chunk once all chunks are sent.
    pub(super) fn integrity(&self) -> Option<Vec<u64>> {
        if self.started_to < self.chunks.len() || self.in_flight > 0 {
            return None;
        }
        let value = |chunk: &Chunk| match chunk.state {
            State::Sent { integrity } => Some(integrity),
            State::Waiting | State::Announced | State::Clear | State::InFlight => None,
        };
        self.chunks.iter().map(value).collect()
    }

    pub(super) fn count(&self) -> u32 {
        self.chunks.len() as u32
    }

    /// Returns the size of all chunks.
    pub(super) fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.announcement.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(count: u32) -> Vec<BlockId> {
        (0..count).map(BlockId).collect()
    }

    fn chunks(reserved: Range<u32>, chunk_blocks: usize) -> Chunks {
        Chunks::new(TransferId(1), reserved, 10, 10 * chunk_blocks)
    }

    fn announced(chunks: &mut Chunks) -> Vec<u32> {
        std::iter::from_fn(|| chunks.announce().map(|chunk| chunk.chunk)).collect()
    }

    fn started(chunks: &mut Chunks) -> Vec<(u32, Vec<u32>)> {
        let ids = |blocks: Vec<BlockId>| blocks.into_iter().map(|block| block.0).collect();
        std::iter::from_fn(|| chunks.start_next())
            .map(|(chunk, blocks)| (chunk, ids(blocks)))
            .collect()
    }

    #[test]
    fn reservation_is_split_into_chunks_and_cached_blocks_are_skipped() {
        let mut chunks = chunks(3..12, 4);
        let bytes = |chunk: &Chunk| {
            let control::Chunk { first_block, block_count, bytes, .. } = chunk.announcement;
            (first_block, block_count, bytes)
        };
        let split: Vec<_> = chunks.chunks.iter().map(bytes).collect();
        assert_eq!(split, [(3, 4, 40), (7, 4, 40), (11, 1, 10)]);
        assert_eq!((chunks.count(), chunks.bytes()), (3, 90));
        // The first chunks are announced before any block is written.
        assert_eq!(announced(&mut chunks), [0, 1, 2]);
        for chunk in [0, 2, 1] {
            chunks.clear(chunk).unwrap();
        }
        assert!(started(&mut chunks).is_empty());
        chunks.add(0, &blocks(2)).unwrap();
        assert_eq!(chunks.due(), 3..12, "the receiver has cached both blocks");
        chunks.add(2, &blocks(2)).unwrap();
        assert_eq!(chunks.due(), 4..12);
        assert!(started(&mut chunks).is_empty());
        chunks.add(4, &blocks(4)).unwrap();
        assert_eq!(chunks.due(), 8..12);
        assert_eq!(started(&mut chunks), [(0, vec![1, 0, 1, 2])], "chunk 1 lacks three blocks");
        chunks.add(8, &blocks(4)).unwrap();
        assert_eq!(started(&mut chunks), [(1, vec![3, 0, 1, 2]), (2, vec![3])]);
        assert_eq!(chunks.due(), 12..12);
    }

    #[test]
    fn empty_reservation_has_no_chunks() {
        let mut chunks = chunks(5..5, 4);
        chunks.add(0, &blocks(5)).unwrap();
        assert_eq!(
            (chunks.count(), chunks.announce().is_none(), chunks.start_next()),
            (0, true, None)
        );
        assert_eq!((chunks.integrity(), chunks.due()), (Some(vec![]), 5..5));
    }

    #[test]
    fn gaps_repeats_and_excess_are_rejected() {
        let mut chunks = chunks(0..8, 4);
        assert_eq!(
            chunks.add(1, &blocks(2)).unwrap_err(),
            "invalid range: blocks 1 to 3 were written; expected 0 to 8"
        );
        chunks.add(0, &blocks(4)).unwrap();
        assert!(chunks.add(2, &blocks(4)).is_err(), "blocks 2 and 3 were written before");
        assert!(chunks.add(4, &blocks(5)).is_err(), "block 8 is not reserved");
        assert_eq!(chunks.due(), 4..8);
    }

    #[test]
    fn few_chunks_are_announced_at_a_time_and_each_is_sent_once() {
        let mut chunks = chunks(0..10, 1);
        assert_eq!(announced(&mut chunks), [0, 1, 2, 3], "a prompt that fits into one step");
        chunks.add(0, &blocks(1)).unwrap();
        assert_eq!(announced(&mut chunks), [4, 5, 6, 7], "a whole step");
        for chunk in [8, 99] {
            let reason = format!("CTS for chunk {chunk}, which was not announced");
            assert_eq!(chunks.clear(chunk), Err(reason));
        }
        assert_eq!(chunks.clear(2), Ok(true));
        assert!(announced(&mut chunks).is_empty(), "chunk 2 is not written yet");
        chunks.add(1, &blocks(10)[1..]).unwrap();
        assert_eq!(started(&mut chunks), [(2, vec![2])]);
        assert_eq!(chunks.clear(2), Ok(false), "a repeated CTS");
        assert!(started(&mut chunks).is_empty());
        assert_eq!(announced(&mut chunks), [8]);
        let unanswered: Vec<u32> = chunks.unanswered().map(|chunk| chunk.chunk).collect();
        assert_eq!(unanswered, [0, 1, 3, 4, 5, 6, 7, 8]);
        for chunk in [4, 0, 1, 3, 5, 8, 7, 6] {
            chunks.clear(chunk).unwrap();
        }
        assert_eq!(
            started(&mut chunks).iter().map(|(chunk, _)| *chunk).collect::<Vec<_>>(),
            [0, 1, 3, 4, 5, 6, 7, 8]
        );
        assert_eq!(announced(&mut chunks), [9]);
        chunks.clear(9).unwrap();
        assert_eq!(started(&mut chunks), [(9, vec![9])]);
        for chunk in (0..10).rev() {
            assert!(chunks.are_read() && chunks.integrity().is_none());
            chunks.sent(chunk, u64::from(chunk) * 10);
            chunks.sent(chunk, 1);
        }
        assert!(!chunks.are_read() && !chunks.has_unanswered());
        assert_eq!(chunks.integrity(), Some((0..10).map(|chunk| chunk * 10).collect()));
    }
}
