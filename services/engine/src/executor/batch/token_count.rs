//! Rows whose tokens stay on a device: the host knows their number.

use super::{Batch, RowTokens, ScheduledRow};
use crate::plan::Slot;

/// Number of tokens on the device after the steps launched so far, if every draft token is
/// accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenCount {
    most: usize,
    /// Draft tokens of steps in flight, included in `most`. Their acceptance is unknown.
    unknown: usize,
}

impl RowTokens for TokenCount {
    fn admitted(tokens: &[u32]) -> Self {
        Self { most: tokens.len(), unknown: 0 }
    }

    fn count(&self) -> usize {
        self.most
    }

    fn join(&mut self, drafts: &[u32]) {
        self.most += drafts.len();
        self.unknown += drafts.len();
    }

    fn retract(&mut self, count: usize) {
        self.most -= count;
        self.unknown -= count;
    }
}

impl Batch<TokenCount> {
    /// Records that the device samples a token for a row of the current step and appends it to the
    /// device's tokens.
    pub(crate) fn will_sample(&mut self, scheduled: &ScheduledRow) {
        self.row_mut(scheduled.slot).tokens.most += 1;
    }

    /// Records that the device verifies the draft tokens of a row of the current step.
    pub(crate) fn will_draft(&mut self, scheduled: &ScheduledRow) {
        let row = self.row_mut(scheduled.slot);
        row.tokens.most += scheduled.draft_count;
        row.tokens.unknown += scheduled.draft_count;
        row.position += scheduled.draft_count;
    }

    /// Records how many draft tokens of a row the device accepted. Does nothing if the sequence
    /// has left its slot.
    pub(crate) fn drafts_accepted(&mut self, scheduled: &ScheduledRow, accepted: usize) {
        let ScheduledRow { slot, generation, draft_count, is_late, .. } = *scheduled;
        if is_late {
            return;
        }
        let occupant = self.rows[slot.0 as usize].as_mut();
        if let Some(row) = occupant.filter(|row| row.generation == generation) {
            row.tokens.unknown -= draft_count;
            row.tokens.most -= draft_count - accepted;
            row.position -= draft_count - accepted;
        }
    }

    /// Returns the draft tokens of a row in steps in flight.
    pub(crate) fn unknown(&self, slot: Slot) -> usize {
        self.row(slot).tokens.unknown
    }

    /// Returns whether any row has draft tokens in steps in flight.
    pub(crate) fn has_unknown(&self) -> bool {
        self.rows().any(|(_, row)| row.tokens.unknown > 0)
    }
}
