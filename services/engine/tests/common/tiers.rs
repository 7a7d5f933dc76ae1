//! Copies of the KV tiers in tests, which end when the test says so.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use engine::{
    event::Action,
    executor::sim::{SimArena, SimBlock},
    tiers::{
        BlockContents, LoadJob, RecoveredBlock, SaveJob, SaveSource, SlotIndex, Tier, TierEvent,
    },
};
use kernels::BLOCK_TOKENS;

pub(crate) struct TierCopies {
    arena: SimArena,
    /// Contents of the slots.
    slots: BTreeMap<(Tier, SlotIndex), (BlockContents, SimBlock)>,
    jobs: VecDeque<Job>,
    /// Time of one block of a load.
    pub block_time: Duration,
}

enum Job {
    /// The copy reads the block when it ends, so that a block that is reused too early is noticed.
    Copying(SaveJob),
    /// The save was cancelled before its copy.
    Cancelled(SaveJob),
    Writing(SaveJob, SimBlock),
    Loading(LoadJob),
}

impl TierCopies {
    pub(crate) fn new(arena: SimArena) -> Self {
        Self {
            arena,
            slots: BTreeMap::new(),
            jobs: VecDeque::new(),
            block_time: Duration::from_millis(1),
        }
    }

    /// Takes the disk of a process that has stopped. Returns the blocks on the disk.
    pub(crate) fn take_disk(&mut self, stopped: &Self) -> Vec<RecoveredBlock> {
        let slots = stopped.slots.iter().filter(|((tier, _), _)| *tier == Tier::Disk);
        self.slots.extend(slots.clone().map(|(&slot, &block)| (slot, block)));
        let block = |slot, &BlockContents { key, group, .. }: &BlockContents| RecoveredBlock {
            slot,
            key,
            group,
        };
        slots.map(|(&(_, slot), (contents, _))| block(slot, contents)).collect()
    }

    pub(crate) fn start(&mut self, action: Action) {
        match action {
            Action::Save(save) => {
                // From now on the old contents of the slot are lost.
                self.slots.remove(&(save.tier, save.slot));
                self.jobs.push_back(Job::Copying(save));
            }
            Action::CancelSaves { last } => {
                let is_cancelled =
                    |job: &&mut Job| matches!(job, Job::Copying(save) if save.job <= last);
                // The oldest copy has begun.
                for job in self.jobs.iter_mut().filter(is_cancelled).skip(1) {
                    if let Job::Copying(save) = *job {
                        *job = Job::Cancelled(save);
                    }
                }
            }
            Action::Load(load) => {
                // A block that is used before its load has ended has wrong contents.
                load.blocks.iter().for_each(|it| self.arena.write(it.block, [0xbad; BLOCK_TOKENS]));
                self.jobs.push_back(Job::Loading(load));
            }
            action => panic!("{action:?} is no copy"),
        }
    }

    /// Advances one of the jobs in flight.
    pub(crate) fn advance(&mut self, pick: usize, fails: bool) -> Option<TierEvent> {
        let count = self.jobs.len();
        if count == 0 {
            return None;
        }
        Some(match self.jobs.remove(pick % count).expect("the index is in range") {
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
                self.jobs.push_back(Job::Writing(save, kv));
                TierEvent::Copied { job: save.job }
            }
            Job::Writing(save, kv) => {
                self.slots.insert((save.tier, save.slot), (save.contents, kv));
                TierEvent::Saved { job: save.job }
            }
            Job::Loading(load) => {
                let count = load.blocks.len();
                let intact = if fails { pick % count } else { count };
                for block in &load.blocks[..intact] {
                    let (contents, kv) = self.slots[&(block.tier, block.slot)];
                    assert_eq!(contents, block.contents, "slot {} has the block", block.slot);
                    self.arena.write(block.block, kv);
                }
                let took = self.block_time * count as u32;
                TierEvent::Loaded { job: load.job, intact: intact as u32, took }
            }
        })
    }
}
