//! GEMM tiles in plain Rust, which the compiler vectorizes for its target.

use super::{MatmulTile, TileOutput, rows::RowFormat};
use crate::cpu::{
    arithmetic::{LANES, multiply_add},
    isa::BASELINE_FUSES,
    matmul::pack::PANEL,
};

/// Maximum rows of a block: four rows of 16 accumulators are 16 vectors of four lanes.
pub(super) const BLOCK_ROWS_MAX: usize = 4;

/// Multiplies one row block with one panel.
///
/// # Safety
/// `target` may be written in the tile's rows and columns.
pub(super) unsafe fn tile(tile: &MatmulTile<'_>, target: &TileOutput, _panel_count: usize) {
    // SAFETY: the target may be written in the tile's rows and columns (`# Safety`).
    unsafe {
        match tile.row_count {
            1 => halves::<1>(tile, target),
            2 => halves::<2>(tile, target),
            3 => halves::<3>(tile, target),
            4 => halves::<4>(tile, target),
            rows => unreachable!("a block has 1 to {BLOCK_ROWS_MAX} rows, not {rows}"),
        }
    }
}

/// Computes the two halves of a panel, one after the other.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn halves<const M: usize>(tile: &MatmulTile<'_>, target: &TileOutput) {
    let (x, rest) = tile.x.as_chunks::<M>();
    assert!(x.len() == tile.k && rest.is_empty(), "a block is [k][rows]");
    for first in (0..PANEL).step_by(LANES) {
        if first >= tile.columns {
            break;
        }
        let sums = match tile.format {
            RowFormat::F32 => f32_sums(x, tile.panels, first),
            _ => bf16_sums(x, tile.panels, first),
        };
        let columns = LANES.min(tile.columns - first);
        for (row, sums) in sums.iter().enumerate() {
            // SAFETY: the target has `tile.columns` columns in each of the block's rows, and
            // the accumulators do not overlap it.
            unsafe { sums.as_ptr().copy_to_nonoverlapping(target.at(row, first), columns) };
        }
    }
}

#[inline(always)]
fn f32_sums<const M: usize>(x: &[[u32; M]], panel: &[u32], first: usize) -> [[f32; LANES]; M] {
    let mut sums = [[0.0; LANES]; M];
    for (x, words) in x.iter().zip(panel.chunks_exact(PANEL)) {
        let words: &[u32; LANES] = words[first..][..LANES].try_into().expect("16 lanes");
        accumulate(&mut sums, x, &words.map(f32::from_bits));
    }
    sums
}

#[inline(always)]
fn bf16_sums<const M: usize>(x: &[[u32; M]], panel: &[u32], first: usize) -> [[f32; LANES]; M] {
    let mut sums = [[0.0; LANES]; M];
    for (x, words) in x.chunks(2).zip(panel.chunks_exact(PANEL)) {
        let words: &[u32; LANES] = words[first..][..LANES].try_into().expect("16 lanes");
        let weights = words.map(|word| f32::from_bits(word << 16));
        accumulate(&mut sums, &x[0], &weights);
        if let Some(odd) = x.get(1) {
            let weights = words.map(|word| f32::from_bits(word & 0xffff_0000));
            accumulate(&mut sums, odd, &weights);
        }
    }
    sums
}

/// Accumulates one input for every row; `x` are f32 bits.
#[inline(always)]
fn accumulate<const M: usize>(sums: &mut [[f32; LANES]; M], x: &[u32; M], weights: &[f32; LANES]) {
    for (sums, &x) in sums.iter_mut().zip(x) {
        for (sum, &weight) in sums.iter_mut().zip(weights) {
            *sum = multiply_add::<BASELINE_FUSES>(f32::from_bits(x), weight, *sum);
        }
    }
}
