//! Random numbers that depend only on the seed.

use std::{ops::RangeInclusive, time::Duration};

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns 64 random bits.
    #[allow(clippy::should_implement_trait)] // The sequence never ends.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns an independent generator: draws from one do not change the other.
    pub fn fork(&mut self) -> Self {
        Self(self.next())
    }

    /// Returns 128 random bits.
    pub fn id(&mut self) -> u128 {
        u128::from(self.next()) << 64 | u128::from(self.next())
    }

    /// Returns a number below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn within(&mut self, range: RangeInclusive<u32>) -> u32 {
        let count = u64::from(range.end() - range.start()) + 1;
        range.start() + self.below(count) as u32
    }

    /// Returns true in `percent` of all cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Returns a duration from 0 to `max`, in whole microseconds.
    pub fn up_to(&mut self, max: Duration) -> Duration {
        Duration::from_micros(self.below(max.as_micros() as u64 + 1))
    }

    /// Draws from [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Draws from an approximate normal distribution with mean 0 and deviation 1: the sum of 12
    /// uniform numbers.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    pub fn millis(&mut self, range: RangeInclusive<u32>) -> Duration {
        Duration::from_millis(self.within(range).into())
    }

    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize].clone()
    }
}

/// Computes the finalizer of SplitMix64.
pub fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
