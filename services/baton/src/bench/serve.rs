//! `baton bench serve`: a streaming load client for any server with the OpenAI completions API.
//!
//! Conversations arrive as a Poisson process (`--rate`), as in a recorded trace (`--rate-scale`),
//! or follow each other (`--concurrency`); a list of either is measured point by point, on several
//! servers in turn with `--compare`. Latencies cover completed requests; failed requests are
//! counted by their error.

mod chart;
mod client;
mod length;
mod report;
mod workload;

use std::{
    fs,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use tokio::{sync::Semaphore, task::JoinSet};

use self::{
    client::Server,
    length::Length,
    report::{ConversationOutcome, LoadPoint, OfferedLoad, ServeReport, ServerReport},
    workload::{Conversation, ConversationTurn, WorkloadShape},
};
use super::{output_file, stats::WorkloadRng};
use crate::{
    client_args::ClientArgs,
    request_trace::{RecordedRequest, RequestTrace},
};

pub use self::{chart::COLOURS, report::GoodputLimits};

/// Maximum number of in-flight conversations in an open loop; further arrivals are reported as
/// `client full`.
const IN_FLIGHT_MAX: usize = 4096;
const CONCURRENCY: u32 = 8;
/// Open files besides the connections of conversations: standard streams, reports, the runtime,
/// name resolution.
const OTHER_FILES: u64 = 64;
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
    /// Further servers, separated by commas. Each load is measured on all servers in turn, with the
    /// same prompts; a table and the chart compare them with --url.
    #[arg(long, value_delimiter = ',')]
    compare: Vec<String>,
    /// Model to ask for; by default the first that `/v1/models` names.
    #[arg(long)]
    model: Option<String>,
    /// Number of conversations at each load; a conversation of one turn is one request.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Number of conversations that each server completes before the first load; they are not
    /// measured.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    warmup: u32,
    /// In-flight conversations (closed loop); several values, separated by commas, are measured one
    /// after another. [default: 8 without --rate]
    #[arg(long, value_delimiter = ',', conflicts_with_all = ["rate", "rate_scale"], value_parser = clap::value_parser!(u32).range(1..=4096))]
    concurrency: Vec<u32>,
    /// Mean arrivals of conversations per second, as a Poisson process (open loop); several values,
    /// separated by commas, are measured one after another. [default with --agents: 1,3,6,10]
    #[arg(long, value_delimiter = ',', value_parser = parse_rate)]
    rate: Vec<f64>,
    /// Recorded requests: the CSV of the Azure LLM inference traces or the JSON lines of the
    /// Mooncake traces. The first --requests of them are sent as recorded, unless --rate or
    /// --concurrency is given.
    #[arg(long, conflicts_with_all = ["input_tokens", "output_tokens", "turns", "pause_s", "sharegpt", "agents"])]
    trace: Option<PathBuf>,
    /// Factor on the arrival rate of the trace; several values, separated by commas, are measured
    /// one after another. [default: 1]
    #[arg(long, requires = "trace", conflicts_with = "rate", value_delimiter = ',', value_parser = parse_rate)]
    rate_scale: Vec<f64>,
    /// Tokens that each turn adds to the prompt: N, LOW..HIGH (uniform), normal:MEAN:DEVIATION or
    /// lognormal:MEDIAN:SIGMA.
    #[arg(long, default_value = "128", value_parser = Length::parse)]
    input_tokens: Length,
    /// Tokens of the first turn of a conversation, in the forms of --input-tokens. [default: as
    /// --input-tokens]
    #[arg(long, value_parser = Length::parse, conflicts_with_all = ["trace", "sharegpt", "agents"])]
    first_input_tokens: Option<Length>,
    /// Tokens of each answer, in the forms of --input-tokens. EOS is ignored.
    #[arg(long, default_value = "128", value_parser = Length::parse)]
    output_tokens: Length,
    /// File with a JSON schema that every answer must follow (structured output). Answers end when
    /// the schema is complete, so they may have fewer than --output-tokens.
    #[arg(long)]
    schema: Option<PathBuf>,
    /// Turns of a conversation, in the forms of --input-tokens. Each prompt repeats the
    /// conversation so far. A conversation ends early at the model's context length.
    #[arg(long, default_value = "1", value_parser = Length::parse)]
    turns: Length,
    /// Mean pause before each later turn, in seconds, exponentially distributed.
    #[arg(long, default_value_t = 0.0, value_parser = parse_pause)]
    pause_s: f64,
    /// Lengths of ShareGPT's conversations: 1 to 7 turns, prompts of 161 and answers of 338 tokens
    /// on average, with long tails.
    #[arg(long, conflicts_with_all = ["input_tokens", "output_tokens", "turns", "agents"])]
    sharegpt: bool,
    /// Tool-calling jobs: eight turns with answers of 20 tokens, tools that take 0.5 s and return
    /// 1640, 1510, 2455, 1335, 2730, 1930 and 775 tokens, scaled down to the model's context
    /// length.
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
    #[command(flatten)]
    client: ClientArgs,
}

/// Range of rates, bandwidths and other positive numbers whose quotients are valid times.
pub const RATES: RangeInclusive<f64> = 1e-6..=1e9;

pub fn parse_rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| RATES.contains(rate));
    rate.ok_or_else(|| format!("expected {} to {}", RATES.start(), RATES.end()))
}

fn parse_pause(text: &str) -> Result<f64, String> {
    let pause = text.parse().ok().filter(|pause| (0.0..=3600.0).contains(pause));
    pause.ok_or_else(|| "expected 0 to 3600 seconds".to_owned())
}

pub fn run(args: ServeArgs) -> Result<()> {
    let json = output_file("--json", args.json.as_deref())?;
    let svg = output_file("--svg", args.svg.as_deref())?;
    let open_files =
        rlimit::increase_nofile_limit(u64::MAX).context("cannot raise the limit on open files")?;
    let in_flight_max = args.in_flight_max(open_files)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(measure(&args, in_flight_max))?;
    if let Some(file) = json {
        serde_json::to_writer_pretty(file, &report).context("cannot write the report")?;
    }
    if let Some(file) = svg {
        chart::write(&report, file)?;
    }
    for server in report.servers() {
        let completed = server.points.iter().any(|point| point.completed > 0);
        ensure!(completed, "{}: no request completed", server.url);
    }
    Ok(())
}

async fn measure(args: &ServeArgs, in_flight_max: usize) -> Result<ServeReport> {
    let trace =
        args.trace.as_deref().map(|path| RequestTrace::read(path, args.requests)).transpose()?;
    let schema = args.schema.as_deref().map(read_schema).transpose()?;
    let client = args.client.client(CONNECT_TIMEOUT)?;
    let mut servers = Vec::new();
    for url in [&args.url].into_iter().chain(&args.compare) {
        let (client, model, schema) = (client.clone(), args.model.clone(), schema.clone());
        servers.push(Server::discover(client, url, model, schema).await?);
    }
    let mut results: Vec<ServerReport> = servers.iter().map(ServerReport::new).collect();
    // All servers get the same workload, so the shortest context length is the limit.
    let sequence_tokens_max = servers.iter().filter_map(|server| server.sequence_tokens_max).min();
    let workload = args.workload(trace, sequence_tokens_max)?;
    for server in &servers {
        println!("{}  model {}", server.url, server.model);
    }
    println!("{}", workload.describe());
    let timeout = Duration::from_secs(args.timeout_s);
    if args.warmup > 0 {
        for server in &servers {
            let (load, seed) = (OfferedLoad::Concurrency(CONCURRENCY), args.seed.wrapping_sub(1));
            let mut requests = workload.conversations(load, seed);
            requests.truncate(args.warmup as usize);
            drive(server, requests, (load, in_flight_max), timeout, "warm-up").await?;
        }
    }
    for (index, load) in args.loads().into_iter().enumerate() {
        // Each load has different prompts, so that prefix caches have no hits from the previous
        // load.
        let seed = args.seed.wrapping_add((index as u64) << 32);
        for (server, result) in servers.iter().zip(&mut results) {
            let conversations = workload.conversations(load, seed);
            let (outcomes, elapsed_s) =
                drive(server, conversations, (load, in_flight_max), timeout, &load.describe())
                    .await?;
            let point = LoadPoint::of(load, &outcomes, elapsed_s, args.goodput);
            if !args.compare.is_empty() {
                println!("\n{}", server.url);
            }
            point.print();
            result.points.push(point);
        }
    }
    let mut results = results.into_iter();
    let report = ServeReport {
        server: results.next().expect("--url is measured"),
        compared: results.collect(),
        workload: workload.describe(),
        input_tokens: workload.shape.input,
        output_tokens: workload.shape.output,
        seed: args.seed,
        goodput_limits: args.goodput,
    };
    report.print_comparison();
    Ok(report)
}

fn read_schema(path: &Path) -> Result<Value> {
    let text = fs::read(path).with_context(|| format!("--schema {}", path.display()))?;
    serde_json::from_slice(&text)
        .with_context(|| format!("--schema {}: not a JSON schema", path.display()))
}

/// The requests of a run, apart from their arrivals.
struct ServeWorkload {
    shape: WorkloadShape,
    trace: Option<RequestTrace>,
    requests: u32,
    sharegpt: bool,
}

impl ServeWorkload {
    /// Returns the conversations of a load; the same seed gives the same conversations.
    fn conversations(&self, load: OfferedLoad, seed: u64) -> Vec<Conversation> {
        let mut rng = WorkloadRng::new(seed);
        let Some(trace) = &self.trace else {
            let rate = match load {
                OfferedLoad::Rate(rate) => Some(rate),
                OfferedLoad::Concurrency(_) | OfferedLoad::RateScale(_) => None,
            };
            return self.shape.draw(&mut rng, self.requests, rate);
        };
        let mut prompts = WorkloadRng::new(seed);
        let tokens = 10..=self.shape.vocabulary - 1;
        let mut poisson_arrival = 0.0;
        let conversation = |row: &RecordedRequest| {
            let arrives_at = match load {
                OfferedLoad::Rate(rate) => {
                    poisson_arrival += rng.exponential(rate);
                    Some(poisson_arrival)
                }
                OfferedLoad::RateScale(scale) => Some(row.arrives_at / scale),
                OfferedLoad::Concurrency(_) => None,
            };
            let new_tokens = row.prompt(seed, &tokens, &mut prompts);
            let turn =
                ConversationTurn { pause: 0.0, new_tokens, output_tokens: row.output_tokens };
            Conversation { arrives_at, turns: vec![turn] }
        };
        trace.rows().iter().map(conversation).collect()
    }

    fn describe(&self) -> String {
        if let Some(trace) = &self.trace {
            let (input, output) = trace.mean_tokens();
            let left_out = match trace.too_long {
                0 => String::new(),
                count => format!(", {count} longer than the context left out"),
            };
            return format!(
                "trace: {} requests, input {input:.0} and output {output:.0} tokens on average{left_out}",
                trace.len()
            );
        }
        let WorkloadShape { input, first_input, output, turns, .. } = &self.shape;
        if self.shape.agents {
            return format!("tool-calling jobs, lengths scaled by {:.2}", self.shape.agent_scale());
        }
        let kind = if self.sharegpt { "ShareGPT-like" } else { "random" };
        let first = first_input.map(|first| format!(" (first turn {first})")).unwrap_or_default();
        format!("{kind}: input {input}{first}, output {output}, turns {turns}")
    }
}

impl ServeArgs {
    /// Returns the maximum number of in-flight conversations in an open loop, one connection each.
    /// Without a limit below that of open files, the client's failed connections would count as
    /// failures of the server.
    fn in_flight_max(&self, open_files: u64) -> Result<usize> {
        // The client keeps idle connections to a server while it measures the next server.
        let servers = 1 + self.compare.len() as u64;
        let connections = open_files.saturating_sub(OTHER_FILES) / servers;
        let concurrency = self.concurrency.iter().copied().max().unwrap_or(CONCURRENCY);
        ensure!(
            u64::from(concurrency) <= connections,
            "cannot keep {concurrency} conversations with each server in flight: the limit on open files is {open_files}; \
             expected a --concurrency of at most {connections}, or a higher limit (ulimit -Hn)"
        );
        Ok(usize::try_from(connections).unwrap_or(usize::MAX).min(IN_FLIGHT_MAX))
    }

    /// Returns the loads: by default an open loop for jobs and traces, and a closed loop for other
    /// workloads.
    fn loads(&self) -> Vec<OfferedLoad> {
        let rates = |rates: &[f64]| rates.iter().map(|&rate| OfferedLoad::Rate(rate)).collect();
        match (&self.rate[..], &self.concurrency[..]) {
            ([], []) if self.agents => rates(&AGENT_RATES),
            ([], []) if self.trace.is_some() => {
                let scales = if self.rate_scale.is_empty() { &[1.0] } else { &self.rate_scale[..] };
                scales.iter().map(|&scale| OfferedLoad::RateScale(scale)).collect()
            }
            ([], []) => vec![OfferedLoad::Concurrency(CONCURRENCY)],
            ([], concurrency) => {
                concurrency.iter().map(|&count| OfferedLoad::Concurrency(count)).collect()
            }
            (given, _) => rates(given),
        }
    }

    fn workload(
        &self,
        mut trace: Option<RequestTrace>,
        sequence_tokens_max: Option<u32>,
    ) -> Result<ServeWorkload> {
        let (input, output, turns) = match self.sharegpt {
            true => (SHAREGPT_INPUT, SHAREGPT_OUTPUT, SHAREGPT_TURNS),
            false => (self.input_tokens, self.output_tokens, self.turns),
        };
        let shape = WorkloadShape {
            input,
            first_input: self.first_input_tokens,
            output,
            turns,
            pause_mean: self.pause_s,
            agents: self.agents,
            vocabulary: self.vocabulary,
            sequence_tokens_max,
        };
        if let (Some(trace), Some(longest)) = (&mut trace, sequence_tokens_max) {
            trace.fit(longest)?;
        }
        Ok(ServeWorkload { shape, trace, requests: self.requests, sharegpt: self.sharegpt })
    }
}

/// Starts every conversation at its arrival time and waits until all have finished.
async fn drive(
    server: &Server,
    conversations: Vec<Conversation>,
    (load, in_flight_max): (OfferedLoad, usize),
    timeout: Duration,
    label: &str,
) -> Result<(Vec<ConversationOutcome>, f64)> {
    let in_flight = match load {
        OfferedLoad::Rate(_) | OfferedLoad::RateScale(_) => in_flight_max,
        OfferedLoad::Concurrency(concurrency) => concurrency as usize,
    };
    let permits = Arc::new(Semaphore::new(in_flight));
    let requests: usize = conversations.iter().map(|conversation| conversation.turns.len()).sum();
    let bar = ProgressBar::new(requests as u64).with_style(
        ProgressStyle::with_template("{pos}/{len} requests {wide_bar} {elapsed} {msg}")
            .expect("the template is constant"),
    );
    bar.set_message(label.to_owned());
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
            outcomes.push(ConversationOutcome { turns: Vec::new(), error, elapsed_s: 0.0 });
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
) -> ConversationOutcome {
    let started = Instant::now();
    let (mut prompt, mut turns, mut error) = (Vec::new(), Vec::new(), None);
    let mut turns_left = conversation.turns.len();
    for turn in conversation.turns {
        turns_left -= 1;
        tokio::time::sleep(Duration::from_secs_f64(turn.pause)).await;
        prompt.extend_from_slice(&turn.new_tokens);
        let asked = server.ask(&prompt, turn.output_tokens, turns_left > 0);
        let answer = tokio::time::timeout(timeout, asked).await;
        bar.inc(1);
        match answer {
            Ok(Ok(measured)) => {
                // If the answer has no token ids, repeat prompt tokens instead.
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
    ConversationOutcome { turns, error, elapsed_s: started.elapsed().as_secs_f64() }
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
    fn in_flight_conversations_of_all_servers_fit_into_the_limit_on_open_files() {
        let fit = |flags: &[&str], open_files| {
            let command = Command::try_parse_from([&["bench"], flags].concat()).unwrap();
            command.args.in_flight_max(open_files).map_err(|error| error.to_string())
        };
        assert_eq!(fit(&["--rate", "9"], u64::MAX), Ok(4096));
        assert_eq!(fit(&["--rate", "9"], 1024), Ok(960));
        assert_eq!(fit(&["--rate", "9", "--compare", "http://a,http://b"], 1024), Ok(320));
        assert_eq!(fit(&["--concurrency", "8,960"], 1024), Ok(960));
        let error = fit(&["--concurrency", "8,961"], 1024).unwrap_err();
        let words = ["cannot keep 961", "open files is 1024", "--concurrency of at most 960"];
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert!(fit(&[], 71).is_err() && fit(&[], 72).is_ok());
    }

    #[test]
    fn default_loads_depend_on_the_workload() {
        let rates =
            |rates: &[f64]| rates.iter().map(|&rate| OfferedLoad::Rate(rate)).collect::<Vec<_>>();
        for (flags, loads) in [
            (&[][..], vec![OfferedLoad::Concurrency(8)]),
            (&["--sharegpt"], vec![OfferedLoad::Concurrency(8)]),
            (&["--agents"], rates(&[1.0, 3.0, 6.0, 10.0])),
            (&["--agents", "--rate", "2,0.5"], rates(&[2.0, 0.5])),
            (&["--agents", "--concurrency", "4"], vec![OfferedLoad::Concurrency(4)]),
            (&["--trace", "t.csv"], vec![OfferedLoad::RateScale(1.0)]),
            (
                &["--trace", "t.csv", "--rate-scale", "0.5,2"],
                vec![OfferedLoad::RateScale(0.5), OfferedLoad::RateScale(2.0)],
            ),
            (&["--trace", "t.csv", "--rate", "16"], rates(&[16.0])),
            (&["--trace", "t.csv", "--concurrency", "4"], vec![OfferedLoad::Concurrency(4)]),
            (
                &["--concurrency", "1,2"],
                vec![OfferedLoad::Concurrency(1), OfferedLoad::Concurrency(2)],
            ),
        ] {
            let command = Command::try_parse_from([&["bench"], flags].concat()).unwrap();
            assert_eq!(command.args.loads(), loads, "{flags:?}");
        }
    }
}
