//! Entry points of GPU tests: buffers and blocks in host memory, and an error that ends the
//! context.

use std::{ops::Range as Indices, sync::Arc};

use half::bf16;

use super::{
    backend::CudaBackend,
    buffer::CudaBuffer,
    context::{Compute, Context, Stream, StreamRole},
    digest::{SUMS, WeightDigests},
    error::CudaError,
    kv::DeviceKv,
    library::KernelLibrary,
    memory::{DeviceMemory, Range},
    moves::{BlockRows, Direction, move_blocks},
    staging::StagingCopies,
};
use crate::{
    digest::{DigestPurpose, Heads, WeightRuns},
    layout::{BlockId, Dtype, KvLayout},
};

impl KernelLibrary {
    /// Launches a kernel that reads an unmapped address. From then on every call in this context
    /// fails, until the process ends.
    pub fn fault<R: StreamRole>(&self, stream: &Stream<R>) -> Result<(), CudaError> {
        const NOWHERE: u64 = 256;
        // SAFETY: the driver never allocates this address; the read is meant to fail.
        unsafe { launch!(self, stream, baton_read_stream(NOWHERE, 16, NOWHERE)) }
    }
}

/// Returns the digest of a part of a weight by the kernel, and the number of its elements that are
/// infinite or NaN.
pub fn weight_digest(
    library: &Arc<KernelLibrary>,
    context: &Arc<Context>,
    dtype: Dtype,
    runs: &WeightRuns,
    bytes: &[u8],
) -> Result<(u64, u64), CudaError> {
    let stream = Stream::<Compute>::new(context)?;
    let memory = |bytes| DeviceMemory::new(context, "a weight to digest", bytes)?.cut(bytes);
    let (mut found, data) = ([0u64; SUMS], memory(bytes.len().max(16))?);
    let sums = memory(size_of_val(&found))?;
    data.write(0, bytes)?;
    // The kernel clears what an earlier digest has left.
    sums.fill(0xff, &stream)?;
    WeightDigests::new(library)?.enqueue(dtype, (&data, 0, runs), (&sums, 0), &stream)?;
    stream.synchronize()?;
    sums.read(0, &mut found)?;
    Ok(found.into())
}

impl DeviceKv {
    /// Returns the digest of each block, computed by a single call of the kernel.
    ///
    /// # Panics
    /// When no library computes digests ([`Self::digest_with`]).
    pub fn digests_by_one_call(&self, blocks: &[BlockId]) -> Result<Vec<u64>, CudaError> {
        let (digester, heads) = (self.digester().expect("a library"), Heads::all(self.layout()));
        digester.start_each(self.data(), &heads, blocks, DigestPurpose::SaveToHost)?.finish()
    }
}

impl CudaBackend {
    /// Reads the first rows of a buffer as f32, after all kernels have completed.
    pub fn read(&self, buffer: &CudaBuffer, rows: usize) -> Result<Vec<f32>, CudaError> {
        self.check()?;
        assert_eq!(buffer.pending.get(), None, "cannot read rows with a deferred norm");
        assert!(buffer.is_mirrored(), "cannot read rows that are only in FP8");
        self.compute().synchronize()?;
        let count = buffer.bytes(rows) / buffer.dtype.bytes();
        let values = match buffer.dtype {
            Dtype::F32 => {
                let mut values = vec![0.0f32; count];
                buffer.data.read(0, &mut values)?;
                values
            }
            Dtype::Bf16 => {
                let mut values = vec![bf16::ZERO; count];
                buffer.data.read(0, &mut values)?;
                values.into_iter().map(bf16::to_f32).collect()
            }
        };
        let rows = values.chunks(buffer.stride.max(1));
        Ok(rows.flat_map(|row| &row[..buffer.width]).copied().collect())
    }

    /// Writes the first rows of a buffer.
    pub fn write(&self, buffer: &mut CudaBuffer, values: &[f32]) -> Result<(), CudaError> {
        self.compute().synchronize()?;
        buffer.forget();
        for (row, values) in values.chunks(buffer.width).enumerate() {
            let offset = buffer.bytes(row);
            match buffer.dtype {
                Dtype::F32 => buffer.data.write(offset, values)?,
                Dtype::Bf16 => {
                    let values: Vec<_> =
                        values.iter().map(|&value| bf16::from_f32(value)).collect();
                    buffer.data.write(offset, &values)?;
                }
            }
        }
        Ok(())
    }

    /// Fills a buffer with NaN.
    pub fn poison(&self, buffer: &mut CudaBuffer) -> Result<(), CudaError> {
        buffer.data.fill(0xff, self.compute())
    }
}

impl DeviceKv {
    /// Gathers these heads of blocks as an NCCL channel does.
    pub fn gather(&self, heads: Indices<usize>, ids: &[BlockId]) -> Result<Vec<u8>, CudaError> {
        let rows = rows_of_heads(self.layout(), heads);
        let mut bytes = vec![0; ids.len() * rows.bytes()];
        self.moved(&rows, ids, &bytes, Direction::Gather)?.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Scatters these heads of blocks as an NCCL channel does.
    pub fn scatter(
        &self,
        heads: Indices<usize>,
        ids: &[BlockId],
        bytes: &[u8],
    ) -> Result<(), CudaError> {
        let rows = rows_of_heads(self.layout(), heads);
        assert_eq!(bytes.len(), ids.len() * rows.bytes(), "size of {} blocks", ids.len());
        self.moved(&rows, ids, bytes, Direction::Scatter).map(drop)
    }

    /// Runs a gather or scatter on staging memory of these initial bytes, and returns its final
    /// bytes.
    fn moved(
        &self,
        rows: &BlockRows,
        ids: &[BlockId],
        bytes: &[u8],
        direction: Direction,
    ) -> Result<Range, CudaError> {
        assert!(rows.first + rows.width <= rows.pitch, "heads exceed the block's heads");
        assert!(ids.iter().all(|id| id.0 < self.block_count()), "a block id is out of range");
        let staging = DeviceMemory::new(self.context(), "a test's staging", bytes.len())?;
        let staging = staging.cut(bytes.len())?;
        staging.write(0, bytes)?;
        let stream: Stream<StagingCopies> = Stream::new(self.context())?;
        // SAFETY: `bytes` is as long as the rows; nothing else uses the staging memory, and the
        // test owns the blocks until this returns.
        unsafe { move_blocks(self, rows, ids, (&staging, 0), direction, &stream) }?;
        stream.synchronize()?;
        Ok(staging)
    }
}

/// Returns the bytes of these heads in blocks of `layout`.
fn rows_of_heads(layout: KvLayout, heads: Indices<usize>) -> BlockRows {
    let head_bytes = layout.head_bytes();
    BlockRows {
        pitch: layout.kv_head_count * head_bytes,
        first: heads.start * head_bytes,
        width: heads.len() * head_bytes,
        count: 2 * layout.layer_count,
    }
}
