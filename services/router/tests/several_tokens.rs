//! Nodes with speculative decoding send several tokens per event. Clients see the same output as
//! with one token per event.

mod common;

use bytes::Bytes;
use common::{
    Cluster, encode,
    node::{Behaviour, END},
};
use http::Method;
use http_body_util::BodyExt;
use proto::v1::{
    DecodeFinished, DecodeTokens, FinishReason, Reserved, Token, TokenLogprobs, TopLogprob,
    decode_event::Event,
};
use serde_json::{Value, json};

const ANSWER: &str = " one two three four five six seven";

fn token(id: u32) -> Token {
    let top = vec![TopLogprob { id, logprob: -0.5 }];
    Token {
        id,
        logprobs: Some(TokenLogprobs { chosen: -0.5, top, rank: None }),
        weight_version: None,
        pooled: vec![],
        prompt: None,
    }
}

/// Returns the events of one answer. Each `Tokens` event has as many tokens as the entry of
/// `counts`.
fn events(counts: &[usize]) -> Vec<Event> {
    let ids = [encode(ANSWER), vec![END]].concat();
    let mut events = vec![Event::Reserved(Reserved { cached_tokens: 0, local_prefill: true })];
    let mut rest = &ids[..];
    for &count in counts {
        let first_index = (ids.len() - rest.len()) as u32;
        let (now, later) = rest.split_at(count);
        let tokens = now.iter().map(|&id| token(id)).collect();
        events.push(Event::Tokens(DecodeTokens { first_index, tokens }));
        rest = later;
    }
    assert!(rest.is_empty());
    let reason = FinishReason::Stop.into();
    events.push(Event::Finished(DecodeFinished { reason, received_bytes: 0, transfer_us: 0 }));
    events
}

async fn ask(counts: &[usize], more: &Value) -> Value {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::DecodeEvents(events(counts)));
    let mut body = json!({"prompt": "count", "max_tokens": 50, "logprobs": 1});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    cluster.client.post("/v1/completions", &body).await.json()
}

#[tokio::test]
async fn text_usage_and_logprobs_are_independent_of_tokens_per_event() {
    let count = encode(ANSWER).len() + 1;
    for counts in [vec![1; count], vec![1, count - 1], vec![count], vec![3, 2, count - 5]] {
        let answer = ask(&counts, &json!({})).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["text"], ANSWER, "{counts:?}");
        assert_eq!(choice["finish_reason"], "stop");
        assert_eq!(answer["usage"]["completion_tokens"], count, "{counts:?}");
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        assert!(logprobs.len() >= count - 1, "{logprobs:?}");
        assert!(logprobs.iter().all(|logprob| *logprob == -0.5), "{logprobs:?}");
    }
}

#[tokio::test]
async fn a_stop_string_in_the_middle_of_an_event_ends_the_answer_there() {
    let count = encode(ANSWER).len() + 1;
    let stop = json!({"stop": [" four"]});
    let one_by_one = ask(&vec![1; count], &stop).await;
    assert_eq!(one_by_one["choices"][0]["text"], " one two three");
    for counts in [vec![count], vec![2, count - 2], vec![4, count - 4]] {
        let answer = ask(&counts, &stop).await;
        for part in ["choices", "usage"] {
            assert_eq!(answer[part], one_by_one[part], "{counts:?}");
        }
    }
}

#[tokio::test]
async fn one_write_has_the_finish_reason_and_the_end_of_the_stream() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let count = encode(ANSWER).len() + 1;
    cluster.decode[0].behave(Behaviour::DecodeEvents(events(&[count])));
    let body = json!({"prompt": "count", "max_tokens": 50, "stream": true});
    let response = cluster.client.send(Method::POST, "/v1/completions", &[], body.to_string());
    let mut body = response.await.into_body();
    let mut last = Bytes::new();
    while let Some(frame) = body.frame().await {
        last = frame.unwrap().into_data().unwrap_or_default();
    }
    let last = str::from_utf8(&last).unwrap();
    assert!(last.contains(r#""finish_reason":"stop""#), "{last}");
    assert!(last.ends_with("data: [DONE]\n\n"), "{last}");
}
