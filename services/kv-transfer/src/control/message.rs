//! Control messages with validated fields.

use kernels::{BlockId, sampling::SampledToken};

/// Cause of an `ABORT`: `Unspecified` if the transfer was cancelled or has failed.
pub use proto::v1::AbortCause;

use crate::api::{Identity, TransferId};

/// Reasons for which a control message is rejected.
pub const CONTROL_REFUSALS: [&str; 16] = [
    "driver_busy",
    "epoch",
    "frames",
    "malformed",
    "no_room_in_advance",
    "not_its_peer",
    "own_epoch",
    "pair_not_up",
    "pairs_full",
    "protocol",
    "replayed",
    "size",
    "tag",
    "transfer_unknown",
    "wrong_side",
    "zap_auth",
];

#[derive(Clone, Debug, PartialEq)]
pub struct ControlMessage {
    /// W3C trace context on messages that start or end work; otherwise empty.
    pub traceparent: String,
    pub body: Body,
}

impl ControlMessage {
    /// Creates a message without a trace context.
    pub fn untraced(body: Body) -> Self {
        Self { traceparent: String::new(), body }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// Starts the handshake.
    Hello(Hello),
    /// Accepts the handshake.
    HelloOk(HelloOk),
    /// Rejects the handshake.
    Reject { reason: String, identity: Identity },
    /// D → P: these blocks are reserved for the KV of this prompt.
    Reserve(Reserve),
    /// P → D: announces the KV of a range of blocks, which may still be computed. Also acknowledges
    /// `RESERVE`.
    Chunk(Chunk),
    /// D → P: the receive for this chunk is posted.
    ClearToSend { transfer: TransferId, chunk: u32 },
    /// P → D: all chunks are sent; carries token 0 and the integrity values.
    Done(Done),
    /// D → P: every block is written and `DONE` matches.
    Ack { transfer: TransferId },
    /// The sender of this message has aborted the transfer.
    Abort { transfer: TransferId, cause: AbortCause, reason: String },
    /// No read or write of this transfer is in flight at the sender of this message.
    AbortAck { transfer: TransferId },
    /// `transfers`: transfers that the sender of the heartbeat wants; naming a transfer also
    /// acknowledges its `RESERVE`. `awaited`: wanted transfers whose `RESERVE` has not arrived.
    Heartbeat { transfers: Vec<TransferId>, awaited: Vec<TransferId> },
}

impl Body {
    /// Creates an `ABORT` that is not about models or weights.
    pub fn give_up(transfer: TransferId, reason: String) -> Self {
        Self::Abort { transfer, cause: AbortCause::Unspecified, reason }
    }

    /// Returns whether the message is part of the handshake of two nodes.
    pub fn is_handshake(&self) -> bool {
        matches!(self, Self::Hello(_) | Self::HelloOk(_) | Self::Reject { .. })
    }
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
    /// Number of the sender's connection attempt; later attempts have higher numbers.
    pub session: u64,
    /// Whether the sender connects in advance, without a transfer.
    pub in_advance: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloOk {
    pub identity: Identity,
    pub data_endpoint: String,
    pub transport: String,
    pub integrity: String,
    /// Number of the answering process's connection attempt.
    pub session: u64,
    /// All transports that the answering process offers, best first.
    pub transports: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserve {
    pub transfer: TransferId,
    pub model_fingerprint: u128,
    pub weight_version: u64,
    pub prompt_hash: u128,
    /// First block of the prompt to transfer.
    pub first_block: u32,
    /// Blocks at D, in prompt order.
    pub blocks: Vec<BlockId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub transfer: TransferId,
    pub chunk: u32,
    /// First block of the prompt in the chunk.
    pub first_block: u32,
    pub block_count: u32,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    pub transfer: TransferId,
    pub chunk_count: u32,
    pub first_index: u32,
    pub token: SampledToken,
    /// One value per chunk.
    pub integrity: Vec<u64>,
    /// Fingerprint of the model that computed the KV and the token.
    pub model_fingerprint: u128,
    pub weight_version: u64,
}
