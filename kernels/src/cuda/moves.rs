//! Gathers KV blocks, or parts of them, into contiguous memory, and scatters them back.
//!
//! One kernel launch with few CTAs moves all blocks if [`DeviceKv::move_with`] has set a library.
//! Otherwise, or when SMs must stay free, the copy engines move whole blocks at 5 µs per 2 MiB
//! block.

use cudarc::driver::sys;

use super::{
    context::{Stream, StreamRole},
    copies::UnorderedCopies,
    error::{CudaError, Named},
    kv::DeviceKv,
    library::KernelLibrary,
    memory::Range,
};
use crate::layout::BlockId;

/// CTAs of the kernel: enough to match NCCL's throughput, and few compared with a forward pass.
const MOVERS: i32 = 16;
/// Vector width of the kernel in bytes.
const VECTOR_BYTES: usize = 16;

/// The bytes that are moved of each row of a block; a row has a layer's keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockRows {
    /// Bytes from one row to the next.
    pub pitch: usize,
    /// First byte within a row.
    pub first: usize,
    pub width: usize,
    /// Rows of a block.
    pub count: usize,
}

impl BlockRows {
    /// Returns the bytes of a whole block.
    pub(super) fn block_bytes(&self) -> usize {
        self.pitch * self.count
    }

    /// Returns the bytes that are moved of a block.
    pub(super) fn bytes(&self) -> usize {
        self.width * self.count
    }

    /// Returns whether whole blocks are moved.
    pub(super) fn are_whole(&self) -> bool {
        self.width == self.pitch
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the blocks to contiguous memory.
    Gather,
    /// From contiguous memory to the blocks.
    Scatter,
    /// Like `Scatter`, with copy engines instead of SMs where blocks are whole.
    ScatterByCopies,
}

impl Direction {
    fn by_copies(self, rows: &BlockRows) -> bool {
        self == Self::ScatterByCopies && rows.are_whole()
    }
}

/// Returns the contiguous runs of these blocks: offset and bytes.
pub(super) fn places_of(
    ids: &[BlockId],
    block_bytes: usize,
) -> impl Iterator<Item = (usize, usize)> {
    ids.chunk_by(|one, next| one.0.checked_add(1) == Some(next.0))
        .map(move |run| (run[0].index() * block_bytes, run.len() * block_bytes))
}

/// Enqueues a gather to, or a scatter from, contiguous memory at `place`.
///
/// # Safety
/// Nothing else writes the source, or accesses the destination, until the work completes.
pub(super) unsafe fn move_blocks<R: StreamRole>(
    kv: &DeviceKv,
    rows: &BlockRows,
    ids: &[BlockId],
    (staging, place): (&Range, usize),
    direction: Direction,
    stream: &Stream<R>,
) -> Result<(), CudaError> {
    let fit = [rows.pitch, rows.first, rows.width].iter().all(|it| it.is_multiple_of(VECTOR_BYTES));
    if let Some(library) = kv.library()
        && fit
        && !direction.by_copies(rows)
    {
        // SAFETY: nothing else writes the source or accesses the destination until the work
        // completes (`# Safety`).
        return unsafe { by_kernel(library, kv, rows, ids, (staging, place), direction, stream) };
    }
    // SAFETY: nothing else writes the source or accesses the destination until the work completes
    // (`# Safety`).
    unsafe { by_copies(kv, rows, ids, (staging, place), direction, stream) }
}

/// # Safety
/// See [`move_blocks`].
unsafe fn by_kernel<R: StreamRole>(
    library: &KernelLibrary,
    kv: &DeviceKv,
    rows: &BlockRows,
    ids: &[BlockId],
    (staging, place): (&Range, usize),
    direction: Direction,
    stream: &Stream<R>,
) -> Result<(), CudaError> {
    // Checks that the blocks are within the KV memory and `place` within the staging memory.
    let end = ids.iter().map(|id| id.index() + 1).max().unwrap_or(0);
    let arena = kv.data().part(0, end * rows.block_bytes());
    let staging = staging.part(place, ids.len() * rows.bytes());
    let ids: Vec<i32> = ids.iter().map(|id| id.0 as i32).collect();
    // SAFETY: blocks and place are inside their ranges, and the caller guarantees the rest. The
    // list is read before the call returns.
    unsafe {
        launch!(
            library,
            stream,
            baton_move_rows(
                arena,
                rows.block_bytes() as i64,
                rows.pitch as i64,
                rows.first as i64,
                rows.width as i64,
                ids.as_ptr(),
                ids.len() as i32,
                staging,
                i32::from(direction == Direction::Gather),
                MOVERS
            )
        )
    }
}

/// # Safety
/// See [`move_blocks`].
unsafe fn by_copies<R: StreamRole>(
    kv: &DeviceKv,
    rows: &BlockRows,
    ids: &[BlockId],
    (staging, mut place): (&Range, usize),
    direction: Direction,
    stream: &Stream<R>,
) -> Result<(), CudaError> {
    let mut whole = UnorderedCopies::default();
    for (offset, bytes) in places_of(ids, rows.block_bytes()) {
        let moved = bytes / rows.block_bytes() * rows.bytes();
        let (block, slot) = (kv.data().part(offset, bytes), staging.part(place, moved));
        place += moved;
        match (rows.are_whole(), direction) {
            (true, Direction::Gather) => whole.add(slot, block, bytes),
            (true, Direction::Scatter | Direction::ScatterByCopies) => {
                whole.add(block, slot, bytes)
            }
            (false, _) => {
                let height = moved / rows.width;
                let (strided, contiguous) =
                    ((block, rows.pitch, rows.first), (slot, rows.width, 0));
                let (from, to) = match direction {
                    Direction::Gather => (strided, contiguous),
                    Direction::Scatter | Direction::ScatterByCopies => (contiguous, strided),
                };
                // SAFETY: rows of both are inside their parts, as just checked. The caller
                // guarantees the rest.
                unsafe { copy_rows(from, to, rows.width, height, stream) }?;
            }
        }
    }
    // SAFETY: the copies are inside the parts of blocks and staging memory that `part` has checked.
    // Nothing else writes the source or accesses the destination until the work completes (`#
    // Safety`).
    unsafe { whole.put(stream) }
}

/// Enqueues a strided copy. `from` and `to` have address, pitch and first byte within a row.
///
/// # Safety
/// See [`move_blocks`]; the rows are in mapped memory.
pub(super) unsafe fn copy_rows<R: StreamRole>(
    (from, from_pitch, from_first): (sys::CUdeviceptr, usize, usize),
    (to, to_pitch, to_first): (sys::CUdeviceptr, usize, usize),
    width: usize,
    height: usize,
    stream: &Stream<R>,
) -> Result<(), CudaError> {
    let memory = sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED;
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: from_first,
        srcY: 0,
        srcMemoryType: memory,
        srcHost: std::ptr::null(),
        srcDevice: from,
        srcArray: std::ptr::null_mut(),
        srcPitch: from_pitch,
        dstXInBytes: to_first,
        dstY: 0,
        dstMemoryType: memory,
        dstHost: std::ptr::null_mut(),
        dstDevice: to,
        dstArray: std::ptr::null_mut(),
        dstPitch: to_pitch,
        WidthInBytes: width,
        Height: height,
    };
    // SAFETY: the rows of both are in mapped memory, and nothing else writes the source or accesses
    // the destination until the copy completes (`# Safety`). The description is read before the
    // call returns.
    unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.raw()) }.named("cuMemcpy2DAsync")
}
