//! KV that a node of one or two ranks loads from its tiers gives the logits of the resident KV, bit
//! for bit.

use anyhow::Result;
use integration_tests::{
    client::{Client, salted_body},
    cluster::{Cluster, ClusterSpec},
};
use kernels::BLOCK_TOKENS;
use serde_json::{Value, json};

use super::{Devices, Fixture, Request, Shape, run_on};

pub(super) const HOST_MEMORY: &str = "BATON_TIER_HOST_MEMORY";
const DISK_PATH: &str = "BATON_TIER_DISK_PATH";
const STORED: &str = "baton_tier_blocks";
const HITS: &str = "baton_tier_hits_total";
const DISK_SIZE: &str = "BATON_TIER_DISK_SIZE";

/// Returns the number of cached prompt tokens and the log-probabilities of the answer. Equal logits
/// give equal log-probabilities.
async fn logprobs(client: &Client, request: &Request) -> Result<(u64, Value)> {
    let body = json!({
        "prompt": request.prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": true,
        "logprobs": 5,
    });
    let answer = client.post("/v1/completions", &body).await?.json();
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    Ok((cached.as_u64().unwrap_or(0), answer["choices"][0]["logprobs"].clone()))
}

/// Returns the request with the longest prompt, and the number of the prompt's blocks that can be
/// cached.
fn longest(fixture: &Fixture) -> (&Request, u64) {
    let request = fixture.requests.iter().max_by_key(|it| it.prompt.len()).expect("not empty");
    (request, ((request.prompt.len() - 1) / BLOCK_TOKENS) as u64)
}

/// Starts one node with tiers, and with KV memory for little more than the longest prompt.
pub(super) async fn start(
    fixture: &Fixture,
    ranks: &[usize],
    tier: impl Fn(ClusterSpec) -> ClusterSpec,
) -> Result<Cluster> {
    let (_, cacheable) = longest(fixture);
    let shape = Shape { decode: vec![ranks.to_vec()], ..Shape::default() };
    let spec = fixture.spec(&shape).set_decode("BATON_NODE_BLOCKS", cacheable + 8);
    // Sessions would keep the KV of the repeated prompt for a time that depends on measured times.
    let spec = spec.set_decode("BATON_TIER_SESSIONS", false);
    Cluster::start(tier(spec).set_decode("BATON_TIER_ADMISSION", "always")).await
}

/// Lets the node save, evict and load the longest prompt. Compares the answer after the load with
/// the answer whose prefix was resident.
pub(super) async fn restored_equals_resident(cluster: &Cluster, fixture: &Fixture) -> Result<()> {
    let (request, cacheable) = longest(fixture);
    let (client, node) = (Client::new(cluster.http()), &cluster.decode[0]);
    logprobs(&client, request).await?;
    let (cached, resident) = logprobs(&client, request).await?;
    assert_eq!(cached, cacheable * BLOCK_TOKENS as u64);
    assert!(resident["token_logprobs"].is_array(), "{resident}");
    node.wait_metric(STORED, cacheable as f64).await?;
    for salt in ["one", "two"] {
        client.post("/v1/completions", &salted_body(&request.prompt, 2, salt)).await?;
    }
    let restored = logprobs(&client, request).await?;
    assert_eq!(restored, (cached, resident), "{}", node.log());
    node.wait_metric(HITS, cacheable as f64).await?;
    assert_eq!(node.metric(HITS).await?, cacheable as f64, "one load, of the whole prefix");
    Ok(())
}

/// Compares the answers for each tier that the devices can have.
async fn loads_from_every_tier(fixture: &Fixture, ranks: &[usize]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("kv");
    let disk = |spec: ClusterSpec| {
        spec.set_decode(DISK_PATH, path.display()).set_decode(DISK_SIZE, "128MiB")
    };
    if let Devices::Gpus(_) = fixture.place {
        let host = |spec: ClusterSpec| spec.set_decode(HOST_MEMORY, "256MiB");
        let cluster = start(fixture, ranks, host).await?;
        restored_equals_resident(&cluster, fixture).await?;
        cluster.stop()?;
    }
    let cluster = start(fixture, ranks, disk).await?;
    restored_equals_resident(&cluster, fixture).await?;
    cluster.stop()
}

pub(crate) fn kv_loaded_from_tiers_on_one_gpu_is_bit_identical() {
    run_on(1, async |fixture| {
        fixture.require_gpus();
        loads_from_every_tier(&fixture, &[0]).await
    });
}

pub(crate) fn kv_loaded_from_tiers_on_two_ranks_is_bit_identical() {
    run_on(2, async |fixture| loads_from_every_tier(&fixture, &[0, 1]).await);
}
