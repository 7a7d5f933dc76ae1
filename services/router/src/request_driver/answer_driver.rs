//! Drives the request core of one answer with tonic streams, tokio timers, spans and metrics.
//!
//! [`AnswerDriver::run`] performs the core's outputs and passes it the next input, until the answer is
//! complete or failed. The core makes every decision.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::Room;
use proto::{
    ids::TransferId,
    v1::{DecodeEvent, FinishReason, PrefillEvent, Sampling, Token},
};
use telemetry::spans;
use text::{TextStream, TextStreamOptions, Tokenizer};
use tokio::{sync::watch, time::timeout_at};
use tracing::{Span, field};

use super::{
    PreparedRequest,
    events::{AnswerEnd, AnswerTokens, Event, EventSender, StopReason},
};
use crate::{
    fair_queue::{Pass, SessionTurn, StartedPrompt, WaitLimits, WaitRequest},
    front::Front,
    nodes::{Assigned, NodeCall, PickedNodes, next_message},
    record::RequestRecord,
    request::error::RequestError,
    request_core::{
        AnswerSpec, AttemptOutcome, Blame, Cause, EndedAttempt, FinishedAnswer, NodeFeedback,
        Output, RecoveryPolicy, RequestCore, Side, Stop,
    },
    wait_queue::{Charge, Turn, Waiting},
    wake::MovingTimer,
};

/// Time after which an attempt ends if its client leaves the full buffer unread. Short, because the tokens that nodes
/// generate in this time are generated again later.
const STALLED_AFTER: Duration = Duration::from_millis(500);

/// One answer in flight.
pub struct AnswerDriver<'a> {
    front: &'a Front,
    request: &'a PreparedRequest,
    choice: u32,
    events: &'a EventSender,
    record: &'a RequestRecord,
    core: RequestCore,
    text: AnswerText,
    attempt: Option<OpenAttempt>,
    /// The turn of the session, until the answer ends.
    turn: Option<SessionTurn>,
    waiting: Option<Waiting>,
    /// Reason to report if the next turn passes to other answers.
    pass: Pass,
    node_changes: watch::Receiver<u64>,
    timer: MovingTimer,
}

/// The calls of the open attempt.
struct OpenAttempt {
    decode: NodeCall<DecodeEvent>,
    prefill: Option<NodeCall<PrefillEvent>>,
    /// Whether the client received a token of this attempt.
    has_token: bool,
    span: Span,
    charge: Charge,
}

impl<'a> AnswerDriver<'a> {
    pub fn new(
        front: &'a Front,
        request: &'a PreparedRequest,
        choice: u32,
        answer: AnswerSpec,
        events: &'a EventSender,
        record: &'a RequestRecord,
    ) -> Self {
        let queue = &request.model.waiting;
        let turn = queue.turn_arrived(&request.flow.name, answer.session_marks());
        Self {
            text: AnswerText::new(request, &answer.sampling),
            core: RequestCore::new(answer, RecoveryPolicy::from(&front.settings.router)),
            attempt: None,
            turn: Some(turn),
            waiting: None,
            pass: Pass::default(),
            node_changes: front.nodes.changes(),
            timer: MovingTimer::new(request.deadline.at),
            front,
            request,
            choice,
            events,
            record,
        }
    }

    pub async fn run(mut self) -> Result<(), RequestError> {
        let deadline = self.request.deadline;
        self.core.start(Instant::now(), self.request.model.waiting.has_queue());
        loop {
            while let Some(output) = self.core.poll_output() {
                match output {
                    Output::Pick => self.pick()?,
                    Output::DropPrefillCall => {
                        if let Some(attempt) = &mut self.attempt {
                            attempt.prefill = None;
                        }
                    }
                    Output::Delivered { elapsed } => self.delivered(elapsed),
                    Output::Served => {
                        if let Some(attempt) = &self.attempt {
                            attempt.decode.node.served();
                        }
                    }
                    Output::EndAttempt(ended) => self.end_attempt(&ended),
                    Output::Emit { first_index, tokens, hand_over_gap } => {
                        if let Some(attempt) = &mut self.attempt
                            && !std::mem::replace(&mut attempt.has_token, true)
                        {
                            self.record.attempt_began(self.choice);
                            if first_index == 0 {
                                attempt.decode.node.first_token();
                            }
                        }
                        if let Some(gap) = hand_over_gap {
                            self.request.model.metrics.hand_over(gap);
                            self.record.handed_over(self.choice, gap);
                        }
                        self.emit(first_index, tokens).await?;
                    }
                    Output::WaitForTurn => {
                        let pass = std::mem::take(&mut self.pass);
                        self.waiting_place()?.queue(pass)?;
                    }
                    Output::RetryPassed => self.waiting_place()?.retry_passed(),
                    Output::WaitForNode => self.waiting_place()?.leave_queue(),
                    Output::StopWaiting => self.waiting = None,
                    Output::Finish(finished) => {
                        let end = self.text.finish(self.choice, finished);
                        self.record.answer_ended(&end);
                        // The client may send the next turn as soon as it receives the end of this one.
                        self.end_turn(self.core.last_block());
                        return deadline.limit(self.events.send(Event::Finished(end))).await?;
                    }
                    Output::Fail(reason) => {
                        let slow_client_timeout = self.front.settings.router.slow_client_timeout;
                        return Err(RequestError::gave_up(
                            reason,
                            deadline.timeout,
                            slow_client_timeout,
                            self.request.model.waiting.retry_after_s(),
                        ));
                    }
                }
            }
            self.next_input().await;
        }
    }

    /// Waits for the next input of the core.
    async fn next_input(&mut self) {
        let Self { core, attempt, waiting, node_changes, timer, .. } = self;
        let (mut decode, mut prefill) = match attempt {
            Some(attempt) => (Some(&mut attempt.decode), attempt.prefill.as_mut()),
            None => (None, None),
        };
        let deadline = core.next_deadline().expect("a request that has not ended has a deadline");
        tokio::select! {
            // Poll the decode node first: once it sends tokens, the prefill node no longer matters.
            biased;
            message = next_message(&mut decode), if core.expects_decode() => {
                core.handle_decode(Instant::now(), message);
            }
            message = next_message(&mut prefill), if core.expects_prefill() => {
                core.handle_prefill(Instant::now(), message);
            }
            turn = Waiting::turn(waiting), if core.expects_turn() => match turn {
                Turn::Pick => core.handle_turn(),
                Turn::Late(limit) => core.handle_late_turn(Instant::now(), limit),
            },
            // Fails only if the sender was dropped, but `front` holds the sender.
            _ = node_changes.changed(), if core.expects_node() => {
                core.handle_nodes_changed();
            }
            () = timer.reached(deadline.into()) => {
                let now = Instant::now();
                if core.drain_check_is_due(now) {
                    let grace =
                        decode.as_ref().and_then(|call| call.node.grace_left(&core.wanted()));
                    core.handle_drain_check(now, grace);
                }
                core.handle_deadline(now, |side| match side {
                    Side::Decode => decode?.node.changed_at(),
                    Side::Prefill => prefill?.node.changed_at(),
                });
            }
        }
    }

    /// Picks nodes and opens the calls of an attempt.
    fn pick(&mut self) -> Result<(), RequestError> {
        // A change from here on ends the wait for a node.
        self.node_changes.mark_unchanged();
        let nodes = &self.front.nodes;
        let transfer_id = TransferId::mint()?;
        let mut wanted = self.core.wanted();
        let (tokens, output_tokens_max) = (wanted.tokens, wanted.new_tokens_max);
        let queue = &self.request.model.waiting;
        if let Room::Start { headroom } = &mut wanted.room {
            *headroom = queue.leaves_headroom(&self.request.flow.name);
        }
        let picked = nodes.pick(transfer_id, &wanted);
        let PickedNodes { decode, prefill, ttft, uncached_tokens, considered } = match picked {
            Ok(picked) => picked,
            Err(reason) => {
                tracing::debug!(parent: self.record.span(), %reason, "no decode node for the request");
                self.pass = Pass::of(&reason);
                self.core.handle_no_node(Instant::now(), &reason);
                self.record.no_node(reason);
                return Ok(());
            }
        };
        let cached = (prefill.as_ref().map(Assigned::cached_tokens), decode.cached_tokens());
        let records = (decode.record().clone(), prefill.as_ref().map(|node| node.record().clone()));
        let calls = self.core.handle_picked(Instant::now(), transfer_id, records.0, records.1);
        let span = tracing::info_span!(
            parent: self.record.span(),
            "attempt",
            otel.kind = "client",
            choice = spans::integer(self.choice),
            number = spans::integer(calls.number),
            %transfer_id,
            decode_node = %decode.record().node_id,
            prefill_node = prefill.as_ref().map(|node| field::display(&node.record().node_id)),
            outcome = field::Empty,
        );
        self.record.picked(self.choice, calls.number, considered, ttft, cached);
        let prompt = StartedPrompt { tokens, uncached_tokens };
        let charge = queue.start(&self.request.flow, prompt, output_tokens_max);
        if let Some(waiting) = &mut self.waiting {
            waiting.leave_queue();
        }
        self.attempt = Some(OpenAttempt {
            decode: NodeCall::decode(decode, calls.decode, &span),
            prefill: prefill
                .zip(calls.prefill)
                .map(|(node, request)| NodeCall::prefill(node, request, &span)),
            has_token: false,
            span,
            charge,
        });
        Ok(())
    }

    /// Sends tokens that belong to the answer, and their text, to the client.
    async fn emit(&mut self, first_index: u32, tokens: Vec<Token>) -> Result<(), RequestError> {
        let (tokens, text) = self.text.push(tokens);
        if !tokens.is_empty() {
            self.record.emitted(tokens.len() as u32);
            if let Some(attempt) = &mut self.attempt {
                attempt.charge.emitted(tokens.len() as u32);
            }
            let event = AnswerTokens { choice: self.choice, first_index, tokens, text };
            if let Some(event) = self.events.try_send(Event::Tokens(event))? {
                match timeout_at(self.request.deadline.at, self.send(event)).await {
                    Ok(sent) => sent?,
                    Err(_) => {
                        self.core.handle_deadline(Instant::now(), |_| None);
                        return Ok(());
                    }
                }
            }
        }
        self.core.handle_emitted(Instant::now(), self.text.stop());
        Ok(())
    }

    /// Sends an event to the client. If the client leaves its buffer full, ends the attempt to release its slot and KV.
    /// The answer continues when the client has read half of the buffer.
    async fn send(&mut self, event: Event) -> Result<(), RequestError> {
        let events = self.events;
        let sent = events.send(event);
        tokio::pin!(sent);
        if let Ok(sent) = tokio::time::timeout(STALLED_AFTER, &mut sent).await {
            return sent;
        }
        self.core.handle_client_stalled();
        while let Some(output) = self.core.poll_output() {
            if let Output::EndAttempt(ended) = output {
                self.end_attempt(&ended);
            }
        }
        sent.await?;
        events.half_read().await
    }

    fn delivered(&self, elapsed: Duration) {
        let Some(OpenAttempt { decode, prefill: Some(prefill), .. }) = &self.attempt else {
            return;
        };
        prefill.node.delivered(&decode.node, elapsed);
    }

    /// Counts the attempt, reports a failure to the directory, drops the calls and releases the nodes.
    fn end_attempt(&mut self, ended: &EndedAttempt) {
        let Some(attempt) = self.attempt.take() else { return };
        let OpenAttempt { decode, prefill, span, mut charge, .. } = attempt;
        charge.ended(ended.outcome.charged_end());
        self.report_attempt(ended, &decode.node, prefill.as_ref().map(|call| &call.node), &span);
        // The charge ends last: the next request then finds the nodes released.
        drop((decode, prefill));
        drop(charge);
    }

    /// Counts the attempt and reports its failure to the directory.
    fn report_attempt(
        &self,
        ended: &EndedAttempt,
        decode: &Assigned,
        prefill: Option<&Assigned>,
        span: &Span,
    ) {
        let end = self.record.attempt_ended(self.choice, ended, prefill.is_some());
        decode.decoded(ended.stats.decoded_tokens, ended.stats.decode_wait);
        let AttemptOutcome::Failed(failure) = &ended.outcome else {
            // No log line follows. A recorded field would be formatted for log lines.
            return spans::attempt_ended(span, end.as_str());
        };
        span.record("outcome", end.as_str());
        spans::failed(span, end.as_str());
        let node = match (failure.side, prefill) {
            (Side::Prefill, Some(prefill)) => prefill,
            (Side::Prefill, None) | (Side::Decode, _) => decode,
        };
        let _entered = span.enter();
        match (failure.blame(), prefill) {
            (Some(Blame::Node), _) => node.failed(),
            (Some(Blame::Pair), Some(prefill)) => prefill.transfer_failed(decode),
            _ => {}
        }
        let (node_id, report) = (&node.record().node_id, failure.node_feedback());
        match report {
            Some(NodeFeedback::Busy) => node.busy(),
            Some(NodeFeedback::Lost) => node.lost(failure.message.clone()),
            None => {}
        }
        if report == Some(NodeFeedback::Busy) {
            tracing::debug!(%node_id, reason = failure.message, "node is busy");
        } else if failure.cause == Cause::Migrated {
            let request_id = self.record.request_id();
            tracing::info!(%request_id, %node_id, reason = failure.message, "attempt migrates");
        } else {
            let request_id = self.record.request_id();
            tracing::warn!(%request_id, %node_id, %failure, "attempt failed");
        }
    }

    /// Ends the turn of the session, if it has not ended.
    fn end_turn(&mut self, last_block: Option<u128>) {
        if let Some(turn) = self.turn.take() {
            self.request.model.waiting.turn_ended(&turn, last_block);
        }
    }

    /// Returns the request's place in the queue of waiting requests. A request that has emitted tokens always finds a
    /// place: it is bounded by the requests in flight, and rejecting it would cut its answer.
    fn waiting_place(&mut self) -> Result<&mut Waiting, RequestError> {
        let model = &self.request.model;
        Ok(match &mut self.waiting {
            Some(waiting) => waiting,
            none => {
                let wanted = self.core.wanted();
                let wait_max = self.front.settings.router.waiting_timeout;
                let deadline = self.request.deadline.at.into_std();
                let request = WaitRequest {
                    flow: self.request.flow.clone(),
                    prompt_tokens: wanted.tokens,
                    output_tokens_max: wanted.new_tokens_max,
                    limits: WaitLimits::new(wanted.room, wait_max, deadline),
                    has_begun: !self.core.emitted().is_empty(),
                    session_since: self.turn.as_ref().and_then(SessionTurn::since),
                };
                let of_key = self.record.caller().waiting();
                none.insert(model.waiting.enter(request, &model.metrics, of_key)?)
            }
        })
    }
}

/// Counts the open attempt when the client disconnects or another answer of the request fails.
impl Drop for AnswerDriver<'_> {
    fn drop(&mut self) {
        self.core.handle_client_left();
        while let Some(output) = self.core.poll_output() {
            if let Output::EndAttempt(ended) = output {
                self.end_attempt(&ended);
            }
        }
        self.end_turn(None);
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
    token_count: u32,
    ended: Option<Ended>,
}

/// Stop condition that ended the answer.
#[derive(Debug)]
enum Ended {
    /// The last token is a stop token; the answer excludes its text.
    StopToken(Option<StopReason>),
    /// A stop string is complete.
    StopText(StopReason),
}

impl AnswerText {
    fn new(request: &PreparedRequest, sampling: &Sampling) -> Self {
        let tokenizer = request.model.text.tokenizer();
        // The tool-call parser needs the special tokens that mark tool calls as text.
        let shown_tokens = request.calls.as_ref();
        let shown_tokens = shown_tokens.map(|calls| calls.format.shown_tokens(tokenizer));
        let shown_tokens = shown_tokens.unwrap_or_default();
        let stream = || {
            let (skip_special, min_tokens) = (request.skip_special, sampling.min_tokens);
            let options = TextStreamOptions { skip_special, min_tokens };
            TextStream::new(tokenizer.clone(), request.stops.clone(), options)
                .showing(shown_tokens.into())
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
            token_count: 0,
            ended: None,
        }
    }

    /// Returns the stop condition that ended the answer, if any.
    fn stop(&self) -> Option<Stop> {
        match self.ended.as_ref()? {
            Ended::StopToken(_) => Some(Stop::Token),
            Ended::StopText(_) => Some(Stop::Text),
        }
    }

    /// Adds the next tokens. Returns the tokens that belong to the answer, and their text. Tokens after a
    /// stop are dropped.
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
                self.ended = Some(Ended::StopText(by));
                (hit.token_count - self.token_count) as usize
            }
            (None, Some(at)) => {
                let id = tokens[at].id;
                // Only a stop token that the client named is reported to the client.
                let own = !self.tokenizer.eos_ids().contains(&id);
                self.ended = Some(Ended::StopToken(own.then_some(StopReason::Token(id))));
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
            Some(Ended::StopToken(by)) => (FinishReason::Stop, by),
            Some(Ended::StopText(by)) => (FinishReason::Stop, Some(by)),
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
