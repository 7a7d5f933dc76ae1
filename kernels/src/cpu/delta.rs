//! Linear attention with a recurrent state: Gated DeltaNet.
//!
//! A task computes the rows of one sequence for one key head and its value heads. The task
//! gathers their part of the recurrent state, runs the rows in order, a tile of rows at a time,
//! and scatters the state. All arithmetic is in f32, without fused multiply-add, and every sum
//! has one order. So results are bit-equal at all levels, and do not depend on chunks of a prompt
//! or on threads.

use std::sync::{Mutex, PoisonError};

use super::{
    arithmetic::{exp, sigmoid, silu},
    buffer::CpuVector,
    disjoint_slice::DisjointSlice,
    isa::{Level, per_level},
    norm::{scale, sum_of_squares},
    step::{CpuStep, SequenceRows},
    threads::ThreadPool,
};
use crate::{
    backend::GatedDelta,
    layout::{LaneHead, StatePlaces},
};

/// Rows that go through the convolution before their recurrence.
const TILE_ROWS: usize = 64;
/// Columns of a state that are updated together. This part of a state of 128 keys stays in the L1
/// cache.
const STRIP: usize = 64;
/// Added to the square of an L2 norm.
const L2_EPS: f32 = 1e-6;

/// Memory of one thread: the states of the value heads of a task, `[value head][strip][key_dim]`.
pub(crate) type DeltaScratch = Vec<[f32; STRIP]>;

/// Operands of a layer.
pub(crate) struct DeltaInput<'a> {
    pub delta: GatedDelta<'a, CpuVector>,
    /// `[rows][projected_width]`.
    pub projected: &'a [f32],
    /// `[rows][2 · value_heads]`.
    pub rates: &'a [f32],
}

/// Computes [`Backend::gated_delta`](crate::Backend::gated_delta). There is a scratch for each
/// thread.
pub(crate) fn gated_delta(
    level: Level,
    pool: &mut ThreadPool,
    scratch: &[Mutex<DeltaScratch>],
    input: &DeltaInput<'_>,
    step: &CpuStep,
    out: &mut [f32],
) {
    let out = DisjointSlice::new(out);
    let key_heads = input.delta.shape.key_heads;
    pool.run(step.sequences.len() * key_heads, &|thread, number| {
        let sequence = &step.sequences[number / key_heads];
        let mut states = scratch[thread].lock().unwrap_or_else(PoisonError::into_inner);
        let mut task = Task::new(input, step, sequence, number % key_heads);
        task.load(&mut states);
        for first in sequence.rows.clone().step_by(TILE_ROWS) {
            let rows = TILE_ROWS.min(sequence.rows.end - first);
            task.run_tile(level, first, rows, &mut states, &out);
        }
        task.store(&mut states);
    });
}

/// Rows of one sequence for one key head and its value heads.
struct Task<'a> {
    input: &'a DeltaInput<'a>,
    places: StatePlaces,
    rows: StateRows<'a>,
    /// The first value head.
    first_value: usize,
    queries: ConvHead,
    keys: ConvHead,
    values: Vec<ConvHead>,
}

/// The rows of a sequence's recurrent state that belong to the heads of a task.
struct StateRows<'a> {
    step: &'a CpuStep,
    sequence: &'a SequenceRows,
    lane: usize,
}

impl StateRows<'_> {
    /// Returns `len` elements of a row of the lane.
    fn get(&mut self, row: usize, len: usize) -> &mut [f32] {
        // SAFETY: a row belongs to one head, and one task has this head of this sequence. The
        // borrow of `self` ends before the task gets another row.
        unsafe { self.step.state_row(self.sequence, (self.lane, row), len) }
    }
}

/// A head of queries, keys or values, which go through the convolution.
struct ConvHead {
    /// The head in its lane.
    head: LaneHead,
    /// First column in a row of projections, and first channel of the convolution.
    column: usize,
    dim: usize,
    /// `[conv_taps + 1][dim]`.
    kernel: Vec<f32>,
    /// Past inputs, then those of the tile: `[conv_taps + rows][dim]`.
    inputs: Vec<f32>,
    /// Outputs of the tile `[rows][dim]`.
    outputs: Vec<f32>,
}

impl ConvHead {
    fn new(input: &DeltaInput<'_>, head: LaneHead, column: usize, dim: usize) -> Self {
        let size = input.delta.shape.conv_taps + 1;
        let channels = &input.delta.conv.values()[column * size..(column + dim) * size];
        let taps = (0..size).flat_map(|tap| channels.iter().skip(tap).step_by(size));
        let kernel = taps.copied().collect();
        Self { head, column, dim, kernel, inputs: Vec::new(), outputs: Vec::new() }
    }

    /// Returns the number of elements of the past inputs.
    fn kept(&self) -> usize {
        self.kernel.len() - self.dim
    }

    /// Computes the outputs of `rows` rows from `first` on.
    fn run_tile(&mut self, level: Level, input: &DeltaInput<'_>, first: usize, rows: usize) {
        let width = input.delta.shape.projected_width();
        self.inputs.drain(..self.inputs.len() - self.kept());
        for row in first..first + rows {
            self.inputs
                .extend_from_slice(&input.projected[row * width + self.column..][..self.dim]);
        }
        self.outputs.clear();
        self.outputs.resize(rows * self.dim, 0.0);
        convolve(level, &self.kernel, &self.inputs, self.dim, &mut self.outputs);
    }
}

impl<'a> Task<'a> {
    fn new(
        input: &'a DeltaInput<'a>,
        step: &'a CpuStep,
        sequence: &'a SequenceRows,
        key_head: usize,
    ) -> Self {
        let shape = input.delta.shape;
        let places = step.state_places();
        let lane = places.lane;
        let (key, key_dim, value_dim) = (key_head % lane.key_heads, shape.key_dim, shape.value_dim);
        let of_key = |head: LaneHead, first: usize| {
            ConvHead::new(input, head, first + key_head * key_dim, key_dim)
        };
        let of_value = |head: usize| {
            let column = 2 * shape.key_width() + head * value_dim;
            ConvHead::new(input, LaneHead::Value(head % lane.value_heads), column, value_dim)
        };
        let ratio = shape.value_heads / shape.key_heads;
        Self {
            input,
            places,
            rows: StateRows { step, sequence, lane: key_head / lane.key_heads },
            first_value: key_head * ratio,
            queries: of_key(LaneHead::Query(key), 0),
            keys: of_key(LaneHead::Key(key), shape.key_width()),
            values: (key_head * ratio..(key_head + 1) * ratio).map(of_value).collect(),
        }
    }

    /// Gathers states and past inputs; zeros at the start of a sequence.
    fn load(&mut self, states: &mut DeltaScratch) {
        let DeltaInput { delta: GatedDelta { layer, shape, .. }, .. } = *self.input;
        let strips = shape.value_dim.div_ceil(STRIP);
        states.clear();
        states.resize(self.values.len() * strips * shape.key_dim, [0.0; STRIP]);
        let is_start = self.rows.sequence.first_position == 0;
        let Self { places, rows, queries, keys, values, .. } = self;
        for conv in [queries, keys].into_iter().chain(values) {
            conv.inputs.resize(conv.kept(), 0.0);
            if !is_start {
                let past = conv.inputs.chunks_exact_mut(conv.dim);
                for (row, past) in places.conv_rows(layer, conv.head).zip(past) {
                    past.copy_from_slice(rows.get(row, conv.dim));
                }
            }
        }
        if !is_start {
            self.each_strip(states, |strip, stored| strip.copy_from_slice(stored));
        }
    }

    /// Scatters states and past inputs.
    fn store(&mut self, states: &mut DeltaScratch) {
        self.each_strip(states, |strip, stored| stored.copy_from_slice(strip));
        let (layer, Self { places, rows, queries, keys, values, .. }) =
            (self.input.delta.layer, self);
        for conv in [queries, keys].into_iter().chain(values) {
            let past = conv.inputs[conv.inputs.len() - conv.kept()..].chunks_exact(conv.dim);
            for (row, past) in places.conv_rows(layer, conv.head).zip(past) {
                rows.get(row, conv.dim).copy_from_slice(past);
            }
        }
    }

    /// Calls `copy` with the elements of a row of a strip, and with the same elements of the
    /// recurrent state.
    fn each_strip(&mut self, states: &mut DeltaScratch, copy: impl Fn(&mut [f32], &mut [f32])) {
        let DeltaInput { delta: GatedDelta { layer, shape, .. }, .. } = *self.input;
        let strips = shape.value_dim.div_ceil(STRIP);
        let heads = self.first_value % self.places.lane.value_heads..;
        for (head, states) in heads.zip(states.chunks_exact_mut(strips * shape.key_dim)) {
            for (key, row) in self.places.state_rows(layer, head).enumerate() {
                let strips = states.iter_mut().skip(key).step_by(shape.key_dim);
                let stored = self.rows.get(row, shape.value_dim).chunks_mut(STRIP);
                strips.zip(stored).for_each(|(strip, it)| copy(&mut strip[..it.len()], it));
            }
        }
    }

    /// Computes `rows` rows from `first` on.
    fn run_tile(
        &mut self,
        level: Level,
        first: usize,
        rows: usize,
        states: &mut DeltaScratch,
        out: &DisjointSlice<'_, f32>,
    ) {
        let Self { input, queries, keys, values, first_value, .. } = self;
        let shape = input.delta.shape;
        queries.run_tile(level, input, first, rows);
        keys.run_tile(level, input, first, rows);
        let root = (shape.key_dim as f32).sqrt();
        normalize(level, shape.key_dim, 1.0 / root, &mut queries.outputs);
        normalize(level, shape.key_dim, 1.0, &mut keys.outputs);
        let strips = shape.value_dim.div_ceil(STRIP);
        let states = states.chunks_exact_mut(strips * shape.key_dim);
        for ((head, conv), states) in (*first_value..).zip(values).zip(states) {
            conv.run_tile(level, input, first, rows);
            let rates: Vec<[f32; 2]> =
                (first..first + rows).map(|row| input.rates(head, row)).collect();
            let of_strips = states.chunks_exact_mut(shape.key_dim);
            for (state, column) in of_strips.zip((0..shape.value_dim).step_by(STRIP)) {
                let columns = column..shape.value_dim.min(column + STRIP);
                let mut strip = vec![[0.0; STRIP]; rows];
                let of_rows = conv.outputs.chunks_exact_mut(shape.value_dim);
                for (to, from) in strip.iter_mut().zip(of_rows) {
                    to[..columns.len()].copy_from_slice(&from[columns.clone()]);
                }
                recur(level, state, (&keys.outputs, &queries.outputs), &rates, &mut strip);
                let of_rows = conv.outputs.chunks_exact_mut(shape.value_dim);
                for (from, to) in strip.iter().zip(of_rows) {
                    to[columns.clone()].copy_from_slice(&from[..columns.len()]);
                }
            }
            for (row, attended) in (first..).zip(conv.outputs.chunks_exact(shape.value_dim)) {
                let column = head * shape.value_dim;
                let begin =
                    row * shape.projected_width() + 2 * shape.key_width() + shape.value_width();
                let gate = &input.projected[begin + column..][..shape.value_dim];
                // SAFETY: one task has this value head of the rows of its sequence.
                let out = unsafe { out.slice(row * shape.value_width() + column, shape.value_dim) };
                let norm = (input.delta.norm.values(), input.delta.eps);
                gated_norm(level, attended, norm, gate, out);
            }
        }
    }
}

impl DeltaInput<'_> {
    /// Returns the decay and the update rate of a row of a value head.
    fn rates(&self, head: usize, row: usize) -> [f32; 2] {
        let heads = self.delta.shape.value_heads;
        let (b, a) =
            (self.rates[(2 * row) * heads + head], self.rates[(2 * row + 1) * heads + head]);
        let rate = f64::from(self.delta.decay_log.values()[head]).exp() as f32;
        let time = softplus(a + self.delta.time_bias.values()[head]);
        [exp(-rate * time), sigmoid(b)]
    }
}

/// Returns `ln(1 + e^x)`, computed in f64, so that the result does not depend on the system's f32
/// library. Above 20 this is `x`, as in PyTorch.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { f64::from(x).exp().ln_1p() as f32 }
}

per_level! {
    /// Computes the convolution and `silu`. `inputs` begins before the first row of `out`.
    fn convolve(kernel: &[f32], inputs: &[f32], dim: usize, out: &mut [f32]) {
        for (row, out) in out.chunks_exact_mut(dim).enumerate() {
            let inputs = inputs[row * dim..].chunks_exact(dim);
            for (weights, inputs) in kernel.chunks_exact(dim).zip(inputs) {
                for ((out, &weight), &input) in out.iter_mut().zip(weights).zip(inputs) {
                    *out += weight * input;
                }
            }
            for out in out {
                *out = silu(*out);
            }
        }
    }
}

per_level! {
    /// Divides each row by its L2 norm, and multiplies it with `factor`.
    fn normalize(dim: usize, factor: f32, x: &mut [f32]) {
        for x in x.chunks_exact_mut(dim) {
            let scale = factor / (sum_of_squares(x) + L2_EPS).sqrt();
            x.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

per_level! {
    /// Runs the recurrence of a strip of columns. `state` is `[key_dim]`, `rates` are the decay and
    /// the update rate of each row. `strip` has the values of each row, which are replaced by
    /// `q · S`.
    fn recur(
        state: &mut [[f32; STRIP]],
        keys_and_queries: (&[f32], &[f32]),
        rates: &[[f32; 2]],
        strip: &mut [[f32; STRIP]],
    ) {
        let dim = state.len();
        let (keys, queries) = keys_and_queries;
        let rows = keys.chunks_exact(dim).zip(queries.chunks_exact(dim)).zip(rates).zip(strip);
        for (((keys, queries), &[decay, rate]), values) in rows {
            let mut known = [0.0; STRIP];
            for (state, &key) in state.iter_mut().zip(keys) {
                for (known, state) in known.iter_mut().zip(state) {
                    *state *= decay;
                    *known += *state * key;
                }
            }
            let mut update = [0.0; STRIP];
            for ((update, known), value) in update.iter_mut().zip(known).zip(&*values) {
                *update = (value - known) * rate;
            }
            let mut attended = [0.0; STRIP];
            for ((state, &key), &query) in state.iter_mut().zip(keys).zip(queries) {
                for ((attended, update), state) in attended.iter_mut().zip(&update).zip(state) {
                    *state += key * update;
                    *attended += *state * query;
                }
            }
            *values = attended;
        }
    }
}

per_level! {
    /// Computes `rms_norm(x) · weight · silu(gate)`.
    fn gated_norm(x: &[f32], norm: (&[f32], f32), gate: &[f32], out: &mut [f32]) {
        let (weight, eps) = norm;
        let scale = scale(x, eps);
        for (((out, &x), &weight), &gate) in out.iter_mut().zip(x).zip(weight).zip(gate) {
            *out = x * scale * weight * silu(gate);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{ops::Range, sync::Arc};

    use super::*;
    use crate::{
        arena::KvArena,
        cpu::{
            StepSequence,
            testing::{bits, levels, numbers},
        },
        layout::{BlockId, KvFormat, KvGroups, KvLayout, StateShape},
    };

    const EPS: f32 = 1e-6;

    /// Layer, weights, and operands of a sequence.
    struct Case {
        layer: usize,
        shape: StateShape,
        conv: CpuVector,
        decay_log: CpuVector,
        time_bias: CpuVector,
        norm: CpuVector,
        projected: Vec<f32>,
        rates: Vec<f32>,
    }

    impl Case {
        fn new(shape: StateShape, layer: usize, rows: usize) -> Self {
            let vector = |seed, len| CpuVector::new(&numbers(seed, len));
            let channels = 2 * shape.key_width() + shape.value_width();
            Self {
                layer,
                shape,
                conv: vector(1, channels * (shape.conv_taps + 1)),
                decay_log: vector(2, shape.value_heads),
                time_bias: vector(3, shape.value_heads),
                norm: vector(4, shape.value_dim),
                projected: numbers(5, rows * shape.projected_width()),
                rates: numbers(6, rows * 2 * shape.value_heads).iter().map(|x| 3.0 * x).collect(),
            }
        }

        fn input(&self, rows: Range<usize>) -> DeltaInput<'_> {
            let part =
                |all: &'_ [f32], width: usize| rows.start * width..all.len().min(rows.end * width);
            let projected = part(&self.projected, self.shape.projected_width());
            let rates = part(&self.rates, 2 * self.shape.value_heads);
            DeltaInput {
                delta: GatedDelta {
                    layer: self.layer,
                    shape: self.shape,
                    conv: &self.conv,
                    decay_log: &self.decay_log,
                    time_bias: &self.time_bias,
                    norm: &self.norm,
                    eps: EPS,
                },
                projected: &self.projected[projected],
                rates: &self.rates[rates],
            }
        }

        /// Computes the definition in f64, from zeros on.
        fn defined(&self) -> Vec<f64> {
            let StateShape { key_heads, value_heads, key_dim, value_dim, conv_taps, .. } =
                self.shape;
            let (width, keys) = (self.shape.projected_width(), self.shape.key_width());
            let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
            let projected =
                |row: usize, column: usize| f64::from(self.projected[row * width + column]);
            let convolved = |row: usize, channel: usize| {
                let taps = (0..=conv_taps).filter(|tap| row + tap >= conv_taps);
                let weight = |tap| f64::from(self.conv.values()[channel * (conv_taps + 1) + tap]);
                let sum: f64 =
                    taps.map(|tap| weight(tap) * projected(row + tap - conv_taps, channel)).sum();
                sum * sigmoid(sum)
            };
            let normed = |row: usize, first: usize| -> Vec<f64> {
                let x: Vec<f64> = (first..first + key_dim).map(|it| convolved(row, it)).collect();
                let square: f64 = x.iter().map(|x| x * x).sum();
                x.iter().map(|x| x / (square + f64::from(L2_EPS)).sqrt()).collect()
            };
            let rows = self.projected.len() / width;
            let mut out = vec![0.0; rows * value_heads * value_dim];
            for head in 0..value_heads {
                let key_head = head * key_heads / value_heads;
                let mut state = vec![vec![0.0; value_dim]; key_dim];
                for row in 0..rows {
                    let query = normed(row, key_head * key_dim);
                    let key = normed(row, keys + key_head * key_dim);
                    let rate =
                        |column: usize| f64::from(self.rates[2 * row * value_heads + column]);
                    let bias = f64::from(self.time_bias.values()[head]);
                    let time = (1.0 + (rate(value_heads + head) + bias).exp()).ln();
                    let decay = (-f64::from(self.decay_log.values()[head]).exp() * time).exp();
                    let mut attended = vec![0.0; value_dim];
                    for (column, attended) in attended.iter_mut().enumerate() {
                        let value = convolved(row, 2 * keys + head * value_dim + column);
                        state.iter_mut().for_each(|state| state[column] *= decay);
                        let known: f64 = state.iter().zip(&key).map(|(s, k)| s[column] * k).sum();
                        let update = (value - known) * sigmoid(rate(head));
                        state.iter_mut().zip(&key).for_each(|(s, k)| s[column] += k * update);
                        let sum: f64 = state.iter().zip(&query).map(|(s, q)| s[column] * q).sum();
                        *attended = sum / (key_dim as f64).sqrt();
                    }
                    let square = attended.iter().map(|x| x * x).sum::<f64>() / value_dim as f64;
                    for (column, attended) in attended.iter().enumerate() {
                        let gates = 2 * keys + value_heads * value_dim;
                        let gate = projected(row, gates + head * value_dim + column);
                        let normed = attended / (square + f64::from(EPS)).sqrt();
                        out[(row * value_heads + head) * value_dim + column] =
                            normed * f64::from(self.norm.values()[column]) * gate * sigmoid(gate);
                    }
                }
            }
            out
        }
    }

    /// Runs rows of a sequence whose state is in these blocks.
    fn run(
        case: &Case,
        (level, threads): (Level, usize),
        (arena, groups, state): (&Arc<KvArena>, &KvGroups, &[BlockId]),
        rows: Range<usize>,
    ) -> Vec<f32> {
        let mut pool = ThreadPool::new(threads, "test").unwrap();
        let scratch: Vec<_> = (0..threads).map(|_| Mutex::default()).collect();
        let kv = (0..rows.end.div_ceil(16) as u32).map(BlockId);
        let table: Vec<BlockId> = state.iter().copied().chain(kv).collect();
        let sequence = StepSequence {
            first_position: rows.start as u32,
            tokens: &vec![0; rows.len()],
            blocks: &table,
            sampled_rows: 0,
            adapter: None,
        };
        let heads = 0..arena.layout().kv_head_count;
        let step = CpuStep::of_heads(arena, heads, groups, &[sequence]).unwrap();
        let mut out = vec![f32::NAN; rows.len() * case.shape.value_width()];
        gated_delta(level, &mut pool, &scratch, &case.input(rows), &step, &mut out);
        out
    }

    #[test]
    fn any_shape_and_chunk_agrees_with_the_definition() {
        let odd = StateShape {
            layer_count: 3,
            key_heads: 2,
            value_heads: 6,
            key_dim: 6,
            value_dim: 5,
            conv_taps: 3,
        };
        let wide = StateShape { layer_count: 2, value_heads: 2, key_dim: 8, value_dim: 70, ..odd };
        let untapped = StateShape { layer_count: 1, conv_taps: 0, ..odd };
        for (shape, head_dim, format) in [
            (odd, 10, KvFormat::F32),
            (odd, 12, KvFormat::Bf16),
            (odd, 8, KvFormat::Fp8),
            (wide, 18, KvFormat::F32),
            (untapped, 6, KvFormat::F32),
        ] {
            let layout = KvLayout { layer_count: 2, kv_head_count: 2, head_dim, format };
            let groups = KvGroups::whole(2).with_state(Some(shape), layout);
            let count = shape.block_count(layout) as u32;
            let arena = KvArena::host(layout, 8 + 2 * count).unwrap();
            // Every second block, the last first. They hold NaN before.
            let state: Vec<_> = (0..count).rev().map(|index| BlockId(8 + 2 * index)).collect();
            let case = Case::new(shape, shape.layer_count - 1, 70);
            let expected = case.defined();
            for block in &state {
                let nan = vec![0xff; layout.block_bytes()];
                arena.write(*block).unwrap().copy_from_host(&nan).unwrap();
            }
            let whole = run(&case, (Level::Reference, 1), (&arena, &groups, &state), 0..70);
            for (index, (found, expected)) in whole.iter().zip(&expected).enumerate() {
                let difference = (f64::from(*found) - expected).abs();
                assert!(difference < 1e-4, "{shape}, {index}: {found} for {expected}");
            }
            for (level, threads) in levels().into_iter().zip([1, 2, 3].into_iter().cycle()) {
                for chunk in [1, 3, 64, 70] {
                    let chunks = (0..70).step_by(chunk).map(|first| first..70.min(first + chunk));
                    let blocks = (&arena, &groups, state.as_slice());
                    let found: Vec<_> = chunks
                        .flat_map(|rows| run(&case, (level, threads), blocks, rows))
                        .collect();
                    assert_eq!(bits(&found), bits(&whole), "{shape}, chunks of {chunk}");
                }
            }
        }
    }
}
