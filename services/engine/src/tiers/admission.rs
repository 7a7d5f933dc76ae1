//! Admission to the tiers: which blocks are worth a save, by their occurrences in requests.

use std::{mem, ops::Range};

use kernels::BLOCK_TOKENS;

use super::{TierAdmission, TierStores, saves::OfferedBlock};
use crate::event::BlockHash;

/// Maximum number of blocks of admitted prompts that are not counted yet. A prompt of a million
/// tokens has 65,536 blocks.
const UNCOUNTED_MAX: usize = 65_536;
/// Minimum number of these blocks that are counted at a time. If the backlog divided by
/// `BACKLOG_PART` is larger, that many are counted: a prefill step may admit many prompts, so a
/// fixed number would not keep up.
const COUNTED_MIN: usize = 256;
const BACKLOG_PART: usize = 8;

/// Cached or loaded blocks of an admitted prompt. A prompt of 140,000 tokens has 8,750 blocks:
/// counting all of them at its admission would delay the step that admits it.
#[derive(Debug)]
pub(super) struct AdmittedPrefix {
    keys: Vec<BlockHash>,
    /// Number of leading blocks that were in the prefix cache.
    resident: usize,
    /// Number of leading blocks whose occurrence is counted.
    counted: usize,
}

/// A block that a request has computed or received.
#[derive(Debug)]
pub(super) struct WrittenBlock {
    key: BlockHash,
    /// Key of the block before it.
    parent: BlockHash,
    /// Whether its occurrence in the request is counted already.
    is_counted: bool,
    /// Whether the prompt of its request began with a hit.
    continues: bool,
}

/// Blocks that end with a window of each KV group that is not saved whole.
#[derive(Debug)]
pub(super) struct WrittenWindow {
    /// Hashes of the sequence's blocks from the start of the largest window on.
    hashes: Vec<BlockHash>,
    /// Index of the first of them.
    first: usize,
    /// Number of the sequence's leading blocks whose occurrence is counted already.
    counted: usize,
    /// Whether the prompt of its request began with a hit.
    continues: bool,
}

impl TierStores {
    /// Records that a prompt was admitted whose first blocks `keys` are cached or loaded; the first
    /// `resident` of them are in the prefix cache. [`count_admitted`](Self::count_admitted) counts
    /// the blocks later.
    pub(crate) fn prefix_admitted(&mut self, keys: &[BlockHash], resident: usize) {
        // Beyond the bound, the tail of the prefix is not counted.
        let keys = &keys[..keys.len().min(UNCOUNTED_MAX - self.uncounted)];
        // A block that the request writes before the prefix is counted takes the LRU time of the
        // prefix's last block. So this time must be that of the admission.
        if let Some(last) = keys.last() {
            for group in self.groups_saved_whole() {
                let last = last.of_group(group);
                let tiers = self.tiers.iter_mut().flatten();
                tiers.for_each(|tier| _ = tier.store.mark_used(last, None));
            }
        }
        if !keys.is_empty() {
            self.uncounted += keys.len();
            self.admitted.push_back(AdmittedPrefix { keys: keys.to_vec(), resident, counted: 0 });
        }
    }

    /// Counts the next blocks of admitted prompts, and offers those that were resident and are
    /// worth a save.
    pub(crate) fn count_admitted(&mut self) {
        let mut left = COUNTED_MIN.max(self.uncounted / BACKLOG_PART);
        while left > 0
            && let Some(mut prefix) = self.admitted.pop_front()
        {
            let end = prefix.keys.len().min(prefix.counted + left);
            left -= end - prefix.counted;
            self.uncounted -= end - prefix.counted;
            for group in self.groups_saved_whole() {
                self.mark_used(&prefix.keys, prefix.counted..end, group);
            }
            for index in prefix.counted..end {
                let key = prefix.keys[index];
                if self.count(key) && index < prefix.resident {
                    self.offer_whole(key);
                }
            }
            prefix.counted = end;
            if end < prefix.keys.len() {
                self.admitted.push_front(prefix);
            }
        }
    }

    /// Marks a group's blocks `indices` of `hashes` as used: each is overwritten just before the
    /// block before it. If `indices` begin with 0, the first block becomes the most recently used
    /// one.
    fn mark_used(&mut self, hashes: &[BlockHash], indices: Range<usize>, group: usize) {
        let before = indices.start.checked_sub(1).map(|index| hashes[index].of_group(group));
        let mut slots = self.tiers.each_ref().map(|tier| tier.as_ref()?.store.slot(before?));
        for index in indices {
            let key = hashes[index].of_group(group);
            for (tier, slot) in self.tiers.iter_mut().zip(&mut slots) {
                let used = tier.as_mut().and_then(|tier| tier.store.mark_used(key, *slot));
                *slot = used.or(*slot);
            }
        }
    }

    /// Offers the block with this hash in each group that is saved whole.
    fn offer_whole(&mut self, hash: BlockHash) {
        for group in self.groups_saved_whole() {
            self.offer(OfferedBlock { key: hash.of_group(group), begins_window: false });
        }
    }

    /// Records that a request has written the last of the blocks `hashes` of a sequence, or begins
    /// after it. [`count_written`](Self::count_written) later offers the window before their end,
    /// in the groups that are not saved whole. The occurrence of the first `counted` blocks in the
    /// request is counted. `continues`: the prompt of the request began with a hit.
    pub(crate) fn window_written(&mut self, hashes: &[BlockHash], counted: usize, continues: bool) {
        let groups = self.groups_saved_whole().end..self.groups.count();
        let needed = |group| self.groups.first_needed(group, hashes.len() * BLOCK_TOKENS);
        if let Some(first) = groups.map(needed).min().filter(|first| *first < hashes.len()) {
            let hashes = hashes[first..].to_vec();
            self.windows.push(WrittenWindow { hashes, first, counted, continues });
        }
    }

    /// Marks the blocks of a window as used, and offers those that are worth a save.
    fn offer_window(&mut self, window: &WrittenWindow) {
        let &WrittenWindow { ref hashes, first, counted, continues } = window;
        let end = (first + hashes.len()) * BLOCK_TOKENS;
        for group in self.groups_saved_whole().end..self.groups.count() {
            let begin = self.groups.first_needed(group, end) - first;
            let hashes = &hashes[begin..];
            self.mark_used(hashes, 0..hashes.len(), group);
            for (index, hash) in hashes.iter().enumerate() {
                let key = hash.of_group(group);
                let is_admitted = match first + begin + index < counted {
                    true => self.admits(key),
                    false => self.count(key),
                };
                if is_admitted || continues {
                    self.offer(OfferedBlock { key, begins_window: index == 0 });
                }
            }
        }
    }

    /// Records that a request has written a block after the block `parent`.
    /// [`count_written`](Self::count_written) counts and offers the block later, because a step may
    /// wait to be launched. `is_counted`: its occurrence in the request was counted before.
    /// `continues`: the prompt of the request began with a hit.
    pub(crate) fn block_written(
        &mut self,
        key: BlockHash,
        parent: BlockHash,
        is_counted: bool,
        continues: bool,
    ) {
        self.written.push(WrittenBlock { key, parent, is_counted, continues });
    }

    /// Counts the blocks written since the last call, and offers those that are worth a save, and
    /// then those of the windows.
    pub(crate) fn count_written(&mut self) {
        let mut written = mem::take(&mut self.written);
        for WrittenBlock { key, parent, is_counted, continues } in written.drain(..) {
            let is_admitted = match is_counted {
                true => self.admits(key),
                false => self.count_written_block(key, parent),
            };
            if is_admitted || continues {
                self.offer_whole(key);
            }
        }
        self.written = written;
        for window in mem::take(&mut self.windows) {
            self.offer_window(&window);
        }
    }

    /// Counts the occurrence of a written block. Returns whether the block is worth a save.
    fn count_written_block(&mut self, key: BlockHash, parent: BlockHash) -> bool {
        for group in self.groups_saved_whole() {
            let (key, parent) = (key.of_group(group), parent.of_group(group));
            for tier in self.tiers.iter_mut().flatten().filter(|it| it.store.is_known(key)) {
                let parent = tier.store.slot(parent);
                tier.store.mark_used(key, parent);
            }
        }
        self.count(key)
    }

    /// Counts the block's occurrence in a request. Returns whether the block is worth a save.
    fn count(&mut self, key: BlockHash) -> bool {
        match self.config.admission {
            TierAdmission::Always => true,
            TierAdmission::SecondTouch => self.touches.add(key),
        }
    }

    /// Returns whether a counted block is worth a save.
    fn admits(&self, key: BlockHash) -> bool {
        match self.config.admission {
            TierAdmission::Always => true,
            TierAdmission::SecondTouch => self.touches.is_second(key),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{num::NonZeroUsize, ops::RangeInclusive};

    use kernels::{BlockId, KvGroups};

    use super::*;
    use crate::tiers::{
        BlockContents, RecoveredBlock, Tier,
        testing::{with_disk, with_groups},
    };

    fn keys(range: RangeInclusive<u128>) -> Vec<BlockHash> {
        range.map(BlockHash).collect()
    }

    /// Lets the disk have the blocks 1 to `count` from an earlier start.
    fn recover(tiers: &mut TierStores, count: u128) {
        let block = |(key, slot)| RecoveredBlock { slot, key, group: 0 };
        let blocks: Vec<_> = keys(1..=count).into_iter().zip(0..).map(block).collect();
        tiers.recover(Tier::Disk, &blocks, true);
    }

    /// Writes and offers block 2001 of a turn, which follows block 600.
    fn write_after_600(tiers: &mut TierStores) -> BlockContents {
        let (key, parent) = (BlockHash(2001), BlockHash(600));
        tiers.block_written(key, parent, false, true);
        tiers.count_written();
        BlockContents { key, parent, tokens: [0; BLOCK_TOKENS], group: 0 }
    }

    #[test]
    fn blocks_of_a_long_prefix_are_counted_and_offered_a_few_at_a_time() {
        let mut tiers = with_disk(10);
        tiers.prefix_admitted(&keys(1..=600), 600);
        tiers.prefix_admitted(&keys(1001..=1100), 10);
        for offered in [0, 256, 512, 610, 610] {
            assert_eq!(tiers.state(Tier::Disk).queued.len(), offered);
            tiers.count_admitted();
        }
        assert_eq!((tiers.uncounted, tiers.admitted.len()), (0, 0));
    }

    #[test]
    fn tail_of_a_counted_prefix_is_overwritten_before_its_head() {
        let mut tiers = with_disk(1000);
        recover(&mut tiers, 1000);
        tiers.prefix_admitted(&keys(1..=600), 0);
        (0..3).for_each(|_| tiers.count_admitted());
        let used_last = [keys(1..=600), vec![BlockHash(1000)]].concat();
        assert_eq!(tiers.keys(Tier::Disk, 601), used_last);
        // A block that a request computes follows the block before it.
        tiers.count_written_block(BlockHash(601), BlockHash(600));
        assert_eq!(tiers.keys(Tier::Disk, 601), keys(1..=601));
        tiers.check();
    }

    #[test]
    fn tail_that_is_not_counted_is_not_used_last() {
        let mut tiers = with_disk(10);
        recover(&mut tiers, 6);
        tiers.prefix_admitted(&keys(1001..=1000 + UNCOUNTED_MAX as u128 - 2), 0);
        tiers.prefix_admitted(&keys(1..=4), 0);
        while tiers.uncounted > 0 {
            tiers.count_admitted();
        }
        let used_last = tiers.keys(Tier::Disk, 3);
        assert_eq!(used_last[..2], keys(1..=2));
        assert_ne!(used_last[2], BlockHash(4));
    }

    #[test]
    fn block_that_is_written_while_its_prefix_is_not_counted_is_overwritten_just_before_it() {
        let mut tiers = with_disk(1001);
        recover(&mut tiers, 1000);
        tiers.prefix_admitted(&keys(1..=600), 600);
        tiers.count_admitted();
        // The turn's new block is saved before the rest of its prefix is counted.
        let contents = write_after_600(&mut tiers);
        let save = tiers.next_save(|_| Ok((BlockId(0), contents))).expect("a slot is free");
        tiers.end_save(save.job, true);
        (0..2).for_each(|_| tiers.count_admitted());
        let used_last = [keys(1..=600), vec![BlockHash(2001)]].concat();
        assert_eq!(tiers.keys(Tier::Disk, 601), used_last);
        tiers.check();
    }

    #[test]
    fn block_of_the_conversation_that_was_used_longest_ago_is_saved_to_a_full_tier() {
        let mut tiers = with_disk(1000);
        recover(&mut tiers, 1000);
        for conversation in [1..=600, 601..=1000] {
            tiers.prefix_admitted(&keys(conversation), 0);
            (0..3).for_each(|_| tiers.count_admitted());
        }
        tiers.prefix_admitted(&keys(1..=600), 600);
        tiers.count_admitted();
        let contents = write_after_600(&mut tiers);
        assert!(tiers.next_save(|_| Ok((BlockId(0), contents))).is_some());
        assert_eq!(tiers.stats(Tier::Disk).unwrap().dropped, 0);
    }

    #[test]
    fn backlog_of_prefixes_that_are_admitted_at_every_step_does_not_grow() {
        let mut tiers = with_disk(10);
        for turn in 0..200 {
            tiers.prefix_admitted(&keys(1000 * turn + 1..=1000 * turn + 1000), 0);
            tiers.count_admitted();
        }
        assert!(tiers.uncounted <= 8000, "{} blocks wait", tiers.uncounted);
    }

    #[test]
    fn written_blocks_are_offered_when_they_are_counted() {
        let mut tiers = with_disk(10);
        tiers.config.admission = TierAdmission::SecondTouch;
        let mut offered = |key, is_counted, continues| {
            tiers.block_written(BlockHash(key), BlockHash(0), is_counted, continues);
            let before = tiers.state(Tier::Disk).queued.len();
            tiers.count_written();
            (before, tiers.state(Tier::Disk).queued.len())
        };
        assert_eq!(offered(1, false, false), (0, 0), "the first occurrence");
        assert_eq!(offered(1, true, false), (0, 0), "written again by the same request");
        assert_eq!(offered(1, false, false), (0, 1), "the second occurrence");
        assert_eq!(offered(2, false, true), (1, 2), "the prompt began with a hit");
    }

    #[test]
    fn blocks_that_wait_to_be_counted_are_bounded() {
        let mut tiers = with_disk(10);
        tiers.prefix_admitted(&keys(1..=UNCOUNTED_MAX as u128 - 1), 0);
        tiers.prefix_admitted(&keys(1..=3), 3);
        tiers.prefix_admitted(&keys(1..=3), 3);
        assert_eq!((tiers.uncounted, tiers.admitted.len()), (UNCOUNTED_MAX, 2));
        (0..UNCOUNTED_MAX / COUNTED_MIN).for_each(|_| tiers.count_admitted());
        assert_eq!((tiers.uncounted, tiers.admitted.len()), (0, 0));
    }

    /// Saves all offered blocks.
    fn save_all(tiers: &mut TierStores) {
        let tokens = [0; BLOCK_TOKENS];
        let resident = |key: BlockHash| {
            let (hash, group) = match key.0 < 10_000 {
                true => (key, 0),
                false => (key.of_group(1), 1),
            };
            let parent = BlockHash(hash.0 - 1);
            let contents = BlockContents { key: hash, parent, tokens, group: 0 };
            Ok((BlockId(0), contents.of_group(group)))
        };
        while let Some(save) = tiers.next_save(resident) {
            tiers.end_save(save.job, true);
            tiers.check();
        }
    }

    /// Ends a turn whose blocks have these hashes; the blocks before `prefix` were cached.
    fn end_turn(tiers: &mut TierStores, hashes: RangeInclusive<u128>, prefix: usize) {
        let hashes = keys(hashes);
        tiers.prefix_admitted(&hashes[..prefix], 0);
        tiers.count_admitted();
        for &hash in &hashes[prefix..] {
            tiers.block_written(hash, BlockHash(hash.0 - 1), false, true);
        }
        tiers.window_written(&hashes, 0, true);
        tiers.count_written();
        save_all(tiers);
    }

    fn has_window(tiers: &mut TierStores, hashes: RangeInclusive<u128>) -> bool {
        let store = &tiers.state(Tier::Disk).store;
        hashes.into_iter().all(|hash| store.find(BlockHash(hash).of_group(1)).is_some())
    }

    /// A group without a window, and one with a window of three blocks.
    #[test]
    fn windows_of_the_conversation_that_was_used_longest_ago_are_overwritten_first() {
        let groups = KvGroups::of_windows(&[None, NonZeroUsize::new(40)]);
        let mut tiers = with_groups(2 * 13 + 3, groups);
        tiers.recover(Tier::Disk, &[], true);
        // Two conversations of ten blocks leave three slots.
        end_turn(&mut tiers, 1001..=1010, 0);
        end_turn(&mut tiers, 2001..=2010, 0);
        assert_eq!(tiers.stats(Tier::Disk).unwrap().stored, 26);
        // The first one returns. Its window begins just after the last one, and then in it.
        end_turn(&mut tiers, 1001..=1013, 10);
        assert!(has_window(&mut tiers, 1011..=1013));
        end_turn(&mut tiers, 1001..=1014, 13);
        assert!(has_window(&mut tiers, 1012..=1014));
        // A third conversation overwrites the second one, and then the first windows.
        end_turn(&mut tiers, 3001..=3003, 0);
        assert!(has_window(&mut tiers, 1012..=1014) && has_window(&mut tiers, 3001..=3003));
        assert!(!tiers.state(Tier::Disk).store.is_known(BlockHash(2010)));
        assert_eq!(tiers.stats(Tier::Disk).unwrap().dropped, 0);
    }

    #[test]
    fn windows_are_offered_when_written_blocks_are_counted() {
        let groups = KvGroups::of_windows(&[None, NonZeroUsize::new(40)]);
        let mut tiers = with_groups(50, groups);
        tiers.config.admission = TierAdmission::SecondTouch;
        let mut offered = |count, counted, continues| {
            tiers.window_written(&keys(1..=count), counted, continues);
            let before = tiers.state(Tier::Disk).queued.len();
            tiers.count_written();
            (before, tiers.state(Tier::Disk).queued.len())
        };
        assert_eq!(offered(10, 0, false), (0, 0), "the first occurrence");
        assert_eq!(offered(11, 10, false), (0, 0), "two of three blocks in the same request");
        assert_eq!(offered(10, 0, false), (0, 3), "the second occurrence");
        assert_eq!(offered(4, 4, true), (3, 6), "the prompt began with a hit");
        assert_eq!(offered(4, 0, false), (6, 6), "a preempted sequence does not count");
        // Without a window there is nothing to offer.
        let mut tiers = with_disk(10);
        tiers.window_written(&keys(1..=10), 0, true);
        assert!(tiers.windows.is_empty());
    }
}
