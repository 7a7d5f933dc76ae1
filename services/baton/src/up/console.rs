//! The terminal output: log lines of the children and of baton, and one streamed response.
//!
//! A thread of its own writes them. A terminal that is paused, or a pipe that nobody reads, takes no
//! part in starting, stopping and supervising: lines that find no room are counted, and the count is
//! written once there is room again.

use std::{
    io::Write,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

/// With more than these held back, nothing is held any longer.
const HELD_LINES_MAX: usize = 4096;
/// Lines that wait to be written; a burst at the start is some hundred.
const QUEUED_LINES_MAX: usize = 4096;
/// How long is waited until all lines so far are written, where an answer or the end follows them.
const WRITTEN_WITHIN: Duration = Duration::from_millis(500);

/// Writes lines to standard error, except while they are held.
#[derive(Clone)]
pub struct Console(Arc<Mutex<State>>);

struct State {
    /// Lines that wait until an answer has streamed.
    held: Option<Vec<String>>,
    queue: SyncSender<Item>,
    lost: u64,
}

enum Item {
    Line(String),
    /// Answered when all before it is written.
    Mark(SyncSender<()>),
}

/// Hears when all is written.
pub struct LastLines(Receiver<()>);

impl Console {
    /// With the thread that writes; it ends with the last clone.
    pub fn start() -> std::io::Result<(Self, LastLines)> {
        let (queue, lines) = sync_channel(QUEUED_LINES_MAX);
        let (ended, end) = sync_channel(0);
        thread::Builder::new().name("console".to_owned()).spawn(move || {
            write_all(&lines);
            drop::<SyncSender<()>>(ended);
        })?;
        let state = State { held: None, queue, lost: 0 };
        Ok((Self(Arc::new(Mutex::new(state))), LastLines(end)))
    }

    /// Never waits.
    pub fn say(&self, line: &str) {
        let mut state = self.lock();
        match &mut state.held {
            Some(lines) if lines.len() < HELD_LINES_MAX => lines.push(line.to_owned()),
            _ => {
                state.let_go();
                state.write(line.to_owned());
            }
        }
    }

    /// From now until the guard goes away lines wait, so that none cuts into an answer. Waits a
    /// little for those before.
    pub fn hold(&self) -> Held<'_> {
        let mut state = self.lock();
        state.held = Some(Vec::new());
        let (written, seen) = sync_channel(1);
        if state.queue.try_send(Item::Mark(written)).is_ok() {
            wait(&seen);
        }
        Held(self)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn let_go(&mut self) {
        for line in self.held.take().unwrap_or_default() {
            self.write(line);
        }
    }

    fn write(&mut self, line: String) {
        if self.lost > 0 {
            let told = format!("baton: {} lines were not shown: nobody read them", self.lost);
            match self.queue.try_send(Item::Line(told)) {
                Ok(()) => self.lost = 0,
                Err(_) => return self.lost += 1,
            }
        }
        if let Err(TrySendError::Full(_)) = self.queue.try_send(Item::Line(line)) {
            self.lost += 1;
        }
    }
}

impl LastLines {
    /// After the last [`Console`] is gone: until all is written, unless nobody reads it.
    pub fn wait(self) {
        wait(&self.0);
    }
}

fn wait(written: &Receiver<()>) {
    // Whether it was seen, the thread is gone, or nobody reads: what follows cannot wait longer.
    let (Ok(()) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected)) =
        written.recv_timeout(WRITTEN_WITHIN);
}

/// Writes what waited when it goes away.
pub struct Held<'a>(&'a Console);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.lock().let_go();
    }
}

/// A closed terminal is no reason to stop serving.
fn write_all(items: &Receiver<Item>) {
    for item in items {
        match item {
            Item::Line(line) => drop(writeln!(std::io::stderr().lock(), "{line}")),
            Item::Mark(written) => drop(written.try_send(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A console whose lines nobody takes, and where they wait.
    fn unread(room: usize) -> (Console, Receiver<Item>) {
        let (queue, lines) = sync_channel(room);
        let state = State { held: None, queue, lost: 0 };
        (Console(Arc::new(Mutex::new(state))), lines)
    }

    fn lines(items: &Receiver<Item>) -> Vec<String> {
        let line = |item| match item {
            Item::Line(line) => Some(line),
            Item::Mark(_) => None,
        };
        items.try_iter().filter_map(line).collect()
    }

    #[test]
    fn lines_wait_while_they_are_held_and_keep_their_order() {
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
    fn what_nobody_reads_is_counted_and_told_later() {
        let (console, queue) = unread(2);
        for line in ["a", "b", "c", "d"] {
            console.say(line);
        }
        assert_eq!(lines(&queue), ["a", "b"]);
        console.say("e");
        let told = "baton: 2 lines were not shown: nobody read them";
        assert_eq!(lines(&queue), [told, "e"]);
    }
}
