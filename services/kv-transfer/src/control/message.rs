//! Control messages as the protocol sees them: every field checked, no byte strings.

use kernels::{BlockId, sampling::SampledToken};

use crate::api::{Epoch, Identity, TransferId};

/// The process that signed a control message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub node_id: String,
    pub epoch: Epoch,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ControlMessage {
    /// W3C trace context, on messages that start or end work; else empty.
    pub traceparent: String,
    pub body: Body,
}

impl ControlMessage {
    /// A control message that belongs to no trace.
    pub fn untraced(body: Body) -> Self {
        Self { traceparent: String::new(), body }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    Hello(Hello),
    HelloOk(HelloOk),
    Reject {
        reason: String,
        identity: Identity,
    },
    /// D → P: these blocks wait for the KV of this prompt.
    Reserve(Reserve),
    /// P → D: the KV of `block_count` blocks from the prompt's block `first_block` on will come, or is written.
    /// Answers `RESERVE` as well.
    Chunk {
        transfer: TransferId,
        chunk: u32,
        first_block: u32,
        block_count: u32,
        bytes: u64,
    },
    /// D → P: the receive of this chunk is posted.
    ClearToSend {
        transfer: TransferId,
        chunk: u32,
    },
    /// P → D: what completes the transfer beside the blocks.
    Done(Done),
    Ack {
        transfer: TransferId,
    },
    Abort {
        transfer: TransferId,
        cause: AbortCause,
        reason: String,
    },
    /// Nothing of this transfer is in flight any more on the side that says so.
    AbortAck {
        transfer: TransferId,
    },
    Heartbeat {
        /// Wanted. Naming one also answers its `RESERVE`.
        transfers: Vec<TransferId>,
        /// Wanted, and their `RESERVE` has not been seen.
        awaited: Vec<TransferId>,
    },
}

impl Body {
    /// An `ABORT` that says nothing of models or weights.
    pub fn give_up(transfer: TransferId, reason: String) -> Self {
        Self::Abort { transfer, cause: AbortCause::GivenUp, reason }
    }
}

/// What the other side is to make of an `ABORT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbortCause {
    /// The transfer is not wanted any more, or something went wrong.
    GivenUp,
    /// The two have, or now have, different models or weights.
    Mismatch,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub identity: Identity,
    pub control_endpoint: String,
    pub data_endpoint: String,
    /// Best first.
    pub transports: Vec<String>,
    /// Best first.
    pub integrity: Vec<String>,
    /// Which of the sender's pairs this is; later ones have higher numbers.
    pub session: u64,
    /// Nothing is to be transferred yet.
    pub in_advance: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloOk {
    pub identity: Identity,
    pub data_endpoint: String,
    pub transport: String,
    pub integrity: String,
    /// Which of the answering process's pairs this is.
    pub session: u64,
    /// All that it can do, best first.
    pub transports: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserve {
    pub transfer: TransferId,
    pub model_fingerprint: u128,
    pub weight_version: u64,
    pub prompt_hash: u128,
    /// First block of the prompt that is wanted.
    pub first_block: u32,
    /// Blocks at D, in the order of the prompt.
    pub blocks: Vec<BlockId>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    pub transfer: TransferId,
    pub chunk_count: u32,
    pub first_index: u32,
    pub token: SampledToken,
    /// One value a chunk.
    pub integrity: Vec<u64>,
    /// Of the model and weights that computed the KV and the token.
    pub model_fingerprint: u128,
    pub weight_version: u64,
}
