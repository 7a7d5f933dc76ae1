//! Inputs and actions of the scheduler.
//!
//! A *sequence* is one attempt at a request on this node. Its life depends on its kind:
//! * `Compute`: waiting → running → finished. The node prefills and decodes.
//! * `Send` (prefill node): waits for [`Input::TransferReady`], then waiting → running.
//!   [`Action::KvWritten`] hands blocks whose KV is written to the outgoing transfer; token 0 ends
//!   the sequence. The transfer holds the blocks until [`Input::TransferEnded`].
//! * `Receive` (decode node): reserves blocks as soon as enough are available, by
//!   [`Action::Reserve`]. After [`Input::KvArrived`] the blocks belong to the sequence, which
//!   decodes from the next index on. After [`Input::TransferEnded`] without arrival the sequence
//!   has failed and its blocks are free. If less than one block of the prompt is uncached, the node
//!   prefills the rest itself: the sequence becomes a `Compute`.
//!
//! With KV tiers a sequence may first wait in phase loading: see [`tiers`](crate::tiers).
//!
//! A transfer may outlive its sequence. The scheduler knows a transfer for every accepted `Send`,
//! and for a `Receive` from [`Action::Reserve`] on. Each transfer needs exactly one end:
//! [`Input::KvArrived`] or [`Input::TransferEnded`].

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kernels::{
    BlockId,
    sampling::{SampledToken, Sampling, TokenLogprobs},
};

use crate::{
    adapter::LoadedAdapter,
    constraint::Constraint,
    tiers::{JobId, LoadJob, SaveJob, TierEvent},
};

/// Id of a sequence at this node: the attempt's transfer id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u128);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceKind {
    Compute,
    Send,
    Receive,
}

/// Client hints about the conversation of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionHint {
    /// Session that the request is a turn of. The number is derived from the session's name and the
    /// cache salt.
    pub session: Option<u128>,
    /// Time for which the KV is to be kept for the next turn.
    pub keep: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct NewSequence {
    pub id: SequenceId,
    pub kind: SequenceKind,
    /// Prompt tokens, then the output of earlier attempts.
    pub tokens: Vec<u32>,
    pub prompt_len: u32,
    pub sampling: Sampling,
    /// Maximum output tokens of the whole request.
    pub max_tokens: u32,
    /// Whether stop tokens are treated as ordinary tokens.
    pub ignore_stop_tokens: bool,
    /// Seed of the prefix cache's hash chain.
    pub cache_salt: String,
    /// Adapter that the sequence computes with; `None`: the base model.
    pub adapter: Option<Arc<LoadedAdapter>>,
    pub session: SessionHint,
    /// Grammar of the answer; it has consumed the output in `tokens`.
    pub constraint: Option<Constraint>,
    /// The sequence fails with `Deadline` when it is not finished by then.
    pub deadline: Instant,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    Arrived(NewSequence),
    /// The router cancelled the request, or the node stops. At most one more `AbortTransfer` names
    /// the sequence; its transfer owns its blocks until `TransferEnded`.
    Abort {
        id: SequenceId,
    },
    /// `Send`: the receiver's reservation of `block_count` blocks arrived; the receiver has the
    /// blocks before number `first_block`. Blocks have the numbers of [`Action::Reserve`].
    TransferReady {
        id: SequenceId,
        first_block: u32,
        block_count: u32,
    },
    /// `Receive`: every reserved block is written; `token` has index `first_index`.
    KvArrived {
        id: SequenceId,
        first_index: u32,
        token: SampledToken,
    },
    /// `Send`: the transfer was delivered or failed, and none of its copies is in flight.
    /// `Receive`: the transfer failed, and no write can land.
    TransferEnded {
        id: SequenceId,
    },
    /// The result of a copy of the KV tiers.
    Tier(TierEvent),
}

#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// `Receive`, `Compute`: the sequence has blocks, so the router may emit token 0. Sent once.
    /// `cached_tokens` of the tokens were in the prefix cache; `local_prefill`: no prefill node is
    /// needed.
    Admitted { id: SequenceId, cached_tokens: u32, local_prefill: bool },
    /// `Receive`: request blocks of the prompt from the prefill peer, from number `first_block` on.
    /// Only the blocks of [`KvGroups::sent`](kernels::KvGroups::sent) have numbers: blocks behind
    /// the window of their KV group have none. `cached_tokens` of the tokens were in the prefix cache.
    Reserve { id: SequenceId, cached_tokens: u32, first_block: u32, blocks: Vec<BlockId> },
    /// `Send`: the KV of these blocks of the prompt is written, and the blocks are held and pinned.
    /// The first of them has number `first_block`, as in [`Action::Reserve`]. Each block is handed
    /// over once, in order, without gaps.
    KvWritten { id: SequenceId, first_block: u32, blocks: Vec<BlockId> },
    /// Tokens `first_index..`, each once, in order. `Receive` repeats token 0 as its first.
    /// `prompt_logprobs`: with the first tokens of a sequence with [`Sampling::prompt_logprobs`],
    /// those of the prompt tokens from the second on.
    Tokens {
        id: SequenceId,
        first_index: u32,
        tokens: Vec<SampledToken>,
        cached_tokens: u32,
        prompt_logprobs: Option<Vec<TokenLogprobs>>,
    },
    /// Last action of a sequence that completed. For `Send`: token 0 is sampled and all blocks are
    /// handed over. If `reason` is set, token 0 also ends the request: then there is nothing to
    /// deliver, and `AbortTransfer` was emitted earlier.
    Finished { id: SequenceId, reason: Option<FinishReason> },
    /// Last action of a sequence that did not complete; `AbortTransfer` was emitted earlier if a
    /// transfer is in flight. `Duplicate` rejects the new sequence only: the known sequence
    /// continues.
    Failed { id: SequenceId, failure: SequenceFailure },
    /// The transfer of this sequence must be aborted. Sent once per transfer; `TransferEnded`
    /// follows.
    AbortTransfer { id: SequenceId, reason: String },
    /// A block is to be copied to a KV tier. [`TierEvent::Saved`] or [`TierEvent::SaveFailed`]
    /// follows.
    Save(SaveJob),
    /// A sequence waits for blocks that saves keep. All saves up to this job whose copies have not
    /// begun must fail at once.
    CancelSaves { last: JobId },
    /// Blocks are to be copied from KV tiers. [`TierEvent::Loaded`] follows.
    Load(LoadJob),
    /// The sequence no longer waits for its last load. `tokens`: tokens whose KV the sequence took;
    /// 0 if it took none.
    Loaded { id: SequenceId, tokens: u32 },
}

/// Treatment of running sequences at a change of the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InFlight {
    /// They are recomputed over all their tokens.
    #[default]
    Recompute,
    /// Sequences with output keep their KV, which other sequences never use. Sequences without
    /// output are recomputed.
    KeepKv,
    /// Sequences with output end. Sequences without output are recomputed.
    Abort,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was sampled, or the grammar is complete and allows no further token.
    Stop,
    /// The output reached `max_tokens` or the sequence reached its maximum length.
    Length,
    /// The weights changed.
    Abort,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SequenceFailure {
    /// The queue is full, or no blocks can be reserved now.
    #[error("busy: {reason}")]
    Busy { reason: String },
    /// The request can never run here.
    #[error("{reason}")]
    Invalid { reason: String },
    #[error("a sequence with this id already exists")]
    Duplicate,
    #[error("the transfer failed")]
    TransferFailed,
    #[error("the deadline passed")]
    Deadline,
    /// The node's weights changed or are about to change, so KV of this attempt is worthless. The
    /// next attempt may succeed.
    #[error("the weights changed")]
    WeightsChanged,
    /// This node computed invalid values for this sequence. Another node may succeed.
    #[error("internal: {reason}")]
    Internal { reason: String },
}

/// A change of the prefix cache's contents, for routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheChange {
    Added(BlockHash),
    Evicted(BlockHash),
}

/// Hash of a block's tokens and of all blocks before it, seeded with model, weights and salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u128);

impl BlockHash {
    /// Returns the key of a KV group's block. The first group's blocks have the hash itself, which
    /// routers follow.
    pub(crate) fn of_group(self, group: usize) -> Self {
        // An odd factor: the keys of all groups differ in many bits.
        const FACTOR: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        Self(self.0 ^ (group as u128).wrapping_mul(FACTOR))
    }
}

/// Load of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Sequences in the batch.
    pub running: u32,
    /// Sequences in the batch that still prefill.
    pub prefilling: u32,
    /// Known sequences that are not in the batch.
    pub waiting: u32,
    /// Tokens of known sequences that this node has not prefilled yet.
    pub pending_prompt_tokens: u64,
    /// Token pairs that attention computes for these tokens: for each token, the tokens up to it.
    pub pending_prompt_pairs: u64,
    /// KV tokens of the sequences in the batch that decode.
    pub context_tokens: u64,
    pub blocks_free: u32,
    pub blocks_cached: u32,
    /// Cached blocks that are kept for the next turn of their conversation.
    pub blocks_kept: u32,
    pub blocks_held: u32,
    pub blocks_reserved: u32,
}
