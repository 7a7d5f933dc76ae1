//! Format and filter of log lines.

use std::io::{IsTerminal, stderr};

use tracing::Subscriber;
use tracing_appender::non_blocking::NonBlocking;
use tracing_subscriber::{
    Layer,
    filter::{ParseError, Targets},
    fmt,
    registry::LookupSpan,
};

use crate::{LogFormat, LogSink, TelemetryConfig, TelemetryError};

/// Creates the layer that formats log lines. Its filter `telemetry.log` does not apply to traces.
pub(crate) fn layer<S>(
    config: &TelemetryConfig,
    writer: NonBlocking,
) -> Result<Box<dyn Layer<S> + Send + Sync>, TelemetryError>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let filter: Targets = config.log.parse().map_err(|error: ParseError| {
        TelemetryError::BadFilter { filter: config.log.clone(), reason: error.to_string() }
    })?;
    let terminal = matches!(config.log_sink, LogSink::Stderr) && stderr().is_terminal();
    let pretty = match config.log_format {
        LogFormat::Auto => terminal,
        LogFormat::Pretty => true,
        LogFormat::Json => false,
    };
    Ok(if pretty {
        fmt::layer().compact().with_ansi(terminal).with_writer(writer).with_filter(filter).boxed()
    } else {
        fmt::layer()
            .json()
            .flatten_event(true)
            .with_current_span(true)
            .with_span_list(false)
            .with_writer(writer)
            .with_filter(filter)
            .boxed()
    })
}
