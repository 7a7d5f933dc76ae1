//! Schemas of the request bodies.

use std::ops::RangeInclusive;

use serde_json::{Map, Value, json};

use crate::{
    request::tools::{NAME_BYTES_MAX, TOOLS_MAX},
    request::{
        cache_salt::CACHE_SALT_BYTES_MAX,
        options::{
            CHOICES, LOGPROBS, MIN_P, PENALTY, REPETITION_PENALTY, SEED, STOP_TOKENS_MAX,
            TEMPERATURE, TOKENS, TOP_K, TOP_P,
        },
    },
};

/// A field: its name, schema and meaning. An absent field and `null` are equivalent.
type Field = (&'static str, Value, &'static str);

pub fn schemas() -> impl Iterator<Item = (String, Value)> {
    let all = [
        ("ChatCompletionRequest", object(&["messages"], [chat(), common()].concat())),
        ("CompletionRequest", object(&["prompt"], [completion(), common()].concat())),
        ("TokenizeRequest", {
            let mut schema = object(&[], tokenize());
            schema["anyOf"] = json!([{"required": ["prompt"]}, {"required": ["messages"]}]);
            schema
        }),
        ("DetokenizeRequest", object(&["tokens"], detokenize())),
        ("Message", message()),
        ("Tool", tool()),
    ];
    all.into_iter().map(|(name, schema)| (name.to_owned(), schema))
}

fn object(required: &[&str], fields: Vec<Field>) -> Value {
    let properties = fields.into_iter().map(|(name, mut schema, about)| {
        if !required.contains(&name) {
            schema = nullable(schema);
        }
        schema["description"] = about.into();
        (name.to_owned(), schema)
    });
    let properties: Map<String, Value> = properties.collect();
    json!({"type": "object", "required": required, "properties": properties})
}

/// An example of a valid request.
pub fn example(request: &str) -> Value {
    let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
    match request {
        "ChatCompletionRequest" => {
            json!({"messages": messages, "max_completion_tokens": 8, "temperature": 0})
        }
        "CompletionRequest" => {
            json!({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
        }
        "TokenizeRequest" => json!({"prompt": "The capital of France is"}),
        _ => json!({"tokens": [1, 2, 3]}),
    }
}

/// Returns the schema extended by `null`.
fn nullable(mut schema: Value) -> Value {
    if let Some(kind) = schema["type"].as_str() {
        schema["type"] = json!([kind, "null"]);
    } else if let Some(values) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        values.push(Value::Null);
    } else if let Some(choices) = schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        choices.push(json!({"type": "null"}));
    }
    schema
}

fn boolean() -> Value {
    json!({"type": "boolean"})
}

fn string() -> Value {
    json!({"type": "string"})
}

fn number(range: RangeInclusive<f64>) -> Value {
    json!({"type": "number", "minimum": range.start(), "maximum": range.end()})
}

fn count(range: RangeInclusive<u32>) -> Value {
    json!({"type": "integer", "minimum": range.start(), "maximum": range.end()})
}

fn token_ids() -> Value {
    json!({"type": "array", "items": count(0..=u32::MAX)})
}

/// JSON schema of an answer. The router also rejects invalid and too large schemas.
fn schema() -> Value {
    json!({"anyOf": [{"type": "object"}, {"const": true}]})
}

fn regex() -> Value {
    json!({"type": "string", "maxLength": grammar::limits::REGEX_BYTES_MAX})
}

/// An unsupported field; only the values that disable it are valid.
fn off(values: &[Value]) -> Value {
    json!({"enum": values})
}

const NOT_SUPPORTED: &str = "Not supported: other values are rejected.";

fn common() -> Vec<Field> {
    let seed =
        json!({"type": "integer", "minimum": *SEED.start() as i64, "maximum": *SEED.end() as u64});
    let top_k = json!({"type": "integer", "minimum": *TOP_K.start() as i64, "maximum": *TOP_K.end() as i64});
    let stop = json!({"anyOf": [
        {"type": "string", "minLength": 1, "maxLength": text::STOP_STRING_BYTES_MAX},
        {"type": "array", "maxItems": text::STOP_STRINGS_MAX,
            "items": {"type": "string", "minLength": 1, "maxLength": text::STOP_STRING_BYTES_MAX}},
    ]});
    let stream_options = json!({"type": "object", "properties": {
        "include_usage": {"type": ["boolean", "null"], "description": "Send the usage in a last chunk."},
        "continuous_usage_stats": {"type": ["boolean", "null"],
            "description": "Send the usage so far in every chunk."},
    }});
    let response_format = json!({"anyOf": [
        {"type": "object", "required": ["type"],
            "properties": {"type": {"enum": ["text", "json_object"]}}},
        {"type": "object", "required": ["type", "json_schema"], "properties": {
            "type": {"const": "json_schema"},
            "json_schema": {"type": "object", "required": ["schema"],
                "properties": {"schema": schema()}},
        }},
    ]});
    let schema_or_text = || json!({"anyOf": [schema(), {"type": "string"}]});
    let structured_outputs = json!({"type": "object", "additionalProperties": false, "properties": {
        "json": nullable(schema_or_text()),
        "regex": nullable(regex()),
        "json_object": nullable(boolean()),
    }});
    let stop_token_ids =
        json!({"type": "array", "maxItems": STOP_TOKENS_MAX, "items": count(0..=u32::MAX)});
    let salt = json!({"type": "string", "maxLength": CACHE_SALT_BYTES_MAX});
    let mut fields = vec![
        (
            "model",
            string(),
            "Name or alias of a model; without the field the default model answers.",
        ),
        ("n", count(CHOICES), "Answers to the prompt."),
        ("best_of", count(CHOICES), "Allowed: `n`."),
        ("stream", boolean(), "Stream the answer as server-sent events."),
        ("stream_options", stream_options, "Only with `stream`."),
        ("return_token_ids", boolean(), "Return the token ids of prompt and answer."),
        ("min_tokens", count(0..=*TOKENS.end()), "Minimum number of generated tokens."),
        ("temperature", number(TEMPERATURE), "0 means greedy decoding; the default is 1."),
        ("top_p", number(TOP_P), "1 keeps every token."),
        ("top_k", top_k, "0 and -1 keep all tokens."),
        ("min_p", number(MIN_P), "0 keeps every token."),
        ("seed", seed, "Requests with equal seeds sample equally."),
        ("repetition_penalty", number(REPETITION_PENALTY), "1 has no effect."),
        ("presence_penalty", number(PENALTY), "0 changes nothing."),
        ("frequency_penalty", number(PENALTY), "0 changes nothing."),
        ("stop", stop, "Texts that end the answer."),
        ("include_stop_str_in_output", boolean(), "Include the stop text in the answer."),
        (
            "skip_special_tokens",
            boolean(),
            "Omit special tokens from the text; the default is true.",
        ),
        ("stop_token_ids", stop_token_ids, "Tokens that end the answer."),
        ("ignore_eos", boolean(), "Continue after the model's end tokens."),
        ("cache_salt", salt, "Only prompts with the same salt share cached KV."),
        ("response_format", response_format, "Format of the whole answer."),
        ("regex", regex(), "Regular expression that the whole answer matches."),
        ("guided_regex", regex(), "As `regex`."),
        ("guided_json", schema_or_text(), "Same as `response_format` with a schema."),
        ("structured_outputs", structured_outputs, "One of these."),
    ];
    let empty_list = || off(&[json!([])]);
    let empty = || off(&[json!({})]);
    let only_false = || off(&[json!(false)]);
    fields.extend([
        ("logit_bias", empty(), NOT_SUPPORTED),
        ("bad_words", empty_list(), NOT_SUPPORTED),
        ("allowed_token_ids", empty_list(), NOT_SUPPORTED),
        ("use_beam_search", only_false(), NOT_SUPPORTED),
        ("length_penalty", off(&[json!(1)]), NOT_SUPPORTED),
        ("prompt_logprobs", off(&[]), NOT_SUPPORTED),
        ("logprob_token_ids", empty_list(), NOT_SUPPORTED),
        ("truncate_prompt_tokens", off(&[]), NOT_SUPPORTED),
        ("guided_choice", empty_list(), NOT_SUPPORTED),
        ("guided_grammar", off(&[]), NOT_SUPPORTED),
        ("return_tokens_as_token_ids", only_false(), NOT_SUPPORTED),
        ("prompt_embeds", off(&[]), NOT_SUPPORTED),
        ("echo", only_false(), NOT_SUPPORTED),
        ("thinking_token_budget", off(&[json!(-1)]), NOT_SUPPORTED),
    ]);
    fields
}

/// Fields for rendering a conversation into a prompt.
fn conversation() -> Vec<Field> {
    let tools = json!({"type": "array", "maxItems": TOOLS_MAX, "items": super::reference("Tool")});
    let messages = json!({"type": "array", "minItems": 1, "items": super::reference("Message")});
    vec![
        ("messages", messages, "The conversation."),
        (
            "add_generation_prompt",
            boolean(),
            "End the prompt with the beginning of the assistant's answer; true unless the final \
             message is continued.",
        ),
        ("continue_final_message", boolean(), "The answer continues the last message."),
        (
            "chat_template_kwargs",
            json!({"type": "object"}),
            "Further variables for the chat template.",
        ),
        (
            "tools",
            tools,
            "Functions that the model may call. Rejected if the model's chat template does not \
             show tools.",
        ),
        (
            "tool_choice",
            tool_choice(),
            "Whether the model may call functions; the default is auto. With `required` the answer consists of \
             calls only, whose arguments match their schemas. A named function yields one call, and \
             `finish_reason` is `stop`.",
        ),
        (
            "parallel_tool_calls",
            boolean(),
            "With false the answer ends after its first call; the default is true.",
        ),
    ]
}

fn chat() -> Vec<Field> {
    let mut fields = conversation();
    fields.extend([
        (
            "max_completion_tokens",
            count(TOKENS),
            "Maximum number of generated tokens; the default is the rest of the model's context.",
        ),
        ("max_tokens", count(TOKENS), "Older name of `max_completion_tokens`."),
        ("logprobs", boolean(), "Show log-probabilities."),
        ("top_logprobs", count(LOGPROBS), "Number of top tokens; only with `logprobs`."),
        ("add_special_tokens", off(&[json!(false)]), "The chat template adds special tokens."),
        ("functions", off(&[json!([])]), NOT_SUPPORTED),
        ("audio", off(&[]), NOT_SUPPORTED),
        ("chat_template", off(&[]), NOT_SUPPORTED),
        ("documents", off(&[json!([])]), NOT_SUPPORTED),
        ("modalities", off(&[json!(["text"])]), NOT_SUPPORTED),
    ]);
    fields
}

fn completion() -> Vec<Field> {
    let prompt = json!({"anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        {"type": "array", "minItems": 1, "items": count(0..=u32::MAX)},
        {"type": "array", "minItems": 1, "items": token_ids()},
    ]});
    vec![
        ("prompt", prompt, "A text or token ids, or a list of either."),
        ("max_tokens", count(TOKENS), "Maximum number of generated tokens; the default is 16."),
        ("logprobs", count(LOGPROBS), "Return log-probabilities of this number of top tokens."),
        (
            "add_special_tokens",
            boolean(),
            "Add the model's special tokens around the prompt; the default is true.",
        ),
        ("suffix", off(&[json!("")]), NOT_SUPPORTED),
    ]
}

fn tokenize() -> Vec<Field> {
    let mut fields = vec![
        (
            "model",
            string(),
            "Name or alias of a model; without the field the default model answers.",
        ),
        ("prompt", string(), "A text."),
        ("return_token_strs", boolean(), "Show each token's text."),
        (
            "add_special_tokens",
            boolean(),
            "Add the model's special tokens; the default is true. Chat templates add their own: \
             only false beside messages.",
        ),
    ];
    fields.extend(conversation());
    fields
}

fn detokenize() -> Vec<Field> {
    vec![
        (
            "model",
            string(),
            "Name or alias of a model; without the field the default model answers.",
        ),
        ("tokens", token_ids(), "Token ids."),
    ]
}

fn tool() -> Value {
    let function = json!({
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": NAME_BYTES_MAX},
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
            "strict": {"type": ["boolean", "null"],
                "description": "With true a call's arguments match their schema, also where the model \
                                decides whether it calls."},
        },
    });
    json!({
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": function},
    })
}

fn tool_choice() -> Value {
    let function = json!({"type": "object", "required": ["name"],
        "properties": {"name": {"type": "string"}}});
    json!({"anyOf": [
        {"enum": ["auto", "none", "required"]},
        {"type": "object", "required": ["type", "function"],
            "properties": {"type": {"const": "function"}, "function": function}},
    ]})
}

fn message() -> Value {
    let part = json!({"anyOf": [
        {"type": "string"},
        {"type": "object", "required": ["text"],
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}}},
    ]});
    json!({
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function", "ipython"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": part}, {"type": "null"}]},
            "name": {"description": "Name for chat templates that use it."},
        },
        "description": "Further fields are passed to the chat template.",
    })
}
