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
        .u64_observable_counter("baton.kv_transfer.notices")
        .with_description("Notices between nodes; those sent again count in both")
        .with_callback(observe(|stats, instrument| {
            instrument.observe(stats.control_sent, &[direction("sent")]);
            instrument.observe(stats.control_received, &[direction("received")]);
            instrument.observe(stats.control_resent, &[direction("resent")]);
        }))
        .build();
    meter
        .u64_observable_counter("baton.kv_transfer.chunks")
        .with_description("Chunks of KV that moved")
        .with_callback(observe(|stats, instrument| {
            instrument.observe(stats.chunks_sent, &[direction("sent")]);
            instrument.observe(stats.chunks_received, &[direction("received")]);
        }))
        .build();
    meter
        .u64_observable_counter("baton.kv_transfer.refused")
        .with_description("Notices and data frames that were not believed or had no place here")
        .with_callback(observe(|stats, instrument| {
            refused(instrument, "notice", &stats.control_refused);
            refused(instrument, "data", &stats.data_refused);
        }))
        .build();
    meter
        .u64_observable_counter("baton.kv_transfer.fallbacks")
        .with_description("Connections to or from nodes for which KV goes by tcp, as what was agreed on did not work")
        .with_callback(observe(|stats, instrument| {
            for (wanted, count) in &stats.fallbacks {
                instrument.observe(*count, &[KeyValue::new("wanted", *wanted)]);
            }
        }))
        .build();
    meter
        .u64_observable_gauge("baton.kv_transfer.active")
        .with_description("Transfers under way")
        .with_callback(observe(|stats, instrument| {
            instrument.observe(stats.transfers_active as u64, &[]);
        }))
        .build();
    meter
        .u64_observable_gauge("baton.kv_transfer.peers")
        .with_description("Nodes with which this one is connected, by the path that KV takes")
        .with_callback(observe(|stats, instrument| {
            let mut peers: BTreeMap<&str, u64> = BTreeMap::new();
            for peer in &stats.peers {
                let path = if peer.path.is_empty() { "greeting" } else { peer.path.as_str() };
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
