//! Copies of the KV tiers of one process, in virtual time.
//!
//! A save reads its block when its copy ends, so that a block that was reused too early is noticed.
//! A load makes its blocks invalid when it starts, so that a block that is used too early gives
//! wrong tokens.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use engine::{
    executor::sim::{SimArena, SimBlock},
    tiers::{
        BlockContents, JobId, LoadJob, SaveJob, SaveSource, SlotIndex, Tier, TierAdmission,
        TierConfig, TierEvent,
    },
};
use kernels::BLOCK_TOKENS;

/// KV tiers of a simulated node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TierPlan {
    pub config: TierConfig,
    pub host_slots: u32,
    /// Every copy takes up to this time; every 16th takes a hundred times as long.
    pub copy_max: Duration,
    /// Every copy with this number fails.
    pub fails_every: u64,
}

impl TierPlan {
    /// Derives a plan from a drawn number; about every second node has tiers.
    pub(crate) fn of(number: u32) -> Option<Self> {
        let always = number.is_multiple_of(3);
        let config = TierConfig {
            admission: if always { TierAdmission::Always } else { TierAdmission::SecondTouch },
            host: number.is_multiple_of(4),
            sessions: number.is_multiple_of(5),
            disk_slots: if number.is_multiple_of(8) { 0 } else { 2 + number },
            load_timeout: Duration::from_millis(20 * u64::from(number) + 1),
        };
        number.is_multiple_of(2).then_some(Self {
            config,
            host_slots: 1 + number / 2,
            copy_max: Duration::from_millis(1 + u64::from(number) / 4),
            fails_every: 5 + u64::from(number),
        })
    }
}

/// Blocks of a disk. They outlive the process.
pub(crate) type Disk = BTreeMap<SlotIndex, (BlockContents, SimBlock)>;

pub(crate) struct TierCopies {
    plan: TierPlan,
    arena: SimArena,
    slots: BTreeMap<(Tier, SlotIndex), (BlockContents, SimBlock)>,
    /// Jobs by the time at which they continue, and their number.
    jobs: BTreeMap<(Instant, u64), Job>,
    started: u64,
}

enum Job {
    Copying(SaveJob),
    /// The save was cancelled before its copy.
    Cancelled(SaveJob),
    Writing(SaveJob, SimBlock),
    Loading(LoadJob, Instant),
}

impl TierCopies {
    pub(crate) fn new(plan: TierPlan, arena: SimArena) -> Self {
        Self { plan, arena, slots: BTreeMap::new(), jobs: BTreeMap::new(), started: 0 }
    }

    /// Takes the blocks on the disk from a process that has ended.
    pub(crate) fn take_disk(&mut self) -> Disk {
        let slots = std::mem::take(&mut self.slots).into_iter();
        slots
            .filter(|((tier, _), _)| *tier == Tier::Disk)
            .map(|((_, slot), it)| (slot, it))
            .collect()
    }

    /// Puts blocks on the disk of a process that starts.
    pub(crate) fn put_disk(&mut self, disk: Disk) {
        self.slots.extend(disk.into_iter().map(|(slot, block)| ((Tier::Disk, slot), block)));
    }

    pub(crate) fn save(&mut self, now: Instant, job: SaveJob) {
        // From now on the old contents of the slot are lost.
        self.slots.remove(&(job.tier, job.slot));
        self.add(now, Job::Copying(job));
    }

    /// Cancels saves up to `last`. The copy that ends first has begun.
    pub(crate) fn cancel_saves(&mut self, now: Instant, last: JobId) {
        let copies = self.jobs.iter().filter_map(|(&key, job)| match job {
            Job::Copying(save) if save.job <= last => Some((key, *save)),
            _ => None,
        });
        for (key, save) in copies.skip(1).collect::<Vec<_>>() {
            self.jobs.remove(&key);
            self.started += 1;
            self.jobs.insert((now, self.started), Job::Cancelled(save));
        }
    }

    pub(crate) fn load(&mut self, now: Instant, job: LoadJob) {
        job.blocks.iter().for_each(|it| self.arena.write(it.block, [0xbad; BLOCK_TOKENS]));
        self.add(now, Job::Loading(job, now));
    }

    /// Returns when the next copy ends.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.jobs.first_key_value().map(|(&(due, _), _)| due)
    }

    pub(crate) fn is_loading(&self) -> bool {
        self.jobs.values().any(|job| matches!(job, Job::Loading(..)))
    }

    pub(crate) fn take_due(&mut self, now: Instant) -> Option<TierEvent> {
        let entry = self.jobs.first_entry().filter(|entry| entry.key().0 <= now)?;
        let fails = entry.key().1.is_multiple_of(self.plan.fails_every);
        Some(match entry.remove() {
            Job::Copying(SaveJob { job, .. }) | Job::Writing(SaveJob { job, .. }, _) if fails => {
                TierEvent::SaveFailed { job }
            }
            Job::Cancelled(SaveJob { job, .. }) => TierEvent::SaveFailed { job },
            Job::Copying(save) => {
                let kv = match save.source {
                    SaveSource::Block(block) => self.arena.read(block),
                    SaveSource::HostSlot(slot) => {
                        let (contents, kv) = self.slots[&(Tier::Host, slot)];
                        assert_eq!(contents, save.contents, "the host slot was not overwritten");
                        kv
                    }
                };
                self.add(now, Job::Writing(save, kv));
                TierEvent::Copied { job: save.job }
            }
            Job::Writing(save, kv) => {
                self.slots.insert((save.tier, save.slot), (save.contents, kv));
                TierEvent::Saved { job: save.job }
            }
            Job::Loading(load, since) => {
                let count = load.blocks.len();
                let intact = if fails { count / 2 } else { count };
                for block in &load.blocks[..intact] {
                    let (contents, kv) = self.slots[&(block.tier, block.slot)];
                    assert_eq!(contents, block.contents, "slot {} has the block", block.slot);
                    self.arena.write(block.block, kv);
                }
                let took = now.saturating_duration_since(since);
                TierEvent::Loaded { job: load.job, intact: intact as u32, took }
            }
        })
    }

    fn add(&mut self, now: Instant, job: Job) {
        self.started += 1;
        // A fixed sequence that looks random.
        let part = (self.started.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u32;
        let slow = if self.started.is_multiple_of(16) { 100 } else { 1 };
        let due = now + self.plan.copy_max * slow * part / 255;
        self.jobs.insert((due, self.started), job);
    }
}
