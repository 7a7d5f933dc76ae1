//! The slots of one tier: which block each slot holds, and which slot is overwritten next.
//!
//! A slot is Free, Writing (a save is in flight) or Stored. A save takes a free slot, or the slot
//! of the block that was used longest ago. A slot that a load reads is not overwritten before the
//! load has ended.
//!
//! The LRU order is a linked list of slots, because an admission uses thousands of blocks between
//! two steps.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
};

use foldhash::HashMap;

use super::{BlockContents, RecoveredBlock};
use crate::event::{BlockHash, CacheChange};

/// Index of a slot in its tier.
pub type SlotIndex = u32;

/// Maximum number of remembered blocks that were not saved. A prompt of a million tokens has 65,536
/// blocks.
const DROPPED_MAX: usize = 65_536;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TierSlotState {
    Free,
    Writing,
    Stored,
}

#[derive(Clone, Copy, Debug)]
struct TierSlot {
    state: TierSlotState,
    /// Key of the block; meaningless when free.
    key: BlockHash,
    /// KV group of the block; meaningless when free.
    group: u8,
    /// Time of the last use. A block that was saved or used after another block of its prompt has
    /// the time of that block. Meaningless when free.
    used: u64,
    /// Neighbours in the LRU order; meaningless when free.
    older: Option<SlotIndex>,
    newer: Option<SlotIndex>,
    /// Loads that read the slot.
    readers: u32,
}

#[derive(Debug, Default)]
pub(super) struct Store {
    slots: Vec<TierSlot>,
    /// Slots for the next saves.
    free: BTreeSet<SlotIndex>,
    /// Slots that are Writing or Stored and not found damaged.
    index: HashMap<BlockHash, SlotIndex>,
    /// Ends of the LRU order, which has all slots that are Writing or Stored. The tail of a prompt
    /// is older than its head.
    oldest: Option<SlotIndex>,
    newest: Option<SlotIndex>,
    /// Number of slots that are Stored.
    stored: u32,
    clock: u64,
    /// Times of blocks that were not saved because only blocks of their prompt could be
    /// overwritten: later blocks of the prompt are not saved either.
    dropped: HashMap<BlockHash, u64>,
    /// Changes of the first KV group since the last [`Self::take_changes`]; a change and its
    /// opposite cancel.
    changes: BTreeMap<BlockHash, CacheChange>,
}

impl Store {
    pub(super) fn new(slot_count: u32) -> Self {
        let mut store = Self::default();
        store.grow(slot_count);
        store
    }

    /// Adds free slots.
    pub(super) fn grow(&mut self, count: u32) {
        let first = self.slots.len() as u32;
        let (state, key) = (TierSlotState::Free, BlockHash(0));
        let slot = TierSlot { state, key, group: 0, used: 0, older: None, newer: None, readers: 0 };
        self.slots.resize(self.slots.len() + count as usize, slot);
        self.free.extend(first..first + count);
    }

    /// Returns the number of slots.
    pub(super) fn slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Returns the number of stored blocks.
    pub(super) fn stored(&self) -> u32 {
        self.stored
    }

    /// Returns the slot of a block that a load can read.
    pub(super) fn find(&self, key: BlockHash) -> Option<SlotIndex> {
        let slot = *self.index.get(&key)?;
        (self.slots[slot as usize].state == TierSlotState::Stored).then_some(slot)
    }

    /// Returns the slot of a block that is stored or whose save is in flight.
    pub(super) fn slot(&self, key: BlockHash) -> Option<SlotIndex> {
        self.index.get(&key).copied()
    }

    /// Returns whether the block is stored or its save is in flight.
    pub(super) fn is_known(&self, key: BlockHash) -> bool {
        self.index.contains_key(&key)
    }

    /// Makes the block the most recently used one. With `parent`, moves the block in the LRU order
    /// so that it is overwritten just before the block in slot `parent`. Returns the block's slot
    /// if the block is known.
    pub(super) fn mark_used(
        &mut self,
        key: BlockHash,
        parent: Option<SlotIndex>,
    ) -> Option<SlotIndex> {
        let index = self.slot(key)?;
        if self.slots[index as usize].state == TierSlotState::Stored {
            let used = match parent {
                Some(parent) => self.slots[parent as usize].used,
                None => self.next_time(),
            };
            self.slots[index as usize].used = used;
            self.unlink(index);
            self.link(index, parent);
        }
        Some(index)
    }

    /// Takes a slot for a save. With `parent`, the block comes after this block and is overwritten
    /// before it. Returns `None` when every slot is being written or read, or when only blocks of
    /// the same prompt could be overwritten.
    pub(super) fn begin_save(
        &mut self,
        contents: &BlockContents,
        parent: Option<BlockHash>,
    ) -> Option<SlotIndex> {
        let &BlockContents { key, group, .. } = contents;
        debug_assert!(!self.is_known(key), "a known block is not saved again");
        let before = parent.and_then(|parent| self.slot(parent));
        let time = match before {
            Some(before) => Some(self.slots[before as usize].used),
            None => parent.and_then(|parent| self.dropped.get(&parent)).copied(),
        };
        let index = match self.free.pop_first() {
            Some(index) => index,
            None => {
                let index = self.oldest_idle()?;
                let oldest = self.slots[index as usize].used;
                if time == Some(oldest) {
                    if self.dropped.len() >= DROPPED_MAX {
                        self.dropped.clear();
                    }
                    self.dropped.insert(key, oldest);
                    return None;
                }
                self.forget(index);
                index
            }
        };
        // A block after one that was not saved is of no use, and is overwritten first.
        let newer = if time.is_some() { before.or(self.oldest) } else { None };
        let used = time.unwrap_or_else(|| self.next_time());
        self.slots[index as usize] = TierSlot {
            state: TierSlotState::Writing,
            key,
            group,
            used,
            older: None,
            newer: None,
            readers: 0,
        };
        self.link(index, newer);
        self.index.insert(key, index);
        Some(index)
    }

    /// Returns the least recently used stored slot that no load reads.
    fn oldest_idle(&self) -> Option<SlotIndex> {
        let mut slots = iter::successors(self.oldest, |&index| self.slots[index as usize].newer);
        slots.find(|&index| {
            let slot = &self.slots[index as usize];
            slot.state == TierSlotState::Stored && slot.readers == 0
        })
    }

    /// Inserts a slot into the LRU order just before the slot `newer`, or as the newest slot.
    fn link(&mut self, index: SlotIndex, newer: Option<SlotIndex>) {
        let older = match newer {
            Some(newer) => self.slots[newer as usize].older,
            None => self.newest,
        };
        self.join(older, Some(index));
        self.join(Some(index), newer);
    }

    /// Removes a slot from the LRU order.
    fn unlink(&mut self, index: SlotIndex) {
        let TierSlot { older, newer, .. } = self.slots[index as usize];
        self.join(older, newer);
    }

    /// Makes two slots neighbours in the LRU order. `None` is an end of the order.
    fn join(&mut self, older: Option<SlotIndex>, newer: Option<SlotIndex>) {
        match older {
            Some(older) => self.slots[older as usize].newer = newer,
            None => self.oldest = newer,
        }
        match newer {
            Some(newer) => self.slots[newer as usize].older = older,
            None => self.newest = older,
        }
    }

    /// Ends a save. A failed save frees its slot.
    pub(super) fn end_save(&mut self, index: SlotIndex, is_saved: bool) {
        let slot = &mut self.slots[index as usize];
        debug_assert_eq!(slot.state, TierSlotState::Writing);
        if is_saved {
            slot.state = TierSlotState::Stored;
            self.stored += 1;
            self.note(index, CacheChange::Added);
        } else {
            self.index.remove(&slot.key);
            slot.state = TierSlotState::Free;
            self.unlink(index);
            self.free.insert(index);
        }
    }

    /// Adds a block that was found in a slot at start. Returns false if the slot or the key is in
    /// use already.
    pub(super) fn recover(&mut self, block: RecoveredBlock) -> bool {
        let RecoveredBlock { slot: index, key, group } = block;
        let is_free =
            self.slots.get(index as usize).is_some_and(|it| it.state == TierSlotState::Free);
        if !is_free || self.is_known(key) {
            return false;
        }
        self.free.remove(&index);
        let used = self.next_time();
        let slot = &mut self.slots[index as usize];
        (slot.state, slot.key, slot.group) = (TierSlotState::Stored, key, group);
        slot.used = used;
        self.index.insert(key, index);
        self.link(index, None);
        self.stored += 1;
        self.note(index, CacheChange::Added);
        true
    }

    /// Begins a load of a stored block, or a save that copies it. It keeps the block's place in the
    /// LRU order.
    pub(super) fn begin_load(&mut self, key: BlockHash) -> Option<SlotIndex> {
        let index = self.find(key)?;
        self.begin_load_of(index);
        Some(index)
    }

    /// Begins a load of a slot that [`find`](Self::find) has just returned.
    pub(super) fn begin_load_of(&mut self, index: SlotIndex) {
        debug_assert_eq!(self.slots[index as usize].state, TierSlotState::Stored);
        self.slots[index as usize].readers += 1;
    }

    /// Ends a load of a slot. A damaged block is forgotten.
    pub(super) fn end_load(&mut self, index: SlotIndex, is_intact: bool) {
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.readers > 0);
        slot.readers -= 1;
        let key = slot.key;
        if !is_intact && self.index.get(&key) == Some(&index) {
            self.forget(index);
            self.slots[index as usize].state = TierSlotState::Free;
        }
        let slot = &self.slots[index as usize];
        if slot.state == TierSlotState::Free && slot.readers == 0 {
            self.free.insert(index);
        }
    }

    /// Removes a stored block from the index.
    fn forget(&mut self, index: SlotIndex) {
        let key = self.slots[index as usize].key;
        self.index.remove(&key);
        self.unlink(index);
        self.stored -= 1;
        self.note(index, CacheChange::Evicted);
    }

    /// Records a change of a slot's block. Routers follow the first KV group.
    fn note(&mut self, index: SlotIndex, change: fn(BlockHash) -> CacheChange) {
        let TierSlot { key, group, .. } = self.slots[index as usize];
        if group > 0 {
            return;
        }
        let change = change(key);
        match self.changes.get(&key) {
            Some(&noted) if noted != change => {
                self.changes.remove(&key);
            }
            _ => {
                self.changes.insert(key, change);
            }
        }
    }

    /// Takes the changes of the first KV group's stored blocks since the last call.
    pub(super) fn take_changes(&mut self) -> Vec<CacheChange> {
        std::mem::take(&mut self.changes).into_values().collect()
    }

    /// Returns the keys of the `most` stored blocks of the first KV group that were used last.
    pub(super) fn keys(&self, most: usize) -> Vec<BlockHash> {
        let newest = iter::successors(self.newest, |&index| self.slots[index as usize].older);
        let slots = newest.map(|index| &self.slots[index as usize]);
        let stored = slots.filter(|slot| slot.state == TierSlotState::Stored && slot.group == 0);
        stored.take(most).map(|slot| slot.key).collect()
    }

    fn next_time(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Panics when slots, index and lists disagree.
    pub(super) fn check(&self) {
        let count = |state| self.slots.iter().filter(|slot| slot.state == state).count();
        let reading = |slot: &&TierSlot| slot.state == TierSlotState::Free && slot.readers > 0;
        let kept = self.slots.iter().filter(reading).count();
        assert_eq!(self.free.len() + kept, count(TierSlotState::Free));
        assert_eq!(self.stored as usize, count(TierSlotState::Stored));
        assert_eq!(self.index.len(), count(TierSlotState::Stored) + count(TierSlotState::Writing));
        for (key, &index) in &self.index {
            assert_eq!(self.slots[index as usize].key, *key);
        }
        let mut ordered = 0;
        let (mut older, mut next) = (None, self.oldest);
        while let Some(index) = next {
            let slot = &self.slots[index as usize];
            assert!(slot.state != TierSlotState::Free && slot.older == older);
            (older, next) = (Some(index), slot.newer);
            ordered += 1;
        }
        assert_eq!((ordered, self.newest), (self.index.len(), older));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Store {
        fn is_stored(&self, key: BlockHash) -> bool {
            self.find(key).is_some()
        }
    }

    /// Takes a slot for the block `key` of the first group, after the block `parent`.
    fn begin_save(store: &mut Store, key: u128, parent: Option<u128>) -> Option<SlotIndex> {
        let (parent, key) = (parent.map(BlockHash), BlockHash(key));
        let tokens = [0; kernels::BLOCK_TOKENS];
        let contents = BlockContents { key, parent: BlockHash(0), tokens, group: 0 };
        store.begin_save(&contents, parent)
    }

    fn save(store: &mut Store, key: u128) -> SlotIndex {
        let slot = begin_save(store, key, None).expect("a slot is idle");
        assert!(!store.is_stored(BlockHash(key)), "a block is not loaded before it is saved");
        store.end_save(slot, true);
        store.check();
        slot
    }

    #[test]
    fn tail_of_a_saved_prompt_is_overwritten_before_its_head() {
        let mut store = Store::new(5);
        let mut save = |key, parent| {
            let slot = begin_save(&mut store, key, Some(parent));
            slot.into_iter().for_each(|slot| store.end_save(slot, true));
            store.check();
            store.keys(9)
        };
        // The blocks of two prompts are saved in turn, each after the block before.
        let prompts = [(11, 10), (21, 20), (12, 11), (22, 21), (13, 12)];
        let saved = prompts.map(|(key, parent)| save(key, parent));
        assert_eq!(saved[4], [21, 22, 11, 12, 13].map(BlockHash));
        // A prompt that is longer than the tier leaves its head.
        let saved: Vec<_> = (31..40).map(|key| save(key, key - 1)).collect();
        assert_eq!(saved[8], [31, 32, 33, 34, 35].map(BlockHash));
        store.mark_used(BlockHash(33), None);
        assert_eq!(store.keys(1), [BlockHash(33)]);
        store.check();
    }

    #[test]
    fn save_overwrites_the_block_that_was_used_longest_ago() {
        let mut store = Store::new(2);
        let first = save(&mut store, 1);
        save(&mut store, 2);
        store.mark_used(BlockHash(1), None);
        save(&mut store, 3);
        assert!(store.is_stored(BlockHash(1)) && !store.is_stored(BlockHash(2)));
        let read = store.begin_load(BlockHash(1)).unwrap();
        assert_eq!(read, first);
        save(&mut store, 4);
        let read_too = store.begin_load(BlockHash(4)).unwrap();
        assert_eq!(begin_save(&mut store, 5, None), None, "loads read both slots");
        store.end_load(read, true);
        store.end_load(read_too, true);
        assert_eq!(save(&mut store, 5), first);
    }

    #[test]
    fn returning_conversation_keeps_its_prefix_in_a_full_tier() {
        let mut store = Store::new(800);
        let save = |store: &mut Store, key: u128| {
            let slot = begin_save(store, key, Some(key - 1)).expect("a slot is idle");
            store.end_save(slot, true);
        };
        // Eight conversations of 100 blocks fill the tier. The least recently used one returns.
        let keys =
            (1..=8).flat_map(|conversation| (1..=100).map(move |it| 1000 * conversation + it));
        keys.for_each(|key| save(&mut store, key));
        let mut parent = None;
        (1001..=1100).for_each(|key| parent = store.mark_used(BlockHash(key), parent));
        (1101..=1120).for_each(|key| save(&mut store, key));
        store.check();
        let is_stored = |key: u128| store.is_stored(BlockHash(key));
        let overwritten: Vec<u128> = (1001..=1120).filter(|&key| !is_stored(key)).collect();
        assert!(overwritten.is_empty(), "{overwritten:?} were used last");
        // The tail of the next conversation is overwritten instead.
        assert!(is_stored(2080) && !is_stored(2081));
    }

    #[test]
    fn saves_overwrite_in_the_order_of_use() {
        let mut store = Store::new(40);
        let mut used: Vec<u128> = (1..=40).collect();
        used.iter().for_each(|&key| _ = save(&mut store, key));
        let mut number: u64 = 1;
        for key in 100..1100 {
            for _ in 0..key % 7 {
                number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let touched = used.remove((number >> 33) as usize % used.len());
                store.mark_used(BlockHash(touched), None);
                used.push(touched);
            }
            save(&mut store, key);
            let overwritten = used.remove(0);
            used.push(key);
            assert!(!store.is_stored(BlockHash(overwritten)), "{overwritten} was used first");
            let newest: Vec<_> = used.iter().rev().map(|&key| BlockHash(key)).collect();
            assert_eq!(store.keys(40), newest);
        }
    }

    #[test]
    fn failed_save_frees_its_slot() {
        let mut store = Store::new(1);
        let slot = begin_save(&mut store, 1, None).unwrap();
        assert!(store.is_known(BlockHash(1)) && store.begin_load(BlockHash(1)).is_none());
        store.end_save(slot, false);
        assert!(!store.is_known(BlockHash(1)));
        save(&mut store, 2);
    }

    #[test]
    fn damaged_block_is_forgotten_and_its_slot_is_free_after_the_last_load() {
        let mut store = Store::new(1);
        let slot = save(&mut store, 1);
        assert_eq!(store.begin_load(BlockHash(1)), Some(slot));
        assert_eq!(store.begin_load(BlockHash(1)), Some(slot));
        store.end_load(slot, false);
        store.check();
        assert!(!store.is_known(BlockHash(1)));
        let other = begin_save(&mut store, 2, None);
        assert_eq!(other, None, "the other load still reads the slot");
        store.end_load(slot, false);
        save(&mut store, 2);
    }

    #[test]
    fn recovered_block_is_loaded_and_a_used_slot_or_key_is_not_recovered() {
        let mut store = Store::new(3);
        let mut recover =
            |slot, key| store.recover(RecoveredBlock { slot, key: BlockHash(key), group: 0 });
        assert!(recover(2, 7));
        assert!(!recover(2, 8) && !recover(1, 7));
        assert!(!recover(3, 9), "the slot does not exist");
        store.check();
        assert_eq!(store.begin_load(BlockHash(7)), Some(2));
        assert_eq!(store.stored(), 1);
    }

    #[test]
    fn keys_are_those_of_the_blocks_that_were_used_last() {
        let mut store = Store::new(3);
        (1..=3).for_each(|key| _ = save(&mut store, key));
        store.mark_used(BlockHash(1), None);
        assert_eq!(store.keys(2), [BlockHash(1), BlockHash(3)]);
    }

    #[test]
    fn changes_tell_which_blocks_came_and_went() {
        let mut store = Store::new(1);
        save(&mut store, 1);
        assert_eq!(store.keys(9), [BlockHash(1)]);
        assert_eq!(store.take_changes(), [CacheChange::Added(BlockHash(1))]);
        save(&mut store, 2);
        save(&mut store, 3);
        let changes = [CacheChange::Evicted(BlockHash(1)), CacheChange::Added(BlockHash(3))];
        assert_eq!(store.take_changes(), changes);
        assert_eq!(store.take_changes(), []);
    }

    #[test]
    fn routers_learn_the_blocks_of_the_first_group_only() {
        let mut store = Store::new(2);
        for group in [0, 1] {
            let key = BlockHash(1 + u128::from(group));
            store.recover(RecoveredBlock { slot: group.into(), key, group });
        }
        assert_eq!(store.stored(), 2);
        assert_eq!(store.keys(9), [BlockHash(1)]);
        assert_eq!(store.take_changes(), [CacheChange::Added(BlockHash(1))]);
        // The slots of both blocks are overwritten.
        (3..=4).for_each(|key| _ = save(&mut store, key));
        let changes = [
            CacheChange::Evicted(BlockHash(1)),
            CacheChange::Added(BlockHash(3)),
            CacheChange::Added(BlockHash(4)),
        ];
        assert_eq!(store.take_changes(), changes);
    }
}
