//! Whole clusters that find each other through etcd.

use std::{
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use integration_tests::{
    client::Client,
    cluster::{Cluster, ClusterSpec, bin_dir, smollm2},
    etcd::Etcd,
    golden::{GoldenRun, golden},
};
use tokio::task::JoinSet;

use crate::{DEADLINE, PREFIX};

/// How long etcd is away.
const OUTAGE: Duration = Duration::from_secs(20);
/// Requests that are always in work.
const CLIENTS: usize = 3;
const TOKENS: usize = 8;

fn spec(etcd: &Etcd) -> ClusterSpec {
    ClusterSpec::smollm2()
        .set("BATON_CLUSTER_ETCD", etcd.url())
        .set("BATON_CLUSTER_ETCD_PREFIX", PREFIX)
        .set("BATON_CLUSTER_ETCD_TTL", "5s")
}

/// Requests, one after the other by several clients, each answer compared with the reference.
struct Load {
    clients: JoinSet<Result<()>>,
    stop: Arc<AtomicBool>,
    complete: Arc<AtomicUsize>,
}

impl Load {
    fn start(http: String) -> Self {
        let (stop, complete) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let mut clients = JoinSet::new();
        let runs: Arc<Vec<GoldenRun>> = Arc::new(short_runs());
        for index in 0..CLIENTS {
            let (client, runs) = (Client::new(http.clone()), runs.clone());
            let (stop, complete) = (stop.clone(), complete.clone());
            clients.spawn(async move {
                for turn in index.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let run = &runs[turn % runs.len()];
                    let found = client.greedy(&run.prompt_ids, TOKENS).await?;
                    ensure!(found == run.output_ids[..TOKENS], "{}: {found:?}", run.name);
                    complete.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            });
        }
        Self { clients, stop, complete }
    }

    fn complete(&self) -> usize {
        self.complete.load(Ordering::Relaxed)
    }

    /// Waits until this many more requests are complete; fails with the first one that is not.
    async fn wait_more(&mut self, count: usize) -> Result<()> {
        let wanted = self.complete() + count;
        let deadline = Instant::now() + DEADLINE;
        while self.complete() < wanted {
            if let Some(ended) = self.clients.try_join_next() {
                ended??;
            }
            ensure!(Instant::now() < deadline, "requests stand still at {}", self.complete());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Every request must have been complete and right.
    async fn stop(mut self) -> Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended??;
        }
        Ok(self.complete())
    }
}

/// The reference prompts that are quick to read.
fn short_runs() -> Vec<GoldenRun> {
    let mut runs = golden().runs;
    runs.sort_by_key(|run| run.prompt_ids.len());
    runs.truncate(3);
    runs
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_join_and_leave_a_serving_cluster_and_nothing_is_restarted() -> Result<()> {
    let etcd = Etcd::start()?;
    let mut cluster = Cluster::start(spec(&etcd)).await?;
    let processes: Vec<u32> = cluster.all().map(|service| service.id()).collect();
    let mut load = Load::start(cluster.http());
    load.wait_more(CLIENTS).await?;

    cluster.add_decode()?;
    cluster.wait_nodes(1, 2).await?;
    load.wait_more(CLIENTS).await?;
    // The first one drains: out of etcd at once, its work ends, the second one goes on.
    cluster.decode[0].terminate_signal();
    let gone = |keys: &[(String, i64)]| !keys.iter().any(|(key, _)| key.contains("/decode-0/"));
    etcd.wait_leases(PREFIX, gone).await?;
    assert_eq!(cluster.decode[0].wait_end(DEADLINE)?, Some(0));
    cluster.wait_nodes(1, 1).await?;
    load.wait_more(CLIENTS).await?;
    println!("{} requests complete", load.stop().await?);

    let others: Vec<u32> = cluster.all().map(|service| service.id()).collect();
    assert_eq!(others.iter().filter(|id| processes.contains(id)).count(), processes.len());
    assert!(cluster.router.is_running() && cluster.prefill[0].is_running());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_and_started_again_at_its_address_is_served_by_its_new_process() -> Result<()>
{
    let etcd = Etcd::start()?;
    let mut cluster = Cluster::start(spec(&etcd)).await?;
    let decode = format!("{PREFIX}/nodes/decode-0/");
    let before = etcd.leases(&decode).await?;
    cluster.restart_decode(0)?;
    cluster.wait_nodes(1, 1).await?;
    let run = &short_runs()[0];
    let found = Client::new(cluster.http()).greedy(&run.prompt_ids, TOKENS).await?;
    assert_eq!(found, run.output_ids[..TOKENS]);
    // The old process's record ends with its lease; the new one has a key of its own.
    let after = etcd.wait_leases(&decode, |keys| keys.len() == 1 && keys != before).await?;
    assert_ne!(after[0].0, before[0].0);
    cluster.stop()?;
    assert_eq!(etcd.leases(PREFIX).await?, [], "who stops takes its record along");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn serving_goes_on_while_etcd_is_dead_for_20_seconds() -> Result<()> {
    outage(|etcd| etcd.kill(), |etcd| etcd.restart()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn serving_goes_on_while_etcd_is_frozen_for_20_seconds() -> Result<()> {
    let thaw = |etcd: &mut Etcd| {
        etcd.continue_signal();
        Ok(())
    };
    outage(|etcd| etcd.stop_signal(), thaw).await
}

/// Requests flow before, during and after; every one is complete and right. Afterwards both nodes
/// are registered, under the same keys, and a further one is found.
async fn outage(
    begin: impl FnOnce(&mut Etcd),
    end: impl FnOnce(&mut Etcd) -> Result<()>,
) -> Result<()> {
    let mut etcd = Etcd::start()?;
    let mut cluster = Cluster::start(spec(&etcd)).await?;
    let names = |keys: &[(String, i64)]| -> Vec<String> {
        keys.iter().map(|(key, _)| key.clone()).collect()
    };
    let registered = names(&etcd.leases(PREFIX).await?);
    assert_eq!(registered.len(), 2);
    let mut load = Load::start(cluster.http());
    load.wait_more(CLIENTS).await?;

    let before = load.complete();
    begin(&mut etcd);
    let away = Instant::now();
    while away.elapsed() < OUTAGE {
        load.wait_more(1).await?;
    }
    println!("{} requests complete while etcd was away", load.complete() - before);
    end(&mut etcd)?;
    load.wait_more(CLIENTS).await?;

    etcd.wait_leases(PREFIX, |keys| names(keys) == registered).await?;
    cluster.add_decode()?;
    cluster.wait_nodes(1, 2).await?;
    load.wait_more(CLIENTS).await?;
    println!("{} requests complete in all", load.stop().await?);
    cluster.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn up_with_etcd_answers_and_leaves_nothing_behind() -> Result<()> {
    let etcd = Etcd::start()?;
    let up = Command::new(bin_dir().join("baton"))
        .args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--sample", "--once"])
        .args(["--etcd", &etcd.url()])
        .arg("--model")
        .arg(smollm2())
        .env("BATON_CLUSTER_ETCD_PREFIX", PREFIX)
        .output();
    let output = up.context("cannot run baton")?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("Paris"), "{said}");
    for words in ["registered in etcd", "following etcd", "left etcd"] {
        assert!(said.contains(words), "no {words:?} in\n{said}");
    }
    assert_eq!(etcd.leases(PREFIX).await?, []);
    Ok(())
}

#[test]
fn a_list_and_etcd_together_are_refused_in_one_line() -> Result<()> {
    let output = Command::new(bin_dir().join("baton-router"))
        .args(["--model-path", "any", "--cluster-etcd", "127.0.0.1:1"])
        .args(["--cluster-decode", "127.0.0.1:2"])
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("cluster.etcd (flag --cluster-etcd)"), "{said}");
    assert!(said.contains("cluster.decode (flag --cluster-decode)"), "{said}");
    Ok(())
}
