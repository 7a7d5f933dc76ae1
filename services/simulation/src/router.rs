//! A router: its shipped directory and request cores, with calls and timers of the simulation.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use cluster::{MemberChange, NodeAddress, NodeRecord, StreamId};
use grammar::Grammar;
use proto::{
    ids::TransferId,
    v1::{
        self, DecodeRequest, ObserveEvent, PrefillRequest, decode_event::Event as DecodeEvent,
        prefill_event::Event as PrefillEvent,
    },
};
use router::request_core::{
    AnswerSpec, AttemptFailure, AttemptOutcome, Cause, EndedAttempt, GiveUp, Output,
    RecoveryPolicy, RequestCore, Side,
};
use simulation_base::Random;
use tonic::Status;

use crate::{
    answer::Client,
    coverage::Coverage,
    nodes::{Assigned, Connection, Nodes, NodesAction},
    scenario::{RequestPlan, VOCABULARY},
};

/// The defaults of the router's settings.
const POLICY: RecoveryPolicy = RecoveryPolicy {
    attempts_max: 4,
    busy_timeout: Duration::from_secs(30),
    idle_timeout: Duration::from_secs(60),
};
/// Queued requests that may pick at the same time.
const TURNS_MAX: usize = 4;

/// Names one call of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallKey {
    pub transfer: TransferId,
    pub side: Side,
}

/// A call on its way to a node.
#[derive(Clone, Debug)]
pub enum NodeCall {
    Prefill(PrefillRequest),
    Decode(DecodeRequest),
}

/// A message of a call on its way to the router.
#[derive(Clone, Debug)]
pub enum NodeMessage {
    Decode(Option<DecodeEvent>),
    Prefill(Option<PrefillEvent>),
    /// The call was rejected.
    Rejected(Status),
    /// The node ended the stream.
    End,
}

/// The router's actions, in order.
#[derive(Debug)]
pub enum RouterAction {
    Call {
        connection: Connection,
        key: CallKey,
        call: Box<NodeCall>,
    },
    /// The stream of a call is dropped.
    Cancel {
        connection: Connection,
        key: CallKey,
    },
    Nodes(NodesAction),
}

pub struct Router {
    pub nodes: Nodes,
    answers: BTreeMap<usize, Answer>,
    calls: BTreeMap<CallKey, OpenCall>,
    waiting: BTreeMap<Arc<str>, WaitingRoom>,
    random: Random,
    actions: Vec<RouterAction>,
    pub coverage: Coverage,
    /// Longest time between two tokens of a request.
    pub longest_gap: Duration,
}

struct OpenCall {
    request: usize,
    connection: Connection,
}

/// One request.
struct Answer {
    plan: RequestPlan,
    model: Arc<str>,
    deadline: Instant,
    core: RequestCore,
    client: Client,
    /// The picked nodes, until the attempt ends.
    nodes: Option<(Assigned, Option<Assigned>)>,
    /// The transfer id of the open attempt.
    transfer: Option<TransferId>,
    attempts: u32,
    emitted_at: Option<Instant>,
    end: Option<End>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    Complete,
    ClientLeft,
    Failed(GiveUp),
}

/// Requests of one model that found every node busy.
#[derive(Default)]
struct WaitingRoom {
    queue: VecDeque<usize>,
    turns: BTreeSet<usize>,
}

impl WaitingRoom {
    fn leave(&mut self, request: usize) {
        self.queue.retain(|queued| *queued != request);
        self.turns.remove(&request);
    }
}

impl Router {
    pub fn new(index: usize, addresses: Vec<NodeAddress>, mut random: Random) -> Self {
        Self {
            nodes: Nodes::new(index, addresses, random.next()),
            answers: BTreeMap::new(),
            calls: BTreeMap::new(),
            waiting: BTreeMap::new(),
            random,
            actions: Vec::new(),
            coverage: Coverage::default(),
            longest_gap: Duration::ZERO,
        }
    }

    pub fn take_actions(&mut self) -> Vec<RouterAction> {
        let mut actions = std::mem::take(&mut self.actions);
        actions.extend(self.nodes.take_actions().into_iter().map(RouterAction::Nodes));
        actions
    }

    pub fn all_ended(&self) -> bool {
        self.answers.values().all(|answer| answer.end.is_some())
    }

    /// Checks that no resource of a request is left.
    pub fn check_idle(&self) {
        self.nodes.check_idle();
        assert!(self.calls.is_empty(), "calls are open");
        for room in self.waiting.values() {
            assert!(room.queue.is_empty() && room.turns.is_empty(), "requests are queued");
        }
    }

    // Inputs.

    pub fn request(&mut self, now: Instant, id: usize, model: Arc<str>, plan: RequestPlan) {
        let deadline = now + plan.timeout;
        let spec = AnswerSpec {
            model: Some(model.clone()),
            prompt_tokens: plan.prompt.len() as u32,
            prefix: Arc::new([]),
            grammar_version: u32::from(plan.grammar.is_some()),
            max_tokens: plan.max_tokens,
            vocabulary_size: VOCABULARY,
            deadline,
        };
        let mut core = RequestCore::new(spec, POLICY);
        let is_queued = self.waiting.get(&model).is_some_and(|room| !room.queue.is_empty());
        core.start(now, is_queued);
        let client = Client::new(&plan);
        let answer = Answer {
            plan,
            model,
            deadline,
            core,
            client,
            nodes: None,
            transfer: None,
            attempts: 0,
            emitted_at: None,
            end: None,
        };
        self.answers.insert(id, answer);
        self.perform(now, id);
    }

    pub fn client_left(&mut self, now: Instant, id: usize) {
        let Some(answer) = self.answers.get_mut(&id) else { return };
        if answer.end.is_none() {
            answer.core.handle_client_left();
            self.perform(now, id);
            self.end(now, id, End::ClientLeft);
        }
    }

    /// A node sent a message of a call.
    pub fn message(&mut self, now: Instant, key: CallKey, message: NodeMessage) {
        let Some(call) = self.calls.get(&key) else { return };
        let id = call.request;
        if matches!(message, NodeMessage::Rejected(_) | NodeMessage::End) {
            self.calls.remove(&key);
        }
        let answer = self.answers.get_mut(&id).expect("a call belongs to a request");
        let core = &mut answer.core;
        let is_expected = match key.side {
            Side::Decode => core.expects_decode(),
            Side::Prefill => core.expects_prefill(),
        };
        if !is_expected {
            return;
        }
        if matches!(message, NodeMessage::Decode(_) | NodeMessage::Prefill(_))
            && let Some(node) = answer.node(key.side)
        {
            self.nodes.answered(node);
        }
        let core = &mut answer.core;
        match message {
            NodeMessage::Decode(event) => {
                self.coverage.count_decode_event(&event);
                core.handle_decode_event(now, event);
            }
            NodeMessage::Prefill(event) => {
                self.coverage.count_prefill_event(&event);
                core.handle_prefill_event(now, event);
            }
            NodeMessage::Rejected(status) => {
                core.handle_stream_end(now, AttemptFailure::status(key.side, &status));
            }
            NodeMessage::End => core.handle_stream_end(now, AttemptFailure::cut(key.side)),
        }
        self.perform(now, id);
    }

    /// A connection to a node has ended, with every stream on it.
    pub fn connection_lost(&mut self, now: Instant, host: usize) {
        let ended = self.nodes.connection(host);
        self.nodes.connection_lost(now, host);
        let calls = self.calls.iter().filter(|(_, call)| call.connection == ended);
        for key in calls.map(|(key, _)| *key).collect::<Vec<_>>() {
            // tonic sets a source when the connection breaks.
            let broken = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
            let status = Status::from_error(Box::new(broken));
            self.message(now, key, NodeMessage::Rejected(status));
        }
        self.notify_waiting(now);
    }

    pub fn observed(&mut self, now: Instant, stream: StreamId, event: Option<ObserveEvent>) {
        match event {
            Some(event) => self.nodes.observed(now, stream, event),
            None => self.nodes.stream_ended(now, stream, "the node is stalled"),
        }
        self.notify_waiting(now);
    }

    pub fn member(&mut self, now: Instant, change: MemberChange) {
        self.nodes.member(now, change);
        self.notify_waiting(now);
    }

    /// Another router process starts. The clients of the old process are lost.
    pub fn restart(&mut self) {
        for answer in self.answers.values_mut().filter(|answer| answer.end.is_none()) {
            self.coverage.count("client left");
            answer.core.handle_client_left();
            answer.end = Some(End::ClientLeft);
        }
        self.calls.clear();
        self.waiting.clear();
        self.actions.clear();
        self.nodes.restart(self.random.next());
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let open = self.answers.values().filter(|answer| answer.end.is_none());
        let requests = open.filter_map(|answer| answer.core.next_deadline());
        requests.chain(self.nodes.next_deadline()).min()
    }

    pub fn on_deadline(&mut self, now: Instant) {
        if self.nodes.next_deadline().is_some_and(|at| at <= now) {
            self.nodes.on_deadline(now);
            self.notify_waiting(now);
        }
        let is_due = |answer: &Answer| {
            answer.end.is_none() && answer.core.next_deadline().is_some_and(|at| at <= now)
        };
        let due = self.answers.iter().filter(|(_, answer)| is_due(answer));
        for id in due.map(|(id, _)| *id).collect::<Vec<_>>() {
            let answer = self.answers.get_mut(&id).expect("requests are kept");
            let picked = answer.nodes.as_ref();
            answer.core.handle_deadline(now, |side| {
                let (decode, prefill) = picked?;
                let node = if side == Side::Decode { decode } else { prefill.as_ref()? };
                self.nodes.changed_at(node)
            });
            self.perform(now, id);
        }
    }

    /// Requests that wait for a node pick again when the health of a node has changed.
    fn notify_waiting(&mut self, now: Instant) {
        if !self.nodes.take_changed() {
            return;
        }
        let waiting = self.answers.iter().filter(|(_, answer)| answer.core.expects_node());
        for id in waiting.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.answer(id).core.handle_nodes_changed(now);
            self.perform(now, id);
        }
    }

    // Outputs of the request cores.

    fn answer(&mut self, id: usize) -> &mut Answer {
        self.answers.get_mut(&id).expect("requests are kept")
    }

    fn perform(&mut self, now: Instant, id: usize) {
        while let Some(output) = self.answer(id).core.poll_output() {
            match output {
                Output::Pick => self.pick(now, id),
                Output::OpenCalls { transfer_id, number } => {
                    self.coverage.count("attempts");
                    if number > 1 && self.answer(id).plan.grammar.is_some() {
                        self.coverage.count("structured output migrated");
                    }
                    self.open_calls(now, id, transfer_id, number);
                }
                Output::DropPrefillCall => {
                    if let Some(transfer) = self.answer(id).transfer {
                        self.drop_call(CallKey { transfer, side: Side::Prefill });
                    }
                }
                Output::EndAttempt(ended) => self.end_attempt(now, id, &ended),
                Output::Emit { first_index, tokens, .. } => {
                    let answer = self.answer(id);
                    let gap = answer.emitted_at.replace(now).map(|at| now - at);
                    let stop = answer.client.receive(first_index, &tokens);
                    answer.core.handle_emitted(now, stop);
                    self.longest_gap = self.longest_gap.max(gap.unwrap_or_default());
                }
                Output::WaitForTurn => {
                    let model = self.answer(id).model.clone();
                    self.waiting.entry(model).or_default().queue.push_back(id);
                }
                Output::WaitForNode | Output::StopWaiting => self.leave_waiting_room(id),
                Output::Finish(finished) => {
                    self.answer(id).client.check_complete(finished.reason);
                    self.end(now, id, End::Complete);
                }
                Output::Fail(reason) => self.end(now, id, End::Failed(reason)),
            }
        }
        self.give_turns(now);
    }

    fn leave_waiting_room(&mut self, id: usize) {
        let model = self.answer(id).model.clone();
        if let Some(room) = self.waiting.get_mut(&model) {
            room.leave(id);
        }
    }

    fn give_turns(&mut self, now: Instant) {
        for model in self.waiting.keys().cloned().collect::<Vec<_>>() {
            while let Some(room) = self.waiting.get_mut(&model)
                && room.turns.len() < TURNS_MAX
                && let Some(id) = room.queue.pop_front()
            {
                room.turns.insert(id);
                self.coverage.count("turns");
                self.answer(id).core.handle_turn(now);
                self.perform(now, id);
            }
        }
    }

    fn pick(&mut self, now: Instant, id: usize) {
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        match self.nodes.pick(now, &answer.core.wanted_decode()) {
            Ok(decode) => {
                let wanted = answer.core.wanted_prefill(&decode.record);
                let prefill = wanted.and_then(|wanted| self.nodes.pick(now, &wanted).ok());
                let records =
                    (decode.record.clone(), prefill.as_ref().map(|node| node.record.clone()));
                answer.nodes = Some((decode, prefill));
                let transfer = TransferId(self.random.id());
                answer.core.handle_picked(now, transfer, records.0, records.1);
            }
            Err(reason) => answer.core.handle_no_node(now, &reason),
        }
    }

    fn open_calls(&mut self, now: Instant, id: usize, transfer: TransferId, number: u32) {
        let answer = self.answer(id);
        (answer.transfer, answer.attempts) = (Some(transfer), number);
        let (decode, prefill) = answer.nodes.clone().expect("nodes were picked");
        let attempt = |node: &Assigned| Some(answer.attempt(now, id, transfer, node));
        let decode_call = NodeCall::Decode(DecodeRequest {
            attempt: attempt(&decode),
            prefill: prefill.as_ref().map(|node| peer(&node.record)),
        });
        let prefill_call = prefill.as_ref().map(|prefill| {
            let decode = Some(peer(&decode.record));
            NodeCall::Prefill(PrefillRequest { attempt: attempt(prefill), decode })
        });
        self.open_call(id, CallKey { transfer, side: Side::Decode }, &decode, decode_call);
        if let (Some(prefill), Some(call)) = (prefill, prefill_call) {
            self.open_call(id, CallKey { transfer, side: Side::Prefill }, &prefill, call);
        }
    }

    fn open_call(&mut self, request: usize, key: CallKey, node: &Assigned, call: NodeCall) {
        let connection = self.nodes.connection(node.host);
        self.calls.insert(key, OpenCall { request, connection });
        self.actions.push(RouterAction::Call { connection, key, call: Box::new(call) });
    }

    /// Drops the calls of the attempt and releases its nodes.
    fn end_attempt(&mut self, now: Instant, id: usize, ended: &EndedAttempt) {
        let answer = self.answer(id);
        let transfer = answer.transfer.take();
        let Some((decode, prefill)) = answer.nodes.take() else { return };
        if let Some(transfer) = transfer {
            self.drop_call(CallKey { transfer, side: Side::Decode });
            self.drop_call(CallKey { transfer, side: Side::Prefill });
        }
        if let AttemptOutcome::Failed(failure) = &ended.outcome {
            self.coverage.count_failure(failure);
            let node = match (failure.side, &prefill) {
                (Side::Prefill, Some(prefill)) => prefill,
                (Side::Prefill, None) | (Side::Decode, _) => &decode,
            };
            match failure.cause {
                Cause::Busy => self.nodes.busy(now, node),
                Cause::Lost | Cause::Stale => {
                    self.nodes.call_lost(now, node, failure.message.clone());
                }
                _ => {}
            }
        }
        for node in [Some(decode), prefill].into_iter().flatten() {
            self.nodes.release(&node);
        }
    }

    fn end(&mut self, now: Instant, id: usize, end: End) {
        let answer = self.answer(id);
        assert!(answer.end.is_none(), "request {id} ends twice");
        assert!(now <= answer.deadline, "request {id} ends after its deadline");
        let attempts = answer.attempts;
        answer.end = Some(end.clone());
        self.coverage.count_end(&end, attempts);
        self.leave_waiting_room(id);
    }

    fn drop_call(&mut self, key: CallKey) {
        if let Some(OpenCall { connection, .. }) = self.calls.remove(&key) {
            self.actions.push(RouterAction::Cancel { connection, key });
        }
    }
}

impl Answer {
    fn node(&self, side: Side) -> Option<&Assigned> {
        match (side, self.nodes.as_ref()?) {
            (Side::Decode, (decode, _)) => Some(decode),
            (Side::Prefill, (_, prefill)) => prefill.as_ref(),
        }
    }

    /// Returns the attempt as this node receives it: the prompt and all emitted tokens.
    fn attempt(
        &self,
        now: Instant,
        id: usize,
        transfer: TransferId,
        node: &Assigned,
    ) -> v1::Attempt {
        let plan = &self.plan;
        let sampling = &plan.sampling;
        let remaining = self.deadline.saturating_duration_since(now);
        v1::Attempt {
            request_id: Bytes::copy_from_slice(&(id as u128 + 1).to_be_bytes()),
            transfer_id: Bytes::copy_from_slice(&transfer.to_bytes()),
            tokens: [&plan.prompt[..], self.core.emitted()].concat(),
            prompt_len: plan.prompt.len() as u32,
            sampling: Some(v1::Sampling {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
                seed: sampling.seed,
                repetition_penalty: sampling.repetition_penalty,
                presence_penalty: sampling.presence_penalty,
                frequency_penalty: sampling.frequency_penalty,
                stop_token_ids: sampling.stop_token_ids.clone(),
                min_tokens: sampling.min_tokens,
                logprobs: sampling.logprobs,
                max_tokens: plan.max_tokens,
                ignore_stop_tokens: plan.ignore_stop_tokens,
            }),
            remaining_ms: (remaining.as_millis() as u64).max(1),
            cache_salt: plan.cache_salt.clone(),
            node_epoch: Bytes::copy_from_slice(&node.record.epoch.to_bytes()),
            weight_version: node.record.identity.weight_version,
            grammar: plan.grammar.as_ref().map(wire_grammar),
        }
    }
}

fn wire_grammar(grammar: &Grammar) -> v1::Grammar {
    let kind = match grammar {
        Grammar::Regex(text) => v1::grammar::Kind::Regex(text.clone()),
        Grammar::JsonSchema(text) => v1::grammar::Kind::JsonSchema(text.clone()),
        Grammar::ToolCalls(_) => unreachable!("no request calls tools"),
    };
    v1::Grammar { kind: Some(kind) }
}

fn peer(record: &NodeRecord) -> v1::Peer {
    v1::Peer {
        node_id: record.node_id.to_string(),
        epoch: Bytes::copy_from_slice(&record.epoch.to_bytes()),
        notice_endpoint: record.notice_endpoint.clone(),
    }
}
