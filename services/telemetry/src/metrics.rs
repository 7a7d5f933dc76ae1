//! Metrics: one set of OpenTelemetry instruments and two readers.
//!
//! The OTLP reader pushes the metrics to a collector, if there is one. The Prometheus reader
//! renders them on request. Names follow OpenTelemetry's GenAI conventions, or start with `baton.`.
//! The Prometheus text repeats some metrics under vLLM's names (module `alias`).
//!
//! Cardinality is bounded by construction: every attribute is an enum, a bounded number or a
//! constant of the process.

#[macro_use]
mod labels;
#[macro_use]
mod table;
mod alias;
mod keys;
mod node;
mod process;
mod router;
mod weights;

use std::time::Duration;

use opentelemetry::{
    KeyValue,
    metrics::{Meter, MeterProvider},
};
use opentelemetry_otlp::MetricExporter;
use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider};
use prometheus::{Registry, TextEncoder, proto::LabelPair};
use tracing_appender::non_blocking::ErrorCounter;

use crate::{
    Otlp, TelemetryError,
    traces::{SpanQueue, bad_endpoint, exporter_to},
};

pub use keys::{ApiKeyMetrics, KEYS_MAX, KeyLimit, KeyMetrics, KeyRejection, KeyWaiting};
pub use node::{
    LoadStats, NodeMetrics, SequenceEnd, StepDispatch, StepStats, TokenRejection, TransferEnd,
    TransferSide,
};
pub use router::{
    AttemptEndLabel, Exclusion, FinishedRequest, InFlightRequest, NodeRole, Operation,
    PickDecision, RefusalReason, RequestEnd, RouterMetrics,
};
pub use table::{MetricKind, MetricRow, node_rows, router_rows};
pub use weights::{WeightMetrics, WeightUpdateOutcome, WeightUpdatePhase};

/// Label of a model's served name in the Prometheus text.
pub const MODEL_LABEL: &str = "gen_ai_request_model";
/// Label of an API key's name.
pub const KEY_LABEL: &str = "key";

/// Interval of pushes. Dashboards rarely show a finer resolution.
const PUSH_INTERVAL: Duration = Duration::from_secs(10);

/// Seconds, from GenAI's conventions: `gen_ai.server.request.duration`.
const REQUEST_SECONDS: [f64; 14] =
    [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92];
/// Seconds, from GenAI's conventions: `gen_ai.server.time_to_first_token`.
const FIRST_TOKEN_SECONDS: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
/// Seconds, from GenAI's conventions: `gen_ai.server.time_per_output_token`.
const OUTPUT_TOKEN_SECONDS: [f64; 13] =
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
/// Tokens, from GenAI's conventions: `gen_ai.client.token.usage`, without the last three
/// boundaries.
const TOKENS: [f64; 11] =
    [1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0];
/// Relative errors of predictions.
const ERROR_FRACTIONS: [f64; 10] = [0.01, 0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 5.0];
/// Seconds of one step or one transfer, from 0.5 ms.
const STEP_SECONDS: [f64; 13] =
    [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048];
/// Seconds of one token bitmask, for which other rows wait, from 10 µs.
const MASK_SECONDS: [f64; 12] =
    [0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05];
/// Seconds of one phase of a step on the engine thread, from 5 µs.
const HOST_SECONDS: [f64; 13] = [
    0.000005, 0.00001, 0.00002, 0.00004, 0.00008, 0.00012, 0.00016, 0.00025, 0.0005, 0.001, 0.002,
    0.005, 0.02,
];

/// The two readers of the metrics.
pub(crate) struct Meters {
    pub(crate) provider: SdkMeterProvider,
    registry: Registry,
}

impl Meters {
    pub(crate) fn new(
        otlp: &Otlp,
        resource: opentelemetry_sdk::Resource,
    ) -> Result<Self, TelemetryError> {
        let registry = Registry::new();
        let prometheus = opentelemetry_prometheus::exporter()
            .with_registry(registry.clone())
            .scope_info_enabled(false)
            .build()
            .map_err(metrics_failed)?;
        let mut builder = SdkMeterProvider::builder()
            .with_resource(resource)
            .with_reader(prometheus)
            .with_view(keys::view);
        if let Some(endpoint) = &otlp.metrics {
            let exporter = MetricExporter::builder().with_tonic();
            let exporter =
                exporter_to(exporter, endpoint, otlp)?.build().map_err(bad_endpoint(endpoint))?;
            let push = PeriodicReader::builder(exporter).with_interval(PUSH_INTERVAL).build();
            builder = builder.with_reader(push);
        }
        let provider = builder.build();
        let meters = Self { provider, registry };
        process::register(&meters.metrics());
        Ok(meters)
    }

    /// Counts the spans and log lines that were dropped.
    pub(crate) fn observe_dropped(&self, spans: SpanQueue, lines: ErrorCounter) {
        let metrics = self.metrics();
        metrics
            .observe("baton.telemetry.spans_dropped", move |it| it.observe(spans.dropped(), &[]));
        metrics.observe("baton.telemetry.log_lines_dropped", move |it| {
            it.observe(lines.dropped_lines() as u64, &[]);
        });
    }

    pub(crate) fn metrics(&self) -> Metrics {
        Metrics { meter: self.provider.meter("baton"), registry: self.registry.clone() }
    }
}

fn metrics_failed(error: impl ToString) -> TelemetryError {
    TelemetryError::Metrics { reason: error.to_string() }
}

/// Registry that creates instruments and renders their values.
#[derive(Clone)]
pub struct Metrics {
    meter: Meter,
    registry: Registry,
}

impl Metrics {
    /// Exports whether the service behind the member list answers.
    pub fn observe_membership(
        &self,
        backend: &'static str,
        is_connected: impl Fn() -> bool + Send + Sync + 'static,
    ) {
        self.observe("baton.membership.connected", move |connected| {
            connected.observe(u64::from(is_connected()), &[KeyValue::new("backend", backend)]);
        });
    }

    /// Renders every instrument and alias in Prometheus' text format 0.0.4.
    pub fn render_prometheus(&self) -> String {
        self.render_prometheus_of(|_, _| true)
    }

    /// Renders the series of which `shows` accepts every label, each by name and value.
    pub fn render_prometheus_of(&self, shows: impl Fn(&str, &str) -> bool) -> String {
        let mut families = self.registry.gather();
        families.retain_mut(|family| {
            let shown = |pair: &LabelPair| shows(pair.name(), pair.value());
            family.mut_metric().retain(|series| series.get_label().iter().all(shown));
            !family.get_metric().is_empty()
        });
        alias::add(&mut families);
        let mut text = String::new();
        // Fails only for a family without a name or a metric; the registry gathers none of these.
        if let Err(error) = TextEncoder::new().encode_utf8(&families, &mut text) {
            tracing::error!(%error, "cannot render metrics");
        }
        text
    }
}
