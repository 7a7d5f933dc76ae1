//! Effects of an attempt's output on later attempts: they use the same model, and an answer that
//! ends with token 0 needs no further attempt.

mod common;

use std::time::Duration;

use common::{
    Cluster,
    client::ids_of,
    encode, long_prompt,
    node::{Behaviour, END, ScriptedNode},
    settings,
};
use proto::v1::{FailureKind, NodeLoad, Role};
use router::RouterSettings;
use serde_json::{Value, json};

const ANSWER: &str = " one two three four five";

/// Starts two decode nodes with different weights. The router prefers the first.
async fn two_models() -> Cluster {
    two_models_with(settings()).await
}

async fn two_models_with(settings: RouterSettings) -> Cluster {
    let node = |name, fingerprint| {
        ScriptedNode::start_at(Role::Decode, name, "127.0.0.1:0".parse().unwrap(), fingerprint)
    };
    let decode = vec![node("decode-0", 7), node("decode-1", 9)];
    for node in &decode {
        node.answer_with(&encode(ANSWER));
    }
    decode[1].report(NodeLoad { waiting: 1000, pending_prompt_tokens: 5000, ..Default::default() });
    Cluster::start_over(settings, vec![], decode).await
}

async fn events(cluster: &Cluster) -> Vec<String> {
    let body = json!({"prompt": long_prompt(), "max_tokens": 50, "stream": true,
        "return_token_ids": true});
    cluster.client.stream("/v1/completions", &body).await.all().await
}

fn chunks(events: &[String]) -> Vec<Value> {
    let data = events.iter().filter(|event| *event != "[DONE]");
    data.map(|event| serde_json::from_str(event).unwrap()).collect()
}

fn expected() -> Vec<u32> {
    [encode(ANSWER), vec![END]].concat()
}

#[tokio::test]
async fn answer_resumes_only_on_the_model_that_started_it() {
    let cluster = two_models().await;
    let fails = Behaviour::FailAfter(3, FailureKind::Internal);
    cluster.decode[0].behave_in_turn(vec![fails, Behaviour::Serve]);
    assert_eq!(ids_of(&chunks(&events(&cluster).await), 0), expected());
    assert_eq!(cluster.decode[0].calls().len(), 2);
    assert_eq!(cluster.decode[0].calls()[1].attempt.tokens.len(), 103);
    assert!(cluster.decode[1].calls().is_empty());
}

#[tokio::test]
async fn answer_fails_without_the_model_that_started_it() {
    let mut settings = settings();
    // The request waits for a node with the same model until its deadline.
    settings.router.timeout = Duration::from_secs(5);
    let mut cluster = two_models_with(settings).await;
    cluster.decode[0].behave(Behaviour::HangAfter(2));
    let body = json!({"prompt": long_prompt(), "max_tokens": 50, "stream": true});
    let mut stream = cluster.client.stream("/v1/completions", &body).await;
    stream.next().await.unwrap();
    cluster.decode[0].kill();
    let last = stream.all().await.pop().unwrap();
    let last: Value = serde_json::from_str(&last).unwrap();
    assert_eq!(last["error"]["code"], "no_decode_node", "{last}");
    assert!(cluster.decode[1].calls().is_empty());
}

#[tokio::test]
async fn answer_without_tokens_may_move_to_another_model() {
    let cluster = two_models().await;
    cluster.decode[0].behave(Behaviour::FailAfter(0, FailureKind::Internal));
    assert_eq!(ids_of(&chunks(&events(&cluster).await), 0), expected());
    assert_eq!((cluster.decode[0].calls().len(), cluster.decode[1].calls().len()), (1, 1));
}

#[tokio::test]
async fn transfer_aborted_after_a_final_token_0_uses_no_attempt() {
    // The prefill node reports the end of the answer after the decode node has aborted the
    // transfer.
    for max_tokens in [1, 50] {
        let cluster = Cluster::start(1, 1, if max_tokens == 1 { ANSWER } else { "" }).await;
        cluster.prefill[0].set_token_time(Duration::from_millis(50));
        cluster.decode[0].behave(Behaviour::FailAfter(0, FailureKind::TransferFailed));
        let body = json!({"prompt": long_prompt(), "max_tokens": max_tokens});
        let answer = cluster.client.post("/v1/completions", &body).await.json();
        let reason = if max_tokens == 1 { "length" } else { "stop" };
        assert_eq!(answer["choices"][0]["finish_reason"], reason, "{answer}");
        assert_eq!(answer["usage"]["completion_tokens"], 1);
        assert_eq!(cluster.decode[0].calls().len(), 1);
        assert_eq!(cluster.metric("baton_attempts_total", &["transfer_failed"]).await, 0.0);
    }
}
