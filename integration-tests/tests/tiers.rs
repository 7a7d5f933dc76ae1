//! KV tiers of whole clusters: what a node evicted or had before a restart comes back from its disk.

use std::path::Path;

use anyhow::Result;
use integration_tests::{
    client::{Client, greedy_body, salted_body},
    cluster::{Cluster, ClusterSpec},
    golden::{GoldenRun, longest},
};
use serde_json::{Value, json};

const BLOCK_TOKENS: usize = 16;
const HITS: &str = "baton_tier_hits_total";
const STORED: &str = "baton_tier_blocks";

/// Returns a cluster whose decode node has KV memory for little more than the longest prompt.
fn spec(path: &Path) -> ClusterSpec {
    ClusterSpec::smollm2()
        .set_decode("BATON_NODE_BLOCKS", 64)
        .set_decode("BATON_TIER_DISK_PATH", path.display())
        .set_decode("BATON_TIER_DISK_SIZE", "256MiB")
        .set_decode("BATON_TIER_ADMISSION", "always")
}

/// Returns the tokens of the prompt that a hit can have.
fn cacheable(run: &GoldenRun) -> u64 {
    ((run.prompt_ids.len() - 1) / BLOCK_TOKENS * BLOCK_TOKENS) as u64
}

/// Fills the decode node's KV memory with other prompts, once the tier has what was computed before.
async fn evict(cluster: &Cluster, client: &Client, run: &GoldenRun) -> Result<()> {
    let blocks = cacheable(run) / BLOCK_TOKENS as u64;
    cluster.decode[0].wait_metric(STORED, blocks as f64).await?;
    for salt in ["one", "two"] {
        client.complete(&salted_body(&run.prompt_ids, 2, salt)).await?;
    }
    Ok(())
}

/// Returns the tokens' ids and log-probabilities, which are as exact as the logits.
async fn logprobs(client: &Client, run: &GoldenRun) -> Result<(u64, Value)> {
    let body = json!({
        "prompt": run.prompt_ids, "max_tokens": 8, "temperature": 0.0, "ignore_eos": true,
        "logprobs": 5,
    });
    let answer = client.post("/v1/completions", &body).await?.json();
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    Ok((cached.as_u64().unwrap_or(0), answer["choices"][0]["logprobs"].clone()))
}

async fn restored_equals_resident(spec: ClusterSpec) -> Result<()> {
    let run = longest();
    let (mut cluster, client) = Cluster::start_with_client(spec).await?;
    let (_, computed) = logprobs(&client, &run).await?;
    let (cached, resident) = logprobs(&client, &run).await?;
    assert_eq!(cached, cacheable(&run));
    assert_eq!(resident, computed);
    evict(&cluster, &client, &run).await?;
    let (cached, restored) = logprobs(&client, &run).await?;
    assert_eq!((cached, &restored), (cacheable(&run), &computed));
    let blocks = (cached / BLOCK_TOKENS as u64) as f64;
    cluster.decode[0].wait_metric(HITS, blocks).await?;
    assert_eq!(cluster.decode[0].metric(HITS).await?, blocks);
    cluster.restart_decode(0)?;
    cluster.wait_nodes(0, 1).await?;
    cluster.decode[0].wait_metric(STORED, blocks).await?;
    let (cached, restored) = logprobs(&client, &run).await?;
    assert_eq!((cached, &restored), (cacheable(&run), &computed), "after a restart");
    let answer = client.greedy(&run.prompt_ids, run.output_ids.len()).await?;
    assert_eq!(answer, run.output_ids);
    cluster.stop()
}

#[tokio::test]
async fn restored_prefix_gives_the_logits_of_the_resident_one() -> Result<()> {
    let folder = tempfile::tempdir()?;
    restored_equals_resident(spec(&folder.path().join("kv")).nodes(0, 1)).await
}

#[tokio::test]
async fn restored_prefix_of_three_ranks_gives_the_logits_of_the_resident_one() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let spec = spec(&folder.path().join("kv")).set_decode("BATON_NODE_TP", 3);
    restored_equals_resident(spec.nodes(0, 1)).await
}

#[tokio::test]
async fn decode_node_with_the_prefix_in_its_tier_gets_fewer_blocks() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let run = longest();
    let (cluster, client) = Cluster::start_with_client(spec(&folder.path().join("kv"))).await?;
    let half = &run.prompt_ids[..run.prompt_ids.len() / 2];
    let whole = client.complete(&greedy_body(half, 2)).await?;
    assert!(whole.kv_bytes > 0, "{whole:?}");
    cluster.decode[0].wait_metric(STORED, (half.len() / BLOCK_TOKENS) as f64).await?;
    for salt in ["one", "two"] {
        client.complete(&salted_body(&run.prompt_ids, 2, salt)).await?;
    }
    let rest = client.complete(&greedy_body(&run.prompt_ids, run.output_ids.len())).await?;
    assert_eq!(rest.token_ids, run.output_ids);
    assert_eq!(rest.cached_tokens, (half.len() / BLOCK_TOKENS * BLOCK_TOKENS) as u64, "{rest:?}");
    let block_bytes = whole.kv_bytes / half.len().div_ceil(BLOCK_TOKENS) as u64;
    let left = run.prompt_ids.len().div_ceil(BLOCK_TOKENS) - half.len() / BLOCK_TOKENS;
    assert_eq!(rest.kv_bytes, left as u64 * block_bytes, "{rest:?}");
    cluster.stop()
}

#[tokio::test]
async fn kv_of_a_session_is_kept_for_the_time_that_the_client_names() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let run = longest();
    let spec = spec(&folder.path().join("kv"))
        .nodes(0, 1)
        .set_decode("BATON_NODE_BLOCKS", 80)
        // One slot: hits come from memory.
        .set_decode("BATON_TIER_DISK_SIZE", "1MiB");
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let body = greedy_body(&run.prompt_ids[..20 * BLOCK_TOKENS + 1], 2);
    let mut cached = Vec::new();
    for keep_ms in ["600000", "0", "0"] {
        let headers =
            [("x-baton-stats", "1"), ("x-baton-session", "agent-7"), ("x-baton-keep-ms", keep_ms)];
        let mut turn = client.stream_with("/v1/completions", &body, &headers).await?;
        cached.push(turn.completion().await?.cached_tokens as usize / BLOCK_TOKENS);
        if cached.len() < 3 {
            for number in 0..2 {
                let salt = format!("{} {number}", cached.len());
                client.complete(&salted_body(&run.prompt_ids, 2, &salt)).await?;
            }
        }
    }
    assert!(matches!(cached[..], [0, 20, 0..20]), "hits in blocks: {cached:?}");
    cluster.stop()
}

/// Checks that a decode node with these settings serves, and says in one line why it has no tier.
async fn serves_without_tier(spec: ClusterSpec, reason: &str) -> Result<()> {
    let run = longest();
    let (cluster, client) = Cluster::start_with_client(spec.nodes(0, 1)).await?;
    assert_eq!(client.greedy(&run.prompt_ids, run.output_ids.len()).await?, run.output_ids);
    cluster.decode[0].wait_logged(&["tier.disk_path"]).await?;
    let log = cluster.decode[0].log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("tier.disk_path")).collect();
    assert!(matches!(lines[..], [line] if line.contains(reason)), "{reason}: {lines:?}");
    cluster.stop()
}

#[tokio::test]
async fn node_without_a_usable_disk_serves_and_says_why() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("kv");
    let missing = folder.path().join("none/kv");
    serves_without_tier(spec(&missing), "cannot open it: No such file or directory").await?;
    let huge = spec(&path).set_decode("BATON_TIER_DISK_SIZE", "60000GiB");
    serves_without_tier(huge, "; expected that much free space").await?;
    let in_use = Cluster::start(spec(&path).nodes(0, 1)).await?;
    serves_without_tier(spec(&path), "another node uses it; expected a file for each node").await?;
    in_use.stop()?;
    let other = ClusterSpec { dtype: "q8", ..spec(&path) };
    let (cluster, _) = Cluster::start_with_client(other.nodes(0, 1)).await?;
    cluster.decode[0].wait_logged(&["it holds KV blocks of format 1, layout "]).await?;
    cluster.stop()?;
    std::fs::write(&path, "text")?;
    serves_without_tier(spec(&path), "it holds no KV blocks; expected ").await?;
    serves_without_tier(spec(Path::new("/proc/version")), "cannot open it").await?;
    let not_direct = "cannot open it with direct I/O: ";
    serves_without_tier(spec(Path::new("/proc/self/comm")), not_direct).await
}
