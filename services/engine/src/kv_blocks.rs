//! Block pool and prefix cache combined: an evicted block leaves both.

use kernels::{BlockId, KvGroups, NO_BLOCK};

use crate::{
    block_pool::{BlockPool, BlockState},
    event::SequenceId,
    prefix_cache::{HashChain, PrefixCache},
};

/// Returns the blocks of a block table, without the entries behind windows.
pub(crate) fn blocks_of(table: &[BlockId]) -> impl DoubleEndedIterator<Item = BlockId> {
    table.iter().copied().filter(|block| *block != NO_BLOCK)
}

#[derive(Debug)]
pub(crate) struct KvBlocks {
    pub(crate) pool: BlockPool,
    pub(crate) cache: PrefixCache,
    pub(crate) groups: KvGroups,
    /// Whether the prefix cache is used; if false, it stays empty.
    pub(crate) caching: bool,
    /// Scratch memory of allocations.
    evicted: Vec<BlockId>,
}

impl KvBlocks {
    pub(crate) fn new(block_count: u32, caching: bool) -> Self {
        Self {
            pool: BlockPool::new(block_count),
            cache: PrefixCache::default(),
            groups: KvGroups::default(),
            caching,
            evicted: Vec::new(),
        }
    }

    /// Returns the number of table entries for `tokens` tokens.
    pub(crate) fn entries(&self, tokens: usize) -> u32 {
        self.groups.entries(tokens) as u32
    }

    /// Returns the block table of the cached prefix of `tokens` and the number of blocks of the
    /// sequence's rest, if these can be allocated and `headroom` blocks remain. `rest` returns the
    /// number for a prefix of the given number of table entries.
    ///
    /// # Errors
    /// The number of blocks that would have to be available.
    pub(crate) fn fit_prefix(
        &self,
        chain: &HashChain,
        tokens: &[u32],
        rest: impl Fn(usize) -> u32,
        headroom: u32,
    ) -> Result<(Vec<BlockId>, u32), u32> {
        let table = self.cache.lookup(chain, tokens, &self.groups);
        let cached = |&block: &BlockId| self.pool.state(block) == BlockState::Cached;
        let leaving = blocks_of(&table).filter(cached).count() as u32;
        let rest = rest(table.len());
        let needed = leaving + rest + headroom;
        if self.pool.available() < needed { Err(needed) } else { Ok((table, rest)) }
    }

    /// Adds one reference to each block of a table.
    pub(crate) fn hold(&mut self, table: &[BlockId]) {
        blocks_of(table).for_each(|block| self.pool.hold(block));
    }

    /// Releases the blocks of a table to which no token from position `computed` on attends.
    pub(crate) fn release_behind(&mut self, table: &mut [BlockId], computed: usize) {
        self.groups.remove_behind(table, computed, |block| self.pool.release(block));
    }

    pub(crate) fn allocate(&mut self, count: u32) -> Option<Vec<BlockId>> {
        self.take(count, BlockState::Held { refs: 1 })
    }

    pub(crate) fn reserve(&mut self, count: u32, owner: SequenceId) -> Option<Vec<BlockId>> {
        self.take(count, BlockState::Reserved { owner })
    }

    fn take(&mut self, count: u32, state: BlockState) -> Option<Vec<BlockId>> {
        let blocks = self.pool.take(count, state, &mut self.evicted);
        self.evicted.drain(..).for_each(|block| self.cache.evict(block));
        blocks
    }

    pub(crate) fn accept(&mut self, blocks: &[BlockId], owner: SequenceId) {
        blocks.iter().for_each(|&block| self.pool.accept(block, owner));
    }

    pub(crate) fn cancel_reservation(&mut self, blocks: &[BlockId], owner: SequenceId) {
        blocks.iter().for_each(|&block| self.pool.cancel_reservation(block, owner));
    }

    /// Drops one reference of each block of a table, the last block first, so that a tail is
    /// evicted before its head.
    pub(crate) fn release(&mut self, table: &[BlockId]) {
        blocks_of(table).rev().for_each(|block| self.pool.release(block));
    }

    /// Drops all cached blocks that no save reads, and returns their number. Blocks in use stay
    /// known to the prefix cache.
    pub(crate) fn drop_cached(&mut self) -> u32 {
        let available = self.pool.available();
        let dropped = available - self.pool.counts().free;
        let all = self.allocate(available).expect("available blocks can be allocated");
        self.release(&all);
        dropped
    }

    /// Adds one reference and one pin to each block, for an outgoing transfer.
    pub(crate) fn hold_pinned(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            self.pool.hold(block);
            self.pool.pin(block);
        }
    }

    pub(crate) fn release_pinned(&mut self, blocks: &[BlockId]) {
        blocks.iter().for_each(|&block| self.pool.unpin(block));
        self.release(blocks);
    }

    /// Adds a group's block `index` of `tokens` to the prefix cache. Its KV is written.
    pub(crate) fn publish(
        &mut self,
        chain: &HashChain,
        tokens: &[u32],
        (index, group): (usize, usize),
        block: BlockId,
    ) {
        if self.caching
            && !self.pool.is_retained(block)
            && self.cache.insert(chain, tokens, (index, group), block)
        {
            self.pool.retain(block);
        }
    }
}
