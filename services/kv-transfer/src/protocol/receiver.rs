//! The receiving side of one transfer, at the decode node.
//!
//! 1. `Receive` brings the reserved blocks. `RESERVE` is sent when the pair is connected, and again
//!    until the sender names the transfer.
//! 2. Each `CHUNK` is checked against the reservation, its receive is posted, and `CTS` is sent.
//! 3. When every reserved block is written and `DONE` matches, including model and weights, `ACK`
//!    is sent and `Arrived` emitted.
//! 4. Every failure goes through `abort`.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kernels::BlockId;

use super::{
    Action, Peer, Turn,
    abort::{Aborting, Tell},
    identity::weights_difference,
    retry::Retry,
    tombstone::Tombstone,
};
use crate::{
    api::{Event, TransferFailure, TransferId, TransferStats},
    config::LEASE,
    control::{AbortCause, Body, Done, Reserve},
};

pub struct Incoming {
    transfer: TransferId,
    peer: Peer,
    traceparent: String,
    /// Deadline of the whole transfer, set by the node.
    deadline: Instant,
    /// End of the lease, which the sender renews by naming the transfer.
    lease: Instant,
    prompt_hash: u128,
    first_block: u32,
    blocks: Vec<BlockId>,
    phase: Phase,
}

enum Phase {
    /// The pair is not connected yet.
    Connecting,
    Receiving(Receiving),
    Arrived,
    Aborting(Aborting),
}

struct Receiving {
    /// The sender has acknowledged `RESERVE`.
    is_named: bool,
    reserved_at: Instant,
    retry: Retry,
    chunks: BTreeMap<u32, Chunk>,
    /// For each reserved block: whether a chunk covers it.
    covered: Vec<bool>,
    /// Time at which the latest chunk was written.
    written_at: Instant,
    done: Option<Done>,
}

struct Chunk {
    /// Offset within the reservation, in blocks.
    offset: usize,
    block_count: usize,
    /// Set once the chunk is written.
    integrity: Option<u64>,
}

impl Incoming {
    pub fn start(
        turn: &Turn<'_>,
        transfer: TransferId,
        peer: Peer,
        prompt_hash: u128,
        first_block: u32,
        blocks: Vec<BlockId>,
        deadline: Duration,
        traceparent: String,
    ) -> Self {
        Self {
            transfer,
            peer,
            traceparent,
            deadline: turn.now + deadline,
            lease: turn.now + LEASE,
            prompt_hash,
            first_block,
            blocks,
            phase: Phase::Connecting,
        }
    }

    pub fn on_pair_up(&mut self, turn: &mut Turn<'_>) {
        if !matches!(self.phase, Phase::Connecting) {
            return;
        }
        self.phase = Phase::Receiving(Receiving {
            is_named: false,
            reserved_at: turn.now,
            retry: Retry::start(turn.now),
            chunks: BTreeMap::new(),
            covered: vec![false; self.blocks.len()],
            written_at: turn.now,
            done: None,
        });
        self.send_reserve(turn);
    }

    fn send_reserve(&self, turn: &mut Turn<'_>) {
        let reserve = Reserve {
            transfer: self.transfer,
            model_fingerprint: turn.local.identity.model_fingerprint,
            weight_version: turn.local.identity.weight_version,
            prompt_hash: self.prompt_hash,
            first_block: self.first_block,
            blocks: self.blocks.clone(),
        };
        turn.send_traced(self.peer.epoch, Body::Reserve(reserve), &self.traceparent);
    }

    pub fn on_chunk(
        &mut self,
        turn: &mut Turn<'_>,
        chunk: u32,
        first_block: u32,
        block_count: u32,
        bytes: u64,
    ) {
        let Phase::Receiving(receiving) = &mut self.phase else { return };
        // A chunk has at least one block, so the reservation bounds this table.
        let known = receiving.chunks.get(&chunk);
        let offset = first_block.checked_sub(self.first_block).map(|offset| offset as usize);
        let range = offset.and_then(|offset| {
            let end = offset.checked_add(block_count as usize)?;
            (block_count > 0 && end <= self.blocks.len()).then_some(offset..end)
        });
        let problem = match (&range, known) {
            (Some(range), Some(known))
                if known.offset == range.start && known.block_count == range.len() =>
            {
                // Retransmitted: the answer was lost.
                return turn
                    .send(self.peer.epoch, Body::ClearToSend { transfer: self.transfer, chunk });
            }
            (_, Some(_)) => "it was announced with another range",
            (None, None) => "its range is not within the reservation",
            (Some(range), None) if receiving.covered[range.clone()].contains(&true) => {
                "its range overlaps another chunk"
            }
            (Some(range), None) if (range.len() * turn.local.block_bytes) as u64 != bytes => {
                "its size does not match its blocks"
            }
            (Some(_), None) if chunk as usize >= self.blocks.len() => "its number is too large",
            (Some(range), None) => {
                receiving.covered[range.clone()].fill(true);
                receiving.chunks.insert(
                    chunk,
                    Chunk { offset: range.start, block_count: range.len(), integrity: None },
                );
                let blocks = self.blocks[range.clone()].to_vec();
                let (peer, transfer) = (self.peer.epoch, self.transfer);
                turn.act(Action::PostReceive { peer, transfer, chunk, blocks });
                return turn.send(peer, Body::ClearToSend { transfer, chunk });
            }
        };
        let detail = format!(
            "CHUNK {chunk} of {block_count} blocks from {first_block}, {bytes} bytes: {problem}; \
             expected blocks within the {} reserved from {}",
            self.blocks.len(),
            self.first_block
        );
        self.broken(turn, detail);
    }

    pub fn on_received(&mut self, turn: &mut Turn<'_>, chunk: u32, integrity: u64) {
        let Phase::Receiving(receiving) = &mut self.phase else { return };
        if let Some(received) = receiving.chunks.get_mut(&chunk) {
            received.integrity = Some(integrity);
            receiving.written_at = turn.now;
            self.complete_when_all_agrees(turn);
        }
    }

    pub fn on_done(&mut self, turn: &mut Turn<'_>, done: Done) {
        let Phase::Receiving(receiving) = &mut self.phase else { return };
        if receiving.done.is_some() {
            return;
        }
        let chunks = done.chunk_count as usize;
        if chunks > self.blocks.len() || done.integrity.len() != chunks {
            let detail = format!(
                "DONE names {chunks} chunks with {} integrity values; expected one per chunk and at most {} chunks",
                done.integrity.len(),
                self.blocks.len()
            );
            return self.broken(turn, detail);
        }
        receiving.done = Some(done);
        self.complete_when_all_agrees(turn);
    }

    /// Completes the transfer once `DONE` and all blocks are here, in any order.
    fn complete_when_all_agrees(&mut self, turn: &mut Turn<'_>) {
        let Phase::Receiving(receiving) = &self.phase else { return };
        let Some(done) = &receiving.done else { return };
        let (fingerprint, version) = (done.model_fingerprint, done.weight_version);
        if let Some(reason) = weights_difference(&turn.local.identity, fingerprint, version) {
            let failure = TransferFailure::Refused {
                peer: self.peer.node_id.clone(),
                reason: format!("DONE: {reason}"),
            };
            return self.fail(turn, failure, Tell::Abort);
        }
        if receiving.chunks.len() < done.integrity.len()
            || receiving.chunks.values().any(|chunk| chunk.integrity.is_none())
        {
            return;
        }
        let covered = receiving.covered.iter().filter(|covered| **covered).count();
        // Chunk numbers are unique, so equal counts and numbers below the count mean equal sets.
        let numbers_agree = receiving.chunks.len() == done.integrity.len()
            && receiving.chunks.keys().all(|number| (*number as usize) < done.integrity.len());
        if !numbers_agree || covered != self.blocks.len() {
            let detail = format!(
                "DONE after {} chunks with {covered} of {} blocks; it names {} chunks",
                receiving.chunks.len(),
                self.blocks.len(),
                done.chunk_count
            );
            return self.broken(turn, detail);
        }
        let damaged = receiving.chunks.iter().find_map(|(number, chunk)| {
            (chunk.integrity != Some(done.integrity[*number as usize])).then_some(*number)
        });
        if let Some(chunk) = damaged {
            return self.fail(turn, TransferFailure::Damaged { chunk }, Tell::Abort);
        }
        let event = Event::Arrived {
            transfer: self.transfer,
            first_index: done.first_index,
            token: done.token.clone(),
            stats: TransferStats {
                bytes: (self.blocks.len() * turn.local.block_bytes) as u64,
                chunks: done.chunk_count,
                elapsed: receiving.written_at.saturating_duration_since(receiving.reserved_at),
            },
        };
        let ack = Body::Ack { transfer: self.transfer };
        turn.send_traced(self.peer.epoch, ack, &self.traceparent);
        self.phase = Phase::Arrived;
        turn.emit(event);
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

    pub fn abort(&mut self, turn: &mut Turn<'_>, reason: String) {
        let tell = self.tell();
        self.fail(turn, TransferFailure::Aborted { reason }, tell);
    }

    /// The reservation may depend on KV of the old weights, and the sender may use them.
    pub fn on_weights_changed(&mut self, turn: &mut Turn<'_>, failure: TransferFailure) {
        let tell = self.tell();
        self.fail(turn, failure, tell);
    }

    pub fn on_data_failed(&mut self, turn: &mut Turn<'_>, reason: String) {
        self.fail(turn, TransferFailure::Aborted { reason }, Tell::Abort);
    }

    pub fn on_peer_lost(&mut self, turn: &mut Turn<'_>, failure: TransferFailure) {
        let tell = match self.phase {
            Phase::Connecting => Tell::Nothing,
            _ => Tell::AbortOnce,
        };
        self.fail(turn, failure, tell);
        if let Phase::Aborting(aborting) = &mut self.phase {
            aborting.on_peer_lost();
        }
    }

    /// The peer has reconnected and dropped its transfers with this node. If no chunk was
    /// announced, the peer may not know the reservation, so `RESERVE` is sent again.
    pub fn on_pair_anew(&mut self, turn: &mut Turn<'_>) {
        let Phase::Receiving(receiving) = &mut self.phase else { return self.on_pair_up(turn) };
        if receiving.chunks.is_empty() {
            receiving.is_named = false;
            receiving.retry = Retry::start(turn.now);
            turn.counters.control_resent += 1;
            return self.send_reserve(turn);
        }
        let peer = self.peer.node_id.clone();
        let reason = "the peer reconnected and dropped its transfers".to_owned();
        self.fail(turn, TransferFailure::PeerLost { peer, reason }, Tell::Abort);
    }

    fn broken(&mut self, turn: &mut Turn<'_>, detail: String) {
        let peer = self.peer.node_id.clone();
        self.fail(turn, TransferFailure::Protocol { peer, detail }, Tell::Abort);
    }

    /// Starts the abort, unless the transfer is already over.
    fn fail(&mut self, turn: &mut Turn<'_>, failure: TransferFailure, tell: Tell) {
        if matches!(self.phase, Phase::Aborting(_) | Phase::Arrived) {
            return;
        }
        let writes = match &self.phase {
            Phase::Receiving(receiving) => {
                receiving.chunks.values().any(|chunk| chunk.integrity.is_none())
            }
            _ => false,
        };
        let event = Event::ReceiveFailed { transfer: self.transfer, failure: failure.clone() };
        let cancel = writes
            .then_some(Action::CancelReceive { peer: self.peer.epoch, transfer: self.transfer });
        self.phase = Phase::Aborting(Aborting::begin(
            turn,
            self.transfer,
            self.peer.clone(),
            self.traceparent.clone(),
            &failure,
            Some(event),
            cancel,
            tell,
        ));
    }

    /// Renews the lease: the sender has named the transfer or sent a message about it, so `RESERVE`
    /// has arrived.
    pub fn renew(&mut self, now: Instant) {
        self.lease = now + LEASE;
        if let Phase::Receiving(receiving) = &mut self.phase {
            receiving.is_named = true;
        }
    }

    /// Retransmits unanswered messages. Returns whether there were any.
    pub fn resend(&mut self, turn: &mut Turn<'_>) -> bool {
        match &self.phase {
            Phase::Receiving(receiving) if !receiving.is_named => {
                turn.counters.control_resent += 1;
                self.send_reserve(turn);
                true
            }
            _ => false,
        }
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
        if turn.now >= self.lease {
            let peer = self.peer.node_id.clone();
            let reason = format!(
                "the peer has not named the transfer in a heartbeat for {} s",
                LEASE.as_secs()
            );
            let tell = self.tell();
            return self.fail(turn, TransferFailure::PeerLost { peer, reason }, tell);
        }
        if let Phase::Receiving(receiving) = &mut self.phase
            && !receiving.is_named
            && receiving.retry.is_due(turn.now)
        {
            self.resend(turn);
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let end = self.deadline.min(self.lease);
        match &self.phase {
            Phase::Aborting(aborting) => aborting.next_deadline(),
            Phase::Arrived => None,
            Phase::Receiving(receiving) if !receiving.is_named => {
                Some(end.min(receiving.retry.at()))
            }
            Phase::Connecting | Phase::Receiving(_) => Some(end),
        }
    }

    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Returns whether heartbeats name the transfer.
    pub fn is_wanted(&self) -> bool {
        matches!(self.phase, Phase::Connecting | Phase::Receiving(_))
    }

    /// Returns whether the node still has to get its final event.
    pub fn is_unfinished(&self) -> bool {
        match &self.phase {
            Phase::Connecting | Phase::Receiving(_) => true,
            Phase::Arrived => false,
            Phase::Aborting(aborting) => aborting.is_unfinished(),
        }
    }

    /// Returns the outcome once nothing is left to do.
    pub fn tombstone(&self) -> Option<Tombstone> {
        match &self.phase {
            Phase::Arrived => Some(Tombstone::Complete),
            Phase::Aborting(aborting) => aborting.tombstone(),
            Phase::Connecting | Phase::Receiving(_) => None,
        }
    }

    /// Before `RESERVE` the sender does not know the transfer.
    fn tell(&self) -> Tell {
        match self.phase {
            Phase::Connecting => Tell::Nothing,
            _ => Tell::Abort,
        }
    }

    fn waiting_for(&self) -> &'static str {
        match &self.phase {
            Phase::Connecting => "HELLO_OK",
            Phase::Receiving(receiving) if !receiving.is_named => "an answer to RESERVE",
            Phase::Receiving(receiving) if receiving.done.is_some() => "the last chunks",
            Phase::Receiving(_) => "the sender's KV",
            Phase::Arrived | Phase::Aborting(_) => "nothing",
        }
    }
}
