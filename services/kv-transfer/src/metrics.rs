//! What a node can see of its transfers from outside.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Counters since start, and gauges of this moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferMetrics {
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub chunks_sent: u64,
    pub chunks_received: u64,
    pub notices_sent: u64,
    pub notices_received: u64,
    /// Notices sent again because no answer had come.
    pub notices_resent: u64,
    /// Notices that were not believed or had no place here, by reason.
    pub notices_refused: BTreeMap<&'static str, u64>,
    /// Data connections and frames that were refused, by reason.
    pub data_refused: BTreeMap<&'static str, u64>,
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
    /// The transport that carries KV between the two: `tcp`; empty while they greet.
    pub path: String,
    pub transfers_active: usize,
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
}

impl DataCounters {
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
    }
}

/// Counted by the threads around the protocol.
#[derive(Debug, Default)]
pub struct NoticeCounters {
    sent: AtomicU64,
    received: AtomicU64,
    refused: Refusals,
}

impl NoticeCounters {
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
        metrics.notices_sent = self.sent.load(Ordering::Relaxed);
        metrics.notices_received = self.received.load(Ordering::Relaxed);
        for (reason, count) in self.refused.snapshot() {
            *metrics.notices_refused.entry(reason).or_default() += count;
        }
    }
}
