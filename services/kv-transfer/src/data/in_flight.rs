//! Chunks whose blocks are being read or written, and whose transfers may be cancelled meanwhile.

use crate::{
    api::TransferId,
    transport::{ChunkId, Released},
};

/// Outcome for a chunk whose blocks are no longer read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkOutcome<T> {
    /// The transfer still needs it.
    Moved(T),
    /// Its transfer was cancelled, and this was its last chunk in flight.
    Released,
    /// Its transfer was cancelled, and other chunks of the transfer are still in flight.
    Cancelled,
}

/// The chunks in flight of one connection, each with a value `T`.
pub(super) struct InFlight<T> {
    pub chunks: Vec<Chunk<T>>,
}

pub(super) struct Chunk<T> {
    pub id: ChunkId,
    /// Whether the transfer was cancelled while the chunk was in flight.
    pub cancelled: bool,
    pub value: T,
}

impl<T> Default for InFlight<T> {
    fn default() -> Self {
        Self { chunks: Vec::new() }
    }
}

impl<T> InFlight<T> {
    pub(super) fn insert(&mut self, id: ChunkId, value: T) {
        self.chunks.push(Chunk { id, cancelled: false, value });
    }

    pub(super) fn get_mut(&mut self, id: ChunkId) -> Option<&mut T> {
        let chunk = self.chunks.iter_mut().find(|chunk| chunk.id == id)?;
        Some(&mut chunk.value)
    }

    /// Marks the transfer's chunks as cancelled.
    pub(super) fn cancel(&mut self, transfer: TransferId) -> Released {
        let mut released = Released::Now;
        for chunk in self.chunks.iter_mut().filter(|chunk| chunk.id.transfer == transfer) {
            chunk.cancelled = true;
            released = Released::Later;
        }
        released
    }

    pub(super) fn is_cancelled(&self, transfer: TransferId) -> bool {
        self.chunks.iter().any(|chunk| chunk.id.transfer == transfer && chunk.cancelled)
    }

    /// Removes a chunk; `None` if it is not in flight.
    pub(super) fn end_chunk(&mut self, id: ChunkId) -> Option<ChunkOutcome<T>> {
        let index = self.chunks.iter().position(|chunk| chunk.id == id)?;
        let chunk = self.chunks.swap_remove(index);
        let has_others = self.chunks.iter().any(|other| other.id.transfer == id.transfer);
        Some(match chunk.cancelled {
            false => ChunkOutcome::Moved(chunk.value),
            true if has_others => ChunkOutcome::Cancelled,
            true => ChunkOutcome::Released,
        })
    }
}
