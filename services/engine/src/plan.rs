//! What a scheduler tells an executor, and what comes back. Nothing else crosses between them.
//!
//! A [`StepPlan`] is a diff: rows that left, rows that are new, blocks that were added, and how many
//! tokens each scheduled row advances. The executor keeps the rest: tokens, positions, block tables
//! and sampling state of every slot. Tokens sampled in a step stay in the executor's token pool, so
//! the next step can be launched before they are read. For the same reason it is the executor that
//! guesses tokens ahead: the scheduler only says how many may be, and plans with that bound.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kernels::{
    BlockId,
    sampling::{SampledToken, Sampling, TokenMask},
};
use serde::{Deserialize, Serialize};

/// Numbers the steps of one engine, from 0.
pub type StepId = u64;

/// A row of the running batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Slot(pub u32);

/// Counts the occupants of a slot. Finish, abort and preemption bump it, so that a late result
/// row is stale by comparison.
pub type Generation = u32;

/// One step, as a difference to the step before.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    pub step_id: StepId,
    /// Slots whose occupant left since the last plan.
    pub released: Vec<Slot>,
    /// New occupants; their slots are free or in `released`.
    pub admitted: Vec<AdmittedRow>,
    /// Blocks appended to the tables of occupants.
    pub extended: Vec<(Slot, Vec<BlockId>)>,
    /// The rows of this forward, at least one.
    pub rows: Vec<RowPlan>,
    /// What the constrained rows that sample may choose: a bitmask each, uploaded with the step.
    pub masks: Vec<RowMask>,
    /// Most drafts of all rows together.
    pub drafts_max: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdmittedRow {
    pub slot: Slot,
    pub generation: Generation,
    /// Every token known at admission: prompt, then output so far.
    pub tokens: Vec<u32>,
    /// How many of `tokens` are the prompt; the output index counts from here.
    pub prompt_len: u32,
    /// Tokens whose KV is already in `blocks`; less than `tokens.len()`.
    pub computed: u32,
    pub blocks: Vec<BlockId>,
    pub sampling: Sampling,
    /// It never samples without a mask, and has no drafts.
    pub constrained: bool,
}

/// What one row may choose in this step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowMask {
    pub slot: Slot,
    /// The tokens that the row has then: a mask of another position is none.
    pub length: u32,
    pub allowed: Arc<TokenMask>,
}

/// One row of a forward: `token_count` tokens from the row's position on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowPlan {
    pub slot: Slot,
    pub generation: Generation,
    pub token_count: u32,
    /// True when these are the last tokens known to the device: a token is sampled, written to the
    /// token pool behind them and returned.
    pub samples: bool,
    /// Of a row that samples: how many drafts the executor may put behind its tokens. There are
    /// blocks for their KV. It returns one token more than it finds to be right.
    pub drafts_max: u32,
}

/// What one step brought.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    pub step_id: StepId,
    /// One for every row of the plan, in its order. The KV of these rows is written.
    pub rows: Vec<RowResult>,
    /// Time the device worked on it.
    pub busy: Duration,
    pub run: StepRun,
}

/// What the executor knows of how a step went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepRun {
    pub dispatch: Dispatch,
    /// Sent to the device for it, weights aside.
    pub uploaded_bytes: u64,
    /// When the device worked on it, by the host's clock.
    pub device: Option<Span>,
    /// When the results were in the host's memory.
    pub landed_at: Option<Instant>,
    /// When the engine's thread had them in hand: what was before is waiting.
    pub taken_at: Option<Instant>,
}

/// How the work of a step was given to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dispatch {
    /// Operation by operation.
    #[default]
    Eager,
    /// As a captured graph of so many rows; those beyond the step's own are padding.
    Graph { rows: u32 },
    /// Operation by operation, although graphs are on and the step decodes: none of them fits it.
    Fallback,
}

/// From one moment to another.
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

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowResult {
    pub slot: Slot,
    pub generation: Generation,
    /// 0 when the row did not sample or failed, else 1 and the drafts that were right. The KV of
    /// all but the last is written.
    pub tokens: Vec<SampledToken>,
    /// Drafts that were looked at.
    pub drafted: u32,
    /// No token could be chosen. Every later row of the same occupant fails likewise.
    pub failure: Option<RowFailure>,
}

/// Why a row has no next token. Concerns its sequence alone.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum RowFailure {
    /// The sampling parameters allow none.
    #[error("no token can be chosen: {reason}")]
    Sampling { reason: String },
    /// A constrained row came to its choice without the mask for it. A defect.
    #[error("no token can be chosen: the mask for position {position} is missing")]
    NoMask { position: u32 },
    /// The model computed something that is no number.
    #[error("the forward pass failed: {reason}")]
    Logits { reason: String },
}
