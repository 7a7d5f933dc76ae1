//! Metrics of a router.

use std::time::{Duration, Instant};

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Gauge, Histogram, UpDownCounter},
};

use super::{
    ERROR_FRACTIONS, FIRST_TOKEN_SECONDS, Metrics, OUTPUT_TOKEN_SECONDS, REQUEST_SECONDS,
    STEP_SECONDS, TOKENS, labels::Series,
};

labels! {
    /// API of a request (`gen_ai.operation.name`).
    pub enum Operation("gen_ai.operation.name") {
        /// `/v1/chat/completions`.
        Chat = "chat",
        /// `/v1/completions`.
        TextCompletion = "text_completion",
        /// gRPC `Inference/Generate`.
        Generate = "generate_content",
    }
}

labels! {
    /// Outcome of a request: complete, or one typed error.
    pub enum RequestEnd("finished_reason") {
        /// A stop token or stop string.
        Stop = "stop",
        /// `max_tokens` or the maximum sequence length.
        Length = "length",
        /// The client disconnected.
        ClientGone = "client_gone",
        /// The client did not read the answer in time.
        SlowClient = "slow_client",
        /// The request was invalid.
        Invalid = "invalid",
        /// The router or every node was at its limit.
        Overloaded = "overloaded",
        Deadline = "deadline",
        /// The attempt budget was used up, no node was ready, or a bug occurred.
        Failed = "failed",
    }
}

labels! {
    /// Outcome of an attempt.
    pub enum AttemptEnd("outcome") {
        Complete = "complete",
        Busy = "busy",
        PrefillLost = "prefill_lost",
        DecodeLost = "decode_lost",
        TransferFailed = "transfer_failed",
        /// The decode node drains and would have cut the answer; another node continues it.
        Migrated = "migrated",
        /// The two nodes are incompatible, or another process than the router expected answered.
        Mismatch = "mismatch",
        Deadline = "deadline",
        /// The client did not read its stream for a while; the answer continues when it does.
        Paused = "paused",
        /// The client disconnected, or a stop string completed the answer.
        Cancelled = "cancelled",
        /// A bug in a node.
        Internal = "internal",
    }
}

labels! {
    /// Reason why the router refused a request because of load.
    pub enum Refusal("reason") {
        /// `router.requests_max` is reached.
        InFlight = "in_flight",
        /// `router.waiting_max` is reached.
        Waiting = "waiting",
        /// The request could not start before its deadline or within `router.waiting_timeout`, by prediction.
        Late = "late",
        /// Every node was busy for `router.waiting_timeout`.
        Busy = "busy",
        /// The caller has its share of the requests that may be in flight or wait.
        Share = "share",
        /// The caller's own requests would delay the request for too long.
        ShareLate = "share_late",
    }
}

labels! {
    /// Role of a node.
    pub enum NodeRole("role") {
        Prefill = "prefill",
        Decode = "decode",
    }
}

labels! {
    /// Decision of a pick, and its reason. `local`: the decode node prefills the prompt.
    pub enum Pick("decision" / "reason") {
        /// `router.disaggregate` is always.
        DisaggregatedAlways = "disaggregated" / "always",
        DisaggregatedPredicted = "disaggregated" / "predicted",
        /// The caller leaves headroom on decode nodes to others.
        DisaggregatedHeadroom = "disaggregated" / "headroom",
        /// No prediction exists yet.
        DisaggregatedUnmeasured = "disaggregated" / "unmeasured",
        /// `router.disaggregate` is never.
        LocalNever = "local" / "never",
        LocalPredicted = "local" / "predicted",
        LocalAfterFailure = "local" / "after_failure",
        LocalShortPrompt = "local" / "short_prompt",
        /// Every prefill node is busy.
        LocalBusy = "local" / "busy",
        /// The circuit breaker of every prefill node, or of every pair with the decode node, is open.
        LocalCircuitBreaker = "local" / "circuit_breaker",
        /// No prefill node has the model, weights and KV layout of a decode node.
        LocalNoPartner = "local" / "no_partner",
        LocalNoPrefillNode = "local" / "no_prefill_node",
        /// Every decode node is busy.
        NoneBusy = "none" / "busy",
        /// No decode node has the model, weights and KV layout of the attempt before.
        NoneNoPartner = "none" / "no_partner",
        /// Every decode node has failed the request.
        NoneExcluded = "none" / "excluded",
        /// No decode node takes the request: its length or its grammar.
        NoneUnfit = "none" / "unfit",
        NoneNoDecodeNode = "none" / "no_decode_node",
    }
}

labels! {
    /// Reason why the router excludes a node although the node is up.
    pub enum Exclusion("reason") {
        /// Attempts on the node failed.
        Failures = "failures",
        /// Transfers to a decode node failed; other pairs of the node are still used.
        Transfers = "transfers",
        /// Inter-token latency or transfer time off the pool's median.
        Slow = "slow",
        /// The node's report is impossible.
        InvalidReport = "invalid_report",
    }
}

labels! {
    /// Type of tokens.
    pub enum TokenType("gen_ai.token.type") {
        Input = "input",
        /// Prompt tokens found in a prefix cache.
        InputCached = "input_cached",
        Output = "output",
    }
}

labels! {
    /// State of a request in flight.
    pub enum RequestState("state") {
        Running = "running",
        /// For a node.
        Waiting = "waiting",
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

impl FinishedRequest {
    /// Returns the number of tokens of each type.
    pub(super) fn tokens(&self) -> [(TokenType, u64); 3] {
        [
            (TokenType::Input, self.prompt_tokens.into()),
            (TokenType::InputCached, self.cached_tokens.into()),
            (TokenType::Output, self.completion_tokens.into()),
        ]
    }
}

/// The instruments of a router. Cheap to clone.
#[derive(Clone)]
pub struct RouterMetrics {
    factory: Metrics,
    model: KeyValue,
    time_to_first_token: Histogram<f64>,
    ttft_prediction_error: Histogram<f64>,
    time_per_output_token: Histogram<f64>,
    inter_token_latency: Histogram<f64>,
    request_duration: Histogram<f64>,
    queue_time: Histogram<f64>,
    token_usage: Histogram<u64>,
    tokens: Series<Counter<u64>, (Operation, TokenType)>,
    finished: Series<Counter<u64>, (Operation, RequestEnd)>,
    refused: Series<Counter<u64>, Refusal>,
    requests: Series<UpDownCounter<i64>, RequestState>,
    attempts: Series<Counter<u64>, AttemptEnd>,
    node_attempts: Series<Counter<u64>, (NodeRole, AttemptEnd)>,
    picks: Series<Counter<u64>, Pick>,
    nodes: Gauge<u64>,
    excluded_nodes: Gauge<u64>,
    exclusions: Series<Counter<u64>, (NodeRole, Exclusion)>,
    cached_blocks: Gauge<u64>,
    hand_over: Histogram<f64>,
    transfer_bytes: Series<Counter<u64>, ()>,
    transfer_duration: Histogram<f64>,
}

impl RouterMetrics {
    /// Creates the instruments for a model by its served name.
    pub fn new(metrics: &Metrics, model: &str) -> Self {
        let model = KeyValue::new("gen_ai.request.model", model.to_owned());
        let of_model = std::slice::from_ref(&model);
        Self {
            factory: metrics.clone(),
            time_to_first_token: metrics.seconds(
                "gen_ai.server.time_to_first_token",
                "Time from a request's arrival to its first token",
                &FIRST_TOKEN_SECONDS,
            ),
            ttft_prediction_error: metrics
                .meter
                .f64_histogram("baton.time_to_first_token.prediction_error")
                .with_description(
                    "Absolute error of the predicted time to first token, as a fraction of the measured time",
                )
                .with_boundaries(ERROR_FRACTIONS.to_vec())
                .build(),
            time_per_output_token: metrics.seconds(
                "gen_ai.server.time_per_output_token",
                "Mean time between the tokens of a request after the first",
                &OUTPUT_TOKEN_SECONDS,
            ),
            inter_token_latency: metrics.seconds(
                "baton.inter_token_latency",
                "Time between two events of a request, each with one or more tokens",
                &OUTPUT_TOKEN_SECONDS,
            ),
            request_duration: metrics.seconds(
                "gen_ai.server.request.duration",
                "Time from a request's arrival to its end",
                &REQUEST_SECONDS,
            ),
            queue_time: metrics.seconds(
                "baton.request.queue_time",
                "Time a request waited in the router for a node",
                &FIRST_TOKEN_SECONDS,
            ),
            token_usage: metrics
                .meter
                .u64_histogram("gen_ai.client.token.usage")
                .with_unit("{token}")
                .with_description("Tokens of a request, by type")
                .with_boundaries(TOKENS.to_vec())
                .build(),
            tokens: metrics.counter("baton.tokens", "Tokens served, by type", of_model),
            finished: metrics.counter(
                "baton.requests.finished",
                "Finished requests, by reason",
                of_model,
            ),
            refused: metrics.counter(
                "baton.requests.refused",
                "Requests that the router refused because of load, by reason",
                of_model,
            ),
            requests: metrics.up_down_counter(
                "baton.requests",
                "In-flight requests, by state",
                of_model,
            ),
            attempts: metrics.counter("baton.attempts", "Finished attempts, by outcome", of_model),
            node_attempts: metrics.counter(
                "baton.node_attempts",
                "Finished attempts on nodes, by role of the node and by outcome",
                of_model,
            ),
            picks: metrics.counter(
                "baton.picks",
                "Picks of nodes, by decision and its reason; local: the decode node prefills the prompt",
                of_model,
            ),
            nodes: metrics.gauge(
                "baton.nodes",
                "Nodes known to this router, by role, health and model; without a model: nodes that never answered \
                 and nodes of other models",
            ),
            excluded_nodes: metrics.gauge(
                "baton.nodes.excluded",
                "Nodes whose circuit breaker is open or half-open, by role",
            ),
            exclusions: metrics.counter(
                "baton.nodes.exclusions",
                "Exclusions of nodes by this router, by role and reason",
                &[],
            ),
            cached_blocks: metrics.gauge(
                "baton.nodes.cached_blocks",
                "Cached KV blocks known to this router, by role",
            ),
            hand_over: metrics.seconds(
                "baton.hand_over.gap",
                "Time from token 0 (prefill node) to token 1 (decode node), a decode step included",
                &STEP_SECONDS,
            ),
            transfer_bytes: metrics.counter(
                "baton.kv_transfer.bytes",
                "KV bytes transferred between nodes",
                of_model,
            ),
            transfer_duration: metrics.seconds(
                "baton.kv_transfer.duration",
                "Time from RESERVE to the last block written, of transfers with KV",
                &STEP_SECONDS,
            ),
            model,
        }
    }

    /// Returns the same instruments for another model.
    pub fn of_model(&self, model: &str) -> Self {
        Self::new(&self.factory, model)
    }

    /// Counts a request as running until the guard is dropped.
    pub fn request_running(&self) -> InFlightRequest {
        InFlightRequest::new(self, RequestState::Running)
    }

    /// Counts a request as waiting for a node until the guard is dropped. The guard records the time.
    pub fn request_waiting(&self) -> InFlightRequest {
        InFlightRequest::new(self, RequestState::Waiting)
    }

    /// Records the time from a request's arrival to its first token.
    pub fn first_token(&self, operation: Operation, after: Duration) {
        self.time_to_first_token.record(after.as_secs_f64(), &self.of(operation));
    }

    /// Records the relative error of the predicted time to first token.
    pub fn ttft_predicted(&self, predicted: Duration, measured: Duration) {
        let error = predicted.abs_diff(measured).as_secs_f64() / measured.as_secs_f64().max(1e-6);
        self.ttft_prediction_error.record(error, self.model());
    }

    /// Records the time between two events of a request.
    pub fn next_tokens(&self, after: Duration) {
        self.inter_token_latency.record(after.as_secs_f64(), self.model());
    }

    pub fn request_ended(&self, request: &FinishedRequest) {
        let [operation, model] = self.of(request.operation);
        let count = u64::from(request.completion_tokens);
        let duration = request.duration.as_secs_f64();
        let mut attributes = vec![operation.clone(), model.clone()];
        if !matches!(request.end, RequestEnd::Stop | RequestEnd::Length) {
            attributes.push(KeyValue::new("error.type", request.end.as_str()));
        }
        self.request_duration.record(duration, &attributes);
        self.finished.add(1, (request.operation, request.end));
        if let Some(first) = request.time_to_first_token.filter(|_| count > 1) {
            let rest = request.duration.saturating_sub(first).as_secs_f64();
            let mean = rest / (count - 1) as f64;
            self.time_per_output_token.record(mean, &[operation.clone(), model.clone()]);
        }
        for (of_type, tokens) in request.tokens() {
            self.tokens.add(tokens, (request.operation, of_type));
            if of_type != TokenType::InputCached {
                let of_type = KeyValue::new("gen_ai.token.type", of_type.as_str());
                self.token_usage.record(tokens, &[operation.clone(), model.clone(), of_type]);
            }
        }
    }

    pub fn refused(&self, reason: Refusal) {
        self.refused.add(1, reason);
    }

    pub fn attempt_ended(&self, end: AttemptEnd) {
        self.attempts.add(1, end);
    }

    /// Records the outcome of an attempt for one of its nodes.
    pub fn node_attempt_ended(&self, role: NodeRole, end: AttemptEnd) {
        self.node_attempts.add(1, (role, end));
    }

    pub fn picked(&self, pick: Pick) {
        self.picks.add(1, pick);
    }

    /// Sets the number of nodes of a role, health and model. Call it for every combination at each change, also
    /// for 0.
    pub fn set_nodes(
        &self,
        role: &'static str,
        health: &'static str,
        model: Option<&str>,
        count: usize,
    ) {
        let mut attributes = vec![KeyValue::new("role", role), KeyValue::new("health", health)];
        attributes
            .extend(model.map(|model| KeyValue::new("gen_ai.request.model", model.to_owned())));
        self.nodes.record(count as u64, &attributes);
    }

    pub fn set_excluded_nodes(&self, role: &'static str, count: usize) {
        self.excluded_nodes.record(count as u64, &[KeyValue::new("role", role)]);
    }

    pub fn node_excluded(&self, role: NodeRole, reason: Exclusion) {
        self.exclusions.add(1, (role, reason));
    }

    pub fn set_cached_blocks(&self, role: &'static str, count: usize) {
        self.cached_blocks.record(count as u64, &[KeyValue::new("role", role)]);
    }

    /// Records the time from the prefill node's token to the decode node's first token.
    pub fn hand_over(&self, gap: Duration) {
        self.hand_over.record(gap.as_secs_f64(), self.model());
    }

    pub fn transfer_delivered(&self, bytes: u64, duration: Duration) {
        self.transfer_bytes.add(bytes, ());
        self.transfer_duration.record(duration.as_secs_f64(), self.model());
    }

    fn model(&self) -> &[KeyValue] {
        std::slice::from_ref(&self.model)
    }

    fn of(&self, operation: Operation) -> [KeyValue; 2] {
        [KeyValue::new("gen_ai.operation.name", operation.as_str()), self.model.clone()]
    }
}

/// Guard of a request that runs or waits for a node.
pub struct InFlightRequest {
    metrics: RouterMetrics,
    state: RequestState,
    since: Instant,
}

impl InFlightRequest {
    fn new(metrics: &RouterMetrics, state: RequestState) -> Self {
        metrics.requests.add(1, state);
        Self { metrics: metrics.clone(), state, since: Instant::now() }
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let Self { metrics, state, since } = self;
        metrics.requests.add(-1, *state);
        if *state == RequestState::Waiting {
            metrics.queue_time.record(since.elapsed().as_secs_f64(), metrics.model());
        }
    }
}
