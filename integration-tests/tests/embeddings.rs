//! Embeddings and scores through a cluster of real processes, compared with those of transformers
//! for the same folders (`pooling/models.py`), and with the unmodified OpenAI client.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result};
use integration_tests::{
    client::Client,
    cluster::{Cluster, ClusterSpec},
    command::output,
};
use serde::Deserialize;
use serde_json::{Value, json};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("pooling")
}

#[derive(Deserialize)]
struct Golden {
    query: String,
    qwen3_embedding: Vec<Embedded>,
    /// With the prompt `query`.
    qwen3_query: Vec<Embedded>,
    e5_mistral: Vec<Embedded>,
    qwen3_reranker: Vec<Judged>,
}

#[derive(Deserialize)]
struct Embedded {
    text: String,
    tokens: Vec<u32>,
    embedding: Vec<f64>,
}

#[derive(Deserialize)]
struct Judged {
    document: String,
    tokens: u64,
    score: f64,
}

fn golden() -> Result<Golden> {
    Ok(serde_json::from_slice(&std::fs::read(folder().join("golden.json"))?)?)
}

async fn start(model: &str, prefill: usize) -> Result<Cluster> {
    let spec = ClusterSpec { model: folder().join(model), ..ClusterSpec::of(prefill, 1) };
    Cluster::start(spec.set("BATON_NODE_KV_MEMORY", "8MiB")).await
}

async fn post(client: &Client, path: &str, body: Value) -> Result<Value> {
    let answer = client.post(path, &body).await?;
    assert_eq!(answer.status, 200, "{}", answer.json());
    Ok(answer.json())
}

/// Returns the vectors of the inputs, and the number of tokens.
async fn embed(client: &Client, body: Value) -> Result<(Vec<Vec<f64>>, u64)> {
    let answer = post(client, "/v1/embeddings", body).await?;
    let data = answer["data"].as_array().context("a list")?;
    let vector = |entry: &Value| serde_json::from_value(entry["embedding"].clone());
    let vectors = data.iter().map(vector).collect::<Result<_, _>>()?;
    Ok((vectors, answer["usage"]["prompt_tokens"].as_u64().context("a count")?))
}

fn assert_near(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let worst = differences.fold(0.0, f64::max);
    assert!(worst < 1e-5, "{what} is off by {worst}");
}

/// Asserts that texts and their token ids have the vectors of transformers, alone and in one
/// request, bit by bit.
async fn assert_embeds(client: &Client, expected: &[Embedded], prompt: Option<&str>) -> Result<()> {
    let mut alone = Vec::new();
    for row in expected {
        let body = json!({"input": row.text, "prompt_name": prompt});
        let (vectors, count) = embed(client, body).await?;
        assert_eq!(count, row.tokens.len() as u64, "{:?}", row.text);
        assert_near(&vectors[0], &row.embedding, &row.text);
        let (of_tokens, _) = embed(client, json!({"input": row.tokens})).await?;
        assert_eq!(of_tokens, vectors, "{:?}", row.text);
        alone.extend(vectors);
    }
    let texts: Vec<&str> = expected.iter().map(|row| row.text.as_str()).collect();
    let body = json!({"input": texts.repeat(20), "prompt_name": prompt});
    for (index, vector) in embed(client, body).await?.0.iter().enumerate() {
        assert_eq!(*vector, alone[index % alone.len()], "{index}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn embeddings_and_scores_are_those_of_transformers() -> Result<()> {
    let golden = golden()?;
    for prefill in [1, 0] {
        let cluster = start("qwen3_embedding", prefill).await?;
        let client = Client::new(cluster.http());
        assert_embeds(&client, &golden.qwen3_embedding, None).await?;
        assert_embeds(&client, &golden.qwen3_query, Some("query")).await?;
        cluster.stop()?;
    }
    let cluster = start("e5_mistral", 1).await?;
    assert_embeds(&Client::new(cluster.http()), &golden.e5_mistral, None).await?;
    cluster.stop()?;

    let cluster = start("qwen3_reranker", 1).await?;
    let client = Client::new(cluster.http());
    let judged = &golden.qwen3_reranker;
    let documents: Vec<&str> = judged.iter().map(|row| row.document.as_str()).collect();
    let body = json!({"text_1": golden.query, "text_2": documents});
    let scored = post(&client, "/v1/score", body).await?;
    let data = scored["data"].as_array().context("a list")?;
    let scores: Vec<f64> = data.iter().filter_map(|entry| entry["score"].as_f64()).collect();
    let expected: Vec<f64> = judged.iter().map(|row| row.score).collect();
    assert_near(&scores, &expected, "scores");
    let tokens: u64 = judged.iter().map(|row| row.tokens).sum();
    assert_eq!(scored["usage"]["total_tokens"], tokens);
    let body = json!({"query": golden.query, "documents": documents, "top_n": 2});
    let ranked = post(&client, "/v1/rerank", body).await?;
    let mut order: Vec<usize> = (0..expected.len()).collect();
    order.sort_by(|a, b| expected[*b].total_cmp(&expected[*a]));
    let results = ranked["results"].as_array().context("a list")?;
    let indices: Vec<_> = results.iter().map(|result| result["index"].as_u64()).collect();
    assert_eq!(indices, [Some(order[0] as u64), Some(order[1] as u64)]);
    cluster.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_openai_client_embeds() -> Result<()> {
    let cluster = start("qwen3_embedding", 1).await?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/openai_embeddings.py");
    let (url, golden) = (cluster.http(), folder().join("golden.json"));
    let run = move || output(Command::new("python3").arg(script).arg(url).arg(golden));
    let output = tokio::task::spawn_blocking(run).await??;
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.trim_end().ends_with("ok"),
        "{said}{}\n(`make test` installs the client; alone: PYTHONPATH=target/site-packages)",
        String::from_utf8_lossy(&output.stderr)
    );
    cluster.stop()
}
