//! Bodies of answers as OpenAI has them, with vLLM's additions (`token_ids`, `prompt_token_ids`,
//! `stop_reason`) and Baton's own `baton` figures where they were asked for.

use serde::{Serialize, Serializer, ser::SerializeMap};

/// What a token without a finite log-probability has: JSON knows no infinity.
const LOGPROB_MIN: f32 = -9999.0;

#[derive(Serialize)]
pub struct Completion<'a, C> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub system_fingerprint: &'a str,
    pub choices: Vec<C>,
    /// `Some(None)` is `null`: a chunk of a stream whose last chunk will have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// Of a chat; of a completion each choice has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baton: Option<HandOver>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub total_tokens: u64,
    pub prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Prompt tokens that were in a prefix cache.
    pub cached_tokens: u64,
}

/// How an answer came about, for people who measure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HandOver {
    /// KV that crossed from prefill to decode nodes.
    pub kv_bytes: u64,
    /// Of the last transfer: from the reservation to the KV being visible.
    pub transfer_us: u64,
    pub attempts: u32,
    /// Of the last attempt; absent when the decode node read the prompt itself.
    pub prefill_node: Option<String>,
    pub decode_node: Option<String>,
}

#[derive(Serialize)]
pub struct ChatChoice {
    pub index: u32,
    pub message: ChatMessage,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: &'static str,
    pub stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
pub struct ChatMessage {
    pub role: &'static str,
    /// Absent content is `null`: the answer is calls alone.
    pub content: Option<String>,
    pub refusal: Option<()>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallWhole>,
}

#[derive(Serialize)]
pub struct ToolCallWhole {
    pub id: String,
    pub r#type: &'static str,
    pub function: FunctionCall,
}

#[derive(Serialize)]
pub struct FunctionCall {
    pub name: String,
    /// JSON as text.
    pub arguments: String,
}

#[derive(Serialize)]
pub struct ChatChunkChoice {
    pub index: u32,
    pub delta: ChatDelta,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

#[derive(Default, Serialize)]
pub struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<[ToolCallDelta; 1]>,
}

/// The beginning of a call, with its id and name, or some more of its arguments.
#[derive(Serialize)]
pub struct ToolCallDelta {
    pub index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#type: Option<&'static str>,
    pub function: FunctionDelta,
}

#[derive(Serialize)]
pub struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub arguments: String,
}

/// A choice of a completion, whole or in a chunk.
#[derive(Serialize)]
pub struct TextChoice<'a> {
    pub index: u32,
    pub text: String,
    pub logprobs: Option<TextLogprobs>,
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What ended an answer early: the client's own stop token or stop string.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Token(u32),
    Text(String),
}

#[derive(Debug, Default, Serialize)]
pub struct ChatLogprobs {
    pub content: Vec<ChatTokenLogprob>,
    pub refusal: Option<()>,
}

#[derive(Debug, Serialize)]
pub struct ChatTokenLogprob {
    #[serde(flatten)]
    pub token: TokenLogprob,
    pub top_logprobs: Vec<TokenLogprob>,
}

#[derive(Debug, Serialize)]
pub struct TokenLogprob {
    pub token: String,
    #[serde(serialize_with = "finite")]
    pub logprob: f32,
    /// The token's own bytes, which may be part of a character.
    pub bytes: Vec<u8>,
}

#[derive(Debug, Default, Serialize)]
pub struct TextLogprobs {
    /// Characters of the answer before each token.
    pub text_offset: Vec<u64>,
    #[serde(serialize_with = "all_finite")]
    pub token_logprobs: Vec<f32>,
    pub tokens: Vec<String>,
    pub top_logprobs: Vec<TopLogprobs>,
}

/// An object from token to log-probability, best first.
#[derive(Debug, Default)]
pub struct TopLogprobs(pub Vec<(String, f32)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (index, (token, logprob)) in self.0.iter().enumerate() {
            // Different tokens may read alike, such as parts of characters; the best one counts.
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

#[derive(Serialize)]
pub struct ModelList {
    pub object: &'static str,
    pub data: Vec<ModelCard>,
}

#[derive(Serialize)]
pub struct ModelCard {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    /// The model's own name, where `id` is an alias.
    pub root: String,
    /// Prompt and answer together, as vLLM tells it; absent while no decode node is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u32>,
}

#[derive(Serialize)]
pub struct Tokenized {
    pub count: usize,
    /// Prompt and answer together; `null` while no decode node is known.
    pub max_model_len: Option<u32>,
    pub tokens: Vec<u32>,
    /// Each token's text, where it was asked for.
    pub token_strs: Option<Vec<String>>,
}

#[derive(Serialize)]
pub struct Detokenized {
    pub prompt: String,
}

#[derive(Serialize)]
pub struct ErrorBody {
    pub error: ErrorContent,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorContent {
    pub message: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
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
