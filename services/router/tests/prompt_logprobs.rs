//! Answers that tell something of their prompt (`echo`, `prompt_logprobs` and `max_tokens` 0), and
//! fields that change a prompt or the tokens that are sampled.

mod common;

use common::{Cluster, encode, settings};
use serde_json::{Value, json};

const ANSWER: &str = " one two three";
const PROMPT: &str = "Count up, please:";

/// The test nodes give the prompt token at position `i` the log-probability `-i`, and the best
/// token -0.5.
fn expected_logprobs() -> Vec<Value> {
    let count = encode(PROMPT).len();
    (0..count).map(|at| if at == 0 { Value::Null } else { json!(-(at as f32)) }).collect()
}

#[tokio::test]
async fn echo_begins_the_answer_with_its_prompt_whole_and_streamed() {
    for prefill in [0, 1] {
        let cluster = Cluster::start(prefill, 1, ANSWER).await;
        let ask = |more: Value| {
            let mut body = json!({"prompt": PROMPT, "max_tokens": 9, "echo": true});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body
        };
        let answer = cluster.client.post("/v1/completions", &ask(json!({"logprobs": 1}))).await;
        let choice = &answer.json()["choices"][0];
        assert_eq!(choice["text"], format!("{PROMPT}{ANSWER}"));
        let logprobs = &choice["logprobs"];
        let prompt_len = encode(PROMPT).len();
        let found = logprobs["token_logprobs"].as_array().unwrap();
        assert_eq!(found[..prompt_len], expected_logprobs());
        assert_eq!(found[prompt_len], -0.25, "the first token of the answer");
        assert_eq!(logprobs["top_logprobs"][0], Value::Null);
        assert_eq!(logprobs["top_logprobs"][1].as_object().unwrap().len(), 2);
        let offsets: Vec<u64> = serde_json::from_value(logprobs["text_offset"].clone()).unwrap();
        assert_eq!((offsets[0], offsets[prompt_len]), (0, PROMPT.len() as u64));
        for list in ["tokens", "top_logprobs", "text_offset"] {
            assert_eq!(logprobs[list].as_array().unwrap().len(), found.len(), "{list}");
        }

        let body = ask(json!({"logprobs": 1, "stream": true}));
        let chunks = cluster.client.stream("/v1/completions", &body).await.chunks().await;
        let (mut text, mut streamed) = (String::new(), Vec::new());
        for chunk in &chunks {
            let choice = &chunk["choices"][0];
            text += choice["text"].as_str().unwrap_or_default();
            let logprobs = choice["logprobs"]["token_logprobs"].as_array();
            streamed.extend(logprobs.cloned().unwrap_or_default());
        }
        assert_eq!((text, &streamed), (format!("{PROMPT}{ANSWER}"), found));

        // Without log-probabilities nodes compute none.
        let answer = cluster.client.post("/v1/completions", &ask(json!({}))).await.json();
        assert_eq!(answer["choices"][0]["text"], format!("{PROMPT}{ANSWER}"));
        let calls = cluster.decode[0].calls();
        let asked: Vec<_> = calls
            .iter()
            .map(|call| call.attempt.sampling.as_ref().unwrap().prompt_logprobs)
            .collect();
        assert_eq!(asked, [Some(1), Some(1), None]);
    }
}

#[tokio::test]
async fn no_tokens_may_be_asked_for_to_learn_of_the_prompt() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let body = json!({"prompt": [PROMPT, PROMPT], "max_tokens": 0, "echo": true, "logprobs": 0});
    let answer = cluster.client.post("/v1/completions", &body).await.json();
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(PROMPT), &json!("length")));
        assert_eq!(choice["logprobs"]["token_logprobs"], json!(expected_logprobs()));
    }
    assert_eq!(answer["usage"]["completion_tokens"], 0);

    let messages = json!([{"role": "user", "content": PROMPT}]);
    let body = json!({"messages": messages, "max_tokens": 0, "prompt_logprobs": 1});
    let answer = cluster.client.post("/v1/chat/completions", &body).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let found = answer["prompt_logprobs"].as_array().unwrap();
    assert_eq!(found.len() as u64, answer["usage"]["prompt_tokens"].as_u64().unwrap());
    assert_eq!(found[0], Value::Null);
    let second = found[1].as_object().unwrap();
    let best = json!({"logprob": -0.5, "rank": 1, "decoded_token": "<|endoftext|>"});
    assert_eq!(second["0"], best);
    let own = second.iter().find(|(id, _)| *id != "0").unwrap().1;
    assert_eq!((&own["logprob"], &own["rank"]), (&json!(-1.0), &json!(3)));

    for (path, body, param) in [
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 0}), "max_tokens"),
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 0}), "max_tokens"),
        (
            "/v1/completions",
            json!({"prompt": "x", "prompt_logprobs": 1, "stream": true}),
            "prompt_logprobs",
        ),
    ] {
        let answer = cluster.client.post(path, &body).await;
        assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!(param)));
    }
}

#[tokio::test]
async fn logit_bias_reaches_the_nodes_sorted_by_token() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let body = json!({"prompt": PROMPT, "max_tokens": 2, "logit_bias": {"70": -100, "5": 2.5}});
    assert_eq!(cluster.client.post("/v1/completions", &body).await.status, 200);
    let calls = cluster.decode[0].calls();
    let bias = &calls[0].attempt.sampling.as_ref().unwrap().logit_bias;
    let bias: Vec<_> = bias.iter().map(|one| (one.id, one.bias)).collect();
    assert_eq!(bias, [(5, 2.5), (70, -100.0)]);
}

#[tokio::test]
async fn allowed_tokens_and_bad_words_reach_the_nodes_as_tokens() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let words = json!(["three", " four five"]);
    let body = json!({
        "prompt": PROMPT.repeat(20), "max_tokens": 2, "allowed_token_ids": [70, 5], "bad_words": words,
    });
    assert_eq!(cluster.client.post("/v1/completions", &body).await.status, 200);
    let expected: Vec<_> =
        ["three", " three", "four five", " four five"].into_iter().map(encode).collect();
    for node in [&cluster.prefill[0], &cluster.decode[0]] {
        let calls = node.calls();
        let sampling = calls[0].attempt.sampling.as_ref().unwrap();
        assert_eq!(sampling.allowed_token_ids, [70, 5]);
        let words: Vec<_> = sampling.bad_words.iter().map(|word| word.ids.clone()).collect();
        assert_eq!(words, expected);
    }
}

#[tokio::test]
async fn last_tokens_of_a_long_prompt_are_kept_on_request() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let long = "word ".repeat(3000);
    let (all, messages) = (encode(&long), json!([{"role": "user", "content": &long}]));
    for (count, kept) in [(5, 5), (2047, 2047), (-1, 2047)] {
        let body = json!({"prompt": &long, "max_tokens": 1, "truncate_prompt_tokens": count});
        let answer = cluster.client.post("/v1/completions", &body).await;
        assert_eq!(answer.json()["usage"]["prompt_tokens"], kept, "{count}");
        let calls = cluster.decode[0].calls();
        assert_eq!(calls.last().unwrap().attempt.tokens, all[all.len() - kept..]);

        let body = json!({"messages": messages, "max_tokens": 1, "truncate_prompt_tokens": count});
        let answer = cluster.client.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.json()["usage"]["prompt_tokens"], kept, "{count}");
    }
    let body = json!({"prompt": [5, 6, 7], "max_tokens": 1, "truncate_prompt_tokens": 2});
    assert_eq!(cluster.client.post("/v1/completions", &body).await.status, 200);
    assert_eq!(cluster.decode[0].calls().last().unwrap().attempt.tokens, [6, 7]);
    let body = json!({"prompt": &long, "truncate_prompt_tokens": 2500});
    let answer = cluster.client.post("/v1/completions", &body).await;
    assert_eq!(answer.status, 400);
    assert_eq!(answer.message(), "prompt has 2500 tokens; allowed: at most 2047");
}

#[tokio::test]
async fn nodes_without_these_sampling_parameters_receive_none() {
    let fields = [
        ("prompt_logprobs", json!(1)),
        ("logit_bias", json!({"5": 1})),
        ("allowed_token_ids", json!([5])),
        ("bad_words", json!(["x"])),
    ];
    let ask = async |cluster: &Cluster, (field, value): &(&str, Value)| {
        let body = json!({"prompt": PROMPT, "max_tokens": 1, *field: value});
        cluster.client.post("/v1/completions", &body).await
    };
    let start = async |versions: &[u32]| {
        let (_, decode) = Cluster::nodes(0, versions.len(), ANSWER);
        decode.iter().zip(versions).for_each(|(node, version)| node.announce_sampling(*version));
        Cluster::start_over(settings(), vec![], decode).await
    };
    let cluster = start(&[0]).await;
    for field in &fields {
        let answer = ask(&cluster, field).await;
        assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!(field.0)));
        assert!(answer.message().contains("nodes of one GPU or on a CPU"), "{}", answer.message());
    }
    assert!(cluster.decode[0].calls().is_empty());
    let cluster = start(&[0, 1]).await;
    for field in fields.iter().cycle().take(12) {
        assert_eq!(ask(&cluster, field).await.status, 200);
    }
    let calls = [0, 1].map(|node| cluster.decode[node].calls().len());
    assert_eq!(calls, [0, 12]);
}
