//! Computes the digest of KV blocks on the GPU that has them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    context::{Context, DeviceToHost, Event, Stream},
    error::CudaError,
    ffi::DigestBlocks,
    library::KernelLibrary,
    memory::{DeviceMemory, InFlight, Pinned, Range},
};
use crate::{digest::Heads, layout::BlockId};

/// Buffers of the digest kernel on one GPU, for one digest at a time.
#[derive(Debug)]
pub(super) struct Digester {
    library: Arc<KernelLibrary>,
    digest_blocks: DigestBlocks,
    context: Arc<Context>,
    stream: Stream<DeviceToHost>,
    /// Device memory in which the digest is accumulated.
    sum: Range,
    /// Host memory and event of the result's download. `None` after an error.
    download: Mutex<Option<(Pinned<u64>, Event)>>,
}

/// A digest that the GPU is computing.
pub(super) struct DigestInFlight<'a> {
    // `finish` waits for the copy before it releases the lock.
    copy: InFlight<u64>,
    download: MutexGuard<'a, Option<(Pinned<u64>, Event)>>,
}

impl Digester {
    /// # Errors
    /// When the library has no digest kernel, or memory is exhausted.
    pub fn new(context: &Arc<Context>, library: Arc<KernelLibrary>) -> Result<Self, CudaError> {
        let digest_blocks = library.digest_blocks()?;
        let memory = DeviceMemory::new(context, "a digest", size_of::<u64>())?;
        let download = (Pinned::zeroed(context, "a digest's download", 1)?, Event::new(context)?);
        Ok(Self {
            digest_blocks,
            library,
            context: Arc::clone(context),
            stream: Stream::new(context)?,
            sum: memory.cut(size_of::<u64>())?,
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
        let block_bytes = heads.own().block_bytes();
        let ids: Vec<i32> = blocks.iter().map(|block| block.0 as i32).collect();
        let end = blocks.iter().map(|block| block.index() + 1).max().unwrap_or(0);
        // Checks that the blocks are inside the range.
        let arena = data.part(0, end * block_bytes);
        let (run_bytes, run_stride, first_bytes) = heads.runs();
        let mut download = self.download.lock().unwrap_or_else(PoisonError::into_inner);
        self.context.bind()?;
        let (pinned, done) = download.take().ok_or(CudaError::EarlierCallFailed)?;
        // SAFETY: the blocks are inside their range, by the layout of `heads`. The sum has room for one
        // number, which the lock protects. The list is read before the call returns.
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
                self.sum.address(),
                self.stream.raw().cast(),
            )
        };
        if let Err(error) = self.library.check("baton_digest_blocks", code) {
            // The launch was refused, so the next digest may start.
            *download = Some((pinned, done));
            return Err(error);
        }
        let copy = pinned.download(1, &self.sum, 0, &self.stream, done)?;
        Ok(DigestInFlight { copy, download })
    }
}

impl DigestInFlight<'_> {
    pub fn finish(mut self) -> Result<u64, CudaError> {
        let (pinned, done) = self.copy.finish()?;
        let digest = pinned[0];
        *self.download = Some((pinned, done));
        Ok(digest)
    }
}
