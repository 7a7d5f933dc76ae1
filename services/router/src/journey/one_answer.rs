//! Steps 2 to 6 for one answer: attempts, one after the other, until one completes.

use std::time::{Duration, Instant};

use cluster::{ModelIdentity, NoNode, Role, Wanted};
use proto::v1::{DecodeEvent, FinishReason, PrefillEvent, Token};
use telemetry::{RouterMetrics, metrics::AttemptEnd};
use tracing::{Instrument, Span, field};

use super::{
    answer::{Answer, Ended},
    attempt::{Attempt, LAST_EVENT_MAX, Next, TOKEN_0_MAX},
    emitted::EmittedTokens,
    failure::{AttemptFailure, Cause, Side},
    node_calls::{AttemptCalls, NodeStream, next_of},
    prepare::{AnswerSpec, RequestPlan},
    recovery::{GiveUp, Recovery, Then},
};
use crate::{
    admission::Waiting,
    front::Front,
    generation::{AnswerEnd, AnswerTokens, Event, EventSender, HandOverFigures, RequestError},
    nodes::Assigned,
    record::RequestRecord,
    request::ids::TransferId,
};

/// Between two looks for a node that may come back.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// One answer on its way: attempts, one after the other, over one list of emitted tokens.
pub struct Journey<'a> {
    front: &'a Front,
    plan: &'a RequestPlan,
    events: &'a EventSender,
    record: &'a RequestRecord,
    spec: AnswerSpec,
    emitted: EmittedTokens,
    /// Of the nodes that made the first emitted token. Others would go on with another answer.
    identity: Option<ModelIdentity>,
    answer: Answer,
    recovery: Recovery,
    waiting: Option<Waiting>,
    figures: HandOverFigures,
    cached_tokens: Option<u32>,
}

/// How an attempt ended.
enum AttemptOutcome {
    Complete(FinishReason),
    Failed(AttemptFailure),
}

impl<'a> Journey<'a> {
    pub fn new(
        front: &'a Front,
        plan: &'a RequestPlan,
        spec: AnswerSpec,
        events: &'a EventSender,
        record: &'a RequestRecord,
    ) -> Self {
        Self {
            emitted: EmittedTokens::new(spec.sampling.max_tokens, plan.limits.vocabulary_size),
            answer: Answer::new(&plan.answer, &spec.sampling),
            recovery: Recovery::new(front.recovery_limits()),
            identity: None,
            waiting: None,
            figures: HandOverFigures::default(),
            cached_tokens: None,
            front,
            plan,
            events,
            record,
            spec,
        }
    }

    pub async fn run(mut self) -> Result<(), RequestError> {
        // Whoever waits for this model already comes first.
        if self.plan.model.waiting.is_occupied() {
            let then = self.recovery.all_busy(Instant::now());
            self.follow(then).await?;
        }
        loop {
            let (decode, prefill) = match self.pick() {
                Ok(picked) => picked,
                Err(none) => {
                    let then = match none {
                        NoNode::Busy { .. } => self.recovery.all_busy(Instant::now()),
                        _ => self.recovery.none_there(Instant::now()),
                    };
                    self.follow(then).await?;
                    continue;
                }
            };
            let transfer_id = TransferId::mint()
                .map_err(|error| RequestError::Internal { reason: error.to_string() })?;
            let span = tracing::info_span!(
                "attempt",
                choice = self.spec.choice,
                number = self.recovery.attempts(),
                %transfer_id,
                decode_node = %decode.record().node_id,
                prefill_node = prefill.as_ref().map(|node| field::display(&node.record().node_id)),
                outcome = field::Empty,
            );
            let outcome = self
                .attempt(transfer_id, &decode, prefill.as_ref(), &span)
                .instrument(span.clone())
                .await?;
            match outcome {
                AttemptOutcome::Complete(reason) => return self.conclude(reason).await,
                AttemptOutcome::Failed(failure) => {
                    let prefill = prefill.map(|node| node.epoch());
                    let then =
                        self.recovery.failed(failure, prefill, decode.epoch(), Instant::now());
                    // Given back before any wait.
                    drop(decode);
                    self.follow(then).await?;
                }
            }
        }
    }

    /// The decode node with the least to do, and the prefill node that fits it; who has the beginning
    /// of the prompt cached has less to do. Without one, or
    /// when there is nothing worth moving, the decode node works alone.
    fn pick(&self) -> Result<(Assigned, Option<Assigned>), NoNode> {
        let emitted = self.emitted.next_index();
        let prompt_tokens = self.spec.prompt.len() as u32;
        let alone = self.recovery.decode_alone();
        let wanted = Wanted {
            role: Role::Decode,
            model: Some(&self.plan.model.name),
            prompt_tokens,
            tokens: prompt_tokens + emitted,
            new_tokens_max: self.spec.sampling.max_tokens - emitted,
            computes_prompt: alone,
            prefix: &self.spec.prefix,
            identity: self.identity.as_ref(),
            grammar_version: self.plan.grammar_version,
            exclude: self.recovery.avoid_decode(),
        };
        let decode = self.front.nodes.pick(&wanted)?;
        let identity = &decode.record().identity;
        // Less than one block is never sent.
        if alone || wanted.tokens < identity.block_size {
            return Ok((decode, None));
        }
        let prefill = self.front.nodes.pick(&Wanted {
            role: Role::Prefill,
            new_tokens_max: 1,
            computes_prompt: true,
            identity: Some(identity),
            exclude: self.recovery.avoid_prefill(),
            ..wanted
        });
        // Full ones too: a prompt at the end of their queues comes to its turn later than the decode
        // node, which has room, reads it.
        Ok((decode, prefill.ok()))
    }

    /// One attempt, from both calls to its end.
    async fn attempt(
        &mut self,
        transfer_id: TransferId,
        decode: &Assigned,
        prefill: Option<&Assigned>,
        span: &Span,
    ) -> Result<AttemptOutcome, RequestError> {
        let metrics = &self.plan.model.metrics;
        let mut guard = AttemptGuard { metrics, span, end: AttemptEnd::Cancelled };
        let first_index = self.emitted.next_index();
        self.figures.attempts = self.recovery.attempts();
        self.figures.decode_node = Some(decode.record().node_id.to_string());
        self.figures.prefill_node = prefill.map(|node| node.record().node_id.to_string());

        // Step 2: the decode node reserves blocks and asks the prefill node for their contents.
        let calls = AttemptCalls {
            plan: self.plan,
            spec: &self.spec,
            emitted: self.emitted.ids(),
            transfer_id,
            span,
        };
        let mut decode_events = calls.decode(decode, prefill);
        // Step 3, at the same time: the prefill node reads the prompt and samples token 0.
        // Step 4 happens between the two.
        let mut prefill_events = prefill.map(|node| calls.prefill(node, decode));

        let mut attempt = Attempt::new(first_index, prefill.is_some());
        let mut first_shown: Option<Instant> = None;
        let mut silence = Silence::new(self.front.settings.idle_timeout);
        let outcome = loop {
            let next = tokio::select! {
                // The decode node first: once it writes, the other one no longer matters.
                biased;
                // Step 5: the decode node repeats token 0 and goes on.
                said = decode_events.next(), if attempt.expects_decode() => match said {
                    Ok(Some(DecodeEvent { event })) => {
                        decode.answered();
                        attempt.decode_said(event, &mut self.emitted)
                    }
                    Ok(None) => attempt.decode_failed(AttemptFailure::cut(Side::Decode)),
                    Err(status) => {
                        attempt.decode_failed(AttemptFailure::status(Side::Decode, &status))
                    }
                },
                said = next_of(&mut prefill_events), if attempt.expects_prefill() => match said {
                    Ok(Some(PrefillEvent { event })) => {
                        prefill.inspect(|node| node.answered());
                        attempt.prefill_said(event, &mut self.emitted)
                    }
                    Ok(None) => attempt.prefill_failed(AttemptFailure::cut(Side::Prefill)),
                    Err(status) => {
                        attempt.prefill_failed(AttemptFailure::status(Side::Prefill, &status))
                    }
                },
                () = tokio::time::sleep(LAST_EVENT_MAX), if self.is_complete() => {
                    vec![Next::Finish(FinishReason::Length)]
                }
                () = tokio::time::sleep(TOKEN_0_MAX), if !attempt.expects_decode() => {
                    attempt.token_0_is_late()
                }
                () = tokio::time::sleep_until(silence.ends_at().into()) => {
                    let side = attempt.awaits();
                    let awaited = match side {
                        Side::Decode => Some(decode),
                        Side::Prefill => prefill,
                    };
                    let change = awaited.and_then(Assigned::changed_at);
                    if !attempt.is_writing() && change.is_some_and(|at| silence.broken_at(at)) {
                        continue;
                    }
                    vec![Next::Fail(AttemptFailure::silent(side, silence.max))]
                }
            };
            match self.act(next, &mut prefill_events, &mut first_shown).await? {
                Some(outcome) => break outcome,
                // From here on: showing waits for the client, which is not the node's silence.
                None => silence.broken_now(),
            }
        };
        // Both streams end here; what was not finished is cancelled by it.
        drop((decode_events, prefill_events));
        if self.identity.is_none() && self.emitted.next_index() > 0 {
            self.identity = Some(decode.record().identity.clone());
        }

        let figures = attempt.figures();
        self.figures.kv_bytes += figures.kv_bytes;
        if figures.kv_bytes > 0 {
            self.figures.transfer_us = figures.transfer_us;
            let duration = Duration::from_micros(figures.transfer_us);
            metrics.transfer_delivered(figures.kv_bytes, duration);
        }
        match &outcome {
            AttemptOutcome::Complete(_) => {
                self.cached_tokens.get_or_insert(figures.cached_tokens);
                guard.end = AttemptEnd::Complete;
            }
            AttemptOutcome::Failed(failure) => {
                if self.emitted.next_index() > first_index {
                    self.cached_tokens.get_or_insert(figures.cached_tokens);
                }
                guard.end = end_of(failure);
                let node = match (failure.side, prefill) {
                    (Side::Prefill, Some(prefill)) => prefill,
                    (Side::Prefill, None) | (Side::Decode, _) => decode,
                };
                let node_id = &node.record().node_id;
                match failure.cause {
                    Cause::Busy => {
                        node.busy(None);
                        tracing::debug!(%node_id, reason = failure.message, "node is busy");
                    }
                    Cause::Lost | Cause::Stale => {
                        node.lost(failure.message.clone());
                        tracing::warn!(%node_id, %failure, "attempt failed");
                    }
                    _ => tracing::warn!(%node_id, %failure, "attempt failed"),
                }
            }
        }
        Ok(outcome)
    }

    /// Does what the attempt wants done. An outcome ends the attempt.
    async fn act(
        &mut self,
        next: Vec<Next>,
        prefill_events: &mut Option<NodeStream<PrefillEvent>>,
        first_shown: &mut Option<Instant>,
    ) -> Result<Option<AttemptOutcome>, RequestError> {
        for next in next {
            match next {
                Next::Admitted => {
                    self.recovery.admitted();
                    self.waiting = None;
                }
                // Step 6: each index reaches the client once.
                Next::Show { by, first_index, tokens } => {
                    match (by, *first_shown) {
                        (Side::Prefill, _) => *first_shown = Some(Instant::now()),
                        (Side::Decode, Some(first)) => {
                            self.plan.model.metrics.hand_over(first.elapsed());
                            *first_shown = None;
                        }
                        (Side::Decode, None) => {}
                    }
                    self.show(first_index, tokens).await?;
                    if let Some(Ended::StopText(_)) = self.answer.ended() {
                        return Ok(Some(AttemptOutcome::Complete(FinishReason::Stop)));
                    }
                }
                Next::DropPrefill => *prefill_events = None,
                Next::Finish(reason) => return Ok(Some(AttemptOutcome::Complete(reason))),
                // Every token is here: what failed is no longer needed.
                Next::Fail(_) if self.is_complete() => {
                    return Ok(Some(AttemptOutcome::Complete(FinishReason::Length)));
                }
                Next::Fail(failure) => return Ok(Some(AttemptOutcome::Failed(failure))),
            }
        }
        Ok(None)
    }

    async fn show(&mut self, first_index: u32, tokens: Vec<Token>) -> Result<(), RequestError> {
        let shown = self.answer.push(tokens);
        if shown.tokens.is_empty() {
            return Ok(());
        }
        self.record.shown(shown.tokens.len() as u32);
        let choice = self.spec.choice;
        let (tokens, text) = (shown.tokens, shown.text);
        self.events.send(Event::Tokens(AnswerTokens { choice, first_index, tokens, text })).await
    }

    /// Every token of the answer is shown, whatever the nodes may still say.
    fn is_complete(&self) -> bool {
        self.answer.ended().is_some() || self.emitted.is_full()
    }

    /// The answer is complete: the rest of its text and its figures.
    async fn conclude(self, reason: FinishReason) -> Result<(), RequestError> {
        let conclusion = self.answer.finish(reason);
        let end = AnswerEnd {
            choice: self.spec.choice,
            reason: conclusion.reason,
            stopped_by: conclusion.stopped_by,
            text: conclusion.text,
            prompt_tokens: self.spec.prompt.len() as u32,
            completion_tokens: conclusion.completion_tokens,
            cached_tokens: self.cached_tokens.unwrap_or(0).min(self.spec.prompt.len() as u32),
            hand_over: self.figures,
        };
        self.record.answer_ended(&end);
        self.events.send(Event::Finished(end)).await
    }

    async fn follow(&mut self, then: Then) -> Result<(), RequestError> {
        match then {
            Then::Retry => Ok(()),
            Then::WaitForRoom { left } => self.wait_for_room(left).await,
            Then::WaitForNode => {
                // A change of health, or a look every now and then: busy is no such change.
                let mut changes = self.front.nodes.changes();
                let _ = tokio::time::timeout(LOOK_AGAIN, changes.changed()).await;
                Ok(())
            }
            Then::GiveUp(reason) => Err(self.given_up(reason)),
        }
    }

    fn given_up(&self, reason: GiveUp) -> RequestError {
        match reason {
            GiveUp::AttemptsSpent { attempts, last } => {
                RequestError::AttemptsSpent { attempts, last: last.to_string() }
            }
            GiveUp::Busy { waited } => RequestError::Busy { waited },
            GiveUp::NoDecodeNode { waited } => RequestError::NoDecodeNode { waited },
            GiveUp::Final(failure) => match failure.cause {
                Cause::Deadline => RequestError::Deadline { timeout: self.plan.deadline.timeout },
                // The node's queue filled because ours did, and ours because the client did not
                // read.
                Cause::SlowReader => {
                    RequestError::SlowClient { waited: self.front.settings.slow_client_timeout }
                }
                Cause::Contradiction => RequestError::Contradiction { reason: failure.message },
                _ => RequestError::Refused { reason: failure.message },
            },
        }
    }

    /// Waits for a turn to ask again, at most `left`.
    async fn wait_for_room(&mut self, left: Duration) -> Result<(), RequestError> {
        let waiting = match &mut self.waiting {
            Some(waiting) => waiting,
            none => none.insert(self.plan.model.waiting.enter(&self.plan.model.metrics)?),
        };
        let waited = self.front.settings.waiting_timeout;
        tokio::time::timeout(left, waiting.turn()).await.map_err(|_| RequestError::Busy { waited })
    }
}

/// How long a node has said nothing that shows work on the attempt.
struct Silence {
    since: Instant,
    max: Duration,
}

impl Silence {
    fn new(max: Duration) -> Self {
        Self { since: Instant::now(), max }
    }

    fn ends_at(&self) -> Instant {
        self.since + self.max
    }

    fn broken_now(&mut self) {
        self.since = Instant::now();
    }

    /// Whether it was broken then, later than was known.
    fn broken_at(&mut self, at: Instant) -> bool {
        let is_news = at > self.since;
        self.since = self.since.max(at);
        is_news
    }
}

/// Counts the attempt however it ends, also when its request is dropped.
struct AttemptGuard<'a> {
    metrics: &'a RouterMetrics,
    span: &'a Span,
    end: AttemptEnd,
}

impl Drop for AttemptGuard<'_> {
    fn drop(&mut self) {
        self.metrics.attempt_ended(self.end);
        self.span.record("outcome", self.end.as_str());
    }
}

fn end_of(failure: &AttemptFailure) -> AttemptEnd {
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
