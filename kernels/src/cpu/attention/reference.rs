//! Reference implementation of attention: one query head of one row at a time, in scalar code. It
//! defines the order of the floating-point operations.

use std::ops::Range;

use half::bf16;

use super::{AttentionCall, HeadPlace, KvElement, StoredKv};
use crate::{
    cpu::arithmetic::{exp, sum_lanes},
    layout::{BLOCK_TOKENS, KvFormat, KvHalf},
};

/// Computes attention of every row of `qkv` (`[rows][qkv_width]`) into `out`
/// (`[rows][query_width]`).
pub(super) fn attention(call: AttentionCall<'_>, out: &mut [f32]) {
    match call.step.layout().format {
        KvFormat::F32 => all_queries::<f32>(call, out),
        KvFormat::Bf16 => all_queries::<bf16>(call, out),
        KvFormat::Fp8 => all_queries::<u8>(call, out),
    }
}

fn all_queries<T: StoredKv>(call: AttentionCall<'_>, out: &mut [f32]) {
    let AttentionCall { layer, shape, scale, window, sinks, qkv, step } = call;
    let dim = shape.head_dim;
    let converted_elements = T::converted_elements(BLOCK_TOKENS * dim);
    let mut converted = vec![bf16::ZERO; 2 * converted_elements];
    for sequence in &step.sequences {
        for row in sequence.rows.clone() {
            let end = step.positions[row] as usize + 1;
            let begin = end.saturating_sub(window);
            for head in 0..shape.query_heads {
                let query = &qkv[row * shape.qkv_width() + head * dim..][..dim];
                let kv_head = head / (shape.query_heads / shape.kv_heads);
                let mut state = Softmax::new(dim, sinks.map(|sinks| sinks[head]));
                let (table, layer) = step.table(layer, sequence);
                for (index, &block) in table.iter().enumerate() {
                    let offset_in_block =
                        |token: usize| token.saturating_sub(index * BLOCK_TOKENS).min(BLOCK_TOKENS);
                    let tokens = offset_in_block(begin)..offset_in_block(end);
                    if tokens.is_empty() {
                        continue;
                    }
                    let place = HeadPlace { block, layer, head: kv_head };
                    let (keys, values) = converted.split_at_mut(converted_elements);
                    let keys = T::read(&step.access, place, KvHalf::Key, keys);
                    let values = T::read(&step.access, place, KvHalf::Value, values);
                    state.add_block(query, scale, tokens, keys, values);
                }
                let out = &mut out[row * shape.query_width() + head * dim..][..dim];
                state.finish(out);
            }
        }
    }
}

/// Running softmax of a query over the keys seen so far.
struct Softmax {
    /// Greatest score.
    maximum: f32,
    /// Sum of the weights, exp(score - maximum).
    sum: f32,
    /// Sum of the values, each multiplied by its weight.
    weighted_sum: Vec<f32>,
}

impl Softmax {
    /// Creates the softmax of a query that has seen its sink only, if there is one.
    fn new(dim: usize, sink: Option<f32>) -> Self {
        let (maximum, sum) = sink.map_or((f32::NEG_INFINITY, 0.0), |sink| (sink, 1.0));
        Self { maximum, sum, weighted_sum: vec![0.0; dim] }
    }

    /// Adds some tokens of a block. A score is accumulated over the dimensions in order, and the
    /// weighted sum over the tokens in order. Each step is one fused multiply-add.
    fn add_block<T: KvElement>(
        &mut self,
        query: &[f32],
        scale: f32,
        tokens: Range<usize>,
        keys: &[T],
        values: &[T],
    ) {
        let dim = query.len();
        let mut scores = [f32::NEG_INFINITY; BLOCK_TOKENS];
        for token in tokens.clone() {
            scores[token] = (0..dim)
                .fold(0.0, |sum, d| (query[d] * scale).mul_add(keys[token * dim + d].widen(), sum));
        }
        let maximum = scores.iter().fold(self.maximum, |a, &b| a.max(b));
        let correction = exp(self.maximum - maximum);
        let weights = scores.map(|score| exp(score - maximum));
        self.maximum = maximum;
        self.sum = self.sum * correction + sum_lanes(weights);
        for d in 0..dim {
            let mut weighted_sum = self.weighted_sum[d] * correction;
            for token in tokens.clone() {
                weighted_sum =
                    weights[token].mul_add(values[token * dim + d].widen(), weighted_sum);
            }
            self.weighted_sum[d] = weighted_sum;
        }
    }

    /// Writes the attention of the query to `out`.
    fn finish(&self, out: &mut [f32]) {
        for (out, weighted_sum) in out.iter_mut().zip(&self.weighted_sum) {
            *out = weighted_sum / self.sum;
        }
    }
}
