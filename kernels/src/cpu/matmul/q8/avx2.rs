//! 8-bit tiles for AVX2. The even and the odd bytes of each group of four are multiplied as 16-bit
//! numbers, which cannot overflow.

use std::arch::x86_64::{
    __m256, _mm_loadu_si128, _mm256_add_epi32, _mm256_and_si256, _mm256_cvtepi32_ps,
    _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_mul_ps,
    _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi16,
    _mm256_srai_epi16, _mm256_srli_epi16, _mm256_storeu_ps,
};

use super::{
    super::{MatmulTile, TileOutput},
    BLOCK, GROUP, INPUT_WORDS, NUMBER_WORDS, PANEL_BLOCK_WORDS,
};
use crate::cpu::matmul::pack::PANEL;

/// Maximum rows of a block: two rows of half a panel are 8 vectors of accumulators; the operands
/// take the other registers.
pub(in crate::cpu::matmul) const BLOCK_ROWS_MAX: usize = 2;
/// Lanes of a vector, and vectors of a panel.
const LANES: usize = 8;
const VECTORS: usize = PANEL / LANES;
const GROUPS: usize = BLOCK / GROUP;

/// Multiplies one row block with one panel.
///
/// # Safety
/// The machine has AVX2, FMA and F16C. `target` may be written in the tile's rows and columns.
pub(in crate::cpu::matmul) unsafe fn tile(
    tile: &MatmulTile<'_>,
    target: &TileOutput,
    _panel_count: usize,
) {
    let blocks = tile.k.div_ceil(BLOCK);
    assert_eq!(tile.x.len(), tile.row_count * blocks * INPUT_WORDS, "a block is [group][rows]");
    assert_eq!(tile.panels.len(), blocks * PANEL_BLOCK_WORDS);
    // SAFETY: the lengths were checked above. The machine has the features, and the target may be
    // written in the tile's rows and columns (`# Safety`).
    unsafe {
        match tile.row_count {
            1 => sized::<1>(tile, target, blocks),
            2 => sized::<2>(tile, target, blocks),
            rows => unreachable!("a block has 1 to {BLOCK_ROWS_MAX} rows, not {rows}"),
        }
    }
}

/// Computes a tile of `M` rows.
///
/// # Safety
/// `tile.x` is `[blocks][INPUT_WORDS][M]`, its panel is `[blocks][PANEL_BLOCK_WORDS]`, and as
/// [`tile`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sized<const M: usize>(tile: &MatmulTile<'_>, target: &TileOutput, blocks: usize) {
    let mut sums = [[_mm256_setzero_ps(); VECTORS]; M];
    for block in 0..blocks {
        // SAFETY: the block is one of `blocks`, which `tile.x` and the panel have (`# Safety`).
        unsafe {
            let x = tile.x.as_ptr().add(block * INPUT_WORDS * M);
            add_block::<M>(&mut sums, x, tile.panels.as_ptr().add(block * PANEL_BLOCK_WORDS));
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        let mut plain = [0.0_f32; PANEL];
        for (plain, sums) in plain.as_chunks_mut::<LANES>().0.iter_mut().zip(sums) {
            // SAFETY: eight floats.
            unsafe { _mm256_storeu_ps(plain.as_mut_ptr(), *sums) };
        }
        // SAFETY: the target has `tile.columns` columns in each of the block's rows.
        unsafe { plain.as_ptr().copy_to_nonoverlapping(target.at(row, 0), tile.columns) };
    }
}

/// Accumulates one block for every row.
///
/// # Safety
/// `x` points to `[INPUT_WORDS][M]` words, `weights` to a panel's block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_block<const M: usize>(
    sums: &mut [[__m256; VECTORS]; M],
    x: *const u32,
    weights: *const u32,
) {
    // SAFETY: `x` points to `[INPUT_WORDS][M]` words, and `weights` to a panel's block (`#
    // Safety`).
    unsafe {
        let word = |group: usize, m: usize| (*x.add(group * M + m)).cast_signed();
        let mut whole = [[_mm256_set1_epi32(0); VECTORS]; M];
        for (m, whole) in whole.iter_mut().enumerate() {
            *whole = [_mm256_set1_epi32(word(GROUPS + 1, m)); VECTORS];
        }
        for group in 0..GROUPS {
            let mut inputs = [[_mm256_set1_epi32(0); 2]; M];
            for (m, [even, odd]) in inputs.iter_mut().enumerate() {
                let x = _mm256_set1_epi32(word(group, m));
                *even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x));
                *odd = _mm256_srai_epi16::<8>(x);
            }
            for vector in 0..VECTORS {
                let at = weights.add(group * PANEL + vector * LANES);
                let bytes = _mm256_loadu_si256(at.cast());
                let even = _mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
                let odd = _mm256_srli_epi16::<8>(bytes);
                for (whole, [even_x, odd_x]) in whole.iter_mut().zip(inputs) {
                    let products = _mm256_add_epi32(
                        _mm256_madd_epi16(even, even_x),
                        _mm256_madd_epi16(odd, odd_x),
                    );
                    whole[vector] = _mm256_add_epi32(whole[vector], products);
                }
            }
        }
        for vector in 0..VECTORS {
            let at = weights.add(NUMBER_WORDS + vector * LANES / 2);
            let scale = _mm256_cvtph_ps(_mm_loadu_si128(at.cast()));
            for (m, (sums, whole)) in sums.iter_mut().zip(whole).enumerate() {
                let x_scale = _mm256_set1_ps(f32::from_bits(*x.add(GROUPS * M + m)));
                let scale = _mm256_mul_ps(scale, x_scale);
                sums[vector] =
                    _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[vector]), scale, sums[vector]);
            }
        }
    }
}
