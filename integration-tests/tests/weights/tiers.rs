//! Updates of a node with a disk tier, whose blocks outlive the weights that they were computed
//! with.

use std::{path::Path, time::Instant};

use anyhow::{Context, Result, ensure};
use engine::tiers::SAVES_MAX;
use integration_tests::{
    client::Client,
    cluster::{Cluster, ClusterSpec, smollm2},
    golden::longest,
};
use serde_json::{Value, json};

use crate::{COMMITTED_WITHIN, committed, name_model, trained, wait_version};

const HITS: &str = "baton_tier_hits_total";
const STORED: &str = "baton_tier_blocks";
const SLOTS: &str = "baton_tier_slots";
/// Full blocks of the prompt.
const PROMPT_BLOCKS: f64 = 37.0;

/// Returns a cluster of one node with KV memory for little more than the prompt, and a disk tier
/// for four prompts.
fn spec(tier: &Path) -> ClusterSpec {
    let spec = ClusterSpec::smollm2()
        .nodes(0, 1)
        .set_decode("BATON_NODE_BLOCKS", 64)
        .set_decode("BATON_TIER_DISK_PATH", tier.display())
        .set_decode("BATON_TIER_DISK_SIZE", "128MiB")
        .set_decode("BATON_TIER_ADMISSION", "always")
        // Otherwise the node keeps prompts that return.
        .set_decode("BATON_TIER_SESSIONS", false);
    name_model(spec)
}

/// Returns the cached tokens of the prompt, and the log-probabilities, which are as exact as the
/// logits.
async fn answer(client: &Client, salt: &str) -> Result<(u64, Value)> {
    let body = json!({
        "prompt": longest().prompt_ids, "max_tokens": 8, "temperature": 0.0, "ignore_eos": true,
        "logprobs": 5, "cache_salt": salt,
    });
    let answer = client.post("/v1/completions", &body).await?;
    ensure!(answer.status == 200, "{}", String::from_utf8_lossy(&answer.body));
    let answer = answer.json();
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    Ok((cached.context("the cached tokens")?, answer["choices"][0]["logprobs"].clone()))
}

/// Fills the KV memory with other prompts.
async fn evict(client: &Client, label: &str) -> Result<()> {
    for part in 0..2 {
        answer(client, &format!("{label} {part}")).await?;
    }
    Ok(())
}

/// Evicts the prompt until it comes back from the tier. Its answers are always those that these
/// weights compute.
async fn comes_back(client: &Client, computed: &Value, label: &str) -> Result<()> {
    let deadline = Instant::now() + COMMITTED_WITHIN;
    let mut round = 0;
    loop {
        evict(client, &format!("{label} {round}")).await?;
        let (cached, answered) = answer(client, "").await?;
        assert_eq!(answered, *computed, "{label}: {cached} cached tokens");
        if cached > 0 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{label}: no hit after {round} rounds");
        round += 1;
    }
}

#[tokio::test]
async fn no_kv_of_other_weights_comes_back_from_a_tier() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let (cluster, client) = Cluster::start_with_client(spec(&folder.path().join("kv"))).await?;
    let (_, old_answer) = answer(&client, "").await?;
    cluster.decode[0].wait_metric(STORED, PROMPT_BLOCKS).await?;

    let report = committed(&cluster, &new).await?;
    wait_version(&cluster, &report["update"]["weight_version"]).await?;
    let updated = answer(&client, "").await?;
    let (_, new_answer) = answer(&client, "computed").await?;
    assert_ne!(new_answer, old_answer);
    assert_eq!(updated, (0, new_answer.clone()), "the tier has only blocks of the old weights");
    comes_back(&client, &new_answer, "new").await?;
    cluster.decode[0].wait_metric(HITS, 1.0).await?;

    committed(&cluster, &smollm2()).await?;
    assert_eq!(answer(&client, "").await?.1, old_answer);
    comes_back(&client, &old_answer, "back").await?;
    committed(&cluster, &new).await?;
    // The tier may have the blocks of the first time with these weights.
    assert_eq!(answer(&client, "").await?.1, new_answer);
    cluster.stop()
}

#[tokio::test]
async fn full_tier_of_other_weights_has_no_hit_after_a_restart() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let new = trained(folder.path(), "new", 0x11);
    let spec = || spec(&folder.path().join("kv"));
    let (cluster, client) = Cluster::start_with_client(spec()).await?;
    let node = &cluster.decode[0];
    let (_, old_answer) = answer(&client, "").await?;
    node.wait_metric(SLOTS, 1.0).await?;
    let slots = node.metric(SLOTS).await?;
    let deadline = Instant::now() + COMMITTED_WITHIN;
    let mut round = 0;
    // Slots that are being overwritten hold no block.
    while node.metric(STORED).await? + (SAVES_MAX as f64) < slots {
        ensure!(Instant::now() < deadline, "the tier is not full: {round} rounds");
        evict(&client, &format!("fill {round}")).await?;
        round += 1;
    }
    comes_back(&client, &old_answer, "old").await?;
    cluster.stop()?;

    let spec = ClusterSpec { model: new, ..spec() };
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    // Saves that the stop cut short are lost.
    cluster.decode[0].wait_metric(STORED, slots / 2.0).await?;
    let first = answer(&client, "").await?;
    let (_, new_answer) = answer(&client, "computed").await?;
    assert_ne!(new_answer, old_answer);
    assert_eq!(first, (0, new_answer.clone()), "the tier has only blocks of the old weights");
    comes_back(&client, &new_answer, "new").await?;
    cluster.stop()
}
