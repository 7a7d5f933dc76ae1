//! NCCL communicators as owned values.
//!
//! A communicator is non-blocking: each call is polled until it is complete, up to a deadline,
//! before the next call. (NCCL rejects a second call meanwhile.) Over NVLink NCCL does not report a
//! dead peer. The owner of a communicator detects a dead peer by other means and [`aborts`] the
//! communicator, which ends kernels that wait for the peer.
//!
//! Order of destruction: CUDA graphs that contain its operations, the communicator, the ranges that
//! it moves, the context. Memory that a stuck operation uses is freed only after the abort, because
//! freeing waits for the operation.
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
        context::{Context, Stream, StreamRole},
        driver_calls::FREE_USUAL,
        error::CudaError,
        memory::Range,
    },
    BFLOAT16, FLOAT32, Functions, IN_PROGRESS, Nccl, NcclConfig, NcclError, OLDEST,
    RawCommunicator, SUCCESS, SUM, UINT8, UNDEFINED, UniqueId,
};
use crate::{layout::Dtype, peer::WaitLimit};

/// Time of busy polling before the first pause. NCCL's own thread completes a launch within it if
/// no peer is needed.
const SPIN: Duration = Duration::from_micros(300);
/// Pause between later polls.
const PAUSE: Duration = Duration::from_millis(1);

/// Time-out of an abort. Aborts took 0.4 to 0.7 s with a dead or a stopped peer.
const ABORT_MAX: Duration = Duration::from_secs(10);

/// A part of a range to send or receive.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    range: &'a Range,
    offset: usize,
    bytes: usize,
}

impl<'a> Piece<'a> {
    /// # Panics
    /// If the piece is not inside the range.
    pub fn new(range: &'a Range, offset: usize, bytes: usize) -> Self {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= range.bytes());
        assert!(fits, "{bytes} bytes at offset {offset} exceed a range of {} bytes", range.bytes());
        Self { range, offset, bytes }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn address(&self) -> u64 {
        self.range.part(self.offset, self.bytes)
    }
}

/// One send or receive of a group, and its peer rank.
#[derive(Clone, Copy, Debug)]
pub struct SendOrReceive<'a> {
    pub peer: u32,
    pub piece: Piece<'a>,
}

/// Parameters of a communicator.
#[derive(Clone, Copy, Debug)]
pub struct CommunicatorOptions {
    pub rank: u32,
    pub ranks: u32,
    pub id: UniqueId,
    /// Smallest and largest number of CTAs of its kernels. They bound its bandwidth, the SMs that
    /// it uses, and its memory. `None`: NCCL decides.
    pub ctas: Option<(u32, u32)>,
}

/// One rank's communicator.
///
/// All ranks must call the same operations in the same order. A process with several communicators
/// on one GPU must launch their operations one at a time. Otherwise two GPUs may start with
/// different operations and deadlock.
#[derive(Debug)]
pub struct Communicator {
    /// `None` after an abort.
    raw: Option<OwnedCommunicator>,
    rank: u32,
    ranks: u32,
    /// Number of the last operation.
    sequence: u64,
    is_broken: bool,
    memory_bytes: u64,
}

#[derive(Debug)]
struct OwnedCommunicator {
    communicator: RawCommunicator,
    nccl: Arc<Nccl>,
    context: Arc<Context>,
}

// SAFETY: any thread may use a communicator, one thread at a time, which `&mut self` guarantees.
unsafe impl Send for OwnedCommunicator {}

impl Communicator {
    /// Makes NCCL load its kernels to this GPU by creating and destroying a communicator of one
    /// rank. The first communicator of a process takes 0.2 to 0.4 s for this, and more during other
    /// work.
    pub fn load_kernels<'a>(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        limit: impl Into<WaitLimit<'a>>,
    ) -> Result<(), NcclError> {
        let options =
            CommunicatorOptions { rank: 0, ranks: 1, id: nccl.unique_id()?, ctas: Some((1, 1)) };
        let alone = Self::make(nccl, context, options, limit.into())?;
        alone.abort(ABORT_MAX).map(drop)
    }

    /// Creates the communicator together with the other ranks.
    pub fn new<'a>(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        options: CommunicatorOptions,
        limit: impl Into<WaitLimit<'a>>,
    ) -> Result<Self, NcclError> {
        let CommunicatorOptions { rank, ranks, .. } = options;
        if rank >= ranks || ranks < 2 {
            return Err(NcclError::Rank { rank, ranks });
        }
        Self::make(nccl, context, options, limit.into())
    }

    fn make(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        options: CommunicatorOptions,
        limit: WaitLimit<'_>,
    ) -> Result<Self, NcclError> {
        let CommunicatorOptions { rank, ranks, id, ctas } = options;
        let (least, most) = match ctas {
            Some((least, most)) if least == 0 || most < least || most > 64 => {
                return Err(NcclError::Ctas { least, most });
            }
            Some((least, most)) => (least as c_int, most as c_int),
            None => (UNDEFINED, UNDEFINED),
        };
        context.bind()?;
        let before = context.free_bytes()?;
        let mut config = NcclConfig {
            size: size_of::<NcclConfig>(),
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
            let reason = "NCCL returned no communicator".to_owned();
            return Err(NcclError::Call { call, code, reason });
        }
        let raw = OwnedCommunicator {
            communicator,
            nccl: Arc::clone(nccl),
            context: Arc::clone(context),
        };
        let (sequence, is_broken, memory_bytes) = (0, false, 0);
        // Dropping `made` aborts the communicator, also after an error below.
        let mut made = Self { raw: Some(raw), rank, ranks, sequence, is_broken, memory_bytes };
        made.finish(call, code, limit)?;
        made.memory_bytes = before.saturating_sub(context.free_bytes()?);
        Ok(made)
    }

    pub fn rank(&self) -> u32 {
        self.rank
    }

    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Returns the number of operations so far. All ranks count alike, so unequal numbers show
    /// which rank skipped an operation.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Returns the GPU memory in bytes that creating the communicator took, measured by the GPU's
    /// free memory. The first operation takes more.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Launches sends and receives as one operation and returns its number. A rank lists its sends
    /// to a peer in the order of that peer's receives. The first exchange of a pair also connects,
    /// for which both ranks must call within the limit.
    ///
    /// The memory must not be used until the operation is complete on the stream, or an abort has
    /// returned.
    pub fn exchange<'a, R: StreamRole>(
        &mut self,
        sends: &[SendOrReceive<'_>],
        receives: &[SendOrReceive<'_>],
        stream: &Stream<R>,
        limit: impl Into<WaitLimit<'a>>,
    ) -> Result<u64, NcclError> {
        for SendOrReceive { peer, .. } in sends.iter().chain(receives) {
            if *peer >= self.ranks || *peer == self.rank {
                let (rank, ranks) = (self.rank, self.ranks);
                return Err(NcclError::Peer { peer: *peer, rank, ranks });
            }
        }
        self.launch("ncclGroupEnd", limit.into(), |functions, communicator| {
            let mut failed = None;
            // SAFETY: the call takes no pointers.
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
                for SendOrReceive { peer, piece } in moves {
                    let (address, bytes) = (piece.address(), piece.bytes);
                    // SAFETY: the piece is inside a range of this process; stream and communicator
                    // are alive.
                    let code =
                        unsafe { call(address, bytes, UINT8, *peer as c_int, communicator, to) };
                    if code != SUCCESS && code != IN_PROGRESS {
                        failed.get_or_insert((name, code));
                    }
                }
            }
            // SAFETY: the group was started above.
            let code = unsafe { (functions.ncclGroupEnd)() };
            failed.unwrap_or(("ncclGroupEnd", code))
        })
    }

    /// Launches an all-reduce (sum) of `from` into `to`, which may be the same piece.
    ///
    /// # Panics
    /// If the pieces differ in length or do not contain whole elements.
    pub fn all_reduce<R: StreamRole>(
        &mut self,
        from: Piece<'_>,
        to: Piece<'_>,
        dtype: Dtype,
        stream: &Stream<R>,
        deadline: Instant,
    ) -> Result<u64, NcclError> {
        assert_eq!(from.bytes, to.bytes, "input and output have equal lengths");
        assert!(from.bytes.is_multiple_of(dtype.bytes()), "{} bytes of {dtype}", from.bytes);
        let kind = match dtype {
            Dtype::F32 => FLOAT32,
            Dtype::Bf16 => BFLOAT16,
        };
        let call = "ncclAllReduce";
        self.launch(call, deadline.into(), |functions, communicator| {
            // SAFETY: both pieces are inside ranges of this process; stream and communicator are
            // alive.
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

    /// Launches a broadcast of the bytes of rank `root` into the piece of every other rank.
    pub fn broadcast<'a, R: StreamRole>(
        &mut self,
        piece: Piece<'_>,
        root: u32,
        stream: &Stream<R>,
        limit: impl Into<WaitLimit<'a>>,
    ) -> Result<u64, NcclError> {
        if root >= self.ranks {
            let (rank, ranks) = (self.rank, self.ranks);
            return Err(NcclError::Peer { peer: root, rank, ranks });
        }
        let call = "ncclBroadcast";
        self.launch(call, limit.into(), |functions, communicator| {
            let (address, root) = (piece.address(), root as c_int);
            // SAFETY: the piece is inside a range of this process; stream and communicator are
            // alive.
            let code = unsafe {
                (functions.ncclBroadcast)(
                    address,
                    address,
                    piece.bytes,
                    UINT8,
                    root,
                    communicator,
                    stream.raw().cast(),
                )
            };
            (call, code)
        })
    }

    fn launch(
        &mut self,
        call: &'static str,
        limit: WaitLimit<'_>,
        call_nccl: impl FnOnce(&Functions, RawCommunicator) -> (&'static str, c_int),
    ) -> Result<u64, NcclError> {
        if self.is_broken {
            return Err(NcclError::Broken { sequence: self.sequence });
        }
        let raw = self.raw.as_ref().expect("only an abort takes it");
        raw.context.bind()?;
        self.sequence += 1;
        let (failed, code) = call_nccl(&raw.nccl.functions, raw.communicator);
        let call = if code == IN_PROGRESS { call } else { failed };
        self.finish(call, code, limit).map(|()| self.sequence)
    }

    /// Waits until NCCL has launched the operation. The operation itself is then on its stream.
    fn finish(
        &mut self,
        call: &'static str,
        mut code: c_int,
        limit: WaitLimit<'_>,
    ) -> Result<(), NcclError> {
        let raw = self.raw.as_ref().expect("only an abort takes it");
        let begin = Instant::now();
        self.is_broken = true;
        while code == IN_PROGRESS {
            let waited = begin.elapsed();
            if Instant::now() >= limit.deadline {
                return Err(NcclError::TimedOut { call, waited });
            }
            if waited < SPIN {
                thread::yield_now();
            } else if (limit.cancelled)() {
                return Err(NcclError::Cancelled { call, waited });
            } else {
                thread::sleep(PAUSE);
            }
            // SAFETY: the communicator is alive; the call writes one integer.
            let asked =
                unsafe { (raw.nccl.functions.ncclCommGetAsyncError)(raw.communicator, &mut code) };
            raw.nccl.check("ncclCommGetAsyncError", asked, raw.communicator)?;
        }
        raw.nccl.check(call, code, raw.communicator)?;
        self.is_broken = false;
        Ok(())
    }

    /// Aborts the communicator and its kernels, and returns the time that this took. After `Ok` no
    /// copy is in flight, and the memory may be used again.
    ///
    /// # Errors
    /// [`NcclError::AbortStuck`] if NCCL does not return within `time_out`. A thread keeps waiting
    /// for NCCL, and the operations' memory stays in use.
    pub fn abort(mut self, time_out: Duration) -> Result<Duration, NcclError> {
        self.end(time_out)
    }

    /// [Aborts](Self::abort) all communicators in parallel. An error means that one of them did not
    /// end.
    pub fn abort_all(
        mut communicators: Vec<Communicator>,
        time_out: Duration,
    ) -> Result<Duration, NcclError> {
        let begin = Instant::now();
        let ending: Vec<_> = communicators.iter_mut().map(Communicator::start_abort).collect();
        let mut outcome = Ok(());
        for ending in ending {
            let rest = time_out.saturating_sub(begin.elapsed());
            outcome = outcome.and(ending.and_then(|ending| ending.wait(rest)));
        }
        outcome.map(|()| begin.elapsed())
    }

    fn end(&mut self, time_out: Duration) -> Result<Duration, NcclError> {
        let begin = Instant::now();
        self.start_abort()?.wait(time_out).map(|()| begin.elapsed())
    }

    fn start_abort(&mut self) -> Result<AbortInProgress, NcclError> {
        let Some(raw) = self.raw.take() else { return Ok(AbortInProgress(None)) };
        let (done, ended) = mpsc::sync_channel(1);
        let abort = move || {
            // Owned by this thread, which may outlive the caller.
            let raw: OwnedCommunicator = raw;
            let _call = raw.context.calls().begin(FREE_USUAL);
            let outcome = raw.context.bind().map_err(NcclError::from).and_then(|()| {
                // SAFETY: the communicator is alive, and no other thread uses it from now on.
                let mut code = unsafe { (raw.nccl.functions.ncclCommAbort)(raw.communicator) };
                // IN_PROGRESS is left over from an earlier call; the communicator is destroyed
                // anyway.
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
        Ok(AbortInProgress(Some(ended)))
    }
}

/// An abort in progress; `None` if there was nothing to abort.
struct AbortInProgress(Option<mpsc::Receiver<Result<(), NcclError>>>);

impl AbortInProgress {
    fn wait(self, time_out: Duration) -> Result<(), NcclError> {
        match self.0.map(|ended| ended.recv_timeout(time_out)) {
            None => Ok(()),
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => Err(NcclError::AbortStuck { waited: time_out }),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // No caller is left to report an error to.
        let _ = self.end(ABORT_MAX);
    }
}
