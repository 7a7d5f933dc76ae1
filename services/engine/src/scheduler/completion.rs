//! Applies the result of a step.

use std::mem;

use kernels::{BLOCK_TOKENS, hit_blocks, sampling::SampledToken};

use super::{
    Scheduler,
    loading::publish,
    sequence::{SavedState, SequencePhase},
};
use crate::{
    constraint::ConstraintFailure,
    event::{Action, SequenceFailure, SequenceId, SequenceKind},
    plan::{RowFailure, RowPlan, StepResult},
};

impl Scheduler {
    /// Applies the result of the oldest step in flight. Panics if the result belongs to another
    /// step: executors return results in order.
    pub fn complete(&mut self, result: StepResult, actions: &mut Vec<Action>) {
        let frame = self.frames.collect().expect("a result belongs to a step in flight");
        assert_eq!(frame.step_id, result.step_id, "results come in the order of their steps");
        assert_eq!(frame.rows.len(), result.rows.len(), "a result has a row for every planned row");
        self.measured_steps.add(self.config.itl.as_ref(), &frame, result.busy);
        if let Some(tiers) = &mut self.tiers {
            let prefills = frame.rows.iter().filter(|row| row.token_count > 1 || !row.samples);
            tiers.add_prefill(prefills.map(|row| row.token_count).sum(), result.busy);
            tiers.step_collected(frame.step_id);
        }
        actions.reserve(frame.rows.len());
        for ((row, id), outcome) in frame.rows.iter().zip(frame.sequences).zip(result.rows) {
            debug_assert_eq!((row.slot, row.generation), (outcome.slot, outcome.generation));
            if !self.slots.is_current(row.slot, row.generation) {
                continue;
            }
            match outcome.failure {
                None => {
                    debug_assert!(row.samples || outcome.tokens.is_empty());
                    debug_assert!(outcome.tokens.len() <= 1 + row.drafts_max as usize);
                    let sequence = self.sequences.known_mut(id);
                    let computed = sequence.row().computed;
                    sequence.add_prompt_logprobs(computed, outcome.prompt_logprobs);
                    self.row_done(id, row, outcome.drafted, outcome.tokens, actions);
                }
                Some(failure) => self.fail(id, failure.into(), actions),
            }
        }
        while let Some(blocks) = self.frames.take_due() {
            self.kv.release(&blocks);
        }
        self.admit_receives(actions);
    }

    fn row_done(
        &mut self,
        id: SequenceId,
        done: &RowPlan,
        drafted: u32,
        mut tokens: Vec<SampledToken>,
        actions: &mut Vec<Action>,
    ) {
        let sequence = self.sequences.known_mut(id);
        let drafts_accepted = tokens.len().saturating_sub(1);
        let (first_index, had_output) = (sequence.next_index(), sequence.has_output());
        let finish = match sequence.take_output(&mut tokens) {
            Ok(finish) => finish,
            Err(failure) => return self.fail(id, failure.into(), actions),
        };
        let row = sequence.row_mut();
        // The samples were withdrawn, so the row computes its last token again.
        let is_withdrawn = done.samples && tokens.is_empty();
        if done.drafts_max > 0 && !is_withdrawn {
            let drafts_unused = done.drafts_max as usize - drafts_accepted;
            row.drafts.on_verified(done.drafts_max, drafted, drafts_accepted as u32);
            row.launched -= drafts_unused;
            row.length -= drafts_unused;
        }
        row.catch_up = row.catch_up.saturating_sub(u32::from(!tokens.is_empty()));
        row.computed += done.token_count as usize + drafts_accepted - usize::from(is_withdrawn);
        // Tokens sampled after the end of the request were dropped: their KV is not published.
        let computed = row.computed;
        let confirmed = computed.min(sequence.tokens.len());
        let row = sequence.row_mut();
        let written = row.published..confirmed / BLOCK_TOKENS;
        if !written.is_empty() {
            row.published = written.end;
            let mut blocks = mem::take(&mut row.blocks);
            for index in written {
                publish(&mut self.kv, &mut self.tiers, sequence, index, &blocks);
            }
            // Steps in flight begin at this position or later. The window before the longest hit of
            // an equal prompt stays until it is offered to the tiers at the first token: released
            // blocks may be evicted.
            let hit = match computed > sequence.given_len {
                true => confirmed / BLOCK_TOKENS,
                false => hit_blocks(computed),
            };
            self.kv.release_behind(&mut blocks, hit * BLOCK_TOKENS);
            sequence.row_mut().blocks = blocks;
        }
        self.publish_states(id);
        let sequence = self.sequences.known_mut(id);
        let prompt_logprobs = match tokens.is_empty() {
            true => None,
            false => sequence.take_prompt_logprobs(),
        };
        let sends = sequence.kind == SequenceKind::Send;
        let cached_tokens = sequence.cached_tokens.unwrap_or(0);
        if sends && finish.is_none() {
            self.hand_over_written(id, !tokens.is_empty(), actions);
        }
        if tokens.is_empty() {
            return;
        }
        if !had_output {
            self.prompt_written(id);
        }
        if !sends && finish.is_none() {
            self.request_mask(id);
        }
        actions.push(Action::Tokens { id, first_index, tokens, cached_tokens, prompt_logprobs });
        if sends || finish.is_some() {
            self.end_turn(id);
            self.remove(id);
            if finish.is_some() {
                self.abort_transfer(id, "the first token ended the request", actions);
            }
            actions.push(Action::Finished { id, reason: finish });
        }
    }

    /// Publishes the copies of a row's state that collected steps have made. Of the states of an
    /// answer, only the last two stay cached.
    fn publish_states(&mut self, id: SequenceId) {
        let sequence = self.sequences.known_mut(id);
        let computed = sequence.row().computed;
        let is_made = |saving: &SavedState| saving.full_blocks * BLOCK_TOKENS < computed;
        let saving = &mut sequence.row_mut().state.saving;
        let made = saving.iter().take_while(|saving| is_made(saving)).count();
        let made: Vec<_> = saving.drain(..made).collect();
        for SavedState { full_blocks, blocks } in made {
            // The state may include tokens after the end of the request, which were dropped. Then it
            // has no key.
            if sequence.is_published() && full_blocks <= sequence.chain.hashes().len() {
                let key = sequence.chain.hashes()[full_blocks - 1];
                let (chain, tokens) = (&sequence.chain, &sequence.tokens);
                let is_new = self.kv.publish_state(chain, tokens, full_blocks, &blocks);
                if is_new && full_blocks * BLOCK_TOKENS >= sequence.given_len {
                    let [newest, older] = &mut sequence.row_mut().state.published;
                    let before = mem::replace(older, newest.replace(key));
                    before.into_iter().for_each(|key| self.kv.forget_state(key));
                }
            }
            self.kv.release(&blocks);
        }
    }

    /// Emits [`Action::KvWritten`] for a sender's full blocks as they complete, and for the partial
    /// last block once the `whole` prompt is computed.
    fn hand_over_written(&mut self, id: SequenceId, whole: bool, actions: &mut Vec<Action>) {
        let SequencePhase::Running(row) = self.sequences[id].phase() else { return };
        let len = self.sequences[id].given_len;
        let written = if whole { len.div_ceil(BLOCK_TOKENS) } else { row.computed / BLOCK_TOKENS };
        let written = (len, written);
        actions.extend(self.transfers.hand_over(id, &row.blocks, written, &mut self.kv));
    }
}

impl From<RowFailure> for SequenceFailure {
    fn from(failure: RowFailure) -> Self {
        let reason = failure.to_string();
        match failure {
            RowFailure::Sampling { .. } => SequenceFailure::Invalid { reason },
            RowFailure::Logits { .. } => SequenceFailure::Internal { reason },
        }
    }
}

impl From<ConstraintFailure> for SequenceFailure {
    fn from(failure: ConstraintFailure) -> Self {
        match failure {
            ConstraintFailure::TooComplex { reason } => SequenceFailure::Invalid { reason },
            ConstraintFailure::Broken { reason } => SequenceFailure::Internal { reason },
        }
    }
}
