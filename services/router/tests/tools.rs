//! Tools: rendering into the model's template, and tool calls in responses.

mod common;

use common::{
    Cluster, HERMES, TWO_CALLS,
    client::{ids_of, text_of},
    encode,
    node::END,
};
use serde_json::{Value, json};
use text::SpecialTokens;

/// Template in the style of Llama: tools in the user's message, a bare object as the call.
const LLAMA: &str = r#"{%- for message in messages %}
    {%- if tools and loop.first %}
        {{- 'Respond with {"name": function name, "parameters": dictionary}. <|python_tag|>\n' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}"#;

const PATH: &str = "/v1/chat/completions";

fn chat(extra: Value) -> Value {
    let tool = |name: &str| {
        json!({"type": "function", "function": {
            "name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        }})
    };
    let mut body = json!({
        "messages": [{"role": "user", "content": "Weather in Cologne?"}],
        "tools": [tool("weather"), tool("clock")],
        "max_tokens": 200,
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn call(id: &Value, name: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// Joins the tool-call deltas of a choice as OpenAI's clients do. Each call starts with its id and
/// name.
fn calls_of(chunks: &[Value], choice: u64) -> Value {
    let mut calls: Vec<Value> = Vec::new();
    let parts = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    for delta in parts.filter(|part| part["index"] == choice).map(|part| &part["delta"]) {
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = part["index"].as_u64().unwrap() as usize;
            if index == calls.len() {
                assert!(part["id"].is_string() && part["type"] == "function", "{part}");
                calls.push(call(&part["id"], part["function"]["name"].as_str().unwrap(), ""));
            }
            let arguments = &mut calls[index]["function"]["arguments"];
            let more = part["function"]["arguments"].as_str().unwrap();
            *arguments = (arguments.as_str().unwrap().to_owned() + more).into();
        }
    }
    calls.into()
}

fn finish_reasons(chunks: &[Value]) -> Vec<&str> {
    let parts = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    parts.filter_map(|part| part["finish_reason"].as_str()).collect()
}

#[tokio::test]
async fn tool_calls_are_separated_from_content_streamed_and_not() {
    let cluster = Cluster::start_with_template(HERMES, TWO_CALLS).await;
    let expected = |calls: &Value| {
        let ids = [&calls[0]["id"], &calls[1]["id"]];
        assert!(ids.iter().all(|id| id.as_str().unwrap().starts_with("call_")), "{ids:?}");
        assert_ne!(ids[0], ids[1]);
        json!([call(ids[0], "weather", "{\"city\": \"Köln\"}"), call(ids[1], "clock", "{}")])
    };
    let whole = cluster.client.post(PATH, &chat(json!({}))).await.json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
    assert_eq!(choice["message"]["content"], "I look.");
    let calls = &choice["message"]["tool_calls"];
    assert_eq!(*calls, expected(calls));
    assert_eq!(whole["usage"]["completion_tokens"], encode(TWO_CALLS).len() + 1);

    let body = chat(json!({"stream": true, "n": 2, "return_token_ids": true, "logprobs": true}));
    let chunks = cluster.client.stream(PATH, &body).await.chunks().await;
    for choice in 0..2 {
        assert_eq!(text_of(&chunks, choice), "I look.");
        let calls = calls_of(&chunks, choice);
        assert_eq!(calls, expected(&calls));
        // Each token is reported once, also tokens that became calls.
        let tokens: Vec<u32> = encode(TWO_CALLS).into_iter().chain([END]).collect();
        assert_eq!(ids_of(&chunks, choice), tokens);
    }
    assert_eq!(finish_reasons(&chunks), ["tool_calls"; 2]);
}

#[tokio::test]
async fn tools_calls_and_their_results_reach_the_template() {
    let cluster = Cluster::start_with_template(HERMES, "It rains.").await;
    let earlier = call(&json!("call_1"), "weather", "{\"city\": \"Köln\"}");
    let body = chat(json!({"messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]}));
    let answer = cluster.client.post(PATH, &body).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "It rains.", "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["choices"][0]["message"].get("tool_calls"), None);
    let prompt = &cluster.decode[0].calls()[0].attempt.tokens;
    let tool = |name: &str| {
        format!(
            "{{\"type\": \"function\", \"function\": {{\"name\": \"{name}\", \"parameters\": \
             {{\"type\": \"object\", \"properties\": {{\"city\": {{\"type\": \"string\"}}}}}}}}}}"
        )
    };
    let expected = format!(
        "<|im_start|>system\n<tools>\n{}\n{}\n</tools>\n\
         To call: <tool_call>{{\"name\": ..., \"arguments\": ...}}</tool_call><|im_end|>\n\
         <|im_start|>user\nWeather?<|im_end|>\n\
         <|im_start|>assistant\n\n<tool_call>\n\
         {{\"name\": \"weather\", \"arguments\": {{\"city\": \"Köln\"}}}}\n</tool_call><|im_end|>\n\
         <|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n",
        tool("weather"),
        tool("clock"),
    );
    let model = common::model_text();
    let tokenizer = model.tokenizer();
    assert_eq!(tokenizer.decode(prompt, false), expected);
    assert_eq!(*prompt, tokenizer.encode(&expected, SpecialTokens::Parse).unwrap());

    // `/tokenize` counts the tools as well. Tools are not rendered with `tool_choice` none.
    let tokens = cluster.client.post("/tokenize", &body).await.json();
    assert_eq!(tokens["count"], prompt.len());
    let body = chat(json!({"tool_choice": "none"}));
    assert_eq!(cluster.client.post(PATH, &body).await.status, 200);
    let prompt = &cluster.decode[0].calls()[1].attempt.tokens;
    let expected = "<|im_start|>user\nWeather in Cologne?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(tokenizer.decode(prompt, false), expected);
}

#[tokio::test]
async fn malformed_tool_calls_are_rejected_as_the_clients_error() {
    let cluster = Cluster::start_with_template(HERMES, "It rains.").await;
    let function = |function: Value| json!({"id": "1", "type": "function", "function": function});
    for (call, status) in [
        (json!("x"), 400_u16),
        (function(json!("f")), 400),
        (function(json!({"name": 1, "arguments": "{}"})), 400),
        (function(json!({"name": "f", "arguments": "[1]"})), 400),
        // Missing arguments are empty.
        (function(json!({"name": "f"})), 200),
    ] {
        let body = chat(json!({"messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
        ]}));
        let answer = cluster.client.post(PATH, &body).await;
        assert_eq!(answer.status.as_u16(), status, "{answer:?}");
        if status == 400 {
            assert_eq!(answer.error()["param"], "messages", "{answer:?}");
            assert!(answer.message().contains("messages[1].tool_calls[0]"), "{answer:?}");
        }
    }
}

/// Returns text and finish reason of an answer without calls, streamed or not.
async fn text_answer(cluster: &Cluster, mut body: Value, stream: bool) -> (String, String) {
    body["stream"] = stream.into();
    if stream {
        let chunks = cluster.client.stream(PATH, &body).await.chunks().await;
        assert_eq!(calls_of(&chunks, 0), json!([]));
        return (text_of(&chunks, 0), finish_reasons(&chunks)[0].to_owned());
    }
    let answer = cluster.client.post(PATH, &body).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"].get("tool_calls"), None);
    let text = choice["message"]["content"].as_str().unwrap().to_owned();
    (text, choice["finish_reason"].as_str().unwrap().to_owned())
}

/// Returns content, calls and finish reason of an answer.
async fn parts_of(cluster: &Cluster, mut body: Value, stream: bool) -> (String, Value, String) {
    if stream {
        body["stream"] = true.into();
        let chunks = cluster.client.stream(PATH, &body).await.chunks().await;
        let [reason] = finish_reasons(&chunks)[..] else { panic!("{chunks:?}") };
        return (text_of(&chunks, 0), calls_of(&chunks, 0), reason.to_owned());
    }
    let answer = cluster.client.post(PATH, &body).await.json();
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    let content = message["content"].as_str().unwrap_or_default().to_owned();
    let calls = message.get("tool_calls").cloned().unwrap_or_else(|| json!([]));
    (content, calls, choice["finish_reason"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn legacy_function_call_reaches_the_template_as_a_tool_call() {
    let cluster = Cluster::start_with_template(HERMES, "It rains.").await;
    let function = json!({"name": "weather", "arguments": "{\"city\": \"Köln\"}"});
    let answered = |assistant: Value| {
        chat(json!({"tools": null, "messages": [
            {"role": "user", "content": "Weather?"},
            assistant,
            {"role": "function", "name": "weather", "content": "rain"},
        ]}))
    };
    let legacy = json!({"role": "assistant", "content": null, "function_call": function});
    let call = json!({"type": "function", "function": function});
    let current = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    for body in [answered(legacy), answered(current)] {
        assert_eq!(cluster.client.post(PATH, &body).await.status, 200);
    }
    let calls = cluster.decode[0].calls();
    assert_eq!(calls[0].attempt.tokens, calls[1].attempt.tokens);
    let prompt = common::model_text().tokenizer().decode(&calls[0].attempt.tokens, false);
    assert!(prompt.contains("<tool_call>\n{\"name\": \"weather\", \"arguments\": "), "{prompt}");
}

#[tokio::test]
async fn cut_call_is_an_incomplete_call_and_no_content() {
    let bare = "{\"name\": \"weather\", \"parameters\": {\"city\": \"Köln\"}}; \
                {\"name\": \"clock\", \"parameters\": {}}";
    let (_, marked) = TWO_CALLS.split_once('\n').unwrap();
    for (template, written, choice) in
        [(HERMES, TWO_CALLS, "auto"), (HERMES, marked, "required"), (LLAMA, bare, "required")]
    {
        let cluster = Cluster::start_with_template(template, written).await;
        let mut incomplete = 0;
        for max_tokens in 1..encode(written).len() {
            let body = chat(json!({"max_tokens": max_tokens, "tool_choice": choice}));
            let whole = parts_of(&cluster, body.clone(), false).await;
            let (content, calls, reason) = &whole;
            assert!(!content.contains("<tool_call>") && !content.contains('{'), "{whole:?}");
            assert!(choice == "auto" || content.is_empty(), "{whole:?}");
            assert_eq!(reason, "length", "{whole:?}");
            let whole_calls = [("weather", "{\"city\": \"Köln\"}"), ("clock", "{}")];
            for (call, (name, arguments)) in calls.as_array().unwrap().iter().zip(whole_calls) {
                let function = &call["function"];
                let so_far = function["arguments"].as_str().unwrap();
                assert_eq!(function["name"], name, "{whole:?}");
                assert!(arguments.starts_with(so_far), "{whole:?}");
                incomplete += u32::from(so_far != arguments);
            }
            let streamed = parts_of(&cluster, body, true).await;
            assert_eq!((&streamed.0, &streamed.2), (content, reason), "{whole:?}");
            let functions = |calls: &Value| {
                let calls = calls.as_array().unwrap();
                calls.iter().map(|call| call["function"].clone()).collect::<Vec<_>>()
            };
            assert_eq!(functions(&streamed.1), functions(calls), "{whole:?}");
        }
        assert!(incomplete > 5, "{incomplete} cuts are in a call");
    }
    // A stop string of the client cuts a call too.
    let cluster = Cluster::start_with_template(HERMES, TWO_CALLS).await;
    let (content, calls, reason) = parts_of(&cluster, chat(json!({"stop": "ln"})), false).await;
    assert_eq!((content.as_str(), reason.as_str()), ("I look.", "stop"));
    assert_eq!(calls[0]["function"], json!({"name": "weather", "arguments": "{\"city\": \"Kö"}));
}

#[tokio::test]
async fn call_that_the_model_leaves_incomplete_is_text() {
    let (written, _) = TWO_CALLS.split_once("\"}}").unwrap();
    let cluster = Cluster::start_with_template(HERMES, written).await;
    for stream in [false, true] {
        let expected = (written.to_owned(), "stop".to_owned());
        assert_eq!(text_answer(&cluster, chat(json!({})), stream).await, expected);
    }
    cluster.decode[0].answer_with(&encode(TWO_CALLS));
    for stream in [false, true] {
        // Without allowed calls the output is not parsed for calls.
        let body = chat(json!({"tool_choice": "none"}));
        let expected = (TWO_CALLS.to_owned(), "stop".to_owned());
        assert_eq!(text_answer(&cluster, body, stream).await, expected);
    }
}

#[tokio::test]
async fn parallel_calls_can_be_disabled() {
    let cluster = Cluster::start_with_template(HERMES, TWO_CALLS).await;
    let body = chat(json!({"parallel_tool_calls": false, "stream": true}));
    let chunks = cluster.client.stream(PATH, &body).await.chunks().await;
    let calls = calls_of(&chunks, 0);
    assert_eq!(calls.as_array().unwrap().len(), 1, "{calls}");
    assert_eq!(finish_reasons(&chunks), ["tool_calls"]);
    let body = chat(json!({"parallel_tool_calls": false}));
    let answer = cluster.client.post(PATH, &body).await.json();
    let whole = &answer["choices"][0]["message"]["tool_calls"];
    assert_eq!(whole.as_array().unwrap().len(), 1, "{whole}");
    assert_eq!(whole[0]["function"], calls[0]["function"]);
}

/// As Llama 3's own template, which rejects a message with several calls.
#[tokio::test]
async fn template_that_takes_one_call_gets_answers_with_one_call() {
    let check = "{%- if message.tool_calls and message.tool_calls|length != 1 %}\
                 {{- raise_exception('one call at a time') }}{%- endif %}{{- '<|im_start|>'";
    let one_call = LLAMA.replace("{{- '<|im_start|>'", check);
    let written =
        "{\"name\": \"weather\", \"parameters\": {}}; {\"name\": \"clock\", \"parameters\": {}}";
    for (template, count) in [(one_call.as_str(), 1), (LLAMA, 2)] {
        let cluster = Cluster::start_with_template(template, written).await;
        let answer = cluster.client.post(PATH, &chat(json!({}))).await.json();
        let choice = &answer["choices"][0];
        let message = &choice["message"];
        assert_eq!(message["tool_calls"].as_array().unwrap().len(), count, "{answer}");
        assert_eq!(choice["finish_reason"], "tool_calls");
        let mut messages = vec![json!({"role": "user", "content": "Weather?"}), message.clone()];
        messages.extend(
            message["tool_calls"]
                .as_array()
                .unwrap()
                .iter()
                .map(|call| json!({"role": "tool", "tool_call_id": call["id"], "content": "rain"})),
        );
        let next = cluster.client.post(PATH, &chat(json!({"messages": messages}))).await;
        assert_eq!(next.status, 200, "{next:?}");
    }
}

#[tokio::test]
async fn llama_bare_calls_are_parsed_and_other_objects_are_text() {
    let written = "{\"name\": \"weather\", \"parameters\": {\"city\": \"Cologne\"}}";
    let cluster = Cluster::start_with_template(LLAMA, written).await;
    let answer = cluster.client.post(PATH, &chat(json!({}))).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], json!(null));
    let function = json!({"name": "weather", "arguments": "{\"city\": \"Cologne\"}"});
    assert_eq!(message["tool_calls"][0]["function"], function);
    let object = "{\"name\": \"Cologne\", \"sky\": \"grey\"}";
    cluster.decode[0].answer_with(&encode(object));
    for stream in [false, true] {
        let expected = (object.to_owned(), "stop".to_owned());
        assert_eq!(text_answer(&cluster, chat(json!({})), stream).await, expected);
    }
}

#[tokio::test]
async fn tools_that_the_template_cannot_render_are_rejected_as_the_clients_error() {
    // As in Hermes's own template, a tool needs a description.
    let template = HERMES.replace("(tool | tojson)", "tool.function.description");
    assert_ne!(template, HERMES);
    let cluster = Cluster::start_with_template(&template, "It rains.").await;
    let answer = cluster.client.post(PATH, &chat(json!({}))).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!("messages")));
    assert!(answer.message().contains("cannot render these messages, tools"), "{answer:?}");
    let described = json!({"tools": [{"type": "function", "function": {
        "name": "weather", "description": "Tells it",
    }}]});
    assert_eq!(cluster.client.post(PATH, &chat(described)).await.status, 200);
}

#[tokio::test]
async fn tools_without_template_support_are_rejected() {
    let cluster = Cluster::start(0, 1, "Hi").await;
    for path in [PATH, "/tokenize"] {
        let answer = cluster.client.post(path, &chat(json!({}))).await;
        assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!("tools")));
        assert!(answer.message().contains("chat template does not show them"), "{answer:?}");
    }
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for choice in [json!("required"), named] {
        let demanded = chat(json!({"tool_choice": choice}));
        let answer = cluster.client.post(PATH, &demanded).await;
        assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!("tools")));
        let without = chat(json!({"tool_choice": choice, "tools": []}));
        let answer = cluster.client.post(PATH, &without).await;
        let param = &answer.error()["param"];
        assert_eq!((answer.status.as_u16(), param), (400, &json!("tool_choice")));
    }
    assert!(cluster.decode[0].calls().is_empty());
}
