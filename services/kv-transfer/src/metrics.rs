//! Metrics of the transfers of one node. All threads count here. The driver thread also publishes a
//! copy of the protocol's counters after each pass of its loop and before each event, so a reader
//! never waits for that thread.

mod rate;

use std::{
    collections::BTreeMap,
    sync::{Mutex, Weak},
    time::Instant,
};

use crate::{
    api::Epoch,
    control::CONTROL_REFUSALS,
    protocol::{Core, Counters},
    threads::locked,
    transfer_kind::TransferKind,
};
use rate::ReceiveRate;

/// Reasons for which a data connection or a data frame is rejected.
pub const DATA_REFUSALS: [&str; 12] = [
    "connections_full",
    "frame_not_posted",
    "handshake_epoch",
    "handshake_io",
    "handshake_magic",
    "handshake_random",
    "handshake_tag",
    "handshake_tls",
    "handshakes_full",
    "no_thread",
    "peer_not_admitted",
    "transport_not_offered",
];

/// Counters since the start of the process, and gauges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferMetrics {
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub chunks_sent: u64,
    pub chunks_received: u64,
    pub control_sent: u64,
    pub control_received: u64,
    /// Rejected control messages, by reason.
    pub control_refused: BTreeMap<&'static str, u64>,
    /// Rejected data connections and frames, by reason.
    pub data_refused: BTreeMap<&'static str, u64>,
    /// Fallbacks to another transport, by the transport that failed.
    pub fallbacks: BTreeMap<&'static str, u64>,
    pub protocol: Counters,
    /// Transfers whose final event has not been emitted.
    pub transfers_active: usize,
    pub peers: Vec<PeerMetrics>,
}

/// A peer that this node is connected to or connecting to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerMetrics {
    pub node_id: String,
    /// Transport in use: `tcp`, `ipc` or `nccl`; empty before the handshake is complete.
    pub path: String,
    /// Rate at which KV last arrived from this peer, in bytes/s; 0 before it is known.
    pub receive_rate: u64,
    pub transfers_active: usize,
}

/// Reader of the metrics that does not keep the transfers alive.
#[derive(Clone, Debug)]
pub struct MetricsReader(pub(crate) Weak<Metrics>);

impl MetricsReader {
    /// Returns `None` after the transfers were dropped.
    pub fn read(&self) -> Option<TransferMetrics> {
        self.0.upgrade().map(|metrics| metrics.read())
    }
}

/// The metrics of one node's transfers, shared by all threads.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    /// Locked for one increment or one copy. `control_refused` does not include the protocol's
    /// rejections, which [`Self::read`] adds.
    counts: Mutex<TransferMetrics>,
    /// The open connection with each peer.
    paths: Mutex<BTreeMap<Epoch, Path>>,
}

/// An open connection with a peer.
#[derive(Debug)]
struct Path {
    kind: TransferKind,
    receives: ReceiveRate,
}

impl Metrics {
    /// Publishes the counters and gauges of the protocol.
    pub(crate) fn publish(&self, core: &Core) {
        // A data thread may set the path after the driver has closed the pair.
        locked(&self.paths).retain(|peer, _| core.has_pair(*peer));
        let peers = core.pairs().map(|pair| PeerMetrics {
            node_id: pair.peer.node_id.clone(),
            path: self.path(pair.peer.epoch, pair.transport()).to_owned(),
            receive_rate: self.receive_rate(pair.peer.epoch),
            transfers_active: pair.transfers.len(),
        });
        let (peers, transfers_active) = (peers.collect(), core.active_count());
        self.count(|counts| {
            counts.protocol.clone_from(core.counters());
            counts.transfers_active = transfers_active;
            counts.peers = peers;
        });
    }

    pub(crate) fn read(&self) -> TransferMetrics {
        let mut metrics = locked(&self.counts).clone();
        for (reason, count) in &metrics.protocol.control_refused {
            *metrics.control_refused.entry(reason).or_default() += count;
        }
        metrics
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut TransferMetrics)) {
        change(&mut locked(&self.counts));
    }

    /// Counts a rejected data connection or frame.
    pub(crate) fn refuse_data(&self, reason: &'static str) {
        debug_assert!(DATA_REFUSALS.contains(&reason), "{reason} is not listed");
        self.count(|counts| *counts.data_refused.entry(reason).or_default() += 1);
    }

    /// Counts a rejected control message.
    pub(crate) fn refuse_control(&self, reason: &'static str) {
        debug_assert!(CONTROL_REFUSALS.contains(&reason), "{reason} is not listed");
        self.count(|counts| *counts.control_refused.entry(reason).or_default() += 1);
    }

    /// Counts a fallback from `wanted`.
    pub(crate) fn fell_back(&self, wanted: TransferKind) {
        self.count(|counts| *counts.fallbacks.entry(wanted.name()).or_default() += 1);
    }

    /// Records the transport of an open connection with `peer`.
    pub(crate) fn set_path(&self, peer: Epoch, kind: TransferKind) {
        let mut paths = locked(&self.paths);
        // Both directions of a pair, and all connections of `tcp`, set the same transport.
        if paths.get(&peer).is_none_or(|path| path.kind != kind) {
            paths.insert(peer, Path { kind, receives: ReceiveRate::default() });
        }
    }

    /// Records the rate of a probe transfer from `peer`, in bytes/s.
    pub(crate) fn probed(&self, peer: Epoch, rate: u64) {
        self.on_receives(peer, |receives| receives.probed(rate));
    }

    /// Records that a chunk from `peer` begins to arrive.
    pub(crate) fn chunk_began(&self, peer: Epoch) {
        self.on_receives(peer, |receives| receives.began(Instant::now()));
    }

    /// Records that a chunk from `peer` has arrived with this number of bytes, or has failed.
    pub(crate) fn chunk_ended(&self, peer: Epoch, bytes: u64) {
        self.on_receives(peer, |receives| receives.ended(Instant::now(), bytes));
    }

    fn on_receives(&self, peer: Epoch, change: impl FnOnce(&mut ReceiveRate)) {
        if let Some(path) = locked(&self.paths).get_mut(&peer) {
            change(&mut path.receives);
        }
    }

    fn receive_rate(&self, peer: Epoch) -> u64 {
        locked(&self.paths).get(&peer).map_or(0, |path| path.receives.last)
    }

    pub(crate) fn is_connected(&self, peer: Epoch) -> bool {
        locked(&self.paths).contains_key(&peer)
    }

    pub(crate) fn forget(&self, peer: Epoch) {
        locked(&self.paths).remove(&peer);
    }

    /// Returns the transport in use, or the agreed one while no connection is open.
    fn path(&self, peer: Epoch, agreed: &str) -> &'static str {
        let path = locked(&self.paths).get(&peer).map(|path| path.kind);
        path.or_else(|| TransferKind::from_offer(agreed)).map_or("", TransferKind::name)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::{
        api::{Command, PeerAddress},
        protocol::{Local, test_local},
    };

    #[test]
    fn path_that_is_set_after_its_pair_was_closed_is_removed() {
        let (present, departed, now) = (Epoch(2), Epoch(3), Instant::now());
        let transports = vec!["ipc".to_owned(), "tcp".to_owned()];
        let mut core = Core::new(now, Local { transports, ..test_local() });
        let peer = PeerAddress {
            node_id: "peer".to_owned(),
            epoch: present,
            control_endpoint: "tcp://peer:1".to_owned(),
        };
        core.handle_command(now, Command::Connect { peer, sends: false, guard: None });
        let metrics = Metrics::default();
        for peer in [present, departed] {
            metrics.set_path(peer, TransferKind::Ipc);
        }
        metrics.publish(&core);
        assert_eq!(metrics.read().peers[0].path, "ipc");
        assert!(metrics.is_connected(present));
        assert!(!metrics.is_connected(departed));
    }
}
