//! KV tiers: host memory and a disk behind the prefix cache.
//!
//! The core decides which block is saved to which slot of which tier, and which blocks are loaded
//! instead of computed. The shell in the node process copies. Pure: no memory, file, clock or
//! thread.
//!
//! Life of a block in the tiers:
//! 1. A step has written the block, its result was collected, and the block is in the prefix cache.
//!    Admission decides whether the block is worth a save: see [`TierAdmission`]. The save is
//!    queued by key. A queue that is full drops the save. A queued save owns nothing: if the prefix
//!    cache evicts the block before the copy starts, the save is cancelled. With speculative
//!    decoding the block is queued after the steps in flight: they were launched before its draft
//!    tokens were verified, so the executor may still hold the block for writing.
//! 2. [`Action::Save`](crate::event::Action::Save): the copy starts. The block cannot be evicted
//!    until [`TierEvent::Copied`]. If a sequence needs the block,
//!    [`Action::CancelSaves`](crate::event::Action::CancelSaves) ends the saves whose copies the
//!    shell has not begun. After [`TierEvent::Saved`] loads may read the slot. With both tiers the
//!    block is saved to host memory first, and from there to the disk.
//! 3. A sequence that is admitted continues its prefix with blocks of the tiers, if loading them is
//!    predicted to be faster than computing them. [`Action::Load`](crate::event::Action::Load): the
//!    sequence owns all its blocks, those to load as `Reserved`, and waits in phase `Loading`.
//!    Other sequences run meanwhile.
//! 4. [`TierEvent::Loaded`]: the intact blocks enter the prefix cache, and the sequence computes
//!    the rest. A damaged or missing block ends the loaded prefix, and its slot is free. If a group
//!    has a window, the sequence takes all blocks of a load or none.
//!
//! With several KV groups each block of a group is saved and loaded under a key of its own. Of a
//! group with a window, two windows of a sequence are saved: the window before the end of the
//! prompt at the first token, and the window before the end of the answer at the end. An equal
//! prompt or a later turn begins after one of them. A load that ends at another token needs other
//! blocks. All blocks of the first group are saved, even if every group has a window.
//!
//! A load waits for nothing but its copies, so there is no circular wait between loads,
//! reservations and sends.

mod admission;
mod loads;
mod rates;
mod saves;
pub(crate) mod sessions;
mod store;
#[cfg(test)]
mod testing;
mod touches;

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    time::{Duration, Instant},
};

use admission::{AdmittedPrefix, WrittenBlock, WrittenWindow};
use foldhash::HashMap;
use kernels::{BLOCK_TOKENS, KvGroups};
use loads::LoadInFlight;
pub(crate) use loads::{ChosenLoad, FinishedLoad};
pub use loads::{LOADS_MAX, LoadBlock, LoadJob};
use rates::{LoadRate, PrefillRate};
pub(crate) use saves::NoSource;
pub use saves::{COPYING_MAX, HOST_SAVES_MAX, SAVES_MAX, SaveJob, SaveSource};
use saves::{OfferedBlock, SaveInFlight};
pub use store::SlotIndex;
use store::Store;
use touches::BlockTouches;

use crate::{
    event::{BlockHash, CacheChange},
    plan::StepId,
};

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
}

/// Rule by which blocks are saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierAdmission {
    /// Blocks that occur in a second request, and blocks of a request whose prompt began with a
    /// hit. Prompts that never recur cost no copies.
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
    /// Whether later turns of a conversation keep its place in the queue, and its KV is kept for
    /// them.
    pub sessions: bool,
    /// Time-out of a load, after which the sequence computes its KV.
    pub load_timeout: Duration,
}

/// Id of one save or load of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// Contents of a block: its key and the inputs of the key. A tier stores them with the KV, and a
/// load compares them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockContents {
    pub key: BlockHash,
    /// Key of the previous block of the same KV group.
    pub parent: BlockHash,
    pub tokens: [u32; BLOCK_TOKENS],
    /// Index of the block's KV group, which the key depends on.
    pub group: u8,
}

/// A block that a tier holds since an earlier start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoveredBlock {
    pub slot: SlotIndex,
    pub key: BlockHash,
    /// Index of the block's KV group.
    pub group: u8,
}

impl BlockContents {
    /// Returns the contents of the block of a KV group, from those of the first group's block.
    pub(crate) fn of_group(self, group: usize) -> Self {
        let (key, parent) = (self.key.of_group(group), self.parent.of_group(group));
        Self { key, parent, group: group as u8, ..self }
    }
}

/// Result of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierEvent {
    /// The source of a save is not read any more. [`Saved`](Self::Saved) or
    /// [`SaveFailed`](Self::SaveFailed) ends the save, and may overtake this event, which is then
    /// ignored.
    Copied { job: JobId },
    /// The slot holds the block, and its source is not read any more.
    Saved { job: JobId },
    /// The slot does not hold the block, and its source is not read any more. The copy failed, or
    /// the save was cancelled before its copy.
    SaveFailed { job: JobId },
    /// The first `intact` blocks are written, and no further write lands. If blocks are left, the
    /// slot of the next block is damaged or was not readable.
    Loaded { job: JobId, intact: u32, took: Duration },
    /// The tier has further slots.
    Grown { tier: Tier, slots: u32 },
    /// Blocks that a tier holds since an earlier start. Saves begin after the last of these events,
    /// so that they do not overwrite blocks that are still to be found.
    Recovered { tier: Tier, blocks: Vec<RecoveredBlock>, is_complete: bool },
}

/// Statistics of one tier since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Blocks that the tier holds now.
    pub stored: u32,
    pub slots: u32,
    pub saved: u64,
    /// Intact blocks that loads have read.
    pub loaded: u64,
    /// Loaded blocks that a sequence took instead of computing them. A sequence may end or give up
    /// a load before.
    pub hits: u64,
    /// Saves dropped because the queue was full or no slot was idle.
    pub dropped: u64,
    /// Queued saves whose block was evicted before the copy.
    pub cancelled: u64,
    /// Saves that the shell could not finish.
    pub failed: u64,
    /// Blocks that a load found damaged or missing.
    pub damaged: u64,
    /// Blocks that were computed, because loading was predicted to be slower or an earlier load was
    /// late.
    pub refused: u64,
    /// Age of the oldest queued save.
    pub queue_age: Duration,
    /// Measured time to load one block; `None` before the first load.
    pub block_time: Option<Duration>,
}

/// State of one tier.
#[derive(Debug)]
struct TierState {
    store: Store,
    /// Whether all blocks of an earlier start are known.
    is_recovered: bool,
    /// Admitted blocks whose copy has not started, oldest first.
    queued: VecDeque<(Instant, OfferedBlock)>,
    /// Number of saves in flight, and how many of them still read their source.
    saves: usize,
    copying: usize,
    stats: TierStats,
}

/// The tiers of one engine.
#[derive(Debug)]
pub(crate) struct TierStores {
    config: TierConfig,
    groups: KvGroups,
    tiers: [Option<TierState>; TIERS],
    rates: [LoadRate; TIERS],
    prefill: PrefillRate,
    touches: BlockTouches,
    /// Prefixes of admitted prompts with blocks that are not counted, oldest first, and the number
    /// of these blocks.
    admitted: VecDeque<AdmittedPrefix>,
    uncounted: usize,
    /// Blocks written since the last [`Self::count_written`], and windows whose end was written.
    written: Vec<WrittenBlock>,
    windows: Vec<WrittenWindow>,
    /// The last launched step, while it is in flight and may write blocks that an earlier step in
    /// flight completes.
    last_step: Option<StepId>,
    /// Blocks to queue when the step has been collected; ascending by step.
    unverified: VecDeque<(StepId, OfferedBlock)>,
    /// Contents of the host tier's slots, for saves from there to the disk.
    host_contents: HashMap<SlotIndex, BlockContents>,
    saves: BTreeMap<JobId, SaveInFlight>,
    loads: BTreeMap<JobId, LoadInFlight>,
    next_job: u64,
    /// The latest time that the core was given.
    now: Instant,
}

impl TierStores {
    /// `block_count`: blocks of the arena.
    pub(crate) fn new(
        config: TierConfig,
        groups: KvGroups,
        block_count: u32,
        now: Instant,
    ) -> Self {
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
            groups,
            tiers: [host, disk],
            rates: Default::default(),
            prefill: PrefillRate::default(),
            touches: BlockTouches::new(2 * keys),
            admitted: VecDeque::new(),
            uncounted: 0,
            written: Vec::new(),
            windows: Vec::new(),
            last_step: None,
            unverified: VecDeque::new(),
            host_contents: HashMap::default(),
            saves: BTreeMap::new(),
            loads: BTreeMap::new(),
            next_job: 0,
            now,
        }
    }

    pub(crate) fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// Returns the number of KV groups without a window. They are the first groups.
    fn groups_without_window(&self) -> usize {
        self.groups.windows().take_while(Option::is_none).count()
    }

    /// Returns the KV groups of which all blocks are saved. Of the others, windows are saved.
    fn groups_saved_whole(&self) -> Range<usize> {
        0..self.groups_without_window().max(1)
    }

    /// Returns the fastest tier that has slots. A host tier whose memory cannot be pinned has none.
    fn first_tier(&self) -> Option<Tier> {
        let has_slots =
            |tier: &Tier| self.tiers[tier.index()].as_ref().is_some_and(|it| it.store.slots() > 0);
        Tier::ALL.into_iter().find(has_slots)
    }

    /// Returns the state of a tier with a save or load.
    fn state(&mut self, tier: Tier) -> &mut TierState {
        self.tiers[tier.index()].as_mut().expect("a tier with copies exists")
    }

    fn next_job(&mut self) -> JobId {
        self.next_job += 1;
        JobId(self.next_job)
    }

    /// Adds slots to a tier.
    pub(crate) fn grow(&mut self, tier: Tier, slots: u32) {
        if let Some(state) = &mut self.tiers[tier.index()] {
            state.store.grow(slots);
        }
    }

    /// Drops every block whose save has not started. Copies in flight end as usual.
    pub(crate) fn drop_pending(&mut self) {
        self.admitted.clear();
        self.uncounted = 0;
        self.written.clear();
        self.windows.clear();
        self.tiers.iter_mut().flatten().for_each(|tier| tier.queued.clear());
    }

    pub(crate) fn recover(&mut self, tier: Tier, blocks: &[RecoveredBlock], is_complete: bool) {
        if let Some(state) = &mut self.tiers[tier.index()] {
            state.is_recovered |= is_complete;
            for &block in blocks {
                state.store.recover(block);
            }
        }
    }

    /// Returns whether no copy is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.saves.is_empty() && self.loads.is_empty()
    }

    pub(crate) fn stats(&self, tier: Tier) -> Option<TierStats> {
        let state = self.tiers[tier.index()].as_ref()?;
        let oldest = state.queued.front();
        let age = |&(at, _): &(Instant, OfferedBlock)| self.now.saturating_duration_since(at);
        let queue_age = oldest.map(age).unwrap_or_default();
        let (stored, slots) = (state.store.stored(), state.store.slots());
        let block_time = self.rates[tier.index()].block_time();
        Some(TierStats { stored, slots, queue_age, block_time, ..state.stats })
    }

    /// Takes the changes of a tier's blocks of the first KV group since the last call.
    pub(crate) fn take_changes(&mut self, tier: Tier) -> Vec<CacheChange> {
        self.tiers[tier.index()].as_mut().map(|it| it.store.take_changes()).unwrap_or_default()
    }

    /// Returns the keys of the `most` blocks of the first KV group that were used last in a tier.
    pub(crate) fn keys(&self, tier: Tier, most: usize) -> Vec<BlockHash> {
        self.tiers[tier.index()].as_ref().map(|it| it.store.keys(most)).unwrap_or_default()
    }

    /// Panics when slots, saves and loads disagree.
    pub(crate) fn check(&self) {
        for tier in Tier::ALL {
            let Some(state) = &self.tiers[tier.index()] else { continue };
            state.store.check();
            self.check_saves(tier, state);
            self.check_loads(tier);
        }
    }
}
