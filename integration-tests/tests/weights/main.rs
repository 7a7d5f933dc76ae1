//! Live weight updates of real nodes: answers equal those of nodes that started with the new
//! weights, requests in flight survive, and bad weights change nothing.

#[allow(dead_code)]
#[path = "../hugging_face/folder.rs"]
mod folder;
mod fp8;
mod in_flight;
mod routers;
mod tiers;
mod updates;

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use integration_tests::{
    client::{Client, Event},
    cluster::{Cluster, ClusterSpec, Service, smollm2},
};
use serde_json::{Value, json};

const TOKENS: usize = 24;
/// Tokens of a stream over an update.
const STREAMED: usize = 200;
const COMMITTED_WITHIN: Duration = Duration::from_secs(240);

/// Returns a client of the router's admin API.
fn admin(cluster: &Cluster) -> Client {
    admin_of(&cluster.router)
}

fn admin_of(router: &Service) -> Client {
    Client::new(format!("http://{}", router.ready.admin))
}

/// Writes SmolLM2 with other values in some weights: a model as a trainer would write it.
fn trained(folder: &Path, name: &str, flips: u8) -> PathBuf {
    let mut file = std::fs::read(smollm2()).expect("the model can be read");
    let header = gguf::Header::parse(&file).expect("the model is a GGUF file");
    let changed: Vec<(usize, usize)> = header
        .tensors()
        .iter()
        .filter(|tensor| tensor.name.ends_with("ffn_up.weight"))
        .map(|tensor| (tensor.offset as usize, tensor.bytes.unwrap_or(0) as usize))
        .collect();
    assert!(!changed.is_empty());
    for (offset, bytes) in changed {
        // The last byte of each block of Q4_1 holds two quantized values, so every float stays
        // finite.
        for block in file[offset..offset + bytes].chunks_exact_mut(20) {
            block[19] ^= flips;
        }
    }
    let path = folder.join(name);
    std::fs::create_dir(&path).expect("the folder is new");
    std::fs::write(path.join("model.gguf"), file).expect("the model can be written");
    path
}

/// Gives models at any path one name.
fn name_model(spec: ClusterSpec) -> ClusterSpec {
    spec.set("BATON_MODEL_NAME", "smollm2").set("BATON_NODE_DEVICE", "cpu")
}

async fn report(cluster: &Cluster) -> Result<Value> {
    Ok(admin(cluster).get_json("/v1/weights").await?.1)
}

/// Begins an update and waits until it has ended. Returns its report.
async fn update(cluster: &Cluster, path: &Path) -> Result<Value> {
    update_by(cluster, path, json!({"transport": "disk"})).await
}

async fn update_by(cluster: &Cluster, path: &Path, transport: Value) -> Result<Value> {
    update_with(&admin(cluster), path, transport).await
}

async fn update_with(admin: &Client, path: &Path, transport: Value) -> Result<Value> {
    let mut body = json!({"path": path, "label": "test", "commit": true, "timeout_s": 200});
    body.as_object_mut().unwrap().extend(transport.as_object().unwrap().clone());
    let answer = admin.post("/v1/weights/begin", &body).await?;
    ensure!(answer.status == 200, "{}", String::from_utf8_lossy(&answer.body));
    let id = answer.json()["update"]["id"].clone();
    let deadline = Instant::now() + COMMITTED_WITHIN;
    loop {
        let report = admin.get_json("/v1/weights").await?.1;
        ensure!(report["update"]["id"] == id, "{report}");
        if matches!(report["update"]["phase"].as_str(), Some("committed" | "aborted")) {
            return Ok(report);
        }
        ensure!(Instant::now() < deadline, "the update has not ended: {report}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn committed(cluster: &Cluster, path: &Path) -> Result<Value> {
    let report = update(cluster, path).await?;
    ensure!(report["update"]["phase"] == "committed", "{report}");
    Ok(report)
}

/// Returns the tokens of a stream, and the weight version of each.
fn labelled_tokens(events: &[Event]) -> (Vec<u32>, Vec<Value>) {
    let events = || events.iter().filter(|event| !event.is_done());
    let labels = |event: &Event| {
        let labels = event.json()["choices"][0]["weight_versions"].clone();
        labels.as_array().cloned().unwrap_or_default()
    };
    (events().flat_map(Event::token_ids).collect(), events().flat_map(labels).collect())
}

/// Waits until the report of a router meets a condition, and returns the report.
async fn wait_report(admin: &Client, is_met: impl Fn(&Value) -> bool) -> Result<Value> {
    let deadline = Instant::now() + COMMITTED_WITHIN;
    loop {
        let report = admin.get_json("/v1/weights").await?.1;
        if is_met(&report) {
            return Ok(report);
        }
        ensure!(Instant::now() < deadline, "{report}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until the latest update of a router is in this phase, and returns the report.
async fn wait_phase(admin: &Client, phase: &str) -> Result<Value> {
    wait_report(admin, |report| report["update"]["phase"] == phase).await
}

/// Waits until the router sees nodes, and this field of each has this value.
async fn wait_field(cluster: &Cluster, field: &str, value: &Value) -> Result<()> {
    let is_met = |report: &Value| {
        let nodes = report["nodes"].as_array();
        nodes.is_some_and(|it| !it.is_empty() && it.iter().all(|node| node[field] == *value))
    };
    wait_report(&admin(cluster), is_met).await.map(drop)
}

/// Waits until every node that the router sees has this version.
async fn wait_version(cluster: &Cluster, version: &Value) -> Result<()> {
    wait_field(cluster, "weight_version", version).await
}
