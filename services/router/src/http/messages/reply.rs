//! Replies of `/v1/messages`: one JSON body, or the events of a stream.

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use proto::v1::FinishReason;
use router_core::HandOverStats;
use schemars::JsonSchema;
use serde::Serialize;

use super::{
    blocks::{BlockEvent, BlockWriter, ContentBlock},
    error::MessagesError,
    request::MessageFields,
};
use crate::{
    http::{
        error::ApiError,
        generate::{EventBuffer, StartedReply, StreamWriter, WholeWriter},
    },
    request::answer_reader::{AnswerPiece, AnswerReader, Calls},
    request_driver::{AnswerEnd, AnswerEvent, StopReason},
};

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "MessagesReply")]
pub(in crate::http) struct MessageBody<'a> {
    id: &'a str,
    #[schemars(extend("const" = "message"))]
    r#type: &'static str,
    #[schemars(extend("const" = "assistant"))]
    role: &'static str,
    model: &'a str,
    content: Vec<ContentBlock>,
    #[serde(flatten)]
    end: MessageEnd,
    usage: MessageUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    baton: Option<HandOverStats>,
}

/// The end of an answer; both fields are `null` at the start of a stream.
#[derive(Default, Serialize, JsonSchema)]
pub(in crate::http) struct MessageEnd {
    #[schemars(extend("enum" = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn",
        "model_context_window_exceeded", null]))]
    stop_reason: Option<&'static str>,
    /// The stop sequence that ended the answer.
    stop_sequence: Option<String>,
}

#[derive(Clone, Copy, Default, Serialize, JsonSchema)]
pub(in crate::http) struct MessageUsage {
    /// Prompt tokens that were computed.
    input_tokens: u64,
    /// Always 0: prefix caching is automatic.
    cache_creation_input_tokens: u64,
    /// Prompt tokens found in a prefix cache.
    cache_read_input_tokens: u64,
    output_tokens: u64,
    /// Absent if the model has no format of reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    output_tokens_details: Option<OutputTokensDetails>,
}

#[derive(Clone, Copy, Serialize, JsonSchema)]
pub(in crate::http) struct OutputTokensDetails {
    /// Tokens of reasoning before answers.
    thinking_tokens: u64,
}

/// An event of a stream, beside those of the blocks.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(in crate::http) enum MessageEvent<'a> {
    MessageStart {
        message: MessageBody<'a>,
    },
    Ping,
    MessageDelta {
        delta: MessageEnd,
        usage: MessageUsage,
        #[serde(skip_serializing_if = "Option::is_none")]
        baton: Option<HandOverStats>,
    },
    MessageStop,
}

/// An answer, while its events arrive.
pub(super) struct MessageProgress {
    id: String,
    model: std::sync::Arc<str>,
    max_tokens: u32,
    wants_stats: bool,
    prompt_tokens: u64,
    /// `None` if the text of the answer is its content.
    reader: Option<AnswerReader>,
    /// Empty between events, which reuse its memory.
    pieces: Vec<AnswerPiece>,
    writer: BlockWriter,
    end: MessageEnd,
    usage: MessageUsage,
    baton: Option<HandOverStats>,
}

impl MessageProgress {
    pub(super) fn new(fields: MessageFields, started: StartedReply) -> Self {
        let StartedReply { request_id, model, wants_stats, prompts, mut readers, .. } = started;
        let prompt_tokens = prompts.first().map_or(0, |prompt| prompt.len() as u64);
        Self {
            id: format!("msg_{request_id}"),
            model: model.name,
            max_tokens: fields.max_tokens,
            wants_stats,
            prompt_tokens,
            reader: readers.pop().flatten(),
            pieces: Vec::new(),
            writer: BlockWriter::new(fields.shows_thinking),
            end: MessageEnd::default(),
            usage: MessageUsage { input_tokens: prompt_tokens, ..MessageUsage::default() },
            baton: None,
        }
    }

    /// Processes an event of the answer; `emit` takes the changes of the content.
    fn add(&mut self, event: AnswerEvent, mut emit: impl FnMut(BlockEvent)) {
        let is_over = match event {
            AnswerEvent::Tokens(shown) => {
                self.usage.output_tokens += shown.tokens.len() as u64;
                match &mut self.reader {
                    Some(reader) => reader.push(&shown.tokens, shown.text, &mut self.pieces),
                    None => self.pieces.push(AnswerPiece::Content(shown.text)),
                }
                false
            }
            AnswerEvent::Finished(end) => {
                self.pieces = self.finish(end);
                true
            }
        };
        for piece in self.pieces.drain(..) {
            self.writer.push(piece, &mut emit);
        }
        if is_over {
            self.writer.finish(&mut emit);
        }
    }

    /// Takes over the end of the answer, and returns the rest of its content.
    fn finish(&mut self, mut end: AnswerEnd) -> Vec<AnswerPiece> {
        let thinking_tokens = self.reader.as_ref().and_then(AnswerReader::reasoning_tokens);
        let cached_tokens = u64::from(end.cached_tokens);
        self.usage.input_tokens = self.prompt_tokens.saturating_sub(cached_tokens);
        self.usage.cache_read_input_tokens = cached_tokens;
        self.usage.output_tokens_details =
            thinking_tokens.map(|thinking_tokens| OutputTokensDetails { thinking_tokens });
        self.baton = self.wants_stats.then(|| end.hand_over.clone());
        let (text, is_cut) = (std::mem::take(&mut end.text), end.is_cut());
        let (pieces, calls) = match self.reader.take() {
            Some(reader) => reader.finish(text, is_cut),
            None => (vec![AnswerPiece::Content(text)], Calls::None),
        };
        self.end = message_end(end, calls, self.max_tokens);
        pieces
    }

    fn body(&self, content: Vec<ContentBlock>, end: MessageEnd) -> MessageBody<'_> {
        MessageBody {
            id: &self.id,
            r#type: "message",
            role: "assistant",
            model: &self.model,
            content,
            end,
            usage: self.usage,
            baton: self.baton.clone(),
        }
    }
}

fn message_end(end: AnswerEnd, calls: Calls, max_tokens: u32) -> MessageEnd {
    let ended = |reason| MessageEnd { stop_reason: Some(reason), stop_sequence: None };
    match (end.reason, end.stop_reason, calls) {
        (_, _, Calls::OnlyOne) => ended("tool_use"),
        (FinishReason::Length, ..) if end.completion_tokens < max_tokens => {
            ended("model_context_window_exceeded")
        }
        (FinishReason::Length, ..) => ended("max_tokens"),
        // The client can send the answer back to have it continued.
        (FinishReason::Abort, ..) => ended("pause_turn"),
        (_, Some(StopReason::Text(text)), _) => {
            MessageEnd { stop_reason: Some("stop_sequence"), stop_sequence: Some(text) }
        }
        (_, _, Calls::Some | Calls::Named) => ended("tool_use"),
        _ => ended("end_turn"),
    }
}

/// Writer of a reply in one body.
pub(super) struct WholeMessage {
    progress: MessageProgress,
    content: Vec<ContentBlock>,
}

impl WholeMessage {
    pub(super) fn new(progress: MessageProgress) -> Self {
        Self { progress, content: Vec::new() }
    }
}

impl WholeWriter for WholeMessage {
    fn add(&mut self, event: AnswerEvent) {
        self.progress.add(event, |change| change.apply(&mut self.content));
    }

    fn into_response(mut self) -> Response {
        let end = std::mem::take(&mut self.progress.end);
        Json(self.progress.body(self.content, end)).into_response()
    }
}

/// Writer of a streamed reply.
pub(super) struct MessageStream {
    progress: MessageProgress,
    is_started: bool,
}

impl MessageStream {
    pub(super) fn new(progress: MessageProgress) -> Self {
        Self { progress, is_started: false }
    }
}

impl StreamWriter for MessageStream {
    fn write(&mut self, event: AnswerEvent, out: &mut EventBuffer) {
        if !std::mem::replace(&mut self.is_started, true) {
            let message = self.progress.body(Vec::new(), MessageEnd::default());
            out.named("message_start", &MessageEvent::MessageStart { message });
            out.named("ping", &MessageEvent::Ping);
        }
        self.progress.add(event, |change| {
            let name = match &change {
                BlockEvent::Start { .. } => "content_block_start",
                BlockEvent::Delta { .. } => "content_block_delta",
                BlockEvent::Stop { .. } => "content_block_stop",
            };
            out.named(name, &change);
        });
    }

    fn flush(&mut self, _: &mut EventBuffer) {}

    fn write_error(&mut self, error: ApiError, out: &mut EventBuffer) {
        out.named("error", &MessagesError::new(&error, None));
    }

    fn write_last(&mut self, out: &mut EventBuffer) {
        let delta = std::mem::take(&mut self.progress.end);
        let (usage, baton) = (self.progress.usage, self.progress.baton.take());
        out.named("message_delta", &MessageEvent::MessageDelta { delta, usage, baton });
        out.named("message_stop", &MessageEvent::MessageStop);
    }
}
