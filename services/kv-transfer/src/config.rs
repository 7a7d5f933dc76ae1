//! Configuration of the transfers of one node.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use credentials::{ClusterTls, Reloaded};

pub use proto::auth::{ClusterSecret, SecretTooShort};

use crate::{
    api::{Command, Epoch, Identity},
    transfer_kind::TransportChoice,
};

/// Failure time-out: a transfer whose peer has not named it for this long is aborted.
pub const LEASE: Duration = Duration::from_secs(2);

/// Longest wait for a sender whose process is alive and whose node has not started the transfer.
pub const ANSWER_TIMEOUT_MAX: Duration = Duration::from_secs(15);

/// Interval at which a pair with work names its transfers: four heartbeats fit into one lease.
pub const HEARTBEAT: Duration = Duration::from_millis(500);

/// Number of pairs connected before the first request, not counting pairs that use `tcp`. Each pair
/// may take GPU memory, about 200 MiB with `nccl`. Further pairs connect at their first transfer.
pub const PRECONNECTED_PAIRS_MAX: usize = 4;

/// Longest wait for two nodes to connect before the first request.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Configuration for `Transfers::start`.
#[derive(Clone)]
pub struct TransferConfig {
    pub node_id: String,
    /// Epoch of this process. The router gives it to peers.
    pub epoch: Epoch,
    pub identity: Identity,
    pub secret: ClusterSecret,
    /// Listen address for control messages; port 0 takes a free port.
    pub control_bind: SocketAddr,
    /// Listen address for KV; port 0 takes a free port.
    pub data_bind: SocketAddr,
    /// Host name or address under which peers reach both listeners.
    pub advertise_host: String,
    pub limits: TransferLimits,
    pub transport: TransportConfig,
    /// Id of this host ([`host_id`](crate::host_id)). `ipc` is offered only to peers with
    /// the same id, and so is `nccl` unless it is the set transport.
    pub host: Option<String>,
    /// Encrypts KV that is sent by `tcp`, if the cluster has certificates.
    pub tls: Option<Arc<Reloaded<ClusterTls>>>,
}

/// Transports that this node may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportConfig {
    pub choice: TransportChoice,
    /// Whether both ends hash chunks that move from GPU to GPU: by a kernel where the node has one,
    /// otherwise through slow copies in host memory. Chunks sent by `tcp` are always hashed.
    pub verify: bool,
    /// Maximum number of CTAs (one per SM) that NCCL uses for one pair while it moves KV; unset
    /// leaves the number to NCCL.
    pub nccl_max_ctas: Option<u32>,
}

/// Bounds on the state that one node keeps for its transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferLimits {
    /// Transfers whose final event has not been emitted.
    pub transfers_max: usize,
    /// Connected peers. Each costs three sockets and four (`tcp`) to six (`nccl`) threads.
    pub pairs_max: usize,
    /// `RESERVE`s whose `Expect` has not arrived.
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
    /// Returns the maximum queue length at which this command is accepted. A command that begins a transfer may fill
    /// half of the queue: a node that reports "busy" for it still accepts commands of active transfers.
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
