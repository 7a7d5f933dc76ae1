//! How long the KV of a finished turn is kept in memory for the next turn of its conversation.
//!
//! Pure: times of past turns go in, a time comes out. Without the KV the next turn also needs a
//! load or a prefill. While the KV is kept, the KV of other turns is evicted sooner. The policy
//! chooses the time with the greatest expected benefit.

use std::{collections::VecDeque, time::Duration};

/// Maximum time for which the policy keeps KV. A client may ask for more.
pub(crate) const KEEP_MAX: Duration = Duration::from_secs(60);
/// Candidate times are earlier gaps times this factor, because a turn may come somewhat later than
/// an earlier turn.
const MARGIN: f32 = 1.25;
/// Minimum number of a conversation's own gaps to predict its next gap. With fewer, the gaps of all
/// conversations count.
const OWN_GAPS_MIN: usize = 2;
/// Weight of the prior probability of a return, in turns (pseudo-counts).
const PRIOR: f32 = 2.0;
/// Finished turns after which the counts are halved, so that they follow the workload.
const TURNS_MAX: f32 = 1024.0;

/// Turns of one conversation, or of all conversations.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ReturnGaps {
    /// Seconds between the end of a turn and the arrival of the next turn: the newest `gaps_max`.
    gaps: VecDeque<f32>,
    gaps_max: usize,
    /// Number of finished turns, and of turns that a next turn has continued; decayed.
    finished: f32,
    continued: f32,
}

impl ReturnGaps {
    pub(crate) fn new(gaps_max: usize) -> Self {
        Self { gaps: VecDeque::new(), gaps_max, finished: 0.0, continued: 0.0 }
    }

    /// Counts the end of a turn.
    pub(crate) fn add_end(&mut self) {
        if self.finished >= TURNS_MAX {
            (self.finished, self.continued) = (self.finished / 2.0, self.continued / 2.0);
        }
        self.finished += 1.0;
    }

    /// Counts a turn that arrived `gap` after the end of the turn before.
    pub(crate) fn add_gap(&mut self, gap: Duration) {
        if self.gaps.len() >= self.gaps_max {
            self.gaps.pop_front();
        }
        self.gaps.push_back(gap.as_secs_f32());
        self.continued = (self.continued + 1.0).min(self.finished);
    }

    /// Returns the probability that a turn is continued: the counts, smoothed by the probability
    /// `prior`.
    fn return_probability(&self, prior: f32) -> f32 {
        (self.continued + PRIOR * prior) / (self.finished + PRIOR)
    }
}

/// Returns for how long to keep the KV of a turn that has just ended: the time with the greatest
/// expected benefit, 0 if no time has any. `own` and `all`: earlier turns of the conversation and
/// of all conversations. `restore`: the time by which the next turn takes longer without the KV.
/// `share`: the KV's share of the memory.
pub(crate) fn keep_time(
    own: &ReturnGaps,
    all: &ReturnGaps,
    restore: Duration,
    share: f32,
) -> Duration {
    let all_return = all.return_probability(0.5);
    let returns = own.return_probability(all_return);
    let gaps = if own.gaps.len() >= OWN_GAPS_MIN { &own.gaps } else { &all.gaps };
    let mut gaps: Vec<f32> = gaps.iter().copied().collect();
    gaps.sort_unstable_by(f32::total_cmp);
    let count = gaps.len() as f32;
    let (mut best, mut keep) = (0.0, 0.0);
    let mut within_sum = 0.0;
    let mut within = 0;
    for &gap in &gaps {
        let time = (gap * MARGIN).min(KEEP_MAX.as_secs_f32());
        while let Some(next) = gaps.get(within).filter(|next| **next <= time) {
            within_sum += next;
            within += 1;
        }
        let continued = returns * within as f32 / count;
        // Expected time for which memory is held: until the next turn, or until the time ends.
        let held = returns * within_sum / count + (1.0 - continued) * time;
        // Expected cost for other turns, whose KV is evicted meanwhile.
        let lost = share * held * all_return;
        let benefit = continued * restore.as_secs_f32() - lost;
        if benefit > best {
            (best, keep) = (benefit, time);
        }
    }
    Duration::from_secs_f32(keep)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESTORE: Duration = Duration::from_millis(200);

    fn seconds(seconds: f32) -> Duration {
        Duration::from_secs_f32(seconds)
    }

    /// Returns turns that were all continued after these gaps, and turns that were not.
    fn returns(gaps: &[f32], without: usize) -> ReturnGaps {
        let mut returns = ReturnGaps::new(64);
        (0..gaps.len() + without).for_each(|_| returns.add_end());
        gaps.iter().for_each(|&gap| returns.add_gap(seconds(gap)));
        returns
    }

    #[test]
    fn kv_is_kept_a_little_longer_than_the_gaps_of_its_conversation() {
        let own = returns(&[0.5, 0.6, 0.4], 0);
        let all = returns(&[9.0; 30], 30);
        let keep = keep_time(&own, &all, RESTORE, 0.03);
        assert!(keep > seconds(0.6) && keep < seconds(0.9), "{keep:?}");
    }

    #[test]
    fn first_turn_is_kept_as_the_gaps_of_other_conversations_tell() {
        let own = ReturnGaps::new(8);
        let all = returns(&[1.0; 30], 3);
        assert_eq!(keep_time(&own, &all, RESTORE, 0.03), seconds(1.25));
        let late = returns(&[9.0; 30], 3);
        assert_eq!(keep_time(&own, &late, RESTORE, 0.03), Duration::ZERO);
        assert_eq!(keep_time(&own, &ReturnGaps::new(8), RESTORE, 0.03), Duration::ZERO);
    }

    #[test]
    fn kv_is_not_kept_when_its_memory_is_worth_more_than_its_time() {
        let own = returns(&[2.0; 4], 0);
        let all = ReturnGaps::new(64);
        let keep = |restore, share| keep_time(&own, &all, restore, share);
        assert_eq!(keep(RESTORE, 0.03), seconds(2.5));
        assert_eq!(keep(RESTORE, 0.5), Duration::ZERO, "half of the memory for two seconds");
        assert_eq!(keep(RESTORE / 10, 0.03), Duration::ZERO, "a load from a tier is faster");
        assert_eq!(keep(Duration::ZERO, 0.0), Duration::ZERO);
    }

    #[test]
    fn conversation_that_returns_is_kept_longer_where_others_do_not_return() {
        let own = returns(&[20.0; 4], 0);
        assert_eq!(keep_time(&own, &returns(&[20.0; 30], 0), RESTORE, 0.03), Duration::ZERO);
        assert_eq!(keep_time(&own, &returns(&[20.0; 4], 60), RESTORE, 0.03), seconds(25.0));
    }

    #[test]
    fn rare_long_gap_does_not_prolong_the_time() {
        let own = returns(&[0.5, 0.5, 0.5, 0.5, 0.5, 50.0], 0);
        assert_eq!(keep_time(&own, &ReturnGaps::new(64), RESTORE, 0.03), seconds(0.625));
        let always = returns(&[3000.0; 4], 0);
        assert!(keep_time(&always, &ReturnGaps::new(64), RESTORE * 100, 0.0) <= KEEP_MAX);
    }

    #[test]
    fn memory_and_counts_are_bounded() {
        let mut returns = ReturnGaps::new(8);
        for _ in 0..10_000 {
            returns.add_end();
            returns.add_gap(seconds(1.0));
            assert!(returns.gaps.len() <= 8 && returns.continued <= returns.finished);
            assert!(returns.finished <= TURNS_MAX);
        }
    }
}
