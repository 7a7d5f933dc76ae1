//! KV blocks by NCCL, between this process's GPU and that of another.
//!
//! Kernels of both ends meet: each operation is put into the streams of both, and occupies a few
//! multiprocessors until the other end's is there. So the receiver puts its own first and the sender
//! follows only then. An end that waits in vain is ended by an abort, and by nothing else: until then
//! the blocks of the operation are not given back.

use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    context::{Event, Role, Stream},
    kv::DeviceKv,
    memory::DeviceMemory,
    nccl::{Communicator, CommunicatorOptions, Move, Nccl, Piece, UniqueId},
};
use crate::{
    arena::{BlockRead, BlockWrite},
    layout::BlockId,
    peer::{End, Moving, PeerChannel, PeerChannels},
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

const MAGIC: [u8; 8] = *b"BATONNC1";
const ID_BYTES: usize = 128;

/// Makes channels for one arena's blocks.
#[derive(Debug)]
pub struct NcclChannels {
    kv: Arc<DeviceKv>,
    /// Opened when it is first needed.
    nccl: Mutex<Option<Arc<Nccl>>>,
    /// Held by whoever puts an operation of any channel of this GPU into a stream.
    issuing: Arc<Mutex<()>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn words(error: impl ToString) -> String {
    error.to_string()
}

impl NcclChannels {
    pub fn new(kv: Arc<DeviceKv>) -> Self {
        Self { kv, nccl: Mutex::default(), issuing: Arc::default() }
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
        id: UniqueId,
        end: End,
        blocks: Option<u32>,
        deadline: Instant,
    ) -> Result<NcclChannel, String> {
        let context = self.kv.context();
        context.bind().map_err(words)?;
        let rank = match end {
            End::Sender => 0,
            End::Receiver => 1,
        };
        let blocks = blocks.map(|blocks| (blocks, blocks));
        let options = CommunicatorOptions { rank, ranks: 2, id, blocks };
        let mut communicator =
            Communicator::new(nccl, context, options, deadline).map_err(words)?;
        let stream = Stream::new(context).map_err(words)?;
        let marks = (0..UNDER_WAY_MAX).map(|_| Event::new(context));
        let marks = marks.collect::<Result<Vec<_>, _>>().map_err(words)?;
        let memory =
            DeviceMemory::new(context, "a greeting by NCCL", 2 * GREETING_BYTES).map_err(words)?;
        let (out, back) = (
            memory.cut(GREETING_BYTES).map_err(words)?,
            memory.cut(GREETING_BYTES).map_err(words)?,
        );
        let to_peer = |range| Move { peer: 1 - rank, piece: Piece::new(range, 0, GREETING_BYTES) };
        let greeted = {
            let _issuing = locked(&self.issuing);
            communicator
                .exchange(&[to_peer(&out)], &[to_peer(&back)], &stream, deadline)
                .map_err(words)
                .and_then(|_| marks[0].record(&stream).map_err(words))
        };
        let greeted = greeted.and_then(|()| {
            while !marks[0].is_done().map_err(words)? {
                if Instant::now() >= deadline {
                    return Err("the other end did not greet in time".to_owned());
                }
                thread::sleep(Duration::from_micros(100));
            }
            Ok(())
        });
        if let Err(reason) = greeted {
            // Before the ranges go, for whose end the driver would wait.
            let aborted = communicator.abort(ABORT_MAX);
            if aborted.is_err() {
                mem::forget((out, back));
            }
            return Err(reason);
        }
        Ok(NcclChannel {
            shared: Arc::new(Shared {
                communicator: Mutex::new(Some(communicator)),
                aborted: AtomicBool::new(false),
                stuck: AtomicBool::new(false),
                marks: Mutex::new(marks),
                stream,
                peer: 1 - rank,
                kv: Arc::clone(&self.kv),
                issuing: Arc::clone(&self.issuing),
            }),
        })
    }
}

impl PeerChannels for NcclChannels {
    fn prepare(&self) -> Result<(), String> {
        self.opened().map(drop)
    }

    fn invite(&self) -> Result<Vec<u8>, String> {
        let nccl = self.opened()?;
        let id = nccl.unique_id().map_err(words)?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&nccl.version().0.to_le_bytes());
        bytes.extend_from_slice(&(self.kv.layout().block_bytes() as u64).to_le_bytes());
        bytes.extend_from_slice(&id.0);
        bytes.extend_from_slice(self.kv.context().device().uuid.as_bytes());
        Ok(bytes)
    }

    fn accept(&self, invitation: &[u8]) -> Result<(), String> {
        let nccl = self.opened()?;
        let invitation = Invitation::read(invitation)?;
        let (theirs, ours) = (invitation.version, nccl.version().0);
        if theirs != ours {
            return Err(format!(
                "it has NCCL {theirs}, this process {ours} ({})",
                nccl.path().display()
            ));
        }
        let block_bytes = self.kv.layout().block_bytes() as u64;
        if invitation.block_bytes != block_bytes {
            let bytes = invitation.block_bytes;
            return Err(format!("its blocks have {bytes} bytes, ours {block_bytes}"));
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
        blocks: Option<u32>,
        deadline: Instant,
    ) -> Result<Arc<dyn PeerChannel>, String> {
        let Invitation { id, .. } = Invitation::read(invitation)?;
        Ok(Arc::new(self.joined(&self.opened()?, id, end, blocks, deadline)?))
    }
}

/// What the sender tells the receiver.
struct Invitation<'a> {
    version: i32,
    block_bytes: u64,
    id: UniqueId,
    uuid: &'a [u8],
}

impl<'a> Invitation<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, String> {
        fn parts(bytes: &[u8]) -> Option<(i32, u64, UniqueId, &[u8])> {
            let (magic, rest) = bytes.split_first_chunk::<8>()?;
            let (version, rest) = rest.split_first_chunk()?;
            let (block_bytes, rest) = rest.split_first_chunk()?;
            let (id, uuid) = rest.split_first_chunk::<ID_BYTES>()?;
            let numbers = (i32::from_le_bytes(*version), u64::from_le_bytes(*block_bytes));
            (*magic == MAGIC).then_some((numbers.0, numbers.1, UniqueId(*id), uuid))
        }
        let (version, block_bytes, id, uuid) =
            parts(bytes).ok_or("it invites in a way that this build does not know")?;
        Ok(Self { version, block_bytes, id, uuid })
    }
}

/// One end of a pair.
struct NcclChannel {
    shared: Arc<Shared>,
}

struct Shared {
    /// First, so that its operations end before what they use. `None` once it was aborted.
    communicator: Mutex<Option<Communicator>>,
    /// An abort was begun: marks that are done from then on say nothing about what was transferred.
    aborted: AtomicBool,
    /// An abort did not come back.
    stuck: AtomicBool,
    /// Those not in use: nothing is made while an operation may be stuck.
    marks: Mutex<Vec<Event>>,
    stream: Stream<PeerExchange>,
    peer: u32,
    kv: Arc<DeviceKv>,
    issuing: Arc<Mutex<()>>,
}

impl Shared {
    /// The parts of our blocks that are one run each.
    fn pieces(&self, runs: &[u32], ids: &[BlockId]) -> Result<Vec<Move<'_>>, String> {
        let block_bytes = self.kv.layout().block_bytes();
        let mut rest = ids;
        let mut pieces = Vec::with_capacity(runs.len());
        for run in runs {
            let (blocks, after) = rest
                .split_at_checked(*run as usize)
                .filter(|(blocks, _)| !blocks.is_empty())
                .ok_or("the runs are not those of the blocks")?;
            if !blocks.windows(2).all(|two| two[0].0.checked_add(1) == Some(two[1].0)) {
                return Err("blocks of one run do not lie together".to_owned());
            }
            let offset = blocks[0].index() * block_bytes;
            let piece = Piece::new(self.kv.data(), offset, blocks.len() * block_bytes);
            pieces.push(Move { peer: self.peer, piece });
            rest = after;
        }
        if rest.is_empty() { Ok(pieces) } else { Err("blocks are left over".to_owned()) }
    }

    /// Puts one operation into the stream, and a mark behind it.
    fn put(&self, sends: &[Move<'_>], receives: &[Move<'_>]) -> Result<Event, String> {
        let mark = locked(&self.marks).pop().ok_or("too many operations are under way")?;
        let put = {
            let mut communicator = locked(&self.communicator);
            let communicator = communicator.as_mut().ok_or("the channel was aborted")?;
            let _issuing = locked(&self.issuing);
            communicator.exchange(sends, receives, &self.stream, Instant::now() + PUT_MAX)
        };
        match put.map_err(words).and_then(|_| mark.record(&self.stream).map_err(words)) {
            Ok(()) => Ok(mark),
            Err(reason) => {
                // Part of it may be in the stream: only an abort says that nothing moves.
                self.abort().map_err(|stuck| format!("{reason}; {stuck}"))?;
                Err(reason)
            }
        }
    }

    fn abort(&self) -> Result<(), String> {
        let mut communicator = locked(&self.communicator);
        // Before it ends the kernels, whose marks are done then.
        self.aborted.store(true, Ordering::SeqCst);
        if let Some(communicator) = communicator.take()
            && let Err(error) = communicator.abort(ABORT_MAX)
        {
            self.stuck.store(true, Ordering::Release);
            return Err(words(error));
        }
        // Once it was stuck nothing says any more that it is over.
        match self.stuck.load(Ordering::Acquire) {
            true => Err("an abort before did not come back".to_owned()),
            false => Ok(()),
        }
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
        let pieces = self.shared.pieces(runs, &ids)?;
        let under_way = UnderWay::new(&self.shared, blocks);
        under_way.marked(self.shared.put(&pieces, &[]))
    }

    fn receive(
        &self,
        runs: &[u32],
        blocks: Vec<BlockWrite>,
    ) -> Result<Box<dyn Moving<BlockWrite>>, String> {
        let ours = |block: &BlockWrite| block.lies_in(&*self.shared.kv);
        assert!(blocks.iter().all(ours), "only own blocks are written");
        let ids: Vec<BlockId> = blocks.iter().map(BlockWrite::block).collect();
        let pieces = self.shared.pieces(runs, &ids)?;
        let under_way = UnderWay::new(&self.shared, blocks);
        under_way.marked(self.shared.put(&[], &pieces))
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
        bytes.extend_from_slice(&[7; ID_BYTES]);
        let fixed = bytes.len();
        bytes.extend_from_slice(b"GPU-1");
        let read = Invitation::read(&bytes).ok().unwrap();
        assert_eq!((read.version, read.block_bytes, read.uuid), (22809, 4096, &b"GPU-1"[..]));
        assert!(read.id == UniqueId([7; ID_BYTES]));
        for length in 0..fixed {
            assert!(Invitation::read(&bytes[..length]).is_err());
        }
        bytes[0] ^= 1;
        assert!(Invitation::read(&bytes).is_err());
    }
}
