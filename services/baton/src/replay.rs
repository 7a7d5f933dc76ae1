//! `baton replay`: recorded requests on a simulated cluster.
//!
//! The simulation runs the shipped cores of router, nodes, scheduler and KV transfer in virtual
//! time. Only devices and networks are models, fitted to benchmarks ([`cost`]).

pub mod break_even;
mod chart;
mod cost;
mod lru;
mod report;

use std::{
    fs::File,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use cluster::Selection;
use config::{Disaggregate, NodePolicy, Roles};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use simulation::{ReplayConfig, ReplayOutcome, TraceRequest};

use self::{
    cost::ReplayCostModel,
    lru::Lru,
    report::{Cost, PolicyPoint},
};
use crate::{
    bench::{
        output_file,
        serve::{GoodputLimits, parse_rate},
        stats::WorkloadRng,
    },
    request_trace::{HASHED_TOKENS, RecordedRequest, RequestTrace, SPAN_DAYS_MAX},
};

/// Tokens of a KV block.
const BLOCK_TOKENS: u32 = 16;
/// Maximum number of requests of a replay, with all copies and repetitions.
const REQUESTS_MAX: u64 = 20_000_000;

#[derive(Args, Clone)]
pub struct ReplayArgs {
    /// Recorded requests: the CSV of the Azure LLM inference traces or the JSON lines of the
    /// Mooncake traces.
    trace: PathBuf,
    /// Prefill nodes.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(0..=1000))]
    prefill: u16,
    /// Decode nodes.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    decode: u16,
    /// Choice of nodes (router.policy): predicted, cache-aware, least-load or round-robin.
    #[arg(long, default_value = "predicted", value_parser = parse_policy)]
    policy: NodePolicy,
    /// Choices of nodes to compare with --policy, separated by commas. They are simulated at the
    /// same time, one thread each.
    #[arg(long, value_delimiter = ',', value_parser = parse_policy)]
    compare: Vec<NodePolicy>,
    /// Whether decode nodes may prefill (router.disaggregate): auto, always or never.
    #[arg(long, default_value = "auto", value_parser = parse_disaggregate)]
    disaggregate: Disaggregate,
    /// Whether the nodes' roles are preferences only (router.roles): fixed or fluid.
    #[arg(long, default_value = "fixed", value_parser = parse_roles)]
    roles: Roles,
    /// Number of requests to replay, from the start of the trace.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Factor on the arrival rate of the trace.
    #[arg(long, default_value_t = 1.0, value_parser = parse_rate)]
    rate_scale: f64,
    /// Copies of the trace at the same time. Each further copy has other prompts and is shifted in
    /// time.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    copies: u32,
    /// Replays one after another on the same cluster, each with other prompts.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// Results of `baton bench engine --json` on the simulated device, separated by commas, for the
    /// cost model [default: an 8B model in bf16 on one H100].
    #[arg(long, value_delimiter = ',')]
    engine: Vec<PathBuf>,
    /// Result of `baton-bench transfer --json`; the first row names the transport [default: nccl
    /// between two H200].
    #[arg(long)]
    transfer: Option<PathBuf>,
    /// Bandwidth of a node's network in GB/s [default: that of --transfer].
    #[arg(long, value_parser = parse_rate)]
    link_gb_per_s: Option<f64>,
    /// KV memory of each node in tokens [default: that of an 8B model in bf16 on one H100].
    #[arg(long, default_value_t = cost::KV_TOKENS, value_parser = clap::value_parser!(u32).range(1024..=100_000_000))]
    kv_tokens: u32,
    /// Maximum number of sequences in a node's running batch (node.slots).
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1024))]
    slots: u32,
    /// Maximum time of a step that decodes and also prefills (node.itl_max), in ms.
    #[arg(long, default_value_t = 20.0, value_parser = parse_rate)]
    itl_max_ms: f64,
    /// Maximum number of tokens of a prompt with its answer; longer requests of the trace are left
    /// out.
    #[arg(long, default_value_t = 131_072, value_parser = clap::value_parser!(u32).range(64..=10_000_000))]
    sequence_tokens: u32,
    /// Deadline of a request in seconds.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout_s: u64,
    /// Limits of goodput in milliseconds: ttft:MS, tpot:MS (mean time per later token) and e2e:MS,
    /// separated by commas.
    #[arg(long, value_parser = GoodputLimits::parse)]
    goodput: Option<GoodputLimits>,
    /// Seed of faults: kills of nodes, partitions between two nodes and etcd outages, one every 30
    /// s on average [default: no faults].
    #[arg(long)]
    faults: Option<u64>,
    /// Seed of prompts, step times and ids.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Also write the result as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also draw the distributions of latencies into this SVG file.
    #[arg(long)]
    plot: Option<PathBuf>,
}

fn parse_policy(text: &str) -> Result<NodePolicy, String> {
    NodePolicy::parse(text).ok_or_else(|| format!("expected {}", NodePolicy::WORDS.join(", ")))
}

fn parse_roles(text: &str) -> Result<Roles, String> {
    Roles::parse(text).ok_or_else(|| format!("expected {}", Roles::WORDS.join(", ")))
}

fn parse_disaggregate(text: &str) -> Result<Disaggregate, String> {
    Disaggregate::parse(text).ok_or_else(|| format!("expected {}", Disaggregate::WORDS.join(", ")))
}

/// The whole result.
#[derive(Serialize)]
struct ReplayReport {
    trace: String,
    cost_model: String,
    prefill: u16,
    decode: u16,
    kv_tokens: u32,
    goodput_limits: Option<GoodputLimits>,
    points: Vec<PolicyPoint>,
}

pub fn run(args: ReplayArgs) -> Result<()> {
    let json = output_file("--json", args.json.as_deref())?;
    let plot = output_file("--plot", args.plot.as_deref())?;
    let cost = args.cost_model()?;
    let mut trace = RequestTrace::read(&args.trace, args.requests)?;
    trace.fit(args.sequence_tokens_max())?;
    args.check_size(&trace)?;
    let workload = ReplayWorkload::new(&args, trace);
    let described = workload.describe();
    println!("{described}");
    println!("{}P{}D, {} KV tokens a node", args.prefill, args.decode, args.kv_tokens);
    println!("{cost}");
    let mut policies = vec![args.policy];
    policies.extend(args.compare.iter().filter(|policy| **policy != args.policy));
    let (points, outcomes) = simulate(&args, &workload, &cost, &policies)?;
    points.iter().for_each(PolicyPoint::print);
    report::print_comparison(&points);
    if let Some(file) = plot {
        let outcomes: Vec<_> = policies.iter().copied().zip(&outcomes).collect();
        chart::write(&described, &outcomes, file)?;
    }
    if let Some(file) = json {
        write_json(&args, described, &cost, points, file)?;
    }
    Ok(())
}

fn write_json(
    args: &ReplayArgs,
    trace: String,
    cost: &ReplayCostModel,
    points: Vec<PolicyPoint>,
    file: File,
) -> Result<()> {
    let report = ReplayReport {
        trace,
        cost_model: cost.to_string(),
        prefill: args.prefill,
        decode: args.decode,
        kv_tokens: args.kv_tokens,
        goodput_limits: args.goodput,
        points,
    };
    serde_json::to_writer_pretty(file, &report).context("cannot write the report")
}

/// Simulates each policy in its own thread.
fn simulate(
    args: &ReplayArgs,
    workload: &ReplayWorkload,
    cost: &ReplayCostModel,
    policies: &[NodePolicy],
) -> Result<(Vec<PolicyPoint>, Vec<ReplayOutcome>)> {
    let count = (workload.arrivals.len() * policies.len()) as u64;
    let bar = ProgressBar::new(count).with_style(
        ProgressStyle::with_template("{pos}/{len} requests {wide_bar} {elapsed} {msg}")
            .expect("the template is constant"),
    );
    let lru = workload.lru_hit_rates(args);
    let results: Vec<Result<(PolicyPoint, ReplayOutcome)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = policies
            .iter()
            .map(|policy| {
                let bar = bar.clone();
                scope.spawn(move || simulate_one(args, workload, cost, *policy, &bar))
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().map_err(|_| anyhow!("the simulation failed; the lines above say why"))
        };
        threads.into_iter().map(join).collect()
    });
    bar.finish_and_clear();
    let mut points = Vec::new();
    let mut outcomes = Vec::new();
    for result in results {
        let (point, replayed) = result?;
        let [all, prefill] = lru.map_or([None; 2], |rates| rates.map(Some));
        points.push(PolicyPoint { lru_hit_rate: all, lru_prefill_hit_rate: prefill, ..point });
        outcomes.push(replayed);
    }
    Ok((points, outcomes))
}

fn simulate_one(
    args: &ReplayArgs,
    workload: &ReplayWorkload,
    cost: &ReplayCostModel,
    policy: NodePolicy,
    bar: &ProgressBar,
) -> (PolicyPoint, ReplayOutcome) {
    let (started, cpu_started) = (Instant::now(), thread_cpu_time());
    let config = args.config(workload, cost, policy);
    let mut arrived = 0;
    let replayed = simulation::replay(&config, workload.requests(args.seed), |progress| {
        bar.inc((progress.arrived - arrived) as u64);
        arrived = progress.arrived;
        bar.set_message(format!("{policy} at {} s", progress.elapsed.as_secs()));
    });
    let wall = started.elapsed();
    let cpu = cpu_started.and_then(|before| thread_cpu_time()?.checked_sub(before));
    let cost = Cost { wall, cpu: cpu.unwrap_or(wall) };
    let prefill = args.prefill.into();
    let point = PolicyPoint::new(policy, args.rate_scale, &replayed, prefill, args.goodput, cost);
    (point, replayed)
}

/// Returns the CPU time of this thread, if the system reports it.
fn thread_cpu_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

impl ReplayArgs {
    fn cost_model(&self) -> Result<ReplayCostModel> {
        let nodes = u32::from(self.prefill) + u32::from(self.decode);
        ensure!(nodes <= 1000, "invalid --prefill and --decode: {nodes} nodes; expected 1 to 1000");
        let mut cost = ReplayCostModel::read(&self.engine, self.transfer.as_deref())?;
        if let Some(gb_per_s) = self.link_gb_per_s {
            cost.links.bytes_per_s = gb_per_s * 1e9;
        }
        Ok(cost)
    }

    /// Rejects replays that need too much memory or virtual time.
    fn check_size(&self, trace: &RequestTrace) -> Result<()> {
        let requests = trace.len() as u64 * u64::from(self.copies) * u64::from(self.repeat);
        ensure!(
            requests <= REQUESTS_MAX,
            "invalid --copies and --repeat: {requests} requests; expected at most {REQUESTS_MAX}"
        );
        let span = trace.rows().last().map_or(0.0, |row| row.arrives_at);
        let days = span * f64::from(self.repeat) / self.rate_scale / 86_400.0;
        ensure!(
            days <= SPAN_DAYS_MAX,
            "invalid --repeat and --rate-scale: {days:.0} days; expected at most {SPAN_DAYS_MAX}"
        );
        Ok(())
    }

    fn sequence_tokens_max(&self) -> u32 {
        self.sequence_tokens.min(self.kv_tokens)
    }

    fn config(
        &self,
        workload: &ReplayWorkload,
        cost: &ReplayCostModel,
        policy: NodePolicy,
    ) -> ReplayConfig {
        ReplayConfig {
            prefill: self.prefill.into(),
            decode: self.decode.into(),
            selection: Selection { disaggregate: self.disaggregate, roles: self.roles, policy },
            step_cost: cost.steps,
            links: cost.links,
            chunk_blocks: cost.chunk_blocks,
            slots: self.slots,
            step_tokens: cost.step_tokens.max(self.slots),
            sequence_tokens: self.sequence_tokens_max(),
            blocks: self.kv_tokens / BLOCK_TOKENS,
            itl_max: Duration::from_secs_f64(self.itl_max_ms / 1e3),
            timeout: Duration::from_secs(self.timeout_s),
            seed: self.seed,
            faults: self.faults,
            duration: workload.duration,
        }
    }
}

/// The requests of a replay.
struct ReplayWorkload {
    trace: std::sync::Arc<RequestTrace>,
    /// Arrival in seconds, row of the trace, and number of the copy.
    arrivals: std::sync::Arc<[(f64, u32, u32)]>,
    /// Arrival of the last request.
    duration: Duration,
}

impl ReplayWorkload {
    fn new(args: &ReplayArgs, trace: RequestTrace) -> Self {
        let rows = trace.rows();
        let mean_gap = rows.last().map_or(0.0, |row| row.arrives_at) / rows.len() as f64;
        // The first request of a repetition follows the last one of the repetition before.
        let span = rows.last().map_or(0.0, |row| row.arrives_at) + mean_gap;
        let mut rng = WorkloadRng::new(args.seed);
        let mut arrivals = Vec::with_capacity(rows.len() * (args.copies * args.repeat) as usize);
        for repetition in 0..args.repeat {
            for copy in 0..args.copies {
                let shift = if copy == 0 { 0.0 } else { rng.unit() * span };
                arrivals.extend((0..).zip(rows).map(|(index, row)| {
                    let at = (row.arrives_at + shift) % span.max(f64::MIN_POSITIVE);
                    let at = (f64::from(repetition) * span + at) / args.rate_scale;
                    (at, index, repetition * args.copies + copy)
                }));
            }
        }
        arrivals.sort_by(|a, b| a.0.total_cmp(&b.0));
        let last = arrivals.last().map_or(0.0, |arrival| arrival.0);
        let duration = Duration::from_secs_f64(last);
        Self { trace: trace.into(), arrivals: arrivals.into(), duration }
    }

    fn describe(&self) -> String {
        let (input, output) = self.trace.mean_tokens();
        let left_out = match self.trace.too_long {
            0 => String::new(),
            count => format!(", {count} longer ones left out"),
        };
        format!(
            "trace: {} requests in {:.0} s, input {input:.0} and output {output:.0} tokens on average{left_out}",
            self.arrivals.len(),
            self.duration.as_secs_f64()
        )
    }

    /// Returns the requests. Prompts are drawn when the simulation takes them.
    fn requests(&self, seed: u64) -> impl Iterator<Item = TraceRequest> + Send + 'static {
        let (trace, arrivals) = (self.trace.clone(), self.arrivals.clone());
        let mut rng = WorkloadRng::new(seed);
        (0..arrivals.len()).map(move |index| {
            let (at, row, copy) = arrivals[index];
            let row = &trace.rows()[row as usize];
            let seed = WorkloadRng::new(seed.wrapping_add(copy.into())).next_u64();
            TraceRequest {
                at: Duration::from_secs_f64(at),
                prompt: row.prompt(seed, &(0..=TraceRequest::VOCABULARY - 1), &mut rng),
                output_tokens: row.output_tokens,
            }
        })
    }

    /// Returns the hit rates of one LRU cache with the blocks of all nodes, and of the prefill
    /// nodes. `None` without recorded prefixes.
    fn lru_hit_rates(&self, args: &ReplayArgs) -> Option<[f64; 2]> {
        let rows = self.trace.rows();
        if rows.iter().all(|row| row.hash_ids.is_empty()) {
            return None;
        }
        let nodes = [args.prefill + args.decode, args.prefill];
        Some(nodes.map(|nodes| {
            let mut lru = Lru::new(u64::from(nodes) * u64::from(args.kv_tokens / BLOCK_TOKENS));
            let (mut cached, mut tokens) = (0, 0);
            for (_, row, copy) in &*self.arrivals {
                let row = &rows[*row as usize];
                let hits = lru.request(&chunks(row, *copy)) * u64::from(BLOCK_TOKENS);
                cached += hits.min(u64::from(row.input_tokens) - 1);
                tokens += u64::from(row.input_tokens);
            }
            cached as f64 / tokens as f64
        }))
    }
}

/// Returns the chunks of the recorded prefix.
fn chunks(row: &RecordedRequest, copy: u32) -> Vec<lru::Chunk> {
    let tokens = (0..row.input_tokens).step_by(HASHED_TOKENS);
    let ids = row.hash_ids.iter().zip(tokens);
    let chunk = |(id, before): (&u64, u32)| {
        let tokens = (row.input_tokens - before).min(HASHED_TOKENS as u32);
        (id | u64::from(copy) << 40, tokens / BLOCK_TOKENS)
    };
    ids.map(chunk).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: ReplayArgs,
    }

    fn args(trace: &str, flags: &[&str]) -> Result<ReplayArgs, clap::Error> {
        let all = [&["replay", trace], flags].concat();
        Command::try_parse_from(all).map(|command| command.args)
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    const TRACE: &str = r#"{"timestamp": 0, "input_length": 1030, "output_length": 9, "hash_ids": [1, 2, 3]}
{"timestamp": 4000, "input_length": 1030, "output_length": 5, "hash_ids": [1, 2, 4]}
{"timestamp": 8000, "input_length": 600, "output_length": 5, "hash_ids": [1, 5]}
"#;

    #[test]
    fn invalid_flags_are_rejected_with_what_is_allowed() {
        for (flags, words) in [
            (&["--policy", "best"][..], "predicted, cache-aware, least-load, round-robin"),
            (&["--compare", "predicted,worst"], "predicted, cache-aware, least-load, round-robin"),
            (&["--disaggregate", "maybe"], "auto, always, never"),
            (&["--rate-scale", "0"], "expected 0.000001 to 1000000000"),
            (&["--rate-scale", "1e-300"], "expected 0.000001 to 1000000000"),
            (&["--itl-max-ms", "1e300"], "expected 0.000001 to 1000000000"),
            (&["--link-gb-per-s", "1e-300"], "expected 0.000001 to 1000000000"),
            (&["--decode", "0"], "1..=1000"),
            (&["--kv-tokens", "5"], "1024..="),
            (&["--goodput", "ttfb:5"], "expected ttft:MS"),
        ] {
            let error = args("trace", flags).err().expect("the flags are invalid").to_string();
            assert!(error.contains(words), "{flags:?}: {error}");
        }
    }

    #[test]
    fn invalid_files_are_rejected_with_their_name_and_line() {
        let trace = file(TRACE);
        let trace = trace.path().to_str().unwrap();
        let bad = file(&TRACE.replace("600", "-600"));
        let bad = bad.path().to_str().unwrap();
        let late = file(&TRACE.replace("8000", "1e23"));
        let late = late.path().to_str().unwrap();
        for (trace, flags, words) in [
            (bad, &[][..], &[bad, "line 3", "-600"][..]),
            ("/nowhere/trace", &[], &["cannot read the trace /nowhere/trace"]),
            (trace, &["--sequence-tokens", "500"], &["longer than the model's 500 tokens"]),
            (trace, &["--engine", bad], &["--engine", bad, "baton bench engine --json"]),
            (trace, &["--transfer", trace], &["--transfer", "baton-bench transfer --json"]),
            (trace, &["--prefill", "600", "--decode", "600"], &["1200 nodes; expected 1 to 1000"]),
            (trace, &["--json", "/nowhere/file"], &["--json /nowhere/file"]),
            (late, &[], &[late, "line 3", "366 days"]),
            (
                trace,
                &["--copies", "10000", "--repeat", "1000"],
                &["--copies", "30000000 requests; expected at most 20000000"],
            ),
            (
                trace,
                &["--rate-scale", "0.000001", "--repeat", "1000"],
                &["--rate-scale", "92593 days; expected at most 366"],
            ),
        ] {
            let error = format!("{:#}", run(args(trace, flags).unwrap()).unwrap_err());
            assert!(words.iter().all(|word| error.contains(word)), "{flags:?}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn replay_compares_policies_and_writes_json_and_chart() {
        let (trace, json, plot) = (file(TRACE), file(""), file(""));
        let paths = [&trace, &json, &plot].map(|file| file.path().to_str().unwrap().to_owned());
        let [trace, json, plot] = &paths;
        let flags = ["--prefill", "1", "--decode", "1", "--compare", "round-robin,predicted"];
        let outputs = ["--repeat", "2", "--goodput", "ttft:500", "--json", json, "--plot", plot];
        run(args(trace, &[&flags[..], &outputs].concat()).unwrap()).unwrap();
        let report: serde_json::Value =
            serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        let points = report["points"].as_array().unwrap();
        let policies: Vec<_> = points.iter().map(|point| &point["policy"]).collect();
        assert_eq!(policies, ["predicted", "round-robin"]);
        for point in points {
            assert_eq!((&point["arrived"], &point["completed"]), (&6.into(), &6.into()));
            assert_eq!(point["goodput_share"], 1.0);
            // In each repetition the second prompt finds 1,024 tokens of the first, and the
            // third 512.
            let hits = f64::from(2 * (1024 + 512)) / f64::from(2 * (1030 + 1030 + 600));
            let rate = point["hit_rate"].as_f64().unwrap();
            let lru = point["lru_hit_rate"].as_f64().unwrap();
            assert!((rate - hits).abs() < 1e-9 && (lru - hits).abs() < 1e-9, "{rate} {lru} {hits}");
        }
        assert!(report["cost_model"].as_str().unwrap().contains("error"));
        let svg = std::fs::read_to_string(plot).unwrap();
        assert!(svg.contains("round-robin") && svg.contains("time to first token"));
    }

    #[test]
    fn copies_and_repetitions_keep_the_rate_and_change_the_prompts() {
        let trace = file(TRACE);
        let path = trace.path().to_str().unwrap();
        let workload = |flags: &[&str]| {
            let args = args(path, flags).unwrap();
            let trace = RequestTrace::read(&args.trace, args.requests).unwrap();
            ReplayWorkload::new(&args, trace)
        };
        let scaled = workload(&["--rate-scale", "2"]);
        assert_eq!(
            scaled.arrivals.iter().map(|arrival| arrival.0).collect::<Vec<_>>(),
            [0.0, 2.0, 4.0]
        );
        let copies = workload(&["--copies", "3", "--repeat", "2"]);
        assert_eq!(copies.arrivals.len(), 18);
        assert!(copies.arrivals.is_sorted_by(|a, b| a.0 <= b.0));
        let prompts: Vec<_> = copies.requests(7).map(|request| request.prompt).collect();
        let starts: std::collections::BTreeSet<_> =
            prompts.iter().map(|prompt| &prompt[..512]).collect();
        assert_eq!(starts.len(), 6, "each copy has its own shared prefix");
    }
}
