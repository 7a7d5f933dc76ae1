//! Threads with an owner that joins them, permits of a bounded number, and locks.

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Poll interval while a thread is joined with a deadline.
const JOIN_POLL: Duration = Duration::from_millis(2);

/// Threads of one owner. The owner tells them to stop before it joins them.
#[derive(Default)]
pub(crate) struct Threads {
    running: Mutex<Vec<JoinHandle<()>>>,
}

impl Threads {
    /// Linux shows the first 15 bytes of `name`.
    pub(crate) fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let handle = thread::Builder::new().name(name.to_owned()).spawn(run)?;
        let mut running = locked(&self.running);
        // Joins finished threads here, so the list does not grow.
        let (finished, live): (Vec<_>, Vec<_>) =
            running.drain(..).partition(|handle| handle.is_finished());
        *running = live;
        running.push(handle);
        drop(running);
        finished.into_iter().for_each(join);
        Ok(())
    }

    /// Joins all threads and returns the names of those still running at `deadline`.
    pub(crate) fn join_all(&self, deadline: Instant) -> Vec<String> {
        let handles = std::mem::take(&mut *locked(&self.running));
        let mut unfinished = Vec::new();
        for handle in handles {
            while !handle.is_finished() && Instant::now() < deadline {
                thread::sleep(JOIN_POLL);
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
        tracing::error!(thread = name, "thread panicked");
    }
}

/// Locks the mutex. A thread that panicked while it held the lock leaves the value usable.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One permit of a bounded number, returned on drop.
pub(crate) struct Permit(Arc<AtomicUsize>);

impl Permit {
    /// Returns `None` if `max` permits are taken.
    pub(crate) fn take(taken: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        let more = |count: usize| (count < max).then_some(count + 1);
        taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(Self(Arc::clone(taken)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
