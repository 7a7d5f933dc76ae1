//! Predicted times from the start of a request to its end.

use std::time::{Duration, Instant};

use super::predict::{CountedTokens, RATE_SHARE, seconds};

/// Safety margin on the predicted service time, in mean relative errors: about 95 % of requests
/// take no longer if errors are normally distributed, unless their mean is close to [`ERROR_MAX`].
const SERVICE_TIME_RESERVE: f64 = 2.0;
/// Maximum relative error of one request. Reason: one request that took a hundred times as long as
/// predicted must not delay all others.
const ERROR_MAX: f64 = 1.0;
/// Time after the last completed request until which predictions hold. Reason: predictions after a
/// stall may refuse every request, and then no completed request would correct them.
const MEASURED_FOR: Duration = Duration::from_secs(60);
/// Variation of prompt lengths (squared coefficient of variation) below which times to first token
/// count as independent of the length. Reason: the time per token of prompts of nearly equal
/// lengths is noise.
const VARIATION_MIN: f64 = 0.01;
/// Standard errors by which the time per token is reduced. Reason: for prompts far longer than the
/// measured ones it would otherwise be noise. A prediction that is too low refuses nothing.
const SLOPE_ERRORS: f64 = 3.0;
/// Number of completed requests, older ones counted less, below which times to first token count as
/// independent of the length. Reason: two requests lie on a line, whatever took their time.
const SLOPE_COUNT_MIN: f64 = 8.0;

/// Sums over the last completed requests, for their service times.
#[derive(Debug, Default)]
pub(super) struct ServiceTime {
    first_token: FirstTokenTime,
    /// Time after the first tokens, in seconds, and the tokens that were generated in this time.
    decode_seconds: f64,
    decode_tokens: f64,
    /// Mean relative error of the predictions. An absolute error would be dominated by long
    /// requests and refuse short ones.
    error: f64,
    /// End of the last completed request.
    measured_at: Option<Instant>,
}

impl ServiceTime {
    /// Adds a request that completed now, with the seconds from its start to its first token and to
    /// its end.
    pub(super) fn add(
        &mut self,
        now: Instant,
        tokens: CountedTokens,
        first_token_s: f64,
        end_s: f64,
    ) {
        if !self.is_current(now) {
            *self = Self::default();
        }
        self.measured_at = Some(now);
        if let Some(predicted) = self.mean_s(tokens).filter(|predicted| *predicted > 0.0) {
            let error = (end_s / predicted - 1.0).abs().min(ERROR_MAX);
            self.error += (error - self.error) * RATE_SHARE;
        }
        self.first_token.add(tokens.uncached.into(), first_token_s);
        self.decode_seconds += end_s - first_token_s - self.decode_seconds * RATE_SHARE;
        self.decode_tokens += later_tokens(tokens) - self.decode_tokens * RATE_SHARE;
    }

    /// Returns the time from the start of a request to its end that few requests exceed; zero
    /// without measurements of the last [`MEASURED_FOR`].
    pub(super) fn with_reserve(&self, now: Instant, tokens: CountedTokens) -> Duration {
        if !self.is_current(now) {
            return Duration::ZERO;
        }
        let factor = 1.0 + SERVICE_TIME_RESERVE * self.error;
        self.mean_s(tokens).map_or(Duration::ZERO, |mean| seconds(mean * factor))
    }

    fn is_current(&self, now: Instant) -> bool {
        self.measured_at.is_some_and(|at| now.saturating_duration_since(at) < MEASURED_FOR)
    }

    fn mean_s(&self, tokens: CountedTokens) -> Option<f64> {
        let first_token_s = self.first_token.mean_s(tokens.uncached.into())?;
        let token_s = match self.decode_tokens > 0.0 {
            true => self.decode_seconds / self.decode_tokens,
            false => 0.0,
        };
        Some(first_token_s + token_s * later_tokens(tokens))
    }
}

/// Returns the number of output tokens after the first one.
fn later_tokens(tokens: CountedTokens) -> f64 {
    (tokens.output - 1.0).max(0.0)
}

/// Times to first token as a fixed time and a time per uncached token, by least squares.
#[derive(Debug, Default)]
struct FirstTokenTime {
    count: f64,
    tokens: f64,
    seconds: f64,
    tokens_squared: f64,
    seconds_squared: f64,
    tokens_by_seconds: f64,
}

impl FirstTokenTime {
    fn add(&mut self, tokens: f64, seconds: f64) {
        for (sum, value) in [
            (&mut self.count, 1.0),
            (&mut self.tokens, tokens),
            (&mut self.seconds, seconds),
            (&mut self.tokens_squared, tokens * tokens),
            (&mut self.seconds_squared, seconds * seconds),
            (&mut self.tokens_by_seconds, tokens * seconds),
        ] {
            *sum += value - *sum * RATE_SHARE;
        }
    }

    fn mean_s(&self, tokens: f64) -> Option<f64> {
        if self.count == 0.0 {
            return None;
        }
        let mean_tokens = (self.tokens / self.count).max(1.0);
        let mean_s = self.seconds / self.count;
        let square = mean_tokens * mean_tokens;
        let variance = (self.tokens_squared / self.count - square).max(0.0);
        let covariance = self.tokens_by_seconds / self.count - mean_tokens * mean_s;
        let regular = variance + VARIATION_MIN * square;
        let slope = covariance / regular;
        let variance_s = self.seconds_squared / self.count - mean_s * mean_s;
        let unexplained = variance_s + slope * (slope * variance - 2.0 * covariance);
        if self.count < SLOPE_COUNT_MIN {
            return Some(mean_s);
        }
        // Two of the requests determine the line.
        let slope_error = (unexplained.max(0.0) / (regular * (self.count - 2.0))).sqrt();
        // Neither the time per token nor the fixed time is negative.
        let token_s = (slope - SLOPE_ERRORS * slope_error).clamp(0.0, mean_s / mean_tokens);
        Some(mean_s + token_s * (tokens - mean_tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(uncached: u32, output: u32) -> CountedTokens {
        CountedTokens { uncached, output: output.into() }
    }

    #[test]
    fn service_time_is_a_fixed_time_and_times_per_token() {
        let (mut times, now) = (ServiceTime::default(), Instant::now());
        for index in 0..200 {
            let (uncached, output) = (index % 10 * 1000, index % 7 + 1);
            let first_token_s = 0.1 + 1e-4 * f64::from(uncached);
            let end_s = first_token_s + 0.01 * f64::from(output - 1);
            times.add(now, tokens(uncached, output), first_token_s, end_s);
        }
        for (uncached, output, true_s) in [(1000, 1, 0.2), (9000, 1, 1.0), (30_000, 101, 4.1)] {
            let predicted = times.mean_s(tokens(uncached, output)).unwrap();
            assert!((predicted / true_s - 1.0).abs() < 0.1, "{uncached} {output}: {predicted} s");
        }
    }

    #[test]
    fn prompts_of_equal_lengths_tell_no_time_per_token() {
        for uncached in [0, 100] {
            let (mut times, now) = (ServiceTime::default(), Instant::now());
            for _ in 0..100 {
                times.add(now, tokens(uncached, 1), 0.5, 0.5);
            }
            for other in [0, 100, 100_000] {
                let predicted = times.mean_s(tokens(other, 1)).unwrap();
                assert!((predicted - 0.5).abs() < 1e-3, "{other} after {uncached}: {predicted} s");
            }
        }
    }
}
