//! Commands from a node to its transfers, and events back.
//!
//! Transfer at the decode node (receiver):
//! 1. The node gives [`Command::Receive`] with the reserved blocks. From then on the blocks belong
//!    to the transfer, which announces them to the sender (control message `RESERVE`).
//! 2. The transfer ends with one of two events. [`Event::Arrived`]: all blocks are written, and
//!    `DONE`, the sender's last message, confirms the chunks, their integrity values, the model and
//!    the weights. The node may use the blocks. [`Event::ReceiveFailed`]: no write to the blocks is
//!    in flight, so the node may free them.
//!
//! Transfer at the prefill node (sender):
//! 1. The node gives [`Command::Send`] when the router's `Prefill` call arrives. The receiver's
//!    `RESERVE` may arrive before or after the command. [`Event::Ready`] says that both have
//!    arrived. Without a `Send`, this side keeps a `RESERVE` while the receiver names it in
//!    heartbeats, for at most [`ANSWER_TIMEOUT_MAX`](crate::config::ANSWER_TIMEOUT_MAX).
//! 2. The node gives [`Command::Written`] for each computed range of blocks, in order. The node
//!    keeps a reference on each of these blocks.
//! 3. The node gives [`Command::Finish`] with the token that it has sampled after prefill.
//! 4. The transfer ends with [`Event::Delivered`] or [`Event::SendFailed`]: no read of the blocks
//!    is in flight, so the node may drop its references.
//!
//! A node starts its side of a transfer by `Receive` or `Send`. Each started side ends with
//! exactly one of its two final events, also after [`Command::Abort`]. After an abort by either
//! side, or after the loss of the peer, the blocks are released within one lease
//! ([`LEASE`](crate::config::LEASE)) + 0.5 s. If the sender's node does not start the transfer, the
//! receiver fails after the `answer_timeout` of `Receive`. A second start of a transfer in progress
//! is ignored. A start with the id of a finished transfer fails at once, because ids are used once.

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

/// A peer process and the address of its control listener, as the router names them.
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

/// A peer process without its address, as control messages name their sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub node_id: String,
    pub epoch: Epoch,
}

/// Guard that the driver drops when two nodes are connected or have failed to connect. The guard
/// holds one end of a channel, and the caller waits at the other end until the guard is dropped.
pub type ConnectGuard = Arc<dyn Any + Send + Sync>;

#[derive(Clone, Debug)]
pub enum Command {
    /// Receiver: starts the transfer. `blocks` are reserved for the prompt's blocks from index
    /// `first_block` on.
    Receive {
        transfer: TransferId,
        peer: PeerAddress,
        prompt_hash: u128,
        first_block: u32,
        blocks: Vec<BlockId>,
        /// Time within which the sender's node must start the transfer, at most
        /// [`ANSWER_TIMEOUT_MAX`](crate::config::ANSWER_TIMEOUT_MAX). The transfer fails earlier if
        /// the sender's process sends nothing for one lease.
        answer_timeout: Duration,
        deadline: Duration,
        traceparent: String,
    },
    /// Sender: starts the transfer, because the router has called `Prefill`. The receiver's
    /// `RESERVE` may arrive before or after this command.
    Send {
        transfer: TransferId,
        peer: PeerAddress,
        prompt_hash: u128,
        deadline: Duration,
        traceparent: String,
    },
    /// Sender: the KV of `blocks` is computed. They are the prompt's blocks from index
    /// `first_block` on. Each command continues where the previous one ended, and the last one ends
    /// with the last reserved block. Blocks before the first reserved block are not sent.
    Written { transfer: TransferId, first_block: u32, blocks: Vec<BlockId> },
    /// Sender: the KV of all blocks is computed. `token` was sampled after prefill, as output
    /// token `first_index`.
    Finish { transfer: TransferId, first_index: u32, token: SampledToken },
    /// Connects to `peer` before the first transfer. The connection stays while the node repeats
    /// the command. With `sends`, this node will send to the peer: the command also opens the data
    /// connection, and maps memory (`ipc`) or joins the NCCL communicator (`nccl`). The command
    /// does nothing for `tcp`, which connects fast enough on demand, or if
    /// [`crate::PRECONNECTED_PAIRS_MAX`] pairs are connected. The driver drops `guard` when the
    /// nodes are connected or have failed to connect, at most [`crate::CONNECT_TIMEOUT`] later.
    Connect { peer: PeerAddress, sends: bool, guard: Option<ConnectGuard> },
    /// This node computes with new weights from now on. Later handshakes and reservations name
    /// their version.
    ChangeWeights { weight_version: u64 },
    /// Either side: aborts the transfer. [`Event::ReceiveFailed`] or [`Event::SendFailed`] follows
    /// once no read or write of the blocks is in flight.
    Abort { transfer: TransferId, reason: String },
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Receiver, final: every block is written, and the sender's `DONE` confirms all chunks.
    Arrived { transfer: TransferId, first_index: u32, token: SampledToken, stats: TransferStats },
    /// Receiver, final: no write to the blocks is in flight.
    ReceiveFailed { transfer: TransferId, failure: TransferFailure },
    /// Sender: `Send` and the matching `RESERVE` have both arrived, so prefill may start. The
    /// receiver has the blocks before `first_block` in its prefix cache. `traceparent` is that of
    /// the receiver's command.
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
    /// The model, weights or KV layout of the two nodes differ.
    #[error("rejected by {peer}: {reason}")]
    Refused { peer: String, reason: String },
    #[error("deadline exceeded while waiting for {waiting_for}")]
    Deadline { waiting_for: String },
    #[error("chunk {chunk} failed its integrity check")]
    Damaged { chunk: u32 },
    #[error("protocol error by {peer}: {violation}")]
    Protocol { peer: String, violation: String },
}
