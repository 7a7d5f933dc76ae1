//! Spans become OpenTelemetry traces.

use std::time::{Duration, Instant};

use opentelemetry::{KeyValue, trace::TracerProvider};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider,
};
use tonic::transport::{Channel, Endpoint};
use tracing::{Subscriber, level_filters::LevelFilter};
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::registry::LookupSpan;

use crate::{
    Resource, TelemetryError,
    export_health::{ExportHealth, Watched},
    metrics::Meters,
};

/// A collector is on the same machine or network; slower than this it is away.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Spans held while they wait to be sent, about 1 KiB each; more are dropped.
const QUEUED_SPANS_MAX: usize = 4096;
/// A request's spans are in the collector about a second after its end.
const EXPORT_INTERVAL: Duration = Duration::from_secs(1);

/// A connection that is made when first used and made again after it is lost.
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

/// Without a collector spans still get ids, so that a client's trace context passes through and logs
/// can name it; nothing is recorded unless the client's context says so, and nothing is kept.
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
    let exporter = SpanExporter::builder()
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
    let processor = BatchSpanProcessor::builder(Watched::new(exporter, health))
        .with_batch_config(batch)
        .build();
    Ok(builder
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOn)))
        .with_span_processor(processor)
        .build())
}

pub(crate) fn layer<S>(provider: &SdkTracerProvider) -> OpenTelemetryLayer<S, SdkTracer>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("baton"))
        .with_location(false)
        .with_threads(false)
        .with_tracked_inactivity(false)
        .with_context_activation(false)
}

/// Stages of a request are spans at `info`; libraries below us use `debug` and `trace`.
pub(crate) fn filter() -> LevelFilter {
    LevelFilter::INFO
}

/// Flushing blocks, for seconds when the collector is away: it has a thread of its own, and the wait
/// for it a deadline. Past the deadline the thread is left to the end of the process.
pub(crate) async fn shutdown(
    tracer: SdkTracerProvider,
    meters: Meters,
    health: ExportHealth,
    deadline: Duration,
) -> Result<(), TelemetryError> {
    let began = Instant::now();
    let (done, finished) = tokio::sync::oneshot::channel();
    let flush = move || {
        let outcome = tracer.shutdown_with_timeout(deadline).and(meters.shutdown(deadline));
        let _ = done.send(outcome);
    };
    let thread = std::thread::Builder::new()
        .name("telemetry-flush".into())
        .spawn(flush)
        .map_err(|error| TelemetryError::Shutdown { reason: error.to_string() })?;
    let late = TelemetryError::ShutdownDeadline { what: "sending traces and metrics", deadline };
    match tokio::time::timeout(deadline, finished).await {
        Err(_) => Err(late),
        // The exporter's own deadline is the same one and may be noticed first.
        Ok(Ok(Err(_))) if began.elapsed() >= deadline => Err(late),
        Ok(outcome) => {
            // It has sent its answer or panicked: either way it is at its end.
            let panicked = thread.join().is_err();
            let reason = match outcome {
                Ok(Ok(())) if health.is_failing() => {
                    "the collector was away at the end: the last spans are lost".into()
                }
                Ok(Ok(())) if !panicked => return Ok(()),
                Ok(Err(error)) => error.to_string(),
                Ok(Ok(())) | Err(_) => "the flush panicked".into(),
            };
            Err(TelemetryError::Shutdown { reason })
        }
    }
}
