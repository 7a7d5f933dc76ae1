//! A node's fit of its step times.

use std::time::Duration;

use proto::v1;

use super::PICOSECONDS;

/// Steps with fewer prompt tokens are not fitted: loading the weights dominates their time.
const PREFILL_TOKENS_MIN: f64 = 32.0;
/// Steps that a fit needs before the node reports it.
const PREFILL_STEPS_MIN: u32 = 4;
const DECODE_STEPS_MIN: u32 = 8;
/// Weight of each new step in a fit. A fit covers about the last 128 prefill and 1,024 decode
/// steps.
const PREFILL_FORGET: f64 = 1.0 / 128.0;
const DECODE_FORGET: f64 = 1.0 / 1024.0;
/// Relative ridge penalty of each coefficient. If inputs never vary, the fit attributes the time to
/// the input with the smallest penalty: prompt tokens for prefill, the step itself for decode.
const PREFILL_RIDGE: [f64; 3] = [1e-3, 1e-5, 1e-3];
const DECODE_RIDGE: [f64; 3] = [1e-5, 1e-3, 1e-3];

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

/// Exponentially weighted least squares of relative errors, with coefficients of at least 0. A
/// relative error bounds the influence of a step that was interrupted.
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

    /// Solves the normal equations for the used inputs, scaled to a diagonal of 1, by Cholesky
    /// decomposition.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::{StepCosts, attention_pairs, tests::is_near};

    const LIMITS: StepLimits =
        StepLimits { slots: 64, step_tokens: 512, chunk_tokens: 256, itl_max: None };

    fn prefill(tokens: f64, computed: f64) -> Work {
        let prefill_pairs = attention_pairs(computed, tokens);
        Work { prefill_tokens: tokens, prefill_pairs, ..Work::default() }
    }

    fn decode(decode_rows: f64, context_tokens: f64) -> Work {
        Work { decode_rows, context_tokens, ..Work::default() }
    }

    /// Returns the step time of a node. A decode step takes 4 ms, 20 µs per row and 30 ns per KV
    /// token. Prefill takes 1 ms, 20 µs per token and 1 ns per pair.
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
}
