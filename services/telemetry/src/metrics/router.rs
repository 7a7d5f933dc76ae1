//! Metrics of a router.

use std::time::Duration;

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Gauge, Histogram, UpDownCounter},
};

use super::{
    FIRST_TOKEN_SECONDS, Metrics, OUTPUT_TOKEN_SECONDS, REQUEST_SECONDS, STEP_SECONDS, TOKENS,
};

/// API of a request (`gen_ai.operation.name`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    TextCompletion,
    /// gRPC `Inference/Generate`.
    Generate,
}

impl Operation {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::TextCompletion => "text_completion",
            Self::Generate => "generate_content",
        }
    }
}

/// Outcome of a request: complete, or one typed error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEnd {
    /// A stop token or stop string.
    Stop,
    /// `max_tokens` or the maximum sequence length.
    Length,
    /// The client disconnected.
    ClientGone,
    /// The client did not read the answer in time.
    SlowClient,
    /// The request was invalid.
    Invalid,
    /// The router or every node was at its limit.
    Overloaded,
    Deadline,
    /// The attempt budget was used up, or no node was ready.
    Failed,
}

impl RequestEnd {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ClientGone => "client_gone",
            Self::SlowClient => "slow_client",
            Self::Invalid => "invalid",
            Self::Overloaded => "overloaded",
            Self::Deadline => "deadline",
            Self::Failed => "failed",
        }
    }

    fn is_success(self) -> bool {
        matches!(self, Self::Stop | Self::Length)
    }
}

/// Outcome of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptEnd {
    Complete,
    Busy,
    PrefillLost,
    DecodeLost,
    TransferFailed,
    /// The two nodes are incompatible, or a node is not the one that the router knew.
    Mismatch,
    Deadline,
    /// The client disconnected, or a stop string completed the answer.
    Cancelled,
    /// A bug in a node.
    Internal,
}

impl AttemptEnd {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Busy => "busy",
            Self::PrefillLost => "prefill_lost",
            Self::DecodeLost => "decode_lost",
            Self::TransferFailed => "transfer_failed",
            Self::Mismatch => "mismatch",
            Self::Deadline => "deadline",
            Self::Cancelled => "cancelled",
            Self::Internal => "internal",
        }
    }
}

/// Statistics of a finished request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FinishedRequest {
    pub operation: Operation,
    pub end: RequestEnd,
    /// Time from the request's arrival to its last event.
    pub duration: Duration,
    /// Time from the request's arrival; `None` without a token.
    pub time_to_first_token: Option<Duration>,
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// Prompt tokens found in a prefix cache.
    pub cached_tokens: u32,
}

/// The instruments of a router. Cheap to clone.
#[derive(Clone)]
pub struct RouterMetrics {
    model: KeyValue,
    time_to_first_token: Histogram<f64>,
    time_per_output_token: Histogram<f64>,
    inter_token_latency: Histogram<f64>,
    request_duration: Histogram<f64>,
    queue_time: Histogram<f64>,
    token_usage: Histogram<u64>,
    tokens: Counter<u64>,
    finished: Counter<u64>,
    requests: UpDownCounter<i64>,
    attempts: Counter<u64>,
    nodes: Gauge<u64>,
    cached_blocks: Gauge<u64>,
    hand_over: Histogram<f64>,
    transfer_bytes: Counter<u64>,
    transfer_duration: Histogram<f64>,
}

impl RouterMetrics {
    /// Creates the instruments for a model by its served name.
    pub fn new(metrics: &Metrics, model: &str) -> Self {
        let meter = metrics.meter();
        let seconds = |name: &'static str, description: &'static str, bounds: &[f64]| {
            meter
                .f64_histogram(name)
                .with_unit("s")
                .with_description(description)
                .with_boundaries(bounds.to_vec())
                .build()
        };
        let counter = |name: &'static str, description: &'static str| {
            meter.u64_counter(name).with_description(description).build()
        };
        Self {
            model: KeyValue::new("gen_ai.request.model", model.to_owned()),
            time_to_first_token: seconds(
                "gen_ai.server.time_to_first_token",
                "Time from a request's arrival to its first token",
                &FIRST_TOKEN_SECONDS,
            ),
            time_per_output_token: seconds(
                "gen_ai.server.time_per_output_token",
                "Mean time between the tokens of a request after the first",
                &OUTPUT_TOKEN_SECONDS,
            ),
            inter_token_latency: seconds(
                "baton.inter_token_latency",
                "Time between two events of a request",
                &OUTPUT_TOKEN_SECONDS,
            ),
            request_duration: seconds(
                "gen_ai.server.request.duration",
                "Time from a request's arrival to its end",
                &REQUEST_SECONDS,
            ),
            queue_time: seconds(
                "baton.request.queue_time",
                "Time a request waited in the router for a node",
                &FIRST_TOKEN_SECONDS,
            ),
            token_usage: meter
                .u64_histogram("gen_ai.client.token.usage")
                .with_unit("{token}")
                .with_description("Tokens of a request, by type")
                .with_boundaries(TOKENS.to_vec())
                .build(),
            tokens: counter("baton.tokens", "Tokens served, by type"),
            finished: counter("baton.requests.finished", "Finished requests, by reason"),
            requests: meter
                .i64_up_down_counter("baton.requests")
                .with_description("In-flight requests, by state")
                .build(),
            attempts: counter("baton.attempts", "Finished attempts, by outcome"),
            nodes: meter
                .u64_gauge("baton.nodes")
                .with_description("Nodes known to this router, by role and health")
                .build(),
            cached_blocks: meter
                .u64_gauge("baton.nodes.cached_blocks")
                .with_description("Cached KV blocks known to this router, by role")
                .build(),
            hand_over: seconds(
                "baton.hand_over.gap",
                "Time from token 0 (prefill node) to token 1 (decode node)",
                &STEP_SECONDS,
            ),
            transfer_bytes: counter(
                "baton.kv_transfer.bytes",
                "KV bytes transferred between nodes",
            ),
            transfer_duration: seconds(
                "baton.kv_transfer.duration",
                "Time from the first CTS of a transfer to its ACK",
                &STEP_SECONDS,
            ),
        }
    }

    /// Returns the same instruments for another model.
    pub fn of_model(&self, model: &str) -> Self {
        let model = KeyValue::new("gen_ai.request.model", model.to_owned());
        Self { model, ..self.clone() }
    }

    /// Counts a request as running until the guard is dropped.
    pub fn request_running(&self) -> RunningRequest {
        self.requests.add(1, &[self.model.clone(), KeyValue::new("state", "running")]);
        RunningRequest { metrics: self.clone() }
    }

    /// Counts a request as waiting for a node until the guard is dropped. The guard records the time.
    pub fn request_waiting(&self) -> WaitingRequest {
        self.requests.add(1, &[self.model.clone(), KeyValue::new("state", "waiting")]);
        WaitingRequest { metrics: self.clone(), since: std::time::Instant::now() }
    }

    /// Records the time from a request's arrival to its first token.
    pub fn first_token(&self, operation: Operation, after: Duration) {
        self.time_to_first_token.record(after.as_secs_f64(), &self.of(operation));
    }

    /// Records the time between two events of a request.
    pub fn next_tokens(&self, after: Duration) {
        self.inter_token_latency.record(after.as_secs_f64(), std::slice::from_ref(&self.model));
    }

    pub fn request_ended(&self, request: &FinishedRequest) {
        let [operation, model] = self.of(request.operation);
        let count = u64::from(request.completion_tokens);
        let duration = request.duration.as_secs_f64();
        if request.end.is_success() {
            self.request_duration.record(duration, &[operation.clone(), model.clone()]);
        } else {
            let error = KeyValue::new("error.type", request.end.as_str());
            self.request_duration.record(duration, &[operation.clone(), model.clone(), error]);
        }
        let reason = KeyValue::new("finished_reason", request.end.as_str());
        self.finished.add(1, &[operation.clone(), model.clone(), reason]);
        if let Some(first) = request.time_to_first_token.filter(|_| count > 1) {
            let rest = request.duration.saturating_sub(first).as_secs_f64();
            let mean = rest / (count - 1) as f64;
            self.time_per_output_token.record(mean, &[operation.clone(), model.clone()]);
        }
        let of_type =
            |name| [operation.clone(), model.clone(), KeyValue::new("gen_ai.token.type", name)];
        let counts = [("input", u64::from(request.prompt_tokens)), ("output", count)];
        for (name, tokens) in counts {
            self.token_usage.record(tokens, &of_type(name));
            self.tokens.add(tokens, &of_type(name));
        }
        self.tokens.add(u64::from(request.cached_tokens), &of_type("input_cached"));
    }

    pub fn attempt_ended(&self, end: AttemptEnd) {
        self.attempts.add(1, &[self.model.clone(), KeyValue::new("outcome", end.as_str())]);
    }

    /// Sets the number of nodes of a role and health. Call it for every pair at each change, also for 0.
    pub fn set_nodes(&self, role: &'static str, health: &'static str, count: usize) {
        let attributes = [KeyValue::new("role", role), KeyValue::new("health", health)];
        self.nodes.record(count as u64, &attributes);
    }

    pub fn set_cached_blocks(&self, role: &'static str, count: usize) {
        self.cached_blocks.record(count as u64, &[KeyValue::new("role", role)]);
    }

    /// Records the time from the prefill node's token to the decode node's first token.
    pub fn hand_over(&self, gap: Duration) {
        self.hand_over.record(gap.as_secs_f64(), std::slice::from_ref(&self.model));
    }

    pub fn transfer_delivered(&self, bytes: u64, duration: Duration) {
        let model = std::slice::from_ref(&self.model);
        self.transfer_bytes.add(bytes, model);
        self.transfer_duration.record(duration.as_secs_f64(), model);
    }

    fn of(&self, operation: Operation) -> [KeyValue; 2] {
        [KeyValue::new("gen_ai.operation.name", operation.as_str()), self.model.clone()]
    }
}

/// Guard of an in-flight request.
pub struct RunningRequest {
    metrics: RouterMetrics,
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        let metrics = &self.metrics;
        metrics.requests.add(-1, &[metrics.model.clone(), KeyValue::new("state", "running")]);
    }
}

/// Guard of a request that waits for a node.
pub struct WaitingRequest {
    metrics: RouterMetrics,
    since: std::time::Instant,
}

impl Drop for WaitingRequest {
    fn drop(&mut self) {
        let metrics = &self.metrics;
        metrics.requests.add(-1, &[metrics.model.clone(), KeyValue::new("state", "waiting")]);
        let waited = self.since.elapsed().as_secs_f64();
        metrics.queue_time.record(waited, std::slice::from_ref(&metrics.model));
    }
}
