//! A router: its shipped directory and request cores, with calls and timers of the simulation.

mod answers;
mod arrivals;
mod attempts;
mod queue;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

pub use attempts::Pick;
use cluster::{MemberChange, NodeAddress, Selection, StreamId};
use proto::{
    ids::TransferId,
    v1::{self, DecodeEvent, DecodeRequest, ObserveEvent, PrefillEvent, PrefillRequest},
};
use router::{
    fair_queue::{Charge, FairQueue, Flow, Pass, SessionTurn, Sessions, StartLimit},
    request_core::{GiveUp, Output, RecoveryPolicy, RequestCore, Side, Stop},
};
use simulation_base::Random;
use tonic::Status;

use crate::{
    answer::Client,
    coverage::Coverage,
    nodes::{Assigned, Connection, Nodes, NodesAction},
    scenario::RequestPlan,
    stats::ReplayStats,
};

/// Id of one call of an attempt.
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
    Decode(DecodeEvent),
    Prefill(PrefillEvent),
    /// The node accepted the call: its stream is open.
    Accepted,
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
    policy: RecoveryPolicy,
    answers: BTreeMap<usize, Answer>,
    /// Requests that have not ended.
    open: BTreeSet<usize>,
    /// Deadlines of the open requests.
    due: BTreeSet<(Instant, usize)>,
    calls: BTreeMap<CallKey, OpenCall>,
    waiting: BTreeMap<Arc<str>, FairQueue<usize>>,
    sessions: BTreeMap<Arc<str>, Sessions>,
    random: Random,
    actions: Vec<RouterAction>,
    pub coverage: Coverage,
    /// The attempts of all requests, in order.
    pub picks: Vec<Pick>,
    /// Statistics of a replay, which keeps neither `picks` nor ended requests.
    pub stats: Option<ReplayStats>,
    /// Time from a request's arrival to its first token, by request.
    pub first_tokens: BTreeMap<usize, Duration>,
    /// Longest time between two tokens of a request.
    pub longest_gap: Duration,
    /// Longest time between two tokens of a request, without the gap after token 0 (the possible hand-over).
    pub longest_decode_gap: Duration,
    /// Request and time of each gap that `longest_decode_gap` covers.
    #[cfg(test)]
    pub decode_gaps: Vec<(usize, Duration)>,
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
    flow: Flow,
    turn: SessionTurn,
    /// Limit of the request while it is in the queue.
    queued: Option<StartLimit>,
    /// Reason to report if the next turn passes to other requests.
    pass: Pass,
    /// Charge of the open attempt.
    charge: Option<Charge>,
    /// When the client reads again, and the stop condition in the tokens that it has not read.
    stalled: Option<(Instant, Option<Stop>)>,
    arrived_at: Instant,
    /// Entry of the request in [`Router::due`].
    due: Option<Instant>,
    picked_at: Option<Instant>,
    first_emitted_at: Option<Instant>,
    emitted_at: Option<Instant>,
    /// Longest time between two tokens.
    pause: Duration,
    /// Prefix hits of the first node that prefilled the prompt.
    cached_tokens: Option<u32>,
    end: Option<End>,
}

/// Outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    Complete,
    ClientLeft,
    Failed(GiveUp),
    /// The request could not start in time.
    Refused,
}

impl Router {
    pub fn new(
        index: usize,
        addresses: Vec<NodeAddress>,
        selection: Selection,
        mut random: Random,
    ) -> Self {
        Self {
            nodes: Nodes::new(index, addresses, selection, random.next()),
            policy: RecoveryPolicy::from(&config::Router::default()),
            answers: BTreeMap::new(),
            open: BTreeSet::new(),
            due: BTreeSet::new(),
            calls: BTreeMap::new(),
            waiting: BTreeMap::new(),
            sessions: BTreeMap::new(),
            random,
            actions: Vec::new(),
            coverage: Coverage::default(),
            picks: Vec::new(),
            stats: None,
            first_tokens: BTreeMap::new(),
            longest_gap: Duration::ZERO,
            longest_decode_gap: Duration::ZERO,
            #[cfg(test)]
            decode_gaps: Vec::new(),
        }
    }

    pub fn take_actions(&mut self) -> Vec<RouterAction> {
        let mut actions = std::mem::take(&mut self.actions);
        actions.extend(self.nodes.take_actions().into_iter().map(RouterAction::Nodes));
        actions
    }

    pub fn all_ended(&self) -> bool {
        self.open.is_empty()
    }

    /// Checks that no resource of a request is left.
    pub fn check_idle(&self) {
        self.nodes.check_idle();
        assert!(self.calls.is_empty(), "calls are open");
        assert!(self.waiting.values().all(FairQueue::is_empty), "requests are queued");
    }

    // Inputs.

    /// Returns the longest time between two tokens of each request.
    pub fn pauses(&self) -> impl Iterator<Item = Duration> {
        self.answers.values().map(|answer| answer.pause)
    }

    pub fn client_left(&mut self, now: Instant, id: usize) {
        let Some(answer) = self.answers.get_mut(&id) else { return };
        if answer.end.is_none() {
            answer.core.handle_client_left();
            self.perform(now, id);
            self.end(now, id, End::ClientLeft);
        }
    }

    /// Handles a node's message of a call.
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
        let core = &mut answer.core;
        match (key.side, message) {
            (_, NodeMessage::Accepted) => {
                if let Some(node) = answer.node(key.side) {
                    self.nodes.accepted(node);
                }
            }
            (_, NodeMessage::Decode(event)) => {
                self.coverage.count_decode_event(&event.event);
                core.handle_decode(now, Ok(Some(event)));
            }
            (_, NodeMessage::Prefill(event)) => {
                self.coverage.count_prefill_event(&event.event);
                core.handle_prefill(now, Ok(Some(event)));
            }
            (Side::Decode, NodeMessage::Rejected(status)) => core.handle_decode(now, Err(status)),
            (Side::Decode, NodeMessage::End) => core.handle_decode(now, Ok(None)),
            (Side::Prefill, NodeMessage::Rejected(status)) => core.handle_prefill(now, Err(status)),
            (Side::Prefill, NodeMessage::End) => core.handle_prefill(now, Ok(None)),
        }
        self.perform(now, id);
    }

    /// Handles the end of a connection to a node, with every stream on it.
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

    /// Starts another router process. The clients of the old process are lost.
    pub fn restart(&mut self) {
        for answer in self.answers.values_mut().filter(|answer| answer.end.is_none()) {
            self.coverage.count("client left");
            answer.core.handle_client_left();
            answer.end = Some(End::ClientLeft);
        }
        self.open.clear();
        self.due.clear();
        self.calls.clear();
        self.waiting.clear();
        self.sessions.clear();
        self.actions.clear();
        self.nodes.restart(self.random.next());
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let requests = self.due.first().map(|(at, _)| *at);
        requests.into_iter().chain(self.nodes.next_deadline()).min()
    }

    pub fn on_deadline(&mut self, now: Instant) {
        if self.nodes.next_deadline().is_some_and(|at| at <= now) {
            self.nodes.on_deadline(now);
            self.notify_waiting(now);
        }
        while let Some(&(_, id)) = self.due.first().filter(|(at, _)| *at <= now) {
            let answer = self.answers.get_mut(&id).expect("requests are kept");
            if let Some((_, stop)) = answer.stalled.take_if(|(reads_at, _)| *reads_at <= now) {
                answer.core.handle_emitted(now, stop);
                self.perform(now, id);
                continue;
            }
            let picked = answer.nodes.as_ref();
            if answer.core.drain_check_is_due(now) {
                let grace = picked.and_then(|(decode, _)| {
                    self.nodes.grace_left(now, decode, &answer.core.wanted())
                });
                answer.core.handle_drain_check(now, grace);
            }
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
        let waits = |id: &&usize| self.answers[id].core.expects_node();
        for id in self.open.iter().filter(waits).copied().collect::<Vec<_>>() {
            self.answer(id).core.handle_nodes_changed();
            self.perform(now, id);
        }
    }

    // Outputs of the request cores.

    fn answer(&mut self, id: usize) -> &mut Answer {
        self.answers.get_mut(&id).expect("requests are kept")
    }

    fn poll_output(&mut self, id: usize) -> Option<Output> {
        self.answers.get_mut(&id)?.core.poll_output()
    }

    /// Performs the outputs of the request's core until the core waits for an input.
    fn perform(&mut self, now: Instant, id: usize) {
        while let Some(output) = self.poll_output(id) {
            match output {
                Output::Pick => self.pick(now, id),
                Output::DropPrefillCall => self.drop_prefill_call(id),
                Output::Delivered { elapsed } => {
                    let answer = self.answers.get_mut(&id).expect("requests are kept");
                    if let Some((decode, Some(prefill))) = &answer.nodes {
                        self.nodes.delivered(now, prefill, decode, elapsed);
                    }
                }
                Output::Served => {
                    let answer = self.answers.get_mut(&id).expect("requests are kept");
                    if let Some((decode, _)) = &answer.nodes {
                        self.nodes.served(decode);
                    }
                }
                Output::EndAttempt(ended) => self.end_attempt(now, id, &ended),
                Output::Emit { first_index, tokens, .. } => {
                    self.emit(now, id, first_index, &tokens);
                }
                Output::WaitForTurn => self.queue(now, id),
                Output::RetryPassed => {
                    let model = self.answer(id).model.clone();
                    self.waiting.entry(model).or_default().retry_passed();
                }
                Output::WaitForNode | Output::StopWaiting => self.leave_queue(id),
                Output::Finish(finished) => {
                    if finished.reason == v1::FinishReason::Abort {
                        self.coverage.count("ended by an update");
                    }
                    self.answer(id).client.check_complete(finished.reason);
                    self.count_request(now, id);
                    self.end(now, id, End::Complete);
                }
                Output::Fail(reason) => self.end(now, id, End::Failed(reason)),
            }
        }
        self.set_due(id);
        self.give_turns(now);
    }

    /// Updates the deadline of a request.
    fn set_due(&mut self, id: usize) {
        let Some(answer) = self.answers.get_mut(&id) else { return };
        if let Some(at) = answer.due.take() {
            self.due.remove(&(at, id));
        }
        if answer.end.is_none() {
            let reads_at = answer.stalled.map(|(at, _)| at);
            answer.due = answer.core.next_deadline().into_iter().chain(reads_at).min();
            self.due.extend(answer.due.map(|at| (at, id)));
        }
    }
}
