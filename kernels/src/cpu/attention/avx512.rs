//! Attention of a tile of queries over KV blocks with AVX-512. A vector of scores or weights has
//! one element for each of a block's 16 tokens. A vector of values has 16 dimensions of a head.

use std::arch::x86_64::{
    __m512, _CMP_NLT_UQ, _mm256_loadu_si256, _mm512_add_epi32, _mm512_add_ps, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepu16_epi32, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_mask_blend_ps, _mm512_maskz_mov_ps, _mm512_mul_ps,
    _mm512_reduce_max_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32,
    _mm512_storeu_ps, _mm512_sub_ps,
};

use super::{
    KvElement,
    tile::{BLOCKS_TOGETHER, FEW_QUERIES, QUERY_GROUP, SeenTokens, TileMemory},
};
use crate::{
    cpu::{
        arithmetic::{EXP_COEFFICIENTS, EXP_ZERO, LANES, LN_2_HIGH, LN_2_LOW, LOG2_E, ROUND, exp},
        vectors::{sum_lanes, transpose_vectors},
    },
    layout::{BLOCK_TOKENS, Dtype},
};

/// Vectors of a query's weighted values that are in registers together.
const VECTORS: usize = 4;
/// Queries that share a load of values.
const TOGETHER: usize = 4;
const WHOLE_BLOCK: SeenTokens = SeenTokens { begin: 0, end: BLOCK_TOKENS };

/// Attends over one block; `keys` and `values` are `[token][dim]`.
///
/// # Safety
/// The machine has AVX-512F and DQ; `tile.dim` is a multiple of 16.
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
pub(super) unsafe fn add_block<T: KvElement>(tile: &mut TileMemory, keys: &[T], values: &[T]) {
    let (dim, count) = (tile.dim, tile.query_count);
    assert!(dim.is_multiple_of(LANES) && keys.len() == dim * BLOCK_TOKENS);
    assert_eq!(values.len(), keys.len());
    let groups = count.div_ceil(QUERY_GROUP);
    assert!(tile.queries.len() >= groups * QUERY_GROUP * dim && tile.weighted.len() >= count * dim);
    assert!(tile.weights.len() >= groups * QUERY_GROUP * BLOCK_TOKENS);
    assert!(tile.keys.len() >= keys.len() && tile.values.len() >= keys.len());
    // SAFETY: all pointers below stay inside the slices whose lengths were just checked.
    unsafe {
        for first in (0..dim).step_by(LANES) {
            transpose(keys.as_ptr().add(first), dim, tile.keys.as_mut_ptr().add(first * LANES));
        }
        for first in (0..values.len()).step_by(LANES) {
            let vector = load(values.as_ptr().add(first));
            _mm512_storeu_ps(tile.values.as_mut_ptr().add(first), vector);
        }
        for first in (0..count).step_by(QUERY_GROUP) {
            let queries = QUERY_GROUP.min(count - first);
            if !tile.any_sees(first..first + queries) {
                continue;
            }
            macro_rules! choose {
                ($($queries:literal),+) => {
                    match queries {
                        $($queries => scores::<$queries>(tile, first),)+
                        _ => scores::<QUERY_GROUP>(tile, first),
                    }
                };
            }
            choose!(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            for query in first..first + queries {
                if !tile.seen[query].is_empty() {
                    softmax(tile, query, query);
                }
            }
        }
        let values = tile.values.as_ptr();
        let mut query = 0;
        while query < count {
            let end = query + TOGETHER;
            if end <= count && tile.all_see_all(query..end) {
                accumulate::<TOGETHER, f32>(tile, values, query, query, WHOLE_BLOCK);
                query = end;
            } else {
                let tokens = tile.seen[query];
                if !tokens.is_empty() {
                    accumulate::<1, f32>(tile, values, query, query, tokens);
                }
                query += 1;
            }
        }
    }
}

/// Attends as [`add_block`] does, over several blocks from index `first` on, for a tile of few
/// queries. The scores of a query with one block are one chain of dependent additions, so the
/// chains of several blocks are interleaved. Values are read from the KV cache without a copy.
///
/// # Safety
/// As [`add_block`]; the tile has at most [`FEW_QUERIES`] queries.
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
pub(super) unsafe fn add_few<T: KvElement>(
    tile: &mut TileMemory,
    first: usize,
    blocks: &[(&[T], &[T])],
) {
    let (dim, count) = (tile.dim, tile.query_count);
    let head = dim * BLOCK_TOKENS;
    assert!(dim.is_multiple_of(LANES) && count <= FEW_QUERIES && blocks.len() <= BLOCKS_TOGETHER);
    assert!(blocks.iter().all(|(keys, values)| keys.len() == head && values.len() == head));
    assert!(tile.queries.len() >= QUERY_GROUP * dim && tile.weighted.len() >= count * dim);
    assert!(tile.weights.len() >= BLOCKS_TOGETHER * FEW_QUERIES * BLOCK_TOKENS);
    assert!(tile.keys.len() >= BLOCKS_TOGETHER * head);
    // SAFETY: all pointers below stay inside the slices whose lengths were just checked.
    unsafe {
        for (block, (keys, _)) in blocks.iter().enumerate() {
            let turned = tile.keys.as_mut_ptr().add(block * head);
            for first in (0..dim).step_by(LANES) {
                transpose(keys.as_ptr().add(first), dim, turned.add(first * LANES));
            }
        }
        macro_rules! choose {
            ($($blocks:literal: $($queries:literal)+;)+) => {
                match (count, blocks.len()) {
                    $($(($queries, $blocks) => few_scores::<$queries, $blocks>(tile),)+)+
                    (queries, blocks) => unreachable!("{queries} queries, {blocks} blocks"),
                }
            };
        }
        choose! {
            1: 1 2 3 4;
            2: 1 2 3 4;
            3: 1 2 3 4;
            4: 1 2 3 4;
        }
        for (block, (_, values)) in blocks.iter().enumerate() {
            tile.set_visible(first + block);
            let at = block * FEW_QUERIES;
            for query in 0..count {
                if !tile.seen[query].is_empty() {
                    softmax(tile, query, at + query);
                }
            }
            let values = values.as_ptr();
            if tile.all_see_all(0..count) {
                match count {
                    1 => accumulate::<1, T>(tile, values, 0, at, WHOLE_BLOCK),
                    2 => accumulate::<2, T>(tile, values, 0, at, WHOLE_BLOCK),
                    3 => accumulate::<3, T>(tile, values, 0, at, WHOLE_BLOCK),
                    _ => accumulate::<4, T>(tile, values, 0, at, WHOLE_BLOCK),
                }
                continue;
            }
            for query in 0..count {
                let tokens = tile.seen[query];
                if !tokens.is_empty() {
                    accumulate::<1, T>(tile, values, query, at + query, tokens);
                }
            }
        }
    }
}

/// Computes the scores of all `Q` queries with the keys of `B` blocks.
///
/// # Safety
/// The tile's memory has the lengths that [`add_few`] checks.
#[target_feature(enable = "avx512f")]
unsafe fn few_scores<const Q: usize, const B: usize>(tile: &mut TileMemory) {
    let head = tile.dim * BLOCK_TOKENS;
    let mut sums = [[_mm512_setzero_ps(); B]; Q];
    for d in 0..tile.dim {
        let mut keys = [_mm512_setzero_ps(); B];
        for (block, keys) in keys.iter_mut().enumerate() {
            let at = block * head + d * BLOCK_TOKENS;
            // SAFETY: dimension `d` of block `block` is inside.
            *keys = unsafe { _mm512_loadu_ps(tile.keys.as_ptr().add(at)) };
        }
        for (query, sums) in sums.iter_mut().enumerate() {
            // SAFETY: dimension `d` of the first group's queries is inside.
            let element =
                _mm512_set1_ps(unsafe { *tile.queries.as_ptr().add(d * QUERY_GROUP + query) });
            for (sum, keys) in sums.iter_mut().zip(keys) {
                *sum = _mm512_fmadd_ps(element, keys, *sum);
            }
        }
    }
    for (query, sums) in sums.into_iter().enumerate() {
        for (block, sum) in sums.into_iter().enumerate() {
            let at = (block * FEW_QUERIES + query) * BLOCK_TOKENS;
            // SAFETY: there are scores for every block and query.
            unsafe { _mm512_storeu_ps(tile.weights.as_mut_ptr().add(at), sum) };
        }
    }
}

/// Loads 16 elements as f32.
///
/// # Safety
/// `from` points to 16 elements.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load<T: KvElement>(from: *const T) -> __m512 {
    match T::DTYPE {
        // SAFETY: `from` points to 16 f32 (`# Safety`).
        Dtype::F32 => unsafe { _mm512_loadu_ps(from.cast()) },
        // SAFETY: `from` points to 16 bf16, which are 32 bytes (`# Safety`).
        Dtype::Bf16 => unsafe {
            let halves = _mm256_loadu_si256(from.cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        },
    }
}

/// Transposes 16 dimensions of 16 tokens.
///
/// # Safety
/// `from` points to 16 elements in each of 16 rows, `stride` apart; `to` to 256 elements.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transpose<T: KvElement>(from: *const T, stride: usize, to: *mut f32) {
    let mut rows = [_mm512_setzero_ps(); LANES];
    for (token, row) in rows.iter_mut().enumerate() {
        // SAFETY: `from` points to 16 elements in each of 16 rows, and `token` is one of these
        // rows.
        *row = unsafe { load(from.add(token * stride)) };
    }
    for (dimension, column) in transpose_vectors(rows).into_iter().enumerate() {
        // SAFETY: one of 16 dimensions.
        unsafe { _mm512_storeu_ps(to.add(dimension * LANES), column) };
    }
}

/// Computes the scores of `Q` queries from `first`, the first of a group, with all 16 keys. Scores
/// of invisible keys are undefined.
///
/// # Safety
/// The tile's memory has the lengths that [`add_block`] checks.
#[target_feature(enable = "avx512f")]
unsafe fn scores<const Q: usize>(tile: &mut TileMemory, first: usize) {
    let mut sums = [_mm512_setzero_ps(); Q];
    // SAFETY: `first` is the start of a group of `[dim][QUERY_GROUP]` queries.
    let queries = unsafe { tile.queries.as_ptr().add(first * tile.dim) };
    for d in 0..tile.dim {
        // SAFETY: dimension `d` of the keys and of the group's queries is inside.
        unsafe {
            let keys = _mm512_loadu_ps(tile.keys.as_ptr().add(d * BLOCK_TOKENS));
            for (query, sum) in sums.iter_mut().enumerate() {
                let element = _mm512_set1_ps(*queries.add(d * QUERY_GROUP + query));
                *sum = _mm512_fmadd_ps(element, keys, *sum);
            }
        }
    }
    for (query, sum) in sums.into_iter().enumerate() {
        // SAFETY: there are scores for every query of the group.
        unsafe {
            let to = tile.weights.as_mut_ptr().add((first + query) * BLOCK_TOKENS);
            _mm512_storeu_ps(to, sum);
        }
    }
}

/// Turns the scores at index `at` into weights and updates the query's maximum and sum.
///
/// # Safety
/// Scores exist at index `at`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
unsafe fn softmax(tile: &mut TileMemory, query: usize, at: usize) {
    let SeenTokens { begin, end } = tile.seen[query];
    let seen = ((1_u32 << end) - (1_u32 << begin)) as u16;
    // SAFETY: scores exist at index `at` (`# Safety`).
    let at = unsafe { tile.weights.as_mut_ptr().add(at * BLOCK_TOKENS) };
    // SAFETY: there are 16 scores at `at`.
    let scores = unsafe { _mm512_loadu_ps(at) };
    let scores = _mm512_mask_blend_ps(seen, _mm512_set1_ps(f32::NEG_INFINITY), scores);
    let before = tile.maxima[query];
    let maximum = before.max(_mm512_reduce_max_ps(scores));
    let weights = exp_lanes(_mm512_sub_ps(scores, _mm512_set1_ps(maximum)));
    // SAFETY: there are 16 scores at `at`, and `tile` is borrowed exclusively.
    unsafe { _mm512_storeu_ps(at, weights) };
    // Usually the maximum does not change, and exp(0) is 1.
    let correction = if maximum == before { 1.0 } else { exp(before - maximum) };
    tile.maxima[query] = maximum;
    tile.corrections[query] = correction;
    tile.sums[query] = tile.sums[query] * correction + sum_lanes(weights);
}

/// Computes [`exp`] in 16 lanes with the same operations.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp_lanes(x: __m512) -> __m512 {
    // True for NaN too, so that NaN stays NaN.
    let is_normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(EXP_ZERO));
    let x = _mm512_maskz_mov_ps(is_normal, x);
    let round = _mm512_set1_ps(ROUND);
    let shifted = _mm512_add_ps(_mm512_mul_ps(x, _mm512_set1_ps(LOG2_E)), round);
    let power = _mm512_sub_ps(shifted, round);
    let rest = _mm512_sub_ps(x, _mm512_mul_ps(power, _mm512_set1_ps(LN_2_HIGH)));
    let rest = _mm512_sub_ps(rest, _mm512_mul_ps(power, _mm512_set1_ps(LN_2_LOW)));
    let mut sum = _mm512_set1_ps(EXP_COEFFICIENTS[0]);
    for &coefficient in &EXP_COEFFICIENTS[1..] {
        sum = _mm512_add_ps(_mm512_mul_ps(sum, rest), _mm512_set1_ps(coefficient));
    }
    let value = _mm512_add_ps(_mm512_mul_ps(sum, _mm512_mul_ps(rest, rest)), rest);
    let value = _mm512_add_ps(value, _mm512_set1_ps(1.0));
    let bits = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
    let scale = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(bits));
    _mm512_maskz_mov_ps(is_normal, _mm512_mul_ps(value, scale))
}

/// Adds the weighted values of `tokens` of a block (`[token][dim]`) to `Q` queries from `first` on,
/// whose weights begin at index `at`.
///
/// # Safety
/// Queries, weights and values exist.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn accumulate<const Q: usize, T: KvElement>(
    tile: &mut TileMemory,
    values: *const T,
    first: usize,
    at: usize,
    tokens: SeenTokens,
) {
    let dim = tile.dim;
    for start in (0..dim).step_by(VECTORS * LANES) {
        // SAFETY: the head is a whole number of vectors, so every pointer is inside its slice.
        unsafe {
            match (dim - start) / LANES {
                1 => columns::<Q, 1, T>(tile, values, first, at, tokens, start),
                2 => columns::<Q, 2, T>(tile, values, first, at, tokens, start),
                3 => columns::<Q, 3, T>(tile, values, first, at, tokens, start),
                _ => columns::<Q, VECTORS, T>(tile, values, first, at, tokens, start),
            }
        }
    }
}

/// Computes `V` vectors of [`accumulate`], from dimension `start` on.
///
/// # Safety
/// As [`accumulate`]; the dimensions exist.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn columns<const Q: usize, const V: usize, T: KvElement>(
    tile: &mut TileMemory,
    values: *const T,
    first: usize,
    at: usize,
    tokens: SeenTokens,
    start: usize,
) {
    let dim = tile.dim;
    let mut sums = [[_mm512_setzero_ps(); V]; Q];
    for (query, sums) in sums.iter_mut().enumerate() {
        let correction = _mm512_set1_ps(tile.corrections[first + query]);
        for (vector, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the vector is inside `dim` of query `first + query`, which exists (`#
            // Safety`).
            *sum = unsafe {
                let at = (first + query) * dim + start + vector * LANES;
                _mm512_mul_ps(_mm512_loadu_ps(tile.weighted.as_ptr().add(at)), correction)
            };
        }
    }
    for token in tokens.begin..tokens.end {
        let mut vectors = [_mm512_setzero_ps(); V];
        for (vector, value) in vectors.iter_mut().enumerate() {
            let from = token * dim + start + vector * LANES;
            // SAFETY: the vector is inside `dim` of `token`, one of the block's values, which exist
            // (`# Safety`).
            *value = unsafe { load(values.add(from)) };
        }
        for (query, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the weights of all tokens exist for this query (`# Safety`).
            let weight = unsafe { *tile.weights.as_ptr().add((at + query) * BLOCK_TOKENS + token) };
            let weight = _mm512_set1_ps(weight);
            for (sum, value) in sums.iter_mut().zip(vectors) {
                *sum = _mm512_fmadd_ps(weight, value, *sum);
            }
        }
    }
    for (query, sums) in sums.into_iter().enumerate() {
        for (vector, sum) in sums.into_iter().enumerate() {
            let at = (first + query) * dim + start + vector * LANES;
            // SAFETY: the vector is inside `dim` of query `first + query`, which exists (`#
            // Safety`).
            unsafe { _mm512_storeu_ps(tile.weighted.as_mut_ptr().add(at), sum) };
        }
    }
}
