//! What a channel has between one part of ours and one of the peer's: communicators, and slots.

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
        moves::{Rows, Way, places_of},
        nccl::{Communicator, CommunicatorOptions, Move, Nccl, NcclError, Piece},
        staging::{Place, Staging},
    },
    PeerExchange, SLOT_BYTES, SLOTS,
    invitation::LANES_MAX,
    locked,
    operations::Marks,
    watch::{LOOK, Looks, Oldest, Stay},
    words,
};
use crate::{
    layout::BlockId,
    peer::{End, Patience},
};

/// What needs no peer is put into a stream within microseconds; but beside the abort of another channel the
/// driver may wait for what is stuck on a third one, until that one is aborted as well.
const PUT_MAX: Duration = Duration::from_secs(4);
/// Aborts took 0.4 to 0.7 s with a dead or a stopped peer.
const ABORT_MAX: Duration = Duration::from_secs(10);
/// Whoever puts for longer waits for the driver, which waits for the GPU. Forwards that are in its streams take no longer
/// unless prompts are read in steps of many thousand tokens.
const PUT_USUAL: Duration = Duration::from_millis(200);
/// Sent once to and fro before the first block, so that no block waits for the connection.
const GREETING_BYTES: usize = 256;
/// Both ends have connected by then. An abort of another channel, which waits for the whole GPU, waits for
/// this as well.
const GREETING_MAX: Duration = Duration::from_secs(2);
/// A greeting, 2.25 s, which leaves something to whoever looks at it, and 0.5 s. The pair takes another carrier then.
const GREETING: Looks = Looks { stuck: 45, holds_up: 10 };

/// Links of a GPU at a time, and so the memory that they may take: more than a host with eight of them
/// has use for, to and from each of the others.
const STAGINGS_MAX: usize = 16;

/// What all links of a GPU share.
#[derive(Debug, Default)]
pub(super) struct Gpu {
    /// Held by whoever puts an operation of any channel into a stream; never by who waits for a peer.
    issuing: Mutex<()>,
    /// Of channels that have ended.
    spare: Mutex<Vec<Staging>>,
    /// In use, spare, or lost with an abort that did not come back.
    stagings: AtomicUsize,
}

impl Gpu {
    fn staging(&self, kv: &DeviceKv) -> Result<Staging, String> {
        if let Some(staging) = locked(&self.spare).pop() {
            return Ok(staging);
        }
        let room = |made: usize| (made < STAGINGS_MAX).then_some(made + 1);
        let stagings = &self.stagings;
        stagings.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).map_err(|made| {
            format!("{made} channels have slots on this GPU; allowed are {STAGINGS_MAX}")
        })?;
        // Whatever part of a block another channel moves: one fits.
        let bytes = SLOT_BYTES.max(kv.layout().block_bytes()).max(2 * GREETING_BYTES);
        Staging::new(kv, SLOTS, bytes, LANES_MAX).map_err(|error| {
            stagings.fetch_sub(1, Ordering::Relaxed);
            words(error)
        })
    }
}

/// One of our parts, and what of its blocks one of the peer's has as well.
#[derive(Debug)]
pub(super) struct Half {
    pub kv: Arc<DeviceKv>,
    pub gpu: Arc<Gpu>,
    pub rows: Rows,
    pub end: End,
    /// How received blocks come to their places.
    pub scatter: Way,
}

/// Streams in which something has been put, and no mark behind it.
#[derive(Debug, Default)]
struct Ends {
    lanes: Vec<usize>,
    copies: bool,
}

/// Both ends put the same operations in the same order, each into the next lane.
#[derive(Debug)]
pub(super) struct Link {
    half: Half,
    communicators: Arc<Communicators>,
    /// Each communicator's. They are urgent: an operation holds multiprocessors of both GPUs from when it has begun
    /// on one until it has on the other.
    streams: Vec<Stream<PeerExchange>>,
    next: usize,
    /// Where the ends of what was put last lie.
    unmarked: Ends,
    /// `None` once it was given back.
    staging: Option<Staging>,
}

/// Those of a link; none once they were ended. By themselves, for whoever ends them does not wait for whoever
/// puts something into a stream: that one may wait for the driver, and the driver for what is to be ended.
#[derive(Debug, Default)]
pub(super) struct Communicators {
    /// They are to be ended: nobody waits any longer for what they do.
    ending: AtomicBool,
    made: Mutex<Vec<Communicator>>,
}

impl Communicators {
    /// Ends all of these, and kernels of theirs that wait in vain.
    pub fn end_all(all: &[Arc<Self>]) -> Result<(), String> {
        all.iter().for_each(|these| these.ending.store(true, Ordering::Release));
        let communicators =
            all.iter().flat_map(|these| mem::take(&mut *locked(&these.made))).collect();
        Communicator::abort_all(communicators, ABORT_MAX).map(drop).map_err(words)
    }
}

const LIVES: &str = "it is taken by the end alone";

impl Link {
    /// With a communicator for each of the options, made together with the peer.
    pub fn join(
        half: Half,
        nccl: &Arc<Nccl>,
        options: &[CommunicatorOptions],
        patience: Patience<'_>,
    ) -> Result<Self, String> {
        half.kv.context().bind().map_err(words)?;
        let staging = Some(half.gpu.staging(&half.kv)?);
        // Ended when it is dropped, whatever comes.
        let (communicators, streams) = (Arc::default(), Vec::with_capacity(options.len()));
        let mut link =
            Self { half, communicators, streams, next: 0, unmarked: Ends::default(), staging };
        // All at the same time: each takes a while.
        let communicators = thread::scope(|scope| {
            let make = |options: CommunicatorOptions| {
                let context = link.half.kv.context();
                move || Communicator::new(nccl, context, options, patience).map_err(words)
            };
            let threads = options.iter().map(|options| scope.spawn(make(*options)));
            let threads: Vec<_> = threads.collect();
            let made = threads.into_iter().map(|thread| {
                let made = thread.join();
                made.unwrap_or_else(|_| Err("a thread that joined panicked".to_owned()))
            });
            let made: Vec<Result<Communicator, String>> = made.collect();
            made.into_iter().collect::<Result<Vec<_>, _>>()
        })?;
        for communicator in communicators {
            link.add_lane(communicator, patience)?;
        }
        Ok(link)
    }

    /// Sends a few bytes to and fro by another communicator, which connects. Nobody else has the link yet, so
    /// no lock that others need is held while the peer is waited for, which may never come.
    ///
    /// Nor is [`Gpu::issuing`], for others would wait as long. So the greetings of two channels may be put in
    /// another order at the peer: each has a stream of its own, in which nothing follows it before it is
    /// over, and its kernel has room beside what the others run.
    fn add_lane(
        &mut self,
        communicator: Communicator,
        patience: Patience<'_>,
    ) -> Result<(), String> {
        let stream = Stream::urgent(self.half.kv.context()).map_err(words)?;
        let peer = 1 - communicator.rank();
        // From now on it is ended with the others.
        locked(&self.communicators.made).push(communicator);
        self.streams.push(stream);
        let communicators = Arc::clone(&self.communicators);
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            // Whoever greets may be waiting for the driver, and the driver for the greeting.
            let context = Arc::clone(self.half.kv.context());
            let watch = move || {
                if told.recv().is_err() {
                    return;
                }
                let (greeting, mut stay) =
                    (Oldest { number: 0, is_put: true }, Stay::new(GREETING));
                let is_held_up = || context.calls().any_is_late(Instant::now());
                while told.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                    if stay.is_too_long(Some(greeting), is_held_up).is_some() {
                        // The greeting says why.
                        let _ = Communicators::end_all(slice::from_ref(&communicators));
                        return;
                    }
                }
            };
            let named = thread::Builder::new().name("nccl-greeting".to_owned());
            named.spawn_scoped(scope, watch).map_err(words)?;
            // Dropped when it is over, whatever came of it.
            let begun = tell;
            self.greet(peer, patience, &begun)
        })?;
        match self.communicators.ending.load(Ordering::Acquire) {
            true => Err(NcclError::Ended.to_string()),
            false => Ok(()),
        }
    }

    /// By the last communicator and its stream; tells when the greeting is in the stream.
    fn greet(
        &mut self,
        peer: u32,
        patience: Patience<'_>,
        begun: &mpsc::Sender<()>,
    ) -> Result<(), String> {
        let stream = self.streams.last().expect("it has one by now");
        let staging = self.staging.as_mut().expect(LIVES);
        let to_peer =
            |offset| Move { peer, piece: Piece::new(staging.memory(), offset, GREETING_BYTES) };
        let (out, back) = (to_peer(0), to_peer(GREETING_BYTES));
        staging.await_all(stream).map_err(words)?;
        {
            let mut communicators = locked(&self.communicators.made);
            let communicator = communicators.last_mut().ok_or(NcclError::Ended).map_err(words)?;
            communicator.exchange(&[out], &[back], stream, patience).map_err(words)?;
        }
        // Fails when the watch has gone, which only the end of this makes it.
        let _ = begun.send(());
        let mark = staging.mark_lane(self.streams.len() - 1, stream).map_err(words)?;
        let deadline = patience.deadline.min(Instant::now() + GREETING_MAX);
        while !mark.is_reached() {
            if Instant::now() >= deadline || (patience.given_up)() {
                return Err("the other end did not greet in time".to_owned());
            }
            thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Puts the part of these blocks that goes here into the streams. They are no more than a slot takes;
    /// those that are not to be staged lie together.
    ///
    /// # Safety
    /// The blocks are borrowed until the next [mark](Self::mark) is seen, or [`clear_all`](Self::clear_all) has
    /// returned.
    pub unsafe fn put(&mut self, ids: &[BlockId], is_staged: bool) -> Result<(), NcclError> {
        let Self { half, communicators, streams, next, unmarked, staging } = self;
        let Half { kv, gpu, rows, end, scatter } = half;
        let staging = staging.as_mut().expect(LIVES);
        let _call = kv.context().calls().begin(PUT_USUAL);
        kv.context().bind()?;
        let lane = *next % streams.len();
        *next = lane + 1;
        let stream = &streams[lane];
        kv.pass_time(stream)?;
        kv.pass_time(staging.copies())?;
        let exchange = |range: &Range, (offset, bytes): Place| -> Result<(), NcclError> {
            let _issuing = locked(&gpu.issuing);
            let mut made = locked(&communicators.made);
            let communicator = made.get_mut(lane).ok_or(NcclError::Ended)?;
            let peer = 1 - communicator.rank();
            let piece = [Move { peer, piece: Piece::new(range, offset, bytes) }];
            let (sends, receives): (&[_], &[_]) = match *end {
                End::Sender => (&piece, &[]),
                End::Receiver => (&[], &piece),
            };
            let given_up = || communicators.ending.load(Ordering::Acquire);
            let patience = Patience { deadline: Instant::now() + PUT_MAX, given_up: &given_up };
            communicator.exchange(sends, receives, stream, patience).map(drop)
        };
        // Where a part of each block goes it is brought together in any case.
        let is_staged = is_staged || !rows.are_whole();
        // What a receiver puts there ends with copies that follow.
        match (is_staged, *end) {
            (true, End::Receiver) => unmarked.copies = true,
            _ if unmarked.lanes.contains(&lane) => {}
            _ => unmarked.lanes.push(lane),
        }
        match (is_staged, *end) {
            (false, _) => {
                let mut places = places_of(ids, rows.block_bytes());
                let place = places.next().unwrap_or_default();
                assert!(places.next().is_none(), "what is not staged lies together");
                exchange(kv.data(), place)
            }
            // SAFETY: as the caller promises.
            (true, End::Sender) => unsafe { staging.send(kv, rows, ids, stream, exchange) },
            // SAFETY: as above.
            (true, End::Receiver) => unsafe {
                staging.receive(kv, rows, ids, *scatter, stream, exchange)
            },
        }
    }

    /// Marks the end of all that was put so far.
    pub fn mark(&mut self) -> Result<Marks, NcclError> {
        let context = self.half.kv.context();
        let _call = context.calls().begin(PUT_USUAL);
        context.bind()?;
        let Ends { lanes, copies } = mem::take(&mut self.unmarked);
        let staging = self.staging.as_mut().expect(LIVES);
        let mut marks = Vec::with_capacity(lanes.len() + 1);
        for lane in lanes {
            marks.push(staging.mark_lane(lane, &self.streams[lane])?);
        }
        if copies {
            marks.push(staging.mark_copies()?);
        }
        Ok(marks)
    }

    pub fn communicators(&self) -> &Arc<Communicators> {
        &self.communicators
    }

    pub fn context(&self) -> &Arc<Context> {
        self.half.kv.context()
    }

    /// What follows the end of the communicators, which was well or not: copies that waited for an operation go
    /// on, and are over when this returns without an error.
    pub fn clear_all(links: &mut [Self], ended: Result<(), String>) -> Result<(), String> {
        let mut cleared = ended;
        let mut kept = Vec::with_capacity(links.len());
        for link in links {
            let Some(mut staging) = link.staging.take() else { continue };
            cleared = cleared
                .and_then(|()| link.half.kv.context().bind().map_err(words))
                .and_then(|()| staging.drain(&link.streams, ABORT_MAX));
            kept.push((Arc::clone(&link.half.gpu), staging, mem::take(&mut link.streams)));
        }
        if cleared.is_err() {
            // Something may still use them.
            mem::forget(kept);
            return cleared;
        }
        for (gpu, staging, _) in kept {
            locked(&gpu.spare).push(staging);
        }
        Ok(())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Nobody is left to be told.
        let ended = Communicators::end_all(slice::from_ref(&self.communicators));
        let _ = Self::clear_all(slice::from_mut(self), ended);
    }
}
