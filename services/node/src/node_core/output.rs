//! Inputs and outputs of the [`NodeCore`](super::NodeCore).

use std::{collections::VecDeque, time::Duration};

use engine::{
    SpeculationStats, StepRecord,
    event::{FinishReason, Load, NewSequence, SequenceId},
    tiers::{JobId, LoadJob, SaveJob, Tier, TierStats},
};
use kernels::sampling::{SampledToken, TokenLogprobs};
use kv_transfer::api::{self as transfer, Epoch, PeerAddress, TransferFailure, TransferStats};
use proto::v1::{self, FailureKind};

/// Id of one `Prefill` or `Decode` call. `number` differs between calls that name the same
/// sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId {
    pub sequence: SequenceId,
    pub number: u64,
}

/// Id of one `Observe` call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObserverId(pub u64);

/// A `Prefill` or `Decode` call whose fields are checked.
#[derive(Clone, Debug)]
pub struct Call {
    pub number: u64,
    /// Equal for all attempts of a request.
    pub request_id: u128,
    /// The weights that the router expects.
    pub weight_version: u64,
    pub sequence: NewSequence,
    /// The other end of the transfer; `None`: this node prefills and decodes.
    pub peer: Option<PeerAddress>,
    pub prompt_hash: u128,
}

impl Call {
    pub fn id(&self) -> CallId {
        CallId { sequence: self.sequence.id, number: self.number }
    }
}

/// Outputs that the shell has not polled yet.
pub(super) type Outputs = VecDeque<NodeOutput>;

/// Work for the shell. Outputs are carried out in order, each before the next one is polled.
#[derive(Clone, Debug)]
pub enum NodeOutput {
    /// The caller gets this reply. When the caller's queue is full, call
    /// [`handle_slow_reader`](super::NodeCore::handle_slow_reader).
    Reply {
        call: CallId,
        reply: Reply,
    },
    /// No later output names this call.
    Forgotten {
        call: CallId,
    },
    /// The transfers get this command, with the trace context of the call's stage in its empty
    /// `traceparent`. When the transfer queue is full, call
    /// [`handle_transfer_queue_full`](super::NodeCore::handle_transfer_queue_full).
    Transfer {
        /// `None`: the command belongs to no call.
        call: Option<CallId>,
        command: transfer::Command,
    },
    /// A stage of the call began or ended.
    Stage {
        call: CallId,
        change: StageChange,
    },
    /// The observer gets this event. When the observer's queue is full, call
    /// [`handle_observe_ended`](super::NodeCore::handle_observe_ended).
    Observe {
        observer: ObserverId,
        event: v1::ObserveEvent,
    },
    /// The step loop is stalled: the observer's stream ends.
    ObserveStalled {
        observer: ObserverId,
    },
    /// The KV tiers copy a block to a tier.
    Save(SaveJob),
    /// The KV tiers fail the saves up to this job whose copies have not begun.
    CancelSaves {
        last: JobId,
    },
    /// The KV tiers copy blocks from a tier.
    Load(LoadJob),
    Metric(Metric),
    /// The node computes with new weights from now on.
    WeightsChanged {
        /// Time from the end of the last step under the old weights until the next step could
        /// begin.
        paused: Duration,
    },
    /// The weights in use were released. No step runs until the weights change.
    WeightsReleased,
    /// A pause began, took effect or ended.
    PauseChanged {
        state: v1::PauseState,
    },
    /// No step has finished for this time.
    Stalled {
        after: Duration,
    },
    /// Steps finish again after a stall.
    Recovered,
}

/// A reply to one call. [`Rejected`](Reply::Rejected) and [`Ended`](Reply::Ended) are the last one.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// The scheduler took the sequence: the stream opens.
    Accepted,
    /// The call fails with a status; there is no stream.
    Rejected(Refusal),
    Event(AttemptEvent),
    Ended(AttemptEnd),
}

impl Reply {
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Rejected(_) | Self::Ended(_))
    }
}

/// One event of a stream.
#[derive(Clone, Debug, PartialEq)]
pub enum AttemptEvent {
    /// Decode: blocks are reserved.
    Reserved { cached_tokens: u32, local_prefill: bool },
    /// Tokens `first_index..`. On a prefill node this is token 0, with `finish` when token 0 ends
    /// the request.
    Tokens {
        first_index: u32,
        tokens: Vec<SampledToken>,
        cached_tokens: u32,
        /// With the first tokens, if the caller asked for them: of the prompt tokens from the
        /// second on.
        prompt_logprobs: Option<Vec<TokenLogprobs>>,
        /// Version of the weights that made the tokens.
        weight_version: u64,
        finish: Option<FinishReason>,
        /// With the first tokens.
        stages: Option<v1::StageTimes>,
    },
}

/// The end of a stream: exactly one, after all events.
#[derive(Clone, Debug, PartialEq)]
pub enum AttemptEnd {
    /// Prefill: token 0 ended the request; nothing is delivered.
    Complete,
    /// Prefill: the decode node has every block.
    Delivered(TransferStats),
    /// Decode: the last token was sampled.
    Finished {
        reason: FinishReason,
        received: TransferStats,
    },
    Failed {
        kind: FailureKind,
        message: String,
    },
}

impl AttemptEnd {
    pub fn failed(kind: FailureKind, message: impl Into<String>) -> Self {
        Self::Failed { kind, message: message.into() }
    }
}

/// Reason why a call is rejected: it ends with a status, and the node keeps nothing of its attempt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("invalid {field}: {value}; expected {expected}")]
    Field { field: String, value: String, expected: String },
    /// The sequence can never run on this node.
    #[error("{reason}")]
    Invalid { reason: String },
    /// The emitted tokens complete the grammar. The earlier attempt ended before it reported the
    /// end of the answer.
    #[error("the answer is complete: its grammar allows no further token")]
    AnswerComplete,
    /// A queue is full, or the blocks cannot be reserved now.
    #[error("busy: {reason}")]
    Busy { reason: String },
    #[error("this node drains; call another node")]
    Draining,
    #[error("transfer_id {id:032x} was used before; expected a new transfer_id")]
    Duplicate { id: u128 },
    #[error("node_epoch = {named}: this process is {own}")]
    OtherEpoch { named: Epoch, own: Epoch },
    #[error("weight_version = {named}: this node has {own}")]
    OtherWeights { named: u64, own: u64 },
    /// The adapter was unloaded after the router picked the node.
    #[error("attempt.adapter = {content_hash:032x}: this node has no such adapter")]
    OtherAdapter { content_hash: u128 },
    #[error("the node's weights changed before the attempt began")]
    WeightsChanged,
    #[error("the request's deadline passed before the request began")]
    Deadline,
    /// The matcher of the grammar failed: a bug, which another node has, too.
    #[error("{reason}")]
    MatcherFailed { reason: String },
    /// The node cannot read its tokenizer. It serves sequences without a grammar.
    #[error("this node cannot follow a grammar: {reason}")]
    NoGrammar { reason: String },
    /// A fault of the node: another node may serve the sequence.
    #[error("{reason}")]
    Internal { reason: String },
    #[error("the engine stopped")]
    Stopped,
}

/// The stages of one attempt at one node; each becomes a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptStage {
    /// From the arrival until the scheduler may run the sequence: blocks and a slot are free and,
    /// on a prefill node, the receiver's reservation has arrived.
    Queue,
    /// From the end of `Queue` or `Reserve` until the first token.
    Prefill,
    /// Decode node with a peer: from the arrival until blocks are reserved.
    Reserve,
    /// From the reservation (decode) or the first written chunk (prefill) until the transfer ends.
    Transfer,
    /// From the start of a load from the KV tiers until no copy of it is left, while the attempt
    /// queues or reserves.
    Load,
    /// From the first token until the last token.
    Decode,
}

impl AttemptStage {
    pub const COUNT: usize = Self::Decode as usize + 1;
}

/// A change of one call's stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StageChange {
    Began(AttemptStage),
    Ended {
        stage: AttemptStage,
        attributes: StageAttributes,
    },
    /// Every open stage ends with this error.
    Failed {
        error: String,
    },
    /// The receiver's trace context, under which [`AttemptStage::Transfer`] will open.
    TransferParent {
        traceparent: String,
    },
}

/// Attributes of a stage that are known when the stage ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StageAttributes {
    pub cached_tokens: Option<u32>,
    /// Tokens whose KV a load has brought.
    pub loaded_tokens: Option<u32>,
    pub transferred: Option<TransferStats>,
    pub error: Option<String>,
}

/// Outcome of a sequence at this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceOutcome {
    Finished(FinishReason),
    /// The prefill node sampled token 0 and transferred the KV.
    HandedOver,
    /// The router dropped the stream.
    Cancelled,
    Failed(FailureKind),
}

/// One measurement for the node's metrics.
#[derive(Clone, Debug, PartialEq)]
pub enum Metric {
    /// Time from a sequence's arrival to its admission.
    QueueTime(Duration),
    /// Time from a sequence's admission to its first token.
    PrefillTime(Duration),
    PrefixLookup {
        prompt_tokens: u32,
        cached_tokens: u32,
    },
    SequenceFinished(SequenceOutcome),
    /// This node was the sender, which computed the KV.
    Sent(Result<TransferStats, TransferFailure>),
    /// This node was the receiver.
    Received(Result<TransferStats, TransferFailure>),
    Step(StepRecord),
    Speculated(SpeculationStats),
    Preempted(u64),
    Load(Load),
    Tier(Tier, TierStats),
}

/// Reason to end every attempt and to reject new calls.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    #[error("the node shuts down; its drain time-out has passed")]
    DrainTimeout,
    #[error("the node shuts down")]
    Stopped,
    #[error("the engine failed: {reason}")]
    EngineFailed { reason: String },
}
