//! Blocks that lie apart, or parts of them, to and from a range where they follow one another.
//!
//! By a kernel of few thread blocks, all of them in one launch, where [`DeviceKv::move_with`] has named its
//! library; else, or where multiprocessors are to be left alone, by the copy engines, at 5 us for a block of 2 MiB.

use std::ops::Range as Indices;

use cudarc::driver::sys;

use super::{
    context::{Role, Stream},
    copies::Copies,
    error::{CudaError, Named},
    kv::DeviceKv,
    library::KernelLibrary,
    memory::{DeviceMemory, Range},
    staging::StagingCopies,
};
use crate::layout::{BlockId, KvLayout};

/// Thread blocks of the kernel: enough to keep pace with NCCL, and few beside a forward's.
const MOVERS: i32 = 16;
/// What the kernel moves at once.
const VECTOR_BYTES: usize = 16;

/// Which bytes of a block are moved: the same of each row, which are a layer's keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    /// From one row to the next.
    pub pitch: usize,
    /// Where in a row they begin.
    pub first: usize,
    pub width: usize,
    /// Rows of a block.
    pub count: usize,
}

impl Rows {
    /// These heads of blocks that have `layout`.
    fn of_heads(layout: KvLayout, heads: Indices<usize>) -> Self {
        let head_bytes = layout.head_elements() * layout.dtype.bytes();
        Self {
            pitch: layout.kv_head_count * head_bytes,
            first: heads.start * head_bytes,
            width: heads.len() * head_bytes,
            count: 2 * layout.layer_count,
        }
    }

    /// Of a whole block.
    pub fn block_bytes(&self) -> usize {
        self.pitch * self.count
    }

    /// What is moved of a block.
    pub fn bytes(&self) -> usize {
        self.width * self.count
    }

    /// Whether blocks are moved as they are.
    pub fn are_whole(&self) -> bool {
        self.width == self.pitch
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Out of the blocks.
    Gather,
    /// Into the blocks.
    Scatter,
    /// The same, without multiprocessors where blocks are whole.
    ScatterAside,
}

impl Way {
    fn by_copies(self, rows: &Rows) -> bool {
        self == Self::ScatterAside && rows.are_whole()
    }
}

/// Where blocks lie, as few places as there are runs: offset and bytes.
pub(super) fn places_of(
    ids: &[BlockId],
    block_bytes: usize,
) -> impl Iterator<Item = (usize, usize)> {
    ids.chunk_by(|one, next| one.0.checked_add(1) == Some(next.0))
        .map(move |run| (run[0].index() * block_bytes, run.len() * block_bytes))
}

/// Moves the rows of these blocks to or from `place` on, one block behind the other.
///
/// # Safety
/// Nothing else writes what is read, or reads or writes what is written, until the stream has done it.
pub(super) unsafe fn move_blocks<R: Role>(
    kv: &DeviceKv,
    rows: &Rows,
    ids: &[BlockId],
    (staging, place): (&Range, usize),
    way: Way,
    stream: &Stream<R>,
) -> Result<(), CudaError> {
    let fit = [rows.pitch, rows.first, rows.width].iter().all(|it| it.is_multiple_of(VECTOR_BYTES));
    if let Some(library) = kv.library()
        && fit
        && !way.by_copies(rows)
    {
        // SAFETY: the caller's promise.
        return unsafe { by_kernel(library, kv, rows, ids, (staging, place), way, stream) };
    }
    // SAFETY: the caller's promise.
    unsafe { by_copies(kv, rows, ids, (staging, place), way, stream) }
}

/// # Safety
/// As [`move_blocks`].
unsafe fn by_kernel<R: Role>(
    library: &KernelLibrary,
    kv: &DeviceKv,
    rows: &Rows,
    ids: &[BlockId],
    (staging, place): (&Range, usize),
    way: Way,
    stream: &Stream<R>,
) -> Result<(), CudaError> {
    // Blocks are within the KV, and the place within the staging.
    let end = ids.iter().map(|id| id.index() + 1).max().unwrap_or(0);
    let arena = kv.data().part(0, end * rows.block_bytes());
    let staging = staging.part(place, ids.len() * rows.bytes());
    let ids: Vec<i32> = ids.iter().map(|id| id.0 as i32).collect();
    // SAFETY: blocks and place are inside their ranges; the rest is the caller's promise. The list is read
    // before the call returns.
    let code = unsafe {
        (library.functions().baton_move_rows)(
            arena,
            rows.block_bytes() as i64,
            rows.pitch as i64,
            rows.first as i64,
            rows.width as i64,
            ids.as_ptr(),
            ids.len() as i32,
            staging,
            i32::from(way == Way::Gather),
            MOVERS,
            stream.raw().cast(),
        )
    };
    library.check("baton_move_rows", code)
}

/// # Safety
/// As [`move_blocks`].
unsafe fn by_copies<R: Role>(
    kv: &DeviceKv,
    rows: &Rows,
    ids: &[BlockId],
    (staging, mut place): (&Range, usize),
    way: Way,
    stream: &Stream<R>,
) -> Result<(), CudaError> {
    let mut whole = Copies::default();
    for (offset, bytes) in places_of(ids, rows.block_bytes()) {
        let moved = bytes / rows.block_bytes() * rows.bytes();
        let (block, slot) = (kv.data().part(offset, bytes), staging.part(place, moved));
        place += moved;
        match (rows.are_whole(), way) {
            (true, Way::Gather) => whole.add(slot, block, bytes),
            (true, Way::Scatter | Way::ScatterAside) => whole.add(block, slot, bytes),
            (false, _) => {
                let height = moved / rows.width;
                let (apart, together) = ((block, rows.pitch, rows.first), (slot, rows.width, 0));
                let (from, to) = match way {
                    Way::Gather => (apart, together),
                    Way::Scatter | Way::ScatterAside => (together, apart),
                };
                // SAFETY: rows of both are inside their parts, which were just checked; the rest is the
                // caller's promise.
                unsafe { copy_rows(from, to, rows.width, height, stream) }?;
            }
        }
    }
    // SAFETY: as above.
    unsafe { whole.put(stream) }
}

/// From and to: address, pitch, and where in a row the bytes begin.
///
/// # Safety
/// As [`move_blocks`], of rows in memory that is mapped.
unsafe fn copy_rows<R: Role>(
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
    // SAFETY: the caller's promise; the description is read before the call returns.
    unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.raw()) }.named("cuMemcpy2DAsync")
}

impl DeviceKv {
    /// For tests: these heads of blocks, one block behind the other, as a channel brings them together.
    pub fn gather(&self, heads: Indices<usize>, ids: &[BlockId]) -> Result<Vec<u8>, CudaError> {
        let rows = Rows::of_heads(self.layout(), heads);
        let mut bytes = vec![0; ids.len() * rows.bytes()];
        self.moved(&rows, ids, &bytes, Way::Gather)?.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// For tests: puts these heads of blocks to their places, as a channel does.
    pub fn scatter(
        &self,
        heads: Indices<usize>,
        ids: &[BlockId],
        bytes: &[u8],
    ) -> Result<(), CudaError> {
        let rows = Rows::of_heads(self.layout(), heads);
        assert_eq!(bytes.len(), ids.len() * rows.bytes(), "bytes of {} blocks", ids.len());
        self.moved(&rows, ids, bytes, Way::Scatter).map(drop)
    }

    /// What has these bytes at first, once all was moved to or from it.
    fn moved(
        &self,
        rows: &Rows,
        ids: &[BlockId],
        bytes: &[u8],
        way: Way,
    ) -> Result<Range, CudaError> {
        assert!(rows.first + rows.width <= rows.pitch, "a block has these heads");
        assert!(ids.iter().all(|id| id.0 < self.block_count()), "there are these blocks");
        let staging = DeviceMemory::new(self.context(), "blocks of a test", bytes.len())?;
        let staging = staging.cut(bytes.len())?;
        staging.write(0, bytes)?;
        let stream: Stream<StagingCopies> = Stream::new(self.context())?;
        // SAFETY: `bytes` is as long as the rows; nobody else has the staging, and the blocks are the test's
        // own until this returns.
        unsafe { move_blocks(self, rows, ids, (&staging, 0), way, &stream) }?;
        stream.synchronize()?;
        Ok(staging)
    }
}
