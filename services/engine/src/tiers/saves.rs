//! Saves to the tiers: the queue of admitted blocks, and the saves in flight until they end or are
//! cancelled.

use kernels::BlockId;

use super::{BlockContents, JobId, SlotIndex, Tier, TierState, TierStores};
use crate::{event::BlockHash, plan::StepId};

/// Maximum number of queued saves of each tier. A prefill step of 8,192 tokens has 512 blocks.
const QUEUED_MAX: usize = 2048;
/// Maximum number of saves to host memory in flight. The shell copies them in batches. An admission
/// or a row that needs a block waits for the batches that have begun, and cancels the other saves.
pub const HOST_SAVES_MAX: usize = 32;
/// Maximum number of blocks that saves to the disk pin at a time. They are copied one after
/// another.
pub const COPYING_MAX: usize = 4;
/// Maximum number of saves to the disk in flight. The shell has a buffer for each.
pub const SAVES_MAX: usize = 16;

/// Source of a save. The source keeps its contents until
/// [`TierEvent::Copied`](super::TierEvent::Copied) or
/// [`TierEvent::SaveFailed`](super::TierEvent::SaveFailed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveSource {
    /// A block of the arena. The block is not evicted before the event.
    Block(BlockId),
    /// A slot of the host tier. The slot is not overwritten before the event.
    HostSlot(SlotIndex),
}

/// Copy of one block into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveJob {
    pub job: JobId,
    pub tier: Tier,
    pub slot: SlotIndex,
    pub source: SaveSource,
    pub contents: BlockContents,
}

/// A block that is worth a save.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfferedBlock {
    pub key: BlockHash,
    /// Whether the block is the first one of a window. Then the block before it is of no use, so
    /// the save does not take the LRU time of that block.
    pub begins_window: bool,
}

/// A save in flight.
#[derive(Debug)]
pub(super) struct SaveInFlight {
    tier: Tier,
    slot: SlotIndex,
    source: SaveSource,
    contents: BlockContents,
    begins_window: bool,
    is_copied: bool,
    /// Whether the shell was asked to fail the save if its copy has not begun.
    is_cancelled: bool,
}

/// Reason why a queued save does not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSource {
    /// The prefix cache has lost the block. The save is cancelled.
    Evicted,
    /// A sequence waits for blocks, and a further copy would delay it. The save stays queued.
    Awaited,
}

impl Tier {
    /// Returns the bounds on saves in flight, and on saves in flight that still read their source.
    fn saves_max(self) -> (usize, usize) {
        match self {
            Self::Host => (HOST_SAVES_MAX, HOST_SAVES_MAX),
            Self::Disk => (SAVES_MAX, COPYING_MAX),
        }
    }
}

impl TierStores {
    /// Records the launch of a step of a node with speculative decoding. The step writes KV from
    /// the last verified token of each sequence on, maybe into a block that a step in flight
    /// completes.
    pub(crate) fn step_launched(&mut self, step: StepId) {
        self.last_step = Some(step);
    }

    /// Queues the saves that waited until this step was collected.
    pub(crate) fn step_collected(&mut self, step: StepId) {
        self.last_step = self.last_step.filter(|&last| last > step);
        while let Some((_, block)) = self.unverified.pop_front_if(|(last, _)| *last <= step) {
            self.queue_first(block);
        }
    }

    /// Queues the save of a block of the prefix cache, once no step in flight may write the block.
    pub(super) fn offer(&mut self, block: OfferedBlock) {
        let Some(step) = self.last_step else { return self.queue_first(block) };
        let first = self.tiers.iter_mut().flatten().find(|it| it.store.slots() > 0);
        let Some(first) = first.filter(|it| !it.store.is_known(block.key)) else { return };
        if self.unverified.len() < QUEUED_MAX {
            self.unverified.push_back((step, block));
        } else {
            first.stats.dropped += 1;
        }
    }

    /// Queues the save of a block to the fastest tier that has slots.
    fn queue_first(&mut self, block: OfferedBlock) {
        if let Some(first) = self.first_tier() {
            self.queue(first, block);
        }
    }

    fn queue(&mut self, tier: Tier, block: OfferedBlock) {
        let now = self.now;
        let Some(tier) = &mut self.tiers[tier.index()] else { return };
        if tier.store.is_known(block.key) {
            return;
        }
        if tier.queued.len() >= QUEUED_MAX {
            tier.stats.dropped += 1;
            return;
        }
        tier.queued.push_back((now, block));
    }

    /// Starts the next save. `resident` looks a block up in the prefix cache. The caller keeps
    /// the block until [`end_copy`](Self::end_copy) returns it.
    pub(crate) fn next_save(
        &mut self,
        resident: impl Fn(BlockHash) -> Result<(BlockId, BlockContents), NoSource>,
    ) -> Option<SaveJob> {
        Tier::ALL.into_iter().find_map(|tier| self.next_save_to(tier, &resident))
    }

    fn next_save_to(
        &mut self,
        tier: Tier,
        resident: &impl Fn(BlockHash) -> Result<(BlockId, BlockContents), NoSource>,
    ) -> Option<SaveJob> {
        loop {
            let (saves_max, copying_max) = tier.saves_max();
            let state = self.tiers[tier.index()].as_mut()?;
            if !state.is_recovered || state.saves >= saves_max || state.copying >= copying_max {
                return None;
            }
            let (since, block) = state.queued.pop_front()?;
            let OfferedBlock { key, begins_window } = block;
            // One save at a time reads a block. A save to host memory queues the block for the disk
            // when it ends.
            if state.store.is_known(key) || self.is_copying(key) {
                continue;
            }
            let (source, contents) = match self.source(tier, key, resident) {
                Ok(source) => source,
                Err(NoSource::Evicted) => {
                    self.state(tier).stats.cancelled += 1;
                    continue;
                }
                Err(NoSource::Awaited) => {
                    self.state(tier).queued.push_front((since, block));
                    return None;
                }
            };
            let parent = (!begins_window).then_some(contents.parent);
            let Some(slot) = self.state(tier).store.begin_save(&contents, parent) else {
                self.state(tier).stats.dropped += 1;
                self.release(source);
                continue;
            };
            let state = self.state(tier);
            state.saves += 1;
            state.copying += 1;
            let job = self.next_job();
            let (is_copied, is_cancelled) = (false, false);
            let save = SaveInFlight {
                tier,
                slot,
                source,
                contents,
                begins_window,
                is_copied,
                is_cancelled,
            };
            self.saves.insert(job, save);
            return Some(SaveJob { job, tier, slot, source, contents });
        }
    }

    /// Returns whether a save in flight still reads the block.
    fn is_copying(&self, key: BlockHash) -> bool {
        self.saves.values().any(|save| !save.is_copied && save.contents.key == key)
    }

    /// Returns where a save to `tier` can copy the block from.
    fn source(
        &mut self,
        tier: Tier,
        key: BlockHash,
        resident: &impl Fn(BlockHash) -> Result<(BlockId, BlockContents), NoSource>,
    ) -> Result<(SaveSource, BlockContents), NoSource> {
        if tier == Tier::Disk
            && let Some(host) = &mut self.tiers[Tier::Host.index()]
            && let Some(slot) = host.store.begin_load(key)
        {
            return Ok((SaveSource::HostSlot(slot), self.host_contents[&slot]));
        }
        let (block, contents) = resident(key)?;
        Ok((SaveSource::Block(block), contents))
    }

    /// Releases the source of a save. Returns the block of the arena that it was.
    fn release(&mut self, source: SaveSource) -> Option<BlockId> {
        match source {
            SaveSource::Block(block) => Some(block),
            SaveSource::HostSlot(slot) => {
                self.state(Tier::Host).store.end_load(slot, true);
                None
            }
        }
    }

    /// Asks the shell to cancel the saves in flight whose copies have not begun, if one of them
    /// keeps a block that `is_awaited`. Returns the newest job, for
    /// [`Action::CancelSaves`](crate::event::Action::CancelSaves), or `None` if no such save is
    /// left, or the shell was asked before.
    pub(crate) fn cancel_saves(&mut self, is_awaited: impl Fn(BlockId) -> bool) -> Option<JobId> {
        let copying = self.saves.values().filter(|save| !save.is_copied && !save.is_cancelled);
        let keeps =
            |source: SaveSource| matches!(source, SaveSource::Block(block) if is_awaited(block));
        if !copying.map(|save| save.source).any(keeps) {
            return None;
        }
        self.saves.values_mut().for_each(|save| save.is_cancelled = true);
        Some(JobId(self.next_job))
    }

    /// Handles the end of a save's copy. Returns the block that the save no longer reads.
    pub(crate) fn end_copy(&mut self, job: JobId) -> Option<BlockId> {
        let save = self.saves.get_mut(&job).filter(|save| !save.is_copied)?;
        save.is_copied = true;
        let (tier, source) = (save.tier, save.source);
        self.state(tier).copying -= 1;
        self.release(source)
    }

    /// Handles the end of a save. Returns the block that the save no longer reads, if its copy had
    /// not ended.
    pub(crate) fn end_save(&mut self, job: JobId, is_saved: bool) -> Option<BlockId> {
        let has_begun = self.saves.get(&job).is_some_and(|it| it.is_copied || !it.is_cancelled);
        let block = self.end_copy(job);
        let save = self.saves.remove(&job)?;
        let now = self.now;
        let offered = OfferedBlock { key: save.contents.key, begins_window: save.begins_window };
        let state = self.state(save.tier);
        // Keeps the queue in the order of its times.
        let since = state.queued.front().map_or(now, |&(since, _)| since);
        state.saves -= 1;
        state.store.end_save(save.slot, is_saved);
        match is_saved {
            true => state.stats.saved += 1,
            false if has_begun => state.stats.failed += 1,
            // The block is saved later, unless it is evicted before.
            false => state.queued.push_front((since, offered)),
        }
        if is_saved && save.tier == Tier::Host {
            self.host_contents.insert(save.slot, save.contents);
            self.queue(Tier::Disk, offered);
        }
        block
    }

    /// Returns the blocks that saves read.
    pub(crate) fn copied_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.saves.values().filter(|save| !save.is_copied).filter_map(|save| match save.source {
            SaveSource::Block(block) => Some(block),
            SaveSource::HostSlot(_) => None,
        })
    }

    /// Panics when the saves in flight and the counts of the tier disagree.
    pub(super) fn check_saves(&self, tier: Tier, state: &TierState) {
        let saves = self.saves.values().filter(|save| save.tier == tier);
        assert_eq!(state.saves, saves.clone().count());
        assert_eq!(state.copying, saves.filter(|save| !save.is_copied).count());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kernels::BLOCK_TOKENS;

    use super::*;
    use crate::tiers::{RecoveredBlock, testing::with_disk};

    /// Returns a resident block for each key.
    fn resident(key: BlockHash) -> Result<(BlockId, BlockContents), NoSource> {
        let (parent, tokens) = (BlockHash(0), [0; BLOCK_TOKENS]);
        Ok((BlockId(0), BlockContents { key, parent, tokens, group: 0 }))
    }

    fn offer(tiers: &mut TierStores, key: u128) {
        tiers.offer(OfferedBlock { key: BlockHash(key), begins_window: false });
    }

    fn dropped(tiers: &TierStores) -> u64 {
        tiers.stats(Tier::Disk).expect("the disk is on").dropped
    }

    #[test]
    fn save_is_dropped_and_counted_when_the_queue_is_full() {
        let mut tiers = with_disk(10);
        (0..QUEUED_MAX as u128).for_each(|key| offer(&mut tiers, key));
        assert_eq!(dropped(&tiers), 0);
        offer(&mut tiers, u128::MAX);
        assert_eq!(dropped(&tiers), 1);
    }

    #[test]
    fn save_is_dropped_and_counted_when_no_slot_is_idle() {
        let mut tiers = with_disk(1);
        tiers.recover(Tier::Disk, &[], true);
        (1..=2).for_each(|key| offer(&mut tiers, key));
        assert!(tiers.next_save(resident).is_some());
        assert_eq!(tiers.next_save(resident), None, "the only slot is being written");
        assert_eq!(dropped(&tiers), 1);
    }

    #[test]
    fn no_save_of_a_block_that_a_step_may_write_starts_when_the_queue_is_full() {
        let mut tiers = with_disk(10);
        let stored = RecoveredBlock { slot: 0, key: BlockHash(0), group: 0 };
        tiers.recover(Tier::Disk, &[stored], true);
        tiers.step_launched(1);
        (1..=QUEUED_MAX as u128).for_each(|key| offer(&mut tiers, key));
        offer(&mut tiers, 0);
        assert_eq!(dropped(&tiers), 0);
        offer(&mut tiers, u128::MAX);
        assert_eq!(dropped(&tiers), 1);
        assert_eq!(tiers.next_save(resident), None, "the step is in flight");
        tiers.step_collected(1);
        assert!(tiers.next_save(resident).is_some());
    }

    #[test]
    fn cancelled_save_does_not_lower_the_age_of_the_queue() {
        let mut tiers = with_disk(10);
        tiers.recover(Tier::Disk, &[], true);
        (1..=2).for_each(|key| offer(&mut tiers, key));
        let save = tiers.next_save(resident).expect("the queue has two saves");
        assert_eq!(tiers.cancel_saves(|_| true), Some(save.job));
        tiers.set_now(tiers.now() + Duration::from_secs(3));
        tiers.end_save(save.job, false);
        assert_eq!(tiers.stats(Tier::Disk).unwrap().queue_age, Duration::from_secs(3));
    }
}
