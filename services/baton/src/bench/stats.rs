//! Percentiles of measured samples, and random numbers for workloads.

use serde::{Deserialize, Serialize};

/// Statistics of samples. `p90` is the smallest sample such that at least 90 % of the samples are
/// not greater (nearest rank).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    pub count: usize,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Percentiles {
    /// Returns the statistics of the samples; all are 0 if there are no samples.
    pub fn of(mut samples: Vec<f64>) -> Self {
        if samples.is_empty() {
            return Self::default();
        }
        samples.sort_by(f64::total_cmp);
        let percentile = |share: f64| {
            let rank = (share * samples.len() as f64).ceil() as usize;
            samples[rank.clamp(1, samples.len()) - 1]
        };
        Self {
            count: samples.len(),
            mean: samples.iter().sum::<f64>() / samples.len() as f64,
            p50: percentile(0.50),
            p90: percentile(0.90),
            p99: percentile(0.99),
            max: samples[samples.len() - 1],
        }
    }
}

/// Returns the median by nearest rank: of an even number of samples the lower middle one. Returns 0
/// if there are no samples.
pub fn median(samples: &[f64]) -> f64 {
    Percentiles::of(samples.to_vec()).p50
}

/// Generator of random numbers for workloads (SplitMix64, Steele et al. 2014). Equal seeds give
/// equal numbers.
pub struct WorkloadRng(u64);

impl WorkloadRng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Draws uniformly from [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws uniformly from `low..=high`.
    pub fn within(&mut self, low: u32, high: u32) -> u32 {
        low + (self.next_u64() % (u64::from(high - low) + 1)) as u32
    }

    /// Draws from the normal distribution with mean 0 and standard deviation 1 (Box and Muller
    /// 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Draws the time in seconds between two arrivals of a Poisson process with the rate
    /// `per_second`.
    pub fn exponential(&mut self, per_second: f64) -> f64 {
        -(1.0 - self.unit()).ln() / per_second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let found = Percentiles::of((1..=100).map(f64::from).collect());
        assert_eq!((found.p50, found.p90, found.p99, found.max), (50.0, 90.0, 99.0, 100.0));
        assert_eq!(Percentiles::of(vec![7.0]).p99, 7.0);
        assert_eq!(Percentiles::of(Vec::new()).count, 0);
    }

    #[test]
    fn poisson_gaps_have_the_requested_mean() {
        let mut rng = WorkloadRng::new(1);
        let mean = (0..20_000).map(|_| rng.exponential(4.0)).sum::<f64>() / 20_000.0;
        assert!((mean - 0.25).abs() < 0.01, "{mean}");
    }
}
