//! What the host knows of the running batch: who is in each slot, how long it is and which blocks it
//! has. Tokens are the device's; of those that it has sampled only the number is known here.

use std::sync::Arc;

use kernels::{BLOCK_TOKENS, BlockId, cuda::StepRows, sampling::TokenMask};

use super::super::ExecutorLimits;
use crate::plan::{AdmittedRow, Generation, RowFailure, RowMask, RowPlan, Slot, StepPlan};

/// Stop tokens that a row may have beside `min_tokens`.
pub const STOPS_MAX: u32 = 64;
/// Alternatives that a row may ask for.
const LOGPROBS_MAX: u32 = 32;

/// The occupant of one slot.
#[derive(Debug)]
struct Row {
    generation: Generation,
    /// Tokens whose KV is computed by the end of the steps launched so far.
    position: usize,
    /// Tokens that the device has by then.
    length: usize,
    blocks: Vec<BlockId>,
    wants_logprobs: bool,
    constrained: bool,
    /// The host has refused it: it takes no part in forwards until it is released.
    failure: Option<RowFailure>,
}

/// One row of a launched plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Scheduled {
    pub slot: Slot,
    pub generation: Generation,
    pub samples: bool,
    pub failure: Option<RowFailure>,
}

/// A plan as the device is to have it.
#[derive(Debug, Default)]
pub struct Step {
    /// One for every row of the plan, in its order.
    pub scheduled: Vec<Scheduled>,
    /// Those that take part in the forward.
    pub sequences: Vec<StepRows>,
    /// One for every sample.
    pub wants_logprobs: Vec<bool>,
    pub masks: Vec<Arc<TokenMask>>,
    /// Indices of admitted rows that go to the device.
    pub admitted: Vec<usize>,
    /// Indices of extensions, and the blocks that the table had.
    pub extended: Vec<(usize, u32)>,
    pub reads: Vec<BlockId>,
    pub writes: Vec<BlockId>,
}

#[derive(Debug)]
pub struct Rows {
    rows: Vec<Option<Row>>,
    limits: ExecutorLimits,
}

impl Rows {
    pub fn new(limits: ExecutorLimits) -> Self {
        Self { rows: (0..limits.slots).map(|_| None).collect(), limits }
    }

    /// Applies the diff and advances the rows of the step. After an error they are of no more use.
    pub fn apply(&mut self, plan: &StepPlan) -> Result<Step, String> {
        let mut step = Step::default();
        for &slot in &plan.released {
            let row = self.slot(slot)?.take();
            row.ok_or_else(|| format!("slot {} is released but empty", slot.0))?;
        }
        for (index, admitted) in plan.admitted.iter().enumerate() {
            if self.admit(admitted)? {
                step.admitted.push(index);
            }
        }
        for (index, (slot, blocks)) in plan.extended.iter().enumerate() {
            self.check_blocks(blocks)?;
            let row = self.slot(*slot)?.as_mut();
            let row = row.ok_or_else(|| format!("slot {} is extended but empty", slot.0))?;
            step.extended.push((index, row.blocks.len() as u32));
            row.blocks.extend_from_slice(blocks);
        }
        let tokens: u64 = plan.rows.iter().map(|row| u64::from(row.token_count)).sum();
        if plan.rows.is_empty() || tokens > self.limits.step_tokens.into() || plan.drafts_max > 0 {
            return Err(format!(
                "{} rows with {tokens} tokens and {} drafts, allowed are 1 to {} tokens without drafts",
                plan.rows.len(),
                plan.drafts_max,
                self.limits.step_tokens
            ));
        }
        for planned in &plan.rows {
            if step.scheduled.iter().any(|other| other.slot == planned.slot) {
                return Err(format!("slot {} is planned twice", planned.slot.0));
            }
            self.schedule(planned, &plan.masks, &mut step)?;
        }
        Ok(step)
    }

    fn schedule(
        &mut self,
        planned: &RowPlan,
        masks: &[RowMask],
        step: &mut Step,
    ) -> Result<(), String> {
        let slot = planned.slot.0;
        let Some(row) = self.slot(planned.slot)? else {
            return Err(format!("slot {slot} is planned but empty"));
        };
        if row.generation != planned.generation {
            let (expected, got) = (row.generation, planned.generation);
            return Err(format!("slot {slot} has generation {expected}, planned is {got}"));
        }
        let (start, end) = (row.position, row.position + planned.token_count as usize);
        let mut mask = None;
        if row.failure.is_none() {
            if planned.token_count == 0 || end > row.length {
                let known = row.length;
                return Err(format!("slot {slot} plans tokens {start}..{end} of {known}"));
            }
            if planned.samples != (end == row.length) {
                return Err(format!("slot {slot} samples before its last token, or not after it"));
            }
            if end > row.blocks.len() * BLOCK_TOKENS {
                let blocks = row.blocks.len();
                return Err(format!("slot {slot} plans to position {end} with {blocks} blocks"));
            }
            if planned.samples && row.constrained {
                let has_place =
                    |mask: &&RowMask| mask.slot == planned.slot && mask.length as usize == end;
                match masks.iter().find(has_place) {
                    Some(found) => mask = Some(Arc::clone(&found.allowed)),
                    // Rather no token than one that its grammar may not allow.
                    None => row.failure = Some(RowFailure::NoMask { position: end as u32 }),
                }
            }
        }
        let failure = row.failure.clone();
        let samples = planned.samples && failure.is_none();
        let (slot, generation) = (planned.slot, planned.generation);
        step.scheduled.push(Scheduled { slot, generation, samples, failure });
        if row.failure.is_some() {
            return Ok(());
        }
        row.position = end;
        row.length += usize::from(samples);
        let (read, written) =
            row.blocks[..end.div_ceil(BLOCK_TOKENS)].split_at(start / BLOCK_TOKENS);
        step.reads.extend_from_slice(read);
        step.writes.extend_from_slice(written);
        if samples {
            step.wants_logprobs.push(row.wants_logprobs);
        }
        step.sequences.push(StepRows {
            slot: slot.0,
            position: start as u32,
            rows: planned.token_count,
            samples: samples.into(),
            mask: mask.is_some().then_some(step.masks.len() as u32),
        });
        step.masks.extend(mask);
        Ok(())
    }

    /// True when the device is to know of it.
    fn admit(&mut self, admitted: &AdmittedRow) -> Result<bool, String> {
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
        let failure = refusal(admitted);
        let is_taken = failure.is_none();
        *place = Some(Row {
            generation: admitted.generation,
            position: computed,
            length: known,
            blocks: admitted.blocks.clone(),
            wants_logprobs: admitted.sampling.logprobs.is_some(),
            constrained: admitted.constrained,
            failure,
        });
        Ok(is_taken)
    }

    fn slot(&mut self, slot: Slot) -> Result<&mut Option<Row>, String> {
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

/// What the device's sampling cannot do for a row.
fn refusal(admitted: &AdmittedRow) -> Option<RowFailure> {
    let sampling = &admitted.sampling;
    let refused = |reason: String| Some(RowFailure::Sampling { reason });
    if let Err(error) = sampling.validate() {
        return refused(error.to_string());
    }
    let stops = sampling.stop_token_ids.len();
    if sampling.min_tokens > 0 && stops > STOPS_MAX as usize {
        return refused(format!("{stops} stop tokens beside min_tokens; at most {STOPS_MAX}"));
    }
    match sampling.logprobs {
        Some(count) if count > LOGPROBS_MAX => {
            refused(format!("logprobs is {count}; allowed is up to {LOGPROBS_MAX}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use kernels::sampling::Sampling;

    use super::*;

    const LIMITS: ExecutorLimits = ExecutorLimits {
        slots: 2,
        step_tokens: 32,
        sequence_tokens: 64,
        blocks: 8,
        depth: 2,
        vocabulary: 100,
        speculation: None,
    };

    fn admitted(slot: u32, tokens: usize, computed: u32, blocks: &[u32]) -> AdmittedRow {
        AdmittedRow {
            slot: Slot(slot),
            generation: 1,
            tokens: vec![7; tokens],
            prompt_len: tokens as u32,
            computed,
            blocks: blocks.iter().copied().map(BlockId).collect(),
            sampling: Sampling::greedy(),
            constrained: false,
        }
    }

    fn row(slot: u32, token_count: u32, samples: bool) -> RowPlan {
        RowPlan { slot: Slot(slot), generation: 1, token_count, samples, drafts_max: 0 }
    }

    fn plan(admitted: Vec<AdmittedRow>, rows: Vec<RowPlan>) -> StepPlan {
        StepPlan { step_id: 5, admitted, rows, ..StepPlan::default() }
    }

    #[test]
    fn steps_follow_each_other_without_the_tokens_between_them() {
        let mut rows = Rows::new(LIMITS);
        let first = plan(
            vec![admitted(0, 30, 16, &[3, 1]), admitted(1, 5, 0, &[2])],
            vec![row(0, 14, true), row(1, 3, false)],
        );
        let step = rows.apply(&first).unwrap();
        assert_eq!(
            (&step.reads[..], &step.writes[..]),
            (&[BlockId(3)][..], &[BlockId(1), BlockId(2)][..])
        );
        assert_eq!(step.wants_logprobs, [false]);
        let part =
            |slot, position, rows, samples| StepRows { slot, position, rows, samples, mask: None };
        assert_eq!(step.sequences, [part(0, 16, 14, 1), part(1, 0, 3, 0)]);
        // Nobody has told which token came: only that there is one.
        let second = StepPlan {
            extended: vec![(Slot(0), vec![BlockId(6)])],
            ..plan(vec![], vec![row(0, 1, true), row(1, 2, true)])
        };
        let step = rows.apply(&second).unwrap();
        assert_eq!(step.extended, [(0, 2)]);
        assert_eq!(step.sequences, [part(0, 30, 1, 1), part(1, 3, 2, 1)]);
        assert_eq!(step.writes, [BlockId(1), BlockId(2)]);
    }

    #[test]
    fn a_row_that_the_device_cannot_sample_fails_alone_until_it_is_released() {
        let mut rows = Rows::new(LIMITS);
        let bad = |sampling| AdmittedRow { sampling, ..admitted(0, 5, 0, &[0]) };
        for sampling in [
            Sampling { temperature: f32::NAN, ..Sampling::greedy() },
            Sampling { logprobs: Some(33), ..Sampling::greedy() },
            Sampling { min_tokens: 1, stop_token_ids: vec![1; 65], ..Sampling::greedy() },
        ] {
            let both = vec![bad(sampling), admitted(1, 5, 0, &[1])];
            let released = vec![Slot(0), Slot(1)];
            let step = rows.apply(&plan(both, vec![row(0, 5, true), row(1, 5, true)])).unwrap();
            assert_eq!((&step.admitted[..], step.sequences.len()), (&[1][..], 1));
            assert!(matches!(step.scheduled[0].failure, Some(RowFailure::Sampling { .. })));
            assert!(!step.scheduled[0].samples && step.scheduled[1].samples);
            // The next one was planned before anybody knew.
            let step = rows.apply(&plan(vec![], vec![row(0, 1, true)])).unwrap();
            assert!(step.sequences.is_empty() && step.scheduled[0].failure.is_some());
            let again =
                StepPlan { released, ..plan(vec![admitted(0, 5, 0, &[0])], vec![row(0, 5, true)]) };
            assert_eq!(rows.apply(&again).unwrap().sequences.len(), 1);
            rows = Rows::new(LIMITS);
        }
    }

    #[test]
    fn a_constrained_row_without_its_mask_chooses_nothing() {
        let step = |length| {
            let occupant = AdmittedRow { constrained: true, ..admitted(0, 5, 0, &[0]) };
            let allowed = Arc::new(TokenMask::new(vec![1], LIMITS.vocabulary));
            let masks = vec![RowMask { slot: Slot(0), length, allowed }];
            let plan = StepPlan { masks, ..plan(vec![occupant], vec![row(0, 5, true)]) };
            Rows::new(LIMITS).apply(&plan).unwrap()
        };
        let right = step(5);
        assert_eq!((right.masks.len(), right.sequences[0].mask), (1, Some(0)));
        let wrong = step(6);
        assert!(wrong.masks.is_empty() && wrong.sequences.is_empty());
        assert_eq!(wrong.scheduled[0].failure, Some(RowFailure::NoMask { position: 5 }));
    }

    #[test]
    fn plans_that_contradict_what_is_known_say_how() {
        for (plan, reason) in [
            (plan(vec![], vec![row(0, 1, true)]), "slot 0 is planned but empty"),
            (plan(vec![admitted(0, 5, 0, &[9])], vec![]), "block 9 is not one of 8"),
            (plan(vec![admitted(0, 5, 5, &[1])], vec![]), "5 of them computed"),
            (plan(vec![admitted(0, 5, 0, &[1])], vec![row(0, 6, true)]), "plans tokens 0..6 of 5"),
            (plan(vec![admitted(0, 5, 0, &[1])], vec![row(0, 4, true)]), "samples before"),
            (plan(vec![admitted(0, 20, 0, &[1])], vec![row(0, 20, true)]), "to position 20 with 1"),
            (plan(vec![admitted(0, 5, 0, &[1])], vec![row(0, 4, false); 2]), "planned twice"),
            (plan(vec![admitted(2, 5, 0, &[1])], vec![]), "slot 2 is not one of 2"),
        ] {
            let error = Rows::new(LIMITS).apply(&plan).unwrap_err();
            assert!(error.contains(reason), "{error:?} lacks {reason:?}");
        }
    }
}
