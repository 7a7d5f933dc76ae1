//! Clusters under load whose processes are killed or drained. Clients receive correct tokens, and
//! the cluster recovers.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use integration_tests::{
    client::Client,
    processes::{Process, arguments, wait_gone},
    up::Up,
};
use kernels::shared::RegionName;
use serde_json::json;
use tokio::{task::JoinHandle, time::timeout};

use super::{
    super::bench::short, DEADLINE, Devices, End, Fixture, ask, assert_few_diverged, run_on,
};

/// Clients that send one request after the other.
struct Load {
    is_over: Arc<AtomicBool>,
    complete: Arc<AtomicUsize>,
    workers: Vec<JoinHandle<Result<LoadStats>>>,
}

/// Counts of finished requests by outcome.
#[derive(Debug, Default)]
struct LoadStats {
    complete: usize,
    diverged: usize,
    failed: BTreeMap<String, usize>,
}

impl LoadStats {
    fn assert_none_failed(&self) {
        assert!(self.failed.is_empty(), "{self:?}");
    }
}

impl Load {
    fn start(fixture: &Arc<Fixture>, client: &Client) -> Self {
        let (is_over, complete) = <(Arc<AtomicBool>, Arc<AtomicUsize>)>::default();
        let workers = if fixture.gpus() == 0 { 3 } else { 8 };
        let worker = |worker: usize| {
            let (fixture, client) = (Arc::clone(fixture), client.clone());
            let (is_over, complete) = (Arc::clone(&is_over), Arc::clone(&complete));
            tokio::spawn(async move {
                let mut stats = LoadStats::default();
                let count = fixture.requests.len();
                for number in 0.. {
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    let (index, salt) =
                        ((number * 3 + worker * 7) % count, format!("{worker} {number}"));
                    let answer = ask(&client, &fixture.requests[index], &salt).await;
                    let answer = answer.with_context(|| format!("request {index}, salt {salt}"))?;
                    // The tokens before an error are compared, too.
                    let is_equal = fixture.compare(index, &answer.tokens, &salt)?;
                    match answer.end {
                        End::Complete => {
                            stats.complete += 1;
                            stats.diverged += usize::from(!is_equal);
                            complete.fetch_add(1, Ordering::Relaxed);
                        }
                        End::Failed(code) => {
                            *stats.failed.entry(code).or_default() += 1;
                            tokio::time::sleep(Duration::from_millis(20)).await;
                        }
                    }
                }
                Ok(stats)
            })
        };
        Self { workers: (0..workers).map(worker).collect(), is_over, complete }
    }

    /// Waits until `count` more requests are complete.
    async fn wait_complete(&self, count: usize) -> Result<()> {
        let deadline = Instant::now() + DEADLINE;
        let wanted = self.complete.load(Ordering::Relaxed) + count;
        while self.complete.load(Ordering::Relaxed) < wanted {
            ensure!(
                Instant::now() < deadline,
                "fewer than {count} requests completed within {DEADLINE:?}"
            );
            // Finished workers have failed: `end` returns their error.
            if self.workers.iter().all(JoinHandle::is_finished) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    async fn end(self) -> Result<LoadStats> {
        self.is_over.store(true, Ordering::Relaxed);
        let mut all = LoadStats::default();
        for worker in self.workers {
            let stats = worker.await??;
            all.complete += stats.complete;
            all.diverged += stats.diverged;
            for (code, count) in stats.failed {
                *all.failed.entry(code).or_default() += count;
            }
        }
        Ok(all)
    }
}

/// `baton up`, and all processes that it has started so far.
struct Supervised {
    up: Up,
    client: Client,
    seen: BTreeSet<Process>,
    nodes: (usize, usize),
}

impl Supervised {
    async fn start(fixture: &Fixture, nodes: (usize, usize), tp: usize) -> Result<Self> {
        let (prefill, decode) = (nodes.0.to_string(), nodes.1.to_string());
        let (model, tp_given) = (fixture.model.path().display().to_string(), tp.to_string());
        // Assigns GPUs to the ranks round-robin.
        let ranks = (nodes.0 + nodes.1) * tp;
        let gpus: Vec<String> =
            (0..ranks).map(|rank| (rank % fixture.gpus().max(1)).to_string()).collect();
        let gpus = gpus.join(",");
        let mut args = vec!["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", &model];
        args.extend(["--load-format", "dummy", "--dtype", "f32", "--tp", &tp_given]);
        args.extend(["--prefill", &prefill, "--decode", &decode]);
        if let Devices::Gpus(_) = fixture.place {
            args.extend(["--gpus", &gpus]);
        }
        let mut up = Up::start(&args, &fixture.settings())?;
        let client = match up.client() {
            Ok(client) => client,
            Err(error) => return Err(error.context(up.last_lines())),
        };
        let mut cluster = Self { up, client, seen: BTreeSet::new(), nodes };
        cluster.record_processes();
        Ok(cluster)
    }

    /// Records the running children of `baton up` and their children.
    fn record_processes(&mut self) {
        for child in self.up.children().into_iter().filter_map(Process::running) {
            self.seen.insert(child);
            self.seen.extend(child.children());
        }
    }

    fn running(&self, name: &str) -> Option<Process> {
        self.up.child_with(name).and_then(Process::running)
    }

    fn node(&mut self, name: &str) -> Result<Process> {
        self.record_processes();
        self.running(name).with_context(|| format!("{name} is not running"))
    }

    /// Waits until the node `name` runs in another process than `was` and the router reports it.
    async fn wait_restarted(&mut self, name: &str, was: Process) -> Result<()> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            ensure!(Instant::now() < deadline, "{name} has not restarted within {DEADLINE:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
            let Some(node) = self.running(name).filter(|node| *node != was) else { continue };
            let words = arguments(node.id);
            let ready = words.iter().skip_while(|word| *word != "--ready-file").nth(1);
            if ready.is_some_and(|file| Path::new(file).exists()) {
                break;
            }
        }
        self.record_processes();
        loop {
            let health = timeout(DEADLINE, self.client.get_json("/health")).await;
            if let Ok(Ok((status, health))) = health {
                let nodes = (&health["prefill_nodes"], &health["decode_nodes"]);
                if status == 200 && nodes == (&json!(self.nodes.0), &json!(self.nodes.1)) {
                    return Ok(());
                }
            }
            ensure!(Instant::now() < deadline, "the router does not report {name}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Sends every request once more and stops the cluster. No process and no shared memory may
    /// remain.
    async fn end(mut self, fixture: &Fixture) -> Result<()> {
        let answers = fixture.requests.iter().map(|request| ask(&self.client, request, "last"));
        for (index, answer) in try_join_all(answers).await?.iter().enumerate() {
            if let End::Failed(code) = &answer.end {
                panic!("request {index} failed with {code} after the load");
            }
            fixture.compare(index, &answer.tokens, "at the end")?;
        }
        self.record_processes();
        self.up.interrupt();
        assert_eq!(self.up.wait()?, Some(0));
        let seen: Vec<Process> = self.seen.into_iter().collect();
        wait_gone(&seen)?;
        // A new process may have the same id, and its regions may stay.
        let is_of_these =
            |id: u32| seen.iter().any(|seen| seen.id == id) && Process::running(id).is_none();
        let left: Vec<String> = fs::read_dir("/dev/shm")?
            .flatten()
            .filter_map(|file| file.file_name().into_string().ok())
            .filter(|name| RegionName::parse(name).is_some_and(|name| is_of_these(name.owner)))
            .collect();
        assert_eq!(left, Vec::<String>::new());
        Ok(())
    }
}

/// Runs `disturb` on a cluster under load. An error shows the last lines of `baton up`'s output.
async fn under_load(
    fixture: Arc<Fixture>,
    (nodes, tp): ((usize, usize), usize),
    disturb: impl AsyncFnOnce(&mut Supervised, &Load) -> Result<()>,
) -> Result<LoadStats> {
    let mut cluster = Supervised::start(&fixture, nodes, tp).await?;
    let load = Load::start(&fixture, &cluster.client);
    let disturbed = async {
        load.wait_complete(2).await?;
        disturb(&mut cluster, &load).await?;
        load.wait_complete(5).await
    };
    let disturbed = disturbed.await;
    let stats = load.end().await;
    match disturbed.and(stats) {
        Ok(stats) => {
            cluster.end(&fixture).await?;
            assert_few_diverged(stats.diverged, stats.complete);
            Ok(stats)
        }
        Err(error) => Err(error.context(cluster.up.last_lines())),
    }
}

/// Pseudo-random number generator.
struct Rng(u64);

impl Rng {
    fn below(&mut self, count: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % count
    }
}

pub(crate) fn killed_nodes_change_no_answer() {
    run_on(1, async |fixture| {
        let (time, rounds_min) = match fixture.gpus() {
            0 => (Duration::ZERO, 2),
            _ if short() => (Duration::from_secs(6), 2),
            _ => (Duration::from_secs(25), 4),
        };
        let pause = if fixture.gpus() == 0 { 300 } else { 700 };
        let (mut rng, mut rounds) = (Rng(0x5eed), 0);
        let stats = under_load(fixture, ((2, 2), 1), async |cluster, load| {
            let until = Instant::now() + time;
            while rounds < rounds_min || Instant::now() < until {
                let role = ["decode", "prefill"][rounds % 2];
                let name = format!("{role}-{}", rng.below(2));
                tokio::time::sleep(Duration::from_millis(rng.below(pause))).await;
                let victim = cluster.node(&name)?;
                victim.signal("KILL");
                cluster.wait_restarted(&name, victim).await?;
                load.wait_complete(1).await?;
                rounds += 1;
            }
            Ok(())
        })
        .await?;
        println!("{rounds} nodes killed: {stats:?}");
        stats.assert_none_failed();
        Ok(())
    });
}

pub(crate) fn killed_rank_ends_only_its_node_which_recovers() {
    run_on(2, async |fixture| {
        let mut rng = Rng(0x5eed);
        let rounds = if short() || fixture.gpus() == 0 { 1 } else { 2 };
        let stats = under_load(fixture, ((1, 1), 2), async |cluster, load| {
            for name in ["prefill-0", "decode-0"].repeat(rounds) {
                let node = cluster.node(name)?;
                let ranks = node.children();
                assert_eq!(ranks.len(), 2, "{name}");
                tokio::time::sleep(Duration::from_millis(rng.below(200))).await;
                let killed = Instant::now();
                ranks[rng.below(2) as usize].signal("KILL");
                wait_gone(&[vec![node], ranks].concat())?;
                let gone = killed.elapsed();
                cluster.wait_restarted(name, node).await?;
                println!(
                    "{name}: all processes ended after {gone:?}; the node served again after {:?}",
                    killed.elapsed()
                );
                load.wait_complete(3).await?;
            }
            Ok(())
        })
        .await?;
        println!("{} ranks killed: {stats:?}", 2 * rounds);
        stats.assert_none_failed();
        Ok(())
    });
}

pub(crate) fn drained_nodes_under_load_change_no_answer() {
    run_on(1, async |fixture| {
        let rounds = if short() || fixture.gpus() == 0 { 1 } else { 3 };
        let stats = under_load(fixture, ((2, 2), 1), async |cluster, load| {
            for round in 0..rounds {
                for role in ["decode", "prefill"] {
                    let name = format!("{role}-{}", round % 2);
                    let node = cluster.node(&name)?;
                    node.signal("TERM");
                    let lines = &mut cluster.up.lines;
                    let line = tokio::task::block_in_place(|| {
                        lines.wait_for(&format!("baton: {name} exited with"))
                    })?;
                    assert!(line.contains("exit status: 0"), "{line}");
                    cluster.wait_restarted(&name, node).await?;
                    load.wait_complete(2).await?;
                }
            }
            Ok(())
        })
        .await?;
        println!("{} nodes drained: {stats:?}", 2 * rounds);
        assert!(stats.failed.is_empty(), "{stats:?}");
        Ok(())
    });
}
