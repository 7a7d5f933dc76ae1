//! `baton-bench collectives`: all-reduce latency over the GPUs of this host, by Baton's kernels and
//! by NCCL, eager and in CUDA graphs; no model.
//!
//! This process starts one process for each GPU and relays the messages between them. All ranks run
//! the same measurements in the same order, and rank 0 prints the results.

mod rank;

use std::{
    fmt,
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use kernels::cuda::{Context, CopySubmission, Driver, LinkRate, NCCL_ENVIRONMENT, pull_rate};
use serde::{Deserialize, Serialize};

use baton::doctor::KernelsArg;

/// Time-out of every wait for a rank. Creating the first communicator takes longest.
const RANK_TIMEOUT: Duration = Duration::from_secs(120);
/// Prefix of a message to all ranks.
const BROADCAST: &str = "all";
/// Prefix of a measured row.
const FOUND: &str = "row";

#[derive(Args)]
pub(crate) struct CollectivesArgs {
    /// Indices or UUIDs of 2, 4 or 8 GPUs.
    #[arg(long, default_value = "0,1", value_delimiter = ',')]
    gpus: Vec<String>,
    /// Message sizes in KiB.
    #[arg(long, default_value = "64,256,1024,4096,16384", value_delimiter = ',')]
    sizes: Vec<u32>,
    /// All-reduce calls in one CUDA graph, and in one eager sequence.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=1000))]
    calls: u32,
    /// Rounds of each measurement; the report has the median.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    #[command(flatten)]
    kernels: KernelsArg,
    /// Path of NCCL [default: libnccl.so.2 on the library path].
    #[arg(long, value_name = "PATH")]
    nccl: Option<std::path::PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Rank of this process.
    #[arg(long, hide = true)]
    rank: Option<usize>,
}

/// Latency of one all-reduce over all ranks, in µs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct AllReduceLatency {
    bytes: usize,
    one_shot_graph_us: Option<f64>,
    two_shot_graph_us: Option<f64>,
    /// In a CUDA graph, with the algorithm that Baton selects for this size.
    graph_us: f64,
    eager_us: f64,
    nccl_graph_us: Option<f64>,
    nccl_eager_us: Option<f64>,
}

#[derive(Clone, Debug, Serialize)]
struct CollectivesReport {
    ranks: usize,
    /// Bandwidth of a plain copy between the first two GPUs.
    link_gb_per_s: f64,
    /// Reason why NCCL was not measured.
    nccl_error: Option<String>,
    rows: Vec<AllReduceLatency>,
}

pub(crate) fn run(args: CollectivesArgs) -> Result<()> {
    check(&args)?;
    if let Some(rank) = args.rank {
        return rank::run(&args, rank);
    }
    let report = measure(&args)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{report}");
    }
    Ok(())
}

fn check(args: &CollectivesArgs) -> Result<()> {
    let gpus = args.gpus.join(",");
    ensure!(
        matches!(args.gpus.len(), 2 | 4 | 8),
        "invalid --gpus: {gpus}; expected 2, 4 or 8 GPUs"
    );
    let bad = args.sizes.iter().find(|size| !(1..=65_536).contains(*size));
    bad.map_or(Ok(()), |size| bail!("invalid --sizes: {size}; expected 1 to 65536"))
}

fn measure(args: &CollectivesArgs) -> Result<CollectivesReport> {
    let link_gb_per_s = link(&args.gpus[0], &args.gpus[1])?;
    let mut ranks = Ranks::start(args.gpus.len())?;
    let (rows, nccl_error) = ranks.serve()?;
    ranks.finish()?;
    Ok(CollectivesReport { ranks: args.gpus.len(), link_gb_per_s, nccl_error, rows })
}

fn link(one: &str, other: &str) -> Result<f64> {
    const BYTES: usize = 256 << 20;
    let driver = Driver::open()?;
    let one = Context::new(driver, driver.device_named(one)?)?;
    let other = Context::new(driver, driver.device_named(other)?)?;
    let LinkRate { gb_per_s, .. } = pull_rate(&one, &other, BYTES, BYTES, CopySubmission::Single)?;
    Ok(gb_per_s)
}

/// The rank processes, one for each GPU.
struct Ranks {
    children: Vec<Child>,
    lines: Receiver<(usize, Option<String>)>,
}

impl Ranks {
    /// Starts this program again for each rank, with its own arguments.
    fn start(count: usize) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let (sender, lines) = channel();
        let mut ranks = Self { children: Vec::new(), lines };
        for rank in 0..count {
            let mut child = Command::new(&program)
                .args(std::env::args_os().skip(1))
                .args(["--rank", &rank.to_string()])
                .env(NCCL_ENVIRONMENT.0, NCCL_ENVIRONMENT.1)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .context("cannot start the process of a rank")?;
            let stdout =
                BufReader::new(child.stdout.take().context("a rank has no standard output")?);
            ranks.children.push(child);
            let sender = sender.clone();
            // The thread ends with the child's output.
            thread::spawn(move || {
                for line in stdout.lines().map_while(Result::ok) {
                    // Fails when the receiver is dropped.
                    let _ = sender.send((rank, Some(line)));
                }
                let _ = sender.send((rank, None));
            });
        }
        Ok(ranks)
    }

    /// Relays messages between the ranks until rank 0 has reported all results.
    fn serve(&mut self) -> Result<(Vec<AllReduceLatency>, Option<String>)> {
        let mut messages: Vec<Option<String>> = vec![None; self.children.len()];
        let (mut rows, mut nccl_error) = (Vec::new(), None);
        loop {
            let (rank, line) = self
                .lines
                .recv_timeout(RANK_TIMEOUT)
                .context("the ranks did not report in time")?;
            let line = line.with_context(|| format!("rank {rank} exited"))?;
            match line.split_once(' ').unwrap_or((&line, "")) {
                (BROADCAST, words) => messages[rank] = Some(words.to_owned()),
                (FOUND, row) => rows.push(serde_json::from_str(row)?),
                ("fault", words) => nccl_error = Some(words.to_owned()),
                ("end", _) => return Ok((rows, nccl_error)),
                _ => bail!("rank {rank} sent an unknown line: {line:?}"),
            }
            if messages.iter().all(Option::is_some) {
                let words: Vec<String> = messages.iter_mut().filter_map(Option::take).collect();
                for child in &mut self.children {
                    let stdin = child.stdin.as_mut().context("a rank has no standard input")?;
                    writeln!(stdin, "{}", words.join(" ")).context("a rank exited")?;
                }
            }
        }
    }

    fn finish(&mut self) -> Result<()> {
        // Ranks exit when their input closes. `drop` kills those that do not.
        let deadline = Instant::now() + RANK_TIMEOUT;
        for (rank, child) in self.children.iter_mut().enumerate() {
            drop(child.stdin.take());
            let status = loop {
                if let Some(status) = child.try_wait()? {
                    break status;
                }
                ensure!(Instant::now() < deadline, "rank {rank} does not exit");
                thread::sleep(Duration::from_millis(10));
            };
            ensure!(status.success(), "rank {rank} exited with {status}");
        }
        Ok(())
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            // The process may have exited already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl CollectivesReport {
    /// Returns the minimum latency at link bandwidth: each of n ranks sends and receives 2 (n − 1)
    /// / n of the message.
    fn limit_us(&self, row: &AllReduceLatency) -> f64 {
        let sent = 2.0 * (self.ranks as f64 - 1.0) / self.ranks as f64 * row.bytes as f64;
        sent / self.link_gb_per_s / 1e3
    }
}

impl fmt::Display for CollectivesReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, link_gb_per_s, nccl_error, rows } = self;
        writeln!(f, "{ranks} ranks, bf16, plain copy between two GPUs: {link_gb_per_s:.0} GB/s")?;
        if let Some(error) = nccl_error {
            writeln!(f, "NCCL not measured: {error}")?;
        }
        writeln!(
            f,
            "{:>8} {:>10} {:>10} {:>10} {:>10} {:>11} {:>11} {:>10} {:>10}",
            "KiB",
            "graph us",
            "one shot",
            "two shots",
            "eager us",
            "NCCL graph",
            "NCCL eager",
            "NCCL/Baton",
            "limit us"
        )?;
        let us = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
        for row in rows {
            writeln!(
                f,
                "{:>8} {:>10.2} {:>10} {:>10} {:>10.2} {:>11} {:>11} {:>10} {:>10.2}",
                row.bytes >> 10,
                row.graph_us,
                us(row.one_shot_graph_us),
                us(row.two_shot_graph_us),
                row.eager_us,
                us(row.nccl_graph_us),
                us(row.nccl_eager_us),
                us(row.nccl_graph_us.or(row.nccl_eager_us).map(|nccl| nccl / row.graph_us)),
                self.limit_us(row)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: CollectivesArgs,
    }

    fn checked(words: &[&str]) -> Result<(), String> {
        let cli = Cli::try_parse_from(["bench"].iter().chain(words)).map_err(|e| e.to_string())?;
        check(&cli.args).map_err(|error| error.to_string())
    }

    #[test]
    fn invalid_flags_are_rejected_by_name() {
        assert_eq!(checked(&[]), Ok(()));
        assert_eq!(checked(&["--gpus", "0,1,2,3", "--sizes", "64,1024"]), Ok(()));
        for (words, named) in [
            (["--gpus", "0,1,2"], "invalid --gpus: 0,1,2; expected 2, 4 or 8 GPUs"),
            (["--sizes", "64,0"], "invalid --sizes: 0; expected 1 to 65536"),
            (["--calls", "0"], "1..=1000"),
        ] {
            let error = checked(&words).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn bandwidth_limit_grows_with_the_ranks() {
        let row = AllReduceLatency { bytes: 1 << 20, ..AllReduceLatency::default() };
        let limit = |ranks| {
            let report =
                CollectivesReport { ranks, link_gb_per_s: 400.0, nccl_error: None, rows: vec![] };
            report.limit_us(&row)
        };
        assert!((limit(2) - 2.62).abs() < 0.01 && (limit(4) - 3.93).abs() < 0.01);
    }

    #[test]
    fn report_without_nccl_has_the_reason() {
        let rows = vec![AllReduceLatency {
            bytes: 65_536,
            graph_us: 2.5,
            eager_us: 5.0,
            ..AllReduceLatency::default()
        }];
        let report = CollectivesReport {
            ranks: 2,
            link_gb_per_s: 393.0,
            nccl_error: Some("no such file".into()),
            rows,
        };
        let text = report.to_string();
        assert!(text.contains("NCCL not measured: no such file"), "{text}");
        assert!(text.lines().last().unwrap().trim_start().starts_with("64       2.50"), "{text}");
    }
}
