//! Response bodies of OpenAI's API, with vLLM's additions (`token_ids`, `prompt_token_ids`,
//! `stop_reason`) and Baton's own `baton` statistics on request, and the conversion of tokens and
//! text into choices.
//!
//! `/openapi.json` describes the types of this file: doc comments become descriptions there.

use std::{cell::Cell, collections::HashMap, sync::Arc};

use proto::v1::{self, FinishReason, Token, TokenLogprobs};
use router_core::HandOverStats;
use schemars::JsonSchema;
use serde::{Serialize, Serializer, ser::SerializeMap};
use text::{Detokenizer, DetokenizerOptions, Tokenizer, ToolCall};
use weight_transfer::WeightVersion;

use crate::{
    request::answer_reader::{AnswerPiece, AnswerReader, Calls},
    request_driver::{AnswerEnd, StopReason},
};

/// Log-probability sent in place of NaN and -∞, which JSON cannot represent.
const LOGPROB_MIN: f32 = -9999.0;

#[derive(Serialize, JsonSchema)]
pub(super) struct Completion<'a, C> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub system_fingerprint: &'a str,
    pub choices: Vec<C>,
    /// In a stream with `include_usage`: `null` in all chunks but the last. With
    /// `continuous_usage_stats`: the usage so far in every chunk. Otherwise absent from chunks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// Prompt token ids of a chat completion. A text completion has them in each choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    /// Log-probabilities of a chat completion's prompt. A text completion has them in each choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baton: Option<HandOverStats>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub total_tokens: u64,
    pub prompt_tokens_details: PromptTokensDetails,
    /// Absent if the model has no reasoning format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct CompletionTokensDetails {
    /// Number of reasoning tokens in all choices.
    pub reasoning_tokens: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct PromptTokensDetails {
    /// Prompt tokens found in a prefix cache.
    pub cached_tokens: u64,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct ChatChoice {
    pub index: u32,
    pub message: ChatMessage,
    pub logprobs: Option<ChatLogprobs>,
    #[schemars(extend("enum" = ["stop", "length", "abort", "tool_calls"]))]
    pub finish_reason: &'static str,
    pub stop_reason: Option<StopReason>,
    /// Equals `stop_reason`, as in SGLang.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matched_stop: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Version of the weights that generated each token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_versions: Option<Vec<String>>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct ChatMessage {
    #[schemars(extend("const" = "assistant"))]
    pub role: &'static str,
    /// `null` if there is no content and at least one tool call.
    pub content: Option<String>,
    /// Reasoning before the content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Equals `reasoning_content`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    #[schemars(with = "()")]
    pub refusal: Option<()>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1))]
    pub tool_calls: Vec<ToolCallWhole>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ToolCallWhole {
    pub id: String,
    #[schemars(extend("const" = "function"))]
    pub r#type: &'static str,
    pub function: FunctionCall,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct FunctionCall {
    pub name: String,
    /// Arguments as JSON text. Truncated if the generation stopped inside the call.
    #[schemars(extend("contentMediaType" = "application/json"))]
    pub arguments: String,
}

#[derive(Default, Serialize, JsonSchema)]
pub(super) struct ChatChunkChoice {
    pub index: u32,
    pub delta: ChatDelta,
    pub logprobs: Option<ChatLogprobs>,
    #[schemars(extend("enum" = ["stop", "length", "abort", "tool_calls", null]))]
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    /// Equals `stop_reason`, as in SGLang.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matched_stop: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Version of the weights that generated each token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_versions: Option<Vec<String>>,
}

#[derive(Default, Serialize, JsonSchema)]
pub(super) struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("const" = "assistant"))]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// A piece of the reasoning before the content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Equals `reasoning_content`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<[ToolCallDelta; 1]>,
}

/// The start of a tool call, with its id and name, or a further piece of its arguments.
#[derive(Serialize, JsonSchema)]
pub(super) struct ToolCallDelta {
    pub index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("const" = "function"))]
    pub r#type: Option<&'static str>,
    pub function: FunctionDelta,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub arguments: String,
}

/// A choice of a completion or of a completion's chunk.
#[derive(Default, Serialize, JsonSchema)]
pub(super) struct TextChoice<'a> {
    pub index: u32,
    pub text: String,
    pub logprobs: Option<TextLogprobs>,
    #[schemars(extend("enum" = ["stop", "length", "abort", null]))]
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<StopReason>,
    /// Equals `stop_reason`, as in SGLang.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matched_stop: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Version of the weights that generated each token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_versions: Option<Vec<String>>,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
pub(super) struct ChatLogprobs {
    pub content: Vec<ChatTokenLogprob>,
    #[schemars(with = "()")]
    pub refusal: Option<()>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ChatTokenLogprob {
    #[serde(flatten)]
    pub token: TokenLogprob,
    pub top_logprobs: Vec<TokenLogprob>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct TokenLogprob {
    pub token: String,
    #[serde(serialize_with = "serialize_clamped")]
    #[schemars(range(min = -9999.0, max = 0.0))]
    pub logprob: f32,
    /// Bytes of the token; they may be part of a character.
    pub bytes: Vec<u8>,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
pub(super) struct TextLogprobs {
    /// Number of characters of the text before each token. A character belongs to the token that
    /// completes it.
    pub text_offset: Vec<u64>,
    /// `null` for the first token of an echoed prompt.
    #[serde(serialize_with = "serialize_all_clamped")]
    #[schemars(inner(range(min = -9999.0, max = 0.0)))]
    pub token_logprobs: Vec<Option<f32>>,
    pub tokens: Vec<String>,
    /// `null` for the first token of an echoed prompt.
    #[schemars(with = "Vec<Option<HashMap<String, f32>>>")]
    pub top_logprobs: Vec<Option<TopLogprobs>>,
}

/// Log-probabilities at each position of the prompt, as in vLLM; `null` at the first position.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct PromptLogprobs(
    #[schemars(with = "Vec<Option<HashMap<String, PromptLogprob>>>")]
    Vec<Option<PromptTokenLogprobs>>,
);

/// Log-probability by token id: the top tokens, best first, then the prompt's token if it is not
/// among them.
#[derive(Debug)]
struct PromptTokenLogprobs(Vec<(u32, PromptLogprob)>);

#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct PromptLogprob {
    #[serde(serialize_with = "serialize_clamped")]
    #[schemars(range(min = -9999.0, max = 0.0))]
    pub logprob: f32,
    /// Rank in the vocabulary, 1 for the most likely token; `null` if the node's device does not
    /// compute ranks.
    pub rank: Option<u32>,
    pub decoded_token: String,
}

impl Serialize for PromptTokenLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, logprob)| (id, logprob)))
    }
}

/// Log-probability by token, best first.
#[derive(Debug, Default)]
pub(super) struct TopLogprobs(pub Vec<(String, f32)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (index, (token, logprob)) in self.0.iter().enumerate() {
            // Several tokens may have the same text, such as a special token and an ordinary one;
            // keep the best one.
            if !self.0[..index].iter().any(|(earlier, _)| earlier == token) {
                map.serialize_entry(token, &clamped(*logprob))?;
            }
        }
        map.end()
    }
}

fn clamped(logprob: f32) -> f32 {
    if logprob.is_nan() { LOGPROB_MIN } else { logprob.clamp(LOGPROB_MIN, 0.0) }
}

fn serialize_clamped<S: Serializer>(logprob: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f32(clamped(*logprob))
}

fn serialize_all_clamped<S: Serializer>(
    logprobs: &[Option<f32>],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(logprobs.iter().map(|logprob| logprob.map(clamped)))
}

#[derive(Serialize, JsonSchema)]
pub(super) struct ModelList {
    #[schemars(extend("const" = "list"))]
    pub object: &'static str,
    pub data: Vec<ModelCard>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Model")]
pub(super) struct ModelCard {
    pub id: String,
    #[schemars(extend("const" = "model"))]
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    /// Name of the model; `id` may be an alias or have an adapter.
    pub root: String,
    /// Name of the base model of an adapter; absent for a model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Maximum number of tokens of prompt and answer together; absent while no decode node is
    /// known.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_model_len: Option<u32>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Tokenized {
    pub count: usize,
    /// Maximum number of tokens of prompt and answer together; `null` while no decode node is
    /// known.
    pub max_model_len: Option<u32>,
    pub tokens: Vec<u32>,
    /// String of each token in the vocabulary, such as `Ġthe`, with `return_token_strs`.
    pub token_strs: Option<Vec<String>>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Detokenized {
    pub prompt: String,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Error")]
pub(super) struct ErrorBody {
    pub error: ErrorContent,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct ErrorContent {
    #[schemars(length(min = 1))]
    pub message: String,
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["invalid_request_error", "rate_limit_error", "server_error"]))]
    pub kind: &'static str,
    /// The field that is invalid.
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

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
                let pieces = reader.push(tokens, text);
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn log_probabilities_are_always_numbers() {
        let value = serde_json::to_value(TextLogprobs {
            text_offset: vec![0],
            token_logprobs: vec![Some(f32::NEG_INFINITY), None],
            tokens: vec!["a".into()],
            top_logprobs: vec![
                Some(TopLogprobs(vec![
                    ("a".into(), -0.5),
                    ("b".into(), f32::NAN),
                    ("a".into(), -3.0),
                ])),
                None,
            ],
        })
        .unwrap();
        assert_eq!(value["token_logprobs"], json!([-9999.0, null]));
        assert_eq!(value["top_logprobs"], json!([{"a": -0.5, "b": -9999.0}, null]));
    }

    #[test]
    fn usage_is_absent_null_or_present() {
        let completion = |usage| {
            serde_json::to_value(Completion::<()> {
                id: "x",
                object: "text_completion",
                created: 1,
                model: "m",
                system_fingerprint: "f",
                choices: vec![],
                usage,
                prompt_token_ids: None,
                prompt_logprobs: None,
                baton: None,
            })
            .unwrap()
        };
        assert_eq!(completion(None).get("usage"), None);
        assert_eq!(completion(Some(None))["usage"], json!(null));
        assert_eq!(completion(Some(Some(Usage::default())))["usage"]["prompt_tokens"], 0);
    }
}
