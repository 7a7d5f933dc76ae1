//! Links that are cut in one or both directions, lose packets or are slow, and processes that are
//! stopped.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::{
    hosts::{ETCD, HostCluster, ROUTER, cut, decode_host, prefill_host},
    load::{Reference, Report},
    network::{Drops, Network, check_support, set_drops, set_rate},
};

pub(crate) const SHORT: &str = "faults short";
pub(crate) const LINKS: &str = "faults links";
pub(crate) const STOPS: &str = "faults stops";

/// Environment variable: cluster sizes of the long tables, separated by commas. Tables of different
/// sizes can run at the same time, because each run has its own network.
const SIZES: &str = "BATON_FAULTS_SIZES";
/// Tokens of all streams before a fault, fewer than one answer has: some streams decode, some
/// prompts wait.
const TOKENS_BEFORE: usize = 24;
const STREAMS: usize = 30;
/// Streams of the test that `make test` runs.
const STREAMS_SHORT: usize = 8;

pub(crate) fn cut_and_stopped_hosts_change_no_answer() -> Result<()> {
    on_network(SHORT)
}

pub(crate) fn every_link_cut_for_every_time() -> Result<()> {
    on_network(LINKS)
}

pub(crate) fn every_process_stopped() -> Result<()> {
    on_network(STOPS)
}

fn on_network(helper: &str) -> Result<()> {
    if let Err(error) = check_support() {
        test_harness::skip(format!("no network namespaces: {error:#}"));
    }
    let limit = if helper == SHORT { Duration::from_secs(600) } else { Duration::from_secs(7200) };
    Network::create()?.run(helper, limit)
}

/// A cluster and its fault-free answers.
struct Bench {
    cluster: HostCluster,
    reference: Reference,
    streams: usize,
    name: String,
    failures: Vec<String>,
}

impl Bench {
    async fn start(prefill: usize, decode: usize, streams: usize) -> Result<Self> {
        let cluster = HostCluster::start(prefill, decode).await?;
        let name = format!("{prefill}P{decode}D");
        let (reference, failures) = (Reference::new(), Vec::new());
        let mut bench = Self { cluster, reference, streams, name, failures };
        bench.case("none", async |_: &HostCluster| Ok(())).await?;
        Ok(bench)
    }

    /// Runs the streams while `fault` runs, and waits until the cluster is whole again.
    async fn case(
        &mut self,
        fault: &str,
        run: impl AsyncFnOnce(&HostCluster) -> Result<()>,
    ) -> Result<Report> {
        let begun = async {
            self.reference.further_tokens(TOKENS_BEFORE).await?;
            run(&self.cluster).await
        };
        let report = self.reference.streams(&self.cluster.client, self.streams, begun).await?;
        set_drops(&[])?;
        let whole = self.cluster.wait_all().await?;
        let name = format!("{}: {fault}", self.name);
        report.print(&name);
        if whole > Duration::from_secs(10) {
            println!("  the cluster was whole after {whole:?}");
        }
        self.failures.extend(report.failures.iter().map(|failure| format!("{name}: {failure}")));
        Ok(report)
    }

    /// Cuts links for a time, or until the streams have ended.
    async fn links(&mut self, what: &str, drops: &[Drops], length: Option<Duration>) -> Result<()> {
        let time = length.map_or("for good".to_owned(), |length| format!("{length:?}"));
        self.case(&format!("{what}, {time}"), async |_: &HostCluster| {
            set_drops(drops)?;
            if let Some(length) = length {
                tokio::time::sleep(length).await;
                set_drops(&[])?;
            }
            Ok(())
        })
        .await?;
        Ok(())
    }

    fn end(self) -> Result<()> {
        let failures = &self.failures;
        ensure!(failures.is_empty(), "{} answers: {failures:#?}", failures.len());
        Ok(())
    }
}

const SECOND: Duration = Duration::from_secs(1);

/// Names of hosts, and the links between each two kinds of processes.
fn pairs() -> [(&'static str, &'static str, usize, usize); 6] {
    let (prefill, decode) = (prefill_host(0), decode_host(0));
    [
        ("P", "D", prefill, decode),
        ("router", "P", ROUTER, prefill),
        ("router", "D", ROUTER, decode),
        ("etcd", "P", ETCD, prefill),
        ("etcd", "D", ETCD, decode),
        ("etcd", "router", ETCD, ROUTER),
    ]
}

pub(crate) fn run_short() {
    test_harness::block_on(async {
        Report::print_head();
        let mut bench = Bench::start(2, 2, STREAMS_SHORT).await?;
        let (prefill, decode) = (prefill_host(0), decode_host(0));
        bench.links("P → D cut", &[cut(prefill, decode)], Some(SECOND)).await?;
        let both = [cut(ROUTER, decode), cut(decode, ROUTER)];
        bench.links("router – D cut", &both, Some(5 * SECOND)).await?;
        bench.links("D → router cut", &[cut(decode, ROUTER)], None).await?;
        let lossy = Drops { from: decode, to: ROUTER, percent: 10 };
        bench.links("D → router, 10 % lost", &[lossy], None).await?;
        bench.stop("P", 3 * SECOND).await?;
        bench.end()
    })
    .unwrap_or_else(|error: anyhow::Error| panic!("{error:#}"));
}

/// Returns the cluster sizes of the long tables, in nodes of each role.
fn sizes() -> Result<Vec<usize>> {
    let wanted = std::env::var(SIZES).unwrap_or("1,2,3".to_owned());
    let sizes = wanted.split(',').map(|size| match size.parse() {
        Ok(size @ 1..=3) => Ok(size),
        _ => bail!("invalid {SIZES}: {size}; expected 1, 2 or 3"),
    });
    sizes.collect()
}

pub(crate) fn run_links() {
    test_harness::block_on(async {
        Report::print_head();
        for count in sizes()? {
            let mut bench = Bench::start(count, count, STREAMS).await?;
            for (a, b, from, to) in pairs() {
                for length in [Some(SECOND), Some(5 * SECOND), None] {
                    // Without another decode node the answers wait for the end of the cut.
                    let is_survived = count > 1 || to != decode_host(0) || from != ROUTER;
                    if length.is_none() && !is_survived {
                        continue;
                    }
                    let (forth, back) = (cut(from, to), cut(to, from));
                    bench.links(&format!("{a} – {b} cut"), &[forth, back], length).await?;
                    bench.links(&format!("{a} → {b} cut"), &[forth], length).await?;
                    bench.links(&format!("{b} → {a} cut"), &[back], length).await?;
                }
            }
            let (from, to) = (prefill_host(0), decode_host(0));
            let lossy = |from, to| Drops { from, to, percent: 5 };
            let drops = [(from, to), (to, from), (ROUTER, to), (to, ROUTER)];
            let drops = drops.map(|(from, to)| lossy(from, to));
            bench
                .links("5 % of packets between D and P and between D and router lost", &drops, None)
                .await?;
            set_rate(to, Some("50mbit"))?;
            bench.links("50 Mbit/s to D", &[], None).await?;
            set_rate(to, None)?;
            bench.end()?;
        }
        Ok(())
    })
    .unwrap_or_else(|error: anyhow::Error| panic!("{error:#}"));
}

pub(crate) fn run_stops() {
    test_harness::block_on(async {
        Report::print_head();
        for count in sizes()? {
            let mut bench = Bench::start(count, count, STREAMS).await?;
            for time in [SECOND, 5 * SECOND, 20 * SECOND] {
                for who in ["P", "D", "router", "etcd"] {
                    bench.stop(who, time).await?;
                }
            }
            bench.etcd_down(60 * SECOND).await?;
            bench.end()?;
        }
        Ok(())
    })
    .unwrap_or_else(|error: anyhow::Error| panic!("{error:#}"));
}

impl Bench {
    /// Stops a process (SIGSTOP) for a time.
    async fn stop(&mut self, who: &str, time: Duration) -> Result<()> {
        self.case(&format!("{who} stopped, {time:?}"), async |cluster: &HostCluster| {
            let service = match who {
                "P" => Some(&cluster.prefill[0]),
                "D" => Some(&cluster.decode[0]),
                "router" => Some(&cluster.router),
                _ => None,
            };
            match service {
                Some(service) => service.stop_signal(),
                None => cluster.etcd.stop_signal(),
            }
            tokio::time::sleep(time).await;
            match service {
                Some(service) => service.continue_signal(),
                None => cluster.etcd.continue_signal(),
            }
            Ok(())
        })
        .await?;
        Ok(())
    }

    /// Kills etcd for a time under load. Prints when the records of all nodes are back.
    async fn etcd_down(&mut self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        self.cluster.etcd.kill();
        while Instant::now() < end {
            let client = &self.cluster.client;
            let report = self.reference.streams(client, self.streams, async { Ok(()) }).await?;
            report.print(&format!("{}: etcd down", self.name));
            self.failures.extend(report.failures);
        }
        self.cluster.etcd.restart()?;
        let back = Instant::now();
        let nodes = self.cluster.prefill.len() + self.cluster.decode.len();
        self.cluster.etcd.wait_leases("/baton", |keys| keys.len() == nodes).await?;
        println!("  all records were back {:?} after etcd", back.elapsed());
        Ok(())
    }
}
