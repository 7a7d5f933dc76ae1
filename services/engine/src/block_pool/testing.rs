//! Check of the block pool's invariants, for tests and the simulation.

use std::collections::BTreeSet;

use super::{BlockCounts, BlockPool, BlockState};

impl BlockPool {
    /// Panics when states, lists and counts disagree. The cost is linear in the pool.
    pub(crate) fn check(&self) {
        let mut counts = BlockCounts::default();
        let mut cached_copying = 0;
        for (index, block) in self.blocks.iter().enumerate() {
            match block.state {
                BlockState::Free => counts.free += 1,
                BlockState::Cached => counts.cached += 1,
                BlockState::Held { refs } => {
                    assert!(refs > 0, "block {index} is held by nobody");
                    assert!(block.pins <= refs, "block {index} has more pins than references");
                    counts.held += 1;
                }
                BlockState::Reserved { .. } => counts.reserved += 1,
            }
            assert!(block.retained || !block.copying, "block {index} is saved but has no key");
            cached_copying += u32::from(block.copying && block.state == BlockState::Cached);
            if !matches!(block.state, BlockState::Held { .. }) {
                assert_eq!(block.pins, 0, "block {index} is {:?} and pinned", block.state);
                let cached = block.state == BlockState::Cached;
                assert_eq!(block.retained, cached, "block {index} is {:?}", block.state);
            }
        }
        assert_eq!(counts, self.counts);
        assert_eq!(cached_copying, self.cached_copying);
        assert_eq!(counts.total(), self.total());
        assert_eq!(self.free.len() as u32, counts.free);
        assert!(self.free.iter().all(|&block| self.state(block) == BlockState::Free));

        let mut walked = 0;
        let groups = self.kept.iter().map(|(&group, kept)| (Some(group), &kept.cached));
        for (group, list) in groups.chain([(None, &self.cached)]) {
            let (mut previous, mut next, before) = (None, list.oldest, walked);
            while let Some(block) = next {
                let entry = &self.blocks[block.index()];
                assert_eq!(entry.state, BlockState::Cached);
                assert_eq!(entry.older, previous);
                let known = entry.kept.filter(|group| self.kept.contains_key(group));
                assert_eq!(known, group, "block {} is in the list of its group", block.0);
                walked += 1;
                assert!(walked <= counts.cached, "a list of cached blocks has a cycle");
                (previous, next) = (Some(block), entry.newer);
            }
            assert_eq!(previous, list.newest);
            assert_eq!(walked - before, list.len);
        }
        assert_eq!(walked, counts.cached);
        assert_eq!(self.kept_blocks, walked - self.cached.len);
        let evictable = self.kept.iter().filter(|(_, kept)| kept.cached.len > 0);
        let evictable: BTreeSet<_> = evictable.map(|(&group, _)| group).collect();
        assert_eq!(self.evictable_groups, evictable, "groups with cached blocks are known");
        assert_eq!(self.kept_until.len(), self.kept.len(), "every kept group has one time");
        for (&key, group) in &self.kept {
            assert!(self.kept_until.contains(&(group.until, key)));
            let members = self.blocks.iter().filter(|block| block.kept == Some(key)).count();
            assert!(members > 0, "a group has a block");
            assert_eq!(members as u32, group.members);
        }
    }
}
