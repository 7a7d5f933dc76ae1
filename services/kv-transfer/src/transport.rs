//! The seam between the protocol and whatever carries the bytes.

use std::time::Instant;

use kernels::{ArenaError, BlockId};

use crate::{
    api::{Epoch, TransferId},
    protocol::DataEvent,
    transfer_kind::TransferKind,
};

/// Moves blocks. Driven by one thread; its own threads tell that thread by [`TransportEvent`]s.
///
/// What a transport promises:
/// * It writes only into blocks that were posted, and reads only from blocks that were sent.
/// * Every `send` ends in `Sent`, every `post` in `Received`, unless the transfer is cancelled, a
///   chunk of it fails (`Failed`) or the connection ends ([`TransportEvent::Closed`]).
/// * After `cancel_*` answered [`Released::Now`], or reported `SendReleased` / `ReceiveReleased`,
///   it holds no block of that transfer. Either happens soon, whatever the peer does.
/// * A stopped peer delays nobody else.
pub trait Transport: Send {
    /// From now on `peer` may connect. Whoever may not is turned away, and so learns that it has no
    /// pair here.
    fn admit(&mut self, peer: Epoch);

    /// Makes the connection on which chunks go to `peer`, by the first of these transports that turns out to
    /// work, or by `tcp`. Failure is reported as its end.
    fn open(&mut self, peer: Epoch, endpoint: &str, kinds: Vec<TransferKind>);

    /// Sends these blocks after those given before.
    fn send(
        &mut self,
        peer: Epoch,
        transfer: TransferId,
        chunk: u32,
        blocks: &[BlockId],
    ) -> Result<(), DataError>;

    /// Lets this chunk from this peer be written into these blocks.
    fn post(
        &mut self,
        peer: Epoch,
        transfer: TransferId,
        chunk: u32,
        blocks: &[BlockId],
    ) -> Result<(), DataError>;

    fn cancel_send(&mut self, peer: Epoch, transfer: TransferId) -> Released;

    fn cancel_receive(&mut self, peer: Epoch, transfer: TransferId) -> Released;

    /// Ends both connections with this peer. Nothing is reported of them any more.
    fn close(&mut self, peer: Epoch);

    /// Ends both connections, and admits none from this peer.
    fn dismiss(&mut self, peer: Epoch);

    /// Whether this connection, of which a [`TransportEvent::Closed`] tells, is still the one in use: it may
    /// have been closed or replaced while the report was on its way.
    fn is_present(&self, peer: Epoch, connection: u64) -> bool;

    /// Ends everything; names the threads that had not ended at `deadline`.
    fn shutdown(&mut self, deadline: Instant) -> Vec<String>;
}

/// What a transport's threads tell the driver.
#[derive(Clone, Debug, PartialEq)]
pub enum TransportEvent {
    /// Of one transfer.
    Data(DataEvent),
    /// A connection could not be made or has ended.
    Closed { peer: Epoch, connection: u64, reason: String },
}

/// When a cancelled transfer's blocks are let go of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    Now,
    /// Reported when it has happened.
    Later,
}

/// Why a chunk cannot be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error("that peer is not connected")]
    NotOpen,
    #[error("{queued} chunks wait for that peer, the most")]
    QueueFull { queued: usize },
}
