//! Response bodies of OpenAI's API, with vLLM's additions (`token_ids`, `prompt_token_ids`,
//! `stop_reason`) and Baton's own `baton` statistics on request.
//!
//! `/openapi.json` describes the types of this file: doc comments become descriptions there.

use std::collections::HashMap;

use router_core::HandOverStats;
use schemars::JsonSchema;
use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::request_driver::StopReason;

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
    pub  Vec<Option<PromptTokenLogprobs>>,
);

/// Log-probability by token id: the top tokens, best first, then the prompt's token if it is not
/// among them.
#[derive(Debug)]
pub(super) struct PromptTokenLogprobs(pub Vec<(u32, PromptLogprob)>);

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
