//! Resource use of an idle cluster.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::{Client, DEADLINE},
    cluster::{Cluster, ClusterSpec, Service},
    golden::run_named,
};

/// Limit of the router's own memory, with the model's vocabulary. The pages of its program are not
/// counted: three quarters of the resident memory of a debug build are code.
const ROUTER_RESIDENT_KIB_MAX: u64 = 16 << 10;
const WINDOW: Duration = Duration::from_secs(2);
/// Limit of CPU ticks in the window, out of 200 per core: heartbeats, probes and load reports of a
/// debug build. One spinning thread takes 200.
const TICKS_MAX: u64 = 40;

#[tokio::test]
async fn idle_cluster_uses_little_memory_and_cpu() -> Result<()> {
    let (mut cluster, client) = {
        // Populating a large arena takes a fifth of a core for seconds.
        let spec = ClusterSpec::smollm2().set("BATON_NODE_KV_MEMORY", "64MiB");
        let cluster = Cluster::start(spec).await?;
        let client = Client::new(cluster.http());
        (cluster, client)
    };
    // Warms up everything that is created on first use.
    let run = run_named("code");
    assert_eq!(client.greedy(&run.prompt_ids, 48).await?, run.output_ids);
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        let deadline = Instant::now() + DEADLINE;
        while node.is_busy().await? {
            ensure!(Instant::now() < deadline, "{} stays busy", node.name);
        }
    }
    let before = cluster.all().map(|service| ticks(service)).collect::<Result<Vec<_>>>()?;
    tokio::time::sleep(WINDOW).await;
    for (service, before) in cluster.all().zip(before) {
        let spent = ticks(service)? - before;
        println!("{}: {spent} ticks in {WINDOW:?}", service.name);
        ensure!(spent <= TICKS_MAX, "{} spends {spent} ticks in {WINDOW:?}", service.name);
    }
    let resident = resident_kib(&cluster.router)?;
    println!("router: {resident} KiB resident");
    ensure!(resident < ROUTER_RESIDENT_KIB_MAX, "the idle router holds {resident} KiB");
    cluster.stop()
}

/// Returns the CPU time of a process, in ticks of 10 ms.
fn ticks(service: &Service) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", service.id()))?;
    // The name may contain any character. The fields after it start with state; utime and stime
    // follow.
    let (_, fields) = stat.rsplit_once(')').context("no name")?;
    let times = fields.split_whitespace().skip(11).take(2).map(str::parse::<u64>);
    Ok(times.sum::<Result<u64, _>>()?)
}

fn resident_kib(service: &Service) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", service.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).context("no RssAnon")?;
    Ok(kib.trim().parse()?)
}
