//! Times and limits of the transfers of one node.

use std::time::Duration;

use crate::api::Command;

/// Failure time-out: a transfer whose peer has not named it for this long is aborted.
pub const LEASE: Duration = Duration::from_secs(2);

/// Longest wait for a sender whose process is alive and whose node has not started the transfer.
pub const ANSWER_TIMEOUT_MAX: Duration = Duration::from_secs(15);

/// Interval at which a pair with work names its transfers: four heartbeats fit into one lease.
pub const HEARTBEAT: Duration = Duration::from_millis(500);

/// Number of pairs connected before the first request, not counting pairs that use `tcp`. Each pair
/// may take GPU memory, about 200 MiB with `nccl`. Further pairs connect at their first transfer.
pub const PRECONNECTED_PAIRS_MAX: usize = 4;

/// Maximum number of `tcp` connections by which one node sends to another.
pub const TCP_CONNECTIONS_MAX: usize = 16;

/// Largest chunk in bytes by `tcp`, where each connection sends one chunk at a time: a prompt of
/// 1,024 tokens of an 8B model has 16 chunks.
pub const TCP_CHUNK_BYTES_MAX: usize = 8 << 20;

/// Longest wait for two nodes to connect before the first request.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Bounds on the state that one node keeps for its transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferLimits {
    /// Transfers whose final event has not been emitted.
    pub transfers_max: usize,
    /// Connected peers. Each costs three sockets and four to seven threads. With `tcp` a sender has
    /// up to [`TCP_CONNECTIONS_MAX`] - 1 further threads, each with a socket and a second thread
    /// while it is connected, and a receiver has a socket and a thread for each.
    pub pairs_max: usize,
    /// `RESERVE`s whose `Send` has not arrived.
    pub early_max: usize,
    /// Finished or cancelled transfers that are remembered to answer late messages.
    pub tombstones_max: usize,
    /// Largest chunk in bytes; a chunk has at least one block of any size. Chunk `c` is sent while
    /// `c + 1` is computed. Loss and integrity are tracked per chunk.
    pub chunk_bytes_max: usize,
    /// Time for which an idle pair keeps its sockets.
    pub pair_idle: Duration,
    /// Queued commands for the driver. Half of the queue is reserved for transfers that have
    /// started.
    pub commands_max: usize,
}

impl TransferLimits {
    /// Returns the maximum queue length at which this command is accepted. A command that begins a
    /// transfer may fill half of the queue: a node that reports "busy" for it still accepts
    /// commands of active transfers.
    pub fn queued_max(&self, command: &Command) -> usize {
        match command {
            Command::Receive { .. } | Command::Send { .. } => self.commands_max / 2,
            _ => self.commands_max,
        }
    }
}

impl Default for TransferLimits {
    fn default() -> Self {
        Self {
            transfers_max: 1024,
            pairs_max: 64,
            early_max: 256,
            tombstones_max: 4096,
            chunk_bytes_max: 4 << 20,
            pair_idle: Duration::from_secs(60),
            commands_max: 4096,
        }
    }
}
