//! `POST /v1/chat/completions` and `POST /v1/completions`: reads the request, starts it, and replies with one
//! JSON body or a stream of events.

use std::{
    collections::HashMap,
    convert::Infallible,
    pin::pin,
    sync::Arc,
    task::{Poll, ready},
    time::{Duration, SystemTime},
};

use axum::{
    Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures_util::{Stream, stream};
use http::{HeaderMap, HeaderValue, Request, StatusCode, header};
use serde::Serialize;
use telemetry::metrics::{Operation, RequestEnd};
use tokio::time::Instant;
use tracing::Instrument;

use super::{
    RequestContext, X_REQUEST_ID, caller_of,
    error::ApiError,
    fields::RequestFields,
    read_generation_body,
    request_fields::{Delivery, named_model, read_chat, read_completion},
    wire::{
        AnswerContent, Api, Completion, ErrorBody, TextChoice, TextLogprobs, TextOffset, TokenView,
        Usage, chat_chunks, chat_end, chat_role, text_end,
    },
};
use router_core::HandOverStats;

use crate::{
    front::{Front, NamedModel},
    record::RequestRecord,
    request::{
        error::RequestError,
        tools::{AnswerPiece, CallReader, Calls},
    },
    request_driver::{
        self, AnswerEnd, AnswerEvent, AnswerTokens, GenerationFields, ParsedRequest, RunningRequest,
    },
    wake::MovingTimer,
};

const CHAT_CHUNK: &str = "chat.completion.chunk";
const TEXT_CHUNK: &str = "text_completion";
/// Further events wait for the next write once a write has this number of bytes.
const WRITE_BYTES: usize = 4096;
/// Size of a chunk's choice with the text of one token, give or take.
const CHOICE_BYTES: usize = 256;

pub(super) async fn chat_completions(
    State(front): State<Arc<Front>>,
    request: Request<Body>,
) -> Response {
    handle(front, request, Api::Chat).await
}

pub(super) async fn completions(
    State(front): State<Arc<Front>>,
    request: Request<Body>,
) -> Response {
    handle(front, request, Api::Text).await
}

async fn handle(front: Arc<Front>, request: Request<Body>, api: Api) -> Response {
    let (parts, body) = request.into_parts();
    let context = match RequestContext::new(&parts.headers, operation(api).as_str()) {
        Ok(context) => context,
        Err(error) => return ApiError::from(error).into_response(),
    };
    let mut record = RequestRecord::new(
        &front,
        operation(api),
        context.request_id,
        context.label.clone(),
        parts.extensions.get().cloned().unwrap_or_default(),
        caller_of(&parts.extensions),
    );
    record.set_span(context.span.clone());
    // Boxed, because the layers around the handler would copy the large future at every move.
    let answered = Box::pin(answer(&front, &context, &parts.headers, body, api, record));
    let answered = answered.instrument(context.span.clone()).await;
    let mut response = answered.unwrap_or_else(IntoResponse::into_response);
    response.headers_mut().insert(X_REQUEST_ID, context.echo());
    response
}

fn operation(api: Api) -> Operation {
    match api {
        Api::Chat => Operation::Chat,
        Api::Text => Operation::TextCompletion,
    }
}

/// Handles a request: reads the body, parses the fields, starts the generation, sends the reply.
async fn answer(
    front: &Arc<Front>,
    context: &RequestContext,
    headers: &HeaderMap,
    body: Body,
    api: Api,
    mut record: RequestRecord,
) -> Result<Response, ApiError> {
    let read = async {
        let body = read_generation_body(front, headers, body, record.caller()).await?;
        let fields = RequestFields::parse(&body)?;
        let named = named_model(&fields, front, record.caller())?;
        // The metrics count a rejected request for its model too.
        record.set_model(&named.model);
        let (mut fields, delivery) = match api {
            Api::Chat => read_chat(&fields)?,
            Api::Text => read_completion(&fields)?,
        };
        fields.options.session = context.session.clone()?;
        let parsed = ParsedRequest {
            request_id: context.request_id,
            tenant: record.caller().tenant(context.tenant.as_ref().map(HeaderValue::as_bytes))?,
            model: named.model.clone(),
            fields,
            timeout: context.timeout(front)?,
            with_text: true,
        };
        Ok((parsed, named, delivery))
    };
    let (parsed, named, delivery) = match read.await {
        Ok(read) => read,
        Err(error) => {
            let error: ApiError = error;
            let end = match error.status {
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                    RequestEnd::Overloaded
                }
                _ => RequestEnd::Invalid,
            };
            record.rejected(end, &error.content.message);
            return Err(error);
        }
    };
    let reply = reply(front, context, api, &parsed.fields, &named, delivery);
    let running = request_driver::start(front, parsed, record, context.span.clone()).await?;
    Ok(match delivery.stream {
        true => reply.stream(running).await?,
        false => reply.whole(running).await?,
    })
}

fn reply(
    front: &Front,
    context: &RequestContext,
    api: Api,
    fields: &GenerationFields,
    named: &NamedModel,
    delivery: Delivery,
) -> ResponseFields {
    let prefix = match api {
        Api::Chat => "chatcmpl",
        Api::Text => "cmpl",
    };
    // Without a fingerprint no node has ever served the model, and the request is refused.
    let fingerprint = front.nodes.serving(&named.model.name).model_fingerprint.unwrap_or_default();
    ResponseFields {
        id: format!("{prefix}-{}", context.request_id),
        created: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()),
        model: named.name.clone(),
        system_fingerprint: format!("fp_{:010x}", fingerprint >> 88),
        view: TokenView {
            tokenizer: named.model.text.tokenizer().clone(),
            api,
            logprobs: fields.options.logprobs,
            token_ids: delivery.token_ids,
            weight_versions: delivery.weight_versions,
            skip_special: fields.options.skip_special_tokens.unwrap_or(true),
        },
        delivery,
        wants_stats: context.wants_stats,
        choices_per_prompt: fields.choices,
        keep_alive: front.settings.keep_alive,
    }
}

/// Fields that all chunks of a response share.
struct ResponseFields {
    id: String,
    /// Creation time in seconds since 1970.
    created: u64,
    model: Arc<str>,
    system_fingerprint: String,
    view: TokenView,
    delivery: Delivery,
    wants_stats: bool,
    /// Number of answers to each prompt.
    choices_per_prompt: u32,
    /// Maximum time between events of a stream; then a keep-alive comment follows.
    keep_alive: Duration,
}

/// Token counts over all answers.
#[derive(Debug, Default)]
struct TokenTotals {
    usage: Usage,
    hand_over: HandOverStats,
}

impl TokenTotals {
    /// Adds up the usage; `prompts` counts each prompt once, for any number of answers.
    fn new(prompts: &[Arc<[u32]>]) -> Self {
        let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        let usage = Usage { prompt_tokens, total_tokens: prompt_tokens, ..Usage::default() };
        Self { usage, hand_over: HandOverStats::default() }
    }

    fn tokens(&mut self, count: usize) {
        self.usage.completion_tokens += count as u64;
        self.usage.total_tokens += count as u64;
    }

    fn ended(&mut self, end: &AnswerEnd, choices_per_prompt: u32) {
        // Count a prompt's cached tokens once, from its first answer.
        if end.choice.is_multiple_of(choices_per_prompt) {
            self.usage.prompt_tokens_details.cached_tokens += u64::from(end.cached_tokens);
        }
        self.hand_over.add(&end.hand_over);
    }
}

impl ResponseFields {
    /// Waits for all answers and returns one JSON body.
    async fn whole(self, mut started: RunningRequest) -> Result<Response, RequestError> {
        let mut totals = TokenTotals::new(&started.prompts);
        let mut collected: HashMap<u32, AnswerContent> = HashMap::new();
        let mut ends: Vec<AnswerEnd> = Vec::new();
        while let Some(event) = started.next().await {
            match event? {
                AnswerEvent::Tokens(shown) => {
                    totals.tokens(shown.tokens.len());
                    let answer = collected.entry(shown.choice).or_default();
                    answer.push(&self.view, &shown.tokens, &shown.text);
                }
                AnswerEvent::Finished(end) => {
                    totals.ended(&end, self.choices_per_prompt);
                    collected.entry(end.choice).or_default().text.push_str(&end.text);
                    ends.push(end);
                }
            }
        }
        ends.sort_by_key(|end| end.choice);
        let mut taken = |end: &AnswerEnd| collected.remove(&end.choice).unwrap_or_default();
        Ok(match self.view.api {
            Api::Chat => {
                let choice = |end: &AnswerEnd| {
                    taken(end).into_chat_choice(&self.view, end, started.call_reader(end.choice))
                };
                let choices = ends.iter().map(choice).collect();
                let mut body = self.completion("chat.completion", choices, &totals);
                if self.view.token_ids {
                    body.prompt_token_ids = started.prompts.first().map(|prompt| &**prompt);
                }
                Json(body).into_response()
            }
            Api::Text => {
                let choice = |end: &AnswerEnd| {
                    let prompt = self.prompt(&started.prompts, end.choice);
                    taken(end).into_text_choice(&self.view, end, prompt)
                };
                let choices = ends.iter().map(choice).collect();
                Json(self.completion("text_completion", choices, &totals)).into_response()
            }
        })
    }

    fn completion<C>(
        &self,
        object: &'static str,
        choices: Vec<C>,
        totals: &TokenTotals,
    ) -> Completion<'_, C> {
        Completion {
            usage: Some(Some(totals.usage)),
            baton: self.wants_stats.then(|| totals.hand_over.clone()),
            ..self.chunk(object, choices)
        }
    }

    fn chunk<C>(&self, object: &'static str, choices: Vec<C>) -> Completion<'_, C> {
        Completion {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.system_fingerprint,
            choices,
            usage: None,
            prompt_token_ids: None,
            baton: None,
        }
    }

    fn chunk_object(&self) -> &'static str {
        match self.view.api {
            Api::Chat => CHAT_CHUNK,
            Api::Text => TEXT_CHUNK,
        }
    }

    fn prompt<'a>(&self, prompts: &'a [Arc<[u32]>], choice: u32) -> &'a [u32] {
        prompts.get((choice / self.choices_per_prompt) as usize).map_or(&[], |prompt| prompt)
    }

    /// Responds with a stream. Waits a limited time for the first event, so that an immediate failure has its
    /// own HTTP status.
    async fn stream(self, mut started: RunningRequest) -> Result<Response, RequestError> {
        let first = tokio::time::timeout(self.keep_alive, started.next()).await;
        let first = match first {
            Ok(Some(Ok(event))) => Some(event),
            Ok(Some(Err(error))) => return Err(error),
            Ok(None) | Err(_) => None,
        };
        let keep_alive = self.keep_alive;
        let mut chunks = ResponseChunks::new(self, started, first);
        if chunks.first.is_some() {
            // The head and the first events leave in one write. A time-out leaves the events in `chunks`.
            let _ = tokio::time::timeout(keep_alive, chunks.fill()).await;
        }
        let mut response = Response::new(Body::from_stream(event_stream(chunks, keep_alive)));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        // Disables buffering in nginx.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        Ok(response)
    }
}

/// Events of a streamed response, created when the client's connection accepts more data.
struct ResponseChunks {
    reply: ResponseFields,
    started: RunningRequest,
    first: Option<AnswerEvent>,
    totals: TokenTotals,
    /// By choice.
    answers: Vec<AnswerProgress>,
    /// The JSON that precedes the choice in every chunk.
    head: Vec<u8>,
    /// Events that no call of [`Self::next`] has returned.
    out: Vec<u8>,
    /// Tokens of a completion whose chunk is not written: the next event may end their answer, and then both have one
    /// chunk. Clients count the chunks of completions as tokens.
    held: Option<AnswerTokens>,
    /// Number of answers that have not finished.
    answers_left: usize,
    is_over: bool,
}

/// State of one answer between its chunks.
#[derive(Default)]
struct AnswerProgress {
    introduced: bool,
    /// Parser of tool calls, from the first event until the end; `None` without tools.
    reader: Option<CallReader>,
    text_offset: TextOffset,
    completion_tokens: u64,
    /// The last tokens of a completion, until their answer's end arrives.
    last: Option<AnswerTokens>,
}

impl ResponseChunks {
    fn new(reply: ResponseFields, started: RunningRequest, first: Option<AnswerEvent>) -> Self {
        let totals = TokenTotals::new(&started.prompts);
        let answer_count = started.prompts.len() * reply.choices_per_prompt as usize;
        let answers = std::iter::repeat_with(AnswerProgress::default).take(answer_count).collect();
        let mut head = Vec::new();
        write_event(&reply.chunk::<()>(reply.chunk_object(), vec![]), &mut head);
        head.truncate(head.len() - "]}\n\n".len());
        Self {
            reply,
            started,
            first,
            totals,
            answers,
            head,
            out: Vec::new(),
            held: None,
            answers_left: answer_count,
            is_over: false,
        }
    }

    /// Returns the next events, as many as are ready; `None` at the end of the stream. The function is
    /// cancel-safe.
    async fn next(&mut self) -> Option<Bytes> {
        self.fill().await;
        (!self.out.is_empty()).then(|| std::mem::take(&mut self.out).into())
    }

    /// Writes the next events to `out`, as many as are ready. Cancel-safe.
    async fn fill(&mut self) {
        // Send nothing while all text is held back. Once all answers have finished, the end of the request follows
        // at once, so that one write carries both.
        while !self.is_over && (self.out.is_empty() || self.answers_left == 0) {
            let event = match self.first.take() {
                Some(event) => Some(Ok(event)),
                None => self.started.next().await,
            };
            let mut out = std::mem::take(&mut self.out);
            match event {
                Some(Ok(event)) => self.write(event, &mut out),
                // An error event ends the stream; no [DONE] follows.
                Some(Err(error)) => {
                    self.is_over = true;
                    for choice in 0..self.answers.len() {
                        if let Some(last) = self.answers[choice].last.take() {
                            self.write_completion(last, None, &mut out);
                        }
                    }
                    write_event(&ErrorBody { error: ApiError::from(error).content }, &mut out);
                }
                None => {
                    self.is_over = true;
                    self.write_last(&mut out);
                }
            }
            while out.len() < WRITE_BYTES
                && let Some(event) = self.started.next_queued()
            {
                self.write(event, &mut out);
            }
            if let Some(held) = self.held.take() {
                self.write_completion(held, None, &mut out);
            }
            self.out = out;
        }
    }

    fn write(&mut self, event: AnswerEvent, out: &mut Vec<u8>) {
        let is_end_of = |held: &AnswerTokens| matches!(&event, AnswerEvent::Finished(end) if end.choice == held.choice);
        if let Some(held) = self.held.take() {
            match is_end_of(&held) {
                true => self.hold_last(held),
                false => self.write_completion(held, None, out),
            }
        }
        match event {
            AnswerEvent::Tokens(shown) => self.write_tokens(shown, out),
            AnswerEvent::Finished(end) => {
                self.answers_left -= 1;
                self.totals.ended(&end, self.reply.choices_per_prompt);
                self.introduce(end.choice, out);
                match self.reply.view.api {
                    Api::Chat => self.write_chat_end(&end, out),
                    Api::Text => match self.answers[end.choice as usize].last.take() {
                        Some(last) => self.write_completion(last, Some(&end), out),
                        None => self.write_chunk(end.choice, text_end(&end), out),
                    },
                }
            }
        }
    }

    fn write_tokens(&mut self, shown: AnswerTokens, out: &mut Vec<u8>) {
        self.totals.tokens(shown.tokens.len());
        if self.reply.view.api == Api::Text {
            match shown.is_last {
                true => self.hold_last(shown),
                false => self.held = Some(shown),
            }
            return;
        }
        self.introduce(shown.choice, out);
        let AnswerTokens { choice, tokens, text, .. } = shown;
        let progress = &mut self.answers[choice as usize];
        progress.completion_tokens += tokens.len() as u64;
        let (content, pieces) = match &mut progress.reader {
            Some(reader) => (None, reader.push(&text)),
            None => (Some(AnswerPiece::Content(text)), Vec::new()),
        };
        let pieces = content.into_iter().chain(pieces);
        chat_chunks(&self.reply.view, choice, &tokens, pieces, |chunk| {
            self.write_chunk(choice, chunk, out);
        });
    }

    /// Keeps the last tokens of a completion until their answer's end.
    fn hold_last(&mut self, tokens: AnswerTokens) {
        let choice = tokens.choice as usize;
        self.answers[choice].last = Some(tokens);
    }

    /// Writes the chunk of a completion's tokens, with the end of their answer if they are the last ones.
    fn write_completion(
        &mut self,
        shown: AnswerTokens,
        end: Option<&AnswerEnd>,
        out: &mut Vec<u8>,
    ) {
        let AnswerTokens { choice, tokens, text, .. } = shown;
        let progress = &mut self.answers[choice as usize];
        progress.completion_tokens += tokens.len() as u64;
        let first = !std::mem::replace(&mut progress.introduced, true);
        let (reply, view) = (&self.reply, &self.reply.view);
        let mut logprobs = TextLogprobs::default();
        view.text_logprobs(&tokens, &mut progress.text_offset, &mut logprobs);
        let prompt = reply.prompt(&self.started.prompts, choice);
        let end = end.map(text_end).unwrap_or_default();
        let content = TextChoice {
            index: choice,
            text: text + &end.text,
            logprobs: view.logprobs.map(|_| logprobs),
            prompt_token_ids: (first && view.token_ids).then_some(prompt),
            token_ids: view.ids(&tokens),
            weight_versions: view.versions(&tokens),
            ..end
        };
        self.write_chunk(choice, content, out);
    }

    /// Sends the role at the beginning of a chat answer.
    fn introduce(&mut self, choice: u32, out: &mut Vec<u8>) {
        let progress = &mut self.answers[choice as usize];
        if self.reply.view.api == Api::Text || std::mem::replace(&mut progress.introduced, true) {
            return;
        }
        progress.reader = self.started.call_reader(choice);
        let mut chunk = self.reply.chunk(CHAT_CHUNK, vec![chat_role(choice)]);
        chunk.usage = self.usage_of(choice);
        if self.reply.view.token_ids {
            chunk.prompt_token_ids = Some(self.reply.prompt(&self.started.prompts, choice));
        }
        write_event(&chunk, out);
    }

    fn write_chat_end(&mut self, end: &AnswerEnd, out: &mut Vec<u8>) {
        // Send text that was held back.
        let (pieces, calls) = match self.answers[end.choice as usize].reader.take() {
            Some(reader) => reader.finish(&end.text, end.is_cut()),
            None if end.text.is_empty() => (Vec::new(), Calls::None),
            None => (vec![AnswerPiece::Content(end.text.clone())], Calls::None),
        };
        let tokenless = TokenView {
            logprobs: None,
            token_ids: false,
            weight_versions: false,
            ..self.reply.view.clone()
        };
        chat_chunks(&tokenless, end.choice, &[], pieces, |chunk| {
            self.write_chunk(end.choice, chunk, out);
        });
        self.write_chunk(end.choice, chat_end(end, calls), out);
    }

    /// Appends a chunk with this content of a choice: an event of [`ResponseFields::chunk`] whose constant fields
    /// are not formatted again.
    fn write_chunk(&self, choice: u32, content: impl Serialize, out: &mut Vec<u8>) {
        out.reserve(self.head.len() + CHOICE_BYTES);
        out.extend_from_slice(&self.head);
        write_json(&content, out);
        out.push(b']');
        if let Some(usage) = self.usage_of(choice) {
            out.extend_from_slice(b",\"usage\":");
            write_json(&usage, out);
        }
        out.extend_from_slice(b"}\n\n");
    }

    /// Returns the usage of an ordinary chunk: absent, `null` if the last chunk has it, or the usage of the answer so
    /// far.
    fn usage_of(&self, choice: u32) -> Option<Option<Usage>> {
        let delivery = &self.reply.delivery;
        if delivery.continuous_usage {
            let prompt_tokens = self.reply.prompt(&self.started.prompts, choice).len() as u64;
            let completion_tokens = self.answers[choice as usize].completion_tokens;
            return Some(Some(Usage {
                prompt_tokens,
                completion_tokens,
                total_tokens: prompt_tokens + completion_tokens,
                ..Usage::default()
            }));
        }
        delivery.include_usage.then_some(None)
    }

    fn write_last(&self, out: &mut Vec<u8>) {
        let (delivery, reply) = (&self.reply.delivery, &self.reply);
        if delivery.include_usage || reply.wants_stats {
            let mut chunk = reply.chunk::<()>(reply.chunk_object(), vec![]);
            chunk.usage = delivery.include_usage.then_some(Some(self.totals.usage));
            chunk.baton = reply.wants_stats.then(|| self.totals.hand_over.clone());
            write_event(&chunk, out);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }
}

/// Appends an event with this content.
fn write_event(content: &impl Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    write_json(content, out);
    out.extend_from_slice(b"\n\n");
}

fn write_json(content: &impl Serialize, out: &mut Vec<u8>) {
    serde_json::to_writer(out, content)
        .expect("writing to a vector succeeds, and these types have string keys");
}

/// Returns the stream's bytes on demand. Sends a comment after `keep_alive` without an event.
fn event_stream(
    mut chunks: ResponseChunks,
    keep_alive: Duration,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
    let mut comment_at = Instant::now() + keep_alive;
    let mut timer = MovingTimer::new(comment_at);
    // `stream::unfold` would move `chunks` with each token.
    stream::poll_fn(move |cx| {
        let bytes = match pin!(chunks.next()).poll(cx) {
            Poll::Ready(next) => next,
            Poll::Pending => {
                ready!(timer.poll_reached(cx, comment_at));
                Some(Bytes::from_static(b": keep-alive\n\n"))
            }
        };
        comment_at = Instant::now() + keep_alive;
        Poll::Ready(bytes.map(Ok))
    })
}
