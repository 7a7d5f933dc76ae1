//! Schemas of the request bodies of Anthropic's API.

use schemars::JsonSchema;
use serde_json::{Map, Value};

use super::requests::Sampling;
use crate::request::{
    options::TOKENS,
    tools::{NAME_BYTES_MAX, TOOLS_MAX},
};

// A `///` comment on a request type would become its description.

#[derive(JsonSchema)]
pub(super) struct MessagesRequest {
    #[serde(flatten)]
    prompt: MessagesPrompt,
    #[serde(flatten)]
    sampling: Sampling,
    /// Maximum number of generated tokens, thinking included.
    #[schemars(range(min = *TOKENS.start(), max = *TOKENS.end()))]
    max_tokens: u32,
    /// Texts that end the answer.
    #[schemars(
        length(max = text::STOP_STRINGS_MAX),
        inner(length(min = 1, max = text::STOP_STRING_BYTES_MAX))
    )]
    stop_sequences: Option<Vec<String>>,
    /// Stream the answer as server-sent events.
    stream: Option<bool>,
    /// No effect.
    metadata: Option<Map<String, Value>>,
    /// No effect.
    #[schemars(extend("enum" = ["auto", "standard_only", null]))]
    service_tier: Option<Value>,
}

#[derive(JsonSchema)]
pub(super) struct MessagesCountRequest {
    #[serde(flatten)]
    prompt: MessagesPrompt,
}

// Fields that determine the prompt.
#[derive(JsonSchema)]
struct MessagesPrompt {
    /// Name or alias of a model; without the field the default model answers.
    model: Option<String>,
    /// The system prompt.
    system: Option<TextContent>,
    /// The conversation. The answer continues a last message of the assistant.
    #[schemars(length(min = 1))]
    messages: Vec<InputMessage>,
    /// Tools that the model may call. Rejected if the model's chat template does not show tools.
    #[schemars(length(max = TOOLS_MAX))]
    tools: Option<Vec<CustomTool>>,
    /// Whether the model may call tools; the default is auto. With `any` and `tool` the answer
    /// consists of calls only, whose inputs match their schemas.
    tool_choice: Option<ClientToolChoice>,
    /// Whether the model thinks, for chat templates with the variable `enable_thinking`. The budget
    /// is not enforced.
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    /// Further variables for the chat template.
    chat_template_kwargs: Option<Map<String, Value>>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(tag = "role", rename_all = "snake_case")]
enum InputMessage {
    User { content: UserContent },
    Assistant { content: AssistantContent },
    System { content: TextContent },
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum TextContent {
    Text(String),
    Blocks(Vec<TextBlock>),
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(tag = "type", rename_all = "snake_case")]
enum TextBlock {
    Text { text: String },
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum UserContent {
    Text(String),
    Blocks(Vec<UserBlock>),
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(tag = "type", rename_all = "snake_case")]
enum UserBlock {
    Text { text: String },
    ToolResult { tool_use_id: String, content: Option<TextContent>, is_error: Option<bool> },
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum AssistantContent {
    Text(String),
    Blocks(Vec<AssistantBlock>),
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(tag = "type", rename_all = "snake_case")]
enum AssistantBlock {
    Text { text: String },
    Thinking { thinking: String },
    RedactedThinking {},
    ToolUse { id: String, name: String, input: Map<String, Value> },
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct CustomTool {
    #[schemars(length(min = 1, max = NAME_BYTES_MAX))]
    name: String,
    description: Option<String>,
    /// A JSON schema.
    input_schema: Map<String, Value>,
    /// With true a call's input matches its schema, also where the model decides whether it calls.
    strict: Option<bool>,
    #[schemars(extend("enum" = ["custom", null]))]
    r#type: Option<Value>,
    #[schemars(extend("enum" = [false, null]))]
    defer_loading: Option<Value>,
    #[schemars(extend("enum" = [[], null]))]
    input_examples: Option<Value>,
    #[schemars(extend("enum" = [["direct"], null]))]
    allowed_callers: Option<Value>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ClientToolChoice {
    Auto { disable_parallel_tool_use: Option<bool> },
    Any { disable_parallel_tool_use: Option<bool> },
    Tool { name: String, disable_parallel_tool_use: Option<bool> },
    None {},
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Thinking {
    Adaptive {
        display: Option<ThinkingDisplay>,
    },
    BetweenTools {
        display: Option<ThinkingDisplay>,
    },
    Disabled {
        display: Option<ThinkingDisplay>,
    },
    Enabled {
        /// Below `max_tokens`.
        #[schemars(range(min = 1024))]
        budget_tokens: u64,
        display: Option<ThinkingDisplay>,
    },
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
enum ThinkingDisplay {
    Summarized,
    Omitted,
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct OutputConfig {
    /// Value of the template variable `reasoning_effort`; `xhigh` and `max` become `high`.
    #[schemars(extend("enum" = ["low", "medium", "high", "xhigh", "max", null]))]
    effort: Option<Value>,
    format: Option<OutputFormat>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(tag = "type", rename_all = "snake_case")]
enum OutputFormat {
    JsonSchema { schema: Map<String, Value> },
}
