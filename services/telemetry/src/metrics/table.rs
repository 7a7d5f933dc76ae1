//! The table of metrics: a row has the name, kind, unit, help and labels of a metric.
//! `instruments!` declares the rows that a service records, with a field for each, and [`OBSERVED`]
//! lists those that a callback reads at each scrape. `make docs` writes the lists of
//! docs/metrics.md from the rows.

use opentelemetry::{
    KeyValue,
    metrics::{AsyncInstrument, Counter, Gauge, Histogram, Meter, UpDownCounter},
};

use super::{Metrics, alias, keys, node, router, weights};

/// Kind of a metric, as Prometheus names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

/// The declaration of one metric.
#[derive(Clone, Debug)]
pub struct MetricRow {
    /// OpenTelemetry's name.
    pub name: &'static str,
    pub kind: MetricKind,
    /// Unit in UCUM; empty for a count.
    pub unit: &'static str,
    /// Upper bounds of a histogram's buckets.
    pub bounds: &'static [f64],
    pub help: &'static str,
    pub labels: Vec<&'static str>,
}

impl MetricRow {
    /// Returns the name in the Prometheus text.
    pub fn prometheus_name(&self) -> String {
        let unit = match self.unit {
            "s" => "_seconds",
            "By" => "_bytes",
            "By/s" => "_bytes_per_second",
            _ => "",
        };
        let total = if self.kind == MetricKind::Counter { "_total" } else { "" };
        format!("{}{unit}{total}", self.name.replace('.', "_"))
    }

    /// Returns the names in the Prometheus text that repeat this metric.
    pub fn aliases(&self) -> impl Iterator<Item = &'static str> {
        alias::of(self.prometheus_name())
    }
}

/// An instrument of the library.
pub(super) trait Instrument {
    type Value: Copy;
    const KIND: MetricKind;
    /// Value with which every series begins; `None`: a series begins with its first value.
    const START: Option<Self::Value>;

    fn build(meter: &Meter, row: &MetricRow) -> Self;

    fn record(&self, value: Self::Value, attributes: &[KeyValue]);
}

macro_rules! library_instruments {
    ($($type:ty, $value:ty, $kind:ident, $start:expr, $build:ident, $record:ident $(, $bounds:ident)?;)+) => {$(
        impl Instrument for $type {
            type Value = $value;
            const KIND: MetricKind = MetricKind::$kind;
            const START: Option<$value> = $start;

            fn build(meter: &Meter, row: &MetricRow) -> Self {
                let builder = meter.$build(row.name).with_unit(row.unit).with_description(row.help);
                $(let builder = builder.$bounds(row.bounds.to_vec());)?
                builder.build()
            }

            fn record(&self, value: $value, attributes: &[KeyValue]) {
                self.$record(value, attributes);
            }
        }
    )+};
}

// `increase()` and `rate()` do not see the first increment of a series that begins with it.
library_instruments! {
    Counter<u64>, u64, Counter, Some(0), u64_counter, add;
    UpDownCounter<i64>, i64, Gauge, Some(0), i64_up_down_counter, add;
    Gauge<u64>, u64, Gauge, None, u64_gauge, record;
    Gauge<f64>, f64, Gauge, None, f64_gauge, record;
    Histogram<u64>, u64, Histogram, None, u64_histogram, record, with_boundaries;
    Histogram<f64>, f64, Histogram, None, f64_histogram, record, with_boundaries;
}

/// Declares a struct of instruments, each with its row: `field: INSTRUMENT, LABELS, + FURTHER
/// LABEL, BOUNDS => NAME UNIT, HELP`. The labels in brackets are constants of all series.
macro_rules! instruments {
    ($(#[$meta:meta])* $visibility:vis struct $name:ident $constants:tt {
        $($field:ident: $type:ty, $labels:ty $(, + $further:literal)* $(, $bounds:ident)? =>
            $metric:literal $($unit:literal)?, $help:literal;)+
    }) => {
        $(#[$meta])*
        $visibility struct $name {
            $($field: $crate::metrics::labels::Series<$type, $labels>,)+
        }

        impl $name {
            /// Returns the rows of the instruments.
            $visibility fn rows() -> Vec<$crate::metrics::MetricRow> {
                vec![$($crate::metrics::MetricRow {
                    name: $metric,
                    kind: <$type as $crate::metrics::table::Instrument>::KIND,
                    unit: concat!($($unit)?),
                    bounds: <[&'static [f64]]>::first(&[$(&$bounds)?]).copied().unwrap_or_default(),
                    help: $help,
                    labels: [
                        $constants.to_vec(),
                        <$labels as $crate::metrics::labels::Labels>::keys(),
                        vec![$($further),*],
                    ]
                    .concat(),
                }),+]
            }

            /// Creates the instruments. `constants`: attributes that every series has.
            fn new(metrics: &$crate::Metrics, constants: &[opentelemetry::KeyValue]) -> Self {
                let mut rows = Self::rows().into_iter();
                let mut row = || rows.next().expect("each field has a row");
                Self {
                    $($field: $crate::metrics::labels::Series::new(&metrics.meter, &row(), constants),)+
                }
            }
        }
    };
}

/// Declares lists of rows of metrics that a callback reads at each scrape: `KIND NAME UNIT
/// [LABELS], HELP`.
macro_rules! observed {
    ($($(#[$meta:meta])* fn $list:ident { $($kind:ident $metric:literal $($unit:literal)? [$($label:literal),*], $help:literal;)+ })+) => {$(
        $(#[$meta])*
        fn $list() -> Vec<MetricRow> {
            vec![$(MetricRow {
                name: $metric,
                kind: MetricKind::$kind,
                unit: concat!($($unit)?),
                bounds: &[],
                help: $help,
                labels: vec![$($label),*],
            }),+]
        }
    )+};
}

observed! {
    /// Returns the rows that routers and nodes observe.
    fn observed_by_both {
        Gauge "baton.draining" [], "1 while the process drains, otherwise 0";
        Counter "baton.telemetry.log_lines_dropped" [], "Log lines that were not written: the log was not read in time";
        Counter "baton.telemetry.spans_dropped" [],
            "Spans that were not exported: the collector was unreachable or slow";
        Counter "process.cpu.time" "s" [], "CPU time of the process";
        Gauge "process.memory.usage" "By" [], "Resident memory of the process";
        Gauge "process.open_file_descriptor.count" [], "Open files and sockets of the process";
        Gauge "target_info" ["service.instance.id", "service.name", "service.namespace", "service.version"],
            "Target metadata";
    }

    /// Returns the rows that routers observe.
    fn observed_by_routers {
        Gauge "baton.membership.connected" ["backend"],
            "1 while etcd or DNS answers, otherwise 0: the last known nodes are used";
    }

    /// Returns the rows that nodes observe.
    fn observed_by_nodes {
        Gauge "baton.kv_transfer.active" [], "KV transfers in progress";
        Counter "baton.kv_transfer.chunks" ["direction"], "Transferred chunks of KV, by direction";
        Counter "baton.kv_transfer.control_messages" ["direction"],
            "Control messages between nodes, by direction; a resent message also counts as sent";
        Counter "baton.kv_transfer.fallbacks" ["wanted"],
            "Connections that fell back to another transport, by the transport that was wanted";
        Gauge "baton.kv_transfer.peers" ["path"], "Connected nodes, by transport path";
        Gauge "baton.kv_transfer.receive_rate" "By/s" ["peer", "path"],
            "Rate at which KV last arrived from a node, by node and transport path";
        Counter "baton.kv_transfer.refused" ["what", "reason"],
            "Control messages and data frames that this node rejected, by reason";
        Gauge "baton.model.load.duration" "s" [], "Time to fetch, read and pack the model";
        Gauge "baton.step.hung" [], "1 while a launched step has not finished within node.hang_restart";
        Gauge "baton.tier.blocks" ["tier"], "KV blocks that a tier holds, by tier";
        Counter "baton.tier.damaged" ["tier"], "KV blocks found damaged or missing by a load, by tier";
        Counter "baton.tier.hits" ["tier"], "KV blocks loaded instead of computed, by tier";
        Counter "baton.tier.loaded_bytes" ["tier"], "KV bytes loaded, by tier";
        Counter "baton.tier.loads_refused" ["tier"],
            "KV blocks computed because loading was predicted to be slower, by tier";
        Gauge "baton.tier.queue_age" "s" ["tier"], "Age of the oldest queued save, by tier";
        Counter "baton.tier.saved_bytes" ["tier"], "KV bytes saved, by tier";
        Counter "baton.tier.saves_cancelled" ["tier"],
            "Queued saves whose block was evicted before its copy, by tier";
        Counter "baton.tier.saves_dropped" ["tier"],
            "Saves dropped because the queue was full or every slot was in use, by tier";
        Counter "baton.tier.saves_failed" ["tier"], "Saves that failed, by tier";
        Gauge "baton.tier.slots" ["tier"], "KV blocks that fit into a tier, by tier";
    }
}

/// Returns the rows of all metrics of a router.
pub fn router_rows() -> Vec<MetricRow> {
    [router::rows(), keys::rows(), weights::rows(), observed_by_both(), observed_by_routers()]
        .concat()
}

/// Returns the rows of all metrics of a node.
pub fn node_rows() -> Vec<MetricRow> {
    [node::rows(), observed_by_both(), observed_by_nodes()].concat()
}

fn observed_row(name: &str) -> MetricRow {
    let rows = [observed_by_both(), observed_by_routers(), observed_by_nodes()].concat();
    let row = rows.into_iter().find(|row| row.name == name);
    row.unwrap_or_else(|| panic!("the table has no row {name}"))
}

/// Defines the methods that export the values which `read` observes at each scrape.
macro_rules! observe_methods {
    ($($method:ident, $value:ty, $counter:ident, $gauge:ident;)+) => {$(
        /// Exports what `read` observes at each scrape, as the table's row of this name.
        pub fn $method(
            &self,
            name: &str,
            read: impl Fn(&dyn AsyncInstrument<$value>) + Send + Sync + 'static,
        ) {
            let MetricRow { name, kind, unit, help, .. } = observed_row(name);
            if kind == MetricKind::Counter {
                let counter = self.meter.$counter(name).with_unit(unit).with_description(help);
                counter.with_callback(read).build();
            } else {
                let gauge = self.meter.$gauge(name).with_unit(unit).with_description(help);
                gauge.with_callback(read).build();
            }
        }
    )+};
}

impl Metrics {
    observe_methods! {
        observe, u64, u64_observable_counter, u64_observable_gauge;
        observe_f64, f64, f64_observable_counter, f64_observable_gauge;
    }

    /// Sets whether the process drains.
    pub fn set_draining(&self, draining: bool) {
        let gauge: Gauge<u64> = Instrument::build(&self.meter, &observed_row("baton.draining"));
        gauge.record(u64::from(draining), &[]);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_service_has_a_metric_once_and_each_alias_repeats_a_metric() {
        let rows = [router_rows(), node_rows()];
        for rows in &rows {
            let names: BTreeSet<_> = rows.iter().map(|row| row.name).collect();
            assert_eq!(names.len(), rows.len());
        }
        for name in alias::repeated() {
            let has = |row: &MetricRow| row.prometheus_name() == name;
            assert!(rows.iter().flatten().any(has), "no row {name}");
        }
    }
}
