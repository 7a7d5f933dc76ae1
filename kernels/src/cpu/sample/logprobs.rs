//! Log-probabilities of a chosen token and of the best ones.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::{super::isa::Level, total, weigh};
use crate::sampling::TokenLogprobs;

/// Returns the log-probabilities. `logits` are raw, and none is NaN or +∞. `best` is the greatest
/// logit, `chosen` a token id.
pub(super) fn of(
    level: Level,
    logits: &[f32],
    best: f32,
    chosen: u32,
    count: u32,
) -> TokenLogprobs {
    let mut weights = vec![0.0_f32; logits.len()];
    weigh(level, logits, best, 1.0, &mut weights);
    let log_total = total(level, &weights, 0.0).ln();
    let logprob = |id: u32| (f64::from(logits[id as usize]) - f64::from(best) - log_total) as f32;
    let top = top_ids(logits, count).into_iter().map(|id| (id, logprob(id))).collect();
    TokenLogprobs { chosen: logprob(chosen), top, rank: None }
}

/// Returns the log-probabilities as [`of`] does, with the rank of the token.
pub(super) fn of_given(
    level: Level,
    logits: &[f32],
    best: f32,
    scored: u32,
    count: u32,
) -> TokenLogprobs {
    let own = logits[scored as usize];
    let greater = logits.iter().filter(|&&logit| logit > own).count();
    TokenLogprobs { rank: Some(1 + greater as u32), ..of(level, logits, best, scored, count) }
}

/// Returns the ids of the `count` greatest logits, best first, ties by the lower id.
pub(super) fn top_ids(logits: &[f32], count: u32) -> Vec<u32> {
    let count = (count as usize).min(logits.len());
    // The heap's top is the worst of the best tokens so far. A separate copy of its logit rejects
    // most tokens quickly.
    let mut top: BinaryHeap<Reverse<(OrderedFloat, Reverse<u32>)>> = BinaryHeap::new();
    let mut worst = f32::NEG_INFINITY;
    for (id, &logit) in (0_u32..).zip(logits) {
        // A later token with an equal logit has the higher id and loses.
        if top.len() == count && logit <= worst {
            continue;
        }
        top.push(Reverse((OrderedFloat(logit), Reverse(id))));
        if top.len() > count {
            top.pop();
        }
        if let Some(Reverse((OrderedFloat(logit), _))) = top.peek()
            && top.len() == count
        {
            worst = *logit;
        }
    }
    let mut sorted = top.into_vec();
    sorted.sort_unstable();
    sorted.into_iter().map(|Reverse((_, Reverse(id)))| id).collect()
}

/// Float that is not NaN, in numeric order.
#[derive(Clone, Copy, Debug)]
struct OrderedFloat(f32);

impl Ord for OrderedFloat {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // Zeros are equal: adding zero makes both positive.
        (self.0 + 0.0).total_cmp(&(other.0 + 0.0))
    }
}

impl PartialOrd for OrderedFloat {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for OrderedFloat {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for OrderedFloat {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn top_ids_equal_those_of_a_full_sort(
            logits in prop::collection::vec(prop::sample::select(vec![
                f32::NEG_INFINITY, -2.0, -0.0, 0.0, 1.0, 1.5, 7.0,
            ]), 0..60),
            count in 0_u32..70,
        ) {
            let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
            ids.sort_by(|&a, &b| {
                logits[b as usize].partial_cmp(&logits[a as usize]).unwrap().then(a.cmp(&b))
            });
            ids.truncate(count as usize);
            prop_assert_eq!(top_ids(&logits, count), ids);
        }
    }
}
