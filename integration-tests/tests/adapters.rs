//! LoRA adapters in a cluster: hand-over, a killed decode node, names, nodes without the adapter,
//! and adapters that are loaded and unloaded while the nodes serve.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Result;
use integration_tests::{
    client::{Answer, Client, greedy_body},
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
        let shape = ModelShape { layers: 8, ..ModelShape::SMOLLM2 };
        adapter::write(&folder, shape, 4, *seed, 0.04)?;
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

/// The operator of a cluster with one model.
struct Operator(Client);

impl Operator {
    fn of(cluster: &Cluster) -> Self {
        Self(Client::new(format!("http://{}", cluster.router.ready.admin)))
    }

    /// Loads the adapter of a pair NAME=FOLDER.
    async fn load(&self, pair: &str) -> Result<Answer> {
        let (name, folder) = pair.split_once('=').unwrap();
        let body = json!({"lora_name": name, "lora_path": folder});
        self.0.post("/v1/load_lora_adapter", &body).await
    }

    async fn unload(&self, name: &str) -> Result<Answer> {
        self.0.post("/v1/unload_lora_adapter", &json!({"lora_name": name})).await
    }

    /// Loads the adapter as soon as a slot is free.
    async fn load_when_free(&self, pair: &str) -> Result<Value> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let answer = self.load(pair).await?;
            match answer.status.as_u16() {
                200 => return Ok(answer.json()),
                409 if Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                status => anyhow::bail!("{status}: {}", answer.json()),
            }
        }
    }
}

/// Checks that an answer is an error of one line with these words.
fn assert_refused(answer: &Answer, status: u16, words: &[&str]) {
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(answer.status.as_u16(), status, "{message}");
    let has_all = words.iter().all(|word| message.contains(word));
    assert!(has_all && !message.contains('\n'), "{message}: {words:?}");
}

#[tokio::test]
async fn adapters_are_loaded_and_unloaded_while_streams_run() -> Result<()> {
    let folder = TempDir::new()?;
    let value = adapters(folder.path(), &[("sql", 1), ("law", 2)])?;
    let (sql, law) = value.split_once(',').unwrap();
    let other = adapters(folder.path(), &[("sql", 3)])?;
    let alone = answers_of_one_node(&value).await?;
    let bodies = names().map(|name| body(&name));
    let spec = ClusterSpec::smollm2().nodes(1, 1).set("BATON_MODEL_ADAPTER_SLOTS", 1);
    let (mut cluster, client) = Cluster::start_with_client(spec).await?;
    let operator = Operator::of(&cluster);

    let mut stream = client.stream("/v1/completions", &bodies[0]).await?;
    let mut found = stream.next().await?.expect("the stream goes on").token_ids();
    let loaded = operator.load(sql).await?;
    assert_eq!(loaded.status.as_u16(), 200, "{}", loaded.json());
    assert_eq!(loaded.json()["nodes"].as_array().unwrap().len(), 2);
    let adapted = client.complete(&bodies[1]).await?;
    assert_eq!((&adapted.token_ids, adapted.kv_bytes > 0), (&alone[1], true));
    found.extend(stream.token_ids().await?);
    assert_eq!(found, alone[0], "the stream of the base model");

    assert_eq!(operator.load(sql).await?.json(), loaded.json(), "a repeated load");
    assert_refused(&operator.load(&other).await?, 400, &["adapter sql on 2 of 2", "this name"]);
    assert_refused(&operator.load(law).await?, 409, &["all 1 slots", "model.adapter_slots"]);
    assert_refused(&operator.load("a=tmp/a").await?, 400, &["lora_path: \"tmp/a\""]);
    assert_refused(&operator.load("a=/tmp/../a").await?, 400, &["lora_path: \"/tmp/../a\""]);
    assert_refused(&operator.load("a:b=/tmp/a").await?, 400, &["lora_name: \"a:b\""]);
    assert_refused(&operator.load("a=/tmp/none").await?, 400, &["/tmp/none/adapter_config.json"]);
    assert_refused(&operator.unload("law").await?, 404, &["adapter law", "one of: sql"]);

    let mut stream = client.stream("/v1/completions", &bodies[1]).await?;
    let mut found = stream.next().await?.expect("the stream goes on").token_ids();
    let unloaded = operator.unload("sql").await?.json();
    let in_flight = |node: &Value| node["attempts_in_flight"].as_u64().unwrap();
    let nodes = unloaded["nodes"].as_array().unwrap();
    assert!(nodes.iter().map(in_flight).sum::<u64>() >= 1, "{unloaded}");
    assert_refused(&client.post("/v1/completions", &bodies[1]).await?, 404, &[":sql"]);
    assert_refused(&operator.load(law).await?, 409, &["until requests with unloaded adapters end"]);
    found.extend(stream.token_ids().await?);
    assert_eq!(found, alone[1], "the stream of the unloaded adapter");
    operator.load_when_free(law).await?;
    assert_eq!(client.complete(&bodies[2]).await?.token_ids, alone[2]);

    // A node that restarts has the adapters of its settings.
    cluster.decode[0].kill();
    cluster.wait_nodes(1, 0).await?;
    cluster.restart_decode(0)?;
    cluster.wait_nodes(1, 1).await?;
    assert_refused(&client.post("/v1/completions", &bodies[2]).await?, 404, &[":law"]);
    operator.load_when_free(law).await?;
    assert_eq!(client.complete(&bodies[2]).await?.token_ids, alone[2]);
    cluster.stop()
}
