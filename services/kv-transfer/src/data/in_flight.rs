//! Chunks whose blocks are being read or written, and whose transfers may be cancelled meanwhile.

use crate::{api::TransferId, transport::Released};

/// Result of returning a chunk whose blocks are no longer read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenBack<T> {
    Wanted(T),
    /// Its transfer was cancelled, and this was its last chunk in flight.
    Released,
    /// Its transfer was cancelled, and other chunks of it are in flight.
    Cancelled,
}

/// The chunks in flight of one connection, each with a value `T`.
pub struct InFlight<T> {
    pub chunks: Vec<Chunk<T>>,
}

pub struct Chunk<T> {
    pub transfer: TransferId,
    chunk: u32,
    /// Its transfer was cancelled while the chunk was in flight.
    pub cancelled: bool,
    pub value: T,
}

impl<T> Default for InFlight<T> {
    fn default() -> Self {
        Self { chunks: Vec::new() }
    }
}

impl<T> InFlight<T> {
    pub fn insert(&mut self, transfer: TransferId, chunk: u32, value: T) {
        self.chunks.push(Chunk { transfer, chunk, cancelled: false, value });
    }

    pub fn get_mut(&mut self, transfer: TransferId, chunk: u32) -> Option<&mut T> {
        let is_it = |known: &&mut Chunk<T>| (known.transfer, known.chunk) == (transfer, chunk);
        self.chunks.iter_mut().find(is_it).map(|known| &mut known.value)
    }

    /// Marks the transfer's chunks as cancelled.
    pub fn cancel(&mut self, transfer: TransferId) -> Released {
        let mut released = Released::Now;
        for chunk in self.chunks.iter_mut().filter(|chunk| chunk.transfer == transfer) {
            chunk.cancelled = true;
            released = Released::Later;
        }
        released
    }

    pub fn is_cancelled(&self, transfer: TransferId) -> bool {
        self.chunks.iter().any(|chunk| chunk.transfer == transfer && chunk.cancelled)
    }

    /// Removes a chunk; `None` if it is not in flight.
    pub fn give_back(&mut self, transfer: TransferId, chunk: u32) -> Option<GivenBack<T>> {
        let is_it = |known: &Chunk<T>| (known.transfer, known.chunk) == (transfer, chunk);
        let index = self.chunks.iter().position(is_it)?;
        let known = self.chunks.swap_remove(index);
        let has_others = self.chunks.iter().any(|other| other.transfer == transfer);
        Some(match known.cancelled {
            false => GivenBack::Wanted(known.value),
            true if has_others => GivenBack::Cancelled,
            true => GivenBack::Released,
        })
    }
}
