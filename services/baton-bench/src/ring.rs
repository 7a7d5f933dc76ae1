//! `baton-bench ring`: latency of a step plan from a node to the last of its ranks; no model.
//!
//! The ranks are processes of this program. They read the shared-memory ring as real ranks do and
//! answer with two times: when a plan's bytes arrived and when the plan was decoded. The next plan
//! follows the last answer after a gap, as between steps.

use std::{
    env,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use engine::plan::{RowPlan, Slot, StepPlan};
use kernels::{BlockId, shared::RegionName};
use ranks::{
    RankSpec, build, clock_nanos, codec,
    region::GroupRegion,
    ring::{RingReader, RingWriter},
};
use serde::Serialize;

use baton::bench::stats::Percentiles;

/// Time-out of every wait for another process.
const TIMEOUT: Duration = Duration::from_secs(30);
const WARM_UP: u32 = 100;
/// Tokens per block: on average one of 16 rows begins a block in a step.
const BLOCK_TOKENS: u32 = 16;

#[derive(Args)]
pub(crate) struct RingArgs {
    /// Number of ranks.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=16))]
    readers: u32,
    /// Rows of the plan: sequences that decode one token each.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096))]
    rows: u32,
    /// Plans measured with spinning ranks, and with sleeping ranks.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    plans: u32,
    /// Gap from the last answer to the next plan, in µs.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    gap_us: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Rank of this process.
    #[arg(long, hide = true)]
    spec: Option<RankSpec>,
    /// Time that the rank spins before it sleeps, in µs.
    #[arg(long, hide = true, default_value_t = 0)]
    spin_us: u64,
}

#[derive(Debug, Serialize)]
struct RingReport {
    cpus: usize,
    readers: u32,
    rows: u32,
    /// Bytes of a plan after a change of its rows, and of the measured plans without a change.
    plan_bytes: usize,
    steady_bytes: usize,
    /// Latencies in µs.
    spinning_us: PlanLatency,
    asleep_us: PlanLatency,
}

/// Latency from the start of encoding to the last rank's decoded plan, and its three parts.
#[derive(Debug, Serialize)]
struct PlanLatency {
    whole: Percentiles,
    encoded: Percentiles,
    /// Write by the node, read and check by the rank.
    transferred: Percentiles,
    decoded: Percentiles,
}

impl PlanLatency {
    /// Takes samples of the three parts in order.
    fn of(samples: &[[f64; 3]]) -> Self {
        let part =
            |part: &dyn Fn(&[f64; 3]) -> f64| Percentiles::of(samples.iter().map(part).collect());
        Self {
            whole: part(&|parts| parts.iter().sum()),
            encoded: part(&|parts| parts[0]),
            transferred: part(&|parts| parts[1]),
            decoded: part(&|parts| parts[2]),
        }
    }
}

pub(crate) fn run(args: RingArgs) -> Result<()> {
    if let Some(spec) = &args.spec {
        return read(spec, Duration::from_micros(args.spin_us));
    }
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let [plan_bytes, steady_bytes] = plan_bytes(args.rows);
    let spinning_us = measure(&args, 10 * args.gap_us + 1_000)?;
    let asleep_us = measure(&args, 0)?;
    let RingArgs { readers, rows, .. } = args;
    let report =
        RingReport { cpus, readers, rows, plan_bytes, steady_bytes, spinning_us, asleep_us };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(());
    }
    println!("a decode step of {rows} rows: {steady_bytes} bytes, {plan_bytes} after a change");
    println!("latency from the node to the last of {readers} ranks on {cpus} CPUs, µs:");
    for (how, it) in [("spinning", &report.spinning_us), ("asleep", &report.asleep_us)] {
        let whole = &it.whole;
        println!("  {how:<9} p50 {:7.2}  p99 {:7.2}  most {:7.1}", whole.p50, whole.p99, whole.max);
        for (part, it) in
            [("encoded", &it.encoded), ("transferred", &it.transferred), ("decoded", &it.decoded)]
        {
            println!("    {part:<7} p50 {:7.2}  p99 {:7.2}  most {:7.1}", it.p50, it.p99, it.max);
        }
    }
    if cpus <= readers as usize {
        println!("  there are fewer CPUs than processes: the processes wait for each other");
    }
    Ok(())
}

/// Returns the plan of a decode step without a change of rows.
fn plan(rows: u32, step_id: u64) -> StepPlan {
    let row = |slot| RowPlan {
        slot: Slot(slot),
        generation: 1,
        token_count: 1,
        samples: true,
        drafts_max: 0,
    };
    StepPlan {
        step_id,
        rows: (0..rows).map(row).collect(),
        extended: (0..rows / BLOCK_TOKENS).map(|slot| (Slot(slot), vec![BlockId(slot)])).collect(),
        ..StepPlan::default()
    }
}

/// Returns the bytes of the first plan with these rows and of the next one.
fn plan_bytes(rows: u32) -> [usize; 2] {
    let (mut history, mut bytes) = (codec::PlanHistory::default(), Vec::new());
    [1 << 40, (1 << 40) + 1].map(|step| {
        codec::encode_plan(&plan(rows, step), &mut history, &mut bytes);
        bytes.len()
    })
}

/// Rank processes; dropping them kills them.
struct ReaderProcesses(Vec<Child>);

impl Drop for ReaderProcesses {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn measure(args: &RingArgs, spin_us: u64) -> Result<PlanLatency> {
    let mut epoch = [0; 16];
    getrandom::fill(&mut epoch).map_err(|error| anyhow::anyhow!("no random numbers: {error}"))?;
    let name = RegionName::own(u128::from_le_bytes(epoch), "bench");
    let spec = |rank| RankSpec { region: name.clone(), rank, of: args.readers };
    let region = GroupRegion::create(&spec(0), build())?;
    let mut plans = RingWriter::new(region.plans());
    let ranks = 0..args.readers as usize;
    let mut answers: Vec<_> = ranks.map(|rank| RingReader::new(region.results(rank), 0)).collect();
    let mut readers = ReaderProcesses(Vec::new());
    for rank in 0..args.readers {
        let mut command = Command::new(env::current_exe()?);
        command.args(["ring", "--spec", &spec(rank).to_string()]);
        command.args(["--spin-us", &spin_us.to_string()]).stdin(Stdio::null());
        readers.0.push(command.spawn().context("cannot start a rank")?);
    }
    let mut samples = Vec::new();
    let (mut history, mut message) = (codec::PlanHistory::default(), Vec::new());
    for step in 0..u64::from(WARM_UP + args.plans) {
        let plan = plan(args.rows, step);
        let began = clock_nanos();
        codec::encode_plan(&plan, &mut history, &mut message);
        let encoded = clock_nanos();
        plans.write(&message, TIMEOUT, || false)?;
        let (mut seen, mut last) = (0, 0);
        for answer in &mut answers {
            let answer = answer.read(TIMEOUT, Duration::ZERO)?.context("a rank exited")?;
            let (moments, []) = answer.as_chunks() else { bail!("malformed answer of a rank") };
            let [read, decoded] =
                <[[u8; 8]; 2]>::try_from(moments).context("malformed answer of a rank")?;
            (last, seen) =
                (last, seen).max((u64::from_le_bytes(decoded), u64::from_le_bytes(read)));
        }
        let moments = [began, encoded, seen, last];
        ensure!(moments.is_sorted(), "the clocks of node and ranks differ");
        if step >= u64::from(WARM_UP) {
            samples.push([0, 1, 2].map(|part| (moments[part + 1] - moments[part]) as f64 / 1e3));
        }
        // A real node does not sleep on a timer between steps either.
        let answered = Instant::now();
        while answered.elapsed() < Duration::from_micros(args.gap_us) {
            thread::yield_now();
        }
    }
    plans.write(&codec::encode_stop(), TIMEOUT, || false)?;
    Ok(PlanLatency::of(&samples))
}

fn read(spec: &RankSpec, spin: Duration) -> Result<()> {
    let region = GroupRegion::open(spec, build())?;
    let rank = spec.rank as usize;
    let (mut plans, mut answers) =
        (RingReader::new(region.plans(), rank), RingWriter::new(region.results(rank)));
    let mut history = codec::PlanHistory::default();
    loop {
        let Some(message) = plans.read(TIMEOUT, spin)? else { bail!("no plan arrived in time") };
        let seen = clock_nanos();
        let order = codec::decode_order(message, &mut history)?;
        let decoded = clock_nanos();
        let codec::RankOrder::Plan { state, found, .. } = &order else { return Ok(()) };
        ensure!(state == found, "a plan was lost");
        let moments = [seen.to_le_bytes(), decoded.to_le_bytes()];
        answers.write(moments.as_flattened(), TIMEOUT, || false)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steady_plan_of_256_rows_has_at_most_300_bytes() {
        let [changed, steady] = plan_bytes(256);
        assert!(changed <= 4_200 && steady <= 300, "{changed}, {steady}");
    }
}
