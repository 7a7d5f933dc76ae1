//! The record of each request: one log line at its end, and its metrics.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use proto::{ids::RequestId, v1::FinishReason};
use telemetry::metrics::{AttemptEnd, FinishedRequest, InFlightRequest, Operation, RequestEnd};
use tracing::Span;

use crate::{
    front::ServedModel,
    net::ConnectionEnd,
    request::error::RequestError,
    request_core::{AttemptOutcome, Cause, EndedAttempt, HandOverStats, Side},
    request_driver::AnswerEnd,
};

/// Maximum length of a client's label.
const LABEL_CHARS_MAX: usize = 128;

/// Record of one request, logged and counted when dropped. If the request has neither failed nor completed by
/// then, its client left, or its connection was closed because the client did not read.
pub struct RequestRecord {
    /// The default model until the request's own model is known.
    model: Arc<ServedModel>,
    operation: Operation,
    request_id: RequestId,
    /// The client's label for the request.
    label: Option<String>,
    received: Instant,
    state: Mutex<State>,
    span: Span,
    /// The connection that the request arrived on.
    connection: ConnectionEnd,
    _running: InFlightRequest,
}

#[derive(Default)]
struct State {
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
    cut_short: bool,
    error: Option<(RequestEnd, String)>,
}

impl RequestRecord {
    pub fn new(
        model: &Arc<ServedModel>,
        operation: Operation,
        request_id: RequestId,
        label: Option<String>,
        connection: ConnectionEnd,
    ) -> Self {
        Self {
            model: model.clone(),
            operation,
            request_id,
            label,
            received: Instant::now(),
            state: Mutex::default(),
            span: Span::none(),
            connection,
            _running: model.metrics.request_running(),
        }
    }

    pub fn request_id(&self) -> RequestId {
        self.request_id
    }

    /// Sets the span of the request, whose log line belongs to it.
    pub fn set_span(&mut self, span: Span) {
        self.span = span;
    }

    pub fn span(&self) -> &Span {
        &self.span
    }

    pub fn set_label(&mut self, label: Option<String>) {
        self.label = label;
    }

    /// Counts the request for this model from now on.
    pub fn set_model(&mut self, model: &Arc<ServedModel>) {
        if !Arc::ptr_eq(&self.model, model) {
            self._running = model.metrics.request_running();
            self.model = model.clone();
        }
    }

    pub fn prepared(&self, choices: u32, prompt_tokens: u32) {
        let mut state = self.state();
        (state.choices, state.prompt_tokens) = (choices, prompt_tokens);
    }

    /// Stores the predicted time from the pick to the first token, unless the first token was sent.
    pub fn predicted(&self, ttft: Option<Duration>) {
        let mut state = self.state();
        if state.first_token.is_none() {
            state.predicted = ttft.map(|ttft| self.received.elapsed() + ttft);
        }
    }

    /// Records that tokens of an answer were emitted to the client.
    pub fn emitted(&self, count: u32) {
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

    pub fn answer_ended(&self, end: &AnswerEnd) {
        let mut state = self.state();
        state.cached_tokens += end.cached_tokens;
        state.hand_over.add(&end.hand_over);
        state.answers_ended += 1;
        state.cut_short |= end.reason == FinishReason::Length;
    }

    pub fn attempt_ended(&self, ended: &EndedAttempt) -> AttemptEnd {
        if ended.stats.kv_bytes > 0 {
            let duration = Duration::from_micros(ended.stats.transfer_us);
            self.model.metrics.transfer_delivered(ended.stats.kv_bytes, duration);
        }
        let end = match &ended.outcome {
            AttemptOutcome::Complete => AttemptEnd::Complete,
            AttemptOutcome::Cancelled => AttemptEnd::Cancelled,
            AttemptOutcome::Failed(failure) => match (failure.cause, failure.side) {
                (Cause::Busy, _) => AttemptEnd::Busy,
                (Cause::Lost | Cause::Draining, Side::Prefill) => AttemptEnd::PrefillLost,
                (Cause::Lost | Cause::Draining, Side::Decode) => AttemptEnd::DecodeLost,
                (Cause::TransferFailed, _) => AttemptEnd::TransferFailed,
                (Cause::Mismatch | Cause::Stale, _) => AttemptEnd::Mismatch,
                (Cause::Deadline, _) => AttemptEnd::Deadline,
                (Cause::SlowReader, _) => AttemptEnd::Cancelled,
                _ => AttemptEnd::Internal,
            },
        };
        self.model.metrics.attempt_ended(end);
        end
    }

    pub fn failed(&self, error: &RequestError) {
        self.rejected(error.report().end, &error.to_string());
    }

    /// Records a request that was rejected before it was parsed completely.
    pub fn rejected(&self, end: RequestEnd, reason: &str) {
        self.state().error = Some((end, reason.to_owned()));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|error| error.into_inner())
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
            // One answer of maximum length makes the whole request one.
            None if state.cut_short => RequestEnd::Length,
            None => RequestEnd::Stop,
        };
        self.model.metrics.request_ended(&FinishedRequest {
            operation: self.operation,
            end,
            duration,
            time_to_first_token: state.first_token,
            prompt_tokens,
            completion_tokens: state.completion_tokens,
            cached_tokens: state.cached_tokens,
        });
        // The end of an exported span is the time at which the span was last left, so enter and leave it now.
        let _entered = self.span.enter();
        // The span has these fields, if there is one.
        let no_span = self.span.is_disabled();
        tracing::info!(
            parent: &self.span,
            request_id = no_span.then(|| tracing::field::display(self.request_id)),
            label = self.label.as_deref().filter(|_| no_span),
            api = no_span.then(|| self.operation.as_str()),
            model = &*self.model.name,
            end = end.as_str(),
            error = state.error.as_ref().map(|(_, error)| error.as_str()),
            choices,
            prompt_tokens,
            cached_tokens = state.cached_tokens,
            completion_tokens = state.completion_tokens,
            attempts = state.hand_over.attempts,
            kv_bytes = state.hand_over.kv_bytes,
            prefill_node = state.hand_over.prefill_node,
            decode_node = state.hand_over.decode_node,
            predicted_ttft_ms = state.predicted.map(milliseconds),
            ttft_ms = state.first_token.map(milliseconds),
            duration_ms = milliseconds(duration),
            "request ended"
        );
    }
}

/// Returns whole microseconds in milliseconds: at most three decimals in a log line.
fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

/// Returns a client's label for headers and log lines: visible ASCII of bounded length; `None` if nothing is
/// left. The label is never a key.
pub fn label(text: &str) -> Option<String> {
    let label: String = text.chars().filter(char::is_ascii_graphic).take(LABEL_CHARS_MAX).collect();
    (!label.is_empty()).then_some(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_visible_and_bounded() {
        assert_eq!(label("req-1").as_deref(), Some("req-1"));
        assert_eq!(label("a\r\nb: c\u{7f}é").as_deref(), Some("ab:c"));
        assert_eq!(label("\n\t ").as_deref(), None);
        assert_eq!(label(&"x".repeat(4000)).unwrap().len(), LABEL_CHARS_MAX);
    }
}
