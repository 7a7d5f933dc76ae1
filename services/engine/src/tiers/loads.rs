//! Loads from the tiers: which blocks are loaded instead of computed, and the loads in flight until
//! they end.

use std::time::{Duration, Instant};

use kernels::{BLOCK_TOKENS, BlockId};

use super::{
    BlockContents, JobId, SlotIndex, TIERS, Tier, TierStores,
    rates::{choose, load_time, measure, probe},
};
use crate::event::{BlockHash, SequenceId};

/// Maximum number of loads in flight. Further sequences compute their KV.
pub const LOADS_MAX: usize = 64;
/// Maximum number of ends of a load that are compared if KV groups have windows, because each
/// comparison looks up all blocks of the load's windows.
const ENDS_MAX: usize = 16;
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

/// Copies of slots into reserved blocks of one sequence, in the order of its block table.
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
    /// Reserved blocks of the sequence, those to load among them.
    pub blocks: Vec<BlockId>,
    slots: Vec<(Tier, SlotIndex)>,
}

/// Blocks to load.
#[derive(Debug, Default)]
pub(crate) struct ChosenLoad {
    /// Number of blocks of each KV group between the resident ones and the end of the load; 0 for
    /// no load.
    pub count: usize,
    /// Slots of these blocks, in the order of the block table, without those behind windows. A load
    /// that only measures its tier has the first ones.
    pub slots: Vec<(Tier, SlotIndex)>,
}

/// Result of a load for its sequence.
#[derive(Debug)]
pub(crate) struct FinishedLoad {
    pub load: LoadInFlight,
    /// Leading blocks of the load that are written.
    pub intact: usize,
}

impl TierStores {
    /// Returns the predicted time to compute `covered` blocks of each KV group, or to load the
    /// `blocks` of them that are not behind windows, whichever is faster; 0 before the first
    /// measured prefill.
    pub(crate) fn restore_time(&self, covered: usize, blocks: usize) -> Duration {
        let compute = self.prefill.time(covered).unwrap_or_default();
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

    /// Chooses the blocks to load for a sequence whose first `resident` blocks of each KV group are
    /// in the prefix cache. `hashes`: those of its next blocks. The load is predicted to end within
    /// half of its time-out and of `most`.
    pub(crate) fn choose_load(
        &mut self,
        hashes: &[BlockHash],
        resident: usize,
        most: Duration,
    ) -> ChosenLoad {
        if self.loads.len() >= LOADS_MAX {
            return ChosenLoad::default();
        }
        let most = self.config.load_timeout.min(most) / 2;
        // A late load keeps its blocks until it ends. Further loads of a tier that does not answer
        // would take the rest.
        let late = self.late_tiers();
        let mut slots = self.find_whole(hashes);
        if self.groups.has_windows() {
            return self.choose_window(hashes, resident, slots, late, most);
        }
        let usable = slots.iter().take_while(|(tier, _)| !late[tier.index()]).count();
        let run = tiers_of(&slots[..usable]);
        let choice = choose(self.now, &run, &self.rates, &self.prefill, most);
        if choice.is_refused || usable < slots.len() {
            self.count_refused(&slots[choice.blocks..]);
        }
        slots.truncate(choice.blocks);
        ChosenLoad { count: slots.len(), slots }
    }

    /// Chooses the longest load that saves time and whose windows are all in the tiers, among the
    /// last [`ENDS_MAX`] such ends. If a load would take too long, the next end is as much earlier.
    /// `whole`: slots of the groups without a window.
    fn choose_window(
        &mut self,
        hashes: &[BlockHash],
        resident: usize,
        whole: Vec<(Tier, SlotIndex)>,
        late: [bool; TIERS],
        most: Duration,
    ) -> ChosenLoad {
        let groups = self.groups_without_window();
        let usable = whole.iter().take_while(|(tier, _)| !late[tier.index()]).count();
        let (mut count, ends_max) = match usable.checked_div(groups) {
            Some(count) => (count, ENDS_MAX),
            // Every group has a window: a load with an earlier end is not shorter.
            None => (hashes.len(), 1),
        };
        self.count_refused(&whole[count * groups..]);
        let mut longest = ChosenLoad::default();
        let mut refused = 0;
        while count > 0 && refused < ends_max {
            match self.slots_before(hashes, resident, count, (&whole, late)) {
                Err(missing) => count = missing,
                Ok(slots) => {
                    let load = load_time(&tiers_of(&slots), &self.rates);
                    // Before the first prefill, assume that every load saves time.
                    let compute = self.prefill.time(count);
                    if load <= most && compute.is_none_or(|compute| load < compute) {
                        self.count_refused(&longest.slots[slots.len().min(longest.slots.len())..]);
                        return ChosenLoad { count, slots };
                    }
                    if refused == 0 {
                        longest = ChosenLoad { count, slots };
                    }
                    refused += 1;
                    let part = |load| (count as u128 * most.as_nanos() / load) as usize;
                    let in_time = if load > most { part(load.as_nanos()) } else { count };
                    count = in_time.min(count - 1);
                }
            }
        }
        let blocks = probe(self.now, &tiers_of(&longest.slots), &self.rates);
        self.count_refused(&longest.slots[blocks..]);
        longest.slots.truncate(blocks);
        if blocks == 0 { ChosenLoad::default() } else { longest }
    }

    /// Returns the slots of the blocks to which the token after the first `count` of `hashes`
    /// attends, in the order of the block table. `whole`: slots of the groups without a window.
    ///
    /// # Errors
    /// The index of a hash whose block in a window no tier that is not `late` has. A load may end
    /// before this block.
    fn slots_before(
        &self,
        hashes: &[BlockHash],
        resident: usize,
        count: usize,
        (whole, late): (&[(Tier, SlotIndex)], [bool; TIERS]),
    ) -> Result<Vec<(Tier, SlotIndex)>, usize> {
        let without = self.groups_without_window();
        let windowed = without..self.groups.count();
        let needed = |group| self.groups.first_needed(group, (resident + count) * BLOCK_TOKENS);
        // The first group with a window has the largest one. The first block of this window is
        // looked up first: without it no load ends within the window.
        let first = needed(windowed.start).saturating_sub(resident);
        let mut windows = Vec::new();
        for (index, hash) in hashes.iter().enumerate().take(count).skip(first) {
            for group in windowed.clone().filter(|&group| resident + index >= needed(group)) {
                let slot = self.find(hash.of_group(group));
                let slot = slot.filter(|(tier, _)| !late[tier.index()]).ok_or(index)?;
                windows.push((index, slot));
            }
        }
        let mut slots = Vec::with_capacity(count * without + windows.len());
        let mut windows = windows.into_iter().peekable();
        for index in if without > 0 { 0 } else { first }..count {
            slots.extend(&whole[index * without..][..without]);
            while let Some((_, slot)) = windows.next_if(|(of, _)| *of == index) {
                slots.push(slot);
            }
        }
        Ok(slots)
    }

    /// Returns the slots of the leading blocks that a tier has in every group without a window,
    /// in the order of the block table.
    fn find_whole(&self, hashes: &[BlockHash]) -> Vec<(Tier, SlotIndex)> {
        let groups = self.groups_without_window();
        let keys = hashes.iter().flat_map(|hash| (0..groups).map(|group| hash.of_group(group)));
        let mut slots: Vec<_> = keys.map_while(|key| self.find(key)).collect();
        slots.truncate(slots.len() - slots.len() % groups.max(1));
        slots
    }

    /// Counts blocks that are computed although a tier has them.
    fn count_refused(&mut self, slots: &[(Tier, SlotIndex)]) {
        for &(tier, _) in slots {
            self.state(tier).stats.refused += 1;
        }
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

    /// Starts a load of slots that [`choose_load`](Self::choose_load) has just chosen. `targets`: for
    /// each slot, its contents and the block of `reserved` to write.
    pub(crate) fn start_load(
        &mut self,
        id: SequenceId,
        slots: Vec<(Tier, SlotIndex)>,
        targets: Vec<(BlockContents, BlockId)>,
        reserved: Vec<BlockId>,
    ) -> LoadJob {
        assert_eq!(slots.len(), targets.len(), "each slot has a target");
        let job = self.next_job();
        let mut blocks = Vec::with_capacity(slots.len());
        for (&(tier, slot), (contents, block)) in slots.iter().zip(targets) {
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

/// Returns the indices of the tiers of these slots.
fn tiers_of(slots: &[(Tier, SlotIndex)]) -> Vec<usize> {
    slots.iter().map(|(tier, _)| tier.index()).collect()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use kernels::KvGroups;

    use super::*;
    use crate::tiers::{
        RecoveredBlock, TierConfig,
        testing::{with_disk, with_groups},
    };

    const LONG: Duration = Duration::from_secs(60);

    /// Returns the hashes of a prompt's blocks.
    fn hashes(count: u128) -> Vec<BlockHash> {
        (1..=count).map(BlockHash).collect()
    }

    /// Returns tiers whose disk has these ranges of blocks of each group. A block takes 20 ms.
    fn stored(windows: &[usize], blocks: &[&[(usize, usize)]]) -> TierStores {
        let windows: Vec<_> = windows.iter().map(|&window| NonZeroUsize::new(window)).collect();
        let mut tiers = with_groups(10_000, KvGroups::of_windows(&windows));
        assert_eq!(tiers.groups.count(), blocks.len());
        let keys = blocks.iter().enumerate().flat_map(|(group, ranges)| {
            let indices = ranges.iter().flat_map(|&(begin, end)| begin..end);
            indices.map(move |index| (BlockHash(index as u128 + 1).of_group(group), group as u8))
        });
        let block = |((key, group), slot)| RecoveredBlock { slot, key, group };
        let blocks: Vec<_> = keys.zip(0..).map(block).collect();
        tiers.recover(Tier::Disk, &blocks, true);
        tiers.rates[Tier::Disk.index()].add(tiers.now, 10, Duration::from_millis(200));
        tiers
    }

    /// Returns the end of the load and the number of its blocks.
    fn choice(tiers: &mut TierStores, keys: u128, resident: usize) -> (usize, usize) {
        let hashes = &hashes(keys)[resident..];
        let ChosenLoad { count, slots } = tiers.choose_load(hashes, resident, LONG);
        assert!(slots.iter().all(|(tier, _)| *tier == Tier::Disk));
        (resident + count, slots.len())
    }

    /// A window of 40 tokens: three blocks before the end of a block.
    const WINDOWS: [usize; 2] = [0, 40];

    #[test]
    fn load_ends_after_the_last_window_that_a_tier_has() {
        // The windows before blocks 4 and 20, without block 18.
        let windows: &[(usize, usize)] = &[(1, 4), (17, 18), (19, 20)];
        let mut tiers = stored(&WINDOWS, &[&[(0, 20)], windows]);
        assert_eq!(choice(&mut tiers, 30, 0), (4, 4 + 3));
        assert_eq!(choice(&mut tiers, 3, 0), (0, 0));
        // Blocks in the prefix cache are not loaded.
        assert_eq!(choice(&mut tiers, 30, 2), (4, 2 + 2));
        assert_eq!(choice(&mut tiers, 30, 4), (4, 0));
        let mut whole = stored(&WINDOWS, &[&[(0, 20)], &[(1, 4), (17, 20)]]);
        assert_eq!(choice(&mut whole, 30, 0), (20, 20 + 3));
        assert_eq!(whole.state(Tier::Disk).stats.refused, 0);
    }

    #[test]
    fn groups_that_all_have_windows_load_only_windows() {
        let mut tiers = stored(&[40], &[&[(17, 20)]]);
        assert_eq!(choice(&mut tiers, 30, 0), (20, 3));
        let mut tiers = stored(&[40, 72, 72], &[&[(15, 20)], &[(15, 20)], &[(17, 20)]]);
        assert_eq!(choice(&mut tiers, 30, 0), (20, 5 + 5 + 3));
        let mut tiers = stored(&[40], &[&[(3, 4), (9, 11), (17, 19)]]);
        assert_eq!(choice(&mut tiers, 30, 0), (0, 0));
    }

    #[test]
    fn load_that_would_take_too_long_ends_at_an_earlier_window() {
        // A load may take half of its time-out: 25 blocks.
        let blocks: [&[(usize, usize)]; 2] = [&[(0, 23)], &[(7, 10), (16, 19), (20, 23)]];
        let mut tiers = stored(&WINDOWS, &blocks);
        assert_eq!(choice(&mut tiers, 30, 0), (19, 19 + 3));
        assert_eq!(tiers.state(Tier::Disk).stats.refused, 4);
        tiers.rates[Tier::Disk.index()].pending = 5;
        assert_eq!(choice(&mut tiers, 30, 0), (10, 10 + 3));
        tiers.rates[Tier::Disk.index()].pending = 15;
        assert_eq!(choice(&mut tiers, 30, 0), (0, 0));
    }

    #[test]
    fn load_of_a_long_prompt_ends_where_it_takes_the_longest_time() {
        let mut tiers = stored(&WINDOWS, &[&[(0, 3000)], &[(0, 3000)]]);
        // 2,400 blocks.
        tiers.config.load_timeout = 2 * Duration::from_secs(48);
        let load = tiers.choose_load(&hashes(3100), 0, Duration::MAX);
        assert_eq!((load.count, load.slots.len()), (2397, 2400));
    }

    #[test]
    fn refused_load_of_windows_measures_its_tier_again_with_two_blocks() {
        let mut tiers = stored(&WINDOWS, &[&[(0, 10)], &[(7, 10)]]);
        // A block takes 16 ms to compute.
        tiers.add_prefill(1000, Duration::from_secs(1));
        assert_eq!(choice(&mut tiers, 30, 0), (0, 0));
        assert_eq!(tiers.state(Tier::Disk).stats.refused, 13);
        tiers.set_now(tiers.now() + LONG);
        assert_eq!(choice(&mut tiers, 30, 0), (10, 2));
        assert_eq!(tiers.state(Tier::Disk).stats.refused, 13 + 11);
    }

    #[test]
    fn time_to_restore_is_that_of_the_fastest_tier_that_has_slots() {
        let config = TierConfig { host: true, ..with_disk(10).config };
        let mut tiers = TierStores::new(config, KvGroups::default(), 4, Instant::now());
        tiers.add_prefill(1000, Duration::from_secs(1));
        tiers.rates[Tier::Disk.index()].add(tiers.now, 10, Duration::from_millis(10));
        assert_eq!(tiers.restore_time(10, 10), Duration::from_millis(10), "from the disk");
        tiers.grow(Tier::Host, 1);
        assert_eq!(tiers.restore_time(10, 10), Duration::from_millis(160), "no load is measured");
    }
}
