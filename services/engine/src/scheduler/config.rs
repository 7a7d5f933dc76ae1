//! Limits of a scheduler, within the limits of its executor.

use std::time::Duration;

use crate::executor::{ExecutorLimits, Speculation};

/// Bounds of one scheduler. [`SchedulerConfig::new`] has the defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    pub limits: ExecutorLimits,
    /// Token budget of one step, shared by all rows; at most the executor's limit.
    pub step_tokens: u32,
    /// Upper bound on the tokens of one row in one step.
    pub chunk_tokens: u32,
    /// Whether the prefix cache is on.
    pub prefix_cache: bool,
    /// Sequences that may wait for blocks or a slot; further ones are rejected as `Busy`.
    pub waiting_max: u32,
    /// Transfers known at once, from `Arrived` to the end of their last write or read.
    pub transfers_max: u32,
    /// Time a `Receive` may wait for blocks before it fails as `Busy`. Short, because another node may have
    /// free blocks and the client waits.
    pub reserve_timeout: Duration,
    /// Time a `Send` may wait for the receiver's reservation: the lease.
    pub ready_timeout: Duration,
}

impl SchedulerConfig {
    pub fn new(limits: ExecutorLimits) -> Self {
        Self {
            limits,
            step_tokens: limits.step_tokens,
            chunk_tokens: limits.step_tokens,
            prefix_cache: true,
            // Four batches; more would only wait in the queue.
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
            let Speculation { row_drafts, step_tokens, ngram_min, ngram_max } = speculation;
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

/// A bound that contradicts another bound.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SchedulerConfigError {
    #[error("invalid {field}: 0; expected at least 1")]
    Zero { field: &'static str },
    /// Every running row must be able to advance in every step.
    #[error(
        "step_tokens is {value}, allowed is {slots} (one for each slot) to {most} (the executor's)"
    )]
    StepTokens { value: u32, slots: u32, most: u32 },
}
