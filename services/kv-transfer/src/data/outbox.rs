//! Chunks queued for one peer. The driver fills the queue and the writer thread drains it.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::{Shutdown, TcpStream},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kernels::BlockRead;

use super::{
    Moved,
    in_flight::{Chunk, ChunkOutcome, InFlight},
};
use crate::{
    api::TransferId,
    threads::locked,
    transport::{ChunkId, DataError, Released},
};

/// Queue bound: 128 GiB in chunks of `tcp`. Only very many transfers to a slow or stopped peer
/// reach it.
const QUEUE_MAX: usize = 16_384;

/// Longest sleep of an idle writer.
const IDLE_POLL: Duration = Duration::from_secs(1);

/// A queue of chunks that borrow their blocks, and the state of the connection that sends them.
pub(super) struct Outbox {
    pub connection: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// Chunks in flight: the writer holds them, or the peer has not answered them.
    taken: InFlight<ChunkInFlight>,
    /// Connections by their number in the group. Several for `tcp`.
    connections: BTreeMap<usize, Connection>,
    /// Whether the connection is no longer needed. The driver sets it.
    closed: bool,
    /// Why the group of connections has ended. Set by the first thread that finds out.
    broken: Option<String>,
    /// Whether the connection has ended, so that new chunks are dropped. The writer sets it.
    ended: bool,
    /// Whether a kernel that cannot be aborted may still read the chunks being sent. The writer
    /// sets it.
    stuck: bool,
}

struct Connection {
    /// Shut down when the outbox is closed, to wake the threads that use the connection.
    stream: TcpStream,
    has_taken_chunks: bool,
}

impl State {
    fn take(&mut self, chunk: ChunkId) {
        self.taken.insert(chunk, ChunkInFlight { since: Instant::now(), lent: None });
    }

    /// Returns whether connection `number` is to take a chunk.
    fn needs_connection(&self, number: usize) -> bool {
        !self.queue.is_empty() && self.queue.len() + self.taken.chunks.len() > number
    }

    fn break_off(&mut self, reason: String) {
        self.broken.get_or_insert(reason);
        self.shut_down_streams();
    }

    fn shut_down_streams(&self) {
        for connection in self.connections.values() {
            // Fails only if the connection has already closed.
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }
}

/// One chunk to be sent.
pub(super) struct Job {
    pub chunk: ChunkId,
    pub blocks: Vec<BlockRead>,
}

/// State of a chunk in flight.
struct ChunkInFlight {
    since: Instant,
    /// Set once the chunk is lent. Its blocks are empty while the writer holds them.
    lent: Option<LentBlocks>,
}

impl ChunkInFlight {
    /// Returns whether the writer holds the blocks.
    fn held_by_writer(&self) -> bool {
        self.lent.as_ref().is_none_or(|lent| lent.blocks.is_empty())
    }
}

/// Blocks that the peer may read until it answers.
struct LentBlocks {
    blocks: Vec<BlockRead>,
    moved: Moved,
}

impl Outbox {
    pub(super) fn new(connection: u64) -> Self {
        Self { connection, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    pub(super) fn push(&self, chunk: ChunkId, blocks: Vec<BlockRead>) -> Result<(), DataError> {
        let mut state = self.lock();
        if state.closed || state.ended {
            // The close is reported separately.
            return Ok(());
        }
        if state.queue.len() >= QUEUE_MAX {
            return Err(DataError::QueueFull { queued: state.queue.len() });
        }
        state.queue.push_back(Job { chunk, blocks });
        // Only some of the waiting connections may take the chunk.
        self.changed.notify_all();
        Ok(())
    }

    pub(super) fn cancel(&self, transfer: TransferId) -> Released {
        let mut state = self.lock();
        state.queue.retain(|job| job.chunk.transfer != transfer);
        state.taken.cancel(transfer)
    }

    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.queue.clear();
        state.shut_down_streams();
        self.changed.notify_all();
    }

    /// Blocks until fewer than `taken_max` chunks are in flight and returns the next chunk; `None`
    /// once the outbox is closed or the connection has ended.
    pub(super) fn next(&self, taken_max: usize) -> Option<Job> {
        self.wait_for(|state| {
            let job = (state.taken.chunks.len() < taken_max).then(|| state.queue.pop_front())?;
            job.inspect(|job| state.take(job.chunk))
        })
    }

    /// As [`Outbox::next`], for the connection with this number. Connection `n` takes a chunk only
    /// while `n` others are in flight or queued, so that few chunks use few connections. Returns
    /// `None` once the connection is lost, too.
    pub(super) fn next_of_connection(&self, number: usize) -> Option<Job> {
        let next = self.wait_for(|state| {
            let is_needed = state.needs_connection(number);
            let Some(connection) = state.connections.get_mut(&number) else { return Some(None) };
            let job = is_needed.then(|| state.queue.pop_front())??;
            connection.has_taken_chunks = true;
            state.take(job.chunk);
            Some(Some(job))
        });
        next.flatten()
    }

    /// Records that connection `number` is lost. The group can do without a further connection
    /// that has taken no chunk. Otherwise the group ends: the peer may lack bytes of chunks that
    /// were reported as sent.
    pub(super) fn lose_connection(&self, number: usize, reason: String) {
        let mut state = self.lock();
        let lost = state.connections.remove(&number);
        if number == 0 || lost.is_some_and(|lost| lost.has_taken_chunks) {
            state.break_off(reason);
        } else {
            tracing::debug!(number, reason, "lost a further tcp connection");
        }
        self.changed.notify_all();
    }

    /// Blocks until [`Outbox::next_of_connection`] would return a chunk. Returns false once the
    /// outbox is closed or the connection has ended.
    pub(super) fn await_need(&self, number: usize) -> bool {
        self.wait_for(|state| state.needs_connection(number).then_some(())).is_some()
    }

    /// Blocks until `ready` returns a value; `None` once the outbox is closed or the connection has
    /// ended.
    fn wait_for<T>(&self, mut ready: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        let mut state = self.lock();
        loop {
            if state.closed || state.broken.is_some() {
                return None;
            }
            if let Some(value) = ready(&mut state) {
                return Some(value);
            }
            let (woken, _) =
                self.changed.wait_timeout(state, IDLE_POLL).unwrap_or_else(PoisonError::into_inner);
            state = woken;
        }
    }

    /// Keeps the blocks of a taken chunk until the peer answers.
    pub(super) fn lend(&self, job: Job, integrity: u64) {
        let Job { chunk, blocks } = job;
        let bytes = blocks.iter().map(|block| block.byte_count() as u64).sum();
        if let Some(taken) = self.lock().taken.get_mut(chunk) {
            let lent = Some(LentBlocks { blocks, moved: Moved { integrity, bytes } });
            *taken = ChunkInFlight { since: Instant::now(), lent };
        }
    }

    /// Takes the blocks of a lent chunk to send them. The chunk stays in flight until it is given
    /// back.
    pub(super) fn take_lent(&self, chunk: ChunkId) -> Option<Vec<BlockRead>> {
        let mut state = self.lock();
        let taken = state.taken.get_mut(chunk)?;
        taken.since = Instant::now();
        let blocks = std::mem::take(&mut taken.lent.as_mut()?.blocks);
        (!blocks.is_empty()).then_some(blocks)
    }

    /// Returns whether the connection is closed, broken or ended.
    pub(super) fn is_over(&self) -> bool {
        let state = self.lock();
        state.closed || state.broken.is_some() || state.ended
    }

    /// Returns the time since which the oldest chunk in flight has waited.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.lock().taken.chunks.iter().map(|taken| taken.value.since).min()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    pub(super) fn break_off(&self, reason: String) {
        self.lock().break_off(reason);
        self.changed.notify_all();
    }

    pub(super) fn is_cancelled(&self, transfer: TransferId) -> bool {
        self.lock().taken.is_cancelled(transfer)
    }

    /// Records that the peer no longer reads a lent chunk. Fails if the chunk was not lent, or if
    /// the writer has taken it back to send it.
    pub(super) fn answered(&self, chunk: ChunkId) -> Result<ChunkOutcome<Moved>, String> {
        let mut state = self.lock();
        let taken = state.taken.get_mut(chunk);
        if taken.is_none_or(|taken| taken.held_by_writer()) {
            return Err(format!(
                "protocol error: the peer answered chunk {}, which was not lent to it",
                chunk.index
            ));
        }
        Ok(self.end_chunk_of(state, chunk))
    }

    /// Records that the blocks of a taken chunk are no longer read. Returns the integrity value and
    /// size of a lent chunk, 0 for other chunks, and `Cancelled` if no such chunk is in flight.
    pub(super) fn end_chunk(&self, chunk: ChunkId) -> ChunkOutcome<Moved> {
        self.end_chunk_of(self.lock(), chunk)
    }

    /// Drops the blocks before it releases the lock, so that a later `cancel` finds the transfer
    /// released.
    fn end_chunk_of(
        &self,
        mut state: MutexGuard<'_, State>,
        chunk: ChunkId,
    ) -> ChunkOutcome<Moved> {
        let outcome = match state.taken.end_chunk(chunk) {
            Some(ChunkOutcome::Moved(taken)) => {
                ChunkOutcome::Moved(taken.lent.map_or_else(Moved::default, |lent| lent.moved))
            }
            Some(ChunkOutcome::Released) => ChunkOutcome::Released,
            Some(ChunkOutcome::Cancelled) | None => ChunkOutcome::Cancelled,
        };
        self.changed.notify_all();
        outcome
    }

    /// Stores connection `number`, in place of an earlier one. Returns false if the outbox was
    /// closed or the group has ended meanwhile.
    pub(super) fn connected(&self, number: usize, stream: &TcpStream) -> io::Result<bool> {
        let mut state = self.lock();
        let is_over = state.closed || state.broken.is_some();
        if !is_over {
            let stream = stream.try_clone()?;
            state.connections.insert(number, Connection { stream, has_taken_chunks: false });
        }
        Ok(!is_over)
    }

    /// Forgets the connections of a transport that the peer has refused.
    pub(super) fn disconnected(&self) {
        self.lock().connections.clear();
    }

    /// Sleeps for `pause`. Returns false if the outbox was closed, or the group has ended, meanwhile.
    pub(super) fn pause(&self, pause: Duration) -> bool {
        let is_open = |state: &State| !state.closed && state.broken.is_none();
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), pause, |state| is_open(state))
            .unwrap_or_else(PoisonError::into_inner);
        is_open(&state)
    }

    /// Marks the chunks being sent as stuck: they stay in flight after the connection has ended.
    pub(super) fn keep_stuck_chunks(&self) {
        self.lock().stuck = true;
    }

    /// Ends the connection and releases all blocks except stuck ones. Returns the cancelled
    /// transfers that this has released, and the reason unless the driver closed the outbox.
    pub(super) fn end(&self, reason: String) -> (Vec<TransferId>, Option<String>) {
        let mut state = self.lock();
        let state = &mut *state;
        state.ended = true;
        state.queue.clear();
        state.connections.clear();
        let chunks = std::mem::take(&mut state.taken.chunks);
        let (stuck, taken): (Vec<_>, Vec<_>) = chunks
            .into_iter()
            .partition(|taken: &Chunk<ChunkInFlight>| state.stuck && taken.value.held_by_writer());
        let is_stuck = |id: TransferId| stuck.iter().any(|taken| taken.id.transfer == id);
        let cancelled = taken.iter().filter(|taken| taken.cancelled).map(|taken| taken.id.transfer);
        let mut cancelled: Vec<TransferId> = cancelled.filter(|id| !is_stuck(*id)).collect();
        state.taken.chunks = stuck;
        cancelled.sort_unstable();
        cancelled.dedup();
        drop(taken);
        let reason = state.broken.take().unwrap_or(reason);
        (cancelled, (!state.closed).then_some(reason))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use kernels::{BlockId, KvArena, KvFormat, KvLayout};

    use super::*;

    #[test]
    fn answer_is_valid_only_while_the_chunk_is_lent() {
        let layout =
            KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 8, format: KvFormat::F32 };
        let arena = KvArena::host(layout, 1).unwrap();
        let outbox = Outbox::new(1);
        let chunk = |index| ChunkId { transfer: TransferId(7), index };
        let taken = |index| {
            outbox.push(chunk(index), vec![arena.read(BlockId(0)).unwrap()]).unwrap();
            outbox.next(8).unwrap()
        };
        let job = taken(0);
        assert!(outbox.answered(chunk(0)).is_err(), "not lent yet");
        let bytes = job.blocks[0].byte_count() as u64;
        outbox.lend(job, 5);
        assert_eq!(
            outbox.answered(chunk(0)),
            Ok(ChunkOutcome::Moved(Moved { integrity: 5, bytes }))
        );
        assert!(outbox.answered(chunk(0)).is_err(), "already answered");
        outbox.lend(taken(1), 5);
        let going = outbox.take_lent(chunk(1));
        assert!(outbox.answered(chunk(1)).is_err(), "being sent");
        drop(going);
        assert_eq!(outbox.end_chunk(chunk(1)), ChunkOutcome::Moved(Moved { integrity: 5, bytes }));
        assert_eq!(arena.pins(BlockId(0)).unwrap(), 0);
    }

    #[test]
    fn further_connections_take_chunks_only_while_others_are_busy() {
        let layout =
            KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 8, format: KvFormat::F32 };
        let arena = KvArena::host(layout, 1).unwrap();
        let outbox = Outbox::new(1);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = |number| {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            assert!(outbox.connected(number, &stream).unwrap());
        };
        connect(0);
        connect(1);
        let needed = || [0, 1, 2, 3].map(|number| outbox.lock().needs_connection(number));
        assert_eq!(needed(), [false; 4]);
        let push = |index| {
            let chunk = ChunkId { transfer: TransferId(7), index };
            outbox.push(chunk, vec![arena.read(BlockId(0)).unwrap()]).unwrap();
            chunk
        };
        let first = push(0);
        assert_eq!(needed(), [true, false, false, false]);
        push(1);
        assert_eq!(needed(), [true, true, false, false]);
        assert_eq!(outbox.next_of_connection(0).unwrap().chunk, first);
        assert_eq!(needed(), [true, true, false, false], "one is in flight, one queued");
        assert!(outbox.await_need(1));
        push(2);
        assert_eq!(needed(), [true, true, true, false]);
        outbox.end_chunk(first);
        assert_eq!(needed(), [true, true, false, false]);
        outbox.lose_connection(1, "reset".to_owned());
        assert!(outbox.next_of_connection(1).is_none() && outbox.await_need(1));
        outbox.close();
        assert!(!outbox.await_need(0) && outbox.next_of_connection(0).is_none());
    }

    #[test]
    fn lost_connection_ends_the_group_only_if_it_has_taken_a_chunk() {
        let layout =
            KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 8, format: KvFormat::F32 };
        let arena = KvArena::host(layout, 1).unwrap();
        let outbox = Outbox::new(1);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = |number| {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            assert!(outbox.connected(number, &stream).unwrap());
        };
        for _ in 0..3 {
            connect(1);
            outbox.lose_connection(1, "reset".to_owned());
            assert!(!outbox.is_over() && outbox.lock().connections.is_empty(), "no stream is kept");
        }
        connect(1);
        let chunk = |index| ChunkId { transfer: TransferId(7), index };
        for index in 0..2 {
            outbox.push(chunk(index), vec![arena.read(BlockId(0)).unwrap()]).unwrap();
        }
        assert_eq!(outbox.next_of_connection(1).unwrap().chunk, chunk(0));
        // Sent: the kernel has the bytes, and the peer may not have them.
        outbox.end_chunk(chunk(0));
        outbox.lose_connection(1, "reset".to_owned());
        assert!(outbox.is_over());
        let begun = Instant::now();
        assert!(
            !outbox.pause(Duration::from_secs(60)) && begun.elapsed() < Duration::from_secs(30)
        );
        assert_eq!(outbox.end("closed".to_owned()).1.as_deref(), Some("reset"));
    }

    #[test]
    fn transfers_with_stuck_chunks_are_not_released() {
        let layout =
            KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 8, format: KvFormat::F32 };
        let arena = KvArena::host(layout, 1).unwrap();
        let outbox = Outbox::new(1);
        let [stuck, lent, other] = [1, 2, 3].map(TransferId);
        for (transfer, index) in [(stuck, 0), (stuck, 1), (lent, 0)] {
            let chunk = ChunkId { transfer, index };
            outbox.push(chunk, vec![arena.read(BlockId(0)).unwrap()]).unwrap();
            let job = outbox.next(8).unwrap();
            outbox.lend(job, 0);
        }
        let going = outbox.take_lent(ChunkId { transfer: stuck, index: 1 }).unwrap();
        for transfer in [stuck, lent] {
            assert_eq!(outbox.cancel(transfer), Released::Later);
        }
        outbox.keep_stuck_chunks();
        let (released, reason) = outbox.end("connection reset".to_owned());
        assert_eq!((released, reason), (vec![lent], Some("connection reset".to_owned())));
        assert_eq!(outbox.cancel(stuck), Released::Later, "not later either");
        assert_eq!(outbox.cancel(lent), Released::Now);
        assert_eq!(outbox.cancel(other), Released::Now);
        drop(going);
        assert_eq!(arena.pins(BlockId(0)).unwrap(), 0, "lent blocks were released");
    }
}
