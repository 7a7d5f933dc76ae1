//! Drives the core of one answer with tonic streams, tokio timers, spans and metrics.
//!
//! [`AnswerDriver::run`] performs the core's outputs and passes it the next input, until the answer
//! is complete or failed. The core makes every decision.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use proto::{
    ids::TransferId,
    v1::{DecodeEvent, FinishReason, PrefillEvent, Sampling, Token},
};
use router_core::{
    AnswerCore, AnswerOutput, AnswerSpec, AttemptOutcome, AttemptSide, EndedAttempt, FailureCause,
    FinishedAnswer, NodeFeedback, RecoveryPolicy, StartedAttempt, StopCause,
};
use telemetry::{metrics::KeyWaiting, spans};
use text::{TextStream, TextStreamOptions, Tokenizer};
use tokio::{
    sync::{Notify, watch},
    time::timeout_at,
};
use tracing::{Span, field};

use super::{
    PreparedRequest,
    events::{AnswerEnd, AnswerEvent, AnswerTokens, EventSender, StopReason},
};
use crate::{
    front::Front,
    nodes::{CallMessage, NodeCall, next_message},
    record::{RequestRecord, WaitingAnswer},
    request::{answer_reader::AnswerReading, error::RequestError},
    wake::MovingTimer,
};

/// Time that a client has to read half of its full buffer before its attempt ends. Short, because
/// the tokens that nodes generate in this time are generated again later.
const STALLED_AFTER: Duration = Duration::from_millis(500);

/// One answer in flight.
pub(super) struct AnswerDriver<'a> {
    front: &'a Front,
    request: &'a PreparedRequest,
    choice: u32,
    events: &'a EventSender,
    record: &'a RequestRecord,
    core: AnswerCore,
    text: AnswerText,
    attempt: Option<OpenNodeCalls>,
    /// Decode call of the ended attempt whose draining node sends the KV to the next attempt. Open
    /// until the node has accepted the Prefill call: without calls the node would exit. A call that
    /// stayed open would decode the rest of the answer on the draining node.
    moving: Option<NodeCall<DecodeEvent>>,
    /// Counts the answer among those that wait for a node.
    waiting: Option<(WaitingAnswer<'a>, Option<KeyWaiting>)>,
    /// Wakes the answer, for example when its turn has come.
    woken: Arc<Notify>,
    node_changes: watch::Receiver<u64>,
    timer: MovingTimer,
    /// Time at which the client's buffer became full; `None` once the client has read half of it. A
    /// client that reads slowly frees a few events at a time, so a free place does not clear it.
    full_since: Option<Instant>,
}

/// The calls of the open attempt.
struct OpenNodeCalls {
    decode: NodeCall<DecodeEvent>,
    prefill: Option<NodeCall<PrefillEvent>>,
    /// Whether the client received a token of this attempt.
    has_token: bool,
    span: Span,
}

impl<'a> AnswerDriver<'a> {
    pub(super) fn new(
        front: &'a Front,
        request: &'a PreparedRequest,
        choice: u32,
        answer: AnswerSpec,
        events: &'a EventSender,
        record: &'a RequestRecord,
    ) -> Self {
        let text = AnswerText::new(request, &answer.sampling);
        let policy = RecoveryPolicy::from(&front.settings.router);
        let (flow, mut router) = (request.flow.clone(), &front.router);
        let core = AnswerCore::start(Instant::now(), &mut router, flow, answer, policy);
        Self {
            text,
            attempt: None,
            moving: None,
            waiting: None,
            woken: front.router.register(core.id()),
            core,
            node_changes: front.nodes.changes(),
            timer: MovingTimer::new(request.deadline.at),
            full_since: None,
            front,
            request,
            choice,
            events,
            record,
        }
    }

    pub(super) async fn run(mut self) -> Result<(), RequestError> {
        loop {
            while let Some(output) = self.poll_output() {
                match output {
                    AnswerOutput::Pick => self.pick()?,
                    AnswerOutput::DropPrefillCall => {
                        self.moving = None;
                        if let Some(attempt) = &mut self.attempt {
                            attempt.prefill = None;
                        }
                    }
                    AnswerOutput::EndAttempt { ended, failed_node, has_prefill } => {
                        let node = failed_node.as_deref().map(|node| node.node_id.to_string());
                        self.end_attempt(&ended, node, has_prefill);
                    }
                    AnswerOutput::Emit { first_index, tokens, hand_over_gap } => {
                        self.begin_emit(hand_over_gap);
                        self.emit(first_index, tokens).await?;
                    }
                    AnswerOutput::Finish(finished) => {
                        let mut end = self.text.finish(self.choice, finished);
                        self.record.answer_ended(&end);
                        if self.request.prompt_only {
                            // The limit of 0 tokens ends an answer without tokens.
                            end.reason = FinishReason::Length;
                            end.stop_reason = None;
                            end.text.clear();
                        }
                        let deadline = self.request.deadline;
                        return deadline
                            .limit(self.events.send(AnswerEvent::Finished(end)))
                            .await?;
                    }
                    AnswerOutput::Fail { reason, retry_after_s } => {
                        return Err(RequestError::gave_up(
                            reason,
                            self.request.deadline.timeout,
                            retry_after_s,
                        ));
                    }
                    AnswerOutput::Refuse(overload) => return Err(overload.into()),
                }
            }
            self.count_waiting();
            self.next_input().await;
        }
    }

    fn poll_output(&mut self) -> Option<AnswerOutput> {
        self.core.poll_output(Instant::now(), &mut &self.front.router)
    }

    /// Counts the answer in the metrics of waiting answers while it has a place among them.
    fn count_waiting(&mut self) {
        if self.core.is_waiting() != self.waiting.is_some() {
            let counted = || (self.record.waiting_answer(), self.record.caller().waiting());
            self.waiting = self.core.is_waiting().then(counted);
        }
    }

    /// Waits for the next input of the core.
    async fn next_input(&mut self) {
        let Self { core, attempt, moving, woken, node_changes, timer, front, .. } = self;
        let (mut decode, mut prefill) = match attempt {
            Some(attempt) => (Some(&mut attempt.decode), attempt.prefill.as_mut()),
            None => (None, None),
        };
        let router = &mut &front.router;
        let deadline = core.next_deadline().expect("a request that has not ended has a deadline");
        let request = core.request();
        tokio::select! {
            // Poll the decode node first: once it sends tokens, the prefill node no longer matters.
            biased;
            message = next_message(&mut decode), if request.expects_decode() => match message {
                CallMessage::Accepted => core.handle_accepted(router, AttemptSide::Decode),
                CallMessage::Event(event) => core.handle_decode(Instant::now(), event),
            },
            message = next_message(&mut prefill), if request.expects_prefill() => match message {
                CallMessage::Accepted => {
                    *moving = None;
                    core.handle_accepted(router, AttemptSide::Prefill);
                }
                CallMessage::Event(event) => core.handle_prefill(Instant::now(), event),
            },
            () = woken.notified(), if request.expects_turn() => {
                core.handle_wake(Instant::now(), router);
            }
            // Fails only if the sender was dropped, but `front` holds the sender.
            _ = node_changes.changed(), if request.expects_node() => core.handle_nodes_changed(),
            () = timer.reached(deadline.into()) => core.handle_deadline(Instant::now(), router),
        }
    }

    /// Picks nodes and opens the calls of an attempt.
    fn pick(&mut self) -> Result<(), RequestError> {
        // A change from here on ends the wait for a node.
        self.node_changes.mark_unchanged();
        let transfer_id = TransferId::mint()?;
        let picked = self.core.pick(Instant::now(), &mut &self.front.router, transfer_id);
        let StartedAttempt { calls, decode, prefill, ttft, considered } = match picked {
            Ok(started) => started,
            Err(reason) => {
                self.moving = None;
                tracing::debug!(parent: self.record.span(), %reason, "no decode node for the request");
                self.record.no_node(reason);
                return Ok(());
            }
        };
        let span = tracing::info_span!(
            parent: self.record.span(),
            "attempt",
            otel.kind = "client",
            choice = spans::integer(self.choice),
            number = spans::integer(calls.number),
            %transfer_id,
            decode_node = %decode.record.node_id,
            prefill_node = prefill.as_ref().map(|node| field::display(&node.record.node_id)),
            outcome = field::Empty,
        );
        let cached = (prefill.as_ref().map(|node| node.cached_tokens), decode.cached_tokens);
        self.record.picked(self.choice, calls.number, considered, ttft, cached);
        self.moving.take_if(|_| prefill.is_none());
        let nodes = &self.front.nodes;
        self.attempt = Some(OpenNodeCalls {
            decode: NodeCall::decode(nodes, decode, calls.decode, &span),
            prefill: prefill
                .zip(calls.prefill)
                .map(|(node, request)| NodeCall::prefill(nodes, node, request, &span)),
            has_token: false,
            span,
        });
        Ok(())
    }

    /// Records the first token of an attempt, and the hand-over gap.
    fn begin_emit(&mut self, hand_over_gap: Option<Duration>) {
        if let Some(attempt) = &mut self.attempt
            && !std::mem::replace(&mut attempt.has_token, true)
        {
            self.record.attempt_began(self.choice);
        }
        if let Some(gap) = hand_over_gap {
            self.request.model.metrics.hand_over(gap);
            self.record.handed_over(self.choice, gap);
        }
    }

    /// Sends tokens that belong to the answer, and their text, to the client.
    async fn emit(&mut self, first_index: u32, tokens: Vec<Token>) -> Result<(), RequestError> {
        let (mut tokens, mut text) = self.text.push(tokens);
        if !tokens.is_empty() {
            self.record.emitted(tokens.len() as u32);
            self.core.charge_tokens(Instant::now(), tokens.len() as u32);
            let is_last = self.text.is_complete();
            let prompt = tokens[0].prompt.take();
            if self.request.prompt_only {
                tokens.clear();
                text.clear();
            }
            let choice = self.choice;
            let event = AnswerTokens { choice, first_index, tokens, prompt, text, is_last };
            match self.events.try_send(AnswerEvent::Tokens(event))? {
                None => _ = self.full_since.take_if(|_| self.events.is_half_read()),
                Some(event) => match timeout_at(self.request.deadline.at, self.send(event)).await {
                    Ok(sent) => sent?,
                    Err(_) => {
                        let now = Instant::now();
                        self.core.handle_deadline(now, &mut &self.front.router);
                        return Ok(());
                    }
                },
            }
        }
        self.core.handle_emitted(Instant::now(), self.text.stop());
        Ok(())
    }

    /// Sends an event to the client. If the client's buffer stays full, ends the attempt to
    /// release its slot and KV. The answer continues when the client has read half of the buffer.
    async fn send(&mut self, event: AnswerEvent) -> Result<(), RequestError> {
        let events = self.events;
        let stalled_at = *self.full_since.get_or_insert_with(Instant::now) + STALLED_AFTER;
        let sent = events.send(event);
        tokio::pin!(sent);
        if let Ok(sent) = timeout_at(stalled_at.into(), &mut sent).await {
            return sent;
        }
        self.core.handle_client_stalled();
        self.end_open_attempt();
        sent.await?;
        events.half_read().await?;
        self.full_since = None;
        Ok(())
    }

    /// Ends the attempt that the core has given up while no other output may follow.
    fn end_open_attempt(&mut self) {
        while let Some(output) = self.poll_output() {
            if let AnswerOutput::EndAttempt { ended, has_prefill, .. } = output {
                self.end_attempt(&ended, None, has_prefill);
            }
        }
    }

    /// Drops the calls of the attempt, counts the attempt and logs its failure. `failed_node`: the
    /// node on the side of the failure.
    fn end_attempt(
        &mut self,
        ended: &EndedAttempt,
        failed_node: Option<String>,
        has_prefill: bool,
    ) {
        let Some(OpenNodeCalls { span, decode, .. }) = self.attempt.take() else { return };
        self.moving = self.core.request().moves().then_some(decode);
        let end = self.record.attempt_ended(self.choice, ended, has_prefill);
        let AttemptOutcome::Failed(failure) = &ended.outcome else {
            // No log line follows. A recorded field would be formatted for log lines.
            return spans::attempt_ended(&span, end.as_str());
        };
        span.record("outcome", end.as_str());
        spans::failed(&span, end.as_str());
        let _entered = span.enter();
        let (node_id, request_id) = (failed_node.unwrap_or_default(), self.record.request_id());
        if failure.node_feedback() == Some(NodeFeedback::Busy) {
            tracing::debug!(node_id, reason = failure.message, "node is busy");
        } else if failure.cause == FailureCause::Migrated {
            tracing::info!(%request_id, node_id, reason = failure.message, "attempt migrates");
        } else {
            tracing::warn!(%request_id, node_id, %failure, "attempt failed");
        }
    }
}

/// Counts the open attempt when the client disconnects or another answer of the request fails.
impl Drop for AnswerDriver<'_> {
    fn drop(&mut self) {
        self.core.handle_client_left();
        self.end_open_attempt();
        self.core.end(Instant::now(), &mut &self.front.router);
        self.front.router.forget(self.core.id());
    }
}

/// Detokenizer of one answer, which also finds stop tokens and stop strings.
struct AnswerText {
    stream: Option<TextStream>,
    stop_texts: Arc<[String]>,
    /// Sorted; empty where stop tokens do not end the answer.
    stop_token_ids: Vec<u32>,
    tokenizer: Arc<Tokenizer>,
    min_tokens: u32,
    max_tokens: u32,
    token_count: u32,
    ended: Option<StopCondition>,
}

/// Stop condition that ended the answer.
#[derive(Debug)]
enum StopCondition {
    /// The last token is a stop token; the answer excludes its text.
    StopToken(Option<StopReason>),
    /// A stop string is complete.
    StopText(StopReason),
}

impl AnswerText {
    fn new(request: &PreparedRequest, sampling: &Sampling) -> Self {
        let tokenizer = request.model.text.tokenizer();
        // Special tokens that mark reasoning and tool calls.
        let reading = request.reading.as_ref();
        let shown_tokens = reading.map(|reading| reading.shown_tokens(tokenizer));
        let shown_tokens = shown_tokens.unwrap_or_default();
        let header_tokens = reading.and_then(AnswerReading::header_tokens);
        let stream = || {
            let (skip_special, min_tokens) = (request.skip_special, sampling.min_tokens);
            let options = TextStreamOptions { skip_special, min_tokens };
            TextStream::new(tokenizer.clone(), request.stops.clone(), options)
                .showing(shown_tokens.into())
                .with_headers(header_tokens)
        };
        let mut stop_token_ids = match sampling.ignore_stop_tokens {
            true => Vec::new(),
            false => sampling.stop_token_ids.clone(),
        };
        stop_token_ids.sort_unstable();
        Self {
            stream: request.with_text.then(stream),
            stop_texts: request.stop_texts.clone(),
            stop_token_ids,
            tokenizer: tokenizer.clone(),
            min_tokens: sampling.min_tokens,
            max_tokens: sampling.max_tokens,
            token_count: 0,
            ended: None,
        }
    }

    /// Returns whether the answer has all its tokens. A node may also end an answer before that.
    fn is_complete(&self) -> bool {
        self.ended.is_some() || self.token_count >= self.max_tokens
    }

    /// Returns the stop condition that ended the answer, if any.
    fn stop(&self) -> Option<StopCause> {
        match self.ended.as_ref()? {
            StopCondition::StopToken(_) => Some(StopCause::Token),
            StopCondition::StopText(_) => Some(StopCause::Text),
        }
    }

    /// Adds the next tokens. Returns the tokens that belong to the answer, and their text. Tokens
    /// after a stop are dropped.
    fn push(&mut self, mut tokens: Vec<Token>) -> (Vec<Token>, String) {
        if self.ended.is_some() {
            return (vec![], String::new());
        }
        let stops = |(index, token): (u32, &Token)| {
            index >= self.min_tokens && self.stop_token_ids.binary_search(&token.id).is_ok()
        };
        let stop_at = (self.token_count..).zip(&tokens).position(stops);
        let ids: Vec<u32> =
            tokens[..stop_at.unwrap_or(tokens.len())].iter().map(|token| token.id).collect();
        let delta = self.stream.as_mut().map(|stream| stream.push(&ids)).unwrap_or_default();
        let count = match (delta.stopped, stop_at) {
            (Some(hit), _) => {
                let by = StopReason::Text(self.stop_texts[hit.stop_index].clone());
                self.ended = Some(StopCondition::StopText(by));
                (hit.token_count - self.token_count) as usize
            }
            (None, Some(at)) => {
                let id = tokens[at].id;
                // Only a stop token that the client named is reported to the client.
                let own = !self.tokenizer.eos_ids().contains(&id);
                self.ended = Some(StopCondition::StopToken(own.then_some(StopReason::Token(id))));
                at + 1
            }
            (None, None) => tokens.len(),
        };
        tokens.truncate(count);
        self.token_count += count as u32;
        (tokens, delta.text)
    }

    /// Ends the answer. A stop found here takes precedence over the node's finish reason.
    fn finish(&mut self, choice: u32, finished: FinishedAnswer) -> AnswerEnd {
        let (reason, stop_reason) = match self.ended.take() {
            Some(StopCondition::StopToken(by)) => (FinishReason::Stop, by),
            Some(StopCondition::StopText(by)) => (FinishReason::Stop, Some(by)),
            None => (finished.reason, None),
        };
        AnswerEnd {
            choice,
            reason,
            stop_reason,
            text: self.stream.take().map(TextStream::finish).unwrap_or_default(),
            prompt_tokens: finished.prompt_tokens,
            completion_tokens: self.token_count,
            cached_tokens: finished.cached_tokens,
            hand_over: finished.hand_over,
        }
    }
}
