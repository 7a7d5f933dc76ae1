//! Computes digests of KV blocks and weights on the GPU that has them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    context::{Compute, Context, Event, Stream, StreamRole},
    error::CudaError,
    ffi::{self, DigestLists, DigestWeight, dtype_code},
    library::KernelLibrary,
    memory::{DeviceMemory, PinnedMemory, Range},
    stream_progress::{StreamMark, StreamProgress},
};
use crate::{
    digest::{DigestPurpose, Heads, WeightRuns},
    layout::{BlockId, Dtype},
};

/// Numbers that the kernel writes for a part of a weight: the digest, and the elements that are not
/// finite.
pub(super) const SUMS: usize = 2;

/// Computes digests of blocks on one GPU. The kernel stores them into host memory: a copy to the
/// host would queue behind the copies of blocks to the host.
#[derive(Debug)]
pub(super) struct Digester {
    library: Arc<KernelLibrary>,
    digest_lists: DigestLists,
    context: Arc<Context>,
    transfers: Mutex<DigestLane>,
    /// One thread saves and one loads, so neither waits for another call.
    saves: Mutex<DigestLane>,
    loads: Mutex<DigestLane>,
}

/// Stream and memory of one call at a time.
#[derive(Debug)]
struct DigestLane {
    stream: Stream<Compute>,
    progress: StreamProgress,
    done: Event,
    /// Device memory in which the digests are accumulated, and the number of CTAs that have added
    /// their sums. The kernel leaves zeros.
    sums: Range,
    /// Whether the sums are zeros once the work in the stream is complete.
    is_cleared: bool,
    /// The kernel writes them. They are read after the call's mark.
    results: PinnedMemory<u64>,
}

/// Digests that the GPU is computing. The wait for the digests has no deadline, because the blocks
/// must not be written while the kernel may read them. If the device hangs, steps hang too, and the
/// engine thread reports it.
pub(super) struct DigestsInFlight<'a> {
    count: usize,
    /// `None` after the wait.
    mark: Option<StreamMark>,
    lane: MutexGuard<'a, DigestLane>,
}

impl DigestLane {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let bytes = (ffi::DIGESTS_MAX + 1) * size_of::<u64>();
        let (stream, sums) =
            (Stream::new(context)?, DeviceMemory::new(context, "digests", bytes)?.cut(bytes)?);
        Ok(Self {
            stream,
            progress: StreamProgress::new(context)?,
            done: Event::new(context)?,
            sums,
            is_cleared: false,
            results: PinnedMemory::zeroed(context, "digests", ffi::DIGESTS_MAX)?,
        })
    }

    /// Clears the sums unless they are zeros already.
    fn clear(&mut self) -> Result<(), CudaError> {
        if !self.is_cleared {
            self.sums.fill(0, &self.stream)?;
            self.is_cleared = true;
        }
        Ok(())
    }

    /// Marks the end of the work in the stream so far.
    fn mark(&mut self) -> Result<StreamMark, CudaError> {
        self.done.record(&self.stream)?;
        self.progress.mark(&self.stream)
    }
}

impl Digester {
    /// # Errors
    /// When the library has no digest kernel, or memory is exhausted.
    pub(super) fn new(
        context: &Arc<Context>,
        library: Arc<KernelLibrary>,
    ) -> Result<Self, CudaError> {
        let digest_lists = library.digest_lists()?;
        let lane = || DigestLane::new(context).map(Mutex::new);
        let (transfers, saves, loads) = (lane()?, lane()?, lane()?);
        let context = Arc::clone(context);
        Ok(Self { digest_lists, library, context, transfers, saves, loads })
    }

    /// Launches the digest of `heads` of `blocks` for a transfer; a block of `data` has these heads
    /// only. The blocks must be written already and stay unchanged until the digest completes.
    pub(super) fn start(
        &self,
        data: &Range,
        heads: &Heads,
        blocks: &[BlockId],
    ) -> Result<DigestsInFlight<'_>, CudaError> {
        self.start_call(data, heads, blocks, false, DigestPurpose::Transfer)
    }

    /// Launches a digest for each block by itself. See [`start`](Self::start).
    ///
    /// # Errors
    /// When there are no blocks, or more than [`Self::BLOCKS_MAX`].
    pub(super) fn start_each(
        &self,
        data: &Range,
        heads: &Heads,
        blocks: &[BlockId],
        purpose: DigestPurpose,
    ) -> Result<DigestsInFlight<'_>, CudaError> {
        self.start_call(data, heads, blocks, true, purpose)
    }

    /// Blocks whose own digests are computed at a time.
    pub(super) const BLOCKS_MAX: usize = ffi::DIGESTS_MAX;

    fn start_call(
        &self,
        data: &Range,
        heads: &Heads,
        blocks: &[BlockId],
        is_each: bool,
        purpose: DigestPurpose,
    ) -> Result<DigestsInFlight<'_>, CudaError> {
        let mut lane = self.lane(purpose);
        self.context.bind()?;
        lane.clear()?;
        let launched = self.launch(data, heads, blocks, is_each, &lane);
        match launched.and_then(|()| lane.mark()) {
            Ok(mark) => {
                let count = if is_each { blocks.len() } else { 1 };
                Ok(DigestsInFlight { count, mark: Some(mark), lane })
            }
            Err(error) => {
                // Earlier launches of this call may leave sums. They must end before the blocks are
                // written.
                lane.is_cleared = false;
                let _ = lane.stream.synchronize();
                Err(error)
            }
        }
    }

    /// Waits until the earlier call of this purpose is complete.
    fn lane(&self, purpose: DigestPurpose) -> MutexGuard<'_, DigestLane> {
        let lane = match purpose {
            DigestPurpose::Transfer => &self.transfers,
            DigestPurpose::SaveToHost => &self.saves,
            DigestPurpose::LoadFromHost => &self.loads,
        };
        lane.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn launch(
        &self,
        data: &Range,
        heads: &Heads,
        blocks: &[BlockId],
        is_each: bool,
        lane: &DigestLane,
    ) -> Result<(), CudaError> {
        let block_bytes = heads.own().block_bytes();
        let ids: Vec<i32> = blocks.iter().map(|block| block.0 as i32).collect();
        let end = blocks.iter().map(|block| block.index() + 1).max().unwrap_or(0);
        // Checks that the blocks are inside the range.
        let arena = data.part(0, end * block_bytes);
        let (run_bytes, run_stride, first_bytes) = heads.runs();
        // SAFETY: the blocks are inside their range, by the layout of `heads`. The caller holds the
        // lane's lock until the stream's work is complete, so nothing else accesses sums and
        // results, which hold the largest number of digests. Pinned memory has one address for host
        // and GPU. The list is read before the call returns.
        let code = unsafe {
            (self.digest_lists)(
                arena,
                block_bytes as i64,
                run_bytes as i64,
                run_stride as i64,
                first_bytes as i64,
                heads.whole_bytes() as i64,
                ids.as_ptr(),
                ids.len() as i32,
                i32::from(is_each),
                lane.sums.address(),
                lane.results.base(),
                lane.stream.raw().cast(),
            )
        };
        self.library.check("baton_digest_lists", code)
    }
}

impl DigestsInFlight<'_> {
    /// Returns the digests, one for the list or for each block.
    pub(super) fn finish(mut self) -> Result<Vec<u64>, CudaError> {
        self.wait()?;
        Ok(self.lane.results[..self.count].to_vec())
    }

    fn wait(&mut self) -> Result<(), CudaError> {
        self.mark.take().map_or(Ok(()), |mark| mark.wait(&self.lane.done))
    }
}

impl Drop for DigestsInFlight<'_> {
    fn drop(&mut self) {
        // The next call uses the lane, and the blocks may be written.
        let _ = self.wait();
    }
}

/// The kernel that digests parts of weights.
pub(super) struct WeightDigests {
    library: Arc<KernelLibrary>,
    kernel: DigestWeight,
}

impl WeightDigests {
    pub(super) fn new(library: &Arc<KernelLibrary>) -> Result<Self, CudaError> {
        Ok(Self { library: Arc::clone(library), kernel: library.digest_weight()? })
    }

    /// Enqueues the digest of the part at an offset of `memory`. The kernel writes the [`SUMS`]
    /// numbers with this index.
    pub(super) fn enqueue<R: StreamRole>(
        &self,
        dtype: Dtype,
        (memory, offset, runs): (&Range, usize, &WeightRuns),
        (sums, index): (&Range, usize),
        stream: &Stream<R>,
    ) -> Result<(), CudaError> {
        let bytes = SUMS * size_of::<u64>();
        // SAFETY: part and sums are inside their memory, which is freed after the stream's work.
        let code = unsafe {
            (self.kernel)(
                dtype_code(dtype),
                memory.part(offset, runs.bytes()),
                runs.runs as i64,
                runs.run_bytes as i64,
                runs.run_stride as i64,
                runs.first as i64,
                sums.part(index * bytes, bytes),
                stream.raw().cast(),
            )
        };
        self.library.check("baton_digest_weight", code)
    }
}
