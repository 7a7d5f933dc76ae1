//! How either side of a transfer comes to a bad end.
//!
//! 1. The transport is told to let go of the blocks, if it has any.
//! 2. When it has, the final event is emitted: the node may free the blocks.
//! 3. The peer is told, again and again until it has answered or a lease has passed.
//!
//! 2 and 3 go on side by side. A peer that said `ABORT` itself is answered `ABORT_ACK` after 2.

use std::time::Instant;

use super::{Action, Peer, Turn, retry::Retry, tombstone::Tombstone};
use crate::{
    api::{Event, TransferFailure, TransferId},
    config::LEASE,
    control::{AbortCause, Body},
};

/// What the peer hears of the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tell {
    /// It does not know of the transfer.
    Nothing,
    /// Until it has answered.
    Abort,
    /// The way to it is closing: whatever still gets through.
    AbortOnce,
    /// It aborted, and waits for our word that nothing of ours is in flight.
    AbortAck,
}

#[derive(Debug)]
pub struct Aborting {
    transfer: TransferId,
    peer: Peer,
    traceparent: String,
    cause: AbortCause,
    reason: String,
    /// Until it is emitted. `None` from the start when the node never began the transfer.
    event: Option<Event>,
    /// The transport has not let go yet.
    releasing: bool,
    owes_abort_ack: bool,
    /// Until the peer has answered `ABORT`, or `until`.
    abort: Option<(Retry, Instant)>,
}

impl Aborting {
    /// `event` tells the node of `failure`, if it is to be told; `cancel` is the action that makes
    /// the transport let go, where it has something.
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

    /// What is remembered once nothing is left to do.
    pub fn tombstone(&self) -> Option<Tombstone> {
        let is_over = !self.releasing && self.event.is_none() && self.abort.is_none();
        is_over.then(|| Tombstone::Failed { cause: self.cause, reason: self.reason.clone() })
    }

    /// The node has not had its final event yet.
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

    /// The way to the peer is gone: nothing more can be said.
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

/// What the peer is told of it.
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
        | TransferFailure::Protocol { .. } => AbortCause::GivenUp,
    }
}
