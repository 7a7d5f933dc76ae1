//! The router: the real directory, and around it the smallest faithful copy of what
//! `services/router` does: ids, attempts, one list of emitted tokens for each request, recovery.
//!
//! Every token is compared with the oracle's as soon as it is shown.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use cluster::{
    Action, Directory, Input, MemberChange, NoNode, NodeAddress, Role, StreamId, Wanted,
};
use engine::event::{FinishReason, NewSequence, SequenceId};
use kv_transfer::api::{Epoch, PeerAddress, TransferId};

use crate::{
    attempt::{Assigned, Attempt, Next},
    journey::{Begun, Said},
    process::{Call, notice_endpoint, prompt_hash, sequence_kind},
    random::Random,
    recovery::{Cause, Failure, GiveUp, Side, Then},
    request::{End, Request, State},
    scenario::RequestPlan,
    tally::Tally,
};

/// How long a complete answer waits for the node's last event.
const LAST_EVENT_MAX: Duration = Duration::from_millis(200);
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
        place: usize,
        call: Box<Call>,
    },
    /// The stream of a call is dropped.
    Cancel {
        place: usize,
        connection: u64,
        transfer: TransferId,
    },
    Observe {
        place: usize,
        connection: u64,
        stream: StreamId,
    },
    StopObserving {
        place: usize,
        stream: StreamId,
    },
}

pub struct Router {
    directory: Directory,
    addresses: Vec<NodeAddress>,
    /// Number of the connection to each place.
    connections: Vec<u64>,
    requests: BTreeMap<u64, Request>,
    calls: BTreeMap<CallId, OpenCall>,
    streams: BTreeMap<StreamId, usize>,
    random: Random,
    acts: Vec<Act>,
    pub tally: Tally,
}

struct OpenCall {
    request: u64,
    place: usize,
    connection: u64,
}

impl Router {
    pub fn new(now: Instant, roles: &[Role], mut random: Random) -> Self {
        let address = |(place, &role): (usize, &Role)| NodeAddress {
            role,
            grpc: format!("http://place-{place}:3"),
        };
        let addresses: Vec<_> = roles.iter().enumerate().map(address).collect();
        let mut router = Self {
            directory: Directory::new(random.next()),
            connections: vec![0; addresses.len()],
            addresses: addresses.clone(),
            requests: BTreeMap::new(),
            calls: BTreeMap::new(),
            streams: BTreeMap::new(),
            random,
            acts: Vec::new(),
            tally: Tally::default(),
        };
        for address in addresses {
            router.tell_directory(now, Input::Member(MemberChange::Joined(address)));
        }
        router
    }

    pub fn take_acts(&mut self) -> Vec<Act> {
        std::mem::take(&mut self.acts)
    }

    pub fn connection(&self, place: usize) -> u64 {
        self.connections[place]
    }

    pub fn requests(&self) -> impl Iterator<Item = &Request> {
        self.requests.values()
    }

    pub fn all_ended(&self) -> bool {
        self.requests.values().all(|request| matches!(request.state, State::Ended(_)))
    }

    /// All nodes are there, and nothing is counted as being in work.
    pub fn check_quiet(&self) {
        for node in self.directory.nodes() {
            assert_eq!(node.health, cluster::Health::Up, "{node:?}");
            assert_eq!(node.in_flight, 0, "{node:?}");
            assert!(!node.load.draining, "{node:?}");
        }
        assert!(self.calls.is_empty(), "calls are open");
    }

    // What happens.

    pub fn arrive(&mut self, now: Instant, id: u64, plan: RequestPlan) {
        let request = Request::new(now, plan, id);
        self.requests.insert(id, request);
        self.go_on(now, id);
    }

    /// The client goes away.
    pub fn leave(&mut self, now: Instant, id: u64) {
        self.end(now, id, End::Left);
    }

    pub fn said(&mut self, now: Instant, call: CallId, said: Said) {
        let Some(open) = self.calls.get(&call) else { return };
        let id = open.request;
        // A call that ended need not be cancelled.
        if matches!(said, Said::Delivered | Said::Finished { .. } | Said::Failed { .. } | Said::Cut)
        {
            self.calls.remove(&call);
        }
        let State::Trying { attempt, .. } = &mut self.request(id).state else {
            unreachable!("an open call belongs to an attempt");
        };
        if call.side == Side::Prefill && !attempt.expects_prefill() {
            return;
        }
        let answers = !matches!(said, Said::Failed { .. } | Said::Cut);
        let is_all = matches!(said, Said::Tokens { finish: Some(_), .. });
        let assignment = attempt.node(call.side).assignment;
        let next = attempt.said(call.side, said);
        if is_all {
            self.tally.count("token 0 was all");
        }
        if answers {
            self.directory.answered(assignment);
        }
        self.act(now, id, next);
    }

    /// A connection to a node has ended, with every stream on it.
    pub fn connection_lost(&mut self, now: Instant, place: usize, connection: u64) {
        if self.connections[place] != connection {
            return;
        }
        self.connections[place] += 1;
        let of_it = |place_of: usize, by: u64| place_of == place && by == connection;
        let cut: Vec<CallId> = self
            .calls
            .iter()
            .filter(|(_, call)| of_it(call.place, call.connection))
            .map(|(id, _)| *id)
            .collect();
        for call in cut {
            self.said(now, call, Said::Cut);
        }
        let streams = self.streams.iter().filter(|(_, at)| **at == place);
        for stream in streams.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.stream_ended(now, stream);
        }
    }

    pub fn observed(&mut self, now: Instant, stream: StreamId, event: proto::v1::ObserveEvent) {
        self.tell_directory(now, Input::Observed { stream, event });
    }

    pub fn stream_ended(&mut self, now: Instant, stream: StreamId) {
        self.streams.remove(&stream);
        let reason = "the stream ended".to_owned();
        self.tell_directory(now, Input::StreamEnded { stream, reason });
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let requests = self.requests.values().filter_map(Request::next_deadline);
        requests.chain(self.directory.next_deadline()).min()
    }

    pub fn on_deadline(&mut self, now: Instant) {
        if self.directory.next_deadline().is_some_and(|at| at <= now) {
            let mut actions = Vec::new();
            self.directory.on_deadline(now, &mut actions);
            self.follow_directory(now, actions);
        }
        let due = |request: &&Request| request.next_deadline().is_some_and(|at| at <= now);
        let ids: Vec<u64> = self.requests.values().filter(due).map(|request| request.id).collect();
        for id in ids {
            let request = self.request(id);
            match &mut request.state {
                _ if request.deadline <= now => self.end(now, id, End::GaveUp(GiveUp::Deadline)),
                State::Waiting { .. } => self.go_on(now, id),
                // Every token is shown, and the node's last word does not come.
                State::Trying { .. } => self.complete(now, id, None),
                State::Ended(_) => {}
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
                    let recovery = &mut self.request(id).recovery;
                    let then = match none {
                        NoNode::Busy { .. } => recovery.all_busy(now),
                        _ => recovery.none_there(now),
                    };
                    if !self.follow(now, id, then) {
                        return;
                    }
                }
            }
        }
    }

    /// True when another attempt is to be made at once.
    fn follow(&mut self, now: Instant, id: u64, then: Then) -> bool {
        let until = match then {
            Then::Retry => return true,
            Then::WaitForRoom => now + ASK_AGAIN,
            Then::WaitForNode => now + LOOK_AGAIN,
            Then::GiveUp(reason) => {
                self.end(now, id, End::GaveUp(reason));
                return false;
            }
        };
        let for_node = then == Then::WaitForNode;
        self.request(id).state = State::Waiting { until, for_node };
        false
    }

    fn pick(&mut self, now: Instant, id: u64) -> Result<(Assigned, Option<Assigned>), NoNode> {
        let request = &self.requests[&id];
        let emitted = request.emitted.len() as u32;
        let prompt_tokens = request.plan.prompt.len() as u32;
        let alone = request.recovery.decode_alone();
        let wanted = Wanted {
            role: Role::Decode,
            prompt_tokens,
            tokens: prompt_tokens + emitted,
            new_tokens_max: request.plan.max_tokens - emitted,
            computes_prompt: alone,
            prefix: &[],
            identity: None,
            exclude: request.recovery.avoid_decode(),
        };
        let decode = self.directory.pick(now, &wanted)?;
        let identity = decode.record.identity.clone();
        let place = |address: &NodeAddress| {
            self.addresses.iter().position(|known| known == address).expect("it is listed")
        };
        let decode_node = Assigned::new(place(&decode.address), &decode);
        if alone || wanted.tokens < identity.block_size {
            return Ok((decode_node, None));
        }
        let prefill = self.directory.pick(
            now,
            &Wanted {
                role: Role::Prefill,
                new_tokens_max: 1,
                computes_prompt: true,
                identity: Some(&identity),
                exclude: request.recovery.avoid_prefill(),
                ..wanted
            },
        );
        let prefill = prefill.ok().map(|choice| Assigned::new(place(&choice.address), &choice));
        Ok((decode_node, prefill))
    }

    fn attempt(&mut self, now: Instant, id: u64, decode: Assigned, prefill: Option<Assigned>) {
        self.tally.count("attempts");
        let transfer = TransferId(self.random.id());
        self.call(now, id, transfer, Side::Decode, &decode, prefill.as_ref());
        if let Some(prefill) = &prefill {
            self.call(now, id, transfer, Side::Prefill, prefill, Some(&decode));
        }
        let request = self.request(id);
        let attempt = Attempt::new(transfer, request.emitted.len() as u32, decode, prefill);
        request.state = State::Trying { attempt, complete_by: None };
    }

    fn call(
        &mut self,
        now: Instant,
        request_id: u64,
        transfer: TransferId,
        side: Side,
        node: &Assigned,
        peer: Option<&Assigned>,
    ) {
        let (place, connection) = (node.place, self.connections[node.place]);
        let open = OpenCall { request: request_id, place, connection };
        self.calls.insert(CallId { transfer, side }, open);
        let peer = peer.map(|peer| PeerAddress {
            node_id: format!("{}-{}", self.addresses[peer.place].role, peer.place),
            epoch: Epoch(peer.epoch.value()),
            notice_endpoint: notice_endpoint(peer.place),
        });
        let request = &self.requests[&request_id];
        let tokens = [&request.plan.prompt[..], &request.emitted].concat();
        let remaining = request.deadline.saturating_duration_since(now);
        let begun = Begun {
            prompt_hash: prompt_hash(&tokens),
            sequence: NewSequence {
                id: SequenceId(transfer.0),
                kind: sequence_kind(self.addresses[place].role, peer.is_some()),
                tokens,
                prompt_len: request.plan.prompt.len() as u32,
                sampling: request.plan.sampling.clone(),
                max_tokens: request.plan.max_tokens,
                ignore_stop_tokens: request.plan.ignore_stop_tokens,
                cache_salt: request.plan.cache_salt.clone(),
                // The node counts the remaining time from when it hears of it.
                deadline: now + remaining,
            },
            peer,
        };
        let epoch = Epoch(node.epoch.value());
        let call = Box::new(Call { connection, epoch, remaining, begun });
        self.acts.push(Act::Call { place, call });
    }

    /// Does what the attempt wants done.
    fn act(&mut self, now: Instant, id: u64, next: Vec<Next>) {
        for next in next {
            match next {
                Next::Admitted { alone } => {
                    self.tally.count(if alone { "alone" } else { "reserved" });
                    self.request(id).recovery.admitted();
                }
                Next::Show { first_index, ids } => {
                    if self.request(id).show(first_index, &ids) {
                        // A stop string: the nodes do not know.
                        return self.complete(now, id, Some(FinishReason::Stop));
                    }
                }
                Next::DropPrefill => {
                    let State::Trying { attempt, .. } = &self.requests[&id].state else { return };
                    let call = CallId { transfer: attempt.transfer, side: Side::Prefill };
                    self.drop_call(call);
                }
                Next::Finish(reason) => return self.complete(now, id, Some(reason)),
                Next::Fail(_) if self.requests[&id].is_complete() => {
                    return self.complete(now, id, None);
                }
                Next::Fail(failure) => return self.attempt_failed(now, id, failure),
            }
        }
        let request = self.request(id);
        let complete_by = request.is_complete().then(|| now + LAST_EVENT_MAX);
        if let State::Trying { complete_by: by, .. } = &mut request.state {
            *by = complete_by;
        }
    }

    fn attempt_failed(&mut self, now: Instant, id: u64, failure: Failure) {
        self.tally.count_failure(&failure);
        let Some(attempt) = self.end_attempt(now, id, Some(&failure)) else { return };
        let prefill = attempt.prefill_node.as_ref().map(|node| node.epoch);
        let request = self.request(id);
        let then = request.recovery.failed(failure, prefill, attempt.decode_node.epoch, now);
        if self.follow(now, id, then) {
            self.go_on(now, id);
        }
    }

    fn complete(&mut self, now: Instant, id: u64, reason: Option<FinishReason>) {
        self.request(id).check_complete(reason);
        self.end(now, id, End::Complete);
    }

    fn end(&mut self, now: Instant, id: u64, end: End) {
        if matches!(self.requests[&id].state, State::Ended(_)) {
            assert_eq!(end, End::Left, "a request ends once");
            return;
        }
        self.tally.count_end(&end, self.requests[&id].recovery.attempts());
        self.end_attempt(now, id, None);
        self.request(id).state = State::Ended(end);
    }

    /// Drops the calls of the attempt under way and gives its nodes back.
    fn end_attempt(&mut self, now: Instant, id: u64, failure: Option<&Failure>) -> Option<Attempt> {
        let waits = State::Waiting { until: now, for_node: false };
        let state = std::mem::replace(&mut self.request(id).state, waits);
        let State::Trying { attempt, .. } = state else { return None };
        let transfer = attempt.transfer;
        self.drop_call(CallId { transfer, side: Side::Decode });
        self.drop_call(CallId { transfer, side: Side::Prefill });
        let failed = failure.map(|failure| (failure.cause, attempt.node(failure.side)));
        match failed {
            Some((Cause::Busy, node)) => self.directory.busy(now, node.assignment, None),
            Some((Cause::Lost | Cause::Stale, node)) => {
                let (epoch, reason) = (node.epoch, "the call was lost".to_owned());
                self.tell_directory(now, Input::CallLost { epoch, reason });
            }
            _ => {}
        }
        self.directory.release(attempt.decode_node.assignment);
        if let Some(prefill) = &attempt.prefill_node {
            self.directory.release(prefill.assignment);
        }
        Some(attempt)
    }

    fn drop_call(&mut self, id: CallId) {
        if let Some(OpenCall { place, connection, .. }) = self.calls.remove(&id) {
            self.acts.push(Act::Cancel { place, connection, transfer: id.transfer });
        }
    }

    // The directory.

    fn tell_directory(&mut self, now: Instant, input: Input) {
        let mut actions = Vec::new();
        self.directory.handle(now, input, &mut actions);
        self.follow_directory(now, actions);
    }

    fn follow_directory(&mut self, now: Instant, actions: Vec<Action>) {
        let mut has_changed = false;
        for action in actions {
            match action {
                Action::Observe { stream, address, .. } => {
                    let place = self.addresses.iter().position(|known| *known == address);
                    let place = place.expect("it is listed");
                    self.streams.insert(stream, place);
                    let connection = self.connections[place];
                    self.acts.push(Act::Observe { place, connection, stream });
                }
                Action::StopObserving { stream } => {
                    if let Some(place) = self.streams.remove(&stream) {
                        self.acts.push(Act::StopObserving { place, stream });
                    }
                }
                Action::HealthChanged { .. } => has_changed = true,
                Action::Forgotten { .. } => unreachable!("every place stays listed"),
            }
        }
        if has_changed {
            for request in self.requests.values_mut() {
                if let State::Waiting { until, for_node: true } = &mut request.state {
                    *until = now;
                }
            }
        }
    }
}
