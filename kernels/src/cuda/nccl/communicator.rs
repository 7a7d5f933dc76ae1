//! Communicators as owned values.
//!
//! A communicator never blocks: NCCL is told so, and each call is polled to its end, up to a deadline,
//! before the next is made (NCCL refuses a second one meanwhile). That a peer has died NCCL does not
//! say over NVLink: whoever holds a communicator learns it otherwise and then [`aborts`] it, which ends
//! kernels that still wait for the peer.
//!
//! Order at the end: recorded graphs that hold its operations first, then the communicator, then the
//! ranges they move, then the context, which it keeps. A range that a stuck operation uses is not freed
//! before the abort: the driver would wait for the operation.
//!
//! [`aborts`]: Communicator::abort

use std::{
    ffi::c_int,
    ptr,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use super::{
    super::{
        calls::GIVING_BACK,
        context::{Context, Role, Stream},
        error::CudaError,
        memory::Range,
    },
    BFLOAT16, Config, FLOAT32, Functions, IN_PROGRESS, Nccl, NcclError, OLDEST, RawCommunicator,
    SUCCESS, SUM, UINT8, UNDEFINED, UniqueId,
};
use crate::{layout::Dtype, peer::Patience};

/// What needs no peer is done within this: another thread puts it into the stream, and is waited for
/// without a pause.
const SPIN: Duration = Duration::from_micros(300);
/// The pause between looks from then on.
const PAUSE: Duration = Duration::from_millis(1);

/// Aborts took 0.4 to 0.7 s with a dead or a stopped peer.
const ABORT_PATIENCE: Duration = Duration::from_secs(10);

/// A part of a range that is sent, or received into.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    range: &'a Range,
    offset: usize,
    bytes: usize,
}

impl<'a> Piece<'a> {
    /// # Panics
    /// When it is not within the range, as slices do.
    pub fn new(range: &'a Range, offset: usize, bytes: usize) -> Self {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= range.bytes());
        assert!(fits, "{bytes} bytes at {offset} are within the {} there are", range.bytes());
        Self { range, offset, bytes }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn address(&self) -> u64 {
        self.range.part(self.offset, self.bytes)
    }
}

/// One piece of a group's sends or receives, and the rank at its other end.
#[derive(Clone, Copy, Debug)]
pub struct Move<'a> {
    pub peer: u32,
    pub piece: Piece<'a>,
}

/// What a communicator is made of.
#[derive(Clone, Copy, Debug)]
pub struct CommunicatorOptions {
    pub rank: u32,
    pub ranks: u32,
    pub id: UniqueId,
    /// Blocks of a kernel of its, at least and at most: they bound its speed, the multiprocessors that
    /// it takes from others, and its memory. `None`: NCCL chooses.
    pub blocks: Option<(u32, u32)>,
}

/// A group of ranks that can send to each other, as one of them sees it.
///
/// Its operations are put into streams in the order of the calls, and at the other ranks in the same
/// order. Whoever has several on one GPU puts their operations into streams one at a time, lest two GPUs
/// begin with different ones and each wait for the other.
#[derive(Debug)]
pub struct Communicator {
    /// `None` once it was aborted.
    raw: Option<Raw>,
    rank: u32,
    ranks: u32,
    /// Of the last operation.
    sequence: u64,
    is_broken: bool,
    memory_bytes: u64,
}

#[derive(Debug)]
struct Raw {
    communicator: RawCommunicator,
    nccl: Arc<Nccl>,
    context: Arc<Context>,
}

// SAFETY: NCCL lets every thread use a communicator, one at a time, which `&mut self` sees to.
unsafe impl Send for Raw {}

impl Communicator {
    /// Has NCCL load its kernels to this GPU, which its first communicator in a process does: 0.2 to 0.4 s, and more
    /// beside other work. So this makes one of a single rank and ends it.
    pub fn load_kernels<'a>(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        patience: impl Into<Patience<'a>>,
    ) -> Result<(), NcclError> {
        let options =
            CommunicatorOptions { rank: 0, ranks: 1, id: nccl.unique_id()?, blocks: Some((1, 1)) };
        let alone = Self::make(nccl, context, options, patience.into())?;
        alone.abort(ABORT_PATIENCE).map(drop)
    }

    /// Makes it, together with the other ranks, or gives up with the patience.
    pub fn new<'a>(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        options: CommunicatorOptions,
        patience: impl Into<Patience<'a>>,
    ) -> Result<Self, NcclError> {
        let CommunicatorOptions { rank, ranks, .. } = options;
        if rank >= ranks || ranks < 2 {
            return Err(NcclError::Rank { rank, ranks });
        }
        Self::make(nccl, context, options, patience.into())
    }

    fn make(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        options: CommunicatorOptions,
        patience: Patience<'_>,
    ) -> Result<Self, NcclError> {
        let CommunicatorOptions { rank, ranks, id, blocks } = options;
        let (least, most) = match blocks {
            Some((least, most)) if least == 0 || most < least || most > 64 => {
                return Err(NcclError::Blocks { least, most });
            }
            Some((least, most)) => (least as c_int, most as c_int),
            None => (UNDEFINED, UNDEFINED),
        };
        context.bind()?;
        let before = context.free_bytes()?;
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: OLDEST.0 as u32,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: least,
            max_ctas: most,
            net_name: ptr::null(),
            split_share: UNDEFINED,
        };
        let mut communicator = ptr::null_mut();
        let call = "ncclCommInitRankConfig";
        // SAFETY: the context is current; the configuration is copied before the call returns.
        let code = unsafe {
            (nccl.functions.ncclCommInitRankConfig)(
                &mut communicator,
                ranks as c_int,
                id,
                rank as c_int,
                &mut config,
            )
        };
        if communicator.is_null() {
            nccl.check(call, code, communicator)?;
            let reason = "it gave no communicator".to_owned();
            return Err(NcclError::Call { call, code, reason });
        }
        let raw = Raw { communicator, nccl: Arc::clone(nccl), context: Arc::clone(context) };
        let (sequence, is_broken, memory_bytes) = (0, false, 0);
        // Aborted when it is dropped, whatever comes.
        let mut made = Self { raw: Some(raw), rank, ranks, sequence, is_broken, memory_bytes };
        made.finish(call, code, patience)?;
        made.memory_bytes = before.saturating_sub(context.free_bytes()?);
        Ok(made)
    }

    pub fn rank(&self) -> u32 {
        self.rank
    }

    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Operations so far: all ranks count alike, so of two that wait for each other the numbers tell
    /// which one has left something out.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Of the GPU, as its free bytes told before and after it was made. The first operation takes more.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Sends and receives in one operation, whose number it gives; each rank names what it sends to
    /// another in the order in which that one receives it. The first of a pair also connects, for which
    /// both must be there before the patience ends.
    ///
    /// What is moved stays untouched until the operation is over on the stream, or an abort has
    /// returned.
    pub fn exchange<'a, R: Role>(
        &mut self,
        sends: &[Move<'_>],
        receives: &[Move<'_>],
        stream: &Stream<R>,
        patience: impl Into<Patience<'a>>,
    ) -> Result<u64, NcclError> {
        for Move { peer, .. } in sends.iter().chain(receives) {
            if *peer >= self.ranks || *peer == self.rank {
                let (rank, ranks) = (self.rank, self.ranks);
                return Err(NcclError::Peer { peer: *peer, rank, ranks });
            }
        }
        self.operate("ncclGroupEnd", patience.into(), |functions, communicator| {
            let mut failed = None;
            // SAFETY: it counts.
            let code = unsafe { (functions.ncclGroupStart)() };
            if code != SUCCESS {
                return ("ncclGroupStart", code);
            }
            let to = stream.raw().cast();
            let calls = [
                ("ncclSend", functions.ncclSend, sends),
                ("ncclRecv", functions.ncclRecv, receives),
            ];
            for (name, call, moves) in calls {
                for Move { peer, piece } in moves {
                    let (address, bytes) = (piece.address(), piece.bytes);
                    // SAFETY: the piece lies in a range of this process, stream and communicator live.
                    let code =
                        unsafe { call(address, bytes, UINT8, *peer as c_int, communicator, to) };
                    if code != SUCCESS && code != IN_PROGRESS {
                        failed.get_or_insert((name, code));
                    }
                }
            }
            // SAFETY: the group was begun above.
            let code = unsafe { (functions.ncclGroupEnd)() };
            failed.unwrap_or(("ncclGroupEnd", code))
        })
    }

    /// `to` = the sum of all ranks' `from`, which may be the same piece.
    ///
    /// # Panics
    /// When the pieces are not equally long, or not of whole elements.
    pub fn all_reduce<R: Role>(
        &mut self,
        from: Piece<'_>,
        to: Piece<'_>,
        dtype: Dtype,
        stream: &Stream<R>,
        deadline: Instant,
    ) -> Result<u64, NcclError> {
        assert_eq!(from.bytes, to.bytes, "a sum is as long as its terms");
        assert!(from.bytes.is_multiple_of(dtype.bytes()), "{} bytes of {dtype}", from.bytes);
        let kind = match dtype {
            Dtype::F32 => FLOAT32,
            Dtype::Bf16 => BFLOAT16,
        };
        let call = "ncclAllReduce";
        self.operate(call, deadline.into(), |functions, communicator| {
            // SAFETY: both pieces lie in ranges of this process, stream and communicator live.
            let code = unsafe {
                (functions.ncclAllReduce)(
                    from.address(),
                    to.address(),
                    from.bytes / dtype.bytes(),
                    kind,
                    SUM,
                    communicator,
                    stream.raw().cast(),
                )
            };
            (call, code)
        })
    }

    fn operate(
        &mut self,
        call: &'static str,
        patience: Patience<'_>,
        put: impl FnOnce(&Functions, RawCommunicator) -> (&'static str, c_int),
    ) -> Result<u64, NcclError> {
        if self.is_broken {
            return Err(NcclError::Broken { sequence: self.sequence });
        }
        let raw = self.raw.as_ref().expect("it is taken by an abort alone");
        raw.context.bind()?;
        self.sequence += 1;
        let (failed, code) = put(&raw.nccl.functions, raw.communicator);
        let call = if code == IN_PROGRESS { call } else { failed };
        self.finish(call, code, patience).map(|()| self.sequence)
    }

    /// Waits until NCCL is done with a call: not with the operation, which is on its stream then.
    fn finish(
        &mut self,
        call: &'static str,
        mut code: c_int,
        patience: Patience<'_>,
    ) -> Result<(), NcclError> {
        let raw = self.raw.as_ref().expect("it is taken by an abort alone");
        let begin = Instant::now();
        self.is_broken = true;
        while code == IN_PROGRESS {
            let waited = begin.elapsed();
            if Instant::now() >= patience.deadline {
                return Err(NcclError::TimedOut { call, waited });
            }
            if waited < SPIN {
                thread::yield_now();
            } else if (patience.given_up)() {
                return Err(NcclError::GivenUp { call, waited });
            } else {
                thread::sleep(PAUSE);
            }
            // SAFETY: the communicator lives, and one number is written.
            let asked =
                unsafe { (raw.nccl.functions.ncclCommGetAsyncError)(raw.communicator, &mut code) };
            raw.nccl.check("ncclCommGetAsyncError", asked, raw.communicator)?;
        }
        raw.nccl.check(call, code, raw.communicator)?;
        self.is_broken = false;
        Ok(())
    }

    /// Ends it, and kernels of its that wait for a peer; gives the time that took. When it returns
    /// without an error nothing moves any more, and what was moved may be used for other things.
    ///
    /// # Errors
    /// [`NcclError::AbortStuck`] when NCCL does not come back within `patience`: a thread is left to wait
    /// for it, and what the operations use stays in use.
    pub fn abort(mut self, patience: Duration) -> Result<Duration, NcclError> {
        self.end(patience)
    }

    /// As [`abort`](Self::abort), all at the same time: an error when one of them does not end.
    pub fn abort_all(
        mut communicators: Vec<Communicator>,
        patience: Duration,
    ) -> Result<Duration, NcclError> {
        let begin = Instant::now();
        let ending: Vec<_> = communicators.iter_mut().map(Communicator::begin_end).collect();
        let mut outcome = Ok(());
        for ending in ending {
            let rest = patience.saturating_sub(begin.elapsed());
            outcome = outcome.and(ending.and_then(|ending| ending.wait(rest)));
        }
        outcome.map(|()| begin.elapsed())
    }

    fn end(&mut self, patience: Duration) -> Result<Duration, NcclError> {
        let begin = Instant::now();
        self.begin_end()?.wait(patience).map(|()| begin.elapsed())
    }

    fn begin_end(&mut self) -> Result<Ending, NcclError> {
        let Some(raw) = self.raw.take() else { return Ok(Ending(None)) };
        let (done, ended) = mpsc::sync_channel(1);
        let abort = move || {
            // The thread's own, for it may outlive the caller's interest.
            let raw: Raw = raw;
            let _call = raw.context.calls().begin(GIVING_BACK);
            let outcome = raw.context.bind().map_err(NcclError::from).and_then(|()| {
                // SAFETY: it lives, and nobody uses it any more.
                let mut code = unsafe { (raw.nccl.functions.ncclCommAbort)(raw.communicator) };
                // In progress is what other calls have left; the communicator is gone all the same.
                if code == IN_PROGRESS {
                    code = SUCCESS;
                }
                raw.nccl.check("ncclCommAbort", code, ptr::null_mut())
            });
            let _ = done.send(outcome);
        };
        let spawned = thread::Builder::new().name("nccl-abort".to_owned()).spawn(abort);
        if let Err(error) = spawned {
            let reason = error.to_string();
            return Err(CudaError::NoThreads { reason }.into());
        }
        Ok(Ending(Some(ended)))
    }
}

/// An abort under way; `None` where there was nothing to abort.
struct Ending(Option<mpsc::Receiver<Result<(), NcclError>>>);

impl Ending {
    fn wait(self, patience: Duration) -> Result<(), NcclError> {
        match self.0.map(|ended| ended.recv_timeout(patience)) {
            None => Ok(()),
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => Err(NcclError::AbortStuck { waited: patience }),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Nobody is left to be told.
        let _ = self.end(ABORT_PATIENCE);
    }
}
