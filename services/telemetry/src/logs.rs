//! Formats and filters log lines. A separate thread writes them, so that a log whose reader stopped (a full
//! pipe, a paused terminal) never blocks a request. The queue is bounded. Lines beyond the bound are dropped
//! and counted, and the thread writes the count once the queue is empty.

use std::{
    io::{self, IsTerminal, Write},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

use tokio::sync::oneshot::{self, error::TryRecvError};
use tracing::Subscriber;
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::{
    Layer,
    filter::{ParseError, Targets},
    fmt,
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

    /// Writes the queued lines and stops, within `deadline`. A thread that is stuck in a write stays
    /// until the process exits.
    pub(crate) async fn shutdown(mut self, deadline: Duration) -> Result<(), TelemetryError> {
        self.stop();
        let late = TelemetryError::ShutdownDeadline { what: "writing the log", deadline };
        tokio::time::timeout(deadline, &mut self.ended).await.map(drop).map_err(|_| late)
    }

    /// Stops the log thread once the queue is written. Dropping the guard waits for a full queue, so a
    /// thread of its own does it.
    fn stop(&mut self) {
        let guard = self.guard.take();
        thread::spawn(move || drop(guard));
    }
}

/// Without `shutdown`, as when `main` returns early with an error, the queued lines are still written.
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
    let terminal = matches!(config.log_sink, LogSink::Stderr) && io::stderr().is_terminal();
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
