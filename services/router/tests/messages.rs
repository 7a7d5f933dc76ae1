//! Anthropic's API: messages, their streams and errors, and the count of their tokens.

mod common;

use common::{Cluster, HERMES, TWO_CALLS, client::EventStream, encode, node::Behaviour};
use proto::v1::FailureKind;
use serde_json::{Value, json};
use tonic::Code;

const PATH: &str = "/v1/messages";
const COUNT_PATH: &str = "/v1/messages/count_tokens";

fn message(extra: Value) -> Value {
    let mut body = json!({
        "model": "scripted",
        "messages": [{"role": "user", "content": "Weather in Cologne?"}],
        "max_tokens": 200,
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn tools() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tool = |name: &str| json!({"name": name, "description": "d", "input_schema": schema});
    json!([tool("weather"), tool("clock")])
}

/// Returns the types and the data of all events of the stream.
async fn events(mut stream: EventStream) -> Vec<(String, Value)> {
    stream.all().await;
    let text = String::from_utf8(stream.raw).unwrap();
    let event = |block: &str| {
        let (name, data) = block.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name, "{block}");
        (name.to_owned(), data)
    };
    text.split_terminator("\n\n").map(event).collect()
}

/// Puts the content of a streamed answer together, as Anthropic's clients do.
fn content_of(events: &[(String, Value)]) -> Value {
    let (mut blocks, mut inputs) = (Vec::new(), Vec::new());
    for (name, data) in events {
        match name.as_str() {
            "content_block_start" => {
                assert_eq!(data["index"], blocks.len());
                blocks.push(data["content_block"].clone());
                inputs.push(String::new());
            }
            "content_block_delta" => {
                let index = data["index"].as_u64().unwrap() as usize;
                assert_eq!(index, blocks.len() - 1, "only the last block is open");
                let delta = &data["delta"];
                match delta["type"].as_str().unwrap() {
                    "input_json_delta" => {
                        inputs[index].push_str(delta["partial_json"].as_str().unwrap());
                    }
                    kind => {
                        let field = kind.strip_suffix("_delta").unwrap();
                        let text = blocks[index][field].as_str().unwrap().to_owned();
                        blocks[index][field] = (text + delta[field].as_str().unwrap()).into();
                    }
                }
            }
            "content_block_stop"
                if !inputs[data["index"].as_u64().unwrap() as usize].is_empty() =>
            {
                let index = data["index"].as_u64().unwrap() as usize;
                blocks[index]["input"] = serde_json::from_str(&inputs[index]).unwrap();
            }
            _ => {}
        }
    }
    blocks.into()
}

#[tokio::test]
async fn messages_are_answered_whole_and_streamed() {
    let cluster = Cluster::start(1, 1, " It rains.").await;
    let tokens = encode(" It rains.").len() + 1;
    let whole = cluster.client.post(PATH, &message(json!({}))).await;
    let id = whole.headers["request-id"].clone();
    assert_eq!(id, whole.headers["x-request-id"]);
    let whole = whole.json();
    // Scripted nodes find the first block in their cache.
    let cached = whole["usage"]["cache_read_input_tokens"].as_u64().unwrap();
    let prompt_tokens = whole["usage"]["input_tokens"].as_u64().unwrap() + cached;
    assert_eq!(whole["id"], format!("msg_{}", id.to_str().unwrap()));
    let usage = json!({"input_tokens": prompt_tokens - 16, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16, "output_tokens": tokens});
    let expected = json!({
        "id": whole["id"], "type": "message", "role": "assistant", "model": "scripted",
        "content": [{"type": "text", "text": " It rains."}],
        "stop_reason": "end_turn", "stop_sequence": null, "usage": usage,
    });
    assert_eq!(whole, expected);
    let counted = cluster.client.post(COUNT_PATH, &message(json!({}))).await.json();
    assert_eq!(counted, json!({"input_tokens": prompt_tokens}));

    let body = message(json!({"stream": true}));
    let headers = [("anthropic-version", "2026-10-21"), ("anthropic-beta", "any")];
    let stream = cluster.client.stream_with(PATH, &headers, &body).await;
    assert_eq!(stream.headers["content-type"], "text/event-stream");
    let events = events(stream).await;
    assert_eq!(events[0].1["message"]["usage"]["input_tokens"], prompt_tokens);
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    let expected = [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(names, expected);
    let start = &events[0].1["message"];
    assert_eq!((&start["content"], &start["stop_reason"]), (&json!([]), &Value::Null));
    assert_eq!(content_of(&events), json!([{"type": "text", "text": " It rains."}]));
    let end = &events[events.len() - 2].1;
    assert_eq!(end["delta"], json!({"stop_reason": "end_turn", "stop_sequence": null}));
    assert_eq!(end["usage"], usage);
}

#[tokio::test]
async fn conversation_with_tools_reaches_the_template_and_calls_become_blocks() {
    let cluster = Cluster::start_with_template(HERMES, TWO_CALLS).await;
    let body = message(json!({
        "system": "Be brief.", "tools": tools(),
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Bonn"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
                {"type": "text", "text": "And Cologne?"},
            ]},
        ],
    }));
    let whole = cluster.client.post(PATH, &body).await.json();
    let call = |index: usize, name: &str, input: Value| {
        let id = &whole["content"][index]["id"];
        assert!(id.as_str().unwrap().starts_with("call_"), "{whole}");
        json!({"type": "tool_use", "id": id, "name": name, "input": input})
    };
    let expected = json!([
        {"type": "text", "text": "I look."},
        call(1, "weather", json!({"city": "Köln"})),
        call(2, "clock", json!({})),
    ]);
    assert_eq!((&whole["content"], &whole["stop_reason"]), (&expected, &json!("tool_use")));
    let prompt = &cluster.decode[0].calls()[0].attempt.tokens;
    let text = common::model_text().tokenizer().decode(prompt, false);
    let end = "To call: <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call><|im_end|>\n\
        <|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n\
        <|im_start|>assistant\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \
        \"Bonn\"}}\n</tool_call><|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n\
        <|im_start|>user\nAnd Cologne?<|im_end|>\n<|im_start|>assistant\n";
    assert!(text.ends_with(end), "{text}");

    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = events(cluster.client.stream(PATH, &streamed).await).await;
    let content = content_of(&events);
    for (index, block) in expected.as_array().unwrap().iter().enumerate() {
        for field in ["type", "text", "name", "input"] {
            assert_eq!(content[index].get(field), block.get(field));
        }
    }
    assert_eq!(events[events.len() - 2].1["delta"]["stop_reason"], "tool_use");
    let single = json!({"type": "auto", "disable_parallel_tool_use": true});
    let body = message(json!({"tools": tools(), "tool_choice": single}));
    let one = cluster.client.post(PATH, &body).await.json();
    assert_eq!(one["content"].as_array().unwrap().len(), 2, "{one}");
    assert_eq!(one["stop_reason"], "tool_use");
}

#[tokio::test]
async fn answer_ends_at_a_stop_sequence_a_limit_or_the_end_of_the_context() {
    let cluster = Cluster::start(1, 1, " one two three four").await;
    for (extra, text, reason, sequence) in [
        (json!({"stop_sequences": [" three"]}), " one two", "stop_sequence", json!(" three")),
        (json!({"max_tokens": 2}), " one two", "max_tokens", Value::Null),
        // More than the rest of the context is no error.
        (json!({"max_tokens": 1_000_000}), " one two three four", "end_turn", Value::Null),
    ] {
        let whole = cluster.client.post(PATH, &message(extra)).await.json();
        assert_eq!(whole["content"], json!([{"type": "text", "text": text}]), "{whole}");
        assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!(reason), &sequence));
    }
    let endless = message(json!({"max_tokens": 1_000_000, "ignore_eos": true}));
    let whole = cluster.client.post(PATH, &endless).await.json();
    assert_eq!(whole["stop_reason"], "model_context_window_exceeded");
}

#[tokio::test]
async fn answer_continues_a_last_message_of_the_assistant() {
    let cluster = Cluster::start_with_template(HERMES, " rains.").await;
    let messages = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [{"type": "text", "text": "It"}]},
    ]);
    let whole = cluster.client.post(PATH, &message(json!({"messages": messages}))).await.json();
    assert_eq!(whole["content"][0]["text"], " rains.", "{whole}");
    let prompt = &cluster.decode[0].calls()[0].attempt.tokens;
    let text = common::model_text().tokenizer().decode(prompt, false);
    assert_eq!(text, "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\nIt");
}

#[tokio::test]
async fn errors_have_the_format_of_the_api() {
    let cluster = Cluster::start(1, 1, " one").await;
    let client = &cluster.client;
    let old = [("anthropic-version", "2023-01-01")];
    let plain = [("content-type", "text/plain")];
    for (answer, status, kind, words) in [
        (
            client.post(PATH, &message(json!({"max_tokens": null}))).await,
            400,
            "invalid_request_error",
            "max_tokens is missing; allowed: ",
        ),
        (
            client.post(PATH, &message(json!({"model": "claude"}))).await,
            404,
            "not_found_error",
            "claude",
        ),
        (
            client.post_with(PATH, &old, &message(json!({}))).await,
            400,
            "invalid_request_error",
            "anthropic-version is 2023-01-01; allowed: 2023-06-01 or 2026-10-21",
        ),
        (
            client.post_with(COUNT_PATH, &old, &message(json!({}))).await,
            400,
            "invalid_request_error",
            "anthropic-version is 2023-01-01; allowed: 2023-06-01 or 2026-10-21",
        ),
        (
            client.post(COUNT_PATH, &json!({"messages": []})).await,
            400,
            "invalid_request_error",
            "messages has no message of the user or the assistant",
        ),
        (
            client.post_with(PATH, &plain, &message(json!({}))).await,
            415,
            "invalid_request_error",
            "the header content-type is \"text/plain\"",
        ),
        (client.get(PATH).await, 405, "invalid_request_error", "GET is not allowed here"),
        (
            client.post("/v1/messages/batches", &json!({})).await,
            404,
            "not_found_error",
            "unknown path",
        ),
    ] {
        assert_eq!(answer.status, status, "{words}");
        let body = answer.json();
        assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)));
        assert_eq!(body["request_id"], answer.headers["request-id"].to_str().unwrap());
        assert!(answer.message().contains(words), "{body}");
    }
    let other = client.get("/v1/chat/completions").await;
    assert_eq!((other.headers.get("request-id"), &other.json()["type"]), (None, &Value::Null));
}

#[tokio::test]
async fn failed_stream_ends_with_an_error_event() {
    let cluster = Cluster::start(0, 1, " one two three").await;
    let fails = Behaviour::FailAfter(2, FailureKind::Internal);
    cluster.decode[0].behave_in_turn(vec![fails, Behaviour::Refuse(Code::Internal, "a bug")]);
    let events = events(cluster.client.stream(PATH, &message(json!({"stream": true}))).await).await;
    let (name, data) = events.last().unwrap();
    assert_eq!((name.as_str(), &data["error"]["type"]), ("error", &json!("api_error")), "{data}");
    assert!(events.iter().all(|(name, _)| name != "message_stop"));
}

#[tokio::test]
async fn thinking_has_a_block_of_its_own_with_a_signature() {
    let template =
        format!("{HERMES}{{{{- '<think>' if enable_thinking else '' }}}}{{# </think> #}}");
    let cluster = Cluster::start_with_template(&template, "I look.\n</think>\n\nIt rains.").await;
    let thinking = |fields: Value| {
        let mut thinking = json!({"type": "adaptive"});
        thinking.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        message(json!({"thinking": thinking}))
    };
    let whole = cluster.client.post(PATH, &thinking(json!({}))).await.json();
    let signature = whole["content"][0]["signature"].clone();
    assert_eq!(signature.as_str().unwrap().len(), 32, "{whole}");
    let block =
        |thinking: &str| json!({"type": "thinking", "thinking": thinking, "signature": signature});
    let text = |content: &Value| content[1]["text"].as_str().unwrap().trim_start().to_owned();
    assert_eq!(
        (&whole["content"][0], text(&whole["content"])),
        (&block("I look."), "It rains.".into())
    );
    assert!(whole["usage"]["output_tokens_details"]["thinking_tokens"].as_u64().unwrap() > 2);

    let hidden = thinking(json!({"display": "omitted"}));
    let hidden = cluster.client.post(PATH, &hidden).await.json();
    assert_eq!(hidden["content"][0], block(""));

    let mut streamed = thinking(json!({}));
    streamed["stream"] = true.into();
    let events = events(cluster.client.stream(PATH, &streamed).await).await;
    let content = content_of(&events);
    assert_eq!((&content[0], text(&content)), (&block("I look."), "It rains.".into()));

    // The thinking goes back with the next request; a template without a field for it drops it.
    let mut next = message(json!({}));
    let answer = json!({"role": "assistant", "content": whole["content"]});
    let question = next["messages"][0].clone();
    next["messages"].as_array_mut().unwrap().extend([answer, question]);
    assert_eq!(cluster.client.post(PATH, &next).await.status, 200);
}
