//! What waits to be sent to one peer: filled by the driver, emptied by the writer thread.

use std::{
    collections::VecDeque,
    io,
    net::{Shutdown, TcpStream},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kernels::BlockRead;

use crate::{
    api::TransferId,
    transport::{DataError, Released},
};

/// Chunks that wait for one peer. Each transfer has a few at a time that are cleared and not sent,
/// so this is reached only by very many transfers to a peer that takes nothing.
const QUEUE_MAX: usize = 4096;

/// How long the writer sleeps at most when there is nothing to do.
const LOOK: Duration = Duration::from_secs(1);

/// A queue of borrowed chunks, and the state of the connection that takes them.
pub struct Outbox {
    connection: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// The transfer whose chunk the writer holds, and whether it is cancelled.
    writing: Option<(TransferId, bool)>,
    /// To be interrupted when the outbox is closed.
    stream: Option<TcpStream>,
    /// By the driver: nothing more is wanted of this connection.
    closed: bool,
    /// By the watcher: how the connection ended.
    broken: Option<String>,
    /// By the writer: the connection has ended, what comes is dropped.
    ended: bool,
}

/// One chunk to be sent.
pub struct Job {
    pub transfer: TransferId,
    pub chunk: u32,
    pub blocks: Vec<BlockRead>,
}

impl Outbox {
    pub fn new(connection: u64) -> Self {
        Self { connection, state: Mutex::default(), changed: Condvar::new() }
    }

    pub fn connection(&self) -> u64 {
        self.connection
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push(
        &self,
        transfer: TransferId,
        chunk: u32,
        blocks: Vec<BlockRead>,
    ) -> Result<(), DataError> {
        let mut state = self.lock();
        if state.closed || state.ended {
            // Its end is reported.
            return Ok(());
        }
        if state.queue.len() >= QUEUE_MAX {
            return Err(DataError::QueueFull { queued: state.queue.len() });
        }
        state.queue.push_back(Job { transfer, chunk, blocks });
        self.changed.notify_one();
        Ok(())
    }

    pub fn cancel(&self, transfer: TransferId) -> Released {
        let mut state = self.lock();
        state.queue.retain(|job| job.transfer != transfer);
        match &mut state.writing {
            Some((writing, cancelled)) if *writing == transfer => {
                *cancelled = true;
                Released::Later
            }
            _ => Released::Now,
        }
    }

    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.queue.clear();
        if let Some(stream) = &state.stream {
            // Fails only when the connection is gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.changed.notify_one();
    }

    /// The next chunk, or `None` when the outbox is closed or the connection has ended.
    pub fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.closed || state.broken.is_some() {
                return None;
            }
            if let Some(job) = state.queue.pop_front() {
                state.writing = Some((job.transfer, false));
                return Some(job);
            }
            let (woken, _) =
                self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            state = woken;
        }
    }

    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    pub fn break_off(&self, reason: String) {
        let mut state = self.lock();
        state.broken.get_or_insert(reason);
        if let Some(stream) = &state.stream {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.changed.notify_one();
    }

    pub fn is_cancelled(&self) -> bool {
        matches!(self.lock().writing, Some((_, true)))
    }

    /// The writer has given back the blocks of the chunk it took; true when the transfer was
    /// cancelled meanwhile.
    pub fn give_back(&self) -> bool {
        self.lock().writing.take().is_some_and(|(_, cancelled)| cancelled)
    }

    /// The connection is made. False when nobody wants it any more.
    pub fn connected(&self, stream: &TcpStream) -> io::Result<bool> {
        let mut state = self.lock();
        if !state.closed {
            state.stream = Some(stream.try_clone()?);
        }
        Ok(!state.closed)
    }

    /// Sits out a pause; false when the outbox is closed meanwhile.
    pub fn pause(&self, pause: Duration) -> bool {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), pause, |state| !state.closed)
            .unwrap_or_else(PoisonError::into_inner);
        !state.closed
    }

    /// The connection has ended: why, unless it was closed here.
    pub fn end(&self, reason: String) -> Option<String> {
        let mut state = self.lock();
        state.ended = true;
        state.queue.clear();
        state.stream = None;
        let reason = state.broken.take().unwrap_or(reason);
        (!state.closed).then_some(reason)
    }
}
