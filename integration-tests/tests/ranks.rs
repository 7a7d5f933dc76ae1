//! Clusters of tensor-parallel nodes: golden tokens with any rank count on either side of a
//! transfer, and the effect of a lost rank on requests and membership.

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::{Client, greedy_body},
    cluster::{Cluster, ClusterSpec, SECRET, Service, bin_dir, smollm2},
    command::output,
    etcd::Etcd,
    golden::{golden, longest, run_named},
    processes::{Process, wait_gone},
};

const DEADLINE: Duration = Duration::from_secs(60);
const PREFIX: &str = "/baton/ranks";
const TP: &str = "BATON_NODE_TP";
/// SmolLM2 has three KV heads.
const RANKS: usize = 3;

fn spec() -> ClusterSpec {
    // 45 MiB of f32 KV in shared memory: the longest run has 41 blocks.
    ClusterSpec::smollm2().set("BATON_NODE_DEVICE", "cpu").set("BATON_NODE_BLOCKS", 64)
}

async fn check_golden(client: &Client) -> Result<()> {
    for run in golden().runs {
        let found = client.greedy(&run.prompt_ids, run.output_ids.len()).await?;
        assert_eq!(found, run.output_ids, "{}", run.name);
    }
    Ok(())
}

/// Returns the rank processes of a node.
fn ranks_of(id: u32) -> Result<Vec<Process>> {
    Ok(Process::running(id).context("the node has ended")?.children())
}

async fn check_pair(prefill: usize, decode: usize) -> Result<()> {
    let spec = spec().nodes(1, 1).set_prefill(TP, prefill).set_decode(TP, decode);
    let cluster = Cluster::start(spec).await?;
    for (node, ranks) in [(&cluster.prefill[0], prefill), (&cluster.decode[0], decode)] {
        let expected = if ranks == 1 { 0 } else { ranks };
        assert_eq!(ranks_of(node.id())?.len(), expected, "{}", node.name);
    }
    check_golden(&Client::new(cluster.http())).await?;
    let received = cluster.decode[0].metric("baton_kv_transfer_bytes_total").await?;
    assert!(received > 0.0, "no KV was received");
    let nodes = cluster.prefill.iter().chain(&cluster.decode);
    let ranks = nodes.map(|node| ranks_of(node.id())).collect::<Result<Vec<_>>>()?.concat();
    cluster.stop()?;
    wait_gone(&ranks)
}

#[tokio::test]
async fn three_ranks_send_their_kv_to_one() -> Result<()> {
    check_pair(RANKS, 1).await
}

#[tokio::test]
async fn one_rank_sends_its_kv_to_three() -> Result<()> {
    check_pair(1, RANKS).await
}

#[tokio::test]
async fn ranks_share_the_cpus_that_their_node_is_given() -> Result<()> {
    let status = fs::read_to_string("/proc/self/status")?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let cpus = allowed.context("Linux says which CPUs are allowed")?.trim();
    let spec = spec().nodes(0, 1).set(TP, RANKS).set("BATON_NODE_CPUS", cpus);
    let cluster = Cluster::start(spec).await?;
    let run = golden().runs.remove(0);
    let client = Client::new(cluster.http());
    assert_eq!(client.greedy(&run.prompt_ids, run.output_ids.len()).await?, run.output_ids);
    cluster.stop()
}

/// Signal that ends a rank.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Killed,
    Stopped,
}

/// Checks that a decode node fails its request and exits when it loses a rank.
async fn loses_a_rank(end: End) -> Result<()> {
    let etcd = Etcd::start()?;
    let spec = spec()
        .nodes(0, 1)
        .set(TP, RANKS)
        // The request waits for another decode node until its deadline, and no other node starts.
        .set("BATON_ROUTER_TIMEOUT", "20s")
        .set("BATON_CLUSTER_ETCD", etcd.url())
        .set("BATON_CLUSTER_ETCD_PREFIX", PREFIX)
        // Far longer than the test, so a record disappears only when the node removes it.
        .set("BATON_CLUSTER_ETCD_TTL", "600s");
    let mut cluster = Cluster::start(spec).await?;
    etcd.wait_leases(PREFIX, |keys| keys.len() == 1).await?;
    let client = Client::new(cluster.http());
    let run = longest();
    let mut stream = client.stream("/v1/completions", &greedy_body(&run.prompt_ids, 350)).await?;
    let mut tokens = 0;
    while tokens < 3 {
        tokens += stream.next().await?.context("the stream goes on")?.token_ids().len();
    }
    let ranks = ranks_of(cluster.decode[0].id())?;
    assert_eq!(ranks.len(), RANKS);
    ranks[1].signal(if end == End::Killed { "KILL" } else { "STOP" });
    let lost = Instant::now();

    let mut error = None;
    while let Some(event) = stream.next().await? {
        assert!(error.is_none(), "{error:?} was not the last: {event:?}");
        assert!(!event.is_done(), "a failed answer ends with [DONE]");
        error = Some(event.json()["error"].clone()).filter(|error| !error.is_null());
    }
    let error = error.context("no error")?;
    println!("the request ended {:?} later: {error}", lost.elapsed());
    assert_eq!(error["type"], "server_error", "{error}");
    assert!(error["code"].is_string(), "{error}");
    etcd.wait_leases(PREFIX, <[_]>::is_empty).await?;
    let node: &mut Service = &mut cluster.decode[0];
    assert_eq!(node.wait_end(DEADLINE)?, Some(1), "{}", node.log());
    println!("the node ended {:?} later", lost.elapsed());
    wait_gone(&ranks)?;
    let why = match end {
        End::Killed => "of 3 ended: killed by signal 9",
        End::Stopped => "of 3 sent no heartbeat for ",
    };
    assert!(node.log().contains(why), "{}", node.log());

    if end == End::Stopped {
        return Ok(());
    }
    // Restarts the node, as its supervisor does.
    cluster.restart_decode(0)?;
    etcd.wait_leases(PREFIX, |keys| keys.len() == 1).await?;
    cluster.wait_nodes(0, 1).await?;
    let run = run_named("chat_template");
    let found = client.greedy(&run.prompt_ids, run.output_ids.len()).await?;
    assert_eq!(found, run.output_ids);
    cluster.stop()
}

#[tokio::test]
async fn killed_rank_fails_its_requests_and_its_node_recovers() -> Result<()> {
    loses_a_rank(End::Killed).await
}

#[tokio::test]
async fn stopped_rank_fails_its_requests_and_its_node_exits() -> Result<()> {
    loses_a_rank(End::Stopped).await
}

/// Starts a node with invalid ranks. Returns its exit code and output.
fn refused(ranks: &str, device: &str) -> Result<(Option<i32>, String)> {
    let mut command = Command::new(bin_dir().join("baton-decode-node"));
    for (name, value) in [
        ("BATON_MODEL_PATH", smollm2().display().to_string().as_str()),
        ("BATON_MODEL_DTYPE", "f32"),
        ("BATON_NODE_GRPC", "127.0.0.1:0"),
        ("BATON_NODE_BLOCKS", "8"),
        ("BATON_NODE_DEVICE", device),
        ("BATON_CLUSTER_SECRET", SECRET),
        (TP, ranks),
    ] {
        command.env(name, value);
    }
    let output = output(&mut command)?;
    Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[test]
fn unsupported_rank_count_is_rejected_with_the_supported_ones() -> Result<()> {
    for (ranks, device, expected, words) in [
        ("2", "cpu", 1, &["node.tp = 2: ", "model's 3 KV heads", "expected 1, 3"][..]),
        ("4", "auto", 1, &["node.tp = 4: ", "expected 1, 3"]),
        ("3", "cuda", 1, &["node.tp = 3: ", "expected on GPUs 1"]),
        ("0", "cpu", 2, &["node.tp", "1 to 16"]),
        ("17", "cpu", 2, &["node.tp", "1 to 16"]),
    ] {
        let (code, lines) = refused(ranks, device)?;
        assert_eq!(code, Some(expected), "{lines}");
        for word in words {
            assert!(lines.contains(word), "{lines:?} lacks {word:?}");
        }
    }
    Ok(())
}

/// Returns the names of a process's shared memory regions.
fn shared_memory_of(id: u32) -> Vec<String> {
    let names = fs::read_dir("/dev/shm").expect("shared memory is listed").flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with("baton-") && name.contains(&format!("-{id}-"))).collect()
}

#[test]
fn node_stopped_while_its_ranks_load_leaks_no_shared_memory() -> Result<()> {
    let mut command = Command::new(bin_dir().join("baton-decode-node"));
    let mut node = command
        .env("BATON_MODEL_PATH", smollm2())
        .env("BATON_MODEL_DTYPE", "f32")
        .env("BATON_NODE_GRPC", "127.0.0.1:0")
        .env("BATON_NODE_METRICS", "127.0.0.1:0")
        .env("BATON_NODE_DEVICE", "cpu")
        .env("BATON_NODE_BLOCKS", "8")
        .env("BATON_CLUSTER_SECRET", SECRET)
        .env(TP, "3")
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()?;
    let id = node.id();
    let deadline = Instant::now() + DEADLINE;
    while shared_memory_of(id).is_empty() && node.try_wait()?.is_none() {
        ensure!(Instant::now() < deadline, "the node has not created shared memory for its ranks");
        std::thread::sleep(Duration::from_millis(1));
    }
    let process = Process::running(id).context("the node has ended")?;
    let ranks = process.children();
    process.signal("TERM");
    wait_gone(&[process])?;
    node.wait()?;
    assert_eq!(shared_memory_of(id), Vec::<String>::new());
    wait_gone(&ranks)
}

/// Uses the internal flag of rank processes by hand.
#[test]
fn rank_process_without_a_node_exits_with_an_error() -> Result<()> {
    let spec = format!("baton-{:032x}-1-ranks:0/2", 5);
    for (spec, code, words) in [
        (spec.as_str(), 1, "rank 0 of 2: the node that started the rank has ended"),
        ("something", 2, "expected REGION:RANK/OF"),
    ] {
        let mut command = Command::new(bin_dir().join("baton-decode-node"));
        let output = output(command.args(["--rank", spec]))?;
        let lines = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{lines}");
        assert!(lines.contains(words), "{lines}");
    }
    Ok(())
}

#[tokio::test]
async fn killed_node_ends_its_ranks_and_leaks_no_shared_memory() -> Result<()> {
    let mut cluster = Cluster::start(spec().nodes(0, 1).set(TP, RANKS)).await?;
    let node = &mut cluster.decode[0];
    let (id, ranks) = (node.id(), ranks_of(node.id())?);
    assert_eq!(ranks.len(), RANKS);
    node.kill();
    wait_gone(&ranks)?;
    let left: Vec<_> = fs::read_dir("/dev/shm")?.flatten().map(|file| file.file_name()).collect();
    let own = format!("-{id}-");
    assert!(!left.iter().any(|name| name.to_string_lossy().contains(&own)), "{left:?}");
    Ok(())
}
