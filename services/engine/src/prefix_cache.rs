//! Index from token prefixes to the blocks that hold their KV.
//!
//! The key of a block is a 128-bit hash of its 16 tokens and of the previous block's key. The chain
//! starts from model, weights, adapter and the tenant's salt, so equal tokens under other weights,
//! another adapter or another tenant have different keys. A lookup compares the tokens as well.
//! Each KV group has a block of its own, whose key is derived from the hash and the group. A group
//! with a window needs only the blocks in the window before the end of a hit. A model with a state
//! needs the state after the last token of a hit. States are cached after some full blocks only,
//! and a state is cached as a whole.
//! [`crate::block_pool`] decides which block is evicted.

use std::collections::BTreeMap;

use foldhash::HashMap;
use kernels::{BLOCK_TOKENS, BlockId, KvGroups, NO_BLOCK, hit_blocks};
use proto::cache_keys::KeyChain;

use crate::{
    event::{BlockHash, CacheChange},
    tiers::BlockContents,
};

/// Seeds of all hash chains of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSeeds {
    pub model_fingerprint: u128,
    pub weight_version: u64,
}

/// Keys of one sequence's full blocks. The chain grows with the known tokens.
#[derive(Clone, Debug)]
pub struct HashChain {
    salt: Box<str>,
    adapter: Option<u128>,
    root: BlockHash,
    keys: KeyChain,
    hashes: Vec<BlockHash>,
}

impl HashChain {
    /// Starts a chain. `adapter` is the content hash of the sequence's adapter.
    pub fn new(seeds: CacheSeeds, adapter: Option<u128>, cache_salt: &str) -> Self {
        let CacheSeeds { model_fingerprint, weight_version } = seeds;
        let keys = KeyChain::new(model_fingerprint, weight_version, adapter, cache_salt);
        let (salt, root) = (cache_salt.into(), BlockHash(keys.last()));
        Self { salt, adapter, root, keys, hashes: Vec::new() }
    }

    /// Replaces the keys by those of other weights.
    pub fn reseed(&mut self, seeds: CacheSeeds, tokens: &[u32]) {
        *self = Self::new(seeds, self.adapter, &self.salt);
        self.extend(tokens);
    }

    /// Hashes the full blocks of `tokens` that are not hashed yet. `tokens` only ever grows.
    pub fn extend(&mut self, tokens: &[u32]) {
        let full = tokens.len() / BLOCK_TOKENS;
        for index in self.hashes.len()..full {
            let hash = self.keys.add(block_tokens(tokens, index));
            self.hashes.push(BlockHash(hash));
        }
    }

    /// Returns the keys of the full blocks, in order.
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Returns the contents of the first group's block `index` of `tokens`.
    pub fn contents(&self, tokens: &[u32], index: usize) -> BlockContents {
        let (key, parent) = (self.hashes[index], self.parent(index));
        BlockContents { key, parent, tokens: *block_tokens(tokens, index), group: 0 }
    }

    /// Returns the key before block `index`.
    pub fn parent(&self, index: usize) -> BlockHash {
        match index {
            0 => self.root,
            _ => self.hashes[index - 1],
        }
    }
}

fn block_tokens(tokens: &[u32], index: usize) -> &[u32; BLOCK_TOKENS] {
    tokens[index * BLOCK_TOKENS..][..BLOCK_TOKENS].try_into().expect("a slice of one block")
}

#[derive(Debug)]
struct PrefixEntry {
    block: BlockId,
    group: usize,
    /// Key of the first group's previous block.
    parent: BlockHash,
    tokens: [u32; BLOCK_TOKENS],
}

/// State after a full block.
#[derive(Debug)]
struct StateEntry {
    blocks: Vec<BlockId>,
    /// Key of the previous block.
    parent: BlockHash,
    /// Tokens of the block.
    tokens: [u32; BLOCK_TOKENS],
}

/// Prefix cache of one arena.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    /// By the key of the group's block.
    entries: HashMap<BlockHash, PrefixEntry>,
    keys: HashMap<BlockId, BlockHash>,
    /// By the key of the last block that the state includes.
    states: HashMap<BlockHash, StateEntry>,
    /// The keys of the states whose blocks these are.
    state_keys: HashMap<BlockId, BlockHash>,
    /// Whether a prefix hit needs a cached state. Then the cache reports its states.
    pub(crate) needs_states: bool,
    /// Changes of the states, or else of the first KV group's blocks, since the last
    /// [`Self::take_changes`]: at most one per key, which bounds the map when no caller takes them.
    /// Ordered, so that equal inputs give equal outputs.
    changes: BTreeMap<BlockHash, CacheChange>,
}

impl PrefixCache {
    /// Returns the block table of the longest cached prefix of `tokens`, at most [`hit_blocks`] of
    /// each group. The entries of a state have no block.
    pub(crate) fn lookup(
        &self,
        chain: &HashChain,
        tokens: &[u32],
        groups: &KvGroups,
    ) -> Vec<BlockId> {
        let blocks_max = hit_blocks(tokens.len());
        let (mut table, mut hit) = (vec![NO_BLOCK; groups.state_entries()], 0);
        // For each group: index of the first block from which on all searched blocks are cached.
        let mut begins = vec![0; groups.count()];
        let covers = |begins: &[usize], blocks: usize| {
            let needed = |group| groups.first_needed(group, blocks * BLOCK_TOKENS);
            begins.iter().enumerate().all(|(group, &begin)| begin <= needed(group))
        };
        for (index, &hash) in chain.hashes().iter().enumerate().take(blocks_max) {
            for (group, begin) in begins.iter_mut().enumerate() {
                let entry = self.entries.get(&hash.of_group(group)).filter(|entry| {
                    entry.group == group
                        && entry.parent == chain.parent(index)
                        && entry.tokens == *block_tokens(tokens, index)
                });
                if entry.is_none() {
                    *begin = index + 1;
                }
                table.push(entry.map_or(NO_BLOCK, |entry| entry.block));
            }
            if covers(&begins, index + 1) {
                hit = index + 1;
            } else if !covers(&begins, blocks_max) {
                break;
            }
        }
        table.truncate(groups.entries(hit * BLOCK_TOKENS));
        for (entry, block) in table.iter_mut().enumerate().skip(groups.state_entries()) {
            let (index, group) = groups.place(entry);
            if index < groups.first_needed(group, hit * BLOCK_TOKENS) {
                *block = NO_BLOCK;
            }
        }
        table
    }

    /// Adds `block` as a group's block `index` of `tokens`. Returns false, and adds nothing, when
    /// another block has the same contents.
    pub(crate) fn insert(
        &mut self,
        chain: &HashChain,
        tokens: &[u32],
        (index, group): (usize, usize),
        block: BlockId,
    ) -> bool {
        let key = chain.hashes()[index].of_group(group);
        if self.entries.contains_key(&key) {
            return false;
        }
        let parent = chain.parent(index);
        let tokens = *block_tokens(tokens, index);
        self.entries.insert(key, PrefixEntry { block, group, parent, tokens });
        let before = self.keys.insert(block, key);
        debug_assert_eq!(before, None, "block {} already had contents", block.0);
        self.note_block(group, CacheChange::Added(key));
        true
    }

    /// Returns the longest prefix of `tokens`, of at most `blocks` full blocks, after which the state
    /// is cached: its number of blocks, and the blocks of the state.
    pub(crate) fn last_state(
        &self,
        chain: &HashChain,
        tokens: &[u32],
        blocks: usize,
    ) -> Option<(usize, &[BlockId])> {
        (1..=blocks).rev().find_map(|blocks| {
            let entry = self.states.get(&chain.hashes()[blocks - 1])?;
            let is_same = entry.parent == chain.parent(blocks - 1)
                && entry.tokens == *block_tokens(tokens, blocks - 1);
            is_same.then_some((blocks, &*entry.blocks))
        })
    }

    /// Adds the state after the first `blocks` full blocks of `tokens`. Returns false, and adds
    /// nothing, when this state is cached already.
    pub(crate) fn insert_state(
        &mut self,
        chain: &HashChain,
        tokens: &[u32],
        blocks: usize,
        state: &[BlockId],
    ) -> bool {
        let key = chain.hashes()[blocks - 1];
        if self.states.contains_key(&key) {
            return false;
        }
        let (parent, tokens) = (chain.parent(blocks - 1), *block_tokens(tokens, blocks - 1));
        self.states.insert(key, StateEntry { blocks: state.to_vec(), parent, tokens });
        self.state_keys.extend(state.iter().map(|&block| (block, key)));
        self.note(CacheChange::Added(key));
        true
    }

    /// Returns whether the state after the block with this key is cached.
    pub(crate) fn has_state(&self, key: BlockHash) -> bool {
        self.states.contains_key(&key)
    }

    /// Removes the state after the block with this key, and returns its blocks.
    pub(crate) fn remove_state(&mut self, key: BlockHash) -> Vec<BlockId> {
        let Some(StateEntry { blocks, .. }) = self.states.remove(&key) else { return Vec::new() };
        blocks.iter().for_each(|block| _ = self.state_keys.remove(block));
        self.note(CacheChange::Evicted(key));
        blocks
    }

    /// Removes an evicted block. Returns the blocks of the state that it was a part of.
    pub(crate) fn evict(&mut self, block: BlockId) -> Vec<BlockId> {
        if let Some(&key) = self.state_keys.get(&block) {
            return self.remove_state(key);
        }
        if let Some(key) = self.keys.remove(&block)
            && let Some(entry) = self.entries.remove(&key)
        {
            self.note_block(entry.group, CacheChange::Evicted(key));
        }
        Vec::new()
    }

    /// Returns the keys that routers know, in ascending order: of all cached blocks of the first KV
    /// group, or of the blocks after which the state is cached.
    pub(crate) fn hashes(&self) -> Vec<BlockHash> {
        let first = self.entries.iter().filter(|(_, entry)| entry.group == 0);
        let mut hashes: Vec<_> = match self.needs_states {
            true => self.states.keys().copied().collect(),
            false => first.map(|(key, _)| *key).collect(),
        };
        hashes.sort_unstable();
        hashes
    }

    /// Takes the changes since the last call; each key occurs at most once.
    pub(crate) fn take_changes(&mut self) -> Vec<CacheChange> {
        std::mem::take(&mut self.changes).into_values().collect()
    }

    /// Returns the block with this key, and what the key was computed from.
    pub(crate) fn get(&self, key: BlockHash) -> Option<(BlockId, BlockContents)> {
        let entry = self.entries.get(&key)?;
        let (parent, tokens) = (entry.parent.of_group(entry.group), entry.tokens);
        let group = entry.group as u8;
        Some((entry.block, BlockContents { key, parent, tokens, group }))
    }

    pub(crate) fn contains_block(&self, block: BlockId) -> bool {
        self.keys.contains_key(&block) || self.state_keys.contains_key(&block)
    }

    /// Returns the number of cached blocks.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() + self.state_keys.len()
    }

    /// Records a change of a group's block.
    fn note_block(&mut self, group: usize, change: CacheChange) {
        if group == 0 && !self.needs_states {
            self.note(change);
        }
    }

    /// Records a change; a change and its opposite cancel.
    fn note(&mut self, change: CacheChange) {
        let (CacheChange::Added(hash) | CacheChange::Evicted(hash)) = change;
        match self.changes.get(&hash) {
            Some(&noted) if noted != change => {
                self.changes.remove(&hash);
            }
            _ => {
                self.changes.insert(hash, change);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    const SEEDS: CacheSeeds = CacheSeeds { model_fingerprint: 1, weight_version: 0 };

    fn tokens(count: u32) -> Vec<u32> {
        (0..count).map(|token| token * 3 + 1).collect()
    }

    fn chain(seeds: CacheSeeds, salt: &str, tokens: &[u32]) -> HashChain {
        let mut chain = HashChain::new(seeds, None, salt);
        chain.extend(tokens);
        chain
    }

    fn filled(tokens: &[u32]) -> (PrefixCache, HashChain) {
        let mut cache = PrefixCache::default();
        let chain = chain(SEEDS, "", tokens);
        for index in 0..tokens.len() / BLOCK_TOKENS {
            assert!(cache.insert(&chain, tokens, (index, 0), BlockId(index as u32)));
        }
        (cache, chain)
    }

    fn lookup(cache: &PrefixCache, chain: &HashChain, tokens: &[u32]) -> Vec<BlockId> {
        cache.lookup(chain, tokens, &KvGroups::default())
    }

    #[test]
    fn a_hit_ends_one_token_before_the_end() {
        let tokens = tokens(48);
        let (cache, chain) = filled(&tokens);
        assert_eq!(lookup(&cache, &chain, &tokens), [BlockId(0), BlockId(1)]);
        assert_eq!(lookup(&cache, &chain, &tokens[..33]), [BlockId(0), BlockId(1)]);
        assert_eq!(lookup(&cache, &chain, &tokens[..32]), [BlockId(0)]);
        assert_eq!(lookup(&cache, &chain, &tokens[..16]), []);
        assert_eq!(lookup(&cache, &chain, &[]), []);
    }

    #[test]
    fn another_salt_model_weight_version_or_adapter_never_hits() {
        let tokens = tokens(48);
        let (cache, _) = filled(&tokens);
        let adapted = |adapter| {
            let mut chain = HashChain::new(SEEDS, Some(adapter), "");
            chain.extend(&tokens);
            chain
        };
        assert_ne!(adapted(7).hashes(), adapted(8).hashes());
        let others = [
            adapted(7),
            chain(SEEDS, "tenant", &tokens),
            chain(CacheSeeds { weight_version: 1, ..SEEDS }, "", &tokens),
            chain(CacheSeeds { model_fingerprint: 2, ..SEEDS }, "", &tokens),
        ];
        for other in others {
            assert_eq!(lookup(&cache, &other, &tokens), []);
        }
    }

    #[test]
    fn an_equal_hash_over_other_tokens_is_no_hit() {
        let tokens = tokens(48);
        let (mut cache, chain) = filled(&tokens);
        cache.entries.get_mut(&chain.hashes()[1]).expect("inserted").tokens[3] ^= 1;
        assert_eq!(lookup(&cache, &chain, &tokens), [BlockId(0)]);
    }

    #[test]
    fn a_prefix_whose_first_block_was_evicted_is_unreachable() {
        let tokens = tokens(48);
        let (mut cache, chain) = filled(&tokens);
        cache.evict(BlockId(0));
        assert_eq!(lookup(&cache, &chain, &tokens), []);
        assert!(cache.insert(&chain, &tokens, (0, 0), BlockId(9)));
        assert_eq!(lookup(&cache, &chain, &tokens), [BlockId(9), BlockId(1)]);
    }

    #[test]
    fn the_first_of_two_equal_blocks_stays_cached() {
        let tokens = tokens(32);
        let (mut cache, chain) = filled(&tokens);
        assert!(!cache.insert(&chain, &tokens, (0, 0), BlockId(9)));
        assert!(!cache.contains_block(BlockId(9)));
        assert_eq!(cache.len(), 2);
    }

    #[test]
    fn opposite_changes_cancel_and_each_is_taken_once() {
        let tokens = tokens(32);
        let (mut cache, chain) = filled(&tokens);
        cache.evict(BlockId(1));
        assert_eq!(cache.take_changes(), [CacheChange::Added(chain.hashes()[0])]);
        assert_eq!(cache.take_changes(), []);
        cache.evict(BlockId(0));
        assert_eq!(cache.take_changes(), [CacheChange::Evicted(chain.hashes()[0])]);
        assert_eq!(cache.len(), 0);
    }

    #[test]
    fn keys_do_not_depend_on_how_the_tokens_became_known() {
        let tokens = tokens(64);
        let mut grown = HashChain::new(SEEDS, None, "salt");
        for known in 0..=tokens.len() {
            grown.extend(&tokens[..known]);
        }
        assert_eq!(grown.hashes(), chain(SEEDS, "salt", &tokens).hashes());
    }

    /// A group without a window and one with a window of 20 tokens: two or three blocks.
    #[test]
    fn a_hit_needs_only_the_blocks_in_the_window() {
        let tokens = tokens(97);
        let chain = chain(SEEDS, "", &tokens);
        let groups = KvGroups::of_windows(&[None, NonZeroUsize::new(20)]);
        let mut cache = PrefixCache::default();
        for index in 0..6 {
            for group in 0..2 {
                let block = BlockId((2 * index + group) as u32);
                cache.insert(&chain, &tokens, (index, group), block);
            }
        }
        let table = |ids: &[u32]| ids.iter().map(|&id| BlockId(id)).collect::<Vec<_>>();
        let none = NO_BLOCK.0;
        let whole = table(&[0, none, 2, none, 4, none, 6, none, 8, 9, 10, 11]);
        assert_eq!(cache.lookup(&chain, &tokens, &groups), whole);
        (0..4).for_each(|index| _ = cache.evict(BlockId(2 * index + 1)));
        assert_eq!(cache.lookup(&chain, &tokens, &groups), whole);
        // A shorter hit needs a block that is not cached any more.
        assert_eq!(cache.lookup(&chain, &tokens[..81], &groups), []);
        cache.evict(BlockId(9));
        assert_eq!(cache.lookup(&chain, &tokens, &groups), []);
        assert_eq!(cache.take_changes().len(), 6, "routers follow the first group");
    }
}
