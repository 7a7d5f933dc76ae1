//! Attention of a tile over one KV block in plain Rust. The compiler vectorizes it for each level.

use super::{
    KvElement,
    tile::{GROUP, SeenTokens, TileMemory},
};
use crate::{
    cpu::{
        arithmetic::{exp, multiply_add, sum_lanes},
        isa::{BASELINE_FUSES, Level},
    },
    layout::BLOCK_TOKENS,
};

/// Number of queries whose accumulators are in registers at once.
const TOGETHER: usize = 4;

/// Attends over one block; `keys` and `values` are `[token][dim]`.
pub(super) fn add_block<T: KvElement>(
    level: Level,
    tile: &mut TileMemory,
    keys: &[T],
    values: &[T],
) {
    match level {
        Level::Reference | Level::Baseline => {
            add::<T, BASELINE_FUSES>(tile, keys, values);
        }
        // SAFETY: the level was found on this machine.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2_add(tile, keys, values) },
        // SAFETY: the level was found on this machine, so the machine has its features.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe {
            avx512_add(tile, keys, values);
        },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2_add<T: KvElement>(tile: &mut TileMemory, keys: &[T], values: &[T]) {
    add::<T, true>(tile, keys, values);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512_add<T: KvElement>(tile: &mut TileMemory, keys: &[T], values: &[T]) {
    add::<T, true>(tile, keys, values);
}

#[inline(always)]
fn add<T: KvElement, const FUSED: bool>(tile: &mut TileMemory, keys: &[T], values: &[T]) {
    let dim = tile.dim;
    let turned = &mut tile.keys[..dim * BLOCK_TOKENS];
    for (token, key) in keys.chunks_exact(dim).enumerate() {
        for (column, &element) in turned.chunks_exact_mut(BLOCK_TOKENS).zip(key) {
            column[token] = element.widen();
        }
    }
    for (to, &value) in tile.values.iter_mut().zip(values) {
        *to = value.widen();
    }
    for first in (0..tile.query_count).step_by(TOGETHER) {
        if tile.any_sees(first..tile.query_count.min(first + TOGETHER)) {
            scores::<FUSED>(tile, first);
        }
    }
    for query in 0..tile.query_count {
        if !tile.seen[query].is_empty() {
            softmax(tile, query);
            accumulate::<FUSED>(tile, query);
        }
    }
}

/// Computes the scores of four queries with all 16 keys. Scores of invisible keys are undefined.
#[inline(always)]
fn scores<const FUSED: bool>(tile: &mut TileMemory, first: usize) {
    let group = &tile.queries[first / GROUP * GROUP * tile.dim..][..GROUP * tile.dim];
    let mut sums = [[0.0_f32; BLOCK_TOKENS]; TOGETHER];
    for (elements, keys) in group.chunks_exact(GROUP).zip(tile.keys.chunks_exact(BLOCK_TOKENS)) {
        let elements = &elements[first % GROUP..][..TOGETHER];
        for (sums, &element) in sums.iter_mut().zip(elements) {
            for (sum, &key) in sums.iter_mut().zip(keys) {
                *sum = multiply_add::<FUSED>(element, key, *sum);
            }
        }
    }
    tile.weights[first * BLOCK_TOKENS..][..TOGETHER * BLOCK_TOKENS]
        .copy_from_slice(sums.as_flattened());
}

/// Turns one query's scores into weights and updates its maximum and sum.
#[inline(always)]
fn softmax(tile: &mut TileMemory, query: usize) {
    let weights: &mut [f32; BLOCK_TOKENS] =
        (&mut tile.weights[query * BLOCK_TOKENS..][..BLOCK_TOKENS]).try_into().expect("16 tokens");
    let SeenTokens { begin, end } = tile.seen[query];
    weights[..begin].fill(f32::NEG_INFINITY);
    weights[end..].fill(f32::NEG_INFINITY);
    let before = tile.maxima[query];
    let maximum = weights.iter().fold(before, |a, &b| a.max(b));
    for weight in weights.iter_mut() {
        *weight = exp(*weight - maximum);
    }
    // Usually the maximum does not change, and exp(0) is 1.
    let correction = if maximum == before { 1.0 } else { exp(before - maximum) };
    tile.maxima[query] = maximum;
    tile.corrections[query] = correction;
    tile.sums[query] = tile.sums[query] * correction + sum_lanes(*weights);
}

/// Adds the weighted visible values of the block.
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
