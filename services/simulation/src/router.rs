//! A router: its shipped directory and request cores, with calls and timers of the simulation.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::{
    BreakerReason, CacheIdentity, MemberChange, NodeAddress, PrefixKeys, Room, Selection, StreamId,
};
use grammar::Grammar;
use proto::{
    ids::{RequestId, TransferId},
    v1::{self, DecodeEvent, DecodeRequest, ObserveEvent, PrefillEvent, PrefillRequest},
};
use router::{
    fair_queue::{
        Charge, FairQueue, Flow, Pass, SessionTurn, Sessions, StartLimit, StartedPrompt,
        WaitLimits, WaitRequest,
    },
    request_core::{
        AnswerSpec, AttemptOutcome, Blame, EndedAttempt, GiveUp, NodeFeedback, Output,
        RecoveryPolicy, RequestCore, Side, Stop,
    },
};
use simulation_base::Random;
use tonic::Status;

use crate::{
    answer::Client,
    coverage::Coverage,
    nodes::{Assigned, Connection, Nodes, NodesAction, PickedNodes},
    scenario::{RequestPlan, VOCABULARY},
    stats::{ReplayStats, ServedRequest},
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

/// The nodes of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pick {
    pub request: usize,
    /// Host of the decode node.
    pub decode: usize,
    /// Host of the prefill node; `None` when the decode node prefilled.
    pub prefill: Option<usize>,
    /// Predicted time to first token.
    pub predicted: Option<Duration>,
    /// Time from the pick to the first token.
    pub ttft: Option<Duration>,
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

    /// `is_checked`: the client knows the expected tokens.
    pub fn request(
        &mut self,
        now: Instant,
        id: usize,
        model: Arc<str>,
        mut plan: RequestPlan,
        is_checked: bool,
    ) {
        let deadline = now + plan.timeout;
        let client = Client::new(&plan, is_checked);
        let prefix = self.nodes.cache_identity(&model).map(|identity| {
            let identity = CacheIdentity::of(identity);
            PrefixKeys::new(identity, &plan.cache_salt, &plan.prompt)
        });
        let session = plan.session();
        let spec = AnswerSpec {
            request_id: RequestId(id as u128 + 1),
            model: model.clone(),
            prompt: std::mem::take(&mut plan.prompt).into(),
            prefix: prefix.into_iter().collect(),
            sampling: wire_sampling(&plan),
            grammar: plan.grammar.as_ref().map(|grammar| Arc::new(wire_grammar(grammar))),
            grammar_version: u32::from(plan.grammar.is_some()),
            cache_salt: plan.cache_salt.as_str().into(),
            session,
            vocabulary_size: VOCABULARY,
            deadline,
        };
        let flow = plan.flow();
        let sessions = self.sessions.entry(model.clone()).or_default();
        let turn = sessions.arrived(now, &flow.name, spec.session_marks());
        let mut core = RequestCore::new(spec, self.policy);
        let is_queued = self.waiting.get(&model).is_some_and(|queue| !queue.is_empty());
        core.start(now, is_queued);
        let answer = Answer {
            plan,
            model,
            deadline,
            core,
            client,
            nodes: None,
            transfer: None,
            attempts: 0,
            flow,
            turn,
            queued: None,
            pass: Pass::default(),
            charge: None,
            stalled: None,
            arrived_at: now,
            due: None,
            picked_at: None,
            first_emitted_at: None,
            emitted_at: None,
            pause: Duration::ZERO,
            cached_tokens: None,
            end: None,
        };
        if let Some(stats) = &mut self.stats {
            stats.first_arrival.get_or_insert(now);
        }
        self.answers.insert(id, answer);
        self.open.insert(id);
        self.perform(now, id);
    }

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
                    let answer = self.answers.get_mut(&id).expect("requests are kept");
                    if first_index == 0
                        && let Some((decode, _)) = &answer.nodes
                    {
                        self.nodes.first_token(now, decode);
                        answer.first_emitted_at = Some(now);
                        if self.stats.is_none() {
                            let pick = self.picks.iter_mut().rfind(|pick| pick.request == id);
                            let pick = pick.expect("tokens come from an attempt");
                            pick.ttft = answer.picked_at.map(|at| now - at);
                            self.first_tokens.insert(id, now - answer.arrived_at);
                        }
                    }
                    if let Some(charge) = &mut answer.charge {
                        charge.emitted(now, tokens.len() as u32);
                    }
                    let gap = answer.emitted_at.replace(now).map(|at| now - at);
                    let stop = answer.client.receive(first_index, &tokens);
                    match answer.stalls(first_index, tokens.len() as u32) {
                        Some(time) => {
                            answer.stalled = Some((now + time, stop));
                            answer.core.handle_client_stalled();
                        }
                        None => answer.core.handle_emitted(now, stop),
                    }
                    if let (Some(stats), Some(gap)) = (&mut self.stats, gap) {
                        stats.inter_token.add(gap);
                    }
                    let gap = gap.unwrap_or_default();
                    answer.pause = answer.pause.max(gap);
                    self.longest_gap = self.longest_gap.max(gap);
                    if first_index > 1 {
                        self.longest_decode_gap = self.longest_decode_gap.max(gap);
                        #[cfg(test)]
                        self.decode_gaps.push((id, gap));
                    }
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

    /// Records a complete request of a replay.
    fn count_request(&mut self, now: Instant, id: usize) {
        let (Some(stats), Some(answer)) = (&mut self.stats, self.answers.get(&id)) else { return };
        stats.requests.push(ServedRequest {
            request: id,
            prompt_tokens: answer.core.wanted().prompt_tokens,
            cached_tokens: answer.cached_tokens.unwrap_or(0),
            output_tokens: answer.core.emitted().len() as u32,
            ttft: answer.first_emitted_at.map_or(Duration::ZERO, |at| at - answer.arrived_at),
            duration: now - answer.arrived_at,
            longest_gap: answer.pause,
            attempts: answer.attempts,
        });
    }

    /// Joins the queue, or passes the turn.
    fn queue(&mut self, now: Instant, id: usize) {
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        let queue = self.waiting.entry(answer.model.clone()).or_default();
        if answer.queued.is_some() {
            let pass = std::mem::take(&mut answer.pass);
            return queue.passed(now, id, pass);
        }
        let wanted = answer.core.wanted();
        let request = WaitRequest {
            flow: answer.flow.clone(),
            prompt_tokens: wanted.tokens,
            output_tokens_max: wanted.new_tokens_max,
            limits: WaitLimits::new(wanted.room, self.policy.busy_timeout, answer.deadline),
            has_begun: !answer.core.emitted().is_empty(),
            session_since: answer.turn.since(),
        };
        match queue.join(now, id, &request) {
            Ok(limit) => answer.queued = Some(limit),
            Err(_) => self.end(now, id, End::Refused),
        }
    }

    fn leave_queue(&mut self, id: usize) {
        let answer = self.answer(id);
        answer.queued = None;
        let model = answer.model.clone();
        if let Some(queue) = self.waiting.get_mut(&model) {
            queue.leave(id);
        }
    }

    fn give_turns(&mut self, now: Instant) {
        for model in self.waiting.keys().cloned().collect::<Vec<_>>() {
            while let Some(id) = self.waiting.get_mut(&model).and_then(|queue| queue.take_late(now))
            {
                let answer = self.answer(id);
                let limit = answer.queued.expect("a late request is in the queue");
                answer.core.handle_late_turn(now, limit);
                self.perform(now, id);
            }
            while let Some(id) = self.waiting.get_mut(&model).and_then(|queue| queue.next_turn(now))
            {
                self.coverage.count("turns");
                self.answer(id).core.handle_turn();
                self.perform(now, id);
            }
        }
    }

    /// Picks nodes and opens the calls of an attempt.
    fn pick(&mut self, now: Instant, id: usize) {
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        let transfer = TransferId(self.random.id());
        let queue = self.waiting.entry(answer.model.clone()).or_default();
        let mut wanted = answer.core.wanted();
        if let Room::Start { headroom } = &mut wanted.room {
            *headroom = queue.is_over_share(now, &answer.flow.name);
        }
        let (tokens, output_tokens_max) = (wanted.tokens, wanted.new_tokens_max);
        let started = self.stats.is_some().then(Instant::now);
        let picked = self.nodes.pick(now, transfer, &wanted);
        if let (Some(stats), Some(started)) = (&mut self.stats, started) {
            stats.pick_time += started.elapsed();
        }
        let picked = match picked {
            Ok(picked) => picked,
            Err(reason) => {
                answer.pass = Pass::of(&reason);
                return answer.core.handle_no_node(now, &reason);
            }
        };
        let PickedNodes { decode, prefill, ttft, uncached_tokens } = picked;
        let prompt = StartedPrompt { tokens, uncached_tokens };
        let charge = queue.start(now, &answer.flow, prompt, output_tokens_max);
        queue.leave(id);
        answer.queued = None;
        answer.charge = Some(charge);
        self.picks.extend(self.stats.is_none().then(|| Pick {
            request: id,
            decode: decode.host,
            prefill: prefill.as_ref().map(|node| node.host),
            predicted: ttft,
            ttft: None,
        }));
        if ttft.is_some() {
            self.coverage.count(match prefill {
                Some(_) => "predicted hand-over",
                None => "predicted local prefill",
            });
        }
        let records = (decode.record.clone(), prefill.as_ref().map(|node| node.record.clone()));
        answer.picked_at = Some(now);
        answer.nodes = Some((decode.clone(), prefill.clone()));
        let calls = answer.core.handle_picked(now, transfer, records.0, records.1);
        (answer.transfer, answer.attempts) = (Some(transfer), calls.number);
        self.coverage.count("attempts");
        if calls.number > 1 && answer.plan.grammar.is_some() {
            self.coverage.count("structured output migrated");
        }
        let key = CallKey { transfer, side: Side::Decode };
        self.open_call(id, key, &decode, NodeCall::Decode(calls.decode));
        if let (Some(prefill), Some(call)) = (prefill, calls.prefill) {
            let key = CallKey { transfer, side: Side::Prefill };
            self.open_call(id, key, &prefill, NodeCall::Prefill(call));
        }
    }

    fn drop_prefill_call(&mut self, id: usize) {
        let answer = self.answer(id);
        let prefill = answer.nodes.as_mut().and_then(|(_, prefill)| prefill.take());
        let transfer = answer.transfer;
        if let (Some(prefill), Some(transfer)) = (prefill, transfer) {
            self.drop_call(CallKey { transfer, side: Side::Prefill });
            self.nodes.release(&prefill);
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
        // The prefix hits of the prefill node, or of the decode node if it prefilled. A retry finds the KV that its
        // request computed before, so the first report counts.
        let stats = &ended.stats;
        let local = stats.decode.cached_tokens.filter(|_| stats.local_prefill);
        let cached = stats.prefill.cached_tokens.or(local);
        let answer = self.answer(id);
        answer.cached_tokens = answer.cached_tokens.or(cached);
        self.nodes.decoded(now, &decode, ended.stats.decoded_tokens, ended.stats.decode_wait);
        if let AttemptOutcome::Failed(failure) = &ended.outcome {
            self.coverage.count_failure(failure);
            let node = match (failure.side, &prefill) {
                (Side::Prefill, Some(prefill)) => prefill,
                (Side::Prefill, None) | (Side::Decode, _) => &decode,
            };
            match (failure.blame(), &prefill) {
                (Some(Blame::Node), _) => self.nodes.failed(now, node),
                (Some(Blame::Pair), Some(prefill)) => {
                    self.nodes.transfer_failed(now, prefill, &decode);
                }
                _ => {}
            }
            match failure.node_feedback() {
                Some(NodeFeedback::Busy) => self.nodes.busy(now, node),
                Some(NodeFeedback::Lost) => {
                    self.nodes.call_lost(now, node, failure.message.clone());
                }
                None => {}
            }
        }
        for node in [Some(decode), prefill].into_iter().flatten() {
            self.nodes.release(&node);
        }
        for change in self.nodes.take_opened() {
            self.coverage.count(match (change.partner, change.opened) {
                (Some(_), _) => "breaker of a pair opened",
                (None, Some(BreakerReason::Slow)) => "slow node excluded",
                (None, _) => "breaker of a node opened",
            });
        }
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        let charge = answer.charge.take().expect("an attempt is charged");
        let queue = self.waiting.get_mut(&answer.model).expect("the attempt was charged");
        queue.ended(now, &charge, ended.outcome.charged_end());
        queue.retry_passed();
        if ended.outcome == AttemptOutcome::Paused {
            self.coverage.count("paused");
        }
    }

    fn end(&mut self, now: Instant, id: usize, end: End) {
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        assert!(answer.end.is_none(), "request {id} ends twice");
        assert!(now <= answer.deadline, "request {id} ends after its deadline");
        let last_block = answer.core.last_block().filter(|_| end == End::Complete);
        let sessions = self.sessions.get_mut(&answer.model).expect("the turn has arrived");
        sessions.ended(&answer.turn, last_block);
        let attempts = answer.attempts;
        answer.end = Some(end.clone());
        self.open.remove(&id);
        self.set_due(id);
        self.coverage.count_end(&end, attempts);
        self.leave_queue(id);
        if let Some(stats) = &mut self.stats {
            stats.failed += u64::from(matches!(end, End::Failed(_) | End::Refused));
            stats.last_end = Some(now);
            self.answers.remove(&id);
        }
    }

    fn drop_call(&mut self, key: CallKey) {
        if let Some(OpenCall { connection, .. }) = self.calls.remove(&key) {
            self.actions.push(RouterAction::Cancel { connection, key });
        }
    }
}

impl Answer {
    /// Returns how long the client reads nothing after these tokens.
    fn stalls(&self, first_index: u32, count: u32) -> Option<Duration> {
        let (after, time) = self.plan.stalls?;
        (first_index..first_index + count).contains(&after).then_some(time)
    }

    fn node(&self, side: Side) -> Option<&Assigned> {
        match (side, self.nodes.as_ref()?) {
            (Side::Decode, (decode, _)) => Some(decode),
            (Side::Prefill, (_, prefill)) => prefill.as_ref(),
        }
    }
}

fn wire_sampling(plan: &RequestPlan) -> v1::Sampling {
    let sampling = &plan.sampling;
    v1::Sampling {
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
