//! A router: the shipped router core and answer cores, with calls and timers of the simulation. It
//! holds no rule.

mod answers;
mod arrivals;
mod attempts;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

pub use attempts::Pick;
use cluster::{DirectoryInput, Health, Member, MemberChange, NodeAddress, Selection, StreamId};
use proto::{ids::TransferId, v1::ObserveEvent};
use router_core::{
    AnswerCore, AnswerId, AttemptSide, CallError, GiveUp, GrpcCode, Overload, RecoveryPolicy,
    RouterCore, RouterLimits, RouterOutput, StopCause,
};
use simulation_base::Random;
use weight_transfer::WeightVersion;

use crate::{
    answer::Client,
    calls::{CallKey, NodeCall, NodeMessage, UpdatedNode},
    coverage::Coverage,
    nodes::{Connection, NodeConnections, NodesAction},
    scenario::RequestPlan,
    stats::ReplayStats,
};

/// The router's actions, in order.
#[derive(Debug)]
pub(crate) enum RouterAction {
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

pub(crate) struct Router {
    core: RouterCore,
    pub nodes: NodeConnections,
    selection: Selection,
    limits: RouterLimits,
    policy: RecoveryPolicy,
    answers: BTreeMap<usize, Answer>,
    /// Request of each answer that has not ended.
    requests: BTreeMap<AnswerId, usize>,
    /// Requests that have not ended.
    open: BTreeSet<usize>,
    /// Deadlines of the open requests.
    due: BTreeSet<(Instant, usize)>,
    calls: BTreeMap<CallKey, OpenCall>,
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
    /// Longest time between two tokens of a request, without the gap after token 0 (the possible
    /// hand-over).
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
    deadline: Instant,
    core: AnswerCore,
    client: Client,
    /// The transfer id of the open attempt.
    transfer: Option<TransferId>,
    /// The transfer id of the ended attempt whose node sends the KV to the next attempt.
    moving: Option<TransferId>,
    attempts: u32,
    /// When the client reads again, and the stop condition in the tokens that it has not read.
    stalled: Option<(Instant, Option<StopCause>)>,
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
    has_ended: bool,
}

/// Outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Complete,
    ClientLeft,
    Failed(GiveUp),
    /// The request was not admitted, or could not start in time.
    Refused(Overload),
}

impl Router {
    pub(crate) fn new(
        index: usize,
        addresses: &[NodeAddress],
        selection: Selection,
        limits: RouterLimits,
        mut random: Random,
    ) -> Self {
        Self {
            core: RouterCore::new(random.next(), selection, limits),
            nodes: NodeConnections::new(index, addresses),
            selection,
            limits,
            policy: RecoveryPolicy::from(&config::Router::default()),
            answers: BTreeMap::new(),
            requests: BTreeMap::new(),
            open: BTreeSet::new(),
            due: BTreeSet::new(),
            calls: BTreeMap::new(),
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

    pub(crate) fn take_actions(&mut self) -> Vec<RouterAction> {
        std::mem::take(&mut self.actions)
    }

    pub(crate) fn all_ended(&self) -> bool {
        self.open.is_empty()
    }

    /// Checks that no resource of a request is left, and that every node is up.
    pub(crate) fn check_idle(&self) {
        assert!(self.calls.is_empty(), "calls are open");
        self.core.check_idle();
        for node in self.core.directory().nodes() {
            assert_eq!(node.health, Health::Up, "{node:?}");
            assert!(!node.load().draining, "{node:?}");
        }
    }

    /// Returns the bytes that the directory keeps of the nodes' cached blocks.
    pub(crate) fn cached_bytes(&self) -> usize {
        self.core.directory().nodes().map(Member::cached_bytes).sum()
    }

    /// Returns the nodes of the model that take part in an update of the weights.
    pub(crate) fn weight_nodes(&self, model: &str) -> Vec<UpdatedNode> {
        let of_model = self.core.weight_nodes().filter(|(_, record)| record.model == model);
        let nodes = of_model.map(|(member, record)| UpdatedNode {
            host: self.nodes.host_of(&member.address),
            epoch: record.epoch,
            version: WeightVersion(record.identity.weight_version),
        });
        nodes.collect()
    }

    /// Returns the longest time between two tokens of each request.
    pub(crate) fn pauses(&self) -> impl Iterator<Item = Duration> {
        self.answers.values().map(|answer| answer.pause)
    }

    // Inputs.

    pub(crate) fn client_left(&mut self, now: Instant, id: usize) {
        let Some(answer) = self.answers.get_mut(&id) else { return };
        if !answer.has_ended {
            answer.core.handle_client_left();
            self.perform(now, id);
            self.end(now, id, End::ClientLeft);
            self.follow(now);
        }
    }

    /// Handles a node's message of a call.
    pub(crate) fn message(&mut self, now: Instant, key: CallKey, message: NodeMessage) {
        self.call_message(now, key, message);
        self.follow(now);
    }

    fn call_message(&mut self, now: Instant, key: CallKey, message: NodeMessage) {
        let Some(call) = self.calls.get(&key) else { return };
        let id = call.request;
        if matches!(message, NodeMessage::Rejected(_) | NodeMessage::End) {
            self.calls.remove(&key);
        }
        let answer = self.answers.get_mut(&id).expect("a call belongs to a request");
        let (is_moving, core) = (answer.moving == Some(key.transfer), &mut answer.core);
        let is_expected = match key.side {
            AttemptSide::Decode => !is_moving && core.request().expects_decode(),
            AttemptSide::Prefill => core.request().expects_prefill(),
        };
        if !is_expected {
            return;
        }
        if matches!((key.side, &message), (AttemptSide::Prefill, NodeMessage::Accepted)) {
            self.end_move(id);
        }
        let core = &mut self.answers.get_mut(&id).expect("a call belongs to a request").core;
        match (key.side, message) {
            (side, NodeMessage::Accepted) => core.handle_accepted(&mut self.core, side),
            (_, NodeMessage::Decode(event)) => {
                self.coverage.count_decode_event(&event.event);
                core.handle_decode(now, Ok(Some(event)));
            }
            (_, NodeMessage::Prefill(event)) => {
                self.coverage.count_prefill_event(&event.event);
                core.handle_prefill(now, Ok(Some(event)));
            }
            (side, NodeMessage::Rejected(status)) => {
                let code = GrpcCode(status.code().into());
                let message = status.message().to_owned();
                let error = CallError { code, is_broken: false, message };
                end_call(core, now, side, Err(error));
            }
            (side, NodeMessage::End) => end_call(core, now, side, Ok(())),
        }
        self.perform(now, id);
    }

    /// Handles the end of a connection to a node, with every stream on it.
    pub(crate) fn connection_lost(&mut self, now: Instant, host: usize) {
        let ended = self.nodes.connection(host);
        for stream in self.nodes.close(host) {
            let reason = "the connection ended".to_owned();
            self.core.handle_node_event(now, DirectoryInput::StreamEnded { stream, reason });
        }
        let calls = self.calls.iter().filter(|(_, call)| call.connection == ended);
        for key in calls.map(|(key, _)| *key).collect::<Vec<_>>() {
            self.call_lost(now, key);
        }
        self.follow(now);
    }

    /// Handles a call whose connection broke.
    fn call_lost(&mut self, now: Instant, key: CallKey) {
        let Some(OpenCall { request, .. }) = self.calls.remove(&key) else { return };
        let answer = self.answers.get_mut(&request).expect("a call belongs to a request");
        let (is_moving, core) = (answer.moving == Some(key.transfer), &mut answer.core);
        let is_expected = match key.side {
            AttemptSide::Decode => !is_moving && core.request().expects_decode(),
            AttemptSide::Prefill => core.request().expects_prefill(),
        };
        if is_expected {
            let message = "connection reset".to_owned();
            let error = CallError { code: GrpcCode::UNKNOWN, is_broken: true, message };
            end_call(core, now, key.side, Err(error));
            self.perform(now, request);
        }
    }

    pub(crate) fn observed(&mut self, now: Instant, stream: StreamId, event: Option<ObserveEvent>) {
        match event {
            Some(event) => {
                self.core.handle_node_event(now, DirectoryInput::Observed { stream, event });
            }
            None if self.nodes.end_stream(stream) => {
                let reason = "the node is stalled".to_owned();
                self.core.handle_node_event(now, DirectoryInput::StreamEnded { stream, reason });
            }
            None => {}
        }
        self.follow(now);
    }

    pub(crate) fn member(&mut self, now: Instant, change: MemberChange) {
        self.core.handle_node_event(now, DirectoryInput::Member(change));
        self.follow(now);
    }

    /// Starts another router process. The clients of the old process are lost.
    pub(crate) fn restart(&mut self) {
        for answer in self.answers.values_mut().filter(|answer| !answer.has_ended) {
            self.coverage.count("client left");
            answer.core.handle_client_left();
            answer.has_ended = true;
        }
        self.open.clear();
        self.due.clear();
        self.calls.clear();
        self.requests.clear();
        self.actions.clear();
        self.nodes.restart();
        self.core = RouterCore::new(self.random.next(), self.selection, self.limits);
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let requests = self.due.first().map(|(at, _)| *at);
        requests.into_iter().chain(self.core.next_deadline()).min()
    }

    pub(crate) fn on_deadline(&mut self, now: Instant) {
        if self.core.next_deadline().is_some_and(|at| at <= now) {
            self.core.handle_deadline(now);
            self.follow(now);
        }
        while let Some(&(_, id)) = self.due.first().filter(|(at, _)| *at <= now) {
            let answer = self.answers.get_mut(&id).expect("requests are kept");
            if let Some((_, stop)) = answer.stalled.take_if(|(reads_at, _)| *reads_at <= now) {
                answer.core.handle_emitted(now, stop);
            } else {
                answer.core.handle_deadline(now, &mut self.core);
            }
            self.perform(now, id);
            self.follow(now);
        }
    }

    // Outputs.

    fn answer(&mut self, id: usize) -> &mut Answer {
        self.answers.get_mut(&id).expect("requests are kept")
    }

    /// Performs the outputs of the router core, which may concern other requests.
    fn follow(&mut self, now: Instant) {
        while let Some(output) = self.core.poll_output() {
            match output {
                RouterOutput::Wake(answer) => {
                    self.coverage.count("turns");
                    if let Some(&id) = self.requests.get(&answer) {
                        let answer = self.answers.get_mut(&id).expect("requests are kept");
                        answer.core.handle_wake(now, &mut self.core);
                        self.perform(now, id);
                    }
                }
                RouterOutput::Nodes(action) => {
                    let action = self.nodes.follow(action);
                    self.actions.extend(action.map(RouterAction::Nodes));
                }
                RouterOutput::Breaker(change) => self.coverage.count_breaker(&change),
                RouterOutput::NodesChanged => {
                    for id in self.open.iter().copied().collect::<Vec<_>>() {
                        if self.answers[&id].core.request().expects_node() {
                            self.answer(id).core.handle_nodes_changed();
                            self.perform(now, id);
                        }
                    }
                }
            }
        }
        assert!(self.core.in_flight() <= self.limits.requests_max, "too many answers in flight");
    }
}

/// Ends the call of this side.
fn end_call(core: &mut AnswerCore, now: Instant, side: AttemptSide, end: Result<(), CallError>) {
    match side {
        AttemptSide::Decode => core.handle_decode(now, end.map(|()| None)),
        AttemptSide::Prefill => core.handle_prefill(now, end.map(|()| None)),
    }
}
