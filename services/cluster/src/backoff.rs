//! Back-off with jitter.

use std::time::Duration;

/// Deterministic random numbers (splitmix64): equal seeds yield equal runs.
pub struct Jitter(u64);

impl Jitter {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a random duration between half of `duration` and `duration`.
    pub fn spread(&mut self, duration: Duration) -> Duration {
        let fraction = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        duration / 2 + (duration / 2).mul_f64(fraction)
    }
}

/// Returns `first` doubled with each earlier failure, at most `longest`.
pub fn doubled(first: Duration, failures: u32, longest: Duration) -> Duration {
    first.saturating_mul(1u32.checked_shl(failures).unwrap_or(u32::MAX)).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_longest() {
        let [first, longest] = [Duration::from_millis(100), Duration::from_secs(2)];
        let delays = [0, 1, 4, 5, 31, 32, u32::MAX].map(|n| doubled(first, n, longest).as_millis());
        assert_eq!(delays, [100, 200, 1600, 2000, 2000, 2000, 2000]);
    }

    #[test]
    fn jitter_stays_within_half_and_whole_and_repeats_with_its_seed() {
        let (mut one, mut two) = (Jitter::new(7), Jitter::new(7));
        let whole = Duration::from_millis(100);
        for _ in 0..1000 {
            let delay = one.spread(whole);
            assert!(delay >= whole / 2 && delay <= whole);
            assert_eq!(delay, two.spread(whole));
        }
    }
}
