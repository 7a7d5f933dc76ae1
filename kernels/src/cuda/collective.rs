//! Low-latency all-reduce between the GPUs of one host, one process per GPU, by Baton's own
//! kernels.
//!
//! 1. Every rank allocates a [`GroupArena`], which the other ranks will write into, and sends its
//!    [`GroupHandle`] as bytes to the other ranks.
//! 2. With the handles of all ranks, the arena becomes a [`CudaGroup`]. All ranks must have created
//!    their group before the first all-reduce.
//! 3. All ranks launch the same all-reduces, eagerly or in a CUDA graph. Addresses never change,
//!    and the result is bitwise equal on all ranks.
//! 4. No kernel waits forever: after the group's time-out, or after [`CudaGroup::stop`],
//!    all-reduces return at once with undefined results, and [`CudaGroup::check`] returns an error.
//!    To recover, every rank synchronizes its streams, passes a barrier, calls
//!    [`CudaGroup::reset`], and passes another barrier.

use std::{
    ops,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use super::{
    context::{Compute, Context, HostToDevice, Stream},
    error::CudaError,
    export::{IpcRange, take},
    ffi::{self, dtype_code},
    library::KernelLibrary,
    memory::{DeviceMemory, PinnedMemory, Range},
};
use crate::layout::Dtype;

const RANKS: [usize; 3] = [2, 4, 8];
/// Maximum width of f32 rows; bf16 rows may be twice as wide.
const NORM_WIDTH_MAX: usize = 16_384;
/// Prefix of every handle, with the version of the format.
const MAGIC: [u8; 8] = *b"BATONGA4";

/// Handle with which the other ranks map a rank's arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupHandle {
    rank: u32,
    ranks: u32,
    arena_bytes: u64,
    memory: IpcRange,
}

impl GroupHandle {
    pub const BYTES: usize = MAGIC.len() + 2 * 4 + 8 + IpcRange::BYTES;

    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let fields: [&[u8]; 5] = [
            &MAGIC,
            &self.rank.to_le_bytes(),
            &self.ranks.to_le_bytes(),
            &self.arena_bytes.to_le_bytes(),
            &self.memory.to_bytes(),
        ];
        fields.concat().try_into().expect("the fields have the sum of these lengths")
    }

    /// Parses a handle. Returns `None` for another version of the format or malformed bytes.
    pub fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        if take(&mut bytes)? != MAGIC {
            return None;
        }
        let handle = Self {
            rank: u32::from_le_bytes(take(&mut bytes)?),
            ranks: u32::from_le_bytes(take(&mut bytes)?),
            arena_bytes: u64::from_le_bytes(take(&mut bytes)?),
            memory: IpcRange::take(&mut bytes)?,
        };
        bytes.is_empty().then_some(handle)
    }

    /// Maps this rank's arena into the process of the rank with handle `own`.
    fn map(&self, context: &Arc<Context>, own: &Self) -> Result<Range, CudaError> {
        let wrong = |reason| CudaError::GroupArena { rank: self.rank as usize, reason };
        if (self.ranks, self.arena_bytes) != (own.ranks, own.arena_bytes) {
            let (bytes, ranks) = (self.arena_bytes, self.ranks);
            let (wanted, count) = (own.arena_bytes, own.ranks);
            return Err(wrong(format!(
                "has {bytes} bytes and {ranks} ranks; expected {wanted} bytes and {count} ranks"
            )));
        }
        let mapped = self.memory.map(context, "a rank's arena", self.arena_bytes);
        mapped.map_err(|error| wrong(format!("cannot be mapped: {error}")))
    }
}

/// Memory of this rank that the other ranks will write into. [`CudaGroup::new`] turns it into a
/// [`CudaGroup`].
#[derive(Debug)]
pub struct GroupArena {
    data: Range,
    message_bytes: usize,
    handle: GroupHandle,
    context: Arc<Context>,
    library: Arc<KernelLibrary>,
}

impl GroupArena {
    /// Allocates an arena for messages of up to `message_bytes` bytes. The arena takes about four
    /// times that.
    pub fn new(
        context: &Arc<Context>,
        library: &Arc<KernelLibrary>,
        (rank, ranks): (usize, usize),
        message_bytes: usize,
    ) -> Result<Self, CudaError> {
        if !RANKS.contains(&ranks) || rank >= ranks {
            let value = format!("{rank} of {ranks}");
            let (what, allowed) = ("the group's rank", "a rank below the count of 2, 4 or 8 ranks");
            return Err(CudaError::Unsupported { what, value, allowed });
        }
        let (_, message) = (context.bind()?, message_bytes.min(isize::MAX as usize / 8) as i64);
        // SAFETY: the function only computes a number.
        let bytes = unsafe { (library.functions().baton_group_arena_bytes)(ranks as i32, message) };
        let memory = DeviceMemory::new(context, "the group's arena", bytes as usize)?;
        let data = memory.cut(bytes as usize)?;
        let handle = GroupHandle {
            rank: rank as u32,
            ranks: ranks as u32,
            arena_bytes: bytes as u64,
            memory: IpcRange::of(context, &data)?,
        };
        let (context, library) = (Arc::clone(context), Arc::clone(library));
        Ok(Self { data, message_bytes, handle, context, library })
    }

    /// Returns the handle for the other ranks.
    pub fn handle(&self) -> GroupHandle {
        self.handle.clone()
    }
}

/// All-reduce algorithm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AllReduceAlgorithm {
    /// The faster one for the message size.
    #[default]
    Auto,
    /// Every rank sends its whole message to every rank.
    OneShot,
    /// Reduce-scatter, then all-gather.
    TwoShot,
}

/// Shape of the message of an all-reduce: contiguous rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllReduceShape {
    pub dtype: Dtype,
    pub rows: usize,
    /// Elements per row, a multiple of 8.
    pub width: usize,
}

impl AllReduceShape {
    pub fn bytes(self) -> usize {
        self.rows * self.width * self.dtype.bytes()
    }
}

/// A residual add and RMS norm that is fused into the all-reduce.
#[derive(Clone, Copy, Debug)]
pub struct AllReduceNorm<'a> {
    /// f32; the result of the all-reduce is added to it.
    pub residual: &'a Range,
    /// f32, with the width of a row.
    pub weight: &'a Range,
    pub eps: f32,
}

/// This rank's side of a group of ranks.
#[derive(Debug)]
pub struct CudaGroup {
    raw: ffi::RawGroup,
    timeout: Duration,
    message_bytes: usize,
    fault: PinnedMemory<u32>,
    context: Arc<Context>,
    library: Arc<KernelLibrary>,
    /// Stream of `stop`, which must not queue behind the waiting kernels.
    aside: Stream<HostToDevice>,
    /// Mapped arenas of the other ranks.
    _mapped: Vec<Range>,
    _data: Range,
}

// SAFETY: the raw addresses are only passed to kernels; the host memory among them belongs to
// `fault`.
unsafe impl Send for CudaGroup {}
// SAFETY: `&self` only reads the raw addresses and passes them to kernels; `fault`, which the GPU
// writes, is read and written as an atomic.
unsafe impl Sync for CudaGroup {}

impl CudaGroup {
    /// Maps the other ranks' arenas; `handles` has all ranks in order. No kernel waits for longer
    /// than `timeout`.
    pub fn new(
        arena: GroupArena,
        handles: &[GroupHandle],
        timeout: Duration,
    ) -> Result<Self, CudaError> {
        let GroupArena { data, message_bytes, handle: own, context, library } = arena;
        context.bind()?;
        let mut arenas = [0; ffi::GROUP_RANKS_MAX];
        let mut mapped = Vec::new();
        for (rank, place) in arenas.iter_mut().enumerate().take(own.ranks as usize) {
            let wrong = |reason: &str| CudaError::GroupArena { rank, reason: reason.to_owned() };
            let theirs = handles.get(rank).ok_or_else(|| wrong("has no handle"))?;
            if theirs.rank as usize != rank {
                return Err(wrong("has the handle of another rank"));
            }
            *place = if theirs == &own {
                data.address()
            } else if theirs.rank == own.rank {
                return Err(wrong("differs from the arena that this rank has allocated"));
            } else {
                let arena = theirs.map(&context, &own)?;
                let address = arena.address();
                mapped.push(arena);
                address
            };
        }
        let fault = PinnedMemory::zeroed(&context, "the group's fault flag", 1)?;
        let raw = ffi::RawGroup {
            arenas,
            arena_bytes: own.arena_bytes as i64,
            fault: fault.base(),
            timeout_ns: timeout.as_nanos().clamp(1, i64::MAX as u128) as i64,
            rank: own.rank as i32,
            ranks: own.ranks as i32,
        };
        let aside = Stream::new(&context)?;
        let (_mapped, _data) = (mapped, data);
        let group =
            Self { raw, timeout, message_bytes, fault, context, library, aside, _mapped, _data };
        group.reset()?;
        Ok(group)
    }

    pub fn rank(&self) -> usize {
        self.raw.rank as usize
    }

    pub fn ranks(&self) -> usize {
        self.raw.ranks as usize
    }

    /// Returns the maximum message size in bytes.
    pub fn message_bytes(&self) -> usize {
        self.message_bytes
    }

    /// Returns whether the residual add and RMS norm are fused into an all-reduce of this shape.
    /// The fused kernel is one-shot, which is slower than two-shot plus a separate norm above some
    /// size.
    pub(super) fn fuses_norm(&self, rows: AllReduceShape) -> bool {
        // Measured for 2 and 4 ranks only.
        let quicker = match self.ranks() {
            2 => 2 << 20,
            4 => 256 << 10,
            _ => 64 << 10,
        };
        let fits = 2 * self.message_bytes / self.ranks();
        rows.bytes() <= fits.min(quicker) && rows.width <= NORM_WIDTH_MAX
    }

    /// Resets this rank's arena. All ranks pass a barrier before and after, with no all-reduce in
    /// flight.
    pub fn reset(&self) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: the arena belongs to this rank and is allocated.
        unsafe { launch!(&self.library, self.aside, baton_group_reset(&self.raw)) }?;
        self.aside.synchronize()?;
        self.fault_word().store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Aborts all-reduces that wait for other ranks, and all later ones until the next reset.
    pub fn stop(&self) -> Result<(), CudaError> {
        self.fault_word().store(1, Ordering::Relaxed);
        self.context.bind()?;
        // SAFETY: the arenas of all ranks are mapped as long as this group lives, and `aside` is
        // not the stream of the calls that it aborts.
        unsafe { launch!(&self.library, self.aside, baton_group_stop(&self.raw)) }
    }

    /// Checks the all-reduces that the host has seen complete. Reads one word of host memory.
    ///
    /// # Errors
    /// [`CudaError::GroupStopped`] when an all-reduce was aborted.
    pub fn check(&self) -> Result<(), CudaError> {
        match self.fault_word().load(Ordering::Relaxed) {
            0 => Ok(()),
            _ => Err(CudaError::GroupStopped { rank: self.rank(), timeout: self.timeout }),
        }
    }

    /// Launches `out` = sum of all ranks' `x`, rounded once to the row type. `out` may be `x`.
    ///
    /// # Panics
    /// When a range is too short.
    pub fn all_reduce(
        &self,
        rows: AllReduceShape,
        x: &Range,
        out: &Range,
        algorithm: AllReduceAlgorithm,
        is_dependent: bool,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        let algorithm = match algorithm {
            AllReduceAlgorithm::Auto => ffi::ALL_REDUCE_AUTO,
            AllReduceAlgorithm::OneShot => ffi::ALL_REDUCE_ONE_SHOT,
            AllReduceAlgorithm::TwoShot => ffi::ALL_REDUCE_TWO_SHOT,
        };
        let args = ffi::AllReduceArgs { algorithm, ..self.args(rows, x, out, is_dependent) };
        self.run(&args, stream)
    }

    /// Launches `residual` += sum of all ranks' `x`, and `out` = RMS norm of `residual` in the row
    /// type.
    ///
    /// # Panics
    /// When a range is too short.
    pub fn all_reduce_norm(
        &self,
        rows: AllReduceShape,
        x: &Range,
        norm: AllReduceNorm<'_>,
        out: &Range,
        is_dependent: bool,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        let args = ffi::AllReduceArgs {
            residual: norm.residual.part(0, rows.rows * rows.width * size_of::<f32>()),
            weight: norm.weight.part(0, rows.width * size_of::<f32>()),
            eps: norm.eps,
            ..self.args(rows, x, out, is_dependent)
        };
        self.run(&args, stream)
    }

    /// Launches an in-place all-reduce of the rows at byte `offset` of a range.
    pub(super) fn all_reduce_at(
        &self,
        rows: AllReduceShape,
        (x, offset): (&Range, usize),
        is_dependent: bool,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        let at = x.part(offset, rows.bytes());
        self.run(&ffi::AllReduceArgs { x: at, out: at, ..shape(rows, is_dependent) }, stream)
    }

    /// Launches an all-gather of columns: `x` has this rank's columns, `out` the columns of all
    /// ranks in order. Rows that do not fit into the arenas at once are gathered in rounds.
    ///
    /// # Panics
    /// When a range is too short, or the columns of the ranks are not contiguous from 0 on.
    pub fn gather(
        &self,
        columns: &[ops::Range<usize>],
        (x, x_stride): (&Range, usize),
        (out, out_stride): (&Range, usize),
        rows: usize,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        let firsts = self.firsts(columns);
        let (own, all) = (columns[self.rank()].len(), firsts[self.ranks()] as usize);
        assert!(own <= x_stride && all <= out_stride, "gather: columns exceed the row");
        let args = ffi::GatherArgs {
            x: x.part(0, rows * x_stride * size_of::<f32>()),
            x_stride: x_stride as i64,
            out: out.part(0, rows * out_stride * size_of::<f32>()),
            out_stride: out_stride as i64,
            firsts,
            rows: rows as i32,
            ..Default::default()
        };
        stream.context().bind()?;
        // SAFETY: both ranges have the rows, as checked above; the arenas are as for an all-reduce.
        unsafe { launch!(&self.library, stream, baton_group_gather(&self.raw, &args)) }
    }

    /// Returns the first column of each rank, and the end.
    fn firsts(&self, columns: &[ops::Range<usize>]) -> [i32; ffi::GROUP_RANKS_MAX + 1] {
        assert_eq!(columns.len(), self.ranks(), "every rank has columns");
        let mut firsts = [0; ffi::GROUP_RANKS_MAX + 1];
        for (rank, columns) in columns.iter().enumerate() {
            assert_eq!(columns.start as i32, firsts[rank], "columns of the ranks are contiguous");
            firsts[rank + 1] = columns.end as i32;
        }
        firsts
    }

    /// Launches sampling from logits that are sharded over the ranks; `tokens` has the vocabulary
    /// range of each rank.
    ///
    /// # Safety
    /// As for `baton_sample`: the ranges in `args` have the sizes of pool and step. The scratch
    /// memory is for this number of ranks.
    pub(super) unsafe fn sample(
        &self,
        tokens: &[ops::Range<usize>],
        (pool, step): (&ffi::SlotPool, &ffi::StepArrays),
        args: &ffi::SampleArgs,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        let firsts = self.firsts(tokens);
        stream.context().bind()?;
        let (library, firsts) = (&self.library, firsts.as_ptr());
        // SAFETY: the ranges in `args` have the sizes of pool and step, and the scratch memory is
        // for this number of ranks (`# Safety`). The arenas of all ranks are mapped as long as this
        // group lives.
        unsafe { launch!(library, stream, baton_group_sample(&self.raw, pool, step, args, firsts)) }
    }

    fn args(
        &self,
        rows: AllReduceShape,
        x: &Range,
        out: &Range,
        is_dependent: bool,
    ) -> ffi::AllReduceArgs {
        ffi::AllReduceArgs {
            x: x.part(0, rows.bytes()),
            out: out.part(0, rows.bytes()),
            ..shape(rows, is_dependent)
        }
    }

    fn run(&self, args: &ffi::AllReduceArgs, stream: &Stream<Compute>) -> Result<(), CudaError> {
        stream.context().bind()?;
        // SAFETY: the ranges have the rows' sizes, as the callers check. The kernel stays within
        // the arenas' size, which is equal on all ranks, for any data of the other ranks.
        unsafe { launch!(&self.library, stream, baton_all_reduce(&self.raw, args)) }
    }

    fn fault_word(&self) -> &AtomicU32 {
        // SAFETY: the word is aligned and lives as long as this value. The GPU writes it, and the
        // host accesses it through this atomic only.
        unsafe { AtomicU32::from_ptr(self.fault.base()) }
    }
}

fn shape(rows: AllReduceShape, is_dependent: bool) -> ffi::AllReduceArgs {
    // The library rejects sizes that do not fit an `i32`, as it rejects other invalid sizes.
    let count = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    ffi::AllReduceArgs {
        dtype: dtype_code(rows.dtype),
        rows: count(rows.rows),
        width: count(rows.width),
        pdl: is_dependent.into(),
        ..Default::default()
    }
}

impl Drop for CudaGroup {
    fn drop(&mut self) {
        // Stops kernels that wait for dead ranks, so that they do not wait for the time-out.
        let _ = self.stop();
        let _ = self.context.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::export::tests::part;

    fn handle() -> GroupHandle {
        GroupHandle { rank: 1, ranks: 4, arena_bytes: 1 << 40, memory: part(3) }
    }

    #[test]
    fn handle_round_trips_and_other_bytes_are_rejected() {
        let bytes = handle().to_bytes();
        assert_eq!(GroupHandle::from_bytes(&bytes), Some(handle()));
        assert_eq!(GroupHandle::from_bytes(&bytes[1..]), None);
        assert_eq!(GroupHandle::from_bytes(&bytes[..bytes.len() - 1]), None);
        assert_eq!(GroupHandle::from_bytes(&[&bytes[..], &[0]].concat()), None);
        let mut other = bytes;
        other[7] += 1;
        assert_eq!(GroupHandle::from_bytes(&other), None);
    }

    #[test]
    fn struct_sizes_match_the_header() {
        assert_eq!((size_of::<ffi::RawGroup>(), size_of::<ffi::AllReduceArgs>()), (96, 56));
        assert_eq!(size_of::<ffi::GatherArgs>(), 80);
    }
}
