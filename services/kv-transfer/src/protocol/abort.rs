//! Failure path of either side of a transfer.
//!
//! 1. The transport releases the blocks, if it holds any.
//! 2. After the release, the final event is emitted: the node may free the blocks.
//! 3. `ABORT` is sent to the peer until it answers or a lease has passed.
//!
//! Step 3 runs in parallel to the others. An `ABORT` by the peer is answered with `ABORT_ACK` after
//! step 2.

use std::time::Instant;

use super::{Action, Peer, Turn, retry::Retry, tombstone::Tombstone};
use crate::{
    api::{Event, TransferFailure, TransferId},
    config::LEASE,
    control::{AbortCause, Body},
};

/// Message to the peer about the abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tell {
    /// No message: the peer does not know the transfer.
    Nothing,
    /// `ABORT`, retransmitted until it is answered.
    Abort,
    /// One `ABORT`, because the connection is closing.
    AbortOnce,
    /// `ABORT_ACK` after the release: the peer has aborted.
    AbortAck,
}

#[derive(Debug)]
pub struct Aborting {
    transfer: TransferId,
    peer: Peer,
    traceparent: String,
    cause: AbortCause,
    reason: String,
    /// Final event, until it is emitted. `None` from the start if the node never started the
    /// transfer.
    event: Option<Event>,
    /// The transport still holds blocks.
    releasing: bool,
    owes_abort_ack: bool,
    /// Retransmission of `ABORT` and its time-out; `None` once answered.
    abort: Option<(Retry, Instant)>,
}

impl Aborting {
    /// Starts the abort. `event` is the final event for the node, if the node knows the transfer.
    /// `cancel` makes the transport release the blocks, if it holds any.
    pub fn begin(
        turn: &mut Turn<'_>,
        transfer: TransferId,
        peer: Peer,
        traceparent: String,
        failure: &TransferFailure,
        event: Option<Event>,
        cancel: Option<Action>,
        tell: Tell,
    ) -> Self {
        let mut aborting = Self {
            transfer,
            peer,
            traceparent,
            cause: cause_of(failure),
            reason: failure.to_string(),
            event,
            releasing: cancel.is_some(),
            owes_abort_ack: tell == Tell::AbortAck,
            abort: (tell == Tell::Abort).then(|| (Retry::start(turn.now), turn.now + LEASE)),
        };
        turn.actions.extend(cancel);
        if matches!(tell, Tell::Abort | Tell::AbortOnce) {
            aborting.send_abort(turn);
        }
        aborting.emit_if_released(turn);
        aborting
    }

    pub fn cause(&self) -> AbortCause {
        self.cause
    }

    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Returns the tombstone once nothing is left to do.
    pub fn tombstone(&self) -> Option<Tombstone> {
        let is_over = !self.releasing && self.event.is_none() && self.abort.is_none();
        is_over.then(|| Tombstone::Failed { cause: self.cause, reason: self.reason.clone() })
    }

    /// Returns whether the final event is still to come.
    pub fn is_unfinished(&self) -> bool {
        self.releasing || self.event.is_some()
    }

    pub fn on_released(&mut self, turn: &mut Turn<'_>) {
        self.releasing = false;
        self.emit_if_released(turn);
    }

    pub fn on_abort(&mut self, turn: &mut Turn<'_>) {
        self.owes_abort_ack = true;
        self.emit_if_released(turn);
    }

    pub fn on_abort_ack(&mut self) {
        self.abort = None;
    }

    /// The connection to the peer is gone: no message can be sent.
    pub fn on_peer_lost(&mut self) {
        self.abort = None;
        self.owes_abort_ack = false;
    }

    pub fn on_deadline(&mut self, turn: &mut Turn<'_>) {
        let Some((retry, until)) = &mut self.abort else { return };
        if turn.now >= *until {
            self.abort = None;
        } else if retry.is_due(turn.now) {
            turn.counters.control_resent += 1;
            self.send_abort(turn);
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.abort.as_ref().map(|(retry, until)| retry.at().min(*until))
    }

    fn send_abort(&self, turn: &mut Turn<'_>) {
        let (transfer, cause, reason) = (self.transfer, self.cause, self.reason.clone());
        let abort = Body::Abort { transfer, cause, reason };
        turn.send_traced(self.peer.epoch, abort, &self.traceparent);
    }

    fn emit_if_released(&mut self, turn: &mut Turn<'_>) {
        if self.releasing {
            return;
        }
        if let Some(event) = self.event.take() {
            turn.emit(event);
        }
        if std::mem::take(&mut self.owes_abort_ack) {
            let ack = Body::AbortAck { transfer: self.transfer };
            turn.send_traced(self.peer.epoch, ack, &self.traceparent);
        }
    }
}

/// Returns the cause for the `ABORT` message.
fn cause_of(failure: &TransferFailure) -> AbortCause {
    match failure {
        TransferFailure::Refused { .. } | TransferFailure::WeightsChanged { .. } => {
            AbortCause::Mismatch
        }
        TransferFailure::PeerLost { .. }
        | TransferFailure::PeerAborted { .. }
        | TransferFailure::Aborted { .. }
        | TransferFailure::Deadline { .. }
        | TransferFailure::Damaged { .. }
        | TransferFailure::Protocol { .. } => AbortCause::Unspecified,
    }
}
