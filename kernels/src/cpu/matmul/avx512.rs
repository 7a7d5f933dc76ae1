//! GEMM tiles for AVX-512: up to 24 vectors of accumulators in registers.
//!
//! There are three kernels for bf16 weights:
//! - `widened_tile` widens weights to f32 in registers: a shift gives the weight of the even input
//!   of a pair, and a mask the weight of the odd input. The product of two bf16 is exact in f32.
//! - `pairs_tile` multiplies a pair at once with `vdpbf16ps`, which flushes denormals. It is used
//!   on processors whose `vdpbf16ps` has the throughput of an FMA. Intel's cores issue `vdpbf16ps`
//!   only every other cycle: 16 multiply-adds per cycle against 32 of the two FMA units (60 and 120
//!   G multiply-adds/s, measured on one core of a Xeon with AMX).
//! - `stepped_tile` computes a single row at level `Amx`, and adds in the order of the AMX kernel.
//!
//! A *weight group* is the 32 words of a panel for one input (f32) or for one pair of inputs
//! (bf16).

use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_and_si512,
    _mm512_castsi512_ps, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_mask_storeu_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32,
};

use super::{
    MatmulTile, TileOutput,
    pack::{INPUTS_STEP, PANEL},
    rows::RowFormat,
};
use crate::cpu::{arithmetic::LANES, vectors::as_bf16};

/// Maximum rows of a block: 12 rows of a panel take 24 of the 32 vector registers as accumulators.
pub(super) const BLOCK_ROWS_MAX: usize = 12;

/// Prefetch distance of weights in bytes, for the few rows at which GEMMs are memory-bound.
const PREFETCH_BYTES: usize = 2048;
/// Maximum rows with software prefetch. With more rows the core computes longer per cache line, and
/// the hardware prefetch suffices.
const PREFETCH_ROWS_MAX: usize = 8;
const CACHE_LINE_BYTES: usize = 64;
/// Mask of the odd input's weight, the upper half of each 32-bit word. With zeros below, a bf16 is
/// an f32.
const ODD_WEIGHT_MASK: i32 = 0xffff_0000_u32.cast_signed();

/// Returns the maximum number of panels of a tile for blocks of `rows` rows.
pub(super) fn panels_for(rows: usize, software_prefetch: bool) -> usize {
    match rows {
        _ if !software_prefetch => 1,
        0..=3 => 4,
        4 => 3,
        5..=6 => 2,
        _ => 1,
    }
}

/// Multiplies one row block with 1 to [`panels_for`] panels.
///
/// # Safety
/// The machine has AVX-512F, and AVX-512-BF16 for [`RowFormat::Pairs`]. `target` may be written in
/// every row of the block, `tile.columns` elements each.
pub(super) unsafe fn tile(tile: &MatmulTile<'_>, target: &TileOutput, panel_count: usize) {
    let row_words = tile.format.row_words(tile.k);
    assert_eq!(tile.x.len(), tile.row_count * row_words, "a row block is [words of a row][rows]");
    let group_count = match tile.format {
        RowFormat::F32 | RowFormat::Pairs => row_words,
        RowFormat::Rounded | RowFormat::Stepped => row_words.div_ceil(2),
        RowFormat::Q8 => unreachable!("8-bit panels have tiles of their own"),
    };
    let panel_words = tile.panels.len() / panel_count;
    assert!(
        panel_words >= group_count * PANEL,
        "a panel has a weight group for every input or pair"
    );
    if tile.format == RowFormat::Stepped {
        assert_eq!(tile.row_count, 1, "`Stepped` is the format of a single row");
        // SAFETY: the lengths were checked above. The machine has AVX-512F, and the target may be
        // written in the tile's row and columns (`# Safety`).
        return unsafe {
            match panel_count {
                1 => stepped_tile::<1>(tile, target, panel_words),
                2 => stepped_tile::<2>(tile, target, panel_words),
                3 => stepped_tile::<3>(tile, target, panel_words),
                4 => stepped_tile::<4>(tile, target, panel_words),
                panels => unreachable!("no tile of one row and {panels} panels"),
            }
        };
    }
    macro_rules! choose {
        ($($p:literal: $($m:literal)+;)+) => {
            match (tile.row_count, panel_count) {
                // SAFETY: the lengths were checked above for this many rows and panels. The machine
                // has the features, and the target may be written in the tile's rows and columns
                // (`# Safety`).
                $($(($m, $p) => unsafe {
                    match tile.format {
                        RowFormat::F32 => f32_tile::<$m, $p>(tile, target, panel_words),
                        RowFormat::Pairs => pairs_tile::<$m, $p>(tile, target, panel_words),
                        _ => widened_tile::<$m, $p>(tile, target, panel_words),
                    }
                },)+)+
                (rows, panels) => unreachable!("no tile of {rows} rows and {panels} panels"),
            }
        };
    }
    choose! {
        1: 1 2 3 4 5 6 7 8 9 10 11 12;
        2: 1 2 3 4 5 6;
        3: 1 2 3 4;
        4: 1 2 3;
    }
}

/// Accumulators of `M` rows and `P` panels. A panel's 32 output features take two vectors.
pub(super) type Sums<const M: usize, const P: usize> = [[[__m512; 2]; P]; M];

/// Computes a tile of f32 weights.
///
/// # Safety
/// `tile.x` is `[k][M]`, its panels are `P` of `panel_words` f32. The conditions of [`tile`] hold.
#[target_feature(enable = "avx512f")]
unsafe fn f32_tile<const M: usize, const P: usize>(
    tile: &MatmulTile<'_>,
    target: &TileOutput,
    panel_words: usize,
) {
    let mut sums: Sums<M, P> = [[[_mm512_setzero_ps(); 2]; P]; M];
    for k in 0..tile.k {
        for p in 0..P {
            // SAFETY: group `k` is inside panel `p` of `panel_words` f32, and input `k` inside
            // `tile.x`, `[k][M]` (`# Safety`).
            unsafe {
                let group = tile.panels.as_ptr().add(p * panel_words + k * PANEL);
                prefetch_few::<M>(tile, group.cast());
                let weights =
                    [_mm512_loadu_ps(group.cast()), _mm512_loadu_ps(group.add(LANES).cast())];
                accumulate(&mut sums, p, tile.x.as_ptr().add(k * M), weights);
            }
        }
    }
    // SAFETY: the target may be written in every row of the tile, `tile.columns` elements each (`#
    // Safety`).
    unsafe { store(&sums, tile, target) };
}

/// Computes a tile of bf16 weights, widened to f32.
///
/// # Safety
/// `tile.x` is `[k][M]`, its panels are `P` of `panel_words` words. The conditions of [`tile`]
/// hold.
#[target_feature(enable = "avx512f")]
unsafe fn widened_tile<const M: usize, const P: usize>(
    tile: &MatmulTile<'_>,
    target: &TileOutput,
    panel_words: usize,
) {
    let mut sums: Sums<M, P> = [[[_mm512_setzero_ps(); 2]; P]; M];
    let odd_mask = _mm512_set1_epi32(ODD_WEIGHT_MASK);
    for pair in 0..tile.k / 2 {
        for p in 0..P {
            // SAFETY: the pair is inside panel `p` of `panel_words` words, and both of its inputs
            // inside `tile.x`, `[k][M]` (`# Safety`).
            unsafe {
                let words =
                    load_words::<M>(tile, tile.panels.as_ptr().add(p * panel_words + pair * PANEL));
                let x = tile.x.as_ptr().add(pair * 2 * M);
                let even_weights =
                    words.map(|words| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)));
                accumulate(&mut sums, p, x, even_weights);
                let odd_weights =
                    words.map(|words| _mm512_castsi512_ps(_mm512_and_si512(words, odd_mask)));
                accumulate(&mut sums, p, x.add(M), odd_weights);
            }
        }
    }
    if !tile.k.is_multiple_of(2) {
        let last = tile.k / 2;
        for p in 0..P {
            // SAFETY: the last pair is inside panel `p`, and its even input in the block.
            unsafe {
                let words =
                    load_words::<M>(tile, tile.panels.as_ptr().add(p * panel_words + last * PANEL));
                let weights =
                    words.map(|words| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)));
                accumulate(&mut sums, p, tile.x.as_ptr().add(last * 2 * M), weights);
            }
        }
    }
    // SAFETY: the target may be written in every row of the tile, `tile.columns` elements each (`#
    // Safety`).
    unsafe { store(&sums, tile, target) };
}

/// Computes one row in the order of AMX tiles. In every step of 32 inputs, the even and the odd
/// inputs are accumulated separately from zero, and then both are added to the result.
///
/// # Safety
/// `tile.x` is `[k]` padded to whole steps, its panels are `P` of `panel_words` words. The
/// conditions of [`tile`] hold.
#[target_feature(enable = "avx512f")]
unsafe fn stepped_tile<const P: usize>(
    tile: &MatmulTile<'_>,
    target: &TileOutput,
    panel_words: usize,
) {
    let mut sums: Sums<1, P> = [[[_mm512_setzero_ps(); 2]; P]; 1];
    let odd_mask = _mm512_set1_epi32(ODD_WEIGHT_MASK);
    for (step, x) in tile.x.as_chunks::<INPUTS_STEP>().0.iter().enumerate() {
        let mut even_sums = [[_mm512_setzero_ps(); 2]; P];
        let mut odd_sums = even_sums;
        for (pair, x) in x.as_chunks::<2>().0.iter().enumerate() {
            let [even_x, odd_x] = x.map(|x| _mm512_set1_ps(f32::from_bits(x)));
            let group = (step * INPUTS_STEP / 2 + pair) * PANEL;
            for (p, (even_sums, odd_sums)) in even_sums.iter_mut().zip(&mut odd_sums).enumerate() {
                // SAFETY: the group is inside panel `p` of `panel_words` words, which has all steps
                // of `tile.x` (`# Safety`).
                let words = unsafe {
                    load_words::<1>(tile, tile.panels.as_ptr().add(p * panel_words + group))
                };
                for ((even, odd), words) in even_sums.iter_mut().zip(odd_sums).zip(words) {
                    let weights = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words));
                    *even = _mm512_fmadd_ps(even_x, weights, *even);
                    let weights = _mm512_castsi512_ps(_mm512_and_si512(words, odd_mask));
                    *odd = _mm512_fmadd_ps(odd_x, weights, *odd);
                }
            }
        }
        let parts = even_sums.as_flattened().iter().zip(odd_sums.as_flattened());
        for (sum, (&even, &odd)) in sums[0].as_flattened_mut().iter_mut().zip(parts) {
            *sum = _mm512_add_ps(*sum, _mm512_add_ps(even, odd));
        }
    }
    // SAFETY: the target may be written in every row of the tile, `tile.columns` elements each (`#
    // Safety`).
    unsafe { store(&sums, tile, target) };
}

/// Computes a tile with `vdpbf16ps`.
///
/// # Safety
/// `tile.x` is `[k.div_ceil(2)][M]`, its panels are `P` of `panel_words` words. The conditions of
/// [`tile`] hold.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn pairs_tile<const M: usize, const P: usize>(
    tile: &MatmulTile<'_>,
    target: &TileOutput,
    panel_words: usize,
) {
    let mut sums: Sums<M, P> = [[[_mm512_setzero_ps(); 2]; P]; M];
    for pair in 0..tile.k.div_ceil(2) {
        for p in 0..P {
            // SAFETY: the pair is inside panel `p` of `panel_words` words, and inside `tile.x`,
            // `[k.div_ceil(2)][M]` (`# Safety`).
            unsafe {
                let words =
                    load_words::<M>(tile, tile.panels.as_ptr().add(p * panel_words + pair * PANEL));
                let x = tile.x.as_ptr().add(pair * M);
                for (m, sums) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_epi32((*x.add(m)).cast_signed());
                    for (sum, words) in sums[p].iter_mut().zip(words) {
                        *sum = _mm512_dpbf16_ps(*sum, as_bf16(x), as_bf16(words));
                    }
                }
            }
        }
    }
    // SAFETY: the target may be written in every row of the tile, `tile.columns` elements each (`#
    // Safety`).
    unsafe { store(&sums, tile, target) };
}

/// Loads the two vectors of a weight group of bf16.
///
/// # Safety
/// `group` points to 32 words.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_words<const M: usize>(tile: &MatmulTile<'_>, group: *const u32) -> [__m512i; 2] {
    prefetch_few::<M>(tile, group.cast());
    // SAFETY: `group` points to 32 words (`# Safety`).
    unsafe { [_mm512_loadu_si512(group.cast()), _mm512_loadu_si512(group.add(LANES).cast())] }
}

/// Accumulates one input of every row with the weights of panel `p`.
///
/// # Safety
/// `x` points to the bits of `M` f32.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn accumulate<const M: usize, const P: usize>(
    sums: &mut Sums<M, P>,
    p: usize,
    x: *const u32,
    weights: [__m512; 2],
) {
    for (m, sums) in sums.iter_mut().enumerate() {
        // SAFETY: `m` is below `M`.
        let x = _mm512_set1_ps(unsafe { f32::from_bits(*x.add(m)) });
        for (sum, weights) in sums[p].iter_mut().zip(weights) {
            *sum = _mm512_fmadd_ps(x, weights, *sum);
        }
    }
}

/// Writes the accumulators to the target.
///
/// # Safety
/// `target` may be written in `M` rows, `tile.columns` elements each.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn store<const M: usize, const P: usize>(
    sums: &Sums<M, P>,
    tile: &MatmulTile<'_>,
    target: &TileOutput,
) {
    for (row, sums) in sums.iter().enumerate() {
        for (vector, sums) in sums.as_flattened().iter().enumerate() {
            let first = vector * LANES;
            let columns = LANES.min(tile.columns.saturating_sub(first));
            let mask = ((1_u32 << columns) - 1) as u16;
            // SAFETY: the columns that the mask selects are in the target.
            unsafe { _mm512_mask_storeu_ps(target.at(row, first), mask, *sums) };
        }
    }
}

/// Prefetches weights for at most [`PREFETCH_ROWS_MAX`] rows, if the tile uses software prefetch.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch_few<const M: usize>(tile: &MatmulTile<'_>, group: *const u8) {
    if M <= PREFETCH_ROWS_MAX && tile.software_prefetch {
        prefetch::<PREFETCH_BYTES>(group);
    }
}

/// Prefetches two cache lines of weights `DISTANCE` bytes ahead; the address may be outside the
/// weights.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn prefetch<const DISTANCE: usize>(group: *const u8) {
    _mm_prefetch::<_MM_HINT_T0>(group.wrapping_add(DISTANCE).cast());
    _mm_prefetch::<_MM_HINT_T0>(group.wrapping_add(DISTANCE + CACHE_LINE_BYTES).cast());
}
