//! Threads that load blocks.

use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Instant,
};

use crossbeam_channel::{Receiver, Sender, bounded};
use engine::tiers::{LOADS_MAX, LoadBlock, LoadJob, Tier, TierEvent};
use kernels::KvArena;
use tracing::warn;

use super::{
    Events,
    disk_file::{DiskFile, SlotBuffer, SlotError},
    enqueue, join,
};

/// Threads that read. A disk needs several concurrent requests for its full throughput, also while
/// some threads check digests.
const READERS: usize = 8;

/// The queue of loads, and its threads.
pub(super) struct LoadQueue {
    /// `None` once dropped.
    jobs: Option<Sender<Arc<SharedLoad>>>,
    threads: Vec<JoinHandle<()>>,
}

/// A load that several threads work on.
pub(super) struct SharedLoad {
    load: LoadJob,
    /// Indices of the blocks on the disk. Each reader takes the next until none is left.
    on_disk: Vec<usize>,
    next: AtomicUsize,
    /// Index of the first block that is not intact; the number of blocks when all are.
    failed: AtomicUsize,
    /// Number of threads that have not finished this load.
    working: AtomicUsize,
    started: OnceLock<Instant>,
}

impl SharedLoad {
    pub(super) fn new(load: LoadJob) -> Self {
        let on = |tier| load.blocks.iter().enumerate().filter(move |(_, it)| it.tier == tier);
        let on_disk: Vec<usize> = on(Tier::Disk).map(|(index, _)| index).collect();
        let readers = if on_disk.is_empty() { 0 } else { READERS };
        let loaders = usize::from(on_disk.len() < load.blocks.len());
        Self {
            next: AtomicUsize::new(0),
            failed: AtomicUsize::new(load.blocks.len()),
            working: AtomicUsize::new(readers + loaders),
            started: OnceLock::new(),
            on_disk,
            load,
        }
    }

    pub(super) fn block(&self, index: usize) -> &LoadBlock {
        &self.load.blocks[index]
    }

    /// Returns the indices of the blocks that a tier holds.
    pub(super) fn on(&self, tier: Tier) -> Vec<usize> {
        (0..self.load.blocks.len()).filter(|&index| self.block(index).tier == tier).collect()
    }

    pub(super) fn has_disk(&self) -> bool {
        !self.on_disk.is_empty()
    }

    pub(super) fn has_host(&self) -> bool {
        self.on_disk.len() < self.load.blocks.len()
    }

    /// Sets the time at which the first thread begins.
    pub(super) fn begin(&self) {
        self.started.get_or_init(Instant::now);
    }

    /// Records that a block is not intact. The blocks after it are useless.
    pub(super) fn fail(&self, index: usize) {
        self.failed.fetch_min(index, Ordering::Relaxed);
    }

    /// Returns whether all blocks before this block may still be intact.
    pub(super) fn is_wanted(&self, index: usize) -> bool {
        index < self.failed.load(Ordering::Relaxed)
    }

    /// Ends a thread's work on this load. The last thread gets the result to report.
    #[must_use]
    pub(super) fn end(&self) -> Option<TierEvent> {
        // The last thread sees the results of the others.
        (self.working.fetch_sub(1, Ordering::AcqRel) == 1).then(|| {
            let intact = self.failed.load(Ordering::Relaxed) as u32;
            let took = self.started.get().map(Instant::elapsed).unwrap_or_default();
            TierEvent::Loaded { job: self.load.job, intact, took }
        })
    }

    /// Ends the work of a thread that did not get this load. See [`end`](Self::end).
    pub(super) fn refuse(&self, tier: Tier) -> Option<TierEvent> {
        self.on(tier).first().into_iter().for_each(|&index| self.fail(index));
        self.end()
    }
}

struct DiskReader {
    disk: Arc<DiskFile>,
    arena: Arc<KvArena>,
    events: Events,
    is_stopping: Arc<AtomicBool>,
    buffer: SlotBuffer,
}

impl LoadQueue {
    pub(super) fn start(
        disk: &Arc<DiskFile>,
        arena: &Arc<KvArena>,
        events: &Events,
        is_stopping: &Arc<AtomicBool>,
    ) -> io::Result<Self> {
        // The core starts at most LOADS_MAX loads, and each is queued once for each thread.
        let (jobs, queued) = bounded::<Arc<SharedLoad>>(LOADS_MAX * READERS);
        let mut this = Self { jobs: Some(jobs), threads: Vec::new() };
        for _ in 0..READERS {
            let mut reader = DiskReader {
                disk: Arc::clone(disk),
                arena: Arc::clone(arena),
                events: events.clone(),
                is_stopping: Arc::clone(is_stopping),
                buffer: disk.buffer()?,
            };
            let queued: Receiver<Arc<SharedLoad>> = queued.clone();
            let read = move || {
                for job in queued {
                    reader.work_on(&job);
                }
            };
            let thread = thread::Builder::new().name("baton-tier-read".to_owned());
            this.threads.push(thread.spawn(read)?);
        }
        Ok(this)
    }

    /// Queues the blocks of a load that are on the disk. Never waits. Returns the load's result if
    /// no thread will.
    pub(super) fn start_job(&self, job: &Arc<SharedLoad>) -> Option<TierEvent> {
        let mut result = None;
        for _ in 0..READERS {
            if !enqueue(self.jobs.as_ref(), Arc::clone(job)) {
                result = result.or(job.refuse(Tier::Disk));
            }
        }
        result
    }

    /// Ends and joins the threads.
    pub(super) fn stop(&mut self) {
        self.jobs = None;
        self.threads.drain(..).for_each(join);
    }
}

impl Drop for LoadQueue {
    fn drop(&mut self) {
        self.stop();
    }
}

impl DiskReader {
    fn work_on(&mut self, job: &SharedLoad) {
        job.begin();
        loop {
            let next = job.next.fetch_add(1, Ordering::Relaxed);
            let Some(&index) = job.on_disk.get(next).filter(|&&index| job.is_wanted(index)) else {
                break;
            };
            if self.is_stopping.load(Ordering::Relaxed) || !self.load(job.block(index)) {
                job.fail(index);
            }
        }
        if let Some(loaded) = job.end() {
            self.events.send(loaded);
        }
    }

    /// Reads one slot into its block. Returns whether the block is intact.
    fn load(&mut self, block: &LoadBlock) -> bool {
        let read = self.read(block);
        if let Err(error) = &read {
            warn!(slot = block.slot, %error, "a block of the disk tier is computed again");
        }
        // The block may be saved again to another slot, and a later start must find only that other
        // slot. No save writes this slot before the load has ended.
        if matches!(read, Err(SlotError::Damaged))
            && let Err(error) = self.disk.erase(block.slot, &mut self.buffer)
        {
            warn!(slot = block.slot, %error, "cannot erase a damaged block of the disk tier");
        }
        read.is_ok()
    }

    fn read(
        &mut self,
        LoadBlock { slot, contents, block, .. }: &LoadBlock,
    ) -> Result<(), SlotError> {
        let mut to = self.arena.write(*block)?;
        match to.host_view_mut().filter(|to| DiskFile::reads_into(to)) {
            Some(to) => self.disk.read_into(*slot, contents, &mut self.buffer, to),
            None => {
                self.disk.read(*slot, contents, &mut self.buffer)?;
                Ok(to.copy_from_host(self.buffer.block())?)
            }
        }
    }
}
