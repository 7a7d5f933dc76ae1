//! Bodies of `/v1/responses`: the response object, its output items, and the events of its stream.
//!
//! `/openapi.json` describes the types of this file: doc comments become descriptions there.

use router_core::HandOverStats;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::http::wire::{ChatTokenLogprob, ErrorContent};

/// A response, with the fields of its request.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Response")]
pub(in crate::http) struct ResponseObject {
    pub id: String,
    #[schemars(extend("const" = "response"))]
    pub object: &'static str,
    /// Creation time in seconds since 1970.
    pub created_at: u64,
    /// End of the answer in seconds since 1970.
    pub completed_at: Option<u64>,
    pub status: ResponseStatus,
    #[schemars(extend("const" = false))]
    pub background: bool,
    pub error: Option<ErrorContent>,
    pub incomplete_details: Option<IncompleteDetails>,
    pub model: String,
    pub output: Vec<OutputItem>,
    pub usage: Option<ResponseUsage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baton: Option<HandOverStats>,
    #[serde(flatten)]
    pub request: RequestEcho,
}

/// Fields of the request that the response repeats.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(in crate::http) struct RequestEcho {
    pub instructions: Option<String>,
    pub max_output_tokens: Option<u32>,
    pub max_tool_calls: Option<u32>,
    pub metadata: Map<String, Value>,
    pub parallel_tool_calls: bool,
    pub previous_response_id: Option<String>,
    pub reasoning: ReasoningEcho,
    #[schemars(extend("const" = "default"))]
    pub service_tier: &'static str,
    pub store: bool,
    pub temperature: Option<f32>,
    pub text: Map<String, Value>,
    #[schemars(extend("anyOf" = [{"type": "string"}, {"type": "object"}]))]
    pub tool_choice: Value,
    pub tools: Vec<Value>,
    pub top_logprobs: u32,
    pub top_p: Option<f32>,
    #[schemars(extend("const" = "disabled"))]
    pub truncation: &'static str,
    pub user: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(in crate::http) struct ReasoningEcho {
    pub effort: Option<String>,
    pub summary: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::http) enum ResponseStatus {
    InProgress,
    Completed,
    Incomplete,
    Cancelled,
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(in crate::http) struct IncompleteDetails {
    /// Limit that cut the answer, or `abort`: a weight update or a pause ended it.
    #[schemars(extend("enum" = ["max_output_tokens", "abort"]))]
    pub reason: &'static str,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(in crate::http) struct ResponseUsage {
    pub input_tokens: u64,
    pub input_tokens_details: InputTokensDetails,
    pub output_tokens: u64,
    pub output_tokens_details: OutputTokensDetails,
    pub total_tokens: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(in crate::http) struct InputTokensDetails {
    /// Prompt tokens found in a prefix cache.
    pub cached_tokens: u64,
    /// Always 0: the prefix cache costs nothing to write.
    pub cache_write_tokens: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(in crate::http) struct OutputTokensDetails {
    pub reasoning_tokens: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "ResponseOutputItem")]
pub(in crate::http) enum OutputItem {
    Reasoning {
        id: String,
        status: ResponseStatus,
        /// Always empty.
        summary: Vec<Value>,
        content: Vec<OutputPart>,
        /// The text for the next request, on demand.
        #[serde(skip_serializing_if = "Option::is_none")]
        encrypted_content: Option<String>,
    },
    Message {
        id: String,
        status: ResponseStatus,
        #[schemars(extend("const" = "assistant"))]
        role: &'static str,
        content: Vec<OutputPart>,
    },
    FunctionCall {
        id: String,
        status: ResponseStatus,
        call_id: String,
        name: String,
        /// A JSON object as text; its beginning if the answer was cut within the call.
        #[schemars(extend("contentMediaType" = "application/json"))]
        arguments: String,
    },
}

impl OutputItem {
    pub(super) fn status_mut(&mut self) -> &mut ResponseStatus {
        match self {
            Self::Reasoning { status, .. }
            | Self::Message { status, .. }
            | Self::FunctionCall { status, .. } => status,
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "ResponseOutputPart")]
pub(in crate::http) enum OutputPart {
    ReasoningText {
        text: String,
    },
    OutputText {
        text: String,
        /// Always empty.
        annotations: Vec<Value>,
        /// With `message.output_text.logprobs` in `include`.
        logprobs: Vec<ChatTokenLogprob>,
    },
}

/// An event of a streamed response.
#[derive(Serialize, JsonSchema)]
pub(in crate::http) struct ResponseEvent<'a> {
    #[serde(flatten)]
    pub change: ResponseChange<'a>,
    /// Number of the event in its stream, from 0.
    pub sequence_number: u64,
}

/// Change of a response.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type")]
#[schemars(inline)]
pub(in crate::http) enum ResponseChange<'a> {
    #[serde(rename = "response.created")]
    Created { response: &'a ResponseObject },
    #[serde(rename = "response.in_progress")]
    InProgress { response: &'a ResponseObject },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { output_index: usize, item: &'a OutputItem },
    #[serde(rename = "response.content_part.added")]
    PartAdded { item_id: &'a str, output_index: usize, content_index: u32, part: &'a OutputPart },
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta { item_id: &'a str, output_index: usize, content_index: u32, delta: &'a str },
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone { item_id: &'a str, output_index: usize, content_index: u32, text: &'a str },
    #[serde(rename = "response.output_text.delta")]
    TextDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: u32,
        delta: &'a str,
        logprobs: &'a [ChatTokenLogprob],
    },
    #[serde(rename = "response.output_text.done")]
    TextDone {
        item_id: &'a str,
        output_index: usize,
        content_index: u32,
        text: &'a str,
        logprobs: &'a [ChatTokenLogprob],
    },
    #[serde(rename = "response.content_part.done")]
    PartDone { item_id: &'a str, output_index: usize, content_index: u32, part: &'a OutputPart },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { item_id: &'a str, output_index: usize, delta: &'a str },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { item_id: &'a str, output_index: usize, name: &'a str, arguments: &'a str },
    #[serde(rename = "response.output_item.done")]
    ItemDone { output_index: usize, item: &'a OutputItem },
    #[serde(rename = "response.completed")]
    Completed { response: &'a ResponseObject },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: &'a ResponseObject },
    #[serde(rename = "response.failed")]
    Failed { response: &'a ResponseObject },
}

impl ResponseChange<'_> {
    /// Returns the type, for the line `event:`.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Created { .. } => "response.created",
            Self::InProgress { .. } => "response.in_progress",
            Self::ItemAdded { .. } => "response.output_item.added",
            Self::PartAdded { .. } => "response.content_part.added",
            Self::ReasoningDelta { .. } => "response.reasoning_text.delta",
            Self::ReasoningDone { .. } => "response.reasoning_text.done",
            Self::TextDelta { .. } => "response.output_text.delta",
            Self::TextDone { .. } => "response.output_text.done",
            Self::PartDone { .. } => "response.content_part.done",
            Self::ArgumentsDelta { .. } => "response.function_call_arguments.delta",
            Self::ArgumentsDone { .. } => "response.function_call_arguments.done",
            Self::ItemDone { .. } => "response.output_item.done",
            Self::Completed { .. } => "response.completed",
            Self::Incomplete { .. } => "response.incomplete",
            Self::Failed { .. } => "response.failed",
        }
    }
}

/// Items of a response's input.
#[derive(Serialize, JsonSchema)]
pub(in crate::http) struct InputItems {
    #[schemars(extend("const" = "list"))]
    pub object: &'static str,
    #[schemars(with = "Vec<Map<String, Value>>")]
    pub data: Vec<Value>,
    pub first_id: Option<String>,
    pub last_id: Option<String>,
    pub has_more: bool,
}

#[derive(Serialize, JsonSchema)]
pub(in crate::http) struct DeletedResponse {
    pub id: String,
    #[schemars(extend("const" = "response.deleted"))]
    pub object: &'static str,
    #[schemars(extend("const" = true))]
    pub deleted: bool,
}
