//! Logs, traces and metrics of a Baton service.
//!
//! * [`Telemetry`] belongs to the process: `main` starts it first and shuts it down last.
//! * [`propagation`] transfers the W3C trace context over HTTP, gRPC and plain strings.
//! * [`spans`] sets the attributes and the status of spans.
//! * [`metrics`] has the typed instruments of router and node, and [`metrics::Metrics`], which
//!   renders them as Prometheus text under OpenTelemetry's GenAI names and vLLM's names.
//! * [`MetricsPage`] renders this text outside the async threads, and [`MetricsServer`] serves it,
//!   and the probes of a service, on a port of its own.
//!
//! The only global state is the subscriber of `tracing`: `main` calls [`Telemetry::install`]; tests
//! use [`Telemetry::dispatch`] for a scope instead. OTLP export is off unless an endpoint is given.

#![forbid(unsafe_code)]

mod environment;
mod logs;
pub mod metrics;
pub mod propagation;
mod server;
pub mod spans;
mod traces;

use std::time::Duration;

use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Dispatch;
use tracing_subscriber::{Registry, layer::SubscriberExt};

pub use config::LogFormat;
pub use environment::Otlp;
pub use logs::LogSink;
pub use metrics::{Metrics, NodeMetrics, RouterMetrics};
pub use server::{MetricsPage, MetricsServer};

use crate::{logs::LogWriter, metrics::Meters, traces::SpanQueue};

/// Settings of logs, traces and metrics.
#[derive(Clone, Debug)]
pub struct TelemetryConfig {
    /// Log level, or levels by module: `info,router=debug`.
    pub log: String,
    pub log_format: LogFormat,
    pub otlp: Otlp,
    /// Name of the instance; `None`: that of `OTEL_RESOURCE_ATTRIBUTES`, else
    /// [`Resource::instance`].
    pub instance: Option<String>,
    /// Destination of log lines; standard error outside of tests.
    pub log_sink: LogSink,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        let settings = config::Telemetry::default();
        Self {
            log: settings.log,
            log_format: settings.log_format,
            otlp: Otlp::default(),
            instance: None,
            log_sink: LogSink::Stderr,
        }
    }
}

impl TelemetryConfig {
    /// Reads the settings and the `OTEL_*` variables of the process.
    pub fn read(settings: &config::Telemetry) -> Result<Self, TelemetryError> {
        let otlp = settings.otlp.as_ref().map(|url| url.as_str());
        Ok(Self {
            log: settings.log.clone(),
            log_format: settings.log_format,
            otlp: Otlp::read(otlp, |name| std::env::var(name).ok())?,
            instance: settings.instance.clone(),
            log_sink: LogSink::Stderr,
        })
    }
}

/// Default names of the service (`baton-router`, `baton-prefill-node`, ...) and of its instance.
/// The `OTEL_*` variables of the process come before them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    pub service: String,
    pub instance: String,
}

/// Errors of the start and of the shutdown.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error(
        "invalid telemetry.log: {filter:?}: {reason}; expected error, warn, info, debug, trace, or pairs such as info,router=debug"
    )]
    BadFilter { filter: String, reason: String },
    #[error("invalid {name}: {value:?}; expected {allowed}")]
    BadVariable { name: &'static str, value: String, allowed: &'static str },
    #[error("cannot export to the OTLP endpoint {endpoint}: {reason}")]
    BadEndpoint { endpoint: String, reason: String },
    #[error("cannot read OTEL_EXPORTER_OTLP_CERTIFICATE {}: {reason}", .path.display())]
    Certificate { path: std::path::PathBuf, reason: std::io::Error },
    #[error("cannot export traces and metrics: there is no tokio runtime")]
    NoRuntime,
    #[error("a log subscriber is already installed in this process")]
    AlreadyInstalled,
    #[error("cannot set up metrics: {reason}")]
    Metrics { reason: String },
    #[error("cannot serve metrics on {address}: {reason}")]
    Listen { address: std::net::SocketAddr, reason: std::io::Error },
    /// Part of the telemetry is lost; nothing else is affected.
    #[error("{what} did not finish within {deadline:?}")]
    ShutdownDeadline { what: &'static str, deadline: Duration },
    #[error("cannot shut down telemetry cleanly: {reason}")]
    Shutdown { reason: String },
}

/// The telemetry of one process. `main` starts it before and shuts it down after everything else.
pub struct Telemetry {
    dispatch: Dispatch,
    tracer: SdkTracerProvider,
    spans: SpanQueue,
    meters: Meters,
    log_writer: LogWriter,
}

impl Telemetry {
    /// Sets up logs, traces and metrics without touching global state. OTLP needs a tokio runtime.
    pub fn start(config: &TelemetryConfig, resource: Resource) -> Result<Self, TelemetryError> {
        if config.otlp.exports() && tokio::runtime::Handle::try_current().is_err() {
            return Err(TelemetryError::NoRuntime);
        }
        let resource = traces::otel_resource(&resource, config.instance.as_deref());
        let spans = SpanQueue::default();
        let tracer = traces::provider(&config.otlp, resource.clone(), spans.clone())?;
        let meters = Meters::new(&config.otlp, resource)?;
        let (log_writer, log_queue) = LogWriter::start(config.log_sink.clone());
        meters.observe_dropped(spans.clone(), log_queue.error_counter());
        let logs = logs::layer(config, log_queue)?;
        let subscriber = Registry::default()
            .with(logs)
            .with(traces::layer(&tracer, config.otlp.traces.is_some()));
        Ok(Self { dispatch: Dispatch::new(subscriber), tracer, spans, meters, log_writer })
    }

    /// Installs the subscriber of the whole process. Only `main` calls this.
    pub fn install(&self) -> Result<(), TelemetryError> {
        tracing::dispatcher::set_global_default(self.dispatch.clone())
            .map_err(|_| TelemetryError::AlreadyInstalled)
    }

    /// Returns the dispatcher for a scope:
    /// `tracing::dispatcher::with_default(&telemetry.dispatch(), || ...)`, or
    /// `future.with_subscriber(telemetry.dispatch())`.
    pub fn dispatch(&self) -> Dispatch {
        self.dispatch.clone()
    }

    /// Returns the factory of instruments; cheap to clone.
    pub fn metrics(&self) -> Metrics {
        self.meters.metrics()
    }

    /// Flushes traces, metrics and logs and stops, within `deadline`. An unreachable collector
    /// takes the whole deadline, so call this after draining. A missed deadline is only worth a log
    /// line.
    pub async fn shutdown(self, deadline: Duration) -> Result<(), TelemetryError> {
        let Self { dispatch, tracer, spans, meters, log_writer } = self;
        let exported = traces::shutdown(tracer, meters, spans, deadline).await;
        // Last, so that messages of the exporters are written.
        drop(dispatch);
        log_writer.shutdown(deadline).await.and(exported)
    }
}
