//! Export of spans as OpenTelemetry traces.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use opentelemetry::{Context, KeyValue, trace::TracerProvider};
use opentelemetry_otlp::{WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::{
    error::OTelSdkResult,
    resource::{EnvResourceDetector, ResourceDetector},
    trace::{
        BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracerProvider, Span, SpanData,
        SpanExporter, SpanProcessor,
    },
};
use tonic::transport::{Certificate, ClientTlsConfig};
use tracing::{Level, Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{Layer, filter::FilterFn, registry::LookupSpan};

use crate::{Otlp, Resource, TelemetryError, metrics::Meters};

/// Time-out of an export. A collector on the same machine or network that is slower counts as
/// unreachable.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of queued spans, about 1 KiB each; further spans are dropped.
const QUEUED_SPANS_MAX: usize = 4096;
/// Interval of exports: the collector has the spans of a request about a second after the request's
/// end.
const EXPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Configures an exporter to `endpoint`, which connects at its first use and reconnects after a
/// lost connection.
pub(crate) fn exporter_to<B: WithExportConfig + WithTonicConfig>(
    builder: B,
    endpoint: &str,
    otlp: &Otlp,
) -> Result<B, TelemetryError> {
    let builder = builder.with_endpoint(endpoint).with_timeout(EXPORT_TIMEOUT);
    if !endpoint.starts_with("https://") {
        return Ok(builder);
    }
    let tls = match &otlp.certificate {
        None => ClientTlsConfig::new().with_webpki_roots(),
        Some(path) => {
            let pem = std::fs::read(path)
                .map_err(|reason| TelemetryError::Certificate { path: path.clone(), reason })?;
            ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem))
        }
    };
    Ok(builder.with_tls_config(tls))
}

/// Returns an error of an exporter's setup.
pub(crate) fn bad_endpoint(
    endpoint: &str,
) -> impl FnOnce(opentelemetry_otlp::ExporterBuildError) -> TelemetryError {
    let endpoint = endpoint.to_owned();
    move |error| TelemetryError::BadEndpoint { endpoint, reason: error.to_string() }
}

/// Returns the attributes of traces and metrics: defaults, then the `OTEL_*` variables, then the
/// setting `instance`.
pub(crate) fn otel_resource(
    resource: &Resource,
    instance: Option<&str>,
) -> opentelemetry_sdk::Resource {
    let own = |key, value: &str| KeyValue::new(key, value.to_owned());
    let service = std::env::var("OTEL_SERVICE_NAME").ok().filter(|name| !name.is_empty());
    opentelemetry_sdk::Resource::builder_empty()
        .with_attributes([
            own("service.namespace", "baton"),
            own("service.name", &resource.service),
            own("service.instance.id", &resource.instance),
            own("service.version", env!("CARGO_PKG_VERSION")),
        ])
        .with_detector(Box::new(EnvResourceDetector::new()) as Box<dyn ResourceDetector>)
        .with_attributes(service.map(|name| own("service.name", &name)))
        .with_attributes(instance.map(|name| own("service.instance.id", name)))
        .build()
}

/// Creates the tracer provider. Without a collector spans still get ids, so that a client's trace
/// context passes through and appears in logs, but no span is kept.
pub(crate) fn provider(
    otlp: &Otlp,
    resource: opentelemetry_sdk::Resource,
    queue: SpanQueue,
) -> Result<SdkTracerProvider, TelemetryError> {
    let builder = SdkTracerProvider::builder().with_resource(resource);
    let Some(endpoint) = &otlp.traces else {
        let pass_through = Sampler::ParentBased(Box::new(Sampler::AlwaysOff));
        return Ok(builder.with_sampler(pass_through).build());
    };
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic();
    let exporter =
        exporter_to(exporter, endpoint, otlp)?.build().map_err(bad_endpoint(endpoint))?;
    let batch = BatchConfigBuilder::default()
        .with_max_queue_size(QUEUED_SPANS_MAX)
        .with_max_export_batch_size(512)
        .with_scheduled_delay(EXPORT_INTERVAL)
        .build();
    let exporter = WatchedExporter { exporter, queue: queue.clone() };
    let batches = BatchSpanProcessor::builder(exporter).with_batch_config(batch).build();
    let processor = BoundedProcessor { batches, queue };
    // The sampler is that of OTEL_TRACES_SAMPLER, by default parentbased_always_on.
    Ok(builder.with_span_processor(processor).build())
}

/// Creates the layer that turns spans into traces. `exports`: whether a collector receives the
/// traces.
pub(crate) fn layer<S>(provider: &SdkTracerProvider, exports: bool) -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    // Stages of a request are spans at `info`; libraries use `debug` and `trace`. Without a
    // collector no span keeps the log lines within the span, so the layer does not read their
    // fields.
    let filter = FilterFn::new(move |metadata| {
        *metadata.level() <= Level::INFO && (exports || metadata.is_span())
    });
    tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("baton"))
        .with_location(false)
        .with_threads(false)
        .with_tracked_inactivity(false)
        .with_context_activation(false)
        .with_filter(filter.with_max_level_hint(LevelFilter::INFO))
}

/// Flushes on a thread of its own, because flushing blocks for seconds when the collector is
/// unreachable. A thread that misses the deadline runs until the process exits.
pub(crate) async fn shutdown(
    tracer: SdkTracerProvider,
    meters: Meters,
    queue: SpanQueue,
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
                Ok(Ok(())) if queue.0.is_failing.load(Ordering::Relaxed) => {
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

/// Statistics of the queue of spans. The processor, the exporter, the metrics and the shutdown
/// share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpanQueue(Arc<SpanQueueStats>);

#[derive(Debug, Default)]
struct SpanQueueStats {
    /// Spans that were neither exported nor dropped yet.
    queued: AtomicUsize,
    dropped: AtomicU64,
    /// Whether the last export failed.
    is_failing: AtomicBool,
}

impl SpanQueue {
    pub(crate) fn dropped(&self) -> u64 {
        self.0.dropped.load(Ordering::Relaxed)
    }

    /// Counts a span as queued, or as dropped if the queue is full.
    fn push(&self) -> bool {
        let next = |queued| (queued < QUEUED_SPANS_MAX).then_some(queued + 1);
        let pushed = self.0.queued.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok();
        self.0.dropped.fetch_add(u64::from(!pushed), Ordering::Relaxed);
        pushed
    }

    /// Takes an exported batch off the queue. Returns whether the export before failed.
    fn exported(&self, spans: usize, failed: bool) -> bool {
        self.0.queued.fetch_sub(spans, Ordering::Relaxed);
        if failed {
            self.0.dropped.fetch_add(spans as u64, Ordering::Relaxed);
        }
        self.0.is_failing.swap(failed, Ordering::Relaxed)
    }
}

/// Processor that drops and counts the spans for which the queue has no space: the library counts
/// them for its log only.
#[derive(Debug)]
struct BoundedProcessor {
    batches: BatchSpanProcessor,
    queue: SpanQueue,
}

impl SpanProcessor for BoundedProcessor {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.batches.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if self.queue.push() {
            self.batches.on_end(span);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.batches.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.batches.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &opentelemetry_sdk::Resource) {
        self.batches.set_resource(resource);
    }
}

/// Exporter that logs once when the collector stops accepting spans, and once when it accepts them
/// again.
#[derive(Debug)]
struct WatchedExporter<E> {
    exporter: E,
    queue: SpanQueue,
}

impl<E: SpanExporter> SpanExporter for WatchedExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let outcome = self.exporter.export(batch).await;
        let was_failing = self.queue.exported(spans, outcome.is_err());
        match &outcome {
            Err(error) if !was_failing => {
                tracing::warn!(%error, "cannot send traces to the OTLP endpoint; spans are dropped");
            }
            Ok(()) if was_failing => tracing::info!("the OTLP endpoint accepts traces again"),
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use opentelemetry_sdk::error::OTelSdkError;
    use tracing::dispatcher::with_default;

    use super::*;
    use crate::{LogFormat, LogSink, Telemetry, TelemetryConfig};

    /// Exporter whose collector is unreachable while the flag is set.
    #[derive(Debug)]
    struct Unreachable(AtomicBool);

    impl SpanExporter for Unreachable {
        async fn export(&self, _: Vec<SpanData>) -> OTelSdkResult {
            match self.0.load(Ordering::Relaxed) {
                true => Err(OTelSdkError::InternalFailure("unreachable".into())),
                false => Ok(()),
            }
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn collector_lost_after_the_start_is_logged_once_and_its_return_too() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let config = TelemetryConfig {
            log: "info".into(),
            log_format: LogFormat::Json,
            log_sink: LogSink::Memory(lines.clone()),
            ..TelemetryConfig::default()
        };
        let resource = Resource { service: "node".into(), instance: "0".into() };
        let telemetry = Telemetry::start(&config, resource).unwrap();
        let exporter = Unreachable(AtomicBool::new(false));
        let watched = WatchedExporter { exporter, queue: SpanQueue::default() };
        for is_unreachable in [false, true, true, false, false] {
            watched.exporter.0.store(is_unreachable, Ordering::Relaxed);
            let export = || tokio::runtime::Handle::current().block_on(watched.export(Vec::new()));
            let outcome =
                tokio::task::block_in_place(|| with_default(&telemetry.dispatch(), export));
            assert_eq!(outcome.is_err(), is_unreachable);
        }
        telemetry.shutdown(Duration::from_secs(20)).await.unwrap();
        let text = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let [lost, back] = lines[..] else { panic!("{text}") };
        assert!(lost.contains(r#""level":"WARN""#) && lost.contains("unreachable"), "{lost}");
        assert!(back.contains("accepts traces again"), "{back}");
    }
}
