//! State and steps that are the same on both sides of a transfer. `sender` and `receiver` add the
//! steps of one side, and `abort` adds the failure path of either side.

use std::time::{Duration, Instant};

use super::{
    abort::{AbortMessage, Aborting},
    event_context::{EventContext, Retry},
    receiver::Receiving,
    sender::Sending,
    tombstone::Tombstone,
};
use crate::{
    api::{Event, Peer, TransferFailure, TransferId},
    config::LEASE,
    control::Reserve,
};

/// This node's side of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Sender,
    Receiver,
}

impl Side {
    pub(super) fn failed(self, transfer: TransferId, failure: TransferFailure) -> Event {
        match self {
            Side::Sender => Event::SendFailed { transfer, failure },
            Side::Receiver => Event::ReceiveFailed { transfer, failure },
        }
    }
}

pub(super) struct Transfer {
    pub id: TransferId,
    pub peer: Peer,
    pub side: Side,
    /// Trace context of the node. Before `Send`, a sender has the receiver's trace context.
    pub traceparent: String,
    /// Whether the node has started the transfer and must get a final event. A sender's node starts
    /// it with `Send`.
    pub is_begun: bool,
    /// Deadline of the whole transfer, set by the node.
    pub deadline: Instant,
    /// End of the lease. Messages and heartbeats of the peer that name the transfer renew the
    /// lease. The first lease of a receiver lasts until the sender's node must have started the
    /// transfer.
    pub lease: Instant,
    /// Duration of the lease, for the error text at its end.
    pub lease_time: Duration,
    /// Retransmission timer of unanswered messages.
    pub retry: Retry,
    pub phase: Phase,
}

pub(super) enum Phase {
    /// Sender: only `Send` has arrived. No block is held, so no lease applies.
    Expecting { prompt_hash: u128 },
    /// Sender: only `RESERVE` has arrived.
    Early { reserve: Reserve },
    /// Sender: the node and the receiver have started the transfer.
    Sending(Sending),
    /// Receiver: the pair is not connected yet.
    Connecting { reserve: Reserve },
    /// Receiver: `RESERVE` was sent.
    Receiving(Receiving),
    /// Sender: delivered. Receiver: arrived.
    Complete,
    /// The transfer has failed, and blocks, events or messages are left to handle.
    Aborting(Aborting),
}

impl Transfer {
    /// Creates a transfer that the node has started.
    pub(super) fn begin(
        context: &EventContext,
        id: TransferId,
        peer: Peer,
        deadline: Duration,
        traceparent: String,
        phase: Phase,
    ) -> Self {
        let side = match phase {
            Phase::Connecting { .. } => Side::Receiver,
            _ => Side::Sender,
        };
        Self {
            id,
            peer,
            side,
            traceparent,
            is_begun: true,
            deadline: context.now + deadline,
            lease: context.now + LEASE,
            lease_time: LEASE,
            retry: Retry::start(context.now),
            phase,
        }
    }

    /// Aborts on behalf of the node. The tombstone answers a `RESERVE` that arrives later.
    pub(super) fn abort(&mut self, context: &mut EventContext, reason: String) {
        self.fail(context, TransferFailure::Aborted { reason }, self.abort_message());
    }

    pub(super) fn on_data_failed(&mut self, context: &mut EventContext, reason: String) {
        self.fail(context, TransferFailure::Aborted { reason }, AbortMessage::Abort);
    }

    pub(super) fn on_peer_lost(&mut self, context: &mut EventContext, failure: TransferFailure) {
        let message = match self.phase {
            Phase::Connecting { .. } => AbortMessage::Nothing,
            _ => AbortMessage::AbortOnce,
        };
        self.fail(context, failure, message);
        self.stop_abort_messages();
    }

    /// Handles a peer that has reconnected and dropped its transfers with this node. The peer may
    /// still send `RESERVE` for an expected transfer. If a receiver got no chunk, the peer may not
    /// know the reservation, so `RESERVE` is sent again.
    pub(super) fn on_pair_anew(&mut self, context: &mut EventContext) {
        match &mut self.phase {
            Phase::Expecting { .. } => {}
            Phase::Connecting { .. } => self.on_pair_up(context),
            Phase::Receiving(receiving) if receiving.chunks.is_empty() => {
                receiving.is_named = false;
                self.retry = Retry::start(context.now);
                self.resend(context);
            }
            _ => {
                let reason = "the peer reconnected and dropped its transfers".to_owned();
                self.fail(context, self.peer.lost(reason), AbortMessage::Abort);
            }
        }
    }

    /// Fails the transfer, because the peer has violated the protocol.
    pub(super) fn broken(&mut self, context: &mut EventContext, violation: String) {
        let peer = self.peer.node_id.clone();
        self.fail(context, TransferFailure::Protocol { peer, violation }, AbortMessage::Abort);
    }

    /// Begins a lease of this duration.
    pub(super) fn begin_lease(&mut self, now: Instant, duration: Duration) {
        (self.lease, self.lease_time) = (now + duration, duration);
    }

    /// Renews the lease: the peer has named the transfer or sent a message about it. A sender that
    /// names the transfer has received `RESERVE`.
    pub(super) fn renew(&mut self, now: Instant) {
        self.begin_lease(now, LEASE);
        if let Phase::Receiving(receiving) = &mut self.phase {
            receiving.is_named = true;
        }
    }

    /// Retransmits unanswered messages.
    pub(super) fn resend(&mut self, context: &mut EventContext) {
        match &self.phase {
            Phase::Sending(_) => self.resend_chunks_and_done(context),
            Phase::Receiving(receiving) if !receiving.is_named => {
                context.counters.control_resent += 1;
                self.send_reserve(context);
            }
            _ => {}
        }
    }

    pub(super) fn on_deadline(&mut self, context: &mut EventContext) {
        if self.is_over() {
            return self.on_abort_deadline(context);
        }
        if context.now >= self.deadline {
            let waiting_for = self.waiting_for().to_owned();
            return self.fail(
                context,
                TransferFailure::Deadline { waiting_for },
                self.abort_message(),
            );
        }
        if self.is_leased() && context.now >= self.lease {
            let reason = format!(
                "the peer has not named the transfer in a heartbeat for {} s",
                self.lease_time.as_secs()
            );
            return self.fail(context, self.peer.lost(reason), self.abort_message());
        }
        if self.awaits_answer() && self.retry.is_due(context.now) {
            self.resend(context);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Aborting(aborting) => aborting.next_deadline(),
            Phase::Complete => None,
            _ => {
                let lease = self.is_leased().then_some(self.lease);
                let retry = self.awaits_answer().then_some(self.retry.at);
                [lease, retry].into_iter().flatten().chain([self.deadline]).min()
            }
        }
    }

    pub(super) fn is_early(&self) -> bool {
        matches!(self.phase, Phase::Early { .. })
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Aborting(_) | Phase::Complete)
    }

    /// Returns whether heartbeats name the transfer.
    pub(super) fn is_wanted(&self) -> bool {
        matches!(self.phase, Phase::Sending(_) | Phase::Connecting { .. } | Phase::Receiving(_))
    }

    /// Returns whether heartbeats name the transfer as awaiting `RESERVE`.
    pub(super) fn is_awaiting(&self) -> bool {
        matches!(self.phase, Phase::Expecting { .. })
    }

    /// Returns whether the node still has to get its final event.
    pub(super) fn is_unfinished(&self) -> bool {
        match &self.phase {
            Phase::Aborting(aborting) => aborting.is_unfinished(),
            _ => self.is_wanted() || self.is_awaiting(),
        }
    }

    /// Returns the outcome once the transfer is over.
    pub(super) fn tombstone(&self) -> Option<Tombstone> {
        match &self.phase {
            Phase::Complete => Some(Tombstone::Complete),
            Phase::Aborting(aborting) => aborting.tombstone(),
            _ => None,
        }
    }

    /// Returns the message for an abort. Before `RESERVE` the peer may not know the transfer.
    fn abort_message(&self) -> AbortMessage {
        match self.phase {
            Phase::Expecting { .. } | Phase::Connecting { .. } => AbortMessage::Nothing,
            _ => AbortMessage::Abort,
        }
    }

    /// Returns whether the lease applies. While a sender awaits `RESERVE`, the receiver may not
    /// know the transfer and cannot renew the lease.
    fn is_leased(&self) -> bool {
        !self.is_over() && !self.is_awaiting()
    }

    fn awaits_answer(&self) -> bool {
        match &self.phase {
            Phase::Sending(sending) => sending.done.is_some() || sending.chunks.has_unanswered(),
            Phase::Receiving(receiving) => !receiving.is_named,
            _ => false,
        }
    }

    fn waiting_for(&self) -> &'static str {
        match &self.phase {
            Phase::Expecting { .. } => "RESERVE",
            Phase::Early { .. } => "this node's Prefill call",
            Phase::Sending(sending) if sending.done.is_some() => "ACK",
            Phase::Sending(sending) if sending.finish.is_some() => "the last chunks to be sent",
            Phase::Sending(_) => "this node's KV",
            Phase::Connecting { .. } => "HELLO_OK",
            Phase::Receiving(receiving) if !receiving.is_named => "an answer to RESERVE",
            Phase::Receiving(receiving) if receiving.done.is_some() => "the last chunks",
            Phase::Receiving(_) => "the sender's KV",
            Phase::Complete | Phase::Aborting(_) => "nothing",
        }
    }
}
