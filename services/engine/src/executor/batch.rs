//! Running batch of an executor, advanced by plans.
//!
//! Every executor applies plans through a [`Batch`], so the rules of the diff are implemented once.
//! On the CPU the batch holds the tokens of a row, sampled tokens included: a step reads the tokens
//! that the previous step sampled, before the scheduler has seen them. When the tokens stay on a
//! device, the host holds a [`TokenCount`] instead. The batch also advances the positions.
//!
//! Draft tokens are appended to a row's tokens for the step that verifies them ([`Batch::apply`]).
//! [`Batch::sampled`] keeps the accepted draft tokens and truncates the row after them.

mod diff;
#[cfg(test)]
mod tests;
mod token_count;

use std::{ops::Range, sync::Arc};

use kernels::{
    BlockId, KvGroups,
    sampling::{SampledToken, Sampling, TokenMask},
};
pub(super) use token_count::TokenCount;

use super::{ExecutorError, ExecutorLimits};
use crate::plan::{
    AdmittedRow, Generation, RowFailure, RowMask, RowPlan, RowResult, Slot, StepPlan,
};

/// Tokens of a row on the host: the ids, or only their number.
pub(super) trait RowTokens {
    fn admitted(tokens: &[u32]) -> Self;
    fn count(&self) -> usize;
    /// Appends draft tokens.
    fn join(&mut self, drafts: &[u32]);
    /// Removes the last `count` tokens, which are draft tokens.
    fn retract(&mut self, count: usize);
}

impl RowTokens for Vec<u32> {
    fn admitted(tokens: &[u32]) -> Self {
        tokens.to_vec()
    }

    fn count(&self) -> usize {
        self.len()
    }

    fn join(&mut self, drafts: &[u32]) {
        self.extend_from_slice(drafts);
    }

    fn retract(&mut self, count: usize) {
        self.truncate(self.len() - count);
    }
}

/// Occupant of one slot.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BatchRow<T = Vec<u32>> {
    pub generation: Generation,
    /// Prompt, then sampled output, then the draft tokens of the running step.
    pub tokens: T,
    pub prompt_len: usize,
    /// Tokens whose KV is computed after the running step.
    pub position: usize,
    /// Block table. Its entries behind windows are meaningless.
    pub blocks: Vec<BlockId>,
    pub sampling: Sampling,
    /// Whether the row must not sample without a token bitmask.
    pub constrained: bool,
    /// Slot of the row's adapter.
    pub adapter: Option<u32>,
    /// Token bitmasks of the row's samples in the step supplied last, in order.
    pub allowed: Vec<Arc<TokenMask>>,
    /// Set when no token could be sampled: the row takes part in no step until it is released.
    pub failure: Option<RowFailure>,
    /// Numbers of the last plans that extended and that scheduled the row.
    extended_by: u64,
    scheduled_by: u64,
}

/// Work of one row in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScheduledRow {
    pub slot: Slot,
    pub generation: Generation,
    /// Position of the row's first token in this step.
    pub start: usize,
    /// Tokens, draft tokens included. 0 for a failed row, which takes no part in the forward pass.
    pub token_count: usize,
    pub samples: bool,
    /// Draft tokens; they are the last of the tokens.
    pub draft_count: usize,
    /// Whether the row's token bitmask was late, so that the row does not sample.
    pub is_late: bool,
}

impl ScheduledRow {
    /// Returns the work of a failed row: none.
    fn skipped<T>(planned: &RowPlan, row: &BatchRow<T>) -> Self {
        Self {
            slot: planned.slot,
            generation: planned.generation,
            start: row.position,
            token_count: 0,
            samples: false,
            draft_count: 0,
            is_late: false,
        }
    }

    pub(super) fn end(&self) -> usize {
        self.start + self.token_count
    }

    /// Returns the lengths of the row at which it samples: after the known tokens and after each
    /// draft token.
    pub(super) fn sampled_lengths(&self) -> Range<usize> {
        self.end() - self.draft_count..self.end() + usize::from(self.samples)
    }
}

#[derive(Debug)]
pub(super) struct Batch<T = Vec<u32>> {
    rows: Vec<Option<BatchRow<T>>>,
    limits: ExecutorLimits,
    kv_groups: KvGroups,
    /// Plans applied, the current one included.
    plans: u64,
}

impl<T: RowTokens> Batch<T> {
    pub(super) fn new(limits: ExecutorLimits) -> Self {
        Self {
            rows: (0..limits.slots).map(|_| None).collect(),
            limits,
            kv_groups: KvGroups::default(),
            plans: 0,
        }
    }

    /// Sets the KV groups of the block tables. By default there is one.
    pub(super) fn with_kv_groups(self, kv_groups: KvGroups) -> Self {
        Self { kv_groups, ..self }
    }

    /// Applies the diff and advances the rows of the step by their tokens and draft tokens. An
    /// admitted row fails if `refuse` returns a reason. `draft` returns at most the given number of
    /// draft tokens of a row. After an error the batch is unusable.
    pub(super) fn apply(
        &mut self,
        plan: &StepPlan,
        refuse: impl Fn(&AdmittedRow) -> Option<RowFailure>,
        draft: impl FnMut(&BatchRow<T>, usize) -> Vec<u32>,
    ) -> Result<Vec<ScheduledRow>, ExecutorError> {
        let step_id = plan.step_id;
        let scheduled = self.change(plan, refuse).and_then(|()| self.schedule(plan, draft));
        scheduled.map_err(|reason| ExecutorError::BadPlan { step_id, reason })
    }

    /// Supplies the token bitmasks of the step applied last, in the order of its rows. Marks a
    /// constrained row without a bitmask as late and removes its last token and its draft tokens
    /// from the step. Bitmasks of a failed row are dropped: they were computed before the failure
    /// was known.
    pub(super) fn supply(
        &mut self,
        scheduled: &mut [ScheduledRow],
        masks: Vec<RowMask>,
    ) -> Result<(), String> {
        let mut masks = masks.into_iter().peekable();
        for planned in scheduled {
            let row = self.row_mut(planned.slot);
            if row.failure.is_some() {
                while masks.next_if(|mask| mask.slot == planned.slot).is_some() {}
                continue;
            }
            if !planned.samples || !row.constrained {
                continue;
            }
            row.allowed.clear();
            for expected in planned.sampled_lengths() {
                let Some(mask) = masks.next_if(|mask| mask.slot == planned.slot) else { break };
                if mask.length as usize != expected {
                    let (slot, length) = (mask.slot.0, mask.length);
                    return Err(format!(
                        "slot {slot} has {expected} tokens, but a bitmask for {length}"
                    ));
                }
                row.allowed.push(mask.allowed);
            }
            if row.allowed.is_empty() {
                planned.is_late = true;
                row.tokens.retract(planned.draft_count);
                row.position -= 1 + planned.draft_count;
            }
        }
        match masks.next() {
            Some(mask) => Err(format!("slot {} has a bitmask that no row awaits", mask.slot.0)),
            None => Ok(()),
        }
    }

    /// Returns the occupant of a slot of the current step.
    pub(super) fn row(&self, slot: Slot) -> &BatchRow<T> {
        self.rows[slot.0 as usize].as_ref().expect("a scheduled slot is occupied")
    }

    /// Returns every occupant.
    pub(super) fn rows(&self) -> impl Iterator<Item = (Slot, &BatchRow<T>)> {
        let slots = (0..).map(Slot);
        slots.zip(&self.rows).filter_map(|(slot, row)| Some((slot, row.as_ref()?)))
    }

    /// Returns the result of a row of the current step that did not sample or has failed.
    pub(super) fn unsampled(&self, scheduled: &ScheduledRow) -> RowResult {
        let ScheduledRow { slot, generation, .. } = *scheduled;
        let failure = self.row(slot).failure.clone();
        let (tokens, prompt_logprobs) = (Vec::new(), Vec::new());
        RowResult { slot, generation, tokens, prompt_logprobs, drafted: 0, failure }
    }

    fn row_mut(&mut self, slot: Slot) -> &mut BatchRow<T> {
        self.rows[slot.0 as usize].as_mut().expect("a scheduled slot is occupied")
    }
}

impl<T> BatchRow<T> {
    /// Returns whether the step computes log-probabilities of prompt tokens after tokens of the
    /// row.
    pub(super) fn scores_prompt(&self, scheduled: &ScheduledRow) -> bool {
        self.sampling.prompt_logprobs.is_some()
            && scheduled.token_count > 0
            && scheduled.start + 1 < self.prompt_len
    }
}

impl Batch {
    /// Processes the samples of a row of the current step, one for each of its
    /// [`sampled_lengths`](ScheduledRow::sampled_lengths), and returns the row's result. The first
    /// sample counts. Each further sample counts as long as the draft token before it equals the
    /// token sampled in its place. A sample of a constrained row without a bitmask does not count.
    /// The samples that count are appended to the row's tokens. A failure marks the row as failed,
    /// except a failure after accepted draft tokens: it recurs in the next step.
    pub(super) fn sampled(
        &mut self,
        scheduled: &ScheduledRow,
        answers: impl IntoIterator<Item = Result<SampledToken, RowFailure>>,
    ) -> RowResult {
        let row = self.row_mut(scheduled.slot);
        let known = scheduled.end() - scheduled.draft_count;
        let mut chosen: Vec<SampledToken> = Vec::with_capacity(1);
        let samples_max = if row.constrained { row.allowed.len() } else { usize::MAX };
        for (length, answer) in scheduled.sampled_lengths().zip(answers).take(samples_max) {
            match answer {
                Ok(token) => chosen.push(token),
                Err(failure) if chosen.is_empty() => row.failure = Some(failure),
                Err(_) => {}
            }
            let draft = row.tokens.get(length);
            if draft.is_none() || draft != chosen.get(length - known).map(|token| &token.id) {
                break;
            }
        }
        row.tokens.truncate(known);
        row.tokens.extend(chosen.iter().map(|token| token.id));
        let right = chosen.len().saturating_sub(1);
        row.position = known + right;
        let drafted = scheduled.draft_count as u32;
        RowResult { tokens: chosen, drafted, ..self.unsampled(scheduled) }
    }
}
