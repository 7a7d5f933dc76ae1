//! The transfer protocol as pure state machines.
//!
//! No socket, clock or thread: [`Core`] is told what happened and what time it is, and answers with
//! [`Action`]s and the next deadline. Whoever runs it calls
//!
//! * [`Core::handle_command`], [`Core::handle_control`], [`Core::handle_data`] and
//!   [`Core::handle_peer_failed`] when something happens,
//! * [`Core::on_deadline`] when [`Core::next_deadline`] has come,
//! * [`Core::poll_action`] after each of these until it returns `None`, and does what it says.
//!
//! [`pair`] is two processes that know each other, [`sender`] and [`receiver`] are the two sides of
//! one transfer, `ending` is how either side comes to its end, [`core`] routes between them.
//!
//! What holds at all times:
//! * A transfer that the node has begun ends with exactly one final event.
//! * `Arrived` is emitted only when every reserved block was written and `DONE` matches.
//! * A transfer that the node has begun began under the weights that the process has now.
//! * A failed event is emitted only when the transport has let go of every block of the transfer.
//! * Whatever is lost, blocks are back within lease + 0.5 s of the moment in which the other side gave
//!   the transfer up, ended it, died, or failed to begin it: only a side whose node wants the transfer
//!   names it, and a name is all that renews a lease.
//! * Only pairs with work speak; a pair is lost as a whole.

mod abort;
mod chunks;
pub mod core;
pub mod identity;
pub mod pair;
pub mod receiver;
mod retry;
pub mod sender;
mod tombstone;

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use kernels::BlockId;

pub use self::core::Core;
use crate::{
    api::{Epoch, Event, Identity, PeerAddress, TransferFailure, TransferId},
    config::TransferLimits,
    control::{AbortCause, Body, ControlMessage},
};

/// What the shell is to do, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Make the outbound queue and socket for control messages to this peer.
    Connect {
        peer: PeerAddress,
    },
    /// Let go of everything that leads to this peer, data connections included, after what is
    /// queued for it has had a short chance to leave.
    Disconnect {
        peer: Epoch,
    },
    /// May be lost; whatever matters is sent again.
    SendControl {
        peer: Epoch,
        message: ControlMessage,
    },
    /// Make the data connection on which chunks go to this peer.
    OpenData {
        peer: Epoch,
        endpoint: String,
        /// The transport that both agreed on, and what else both offered, best first, as it was offered.
        transports: Vec<String>,
    },
    /// End the data connections with this peer, in both directions; new ones may follow. Nothing is
    /// reported of the old ones any more.
    CloseData {
        peer: Epoch,
    },
    /// Let this chunk, and nothing else, be written into these blocks.
    PostReceive {
        peer: Epoch,
        transfer: TransferId,
        chunk: u32,
        blocks: Vec<BlockId>,
    },
    /// Send the contents of these blocks, after the chunks given before.
    SendChunk {
        peer: Epoch,
        transfer: TransferId,
        chunk: u32,
        blocks: Vec<BlockId>,
    },
    /// Stop writing into blocks of this transfer; answered by one [`DataEvent::ReceiveReleased`].
    CancelReceive {
        peer: Epoch,
        transfer: TransferId,
    },
    /// Stop reading blocks of this transfer; answered by one [`DataEvent::SendReleased`].
    CancelSend {
        peer: Epoch,
        transfer: TransferId,
    },
    Emit(Event),
}

/// What the transport reports.
#[derive(Clone, Debug, PartialEq)]
pub enum DataEvent {
    /// The chunk has left and its blocks are no longer read. `integrity` is over all its bytes.
    Sent { transfer: TransferId, chunk: u32, integrity: u64 },
    /// The chunk's blocks are written. `integrity` is over the bytes as they came.
    Received { transfer: TransferId, chunk: u32, integrity: u64 },
    /// This transfer's blocks are no longer read.
    SendReleased { transfer: TransferId },
    /// This transfer's blocks are no longer written.
    ReceiveReleased { transfer: TransferId },
    /// A chunk of the transfer cannot be sent or received.
    Failed { transfer: TransferId, reason: String },
    /// A data connection to or from the peer could not be made or has ended.
    Closed { peer: Epoch, reason: String },
}

/// The process that runs this core.
#[derive(Clone, Debug)]
pub struct Local {
    pub node_id: String,
    pub epoch: Epoch,
    /// The weight version changes by [`crate::api::Command::WeightsChanged`].
    pub identity: Identity,
    pub control_endpoint: String,
    pub data_endpoint: String,
    /// Best first.
    pub transports: Vec<String>,
    /// Best first.
    pub integrity: Vec<String>,
    /// Bytes of one block, equal on both ends of a pair.
    pub block_bytes: usize,
    pub limits: TransferLimits,
}

impl Local {
    /// Blocks that travel in one chunk.
    fn chunk_blocks(&self) -> usize {
        (self.limits.chunk_bytes_max / self.block_bytes.max(1)).max(1)
    }
}

/// What the core has counted since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub control_resent: u64,
    pub control_refused: BTreeMap<&'static str, u64>,
    pub arrived: u64,
    pub receive_failed: u64,
    pub delivered: u64,
    pub send_failed: u64,
}

/// A peer as its transfers know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub node_id: String,
    pub epoch: Epoch,
}

impl Peer {
    /// What it means here that the peer has aborted.
    fn aborted(&self, cause: AbortCause, reason: String) -> TransferFailure {
        let peer = self.node_id.clone();
        match cause {
            AbortCause::GivenUp => TransferFailure::PeerAborted { peer, reason },
            AbortCause::Mismatch => TransferFailure::Refused { peer, reason },
        }
    }

    /// What a start is told whose transfer has ended already.
    fn ended_before(&self, cause: AbortCause, reason: &str) -> TransferFailure {
        let reason = format!("the transfer had ended before: {reason}");
        match cause {
            AbortCause::GivenUp => TransferFailure::Aborted { reason },
            AbortCause::Mismatch => TransferFailure::Refused { peer: self.node_id.clone(), reason },
        }
    }
}

/// One turn of the core: the time, who we are, and where its consequences go.
pub struct Turn<'a> {
    pub now: Instant,
    pub local: &'a Local,
    pub actions: &'a mut VecDeque<Action>,
    pub counters: &'a mut Counters,
}

impl Turn<'_> {
    fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    fn send(&mut self, peer: Epoch, body: Body) {
        self.send_traced(peer, body, "");
    }

    fn send_traced(&mut self, peer: Epoch, body: Body, traceparent: &str) {
        let message = ControlMessage { traceparent: traceparent.to_owned(), body };
        self.act(Action::SendControl { peer, message });
    }

    fn emit(&mut self, event: Event) {
        match &event {
            Event::Arrived { .. } => self.counters.arrived += 1,
            Event::ReceiveFailed { .. } => self.counters.receive_failed += 1,
            Event::Delivered { .. } => self.counters.delivered += 1,
            Event::SendFailed { .. } => self.counters.send_failed += 1,
            Event::Ready { .. } => {}
        }
        self.act(Action::Emit(event));
    }

    fn refuse(&mut self, reason: &'static str) {
        *self.counters.control_refused.entry(reason).or_default() += 1;
    }
}
