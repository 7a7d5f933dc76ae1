//! The tier in pinned host memory, for nodes on GPUs: its memory, and the threads that copy.
//!
//! Copy engines move whole blocks in batches, two batches at a time, so that the engines are never
//! idle while copies wait. The GPU computes a digest of every block before its save and after its
//! load, while another batch is copied. On the CPU, digests at the throughput of the copies would
//! take several cores.

use std::{
    any::Any,
    collections::VecDeque,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use crossbeam_channel::{Receiver, Sender, bounded};
use engine::tiers::{
    BlockContents, HOST_SAVES_MAX, LOADS_MAX, SaveJob, SaveSource, SlotIndex, Tier, TierEvent,
};
use kernels::{
    BlockId, BlockRead, BlockWrite, KvArena,
    digest::{self, Heads},
    offload::{BlockOffload, CopiedBlocks, OffloadStream},
    peer::TransferInFlight,
};
use tracing::{info, warn};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Events, enqueue, join, loads::SharedLoad};
use crate::{
    memory_limit::{self, MemoryShare},
    settings::SettingsError,
};

/// Bytes pinned at a time. Pinning takes up to a second per gibibyte.
const SLICE_BYTES: usize = 1 << 30;
/// [`PinLimits::reserve_bytes`] of a node.
const RESERVE_BYTES: u64 = 2 << 30;
/// Batches in flight.
const BATCHES: usize = 2;
/// Bytes of one batch of saves, rounded up to whole blocks and limited by [`SAVE_BATCH_MAX`]. A
/// sequence that needs a block waits for the copies of up to [`BATCHES`] batches, because a batch
/// that has begun cannot be cancelled. Batches of 32 MiB are copied only 4 % faster.
const SAVE_BATCH_BYTES: usize = 4 << 20;
/// Maximum number of blocks in one batch of saves: [`BATCHES`] batches can be queued at a time.
const SAVE_BATCH_MAX: usize = HOST_SAVES_MAX / BATCHES;
/// Bytes of one batch of a load. The copy takes 0.6 ms, longer than the digests of the previous
/// batch.
const LOAD_BATCH_BYTES: usize = 32 << 20;
/// Maximum number of blocks in one batch of a load.
const LOAD_BATCH_MAX: usize = 128;

/// Host memory of the tier.
#[derive(Clone)]
pub(crate) struct HostMemory {
    /// Slots, as blocks with all heads.
    slots: Arc<KvArena>,
    offload: Arc<dyn BlockOffload>,
    /// Digest of each stored slot.
    digests: Arc<[AtomicU64]>,
}

/// The threads of the tier.
pub(super) struct HostTier {
    /// `None` once dropped.
    saves: Option<Sender<SaveJob>>,
    loads: Option<Sender<Arc<SharedLoad>>>,
    threads: Vec<JoinHandle<()>>,
    /// Thread that pins the memory. Returns the guards that keep the memory pinned.
    pinning: Option<JoinHandle<Vec<Box<dyn Any + Send>>>>,
}

/// Bounds of the memory that a node pins.
#[derive(Clone, Copy, Debug)]
pub(super) struct PinLimits {
    /// This node's share of the container's memory limit.
    share: Option<MemoryShare>,
    /// Number of nodes that may pin memory of this machine at the same time.
    nodes: u32,
    slice_bytes: usize,
    /// Free memory in bytes that pinning leaves to the node's requests and to other processes.
    reserve_bytes: u64,
}

impl PinLimits {
    pub(super) fn of_node(nodes_per_container: u32) -> Self {
        let share = MemoryShare::of_node(nodes_per_container);
        Self {
            share,
            nodes: nodes_per_container,
            slice_bytes: SLICE_BYTES,
            reserve_bytes: RESERVE_BYTES,
        }
    }

    pub(super) fn share(&self) -> Option<MemoryShare> {
        self.share
    }

    /// Checks that a slice of `bytes` leaves the reserve free in the node's share and on the
    /// machine.
    fn check(&self, bytes: u64) -> Result<(), SettingsError> {
        memory_limit::check_more(self.share, bytes + self.reserve_bytes)?;
        // Each of the other nodes may pin a slice after the same check.
        memory_limit::check_more(None, u64::from(self.nodes) * bytes + self.reserve_bytes)
    }
}

/// Pinned memory.
struct Pinned {
    /// Guards that keep the slices pinned.
    slices: Vec<Box<dyn Any + Send>>,
    /// Reason why further slices are not pinned.
    failure: Option<String>,
}

type Copy = Box<dyn TransferInFlight<CopiedBlocks>>;

impl HostMemory {
    /// Reserves memory for `slot_count` blocks of the arena; `None` when its blocks are in host
    /// memory already. Takes no memory before it is pinned.
    pub(super) fn new(
        arena: &KvArena,
        slot_count: u32,
    ) -> Option<Result<Self, kernels::ArenaError>> {
        let offload = arena.offload()?;
        let slots = KvArena::host(arena.layout(), slot_count);
        Some(slots.map(|slots| {
            let digests = (0..slot_count).map(|_| AtomicU64::new(0)).collect();
            Self { slots, offload, digests }
        }))
    }

    fn store_digest(&self, job: &SaveJob, kv: u64) {
        self.digests[job.slot as usize].store(digest(&job.contents, kv), Ordering::Relaxed);
    }

    /// Returns whether a block copied from the slot is the block that was saved. `kv`: the digest
    /// of the copy's KV.
    fn is_intact(&self, slot: SlotIndex, contents: &BlockContents, kv: u64) -> bool {
        self.digests[slot as usize].load(Ordering::Relaxed) == digest(contents, kv)
    }

    /// Copies a slot to `to`.
    ///
    /// # Errors
    /// When the bytes are not those that were saved.
    pub(super) fn copy(
        &self,
        slot: SlotIndex,
        contents: &BlockContents,
        to: &mut [u8],
    ) -> Result<(), String> {
        let read = self.slots.read(BlockId(slot));
        let copied = read.and_then(|block| block.copy_to_host(to));
        copied.map_err(|error| error.to_string())?;
        let kv = digest::of_block(&Heads::all(self.slots.layout()), 0, to);
        match self.is_intact(slot, contents, kv) {
            true => Ok(()),
            false => Err(format!("slot {slot} of the host tier is damaged")),
        }
    }
}

impl HostTier {
    pub(super) fn start(
        memory: &HostMemory,
        limits: PinLimits,
        arena: &Arc<KvArena>,
        events: &Events,
        is_stopping: &Arc<AtomicBool>,
    ) -> io::Result<Self> {
        let failed = |error: String| io::Error::other(error);
        // The core starts at most this many saves and loads, so no queue is ever full.
        let (saves, queued) = bounded::<SaveJob>(HOST_SAVES_MAX);
        let (loads, queued_loads) = bounded::<Arc<SharedLoad>>(LOADS_MAX);
        // Declared before the queue, so that it is dropped later: if a thread cannot start, the
        // queue closes before the other threads are joined.
        let mut this =
            Self { saves: Some(saves), loads: Some(loads), threads: Vec::new(), pinning: None };
        let mut saver = Saver {
            memory: memory.clone(),
            arena: Arc::clone(arena),
            events: events.clone(),
            stream: memory.offload.stream().map_err(failed)?,
            in_flight: VecDeque::new(),
        };
        this.spawn("baton-tier-save", move || saver.run(&queued))?;
        let mut loader = Loader {
            memory: memory.clone(),
            arena: Arc::clone(arena),
            events: events.clone(),
            stream: memory.offload.stream().map_err(failed)?,
        };
        let load = move || {
            for job in queued_loads {
                loader.work_on(&job);
            }
        };
        this.spawn("baton-tier-load", load)?;
        let (memory, events, is_stopping) = (memory.clone(), events.clone(), is_stopping.clone());
        let pin = move || {
            let Pinned { slices, failure } = pin(&memory, limits, &events, &is_stopping);
            if let Some(failure) = failure {
                warn!("{failure}");
            }
            slices
        };
        let pinning = thread::Builder::new().name("baton-tier-pin".to_owned()).spawn(pin)?;
        this.pinning = Some(pinning);
        Ok(this)
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.threads.push(thread::Builder::new().name(name.to_owned()).spawn(work)?);
        Ok(())
    }

    /// Queues a save. Never waits. Returns whether a thread will report its end.
    pub(super) fn save(&self, job: SaveJob) -> bool {
        enqueue(self.saves.as_ref(), job)
    }

    /// Queues the blocks of a load that this tier holds. Never waits. Returns the load's result if
    /// no thread will.
    pub(super) fn load(&self, job: &Arc<SharedLoad>) -> Option<TierEvent> {
        match enqueue(self.loads.as_ref(), Arc::clone(job)) {
            true => None,
            false => job.refuse(Tier::Host),
        }
    }
}

impl Drop for HostTier {
    /// Ends and joins the threads, then unpins the memory.
    fn drop(&mut self) {
        (self.saves, self.loads) = (None, None);
        self.threads.drain(..).for_each(join);
        if self.pinning.take().is_some_and(|thread| thread.join().is_err()) {
            warn!("the thread that pins the host tier panicked");
        }
    }
}

/// Pins the memory slice by slice, and reports each slice to the core. Stops before the memory is
/// used up, because the kernel would then kill the process.
fn pin(
    memory: &HostMemory,
    limits: PinLimits,
    events: &Events,
    is_stopping: &AtomicBool,
) -> Pinned {
    let slots = memory.slots.block_count();
    let block_bytes = memory.slots.block_bytes();
    let slice = u32::try_from(limits.slice_bytes / block_bytes).unwrap_or(u32::MAX).max(1);
    let bytes_of = |slots: u32| u64::from(slots) * block_bytes as u64;
    let mut pinned = Pinned { slices: Vec::new(), failure: None };
    for first in (0..slots).step_by(slice as usize) {
        let count = slice.min(slots - first);
        let has_room = limits.check(bytes_of(count)).map_err(|error| error.to_string());
        match has_room.and_then(|()| memory.offload.pin(&memory.slots, first, count)) {
            Ok(slice) => pinned.slices.push(slice),
            Err(error) => {
                let bytes = bytes_of(first);
                pinned.failure = Some(format!(
                    "cannot pin more than {bytes} bytes of tier.host_memory: {error}; expected free memory, and limits of \
                     locked memory (ulimit -l) and of the container's memory above tier.host_memory"
                ));
                return pinned;
            }
        }
        let grown = TierEvent::Grown { tier: Tier::Host, slots: count };
        if is_stopping.load(Ordering::Relaxed) || !events.send(grown) {
            return pinned;
        }
    }
    info!(slots, "pinned the host tier");
    pinned
}

/// The thread that saves.
struct Saver {
    memory: HostMemory,
    arena: Arc<KvArena>,
    events: Events,
    stream: Box<dyn OffloadStream>,
    in_flight: VecDeque<SavesInFlight>,
}

/// Returns the maximum number of blocks in one batch of saves.
fn save_batch(block_bytes: usize) -> usize {
    SAVE_BATCH_BYTES.div_ceil(block_bytes).min(SAVE_BATCH_MAX)
}

/// Saves of one batch, in the order of its blocks.
struct SavesInFlight {
    jobs: Vec<SaveJob>,
    /// Digests of the blocks' KV.
    digests: Vec<u64>,
    copy: Copy,
}

impl Saver {
    fn run(&mut self, jobs: &Receiver<SaveJob>) {
        let batch_max = save_batch(self.arena.block_bytes());
        loop {
            let mut first = None;
            if self.in_flight.is_empty() {
                match jobs.recv() {
                    Ok(job) => first = Some(job),
                    Err(_) => return,
                }
            }
            let queued = first.into_iter().chain(jobs.try_iter());
            // Cancelled saves do not wait for the copies of a batch.
            let wanted = queued.filter(|job| !self.fail_cancelled(job));
            let batch: Vec<_> = wanted.take(batch_max).collect();
            let has_started = !batch.is_empty();
            if has_started {
                self.start(batch);
            }
            if (self.in_flight.len() >= BATCHES || !has_started) && !self.finish_oldest() {
                return;
            }
        }
    }

    /// Reports a cancelled save as failed. Returns whether the save is cancelled.
    fn fail_cancelled(&self, job: &SaveJob) -> bool {
        let is_cancelled = self.events.is_cancelled(job.job);
        if is_cancelled {
            self.events.send(TierEvent::SaveFailed { job: job.job });
        }
        is_cancelled
    }

    fn start(&mut self, batch: Vec<SaveJob>) {
        let (mut jobs, mut from, mut to) = (Vec::new(), Vec::new(), Vec::new());
        for job in batch {
            let SaveSource::Block(block) = job.source else {
                unreachable!("the host tier saves blocks of the arena");
            };
            let guards = self
                .arena
                .read(block)
                .and_then(|block| Ok((block, self.memory.slots.write(BlockId(job.slot))?)));
            match guards {
                Ok((block, slot)) => {
                    jobs.push(job);
                    from.push(block);
                    to.push(slot);
                }
                Err(error) => self.failed(&[job], &error),
            }
        }
        if jobs.is_empty() {
            return;
        }
        let digests = BlockRead::digests(&from).map_err(|error| error.to_string());
        let started = digests.and_then(|digests| Ok((digests, self.stream.copy(from, to)?)));
        match started {
            Ok((digests, copy)) => self.in_flight.push_back(SavesInFlight { jobs, digests, copy }),
            Err(error) => self.failed(&jobs, &error),
        }
    }

    /// Waits for the oldest batch. Returns false when the node stops.
    fn finish_oldest(&mut self) -> bool {
        let Some(SavesInFlight { jobs, digests, copy }) = self.in_flight.pop_front() else {
            return true;
        };
        // Release the blocks before the core gets the result.
        if let Err(error) = copy.finish().map(drop) {
            self.failed(&jobs, &error);
            return true;
        }
        jobs.into_iter().zip(digests).all(|(job, kv)| {
            self.memory.store_digest(&job, kv);
            self.events.send(TierEvent::Saved { job: job.job })
        })
    }

    fn failed(&self, jobs: &[SaveJob], error: &dyn std::fmt::Display) {
        warn!(%error, blocks = jobs.len(), "cannot save blocks to host memory");
        jobs.iter().for_each(|job| _ = self.events.send(TierEvent::SaveFailed { job: job.job }));
    }
}

/// The thread that loads.
struct Loader {
    memory: HostMemory,
    arena: Arc<KvArena>,
    events: Events,
    stream: Box<dyn OffloadStream>,
}

impl Loader {
    fn work_on(&mut self, job: &SharedLoad) {
        job.begin();
        let blocks = LOAD_BATCH_BYTES / self.arena.block_bytes();
        let mut in_flight: VecDeque<(&[usize], Copy)> = VecDeque::new();
        let indices = job.on(Tier::Host);
        for batch in indices.chunks(blocks.clamp(1, LOAD_BATCH_MAX)) {
            if in_flight.len() >= BATCHES {
                self.finish(job, in_flight.pop_front());
            }
            if !job.is_wanted(batch[0]) {
                break;
            }
            match self.start(job, batch) {
                Ok(copy) => in_flight.push_back((batch, copy)),
                Err(error) => {
                    warn!(%error, "cannot load blocks from host memory");
                    job.fail(batch[0]);
                    break;
                }
            }
        }
        in_flight.into_iter().for_each(|batch| self.finish(job, Some(batch)));
        if let Some(loaded) = job.end() {
            self.events.send(loaded);
        }
    }

    fn start(&mut self, job: &SharedLoad, batch: &[usize]) -> Result<Copy, String> {
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for &index in batch {
            let block = job.block(index);
            let slot = self.memory.slots.read(BlockId(block.slot));
            from.push(slot.map_err(|error| error.to_string())?);
            to.push(self.arena.write(block.block).map_err(|error| error.to_string())?);
        }
        self.stream.copy(from, to)
    }

    /// Waits for a batch, and compares its blocks with the digests of their saves.
    fn finish(&self, job: &SharedLoad, batch: Option<(&[usize], Copy)>) {
        let Some((indices, copy)) = batch else { return };
        let digests = copy.finish().and_then(|blocks| {
            let (_, mut written): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
            BlockWrite::digests(&mut written).map_err(|error| error.to_string())
        });
        let digests = match digests {
            Ok(digests) => digests,
            Err(error) => {
                warn!(%error, "cannot load blocks from host memory");
                return job.fail(indices[0]);
            }
        };
        for (&index, kv) in indices.iter().zip(digests) {
            let block = job.block(index);
            if !self.memory.is_intact(block.slot, &block.contents, kv) {
                warn!(slot = block.slot, "a block of the host tier is damaged and computed again");
                return job.fail(index);
            }
        }
    }
}

/// Returns the digest of a block: over the digest of its KV and the inputs of its key.
fn digest(contents: &BlockContents, kv: u64) -> u64 {
    let BlockContents { key, parent, tokens, group: _ } = contents;
    let mut about = Vec::with_capacity(96);
    about.extend(key.0.to_le_bytes());
    about.extend(parent.0.to_le_bytes());
    tokens.iter().for_each(|token| about.extend(token.to_le_bytes()));
    xxh3_64_with_seed(&about, kv)
}

#[cfg(test)]
mod tests;
