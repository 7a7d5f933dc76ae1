//! GEMM tiles in plain Rust, which the compiler vectorises for its target.

use super::{Target, Tile, pack::PanelRange};
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
pub(super) unsafe fn tile(tile: &Tile<'_>, target: &Target) {
    // SAFETY: the caller's promise.
    unsafe { with_rows::<BASELINE_FUSES>(tile, target) }
}

/// Computes a tile with or without fused multiply-add.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn with_rows<const FUSED: bool>(tile: &Tile<'_>, target: &Target) {
    match tile.row_count {
        // SAFETY: the caller's promise.
        1 => unsafe { halves::<1, FUSED>(tile, target) },
        // SAFETY: the caller's promise.
        2 => unsafe { halves::<2, FUSED>(tile, target) },
        // SAFETY: the caller's promise.
        3 => unsafe { halves::<3, FUSED>(tile, target) },
        // SAFETY: the caller's promise.
        4 => unsafe { halves::<4, FUSED>(tile, target) },
        rows => unreachable!("a block has 1 to {BLOCK_ROWS_MAX} rows, not {rows}"),
    }
}

/// Computes the two halves of a panel, one after the other.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn halves<const M: usize, const FUSED: bool>(tile: &Tile<'_>, target: &Target) {
    let (x, rest) = tile.x.as_chunks::<M>();
    assert!(x.len() == tile.k && rest.is_empty(), "a block is [k][rows]");
    for first in (0..PANEL).step_by(LANES) {
        if first >= tile.columns {
            break;
        }
        let sums = match tile.panels {
            PanelRange::F32(panel) => f32_sums::<M, FUSED>(x, panel, first),
            PanelRange::Bf16(panel) => bf16_sums::<M, FUSED>(x, panel, first),
            PanelRange::Q8(_) => unreachable!("8-bit panels have tiles of their own"),
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
fn f32_sums<const M: usize, const FUSED: bool>(
    x: &[[u32; M]],
    panel: &[f32],
    first: usize,
) -> [[f32; LANES]; M] {
    let mut sums = [[0.0; LANES]; M];
    for (x, weights) in x.iter().zip(panel.chunks_exact(PANEL)) {
        let weights: &[f32; LANES] = weights[first..][..LANES].try_into().expect("16 lanes");
        add_products::<M, FUSED>(&mut sums, x, weights);
    }
    sums
}

#[inline(always)]
fn bf16_sums<const M: usize, const FUSED: bool>(
    x: &[[u32; M]],
    panel: &[u32],
    first: usize,
) -> [[f32; LANES]; M] {
    let mut sums = [[0.0; LANES]; M];
    for (x, words) in x.chunks(2).zip(panel.chunks_exact(PANEL)) {
        let words: &[u32; LANES] = words[first..][..LANES].try_into().expect("16 lanes");
        let weights = words.map(|word| f32::from_bits(word << 16));
        add_products::<M, FUSED>(&mut sums, &x[0], &weights);
        if let Some(odd) = x.get(1) {
            let weights = words.map(|word| f32::from_bits(word & 0xffff_0000));
            add_products::<M, FUSED>(&mut sums, odd, &weights);
        }
    }
    sums
}

/// Accumulates one input for every row; `x` are f32 bits.
#[inline(always)]
fn add_products<const M: usize, const FUSED: bool>(
    sums: &mut [[f32; LANES]; M],
    x: &[u32; M],
    weights: &[f32; LANES],
) {
    for (sums, &x) in sums.iter_mut().zip(x) {
        for (sum, &weight) in sums.iter_mut().zip(weights) {
            *sum = multiply_add::<FUSED>(f32::from_bits(x), weight, *sum);
        }
    }
}
