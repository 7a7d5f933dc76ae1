//! Limits of a scheduler, within the limits of its executor.

use std::time::Duration;

use kernels::BLOCK_TOKENS;

use crate::executor::{ExecutorLimits, Speculation};

/// Bounds of one scheduler. [`SchedulerConfig::new`] has the defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    pub limits: ExecutorLimits,
    /// Token budget of one step, shared by all rows; at most the executor's limit.
    pub step_tokens: u32,
    /// Upper bound on the tokens of one row in one step.
    pub chunk_tokens: u32,
    /// Tokens of the last part of a long prompt whose KV is sent to another node. The KV of the
    /// last part is sent after the step that computes it. `None`: prompts are not split.
    pub tail_tokens: Option<u32>,
    /// Whether the launch of the next decode step waits for KV that a prefill peer is about to
    /// send, until shortly before the device would be idle. Off if the time of a launch is unknown.
    pub waits_for_kv: bool,
    /// Bound on steps that decode; `None`: prefill may take the rest of a step with decode rows.
    pub itl: Option<ItlLimit>,
    /// Whether the prefix cache is on.
    pub prefix_cache: bool,
    /// Whether rows verify draft tokens only where the measured times of steps show that this pays
    /// off. Off in tests that must not depend on the speed of a machine.
    pub measures_drafts: bool,
    /// Maximum sequences that wait for blocks or a slot; further sequences are rejected as `Busy`.
    pub waiting_max: u32,
    /// Transfers known at once, from `Arrived` to the end of their last write or read.
    pub transfers_max: u32,
    /// Time a `Receive` may wait for blocks before it fails as `Busy`. Short, because another node
    /// may have free blocks and the client waits.
    pub reserve_timeout: Duration,
    /// Time a `Send` may wait for the receiver's reservation: the lease. With a grammar the time is
    /// longer by [`COMPILE_TIMEOUT`](crate::constraint::COMPILE_TIMEOUT), because the receiver
    /// compiles the grammar first.
    pub ready_timeout: Duration,
}

impl SchedulerConfig {
    pub fn new(limits: ExecutorLimits) -> Self {
        Self {
            limits,
            step_tokens: limits.step_tokens,
            chunk_tokens: limits.step_tokens,
            tail_tokens: None,
            waits_for_kv: true,
            itl: None,
            prefix_cache: true,
            measures_drafts: true,
            // Four batches: more sequences would only wait in the queue.
            waiting_max: limits.slots.saturating_mul(4),
            transfers_max: limits.slots.saturating_mul(8),
            reserve_timeout: Duration::from_millis(500),
            ready_timeout: Duration::from_secs(2),
        }
    }

    pub(super) fn validate(&self) -> Result<(), SchedulerConfigError> {
        let ExecutorLimits { slots, step_tokens, sequence_tokens, blocks, depth, .. } = self.limits;
        let positive = [
            ("limits.slots", slots),
            ("limits.sequence_tokens", sequence_tokens),
            ("limits.blocks", blocks),
            ("limits.depth", depth),
            ("chunk_tokens", self.chunk_tokens),
        ];
        let speculation_limits = self.limits.speculation.into_iter().flat_map(|speculation| {
            let Speculation { row_drafts, step_tokens, ngram_min, ngram_max, .. } = speculation;
            [
                ("limits.speculation.row_drafts", row_drafts),
                ("limits.speculation.step_tokens", step_tokens),
                ("limits.speculation.ngram_min", ngram_min),
                ("limits.speculation.ngram_max", ngram_max),
            ]
        });
        for (field, value) in positive.into_iter().chain(speculation_limits) {
            if value == 0 {
                return Err(SchedulerConfigError::Zero { field });
            }
        }
        if self.step_tokens < slots || self.step_tokens > step_tokens {
            return Err(SchedulerConfigError::StepTokens {
                value: self.step_tokens,
                slots,
                most: step_tokens,
            });
        }
        Ok(())
    }
}

/// Bound on the time of a step that decodes, and the measured times from which a step's time is
/// estimated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ItlLimit {
    /// Maximum time of a step with decode rows.
    pub max: Duration,
    /// Time of a step that decodes one row.
    pub decode: Duration,
    /// Fixed time of a prefill step, without the time of its tokens.
    pub prefill: Duration,
    /// Time of a prompt token at the start of its prompt.
    pub token: Duration,
    /// Position at which attention doubles the time of a prompt token.
    pub doubling_tokens: u32,
}

impl ItlLimit {
    /// Returns the prefill budget of a step with decode rows, in tokens at the start of a prompt.
    /// The decode rows take `decode_extra` longer than one row. The budget is at least one block,
    /// so that prefill never starves.
    pub(crate) fn prefill_tokens(&self, decode_extra: Duration) -> u32 {
        let left = self.max.saturating_sub(self.prefill + decode_extra);
        let tokens = left.as_nanos() / self.token.as_nanos().max(1);
        u32::try_from(tokens).unwrap_or(u32::MAX).max(BLOCK_TOKENS as u32)
    }

    /// Returns the expected time of a step with one decode row and this much prefill, in tokens at
    /// the start of a prompt.
    pub(super) fn step_time(&self, prefill_tokens: u32) -> Duration {
        match prefill_tokens {
            0 => self.decode,
            tokens => self.decode.max(self.prefill + self.token * tokens),
        }
    }

    /// Returns the number of tokens from `position` on that take no longer than `tokens` at the
    /// start of a prompt.
    pub(super) fn tokens_at(&self, position: usize, tokens: u32) -> u32 {
        let doubling = u64::from(self.doubling_tokens);
        (u64::from(tokens) * doubling / (doubling + position as u64).max(1)) as u32
    }

    /// Returns the number of tokens at the start of a prompt that take as long as `count` tokens
    /// from `position` on.
    pub(super) fn cost_at(&self, position: usize, count: u32) -> u32 {
        let doubling = u64::from(self.doubling_tokens.max(1));
        let cost = u64::from(count) * (doubling + position as u64) / doubling;
        u32::try_from(cost).unwrap_or(u32::MAX)
    }
}

/// A bound that contradicts another bound.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SchedulerConfigError {
    #[error("invalid {field}: 0; expected at least 1")]
    Zero { field: &'static str },
    /// Every running row must be able to advance in every step.
    #[error(
        "invalid step_tokens: {value}; expected {slots} (one for each slot) to {most} (the executor's)"
    )]
    StepTokens { value: u32, slots: u32, most: u32 },
}
