//! Export of spans as OpenTelemetry traces.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use opentelemetry::{KeyValue, trace::TracerProvider};
use opentelemetry_otlp::{WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::{
    error::OTelSdkResult,
    trace::{
        BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracerProvider, SpanData, SpanExporter,
    },
};
use tonic::transport::{Channel, Endpoint};
use tracing::{Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{Layer, registry::LookupSpan};

use crate::{Resource, TelemetryError, metrics::Meters};

/// Time-out of an export. A collector on the same machine or network that is slower counts as unreachable.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of queued spans, about 1 KiB each; further spans are dropped.
const QUEUED_SPANS_MAX: usize = 4096;
/// Interval of exports: the collector has the spans of a request about a second after the request's end.
const EXPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Creates a channel that connects at its first use and reconnects after a lost connection.
pub(crate) fn channel(endpoint: &str) -> Result<Channel, TelemetryError> {
    if tokio::runtime::Handle::try_current().is_err() {
        return Err(TelemetryError::NoRuntime);
    }
    let endpoint = Endpoint::from_shared(endpoint.to_owned()).map_err(|error| {
        TelemetryError::BadEndpoint { endpoint: endpoint.into(), reason: error.to_string() }
    })?;
    Ok(endpoint.connect_timeout(EXPORT_TIMEOUT).timeout(EXPORT_TIMEOUT).connect_lazy())
}

pub(crate) fn otel_resource(resource: &Resource) -> opentelemetry_sdk::Resource {
    // Built empty: the default would read the environment.
    opentelemetry_sdk::Resource::builder_empty()
        .with_attributes([
            KeyValue::new("service.namespace", "baton"),
            KeyValue::new("service.name", resource.service.clone()),
            KeyValue::new("service.instance.id", resource.instance.clone()),
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        ])
        .build()
}

/// Creates the tracer provider. Without a collector spans still get ids, so that a client's trace
/// context passes through and appears in logs, but no span is kept.
pub(crate) fn provider(
    channel: Option<Channel>,
    resource: &Resource,
    health: ExportHealth,
) -> Result<SdkTracerProvider, TelemetryError> {
    let builder = SdkTracerProvider::builder().with_resource(otel_resource(resource));
    let Some(channel) = channel else {
        let pass_through = Sampler::ParentBased(Box::new(Sampler::AlwaysOff));
        return Ok(builder.with_sampler(pass_through).build());
    };
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_channel(channel)
        .with_timeout(EXPORT_TIMEOUT)
        .build()
        .map_err(|error| TelemetryError::BadEndpoint {
            endpoint: "telemetry.otlp".into(),
            reason: error.to_string(),
        })?;
    let batch = BatchConfigBuilder::default()
        .with_max_queue_size(QUEUED_SPANS_MAX)
        .with_max_export_batch_size(512)
        .with_scheduled_delay(EXPORT_INTERVAL)
        .build();
    let processor =
        BatchSpanProcessor::builder(Watched { exporter, health }).with_batch_config(batch).build();
    Ok(builder
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOn)))
        .with_span_processor(processor)
        .build())
}

pub(crate) fn layer<S>(provider: &SdkTracerProvider) -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("baton"))
        .with_location(false)
        .with_threads(false)
        .with_tracked_inactivity(false)
        .with_context_activation(false)
        // Stages of a request are spans at `info`; libraries use `debug` and `trace`.
        .with_filter(LevelFilter::INFO)
}

/// Flushes on a thread of its own, because flushing blocks for seconds when the collector is
/// unreachable. A thread that misses the deadline runs until the process exits.
pub(crate) async fn shutdown(
    tracer: SdkTracerProvider,
    meters: Meters,
    health: ExportHealth,
    deadline: Duration,
) -> Result<(), TelemetryError> {
    let began = Instant::now();
    let (done, finished) = tokio::sync::oneshot::channel();
    let flush = move || {
        let outcome = tracer
            .shutdown_with_timeout(deadline)
            .and(meters.provider.shutdown_with_timeout(deadline));
        let _ = done.send(outcome);
    };
    let thread = std::thread::Builder::new()
        .name("telemetry-flush".into())
        .spawn(flush)
        .map_err(|error| TelemetryError::Shutdown { reason: error.to_string() })?;
    let late = TelemetryError::ShutdownDeadline { what: "sending traces and metrics", deadline };
    match tokio::time::timeout(deadline, finished).await {
        Err(_) => Err(late),
        // The exporter has the same deadline and may report it first.
        Ok(Ok(Err(_))) if began.elapsed() >= deadline => Err(late),
        Ok(outcome) => {
            // The thread has sent its outcome or panicked, so that joining does not block.
            let panicked = thread.join().is_err();
            let reason = match outcome {
                Ok(Ok(())) if health.0.load(Ordering::Relaxed) => {
                    "the collector was unreachable at the end: the last spans are lost".into()
                }
                Ok(Ok(())) if !panicked => return Ok(()),
                Ok(Err(error)) => error.to_string(),
                Ok(Ok(())) | Err(_) => "the flush panicked".into(),
            };
            Err(TelemetryError::Shutdown { reason })
        }
    }
}

/// Result of the last export, shared with the shutdown.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExportHealth(Arc<AtomicBool>);

/// Exporter that logs once when the collector stops accepting spans, and once when it accepts them again.
#[derive(Debug)]
struct Watched<E> {
    exporter: E,
    health: ExportHealth,
}

impl<E: SpanExporter> SpanExporter for Watched<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let outcome = self.exporter.export(batch).await;
        let was_failing = self.health.0.swap(outcome.is_err(), Ordering::Relaxed);
        match &outcome {
            Err(error) if !was_failing => {
                tracing::warn!(%error, "cannot send traces to telemetry.otlp; spans are dropped");
            }
            Ok(()) if was_failing => tracing::info!("telemetry.otlp accepts traces again"),
            _ => {}
        }
        outcome
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &opentelemetry_sdk::Resource) {
        self.exporter.set_resource(resource);
    }
}
