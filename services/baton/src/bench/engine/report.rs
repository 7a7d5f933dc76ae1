//! What came of a bench: its numbers, as JSON and as a table.

use std::time::{Duration, Instant};

use engine::StepRecord;
use serde::Serialize;

use super::super::{
    stats::median,
    steps::{DecodeFigures, Decoding, Spread},
    tune::TunedRows,
};

#[derive(Serialize)]
pub(super) struct Report {
    pub(super) model: String,
    pub(super) dtype: String,
    pub(super) isa: String,
    pub(super) threads: usize,
    pub(super) load_s: f64,
    /// What of it was spent on what, in order.
    pub(super) start: Vec<StartPart>,
    /// Products of a GPU that were timed in it.
    pub(super) tuned: Vec<TunedRows>,
    /// Median of reading as many bytes as the weights have, all threads.
    pub(super) weight_read_gb_per_s: f64,
    /// Bytes of weights that one decode step must read.
    pub(super) weight_bytes: u64,
    /// What a GPU's memory is read with at best.
    pub(super) roof_gb_per_s: Option<f64>,
    pub(super) depth: u32,
    pub(super) ranks: u32,
    pub(super) rows: Vec<Row>,
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
pub(super) struct Row {
    pub(super) what: &'static str,
    pub(super) batch: u32,
    pub(super) tokens_each: u32,
    pub(super) tokens_per_s_median: f64,
    pub(super) tokens_per_s_all: Vec<f64>,
    /// Decode at batch 1 cannot be faster than reading the weights.
    pub(super) share_of_weight_read: Option<f64>,
    /// Of prefill: from the first prompt's arrival to the first sequence's first token, and to the last
    /// one's. Medians.
    pub(super) ttft_ms: Option<[f64; 2]>,
    pub(super) decode: Option<DecodeFigures>,
}

/// One measured run.
pub(super) struct Run {
    /// When its sequences arrived.
    pub(super) started: Instant,
    pub(super) steps: Vec<StepRecord>,
    /// Of the steps that brought first tokens, one for each sequence.
    pub(super) firsts: Vec<usize>,
    /// Of the step with the last token.
    pub(super) last: usize,
    /// Tokens of all sequences from the last first token on, without that step's.
    pub(super) tokens_after: usize,
}

impl Run {
    /// To the end of the step with this index.
    pub(super) fn seconds_to(&self, step: usize) -> f64 {
        self.steps[step].collect.end.saturating_duration_since(self.started).as_secs_f64()
    }

    pub(super) fn all_begun(&self) -> usize {
        self.firsts.last().copied().unwrap_or(0)
    }
}

pub(super) fn prefill_row(runs: &[Run], batch: u32, prompt_tokens: u32) -> Row {
    let seconds: Vec<f64> = runs.iter().map(|run| run.seconds_to(run.all_begun())).collect();
    let tokens = f64::from(batch * prompt_tokens);
    let all: Vec<f64> = seconds.iter().map(|seconds| tokens / seconds).collect();
    let first: Vec<f64> = runs.iter().map(|run| run.seconds_to(run.firsts[0])).collect();
    Row {
        what: "prefill",
        batch,
        tokens_each: prompt_tokens,
        tokens_per_s_median: median(&all),
        tokens_per_s_all: all,
        share_of_weight_read: None,
        ttft_ms: Some([median(&first), median(&seconds)].map(|seconds| seconds * 1e3)),
        decode: None,
    }
}

/// Tokens per second are those of the whole batch once every sequence decodes.
pub(super) fn decode_row(
    runs: &[Run],
    batch: u32,
    decode_tokens: u32,
    floor_ms: Option<f64>,
) -> Row {
    let per_s = |run: &Run| {
        let seconds = run.seconds_to(run.last) - run.seconds_to(run.all_begun());
        run.tokens_after as f64 / seconds
    };
    let all: Vec<f64> = runs.iter().map(per_s).collect();
    let decoding = runs.iter().map(|run| Decoding {
        steps: run.steps[run.all_begun()..=run.last].to_vec(),
        tokens_after_first: decode_tokens - 1,
    });
    Row {
        what: "decode",
        batch,
        tokens_each: decode_tokens,
        tokens_per_s_median: median(&all),
        tokens_per_s_all: all,
        share_of_weight_read: None,
        ttft_ms: None,
        decode: Some(DecodeFigures::of(&decoding.collect::<Vec<_>>(), floor_ms)),
    }
}

pub(super) fn print_table(report: &Report) {
    print!("{}  {}  {}  ", report.model, report.dtype, report.isa);
    match (report.weight_read_gb_per_s, report.roof_gb_per_s) {
        (_, Some(roof)) => {
            println!("loaded in {:.2} s  the GPU's memory is read at {roof:.0} GB/s", report.load_s)
        }
        // Not measured.
        (0.0, None) => println!("loaded in {:.2} s", report.load_s),
        (rate, None) => println!(
            "{} threads  loaded in {:.2} s  as many bytes are read at {rate:.1} GB/s",
            report.threads, report.load_s
        ),
    }
    let parts = report.start.iter().map(|part| format!("{} {:.3} s", part.what, part.seconds));
    println!("start: {}", parts.collect::<Vec<_>>().join(", "));
    println!(
        "{:<8} {:>6} {:>8} {:>12} {:>12} {:>12}  ",
        "", "batch", "tokens", "tok/s", "least", "most"
    );
    for row in &report.rows {
        let least = row.tokens_per_s_all.iter().copied().fold(f64::INFINITY, f64::min);
        let most = row.tokens_per_s_all.iter().copied().fold(0.0, f64::max);
        let limit = match (row.share_of_weight_read, row.ttft_ms) {
            (Some(share), _) => {
                format!("{:.0} % of reading the weights and nothing else", share * 100.0)
            }
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

/// What decode steps cost the host, how the device was used, and how near it came to its floor.
fn print_steps(report: &Report) {
    println!(
        "\ndecode steps, {} in flight; microseconds of the host: median/99th percent",
        report.depth
    );
    println!(
        "{:>6} {:>9} {:>13} {:>13} {:>13} {:>13} {:>9} {:>7} {:>9} {:>9} {:>8}",
        "batch",
        "ms",
        "plan",
        "launch",
        "collect",
        "all",
        "busy ms",
        "idle %",
        "padded",
        "floor ms",
        "of it %"
    );
    let percent =
        |share: Option<f64>| share.map_or("-".into(), |share| format!("{:.2}", share * 100.0));
    for row in &report.rows {
        let Some(decode) = &row.decode else { continue };
        let host = &decode.host_us;
        let [plan, launch, collect, all] = [host.plan, host.launch, host.collect, host.all]
            .map(|Spread { p50, p99 }| format!("{p50:.1}/{p99:.1}"));
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
