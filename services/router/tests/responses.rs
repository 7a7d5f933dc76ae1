//! `/v1/responses`: replies whole and streamed, stored responses and their owners.

mod common;

use std::{fs, path::Path, sync::Arc, time::Duration};

use common::{
    Cluster,
    client::{Answer, eventually},
    encode,
    node::{Behaviour, MODEL, ScriptedNode},
    settings,
};
use http::{Method, StatusCode};
use http_body_util::BodyExt;
use proto::v1::Role;
use router::ModelSource;
use serde_json::{Value, json};
use text::{ModelText, ModelTextOptions, SpecialTokens};

const PATH: &str = "/v1/responses";
const ANSWER: &str = "The capital is Paris.";

/// Template with tools, calls, reasoning and results.
const TEMPLATE: &str = r#"{%- if tools %}{{- '<tool_call>' + (tools | tojson) + '\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"#;

/// Template in the style of gpt-oss.
const HARMONY: &str = "{%- for message in messages %}
        {%- if message.thinking %}{{ '<|channel|>analysis<|message|>' + message.thinking }}{%- endif %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endfor %}<|start|>assistant";

const REASONING_TEXT_CALL: &str = "<think>Look it up.</think>I look.<tool_call>{\"name\": \"clock\", \"arguments\": {\"zone\": \"UTC\"}}</tool_call>";

fn request(fields: Value) -> Value {
    let mut body = json!({"input": "What is the capital of France?", "max_output_tokens": 100});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn with_tool(fields: Value) -> Value {
    let mut body = request(json!({"tools": [{"type": "function", "name": "clock",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}]}));
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// Removes what differs between two responses to one request.
fn comparable(response: &Value) -> Value {
    let mut response = response.clone();
    for field in ["id", "created_at", "completed_at", "store"] {
        response[field] = Value::Null;
    }
    for item in response["output"].as_array_mut().unwrap() {
        item["id"] = Value::Null;
        if item["call_id"].is_string() {
            item["call_id"] = Value::Null;
        }
    }
    response
}

fn path_of(response: &Value) -> String {
    format!("{PATH}/{}", response["id"].as_str().unwrap())
}

async fn delete(cluster: &Cluster, path: &str) -> (StatusCode, Value) {
    let response = cluster.client.send(Method::DELETE, path, &[], "").await;
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap())
}

/// Returns the events of a stream. Each has the type that its line `event:` names, and the next
/// sequence number.
async fn events(cluster: &Cluster, mut body: Value) -> Vec<Value> {
    body["stream"] = true.into();
    let mut stream = cluster.client.stream(PATH, &body).await;
    let events: Vec<Value> =
        stream.all().await.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let raw = String::from_utf8(stream.raw).unwrap();
    let names: Vec<&str> = raw.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    assert_eq!(names, kinds(&events));
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number, "{event}");
    }
    events
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

fn prompt_of(cluster: &Cluster, call: usize) -> String {
    let tokens = &cluster.decode[0].calls()[call].attempt.tokens;
    common::model_text().tokenizer().decode(tokens, false)
}

fn assert_unknown(answer: &Answer) {
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert!(answer.message().starts_with("unknown response: resp_"), "{}", answer.message());
}

#[tokio::test]
async fn a_response_is_stored_listed_and_deleted() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let body = request(json!({"instructions": "Be brief.", "metadata": {"a": "b"}}));
    let response = cluster.client.post(PATH, &body).await.json();
    assert_eq!(response["status"], "completed", "{response}");
    assert_eq!((&response["object"], &response["error"]), (&json!("response"), &Value::Null));
    assert_eq!(response["metadata"], json!({"a": "b"}));
    let item = &response["output"][0];
    let part = json!({"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []});
    assert_eq!((&item["type"], &item["content"]), (&json!("message"), &json!([part])));
    let tokens = encode(ANSWER).len() as u64 + 1;
    assert_eq!(response["usage"]["output_tokens"], tokens);
    assert_eq!(response["usage"]["input_tokens_details"]["cached_tokens"], 16);
    assert!(prompt_of(&cluster, 0).contains("system\nBe brief."), "{}", prompt_of(&cluster, 0));

    let path = path_of(&response);
    assert_eq!(cluster.client.get(&path).await.json(), response);
    let items = cluster.client.get(&format!("{path}/input_items")).await.json();
    assert_eq!(items["data"][0]["content"][0]["text"], "What is the capital of France?");
    assert_eq!((&items["has_more"], &items["first_id"]), (&json!(false), &items["data"][0]["id"]));
    let ended = cluster.client.post(&format!("{path}/cancel"), &json!({})).await;
    assert_eq!(ended.status, StatusCode::BAD_REQUEST);
    assert!(ended.message().ends_with("has ended; allowed: a response in progress"));
    let (status, deleted) = delete(&cluster, &path).await;
    assert_eq!((status, &deleted["deleted"]), (StatusCode::OK, &json!(true)));
    assert_unknown(&cluster.client.get(&path).await);
    assert_unknown(
        &cluster.client.post(PATH, &request(json!({"previous_response_id": response["id"]}))).await,
    );
}

/// The tags of gpt-oss are special tokens here, as in its own vocabulary.
#[tokio::test]
async fn log_probabilities_of_a_message_begin_with_its_text() {
    let small = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../integration-tests/pooling/qwen3_embedding/tokenizer.json");
    let mut tokenizer = fs::read_to_string(small).unwrap();
    for (token, tag) in [
        ("<|im_start|>", "<|channel|>"),
        ("<|im_end|>", "<|end|>"),
        ("\"<s>\"", "\"<|message|>\""),
        ("\"</s>\"", "\"<|start|>\""),
    ] {
        tokenizer = tokenizer.replace(token, tag);
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
    let options =
        ModelTextOptions { chat_template: Some(HARMONY.to_owned()), ..Default::default() };
    let text = Arc::new(ModelText::open_with(folder.path(), options).unwrap());
    let model = ModelSource { name: MODEL.to_owned(), text: text.clone() };
    let decode = ScriptedNode::start(Role::Decode, "decode-0");
    let cluster = Cluster::start_sources(settings(), vec![model], vec![], vec![decode]).await;
    let content = "<|channel|>final<|message|>Noon.";
    let thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    for answer in [content.to_owned(), format!("{thought}{content}"), format!("assistant{content}")]
    {
        let answer = text.tokenizer().encode(&answer, SpecialTokens::Parse).unwrap();
        cluster.decode[0].answer_with(&answer);
        let body = request(json!({"include": ["message.output_text.logprobs"],
            "max_output_tokens": answer.len()}));
        let whole = cluster.client.post(PATH, &body).await.json();
        let part = &whole["output"].as_array().unwrap().last().unwrap()["content"][0];
        assert_eq!(part["text"], "Noon.", "{whole}");
        let logprobs = part["logprobs"].as_array().unwrap();
        let tokens: String = logprobs.iter().map(|one| one["token"].as_str().unwrap()).collect();
        assert_eq!(tokens, "Noon.", "{whole}");
    }
}

#[tokio::test]
async fn events_build_the_response_that_is_sent_whole() {
    let cluster = Cluster::start_with_template(TEMPLATE, REASONING_TEXT_CALL).await;
    let include = json!(["reasoning.encrypted_content", "message.output_text.logprobs"]);
    let body = with_tool(json!({"include": include, "top_logprobs": 2}));
    let whole = cluster.client.post(PATH, &body).await.json();
    assert_eq!(whole["output"][0]["content"][0]["text"], "Look it up.", "{whole}");
    assert_eq!(whole["output"][0]["encrypted_content"], "baton-thought:Look it up.");
    assert_eq!(whole["output"][1]["content"][0]["text"], "I look.");
    let logprobs = whole["output"][1]["content"][0]["logprobs"].as_array().unwrap();
    assert!(!logprobs.is_empty() && logprobs[0]["top_logprobs"].as_array().unwrap().len() == 2);
    // The closing mark of the thought is no part of the text.
    let tokens: String = logprobs.iter().map(|one| one["token"].as_str().unwrap()).collect();
    assert!(tokens.starts_with("I look."), "{tokens}");
    assert_eq!(whole["output"][2]["name"], "clock");
    assert_eq!(whole["output"][2]["arguments"], "{\"zone\": \"UTC\"}");
    assert!(whole["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 3);

    let events = events(&cluster, body).await;
    let mut kinds = kinds(&events);
    kinds.dedup();
    let text = |kind: &'static str| {
        ["output_item.added", "content_part.added"]
            .map(|name| format!("response.{name}"))
            .into_iter()
            .chain([format!("response.{kind}.delta"), format!("response.{kind}.done")])
            .chain(["content_part.done", "output_item.done"].map(|name| format!("response.{name}")))
    };
    let call = ["output_item.added", "function_call_arguments.delta"]
        .into_iter()
        .chain(["function_call_arguments.done", "output_item.done", "completed"])
        .map(|name| format!("response.{name}"));
    let begin = ["response.created", "response.in_progress"].map(str::to_owned).into_iter();
    let expected: Vec<String> =
        begin.chain(text("reasoning_text")).chain(text("output_text")).chain(call).collect();
    assert_eq!(kinds, expected);
    let response = &events.last().unwrap()["response"];
    assert_eq!(comparable(response), comparable(&whole));
    let deltas = |kind: &str| -> String {
        let deltas = events.iter().filter(|event| event["type"] == kind);
        deltas.map(|event| event["delta"].as_str().unwrap()).collect()
    };
    assert_eq!(deltas("response.output_text.delta"), "I look.");
    assert_eq!(deltas("response.reasoning_text.delta"), "Look it up.");
    let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
    let done: Vec<Value> = done.map(|event| event["item"].clone()).collect();
    assert_eq!(json!(done), response["output"]);
    assert_eq!(cluster.client.get(&path_of(response)).await.json(), *response);
}

#[tokio::test]
async fn reasoning_after_content_is_an_item_of_its_own() {
    let messages =
        [("analysis", "One."), ("commentary", "Wait."), ("analysis", "Two."), ("final", "Hi.")];
    let answer = messages
        .map(|(channel, text)| format!("<|channel|>{channel}<|message|>{text}"))
        .join("<|end|><|start|>assistant");
    let cluster = Cluster::start_with_template(HARMONY, &answer).await;
    let body = request(json!({"max_output_tokens": 500}));
    let whole = cluster.client.post(PATH, &body).await.json();
    let items = whole["output"].as_array().unwrap().iter();
    let items: Vec<Value> =
        items.map(|item| json!([item["type"], item["content"][0]["text"]])).collect();
    let expected = json!([
        ["reasoning", "One."],
        ["message", "Wait."],
        ["reasoning", "\nTwo."],
        ["message", "\nHi."],
    ]);
    assert_eq!(json!(items), expected, "{whole}");
    let events = events(&cluster, body).await;
    assert_eq!(comparable(&events.last().unwrap()["response"]), comparable(&whole));
}

#[tokio::test]
async fn a_request_continues_the_previous_response() {
    let cluster = Cluster::start_with_template(TEMPLATE, REASONING_TEXT_CALL).await;
    let first = cluster.client.post(PATH, &with_tool(json!({"instructions": "A."}))).await.json();
    cluster.decode[0].answer_with(&encode("It is noon."));
    let output = json!([{"type": "function_call_output", "call_id": first["output"][2]["call_id"],
        "output": "12:00"}]);
    let body = with_tool(json!({"input": output, "previous_response_id": first["id"]}));
    let second = cluster.client.post(PATH, &body).await.json();
    assert_eq!(second["previous_response_id"], first["id"], "{second}");
    let prompt = prompt_of(&cluster, 1);
    // The instructions of the first request do not apply to the second.
    let expected = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n\
        <|im_start|>assistant\n<think>Look it up.</think>I look.\
        <tool_call>{\"name\": \"clock\", \"arguments\": {\"zone\": \"UTC\"}}</tool_call><|im_end|>\n\
        <|im_start|>tool\n12:00<|im_end|>\n<|im_start|>assistant\n";
    assert!(prompt.ends_with(expected) && !prompt.contains("system"), "{prompt}");

    // The first response is not needed any more.
    assert_eq!(delete(&cluster, &path_of(&first)).await.0, StatusCode::OK);
    let body = request(json!({"input": "And now?", "previous_response_id": second["id"]}));
    assert_eq!(cluster.client.post(PATH, &body).await.json()["status"], "completed");
    let prompt = prompt_of(&cluster, 2);
    assert!(prompt.contains("tool\n12:00") && prompt.contains("It is noon."), "{prompt}");
    let items = |query: &str| format!("{}/input_items?{query}", path_of(&second));
    let page = cluster.client.get(&items("order=asc&limit=2")).await.json();
    assert_eq!((&page["has_more"], page["data"].as_array().unwrap().len()), (&json!(true), 2));
    let after = page["last_id"].as_str().unwrap();
    let rest = cluster.client.get(&items(&format!("order=asc&after={after}"))).await.json();
    let kinds: Vec<&str> = rest["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["message", "function_call", "function_call_output"]);
    let invalid = cluster.client.get(&items("limit=0")).await;
    assert_eq!(invalid.message(), "limit is 0; allowed: a whole number from 1 to 100");
}

#[tokio::test]
async fn a_cut_answer_is_incomplete() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let body = request(json!({"max_output_tokens": 2}));
    let response = cluster.client.post(PATH, &body).await.json();
    assert_eq!(response["status"], "incomplete", "{response}");
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(response["output"][0]["status"], "incomplete");
    let events = events(&cluster, body).await;
    assert_eq!(kinds(&events).last(), Some(&"response.incomplete"));
}

#[tokio::test]
async fn a_failed_stream_ends_with_its_error() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let mut body = request(json!({}));
    cluster.decode[0].behave(Behaviour::HangAfter(2));
    body["stream"] = true.into();
    let headers = [("x-baton-deadline-ms", "500")];
    let mut stream = cluster.client.stream_with(PATH, &headers, &body).await;
    let last = stream.all().await.pop().unwrap();
    let last: Value = serde_json::from_str(&last).unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["error"]["code"], "deadline_exceeded", "{last}");
    assert_eq!(cluster.client.get(&path_of(&last["response"])).await.json()["status"], "failed");
}

#[tokio::test]
async fn only_the_requests_that_ask_for_it_store() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let response = cluster.client.post(PATH, &request(json!({"store": false}))).await.json();
    assert_eq!(response["store"], false);
    assert_unknown(&cluster.client.get(&path_of(&response)).await);
    // A request that was refused left nothing.
    let refused = cluster.client.post(PATH, &request(json!({"temperature": 9}))).await;
    assert_eq!(refused.message(), "temperature is 9; allowed: a number from 0 to 2");

    let mut off = settings();
    off.router.responses_bytes_max = config::ByteSize::mib(0);
    let cluster = Cluster::start_with(off, 0, 1, ANSWER).await;
    let response = cluster.client.post(PATH, &request(json!({"store": true}))).await.json();
    assert_eq!((&response["store"], &response["status"]), (&json!(false), &json!("completed")));
    assert_unknown(&cluster.client.get(&path_of(&response)).await);
}

#[tokio::test]
async fn a_response_of_another_tenant_is_as_unknown_as_any() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let of = |tenant: &'static str| [("x-baton-tenant", tenant)];
    let client = &cluster.client;
    let response = client.post_with(PATH, &of("a"), &request(json!({}))).await.json();
    let path = path_of(&response);
    assert_eq!(client.get_with(&path, &of("a")).await.json(), response);
    let body = request(json!({"previous_response_id": response["id"]}));
    let elsewhere = client.get_with(&path, &of("b")).await;
    assert_unknown(&elsewhere);
    assert_unknown(&client.get(&path).await);
    assert_unknown(&client.post_with(PATH, &of("b"), &body).await);
    assert_unknown(&client.post_with(&format!("{path}/cancel"), &of("b"), &json!({})).await);
    let id = response["id"].as_str().unwrap();
    let never = client.get(&format!("{PATH}/resp_0")).await;
    assert_eq!(never.message(), elsewhere.message().replace(id, "resp_0"), "the same words");
}

#[tokio::test]
async fn a_response_in_progress_can_be_cancelled() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::HangAfter(3));
    let body = request(json!({"stream": true}));
    let mut stream = cluster.client.stream(PATH, &body).await;
    let created: Value = serde_json::from_str(&stream.next().await.unwrap()).unwrap();
    let path = path_of(&created["response"]);
    assert_eq!(cluster.client.get(&path).await.json()["status"], "in_progress");
    let body = request(json!({"previous_response_id": created["response"]["id"]}));
    let early = cluster.client.post(PATH, &body).await;
    assert!(early.message().starts_with("previous_response_id is a response in progress"));
    let cancelled = cluster.client.post(&format!("{path}/cancel"), &json!({})).await.json();
    assert_eq!(cancelled["status"], "cancelled");
    let last: Value = serde_json::from_str(&stream.all().await.pop().unwrap()).unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["status"]),
        (&json!("response.failed"), &json!("cancelled"))
    );
    assert_eq!(cluster.client.get(&path).await.json(), last["response"]);
    eventually("the node is free", async || cluster.decode[0].open_streams() == 1).await;
}

#[tokio::test]
async fn a_response_whose_client_disconnects_is_not_stored() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    cluster.decode[0].set_token_time(Duration::from_millis(20));
    cluster.decode[0].behave(Behaviour::HangAfter(3));
    let mut stream = cluster.client.stream(PATH, &request(json!({"stream": true}))).await;
    let created: Value = serde_json::from_str(&stream.next().await.unwrap()).unwrap();
    let path = path_of(&created["response"]);
    assert_eq!(cluster.client.get(&path).await.json()["status"], "in_progress");
    drop(stream);
    eventually("the response is gone", async || {
        cluster.client.get(&path).await.status == StatusCode::NOT_FOUND
    })
    .await;
}

#[tokio::test]
async fn errors_name_the_fields_of_this_api() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    for (body, message) in [
        (json!({}), "input is missing; allowed: a string, or a list of items"),
        (request(json!({"background": true})), "background is not supported; leave it out"),
        (request(json!({"max_output_tokens": 5000})), "max_output_tokens is 5000"),
        (request(json!({"input": "word ".repeat(3000)})), "input has 3"),
    ] {
        let answer = cluster.client.post(PATH, &body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert!(answer.message().starts_with(message), "{}", answer.message());
        let field = message.split(' ').next().unwrap();
        assert_eq!(answer.error()["param"], field);
    }
}
