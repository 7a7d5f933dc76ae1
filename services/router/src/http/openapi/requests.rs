//! Schemas of the request bodies, derived from the types below. The router does not parse requests
//! into these types: derived errors lack the field's value and its allowed range (see
//! [`fields`](crate::http::fields)).

use std::collections::HashMap;

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use super::messages::{MessagesCountRequest, MessagesRequest};
use crate::{
    http::{
        foreign_fields::{Treatment, foreign_fields},
        messages::{self, MESSAGES_UNSUPPORTED},
        pooling::{POOLING_UNSUPPORTED, TEXTS_MAX},
        request_fields::{CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, Unsupported},
        responses::{self, RESPONSES_UNSUPPORTED},
    },
    request::{
        options::{
            ALLOWED_TOKENS_MAX, CACHE_SALT_BYTES_MAX, CHOICES, LOGIT_BIASES_MAX, LOGPROBS, MIN_P,
            PENALTY, REPETITION_PENALTY, SEED, STOP_TOKENS_MAX, TEMPERATURE, TOKENS, TOP_K, TOP_P,
        },
        tools::{NAME_BYTES_MAX, TOOLS_MAX},
    },
};

pub(super) fn schemas() -> Map<String, Value> {
    let settings = SchemaSettings::draft2020_12().for_deserialize().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    generator.subschema_for::<ChatCompletionRequest>();
    generator.subschema_for::<CompletionRequest>();
    generator.subschema_for::<ResponsesRequest>();
    generator.subschema_for::<MessagesRequest>();
    generator.subschema_for::<MessagesCountRequest>();
    generator.subschema_for::<EmbeddingRequest>();
    generator.subschema_for::<RerankRequest>();
    generator.subschema_for::<ScoreRequest>();
    generator.subschema_for::<TokenizeRequest>();
    generator.subschema_for::<DetokenizeRequest>();
    let mut schemas = generator.take_definitions(true);
    let requests: [(&str, &[Unsupported], &[&str]); 5] = [
        ("ChatCompletionRequest", &CHAT_UNSUPPORTED, &[]),
        ("CompletionRequest", &COMPLETION_UNSUPPORTED, &[]),
        ("MessagesRequest", &MESSAGES_UNSUPPORTED, &messages::OWN_FIELDS),
        ("MessagesCountRequest", &MESSAGES_UNSUPPORTED, &messages::OWN_FIELDS),
        ("ResponsesRequest", &RESPONSES_UNSUPPORTED, &responses::OWN_FIELDS),
    ];
    for (request, unsupported, own) in requests {
        let properties = &mut schemas[request]["properties"];
        for (name, neutral) in unsupported {
            properties[*name] = unsupported_field(neutral, "");
        }
        for foreign in foreign_fields(own) {
            properties[foreign.name] = match foreign.treatment {
                Treatment::SameAs { field, unset } => {
                    let same = properties.get(field).cloned().unwrap_or_else(|| json!({}));
                    let unset = unset.and_then(|text| serde_json::from_str::<Value>(text).ok());
                    // `null` is like no field, also where the router's own field is required.
                    let absent = [Some(Value::Null), unset].into_iter().flatten();
                    let absent = absent.map(|value| json!({"const": value}));
                    let about = format!("Of {}: same as `{field}`.", foreign.servers);
                    let any_of: Vec<Value> = [same].into_iter().chain(absent).collect();
                    json!({"description": about, "anyOf": any_of})
                }
                Treatment::Rejected { neutral, .. } => {
                    unsupported_field(neutral, &format!("Of {}. ", foreign.servers))
                }
            };
        }
    }
    for request in ["EmbeddingRequest", "RerankRequest", "ScoreRequest"] {
        for name in POOLING_UNSUPPORTED {
            schemas[request]["properties"][name] =
                json!({"enum": [null], "description": "Not supported: other values are rejected."});
        }
    }
    schemas
}

/// Returns the schema of a field that is rejected unless it has one of the values (as JSON).
/// `about` begins the description.
fn unsupported_field(neutral: &[&str], about: &str) -> Value {
    let texts = neutral.iter().chain(&["null"]);
    let mut values: Vec<Value> = texts.filter_map(|text| serde_json::from_str(text).ok()).collect();
    // JSON does not distinguish 1 from 1.0.
    values.dedup_by(|one, other| one.is_number() && one.as_f64() == other.as_f64());
    let about = format!("{about}Not supported: other values are rejected.");
    json!({"enum": values, "description": about})
}

/// Returns an example of a valid request.
pub(super) fn example(request: &str) -> Value {
    let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
    match request {
        "ChatCompletionRequest" => {
            json!({"messages": messages, "max_completion_tokens": 8, "temperature": 0})
        }
        "CompletionRequest" => {
            json!({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
        }
        "MessagesRequest" => json!({"messages": messages, "max_tokens": 8, "temperature": 0}),
        "MessagesCountRequest" => json!({"messages": messages}),
        "ResponsesRequest" => {
            json!({"input": "What is the capital of France?", "max_output_tokens": 8,
                "temperature": 0})
        }
        "EmbeddingRequest" => json!({"input": ["The capital of France is Paris."]}),
        "RerankRequest" => {
            json!({"query": "What is the capital of France?", "documents": ["Paris.", "Rome."]})
        }
        "ScoreRequest" => json!({"text_1": "What is the capital of France?", "text_2": ["Paris."]}),
        "TokenizeRequest" => json!({"prompt": "The capital of France is"}),
        _ => json!({"tokens": [1, 2, 3]}),
    }
}

// A `///` comment on a request type would become its description.

// Fields of chat and completion requests.
#[derive(JsonSchema)]
struct Generation {
    /// Name or alias of a model; without the field the default model answers.
    model: Option<String>,
    /// Number of answers to the prompt.
    #[schemars(range(min = *CHOICES.start(), max = *CHOICES.end()))]
    n: Option<u32>,
    /// Only the value of `n` is allowed.
    #[schemars(range(min = *CHOICES.start(), max = *CHOICES.end()))]
    best_of: Option<u32>,
    /// Stream the answer as server-sent events.
    stream: Option<bool>,
    /// Only with `stream`.
    stream_options: Option<StreamOptions>,
    /// Return the token ids of prompt and answer.
    return_token_ids: Option<bool>,
    /// Return the version of the weights that made each token, in `weight_versions`.
    return_weight_version: Option<bool>,
    #[serde(flatten)]
    sampling: Sampling,
}

// Options that every API shares: sampling, stop conditions and grammar.
#[derive(JsonSchema)]
pub(super) struct Sampling {
    /// Minimum number of generated tokens.
    #[schemars(range(min = 0, max = *TOKENS.end()))]
    min_tokens: Option<u32>,
    /// 0 means greedy decoding; the default is 1.
    #[schemars(range(min = *TEMPERATURE.start(), max = *TEMPERATURE.end()))]
    temperature: Option<f64>,
    /// 1 keeps every token.
    #[schemars(range(min = *TOP_P.start(), max = *TOP_P.end()))]
    top_p: Option<f64>,
    /// 0 and -1 keep all tokens.
    #[schemars(range(min = *TOP_K.start() as i64, max = *TOP_K.end() as i64))]
    top_k: Option<i32>,
    /// 0 keeps every token.
    #[schemars(range(min = *MIN_P.start(), max = *MIN_P.end()))]
    min_p: Option<f64>,
    /// Equal requests with equal seeds sample the same tokens; -1 is random.
    #[schemars(range(min = *SEED.start() as i64, max = *SEED.end() as u64))]
    seed: Option<i64>,
    /// 1 has no effect.
    #[schemars(range(min = *REPETITION_PENALTY.start(), max = *REPETITION_PENALTY.end()))]
    repetition_penalty: Option<f64>,
    /// 0 has no effect.
    #[schemars(range(min = *PENALTY.start(), max = *PENALTY.end()))]
    presence_penalty: Option<f64>,
    /// 0 has no effect.
    #[schemars(range(min = *PENALTY.start(), max = *PENALTY.end()))]
    frequency_penalty: Option<f64>,
    /// Values from -100 to 100 by token id, which are added to the logits of the tokens.
    #[schemars(extend("maxProperties" = LOGIT_BIASES_MAX))]
    logit_bias: Option<HashMap<String, f32>>,
    /// The only tokens that may be sampled. Empty: every token.
    #[schemars(length(max = ALLOWED_TOKENS_MAX), inner(range(max = u32::MAX)))]
    allowed_token_ids: Option<Vec<u32>>,
    /// Texts that the answer does not have, in their usual tokens; at most 4,096 bytes in all.
    #[schemars(inner(length(min = 1)))]
    bad_words: Option<Vec<String>>,
    /// Keep only so many tokens of the prompt, the last ones; -1 keeps as many as the model takes.
    #[schemars(extend("anyOf" = [{"const": -1}, {"type": "integer", "minimum": 1}, {"type": "null"}]))]
    truncate_prompt_tokens: Option<i32>,
    /// Requests of a lower number start earlier among the waiting requests of the same API key.
    priority: Option<i32>,
    /// Stop strings: texts that end the answer.
    stop: Option<Stop>,
    /// Include the stop text in the answer.
    include_stop_str_in_output: Option<bool>,
    /// Omit special tokens from the text; the default is true.
    skip_special_tokens: Option<bool>,
    /// Ids of tokens that end the answer.
    #[schemars(length(max = STOP_TOKENS_MAX), inner(range(max = u32::MAX)))]
    stop_token_ids: Option<Vec<u32>>,
    /// Continue after the model's end tokens.
    ignore_eos: Option<bool>,
    /// Only prompts with the same salt share cached KV.
    #[schemars(length(max = CACHE_SALT_BYTES_MAX))]
    cache_salt: Option<String>,
    /// Format of the whole answer.
    response_format: Option<ResponseFormat>,
    /// Regular expression that the whole answer matches.
    #[schemars(length(max = grammar::limits::REGEX_BYTES_MAX))]
    regex: Option<String>,
    /// Same as `regex`.
    #[schemars(length(max = grammar::limits::REGEX_BYTES_MAX))]
    guided_regex: Option<String>,
    /// Same as `response_format` with a schema.
    #[schemars(extend("anyOf" = [{"type": "object"}, {"const": true}, {"type": "string"}, {"type": "null"}]))]
    guided_json: Option<Value>,
    /// The answer is exactly one of these texts.
    #[schemars(length(min = 1))]
    guided_choice: Option<Vec<String>>,
    /// Context-free grammar of the whole answer, in the notation of Lark or in GBNF.
    #[schemars(length(max = grammar::limits::CONTEXT_FREE_BYTES_MAX))]
    guided_grammar: Option<String>,
    /// Structured output: at most one of the fields.
    structured_outputs: Option<StructuredOutputs>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct StreamOptions {
    /// Send the usage in a last chunk.
    include_usage: Option<bool>,
    /// Send the usage so far in every chunk.
    continuous_usage_stats: Option<bool>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum Stop {
    One(#[schemars(length(max = text::STOP_STRING_BYTES_MAX))] String),
    Many(
        #[schemars(
            length(max = text::STOP_STRINGS_MAX),
            inner(length(min = 1, max = text::STOP_STRING_BYTES_MAX))
        )]
        Vec<String>,
    ),
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResponseFormat {
    Text,
    JsonObject {
        #[schemars(extend("anyOf" = [{"type": "object"}, {"const": true}, {"type": "null"}]))]
        schema: Option<Value>,
    },
    JsonSchema {
        json_schema: NamedSchema,
    },
    /// Free text, and after each trigger JSON between two texts. Either `structures` and
    /// `triggers`, or `format`.
    StructuralTag {
        #[schemars(length(min = 1, max = TOOLS_MAX))]
        structures: Option<Vec<Structure>>,
        #[schemars(length(min = 1, max = 1), inner(length(min = 1)))]
        triggers: Option<Vec<String>>,
        format: Option<TriggeredTags>,
    },
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(deny_unknown_fields)]
struct Structure {
    /// The trigger and further text.
    begin: String,
    #[schemars(extend("anyOf" = [{"type": "object"}, {"const": true}]))]
    schema: Value,
    /// The same text in every structure.
    end: String,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(deny_unknown_fields)]
struct TriggeredTags {
    #[schemars(extend("const" = "triggered_tags"))]
    r#type: String,
    #[schemars(length(min = 1, max = 1), inner(length(min = 1)))]
    triggers: Vec<String>,
    #[schemars(length(min = 1, max = TOOLS_MAX))]
    tags: Vec<StructureTag>,
    #[schemars(extend("const" = false))]
    at_least_one: Option<bool>,
    /// The answer ends after the first tag.
    stop_after_first: Option<bool>,
    #[schemars(length(max = 0))]
    excludes: Option<Vec<String>>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(deny_unknown_fields)]
struct StructureTag {
    #[schemars(extend("const" = "tag"))]
    r#type: Option<String>,
    /// The trigger and further text.
    begin: String,
    content: TagContent,
    /// The same text in every tag.
    end: String,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(deny_unknown_fields)]
struct TagContent {
    #[schemars(extend("const" = "json_schema"))]
    r#type: String,
    #[schemars(extend("anyOf" = [{"type": "object"}, {"const": true}]))]
    json_schema: Value,
    #[schemars(extend("enum" = ["json", null]))]
    style: Option<String>,
    #[schemars(extend("const" = false))]
    any_order: Option<bool>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct NamedSchema {
    // The router also rejects invalid and too large schemas.
    #[schemars(extend("anyOf" = [{"type": "object"}, {"const": true}]))]
    schema: Value,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(deny_unknown_fields)]
struct StructuredOutputs {
    #[schemars(extend("anyOf" = [{"type": "object"}, {"const": true}, {"type": "string"}, {"type": "null"}]))]
    json: Option<Value>,
    #[schemars(length(max = grammar::limits::REGEX_BYTES_MAX))]
    regex: Option<String>,
    #[schemars(length(min = 1))]
    choice: Option<Vec<String>>,
    #[schemars(length(max = grammar::limits::CONTEXT_FREE_BYTES_MAX))]
    grammar: Option<String>,
    json_object: Option<bool>,
    /// The text of a `response_format` with type `structural_tag`.
    structural_tag: Option<String>,
}

// Options for rendering a conversation into a prompt.
#[derive(JsonSchema)]
struct Rendering {
    /// End the prompt with the beginning of the assistant's answer; true unless the final message
    /// is continued.
    add_generation_prompt: Option<bool>,
    /// The answer continues the last message.
    continue_final_message: Option<bool>,
    /// Further variables for the chat template.
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Variable `reasoning_effort` of the chat template; with `none`, `enable_thinking` false.
    #[schemars(extend("enum" = ["none", "minimal", "low", "medium", "high", null]))]
    reasoning_effort: Option<String>,
    /// Functions that the model may call. Rejected if the model's chat template does not show
    /// tools.
    #[schemars(length(max = TOOLS_MAX))]
    tools: Option<Vec<Tool>>,
    /// Whether the model may call functions; the default is auto. With `required` the answer
    /// consists of calls only, whose arguments match their schemas. A named function yields one
    /// call, and `finish_reason` is `stop`.
    tool_choice: Option<ToolChoice>,
    /// With false the answer ends after its first call; the default is true.
    parallel_tool_calls: Option<bool>,
}

#[derive(JsonSchema)]
struct ChatCompletionRequest {
    #[serde(flatten)]
    generation: Generation,
    #[serde(flatten)]
    rendering: Rendering,
    /// The conversation.
    #[schemars(length(min = 1))]
    messages: Vec<Message>,
    /// Maximum number of generated tokens; the default, and -1, is the rest of the model's context.
    /// 0 only with `prompt_logprobs`.
    #[schemars(range(min = -1, max = *TOKENS.end()))]
    max_completion_tokens: Option<i32>,
    /// Older name of `max_completion_tokens`.
    #[schemars(range(min = -1, max = *TOKENS.end()))]
    max_tokens: Option<i32>,
    /// Return log-probabilities.
    logprobs: Option<bool>,
    /// Number of top tokens at each place of the prompt, with log-probabilities. Only without
    /// `stream`.
    #[schemars(range(min = *LOGPROBS.start(), max = *LOGPROBS.end()))]
    prompt_logprobs: Option<u32>,
    /// Number of top tokens; only with `logprobs`.
    #[schemars(range(min = *LOGPROBS.start(), max = *LOGPROBS.end()))]
    top_logprobs: Option<u32>,
    /// Only false: the chat template adds special tokens.
    #[schemars(extend("enum" = [false, null]))]
    add_special_tokens: Option<Value>,
}

#[derive(JsonSchema)]
struct ResponsesRequest {
    #[serde(flatten)]
    sampling: Sampling,
    /// Name or alias of a model; without the field the default model answers.
    model: Option<String>,
    /// A message of the user, or a list of items of type message, function_call,
    /// function_call_output or reasoning.
    #[schemars(extend("anyOf" = [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}]))]
    input: Value,
    /// A system message before the input.
    instructions: Option<String>,
    /// Id of the response whose input and output precede the input.
    previous_response_id: Option<String>,
    /// Keep the response for later requests; the default is true.
    store: Option<bool>,
    /// Stream the response as server-sent events.
    stream: Option<bool>,
    /// Maximum number of generated tokens; the default is the rest of the model's context.
    #[schemars(range(min = *TOKENS.start(), max = *TOKENS.end()))]
    max_output_tokens: Option<u32>,
    /// Maximum number of calls of hosted tools; no effect, because the router has none.
    #[schemars(range(min = 1))]
    max_tool_calls: Option<u32>,
    /// Repeated in the response.
    metadata: Option<Map<String, Value>>,
    /// Repeated in the response.
    user: Option<String>,
    /// `reasoning.encrypted_content`: reasoning items return in the next request.
    /// `message.output_text.logprobs`: log-probabilities. Values for hosted tools have no effect.
    include: Option<Vec<String>>,
    /// Number of top tokens; only with `message.output_text.logprobs` in `include`.
    #[schemars(range(min = *LOGPROBS.start(), max = *LOGPROBS.end()))]
    top_logprobs: Option<u32>,
    /// Format of the text.
    text: Option<TextConfig>,
    /// Reasoning of the model.
    reasoning: Option<ReasoningConfig>,
    /// Functions that the model may call. Rejected if the model's chat template does not show
    /// tools.
    #[schemars(length(max = TOOLS_MAX))]
    tools: Option<Vec<FunctionTool>>,
    /// Whether the model may call functions; the default is auto.
    tool_choice: Option<FunctionChoice>,
    /// With false the answer ends after its first call; the default is true.
    parallel_tool_calls: Option<bool>,
    /// Further variables for the chat template.
    chat_template_kwargs: Option<Map<String, Value>>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct TextConfig {
    format: Option<TextFormat>,
    #[schemars(extend("enum" = ["medium", null]))]
    verbosity: Option<Value>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(tag = "type", rename_all = "snake_case")]
enum TextFormat {
    Text,
    JsonObject,
    JsonSchema {
        // The router also rejects invalid and too large schemas.
        #[schemars(extend("anyOf" = [{"type": "object"}, {"const": true}]))]
        schema: Value,
    },
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct ReasoningConfig {
    /// Variable `reasoning_effort` of the chat template; with `none`, `enable_thinking` false.
    #[schemars(extend("enum" = ["none", "minimal", "low", "medium", "high", "xhigh", "max", null]))]
    effort: Option<Value>,
    /// No effect: reasoning items have the whole text.
    #[schemars(extend("enum" = ["auto", "concise", "detailed", null]))]
    summary: Option<Value>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct FunctionTool {
    #[schemars(extend("const" = "function"))]
    r#type: String,
    #[serde(flatten)]
    function: Function,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum FunctionChoice {
    Mode(#[schemars(extend("enum" = ["auto", "none", "required"]))] String),
    Function {
        #[schemars(extend("const" = "function"))]
        r#type: String,
        name: String,
    },
}

#[derive(JsonSchema)]
struct CompletionRequest {
    #[serde(flatten)]
    generation: Generation,
    /// A text or token ids, or a list of either.
    prompt: Prompt,
    /// Maximum number of generated tokens; the default is 16, and -1 is the rest of the model's
    /// context. 0 only with `echo` or `prompt_logprobs`.
    #[schemars(range(min = -1, max = *TOKENS.end()))]
    max_tokens: Option<i32>,
    /// Return log-probabilities of this number of top tokens.
    #[schemars(range(min = *LOGPROBS.start(), max = *LOGPROBS.end()))]
    logprobs: Option<u32>,
    /// Number of top tokens at each place of the prompt, with log-probabilities. Only without
    /// `stream`.
    #[schemars(range(min = *LOGPROBS.start(), max = *LOGPROBS.end()))]
    prompt_logprobs: Option<u32>,
    /// Begin the text with the prompt; with `logprobs` also the lists of tokens.
    echo: Option<bool>,
    /// Add the model's special tokens around the prompt; the default is true.
    add_special_tokens: Option<bool>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Texts(#[schemars(length(min = 1))] Vec<String>),
    Tokens(#[schemars(length(min = 1), inner(range(max = u32::MAX)))] Vec<u32>),
    TokenLists(#[schemars(length(min = 1), inner(inner(range(max = u32::MAX))))] Vec<Vec<u32>>),
}

#[derive(JsonSchema)]
struct EmbeddingRequest {
    /// Name or alias of an embedding model; without the field the default model answers.
    model: Option<String>,
    /// A text or token ids, or a list of either.
    input: Prompt,
    /// Form of the vectors: numbers, or little-endian f32 in base64.
    #[schemars(extend("enum" = ["float", "base64", null]))]
    encoding_format: Option<String>,
    /// Number of dimensions to return, if the checkpoint's configuration has Matryoshka dimensions.
    #[schemars(range(min = 1))]
    dimensions: Option<u32>,
    /// Name of the checkpoint's prompt that precedes each text.
    prompt_name: Option<String>,
    /// Whether texts get the special tokens of the tokenizer; the default is true.
    add_special_tokens: Option<bool>,
    /// Accepted for compatibility.
    user: Option<String>,
}

#[derive(JsonSchema)]
struct RerankRequest {
    /// Name or alias of a reranker; without the field the default model answers.
    model: Option<String>,
    query: String,
    #[schemars(length(min = 1, max = TEXTS_MAX))]
    documents: Vec<Document>,
    /// Number of results to return; the default is all.
    #[schemars(range(min = 1))]
    top_n: Option<u32>,
    /// Return the text of each document; the default is false.
    return_documents: Option<bool>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum Document {
    Text(String),
    Object { text: String },
}

#[derive(JsonSchema)]
struct ScoreRequest {
    /// Name or alias of a reranker; without the field the default model answers.
    model: Option<String>,
    /// The query, or one query for each text of `text_2`.
    text_1: Texts,
    /// One or several documents.
    text_2: Texts,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum Texts {
    One(String),
    Many(#[schemars(length(min = 1, max = TEXTS_MAX))] Vec<String>),
}

#[derive(JsonSchema)]
#[schemars(extend("anyOf" = [{"required": ["prompt"]}, {"required": ["messages"]}]))]
struct TokenizeRequest {
    #[serde(flatten)]
    rendering: Rendering,
    /// Name or alias of a model; without the field the default model answers.
    model: Option<String>,
    /// A text.
    prompt: Option<String>,
    /// The conversation.
    #[schemars(length(min = 1))]
    messages: Option<Vec<Message>>,
    /// Return each token's text.
    return_token_strs: Option<bool>,
    /// Add the model's special tokens; the default is true. With `messages` only false is allowed,
    /// because chat templates add them.
    add_special_tokens: Option<bool>,
}

#[derive(JsonSchema)]
struct DetokenizeRequest {
    /// Name or alias of a model; without the field the default model answers.
    model: Option<String>,
    /// Token ids.
    #[schemars(inner(range(max = u32::MAX)))]
    tokens: Vec<u32>,
}

/// Further fields are passed to the chat template.
#[derive(JsonSchema)]
struct Message {
    #[schemars(extend("enum" = ["system", "developer", "user", "assistant", "tool", "function", "ipython"]))]
    role: String,
    content: Option<Content>,
    /// Name for chat templates that use it.
    name: Option<Value>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum ContentPart {
    Text(String),
    Object {
        #[schemars(extend("const" = "text"))]
        r#type: Option<Value>,
        text: String,
    },
}

#[derive(JsonSchema)]
struct Tool {
    #[schemars(extend("const" = "function"))]
    r#type: String,
    function: Function,
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct Function {
    #[schemars(length(min = 1, max = NAME_BYTES_MAX))]
    name: String,
    description: Option<String>,
    /// A JSON schema.
    parameters: Option<Map<String, Value>>,
    /// With true a call's arguments match their schema, also where the model decides whether it
    /// calls.
    strict: Option<bool>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum ToolChoice {
    Mode(#[schemars(extend("enum" = ["auto", "none", "required"]))] String),
    Function {
        #[schemars(extend("const" = "function"))]
        r#type: String,
        function: FunctionName,
    },
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct FunctionName {
    name: String,
}
