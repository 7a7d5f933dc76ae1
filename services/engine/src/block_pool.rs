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
//! A block can be kept until a time ([`BlockPool::keep`]). Kept blocks are evicted after all other cached blocks. Among
//! kept blocks, the blocks of the owner with the latest place in the queue are evicted first. The common prefix of
//! several conversations is kept until the latest of their times, because their other blocks are useless without the prefix.
//!
//! A save to a KV tier reads a cached or held block whose contents are retained. It owns no reference, so the block
//! keeps its place in the order of eviction, but the block is not evicted before the copy has ended.

mod testing;

use std::{cmp::Reverse, collections::BTreeSet, iter, time::Instant};

use foldhash::HashMap;
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

/// Cached blocks, by time of release.
#[derive(Clone, Copy, Debug, Default)]
struct CachedList {
    oldest: Option<BlockId>,
    newest: Option<BlockId>,
    len: u32,
}

/// Key of a group of blocks that are kept: their owner's place in the queue, and a number that makes the key unique.
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
/// Misuse (releasing a block that is not held, pinning a free block) is a bug of the caller and panics.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    /// Cached blocks that are not kept.
    cached: CachedList,
    /// Blocks that are kept. Every group has a block, so there are at most as many groups as blocks.
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
}

impl BlockPool {
    pub fn new(block_count: u32) -> Self {
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

    /// Returns the number of cached blocks that are kept.
    pub fn kept_blocks(&self) -> u32 {
        self.kept_blocks
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

    /// Keeps held blocks until `until` once they are cached. A block that is already kept longer keeps its later time.
    /// `place`: place of the blocks' owner in the queue.
    pub fn keep(&mut self, blocks: &[BlockId], until: Instant, place: u64) {
        let key = (Reverse(place), self.next_group);
        self.next_group += 1;
        let mut members = 0;
        for &block in blocks {
            let Block { state, kept, is_shared, .. } = self.blocks[block.index()];
            assert!(matches!(state, BlockState::Held { .. }), "only a held block can be kept");
            let current = kept.and_then(|kept| Some((kept, self.kept.get(&kept)?.until)));
            let is_shared =
                current.is_some_and(|((other, _), _)| is_shared || other != Reverse(place));
            if current.is_none_or(|(_, kept_until)| kept_until < until) {
                self.leave_group(block);
                self.blocks[block.index()].kept = Some(key);
                members += 1;
            }
            self.blocks[block.index()].is_shared = is_shared;
        }
        if members > 0 {
            self.kept.insert(key, Group { until, members, cached: CachedList::default() });
            self.kept_until.insert((until, key));
        }
    }

    /// Stops keeping the held blocks that no owner at another place keeps.
    pub fn stop_keeping(&mut self, blocks: &[BlockId], place: u64) {
        for &block in blocks {
            let Block { state, kept, is_shared, .. } = self.blocks[block.index()];
            assert!(matches!(state, BlockState::Held { .. }), "a cached block is in a list");
            if !is_shared && kept.is_some_and(|(owner, _)| owner == Reverse(place)) {
                self.leave_group(block);
            }
        }
    }

    /// Removes a block that is in no list of cached blocks from its group. A group without blocks ends.
    fn leave_group(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        entry.is_shared = false;
        let Some(key) = entry.kept.take() else { return };
        let Some(group) = self.kept.get_mut(&key) else { return };
        group.members -= 1;
        if group.members == 0 {
            self.kept_until.remove(&(group.until, key));
            self.kept.remove(&key);
        }
    }

    /// Stops keeping blocks whose time has passed at `now`. These blocks are then evicted before other cached blocks.
    pub fn end_kept(&mut self, now: Instant) {
        while let Some(&(until, group)) = self.kept_until.first() {
            if until > now {
                return;
            }
            self.kept_until.pop_first();
            let list = self.kept.remove(&group).expect("a group has one time").cached;
            self.evictable_groups.remove(&group);
            self.kept_blocks -= list.len;
            self.cached.len += list.len;
            let (Some(oldest), Some(newest)) = (list.oldest, list.newest) else { continue };
            self.blocks[newest.index()].newer = self.cached.oldest;
            match self.cached.oldest {
                Some(other) => self.blocks[other.index()].older = Some(newest),
                None => self.cached.newest = Some(newest),
            }
            self.cached.oldest = Some(oldest);
        }
    }

    /// Returns the cached block to evict next, excluding blocks that a save reads.
    fn oldest_evictable(&self) -> BlockId {
        let kept = self.evictable_groups.iter().map(|group| &self.kept[group].cached);
        let lists = iter::once(&self.cached).chain(kept);
        let mut blocks = lists.flat_map(|list| {
            iter::successors(list.oldest, |block| self.blocks[block.index()].newer)
        });
        blocks.find(|&block| !self.is_copying(block)).expect("available blocks are free or cached")
    }

    /// Changes the list that the block belongs to while it is cached.
    fn change_list_of(&mut self, block: BlockId, change: impl FnOnce(&mut CachedList)) {
        let group = self.blocks[block.index()].kept;
        let Some((group, kept)) = group.and_then(|group| Some((group, self.kept.get_mut(&group)?)))
        else {
            return change(&mut self.cached);
        };
        let list = &mut kept.cached;
        let before = list.len;
        change(list);
        self.kept_blocks = self.kept_blocks + list.len - before;
        match (before, list.len) {
            (0, _) => _ = self.evictable_groups.insert(group),
            (_, 0) => _ = self.evictable_groups.remove(&group),
            _ => {}
        }
    }

    fn put_free(&mut self, block: BlockId) {
        self.leave_group(block);
        self.blocks[block.index()].state = BlockState::Free;
        self.free.push(block);
        self.counts.free += 1;
    }

    fn link_newest(&mut self, block: BlockId) {
        let mut older = None;
        self.change_list_of(block, |list| {
            older = list.newest.replace(block);
            list.oldest.get_or_insert(block);
            list.len += 1;
        });
        if let Some(older) = older {
            self.blocks[older.index()].newer = Some(block);
        }
        let entry = &mut self.blocks[block.index()];
        (entry.state, entry.older, entry.newer) = (BlockState::Cached, older, None);
    }

    fn unlink(&mut self, block: BlockId) {
        let Block { older, newer, .. } = self.blocks[block.index()];
        self.change_list_of(block, |list| {
            if older.is_none() {
                list.oldest = newer;
            }
            if newer.is_none() {
                list.newest = older;
            }
            list.len -= 1;
        });
        if let Some(older) = older {
            self.blocks[older.index()].newer = newer;
        }
        if let Some(newer) = newer {
            self.blocks[newer.index()].older = older;
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
    use std::time::Duration;

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

    /// Takes one block and returns the evicted one.
    fn evict(pool: &mut BlockPool) -> BlockId {
        let mut evicted = Vec::new();
        pool.take(1, HELD, &mut evicted).expect("a cached block is available");
        pool.check();
        evicted[0]
    }

    #[test]
    fn kept_blocks_are_evicted_last_and_all_are_available() {
        let (mut pool, now) = (BlockPool::new(5), Instant::now());
        let blocks = allocate(&mut pool, 5);
        blocks.iter().for_each(|&block| pool.retain(block));
        pool.keep(&blocks[..2], now + Duration::from_secs(1), 7);
        pool.keep(&blocks[2..3], now + Duration::from_secs(2), 8);
        blocks.iter().rev().for_each(|&block| pool.release(block));
        pool.check();
        assert_eq!((pool.kept_blocks(), pool.available()), (3, 5));
        let order: Vec<_> = (0..5).map(|_| evict(&mut pool)).collect();
        assert_eq!(order, [4, 3, 2, 1, 0].map(|index: usize| blocks[index]));
    }

    #[test]
    fn blocks_whose_time_has_ended_are_evicted_first_from_their_tail() {
        let (mut pool, now) = (BlockPool::new(4), Instant::now());
        let blocks = allocate(&mut pool, 4);
        blocks.iter().for_each(|&block| pool.retain(block));
        pool.keep(&blocks[2..], now + Duration::from_secs(1), 0);
        blocks.iter().rev().for_each(|&block| pool.release(block));
        pool.end_kept(now);
        assert_eq!(pool.kept_blocks(), 2);
        pool.end_kept(now + Duration::from_secs(1));
        pool.check();
        assert_eq!(pool.kept_blocks(), 0);
        let order: Vec<_> = (0..4).map(|_| evict(&mut pool)).collect();
        assert_eq!(order, [3, 2, 1, 0].map(|index: usize| blocks[index]));
    }

    #[test]
    fn kept_block_that_is_held_again_stays_kept() {
        let (mut pool, now) = (BlockPool::new(3), Instant::now());
        let blocks = allocate(&mut pool, 3);
        blocks.iter().for_each(|&block| pool.retain(block));
        pool.keep(&blocks[..2], now + Duration::from_secs(1), 0);
        blocks.iter().rev().for_each(|&block| pool.release(block));
        pool.hold(blocks[0]);
        pool.check();
        assert_eq!(pool.kept_blocks(), 1);
        pool.release(blocks[0]);
        pool.check();
        assert_eq!(pool.kept_blocks(), 2);
        assert_eq!([evict(&mut pool), evict(&mut pool)], [blocks[2], blocks[1]]);
        // The time of a group may end before its blocks are released.
        pool.hold(blocks[0]);
        pool.end_kept(now + Duration::from_secs(1));
        pool.release(blocks[0]);
        pool.check();
        assert_eq!((pool.kept_blocks(), pool.counts().cached), (0, 1));
    }

    #[test]
    fn common_prefix_is_kept_until_the_latest_time_of_its_conversations() {
        let (mut pool, now) = (BlockPool::new(3), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        let blocks = allocate(&mut pool, 3);
        blocks.iter().for_each(|&block| pool.retain(block));
        // Block 0 begins two conversations: blocks 0 and 1 at place 5, blocks 0 and 2 at place 6.
        pool.keep(&blocks[..2], after(9), 5);
        pool.keep(&[blocks[0], blocks[2]], after(4), 6);
        blocks.iter().rev().for_each(|&block| pool.release(block));
        pool.end_kept(after(4));
        pool.check();
        assert_eq!(pool.kept_blocks(), 2);
        // The next turn of the first conversation is the last: no other conversation keeps its block 1.
        blocks[..2].iter().for_each(|&block| pool.hold(block));
        pool.stop_keeping(&blocks[..2], 5);
        blocks[..2].iter().rev().for_each(|&block| pool.release(block));
        pool.check();
        assert_eq!(pool.kept_blocks(), 1);
        pool.end_kept(after(9));
        assert_eq!(pool.kept_blocks(), 0);
    }

    #[test]
    fn groups_without_cached_blocks_are_not_searched() {
        let (mut pool, until) = (BlockPool::new(3), Instant::now() + Duration::from_secs(1));
        let blocks = allocate(&mut pool, 3);
        blocks.iter().for_each(|&block| pool.retain(block));
        for (&block, place) in blocks.iter().zip([3, 2, 1]) {
            pool.keep(&[block], until, place);
        }
        assert_eq!((pool.kept.len(), pool.evictable_groups.len()), (3, 0), "the blocks are held");
        blocks.iter().for_each(|&block| pool.release(block));
        assert_eq!(pool.evictable_groups.len(), 3);
        pool.hold(blocks[0]);
        assert_eq!(evict(&mut pool), blocks[1], "the conversation that arrived last");
        assert_eq!((pool.kept.len(), pool.evictable_groups.len()), (2, 1));
    }

    #[test]
    fn turns_that_return_or_whose_blocks_are_evicted_leave_no_group() {
        let (mut pool, now) = (BlockPool::new(2), Instant::now());
        let blocks = allocate(&mut pool, 2);
        blocks.iter().for_each(|&block| pool.retain(block));
        for turn in 0..5000 {
            pool.keep(&blocks[..1], now + Duration::from_secs(600 + turn), turn % 7);
            pool.release(blocks[0]);
            pool.hold(blocks[0]);
            pool.check();
        }
        pool.keep(&blocks[1..], now + Duration::from_secs(1), 9);
        assert_eq!((pool.kept.len(), pool.kept_until.len()), (2, 2));
        blocks.iter().for_each(|&block| pool.release(block));
        assert_eq!(pool.kept_blocks(), 2);
        evict(&mut pool);
        evict(&mut pool);
        assert_eq!((pool.kept.len(), pool.kept_until.len()), (0, 0));
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
        Keep(usize, u64),
        StopKeeping(u64),
        EndKept(u64),
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
            (any::<usize>(), 0..9u64).prop_map(|(index, until)| Operation::Keep(index, until)),
            (0..5u64).prop_map(Operation::StopKeeping),
            (0..9u64).prop_map(Operation::EndKept),
        ]
    }

    proptest! {
        #[test]
        fn counts_lists_and_states_agree_after_any_operations(
            operations in prop::collection::vec(operation(), 0..200),
        ) {
            let (mut pool, start) = (BlockPool::new(9), Instant::now());
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
                    Operation::Keep(index, until) => {
                        let blocks: Vec<_> = held.iter().map(|&(block, ..)| block).collect();
                        let until = start + Duration::from_secs(until);
                        pool.keep(&blocks[pick(index, blocks.len()).unwrap_or(0)..], until, index as u64 % 5);
                    }
                    Operation::StopKeeping(place) => {
                        let blocks: Vec<_> = held.iter().map(|&(block, ..)| block).collect();
                        pool.stop_keeping(&blocks, place);
                    }
                    Operation::EndKept(until) => pool.end_kept(start + Duration::from_secs(until)),
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
