//! The record of each request: one log line at its end, its metrics and its entry in the history.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant, SystemTime},
};

use cluster::{Considered, NoNode, Placement};
use proto::{ids::RequestId, v1::FinishReason};
use router_core::{AttemptOutcome, AttemptSide, EndedAttempt, FailureCause, HandOverStats};
use telemetry::{
    metrics::{
        AttemptEndLabel, FinishedRequest, InFlightRequest, NodeRole, Operation, PickDecision,
        RequestEnd,
    },
    propagation, spans,
};
use tracing::Span;

use crate::{
    front::{Front, ServedModel},
    history::{
        AttemptEntry, AttemptEntryEnd, RequestEntry, RequestEntryEnd, SharedEntry, SharedHistory,
        bounded,
    },
    keys::Caller,
    lock::lock,
    net::ConnectionState,
    request::error::RequestError,
    request_driver::{AnswerEnd, RequestDeadline},
};

/// Maximum length of a client's label.
const LABEL_CHARS_MAX: usize = 128;

/// Record of one request, logged and counted when dropped. If the request has neither failed nor
/// completed by then, its client disconnected, or its connection was closed because the client did
/// not read.
pub(crate) struct RequestRecord {
    /// The default model until the request's own model is known.
    model: Arc<ServedModel>,
    operation: Operation,
    request_id: RequestId,
    /// The client's label for the request.
    label: Option<String>,
    received: Instant,
    state: Mutex<RecordState>,
    entry: SharedEntry,
    history: SharedHistory,
    span: Span,
    /// The connection that the request arrived on.
    connection: ConnectionState,
    caller: Caller,
    counted: Mutex<CountedRequest>,
}

/// Counts a request as waiting while one of its answers waits for a node, otherwise as running.
struct CountedRequest {
    waiting_answers: u32,
    /// Changes the metrics when it is replaced or dropped.
    in_flight_guard: InFlightRequest,
}

/// An answer that waits for a node, until the guard is dropped.
pub(crate) struct WaitingAnswer<'a>(&'a RequestRecord);

impl Drop for WaitingAnswer<'_> {
    fn drop(&mut self) {
        let mut counted = lock(&self.0.counted);
        counted.waiting_answers -= 1;
        if counted.waiting_answers == 0 {
            counted.in_flight_guard = self.0.model.metrics.request_running();
        }
    }
}

#[derive(Default)]
struct RecordState {
    first_token: Option<Duration>,
    /// Predicted time from the request's arrival to the first token.
    predicted: Option<Duration>,
    last_event: Option<Instant>,
    completion_tokens: u32,
    cached_tokens: u32,
    hand_over: HandOverStats,
    choices: u32,
    prompt_tokens: u32,
    answers_ended: u32,
    /// Finish reasons of the ended answers.
    finish_reasons: Vec<&'static str>,
    cut_short: bool,
    error: Option<(RequestEnd, String)>,
}

impl RequestRecord {
    pub(crate) fn new(
        front: &Front,
        operation: Operation,
        request_id: RequestId,
        label: Option<String>,
        connection: ConnectionState,
        caller: Caller,
    ) -> Self {
        let (model, received) = (front.models.default_model(), Instant::now());
        let entry = RequestEntry {
            request_id,
            label: label.clone(),
            trace_id: None,
            api: operation.as_str().into(),
            model: model.name.clone(),
            received: front.history.time_of(received),
            received_at: SystemTime::now(),
            read: None,
            prepared: None,
            choices: 0,
            prompt_tokens: 0,
            attempts: Vec::new(),
            attempts_left_out: 0,
            waits_for: None,
            end: None,
        };
        let entry = Arc::new(Mutex::new(entry));
        front.history.lock().begin(request_id, entry.clone());
        Self {
            model: model.clone(),
            operation,
            request_id,
            label,
            received,
            state: Mutex::default(),
            entry,
            history: front.history.clone(),
            span: Span::none(),
            connection,
            caller,
            counted: Mutex::new(CountedRequest {
                waiting_answers: 0,
                in_flight_guard: model.metrics.request_running(),
            }),
        }
    }

    pub(crate) fn request_id(&self) -> RequestId {
        self.request_id
    }

    /// Sets the request's span. The request's log line belongs to this span.
    pub(crate) fn set_span(&mut self, span: Span) {
        lock(&self.entry).trace_id = propagation::trace_id(&span);
        self.span = span;
    }

    pub(crate) fn connection(&self) -> &ConnectionState {
        &self.connection
    }

    pub(crate) fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Returns the deadline of a request that may take this time. The time counts from the
    /// request's head, so a slow body uses it.
    pub(crate) fn deadline(&self, timeout: Duration) -> RequestDeadline {
        RequestDeadline { at: (self.received + timeout).into(), timeout }
    }

    pub(crate) fn span(&self) -> &Span {
        &self.span
    }

    pub(crate) fn set_label(&mut self, label: Option<String>) {
        lock(&self.entry).label.clone_from(&label);
        self.label = label;
    }

    /// Counts the request for this model from now on.
    pub(crate) fn set_model(&mut self, model: &Arc<ServedModel>) {
        if !Arc::ptr_eq(&self.model, model) {
            lock(&self.counted).in_flight_guard = model.metrics.request_running();
            self.model = model.clone();
            lock(&self.entry).model = model.name.clone();
        }
    }

    /// Counts an answer among those that wait for a node, until the guard is dropped.
    pub(crate) fn waiting_answer(&self) -> WaitingAnswer<'_> {
        let mut counted = lock(&self.counted);
        if counted.waiting_answers == 0 {
            counted.in_flight_guard = self.model.metrics.request_waiting();
        }
        counted.waiting_answers += 1;
        WaitingAnswer(self)
    }

    /// Records that the fields were read and checked.
    pub(crate) fn read(&self) {
        lock(&self.entry).read = Some(self.received.elapsed());
    }

    pub(crate) fn prepared(&self, choices: u32, prompt_tokens: u32) {
        self.caller.used_tokens(prompt_tokens);
        let mut state = self.state();
        (state.choices, state.prompt_tokens) = (choices, prompt_tokens);
        let mut entry = lock(&self.entry);
        (entry.choices, entry.prompt_tokens) = (choices, prompt_tokens);
        entry.prepared = Some(self.received.elapsed());
    }

    /// Records the start of an attempt. `ttft`: predicted time from the pick to the first token.
    /// `cached_expected`: tokens that the router believes to be cached on the prefill and the
    /// decode node.
    pub(crate) fn picked(
        &self,
        choice: u32,
        number: u32,
        considered: Considered,
        ttft: Option<Duration>,
        cached_expected: (Option<u32>, u32),
    ) {
        let picked = self.received.elapsed();
        let mut state = self.state();
        if state.first_token.is_none() {
            state.predicted = ttft.map(|ttft| picked + ttft);
        }
        drop(state);
        self.model.metrics.picked(pick(&considered));
        let mut entry = lock(&self.entry);
        let waited_for = entry.waits_for.take();
        entry.picked(AttemptEntry {
            choice,
            number,
            picked,
            waited_for,
            considered,
            predicted_ttft: ttft,
            cached_expected,
            first_token: None,
            hand_over: None,
            end: None,
        });
    }

    /// Records that a pick found no node.
    pub(crate) fn no_node(&self, reason: NoNode) {
        self.model.metrics.picked(no_pick(&reason));
        lock(&self.entry).waits_for = Some(reason);
    }

    /// Records the first token of an answer's open attempt.
    pub(crate) fn attempt_began(&self, choice: u32) {
        let after = self.received.elapsed();
        if let Some(attempt) = lock(&self.entry).open_attempt(choice) {
            attempt.first_token = Some(after);
        }
    }

    /// Records the time from token 0 to the decode node's first token.
    pub(crate) fn handed_over(&self, choice: u32, gap: Duration) {
        if let Some(attempt) = lock(&self.entry).open_attempt(choice) {
            attempt.hand_over = Some(gap);
        }
    }

    /// Records that tokens of an answer were emitted to the client.
    pub(crate) fn emitted(&self, count: u32) {
        // The token that carries pooled values is no output.
        let count = if self.is_pooled() { 0 } else { count };
        self.caller.used_tokens(count);
        let now = Instant::now();
        let mut state = self.state();
        state.completion_tokens += count;
        match state.last_event.replace(now) {
            Some(last) => self.model.metrics.next_tokens(now - last),
            None => {
                let after = now - self.received;
                state.first_token = Some(after);
                self.model.metrics.first_token(self.operation, after);
                if let Some(predicted) = state.predicted {
                    self.model.metrics.ttft_predicted(predicted, after);
                }
            }
        }
    }

    fn is_pooled(&self) -> bool {
        matches!(self.operation, Operation::Embeddings | Operation::Rerank)
    }

    pub(crate) fn answer_ended(&self, end: &AnswerEnd) {
        let mut state = self.state();
        state.cached_tokens += end.cached_tokens;
        state.hand_over.add(&end.hand_over);
        state.answers_ended += 1;
        state.cut_short |= end.reason == FinishReason::Length && !self.is_pooled();
        state.finish_reasons.push(match end.reason {
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            _ => "stop",
        });
    }

    pub(crate) fn attempt_ended(
        &self,
        choice: u32,
        ended: &EndedAttempt,
        has_prefill: bool,
    ) -> AttemptEndLabel {
        if ended.stats.kv_bytes > 0 {
            let duration = Duration::from_micros(ended.stats.transfer_us);
            self.model.metrics.transfer_delivered(ended.stats.kv_bytes, duration);
        }
        if ended.stats.moved_tokens > 0 {
            // The KV of the last token was not computed before.
            let tokens = ended.stats.moved_tokens - 1;
            let recomputed = tokens.saturating_sub(ended.stats.cached_tokens);
            self.model.metrics.sequence_moved(tokens, recomputed);
        }
        let end = match &ended.outcome {
            AttemptOutcome::Complete
            | AttemptOutcome::AlreadyComplete
            | AttemptOutcome::Aborted => AttemptEndLabel::Complete,
            AttemptOutcome::Cancelled => AttemptEndLabel::Cancelled,
            AttemptOutcome::Paused => AttemptEndLabel::Paused,
            AttemptOutcome::Failed(failure) => match (failure.cause, failure.side) {
                (FailureCause::Busy, _) => AttemptEndLabel::Busy,
                (FailureCause::Lost | FailureCause::Draining, AttemptSide::Prefill) => {
                    AttemptEndLabel::PrefillLost
                }
                (FailureCause::Lost | FailureCause::Draining, AttemptSide::Decode) => {
                    AttemptEndLabel::DecodeLost
                }
                (FailureCause::TransferFailed, _) => AttemptEndLabel::TransferFailed,
                (
                    FailureCause::Mismatch
                    | FailureCause::Stale
                    | FailureCause::OtherWeights
                    | FailureCause::WeightsChanged,
                    _,
                ) => AttemptEndLabel::Mismatch,
                (FailureCause::Migrated, _) => AttemptEndLabel::Migrated,
                (FailureCause::Deadline, _) => AttemptEndLabel::Deadline,
                (FailureCause::SlowReader, _) => AttemptEndLabel::Paused,
                _ => AttemptEndLabel::Internal,
            },
        };
        self.model.metrics.attempt_ended(end);
        let decode = (NodeRole::Decode, AttemptSide::Decode);
        let prefill = has_prefill.then_some((NodeRole::Prefill, AttemptSide::Prefill));
        for (role, side) in [decode].into_iter().chain(prefill) {
            // A failure of one node cancels the attempt on the other.
            let of_node = match &ended.outcome {
                AttemptOutcome::Failed(failure) if failure.side != side => {
                    AttemptEndLabel::Cancelled
                }
                _ => end,
            };
            self.model.metrics.node_attempt_ended(role, of_node);
        }
        let at = self.received.elapsed();
        if let Some(attempt) = lock(&self.entry).open_attempt(choice) {
            let failure = match &ended.outcome {
                AttemptOutcome::Failed(failure) => Some(bounded(failure.to_string())),
                AttemptOutcome::Complete
                | AttemptOutcome::AlreadyComplete
                | AttemptOutcome::Aborted
                | AttemptOutcome::Paused
                | AttemptOutcome::Cancelled => None,
            };
            let (outcome, stats) = (end.as_str().into(), ended.stats);
            attempt.end = Some(AttemptEntryEnd { at, outcome, failure, stats });
        }
        end
    }

    pub(crate) fn failed(&self, error: &RequestError) {
        if let Some(refusal) = error.refusal() {
            self.model.metrics.refused(refusal);
        }
        self.rejected(error.status().end, &error.to_string());
    }

    /// Records a request that was rejected before it was parsed completely.
    pub(crate) fn rejected(&self, end: RequestEnd, reason: &str) {
        // The reason may quote the client.
        self.state().error = Some((end, bounded(reason.to_owned())));
    }

    fn state(&self) -> MutexGuard<'_, RecordState> {
        lock(&self.state)
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        let duration = self.received.elapsed();
        let state = std::mem::take(&mut *self.state());
        let (choices, prompt_tokens) = (state.choices, state.prompt_tokens);
        let left = match self.connection.is_unread() {
            true => RequestEnd::SlowClient,
            false => RequestEnd::ClientGone,
        };
        let end = match &state.error {
            Some((RequestEnd::ClientGone, _)) => left,
            Some((end, _)) => *end,
            None if choices == 0 || state.answers_ended < choices => left,
            // One answer that reached its maximum length gives the whole request this end.
            None if state.cut_short => RequestEnd::Length,
            None => RequestEnd::Stop,
        };
        let finished = FinishedRequest {
            operation: self.operation,
            end,
            duration,
            time_to_first_token: state.first_token,
            prompt_tokens,
            completion_tokens: state.completion_tokens,
            cached_tokens: state.cached_tokens,
        };
        self.model.metrics.request_ended(&finished);
        self.caller.request_ended(&finished);
        spans::request_ended(&self.span, &self.model.name, &finished, &state.finish_reasons);
        lock(&self.entry).end = Some(RequestEntryEnd {
            at: duration,
            reason: end.as_str().into(),
            is_complete: matches!(end, RequestEnd::Stop | RequestEnd::Length),
            error: state.error.as_ref().map(|(_, error)| error.clone()),
            first_token: state.first_token,
            completion_tokens: state.completion_tokens,
        });
        self.history.lock().end(self.request_id);
        // The end of an exported span is the time at which the span was last left, so enter and
        // leave it now.
        let _entered = self.span.enter();
        // An enabled span already has these fields.
        let no_span = self.span.is_disabled();
        tracing::info!(
            parent: &self.span,
            request_id = no_span.then(|| tracing::field::display(self.request_id)),
            label = self.label.as_deref().filter(|_| no_span),
            api = no_span.then(|| self.operation.as_str()),
            model = &*self.model.name,
            key = self.caller.name(),
            end = end.as_str(),
            error = state.error.as_ref().map(|(_, error)| error.as_str()),
            choices = spans::integer(choices),
            prompt_tokens = spans::integer(prompt_tokens),
            cached_tokens = spans::integer(state.cached_tokens),
            completion_tokens = spans::integer(state.completion_tokens),
            attempts = spans::integer(state.hand_over.attempts),
            kv_bytes = spans::integer(state.hand_over.kv_bytes),
            prefill_node = state.hand_over.prefill_node,
            decode_node = state.hand_over.decode_node,
            predicted_ttft_ms = state.predicted.map(milliseconds),
            ttft_ms = state.first_token.map(milliseconds),
            duration_ms = milliseconds(duration),
            "request ended"
        );
    }
}

/// Returns the metric's label of a pick.
fn pick(considered: &Considered) -> PickDecision {
    let is_disaggregated =
        considered.options.first().is_some_and(|chosen| chosen.prefill.is_some());
    match &considered.placement {
        Placement::Always => PickDecision::DisaggregatedAlways,
        Placement::Headroom => PickDecision::DisaggregatedHeadroom,
        Placement::Moved => PickDecision::DisaggregatedMoved,
        Placement::Unmeasured => PickDecision::DisaggregatedUnmeasured,
        Placement::Predicted { .. } if is_disaggregated => PickDecision::DisaggregatedPredicted,
        Placement::Predicted { .. } => PickDecision::LocalPredicted,
        Placement::Never => PickDecision::LocalNever,
        Placement::AfterFailure => PickDecision::LocalAfterFailure,
        Placement::Pooled => PickDecision::LocalPooled,
        Placement::ShortPrompt { .. } => PickDecision::LocalShortPrompt,
        Placement::NoPartner | Placement::NoPrefillNode(NoNode::NoneFits { .. }) => {
            PickDecision::LocalNoPartner
        }
        Placement::NoPrefillNode(NoNode::Busy { .. }) => PickDecision::LocalBusy,
        Placement::TransfersFail | Placement::NoPrefillNode(NoNode::Broken { .. }) => {
            PickDecision::LocalCircuitBreaker
        }
        Placement::NoPrefillNode(_) => PickDecision::LocalNoPrefillNode,
    }
}

/// Returns the metric's label of a pick that found no decode node.
fn no_pick(reason: &NoNode) -> PickDecision {
    match reason {
        NoNode::Busy { .. } => PickDecision::NoneBusy,
        NoNode::NoneFits { .. } => PickDecision::NoneNoPartner,
        NoNode::Excluded { .. } | NoNode::Broken { .. } => PickDecision::NoneExcluded,
        NoNode::TooLong { .. }
        | NoNode::NoGrammar { .. }
        | NoNode::NoPooling { .. }
        | NoNode::NoAdapter { .. }
        | NoNode::NoSampling { .. } => PickDecision::NoneUnfit,
        NoNode::NoneListed { .. }
        | NoNode::OtherModel { .. }
        | NoNode::NoneUp { .. }
        | NoNode::Draining { .. } => PickDecision::NoneNoDecodeNode,
    }
}

/// Returns whole microseconds in milliseconds: at most three decimals in a log line.
pub(crate) fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

/// Returns a client's label for headers and log lines: visible ASCII of bounded length; `None` if
/// nothing is left. Labels need not be unique.
pub(crate) fn label(text: &str) -> Option<String> {
    let label: String = text.chars().filter(char::is_ascii_graphic).take(LABEL_CHARS_MAX).collect();
    (!label.is_empty()).then_some(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pick_without_a_partner_is_not_one_without_a_prefill_node() {
        let considered = |placement| Considered {
            placement,
            options: Vec::new(),
            options_left_out: 0,
            ineligible: Vec::new(),
            ineligible_left_out: 0,
            overhead_ms: 0.0,
        };
        let role = cluster::Role::Prefill;
        let none_fits = Placement::NoPrefillNode(NoNode::NoneFits { role });
        assert_eq!(pick(&considered(none_fits)), PickDecision::LocalNoPartner);
        assert_eq!(pick(&considered(Placement::NoPartner)), PickDecision::LocalNoPartner);
        let none_listed = Placement::NoPrefillNode(NoNode::NoneListed { role });
        assert_eq!(pick(&considered(none_listed)), PickDecision::LocalNoPrefillNode);
        assert_eq!(no_pick(&NoNode::NoneFits { role }), PickDecision::NoneNoPartner);
    }

    #[test]
    fn labels_are_visible_and_bounded() {
        assert_eq!(label("req-1").as_deref(), Some("req-1"));
        assert_eq!(label("a\r\nb: c\u{7f}é").as_deref(), Some("ab:c"));
        assert_eq!(label("\n\t ").as_deref(), None);
        assert_eq!(label(&"x".repeat(4000)).unwrap().len(), LABEL_CHARS_MAX);
    }
}
