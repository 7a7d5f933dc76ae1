//! Block pool and prefix cache combined: an evicted block leaves both.

use kernels::{BLOCK_TOKENS, BlockId};

use crate::{
    block_pool::{BlockPool, BlockState},
    event::SequenceId,
    prefix_cache::{HashChain, PrefixCache},
};

/// Returns how many blocks hold `token_count` tokens.
pub(crate) fn blocks_for(token_count: usize) -> u32 {
    token_count.div_ceil(BLOCK_TOKENS) as u32
}

#[derive(Debug)]
pub(crate) struct KvBlocks {
    pub(crate) pool: BlockPool,
    pub(crate) cache: PrefixCache,
    /// Whether the prefix cache is used; if false, it stays empty.
    caching: bool,
    /// Scratch memory of allocations.
    evicted: Vec<BlockId>,
}

impl KvBlocks {
    pub(crate) fn new(block_count: u32, caching: bool) -> Self {
        Self {
            pool: BlockPool::new(block_count),
            cache: PrefixCache::default(),
            caching,
            evicted: Vec::new(),
        }
    }

    /// Holds and returns the cached prefix of `tokens`, if the rest of `blocks_total` blocks could
    /// be allocated and `headroom` blocks would remain. Otherwise returns the number of blocks that
    /// would have to be available.
    pub(crate) fn hold_prefix(
        &mut self,
        chain: &HashChain,
        tokens: &[u32],
        blocks_total: u32,
        headroom: u32,
    ) -> Result<Vec<BlockId>, u32> {
        let hits = self.cache.lookup(chain, tokens);
        let cached = |&&block: &&BlockId| self.pool.state(block) == BlockState::Cached;
        let leaving = hits.iter().filter(cached).count() as u32;
        let rest = blocks_total - hits.len() as u32;
        let needed = leaving + rest + headroom;
        if self.pool.available() < needed {
            return Err(needed);
        }
        hits.iter().for_each(|&block| self.pool.hold(block));
        Ok(hits)
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

    /// Drops one reference of each block, the last block first, so that a tail is evicted before
    /// its head.
    pub(crate) fn release(&mut self, blocks: &[BlockId]) {
        blocks.iter().rev().for_each(|&block| self.pool.release(block));
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

    /// Adds block `index` of `tokens` to the prefix cache. Its KV is written.
    pub(crate) fn publish(
        &mut self,
        chain: &HashChain,
        tokens: &[u32],
        index: usize,
        block: BlockId,
    ) {
        if self.caching
            && !self.pool.is_retained(block)
            && self.cache.insert(chain, tokens, index, block)
        {
            self.pool.retain(block);
        }
    }
}
