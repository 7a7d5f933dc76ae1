//! Check of a step's input.

use super::{DeviceBatch, StepInput};
use crate::{
    cuda::{
        batch_memory::BatchLimits,
        error::CudaError,
        plan::{Admission, KnownDrafts, StepRows},
    },
    layout::{BlockId, NO_BLOCK},
    sampling::{LISTED_TOKENS_MAX, LOGIT_BIASES_MAX},
};

impl DeviceBatch {
    /// Checks the input values that the device does not check.
    pub(super) fn check(&self, input: &StepInput<'_>) -> Result<(), CudaError> {
        let BatchLimits { slots, sequence_tokens, rows, samples, stops, vocabulary, .. } =
            self.limits;
        let blocks = self.memory.blocks.block_count();
        let table = self.memory.groups.entries(sequence_tokens as usize);
        let check = |is_allowed: bool, what, value: u64, allowed| match is_allowed {
            true => Ok(()),
            false => Err(CudaError::Unsupported { what, value: value.to_string(), allowed }),
        };
        let StepInput { admissions, extensions, sequences, .. } = *input;
        let all_slots = admissions.iter().map(|admission| admission.slot);
        let all_slots = all_slots
            .chain(extensions.iter().map(|extension| extension.slot))
            .chain(sequences.iter().map(|sequence| sequence.slot));
        let slot = all_slots.max().unwrap_or(0);
        check(slot < slots, "a slot of the step", slot.into(), "a slot of the batch")?;
        let tables = admissions.iter().map(|it| (0, it.position as usize, it.blocks));
        let tables = tables.chain(extensions.iter().map(|it| (it.first as usize, 0, it.blocks)));
        for (first, position, ids) in tables {
            // Only entries behind the window of their KV group may have no block.
            let is_used = |(entry, block): &(usize, &BlockId)| {
                **block != NO_BLOCK || self.memory.groups.is_needed(*entry, position)
            };
            let used = (first..).zip(ids).filter(is_used).map(|(_, block)| block.0);
            let block = used.max().unwrap_or(0);
            check(block < blocks, "a block of the step", block.into(), "a block of the arena")?;
            let (length, allowed) = (first + ids.len(), "that of the longest sequence or less");
            check(length <= table, "a block table's length", length as u64, allowed)?;
        }
        for Admission { tokens, sampling, .. } in admissions {
            let (count, allowed) = (tokens.len(), "the longest sequence's tokens or fewer");
            let is_allowed = count <= sequence_tokens as usize;
            check(is_allowed, "a sequence's tokens", count as u64, allowed)?;
            let token = tokens.iter().copied().max().unwrap_or(0);
            let (what, allowed) = ("a token of the step", "a token of the vocabulary");
            check(token < vocabulary, what, token.into(), allowed)?;
            let count = sampling.stop_token_ids.len();
            let is_allowed = sampling.min_tokens == 0 || count <= stops as usize;
            check(is_allowed, "the number of stop tokens", count as u64, "the limit or fewer")?;
            let (biases, listed) =
                (sampling.logit_bias.len(), sampling.bad_words.iter().map(Vec::len).sum());
            for (what, count, most) in [
                ("the number of biases", biases, LOGIT_BIASES_MAX),
                ("the number of tokens in bad words", listed, LISTED_TOKENS_MAX),
            ] {
                check(count <= most, what, count as u64, "the limit or fewer")?;
            }
        }
        for KnownDrafts { slot, length, tokens } in input.known_drafts {
            let count = length.saturating_add(tokens.len() as u32);
            let (what, allowed) = ("a draft token of the step", "a token of the vocabulary");
            let token = tokens.iter().copied().max().unwrap_or(0);
            check(token < vocabulary, what, token.into(), allowed)?;
            let row = sequences.iter().find(|sequence| sequence.slot == *slot);
            let is_allowed = input.drafts.is_some()
                && count <= sequence_tokens
                && row.is_some_and(|row| row.rows as usize == 1 + tokens.len());
            check(is_allowed, "the draft tokens of a slot", count.into(), "those of its rows")?;
        }
        let sum = |count: fn(&StepRows) -> u32| -> u64 {
            sequences.iter().map(|sequence| u64::from(count(sequence))).sum()
        };
        let (all_rows, all_samples) = (sum(|sequence| sequence.rows), sum(|s| s.samples));
        check(all_rows <= rows.into(), "the number of rows", all_rows, "the limit or fewer")?;
        let is_allowed = all_samples <= samples.into();
        check(is_allowed, "the number of samples", all_samples, "the limit or fewer")?;
        let (rows_min, what) = (input.rows_min, "the padded number of rows");
        let verified = input.drafts.map_or(0, |drafts| drafts.rows);
        let padded = rows_min.max(sequences.len() as u32).saturating_mul(verified);
        let is_allowed = rows_min <= rows.min(samples).min(slots) && padded <= rows.min(samples);
        check(is_allowed, what, rows_min.into(), "the limit or fewer")?;
        for &StepRows { position, rows, samples, .. } in sequences {
            let is_allowed = match verified {
                0 => rows_min == 0 || (rows, samples) == (1, 1),
                _ => rows <= verified && samples == rows,
            };
            let what = "the rows of a padded step's sequence";
            let allowed = "one row and its draft tokens, which sample";
            check(is_allowed, what, rows.into(), allowed)?;
            let end = u64::from(position) + u64::from(rows);
            let is_allowed = rows > 0 && samples <= rows && end <= sequence_tokens.into();
            let allowed =
                "an end within the longest sequence, at least one row and at most one sample a row";
            check(is_allowed, "a sequence's end", end, allowed)?;
        }
        Ok(())
    }
}
