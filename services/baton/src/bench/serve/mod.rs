//! `baton bench serve`: a streaming load client for any server with the OpenAI completions API.
//!
//! Conversations arrive as a Poisson process (`--rate`) or follow each other (`--concurrency`); a
//! list of either is measured point by point. Latencies cover completed requests; failed requests are
//! counted by their error.

mod chart;
mod client;
mod length;
mod report;
mod workload;

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::{sync::Semaphore, task::JoinSet};

use self::{
    client::Server,
    length::Length,
    report::{GoodputLimits, Load, Outcome, Point, Report},
    workload::{Conversation, Shape},
};
use super::{output_file, stats::WorkloadRng};
use crate::http_client::HttpClient;

/// In-flight conversations at most in an open loop; further arrivals are reported as `client full`.
const IN_FLIGHT_MAX: usize = 4096;
const CONCURRENCY: u32 = 8;
/// Default rates for `--agents`, in jobs per second: those of LMCache's report on agent workloads.
const AGENT_RATES: [f64; 4] = [1.0, 3.0, 6.0, 10.0];
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Means of 161 and 338 tokens with long tails, as the vLLM paper (Kwon et al. 2023) reports of the
/// ShareGPT conversations.
const SHAREGPT_INPUT: Length = Length::LogNormal { median: 98.0, sigma: 1.0 };
const SHAREGPT_OUTPUT: Length = Length::LogNormal { median: 245.0, sigma: 0.8 };
const SHAREGPT_TURNS: Length = Length::Uniform { low: 1, high: 7 };

#[derive(Args, Clone)]
pub struct ServeArgs {
    /// Server to measure, without the `/v1` part.
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    url: String,
    /// Model to ask for; by default the first that `/v1/models` names.
    #[arg(long)]
    model: Option<String>,
    /// Conversations at each load; a conversation of one turn is one request.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// In-flight conversations (closed loop); several values, separated by commas, are measured one after
    /// another. [default: 8 without --rate]
    #[arg(long, value_delimiter = ',', conflicts_with = "rate", value_parser = clap::value_parser!(u32).range(1..=4096))]
    concurrency: Vec<u32>,
    /// Mean arrivals of conversations per second, as a Poisson process (open loop); several values,
    /// separated by commas, are measured one after another. [default with --agents: 1,3,6,10]
    #[arg(long, value_delimiter = ',', value_parser = parse_rate)]
    rate: Vec<f64>,
    /// Tokens that each turn adds to the prompt: N, LOW..HIGH (uniform), normal:MEAN:DEVIATION or
    /// lognormal:MEDIAN:SIGMA.
    #[arg(long, default_value = "128", value_parser = Length::parse)]
    input_tokens: Length,
    /// Tokens of each answer, in the forms of --input-tokens. EOS is ignored.
    #[arg(long, default_value = "128", value_parser = Length::parse)]
    output_tokens: Length,
    /// Turns of a conversation, in the forms of --input-tokens. Each prompt repeats the conversation so
    /// far. A conversation ends early at the model's context length.
    #[arg(long, default_value = "1", value_parser = Length::parse)]
    turns: Length,
    /// Mean pause before each later turn, in seconds, exponentially distributed.
    #[arg(long, default_value_t = 0.0, value_parser = parse_pause)]
    pause_s: f64,
    /// Lengths of ShareGPT's conversations: 1 to 7 turns, prompts of 161 and answers of 338 tokens on
    /// average, with long tails.
    #[arg(long, conflicts_with_all = ["input_tokens", "output_tokens", "turns", "agents"])]
    sharegpt: bool,
    /// Tool-calling jobs: eight turns with answers of 20 tokens, tools that take 0.5 s and return
    /// 1640, 1510, 2455, 1335, 2730, 1930 and 775 tokens, scaled down to the model's context length.
    #[arg(long, conflicts_with_all = ["input_tokens", "output_tokens", "turns", "pause_s"])]
    agents: bool,
    /// Limits of goodput in milliseconds: ttft:MS, tpot:MS (mean time per later token) and e2e:MS,
    /// separated by commas.
    #[arg(long, value_parser = GoodputLimits::parse)]
    goodput: Option<GoodputLimits>,
    /// Prompts have token ids from 10 to this number.
    #[arg(long, default_value_t = 30_000, value_parser = clap::value_parser!(u32).range(11..))]
    vocabulary: u32,
    /// Seed of lengths, prompts, pauses and arrivals.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Time-out of a request in seconds; a slower request counts as failed.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout_s: u64,
    /// Also write the result as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also draw latency percentiles over the load into this SVG file.
    #[arg(long)]
    svg: Option<PathBuf>,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0);
    rate.ok_or_else(|| "expected a number greater than 0".to_owned())
}

fn parse_pause(text: &str) -> Result<f64, String> {
    let pause = text.parse().ok().filter(|pause| (0.0..=3600.0).contains(pause));
    pause.ok_or_else(|| "expected 0 to 3600 seconds".to_owned())
}

pub fn run(args: ServeArgs) -> Result<()> {
    let json = output_file("--json", args.json.as_deref())?;
    let svg = output_file("--svg", args.svg.as_deref())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(measure(&args))?;
    if let Some(file) = json {
        serde_json::to_writer_pretty(file, &report).context("cannot write the report")?;
    }
    if let Some(file) = svg {
        chart::write(&report, file)?;
    }
    ensure!(report.points.iter().any(|point| point.completed > 0), "no request completed");
    Ok(())
}

async fn measure(args: &ServeArgs) -> Result<Report> {
    let client = HttpClient::new(CONNECT_TIMEOUT);
    let server = Server::discover(client, &args.url, args.model.clone()).await?;
    let shape = args.shape(&server);
    let mut report = Report {
        url: args.url.clone(),
        model: server.model.clone(),
        workload: args.workload(&shape),
        input_tokens: shape.input,
        output_tokens: shape.output,
        seed: args.seed,
        goodput_limits: args.goodput,
        points: Vec::new(),
    };
    println!("{}  model {}  {}", report.url, report.model, report.workload);
    for (index, load) in args.loads().into_iter().enumerate() {
        // Different prompts at each point: prefix caches have no hits from the previous point.
        let mut rng = WorkloadRng::new(args.seed.wrapping_add((index as u64) << 32));
        let rate = match load {
            Load::Rate(rate) => Some(rate),
            Load::Concurrency(_) => None,
        };
        let conversations = shape.draw(&mut rng, args.requests, rate);
        let timeout = Duration::from_secs(args.timeout_s);
        let (outcomes, elapsed_s) = drive(&server, conversations, load, timeout).await?;
        let point = Point::of(load, &outcomes, elapsed_s, args.goodput);
        point.print();
        report.points.push(point);
    }
    Ok(report)
}

impl ServeArgs {
    /// Returns the loads: by default an open loop for jobs and a closed loop for other workloads.
    fn loads(&self) -> Vec<Load> {
        let rates = |rates: &[f64]| rates.iter().map(|&rate| Load::Rate(rate)).collect();
        match (&self.rate[..], &self.concurrency[..]) {
            ([], []) if self.agents => rates(&AGENT_RATES),
            ([], []) => vec![Load::Concurrency(CONCURRENCY)],
            ([], concurrency) => {
                concurrency.iter().map(|&count| Load::Concurrency(count)).collect()
            }
            (given, _) => rates(given),
        }
    }

    fn shape(&self, server: &Server) -> Shape {
        let (input, output, turns) = match self.sharegpt {
            true => (SHAREGPT_INPUT, SHAREGPT_OUTPUT, SHAREGPT_TURNS),
            false => (self.input_tokens, self.output_tokens, self.turns),
        };
        Shape {
            input,
            output,
            turns,
            pause_mean: self.pause_s,
            agents: self.agents,
            vocabulary: self.vocabulary,
            sequence_tokens_max: server.sequence_tokens_max,
        }
    }

    fn workload(&self, shape: &Shape) -> String {
        if self.agents {
            return format!("tool-calling jobs, lengths scaled by {:.2}", shape.agent_scale());
        }
        let kind = if self.sharegpt { "ShareGPT-like" } else { "random" };
        let Shape { input, output, turns, .. } = shape;
        format!("{kind}: input {input}, output {output}, turns {turns}")
    }
}

/// Starts every conversation at its arrival time and waits until all have finished.
async fn drive(
    server: &Server,
    conversations: Vec<Conversation>,
    load: Load,
    timeout: Duration,
) -> Result<(Vec<Outcome>, f64)> {
    let in_flight = match load {
        Load::Rate(_) => IN_FLIGHT_MAX,
        Load::Concurrency(concurrency) => concurrency as usize,
    };
    let permits = Arc::new(Semaphore::new(in_flight));
    let requests: usize = conversations.iter().map(|conversation| conversation.turns.len()).sum();
    let bar = ProgressBar::new(requests as u64).with_style(
        ProgressStyle::with_template("{pos}/{len} requests {wide_bar} {elapsed} {msg}")
            .expect("the template is constant"),
    );
    bar.set_message(load.describe());
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    let mut outcomes = Vec::new();
    for conversation in conversations {
        let permit = match conversation.arrives_at {
            Some(arrives_at) => {
                let arrival = started + Duration::from_secs_f64(arrives_at);
                tokio::time::sleep_until(arrival.into()).await;
                permits.clone().try_acquire_owned().ok()
            }
            None => Some(permits.clone().acquire_owned().await?),
        };
        let Some(permit) = permit else {
            let error = Some("client full".to_owned());
            outcomes.push(Outcome { turns: Vec::new(), error, elapsed_s: 0.0 });
            continue;
        };
        let (server, bar) = (server.clone(), bar.clone());
        tasks.spawn(async move {
            let outcome = converse(&server, conversation, timeout, &bar).await;
            drop(permit);
            outcome
        });
        while let Some(done) = tasks.try_join_next() {
            outcomes.push(done.context("a conversation's task panicked")?);
        }
    }
    while let Some(done) = tasks.join_next().await {
        outcomes.push(done.context("a conversation's task panicked")?);
    }
    let elapsed_s = started.elapsed().as_secs_f64();
    bar.finish_and_clear();
    Ok((outcomes, elapsed_s))
}

/// Runs the turns of a conversation until one fails.
async fn converse(
    server: &Server,
    conversation: Conversation,
    timeout: Duration,
    bar: &ProgressBar,
) -> Outcome {
    let started = Instant::now();
    let (mut prompt, mut turns, mut error) = (Vec::new(), Vec::new(), None);
    for turn in conversation.turns {
        tokio::time::sleep(Duration::from_secs_f64(turn.pause)).await;
        prompt.extend_from_slice(&turn.new_tokens);
        let answer = tokio::time::timeout(timeout, server.ask(&prompt, turn.output_tokens)).await;
        bar.inc(1);
        match answer {
            Ok(Ok(measured)) => {
                // A server without token ids in its answer: repeated prompt tokens replace them.
                match &measured.token_ids {
                    Some(ids) => prompt.extend_from_slice(ids),
                    None => prompt
                        .extend(turn.new_tokens.iter().cycle().take(turn.output_tokens as usize)),
                }
                turns.push(measured);
            }
            Ok(Err(failed)) => error = Some(format!("{failed:#}")),
            Err(_) => error = Some(format!("not finished within {} s", timeout.as_secs())),
        }
        if error.is_some() {
            break;
        }
    }
    Outcome { turns, error, elapsed_s: started.elapsed().as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: ServeArgs,
    }

    #[test]
    fn default_loads_depend_on_the_workload() {
        let rates = |rates: &[f64]| rates.iter().map(|&rate| Load::Rate(rate)).collect::<Vec<_>>();
        for (flags, loads) in [
            (&[][..], vec![Load::Concurrency(8)]),
            (&["--sharegpt"], vec![Load::Concurrency(8)]),
            (&["--agents"], rates(&[1.0, 3.0, 6.0, 10.0])),
            (&["--agents", "--rate", "2,0.5"], rates(&[2.0, 0.5])),
            (&["--agents", "--concurrency", "4"], vec![Load::Concurrency(4)]),
            (&["--concurrency", "1,2"], vec![Load::Concurrency(1), Load::Concurrency(2)]),
        ] {
            let command = Command::try_parse_from([&["bench"], flags].concat()).unwrap();
            assert_eq!(command.args.loads(), loads, "{flags:?}");
        }
    }
}
