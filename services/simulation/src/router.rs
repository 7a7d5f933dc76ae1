//! The router: around its real directory and its real decisions (attempt, emitted tokens, recovery) the
//! calls and clocks that `services/router` has tasks for.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use cluster::{NoNode, Role, StreamId, Wanted};
use engine::{
    event::{FinishReason, NewSequence, SequenceId, SequenceKind},
    executor::sim::fingerprints,
};
use kv_transfer::api::{PeerAddress, TransferId};
use proto::v1::{self, ObserveEvent};
use router::request_core::{
    AttemptAction, AttemptFailure, Cause, LAST_EVENT_MAX, NextStep, Side, TOKEN_0_MAX,
};

use simulation_base::Random;

use crate::{
    attempt::{Attempt, side_of},
    coverage::Coverage,
    journey::{Begun, Said},
    nodes::{Assigned, Nodes, Watch},
    process::{Call, control_endpoint},
    request::{End, Request, State},
    scenario::RequestPlan,
};

/// Between two looks for a node that may come back, and between two tries of one that waits for room.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
const ASK_AGAIN: Duration = Duration::from_millis(25);

/// A call to one node of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallId {
    pub transfer: TransferId,
    pub side: Side,
}

/// What the router wants done, in order.
#[derive(Debug)]
pub enum Act {
    Call {
        host: usize,
        call: Box<Call>,
    },
    /// The stream of a call is dropped.
    Cancel {
        host: usize,
        connection: u64,
        transfer: TransferId,
    },
}

pub struct Router {
    pub nodes: Nodes,
    requests: BTreeMap<u64, Request>,
    calls: BTreeMap<CallId, OpenCall>,
    random: Random,
    acts: Vec<Act>,
    pub coverage: Coverage,
}

struct OpenCall {
    request: u64,
    host: usize,
    connection: u64,
}

impl Router {
    pub fn new(now: Instant, roles: &[Role], mut random: Random) -> Self {
        Self {
            nodes: Nodes::new(now, roles, random.next()),
            requests: BTreeMap::new(),
            calls: BTreeMap::new(),
            random,
            acts: Vec::new(),
            coverage: Coverage::default(),
        }
    }

    pub fn take_acts(&mut self) -> (Vec<Act>, Vec<Watch>) {
        (std::mem::take(&mut self.acts), self.nodes.take_watches())
    }

    pub fn requests(&self) -> impl Iterator<Item = &Request> {
        self.requests.values()
    }

    pub fn all_ended(&self) -> bool {
        self.requests.values().all(Request::has_ended)
    }

    pub fn check_idle(&self) {
        self.nodes.check_idle();
        assert!(self.calls.is_empty(), "calls are open");
    }

    // What happens.

    pub fn arrive(&mut self, now: Instant, id: u64, plan: RequestPlan) {
        self.requests.insert(id, Request::new(now, plan, id));
        self.go_on(now, id);
    }

    /// The client goes away.
    pub fn leave(&mut self, now: Instant, id: u64) {
        if !self.requests[&id].has_ended() {
            self.end(now, id, End::ClientLeft);
        }
    }

    /// A node said something on a call.
    pub fn said(&mut self, now: Instant, call: CallId, said: Said) {
        let Some(open) = self.calls.get(&call) else { return };
        let id = open.request;
        if said.is_end() {
            // Nothing is left to cancel.
            self.calls.remove(&call);
        }
        let Request { state, emitted, .. } = self.request(id);
        let State::Trying { attempt, .. } = state else {
            unreachable!("an open call belongs to an attempt");
        };
        if !attempt.expects(call.side) {
            return;
        }
        let node = attempt.node(call.side).clone();
        let is_answer = !matches!(said, Said::Failed { .. } | Said::Cut);
        let is_all = matches!(said, Said::Tokens { finish: Some(_), .. });
        let reserved = match said {
            Said::Reserved { alone: true } => Some("alone"),
            Said::Reserved { alone: false } => Some("reserved"),
            _ => None,
        };
        let next = attempt.said(call.side, said, emitted);
        if let Some(reserved) = reserved {
            self.coverage.count(reserved);
        }
        if is_answer {
            self.nodes.answered(&node);
        }
        if is_all {
            self.coverage.count("token 0 finished");
        }
        self.act(now, id, next);
    }

    /// A connection to a node has ended, with every stream on it.
    pub fn connection_lost(&mut self, now: Instant, host: usize) {
        let connection = self.nodes.connection(host);
        let is_on_it = |call: &OpenCall| (call.host, call.connection) == (host, connection);
        let cut = self.calls.iter().filter(|(_, call)| is_on_it(call));
        let cut: Vec<CallId> = cut.map(|(id, _)| *id).collect();
        self.nodes.connection_lost(now, host);
        for call in cut {
            self.said(now, call, Said::Cut);
        }
        self.wake_waiting(now);
    }

    pub fn observed(&mut self, now: Instant, stream: StreamId, event: ObserveEvent) {
        self.nodes.observed(now, stream, event);
        self.wake_waiting(now);
    }

    /// Another router takes its host and knows nothing: its clients must ask again.
    pub fn restart(&mut self, now: Instant) {
        for request in self.requests.values_mut().filter(|request| !request.has_ended()) {
            self.coverage.count("client left");
            request.state = State::Ended(End::ClientLeft);
        }
        self.calls.clear();
        self.acts.clear();
        self.nodes.restart(now, self.random.next());
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let requests = self.requests.values().filter_map(Request::next_deadline);
        requests.chain(self.nodes.next_deadline()).min()
    }

    pub fn on_deadline(&mut self, now: Instant) {
        if self.nodes.next_deadline().is_some_and(|at| at <= now) {
            self.nodes.on_deadline(now);
            self.wake_waiting(now);
        }
        let due = |request: &&Request| request.next_deadline().is_some_and(|at| at <= now);
        let ids: Vec<u64> = self.requests.values().filter(due).map(|request| request.id).collect();
        for id in ids {
            let request = self.request(id);
            match &mut request.state {
                State::Waiting { for_node: true, .. } if request.deadline <= now => {
                    let reason = request.recovery.no_decode_node(now);
                    self.end(now, id, End::GaveUp(reason));
                }
                _ if request.deadline <= now => self.end(now, id, End::Deadline),
                State::Waiting { .. } => self.go_on(now, id),
                State::Trying { attempt, token_0_by: Some(by), .. } if *by <= now => {
                    let next = attempt.machine.on_token_0_late();
                    self.coverage.count("token 0 timed out");
                    self.act(now, id, next);
                }
                // Every token is shown, and the node's last word does not come.
                State::Trying { .. } => self.complete(now, id, None),
                State::Ended(_) => {}
            }
        }
    }

    /// Those who wait for a node look at once when any node's health changes.
    fn wake_waiting(&mut self, now: Instant) {
        if !self.nodes.take_changed() {
            return;
        }
        for request in self.requests.values_mut() {
            if let State::Waiting { until, for_node: true } = &mut request.state {
                *until = now;
            }
        }
    }

    // A request's way.

    fn request(&mut self, id: u64) -> &mut Request {
        self.requests.get_mut(&id).expect("requests stay")
    }

    /// Makes attempts until one is under way, or there is a reason to wait or to give up.
    fn go_on(&mut self, now: Instant, id: u64) {
        loop {
            match self.pick(now, id) {
                Ok((decode, prefill)) => return self.attempt(now, id, decode, prefill),
                Err(none) => {
                    let then = self.request(id).recovery.no_node(&none, now);
                    if !self.follow(now, id, then) {
                        return;
                    }
                }
            }
        }
    }

    /// True when another attempt is to be made at once.
    fn follow(&mut self, now: Instant, id: u64, then: NextStep) -> bool {
        let until = match then {
            NextStep::Retry => return true,
            NextStep::WaitForTurn => {
                self.request(id).recovery.take_turn();
                now + ASK_AGAIN
            }
            NextStep::PickAgain { left } => now + ASK_AGAIN.min(left),
            NextStep::WaitForNode { .. } => now + LOOK_AGAIN,
            NextStep::GiveUp(reason) => {
                self.end(now, id, End::GaveUp(reason));
                return false;
            }
        };
        let for_node = matches!(then, NextStep::WaitForNode { .. });
        self.request(id).state = State::Waiting { until, for_node };
        false
    }

    /// A decode node, and a prefill node that fits it; without one the decode node works alone.
    fn pick(&mut self, now: Instant, id: u64) -> Result<(Assigned, Option<Assigned>), NoNode> {
        let request = &self.requests[&id];
        let emitted = request.emitted.next_index();
        let prompt_tokens = request.plan.prompt.len() as u32;
        let alone = request.recovery.decode_alone();
        let wanted = Wanted {
            role: Role::Decode,
            prompt_tokens,
            tokens: prompt_tokens + emitted,
            new_tokens_max: request.plan.max_tokens - emitted,
            computes_prompt: alone,
            model: None,
            prefix: &[],
            identity: None,
            grammar_version: 0,
            exclude: request.recovery.avoid_decode(),
        };
        let (decode, choice) = self.nodes.pick(now, &wanted)?;
        let identity = &choice.record.identity;
        if alone || wanted.tokens < identity.block_size {
            return Ok((decode, None));
        }
        let wanted = Wanted {
            role: Role::Prefill,
            new_tokens_max: 1,
            computes_prompt: true,
            identity: Some(identity),
            exclude: request.recovery.avoid_prefill(),
            ..wanted
        };
        let prefill = self.nodes.pick(now, &wanted).ok();
        Ok((decode, prefill.map(|(prefill, _)| prefill)))
    }

    fn attempt(&mut self, now: Instant, id: u64, decode: Assigned, prefill: Option<Assigned>) {
        self.coverage.count("attempts");
        let transfer = TransferId(self.random.id());
        let kind = if prefill.is_some() { SequenceKind::Receive } else { SequenceKind::Compute };
        self.call(now, id, transfer, kind, &decode, prefill.as_ref());
        if let Some(prefill) = &prefill {
            self.call(now, id, transfer, SequenceKind::Send, prefill, Some(&decode));
        }
        let request = self.request(id);
        let attempt = Attempt::new(transfer, request.emitted.next_index(), decode, prefill);
        request.state = State::Trying { attempt, complete_by: None, token_0_by: None };
    }

    fn call(
        &mut self,
        now: Instant,
        request_id: u64,
        transfer: TransferId,
        kind: SequenceKind,
        node: &Assigned,
        peer: Option<&Assigned>,
    ) {
        let (host, connection) = (node.host, self.nodes.connection(node.host));
        let side = side_of(self.nodes.role(host));
        let open = OpenCall { request: request_id, host, connection };
        self.calls.insert(CallId { transfer, side }, open);
        let peer = peer.map(|peer| PeerAddress {
            node_id: format!("{}-{}", self.nodes.role(peer.host), peer.host),
            epoch: peer.epoch,
            control_endpoint: control_endpoint(peer.host),
        });
        let request = &self.requests[&request_id];
        let tokens = [&request.plan.prompt[..], request.emitted.ids()].concat();
        let begun = Begun {
            // Any hash of the tokens will do.
            prompt_hash: fingerprints(&tokens).last().copied().unwrap_or_default().into(),
            sequence: NewSequence {
                id: SequenceId(transfer.0),
                kind,
                tokens,
                prompt_len: request.plan.prompt.len() as u32,
                sampling: request.plan.sampling.clone(),
                max_tokens: request.plan.max_tokens,
                ignore_stop_tokens: request.plan.ignore_stop_tokens,
                cache_salt: request.plan.cache_salt.clone(),
                constraint: None,
                deadline: request.deadline,
            },
            peer,
        };
        let epoch = node.epoch;
        let remaining = request.deadline.saturating_duration_since(now);
        let call = Box::new(Call { connection, epoch, remaining, begun });
        self.acts.push(Act::Call { host, call });
    }

    /// Does what the attempt wants done.
    fn act(&mut self, now: Instant, id: u64, next: Vec<AttemptAction>) {
        for next in next {
            match next {
                AttemptAction::Admitted => {
                    self.request(id).recovery.admitted();
                }
                AttemptAction::Emit { first_index, tokens, .. } => {
                    if self.request(id).show(first_index, &tokens) {
                        // A stop string: the nodes do not know.
                        return self.complete(now, id, Some(FinishReason::Stop));
                    }
                }
                AttemptAction::DropPrefill => {
                    let State::Trying { attempt, .. } = &self.requests[&id].state else { return };
                    let call = CallId { transfer: attempt.transfer, side: Side::Prefill };
                    self.drop_call(call);
                }
                AttemptAction::Finish(reason) => {
                    return self.complete(now, id, Some(of_the_wire(reason)));
                }
                AttemptAction::Fail(_) if self.requests[&id].is_complete() => {
                    return self.complete(now, id, None);
                }
                AttemptAction::Fail(failure) => return self.attempt_failed(now, id, failure),
            }
        }
        let request = self.request(id);
        let complete_by = request.is_complete().then(|| now + LAST_EVENT_MAX);
        if let State::Trying { attempt, complete_by: by, token_0_by } = &mut request.state {
            *by = complete_by;
            *token_0_by = (!attempt.machine.expects_decode()).then(|| now + TOKEN_0_MAX);
        }
    }

    fn attempt_failed(&mut self, now: Instant, id: u64, failure: AttemptFailure) {
        self.coverage.count_failure(&failure);
        let Some(attempt) = self.end_attempt(now, id, Some(&failure)) else { return };
        let prefill = attempt.prefill_node.as_ref().map(|node| node.epoch);
        let Request { recovery, emitted, .. } = self.request(id);
        if emitted.next_index() > attempt.machine.first_index() {
            recovery.progressed();
        }
        let then = recovery.failed(failure, prefill, attempt.decode_node.epoch, now);
        if self.follow(now, id, then) {
            self.go_on(now, id);
        }
    }

    fn complete(&mut self, now: Instant, id: u64, reason: Option<FinishReason>) {
        self.request(id).check_complete(reason);
        self.end(now, id, End::Complete);
    }

    fn end(&mut self, now: Instant, id: u64, end: End) {
        assert!(!self.requests[&id].has_ended(), "request {id} ends twice");
        self.coverage.count_end(&end, self.requests[&id].recovery.attempts());
        self.end_attempt(now, id, None);
        self.request(id).state = State::Ended(end);
    }

    /// Drops the calls of the attempt under way and gives its nodes back.
    fn end_attempt(
        &mut self,
        now: Instant,
        id: u64,
        failure: Option<&AttemptFailure>,
    ) -> Option<Attempt> {
        let waits = State::Waiting { until: now, for_node: false };
        let state = std::mem::replace(&mut self.request(id).state, waits);
        let State::Trying { attempt, .. } = state else { return None };
        let transfer = attempt.transfer;
        self.drop_call(CallId { transfer, side: Side::Decode });
        self.drop_call(CallId { transfer, side: Side::Prefill });
        match failure.map(|failure| (failure.cause, attempt.node(failure.side))) {
            Some((Cause::Busy, node)) => self.nodes.busy(now, node),
            Some((Cause::Lost | Cause::Stale, node)) => self.nodes.call_lost(now, node),
            Some(_) | None => {}
        }
        self.nodes.release(&attempt.decode_node);
        if let Some(prefill) = &attempt.prefill_node {
            self.nodes.release(prefill);
        }
        Some(attempt)
    }

    fn drop_call(&mut self, id: CallId) {
        if let Some(OpenCall { host, connection, .. }) = self.calls.remove(&id) {
            self.acts.push(Act::Cancel { host, connection, transfer: id.transfer });
        }
    }
}

fn of_the_wire(reason: v1::FinishReason) -> FinishReason {
    match reason {
        v1::FinishReason::Stop => FinishReason::Stop,
        v1::FinishReason::Length => FinishReason::Length,
        v1::FinishReason::Unspecified | v1::FinishReason::ToolCalls => {
            unreachable!("an attempt does not end with {reason:?}")
        }
    }
}
