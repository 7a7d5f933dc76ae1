//! Failure path of either side of a transfer.
//!
//! 1. The transport releases the blocks, if it holds any.
//! 2. After the release, the final event is emitted: the node may free the blocks.
//! 3. `ABORT` is sent to the peer until it answers or a lease has passed.
//!
//! Step 3 runs in parallel with steps 1 and 2. An `ABORT` by the peer is answered with `ABORT_ACK`
//! after step 2.

use std::time::Instant;

use super::{
    event_context::{Action, EventContext, Retry},
    tombstone::Tombstone,
    transfer::{Phase, Transfer},
};
use crate::{
    api::{Event, TransferFailure},
    config::LEASE,
    control::{AbortCause, Body},
};

/// Message to the peer about the abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AbortMessage {
    /// No message: the peer does not know the transfer.
    Nothing,
    /// `ABORT`, retransmitted until it is answered.
    Abort,
    /// One `ABORT`, because the connection is closing.
    AbortOnce,
    /// `ABORT_ACK` after the release: the peer has aborted.
    AbortAck,
}

pub(super) struct Aborting {
    pub cause: AbortCause,
    pub reason: String,
    /// Final event, until it is emitted. `None` from the start if the node never started the
    /// transfer.
    event: Option<Event>,
    /// Whether the transport still holds blocks.
    releasing: bool,
    owes_abort_ack: bool,
    /// Retransmission of `ABORT` and its time-out; `None` once answered.
    abort: Option<(Retry, Instant)>,
}

impl Aborting {
    /// Returns the tombstone once the abort is complete.
    pub(super) fn tombstone(&self) -> Option<Tombstone> {
        let is_over = !self.is_unfinished() && self.abort.is_none();
        is_over.then(|| Tombstone::Failed { cause: self.cause, reason: self.reason.clone() })
    }

    /// Returns whether the final event is still to come.
    pub(super) fn is_unfinished(&self) -> bool {
        self.releasing || self.event.is_some()
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.abort.as_ref().map(|(retry, until)| retry.at.min(*until))
    }
}

impl Transfer {
    /// Starts the abort, unless the transfer is already over.
    pub(super) fn fail(
        &mut self,
        context: &mut EventContext,
        failure: TransferFailure,
        message: AbortMessage,
    ) {
        let releasing = match &self.phase {
            Phase::Aborting(_) | Phase::Complete => return,
            Phase::Sending(sending) => sending.chunks.are_read(),
            Phase::Receiving(receiving) => receiving.is_written(),
            Phase::Expecting { .. } | Phase::Early { .. } | Phase::Connecting { .. } => false,
        };
        if releasing {
            context.act(Action::Cancel { peer: self.peer.epoch, transfer: self.id });
        }
        self.phase = Phase::Aborting(Aborting {
            cause: cause_of(&failure),
            reason: failure.to_string(),
            event: self.is_begun.then(|| self.side.failed(self.id, failure)),
            releasing,
            owes_abort_ack: message == AbortMessage::AbortAck,
            abort: (message == AbortMessage::Abort)
                .then(|| (Retry::start(context.now), context.now + LEASE)),
        });
        if matches!(message, AbortMessage::Abort | AbortMessage::AbortOnce) {
            self.send_abort(context);
        }
        self.emit_if_released(context);
    }

    pub(super) fn on_released(&mut self, context: &mut EventContext) {
        if let Phase::Aborting(aborting) = &mut self.phase {
            aborting.releasing = false;
            self.emit_if_released(context);
        }
    }

    pub(super) fn on_abort(
        &mut self,
        context: &mut EventContext,
        cause: AbortCause,
        reason: String,
    ) {
        if let Phase::Aborting(aborting) = &mut self.phase {
            aborting.owes_abort_ack = true;
            return self.emit_if_released(context);
        }
        self.fail(context, self.peer.aborted(cause, reason), AbortMessage::AbortAck);
    }

    pub(super) fn on_abort_ack(&mut self) {
        if let Phase::Aborting(aborting) = &mut self.phase {
            aborting.abort = None;
        }
    }

    /// Stops sending messages: the connection to the peer is lost.
    pub(super) fn stop_abort_messages(&mut self) {
        if let Phase::Aborting(aborting) = &mut self.phase {
            aborting.abort = None;
            aborting.owes_abort_ack = false;
        }
    }

    pub(super) fn on_abort_deadline(&mut self, context: &mut EventContext) {
        let Phase::Aborting(aborting) = &mut self.phase else { return };
        let Some((retry, until)) = &mut aborting.abort else { return };
        if context.now >= *until {
            aborting.abort = None;
        } else if retry.is_due(context.now) {
            context.counters.control_resent += 1;
            self.send_abort(context);
        }
    }

    fn send_abort(&self, context: &mut EventContext) {
        let Phase::Aborting(Aborting { cause, reason, .. }) = &self.phase else { return };
        let abort = Body::Abort { transfer: self.id, cause: *cause, reason: reason.clone() };
        context.send_traced(self.peer.epoch, abort, &self.traceparent);
    }

    fn emit_if_released(&mut self, context: &mut EventContext) {
        let Phase::Aborting(aborting) = &mut self.phase else { return };
        if aborting.releasing {
            return;
        }
        if let Some(event) = aborting.event.take() {
            context.emit(event);
        }
        if std::mem::take(&mut aborting.owes_abort_ack) {
            let ack = Body::AbortAck { transfer: self.id };
            context.send_traced(self.peer.epoch, ack, &self.traceparent);
        }
    }
}

/// Returns the cause for the `ABORT` message.
fn cause_of(failure: &TransferFailure) -> AbortCause {
    match failure {
        TransferFailure::Refused { .. } => AbortCause::Mismatch,
        TransferFailure::PeerLost { .. }
        | TransferFailure::PeerAborted { .. }
        | TransferFailure::Aborted { .. }
        | TransferFailure::Deadline { .. }
        | TransferFailure::Damaged { .. }
        | TransferFailure::Protocol { .. } => AbortCause::Unspecified,
    }
}
