//! What a node says to its transfers, and what it hears.
//!
//! Life of a transfer at the decode node (receiver):
//! 1. [`Command::Receive`] with the reserved blocks. They belong to the transfer until
//!    2. [`Event::Arrived`] (all blocks written and `DONE` matched: the blocks may become visible) or
//!    3. [`Event::ReceiveFailed`] (no write can land any more: the blocks may be freed).
//!
//! At the prefill node (sender):
//! 1. The receiver's `RESERVE` may come before or after [`Command::Expect`], which the node gives when
//!    the router's `Prefill` call is here; [`Event::Ready`] says that both are. A `RESERVE` that no
//!    `Expect` follows is refused after one lease.
//! 2. [`Command::Written`] for each computed range, in order; the node keeps a reference on every
//!    block that it has handed over.
//! 3. [`Command::Finish`] with token 0.
//! 4. [`Event::Delivered`] or [`Event::SendFailed`]: no read is in flight, references may go.
//!
//! Every transfer ends with exactly one of the four final events on each side that knew of it,
//! [`Command::Abort`] included. Blocks that it has are back within lease + 0.5 s of an abort on either
//! side, of losing the peer, or of a start that the other side does not follow. A second start of an
//! id that is under way is ignored, and of one that has ended fails at once: ids are used once.

use std::{any::Any, sync::Arc, time::Duration};

use kernels::{BlockId, sampling::SampledToken};
pub use proto::ids::{Epoch, TransferId};

/// The process at the other end, as the router names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PeerAddress {
    pub node_id: String,
    pub epoch: Epoch,
    /// ZeroMQ endpoint of its listener, `tcp://host:port`.
    pub control_endpoint: String,
}

/// What must be equal on both ends before a block moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub model_fingerprint: u128,
    pub weight_version: u64,
    pub kv_layout: String,
    pub block_size: u32,
    pub dtype: String,
    pub tp: u32,
    pub protocol_min: u32,
    pub protocol_max: u32,
}

/// Somebody waits for the end of a guard, which is when nobody holds this any more.
pub type ConnectGuard = Arc<dyn Any + Send + Sync>;

#[derive(Clone, Debug)]
pub enum Command {
    /// Receiver: these blocks wait for the prompt's blocks from `first_block` on.
    Receive {
        transfer: TransferId,
        peer: PeerAddress,
        prompt_hash: u128,
        first_block: u32,
        blocks: Vec<BlockId>,
        deadline: Duration,
        traceparent: String,
    },
    /// Sender: the router asked for this prefill; its `RESERVE` may be here or still to come.
    Expect {
        transfer: TransferId,
        peer: PeerAddress,
        prompt_hash: u128,
        deadline: Duration,
        traceparent: String,
    },
    /// Sender: the KV of the prompt's blocks from `first_block` on is written. Ranges follow one
    /// another without a gap and end where the reservation ends; what lies before the reservation's
    /// first block is skipped.
    Written { transfer: TransferId, first_block: u32, blocks: Vec<BlockId> },
    /// Sender: nothing more will be written; `token` has index `first_index`.
    Finish { transfer: TransferId, first_index: u32, token: SampledToken },
    /// Transfers with this peer are to be expected: the pair is made now, and kept as long as this is said
    /// again and again. `sends`: so is the connection on which chunks go to it, with whatever has to be
    /// mapped or joined for that. Does nothing where KV goes by `tcp` alone, which needs no time to begin, nor
    /// beyond a few pairs, for each takes memory. `guard` is held until the connection between the two is
    /// there, whoever makes it, or will not be, and at most for [`crate::CONNECT_TIMEOUT`].
    Connect { peer: PeerAddress, sends: bool, guard: Option<ConnectGuard> },
    /// Either side: give up. Ends with the failed event once that is safe.
    Abort { transfer: TransferId, reason: String },
    /// The process has other weights from now on. Every transfer that has begun fails, whatever its
    /// side: the KV of one prompt comes from one set of weights. An [`Event::Arrived`] that was
    /// emitted before this command was taken may still be on its way to the node, which knows what
    /// it began under which weights.
    WeightsChanged { weight_version: u64 },
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Receiver, final: every block is written and `DONE` matched.
    Arrived { transfer: TransferId, first_index: u32, token: SampledToken, stats: TransferStats },
    /// Receiver, final: the blocks are free of writes.
    ReceiveFailed { transfer: TransferId, failure: TransferFailure },
    /// Sender: `Expect` and the matching `RESERVE` are both here: prefill may start. Blocks before
    /// `first_block` are cached at the receiver and not wanted. `traceparent` is the receiver's.
    Ready { transfer: TransferId, first_block: u32, block_count: u32, traceparent: String },
    /// Sender, final: the receiver has everything.
    Delivered { transfer: TransferId, stats: TransferStats },
    /// Sender, final: no read is in flight.
    SendFailed { transfer: TransferId, failure: TransferFailure },
}

/// TransferStats of one transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferStats {
    pub bytes: u64,
    pub chunks: u32,
    /// Receiver: from `RESERVE` to the last block. Sender: from the first chunk that is cleared and written to
    /// `ACK`.
    pub elapsed: Duration,
}

/// Why a transfer did not complete.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TransferFailure {
    #[error("{peer} was lost: {reason}")]
    PeerLost { peer: String, reason: String },
    #[error("{peer} aborted: {reason}")]
    PeerAborted { peer: String, reason: String },
    #[error("aborted here: {reason}")]
    Aborted { reason: String },
    /// The peer has another model, other weights or another layout than this node.
    #[error("{peer} refused: {reason}")]
    Refused { peer: String, reason: String },
    /// This node's own weights are no longer those under which the transfer began.
    #[error("weight_version changed from {from} to {to} while the transfer was under way")]
    WeightsChanged { from: u64, to: u64 },
    #[error("no answer in time while {waiting_for}")]
    Deadline { waiting_for: String },
    #[error("chunk {chunk} arrived damaged")]
    Damaged { chunk: u32 },
    #[error("{peer} broke the protocol: {detail}")]
    Protocol { peer: String, detail: String },
}
