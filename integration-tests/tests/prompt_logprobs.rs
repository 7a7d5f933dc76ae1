//! Log-probabilities of prompts from a real model through whole clusters equal those of
//! transformers, in the form that evaluation harnesses read.

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::Client,
    cluster::{Cluster, ClusterSpec},
    golden::{GoldenRun, golden},
};
use serde_json::{Value, json};

/// Maximum difference of a log-probability from that of transformers.
const TOLERANCE: f64 = 1e-3;

/// Scores the golden output as the continuation of its prompt, as a harness does: all tokens are
/// the prompt.
async fn check(client: &Client, golden: &GoldenRun, max_tokens: u32) -> Result<()> {
    let tokens = [&golden.prompt_ids[..], &golden.output_ids].concat();
    let body = json!({"prompt": tokens, "max_tokens": max_tokens, "echo": true, "logprobs": 2,
        "temperature": 0});
    let answer = client.post("/v1/completions", &body).await?;
    ensure!(answer.status == 200, "{}", answer.json());
    let answer = answer.json();
    ensure!(answer["usage"]["completion_tokens"] == max_tokens, "{}", answer["usage"]);
    let logprobs = &answer["choices"][0]["logprobs"];
    let list = |name: &str| logprobs[name].as_array().context("a list").cloned();
    let (chosen, top) = (list("token_logprobs")?, list("top_logprobs")?);
    ensure!(chosen.len() == tokens.len() + max_tokens as usize, "{} tokens", chosen.len());
    ensure!(chosen[0].is_null() && top[0].is_null(), "the first token follows nothing");
    for (step, margin) in golden.margins.iter().enumerate() {
        let at = golden.prompt_ids.len() + step;
        let mut likely: Vec<f64> =
            top[at].as_object().context("an object")?.values().filter_map(Value::as_f64).collect();
        likely.sort_by(f64::total_cmp);
        let (best, second) = (likely[likely.len() - 1], likely[likely.len() - 2]);
        // The output is greedy, so a harness finds that it is.
        ensure!(chosen[at] == best, "{} at {at}: {} {likely:?}", golden.name, chosen[at]);
        let found = best - second;
        let expected = f64::from(*margin);
        ensure!((found - expected).abs() < TOLERANCE, "{found}, not {expected}, at {at}");
    }
    Ok(())
}

#[tokio::test]
async fn echoed_logprobs_equal_transformers_after_hand_overs_and_prefix_hits() -> Result<()> {
    for prefill_nodes in [1, 0] {
        let spec = ClusterSpec::smollm2().nodes(prefill_nodes, 1);
        let (cluster, client) = Cluster::start_with_client(spec).await?;
        for golden in golden().runs {
            // The second time the nodes have the KV of the prompt.
            for max_tokens in [1, 0] {
                check(&client, &golden, max_tokens).await.with_context(|| golden.name.clone())?;
            }
        }
        cluster.stop()?;
    }
    Ok(())
}
