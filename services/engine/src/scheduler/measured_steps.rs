//! Times of steps with decode rows. They bound the prefill and the draft tokens of later steps.

use std::time::Duration;

use super::{ItlLimit, draft_budget::DraftTimes};
use crate::frames::Frame;

#[derive(Debug, Default)]
pub(super) struct MeasuredSteps {
    /// Exponentially weighted mean of the time by which steps with decode rows exceed
    /// [`ItlLimit::step_time`]; `None` after a step without decode rows.
    extra: Option<Duration>,
    drafts: DraftTimes,
}

impl MeasuredSteps {
    /// Adds the time of a step. `itl` is the bound on steps that decode, if there is one.
    pub(super) fn add(&mut self, itl: Option<&ItlLimit>, frame: &Frame, busy: Duration) {
        let has_decode_row = || frame.rows.iter().any(|row| row.samples && row.token_count == 1);
        self.extra = match (itl, frame.prefill_cost) {
            (Some(itl), Some(prefill_cost)) if has_decode_row() => {
                let newest = busy.saturating_sub(itl.step_time(prefill_cost));
                Some((3 * self.extra.unwrap_or(newest) + newest) / 4)
            }
            _ => None,
        };
        self.drafts.add(&frame.rows, busy);
    }

    /// Returns the time by which the decode rows make a step longer than one decode row does.
    pub(super) fn extra(&self) -> Duration {
        self.extra.unwrap_or_default()
    }

    /// Returns whether a step pays off if its `rows` rows verify up to `drafts` draft tokens each,
    /// of which `expected` are accepted in all.
    pub(super) fn drafts_pay_off(&self, rows: usize, drafts: u32, expected: f32) -> bool {
        self.drafts.pays_off(rows, drafts, expected)
    }
}
