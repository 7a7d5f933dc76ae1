//! Block pool and prefix cache combined: an evicted block leaves both.

use kernels::{BLOCK_TOKENS, BlockId, KvGroups, NO_BLOCK};

use crate::{
    block_pool::{BlockPool, BlockState},
    event::{BlockHash, SequenceId},
    prefix_cache::{HashChain, PrefixCache},
};

/// Returns the blocks of a block table, without the entries behind windows.
pub(crate) fn blocks_of(table: &[BlockId]) -> impl DoubleEndedIterator<Item = BlockId> {
    table.iter().copied().filter(|block| *block != NO_BLOCK)
}

/// Cached prefix of a sequence.
#[derive(Debug, Default)]
pub(crate) struct CachedPrefix {
    /// Block table. The entries of the state have no block.
    pub(crate) table: Vec<BlockId>,
    pub(crate) state: CachedState,
}

/// Cached state of a sequence that computes the rest of its tokens itself.
#[derive(Debug, Default)]
pub(crate) struct CachedState {
    /// The state after the prefix; empty without a state or a prefix.
    pub(crate) blocks: Vec<BlockId>,
    /// Number of leading full blocks with cached KV. The row saves its state after them, because
    /// other prompts may begin alike.
    pub(crate) shared_blocks: usize,
}

#[derive(Debug)]
pub(crate) struct KvBlocks {
    pub(crate) pool: BlockPool,
    pub(crate) cache: PrefixCache,
    pub(crate) groups: KvGroups,
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
            groups: KvGroups::default(),
            caching,
            evicted: Vec::new(),
        }
    }

    /// Returns the number of table entries for `tokens` tokens.
    pub(crate) fn entries(&self, tokens: usize) -> u32 {
        self.groups.entries(tokens) as u32
    }

    /// Returns the cached prefix of `tokens`. `is_received` tells from the length of a prefix in
    /// table entries whether the sequence receives the KV after it, and the state.
    pub(crate) fn cached_prefix(
        &self,
        chain: &HashChain,
        tokens: &[u32],
        is_received: impl Fn(usize) -> bool,
    ) -> CachedPrefix {
        let mut table = self.cache.lookup(chain, tokens, &self.groups);
        if !self.caches_states() {
            return CachedPrefix { table, state: CachedState::default() };
        }
        let shared_blocks = self.groups.blocks(table.len());
        let last = self.cache.last_state(chain, tokens, shared_blocks);
        let (blocks, state) = last.unwrap_or_default();
        let entries = self.groups.entries(blocks * BLOCK_TOKENS);
        if is_received(entries) {
            return CachedPrefix { table, state: CachedState::default() };
        }
        table.truncate(entries);
        CachedPrefix { table, state: CachedState { blocks: state.to_vec(), shared_blocks } }
    }

    /// Returns whether `rest` blocks can be allocated beside a held prefix and `headroom` blocks
    /// remain.
    ///
    /// # Errors
    /// The number of blocks that would have to be available.
    pub(crate) fn fits(&self, prefix: &CachedPrefix, rest: u32, headroom: u32) -> Result<(), u32> {
        let cached = |&block: &BlockId| self.pool.state(block) == BlockState::Cached;
        let held = blocks_of(&prefix.table).chain(prefix.state.blocks.iter().copied());
        let needed = held.filter(cached).count() as u32 + rest + headroom;
        if self.pool.available() < needed { Err(needed) } else { Ok(()) }
    }

    /// Gives the block table of a cached prefix the blocks that it lacks.
    pub(crate) fn complete(&self, table: &mut Vec<BlockId>, blocks: &[BlockId]) {
        let (state, rest) = blocks.split_at(self.groups.split(table).0.len());
        table[..state.len()].copy_from_slice(state);
        table.extend_from_slice(rest);
    }

    /// Returns whether sequences have states, and the prefix cache is used.
    pub(crate) fn caches_states(&self) -> bool {
        self.caching && self.groups.state_entries() > 0
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
        for block in self.evicted.drain(..) {
            forget(&mut self.pool, &self.cache.evict(block));
        }
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

    /// Adds the state after the first `blocks` full blocks of `tokens` to the prefix cache. Returns
    /// false when this state is cached already.
    pub(crate) fn publish_state(
        &mut self,
        chain: &HashChain,
        tokens: &[u32],
        blocks: usize,
        state: &[BlockId],
    ) -> bool {
        let is_new = self.caching && self.cache.insert_state(chain, tokens, blocks, state);
        if is_new {
            state.iter().for_each(|&block| self.pool.retain(block));
        }
        is_new
    }

    /// Removes the state after the block with this key from the prefix cache.
    pub(crate) fn forget_state(&mut self, key: BlockHash) {
        forget(&mut self.pool, &self.cache.remove_state(key));
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

/// Marks those of the blocks that the pool still retains as unknown to the prefix cache.
fn forget(pool: &mut BlockPool, blocks: &[BlockId]) {
    for &block in blocks {
        if pool.is_retained(block) {
            pool.forget(block);
        }
    }
}
