//! The results, as JSON and as a table.

use std::time::{Duration, Instant};

use engine::StepRecord;
use serde::Serialize;

use super::super::{
    stats::{Percentiles, median},
    steps::{DecodeStats, DecodeSteps},
    tune::TunedRows,
};

#[derive(Serialize)]
pub(super) struct EngineReport {
    pub(super) model: String,
    pub(super) dtype: String,
    pub(super) isa: String,
    pub(super) threads: usize,
    pub(super) load_s: f64,
    /// Parts of `load_s` in order.
    pub(super) start: Vec<StartPart>,
    /// GEMMs that were tuned at the start, by rows.
    pub(super) tuned: Vec<TunedRows>,
    /// Read bandwidth over as many bytes as the weights have, all threads, median.
    pub(super) weight_read_gb_per_s: f64,
    /// Bytes of weights that one decode step reads.
    pub(super) weight_bytes: u64,
    /// Peak memory bandwidth of the GPU.
    pub(super) peak_gb_per_s: Option<f64>,
    pub(super) depth: u32,
    pub(super) ranks: u32,
    /// Largest number of tokens of a step.
    pub(super) step_tokens: u32,
    pub(super) rows: Vec<EngineMeasurement>,
}

#[derive(Serialize)]
pub(super) struct StartPart {
    pub(super) what: &'static str,
    pub(super) seconds: f64,
}

impl StartPart {
    pub(super) fn new(what: &'static str, time: Duration) -> Self {
        Self { what, seconds: time.as_secs_f64() }
    }
}

#[derive(Serialize)]
pub(super) struct EngineMeasurement {
    pub(super) what: &'static str,
    pub(super) batch: u32,
    pub(super) tokens_each: u32,
    /// Decode only: tokens of each prompt.
    pub(super) context_tokens: Option<u32>,
    pub(super) tokens_per_s_median: f64,
    pub(super) tokens_per_s_all: Vec<f64>,
    /// Decode at batch 1 only: fraction of the read bandwidth.
    pub(super) share_of_weight_read: Option<f64>,
    /// Prefill only: medians of the time to the first token of the first sequence and of the last
    /// one.
    pub(super) ttft_ms: Option<[f64; 2]>,
    pub(super) decode: Option<DecodeStats>,
}

/// One measured run.
pub(super) struct EngineRun {
    /// Arrival of its sequences.
    pub(super) started: Instant,
    pub(super) steps: Vec<StepRecord>,
    /// Index of the step with the first token, for each sequence.
    pub(super) firsts: Vec<usize>,
    /// Index of the last measured step.
    pub(super) last: usize,
}

impl EngineRun {
    /// Returns the time from the arrival to the end of a step.
    pub(super) fn seconds_to(&self, step: usize) -> f64 {
        self.steps[step].collect.end.saturating_duration_since(self.started).as_secs_f64()
    }

    pub(super) fn all_begun(&self) -> usize {
        self.firsts.last().copied().unwrap_or(0)
    }
}

pub(super) fn prefill_row(runs: &[EngineRun], batch: u32, prompt_tokens: u32) -> EngineMeasurement {
    let seconds: Vec<f64> = runs.iter().map(|run| run.seconds_to(run.all_begun())).collect();
    let tokens = f64::from(batch * prompt_tokens);
    let all: Vec<f64> = seconds.iter().map(|seconds| tokens / seconds).collect();
    let first: Vec<f64> = runs.iter().map(|run| run.seconds_to(run.firsts[0])).collect();
    EngineMeasurement {
        what: "prefill",
        batch,
        tokens_each: prompt_tokens,
        context_tokens: None,
        tokens_per_s_median: median(&all),
        tokens_per_s_all: all,
        share_of_weight_read: None,
        ttft_ms: Some([median(&first), median(&seconds)].map(|seconds| seconds * 1e3)),
        decode: None,
    }
}

/// Returns a row with the throughput of the whole batch from the step in which every sequence
/// decodes.
pub(super) fn decode_row(
    runs: &[EngineRun],
    batch: u32,
    (context_tokens, decode_tokens): (u32, u32),
    floor_ms: Option<f64>,
) -> EngineMeasurement {
    let per_s = |run: &EngineRun| {
        let seconds = run.seconds_to(run.last) - run.seconds_to(run.all_begun());
        f64::from(batch * (decode_tokens - 1)) / seconds
    };
    let all: Vec<f64> = runs.iter().map(per_s).collect();
    let decoding = runs.iter().map(|run| DecodeSteps {
        steps: run.steps[run.all_begun()..=run.last].to_vec(),
        tokens_after_first: decode_tokens - 1,
    });
    EngineMeasurement {
        what: "decode",
        batch,
        tokens_each: decode_tokens,
        context_tokens: Some(context_tokens),
        tokens_per_s_median: median(&all),
        tokens_per_s_all: all,
        share_of_weight_read: None,
        ttft_ms: None,
        decode: Some(DecodeStats::of(&decoding.collect::<Vec<_>>(), floor_ms)),
    }
}

pub(super) fn print_table(report: &EngineReport) {
    print!("{}  {}  {}  ", report.model, report.dtype, report.isa);
    match (report.weight_read_gb_per_s, report.peak_gb_per_s) {
        (_, Some(peak)) => {
            println!("loaded in {:.2} s  peak GPU memory bandwidth {peak:.0} GB/s", report.load_s)
        }
        // No bandwidth was measured.
        (0.0, None) => println!("loaded in {:.2} s", report.load_s),
        (rate, None) => println!(
            "{} threads  loaded in {:.2} s  memory bandwidth {rate:.1} GB/s",
            report.threads, report.load_s
        ),
    }
    let parts = report.start.iter().map(|part| format!("{} {:.3} s", part.what, part.seconds));
    println!("start: {}", parts.collect::<Vec<_>>().join(", "));
    println!("          batch   tokens        tok/s          min          max  ");
    for row in &report.rows {
        let least = row.tokens_per_s_all.iter().copied().fold(f64::INFINITY, f64::min);
        let most = row.tokens_per_s_all.iter().copied().fold(0.0, f64::max);
        let limit = match (row.share_of_weight_read, row.ttft_ms) {
            (Some(share), _) => format!("{:.0} % of the memory bandwidth", share * 100.0),
            (None, Some([first, last])) => format!("first token {first:.1} ms, last {last:.1} ms"),
            (None, None) => String::new(),
        };
        println!(
            "{:<8} {:>6} {:>8} {:>12.1} {:>12.1} {:>12.1}  {limit}",
            row.what, row.batch, row.tokens_each, row.tokens_per_s_median, least, most
        );
    }
    print_steps(report);
}

/// Prints host time, device use and the fraction of the memory-bound minimum of decode steps.
fn print_steps(report: &EngineReport) {
    println!("\ndecode steps, {} in flight; host times in µs: p50/p99", report.depth);
    println!(concat!(
        " batch        ms          plan        launch",
        "       collect           all   busy ms  idle %    padded  bound ms   % peak"
    ));
    let percent =
        |share: Option<f64>| share.map_or("-".into(), |share| format!("{:.2}", share * 100.0));
    for row in &report.rows {
        let Some(decode) = &row.decode else { continue };
        let host = &decode.host_us;
        let [plan, launch, collect, all] = [host.plan, host.launch, host.collect, host.all]
            .map(|Percentiles { p50, p99, .. }| format!("{p50:.1}/{p99:.1}"));
        println!(
            "{:>6} {:>9.3} {plan:>13} {launch:>13} {collect:>13} {all:>13} {:>9.3} {:>7} {:>9} {:>9} {:>8}",
            row.batch,
            decode.step_ms_median,
            decode.device_busy_us.p50 / 1e3,
            percent(decode.device_idle_share),
            decode.dispatches.padding_rows,
            decode.floor_ms.map_or("-".into(), |floor| format!("{floor:.3}")),
            percent(decode.share_of_floor),
        );
    }
}
