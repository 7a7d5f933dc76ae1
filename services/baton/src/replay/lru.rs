//! The baseline of the cache hit rate: one LRU cache.

use std::collections::{HashMap, VecDeque};

/// Hashed tokens of a prompt: their id, and the number of their full KV blocks.
pub(super) type Chunk = (u64, u32);

/// A cache that evicts the chunk that was used longest ago. Its capacity is a number of KV blocks.
#[derive(Default)]
pub(super) struct Lru {
    capacity: u64,
    blocks: u64,
    /// Blocks and time of the last use of each chunk.
    chunks: HashMap<u64, (u32, u64)>,
    /// Every use, oldest first. An entry evicts its chunk only if it is the chunk's last use.
    uses: VecDeque<(u64, u64)>,
    time: u64,
}

impl Lru {
    pub(super) fn new(capacity: u64) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// Uses the chunks of a prompt, and returns how many of its first blocks were cached. As in a
    /// node, the tail of a prefix is evicted before its head.
    pub(super) fn request(&mut self, prompt: &[Chunk]) -> u64 {
        let mut hits = 0;
        for (id, wanted) in prompt {
            let cached = self.chunks.get(id).map_or(0, |(blocks, _)| *blocks);
            hits += u64::from(cached.min(*wanted));
            if cached < *wanted {
                break;
            }
        }
        for (id, wanted) in prompt.iter().rev() {
            self.time += 1;
            let (blocks, used_at) = self.chunks.entry(*id).or_default();
            self.blocks += u64::from(wanted.saturating_sub(*blocks));
            (*blocks, *used_at) = ((*blocks).max(*wanted), self.time);
            self.uses.push_back((self.time, *id));
        }
        while self.blocks > self.capacity
            && let Some((time, id)) = self.uses.pop_front()
        {
            if let Some((blocks, _)) = self.chunks.get(&id).filter(|(_, used_at)| *used_at == time)
            {
                self.blocks -= u64::from(*blocks);
                self.chunks.remove(&id);
            }
        }
        hits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_tail_is_evicted_first() {
        let prompt = |ids: &[u64]| ids.iter().map(|id| (*id, 32)).collect::<Vec<_>>();
        let mut lru = Lru::new(4 * 32);
        assert_eq!(lru.request(&prompt(&[1, 2, 3])), 0);
        assert_eq!(lru.request(&prompt(&[4, 5])), 0);
        assert_eq!(
            lru.request(&prompt(&[1, 2, 3])),
            64,
            "the last chunk of the first prompt was evicted"
        );
        assert_eq!(lru.request(&prompt(&[4, 5])), 32);
    }

    #[test]
    fn longer_chunk_counts_its_new_blocks_only() {
        let mut lru = Lru::new(100);
        assert_eq!(lru.request(&[(1, 10)]), 0);
        assert_eq!(lru.request(&[(1, 32), (2, 5)]), 10);
        assert_eq!(lru.request(&[(1, 32), (2, 5)]), 37);
        assert_eq!(lru.blocks, 37);
    }
}
