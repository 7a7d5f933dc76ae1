//! The running batch as an executor holds it, advanced by plans.
//!
//! Every executor applies plans through [`Batch::apply`], so the rules of the diff stand here once.
//! The tokens of a row live here, sampled ones included: a step reads what the step before
//! sampled without the scheduler having seen it. Positions advance here as well.

use kernels::{
    BLOCK_TOKENS, BlockId,
    sampling::{SampledToken, Sampling},
};

use super::{ExecutorError, ExecutorLimits};
use crate::plan::{AdmittedRow, Generation, RowFailure, RowResult, Slot, StepPlan};

/// The occupant of one slot.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchRow {
    pub generation: Generation,
    /// Prompt, then output, as far as it is sampled.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Tokens whose KV is computed, or is by the end of the step being run.
    pub position: usize,
    pub blocks: Vec<BlockId>,
    pub sampling: Sampling,
    /// No token could be chosen: the row computes nothing any more until it is released.
    pub failure: Option<RowFailure>,
}

impl BatchRow {
    /// Index in the whole answer of the token that is sampled next.
    pub fn output_index(&self) -> u32 {
        (self.tokens.len() - self.prompt_len) as u32
    }
}

/// What one row computes in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledRow {
    pub slot: Slot,
    pub generation: Generation,
    /// Position of its first token in this step.
    pub start: usize,
    /// 0 for a row that has failed: it takes no part in the forward.
    pub token_count: usize,
    pub samples: bool,
}

impl ScheduledRow {
    pub fn end(&self) -> usize {
        self.start + self.token_count
    }
}

#[derive(Debug)]
pub struct Batch {
    rows: Vec<Option<BatchRow>>,
    limits: ExecutorLimits,
}

impl Batch {
    pub fn new(limits: ExecutorLimits) -> Self {
        Self { rows: (0..limits.slots).map(|_| None).collect(), limits }
    }

    /// Applies the diff and advances the rows of the step by their tokens. After an error the
    /// batch is of no more use.
    pub fn apply(&mut self, plan: &StepPlan) -> Result<Vec<ScheduledRow>, ExecutorError> {
        let step_id = plan.step_id;
        self.apply_or(plan).map_err(|reason| ExecutorError::BadPlan { step_id, reason })
    }

    /// The occupant of a slot that is part of the present step.
    pub fn row(&self, slot: Slot) -> &BatchRow {
        self.rows[slot.0 as usize].as_ref().expect("a scheduled slot is occupied")
    }

    /// Every occupant.
    pub fn rows(&self) -> impl Iterator<Item = (Slot, &BatchRow)> {
        let slots = (0..).map(Slot);
        slots.zip(&self.rows).filter_map(|(slot, row)| Some((slot, row.as_ref()?)))
    }

    /// Takes what sampling brought for a row of the present step: the token joins the row's tokens,
    /// a failure stays with the occupant. Returns the row's result.
    pub fn sampled(
        &mut self,
        scheduled: &ScheduledRow,
        token: Result<SampledToken, RowFailure>,
    ) -> RowResult {
        let row = self.row_mut(scheduled.slot);
        match token {
            Ok(token) => {
                row.tokens.push(token.id);
                RowResult { tokens: vec![token], ..self.unsampled(scheduled) }
            }
            Err(failure) => {
                row.failure = Some(failure);
                self.unsampled(scheduled)
            }
        }
    }

    /// The result of a row of the present step that did not sample, or has failed.
    pub fn unsampled(&self, scheduled: &ScheduledRow) -> RowResult {
        let ScheduledRow { slot, generation, .. } = *scheduled;
        let failure = self.row(slot).failure.clone();
        RowResult { slot, generation, tokens: Vec::new(), failure }
    }

    fn row_mut(&mut self, slot: Slot) -> &mut BatchRow {
        self.rows[slot.0 as usize].as_mut().expect("a scheduled slot is occupied")
    }

    fn apply_or(&mut self, plan: &StepPlan) -> Result<Vec<ScheduledRow>, String> {
        for &slot in &plan.released {
            let row = self.slot(slot)?.take();
            row.ok_or_else(|| format!("slot {} is released but empty", slot.0))?;
        }
        for admitted in &plan.admitted {
            self.admit(admitted)?;
        }
        for (slot, blocks) in &plan.extended {
            self.check_blocks(blocks)?;
            let row = self.slot(*slot)?.as_mut();
            let row = row.ok_or_else(|| format!("slot {} is extended but empty", slot.0))?;
            row.blocks.extend_from_slice(blocks);
        }
        let tokens: usize = plan.rows.iter().map(|row| row.token_count as usize).sum();
        if plan.rows.is_empty() || tokens > self.limits.step_tokens as usize {
            return Err(format!(
                "{} rows with {tokens} tokens, allowed are 1 to {} tokens",
                plan.rows.len(),
                self.limits.step_tokens
            ));
        }
        let mut scheduled: Vec<ScheduledRow> = Vec::with_capacity(plan.rows.len());
        for planned in &plan.rows {
            let Some(row) = self.slot(planned.slot)? else {
                return Err(format!("slot {} is planned but empty", planned.slot.0));
            };
            let slot = planned.slot.0;
            if row.generation != planned.generation {
                let (expected, got) = (row.generation, planned.generation);
                return Err(format!("slot {slot} has generation {expected}, planned is {got}"));
            }
            if row.failure.is_some() {
                // Planned before its failure was known.
                scheduled.push(ScheduledRow {
                    slot: planned.slot,
                    generation: planned.generation,
                    start: row.position,
                    token_count: 0,
                    samples: false,
                });
                continue;
            }
            let (start, token_count) = (row.position, planned.token_count as usize);
            let end = start + token_count;
            if token_count == 0 || end > row.tokens.len() {
                let known = row.tokens.len();
                return Err(format!("slot {slot} plans tokens {start}..{end} of {known}"));
            }
            if planned.samples != (end == row.tokens.len()) {
                return Err(format!("slot {slot} samples before its last token, or not after it"));
            }
            if end > row.blocks.len() * BLOCK_TOKENS {
                let blocks = row.blocks.len();
                return Err(format!("slot {slot} plans to position {end} with {blocks} blocks"));
            }
            if scheduled.iter().any(|other| other.slot == planned.slot) {
                return Err(format!("slot {slot} is planned twice"));
            }
            row.position = end;
            scheduled.push(ScheduledRow {
                slot: planned.slot,
                generation: planned.generation,
                start,
                token_count,
                samples: planned.samples,
            });
        }
        Ok(scheduled)
    }

    fn admit(&mut self, admitted: &AdmittedRow) -> Result<(), String> {
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
            tokens: admitted.tokens.clone(),
            prompt_len,
            position: computed,
            blocks: admitted.blocks.clone(),
            sampling: admitted.sampling.clone(),
            failure: None,
        });
        Ok(())
    }

    fn slot(&mut self, slot: Slot) -> Result<&mut Option<BatchRow>, String> {
        let slots = self.limits.slots;
        let row = self.rows.get_mut(slot.0 as usize);
        row.ok_or_else(|| format!("slot {} is not one of {slots}", slot.0))
    }

    fn check_blocks(&self, blocks: &[BlockId]) -> Result<(), String> {
        match blocks.iter().find(|block| block.0 >= self.limits.blocks) {
            Some(block) => Err(format!("block {} is not one of {}", block.0, self.limits.blocks)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::RowPlan;

    const LIMITS: ExecutorLimits = ExecutorLimits {
        slots: 2,
        step_tokens: 8,
        sequence_tokens: 64,
        blocks: 4,
        depth: 2,
        vocabulary: 100,
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
        }
    }

    fn row(token_count: u32, samples: bool) -> RowPlan {
        RowPlan { slot: Slot(0), generation: 3, token_count, samples }
    }

    fn plan(admitted: Vec<AdmittedRow>, rows: Vec<RowPlan>) -> StepPlan {
        StepPlan { step_id: 5, admitted, rows, ..StepPlan::default() }
    }

    #[test]
    fn positions_advance_with_the_steps_and_sampled_tokens_are_read_back() {
        let mut batch = Batch::new(LIMITS);
        let first = batch.apply(&plan(vec![admitted(6, 0)], vec![row(4, false)])).expect("fits");
        assert_eq!((first[0].start, first[0].end()), (0, 4));
        let sampling = batch.apply(&plan(vec![], vec![row(2, true)])).expect("fits");
        batch.sampled(&sampling[0], Ok(SampledToken { id: 42, logprobs: None }));
        assert_eq!(batch.row(Slot(0)).output_index(), 1);
        let third = batch.apply(&plan(vec![], vec![row(1, true)])).expect("fits");
        assert_eq!((third[0].start, third[0].token_count), (6, 1));
        assert_eq!(batch.row(Slot(0)).tokens[6], 42);
    }

    #[test]
    fn a_plan_that_contradicts_the_batch_is_refused_by_name() {
        let contradictions = [
            (plan(vec![admitted(6, 6)], vec![row(1, true)]), "6 of them computed"),
            (plan(vec![admitted(6, 0)], vec![row(6, false)]), "samples before its last token"),
            (plan(vec![admitted(6, 0)], vec![row(7, true)]), "tokens 0..7 of 6"),
            (plan(vec![admitted(6, 0)], vec![row(9, true)]), "1 rows with 9 tokens"),
            (plan(vec![admitted(6, 0)], vec![]), "0 rows"),
            (plan(vec![admitted(20, 15)], vec![row(5, true)]), "position 20 with 1 blocks"),
            (plan(vec![admitted(200, 0)], vec![row(5, false)]), "200 tokens (at most 64)"),
            (plan(vec![], vec![row(1, true)]), "planned but empty"),
            (plan(vec![admitted(6, 0), admitted(6, 0)], vec![row(1, false)]), "occupied"),
            (
                StepPlan { released: vec![Slot(1)], ..plan(vec![], vec![row(1, true)]) },
                "slot 1 is released but empty",
            ),
            (
                StepPlan {
                    extended: vec![(Slot(0), vec![BlockId(4)])],
                    ..plan(vec![admitted(6, 0)], vec![row(1, false)])
                },
                "block 4 is not one of 4",
            ),
        ];
        for (plan, reason) in contradictions {
            let error = Batch::new(LIMITS).apply(&plan).expect_err(reason).to_string();
            assert!(error.contains(reason), "{error}");
            assert!(error.contains("step 5"), "{error}");
        }
    }

    #[test]
    fn a_failed_row_takes_no_part_until_it_is_released() {
        let mut batch = Batch::new(LIMITS);
        let first = batch.apply(&plan(vec![admitted(6, 0)], vec![row(6, true)])).expect("fits");
        let failure = RowFailure::Sampling { reason: "all masked".into() };
        let result = batch.sampled(&first[0], Err(failure.clone()));
        assert_eq!(result.failure, Some(failure.clone()));
        // The next step was launched before anyone knew.
        let second = batch.apply(&plan(vec![], vec![row(1, true)])).expect("is skipped");
        assert_eq!((second[0].token_count, second[0].samples), (0, false));
        assert_eq!(batch.unsampled(&second[0]).failure, Some(failure));
        let again =
            StepPlan { released: vec![Slot(0)], ..plan(vec![admitted(6, 0)], vec![row(6, true)]) };
        assert_eq!(batch.apply(&again).expect("fits")[0].token_count, 6);
    }

    #[test]
    fn a_row_of_an_earlier_occupant_is_refused() {
        let mut batch = Batch::new(LIMITS);
        batch.apply(&plan(vec![admitted(6, 0)], vec![row(1, false)])).expect("fits");
        let stale = RowPlan { generation: 2, ..row(1, false) };
        assert!(batch.apply(&plan(vec![], vec![stale])).is_err());
    }
}
