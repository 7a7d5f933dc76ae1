//! Attention of a tile over one span, and the merge of segments.

use std::arch::x86_64::{
    __m256bh, __m512, __m512i, _mm_cvtss_f32, _mm256_loadu_si256, _mm512_add_ps,
    _mm512_castps512_ps128, _mm512_cvtepu16_epi32, _mm512_cvtneps_pbh, _mm512_div_ps,
    _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_mask_blend_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_max_ps,
    _mm512_mul_ps, _mm512_or_si512, _mm512_reduce_max_ps, _mm512_roundscale_ps, _mm512_scalef_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
    _mm512_storeu_si512, _mm512_sub_ps,
};

use half::bf16;

use super::tile::{PairsTile, SPAN, SPAN_BLOCKS, STRIP, sums_len};
use crate::{
    cpu::{
        arithmetic::LANES,
        vectors::{as_bf16, sum_lanes, transpose_vectors},
    },
    layout::BLOCK_TOKENS,
};

/// Score vectors of a span.
const SCORES: usize = SPAN / LANES;
/// Vectors of a query's weighted values that are in registers together.
const VECTORS: usize = 4;

/// (keys, values) of each block of a span as `[token][dim]`; empty for a block that no query sees.
pub(super) type SpanParts<'a> = [(&'a [bf16], &'a [bf16]); SPAN_BLOCKS];

/// Processes one span.
///
/// # Safety
/// The machine has AVX-512 (F, BW, DQ, VL) and AVX-512-BF16; `tile.dim` is a multiple of 16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn add_span(tile: &mut PairsTile, blocks: &SpanParts<'_>) {
    let (dim, count) = (tile.dim, tile.query_count);
    let head = dim * BLOCK_TOKENS;
    assert!(dim.is_multiple_of(LANES));
    assert!(tile.keys.len() == dim / 2 * SPAN && tile.values.len() == SPAN / 2 * dim);
    let room = count.next_multiple_of(STRIP);
    assert!(tile.queries.len() >= room * dim / 2 && tile.weights.len() == STRIP * SPAN / 2);
    assert!(tile.sums.len() >= count * LANES && tile.weighted.len() >= count * dim);
    assert!(tile.visible.len() == count && tile.maxima.len() == count);
    for (block, (keys, values)) in blocks.iter().enumerate() {
        assert!(keys.len() == values.len() && (keys.is_empty() || keys.len() == head));
        // SAFETY: the lengths were checked above.
        unsafe {
            if keys.is_empty() {
                // The scores of these tokens are masked, so their values are not read, or get
                // weight 0. They must be finite, because 0 times NaN is NaN.
                tile.values[block * head / 2..][..head / 2].fill(0);
            } else {
                turn_keys(tile, block, keys);
                pair_values(tile, block, values);
            }
        }
    }
    // The partner of the last visible token may never have been written.
    if tile.visible_end % 2 == 1 {
        for pair in &mut tile.values[tile.visible_end / 2 * dim..][..dim] {
            *pair &= 0xffff;
        }
    }
    for first in (0..count).step_by(STRIP) {
        let queries = STRIP.min(count - first);
        // SAFETY: the lengths were checked above.
        unsafe {
            match queries {
                1 => strip::<1>(tile, first),
                2 => strip::<2>(tile, first),
                3 => strip::<3>(tile, first),
                4 => strip::<4>(tile, first),
                5 => strip::<5>(tile, first),
                _ => strip::<STRIP>(tile, first),
            }
        }
    }
}

/// Transposes the keys of one block, `[token][dim]`, to pairs `[dim / 2][token]`.
///
/// # Safety
/// The lengths are as [`add_span`] checks them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn turn_keys(tile: &mut PairsTile, block: usize, keys: &[bf16]) {
    let words = tile.dim / 2;
    let from = keys.as_ptr().cast::<f32>();
    for first in (0..words).step_by(LANES) {
        let count = LANES.min(words - first);
        let mask = ((1_u32 << count) - 1) as u16;
        let mut rows = [_mm512_setzero_ps(); LANES];
        for (token, row) in rows.iter_mut().enumerate() {
            // SAFETY: the words that the mask selects are this token's.
            *row = unsafe { _mm512_maskz_loadu_ps(mask, from.add(token * words + first)) };
        }
        for (word, tokens) in transpose_vectors(rows).into_iter().enumerate().take(count) {
            let at = (first + word) * SPAN + block * BLOCK_TOKENS;
            // SAFETY: `[dim / 2][SPAN]` words, as checked.
            unsafe { _mm512_storeu_ps(tile.keys.as_mut_ptr().add(at).cast(), tokens) };
        }
    }
}

/// Interleaves the values of one block, `[token][dim]`, to pairs of tokens `[token / 2][dim]`.
///
/// # Safety
/// The lengths are as [`add_span`] checks them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pair_values(tile: &mut PairsTile, block: usize, values: &[bf16]) {
    let dim = tile.dim;
    for pair in 0..BLOCK_TOKENS / 2 {
        for first in (0..dim).step_by(LANES) {
            // SAFETY: 16 elements of both tokens, and 16 words of the pair, are inside.
            unsafe {
                let even = load_halves(values.as_ptr().add(2 * pair * dim + first));
                let odd = load_halves(values.as_ptr().add((2 * pair + 1) * dim + first));
                let words = _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd));
                let at = (block * BLOCK_TOKENS / 2 + pair) * dim + first;
                _mm512_storeu_si512(tile.values.as_mut_ptr().add(at).cast(), words);
            }
        }
    }
}

/// Loads 16 elements, one per word.
///
/// # Safety
/// `from` points to 16 elements.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_halves(from: *const bf16) -> __m512i {
    // SAFETY: `from` points to 16 elements, which are 32 bytes (`# Safety`).
    _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(from.cast()) })
}

/// Processes the current span for `Q` queries from `first`, the first of a strip.
///
/// # Safety
/// The lengths are as [`add_span`] checks them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn strip<const Q: usize>(tile: &mut PairsTile, first: usize) {
    let seen: [u64; Q] = tile.visible[first..][..Q].try_into().expect("Q queries");
    let all_seen = seen.iter().fold(0, |all, seen| all | seen);
    if all_seen == 0 {
        return;
    }
    // SAFETY: the caller promises the lengths.
    unsafe {
        let mut scores = scores::<Q>(tile, first);
        if seen.iter().any(|&seen| seen != u64::MAX) {
            mask(&mut scores, &seen);
        }
        softmax(tile, first, scores);
        // All weights after the last visible token are 0.
        let pairs = (u64::BITS - all_seen.leading_zeros()).div_ceil(2) as usize;
        for start in (0..tile.dim).step_by(VECTORS * LANES) {
            match (tile.dim - start) / LANES {
                1 => accumulate::<Q, 1>(tile, first, pairs, start),
                2 => accumulate::<Q, 2>(tile, first, pairs, start),
                3 => accumulate::<Q, 3>(tile, first, pairs, start),
                _ => accumulate::<Q, VECTORS>(tile, first, pairs, start),
            }
        }
    }
}

/// Computes the scores of `Q` queries with the current span.
///
/// # Safety
/// As [`strip`].
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn scores<const Q: usize>(tile: &PairsTile, first: usize) -> [[__m512; SCORES]; Q] {
    let mut sums = [[_mm512_setzero_ps(); SCORES]; Q];
    let words = tile.dim / 2;
    // SAFETY: strips are contiguous, `[dim / 2][STRIP]` each; keys are `[dim / 2][SPAN]`.
    unsafe {
        let queries = tile.queries.as_ptr().add(first * words);
        let keys = tile.keys.as_ptr();
        for word in 0..words {
            let keys: [__m512i; SCORES] = std::array::from_fn(|vector| {
                _mm512_loadu_si512(keys.add(word * SPAN + vector * LANES).cast())
            });
            for (query, sums) in sums.iter_mut().enumerate() {
                let pair = (*queries.add(word * STRIP + query)).cast_signed();
                let pair = as_bf16(_mm512_set1_epi32(pair));
                for (sum, keys) in sums.iter_mut().zip(keys) {
                    *sum = _mm512_dpbf16_ps(*sum, pair, as_bf16(keys));
                }
            }
        }
    }
    sums
}

/// Sets scores of tokens that a query does not see to minus infinity.
#[inline]
#[target_feature(enable = "avx512f")]
fn mask<const Q: usize>(scores: &mut [[__m512; SCORES]; Q], seen: &[u64; Q]) {
    let hidden = _mm512_set1_ps(f32::NEG_INFINITY);
    for (scores, seen) in scores.iter_mut().zip(seen) {
        for (vector, score) in scores.iter_mut().enumerate() {
            let seen = (seen >> (vector * LANES)) as u16;
            *score = _mm512_mask_blend_ps(seen, hidden, *score);
        }
    }
}

/// Turns scores into weights, updates maxima and sums, and rescales the accumulators. Each stage
/// runs over all queries, because query by query would be one long dependency chain each.
///
/// # Safety
/// As [`strip`].
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl,avx512bf16")]
unsafe fn softmax<const Q: usize>(
    tile: &mut PairsTile,
    first: usize,
    scores: [[__m512; SCORES]; Q],
) {
    let scale = _mm512_set1_ps(tile.log2_scale);
    let maxima: &mut [f32; Q] = (&mut tile.maxima[first..][..Q]).try_into().expect("Q queries");
    let before = *maxima;
    for ([a, b, c, d], maximum) in scores.iter().zip(maxima.iter_mut()) {
        let greatest = _mm512_max_ps(_mm512_max_ps(*a, *b), _mm512_max_ps(*c, *d));
        *maximum = maximum.max(_mm512_reduce_max_ps(greatest));
    }
    let maxima = *maxima;
    if maxima != before {
        for query in 0..Q {
            let correction =
                exp2(_mm512_mul_ps(_mm512_set1_ps(before[query] - maxima[query]), scale));
            // SAFETY: every query has its lanes and its weighted values.
            unsafe {
                scale_all(tile.sums.as_mut_ptr().add((first + query) * LANES), LANES, correction);
                let weighted = tile.weighted.as_mut_ptr().add((first + query) * tile.dim);
                scale_all(weighted, tile.dim, correction);
            }
        }
    }
    for (query, scores) in scores.into_iter().enumerate() {
        let shift = _mm512_mul_ps(_mm512_set1_ps(maxima[query]), scale);
        let weights = scores.map(|score| exp2(_mm512_fmsub_ps(score, scale, shift)));
        let [a, b, c, d] = weights;
        let sum = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
        // SAFETY: every query has its lanes and its weights.
        unsafe {
            let sums = tile.sums.as_mut_ptr().add((first + query) * LANES);
            _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), sum));
            let to = tile.weights.as_mut_ptr().add(query * SPAN / 2);
            for (vector, weights) in weights.into_iter().enumerate() {
                let halves = _mm512_cvtneps_pbh(weights);
                to.add(vector * LANES / 2).cast::<__m256bh>().write_unaligned(halves);
            }
        }
    }
}

/// Multiplies `length` floats from `start` on by `by`.
///
/// # Safety
/// `length` is a multiple of the vector length, and the floats may be written.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn scale_all(start: *mut f32, length: usize, by: __m512) {
    for offset in (0..length).step_by(LANES) {
        // SAFETY: `length` is a multiple of the vector length, so the vector is inside the floats,
        // which may be written (`# Safety`).
        unsafe {
            let at = start.add(offset);
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), by));
        }
    }
}

/// Adds the weighted values of the first `pairs` pairs of tokens: `V` vectors from dimension
/// `start` on.
///
/// # Safety
/// As [`strip`]; the dimensions exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn accumulate<const Q: usize, const V: usize>(
    tile: &mut PairsTile,
    first: usize,
    pairs: usize,
    start: usize,
) {
    let dim = tile.dim;
    // SAFETY: [`add_span`] has checked that queries, weights, values and weighted values have `dim`
    // dimensions each, and the `V` vectors from `start` on are inside `dim` (`# Safety`).
    unsafe {
        let weighted = tile.weighted.as_mut_ptr().add(first * dim + start);
        let weights = tile.weights.as_ptr();
        let values = tile.values.as_ptr().add(start);
        let mut sums: [[__m512; V]; Q] = std::array::from_fn(|query| {
            std::array::from_fn(|vector| {
                _mm512_loadu_ps(weighted.add(query * dim + vector * LANES))
            })
        });
        for pair in 0..pairs {
            let values: [__m512i; V] = std::array::from_fn(|vector| {
                _mm512_loadu_si512(values.add(pair * dim + vector * LANES).cast())
            });
            for (query, sums) in sums.iter_mut().enumerate() {
                let weight = (*weights.add(query * SPAN / 2 + pair)).cast_signed();
                let weight = as_bf16(_mm512_set1_epi32(weight));
                for (sum, values) in sums.iter_mut().zip(values) {
                    *sum = _mm512_dpbf16_ps(*sum, weight, as_bf16(values));
                }
            }
        }
        for (query, sums) in sums.into_iter().enumerate() {
            for (vector, sum) in sums.into_iter().enumerate() {
                _mm512_storeu_ps(weighted.add(query * dim + vector * LANES), sum);
            }
        }
    }
}

/// Writes the current segment's partial result to `out`, `[query][sums_len(dim)]`.
///
/// # Safety
/// As [`add_span`].
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
pub(super) unsafe fn write_sums(tile: &PairsTile, out: &mut [f32]) {
    for (query, out) in out.chunks_exact_mut(sums_len(tile.dim)).enumerate() {
        out[0] = tile.maxima[query];
        out[1] = segment_sum(tile, query);
        out[LANES..].copy_from_slice(&tile.weighted[query * tile.dim..][..tile.dim]);
    }
}

/// Merges the partial result of a segment. Segments must be merged in order.
///
/// # Safety
/// As [`add_span`].
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
pub(super) unsafe fn merge(tile: &mut PairsTile, segment: &[f32]) {
    let (dim, length) = (tile.dim, sums_len(tile.dim));
    let merged = tile.merged.chunks_exact_mut(length);
    for (merged, segment) in merged.zip(segment.chunks_exact(length)) {
        let (maximum, sum) = (segment[0], segment[1]);
        merge_query(tile.log2_scale, merged, maximum, sum, &segment[LANES..][..dim]);
    }
}

/// Merges the tile's own current segment as [`merge`] does.
///
/// # Safety
/// As [`add_span`].
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
pub(super) unsafe fn merge_own(tile: &mut PairsTile) {
    let (dim, length) = (tile.dim, sums_len(tile.dim));
    for query in 0..tile.query_count {
        let (maximum, sum) = (tile.maxima[query], segment_sum(tile, query));
        let weighted = &tile.weighted[query * dim..][..dim];
        let merged = &mut tile.merged[query * length..][..length];
        merge_query(tile.log2_scale, merged, maximum, sum, weighted);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn merge_query(log2_scale: f32, merged: &mut [f32], maximum: f32, sum: f32, weighted: &[f32]) {
    let scale = _mm512_set1_ps(log2_scale);
    let greater = merged[0].max(maximum);
    // Exactly 1 where the maximum stays, so a segment that a query does not see changes nothing.
    let weight = |maximum: f32| exp2(_mm512_mul_ps(_mm512_set1_ps(maximum - greater), scale));
    let (before, now) = (weight(merged[0]), weight(maximum));
    let lane = |vector: __m512| _mm_cvtss_f32(_mm512_castps512_ps128(vector));
    merged[0] = greater;
    merged[1] = merged[1].mul_add(lane(before), sum * lane(now));
    let sums = merged[LANES..].as_chunks_mut::<LANES>().0;
    for (sum, added) in sums.iter_mut().zip(weighted.as_chunks::<LANES>().0) {
        // SAFETY: both are 16 floats.
        unsafe {
            let added = _mm512_mul_ps(_mm512_loadu_ps(added.as_ptr()), now);
            let sums = _mm512_fmadd_ps(_mm512_loadu_ps(sum.as_ptr()), before, added);
            _mm512_storeu_ps(sum.as_mut_ptr(), sums);
        }
    }
}

/// Writes the attention of one query after all segments are merged.
///
/// # Safety
/// As [`add_span`].
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
pub(super) unsafe fn finish(tile: &PairsTile, query: usize, out: &mut [f32]) {
    let length = sums_len(tile.dim);
    let merged = &tile.merged[query * length..][..length];
    let sum = _mm512_set1_ps(merged[1]);
    let weighted = merged[LANES..].as_chunks::<LANES>().0;
    for (out, weighted) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(weighted) {
        // SAFETY: both are 16 floats.
        unsafe {
            let weighted = _mm512_loadu_ps(weighted.as_ptr());
            _mm512_mask_storeu_ps(out.as_mut_ptr(), u16::MAX, _mm512_div_ps(weighted, sum));
        }
    }
}

/// Returns the sum of a query's weights in the current segment.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn segment_sum(tile: &PairsTile, query: usize) -> f32 {
    let lanes = &tile.sums[query * LANES..][..LANES];
    // SAFETY: 16 floats.
    sum_lanes(unsafe { _mm512_loadu_ps(lanes.as_ptr()) })
}

/// Returns 2 to the power of `x` with an error of at most 3e-6, a thousandth of the error of
/// rounding a weight to bf16. Exactly 1 for 0, and 0 far below, minus infinity included.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp2(x: __m512) -> __m512 {
    /// Coefficients of (2^f - 1) / f for |f| ≤ ½, highest power first, with the least maximum
    /// relative error.
    const COEFFICIENTS: [f32; 4] = [9.582_853e-3, 5.590_642_6e-2, 0.240_240_99, 0.693_124_2];
    // Clamps values far below the smallest float, where later steps would turn infinity into NaN.
    // NaN stays, because it is the second operand.
    let x = _mm512_max_ps(_mm512_set1_ps(-200.0), x);
    let power = _mm512_roundscale_ps::<0x08>(x);
    let rest = _mm512_sub_ps(x, power);
    let mut sum = _mm512_set1_ps(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(*coefficient));
    }
    _mm512_scalef_ps(_mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0)), power)
}
