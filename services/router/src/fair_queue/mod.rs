//! Weighted fair queue of the requests of one model that wait for a free slot. Pure: no clock, no task.
//!
//! All requests of an API key are one [`Flow`]; without keys all requests of a tenant. A request costs its uncached prompt
//! tokens and twice its output tokens, because a decode row takes about as much of a step as two prompt tokens. Each flow
//! has a *virtual time*: the cost that was served to the flow, divided by the weight of the flow. The next turn goes to
//! the flow with the lowest virtual time, so flows that always have requests are served in proportion to their weights. A
//! flow that used less than its share keeps a bounded credit: when it returns, its virtual time is at most the cost of
//! [`CREDIT_REQUESTS`] requests below that of the waiting flows. So its bursts do not wait for the other flows.
//!
//! A flow is charged the predicted cost when its request starts, and the rest or the excess when the attempt ends.
//! Predictions of the output length are the mean of the flow's last answers. Within a flow the request that must start
//! first comes first. Flows of a higher priority come first, except for one of [`TURNS_PER_FAIR_TURN`] turns.
//!
//! Life of a waiting request:
//! 1. [`FairQueue::join`]. [`FairQueue::wait`] predicts its waiting time before.
//! 2. [`FairQueue::next_turn`] returns it: the owner picks nodes for it.
//! 3. [`FairQueue::started`] and [`FairQueue::leave`] if nodes take the request. Otherwise [`FairQueue::passed`]: the turn
//!    goes to other requests, until the owner calls [`FairQueue::retry_passed`], because nodes may have capacity again.
//! 4. [`FairQueue::take_late`] returns it when it could no longer complete before its deadline.
//! 5. [`FairQueue::ended`] when the attempt has ended.

mod flow_limit;
mod order;
#[cfg(test)]
mod tests;

use std::{
    cmp::Ordering,
    collections::{BTreeMap, HashMap},
    hash::Hash,
    sync::Arc,
    time::{Duration, Instant},
};

pub use flow_limit::{FlowLimit, LimitReached};
use order::{Order, Rank};

/// Cost of an output token, in prompt tokens.
const OUTPUT_TOKEN_COST: f64 = 2.0;
/// Predicted output tokens of a flow without finished answers, at most the request's own maximum.
const OUTPUT_TOKENS_FIRST: f64 = 256.0;
/// Weight of a finished answer in the mean output length of its flow.
const OUTPUT_SHARE: f64 = 1.0 / 8.0;
/// Weight of an ended attempt in the service rate.
const RATE_SHARE: f64 = 1.0 / 32.0;
/// Mean errors of the predicted service time that a request keeps in reserve: about 95 % of requests take no longer if
/// errors are normally distributed.
const SERVICE_TIME_RESERVE: f64 = 2.0;
/// Requests that a flow may start before the waiting flows after a time below its share.
const CREDIT_REQUESTS: f64 = 16.0;
/// Time for which a flow without requests keeps its share of the headroom.
const ACTIVE_FOR: Duration = Duration::from_secs(60);
/// Maximum number of flows that are kept without requests. Clients may invent names of tenants.
const IDLE_FLOWS_MAX: usize = 1024;
/// One of this many turns ignores priorities, so that no flow starves.
const TURNS_PER_FAIR_TURN: u64 = 8;
/// Maximum number of requests of a flow, and of all flows, that have a turn or whose turn has passed, before the owner
/// must call [`FairQueue::retry_passed`]. More than one: a request that failed on an idle node may wait for a busy one.
/// Few: each turn costs a pick of nodes.
const TURNS_MAX: (usize, usize) = (4, 16);
/// A first request that no node can start holds back all others every other such time: smaller requests would take each
/// KV block that becomes free.
const HOLD_BACK: Duration = Duration::from_secs(4);

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
    order: Order,
    /// Queued requests that are rejected when their turn comes too late.
    may_be_late: BTreeMap<Place, Id>,
    /// Number of requests that have a turn.
    turns: usize,
    /// Requests whose turn has passed since [`Self::retry_passed`].
    passed: Vec<Id>,
    joined: u64,
    /// Started requests.
    starts: u64,
    /// Virtual time of the flow that was served last.
    last_served: f64,
    rate: ServiceRate,
}

/// Place in the queue of one flow: the time by which the request must start, and the number of its arrival.
type Place = (Instant, u64);

#[derive(Debug)]
struct FlowState<Id> {
    weight: f64,
    priority: u32,
    virtual_time: f64,
    queue: BTreeMap<Place, Queued<Id>>,
    /// Queued request that has the turn: the owner picks nodes for it.
    turn: Option<Id>,
    /// Cost of all queued requests.
    queued_cost: f64,
    /// Started requests that have not ended.
    running: u32,
    /// Number of the last start of the flow.
    started: u64,
    output_tokens: Option<f64>,
    active_at: Instant,
}

#[derive(Debug)]
struct Queued<Id> {
    id: Id,
    cost: f64,
    /// Whether no node could start the request in its turn.
    has_passed: bool,
    /// When the turn of this request passed for the first time.
    passed_at: Option<Instant>,
}

/// Sums over the last ended attempts, for the rate at which all running requests together are served.
#[derive(Debug, Default)]
struct ServiceRate {
    cost: f64,
    seconds: f64,
    /// Mean absolute error of the times predicted from the two sums, in seconds.
    error_seconds: f64,
}

impl ServiceRate {
    /// Returns the predicted seconds from the start of a request to its end.
    fn service_seconds(&self, cost: f64) -> Option<f64> {
        (self.cost > 0.0).then(|| cost * self.seconds / self.cost)
    }

    fn add(&mut self, cost: f64, seconds: f64) {
        if let Some(predicted) = self.service_seconds(cost) {
            self.error_seconds += ((seconds - predicted).abs() - self.error_seconds) * RATE_SHARE;
        }
        self.cost += cost - self.cost * RATE_SHARE;
        self.seconds += seconds - self.seconds * RATE_SHARE;
    }
}

impl<Id> Queued<Id> {
    fn holds_back(&self, now: Instant) -> bool {
        let passed_for =
            self.passed_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        passed_for.as_secs() / HOLD_BACK.as_secs() % 2 == 1
    }
}

impl<Id> FlowState<Id> {
    fn new(now: Instant) -> Self {
        Self {
            weight: 1.0,
            priority: 0,
            virtual_time: 0.0,
            queue: BTreeMap::new(),
            turn: None,
            queued_cost: 0.0,
            running: 0,
            started: 0,
            output_tokens: None,
            active_at: now,
        }
    }

    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.running == 0
    }

    fn rank(&self) -> Rank {
        let Self { priority, virtual_time, started, .. } = *self;
        Rank { priority, virtual_time, started }
    }
}

impl<Id> Default for FairQueue<Id> {
    fn default() -> Self {
        Self {
            flows: BTreeMap::new(),
            places: HashMap::new(),
            order: Order::default(),
            may_be_late: BTreeMap::new(),
            turns: 0,
            passed: Vec::new(),
            joined: 0,
            starts: 0,
            last_served: 0.0,
            rate: ServiceRate::default(),
        }
    }
}

impl<Id: Copy + Eq + Hash> FairQueue<Id> {
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Returns the predicted cost of an answer. `prompt_tokens`: uncached ones.
    pub fn cost(&self, flow: &FlowName, prompt_tokens: u32, output_tokens_max: u32) -> f64 {
        let mean = self.flows.get(flow).and_then(|flow| flow.output_tokens);
        let output_tokens = mean.unwrap_or(OUTPUT_TOKENS_FIRST).min(output_tokens_max.into());
        cost(prompt_tokens, output_tokens)
    }

    /// Returns the time from the start of a request to its end that few requests exceed; zero without measurements.
    pub fn service_time_max(&self, cost: f64) -> Duration {
        let reserve = SERVICE_TIME_RESERVE * self.rate.error_seconds;
        self.rate.service_seconds(cost).map_or(Duration::ZERO, |mean| seconds(mean + reserve))
    }

    /// Adds a request. `start_by`: the time by which it must start. With `may_be_late`, [`Self::take_late`] returns the
    /// request after that time.
    pub fn join(
        &mut self,
        now: Instant,
        id: Id,
        flow: &Flow,
        cost: f64,
        (start_by, may_be_late): (Instant, bool),
    ) {
        debug_assert!(!self.places.contains_key(&id), "a request joins once");
        self.joined += 1;
        let place = (start_by, self.joined);
        self.change_active(now, flow, |state| {
            state.queue.insert(place, Queued { id, cost, has_passed: false, passed_at: None });
            state.queued_cost += cost;
        });
        if may_be_late {
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
            let is_empty = flow.queue.is_empty();
            flow.queued_cost = if is_empty { 0.0 } else { flow.queued_cost - queued.cost };
        });
        self.may_be_late.remove(&place);
        self.passed.retain(|passed| *passed != id);
    }

    /// Removes a request that can no longer start in time, and returns it.
    pub fn take_late(&mut self, now: Instant) -> Option<Id> {
        let first = self.may_be_late.first_key_value();
        let id = first.filter(|((start_by, _), _)| *start_by < now).map(|(_, id)| *id)?;
        self.leave(id);
        Some(id)
    }

    /// Handles a turn for which no node could start the request. The request keeps its place.
    pub fn passed(&mut self, now: Instant, id: Id) {
        let Some((name, place)) = self.places.get(&id).cloned() else { return };
        self.end_turn(&name, id);
        let queued = self.flow(&name).queue.get_mut(&place).expect("every place has a request");
        queued.passed_at.get_or_insert(now);
        if !std::mem::replace(&mut queued.has_passed, true) {
            self.passed.push(id);
        }
    }

    /// Makes the requests whose turn has passed eligible again.
    pub fn retry_passed(&mut self) {
        for id in std::mem::take(&mut self.passed) {
            let (name, place) = self.places[&id].clone();
            let queued = self.flow(&name).queue.get_mut(&place);
            queued.expect("every place has a request").has_passed = false;
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

    /// Returns the request whose turn it is, if there is one. Turns of different flows may be open at the same time.
    pub fn next_turn(&mut self, now: Instant) -> Option<Id> {
        let id = self.find_turn(now)?;
        let name = self.places[&id].0.clone();
        self.flow(&name).turn = Some(id);
        self.turns += 1;
        Some(id)
    }

    /// Looks at few flows: each of the first ones has a turn or a request whose turn has passed.
    fn find_turn(&self, now: Instant) -> Option<Id> {
        if self.turns + self.passed.len() >= TURNS_MAX.1 {
            return None;
        }
        let is_fair_turn = self.starts % TURNS_PER_FAIR_TURN == TURNS_PER_FAIR_TURN - 1;
        for (index, name) in self.order.flows(is_fair_turn).enumerate() {
            let flow = &self.flows[name];
            // A flow is charged when its request starts, so it gets one turn at a time.
            if flow.turn.is_some() {
                continue;
            }
            for (position, queued) in flow.queue.values().take(TURNS_MAX.0).enumerate() {
                if !queued.has_passed {
                    return Some(queued.id);
                }
                let is_first = index == 0 && position == 0;
                if is_first && queued.holds_back(now) && !self.is_over_share(now, name) {
                    return None;
                }
            }
        }
        None
    }

    /// Charges a flow for a request that starts on nodes.
    pub fn started(&mut self, now: Instant, flow: &Flow, cost: f64) {
        self.starts += 1;
        let starts = self.starts;
        let begin = self.change_active(now, flow, |state| {
            (state.running, state.started) = (state.running + 1, starts);
            let begin = state.virtual_time;
            state.virtual_time += cost / state.weight;
            begin
        });
        self.last_served = self.last_served.max(begin);
    }

    /// Handles the end of an attempt that was charged `charged`. `is_complete`: the answer is complete, so the attempt
    /// tells about the lengths and the times of later ones.
    pub fn ended(&mut self, now: Instant, flow: &FlowName, attempt: &EndedAttempt) {
        let used = cost(attempt.prompt_tokens, attempt.output_tokens.into());
        self.change(flow, |state| {
            state.running -= 1;
            state.active_at = now;
            state.virtual_time += (used - attempt.charged) / state.weight;
            if attempt.is_complete {
                let tokens = f64::from(attempt.output_tokens);
                let mean = state.output_tokens.get_or_insert(tokens);
                *mean += (tokens - *mean) * OUTPUT_SHARE;
            }
        });
        if attempt.is_complete {
            self.rate.add(used, attempt.duration.as_secs_f64());
        }
    }

    /// Returns whether the flow was served more than its share while another flow is active: the other flow, also one
    /// without requests now, has a lower virtual time.
    pub fn is_over_share(&self, now: Instant, name: &FlowName) -> bool {
        let Some(flow) = self.flows.get(name) else { return false };
        let waiting = self.waiting_virtual_time();
        let is_active = |flow: &FlowState<Id>| {
            !flow.is_idle() || now.saturating_duration_since(flow.active_at) < ACTIVE_FOR
        };
        let mut others =
            self.flows.iter().filter(|(other, flow)| *other != name && is_active(flow));
        others
            .any(|(_, other)| self.begin_of(Some(other), other.weight, waiting) < flow.virtual_time)
    }

    /// Returns the virtual time at which the next request of a flow begins. `waiting`:
    /// [`Self::waiting_virtual_time`], once for many flows.
    fn begin_of(&self, flow: Option<&FlowState<Id>>, weight: f64, waiting: f64) -> f64 {
        match flow {
            Some(flow) if !flow.queue.is_empty() => flow.virtual_time,
            _ => {
                // The decayed sum is the cost of the last `1 / RATE_SHARE` requests.
                let credit = CREDIT_REQUESTS * RATE_SHARE * self.rate.cost / weight;
                let least = waiting - credit;
                flow.map_or(least, |flow| flow.virtual_time.max(least))
            }
        }
    }

    /// Predicts how long a new request of the flow would wait for its turn. `None` without measurements.
    pub fn wait(&self, flow: &Flow) -> Option<Duration> {
        let rate = self.cost_per_second()?;
        let state = self.flows.get(&flow.name);
        let queued = state.map_or(0.0, |state| state.queued_cost);
        let begin = self.begin_of(state, flow.weight.into(), self.waiting_virtual_time());
        let own = begin + queued / f64::from(flow.weight);
        // Until the request starts, each flow is served up to the same virtual time.
        let others = self.flows.iter().filter(|(name, _)| **name != flow.name);
        let ahead = others.map(|(_, other)| match other.priority.cmp(&flow.priority) {
            Ordering::Greater => other.queued_cost,
            Ordering::Less => 0.0,
            Ordering::Equal => {
                ((own - other.virtual_time) * other.weight).clamp(0.0, other.queued_cost)
            }
        });
        Some(seconds((queued + ahead.sum::<f64>()) / rate))
    }

    /// Returns the time in which the queued requests of the flow, or of all flows, are served at the present rate.
    pub fn drain_time(&self, flow: Option<&FlowName>) -> Option<Duration> {
        let rate = self.cost_per_second()?;
        let all: f64 = self.flows.values().map(|flow| flow.queued_cost).sum();
        let Some(flow) = flow.and_then(|name| self.flows.get(name)) else {
            return Some(seconds(all / rate));
        };
        let waiting = self.flows.values().filter(|flow| !flow.queue.is_empty());
        let weights: f64 = waiting.map(|flow| flow.weight).sum();
        let share = if flow.queue.is_empty() { 1.0 } else { flow.weight / weights };
        Some(seconds((flow.queued_cost / (rate * share)).min(all / rate)))
    }

    /// Returns the cost that all running requests are served in a second.
    fn cost_per_second(&self) -> Option<f64> {
        let ServiceRate { cost, seconds, .. } = self.rate;
        let running: u32 = self.flows.values().map(|flow| flow.running).sum();
        let rate = f64::from(running) * cost / seconds;
        (rate.is_finite() && rate > 0.0).then_some(rate)
    }

    /// Returns the virtual time of the waiting flow that is served next; without one, of the last served flow.
    fn waiting_virtual_time(&self) -> f64 {
        self.order.least_virtual_time().unwrap_or(self.last_served)
    }

    /// Changes a flow that has a request.
    fn change_active<T>(
        &mut self,
        now: Instant,
        flow: &Flow,
        change: impl FnOnce(&mut FlowState<Id>) -> T,
    ) -> T {
        let weight = f64::from(flow.weight.max(1));
        let known = self.flows.get(&flow.name);
        let begin = self.begin_of(known, weight, self.waiting_virtual_time());
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

/// An attempt that no longer holds a slot.
#[derive(Clone, Copy, Debug)]
pub struct EndedAttempt {
    /// Cost that [`FairQueue::started`] charged.
    pub charged: f64,
    /// Prompt tokens that were not cached.
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    pub duration: Duration,
    /// Whether the answer is complete: only then the attempt tells about later answers.
    pub is_complete: bool,
}

fn cost(prompt_tokens: u32, output_tokens: f64) -> f64 {
    (f64::from(prompt_tokens) + OUTPUT_TOKEN_COST * output_tokens).max(1.0)
}

fn seconds(seconds: f64) -> Duration {
    // A day is longer than any deadline.
    Duration::from_secs_f64(seconds.clamp(0.0, 86_400.0))
}
