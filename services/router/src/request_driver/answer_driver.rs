//! Drives the request core of one answer with tonic streams, tokio timers, spans and metrics.
//!
//! [`AnswerDriver::run`] performs the core's outputs and passes it the next input, until the answer is
//! complete or failed. Every decision is the core's.

use std::time::{Duration, Instant};

use proto::v1::{DecodeEvent, PrefillEvent};
use telemetry::metrics::AttemptEnd;
use tokio::sync::watch;
use tracing::{Span, field};

use super::{
    answer_text::AnswerText,
    node_calls::{self, NodeStream},
    prepare::{PreparedAnswer, PreparedRequest},
};
use crate::{
    admission::Waiting,
    front::Front,
    generation::{AnswerEnd, AnswerTokens, Event, EventSender, RequestError},
    nodes::Assigned,
    record::RequestRecord,
    request::ids::TransferId,
    request_core::{
        AnswerSpec, AttemptFailure, AttemptOutcome, Cause, EndedAttempt, FinishedAnswer, GiveUp,
        Output, RequestCore, Side,
    },
};

/// One answer in flight.
pub struct AnswerDriver<'a> {
    front: &'a Front,
    request: &'a PreparedRequest,
    answer: PreparedAnswer,
    events: &'a EventSender,
    record: &'a RequestRecord,
    core: RequestCore,
    text: AnswerText,
    /// The picked nodes, from the pick until the attempt ends.
    nodes: Option<(Assigned, Option<Assigned>)>,
    calls: Option<OpenCalls>,
    waiting: Option<Waiting>,
    node_changes: watch::Receiver<u64>,
}

/// The calls of the open attempt.
struct OpenCalls {
    decode: NodeStream<DecodeEvent>,
    prefill: Option<NodeStream<PrefillEvent>>,
    span: Span,
}

impl<'a> AnswerDriver<'a> {
    pub fn new(
        front: &'a Front,
        request: &'a PreparedRequest,
        answer: PreparedAnswer,
        events: &'a EventSender,
        record: &'a RequestRecord,
    ) -> Self {
        let spec = AnswerSpec {
            model: Some(request.model.name.clone()),
            prompt_tokens: answer.prompt.len() as u32,
            prefix: answer.prefix.clone(),
            grammar_version: request.grammar_version,
            max_tokens: answer.sampling.max_tokens,
            vocabulary_size: request.limits.vocabulary_size,
            deadline: request.deadline.at.into_std(),
        };
        Self {
            core: RequestCore::new(spec, front.recovery_policy()),
            text: AnswerText::new(&request.text, &answer.sampling),
            nodes: None,
            calls: None,
            waiting: None,
            node_changes: front.nodes.changes(),
            front,
            request,
            answer,
            events,
            record,
        }
    }

    pub async fn run(mut self) -> Result<(), RequestError> {
        self.core.start(Instant::now(), self.request.model.waiting.has_queue());
        loop {
            while let Some(output) = self.core.poll_output() {
                match output {
                    Output::Finish(finished) => return self.finish(finished).await,
                    output => self.perform(output).await?,
                }
            }
            self.next_input().await;
        }
    }

    async fn perform(&mut self, output: Output) -> Result<(), RequestError> {
        match output {
            Output::Pick => self.pick()?,
            Output::OpenCalls { transfer_id, number } => self.open_calls(transfer_id, number),
            Output::DropPrefillCall => {
                if let Some(calls) = &mut self.calls {
                    calls.prefill = None;
                }
            }
            Output::EndAttempt(ended) => self.end_attempt(&ended),
            Output::Emit { first_index, tokens, hand_over_gap } => {
                hand_over_gap.inspect(|gap| self.request.model.metrics.hand_over(*gap));
                let emitted = self.text.push(tokens);
                if !emitted.tokens.is_empty() {
                    self.record.emitted(emitted.tokens.len() as u32);
                    let (choice, tokens, text) = (self.answer.choice, emitted.tokens, emitted.text);
                    let event = Event::Tokens(AnswerTokens { choice, first_index, tokens, text });
                    let sent = self.events.send(event);
                    match tokio::time::timeout_at(self.request.deadline.at, sent).await {
                        Ok(sent) => sent?,
                        Err(_) => {
                            self.core.handle_deadline(Instant::now(), |_| None);
                            return Ok(());
                        }
                    }
                }
                self.core.handle_emitted(Instant::now(), self.text.stop());
            }
            Output::WaitForTurn => self.waiting_place()?.queue(),
            Output::WaitForNode => self.waiting_place()?.leave_queue(),
            Output::StopWaiting => self.waiting = None,
            Output::Fail(reason) => return Err(self.error(reason)),
            Output::Finish(_) => unreachable!("`run` performs it"),
        }
        Ok(())
    }

    /// Waits for the next input of the core.
    async fn next_input(&mut self) {
        let Self { core, calls, nodes, waiting, node_changes, .. } = self;
        let (decode_events, prefill_events) = match calls {
            Some(OpenCalls { decode, prefill, .. }) => (Some(decode), prefill.as_mut()),
            None => (None, None),
        };
        let (decode, prefill) = match nodes {
            Some((decode, prefill)) => (Some(&*decode), prefill.as_ref()),
            None => (None, None),
        };
        let deadline = core.next_deadline().expect("a request that has not ended has a deadline");
        tokio::select! {
            // The decode node first: once it sends tokens, the prefill node no longer matters.
            biased;
            event = node_calls::next_of(decode_events), if core.expects_decode() => match event {
                Ok(Some(DecodeEvent { event })) => {
                    decode.inspect(|node| node.answered());
                    core.handle_decode_event(Instant::now(), event);
                }
                end => core.handle_stream_end(Instant::now(), stream_end(Side::Decode, end)),
            },
            event = node_calls::next_of(prefill_events), if core.expects_prefill() => match event {
                Ok(Some(PrefillEvent { event })) => {
                    prefill.inspect(|node| node.answered());
                    core.handle_prefill_event(Instant::now(), event);
                }
                end => core.handle_stream_end(Instant::now(), stream_end(Side::Prefill, end)),
            },
            () = turn(waiting), if core.expects_turn() => core.handle_turn(Instant::now()),
            // Fails only without a sender, and `front` holds it.
            _ = node_changes.changed(), if core.expects_node() => {
                core.handle_nodes_changed(Instant::now());
            }
            () = tokio::time::sleep_until(deadline.into()) => {
                core.handle_deadline(Instant::now(), |side| match side {
                    Side::Decode => decode?.changed_at(),
                    Side::Prefill => prefill?.changed_at(),
                });
            }
        }
    }

    fn pick(&mut self) -> Result<(), RequestError> {
        // A change from here on ends the wait for a node.
        self.node_changes.mark_unchanged();
        let nodes = &self.front.nodes;
        match nodes.pick(&self.core.wanted_decode()) {
            Ok(decode) => {
                let prefill = self
                    .core
                    .wanted_prefill(decode.record())
                    .and_then(|wanted| nodes.pick(&wanted).ok());
                let prefill_record = prefill.as_ref().map(|node| node.record().clone());
                let decode_record = decode.record().clone();
                self.nodes = Some((decode, prefill));
                let transfer_id = TransferId::mint()
                    .map_err(|error| RequestError::Internal { reason: error.to_string() })?;
                let now = Instant::now();
                self.core.handle_picked(now, transfer_id, decode_record, prefill_record);
            }
            Err(reason) => {
                tracing::debug!(%reason, "no decode node for the request");
                self.core.handle_no_node(Instant::now(), &reason);
            }
        }
        Ok(())
    }

    fn open_calls(&mut self, transfer_id: TransferId, number: u32) {
        let (decode, prefill) = self.nodes.as_ref().expect("nodes were picked");
        let span = tracing::info_span!(
            "attempt",
            choice = self.answer.choice,
            number,
            %transfer_id,
            decode_node = %decode.record().node_id,
            prefill_node = prefill.as_ref().map(|node| field::display(&node.record().node_id)),
            outcome = field::Empty,
        );
        let attempt = |node: &Assigned| {
            let emitted = self.core.emitted();
            node_calls::attempt_for(node, transfer_id, self.request, &self.answer, emitted)
        };
        let decode_stream = node_calls::decode(decode, prefill.as_ref(), attempt(decode), &span);
        let prefill_stream = prefill
            .as_ref()
            .map(|prefill| node_calls::prefill(prefill, decode, attempt(prefill), &span));
        self.calls = Some(OpenCalls { decode: decode_stream, prefill: prefill_stream, span });
    }

    /// Drops the calls, releases the nodes and counts the attempt.
    fn end_attempt(&mut self, ended: &EndedAttempt) {
        let (Some(calls), Some((decode, prefill))) = (self.calls.take(), self.nodes.take()) else {
            return;
        };
        let OpenCalls { decode: decode_stream, prefill: prefill_stream, span } = calls;
        // Dropping a stream cancels its call.
        drop((decode_stream, prefill_stream));
        let metrics = &self.request.model.metrics;
        if ended.stats.kv_bytes > 0 {
            let duration = Duration::from_micros(ended.stats.transfer_us);
            metrics.transfer_delivered(ended.stats.kv_bytes, duration);
        }
        let end = attempt_end(&ended.outcome);
        metrics.attempt_ended(end);
        span.record("outcome", end.as_str());
        let AttemptOutcome::Failed(failure) = &ended.outcome else { return };
        let node = match (failure.side, &prefill) {
            (Side::Prefill, Some(prefill)) => prefill,
            (Side::Prefill, None) | (Side::Decode, _) => &decode,
        };
        let node_id = &node.record().node_id;
        span.in_scope(|| match failure.cause {
            Cause::Busy => {
                node.busy(None);
                tracing::debug!(%node_id, reason = failure.message, "node is busy");
            }
            Cause::Lost | Cause::Stale => {
                node.lost(failure.message.clone());
                tracing::warn!(%node_id, %failure, "attempt failed");
            }
            _ => tracing::warn!(%node_id, %failure, "attempt failed"),
        });
    }

    /// Sends the rest of the text and the statistics.
    async fn finish(&mut self, finished: FinishedAnswer) -> Result<(), RequestError> {
        let text = self.text.finish(finished.reason);
        let end = AnswerEnd {
            choice: self.answer.choice,
            reason: text.reason,
            stopped_by: text.stopped_by,
            text: text.text,
            prompt_tokens: self.answer.prompt.len() as u32,
            completion_tokens: text.completion_tokens,
            cached_tokens: finished.cached_tokens,
            hand_over: finished.hand_over,
        };
        self.record.answer_ended(&end);
        let sent = self.events.send(Event::Finished(end));
        let timeout = self.request.deadline.timeout;
        tokio::time::timeout_at(self.request.deadline.at, sent)
            .await
            .map_err(|_| RequestError::Deadline { timeout })?
    }

    /// Returns the request's place in the waiting room. A request that has emitted tokens always finds a
    /// place: it is bounded by the requests in flight, and rejecting it would cut its answer.
    fn waiting_place(&mut self) -> Result<&mut Waiting, RequestError> {
        let model = &self.request.model;
        Ok(match &mut self.waiting {
            Some(waiting) => waiting,
            none => {
                let has_begun = !self.core.emitted().is_empty();
                none.insert(model.waiting.enter(&model.metrics, has_begun)?)
            }
        })
    }

    fn error(&self, reason: GiveUp) -> RequestError {
        let timeout = self.request.deadline.timeout;
        match reason {
            GiveUp::AttemptsSpent { attempts, last } => {
                RequestError::AttemptsSpent { attempts, last: last.to_string() }
            }
            GiveUp::Busy { waited } => RequestError::Busy { waited },
            GiveUp::NoDecodeNode { waited } => RequestError::NoDecodeNode { waited },
            GiveUp::Deadline => RequestError::Deadline { timeout },
            GiveUp::Final(failure) => match failure.cause {
                Cause::Deadline => RequestError::Deadline { timeout },
                // The node's queue filled because the router's did, and the router's because the client
                // did not read.
                Cause::SlowReader => {
                    RequestError::SlowClient { waited: self.front.settings.slow_client_timeout }
                }
                Cause::Contradiction => RequestError::Contradiction { reason: failure.message },
                _ => RequestError::Refused { reason: failure.message },
            },
        }
    }
}

/// Counts the open attempt when the client leaves or another answer of the request fails.
impl Drop for AnswerDriver<'_> {
    fn drop(&mut self) {
        self.core.handle_client_left();
        while let Some(output) = self.core.poll_output() {
            if let Output::EndAttempt(ended) = output {
                self.end_attempt(&ended);
            }
        }
    }
}

async fn turn(waiting: &mut Option<Waiting>) {
    match waiting {
        Some(waiting) => waiting.turn().await,
        None => std::future::pending().await,
    }
}

fn stream_end<E>(side: Side, end: Result<Option<E>, tonic::Status>) -> AttemptFailure {
    match end {
        Ok(_) => AttemptFailure::cut(side),
        Err(status) => AttemptFailure::status(side, &status),
    }
}

fn attempt_end(outcome: &AttemptOutcome) -> AttemptEnd {
    let failure = match outcome {
        AttemptOutcome::Complete => return AttemptEnd::Complete,
        AttemptOutcome::Cancelled => return AttemptEnd::Cancelled,
        AttemptOutcome::Failed(failure) => failure,
    };
    match (failure.cause, failure.side) {
        (Cause::Busy, _) => AttemptEnd::Busy,
        (Cause::Lost | Cause::Draining, Side::Prefill) => AttemptEnd::PrefillLost,
        (Cause::Lost | Cause::Draining, Side::Decode) => AttemptEnd::DecodeLost,
        (Cause::TransferFailed, _) => AttemptEnd::TransferFailed,
        (Cause::Mismatch | Cause::Stale, _) => AttemptEnd::Mismatch,
        (Cause::Deadline, _) => AttemptEnd::Deadline,
        (Cause::SlowReader, _) => AttemptEnd::Cancelled,
        (
            Cause::Duplicate
            | Cause::Internal
            | Cause::Invalid
            | Cause::Violation
            | Cause::Contradiction,
            _,
        ) => AttemptEnd::Internal,
    }
}
