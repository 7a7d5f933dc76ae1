//! `baton bench serve`: a streaming load client for any server with the OpenAI completions API.
//!
//! Closed loop (`--concurrency`) or Poisson arrivals (`--rate`). Prompts are random token ids, so
//! that their length is exact and no prefix cache helps. Every figure is of whole requests that
//! ended well; the others are counted by what went wrong.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use http_body_util::BodyExt;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::{sync::Semaphore, task::JoinSet};

use super::stats::{Percentiles, WorkloadRng, median};
use crate::{
    http_client::{HttpClient, whole_body},
    sse::SseReader,
};

/// Open-loop requests under way at once; arrivals beyond it are reported as `client full`.
const IN_FLIGHT_MAX: usize = 4096;

#[derive(Args, Clone)]
pub struct ServeArgs {
    /// Server to measure, without the `/v1` part.
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    url: String,
    /// Model to ask for; by default the first that `/v1/models` names.
    #[arg(long)]
    model: Option<String>,
    /// Requests in all.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Requests under way at once (closed loop).
    #[arg(long, default_value_t = 8, conflicts_with = "rate", value_parser = clap::value_parser!(u32).range(1..=4096))]
    concurrency: u32,
    /// Mean arrivals per second of a Poisson process (open loop).
    #[arg(long)]
    rate: Option<f64>,
    /// Prompt length in tokens: N or LOW..HIGH (uniform).
    #[arg(long, default_value = "128", value_parser = parse_length)]
    input_tokens: Length,
    /// Answer length in tokens: N or LOW..HIGH (uniform). Ends of sequence are ignored.
    #[arg(long, default_value = "128", value_parser = parse_length)]
    output_tokens: Length,
    /// Prompts take token ids from 10 up to this; every model has as many.
    #[arg(long, default_value_t = 30_000, value_parser = clap::value_parser!(u32).range(11..))]
    vocabulary: u32,
    /// Seed of lengths, prompts and arrivals.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// A request that takes longer counts as failed.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout_s: u64,
    /// Also write the result as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// A length in tokens, drawn uniformly from both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Length {
    low: u32,
    high: u32,
}

fn parse_length(text: &str) -> Result<Length, String> {
    let (low, high) = text.split_once("..").unwrap_or((text, text));
    let number = |part: &str| match part.parse::<u32>() {
        Ok(number) if (1..=1_000_000).contains(&number) => Ok(number),
        _ => Err(format!("{part:?} is not a token count of 1..=1000000")),
    };
    let length = Length { low: number(low)?, high: number(high)? };
    if length.low > length.high {
        return Err(format!("{text:?} has its larger number first"));
    }
    Ok(length)
}

/// What one request showed, times in seconds since it was sent.
struct Measured {
    /// Arrival of each token's event; a chunk with several tokens counts each at its arrival.
    token_times: Vec<f64>,
    end: f64,
}

#[derive(Serialize)]
struct Report {
    url: String,
    model: String,
    load: String,
    input_tokens: Length,
    output_tokens: Length,
    requests: u32,
    completed: usize,
    errors: BTreeMap<String, usize>,
    elapsed_s: f64,
    request_per_s: f64,
    output_token_per_s: f64,
    total_token_per_s: f64,
    ttft_ms: Percentiles,
    itl_ms: Percentiles,
    e2e_ms: Percentiles,
    /// Gap between the first two tokens less the request's median gap: what a hand-over costs.
    handover_gap_ms: Percentiles,
}

pub fn run(args: ServeArgs) -> Result<()> {
    if let Some(rate) = args.rate {
        ensure!(rate.is_finite() && rate > 0.0, "--rate {rate} must be greater than 0");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(measure(&args))?;
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&report)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    print_table(&report);
    ensure!(report.completed > 0, "no request completed");
    Ok(())
}

async fn measure(args: &ServeArgs) -> Result<Report> {
    let client = HttpClient::new(Duration::from_secs(5));
    let model = match &args.model {
        Some(model) => model.clone(),
        None => first_model(&client, &args.url).await?,
    };
    let mut rng = WorkloadRng::new(args.seed);
    let in_flight = match args.rate {
        Some(_) => IN_FLIGHT_MAX,
        None => args.concurrency as usize,
    };
    let permits = Arc::new(Semaphore::new(in_flight));
    let bar = ProgressBar::new(u64::from(args.requests)).with_style(
        ProgressStyle::with_template("{pos}/{len} requests {wide_bar} {elapsed} {msg}")
            .expect("the template is constant"),
    );
    let tokens_seen = Arc::new(AtomicUsize::new(0));
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    let mut outcomes = Vec::new();
    let mut next_arrival = 0.0;
    for _ in 0..args.requests {
        let permit = match args.rate {
            Some(rate) => {
                next_arrival += rng.exponential(rate);
                let arrival = started + Duration::from_secs_f64(next_arrival);
                tokio::time::sleep_until(arrival.into()).await;
                permits.clone().try_acquire_owned().ok()
            }
            None => Some(permits.clone().acquire_owned().await?),
        };
        let prompt_tokens = rng.within(args.input_tokens.low, args.input_tokens.high);
        let prompt: Vec<u32> =
            (0..prompt_tokens).map(|_| rng.within(10, args.vocabulary - 1)).collect();
        let output_tokens = rng.within(args.output_tokens.low, args.output_tokens.high);
        let Some(permit) = permit else {
            outcomes.push((prompt_tokens, Err(anyhow!("client full"))));
            continue;
        };
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": output_tokens, "stream": true,
            "ignore_eos": true, "temperature": 0.0,
            "stream_options": {"include_usage": true},
        });
        let (client, url) = (client.clone(), format!("{}/v1/completions", args.url));
        let (timeout, bar, tokens_seen) =
            (Duration::from_secs(args.timeout_s), bar.clone(), tokens_seen.clone());
        tasks.spawn(async move {
            let _permit = permit;
            let outcome = match tokio::time::timeout(
                timeout,
                one_request(&client, &url, &body, output_tokens),
            )
            .await
            {
                Ok(outcome) => outcome,
                Err(_) => Err(anyhow!("no end within {} s", timeout.as_secs())),
            };
            if let Ok(measured) = &outcome {
                tokens_seen.fetch_add(measured.token_times.len(), Ordering::Relaxed);
            }
            let rate = tokens_seen.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64();
            bar.set_message(format!("{rate:.0} tok/s"));
            bar.inc(1);
            (prompt_tokens, outcome)
        });
        while let Some(done) = tasks.try_join_next() {
            outcomes.push(done.context("a request's task panicked")?);
        }
    }
    while let Some(done) = tasks.join_next().await {
        outcomes.push(done.context("a request's task panicked")?);
    }
    let elapsed_s = started.elapsed().as_secs_f64();
    bar.finish_and_clear();
    Ok(summarise(args, model, outcomes, elapsed_s))
}

fn summarise(
    args: &ServeArgs,
    model: String,
    outcomes: Vec<(u32, Result<Measured>)>,
    elapsed_s: f64,
) -> Report {
    let mut errors = BTreeMap::new();
    let (mut ttft, mut itl, mut e2e, mut handover) = (vec![], vec![], vec![], vec![]);
    let (mut prompt_tokens, mut output_tokens, mut completed) = (0, 0, 0);
    for (prompt, outcome) in outcomes {
        let measured = match outcome {
            Ok(measured) => measured,
            Err(error) => {
                *errors.entry(format!("{error:#}")).or_default() += 1;
                continue;
            }
        };
        completed += 1;
        prompt_tokens += prompt as usize;
        output_tokens += measured.token_times.len();
        ttft.push(measured.token_times[0] * 1e3);
        e2e.push(measured.end * 1e3);
        let gaps: Vec<f64> =
            measured.token_times.windows(2).map(|pair| (pair[1] - pair[0]) * 1e3).collect();
        if gaps.len() >= 3 {
            handover.push(gaps[0] - median(&gaps[1..]));
        }
        itl.extend(gaps);
    }
    Report {
        url: args.url.clone(),
        model,
        load: match args.rate {
            Some(rate) => format!("Poisson, {rate} requests/s"),
            None => format!("closed loop, {} at once", args.concurrency),
        },
        input_tokens: args.input_tokens,
        output_tokens: args.output_tokens,
        requests: args.requests,
        completed,
        errors,
        elapsed_s,
        request_per_s: completed as f64 / elapsed_s,
        output_token_per_s: output_tokens as f64 / elapsed_s,
        total_token_per_s: (prompt_tokens + output_tokens) as f64 / elapsed_s,
        ttft_ms: Percentiles::of(ttft),
        itl_ms: Percentiles::of(itl),
        e2e_ms: Percentiles::of(e2e),
        handover_gap_ms: Percentiles::of(handover),
    }
}

async fn first_model(client: &HttpClient, url: &str) -> Result<String> {
    let (status, body) = client.get(&format!("{url}/v1/models")).await?;
    ensure!(status.is_success(), "{url}/v1/models answered {status}");
    let models: Value = serde_json::from_slice(&body).context("/v1/models is not JSON")?;
    models["data"][0]["id"]
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| anyhow!("{url}/v1/models names no model"))
}

async fn one_request(
    client: &HttpClient,
    url: &str,
    body: &Value,
    output_tokens: u32,
) -> Result<Measured> {
    let sent = Instant::now();
    let response = client.post_json(url, &[], body).await?;
    let status = response.status();
    if !status.is_success() {
        let body = whole_body(response).await.unwrap_or_default();
        let said: Value = serde_json::from_slice(&body).unwrap_or_default();
        bail!("{status}: {}", said["error"]["message"].as_str().unwrap_or("(no message)"));
    }
    let mut stream = response.into_body();
    let (mut reader, mut events) = (SseReader::default(), Vec::new());
    let mut token_times = Vec::new();
    let (mut counted, mut done) = (None, false);
    while let Some(frame) = stream.frame().await {
        let frame = frame.map_err(|error| anyhow!("the stream broke: {error}"))?;
        let Some(bytes) = frame.data_ref() else { continue };
        reader.push(bytes, &mut events)?;
        let now = sent.elapsed().as_secs_f64();
        for event in events.drain(..) {
            if event == "[DONE]" {
                done = true;
                continue;
            }
            let event: Value = serde_json::from_str(&event).context("an event is not JSON")?;
            if let Some(message) = event["error"]["message"].as_str() {
                bail!("error event: {message}");
            }
            if let Some(usage) = event["usage"]["completion_tokens"].as_u64() {
                counted = Some(usage as usize);
            }
            // Held-back text makes an empty chunk of a token that was generated all the same, and
            // the chunk with the finish reason alone carries none; the usage count settles it.
            if event["choices"][0]["text"].is_string() {
                token_times.push(now);
            }
        }
    }
    ensure!(done, "the stream ended without [DONE]");
    let counted = counted.unwrap_or(token_times.len());
    ensure!(counted == output_tokens as usize, "{counted} tokens came, {output_tokens} were asked");
    ensure!(!token_times.is_empty(), "no token came");
    token_times.truncate(counted);
    // Chunks with several tokens: the surplus tokens arrived with the last chunk that was seen.
    let last = *token_times.last().expect("checked above");
    token_times.resize(counted, last);
    Ok(Measured { token_times, end: sent.elapsed().as_secs_f64() })
}

fn print_table(report: &Report) {
    println!(
        "{}  model {}  {}  input {}..{}  output {}..{}",
        report.url,
        report.model,
        report.load,
        report.input_tokens.low,
        report.input_tokens.high,
        report.output_tokens.low,
        report.output_tokens.high
    );
    println!(
        "{} of {} requests completed in {:.2} s: {:.2} requests/s, {:.1} output tok/s, {:.1} tok/s in all",
        report.completed,
        report.requests,
        report.elapsed_s,
        report.request_per_s,
        report.output_token_per_s,
        report.total_token_per_s
    );
    for (message, count) in &report.errors {
        println!("  {count} x {message}");
    }
    println!("{:<22} {:>9} {:>9} {:>9} {:>9} {:>9}", "ms", "mean", "p50", "p90", "p99", "max");
    for (name, row) in [
        ("time to first token", &report.ttft_ms),
        ("inter-token latency", &report.itl_ms),
        ("end to end", &report.e2e_ms),
        ("hand-over gap", &report.handover_gap_ms),
    ] {
        println!(
            "{name:<22} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>9.2}",
            row.mean, row.p50, row.p90, row.p99, row.max
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_a_number_or_a_range() {
        assert_eq!(parse_length("128"), Ok(Length { low: 128, high: 128 }));
        assert_eq!(parse_length("16..512"), Ok(Length { low: 16, high: 512 }));
        for bad in ["", "0", "512..16", "-1", "a..b", "1..2..3"] {
            assert!(parse_length(bad).is_err(), "{bad}");
        }
    }
}
