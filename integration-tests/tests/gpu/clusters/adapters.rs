//! LoRA adapters in clusters on GPUs: hand-over, ranks, and a load while the nodes serve.

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::{Client, salted_body},
    cluster::{Cluster, ClusterSpec},
};
use serde_json::json;
use tempfile::TempDir;
use test_harness::adapter::{self, ModelShape};

use super::{Fixture, Shape, run_on};

/// The model that [`write_model`](super::write_model) writes for GPUs.
const SHAPE: ModelShape = ModelShape { layers: 6, hidden: 512, queries: 512, keys: 256, ffn: 1024 };
const NAMES: [&str; 2] = ["sql", "law"];
const TOKENS: usize = 24;

/// Writes the adapters, and returns the value of `model.adapters`.
fn written(folder: &TempDir) -> Result<String> {
    let mut pairs = Vec::new();
    for (seed, name) in (1..).zip(NAMES) {
        let folder = folder.path().join(name);
        std::fs::create_dir(&folder)?;
        adapter::write(&folder, SHAPE, 8 * seed as usize, seed, 0.1)?;
        pairs.push(format!("{name}={}", folder.display()));
    }
    Ok(pairs.join(","))
}

/// Returns the name of the base model.
async fn base(client: &Client) -> Result<String> {
    let (_, models) = client.get_json("/v1/models").await?;
    let models = models["data"].as_array().context("no models")?;
    let base = models.iter().find(|card| card["parent"].is_null()).context("no base model")?;
    Ok(base["id"].as_str().context("no name")?.to_owned())
}

/// Returns the tokens of the base model and of both adapters, and the bytes of transferred KV.
async fn answers(client: &Client, fixture: &Fixture) -> Result<(Vec<Vec<u32>>, u64)> {
    let base = base(client).await?;
    let names = [base.clone()].into_iter().chain(NAMES.map(|name| format!("{base}:{name}")));
    let (mut answers, mut kv_bytes) = (Vec::new(), 0);
    for name in names {
        let mut body = salted_body(&fixture.requests[4].prompt, TOKENS, &name);
        body["model"] = json!(name);
        let answer = client.complete(&body).await?;
        kv_bytes += answer.kv_bytes;
        answers.push(answer.token_ids);
    }
    Ok((answers, kv_bytes))
}

/// Checks that the first third of the tokens is equal. Later ones may differ: the steps of two
/// nodes have other rows, and bf16 rounds their sums differently.
fn ensure_begins_equally(found: &[u32], wanted: &[u32]) -> Result<()> {
    let equal = found.iter().zip(wanted).take_while(|(found, wanted)| found == wanted).count();
    ensure!(equal >= wanted.len() / 3, "{found:?} {wanted:?}");
    Ok(())
}

/// Compares a cluster with a single node. Loads the adapters while the nodes serve unless the nodes
/// have ranks.
async fn check(fixture: &Fixture, shape: Shape) -> Result<()> {
    let folder = TempDir::new()?;
    let value = written(&folder)?;
    let alone = Shape { decode: vec![vec![0]], ..Shape::default() };
    let spec = |shape| ClusterSpec { dtype: "bf16", ..fixture.spec(shape) };
    let cluster = Cluster::start(spec(&alone).set("BATON_MODEL_ADAPTERS", &value)).await?;
    let client = Client::new(cluster.http());
    let (wanted, _) = answers(&client, fixture).await?;
    let running = &fixture.requests[0];
    let running = salted_body(&running.prompt, running.tokens, "running");
    let undisturbed = client.complete(&running).await?.token_ids;
    cluster.stop()?;
    ensure!(wanted[0][0] != wanted[1][0] && wanted[1][0] != wanted[2][0], "{wanted:?}");

    let has_ranks = shape.decode[0].len() > 1;
    let spec = spec(&shape);
    let spec = match has_ranks {
        true => spec.set("BATON_MODEL_ADAPTERS", &value),
        false => spec.set("BATON_MODEL_ADAPTER_SLOTS", 2),
    };
    let cluster = Cluster::start(spec).await?;
    let client = Client::new(cluster.http());
    let operator = Client::new(format!("http://{}", cluster.router.ready.admin));
    if !has_ranks {
        let mut stream = client.stream("/v1/completions", &running).await?;
        let mut found = stream.next().await?.context("the stream goes on")?.token_ids();
        for pair in value.split(',') {
            let (name, folder) = pair.split_once('=').context("a pair")?;
            let body = json!({"lora_name": name, "lora_path": folder});
            let loaded = operator.post("/v1/load_lora_adapter", &body).await?;
            ensure!(loaded.status.as_u16() == 200, "{}", loaded.json());
        }
        found.extend(stream.token_ids().await?);
        ensure!(found.len() == undisturbed.len(), "{} tokens", found.len());
        ensure_begins_equally(&found, &undisturbed)?;
    }
    let (found, kv_bytes) = answers(&client, fixture).await?;
    ensure!(kv_bytes > 0, "no KV was transferred");
    for (found, wanted) in found.iter().zip(&wanted) {
        ensure_begins_equally(found, wanted)?;
    }
    if !has_ranks {
        let unloaded =
            operator.post("/v1/unload_lora_adapter", &json!({"lora_name": "sql"})).await?;
        ensure!(unloaded.status.as_u16() == 200, "{}", unloaded.json());
        let mut body = salted_body(&fixture.requests[0].prompt, TOKENS, "unloaded");
        body["model"] = json!(format!("{}:sql", base(&client).await?));
        ensure!(client.post("/v1/completions", &body).await?.status.as_u16() == 404);
    }
    cluster.stop()
}

pub(crate) fn pair_on_one_gpu_computes_adapters_loaded_while_it_serves() {
    run_on(1, async |fixture| {
        fixture.require_gpus();
        check(&fixture, Shape::new(&[&[0]], &[&[0]], "ipc")).await
    });
}

pub(crate) fn tp_nodes_on_two_gpus_compute_adapters() {
    run_on(2, async |fixture| {
        fixture.require_gpus();
        check(&fixture, Shape::new(&[&[0, 1]], &[&[0, 1]], "ipc")).await
    });
}
