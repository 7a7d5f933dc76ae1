//! Predicts how long clients wait when a prompt is prefilled on a prefill node or on the decode node. Pure.
//!
//! A node fits the time of its steps ([`StepFit`]) and reports the result with its load ([`StepCosts`]):
//!
//! ```text
//! decode step  = step + row * rows + context * KV tokens
//! prefill step = step' + token * prompt tokens + pair * attention pairs + row * rows + context * KV tokens,
//!                at least the decode step: every step reads all weights
//! ```
//!
//! A router predicts each option from the reports of its nodes ([`hand_over`], [`local`]):
//!
//! ```text
//! time to first token = time of the queued prompts (on a decode node at least of the decode steps in flight)
//!        + the prompt's own steps + wait for free blocks
//! gap      = transfer time that prefill steps do not overlap (hand-over only)
//! slowdown = decoding rows * time by which the prompt lengthens their steps (decode node prefills only)
//! decode   = the first 32 tokens of the answer
//!            + running and waiting rows * time by which the new row lengthens their steps
//! evict    = prefill time of one token per block that the decode node lacks, because it may evict a cached prefix
//! cost     = time to first token + gap + slowdown + decode + evict
//! ```
//!
//! A decode step counts as one token per row, although draft tokens may be accepted: they help every option equally.
//!
//! All terms are milliseconds that one client waits. A stalled stream and a waiting request are equally slow for their
//! clients, so the cost is the sum over all clients.

use std::time::Duration;

use proto::v1;
use serde::{Deserialize, Serialize};

/// Number of output tokens that a cost includes. Later tokens cost about the same in all options.
const DECODE_STEPS: u32 = 32;
/// Steps with fewer prompt tokens are not fitted: loading the weights dominates their time.
const PREFILL_TOKENS_MIN: f64 = 32.0;
/// Decode steps that a prompt on a decode node waits for. With two steps in flight, these are half of the running step
/// and the next step.
const STEPS_IN_FLIGHT: f64 = 1.5;
/// Minimum prompt tokens of a step in which sequences decode: one block.
const BLOCK_TOKENS: f64 = 16.0;
/// Steps that a fit needs before the node reports it.
const PREFILL_STEPS_MIN: u32 = 4;
const DECODE_STEPS_MIN: u32 = 8;
/// Weight of each new step in a fit. A fit covers about the last 128 prefill and 1,024 decode steps.
const PREFILL_FORGET: f64 = 1.0 / 128.0;
const DECODE_FORGET: f64 = 1.0 / 1024.0;
/// Relative ridge penalty of each coefficient. If inputs never vary, the fit attributes the time to the input with the
/// smallest penalty: prompt tokens for prefill, the step itself for decode.
const PREFILL_RIDGE: [f64; 3] = [1e-3, 1e-5, 1e-3];
const DECODE_RIDGE: [f64; 3] = [1e-5, 1e-3, 1e-3];
/// Picoseconds per millisecond.
const PICOSECONDS: f64 = 1e9;

/// Work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    pub prefill_tokens: f64,
    /// Token pairs of prefill attention: for each prefilled token, the tokens up to it.
    pub prefill_pairs: f64,
    pub decode_rows: f64,
    /// KV tokens that the decode rows attend to.
    pub context_tokens: f64,
}

/// Returns the attention pairs of `tokens` tokens that follow `computed` tokens.
pub fn attention_pairs(computed: f64, tokens: f64) -> f64 {
    tokens * (computed + tokens / 2.0)
}

/// Exponentially weighted least squares of relative errors, with coefficients of at least 0. A relative error bounds
/// the influence of a step that was interrupted.
#[derive(Clone, Debug)]
struct Fit {
    forget: f64,
    ridge: [f64; 3],
    /// Sums of `x x'` and `x`, with `x` the inputs of a step divided by its time.
    products: [[f64; 3]; 3],
    sums: [f64; 3],
    steps: u32,
    coefficients: [f64; 3],
}

impl Fit {
    fn new(forget: f64, ridge: [f64; 3]) -> Self {
        let (products, sums, coefficients) = ([[0.0; 3]; 3], [0.0; 3], [0.0; 3]);
        Self { forget, ridge, products, sums, steps: 0, coefficients }
    }

    fn add(&mut self, inputs: [f64; 3], time: f64) {
        let x = inputs.map(|input| input / time);
        for row in 0..3 {
            for column in 0..3 {
                let product = &mut self.products[row][column];
                *product += x[row] * x[column] - self.forget * *product;
            }
            self.sums[row] += x[row] - self.forget * self.sums[row];
        }
        self.steps = self.steps.saturating_add(1);
        self.coefficients = self.solve();
    }

    /// Drops the most negative coefficient until none is negative.
    fn solve(&self) -> [f64; 3] {
        let mut used = [0, 1, 2].map(|index| self.products[index][index] > 0.0);
        loop {
            let solution = self.solve_for(used);
            let lowest = (0..3).min_by(|a, b| solution[*a].total_cmp(&solution[*b]));
            match lowest {
                Some(index) if solution[index] < 0.0 => used[index] = false,
                _ => return solution,
            }
        }
    }

    /// Solves the normal equations for the used inputs, scaled to a diagonal of 1, by Cholesky decomposition.
    fn solve_for(&self, used: [bool; 3]) -> [f64; 3] {
        let scale = |index: usize| match used[index] {
            true => self.products[index][index].sqrt().recip(),
            false => 0.0,
        };
        let mut lower = [[0.0; 3]; 3];
        let mut solution = [0.0; 3];
        for row in 0..3 {
            for column in 0..=row {
                let scaled = self.products[row][column] * scale(row) * scale(column);
                let entry = if row == column { 1.0 + self.ridge[row] } else { scaled };
                let inner: f64 = (0..column).map(|k| lower[row][k] * lower[column][k]).sum();
                lower[row][column] = match row == column {
                    true => (entry - inner).max(self.ridge[row] / 2.0).sqrt(),
                    false => (entry - inner) / lower[column][column],
                };
            }
            let inner: f64 = (0..row).map(|k| lower[row][k] * solution[k]).sum();
            solution[row] = (self.sums[row] * scale(row) - inner) / lower[row][row];
        }
        for row in (0..3).rev() {
            let inner: f64 = (row + 1..3).map(|k| lower[k][row] * solution[k]).sum();
            solution[row] = (solution[row] - inner) / lower[row][row];
        }
        [0, 1, 2].map(|index| solution[index] * scale(index))
    }
}

/// A node's fit of its step times.
#[derive(Clone, Debug)]
pub struct StepFit {
    prefill: Fit,
    decode: Fit,
}

impl Default for StepFit {
    fn default() -> Self {
        Self {
            prefill: Fit::new(PREFILL_FORGET, PREFILL_RIDGE),
            decode: Fit::new(DECODE_FORGET, DECODE_RIDGE),
        }
    }
}

impl StepFit {
    /// Adds a finished step.
    pub fn add(&mut self, work: &Work, time: Duration) {
        let time_ms = time.as_secs_f64() * 1e3;
        if time_ms <= 0.0 {
            return;
        }
        if work.prefill_tokens == 0.0 {
            return self.decode.add([1.0, work.decode_rows, work.context_tokens], time_ms);
        }
        if work.prefill_tokens >= PREFILL_TOKENS_MIN {
            let [_, row, context] = self.decode.coefficients;
            let rows_ms = row * work.decode_rows + context * work.context_tokens;
            // A fit of other batches may attribute the whole step time to the decode rows.
            let prefill_ms = (time_ms - rows_ms).max(time_ms / 10.0);
            self.prefill.add([1.0, work.prefill_tokens, work.prefill_pairs], prefill_ms);
        }
    }

    /// Returns the report of the fits that have seen enough steps.
    pub fn report(&self, limits: StepLimits) -> v1::StepCosts {
        let ps = |ms: f64| (ms * PICOSECONDS) as u64;
        let prefill = (self.prefill.steps >= PREFILL_STEPS_MIN).then(|| {
            let [step, token, pair] = self.prefill.coefficients;
            v1::PrefillCosts { step_ps: ps(step), token_ps: ps(token), pair_ps: ps(pair) }
        });
        let decode = (self.decode.steps >= DECODE_STEPS_MIN).then(|| {
            let [step, row, context] = self.decode.coefficients;
            v1::DecodeCosts { step_ps: ps(step), row_ps: ps(row), context_token_ps: ps(context) }
        });
        let StepLimits { slots, step_tokens, chunk_tokens, itl_max } = limits;
        let itl_max_ms =
            itl_max.map_or(0, |itl| u32::try_from(itl.as_millis()).unwrap_or(u32::MAX));
        v1::StepCosts { step_tokens, chunk_tokens, itl_max_ms, prefill, decode, slots }
    }
}

/// Limits of a node's steps.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    /// Maximum number of sequences in a step.
    pub slots: u32,
    pub step_tokens: u32,
    /// Maximum number of prompt tokens of one sequence in a step.
    pub chunk_tokens: u32,
    /// Bound on the inter-token latency of running sequences.
    pub itl_max: Option<Duration>,
}

/// A node's reported step costs, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCosts {
    /// Maximum number of sequences in a step; `None` from a node of an older release.
    pub slots: Option<u32>,
    pub step_tokens: f64,
    pub chunk_tokens: f64,
    /// Infinite without a bound.
    pub itl_max_ms: f64,
    pub prefill: Option<PrefillCosts>,
    pub decode: Option<DecodeCosts>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillCosts {
    pub step_ms: f64,
    pub token_ms: f64,
    pub pair_ms: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DecodeCosts {
    pub step_ms: f64,
    pub row_ms: f64,
    pub context_token_ms: f64,
}

impl From<v1::StepCosts> for StepCosts {
    fn from(wire: v1::StepCosts) -> Self {
        let ms = |ps: u64| ps as f64 / PICOSECONDS;
        let step_tokens = f64::from(wire.step_tokens.max(1));
        Self {
            slots: (wire.slots > 0).then_some(wire.slots),
            step_tokens,
            chunk_tokens: f64::from(wire.chunk_tokens.max(1)).min(step_tokens),
            itl_max_ms: if wire.itl_max_ms == 0 { f64::INFINITY } else { wire.itl_max_ms.into() },
            prefill: wire.prefill.map(|wire| PrefillCosts {
                step_ms: ms(wire.step_ps),
                token_ms: ms(wire.token_ps),
                pair_ms: ms(wire.pair_ps),
            }),
            decode: wire.decode.map(|wire| DecodeCosts {
                step_ms: ms(wire.step_ps),
                row_ms: ms(wire.row_ps),
                context_token_ms: ms(wire.context_token_ps),
            }),
        }
    }
}

/// A node's step costs, and the sequences on the node.
#[derive(Clone, Copy, Debug)]
pub struct NodeState {
    pub prefill: PrefillCosts,
    pub decode: DecodeCosts,
    pub step_tokens: f64,
    pub chunk_tokens: f64,
    pub itl_max_ms: f64,
    /// Number of sequences that decode now.
    pub decoding: f64,
    /// KV tokens that the decoding sequences attend to.
    pub context_tokens: f64,
    /// Sequences that will decode together with the prompt: running and waiting.
    pub rows: f64,
    /// Time until all queued prompts are prefilled.
    pub queue_ms: f64,
}

impl NodeState {
    fn decode_step_ms(&self, rows: f64, context_tokens: f64) -> f64 {
        let DecodeCosts { step_ms, row_ms, context_token_ms } = self.decode;
        step_ms + row_ms * rows + context_token_ms * context_tokens
    }

    /// Returns the time of a decode step, in milliseconds.
    fn step_ms(&self) -> f64 {
        self.decode_step_ms(self.decoding, self.context_tokens)
    }

    /// Returns the time of a step that also prefills, in milliseconds.
    fn mixed_step_ms(&self, tokens: f64, pairs: f64) -> f64 {
        let PrefillCosts { step_ms, token_ms, pair_ms } = self.prefill;
        let rows_ms = self.step_ms() - self.decode.step_ms;
        let prefill_ms = step_ms + token_ms * tokens + pair_ms * pairs;
        (prefill_ms + rows_ms).max(self.step_ms())
    }

    /// Returns the time of `steps` steps that share the tokens and pairs equally.
    fn prefill_ms(&self, steps: f64, tokens: f64, pairs: f64) -> f64 {
        steps * self.mixed_step_ms(tokens / steps, pairs / steps)
    }

    /// Returns the prompt tokens of a step, at most `tokens_max`. With running sequences, the node's inter-token
    /// latency bound limits them. `context`: mean number of tokens to which a prompt token attends.
    fn bounded_tokens(&self, tokens_max: f64, context: f64) -> f64 {
        let PrefillCosts { step_ms, token_ms, pair_ms } = self.prefill;
        let left_ms = self.itl_max_ms - step_ms - (self.step_ms() - self.decode.step_ms);
        if self.decoding == 0.0 || left_ms == f64::INFINITY {
            return tokens_max;
        }
        // Without a measured cost per token any number of tokens fits.
        let tokens = if left_ms > 0.0 { left_ms / (token_ms + pair_ms * context) } else { 0.0 };
        tokens.max(BLOCK_TOKENS).min(tokens_max)
    }

    /// Returns the time to prefill these tokens of queued prompts.
    pub fn queued_ms(&self, tokens: f64, pairs: f64) -> f64 {
        if tokens == 0.0 {
            return 0.0;
        }
        let steps = tokens / self.bounded_tokens(self.step_tokens, pairs / tokens);
        self.prefill_ms(steps, tokens, pairs)
    }

    fn prompt_steps(&self, prompt: &Prompt) -> f64 {
        let context = prompt.pairs() / prompt.uncached_tokens;
        (prompt.uncached_tokens / self.bounded_tokens(self.chunk_tokens, context)).ceil()
    }

    fn prompt_ms(&self, prompt: &Prompt) -> f64 {
        self.prefill_ms(self.prompt_steps(prompt), prompt.uncached_tokens, prompt.pairs())
    }

    /// Returns whether even a step with one block of the prompt is longer than the inter-token latency bound.
    fn exceeds_itl_max(&self, prompt: &Prompt) -> bool {
        let tokens = prompt.uncached_tokens.min(BLOCK_TOKENS);
        let block_ms = self.mixed_step_ms(tokens, attention_pairs(prompt.cached_tokens, tokens));
        self.decoding > 0.0 && block_ms > self.itl_max_ms
    }

    /// Returns the part of the cost of a hand-over that depends on this prefill node alone.
    pub fn prefill_part_ms(&self, prompt: &Prompt) -> f64 {
        self.queue_ms + self.prompt_ms(prompt) + prompt.blocks_ms
    }

    /// Returns the part of the cost of a hand-over that depends on this decode node alone.
    pub fn decode_part_ms(&self, prompt: &Prompt, new_tokens_max: u32) -> f64 {
        prompt.blocks_ms + self.decode_ms(prompt.tokens(), new_tokens_max) + prompt.evict_ms
    }

    fn decode_ms(&self, tokens: f64, new_tokens_max: u32) -> f64 {
        let steps = f64::from(new_tokens_max.min(DECODE_STEPS));
        let with_row_ms = self.decode_step_ms(self.rows + 1.0, self.context_tokens + tokens);
        let without_ms = self.decode_step_ms(self.rows, self.context_tokens);
        steps * (with_row_ms + self.rows * (with_row_ms - without_ms))
    }
}

/// A prompt on one node.
#[derive(Clone, Copy, Debug)]
pub struct Prompt {
    pub cached_tokens: f64,
    /// At least 1.
    pub uncached_tokens: f64,
    /// Time until the node has free blocks, and has loaded the cached tokens that are in its KV tiers.
    pub blocks_ms: f64,
    /// Prefill time that the evicted blocks may cost later prompts.
    pub evict_ms: f64,
}

impl Prompt {
    fn tokens(&self) -> f64 {
        self.cached_tokens + self.uncached_tokens
    }

    fn pairs(&self) -> f64 {
        attention_pairs(self.cached_tokens, self.uncached_tokens)
    }
}

/// Predicted waiting time of clients, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Time until the steps of the prompt begin.
    pub queue_ms: f64,
    /// Time of the prompt's own steps.
    pub prompt_ms: f64,
    /// Wait for free blocks and for loads from KV tiers.
    pub blocks_ms: f64,
    pub transfer_gap_ms: f64,
    pub slowdown_ms: f64,
    pub decode_ms: f64,
    pub evict_ms: f64,
    /// Whether every step of the prompt exceeds the inter-token latency bound of other sequences.
    pub exceeds_itl_max: bool,
}

impl Prediction {
    /// Returns the time to first token.
    pub fn ttft_ms(&self) -> f64 {
        self.queue_ms + self.prompt_ms + self.blocks_ms
    }

    pub fn cost_ms(&self) -> f64 {
        self.ttft_ms() + self.transfer_gap_ms + self.slowdown_ms + self.decode_ms + self.evict_ms
    }
}

/// Predicts prefill on `prefill` and transfer to `decode`. `transfer_token_ms`: transfer time of a token's KV; 0
/// until a transfer was measured.
pub fn hand_over(
    prefill: (&NodeState, &Prompt),
    decode: (&NodeState, &Prompt),
    transfer_token_ms: f64,
    new_tokens_max: u32,
) -> Prediction {
    let (node, prompt) = prefill;
    let steps = node.prompt_steps(prompt);
    let prompt_ms = node.prompt_ms(prompt);
    // The KV of a step is sent while the next step is computed, so one step's KV is never overlapped.
    let transfer_ms = transfer_token_ms * decode.1.uncached_tokens;
    let transfer_gap_ms =
        (transfer_ms / steps).max(transfer_ms - prompt_ms * (steps - 1.0) / steps);
    Prediction {
        queue_ms: node.queue_ms,
        prompt_ms,
        // The first token waits for the reservation of both nodes' blocks.
        blocks_ms: prompt.blocks_ms.max(decode.1.blocks_ms),
        transfer_gap_ms,
        slowdown_ms: 0.0,
        decode_ms: decode.0.decode_ms(prompt.tokens(), new_tokens_max),
        evict_ms: decode.1.evict_ms,
        exceeds_itl_max: false,
    }
}

/// Predicts prefill on the decode node.
pub fn local(node: &NodeState, prompt: &Prompt, new_tokens_max: u32) -> Prediction {
    let prompt_ms = node.prompt_ms(prompt);
    let decode_only_ms = node.prompt_steps(prompt) * node.step_ms();
    let in_flight_ms = if node.decoding > 0.0 { STEPS_IN_FLIGHT * node.step_ms() } else { 0.0 };
    Prediction {
        queue_ms: node.queue_ms.max(in_flight_ms),
        prompt_ms,
        blocks_ms: prompt.blocks_ms,
        transfer_gap_ms: 0.0,
        slowdown_ms: node.decoding * (prompt_ms - decode_only_ms),
        decode_ms: node.decode_ms(prompt.tokens(), new_tokens_max),
        evict_ms: prompt.evict_ms,
        exceeds_itl_max: node.exceeds_itl_max(prompt),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: StepLimits =
        StepLimits { slots: 64, step_tokens: 512, chunk_tokens: 256, itl_max: None };

    fn prefill(tokens: f64, computed: f64) -> Work {
        let prefill_pairs = attention_pairs(computed, tokens);
        Work { prefill_tokens: tokens, prefill_pairs, ..Work::default() }
    }

    fn decode(decode_rows: f64, context_tokens: f64) -> Work {
        Work { decode_rows, context_tokens, ..Work::default() }
    }

    /// Returns the step time of a node. A decode step takes 4 ms, 20 µs per row and 30 ns per KV token. Prefill
    /// takes 1 ms, 20 µs per token and 1 ns per pair.
    fn true_ms(work: &Work) -> f64 {
        let rows = 0.02 * work.decode_rows + 3e-5 * work.context_tokens;
        let prefill = 1.0 + 0.02 * work.prefill_tokens + 1e-6 * work.prefill_pairs;
        if work.prefill_tokens > 0.0 { rows + prefill.max(4.0) } else { rows + 4.0 }
    }

    fn add(fit: &mut StepFit, work: &Work, factor: f64) {
        fit.add(work, Duration::from_secs_f64(true_ms(work) * factor / 1e3));
    }

    fn fitted(fit: &StepFit) -> StepCosts {
        fit.report(LIMITS).into()
    }

    fn is_near(value: f64, expected: f64) -> bool {
        (value / expected - 1.0).abs() < 0.05
    }

    #[test]
    fn fit_recovers_the_costs_of_mixed_steps_despite_interruptions() {
        let mut fit = StepFit::default();
        for index in 0..2000_u32 {
            // Every 20th step takes ten times as long.
            let factor = if index % 20 == 7 { 10.0 } else { 1.0 };
            let rows = f64::from(index * 7 % 60 + 1);
            let context = rows * f64::from(index * 31 % 900 + 100);
            add(&mut fit, &decode(rows, context), factor);
            let chunk = f64::from(index * 13 % 7 + 2) * 256.0;
            let mixed = prefill(chunk, f64::from(index % 5) * 2000.0);
            add(&mut fit, &Work { decode_rows: rows, context_tokens: context, ..mixed }, factor);
        }
        let costs = fitted(&fit);
        let (prefill, decode) = (costs.prefill.unwrap(), costs.decode.unwrap());
        assert!(is_near(decode.step_ms, 4.0) && is_near(decode.row_ms, 0.02), "{decode:?}");
        assert!(is_near(decode.context_token_ms, 3e-5), "{decode:?}");
        assert!(is_near(prefill.token_ms, 0.02) && is_near(prefill.pair_ms, 1e-6), "{prefill:?}");
    }

    #[test]
    fn fit_of_equal_steps_is_exact_for_them_and_proportional_beyond() {
        let mut fit = StepFit::default();
        for _ in 0..8 {
            fit.add(&prefill(256.0, 0.0), Duration::from_millis(10));
            fit.add(&decode(4.0, 1000.0), Duration::from_millis(5));
        }
        let StepCosts { prefill, decode, .. } = fitted(&fit);
        let (prefill, decode) = (prefill.unwrap(), decode.unwrap());
        let of_tokens = |tokens: f64| prefill.step_ms + prefill.token_ms * tokens;
        assert!(is_near(of_tokens(256.0), 10.0) && is_near(of_tokens(2560.0), 100.0));
        // Decode reads the weights once per step for any batch size.
        assert!(is_near(decode.step_ms, 5.0), "{decode:?}");
    }

    #[test]
    fn fit_follows_a_node_that_becomes_slower() {
        let mut fit = StepFit::default();
        for index in 0..2000 {
            let factor = if index < 1000 { 1.0 } else { 3.0 };
            add(&mut fit, &prefill(512.0 + f64::from(index % 8) * 64.0, 0.0), factor);
        }
        assert!(is_near(fitted(&fit).prefill.unwrap().token_ms, 0.06));
    }

    #[test]
    fn fit_is_reported_after_enough_steps_that_measure_throughput() {
        let mut fit = StepFit::default();
        for _ in 0..100 {
            add(&mut fit, &prefill(8.0, 0.0), 1.0);
        }
        for _ in 1..DECODE_STEPS_MIN {
            add(&mut fit, &decode(1.0, 10.0), 1.0);
        }
        assert_eq!((fitted(&fit).prefill, fitted(&fit).decode), (None, None));
        for _ in 0..PREFILL_STEPS_MIN {
            add(&mut fit, &prefill(64.0, 0.0), 1.0);
        }
        add(&mut fit, &decode(1.0, 10.0), 1.0);
        assert!(fitted(&fit).prefill.is_some() && fitted(&fit).decode.is_some());
    }

    #[test]
    fn no_measurement_gives_a_negative_or_unbounded_cost() {
        let mut fit = StepFit::default();
        let mut state = 1_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..5000 {
            let work = Work {
                prefill_tokens: (random(3) * random(9000)) as f64,
                prefill_pairs: random(1 << 30) as f64,
                decode_rows: random(300) as f64,
                context_tokens: random(1 << 20) as f64,
            };
            let time_max = 1 << random(36);
            fit.add(&work, Duration::from_nanos(random(time_max)));
            let solved = [fit.prefill.coefficients, fit.decode.coefficients];
            assert!(solved.as_flattened().iter().all(|ms| (0.0..1e9).contains(ms)), "{solved:?}");
        }
    }

    fn node() -> NodeState {
        NodeState {
            prefill: PrefillCosts { step_ms: 1.0, token_ms: 0.02, pair_ms: 1e-6 },
            decode: DecodeCosts { step_ms: 4.0, row_ms: 0.02, context_token_ms: 3e-5 },
            step_tokens: 512.0,
            chunk_tokens: 512.0,
            itl_max_ms: f64::INFINITY,
            decoding: 0.0,
            context_tokens: 0.0,
            rows: 0.0,
            queue_ms: 0.0,
        }
    }

    fn prompt(uncached_tokens: f64) -> Prompt {
        Prompt { cached_tokens: 0.0, uncached_tokens, blocks_ms: 0.0, evict_ms: 0.0 }
    }

    #[test]
    fn prompt_is_predicted_step_by_step() {
        let predicted = local(&node(), &prompt(1024.0), 1);
        assert!(is_near(predicted.ttft_ms(), 2.0 + 0.02 * 1024.0 + 0.5e-6 * 1024.0 * 1024.0));
        // A short prompt takes as long as a decode step.
        assert!(is_near(local(&node(), &prompt(16.0), 1).ttft_ms(), 4.0));
        // Cached tokens are attended to, not computed.
        let cached = Prompt { cached_tokens: 7000.0, ..prompt(1024.0) };
        let with_cache = local(&node(), &cached, 1).ttft_ms();
        assert!(is_near(with_cache - predicted.ttft_ms(), 7000.0 * 1024.0 * 1e-6));
    }

    #[test]
    fn local_prefill_costs_each_running_row_the_added_time() {
        let loaded = NodeState { decoding: 30.0, ..node() };
        let (idle, busy) = (local(&node(), &prompt(512.0), 1), local(&loaded, &prompt(512.0), 1));
        assert_eq!(idle.slowdown_ms, 0.0);
        let added = loaded.mixed_step_ms(512.0, 512.0 * 256.0) - loaded.step_ms();
        assert!(added > 5.0 && is_near(busy.slowdown_ms, 30.0 * added), "{busy:?}");
        assert_eq!(
            hand_over((&node(), &prompt(512.0)), (&loaded, &prompt(512.0)), 0.0, 1).slowdown_ms,
            0.0
        );
    }

    #[test]
    fn transfer_costs_what_prefill_does_not_overlap() {
        let (node, prompt) = (node(), prompt(2048.0));
        let gap =
            |token_ms| hand_over((&node, &prompt), (&node, &prompt), token_ms, 1).transfer_gap_ms;
        assert_eq!(gap(0.0), 0.0);
        // A fast link sends the KV of the last of four steps after the prompt.
        assert!(is_near(gap(0.001), 0.001 * 512.0));
        // On a slow link the transfer determines the gap.
        let prompt_ms = node.prompt_ms(&prompt);
        assert!(is_near(gap(1.0), 2048.0 - prompt_ms * 0.75));
        // Tokens that the decode node has cached are not sent.
        let cached = Prompt { cached_tokens: 1536.0, uncached_tokens: 512.0, ..prompt };
        assert!(
            hand_over((&node, &prompt), (&node, &cached), 1.0, 1).transfer_gap_ms < gap(1.0) / 3.0
        );
    }

    #[test]
    fn steps_beside_running_sequences_stay_within_the_inter_token_latency_bound() {
        let bounded = NodeState { itl_max_ms: 8.0, decoding: 10.0, ..node() };
        let prompt = prompt(2048.0);
        let steps = bounded.prompt_steps(&prompt);
        let longest = bounded.mixed_step_ms(2048.0 / steps, prompt.pairs() / steps);
        assert!(steps > 4.0 && (7.0..8.0).contains(&longest), "{steps} steps of {longest} ms");
        assert!(!local(&bounded, &prompt, 1).exceeds_itl_max);
        // The prompt takes longer, and an idle node needs no bound.
        let idle = NodeState { decoding: 0.0, ..bounded };
        assert_eq!(idle.prompt_steps(&prompt), 4.0);
        assert!(local(&bounded, &prompt, 1).ttft_ms() > local(&idle, &prompt, 1).ttft_ms() + 3.0);
        assert!(bounded.queued_ms(5000.0, 1e6) > idle.queued_ms(5000.0, 1e6));
        // Decode alone takes longer than the bound.
        let full = NodeState { decoding: 400.0, ..bounded };
        assert!(local(&full, &prompt, 1).exceeds_itl_max);
        assert_eq!(full.bounded_tokens(512.0, 100.0), BLOCK_TOKENS);
    }
}
