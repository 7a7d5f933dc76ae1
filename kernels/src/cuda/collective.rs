//! Sums over the GPUs of one host, a process each, by kernels of ours: for messages whose latency counts.
//!
//! 1. Every rank makes a [`GroupArena`], memory that the others will write into, and tells them its
//!    [`GroupHandle`] as bytes, by whatever way the processes have.
//! 2. With the handles of all it becomes a [`Group`]. Before the first sum all ranks have got there.
//! 3. All ranks put the same sums into their streams, eagerly or recorded. Addresses never change, and a
//!    sum is the same on all ranks in every bit.
//! 4. No kernel waits for ever: after the group's patience, or [`Group::stop`], sums end at once and are
//!    worthless, which [`Group::check`] says. Then every rank waits for its streams, all meet, all
//!    [`Group::reset`], all meet again; or all end.

use std::{
    ops, ptr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use super::{
    attention::dtype_code,
    context::{Compute, Context, HostToDevice, Stream},
    error::CudaError,
    ffi,
    ipc::{Part, take},
    library::KernelLibrary,
    memory::{DeviceMemory, Pinned, Range},
};
use crate::layout::Dtype;

const RANKS: [usize; 3] = [2, 4, 8];
/// Of f32; bf16's rows may be twice as wide.
const NORM_WIDTH_MAX: usize = 16_384;
/// In front of every handle, with the version of what follows.
const MAGIC: [u8; 8] = *b"BATONGA3";

/// What a rank tells the others of its arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupHandle {
    rank: u32,
    ranks: u32,
    arena_bytes: u64,
    memory: Part,
}

impl GroupHandle {
    pub const BYTES: usize = MAGIC.len() + 2 * 4 + 8 + Part::BYTES;

    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let fields: [&[u8]; 5] = [
            &MAGIC,
            &self.rank.to_le_bytes(),
            &self.ranks.to_le_bytes(),
            &self.arena_bytes.to_le_bytes(),
            &self.memory.to_bytes(),
        ];
        fields.concat().try_into().expect("the fields have that length together")
    }

    /// `None`: of another version, or nothing of ours.
    pub fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        if take(&mut bytes)? != MAGIC {
            return None;
        }
        let handle = Self {
            rank: u32::from_le_bytes(take(&mut bytes)?),
            ranks: u32::from_le_bytes(take(&mut bytes)?),
            arena_bytes: u64::from_le_bytes(take(&mut bytes)?),
            memory: Part::take(&mut bytes)?,
        };
        bytes.is_empty().then_some(handle)
    }

    /// The arena of which a rank has told this, mapped for the GPU of one that has told `own`.
    fn map(&self, context: &Arc<Context>, own: &Self) -> Result<Range, CudaError> {
        let wrong = |reason| CudaError::GroupArena { rank: self.rank as usize, reason };
        if (self.ranks, self.arena_bytes) != (own.ranks, own.arena_bytes) {
            let (bytes, ranks) = (self.arena_bytes, self.ranks);
            let (wanted, count) = (own.arena_bytes, own.ranks);
            return Err(wrong(format!(
                "has {bytes} bytes for {ranks} ranks, this one's {wanted} for {count}"
            )));
        }
        let mapped = self.memory.map(context, "the arena of a rank", self.arena_bytes);
        mapped.map_err(|error| wrong(format!("is of no use here: {error}")))
    }
}

/// Memory of this rank that the others write into, before it knows them.
#[derive(Debug)]
pub struct GroupArena {
    data: Range,
    message_bytes: usize,
    handle: GroupHandle,
    context: Arc<Context>,
    library: Arc<KernelLibrary>,
}

impl GroupArena {
    /// For sums of up to `message_bytes` bytes; takes four times that of the GPU.
    pub fn new(
        context: &Arc<Context>,
        library: &Arc<KernelLibrary>,
        (rank, ranks): (usize, usize),
        message_bytes: usize,
    ) -> Result<Self, CudaError> {
        if !RANKS.contains(&ranks) || rank >= ranks {
            let value = format!("{rank} of {ranks}");
            let (what, allowed) = ("the rank in a group", "ranks below the count, of 2, 4 or 8");
            return Err(CudaError::Unsupported { what, value, allowed });
        }
        let (_, message) = (context.bind()?, message_bytes.min(isize::MAX as usize / 8) as i64);
        // SAFETY: it multiplies.
        let bytes = unsafe { (library.functions().baton_group_arena_bytes)(ranks as i32, message) };
        let memory = DeviceMemory::new(context, "the arena of a group", bytes as usize)?;
        let data = memory.cut(bytes as usize)?;
        let handle = GroupHandle {
            rank: rank as u32,
            ranks: ranks as u32,
            arena_bytes: bytes as u64,
            memory: Part::of(context, &data)?,
        };
        let (context, library) = (Arc::clone(context), Arc::clone(library));
        Ok(Self { data, message_bytes, handle, context, library })
    }

    /// For the other ranks.
    pub fn handle(&self) -> GroupHandle {
        self.handle.clone()
    }
}

/// How a sum is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SumWay {
    /// The quicker for the size.
    #[default]
    Auto,
    /// Everybody sends everything to everybody.
    OneShot,
    /// Everybody sums one part and sends the sum.
    TwoShot,
}

/// What is summed: packed rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumRows {
    pub dtype: Dtype,
    pub rows: usize,
    /// A multiple of 8.
    pub width: usize,
}

impl SumRows {
    pub fn bytes(self) -> usize {
        self.rows * self.width * self.dtype.bytes()
    }
}

/// What follows a sum in the same kernel.
#[derive(Clone, Copy, Debug)]
pub struct SumNorm<'a> {
    /// f32; the sum is added to it.
    pub residual: &'a Range,
    /// f32, as wide as a row.
    pub weight: &'a Range,
    pub eps: f32,
}

/// This rank's place among the ranks.
#[derive(Debug)]
pub struct Group {
    raw: ffi::Group,
    timeout: Duration,
    message_bytes: usize,
    fault: Pinned<u32>,
    context: Arc<Context>,
    library: Arc<KernelLibrary>,
    /// Where a stop passes the kernels that wait.
    aside: Stream<HostToDevice>,
    /// Arenas of the other ranks.
    _mapped: Vec<Range>,
    data: Range,
}

// SAFETY: the addresses inside are numbers to us; the host memory among them is `fault`'s.
unsafe impl Send for Group {}
// SAFETY: as above; what changes is an atomic number.
unsafe impl Sync for Group {}

impl Group {
    /// Maps the others' arenas; `handles` are of all ranks in their order. No kernel waits for
    /// longer than `timeout`.
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
            let theirs = handles.get(rank).ok_or_else(|| wrong("is not named"))?;
            if theirs.rank as usize != rank {
                return Err(wrong("is named in another rank's place"));
            }
            *place = if theirs == &own {
                data.address()
            } else if theirs.rank == own.rank {
                return Err(wrong("is not the one that this rank has made"));
            } else {
                let arena = theirs.map(&context, &own)?;
                let address = arena.address();
                mapped.push(arena);
                address
            };
        }
        let fault = Pinned::zeroed(&context, "the fault of a group", 1)?;
        let raw = ffi::Group {
            arenas,
            arena_bytes: own.arena_bytes as i64,
            fault: fault.base(),
            timeout_ns: timeout.as_nanos().clamp(1, i64::MAX as u128) as i64,
            rank: own.rank as i32,
            ranks: own.ranks as i32,
        };
        let aside = Stream::new(&context)?;
        let _mapped = mapped;
        let group =
            Self { raw, timeout, message_bytes, fault, context, library, aside, _mapped, data };
        group.reset()?;
        Ok(group)
    }

    pub fn rank(&self) -> usize {
        self.raw.rank as usize
    }

    pub fn ranks(&self) -> usize {
        self.raw.ranks as usize
    }

    /// What it takes of the GPU.
    pub fn arena_bytes(&self) -> usize {
        self.data.bytes()
    }

    /// The longest message.
    pub fn message_bytes(&self) -> usize {
        self.message_bytes
    }

    /// Whether a sum of these rows has its norm in the same kernel: it goes in one shot, which beyond
    /// some size is slower than two and a norm behind them.
    pub(super) fn takes_norm_of(&self, rows: SumRows) -> bool {
        // Measured for 2 and 4.
        let quicker = match self.ranks() {
            2 => 2 << 20,
            4 => 256 << 10,
            _ => 64 << 10,
        };
        let fits = 2 * self.message_bytes / self.ranks();
        rows.bytes() <= fits.min(quicker) && rows.width <= NORM_WIDTH_MAX
    }

    /// Makes this rank's arena as new. Between two points at which all ranks have met, and none has a
    /// sum under way.
    pub fn reset(&self) -> Result<(), CudaError> {
        let call = "baton_group_reset";
        self.aside(call, |functions, group, stream| {
            // SAFETY: the arena is this rank's, and its memory lives.
            unsafe { (functions.baton_group_reset)(group, stream) }
        })?;
        self.aside.synchronize()?;
        self.fault_word().store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Ends sums that wait for other ranks, and those that follow, until the next reset.
    pub fn stop(&self) -> Result<(), CudaError> {
        self.fault_word().store(1, Ordering::Relaxed);
        self.aside("baton_group_stop", |functions, group, stream| {
            // SAFETY: as above.
            unsafe { (functions.baton_group_stop)(group, stream) }
        })
    }

    /// What was summed so far is right, as far as the host has seen its end.
    ///
    /// # Errors
    /// [`CudaError::GroupStopped`] when a sum was given up. It costs nothing to ask.
    pub fn check(&self) -> Result<(), CudaError> {
        match self.fault_word().load(Ordering::Relaxed) {
            0 => Ok(()),
            _ => Err(CudaError::GroupStopped { rank: self.rank(), timeout: self.timeout }),
        }
    }

    /// `out` = the sum of all ranks' `x`, which may be the same range; rounded to the rows' type once.
    ///
    /// # Panics
    /// When a range is too short.
    pub fn all_reduce(
        &self,
        rows: SumRows,
        x: &Range,
        out: &Range,
        way: SumWay,
        is_dependent: bool,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        let way = match way {
            SumWay::Auto => ffi::ALL_REDUCE_AUTO,
            SumWay::OneShot => ffi::ALL_REDUCE_ONE_SHOT,
            SumWay::TwoShot => ffi::ALL_REDUCE_TWO_SHOT,
        };
        let args = ffi::AllReduceArgs { way, ..self.args(rows, x, out, is_dependent) };
        self.run(&args, stream)
    }

    /// `residual` += the sum of all ranks' `x`; `out` = its RMS norm, in the rows' type.
    ///
    /// # Panics
    /// When a range is too short.
    pub fn all_reduce_norm(
        &self,
        rows: SumRows,
        x: &Range,
        norm: SumNorm<'_>,
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

    /// Of the rows at `offset` of a range, in place.
    pub(super) fn sum_at(
        &self,
        rows: SumRows,
        (x, offset): (&Range, usize),
        is_dependent: bool,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        let at = x.part(offset, rows.bytes());
        self.run(&ffi::AllReduceArgs { x: at, out: at, ..shape(rows, is_dependent) }, stream)
    }

    /// `out` = rows of all ranks' columns, in their order; `x` has this rank's. Any number of rows of any
    /// width: what the arenas do not take at once goes in rounds.
    ///
    /// # Panics
    /// When a range is too short, or columns are not one range after the other from 0 on.
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
        assert!(own <= x_stride && all <= out_stride, "gather: columns are within a row");
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
        // SAFETY: both ranges have the rows, as was checked; arenas as for a sum.
        let code = unsafe {
            (self.library.functions().baton_group_gather)(&self.raw, &args, stream.raw().cast())
        };
        self.library.check("baton_group_gather", code)
    }

    /// Where each rank's columns begin, and the end.
    fn firsts(&self, columns: &[ops::Range<usize>]) -> [i32; ffi::GROUP_RANKS_MAX + 1] {
        assert_eq!(columns.len(), self.ranks(), "every rank has columns");
        let mut firsts = [0; ffi::GROUP_RANKS_MAX + 1];
        for (rank, columns) in columns.iter().enumerate() {
            assert_eq!(columns.start as i32, firsts[rank], "columns follow each other");
            firsts[rank + 1] = columns.end as i32;
        }
        firsts
    }

    /// Chooses tokens by logits of this rank's, which all ranks do together; `tokens` are of all ranks.
    ///
    /// # Safety
    /// As for `baton_sample` of the whole rows: `args` names ranges of the sizes of pool and step, and
    /// scratch memory for so many ranks.
    pub(super) unsafe fn sample(
        &self,
        tokens: &[ops::Range<usize>],
        (pool, step): (&ffi::Pool, &ffi::Step),
        args: &ffi::SampleArgs,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        let firsts = self.firsts(tokens);
        stream.context().bind()?;
        let call = self.library.functions().baton_group_sample;
        // SAFETY: the caller's promise; arenas as for a sum.
        let code =
            unsafe { call(&self.raw, pool, step, args, firsts.as_ptr(), stream.raw().cast()) };
        self.library.check("baton_group_sample", code)
    }

    fn args(
        &self,
        rows: SumRows,
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
        // SAFETY: ranges have the rows' sizes, as was checked; arenas are written within their size, which
        // all ranks have agreed upon, whatever the others do.
        let code = unsafe {
            (self.library.functions().baton_all_reduce)(&self.raw, args, stream.raw().cast())
        };
        self.library.check("baton_all_reduce", code)
    }

    fn aside(
        &self,
        name: &'static str,
        call: impl FnOnce(&ffi::Functions, *const ffi::Group, ffi::RawStream) -> i32,
    ) -> Result<(), CudaError> {
        self.context.bind()?;
        let code =
            call(self.library.functions(), ptr::from_ref(&self.raw), self.aside.raw().cast());
        self.library.check(name, code)
    }

    fn fault_word(&self) -> &AtomicU32 {
        // SAFETY: one aligned number that lives as long as this value; the GPU writes it, and the host only
        // by this.
        unsafe { AtomicU32::from_ptr(self.fault.base()) }
    }
}

fn shape(rows: SumRows, is_dependent: bool) -> ffi::AllReduceArgs {
    // More than fits is refused by the library, as other sizes are.
    let count = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    ffi::AllReduceArgs {
        dtype: dtype_code(rows.dtype),
        rows: count(rows.rows),
        width: count(rows.width),
        pdl: is_dependent.into(),
        ..Default::default()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Kernels that wait for ranks that are gone end now, and not after the timeout.
        let _ = self.stop();
        let _ = self.context.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::ipc::tests::part;

    fn handle() -> GroupHandle {
        GroupHandle { rank: 1, ranks: 4, arena_bytes: 1 << 40, memory: part(3) }
    }

    #[test]
    fn a_handle_reads_as_it_was_written_and_nothing_else_does() {
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
    fn sizes_are_the_headers() {
        assert_eq!((size_of::<ffi::Group>(), size_of::<ffi::AllReduceArgs>()), (96, 64));
        assert_eq!(size_of::<ffi::GatherArgs>(), 80);
    }
}
