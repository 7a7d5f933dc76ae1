//! `GET /v1/explain` on the admin port: the accounts of requests.

mod common;

use common::{
    Cluster,
    client::{Answer, Client},
    long_prompt,
    node::{Behaviour, ScriptedNode},
    settings,
};
use proto::v1::Role;
use serde_json::{Value, json};
use tonic::Code;

const ANSWER: &str = " one two three";

/// Sends a completion with this label and returns its status.
async fn complete(cluster: &Cluster, label: &str, prompt: &[u32]) -> u16 {
    let body = json!({"prompt": prompt, "max_tokens": 20});
    let headers = [("x-request-id", label)];
    cluster.client.post_with("/v1/completions", &headers, &body).await.status.as_u16()
}

/// Asks the admin port.
async fn ask(cluster: &Cluster, query: &str) -> Answer {
    let admin = Client::new(format!("http://{}", cluster.router.admin));
    admin.get(&format!("/v1/explain{query}")).await
}

/// Returns the requests of a query.
async fn explain(cluster: &Cluster, query: &str) -> Vec<Value> {
    let answer = ask(cluster, query).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["requests"].as_array().unwrap().clone()
}

async fn explain_one(cluster: &Cluster, label: &str) -> Value {
    let mut found = explain(cluster, &format!("/{label}")).await;
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

#[tokio::test]
async fn disaggregated_and_short_requests_are_explained() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    assert_eq!(complete(&cluster, "long", &long_prompt()).await, 200);
    let long = explain_one(&cluster, "long").await;
    assert_eq!((&long["end"], &long["prompt_tokens"]), (&json!("stop"), &json!(100)));
    let attempt = &long["attempts"][0];
    assert_eq!(
        (&attempt["disaggregated"], &attempt["outcome"]),
        (&json!(true), &json!("complete"))
    );
    let reason = attempt["reason"].as_str().unwrap();
    assert!(reason.starts_with("no prediction"), "scripted nodes measure no steps: {reason}");
    let [pair] = attempt["options"].as_array().unwrap().as_slice() else { panic!("{attempt}") };
    assert_eq!(pair, &json!({"prefill_node": "prefill-0", "decode_node": "decode-0"}));
    let nodes = attempt["nodes"].as_array().unwrap();
    assert_eq!(nodes[1]["cached_found"], 16);
    // Unknown if the answer ends before the prefill node's first event arrives.
    assert!([json!(0), Value::Null].contains(&nodes[0]["cached_found"]), "{attempt}");
    // Scripted nodes send no stage times, as nodes of an older release.
    let stages = long["stages"].as_array().unwrap();
    let stage = |name: &str| stages.iter().find(|stage| stage["stage"] == name).unwrap();
    assert!(stage("queue")["ms"].is_null() && stage("until first token")["ms"].is_number());
    assert!(stage("transfer")["ms"].is_number());
    let by_id = explain_one(&cluster, long["request_id"].as_str().unwrap()).await;
    assert_eq!(by_id["label"], "long");

    assert_eq!(complete(&cluster, "short", &long_prompt()[..8]).await, 200);
    let short = explain_one(&cluster, "short").await;
    let attempt = &short["attempts"][0];
    assert_eq!(attempt["disaggregated"], false);
    assert_eq!(attempt["reason"], "short prompt: 8 tokens fill no KV block of 16");

    let slow = explain(&cluster, "?slow=1").await;
    assert_eq!(slow.len(), 1);
    let recent = explain(&cluster, "?recent=9").await;
    assert_eq!((recent.len(), &recent[0]["label"]), (2, &json!("short")));
    assert!(explain(&cluster, "?failed").await.is_empty());
}

#[tokio::test]
async fn failed_attempts_and_requests_are_explained() {
    let decode = ScriptedNode::start(Role::Decode, "decode-0");
    decode.behave(Behaviour::Refuse(Code::Internal, "a bug"));
    let cluster = Cluster::start_over(settings(), vec![], vec![decode]).await;
    assert_eq!(complete(&cluster, "failing", &long_prompt()).await, 502);
    let [failed]: [Value; 1] = explain(&cluster, "?failed").await.try_into().unwrap();
    assert_eq!((&failed["label"], &failed["ttft_ms"]), (&json!("failing"), &Value::Null));
    assert!(failed["error"].as_str().unwrap().contains("a bug"), "{failed}");
    let attempts = failed["attempts"].as_array().unwrap();
    assert_eq!(attempts.len(), 8);
    assert_eq!(attempts[0]["reason"], "no prefill node is listed");
    assert_eq!(attempts[1]["waited_for"], "every decode node has failed this request already");
    for attempt in attempts {
        assert!(attempt["failure"].as_str().unwrap().contains("a bug"), "{attempt}");
    }
    assert_eq!(failed["stages"][3]["stage"], "until failure");
}

#[tokio::test]
async fn unknown_request_is_answered_with_what_is_kept() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    assert_eq!(complete(&cluster, "known", &long_prompt()).await, 200);
    assert_eq!(cluster.client.get("/v1/explain/known").await.status, 404, "the public port");
    let answer = ask(&cluster, "/nobody%20knows").await;
    assert_eq!(answer.status, 404);
    let message = answer.message();
    for words in ["\"nobody knows\"", "its 0 running requests", "the last 1 that ended", "s ago"] {
        assert!(message.contains(words), "{message}");
    }
    for query in ["", "?slow=0", "?recent=0", "?slow=many", "?other"] {
        let answer = ask(&cluster, query).await;
        assert_eq!(answer.status, 400, "{query}");
        assert!(answer.message().contains("allowed: /v1/explain/ID"), "{query}");
    }
}
