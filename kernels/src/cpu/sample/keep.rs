//! Candidate filter: min-p, top-k and top-p.
//!
//! Few tokens have a relevant probability, so as few as possible are sorted: tokens above a *cut*
//! are gathered, and the cut is lowered only when they are not enough.

use super::{
    super::isa::{Level, per_level},
    total,
};
use crate::sampling::Sampling;

/// Cuts in the order of trial, as probabilities relative to the best token's. The last one admits
/// every token.
const CUTS: [f32; 3] = [1.0 / 256.0, 1.0 / 65_536.0, 0.0];
/// Tokens between two checks whether any token is above the cut.
const RUN: usize = 64;

/// Token as a sort key: greater probability first, then lower id.
type Ranked = u64;

#[inline]
fn ranked(id: u32, weight: f32) -> Ranked {
    // Non-negative floats sort as their bits do.
    u64::from(!weight.to_bits()) << 32 | u64::from(id)
}

#[inline]
fn id(ranked: Ranked) -> u32 {
    ranked as u32
}

#[inline]
fn weight(ranked: Ranked) -> f32 {
    f32::from_bits(!((ranked >> 32) as u32))
}

/// Returns the kept tokens with their weights; `None` when all tokens stay. `weights` are
/// probabilities relative to the best token's, which is 1.
pub(super) fn candidates(
    level: Level,
    weights: &[f32],
    sampling: &Sampling,
) -> Option<Vec<(u32, f32)>> {
    let Sampling { top_p, min_p, .. } = *sampling;
    let top_k = match sampling.top_k as usize {
        k if k >= weights.len() => 0,
        k => k,
    };
    let mut kept = Vec::new();
    if top_k == 0 && top_p >= 1.0 {
        if min_p <= 0.0 {
            return None;
        }
        gather(level, weights, min_p, &mut kept);
    } else {
        // Total weight to which top-p applies: top-k's tokens, or all that min-p keeps, gathered or
        // not.
        let whole = (top_k == 0).then(|| total(level, weights, min_p));
        for cut in CUTS {
            let cut = cut.max(min_p);
            gather(level, weights, cut, &mut kept);
            if narrow(&mut kept, top_k, top_p, whole) || cut <= min_p {
                break;
            }
        }
    }
    Some(kept.into_iter().map(|token| (id(token), weight(token))).collect())
}

/// Applies top-k, then top-p. Returns false when tokens below the cut might belong to the result.
fn narrow(kept: &mut Vec<Ranked>, top_k: usize, top_p: f32, whole: Option<f64>) -> bool {
    let has_top_k = kept.len() >= top_k;
    if top_k > 0 && has_top_k {
        let (_, &mut last, _) = kept.select_nth_unstable(top_k - 1);
        kept.retain(|&token| weight(token) >= weight(last));
    }
    if top_p >= 1.0 {
        return has_top_k;
    }
    kept.sort_unstable();
    let whole = whole.unwrap_or_else(|| kept.iter().map(|&token| f64::from(weight(token))).sum());
    match reaching(kept, f64::from(top_p) * whole) {
        Some(count) => {
            kept.truncate(count);
            has_top_k
        }
        None => false,
    }
}

/// Returns how many of the `sorted` tokens, from the first on, reach the sum `wanted`.
fn reaching(sorted: &[Ranked], wanted: f64) -> Option<usize> {
    let mut sum = 0.0;
    sorted
        .iter()
        .position(|&token| {
            sum += f64::from(weight(token));
            sum >= wanted
        })
        .map(|last| last + 1)
}

/// Gathers tokens with a weight of at least `cut` and more than 0.
fn gather(level: Level, weights: &[f32], cut: f32, kept: &mut Vec<Ranked>) {
    kept.clear();
    for (run, weights) in weights.chunks(RUN).enumerate() {
        if any_kept(level, weights, cut) {
            let first = (run * RUN) as u32;
            kept.extend(
                (first..)
                    .zip(weights)
                    .filter(|&(_, &weight)| is_kept(weight, cut))
                    .map(|(id, &weight)| ranked(id, weight)),
            );
        }
    }
}

#[inline(always)]
fn is_kept(weight: f32, cut: f32) -> bool {
    (weight >= cut) & (weight > 0.0)
}

per_level! {
    fn any_kept(weights: &[f32], cut: f32) -> bool {
        weights.iter().fold(false, |any, &weight| any | is_kept(weight, cut))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::testing::levels;

    fn sampling(top_k: u32, top_p: f32, min_p: f32) -> Sampling {
        Sampling { top_k, top_p, min_p, ..Sampling::greedy() }
    }

    /// Implements the rules directly, without the shortcut.
    fn plain(weights: &[f32], rules: &Sampling) -> Vec<u32> {
        let mut kept: Vec<(u32, f32)> = (0..)
            .zip(weights.iter().copied())
            .filter(|&(_, p)| p > 0.0 && p >= rules.min_p)
            .collect();
        kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let k = rules.top_k as usize;
        if k > 0 && k < kept.len() {
            let last = kept[k - 1].1;
            kept.retain(|&(_, p)| p >= last);
        }
        let whole: f64 = kept.iter().map(|&(_, p)| f64::from(p)).sum();
        let mut sum = 0.0;
        let mut count = kept.len();
        if rules.top_p < 1.0 {
            for (index, &(_, p)) in kept.iter().enumerate() {
                sum += f64::from(p);
                if sum >= f64::from(rules.top_p) * whole {
                    count = index + 1;
                    break;
                }
            }
        }
        let mut ids: Vec<u32> = kept[..count].iter().map(|&(id, _)| id).collect();
        ids.sort_unstable();
        ids
    }

    fn ids(level: Level, weights: &[f32], rules: &Sampling) -> Vec<u32> {
        let mut ids: Vec<u32> = match candidates(level, weights, rules) {
            None => (0..weights.len() as u32).filter(|&id| weights[id as usize] > 0.0).collect(),
            Some(kept) => {
                assert!(kept.iter().all(|&(id, p)| weights[id as usize] == p));
                kept.into_iter().map(|(id, _)| id).collect()
            }
        };
        ids.sort_unstable();
        ids
    }

    #[test]
    fn top_p_and_min_p_keep_the_best_token() {
        let weights = [0.1, 1.0, 0.9];
        for rules in [sampling(1, 1.0, 0.0), sampling(0, 1e-9, 0.0), sampling(0, 1.0, 1.0)] {
            assert_eq!(ids(Level::Baseline, &weights, &rules), [1]);
        }
    }

    #[test]
    fn top_k_keeps_ties_with_the_last_token() {
        let weights = [0.5, 1.0, 0.5, 0.25, 0.5];
        assert_eq!(ids(Level::Baseline, &weights, &sampling(2, 1.0, 0.0)), [0, 1, 2, 4]);
        assert_eq!(ids(Level::Baseline, &weights, &sampling(4, 1.0, 0.0)), [0, 1, 2, 4]);
        assert_eq!(ids(Level::Baseline, &weights, &sampling(5, 1.0, 0.0)), [0, 1, 2, 3, 4]);
        assert_eq!(ids(Level::Baseline, &weights, &sampling(u32::MAX, 1.0, 0.0)).len(), 5);
    }

    #[test]
    fn top_p_breaks_ties_by_lower_id_and_stops_at_its_mass() {
        let weights = [0.5, 1.0, 0.5];
        assert_eq!(ids(Level::Baseline, &weights, &sampling(0, 0.5, 0.0)), [1]);
        assert_eq!(ids(Level::Baseline, &weights, &sampling(0, 0.6, 0.0)), [0, 1]);
        assert_eq!(ids(Level::Baseline, &weights, &sampling(0, 0.9, 0.0)), [0, 1, 2]);
        // Top-p applies to the tokens that top-k kept.
        let weights = [1.0, 0.9, 0.9, 0.9, 0.2];
        assert_eq!(ids(Level::Baseline, &weights, &sampling(1, 0.9, 0.0)), [0]);
    }

    proptest! {
        /// Uses sharp and flat distributions, so that every cut decides some case.
        #[test]
        fn fast_sampling_filters_keep_the_tokens_of_the_reference(
            logits in prop::collection::vec(-1.0_f32..0.0, 1..400),
            sharpness in prop::sample::select(vec![0.0_f32, 0.5, 4.0, 20.0, 80.0]),
            top_k in prop::sample::select(vec![0_u32, 1, 2, 40, 399]),
            top_p in prop::sample::select(vec![1.0_f32, 0.999_99, 0.9, 0.5, 0.01]),
            min_p in prop::sample::select(vec![0.0_f32, 1e-6, 0.01, 0.5, 1.0]),
        ) {
            let mut weights: Vec<f32> = logits.iter().map(|x| (x * sharpness).exp()).collect();
            weights[logits.len() / 2] = 1.0;
            let rules = sampling(top_k, top_p, min_p);
            let want = plain(&weights, &rules);
            for level in levels() {
                // Rounding may end top-p one token earlier or later.
                let got = ids(level, &weights, &rules);
                let (few, many) = if got.len() < want.len() { (&got, &want) } else { (&want, &got) };
                let is_rounding = rules.top_p < 1.0
                    && many.len() - few.len() <= 1
                    && few.iter().all(|id| many.contains(id));
                prop_assert!(got == want || is_rounding, "{got:?} for {want:?}");
            }
        }
    }
}
