//! Clusters of real nodes generate the same tokens with and without speculative decoding: greedy,
//! seeded and constrained, across hand-over, prefix hits, preemption and migration.

use anyhow::{Context, Result};
use futures_util::future::try_join_all;
use integration_tests::{
    client::greedy_body,
    cluster::{Cluster, ClusterSpec, busy_node},
    golden::{longest, run_named},
};
use serde_json::{Value, json};

const TOKENS: usize = 60;

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Returns a prompt that repeats itself, so that n-grams propose draft tokens.
fn repeating() -> Vec<u32> {
    run_named("code").prompt_ids.repeat(4)
}

fn grammar() -> Value {
    let step = json!({
        "type": "object",
        "properties": {
            "step_description": {"type": "string", "maxLength": 16},
            "expected_duration_seconds": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["step_description", "expected_duration_seconds"],
        "additionalProperties": false,
    });
    let schema = json!({"type": "array", "items": step, "minItems": 2, "maxItems": 3});
    let format = json!({"type": "json_schema", "json_schema": {"name": "plan", "schema": schema}});
    json!({"response_format": format, "ignore_eos": false})
}

/// Returns the sampling parameters of each kind of request.
fn kinds() -> [Value; 5] {
    let seeded = |temperature: f32, seed: u32| json!({"temperature": temperature, "seed": seed});
    [json!({}), seeded(0.3, 3), seeded(1.2, 4), grammar(), with(grammar(), seeded(0.9, 5))]
}

fn bodies() -> Vec<Value> {
    let of = |prompt: &[u32]| kinds().map(|kind| with(greedy_body(prompt, TOKENS), kind));
    of(&repeating()).into_iter().chain(of(&longest().prompt_ids).into_iter().take(3)).collect()
}

fn speculating(prefill: usize, decode: usize) -> ClusterSpec {
    ClusterSpec::smollm2().nodes(prefill, decode).set("BATON_NODE_SPECULATE", "ngram")
}

/// Returns the tokens of each request on one node without speculative decoding, one request at a
/// time.
async fn plain_tokens(bodies: &[Value]) -> Result<Vec<Vec<u32>>> {
    let (cluster, client) = Cluster::start_with_client(ClusterSpec::smollm2().nodes(0, 1)).await?;
    let mut tokens = Vec::new();
    for body in bodies {
        tokens.push(client.complete(body).await?.token_ids);
    }
    assert_eq!(cluster.decode[0].metric("baton_speculation_drafted_total").await?, 0.0);
    cluster.stop()?;
    Ok(tokens)
}

async fn accepted(cluster: &Cluster) -> Result<f64> {
    let mut sum = 0.0;
    for node in &cluster.decode {
        sum += node.metric("baton_speculation_accepted_total").await?;
    }
    Ok(sum)
}

#[tokio::test]
async fn hand_over_and_prefix_hits_keep_tokens() -> Result<()> {
    let bodies = bodies();
    let expected = plain_tokens(&bodies).await?;
    // The decode node alone could be faster on a busy machine.
    let spec = speculating(1, 1).set("BATON_ROUTER_DISAGGREGATE", "always");
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    for round in 0..2 {
        let answers = try_join_all(bodies.iter().map(|body| client.complete(body))).await?;
        for ((body, answer), expected) in bodies.iter().zip(&answers).zip(&expected) {
            assert_eq!(&answer.token_ids, expected, "round {round}: {body}");
            assert!(round == 0 || answer.cached_tokens > 0, "round {round}: {answer:?}");
        }
        assert_eq!(answers.iter().any(|answer| answer.kv_bytes > 0), round == 0, "round {round}");
    }
    assert!(accepted(&cluster).await? > 0.0);
    cluster.stop()
}

#[tokio::test]
async fn preemption_keeps_tokens() -> Result<()> {
    let request = |(salt, kind)| with(greedy_body(&repeating(), TOKENS), with(kind, salt));
    let salts = (0..).map(|index| json!({"cache_salt": format!("{index}")}));
    let bodies: Vec<Value> = salts.zip(kinds().into_iter().chain(kinds())).map(request).collect();
    let expected = plain_tokens(&bodies).await?;
    // A sequence has 5 blocks at first and 9 in the end.
    let (cluster, client) =
        Cluster::start_with_client(speculating(0, 1).set("BATON_NODE_BLOCKS", 40)).await?;
    let answers = try_join_all(bodies.iter().map(|body| client.complete(body))).await?;
    for ((body, answer), expected) in bodies.iter().zip(&answers).zip(&expected) {
        assert_eq!(&answer.token_ids, expected, "{body}");
    }
    assert!(cluster.decode[0].metric("baton_preemptions_total").await? > 0.0);
    assert!(accepted(&cluster).await? > 0.0);
    cluster.stop()
}

#[tokio::test]
async fn migration_keeps_tokens() -> Result<()> {
    let bodies = kinds().map(|kind| with(greedy_body(&repeating(), TOKENS), kind));
    let expected = plain_tokens(&bodies).await?;
    let (mut cluster, client) = Cluster::start_with_client(speculating(1, 2)).await?;
    for (index, (body, expected)) in bodies.iter().zip(&expected).enumerate() {
        // The other nodes have cached nothing.
        let body = with(body.clone(), json!({"cache_salt": format!("{index}")}));
        let headers = [("x-baton-stats", "1")];
        let mut stream = client.stream_with("/v1/completions", &body, &headers).await?;
        let (mut found, mut attempts, mut killed) = (Vec::new(), 0, None);
        while let Some(event) = stream.next().await? {
            found.extend(event.token_ids());
            if killed.is_none() && found.len() > 2 * index {
                let serving = busy_node(&cluster.decode).await?;
                cluster.decode[serving].kill();
                killed = Some(serving);
            }
            if !event.is_done() {
                let event = event.json();
                assert!(event["error"].is_null(), "{event}");
                attempts = event["baton"]["attempts"].as_u64().unwrap_or(attempts);
            }
        }
        assert_eq!(&found, expected, "{body}");
        assert!(attempts >= 2, "{attempts} attempts: {body}");
        cluster.restart_decode(killed.context("a node was killed")?)?;
        cluster.wait_nodes(1, 2).await?;
    }
    Ok(())
}
