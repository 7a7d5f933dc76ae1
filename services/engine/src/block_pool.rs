//! Tracks the owners of KV blocks. Pure: no memory is accessed.
//!
//! A block is in exactly one state:
//! 1. `Free`: the contents are undefined.
//! 2. `Held`: by `refs` owners, each a sequence or an outgoing transfer. `pins` of them have DMA in
//!    flight.
//! 3. `Cached`: no owner, but the prefix cache knows the contents ([`BlockPool::retain`]).
//! 4. `Reserved`: one incoming transfer may write the block, and no other owner may use it.
//!
//! Allocation takes free blocks first, then evicts the cached block that was released longest ago.
//! A sequence releases its table from the end, so the tail of a prefix is evicted before its head.
//! An owner that pins a block also holds it, so a block that can be freed or evicted is never
//! pinned.
//!
//! A block can be kept until a time ([`BlockPool::keep`]). Kept blocks are evicted after all other
//! cached blocks. Among kept blocks, the blocks of the owner with the latest place in the queue are
//! evicted first. The common prefix of several conversations is kept until the latest of their
//! times, because their other blocks are useless without the prefix.
//!
//! A save to a KV tier reads a cached or held block whose contents are retained. It owns no
//! reference, so the block keeps its place in the order of eviction, but the block is not evicted
//! before the copy has ended.

mod eviction;
mod testing;
#[cfg(test)]
mod tests;

use std::{cmp::Reverse, collections::BTreeSet, time::Instant};

use foldhash::HashMap;
use kernels::BlockId;

use crate::event::SequenceId;

/// State of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockState {
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

/// Cached blocks, by time of release.
#[derive(Clone, Copy, Debug, Default)]
struct CachedList {
    oldest: Option<BlockId>,
    newest: Option<BlockId>,
    len: u32,
}

/// Key of a group of blocks that are kept: their owner's place in the queue, and a number that
/// makes the key unique.
type KeptGroup = (Reverse<u64>, u64);

/// Blocks that are kept until the same time.
#[derive(Clone, Copy, Debug)]
struct Group {
    until: Instant,
    /// Number of the group's blocks, cached and held; at least 1.
    members: u32,
    /// The group's cached blocks.
    cached: CachedList,
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
    /// The group that the block belongs to, also while it is held. The group may have ended.
    kept: Option<KeptGroup>,
    /// Whether owners with different places in the queue keep the block.
    is_shared: bool,
    /// Neighbours in a list of cached blocks; meaningful in `Cached` only.
    older: Option<BlockId>,
    newer: Option<BlockId>,
}

/// State of every block of one arena.
///
/// Misuse (releasing a block that is not held, pinning a free block) is a bug of the caller and
/// panics.
#[derive(Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    /// Cached blocks that are not kept.
    cached: CachedList,
    /// Blocks that are kept. Every group has a block, so there are at most as many groups as
    /// blocks.
    kept: HashMap<KeptGroup, Group>,
    /// The groups of `kept` that have a cached block, in the order of eviction.
    evictable_groups: BTreeSet<KeptGroup>,
    /// Cached blocks of all groups.
    kept_blocks: u32,
    /// The times until which groups are kept.
    kept_until: BTreeSet<(Instant, KeptGroup)>,
    next_group: u64,
    counts: BlockCounts,
    /// Cached blocks that saves read.
    cached_copying: u32,
    /// Number of changes of states, retained contents and saves.
    changes: u64,
}

impl BlockPool {
    pub(crate) fn new(block_count: u32) -> Self {
        let block = Block {
            state: BlockState::Free,
            pins: 0,
            retained: false,
            copying: false,
            kept: None,
            is_shared: false,
            older: None,
            newer: None,
        };
        Self {
            blocks: vec![block; block_count as usize],
            free: (0..block_count).rev().map(BlockId).collect(),
            cached: CachedList::default(),
            kept: HashMap::default(),
            evictable_groups: BTreeSet::new(),
            kept_blocks: 0,
            kept_until: BTreeSet::new(),
            next_group: 0,
            counts: BlockCounts { free: block_count, ..BlockCounts::default() },
            cached_copying: 0,
            changes: 0,
        }
    }

    pub(crate) fn counts(&self) -> BlockCounts {
        self.counts
    }

    pub(crate) fn total(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Returns how many blocks an allocation could take now.
    pub(crate) fn available(&self) -> u32 {
        self.evictable() - self.cached_copying
    }

    /// Returns how many blocks an allocation could take once all saves have ended.
    pub(crate) fn evictable(&self) -> u32 {
        self.counts.free + self.counts.cached
    }

    /// Returns the number of cached blocks that are kept.
    pub(crate) fn kept_blocks(&self) -> u32 {
        self.kept_blocks
    }

    /// Returns a number that differs after every change of what can be allocated or looked up.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    pub(crate) fn state(&self, block: BlockId) -> BlockState {
        self.blocks[block.index()].state
    }

    pub(crate) fn pins(&self, block: BlockId) -> u32 {
        self.blocks[block.index()].pins
    }

    /// Returns whether the prefix cache knows the contents of this block.
    pub(crate) fn is_retained(&self, block: BlockId) -> bool {
        self.blocks[block.index()].retained
    }

    /// Takes `count` blocks, held with one reference or reserved for an incoming transfer, and
    /// appends evicted blocks to `evicted`. Returns `None` and takes nothing when fewer blocks are
    /// available.
    pub(crate) fn take(
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
                    self.leave_group(block);
                    self.blocks[block.index()].retained = false;
                    evicted.push(block);
                    block
                }
            };
            debug_assert_eq!(self.blocks[block.index()].pins, 0);
            self.blocks[block.index()].state = state;
            taken.push(block);
        }
        self.record_change();
        Some(taken)
    }

    /// Adds a reference to a cached or held block.
    pub(crate) fn hold(&mut self, block: BlockId) {
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
        self.record_change();
    }

    /// Drops a reference. With the last one the block becomes cached if its contents are retained,
    /// free otherwise.
    pub(crate) fn release(&mut self, block: BlockId) {
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
        self.record_change();
    }

    /// Marks a held block as known to the prefix cache.
    pub(crate) fn retain(&mut self, block: BlockId) {
        assert!(
            matches!(self.state(block), BlockState::Held { .. }),
            "only a held block can be retained"
        );
        self.blocks[block.index()].retained = true;
        self.record_change();
    }

    /// Marks a retained block that no save reads as unknown to the prefix cache. A cached block
    /// becomes free.
    pub(crate) fn forget(&mut self, block: BlockId) {
        let Block { state, retained, copying, .. } = self.blocks[block.index()];
        assert!(retained && !copying, "block {} cannot be forgotten", block.0);
        self.blocks[block.index()].retained = false;
        if state == BlockState::Cached {
            self.unlink(block);
            self.counts.cached -= 1;
            self.put_free(block);
        }
        self.record_change();
    }

    /// Turns a reserved block that the transfer has written into a held block with one reference.
    pub(crate) fn accept(&mut self, block: BlockId, owner: SequenceId) {
        self.assert_reserved(block, owner);
        self.counts.reserved -= 1;
        self.counts.held += 1;
        self.blocks[block.index()].state = BlockState::Held { refs: 1 };
        self.record_change();
    }

    /// Frees a reserved block after a failed transfer, when no write can land.
    pub(crate) fn cancel_reservation(&mut self, block: BlockId, owner: SequenceId) {
        self.assert_reserved(block, owner);
        self.counts.reserved -= 1;
        self.put_free(block);
        self.record_change();
    }

    /// Pins a held block for a DMA read.
    pub(crate) fn pin(&mut self, block: BlockId) {
        let BlockState::Held { refs } = self.state(block) else {
            panic!("block {} is {:?} and cannot be pinned", block.0, self.state(block));
        };
        let entry = &mut self.blocks[block.index()];
        assert!(entry.pins < refs, "every pin of block {} needs its own reference", block.0);
        entry.pins += 1;
    }

    /// Unpins a block after its DMA read.
    pub(crate) fn unpin(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        assert!(entry.pins > 0, "block {} is not pinned", block.0);
        entry.pins -= 1;
    }

    /// Marks a retained block as the source of a save.
    pub(crate) fn begin_copy(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        assert!(entry.retained && !entry.copying, "block {} cannot be saved", block.0);
        entry.copying = true;
        self.cached_copying += u32::from(entry.state == BlockState::Cached);
        self.record_change();
    }

    /// Ends the copy of a save.
    pub(crate) fn end_copy(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        assert!(entry.copying, "block {} is not the source of a save", block.0);
        entry.copying = false;
        self.cached_copying -= u32::from(entry.state == BlockState::Cached);
        self.record_change();
    }

    /// Returns whether a save reads the block.
    pub(crate) fn is_copying(&self, block: BlockId) -> bool {
        self.blocks[block.index()].copying
    }

    fn put_free(&mut self, block: BlockId) {
        self.leave_group(block);
        self.blocks[block.index()].state = BlockState::Free;
        self.free.push(block);
        self.counts.free += 1;
    }

    fn assert_reserved(&self, block: BlockId, owner: SequenceId) {
        let state = self.state(block);
        assert_eq!(state, BlockState::Reserved { owner }, "block {}", block.0);
    }

    fn record_change(&mut self) {
        debug_assert_eq!(self.counts.total(), self.total());
        self.changes += 1;
    }
}
