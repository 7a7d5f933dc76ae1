//! Streams of SmolLM2, each compared with the answer of a run without a fault.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use integration_tests::{
    client::{Client, salted_body},
    golden::{GoldenRun, golden},
};

/// Distance of two requests.
const STAGGER: Duration = Duration::from_millis(20);
/// Deadline of the first tokens of a case.
const FIRST_TOKENS_WITHIN: Duration = Duration::from_secs(60);

/// Prompts, and their answers without a fault.
pub(crate) struct Reference {
    runs: Vec<GoldenRun>,
    /// Makes the cache salts of all requests distinct, so that every request prefills its prompt.
    salts: AtomicU32,
    /// Tokens that all streams have read.
    tokens: AtomicUsize,
}

/// The outcome of one stream.
#[derive(Clone, Debug)]
struct Streamed {
    /// The error of a failed stream, or what differs.
    failure: Option<String>,
    is_different: bool,
    /// The router refused the request before it began, because it could not start within
    /// `router.waiting_timeout`.
    is_refused: bool,
    first: Duration,
    /// Longest time between two events.
    pause: Duration,
}

/// The outcomes of all streams of one case.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    pub streams: usize,
    pub failed: usize,
    pub different: usize,
    pub refused: usize,
    pub failures: Vec<String>,
    pub pauses: Vec<Duration>,
    pub firsts: Vec<Duration>,
}

impl Reference {
    pub(crate) fn new() -> Self {
        let mut runs = golden().runs;
        runs.sort_by_key(|run| run.prompt_ids.len());
        Self { runs, salts: AtomicU32::new(0), tokens: AtomicUsize::new(0) }
    }

    /// Starts streams of all prompts in turn and reads them to their end, while `fault` runs.
    pub(crate) async fn streams(
        &self,
        client: &Client,
        count: usize,
        fault: impl Future<Output = Result<()>>,
    ) -> Result<Report> {
        let streams = (0..count).map(|index| async move {
            tokio::time::sleep(STAGGER * index as u32).await;
            self.stream(client, self.run(index)).await
        });
        let (streams, fault) = tokio::join!(futures_util::future::join_all(streams), fault);
        fault?;
        let mut report = Report::default();
        streams.into_iter().for_each(|streamed| report.add(streamed));
        Ok(report)
    }

    /// Returns when the streams have read this many further tokens. A fault that starts then meets
    /// streams that decode, and none that has ended if `count` is less than an answer has tokens.
    pub(crate) async fn further_tokens(&self, count: usize) -> Result<()> {
        let (begun, target) = (Instant::now(), self.tokens.load(Ordering::Relaxed) + count);
        while self.tokens.load(Ordering::Relaxed) < target {
            let waited = begun.elapsed();
            ensure!(
                waited < FIRST_TOKENS_WITHIN,
                "fewer than {count} tokens arrived in {waited:?}"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Runs requests one after another until `until`.
    pub(crate) async fn requests(
        self: Arc<Self>,
        client: Client,
        first: usize,
        until: Instant,
    ) -> Report {
        let mut report = Report::default();
        while Instant::now() < until {
            report.add(self.stream(&client, self.run(first + report.streams)).await);
        }
        report
    }

    /// Returns the prompt of a stream. One in eight is long.
    fn run(&self, index: usize) -> &GoldenRun {
        let (short, long) = self.runs.split_at(self.runs.len() - 1);
        if index % 8 == 7 { &long[0] } else { &short[index % short.len()] }
    }

    async fn stream(&self, client: &Client, run: &GoldenRun) -> Streamed {
        let salt = self.salts.fetch_add(1, Ordering::Relaxed).to_string();
        let body = salted_body(&run.prompt_ids, run.output_ids.len(), &salt);
        let mut streamed = Streamed {
            failure: None,
            is_different: false,
            is_refused: false,
            first: Duration::ZERO,
            pause: Duration::ZERO,
        };
        match read(client, &body, &mut streamed, &self.tokens).await {
            _ if streamed.is_refused => {}
            Ok(tokens) if tokens == run.output_ids => {}
            Ok(tokens) => {
                streamed.is_different = true;
                streamed.failure = Some(format!("{}: {tokens:?}", run.name));
            }
            Err(error) => streamed.failure = Some(format!("{}: {error:#}", run.name)),
        }
        streamed
    }
}

async fn read(
    client: &Client,
    body: &serde_json::Value,
    streamed: &mut Streamed,
    read: &AtomicUsize,
) -> Result<Vec<u32>> {
    let mut stream = match client.try_stream("/v1/completions", body, &[]).await? {
        Ok(stream) => stream,
        Err(answer) => {
            streamed.is_refused =
                answer.status == 503 && answer.json()["error"]["code"] == "overloaded";
            anyhow::bail!("{}: {}", answer.status, String::from_utf8_lossy(&answer.body));
        }
    };
    let (mut tokens, mut last) = (Vec::new(), None);
    while let Some(event) = stream.next().await? {
        if event.is_done() {
            return Ok(tokens);
        }
        let json = event.json();
        ensure!(json["error"].is_null(), "{}", json["error"]);
        if event.token_ids().is_empty() {
            continue;
        }
        match last {
            None => streamed.first = event.after,
            Some(last) => streamed.pause = streamed.pause.max(event.after.saturating_sub(last)),
        }
        last = Some(event.after);
        read.fetch_add(event.token_ids().len(), Ordering::Relaxed);
        tokens.extend(event.token_ids());
    }
    anyhow::bail!("the stream ended without [DONE]")
}

impl Report {
    fn add(&mut self, streamed: Streamed) {
        self.streams += 1;
        self.different += usize::from(streamed.is_different);
        self.failed += usize::from(streamed.failure.is_some() && !streamed.is_different);
        self.failures.extend(streamed.failure);
        if streamed.is_refused {
            self.refused += 1;
            return;
        }
        self.pauses.push(streamed.pause);
        self.firsts.push(streamed.first);
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.streams += other.streams;
        self.failed += other.failed;
        self.different += other.different;
        self.refused += other.refused;
        self.failures.extend(other.failures);
        self.pauses.extend(other.pauses);
        self.firsts.extend(other.firsts);
    }

    /// Fails if an answer that began failed or differs, or if a quarter of the requests were
    /// refused: such a run tests too little.
    pub(crate) fn ensure_whole(&self) -> Result<()> {
        ensure!(self.failures.is_empty(), "{:#?}", self.failures);
        ensure!(4 * self.refused < self.streams, "{} of {} refused", self.refused, self.streams);
        Ok(())
    }

    /// Prints a row of the table: failed, different, refused, and the pauses and times to first
    /// token in seconds.
    pub(crate) fn print(&self, case: &str) {
        let [p50, p99, max] = percentiles(&self.pauses);
        let [first_p50, _, first_max] = percentiles(&self.firsts);
        println!(
            "| {case} | {} | {} | {} | {} | {p50:.2} | {p99:.2} | {max:.2} | {first_p50:.2} | {first_max:.2} |",
            self.streams, self.failed, self.different, self.refused
        );
        for failure in self.failures.iter().take(3) {
            println!("  {failure}");
        }
    }

    /// Prints the head of the table.
    pub(crate) fn print_head() {
        println!(
            "| fault | streams | failed | different | refused | pause p50 (s) | p99 (s) | longest (s) | TTFT p50 (s) | longest (s) |"
        );
        println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    }
}

/// Returns the median, the 99th percentile and the maximum, in seconds.
fn percentiles(durations: &[Duration]) -> [f64; 3] {
    let mut sorted = durations.to_vec();
    sorted.sort();
    // Nearest rank.
    [50, 99, 100].map(|percent| match sorted.len() {
        0 => 0.0,
        len => sorted[(len * percent).div_ceil(100) - 1].as_secs_f64(),
    })
}
