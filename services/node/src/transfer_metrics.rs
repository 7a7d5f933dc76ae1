//! Counters and gauges of KV transfers, exported on `/metrics` and over OTLP.

use std::collections::BTreeMap;

use kv_transfer::{
    CONTROL_REFUSALS, DATA_REFUSALS, MetricsReader, TransferKind, TransferMetrics, Transfers,
};
use opentelemetry::{
    KeyValue,
    metrics::{AsyncInstrument, Meter},
};

/// Registers the instruments. They report nothing after the transfers have shut down. A scrape reads
/// them on its own thread and waits for no transfer.
pub(crate) fn register(meter: &Meter, transfers: &Transfers) {
    let stats = transfers.metrics_reader();
    type Read = fn(&TransferMetrics, &dyn AsyncInstrument<u64>);
    let observe = |read: Read| {
        let stats: MetricsReader = stats.clone();
        move |instrument: &dyn AsyncInstrument<u64>| {
            if let Some(stats) = stats.read() {
                read(&stats, instrument);
            }
        }
    };
    let counter = |name: &'static str, description: &'static str, read: Read| {
        let counter = meter.u64_observable_counter(name).with_description(description);
        counter.with_callback(observe(read)).build();
    };
    let gauge = |name: &'static str, description: &'static str, read: Read| {
        let gauge = meter.u64_observable_gauge(name).with_description(description);
        gauge.with_callback(observe(read)).build();
    };
    counter(
        "baton.kv_transfer.control_messages",
        "Control messages between nodes, by direction; a resent message also counts as sent",
        |stats, instrument| {
            instrument.observe(stats.control_sent, &[direction("sent")]);
            instrument.observe(stats.control_received, &[direction("received")]);
            instrument.observe(stats.protocol.control_resent, &[direction("resent")]);
        },
    );
    counter(
        "baton.kv_transfer.chunks",
        "Transferred chunks of KV, by direction",
        |stats, instrument| {
            instrument.observe(stats.chunks_sent, &[direction("sent")]);
            instrument.observe(stats.chunks_received, &[direction("received")]);
        },
    );
    counter(
        "baton.kv_transfer.refused",
        "Control messages and data frames that this node rejected, by reason",
        |stats, instrument| {
            refused(instrument, "control", &CONTROL_REFUSALS, &stats.control_refused);
            refused(instrument, "data", &DATA_REFUSALS, &stats.data_refused);
        },
    );
    counter(
        "baton.kv_transfer.fallbacks",
        "Connections that fell back to another transport, by the transport that was wanted",
        |stats, instrument| {
            for wanted in TransferKind::ALL.map(TransferKind::name) {
                let count = stats.fallbacks.get(wanted).copied().unwrap_or_default();
                instrument.observe(count, &[KeyValue::new("wanted", wanted)]);
            }
        },
    );
    gauge("baton.kv_transfer.active", "KV transfers in progress", |stats, instrument| {
        instrument.observe(stats.transfers_active as u64, &[]);
    });
    gauge("baton.kv_transfer.peers", "Connected nodes, by transport path", |stats, instrument| {
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
