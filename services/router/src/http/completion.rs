//! `POST /v1/chat/completions` and `POST /v1/completions`: their replies as one JSON body or as
//! chunks of a stream.

use std::sync::Arc;

use axum::{
    Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use http::Request;
use serde::Serialize;
use telemetry::metrics::Operation;

use super::{
    choices::{
        AnswerContent, Api, TextOffset, TokenView, chat_chunks, chat_end, chat_role, text_end,
    },
    error::ApiError,
    fields::RequestFields,
    generate::{
        EventBuffer, GenerationApi, ReplyWriter, StartedReply, StreamWriter, TokenTotals,
        WholeWriter, answer_request, write_json,
    },
    request_fields::{Delivery, read_chat, read_completion},
    wire::{Completion, CompletionTokensDetails, ErrorBody, TextChoice, TextLogprobs, Usage},
};
use crate::{
    front::{Front, ServedModel},
    request::answer_reader::{AnswerPiece, AnswerReader, Calls},
    request_driver::{AnswerEnd, AnswerEvent, AnswerTokens, GenerationFields},
};

const CHAT_CHUNK: &str = "chat.completion.chunk";
const TEXT_CHUNK: &str = "text_completion";
/// Size of a chunk's choice with the text of one token, give or take.
const CHOICE_BYTES: usize = 256;

pub(super) async fn chat_completions(
    State(front): State<Arc<Front>>,
    request: Request<Body>,
) -> Response {
    answer_request(front, request, Api::Chat).await
}

pub(super) async fn completions(
    State(front): State<Arc<Front>>,
    request: Request<Body>,
) -> Response {
    answer_request(front, request, Api::Text).await
}

/// Fields of a body that decide how the reply is written.
pub(super) struct CompletionFields {
    delivery: Delivery,
    choices_per_prompt: u32,
    logprobs: Option<u32>,
    skip_special: bool,
}

impl GenerationApi for Api {
    type ReplyFields = CompletionFields;
    type Stream = CompletionChunks;
    type Whole = WholeCompletion;

    fn operation(&self) -> Operation {
        match self {
            Self::Chat => Operation::Chat,
            Self::Text => Operation::TextCompletion,
        }
    }

    fn read(
        &self,
        fields: &RequestFields<'_>,
        _model: &ServedModel,
    ) -> Result<(GenerationFields, CompletionFields), ApiError> {
        let (fields, delivery) = match self {
            Self::Chat => read_chat(fields)?,
            Self::Text => read_completion(fields)?,
        };
        let reply_fields = CompletionFields {
            delivery,
            choices_per_prompt: fields.choices,
            logprobs: fields.options.logprobs,
            skip_special: fields.options.skip_special_tokens.unwrap_or(true),
        };
        Ok((fields, reply_fields))
    }

    fn writer(
        &self,
        fields: CompletionFields,
        started: StartedReply,
    ) -> ReplyWriter<CompletionChunks, WholeCompletion> {
        let is_streamed = fields.delivery.stream;
        let totals = TokenTotals::new(&started.prompts, fields.choices_per_prompt);
        let readers = started.readers;
        let prefix = match self {
            Self::Chat => "chatcmpl",
            Self::Text => "cmpl",
        };
        let reply = ResponseFields {
            id: format!("{prefix}-{}", started.request_id),
            created: started.created,
            model: started.model.name,
            system_fingerprint: format!("fp_{:010x}", started.model_fingerprint >> 88),
            view: TokenView {
                tokenizer: started.model.model.text.tokenizer().clone(),
                api: *self,
                logprobs: fields.logprobs,
                token_ids: fields.delivery.token_ids,
                echo: fields.delivery.echo,
                prompt_logprobs: fields.delivery.prompt_logprobs,
                weight_versions: fields.delivery.weight_versions,
                skip_special: fields.skip_special,
            },
            delivery: fields.delivery,
            wants_stats: started.wants_stats,
            choices_per_prompt: fields.choices_per_prompt,
            prompts: started.prompts,
        };
        match is_streamed {
            true => ReplyWriter::Stream(CompletionChunks::new(reply, readers, totals)),
            false => ReplyWriter::Whole(WholeCompletion {
                reply,
                totals,
                collected: readers.into_iter().map(AnswerContent::new).collect(),
                ends: Vec::new(),
            }),
        }
    }

    fn refusal(&self, error: ApiError) -> Response {
        error.into_response()
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
    prompts: Vec<Arc<[u32]>>,
}

impl ResponseFields {
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
            prompt_logprobs: None,
            baton: None,
        }
    }

    fn chunk_object(&self) -> &'static str {
        match self.view.api {
            Api::Chat => CHAT_CHUNK,
            Api::Text => TEXT_CHUNK,
        }
    }

    fn prompt(&self, choice: u32) -> &[u32] {
        let prompt = self.prompts.get((choice / self.choices_per_prompt) as usize);
        prompt.map_or(&[], |prompt| prompt)
    }
}

/// A reply that is sent as one JSON body.
pub(super) struct WholeCompletion {
    reply: ResponseFields,
    totals: TokenTotals,
    /// By choice.
    collected: Vec<AnswerContent>,
    ends: Vec<AnswerEnd>,
}

impl WholeWriter for WholeCompletion {
    fn add(&mut self, event: AnswerEvent) {
        match event {
            AnswerEvent::Tokens(shown) => {
                self.totals.tokens(shown.tokens.len());
                let answer = &mut self.collected[shown.choice as usize];
                if shown.first_index == 0 {
                    answer.begin(&self.reply.view, self.reply.prompt(shown.choice), shown.prompt);
                }
                answer.push(&self.reply.view, &shown.tokens, shown.text);
            }
            AnswerEvent::Finished(end) => {
                self.totals.ended(&end);
                self.totals.reasoning(self.collected[end.choice as usize].reasoning_tokens());
                self.ends.push(end);
            }
        }
    }

    fn into_response(self) -> Response {
        let Self { reply, totals, mut collected, mut ends } = self;
        ends.sort_by_key(|end| end.choice);
        // A chat has one prompt.
        let prompt = match reply.view.api {
            Api::Chat => collected.first_mut().and_then(|answer| answer.prompt.take()),
            Api::Text => None,
        };
        // Every answer has ended.
        let answers = collected.into_iter().zip(&ends);
        match reply.view.api {
            Api::Chat => {
                let choices =
                    answers.map(|(answer, end)| answer.into_chat_choice(&reply.view, end));
                let choices = choices.collect();
                let mut body = reply.completion("chat.completion", choices, &totals);
                body.prompt_logprobs = reply.view.prompt_logprobs(reply.prompt(0), prompt.as_ref());
                if reply.view.token_ids {
                    body.prompt_token_ids = reply.prompts.first().map(|prompt| &**prompt);
                }
                Json(body).into_response()
            }
            Api::Text => {
                let choice = |(answer, end): (AnswerContent, &AnswerEnd)| {
                    answer.into_text_choice(&reply.view, end, reply.prompt(end.choice))
                };
                let choices = answers.map(choice).collect();
                Json(reply.completion("text_completion", choices, &totals)).into_response()
            }
        }
    }
}

/// Chunks of a streamed reply.
pub(super) struct CompletionChunks {
    reply: ResponseFields,
    totals: TokenTotals,
    /// By choice.
    answers: Vec<AnswerProgress>,
    /// The JSON that precedes the choice in every chunk.
    head: Vec<u8>,
    /// Tokens of a completion whose chunk is not written: the next event may end their answer, and
    /// then both have one chunk. Clients count the chunks of completions as tokens.
    held: Option<AnswerTokens>,
    /// Empty between events, which reuse its memory.
    pieces: Vec<AnswerPiece>,
}

/// State of one answer between its chunks.
struct AnswerProgress {
    introduced: bool,
    /// Until the end; `None` if the text of the answer is its content.
    reader: Option<AnswerReader>,
    text_offset: TextOffset,
    completion_tokens: u64,
    /// Reasoning tokens of an answer that has ended.
    reasoning_tokens: Option<u64>,
    /// The last tokens of a completion, until their answer's end arrives.
    last: Option<AnswerTokens>,
}

impl AnswerProgress {
    fn new(reader: Option<AnswerReader>) -> Self {
        Self {
            introduced: false,
            reader,
            text_offset: TextOffset::default(),
            completion_tokens: 0,
            reasoning_tokens: None,
            last: None,
        }
    }
}

impl StreamWriter for CompletionChunks {
    fn write(&mut self, event: AnswerEvent, out: &mut EventBuffer) {
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
                self.totals.ended(&end);
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

    fn flush(&mut self, out: &mut EventBuffer) {
        if let Some(held) = self.held.take() {
            self.write_completion(held, None, out);
        }
    }

    /// Writes an error event. No `[DONE]` follows.
    fn write_error(&mut self, error: ApiError, out: &mut EventBuffer) {
        for choice in 0..self.answers.len() {
            if let Some(last) = self.answers[choice].last.take() {
                self.write_completion(last, None, out);
            }
        }
        out.json(&ErrorBody { error: error.content });
    }

    fn write_last(&mut self, out: &mut EventBuffer) {
        let (delivery, reply) = (&self.reply.delivery, &self.reply);
        if delivery.include_usage || reply.wants_stats {
            let mut chunk = reply.chunk::<()>(reply.chunk_object(), vec![]);
            chunk.usage = delivery.include_usage.then_some(Some(self.totals.usage));
            chunk.baton = reply.wants_stats.then(|| self.totals.hand_over.clone());
            out.json(&chunk);
        }
        out.event(|out| out.extend_from_slice(b"[DONE]"));
    }
}

impl CompletionChunks {
    fn new(reply: ResponseFields, readers: Vec<Option<AnswerReader>>, totals: TokenTotals) -> Self {
        let answers = readers.into_iter().map(AnswerProgress::new).collect();
        let mut head = Vec::new();
        write_json(&reply.chunk::<()>(reply.chunk_object(), vec![]), &mut head);
        head.truncate(head.len() - "]}".len());
        Self { reply, totals, answers, head, held: None, pieces: Vec::new() }
    }

    fn write_tokens(&mut self, shown: AnswerTokens, out: &mut EventBuffer) {
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
        let mut pieces = std::mem::take(&mut self.pieces);
        match &mut progress.reader {
            Some(reader) => reader.push(&tokens, text, &mut pieces),
            None => pieces.push(AnswerPiece::Content(text)),
        }
        chat_chunks(&self.reply.view, choice, &tokens, pieces.drain(..), |chunk| {
            self.write_chunk(choice, chunk, out);
        });
        self.pieces = pieces;
    }

    /// Keeps the last tokens of a completion until their answer's end.
    fn hold_last(&mut self, tokens: AnswerTokens) {
        let choice = tokens.choice as usize;
        self.answers[choice].last = Some(tokens);
    }

    /// Writes the chunk of a completion's tokens, with the end of their answer if they are the last
    /// ones.
    fn write_completion(
        &mut self,
        shown: AnswerTokens,
        end: Option<&AnswerEnd>,
        out: &mut EventBuffer,
    ) {
        let AnswerTokens { choice, tokens, text, prompt, .. } = shown;
        let progress = &mut self.answers[choice as usize];
        progress.completion_tokens += tokens.len() as u64;
        let first = !std::mem::replace(&mut progress.introduced, true);
        let (reply, view) = (&self.reply, &self.reply.view);
        let mut logprobs = TextLogprobs::default();
        let mut echoed = String::new();
        if first && view.echo {
            let offset = &mut progress.text_offset;
            echoed = view.echo(reply.prompt(choice), prompt.as_ref(), offset, &mut logprobs);
        }
        view.text_logprobs(&tokens, &mut progress.text_offset, &mut logprobs);
        let end = end.map(text_end).unwrap_or_default();
        let content = TextChoice {
            index: choice,
            text: echoed + &text + &end.text,
            logprobs: view.logprobs.map(|_| logprobs),
            prompt_token_ids: (first && view.token_ids).then(|| reply.prompt(choice)),
            token_ids: view.ids(&tokens),
            weight_versions: view.versions(&tokens),
            ..end
        };
        self.write_chunk(choice, content, out);
    }

    /// Sends the role at the beginning of a chat answer.
    fn introduce(&mut self, choice: u32, out: &mut EventBuffer) {
        let progress = &mut self.answers[choice as usize];
        if self.reply.view.api == Api::Text || std::mem::replace(&mut progress.introduced, true) {
            return;
        }
        let mut chunk = self.reply.chunk(CHAT_CHUNK, vec![chat_role(choice)]);
        chunk.usage = self.usage_of(choice);
        if self.reply.view.token_ids {
            chunk.prompt_token_ids = Some(self.reply.prompt(choice));
        }
        out.json(&chunk);
    }

    fn write_chat_end(&mut self, end: &AnswerEnd, out: &mut EventBuffer) {
        // Send text that was held back.
        let progress = &mut self.answers[end.choice as usize];
        let (pieces, calls) = match progress.reader.take() {
            Some(reader) => {
                progress.reasoning_tokens = reader.reasoning_tokens();
                self.totals.reasoning(progress.reasoning_tokens);
                reader.finish(end.text.clone(), end.is_cut())
            }
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

    /// Appends a chunk with this content of a choice: an event of [`ResponseFields::chunk`] whose
    /// constant fields are not formatted again.
    fn write_chunk(&self, choice: u32, content: impl Serialize, out: &mut EventBuffer) {
        out.event(|out| {
            out.reserve(self.head.len() + CHOICE_BYTES);
            out.extend_from_slice(&self.head);
            write_json(&content, out);
            out.push(b']');
            if let Some(usage) = self.usage_of(choice) {
                out.extend_from_slice(b",\"usage\":");
                write_json(&usage, out);
            }
            out.push(b'}');
        });
    }

    /// Returns the usage of an ordinary chunk: absent, `null` if the last chunk has it, or the
    /// usage of the answer so far.
    fn usage_of(&self, choice: u32) -> Option<Option<Usage>> {
        let delivery = &self.reply.delivery;
        if delivery.continuous_usage {
            let prompt_tokens = self.reply.prompt(choice).len() as u64;
            let progress = &self.answers[choice as usize];
            let completion_tokens = progress.completion_tokens;
            let reasoning_tokens = match &progress.reader {
                Some(reader) => reader.reasoning_tokens(),
                None => progress.reasoning_tokens,
            };
            return Some(Some(Usage {
                prompt_tokens,
                completion_tokens,
                total_tokens: prompt_tokens + completion_tokens,
                completion_tokens_details: reasoning_tokens
                    .map(|reasoning_tokens| CompletionTokensDetails { reasoning_tokens }),
                ..Usage::default()
            }));
        }
        delivery.include_usage.then_some(None)
    }
}
