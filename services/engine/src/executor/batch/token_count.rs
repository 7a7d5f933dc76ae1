//! Rows whose tokens stay on a device: the host knows their number.

use super::{Batch, RowTokens, ScheduledRow};
use crate::plan::{Generation, Slot};

/// Number of tokens on the device after the steps launched so far, if every draft token is
/// accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenCount {
    most: usize,
    /// Draft tokens of steps in flight, included in `most`. Their acceptance is unknown.
    unknown: usize,
    /// Tokens whose KV the steps in flight compute, draft tokens included.
    in_flight: usize,
}

impl RowTokens for TokenCount {
    fn admitted(tokens: &[u32]) -> Self {
        Self { most: tokens.len(), unknown: 0, in_flight: 0 }
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

    /// Records that a row's part of the current step is launched.
    pub(crate) fn launched(&mut self, scheduled: &ScheduledRow) {
        self.row_mut(scheduled.slot).tokens.in_flight += scheduled.token_count;
    }

    /// Records that a row of the current step does not sample, because its bitmask was late.
    pub(crate) fn withdrawn(&mut self, scheduled: &ScheduledRow) {
        self.row_mut(scheduled.slot).tokens.in_flight -= 1 + scheduled.draft_count;
    }

    /// Records that the device has completed a row's part of a step and accepted `accepted` of its
    /// draft tokens. Does nothing if the sequence has left its slot.
    pub(crate) fn collected(&mut self, scheduled: &ScheduledRow, accepted: usize) {
        let ScheduledRow { slot, generation, token_count, draft_count, is_late, .. } = *scheduled;
        let occupant = self.rows[slot.0 as usize].as_mut();
        let Some(row) = occupant.filter(|row| row.generation == generation) else { return };
        if is_late {
            row.tokens.in_flight -= token_count - 1 - draft_count;
            return;
        }
        row.tokens.in_flight -= token_count;
        row.tokens.unknown -= draft_count;
        row.tokens.most -= draft_count - accepted;
        row.position -= draft_count - accepted;
    }

    /// Returns the number of leading tokens of a sequence whose KV the collected steps have
    /// computed; 0 if the sequence has left its slot. No step in flight begins before this
    /// position.
    pub(crate) fn computed(&self, slot: Slot, generation: Generation) -> usize {
        let row = self.rows[slot.0 as usize].as_ref().filter(|row| row.generation == generation);
        row.map_or(0, |row| row.position - row.tokens.in_flight)
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
