//! `baton-bench collectives`: sums over the GPUs of this host, by our own kernels and by NCCL, eagerly
//! and in recorded graphs; no model.
//!
//! This process starts one for each GPU and hands round what they tell each other. All ranks measure the
//! same things in the same order, and rank 0 says what it saw.

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
use kernels::cuda::{Context, Driver, LinkRate, NCCL_ENVIRONMENT, Together, pull_rate};
use serde::{Deserialize, Serialize};

use baton::doctor::KernelsArg;

/// Any wait for a rank: the longest is for the first communicator.
const PATIENCE: Duration = Duration::from_secs(120);
/// In front of what a rank tells all the others, and of what it has measured.
const TELLS: &str = "all";
const FOUND: &str = "row";

#[derive(Args)]
pub struct CollectivesArgs {
    /// The GPUs, by index or UUID: 2, 4 or 8.
    #[arg(long, default_value = "0,1", value_delimiter = ',')]
    gpus: Vec<String>,
    /// Sizes of the message in KiB.
    #[arg(long, default_value = "64,256,1024,4096,16384", value_delimiter = ',')]
    sizes: Vec<u32>,
    /// Sums in one graph, and one behind the other when there is none.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=1000))]
    calls: u32,
    /// Rounds of each measurement; the median counts.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    #[command(flatten)]
    kernels: KernelsArg,
    /// NCCL [default: libnccl.so.2, where the system finds it].
    #[arg(long, value_name = "PATH")]
    nccl: Option<std::path::PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// This process is that rank.
    #[arg(long, hide = true)]
    rank: Option<usize>,
}

/// Microseconds of one sum, of the whole group.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Row {
    bytes: usize,
    one_shot_graph_us: Option<f64>,
    two_shot_graph_us: Option<f64>,
    /// What is taken when nobody asks.
    graph_us: f64,
    eager_us: f64,
    nccl_graph_us: Option<f64>,
    nccl_eager_us: Option<f64>,
}

#[derive(Clone, Debug, Serialize)]
struct Report {
    ranks: usize,
    /// A plain copy between the first two.
    link_gb_per_s: f64,
    /// Why there are no figures of NCCL's.
    nccl_fault: Option<String>,
    rows: Vec<Row>,
}

pub fn run(args: CollectivesArgs) -> Result<()> {
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
    ensure!(matches!(args.gpus.len(), 2 | 4 | 8), "--gpus {gpus}: allowed are 2, 4 or 8");
    let bad = args.sizes.iter().find(|size| !(1..=65_536).contains(*size));
    bad.map_or(Ok(()), |size| bail!("--sizes {size}: allowed are 1 to 65536"))
}

fn measure(args: &CollectivesArgs) -> Result<Report> {
    let link_gb_per_s = link(&args.gpus[0], &args.gpus[1])?;
    let mut ranks = Ranks::start(args.gpus.len())?;
    let (rows, nccl_fault) = ranks.serve()?;
    ranks.finish()?;
    Ok(Report { ranks: args.gpus.len(), link_gb_per_s, nccl_fault, rows })
}

fn link(one: &str, other: &str) -> Result<f64> {
    const BYTES: usize = 256 << 20;
    let driver = Driver::open()?;
    let one = Context::new(driver, driver.device_named(one)?)?;
    let other = Context::new(driver, driver.device_named(other)?)?;
    let LinkRate { gb_per_s, .. } = pull_rate(&one, &other, BYTES, BYTES, Together::No)?;
    Ok(gb_per_s)
}

/// A process for every GPU.
struct Ranks {
    children: Vec<Child>,
    lines: Receiver<(usize, Option<String>)>,
}

impl Ranks {
    /// With the arguments of this process.
    fn start(count: usize) -> Result<Self> {
        let program = std::env::current_exe().context("this program has no name")?;
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
                .context("the process of a rank cannot be started")?;
            let stdout = BufReader::new(child.stdout.take().context("it has no output")?);
            ranks.children.push(child);
            let sender = sender.clone();
            // Ends with the child's output.
            thread::spawn(move || {
                for line in stdout.lines().map_while(Result::ok) {
                    // Fails when nobody listens any more.
                    let _ = sender.send((rank, Some(line)));
                }
                let _ = sender.send((rank, None));
            });
        }
        Ok(ranks)
    }

    /// Hands round what the ranks tell, until rank 0 has said all.
    fn serve(&mut self) -> Result<(Vec<Row>, Option<String>)> {
        let mut told: Vec<Option<String>> = vec![None; self.children.len()];
        let (mut rows, mut fault) = (Vec::new(), None);
        loop {
            let (rank, line) = self.lines.recv_timeout(PATIENCE).context("the ranks are silent")?;
            let line = line.with_context(|| format!("rank {rank} has ended"))?;
            match line.split_once(' ').unwrap_or((&line, "")) {
                (TELLS, words) => told[rank] = Some(words.to_owned()),
                (FOUND, row) => rows.push(serde_json::from_str(row)?),
                ("fault", words) => fault = Some(words.to_owned()),
                ("end", _) => return Ok((rows, fault)),
                _ => bail!("rank {rank} says {line:?}"),
            }
            if told.iter().all(Option::is_some) {
                let words: Vec<String> = told.iter_mut().filter_map(Option::take).collect();
                for child in &mut self.children {
                    let stdin = child.stdin.as_mut().context("a rank has no input")?;
                    writeln!(stdin, "{}", words.join(" ")).context("a rank has ended")?;
                }
            }
        }
    }

    fn finish(&mut self) -> Result<()> {
        // The end of their input is their end; what is left is killed.
        let deadline = Instant::now() + PATIENCE;
        for (rank, child) in self.children.iter_mut().enumerate() {
            drop(child.stdin.take());
            let status = loop {
                if let Some(status) = child.try_wait()? {
                    break status;
                }
                ensure!(Instant::now() < deadline, "rank {rank} does not end");
                thread::sleep(Duration::from_millis(10));
            };
            ensure!(status.success(), "rank {rank} ended with {status}");
        }
        Ok(())
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Report {
    /// What the links need: a rank sends at least so much, of which it receives as much meanwhile.
    fn limit_us(&self, row: &Row) -> f64 {
        let sent = 2.0 * (self.ranks as f64 - 1.0) / self.ranks as f64 * row.bytes as f64;
        sent / self.link_gb_per_s / 1e3
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, link_gb_per_s, nccl_fault, rows } = self;
        writeln!(
            f,
            "{ranks} ranks, bf16, a plain copy between two goes at {link_gb_per_s:.0} GB/s"
        )?;
        if let Some(fault) = nccl_fault {
            writeln!(f, "nothing of NCCL's: {fault}")?;
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
            "NCCL/ours",
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
    fn what_cannot_be_measured_is_refused_by_its_name() {
        assert_eq!(checked(&[]), Ok(()));
        assert_eq!(checked(&["--gpus", "0,1,2,3", "--sizes", "64,1024"]), Ok(()));
        for (words, named) in [
            (["--gpus", "0,1,2"], "--gpus 0,1,2: allowed are 2, 4 or 8"),
            (["--sizes", "64,0"], "--sizes 0: allowed are 1 to 65536"),
            (["--calls", "0"], "1..=1000"),
        ] {
            let error = checked(&words).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn the_links_limit_grows_with_the_ranks() {
        let row = Row { bytes: 1 << 20, ..Row::default() };
        let limit = |ranks| {
            let report = Report { ranks, link_gb_per_s: 400.0, nccl_fault: None, rows: vec![] };
            report.limit_us(&row)
        };
        assert!((limit(2) - 2.62).abs() < 0.01 && (limit(4) - 3.93).abs() < 0.01);
    }

    #[test]
    fn a_report_without_nccl_says_why() {
        let rows = vec![Row { bytes: 65_536, graph_us: 2.5, eager_us: 5.0, ..Row::default() }];
        let report = Report {
            ranks: 2,
            link_gb_per_s: 393.0,
            nccl_fault: Some("no such file".into()),
            rows,
        };
        let text = report.to_string();
        assert!(text.contains("nothing of NCCL's: no such file"), "{text}");
        assert!(text.lines().last().unwrap().trim_start().starts_with("64       2.50"), "{text}");
    }
}
