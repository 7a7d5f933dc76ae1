//! Response bodies of OpenAI's API, with vLLM's additions (`token_ids`, `prompt_token_ids`, `stop_reason`)
//! and Baton's own `baton` statistics on request.
//!
//! `/openapi.json` describes the types of this file: doc comments become descriptions there.

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::request_core::HandOverStats;

/// Log-probability of a token without a finite one: JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

#[derive(Serialize, JsonSchema)]
pub struct Completion<'a, C> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub system_fingerprint: &'a str,
    pub choices: Vec<C>,
    /// `null` in a stream whose last chunk has the usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// Token ids of a chat's prompt; each choice of a completion has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baton: Option<HandOverStats>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub total_tokens: u64,
    pub prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PromptTokensDetails {
    /// Prompt tokens found in a prefix cache.
    pub cached_tokens: u64,
}

#[derive(Serialize, JsonSchema)]
pub struct ChatChoice {
    pub index: u32,
    pub message: ChatMessage,
    pub logprobs: Option<ChatLogprobs>,
    #[schemars(extend("enum" = ["stop", "length", "tool_calls"]))]
    pub finish_reason: &'static str,
    pub stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

#[derive(Serialize, JsonSchema)]
pub struct ChatMessage {
    #[schemars(extend("const" = "assistant"))]
    pub role: &'static str,
    /// `null` when the answer consists of tool calls only.
    pub content: Option<String>,
    #[schemars(with = "()")]
    pub refusal: Option<()>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1))]
    pub tool_calls: Vec<ToolCallWhole>,
}

#[derive(Serialize, JsonSchema)]
pub struct ToolCallWhole {
    pub id: String,
    #[schemars(extend("const" = "function"))]
    pub r#type: &'static str,
    pub function: FunctionCall,
}

#[derive(Serialize, JsonSchema)]
pub struct FunctionCall {
    pub name: String,
    /// A JSON object as text.
    #[schemars(extend("contentMediaType" = "application/json"))]
    pub arguments: String,
}

#[derive(Default, Serialize, JsonSchema)]
pub struct ChatChunkChoice {
    pub index: u32,
    pub delta: ChatDelta,
    pub logprobs: Option<ChatLogprobs>,
    #[schemars(extend("enum" = ["stop", "length", "tool_calls", null]))]
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

#[derive(Default, Serialize, JsonSchema)]
pub struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("const" = "assistant"))]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<[ToolCallDelta; 1]>,
}

/// The start of a tool call, with its id and name, or a further piece of its arguments.
#[derive(Serialize, JsonSchema)]
pub struct ToolCallDelta {
    pub index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("const" = "function"))]
    pub r#type: Option<&'static str>,
    pub function: FunctionDelta,
}

#[derive(Serialize, JsonSchema)]
pub struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub arguments: String,
}

/// A choice of a completion or of a completion's chunk.
#[derive(Default, Serialize, JsonSchema)]
pub struct TextChoice<'a> {
    pub index: u32,
    pub text: String,
    pub logprobs: Option<TextLogprobs>,
    #[schemars(extend("enum" = ["stop", "length", null]))]
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// The stop token or the stop string of the client that ended the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum StopReason {
    Token(u32),
    Text(String),
}

#[derive(Debug, Default, Serialize, JsonSchema)]
pub struct ChatLogprobs {
    pub content: Vec<ChatTokenLogprob>,
    #[schemars(with = "()")]
    pub refusal: Option<()>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct ChatTokenLogprob {
    #[serde(flatten)]
    pub token: TokenLogprob,
    pub top_logprobs: Vec<TokenLogprob>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct TokenLogprob {
    pub token: String,
    #[serde(serialize_with = "finite")]
    #[schemars(range(min = -9999.0, max = 0.0))]
    pub logprob: f32,
    /// Bytes of the token; they may be part of a character.
    pub bytes: Vec<u8>,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
pub struct TextLogprobs {
    /// Number of characters of the answer before each token.
    pub text_offset: Vec<u64>,
    #[serde(serialize_with = "all_finite")]
    #[schemars(inner(range(min = -9999.0, max = 0.0)))]
    pub token_logprobs: Vec<f32>,
    pub tokens: Vec<String>,
    #[schemars(with = "Vec<HashMap<String, f32>>")]
    pub top_logprobs: Vec<TopLogprobs>,
}

/// Log-probability by token, best first.
#[derive(Debug, Default)]
pub struct TopLogprobs(pub Vec<(String, f32)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (index, (token, logprob)) in self.0.iter().enumerate() {
            // Several tokens may have the same text, such as parts of characters; keep the best one.
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

fn finite<S: Serializer>(logprob: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f32(clamped(*logprob))
}

fn all_finite<S: Serializer>(logprobs: &[f32], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(logprobs.iter().map(|logprob| clamped(*logprob)))
}

#[derive(Serialize, JsonSchema)]
pub struct ModelList {
    #[schemars(extend("const" = "list"))]
    pub object: &'static str,
    pub data: Vec<ModelCard>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Model")]
pub struct ModelCard {
    pub id: String,
    #[schemars(extend("const" = "model"))]
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    /// Name of the model; `id` may be an alias.
    pub root: String,
    /// Tokens of prompt and answer together at most; absent while no decode node is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_model_len: Option<u32>,
}

#[derive(Serialize, JsonSchema)]
pub struct Tokenized {
    pub count: usize,
    /// Tokens of prompt and answer together at most; `null` while no decode node is known.
    pub max_model_len: Option<u32>,
    pub tokens: Vec<u32>,
    /// Text of each token, with `return_token_strs`.
    pub token_strs: Option<Vec<String>>,
}

#[derive(Serialize, JsonSchema)]
pub struct Detokenized {
    pub prompt: String,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Error")]
pub struct ErrorBody {
    pub error: ErrorContent,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ErrorContent {
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
            token_logprobs: vec![f32::NEG_INFINITY],
            tokens: vec!["a".into()],
            top_logprobs: vec![TopLogprobs(vec![
                ("a".into(), -0.5),
                ("b".into(), f32::NAN),
                ("a".into(), -3.0),
            ])],
        })
        .unwrap();
        assert_eq!(value["token_logprobs"], json!([-9999.0]));
        assert_eq!(value["top_logprobs"], json!([{"a": -0.5, "b": -9999.0}]));
    }

    #[test]
    fn usage_is_absent_null_or_there() {
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
                baton: None,
            })
            .unwrap()
        };
        assert_eq!(completion(None).get("usage"), None);
        assert_eq!(completion(Some(None))["usage"], json!(null));
        assert_eq!(completion(Some(Some(Usage::default())))["usage"]["prompt_tokens"], 0);
    }
}
