//! The cost model of a replay, fitted to results of `baton bench engine --json` and `baton-bench
//! transfer --json`.

use std::{fmt, fs, ops::RangeInclusive, path::Path, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use cluster::predict::{
    DecodeCosts, PrefillCosts, StepCosts, StepFit, StepLimits, Work, attention_pairs,
};
use serde::Deserialize;
use simulation::{LinkCost, StepCost};

use crate::bench::serve::RATES;

/// Measurements from docs/benchmarks: one H100 with weights in bf16 and the sizes of Llama-3.1-8B,
/// and `nccl` between two H200.
const ENGINE: &str = include_str!("h100-8b-engine.json");
const TRANSFER: &str = include_str!("h200-8b-transfer.json");
/// KV tokens of a node of these measurements.
pub(super) const KV_TOKENS: u32 = 458_000;
/// Measurements of one H200 with weights in bf16 and the sizes of Qwen3-32B, and `nccl` between two
/// H200.
const ENGINE_32B: &str = include_str!("h200-32b-engine.json");
const TRANSFER_32B: &str = include_str!("h200-32b-transfer.json");
/// KV tokens of a node of these measurements.
const KV_TOKENS_32B: u32 = 264_000;
/// Number of passes of a fit over the rows. A fit weights steps by age; after these passes all rows
/// have nearly equal weights.
const PASSES: u32 = 64;
/// Delay of the control messages before the first and after the last chunk of a transfer.
/// Subtracted from measured latencies, because the simulation adds this delay itself.
const SIMULATED_MESSAGES: Duration = Duration::from_micros(400);
/// Range of measured times in ms.
const MS: RangeInclusive<f64> = 1e-6..=1e9;
const BLOCK_BYTES_MAX: u64 = 1 << 30;

/// Result of `baton bench engine --json`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct EngineResult {
    pub model: String,
    pub dtype: String,
    pub isa: String,
    pub step_tokens: u32,
    pub rows: Vec<EngineRow>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct EngineRow {
    pub what: String,
    pub batch: u32,
    pub tokens_each: u32,
    pub context_tokens: Option<u32>,
    pub tokens_per_s_median: f64,
}

/// Result of `baton-bench transfer --json`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct TransferResult {
    pub block_bytes: u64,
    pub rows: Vec<TransferRow>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct TransferRow {
    pub transport: String,
    pub blocks: u32,
    pub chunk_blocks: u32,
    pub alone_us: Median,
    pub together_gb_per_s: f64,
    pub first_contact_ms: f64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Median {
    pub p50: f64,
}

/// Relative errors of a fit over its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct FitError {
    pub rows: usize,
    pub root_mean_square: f64,
    pub max: f64,
}

impl FitError {
    fn of(errors: &[f64]) -> Self {
        let squares: f64 = errors.iter().map(|error| error * error).sum();
        Self {
            rows: errors.len(),
            root_mean_square: (squares / errors.len().max(1) as f64).sqrt(),
            max: errors.iter().fold(0.0, |max, error| max.max(error.abs())),
        }
    }
}

impl fmt::Display for FitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rms, max] = [self.root_mean_square, self.max].map(|error| error * 100.0);
        write!(f, "error {rms:.1} % (max {max:.1} %) over {} rows", self.rows)
    }
}

/// The fitted model.
#[derive(Clone, Debug)]
pub(super) struct ReplayCostModel {
    pub name: String,
    pub steps: StepCost,
    pub step_error: FitError,
    pub step_tokens: u32,
    pub transport: String,
    pub links: LinkCost,
    pub link_error: FitError,
    pub chunk_blocks: usize,
}

impl ReplayCostModel {
    /// Fits the model to the results in these files; without files to the built-in measurements.
    pub(super) fn read(engine: &[impl AsRef<Path>], transfer: Option<&Path>) -> Result<Self> {
        let engine = match engine {
            [] => vec![parse(ENGINE, "the built-in figures")?],
            files => files
                .iter()
                .map(|path| read(path.as_ref(), "--engine", "baton bench engine --json"))
                .collect::<Result<_>>()?,
        };
        let transfer = match transfer {
            None => parse(TRANSFER, "the built-in figures")?,
            Some(path) => read(path, "--transfer", "baton-bench transfer --json")?,
        };
        Self::fit(&engine, &transfer)
    }

    /// Returns the built-in measurements, each with the KV tokens of a node.
    pub(super) fn built_in() -> Result<[(Self, u32); 2]> {
        let name = "the built-in figures";
        let fit = |engine, transfer| Self::fit(&[parse(engine, name)?], &parse(transfer, name)?);
        Ok([(fit(ENGINE, TRANSFER)?, KV_TOKENS), (fit(ENGINE_32B, TRANSFER_32B)?, KV_TOKENS_32B)])
    }

    pub(super) fn fit(engine: &[EngineResult], transfer: &TransferResult) -> Result<Self> {
        let [first, ..] = engine else { return Err(anyhow!("--engine: no result is given")) };
        let rows: Vec<_> = engine
            .iter()
            .flat_map(|result| result.rows.iter().map(|row| step(result, row)))
            .collect();
        let rows = rows.into_iter().collect::<Result<Vec<_>>>()?;
        let (mut steps, step_error) = fit_steps(&rows, first.step_tokens)?;
        steps.deviation = step_error.root_mean_square;
        let (links, link_error) = fit_links(transfer)?;
        let fastest = &transfer.rows[0];
        Ok(Self {
            name: format!("{} {} on {}", first.model, first.dtype, first.isa),
            steps,
            step_error,
            step_tokens: first.step_tokens,
            transport: fastest.transport.clone(),
            links,
            link_error,
            chunk_blocks: fastest.chunk_blocks as usize,
        })
    }

    /// Returns the time of `tokens` prompt tokens after `cached` ones on an idle node, in seconds.
    pub(super) fn prompt_s(&self, cached: f64, tokens: f64) -> f64 {
        let PrefillCosts { step_ms, token_ms, pair_ms } = self.steps.prefill;
        let steps = (tokens / f64::from(self.step_tokens)).ceil();
        (steps * step_ms + tokens * token_ms + attention_pairs(cached, tokens) * pair_ms) / 1e3
    }

    /// Returns the time of a decode step, in seconds.
    pub(super) fn decode_s(&self, rows: f64, context_tokens: f64) -> f64 {
        let DecodeCosts { step_ms, row_ms, context_token_ms } = self.steps.decode;
        (step_ms + row_ms * rows + context_token_ms * rows * context_tokens) / 1e3
    }
}

impl fmt::Display for ReplayCostModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StepCost { prefill, decode, .. } = &self.steps;
        writeln!(
            f,
            "cost model: {}: prefill step {:.2} ms + {:.2} µs a token + {:.3} ns a pair, decode step {:.2} ms + {:.1} µs \
             a row + {:.2} ns a KV token, {}",
            self.name,
            prefill.step_ms,
            prefill.token_ms * 1e3,
            prefill.pair_ms * 1e6,
            decode.step_ms,
            decode.row_ms * 1e3,
            decode.context_token_ms * 1e6,
            self.step_error
        )?;
        write!(
            f,
            "            {}: {:.1} GB/s a node, latency {:.2} ms, new connection {:.0} ms, chunks of {} blocks of {} KiB, {}",
            self.transport,
            self.links.bytes_per_s / 1e9,
            self.links.latency.as_secs_f64() * 1e3,
            self.links.connect.as_secs_f64() * 1e3,
            self.chunk_blocks,
            self.links.block_bytes >> 10,
            self.link_error
        )
    }
}

fn read<T: for<'a> Deserialize<'a>>(path: &Path, flag: &str, command: &str) -> Result<T> {
    let name = format!("{flag} {}", path.display());
    let text = fs::read_to_string(path).with_context(|| name.clone())?;
    parse(&text, &name).with_context(|| format!("{name}: expected the output of `{command}`"))
}

fn parse<T: for<'a> Deserialize<'a>>(text: &str, name: &str) -> Result<T> {
    serde_json::from_str(text).with_context(|| format!("cannot read the cost model from {name}"))
}

/// Returns the work and the time in ms of a mean step of the row.
fn step(result: &EngineResult, row: &EngineRow) -> Result<(Work, f64)> {
    let (batch, tokens) = (f64::from(row.batch), f64::from(row.tokens_each));
    let per_s = row.tokens_per_s_median;
    ensure!(
        per_s.is_finite() && per_s > 0.0 && batch > 0.0 && tokens > 0.0,
        "invalid row of {}, batch {}: {per_s} tokens/s of {tokens} tokens; expected numbers above 0",
        row.what,
        row.batch
    );
    let (work, ms) = match row.what.as_str() {
        "prefill" => {
            let steps = (batch * tokens / f64::from(result.step_tokens.max(1))).ceil();
            let work = Work {
                prefill_tokens: batch * tokens / steps,
                prefill_pairs: batch * tokens * tokens / 2.0 / steps,
                ..Work::default()
            };
            (work, batch * tokens / per_s / steps * 1e3)
        }
        "decode" => {
            let context = row.context_tokens.ok_or_else(|| {
                anyhow!("missing context_tokens in the decode row of batch {}", row.batch)
            })?;
            let work = Work {
                decode_rows: batch,
                context_tokens: batch * (f64::from(context) + tokens / 2.0),
                ..Work::default()
            };
            (work, batch / per_s * 1e3)
        }
        other => return Err(anyhow!("invalid row {other:?}; expected prefill or decode")),
    };
    ensure!(
        MS.contains(&ms),
        "invalid row of {}, batch {}: {per_s:e} tokens/s; expected steps of {} to {} ms",
        row.what,
        row.batch,
        MS.start(),
        MS.end()
    );
    Ok((work, ms))
}

/// Fits the rows as a node fits its steps.
fn fit_steps(rows: &[(Work, f64)], step_tokens: u32) -> Result<(StepCost, FitError)> {
    let mut fit = StepFit::default();
    for _ in 0..PASSES {
        // Decode rows first: the fit of prefill steps uses the fit of decode steps.
        for is_prefill in [false, true] {
            for (work, ms) in
                rows.iter().filter(|(work, _)| (work.prefill_tokens > 0.0) == is_prefill)
            {
                fit.add(work, Duration::from_secs_f64(ms / 1e3));
            }
        }
    }
    let limits = StepLimits { step_tokens, chunk_tokens: step_tokens, itl_max: None, slots: 0 };
    let costs = StepCosts::from(fit.report(limits));
    let (Some(prefill), Some(decode)) = (costs.prefill, costs.decode) else {
        return Err(anyhow!("--engine: expected prefill and decode rows"));
    };
    let errors: Vec<f64> =
        rows.iter().map(|(work, ms)| time_ms(&prefill, &decode, work) / ms - 1.0).collect();
    let steps = StepCost { prefill, decode, deviation: 0.0, is_eager: false };
    Ok((steps, FitError::of(&errors)))
}

fn time_ms(prefill: &PrefillCosts, decode: &DecodeCosts, work: &Work) -> f64 {
    match work.prefill_tokens > 0.0 {
        true => {
            prefill.step_ms
                + prefill.token_ms * work.prefill_tokens
                + prefill.pair_ms * work.prefill_pairs
        }
        false => {
            decode.step_ms
                + decode.row_ms * work.decode_rows
                + decode.context_token_ms * work.context_tokens
        }
    }
}

/// Fits a fixed time and a bandwidth to the times of single transfers. Concurrent transfers share
/// the bandwidth that the benchmark measured for them.
fn fit_links(result: &TransferResult) -> Result<(LinkCost, FitError)> {
    let first = result.rows.first();
    let first = first.ok_or_else(|| anyhow!("--transfer: the result has no row"))?;
    let rows: Vec<_> = result.rows.iter().filter(|row| row.transport == first.transport).collect();
    let bandwidth = rows.iter().map(|row| row.together_gb_per_s).fold(0.0, f64::max) * 1e9;
    ensure!(
        RATES.contains(&(bandwidth / 1e9))
            && rows.iter().all(|row| MS.contains(&(row.alone_us.p50 / 1e3)))
            && first.first_contact_ms <= *MS.end()
            && (1..=BLOCK_BYTES_MAX).contains(&result.block_bytes),
        "--transfer: invalid result of {}; expected times of {} to {} ms, bandwidths of {} to {} GB/s and blocks of \
         at most {BLOCK_BYTES_MAX} bytes",
        first.transport,
        MS.start(),
        MS.end(),
        RATES.start(),
        RATES.end()
    );
    // Least squares of relative errors: minimizes the sum of (fixed * a + byte * b - 1)^2.
    let inputs = rows.iter().map(|row| {
        let seconds = row.alone_us.p50 / 1e6;
        (1.0 / seconds, f64::from(row.blocks) * result.block_bytes as f64 / seconds)
    });
    let inputs: Vec<(f64, f64)> = inputs.collect();
    let sum = |of: &dyn Fn(&(f64, f64)) -> f64| inputs.iter().map(of).sum::<f64>();
    let (aa, ab, bb) = (sum(&|x| x.0 * x.0), sum(&|x| x.0 * x.1), sum(&|x| x.1 * x.1));
    let (a, b) = (sum(&|x| x.0), sum(&|x| x.1));
    let determinant = aa * bb - ab * ab;
    let byte = match determinant / (aa * bb) > 1e-9 {
        true => ((aa * b - ab * a) / determinant).max(0.0),
        // One size only: use the measured bandwidth for the time of the bytes.
        false => bandwidth.recip(),
    };
    let fixed = ((a - ab * byte) / aa).max(0.0);
    let errors: Vec<f64> = inputs.iter().map(|x| fixed * x.0 + byte * x.1 - 1.0).collect();
    let links = LinkCost {
        connect: Duration::from_secs_f64(first.first_contact_ms.max(0.0) / 1e3),
        latency: Duration::from_secs_f64(fixed).saturating_sub(SIMULATED_MESSAGES),
        bytes_per_s: bandwidth,
        block_bytes: result.block_bytes,
    };
    Ok((links, FitError::of(&errors)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_figures_fit_within_ten_percent() {
        let model = ReplayCostModel::read(&[] as &[&Path], None).unwrap();
        assert!(model.step_error.root_mean_square < 0.1, "{model}");
        assert!(model.link_error.max < 0.25, "{model}");
        for (tokens, ms) in [(256.0, 9.1), (1024.0, 24.4), (8192.0, 214.9)] {
            assert!(
                (model.prompt_s(0.0, tokens) * 1e3 / ms - 1.0).abs() < 0.15,
                "{tokens}: {model}"
            );
        }
    }

    #[test]
    fn built_in_models_have_the_kv_bytes_of_their_sizes() {
        // K and V in bf16, blocks of 16 tokens.
        let block_bytes =
            |layers: u64, heads: u64, head_size: u64| 2 * 2 * 16 * layers * heads * head_size;
        let [(small, _), (large, _)] = ReplayCostModel::built_in().unwrap();
        assert_eq!(small.links.block_bytes, block_bytes(32, 8, 128), "Llama-3.1-8B");
        assert_eq!(large.links.block_bytes, block_bytes(64, 8, 128), "Qwen3-32B");
    }

    fn engine(rows: &str) -> Result<EngineResult> {
        parse(
            &format!(
                r#"{{"model": "m", "dtype": "bf16", "isa": "gpu", "step_tokens": 512, "rows": [{rows}]}}"#
            ),
            "a test",
        )
    }

    #[test]
    fn invalid_results_are_rejected() {
        let transfer: TransferResult = parse(TRANSFER, "a test").unwrap();
        for (rows, words) in [
            ("", "expected prefill and decode rows"),
            (
                r#"{"what": "train", "batch": 1, "tokens_each": 9, "tokens_per_s_median": 5}"#,
                "train",
            ),
            (
                r#"{"what": "decode", "batch": 8, "tokens_each": 9, "tokens_per_s_median": 5}"#,
                "missing context_tokens in the decode row of batch 8",
            ),
            (
                r#"{"what": "prefill", "batch": 1, "tokens_each": 9, "tokens_per_s_median": 0}"#,
                "invalid row of prefill",
            ),
            (
                r#"{"what": "prefill", "batch": 1, "tokens_each": 9, "tokens_per_s_median": 1e-300}"#,
                "1e-300 tokens/s; expected steps of 0.000001 to 1000000000 ms",
            ),
        ] {
            let error = ReplayCostModel::fit(&[engine(rows).unwrap()], &transfer).unwrap_err();
            assert!(format!("{error:#}").contains(words), "{error:#}");
        }
        let mut slow = transfer.clone();
        slow.rows[0].first_contact_ms = 1e300;
        assert!(fit_links(&slow).is_err());
        let empty = TransferResult { rows: Vec::new(), ..transfer };
        assert!(fit_links(&empty).is_err());
        assert!(format!("{:#}", engine("5").unwrap_err()).contains("cannot read the cost model"));
    }
}
