//! AVX-512 vector helpers that several operations share.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehl_ps,
    _mm_shuffle_ps, _mm256_add_ps, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm512_castpd_ps,
    _mm512_castps_pd, _mm512_castps512_ps256, _mm512_extractf32x8_ps, _mm512_setzero_ps,
    _mm512_shuffle_f32x4, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd,
    _mm512_unpacklo_ps,
};

use super::arithmetic::LANES;

/// Transposes a 16 × 16 matrix of f32, given as its rows.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose_vectors(rows: [__m512; LANES]) -> [__m512; LANES] {
    // Transposes within each quarter of a vector (4 lanes) in two steps: first 2 × 2 blocks, then 4
    // × 4 blocks. Then it moves the quarters. Comments count rows and columns from 0.
    let mut pairs = [_mm512_setzero_ps(); LANES];
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
    let mut fours = [_mm512_setzero_ps(); LANES];
    for i in 0..4 {
        for half in 0..2 {
            let (a, b) = (pairs[4 * i + half], pairs[4 * i + 2 + half]);
            let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
            fours[4 * i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            fours[4 * i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    // Quarter q of `fours[4 i + c]` now has column 4 q + c of the rows 4 i to 4 i + 3.
    let mut columns = [_mm512_setzero_ps(); LANES];
    for c in 0..4 {
        let low = _mm512_shuffle_f32x4::<0x88>(fours[c], fours[4 + c]);
        let high = _mm512_shuffle_f32x4::<0xdd>(fours[c], fours[4 + c]);
        let low_2 = _mm512_shuffle_f32x4::<0x88>(fours[8 + c], fours[12 + c]);
        let high_2 = _mm512_shuffle_f32x4::<0xdd>(fours[8 + c], fours[12 + c]);
        columns[c] = _mm512_shuffle_f32x4::<0x88>(low, low_2);
        columns[4 + c] = _mm512_shuffle_f32x4::<0x88>(high, high_2);
        columns[8 + c] = _mm512_shuffle_f32x4::<0xdd>(low, low_2);
        columns[12 + c] = _mm512_shuffle_f32x4::<0xdd>(high, high_2);
    }
    columns
}

/// Reinterprets 16 words as 32 lanes of bf16: the lower half of each word is an even lane, the
/// upper half the odd lane after it.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) fn as_bf16(words: __m512i) -> __m512bh {
    // SAFETY: both types have 64 bytes, and every bit pattern is valid.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
}

/// Adds the 16 lanes in the order of [`super::arithmetic::sum_lanes`], so with the same bits: first
/// lanes that are 8 apart, then 4, 2 and 1.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
pub(crate) fn sum_lanes(lanes: __m512) -> f32 {
    let eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes));
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}
