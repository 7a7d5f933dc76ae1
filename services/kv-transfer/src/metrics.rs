//! What a node can see of its transfers from outside.
//!
//! Everything is read without asking anyone: threads count in atomics, and the driver leaves a copy
//! of what only the protocol knows ([`MetricsStore::publish`]) after each turn and before each event.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{api::Epoch, protocol::Core, transfer_kind::TransferKind};

/// Counters since start, and gauges of this moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferMetrics {
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub chunks_sent: u64,
    pub chunks_received: u64,
    pub control_sent: u64,
    pub control_received: u64,
    /// Control messages sent again because no answer had come.
    pub control_resent: u64,
    /// Control messages that were not believed or had no place here, by reason.
    pub control_refused: BTreeMap<&'static str, u64>,
    /// Data connections and frames that were refused, by reason.
    pub data_refused: BTreeMap<&'static str, u64>,
    /// Peers with which an agreed transport did not work, so that KV goes by `tcp`; by that transport.
    pub fallbacks: BTreeMap<&'static str, u64>,
    /// Transfers ended well and badly, as receiver and as sender.
    pub arrived: u64,
    pub receive_failed: u64,
    pub delivered: u64,
    pub send_failed: u64,
    /// Transfers short of their final event.
    pub transfers_active: usize,
    pub peers: Vec<PeerMetrics>,
}

/// One peer with which this node has a pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerMetrics {
    pub node_id: String,
    /// What carries KV between the two: `tcp`, `ipc` or `nccl`; empty while they greet.
    pub path: String,
    pub transfers_active: usize,
}

/// Reads the figures of transfers that it does not keep alive.
#[derive(Clone, Debug)]
pub struct MetricsReader(Weak<MetricsStore>);

impl MetricsReader {
    /// `None` when the transfers are gone. Never waits for them.
    pub fn read(&self) -> Option<TransferMetrics> {
        self.0.upgrade().map(|metrics| metrics.read())
    }
}

/// All that is counted for one node's transfers.
#[derive(Debug, Default)]
pub(crate) struct MetricsStore {
    /// Written by the driver, which holds the lock for the length of a move.
    protocol: Mutex<TransferMetrics>,
    pub data: Arc<DataCounters>,
    pub messages: Arc<ControlCounters>,
}

impl MetricsStore {
    /// What the protocol counts, and what it has under way, as of now.
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

/// A bounded set of labels, each with its count.
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

/// Counted by a transport's threads.
#[derive(Debug, Default)]
pub struct DataCounters {
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
    chunks_sent: AtomicU64,
    chunks_received: AtomicU64,
    refused: Refusals,
    fallbacks: Refusals,
    /// What carries KV from or to each peer, once a connection is in use.
    paths: Mutex<BTreeMap<Epoch, TransferKind>>,
}

impl DataCounters {
    /// A connection with this peer is in use.
    pub fn takes(&self, peer: Epoch, kind: TransferKind) {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner).insert(peer, kind);
    }

    pub fn is_connected(&self, peer: Epoch) -> bool {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&peer)
    }

    pub fn forget(&self, peer: Epoch) {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner).remove(&peer);
    }

    /// What carries KV, or will, as two nodes agreed.
    fn path(&self, peer: Epoch, agreed: &str) -> &'static str {
        let paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        paths
            .get(&peer)
            .copied()
            .or_else(|| TransferKind::offered(agreed))
            .map_or("", TransferKind::name)
    }

    /// What was agreed on does not work with a peer.
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

/// Counted by the threads around the protocol.
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
