//! KV tiers: host memory and a disk behind the prefix cache.
//!
//! The core decides which block is saved to which slot of which tier, and which blocks are loaded instead of computed.
//! The shell in the node process copies. Pure: no memory, file, clock or thread.
//!
//! Life of a block in the tiers:
//! 1. A step has written the block, its result was collected, and the block is in the prefix cache. Admission decides
//!    whether the block is worth a save: see [`TierAdmission`]. The save is queued by key. A queue that is full drops
//!    the save. A queued save owns nothing: if the prefix cache evicts the block before the copy starts, the save is
//!    cancelled. With speculative decoding the block is queued after the steps in flight: they were launched before its
//!    draft tokens were verified, so the executor may still hold the block for writing.
//! 2. [`Action::Save`](crate::event::Action::Save): the copy starts. The block cannot be evicted until
//!    [`TierEvent::Copied`]. If a sequence needs the block, [`Action::CancelSaves`](crate::event::Action::CancelSaves)
//!    ends the saves whose copies the shell has not begun. After [`TierEvent::Saved`] loads may read the slot. With both
//!    tiers the block is saved to host memory first, and from there to the disk.
//! 3. A sequence that is admitted continues its prefix with blocks of the tiers, if loading them is predicted to be
//!    faster than computing them. [`Action::Load`](crate::event::Action::Load): the sequence owns all its blocks, those
//!    to load as `Reserved`, and waits in phase `Loading`. Other sequences run meanwhile.
//! 4. [`TierEvent::Loaded`]: the intact blocks enter the prefix cache, and the sequence computes the rest. A damaged or
//!    missing block ends the loaded prefix, and its slot is free.
//!
//! A load waits for nothing but its copies, so there is no circular wait between loads, reservations and sends.

mod admission;
mod rates;
pub(crate) mod sessions;
mod store;
mod touches;

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use admission::{AdmittedPrefix, WrittenBlock};
use foldhash::HashMap;
use kernels::{BLOCK_TOKENS, BlockId};
use rates::{LoadRate, PrefillRate, choose, measure};
pub use store::SlotIndex;
use store::Store;
use touches::Touches;

use crate::{
    event::{BlockHash, CacheChange, SequenceId},
    plan::StepId,
};

/// Maximum number of queued saves of each tier. A prefill step of 8,192 tokens has 512 blocks.
const QUEUED_MAX: usize = 2048;
/// Maximum number of saves to host memory in flight: two batches of the copy engines. An admission waits for at most
/// these copies, about 1 ms, because a batch that has begun cannot be cancelled.
pub const HOST_SAVES_MAX: usize = 32;
/// Maximum number of blocks that saves to the disk pin at a time. They are copied one after another.
pub const COPYING_MAX: usize = 4;
/// Maximum number of saves to the disk in flight. The shell has a buffer for each.
pub const SAVES_MAX: usize = 16;
/// Maximum number of loads in flight. Further sequences compute their KV.
pub const LOADS_MAX: usize = 64;
/// A load is late after twice its predicted time plus the time-out of loads divided by this number.
const LATE_PART: u32 = 8;
/// Maximum number of blocks in one recovery event.
pub const RECOVERED_MAX: usize = 4096;

/// A tier, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    Host,
    Disk,
}

/// Number of tiers.
const TIERS: usize = 2;

impl Tier {
    pub const ALL: [Self; TIERS] = [Self::Host, Self::Disk];

    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Disk => "disk",
        }
    }

    fn index(self) -> usize {
        self as usize
    }

    /// Returns the bounds on saves in flight, and on saves in flight that still read their source.
    fn saves_max(self) -> (usize, usize) {
        match self {
            Self::Host => (HOST_SAVES_MAX, HOST_SAVES_MAX),
            Self::Disk => (SAVES_MAX, COPYING_MAX),
        }
    }
}

/// Rule by which blocks are saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierAdmission {
    /// Blocks that occur in a second request, and blocks of a request whose prompt began with a hit. Prompts that
    /// never recur cost no copies.
    SecondTouch,
    /// Every full block.
    Always,
}

/// Tiers of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierConfig {
    pub admission: TierAdmission,
    /// Whether there is a tier in host memory. Its slots come with [`TierEvent::Grown`].
    pub host: bool,
    /// Blocks that fit on the disk; 0 without this tier.
    pub disk_slots: u32,
    /// Whether later turns of a conversation keep its place in the queue, and its KV is kept for them.
    pub sessions: bool,
    /// Time-out of a load, after which the sequence computes its KV.
    pub load_timeout: Duration,
}

/// Id of one save or load of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// Contents of a block: its key and the inputs of the key. A tier stores them with the KV, and a load compares them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockContents {
    pub key: BlockHash,
    /// Key of the previous block.
    pub parent: BlockHash,
    pub tokens: [u32; BLOCK_TOKENS],
}

/// Source of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveSource {
    /// A block of the arena. It is not evicted before [`TierEvent::Copied`] or [`TierEvent::SaveFailed`].
    Block(BlockId),
    /// A slot of the host tier. It is not overwritten before [`TierEvent::Copied`] or [`TierEvent::SaveFailed`].
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

/// Result of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierEvent {
    /// The source of a save is not read any more. [`Saved`](Self::Saved) or [`SaveFailed`](Self::SaveFailed) ends the
    /// save, and may overtake this event, which is then ignored.
    Copied { job: JobId },
    /// The slot holds the block, and its source is not read any more.
    Saved { job: JobId },
    /// The slot does not hold the block, and its source is not read any more. The copy failed, or the save was cancelled
    /// before its copy.
    SaveFailed { job: JobId },
    /// The first `intact` blocks are written, and no further write lands. If blocks are left, the slot of the next
    /// block is damaged or was not readable.
    Loaded { job: JobId, intact: u32, took: Duration },
    /// The tier has further slots.
    Grown { tier: Tier, slots: u32 },
    /// Blocks that a tier holds since an earlier start. Saves begin after the last of these events, so that they do not
    /// overwrite blocks that are still to be found.
    Recovered { tier: Tier, blocks: Vec<(SlotIndex, BlockHash)>, is_complete: bool },
}

/// Statistics of one tier since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Blocks that the tier holds now.
    pub stored: u32,
    pub slots: u32,
    pub saved: u64,
    pub loaded: u64,
    /// Saves dropped because the queue was full or no slot was idle.
    pub dropped: u64,
    /// Queued saves whose block was evicted before the copy.
    pub cancelled: u64,
    /// Saves that the shell could not finish.
    pub failed: u64,
    /// Blocks that a load found damaged or missing.
    pub damaged: u64,
    /// Blocks that were computed, because loading was predicted to be slower or an earlier load was late.
    pub refused: u64,
    /// Age of the oldest queued save.
    pub queue_age: Duration,
    /// Measured time to load one block; `None` before the first load.
    pub block_time: Option<Duration>,
}

#[derive(Debug)]
struct TierState {
    store: Store,
    /// Whether all blocks of an earlier start are known.
    is_recovered: bool,
    /// Admitted blocks whose copy has not started, oldest first.
    queued: VecDeque<(Instant, BlockHash)>,
    /// Number of saves in flight, and how many of them still read their source.
    saves: usize,
    copying: usize,
    stats: TierStats,
}

#[derive(Debug)]
struct SaveInFlight {
    tier: Tier,
    slot: SlotIndex,
    source: SaveSource,
    contents: BlockContents,
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

/// A load in flight. It may outlive its sequence.
#[derive(Debug)]
pub(crate) struct LoadInFlight {
    pub id: SequenceId,
    /// Time from which the load is late. While a load is late, its slowest tier starts no other load.
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

/// The tiers of one engine.
#[derive(Debug)]
pub(crate) struct Tiers {
    config: TierConfig,
    tiers: [Option<TierState>; TIERS],
    rates: [LoadRate; TIERS],
    prefill: PrefillRate,
    touches: Touches,
    /// Prefixes of admitted prompts with blocks that are not counted, oldest first, and the number of these blocks.
    admitted: VecDeque<AdmittedPrefix>,
    uncounted: usize,
    /// Blocks written since the last [`Self::count_written`].
    written: Vec<WrittenBlock>,
    /// The last launched step, while it is in flight and may write blocks that an earlier step in flight completes.
    last_step: Option<StepId>,
    /// Blocks to queue when the step has been collected; ascending by step.
    unverified: VecDeque<(StepId, BlockHash)>,
    /// Contents of the host tier's slots, for saves from there to the disk.
    host_contents: HashMap<SlotIndex, BlockContents>,
    saves: BTreeMap<JobId, SaveInFlight>,
    loads: BTreeMap<JobId, LoadInFlight>,
    next_job: u64,
    /// The latest time that the core was given.
    now: Instant,
}

impl Tiers {
    /// `block_count`: blocks of the arena.
    pub fn new(config: TierConfig, block_count: u32, now: Instant) -> Self {
        let tier = |slots: u32, is_recovered: bool| TierState {
            store: Store::new(slots),
            is_recovered,
            queued: VecDeque::new(),
            saves: 0,
            copying: 0,
            stats: TierStats::default(),
        };
        let host = config.host.then(|| tier(0, true));
        let disk = (config.disk_slots > 0).then(|| tier(config.disk_slots, false));
        // A host tier usually has one to a few times the memory of the GPUs.
        let keys = 4 * block_count as usize + config.disk_slots as usize;
        Self {
            config,
            tiers: [host, disk],
            rates: Default::default(),
            prefill: PrefillRate::default(),
            touches: Touches::new(2 * keys),
            admitted: VecDeque::new(),
            uncounted: 0,
            written: Vec::new(),
            last_step: None,
            unverified: VecDeque::new(),
            host_contents: HashMap::default(),
            saves: BTreeMap::new(),
            loads: BTreeMap::new(),
            next_job: 0,
            now,
        }
    }

    pub fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    pub fn now(&self) -> Instant {
        self.now
    }

    /// Returns the predicted time to load or compute blocks, whichever is faster; 0 before the first measured prefill.
    pub fn restore_time(&self, blocks: usize) -> Duration {
        let compute = self.prefill.time(blocks).unwrap_or_default();
        let block = self.first_tier().and_then(|tier| self.rates[tier.index()].block_time());
        block.map_or(compute, |block| compute.min(block * blocks as u32))
    }

    /// Returns when a load that starts now times out. Its sequence waits for at most `most`.
    pub fn load_deadline(&self, most: Duration) -> Instant {
        self.now + self.config.load_timeout.min(most)
    }

    pub fn add_prefill(&mut self, tokens: u32, busy: Duration) {
        self.prefill.add(tokens, busy);
    }

    /// Records the launch of a step of a node with speculative decoding. The step writes KV from the last verified
    /// token of each sequence on, maybe into a block that a step in flight completes.
    pub fn step_launched(&mut self, step: StepId) {
        self.last_step = Some(step);
    }

    /// Queues the saves that waited until this step was collected.
    pub fn step_collected(&mut self, step: StepId) {
        self.last_step = self.last_step.filter(|&last| last > step);
        while let Some((_, key)) = self.unverified.pop_front_if(|(last, _)| *last <= step) {
            self.queue_first(key);
        }
    }

    /// Queues the save of a block of the prefix cache, once no step in flight may write the block.
    pub fn offer(&mut self, key: BlockHash) {
        let Some(step) = self.last_step else { return self.queue_first(key) };
        let first = self.tiers.iter_mut().flatten().find(|it| it.store.slots() > 0);
        let Some(first) = first.filter(|it| !it.store.is_known(key)) else { return };
        if self.unverified.len() < QUEUED_MAX {
            self.unverified.push_back((step, key));
        } else {
            first.stats.dropped += 1;
        }
    }

    /// Queues the save of a block to the fastest tier that has slots.
    fn queue_first(&mut self, key: BlockHash) {
        if let Some(first) = self.first_tier() {
            self.queue(first, key);
        }
    }

    /// Returns the fastest tier that has slots. A host tier whose memory cannot be pinned has none.
    fn first_tier(&self) -> Option<Tier> {
        let has_slots =
            |tier: &Tier| self.tiers[tier.index()].as_ref().is_some_and(|it| it.store.slots() > 0);
        Tier::ALL.into_iter().find(has_slots)
    }

    fn queue(&mut self, tier: Tier, key: BlockHash) {
        let now = self.now;
        let Some(tier) = &mut self.tiers[tier.index()] else { return };
        if tier.store.is_known(key) {
            return;
        }
        if tier.queued.len() >= QUEUED_MAX {
            tier.stats.dropped += 1;
            return;
        }
        tier.queued.push_back((now, key));
    }

    /// Starts the next save. `resident` looks a block up in the prefix cache. The caller keeps
    /// the block until [`end_copy`](Self::end_copy) returns it.
    pub fn next_save(
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
            let (since, key) = state.queued.pop_front()?;
            // One save at a time reads a block. A save to host memory queues the block for the disk when it ends.
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
                    self.state(tier).queued.push_front((since, key));
                    return None;
                }
            };
            let Some(slot) = self.state(tier).store.begin_save(key, contents.parent) else {
                self.state(tier).stats.dropped += 1;
                self.release(source);
                continue;
            };
            let state = self.state(tier);
            state.saves += 1;
            state.copying += 1;
            let job = self.next_job();
            let (is_copied, is_cancelled) = (false, false);
            let save = SaveInFlight { tier, slot, source, contents, is_copied, is_cancelled };
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

    /// Returns the state of a tier with a save or load.
    fn state(&mut self, tier: Tier) -> &mut TierState {
        self.tiers[tier.index()].as_mut().expect("a tier with copies exists")
    }

    /// Asks the shell to cancel the saves in flight whose copies have not begun, if one of them keeps a block that
    /// `is_awaited`. Returns the newest job, for [`Action::CancelSaves`](crate::event::Action::CancelSaves), or `None`
    /// if no such save is left, or the shell was asked before.
    pub fn cancel_saves(&mut self, is_awaited: impl Fn(BlockId) -> bool) -> Option<JobId> {
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
    pub fn end_copy(&mut self, job: JobId) -> Option<BlockId> {
        let save = self.saves.get_mut(&job).filter(|save| !save.is_copied)?;
        save.is_copied = true;
        let (tier, source) = (save.tier, save.source);
        self.state(tier).copying -= 1;
        self.release(source)
    }

    /// Handles the end of a save. Returns the block that the save no longer reads, if its copy had not ended.
    pub fn end_save(&mut self, job: JobId, is_saved: bool) -> Option<BlockId> {
        let has_begun = self.saves.get(&job).is_some_and(|it| it.is_copied || !it.is_cancelled);
        let block = self.end_copy(job);
        let save = self.saves.remove(&job)?;
        let now = self.now;
        let state = self.state(save.tier);
        // Keeps the queue in the order of its times.
        let since = state.queued.front().map_or(now, |&(since, _)| since);
        state.saves -= 1;
        state.store.end_save(save.slot, is_saved);
        match is_saved {
            true => state.stats.saved += 1,
            false if has_begun => state.stats.failed += 1,
            // The block is saved later, unless it is evicted before.
            false => state.queued.push_front((since, save.contents.key)),
        }
        if is_saved && save.tier == Tier::Host {
            self.host_contents.insert(save.slot, save.contents);
            self.queue(Tier::Disk, save.contents.key);
        }
        block
    }

    /// Adds slots to a tier.
    pub fn grow(&mut self, tier: Tier, slots: u32) {
        if let Some(state) = &mut self.tiers[tier.index()] {
            state.store.grow(slots);
        }
    }

    pub fn recover(&mut self, tier: Tier, blocks: &[(SlotIndex, BlockHash)], is_complete: bool) {
        if let Some(state) = &mut self.tiers[tier.index()] {
            state.is_recovered |= is_complete;
            for &(slot, key) in blocks {
                state.store.recover(slot, key);
            }
        }
    }

    /// Returns the slots of the prefix of `keys` to load. The load is predicted to end within half of its time-out and
    /// of `most`.
    pub fn choose_load(&mut self, keys: &[BlockHash], most: Duration) -> Vec<(Tier, SlotIndex)> {
        if self.loads.len() >= LOADS_MAX {
            return Vec::new();
        }
        let mut slots: Vec<_> = keys.iter().map_while(|&key| self.find(key)).collect();
        let run: Vec<usize> = slots.iter().map(|(tier, _)| tier.index()).collect();
        // A late load keeps its blocks until it ends. Further loads of a tier that does not answer would take the rest.
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

    /// Starts a load of slots that [`choose_load`](Self::choose_load) has just chosen, with these `contents`. `reserved`
    /// begins with the blocks to write.
    pub fn start_load(
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
    pub fn end_load(&mut self, job: JobId, intact: u32, took: Duration) -> Option<FinishedLoad> {
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
        // Without an intact block the load measures only its first block, and only an increase counts.
        if intact == 0
            && let Some(&(tier, _)) = load.slots.first()
            && took > self.rates[tier.index()].block_time().unwrap_or_default()
        {
            read[tier.index()] = 1;
        }
        measure(self.now, &mut self.rates, read, took);
        Some(FinishedLoad { load, intact })
    }

    /// Returns whether a load of this sequence is in flight.
    pub fn is_loading(&self, id: SequenceId) -> bool {
        self.loads.values().any(|load| load.id == id)
    }

    /// Returns whether no copy is in flight.
    pub fn is_idle(&self) -> bool {
        self.saves.is_empty() && self.loads.is_empty()
    }

    pub fn stats(&self, tier: Tier) -> Option<TierStats> {
        let state = self.tiers[tier.index()].as_ref()?;
        let oldest = state.queued.front();
        let age = |&(at, _): &(Instant, BlockHash)| self.now.saturating_duration_since(at);
        let queue_age = oldest.map(age).unwrap_or_default();
        let (stored, slots) = (state.store.stored(), state.store.slots());
        let block_time = self.rates[tier.index()].block_time();
        Some(TierStats { stored, slots, queue_age, block_time, ..state.stats })
    }

    /// Takes the changes of a tier's blocks since the last call.
    pub fn take_changes(&mut self, tier: Tier) -> Vec<CacheChange> {
        self.tiers[tier.index()].as_mut().map(|it| it.store.take_changes()).unwrap_or_default()
    }

    /// Returns the keys of the `most` blocks of a tier that were used last.
    pub fn keys(&self, tier: Tier, most: usize) -> Vec<BlockHash> {
        self.tiers[tier.index()].as_ref().map(|it| it.store.keys(most)).unwrap_or_default()
    }

    /// Returns the fastest tier that holds the block, and its slot.
    fn find(&self, key: BlockHash) -> Option<(Tier, SlotIndex)> {
        let slot = |tier: Tier| Some((tier, self.tiers[tier.index()].as_ref()?.store.find(key)?));
        Tier::ALL.into_iter().find_map(slot)
    }

    fn next_job(&mut self) -> JobId {
        self.next_job += 1;
        JobId(self.next_job)
    }

    /// Returns the reserved blocks of loads, with their owners.
    pub fn reserved_blocks(&self) -> impl Iterator<Item = (SequenceId, BlockId)> {
        self.loads.values().flat_map(|load| load.blocks.iter().map(|&block| (load.id, block)))
    }

    /// Returns the blocks that saves read.
    pub fn copied_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.saves.values().filter(|save| !save.is_copied).filter_map(|save| match save.source {
            SaveSource::Block(block) => Some(block),
            SaveSource::HostSlot(_) => None,
        })
    }

    /// Panics when slots, saves and loads disagree.
    pub fn check(&self) {
        for tier in Tier::ALL {
            let Some(state) = &self.tiers[tier.index()] else { continue };
            state.store.check();
            let saves = self.saves.values().filter(|save| save.tier == tier);
            assert_eq!(state.saves, saves.clone().count());
            assert_eq!(state.copying, saves.filter(|save| !save.is_copied).count());
            let slots = self.loads.values().flat_map(|load| &load.slots);
            let pending = slots.filter(|(of, _)| *of == tier).count();
            assert_eq!(self.rates[tier.index()].pending as usize, pending);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the tiers of a node with a disk of this many slots and without host memory.
    pub(super) fn with_disk(disk_slots: u32) -> Tiers {
        let config = TierConfig {
            admission: TierAdmission::Always,
            host: false,
            disk_slots,
            sessions: false,
            load_timeout: Duration::from_secs(1),
        };
        Tiers::new(config, 4, Instant::now())
    }

    fn dropped(tiers: &Tiers) -> u64 {
        tiers.stats(Tier::Disk).expect("the disk is on").dropped
    }

    #[test]
    fn time_to_restore_is_that_of_the_fastest_tier_that_has_slots() {
        let config = TierConfig { host: true, ..with_disk(10).config };
        let mut tiers = Tiers::new(config, 4, Instant::now());
        tiers.add_prefill(1000, Duration::from_secs(1));
        tiers.rates[Tier::Disk.index()].add(tiers.now, 10, Duration::from_millis(10));
        assert_eq!(tiers.restore_time(10), Duration::from_millis(10), "from the disk");
        tiers.grow(Tier::Host, 1);
        assert_eq!(tiers.restore_time(10), Duration::from_millis(160), "no load is measured");
    }

    #[test]
    fn cancelled_save_does_not_lower_the_age_of_the_queue() {
        let mut tiers = with_disk(10);
        tiers.recover(Tier::Disk, &[], true);
        (1..=2).for_each(|key| tiers.offer(BlockHash(key)));
        let save = tiers.next_save(resident).expect("the queue has two saves");
        assert_eq!(tiers.cancel_saves(|_| true), Some(save.job));
        tiers.set_now(tiers.now() + Duration::from_secs(3));
        tiers.end_save(save.job, false);
        assert_eq!(tiers.stats(Tier::Disk).unwrap().queue_age, Duration::from_secs(3));
    }

    #[test]
    fn save_is_dropped_and_counted_when_the_queue_is_full() {
        let mut tiers = with_disk(10);
        (0..QUEUED_MAX as u128).for_each(|key| tiers.offer(BlockHash(key)));
        assert_eq!(dropped(&tiers), 0);
        tiers.offer(BlockHash(u128::MAX));
        assert_eq!(dropped(&tiers), 1);
    }

    /// Returns a resident block for each key.
    fn resident(key: BlockHash) -> Result<(BlockId, BlockContents), NoSource> {
        let contents = BlockContents { key, parent: BlockHash(0), tokens: [0; BLOCK_TOKENS] };
        Ok((BlockId(0), contents))
    }

    #[test]
    fn no_save_of_a_block_that_a_step_may_write_starts_when_the_queue_is_full() {
        let mut tiers = with_disk(10);
        let stored = BlockHash(0);
        tiers.recover(Tier::Disk, &[(0, stored)], true);
        tiers.step_launched(1);
        (1..=QUEUED_MAX as u128).for_each(|key| tiers.offer(BlockHash(key)));
        tiers.offer(stored);
        assert_eq!(dropped(&tiers), 0);
        tiers.offer(BlockHash(u128::MAX));
        assert_eq!(dropped(&tiers), 1);
        assert_eq!(tiers.next_save(resident), None, "the step is in flight");
        tiers.step_collected(1);
        assert!(tiers.next_save(resident).is_some());
    }

    #[test]
    fn save_is_dropped_and_counted_when_no_slot_is_idle() {
        let mut tiers = with_disk(1);
        tiers.recover(Tier::Disk, &[], true);
        (1..=2).for_each(|key| tiers.offer(BlockHash(key)));
        assert!(tiers.next_save(resident).is_some());
        assert_eq!(tiers.next_save(resident), None, "the only slot is being written");
        assert_eq!(dropped(&tiers), 1);
    }
}
