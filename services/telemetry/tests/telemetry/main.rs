//! Tests of the telemetry crate through its public interface, with a collector in this process.

mod collector;
mod export;
mod logs;
mod metrics;
mod page;
mod propagation;
mod server;

use std::sync::{Arc, Mutex};

use telemetry::{LogFormat, LogSink, Otlp, Resource, Telemetry, TelemetryConfig};

/// Starts the telemetry of a service. Returns it with the buffer of its log lines.
fn start(service: &str, otlp: Option<String>) -> (Telemetry, Arc<Mutex<Vec<u8>>>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let config = TelemetryConfig {
        log: "info".into(),
        log_format: LogFormat::Json,
        otlp: otlp.map(Otlp::to).unwrap_or_default(),
        log_sink: LogSink::Memory(lines.clone()),
        ..TelemetryConfig::default()
    };
    let resource = Resource { service: service.into(), instance: format!("{service}-0") };
    (Telemetry::start(&config, resource).unwrap(), lines)
}
