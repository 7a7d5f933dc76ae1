//! Draw of a token: an exponential race (equivalent to the Gumbel-max rule) with counter-based
//! random numbers.
//!
//! Every token `i` has a number `v` in (0, 1) that depends on (seed, output index, i) only. Its
//! arrival time is `-ln(1 - v) / p`, and the earliest token wins; ties go to the lower id. A token
//! wins with probability p divided by the sum of all p. Its arrival time does not depend on the
//! other tokens, so equal logits give equal draws on every device. The number is:
//!
//! ```text
//! key  = splitmix64(splitmix64(seed) + index)           two halves: low, high
//! v    = (triple32(triple32(i ^ low) ^ high) + ½) / 2³²
//! ```
//!
//! `splitmix64(x)` is the first output of Steele, Lea and Flood's generator in state `x`;
//! `triple32` is Wellons' three-round bijection of 32 bits.

use super::super::{
    arithmetic::LANES,
    isa::{Level, per_level},
};

/// Mixed seed and output index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DrawKey {
    low: u32,
    high: u32,
}

impl DrawKey {
    pub(super) fn new(seed: u64, index: u64) -> Self {
        let key = splitmix64(splitmix64(seed).wrapping_add(index));
        Self { low: key as u32, high: (key >> 32) as u32 }
    }

    /// Returns the random bits of a token.
    #[inline(always)]
    fn bits(self, token: u32) -> u32 {
        triple32(triple32(token ^ self.low) ^ self.high)
    }

    /// Returns the arrival time of a token of weight `p` > 0.
    fn arrival(self, token: u32, p: f32) -> f64 {
        let v = (f64::from(self.bits(token)) + 0.5) / 4_294_967_296.0;
        -(-v).ln_1p() / f64::from(p)
    }
}

fn splitmix64(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[inline(always)]
fn triple32(x: u32) -> u32 {
    let x = (x ^ (x >> 17)).wrapping_mul(0xed5a_d4bb);
    let x = (x ^ (x >> 11)).wrapping_mul(0xac4c_1b51);
    let x = (x ^ (x >> 15)).wrapping_mul(0x3184_8bab);
    x ^ (x >> 14)
}

/// Token with the earliest arrival time so far.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Winner {
    token: u32,
    /// Arrival time; infinite before the first token.
    arrival: f64,
}

impl Winner {
    /// Initial value, before any token.
    const NONE: Self = Self { token: u32::MAX, arrival: f64::INFINITY };

    fn offer(&mut self, token: u32, arrival: f64) {
        if (arrival, token) < (self.arrival, self.token) {
            *self = Self { token, arrival };
        }
    }
}

/// Draws from all tokens. `weights[best]` is the greatest weight.
///
/// Since -ln(1 - v) ≥ v, a token with v > p · (arrival of the winner so far) has lost. This
/// comparison rejects all tokens but a few; starting with the most likely token makes the bound
/// tight.
pub(super) fn among_all(level: Level, key: DrawKey, best: u32, weights: &[f32]) -> u32 {
    let mut winner = Winner::NONE;
    winner.offer(best, key.arrival(best, weights[best as usize]));
    for (run, weights) in weights.chunks(4 * LANES).enumerate() {
        let first = (run * 4 * LANES) as u32;
        // Rounded up, because v below is rounded down: no token that might win is skipped.
        let bound = winner.arrival as f32 * 1.000_001;
        if may_win(level, key, first, weights, bound) {
            for (token, &p) in (first..).zip(weights).filter(|&(_, &p)| p > 0.0) {
                winner.offer(token, key.arrival(token, p));
            }
        }
    }
    winner.token
}

per_level! {
    /// Returns whether one of the tokens from `first` on could arrive before `bound`.
    fn may_win(key: DrawKey, first: u32, weights: &[f32], bound: f32) -> bool {
        let mut may_win = false;
        for (token, &p) in (first..).zip(weights) {
            let v = (key.bits(token) >> 8) as i32 as f32 * (1.0 / 16_777_216.0);
            may_win |= (v <= p * bound) & (p > 0.0);
        }
        may_win
    }
}

/// Draws one of `candidates` (id, weight > 0), which are at least one, in any order.
pub(super) fn among(key: DrawKey, candidates: &[(u32, f32)]) -> u32 {
    let mut winner = Winner::NONE;
    for &(token, p) in candidates {
        winner.offer(token, key.arrival(token, p));
    }
    winner.token
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{levels, numbers};

    /// Returns the chi-square statistic of counts against expected shares.
    fn chi_square(counts: &[u32], shares: &[f64]) -> f64 {
        let draws: u32 = counts.iter().sum();
        counts
            .iter()
            .zip(shares)
            .map(|(&count, &share)| {
                let expected = share * f64::from(draws);
                (f64::from(count) - expected).powi(2) / expected
            })
            .sum()
    }

    /// Returns an upper limit for the statistic: mean + 5 standard deviations. A correct generator
    /// exceeds it for fewer than one in ten thousand seeds.
    fn limit(degrees: usize) -> f64 {
        degrees as f64 + 5.0 * (2.0 * degrees as f64).sqrt()
    }

    fn shares(weights: &[f32]) -> Vec<f64> {
        let total: f64 = weights.iter().map(|&p| f64::from(p)).sum();
        weights.iter().map(|&p| f64::from(p) / total).collect()
    }

    #[test]
    fn the_documented_hash_does_not_change() {
        assert_eq!(splitmix64(0), 0xe220_a839_7b1d_cdaf);
        // An independent program computed these numbers from the formula above.
        let bits = [0, 1, 2].map(|token| DrawKey::new(42, 7).bits(token));
        assert_eq!(bits, [500_478_835, 4_053_914_327, 3_711_117_863]);
    }

    #[test]
    fn draws_over_output_indices_follow_the_weights() {
        let weights = [1.0_f32, 0.5, 0.25, 0.125, 0.06, 0.03, 0.0, 0.015, 0.9, 0.001];
        let kept: Vec<(u32, f32)> = (0..).zip(weights).filter(|&(_, p)| p > 0.0).collect();
        for seed in [0, 1, 0xdead_beef] {
            let mut counts = [0_u32; 10];
            for index in 0..200_000 {
                let token = among(DrawKey::new(seed, index), &kept);
                counts[token as usize] += 1;
            }
            assert_eq!(counts[6], 0);
            let some = |values: &[f64]| [&values[..6], &values[7..]].concat();
            let seen: Vec<u32> = [&counts[..6], &counts[7..]].concat();
            let statistic = chi_square(&seen, &some(&shares(&weights)));
            assert!(statistic < limit(8), "seed {seed}: {statistic}");
        }
    }

    #[test]
    fn draws_over_seeds_follow_the_weights() {
        let weights = numbers(3, 64).iter().map(|x| (x * 3.0).exp()).collect::<Vec<f32>>();
        let mut counts = [0_u32; 64];
        for seed in 0..200_000 {
            counts[among_all(Level::Baseline, DrawKey::new(seed, 5), 0, &weights) as usize] += 1;
        }
        let statistic = chi_square(&counts, &shares(&weights));
        assert!(statistic < limit(63), "{statistic}");
    }

    /// Checks that draws at neighbouring indices and with neighbouring seeds are independent.
    #[test]
    fn draws_of_adjacent_indices_are_independent() {
        let weights = [1.0_f32, 0.7, 0.4, 0.2];
        let shares = shares(&weights);
        let pairs: Vec<f64> =
            shares.iter().flat_map(|a| shares.iter().map(move |b| a * b)).collect();
        let draw = |seed, index| {
            among_all(Level::Baseline, DrawKey::new(seed, index), 0, &weights) as usize
        };
        let (mut by_index, mut by_seed) = ([0_u32; 16], [0_u32; 16]);
        for i in 0..100_000 {
            by_index[draw(9, 2 * i) * 4 + draw(9, 2 * i + 1)] += 1;
            by_seed[draw(2 * i, 3) * 4 + draw(2 * i + 1, 3)] += 1;
        }
        for (name, counts) in [("index", by_index), ("seed", by_seed)] {
            let statistic = chi_square(&counts, &pairs);
            assert!(statistic < limit(15), "{name}: {statistic}");
        }
    }

    /// Checks that the bits of neighbouring tokens, indices and seeds are uniform and uncorrelated.
    #[test]
    fn random_bits_are_uniform_over_seeds_indices_and_tokens() {
        type Bits = fn(u32) -> u32;
        let directions: [(&str, Bits); 3] = [
            ("token", |i| DrawKey::new(1, 1).bits(i)),
            ("index", |i| DrawKey::new(1, u64::from(i)).bits(100)),
            ("seed", |i| DrawKey::new(u64::from(i), 1).bits(100)),
        ];
        for (name, bits) in directions {
            let (mut high, mut low, mut pairs) = ([0_u32; 256], [0_u32; 256], [0_u32; 256]);
            let mut before = bits(0);
            for i in 1..=200_000 {
                let now = bits(i);
                high[(now >> 24) as usize] += 1;
                low[(now & 255) as usize] += 1;
                pairs[(now >> 28 << 4 | before >> 28) as usize] += 1;
                before = now;
            }
            for counts in [high, low, pairs] {
                let statistic = chi_square(&counts, &[1.0 / 256.0; 256]);
                assert!(statistic < limit(255), "{name}: {statistic}");
            }
        }
    }

    #[test]
    fn skipping_tokens_changes_no_draw() {
        for case in 0..300_u32 {
            let count = 1 + (case as usize * 37) % 900;
            let sharpness = (case % 7) as f32 * 3.0;
            let mut weights: Vec<f32> =
                numbers(case, count).iter().map(|x| (sharpness * (x - 1.0)).exp()).collect();
            if case % 3 == 0 {
                weights.iter_mut().step_by(5).for_each(|p| *p = 0.0);
            }
            let Some(best) = (0..count)
                .filter(|&i| weights[i] > 0.0)
                .max_by(|&a, &b| weights[a].total_cmp(&weights[b]))
            else {
                continue;
            };
            let key = DrawKey::new(u64::from(case), 11);
            let kept: Vec<(u32, f32)> =
                (0..).zip(weights.iter().copied()).filter(|&(_, p)| p > 0.0).collect();
            let want = among(key, &kept);
            for level in levels() {
                assert_eq!(among_all(level, key, best as u32, &weights), want, "case {case}");
            }
        }
    }
}
