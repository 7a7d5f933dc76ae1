//! Attention of a tile (queries that share a KV head) over one KV block in plain Rust. The compiler
//! vectorizes the code for each instruction-set level. The softmax is computed online: each query
//! has a running maximum and sum.

use super::{
    KvElement,
    tile::{QUERY_GROUP, SeenTokens, TileMemory},
};
use crate::{
    cpu::{
        arithmetic::{exp, multiply_add, sum_lanes},
        isa::{BASELINE_FUSES, Level},
    },
    layout::BLOCK_TOKENS,
};

/// Number of queries whose scores are computed together: their accumulators, 4 × 16 f32, fit into
/// the registers.
const QUERIES_TOGETHER: usize = 4;

/// Adds one KV block to the attention of the tile's queries. `keys` and `values` are
/// `[token][dim]`.
pub(super) fn add_block<T: KvElement>(
    level: Level,
    tile: &mut TileMemory,
    keys: &[T],
    values: &[T],
) {
    match level {
        Level::Reference | Level::Baseline => {
            add_block_fused::<T, BASELINE_FUSES>(tile, keys, values);
        }
        // SAFETY: a level exists only if this machine has its features.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2_add(tile, keys, values) },
        // SAFETY: a level exists only if this machine has its features.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe {
            avx512_add(tile, keys, values);
        },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2_add<T: KvElement>(tile: &mut TileMemory, keys: &[T], values: &[T]) {
    add_block_fused::<T, true>(tile, keys, values);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512_add<T: KvElement>(tile: &mut TileMemory, keys: &[T], values: &[T]) {
    add_block_fused::<T, true>(tile, keys, values);
}

/// Adds one KV block, with fused multiply-adds if `FUSED`. Every caller compiles its own copy for
/// its instruction set.
#[inline(always)]
fn add_block_fused<T: KvElement, const FUSED: bool>(
    tile: &mut TileMemory,
    keys: &[T],
    values: &[T],
) {
    let dim = tile.dim;
    let transposed = &mut tile.keys[..dim * BLOCK_TOKENS];
    for (token, key) in keys.chunks_exact(dim).enumerate() {
        for (column, &element) in transposed.chunks_exact_mut(BLOCK_TOKENS).zip(key) {
            column[token] = element.widen();
        }
    }
    for (widened, &value) in tile.values.iter_mut().zip(values) {
        *widened = value.widen();
    }
    for first in (0..tile.query_count).step_by(QUERIES_TOGETHER) {
        if tile.any_sees(first..tile.query_count.min(first + QUERIES_TOGETHER)) {
            scores::<FUSED>(tile, first);
        }
    }
    for query in 0..tile.query_count {
        if !tile.seen[query].is_empty() {
            update_softmax(tile, query);
            accumulate::<FUSED>(tile, query);
        }
    }
}

/// Computes the scores of the queries from `first` on, [`QUERIES_TOGETHER`] of them, with all keys
/// of the block. Writes the scores to `tile.weights`. The score of a key that a query does not see
/// is meaningless.
#[inline(always)]
fn scores<const FUSED: bool>(tile: &mut TileMemory, first: usize) {
    let group =
        &tile.queries[first / QUERY_GROUP * QUERY_GROUP * tile.dim..][..QUERY_GROUP * tile.dim];
    let mut sums = [[0.0_f32; BLOCK_TOKENS]; QUERIES_TOGETHER];
    for (elements, keys) in
        group.chunks_exact(QUERY_GROUP).zip(tile.keys.chunks_exact(BLOCK_TOKENS))
    {
        let elements = &elements[first % QUERY_GROUP..][..QUERIES_TOGETHER];
        for (sums, &element) in sums.iter_mut().zip(elements) {
            for (sum, &key) in sums.iter_mut().zip(keys) {
                *sum = multiply_add::<FUSED>(element, key, *sum);
            }
        }
    }
    tile.weights[first * BLOCK_TOKENS..][..QUERIES_TOGETHER * BLOCK_TOKENS]
        .copy_from_slice(sums.as_flattened());
}

/// Replaces one query's scores by softmax weights relative to the new running maximum. Updates the
/// running maximum and sum, and sets the factor that corrects the accumulators for the new maximum.
#[inline(always)]
fn update_softmax(tile: &mut TileMemory, query: usize) {
    let weights: &mut [f32; BLOCK_TOKENS] = (&mut tile.weights[query * BLOCK_TOKENS..]
        [..BLOCK_TOKENS])
        .try_into()
        .expect("a query has a weight for every token of a block");
    let SeenTokens { begin, end } = tile.seen[query];
    weights[..begin].fill(f32::NEG_INFINITY);
    weights[end..].fill(f32::NEG_INFINITY);
    let previous_maximum = tile.maxima[query];
    let maximum = weights.iter().fold(previous_maximum, |a, &b| a.max(b));
    for weight in weights.iter_mut() {
        *weight = exp(*weight - maximum);
    }
    // Skips `exp` in the usual case of an unchanged maximum: exp(0) is 1.
    let correction = match maximum == previous_maximum {
        true => 1.0,
        false => exp(previous_maximum - maximum),
    };
    tile.maxima[query] = maximum;
    tile.corrections[query] = correction;
    tile.sums[query] = tile.sums[query] * correction + sum_lanes(*weights);
}

/// Corrects one query's weighted sum of values for the new maximum, and adds the weighted values
/// that the query sees.
#[inline(always)]
fn accumulate<const FUSED: bool>(tile: &mut TileMemory, query: usize) {
    let weighted = &mut tile.weighted[query * tile.dim..][..tile.dim];
    for weighted in weighted.iter_mut() {
        *weighted *= tile.corrections[query];
    }
    let SeenTokens { begin, end } = tile.seen[query];
    let weights = &tile.weights[query * BLOCK_TOKENS..][begin..end];
    let values = &tile.values[begin * tile.dim..end * tile.dim];
    for (&weight, values) in weights.iter().zip(values.chunks_exact(tile.dim)) {
        for (weighted, &value) in weighted.iter_mut().zip(values) {
            *weighted = multiply_add::<FUSED>(weight, value, *weighted);
        }
    }
}
