//! What a node can see of its transfers from outside.

use std::collections::BTreeMap;

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
    pub path: &'static str,
    pub transfers_active: usize,
}
