//! Writes log lines on a thread of its own, so that a reader that stopped (a full pipe, a paused
//! terminal) never stops a request. The queue is bounded; lines that do not fit are counted, and the
//! count is written once there is room.

use std::{
    io::{self, Write},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tokio::sync::oneshot;
use tracing_subscriber::fmt::MakeWriter;

use crate::TelemetryError;

/// A burst of a few thousand lines passes; at about 200 bytes each this is below 1 MiB.
const QUEUED_LINES_MAX: usize = 4096;
/// How often a full queue is tried again for the request to stop.
const STOP_RETRY: Duration = Duration::from_millis(2);
/// How long a process that ends early waits for its last lines.
const DROP_PATIENCE: Duration = Duration::from_millis(500);

/// Where log lines go.
#[derive(Clone, Debug, Default)]
pub enum LogSink {
    #[default]
    Stderr,
    /// Into memory, for tests.
    Memory(Arc<Mutex<Vec<u8>>>),
}

impl LogSink {
    fn write(&self, line: &[u8]) {
        // A log that cannot be written has nobody left to complain to.
        match self {
            Self::Stderr => drop(io::stderr().lock().write_all(line)),
            Self::Memory(buffer) => {
                buffer.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).extend(line)
            }
        }
    }
}

enum Item {
    Line(Vec<u8>),
    Stop,
}

/// Owns the thread.
pub(crate) struct LogWriter {
    handle: LogHandle,
    thread: Option<JoinHandle<()>>,
    finished: oneshot::Receiver<()>,
}

/// What the subscriber holds: accepts lines and never waits.
#[derive(Clone)]
pub(crate) struct LogHandle {
    lines: SyncSender<Item>,
    lost: Arc<AtomicU64>,
}

impl LogWriter {
    pub(crate) fn start(sink: LogSink) -> Result<Self, TelemetryError> {
        let (lines, queued) = sync_channel(QUEUED_LINES_MAX);
        let lost = Arc::new(AtomicU64::new(0));
        let handle = LogHandle { lines, lost: lost.clone() };
        let (finish, finished) = oneshot::channel();
        let run = move || {
            // Dropped with the thread, which closes the channel.
            let _finish: oneshot::Sender<()> = finish;
            write_lines(&queued, &lost, &sink);
        };
        let thread = thread::Builder::new()
            .name("log".into())
            .spawn(run)
            .map_err(|reason| TelemetryError::LogThread { reason })?;
        Ok(Self { handle, thread: Some(thread), finished })
    }

    pub(crate) fn handle(&self) -> LogHandle {
        self.handle.clone()
    }

    /// Writes what is queued and stops, within `deadline`. Past it the thread, stuck in a write that
    /// nobody reads, is left to the end of the process.
    pub(crate) async fn shutdown(mut self, deadline: Duration) -> Result<(), TelemetryError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let stopped = async {
            while !self.handle.stop() {
                tokio::time::sleep(STOP_RETRY).await;
            }
            // Resolves when the thread ends, by return or by panic.
            let _ = (&mut self.finished).await;
        };
        match tokio::time::timeout(deadline, stopped).await {
            Err(_) => Err(TelemetryError::ShutdownDeadline { what: "writing the log", deadline }),
            Ok(()) => thread
                .join()
                .map_err(|_| TelemetryError::Shutdown { reason: "the log thread panicked".into() }),
        }
    }
}

/// Without `shutdown`, as when `main` returns early with an error: what is queued is still written,
/// unless nobody reads it.
impl Drop for LogWriter {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let patience = Instant::now() + DROP_PATIENCE;
        let mut told = self.handle.stop();
        while !thread.is_finished() && Instant::now() < patience {
            thread::sleep(STOP_RETRY);
            told = told || self.handle.stop();
        }
        if thread.is_finished() {
            // A panic in there has been printed; there is nobody to hand it to.
            let _ = thread.join();
        }
    }
}

impl LogHandle {
    /// Asks the thread to end; false when the queue has no room for that.
    fn stop(&self) -> bool {
        !matches!(self.lines.try_send(Item::Stop), Err(TrySendError::Full(_)))
    }
}

fn write_lines(queued: &Receiver<Item>, lost: &AtomicU64, sink: &LogSink) {
    while let Ok(Item::Line(line)) = queued.recv() {
        let count = lost.swap(0, Ordering::Relaxed);
        if count > 0 {
            sink.write(
                format!("{count} log lines were lost: nobody read them in time\n").as_bytes(),
            );
        }
        sink.write(&line);
    }
}

impl<'a> MakeWriter<'a> for LogHandle {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { handle: self, bytes: Vec::with_capacity(256) }
    }
}

/// One line under construction; handed over when dropped.
pub(crate) struct Line<'a> {
    handle: &'a LogHandle,
    bytes: Vec<u8>,
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        if self.bytes.is_empty() {
            return;
        }
        let line = Item::Line(std::mem::take(&mut self.bytes));
        if let Err(TrySendError::Full(_)) = self.handle.lines.try_send(line) {
            self.handle.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}
