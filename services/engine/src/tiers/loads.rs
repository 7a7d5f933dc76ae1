//! Loads from the tiers: which blocks are loaded instead of computed, and the loads in flight until
//! they end.

use std::time::{Duration, Instant};

use kernels::BlockId;

use super::{
    BlockContents, JobId, SlotIndex, TIERS, Tier, TierStores,
    rates::{choose, measure},
};
use crate::event::{BlockHash, SequenceId};

/// Maximum number of loads in flight. Further sequences compute their KV.
pub const LOADS_MAX: usize = 64;
/// A load is late once it has taken twice its predicted time, plus this part (1/n) of the time-out
/// of loads.
const LATE_PART: u32 = 8;

/// One block of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadBlock {
    pub tier: Tier,
    pub slot: SlotIndex,
    /// The reserved block to write.
    pub block: BlockId,
    pub contents: BlockContents,
}

/// Copies of slots into reserved blocks of one sequence, in the order of its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadJob {
    pub job: JobId,
    pub id: SequenceId,
    pub blocks: Vec<LoadBlock>,
}

/// A load in flight. It may outlive its sequence.
#[derive(Debug)]
pub(crate) struct LoadInFlight {
    pub id: SequenceId,
    /// Time from which the load is late. While a load is late, its slowest tier starts no other
    /// load.
    late_at: Instant,
    /// Reserved blocks of the sequence: those to load first, then the rest.
    pub blocks: Vec<BlockId>,
    slots: Vec<(Tier, SlotIndex)>,
}

/// Result of a load for its sequence.
#[derive(Debug)]
pub(crate) struct FinishedLoad {
    pub load: LoadInFlight,
    /// Leading blocks that are written.
    pub intact: usize,
}

impl TierStores {
    /// Returns the predicted time to load or compute blocks, whichever is faster; 0 before the
    /// first measured prefill.
    pub(crate) fn restore_time(&self, blocks: usize) -> Duration {
        let compute = self.prefill.time(blocks).unwrap_or_default();
        let block = self.first_tier().and_then(|tier| self.rates[tier.index()].block_time());
        block.map_or(compute, |block| compute.min(block * blocks as u32))
    }

    /// Returns when a load that starts now times out. Its sequence waits for at most `most`.
    pub(crate) fn load_deadline(&self, most: Duration) -> Instant {
        self.now + self.config.load_timeout.min(most)
    }

    pub(crate) fn add_prefill(&mut self, tokens: u32, busy: Duration) {
        self.prefill.add(tokens, busy);
    }

    /// Returns the slots of the prefix of `keys` to load. The load is predicted to end within half
    /// of its time-out and of `most`.
    pub(crate) fn choose_load(
        &mut self,
        keys: &[BlockHash],
        most: Duration,
    ) -> Vec<(Tier, SlotIndex)> {
        if self.loads.len() >= LOADS_MAX {
            return Vec::new();
        }
        let mut slots: Vec<_> = keys.iter().map_while(|&key| self.find(key)).collect();
        let run: Vec<usize> = slots.iter().map(|(tier, _)| tier.index()).collect();
        // A late load keeps its blocks until it ends. Further loads of a tier that does not answer
        // would take the rest.
        let late = self.late_tiers();
        let usable = run.iter().take_while(|&&tier| !late[tier]).count();
        let most = self.config.load_timeout.min(most) / 2;
        let choice = choose(self.now, &run[..usable], &self.rates, &self.prefill, most);
        if choice.is_refused || usable < run.len() {
            for &tier in &run[choice.blocks..] {
                let state = self.tiers[tier].as_mut().expect("the tier holds the block");
                state.stats.refused += 1;
            }
        }
        slots.truncate(choice.blocks);
        slots
    }

    /// Returns the fastest tier that holds the block, and its slot.
    fn find(&self, key: BlockHash) -> Option<(Tier, SlotIndex)> {
        let slot = |tier: Tier| Some((tier, self.tiers[tier.index()].as_ref()?.store.find(key)?));
        Tier::ALL.into_iter().find_map(slot)
    }

    /// Returns which tiers have a load in flight that is late.
    fn late_tiers(&self) -> [bool; TIERS] {
        let mut late = [false; TIERS];
        for load in self.loads.values().filter(|load| self.now >= load.late_at) {
            // The load waits for its slowest tier.
            if let Some(tier) = load.slots.iter().map(|&(tier, _)| tier).max() {
                late[tier.index()] = true;
            }
        }
        late
    }

    /// Starts a load of slots that [`choose_load`](Self::choose_load) has just chosen, with these
    /// `contents`. `reserved` begins with the blocks to write.
    pub(crate) fn start_load(
        &mut self,
        id: SequenceId,
        slots: Vec<(Tier, SlotIndex)>,
        contents: impl Iterator<Item = BlockContents>,
        reserved: Vec<BlockId>,
    ) -> LoadJob {
        let job = self.next_job();
        let mut blocks = Vec::with_capacity(slots.len());
        for ((&(tier, slot), contents), &block) in slots.iter().zip(contents).zip(&reserved) {
            self.state(tier).store.begin_load_of(slot);
            self.rates[tier.index()].pending += 1;
            blocks.push(LoadBlock { tier, slot, block, contents });
        }
        let times = blocks.iter().map(|block| self.rates[block.tier.index()].time(0));
        let predicted = times.max().unwrap_or_default();
        let late_at = self.now + 2 * predicted + self.config.load_timeout / LATE_PART;
        self.loads.insert(job, LoadInFlight { id, late_at, blocks: reserved, slots });
        LoadJob { job, id, blocks }
    }

    /// Handles the end of a load.
    pub(crate) fn end_load(
        &mut self,
        job: JobId,
        intact: u32,
        took: Duration,
    ) -> Option<FinishedLoad> {
        let load = self.loads.remove(&job)?;
        let intact = load.slots.len().min(intact as usize);
        let mut read = [0; TIERS];
        for (index, &(tier, slot)) in load.slots.iter().enumerate() {
            self.rates[tier.index()].pending -= 1;
            let Some(state) = &mut self.tiers[tier.index()] else { continue };
            state.store.end_load(slot, index != intact);
            if index < intact {
                state.stats.loaded += 1;
                read[tier.index()] += 1;
            } else if index == intact {
                state.stats.damaged += 1;
            }
        }
        // Without an intact block the load measures only its first block, and only an increase
        // counts.
        if intact == 0
            && let Some(&(tier, _)) = load.slots.first()
            && took > self.rates[tier.index()].block_time().unwrap_or_default()
        {
            read[tier.index()] = 1;
        }
        measure(self.now, &mut self.rates, read, took);
        Some(FinishedLoad { load, intact })
    }

    /// Counts the `intact` blocks of a load, which its sequence takes.
    pub(crate) fn count_hits(&mut self, load: &LoadInFlight, intact: usize) {
        for &(tier, _) in &load.slots[..intact] {
            self.state(tier).stats.hits += 1;
        }
    }

    /// Returns whether a load of this sequence is in flight.
    pub(crate) fn is_loading(&self, id: SequenceId) -> bool {
        self.loads.values().any(|load| load.id == id)
    }

    /// Returns the reserved blocks of loads, with their owners.
    pub(crate) fn reserved_blocks(&self) -> impl Iterator<Item = (SequenceId, BlockId)> {
        self.loads.values().flat_map(|load| load.blocks.iter().map(|&block| (load.id, block)))
    }

    /// Panics when the loads in flight and the pending blocks of the tier disagree.
    pub(super) fn check_loads(&self, tier: Tier) {
        let slots = self.loads.values().flat_map(|load| &load.slots);
        let pending = slots.filter(|(of, _)| *of == tier).count();
        assert_eq!(self.rates[tier.index()].pending as usize, pending);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::{TierConfig, testing::with_disk};

    #[test]
    fn time_to_restore_is_that_of_the_fastest_tier_that_has_slots() {
        let config = TierConfig { host: true, ..with_disk(10).config };
        let mut tiers = TierStores::new(config, 4, Instant::now());
        tiers.add_prefill(1000, Duration::from_secs(1));
        tiers.rates[Tier::Disk.index()].add(tiers.now, 10, Duration::from_millis(10));
        assert_eq!(tiers.restore_time(10), Duration::from_millis(10), "from the disk");
        tiers.grow(Tier::Host, 1);
        assert_eq!(tiers.restore_time(10), Duration::from_millis(160), "no load is measured");
    }
}
