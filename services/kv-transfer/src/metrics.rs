//! Metrics of the transfers of one node.
//!
//! Reading never blocks on the driver, which publishes a copy of the protocol's counters
//! ([`MetricsStore::publish`]) after each turn and before each event.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, Weak},
};

use crate::{api::Epoch, protocol::Core, threads::locked, transfer_kind::TransferKind};

/// Counters since the start of the process, and gauges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferMetrics {
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub chunks_sent: u64,
    pub chunks_received: u64,
    pub control_sent: u64,
    pub control_received: u64,
    /// Retransmitted control messages.
    pub control_resent: u64,
    /// Rejected control messages, by reason.
    pub control_refused: BTreeMap<&'static str, u64>,
    /// Rejected data connections and frames, by reason.
    pub data_refused: BTreeMap<&'static str, u64>,
    /// Fallbacks to another transport, by the transport that failed.
    pub fallbacks: BTreeMap<&'static str, u64>,
    /// Finished transfers: complete and failed, as receiver and as sender.
    pub arrived: u64,
    pub receive_failed: u64,
    pub delivered: u64,
    pub send_failed: u64,
    /// Transfers whose final event has not been emitted.
    pub transfers_active: usize,
    pub peers: Vec<PeerMetrics>,
}

/// A peer that this node is connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerMetrics {
    pub node_id: String,
    /// Transport in use: `tcp`, `ipc` or `nccl`; empty before the handshake is complete.
    pub path: String,
    pub transfers_active: usize,
}

/// Reads the metrics without keeping the transfers alive.
#[derive(Clone, Debug)]
pub struct MetricsReader(Weak<MetricsStore>);

impl MetricsReader {
    /// Returns `None` after the transfers were dropped.
    pub fn read(&self) -> Option<TransferMetrics> {
        self.0.upgrade().map(|metrics| metrics.read())
    }
}

/// All metrics of one node's transfers.
#[derive(Debug, Default)]
pub(crate) struct MetricsStore {
    /// Written by the driver, which holds the lock only to move the value in.
    protocol: Mutex<TransferMetrics>,
    pub counters: Arc<Counters>,
}

impl MetricsStore {
    /// Publishes the counters and gauges of the protocol.
    pub fn publish(&self, core: &Core) {
        let counters = core.counters();
        let metrics = TransferMetrics {
            control_resent: counters.control_resent,
            control_refused: counters.control_refused.clone(),
            arrived: counters.arrived,
            receive_failed: counters.receive_failed,
            delivered: counters.delivered,
            send_failed: counters.send_failed,
            transfers_active: core.active_count(),
            peers: core
                .pairs()
                .map(|pair| PeerMetrics {
                    node_id: pair.peer().node_id.clone(),
                    path: self.counters.path(pair.peer().epoch, pair.transport()).to_owned(),
                    transfers_active: pair.transfers().len(),
                })
                .collect(),
            ..TransferMetrics::default()
        };
        *locked(&self.protocol) = metrics;
    }

    pub fn read(&self) -> TransferMetrics {
        let protocol = locked(&self.protocol).clone();
        let mut threads = locked(&self.counters.counts).clone();
        for (reason, count) in &protocol.control_refused {
            *threads.control_refused.entry(reason).or_default() += count;
        }
        TransferMetrics {
            bytes_sent: threads.bytes_sent,
            bytes_received: threads.bytes_received,
            chunks_sent: threads.chunks_sent,
            chunks_received: threads.chunks_received,
            control_sent: threads.control_sent,
            control_received: threads.control_received,
            control_refused: threads.control_refused,
            data_refused: threads.data_refused,
            fallbacks: threads.fallbacks,
            ..protocol
        }
    }

    pub fn reader(self: &Arc<Self>) -> MetricsReader {
        MetricsReader(Arc::downgrade(self))
    }
}

/// Counters of the data, listener and sender threads.
#[derive(Debug, Default)]
pub struct Counters {
    /// The fields that these threads count. Locked for one increment or one copy.
    counts: Mutex<TransferMetrics>,
    /// Transport in use with each peer, once a connection is open.
    paths: Mutex<BTreeMap<Epoch, TransferKind>>,
}

impl Counters {
    /// Records that a connection with `peer` is in use.
    pub fn set_path(&self, peer: Epoch, kind: TransferKind) {
        locked(&self.paths).insert(peer, kind);
    }

    pub fn is_connected(&self, peer: Epoch) -> bool {
        locked(&self.paths).contains_key(&peer)
    }

    pub fn forget(&self, peer: Epoch) {
        locked(&self.paths).remove(&peer);
    }

    /// Returns the transport in use, or the agreed one while no connection is open.
    fn path(&self, peer: Epoch, agreed: &str) -> &'static str {
        let path = locked(&self.paths).get(&peer).copied();
        path.or_else(|| TransferKind::from_offer(agreed)).map_or("", TransferKind::name)
    }

    /// Counts a fallback from `wanted`.
    pub fn fell_back(&self, wanted: TransferKind) {
        *locked(&self.counts).fallbacks.entry(wanted.name()).or_default() += 1;
    }

    pub fn sent(&self, bytes: u64) {
        let mut counts = locked(&self.counts);
        counts.bytes_sent += bytes;
        counts.chunks_sent += 1;
    }

    pub fn received(&self, bytes: u64) {
        let mut counts = locked(&self.counts);
        counts.bytes_received += bytes;
        counts.chunks_received += 1;
    }

    pub fn control_sent(&self) {
        locked(&self.counts).control_sent += 1;
    }

    pub fn control_received(&self) {
        locked(&self.counts).control_received += 1;
    }

    /// Counts a rejected data connection or frame. The reasons are a fixed set.
    pub fn refuse_data(&self, reason: &'static str) {
        *locked(&self.counts).data_refused.entry(reason).or_default() += 1;
    }

    /// Counts a rejected control message. The reasons are a fixed set.
    pub fn refuse_control(&self, reason: &'static str) {
        *locked(&self.counts).control_refused.entry(reason).or_default() += 1;
    }
}
