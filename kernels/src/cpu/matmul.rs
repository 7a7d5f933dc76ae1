//! Matrix products with packed weights: `out[rows][n] = x[rows][k] · w[n][k]ᵀ`.
//!
//! Weights lie in panels of 32 output features ([`CpuMatrix`]); the rows of `x` are packed into
//! blocks `[k][rows of the block]`; a *tile* multiplies one block with one or a few panels, all
//! sums in registers. Every sum runs over k in order, one fused multiply-add at a time, in a lane
//! of its own. So the result is the reference's to the last bit, independent of the batch, and no
//! lanes need adding up.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod pack;
mod portable;
pub(crate) mod reference;
mod rows;

pub use pack::CpuMatrix;
pub(crate) use pack::pack;

use self::{
    pack::{PANEL, PanelRange},
    rows::RowBlocks,
};
use super::{isa::Level, parts::Parts, threads::ThreadPool};
use crate::layout::Dtype;

/// Bytes of packed rows that are multiplied with one panel after another: they stay in a core's
/// second-level cache.
const ROW_GROUP_BYTES: usize = 768 << 10;
/// Bytes of weights that are worth a task of their own.
const TASK_BYTES_MIN: usize = 96 << 10;
/// Tasks per thread, so that the others make up for a thread that was late or interrupted.
const TASKS_PER_THREAD: usize = 4;

/// Memory that products reuse.
#[derive(Default)]
pub(crate) struct Scratch {
    blocks: RowBlocks,
}

/// One row block and consecutive panels.
struct Tile<'a> {
    /// `[k][row_count]`.
    x: &'a [f32],
    row_count: usize,
    k: usize,
    panels: PanelRange<'a>,
    /// Output features that the panels really have; the rest is filling.
    columns: usize,
}

/// Where a tile's sums go: `[row_count][columns]` in rows that are `stride` elements apart.
struct Target {
    start: *mut f32,
    stride: usize,
}

impl Target {
    /// The address of an element, which need not be inside.
    #[inline(always)]
    fn at(&self, row: usize, column: usize) -> *mut f32 {
        self.start.wrapping_add(row * self.stride + column)
    }
}

/// `out = x · wᵀ`; `x` is `[rows][w.cols()]`, `out` is `[rows][w.rows()]`.
pub(crate) fn matmul(
    level: Level,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
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
    let blocks = &mut scratch.blocks;
    blocks.pack(level, pool, x, w.cols(), block_rows_max(level), w.dtype() == Dtype::Bf16);
    let blocks = &*blocks;

    // A grid of tasks: groups of row blocks that fit the cache, times parts of the panels.
    let group_len = (ROW_GROUP_BYTES / blocks.block_bytes()).clamp(1, blocks.count());
    let group_count = blocks.count().div_ceil(group_len);
    let panel_bytes = w.byte_count() / w.panel_count();
    let parts_wanted = (pool.threads() * TASKS_PER_THREAD).div_ceil(group_count);
    let part_len = w.panel_count().div_ceil(parts_wanted).max(TASK_BYTES_MIN.div_ceil(panel_bytes));
    let part_count = w.panel_count().div_ceil(part_len);
    let panels_max = panels_max(level, blocks.rows_in(0));

    let n = w.rows();
    let sums = Parts::new(out);
    pool.run(group_count * part_count, &|_, task| {
        let (group, part) = (task / part_count, task % part_count);
        let block_end = blocks.count().min((group + 1) * group_len);
        let panel_end = w.panel_count().min((part + 1) * part_len);
        let mut panel = part * part_len;
        while panel < panel_end {
            let panel_count = panels_max.min(panel_end - panel);
            for block in group * group_len..block_end {
                let tile = Tile {
                    x: blocks.block(block),
                    row_count: blocks.rows_in(block),
                    k: w.cols(),
                    panels: w.panel_range(panel, panel_count),
                    columns: (panel_count * PANEL).min(n - panel * PANEL),
                };
                let start = blocks.first_row(block) * n + panel * PANEL;
                let length = (tile.row_count - 1) * n + tile.columns;
                let target = Target { start: sums.range_ptr(start, length), stride: n };
                // SAFETY: the range is inside the output. Of it only the tile's own elements are
                // touched, and one task alone has this block and these panels.
                unsafe { run_tile(level, &tile, &target, panel_count) };
            }
            panel += panel_count;
        }
    });
}

/// Most rows of a block.
fn block_rows_max(level: Level) -> usize {
    match level {
        Level::Reference | Level::Baseline => portable::BLOCK_ROWS_MAX,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => portable::BLOCK_ROWS_MAX,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Avx512Bf16 => avx512::BLOCK_ROWS_MAX,
    }
}

/// Most panels of one tile, for blocks of so many rows: few rows leave registers for more panels,
/// and reading several at once makes better use of memory.
fn panels_max(level: Level, rows: usize) -> usize {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Avx512Bf16 => avx512::panels_for(rows),
        _ => 1,
    }
}

/// # Safety
/// `target` may be written in the tile's rows and columns.
unsafe fn run_tile(level: Level, tile: &Tile<'_>, target: &Target, panel_count: usize) {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Avx512Bf16 => {
            // SAFETY: the level was found on this machine; the target is the caller's promise.
            unsafe { avx512::tile(tile, target, panel_count) }
        }
        // SAFETY: the target is the caller's promise.
        _ => unsafe { portable::tile(level, tile, target) },
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
    use crate::cpu::testing::{bits, fuses, levels, numbers};

    fn product(level: Level, threads: usize, x: &[f32], w: &CpuMatrix) -> Vec<f32> {
        let mut pool = ThreadPool::new(threads, "test").unwrap();
        let mut out = vec![f32::NAN; x.len() / w.cols() * w.rows()];
        matmul(level, &mut pool, &mut Scratch::default(), x, w, &mut out);
        out
    }

    fn check(rows: usize, k: usize, n: usize, threads: usize) {
        let source = Plain { rows: n, cols: k, values: numbers(1, n * k) };
        let x = numbers(2, rows * k);
        let mut pool = ThreadPool::new(1, "test").unwrap();
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let w = pack(&mut pool, dtype, &source);
            let mut want = vec![0.0; rows * n];
            reference::matmul(&x, &w, &mut want);
            for level in levels() {
                let got = product(level, threads, &x, &w);
                let context = format!("{rows}x{k}x{n} {dtype} {}", level.name());
                if fuses(level) {
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
        for rows in 1..=26 {
            check(rows, 32, 160, 1);
            check(rows, 7, 33, 2);
        }
    }

    #[test]
    fn a_large_product_agrees_with_the_reference() {
        check(150, 1536, 100, 2);
        check(1, 576, 960, 2);
    }

    #[test]
    fn an_empty_product_is_empty_and_no_inputs_give_zeros() {
        let mut pool = ThreadPool::new(1, "test").unwrap();
        for level in levels() {
            let w = pack(&mut pool, Dtype::F32, &Plain { rows: 3, cols: 2, values: vec![1.0; 6] });
            assert!(product(level, 1, &[], &w).is_empty());
            let w = pack(&mut pool, Dtype::F32, &Plain { rows: 0, cols: 2, values: vec![] });
            matmul(level, &mut pool, &mut Scratch::default(), &[1.0, 2.0], &w, &mut []);
            let w = pack(&mut pool, Dtype::Bf16, &Plain { rows: 2, cols: 0, values: vec![] });
            let mut out = [7.0; 4];
            matmul(level, &mut pool, &mut Scratch::default(), &[], &w, &mut out);
            assert_eq!(out, [0.0; 4]);
        }
    }

    #[test]
    fn a_row_does_not_feel_the_rows_beside_it() {
        let (k, n) = (96, 70);
        let source = Plain { rows: n, cols: k, values: numbers(3, n * k) };
        let x = numbers(4, 40 * k);
        let mut pool = ThreadPool::new(1, "test").unwrap();
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let w = pack(&mut pool, dtype, &source);
            for level in levels() {
                let whole = product(level, 2, &x, &w);
                for (row, x) in x.chunks_exact(k).enumerate() {
                    let alone = product(level, 1, x, &w);
                    assert_eq!(bits(&alone), bits(&whole[row * n..][..n]), "{}", level.name());
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
