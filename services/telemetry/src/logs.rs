//! Formats and filters log lines. A separate thread writes them, so that a log whose reader stopped
//! (a full pipe, a paused terminal) never blocks a request. The queue is bounded. Lines beyond the
//! bound are dropped and counted, and the thread writes the count once the queue is empty.

use std::{
    io::{self, IsTerminal, Write},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

use opentelemetry::trace::{SpanId, TraceContextExt, TraceId};
use tokio::sync::oneshot::{self, error::TryRecvError};
use tracing::{Dispatch, Event, Subscriber, dispatcher::WeakDispatch};
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::{
    Layer,
    filter::{FilterExt, FilterFn, LevelFilter, ParseError, Targets},
    fmt::{
        self, FmtContext, FormatEvent, FormatFields,
        format::{Format, Json, Writer},
    },
    layer::Context,
    registry::LookupSpan,
};

use crate::{LogFormat, TelemetryConfig, TelemetryError};

/// Maximum number of queued lines; at about 200 bytes a line this is below 1 MiB.
const QUEUED_LINES_MAX: usize = 4096;
/// Time that a process which exits without [`LogWriter::shutdown`] waits for its last lines.
const DROP_TIMEOUT: Duration = Duration::from_millis(500);

/// The destination of log lines.
#[derive(Clone, Debug, Default)]
pub enum LogSink {
    #[default]
    Stderr,
    /// A buffer in memory, for tests.
    Memory(Arc<Mutex<Vec<u8>>>),
}

/// Writer that the log thread runs.
struct SinkWriter {
    sink: LogSink,
    /// Lines dropped since the start; set as soon as the log thread exists.
    dropped: Arc<OnceLock<ErrorCounter>>,
    /// Dropped lines that the log already reports.
    reported: usize,
    /// Dropped with the log thread, which closes [`LogWriter::ended`].
    _end: oneshot::Sender<()>,
}

impl Write for SinkWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match &self.sink {
            LogSink::Stderr => io::stderr().lock().write(line),
            LogSink::Memory(buffer) => {
                buffer.lock().unwrap_or_else(PoisonError::into_inner).extend(line);
                Ok(line.len())
            }
        }
    }

    /// Writes how many log lines were dropped since the previous call. The log thread calls this
    /// whenever the queue is empty and before the thread ends.
    fn flush(&mut self) -> io::Result<()> {
        let dropped = self.dropped.get().map_or(0, ErrorCounter::dropped_lines);
        let new = dropped - std::mem::replace(&mut self.reported, dropped);
        if new > 0 {
            writeln!(self, "{new} log lines were dropped: the log was not read in time")?;
        }
        Ok(())
    }
}

/// Owner of the log thread.
pub(crate) struct LogWriter {
    guard: Option<WorkerGuard>,
    /// Closed when the log thread ends.
    ended: oneshot::Receiver<()>,
}

impl LogWriter {
    /// Starts the log thread. The subscriber writes to the returned queue and never waits.
    pub(crate) fn start(sink: LogSink) -> (Self, NonBlocking) {
        let dropped = Arc::new(OnceLock::new());
        let (end, ended) = oneshot::channel();
        let writer = SinkWriter { sink, dropped: dropped.clone(), reported: 0, _end: end };
        let queue = NonBlockingBuilder::default()
            .buffered_lines_limit(QUEUED_LINES_MAX)
            .lossy(true)
            .thread_name("log");
        let (queue, guard) = queue.finish(writer);
        dropped.get_or_init(|| queue.error_counter());
        (Self { guard: Some(guard), ended }, queue)
    }

    /// Writes the queued lines and stops, within `deadline`. A thread that is stuck in a write
    /// stays until the process exits.
    pub(crate) async fn shutdown(mut self, deadline: Duration) -> Result<(), TelemetryError> {
        self.stop();
        let late = TelemetryError::ShutdownDeadline { what: "writing the log", deadline };
        tokio::time::timeout(deadline, &mut self.ended).await.map(drop).map_err(|_| late)
    }

    /// Stops the log thread once the queue is written. Dropping the guard waits for a full queue,
    /// so a thread of its own does it.
    fn stop(&mut self) {
        let guard = self.guard.take();
        thread::spawn(move || drop(guard));
    }
}

/// Without `shutdown`, as when `main` returns early with an error, the queued lines are still
/// written.
impl Drop for LogWriter {
    fn drop(&mut self) {
        if self.guard.is_none() {
            return;
        }
        self.stop();
        let deadline = Instant::now() + DROP_TIMEOUT;
        while self.ended.try_recv() == Err(TryRecvError::Empty) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Trace and span id of a span, stored in the span with its first log line.
#[derive(Clone, Copy)]
struct TraceIds(TraceId, SpanId);

/// Layer that stores the [`TraceIds`] of an event's span before the event is formatted.
#[derive(Default)]
struct TraceIdLayer {
    /// Set when the subscriber is complete.
    dispatch: OnceLock<WeakDispatch>,
}

impl<S> Layer<S> for TraceIdLayer
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_register_dispatch(&self, dispatch: &Dispatch) {
        let _ = self.dispatch.set(dispatch.downgrade());
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let Some(span) = context.event_span(event) else { return };
        if span.extensions().get::<TraceIds>().is_some() {
            return;
        }
        let dispatch = self.dispatch.get().and_then(WeakDispatch::upgrade);
        let found = dispatch
            .and_then(|dispatch| tracing_opentelemetry::get_otel_context(&span.id(), &dispatch));
        if let Some(found) = found {
            let found = found.span().span_context().clone();
            if found.is_valid() {
                span.extensions_mut().replace(TraceIds(found.trace_id(), found.span_id()));
            }
        }
    }
}

/// Formatter of JSON lines that begins each line within a span with the span's `trace_id` and
/// `span_id`.
struct TracedJson(Format<Json>);

impl<S, N> FormatEvent<S, N> for TracedJson
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let ids = context.parent_span().and_then(|span| span.extensions().get().copied());
        let Some(TraceIds(trace_id, span_id)) = ids else {
            return self.0.format_event(context, writer, event);
        };
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        let fields = line.strip_prefix('{').unwrap_or(&line);
        write!(writer, r#"{{"trace_id":"{trace_id}","span_id":"{span_id}",{fields}"#)
    }
}

/// Creates the layer that formats log lines. Its filter `telemetry.log` does not apply to traces,
/// nor to the spans that lines show.
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
    let spans =
        FilterFn::new(|metadata| metadata.is_span() && *metadata.level() <= tracing::Level::INFO);
    let filter = filter.or(spans.with_max_level_hint(LevelFilter::INFO));
    let terminal = matches!(config.log_sink, LogSink::Stderr) && io::stderr().is_terminal();
    let pretty = match config.log_format {
        LogFormat::Auto => terminal,
        LogFormat::Pretty => true,
        LogFormat::Json => false,
    };
    Ok(if pretty {
        fmt::layer().compact().with_ansi(terminal).with_writer(writer).with_filter(filter).boxed()
    } else {
        let format = fmt::format().json().flatten_event(true).with_span_list(false);
        let lines = fmt::layer().json().event_format(TracedJson(format)).with_writer(writer);
        TraceIdLayer::default().and_then(lines).with_filter(filter).boxed()
    })
}
