//! Running batch of an executor, advanced by plans.
//!
//! Every executor applies plans through a [`Batch`], so the rules of the diff are implemented once. On the
//! CPU the batch holds the tokens of a row, sampled tokens included: a step reads the tokens that the
//! previous step sampled, before the scheduler has seen them. When the tokens stay on a device, the host
//! holds a [`TokenCount`] instead. The batch also advances the positions.
//!
//! Draft tokens are appended to a row's tokens for the step that verifies them ([`Batch::apply`]).
//! [`Batch::sampled`] keeps the accepted draft tokens and truncates the row after them.

use std::{ops::Range, sync::Arc};

use kernels::{
    BLOCK_TOKENS, BlockId,
    sampling::{SampledToken, Sampling, TokenMask},
};

use super::{ExecutorError, ExecutorLimits};
use crate::plan::{
    AdmittedRow, Generation, RowFailure, RowMask, RowPlan, RowResult, Slot, StepPlan,
};

/// Tokens of a row on the host: the ids, or only their number.
pub trait Tokens {
    fn admitted(tokens: &[u32]) -> Self;
    fn count(&self) -> usize;
    /// Appends draft tokens.
    fn join(&mut self, drafts: &[u32]);
    /// Removes the last `count` tokens, which are draft tokens.
    fn retract(&mut self, count: usize);
}

impl Tokens for Vec<u32> {
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

/// Number of tokens on the device after the steps launched so far, if every draft token is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCount {
    most: usize,
    /// Draft tokens of steps in flight, included in `most`. Their acceptance is unknown.
    unknown: usize,
}

impl Tokens for TokenCount {
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

/// Occupant of one slot.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchRow<T = Vec<u32>> {
    pub generation: Generation,
    /// Prompt, then sampled output, then the draft tokens of the running step.
    pub tokens: T,
    pub prompt_len: usize,
    /// Tokens whose KV is computed after the running step.
    pub position: usize,
    pub blocks: Vec<BlockId>,
    pub sampling: Sampling,
    /// Whether the row must not sample without a token bitmask.
    pub constrained: bool,
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
pub struct ScheduledRow {
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

    pub fn end(&self) -> usize {
        self.start + self.token_count
    }

    /// Returns the lengths of the row at which it samples: after the known tokens and after each draft
    /// token.
    pub fn sampled_lengths(&self) -> Range<usize> {
        self.end() - self.draft_count..self.end() + usize::from(self.samples)
    }
}

#[derive(Debug)]
pub struct Batch<T = Vec<u32>> {
    rows: Vec<Option<BatchRow<T>>>,
    limits: ExecutorLimits,
    /// Plans applied, the current one included.
    plans: u64,
}

impl<T: Tokens> Batch<T> {
    pub fn new(limits: ExecutorLimits) -> Self {
        Self { rows: (0..limits.slots).map(|_| None).collect(), limits, plans: 0 }
    }

    /// Applies the diff and advances the rows of the step by their tokens and draft tokens. An admitted row
    /// fails if `refuse` returns a reason. `draft` returns at most the given number of draft tokens of a row.
    /// After an error the batch is unusable.
    pub fn apply(
        &mut self,
        plan: &StepPlan,
        refuse: impl Fn(&AdmittedRow) -> Option<RowFailure>,
        draft: impl FnMut(&BatchRow<T>, usize) -> Vec<u32>,
    ) -> Result<Vec<ScheduledRow>, ExecutorError> {
        let step_id = plan.step_id;
        let scheduled = self.change(plan, refuse).and_then(|()| self.schedule(plan, draft));
        scheduled.map_err(|reason| ExecutorError::BadPlan { step_id, reason })
    }

    /// Supplies the token bitmasks of the step applied last, in the order of its rows. Marks a constrained row
    /// without a bitmask as late and removes its last token and its draft tokens from the step. Bitmasks of a failed
    /// row are dropped: they were computed before the failure was known.
    pub fn supply(
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
    pub fn row(&self, slot: Slot) -> &BatchRow<T> {
        self.rows[slot.0 as usize].as_ref().expect("a scheduled slot is occupied")
    }

    /// Returns every occupant.
    pub fn rows(&self) -> impl Iterator<Item = (Slot, &BatchRow<T>)> {
        let slots = (0..).map(Slot);
        slots.zip(&self.rows).filter_map(|(slot, row)| Some((slot, row.as_ref()?)))
    }

    /// Returns the result of a row of the current step that did not sample or has failed.
    pub fn unsampled(&self, scheduled: &ScheduledRow) -> RowResult {
        let ScheduledRow { slot, generation, .. } = *scheduled;
        let failure = self.row(slot).failure.clone();
        RowResult { slot, generation, tokens: Vec::new(), drafted: 0, failure }
    }

    fn row_mut(&mut self, slot: Slot) -> &mut BatchRow<T> {
        self.rows[slot.0 as usize].as_mut().expect("a scheduled slot is occupied")
    }

    /// Applies the diff: released, admitted and extended rows.
    fn change(
        &mut self,
        plan: &StepPlan,
        refuse: impl Fn(&AdmittedRow) -> Option<RowFailure>,
    ) -> Result<(), String> {
        self.plans += 1;
        for &slot in &plan.released {
            let row = self.slot(slot)?.take();
            row.ok_or_else(|| format!("slot {} is released but empty", slot.0))?;
        }
        for admitted in &plan.admitted {
            self.admit(admitted, refuse(admitted))?;
        }
        let plans = self.plans;
        for (slot, blocks) in &plan.extended {
            self.check_blocks(blocks)?;
            let row = self.slot(*slot)?.as_mut();
            let row = row.ok_or_else(|| format!("slot {} is extended but empty", slot.0))?;
            if std::mem::replace(&mut row.extended_by, plans) == plans {
                return Err(format!("slot {} is extended twice", slot.0));
            }
            row.blocks.extend_from_slice(blocks);
        }
        Ok(())
    }

    fn schedule(
        &mut self,
        plan: &StepPlan,
        mut draft: impl FnMut(&BatchRow<T>, usize) -> Vec<u32>,
    ) -> Result<Vec<ScheduledRow>, String> {
        let tokens: usize = plan.rows.iter().map(|row| row.token_count as usize).sum();
        let drafts_left = plan.drafts_max as usize;
        let is_empty = plan.rows.is_empty() && plan.released.is_empty();
        if is_empty || tokens + drafts_left > self.limits.step_tokens as usize {
            return Err(format!(
                "the step has {} rows with {tokens} tokens and {drafts_left} draft tokens; expected 1 to {} tokens",
                plan.rows.len(),
                self.limits.step_tokens
            ));
        }
        if drafts_left > 0 && self.limits.speculation.is_none() {
            return Err(format!(
                "{drafts_left} draft tokens are planned, but speculative decoding is off"
            ));
        }
        let known: usize = plan.drafts.iter().map(|(_, drafts)| drafts.len()).sum();
        let Some(mut drafts_left) = drafts_left.checked_sub(known) else {
            return Err(format!(
                "the plan has {known} draft tokens; expected at most {drafts_left}"
            ));
        };
        let mut known = plan.drafts.iter().peekable();
        let plans = self.plans;
        let mut scheduled: Vec<ScheduledRow> = Vec::with_capacity(plan.rows.len());
        for planned in &plan.rows {
            let known = known.next_if(|(slot, _)| *slot == planned.slot).map(|(_, drafts)| drafts);
            let vocabulary = self.limits.vocabulary;
            let Some(row) = self.slot(planned.slot)? else {
                return Err(format!("slot {} is planned but empty", planned.slot.0));
            };
            let slot = planned.slot.0;
            if row.generation != planned.generation {
                let (expected, got) = (row.generation, planned.generation);
                return Err(format!(
                    "slot {slot} has generation {expected}, but the plan has {got}"
                ));
            }
            if std::mem::replace(&mut row.scheduled_by, plans) == plans {
                return Err(format!("slot {slot} is planned twice"));
            }
            if row.failure.is_some() {
                // The row was planned before its failure was known.
                scheduled.push(ScheduledRow::skipped(planned, row));
                continue;
            }
            let (start, token_count) = (row.position, planned.token_count as usize);
            let end = start + token_count;
            let length = row.tokens.count();
            if token_count == 0 || end > length {
                return Err(format!("slot {slot} plans tokens {start}..{end} of {length}"));
            }
            if planned.samples != (end == length) {
                return Err(format!("slot {slot} must sample after its last token and only there"));
            }
            if planned.samples && row.constrained && !plan.awaits_masks {
                return Err(format!("slot {slot} is constrained, but the step awaits no bitmasks"));
            }
            let drafts_max = planned.drafts_max as usize;
            let known_count = known.map_or(0, Vec::len);
            let expected = if row.constrained { drafts_max } else { 0 };
            if known_count != expected {
                return Err(format!(
                    "slot {slot} has {known_count} draft tokens in the plan; expected {expected}"
                ));
            }
            if let Some(token) = known.into_iter().flatten().find(|token| **token >= vocabulary) {
                return Err(format!("slot {slot} has draft token {token}, outside the vocabulary"));
            }
            if drafts_max > 0 && !planned.samples {
                return Err(format!(
                    "slot {slot} has {drafts_max} draft tokens and does not sample"
                ));
            }
            let upper = end + drafts_max;
            if upper > row.blocks.len() * BLOCK_TOKENS {
                let blocks = row.blocks.len();
                return Err(format!("slot {slot} plans to position {upper} with {blocks} blocks"));
            }
            let drafts = match known {
                Some(known) => known.clone(),
                None => {
                    let most = drafts_max.min(drafts_left);
                    let mut found = if most > 0 { draft(row, most) } else { Vec::new() };
                    found.truncate(most);
                    drafts_left -= found.len();
                    found
                }
            };
            row.tokens.join(&drafts);
            row.position = end + drafts.len();
            scheduled.push(ScheduledRow {
                slot: planned.slot,
                generation: planned.generation,
                start,
                token_count: token_count + drafts.len(),
                samples: planned.samples,
                draft_count: drafts.len(),
                is_late: false,
            });
        }
        match known.next() {
            Some((slot, _)) => Err(format!("slot {} has draft tokens, but no row", slot.0)),
            None => Ok(scheduled),
        }
    }

    fn admit(&mut self, admitted: &AdmittedRow, failure: Option<RowFailure>) -> Result<(), String> {
        let slot = admitted.slot.0;
        self.check_blocks(&admitted.blocks)?;
        let (known, most) = (admitted.tokens.len(), self.limits.sequence_tokens as usize);
        let (computed, prompt_len) = (admitted.computed as usize, admitted.prompt_len as usize);
        if computed >= known || known > most || prompt_len > known {
            return Err(format!(
                "slot {slot} is admitted with {known} tokens (at most {most}), {computed} of them \
                 computed, {prompt_len} of them the prompt"
            ));
        }
        if let Some(&token) = admitted.tokens.iter().find(|&&id| id >= self.limits.vocabulary) {
            return Err(format!("slot {slot} has token {token}, outside the vocabulary"));
        }
        let place = self.slot(admitted.slot)?;
        if place.is_some() {
            return Err(format!("slot {slot} is admitted but occupied"));
        }
        *place = Some(BatchRow {
            generation: admitted.generation,
            tokens: T::admitted(&admitted.tokens),
            prompt_len,
            position: computed,
            blocks: admitted.blocks.clone(),
            sampling: admitted.sampling.clone(),
            constrained: admitted.constrained,
            allowed: Vec::new(),
            failure,
            extended_by: 0,
            scheduled_by: 0,
        });
        Ok(())
    }

    fn slot(&mut self, slot: Slot) -> Result<&mut Option<BatchRow<T>>, String> {
        let slots = self.limits.slots;
        let row = self.rows.get_mut(slot.0 as usize);
        row.ok_or_else(|| format!("invalid slot {}; expected less than {slots}", slot.0))
    }

    fn check_blocks(&self, blocks: &[BlockId]) -> Result<(), String> {
        match blocks.iter().find(|block| block.0 >= self.limits.blocks) {
            Some(block) => {
                Err(format!("invalid block {}; expected less than {}", block.0, self.limits.blocks))
            }
            None => Ok(()),
        }
    }
}

impl Batch {
    /// Processes the samples of a row of the current step, one for each of its
    /// [`sampled_lengths`](ScheduledRow::sampled_lengths), and returns the row's result. The first sample counts. Each
    /// further sample counts as long as the draft token before it equals the token sampled in its place. A sample of a
    /// constrained row without a bitmask does not count. The samples that count are appended to the row's tokens. A
    /// failure marks the row as failed, except a failure after accepted draft tokens: it recurs in the next step.
    pub fn sampled(
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

impl Batch<TokenCount> {
    /// Records that the device samples a token for a row of the current step and appends it to the device's tokens.
    pub fn will_sample(&mut self, scheduled: &ScheduledRow) {
        self.row_mut(scheduled.slot).tokens.most += 1;
    }

    /// Records that the device verifies the draft tokens of a row of the current step.
    pub fn will_draft(&mut self, scheduled: &ScheduledRow) {
        let row = self.row_mut(scheduled.slot);
        row.tokens.most += scheduled.draft_count;
        row.tokens.unknown += scheduled.draft_count;
        row.position += scheduled.draft_count;
    }

    /// Records how many draft tokens of a row the device accepted. Does nothing when the occupant has left.
    pub fn drafts_accepted(&mut self, scheduled: &ScheduledRow, accepted: usize) {
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
    pub fn unknown(&self, slot: Slot) -> usize {
        self.row(slot).tokens.unknown
    }

    /// Returns whether any row has draft tokens in steps in flight.
    pub fn has_unknown(&self) -> bool {
        self.rows().any(|(_, row)| row.tokens.unknown > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::Speculation;

    const LIMITS: ExecutorLimits = ExecutorLimits {
        slots: 2,
        step_tokens: 8,
        sequence_tokens: 64,
        blocks: 4,
        depth: 2,
        vocabulary: 100,
        speculation: Some(Speculation {
            row_drafts: 4,
            step_tokens: 8,
            ngram_min: 1,
            ngram_max: 1,
            uniform: false,
        }),
    };

    fn admitted(tokens: usize, computed: u32) -> AdmittedRow {
        AdmittedRow {
            slot: Slot(0),
            generation: 3,
            tokens: (0..tokens as u32).collect(),
            prompt_len: tokens as u32,
            computed,
            blocks: vec![BlockId(1)],
            sampling: Sampling::greedy(),
            constrained: false,
        }
    }

    fn row(token_count: u32, samples: bool) -> RowPlan {
        RowPlan { slot: Slot(0), generation: 3, token_count, samples, drafts_max: 0 }
    }

    fn plan(admitted: Vec<AdmittedRow>, rows: Vec<RowPlan>) -> StepPlan {
        StepPlan { step_id: 5, admitted, rows, ..StepPlan::default() }
    }

    fn apply(batch: &mut Batch, plan: &StepPlan) -> Result<Vec<ScheduledRow>, ExecutorError> {
        batch.apply(plan, |_| None, |_, _| panic!("no drafts are planned"))
    }

    fn token(id: u32) -> Result<SampledToken, RowFailure> {
        Ok(SampledToken { id, logprobs: None })
    }

    fn ids(result: &RowResult) -> Vec<u32> {
        result.tokens.iter().map(|token| token.id).collect()
    }

    /// Returns a step of a row with six tokens and at most two draft tokens after them.
    fn drafting(drafts: &[u32]) -> (Batch, ScheduledRow) {
        let mut batch = Batch::new(LIMITS);
        let plan = StepPlan {
            drafts_max: 2,
            ..plan(vec![admitted(6, 0)], vec![RowPlan { drafts_max: 8, ..row(6, true) }])
        };
        let scheduled = batch.apply(
            &plan,
            |_| None,
            |_, most| {
                assert_eq!(most, 2, "the step's bound is below the row's");
                drafts.to_vec()
            },
        );
        let scheduled = scheduled.expect("fits")[0];
        assert_eq!(scheduled.token_count, 6 + drafts.len());
        assert_eq!(scheduled.sampled_lengths(), 6..7 + drafts.len());
        (batch, scheduled)
    }

    #[test]
    fn draft_tokens_are_accepted_up_to_the_first_wrong_one_and_one_token_follows() {
        let draws = [
            (vec![50, 51], [60, 61, 62], vec![60]),
            (vec![50, 51], [50, 61, 62], vec![50, 61]),
            (vec![50, 51], [50, 51, 62], vec![50, 51, 62]),
            (vec![50], [50, 61, 62], vec![50, 61]),
            (vec![], [60, 61, 62], vec![60]),
        ];
        for (drafts, answers, kept) in draws {
            let (mut batch, scheduled) = drafting(&drafts);
            let result = batch.sampled(&scheduled, answers.map(token));
            assert_eq!((ids(&result), result.drafted), (kept.clone(), drafts.len() as u32));
            let occupant = batch.row(Slot(0));
            assert_eq!(occupant.tokens[6..], kept);
            assert_eq!(
                occupant.position,
                6 + kept.len() - 1,
                "the KV of the last token is not computed"
            );
            // The next step continues after the kept tokens.
            let next = apply(&mut batch, &plan(vec![], vec![row(1, true)])).expect("fits");
            assert_eq!((next[0].start, next[0].token_count), (6 + kept.len() - 1, 1));
        }
    }

    #[test]
    fn a_failure_after_accepted_drafts_recurs_and_one_after_a_rejected_draft_does_not() {
        let nonsense = || Err(RowFailure::Logits { reason: "NaN".into() });
        let (mut batch, scheduled) = drafting(&[50, 51]);
        let result = batch.sampled(&scheduled, [token(50), nonsense(), token(1)]);
        assert_eq!((ids(&result), result.failure), (vec![50], None));
        let next = apply(&mut batch, &plan(vec![], vec![row(1, true)])).expect("fits");
        assert_eq!(next[0].start, 6, "the draft is computed again, as the last known token");
        let result = batch.sampled(&next[0], [nonsense()]);
        assert!(result.failure.is_some());

        let (mut batch, scheduled) = drafting(&[50, 51]);
        let result = batch.sampled(&scheduled, [token(60), nonsense(), nonsense()]);
        assert_eq!((ids(&result), result.failure), (vec![60], None));
    }

    #[test]
    fn positions_advance_and_sampled_tokens_are_inputs_of_the_next_step() {
        let mut batch = Batch::new(LIMITS);
        let first =
            apply(&mut batch, &plan(vec![admitted(6, 0)], vec![row(4, false)])).expect("fits");
        assert_eq!((first[0].start, first[0].end()), (0, 4));
        let sampling = apply(&mut batch, &plan(vec![], vec![row(2, true)])).expect("fits");
        batch.sampled(&sampling[0], [token(42)]);
        let third = apply(&mut batch, &plan(vec![], vec![row(1, true)])).expect("fits");
        assert_eq!((third[0].start, third[0].token_count), (6, 1));
        assert_eq!(batch.row(Slot(0)).tokens[6], 42);
    }

    #[test]
    fn a_plan_that_contradicts_the_batch_is_rejected_with_the_reason() {
        let contradictions = [
            (plan(vec![admitted(6, 6)], vec![row(1, true)]), "6 of them computed"),
            (plan(vec![admitted(6, 0)], vec![row(6, false)]), "must sample after its last token"),
            (plan(vec![admitted(6, 0)], vec![row(7, true)]), "tokens 0..7 of 6"),
            (plan(vec![admitted(6, 0)], vec![row(9, true)]), "1 rows with 9 tokens"),
            (plan(vec![admitted(6, 0)], vec![]), "0 rows"),
            (plan(vec![admitted(20, 15)], vec![row(5, true)]), "position 20 with 1 blocks"),
            (plan(vec![admitted(200, 0)], vec![row(5, false)]), "200 tokens (at most 64)"),
            (plan(vec![], vec![row(1, true)]), "planned but empty"),
            (
                StepPlan { drafts_max: 3, ..plan(vec![admitted(6, 0)], vec![row(6, true)]) },
                "6 tokens and 3 draft tokens",
            ),
            (
                plan(vec![admitted(6, 0)], vec![RowPlan { drafts_max: 1, ..row(5, false) }]),
                "does not sample",
            ),
            (
                plan(vec![admitted(6, 0)], vec![RowPlan { drafts_max: 11, ..row(6, true) }]),
                "position 17 with 1 blocks",
            ),
            (plan(vec![admitted(6, 0), admitted(6, 0)], vec![row(1, false)]), "occupied"),
            (plan(vec![admitted(6, 0)], vec![row(1, false); 2]), "planned twice"),
            (
                StepPlan {
                    extended: vec![(Slot(0), vec![BlockId(2)]); 2],
                    ..plan(vec![admitted(6, 0)], vec![row(1, false)])
                },
                "extended twice",
            ),
            (
                StepPlan { released: vec![Slot(1)], ..plan(vec![], vec![row(1, true)]) },
                "slot 1 is released but empty",
            ),
            (
                StepPlan {
                    extended: vec![(Slot(0), vec![BlockId(4)])],
                    ..plan(vec![admitted(6, 0)], vec![row(1, false)])
                },
                "invalid block 4; expected less than 4",
            ),
        ];
        for (plan, reason) in contradictions {
            let error = apply(&mut Batch::new(LIMITS), &plan).expect_err(reason).to_string();
            assert!(error.contains(reason), "{error}");
            assert!(error.contains("step 5"), "{error}");
        }
    }

    #[test]
    fn a_failed_row_takes_no_part_until_it_is_released() {
        let mut batch = Batch::new(LIMITS);
        let first =
            apply(&mut batch, &plan(vec![admitted(6, 0)], vec![row(6, true)])).expect("fits");
        let failure = RowFailure::Sampling { reason: "all masked".into() };
        let result = batch.sampled(&first[0], [Err(failure.clone())]);
        assert_eq!(result.failure, Some(failure.clone()));
        // The next step was launched before the failure was known.
        let second = apply(&mut batch, &plan(vec![], vec![row(1, true)])).expect("is skipped");
        assert_eq!((second[0].token_count, second[0].samples), (0, false));
        assert_eq!(batch.unsampled(&second[0]).failure, Some(failure));
        let again =
            StepPlan { released: vec![Slot(0)], ..plan(vec![admitted(6, 0)], vec![row(6, true)]) };
        assert_eq!(apply(&mut batch, &again).expect("fits")[0].token_count, 6);
    }

    #[test]
    fn a_constrained_row_samples_with_its_bitmask_only() {
        let constrained = || AdmittedRow { constrained: true, ..admitted(6, 0) };
        let mask = |slot, length| {
            let allowed = Arc::new(TokenMask::new(vec![1], LIMITS.vocabulary));
            RowMask { slot: Slot(slot), length, allowed }
        };
        let whole =
            StepPlan { awaits_masks: true, ..plan(vec![constrained()], vec![row(6, true)]) };
        let supplied = |masks| {
            let mut batch = Batch::new(LIMITS);
            let mut scheduled = apply(&mut batch, &whole).expect("fits");
            batch.supply(&mut scheduled, masks)?;
            let row = batch.row(Slot(0));
            Ok::<_, String>((!row.allowed.is_empty(), row.position, scheduled[0].is_late))
        };
        assert_eq!(supplied(vec![mask(0, 6)]), Ok((true, 6, false)));
        assert_eq!(supplied(vec![]), Ok((false, 5, true)));
        for masks in [vec![mask(0, 5)], vec![mask(1, 6)], vec![mask(0, 6), mask(0, 6)]] {
            assert!(supplied(masks).is_err());
        }
        let unannounced = StepPlan { awaits_masks: false, ..whole.clone() };
        let error = apply(&mut Batch::new(LIMITS), &unannounced).expect_err("no masks will come");
        assert!(error.to_string().contains("awaits no bitmasks"), "{error}");
        // A row does not sample before its last known token.
        let chunk = plan(vec![constrained()], vec![row(4, false)]);
        assert_eq!(apply(&mut Batch::new(LIMITS), &chunk).expect("fits")[0].token_count, 4);
    }

    #[test]
    fn a_constrained_row_verifies_the_draft_tokens_of_the_plan_up_to_its_last_bitmask() {
        let planned = |known: Vec<u32>| StepPlan {
            awaits_masks: true,
            drafts_max: 2,
            drafts: vec![(Slot(0), known)],
            ..plan(
                vec![AdmittedRow { constrained: true, ..admitted(6, 0) }],
                vec![RowPlan { drafts_max: 2, ..row(6, true) }],
            )
        };
        let mask = |length| {
            let allowed = Arc::new(TokenMask::new(vec![u32::MAX; 4], LIMITS.vocabulary));
            RowMask { slot: Slot(0), length, allowed }
        };
        // The model agrees with both draft tokens.
        let answers = [7, 8, 9].map(|id| Ok(SampledToken { id, logprobs: None }));
        for (masks, tokens) in [(3, 3), (2, 2), (1, 1), (0, 0)] {
            let mut batch = Batch::new(LIMITS);
            let mut scheduled = apply(&mut batch, &planned(vec![7, 8])).expect("fits");
            assert_eq!((scheduled[0].token_count, scheduled[0].draft_count), (8, 2));
            batch.supply(&mut scheduled, (6..6 + masks).map(mask).collect()).expect("in order");
            assert_eq!(scheduled[0].is_late, masks == 0);
            if masks > 0 {
                let result = batch.sampled(&scheduled[0], answers.clone());
                assert_eq!((result.tokens.len(), result.drafted), (tokens, 2));
            }
            let row = batch.row(Slot(0));
            let position = if masks == 0 { 5 } else { 5 + tokens };
            assert_eq!((row.tokens.len(), row.position), (6 + tokens, position), "{masks} masks");
        }
        let mut batch = Batch::new(LIMITS);
        let mut scheduled = apply(&mut batch, &planned(vec![7, 8])).expect("fits");
        let error = batch.supply(&mut scheduled, vec![mask(6), mask(8)]).expect_err("has a gap");
        assert_eq!(error, "slot 0 has 7 tokens, but a bitmask for 8");
        let of = |known| StepPlan { drafts: known, ..planned(vec![]) };
        for (plan, reason) in [
            (of(vec![(Slot(0), vec![7, 8, 9])]), "has 3 draft tokens; expected at most 2"),
            (of(vec![(Slot(0), vec![7])]), "slot 0 has 1 draft tokens in the plan; expected 2"),
            (of(vec![(Slot(0), vec![7, 100])]), "draft token 100, outside the vocabulary"),
            (of(vec![]), "slot 0 has 0 draft tokens in the plan; expected 2"),
        ] {
            let error = apply(&mut Batch::new(LIMITS), &plan).expect_err(reason).to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_row_of_an_earlier_occupant_is_rejected() {
        let mut batch = Batch::new(LIMITS);
        apply(&mut batch, &plan(vec![admitted(6, 0)], vec![row(1, false)])).expect("fits");
        let stale = RowPlan { generation: 2, ..row(1, false) };
        assert!(apply(&mut batch, &plan(vec![], vec![stale])).is_err());
    }
}
