//! The counters of the transfers, on `/metrics` and over OTLP.

use std::collections::BTreeMap;

use kv_transfer::{MetricsReader, TransferMetrics, Transfers};
use opentelemetry::{
    KeyValue,
    metrics::{AsyncInstrument, Meter},
};

/// Registers the instruments. They report nothing after the transfers have shut down. A scrape reads
/// them on its own thread and never blocks.
pub(crate) fn register(meter: &Meter, transfers: &Transfers) {
    let stats = transfers.metrics_reader();
    let observe = |read: fn(&TransferMetrics, &dyn AsyncInstrument<u64>)| {
        let stats: MetricsReader = stats.clone();
        move |instrument: &dyn AsyncInstrument<u64>| {
            if let Some(stats) = stats.read() {
                read(&stats, instrument);
            }
        }
    };
    meter
        .u64_observable_counter("baton.kv_transfer.control_messages")
        .with_description(
            "Control messages between nodes, by direction; a resent message also counts as sent",
        )
        .with_callback(observe(|stats, instrument| {
            instrument.observe(stats.control_sent, &[direction("sent")]);
            instrument.observe(stats.control_received, &[direction("received")]);
            instrument.observe(stats.control_resent, &[direction("resent")]);
        }))
        .build();
    meter
        .u64_observable_counter("baton.kv_transfer.chunks")
        .with_description("Transferred chunks of KV, by direction")
        .with_callback(observe(|stats, instrument| {
            instrument.observe(stats.chunks_sent, &[direction("sent")]);
            instrument.observe(stats.chunks_received, &[direction("received")]);
        }))
        .build();
    meter
        .u64_observable_counter("baton.kv_transfer.refused")
        .with_description("Control messages and data frames that this node rejected, by reason")
        .with_callback(observe(|stats, instrument| {
            refused(instrument, "control", &stats.control_refused);
            refused(instrument, "data", &stats.data_refused);
        }))
        .build();
    meter
        .u64_observable_counter("baton.kv_transfer.fallbacks")
        .with_description(
            "Connections that fell back to another transport, by the transport that was wanted",
        )
        .with_callback(observe(|stats, instrument| {
            for (wanted, count) in &stats.fallbacks {
                instrument.observe(*count, &[KeyValue::new("wanted", *wanted)]);
            }
        }))
        .build();
    meter
        .u64_observable_gauge("baton.kv_transfer.active")
        .with_description("KV transfers in progress")
        .with_callback(observe(|stats, instrument| {
            instrument.observe(stats.transfers_active as u64, &[]);
        }))
        .build();
    meter
        .u64_observable_gauge("baton.kv_transfer.peers")
        .with_description("Connected nodes, by transport path")
        .with_callback(observe(|stats, instrument| {
            let mut peers: BTreeMap<&str, u64> = BTreeMap::new();
            for peer in &stats.peers {
                let path = if peer.path.is_empty() { "connecting" } else { peer.path.as_str() };
                *peers.entry(path).or_default() += 1;
            }
            for (path, count) in peers {
                instrument.observe(count, &[KeyValue::new("path", path.to_owned())]);
            }
        }))
        .build();
}

fn direction(name: &'static str) -> KeyValue {
    KeyValue::new("direction", name)
}

fn refused(
    instrument: &dyn AsyncInstrument<u64>,
    what: &'static str,
    counts: &BTreeMap<&'static str, u64>,
) {
    for (reason, count) in counts {
        instrument
            .observe(*count, &[KeyValue::new("what", what), KeyValue::new("reason", *reason)]);
    }
}
