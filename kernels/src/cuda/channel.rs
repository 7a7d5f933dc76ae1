//! KV blocks by NCCL, between this process's GPU and that of another.
//!
//! Kernels of both ends meet: each operation is put into the streams of both, and occupies a few
//! multiprocessors until the other end's is there. So the receiver puts its own first and the sender
//! follows only then. An end that waits in vain is ended by an abort, and by nothing else: until then
//! the blocks of the operation are not given back.
//!
//! Blocks that lie scattered go through slots of staging memory, which an abort drains: its copies write
//! blocks as well.

use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    context::{Event, Role, Stream},
    kv::DeviceKv,
    memory::Range,
    nccl::{
        Communicator, CommunicatorOptions, Move, Nccl, NcclError, NcclVersion, Piece, UniqueId,
    },
    staging::{Place, Staging, places_of, stretches},
};
use crate::{
    arena::{BlockRead, BlockWrite},
    layout::BlockId,
    peer::{End, Moving, Patience, PeerChannel, PeerChannels},
};

/// KV from or to another GPU, by kernels.
#[derive(Debug)]
pub enum PeerExchange {}

impl Role for PeerExchange {}

/// Operations under way on one channel at most: as many marks are made when it is.
const UNDER_WAY_MAX: usize = 8;
/// What needs no peer is put into a stream within microseconds.
const PUT_MAX: Duration = Duration::from_secs(1);
/// Aborts took 0.4 to 0.7 s with a dead or a stopped peer.
const ABORT_MAX: Duration = Duration::from_secs(10);
/// Sent once to and fro before the first block, so that no block waits for the connection.
const GREETING_BYTES: usize = 256;
/// Of a slot, or one block where that is more: long enough for what NCCL can do, and short beside a chunk.
const SLOT_BYTES: usize = 32 << 20;
/// One is copied to or from while another is sent or received.
const SLOTS: usize = 3;
/// Runs of so many bytes are sent as they lie.
const DIRECT_BYTES_MIN: usize = 8 << 20;

/// Communicators of a channel, which take turns: while the kernel of one begins or ends, that of another
/// would have the way between the GPUs to itself. As long as copies to and from slots are what takes
/// longest a second one gains nothing (201 GB/s, 213 without), and makes the first contact longer.
const LANES: usize = 1;
/// That a peer may have.
const LANES_MAX: usize = 8;
/// Of the multiprocessors that a communicator is made for, NCCL takes half for an operation between two
/// ranks, unless it has more than 16 MiB for each of those.
const PART_IN_USE: u32 = 2;
const COMMUNICATOR_BLOCKS_MAX: u32 = 64;

const MAGIC: [u8; 8] = *b"BATONNC3";
const ID_BYTES: usize = 128;

/// Channels of a GPU at a time, and so the memory that they may take: more than a host with eight of them
/// has use for, to and from each of the others.
const STAGINGS_MAX: usize = 16;

/// Makes channels for one arena's blocks.
#[derive(Debug)]
pub struct NcclChannels {
    kv: Arc<DeviceKv>,
    /// Opened when it is first needed.
    nccl: Mutex<Option<Arc<Nccl>>>,
    gpu: Arc<Gpu>,
}

/// What all channels of a GPU share.
#[derive(Debug, Default)]
struct Gpu {
    /// Held by whoever puts an operation of any channel into a stream; never by who waits for a peer.
    issuing: Mutex<()>,
    /// Of channels that have ended.
    spare: Mutex<Vec<Staging>>,
    /// In use, spare, or lost with an abort that did not come back.
    stagings: AtomicUsize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn words(error: impl ToString) -> String {
    error.to_string()
}

impl NcclChannels {
    pub fn new(kv: Arc<DeviceKv>) -> Self {
        Self { kv, nccl: Mutex::default(), gpu: Arc::default() }
    }

    /// Blocks that a slot takes, here as at every node with blocks of that size.
    fn slot_blocks(&self) -> usize {
        (SLOT_BYTES / self.kv.layout().block_bytes()).max(1)
    }

    fn staging(&self) -> Result<Staging, String> {
        if let Some(staging) = locked(&self.gpu.spare).pop() {
            return Ok(staging);
        }
        let room = |made: usize| (made < STAGINGS_MAX).then_some(made + 1);
        let stagings = &self.gpu.stagings;
        stagings.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).map_err(|made| {
            format!("{made} channels have slots on this GPU; allowed are {STAGINGS_MAX}")
        })?;
        let bytes = self.slot_blocks() * self.kv.layout().block_bytes();
        Staging::new(&self.kv, SLOTS, bytes.max(2 * GREETING_BYTES)).map_err(|error| {
            stagings.fetch_sub(1, Ordering::Relaxed);
            words(error)
        })
    }

    /// Runs of so many blocks are sent as they lie.
    fn direct_min(&self) -> usize {
        DIRECT_BYTES_MIN.div_ceil(self.kv.layout().block_bytes())
    }

    fn opened(&self) -> Result<Arc<Nccl>, String> {
        let mut opened = locked(&self.nccl);
        if let Some(nccl) = &*opened {
            return Ok(Arc::clone(nccl));
        }
        Ok(Arc::clone(opened.insert(Nccl::open(None).map_err(words)?)))
    }

    fn joined(
        &self,
        nccl: &Arc<Nccl>,
        ids: &[UniqueId],
        end: End,
        multiprocessors: Option<u32>,
        patience: Patience<'_>,
    ) -> Result<NcclChannel, String> {
        let context = self.kv.context();
        context.bind().map_err(words)?;
        let marks = (0..UNDER_WAY_MAX).map(|_| Event::new(context));
        let marks = marks.collect::<Result<Vec<_>, _>>().map_err(words)?;
        let joint =
            Joint { lanes: Vec::with_capacity(ids.len()), next: 0, staging: self.staging()? };
        // Aborted when it is dropped, whatever comes.
        let mut shared = Shared {
            joint: Mutex::new(Some(joint)),
            aborted: AtomicBool::new(false),
            stuck: AtomicBool::new(false),
            marks: Mutex::new(marks),
            end,
            slot_blocks: self.slot_blocks(),
            direct_min: self.direct_min(),
            kv: Arc::clone(&self.kv),
            gpu: Arc::clone(&self.gpu),
        };
        let blocks = multiprocessors.map(|all| {
            let blocks = (PART_IN_USE * all / ids.len() as u32).clamp(1, COMMUNICATOR_BLOCKS_MAX);
            (blocks, blocks)
        });
        for id in ids {
            let options = CommunicatorOptions { rank: rank(end), ranks: 2, id: *id, blocks };
            shared.add_lane(nccl, options, patience)?;
        }
        Ok(NcclChannel { shared: Arc::new(shared) })
    }
}

fn rank(end: End) -> u32 {
    match end {
        End::Sender => 0,
        End::Receiver => 1,
    }
}

impl PeerChannels for NcclChannels {
    fn prepare(&self) -> Result<(), String> {
        self.opened().map(drop)
    }

    fn invite(&self) -> Result<Vec<u8>, String> {
        let nccl = self.opened()?;
        let ids = (0..LANES).map(|_| nccl.unique_id()).collect::<Result<Vec<_>, _>>();
        let ids = ids.map_err(words)?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&nccl.version().0.to_le_bytes());
        bytes.extend_from_slice(&(self.kv.layout().block_bytes() as u64).to_le_bytes());
        bytes.extend_from_slice(&(self.slot_blocks() as u64).to_le_bytes());
        bytes.extend_from_slice(&(self.direct_min() as u64).to_le_bytes());
        bytes.extend_from_slice(&(ids.len() as u64).to_le_bytes());
        bytes.extend(ids.iter().flat_map(|id| id.0));
        bytes.extend_from_slice(self.kv.context().device().uuid.as_bytes());
        Ok(bytes)
    }

    fn accept(&self, invitation: &[u8]) -> Result<(), String> {
        let nccl = self.opened()?;
        let invitation = Invitation::read(invitation)?;
        let (theirs, ours) = (NcclVersion(invitation.version), nccl.version());
        if theirs != ours {
            return Err(format!(
                "its NCCL is {theirs}; allowed is {ours}, as here ({})",
                nccl.path().display()
            ));
        }
        let ours = [self.kv.layout().block_bytes(), self.slot_blocks(), self.direct_min()];
        let compared = [
            ("its blocks have", invitation.block_bytes, "bytes"),
            ("its slots take", invitation.slot_blocks, "blocks"),
            ("it sends as they lie runs from", invitation.direct_min, "blocks on"),
        ];
        for ((says, theirs, unit), ours) in compared.into_iter().zip(ours) {
            if theirs != ours as u64 {
                return Err(format!("{says} {theirs} {unit}; allowed are {ours}, as here"));
            }
        }
        if invitation.uuid == self.kv.context().device().uuid.as_bytes() {
            return Err("NCCL joins no two processes on one GPU".to_owned());
        }
        Ok(())
    }

    fn join(
        &self,
        invitation: &[u8],
        end: End,
        multiprocessors: Option<u32>,
        patience: Patience<'_>,
    ) -> Result<Arc<dyn PeerChannel>, String> {
        let Invitation { ids, .. } = Invitation::read(invitation)?;
        Ok(Arc::new(self.joined(&self.opened()?, &ids, end, multiprocessors, patience)?))
    }
}

/// What the sender tells the receiver.
struct Invitation<'a> {
    version: i32,
    block_bytes: u64,
    slot_blocks: u64,
    direct_min: u64,
    /// One a lane.
    ids: Vec<UniqueId>,
    uuid: &'a [u8],
}

impl<'a> Invitation<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, String> {
        let short =
            || format!("its invitation ends after {} bytes; allowed is a whole one", bytes.len());
        let (magic, rest) = bytes.split_first_chunk().ok_or_else(short)?;
        if *magic != MAGIC {
            let (theirs, ours) = (magic.escape_ascii(), MAGIC.escape_ascii());
            return Err(format!("its invitation begins with {theirs}; allowed is {ours}"));
        }
        let (version, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let (numbers, rest) = rest.split_at_checked(4 * 8).ok_or_else(short)?;
        let (numbers, _) = numbers.as_chunks();
        let number = |index: usize| u64::from_le_bytes(numbers[index]);
        let lanes = number(3);
        if !(1..=LANES_MAX as u64).contains(&lanes) {
            return Err(format!("its lanes are {lanes}; allowed are 1 to {LANES_MAX}"));
        }
        let (ids, uuid) = rest.split_at_checked(lanes as usize * ID_BYTES).ok_or_else(short)?;
        let (ids, _) = ids.as_chunks::<ID_BYTES>();
        Ok(Self {
            version: i32::from_le_bytes(*version),
            block_bytes: number(0),
            slot_blocks: number(1),
            direct_min: number(2),
            ids: ids.iter().copied().map(UniqueId).collect(),
            uuid,
        })
    }
}

/// One end of a pair.
struct NcclChannel {
    shared: Arc<Shared>,
}

struct Shared {
    /// `None` once it was aborted.
    joint: Mutex<Option<Joint>>,
    /// An abort was begun: marks that are done from then on say nothing about what was transferred.
    aborted: AtomicBool,
    /// An abort did not come back.
    stuck: AtomicBool,
    /// Those not in use: nothing is made while an operation may be stuck.
    marks: Mutex<Vec<Event>>,
    end: End,
    slot_blocks: usize,
    direct_min: usize,
    kv: Arc<DeviceKv>,
    gpu: Arc<Gpu>,
}

/// What operations are put into streams with: each takes the next lane, at both ends alike.
struct Joint {
    lanes: Vec<Lane>,
    next: usize,
    staging: Staging,
}

struct Lane {
    communicator: Communicator,
    stream: Stream<PeerExchange>,
}

impl Shared {
    /// Makes another communicator, together with the peer, and sends a few bytes to and fro, which
    /// connects. Nobody else has the channel yet, so no lock is held while the peer is waited for, which may
    /// never come.
    ///
    /// Nor is [`Gpu::issuing`], for others would wait as long. So the greetings of two channels may be put in
    /// another order at the peer: each has a stream of its own, in which nothing follows it before it is
    /// over, and its kernel has room beside what the others run.
    fn add_lane(
        &mut self,
        nccl: &Arc<Nccl>,
        options: CommunicatorOptions,
        patience: Patience<'_>,
    ) -> Result<(), String> {
        let (context, peer) = (self.kv.context(), self.peer());
        let stream = Stream::new(context).map_err(words)?;
        let communicator = Communicator::new(nccl, context, options, patience).map_err(words)?;
        let joint = self.joint.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Joint { lanes, staging, .. } = joint.as_mut().ok_or("the channel was aborted")?;
        // From now on it is aborted with the others.
        let Lane { communicator, stream } = {
            lanes.push(Lane { communicator, stream });
            lanes.last_mut().expect("it was pushed")
        };
        let to_peer =
            |offset| Move { peer, piece: Piece::new(staging.memory(), offset, GREETING_BYTES) };
        let (out, back) = (to_peer(0), to_peer(GREETING_BYTES));
        staging.await_all(stream).map_err(words)?;
        communicator.exchange(&[out], &[back], stream, patience).map_err(words)?;
        staging.pass(stream).map_err(words)?;
        let marks = self.marks.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mark = marks.first().ok_or("there is no mark")?;
        staging.mark(mark).map_err(words)?;
        while !mark.is_done().map_err(words)? {
            if Instant::now() >= patience.deadline || (patience.given_up)() {
                return Err("the other end did not greet in time".to_owned());
            }
            thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    fn peer(&self) -> u32 {
        1 - rank(self.end)
    }

    /// Whether the runs are those of our blocks.
    fn check(&self, runs: &[u32], ids: &[BlockId]) -> Result<(), String> {
        let mut rest = ids;
        for run in runs {
            let (blocks, after) = rest
                .split_at_checked(*run as usize)
                .filter(|(blocks, _)| !blocks.is_empty())
                .ok_or("the runs are not those of the blocks")?;
            if !blocks.windows(2).all(|two| two[0].0.checked_add(1) == Some(two[1].0)) {
                return Err("blocks of one run do not lie together".to_owned());
            }
            rest = after;
        }
        if rest.is_empty() { Ok(()) } else { Err("blocks are left over".to_owned()) }
    }

    /// Puts a chunk into the streams, and a mark behind it.
    fn put(&self, runs: &[u32], ids: &[BlockId]) -> Result<Event, String> {
        let mark = locked(&self.marks).pop().ok_or("too many operations are under way")?;
        let put = match locked(&self.joint).as_mut() {
            None => Err("the channel was aborted".to_owned()),
            Some(joint) => self.put_into(joint, runs, ids, &mark).map_err(words),
        };
        match put {
            Ok(()) => Ok(mark),
            Err(reason) => {
                // Part of it may be in the stream: only an abort says that nothing moves.
                self.abort().map_err(|stuck| format!("{reason}; {stuck}"))?;
                Err(reason)
            }
        }
    }

    fn put_into(
        &self,
        Joint { lanes, next, staging }: &mut Joint,
        runs: &[u32],
        ids: &[BlockId],
        mark: &Event,
    ) -> Result<(), NcclError> {
        self.kv.context().bind()?;
        let (kv, peer) = (&*self.kv, self.peer());
        let block_bytes = self.kv.layout().block_bytes();
        for stretch in stretches(runs, self.slot_blocks, self.direct_min) {
            let ids = &ids[stretch.blocks];
            let lane = *next % lanes.len();
            let Lane { communicator, stream } = &mut lanes[lane];
            *next = lane + 1;
            self.kv.pass_time(stream)?;
            self.kv.pass_time(staging.copies())?;
            let mut exchange = |range: &Range, (offset, bytes): Place| -> Result<(), NcclError> {
                let piece = [Move { peer, piece: Piece::new(range, offset, bytes) }];
                let (sends, receives): (&[_], &[_]) = match self.end {
                    End::Sender => (&piece, &[]),
                    End::Receiver => (&[], &piece),
                };
                let _issuing = locked(&self.gpu.issuing);
                let deadline = Instant::now() + PUT_MAX;
                communicator.exchange(sends, receives, stream, deadline).map(drop)
            };
            match (stretch.is_staged, self.end) {
                (false, _) => {
                    for place in places_of(ids, block_bytes) {
                        exchange(kv.data(), place)?;
                    }
                    staging.pass(stream)?;
                }
                // SAFETY: the blocks are borrowed until the mark is seen, or the abort, which drains
                // the staging, has returned.
                (true, End::Sender) => unsafe { staging.send(kv, ids, stream, exchange) }?,
                // SAFETY: as above.
                (true, End::Receiver) => unsafe { staging.receive(kv, ids, stream, exchange) }?,
            }
        }
        Ok(staging.mark(mark)?)
    }

    fn abort(&self) -> Result<(), String> {
        let mut joint = locked(&self.joint);
        // Before it ends the kernels, whose marks are done then.
        self.aborted.store(true, Ordering::SeqCst);
        if let Some(Joint { lanes, staging, .. }) = joint.take() {
            let (communicators, streams): (Vec<_>, Vec<_>) =
                lanes.into_iter().map(|lane| (lane.communicator, lane.stream)).unzip();
            // Copies that waited for an operation go on when it is ended.
            let ended = Communicator::abort_all(communicators, ABORT_MAX)
                .map_err(words)
                .and_then(|_| staging.drain(ABORT_MAX));
            if let Err(reason) = ended {
                self.stuck.store(true, Ordering::Release);
                // Something may still use them.
                mem::forget((staging, streams));
                return Err(reason);
            }
            locked(&self.gpu.spare).push(staging);
        }
        // Once it was stuck nothing says any more that it is over.
        match self.stuck.load(Ordering::Acquire) {
            true => Err("an abort before did not come back".to_owned()),
            false => Ok(()),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Nobody is left to be told.
        let _ = self.abort();
    }
}

impl PeerChannel for NcclChannel {
    fn send(
        &self,
        runs: &[u32],
        blocks: Vec<BlockRead>,
    ) -> Result<Box<dyn Moving<BlockRead>>, String> {
        assert!(blocks.iter().all(|block| block.lies_in(&*self.shared.kv)), "own blocks are sent");
        let ids: Vec<BlockId> = blocks.iter().map(BlockRead::block).collect();
        self.shared.check(runs, &ids)?;
        let under_way = UnderWay::new(&self.shared, blocks);
        under_way.marked(self.shared.put(runs, &ids))
    }

    fn receive(
        &self,
        runs: &[u32],
        blocks: Vec<BlockWrite>,
    ) -> Result<Box<dyn Moving<BlockWrite>>, String> {
        let ours = |block: &BlockWrite| block.lies_in(&*self.shared.kv);
        assert!(blocks.iter().all(ours), "only own blocks are written");
        let ids: Vec<BlockId> = blocks.iter().map(BlockWrite::block).collect();
        self.shared.check(runs, &ids)?;
        let under_way = UnderWay::new(&self.shared, blocks);
        under_way.marked(self.shared.put(runs, &ids))
    }

    fn abort(&self) -> Result<(), String> {
        self.shared.abort()
    }
}

/// An operation in the stream, and the blocks that it reads or writes.
struct UnderWay<B> {
    /// `None` while there is none, and once it was given back.
    mark: Option<Event>,
    blocks: Option<Vec<B>>,
    shared: Arc<Shared>,
}

impl<B: Send + 'static> UnderWay<B> {
    fn new(shared: &Arc<Shared>, blocks: Vec<B>) -> Self {
        Self { mark: None, blocks: Some(blocks), shared: Arc::clone(shared) }
    }

    fn marked(mut self, mark: Result<Event, String>) -> Result<Box<dyn Moving<B>>, String> {
        self.mark = Some(mark?);
        Ok(Box::new(self))
    }
}

impl<B: Send + 'static> Moving<B> for UnderWay<B> {
    fn is_done(&mut self) -> Result<bool, String> {
        let done = self.mark.as_ref().map_or(Ok(true), Event::is_done).map_err(words)?;
        // After the mark: what an abort has ended looks done, and an abort is known before that.
        match self.shared.aborted.load(Ordering::SeqCst) {
            true => Err("the channel was aborted".to_owned()),
            false => Ok(done),
        }
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<B>, String> {
        if !self.is_done()? {
            return Err("it is under way".to_owned());
        }
        locked(&self.shared.marks).extend(self.mark.take());
        Ok(self.blocks.take().unwrap_or_default())
    }
}

impl<B> Drop for UnderWay<B> {
    fn drop(&mut self) {
        let Some(blocks) = self.blocks.take() else { return };
        let is_over = match &self.mark {
            Some(mark) => mark.is_done().unwrap_or(false) || self.shared.abort().is_ok(),
            // It could not be put, and was aborted for that.
            None => self.shared.abort().is_ok(),
        };
        if !is_over {
            // Something may still move them: they are never anyone's again.
            mem::forget(blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_comes_out_as_it_went_in_and_nothing_else_is_taken_for_one() {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&22809_i32.to_le_bytes());
        bytes.extend_from_slice(&4096_u64.to_le_bytes());
        bytes.extend_from_slice(&16_u64.to_le_bytes());
        bytes.extend_from_slice(&5_u64.to_le_bytes());
        bytes.extend_from_slice(&2_u64.to_le_bytes());
        bytes.extend_from_slice(&[7; 2 * ID_BYTES]);
        let fixed = bytes.len();
        bytes.extend_from_slice(b"GPU-1");
        let read = Invitation::read(&bytes).ok().unwrap();
        assert_eq!((read.version, read.block_bytes, read.uuid), (22809, 4096, &b"GPU-1"[..]));
        assert_eq!((read.slot_blocks, read.direct_min), (16, 5));
        assert!(read.ids == [UniqueId([7; ID_BYTES]); 2]);
        let refused = |bytes: &[u8]| Invitation::read(bytes).err().expect("it is refused");
        for length in 0..fixed {
            let words = refused(&bytes[..length]);
            assert!(words.contains(&format!("ends after {length} bytes")), "{words}");
        }
        let cases = [
            (0, b'b', "begins with bATONNC3; allowed is BATONNC3"),
            (36, 0, "lanes are 0; allowed are 1 to 8"),
            (36, 9, "lanes are 9; allowed are 1 to 8"),
            (43, 1, "lanes are 72057594037927938; allowed are 1 to 8"),
        ];
        for (at, byte, words) in cases {
            let mut other = bytes.clone();
            other[at] = byte;
            assert!(refused(&other).contains(words), "byte {at} is {byte}: {}", refused(&other));
        }
    }
}
