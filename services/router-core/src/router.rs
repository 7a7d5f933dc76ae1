//! The state that all requests of a router share.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::{
    BreakerChange, Directory, DirectoryAction, DirectoryInput, Drain, Failed, Health, Member,
    NoNode, NodeRecord, NodeRequirements, Picked, RequiredCapacity, Role, Selection,
};
use proto::ids::TransferId;
use weight_transfer::WeightVersion;

use crate::{
    admission::{LoadBound, Overload, retry_after_s},
    answer::{AttemptNodes, WaitingPlace},
    fair_queue::{
        Charge, ChargeEnd, FairQueue, Flow, FlowLimit, FlowName, FlowSessions, LimitReached,
        PassReason, SessionIdentity, SessionTurn, StartedPrompt, WaitLimits, WaitRequest,
    },
    request_core::{AttemptFailure, AttemptSide, AttemptStats, Blame, NodeFeedback},
};

/// Id of an answer; never reused by a router process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AnswerId(pub(crate) u64);

/// Bounds on the requests of a router.
#[derive(Clone, Copy, Debug)]
pub struct RouterLimits {
    /// Maximum number of answers in flight (`router.requests_max`).
    pub requests_max: u32,
    /// Maximum number of answers that wait for a node (`router.waiting_max`).
    pub waiting_max: u32,
}

impl From<&config::Router> for RouterLimits {
    fn from(settings: &config::Router) -> Self {
        Self { requests_max: settings.requests_max, waiting_max: settings.waiting_max }
    }
}

/// A request that arrives, with the answers that it asks for.
#[derive(Clone, Copy, Debug)]
pub struct ArrivedRequest<'a> {
    pub flow: &'a Flow,
    pub model: &'a Arc<str>,
    pub answers: u32,
    pub output_tokens_max: u32,
    pub limits: WaitLimits,
}

/// An operation for the owner to perform.
#[derive(Clone, Debug)]
pub enum RouterOutput {
    /// Call [`AnswerCore::handle_wake`](crate::AnswerCore::handle_wake) of this answer.
    Wake(AnswerId),
    /// Open or drop a stream, or log a change.
    Nodes(DirectoryAction),
    /// Log and count a circuit breaker that opened or closed.
    Breaker(BreakerChange),
    /// Call [`AnswerCore::handle_nodes_changed`](crate::AnswerCore::handle_nodes_changed) of every
    /// answer that expects it.
    NodesChanged,
}

/// The answers of one model that wait for a node, and its sessions.
#[derive(Default)]
struct ModelQueue {
    queue: FairQueue<AnswerId>,
    sessions: FlowSessions,
    /// Role of the nodes that were busy at the last pick that found no node.
    busy: Option<Role>,
}

/// The state that all requests of a router share. See the crate's description for the life of an
/// answer.
pub struct RouterCore {
    directory: Directory,
    in_flight: FlowLimit,
    waiting: FlowLimit,
    /// Whether every further request is refused, because the router stops.
    is_closed: bool,
    models: BTreeMap<Arc<str>, ModelQueue>,
    /// Number of answers that have arrived.
    answers: u64,
    outputs: VecDeque<RouterOutput>,
}

impl RouterCore {
    /// `seed` spreads the probes of several routers; any number is valid.
    pub fn new(seed: u64, selection: Selection, limits: RouterLimits) -> Self {
        Self {
            directory: Directory::new(seed, selection),
            in_flight: FlowLimit::new(limits.requests_max),
            waiting: FlowLimit::new(limits.waiting_max),
            is_closed: false,
            models: BTreeMap::new(),
            answers: 0,
            outputs: VecDeque::new(),
        }
    }

    /// Returns the next action.
    pub fn poll_output(&mut self) -> Option<RouterOutput> {
        self.outputs.pop_front()
    }

    // Nodes.

    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Handles a change of the membership, an event of a node, or the end of its stream.
    pub fn handle_node_event(&mut self, now: Instant, input: DirectoryInput) {
        let mut actions = Vec::new();
        self.directory.handle(now, input, &mut actions);
        self.add_actions(actions);
    }

    /// Returns when to call [`Self::handle_deadline`] if no other input comes first.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.directory.next_deadline()
    }

    pub fn handle_deadline(&mut self, now: Instant) {
        let mut actions = Vec::new();
        self.directory.on_deadline(now, &mut actions);
        self.add_actions(actions);
    }

    fn add_actions(&mut self, actions: Vec<DirectoryAction>) {
        for action in actions {
            let has_changed = matches!(
                action,
                DirectoryAction::HealthChanged { .. }
                    | DirectoryAction::ServingChanged { .. }
                    | DirectoryAction::Forgotten { .. }
            );
            self.outputs.push_back(RouterOutput::Nodes(action));
            self.outputs.extend(has_changed.then_some(RouterOutput::NodesChanged));
        }
    }

    /// Returns the nodes that take part in an update of the weights, in the order of joining: nodes
    /// that are up and not draining. A node that has lost its weights counts as draining, but needs
    /// weights.
    pub fn weight_nodes(&self) -> impl Iterator<Item = (&Member, &NodeRecord)> {
        let members = self.directory.nodes().filter(|member| member.health == Health::Up);
        members.filter_map(|member| {
            let record = member.record()?;
            let has_lost = WeightVersion(record.identity.weight_version) == WeightVersion::NONE;
            (!member.load().draining || has_lost).then_some((member, record))
        })
    }

    // Admission.

    /// Admits a request with all of its answers, or refuses it: too many answers are in flight, or
    /// the answers could not start in time. Called before the prompt is tokenized, because a
    /// refusal must be cheap. The owner calls [`Self::handle_request_ended`] for each admitted
    /// request.
    pub fn handle_request(
        &mut self,
        now: Instant,
        request: &ArrivedRequest<'_>,
    ) -> Result<(), Overload> {
        let ArrivedRequest { flow, model, answers, output_tokens_max, limits } = *request;
        let admitted = self.admit(flow, answers);
        admitted.map_err(|full| self.overload(model, full, &flow.name))?;
        let queue = &self.model(model).queue;
        queue.check(now, flow, output_tokens_max, limits).map_err(|late| {
            self.handle_request_ended(&flow.name, answers);
            self.overload(model, LoadBound::Late(late), &flow.name)
        })
    }

    /// Admits work that needs no node, or refuses it. Ends as a request does.
    pub fn admit(&mut self, flow: &Flow, answers: u32) -> Result<(), LoadBound> {
        if self.is_closed {
            return Err(LoadBound::Stopping);
        }
        let max = self.in_flight.max();
        self.in_flight.take(flow, answers).map_err(|reached| match reached {
            LimitReached::All => LoadBound::InFlight { max },
            LimitReached::Share => LoadBound::ShareInFlight { max },
        })
    }

    /// Handles the end of an admitted request of this many answers.
    pub fn handle_request_ended(&mut self, flow: &FlowName, answers: u32) {
        self.in_flight.release(flow, answers);
    }

    /// Refuses every further request.
    pub fn close(&mut self) {
        self.is_closed = true;
    }

    /// Returns the number of answers in flight.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.total()
    }

    /// Returns the number of answers that the flow can have in flight at most.
    pub fn in_flight_max(&self, flow: &Flow) -> u32 {
        self.in_flight.max_of(flow)
    }

    /// Returns the number of answers that wait for a node.
    pub fn waiting(&self) -> u32 {
        self.waiting.total()
    }

    /// Returns the predicted time until the answers that wait for a node of the model are served,
    /// and the role of the nodes that were busy at the last pick.
    pub fn queue_time(&self, model: &str, now: Instant) -> Option<(Role, Duration)> {
        let ModelQueue { queue, busy, .. } = self.models.get(model)?;
        busy.map(|role| (role, queue.queue_time(now)))
    }

    /// Returns the predicted time until the answers that wait are served, in seconds.
    pub fn retry_after_s(&mut self, model: &Arc<str>) -> u32 {
        retry_after_s(self.model(model).queue.drain_time(None))
    }

    /// Returns the refusal with the predicted time after which the caller may retry.
    fn overload(&mut self, model: &Arc<str>, full: LoadBound, flow: &FlowName) -> Overload {
        let queue = &self.model(model).queue;
        let after = match full {
            LoadBound::Late(late) => Some(late.excess()),
            _ if full.is_of_caller() => queue.drain_time(Some(flow)),
            _ => queue.drain_time(None),
        };
        Overload { full, retry_after_s: retry_after_s(after) }
    }

    fn model(&mut self, model: &Arc<str>) -> &mut ModelQueue {
        self.models.entry(model.clone()).or_default()
    }

    // Answers.

    /// Records the arrival of an answer as a turn of its session. Returns its id, the turn, and
    /// whether other answers wait for a free node and come first.
    pub(crate) fn handle_arrival(
        &mut self,
        now: Instant,
        model: &Arc<str>,
        flow: &FlowName,
        identity: SessionIdentity<'_>,
    ) -> (AnswerId, SessionTurn<()>, bool) {
        self.answers += 1;
        let id = AnswerId(self.answers);
        let ModelQueue { queue, sessions, .. } = self.model(model);
        (id, sessions.arrived(now, flow, identity), !queue.is_empty())
    }

    /// Records the end of an answer with its last full block; `None` if the answer is not complete.
    pub(crate) fn end_turn(
        &mut self,
        model: &Arc<str>,
        flow: &FlowName,
        turn: SessionTurn<()>,
        last_block: Option<u128>,
    ) {
        self.model(model).sessions.ended(turn, flow, last_block);
    }

    /// Joins the queue, unless the answer could not start in time. An answer in the queue keeps its
    /// place, and its turn passes to other answers.
    pub(crate) fn wait_for_turn(
        &mut self,
        now: Instant,
        model: &Arc<str>,
        place: &mut WaitingPlace,
        request: &WaitRequest,
        pass: PassReason,
    ) -> Result<(), Overload> {
        let queue = &mut self.model(model).queue;
        if place.queued.is_some() {
            queue.passed(place.id, pass);
        } else {
            match queue.join(now, place.id, request) {
                Ok(limit) => place.queued = Some(limit),
                Err(late) => {
                    return Err(self.overload(model, LoadBound::Late(late), &request.flow.name));
                }
            }
        }
        self.give_turns(now, model);
        Ok(())
    }

    /// Takes a place among the waiting answers. An answer that has emitted tokens, and a further
    /// answer of a request, always find a place: answers in flight bound their number, and a refusal
    /// would cut the request.
    pub(crate) fn take_place(
        &mut self,
        model: &Arc<str>,
        id: AnswerId,
        flow: &Flow,
        has_begun: bool,
    ) -> Result<WaitingPlace, Overload> {
        let max = self.waiting.max();
        if has_begun {
            self.waiting.add(flow, 1);
        } else if let Err(reached) = self.waiting.take(flow, 1) {
            let full = match reached {
                LimitReached::All => LoadBound::Waiting { max },
                LimitReached::Share => LoadBound::ShareWaiting { max },
            };
            return Err(self.overload(model, full, &flow.name));
        }
        Ok(WaitingPlace { id, queued: None })
    }

    /// Releases a place among the waiting answers, and leaves the queue.
    pub(crate) fn release_place(
        &mut self,
        now: Instant,
        model: &Arc<str>,
        flow: &FlowName,
        mut place: WaitingPlace,
    ) {
        self.leave_queue(now, model, &mut place);
        self.waiting.release(flow, 1);
    }

    /// Leaves the queue, and gives the turn to the next answer.
    pub(crate) fn leave_queue(&mut self, now: Instant, model: &Arc<str>, place: &mut WaitingPlace) {
        if place.queued.take().is_some() {
            self.model(model).queue.leave(place.id);
            self.give_turns(now, model);
        }
    }

    /// Returns whether it is the turn of a queued answer; `None` if its turn would come too late.
    pub(crate) fn has_turn(&mut self, model: &Arc<str>, id: AnswerId) -> Option<bool> {
        self.model(model).queue.has_turn(id)
    }

    /// Gives the next turns, because nodes may have capacity again.
    pub(crate) fn retry_passed(&mut self, now: Instant, model: &Arc<str>) {
        self.model(model).queue.retry_passed();
        self.give_turns(now, model);
    }

    fn give_turns(&mut self, now: Instant, model: &Arc<str>) {
        let queue = &mut self.model(model).queue;
        let late = std::iter::from_fn(|| queue.take_late(now)).collect::<Vec<_>>();
        let next = std::iter::from_fn(|| queue.next_turn(now)).collect::<Vec<_>>();
        self.outputs.extend(late.into_iter().chain(next).map(RouterOutput::Wake));
    }

    /// Picks the nodes of an attempt, and charges the flow for it.
    pub(crate) fn pick(
        &mut self,
        now: Instant,
        transfer_id: TransferId,
        flow: &Flow,
        model: &Arc<str>,
        mut requirements: NodeRequirements<'_>,
    ) -> Result<(Picked, Charge), NoNode> {
        if let RequiredCapacity::Start { headroom } = &mut requirements.capacity {
            *headroom = self.model(model).queue.is_over_share(now, &flow.name);
        }
        let picked = match self.directory.pick(now, transfer_id, &requirements) {
            Ok(picked) => picked,
            Err(reason) => {
                if let NoNode::Busy { role, .. } = reason {
                    self.model(model).busy = Some(role);
                }
                return Err(reason);
            }
        };
        let prompt =
            StartedPrompt { tokens: requirements.tokens, uncached_tokens: picked.uncached_tokens };
        let queue = &mut self.model(model).queue;
        let charge = queue.start(now, flow, prompt, requirements.new_tokens_max);
        Ok((picked, charge))
    }

    /// Returns how the decode node drains; `None` if the node does not drain, or no other node can
    /// take the request.
    pub(crate) fn drain(
        &self,
        now: Instant,
        nodes: &AttemptNodes,
        requirements: &NodeRequirements<'_>,
    ) -> Option<Drain> {
        self.directory.drain(now, nodes.decode.assignment, requirements)
    }

    /// Handles a node that accepted the attempt: the stream of the call is open.
    pub(crate) fn handle_accepted(&mut self, node: &cluster::NodeChoice) {
        self.directory.accepted(node.assignment);
    }

    /// Handles the first token of an answer.
    pub(crate) fn handle_first_token(&mut self, now: Instant, nodes: &AttemptNodes) {
        self.directory.first_token(now, nodes.decode.assignment);
    }

    /// Handles the transfer of the attempt's KV, which took this time.
    pub(crate) fn handle_delivered(
        &mut self,
        now: Instant,
        nodes: &AttemptNodes,
        elapsed: Duration,
    ) {
        if let Some(prefill) = &nodes.prefill {
            let (prefill, decode) = (prefill.assignment, nodes.decode.assignment);
            self.directory.delivered(now, prefill, decode, elapsed);
            self.add_breaker_changes();
        }
    }

    /// Handles the decode node's first token of the attempt.
    pub(crate) fn handle_served(&mut self, nodes: &AttemptNodes) {
        self.directory.served(nodes.decode.assignment);
        self.add_breaker_changes();
    }

    /// Reports the end of an attempt to the directory: the speed of the decode node, and who may be
    /// at fault for a failure.
    pub(crate) fn handle_attempt_ended(
        &mut self,
        now: Instant,
        nodes: &AttemptNodes,
        stats: &AttemptStats,
        failure: Option<&AttemptFailure>,
    ) {
        let decode = nodes.decode.assignment;
        self.directory.decoded(now, decode, stats.decoded_tokens, stats.decode_wait);
        if let Some(failure) = failure {
            let node = nodes.of(failure.side);
            let prefill = nodes.prefill.as_ref().map(|node| node.assignment);
            let failed = match (failure.blame(), prefill) {
                (Some(Blame::Node), _) => Some(Failed::Node(node.assignment)),
                (Some(Blame::Pair), Some(prefill)) => Some(Failed::Transfer { prefill, decode }),
                (Some(Blame::Pair), None) | (None, _) => None,
            };
            if let Some(failed) = failed {
                self.directory.failed(now, failed);
            }
            match failure.node_feedback() {
                Some(NodeFeedback::Busy) => self.directory.busy(now, node.assignment),
                Some(NodeFeedback::Lost) => {
                    let (assignment, reason) = (node.assignment, failure.message.clone());
                    self.handle_node_event(now, DirectoryInput::CallLost { assignment, reason });
                }
                None => {}
            }
        }
        self.add_breaker_changes();
    }

    /// Releases one node of an attempt.
    pub(crate) fn release(&mut self, node: &cluster::NodeChoice) {
        self.directory.release(node.assignment);
    }

    /// Releases the nodes of an attempt whose calls are dropped, ends its charge, and gives the
    /// next turns.
    pub(crate) fn release_attempt(
        &mut self,
        now: Instant,
        model: &Arc<str>,
        nodes: &AttemptNodes,
        charge: &Charge,
        end: ChargeEnd,
    ) {
        for node in [Some(&nodes.decode), nodes.prefill.as_ref()].into_iter().flatten() {
            self.release(node);
        }
        let queue = &mut self.model(model).queue;
        queue.ended(now, charge, end);
        self.retry_passed(now, model);
    }

    /// Returns when the attempt's node on this side last reported a change of its load or cache.
    pub(crate) fn changed_at(&self, nodes: &AttemptNodes, side: AttemptSide) -> Option<Instant> {
        let node = match side {
            AttemptSide::Decode => &nodes.decode,
            AttemptSide::Prefill => nodes.prefill.as_ref()?,
        };
        self.directory.changed_at(node.assignment)
    }

    fn add_breaker_changes(&mut self) {
        let changes = self.directory.take_breaker_changes();
        let has_changed = !changes.is_empty();
        self.outputs.extend(changes.into_iter().map(RouterOutput::Breaker));
        self.outputs.extend(has_changed.then_some(RouterOutput::NodesChanged));
    }

    /// Panics unless no request holds a resource.
    pub fn check_idle(&self) {
        assert_eq!((self.in_flight(), self.waiting()), (0, 0), "in flight and waiting");
        for model in self.models.values() {
            assert!(model.queue.is_empty(), "answers are queued");
            model.sessions.check_idle();
        }
        assert!(self.directory.nodes().all(|node| node.in_flight == 0), "nodes are assigned");
    }
}
