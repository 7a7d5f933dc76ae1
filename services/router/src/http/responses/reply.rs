//! Replies of `/v1/responses`. One [`ResponseBuilder`] turns the pieces of the answer into output
//! items and reports every change, so the stream of changes and the whole response cannot differ.

use std::mem;

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use proto::v1::{FinishReason, Token};
use text::HeaderSearch;

use super::{
    KeptResponse,
    items::REASONING_PREFIX,
    object::{
        IncompleteDetails, InputTokensDetails, OutputItem, OutputPart, OutputTokensDetails,
        ResponseChange, ResponseEvent, ResponseObject, ResponseStatus, ResponseUsage,
    },
};
use crate::{
    http::{
        choices::TokenView,
        error::ApiError,
        generate::{EventBuffer, StreamWriter, TokenTotals, WholeWriter, unix_seconds},
        wire::ChatTokenLogprob,
    },
    request::answer_reader::{AnswerPiece, AnswerReader},
    request_driver::{AnswerEnd, AnswerEvent},
};

/// Code of the error that ends a cancelled request.
const CANCELLED: &str = "client_gone";

/// Settings and counters of a response.
pub(super) struct ReplyContext {
    /// Id of the request, for the ids of items.
    pub id: String,
    pub view: TokenView,
    /// Whether reasoning items have `encrypted_content`.
    pub encrypts: bool,
    /// Whether the client asked for statistics of the hand-over between nodes.
    pub wants_stats: bool,
    /// Until the end; `None` if the text of the answer is its content.
    pub reader: Option<AnswerReader>,
    pub totals: TokenTotals,
}

/// Builder of a response from the events of its answer.
pub(super) struct ResponseBuilder {
    object: ResponseObject,
    context: ReplyContext,
    /// Log-probabilities of tokens whose text is held back; `None` for a token of a header.
    logprobs: Vec<Option<ChatTokenLogprob>>,
    headers: Option<HeaderSearch>,
    /// Number of tokens of the thought whose log-probabilities were dropped.
    thought_tokens: u64,
    /// Whether the last item takes further text.
    is_item_open: bool,
}

impl ResponseBuilder {
    pub(super) fn new(object: ResponseObject, context: ReplyContext) -> Self {
        let headers = context.reader.as_ref().and_then(AnswerReader::header_search);
        Self {
            object,
            context,
            logprobs: Vec::new(),
            headers,
            thought_tokens: 0,
            is_item_open: false,
        }
    }

    /// Applies an event of the answer.
    fn apply(&mut self, event: AnswerEvent, report: &mut impl FnMut(ResponseChange<'_>)) {
        match event {
            AnswerEvent::Tokens(shown) => {
                self.context.totals.tokens(shown.tokens.len());
                self.add_logprobs(&shown.tokens);
                match &mut self.context.reader {
                    Some(reader) => {
                        let mut pieces = Vec::new();
                        reader.push(&shown.tokens, shown.text, &mut pieces);
                        let thought_tokens = reader.reasoning_tokens().unwrap_or(0);
                        self.drop_logprobs_of_thought(thought_tokens);
                        for piece in pieces {
                            self.append(piece, report);
                        }
                    }
                    None => self.append(AnswerPiece::Content(shown.text), report),
                }
            }
            AnswerEvent::Finished(end) => self.end(end, report),
        }
    }

    /// Keeps the log-probabilities of these tokens until their text follows.
    fn add_logprobs(&mut self, tokens: &[Token]) {
        let view = &self.context.view;
        for (token, logprob) in tokens.iter().zip(view.chat_logprobs(tokens)) {
            let bytes = view.tokenizer.token_bytes(token.id).map_or(0, <[u8]>::len);
            let headers = self.headers.as_mut();
            let is_header = headers.is_some_and(|headers| headers.takes(token.id, bytes));
            if is_header && self.object.output.is_empty() {
                // Text before the first tag belongs to the header.
                self.logprobs.iter_mut().for_each(|held| *held = None);
            }
            self.logprobs.push((!is_header).then_some(logprob));
        }
    }

    /// Drops the log-probabilities of the first `tokens` tokens of the answer, the marks of the
    /// thought included: messages have no text of them.
    fn drop_logprobs_of_thought(&mut self, tokens: u64) {
        let new = tokens - mem::replace(&mut self.thought_tokens, tokens);
        self.logprobs.drain(..self.logprobs.len().min(new as usize));
    }

    fn append(&mut self, piece: AnswerPiece, report: &mut impl FnMut(ResponseChange<'_>)) {
        match piece {
            AnswerPiece::Reasoning(text) => {
                // Harmony's reasoning may follow content or a call.
                if !matches!(self.object.output.last(), Some(OutputItem::Reasoning { .. })) {
                    self.close(ResponseStatus::Completed, report);
                }
                if !self.is_item_open {
                    let encrypted_content =
                        self.context.encrypts.then(|| REASONING_PREFIX.to_owned());
                    let item = OutputItem::Reasoning {
                        id: self.item_id("rs"),
                        status: ResponseStatus::InProgress,
                        summary: Vec::new(),
                        content: Vec::new(),
                        encrypted_content,
                    };
                    self.open(item, OutputPart::ReasoningText { text: String::new() }, report);
                }
                self.extend(&text, Vec::new(), report);
            }
            AnswerPiece::Content(text) => {
                if text.is_empty() {
                    return;
                }
                if !matches!(self.object.output.last(), Some(OutputItem::Message { .. })) {
                    self.close(ResponseStatus::Completed, report);
                }
                self.open_message(report);
                let logprobs = self.logprobs.drain(..).flatten().collect();
                self.extend(&text, logprobs, report);
            }
            AnswerPiece::Call { id, call, .. } => {
                self.logprobs.clear();
                self.close(ResponseStatus::Completed, report);
                let item = |id: String, call_id: String, arguments: String| {
                    let status = ResponseStatus::InProgress;
                    let name = call.name.clone();
                    OutputItem::FunctionCall { id, status, call_id, name, arguments }
                };
                let (item_id, output_index) = (self.item_id("fc"), self.object.output.len());
                let added = item(item_id.clone(), id.clone(), String::new());
                report(ResponseChange::ItemAdded { output_index, item: &added });
                let (item_id_text, arguments) = (item_id.as_str(), call.arguments.as_str());
                report(ResponseChange::ArgumentsDelta {
                    item_id: item_id_text,
                    output_index,
                    delta: arguments,
                });
                self.object.output.push(item(item_id, id, call.arguments));
                self.is_item_open = true;
            }
        }
    }

    /// Returns the id of the next item.
    fn item_id(&self, prefix: &str) -> String {
        format!("{prefix}_{}_{}", self.context.id, self.object.output.len())
    }

    /// Opens a message unless one is open.
    fn open_message(&mut self, report: &mut impl FnMut(ResponseChange<'_>)) {
        if self.is_item_open {
            return;
        }
        let item = OutputItem::Message {
            id: self.item_id("msg"),
            status: ResponseStatus::InProgress,
            role: "assistant",
            content: Vec::new(),
        };
        let (annotations, logprobs) = (Vec::new(), Vec::new());
        let part = OutputPart::OutputText { text: String::new(), annotations, logprobs };
        self.open(item, part, report);
    }

    fn open(
        &mut self,
        mut item: OutputItem,
        part: OutputPart,
        report: &mut impl FnMut(ResponseChange<'_>),
    ) {
        let output_index = self.object.output.len();
        report(ResponseChange::ItemAdded { output_index, item: &item });
        if let OutputItem::Reasoning { id, content, .. } | OutputItem::Message { id, content, .. } =
            &mut item
        {
            let item_id = id.as_str();
            report(ResponseChange::PartAdded {
                item_id,
                output_index,
                content_index: 0,
                part: &part,
            });
            content.push(part);
        }
        self.object.output.push(item);
        self.is_item_open = true;
    }

    /// Appends text to the open item.
    fn extend(
        &mut self,
        delta: &str,
        more: Vec<ChatTokenLogprob>,
        report: &mut impl FnMut(ResponseChange<'_>),
    ) {
        let output_index = self.object.output.len() - 1;
        let (content_index, open) = (0, self.object.output.last_mut());
        let Some(
            OutputItem::Reasoning { id, content, .. } | OutputItem::Message { id, content, .. },
        ) = open
        else {
            return;
        };
        let item_id = id.as_str();
        match content.last_mut() {
            Some(OutputPart::ReasoningText { text }) => {
                text.push_str(delta);
                report(ResponseChange::ReasoningDelta {
                    item_id,
                    output_index,
                    content_index,
                    delta,
                });
            }
            Some(OutputPart::OutputText { text, logprobs, .. }) => {
                text.push_str(delta);
                report(ResponseChange::TextDelta {
                    item_id,
                    output_index,
                    content_index,
                    delta,
                    logprobs: &more,
                });
                logprobs.extend(more);
            }
            None => {}
        }
    }

    /// Closes the open item, if there is one.
    fn close(&mut self, end: ResponseStatus, report: &mut impl FnMut(ResponseChange<'_>)) {
        if !mem::take(&mut self.is_item_open) {
            return;
        }
        let output_index = self.object.output.len() - 1;
        let Some(item) = self.object.output.last_mut() else { return };
        *item.status_mut() = end;
        let content_index = 0;
        match item {
            OutputItem::FunctionCall { id, name, arguments, .. } => {
                report(ResponseChange::ArgumentsDone {
                    item_id: id,
                    output_index,
                    name,
                    arguments,
                });
            }
            OutputItem::Reasoning { id, content, encrypted_content, .. } => {
                for part in content.iter() {
                    let OutputPart::ReasoningText { text } = part else { continue };
                    let item_id = id.as_str();
                    report(ResponseChange::ReasoningDone {
                        item_id,
                        output_index,
                        content_index,
                        text,
                    });
                    report(ResponseChange::PartDone { item_id, output_index, content_index, part });
                    encrypted_content.iter_mut().for_each(|sealed| sealed.push_str(text));
                }
            }
            OutputItem::Message { id, content, .. } => {
                for part in content.iter() {
                    let OutputPart::OutputText { text, logprobs, .. } = part else { continue };
                    let item_id = id.as_str();
                    report(ResponseChange::TextDone {
                        item_id,
                        output_index,
                        content_index,
                        text,
                        logprobs,
                    });
                    report(ResponseChange::PartDone { item_id, output_index, content_index, part });
                }
            }
        }
        report(ResponseChange::ItemDone { output_index, item });
    }

    fn end(&mut self, end: AnswerEnd, report: &mut impl FnMut(ResponseChange<'_>)) {
        self.context.totals.ended(&end);
        let is_cut = end.is_cut();
        let (pieces, calls) = match self.context.reader.take() {
            Some(reader) => {
                self.context.totals.reasoning(reader.reasoning_tokens());
                let (pieces, calls) = reader.finish(end.text, is_cut);
                (pieces, Some(calls))
            }
            None => (vec![AnswerPiece::Content(end.text)], None),
        };
        pieces.into_iter().for_each(|piece| self.append(piece, report));
        let reason = calls.map_or(end.reason, |calls| calls.finish_reason(end.reason));
        let incomplete = match reason {
            FinishReason::Length => Some("max_output_tokens"),
            FinishReason::Abort => Some("abort"),
            _ => None,
        };
        let status = match incomplete {
            Some(_) => ResponseStatus::Incomplete,
            None => ResponseStatus::Completed,
        };
        if self.object.output.is_empty() {
            self.open_message(report);
        }
        self.close(status, report);
        self.object.status = status;
        self.object.incomplete_details = incomplete.map(|reason| IncompleteDetails { reason });
    }

    /// Sets the usage and the time of the end.
    fn complete(&mut self) {
        let usage = self.context.totals.usage;
        let details = usage.completion_tokens_details.unwrap_or_default();
        self.object.usage = Some(ResponseUsage {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputTokensDetails {
                cached_tokens: usage.prompt_tokens_details.cached_tokens,
                cache_write_tokens: 0,
            },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputTokensDetails {
                reasoning_tokens: details.reasoning_tokens,
            },
            total_tokens: usage.total_tokens,
        });
        self.object.completed_at = Some(unix_seconds());
        self.object.baton = self.context.wants_stats.then(|| self.context.totals.hand_over.clone());
    }
}

/// A response that is sent as one JSON body.
pub(super) struct WholeResponse {
    pub builder: ResponseBuilder,
    pub stored: KeptResponse,
}

impl WholeWriter for WholeResponse {
    fn add(&mut self, event: AnswerEvent) {
        self.builder.apply(event, &mut |_| {});
    }

    fn into_response(mut self) -> Response {
        self.builder.complete();
        self.stored.keep(&self.builder.object);
        Json(self.builder.object).into_response()
    }
}

/// The events of a streamed response.
pub(super) struct ResponseEvents {
    pub builder: ResponseBuilder,
    pub stored: KeptResponse,
    /// Number of the next event; 0 before the first one.
    pub sequence_number: u64,
}

impl ResponseEvents {
    /// Writes the events that introduce the response, before its first change.
    fn introduce(&mut self, out: &mut EventBuffer) {
        if self.sequence_number == 0 {
            let response = &self.builder.object;
            let number = &mut self.sequence_number;
            write(ResponseChange::Created { response }, number, out);
            write(ResponseChange::InProgress { response }, number, out);
        }
    }
}

fn write(change: ResponseChange<'_>, sequence_number: &mut u64, out: &mut EventBuffer) {
    let name = change.name();
    out.named(name, &ResponseEvent { change, sequence_number: *sequence_number });
    *sequence_number += 1;
}

impl StreamWriter for ResponseEvents {
    fn write(&mut self, event: AnswerEvent, out: &mut EventBuffer) {
        self.introduce(out);
        let number = &mut self.sequence_number;
        self.builder.apply(event, &mut |change| write(change, number, out));
    }

    fn flush(&mut self, _: &mut EventBuffer) {}

    fn write_error(&mut self, error: ApiError, out: &mut EventBuffer) {
        self.introduce(out);
        let builder = &mut self.builder;
        let number = &mut self.sequence_number;
        builder.close(ResponseStatus::Incomplete, &mut |change| write(change, number, out));
        builder.complete();
        if error.content.code == Some(CANCELLED) {
            builder.object.status = ResponseStatus::Cancelled;
        } else {
            builder.object.status = ResponseStatus::Failed;
            builder.object.error = Some(error.content);
        }
        self.stored.keep(&builder.object);
        write(ResponseChange::Failed { response: &builder.object }, number, out);
    }

    fn write_last(&mut self, out: &mut EventBuffer) {
        self.introduce(out);
        self.builder.complete();
        let response = &self.builder.object;
        self.stored.keep(response);
        let change = match response.status {
            ResponseStatus::Incomplete => ResponseChange::Incomplete { response },
            _ => ResponseChange::Completed { response },
        };
        write(change, &mut self.sequence_number, out);
    }
}
