//! Threads that someone owns and joins.

use std::{
    io,
    sync::{Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How often a thread that should end is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// The threads of one owner, which has told them to end before it joins them.
#[derive(Default)]
pub struct Threads {
    running: Mutex<Vec<JoinHandle<()>>>,
}

impl Threads {
    /// `name` is cut to what the system shows of it.
    pub fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let handle = thread::Builder::new().name(name.to_owned()).spawn(run)?;
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that have ended are joined here, so that the list stays as short as what runs.
        let (ended, going): (Vec<_>, Vec<_>) =
            running.drain(..).partition(|handle| handle.is_finished());
        *running = going;
        running.push(handle);
        drop(running);
        ended.into_iter().for_each(join);
        Ok(())
    }

    /// Waits for all, and names those that had not ended at `deadline`.
    pub fn join_all(&self, deadline: Instant) -> Vec<String> {
        let handles =
            std::mem::take(&mut *self.running.lock().unwrap_or_else(PoisonError::into_inner));
        let mut unfinished = Vec::new();
        for handle in handles {
            while !handle.is_finished() && Instant::now() < deadline {
                thread::sleep(LOOK);
            }
            if handle.is_finished() {
                join(handle);
            } else {
                unfinished.push(handle.thread().name().unwrap_or("unnamed").to_owned());
            }
        }
        unfinished
    }
}

fn join(handle: JoinHandle<()>) {
    let name = handle.thread().name().unwrap_or("unnamed").to_owned();
    if handle.join().is_err() {
        tracing::error!(thread = name, "a thread ended by a panic");
    }
}
