//! Chunks that each peer may write. The driver posts them, and the reader of the peer's connection
//! takes them.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::{Shutdown, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use kernels::BlockWrite;

use super::in_flight::{ChunkOutcome, InFlight};
use crate::{
    api::{Epoch, TransferId},
    config::LEASE,
    threads::locked,
    transport::{ChunkId, Released},
};

/// The inboxes of all admitted peers.
#[derive(Default)]
pub(super) struct Peers {
    inboxes: Mutex<BTreeMap<Epoch, Arc<Inbox>>>,
}

/// Chunks that one peer may write.
#[derive(Default)]
pub(super) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    posted: HashMap<ChunkId, Vec<BlockWrite>>,
    /// Chunks that are being written.
    taken: InFlight<()>,
    /// Number that the sender gave the newest group of connections, kept after the group's end.
    group: u64,
    /// Number that this node gave the group.
    connection: u64,
    /// Connections of the group, each with its reader's number, kept to shut them down. A newer
    /// group replaces them.
    streams: Vec<(u64, TcpStream)>,
    /// Group of each reader thread that uses this inbox.
    readers: Vec<u64>,
    closed: bool,
}

/// A reader thread of one connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader {
    group: u64,
    number: u64,
    /// Number that this node gave the group.
    pub connection: u64,
}

impl Reader {
    /// Returns whether this is the first connection of its group.
    pub(super) fn is_first(&self) -> bool {
        self.number == self.connection
    }
}

impl State {
    fn shut_down_streams(&self) {
        for (_, stream) in &self.streams {
            // Fails only if the connection has already closed.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Peers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Epoch, Arc<Inbox>>> {
        locked(&self.inboxes)
    }

    pub(super) fn admit(&self, peer: Epoch) {
        self.lock().entry(peer).or_default();
    }

    pub(super) fn inbox(&self, peer: Epoch) -> Option<Arc<Inbox>> {
        self.lock().get(&peer).cloned()
    }

    /// Closes and removes the inbox of `peer`. The threads of an old connection keep the old inbox.
    pub(super) fn dismiss(&self, peer: Epoch) {
        if let Some(inbox) = self.lock().remove(&peer) {
            inbox.close();
        }
    }

    pub(super) fn dismiss_all(&self) {
        for inbox in std::mem::take(&mut *self.lock()).into_values() {
            inbox.close();
        }
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    pub(super) fn post(&self, chunk: ChunkId, blocks: Vec<BlockWrite>) {
        self.lock().posted.insert(chunk, blocks);
    }

    pub(super) fn cancel(&self, transfer: TransferId) -> Released {
        let mut state = self.lock();
        state.posted.retain(|chunk, _| chunk.transfer != transfer);
        state.taken.cancel(transfer)
    }

    /// Returns the number that this node gave the newest group of connections.
    pub(super) fn connection(&self) -> u64 {
        self.lock().connection
    }

    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.posted.clear();
        state.shut_down_streams();
        self.changed.notify_all();
    }

    /// Records that this reader has ended.
    pub(super) fn leave(&self, Reader { group, number, .. }: Reader) {
        let mut state = self.lock();
        if let Some(index) = state.readers.iter().position(|of| *of == group) {
            state.readers.swap_remove(index);
        }
        state.streams.retain(|(of, _)| *of != number);
        self.changed.notify_all();
    }

    /// Adds a connection to its group of at most `connections_max`. A new group replaces the older
    /// one: blocks until the readers of the older group have left. `number` is the reader's, and
    /// the new group's. Returns `None` if a newer group replaces this one, the group is full, the
    /// inbox is closed, or an older reader has not left within a lease.
    pub(super) fn enter(
        &self,
        (group, connections_max): (u64, usize),
        number: u64,
        stream: &TcpStream,
    ) -> io::Result<Option<Reader>> {
        let clone = stream.try_clone()?;
        let mut state = self.lock();
        if group > state.group {
            state.shut_down_streams();
            state.streams.clear();
            (state.group, state.connection) = (group, number);
            // Connections of the older group that still wait.
            self.changed.notify_all();
        }
        if group < state.group || state.streams.len() >= connections_max || state.closed {
            return Ok(None);
        }
        state.streams.push((number, clone));
        let deadline = Instant::now() + LEASE;
        while state.readers.iter().any(|of| *of != group) {
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() || state.group != group || state.closed {
                state.streams.retain(|(of, _)| *of != number);
                return Ok(None);
            }
            (state, _) =
                self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner);
        }
        if state.group != group || state.closed {
            return Ok(None);
        }
        state.readers.push(group);
        Ok(Some(Reader { group, number, connection: state.connection }))
    }

    /// Takes the blocks posted for this chunk.
    pub(super) fn take(&self, chunk: ChunkId) -> Option<Vec<BlockWrite>> {
        let mut state = self.lock();
        let blocks = state.posted.remove(&chunk)?;
        state.taken.insert(chunk, ());
        Some(blocks)
    }

    /// Returns whether the transfer of a taken chunk was cancelled or the inbox is closed.
    pub(super) fn is_cancelled(&self, transfer: TransferId) -> bool {
        let state = self.lock();
        state.closed || state.taken.is_cancelled(transfer)
    }

    /// Returns whether `connection` is the current one.
    pub(super) fn is_current(&self, connection: u64) -> bool {
        let state = self.lock();
        !state.closed && state.connection == connection
    }

    /// Records that the blocks of a taken chunk are no longer written.
    pub(super) fn end_chunk(&self, chunk: ChunkId) -> ChunkOutcome<()> {
        let outcome = self.lock().taken.end_chunk(chunk);
        outcome.expect("only taken chunks are given back")
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }
}
