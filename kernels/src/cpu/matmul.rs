//! GEMM with packed weights: `out[rows][n] = x[rows][k] · w[n][k]ᵀ`.
//!
//! Weights are packed in *panels* of 32 output features ([`CpuMatrix`]). The rows of `x` are packed
//! in *row blocks* `[k][rows of the block]`. A *tile* is the product of one row block and one or a
//! few panels, with all accumulators in registers. A *row group* is a number of row blocks that
//! together stay in the L2 cache.
//!
//! Every accumulator adds the products over k in order, in its own lane. So the result is
//! batch-invariant: a row's result does not depend on the other rows. At a level with fused
//! multiply-add (FMA), the result is bit-equal to the reference. There are two exceptions: a level
//! without FMA rounds each product before it adds the product, and the two kernels that multiply
//! pairs of bf16 (`vdpbf16ps` and AMX) add in another order. Both are batch-invariant, too.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod int4;
mod pack;
mod portable;
mod q8;
pub(crate) mod reference;
mod rows;

use std::ops::Range;

pub use pack::CpuMatrix;
pub(crate) use pack::pack;

use self::{
    pack::PANEL,
    rows::{PackedRows, RowFormat},
};
use super::{disjoint_slice::DisjointSlice, isa::Level, threads::ThreadPool};
use crate::layout::WeightFormat;

/// Maximum bytes of a row group, which a core multiplies with one panel after another. The row
/// group and the panels of a tile fit into an L2 cache of 1 MiB.
const ROW_GROUP_BYTES: usize = 768 << 10;
/// Minimum bytes of weights per task: reading them takes several times as long as starting a task.
const TASK_BYTES_MIN: usize = 96 << 10;
/// Maximum bytes of the unpacked panels of a tile, with which a tile has more than one panel.
const UNPACKED_BYTES_MAX: usize = 512 << 10;
/// Tasks per thread, so that other threads compensate for one that is late or interrupted.
const TASKS_PER_THREAD: usize = 4;

/// Packed rows of a GEMM, whose memory the next GEMM reuses.
#[derive(Default)]
pub(crate) struct MatmulScratch {
    blocks: PackedRows,
    /// Packed rows of the AMX kernel.
    #[cfg(target_arch = "x86_64")]
    tiles: amx::RowTiles,
}

/// Operands of a tile: one row block and consecutive panels.
struct MatmulTile<'a> {
    /// The row block, `[words of a row][row_count]`.
    x: &'a [u32],
    /// Format of `x`.
    format: RowFormat,
    row_count: usize,
    /// Number of input features.
    k: usize,
    /// Words of the panels, one panel after another.
    panels: &'a [u32],
    /// Output features of the panels without padding.
    columns: usize,
    /// Whether the kernel prefetches weights by software.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    software_prefetch: bool,
}

/// Destination of a tile's results: `[row_count][columns]` in rows that are `stride` elements
/// apart.
struct TileOutput {
    start: *mut f32,
    stride: usize,
}

impl TileOutput {
    /// Returns the address of an element, which may be outside the results.
    #[inline(always)]
    fn at(&self, row: usize, column: usize) -> *mut f32 {
        self.start.wrapping_add(row * self.stride + column)
    }
}

/// Computes `out = x · wᵀ`; `x` is `[rows][w.cols()]`, `out` is `[rows][w.rows()]`.
pub(crate) fn matmul(
    level: Level,
    pool: &mut ThreadPool,
    scratch: &mut MatmulScratch,
    x: &[f32],
    w: &CpuMatrix,
    out: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    let software_prefetch = super::isa::uses_software_prefetch();
    #[cfg(not(target_arch = "x86_64"))]
    let software_prefetch = false;
    multiply(level, software_prefetch, pool, scratch, x, w, out);
}

/// Computes [`matmul`] with or without software prefetch. Both give the same bits.
fn multiply(
    level: Level,
    software_prefetch: bool,
    pool: &mut ThreadPool,
    scratch: &mut MatmulScratch,
    x: &[f32],
    w: &CpuMatrix,
    out: &mut [f32],
) {
    if w.cols() == 0 || out.is_empty() {
        return out.fill(0.0);
    }
    if level == Level::Reference {
        return reference::matmul(x, w, out);
    }
    #[cfg(target_arch = "x86_64")]
    if level == Level::Amx && w.format() == WeightFormat::Bf16 && x.len() / w.cols() > 1 {
        // SAFETY: the level exists only when the system lets this process use AMX.
        return unsafe { amx::matmul(level, pool, &mut scratch.tiles, x, w, out) };
    }
    let kernel = Kernel::of(level, w.format());
    let blocks = &mut scratch.blocks;
    blocks.pack(level, pool, x, w.cols(), kernel.block_rows_max, kernel.row_format);
    let blocks = &*blocks;
    let group_blocks = (ROW_GROUP_BYTES / blocks.block_bytes()).clamp(1, blocks.count());
    let grid = grid(pool, w, blocks.count().div_ceil(group_blocks));
    let panels_max = (kernel.panels_for)(blocks.rows_in(0), software_prefetch);
    let panels_max = match w.is_int4() {
        true => panels_max.min((UNPACKED_BYTES_MAX / (w.panel_words() * 4)).max(1)),
        false => panels_max,
    };
    let n = w.rows();
    let sums = DisjointSlice::new(out);
    pool.run(grid.task_count(), &|_, task| {
        let (row_group, panels) = grid.part(task);
        let block_end = blocks.count().min((row_group + 1) * group_blocks);
        let mut panel = panels.start;
        while panel < panels.end {
            let panel_count = panels_max.min(panels.end - panel);
            w.with_panels(level, panel, panel_count, |panels| {
                for block in row_group * group_blocks..block_end {
                    let tile = MatmulTile {
                        x: blocks.block(block),
                        format: kernel.row_format,
                        row_count: blocks.rows_in(block),
                        k: w.cols(),
                        panels,
                        columns: (panel_count * PANEL).min(n - panel * PANEL),
                        software_prefetch,
                    };
                    let start = blocks.first_row(block) * n + panel * PANEL;
                    let length = (tile.row_count - 1) * n + tile.columns;
                    let target = TileOutput { start: sums.range_ptr(start, length), stride: n };
                    // SAFETY: the range is inside the output. The task writes only its tile's
                    // elements, and no other task has this block and these panels.
                    unsafe { (kernel.tile)(&tile, &target, panel_count) };
                }
            });
            panel += panel_count;
        }
    });
}

/// Partition of one GEMM into tasks: each task has one row group and one part of the panels.
struct Grid {
    panel_count: usize,
    /// Panels of a part; the last part may have fewer.
    part_panels: usize,
    part_count: usize,
    row_group_count: usize,
}

/// Splits the panels into equal parts, so that there are [`TASKS_PER_THREAD`] tasks for every
/// thread, and no task has less than [`TASK_BYTES_MIN`].
fn grid(pool: &ThreadPool, w: &CpuMatrix, row_group_count: usize) -> Grid {
    let panel_count = w.panel_count();
    let panel_bytes = w.byte_count() / panel_count;
    let part_count_max = (pool.threads() * TASKS_PER_THREAD).div_ceil(row_group_count);
    let part_panels_min = TASK_BYTES_MIN.div_ceil(panel_bytes);
    let part_panels = panel_count.div_ceil(part_count_max).max(part_panels_min);
    let part_count = panel_count.div_ceil(part_panels);
    Grid { panel_count, part_panels, part_count, row_group_count }
}

impl Grid {
    fn task_count(&self) -> usize {
        self.row_group_count * self.part_count
    }

    /// Returns a task's row group and panels.
    fn part(&self, task: usize) -> (usize, Range<usize>) {
        let (row_group, part) = (task / self.part_count, task % self.part_count);
        let panel_end = self.panel_count.min((part + 1) * self.part_panels);
        (row_group, part * self.part_panels..panel_end)
    }
}

/// Kernel that computes tiles.
#[derive(Clone, Copy)]
struct Kernel {
    /// Format in which the kernel reads row blocks.
    row_format: RowFormat,
    /// Maximum rows of a row block.
    block_rows_max: usize,
    /// Returns the maximum panels of one tile. The arguments are the rows of a row block, and
    /// whether the kernel prefetches by software. Few rows leave registers for more panels. Several
    /// panels are parallel streams, which use the memory bandwidth better with software prefetch.
    panels_for: fn(usize, bool) -> usize,
    /// Multiplies one row block with a number of panels, at most that of `panels_for`.
    ///
    /// # Safety
    /// The target may be written in the tile's rows and columns. The kernel came from
    /// [`Kernel::of`], so the machine has its instructions.
    tile: unsafe fn(&MatmulTile<'_>, &TileOutput, usize),
}

impl Kernel {
    /// Returns the kernel of a level for a weight format.
    fn of(level: Level, format: WeightFormat) -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(kernel) = Self::of_x86(level, format) {
            return kernel;
        }
        let _ = level;
        let (row_format, tile): (_, unsafe fn(&MatmulTile<'_>, &TileOutput, usize)) = match format {
            WeightFormat::F32 => (RowFormat::F32, portable::tile),
            WeightFormat::Bf16 | WeightFormat::Fp8 => (RowFormat::Rounded, portable::tile),
            WeightFormat::Q8 => (RowFormat::Q8, q8::portable::tile),
        };
        Self { row_format, block_rows_max: portable::BLOCK_ROWS_MAX, panels_for: |_, _| 1, tile }
    }

    #[cfg(target_arch = "x86_64")]
    fn of_x86(level: Level, format: WeightFormat) -> Option<Self> {
        let avx2 = |row_format| {
            let (block_rows_max, panels_for) = (avx2::BLOCK_ROWS_MAX, avx2::panels_for);
            Self { row_format, block_rows_max, panels_for, tile: avx2::tile }
        };
        let avx512 = |row_format| {
            let (block_rows_max, panels_for) = (avx512::BLOCK_ROWS_MAX, avx512::panels_for);
            Self { row_format, block_rows_max, panels_for, tile: avx512::tile }
        };
        Some(match (level, format) {
            (Level::Reference | Level::Baseline, _) => return None,
            (Level::Avx2, WeightFormat::F32) => avx2(RowFormat::F32),
            (Level::Avx2, WeightFormat::Bf16 | WeightFormat::Fp8) => avx2(RowFormat::Rounded),
            (_, WeightFormat::F32) => avx512(RowFormat::F32),
            (Level::Avx512, WeightFormat::Bf16 | WeightFormat::Fp8) => avx512(RowFormat::Rounded),
            // A single row is faster without AMX. `Stepped` adds in the order of the AMX kernel, so
            // that the result does not depend on the number of rows.
            (Level::Amx, WeightFormat::Bf16 | WeightFormat::Fp8) => avx512(RowFormat::Stepped),
            (Level::Avx512Bf16, WeightFormat::Bf16 | WeightFormat::Fp8) => avx512(RowFormat::Pairs),
            // VNNI is not a level of its own, because this kernel gives the same bits as the other
            // q8 kernels.
            (Level::Avx512 | Level::Avx512Bf16 | Level::Amx, WeightFormat::Q8)
                if std::arch::is_x86_feature_detected!("avx512vnni") =>
            {
                Self {
                    row_format: RowFormat::Q8,
                    block_rows_max: q8::avx512::BLOCK_ROWS_MAX,
                    panels_for: q8::avx512::panels_for,
                    tile: q8::avx512::tile,
                }
            }
            (_, WeightFormat::Q8) => Self {
                row_format: RowFormat::Q8,
                block_rows_max: q8::avx2::BLOCK_ROWS_MAX,
                panels_for: |_, _| 1,
                tile: q8::avx2::tile,
            },
        })
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use crate::backend::RowSource;

    /// A matrix of f32 in memory.
    pub(crate) struct Plain {
        pub rows: usize,
        pub cols: usize,
        pub values: Vec<f32>,
    }

    impl RowSource for Plain {
        fn rows(&self) -> usize {
            self.rows
        }

        fn cols(&self) -> usize {
            self.cols
        }

        fn read_row(&self, row: usize, out: &mut [f32]) {
            out.copy_from_slice(&self.values[row * self.cols..][..self.cols]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{testing::Plain, *};
    use crate::cpu::{
        aligned::Slab,
        testing::{bits, fuses, levels, numbers, pairs},
    };

    const FORMATS: [WeightFormat; 3] = [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q8];

    fn product(level: Level, threads: usize, x: &[f32], w: &CpuMatrix) -> Vec<f32> {
        let mut pool = ThreadPool::new(threads, "test").unwrap();
        let [one, other] = [false, true].map(|software_prefetch| {
            let mut out = vec![f32::NAN; x.len() / w.cols() * w.rows()];
            multiply(
                level,
                software_prefetch,
                &mut pool,
                &mut MatmulScratch::default(),
                x,
                w,
                &mut out,
            );
            out
        });
        assert_eq!(bits(&one), bits(&other), "{}", level.name());
        one
    }

    fn check(rows: usize, k: usize, n: usize, threads: usize) {
        let source = Plain { rows: n, cols: k, values: numbers(1, n * k) };
        let x = numbers(2, rows * k);
        let mut pool = ThreadPool::new(1, "test").unwrap();
        for format in FORMATS {
            let w = pack(&mut pool, &mut Slab::default(), format, &source);
            let mut want = vec![0.0; rows * n];
            reference::matmul(&x, &w, &mut want);
            for level in levels() {
                let got = product(level, threads, &x, &w);
                let context = format!("{rows}x{k}x{n} {format} {}", level.name());
                if fuses(level) && !(format == WeightFormat::Bf16 && pairs(level)) {
                    assert_eq!(bits(&got), bits(&want), "{context}");
                } else {
                    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * (k as f32);
                    assert!(got.iter().zip(&want).all(near), "{context}");
                }
            }
        }
    }

    #[test]
    fn every_block_height_and_panel_count_agrees_with_the_reference() {
        for rows in 1..=67 {
            check(rows, 32, 160, 1);
            check(rows, 7, 33, 2);
        }
    }

    #[test]
    fn a_large_gemm_agrees_with_the_reference() {
        let names: Vec<_> = levels().into_iter().map(Level::name).collect();
        println!("levels of this machine: {}", names.join(", "));
        check(150, 1536, 100, 2);
        check(1, 576, 960, 2);
        check(513, 39, 65, 2);
    }

    #[test]
    fn one_and_several_row_groups_agree_with_the_reference() {
        const K: usize = 4096;
        for format in [RowFormat::F32, RowFormat::Pairs, RowFormat::Q8] {
            let row_bytes = format.row_words(K) * size_of::<u32>();
            // A row group holds at most this many rows, so one more row needs a second row group.
            let group_rows = ROW_GROUP_BYTES / row_bytes;
            for rows in [group_rows - 1, group_rows, group_rows + 1] {
                check(rows, K, 9, 2);
            }
        }
    }

    #[test]
    fn a_gemm_without_rows_is_empty_and_without_inputs_is_zero() {
        let mut pool = ThreadPool::new(1, "test").unwrap();
        for level in levels() {
            let w = pack(
                &mut pool,
                &mut Slab::default(),
                WeightFormat::F32,
                &Plain { rows: 3, cols: 2, values: vec![1.0; 6] },
            );
            assert!(product(level, 1, &[], &w).is_empty());
            let w = pack(
                &mut pool,
                &mut Slab::default(),
                WeightFormat::F32,
                &Plain { rows: 0, cols: 2, values: vec![] },
            );
            matmul(level, &mut pool, &mut MatmulScratch::default(), &[1.0, 2.0], &w, &mut []);
            let w = pack(
                &mut pool,
                &mut Slab::default(),
                WeightFormat::Bf16,
                &Plain { rows: 2, cols: 0, values: vec![] },
            );
            let mut out = [7.0; 4];
            matmul(level, &mut pool, &mut MatmulScratch::default(), &[], &w, &mut out);
            assert_eq!(out, [0.0; 4]);
        }
    }

    #[test]
    fn a_row_does_not_depend_on_other_rows() {
        let (k, n) = (96, 70);
        let source = Plain { rows: n, cols: k, values: numbers(3, n * k) };
        let x = numbers(4, 40 * k);
        let mut pool = ThreadPool::new(1, "test").unwrap();
        for format in FORMATS {
            let w = pack(&mut pool, &mut Slab::default(), format, &source);
            for level in levels() {
                let whole = product(level, 2, &x, &w);
                for count in [1, 3, 15, 17] {
                    for first in 0..=40 - count {
                        let some = product(level, 1, &x[first * k..][..count * k], &w);
                        let want = &whole[first * n..][..count * n];
                        assert_eq!(bits(&some), bits(want), "{count} rows, {}", level.name());
                    }
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_shape_agrees_with_the_reference(
            rows in 1_usize..50, k in 1_usize..80, n in 1_usize..200, threads in 1_usize..4
        ) {
            check(rows, k, n, threads);
        }
    }
}
