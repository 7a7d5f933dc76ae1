//! Statistics of a replay.

use std::time::{Duration, Instant};

/// Statistics of a router's requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReplayStats {
    pub requests: Vec<ServedRequest>,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Arrival of the first request, and end of the last one.
    pub first_arrival: Option<Instant>,
    pub last_end: Option<Instant>,
    pub inter_token: Histogram,
    /// Wall-clock time of node selection.
    pub pick_time: Duration,
}

/// A complete request.
#[derive(Clone, Copy, Debug)]
pub struct ServedRequest {
    /// Number of the request in the order of arrival.
    pub request: usize,
    pub prompt_tokens: u32,
    /// Prompt tokens in the prefix cache of the node that prefilled. For a retried request, the
    /// first such node counts.
    pub cached_tokens: u32,
    pub output_tokens: u32,
    /// Time from the arrival to the first token.
    pub ttft: Duration,
    /// Time from the arrival to the last token.
    pub duration: Duration,
    /// Longest time between two tokens.
    pub longest_gap: Duration,
    pub attempts: u32,
}

impl ServedRequest {
    /// Returns the mean time between two tokens.
    pub fn time_per_token(&self) -> Duration {
        (self.duration - self.ttft) / self.output_tokens.saturating_sub(1).max(1)
    }
}

/// Counts of durations in buckets whose bounds grow by 2 %, from 1 µs to 1 day.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    counts: Vec<u64>,
}

const GROWTH: f64 = 1.02;
const BUCKETS: usize = 1273;

impl Histogram {
    pub fn add(&mut self, duration: Duration) {
        if self.counts.is_empty() {
            self.counts = vec![0; BUCKETS];
        }
        let micros = (duration.as_nanos() as f64 / 1e3).max(1.0);
        let bucket = (micros.ln() / GROWTH.ln()) as usize;
        self.counts[bucket.min(BUCKETS - 1)] += 1;
    }

    /// Returns the middle of the bucket with this percentile in milliseconds; 0 without a duration.
    pub fn percentile_ms(&self, percent: f64) -> f64 {
        let total: u64 = self.counts.iter().sum();
        let rank = ((percent / 100.0 * total as f64).ceil() as u64).max(1);
        let mut sum = 0;
        let bucket = self.counts.iter().position(|count| {
            sum += count;
            sum >= rank
        });
        bucket.map_or(0.0, |bucket| GROWTH.powf(bucket as f64 + 0.5) / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_a_bucket_of_the_exact_ones() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.percentile_ms(50.0), 0.0);
        (1..=1000).for_each(|ms| histogram.add(Duration::from_millis(ms)));
        for (percent, exact) in [(50.0, 500.0), (90.0, 900.0), (99.0, 990.0)] {
            let found = histogram.percentile_ms(percent);
            assert!((found / exact - 1.0).abs() < 0.021, "{percent}: {found}");
        }
        histogram.add(Duration::from_secs(1_000_000));
        assert!(histogram.percentile_ms(100.0) > 80_000_000.0, "longer than a day");
    }
}
