//! Second-touch admission: which blocks occurred in at least two requests.
//!
//! The keys live in two generations. When the recent generation is full it becomes the older one,
//! and the older one is dropped. So memory is bounded, and a key stays known for at least one
//! generation after its last touch.

use std::mem;

use foldhash::HashMap;

use crate::event::BlockHash;

#[derive(Debug)]
pub(super) struct BlockTouches {
    /// Whether each key was touched at least twice.
    recent: HashMap<BlockHash, bool>,
    older: HashMap<BlockHash, bool>,
    /// Maximum number of keys in one generation.
    keys_max: usize,
}

impl BlockTouches {
    pub(super) fn new(keys_max: usize) -> Self {
        Self { recent: HashMap::default(), older: HashMap::default(), keys_max: keys_max.max(1) }
    }

    /// Counts a touch of the block, and returns whether it is not the first. A request touches a
    /// block at most once.
    pub(super) fn add(&mut self, key: BlockHash) -> bool {
        if let Some(is_second) = self.recent.get_mut(&key) {
            *is_second = true;
            return true;
        }
        let is_second = self.older.contains_key(&key);
        if self.recent.len() >= self.keys_max {
            self.older = mem::take(&mut self.recent);
        }
        self.recent.insert(key, is_second);
        is_second
    }

    /// Returns whether the block was touched at least twice.
    pub(super) fn is_second(&self, key: BlockHash) -> bool {
        self.recent.get(&key).or_else(|| self.older.get(&key)).is_some_and(|&twice| twice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_touch_is_told_from_the_first() {
        let mut touches = BlockTouches::new(10);
        assert!(!touches.add(BlockHash(1)));
        assert!(!touches.is_second(BlockHash(1)) && !touches.is_second(BlockHash(2)));
        assert!(touches.add(BlockHash(1)));
        assert!(touches.is_second(BlockHash(1)));
    }

    #[test]
    fn memory_is_bounded_and_a_key_is_known_for_a_generation() {
        let mut touches = BlockTouches::new(4);
        touches.add(BlockHash(1000));
        for key in 0..4 {
            touches.add(BlockHash(key));
        }
        touches.add(BlockHash(1000));
        assert!(touches.is_second(BlockHash(1000)));
        for key in 0..100 {
            touches.add(BlockHash(key));
            assert!(touches.recent.len() <= 4 && touches.older.len() <= 4);
        }
        touches.add(BlockHash(1000));
        assert!(!touches.is_second(BlockHash(1000)), "the key was dropped meanwhile");
    }
}
