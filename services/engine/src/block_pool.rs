//! Tracks the owners of KV blocks. Pure: no memory is accessed.
//!
//! A block is in exactly one state:
//! 1. `Free`: the contents are undefined.
//! 2. `Held`: by `refs` owners, each a sequence or an outgoing transfer. `pins` of them have DMA in flight.
//! 3. `Cached`: no owner, but the prefix cache knows the contents ([`BlockPool::retain`]).
//! 4. `Reserved`: one incoming transfer may write the block, and no other owner may use it.
//!
//! Allocation takes free blocks first, then evicts the cached block that was released longest ago. A
//! sequence releases its table from the end, so the tail of a prefix is evicted before its head. An owner
//! that pins a block also holds it, so a block that can be freed or evicted is never pinned.
//!
//! A save to a KV tier reads a cached or held block whose contents are retained. It owns no reference, so the block
//! keeps its place in the order of eviction, but the block is not evicted before the copy has ended.

mod testing;

use kernels::BlockId;

use crate::event::SequenceId;

/// State of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    Free,
    Cached,
    /// `refs` is at least 1.
    Held {
        refs: u32,
    },
    Reserved {
        owner: SequenceId,
    },
}

/// Number of blocks in each state. The four counts add up to the size of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    pub free: u32,
    pub cached: u32,
    pub held: u32,
    pub reserved: u32,
}

impl BlockCounts {
    pub fn total(&self) -> u32 {
        self.free + self.cached + self.held + self.reserved
    }
}

#[derive(Clone, Copy, Debug)]
struct Block {
    state: BlockState,
    /// Pins for DMA in flight; at most `refs`.
    pins: u32,
    /// Whether the prefix cache has an entry for the contents.
    retained: bool,
    /// Whether a save reads the block.
    copying: bool,
    /// Neighbours in the list of cached blocks; meaningful in `Cached` only.
    older: Option<BlockId>,
    newer: Option<BlockId>,
}

/// State of every block of one arena.
///
/// Misuse (releasing a block that is not held, pinning a free block) is a bug of the caller and panics.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    /// Ends of the list of cached blocks, by time of release.
    oldest: Option<BlockId>,
    newest: Option<BlockId>,
    counts: BlockCounts,
    /// Cached blocks that saves read.
    cached_copying: u32,
}

impl BlockPool {
    pub fn new(block_count: u32) -> Self {
        let block = Block {
            state: BlockState::Free,
            pins: 0,
            retained: false,
            copying: false,
            older: None,
            newer: None,
        };
        Self {
            blocks: vec![block; block_count as usize],
            free: (0..block_count).rev().map(BlockId).collect(),
            oldest: None,
            newest: None,
            counts: BlockCounts { free: block_count, ..BlockCounts::default() },
            cached_copying: 0,
        }
    }

    pub fn counts(&self) -> BlockCounts {
        self.counts
    }

    pub fn total(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Returns how many blocks an allocation could take now.
    pub fn available(&self) -> u32 {
        self.evictable() - self.cached_copying
    }

    /// Returns how many blocks an allocation could take once all saves have ended.
    pub fn evictable(&self) -> u32 {
        self.counts.free + self.counts.cached
    }

    pub fn state(&self, block: BlockId) -> BlockState {
        self.blocks[block.index()].state
    }

    pub fn pins(&self, block: BlockId) -> u32 {
        self.blocks[block.index()].pins
    }

    /// Returns whether the prefix cache knows the contents of this block.
    pub fn is_retained(&self, block: BlockId) -> bool {
        self.blocks[block.index()].retained
    }

    /// Takes `count` blocks, held with one reference or reserved for an incoming transfer, and appends evicted
    /// blocks to `evicted`. Returns `None` and takes nothing when fewer blocks are available.
    pub fn take(
        &mut self,
        count: u32,
        state: BlockState,
        evicted: &mut Vec<BlockId>,
    ) -> Option<Vec<BlockId>> {
        if self.available() < count {
            return None;
        }
        match state {
            BlockState::Held { refs: 1 } => self.counts.held += count,
            BlockState::Reserved { .. } => self.counts.reserved += count,
            state => panic!("invalid state {state:?}; expected Held or Reserved"),
        }
        let mut taken = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let block = match self.free.pop() {
                Some(block) => {
                    self.counts.free -= 1;
                    block
                }
                None => {
                    let block = self.oldest_evictable();
                    self.unlink(block);
                    self.counts.cached -= 1;
                    self.blocks[block.index()].retained = false;
                    evicted.push(block);
                    block
                }
            };
            debug_assert_eq!(self.blocks[block.index()].pins, 0);
            self.blocks[block.index()].state = state;
            taken.push(block);
        }
        self.assert_counts();
        Some(taken)
    }

    /// Adds a reference to a cached or held block.
    pub fn hold(&mut self, block: BlockId) {
        match self.state(block) {
            BlockState::Cached => {
                self.unlink(block);
                self.counts.cached -= 1;
                self.cached_copying -= u32::from(self.is_copying(block));
                self.counts.held += 1;
                self.blocks[block.index()].state = BlockState::Held { refs: 1 };
            }
            BlockState::Held { refs } => {
                self.blocks[block.index()].state = BlockState::Held { refs: refs + 1 };
            }
            state => panic!("block {} is {state:?} and cannot be held", block.0),
        }
        self.assert_counts();
    }

    /// Drops a reference. With the last one the block becomes cached if its contents are retained,
    /// free otherwise.
    pub fn release(&mut self, block: BlockId) {
        let BlockState::Held { refs } = self.state(block) else {
            panic!("block {} is {:?} and cannot be released", block.0, self.state(block));
        };
        let Block { pins, retained, .. } = self.blocks[block.index()];
        assert!(
            pins < refs,
            "block {} has {pins} pins and {refs} references: unpin it before releasing its reference",
            block.0
        );
        if refs > 1 {
            self.blocks[block.index()].state = BlockState::Held { refs: refs - 1 };
        } else {
            self.counts.held -= 1;
            if retained {
                self.link_newest(block);
                self.counts.cached += 1;
                self.cached_copying += u32::from(self.is_copying(block));
            } else {
                self.put_free(block);
            }
        }
        self.assert_counts();
    }

    /// Marks a held block as known to the prefix cache.
    pub fn retain(&mut self, block: BlockId) {
        assert!(
            matches!(self.state(block), BlockState::Held { .. }),
            "only a held block can be retained"
        );
        self.blocks[block.index()].retained = true;
    }

    /// Turns a reserved block that the transfer has written into a held block with one reference.
    pub fn accept(&mut self, block: BlockId, owner: SequenceId) {
        self.assert_reserved(block, owner);
        self.counts.reserved -= 1;
        self.counts.held += 1;
        self.blocks[block.index()].state = BlockState::Held { refs: 1 };
        self.assert_counts();
    }

    /// Frees a reserved block after a failed transfer, when no write can land.
    pub fn cancel_reservation(&mut self, block: BlockId, owner: SequenceId) {
        self.assert_reserved(block, owner);
        self.counts.reserved -= 1;
        self.put_free(block);
        self.assert_counts();
    }

    /// Pins a held block for a DMA read.
    pub fn pin(&mut self, block: BlockId) {
        let BlockState::Held { refs } = self.state(block) else {
            panic!("block {} is {:?} and cannot be pinned", block.0, self.state(block));
        };
        let entry = &mut self.blocks[block.index()];
        assert!(entry.pins < refs, "every pin of block {} needs its own reference", block.0);
        entry.pins += 1;
    }

    /// Unpins a block after its DMA read.
    pub fn unpin(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        assert!(entry.pins > 0, "block {} is not pinned", block.0);
        entry.pins -= 1;
    }

    /// Marks a retained block as the source of a save.
    pub fn begin_copy(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        assert!(entry.retained && !entry.copying, "block {} cannot be saved", block.0);
        entry.copying = true;
        self.cached_copying += u32::from(entry.state == BlockState::Cached);
    }

    /// Ends the copy of a save.
    pub fn end_copy(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        assert!(entry.copying, "block {} is not the source of a save", block.0);
        entry.copying = false;
        self.cached_copying -= u32::from(entry.state == BlockState::Cached);
    }

    /// Returns whether a save reads the block.
    pub fn is_copying(&self, block: BlockId) -> bool {
        self.blocks[block.index()].copying
    }

    /// Returns the cached block that was released longest ago and that no save reads.
    fn oldest_evictable(&self) -> BlockId {
        let mut next = self.oldest;
        while let Some(block) = next
            && self.is_copying(block)
        {
            next = self.blocks[block.index()].newer;
        }
        next.expect("available blocks are free or cached")
    }

    fn put_free(&mut self, block: BlockId) {
        self.blocks[block.index()].state = BlockState::Free;
        self.free.push(block);
        self.counts.free += 1;
    }

    fn link_newest(&mut self, block: BlockId) {
        let older = self.newest;
        let entry = &mut self.blocks[block.index()];
        (entry.state, entry.older, entry.newer) = (BlockState::Cached, older, None);
        match older {
            Some(older) => self.blocks[older.index()].newer = Some(block),
            None => self.oldest = Some(block),
        }
        self.newest = Some(block);
    }

    fn unlink(&mut self, block: BlockId) {
        let Block { older, newer, .. } = self.blocks[block.index()];
        match older {
            Some(older) => self.blocks[older.index()].newer = newer,
            None => self.oldest = newer,
        }
        match newer {
            Some(newer) => self.blocks[newer.index()].older = older,
            None => self.newest = older,
        }
    }

    fn assert_reserved(&self, block: BlockId, owner: SequenceId) {
        let state = self.state(block);
        assert_eq!(state, BlockState::Reserved { owner }, "block {}", block.0);
    }

    fn assert_counts(&self) {
        debug_assert_eq!(self.counts.total(), self.total());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OWNER: SequenceId = SequenceId(7);

    const HELD: BlockState = BlockState::Held { refs: 1 };
    const RESERVED: BlockState = BlockState::Reserved { owner: OWNER };

    fn allocate(pool: &mut BlockPool, count: u32) -> Vec<BlockId> {
        pool.take(count, HELD, &mut Vec::new()).expect("enough blocks")
    }

    #[test]
    fn released_blocks_are_free_unless_their_contents_are_retained() {
        let mut pool = BlockPool::new(4);
        let blocks = allocate(&mut pool, 2);
        pool.retain(blocks[0]);
        blocks.iter().for_each(|&block| pool.release(block));
        assert_eq!(pool.state(blocks[0]), BlockState::Cached);
        assert_eq!(pool.state(blocks[1]), BlockState::Free);
        assert_eq!(pool.counts(), BlockCounts { free: 3, cached: 1, held: 0, reserved: 0 });
        pool.check();
    }

    #[test]
    fn eviction_takes_free_blocks_first_and_then_the_longest_released() {
        let mut pool = BlockPool::new(3);
        let blocks = allocate(&mut pool, 3);
        pool.retain(blocks[0]);
        pool.retain(blocks[1]);
        // A table is released from its end.
        blocks.iter().rev().for_each(|&block| pool.release(block));
        let mut evicted = Vec::new();
        assert_eq!(pool.take(2, HELD, &mut evicted), Some(vec![blocks[2], blocks[1]]));
        assert_eq!(evicted, [blocks[1]], "the tail is evicted before the head");
        pool.check();
    }

    #[test]
    fn a_cached_block_that_is_held_again_cannot_be_evicted() {
        let mut pool = BlockPool::new(2);
        let block = allocate(&mut pool, 1)[0];
        pool.retain(block);
        pool.release(block);
        pool.hold(block);
        assert_eq!(pool.take(2, HELD, &mut Vec::new()), None, "nothing is taken when too few");
        assert_eq!(pool.available(), 1);
        pool.check();
    }

    #[test]
    fn block_that_a_save_reads_is_not_evicted() {
        let mut pool = BlockPool::new(3);
        let blocks = allocate(&mut pool, 3);
        blocks.iter().for_each(|&block| pool.retain(block));
        pool.begin_copy(blocks[0]);
        blocks.iter().for_each(|&block| pool.release(block));
        assert_eq!(pool.available(), 2);
        let mut evicted = Vec::new();
        assert_eq!(pool.take(3, HELD, &mut evicted), None);
        assert_eq!(pool.take(1, HELD, &mut evicted), Some(vec![blocks[1]]));
        pool.check();
        pool.end_copy(blocks[0]);
        assert_eq!(pool.take(1, HELD, &mut evicted), Some(vec![blocks[0]]), "its place was kept");
        pool.check();
    }

    #[test]
    fn a_reservation_becomes_held_or_free_and_never_cached() {
        let mut pool = BlockPool::new(2);
        let blocks = pool.take(2, RESERVED, &mut Vec::new()).expect("two are free");
        pool.accept(blocks[0], OWNER);
        pool.cancel_reservation(blocks[1], OWNER);
        assert_eq!(pool.counts(), BlockCounts { free: 1, cached: 0, held: 1, reserved: 0 });
        pool.check();
    }

    #[test]
    #[should_panic(expected = "unpin it before releasing its reference")]
    fn the_last_reference_cannot_be_released_while_dma_is_in_flight() {
        let mut pool = BlockPool::new(1);
        let block = allocate(&mut pool, 1)[0];
        pool.pin(block);
        pool.release(block);
    }

    #[test]
    #[should_panic(expected = "cannot be held")]
    fn a_reserved_block_cannot_be_held() {
        let mut pool = BlockPool::new(1);
        let block = pool.take(1, RESERVED, &mut Vec::new()).expect("one is free")[0];
        pool.hold(block);
    }

    #[derive(Clone, Debug)]
    enum Operation {
        Allocate(u32),
        Reserve(u32),
        Hold(usize),
        Release(usize),
        Retain(usize),
        Pin(usize),
        Unpin(usize),
        Accept(usize),
        Cancel(usize),
        BeginCopy(usize),
        EndCopy(usize),
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            (0..4u32).prop_map(Operation::Allocate),
            (0..4u32).prop_map(Operation::Reserve),
            any::<usize>().prop_map(Operation::Hold),
            any::<usize>().prop_map(Operation::Release),
            any::<usize>().prop_map(Operation::Retain),
            any::<usize>().prop_map(Operation::Pin),
            any::<usize>().prop_map(Operation::Unpin),
            any::<usize>().prop_map(Operation::Accept),
            any::<usize>().prop_map(Operation::Cancel),
            any::<usize>().prop_map(Operation::BeginCopy),
            any::<usize>().prop_map(Operation::EndCopy),
        ]
    }

    proptest! {
        #[test]
        fn counts_lists_and_states_agree_after_any_operations(
            operations in prop::collection::vec(operation(), 0..200),
        ) {
            let mut pool = BlockPool::new(9);
            // Model of the pool: block -> (references, pins).
            let mut held: Vec<(BlockId, u32, u32)> = Vec::new();
            let mut reserved: Vec<BlockId> = Vec::new();
            let mut copying: Vec<BlockId> = Vec::new();
            for operation in operations {
                let pick = |index: usize, len: usize| (len > 0).then(|| index % len);
                match operation {
                    Operation::Allocate(count) => {
                        let available = pool.available();
                        match pool.take(count, HELD, &mut Vec::new()) {
                            Some(blocks) => held.extend(blocks.iter().map(|&block| (block, 1, 0))),
                            None => prop_assert!(available < count),
                        }
                    }
                    Operation::Reserve(count) => {
                        if let Some(blocks) = pool.take(count, RESERVED, &mut Vec::new()) {
                            reserved.extend(blocks);
                        }
                    }
                    Operation::Hold(index) => {
                        if let Some(index) = pick(index, held.len()) {
                            pool.hold(held[index].0);
                            held[index].1 += 1;
                        }
                    }
                    Operation::Release(index) => {
                        if let Some(index) = pick(index, held.len())
                            && held[index].2 < held[index].1
                        {
                            pool.release(held[index].0);
                            held[index].1 -= 1;
                            if held[index].1 == 0 {
                                held.swap_remove(index);
                            }
                        }
                    }
                    Operation::Retain(index) => {
                        if let Some(index) = pick(index, held.len()) {
                            pool.retain(held[index].0);
                        }
                    }
                    Operation::Pin(index) => {
                        if let Some(index) = pick(index, held.len())
                            && held[index].2 < held[index].1
                        {
                            pool.pin(held[index].0);
                            held[index].2 += 1;
                        }
                    }
                    Operation::Unpin(index) => {
                        if let Some(index) = pick(index, held.len())
                            && held[index].2 > 0
                        {
                            pool.unpin(held[index].0);
                            held[index].2 -= 1;
                        }
                    }
                    Operation::Accept(index) => {
                        if let Some(index) = pick(index, reserved.len()) {
                            let block = reserved.swap_remove(index);
                            pool.accept(block, OWNER);
                            held.push((block, 1, 0));
                        }
                    }
                    Operation::Cancel(index) => {
                        if let Some(index) = pick(index, reserved.len()) {
                            pool.cancel_reservation(reserved.swap_remove(index), OWNER);
                        }
                    }
                    Operation::BeginCopy(index) => {
                        let block = BlockId((index % 9) as u32);
                        if pool.is_retained(block) && !pool.is_copying(block) {
                            pool.begin_copy(block);
                            copying.push(block);
                        }
                    }
                    Operation::EndCopy(index) => {
                        if let Some(index) = pick(index, copying.len()) {
                            pool.end_copy(copying.swap_remove(index));
                        }
                    }
                }
                pool.check();
                for &(block, refs, pins) in &held {
                    prop_assert_eq!(pool.state(block), BlockState::Held { refs });
                    prop_assert_eq!(pool.pins(block), pins);
                }
                for &block in &copying {
                    prop_assert!(pool.is_retained(block), "a save reads block {}", block.0);
                }
            }
        }
    }
}
