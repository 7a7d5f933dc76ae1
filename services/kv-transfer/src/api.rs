//! Commands from a node to its transfers, and events back.
//!
//! Transfer at the decode node (receiver):
//! 1. The node gives [`Command::Receive`] with the reserved blocks, which then belong to the
//!    transfer.
//! 2. [`Event::Arrived`]: all blocks are written and `DONE` matches, so they may become visible. Or
//!    [`Event::ReceiveFailed`]: no further write can land, so the blocks may be freed.
//!
//! Transfer at the prefill node (sender):
//! 1. The node gives [`Command::Expect`] when the router's `Prefill` call arrives. The receiver's
//!    `RESERVE` may arrive before or after it. [`Event::Ready`] says that both have arrived. A
//!    `RESERVE` without an `Expect` is rejected after one lease.
//! 2. The node gives [`Command::Written`] for each computed range, in order. It keeps a reference
//!    on every block that it has handed over.
//! 3. The node gives [`Command::Finish`] with token 0.
//! 4. [`Event::Delivered`] or [`Event::SendFailed`]: no read is in flight, and the node may drop
//!    its references.
//!
//! Every transfer ends with exactly one of these four final events on each side whose node has
//! started it, also after [`Command::Abort`]. Its blocks are released within lease + 0.5 s after an
//! abort on either side, after the loss of the peer, or after a start that the other side does not
//! join. A second start of a transfer in progress is ignored. A start with the id of a finished
//! transfer fails at once: ids are used once.

use std::{any::Any, sync::Arc, time::Duration};

use kernels::{BlockId, sampling::SampledToken};
pub use proto::ids::{Epoch, ModelIdentity as Identity, TransferId};

/// Identity of the nodes in unit tests.
#[cfg(test)]
pub(crate) fn test_identity() -> Identity {
    Identity {
        model_fingerprint: 1,
        weight_version: 1,
        kv_layout: "layers=1".to_owned(),
        block_size: 16,
        dtype: "f32".to_owned(),
        tp: 1,
        protocol_min: 1,
        protocol_max: 1,
    }
}

/// A peer process, as the router names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PeerAddress {
    pub node_id: String,
    pub epoch: Epoch,
    /// ZeroMQ endpoint of the peer's control listener, `tcp://host:port`.
    pub control_endpoint: String,
}

impl PeerAddress {
    pub fn peer(&self) -> Peer {
        Peer { node_id: self.node_id.clone(), epoch: self.epoch }
    }
}

/// A process, as its control messages name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub node_id: String,
    pub epoch: Epoch,
}

/// Guard that is dropped when two nodes are connected or have failed to connect. It holds one end
/// of a channel, so the owner of the other end can wait for the drop.
pub type ConnectGuard = Arc<dyn Any + Send + Sync>;

#[derive(Clone, Debug)]
pub enum Command {
    /// Receiver: `blocks` are reserved for the prompt's blocks from `first_block` on.
    Receive {
        transfer: TransferId,
        peer: PeerAddress,
        prompt_hash: u128,
        first_block: u32,
        blocks: Vec<BlockId>,
        /// Time within which the sender's node must start the transfer, at most
        /// [`ANSWER_TIMEOUT_MAX`](crate::config::ANSWER_TIMEOUT_MAX). A sender whose process is
        /// silent for a lease counts as lost earlier.
        answer_timeout: Duration,
        deadline: Duration,
        traceparent: String,
    },
    /// Sender: the router has called `Prefill`. The receiver's `RESERVE` may arrive before or after
    /// this command.
    Expect {
        transfer: TransferId,
        peer: PeerAddress,
        prompt_hash: u128,
        deadline: Duration,
        traceparent: String,
    },
    /// Sender: the KV of `blocks`, the prompt's blocks from `first_block` on, is written. Ranges
    /// are contiguous and end where the reservation ends. Blocks before the reservation are
    /// skipped.
    Written { transfer: TransferId, first_block: u32, blocks: Vec<BlockId> },
    /// Sender: all blocks are written. `token` is the first token, with index `first_index`.
    Finish { transfer: TransferId, first_index: u32, token: SampledToken },
    /// Connects to `peer` before the first transfer, and keeps the connection while the command is
    /// repeated. With `sends`, also opens the data connection to the peer and maps memory or joins
    /// the NCCL communicator. Does nothing for `tcp`, which connects fast enough on demand, and
    /// beyond [`crate::PRECONNECTED_PAIRS_MAX`] pairs. The driver drops `guard` when the nodes are
    /// connected or will not be, at the latest after [`crate::CONNECT_TIMEOUT`].
    Connect { peer: PeerAddress, sends: bool, guard: Option<ConnectGuard> },
    /// This node computes with new weights from now on. Later handshakes and reservations name
    /// their version.
    ChangeWeights { weight_version: u64 },
    /// Either side: aborts the transfer. The failed event follows once no read or write is in
    /// flight.
    Abort { transfer: TransferId, reason: String },
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Receiver, final: every block is written and `DONE` matches.
    Arrived { transfer: TransferId, first_index: u32, token: SampledToken, stats: TransferStats },
    /// Receiver, final: no write to the blocks is in flight.
    ReceiveFailed { transfer: TransferId, failure: TransferFailure },
    /// Sender: `Expect` and the matching `RESERVE` have both arrived, so prefill may start. The
    /// receiver has the blocks before `first_block` in its prefix cache. `traceparent` is the
    /// receiver's.
    Ready { transfer: TransferId, first_block: u32, block_count: u32, traceparent: String },
    /// Sender, final: the receiver has every block and the token.
    Delivered { transfer: TransferId, stats: TransferStats },
    /// Sender, final: no read of the blocks is in flight.
    SendFailed { transfer: TransferId, failure: TransferFailure },
}

/// Statistics of one transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferStats {
    pub bytes: u64,
    pub chunks: u32,
    /// Receiver: from `RESERVE` to the last block written. Sender: from the first chunk sent to
    /// `ACK`.
    pub elapsed: Duration,
}

/// Reason why a transfer failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TransferFailure {
    #[error("lost peer {peer}: {reason}")]
    PeerLost { peer: String, reason: String },
    #[error("aborted by {peer}: {reason}")]
    PeerAborted { peer: String, reason: String },
    #[error("aborted by this node: {reason}")]
    Aborted { reason: String },
    /// The peer's model, weights or KV layout differ from this node's.
    #[error("rejected by {peer}: {reason}")]
    Refused { peer: String, reason: String },
    #[error("deadline exceeded while waiting for {waiting_for}")]
    Deadline { waiting_for: String },
    #[error("chunk {chunk} failed its integrity check")]
    Damaged { chunk: u32 },
    #[error("protocol error by {peer}: {detail}")]
    Protocol { peer: String, detail: String },
}
