//! Conversion of tokens and text into the choices of OpenAI's API.

use std::{cell::Cell, sync::Arc};

use proto::v1::{self, FinishReason, Token, TokenLogprobs};
use text::{Detokenizer, DetokenizerOptions, Tokenizer, ToolCall};
use weight_transfer::WeightVersion;

use super::wire::{
    ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage, ChatTokenLogprob,
    FunctionCall, FunctionDelta, PromptLogprob, PromptLogprobs, PromptTokenLogprobs, TextChoice,
    TextLogprobs, TokenLogprob, ToolCallDelta, ToolCallWhole, TopLogprobs,
};
use crate::{
    request::answer_reader::{AnswerPiece, AnswerReader, Calls},
    request_driver::AnswerEnd,
};

/// API of a request: chat or completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    Chat,
    Text,
}

/// Content of one answer so far.
#[derive(Debug, Default)]
pub(super) struct AnswerContent {
    /// Parser of reasoning and tool calls. `None` if all text is content.
    reader: Option<AnswerReader>,
    reasoning: String,
    text: String,
    calls: Vec<ToolCallWhole>,
    pub token_ids: Vec<u32>,
    pub weight_versions: Vec<String>,
    pub chat_logprobs: Vec<ChatTokenLogprob>,
    pub text_logprobs: TextLogprobs,
    /// Log-probabilities of the prompt, if the nodes computed them.
    pub prompt: Option<v1::PromptLogprobs>,
    text_offset: TextOffset,
}

/// Number of characters of `text` before the next token; with `echo` this includes the prompt.
#[derive(Debug, Default)]
pub(super) struct TextOffset {
    characters: u64,
    /// Holds incomplete characters back, as in the answer's text. `None` before the first token.
    detokenizer: Option<Detokenizer>,
}

impl TextOffset {
    /// Returns the text that the token completes.
    fn advance(&mut self, view: &TokenView, token: u32) -> String {
        let options = DetokenizerOptions { skip_special: view.skip_special, continues: true };
        let detokenizer = self
            .detokenizer
            .get_or_insert_with(|| Detokenizer::new(view.tokenizer.clone(), options));
        let text = detokenizer.push(token);
        self.characters += text.chars().count() as u64;
        text
    }
}

/// Converter of tokens into the fields that the client requested.
#[derive(Clone)]
pub(super) struct TokenView {
    pub tokenizer: Arc<Tokenizer>,
    pub api: Api,
    /// Number of top log-probabilities for each token.
    pub logprobs: Option<u32>,
    pub token_ids: bool,
    /// Whether the text of a completion begins with its prompt.
    pub echo: bool,
    /// Number of top log-probabilities at each position of the prompt.
    pub prompt_logprobs: Option<u32>,
    pub weight_versions: bool,
    /// Whether special tokens are left out of the text.
    pub skip_special: bool,
}

impl TokenView {
    pub(super) fn chat_logprobs(&self, tokens: &[Token]) -> Vec<ChatTokenLogprob> {
        let Some(count) = self.logprobs else { return Vec::new() };
        let one = |token: &Token| {
            let (chosen, top) = self.logprobs_of(token, count);
            let top = top.into_iter().map(|(id, logprob)| self.token(id, logprob)).collect();
            ChatTokenLogprob { token: self.token(token.id, chosen), top_logprobs: top }
        };
        tokens.iter().map(one).collect()
    }

    /// Appends the log-probabilities of these tokens, and advances `text_offset` past them.
    pub(super) fn text_logprobs(
        &self,
        tokens: &[Token],
        text_offset: &mut TextOffset,
        to: &mut TextLogprobs,
    ) {
        let Some(count) = self.logprobs else { return };
        for token in tokens {
            self.push_logprobs(token.id, token.logprobs.as_ref(), count, text_offset, to);
            text_offset.advance(self, token.id);
        }
    }

    /// Appends the log-probabilities of a token; `None` for a token without them.
    fn push_logprobs(
        &self,
        id: u32,
        logprobs: Option<&TokenLogprobs>,
        count: u32,
        text_offset: &TextOffset,
        to: &mut TextLogprobs,
    ) {
        let text = self.key_of(id);
        let shown = logprobs.map(|logprobs| {
            let top = logprobs.top.iter().take(count as usize);
            let mut shown: Vec<_> =
                top.clone().map(|top| (self.key_of(top.id), top.logprob)).collect();
            // As in OpenAI's API, the token itself is always included.
            if !top.into_iter().any(|top| top.id == id) {
                shown.push((text.clone(), logprobs.chosen));
            }
            TopLogprobs(shown)
        });
        to.text_offset.push(text_offset.characters);
        to.tokens.push(text);
        to.token_logprobs.push(logprobs.map(|logprobs| logprobs.chosen));
        to.top_logprobs.push(shown);
    }

    /// Returns the text of an echoed prompt, and appends the log-probabilities of its tokens.
    pub(super) fn echo(
        &self,
        prompt: &[u32],
        logprobs: Option<&v1::PromptLogprobs>,
        text_offset: &mut TextOffset,
        to: &mut TextLogprobs,
    ) -> String {
        let logprobs = logprobs.map_or(&[][..], |logprobs| &logprobs.tokens);
        let mut text = String::new();
        for (index, &id) in prompt.iter().enumerate() {
            if let Some(count) = self.logprobs {
                let known = index.checked_sub(1).and_then(|before| logprobs.get(before));
                self.push_logprobs(id, known, count, text_offset, to);
            }
            text.push_str(&text_offset.advance(self, id));
        }
        text
    }

    /// Returns the log-probabilities of a prompt, if the client asked for them.
    pub(super) fn prompt_logprobs(
        &self,
        prompt: &[u32],
        logprobs: Option<&v1::PromptLogprobs>,
    ) -> Option<PromptLogprobs> {
        let (count, logprobs) = (self.prompt_logprobs? as usize, logprobs?);
        let one = |(&id, known): (&u32, &TokenLogprobs)| {
            let shown = |id, logprob, rank| {
                (id, PromptLogprob { logprob, rank, decoded_token: self.text_of(id) })
            };
            let top = (1..).zip(known.top.iter().take(count));
            let mut all: Vec<_> =
                top.map(|(rank, top)| shown(top.id, top.logprob, Some(rank))).collect();
            if !all.iter().any(|(other, _)| *other == id) {
                all.push(shown(id, known.chosen, known.rank));
            }
            Some(PromptTokenLogprobs(all))
        };
        let known = prompt.iter().skip(1).zip(&logprobs.tokens).map(one);
        Some(PromptLogprobs(std::iter::once(None).chain(known).collect()))
    }

    pub(super) fn ids(&self, tokens: &[Token]) -> Option<Vec<u32>> {
        self.token_ids.then(|| tokens.iter().map(|token| token.id).collect())
    }

    pub(super) fn versions(&self, tokens: &[Token]) -> Option<Vec<String>> {
        let version = |token: &Token| {
            token.weight_version.map_or(WeightVersion::LOADED, WeightVersion).to_string()
        };
        self.weight_versions.then(|| tokens.iter().map(version).collect())
    }

    fn logprobs_of(&self, token: &Token, count: u32) -> (f32, Vec<(u32, f32)>) {
        let absent = TokenLogprobs { chosen: f32::NAN, top: vec![], rank: None };
        let logprobs = token.logprobs.as_ref().unwrap_or(&absent);
        let top = logprobs.top.iter().take(count as usize).map(|top| (top.id, top.logprob));
        (logprobs.chosen, top.collect())
    }

    fn token(&self, id: u32, logprob: f32) -> TokenLogprob {
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default().to_vec();
        TokenLogprob { token: self.text_of(id), logprob, bytes }
    }

    /// Returns the token's text. For a token whose bytes are not valid UTF-8, returns its bytes as
    /// OpenAI does (`bytes:\xf0\x9f`): the texts of such tokens would all be equal.
    fn key_of(&self, id: u32) -> String {
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        match std::str::from_utf8(bytes) {
            Ok(_) => self.text_of(id),
            Err(_) => {
                bytes.iter().fold("bytes:".to_owned(), |key, byte| key + &format!("\\x{byte:02x}"))
            }
        }
    }

    fn text_of(&self, id: u32) -> String {
        self.tokenizer.token_text(id).unwrap_or_default()
    }
}

impl AnswerContent {
    pub(super) fn new(reader: Option<AnswerReader>) -> Self {
        Self { reader, ..Self::default() }
    }

    pub(super) fn reasoning_tokens(&self) -> Option<u64> {
        self.reader.as_ref()?.reasoning_tokens()
    }

    /// Begins the answer: keeps the log-probabilities of the prompt and, with echo, its text.
    pub(super) fn begin(
        &mut self,
        view: &TokenView,
        prompt: &[u32],
        logprobs: Option<v1::PromptLogprobs>,
    ) {
        if view.echo {
            let (offset, to) = (&mut self.text_offset, &mut self.text_logprobs);
            self.text = view.echo(prompt, logprobs.as_ref(), offset, to);
        }
        self.prompt = logprobs;
    }

    pub(super) fn push(&mut self, view: &TokenView, tokens: &[Token], text: String) {
        match &mut self.reader {
            Some(reader) => {
                let mut pieces = Vec::new();
                reader.push(tokens, text, &mut pieces);
                self.add(pieces);
            }
            None => self.text.push_str(&text),
        }
        if let Some(ids) = view.ids(tokens) {
            self.token_ids.extend(ids);
        }
        if let Some(versions) = view.versions(tokens) {
            self.weight_versions.extend(versions);
        }
        match view.api {
            Api::Chat => self.chat_logprobs.extend(view.chat_logprobs(tokens)),
            Api::Text => {
                view.text_logprobs(tokens, &mut self.text_offset, &mut self.text_logprobs);
            }
        }
    }

    fn add(&mut self, pieces: Vec<AnswerPiece>) {
        for piece in pieces {
            match piece {
                AnswerPiece::Reasoning(text) => self.reasoning.push_str(&text),
                AnswerPiece::Content(text) => self.text.push_str(&text),
                AnswerPiece::Call { id, call, .. } => self.calls.push(ToolCallWhole {
                    id,
                    r#type: "function",
                    function: FunctionCall { name: call.name, arguments: call.arguments },
                }),
            }
        }
    }

    pub(super) fn into_chat_choice(mut self, view: &TokenView, end: &AnswerEnd) -> ChatChoice {
        let (pieces, calls) = match self.reader.take() {
            Some(reader) => reader.finish(end.text.clone(), end.is_cut()),
            None => (vec![AnswerPiece::Content(end.text.clone())], Calls::None),
        };
        self.add(pieces);
        let reasoning = (!self.reasoning.is_empty()).then_some(self.reasoning);
        let message = ChatMessage {
            role: "assistant",
            content: (!self.text.is_empty() || self.calls.is_empty()).then_some(self.text),
            reasoning_content: reasoning.clone(),
            reasoning,
            refusal: None,
            tool_calls: self.calls,
        };
        ChatChoice {
            index: end.choice,
            message,
            logprobs: view
                .logprobs
                .map(|_| ChatLogprobs { content: self.chat_logprobs, refusal: None }),
            finish_reason: finish_reason(calls.finish_reason(end.reason)),
            stop_reason: end.stop_reason.clone(),
            matched_stop: end.stop_reason.clone(),
            token_ids: view.token_ids.then_some(self.token_ids),
            weight_versions: view.weight_versions.then_some(self.weight_versions),
        }
    }

    pub(super) fn into_text_choice<'a>(
        self,
        view: &TokenView,
        end: &AnswerEnd,
        prompt: &'a [u32],
    ) -> TextChoice<'a> {
        TextChoice {
            text: self.text + &end.text,
            logprobs: view.logprobs.map(|_| self.text_logprobs),
            prompt_token_ids: view.token_ids.then_some(prompt),
            prompt_logprobs: view.prompt_logprobs(prompt, self.prompt.as_ref()),
            token_ids: view.token_ids.then_some(self.token_ids),
            weight_versions: view.weight_versions.then_some(self.weight_versions),
            ..text_end(end)
        }
    }
}

/// Returns the choice of a text completion's last chunk: finish reason and held-back text.
pub(super) fn text_end<'a>(end: &AnswerEnd) -> TextChoice<'a> {
    TextChoice {
        index: end.choice,
        text: end.text.clone(),
        finish_reason: Some(finish_reason(end.reason)),
        stop_reason: end.stop_reason.clone(),
        matched_stop: end.stop_reason.clone(),
        ..Default::default()
    }
}

/// Returns the choice of a chat stream's first chunk, with the role.
pub(super) fn chat_role(choice: u32) -> ChatChunkChoice {
    let (role, content) = (Some("assistant"), Some(String::new()));
    let delta = ChatDelta { role, content, ..ChatDelta::default() };
    ChatChunkChoice { index: choice, delta, ..Default::default() }
}

/// Calls `write` with the chunks for these tokens, one for each delta. Only the first chunk has the
/// tokens' log-probabilities, ids and weight versions. If the client requested any of them and
/// there is no delta, one chunk with empty content has them.
pub(super) fn chat_chunks(
    view: &TokenView,
    choice: u32,
    tokens: &[Token],
    pieces: impl IntoIterator<Item = AnswerPiece>,
    mut write: impl FnMut(ChatChunkChoice),
) {
    let is_first = Cell::new(true);
    let mut send = |delta| {
        let mut chunk = ChatChunkChoice { index: choice, delta, ..Default::default() };
        if is_first.replace(false) {
            let content = view.chat_logprobs(tokens);
            chunk.logprobs = view.logprobs.map(|_| ChatLogprobs { content, refusal: None });
            chunk.token_ids = view.ids(tokens);
            chunk.weight_versions = view.versions(tokens);
        }
        write(chunk);
    };
    let content = |text| ChatDelta { content: Some(text), ..ChatDelta::default() };
    let reasoning = |text: String| ChatDelta {
        reasoning_content: Some(text.clone()),
        reasoning: Some(text),
        ..ChatDelta::default()
    };
    for piece in pieces {
        match piece {
            AnswerPiece::Reasoning(text) => send(reasoning(text)),
            AnswerPiece::Content(text) => send(content(text)),
            AnswerPiece::Call { index, id, call } => {
                call_deltas(index, id, call).into_iter().for_each(&mut send);
            }
        }
    }
    let describes = view.logprobs.is_some() || view.token_ids || view.weight_versions;
    if is_first.get() && describes {
        send(content(String::new()));
    }
}

/// Returns the two parts of a tool call: the name, then the arguments.
fn call_deltas(index: u32, id: String, call: ToolCall) -> [ChatDelta; 2] {
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
    [head, arguments].map(|call| ChatDelta { tool_calls: Some([call]), ..ChatDelta::default() })
}

/// Returns the choice of a chat stream's last chunk, with the finish reason.
pub(super) fn chat_end(end: &AnswerEnd, calls: Calls) -> ChatChunkChoice {
    ChatChunkChoice {
        index: end.choice,
        finish_reason: Some(finish_reason(calls.finish_reason(end.reason))),
        stop_reason: end.stop_reason.clone(),
        matched_stop: end.stop_reason.clone(),
        ..Default::default()
    }
}

fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Abort => "abort",
        FinishReason::Length | FinishReason::Unspecified => "length",
    }
}
