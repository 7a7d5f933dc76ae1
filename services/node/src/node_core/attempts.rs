//! The attempts of this node: which call gets which reply, and when each transfer begins and ends.
//!
//! This module mediates between the caller ([`Reply`]), the scheduler ([`Input`], [`Action`]) and
//! the transfers ([`transfer::Command`], [`transfer::Event`]). Scheduler inputs, transfer commands
//! and outputs are queued; [`NodeCore::poll_output`](super::NodeCore::poll_output) empties the
//! queues. In the comments D is the decode node and P the prefill node of a request.
//!
//! A record lives from [`Attempts::call`] until the caller got its last reply (or disconnected)
//! *and* the attempt has no active transfer. The scheduler may know the sequence for a shorter or
//! longer time; actions on unknown ids are ignored.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::{Duration, Instant},
};

use engine::{
    constraint::COMPILE_TIMEOUT,
    event::{Action, FinishReason, Input, SequenceFailure, SequenceId, SequenceKind},
};
use kernels::sampling::{SampledToken, TokenLogprobs};
use kv_transfer::{
    api::{self as transfer, PeerAddress, TransferFailure, TransferId, TransferStats},
    config::LEASE,
};
use proto::v1::{FailureKind, StageTimes};

use super::output::{
    AttemptEnd, AttemptEvent, AttemptStage, Call, CallId, CloseReason, Metric, NodeOutput, Outputs,
    Refusal, Reply, SequenceOutcome, StageAttributes, StageChange,
};

/// Ids of recent attempts: a few minutes of calls on a busy node.
const KNOWN_MAX: usize = 4096;

/// The records of all attempts, and the queues between scheduler, callers and transfers.
pub(super) struct Attempts {
    /// The weights in use.
    weight_version: u64,
    records: HashMap<SequenceId, AttemptRecord>,
    known: KnownIds,
    /// Inputs for the scheduler, in order.
    inputs: VecDeque<Input>,
    /// Commands for the transfers, in order. Each attempt adds at most a reservation or
    /// expectation, one range per chunk, a finish and an abort.
    commands: VecDeque<(Option<CallId>, transfer::Command)>,
    pub outputs: Outputs,
    /// Whether new calls are rejected, except those of sequences that move to another node.
    is_draining: bool,
}

/// Tokens of one step, as the scheduler reports them.
struct SampledTokens {
    first_index: u32,
    tokens: Vec<SampledToken>,
    cached_tokens: u32,
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
}

impl SampledTokens {
    fn event(
        self,
        weight_version: u64,
        finish: Option<FinishReason>,
        stages: Option<StageTimes>,
    ) -> AttemptEvent {
        let Self { first_index, tokens, cached_tokens, prompt_logprobs } = self;
        AttemptEvent::Tokens {
            first_index,
            tokens,
            cached_tokens,
            prompt_logprobs,
            weight_version,
            finish,
            stages,
        }
    }
}

struct AttemptRecord {
    call: CallId,
    request_id: u128,
    caller: CallerState,
    kind: SequenceKind,
    peer: Option<PeerAddress>,
    prompt_hash: u128,
    prompt_tokens: u32,
    deadline: Instant,
    /// Maximum time that the other node of the pair takes to compile the grammar.
    compile_time: Duration,
    transfer: TransferState,
    /// Prefill: token 0, until `Finished` says whether token 0 is the last one.
    token_0: Option<SampledTokens>,
    received: TransferStats,
    /// Bit `stage as usize` is set while the stage is open.
    open_stages: u8,
    arrived_at: Instant,
    /// When the scheduler admitted the sequence, or the `RESERVE` arrived.
    admitted_at: Option<Instant>,
    /// Time from the admission to the first token, if this node prefilled.
    prefill_time: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallerState {
    /// Waits until the scheduler accepts or rejects the sequence.
    Waiting,
    Streaming,
    /// Got its last reply, or disconnected.
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferState {
    /// No command named the transfer yet.
    NotBegun,
    /// The transfer has begun, and its final event has not arrived.
    Active {
        is_aborted: bool,
    },
    Ended,
}

impl Attempts {
    pub(super) fn new(weight_version: u64) -> Self {
        Self {
            weight_version,
            records: HashMap::new(),
            known: KnownIds::default(),
            inputs: VecDeque::new(),
            commands: VecDeque::new(),
            outputs: Outputs::new(),
            is_draining: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    pub(super) fn next_input(&mut self) -> Option<Input> {
        self.inputs.pop_front()
    }

    /// Returns the next input if it is KV that has arrived.
    pub(super) fn next_arrived_kv(&mut self) -> Option<Input> {
        self.inputs.pop_front_if(|input| matches!(input, Input::KvArrived { .. }))
    }

    pub(super) fn next_command(&mut self) -> Option<(Option<CallId>, transfer::Command)> {
        self.commands.pop_front()
    }

    /// Returns the next command if it sends what this node has computed.
    pub(super) fn next_send(&mut self) -> Option<(Option<CallId>, transfer::Command)> {
        use transfer::Command::{Finish, Written};
        self.commands.pop_front_if(|(_, command)| matches!(command, Written { .. } | Finish { .. }))
    }

    /// Tells the transfers, after all earlier commands, that the weights have changed.
    pub(super) fn change_weights(&mut self, weight_version: u64) {
        self.weight_version = weight_version;
        self.commands.push_back((None, transfer::Command::ChangeWeights { weight_version }));
    }

    /// Rejects new calls from now on, or accepts them again.
    pub(super) fn set_draining(&mut self, is_draining: bool) {
        self.is_draining = is_draining;
    }

    /// Handles the router's `Decode` or `Prefill` call.
    pub(super) fn call(&mut self, call: Call, now: Instant) {
        let (id, call_id) = (call.sequence.id, call.id());
        let refusal = if self.is_draining && !self.moves_away(&call) {
            Some(Refusal::Draining)
        } else if call.weight_version != self.weight_version || self.weight_version == 0 {
            let (named, own) = (call.weight_version, self.weight_version);
            Some(Refusal::OtherWeights { named, own })
        } else if self.known.contains(id) || self.records.contains_key(&id) {
            Some(Refusal::Duplicate { id: id.0 })
        } else {
            None
        };
        if let Some(refusal) = refusal {
            let reply = Reply::Rejected(refusal);
            self.outputs.push_back(NodeOutput::Reply { call: call_id, reply });
            return self.outputs.push_back(NodeOutput::Forgotten { call: call_id });
        }
        self.known.insert(id);
        let has_grammar = call.sequence.constraint.is_some();
        let mut record = AttemptRecord {
            call: call_id,
            request_id: call.request_id,
            caller: CallerState::Waiting,
            kind: call.sequence.kind,
            peer: call.peer,
            prompt_hash: call.prompt_hash,
            prompt_tokens: call.sequence.tokens.len() as u32,
            deadline: call.sequence.deadline,
            compile_time: if has_grammar { COMPILE_TIMEOUT } else { Duration::ZERO },
            transfer: TransferState::NotBegun,
            token_0: None,
            received: TransferStats::default(),
            open_stages: 0,
            arrived_at: now,
            admitted_at: None,
            prefill_time: None,
        };
        let stage = match record.kind {
            SequenceKind::Compute | SequenceKind::Send => AttemptStage::Queue,
            SequenceKind::Receive => AttemptStage::Reserve,
        };
        record.begin(stage, &mut self.outputs);
        self.records.insert(id, record);
        self.inputs.push_back(Input::Arrived(call.sequence));
    }

    /// Returns whether the call sends the KV of a sequence that this node decodes to another node.
    fn moves_away(&self, call: &Call) -> bool {
        let decodes = |record: &AttemptRecord| {
            record.request_id == call.request_id
                && record.kind != SequenceKind::Send
                && record.caller == CallerState::Streaming
        };
        call.sequence.kind == SequenceKind::Send && self.records.values().any(decodes)
    }

    /// Accepts the call after the scheduler has seen its arrival and the resulting actions are
    /// handled, unless the sequence failed at once.
    pub(super) fn scheduled(&mut self, id: SequenceId, now: Instant) {
        let Some(record) = self.records.get_mut(&id) else { return };
        if record.caller != CallerState::Waiting {
            return;
        }
        record.caller = CallerState::Streaming;
        self.outputs.push_back(NodeOutput::Reply { call: record.call, reply: Reply::Accepted });
        // On P the transfers pair this call with D's `RESERVE`. Either may come first.
        if record.kind == SequenceKind::Send
            && let Some(peer) = record.peer.clone()
        {
            record.transfer = TransferState::Active { is_aborted: false };
            let command = transfer::Command::Send {
                transfer: TransferId(id.0),
                peer,
                prompt_hash: record.prompt_hash,
                deadline: record.deadline.saturating_duration_since(now),
                traceparent: String::new(),
            };
            self.commands.push_back((Some(record.call), command));
        }
    }

    /// Handles a command that the full transfer queue has rejected. If the command begins a
    /// transfer, rejects the call as busy and returns false. Returns true for a command of an
    /// active transfer: the owner must offer it again before any other command.
    pub(super) fn transfer_queue_full(
        &mut self,
        call: Option<CallId>,
        command: transfer::Command,
        reason: String,
    ) -> bool {
        match command {
            transfer::Command::Receive { transfer, .. }
            | transfer::Command::Send { transfer, .. } => {
                self.transfer_rejected(SequenceId(transfer.0), reason);
                false
            }
            transfer::Command::Written { .. }
            | transfer::Command::Finish { .. }
            | transfer::Command::Abort { .. }
            | transfer::Command::ChangeWeights { .. }
            | transfer::Command::Connect { .. } => {
                self.commands.push_front((call, command));
                true
            }
        }
    }

    fn transfer_rejected(&mut self, id: SequenceId, reason: String) {
        let Some(record) = self.records.get_mut(&id) else { return };
        record.transfer = TransferState::Ended;
        // No block is in flight. Report the end of the transfer here: the scheduler answers only
        // the first abort with an action, which may have been handled before the refusal. A second
        // report is ignored.
        self.inputs.push_back(Input::Abort { id });
        self.inputs.push_back(Input::TransferEnded { id });
        self.fail(id, FailureKind::Busy, reason);
    }

    /// Handles an action of the scheduler.
    pub(super) fn on_action(&mut self, action: Action, now: Instant) {
        match action {
            // D requests the blocks that D does not have from P.
            Action::Reserve { id, cached_tokens, first_block, blocks } => {
                let Some(record) = self.records.get_mut(&id) else { return };
                let Some(peer) = record.peer.clone() else { return };
                let cached_tokens = Some(cached_tokens);
                let attributes = StageAttributes { cached_tokens, ..Default::default() };
                record.end(AttemptStage::Reserve, attributes, &mut self.outputs);
                record.begin(AttemptStage::Transfer, &mut self.outputs);
                record.transfer = TransferState::Active { is_aborted: false };
                let command = transfer::Command::Receive {
                    transfer: TransferId(id.0),
                    peer,
                    prompt_hash: record.prompt_hash,
                    first_block,
                    blocks,
                    answer_timeout: LEASE + record.compile_time,
                    deadline: record.deadline.saturating_duration_since(now),
                    traceparent: String::new(),
                };
                self.commands.push_back((Some(record.call), command));
            }
            // On D: the router may emit token 0.
            Action::Admitted { id, cached_tokens, local_prefill } => {
                let Some(record) = self.records.get_mut(&id) else { return };
                for stage in [AttemptStage::Queue, AttemptStage::Reserve] {
                    let cached_tokens = Some(cached_tokens);
                    let attributes = StageAttributes { cached_tokens, ..Default::default() };
                    record.end(stage, attributes, &mut self.outputs);
                }
                if local_prefill {
                    record.begin(AttemptStage::Prefill, &mut self.outputs);
                }
                record.admit(now, &mut self.outputs);
                record.look_up_prefix(cached_tokens, &mut self.outputs);
                record.send(
                    AttemptEvent::Reserved { cached_tokens, local_prefill },
                    &mut self.outputs,
                );
            }
            // On P: a range of blocks may be sent.
            Action::KvWritten { id, first_block, blocks } => {
                let Some(record) = self.records.get_mut(&id) else { return };
                record.begin(AttemptStage::Transfer, &mut self.outputs);
                if record.may_command_transfer() {
                    let transfer = TransferId(id.0);
                    let command = transfer::Command::Written { transfer, first_block, blocks };
                    self.commands.push_back((Some(record.call), command));
                }
            }
            Action::Tokens { id, first_index, tokens, cached_tokens, prompt_logprobs } => {
                let sampled = SampledTokens { first_index, tokens, cached_tokens, prompt_logprobs };
                self.on_tokens(id, sampled, now);
            }
            Action::Finished { id, reason } => self.on_finished(id, reason),
            Action::Failed { id, failure } => self.on_failed(id, failure),
            Action::AbortTransfer { id, reason } => self.abort_transfer(id, reason),
            Action::Save(job) => self.outputs.push_back(NodeOutput::Save(job)),
            Action::CancelSaves { last } => {
                self.outputs.push_back(NodeOutput::CancelSaves { last })
            }
            Action::Load(load) => {
                if let Some(record) = self.records.get_mut(&load.id) {
                    record.begin(AttemptStage::Load, &mut self.outputs);
                }
                self.outputs.push_back(NodeOutput::Load(load));
            }
            Action::Loaded { id, tokens } => {
                let attributes =
                    StageAttributes { loaded_tokens: Some(tokens), ..Default::default() };
                if let Some(record) = self.records.get_mut(&id) {
                    record.end(AttemptStage::Load, attributes, &mut self.outputs);
                }
            }
        }
    }

    /// Handles sampled tokens. On D these are tokens 0, 1, 2, … On P this is token 0, which waits
    /// for `Finished` of the same step: then it is known whether token 0 is the last token.
    fn on_tokens(&mut self, id: SequenceId, sampled: SampledTokens, now: Instant) {
        let Some(record) = self.records.get_mut(&id) else { return };
        if record.end(AttemptStage::Prefill, StageAttributes::default(), &mut self.outputs)
            && let Some(admitted_at) = record.admitted_at
        {
            let took = now.saturating_duration_since(admitted_at);
            record.prefill_time = Some(took);
            self.outputs.push_back(NodeOutput::Metric(Metric::PrefillTime(took)));
        }
        if record.kind == SequenceKind::Send {
            record.look_up_prefix(sampled.cached_tokens, &mut self.outputs);
            record.token_0 = Some(sampled);
            return;
        }
        let is_first = record.begin(AttemptStage::Decode, &mut self.outputs);
        let stages = is_first.then(|| record.stage_times());
        let event = sampled.event(self.weight_version, None, stages);
        record.send(event, &mut self.outputs);
    }

    fn on_finished(&mut self, id: SequenceId, reason: Option<FinishReason>) {
        let Some(record) = self.records.get_mut(&id) else { return };
        match (record.kind, reason) {
            (SequenceKind::Send, finish) => {
                let sampled = record.token_0.take();
                let first =
                    sampled.and_then(|sampled| Some((sampled.tokens.first()?.clone(), sampled)));
                let Some((token, sampled)) = first else {
                    return self.fail_as_bug(id, "the sequence finished without a token");
                };
                let first_index = sampled.first_index;
                // P sends token 0 straight to the router, ahead of the transfer.
                let stages = Some(record.stage_times());
                record.send(sampled.event(self.weight_version, finish, stages), &mut self.outputs);
                let Some(reason) = finish else {
                    // On P: with token 0 the transfer can complete.
                    record.begin(AttemptStage::Transfer, &mut self.outputs);
                    if record.may_command_transfer() {
                        let transfer = TransferId(id.0);
                        let command = transfer::Command::Finish { transfer, first_index, token };
                        self.commands.push_back((Some(record.call), command));
                    }
                    return;
                };
                // Token 0 ended the request: nothing is delivered, and the scheduler has aborted
                // the transfer.
                self.end(id, SequenceOutcome::Finished(reason), AttemptEnd::Complete);
            }
            (SequenceKind::Compute | SequenceKind::Receive, Some(reason)) => {
                let received = record.received;
                let outcome = SequenceOutcome::Finished(reason);
                self.end(id, outcome, AttemptEnd::Finished { reason, received });
            }
            (SequenceKind::Compute | SequenceKind::Receive, None) => {
                self.fail_as_bug(id, "the sequence finished without a reason");
            }
        }
    }

    fn on_failed(&mut self, id: SequenceId, failure: SequenceFailure) {
        let Some(record) = self.records.get(&id) else { return };
        let is_waiting = record.caller == CallerState::Waiting;
        let message = failure.to_string();
        let (kind, refusal) = match failure {
            SequenceFailure::Busy { reason } => (FailureKind::Busy, Refusal::Busy { reason }),
            SequenceFailure::Invalid { reason } => {
                (FailureKind::Invalid, Refusal::Invalid { reason })
            }
            // Rejects the arrival only: the known sequence continues.
            SequenceFailure::Duplicate => (FailureKind::Invalid, Refusal::Duplicate { id: id.0 }),
            SequenceFailure::Deadline => (FailureKind::Deadline, Refusal::Deadline),
            SequenceFailure::TransferFailed => {
                (FailureKind::TransferFailed, Refusal::Internal { reason: message.clone() })
            }
            SequenceFailure::WeightsChanged => {
                (FailureKind::WeightsChanged, Refusal::WeightsChanged)
            }
            SequenceFailure::Internal { .. } => {
                (FailureKind::Internal, Refusal::Internal { reason: message.clone() })
            }
        };
        match is_waiting {
            true => self.reject(id, kind, refusal),
            false => self.fail(id, kind, message),
        }
    }

    /// Handles a transfer that the scheduler no longer wants. The scheduler waits for
    /// `TransferEnded`.
    fn abort_transfer(&mut self, id: SequenceId, reason: String) {
        if let Some(record) = self.records.get_mut(&id)
            && let TransferState::Active { is_aborted } = &mut record.transfer
        {
            if !std::mem::replace(is_aborted, true) {
                let command = transfer::Command::Abort { transfer: TransferId(id.0), reason };
                self.commands.push_back((Some(record.call), command));
            }
            return;
        }
        // The transfers do not know it, or have ended it: no block is in flight.
        self.inputs.push_back(Input::TransferEnded { id });
    }

    pub(super) fn on_transfer_event(&mut self, event: transfer::Event, now: Instant) {
        match event {
            // On P: the `RESERVE` has arrived, so the scheduler may run the sequence.
            transfer::Event::Ready { transfer, first_block, block_count, traceparent } => {
                let id = SequenceId(transfer.0);
                if let Some(record) = self.records.get_mut(&id) {
                    let call = record.call;
                    record.end(AttemptStage::Queue, StageAttributes::default(), &mut self.outputs);
                    record.begin(AttemptStage::Prefill, &mut self.outputs);
                    let change = StageChange::TransferParent { traceparent };
                    self.outputs.push_back(NodeOutput::Stage { call, change });
                    record.admit(now, &mut self.outputs);
                }
                self.inputs.push_back(Input::TransferReady { id, first_block, block_count });
            }
            // On D: every block and `DONE` have arrived, and the blocks become visible.
            transfer::Event::Arrived { transfer, first_index, token, stats } => {
                let id = SequenceId(transfer.0);
                if let Some(record) = self.records.get_mut(&id) {
                    record.received = stats;
                }
                self.transfer_ended(id, Metric::Received, Ok(stats));
                self.inputs.push_back(Input::KvArrived { id, first_index, token });
                self.forget_if_over(id);
            }
            transfer::Event::ReceiveFailed { transfer, failure } => {
                self.on_transfer_failed(transfer, Metric::Received, failure);
            }
            // On P: D has every block, so P may release its reference on the blocks.
            transfer::Event::Delivered { transfer, stats } => {
                let id = SequenceId(transfer.0);
                self.transfer_ended(id, Metric::Sent, Ok(stats));
                self.inputs.push_back(Input::TransferEnded { id });
                self.end(id, SequenceOutcome::HandedOver, AttemptEnd::Delivered(stats));
            }
            transfer::Event::SendFailed { transfer, failure } => {
                self.on_transfer_failed(transfer, Metric::Sent, failure);
            }
        }
    }

    /// Reports the failure and frees the blocks: the router owns recovery.
    fn on_transfer_failed(
        &mut self,
        transfer: TransferId,
        metric: fn(Result<TransferStats, TransferFailure>) -> Metric,
        failure: TransferFailure,
    ) {
        let id = SequenceId(transfer.0);
        let kind = match failure {
            TransferFailure::Refused { .. } => FailureKind::Mismatch,
            _ => FailureKind::TransferFailed,
        };
        let message = failure.to_string();
        self.transfer_ended(id, metric, Err(failure));
        self.inputs.push_back(Input::TransferEnded { id });
        self.fail(id, kind, message);
        self.forget_if_over(id);
    }

    /// Handles the end of a call: the router has all tokens that it needs, or its client
    /// disconnected.
    pub(super) fn cancel(&mut self, call: CallId) {
        let id = call.sequence;
        let Some(record) = self.records.get_mut(&id).filter(|record| record.call == call) else {
            return;
        };
        let caller = std::mem::replace(&mut record.caller, CallerState::Gone);
        record.fail_stages("cancelled", &mut self.outputs);
        if caller != CallerState::Gone {
            let metric = Metric::SequenceFinished(SequenceOutcome::Cancelled);
            self.outputs.push_back(NodeOutput::Metric(metric));
            self.inputs.push_back(Input::Abort { id });
        }
        self.forget_if_over(id);
    }

    /// Handles a caller whose queue was full when an event was sent.
    pub(super) fn slow_reader(&mut self, call: CallId) {
        let id = call.sequence;
        if self.records.get(&id).is_none_or(|record| record.call != call) {
            return;
        }
        self.inputs.push_back(Input::Abort { id });
        let message = "the caller did not read its stream for too long";
        self.fail(id, FailureKind::SlowReader, message.to_owned());
    }

    /// Ends every attempt now and rejects new calls.
    pub(super) fn close(&mut self, reason: &CloseReason) {
        self.is_draining = true;
        let kind = match reason {
            CloseReason::DrainTimeout | CloseReason::Stopped => FailureKind::Draining,
            CloseReason::EngineFailed { .. } => FailureKind::Internal,
        };
        let mut ids: Vec<SequenceId> = self.records.keys().copied().collect();
        // Sorted, so that equal inputs give equal outputs.
        ids.sort_unstable();
        for id in ids {
            self.inputs.push_back(Input::Abort { id });
            self.fail(id, kind, reason.to_string());
        }
    }

    /// Fails an attempt because the scheduler's actions contradict each other.
    fn fail_as_bug(&mut self, id: SequenceId, message: &str) {
        self.inputs.push_back(Input::Abort { id });
        self.fail(id, FailureKind::Internal, message.to_owned());
    }

    /// Ends the stream, or rejects a call that is not accepted yet.
    fn fail(&mut self, id: SequenceId, kind: FailureKind, message: String) {
        let Some(record) = self.records.get_mut(&id) else { return };
        record.fail_stages(&message, &mut self.outputs);
        if record.caller == CallerState::Waiting {
            let refusal = match kind {
                FailureKind::Draining => Refusal::Draining,
                _ => Refusal::Internal { reason: message },
            };
            return self.reject(id, kind, refusal);
        }
        self.end(id, SequenceOutcome::Failed(kind), AttemptEnd::Failed { kind, message });
    }

    fn reject(&mut self, id: SequenceId, kind: FailureKind, refusal: Refusal) {
        let Some(record) = self.records.get_mut(&id) else { return };
        record.fail_stages(&refusal.to_string(), &mut self.outputs);
        record.caller = CallerState::Gone;
        let outcome = SequenceOutcome::Failed(kind);
        self.outputs.push_back(NodeOutput::Metric(Metric::SequenceFinished(outcome)));
        let reply = Reply::Rejected(refusal);
        self.outputs.push_back(NodeOutput::Reply { call: record.call, reply });
        self.forget_if_over(id);
    }

    /// Ends the stream, unless the caller got its last reply before.
    fn end(&mut self, id: SequenceId, outcome: SequenceOutcome, last: AttemptEnd) {
        let Some(record) = self.records.get_mut(&id) else { return };
        if std::mem::replace(&mut record.caller, CallerState::Gone) != CallerState::Gone {
            self.outputs.push_back(NodeOutput::Metric(Metric::SequenceFinished(outcome)));
            let reply = Reply::Ended(last);
            self.outputs.push_back(NodeOutput::Reply { call: record.call, reply });
        }
        self.forget_if_over(id);
    }

    fn transfer_ended(
        &mut self,
        id: SequenceId,
        metric: fn(Result<TransferStats, TransferFailure>) -> Metric,
        ended: Result<TransferStats, TransferFailure>,
    ) {
        let attributes = StageAttributes {
            transferred: Some(ended.as_ref().copied().unwrap_or_default()),
            error: ended.as_ref().err().map(ToString::to_string),
            ..Default::default()
        };
        self.outputs.push_back(NodeOutput::Metric(metric(ended)));
        let Some(record) = self.records.get_mut(&id) else { return };
        record.transfer = TransferState::Ended;
        record.end(AttemptStage::Transfer, attributes, &mut self.outputs);
    }

    fn forget_if_over(&mut self, id: SequenceId) {
        if let Some(record) = self.records.get(&id)
            && record.caller == CallerState::Gone
            && !matches!(record.transfer, TransferState::Active { .. })
        {
            self.outputs.push_back(NodeOutput::Forgotten { call: record.call });
            self.records.remove(&id);
        }
    }
}

impl AttemptRecord {
    /// Returns whether the transfer takes commands. An aborted transfer takes none.
    fn may_command_transfer(&self) -> bool {
        self.transfer == TransferState::Active { is_aborted: false }
    }

    fn send(&self, event: AttemptEvent, outputs: &mut Outputs) {
        if self.caller != CallerState::Gone {
            outputs.push_back(NodeOutput::Reply { call: self.call, reply: Reply::Event(event) });
        }
    }

    fn admit(&mut self, now: Instant, outputs: &mut Outputs) {
        self.admitted_at = Some(now);
        let waited = now.saturating_duration_since(self.arrived_at);
        outputs.push_back(NodeOutput::Metric(Metric::QueueTime(waited)));
    }

    fn look_up_prefix(&self, cached_tokens: u32, outputs: &mut Outputs) {
        let prompt_tokens = self.prompt_tokens;
        outputs
            .push_back(NodeOutput::Metric(Metric::PrefixLookup { prompt_tokens, cached_tokens }));
    }

    /// Returns the times of the stages until the first token.
    fn stage_times(&self) -> StageTimes {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let waited =
            self.admitted_at.map(|at| micros(at.saturating_duration_since(self.arrived_at)));
        let (queue_us, reserve_us) = match self.kind {
            SequenceKind::Compute | SequenceKind::Send => (waited, None),
            SequenceKind::Receive => (None, waited),
        };
        StageTimes { queue_us, reserve_us, prefill_us: self.prefill_time.map(micros) }
    }

    /// Opens a stage, unless it is open. Returns true if the stage was not open.
    fn begin(&mut self, stage: AttemptStage, outputs: &mut Outputs) -> bool {
        let is_new = self.open_stages & (1 << stage as u8) == 0;
        if is_new {
            self.open_stages |= 1 << stage as u8;
            outputs.push_back(NodeOutput::Stage {
                call: self.call,
                change: StageChange::Began(stage),
            });
        }
        is_new
    }

    /// Ends a stage. Returns true if the stage was open.
    fn end(
        &mut self,
        stage: AttemptStage,
        attributes: StageAttributes,
        outputs: &mut Outputs,
    ) -> bool {
        let is_open = self.open_stages & (1 << stage as u8) != 0;
        if is_open {
            self.open_stages &= !(1 << stage as u8);
            let change = StageChange::Ended { stage, attributes };
            outputs.push_back(NodeOutput::Stage { call: self.call, change });
        }
        is_open
    }

    /// Ends every open stage with this error.
    fn fail_stages(&mut self, error: &str, outputs: &mut Outputs) {
        if std::mem::take(&mut self.open_stages) != 0 {
            let change = StageChange::Failed { error: error.to_owned() };
            outputs.push_back(NodeOutput::Stage { call: self.call, change });
        }
    }
}

/// The last [`KNOWN_MAX`] ids: a second call with a known id is rejected.
#[derive(Debug, Default)]
struct KnownIds {
    ids: HashSet<SequenceId>,
    oldest_first: VecDeque<SequenceId>,
}

impl KnownIds {
    fn contains(&self, id: SequenceId) -> bool {
        self.ids.contains(&id)
    }

    fn insert(&mut self, id: SequenceId) {
        if !self.ids.insert(id) {
            return;
        }
        self.oldest_first.push_back(id);
        if self.oldest_first.len() > KNOWN_MAX
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.ids.remove(&oldest);
        }
        debug_assert_eq!(self.ids.len(), self.oldest_first.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_id_is_forgotten_first() {
        let mut known = KnownIds::default();
        for id in 0..KNOWN_MAX as u128 + 1 {
            known.insert(SequenceId(id));
            known.insert(SequenceId(id));
        }
        assert!(!known.contains(SequenceId(0)));
        assert!(known.contains(SequenceId(1)) && known.contains(SequenceId(KNOWN_MAX as u128)));
        assert_eq!(known.oldest_first.len(), KNOWN_MAX);
    }
}
