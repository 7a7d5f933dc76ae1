//! Requirements of an attempt on its nodes.

use std::time::Instant;

use crate::{Epoch, ModelIdentity, PrefixKeys};

/// Requirements of an attempt on its nodes.
#[derive(Clone, Copy, Debug)]
pub struct NodeRequirements<'a> {
    /// Name of the model.
    pub model: &'a str,
    /// Length of the client's prompt, in tokens.
    pub prompt_tokens: u32,
    /// Prompt and emitted tokens.
    pub tokens: u32,
    /// Maximum number of further output tokens.
    pub new_tokens_max: u32,
    /// Whether the decode node must prefill the prompt itself.
    pub local_prefill: bool,
    /// Draining node process that decodes the sequence, and from which the sequence moves with its
    /// KV. If this process can send KV, it is the attempt's prefill node.
    pub moves_from: Option<Epoch>,
    /// Cache keys of the prompt's blocks for each identity of the nodes. Without keys of its
    /// identity a node counts as having no cached block.
    pub prefix: &'a [PrefixKeys],
    /// Identity that the decode node must be compatible with.
    pub identity: Option<&'a ModelIdentity>,
    /// Whether the decode node may have another weight version than `identity`.
    pub any_weights: bool,
    /// Grammar version that the answer needs; 0 for none.
    pub grammar_version: u32,
    /// Version of [`proto::v1::Sampling`] that the attempt needs.
    pub sampling_version: u32,
    /// Whether the attempt returns pooled values and ends with its prompt. A prefill node computes
    /// them alone.
    pub pooling: bool,
    /// Content hash of the adapter that the nodes must have; `None`: the base model.
    pub adapter: Option<u128>,
    /// Decode node processes that already failed this request.
    pub exclude_decode: &'a [Epoch],
    /// Prefill node processes that already failed this request.
    pub exclude_prefill: &'a [Epoch],
    /// Capacity that the attempt needs of its nodes.
    pub capacity: RequiredCapacity,
    /// Since when the request waits for a node; `None` before its first pick.
    pub waits_since: Option<Instant>,
}

/// Capacity that an attempt needs of its nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredCapacity {
    /// None: the nodes may queue the attempt.
    Any,
    /// The attempt must be able to start. With `headroom` an eighth of all slots stays free for
    /// other callers, the queue of prompts is shorter, and no decode node prefills the prompt if a
    /// prefill node can.
    Start { headroom: bool },
}

impl RequiredCapacity {
    pub(super) fn leaves_headroom(self) -> bool {
        self == Self::Start { headroom: true }
    }
}
