//! Metrics of a router.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Gauge, Histogram, UpDownCounter},
};

use super::{
    ERROR_FRACTIONS, FIRST_TOKEN_SECONDS, MetricRow, Metrics, OUTPUT_TOKEN_SECONDS,
    REQUEST_SECONDS, STEP_SECONDS, TOKENS,
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
        /// `/v1/embeddings`.
        Embeddings = "embeddings",
        /// `/v1/rerank` and `/v1/score`.
        Rerank = "rerank",
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
    pub enum AttemptEndLabel("outcome") {
        Complete = "complete",
        Busy = "busy",
        PrefillLost = "prefill_lost",
        DecodeLost = "decode_lost",
        TransferFailed = "transfer_failed",
        /// The decode node drains and would have cut the answer; another node continues it.
        Migrated = "migrated",
        /// The two nodes are incompatible, or another process answered at the node's address.
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
    pub enum RefusalReason("reason") {
        /// `router.requests_max` is reached.
        InFlight = "in_flight",
        /// `router.waiting_max` is reached.
        Waiting = "waiting",
        /// The request could not start before its deadline or within `router.waiting_timeout`, by
        /// prediction.
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
    pub enum PickDecision("decision" / "reason") {
        /// `router.disaggregate` is always.
        DisaggregatedAlways = "disaggregated" / "always",
        DisaggregatedPredicted = "disaggregated" / "predicted",
        /// The caller leaves headroom on decode nodes to others.
        DisaggregatedHeadroom = "disaggregated" / "headroom",
        /// The sequence moves with its KV from its draining node.
        DisaggregatedMoved = "disaggregated" / "moved",
        /// No prediction exists yet.
        DisaggregatedUnmeasured = "disaggregated" / "unmeasured",
        /// `router.disaggregate` is never.
        LocalNever = "local" / "never",
        LocalPredicted = "local" / "predicted",
        LocalAfterFailure = "local" / "after_failure",
        /// An embedding or a score needs no decode node.
        LocalPooled = "local" / "pooled",
        LocalShortPrompt = "local" / "short_prompt",
        /// Every prefill node is busy.
        LocalBusy = "local" / "busy",
        /// The circuit breaker of every prefill node, or of every pair with the decode node, is
        /// open.
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
        /// No decode node takes the request: its length, grammar, sampling or pooling.
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
    pub(super) enum TokenType("gen_ai.token.type") {
        Input = "input",
        /// Prompt tokens found in a prefix cache.
        InputCached = "input_cached",
        Output = "output",
    }
}

labels! {
    /// State of a request in flight, or of a sequence on a node.
    pub(super) enum RequestState("state") {
        Running = "running",
        /// For a node.
        Waiting = "waiting",
    }
}

labels! {
    /// Tokens of a moved sequence, by the origin of their KV on the new node.
    pub(super) enum MovedTokens("kv") {
        Sent = "sent",
        Recomputed = "recomputed",
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

instruments! {
    /// The instruments of one model.
    struct ModelInstruments ["gen_ai.request.model"] {
        time_to_first_token: Histogram<f64>, Operation, FIRST_TOKEN_SECONDS =>
            "gen_ai.server.time_to_first_token" "s", "Time from a request's arrival to its first token";
        ttft_prediction_error: Histogram<f64>, (), ERROR_FRACTIONS => "baton.time_to_first_token.prediction_error",
            "Absolute error of the predicted time to first token, as a fraction of the measured time";
        time_per_output_token: Histogram<f64>, Operation, OUTPUT_TOKEN_SECONDS =>
            "gen_ai.server.time_per_output_token" "s", "Mean time between the tokens of a request after the first";
        inter_token_latency: Histogram<f64>, (), OUTPUT_TOKEN_SECONDS => "baton.inter_token_latency" "s",
            "Time between two events of a request, each with one or more tokens";
        request_duration: Histogram<f64>, Operation, + "error.type", REQUEST_SECONDS =>
            "gen_ai.server.request.duration" "s", "Time from a request's arrival to its end";
        queue_time: Histogram<f64>, (), FIRST_TOKEN_SECONDS => "baton.request.queue_time" "s",
            "Time a request waited in the router for a node";
        token_usage: Histogram<u64>, (Operation, TokenType), TOKENS => "gen_ai.client.token.usage" "{token}",
            "Tokens of a request, by type";
        tokens: Counter<u64>, (Operation, TokenType) => "baton.tokens", "Tokens served, by type";
        finished: Counter<u64>, (Operation, RequestEnd) => "baton.requests.finished", "Finished requests, by reason";
        refused: Counter<u64>, RefusalReason => "baton.requests.refused",
            "Requests that the router refused because of load, by reason";
        requests: UpDownCounter<i64>, RequestState => "baton.requests", "In-flight requests, by state";
        attempts: Counter<u64>, AttemptEndLabel => "baton.attempts", "Finished attempts, by outcome";
        node_attempts: Counter<u64>, (NodeRole, AttemptEndLabel) => "baton.node_attempts",
            "Finished attempts on nodes, by role of the node and by outcome";
        picks: Counter<u64>, PickDecision => "baton.picks",
            "Picks of nodes, by decision and its reason; local: the decode node prefills the prompt";
        moved_sequences: Counter<u64>, () => "baton.moved_sequences",
            "Running sequences that moved with their KV from a draining node to another node";
        moved_tokens: Counter<u64>, MovedTokens => "baton.moved_tokens",
            "Tokens of moved sequences, by whether their KV was sent or computed again";
        hand_over: Histogram<f64>, (), STEP_SECONDS => "baton.hand_over.gap" "s",
            "Time from token 0 (prefill node) to token 1 (decode node), a decode step included";
        transfer_bytes: Counter<u64>, () => "baton.kv_transfer.bytes", "KV bytes transferred between nodes";
        transfer_duration: Histogram<f64>, (), STEP_SECONDS => "baton.kv_transfer.duration" "s",
            "Time from RESERVE to the last block written, of transfers with KV";
    }
}

instruments! {
    /// The instruments of the nodes of all models.
    struct NodesInstruments [] {
        nodes: Gauge<u64>, (), + "role", + "health", + "gen_ai.request.model" => "baton.nodes",
            "Nodes known to this router, by role, health and model; without a model: nodes that never answered and nodes of other models";
        excluded: Gauge<u64>, (), + "role" => "baton.nodes.excluded",
            "Nodes whose circuit breaker is open or half-open, by role";
        exclusions: Counter<u64>, (NodeRole, Exclusion) => "baton.nodes.exclusions",
            "Exclusions of nodes by this router, by role and reason";
        cached_blocks: Gauge<u64>, (), + "role" => "baton.nodes.cached_blocks",
            "Cached KV blocks known to this router, by role";
        queue_time: Gauge<f64>, (), + "gen_ai.request.model", + "role" => "baton.queue.predicted_time" "s",
            "Predicted time until the waiting requests are served, by model and by role of the busy nodes";
    }
}

pub(super) fn rows() -> Vec<MetricRow> {
    [ModelInstruments::rows(), NodesInstruments::rows()].concat()
}

/// The instruments of a router. Cheap to clone.
#[derive(Clone)]
pub struct RouterMetrics {
    factory: Metrics,
    of_model: Arc<ModelInstruments>,
    of_nodes: Arc<NodesInstruments>,
}

impl RouterMetrics {
    /// Creates the instruments for a model by its served name.
    pub fn new(metrics: &Metrics, model: &str) -> Self {
        let model = KeyValue::new("gen_ai.request.model", model.to_owned());
        Self {
            factory: metrics.clone(),
            of_model: Arc::new(ModelInstruments::new(metrics, &[model])),
            of_nodes: Arc::new(NodesInstruments::new(metrics, &[])),
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

    /// Counts a request as waiting for a node until the guard is dropped. The guard records the
    /// time.
    pub fn request_waiting(&self) -> InFlightRequest {
        InFlightRequest::new(self, RequestState::Waiting)
    }

    /// Records the time from a request's arrival to its first token.
    pub fn first_token(&self, operation: Operation, after: Duration) {
        self.of_model.time_to_first_token.record(after.as_secs_f64(), operation);
    }

    /// Records the relative error of the predicted time to first token.
    pub fn ttft_predicted(&self, predicted: Duration, measured: Duration) {
        let error = predicted.abs_diff(measured).as_secs_f64() / measured.as_secs_f64().max(1e-6);
        self.of_model.ttft_prediction_error.record(error, ());
    }

    /// Records the time between two events of a request.
    pub fn next_tokens(&self, after: Duration) {
        self.of_model.inter_token_latency.record(after.as_secs_f64(), ());
    }

    pub fn request_ended(&self, request: &FinishedRequest) {
        let &FinishedRequest { operation, end, duration, .. } = request;
        let count = u64::from(request.completion_tokens);
        let is_complete = matches!(end, RequestEnd::Stop | RequestEnd::Length);
        let error = (!is_complete).then(|| KeyValue::new("error.type", end.as_str()));
        let of_model = &self.of_model;
        of_model.request_duration.record_with(duration.as_secs_f64(), operation, error.as_slice());
        of_model.finished.record(1, (operation, end));
        if let Some(first) = request.time_to_first_token.filter(|_| count > 1) {
            let rest = duration.saturating_sub(first).as_secs_f64();
            of_model.time_per_output_token.record(rest / (count - 1) as f64, operation);
        }
        for (of_type, tokens) in request.tokens() {
            of_model.tokens.record(tokens, (operation, of_type));
            if of_type != TokenType::InputCached {
                of_model.token_usage.record(tokens, (operation, of_type));
            }
        }
    }

    pub fn refused(&self, reason: RefusalReason) {
        self.of_model.refused.record(1, reason);
    }

    pub fn attempt_ended(&self, end: AttemptEndLabel) {
        self.of_model.attempts.record(1, end);
    }

    /// Records the outcome of an attempt for one of its nodes.
    pub fn node_attempt_ended(&self, role: NodeRole, end: AttemptEndLabel) {
        self.of_model.node_attempts.record(1, (role, end));
    }

    pub fn picked(&self, pick: PickDecision) {
        self.of_model.picks.record(1, pick);
    }

    /// Sets the number of nodes of a role, health and model. Call it for every combination at each
    /// change, also for 0.
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
        self.of_nodes.nodes.record_with(count as u64, (), &attributes);
    }

    pub fn set_excluded_nodes(&self, role: &'static str, count: usize) {
        self.of_nodes.excluded.record_with(count as u64, (), &[KeyValue::new("role", role)]);
    }

    pub fn node_excluded(&self, role: NodeRole, reason: Exclusion) {
        self.of_nodes.exclusions.record(1, (role, reason));
    }

    pub fn set_cached_blocks(&self, role: &'static str, count: usize) {
        self.of_nodes.cached_blocks.record_with(count as u64, (), &[KeyValue::new("role", role)]);
    }

    pub fn set_queue_time(&self, model: &str, role: &'static str, time: Duration) {
        let model = KeyValue::new("gen_ai.request.model", model.to_owned());
        let attributes = [model, KeyValue::new("role", role)];
        self.of_nodes.queue_time.record_with(time.as_secs_f64(), (), &attributes);
    }

    /// Records the time from the prefill node's token to the decode node's first token.
    pub fn hand_over(&self, gap: Duration) {
        self.of_model.hand_over.record(gap.as_secs_f64(), ());
    }

    /// Records a sequence that moved to another node, and how many of its tokens were computed
    /// again.
    pub fn sequence_moved(&self, tokens: u32, recomputed: u32) {
        self.of_model.moved_sequences.record(1, ());
        self.of_model.moved_tokens.record((tokens - recomputed).into(), MovedTokens::Sent);
        self.of_model.moved_tokens.record(recomputed.into(), MovedTokens::Recomputed);
    }

    pub fn transfer_delivered(&self, bytes: u64, duration: Duration) {
        self.of_model.transfer_bytes.record(bytes, ());
        self.of_model.transfer_duration.record(duration.as_secs_f64(), ());
    }
}

/// Guard of a request that runs or waits for a node.
pub struct InFlightRequest {
    metrics: Arc<ModelInstruments>,
    state: RequestState,
    since: Instant,
}

impl InFlightRequest {
    fn new(metrics: &RouterMetrics, state: RequestState) -> Self {
        metrics.of_model.requests.record(1, state);
        Self { metrics: metrics.of_model.clone(), state, since: Instant::now() }
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let Self { metrics, state, since } = self;
        metrics.requests.record(-1, *state);
        if *state == RequestState::Waiting {
            metrics.queue_time.record(since.elapsed().as_secs_f64(), ());
        }
    }
}
