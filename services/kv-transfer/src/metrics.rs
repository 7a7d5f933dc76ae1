//! Metrics of the transfers of one node.
//!
//! Reading never blocks on the driver: threads count in atomics, and the driver publishes a copy of
//! the protocol's counters ([`MetricsStore::publish`]) after each turn and before each event.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{api::Epoch, protocol::Core, transfer_kind::TransferKind};

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
    pub data: Arc<DataCounters>,
    pub messages: Arc<ControlCounters>,
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
                    path: self.data.path(pair.peer().epoch, pair.transport()).to_owned(),
                    transfers_active: pair.transfers().len(),
                })
                .collect(),
            ..TransferMetrics::default()
        };
        *self.protocol.lock().unwrap_or_else(PoisonError::into_inner) = metrics;
    }

    pub fn read(&self) -> TransferMetrics {
        let mut metrics = self.protocol.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.data.add_to(&mut metrics);
        self.messages.add_to(&mut metrics);
        metrics
    }

    pub fn reader(self: &Arc<Self>) -> MetricsReader {
        MetricsReader(Arc::downgrade(self))
    }
}

/// Counts by reason. The reasons are a fixed set.
#[derive(Debug, Default)]
struct Refusals(Mutex<BTreeMap<&'static str, u64>>);

impl Refusals {
    fn count(&self, reason: &'static str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(reason).or_default() += 1;
    }

    fn snapshot(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Counters of the data threads.
#[derive(Debug, Default)]
pub struct DataCounters {
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
    chunks_sent: AtomicU64,
    chunks_received: AtomicU64,
    refused: Refusals,
    fallbacks: Refusals,
    /// Transport in use with each peer, once a connection is open.
    paths: Mutex<BTreeMap<Epoch, TransferKind>>,
}

impl DataCounters {
    /// Records that a connection with `peer` is in use.
    pub fn set_path(&self, peer: Epoch, kind: TransferKind) {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner).insert(peer, kind);
    }

    pub fn is_connected(&self, peer: Epoch) -> bool {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&peer)
    }

    pub fn forget(&self, peer: Epoch) {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner).remove(&peer);
    }

    /// Returns the transport in use, or the agreed one while no connection is open.
    fn path(&self, peer: Epoch, agreed: &str) -> &'static str {
        let paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        paths
            .get(&peer)
            .copied()
            .or_else(|| TransferKind::from_offer(agreed))
            .map_or("", TransferKind::name)
    }

    /// Counts a fallback from `wanted`.
    pub fn fell_back(&self, wanted: TransferKind) {
        self.fallbacks.count(wanted.name());
    }

    pub fn sent(&self, bytes: u64) {
        self.bytes_sent.fetch_add(bytes, Ordering::Relaxed);
        self.chunks_sent.fetch_add(1, Ordering::Relaxed);
    }

    pub fn received(&self, bytes: u64) {
        self.bytes_received.fetch_add(bytes, Ordering::Relaxed);
        self.chunks_received.fetch_add(1, Ordering::Relaxed);
    }

    pub fn refuse(&self, reason: &'static str) {
        self.refused.count(reason);
    }

    pub fn add_to(&self, metrics: &mut TransferMetrics) {
        metrics.bytes_sent = self.bytes_sent.load(Ordering::Relaxed);
        metrics.bytes_received = self.bytes_received.load(Ordering::Relaxed);
        metrics.chunks_sent = self.chunks_sent.load(Ordering::Relaxed);
        metrics.chunks_received = self.chunks_received.load(Ordering::Relaxed);
        metrics.data_refused = self.refused.snapshot();
        metrics.fallbacks = self.fallbacks.snapshot();
    }
}

/// Counters of the listener and sender threads.
#[derive(Debug, Default)]
pub struct ControlCounters {
    sent: AtomicU64,
    received: AtomicU64,
    refused: Refusals,
}

impl ControlCounters {
    pub fn sent(&self) {
        self.sent.fetch_add(1, Ordering::Relaxed);
    }

    pub fn received(&self) {
        self.received.fetch_add(1, Ordering::Relaxed);
    }

    pub fn refuse(&self, reason: &'static str) {
        self.refused.count(reason);
    }

    pub fn add_to(&self, metrics: &mut TransferMetrics) {
        metrics.control_sent = self.sent.load(Ordering::Relaxed);
        metrics.control_received = self.received.load(Ordering::Relaxed);
        for (reason, count) in self.refused.snapshot() {
            *metrics.control_refused.entry(reason).or_default() += count;
        }
    }
}
