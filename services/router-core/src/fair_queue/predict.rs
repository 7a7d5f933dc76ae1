//! Predictions of the fair queue: costs and waiting times, and the refusals that follow from them.

use std::{
    cmp::Ordering,
    fmt,
    hash::Hash,
    time::{Duration, Instant},
};

use cluster::RequiredCapacity;

use super::{FairQueue, Flow, FlowName};

/// Cost of an output token, in prompt tokens.
pub(super) const OUTPUT_TOKEN_COST: f64 = 2.0;
/// Predicted output tokens of a flow without finished answers, at most the request's own maximum.
pub(super) const OUTPUT_TOKENS_FIRST: f64 = 256.0;
/// Weight of a finished answer in the mean output length of its flow.
pub(super) const OUTPUT_SHARE: f64 = 1.0 / 8.0;
/// Weight of an ended attempt in the service rate and in the service times.
pub(super) const RATE_SHARE: f64 = 1.0 / 32.0;

/// Requests are refused for their predicted wait only after requests have waited for this fraction
/// of the allowed wait. Reason: a service rate that was measured with few short requests
/// overestimates the wait of a burst. This delays no refusal below nine times the capacity, because
/// the predicted wait reaches the allowed wait later.
const WAITED_MIN: f64 = 1.0 / 8.0;

/// A request that may have to wait for its turn.
#[derive(Clone, Debug)]
pub struct WaitRequest {
    pub flow: Flow,
    /// Prompt and emitted tokens.
    pub prompt_tokens: u32,
    pub output_tokens_max: u32,
    pub limits: WaitLimits,
    /// Whether the answer has emitted tokens, or is a further answer of its request. Such a request
    /// is never rejected.
    pub has_begun: bool,
    /// Arrival of the session, if the request is a later turn of it.
    pub session_since: Option<Instant>,
    /// Requests of a lower number come earlier within the flow.
    pub priority: i32,
}

/// Limits of the time that a request waits.
#[derive(Clone, Copy, Debug)]
pub struct WaitLimits {
    pub wait_max: Duration,
    /// The request must be complete by this time.
    pub deadline: Instant,
}

impl WaitLimits {
    /// Returns the limits of a request that needs this capacity. `wait_max`:
    /// `router.waiting_timeout`.
    pub fn new(capacity: RequiredCapacity, wait_max: Duration, deadline: Instant) -> Self {
        // An answer that has emitted tokens comes before other answers of its caller, unless its
        // client paused it.
        let wait_max = match capacity {
            RequiredCapacity::Any => Duration::ZERO,
            RequiredCapacity::Start { .. } => wait_max,
        };
        Self { wait_max, deadline }
    }
}

/// Limit that determines by when a request must start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartLimit {
    /// Maximum wait, `router.waiting_timeout`.
    Wait(Duration),
    /// The request must complete before its deadline.
    Deadline {
        /// Time until the deadline.
        time_left: Duration,
        /// Predicted time from the start of the request to its end, with a margin for prediction
        /// errors.
        service_time: Duration,
    },
}

impl StartLimit {
    /// Returns for how long the request may wait.
    pub fn wait_max(self) -> Duration {
        match self {
            Self::Wait(wait_max) => wait_max,
            Self::Deadline { time_left, service_time } => time_left.saturating_sub(service_time),
        }
    }

    /// Returns whether the request could not complete before its deadline even if it started at
    /// once.
    fn is_missed(self) -> bool {
        matches!(self, Self::Deadline { time_left, service_time } if time_left < service_time)
    }
}

/// Reason why a request is refused before it starts: it would start too late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLate {
    /// Predicted wait for a node from now on. Zero if the request got its turn too late.
    pub wait: Duration,
    /// Time that the request has waited for a turn that came too late. Zero if the request is
    /// refused before it queues.
    pub waited: Duration,
    pub limit: StartLimit,
    /// Whether the request waits because its flow was served more than its share.
    pub is_over_share: bool,
}

impl TooLate {
    /// Returns the time by which the request would start or complete too late.
    pub fn excess(&self) -> Duration {
        match self.limit {
            StartLimit::Wait(wait_max) => self.wait.saturating_sub(wait_max),
            StartLimit::Deadline { time_left, service_time } => {
                (self.wait + service_time).saturating_sub(time_left)
            }
        }
    }
}

impl fmt::Display for TooLate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wait_ms = self.wait.as_millis();
        let behind = if self.is_over_share { " behind other requests of the caller" } else { "" };
        match self.limit {
            StartLimit::Wait(wait_max) => write!(
                f,
                "the request cannot start in time: it would wait {wait_ms} ms for a node{behind}, and at most {} ms \
                 are allowed (router.waiting_timeout)",
                wait_max.as_millis()
            ),
            StartLimit::Deadline { time_left, service_time } => {
                let (left_ms, service_ms) = (time_left.as_millis(), service_time.as_millis());
                write!(f, "the request cannot complete before its deadline in {left_ms} ms: ")?;
                match self.waited {
                    Duration::ZERO => write!(
                        f,
                        "after a wait of {wait_ms} ms for a node{behind} it would take up to {service_ms} ms"
                    )?,
                    waited => write!(
                        f,
                        "it has waited {} ms for a node and would take up to {service_ms} ms",
                        waited.as_millis()
                    )?,
                }
                write!(f, "; expected a later deadline, a shorter prompt or fewer output tokens")
            }
        }
    }
}

/// Prompt of a request that starts.
#[derive(Clone, Copy, Debug)]
pub struct StartedPrompt {
    /// Prompt and emitted tokens.
    pub tokens: u32,
    /// The tokens that the node must prefill.
    pub uncached_tokens: u32,
}

/// Sums over the last started requests of a flow.
#[derive(Debug, Default)]
pub(super) struct CachedShare {
    tokens: f64,
    uncached_tokens: f64,
}

impl CachedShare {
    pub(super) fn add(&mut self, prompt: StartedPrompt) {
        self.tokens += f64::from(prompt.tokens) - self.tokens * RATE_SHARE;
        self.uncached_tokens +=
            f64::from(prompt.uncached_tokens) - self.uncached_tokens * RATE_SHARE;
    }

    /// Returns the predicted number of uncached tokens of a prompt: all of them without
    /// measurements.
    fn uncached_tokens(&self, prompt_tokens: u32) -> u32 {
        match self.tokens > 0.0 {
            true => (f64::from(prompt_tokens) * self.uncached_tokens / self.tokens) as u32,
            false => prompt_tokens,
        }
    }
}

/// Tokens of a request that the nodes compute.
#[derive(Clone, Copy, Debug)]
pub(super) struct CountedTokens {
    /// Uncached prompt tokens.
    pub(super) uncached: u32,
    pub(super) output: f64,
}

impl CountedTokens {
    pub(super) fn cost(self) -> f64 {
        cost(self.uncached, self.output)
    }
}

/// Sums over the last ended attempts, for the rate at which all running requests together are
/// served.
#[derive(Debug, Default)]
pub(super) struct ServiceRate {
    pub(super) cost: f64,
    seconds: f64,
    /// Mean number of running requests when one ends, itself included.
    running: f64,
}

impl ServiceRate {
    /// Adds a completed request. `running`: running requests at its end, itself included.
    pub(super) fn add(&mut self, cost: f64, seconds: f64, running: u32) {
        self.cost += cost - self.cost * RATE_SHARE;
        self.seconds += seconds - self.seconds * RATE_SHARE;
        let running = f64::from(running);
        let share = if self.running > 0.0 { RATE_SHARE } else { 1.0 };
        self.running += (running - self.running) * share;
    }
}

impl<Id: Copy + Eq + Hash> FairQueue<Id> {
    /// Returns the predicted cost of an answer. `prompt_tokens`: uncached prompt tokens.
    pub(super) fn cost(&self, flow: &FlowName, prompt_tokens: u32, output_tokens_max: u32) -> f64 {
        self.tokens(flow, prompt_tokens, output_tokens_max).cost()
    }

    /// Returns the tokens that nodes are predicted to compute: `uncached` prompt tokens and the
    /// tokens of the answer.
    pub(super) fn tokens(
        &self,
        flow: &FlowName,
        uncached: u32,
        output_tokens_max: u32,
    ) -> CountedTokens {
        let mean = self.flows.get(flow).and_then(|flow| flow.output_tokens);
        let output = mean.unwrap_or(OUTPUT_TOKENS_FIRST).min(output_tokens_max.into());
        CountedTokens { uncached, output }
    }

    /// Returns the predicted uncached tokens of a prompt of the flow. The measured rate of service
    /// counts uncached tokens only, so whole prompts would overestimate the wait.
    pub(super) fn uncached_tokens(&self, flow: &FlowName, prompt_tokens: u32) -> u32 {
        let flow = self.flows.get(flow);
        flow.map_or(prompt_tokens, |flow| flow.cached.uncached_tokens(prompt_tokens))
    }

    /// Returns the limit that determines by when a request must start.
    pub(super) fn start_limit(
        &self,
        now: Instant,
        limits: WaitLimits,
        tokens: CountedTokens,
    ) -> StartLimit {
        let service_time = self.service_time.with_reserve(now, tokens);
        let time_left = limits.deadline.saturating_duration_since(now);
        let by_deadline = StartLimit::Deadline { time_left, service_time };
        match by_deadline.wait_max() < limits.wait_max {
            true => by_deadline,
            false => StartLimit::Wait(limits.wait_max),
        }
    }

    /// Fails if a request of the flow could not start in time, whatever its prompt. Called before
    /// the prompt is tokenized, because a refusal must be cheap.
    pub fn check(
        &self,
        now: Instant,
        flow: &Flow,
        output_tokens_max: u32,
        limits: WaitLimits,
    ) -> Result<(), TooLate> {
        if self.is_empty() {
            return Ok(());
        }
        let tokens = self.tokens(&flow.name, 0, output_tokens_max);
        self.check_start(now, flow, self.start_limit(now, limits, tokens))
    }

    /// Fails if a request of the flow could not start within this limit.
    pub(super) fn check_start(
        &self,
        now: Instant,
        flow: &Flow,
        limit: StartLimit,
    ) -> Result<(), TooLate> {
        let (is_missed, wait_max) = (limit.is_missed(), limit.wait_max());
        if !is_missed && self.waited(now) < wait_max.mul_f64(WAITED_MIN) {
            return Ok(());
        }
        let wait = self.wait(flow).unwrap_or_default();
        if !is_missed && wait <= wait_max {
            return Ok(());
        }
        let is_over_share = !is_missed && self.is_over_share(now, &flow.name);
        Err(TooLate { wait, waited: Duration::ZERO, limit, is_over_share })
    }

    /// Predicts how long a new request of the flow would wait for its turn. `None` without
    /// measurements.
    pub(super) fn wait(&self, flow: &Flow) -> Option<Duration> {
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

    /// Returns the time in which the queued requests of the flow, or of all flows, are served at
    /// the present rate.
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

    /// Returns the predicted time until the queued requests are served. While nothing runs, the
    /// rate is unknown: then it is the time for which requests have been waiting.
    pub fn queue_time(&self, now: Instant) -> Duration {
        if self.is_empty() {
            return Duration::ZERO;
        }
        self.drain_time(None).unwrap_or_else(|| self.waited(now))
    }

    /// Returns the time for which requests have been waiting without a break.
    fn waited(&self, now: Instant) -> Duration {
        self.waiting_since.map_or(Duration::ZERO, |at| now.saturating_duration_since(at))
    }

    pub(super) fn running(&self) -> u32 {
        self.flows.values().map(|flow| flow.running).sum()
    }

    /// Returns the cost served per second by all running requests; `None` while no request runs. If
    /// fewer requests than usual run, counts the usual number: after attempts fail together, their
    /// requests queue again before nodes take them.
    fn cost_per_second(&self) -> Option<f64> {
        let ServiceRate { cost, seconds, running, .. } = self.rate;
        let present = Some(self.running()).filter(|present| *present > 0)?;
        let rate = f64::from(present).max(running) * cost / seconds;
        (rate.is_finite() && rate > 0.0).then_some(rate)
    }
}

pub(super) fn cost(prompt_tokens: u32, output_tokens: f64) -> f64 {
    (f64::from(prompt_tokens) + OUTPUT_TOKEN_COST * output_tokens).max(1.0)
}

pub(super) fn seconds(seconds: f64) -> Duration {
    // A day is longer than any deadline.
    Duration::from_secs_f64(seconds.clamp(0.0, 86_400.0))
}
