//! Weighted fair queue (virtual-time scheduling with bounded credit) of the requests of one model
//! that wait for a free slot. Pure: no clock, no task.
//!
//! All requests of an API key are one [`Flow`]; without keys all requests of a tenant. A request
//! costs its uncached prompt tokens and twice its output tokens, because a decode row takes about
//! as much of a step as two prompt tokens. Each flow has a *virtual time*: the cost that was served
//! to the flow, divided by the weight of the flow. The next turn goes to the flow with the lowest
//! virtual time, so flows that always have requests are served in proportion to their weights.
//!
//! *Credit*: a flow that used less than its share may return with a virtual time below that of the
//! waiting flows, by at most the cost of [`CREDIT_REQUESTS`] requests. So its bursts do not wait
//! for the other flows. A new flow has the credit of one request. *Debt*: if a new flow arrives
//! while no flow waits, the present flows used less than their shares. The new flow then starts
//! with a higher virtual time, so that a sudden flood does not delay the present flows.
//!
//! A flow is charged the predicted cost when its request starts, and the rest or the excess when
//! the attempt ends. The predicted output length is the mean of the flow's last answers. Flows of a
//! higher priority come first; one of [`TURNS_PER_FAIR_TURN`] turns ignores priorities of flows.
//!
//! Within a flow the requests of the lowest priority number come first, and among them the request
//! with the earliest start deadline; a later turn of a session has the start deadline of the
//! session's first turn ([`FlowSessions`]). A flow ignores priorities and sessions while the first
//! of its requests that may be rejected has waited for half of the time until it must start, so
//! that no request starves.
//!
//! Life of a waiting request:
//! 1. [`FairQueue::join`], which refuses it if its predicted wait is too long, or its deadline too
//!    short.
//! 2. [`FairQueue::next_turn`] returns it: the owner picks nodes for it.
//! 3. [`FairQueue::start`] and [`FairQueue::leave`] if nodes take the request. Otherwise
//!    [`FairQueue::passed`]: the turn goes to other requests, until the owner calls
//!    [`FairQueue::retry_passed`], because nodes may have capacity again.
//! 4. [`FairQueue::take_late`] returns it when it could no longer complete before its deadline.
//! 5. [`FairQueue::ended`] when the attempt has ended.

#[cfg(test)]
mod deadline_tests;
mod flow_limit;
mod flow_sessions;
mod order;
mod predict;
mod service_time;
#[cfg(test)]
mod session_tests;
mod share;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod wait_tests;

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::NoNode;
pub use flow_limit::{FlowLimit, LimitReached};
pub(crate) use flow_sessions::FlowSessions;
pub use flow_sessions::{SessionIdentity, SessionTurn};
use order::{FlowOrder, FlowRank};
use predict::{CachedShare, CountedTokens, OUTPUT_SHARE, OUTPUT_TOKEN_COST, ServiceRate};
pub use predict::{StartLimit, StartedPrompt, TooLate, WaitLimits, WaitRequest};
use service_time::ServiceTime;

/// Maximum credit of a flow, in requests of mean cost.
const CREDIT_REQUESTS: f64 = 16.0;
/// Time for which a flow without requests keeps its share of the headroom.
const ACTIVE_FOR: Duration = Duration::from_secs(60);
/// Maximum number of flows that are kept without requests: clients may invent any number of tenant
/// names.
const IDLE_FLOWS_MAX: usize = 1024;
/// One of this many turns ignores priorities of flows, so that no flow starves.
const TURNS_PER_FAIR_TURN: u64 = 8;
/// Maximum number of requests, of one flow and of all flows, that have a turn or whose turn has
/// passed since the last [`FairQueue::retry_passed`]. More than one, because a request that failed
/// on an idle node may wait for a busy node. Few, because each turn costs a pick of nodes.
const TURNS_MAX: (usize, usize) = (4, 16);
/// Maximum number for all flows, including requests that wait for a node by choice
/// ([`PassReason::ByChoice`]).
const TURNS_BY_CHOICE_MAX: usize = 64;

/// Name of a flow.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FlowName {
    /// All requests without a key and a tenant.
    Shared,
    Tenant(Arc<str>),
    /// Name of the API key.
    Key(Arc<str>),
}

/// Requests that share a place in the order of service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    pub name: FlowName,
    /// Share of the flow relative to other flows; at least 1.
    pub weight: u32,
    /// Flows of a higher priority come first.
    pub priority: u32,
}

impl Flow {
    /// Returns a flow with the default weight and priority.
    pub fn new(name: FlowName) -> Self {
        Self { name, weight: 1, priority: 0 }
    }
}

/// The queue, and the virtual times of all flows.
#[derive(Debug)]
pub struct FairQueue<Id> {
    flows: BTreeMap<FlowName, FlowState<Id>>,
    places: HashMap<Id, (FlowName, Place)>,
    /// The flows with queued requests.
    order: FlowOrder,
    /// Queued requests that are rejected when their turn comes too late.
    may_be_late: BTreeMap<Place, Id>,
    /// Number of requests that have a turn.
    turns: usize,
    /// Requests whose turn has passed since [`Self::retry_passed`].
    passed: Vec<(Id, PassReason)>,
    joined: u64,
    /// Since when requests have been waiting without a break.
    waiting_since: Option<Instant>,
    /// Started requests.
    starts: u64,
    /// Virtual time of the flow that was served last.
    last_served: f64,
    rate: ServiceRate,
    service_time: ServiceTime,
}

/// Place in the queue of one flow: the time by which the request must start, and the number of its
/// arrival.
type Place = (Instant, u64);

/// Place in the queue of one flow by priority and session: whether the request may wait, its
/// priority, the time by which it would have to start if it had arrived with the first turn of its
/// session, and the number of its arrival.
type SessionPlace = (bool, i32, Instant, u64);

/// Start of a request that joins the queue.
#[derive(Clone, Copy, Debug)]
struct Start {
    /// Time by which the request must start.
    by: Instant,
    /// Whether the request is rejected after that time.
    may_be_late: bool,
    /// Whether the request may wait. Requests that may not wait come first.
    may_wait: bool,
    priority: i32,
    /// `by` that the request would have if it had arrived with the first turn of its session.
    by_of_session: Instant,
}

#[derive(Debug)]
struct FlowState<Id> {
    weight: f64,
    priority: u32,
    virtual_time: f64,
    queue: BTreeMap<Place, Queued<Id>>,
    by_session: BTreeMap<SessionPlace, Place>,
    /// Queued request that has the turn: the owner picks nodes for it.
    turn: Option<Id>,
    /// Cost of all queued requests.
    queued_cost: f64,
    /// Started requests that have not ended.
    running: u32,
    /// Number of the last start of the flow, among the starts of all flows.
    started: u64,
    output_tokens: Option<f64>,
    cached: CachedShare,
    active_at: Instant,
}

#[derive(Debug)]
struct Queued<Id> {
    id: Id,
    session_place: SessionPlace,
    /// When half of the time until the request must start has passed. From then on, requests that
    /// arrive later no longer come first by priority or session: the wait that was predicted at the
    /// arrival excludes them. `None`: the request is never rejected.
    urgent_at: Option<Instant>,
    cost: f64,
    /// Why the turn of the request has passed, until [`FairQueue::retry_passed`].
    passed: Option<PassReason>,
}

/// Reason why the turn of a request passes to other requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PassReason {
    /// No node can start the request.
    #[default]
    NoNode,
    /// The request waits for one node, although other nodes could start it.
    ByChoice,
}

impl PassReason {
    /// Returns the pass after a pick without nodes.
    pub fn of(reason: &NoNode) -> Self {
        match reason {
            NoNode::Busy { by_choice: true, .. } => Self::ByChoice,
            _ => Self::NoNode,
        }
    }
}

impl<Id> FlowState<Id> {
    fn new(now: Instant) -> Self {
        Self {
            weight: 1.0,
            priority: 0,
            virtual_time: 0.0,
            queue: BTreeMap::new(),
            by_session: BTreeMap::new(),
            turn: None,
            queued_cost: 0.0,
            running: 0,
            started: 0,
            output_tokens: None,
            cached: CachedShare::default(),
            active_at: now,
        }
    }

    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.running == 0
    }

    fn rank(&self) -> FlowRank {
        let Self { priority, virtual_time, started, .. } = *self;
        FlowRank { priority, virtual_time, started }
    }

    /// Returns the queued requests, the one that starts next first.
    fn in_order(&self, now: Instant) -> impl Iterator<Item = &Queued<Id>> {
        let first = self.queue.values().find_map(|queued| queued.urgent_at);
        let ignores_sessions = first.is_some_and(|urgent_at| urgent_at <= now);
        let all_if = |included| if included { usize::MAX } else { 0 };
        let by_session = self.by_session.values().map(move |place| &self.queue[place]);
        let by_arrival = self.queue.values();
        by_session.take(all_if(!ignores_sessions)).chain(by_arrival.take(all_if(ignores_sessions)))
    }
}

/// Returns whether the turn after this many starts ignores priorities of flows.
fn is_fair_turn(starts: u64) -> bool {
    starts % TURNS_PER_FAIR_TURN == TURNS_PER_FAIR_TURN - 1
}

impl<Id> Default for FairQueue<Id> {
    fn default() -> Self {
        Self {
            flows: BTreeMap::new(),
            places: HashMap::new(),
            order: FlowOrder::default(),
            may_be_late: BTreeMap::new(),
            turns: 0,
            passed: Vec::new(),
            joined: 0,
            waiting_since: None,
            starts: 0,
            last_served: 0.0,
            rate: ServiceRate::default(),
            service_time: ServiceTime::default(),
        }
    }
}

impl<Id: Copy + Eq + Hash> FairQueue<Id> {
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Adds a request, unless a new request could not start in time. Returns the limit that
    /// applies.
    pub fn join(
        &mut self,
        now: Instant,
        id: Id,
        request: &WaitRequest,
    ) -> Result<StartLimit, TooLate> {
        let WaitRequest { flow, prompt_tokens, output_tokens_max, limits, .. } = request;
        let uncached_tokens = self.uncached_tokens(&flow.name, *prompt_tokens);
        let tokens = self.tokens(&flow.name, uncached_tokens, *output_tokens_max);
        let limit = self.start_limit(now, *limits, tokens);
        if !request.has_begun {
            self.check_start(now, flow, limit)?;
        }
        let by = now + limit.wait_max();
        let start = Start {
            by,
            may_be_late: !request.has_begun,
            may_wait: !limits.wait_max.is_zero(),
            priority: request.priority,
            by_of_session: request
                .session_since
                .map_or(by, |since| by.min(since + limits.wait_max)),
        };
        self.insert(now, id, flow, tokens.cost(), start);
        Ok(limit)
    }

    /// Adds a request.
    fn insert(&mut self, now: Instant, id: Id, flow: &Flow, cost: f64, start: Start) {
        debug_assert!(!self.places.contains_key(&id), "a request joins once");
        self.joined += 1;
        self.waiting_since.get_or_insert(now);
        let place = (start.by, self.joined);
        let session_place = (start.may_wait, start.priority, start.by_of_session, self.joined);
        self.change_active(now, flow, |state| {
            let half = start.by.saturating_duration_since(now) / 2;
            let urgent_at = start.may_be_late.then(|| now + half);
            let queued = Queued { id, session_place, urgent_at, cost, passed: None };
            state.queue.insert(place, queued);
            state.by_session.insert(session_place, place);
            state.queued_cost += cost;
        });
        if start.may_be_late {
            self.may_be_late.insert(place, id);
        }
        self.places.insert(id, (flow.name.clone(), place));
    }

    /// Removes a request from the queue.
    pub fn leave(&mut self, id: Id) {
        let Some((name, place)) = self.places.remove(&id) else { return };
        self.end_turn(&name, id);
        self.change(&name, |flow| {
            let queued = flow.queue.remove(&place).expect("every place has a request");
            flow.by_session.remove(&queued.session_place);
            let is_empty = flow.queue.is_empty();
            flow.queued_cost = if is_empty { 0.0 } else { flow.queued_cost - queued.cost };
        });
        self.may_be_late.remove(&place);
        self.passed.retain(|(passed, _)| *passed != id);
        if self.places.is_empty() {
            self.waiting_since = None;
        }
    }

    /// Removes a request that can no longer start in time, and returns it.
    pub fn take_late(&mut self, now: Instant) -> Option<Id> {
        let first = self.may_be_late.first_key_value();
        let id = first.filter(|((start_by, _), _)| *start_by < now).map(|(_, id)| *id)?;
        self.leave(id);
        Some(id)
    }

    /// Handles a turn in which the request did not start. The request keeps its place.
    pub fn passed(&mut self, id: Id, pass: PassReason) {
        let Some((name, place)) = self.places.get(&id).cloned() else { return };
        self.end_turn(&name, id);
        let queued = self.flow(&name).queue.get_mut(&place).expect("every place has a request");
        if queued.passed.replace(pass).is_none() {
            self.passed.push((id, pass));
        }
    }

    /// Returns whether a request has the turn; `None` if the request is not in the queue.
    pub fn has_turn(&self, id: Id) -> Option<bool> {
        let (name, _) = self.places.get(&id)?;
        Some(self.flows[name].turn == Some(id))
    }

    /// Makes the requests whose turn has passed eligible again.
    pub fn retry_passed(&mut self) {
        for (id, _) in std::mem::take(&mut self.passed) {
            let (name, place) = self.places[&id].clone();
            let queued = self.flow(&name).queue.get_mut(&place);
            queued.expect("every place has a request").passed = None;
        }
    }

    fn end_turn(&mut self, name: &FlowName, id: Id) {
        if self.flow(name).turn.take_if(|turn| *turn == id).is_some() {
            self.turns -= 1;
        }
    }

    /// Returns the state of a flow with requests.
    fn flow(&mut self, name: &FlowName) -> &mut FlowState<Id> {
        self.flows.get_mut(name).expect("a flow with requests is kept")
    }

    /// Returns the request whose turn it is, if there is one. Turns of different flows may be open
    /// at the same time.
    pub fn next_turn(&mut self, now: Instant) -> Option<Id> {
        let id = self.find_turn(now)?;
        let name = self.places[&id].0.clone();
        self.flow(&name).turn = Some(id);
        self.turns += 1;
        Some(id)
    }

    /// Returns the first request in the order of service that may have a turn. Visits few flows:
    /// each earlier flow has a turn, or requests whose turn has passed.
    fn find_turn(&self, now: Instant) -> Option<Id> {
        let by_choice =
            self.passed.iter().filter(|(_, pass)| *pass == PassReason::ByChoice).count();
        let turns = self.turns + self.passed.len();
        if turns >= TURNS_BY_CHOICE_MAX || turns - by_choice >= TURNS_MAX.1 {
            return None;
        }
        self.order.flows(is_fair_turn(self.starts)).find_map(|name| {
            let flow = &self.flows[name];
            // A flow is charged when its request starts, so it gets one turn at a time.
            if flow.turn.is_some() {
                return None;
            }
            let others = flow.in_order(now).filter(|it| it.passed != Some(PassReason::ByChoice));
            let next = others.take(TURNS_MAX.0).find(|queued| queued.passed.is_none());
            next.map(|queued| queued.id)
        })
    }

    /// Charges a flow for a request that starts on nodes.
    pub fn start(
        &mut self,
        now: Instant,
        flow: &Flow,
        prompt: StartedPrompt,
        output_tokens_max: u32,
    ) -> Charge {
        let charged = self.cost(&flow.name, prompt.uncached_tokens, output_tokens_max);
        self.starts += 1;
        let starts = self.starts;
        let begin = self.change_active(now, flow, |state| {
            (state.running, state.started) = (state.running + 1, starts);
            state.cached.add(prompt);
            let begin = state.virtual_time;
            state.virtual_time += charged / state.weight;
            begin
        });
        self.last_served = self.last_served.max(begin);
        let flow = flow.name.clone();
        let prompt_tokens = prompt.uncached_tokens;
        Charge {
            flow,
            charged,
            prompt_tokens,
            output_tokens: 0,
            started: now,
            first_token_at: None,
        }
    }

    /// Handles the end of an attempt: charges the flow for what the attempt used.
    pub fn ended(&mut self, now: Instant, charge: &Charge, end: ChargeEnd) {
        let output_tokens = f64::from(charge.output_tokens);
        let tokens = CountedTokens { uncached: charge.prompt_tokens, output: output_tokens };
        let used = match end {
            // A draining node may have sent tokens earlier.
            ChargeEnd::Refused => OUTPUT_TOKEN_COST * output_tokens,
            ChargeEnd::Complete | ChargeEnd::Cut => tokens.cost(),
        };
        let (is_complete, running) = (end == ChargeEnd::Complete, self.running());
        self.change(&charge.flow, |state| {
            state.running -= 1;
            state.active_at = now;
            state.virtual_time += (used - charge.charged) / state.weight;
            if is_complete {
                let mean = state.output_tokens.get_or_insert(output_tokens);
                *mean += (output_tokens - *mean) * OUTPUT_SHARE;
            }
        });
        if is_complete {
            let since_start =
                |at: Instant| at.saturating_duration_since(charge.started).as_secs_f64();
            let first_token_s = since_start(charge.first_token_at.unwrap_or(now));
            self.service_time.add(now, tokens, first_token_s, since_start(now));
            self.rate.add(used, since_start(now), running);
        }
    }

    /// Changes a flow that has a request.
    fn change_active<T>(
        &mut self,
        now: Instant,
        flow: &Flow,
        change: impl FnOnce(&mut FlowState<Id>) -> T,
    ) -> T {
        let weight = f64::from(flow.weight.max(1));
        let waiting = self.waiting_virtual_time();
        let known = self.flows.get(&flow.name);
        let begin = self.begin_of(known, weight, waiting);
        if known.is_none() {
            self.forget_idle();
            self.flows.insert(flow.name.clone(), FlowState::new(now));
        }
        let changed = self.change(&flow.name, |state| {
            (state.weight, state.priority, state.active_at) = (weight, flow.priority, now);
            state.virtual_time = begin;
            change(state)
        });
        changed.expect("the flow is known now")
    }

    /// Changes a flow and its place in the order of service. Returns `None` for an unknown flow.
    fn change<T>(
        &mut self,
        name: &FlowName,
        change: impl FnOnce(&mut FlowState<Id>) -> T,
    ) -> Option<T> {
        let flow = self.flows.get_mut(name)?;
        if !flow.queue.is_empty() {
            self.order.remove(name, flow.rank());
        }
        let changed = change(flow);
        if !flow.queue.is_empty() {
            self.order.insert(name, flow.rank());
        }
        Some(changed)
    }

    /// Bounds the number of flows without requests.
    fn forget_idle(&mut self) {
        let idle = self.flows.values().filter(|flow| flow.is_idle()).count();
        if idle >= IDLE_FLOWS_MAX {
            self.flows.retain(|_, flow| !flow.is_idle());
        }
    }
}

/// Cost of an attempt on its flow's account, from [`FairQueue::start`] to [`FairQueue::ended`].
#[derive(Clone, Debug)]
pub struct Charge {
    flow: FlowName,
    charged: f64,
    /// Uncached prompt tokens.
    prompt_tokens: u32,
    output_tokens: u32,
    started: Instant,
    first_token_at: Option<Instant>,
}

impl Charge {
    /// Counts tokens that the attempt emitted.
    pub fn emitted(&mut self, now: Instant, count: u32) {
        self.first_token_at.get_or_insert(now);
        self.output_tokens += count;
    }
}

/// End of an attempt, for the account of its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChargeEnd {
    /// The answer is complete. Only complete answers update the flow's mean output length.
    Complete,
    /// The attempt used its prompt tokens and emitted tokens.
    Cut,
    /// A node refused the attempt, which therefore used no prompt tokens.
    Refused,
}
