//! The order of eviction: first the blocks that are not kept, by their time of release, then the
//! groups of kept blocks.

use std::{cmp::Reverse, iter, time::Instant};

use kernels::BlockId;

use super::{Block, BlockPool, BlockState, CachedList, Group};

impl BlockPool {
    /// Keeps held blocks until `until` once they are cached. A block that is already kept longer
    /// keeps its later time. `place`: place of the blocks' owner in the queue.
    pub(crate) fn keep(&mut self, blocks: &[BlockId], until: Instant, place: u64) {
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

    /// Stops keeping those of the held blocks that no owner at another place in the queue keeps.
    pub(crate) fn stop_keeping(&mut self, blocks: &[BlockId], place: u64) {
        for &block in blocks {
            let Block { state, kept, is_shared, .. } = self.blocks[block.index()];
            assert!(matches!(state, BlockState::Held { .. }), "a cached block is in a list");
            if !is_shared && kept.is_some_and(|(owner, _)| owner == Reverse(place)) {
                self.leave_group(block);
            }
        }
    }

    /// Removes a block that is in no list of cached blocks from its group. A group without blocks
    /// ends.
    pub(super) fn leave_group(&mut self, block: BlockId) {
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

    /// Stops keeping blocks whose time has passed at `now`. These blocks are then evicted before
    /// other cached blocks.
    pub(crate) fn end_kept(&mut self, now: Instant) {
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
    pub(super) fn oldest_evictable(&self) -> BlockId {
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

    /// Appends a block to the list that it belongs to while it is cached.
    pub(super) fn link_newest(&mut self, block: BlockId) {
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

    /// Removes a cached block from its list.
    pub(super) fn unlink(&mut self, block: BlockId) {
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
}
