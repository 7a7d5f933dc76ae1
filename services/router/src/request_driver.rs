//! Runs requests: the async shell around the request core.
//!
//! A request passes these stages:
//! 1. [`ParsedRequest`]: `http` or `grpc` parsed and checked its fields.
//! 2. [`PreparedRequest`]: it is admitted and tokenized, with one [`AnswerSpec`] for each choice.
//! 3. [`RunningRequest`]: one task runs an [`AnswerDriver`] for each answer, until all are finished
//!    or one fails. The driver performs the outputs of its [`AnswerCore`](router_core::AnswerCore).

mod answer_driver;
mod events;

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, TryStreamExt, stream};
use proto::{
    ids::{RequestId, random_bits},
    v1,
};
use router_core::{AnswerSpec, ArrivedRequest, Flow, LoadBound, WaitLimits};
use text::{ReasoningFormat, StopStrings};
use tokio::{
    task::{AbortHandle, JoinHandle},
    time::Instant,
};
use tracing::{Instrument, Span};

use crate::{
    front::{Front, NamedModel, ServedModel},
    keys::{Caller, OpenStreams},
    record::RequestRecord,
    request::{
        answer_reader::{AnswerReader, AnswerReading, CallReading, ReasoningReading},
        error::{FieldError, RequestError},
        options::{
            CHOICES_PER_REQUEST_MAX, DefaultLength, ModelLimits, Options, PROMPT_LOGPROBS_MAX,
            RequestedGrammar, Tenant, Truncation, check_prompt,
        },
        text_workers::{CacheKeying, PromptLengths, PromptSource, TokenizedPrompt},
        tools::OfferedTools,
    },
    shared_router::AdmittedRequest,
    wake::when_woken,
};
use answer_driver::AnswerDriver;
pub(crate) use events::{AnswerEnd, AnswerEvent, AnswerTokens, StopReason};
use events::{EventReceiver, EventSender, event_queue};

/// Parsed and checked fields of a request.
pub(crate) struct GenerationFields {
    pub prompts: Vec<PromptSource>,
    /// Number of answers to each prompt.
    pub choices: u32,
    pub options: Options,
    pub default_length: DefaultLength,
    /// Whether the client wants nothing of the answer, only what is known of the prompt. Nodes
    /// sample one token.
    pub prompt_only: bool,
    /// Name of the field that sets the maximum length, for error messages.
    pub max_tokens_name: &'static str,
    /// Tools that the model may call.
    pub tools: Option<OfferedTools>,
}

/// A parsed request.
pub(crate) struct ParsedRequest {
    pub request_id: RequestId,
    pub tenant: Option<Tenant>,
    pub model: NamedModel,
    pub fields: GenerationFields,
    pub deadline: RequestDeadline,
    /// Whether the answer is detokenized.
    pub with_text: bool,
}

/// An admitted request: the properties that all of its answers share.
pub(crate) struct PreparedRequest {
    pub model: Arc<ServedModel>,
    pub stops: StopStrings,
    /// The strings of `stops`.
    pub stop_texts: Arc<[String]>,
    pub skip_special: bool,
    /// Whether the client gets no token and no text of the answers.
    pub prompt_only: bool,
    /// Whether the answers are detokenized. Without text no stop string is found.
    pub with_text: bool,
    /// Settings for reading the answers; `None` if their text is their content.
    pub reading: Option<AnswerReading>,
    /// Maximum number of answers in flight.
    parallel: u32,
    pub deadline: RequestDeadline,
    /// Flow of the caller, for the order in which requests start.
    pub flow: Flow,
    /// The request's share of the requests in flight.
    _admitted: AdmittedRequest,
    /// The request's share of its key's streams.
    _streams: OpenStreams,
}

/// The deadline of a request, and its time-out for error messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestDeadline {
    pub at: Instant,
    pub timeout: Duration,
}

impl RequestDeadline {
    pub(crate) fn after(timeout: Duration) -> Self {
        Self { at: Instant::now() + timeout, timeout }
    }

    /// Returns the output of `work`, or an error if the deadline passes first.
    pub(crate) async fn limit<T>(self, work: impl Future<Output = T>) -> Result<T, RequestError> {
        let late = RequestError::Deadline { timeout: self.timeout };
        tokio::time::timeout_at(self.at, work).await.map_err(|_| late)
    }
}

/// A running request, for the writer of its response. Dropping it ends the task, which drops the
/// node streams: a client that disconnects cancels its request this way.
#[derive(Debug)]
pub(crate) struct RunningRequest {
    /// The tokenized prompts. The prompt of choice `i` is prompt `i / choices`.
    pub prompts: Vec<Arc<[u32]>>,
    /// Number of answers to all prompts.
    pub answers: u32,
    /// Settings for reading the answers; `None` if their text is their content.
    reading: Option<AnswerReading>,
    events: EventReceiver,
    task: Option<JoinHandle<Result<(), RequestError>>>,
}

/// Prepares the request and starts its task inside `span`.
pub(crate) async fn start(
    front: &Arc<Front>,
    parsed: ParsedRequest,
    mut record: RequestRecord,
    span: Span,
) -> Result<RunningRequest, RequestError> {
    record.set_model(&parsed.model.model);
    record.read();
    let choices = parsed.fields.choices as usize;
    match prepare(front, parsed, &record).instrument(span.clone()).await {
        Ok((request, answers)) => {
            let prompts = answers.iter().step_by(choices).map(|answer| answer.prompt.clone());
            let prompts = prompts.collect();
            let settings = &front.settings.router;
            let events_max = settings.slow_client_events as usize;
            let (sender, events) = event_queue(events_max, settings.slow_client_timeout);
            let reading = request.reading.clone();
            let answer_count = answers.len() as u32;
            // Entering the span at each token would cost more than the token's text.
            let run = run(front.clone(), request, answers, sender, record);
            let task = Some(tokio::spawn(run));
            Ok(RunningRequest { prompts, answers: answer_count, reading, events, task })
        }
        Err(error) => {
            record.failed(&error);
            Err(error)
        }
    }
}

/// Admits and tokenizes a request. Returns its answers, ordered by choice.
async fn prepare(
    front: &Front,
    parsed: ParsedRequest,
    record: &RequestRecord,
) -> Result<(PreparedRequest, Vec<AnswerSpec>), RequestError> {
    let ParsedRequest { request_id, tenant, model, mut fields, deadline, with_text } = parsed;
    let NamedModel { model, adapter, .. } = model;
    check_output(front, &model, &fields.options)?;
    let flow = record.caller().flow(tenant.as_ref());
    let parallel = check_answer_count(front, record.caller(), &flow, &fields)?;
    let mut options = fields.options.or(model.text.sampling_defaults());
    let calls = offer_tools(&mut fields.tools, &mut options, &model, request_id)?;
    let stops = StopStrings::new(&options.stop, options.include_stop)
        .map_err(|error| stop_refused("stop", &error))?;
    if record.connection().is_late {
        return Err(LoadBound::Stopping.into());
    }
    let streams = record.caller().open_streams(parallel)?;
    let wait_max = front.settings.router.waiting_timeout;
    let admitted = front.router.admit(&ArrivedRequest {
        flow: &flow,
        model: &model.name,
        answers: parallel,
        output_tokens_max: options.output_tokens_max(fields.default_length),
        limits: WaitLimits { wait_max, deadline: deadline.at.into_std() },
    })?;
    let limits = served_limits(front, &model)?;
    let is_chat = matches!(fields.prompts[..], [PromptSource::Chat(_)]);
    let reasoning_format = model.text.reasoning_format().filter(|_| is_chat);
    let grammar = options.grammar.take();
    let version =
        check_grammar(front, &model, grammar.as_ref(), reasoning_format, deadline).await?;
    let bad_words = check_sampling(front, &model, &options)?;
    let seed = random_bits()? as u64;
    let cache_salt = record.caller().salt_for_nodes(tenant.as_ref(), &options.cache_salt);
    let keying = Arc::new(CacheKeying {
        identities: front.nodes.cache_identities(&model.name),
        adapter,
        salt: cache_salt.clone(),
    });
    let cache_salt: Arc<str> = cache_salt.into();
    let (mut prompt_tokens, mut answers, mut reasoning) = (0, Vec::new(), None);
    let is_list = fields.prompts.len() > 1;
    for (index, source) in fields.prompts.into_iter().enumerate() {
        let at = is_list.then_some(index);
        let prompt = tokenize(&model, source, at, &options, &limits, keying.clone(), deadline);
        let TokenizedPrompt { tokens, prefix, reasoning_start } = prompt.await?;
        reasoning = reasoning_format
            .map(|format| ReasoningReading::new(format, reasoning_start, model.text.tokenizer()));
        let tags = reasoning.and_then(ReasoningReading::tags);
        let grammar = grammar.as_ref().map(|grammar| Arc::new(grammar.for_nodes(tags)));
        let mut sampling = options.sampling(
            tokens.len() as u32,
            &limits,
            fields.default_length,
            model.text.tokenizer().eos_ids(),
            seed,
            fields.max_tokens_name,
        )?;
        sampling.bad_words.clone_from(&bad_words);
        prompt_tokens += tokens.len() as u32;
        let answer = AnswerSpec {
            request_id,
            model: model.name.clone(),
            adapter,
            prompt: tokens.into(),
            prefix: prefix.into(),
            sampling,
            grammar,
            grammar_version: version,
            cache_salt: cache_salt.clone(),
            session: options.session.clone(),
            priority: options.priority,
            vocabulary_size: limits.vocabulary_size,
            deadline: deadline.at.into_std(),
            is_further: index > 0,
        };
        answers.extend((0..fields.choices).map(|copy| answer_copy(&answer, copy)));
        // Short prompts are tokenized on this thread.
        tokio::task::yield_now().await;
    }
    check_prompt_logprobs(&answers)?;
    record.prepared(answers.len() as u32, prompt_tokens);
    let reading = AnswerReading::of(reasoning.filter(|_| with_text), calls);
    let request = PreparedRequest {
        model,
        stops,
        stop_texts: options.stop.into(),
        skip_special: options.skip_special_tokens.unwrap_or(true),
        prompt_only: fields.prompt_only,
        with_text,
        reading,
        parallel,
        deadline,
        flow,
        _admitted: admitted,
        _streams: streams,
    };
    Ok((request, answers))
}

/// Rejects more log-probabilities of prompts than a router keeps for one request.
fn check_prompt_logprobs(answers: &[AnswerSpec]) -> Result<(), FieldError> {
    let count = |answer: &AnswerSpec| {
        Some(answer.prompt.len() as u64 * u64::from(1 + answer.sampling.prompt_logprobs?))
    };
    let all: u64 = answers.iter().filter_map(count).sum();
    if all <= u64::from(PROMPT_LOGPROBS_MAX) {
        return Ok(());
    }
    let problem = format!(
        "gives {all} log-probabilities over all answers; allowed: at most {PROMPT_LOGPROBS_MAX}"
    );
    Err(FieldError::new("prompt_logprobs", problem))
}

/// Returns one of the answers to a prompt. Each has a seed of its own, whether or not the client
/// named one.
fn answer_copy(answer: &AnswerSpec, copy: u32) -> AnswerSpec {
    let mut answer = answer.clone();
    answer.sampling.seed = answer.sampling.seed.wrapping_add(u64::from(copy));
    answer.is_further |= copy > 0;
    answer
}

/// Rejects text of a model without an LM head, and pooled values of nodes that return none.
fn check_output(front: &Front, model: &ServedModel, options: &Options) -> Result<(), FieldError> {
    let problem = match options.pooling {
        None if !model.text.generates() => {
            "has no LM head and generates no text; allowed: only for embeddings"
        }
        // Without a node this is unknown, and the request waits for a node in its core.
        Some(_) if front.nodes.returns_pooled(&model.name) == Some(false) => {
            "is served by nodes that compute in several ranks or run an older release; allowed: a \
             model whose nodes have node.tp 1"
        }
        _ => return Ok(()),
    };
    Err(FieldError::new("model", problem))
}

/// Rejects sampling parameters that no decode node of the model supports. Returns the tokens of
/// `bad_words`.
fn check_sampling(
    front: &Front,
    model: &ServedModel,
    options: &Options,
) -> Result<Vec<v1::TokenIds>, FieldError> {
    let Some(field) = options.field_of_sampling() else { return Ok(Vec::new()) };
    // Without a node the version is unknown, and the request waits for a node in its core.
    if front.nodes.sampling_version(&model.name) == Some(0) {
        let problem = "is not supported by the model's nodes, which have several GPUs or run an \
                       older release; allowed: with nodes of one GPU or on a CPU";
        return Err(FieldError::new(field, problem));
    }
    model.text.bad_words(&options.bad_words)
}

/// Returns the limits of the model's nodes. While no node is up, those of the last known nodes
/// apply, and the request waits for a node in its core.
fn served_limits(front: &Front, model: &ServedModel) -> Result<ModelLimits, RequestError> {
    front.nodes.serving(&model.name).limits.ok_or_else(|| {
        let reason = "no node has served the model yet".to_owned();
        RequestError::NoDecodeNode { waited: Duration::ZERO, reason }
    })
}

/// Tokenizes a prompt. An error of one of several prompts whose values are pooled names its index.
async fn tokenize(
    model: &ServedModel,
    source: PromptSource,
    index: Option<usize>,
    options: &Options,
    limits: &ModelLimits,
    keying: Arc<CacheKeying>,
    deadline: RequestDeadline,
) -> Result<TokenizedPrompt, RequestError> {
    let field = source.field();
    let kept_max = match options.truncation {
        Truncation::Never => None,
        Truncation::Longest => Some(limits.longest_prompt()),
        Truncation::Last(count) => Some(count),
    };
    let lengths = PromptLengths { tokens_max: limits.prompt_tokens_max, kept_max };
    let work = model.text.prompt(source, lengths, keying);
    let tokenized = async {
        let prompt = deadline.limit(work).await??;
        check_prompt(field, &prompt.tokens, limits)?;
        Ok(prompt)
    };
    tokenized.await.map_err(|error: RequestError| match &options.pooling {
        Some(pooling) => error.at(pooling.field, index),
        None => error,
    })
}

/// Returns the number of answers that run at a time: all of them, or as many texts as a request may
/// pool at a time. Rejects answers of which no router state would admit so many.
fn check_answer_count(
    front: &Front,
    caller: &Caller,
    flow: &Flow,
    fields: &GenerationFields,
) -> Result<u32, FieldError> {
    let admitted_max = front.router.with(|core| core.in_flight_max(flow));
    let admitted_max = admitted_max.min(caller.streams_max().unwrap_or(u32::MAX));
    let answers_max = CHOICES_PER_REQUEST_MAX.min(admitted_max as usize);
    let answer_count = fields.prompts.len().saturating_mul(fields.choices as usize);
    if fields.options.pooling.is_some() {
        return Ok(answer_count.min(answers_max) as u32);
    }
    if answer_count <= answers_max {
        return Ok(answer_count as u32);
    }
    let (field, what) = match fields.prompts.len() {
        1 => ("n", format!("is {}", fields.choices)),
        prompts => ("prompt", format!("has {prompts} prompts, with n {}", fields.choices)),
    };
    let problem = format!("{what}; allowed: at most {answers_max} answers to one request");
    Err(FieldError::new(field, problem))
}

/// Adds the grammar of the offered tools to the options. Returns the settings for parsing tool
/// calls; `None` without tools.
fn offer_tools(
    tools: &mut Option<OfferedTools>,
    options: &mut Options,
    model: &ServedModel,
    request_id: RequestId,
) -> Result<Option<CallReading>, RequestError> {
    let (Some(tools), Some(format)) = (tools, model.text.tool_format()) else { return Ok(None) };
    // The template would reject an answer with several calls in the next request.
    tools.parallel &= model.text.takes_parallel_calls();
    options.grammar = tools.grammar(format, options.grammar.take())?;
    Ok(Some(CallReading::new(tools, format, request_id)))
}

/// Compiles the grammar that the answers must match. Returns the grammar version that nodes need
/// for it; 0 without a grammar.
async fn check_grammar(
    front: &Front,
    model: &ServedModel,
    grammar: Option<&RequestedGrammar>,
    reasoning: Option<&ReasoningFormat>,
    deadline: RequestDeadline,
) -> Result<u32, RequestError> {
    let Some(grammar) = grammar else { return Ok(0) };
    deadline.limit(model.text.check_grammar(grammar)).await??;
    let version = grammar.version(reasoning);
    // Without a node the version is unknown, and the request waits for a node in its core.
    let newest = front.nodes.grammar_version(&model.name);
    if newest.is_some_and(|newest| newest < version) {
        return Err(RequestError::NoGrammar { field: grammar.field });
    }
    Ok(version)
}

/// Returns the error of a field with invalid stop strings.
pub(crate) fn stop_refused(field: &str, error: &text::StopStringError) -> FieldError {
    // The message begins with the name of the field or of one of its elements.
    let message = error.to_string();
    let problem = message.strip_prefix("stop").unwrap_or(&message).trim_start();
    FieldError::new(field, problem)
}

/// Runs the answers of a request, all or a part of them concurrently. The first failure ends the
/// other answers.
async fn run(
    front: Arc<Front>,
    request: PreparedRequest,
    answers: Vec<AnswerSpec>,
    events: EventSender,
    record: RequestRecord,
) -> Result<(), RequestError> {
    let driver = |(choice, answer)| {
        AnswerDriver::new(&front, &request, choice, answer, &events, &record).run()
    };
    let answers = stream::iter((0..).zip(answers).map(driver));
    let all = answers.buffer_unordered(request.parallel as usize).try_collect::<()>();
    let ended = tokio::select! {
        biased;
        ended = all => ended,
        () = when_woken(front.cut.cancelled()) => Err(RequestError::Stopped),
    };
    if let Err(error) = &ended {
        record.failed(error);
    }
    // Events that wait for the client take memory, so the request stays in flight until they are
    // read. A client that reads slowly has until the deadline plus the time-out of one event.
    let read_by =
        request.deadline.at.max(Instant::now()) + front.settings.router.slow_client_timeout;
    let read = tokio::select! {
        read = events.read_out() => read,
        () = front.cut.cancelled() => Err(RequestError::Stopped),
        () = tokio::time::sleep_until(read_by) => {
            Err(RequestError::Deadline { timeout: request.deadline.timeout })
        }
    };
    if read.is_err() {
        events.discard();
    }
    if let (Ok(()), Err(error)) = (&ended, &read) {
        record.failed(error);
    }
    ended.and(read)
}

impl RunningRequest {
    /// Returns the reader of this answer; `None` if its text is its content.
    pub(crate) fn reader(&self, choice: u32) -> Option<AnswerReader> {
        self.reading.as_ref().map(|reading| AnswerReader::new(reading, choice))
    }

    /// Returns a handle that ends the request as if the client had disconnected.
    pub(crate) fn abort_handle(&self) -> AbortHandle {
        self.task.as_ref().expect("the task has not been joined").abort_handle()
    }

    /// Returns the next event if one is queued.
    pub(crate) fn next_queued(&mut self) -> Option<AnswerEvent> {
        self.events.recv_queued()
    }

    /// Returns the next event; at the end `None`, or the one error that the request failed with.
    /// Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<Result<AnswerEvent, RequestError>> {
        if let Some(event) = self.events.recv().await {
            return Some(Ok(event));
        }
        let ended = self.task.as_mut()?.await;
        self.task = None;
        match ended {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Err(error)),
            Err(error) if error.is_cancelled() => Some(Err(RequestError::ClientGone)),
            Err(error) => Some(Err(RequestError::Internal { reason: error.to_string() })),
        }
    }
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{events::tests::event, *};

    fn start<F>(work: impl FnOnce(EventSender) -> F) -> RunningRequest
    where
        F: Future<Output = Result<(), RequestError>> + Send + 'static,
    {
        let (sender, events) = event_queue(1, WAIT_MAX);
        RunningRequest {
            prompts: vec![],
            answers: 0,
            reading: None,
            events,
            task: Some(tokio::spawn(work(sender))),
        }
    }

    const WAIT_MAX: Duration = Duration::from_millis(20);

    #[tokio::test(start_paused = true)]
    async fn events_come_in_order_and_then_the_end() {
        let mut running = start(|events| async move {
            for choice in 0..5 {
                events.send(event(choice)).await?;
            }
            Err(RequestError::Stopped)
        });
        for choice in 0..5 {
            assert_eq!(running.next().await, Some(Ok(event(choice))));
        }
        assert_eq!(running.next().await, Some(Err(RequestError::Stopped)));
        assert_eq!(running.next().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_does_not_read_ends_its_own_request() {
        let mut running = start(|events| async move {
            loop {
                events.send(event(0)).await?;
            }
        });
        tokio::time::sleep(WAIT_MAX * 4).await;
        assert_eq!(running.next().await, Some(Ok(event(0))));
        assert_eq!(running.next().await, Some(Err(RequestError::SlowClient { waited: WAIT_MAX })));
    }

    #[tokio::test]
    async fn dropping_the_reader_ends_the_work() {
        let (alive, ended) = tokio::sync::oneshot::channel::<()>();
        let running = start(|_| async move {
            let _alive = alive;
            std::future::pending().await
        });
        drop(running);
        assert!(ended.await.is_err());
    }

    #[tokio::test]
    async fn a_panic_inside_is_an_error_of_this_request_alone() {
        let mut running = start(|_| async move { panic!("a bug") });
        assert!(matches!(running.next().await, Some(Err(RequestError::Internal { .. }))));
    }
}
