//! LoRA adapters in a cluster: hand-over, a killed decode node, names, and nodes without the
//! adapter.

use std::path::Path;

use anyhow::Result;
use integration_tests::{
    client::greedy_body,
    cluster::{Cluster, ClusterSpec, busy_node},
    golden::run_named,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use test_harness::adapter::{self, ModelShape};

const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1";
const TOKENS: usize = 40;

/// Writes adapters of these names and seeds, and returns the value of `model.adapters`.
fn adapters(folder: &Path, named: &[(&str, u64)]) -> Result<String> {
    let mut values = Vec::new();
    for (name, seed) in named {
        let folder = folder.join(format!("{name}-{seed}"));
        std::fs::create_dir_all(&folder)?;
        adapter::write(&folder, ModelShape::SMOLLM2, 4, *seed, 0.04)?;
        values.push(format!("{name}={}", folder.display()));
    }
    Ok(values.join(","))
}

fn body(model: &str) -> Value {
    let mut body = greedy_body(&run_named("chat_template").prompt_ids, TOKENS);
    body["model"] = json!(model);
    body
}

fn names() -> [String; 3] {
    [MODEL.to_owned(), format!("{MODEL}:sql"), format!("{MODEL}:law")]
}

/// Returns the answers of the base model and of both adapters, one after the other on one node.
async fn answers_of_one_node(value: &str) -> Result<[Vec<u32>; 3]> {
    let spec = ClusterSpec::smollm2().nodes(0, 1).set("BATON_MODEL_ADAPTERS", value);
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let mut answers = [const { Vec::new() }; 3];
    for (answer, name) in answers.iter_mut().zip(names()) {
        *answer = client.complete(&body(&name)).await?.token_ids;
    }
    cluster.stop()?;
    Ok(answers)
}

#[tokio::test]
async fn handed_over_and_migrated_answers_of_adapters_equal_those_of_one_node() -> Result<()> {
    let folder = TempDir::new()?;
    let value = adapters(folder.path(), &[("sql", 1), ("law", 2)])?;
    let alone = answers_of_one_node(&value).await?;
    assert!(alone[0] != alone[1] && alone[1] != alone[2] && alone[0] != alone[2], "{alone:?}");
    assert_eq!(alone[0], run_named("chat_template").output_ids[..TOKENS]);

    let spec = ClusterSpec::smollm2().nodes(1, 2).set("BATON_MODEL_ADAPTERS", &value);
    let (mut cluster, client) = Cluster::start_with_client(spec).await?;
    let [base, sql, law] = names().map(|name| body(&name));
    let together =
        tokio::try_join!(client.complete(&base), client.complete(&sql), client.complete(&law))?;
    for (found, alone) in [together.0, together.1, together.2].iter().zip(&alone) {
        assert_eq!((&found.token_ids, found.cached_tokens), (alone, 0));
        assert!(found.kv_bytes > 0, "{found:?}");
    }
    // The KV of the same prompt with the same adapter is found.
    let again = client.complete(&law).await?;
    assert_eq!(again.token_ids, alone[2]);
    assert!(again.cached_tokens > 0, "{again:?}");

    let headers = [("x-baton-stats", "1")];
    let mut stream = client.stream_with("/v1/completions", &sql, &headers).await?;
    let mut found = Vec::new();
    while found.len() < 2 {
        found.extend(stream.next().await?.expect("the stream goes on").token_ids());
    }
    let victim = busy_node(&cluster.decode).await?;
    cluster.decode[victim].kill();
    let rest = stream.completion().await?;
    found.extend(&rest.token_ids);
    assert_eq!(found, alone[1]);
    assert!(rest.attempts >= 2, "{rest:?}");
    cluster.restart_decode(victim)?;
    cluster.stop()
}

#[tokio::test]
async fn adapters_are_listed_and_computed_by_nodes_that_have_their_content() -> Result<()> {
    let folder = TempDir::new()?;
    let both = adapters(folder.path(), &[("sql", 1), ("law", 2)])?;
    let other = adapters(folder.path(), &[("law", 3)])?;
    let alone = answers_of_one_node(&both).await?;
    // The prefill node has another adapter of this name.
    let spec = ClusterSpec::smollm2()
        .set_prefill("BATON_MODEL_ADAPTERS", other)
        .set_decode("BATON_MODEL_ADAPTERS", both);
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let (_, models) = client.get_json("/v1/models").await?;
    let models = models["data"].as_array().unwrap();
    let models: Vec<_> =
        models.iter().map(|card| [&card["id"], &card["root"], &card["parent"]]).collect();
    let [base, sql, law] = names().map(|name| json!(name));
    assert_eq!(models, [[&base, &base, &Value::Null], [&law, &base, &base], [&sql, &base, &base]]);
    for (name, alone) in names().iter().zip(&alone) {
        let found = client.complete(&body(name)).await?;
        assert_eq!((&found.token_ids, found.kv_bytes > 0), (alone, name == MODEL), "{name}");
    }
    let unknown = client.post("/v1/completions", &body(&format!("{MODEL}:none"))).await?;
    let message = unknown.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(unknown.status.as_u16(), 404);
    assert!(message.contains(&format!("{MODEL}:law")), "{message}");
    cluster.stop()
}

#[tokio::test]
async fn ranks_compute_adapters() -> Result<()> {
    let folder = TempDir::new()?;
    let value = adapters(folder.path(), &[("sql", 1), ("law", 2)])?;
    let alone = answers_of_one_node(&value).await?;
    let spec = ClusterSpec::smollm2().set("BATON_MODEL_ADAPTERS", &value).set("BATON_NODE_TP", 3);
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    for (name, alone) in names().iter().zip(&alone) {
        assert_eq!(&client.complete(&body(name)).await?.token_ids, alone, "{name}");
    }
    cluster.stop()
}
