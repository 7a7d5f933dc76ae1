//! KV tiers of whole clusters: what a node evicted or had before a restart comes back from its
//! disk.

use std::{fs::File, os::unix::fs::FileExt, path::Path, process::Command, time::Instant};

use anyhow::{Result, ensure};
use integration_tests::{
    client::{Client, DEADLINE, greedy_body, salted_body},
    cluster::{Cluster, ClusterSpec, Service, bin_dir},
    command::output,
    golden::{GoldenRun, longest},
};
use serde_json::{Value, json};

const BLOCK_TOKENS: usize = 16;
const HITS: &str = "baton_tier_hits_total";
const STORED: &str = "baton_tier_blocks";
const SLOTS: &str = "baton_tier_slots";
const DAMAGED: &str = "baton_tier_damaged_total";

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

/// Fills the node's KV memory with other prompts, once the tier has what was computed before.
async fn evict(node: &Service, client: &Client, run: &GoldenRun) -> Result<()> {
    let blocks = cacheable(run) / BLOCK_TOKENS as u64;
    node.wait_metric(STORED, blocks as f64).await?;
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
    evict(&cluster.decode[0], &client, &run).await?;
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
async fn prefill_node_loads_a_prefix_that_it_evicted() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let run = longest();
    let spec = ClusterSpec::smollm2()
        .set_prefill("BATON_NODE_BLOCKS", 64)
        .set_prefill("BATON_TIER_DISK_PATH", folder.path().join("kv").display())
        .set_prefill("BATON_TIER_DISK_SIZE", "256MiB")
        .set_prefill("BATON_TIER_ADMISSION", "always")
        // Otherwise the decode node has the prefix, and no prefill node is needed.
        .set_decode("BATON_NODE_PREFIX_CACHE", false);
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let node = &cluster.prefill[0];
    let (_, computed) = logprobs(&client, &run).await?;
    evict(node, &client, &run).await?;
    let (cached, restored) = logprobs(&client, &run).await?;
    assert_eq!((cached, &restored), (cacheable(&run), &computed));
    let blocks = (cached / BLOCK_TOKENS as u64) as f64;
    node.wait_metric(HITS, blocks).await?;
    assert_eq!(node.metric(HITS).await?, blocks);
    let answer = client.complete(&greedy_body(&run.prompt_ids, run.output_ids.len())).await?;
    assert_eq!(answer.token_ids, run.output_ids);
    assert_eq!(answer.prefill_node, "prefill-0", "{answer:?}");
    cluster.stop()
}

/// Flips a bit in the KV of a slot of the disk tier.
fn damage(path: &Path, slot: u64, slots: u64) -> Result<()> {
    const PAGE: u64 = 4096;
    let file = File::options().read(true).write(true).open(path)?;
    // The first page describes the file, and the first page of a slot describes its block.
    let slot_bytes = (file.metadata()?.len() - PAGE) / slots;
    let at = PAGE + slot * slot_bytes + PAGE + slot_bytes / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    file.write_all_at(&[byte[0] ^ 1], at)?;
    Ok(file.sync_all()?)
}

#[tokio::test]
async fn damaged_block_of_a_running_node_is_computed_again() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("kv");
    let run = longest();
    let (cluster, client) = Cluster::start_with_client(spec(&path).nodes(0, 1)).await?;
    let node = &cluster.decode[0];
    let (_, computed) = logprobs(&client, &run).await?;
    evict(node, &client, &run).await?;
    // The first prompt's blocks took the first slots, in their order.
    let intact = 4;
    damage(&path, intact, node.metric(SLOTS).await? as u64)?;
    let (cached, restored) = logprobs(&client, &run).await?;
    assert_eq!((cached, restored), (intact * BLOCK_TOKENS as u64, computed));
    node.wait_metric(DAMAGED, 1.0).await?;
    assert_eq!((node.metric(DAMAGED).await?, node.metric(HITS).await?), (1.0, intact as f64));
    cluster.stop()
}

#[tokio::test]
async fn node_whose_disk_loses_its_contents_computes_them_again() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("kv");
    let run = longest();
    let (cluster, client) = Cluster::start_with_client(spec(&path).nodes(0, 1)).await?;
    let node = &cluster.decode[0];
    let (_, computed) = logprobs(&client, &run).await?;
    evict(node, &client, &run).await?;
    // Every read of a slot fails.
    File::options().write(true).open(&path)?.set_len(0)?;
    let (cached, again) = logprobs(&client, &run).await?;
    assert_eq!((cached, again), (0, computed));
    node.wait_metric(DAMAGED, 1.0).await?;
    assert_eq!(node.metric(HITS).await?, 0.0);
    cluster.stop()
}

/// A trace covers a fixed time, so the test records traces until one has steps, saves and loads.
#[tokio::test]
async fn trace_of_a_node_has_its_steps_saves_and_loads() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let run = longest();
    // KV memory for one prompt.
    let spec = spec(&folder.path().join("kv")).nodes(0, 1).set_decode("BATON_NODE_BLOCKS", 16);
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let prompt = &run.prompt_ids[..10 * BLOCK_TOKENS + 1];
    let file = folder.path().join("trace.json");
    let admin = format!("http://{}", cluster.router.ready.admin);
    let deadline = Instant::now() + DEADLINE;
    let mut round = 0;
    loop {
        let mut trace = Command::new(bin_dir().join("baton"));
        trace.args(["node", "trace", "decode-0", "--seconds", "3", "--admin", &admin]);
        trace.arg("--output").arg(&file);
        let recording = tokio::task::spawn_blocking(move || output(&mut trace));
        while !recording.is_finished() {
            // The second prompt is new. It evicts the first prompt, which returns.
            client.complete(&greedy_body(prompt, 2)).await?;
            client.complete(&salted_body(prompt, 2, &format!("round {round}"))).await?;
            round += 1;
        }
        let recorded = recording.await??;
        ensure!(recorded.status.success(), "{recorded:?}");
        let trace: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
        let has = |name: &str, phase: &str| {
            let mut events = trace["traceEvents"].as_array().into_iter().flatten();
            events.any(|event| event["name"] == name && event["ph"] == phase)
        };
        let spans = ["save to disk", "load"].map(|name| has(name, "b") && has(name, "e"));
        let steps = ["plan", "launch", "collect"].map(|name| has(name, "X"));
        if spans == [true; 2] && steps == [true; 3] {
            return cluster.stop();
        }
        ensure!(
            Instant::now() < deadline,
            "spans {spans:?} and steps {steps:?} after {round} rounds"
        );
    }
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

/// Returns a decode node alone with a tier, so that it follows sessions, and memory for two of the
/// longest prompts.
fn session_spec(path: &Path) -> ClusterSpec {
    let spec = spec(path).nodes(0, 1).set_decode("BATON_NODE_BLOCKS", 80);
    // One slot: hits come from memory.
    spec.set_decode("BATON_TIER_DISK_SIZE", "1MiB")
}

/// Runs a turn of a session, and returns its tokens and its hits in blocks.
async fn turn(
    client: &Client,
    body: &Value,
    session: &str,
    keep_ms: &str,
) -> Result<(usize, usize)> {
    let headers =
        [("x-baton-stats", "1"), ("x-baton-session", session), ("x-baton-keep-ms", keep_ms)];
    let mut turn = client.stream_with("/v1/completions", body, &headers).await?;
    let turn = turn.completion().await?;
    Ok((turn.token_ids.len(), turn.cached_tokens as usize / BLOCK_TOKENS))
}

/// Fills the memory of a node of [`session_spec`] with prompts that no session has.
async fn fill_memory(client: &Client, run: &GoldenRun, label: &str) -> Result<()> {
    for number in 0..2 {
        let salt = format!("{label} {number}");
        client.complete(&salted_body(&run.prompt_ids, 2, &salt)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn kv_of_a_session_is_kept_for_the_time_that_the_client_names() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let run = longest();
    let spec = session_spec(&folder.path().join("kv"));
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let body = greedy_body(&run.prompt_ids[..20 * BLOCK_TOKENS + 1], 2);
    let mut cached = Vec::new();
    for keep_ms in ["600000", "0", "0"] {
        cached.push(turn(&client, &body, "agent-7", keep_ms).await?.1);
        if cached.len() < 3 {
            fill_memory(&client, &run, &cached.len().to_string()).await?;
        }
    }
    assert!(matches!(cached[..], [0, 20, 0..20]), "hits in blocks: {cached:?}");
    cluster.stop()
}

/// The router ends such a turn: nodes do not know the text.
#[tokio::test]
async fn kv_of_a_turn_that_ends_at_a_stop_text_is_kept() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let run = longest();
    let spec = session_spec(&folder.path().join("kv"));
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let mut body = greedy_body(&run.prompt_ids, run.output_ids.len());
    let stop: String = run.output_text.chars().take(12).skip(4).collect();
    body["stop"] = json!([stop]);
    let (tokens, _) = turn(&client, &body, "agent-7", "600000").await?;
    assert!(tokens < run.output_ids.len(), "{tokens} tokens until {stop:?}");
    fill_memory(&client, &run, "stop").await?;
    let (_, cached) = turn(&client, &body, "agent-7", "0").await?;
    assert_eq!(cached, (run.prompt_ids.len() - 1) / BLOCK_TOKENS);
    cluster.stop()
}

#[tokio::test]
async fn kv_of_a_session_is_kept_although_another_session_begins_with_it() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let run = longest();
    let spec = session_spec(&folder.path().join("kv"));
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let kept = greedy_body(&run.prompt_ids[..20 * BLOCK_TOKENS + 1], 2);
    let common = &run.prompt_ids[..16 * BLOCK_TOKENS];
    let other = [common, &run.prompt_ids[..2 * BLOCK_TOKENS + 1]].concat();
    turn(&client, &kept, "agent-1", "600000").await?;
    let (_, cached) = turn(&client, &greedy_body(&other, 2), "agent-2", "0").await?;
    assert_eq!(cached, 16);
    fill_memory(&client, &run, "other").await?;
    assert_eq!(turn(&client, &kept, "agent-1", "0").await?.1, 20);
    cluster.stop()
}

/// Checks that a decode node with these settings serves, and says in one line why it has no disk
/// tier.
async fn serves_without_tier(spec: ClusterSpec, reason: &str) -> Result<()> {
    serves_without(spec, "tier.disk_path", reason).await
}

/// As [`serves_without_tier`], for the tier of this setting.
async fn serves_without(spec: ClusterSpec, setting: &str, reason: &str) -> Result<()> {
    let run = longest();
    let (cluster, client) = Cluster::start_with_client(spec.nodes(0, 1)).await?;
    assert_eq!(client.greedy(&run.prompt_ids, run.output_ids.len()).await?, run.output_ids);
    cluster.decode[0].wait_logged(&[setting]).await?;
    let log = cluster.decode[0].log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains(setting)).collect();
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

#[tokio::test]
async fn node_on_cpus_serves_without_the_host_tier_and_says_why() -> Result<()> {
    let spec = ClusterSpec::smollm2().set_decode("BATON_TIER_HOST_MEMORY", "64MiB");
    let reason = " = 67108864 bytes: the node computes on the CPU, whose KV is in host memory";
    serves_without(spec, "tier.host_memory", reason).await
}
