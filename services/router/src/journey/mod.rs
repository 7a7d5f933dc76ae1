//! A request's journey, as DESIGN.md numbers its steps.
//!
//! [`start`] is step 1; each answer then has a [`Journey`] of its own, which makes attempts until
//! one completes. What events mean is decided by pure state machines ([`attempt`], [`emitted`],
//! [`recovery`]); here is the I/O around them.

mod answer;
mod attempt;
mod emitted;
mod failure;
mod node_stream;
pub mod recovery;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::{NoNode, Role, Wanted};
use futures_util::{StreamExt, stream::FuturesUnordered};
use proto::v1::{
    DecodeEvent, DecodeRequest, FinishReason, Peer, PrefillEvent, PrefillRequest, Sampling,
};
use telemetry::{metrics::AttemptEnd, propagation};
use text::StopStrings;
use tonic::Request;
use tracing::{Instrument, Span, field};

use crate::{
    admission::{Admitted, Waiting},
    front::Front,
    generation::{
        AnswerEnd, AnswerTokens, Deadline, Event, EventSender, HandOverFigures, RequestError,
        Running,
    },
    nodes::Assigned,
    record::RequestRecord,
    request::{
        field_error::FieldError,
        ids::{RequestId, TransferId, mint_seed},
        options::{CHOICES_PER_REQUEST_MAX, DefaultLength, ModelLimits, Options, check_prompt},
        text_workers::PromptSource,
    },
};
use answer::{Answer, AnswerPlan, Ended};
use attempt::{Attempt, Next};
use emitted::EmittedTokens;
use failure::{AttemptFailure, Cause, Side};
use node_stream::NodeStream;
use recovery::{GiveUp, Recovery, Then};

/// How long a complete answer waits for the node's last event, which only adds figures.
const LAST_EVENT_MAX: Duration = Duration::from_millis(200);
/// Between two looks for a node that may come back.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// A request, read and checked field by field.
#[derive(Debug)]
pub struct Asked {
    pub request_id: RequestId,
    /// `None` or empty: the model that is served.
    pub model: Option<String>,
    pub prompts: Vec<PromptSource>,
    /// Answers to each prompt.
    pub choices: u32,
    pub options: Options,
    pub default_length: DefaultLength,
    /// The field that sets the length.
    pub max_tokens_name: &'static str,
    pub timeout: Duration,
    /// Text is made of the tokens.
    pub with_text: bool,
}

/// A request under way.
pub struct Started {
    pub running: Running,
    /// Of choice `i` it is prompt `i / choices`.
    pub prompts: Vec<Arc<[u32]>>,
}

/// What all answers of a request share.
struct RequestPlan {
    request_id: RequestId,
    answer: AnswerPlan,
    cache_salt: String,
    limits: ModelLimits,
    deadline: Deadline,
}

/// What one answer has of its own.
struct AnswerSpec {
    choice: u32,
    prompt: Arc<[u32]>,
    sampling: Sampling,
}

/// Checks the request, tokenises it and sets it going. The request runs inside `span`.
pub async fn start(
    front: &Arc<Front>,
    asked: Asked,
    record: RequestRecord,
    span: Span,
) -> Result<Started, RequestError> {
    match prepare(front, asked, &record).instrument(span.clone()).await {
        Ok(Prepared { plan, answers, prompts, admitted }) => {
            let settings = &front.settings;
            let (events_max, wait_max) =
                (settings.slow_client_events, settings.slow_client_timeout);
            let front = front.clone();
            let running = Running::start(events_max, wait_max, |events| {
                run(front, plan, answers, events, record, admitted).instrument(span)
            });
            Ok(Started { running, prompts })
        }
        Err(error) => {
            record.failed(&error);
            Err(error)
        }
    }
}

struct Prepared {
    plan: RequestPlan,
    answers: Vec<AnswerSpec>,
    prompts: Vec<Arc<[u32]>>,
    admitted: Admitted,
}

/// Step 1: check the request, render the template, tokenise, fill in a missing seed.
async fn prepare(
    front: &Front,
    asked: Asked,
    record: &RequestRecord,
) -> Result<Prepared, RequestError> {
    let deadline = Deadline::after(asked.timeout);
    let served = &front.settings.model;
    if let Some(model) = asked.model.filter(|model| !model.is_empty() && model != served) {
        let model = model.chars().take(200).collect();
        return Err(RequestError::UnknownModel { model, served: served.clone() });
    }
    let answers_max = CHOICES_PER_REQUEST_MAX.min(front.admission.max() as usize);
    let answer_count = asked.prompts.len().saturating_mul(asked.choices as usize);
    if answer_count > answers_max {
        let (field, what) = match asked.prompts.len() {
            1 => ("n", format!("is {}", asked.choices)),
            prompts => ("prompt", format!("has {prompts} prompts, with n {}", asked.choices)),
        };
        let problem = format!("{what}; allowed: at most {answers_max} answers to one request");
        return Err(FieldError::new(field, problem).into());
    }
    let options = asked.options;
    let stops = StopStrings::new(&options.stop, options.include_stop)
        .map_err(|error| stop_refused(&error))?;
    let admitted = front.admission.admit(answer_count as u32)?;
    let none = RequestError::NoDecodeNode { waited: Duration::ZERO };
    let limits = front.nodes.serving().limits.ok_or(none)?;

    let internal = |error: crate::request::ids::NoRandomness| RequestError::Internal {
        reason: error.to_string(),
    };
    let seed = mint_seed().map_err(internal)?;
    let tokenizer = front.text.tokenizer();
    let (mut prompts, mut answers) = (Vec::new(), Vec::new());
    for source in asked.prompts {
        let field = source.field();
        let work = front.text.tokens(source, limits.prompt_tokens_max);
        let tokens = tokio::time::timeout_at(deadline.at, work)
            .await
            .map_err(|_| RequestError::Deadline { timeout: deadline.timeout })??;
        check_prompt(field, &tokens, &limits)?;
        let sampling = options.sampling(
            tokens.len() as u32,
            &limits,
            asked.default_length,
            tokenizer.eos_ids(),
            seed,
            asked.max_tokens_name,
        )?;
        let prompt: Arc<[u32]> = tokens.into();
        for copy in 0..asked.choices {
            // Each answer draws its own numbers, whether or not the seed is the client's.
            let seed = sampling.seed.wrapping_add(u64::from(copy));
            answers.push(AnswerSpec {
                choice: answers.len() as u32,
                prompt: prompt.clone(),
                sampling: Sampling { seed, ..sampling.clone() },
            });
        }
        prompts.push(prompt);
    }
    let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u32).sum();
    record.asked(answer_count as u32, prompt_tokens);
    let answer = AnswerPlan {
        tokenizer: tokenizer.clone(),
        stops,
        stop_texts: options.stop.into(),
        skip_special: options.skip_special_tokens.unwrap_or(true),
        with_text: asked.with_text,
    };
    let cache_salt = options.cache_salt;
    let plan = RequestPlan { request_id: asked.request_id, answer, cache_salt, limits, deadline };
    Ok(Prepared { plan, answers, prompts, admitted })
}

fn stop_refused(error: &text::StopError) -> FieldError {
    // The message begins with the field's name or an element of it.
    let message = error.to_string();
    let problem = message.strip_prefix("stop").unwrap_or(&message).trim_start();
    FieldError::new("stop", problem)
}

/// All answers of a request, side by side. The first that fails ends the others.
async fn run(
    front: Arc<Front>,
    plan: RequestPlan,
    answers: Vec<AnswerSpec>,
    events: EventSender,
    record: RequestRecord,
    _admitted: Admitted,
) -> Result<(), RequestError> {
    let mut journeys: FuturesUnordered<_> = answers
        .into_iter()
        .map(|spec| Journey::new(&front, &plan, spec, &events, &record).run())
        .collect();
    let all = async {
        while let Some(ended) = journeys.next().await {
            ended?;
        }
        Ok(())
    };
    let ended = tokio::select! {
        ended = all => ended,
        () = front.cut.cancelled() => Err(RequestError::Stopped),
        () = tokio::time::sleep_until(plan.deadline.at) => {
            Err(RequestError::Deadline { timeout: plan.deadline.timeout })
        }
    };
    if let Err(error) = &ended {
        record.failed(error);
    }
    ended
}

/// One answer on its way: attempts, one after the other, over one list of emitted tokens.
struct Journey<'a> {
    front: &'a Front,
    plan: &'a RequestPlan,
    events: &'a EventSender,
    record: &'a RequestRecord,
    spec: AnswerSpec,
    emitted: EmittedTokens,
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
    fn new(
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

    async fn run(mut self) -> Result<(), RequestError> {
        // Whoever waits already comes first.
        if self.front.waiting.is_occupied() {
            self.wait_for_room().await?;
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

    /// The least loaded decode node, and the least loaded prefill node that fits it. Without one, or
    /// when there is nothing worth moving, the decode node works alone.
    fn pick(&self) -> Result<(Assigned, Option<Assigned>), NoNode> {
        let emitted = self.emitted.next_index();
        let prompt_tokens = self.spec.prompt.len() as u32;
        let alone = self.recovery.decode_alone();
        let wanted = Wanted {
            role: Role::Decode,
            prompt_tokens,
            tokens: prompt_tokens + emitted,
            new_tokens_max: self.spec.sampling.max_tokens - emitted,
            computes_prompt: alone,
            prefix: &[],
            identity: None,
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
        let metrics = &self.front.metrics;
        let mut guard = AttemptGuard { front: self.front, span, end: AttemptEnd::Cancelled };
        let first_index = self.emitted.next_index();
        self.figures.attempts = self.recovery.attempts();
        self.figures.decode_node = Some(decode.record().node_id.to_string());
        self.figures.prefill_node = prefill.map(|node| node.record().node_id.to_string());

        // Step 2: the decode node reserves blocks and asks the prefill node for their contents.
        let mut decode_events = self.call_decode(transfer_id, decode, prefill, span);
        // Step 3, at the same time: the prefill node reads the prompt and samples token 0.
        // Step 4 happens between the two.
        let mut prefill_events =
            prefill.map(|node| self.call_prefill(transfer_id, node, decode, span));

        let mut attempt = Attempt::new(first_index, prefill.is_some());
        let mut first_shown: Option<Instant> = None;
        let outcome = loop {
            let next = tokio::select! {
                // The decode node first: once it writes, the other one no longer matters.
                biased;
                // Step 5: the decode node repeats token 0 and goes on.
                said = decode_events.next() => match said {
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
            };
            match self.act(next, &mut prefill_events, &mut first_shown).await? {
                Some(outcome) => break outcome,
                None => continue,
            }
        };
        // Both streams end here; what was not finished is cancelled by it.
        drop((decode_events, prefill_events));

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
                            self.front.metrics.hand_over(first.elapsed());
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

    async fn show(
        &mut self,
        first_index: u32,
        tokens: Vec<proto::v1::Token>,
    ) -> Result<(), RequestError> {
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
            Then::WaitForRoom => self.wait_for_room().await,
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

    async fn wait_for_room(&mut self) -> Result<(), RequestError> {
        let waiting = match &mut self.waiting {
            Some(waiting) => waiting,
            none => none.insert(self.front.waiting.enter(&self.front.metrics)?),
        };
        // The turn may be long in coming; it counts as waiting for a node.
        let busy_max = self.front.settings.waiting_timeout;
        tokio::time::timeout(busy_max, waiting.turn())
            .await
            .map_err(|_| RequestError::Busy { waited: busy_max })
    }

    fn call_decode(
        &self,
        transfer_id: TransferId,
        decode: &Assigned,
        prefill: Option<&Assigned>,
        span: &Span,
    ) -> NodeStream<DecodeEvent> {
        let message = DecodeRequest {
            attempt: Some(self.attempt_at(transfer_id, decode)),
            prefill: prefill.map(peer),
        };
        let (mut client, request) = (decode.client(), traced(message, span));
        NodeStream::open(async move { client.decode(request).await })
    }

    fn call_prefill(
        &self,
        transfer_id: TransferId,
        prefill: &Assigned,
        decode: &Assigned,
        span: &Span,
    ) -> NodeStream<PrefillEvent> {
        let message = PrefillRequest {
            attempt: Some(self.attempt_at(transfer_id, prefill)),
            decode: Some(peer(decode)),
        };
        let (mut client, request) = (prefill.client(), traced(message, span));
        NodeStream::open(async move { client.prefill(request).await })
    }

    /// The attempt as this node is told it: the prompt and everything shown.
    fn attempt_at(&self, transfer_id: TransferId, node: &Assigned) -> proto::v1::Attempt {
        proto::v1::Attempt {
            request_id: self.plan.request_id.to_bytes(),
            transfer_id: transfer_id.to_bytes(),
            tokens: [&self.spec.prompt, self.emitted.ids()].concat(),
            prompt_len: self.spec.prompt.len() as u32,
            sampling: Some(self.spec.sampling.clone()),
            // 0 would mean that there is no time at all.
            remaining_ms: self.plan.deadline.remaining_ms().max(1),
            cache_salt: self.plan.cache_salt.clone(),
            node_epoch: node.epoch().to_bytes().to_vec().into(),
            weight_version: node.record().identity.weight_version,
        }
    }
}

/// The stream's next event; never, when there is no stream.
async fn next_of(
    events: &mut Option<NodeStream<PrefillEvent>>,
) -> Result<Option<PrefillEvent>, tonic::Status> {
    match events {
        Some(events) => events.next().await,
        None => std::future::pending().await,
    }
}

fn peer(node: &Assigned) -> Peer {
    let record = node.record();
    Peer {
        node_id: record.node_id.to_string(),
        epoch: record.epoch.to_bytes().to_vec().into(),
        notice_endpoint: record.notice_endpoint.clone(),
    }
}

fn traced<M>(message: M, span: &Span) -> Request<M> {
    let mut request = Request::new(message);
    propagation::inject_grpc(span, request.metadata_mut());
    request
}

/// Counts the attempt however it ends, also when its request is dropped.
struct AttemptGuard<'a> {
    front: &'a Front,
    span: &'a Span,
    end: AttemptEnd,
}

impl Drop for AttemptGuard<'_> {
    fn drop(&mut self) {
        self.front.metrics.attempt_ended(self.end);
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
