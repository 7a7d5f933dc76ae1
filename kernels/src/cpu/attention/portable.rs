//! A tile's work on one block in plain Rust, which the compiler turns into the level's vectors.

use super::{
    Kv,
    tile::{GROUP, TileMemory},
};
use crate::{
    cpu::arithmetic::{exp, multiply_add, sum_lanes},
    layout::BLOCK_TOKENS,
};

/// Queries whose sums are in registers together.
const TOGETHER: usize = 4;

/// `keys` and `values` are `[token][dim]`.
#[inline(always)]
pub(super) fn add_block<T: Kv, const FUSED: bool>(tile: &mut TileMemory, keys: &[T], values: &[T]) {
    let dim = tile.dim;
    for (token, key) in keys.chunks_exact(dim).enumerate() {
        for (column, &element) in tile.keys.chunks_exact_mut(BLOCK_TOKENS).zip(key) {
            column[token] = element.widen();
        }
    }
    for (to, &value) in tile.values.iter_mut().zip(values) {
        *to = value.widen();
    }
    for first in (0..tile.query_count).step_by(TOGETHER) {
        let last = tile.query_count.min(first + TOGETHER) - 1;
        if tile.visible[last] > 0 {
            scores::<FUSED>(tile, first);
        }
    }
    for query in 0..tile.query_count {
        if tile.visible[query] > 0 {
            softmax(tile, query);
            accumulate::<FUSED>(tile, query);
        }
    }
}

/// Scores of four queries with all 16 keys; those with keys that are not visible mean nothing.
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

/// Turns one query's scores into weights and takes them into its maximum and sum.
#[inline(always)]
fn softmax(tile: &mut TileMemory, query: usize) {
    let weights: &mut [f32; BLOCK_TOKENS] =
        (&mut tile.weights[query * BLOCK_TOKENS..][..BLOCK_TOKENS]).try_into().expect("16 tokens");
    weights[tile.visible[query]..].fill(f32::NEG_INFINITY);
    let before = tile.maxima[query];
    let maximum = weights.iter().fold(before, |a, &b| a.max(b));
    for weight in weights.iter_mut() {
        *weight = exp(*weight - maximum);
    }
    let correction = exp(before - maximum);
    tile.maxima[query] = maximum;
    tile.corrections[query] = correction;
    tile.sums[query] = tile.sums[query] * correction + sum_lanes(*weights);
}

/// Adds the visible values of the block, weighted.
#[inline(always)]
fn accumulate<const FUSED: bool>(tile: &mut TileMemory, query: usize) {
    let weighted = &mut tile.weighted[query * tile.dim..][..tile.dim];
    for weighted in weighted.iter_mut() {
        *weighted *= tile.corrections[query];
    }
    let weights = &tile.weights[query * BLOCK_TOKENS..][..tile.visible[query]];
    for (&weight, values) in weights.iter().zip(tile.values.chunks_exact(tile.dim)) {
        for (weighted, &value) in weighted.iter_mut().zip(values) {
            *weighted = multiply_add::<FUSED>(weight, value, *weighted);
        }
    }
}
