//! The connection between one of our parts and one of the peer's: communicators and staging slots.

use std::{
    mem, slice,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    super::{
        context::{Context, Stream},
        kv::DeviceKv,
        memory::Range,
        moves::{BlockRows, Direction, places_of},
        nccl::{Communicator, CommunicatorOptions, Nccl, NcclError, Piece, SendOrReceive},
        parallel::in_parallel,
        staging::{SlotRange, StagingMemory},
        stream_progress::StreamMark,
    },
    PeerExchange, SLOT_BYTES, SLOTS,
    invitation::LANES_MAX,
    locked, message_of,
    operations::Marks,
    watchdog::{OldestOperation, POLL_INTERVAL, StuckDetector, StuckLimits},
};
use crate::{
    layout::BlockId,
    peer::{ChannelEnd, WaitLimit},
};

/// Time-out for launching an operation. A launch takes microseconds. But while another channel is
/// aborted, the driver may block on an operation of a third channel until that channel is aborted
/// as well.
const LAUNCH_MAX: Duration = Duration::from_secs(4);
/// Time-out of an abort. Aborts took 0.4 to 0.7 s with a dead or a stopped peer.
const ABORT_MAX: Duration = Duration::from_secs(10);
/// Longest usual time of a launch. A launch that takes longer is blocked in the driver, which waits
/// for the GPU. Forward passes in the streams do not delay a launch for longer, unless prefill
/// steps have many thousand tokens.
const LAUNCH_USUAL: Duration = Duration::from_millis(200);
/// Size of the messages that are exchanged before the first block, so that no block waits for the
/// connection.
const CONNECT_BYTES: usize = 256;
/// Time-out for connecting. While a channel connects, an abort of another channel waits, because
/// the abort waits for the whole GPU.
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// The watchdog aborts a blocked connection attempt after 2.25 s, or after 0.5 s while another
/// thread is blocked in the driver. The pair then falls back to another transport.
const CONNECT: StuckLimits = StuckLimits { polls_max: 45, blocking_polls_max: 10 };

/// Largest number of links per GPU, which bounds their memory. A host with eight GPUs needs fewer.
const STAGINGS_MAX: usize = 16;

/// State shared by all links of a GPU.
#[derive(Debug, Default)]
pub(super) struct LinkGpu {
    /// Held while an operation of any channel is launched, never while waiting for a peer.
    launching: Mutex<()>,
    /// Staging memory of channels that have ended.
    spare: Mutex<Vec<StagingMemory>>,
    /// Number of allocated stagings: in use, spare, or lost to an abort that hung.
    stagings: AtomicUsize,
}

impl LinkGpu {
    fn staging(&self, kv: &DeviceKv) -> Result<StagingMemory, String> {
        if let Some(staging) = locked(&self.spare).pop() {
            return Ok(staging);
        }
        let one_more = |made: usize| (made < STAGINGS_MAX).then_some(made + 1);
        let stagings = &self.stagings;
        stagings.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).map_err(|made| {
            format!("cannot open another link: {made} links use this GPU; expected at most {STAGINGS_MAX}")
        })?;
        // Large enough for any later channel, which may move other parts of a block.
        let bytes = SLOT_BYTES.max(kv.layout().block_bytes()).max(2 * CONNECT_BYTES);
        StagingMemory::new(kv, SLOTS, bytes, LANES_MAX).map_err(|error| {
            stagings.fetch_sub(1, Ordering::Relaxed);
            message_of(error)
        })
    }
}

/// One of our parts, and the heads of its blocks that the peer's part holds as well.
#[derive(Debug)]
pub(super) struct LinkEnd {
    pub kv: Arc<DeviceKv>,
    pub gpu: Arc<LinkGpu>,
    pub rows: BlockRows,
    pub end: ChannelEnd,
    /// How received blocks are scattered.
    pub scatter: Direction,
}

/// Streams whose last work has no mark yet.
#[derive(Debug, Default)]
struct UnmarkedStreams {
    lanes: Vec<usize>,
    copies: bool,
}

/// Connection of one of our parts with one of the peer's. Both ends launch the same operations in
/// the same order, each on the next lane (a communicator and its stream).
#[derive(Debug)]
pub(super) struct NcclLink {
    own: LinkEnd,
    communicators: Arc<Communicators>,
    /// One per communicator, with high priority: an operation occupies SMs of one GPU until it has
    /// also started on the other.
    streams: Vec<Stream<PeerExchange>>,
    next: usize,
    /// Rate of the fastest probe transfer, in bytes/s.
    probed_rate: u64,
    /// Streams whose last work has no mark yet.
    unmarked: UnmarkedStreams,
    /// `None` once it was returned.
    staging: Option<StagingMemory>,
}

/// The communicators of a link; empty once they were aborted. They have a lock of their own,
/// because an abort must not wait for a thread that launches: that thread may be blocked in the
/// driver, and the driver on the operation that the abort ends.
#[derive(Debug, Default)]
pub(super) struct Communicators {
    /// Whether an abort has started.
    aborting: AtomicBool,
    made: Mutex<Vec<Communicator>>,
}

impl Communicators {
    /// Aborts all communicators and their kernels.
    pub(super) fn abort_all(all: &[Arc<Self>]) -> Result<(), String> {
        all.iter().for_each(|these| these.aborting.store(true, Ordering::Release));
        let communicators =
            all.iter().flat_map(|these| mem::take(&mut *locked(&these.made))).collect();
        Communicator::abort_all(communicators, ABORT_MAX).map(drop).map_err(message_of)
    }
}

const STAGING_LIVES: &str = "only an abort takes the staging";

impl NcclLink {
    /// Creates a communicator for each of `options`, together with the peer.
    pub(super) fn join(
        own: LinkEnd,
        nccl: &Arc<Nccl>,
        options: &[CommunicatorOptions],
        limit: WaitLimit<'_>,
    ) -> Result<Self, String> {
        own.kv.context().bind().map_err(message_of)?;
        let staging = Some(own.gpu.staging(&own.kv)?);
        // Dropping the link aborts it, also after an error below.
        let (communicators, streams) = (Arc::default(), Vec::with_capacity(options.len()));
        let mut link = Self {
            own,
            communicators,
            streams,
            next: 0,
            probed_rate: 0,
            unmarked: UnmarkedStreams::default(),
            staging,
        };
        // In parallel: each one takes 0.1 s.
        let context = link.own.kv.context();
        let communicators = in_parallel("nccl-create", options, |options, _| {
            Communicator::new(nccl, context, *options, limit).map_err(message_of)
        })?;
        for communicator in communicators {
            link.add_lane(communicator, limit)?;
        }
        Ok(link)
    }

    /// Exchanges a few bytes over another communicator, which makes NCCL connect, and probes it. No
    /// other thread uses the link yet, so no shared lock is held while waiting for the peer.
    ///
    /// [`LinkGpu::launching`] is not held either. So the peer may connect two channels in another
    /// order. This is safe: each exchange has its own stream with nothing after it, and its kernel
    /// fits on the GPU with the others.
    fn add_lane(&mut self, communicator: Communicator, limit: WaitLimit<'_>) -> Result<(), String> {
        let stream = Stream::urgent(self.own.kv.context()).map_err(message_of)?;
        let peer = 1 - communicator.rank();
        // From here on an abort of the link includes this communicator.
        locked(&self.communicators.made).push(communicator);
        self.streams.push(stream);
        let communicators = Arc::clone(&self.communicators);
        let (launched, on_launched) = mpsc::channel();
        thread::scope(|scope| {
            // The connecting thread may be blocked in the driver, and the driver on this exchange.
            let context = Arc::clone(self.own.kv.context());
            let watch = move || {
                if on_launched.recv().is_err() {
                    return;
                }
                let (exchange, mut detector) =
                    (OldestOperation { number: 0, is_launched: true }, StuckDetector::new(CONNECT));
                let is_blocked = || context.calls().any_is_overdue(Instant::now());
                while on_launched.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    if detector.is_stuck(Some(exchange), is_blocked).is_some() {
                        // `connect` reports the failure.
                        let _ = Communicators::abort_all(slice::from_ref(&communicators));
                        return;
                    }
                }
            };
            let named = thread::Builder::new().name("nccl-connect".to_owned());
            named.spawn_scoped(scope, watch).map_err(message_of)?;
            // Dropping the sender ends the watchdog.
            self.connect(peer, limit, launched)
        })?;
        match self.communicators.aborting.load(Ordering::Acquire) {
            true => Err(NcclError::Ended.to_string()),
            false => Ok(()),
        }
    }

    /// Connects the last communicator on its stream, then sends a slot to the receiver and measures
    /// the rate. Sends to `launched` once the first exchange is in the stream.
    fn connect(
        &mut self,
        peer: u32,
        limit: WaitLimit<'_>,
        launched: mpsc::Sender<()>,
    ) -> Result<(), String> {
        let deadline = limit.deadline.min(Instant::now() + CONNECT_MAX);
        let limit = WaitLimit { deadline, ..limit };
        let part = |offset, bytes| Some((offset, bytes));
        let (out, back) = (part(0, CONNECT_BYTES), part(CONNECT_BYTES, CONNECT_BYTES));
        let mark = self.exchange_slots(peer, (out, back), limit)?;
        // Fails only when the watchdog has aborted the link.
        let _ = launched.send(());
        await_mark(&mark, limit, "the peer did not connect in time")?;
        let (begin, slot) = (Instant::now(), part(0, SLOT_BYTES));
        let probe = match self.own.end {
            ChannelEnd::Sender => (slot, None),
            ChannelEnd::Receiver => (None, slot),
        };
        let mark = self.exchange_slots(peer, probe, limit)?;
        await_mark(&mark, limit, "the peer connected, but the probe transfer did not end in time")?;
        let rate = (SLOT_BYTES as f64 / begin.elapsed().as_secs_f64()) as u64;
        self.probed_rate = self.probed_rate.max(rate);
        Ok(())
    }

    /// Launches a send and a receive of parts of the slots on the last communicator and marks the
    /// end.
    fn exchange_slots(
        &mut self,
        peer: u32,
        (out, back): (Option<SlotRange>, Option<SlotRange>),
        limit: WaitLimit<'_>,
    ) -> Result<StreamMark, String> {
        let stream = self.streams.last().expect("the caller pushed a stream");
        let staging = self.staging.as_mut().expect(STAGING_LIVES);
        let part = |(offset, bytes)| SendOrReceive {
            peer,
            piece: Piece::new(staging.memory(), offset, bytes),
        };
        let (sends, receives) = (out.map(part), back.map(part));
        staging.await_all(stream).map_err(message_of)?;
        {
            let mut communicators = locked(&self.communicators.made);
            let communicator =
                communicators.last_mut().ok_or(NcclError::Ended).map_err(message_of)?;
            communicator
                .exchange(sends.as_slice(), receives.as_slice(), stream, limit)
                .map_err(message_of)?;
        }
        staging.mark_lane(self.streams.len() - 1, stream).map_err(message_of)
    }

    /// Launches the transfer of this link's part of the blocks, which fit into one slot. Blocks
    /// that are not staged are contiguous.
    ///
    /// # Safety
    /// The blocks are borrowed until the next [mark](Self::mark) is reached, or
    /// [`drain_all`](Self::drain_all) has returned.
    pub(super) unsafe fn launch(
        &mut self,
        ids: &[BlockId],
        is_staged: bool,
    ) -> Result<(), NcclError> {
        let Self { own, communicators, streams, next, unmarked, staging, .. } = self;
        let LinkEnd { kv, gpu, rows, end, scatter } = own;
        let staging = staging.as_mut().expect(STAGING_LIVES);
        let _call = kv.context().calls().begin(LAUNCH_USUAL);
        kv.context().bind()?;
        let lane = *next % streams.len();
        *next = lane + 1;
        let stream = &streams[lane];
        kv.delay_in_tests(stream)?;
        kv.delay_in_tests(staging.copies())?;
        let exchange = |range: &Range, (offset, bytes): SlotRange| -> Result<(), NcclError> {
            let _launching = locked(&gpu.launching);
            let mut made = locked(&communicators.made);
            let communicator = made.get_mut(lane).ok_or(NcclError::Ended)?;
            let peer = 1 - communicator.rank();
            let piece = [SendOrReceive { peer, piece: Piece::new(range, offset, bytes) }];
            let (sends, receives): (&[_], &[_]) = match *end {
                ChannelEnd::Sender => (&piece, &[]),
                ChannelEnd::Receiver => (&[], &piece),
            };
            let cancelled = || communicators.aborting.load(Ordering::Acquire);
            let limit = WaitLimit { deadline: Instant::now() + LAUNCH_MAX, cancelled: &cancelled };
            communicator.exchange(sends, receives, stream, limit).map(drop)
        };
        // A part of each block is strided and always needs staging.
        let is_staged = is_staged || !rows.are_whole();
        // A staged receive ends with the copies that follow it.
        match (is_staged, *end) {
            (true, ChannelEnd::Receiver) => unmarked.copies = true,
            _ if unmarked.lanes.contains(&lane) => {}
            _ => unmarked.lanes.push(lane),
        }
        match (is_staged, *end) {
            (false, _) => {
                let mut places = places_of(ids, rows.block_bytes());
                let place = places.next().unwrap_or_default();
                assert!(places.next().is_none(), "blocks that are not staged are contiguous");
                exchange(kv.data(), place)
            }
            // SAFETY: the blocks are borrowed until the mark is reached, so nothing writes them
            // before (`# Safety`).
            (true, ChannelEnd::Sender) => unsafe { staging.send(kv, rows, ids, stream, exchange) },
            // SAFETY: the blocks are borrowed for writing until the mark is reached, so nothing
            // else accesses them before (`# Safety`).
            (true, ChannelEnd::Receiver) => unsafe {
                staging.receive(kv, rows, ids, *scatter, stream, exchange)
            },
        }
    }

    /// Marks the end of everything launched so far.
    pub(super) fn mark(&mut self) -> Result<Marks, NcclError> {
        let context = self.own.kv.context();
        let _call = context.calls().begin(LAUNCH_USUAL);
        context.bind()?;
        let UnmarkedStreams { lanes, copies } = mem::take(&mut self.unmarked);
        let staging = self.staging.as_mut().expect(STAGING_LIVES);
        let mut marks = Vec::with_capacity(lanes.len() + 1);
        for lane in lanes {
            marks.push(staging.mark_lane(lane, &self.streams[lane])?);
        }
        if copies {
            marks.push(staging.mark_copies()?);
        }
        Ok(marks)
    }

    /// Returns the rate of the fastest probe transfer, in bytes/s.
    pub(super) fn probed_rate(&self) -> u64 {
        self.probed_rate
    }

    pub(super) fn communicators(&self) -> &Arc<Communicators> {
        &self.communicators
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        self.own.kv.context()
    }

    /// Waits for the copies. `aborted` is the outcome of the preceding abort of the communicators:
    /// copies that waited for an aborted operation run now. After `Ok` no copy is in flight.
    pub(super) fn drain_all(links: &mut [Self], aborted: Result<(), String>) -> Result<(), String> {
        let mut drained = aborted;
        let mut kept = Vec::with_capacity(links.len());
        for link in links {
            let Some(mut staging) = link.staging.take() else { continue };
            drained = drained
                .and_then(|()| link.own.kv.context().bind().map_err(message_of))
                .and_then(|()| staging.drain(&link.streams, ABORT_MAX));
            kept.push((Arc::clone(&link.own.gpu), staging, mem::take(&mut link.streams)));
        }
        if drained.is_err() {
            // A stuck operation may still use the staging memory and the streams, so they are
            // leaked.
            mem::forget(kept);
            return drained;
        }
        for (gpu, staging, _) in kept {
            locked(&gpu.spare).push(staging);
        }
        Ok(())
    }
}

/// Waits for the end of an exchange with the peer; fails with `late` at the deadline.
fn await_mark(mark: &StreamMark, limit: WaitLimit<'_>, late: &str) -> Result<(), String> {
    while !mark.is_reached() {
        if Instant::now() >= limit.deadline || (limit.cancelled)() {
            return Err(late.to_owned());
        }
        thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

impl Drop for NcclLink {
    fn drop(&mut self) {
        // There is no caller to which an error could be returned.
        let ended = Communicators::abort_all(slice::from_ref(&self.communicators));
        let _ = Self::drain_all(slice::from_mut(self), ended);
    }
}
