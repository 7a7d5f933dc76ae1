//! 8-bit tiles for AVX-512 with VNNI: `vpdpbusd` multiplies four bytes with four bytes and
//! accumulates.

use std::arch::x86_64::{
    __m512i, _mm256_loadu_si256, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_dpbusd_epi32,
    _mm512_fmadd_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setzero_ps,
};

use super::{
    super::{
        MatmulTile, TileOutput,
        avx512::{Sums, prefetch, store},
    },
    BLOCK, GROUP, INPUT_WORDS, NUMBER_WORDS, PANEL_BLOCK_WORDS,
};
use crate::cpu::{arithmetic::LANES, matmul::pack::PANEL};

/// Maximum rows of a block: 6 rows of one panel take 12 vectors of i32 sums and 12 of f32
/// accumulators.
pub(in crate::cpu::matmul) const BLOCK_ROWS_MAX: usize = 6;
/// Prefetch distance of weights in bytes, for the few rows at which GEMMs are memory-bound.
const PREFETCH_BYTES: usize = 2176;
const GROUPS: usize = BLOCK / GROUP;

/// Returns the maximum number of panels of one tile for blocks of `rows` rows.
pub(in crate::cpu::matmul) fn panels_for(rows: usize, software_prefetch: bool) -> usize {
    match rows {
        _ if !software_prefetch => 1,
        0..=1 => 4,
        2..=3 => 2,
        _ => 1,
    }
}

/// Multiplies one row block with 1 to [`panels_for`] panels.
///
/// # Safety
/// The machine has AVX-512 (F, BW) and AVX-512-VNNI. `target` may be written in every row of the
/// block, `tile.columns` elements each.
pub(in crate::cpu::matmul) unsafe fn tile(
    tile: &MatmulTile<'_>,
    target: &TileOutput,
    panel_count: usize,
) {
    let blocks = tile.k.div_ceil(BLOCK);
    assert_eq!(tile.x.len(), tile.row_count * blocks * INPUT_WORDS, "a block is [group][rows]");
    assert_eq!(tile.panels.len(), panel_count * blocks * PANEL_BLOCK_WORDS);
    macro_rules! choose {
        ($(($m:literal, $p:literal)),+) => {
            match (tile.row_count, panel_count) {
                // SAFETY: the lengths were checked above for this many rows and panels. The machine
                // has the features, and the target may be written in the tile's rows and columns
                // (`# Safety`).
                $(($m, $p) => unsafe { sized::<$m, $p>(tile, target, blocks) },)+
                (rows, panels) => unreachable!("no tile of {rows} rows and {panels} panels"),
            }
        };
    }
    choose!((1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (1, 2), (2, 2), (3, 2), (1, 3), (1, 4));
}

/// Computes a tile of `M` rows and `P` panels.
///
/// # Safety
/// As for [`tile`]; `tile.x` is `[blocks][INPUT_WORDS][M]` and `tile.panels` is
/// `[P][blocks][PANEL_BLOCK_WORDS]`.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn sized<const M: usize, const P: usize>(
    tile: &MatmulTile<'_>,
    target: &TileOutput,
    blocks: usize,
) {
    let mut sums = [[[_mm512_setzero_ps(); 2]; P]; M];
    for block in 0..blocks {
        for p in 0..P {
            // SAFETY: the block is one of `blocks`, which `tile.x` and all `P` panels have (`#
            // Safety`).
            unsafe {
                let x = tile.x.as_ptr().add(block * INPUT_WORDS * M);
                let weights = tile.panels.as_ptr().add((p * blocks + block) * PANEL_BLOCK_WORDS);
                add_block::<M, P>(&mut sums, p, x, weights, tile.software_prefetch);
            }
        }
    }
    // SAFETY: the target may be written in every row of the tile, `tile.columns` elements each (`#
    // Safety`).
    unsafe { store(&sums, tile, target) };
}

/// Accumulates one block for every row with panel `p`.
///
/// # Safety
/// `x` points to `[INPUT_WORDS][M]` words, `weights` to a panel's block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_block<const M: usize, const P: usize>(
    sums: &mut Sums<M, P>,
    p: usize,
    x: *const u32,
    weights: *const u32,
    software_prefetch: bool,
) {
    // SAFETY: `x` points to `[INPUT_WORDS][M]` words, and `weights` to a panel's block (`#
    // Safety`).
    unsafe {
        let word = |group: usize, m: usize| (*x.add(group * M + m)).cast_signed();
        let mut whole: [[__m512i; 2]; M] =
            std::array::from_fn(|m| [_mm512_set1_epi32(word(GROUPS + 1, m)); 2]);
        for group in 0..GROUPS {
            let at = weights.add(group * PANEL);
            if M <= 4 && software_prefetch {
                prefetch::<PREFETCH_BYTES>(at.cast());
            }
            let numbers = [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(LANES).cast())];
            for (m, whole) in whole.iter_mut().enumerate() {
                let x = _mm512_set1_epi32(word(group, m));
                for (whole, numbers) in whole.iter_mut().zip(numbers) {
                    *whole = _mm512_dpbusd_epi32(*whole, numbers, x);
                }
            }
        }
        let scales = weights.add(NUMBER_WORDS);
        let scales =
            [0, LANES / 2].map(|at| _mm512_cvtph_ps(_mm256_loadu_si256(scales.add(at).cast())));
        for (m, whole) in whole.into_iter().enumerate() {
            let x_scale = _mm512_set1_ps(f32::from_bits(*x.add(GROUPS * M + m)));
            for ((sum, whole), scale) in sums[m][p].iter_mut().zip(whole).zip(scales) {
                let scale = _mm512_mul_ps(scale, x_scale);
                *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, *sum);
            }
        }
    }
}
