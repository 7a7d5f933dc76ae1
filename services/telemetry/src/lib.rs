//! Logs, traces and metrics of a Baton service.
//!
//! * [`Telemetry`] is what a process holds: it is started first and shut down last.
//! * [`propagation`] carries the W3C trace context over HTTP, gRPC and plain strings.
//! * [`metrics`] has the typed instruments of router and node, and [`metrics::Metrics`], which renders
//!   them as Prometheus text: OpenTelemetry's GenAI names, with vLLM's names as aliases.
//! * [`MetricsServer`] serves that text where a service has no HTTP server of its own.
//!
//! Nothing here is global except what `tracing` requires: `main` calls [`Telemetry::install`]; tests
//! use [`Telemetry::dispatch`] for a scope instead. OTLP export is off unless an endpoint is given.
//!
//! Left out: what is worth a span or a number; that is decided where it happens.

#![forbid(unsafe_code)]

mod export_health;
mod log_writer;
mod logs;
pub mod metrics;
pub mod propagation;
mod server;
mod traces;

use std::time::Duration;

use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Dispatch;
use tracing_subscriber::{Layer, Registry, layer::SubscriberExt};

pub use config::LogFormat;
pub use log_writer::LogSink;
pub use metrics::{Metrics, NodeMetrics, RouterMetrics};
pub use server::MetricsServer;

use crate::{export_health::ExportHealth, log_writer::LogWriter, metrics::Meters};

/// What is told, and to whom.
#[derive(Clone, Debug)]
pub struct TelemetryConfig {
    /// A level, or levels by module: `info,router=debug`.
    pub log: String,
    pub log_format: LogFormat,
    /// `http://host:port` of an OTLP collector (gRPC); `None`: nothing is exported.
    pub otlp: Option<String>,
    /// Where log lines go; standard error outside of tests.
    pub log_sink: LogSink,
}

impl From<&config::Telemetry> for TelemetryConfig {
    fn from(settings: &config::Telemetry) -> Self {
        Self {
            log: settings.log.clone(),
            log_format: settings.log_format,
            otlp: settings.otlp.as_ref().map(|url| url.as_str().to_owned()),
            log_sink: LogSink::Stderr,
        }
    }
}

/// Who is telling: `baton-router`, `baton-prefill-node`, ...; and which of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    pub service: String,
    pub instance: String,
}

/// Why telemetry could not start or stop as asked.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error(
        "telemetry.log = {filter:?} is not a log filter: {reason}; allowed: error, warn, info, debug, trace, or pairs such as info,router=debug"
    )]
    BadFilter { filter: String, reason: String },
    #[error("telemetry.otlp = {endpoint} cannot be used: {reason}")]
    BadEndpoint { endpoint: String, reason: String },
    #[error("telemetry.otlp is set, but there is no tokio runtime to export from")]
    NoRuntime,
    #[error("a log subscriber is already installed in this process")]
    AlreadyInstalled,
    #[error("metrics cannot be set up: {reason}")]
    Metrics { reason: String },
    #[error("cannot serve metrics on {address}: {reason}")]
    Listen { address: std::net::SocketAddr, reason: std::io::Error },
    /// Something was not delivered in time; nothing else is affected.
    #[error("{what} did not finish within {deadline:?}")]
    ShutdownDeadline { what: &'static str, deadline: Duration },
    #[error("telemetry did not leave cleanly: {reason}")]
    Shutdown { reason: String },
}

/// The telemetry of one process. Started before anything else, shut down after everything else.
pub struct Telemetry {
    dispatch: Dispatch,
    tracer: SdkTracerProvider,
    export_health: ExportHealth,
    meters: Meters,
    log_writer: LogWriter,
}

impl Telemetry {
    /// Sets everything up; nothing is global yet. With OTLP on it must run inside a tokio runtime.
    pub fn start(config: &TelemetryConfig, resource: Resource) -> Result<Self, TelemetryError> {
        let channel = config.otlp.as_deref().map(traces::channel).transpose()?;
        let export_health = ExportHealth::default();
        let tracer = traces::provider(channel.clone(), &resource, export_health.clone())?;
        let meters = Meters::new(channel, &resource)?;
        let (log_writer, log_queue) = LogWriter::start(config.log_sink.clone());
        let logs = logs::layer(config, log_queue)?;
        let subscriber = Registry::default()
            .with(logs)
            .with(traces::layer(&tracer).with_filter(traces::filter()));
        Ok(Self { dispatch: Dispatch::new(subscriber), tracer, export_health, meters, log_writer })
    }

    /// Makes this the subscriber of the whole process. For `main` alone.
    pub fn install(&self) -> Result<(), TelemetryError> {
        tracing::dispatcher::set_global_default(self.dispatch.clone())
            .map_err(|_| TelemetryError::AlreadyInstalled)
    }

    /// For a scope: `tracing::dispatcher::with_default(&telemetry.dispatch(), || ...)`, or
    /// `future.with_subscriber(telemetry.dispatch())`.
    pub fn dispatch(&self) -> Dispatch {
        self.dispatch.clone()
    }

    /// The instruments' home; cheap to clone.
    pub fn metrics(&self) -> Metrics {
        self.meters.metrics()
    }

    /// Sends what is still held and stops, within `deadline`. Call it after draining: an unreachable
    /// collector takes the whole deadline. A missed deadline is an error to log, not to act upon.
    pub async fn shutdown(self, deadline: Duration) -> Result<(), TelemetryError> {
        let Self { dispatch, tracer, export_health, meters, log_writer } = self;
        let exported = traces::shutdown(tracer, meters, export_health, deadline).await;
        // Last, so that it carries whatever the exporters had to say.
        drop(dispatch);
        log_writer.shutdown(deadline).await.and(exported)
    }
}
