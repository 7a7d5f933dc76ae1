//! A request's journey through one node, step by step as in the design.
//!
//! Three parties meet here, and each knows the others only through this module: the caller's stream
//! ([`AttemptEvent`]), the scheduler ([`Input`], [`Action`]) and the transfers
//! ([`transfer::Command`], [`transfer::Event`]). What goes to scheduler and transfers is queued for
//! the engine thread to hand on; nothing here waits or does I/O. The numbers in the comments are
//! those of DESIGN's "A request's journey".
//!
//! A record lives from [`Journey::begin`] until the caller has been told the end (or left) *and* no
//! transfer of it is under way. The scheduler may know the sequence for longer or shorter; actions
//! on unknown ids mean nothing.

use std::{
    collections::{HashMap, VecDeque},
    time::Instant,
};

use engine::event::{Action, FinishReason, Input, SequenceFailure, SequenceId, SequenceKind};
use kernels::{BLOCK_TOKENS, sampling::SampledToken};
use kv_transfer::api::{self as transfer, PeerAddress, TransferFailure, TransferId, TransferStats};
use proto::v1::FailureKind;
use telemetry::{
    NodeMetrics,
    metrics::{SequenceEnd, TransferEnd, TransferSide},
};
use tokio::sync::oneshot;

use crate::{
    inbox::Arrival,
    known_ids::KnownIds,
    refusal::Refusal,
    stages::{Stage, Stages},
    stream::{AttemptEnd, AttemptEvent, EventSender, Place},
};

/// Every attempt in work at this node.
pub(crate) struct Journey {
    in_work: HashMap<SequenceId, InWork>,
    known: KnownIds,
    /// For the scheduler, in order.
    inputs: VecDeque<Input>,
    /// For the transfers, in order. Bounded by what the attempts in work can ask: a reservation or
    /// expectation, a range for each chunk, a finish and an abort.
    commands: VecDeque<transfer::Command>,
    metrics: NodeMetrics,
    /// Everything was ended; nothing new begins.
    closed: bool,
}

struct InWork {
    kind: SequenceKind,
    peer: Option<PeerAddress>,
    prompt_hash: u128,
    prompt_tokens: u32,
    deadline: Instant,
    /// `None` once the caller was told the end, or left.
    events: Option<EventSender>,
    /// `None` once the caller was told that the scheduler took the attempt.
    verdict: Option<oneshot::Sender<Result<(), Refusal>>>,
    transfer: TransferState,
    /// Prefill: token 0 waits for the word whether it is the last.
    token_0: Option<(u32, SampledToken, u32)>,
    received: TransferStats,
    stages: Stages,
    arrived_at: Instant,
    /// When the scheduler had room for it, or the RESERVE was here.
    admitted_at: Option<Instant>,
    /// Identifies this attempt among those that ever had its id.
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferState {
    /// The transfers know nothing of it.
    NotBegun,
    /// A final event is owed.
    UnderWay {
        abort_asked: bool,
    },
    Over,
}

impl Journey {
    pub fn new(metrics: NodeMetrics) -> Self {
        Self {
            in_work: HashMap::new(),
            known: KnownIds::default(),
            inputs: VecDeque::new(),
            commands: VecDeque::new(),
            metrics,
            closed: false,
        }
    }

    pub fn next_input(&mut self) -> Option<Input> {
        self.inputs.pop_front()
    }

    pub fn next_command(&mut self) -> Option<transfer::Command> {
        self.commands.pop_front()
    }

    /// The transfers had no room for this command; it is the next one again.
    pub fn put_back(&mut self, command: transfer::Command) {
        self.commands.push_front(command);
    }

    /// Steps 2 and 3: the router's `Decode` or `Prefill` call is here.
    pub fn begin(&mut self, arrival: Arrival, now: Instant) {
        let Arrival { attempt, events, verdict, place } = arrival;
        let id = attempt.id();
        let refusal = if self.closed {
            Some(Refusal::Draining)
        } else if self.known.contains(id) || self.in_work.contains_key(&id) {
            Some(Refusal::Duplicate { id: id.0 })
        } else {
            None
        };
        if let Some(refusal) = refusal {
            // Fails when the caller left already.
            let _ = verdict.send(Err(refusal));
            return;
        }
        self.known.insert(id);
        let mut stages = Stages::new(&attempt);
        stages.begin(match attempt.sequence.kind {
            SequenceKind::Compute | SequenceKind::Send => Stage::Queue,
            SequenceKind::Receive => Stage::Reserve,
        });
        let record = InWork {
            kind: attempt.sequence.kind,
            prompt_hash: attempt.prompt_hash(),
            prompt_tokens: attempt.sequence.tokens.len() as u32,
            peer: attempt.peer,
            deadline: attempt.sequence.deadline,
            events: Some(events),
            verdict: Some(verdict),
            transfer: TransferState::NotBegun,
            token_0: None,
            received: TransferStats::default(),
            stages,
            arrived_at: now,
            admitted_at: None,
            place,
        };
        self.in_work.insert(id, record);
        self.inputs.push_back(Input::Arrived(attempt.sequence));
    }

    /// The scheduler has seen the arrival and its actions are done: unless it failed at once, the
    /// caller learns that the attempt is in work.
    pub fn taken(&mut self, id: SequenceId, now: Instant) {
        let Some(record) = self.in_work.get_mut(&id) else { return };
        let Some(verdict) = record.verdict.take() else { return };
        // Fails when the caller left; its cancel is on the way.
        let _ = verdict.send(Ok(()));
        // Step 3, prefill: the transfers pair this call with the RESERVE, whichever comes first.
        if record.kind == SequenceKind::Send
            && let Some(peer) = record.peer.clone()
        {
            record.transfer = TransferState::UnderWay { abort_asked: false };
            self.commands.push_back(transfer::Command::Expect {
                transfer: TransferId(id.0),
                peer,
                prompt_hash: record.prompt_hash,
                deadline: record.deadline.saturating_duration_since(now),
                traceparent: record.stages.traceparent(Stage::Queue),
            });
        }
    }

    /// The transfers did not take `Receive` or `Expect`: for the caller the node is busy.
    pub fn transfer_refused(&mut self, id: TransferId, reason: String) {
        let id = SequenceId(id.0);
        let Some(record) = self.in_work.get_mut(&id) else { return };
        record.transfer = TransferState::Over;
        // Nothing is in flight. The abort's own action may have come and gone before the refusal, so
        // the end is told here; a second one means nothing.
        self.inputs.push_back(Input::Abort { id });
        self.inputs.push_back(Input::TransferEnded { id, delivered: false });
        self.fail(id, SequenceEnd::Busy, AttemptEnd::failed(FailureKind::Busy, reason));
    }

    /// What the scheduler wants done.
    pub fn on_action(&mut self, action: Action, now: Instant) {
        match action {
            // Step 2, decode: D asks P for the blocks that it does not have.
            Action::Reserve { id, first_block, blocks } => {
                let Some(record) = self.in_work.get_mut(&id) else { return };
                let Some(peer) = record.peer.clone() else { return };
                let cached_tokens = first_block * BLOCK_TOKENS as u32;
                record.stages.span(Stage::Reserve).record("cached_tokens", cached_tokens);
                record.stages.end(Stage::Reserve);
                record.stages.begin(Stage::Transfer);
                record.transfer = TransferState::UnderWay { abort_asked: false };
                self.commands.push_back(transfer::Command::Receive {
                    transfer: TransferId(id.0),
                    peer,
                    prompt_hash: record.prompt_hash,
                    first_block,
                    blocks,
                    deadline: record.deadline.saturating_duration_since(now),
                    traceparent: record.stages.traceparent(Stage::Transfer),
                });
            }
            // Step 2, decode: the router may show token 0.
            Action::Admitted { id, cached_tokens, alone } => {
                let Some(record) = self.in_work.get_mut(&id) else { return };
                for stage in [Stage::Queue, Stage::Reserve] {
                    record.stages.span(stage).record("cached_tokens", cached_tokens);
                    record.stages.end(stage);
                }
                if alone {
                    record.stages.begin(Stage::Prefill);
                }
                record.admitted_at = Some(now);
                self.metrics.queued(now.saturating_duration_since(record.arrived_at));
                self.metrics.prefix_lookup(record.prompt_tokens.into(), cached_tokens.into());
                self.tell(id, AttemptEvent::Reserved { cached_tokens, alone });
            }
            // Step 4, prefill: a range of blocks may leave.
            Action::KvWritten { id, first_block, blocks } => {
                let Some(record) = self.in_work.get_mut(&id) else { return };
                record.stages.begin(Stage::Transfer);
                if record.may_command_transfer() {
                    let transfer = TransferId(id.0);
                    self.commands.push_back(transfer::Command::Written {
                        transfer,
                        first_block,
                        blocks,
                    });
                }
            }
            Action::Tokens { id, first_index, tokens, cached_tokens } => {
                self.on_tokens(id, first_index, tokens, cached_tokens, now);
            }
            Action::Finished { id, reason } => self.on_finished(id, reason),
            Action::Failed { id, failure } => self.on_failed(id, failure),
            Action::AbortTransfer { id, reason } => self.abort_transfer(id, reason),
        }
    }

    /// Step 5, decode: tokens 0, 1, 2, … On a prefill node this is token 0 (step 3), which waits
    /// for `Finished` in the same turn to say whether it is the last.
    fn on_tokens(
        &mut self,
        id: SequenceId,
        first_index: u32,
        mut tokens: Vec<SampledToken>,
        cached_tokens: u32,
        now: Instant,
    ) {
        let Some(record) = self.in_work.get_mut(&id) else { return };
        if record.stages.end(Stage::Prefill)
            && let Some(admitted_at) = record.admitted_at
        {
            self.metrics.prefilled(now.saturating_duration_since(admitted_at));
        }
        if record.kind == SequenceKind::Send {
            self.metrics.prefix_lookup(record.prompt_tokens.into(), cached_tokens.into());
            record.token_0 = tokens.pop().map(|token| (first_index, token, cached_tokens));
            return;
        }
        record.stages.begin(Stage::Decode);
        self.tell(id, AttemptEvent::Tokens { first_index, tokens, cached_tokens, finish: None });
    }

    fn on_finished(&mut self, id: SequenceId, reason: Option<FinishReason>) {
        let Some(record) = self.in_work.get_mut(&id) else { return };
        match (record.kind, reason) {
            (SequenceKind::Send, reason) => {
                let Some((first_index, token, cached_tokens)) = record.token_0.take() else {
                    return self.defect(id, "the sequence finished without a token");
                };
                // Step 3: token 0 goes straight to the router, ahead of the transfer.
                self.tell(
                    id,
                    AttemptEvent::Tokens {
                        first_index,
                        tokens: vec![token.clone()],
                        cached_tokens,
                        finish: reason,
                    },
                );
                let Some(reason) = reason else {
                    return self.finish_transfer(id, first_index, token);
                };
                // Token 0 ended the request: nothing is to be delivered, and the scheduler has
                // aborted the transfer.
                self.complete(id, sequence_end(reason), AttemptEnd::Complete);
            }
            (SequenceKind::Compute | SequenceKind::Receive, Some(reason)) => {
                let received = record.received;
                self.complete(id, sequence_end(reason), AttemptEnd::Finished { reason, received });
            }
            (SequenceKind::Compute | SequenceKind::Receive, None) => {
                self.defect(id, "the sequence finished without a reason");
            }
        }
    }

    /// Step 5, prefill: with token 0 the transfer can be complete.
    fn finish_transfer(&mut self, id: SequenceId, first_index: u32, token: SampledToken) {
        let Some(record) = self.in_work.get_mut(&id) else { return };
        record.stages.begin(Stage::Transfer);
        if record.may_command_transfer() {
            let transfer = TransferId(id.0);
            self.commands.push_back(transfer::Command::Finish { transfer, first_index, token });
        }
    }

    fn on_failed(&mut self, id: SequenceId, failure: SequenceFailure) {
        let Some(record) = self.in_work.get_mut(&id) else { return };
        let message = failure.to_string();
        if let Some(verdict) = record.verdict.take() {
            // Refused before it began: a status, no stream.
            let (end, refusal) = match failure {
                SequenceFailure::Busy { reason } => (SequenceEnd::Busy, Refusal::Busy { reason }),
                SequenceFailure::Invalid { reason } => {
                    (SequenceEnd::Invalid, Refusal::Invalid { reason })
                }
                SequenceFailure::Duplicate => {
                    (SequenceEnd::Invalid, Refusal::Duplicate { id: id.0 })
                }
                SequenceFailure::Deadline => (SequenceEnd::Deadline, Refusal::Deadline),
                // Neither can befall an arrival.
                SequenceFailure::TransferFailed | SequenceFailure::Internal { .. } => {
                    (SequenceEnd::Internal, Refusal::Internal { reason: message.clone() })
                }
            };
            record.stages.fail(&message);
            record.events = None;
            self.metrics.sequence_ended(end);
            // Fails when the caller left already.
            let _ = verdict.send(Err(refusal));
            return self.forget_if_over(id);
        }
        let (end, kind) = match failure {
            SequenceFailure::Busy { .. } => (SequenceEnd::Busy, FailureKind::Busy),
            SequenceFailure::Invalid { .. } => (SequenceEnd::Invalid, FailureKind::Invalid),
            SequenceFailure::Duplicate => (SequenceEnd::Internal, FailureKind::Internal),
            SequenceFailure::Deadline => (SequenceEnd::Deadline, FailureKind::Deadline),
            SequenceFailure::TransferFailed => {
                (SequenceEnd::TransferFailed, FailureKind::TransferFailed)
            }
            SequenceFailure::Internal { .. } => (SequenceEnd::Internal, FailureKind::Internal),
        };
        self.fail(id, end, AttemptEnd::failed(kind, message));
    }

    /// The scheduler does not want the transfer any more; `TransferEnded` is owed to it.
    fn abort_transfer(&mut self, id: SequenceId, reason: String) {
        let state = self.in_work.get(&id).map(|record| record.transfer);
        match state {
            Some(TransferState::UnderWay { abort_asked: true }) => {}
            Some(TransferState::UnderWay { abort_asked: false }) => {
                if let Some(record) = self.in_work.get_mut(&id) {
                    record.transfer = TransferState::UnderWay { abort_asked: true };
                }
                let transfer = TransferId(id.0);
                self.commands.push_back(transfer::Command::Abort { transfer, reason });
            }
            // The transfers never heard of it, or have done with it: nothing is in flight.
            Some(TransferState::NotBegun | TransferState::Over) | None => {
                self.inputs.push_back(Input::TransferEnded { id, delivered: false });
            }
        }
    }

    /// What the transfers report.
    pub fn on_transfer_event(&mut self, event: transfer::Event, now: Instant) {
        match event {
            // Step 3, prefill: the RESERVE is here, so the scheduler may see the request.
            transfer::Event::Ready { transfer, first_block, block_count: _, traceparent } => {
                let id = SequenceId(transfer.0);
                if let Some(record) = self.in_work.get_mut(&id) {
                    record.stages.end(Stage::Queue);
                    record.stages.begin(Stage::Prefill);
                    record.stages.set_transfer_parent(traceparent);
                    record.admitted_at = Some(now);
                    self.metrics.queued(now.saturating_duration_since(record.arrived_at));
                }
                self.inputs.push_back(Input::TransferReady { id, first_block });
            }
            // Step 5, decode: every block and DONE are here; the blocks become visible.
            transfer::Event::Arrived { transfer, first_index, token, stats } => {
                let id = SequenceId(transfer.0);
                if let Some(record) = self.in_work.get_mut(&id) {
                    record.received = stats;
                }
                self.transfer_over(id, TransferSide::Receiver, TransferEnd::Complete, stats);
                self.inputs.push_back(Input::KvArrived { id, first_index, token });
                self.forget_if_over(id);
            }
            transfer::Event::ReceiveFailed { transfer, failure } => {
                self.on_transfer_failed(transfer, TransferSide::Receiver, failure);
            }
            // Step 4, prefill: D has everything; P's reference on the blocks may go.
            transfer::Event::Delivered { transfer, stats } => {
                let id = SequenceId(transfer.0);
                self.transfer_over(id, TransferSide::Sender, TransferEnd::Complete, stats);
                self.inputs.push_back(Input::TransferEnded { id, delivered: true });
                self.complete(id, SequenceEnd::HandedOver, AttemptEnd::Delivered(stats));
            }
            transfer::Event::SendFailed { transfer, failure } => {
                self.on_transfer_failed(transfer, TransferSide::Sender, failure);
            }
        }
    }

    /// The router owns recovery: this node says what failed and lets go of the blocks.
    fn on_transfer_failed(
        &mut self,
        transfer: TransferId,
        side: TransferSide,
        failure: TransferFailure,
    ) {
        let id = SequenceId(transfer.0);
        let (end, kind) = match &failure {
            TransferFailure::Refused { .. } | TransferFailure::WeightsChanged { .. } => {
                (TransferEnd::Refused, FailureKind::Mismatch)
            }
            TransferFailure::PeerLost { .. } => {
                (TransferEnd::PeerLost, FailureKind::TransferFailed)
            }
            TransferFailure::PeerAborted { .. } | TransferFailure::Aborted { .. } => {
                (TransferEnd::Aborted, FailureKind::TransferFailed)
            }
            TransferFailure::Deadline { .. } => {
                (TransferEnd::Deadline, FailureKind::TransferFailed)
            }
            TransferFailure::Damaged { .. } => (TransferEnd::Damaged, FailureKind::TransferFailed),
            TransferFailure::Protocol { .. } => {
                (TransferEnd::Protocol, FailureKind::TransferFailed)
            }
        };
        let message = failure.to_string();
        if let Some(record) = self.in_work.get(&id) {
            record.stages.span(Stage::Transfer).record("error", message.as_str());
        }
        self.transfer_over(id, side, end, TransferStats::default());
        self.inputs.push_back(Input::TransferEnded { id, delivered: false });
        self.fail(id, SequenceEnd::TransferFailed, AttemptEnd::failed(kind, message));
        self.forget_if_over(id);
    }

    /// Step 6: the router has what it wants, or its client left.
    pub fn cancel(&mut self, id: SequenceId, place: &Place) {
        let Some(record) = self.in_work.get_mut(&id) else { return };
        // A refused second start of the same id is not this attempt.
        if !std::sync::Arc::ptr_eq(&record.place, place) {
            return;
        }
        let told = record.events.take().is_none();
        record.verdict = None;
        record.stages.fail("cancelled");
        if !told {
            self.metrics.sequence_ended(SequenceEnd::Cancelled);
            self.inputs.push_back(Input::Abort { id });
        }
        self.forget_if_over(id);
    }

    /// The drain deadline: everything ends now, and nothing new begins.
    pub fn end_all(&mut self, message: &str) {
        self.close(SequenceEnd::Cancelled, FailureKind::Draining, message);
    }

    /// Nothing can be computed any more: everything fails, and nothing new begins.
    pub fn fail_all(&mut self, message: &str) {
        self.close(SequenceEnd::Internal, FailureKind::Internal, message);
    }

    fn close(&mut self, how: SequenceEnd, kind: FailureKind, message: &str) {
        self.closed = true;
        let ids: Vec<SequenceId> = self.in_work.keys().copied().collect();
        for id in ids {
            self.inputs.push_back(Input::Abort { id });
            self.fail(id, how, AttemptEnd::failed(kind, message));
        }
    }

    /// One more event for the caller, who must keep up.
    fn tell(&mut self, id: SequenceId, event: AttemptEvent) {
        let Some(record) = self.in_work.get_mut(&id) else { return };
        let Some(events) = &record.events else { return };
        if events.send(event).is_err() {
            self.inputs.push_back(Input::Abort { id });
            let message = "the stream was not read for too long";
            let end = AttemptEnd::failed(FailureKind::SlowReader, message);
            self.fail(id, SequenceEnd::SlowReader, end);
        }
    }

    /// A contradiction in what the scheduler says.
    fn defect(&mut self, id: SequenceId, message: &str) {
        tracing::error!(transfer_id = %TransferId(id.0), "{message}");
        self.inputs.push_back(Input::Abort { id });
        let end = AttemptEnd::failed(FailureKind::Internal, message);
        self.fail(id, SequenceEnd::Internal, end);
    }

    /// Ends the stream, unless it ended before.
    fn fail(&mut self, id: SequenceId, how: SequenceEnd, end: AttemptEnd) {
        if let Some(record) = self.in_work.get_mut(&id)
            && let AttemptEnd::Failed { message, .. } = &end
        {
            record.stages.fail(message);
        }
        self.complete(id, how, end);
    }

    fn complete(&mut self, id: SequenceId, how: SequenceEnd, end: AttemptEnd) {
        let Some(record) = self.in_work.get_mut(&id) else { return };
        if let Some(events) = record.events.take() {
            self.metrics.sequence_ended(how);
            if let AttemptEnd::Failed { kind, message } = &end {
                log_failure(record.stages.request_id(), id, *kind, message);
            }
            events.end(end);
        }
        self.forget_if_over(id);
    }

    fn transfer_over(
        &mut self,
        id: SequenceId,
        side: TransferSide,
        end: TransferEnd,
        stats: TransferStats,
    ) {
        self.metrics.transfer_ended(side, end, stats.bytes, stats.elapsed);
        let Some(record) = self.in_work.get_mut(&id) else { return };
        record.transfer = TransferState::Over;
        let span = record.stages.span(Stage::Transfer);
        span.record("bytes", stats.bytes);
        span.record("chunks", stats.chunks);
        record.stages.end(Stage::Transfer);
    }

    fn forget_if_over(&mut self, id: SequenceId) {
        if let Some(record) = self.in_work.get(&id)
            && record.events.is_none()
            && !matches!(record.transfer, TransferState::UnderWay { .. })
        {
            self.in_work.remove(&id);
        }
    }
}

impl InWork {
    /// Commands on a transfer that is ending would be out of place.
    fn may_command_transfer(&self) -> bool {
        self.transfer == TransferState::UnderWay { abort_asked: false }
    }
}

/// Once, where it is handled. What a client or a full node causes is no warning.
fn log_failure(request_id: u128, id: SequenceId, kind: FailureKind, message: &str) {
    macro_rules! log {
        ($level:ident) => {
            tracing::$level!(
                request_id = format_args!("{request_id:032x}"),
                transfer_id = %TransferId(id.0),
                kind = kind.as_str_name(),
                "attempt failed: {message}"
            )
        };
    }
    match kind {
        FailureKind::Internal | FailureKind::Unspecified => log!(error),
        FailureKind::TransferFailed | FailureKind::Mismatch => log!(warn),
        FailureKind::Busy
        | FailureKind::Deadline
        | FailureKind::Draining
        | FailureKind::SlowReader
        | FailureKind::Invalid => log!(info),
    }
}

fn sequence_end(reason: FinishReason) -> SequenceEnd {
    match reason {
        FinishReason::Stop => SequenceEnd::Stop,
        FinishReason::Length => SequenceEnd::Length,
    }
}

#[cfg(test)]
mod tests;
