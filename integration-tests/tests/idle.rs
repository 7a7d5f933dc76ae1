//! What a cluster costs that has nothing to do.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::{Client, DEADLINE},
    cluster::{Cluster, ClusterSpec, Service},
    golden::run_named,
};

/// An unstripped debug build of the router with the model's vocabulary in it.
const ROUTER_RESIDENT_KIB_MAX: u64 = 40 << 10;
const WINDOW: Duration = Duration::from_secs(2);
/// Of the window's 200 ticks for each core: beats, probes and load reports, in a debug build. One
/// thread that spins takes all 200.
const TICKS_MAX: u64 = 40;

#[tokio::test]
async fn an_idle_cluster_is_small_and_does_not_spin() -> Result<()> {
    let (mut cluster, client) = {
        // Populating a large arena takes half a core for seconds.
        let spec = ClusterSpec::smollm2().set("BATON_NODE_KV_MEMORY", "64MiB");
        let cluster = Cluster::start(spec).await?;
        let client = Client::new(cluster.http());
        (cluster, client)
    };
    // Whatever is set up on first use is there, and threads have had work to wait for after.
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

/// Processor time that a process has used so far, in ticks of 10 ms.
fn ticks(service: &Service) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", service.id()))?;
    // After the name, which may hold anything: state is the first field, utime and stime follow.
    let (_, fields) = stat.rsplit_once(')').context("no name")?;
    let times = fields.split_whitespace().skip(11).take(2).map(str::parse::<u64>);
    Ok(times.sum::<Result<u64, _>>()?)
}

fn resident_kib(service: &Service) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", service.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).context("no VmRSS")?;
    Ok(kib.trim().parse()?)
}
