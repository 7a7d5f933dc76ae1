//! Draft tokens that the rows of a step may verify.
//!
//! Each row has a budget that follows its acceptance rate. A step gets draft tokens if they are
//! expected to raise the throughput. The scheduler measures the mean time of decode steps for each
//! number of rows and draft tokens, and compares it with the mean time without draft tokens. Small
//! steps are bound by memory bandwidth, so draft tokens cost little. Large steps are bound by
//! arithmetic, so they get none.

use std::time::Duration;

use crate::plan::RowPlan;

/// Number of steps between two probes. A probe verifies one draft token per row although draft
/// tokens do not pay off, to detect when the text becomes repetitive.
const PROBE_STEPS: u64 = 64;
/// Weight of the newest step in a mean time.
const NEWEST: f32 = 0.125;
/// Number of decode steps after which a mean time expires and is measured again. The times change
/// with the context, and steps with draft tokens may not occur while steps without them are faster,
/// or the reverse.
const EXPIRY_STEPS: u64 = 1024;
/// Number of size classes: powers of two from 1 to 65,536.
const SIZES: usize = 17;

/// Mean time of decode steps, by rows and draft tokens per row.
#[derive(Debug)]
pub(super) struct DraftTimes {
    /// First index: size class of the rows. Second index: 0 without draft tokens, otherwise their
    /// size class plus 1.
    means: [[MeanTime; SIZES + 1]; SIZES],
    /// Decode steps measured so far.
    steps: u64,
}

/// Exponentially weighted mean time of steps.
#[derive(Clone, Copy, Debug, Default)]
struct MeanTime {
    /// 0 means not measured.
    seconds: f32,
    /// Number of the decode step that was measured last.
    measured_at: u64,
}

/// Draft budget of one row.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowDrafts {
    /// Maximum draft tokens of the next step. After a step with draft tokens: twice the granted
    /// number if all were accepted, otherwise the accepted number plus 1.
    pub(super) most: u32,
    /// Mean number of draft tokens accepted in a step.
    accepted: f32,
}

impl Default for RowDrafts {
    /// Returns the budget of a new row: one draft token at an acceptance rate of one half.
    fn default() -> Self {
        Self { most: 1, accepted: 0.5 }
    }
}

impl RowDrafts {
    /// Updates the budget after a step for which the row was granted `granted` draft tokens.
    pub(super) fn on_verified(&mut self, granted: u32, drafted: u32, accepted: u32) {
        self.accepted = (self.accepted + accepted as f32) / 2.0;
        self.most = match drafted {
            0 => self.most,
            _ if accepted == drafted => granted.saturating_mul(2),
            _ => accepted + 1,
        };
    }

    /// Returns how many of `granted` draft tokens are expected to be accepted.
    pub(super) fn expected(&self, granted: u32) -> f32 {
        self.accepted.min(granted as f32)
    }
}

/// Returns the size class of `count`: the exponent of the smallest power of two that is at least
/// `count`.
fn size(count: u32) -> usize {
    (count.max(1).next_power_of_two().trailing_zeros() as usize).min(SIZES - 1)
}

/// Returns the index of the mean time with this number of draft tokens per row.
fn column(drafts: u32) -> usize {
    if drafts == 0 { 0 } else { 1 + size(drafts) }
}

impl Default for DraftTimes {
    fn default() -> Self {
        Self { means: [[MeanTime::default(); SIZES + 1]; SIZES], steps: 0 }
    }
}

impl DraftTimes {
    /// Returns the mean time in seconds, or 0 if it is not measured or has expired.
    fn of(&self, rows: usize, drafts: u32) -> f32 {
        let mean = self.means[size(rows as u32)][column(drafts)];
        if self.steps - mean.measured_at < EXPIRY_STEPS { mean.seconds } else { 0.0 }
    }

    /// Adds the time of a step. Ignores steps with prefill rows.
    pub(super) fn add(&mut self, rows: &[RowPlan], busy: Duration) {
        if decodes(rows) {
            let drafts = rows.iter().map(|row| row.drafts_max).max().unwrap_or(0);
            let (mean, newest) = (self.of(rows.len(), drafts), busy.as_secs_f32());
            let seconds = if mean == 0.0 { newest } else { mean + (newest - mean) * NEWEST };
            self.steps += 1;
            self.means[size(rows.len() as u32)][column(drafts)] =
                MeanTime { seconds, measured_at: self.steps };
        }
    }

    /// Returns whether a step of `rows` rows with up to `drafts` draft tokens each pays off, if
    /// `expected` draft tokens are accepted. Returns false until a step without draft tokens is
    /// measured. Returns true for a step with draft tokens that is not measured yet, so that it is
    /// measured.
    pub(super) fn pays_off(&self, rows: usize, drafts: u32, expected: f32) -> bool {
        let (plain, verifying) = (self.of(rows, 0), self.of(rows, drafts));
        let rows = rows as f32;
        plain > 0.0 && (rows + expected) * plain > rows * verifying
    }
}

/// Returns whether every row decodes.
pub(super) fn decodes(rows: &[RowPlan]) -> bool {
    rows.iter().all(|row| row.token_count == 1 && row.samples)
}

/// Returns whether the step is a probe.
pub(super) fn probes(step_id: u64) -> bool {
    step_id % PROBE_STEPS == PROBE_STEPS - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Slot;

    fn rows(count: usize, drafts_max: u32) -> Vec<RowPlan> {
        let row =
            RowPlan { slot: Slot(0), generation: 0, token_count: 1, samples: true, drafts_max };
        vec![row; count]
    }

    fn milliseconds(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    #[test]
    fn a_row_that_rejects_draft_tokens_gets_fewer() {
        let mut row = RowDrafts::default();
        let mut granted = Vec::new();
        for accepted in [4, 1, 2, 0, 1, 2, 4] {
            let count = row.most.min(4);
            granted.push(count);
            row.on_verified(count, count, accepted.min(count));
        }
        assert_eq!(granted, [1, 2, 2, 4, 1, 2, 4]);
        row.on_verified(4, 0, 0);
        assert_eq!(row.most, 8, "no occurrence was found");
    }

    #[test]
    fn expected_tokens_follow_the_accepted_ones() {
        let mut row = RowDrafts::default();
        assert_eq!(row.expected(8), 0.5);
        (0..20).for_each(|_| row.on_verified(8, 8, 8));
        assert!(row.expected(8) > 7.9 && row.expected(3) == 3.0);
        (0..20).for_each(|_| row.on_verified(8, 0, 0));
        assert!(row.expected(8) < 0.01);
    }

    #[test]
    fn draft_tokens_pay_off_where_steps_with_them_take_little_longer() {
        let mut times = DraftTimes::default();
        assert!(!times.pays_off(1, 8, 8.0), "the plain step is measured first");
        times.add(&rows(1, 0), milliseconds(10));
        assert!(times.pays_off(1, 8, 0.1), "a step with draft tokens is measured next");
        times.add(&rows(1, 8), milliseconds(11));
        assert!(times.pays_off(1, 8, 0.2) && !times.pays_off(1, 8, 0.05));
        times.add(&rows(128, 0), milliseconds(20));
        times.add(&rows(128, 1), milliseconds(34));
        assert!(times.pays_off(128, 1, 100.0) && !times.pays_off(128, 1, 80.0));
        assert!(!times.pays_off(1, 8, 0.05), "other numbers of rows have their own times");
    }

    #[test]
    fn times_follow_the_last_steps_and_ignore_prefill() {
        let mut times = DraftTimes::default();
        times.add(&rows(3, 0), milliseconds(10));
        times.add(&rows(3, 2), milliseconds(30));
        assert!(!times.pays_off(3, 2, 1.5));
        let mut mixed = rows(3, 2);
        mixed[1].token_count = 9;
        times.add(&mixed, milliseconds(1));
        assert!(!times.pays_off(4, 2, 1.5), "three and four rows have the same size");
        (0..40).for_each(|_| times.add(&rows(4, 2), milliseconds(12)));
        assert!(times.pays_off(3, 2, 1.5));
    }

    #[test]
    fn expired_times_are_measured_again() {
        let mut times = DraftTimes::default();
        times.add(&rows(1, 0), milliseconds(10));
        times.add(&rows(1, 8), milliseconds(100));
        assert!(!times.pays_off(1, 8, 8.0));
        (0..EXPIRY_STEPS).for_each(|_| times.add(&rows(1, 0), milliseconds(10)));
        assert!(times.pays_off(1, 8, 1.0), "the time with draft tokens is too old");
        times.add(&rows(1, 8), milliseconds(11));
        (0..EXPIRY_STEPS).for_each(|_| times.add(&rows(1, 8), milliseconds(11)));
        assert!(!times.pays_off(1, 8, 8.0), "the time without draft tokens is too old");
        times.add(&rows(1, 0), milliseconds(5));
        assert!(times.pays_off(1, 8, 2.0) && !times.pays_off(1, 8, 1.0));
    }

    #[test]
    fn every_64th_step_probes() {
        assert_eq!((0..200).filter(|step| probes(*step)).collect::<Vec<_>>(), [63, 127, 191]);
    }
}
