//! Generation for every HTTP API: starts a request, and sends the events of its answers as one JSON
//! body or as server-sent events.
//!
//! An API implements [`GenerationApi`]: it reads its own body, and its writers turn the events of
//! answers into its own format. [`answer_request`] does everything else: request id, record, body
//! limits, start, status of an immediate failure, keep-alive comments.

use std::{
    convert::Infallible,
    pin::pin,
    sync::Arc,
    task::{Poll, ready},
    time::{Duration, SystemTime},
};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use futures_util::{Stream, stream};
use http::{HeaderMap, HeaderValue, Request, StatusCode, header};
use proto::ids::RequestId;
use router_core::HandOverStats;
use serde::Serialize;
use telemetry::metrics::{Operation, RequestEnd};
use tokio::{task::AbortHandle, time::Instant};
use tracing::Instrument;

use super::{
    RequestContext, X_REQUEST_ID, caller_of, error::ApiError, fields::RequestFields,
    read_generation_body, request_fields::named_model, wire::Usage,
};
use crate::{
    front::{Front, NamedModel, ServedModel},
    record::RequestRecord,
    request::{answer_reader::AnswerReader, error::RequestError},
    request_driver::{
        self, AnswerEnd, AnswerEvent, GenerationFields, ParsedRequest, RunningRequest,
    },
    wake::MovingTimer,
};

/// Further events wait for the next write once a write has this number of bytes.
const WRITE_BYTES: usize = 4096;

/// An HTTP API that generates answers.
pub(super) trait GenerationApi: Send + Sync + 'static {
    /// The fields of a body that decide how the reply is written.
    type ReplyFields: Send;
    type Stream: StreamWriter;
    type Whole: WholeWriter;

    fn operation(&self) -> Operation;

    /// Reads the fields of a body that names `model`.
    fn read(
        &self,
        fields: &RequestFields<'_>,
        model: &ServedModel,
    ) -> Result<(GenerationFields, Self::ReplyFields), ApiError>;

    /// Returns the writer of the reply to a request that has started.
    fn writer(
        &self,
        fields: Self::ReplyFields,
        started: StartedReply,
    ) -> ReplyWriter<Self::Stream, Self::Whole>;

    /// Returns the response to a request that failed before its first event.
    fn refusal(&self, error: ApiError) -> Response;
}

/// The writer of a streamed reply or of one JSON body.
pub(super) enum ReplyWriter<S, W> {
    Stream(S),
    Whole(W),
}

/// Writer of a streamed reply.
pub(super) trait StreamWriter: Send + 'static {
    /// Writes the events for an event of an answer. May hold events back until the next call.
    fn write(&mut self, event: AnswerEvent, out: &mut EventBuffer);

    /// Writes what was held back. Called when no further event of an answer is ready.
    fn flush(&mut self, out: &mut EventBuffer);

    /// Writes the error that ends the stream.
    fn write_error(&mut self, error: ApiError, out: &mut EventBuffer);

    /// Writes the end of a stream whose answers are complete.
    fn write_last(&mut self, out: &mut EventBuffer);
}

/// Writer of a reply in one body.
pub(super) trait WholeWriter: Send {
    fn add(&mut self, event: AnswerEvent);

    /// Returns the response after the last event.
    fn into_response(self) -> Response;
}

/// Facts of a started request, for its writers.
pub(super) struct StartedReply {
    pub request_id: RequestId,
    /// Creation time in seconds since 1970.
    pub created: u64,
    pub model: NamedModel,
    pub model_fingerprint: u128,
    /// Whether the client asked for statistics of the hand-over between nodes.
    pub wants_stats: bool,
    /// The tokenized prompts. The prompt of choice `i` is prompt `i / choices`.
    pub prompts: Vec<Arc<[u32]>>,
    /// Ends the request early.
    pub abort: AbortHandle,
    /// Readers of the answers, by choice; `None` if the text of an answer is its content.
    pub readers: Vec<Option<AnswerReader>>,
}

/// Server-sent events that wait for the next write to the client.
#[derive(Default)]
pub(super) struct EventBuffer {
    bytes: Vec<u8>,
    /// Ids of the events, if the stream can be resumed.
    ids: Option<EventIds>,
}

/// Ids of the events of a stream: the stream's id and the number of the event, from 0.
struct EventIds {
    stream: RequestId,
    /// Number of the next event.
    next: u64,
}

impl EventBuffer {
    /// Appends an event with JSON content.
    pub(super) fn json(&mut self, content: &impl Serialize) {
        self.event(|out| write_json(content, out));
    }

    /// Appends an event of this type, with JSON content.
    pub(super) fn named(&mut self, name: &str, content: &impl Serialize) {
        self.bytes.extend_from_slice(b"event: ");
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(b'\n');
        self.json(content);
    }

    /// Appends an event; `write` appends its data, one line.
    pub(super) fn event(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        if let Some(EventIds { stream, next }) = &mut self.ids {
            let id = format!("id: {stream}-{next}\n");
            self.bytes.extend_from_slice(id.as_bytes());
            *next += 1;
        }
        self.bytes.extend_from_slice(b"data: ");
        write(&mut self.bytes);
        self.bytes.extend_from_slice(b"\n\n");
    }
}

pub(super) fn write_json(content: &impl Serialize, out: &mut Vec<u8>) {
    serde_json::to_writer(out, content)
        .expect("writing to a vector succeeds, and these types have string keys");
}

/// Token counts over all answers.
#[derive(Debug, Default)]
pub(super) struct TokenTotals {
    pub usage: Usage,
    pub hand_over: HandOverStats,
    choices_per_prompt: u32,
}

impl TokenTotals {
    /// Adds up the usage; `prompts` counts each prompt once, for any number of answers.
    pub(super) fn new(prompts: &[Arc<[u32]>], choices_per_prompt: u32) -> Self {
        let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        let usage = Usage { prompt_tokens, total_tokens: prompt_tokens, ..Usage::default() };
        Self { usage, hand_over: HandOverStats::default(), choices_per_prompt }
    }

    pub(super) fn tokens(&mut self, count: usize) {
        self.usage.completion_tokens += count as u64;
        self.usage.total_tokens += count as u64;
    }

    /// Adds the reasoning tokens of an answer; `None` if the model has no format of reasoning.
    pub(super) fn reasoning(&mut self, tokens: Option<u64>) {
        if let Some(count) = tokens {
            let details = &mut self.usage.completion_tokens_details;
            details.get_or_insert_default().reasoning_tokens += count;
        }
    }

    pub(super) fn ended(&mut self, end: &AnswerEnd) {
        // Count a prompt's cached tokens once, from its first answer.
        if end.choice.is_multiple_of(self.choices_per_prompt) {
            self.usage.prompt_tokens_details.cached_tokens += u64::from(end.cached_tokens);
        }
        self.hand_over.add(&end.hand_over);
    }
}

/// Responds to a request of an API that generates answers.
pub(super) async fn answer_request<A: GenerationApi>(
    front: Arc<Front>,
    request: Request<Body>,
    api: A,
) -> Response {
    let (parts, body) = request.into_parts();
    let operation = api.operation();
    let context = match RequestContext::new(&parts.headers, operation.as_str()) {
        Ok(context) => context,
        Err(error) => return api.refusal(error.into()),
    };
    let mut record = RequestRecord::new(
        &front,
        operation,
        context.request_id,
        context.label.clone(),
        parts.extensions.get().cloned().unwrap_or_default(),
        caller_of(&parts.extensions),
    );
    record.set_span(context.span.clone());
    // Boxed, because the layers around the handler would copy the large future at every move.
    let answered = Box::pin(answer(&front, &context, &parts.headers, body, &api, record));
    let answered = answered.instrument(context.span.clone()).await;
    let mut response = answered.unwrap_or_else(|error| api.refusal(error));
    response.headers_mut().insert(X_REQUEST_ID, context.echo());
    response
}

/// Handles a request: reads the body, parses the fields, starts the generation, sends the reply.
async fn answer<A: GenerationApi>(
    front: &Arc<Front>,
    context: &RequestContext,
    headers: &HeaderMap,
    body: Body,
    api: &A,
    mut record: RequestRecord,
) -> Result<Response, ApiError> {
    let read = async {
        let deadline = record.deadline(context.timeout(front)?);
        let body = read_generation_body(front, headers, body, record.caller());
        let body = deadline.limit(body).await??;
        let fields = RequestFields::parse(&body)?;
        let named = named_model(&fields, front, record.caller())?;
        // The metrics count a rejected request for its model too.
        record.set_model(&named.model);
        let (mut fields, reply_fields) = api.read(&fields, &named.model)?;
        fields.options.session = context.session.clone()?;
        let parsed = ParsedRequest {
            request_id: context.request_id,
            tenant: record.caller().tenant(context.tenant.as_ref().map(HeaderValue::as_bytes))?,
            model: named.clone(),
            // Pooled values replace the text.
            with_text: fields.options.pooling.is_none(),
            fields,
            deadline,
        };
        Ok((parsed, named, reply_fields))
    };
    let (parsed, model, reply_fields) = match read.await {
        Ok(read) => read,
        Err(error) => {
            let error: ApiError = error;
            let end = match error.status {
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                    RequestEnd::Overloaded
                }
                StatusCode::GATEWAY_TIMEOUT => RequestEnd::Deadline,
                _ => RequestEnd::Invalid,
            };
            record.rejected(end, &error.content.message);
            return Err(error);
        }
    };
    // Without room for its log, a stream has no ids and ends with its connection.
    let resumed_by = (context.wants_resume && front.streams.has_room())
        .then(|| record.caller().owner(parsed.tenant.as_ref()));
    let created = unix_seconds();
    let running = request_driver::start(front, parsed, record, context.span.clone()).await?;
    let serving = front.nodes.serving(&model.model.name);
    let started = StartedReply {
        request_id: context.request_id,
        created,
        // A node has served the model: otherwise the request would not have started.
        model_fingerprint: serving.model_fingerprint.unwrap_or_default(),
        model,
        wants_stats: context.wants_stats,
        prompts: running.prompts.clone(),
        abort: running.abort_handle(),
        readers: (0..running.answers).map(|choice| running.reader(choice)).collect(),
    };
    match api.writer(reply_fields, started) {
        ReplyWriter::Stream(writer) => {
            let out = EventBuffer {
                ids: resumed_by.as_ref().map(|_| EventIds { stream: context.request_id, next: 0 }),
                ..EventBuffer::default()
            };
            let keep_alive = front.settings.keep_alive;
            let reply = StreamedReply::start(writer, running, out, keep_alive).await?;
            Ok(match resumed_by {
                Some(owner) => front.streams.respond(front, context.request_id, owner, reply),
                None => event_response(reply, keep_alive),
            })
        }
        ReplyWriter::Whole(writer) => Ok(whole_response(writer, running).await?),
    }
}

/// Returns the time in seconds since 1970.
pub(super) fn unix_seconds() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

/// Waits for all answers and returns one JSON body.
async fn whole_response(
    mut writer: impl WholeWriter,
    mut running: RunningRequest,
) -> Result<Response, RequestError> {
    while let Some(event) = running.next().await {
        writer.add(event?);
    }
    Ok(writer.into_response())
}

/// Source of the events of a response.
pub(super) trait EventSource: Send + 'static {
    /// Returns the next events, as many as are ready; `None` at the end of the stream. Cancel-safe.
    fn next(&mut self) -> impl Future<Output = Option<Bytes>> + Send;
}

/// Responds with the events of a source. `keep_alive` is the maximum time between events; then a
/// comment follows.
pub(super) fn event_response(source: impl EventSource, keep_alive: Duration) -> Response {
    let mut response = Response::new(Body::from_stream(event_stream(source, keep_alive)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Disables buffering in nginx.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Events of a streamed response, created when the client's connection accepts more data.
pub(super) struct StreamedReply<W> {
    writer: W,
    running: RunningRequest,
    first: Option<AnswerEvent>,
    /// Events that no call of [`Self::next`] has returned.
    out: EventBuffer,
    /// Number of answers that have not finished.
    answers_left: u32,
    is_over: bool,
}

impl<W: StreamWriter> StreamedReply<W> {
    /// Waits a limited time for the first event, so that an immediate failure has its own HTTP
    /// status.
    async fn start(
        writer: W,
        mut running: RunningRequest,
        out: EventBuffer,
        keep_alive: Duration,
    ) -> Result<Self, RequestError> {
        let first = match tokio::time::timeout(keep_alive, running.next()).await {
            Ok(Some(Ok(event))) => Some(event),
            Ok(Some(Err(error))) => return Err(error),
            Ok(None) | Err(_) => None,
        };
        let answers_left = running.answers;
        let mut reply = Self { writer, running, first, out, answers_left, is_over: false };
        if reply.first.is_some() {
            // The head and the first events leave in one write. A time-out leaves the events in
            // `reply`.
            let _ = tokio::time::timeout(keep_alive, reply.fill()).await;
        }
        Ok(reply)
    }

    /// Writes the next events to `out`, as many as are ready. Cancel-safe.
    async fn fill(&mut self) {
        // Send nothing while all text is held back. Once all answers have finished, the end of the
        // request follows at once, so that one write carries both.
        while !self.is_over && (self.out.bytes.is_empty() || self.answers_left == 0) {
            let event = match self.first.take() {
                Some(event) => Some(Ok(event)),
                None => self.running.next().await,
            };
            match event {
                Some(Ok(event)) => self.write(event),
                Some(Err(error)) => {
                    self.is_over = true;
                    self.writer.write_error(error.into(), &mut self.out);
                }
                None => {
                    self.is_over = true;
                    self.writer.write_last(&mut self.out);
                }
            }
            while self.out.bytes.len() < WRITE_BYTES
                && let Some(event) = self.running.next_queued()
            {
                self.write(event);
            }
            self.writer.flush(&mut self.out);
        }
    }

    fn write(&mut self, event: AnswerEvent) {
        if matches!(event, AnswerEvent::Finished(_)) {
            self.answers_left -= 1;
        }
        self.writer.write(event, &mut self.out);
    }
}

impl<W: StreamWriter> EventSource for StreamedReply<W> {
    async fn next(&mut self) -> Option<Bytes> {
        self.fill().await;
        let bytes = std::mem::take(&mut self.out.bytes);
        (!bytes.is_empty()).then(|| bytes.into())
    }
}

/// Returns the stream's bytes on demand. Sends a comment after `keep_alive` without an event.
fn event_stream(
    mut source: impl EventSource,
    keep_alive: Duration,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
    let mut comment_at = Instant::now() + keep_alive;
    let mut timer = MovingTimer::new(comment_at);
    // `stream::unfold` would move `source` with each token.
    stream::poll_fn(move |cx| {
        let bytes = match pin!(source.next()).poll(cx) {
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
