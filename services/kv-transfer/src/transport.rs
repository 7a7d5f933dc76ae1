//! The trait between the protocol and the code that moves blocks.

use std::time::Instant;

use kernels::{ArenaError, BlockId};

use crate::{
    api::{Epoch, TransferId},
    protocol::DataEvent,
    transfer_kind::TransferKind,
};

/// Transport of blocks. One thread drives it, and its own threads answer with [`TransportEvent`]s.
///
/// Guarantees of an implementation:
/// * It writes only into blocks that were posted and reads only from blocks that were sent.
/// * Every `send` ends in `Sent` and every `post` in `Received`, unless the transfer is cancelled,
///   one of its chunks fails (`Failed`) or the connection closes ([`TransportEvent::Closed`]).
/// * Once `cancel` has returned [`Released::Now`], or [`DataEvent::Released`] was reported, it
///   holds no block of that transfer. One of these happens soon, even if the peer is stopped.
/// * A stopped peer delays no other peer.
pub trait Transport: Send {
    /// Accepts connections from `peer`. Connections from peers that were not admitted are closed,
    /// which tells them that this node has no pair with them.
    fn admit(&mut self, peer: Epoch);

    /// Opens the connection that sends chunks to `peer`. Tries `kinds` in order, then `tcp`.
    /// Reports failure as [`TransportEvent::Closed`].
    fn open(&mut self, peer: Epoch, endpoint: &str, kinds: Vec<TransferKind>);

    /// Queues `blocks` behind the chunks that are already queued for this peer.
    fn send(&mut self, peer: Epoch, chunk: ChunkId, blocks: &[BlockId]) -> Result<(), DataError>;

    /// Allows `peer` to write this chunk into `blocks`.
    fn post(&mut self, peer: Epoch, chunk: ChunkId, blocks: &[BlockId]) -> Result<(), DataError>;

    /// Drops the transfer's queued chunks and posted blocks.
    fn cancel(&mut self, peer: Epoch, transfer: TransferId) -> Released;

    /// Closes both connections with `peer` and rejects new ones. No event about them follows.
    fn dismiss(&mut self, peer: Epoch);

    /// Returns whether `connection` is still in use. It may have been closed or replaced while its
    /// [`TransportEvent::Closed`] was queued.
    fn is_present(&self, peer: Epoch, connection: u64) -> bool;

    /// Closes everything and returns the names of the threads still running at `deadline`.
    fn shutdown(&mut self, deadline: Instant) -> Vec<String>;
}

/// Id of one chunk of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkId {
    pub transfer: TransferId,
    /// Number of the chunk in the transfer.
    pub index: u32,
}

/// Event from the threads of a transport to the driver.
#[derive(Clone, Debug, PartialEq)]
pub enum TransportEvent {
    /// Event of one transfer.
    Data(DataEvent),
    /// A connection could not be opened or has closed.
    Closed { peer: Epoch, connection: u64, reason: String },
}

/// When a cancelled transfer releases its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    Now,
    /// Reported by a later event.
    Later,
}

/// Reason why a chunk cannot be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error("cannot move the chunk: the peer is not connected")]
    NotOpen,
    #[error("cannot queue the chunk: {queued} chunks already wait for the peer, the maximum")]
    QueueFull { queued: usize },
}
