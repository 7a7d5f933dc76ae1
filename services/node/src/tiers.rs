//! The KV tiers of a node: pinned host memory, the file of the disk tier, and the threads that
//! copy.
//!
//! [`engine::tiers`] decides what is copied. The engine thread queues each copy and never waits:
//! the core bounds the copies in flight, and the queues have room for all of them. Saves: one
//! thread copies blocks into buffers, and further threads write the buffers, so that a slow disk
//! does not keep blocks from being evicted. Loads: several threads read slots into the reserved
//! blocks and check them. A recovery thread reads the slots' headers once.

mod disk_file;
mod host;
mod loads;
mod metrics;
mod saves;

use std::{
    io, mem,
    ops::Range,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use config::{Config, TierAdmission};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use engine::{
    executor::CollectWaker,
    tiers::{
        self, JobId, LoadJob, RECOVERED_MAX, RecoveredBlock, SaveJob, SlotIndex, Tier, TierConfig,
        TierEvent,
    },
};
use kernels::{KvArena, KvGroups, KvLayout, WeightFormat};
use tracing::{error, info, warn};

use crate::{memory_limit::MemoryShare, settings};

use disk_file::{DiskError, DiskFile};
use host::{HostMemory, HostTier, PinLimits};
use loads::{LoadQueue, SharedLoad};
pub(crate) use metrics::TierMetrics;
use saves::SaveQueue;

/// Events that may wait for the engine thread. The copying threads wait when the queue is full.
const EVENTS_MAX: usize = 256;
/// Threads that read headers at start: a disk needs several concurrent requests for its full
/// throughput.
const RECOVERY_THREADS: u32 = 8;
/// Maximum number of headers that a recovery thread may fail to read. A disk that fails everywhere
/// must not delay the tier for each slot.
const RECOVERY_ERRORS_MAX: usize = 8;
/// Time after which the node reports that headers are still read. No block is saved to the disk
/// before all are read.
const RECOVERY_REPORTED_AFTER: Duration = Duration::from_secs(60);
/// Time-out for opening the file of the disk tier. Allocating the file may take seconds.
const OPEN_WITHIN: Duration = Duration::from_secs(60);
/// Time-out of a load, after which the sequence computes its KV instead. A load that is predicted
/// to take more than half of this time is not started.
const LOAD_TIMEOUT: Duration = Duration::from_secs(4);

/// The opened tiers of a node, before their threads start.
pub(crate) struct OpenTiers {
    host: Option<HostMemory>,
    disk: Option<DiskFile>,
    admission: TierAdmission,
    sessions: bool,
    pin_limits: PinLimits,
}

impl OpenTiers {
    /// Opens the tiers that are configured. A tier that cannot serve is reported and left out. May
    /// take seconds.
    pub(crate) fn open(config: &Config, arena: &KvArena, groups: &KvGroups) -> Option<Self> {
        let tier = &config.tier;
        if tier.disk_path.is_none() && tier.host_memory.bytes() == 0 {
            return None;
        }
        if !config.node.prefix_cache {
            warn!("the node serves without tiers: node.prefix_cache = false; expected true");
            return None;
        }
        if groups.state_entries() > 0 {
            warn!(
                "the node serves without tiers: they keep no states, and the model has recurrent layers"
            );
            return None;
        }
        let pin_limits = PinLimits::of_node(config.node.nodes_per_container);
        let limit = pin_limits.share().map(MemoryShare::bytes);
        let host = open_host(tier.host_memory.bytes(), limit, arena);
        let disk = tier.disk_path.as_deref().and_then(|path| {
            let weights = settings::weight_format(config.model.dtype);
            open_disk(path, tier.disk_size.bytes(), (arena.layout(), groups), weights)
        });
        let (admission, sessions) = (tier.admission, tier.sessions);
        let has_tier = host.is_some() || disk.is_some();
        has_tier.then_some(Self { host, disk, admission, sessions, pin_limits })
    }
}

fn open_host(bytes: u64, limit: Option<u64>, arena: &KvArena) -> Option<HostMemory> {
    if bytes == 0 {
        return None;
    }
    let without = |reason: &dyn std::fmt::Display| {
        warn!(
            "cannot use tier.host_memory = {bytes} bytes: {reason}; the node serves without this tier"
        );
    };
    let slots = u32::try_from(bytes / arena.block_bytes() as u64).unwrap_or(u32::MAX);
    if slots == 0 {
        let block = arena.block_bytes();
        without(&format_args!("it holds no block; expected at least {block}"));
        return None;
    }
    if let Some(limit) = limit.filter(|limit| bytes > *limit) {
        without(&format_args!(
            "it exceeds {limit} bytes, the part of the container's memory limit that this node may use (node.nodes_per_container)"
        ));
        return None;
    }
    match HostMemory::new(arena, slots) {
        Some(Ok(memory)) => Some(memory),
        Some(Err(error)) => {
            without(&error);
            None
        }
        None => {
            without(&"the node computes on the CPU, whose KV is in host memory; expected a GPU");
            None
        }
    }
}

fn open_disk(
    path: &Path,
    size: u64,
    (layout, groups): (KvLayout, &KvGroups),
    weights: WeightFormat,
) -> Option<DiskFile> {
    let shown = path.display();
    let (file, groups) = (path.to_owned(), groups.clone());
    let open = move || DiskFile::open(&file, size, (layout, &groups), weights);
    match open_within(OPEN_WITHIN, open) {
        Ok(disk) => {
            info!(path = %shown, slots = disk.slot_count(), "opened the disk tier");
            Some(disk)
        }
        Err(error) => {
            warn!(
                "cannot use tier.disk_path = {shown}: {error}; the node serves without this tier"
            );
            None
        }
    }
}

/// Opens a file on a thread of its own, which outlives the call if the file system hangs, such as
/// NFS without its server.
fn open_within(
    time: Duration,
    open: impl FnOnce() -> Result<DiskFile, DiskError> + Send + 'static,
) -> Result<DiskFile, DiskError> {
    let (opened, result) = bounded(1);
    // Nobody receives a file that is opened too late: it is closed.
    let open = move || _ = opened.send(open());
    let thread = thread::Builder::new().name("baton-tier-open".to_owned());
    thread.spawn(open).map_err(DiskError::Open)?;
    result.recv_timeout(time).unwrap_or_else(|_| {
        let reason = format!("the file system did not answer within {} s", time.as_secs());
        Err(DiskError::Open(io::Error::new(io::ErrorKind::TimedOut, reason)))
    })
}

/// Sends events to the engine thread and wakes it.
#[derive(Clone)]
struct Events {
    queue: Sender<TierEvent>,
    waker: CollectWaker,
    /// Saves with a smaller job number are cancelled if their copies have not begun. The engine
    /// thread sets the number.
    cancelled: Arc<AtomicU64>,
}

impl Events {
    /// Sends an event; waits while the queue is full. Returns false when the engine thread has
    /// ended.
    fn send(&self, event: TierEvent) -> bool {
        let is_sent = self.queue.send(event).is_ok();
        self.waker.wake();
        is_sent
    }

    /// Returns whether the copy of this save must not begin.
    fn is_cancelled(&self, job: JobId) -> bool {
        job.0 < self.cancelled.load(Ordering::Relaxed)
    }
}

/// The copying threads. Drop ends and joins them: each finishes the copy of its block or batch.
pub(crate) struct TierCopies {
    config: TierConfig,
    /// See [`Events::cancelled`].
    cancelled: Arc<AtomicU64>,
    disk: Option<DiskTier>,
    host: Option<HostTier>,
    is_stopping: Arc<AtomicBool>,
}

/// The threads of the disk tier. Drop ends and joins them.
struct DiskTier {
    saves: SaveQueue,
    loads: LoadQueue,
    recovery: Vec<JoinHandle<()>>,
    is_stopping: Arc<AtomicBool>,
}

impl DiskTier {
    /// `host`: memory of the host tier, if there is one.
    fn start(
        disk: &Arc<DiskFile>,
        arena: &Arc<KvArena>,
        host: Option<&HostMemory>,
        events: &Events,
    ) -> io::Result<Self> {
        let is_stopping = Arc::new(AtomicBool::new(false));
        let saves = SaveQueue::start(disk, arena, host, events)?;
        let loads = LoadQueue::start(disk, arena, events, &is_stopping)?;
        let mut this = Self { saves, loads, recovery: Vec::new(), is_stopping };
        recover(disk, events, &this.is_stopping, &mut this.recovery)?;
        Ok(this)
    }
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        self.recovery.drain(..).for_each(join);
    }
}

impl TierCopies {
    /// Starts the threads. A tier whose threads cannot start is reported and left out; without any
    /// tier the result is `None`. The receiver gets the results, and the blocks that the disk has
    /// from an earlier start.
    pub(crate) fn start(
        tiers: OpenTiers,
        arena: &Arc<KvArena>,
        waker: CollectWaker,
    ) -> Option<(Self, Receiver<TierEvent>)> {
        let OpenTiers { host: memory, disk, admission, sessions, pin_limits } = tiers;
        let (queue, received) = bounded(EVENTS_MAX);
        let cancelled = Arc::new(AtomicU64::new(0));
        let events = Events { queue, waker, cancelled: Arc::clone(&cancelled) };
        let is_stopping = Arc::new(AtomicBool::new(false));
        let without = |setting: &str, error: &io::Error| {
            warn!("cannot use {setting}: {error}; the node serves without this tier");
        };
        let host = memory.as_ref().and_then(|memory| {
            let started = HostTier::start(memory, pin_limits, arena, &events, &is_stopping);
            started.inspect_err(|error| without("tier.host_memory", error)).ok()
        });
        let disk_slots = disk.as_ref().map_or(0, DiskFile::slot_count);
        let disk = disk.and_then(|disk| {
            let started = DiskTier::start(&Arc::new(disk), arena, memory.as_ref(), &events);
            started.inspect_err(|error| without("tier.disk_path", error)).ok()
        });
        let config = TierConfig {
            admission: match admission {
                TierAdmission::SecondTouch => tiers::TierAdmission::SecondTouch,
                TierAdmission::Always => tiers::TierAdmission::Always,
            },
            host: host.is_some(),
            disk_slots: if disk.is_some() { disk_slots } else { 0 },
            sessions,
            load_timeout: LOAD_TIMEOUT,
        };
        let has_tier = host.is_some() || disk.is_some();
        has_tier.then(|| (Self { config, cancelled, disk, host, is_stopping }, received))
    }

    /// Returns the configuration of the tiers that have started.
    pub(crate) fn config(&self) -> TierConfig {
        self.config
    }

    /// Queues a save. Returns the result if no thread will report one, because the core holds the
    /// block until it gets one.
    pub(crate) fn save(&self, save: SaveJob) -> Option<TierEvent> {
        let is_queued = match (save.tier, &self.host, &self.disk) {
            (Tier::Host, Some(host), _) => host.save(save),
            (Tier::Disk, _, Some(disk)) => disk.saves.start_job(save),
            (tier, ..) => unreachable!("the core saves to {tier:?}, which the node does not have"),
        };
        (!is_queued).then_some(TierEvent::SaveFailed { job: save.job })
    }

    /// Cancels the saves up to `last` whose copies have not begun. Their threads report them as
    /// failed.
    pub(crate) fn cancel_saves(&self, last: JobId) {
        self.cancelled.store(last.0 + 1, Ordering::Relaxed);
    }

    /// Queues a load. Returns the result if no thread will report one, because the core holds the
    /// blocks until it gets one.
    pub(crate) fn load(&self, job: LoadJob) -> Option<TierEvent> {
        let job = Arc::new(SharedLoad::new(job));
        let disk = self.disk.as_ref().filter(|_| job.has_disk());
        let host = self.host.as_ref().filter(|_| job.has_host());
        let on_disk = disk.and_then(|disk| disk.loads.start_job(&job));
        let on_host = host.and_then(|host| host.load(&job));
        on_disk.or(on_host)
    }
}

impl Drop for TierCopies {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        // First the disk, whose saves read host memory.
        self.disk = None;
        self.host = None;
    }
}

/// Queues a copy, and returns whether it is queued. Never waits: the core bounds the copies in
/// flight, and the queue has room for all of them.
fn enqueue<T>(queue: Option<&Sender<T>>, job: T) -> bool {
    let is_queued = queue.is_some_and(|queue| queue.try_send(job).is_ok());
    if !is_queued {
        error!(
            "cannot queue a copy of the KV tiers: the queue is full, or the copying threads have ended"
        );
    }
    is_queued
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        warn!("a thread of the KV tiers panicked");
    }
}

/// Starts threads that read all headers and report the blocks. The last of them reports the end. A
/// further thread logs that they take long: a file system that hangs ends no read.
fn recover(
    disk: &Arc<DiskFile>,
    events: &Events,
    is_stopping: &Arc<AtomicBool>,
    threads: &mut Vec<JoinHandle<()>>,
) -> io::Result<()> {
    let started = Instant::now();
    let slots = disk.slot_count();
    let share = slots.div_ceil(RECOVERY_THREADS).max(1);
    let starts = (0..slots).step_by(share as usize);
    let reading = Arc::new(AtomicUsize::new(starts.len()));
    let (reader, all_have_ended) = bounded(0);
    for first in starts {
        let (disk, events, is_stopping) = (Arc::clone(disk), events.clone(), is_stopping.clone());
        let (reading, reader) = (Arc::clone(&reading), reader.clone());
        let name = "baton-tier-scan".to_owned();
        threads.push(thread::Builder::new().name(name).spawn(move || {
            let _reader = reader;
            let slots = first..(first + share).min(slots);
            if let Err(error) = recover_slots(&disk, slots, &events, &is_stopping) {
                warn!(%error, "cannot read headers of the disk tier: their blocks are not used");
            }
            // The last thread sends its event after those of the others.
            if reading.fetch_sub(1, Ordering::AcqRel) == 1 {
                let seconds = started.elapsed().as_secs_f64();
                info!(seconds, "read the headers of the disk tier");
                let tier = Tier::Disk;
                events.send(TierEvent::Recovered { tier, blocks: Vec::new(), is_complete: true });
            }
        })?);
    }
    drop(reader);
    let watch = thread::Builder::new().name("baton-tier-wait".to_owned());
    threads.push(watch.spawn(move || {
        report_if_slow(&all_have_ended, RECOVERY_REPORTED_AFTER, || {
            warn!(
                "reading the headers of the disk tier takes more than {} s: until it ends, blocks are not saved to the disk; check the file system of tier.disk_path",
                RECOVERY_REPORTED_AFTER.as_secs()
            );
        });
    })?);
    Ok(())
}

/// Calls `report` if a thread still holds a sender after `time`.
fn report_if_slow(all_have_ended: &Receiver<()>, time: Duration, report: impl FnOnce()) {
    if all_have_ended.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
        report();
    }
}

fn recover_slots(
    disk: &DiskFile,
    slots: Range<SlotIndex>,
    events: &Events,
    is_stopping: &AtomicBool,
) -> io::Result<()> {
    let mut buffer = disk.buffer()?;
    let block = |slot| disk.block(slot, &mut buffer);
    let found = |blocks| {
        let tier = Tier::Disk;
        events.send(TierEvent::Recovered { tier, blocks, is_complete: false })
    };
    read_headers(slots, is_stopping, block, found)
}

/// Reads the header of each slot by `block`, and passes the blocks to `found` until `found` returns
/// false. Skips headers that cannot be read, and returns the last of these errors.
fn read_headers(
    slots: Range<SlotIndex>,
    is_stopping: &AtomicBool,
    mut block: impl FnMut(SlotIndex) -> io::Result<Option<RecoveredBlock>>,
    mut found: impl FnMut(Vec<RecoveredBlock>) -> bool,
) -> io::Result<()> {
    let mut blocks = Vec::new();
    let (mut errors, mut result) = (0, Ok(()));
    for slot in slots {
        match block(slot) {
            Ok(block) => blocks.extend(block),
            Err(error) => {
                errors += 1;
                result = Err(error);
                if errors == RECOVERY_ERRORS_MAX {
                    break;
                }
            }
        }
        let is_full = blocks.len() >= RECOVERED_MAX;
        if (is_full && !found(mem::take(&mut blocks))) || is_stopping.load(Ordering::Relaxed) {
            return result;
        }
    }
    if !blocks.is_empty() {
        found(blocks);
    }
    result
}

#[cfg(test)]
mod tests;
