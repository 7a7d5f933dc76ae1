//! Requests the bitmask that follows each accepted token, and supplies the launched step with
//! bitmasks.

use std::sync::Arc;

use kernels::sampling::TokenMask;

use super::{
    Scheduler,
    draft_budget::RowDrafts,
    sequence::{Sequence, SequencePhase},
};
use crate::{
    constraint::{ActiveConstraint, ComputedMask, Drafting, MaskJob},
    event::{Action, SequenceId},
    executor::ExecutorLimits,
    plan::{Generation, RowMask, Slot, StepId},
};

/// A constrained row of the last launched step, which samples once its bitmask is known.
#[derive(Debug)]
pub(super) struct AwaitedMask {
    pub id: SequenceId,
    pub slot: Slot,
    pub generation: Generation,
    /// Number of tokens of the row when it samples, without its draft tokens.
    pub length: usize,
    pub drafts: Vec<u32>,
}

/// The bitmasks to compute, and the launched step that awaits bitmasks.
#[derive(Debug, Default)]
pub(super) struct MaskRequests {
    /// The last launched step, if its sampling awaits bitmasks.
    awaited: Option<(StepId, Vec<AwaitedMask>)>,
    jobs: Vec<MaskJob>,
    next_job: u64,
}

impl MaskRequests {
    /// Returns whether the last launched step awaits bitmasks.
    pub(super) fn are_awaited(&self) -> bool {
        self.awaited.is_some()
    }

    /// Records the constrained rows of a launched step.
    pub(super) fn launched(&mut self, step_id: StepId, rows: Vec<AwaitedMask>) {
        self.awaited = (!rows.is_empty()).then_some((step_id, rows));
    }

    /// Requests the next bitmask of a sequence that has accepted a token. The batch has `rows`
    /// rows.
    fn request(
        &mut self,
        id: SequenceId,
        sequence: &mut Sequence,
        rows: u32,
        limits: &ExecutorLimits,
    ) {
        let ngram_drafts = match sequence.phase() {
            SequencePhase::Running(row) => row.drafts.most,
            _ => RowDrafts::default().most,
        };
        let Some(constraint) = &mut sequence.constraint else { return };
        let drafting = || {
            let rules = limits.speculation?;
            // The number of draft tokens that a step can grant the row. Further bitmasks would not
            // be used.
            let share = (rules.step_tokens / rows).saturating_sub(1).min(rules.row_drafts);
            let most = limits.row_drafts(rows, share);
            (most > 0).then(|| Drafting {
                // One more draft token predicts the token of the step in flight.
                drafts_max: 1 + most as usize,
                ngram_drafts_max: 1 + ngram_drafts.min(most) as usize,
                rules,
            })
        };
        if let Some(job) = constraint.mask_job(id, self.next_job, &sequence.tokens, drafting) {
            self.next_job += 1;
            self.jobs.push(job);
        }
    }
}

impl Scheduler {
    /// Takes the bitmasks to compute, at most one for each sequence. The caller passes each result
    /// to [`handle_mask`](Self::handle_mask).
    pub fn take_mask_jobs(&mut self) -> Vec<MaskJob> {
        std::mem::take(&mut self.masks.jobs)
    }

    /// Processes a computed bitmask. Ignores it if its sequence has ended.
    pub fn handle_mask(&mut self, computed: ComputedMask, actions: &mut Vec<Action>) {
        let id = computed.id;
        let Some(sequence) = self.sequences.get_mut(id) else { return };
        let Some(constraint) = &mut sequence.constraint else { return };
        if let Err(failure) = constraint.take_mask(computed) {
            self.fail(id, failure.into(), actions);
        }
    }

    /// Returns the bitmasks of the last launched step once all of them are computed. `are_due` says
    /// that the forward pass has finished: then returns the computed bitmasks, and withdraws the
    /// samples of the other rows.
    pub fn supply(&mut self, are_due: bool) -> Option<(StepId, Vec<RowMask>)> {
        let (_, awaited) = self.masks.awaited.as_ref()?;
        let is_missing = |row: &AwaitedMask| self.is_running(row) && self.supplied(row).is_none();
        if !are_due && awaited.iter().any(is_missing) {
            return None;
        }
        let (step_id, awaited) = self.masks.awaited.take()?;
        let mut masks = Vec::with_capacity(awaited.len());
        for row in &awaited {
            let lengths = row.length as u32..;
            let mask = |(length, allowed): (u32, &Arc<TokenMask>)| {
                let (slot, allowed) = (row.slot, Arc::clone(allowed));
                RowMask { slot, length, allowed }
            };
            match self.supplied(row) {
                Some(constraint) => {
                    masks.extend(lengths.zip(constraint.masks_along(&row.drafts)).map(mask));
                }
                None if self.is_running(row) => self.withdraw(row),
                None => {}
            }
        }
        Some((step_id, masks))
    }

    /// Requests the next bitmask of a sequence that has accepted a token.
    pub(super) fn request_mask(&mut self, id: SequenceId) {
        let rows = self.sequences.running().len().max(1) as u32;
        let sequence = self.sequences.known_mut(id);
        self.masks.request(id, sequence, rows, &self.config.limits);
    }

    /// Returns whether the row is still in the batch.
    fn is_running(&self, row: &AwaitedMask) -> bool {
        self.slots.is_current(row.slot, row.generation)
    }

    /// Returns the row's constraint if the row's bitmask is computed and the token before it is
    /// known.
    fn supplied(&self, row: &AwaitedMask) -> Option<&ActiveConstraint> {
        let sequence = self.sequences.get(row.id).filter(|_| self.is_running(row))?;
        let is_next = sequence.tokens.len() == row.length;
        sequence.constraint.as_ref().filter(|constraint| is_next && constraint.allowed().is_some())
    }

    /// Withdraws the samples of a row whose bitmask is late. A later step computes the row's last
    /// token again.
    fn withdraw(&mut self, awaited: &AwaitedMask) {
        let row = self.sequences.row_mut(awaited.id);
        row.launched -= 1 + awaited.drafts.len();
        row.length -= 1 + awaited.drafts.len();
        row.was_late = true;
    }
}
