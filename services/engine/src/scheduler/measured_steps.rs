//! Measured step times. Those of steps with decode rows reduce the prefill budget of later steps;
//! those of decode-only steps decide whether draft tokens pay off.

use std::time::Duration;

use super::{ItlLimit, draft_budget::DraftTimes};
use crate::frames::Frame;

#[derive(Debug, Default)]
pub(super) struct MeasuredSteps {
    /// Exponentially weighted mean of measured minus expected time of steps with decode rows, where
    /// [`ItlLimit::step_time`] expects one decode row. `None` if the last step had no decode row or
    /// no time bound.
    decode_extra: Option<Duration>,
    drafts: DraftTimes,
}

impl MeasuredSteps {
    /// Adds the time of a step. `itl` is the bound on steps that decode, if there is one.
    pub(super) fn add(&mut self, itl: Option<&ItlLimit>, frame: &Frame, busy: Duration) {
        let has_decode_row = || frame.rows.iter().any(|row| row.samples && row.token_count == 1);
        self.decode_extra = match (itl, frame.prefill_cost) {
            (Some(itl), Some(prefill_cost)) if has_decode_row() => {
                let newest = busy.saturating_sub(itl.step_time(prefill_cost));
                Some((3 * self.decode_extra.unwrap_or(newest) + newest) / 4)
            }
            _ => None,
        };
        self.drafts.add(&frame.rows, busy);
    }

    /// Returns how much longer a step takes with the current decode rows than with one decode row.
    pub(super) fn decode_extra(&self) -> Duration {
        self.decode_extra.unwrap_or_default()
    }

    /// Returns whether verifying up to `drafts` draft tokens in each of `rows` rows is expected to
    /// raise throughput if `expected` draft tokens in total are accepted.
    pub(super) fn drafts_pay_off(&self, rows: usize, drafts: u32, expected: f32) -> bool {
        self.drafts.pays_off(rows, drafts, expected)
    }
}
