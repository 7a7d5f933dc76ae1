//! What waits to be sent to one peer: filled by the driver, emptied by the writer thread.

use std::{
    collections::VecDeque,
    io,
    net::{Shutdown, TcpStream},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
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
    /// Chunks under way: the writer has them, or the peer has not answered them.
    taken: Vec<Taken>,
    /// To be interrupted when the outbox is closed.
    stream: Option<TcpStream>,
    /// By the driver: nothing more is wanted of this connection.
    closed: bool,
    /// By the watcher: how the connection ended.
    broken: Option<String>,
    /// By the writer: the connection has ended, what comes is dropped.
    ended: bool,
    /// By the writer: what goes may be read for ever.
    stuck: bool,
}

/// One chunk to be sent.
pub struct Job {
    pub transfer: TransferId,
    pub chunk: u32,
    pub blocks: Vec<BlockRead>,
}

struct Taken {
    transfer: TransferId,
    chunk: u32,
    /// Its transfer was cancelled meanwhile.
    cancelled: bool,
    since: Instant,
    /// Where the peer reads them itself; else the writer has them.
    lent: Option<Lent>,
}

impl Taken {
    /// Its blocks are out of the outbox's hands.
    fn goes(&self) -> bool {
        self.lent.as_ref().is_none_or(|lent| lent.blocks.is_empty())
    }
}

/// Blocks that the peer reads, until it answers.
struct Lent {
    blocks: Vec<BlockRead>,
    integrity: u64,
    bytes: u64,
}

/// A chunk whose blocks are no longer read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenBack {
    /// What was noted when it was lent, or nothing.
    Wanted { integrity: u64, bytes: u64 },
    /// Its transfer was cancelled, and this was the last chunk of it under way.
    Released,
    /// Its transfer was cancelled, and others are under way.
    Cancelled,
    /// No such chunk is under way.
    Unknown,
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
        let mut released = Released::Now;
        for taken in state.taken.iter_mut().filter(|taken| taken.transfer == transfer) {
            taken.cancelled = true;
            released = Released::Later;
        }
        released
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

    /// The next chunk, once fewer than `taken_max` are under way; `None` when the outbox is closed or
    /// the connection has ended.
    pub fn next(&self, taken_max: usize) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.closed || state.broken.is_some() {
                return None;
            }
            if state.taken.len() < taken_max
                && let Some(job) = state.queue.pop_front()
            {
                let (transfer, chunk, since) = (job.transfer, job.chunk, Instant::now());
                let taken = Taken { transfer, chunk, cancelled: false, since, lent: None };
                state.taken.push(taken);
                return Some(job);
            }
            let (woken, _) =
                self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            state = woken;
        }
    }

    /// Keeps the blocks of a chunk that was taken until the peer answers.
    pub fn lend(&self, job: Job, integrity: u64) {
        let Job { transfer, chunk, blocks } = job;
        let mut state = self.lock();
        let bytes = blocks.iter().map(|block| block.byte_count() as u64).sum();
        let lent = Some(Lent { blocks, integrity, bytes });
        let is_it = |taken: &&mut Taken| (taken.transfer, taken.chunk) == (transfer, chunk);
        if let Some(taken) = state.taken.iter_mut().find(is_it) {
            taken.lent = lent;
            taken.since = Instant::now();
        }
    }

    /// The blocks of a chunk that was lent, now that it goes; it is under way until it is given back.
    pub fn take_lent(&self, transfer: TransferId, chunk: u32) -> Option<Vec<BlockRead>> {
        let mut state = self.lock();
        let is_it = |taken: &&mut Taken| (taken.transfer, taken.chunk) == (transfer, chunk);
        let taken = state.taken.iter_mut().find(is_it)?;
        taken.since = Instant::now();
        let blocks = std::mem::take(&mut taken.lent.as_mut()?.blocks);
        (!blocks.is_empty()).then_some(blocks)
    }

    /// Nothing more comes of the connection.
    pub fn is_over(&self) -> bool {
        let state = self.lock();
        state.closed || state.broken.is_some() || state.ended
    }

    /// Since when the chunk is under way that is so for the longest time.
    pub fn oldest(&self) -> Option<Instant> {
        self.lock().taken.iter().map(|taken| taken.since).min()
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

    pub fn is_cancelled(&self, transfer: TransferId) -> bool {
        self.lock().taken.iter().any(|taken| taken.transfer == transfer && taken.cancelled)
    }

    /// The peer says that it does not read a chunk any more. The error is for people: it was not lent, or
    /// the writer has it again.
    pub fn answered(&self, transfer: TransferId, chunk: u32) -> Result<GivenBack, String> {
        let state = self.lock();
        let is_lent =
            |taken: &Taken| (taken.transfer, taken.chunk) == (transfer, chunk) && !taken.goes();
        if !state.taken.iter().any(is_lent) {
            return Err(format!("it answers chunk {chunk}, which it was not lent"));
        }
        Ok(self.give_back_of(state, transfer, chunk))
    }

    /// The blocks of a chunk that was taken are no longer read.
    pub fn give_back(&self, transfer: TransferId, chunk: u32) -> GivenBack {
        self.give_back_of(self.lock(), transfer, chunk)
    }

    fn give_back_of(
        &self,
        mut state: MutexGuard<'_, State>,
        transfer: TransferId,
        chunk: u32,
    ) -> GivenBack {
        let is_it = |taken: &Taken| (taken.transfer, taken.chunk) == (transfer, chunk);
        let Some(index) = state.taken.iter().position(is_it) else { return GivenBack::Unknown };
        let Taken { cancelled, lent, .. } = state.taken.swap_remove(index);
        // Blocks go before the lock does: whoever cancels the transfer then finds it released.
        let lent = lent.map(|Lent { integrity, bytes, blocks }| {
            drop(blocks);
            (integrity, bytes)
        });
        self.changed.notify_one();
        let others = state.taken.iter().any(|other| other.transfer == transfer);
        match (cancelled, lent) {
            (true, _) if others => GivenBack::Cancelled,
            (true, _) => GivenBack::Released,
            (false, Some((integrity, bytes))) => GivenBack::Wanted { integrity, bytes },
            (false, None) => GivenBack::Wanted { integrity: 0, bytes: 0 },
        }
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

    /// What goes may be read for ever: it is under way also when the connection has ended.
    pub fn keep_what_goes(&self) {
        self.lock().stuck = true;
    }

    /// The connection has ended, and no block is read any more but those kept: the cancelled transfers
    /// whose chunks were under way, and why it ended, unless it was closed here.
    pub fn end(&self, reason: String) -> (Vec<TransferId>, Option<String>) {
        let mut state = self.lock();
        let state = &mut *state;
        state.ended = true;
        state.queue.clear();
        state.stream = None;
        let (stuck, taken): (Vec<Taken>, Vec<Taken>) =
            state.taken.drain(..).partition(|taken| state.stuck && taken.goes());
        let is_stuck = |id: TransferId| stuck.iter().any(|taken| taken.transfer == id);
        let cancelled = taken.iter().filter(|taken| taken.cancelled).map(|taken| taken.transfer);
        let mut cancelled: Vec<TransferId> = cancelled.filter(|id| !is_stuck(*id)).collect();
        state.taken = stuck;
        cancelled.sort_unstable();
        cancelled.dedup();
        drop(taken);
        let reason = state.broken.take().unwrap_or(reason);
        (cancelled, (!state.closed).then_some(reason))
    }
}

#[cfg(test)]
mod tests {
    use kernels::{BlockId, Dtype, KvArena, KvLayout};

    use super::*;

    #[test]
    fn an_answer_counts_only_while_the_chunk_is_lent() {
        let layout = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 8, dtype: Dtype::F32 };
        let arena = KvArena::host(layout, 1).unwrap();
        let (outbox, transfer) = (Outbox::new(1), TransferId(7));
        let taken = |chunk| {
            outbox.push(transfer, chunk, vec![arena.read(BlockId(0)).unwrap()]).unwrap();
            outbox.next(8).unwrap()
        };
        let job = taken(0);
        assert!(outbox.answered(transfer, 0).is_err(), "it is not lent yet");
        let bytes = job.blocks[0].byte_count() as u64;
        outbox.lend(job, 5);
        assert_eq!(outbox.answered(transfer, 0), Ok(GivenBack::Wanted { integrity: 5, bytes }));
        assert!(outbox.answered(transfer, 0).is_err(), "it was answered");
        outbox.lend(taken(1), 5);
        let going = outbox.take_lent(transfer, 1);
        assert!(outbox.answered(transfer, 1).is_err(), "it goes");
        drop(going);
        assert_eq!(outbox.give_back(transfer, 1), GivenBack::Wanted { integrity: 5, bytes });
        assert_eq!(arena.pins(BlockId(0)).unwrap(), 0);
    }

    #[test]
    fn transfers_of_what_is_never_over_are_not_reported_released() {
        let layout = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 8, dtype: Dtype::F32 };
        let arena = KvArena::host(layout, 1).unwrap();
        let outbox = Outbox::new(1);
        let [stuck, lent, other] = [1, 2, 3].map(TransferId);
        for (transfer, chunk) in [(stuck, 0), (stuck, 1), (lent, 0)] {
            outbox.push(transfer, chunk, vec![arena.read(BlockId(0)).unwrap()]).unwrap();
            let job = outbox.next(8).unwrap();
            outbox.lend(job, 0);
        }
        let going = outbox.take_lent(stuck, 1).unwrap();
        for transfer in [stuck, lent] {
            assert_eq!(outbox.cancel(transfer), Released::Later);
        }
        outbox.keep_what_goes();
        let (released, reason) = outbox.end("it broke".to_owned());
        assert_eq!((released, reason), (vec![lent], Some("it broke".to_owned())));
        assert_eq!(outbox.cancel(stuck), Released::Later, "nor afterwards");
        assert_eq!(outbox.cancel(lent), Released::Now);
        assert_eq!(outbox.cancel(other), Released::Now);
        drop(going);
        assert_eq!(arena.pins(BlockId(0)).unwrap(), 0, "what was lent was let go of");
    }
}
