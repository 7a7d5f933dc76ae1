//! The rules of a plan: which diffs and which rows of a step are valid.

use kernels::{BlockId, KvGroups, NO_BLOCK};

use super::{Batch, BatchRow, RowTokens, ScheduledRow};
use crate::plan::{AdmittedRow, RowFailure, RowPlan, Slot, StepPlan};

impl<T: RowTokens> Batch<T> {
    /// Applies the diff: released, admitted and extended rows.
    pub(super) fn change(
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
        for &(from, to) in &plan.copies {
            self.check_blocks(&[from, to])?;
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

    /// Advances the planned rows by their tokens and draft tokens. Returns their work in the step.
    pub(super) fn schedule(
        &mut self,
        plan: &StepPlan,
        mut draft: impl FnMut(&BatchRow<T>, usize) -> Vec<u32>,
    ) -> Result<Vec<ScheduledRow>, String> {
        let mut drafts_left = self.unknown_drafts_max(plan)?;
        let mut known = plan.drafts.iter().peekable();
        let (plans, vocabulary) = (self.plans, self.limits.vocabulary);
        let kv_groups = self.kv_groups.clone();
        let mut scheduled: Vec<ScheduledRow> = Vec::with_capacity(plan.rows.len());
        for planned in &plan.rows {
            let known = known.next_if(|(slot, _)| *slot == planned.slot).map(|(_, drafts)| drafts);
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
            row.check(planned, known, plan.awaits_masks, (vocabulary, &kv_groups))?;
            let (start, token_count) = (row.position, planned.token_count as usize);
            let drafts = match known {
                Some(known) => known.clone(),
                None => {
                    let most = (planned.drafts_max as usize).min(drafts_left);
                    let mut found = if most > 0 { draft(row, most) } else { Vec::new() };
                    found.truncate(most);
                    drafts_left -= found.len();
                    found
                }
            };
            row.tokens.join(&drafts);
            row.position = start + token_count + drafts.len();
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

    /// Checks the sums of a plan. Returns the maximum number of draft tokens that the plan leaves
    /// to the executor.
    fn unknown_drafts_max(&self, plan: &StepPlan) -> Result<usize, String> {
        let tokens: usize = plan.rows.iter().map(|row| row.token_count as usize).sum();
        let drafts_max = plan.drafts_max as usize;
        let is_empty = plan.rows.is_empty() && plan.released.is_empty();
        if is_empty || tokens + drafts_max > self.limits.step_tokens as usize {
            return Err(format!(
                "the step has {} rows with {tokens} tokens and {drafts_max} draft tokens; expected 1 to {} tokens",
                plan.rows.len(),
                self.limits.step_tokens
            ));
        }
        if drafts_max > 0 && self.limits.speculation.is_none() {
            return Err(format!(
                "{drafts_max} draft tokens are planned, but speculative decoding is off"
            ));
        }
        let known: usize = plan.drafts.iter().map(|(_, drafts)| drafts.len()).sum();
        drafts_max.checked_sub(known).ok_or_else(|| {
            format!("the plan has {known} draft tokens; expected at most {drafts_max}")
        })
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
            adapter: admitted.adapter,
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
        let is_invalid = |block: &&BlockId| block.0 >= self.limits.blocks && **block != NO_BLOCK;
        match blocks.iter().find(is_invalid) {
            Some(block) => {
                Err(format!("invalid block {}; expected less than {}", block.0, self.limits.blocks))
            }
            None => Ok(()),
        }
    }
}

impl<T: RowTokens> BatchRow<T> {
    /// Checks the planned work of this row. `known` are the draft tokens that the plan names.
    fn check(
        &self,
        planned: &RowPlan,
        known: Option<&Vec<u32>>,
        awaits_masks: bool,
        (vocabulary, kv_groups): (u32, &KvGroups),
    ) -> Result<(), String> {
        let slot = planned.slot.0;
        let (start, token_count) = (self.position, planned.token_count as usize);
        let end = start + token_count;
        let length = self.tokens.count();
        if token_count == 0 || end > length {
            return Err(format!("slot {slot} plans tokens {start}..{end} of {length}"));
        }
        if planned.samples != (end == length) {
            return Err(format!("slot {slot} must sample after its last token and only there"));
        }
        if planned.samples && self.constrained && !awaits_masks {
            return Err(format!("slot {slot} is constrained, but the step awaits no bitmasks"));
        }
        let drafts_max = planned.drafts_max as usize;
        let known_count = known.map_or(0, Vec::len);
        let expected = if self.constrained { drafts_max } else { 0 };
        if known_count != expected {
            return Err(format!(
                "slot {slot} has {known_count} draft tokens in the plan; expected {expected}"
            ));
        }
        if let Some(token) = known.into_iter().flatten().find(|token| **token >= vocabulary) {
            return Err(format!("slot {slot} has draft token {token}, outside the vocabulary"));
        }
        if drafts_max > 0 && !planned.samples {
            return Err(format!("slot {slot} has {drafts_max} draft tokens and does not sample"));
        }
        let upper = end + drafts_max;
        if upper > kv_groups.tokens(self.blocks.len()) {
            let blocks = self.blocks.len();
            return Err(format!("slot {slot} plans to position {upper} with {blocks} blocks"));
        }
        Ok(())
    }
}
