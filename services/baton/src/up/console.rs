//! The terminal output: log lines of the children and of baton, and one streamed response.
//!
//! A thread writes the lines, so a paused terminal or a full pipe does not block the supervisor.
//! When the bounded queue is full, lines are dropped and counted; the count is written when the
//! queue has space again.

use std::{
    io::Write,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

/// Maximum number of held lines; more lines end the hold.
const HELD_LINES_MAX: usize = 4096;
/// Maximum number of queued lines; a start writes a few hundred.
const QUEUED_LINES_MAX: usize = 4096;
/// Time-out for writing all queued lines before an answer or the exit.
const WRITTEN_WITHIN: Duration = Duration::from_millis(500);

/// Queue of lines for standard error, which can be held while an answer streams.
#[derive(Clone)]
pub(super) struct Console(Arc<Mutex<ConsoleState>>);

struct ConsoleState {
    /// Lines that are held while an answer streams.
    held: Option<Vec<String>>,
    queue: SyncSender<ConsoleItem>,
    /// Number of dropped lines that are not reported yet.
    lost: u64,
}

enum ConsoleItem {
    Line(String),
    /// Answered when all earlier items are written.
    Mark(SyncSender<()>),
}

/// Handle that waits for the end of the writer thread.
pub(super) struct LastLines(Receiver<()>);

impl Console {
    /// Starts the writer thread. The thread ends when the last clone is dropped.
    pub(super) fn start() -> std::io::Result<(Self, LastLines)> {
        let (queue, lines) = sync_channel(QUEUED_LINES_MAX);
        let (ended, end) = sync_channel(0);
        thread::Builder::new().name("console".to_owned()).spawn(move || {
            write_all(&lines);
            drop::<SyncSender<()>>(ended);
        })?;
        let state = ConsoleState { held: None, queue, lost: 0 };
        Ok((Self(Arc::new(Mutex::new(state))), LastLines(end)))
    }

    /// Queues a line without blocking.
    pub(super) fn say(&self, line: &str) {
        let mut state = self.lock();
        match &mut state.held {
            Some(lines) if lines.len() < HELD_LINES_MAX => lines.push(line.to_owned()),
            _ => {
                state.release();
                state.write(line.to_owned());
            }
        }
    }

    /// Holds lines until the guard is dropped, so that no line interrupts an answer. Waits up to
    /// [`WRITTEN_WITHIN`] for earlier lines.
    pub(super) fn hold(&self) -> HeldLines<'_> {
        let mut state = self.lock();
        state.held = Some(Vec::new());
        let (written, seen) = sync_channel(1);
        if state.queue.try_send(ConsoleItem::Mark(written)).is_ok() {
            wait(&seen);
        }
        HeldLines(self)
    }

    fn lock(&self) -> MutexGuard<'_, ConsoleState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConsoleState {
    fn release(&mut self) {
        for line in self.held.take().unwrap_or_default() {
            self.write(line);
        }
    }

    fn write(&mut self, line: String) {
        if self.lost > 0 {
            let count = format!("baton: {} lines were dropped: the reader was too slow", self.lost);
            match self.queue.try_send(ConsoleItem::Line(count)) {
                Ok(()) => self.lost = 0,
                Err(_) => return self.lost += 1,
            }
        }
        if let Err(TrySendError::Full(_)) = self.queue.try_send(ConsoleItem::Line(line)) {
            self.lost += 1;
        }
    }
}

impl LastLines {
    /// Waits until all lines are written, at most [`WRITTEN_WITHIN`]. Call it after the last
    /// [`Console`] is dropped.
    pub(super) fn wait(self) {
        wait(&self.0);
    }
}

fn wait(written: &Receiver<()>) {
    // Continue in any case: written, time-out, or the thread has ended.
    let (Ok(()) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected)) =
        written.recv_timeout(WRITTEN_WITHIN);
}

/// Guard that queues the held lines when dropped.
pub(super) struct HeldLines<'a>(&'a Console);

impl Drop for HeldLines<'_> {
    fn drop(&mut self) {
        self.0.lock().release();
    }
}

/// Writes all items. Ignores errors, because serving continues without a terminal.
fn write_all(items: &Receiver<ConsoleItem>) {
    for item in items {
        match item {
            ConsoleItem::Line(line) => drop(writeln!(std::io::stderr().lock(), "{line}")),
            ConsoleItem::Mark(written) => drop(written.try_send(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a console without a writer thread, and its queue.
    fn unread(room: usize) -> (Console, Receiver<ConsoleItem>) {
        let (queue, lines) = sync_channel(room);
        let state = ConsoleState { held: None, queue, lost: 0 };
        (Console(Arc::new(Mutex::new(state))), lines)
    }

    fn lines(items: &Receiver<ConsoleItem>) -> Vec<String> {
        let line = |item| match item {
            ConsoleItem::Line(line) => Some(line),
            ConsoleItem::Mark(_) => None,
        };
        items.try_iter().filter_map(line).collect()
    }

    #[test]
    fn held_lines_keep_their_order() {
        let (console, queue) = unread(8);
        console.say("a");
        let held = console.hold();
        console.say("b");
        console.say("c");
        assert_eq!(lines(&queue), ["a"]);
        drop(held);
        console.say("d");
        assert_eq!(lines(&queue), ["b", "c", "d"]);
    }

    #[test]
    fn dropped_lines_are_counted_and_reported() {
        let (console, queue) = unread(2);
        for line in ["a", "b", "c", "d"] {
            console.say(line);
        }
        assert_eq!(lines(&queue), ["a", "b"]);
        console.say("e");
        let told = "baton: 2 lines were dropped: the reader was too slow";
        assert_eq!(lines(&queue), [told, "e"]);
    }
}
