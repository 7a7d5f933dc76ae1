//! Messages between scheduler and executor: step plans and step results.
//!
//! A [`StepPlan`] is a diff: rows that left, new rows, blocks that were added, and how many tokens
//! each scheduled row advances. The executor keeps the rest: tokens, positions, block tables and
//! sampling state of every slot. Sampled tokens stay in the executor's token pool, so the next step
//! can be launched before the host has read them. For the same reason the executor proposes draft
//! tokens; the scheduler only bounds their number. The draft tokens of a constrained row are known
//! to the host, which needs a bitmask after each of them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kernels::{
    BlockId,
    backend::ExpertLoad,
    sampling::{SampledToken, Sampling, TokenLogprobs, TokenMask},
};
use serde::{Deserialize, Serialize};

/// Number of a step of one engine, from 0.
pub type StepId = u64;

/// Index of a row in the running batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Slot(pub u32);

/// Number of the occupant of a slot. A finish, abort or preemption increments it, so that a late
/// result row is recognized as stale.
pub type Generation = u32;

/// One step, as a diff to the previous step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    pub step_id: StepId,
    /// Slots whose occupant left since the last plan.
    pub released: Vec<Slot>,
    /// New occupants; their slots are free or in `released`.
    pub admitted: Vec<AdmittedRow>,
    /// Blocks appended to the tables of occupants; at most one entry for each slot.
    pub extended: Vec<(Slot, Vec<BlockId>)>,
    /// Copies of blocks before the forward pass, in order, each from the first block to the second.
    pub copies: Vec<(BlockId, BlockId)>,
    /// Rows of this forward pass, those of several tokens first; none only in a plan that releases
    /// slots.
    pub rows: Vec<RowPlan>,
    /// Whether rows with a grammar sample. Then sampling waits for
    /// [`supply`](crate::executor::Executor::supply).
    pub awaits_masks: bool,
    /// Upper bound on the draft tokens of all rows.
    pub drafts_max: u32,
    /// Draft tokens of constrained rows, in the order of the rows. The executor finds those of
    /// other rows.
    pub drafts: Vec<(Slot, Vec<u32>)>,
}

/// New occupant of a slot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdmittedRow {
    pub slot: Slot,
    pub generation: Generation,
    /// Every token known at admission: prompt, then output so far.
    pub tokens: Vec<u32>,
    /// Prompt tokens in `tokens`. The output index counts from here.
    pub prompt_len: u32,
    /// Tokens whose KV is already in `blocks`; less than `tokens.len()`.
    pub computed: u32,
    pub blocks: Vec<BlockId>,
    pub sampling: Sampling,
    /// Whether the row must not sample without a token bitmask.
    pub constrained: bool,
    /// Slot of the row's adapter; `None`: the base model.
    pub adapter: Option<u32>,
}

/// Token bitmask of one sample of a launched step. A row that verifies draft tokens may have
/// several bitmasks: one for the token after its known tokens, and one after each draft token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowMask {
    pub slot: Slot,
    /// Length of the row at the sample. The executor rejects a bitmask of another length.
    pub length: u32,
    pub allowed: Arc<TokenMask>,
}

/// One row of a forward pass: `token_count` tokens from the row's position on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowPlan {
    pub slot: Slot,
    pub generation: Generation,
    pub token_count: u32,
    /// Whether the executor samples after the row's last token in this step, appends the sampled
    /// token to the token pool and returns it.
    pub samples: bool,
    /// Upper bound on the draft tokens that the executor may append to a row that samples; for a
    /// constrained row, their number. The row has blocks for their KV. The executor returns the
    /// accepted draft tokens and one sampled token.
    pub drafts_max: u32,
}

/// Result of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    pub step_id: StepId,
    /// One entry for each row of the plan, in the plan's order. The KV of these rows is written.
    pub rows: Vec<RowResult>,
    /// Time the device worked on the step, without its wait for token bitmasks.
    pub busy: Duration,
    pub run: StepRun,
}

/// Launch mode, upload size and times of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepRun {
    pub dispatch: Dispatch,
    /// Bytes sent to the device for the step.
    pub uploaded_bytes: u64,
    /// Load of the experts; zero without experts and on GPUs, which do not report it.
    pub experts: ExpertLoad,
    /// When the device worked on the step, on the host's clock, its wait for token bitmasks
    /// included.
    pub device: Option<Span>,
    /// When the results were in host memory.
    pub results_at: Option<Instant>,
    /// When the engine thread collected the results; the time before is waiting.
    pub collected_at: Option<Instant>,
}

/// Launch mode of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dispatch {
    /// Kernel by kernel.
    #[default]
    Eager,
    /// As a CUDA graph of `rows` rows; rows beyond those of the step are padding.
    Graph { rows: u32 },
    /// Kernel by kernel, because no captured CUDA graph fits this decode step.
    Fallback,
}

/// A time interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub begin: Instant,
    pub end: Instant,
}

impl Span {
    pub fn duration(&self) -> Duration {
        self.end.saturating_duration_since(self.begin)
    }
}

/// Result of one row of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowResult {
    pub slot: Slot,
    pub generation: Generation,
    /// Empty when the row did not sample, failed, or had no token bitmask in time. Otherwise the
    /// accepted draft tokens and one sampled token. The KV of all tokens but the last is written.
    pub tokens: Vec<SampledToken>,
    /// With [`Sampling::prompt_logprobs`]: of the prompt tokens after each token of the row.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Draft tokens verified.
    pub drafted: u32,
    /// No token could be sampled. Later rows of the same sequence fail too.
    pub failure: Option<RowFailure>,
}

/// Reason why a row has no next token. Other sequences are not affected.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum RowFailure {
    /// The sampling parameters allow no token.
    #[error("no token can be chosen: {reason}")]
    Sampling { reason: String },
    /// The model computed a NaN or infinite logit.
    #[error("the forward pass failed: {reason}")]
    Logits { reason: String },
}
