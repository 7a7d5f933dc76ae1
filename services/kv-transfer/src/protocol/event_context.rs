//! Context in which the protocol handles an event: the time, the local process, the actions that
//! follow, and the counters.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use kernels::BlockId;

use crate::{
    api::{Epoch, Event, Identity, Peer, PeerAddress, TransferFailure, TransferId},
    config::TransferLimits,
    control::{AbortCause, Body, CONTROL_REFUSALS, ControlMessage},
};

/// Blocks per reservation, so that `RESERVE` and `DONE` fit into a control message: 1.6 million
/// tokens.
pub(super) const RESERVED_BLOCKS_MAX: usize = 100_000;
/// Delay before the first retransmission: far longer than a round trip within a cluster, so that
/// slow answers cause no retransmission.
const RETRY_FIRST: Duration = Duration::from_millis(100);
/// Maximum delay between retransmissions: at least four of them fit into a lease.
const RETRY_MAX: Duration = Duration::from_millis(500);

/// Action for the driver. Actions are executed in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Create the queue and socket for control messages to this peer.
    Connect { peer: PeerAddress },
    /// Close the queue and the data connections of this peer. Queued messages may still be sent for
    /// a short time.
    Disconnect { peer: Epoch },
    /// Send a control message. It may be lost; important messages are retransmitted.
    SendControl { peer: Epoch, message: ControlMessage },
    /// Open the data connection that sends chunks to this peer. `transports` are the common
    /// transports: the agreed transport, then the others, best first.
    OpenData { peer: Epoch, endpoint: String, transports: Vec<String> },
    /// Close the data connections with this peer in both directions; new ones may follow. No event
    /// about the old ones follows.
    CloseData { peer: Epoch },
    /// Allow the peer to write this chunk, and nothing else, into these blocks.
    PostReceive { peer: Epoch, transfer: TransferId, chunk: u32, blocks: Vec<BlockId> },
    /// Send these blocks, after the chunks given before.
    SendChunk { peer: Epoch, transfer: TransferId, chunk: u32, blocks: Vec<BlockId> },
    /// Stop reads and writes of this transfer's blocks. One [`DataEvent::Released`] answers.
    Cancel { peer: Epoch, transfer: TransferId },
    /// Give this event to the node.
    Emit(Event),
}

/// Event from the transport.
#[derive(Clone, Debug, PartialEq)]
pub enum DataEvent {
    /// The chunk was sent and its blocks are no longer read. `integrity` covers all its bytes.
    Sent { transfer: TransferId, chunk: u32, integrity: u64 },
    /// The chunk's blocks are written. `integrity` covers the received bytes.
    Received { transfer: TransferId, chunk: u32, integrity: u64 },
    /// No read or write of this transfer's blocks is in flight.
    Released { transfer: TransferId },
    /// A chunk of the transfer cannot be sent or received.
    Failed { transfer: TransferId, reason: String },
}

/// The process that runs this core.
#[derive(Clone, Debug)]
pub struct Local {
    pub epoch: Epoch,
    pub identity: Identity,
    pub control_endpoint: String,
    pub data_endpoint: String,
    /// Best first.
    pub transports: Vec<String>,
    /// Best first.
    pub integrity: Vec<String>,
    /// Bytes of one block; equal on both nodes of a pair.
    pub block_bytes: usize,
    pub limits: TransferLimits,
}

/// The process in unit tests.
#[cfg(test)]
pub(crate) fn test_local() -> Local {
    Local {
        epoch: Epoch(1),
        identity: crate::api::test_identity(),
        control_endpoint: "tcp://node:1".to_owned(),
        data_endpoint: "tcp://node:2".to_owned(),
        transports: vec!["tcp".to_owned()],
        integrity: vec!["xxh3".to_owned()],
        block_bytes: 16,
        limits: TransferLimits::default(),
    }
}

/// Counters of the protocol since the start of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Retransmitted control messages.
    pub control_resent: u64,
    /// Rejected control messages, by reason.
    pub control_refused: BTreeMap<&'static str, u64>,
    /// Finished transfers: complete and failed, as receiver and as sender.
    pub arrived: u64,
    pub receive_failed: u64,
    pub delivered: u64,
    pub send_failed: u64,
}

impl Peer {
    /// Returns the local failure for an `ABORT` by the peer.
    pub(super) fn aborted(&self, cause: AbortCause, reason: String) -> TransferFailure {
        let peer = self.node_id.clone();
        match cause {
            AbortCause::Unspecified => TransferFailure::PeerAborted { peer, reason },
            AbortCause::Mismatch => TransferFailure::Refused { peer, reason },
        }
    }

    pub(super) fn lost(&self, reason: String) -> TransferFailure {
        TransferFailure::PeerLost { peer: self.node_id.clone(), reason }
    }

    /// Returns the failure for a start with the id of a finished transfer.
    pub(super) fn ended_before(&self, cause: AbortCause, reason: &str) -> TransferFailure {
        let reason = format!("the transfer has already ended: {reason}");
        match cause {
            AbortCause::Unspecified => TransferFailure::Aborted { reason },
            AbortCause::Mismatch => TransferFailure::Refused { peer: self.node_id.clone(), reason },
        }
    }
}

/// Context of the event in progress: its time, the local node, and the outputs.
pub struct EventContext {
    /// Time of the event.
    pub now: Instant,
    pub local: Local,
    pub actions: VecDeque<Action>,
    pub counters: Counters,
    /// Number of pairs created so far.
    pub pairs_created: u64,
}

impl EventContext {
    pub(super) fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    pub(super) fn send(&mut self, peer: Epoch, body: Body) {
        self.send_traced(peer, body, "");
    }

    pub(super) fn send_traced(&mut self, peer: Epoch, body: Body, traceparent: &str) {
        let message = ControlMessage { traceparent: traceparent.to_owned(), body };
        self.act(Action::SendControl { peer, message });
    }

    pub(super) fn emit(&mut self, event: Event) {
        match &event {
            Event::Arrived { .. } => self.counters.arrived += 1,
            Event::ReceiveFailed { .. } => self.counters.receive_failed += 1,
            Event::Delivered { .. } => self.counters.delivered += 1,
            Event::SendFailed { .. } => self.counters.send_failed += 1,
            Event::Ready { .. } => {}
        }
        self.act(Action::Emit(event));
    }

    pub(super) fn refuse(&mut self, reason: &'static str) {
        debug_assert!(CONTROL_REFUSALS.contains(&reason), "{reason} is not listed");
        *self.counters.control_refused.entry(reason).or_default() += 1;
    }
}

/// Retransmission timer with exponential back-off up to a maximum.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retry {
    /// Time of the next retransmission.
    pub at: Instant,
    pause: Duration,
}

impl Retry {
    pub(super) fn start(now: Instant) -> Self {
        Self { at: now + RETRY_FIRST, pause: RETRY_FIRST }
    }

    /// Returns whether to retransmit now, and then sets the next time.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        if now < self.at {
            return false;
        }
        self.pause = (self.pause * 2).min(RETRY_MAX);
        self.at = now + self.pause;
        true
    }
}
