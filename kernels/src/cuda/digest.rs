//! The digest of blocks, where they lie.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    context::{Context, DeviceToHost, Event, Stream},
    error::CudaError,
    ffi::DigestBlocks,
    library::KernelLibrary,
    memory::{DeviceMemory, InFlight, Pinned, Range},
};
use crate::{digest::Heads, layout::BlockId};

/// What the kernel needs on one GPU, made ahead, for one digest at a time.
#[derive(Debug)]
pub(super) struct Digester {
    library: Arc<KernelLibrary>,
    digest_blocks: DigestBlocks,
    context: Arc<Context>,
    stream: Stream<DeviceToHost>,
    /// Where a digest is added up.
    sum: Range,
    /// Its way to the host. `None` after a fault.
    way: Mutex<Option<(Pinned<u64>, Event)>>,
}

/// A digest that the GPU computes.
pub(super) struct DigestInFlight<'a> {
    // Waited for before the next one may go.
    copy: InFlight<u64>,
    way: MutexGuard<'a, Option<(Pinned<u64>, Event)>>,
}

impl Digester {
    /// # Errors
    /// When the library has no such kernel, or there is no memory.
    pub fn new(context: &Arc<Context>, library: Arc<KernelLibrary>) -> Result<Self, CudaError> {
        let digest_blocks = library.digest_blocks()?;
        let memory = DeviceMemory::new(context, "a digest", size_of::<u64>())?;
        let way = (Pinned::zeroed(context, "a digest's way", 1)?, Event::new(context)?);
        Ok(Self {
            digest_blocks,
            library,
            context: Arc::clone(context),
            stream: Stream::new(context)?,
            sum: memory.cut(size_of::<u64>())?,
            way: Mutex::new(Some(way)),
        })
    }

    /// Starts to compute what these heads of `blocks` add to the digest. In `data` a block has these heads
    /// alone. Whatever wrote the blocks is done, and nothing writes them before the end.
    pub fn start(
        &self,
        data: &Range,
        heads: &Heads,
        blocks: &[BlockId],
    ) -> Result<DigestInFlight<'_>, CudaError> {
        const FAULTY: CudaError =
            CudaError::RangeFull { what: "a digest after a fault", wanted: 1, left: 0 };
        let block_bytes = heads.own().block_bytes();
        let ids: Vec<i32> = blocks.iter().map(|block| block.0 as i32).collect();
        let end = blocks.iter().map(|block| block.index() + 1).max().unwrap_or(0);
        // StuckLimits whether they are inside.
        let arena = data.part(0, end * block_bytes);
        let (run_bytes, run_stride, first_bytes) = heads.runs();
        let mut way = self.way.lock().unwrap_or_else(PoisonError::into_inner);
        self.context.bind()?;
        let (pinned, done) = way.take().ok_or(FAULTY)?;
        // SAFETY: the blocks are inside their range, by the layout of `heads`; the sum has room for one
        // number, which nobody else uses under the lock. The list is read before the call returns.
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
            // A refusal, behind which the next one may go.
            *way = Some((pinned, done));
            return Err(error);
        }
        let copy = pinned.download(1, &self.sum, 0, &self.stream, done)?;
        Ok(DigestInFlight { copy, way })
    }
}

impl DigestInFlight<'_> {
    pub fn finish(mut self) -> Result<u64, CudaError> {
        let (pinned, done) = self.copy.finish()?;
        let digest = pinned[0];
        *self.way = Some((pinned, done));
        Ok(digest)
    }
}
