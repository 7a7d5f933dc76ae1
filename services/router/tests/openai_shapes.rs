//! Responses in the formats that OpenAI's clients expect, streamed and not.

mod common;

use std::time::Duration;

use common::{
    Cluster,
    client::{Client, ids_of, text_of},
    encode, long_prompt, model_text,
    node::{Behaviour, END},
    settings,
};
use proto::v1::{NodeLoad, StepCosts};
use serde_json::{Value, json};

const ANSWER: &str = " Paris is the capital of France. Wine is red.";

fn chat(extra: Value) -> Value {
    let mut body = json!({"messages": [
        {"role": "system", "content": "You know a lot about many countries and their capitals."},
        {"role": "user", "content": "What is the capital of France?"},
    ]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn completion(extra: Value) -> Value {
    let mut body = json!({"prompt": long_prompt(), "max_tokens": 100});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Returns an object's keys, sorted.
fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

#[tokio::test]
async fn chat_response_has_openai_format() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let answer = cluster.client.post("/v1/chat/completions", &chat(json!({}))).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.headers["content-type"], "application/json");
    let body = answer.json();
    assert_eq!(
        keys(&body),
        ["choices", "created", "id", "model", "object", "system_fingerprint", "usage"]
    );
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "scripted");
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let token_count = encode(ANSWER).len() + 1;
    let prompt_tokens = body["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(
        body["choices"],
        json!([{
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": null},
            "logprobs": null,
            "finish_reason": "stop",
            "stop_reason": null,
        }])
    );
    assert_eq!(
        body["usage"],
        json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": token_count,
            "total_tokens": prompt_tokens + token_count as u64,
            "prompt_tokens_details": {"cached_tokens": 16},
        })
    );
    // The rendered prompt ends with the header of the assistant's answer.
    let attempt = &cluster.decode[0].calls()[0].attempt;
    let prompt = model_text().tokenizer().decode(&attempt.tokens, false);
    assert!(prompt.ends_with("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n"));
    assert_eq!(attempt.prompt_len as u64, prompt_tokens);
}

#[tokio::test]
async fn streamed_chat_response_has_openai_chunks() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let body = chat(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let mut stream = cluster.client.stream("/v1/chat/completions", &body).await;
    assert_eq!(stream.headers["content-type"], "text/event-stream");
    assert_eq!(stream.headers["cache-control"], "no-cache");
    let chunks = stream.chunks().await;
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk"));
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"]));
    assert_eq!(
        chunks[0]["choices"],
        json!([{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null,
            "finish_reason": null}])
    );
    let (usage, rest) = chunks.split_last().unwrap();
    assert!(rest.iter().all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some()));
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], encode(ANSWER).len() + 1);
    let last = &rest.last().unwrap()["choices"][0];
    assert_eq!(last["finish_reason"], "stop");
    assert_eq!(last["delta"], json!({}));
    assert!(rest[..rest.len() - 1].iter().all(|c| c["choices"][0]["finish_reason"].is_null()));
    assert_eq!(text_of(rest, 0), ANSWER);
}

#[tokio::test]
async fn stream_without_stream_options_has_no_usage() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    for (path, body) in [
        ("/v1/chat/completions", chat(json!({"stream": true}))),
        ("/v1/completions", completion(json!({"stream": true}))),
    ] {
        let chunks = cluster.client.stream(path, &body).await.chunks().await;
        assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()), "{path}");
        assert_eq!(text_of(&chunks, 0), ANSWER);
    }
}

#[tokio::test]
async fn completion_has_openai_format_streamed_and_not() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let answer = cluster.client.post("/v1/completions", &completion(json!({}))).await;
    let body = answer.json();
    assert_eq!(body["object"], "text_completion");
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(
        body["choices"],
        json!([{"index": 0, "text": ANSWER, "logprobs": null, "finish_reason": "stop",
            "stop_reason": null}])
    );
    assert_eq!(body["usage"]["prompt_tokens"], 100);

    let body = completion(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let chunks = cluster.client.stream("/v1/completions", &body).await.chunks().await;
    assert!(chunks.iter().all(|chunk| chunk["object"] == "text_completion"));
    assert_eq!(text_of(&chunks, 0), ANSWER);
    let last = &chunks[chunks.len() - 2]["choices"][0];
    assert_eq!((&last["finish_reason"], &last["text"]), (&json!("stop"), &json!("")));
    assert_eq!(chunks.last().unwrap()["usage"]["total_tokens"], 100 + encode(ANSWER).len() + 1);
}

#[tokio::test]
async fn chunk_of_a_completion_has_tokens_and_the_last_one_the_finish_reason() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let all = encode(ANSWER).len() as u64 + 1;
    for (extra, tokens, reason) in [
        (json!({}), all, "stop"),
        (json!({"max_tokens": 4}), 4, "length"),
        (json!({"max_tokens": 1}), 1, "length"),
        (json!({"stop": "capital"}), 4, "stop"),
        (json!({"ignore_eos": true, "stop": " Wine", "n": 2}), 2 * (all - 4), "stop"),
    ] {
        let mut body = completion(extra.clone());
        body["stream"] = true.into();
        body["return_token_ids"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let chunks = cluster.client.stream("/v1/completions", &body).await.chunks().await;
        let (usage, chunks) = chunks.split_last().unwrap();
        assert_eq!(usage["usage"]["completion_tokens"], tokens, "{extra}");
        let ids = |chunk: &Value| chunk["choices"][0]["token_ids"].as_array().unwrap().len() as u64;
        assert!(chunks.iter().all(|chunk| ids(chunk) > 0), "{extra}: {chunks:?}");
        assert_eq!(chunks.iter().map(ids).sum::<u64>(), tokens, "{extra}");
        let choices = body["n"].as_u64().unwrap_or(1);
        for choice in 0..choices {
            let own = |chunk: &&Value| chunk["choices"][0]["index"] == choice;
            let mut reasons = chunks.iter().filter(own).rev();
            let last = reasons.next().unwrap();
            assert_eq!(last["choices"][0]["finish_reason"], reason, "{extra}");
            assert!(reasons.all(|chunk| chunk["choices"][0]["finish_reason"].is_null()));
            let whole = cluster.client.post("/v1/completions", &completion(extra.clone())).await;
            let index = choice as usize;
            assert_eq!(whole.json()["choices"][index]["text"], text_of(chunks, choice));
        }
    }
}

#[tokio::test]
async fn log_probabilities_of_a_completion_tell_parts_of_characters_apart() {
    let cluster = Cluster::start(0, 1, "👍").await;
    let body = completion(json!({"logprobs": 20}));
    let answer = cluster.client.post("/v1/completions", &body).await.json();
    let logprobs = &answer["choices"][0]["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    let (_, parts) = tokens.split_last().unwrap();
    assert!(parts.len() > 1, "{tokens:?}");
    let mut bytes = String::new();
    for (token, top) in tokens.iter().zip(logprobs["top_logprobs"].as_array().unwrap()) {
        assert_eq!(top[token.as_str().unwrap()], -0.25, "{top}");
        assert_eq!(top.as_object().unwrap().len(), 20, "{top}");
    }
    for part in parts {
        bytes += part.as_str().unwrap().strip_prefix("bytes:").unwrap();
    }
    assert_eq!(bytes, r"\xf0\x9f\x91\x8d");
}

#[tokio::test]
async fn max_tokens_ends_an_answer_and_has_a_default() {
    let cluster = Cluster::start(1, 1, &ANSWER.repeat(10)).await;
    let body = json!({"prompt": long_prompt()});
    let answer = cluster.client.post("/v1/completions", &body).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 16);
    let body = chat(json!({"max_completion_tokens": 5, "max_tokens": 50}));
    let answer = cluster.client.post("/v1/chat/completions", &body).await.json();
    assert_eq!(answer["usage"]["completion_tokens"], 5);
    // With one token the prefill node finishes the request without a decode node.
    let answer =
        cluster.client.post("/v1/completions", &completion(json!({"max_tokens": 1}))).await.json();
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    for body in [completion(json!({"max_tokens": -1})), chat(json!({"max_tokens": -1}))] {
        let path = if body.get("prompt").is_some() { "completions" } else { "chat/completions" };
        let cluster = Cluster::start(0, 1, ANSWER).await;
        let answer = cluster.client.post(&format!("/v1/{path}"), &body).await;
        assert_eq!(answer.json()["choices"][0]["finish_reason"], "stop", "{answer:?}");
        let attempt = &cluster.decode[0].calls()[0].attempt;
        let rest = common::node::SEQUENCE_MAX - attempt.prompt_len;
        assert_eq!(attempt.sampling.as_ref().unwrap().max_tokens, rest);
    }
    let chat_default = &cluster.decode[0].calls()[1].attempt;
    assert_eq!(chat_default.sampling.as_ref().unwrap().max_tokens, 5);
    cluster.client.post("/v1/chat/completions", &chat(json!({}))).await;
    let calls = cluster.decode[0].calls();
    // The decode call of the answer with one token may arrive last.
    let mut asked = calls.iter().map(|call| call.attempt.sampling.as_ref().unwrap().max_tokens);
    let rest = common::node::SEQUENCE_MAX - chat_default.prompt_len;
    assert!(asked.any(|max_tokens| max_tokens == rest), "{calls:?}");
}

#[tokio::test]
async fn sampling_options_reach_both_nodes_with_defaults_filled_in() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let body = completion(json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 11,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3,
        "min_tokens": 2, "stop_token_ids": [77, 5], "cache_salt": "tenant",
    }));
    assert_eq!(cluster.client.post("/v1/completions", &body).await.status, 200);
    let (prefill, decode) = (cluster.prefill[0].calls(), cluster.decode[0].calls());
    assert_eq!(prefill[0].attempt.sampling, decode[0].attempt.sampling);
    assert_eq!(prefill[0].attempt.transfer_id, decode[0].attempt.transfer_id);
    assert_eq!(decode[0].attempt.cache_salt, "/tenant");
    let sampling = decode[0].attempt.sampling.clone().unwrap();
    assert_eq!(
        (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed),
        (0.5, 0.9, 40, 0.05, 11)
    );
    assert_eq!(
        (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty),
        (1.1, 0.2, -0.3)
    );
    let mut stops = model_text().tokenizer().eos_ids().to_vec();
    stops.extend([5, 77]);
    stops.sort_unstable();
    assert_eq!(sampling.stop_token_ids, stops);
    assert_eq!(sampling.min_tokens, 2);

    // The router generates a new seed for each request without one.
    for _ in 0..2 {
        cluster.client.post("/v1/completions", &completion(json!({}))).await;
    }
    let seeds: Vec<u64> = cluster.decode[0].calls()[1..]
        .iter()
        .map(|call| call.attempt.sampling.as_ref().unwrap().seed)
        .collect();
    assert_ne!(seeds[0], seeds[1]);
    let default = cluster.decode[0].calls()[1].attempt.sampling.clone().unwrap();
    assert_eq!((default.temperature, default.top_p, default.top_k), (1.0, 1.0, 0));
}

/// The first choice decides whether the request starts in time; the others must not cut it.
#[tokio::test]
async fn choices_beyond_the_free_slots_wait_for_the_others() {
    let mut settings = settings();
    settings.router.waiting_timeout = Duration::from_millis(100);
    let (_, decode) = Cluster::nodes(0, 1, ANSWER);
    let costs = StepCosts { slots: 1, step_tokens: 512, chunk_tokens: 512, ..Default::default() };
    let step_costs = Some(costs);
    decode[0].report(NodeLoad { blocks_free: 1000, step_costs, ..Default::default() });
    decode[0].set_token_time(Duration::from_millis(30));
    let cluster = Cluster::start_over(settings, vec![], decode).await;
    let answer = cluster.client.post("/v1/chat/completions", &chat(json!({"n": 3}))).await;
    let answer = answer.json();
    let choices = answer["choices"].as_array().unwrap_or_else(|| panic!("{answer}"));
    assert!(choices.iter().all(|choice| choice["message"]["content"] == ANSWER), "{answer}");
    assert_eq!(choices.len(), 3);
}

#[tokio::test]
async fn n_choices_are_separate_attempts_with_separate_seeds() {
    let cluster = Cluster::start(1, 2, ANSWER).await;
    let body = chat(json!({"n": 3, "seed": 40}));
    let answer = cluster.client.post("/v1/chat/completions", &body).await.json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        assert_eq!(choice["message"]["content"], ANSWER);
    }
    // Usage counts the prompt once and the tokens of every choice.
    assert_eq!(answer["usage"]["completion_tokens"], 3 * (encode(ANSWER).len() + 1));
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 16);
    let calls: Vec<_> = cluster.decode.iter().flat_map(|node| node.calls()).collect();
    let mut seeds: Vec<u64> =
        calls.iter().map(|call| call.attempt.sampling.as_ref().unwrap().seed).collect();
    seeds.sort_unstable();
    assert_eq!(seeds, [40, 41, 42]);
    assert!(calls.iter().all(|call| call.attempt.request_id == calls[0].attempt.request_id));

    let body = chat(json!({"n": 2, "stream": true}));
    let chunks = cluster.client.stream("/v1/chat/completions", &body).await.chunks().await;
    for choice in 0..2 {
        assert_eq!(text_of(&chunks, choice), ANSWER);
        let roles = chunks.iter().filter(|chunk| {
            let part = &chunk["choices"][0];
            part["index"] == choice && part["delta"]["role"] == "assistant"
        });
        assert_eq!(roles.count(), 1);
    }
}

#[tokio::test]
async fn prompts_may_be_strings_token_ids_or_lists_of_either() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let text = "Once upon a time there was a very long introduction to a story. ".repeat(3);
    for (prompt, count) in [
        (json!(text), 1),
        (json!([text, "two"]), 2),
        (json!([1, 2, 3]), 1),
        (json!([[1, 2, 3], [4], [5, 6]]), 3),
    ] {
        let body = json!({"prompt": prompt, "max_tokens": 3, "n": 2});
        let answer = cluster.client.post("/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{:?}", answer.json());
        let answer = answer.json();
        let indices: Vec<u64> = answer["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["index"].as_u64().unwrap())
            .collect();
        assert_eq!(indices, (0..2 * count).collect::<Vec<u64>>(), "{prompt}");
        assert_eq!(answer["usage"]["completion_tokens"], 6 * count);
    }
    let first = &cluster.decode[0].calls()[0].attempt;
    assert_eq!(first.tokens, encode(&text));
}

#[tokio::test]
async fn token_ids_are_returned_as_vllm_does() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let mut expected = encode(ANSWER);
    expected.push(END);

    let body = completion(json!({"return_token_ids": true}));
    let answer = cluster.client.post("/v1/completions", &body).await.json();
    assert_eq!(answer["choices"][0]["token_ids"], json!(expected));
    assert_eq!(answer["choices"][0]["prompt_token_ids"], json!(long_prompt()));
    let body = completion(json!({"return_token_ids": true, "stream": true}));
    let chunks = cluster.client.stream("/v1/completions", &body).await.chunks().await;
    assert_eq!(chunks[0]["choices"][0]["prompt_token_ids"], json!(long_prompt()));
    assert!(chunks[1..].iter().all(|c| c["choices"][0].get("prompt_token_ids").is_none()));
    assert_eq!(ids_of(&chunks, 0), expected);

    let body = chat(json!({"return_token_ids": true}));
    let answer = cluster.client.post("/v1/chat/completions", &body).await.json();
    assert_eq!(answer["choices"][0]["token_ids"], json!(expected));
    let prompt = answer["prompt_token_ids"].clone();
    assert_eq!(prompt.as_array().unwrap().len() as u64, answer["usage"]["prompt_tokens"]);
    let body = chat(json!({"return_token_ids": true, "stream": true}));
    let chunks = cluster.client.stream("/v1/chat/completions", &body).await.chunks().await;
    assert_eq!(chunks[0]["prompt_token_ids"], prompt);
    assert_eq!(ids_of(&chunks, 0), expected);
}

#[tokio::test]
async fn chat_logprobs_name_each_token_with_its_bytes() {
    let cluster = Cluster::start(1, 1, " Größe").await;
    let body = chat(json!({"logprobs": true, "top_logprobs": 2}));
    let answer = cluster.client.post("/v1/chat/completions", &body).await.json();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(content.len(), encode(" Größe").len() + 1);
    let mut bytes: Vec<u8> = Vec::new();
    for token in &content[..content.len() - 1] {
        assert_eq!(token["logprob"], -0.25);
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(token["top_logprobs"][0]["token"], token["token"]);
        assert_eq!(token["top_logprobs"][1]["logprob"], -1.25);
        bytes.extend(token["bytes"].as_array().unwrap().iter().map(|b| b.as_u64().unwrap() as u8));
    }
    assert_eq!(String::from_utf8(bytes).unwrap(), " Größe");
    assert_eq!(content.last().unwrap()["token"], "<|im_end|>");

    let body = chat(json!({"logprobs": true, "stream": true}));
    let chunks = cluster.client.stream("/v1/chat/completions", &body).await.chunks().await;
    let streamed: Vec<Value> = chunks
        .iter()
        .flat_map(|c| {
            c["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default()
        })
        .collect();
    assert_eq!(streamed.len(), content.len());
    assert!(streamed.iter().all(|token| token["top_logprobs"] == json!([])));
}

#[tokio::test]
async fn completion_logprobs_are_lists_side_by_side() {
    let cluster = Cluster::start(1, 1, " one two").await;
    let body = completion(json!({"logprobs": 2}));
    let answer = cluster.client.post("/v1/completions", &body).await.json();
    let logprobs = answer["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs["tokens"], json!([" one", " two", "<|im_end|>"]));
    assert_eq!(logprobs["text_offset"], json!([0, 4, 8]));
    assert_eq!(logprobs["token_logprobs"], json!([-0.25, -0.25, -0.25]));
    assert_eq!(logprobs["top_logprobs"][0][" one"], -0.25);
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    // Streamed log-probabilities have the same text offsets.
    let body = completion(json!({"logprobs": 2, "stream": true}));
    let chunks = cluster.client.stream("/v1/completions", &body).await.chunks().await;
    let offsets: Vec<Value> = chunks
        .iter()
        .flat_map(|c| {
            c["choices"][0]["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default()
        })
        .collect();
    assert_eq!(json!(offsets), logprobs["text_offset"]);
}

#[tokio::test]
async fn a_stop_string_ends_the_answer_and_the_node_is_told() {
    let cluster = Cluster::start(1, 1, &ANSWER.repeat(20)).await;
    for stream in [false, true] {
        let body = chat(json!({"stop": ["nowhere", "capital of"], "stream": stream,
            "stream_options": if stream { json!({"include_usage": true}) } else { json!(null) }}));
        let (text, usage, finish, stop, matched) = if stream {
            let chunks = cluster.client.stream("/v1/chat/completions", &body).await.chunks().await;
            let end = chunks[chunks.len() - 2]["choices"][0].clone();
            let usage = chunks.last().unwrap()["usage"].clone();
            let field = |name: &str| end[name].clone();
            let [finish, stop, matched] =
                ["finish_reason", "stop_reason", "matched_stop"].map(field);
            (text_of(&chunks, 0), usage, finish, stop, matched)
        } else {
            let answer = cluster.client.post("/v1/chat/completions", &body).await.json();
            let choice = answer["choices"][0].clone();
            (
                choice["message"]["content"].as_str().unwrap().to_owned(),
                answer["usage"].clone(),
                choice["finish_reason"].clone(),
                choice["stop_reason"].clone(),
                choice["matched_stop"].clone(),
            )
        };
        assert_eq!(text, " Paris is the ");
        assert_eq!((finish, stop), (json!("stop"), json!("capital of")));
        assert_eq!(matched, "capital of");
        // Usage counts the tokens up to the one that completed the stop string.
        assert_eq!(usage["completion_tokens"], encode(" Paris is the capital of").len());
    }
    let node = &cluster.decode[0];
    common::client::eventually("one stream is open", async || node.open_streams() == 1).await;
    assert!(cluster.metric("baton_attempts_total", &["outcome=\"complete\""]).await >= 2.0);
}

#[tokio::test]
async fn a_stop_string_can_be_part_of_the_answer_and_waits_for_the_least_tokens() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let body = completion(json!({"stop": "capital", "include_stop_str_in_output": true}));
    let answer = cluster.client.post("/v1/completions", &body).await.json();
    assert_eq!(answer["choices"][0]["text"], " Paris is the capital");
    let body = completion(json!({"stop": "is", "min_tokens": 8}));
    let answer = cluster.client.post("/v1/completions", &body).await.json();
    assert_eq!(answer["choices"][0]["text"], " Paris is the capital of France. Wine ");
}

#[tokio::test]
async fn tool_results_need_no_id_and_an_empty_stop_is_none() {
    const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let cluster = Cluster::start_with_template(TEMPLATE, ANSWER).await;
    let body = json!({"messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "refusal": "I cannot look it up."},
        {"role": "tool", "content": "sunny"},
    ], "max_tokens": 2, "stop": "", "return_token_ids": true});
    let answer = cluster.client.post("/v1/chat/completions", &body).await.json();
    let ids: Vec<u32> = serde_json::from_value(answer["prompt_token_ids"].clone()).unwrap();
    let prompt = model_text().tokenizer().decode(&ids, false);
    let expected = "user: Weather?\nassistant: I cannot look it up.\ntool: sunny\n";
    assert_eq!(prompt, expected, "{answer}");
}

#[tokio::test]
async fn client_stop_token_is_reported_and_adds_no_text() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let tokens = encode(ANSWER);
    let body = completion(json!({"stop_token_ids": [tokens[3]]}));
    let answer = cluster.client.post("/v1/completions", &body).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], model_text().tokenizer().decode(&tokens[..3], true));
    assert_eq!(
        (&choice["finish_reason"], &choice["stop_reason"]),
        (&json!("stop"), &json!(tokens[3]))
    );
    assert_eq!(answer["usage"]["completion_tokens"], 4);
}

#[tokio::test]
async fn ignored_ends_of_sequence_make_answers_of_an_exact_length() {
    let cluster = Cluster::start(1, 1, " short").await;
    let body = completion(json!({"ignore_eos": true, "max_tokens": 12}));
    let answer = cluster.client.post("/v1/completions", &body).await.json();
    assert_eq!(answer["usage"]["completion_tokens"], 12);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn statistics_are_sent_only_on_request() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let asked = [("x-baton-stats", "1")];
    let expected = json!({"kv_bytes": 4096, "transfer_us": 81, "attempts": 1,
        "prefill_node": "prefill-0", "decode_node": "decode-0"});
    let body = completion(json!({}));
    let answer = cluster.client.post_with("/v1/completions", &asked, &body).await.json();
    assert_eq!(answer["baton"], expected);
    // The old name of the header.
    let old = [("x-baton-figures", "1")];
    let answer = cluster.client.post_with("/v1/completions", &old, &body).await.json();
    assert_eq!(answer["baton"], expected);
    assert_eq!(cluster.client.post("/v1/completions", &body).await.json().get("baton"), None);
    let body = completion(json!({"stream": true}));
    let chunks = cluster.client.stream_with("/v1/completions", &asked, &body).await.chunks().await;
    assert_eq!(chunks.last().unwrap()["baton"], expected);
    assert_eq!(chunks.last().unwrap()["choices"], json!([]));
}

#[tokio::test]
async fn decode_node_that_needs_no_peer_cancels_the_prefill_call() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::LocalPrefill);
    cluster.prefill[0].behave(Behaviour::HangAfter(0));
    let answer = cluster.client.post("/v1/completions", &completion(json!({}))).await.json();
    assert_eq!(answer["choices"][0]["text"], ANSWER);
    let prefill = &cluster.prefill[0];
    common::client::eventually("the prefill call is dropped", async || {
        prefill.calls()[0].left.lock().unwrap().is_some()
    })
    .await;
    // A prompt shorter than one KV block uses no prefill node.
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 3});
    assert_eq!(cluster.client.post("/v1/completions", &body).await.status, 200);
    assert_eq!(cluster.prefill[0].calls().len(), 1);
}

#[tokio::test]
async fn the_final_message_can_be_continued() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let body = json!({"continue_final_message": true, "messages": [
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "The capital is"},
    ]});
    assert_eq!(cluster.client.post("/v1/chat/completions", &body).await.status, 200);
    let prompt = &cluster.decode[0].calls()[0].attempt.tokens;
    let prompt = model_text().tokenizer().decode(prompt, false);
    assert!(prompt.ends_with("<|im_start|>assistant\nThe capital is"), "{prompt}");
}

#[tokio::test]
async fn templates_of_transformers_render_their_prompt() {
    let parts = json!([{"type": "text", "text": "Say"}, {"type": "text", "text": " hi"}]);
    for (template, content, expected) in [
        (
            "{%- if tools is iterable and tools | length > 0 %}tools{% endif %}\
             {% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
            json!("Hi"),
            "user: Hi",
        ),
        (
            "{% for m in messages %}{% if m.tool_calls | length > 0 %}calls{% endif %}\
             {{ m.content }}{% endfor %}",
            json!("Hi"),
            "Hi",
        ),
        // This template renders parts, so that nothing is added between them.
        (
            "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}\
             {% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
            parts.clone(),
            "[user]Say hi",
        ),
        // This one renders nothing else.
        (
            "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}",
            json!("Hi"),
            "<Hi>",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", parts, "Say\n hi"),
    ] {
        let cluster = Cluster::start_with_template(template, ANSWER).await;
        let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 4});
        let answer = cluster.client.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let prompt = &cluster.decode[0].calls()[0].attempt.tokens;
        assert_eq!(model_text().tokenizer().decode(prompt, false), expected, "{template}");
    }
}

#[tokio::test]
async fn every_answer_carries_the_clients_label_or_an_id() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    for (method, path, status) in [
        (http::Method::GET, "/v1/models", 200),
        (http::Method::GET, "/v1/models/other", 404),
        (http::Method::GET, "/health", 200),
        (http::Method::GET, "/metrics", 200),
        (http::Method::GET, "/nowhere", 404),
        (http::Method::DELETE, "/v1/completions", 405),
        (http::Method::POST, "/v1/completions", 400),
    ] {
        let label = [("x-request-id", "mine-7")];
        for (headers, is_label) in [(&label[..], true), (&[], false)] {
            let answer = cluster.client.send(method.clone(), path, headers, "").await;
            assert_eq!(answer.status(), status, "{path}");
            let ids: Vec<_> = answer.headers().get_all("x-request-id").iter().collect();
            assert_eq!(ids.len(), 1, "{path}");
            match is_label {
                true => assert_eq!(ids[0], "mine-7", "{path}"),
                false => assert_eq!(ids[0].len(), 32, "{path}"),
            }
        }
    }
}

#[tokio::test]
async fn path_that_is_not_utf8_is_an_error_in_openai_format() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let admin = Client::new(format!("http://{}", cluster.router.admin));
    for (client, path) in [(&cluster.client, "/v1/models/%FF"), (&admin, "/v1/explain/%FF")] {
        let answer = client.get(path).await;
        assert_eq!(answer.status, 400, "{path}");
        assert_eq!(answer.error()["code"], "invalid_value", "{path}: {answer:?}");
    }
}

#[tokio::test]
async fn models_health_and_metrics_name_the_served_model() {
    let mut cluster = Cluster::start(1, 1, ANSWER).await;
    let models = cluster.client.get("/v1/models").await.json();
    assert_eq!(models["object"], "list");
    assert_eq!(models["data"][0]["id"], "scripted");
    assert_eq!(models["data"][0]["object"], "model");
    assert_eq!(models["data"][0]["max_model_len"], 2048);
    let model = cluster.client.get("/v1/models/scripted").await;
    assert_eq!(model.json(), models["data"][0]);
    for other in ["/v1/models/other", "/v1/models/some/other%20one"] {
        let answer = cluster.client.get(other).await;
        assert_eq!(answer.status, 404);
        assert_eq!(answer.error()["code"], "model_not_found");
        assert!(answer.message().contains("other"), "{}", answer.message());
    }

    let health = cluster.client.get("/health").await;
    assert_eq!(health.status, 200);
    assert_eq!(health.json()["degraded"], false);
    assert_eq!(cluster.client.get("/live").await.status, 200);

    cluster.client.post("/v1/completions", &completion(json!({"n": 2}))).await;
    let finished = cluster
        .metric("baton_requests_finished_total", &["finished_reason=\"stop\"", "text_completion"]);
    assert_eq!(finished.await, 1.0);
    assert_eq!(cluster.metric("baton_attempts_total", &["outcome=\"complete\""]).await, 2.0);
    assert_eq!(cluster.metric("baton_nodes", &["health=\"up\""]).await, 2.0);
    assert_eq!(cluster.metric("vllm:num_requests_running", &[]).await, 0.0);

    cluster.prefill[0].kill();
    cluster.wait_nodes(0, 1).await;
    let health = cluster.client.get("/health").await;
    assert_eq!((health.status.as_u16(), &health.json()["degraded"]), (200, &json!(true)));
    cluster.decode[0].kill();
    cluster.wait_nodes(0, 0).await;
    assert_eq!(cluster.client.get("/health").await.status, 503);
    assert_eq!(cluster.client.get("/live").await.status, 200);
}

#[tokio::test]
async fn request_ids_are_echoed_bounded_and_minted() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let body = completion(json!({"max_tokens": 1}));
    let echoed = async |sent: &str| {
        let headers = [("x-request-id", sent)];
        let answer = cluster.client.post_with("/v1/completions", &headers, &body).await;
        answer.headers["x-request-id"].to_str().unwrap().to_owned()
    };
    assert_eq!(echoed("my-request.7").await, "my-request.7");
    assert_eq!(echoed("a b\tc").await, "abc");
    assert_eq!(echoed(&"x".repeat(1000)).await.len(), 128);
    let minted =
        cluster.client.post("/v1/completions", &body).await.headers["x-request-id"].clone();
    assert_eq!(minted.len(), 32);
    // Errors have a request id, too.
    let answer =
        cluster.client.post_with("/v1/completions", &[("x-request-id", "e")], &json!({})).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.headers["x-request-id"]),
        (400, &"e".parse().unwrap())
    );
    // Nodes receive only the router's own ids.
    let ids = cluster.decode[0].calls();
    assert!(ids.iter().all(|call| call.attempt.request_id.len() == 16));
    assert_ne!(ids[0].attempt.request_id, ids[1].attempt.request_id);
}

#[tokio::test]
async fn a_tenant_named_by_a_header_has_salts_of_its_own() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let tenant = [("x-baton-tenant", "team-7")];
    let salted = completion(json!({"cache_salt": "mine"}));
    for (headers, body) in
        [(&tenant[..], &salted), (&tenant[..], &completion(json!({}))), (&[], &salted)]
    {
        let answer = cluster.client.post_with("/v1/completions", headers, body).await;
        assert_eq!(answer.status, 200);
    }
    let salts: Vec<String> =
        cluster.decode[0].calls().into_iter().map(|call| call.attempt.cache_salt).collect();
    assert_eq!(salts, ["team-7/mine", "team-7/", "/mine"]);

    let nobody = [("x-baton-tenant", "a/b")];
    let answer = cluster.client.post_with("/v1/completions", &nobody, &salted).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!("x-baton-tenant")));
    assert!(answer.message().contains("a/b"), "{}", answer.message());
}

#[tokio::test]
async fn unknown_fields_are_ignored() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let body = completion(json!({"user": "me", "metadata": {"a": [1]}, "store": true, "x": null}));
    assert_eq!(cluster.client.post("/v1/completions", &body).await.status, 200);
}
