//! The bodies of answers.

use serde_json::{Map, Value, json};

use super::reference;

pub fn schemas() -> impl Iterator<Item = (String, Value)> {
    let all = [
        ("Error", error()),
        ("ChatCompletion", completion("chat.completion", "ChatChoice", &["usage"])),
        ("ChatCompletionChunk", completion("chat.completion.chunk", "ChatChunkChoice", &[])),
        ("Completion", completion("text_completion", "TextChoice", &["usage"])),
        ("CompletionChunk", completion("text_completion", "TextChoice", &[])),
        ("ChatChoice", chat_choice()),
        ("ChatChunkChoice", chat_chunk_choice()),
        ("TextChoice", text_choice()),
        ("ChatLogprobs", chat_logprobs()),
        ("TextLogprobs", text_logprobs()),
        ("Usage", usage()),
        ("Figures", figures()),
        ("ModelList", model_list()),
        ("Model", model()),
        ("Health", health()),
        ("Tokenized", tokenized()),
        ("Detokenized", closed(json!({"prompt": {"type": "string"}}), &["prompt"])),
    ];
    all.into_iter().map(|(name, schema)| (name.to_owned(), schema))
}

/// An object with these properties and no others.
fn closed(properties: Value, required: &[&str]) -> Value {
    json!({"type": "object", "additionalProperties": false, "required": required,
        "properties": properties})
}

/// The same where all properties are always there.
fn complete(properties: Value) -> Value {
    let names: Vec<String> =
        properties.as_object().unwrap_or(&Map::new()).keys().cloned().collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    closed(properties, &names)
}

fn or_null(mut schema: Value) -> Value {
    match &schema["type"] {
        Value::String(kind) => {
            schema["type"] = json!([kind, "null"]);
            schema
        }
        _ => json!({"anyOf": [schema, {"type": "null"}]}),
    }
}

fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}

fn string() -> Value {
    json!({"type": "string"})
}

fn list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

fn error() -> Value {
    complete(json!({"error": complete(json!({
        "message": {"type": "string", "minLength": 1},
        "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
        "param": or_null(json!({"type": "string", "description": "The field that is to blame."})),
        "code": or_null(string()),
    }))}))
}

fn completion(object: &str, choice: &str, further: &[&str]) -> Value {
    let base = ["id", "object", "created", "model", "system_fingerprint", "choices"];
    closed(
        json!({
            "id": string(),
            "object": {"const": object},
            "created": count(),
            "model": string(),
            "system_fingerprint": string(),
            "choices": list(reference(choice)),
            "usage": or_null(reference("Usage")),
            "prompt_token_ids": list(count()),
            "baton": reference("Figures"),
        }),
        &[&base, further].concat(),
    )
}

fn finish_reason() -> Value {
    json!({"enum": ["stop", "length"]})
}

fn chat_finish_reason() -> Value {
    json!({"enum": ["stop", "length", "tool_calls"]})
}

fn tool_call() -> Value {
    complete(json!({
        "id": string(),
        "type": {"const": "function"},
        "function": complete(json!({
            "name": string(),
            "arguments": {"type": "string", "contentMediaType": "application/json"},
        })),
    }))
}

/// The beginning of a call, or some more of its arguments.
fn tool_call_delta() -> Value {
    closed(
        json!({
            "index": count(),
            "id": string(),
            "type": {"const": "function"},
            "function": closed(
                json!({"name": string(), "arguments": string()}),
                &["arguments"],
            ),
        }),
        &["index", "function"],
    )
}

fn stop_reason() -> Value {
    json!({"type": ["string", "integer", "null"],
        "description": "The client's own stop text or stop token that ended the answer."})
}

fn chat_choice() -> Value {
    closed(
        json!({
            "index": count(),
            "message": closed(
                json!({
                    "role": {"const": "assistant"},
                    "content": {"type": ["string", "null"],
                        "description": "Null where the answer is calls alone."},
                    "refusal": {"type": "null"},
                    "tool_calls": {"type": "array", "minItems": 1, "items": tool_call()},
                }),
                &["role", "content", "refusal"],
            ),
            "logprobs": or_null(reference("ChatLogprobs")),
            "finish_reason": chat_finish_reason(),
            "stop_reason": stop_reason(),
            "token_ids": list(count()),
        }),
        &["index", "message", "logprobs", "finish_reason", "stop_reason"],
    )
}

fn chat_chunk_choice() -> Value {
    closed(
        json!({
            "index": count(),
            "delta": closed(
                json!({
                    "role": {"const": "assistant"},
                    "content": string(),
                    "tool_calls": {"type": "array", "minItems": 1, "maxItems": 1,
                        "items": tool_call_delta()},
                }),
                &[],
            ),
            "logprobs": or_null(reference("ChatLogprobs")),
            "finish_reason": or_null(chat_finish_reason()),
            "stop_reason": stop_reason(),
            "token_ids": list(count()),
        }),
        &["index", "delta", "logprobs", "finish_reason"],
    )
}

fn text_choice() -> Value {
    closed(
        json!({
            "index": count(),
            "text": string(),
            "logprobs": or_null(reference("TextLogprobs")),
            "finish_reason": or_null(finish_reason()),
            "stop_reason": stop_reason(),
            "prompt_token_ids": list(count()),
            "token_ids": list(count()),
        }),
        &["index", "text", "logprobs", "finish_reason", "stop_reason"],
    )
}

fn logprob() -> Value {
    json!({"type": "number", "maximum": 0, "minimum": -9999})
}

fn chat_logprobs() -> Value {
    let token = || json!({"token": string(), "logprob": logprob(), "bytes": list(count())});
    let mut chosen = token();
    chosen["top_logprobs"] = list(complete(token()));
    complete(json!({"content": list(complete(chosen)), "refusal": {"type": "null"}}))
}

fn text_logprobs() -> Value {
    complete(json!({
        "text_offset": list(count()),
        "token_logprobs": list(logprob()),
        "tokens": list(string()),
        "top_logprobs": list(json!({"type": "object", "additionalProperties": logprob()})),
    }))
}

fn usage() -> Value {
    complete(json!({
        "prompt_tokens": count(),
        "completion_tokens": count(),
        "total_tokens": count(),
        "prompt_tokens_details": complete(json!({"cached_tokens": count()})),
    }))
}

fn figures() -> Value {
    complete(json!({
        "kv_bytes": count(),
        "transfer_us": count(),
        "attempts": count(),
        "prefill_node": or_null(string()),
        "decode_node": or_null(string()),
    }))
}

fn model_list() -> Value {
    complete(json!({"object": {"const": "list"}, "data": list(reference("Model"))}))
}

fn model() -> Value {
    closed(
        json!({
            "id": string(),
            "object": {"const": "model"},
            "created": count(),
            "owned_by": string(),
            "root": {"type": "string", "description": "The model's own name, where `id` is an alias."},
            "max_model_len": {"type": "integer", "minimum": 1,
                "description": "Prompt and answer together; absent while no decode node is known."},
        }),
        &["id", "object", "created", "owned_by", "root"],
    )
}

fn health() -> Value {
    complete(json!({
        "status": {"enum": ["ready", "no decode node", "nodes meet", "stopping"]},
        "degraded": {"type": "boolean",
            "description": "Some model has no prefill or no decode node."},
        "model": {"type": "string", "description": "The default model."},
        "models": list(complete(json!({
            "name": string(),
            "prefill_nodes": count(),
            "decode_nodes": count(),
        }))),
        "prefill_nodes": count(),
        "decode_nodes": count(),
        "requests_in_work": count(),
    }))
}

fn tokenized() -> Value {
    complete(json!({
        "count": count(),
        "max_model_len": or_null(count()),
        "tokens": list(count()),
        "token_strs": or_null(list(string())),
    }))
}
