//! A request's journey through one node: who is told what.
//!
//! The rules of `services/node/src/journey.rs`, act by act, without its spans, metrics and channels;
//! what it hands on in queues is handed on here as there, in the same order.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Instant,
};

use engine::event::{
    Action, FinishReason, Input, NewSequence, SequenceFailure, SequenceId, SequenceKind,
};
use kernels::sampling::SampledToken;
use kv_transfer::api::{self as transfer, PeerAddress, TransferFailure, TransferId};
use proto::v1::FailureKind;

pub const TRANSFERS_FULL: &str = "the transfer queue is full";

/// A call of the router, as the node takes it.
#[derive(Clone, Debug)]
pub struct Begun {
    pub sequence: NewSequence,
    pub peer: Option<PeerAddress>,
    pub prompt_hash: u128,
}

/// What the router hears of a call. The last four end it.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    Reserved {
        alone: bool,
    },
    /// On a prefill node this is token 0, with `finish` when it ends all.
    Tokens {
        first_index: u32,
        ids: Vec<u32>,
        finish: Option<FinishReason>,
    },
    /// Prefill: the decode node has everything.
    Delivered,
    /// Decode: the answer is complete.
    Finished {
        reason: FinishReason,
    },
    /// Refused at once, or failed later.
    Failed {
        kind: Failed,
        message: String,
    },
    /// Prefill: token 0 said that it is the last. Or the connection ended.
    Cut,
}

/// Why a call failed, as far as the router tells reasons apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// Another process stands there.
    Stale,
    Reported(FailureKind),
}

impl Said {
    pub fn failed(kind: FailureKind, message: impl Into<String>) -> Self {
        Self::Failed { kind: Failed::Reported(kind), message: message.into() }
    }

    /// Nothing follows it on this call.
    pub fn is_end(&self) -> bool {
        match self {
            Self::Reserved { .. } | Self::Tokens { .. } => false,
            Self::Delivered | Self::Finished { .. } | Self::Failed { .. } | Self::Cut => true,
        }
    }
}

/// Every attempt in work at one node.
#[derive(Default)]
pub struct Journey {
    in_work: BTreeMap<SequenceId, InWork>,
    known: BTreeSet<SequenceId>,
    inputs: VecDeque<Input>,
    commands: VecDeque<transfer::Command>,
    said: VecDeque<(TransferId, Said)>,
    closed: bool,
}

struct InWork {
    kind: SequenceKind,
    peer: Option<PeerAddress>,
    prompt_hash: u128,
    deadline: Instant,
    /// False once the caller was told the end, or left.
    is_heard: bool,
    /// The caller waits to hear whether the scheduler took the attempt.
    owes_verdict: bool,
    transfer: TransferState,
    token_0: Option<(u32, SampledToken)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferState {
    NotBegun,
    UnderWay { abort_asked: bool },
    Over,
}

impl Journey {
    pub fn next_input(&mut self) -> Option<Input> {
        self.inputs.pop_front()
    }

    pub fn next_command(&mut self) -> Option<transfer::Command> {
        self.commands.pop_front()
    }

    pub fn put_back(&mut self, command: transfer::Command) {
        self.commands.push_front(command);
    }

    pub fn next_said(&mut self) -> Option<(TransferId, Said)> {
        self.said.pop_front()
    }

    pub fn is_empty(&self) -> bool {
        self.in_work.is_empty()
    }

    pub fn begin(&mut self, begun: Begun) {
        let id = begun.sequence.id;
        if self.closed {
            let said = Said::failed(FailureKind::Draining, "this node drains");
            return self.said.push_back((TransferId(id.0), said));
        }
        assert!(self.known.insert(id), "the router mints every id once");
        let record = InWork {
            kind: begun.sequence.kind,
            peer: begun.peer,
            prompt_hash: begun.prompt_hash,
            deadline: begun.sequence.deadline,
            is_heard: true,
            owes_verdict: true,
            transfer: TransferState::NotBegun,
            token_0: None,
        };
        self.in_work.insert(id, record);
        self.inputs.push_back(Input::Arrived(begun.sequence));
    }

    /// The scheduler has seen the arrival and its actions are done.
    pub fn taken(&mut self, id: SequenceId, now: Instant) {
        let Some(record) = self.in_work.get_mut(&id) else { return };
        if !std::mem::take(&mut record.owes_verdict) {
            return;
        }
        if record.kind == SequenceKind::Send
            && let Some(peer) = record.peer.clone()
        {
            record.transfer = TransferState::UnderWay { abort_asked: false };
            self.commands.push_back(transfer::Command::Expect {
                transfer: TransferId(id.0),
                peer,
                prompt_hash: record.prompt_hash,
                deadline: record.deadline.saturating_duration_since(now),
                traceparent: String::new(),
            });
        }
    }

    /// The transfers did not take `Receive` or `Expect`.
    pub fn transfer_refused(&mut self, id: TransferId) {
        let id = SequenceId(id.0);
        let Some(record) = self.in_work.get_mut(&id) else { return };
        record.transfer = TransferState::Over;
        self.inputs.push_back(Input::Abort { id });
        self.inputs.push_back(Input::TransferEnded { id, delivered: false });
        self.end(id, Said::failed(FailureKind::Busy, TRANSFERS_FULL));
    }

    pub fn on_action(&mut self, action: Action, now: Instant) {
        match action {
            Action::Reserve { id, first_block, blocks } => {
                let Some(record) = self.in_work.get_mut(&id) else { return };
                let Some(peer) = record.peer.clone() else { return };
                record.transfer = TransferState::UnderWay { abort_asked: false };
                self.commands.push_back(transfer::Command::Receive {
                    transfer: TransferId(id.0),
                    peer,
                    prompt_hash: record.prompt_hash,
                    first_block,
                    blocks,
                    deadline: record.deadline.saturating_duration_since(now),
                    traceparent: String::new(),
                });
            }
            Action::Admitted { id, cached_tokens: _, alone } => {
                self.tell(id, Said::Reserved { alone });
            }
            Action::KvWritten { id, first_block, blocks } => {
                let Some(record) = self.in_work.get(&id) else { return };
                if record.may_command_transfer() {
                    let transfer = TransferId(id.0);
                    self.commands.push_back(transfer::Command::Written {
                        transfer,
                        first_block,
                        blocks,
                    });
                }
            }
            Action::Tokens { id, first_index, mut tokens, cached_tokens: _ } => {
                let Some(record) = self.in_work.get_mut(&id) else { return };
                if record.kind == SequenceKind::Send {
                    record.token_0 = tokens.pop().map(|token| (first_index, token));
                } else {
                    let ids = tokens.iter().map(|token| token.id).collect();
                    self.tell(id, Said::Tokens { first_index, ids, finish: None });
                }
            }
            Action::Finished { id, reason } => self.on_finished(id, reason),
            Action::Failed { id, failure } => {
                let message = failure.to_string();
                self.end(id, Said::failed(kind_of(&failure), message));
            }
            Action::AbortTransfer { id, reason } => self.abort_transfer(id, reason),
        }
    }

    fn on_finished(&mut self, id: SequenceId, reason: Option<FinishReason>) {
        let Some(record) = self.in_work.get_mut(&id) else { return };
        if record.kind != SequenceKind::Send {
            let reason = reason.expect("a whole answer ends for a reason");
            return self.end(id, Said::Finished { reason });
        }
        let (first_index, token) = record.token_0.take().expect("a sender ends with its token");
        let (ids, finish) = (vec![token.id], reason);
        self.tell(id, Said::Tokens { first_index, ids, finish });
        if reason.is_some() {
            return self.end(id, Said::Cut);
        }
        if self.in_work.get(&id).is_some_and(InWork::may_command_transfer) {
            let transfer = TransferId(id.0);
            self.commands.push_back(transfer::Command::Finish { transfer, first_index, token });
        }
    }

    fn abort_transfer(&mut self, id: SequenceId, reason: String) {
        match self.in_work.get_mut(&id).map(|record| &mut record.transfer) {
            Some(TransferState::UnderWay { abort_asked: true }) => {}
            Some(TransferState::UnderWay { abort_asked }) => {
                *abort_asked = true;
                let transfer = TransferId(id.0);
                self.commands.push_back(transfer::Command::Abort { transfer, reason });
            }
            Some(TransferState::NotBegun | TransferState::Over) | None => {
                self.inputs.push_back(Input::TransferEnded { id, delivered: false });
            }
        }
    }

    pub fn on_transfer_event(&mut self, event: transfer::Event) {
        match event {
            transfer::Event::Ready { transfer, first_block, .. } => {
                self.inputs
                    .push_back(Input::TransferReady { id: SequenceId(transfer.0), first_block });
            }
            transfer::Event::Arrived { transfer, first_index, token, .. } => {
                let id = SequenceId(transfer.0);
                self.transfer_over(id);
                self.inputs.push_back(Input::KvArrived { id, first_index, token });
                self.forget_if_over(id);
            }
            transfer::Event::Delivered { transfer, .. } => {
                let id = SequenceId(transfer.0);
                self.transfer_over(id);
                self.inputs.push_back(Input::TransferEnded { id, delivered: true });
                self.end(id, Said::Delivered);
            }
            transfer::Event::ReceiveFailed { transfer, failure }
            | transfer::Event::SendFailed { transfer, failure } => {
                let id = SequenceId(transfer.0);
                let kind = match &failure {
                    TransferFailure::Refused { .. } | TransferFailure::WeightsChanged { .. } => {
                        FailureKind::Mismatch
                    }
                    _ => FailureKind::TransferFailed,
                };
                self.transfer_over(id);
                self.inputs.push_back(Input::TransferEnded { id, delivered: false });
                self.end(id, Said::failed(kind, failure.to_string()));
            }
        }
    }

    /// The router dropped the call.
    pub fn cancel(&mut self, id: SequenceId) {
        let Some(record) = self.in_work.get_mut(&id) else { return };
        record.owes_verdict = false;
        if std::mem::take(&mut record.is_heard) {
            self.inputs.push_back(Input::Abort { id });
        }
        self.forget_if_over(id);
    }

    /// Everything ends now, and nothing new begins.
    pub fn end_all(&mut self) {
        self.closed = true;
        let ids: Vec<SequenceId> = self.in_work.keys().copied().collect();
        for id in ids {
            self.inputs.push_back(Input::Abort { id });
            self.end(id, Said::failed(FailureKind::Draining, "the node stops"));
        }
    }

    fn tell(&mut self, id: SequenceId, said: Said) {
        if self.in_work.get(&id).is_some_and(|record| record.is_heard) {
            self.said.push_back((TransferId(id.0), said));
        }
    }

    /// Ends the call, unless it ended before.
    fn end(&mut self, id: SequenceId, said: Said) {
        debug_assert!(said.is_end());
        self.tell(id, said);
        if let Some(record) = self.in_work.get_mut(&id) {
            record.is_heard = false;
            record.owes_verdict = false;
        }
        self.forget_if_over(id);
    }

    fn transfer_over(&mut self, id: SequenceId) {
        if let Some(record) = self.in_work.get_mut(&id) {
            record.transfer = TransferState::Over;
        }
    }

    fn forget_if_over(&mut self, id: SequenceId) {
        if let Some(record) = self.in_work.get(&id)
            && !record.is_heard
            && !matches!(record.transfer, TransferState::UnderWay { .. })
        {
            self.in_work.remove(&id);
        }
    }
}

impl InWork {
    fn may_command_transfer(&self) -> bool {
        self.transfer == TransferState::UnderWay { abort_asked: false }
    }
}

fn kind_of(failure: &SequenceFailure) -> FailureKind {
    match failure {
        SequenceFailure::Busy { .. } => FailureKind::Busy,
        SequenceFailure::Invalid { .. } => FailureKind::Invalid,
        SequenceFailure::Deadline => FailureKind::Deadline,
        SequenceFailure::TransferFailed => FailureKind::TransferFailed,
        SequenceFailure::Duplicate | SequenceFailure::Internal { .. } => FailureKind::Internal,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kernels::sampling::Sampling;
    use kv_transfer::api::Epoch;

    use super::*;

    /// The scheduler inputs that follow when the transfer queue has no room for an attempt's
    /// `Receive`, with and without an abort of the scheduler's own before.
    fn inputs_after_full_queue(is_aborted_before: bool) -> Vec<Input> {
        let (id, now) = (SequenceId(7), Instant::now());
        let sequence = NewSequence {
            id,
            kind: SequenceKind::Receive,
            tokens: vec![1, 2, 3],
            prompt_len: 3,
            sampling: Sampling::greedy(),
            max_tokens: 4,
            ignore_stop_tokens: false,
            cache_salt: String::new(),
            constraint: None,
            deadline: now + Duration::from_secs(10),
        };
        let (node_id, control_endpoint) = ("peer".to_owned(), String::new());
        let peer = Some(PeerAddress { node_id, epoch: Epoch(9), control_endpoint });
        let mut journey = Journey::default();
        journey.begin(Begun { sequence, peer, prompt_hash: 0 });
        assert!(matches!(journey.next_input(), Some(Input::Arrived(_))));
        journey.taken(id, now);
        journey.on_action(Action::Reserve { id, first_block: 0, blocks: Vec::new() }, now);
        if is_aborted_before {
            journey.on_action(Action::AbortTransfer { id, reason: String::new() }, now);
        }
        journey.transfer_refused(TransferId(7));
        std::iter::from_fn(|| journey.next_input()).collect()
    }

    /// `services/node/src/journey.rs`, `full_transfers_are_a_busy_node`.
    #[test]
    fn full_transfer_queue_aborts_the_sequence_and_ends_its_transfer_as_the_node_does() {
        let id = SequenceId(7);
        let shipped = [Input::Abort { id }, Input::TransferEnded { id, delivered: false }];
        for is_aborted_before in [false, true] {
            assert_eq!(inputs_after_full_queue(is_aborted_before), shipped, "{is_aborted_before}");
        }
    }
}
