//! The sending side of one transfer, at the prefill node.
//!
//! 1. `Send` (from the node) and `RESERVE` (from the receiver) arrive in either order. Once both
//!    have arrived, the node gets `Ready`.
//! 2. The reservation is split into chunks. Each is announced by `CHUNK`, repeatedly until the
//!    receiver answers `CTS`: the first at once, the others a few ahead of the written blocks. A
//!    fully written chunk therefore usually goes to the transport without waiting for `CTS`.
//! 3. After `Finish` and the last sent chunk, `DONE` is sent repeatedly until `ACK` arrives. Then
//!    `Delivered` is emitted. An earlier `DONE` would let the receiver complete a transfer that
//!    this side has aborted, or with blocks that this side has released.
//! 4. Every failure goes through `abort`.

use std::time::{Duration, Instant};

use kernels::{BlockId, sampling::SampledToken};

use super::{
    abort::AbortMessage,
    chunks::Chunks,
    event_context::{Action, EventContext, RESERVED_BLOCKS_MAX, Retry},
    transfer::{Phase, Transfer},
};
use crate::{
    api::{Event, Peer, TransferFailure, TransferStats},
    config::{ANSWER_TIMEOUT_MAX, LEASE},
    control::{Body, Done, Reserve},
};

pub(super) struct Sending {
    pub chunks: Chunks,
    /// Index and value of the first token, after `Finish`.
    pub finish: Option<(u32, SampledToken)>,
    pub done: Option<Done>,
    first_started: Option<Instant>,
}

impl Transfer {
    /// Starts a transfer whose `RESERVE` arrived before `Send`. It is kept while the receiver
    /// names it, and not acknowledged: the heartbeat that acknowledges `RESERVE` would renew the
    /// receiver's lease, although this node may never expect the transfer.
    pub(super) fn early(
        context: &EventContext,
        peer: Peer,
        reserve: Reserve,
        traceparent: String,
    ) -> Self {
        let (id, phase) = (reserve.transfer, Phase::Early { reserve });
        let begun = Self::begin(context, id, peer, ANSWER_TIMEOUT_MAX, traceparent, phase);
        Self { is_begun: false, ..begun }
    }

    /// Handles `Send` after `RESERVE`, which may meanwhile have expired or been aborted.
    pub(super) fn on_expect(
        &mut self,
        context: &mut EventContext,
        chunk_bytes_max: usize,
        prompt_hash: u128,
        deadline: Duration,
        traceparent: String,
    ) {
        debug_assert!(!self.is_begun);
        self.is_begun = true;
        self.deadline = context.now + deadline;
        let theirs = std::mem::replace(&mut self.traceparent, traceparent);
        match std::mem::replace(&mut self.phase, Phase::Expecting { prompt_hash }) {
            Phase::Early { reserve } => {
                self.match_reserve(context, chunk_bytes_max, prompt_hash, reserve, theirs);
            }
            Phase::Aborting(aborting) => {
                let failure = self.peer.ended_before(aborting.cause, &aborting.reason);
                context.emit(Event::SendFailed { transfer: self.id, failure });
                self.phase = Phase::Aborting(aborting);
            }
            begun => self.phase = begun,
        }
    }

    pub(super) fn on_reserve(
        &mut self,
        context: &mut EventContext,
        chunk_bytes_max: usize,
        reserve: Reserve,
        traceparent: String,
    ) {
        match &self.phase {
            Phase::Expecting { prompt_hash } => {
                let prompt_hash = *prompt_hash;
                self.match_reserve(context, chunk_bytes_max, prompt_hash, reserve, traceparent);
            }
            // Retransmitted: the answer was lost.
            Phase::Sending(_) => self.acknowledge_reserve(context),
            _ => {}
        }
    }

    fn match_reserve(
        &mut self,
        context: &mut EventContext,
        chunk_bytes_max: usize,
        prompt_hash: u128,
        reserve: Reserve,
        traceparent: String,
    ) {
        let (fingerprint, version) = (reserve.model_fingerprint, reserve.weight_version);
        if let Some(reason) = context.local.identity.weights_difference(fingerprint, version) {
            let failure = TransferFailure::Refused {
                peer: self.peer.node_id.clone(),
                reason: format!("RESERVE: {reason}"),
            };
            return self.fail(context, failure, AbortMessage::Abort);
        }
        let end_block = match end_block(&reserve, prompt_hash) {
            Ok(end_block) => end_block,
            Err(violation) => return self.broken(context, violation),
        };
        let first_block = reserve.first_block;
        self.phase = Phase::Sending(Sending {
            chunks: Chunks::new(
                self.id,
                first_block..end_block,
                context.local.block_bytes,
                chunk_bytes_max,
            ),
            finish: None,
            done: None,
            first_started: None,
        });
        self.retry = Retry::start(context.now);
        self.begin_lease(context.now, LEASE);
        context.emit(Event::Ready {
            transfer: self.id,
            first_block,
            block_count: reserve.blocks.len() as u32,
            traceparent,
        });
        self.announce(context);
        // A `CHUNK` also acknowledges `RESERVE`, but an empty reservation has no chunk.
        if first_block == end_block {
            self.acknowledge_reserve(context);
        }
    }

    /// Acknowledges `RESERVE` by a heartbeat that names the transfer.
    fn acknowledge_reserve(&self, context: &mut EventContext) {
        let named = Body::Heartbeat { transfers: vec![self.id], awaited: Vec::new() };
        context.send(self.peer.epoch, named);
    }

    pub(super) fn written(
        &mut self,
        context: &mut EventContext,
        first_block: u32,
        blocks: Vec<BlockId>,
    ) {
        let Some(sending) = self.sending(context, "Written") else { return };
        match sending.chunks.add(first_block, &blocks) {
            Ok(()) => self.start_chunks(context),
            Err(reason) => self.abort(context, reason),
        }
    }

    /// Returns the state of a transfer that is being sent. A `command` of the node before `Ready`
    /// aborts the transfer.
    fn sending(&mut self, context: &mut EventContext, command: &str) -> Option<&mut Sending> {
        if let Phase::Expecting { .. } = self.phase {
            self.abort(context, format!("invalid command {command}; expected Ready first"));
        }
        match &mut self.phase {
            Phase::Sending(sending) => Some(sending),
            _ => None,
        }
    }

    fn announce(&mut self, context: &mut EventContext) {
        let Phase::Sending(sending) = &mut self.phase else { return };
        while let Some(chunk) = sending.chunks.announce() {
            self.retry = Retry::start(context.now);
            context.send(self.peer.epoch, Body::Chunk(chunk.clone()));
        }
    }

    pub(super) fn finish(
        &mut self,
        context: &mut EventContext,
        first_index: u32,
        token: SampledToken,
    ) {
        let Some(sending) = self.sending(context, "Finish") else { return };
        let due = sending.chunks.due();
        if !due.is_empty() {
            let reason = format!(
                "invalid command Finish; expected blocks {} to {} first",
                due.start, due.end
            );
            return self.abort(context, reason);
        }
        sending.finish.get_or_insert((first_index, token));
        self.send_done_when_all_is_sent(context);
    }

    pub(super) fn on_clear_to_send(&mut self, context: &mut EventContext, chunk: u32) {
        let Phase::Sending(sending) = &mut self.phase else { return };
        match sending.chunks.clear(chunk) {
            Ok(true) => {
                self.retry = Retry::start(context.now);
                self.start_chunks(context);
            }
            Ok(false) => {}
            Err(violation) => self.broken(context, violation),
        }
    }

    /// Passes the computed chunks that have a `CTS` to the transport, then announces further
    /// chunks.
    fn start_chunks(&mut self, context: &mut EventContext) {
        let Phase::Sending(sending) = &mut self.phase else { return };
        while let Some((chunk, blocks)) = sending.chunks.start_next() {
            let (peer, transfer) = (self.peer.epoch, self.id);
            context.act(Action::SendChunk { peer, transfer, chunk, blocks });
            sending.first_started.get_or_insert(context.now);
        }
        self.announce(context);
    }

    pub(super) fn on_sent(&mut self, context: &mut EventContext, chunk: u32, integrity: u64) {
        let Phase::Sending(sending) = &mut self.phase else { return };
        sending.chunks.sent(chunk, integrity);
        self.send_done_when_all_is_sent(context);
    }

    fn send_done_when_all_is_sent(&mut self, context: &mut EventContext) {
        let Phase::Sending(sending) = &mut self.phase else { return };
        let Some((first_index, token)) = &sending.finish else { return };
        if sending.done.is_some() {
            return;
        }
        let Some(integrity) = sending.chunks.integrity() else { return };
        let done = Done {
            transfer: self.id,
            chunk_count: sending.chunks.count(),
            first_index: *first_index,
            token: token.clone(),
            integrity,
            // Equal to those in `RESERVE`; otherwise the transfer would have failed.
            model_fingerprint: context.local.identity.model_fingerprint,
            weight_version: context.local.identity.weight_version,
        };
        sending.done = Some(done.clone());
        self.retry = Retry::start(context.now);
        context.send_traced(self.peer.epoch, Body::Done(done), &self.traceparent);
    }

    pub(super) fn on_ack(&mut self, context: &mut EventContext) {
        let Phase::Sending(sending) = &self.phase else { return };
        if sending.done.is_none() {
            return self.broken(context, "ACK before DONE was sent".to_owned());
        }
        let stats = TransferStats {
            bytes: sending.chunks.bytes(),
            chunks: sending.chunks.count(),
            elapsed: sending
                .first_started
                .map_or(Duration::ZERO, |first| context.now.saturating_duration_since(first)),
        };
        self.phase = Phase::Complete;
        context.emit(Event::Delivered { transfer: self.id, stats });
    }

    pub(super) fn resend_chunks_and_done(&self, context: &mut EventContext) {
        let Phase::Sending(sending) = &self.phase else { return };
        for chunk in sending.chunks.unanswered() {
            context.counters.control_resent += 1;
            context.send(self.peer.epoch, Body::Chunk(chunk.clone()));
        }
        if let Some(done) = &sending.done {
            context.counters.control_resent += 1;
            context.send_traced(self.peer.epoch, Body::Done(done.clone()), &self.traceparent);
        }
    }
}

/// Returns the end of the reserved blocks in the prompt, or the reason why the `RESERVE` is
/// invalid.
fn end_block(reserve: &Reserve, prompt_hash: u128) -> Result<u32, String> {
    let Reserve { first_block, blocks, .. } = reserve;
    if reserve.prompt_hash != prompt_hash {
        let found = reserve.prompt_hash;
        return Err(format!("RESERVE has prompt hash {found:032x}; expected {prompt_hash:032x}"));
    }
    if blocks.len() > RESERVED_BLOCKS_MAX {
        return Err(format!(
            "RESERVE has {} blocks; expected at most {RESERVED_BLOCKS_MAX}",
            blocks.len()
        ));
    }
    first_block.checked_add(blocks.len() as u32).ok_or_else(|| {
        format!("RESERVE starts at block {first_block} and overflows; expected an end below 2^32")
    })
}
