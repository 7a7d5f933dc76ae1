//! Configuration of the transfers of one node.

use std::{fs, net::SocketAddr, path::Path, sync::Arc};

use credentials::{ClusterTls, Reloaded};
use xxhash_rust::xxh3::xxh3_64;

pub use proto::auth::{ClusterSecret, SecretTooShort};

use crate::{
    api::{Epoch, Identity},
    config::TransferLimits,
    transfer_kind::TransportChoice,
};

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
    /// the same id. So is `nccl`, unless the set transport is `nccl`, or `auto` on a host with RDMA
    /// adapters and without certificates.
    pub host: Option<String>,
    /// Encrypts KV that is sent by `tcp`, if the cluster has certificates. Then
    /// [`TransportChoice::Auto`] does not offer `nccl`, which does not encrypt, to other hosts.
    pub tls: Option<Arc<Reloaded<ClusterTls>>>,
}

/// Transports that this node may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransportConfig {
    pub choice: TransportChoice,
    /// Whether both ends hash chunks that move from GPU to GPU: by a kernel where the node has one,
    /// otherwise through slow copies in host memory. Chunks sent by `tcp` are always hashed.
    pub verify: bool,
    /// Maximum number of CTAs (one per SM) that NCCL uses for one pair while it moves KV; unset
    /// leaves the number to NCCL.
    pub nccl_max_ctas: Option<u32>,
    /// Maximum number of `tcp` connections by which this node sends to one peer, 1 to
    /// [`TCP_CONNECTIONS_MAX`](crate::config::TCP_CONNECTIONS_MAX).
    pub tcp_connections: u32,
    /// Whether this host has RDMA adapters ([`has_rdma`](crate::has_rdma)). Only then does
    /// [`TransportChoice::Auto`] offer `nccl` to peers on other hosts: over sockets NCCL is slower
    /// than `tcp`.
    pub has_rdma: bool,
}

impl Default for TransportConfig {
    fn default() -> Self {
        Self {
            choice: TransportChoice::default(),
            verify: false,
            nccl_max_ctas: None,
            tcp_connections: 8,
            has_rdma: false,
        }
    }
}

/// Folder of the device files of RDMA adapters.
const RDMA_DEVICES: &str = "/dev/infiniband";

/// Returns whether this process sees an RDMA adapter, whose device file is
/// `/dev/infiniband/uverbs*`.
pub fn has_rdma() -> bool {
    has_adapter(Path::new(RDMA_DEVICES))
}

fn has_adapter(devices: &Path) -> bool {
    let Ok(entries) = fs::read_dir(devices) else { return false };
    entries.flatten().any(|entry| entry.file_name().as_encoded_bytes().starts_with(b"uverbs"))
}

/// Returns an id of this boot of the host, equal in all its containers; `None` if the system has no
/// boot id.
pub fn host_id() -> Option<String> {
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(format!("{:016x}", xxh3_64(boot_id.trim().as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rdma_adapters_have_device_files() {
        let devices = tempfile::tempdir().unwrap();
        assert!(!has_adapter(devices.path()) && !has_adapter(&devices.path().join("none")));
        fs::write(devices.path().join("rdma_cm"), "").unwrap();
        assert!(!has_adapter(devices.path()));
        fs::write(devices.path().join("uverbs0"), "").unwrap();
        assert!(has_adapter(devices.path()));
    }

    #[test]
    fn host_id_is_stable() {
        let name = host_id();
        assert_eq!(name, host_id());
        assert!(name.is_none_or(|name| name.len() == 16), "fits into HELLO");
    }
}
