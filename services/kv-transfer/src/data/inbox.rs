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

use super::in_flight::{GivenBack, InFlight};
use crate::{
    api::{Epoch, TransferId},
    config::LEASE,
    threads::locked,
    transport::{ChunkId, Released},
};

/// The inboxes of all admitted peers.
#[derive(Default)]
pub struct Peers {
    inboxes: Mutex<BTreeMap<Epoch, Arc<Inbox>>>,
}

/// Chunks that one peer may write.
#[derive(Default)]
pub struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    posted: HashMap<ChunkId, Vec<BlockWrite>>,
    /// Chunks that are being written.
    taken: InFlight<()>,
    /// The connection in use, kept to shut it down. A newer connection replaces it.
    stream: Option<TcpStream>,
    /// Number of the newest connection, kept after the connection's end.
    connection: u64,
    /// Whether a reader thread uses this inbox.
    occupied: bool,
    closed: bool,
}

impl Peers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Epoch, Arc<Inbox>>> {
        locked(&self.inboxes)
    }

    pub fn admit(&self, peer: Epoch) {
        self.lock().entry(peer).or_default();
    }

    pub fn inbox(&self, peer: Epoch) -> Option<Arc<Inbox>> {
        self.lock().get(&peer).cloned()
    }

    /// Closes and removes the inbox of `peer`. The threads of an old connection keep the old inbox.
    pub fn dismiss(&self, peer: Epoch) {
        if let Some(inbox) = self.lock().remove(&peer) {
            inbox.close();
        }
    }

    pub fn dismiss_all(&self) {
        for inbox in std::mem::take(&mut *self.lock()).into_values() {
            inbox.close();
        }
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    pub fn post(&self, chunk: ChunkId, blocks: Vec<BlockWrite>) {
        self.lock().posted.insert(chunk, blocks);
    }

    pub fn cancel(&self, transfer: TransferId) -> Released {
        let mut state = self.lock();
        state.posted.retain(|chunk, _| chunk.transfer != transfer);
        state.taken.cancel(transfer)
    }

    /// Returns the number of the newest connection.
    pub fn connection(&self) -> u64 {
        self.lock().connection
    }

    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.posted.clear();
        if let Some(stream) = &state.stream {
            // Fails only if the connection has already closed.
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.changed.notify_all();
    }

    /// Records that the reader of this connection has ended.
    pub fn leave(&self, connection: u64) {
        let mut state = self.lock();
        state.occupied = false;
        if state.connection == connection {
            state.stream = None;
        }
        self.changed.notify_all();
    }

    /// Blocks until the reader of the previous connection has left, then makes `connection` the
    /// current one. Returns false if a newer connection replaces it, the inbox is closed, or the previous
    /// reader has not left within a lease.
    pub fn enter(&self, connection: u64, stream: &TcpStream) -> io::Result<bool> {
        let clone = stream.try_clone()?;
        let mut state = self.lock();
        if let Some(before) = state.stream.replace(clone) {
            let _ = before.shutdown(Shutdown::Both);
        }
        state.connection = connection;
        let deadline = Instant::now() + LEASE;
        while state.occupied && state.connection == connection && !state.closed {
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                state.stream = None;
                return Ok(false);
            }
            (state, _) =
                self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner);
        }
        if state.connection != connection || state.closed {
            return Ok(false);
        }
        state.occupied = true;
        Ok(true)
    }

    /// Takes the blocks posted for this chunk.
    pub fn take(&self, chunk: ChunkId) -> Option<Vec<BlockWrite>> {
        let mut state = self.lock();
        let blocks = state.posted.remove(&chunk)?;
        state.taken.insert(chunk, ());
        Some(blocks)
    }

    /// Returns whether the transfer of a taken chunk was cancelled or the inbox is closed.
    pub fn is_cancelled(&self, transfer: TransferId) -> bool {
        let state = self.lock();
        state.closed || state.taken.is_cancelled(transfer)
    }

    /// Returns whether `connection` is the current one.
    pub fn is_current(&self, connection: u64) -> bool {
        let state = self.lock();
        !state.closed && state.connection == connection
    }

    /// Records that the blocks of a taken chunk are no longer written.
    pub fn give_back(&self, chunk: ChunkId) -> GivenBack<()> {
        let given_back = self.lock().taken.give_back(chunk);
        given_back.expect("only taken chunks are given back")
    }

    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }
}
