//! Converts tokens and text into the choices of both APIs, complete or in chunks.

use std::sync::Arc;

use proto::v1::{FinishReason, Token, TokenLogprobs};
use text::Tokenizer;

use super::wire::{
    ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage, ChatTokenLogprob,
    FunctionCall, FunctionDelta, StopReason, TextChoice, TextLogprobs, TokenLogprob, ToolCallDelta,
    ToolCallWhole, TopLogprobs,
};
use crate::{
    request::tools::{AnswerPiece, CallReader, Calls},
    request_driver::{AnswerEnd, StoppedBy},
};

/// API of a request: chat or completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    Chat,
    Text,
}

/// Content of one answer so far.
#[derive(Debug, Default)]
pub struct Collected {
    pub text: String,
    pub token_ids: Vec<u32>,
    pub chat_logprobs: Vec<ChatTokenLogprob>,
    pub text_logprobs: TextLogprobs,
    text_offset: u64,
}

/// Converts tokens into the fields that the client requested.
#[derive(Clone)]
pub struct TokenView {
    pub tokenizer: Arc<Tokenizer>,
    pub api: Api,
    /// Number of top log-probabilities for each token.
    pub logprobs: Option<u32>,
    pub token_ids: bool,
}

impl TokenView {
    pub fn chat_logprobs(&self, tokens: &[Token]) -> Vec<ChatTokenLogprob> {
        let Some(count) = self.logprobs else { return Vec::new() };
        let one = |token: &Token| {
            let (chosen, top) = self.logprobs_of(token, count);
            let top = top.into_iter().map(|(id, logprob)| self.token(id, logprob)).collect();
            ChatTokenLogprob { token: self.token(token.id, chosen), top_logprobs: top }
        };
        tokens.iter().map(one).collect()
    }

    /// Appends the log-probabilities of these tokens. `text_offset` is the number of characters before them;
    /// the function advances it past them.
    pub fn text_logprobs(&self, tokens: &[Token], text_offset: &mut u64, to: &mut TextLogprobs) {
        let Some(count) = self.logprobs else { return };
        for token in tokens {
            let (chosen, top) = self.logprobs_of(token, count);
            let text = self.text_of(token.id);
            // As in OpenAI's API, the sampled token is always included.
            let mut shown: Vec<(String, f32)> =
                top.iter().map(|&(id, logprob)| (self.text_of(id), logprob)).collect();
            if !top.iter().any(|&(id, _)| id == token.id) {
                shown.push((text.clone(), chosen));
            }
            to.text_offset.push(*text_offset);
            *text_offset += text.chars().count() as u64;
            to.tokens.push(text);
            to.token_logprobs.push(chosen);
            to.top_logprobs.push(TopLogprobs(shown));
        }
    }

    pub fn ids(&self, tokens: &[Token]) -> Option<Vec<u32>> {
        self.token_ids.then(|| tokens.iter().map(|token| token.id).collect())
    }

    fn logprobs_of(&self, token: &Token, count: u32) -> (f32, Vec<(u32, f32)>) {
        let absent = TokenLogprobs { chosen: f32::NAN, top: vec![] };
        let logprobs = token.logprobs.as_ref().unwrap_or(&absent);
        let top = logprobs.top.iter().take(count as usize).map(|top| (top.id, top.logprob));
        (logprobs.chosen, top.collect())
    }

    fn token(&self, id: u32, logprob: f32) -> TokenLogprob {
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default().to_vec();
        TokenLogprob { token: self.text_of(id), logprob, bytes }
    }

    fn text_of(&self, id: u32) -> String {
        self.tokenizer.token_text(id).unwrap_or_default()
    }
}

impl Collected {
    pub fn push(&mut self, view: &TokenView, tokens: &[Token], text: &str) {
        self.text.push_str(text);
        if let Some(ids) = view.ids(tokens) {
            self.token_ids.extend(ids);
        }
        match view.api {
            Api::Chat => self.chat_logprobs.extend(view.chat_logprobs(tokens)),
            Api::Text => {
                view.text_logprobs(tokens, &mut self.text_offset, &mut self.text_logprobs);
            }
        }
    }

    pub fn into_chat_choice(
        self,
        view: &TokenView,
        end: &AnswerEnd,
        reader: Option<CallReader>,
    ) -> ChatChoice {
        let (pieces, calls) = match reader {
            Some(reader) => reader.finish(&self.text),
            None => (vec![AnswerPiece::Content(self.text)], Calls::None),
        };
        let (mut content, mut tool_calls) = (String::new(), Vec::new());
        for piece in pieces {
            match piece {
                AnswerPiece::Content(text) => content.push_str(&text),
                AnswerPiece::Call { id, call, .. } => tool_calls.push(ToolCallWhole {
                    id,
                    r#type: "function",
                    function: FunctionCall { name: call.name, arguments: call.arguments },
                }),
            }
        }
        let content = (!content.is_empty() || tool_calls.is_empty()).then_some(content);
        ChatChoice {
            index: end.choice,
            message: ChatMessage { role: "assistant", content, refusal: None, tool_calls },
            logprobs: view
                .logprobs
                .map(|_| ChatLogprobs { content: self.chat_logprobs, refusal: None }),
            finish_reason: finish_reason(calls.finish_reason(end.reason)),
            stop_reason: stop_reason(end),
            token_ids: view.token_ids.then_some(self.token_ids),
        }
    }

    pub fn into_text_choice<'a>(
        self,
        view: &TokenView,
        end: &AnswerEnd,
        prompt: &'a [u32],
    ) -> TextChoice<'a> {
        TextChoice {
            text: self.text,
            logprobs: view.logprobs.map(|_| self.text_logprobs),
            prompt_token_ids: view.token_ids.then_some(prompt),
            token_ids: view.token_ids.then_some(self.token_ids),
            ..text_end(end)
        }
    }
}

/// Returns the last chunk of a completion, with the finish reason and the text that was held back.
pub fn text_end<'a>(end: &AnswerEnd) -> TextChoice<'a> {
    TextChoice {
        index: end.choice,
        text: end.text.clone(),
        finish_reason: Some(finish_reason(end.reason)),
        stop_reason: stop_reason(end),
        ..Default::default()
    }
}

/// Returns the first chunk of a chat answer, with its role.
pub fn chat_role(choice: u32) -> ChatChunkChoice {
    let (role, content) = (Some("assistant"), Some(String::new()));
    let delta = ChatDelta { role, content, tool_calls: None };
    ChatChunkChoice { index: choice, delta, ..Default::default() }
}

/// Returns the chunks for some tokens and the text that they release. The first chunk describes the tokens.
/// Returns no chunk if there is nothing to send.
pub fn chat_chunks(
    view: &TokenView,
    choice: u32,
    tokens: &[Token],
    pieces: Vec<AnswerPiece>,
) -> Vec<ChatChunkChoice> {
    let chunk = |delta| ChatChunkChoice { index: choice, delta, ..Default::default() };
    let mut chunks: Vec<_> = pieces.into_iter().flat_map(deltas).map(chunk).collect();
    if chunks.is_empty() && (view.logprobs.is_some() || view.token_ids) {
        chunks.push(chunk(ChatDelta { content: Some(String::new()), ..Default::default() }));
    }
    if let Some(first) = chunks.first_mut() {
        let content = view.chat_logprobs(tokens);
        first.logprobs = view.logprobs.map(|_| ChatLogprobs { content, refusal: None });
        first.token_ids = view.ids(tokens);
    }
    chunks
}

/// Returns content, or the two parts of a tool call: the name, then the arguments.
fn deltas(piece: AnswerPiece) -> impl Iterator<Item = ChatDelta> {
    let (index, id, call) = match piece {
        AnswerPiece::Content(text) => {
            let content = ChatDelta { content: Some(text), ..ChatDelta::default() };
            return [Some(content), None].into_iter().flatten();
        }
        AnswerPiece::Call { index, id, call } => (index, id, call),
    };
    let head = ToolCallDelta {
        index,
        id: Some(id),
        r#type: Some("function"),
        function: FunctionDelta { name: Some(call.name), arguments: String::new() },
    };
    let arguments = ToolCallDelta {
        index,
        id: None,
        r#type: None,
        function: FunctionDelta { name: None, arguments: call.arguments },
    };
    let delta = |call| ChatDelta { tool_calls: Some([call]), ..ChatDelta::default() };
    [Some(delta(head)), Some(delta(arguments))].into_iter().flatten()
}

/// Returns the last chunk, with the finish reason.
pub fn chat_end(end: &AnswerEnd, calls: Calls) -> ChatChunkChoice {
    ChatChunkChoice {
        index: end.choice,
        finish_reason: Some(finish_reason(calls.finish_reason(end.reason))),
        stop_reason: stop_reason(end),
        ..Default::default()
    }
}

fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Length | FinishReason::Unspecified => "length",
    }
}

fn stop_reason(end: &AnswerEnd) -> Option<StopReason> {
    end.stopped_by.as_ref().map(|by| match by {
        StoppedBy::Token(id) => StopReason::Token(*id),
        StoppedBy::Text(text) => StopReason::Text(text.clone()),
    })
}
