//! The chunks of one outgoing transfer, in the order of the prompt.

use kernels::BlockId;

use crate::{api::TransferId, notice::Body};

/// Chunks announced and not yet cleared, per transfer: enough that the next receive is posted while
/// one travels, few enough that no transfer fills the pair's queue with notices.
const ANNOUNCED_MAX: usize = 4;

/// Each chunk waits, is announced, is cleared (the transport has it), is sent; in this order.
#[derive(Debug)]
pub struct Chunks {
    chunks: Vec<Chunk>,
    /// Of the prompt: how far the node has written, and where the reservation ends.
    next_block: u32,
    end_block: u32,
    /// The first chunk that waits.
    waiting_from: usize,
    announced: usize,
    clear: usize,
    sent: usize,
}

#[derive(Debug)]
struct Chunk {
    first_block: u32,
    blocks: Vec<BlockId>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Announced,
    Clear,
    Sent { integrity: u64 },
}

/// What a range of blocks was, and what was due instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("blocks {first_block} to {end_block} were written where {due_from} to {due_to} were due")]
pub struct OutOfOrder {
    first_block: u32,
    end_block: usize,
    due_from: u32,
    due_to: u32,
}

/// The receiver cleared a chunk of which it was never told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("CTS for chunk {chunk}, which was never announced")]
pub struct NeverAnnounced {
    chunk: u32,
}

impl Chunks {
    /// For the reserved blocks, `first_block..end_block` of the prompt.
    pub fn new(first_block: u32, end_block: u32) -> Self {
        debug_assert!(first_block <= end_block);
        Self {
            chunks: Vec::new(),
            next_block: first_block,
            end_block,
            waiting_from: 0,
            announced: 0,
            clear: 0,
            sent: 0,
        }
    }

    /// Cuts a written range into chunks. What lies before the reservation is skipped; after that
    /// each range must begin where the one before ended.
    pub fn add(
        &mut self,
        first_block: u32,
        blocks: &[BlockId],
        chunk_blocks: usize,
    ) -> Result<(), OutOfOrder> {
        let skipped = self.next_block.saturating_sub(first_block) as usize;
        let end_block = first_block as usize + blocks.len();
        let rest = blocks.get(skipped..).unwrap_or_default();
        let in_order = first_block <= self.next_block && (skipped == 0 || self.chunks.is_empty());
        if !in_order || (!rest.is_empty() && end_block > self.end_block as usize) {
            let (due_from, due_to) = (self.next_block, self.end_block);
            return Err(OutOfOrder { first_block, end_block, due_from, due_to });
        }
        for blocks in rest.chunks(chunk_blocks) {
            let first_block = self.next_block;
            self.next_block += blocks.len() as u32;
            let blocks = blocks.to_vec();
            self.chunks.push(Chunk { first_block, blocks, state: State::Waiting });
        }
        Ok(())
    }

    /// The next chunk to announce, if there is room.
    pub fn announce(&mut self) -> Option<u32> {
        if self.announced == ANNOUNCED_MAX {
            return None;
        }
        let index = self.waiting_from;
        self.chunks.get_mut(index)?.state = State::Announced;
        self.waiting_from += 1;
        self.announced += 1;
        Some(index as u32)
    }

    /// Those that were announced and not answered.
    pub fn unanswered(&self) -> Vec<u32> {
        let announced = |(_, chunk): &(usize, &Chunk)| chunk.state == State::Announced;
        self.chunks.iter().enumerate().filter(announced).map(|(index, _)| index as u32).collect()
    }

    pub fn has_unanswered(&self) -> bool {
        self.announced > 0
    }

    /// The blocks that the transport now gets; `None` when it has or had them before.
    pub fn clear(&mut self, chunk: u32) -> Result<Option<Vec<BlockId>>, NeverAnnounced> {
        let cleared = self.chunks.get_mut(chunk as usize).ok_or(NeverAnnounced { chunk })?;
        match cleared.state {
            State::Waiting => Err(NeverAnnounced { chunk }),
            State::Clear | State::Sent { .. } => Ok(None),
            State::Announced => {
                cleared.state = State::Clear;
                self.announced -= 1;
                self.clear += 1;
                Ok(Some(cleared.blocks.clone()))
            }
        }
    }

    pub fn sent(&mut self, chunk: u32, integrity: u64) {
        if let Some(sent) = self.chunks.get_mut(chunk as usize)
            && sent.state == State::Clear
        {
            sent.state = State::Sent { integrity };
            self.clear -= 1;
            self.sent += 1;
        }
    }

    /// The transport has chunks that it has not sent.
    pub fn are_read(&self) -> bool {
        self.clear > 0
    }

    /// The blocks of the prompt that the node still has to write.
    pub fn due(&self) -> std::ops::Range<u32> {
        self.next_block..self.end_block
    }

    /// One value a chunk, once all of them are sent.
    pub fn integrity(&self) -> Option<Vec<u64>> {
        if self.sent < self.chunks.len() {
            return None;
        }
        let value = |chunk: &Chunk| match chunk.state {
            State::Sent { integrity } => Some(integrity),
            State::Waiting | State::Announced | State::Clear => None,
        };
        self.chunks.iter().map(value).collect()
    }

    pub fn count(&self) -> u32 {
        self.chunks.len() as u32
    }

    pub fn block_count(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.blocks.len()).sum()
    }

    /// The `CHUNK` of one that was announced.
    pub fn notice(&self, transfer: TransferId, chunk: u32, block_bytes: usize) -> Option<Body> {
        let announced = self.chunks.get(chunk as usize)?;
        Some(Body::Chunk {
            transfer,
            chunk,
            first_block: announced.first_block,
            block_count: announced.blocks.len() as u32,
            bytes: (announced.blocks.len() * block_bytes) as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(count: u32) -> Vec<BlockId> {
        (0..count).map(BlockId).collect()
    }

    fn announced(chunks: &mut Chunks) -> Vec<u32> {
        std::iter::from_fn(|| chunks.announce()).collect()
    }

    #[test]
    fn ranges_are_cut_and_what_the_receiver_has_is_skipped() {
        let mut chunks = Chunks::new(3, 12);
        chunks.add(0, &blocks(2), 4).unwrap();
        assert_eq!(chunks.count(), 0, "all of it is cached at the receiver");
        chunks.add(2, &blocks(6), 4).unwrap();
        assert_eq!((chunks.count(), chunks.due()), (2, 8..12));
        chunks.add(8, &blocks(4), 4).unwrap();
        assert_eq!((chunks.count(), chunks.block_count(), chunks.due()), (3, 9, 12..12));
        let bytes = |chunk| match chunks.notice(TransferId(1), chunk, 10) {
            Some(Body::Chunk { first_block, block_count, bytes, .. }) => {
                (first_block, block_count, bytes)
            }
            other => panic!("{other:?}"),
        };
        assert_eq!([bytes(0), bytes(1), bytes(2)], [(3, 4, 40), (7, 1, 10), (8, 4, 40)]);
    }

    #[test]
    fn gaps_repeats_and_excess_are_named() {
        let mut chunks = Chunks::new(0, 8);
        assert_eq!(
            chunks.add(1, &blocks(2), 4).unwrap_err().to_string(),
            "blocks 1 to 3 were written where 0 to 8 were due"
        );
        chunks.add(0, &blocks(4), 4).unwrap();
        assert!(chunks.add(2, &blocks(4), 4).is_err(), "2 and 3 were given before");
        assert!(chunks.add(4, &blocks(5), 4).is_err(), "block 8 is not reserved");
        assert_eq!(chunks.due(), 4..8);
    }

    #[test]
    fn a_few_are_announced_at_a_time_and_each_is_given_to_the_transport_once() {
        let mut chunks = Chunks::new(0, 6);
        chunks.add(0, &blocks(6), 1).unwrap();
        assert_eq!(announced(&mut chunks), [0, 1, 2, 3]);
        assert_eq!(chunks.clear(4), Err(NeverAnnounced { chunk: 4 }));
        assert_eq!(chunks.clear(99), Err(NeverAnnounced { chunk: 99 }));
        assert_eq!(chunks.clear(2), Ok(Some(vec![BlockId(2)])));
        assert_eq!(chunks.clear(2), Ok(None), "a repeated CTS");
        assert_eq!(announced(&mut chunks), [4]);
        assert_eq!(chunks.unanswered(), [0, 1, 3, 4]);
        for chunk in [0, 1, 3, 4] {
            chunks.clear(chunk).unwrap();
        }
        assert_eq!(announced(&mut chunks), [5]);
        chunks.clear(5).unwrap();
        for chunk in (0..6).rev() {
            assert!(chunks.are_read() && chunks.integrity().is_none());
            chunks.sent(chunk, u64::from(chunk) * 10);
            chunks.sent(chunk, 1);
        }
        assert!(!chunks.are_read() && !chunks.has_unanswered());
        assert_eq!(chunks.integrity(), Some(vec![0, 10, 20, 30, 40, 50]));
    }
}
