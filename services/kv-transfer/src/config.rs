//! What a node tells its transfers at start.

use std::{fmt, net::SocketAddr, time::Duration};

use crate::{
    api::{Command, Epoch, Identity},
    transfer_kind::TransportChoice,
};

/// The one constant of failure: a transfer that its peer has not named for this long is over.
pub const LEASE: Duration = Duration::from_secs(2);

/// How often a pair with work names its transfers: four beats fit into one lease.
pub const HEARTBEAT: Duration = Duration::from_millis(500);

/// Pairs up to which some are made in advance, whoever greets, but for those by `tcp`: each may take memory of a
/// GPU, some 200 MiB by `nccl`. With others the first transfer makes them.
pub const PRECONNECTED_PAIRS_MAX: usize = 4;

/// For so long at most anybody waits for two nodes that meet.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// What `Transfers::start` needs to know.
#[derive(Clone, Debug)]
pub struct TransferConfig {
    pub node_id: String,
    /// Of this process; the router gives it to peers.
    pub epoch: Epoch,
    pub identity: Identity,
    pub secret: ClusterSecret,
    /// Where control messages are received; port 0 takes a free one.
    pub control_bind: SocketAddr,
    /// Where KV is received; port 0 takes a free one.
    pub data_bind: SocketAddr,
    /// Host name or address under which peers reach both listeners.
    pub advertise_host: String,
    pub limits: TransferLimits,
    pub transport: TransportConfig,
}

/// How KV may travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportConfig {
    pub choice: TransportChoice,
    /// Whether chunks that go from GPU to GPU are hashed at both ends, by a kernel where a node has it, else by
    /// copies in host memory, which is slow. What goes by `tcp` is hashed always.
    pub verify: bool,
    /// Multiprocessors that a pair's `nccl` takes while it moves KV; unset: as many as it likes.
    pub nccl_max_ctas: Option<u32>,
}

/// Bounds on what one node keeps for its transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferLimits {
    /// Transfers in any state short of their final event.
    pub transfers_max: usize,
    /// Peers at a time. Each costs up to four threads and three sockets.
    pub pairs_max: usize,
    /// `RESERVE`s whose `Expect` has not come yet.
    pub early_max: usize,
    /// Finished or cancelled transfers that are remembered to answer late messages.
    pub tombstones_max: usize,
    /// Longest chunk in bytes; at least one block travels whatever its size. Chunk `c` travels
    /// while `c + 1` is computed, and a chunk is the unit of loss and of integrity.
    pub chunk_bytes_max: usize,
    /// How long a pair without transfers keeps its sockets.
    pub pair_idle: Duration,
    /// Commands that wait for the driver. Half of them are kept free for transfers that have begun.
    pub commands_max: usize,
}

impl TransferLimits {
    /// Returns how many commands may wait when this one is queued. A command that begins a transfer finds
    /// half of the queue: a node that reports "busy" for it still has room for the rest.
    pub fn queued_max(&self, command: &Command) -> usize {
        match command {
            Command::Receive { .. } | Command::Expect { .. } => self.commands_max / 2,
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

/// The key that all nodes of a cluster share. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterSecret(Vec<u8>);

impl ClusterSecret {
    /// Shorter ones can be guessed.
    pub const BYTES_MIN: usize = 16;

    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, SecretTooShort> {
        let bytes = bytes.into();
        if bytes.len() < Self::BYTES_MIN {
            return Err(SecretTooShort { bytes: bytes.len() });
        }
        Ok(Self(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for ClusterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterSecret(..)")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cluster secret has {bytes} bytes; at least {} are needed", ClusterSecret::BYTES_MIN)]
pub struct SecretTooShort {
    pub bytes: usize,
}
