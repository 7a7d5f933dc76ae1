//! GEMM with packed weights: `out[rows][n] = x[rows][k] · w[n][k]ᵀ`.
//!
//! Weights are packed in panels of 32 output features ([`CpuMatrix`]); the rows of `x` are packed in blocks
//! `[k][rows of the block]`. A *tile* multiplies one block with one or a few panels, with all accumulators
//! in registers. Every accumulator runs over k in order, one fused multiply-add at a time, in its own lane.
//! So the result is bit-equal to the reference, does not depend on the batch, and needs no reduction over
//! lanes. The two kernels that multiply bf16 pairs (`vdpbf16ps`, AMX) round differently, but do not depend
//! on the batch either.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
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

/// Bytes of packed rows that are multiplied with one panel after another. They stay in a core's L2 cache.
const ROW_GROUP_BYTES: usize = 768 << 10;
/// Minimum bytes of weights per task.
const TASK_BYTES_MIN: usize = 96 << 10;
/// Tasks per thread, so that other threads compensate for one that is late or interrupted.
const TASKS_PER_THREAD: usize = 4;

/// Memory that GEMMs reuse.
#[derive(Default)]
pub(crate) struct MatmulScratch {
    blocks: PackedRows,
    #[cfg(target_arch = "x86_64")]
    tiles: amx::RowTiles,
}

/// One row block and consecutive panels.
struct MatmulTile<'a> {
    /// `[group][row_count]` in the kernel's row format.
    x: &'a [u32],
    format: RowFormat,
    row_count: usize,
    k: usize,
    panels: &'a [u32],
    /// Output features of the panels without padding.
    columns: usize,
    /// Whether weights are prefetched.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    fetch_ahead: bool,
}

/// Destination of a tile's results: `[row_count][columns]` in rows that are `stride` elements apart.
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
    let fetch_ahead = super::isa::fetches_ahead();
    #[cfg(not(target_arch = "x86_64"))]
    let fetch_ahead = false;
    multiply(level, fetch_ahead, pool, scratch, x, w, out);
}

/// Computes [`matmul`] with or without prefetching, which changes no bit of the result.
fn multiply(
    level: Level,
    fetch_ahead: bool,
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
    blocks.pack(level, pool, x, w.cols(), kernel.block_rows_max, kernel.rows);
    let blocks = &*blocks;
    let group_len = (ROW_GROUP_BYTES / blocks.block_bytes()).clamp(1, blocks.count());
    let grid = grid(pool, w, blocks.count().div_ceil(group_len));
    let panels_max = (kernel.panels_for)(blocks.rows_in(0), fetch_ahead);
    let n = w.rows();
    let sums = DisjointSlice::new(out);
    pool.run(grid.task_count(), &|_, task| {
        let (group, panels) = grid.part(task);
        let block_end = blocks.count().min((group + 1) * group_len);
        let mut panel = panels.start;
        while panel < panels.end {
            let panel_count = panels_max.min(panels.end - panel);
            for block in group * group_len..block_end {
                let tile = MatmulTile {
                    x: blocks.block(block),
                    format: kernel.rows,
                    row_count: blocks.rows_in(block),
                    k: w.cols(),
                    panels: w.panels(panel, panel_count),
                    columns: (panel_count * PANEL).min(n - panel * PANEL),
                    fetch_ahead,
                };
                let start = blocks.first_row(block) * n + panel * PANEL;
                let length = (tile.row_count - 1) * n + tile.columns;
                let target = TileOutput { start: sums.range_ptr(start, length), stride: n };
                // SAFETY: the range is inside the output. The task touches only its tile's
                // elements, and no other task has this block and these panels.
                unsafe { (kernel.tile)(&tile, &target, panel_count) };
            }
            panel += panel_count;
        }
    });
}

/// Partition of one GEMM: groups of rows times parts of the panels.
struct Grid {
    panel_count: usize,
    part_len: usize,
    part_count: usize,
    group_count: usize,
}

/// Splits the panels into equal parts, a few for every thread and none too small.
fn grid(pool: &ThreadPool, w: &CpuMatrix, group_count: usize) -> Grid {
    let panel_count = w.panel_count();
    let panel_bytes = w.byte_count() / panel_count;
    let parts_wanted = (pool.threads() * TASKS_PER_THREAD).div_ceil(group_count);
    let part_len = panel_count.div_ceil(parts_wanted).max(TASK_BYTES_MIN.div_ceil(panel_bytes));
    Grid { panel_count, part_len, part_count: panel_count.div_ceil(part_len), group_count }
}

impl Grid {
    fn task_count(&self) -> usize {
        self.group_count * self.part_count
    }

    /// Returns a task's row group and panels.
    fn part(&self, task: usize) -> (usize, Range<usize>) {
        let (group, part) = (task / self.part_count, task % self.part_count);
        (group, part * self.part_len..self.panel_count.min((part + 1) * self.part_len))
    }
}

/// Kernel that multiplies tiles.
#[derive(Clone, Copy)]
struct Kernel {
    rows: RowFormat,
    /// Maximum rows of a block.
    block_rows_max: usize,
    /// Returns the panels of one tile for blocks of a number of rows, with or without prefetching. Few rows
    /// leave registers for more panels, and with prefetching several parallel streams use memory better.
    panels_for: fn(usize, bool) -> usize,
    /// Multiplies one row block with a number of panels.
    ///
    /// # Safety
    /// The target may be written in the tile's rows and columns; the kernel came from [`Kernel::of`].
    tile: unsafe fn(&MatmulTile<'_>, &TileOutput, usize),
}

impl Kernel {
    fn of(level: Level, format: WeightFormat) -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(kernel) = Self::of_x86(level, format) {
            return kernel;
        }
        let _ = level;
        let (rows, tile): (_, unsafe fn(&MatmulTile<'_>, &TileOutput, usize)) = match format {
            WeightFormat::F32 => (RowFormat::F32, portable::tile),
            WeightFormat::Bf16 | WeightFormat::Fp8 => (RowFormat::Rounded, portable::tile),
            WeightFormat::Q8 => (RowFormat::Q8, q8::portable::tile),
        };
        Self { rows, block_rows_max: portable::BLOCK_ROWS_MAX, panels_for: |_, _| 1, tile }
    }

    #[cfg(target_arch = "x86_64")]
    fn of_x86(level: Level, format: WeightFormat) -> Option<Self> {
        let avx2 = |rows| {
            let (block_rows_max, panels_for) = (avx2::BLOCK_ROWS_MAX, avx2::panels_for);
            Self { rows, block_rows_max, panels_for, tile: avx2::tile }
        };
        let avx512 = |rows| {
            let (block_rows_max, panels_for) = (avx512::BLOCK_ROWS_MAX, avx512::panels_for);
            Self { rows, block_rows_max, panels_for, tile: avx512::tile }
        };
        Some(match (level, format) {
            (Level::Reference | Level::Baseline, _) => return None,
            (Level::Avx2, WeightFormat::F32) => avx2(RowFormat::F32),
            (Level::Avx2, WeightFormat::Bf16 | WeightFormat::Fp8) => avx2(RowFormat::Rounded),
            (_, WeightFormat::F32) => avx512(RowFormat::F32),
            (Level::Avx512, WeightFormat::Bf16 | WeightFormat::Fp8) => avx512(RowFormat::Rounded),
            // A single row is faster without AMX tiles, but adds in the order of the tiles.
            (Level::Amx, WeightFormat::Bf16 | WeightFormat::Fp8) => avx512(RowFormat::Stepped),
            (Level::Avx512Bf16, WeightFormat::Bf16 | WeightFormat::Fp8) => avx512(RowFormat::Pairs),
            // VNNI is not a level of its own, because this kernel gives the same bits as the other q8
            // kernels.
            (Level::Avx512 | Level::Avx512Bf16 | Level::Amx, WeightFormat::Q8)
                if std::arch::is_x86_feature_detected!("avx512vnni") =>
            {
                Self {
                    rows: RowFormat::Q8,
                    block_rows_max: q8::avx512::BLOCK_ROWS_MAX,
                    panels_for: q8::avx512::panels_for,
                    tile: q8::avx512::tile,
                }
            }
            (_, WeightFormat::Q8) => Self {
                rows: RowFormat::Q8,
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

    /// A matrix in memory.
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
        let [one, other] = [false, true].map(|fetch_ahead| {
            let mut out = vec![f32::NAN; x.len() / w.cols() * w.rows()];
            multiply(level, fetch_ahead, &mut pool, &mut MatmulScratch::default(), x, w, &mut out);
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
        // Sizes around the row groups of 768 KiB that one core processes.
        for rows in [255, 256, 257, 511, 512, 513] {
            check(rows, 576, 33, 2);
            check(rows, 39, 65, 2);
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
