//! Requests the bitmask that follows each accepted token, and supplies the launched step with bitmasks.

use super::{Scheduler, sequence::Phase};
use crate::{
    constraint::{ComputedMask, MaskJob},
    event::{Action, SequenceId},
    plan::{Generation, RowMask, Slot, StepId},
};

/// A constrained row of the last launched step, which samples once its bitmask is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct AwaitedMask {
    pub id: SequenceId,
    pub slot: Slot,
    pub generation: Generation,
    /// Number of tokens of the row when it samples.
    pub length: usize,
}

impl Scheduler {
    /// Takes the bitmasks to compute, at most one for each sequence. The caller passes each result to
    /// [`handle_mask`](Self::handle_mask).
    pub fn take_mask_jobs(&mut self) -> Vec<MaskJob> {
        std::mem::take(&mut self.mask_jobs)
    }

    /// Processes a computed bitmask. Ignores it if its sequence has ended.
    pub fn handle_mask(&mut self, computed: ComputedMask, actions: &mut Vec<Action>) {
        let id = computed.id;
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let Some(constraint) = &mut sequence.constraint else { return };
        if let Err(failure) = constraint.take_mask(computed) {
            self.fail(id, failure.into(), actions);
        }
    }

    /// Returns the bitmasks of the last launched step once all of them are computed. If they `are_due`, the
    /// forward pass has finished: returns the computed bitmasks, and withdraws the samples of the other rows.
    pub fn supply(&mut self, are_due: bool) -> Option<(StepId, Vec<RowMask>)> {
        let (_, awaited) = self.awaited.as_ref()?;
        let is_missing = |row: &AwaitedMask| self.is_running(row) && self.mask(row).is_none();
        if !are_due && awaited.iter().any(is_missing) {
            return None;
        }
        let (step_id, awaited) = self.awaited.take()?;
        let masks = awaited.iter().filter_map(|row| {
            let mask = self.mask(row);
            if mask.is_none() && self.is_running(row) {
                self.withdraw(row.id);
            }
            mask
        });
        Some((step_id, masks.collect()))
    }

    /// Requests the next bitmask of a sequence that has accepted a token.
    pub(super) fn request_mask(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("the caller looked it up");
        let Some(constraint) = &mut sequence.constraint else { return };
        if let Some(job) = constraint.mask_job(id, self.next_mask_job) {
            self.next_mask_job += 1;
            self.mask_jobs.push(job);
        }
    }

    /// Returns whether the row has not left the batch.
    fn is_running(&self, row: &AwaitedMask) -> bool {
        self.slots.is_current(row.slot, row.generation)
    }

    /// Returns the row's bitmask if it is computed and the token before it is known.
    fn mask(&self, row: &AwaitedMask) -> Option<RowMask> {
        let sequence = self.sequences.get(&row.id).filter(|_| self.is_running(row))?;
        let is_next = sequence.tokens.len() == row.length;
        let allowed = sequence.constraint.as_ref()?.allowed().filter(|_| is_next)?.clone();
        Some(RowMask { slot: row.slot, length: row.length as u32, allowed })
    }

    /// Withdraws the sample of a row whose bitmask is late. A later step computes the row's last token again.
    fn withdraw(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("a current row's sequence is known");
        let Phase::Running(row) = &mut sequence.phase else {
            unreachable!("a current row's sequence runs");
        };
        row.launched -= 1;
        row.length -= 1;
        row.was_late = true;
    }
}
