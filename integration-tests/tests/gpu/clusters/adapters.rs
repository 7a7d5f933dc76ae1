//! LoRA adapters in clusters on GPUs: hand-over, ranks, and a load while the nodes serve.

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::{Client, salted_body},
    cluster::{Cluster, ClusterSpec},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use test_harness::adapter::{self, ModelShape};

use super::{Fixture, Request, Shape, Wanted, run_on};

/// The model that [`write_model`](super::write_model) writes for GPUs.
const SHAPE: ModelShape = ModelShape { layers: 6, hidden: 512, queries: 512, keys: 256, ffn: 1024 };
const NAMES: [&str; 2] = ["sql", "law"];
const TOKENS: usize = 24;
/// Smallest logit margin of a certain token in bf16, whose sums are rounded at other places when
/// the rows or the ranks are others.
const CERTAIN_MARGIN: f32 = 0.1;

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

/// Returns requests to the base model and to both adapters.
async fn requests(client: &Client, fixture: &Fixture) -> Result<Vec<Value>> {
    let base = base(client).await?;
    let names = [base.clone()].into_iter().chain(NAMES.map(|name| format!("{base}:{name}")));
    let request = |name: String| {
        let mut body = salted_body(&fixture.requests[4].prompt, TOKENS, &name);
        body["model"] = json!(name);
        body
    };
    Ok(names.map(request).collect())
}

/// Checks that the first third of the tokens is equal, up to a token that is not certain. Later
/// tokens may differ: a token that differs changes all tokens after it. Returns whether no token of
/// the first third differs.
fn begins_equally(found: &[u32], wanted: &Wanted) -> Result<bool> {
    let third = wanted.tokens.len() / 3;
    ensure!(found.len() >= third, "{} tokens", found.len());
    let Some(at) = (0..third).find(|&at| found[at] != wanted.tokens[at]) else { return Ok(true) };
    let margin = wanted.margins[at];
    println!("token {at} differs, with a margin of {margin}");
    ensure!(margin < CERTAIN_MARGIN, "token {at}: {found:?} {:?}, margin {margin}", wanted.tokens);
    Ok(false)
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
    let mut wanted = Vec::new();
    for body in requests(&client, fixture).await? {
        wanted.push(Wanted::of(&client, body, TOKENS).await?);
    }
    let Request { prompt, tokens } = &fixture.requests[0];
    let running = salted_body(prompt, *tokens, "running");
    let undisturbed = Wanted::of(&client, running.clone(), *tokens).await?;
    cluster.stop()?;
    let firsts: Vec<u32> = wanted.iter().map(|answer| answer.tokens[0]).collect();
    ensure!(firsts[0] != firsts[1] && firsts[1] != firsts[2], "{firsts:?}");

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
        ensure!(found.len() == *tokens, "{} tokens", found.len());
        ensure!(begins_equally(&found, &undisturbed)?, "{found:?} {:?}", undisturbed.tokens);
    }
    let (mut kv_bytes, mut equal) = (0, 0);
    for (body, wanted) in requests(&client, fixture).await?.iter().zip(&wanted) {
        let answer = client.complete(body).await?;
        kv_bytes += answer.kv_bytes;
        equal += usize::from(begins_equally(&answer.token_ids, wanted)?);
    }
    ensure!(kv_bytes > 0, "no KV was transferred");
    ensure!(equal >= 2, "{equal} of 3 answers begin equally");
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
