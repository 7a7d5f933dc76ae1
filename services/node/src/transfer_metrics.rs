//! Counters and gauges of KV transfers, exported on `/metrics` and over OTLP.

use std::collections::BTreeMap;

use kv_transfer::{
    CONTROL_REFUSALS, DATA_REFUSALS, MetricsReader, TransferKind, TransferMetrics, Transfers,
};
use opentelemetry::{KeyValue, metrics::AsyncInstrument};
use telemetry::Metrics;

/// Registers the instruments. They report nothing after the transfers have shut down. A scrape
/// reads them on its own thread and waits for no transfer.
pub(crate) fn register(metrics: &Metrics, transfers: &Transfers) {
    let stats = transfers.metrics_reader();
    let observe = |name: &str, read: fn(&TransferMetrics, &dyn AsyncInstrument<u64>)| {
        let stats: MetricsReader = stats.clone();
        metrics.observe(name, move |instrument| {
            if let Some(stats) = stats.read() {
                read(&stats, instrument);
            }
        });
    };
    observe("baton.kv_transfer.control_messages", |stats, instrument| {
        instrument.observe(stats.control_sent, &[direction("sent")]);
        instrument.observe(stats.control_received, &[direction("received")]);
        instrument.observe(stats.protocol.control_resent, &[direction("resent")]);
    });
    observe("baton.kv_transfer.chunks", |stats, instrument| {
        instrument.observe(stats.chunks_sent, &[direction("sent")]);
        instrument.observe(stats.chunks_received, &[direction("received")]);
    });
    observe("baton.kv_transfer.refused", |stats, instrument| {
        refused(instrument, "control", &CONTROL_REFUSALS, &stats.control_refused);
        refused(instrument, "data", &DATA_REFUSALS, &stats.data_refused);
    });
    observe("baton.kv_transfer.fallbacks", |stats, instrument| {
        for wanted in TransferKind::ALL.map(TransferKind::name) {
            let count = stats.fallbacks.get(wanted).copied().unwrap_or_default();
            instrument.observe(count, &[KeyValue::new("wanted", wanted)]);
        }
    });
    observe("baton.kv_transfer.active", |stats, instrument| {
        instrument.observe(stats.transfers_active as u64, &[]);
    });
    observe("baton.kv_transfer.receive_rate", |stats, instrument| {
        for peer in stats.peers.iter().filter(|peer| peer.receive_rate > 0) {
            let labels = [("peer", &peer.node_id), ("path", &peer.path)];
            let labels = labels.map(|(key, value)| KeyValue::new(key, value.clone()));
            instrument.observe(peer.receive_rate, &labels);
        }
    });
    observe("baton.kv_transfer.peers", |stats, instrument| {
        let mut peers: BTreeMap<&str, u64> = BTreeMap::new();
        for peer in &stats.peers {
            let path = if peer.path.is_empty() { "connecting" } else { peer.path.as_str() };
            *peers.entry(path).or_default() += 1;
        }
        for (path, count) in peers {
            instrument.observe(count, &[KeyValue::new("path", path.to_owned())]);
        }
    });
}

fn direction(name: &'static str) -> KeyValue {
    KeyValue::new("direction", name)
}

fn refused(
    instrument: &dyn AsyncInstrument<u64>,
    what: &'static str,
    reasons: &[&'static str],
    counts: &BTreeMap<&'static str, u64>,
) {
    for reason in reasons {
        let count = counts.get(reason).copied().unwrap_or_default();
        instrument.observe(count, &[KeyValue::new("what", what), KeyValue::new("reason", *reason)]);
    }
}
