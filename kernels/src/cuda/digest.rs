//! Computes digests of KV blocks and weights on the GPU that has them.

use std::{
    slice,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    attention::dtype_code,
    context::{Context, DeviceToHost, Event, Role, Stream},
    error::CudaError,
    ffi::{DigestBlocks, DigestWeight},
    library::KernelLibrary,
    memory::{DeviceMemory, InFlight, Pinned, Range},
};
use crate::{
    digest::{Heads, WeightRuns},
    layout::{BlockId, Dtype},
};

/// Digests of one download.
const DIGESTS_MAX: usize = 128;
/// Numbers that the kernel writes for a part of a weight: the digest, and the elements that are not finite.
pub(super) const SUMS: usize = 2;

/// Buffers of the digest kernel on one GPU, for one download of digests at a time.
#[derive(Debug)]
pub(super) struct Digester {
    library: Arc<KernelLibrary>,
    digest_blocks: DigestBlocks,
    context: Arc<Context>,
    stream: Stream<DeviceToHost>,
    /// Device memory in which the digests are accumulated.
    sums: Range,
    /// Host memory and event of the results' download. `None` after an error.
    download: Mutex<Option<(Pinned<u64>, Event)>>,
}

/// Digests that the GPU is computing.
pub(super) struct DigestInFlight<'a> {
    count: usize,
    // `finish` waits for the copy before it releases the lock.
    copy: InFlight<u64>,
    download: MutexGuard<'a, Option<(Pinned<u64>, Event)>>,
}

impl Digester {
    /// # Errors
    /// When the library has no digest kernel, or memory is exhausted.
    pub fn new(context: &Arc<Context>, library: Arc<KernelLibrary>) -> Result<Self, CudaError> {
        let digest_blocks = library.digest_blocks()?;
        let bytes = DIGESTS_MAX * size_of::<u64>();
        let memory = DeviceMemory::new(context, "digests", bytes)?;
        let pinned = Pinned::zeroed(context, "the download of digests", DIGESTS_MAX)?;
        let download = (pinned, Event::new(context)?);
        Ok(Self {
            digest_blocks,
            library,
            context: Arc::clone(context),
            stream: Stream::new(context)?,
            sums: memory.cut(bytes)?,
            download: Mutex::new(Some(download)),
        })
    }

    /// Launches the digest of `heads` of `blocks`; a block of `data` has these heads only. The blocks must be
    /// written already and stay unchanged until the digest completes.
    pub fn start(
        &self,
        data: &Range,
        heads: &Heads,
        blocks: &[BlockId],
    ) -> Result<DigestInFlight<'_>, CudaError> {
        self.start_lists(data, heads, &[blocks])
    }

    /// Launches a digest for each block by itself. See [`start`](Self::start).
    ///
    /// # Panics
    /// When there are more than [`Self::BLOCKS_MAX`] blocks.
    pub fn start_each(
        &self,
        data: &Range,
        heads: &Heads,
        blocks: &[BlockId],
    ) -> Result<DigestInFlight<'_>, CudaError> {
        let lists: Vec<_> = blocks.iter().map(slice::from_ref).collect();
        self.start_lists(data, heads, &lists)
    }

    /// Blocks whose own digests are computed at a time.
    pub const BLOCKS_MAX: usize = DIGESTS_MAX;

    fn start_lists(
        &self,
        data: &Range,
        heads: &Heads,
        lists: &[&[BlockId]],
    ) -> Result<DigestInFlight<'_>, CudaError> {
        assert!(
            lists.len() <= DIGESTS_MAX,
            "{} digests; expected at most {DIGESTS_MAX}",
            lists.len()
        );
        let mut download = self.download.lock().unwrap_or_else(PoisonError::into_inner);
        self.context.bind()?;
        let (pinned, done) = download.take().ok_or(CudaError::EarlierCallFailed)?;
        for (index, blocks) in lists.iter().enumerate() {
            if let Err(error) = self.launch(data, heads, blocks, index) {
                // A refused launch. The next digest may start once the earlier launches have ended.
                let _ = self.stream.synchronize();
                *download = Some((pinned, done));
                return Err(error);
            }
        }
        let count = lists.len();
        let copy = pinned.download(count, &self.sums, 0, &self.stream, done)?;
        Ok(DigestInFlight { count, copy, download })
    }

    /// Launches the digest of a list of blocks into the sum at `index`.
    fn launch(
        &self,
        data: &Range,
        heads: &Heads,
        blocks: &[BlockId],
        index: usize,
    ) -> Result<(), CudaError> {
        let block_bytes = heads.own().block_bytes();
        let ids: Vec<i32> = blocks.iter().map(|block| block.0 as i32).collect();
        let end = blocks.iter().map(|block| block.index() + 1).max().unwrap_or(0);
        // Checks that the blocks are inside the range.
        let arena = data.part(0, end * block_bytes);
        let (run_bytes, run_stride, first_bytes) = heads.runs();
        // SAFETY: the blocks are inside their range, by the layout of `heads`. The caller holds the lock, which
        // protects the sum. The list is read before the call returns.
        let code = unsafe {
            (self.digest_blocks)(
                arena,
                block_bytes as i64,
                run_bytes as i64,
                run_stride as i64,
                first_bytes as i64,
                heads.whole_bytes() as i64,
                ids.as_ptr(),
                ids.len() as i32,
                self.sums.part(index * size_of::<u64>(), size_of::<u64>()),
                self.stream.raw().cast(),
            )
        };
        self.library.check("baton_digest_blocks", code)
    }
}

impl DigestInFlight<'_> {
    /// Returns the digests, one for each list or block.
    pub fn finish(mut self) -> Result<Vec<u64>, CudaError> {
        let (pinned, done) = self.copy.finish()?;
        let digests = pinned[..self.count].to_vec();
        *self.download = Some((pinned, done));
        Ok(digests)
    }
}

/// The kernel that digests parts of weights.
pub(super) struct WeightDigests {
    library: Arc<KernelLibrary>,
    kernel: DigestWeight,
}

impl WeightDigests {
    pub fn new(library: &Arc<KernelLibrary>) -> Result<Self, CudaError> {
        Ok(Self { library: Arc::clone(library), kernel: library.digest_weight()? })
    }

    /// Enqueues the digest of the part at an offset of `memory`. The kernel writes the [`SUMS`] numbers with this
    /// index.
    pub fn enqueue<R: Role>(
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
