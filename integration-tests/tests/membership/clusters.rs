//! Whole clusters whose router and nodes find each other through etcd.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use cluster::MemberChange;
use integration_tests::{
    client::{Client, salted_body},
    cluster::{Cluster, ClusterSpec, bin_dir, whole_smollm2},
    command::output,
    etcd::Etcd,
    golden::{GoldenRun, golden},
};
use tokio::task::JoinSet;

use crate::{DEADLINE, PREFIX, at, follow, next, proxy::Proxy};

/// Duration of the etcd outage.
const OUTAGE: Duration = Duration::from_secs(20);
/// Maximum time from the end of the outage until a node that started meanwhile has joined. The
/// target is 5 s; the rest is for a busy machine.
const JOIN_MAX: Duration = Duration::from_secs(45);
/// Delay of each delayed link, in each direction.
const DELAY: Duration = Duration::from_millis(50);
/// Number of concurrent requests.
const CLIENTS: usize = 3;
const TOKENS: usize = 8;

fn spec(etcd: &Etcd) -> ClusterSpec {
    ClusterSpec::smollm2()
        .set("BATON_CLUSTER_ETCD", etcd.url())
        .set("BATON_CLUSTER_ETCD_PREFIX", PREFIX)
        .set("BATON_CLUSTER_ETCD_TTL", "5s")
}

/// Clients that send one request after the other and compare each answer with the reference.
struct Load {
    clients: JoinSet<Result<()>>,
    stop: Arc<AtomicBool>,
    complete: Arc<AtomicUsize>,
    /// Number of answers per node. An answer counts for its prefill node and for its decode node.
    by_node: Arc<Mutex<BTreeMap<String, usize>>>,
}

impl Load {
    fn start(http: String) -> Self {
        Self::of(http, short_runs())
    }

    /// Starts the clients. Each request has its own cache salt, so that no prefix cache affects the
    /// choice of nodes.
    fn of(http: String, runs: Vec<GoldenRun>) -> Self {
        let (stop, complete) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let by_node = Arc::new(Mutex::new(BTreeMap::new()));
        let mut clients = JoinSet::new();
        let runs = Arc::new(runs);
        for index in 0..CLIENTS {
            let (client, runs) = (Client::new(http.clone()), runs.clone());
            let (stop, complete) = (stop.clone(), complete.clone());
            let by_node = by_node.clone();
            clients.spawn(async move {
                for turn in index.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let run = &runs[turn % runs.len()];
                    let body = salted_body(&run.prompt_ids, TOKENS, &format!("{index} {turn}"));
                    let answer = client.complete(&body).await?;
                    let found = &answer.token_ids;
                    ensure!(found == &run.output_ids[..TOKENS], "{}: {answer:?}", run.name);
                    let mut by_node = by_node.lock().expect("no panic while locked");
                    for node in [answer.prefill_node, answer.decode_node] {
                        *by_node.entry(node).or_insert(0) += 1;
                    }
                    complete.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            });
        }
        Self { clients, stop, complete, by_node }
    }

    /// Waits until each of these nodes has served a complete answer.
    async fn wait_served_by(&mut self, nodes: &[&str]) -> Result<()> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let by_node = self.by_node.lock().expect("no panic while locked").clone();
            if nodes.iter().all(|node| by_node.contains_key(*node)) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "not all of {nodes:?} served: {by_node:?}");
            self.wait_more(1).await?;
        }
    }

    fn complete(&self) -> usize {
        self.complete.load(Ordering::Relaxed)
    }

    /// Waits until this many more requests are complete. Fails with the first request that fails.
    async fn wait_more(&mut self, count: usize) -> Result<()> {
        let wanted = self.complete() + count;
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(ended) = self.clients.try_join_next() {
                ended??;
            }
            if self.complete() >= wanted {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "no request completes after {}", self.complete());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Stops the clients. Fails if any request failed. Returns the number of complete requests.
    async fn stop(mut self) -> Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended??;
        }
        Ok(self.complete())
    }
}

/// Returns the three shortest reference prompts.
fn short_runs() -> Vec<GoldenRun> {
    let mut runs = golden().runs;
    runs.sort_by_key(|run| run.prompt_ids.len());
    runs.truncate(3);
    runs
}

/// Returns the three shortest reference prompts of more than a block, so that every request has a
/// hand-over.
fn hand_over_runs() -> Vec<GoldenRun> {
    let mut runs = golden().runs;
    runs.retain(|run| run.prompt_ids.len() > 16);
    runs.sort_by_key(|run| run.prompt_ids.len());
    runs.truncate(3);
    assert_eq!(runs.len(), 3);
    runs
}

pub(crate) async fn nodes_join_and_leave_a_serving_cluster_and_nothing_is_restarted() -> Result<()>
{
    let etcd = Etcd::start()?;
    let mut cluster = Cluster::start(spec(&etcd)).await?;
    let mut load = Load::start(cluster.http());
    load.wait_more(CLIENTS).await?;

    cluster.add_decode()?;
    cluster.wait_nodes(1, 2).await?;
    load.wait_more(CLIENTS).await?;
    // decode-0 drains: it leaves etcd at once and finishes its requests. decode-1 continues to
    // serve.
    cluster.decode[0].terminate_signal();
    let gone = |keys: &[(String, i64)]| !keys.iter().any(|(key, _)| key.contains("/decode-0/"));
    etcd.wait_leases(PREFIX, gone).await?;
    assert_eq!(cluster.decode[0].wait_end(DEADLINE)?, Some(0));
    cluster.wait_nodes(1, 1).await?;
    load.wait_more(CLIENTS).await?;
    println!("{} requests complete", load.stop().await?);

    assert!(cluster.router.is_running() && cluster.prefill[0].is_running());
    assert!(cluster.decode[1].is_running());
    Ok(())
}

pub(crate) async fn nodes_of_both_roles_join_and_leave_under_load_and_no_token_is_lost()
-> Result<()> {
    let etcd = Etcd::start()?;
    let mut cluster = Cluster::start(spec(&etcd)).await?;
    let mut load = Load::of(cluster.http(), hand_over_runs());
    load.wait_served_by(&["prefill-0", "decode-0"]).await?;

    cluster.add_prefill()?;
    cluster.add_decode()?;
    cluster.wait_nodes(2, 2).await?;
    load.wait_served_by(&["prefill-1", "decode-1"]).await?;

    // The new nodes drain while they serve requests.
    for newcomer in [&mut cluster.decode[1], &mut cluster.prefill[1]] {
        let deadline = Instant::now() + DEADLINE;
        while !newcomer.is_busy().await? {
            ensure!(Instant::now() < deadline, "{} gets no more requests", newcomer.name);
            load.wait_more(0).await?;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        newcomer.terminate_signal();
        assert_eq!(newcomer.wait_end(DEADLINE)?, Some(0), "{}", newcomer.name);
    }
    cluster.wait_nodes(1, 1).await?;
    let gone = |keys: &[(String, i64)]| keys.len() == 2 && keys.iter().all(|k| k.0.contains("-0/"));
    etcd.wait_leases(PREFIX, gone).await?;
    load.wait_more(CLIENTS).await?;
    println!("{} requests complete", load.stop().await?);
    assert!(cluster.router.is_running());
    Ok(())
}

pub(crate) async fn a_node_restarted_at_its_address_serves_under_a_new_record() -> Result<()> {
    let etcd = Etcd::start()?;
    let mut cluster = Cluster::start(spec(&etcd)).await?;
    let decode = format!("{PREFIX}/nodes/decode-0/");
    let before = etcd.leases(&decode).await?;
    cluster.restart_decode(0)?;
    cluster.wait_nodes(1, 1).await?;
    let run = &short_runs()[0];
    let found = Client::new(cluster.http()).greedy(&run.prompt_ids, TOKENS).await?;
    assert_eq!(found, run.output_ids[..TOKENS]);
    // The record of the old process ends with its lease. The new process has another key.
    let after = etcd.wait_leases(&decode, |keys| keys.len() == 1 && keys != before).await?;
    assert_ne!(after[0].0, before[0].0);
    cluster.stop()?;
    assert_eq!(etcd.leases(PREFIX).await?, [], "a stopped node deletes its record");
    Ok(())
}

pub(crate) async fn serving_continues_while_etcd_is_down_for_20_seconds() -> Result<()> {
    outage(|etcd| etcd.kill(), |etcd| etcd.restart()).await
}

pub(crate) async fn serving_continues_while_etcd_is_frozen_for_20_seconds() -> Result<()> {
    let thaw = |etcd: &mut Etcd| {
        etcd.continue_signal();
        Ok(())
    };
    outage(|etcd| etcd.stop_signal(), thaw).await
}

/// Serves requests before, during and after an outage of etcd. Every answer must be complete and
/// correct. Afterwards both nodes are registered under the same keys, and the router finds a
/// further node that started during the outage.
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
    let begun = Instant::now();
    cluster.add_decode()?;
    load.wait_more(1).await?;
    while begun.elapsed() < OUTAGE {
        load.wait_more(1).await?;
    }
    println!("{} requests complete while etcd was unreachable", load.complete() - before);
    end(&mut etcd)?;
    let back = Instant::now();
    cluster.wait_nodes(1, 2).await?;
    let joined = back.elapsed();
    println!("the node that started during the outage joined {joined:?} after its end");
    ensure!(joined < JOIN_MAX, "the node joined only {joined:?} after the outage");

    let is_complete = |keys: &[(String, i64)]| {
        let found = names(keys);
        found.len() == 3 && registered.iter().all(|key| found.contains(key))
    };
    etcd.wait_leases(PREFIX, is_complete).await?;
    load.wait_more(CLIENTS).await?;
    println!("{} requests complete in all", load.stop().await?);
    cluster.stop()
}

/// Returns ports that are free on all IPv4 addresses and on ::1. They are below the ports of
/// outgoing connections.
fn free_ports() -> impl Iterator<Item = u16> {
    let first = 20_000 + (std::process::id() % 1_000) as u16 * 10;
    let addresses: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::LOCALHOST.into()];
    (first..32_000)
        .filter(move |port| addresses.iter().all(|ip| TcpListener::bind((*ip, *port)).is_ok()))
}

pub(crate) async fn delayed_links_between_router_nodes_and_etcd_change_no_answer() -> Result<()> {
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        test_harness::skip("no IPv6 on the loopback interface");
    }
    let etcd = Etcd::start()?;
    let to_etcd = Proxy::start_at((Ipv4Addr::LOCALHOST, 0).into(), etcd.port(), DELAY).await?;
    let mut spec = spec(&etcd).set("BATON_CLUSTER_ETCD", to_etcd.url());
    // Nodes listen on IPv4 and advertise the same ports of ::1, on which the proxies listen.
    let (mut links, mut ports) = (Vec::new(), free_ports());
    let roles = [("prefill", &mut spec.prefill_settings), ("decode", &mut spec.decode_settings)];
    for (role, settings) in roles {
        settings.insert("BATON_TRANSFER_ADVERTISE".to_owned(), "[::1]".to_owned());
        for (setting, ip) in [
            ("BATON_NODE_GRPC", Ipv4Addr::UNSPECIFIED),
            ("BATON_TRANSFER_CONTROL", Ipv4Addr::LOCALHOST),
            ("BATON_TRANSFER_DATA", Ipv4Addr::LOCALHOST),
        ] {
            let port = ports.next().context("no port is free")?;
            settings.insert(setting.to_owned(), format!("{ip}:{port}"));
            let link = Proxy::start_at((Ipv6Addr::LOCALHOST, port).into(), port, DELAY).await?;
            links.push((role, setting, link));
        }
    }
    let cluster = Cluster::start(spec).await?;
    let mut load = Load::of(cluster.http(), hand_over_runs());
    load.wait_served_by(&["prefill-0", "decode-0"]).await?;
    load.wait_more(2 * CLIENTS).await?;
    println!("{} requests complete", load.stop().await?);

    for (role, setting, link) in &links {
        // Only the sender of KV connects to a data port.
        let is_idle = (*role, *setting) == ("prefill", "BATON_TRANSFER_DATA");
        assert!(is_idle || link.connections() > 0, "no connection to {role} {setting}");
    }
    let begun = Instant::now();
    let (_membership, mut watch) = follow(at(&to_etcd.url())).await?;
    for _ in 0..2 {
        let change = next(&mut watch).await?;
        assert!(
            matches!(&change, MemberChange::Joined(node) if node.grpc.starts_with("http://[::1]:")),
            "{change:?}"
        );
    }
    assert!(begun.elapsed() >= 2 * DELAY, "the proxy delays nothing: {:?}", begun.elapsed());
    cluster.stop()
}

pub(crate) async fn up_with_etcd_answers_and_leaves_nothing_behind() -> Result<()> {
    let etcd = Etcd::start()?;
    let mut up = Command::new(bin_dir().join("baton"));
    up.args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--sample", "--once"])
        .args(["--etcd", &etcd.url()])
        .arg("--model")
        .arg(whole_smollm2())
        .env("BATON_CLUSTER_ETCD_PREFIX", PREFIX);
    let output = output(&mut up)?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("Paris"), "{said}");
    for words in ["registered in etcd", "following etcd", "deregistered from etcd"] {
        assert!(said.contains(words), "no {words:?} in\n{said}");
    }
    assert_eq!(etcd.leases(PREFIX).await?, []);
    Ok(())
}

pub(crate) fn static_list_beside_etcd_is_rejected_in_one_line() -> Result<()> {
    let mut router = Command::new(bin_dir().join("baton-router"));
    router
        .args(["--model-path", "any", "--cluster-etcd", "127.0.0.1:1"])
        .args(["--cluster-decode", "127.0.0.1:2"]);
    let output = output(&mut router)?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("cluster.etcd (flag --cluster-etcd)"), "{said}");
    assert!(said.contains("cluster.decode (flag --cluster-decode)"), "{said}");
    Ok(())
}
