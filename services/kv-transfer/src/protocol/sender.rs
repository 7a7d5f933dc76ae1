//! The sending side of one transfer, at the prefill node.
//!
//! 1. `Expect` (from the node) and `RESERVE` (from the receiver) arrive in either order. Once both
//!    are here, the node gets `Ready`.
//! 2. The reservation is split into chunks. Each is announced by `CHUNK` until the receiver answers
//!    `CTS`: the first at once, the others a few ahead of the written blocks. So a fully written
//!    chunk usually goes to the transport without waiting for an answer.
//! 3. After `Finish` and the last sent chunk, `DONE` is sent until `ACK` arrives; then `Delivered`
//!    is emitted. Not earlier: the receiver could otherwise complete with blocks that this side has
//!    released or a transfer that it has aborted.
//! 4. Every failure goes through `abort`.

use std::time::{Duration, Instant};

use kernels::{BlockId, sampling::SampledToken};

use super::{
    Action, Peer, Turn,
    abort::{Aborting, Tell},
    chunks::Chunks,
    core::RESERVED_BLOCKS_MAX,
    identity::weights_difference,
    retry::Retry,
    tombstone::Tombstone,
};
use crate::{
    api::{Event, TransferFailure, TransferId, TransferStats},
    config::LEASE,
    control::{AbortCause, Body, Done, Reserve},
};

pub struct Outgoing {
    transfer: TransferId,
    peer: Peer,
    /// The node's trace context after `Expect`; before it, the receiver's.
    traceparent: String,
    /// `Expect` has arrived, so the node must get a final event.
    is_begun: bool,
    /// Deadline of the whole transfer, set by the node.
    deadline: Instant,
    /// End of the lease, which the receiver renews by naming the transfer. Applies after `RESERVE`.
    lease: Instant,
    phase: Phase,
}

enum Phase {
    /// Only `Expect` has arrived. No block is held, so no lease applies.
    Expecting {
        prompt_hash: u128,
    },
    /// Only `RESERVE` has arrived.
    Early {
        reserve: Reserve,
    },
    Sending(Sending),
    Delivered,
    Aborting(Aborting),
}

struct Sending {
    chunks: Chunks,
    /// Index and value of the first token, after `Finish`.
    finish: Option<(u32, SampledToken)>,
    done: Option<Done>,
    first_given: Option<Instant>,
    retry: Retry,
}

impl Outgoing {
    /// Starts with `Expect`.
    pub fn expect(
        turn: &Turn<'_>,
        transfer: TransferId,
        peer: Peer,
        prompt_hash: u128,
        deadline: Duration,
        traceparent: String,
    ) -> Self {
        Self {
            transfer,
            peer,
            traceparent,
            is_begun: true,
            deadline: turn.now + deadline,
            lease: turn.now + LEASE,
            phase: Phase::Expecting { prompt_hash },
        }
    }

    /// Starts with `RESERVE`, which is kept for one lease. It is not acknowledged: a named transfer
    /// counts as wanted, and this node has not asked for it yet, so the receiver's lease must run
    /// from its own start.
    pub fn early(turn: &Turn<'_>, peer: Peer, reserve: Reserve, traceparent: String) -> Self {
        Self {
            transfer: reserve.transfer,
            peer,
            traceparent,
            is_begun: false,
            deadline: turn.now + LEASE,
            lease: turn.now + LEASE,
            phase: Phase::Early { reserve },
        }
    }

    /// Handles `Expect` after a `RESERVE` that waits, has expired or was aborted.
    pub fn on_expect(
        &mut self,
        turn: &mut Turn<'_>,
        prompt_hash: u128,
        deadline: Duration,
        traceparent: String,
    ) {
        debug_assert!(!self.is_begun);
        self.is_begun = true;
        self.deadline = turn.now + deadline;
        let theirs = std::mem::replace(&mut self.traceparent, traceparent);
        match std::mem::replace(&mut self.phase, Phase::Expecting { prompt_hash }) {
            Phase::Early { reserve } => self.match_reserve(turn, prompt_hash, reserve, theirs),
            Phase::Aborting(aborting) => {
                let failure = self.peer.ended_before(aborting.cause(), aborting.reason());
                turn.emit(Event::SendFailed { transfer: self.transfer, failure });
                self.phase = Phase::Aborting(aborting);
            }
            begun => self.phase = begun,
        }
    }

    pub fn on_reserve(&mut self, turn: &mut Turn<'_>, reserve: Reserve, traceparent: String) {
        match &self.phase {
            Phase::Expecting { prompt_hash } => {
                let prompt_hash = *prompt_hash;
                self.match_reserve(turn, prompt_hash, reserve, traceparent);
            }
            // Retransmitted: the answer was lost.
            Phase::Sending(_) => self.name(turn),
            Phase::Early { .. } | Phase::Delivered | Phase::Aborting(_) => {}
        }
    }

    fn match_reserve(
        &mut self,
        turn: &mut Turn<'_>,
        prompt_hash: u128,
        reserve: Reserve,
        traceparent: String,
    ) {
        let (fingerprint, version) = (reserve.model_fingerprint, reserve.weight_version);
        if let Some(reason) = weights_difference(&turn.local.identity, fingerprint, version) {
            let failure = TransferFailure::Refused {
                peer: self.peer.node_id.clone(),
                reason: format!("RESERVE: {reason}"),
            };
            return self.fail(turn, failure, Tell::Abort);
        }
        let end_block = u32::try_from(reserve.blocks.len())
            .ok()
            .and_then(|block_count| reserve.first_block.checked_add(block_count));
        let problem = match end_block {
            _ if reserve.prompt_hash != prompt_hash => Err(format!(
                "RESERVE has prompt hash {:032x}; expected {prompt_hash:032x}",
                reserve.prompt_hash
            )),
            _ if reserve.blocks.len() > RESERVED_BLOCKS_MAX => Err(format!(
                "RESERVE has {} blocks; expected at most {RESERVED_BLOCKS_MAX}",
                reserve.blocks.len()
            )),
            None => Err(format!(
                "RESERVE starts at block {} and overflows; expected an end below 2^32",
                reserve.first_block
            )),
            Some(end_block) => Ok(end_block),
        };
        let end_block = match problem {
            Ok(end_block) => end_block,
            Err(detail) => return self.broken(turn, detail),
        };
        let first_block = reserve.first_block;
        self.phase = Phase::Sending(Sending {
            chunks: Chunks::new(first_block, end_block, turn.local.chunk_blocks()),
            finish: None,
            done: None,
            first_given: None,
            retry: Retry::start(turn.now),
        });
        self.lease = turn.now + LEASE;
        turn.emit(Event::Ready {
            transfer: self.transfer,
            first_block,
            block_count: reserve.blocks.len() as u32,
            traceparent,
        });
        self.announce(turn);
        // A `CHUNK` also acknowledges `RESERVE`; an empty reservation has none.
        if first_block == end_block {
            self.name(turn);
        }
    }

    /// Acknowledges `RESERVE` by a heartbeat that names the transfer.
    fn name(&self, turn: &mut Turn<'_>) {
        let named = Body::Heartbeat { transfers: vec![self.transfer], awaited: Vec::new() };
        turn.send(self.peer.epoch, named);
    }

    pub fn written(&mut self, turn: &mut Turn<'_>, first_block: u32, blocks: Vec<BlockId>) {
        let Phase::Sending(sending) = &mut self.phase else {
            if let Phase::Expecting { .. } = self.phase {
                self.misused(turn, "invalid command Written; expected Ready first".to_owned());
            }
            return;
        };
        match sending.chunks.add(first_block, &blocks) {
            Ok(()) => self.give(turn),
            Err(error) => self.misused(turn, error.to_string()),
        }
    }

    fn announce(&mut self, turn: &mut Turn<'_>) {
        let Phase::Sending(sending) = &mut self.phase else { return };
        while let Some(chunk) = sending.chunks.announce() {
            sending.retry = Retry::start(turn.now);
            let message = sending.chunks.message(self.transfer, chunk, turn.local.block_bytes);
            if let Some(message) = message {
                turn.send(self.peer.epoch, message);
            }
        }
    }

    pub fn finish(&mut self, turn: &mut Turn<'_>, first_index: u32, token: SampledToken) {
        let Phase::Sending(sending) = &mut self.phase else {
            if let Phase::Expecting { .. } = self.phase {
                self.misused(turn, "invalid command Finish; expected Ready first".to_owned());
            }
            return;
        };
        let due = sending.chunks.due();
        if !due.is_empty() {
            let reason = format!(
                "invalid command Finish; expected blocks {} to {} first",
                due.start, due.end
            );
            return self.misused(turn, reason);
        }
        sending.finish.get_or_insert((first_index, token));
        self.send_done_when_all_is_sent(turn);
    }

    pub fn on_clear_to_send(&mut self, turn: &mut Turn<'_>, chunk: u32) {
        let Phase::Sending(sending) = &mut self.phase else { return };
        match sending.chunks.clear(chunk) {
            Ok(true) => {
                sending.retry = Retry::start(turn.now);
                self.give(turn);
            }
            Ok(false) => {}
            Err(error) => self.broken(turn, error.to_string()),
        }
    }

    /// Gives written and cleared chunks to the transport. Each makes room to announce another.
    fn give(&mut self, turn: &mut Turn<'_>) {
        let Phase::Sending(sending) = &mut self.phase else { return };
        while let Some((chunk, blocks)) = sending.chunks.give() {
            let (peer, transfer) = (self.peer.epoch, self.transfer);
            turn.act(Action::SendChunk { peer, transfer, chunk, blocks });
            sending.first_given.get_or_insert(turn.now);
        }
        self.announce(turn);
    }

    pub fn on_sent(&mut self, turn: &mut Turn<'_>, chunk: u32, integrity: u64) {
        let Phase::Sending(sending) = &mut self.phase else { return };
        sending.chunks.sent(chunk, integrity);
        self.send_done_when_all_is_sent(turn);
    }

    fn send_done_when_all_is_sent(&mut self, turn: &mut Turn<'_>) {
        let Phase::Sending(sending) = &mut self.phase else { return };
        let Some((first_index, token)) = &sending.finish else { return };
        if sending.done.is_some() {
            return;
        }
        let Some(integrity) = sending.chunks.integrity() else { return };
        let done = Done {
            transfer: self.transfer,
            chunk_count: sending.chunks.count(),
            first_index: *first_index,
            token: token.clone(),
            integrity,
            // Equal to those in `RESERVE`; otherwise the transfer would have failed.
            model_fingerprint: turn.local.identity.model_fingerprint,
            weight_version: turn.local.identity.weight_version,
        };
        sending.done = Some(done.clone());
        sending.retry = Retry::start(turn.now);
        turn.send_traced(self.peer.epoch, Body::Done(done), &self.traceparent);
    }

    pub fn on_ack(&mut self, turn: &mut Turn<'_>) {
        let Phase::Sending(sending) = &self.phase else { return };
        if sending.done.is_none() {
            return self.broken(turn, "ACK before DONE was sent".to_owned());
        }
        let stats = TransferStats {
            bytes: (sending.chunks.block_count() * turn.local.block_bytes) as u64,
            chunks: sending.chunks.count(),
            elapsed: sending
                .first_given
                .map_or(Duration::ZERO, |first| turn.now.saturating_duration_since(first)),
        };
        self.phase = Phase::Delivered;
        turn.emit(Event::Delivered { transfer: self.transfer, stats });
    }

    pub fn on_abort(&mut self, turn: &mut Turn<'_>, cause: AbortCause, reason: String) {
        if let Phase::Aborting(aborting) = &mut self.phase {
            return aborting.on_abort(turn);
        }
        self.fail(turn, self.peer.aborted(cause, reason), Tell::AbortAck);
    }

    pub fn on_abort_ack(&mut self) {
        if let Phase::Aborting(aborting) = &mut self.phase {
            aborting.on_abort_ack();
        }
    }

    pub fn on_released(&mut self, turn: &mut Turn<'_>) {
        if let Phase::Aborting(aborting) = &mut self.phase {
            aborting.on_released(turn);
        }
    }

    /// Aborts on behalf of the node. If the receiver's `RESERVE` arrives later, the tombstone
    /// answers it.
    pub fn abort(&mut self, turn: &mut Turn<'_>, reason: String) {
        let tell = self.tell();
        self.fail(turn, TransferFailure::Aborted { reason }, tell);
    }

    /// A transfer that the node has started uses the old weights. A `RESERVE` without `Expect`
    /// names its weights and is checked when `Expect` arrives.
    pub fn on_weights_changed(&mut self, turn: &mut Turn<'_>, failure: TransferFailure) {
        if self.is_begun {
            let tell = self.tell();
            self.fail(turn, failure, tell);
        }
    }

    /// The node has violated the order of its commands. The receiver is informed.
    fn misused(&mut self, turn: &mut Turn<'_>, reason: String) {
        self.abort(turn, reason);
    }

    fn broken(&mut self, turn: &mut Turn<'_>, detail: String) {
        let peer = self.peer.node_id.clone();
        self.fail(turn, TransferFailure::Protocol { peer, detail }, Tell::Abort);
    }

    pub fn on_data_failed(&mut self, turn: &mut Turn<'_>, reason: String) {
        self.fail(turn, TransferFailure::Aborted { reason }, Tell::Abort);
    }

    pub fn on_peer_lost(&mut self, turn: &mut Turn<'_>, failure: TransferFailure) {
        self.fail(turn, failure, Tell::AbortOnce);
        if let Phase::Aborting(aborting) = &mut self.phase {
            aborting.on_peer_lost();
        }
    }

    /// The peer has reconnected and dropped its transfers with this node. It may still send
    /// `RESERVE` for an expected transfer.
    pub fn on_pair_anew(&mut self, turn: &mut Turn<'_>) {
        if !matches!(self.phase, Phase::Expecting { .. }) {
            let peer = self.peer.node_id.clone();
            let reason = "the peer reconnected and dropped its transfers".to_owned();
            self.fail(turn, TransferFailure::PeerLost { peer, reason }, Tell::Abort);
        }
    }

    /// Starts the abort, unless the transfer is already over.
    fn fail(&mut self, turn: &mut Turn<'_>, failure: TransferFailure, tell: Tell) {
        if matches!(self.phase, Phase::Aborting(_) | Phase::Delivered) {
            return;
        }
        let reads = match &self.phase {
            Phase::Sending(sending) => sending.chunks.are_read(),
            _ => false,
        };
        let event = self
            .is_begun
            .then(|| Event::SendFailed { transfer: self.transfer, failure: failure.clone() });
        let cancel =
            reads.then_some(Action::CancelSend { peer: self.peer.epoch, transfer: self.transfer });
        self.phase = Phase::Aborting(Aborting::begin(
            turn,
            self.transfer,
            self.peer.clone(),
            self.traceparent.clone(),
            &failure,
            event,
            cancel,
            tell,
        ));
    }

    /// Renews the lease: the receiver has named the transfer or sent a message about it.
    pub fn renew(&mut self, now: Instant) {
        self.lease = now + LEASE;
    }

    /// Retransmits unanswered messages. Returns whether there were any.
    pub fn resend(&mut self, turn: &mut Turn<'_>) -> bool {
        let Phase::Sending(sending) = &self.phase else { return false };
        let mut resent = 0;
        for chunk in sending.chunks.unanswered() {
            let message = sending.chunks.message(self.transfer, chunk, turn.local.block_bytes);
            if let Some(message) = message {
                turn.send(self.peer.epoch, message);
                resent += 1;
            }
        }
        if let Some(done) = &sending.done {
            turn.send_traced(self.peer.epoch, Body::Done(done.clone()), &self.traceparent);
            resent += 1;
        }
        turn.counters.control_resent += resent;
        resent > 0
    }

    pub fn on_deadline(&mut self, turn: &mut Turn<'_>) {
        if let Phase::Aborting(aborting) = &mut self.phase {
            return aborting.on_deadline(turn);
        }
        if turn.now >= self.deadline {
            let waiting_for = self.waiting_for().to_owned();
            let tell = self.tell();
            return self.fail(turn, TransferFailure::Deadline { waiting_for }, tell);
        }
        if self.is_leased() && turn.now >= self.lease {
            let peer = self.peer.node_id.clone();
            let reason = format!(
                "the peer has not named the transfer in a heartbeat for {} s",
                LEASE.as_secs()
            );
            return self.fail(turn, TransferFailure::PeerLost { peer, reason }, Tell::Abort);
        }
        if let Phase::Sending(sending) = &mut self.phase
            && sending.awaits_answer()
            && sending.retry.is_due(turn.now)
        {
            self.resend(turn);
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Aborting(aborting) => aborting.next_deadline(),
            Phase::Delivered => None,
            Phase::Expecting { .. } => Some(self.deadline),
            Phase::Early { .. } => Some(self.deadline.min(self.lease)),
            Phase::Sending(sending) if sending.awaits_answer() => {
                Some(self.deadline.min(self.lease).min(sending.retry.at()))
            }
            Phase::Sending(_) => Some(self.deadline.min(self.lease)),
        }
    }

    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    pub fn is_early(&self) -> bool {
        matches!(self.phase, Phase::Early { .. })
    }

    pub fn is_begun(&self) -> bool {
        self.is_begun
    }

    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Aborting(_) | Phase::Delivered)
    }

    /// Returns whether heartbeats name the transfer.
    pub fn is_wanted(&self) -> bool {
        matches!(self.phase, Phase::Sending(_))
    }

    /// Returns whether heartbeats name the transfer as awaiting `RESERVE`.
    pub fn is_awaiting(&self) -> bool {
        matches!(self.phase, Phase::Expecting { .. })
    }

    /// Returns whether the node still has to get its final event.
    pub fn is_unfinished(&self) -> bool {
        match &self.phase {
            Phase::Expecting { .. } | Phase::Sending(_) => true,
            Phase::Early { .. } | Phase::Delivered => false,
            Phase::Aborting(aborting) => aborting.is_unfinished(),
        }
    }

    /// Returns the outcome once nothing is left to do.
    pub fn tombstone(&self) -> Option<Tombstone> {
        match &self.phase {
            Phase::Delivered => Some(Tombstone::Complete),
            Phase::Aborting(aborting) => aborting.tombstone(),
            Phase::Expecting { .. } | Phase::Early { .. } | Phase::Sending(_) => None,
        }
    }

    /// Before `RESERVE` the receiver may not know the transfer.
    fn tell(&self) -> Tell {
        match self.phase {
            Phase::Expecting { .. } => Tell::Nothing,
            _ => Tell::Abort,
        }
    }

    /// Before `RESERVE` the receiver may not know the transfer and cannot renew the lease.
    fn is_leased(&self) -> bool {
        matches!(self.phase, Phase::Early { .. } | Phase::Sending(_))
    }

    fn waiting_for(&self) -> &'static str {
        match &self.phase {
            Phase::Expecting { .. } => "RESERVE",
            Phase::Early { .. } => "this node's Prefill call",
            Phase::Sending(sending) if sending.done.is_some() => "ACK",
            Phase::Sending(sending) if sending.finish.is_some() => "the last chunks to leave",
            Phase::Sending(_) => "this node's KV",
            Phase::Delivered | Phase::Aborting(_) => "nothing",
        }
    }
}

impl Sending {
    fn awaits_answer(&self) -> bool {
        self.done.is_some() || self.chunks.has_unanswered()
    }
}
