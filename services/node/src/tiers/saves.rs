//! Threads that save blocks.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use crossbeam_channel::{Receiver, Sender, bounded};
use engine::tiers::{SAVES_MAX, SaveJob, SaveSource, TierEvent};
use kernels::KvArena;
use tracing::{info, warn};

use super::{
    Events,
    disk_file::{DiskFile, SlotBuffer},
    enqueue,
    host::HostMemory,
    join,
};

/// Threads that write: enough that the disk always has a request.
const WRITERS: usize = 2;

/// The queue of saves, and its threads.
pub(super) struct SaveQueue {
    /// `None` once dropped.
    jobs: Option<Sender<SaveJob>>,
    threads: Vec<JoinHandle<()>>,
}

/// A block in a buffer, on its way to its slot.
struct BufferedBlock {
    job: SaveJob,
    buffer: SlotBuffer,
}

impl SaveQueue {
    /// `host`: memory of the host tier, if there is one.
    pub(super) fn start(
        disk: &Arc<DiskFile>,
        arena: &Arc<KvArena>,
        host: Option<&HostMemory>,
        events: &Events,
    ) -> io::Result<Self> {
        // The core starts at most SAVES_MAX saves, so no queue is ever full, and a free buffer
        // exists for each save.
        let (jobs, queued) = bounded(SAVES_MAX);
        // Declared before the queues, so that it is dropped later: if a thread cannot start, the
        // queues close before the other threads are joined.
        let mut this = Self { jobs: Some(jobs), threads: Vec::new() };
        let (copied, to_write) = bounded(SAVES_MAX);
        let (free, free_buffers) = bounded(SAVES_MAX);
        for _ in 0..SAVES_MAX {
            let is_sent = free.send(disk.buffer()?).is_ok();
            debug_assert!(is_sent, "the receiver is alive");
        }
        let is_failing = Arc::new(AtomicBool::new(false));
        for _ in 0..WRITERS {
            let (disk, events, is_failing) =
                (Arc::clone(disk), events.clone(), Arc::clone(&is_failing));
            let (to_write, free): (Receiver<BufferedBlock>, Sender<SlotBuffer>) =
                (to_write.clone(), free.clone());
            let write = move || {
                for BufferedBlock { job, mut buffer } in to_write {
                    let written = disk.write(job.slot, &job.contents, &mut buffer);
                    report_change(&is_failing, &written);
                    let job = job.job;
                    let event = match written {
                        Ok(()) => TierEvent::Saved { job },
                        Err(_) => TierEvent::SaveFailed { job },
                    };
                    // Return the buffer first: the next save may follow the event at once.
                    if free.send(buffer).is_err() || !events.send(event) {
                        break;
                    }
                }
            };
            this.spawn("baton-tier-write", write)?;
        }
        let sources = Sources { arena: Arc::clone(arena), host: host.cloned() };
        let events = events.clone();
        this.spawn("baton-tier-copy", move || {
            copy_blocks(&sources, &queued, &free_buffers, &copied, &events)
        })?;
        Ok(this)
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.threads.push(thread::Builder::new().name(name.to_owned()).spawn(work)?);
        Ok(())
    }

    /// Queues a save. Never waits. Returns whether a thread will report its end.
    pub(super) fn start_job(&self, job: SaveJob) -> bool {
        enqueue(self.jobs.as_ref(), job)
    }
}

impl Drop for SaveQueue {
    /// Ends and joins the threads.
    fn drop(&mut self) {
        self.jobs = None;
        self.threads.drain(..).for_each(join);
    }
}

/// Memory that saves copy from.
struct Sources {
    arena: Arc<KvArena>,
    host: Option<HostMemory>,
}

impl Sources {
    /// Copies the block of a save to `to`. Checks the digest of a slot in host memory; otherwise
    /// the disk would store a damaged block with a matching digest.
    fn copy(&self, job: &SaveJob, to: &mut [u8]) -> Result<(), String> {
        match job.source {
            SaveSource::Block(block) => {
                let copied = self.arena.read(block).and_then(|block| block.copy_to_host(to));
                copied.map_err(|error| error.to_string())
            }
            SaveSource::HostSlot(slot) => {
                let host = self.host.as_ref().expect("a node with host slots has a host tier");
                host.copy(slot, &job.contents, to)
            }
        }
    }
}

/// Copies blocks into buffers until the queue is closed.
fn copy_blocks(
    sources: &Sources,
    jobs: &Receiver<SaveJob>,
    free: &Receiver<SlotBuffer>,
    copied: &Sender<BufferedBlock>,
    events: &Events,
) {
    // Buffer of a failed copy, for the next copy.
    let mut unused = None;
    for job in jobs {
        if events.is_cancelled(job.job) {
            if !events.send(TierEvent::SaveFailed { job: job.job }) {
                break;
            }
            continue;
        }
        let Some(mut buffer) = unused.take().or_else(|| free.recv().ok()) else { break };
        let copy = sources.copy(&job, buffer.block_mut());
        let id = job.job;
        let (event, is_open) = match copy {
            Ok(()) => {
                let is_open = copied.send(BufferedBlock { job, buffer }).is_ok();
                (TierEvent::Copied { job: id }, is_open)
            }
            Err(error) => {
                warn!(%error, "cannot copy a block for the disk tier");
                unused = Some(buffer);
                (TierEvent::SaveFailed { job: id }, true)
            }
        };
        if !events.send(event) || !is_open {
            break;
        }
    }
}

/// Logs the first failure after a success, and the first success after a failure.
fn report_change(is_failing: &AtomicBool, written: &io::Result<()>) {
    let was_failing = is_failing.swap(written.is_err(), Ordering::Relaxed);
    match written {
        Err(error) if !was_failing => warn!(%error, "cannot write blocks to the disk tier"),
        Ok(()) if was_failing => info!("blocks are written to the disk tier again"),
        _ => {}
    }
}
