//! Host mirror of the running batch, and the translation of plans for the device. Tokens are on the
//! device; the host knows only how many the device has sampled.

use std::sync::Arc;

use kernels::{
    KvGroups,
    arena::RowBlocks,
    cuda::StepRows,
    sampling::{
        LISTED_TOKENS_MAX, LOGIT_BIASES_MAX, POOLED_LOGITS_MAX, Pooling, STOP_TOKENS_MAX, TokenMask,
    },
};

use super::super::{
    ExecutorError, ExecutorLimits,
    batch::{Batch, ScheduledRow, TokenCount},
};
use crate::plan::{AdmittedRow, Generation, RowFailure, RowMask, RowResult, Slot, StepPlan};

/// Upper bound on the top log-probabilities of a row.
const LOGPROBS_MAX: usize = 32;

/// A plan translated for the device.
#[derive(Debug, Default)]
pub(super) struct DeviceStep {
    /// The plan's rows, in its order.
    pub scheduled: Vec<ScheduledRow>,
    /// The samples of each row of `scheduled`.
    pub samples: Vec<RowSamples>,
    /// Rows that take part in the forward pass.
    pub sequences: Vec<StepRows>,
    /// Position of each sequence if no draft token of the steps in flight is accepted.
    positions_min: Vec<u32>,
    /// One entry for each sample.
    pub wants_logprobs: Vec<bool>,
    /// Samples with pooled values.
    pub pooled: Vec<(u32, Pooling)>,
    /// Whether a sequence has an adapter.
    pub has_adapters: bool,
    /// Indices of admitted rows that go to the device.
    pub admitted: Vec<usize>,
    /// Slots whose draft tokens are in the plan, in its order, and the length of each slot before
    /// them.
    pub drafts: Vec<(Slot, u32)>,
    /// Indices of extensions, and the length of the block table before each.
    pub extended: Vec<(usize, u32)>,
}

/// Samples of a row in a step, in the order of the row's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RowSamples {
    /// Prompt tokens whose log-probabilities are reported.
    pub scored: usize,
    /// Samples of the next token, and of the tokens after draft tokens.
    pub sampled: usize,
}

/// Index of a constrained sample, and its token bitmask if it was supplied in time.
pub(super) type SampleMask = (u32, Option<Arc<TokenMask>>);

#[derive(Debug)]
pub(super) struct DeviceRows {
    batch: Batch<TokenCount>,
    kv_groups: KvGroups,
}

impl DeviceRows {
    pub(super) fn new(limits: ExecutorLimits, kv_groups: KvGroups) -> Self {
        Self { batch: Batch::new(limits).with_kv_groups(kv_groups.clone()), kv_groups }
    }

    /// Applies the diff and advances the rows of the step. With `verified` above 0, the device
    /// computes this many tokens of every row: its last token, draft tokens and padding. After an
    /// error the rows are unusable.
    pub(super) fn apply(
        &mut self,
        plan: &StepPlan,
        verified: u32,
    ) -> Result<DeviceStep, ExecutorError> {
        let scheduled = self.batch.apply(plan, refusal, |_, _| Vec::new())?;
        let mut step = DeviceStep { scheduled, ..DeviceStep::default() };
        for (planned, row) in plan.rows.iter().zip(&mut step.scheduled) {
            let is_known = self.batch.row(row.slot).constrained;
            if row.samples && !is_known {
                row.draft_count = planned.drafts_max.min(verified.saturating_sub(1)) as usize;
                row.token_count += row.draft_count;
            }
            if row.draft_count > 0 && verified <= row.draft_count as u32 {
                let (step_id, slot) = (plan.step_id, row.slot.0);
                let (count, most) = (row.draft_count, verified.saturating_sub(1));
                let reason =
                    format!("slot {slot} has {count} draft tokens; a step of its rows has {most}");
                return Err(ExecutorError::BadPlan { step_id, reason });
            }
            self.batch.launched(row);
            let samples = match self.batch.row(row.slot).scores_prompt(row) {
                true => row.token_count,
                false => usize::from(row.samples) + row.draft_count,
            };
            let sequence = self.sequence(row, samples);
            let sampled = if row.samples { verified.max(1) as usize } else { 0 };
            let scored = samples.saturating_sub(sampled);
            step.samples.push(RowSamples { scored, sampled });
            let Some(sequence) = sequence else { continue };
            if is_known && row.draft_count > 0 {
                let length = sequence.position + sequence.rows - row.draft_count as u32;
                step.drafts.push((row.slot, length));
            }
            step.sequences.push(sequence);
            step.has_adapters |= self.batch.row(row.slot).adapter.is_some();
            // A constrained row has no draft tokens in earlier steps in flight.
            let unknown = if is_known { 0 } else { self.batch.unknown(row.slot) };
            step.positions_min.push((row.start - unknown) as u32);
            step.wants_logprobs.extend(std::iter::repeat_n(true, scored));
            let sampling = &self.batch.row(row.slot).sampling;
            if let (true, Some(pooling)) = (row.samples, &sampling.pooling) {
                step.pooled.push((step.wants_logprobs.len() as u32, pooling.clone()));
            }
            let wants_logprobs = sampling.logprobs.is_some();
            step.wants_logprobs.extend(std::iter::repeat_n(wants_logprobs, sampled));
            if row.samples && !is_known {
                self.batch.will_draft(row);
            }
        }
        if !plan.awaits_masks {
            self.sample(&step.scheduled);
        }
        let is_taken = |admitted: &AdmittedRow| self.batch.row(admitted.slot).failure.is_none();
        let admitted = plan.admitted.iter().enumerate();
        step.admitted = admitted.filter(|(_, row)| is_taken(row)).map(|(index, _)| index).collect();
        let extended = plan.extended.iter().enumerate();
        step.extended = extended
            .map(|(index, (slot, added))| {
                let all = self.batch.row(*slot).blocks.len();
                (index, (all - added.len()) as u32)
            })
            .collect();
        Ok(step)
    }

    /// Records that the device has completed a row's part of a step.
    pub(super) fn collect(&mut self, scheduled: &ScheduledRow, result: &RowResult) {
        self.batch.collected(scheduled, result.tokens.len().saturating_sub(1));
    }

    /// Returns the number of leading tokens of a sequence whose KV the collected steps have
    /// computed; 0 if the sequence has left its slot.
    pub(super) fn computed(&self, slot: u32, generation: Generation) -> usize {
        self.batch.computed(Slot(slot), generation)
    }

    /// Returns whether the lengths of rows depend on draft tokens of steps in flight.
    pub(super) fn has_unknown(&self) -> bool {
        self.batch.has_unknown()
    }

    /// Returns the block accesses of the rows of the step applied last.
    pub(super) fn blocks<'a>(
        &'a self,
        step: &'a DeviceStep,
    ) -> impl Iterator<Item = RowBlocks<'a>> {
        step.sequences.iter().zip(&step.positions_min).map(|(sequence, position_min)| {
            let row = self.batch.row(Slot(sequence.slot));
            let (start, count) = (sequence.position as usize, sequence.rows as usize);
            RowBlocks {
                slot: sequence.slot,
                generation: row.generation,
                table: &row.blocks[..self.kv_groups.entries(start + count)],
                position_min: *position_min as usize,
            }
        })
    }

    /// Supplies the token bitmasks of the step applied last. `samples` are those of each row.
    /// Returns the bitmask of each constrained sample with the index of the sample.
    pub(super) fn supply(
        &mut self,
        scheduled: &mut [ScheduledRow],
        masks: Vec<RowMask>,
        samples: &[RowSamples],
    ) -> Result<Vec<SampleMask>, String> {
        self.batch.supply(scheduled, masks)?;
        for late in scheduled.iter().filter(|row| row.is_late) {
            self.batch.withdrawn(late);
        }
        self.sample(scheduled);
        let (mut end, mut masks) = (0, Vec::new());
        for (scheduled, samples) in scheduled.iter().zip(samples) {
            let first = end + samples.scored;
            end = first + samples.sampled;
            let row = self.batch.row(scheduled.slot);
            if scheduled.samples && row.constrained {
                let mask = |index| ((first + index) as u32, row.allowed.get(index).cloned());
                masks.extend((0..1 + scheduled.draft_count).map(mask));
            }
        }
        Ok(masks)
    }

    /// Returns the result of a row without its tokens.
    pub(super) fn unsampled(&self, scheduled: &ScheduledRow) -> RowResult {
        self.batch.unsampled(scheduled)
    }

    /// Counts the tokens that the device samples.
    fn sample(&mut self, scheduled: &[ScheduledRow]) {
        for row in scheduled.iter().filter(|row| row.samples && !row.is_late) {
            self.batch.will_sample(row);
        }
    }

    /// Returns the row's part of the forward pass; `None` for a failed row.
    fn sequence(&self, scheduled: &ScheduledRow, samples: usize) -> Option<StepRows> {
        let ScheduledRow { slot, start, token_count, .. } = *scheduled;
        self.batch.row(slot).failure.is_none().then_some(StepRows {
            slot: slot.0,
            position: start as u32,
            rows: token_count as u32,
            samples: samples as u32,
        })
    }
}

/// Returns a failure if the device cannot sample the row.
fn refusal(admitted: &AdmittedRow) -> Option<RowFailure> {
    let sampling = &admitted.sampling;
    let refused = |reason: String| Some(RowFailure::Sampling { reason });
    if let Err(error) = sampling.validate() {
        return refused(error.to_string());
    }
    let stops = sampling.stop_token_ids.len();
    if sampling.min_tokens > 0 && stops > STOP_TOKENS_MAX {
        return refused(format!(
            "invalid stop_token_ids: {stops} with min_tokens; expected at most {STOP_TOKENS_MAX}"
        ));
    }
    let bad_words = sampling.bad_words.iter().map(Vec::len).sum();
    let pooled = match &sampling.pooling {
        Some(Pooling::Logits(tokens)) => tokens.len(),
        Some(Pooling::Hidden) | None => 0,
    };
    let found = [
        ("pooling.logits", pooled, POOLED_LOGITS_MAX),
        ("logprobs", sampling.logprobs.unwrap_or(0) as usize, LOGPROBS_MAX),
        ("prompt_logprobs", sampling.prompt_logprobs.unwrap_or(0) as usize, LOGPROBS_MAX),
        ("logit_bias", sampling.logit_bias.len(), LOGIT_BIASES_MAX),
        ("bad_words", bad_words, LISTED_TOKENS_MAX),
    ];
    let (field, count, most) = found.into_iter().find(|(_, count, most)| count > most)?;
    refused(format!("invalid {field}: {count}; expected at most {most}"))
}

#[cfg(test)]
mod tests {
    use kernels::{
        BlockId,
        sampling::{SampledToken, Sampling},
    };

    use super::*;
    use crate::{
        executor::Speculation,
        plan::{RowMask, RowPlan},
    };

    const SPECULATION: Speculation =
        Speculation { row_drafts: 4, step_tokens: 16, ngram_min: 1, ngram_max: 1, uniform: true };

    const LIMITS: ExecutorLimits = ExecutorLimits {
        slots: 2,
        step_tokens: 32,
        sequence_tokens: 64,
        blocks: 8,
        depth: 2,
        vocabulary: 100,
        speculation: None,
    };

    fn new(limits: ExecutorLimits) -> DeviceRows {
        DeviceRows::new(limits, KvGroups::default())
    }

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
            adapter: None,
        }
    }

    fn row(slot: u32, token_count: u32, samples: bool) -> RowPlan {
        RowPlan { slot: Slot(slot), generation: 1, token_count, samples, drafts_max: 0 }
    }

    fn plan(admitted: Vec<AdmittedRow>, rows: Vec<RowPlan>) -> StepPlan {
        StepPlan { step_id: 5, admitted, rows, ..StepPlan::default() }
    }

    /// Returns slot, block table and least position of each row.
    fn used(rows: &DeviceRows, step: &DeviceStep) -> Vec<(u32, Vec<u32>, usize)> {
        let ids = |row: &RowBlocks<'_>| row.table.iter().map(|block| block.0).collect();
        let used = rows.blocks(step);
        used.map(|row| (row.slot, ids(&row), row.position_min)).collect()
    }

    #[test]
    fn steps_are_planned_without_the_sampled_tokens() {
        let mut rows = new(LIMITS);
        let first = plan(
            vec![admitted(0, 30, 16, &[3, 1]), admitted(1, 5, 0, &[2])],
            vec![row(0, 14, true), row(1, 3, false)],
        );
        let step = rows.apply(&first, 0).unwrap();
        assert_eq!(used(&rows, &step), [(0, vec![3, 1], 16), (1, vec![2], 0)]);
        assert_eq!(step.wants_logprobs, [false]);
        let part = |slot, position, rows, samples| StepRows { slot, position, rows, samples };
        assert_eq!(step.sequences, [part(0, 16, 14, 1), part(1, 0, 3, 0)]);
        // The host does not know the sampled token, only that one was sampled.
        let second = StepPlan {
            extended: vec![(Slot(0), vec![BlockId(6)])],
            ..plan(vec![], vec![row(0, 1, true), row(1, 2, true)])
        };
        let step = rows.apply(&second, 0).unwrap();
        assert_eq!(step.extended, [(0, 2)]);
        assert_eq!(step.sequences, [part(0, 30, 1, 1), part(1, 3, 2, 1)]);
        assert_eq!(used(&rows, &step), [(0, vec![3, 1], 30), (1, vec![2], 3)]);
    }

    #[test]
    fn lengths_are_upper_bounds_until_the_accepted_draft_tokens_are_known() {
        let mut rows = new(ExecutorLimits { speculation: Some(SPECULATION), ..LIMITS });
        let first = plan(vec![admitted(0, 30, 16, &[3, 1, 5])], vec![row(0, 14, true)]);
        let first = rows.apply(&first, 0).unwrap();
        let drafting = |drafts_max| StepPlan {
            drafts_max,
            ..plan(vec![], vec![RowPlan { drafts_max, ..row(0, 1, true) }])
        };
        let part = |position, rows| StepRows { slot: 0, position, rows, samples: rows };
        let second = rows.apply(&drafting(4), 5).unwrap();
        assert_eq!(second.sequences, [part(30, 5)]);
        assert_eq!((second.wants_logprobs.len(), second.scheduled[0].draft_count), (5, 4));
        assert_eq!(used(&rows, &second), [(0, vec![3, 1, 5], 30)]);
        assert!(rows.has_unknown());
        // The third step is launched before the second is collected. It may begin 4 tokens earlier,
        // in the previous block.
        let third = rows.apply(&drafting(2), 3).unwrap();
        assert_eq!(third.sequences, [part(35, 3)]);
        assert_eq!(used(&rows, &third), [(0, vec![3, 1, 5], 31)]);
        let collect = |rows: &mut DeviceRows, step: &DeviceStep, tokens: usize| {
            let mut result = rows.unsampled(&step.scheduled[0]);
            result.tokens = vec![SampledToken { id: 9, logprobs: None, pooled: None }; tokens];
            rows.collect(&step.scheduled[0], &result);
        };
        assert_eq!(rows.computed(0, 1), 16);
        collect(&mut rows, &first, 1);
        assert_eq!(rows.computed(0, 1), 30);
        // One of four draft tokens is accepted, then both of two.
        collect(&mut rows, &second, 2);
        assert!(rows.has_unknown());
        assert_eq!(rows.computed(0, 1), 32);
        collect(&mut rows, &third, 3);
        assert!(!rows.has_unknown());
        assert_eq!(rows.computed(0, 1), 35);
        let next = rows.apply(&plan(vec![], vec![row(0, 1, true)]), 0).unwrap();
        assert_eq!(next.sequences, [part(30 + 2 + 3, 1)]);
        assert_eq!(used(&rows, &next), [(0, vec![3, 1, 5], 35)]);
        // A step of an occupant that has left changes nothing.
        let last = rows.apply(&drafting(2), 3).unwrap();
        let newer = AdmittedRow { generation: 2, ..admitted(0, 5, 0, &[0]) };
        let newer_row = RowPlan { generation: 2, ..row(0, 5, true) };
        let plan = StepPlan { released: vec![Slot(0)], ..plan(vec![newer], vec![newer_row]) };
        let result = rows.unsampled(&last.scheduled[0]);
        rows.apply(&plan, 0).unwrap();
        rows.collect(&last.scheduled[0], &result);
        assert_eq!((rows.computed(0, 1), rows.computed(0, 2)), (0, 0));
        let newer_row = RowPlan { generation: 2, ..row(0, 1, true) };
        let next = StepPlan { rows: vec![newer_row], ..StepPlan::default() };
        assert_eq!(rows.apply(&next, 0).unwrap().sequences, [part(5, 1)]);
    }

    #[test]
    fn a_row_that_the_device_cannot_sample_fails_alone() {
        let mut rows = new(LIMITS);
        let bad = |sampling| AdmittedRow { sampling, ..admitted(0, 5, 0, &[0]) };
        for sampling in [
            Sampling { temperature: f32::NAN, ..Sampling::greedy() },
            Sampling { logprobs: Some(33), ..Sampling::greedy() },
            Sampling { prompt_logprobs: Some(33), ..Sampling::greedy() },
            Sampling { logit_bias: vec![(1, 2.0); LOGIT_BIASES_MAX + 1], ..Sampling::greedy() },
            Sampling { bad_words: vec![vec![1; LISTED_TOKENS_MAX + 1]], ..Sampling::greedy() },
            Sampling {
                min_tokens: 1,
                stop_token_ids: vec![1; STOP_TOKENS_MAX + 1],
                ..Sampling::greedy()
            },
        ] {
            let both = vec![bad(sampling), admitted(1, 5, 0, &[1])];
            let released = vec![Slot(0), Slot(1)];
            let step = rows.apply(&plan(both, vec![row(0, 5, true), row(1, 5, true)]), 0).unwrap();
            assert_eq!((&step.admitted[..], step.sequences.len()), (&[1][..], 1));
            let failure = rows.unsampled(&step.scheduled[0]).failure;
            assert!(matches!(failure, Some(RowFailure::Sampling { .. })));
            assert!(!step.scheduled[0].samples && step.scheduled[1].samples);
            // The next step was planned before the failure was known.
            let step = rows.apply(&plan(vec![], vec![row(0, 1, true)]), 0).unwrap();
            assert!(step.sequences.is_empty());
            assert!(rows.unsampled(&step.scheduled[0]).failure.is_some());
            let again =
                StepPlan { released, ..plan(vec![admitted(0, 5, 0, &[0])], vec![row(0, 5, true)]) };
            assert_eq!(rows.apply(&again, 0).unwrap().sequences.len(), 1);
            rows = new(LIMITS);
        }
    }

    #[test]
    fn as_many_stop_tokens_as_a_request_may_have_are_sampled_with() {
        let mut rows = new(LIMITS);
        let stop_token_ids = vec![1; STOP_TOKENS_MAX];
        let sampling = Sampling { min_tokens: 1, stop_token_ids, ..Sampling::greedy() };
        let occupant = AdmittedRow { sampling, ..admitted(0, 5, 0, &[0]) };
        let step = rows.apply(&plan(vec![occupant], vec![row(0, 5, true)]), 0).unwrap();
        assert!(step.scheduled[0].samples);
    }

    #[test]
    fn bitmasks_of_a_failed_row_disturb_no_other_row() {
        let mut rows = new(LIMITS);
        let sampling = Sampling { temperature: f32::NAN, ..Sampling::greedy() };
        let failed = AdmittedRow { sampling, constrained: true, ..admitted(0, 5, 0, &[0]) };
        let other = AdmittedRow { constrained: true, ..admitted(1, 5, 0, &[1]) };
        let both = plan(vec![failed, other], vec![row(0, 5, true), row(1, 5, true)]);
        let mut step = rows.apply(&StepPlan { awaits_masks: true, ..both }, 0).unwrap();
        let allowed = Arc::new(TokenMask::new(vec![1], LIMITS.vocabulary));
        let mask = |slot| RowMask { slot: Slot(slot), length: 5, allowed: allowed.clone() };
        let masks =
            rows.supply(&mut step.scheduled, vec![mask(0), mask(1)], &step.samples).unwrap();
        let [(0, Some(mask))] = &masks[..] else { panic!("{masks:?}") };
        assert!(Arc::ptr_eq(mask, &allowed));
    }

    #[test]
    fn a_constrained_row_without_its_bitmask_computes_its_last_token_again() {
        let mut rows = new(LIMITS);
        let occupant = AdmittedRow { constrained: true, ..admitted(0, 5, 0, &[0]) };
        let rejected = rows.apply(&plan(vec![occupant.clone()], vec![row(0, 5, true)]), 0);
        assert!(rejected.unwrap_err().to_string().contains("the step awaits no bitmasks"));

        let mut rows = new(LIMITS);
        let both = vec![occupant, admitted(1, 3, 0, &[1])];
        let both = plan(both, vec![row(0, 5, true), row(1, 3, true)]);
        let mut step = rows.apply(&StepPlan { awaits_masks: true, ..both }, 0).unwrap();
        let masks = rows.supply(&mut step.scheduled, vec![], &step.samples);
        assert_eq!(masks.unwrap(), [(0, None)]);
        let late =
            |step: &DeviceStep| step.scheduled.iter().map(|row| row.is_late).collect::<Vec<_>>();
        assert_eq!(late(&step), [true, false]);
        assert_eq!(rows.computed(0, 1), 0);
        let result = rows.unsampled(&step.scheduled[0]);
        rows.collect(&step.scheduled[0], &result);
        assert_eq!(rows.computed(0, 1), 4);

        let again = plan(vec![], vec![row(0, 1, true), row(1, 1, true)]);
        let step = rows.apply(&StepPlan { awaits_masks: true, ..again }, 0).unwrap();
        let positions: Vec<_> = step.sequences.iter().map(|sequence| sequence.position).collect();
        assert_eq!(positions, [4, 3]);
        let allowed = Arc::new(TokenMask::new(vec![1], LIMITS.vocabulary));
        let mask = |slot, length| RowMask { slot: Slot(slot), length, allowed: allowed.clone() };
        for (mask, reason) in [
            (mask(0, 6), "slot 0 has 5 tokens, but a bitmask for 6"),
            (mask(1, 4), "slot 1 has a bitmask that no row awaits"),
        ] {
            assert_eq!(
                rows.supply(&mut step.scheduled.clone(), vec![mask], &step.samples).unwrap_err(),
                reason
            );
        }
    }

    #[test]
    fn draft_tokens_of_the_plan_are_verified_up_to_the_last_bitmask() {
        let mut rows = new(ExecutorLimits { speculation: Some(SPECULATION), ..LIMITS });
        let occupant = AdmittedRow { constrained: true, ..admitted(0, 30, 29, &[3, 1, 5]) };
        let drafting = |admitted| StepPlan {
            awaits_masks: true,
            drafts_max: 4,
            drafts: vec![(Slot(0), vec![7, 8])],
            ..plan(admitted, vec![RowPlan { drafts_max: 2, ..row(0, 1, true) }])
        };
        let three = |position| StepRows { slot: 0, position, rows: 3, samples: 3 };
        let present = |masks: Vec<SampleMask>| -> Vec<(u32, bool)> {
            masks.iter().map(|(sample, mask)| (*sample, mask.is_some())).collect()
        };
        let mut step = rows.apply(&drafting(vec![occupant]), 3).unwrap();
        assert_eq!(
            (&step.sequences[..], &step.drafts[..]),
            (&[three(29)][..], &[(Slot(0), 30)][..])
        );
        assert_eq!(used(&rows, &step), [(0, vec![3, 1], 29)]);
        let allowed = Arc::new(TokenMask::new(vec![1], LIMITS.vocabulary));
        let mask = RowMask { slot: Slot(0), length: 30, allowed };
        let masks = rows.supply(&mut step.scheduled, vec![mask], &step.samples).unwrap();
        assert_eq!(present(masks), [(0, true), (1, false), (2, false)]);
        let mut result = rows.unsampled(&step.scheduled[0]);
        result.tokens = vec![SampledToken { id: 9, logprobs: None, pooled: None }];
        rows.collect(&step.scheduled[0], &result);
        // A row without a bitmask starts again with its last token.
        for _ in 0..2 {
            let mut late = rows.apply(&drafting(vec![]), 3).unwrap();
            assert_eq!(
                (&late.sequences[..], &late.drafts[..]),
                (&[three(30)][..], &[(Slot(0), 31)][..])
            );
            let masks = rows.supply(&mut late.scheduled, vec![], &late.samples).unwrap();
            assert_eq!(present(masks), [(0, false), (1, false), (2, false)]);
            let result = rows.unsampled(&late.scheduled[0]);
            rows.collect(&late.scheduled[0], &result);
            assert!(!rows.has_unknown());
        }
        let error = rows.apply(&drafting(vec![]), 2).unwrap_err().to_string();
        assert!(error.contains("slot 0 has 2 draft tokens; a step of its rows has 1"), "{error}");
    }

    #[test]
    fn contradictory_plans_are_rejected_with_the_reason() {
        for (plan, reason) in [
            (plan(vec![], vec![row(0, 1, true)]), "slot 0 is planned but empty"),
            (plan(vec![admitted(0, 5, 0, &[9])], vec![]), "invalid block 9; expected less than 8"),
            (plan(vec![admitted(0, 5, 5, &[1])], vec![]), "5 of them computed"),
            (plan(vec![admitted(0, 5, 0, &[1])], vec![row(0, 6, true)]), "plans tokens 0..6 of 5"),
            (
                plan(vec![admitted(0, 5, 0, &[1])], vec![row(0, 4, true)]),
                "must sample after its last token",
            ),
            (plan(vec![admitted(0, 20, 0, &[1])], vec![row(0, 20, true)]), "to position 20 with 1"),
            (plan(vec![admitted(0, 5, 0, &[1])], vec![row(0, 4, false); 2]), "planned twice"),
            (plan(vec![admitted(2, 5, 0, &[1])], vec![]), "invalid slot 2; expected less than 2"),
            (
                StepPlan {
                    drafts_max: 1,
                    ..plan(vec![admitted(0, 5, 0, &[1])], vec![row(0, 5, true)])
                },
                "1 draft tokens are planned",
            ),
        ] {
            let error = new(LIMITS).apply(&plan, 0).unwrap_err().to_string();
            assert!(error.contains(reason), "{error:?} lacks {reason:?}");
        }
    }
}
