//! The sending side of one transfer, at the node that computed the KV.
//!
//! 1. `Expect` (from the node) and `RESERVE` (from the receiver) come in either order; whichever is
//!    first waits for the other. With both here the node hears `Ready`.
//! 2. What is reserved is cut into chunks, each announced by `CHUNK` until the receiver answers `CTS`: the first at
//!    once, the others a few ahead of what is `Written`. So a chunk of which all is written goes to the transport
//!    without waiting for an answer.
//! 3. `Finish` and the last chunk's departure bring `DONE`, repeated until `ACK`: `Delivered`. Not before: what the
//!    receiver takes for arrived may be what we have let go of, or broken off.
//! 4. Whatever goes wrong leads to `ending` instead.

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
    /// The node's once `Expect` is here; before, the receiver's.
    traceparent: String,
    /// `Expect` is here: the node is owed a final event.
    is_begun: bool,
    /// The node's, for the whole transfer.
    deadline: Instant,
    /// The receiver must name the transfer before; counts once `RESERVE` is here.
    lease: Instant,
    phase: Phase,
}

enum Phase {
    /// `Expect` is here. Nothing is held, so the receiver may take its time.
    Expecting {
        prompt_hash: u128,
    },
    /// `RESERVE` is here, the node knows nothing yet.
    Early {
        reserve: Reserve,
    },
    Sending(Sending),
    Delivered,
    Aborting(Aborting),
}

struct Sending {
    chunks: Chunks,
    /// Index and value of the first token, once the node has finished.
    finish: Option<(u32, SampledToken)>,
    done: Option<Done>,
    first_given: Option<Instant>,
    retry: Retry,
}

impl Outgoing {
    /// The node asks first.
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

    /// The receiver asks first. It is kept for one lease. The receiver hears nothing of it: it may
    /// take a transfer that is named for wanted, and this one nobody has asked for here, so its lease
    /// must run from its own beginning.
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

    /// `Expect` meets a `RESERVE` that waits, or one that waited too long or was aborted.
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
            // Repeated: our answer was lost.
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
                "RESERVE is for prompt {:032x}, this prefill is of {prompt_hash:032x}",
                reserve.prompt_hash
            )),
            _ if reserve.blocks.len() > RESERVED_BLOCKS_MAX => Err(format!(
                "RESERVE is of {} blocks; at most {RESERVED_BLOCKS_MAX} can travel",
                reserve.blocks.len()
            )),
            None => Err(format!("RESERVE starts at block {} and overflows", reserve.first_block)),
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
        // A chunk names the transfer as well.
        if first_block == end_block {
            self.name(turn);
        }
    }

    /// The receiver takes a heartbeat that names the transfer for the answer to `RESERVE`.
    fn name(&self, turn: &mut Turn<'_>) {
        let named = Body::Heartbeat { transfers: vec![self.transfer], awaited: Vec::new() };
        turn.send(self.peer.epoch, named);
    }

    pub fn written(&mut self, turn: &mut Turn<'_>, first_block: u32, blocks: Vec<BlockId>) {
        let Phase::Sending(sending) = &mut self.phase else {
            if let Phase::Expecting { .. } = self.phase {
                self.misused(turn, "Written came before Ready".to_owned());
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
                self.misused(turn, "Finish came before Ready".to_owned());
            }
            return;
        };
        let due = sending.chunks.due();
        if !due.is_empty() {
            let reason =
                format!("Finish came when blocks {} to {} were still due", due.start, due.end);
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

    /// To the transport, what is written and cleared; each makes room for another to be announced.
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
            // Those that `RESERVE` named: with others the transfer would have ended.
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
            return self.broken(turn, "ACK came before DONE was sent".to_owned());
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

    /// The node gives up. The receiver may not know of the transfer yet; if its `RESERVE` comes
    /// later the tombstone answers it.
    pub fn abort(&mut self, turn: &mut Turn<'_>, reason: String) {
        let tell = self.tell();
        self.fail(turn, TransferFailure::Aborted { reason }, tell);
    }

    /// What the node has begun it began under the weights before. A `RESERVE` that nothing has
    /// followed yet names its own, and is judged when something does.
    pub fn on_weights_changed(&mut self, turn: &mut Turn<'_>, failure: TransferFailure) {
        if self.is_begun {
            let tell = self.tell();
            self.fail(turn, failure, tell);
        }
    }

    /// The node broke the contract of its commands; the receiver is not left waiting.
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

    /// The peer has given up what it had with us; it may still reserve for what we expect.
    pub fn on_pair_anew(&mut self, turn: &mut Turn<'_>) {
        if !matches!(self.phase, Phase::Expecting { .. }) {
            let peer = self.peer.node_id.clone();
            let reason = "it has lost its end of the pair and made it anew".to_owned();
            self.fail(turn, TransferFailure::PeerLost { peer, reason }, Tell::Abort);
        }
    }

    /// Does nothing when the end has begun.
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

    /// The receiver has named the transfer or spoken of it.
    pub fn renew(&mut self, now: Instant) {
        self.lease = now + LEASE;
    }

    /// Says again what was not answered. True when there was something.
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
            let reason = format!("it has not named the transfer for {} s", LEASE.as_secs());
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

    /// Named in heartbeats.
    pub fn is_wanted(&self) -> bool {
        matches!(self.phase, Phase::Sending(_))
    }

    /// Named in heartbeats as waiting for `RESERVE`.
    pub fn is_awaiting(&self) -> bool {
        matches!(self.phase, Phase::Expecting { .. })
    }

    /// The node is owed a final event.
    pub fn is_unfinished(&self) -> bool {
        match &self.phase {
            Phase::Expecting { .. } | Phase::Sending(_) => true,
            Phase::Early { .. } | Phase::Delivered => false,
            Phase::Aborting(aborting) => aborting.is_unfinished(),
        }
    }

    /// How it ended, when nothing is left to do.
    pub fn tombstone(&self) -> Option<Tombstone> {
        match &self.phase {
            Phase::Delivered => Some(Tombstone::Complete),
            Phase::Aborting(aborting) => aborting.tombstone(),
            Phase::Expecting { .. } | Phase::Early { .. } | Phase::Sending(_) => None,
        }
    }

    /// Before `RESERVE` the receiver may not know of the transfer.
    fn tell(&self) -> Tell {
        match self.phase {
            Phase::Expecting { .. } => Tell::Nothing,
            _ => Tell::Abort,
        }
    }

    /// Before `RESERVE` the receiver may not know of the transfer and cannot name it.
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
