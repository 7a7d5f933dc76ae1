//! Low-rank updates (LoRA) of weight matrices in GPU memory.
//!
//! Each matrix has memory for the updates of all slots at the maximum rank, in bf16. The ranks of
//! the slots are in GPU memory too, so a CUDA graph replays with other adapters. GEMMs of few rows
//! add the updates themselves (`kernels/cuda/gemm/low_rank.h`).

use std::sync::Arc;

use super::{
    backend::CudaBackend,
    buffer::CudaBuffer,
    context::{Compute, Context, Event, Stream},
    error::CudaError,
    ffi,
    library::KernelLibrary,
    memory::{ALIGNMENT, DeviceMemory, Range},
    skinny::Operands,
    step::CudaStep,
};
use crate::{
    backend::{Backend as _, LowRankShape, LowRankUpdate},
    layout::{Dtype, to_bf16_bits},
};

/// Ranks are padded with zeros to multiples of this number.
const RANK_UNIT: usize = 16;

/// Slots of adapters, for which a backend has memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterSizes {
    /// At most 64; 0: no adapters.
    pub slots: usize,
    /// Maximum rank.
    pub rank_max: usize,
}

impl AdapterSizes {
    fn padded_rank(self) -> usize {
        self.rank_max.next_multiple_of(RANK_UNIT)
    }
}

/// Updates of one weight matrix by the adapters in all slots.
#[derive(Debug)]
pub struct CudaLowRank {
    shape: LowRankShape,
    sizes: AdapterSizes,
    /// bf16 `[slot][range][rank][input]`.
    a: Range,
    /// bf16 `[slot][output][rank]`.
    b: Range,
}

/// Memory that the updates of all matrices share.
#[derive(Debug)]
pub(super) struct LowRankBuffers {
    /// i32: the padded rank of each slot; 0: the slot is empty.
    ranks: Arc<Range>,
    /// f32 `[part][row][range][rank]`: x Aᵀ, a sum of parts.
    shrunk: Range,
    /// u64: counts of a GEMM; 0 between GEMMs.
    progress: Range,
}

impl LowRankBuffers {
    /// Allocates the buffers for `rows` rows.
    pub(super) fn new(
        context: &Arc<Context>,
        sizes: AdapterSizes,
        rows: usize,
    ) -> Result<Self, CudaError> {
        let ranks_bytes = sizes.slots * size_of::<i32>();
        let shrunk_rows = rows.max(GEMM_ROWS_MAX * GEMM_PARTS_MAX);
        let shrunk_bytes = shrunk_rows * RANGES_MAX * sizes.padded_rank() * size_of::<f32>();
        let bytes = ranks_bytes.next_multiple_of(ALIGNMENT)
            + shrunk_bytes.next_multiple_of(ALIGNMENT)
            + ALIGNMENT;
        let memory = DeviceMemory::new(context, "the shrunk rows of LoRA adapters", bytes)?;
        let ranks = memory.cut(ranks_bytes)?;
        ranks.write(0, &vec![0_i32; sizes.slots])?;
        let shrunk = memory.cut(shrunk_bytes)?;
        let progress = memory.cut(size_of::<u64>())?;
        progress.write(0, &[0_u64])?;
        Ok(Self { ranks: Arc::new(ranks), shrunk, progress })
    }
}

/// Maximum ranges of a matrix: Q, K and V.
const RANGES_MAX: usize = 3;
/// Maximum rows of a GEMM that computes x Aᵀ. `baton_shrink` has one part above these rows.
const GEMM_ROWS_MAX: usize = 64;
/// Maximum parts of x Aᵀ in a GEMM. `baton_shrink` has fewer.
const GEMM_PARTS_MAX: usize = 16;

impl CudaLowRank {
    /// Returns the updates of a matrix. `cut` returns memory.
    pub(super) fn place(
        sizes: AdapterSizes,
        shape: &LowRankShape,
        cut: impl Fn(usize) -> Range,
    ) -> Self {
        assert!(shape.ranges.len() <= RANGES_MAX, "a matrix has at most three ranges");
        let elements = sizes.slots * sizes.padded_rank() * size_of::<u16>();
        let a = cut(elements * shape.ranges.len() * shape.inputs);
        let b = cut(elements * shape.ranges.iter().sum::<usize>());
        Self { shape: shape.clone(), sizes, a, b }
    }

    fn outputs(&self) -> usize {
        self.shape.ranges.iter().sum()
    }

    /// Returns the first output features of the second and the third range.
    fn firsts(&self) -> [i32; 2] {
        let end = |count: usize| self.shape.ranges.iter().take(count).sum::<usize>() as i32;
        [end(1), end(2)]
    }

    /// Writes the updates of a slot with a padded rank, and waits for the copy.
    fn write(&self, slot: usize, rank: usize, updates: &[LowRankUpdate]) -> Result<(), CudaError> {
        let Self { shape: LowRankShape { inputs, ranges }, .. } = self;
        let mut a = vec![0_u16; ranges.len() * rank * inputs];
        let mut b = vec![0_u16; self.outputs() * rank];
        for update in updates {
            let mut first = 0;
            let range = ranges.iter().position(|range| {
                first += range;
                first - range == update.first
            });
            let range = range.expect("an update starts at a range");
            let outputs = ranges[range];
            let expected = (update.rank * inputs, update.rank * outputs);
            assert!(
                update.rank <= rank && (update.a.len(), update.b.len()) == expected,
                "the update's shape is that of the matrix"
            );
            for (to, from) in a[range * rank * inputs..].iter_mut().zip(&update.a) {
                *to = to_bf16_bits(*from);
            }
            for (index, from) in update.b.iter().enumerate() {
                let (of_rank, output) = (index / outputs, index % outputs);
                b[(update.first + output) * rank + of_rank] = to_bf16_bits(*from);
            }
        }
        let element = self.sizes.padded_rank() * size_of::<u16>();
        self.a.write(slot * ranges.len() * inputs * element, &a)?;
        self.b.write(slot * self.outputs() * element, &b)
    }
}

/// Writes adapters to slots while steps run. Usable on any thread.
#[derive(Debug)]
pub struct LowRankWriter {
    sizes: AdapterSizes,
    ranks: Arc<Range>,
    compute: Arc<Stream<Compute>>,
    launched: Event,
}

impl LowRankWriter {
    /// Writes the updates of each matrix to a slot that no later step uses; `rank` is the rank of
    /// the updates, 0 empties the slot. Waits for the steps in flight, which may have rows of a
    /// sequence that used the slot: a GEMM whose rows' ranks change while it runs does not end.
    ///
    /// # Panics
    /// When there is no such slot, the rank is too large, or an update has another shape than its
    /// matrix.
    pub fn write<'a>(
        &self,
        slot: usize,
        rank: usize,
        matrices: impl IntoIterator<Item = (&'a CudaLowRank, &'a [LowRankUpdate])>,
    ) -> Result<(), CudaError> {
        let rank = rank.next_multiple_of(RANK_UNIT);
        let AdapterSizes { slots, .. } = self.sizes;
        assert!(slot < slots, "slot {slot} of {slots}");
        assert!(rank <= self.sizes.padded_rank(), "rank {rank} exceeds {}", self.sizes.rank_max);
        self.compute.context().bind()?;
        self.launched.record(&self.compute)?;
        self.launched.synchronize()?;
        for (matrix, updates) in matrices {
            matrix.write(slot, rank, updates)?;
        }
        self.ranks.write(slot * size_of::<i32>(), &[rank as i32])
    }
}

impl CudaBackend {
    /// Returns whether there is memory for adapters.
    pub fn has_adapter_slots(&self) -> bool {
        self.low_rank_buffers.is_some()
    }

    /// Returns a writer of adapters; `None` for a backend without slots.
    pub fn low_rank_writer(&self) -> Result<Option<LowRankWriter>, CudaError> {
        let Some(buffers) = &self.low_rank_buffers else { return Ok(None) };
        Ok(Some(LowRankWriter {
            sizes: self.options().adapters,
            ranks: Arc::clone(&buffers.ranks),
            compute: Arc::clone(self.compute()),
            launched: Event::new(self.context())?,
        }))
    }

    /// Returns the kernels' arguments for the updates of all rows or of the sampled rows of a step.
    pub(super) fn low_rank_args(
        &self,
        rows: usize,
        updates: &CudaLowRank,
        step: &CudaStep,
    ) -> ffi::LowRank {
        let CudaLowRank { shape: LowRankShape { ranges, .. }, sizes, a, b } = updates;
        let buffers = self.low_rank_buffers.as_ref().expect("placed with the slots");
        let row_bytes = ranges.len() * sizes.padded_rank() * size_of::<f32>();
        // SAFETY: the function only computes a number.
        let parts = unsafe {
            (self.library().functions().baton_shrink_parts)(
                rows as i32,
                updates.shape.inputs as i32,
            )
        };
        let parts_max = if rows <= GEMM_ROWS_MAX { GEMM_PARTS_MAX } else { parts as usize };
        let (arrays, is_whole) = (step.arrays(), rows == step.rows());
        assert!(is_whole || rows == step.samples(), "all rows or the sampled rows have adapters");
        ffi::LowRank {
            a: a.address(),
            b: b.address(),
            ranks: buffers.ranks.address(),
            row_adapters: if is_whole { arrays.row_adapters } else { arrays.sample_adapters },
            shrunk: buffers.shrunk.part(0, parts_max * rows * row_bytes),
            progress: buffers.progress.address(),
            firsts: updates.firsts(),
            ranges: ranges.len() as i32,
            rank_max: sizes.padded_rank() as i32,
            slots: sizes.slots as i32,
            parts,
        }
    }

    /// Computes `out = x · wᵀ`, and adds the updates of the rows' adapters.
    pub(super) fn matmul_updated(
        &mut self,
        rows: usize,
        (x, w, update): Operands<'_>,
        out: &mut CudaBuffer,
    ) {
        let Some(update) = update else { return self.matmul(rows, x, w, out) };
        if self.is_faulty() || self.skinny_matmul(rows, (x, w, Some(update)), out) {
            return;
        }
        self.matmul(rows, x, w, out);
        self.add_update(rows, x, &update, out);
    }

    /// Adds the updates of the rows' adapters to the output of a GEMM.
    pub(super) fn add_update(
        &self,
        rows: usize,
        x: &CudaBuffer,
        update: &ffi::LowRank,
        out: &CudaBuffer,
    ) {
        assert!(x.is_mirrored(), "add_low_rank: the rows are only in FP8");
        self.finish_rows(rows, x);
        self.shrink(rows, x, out.width, update);
        self.expand(rows, update, out);
    }

    /// Computes x Aᵀ of the updates.
    fn shrink(&self, rows: usize, x: &CudaBuffer, outputs: usize, update: &ffi::LowRank) {
        assert_eq!(x.dtype, Dtype::Bf16, "shrink: the input is bf16");
        let (address, stride) = x.rows_of(rows);
        let (rows, outputs, inputs) = (rows as i32, outputs as i32, x.width as i32);
        self.run(|library, stream| {
            // SAFETY: the rows have the matrix's inputs, and the update has memory for them.
            unsafe {
                launch!(
                    library,
                    stream,
                    baton_shrink(update, address, stride, rows, outputs, inputs)
                )
            }
        });
    }

    /// Adds the updates to the output of a GEMM without them.
    fn expand(&self, rows: usize, update: &ffi::LowRank, out: &CudaBuffer) {
        assert_eq!(out.dtype, Dtype::Bf16, "expand: the output is bf16");
        let ((address, stride), outputs) = (out.rows_of(rows), out.width as i32);
        let rows = rows as i32;
        self.run(|library, stream| {
            // SAFETY: the output has the rows and outputs of the matrix.
            unsafe {
                launch!(library, stream, baton_expand(update, address, stride, rows, outputs))
            }
        });
    }
}
