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
use engine::tiers::{LOADS_MAX, LoadBlock, LoadJob, TierEvent};
use kernels::KvArena;
use tracing::warn;

use super::{
    Events,
    disk_file::{DiskFile, SlotBuffer},
    join,
};

/// Threads that read. A disk needs several requests at a time for its full rate.
const READERS: usize = 4;

/// The queue of loads, and its threads.
pub(super) struct Loads {
    /// `None` once closed.
    jobs: Option<Sender<Arc<Job>>>,
    threads: Vec<JoinHandle<()>>,
}

/// A load that several threads work on. Each takes the next block until none is left.
struct Job {
    load: LoadJob,
    next: AtomicUsize,
    /// Index of the first block that is not intact; the number of blocks when all are.
    failed: AtomicUsize,
    /// Threads that have not yet come to the end of this load.
    readers: AtomicUsize,
    started: OnceLock<Instant>,
}

struct Reader {
    disk: Arc<DiskFile>,
    arena: Arc<KvArena>,
    events: Events,
    is_stopping: Arc<AtomicBool>,
    buffer: SlotBuffer,
}

impl Loads {
    pub fn start(
        disk: &Arc<DiskFile>,
        arena: &Arc<KvArena>,
        events: &Events,
        is_stopping: &Arc<AtomicBool>,
    ) -> io::Result<Self> {
        // The core starts at most LOADS_MAX loads, and each is queued once for each thread.
        let (jobs, queued) = bounded::<Arc<Job>>(LOADS_MAX * READERS);
        let mut threads = Vec::new();
        for _ in 0..READERS {
            let mut reader = Reader {
                disk: Arc::clone(disk),
                arena: Arc::clone(arena),
                events: events.clone(),
                is_stopping: Arc::clone(is_stopping),
                buffer: disk.buffer()?,
            };
            let queued: Receiver<Arc<Job>> = queued.clone();
            let read = move || {
                for job in queued {
                    reader.work_on(&job);
                }
            };
            threads.push(thread::Builder::new().name("baton-tier-read".to_owned()).spawn(read)?);
        }
        Ok(Self { jobs: Some(jobs), threads })
    }

    /// Queues a load. Never waits.
    pub fn start_job(&self, load: LoadJob) {
        let count = load.blocks.len();
        let job = Arc::new(Job {
            load,
            next: AtomicUsize::new(0),
            failed: AtomicUsize::new(count),
            readers: AtomicUsize::new(READERS),
            started: OnceLock::new(),
        });
        let Some(jobs) = &self.jobs else { return };
        for _ in 0..READERS {
            let is_queued = jobs.try_send(Arc::clone(&job)).is_ok();
            debug_assert!(is_queued, "the core bounds the loads in flight");
        }
    }

    /// Ends and joins the threads.
    pub fn close(&mut self) {
        self.jobs = None;
        self.threads.drain(..).for_each(join);
    }
}

impl Reader {
    fn work_on(&mut self, job: &Job) {
        let started = *job.started.get_or_init(Instant::now);
        loop {
            let index = job.next.fetch_add(1, Ordering::Relaxed);
            // Blocks after a damaged one are of no use.
            if index >= job.failed.load(Ordering::Relaxed) {
                break;
            }
            if self.is_stopping.load(Ordering::Relaxed) || !self.load(&job.load.blocks[index]) {
                job.failed.fetch_min(index, Ordering::Relaxed);
            }
        }
        // The last thread sees the results of the others.
        if job.readers.fetch_sub(1, Ordering::AcqRel) == 1 {
            let intact = job.failed.load(Ordering::Relaxed) as u32;
            let (job, took) = (job.load.job, started.elapsed());
            self.events.send(TierEvent::Loaded { job, intact, took });
        }
    }

    /// Copies one slot into its block. Returns whether the block is intact.
    fn load(&mut self, block: &LoadBlock) -> bool {
        if let Err(error) = self.disk.read(block.slot, &block.contents, &mut self.buffer) {
            warn!(slot = block.slot, %error, "a block of the disk tier is computed again");
            return false;
        }
        let write = self.arena.write(block.block);
        let copied = write.and_then(|mut to| to.copy_from_host(self.buffer.block()));
        if let Err(error) = &copied {
            warn!(%error, "cannot load a block");
        }
        copied.is_ok()
    }
}
