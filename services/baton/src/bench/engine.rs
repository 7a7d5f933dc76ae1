//! `baton bench engine`: how fast one engine reads prompts and writes answers; no network.
//!
//! Prompts are random token ids, so no prefix cache helps. Decoding is timed from the moment when
//! every sequence of the batch has its first token.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use engine::{
    CacheSeeds, Scheduler, SchedulerConfig, StepLoop, Turn,
    event::{Action, Input, NewSequence, SequenceId, SequenceKind},
    executor::{
        Executor, ExecutorLimits,
        cpu::CpuExecutor,
        cuda::{CudaExecutor, CudaModel},
    },
};
use indicatif::{ProgressBar, ProgressStyle};
use kernels::{
    BLOCK_TOKENS, Backend, KvArena, WeightFormat,
    cpu::{CpuBackend, CpuBuffer, CpuOptions, Isa},
    cuda::{AttentionKind, CudaBackend, CudaOptions, DeviceKv},
    sampling::Sampling,
};
use model::{Checkpoint, LoadFormat, LoadProgress};
use serde::Serialize;

use super::{
    output_file,
    stats::{WorkloadRng, median},
};
use crate::{doctor::KernelsArg, model_store};

/// A bench that makes no progress for this long is broken.
const STALL_MAX: Duration = Duration::from_secs(120);
/// A GPU's matrix units want more rows than a CPU's.
const GPU_STEP_TOKENS: u32 = 8192;

#[derive(Args, Clone)]
pub struct EngineArgs {
    /// Model: a GGUF file, a Hugging Face folder, or a name `baton model list` prints.
    #[arg(long, default_value = "smollm2-135m")]
    model: String,
    /// Folder with the models that were fetched by name.
    #[arg(long, env = "BATON_MODELS_DIR", default_value = "models")]
    models_dir: PathBuf,
    /// `dummy`: random weights from a config.json alone.
    #[arg(long, default_value = "auto", value_parser = parse_load_format)]
    load_format: LoadFormat,
    /// Number format of weights: f32, bf16 or q8.
    #[arg(long, default_value = "bf16", value_parser = parse_dtype)]
    dtype: WeightFormat,
    /// Threads that compute; by default one for each core.
    #[arg(long)]
    threads: Option<usize>,
    /// Instructions to use; by default the fastest that the machine has.
    #[arg(long, default_value = "auto", value_parser = parse_isa)]
    isa: Isa,
    /// Batch sizes.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64")]
    batch: Vec<u32>,
    /// Tokens of each prompt when prefill is measured.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    prefill_tokens: u32,
    /// Tokens of each prompt before decoding is measured.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    context_tokens: u32,
    /// Tokens that each sequence decodes.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=65_536))]
    decode_tokens: u32,
    /// Runs of each measurement; the median counts.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Where forwards run: cpu or cuda.
    #[arg(long, default_value = "cpu", value_parser = ["cpu", "cuda"])]
    device: String,
    /// The GPU, by its UUID as `baton doctor` shows it [default: the first].
    #[arg(long)]
    gpu: Option<String>,
    #[command(flatten)]
    kernels: KernelsArg,
    /// On a GPU, attention: auto, flash (FlashInfer alone) or plain (one kernel for every shape).
    #[arg(long, default_value = "auto", value_parser = parse_attention)]
    attention: AttentionKind,
    /// On a GPU, decoding steps are recorded and replayed: on or off.
    #[arg(long, default_value = "on", value_parser = parse_switch, action = clap::ArgAction::Set)]
    graphs: bool,
    /// On a GPU, products of few rows do what surrounds them: on or off.
    #[arg(long, default_value = "on", value_parser = parse_switch, action = clap::ArgAction::Set)]
    fused: bool,
    /// On a GPU, kernels start while the one before them ends: on or off.
    #[arg(long, default_value = "on", value_parser = parse_switch, action = clap::ArgAction::Set)]
    dependent_launch: bool,
    /// Steps in flight.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8))]
    depth: u32,
    /// Also write the result as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

pub(super) fn parse_dtype(text: &str) -> Result<WeightFormat, String> {
    match text {
        "f32" => Ok(WeightFormat::F32),
        "bf16" => Ok(WeightFormat::Bf16),
        "q8" => Ok(WeightFormat::Q8),
        _ => Err("allowed are f32, bf16 and q8".to_owned()),
    }
}

fn parse_attention(text: &str) -> Result<AttentionKind, String> {
    match text {
        "auto" => Ok(AttentionKind::Auto),
        "flash" => Ok(AttentionKind::Flash),
        "plain" => Ok(AttentionKind::Plain),
        _ => Err("allowed are auto, flash and plain".to_owned()),
    }
}

fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("allowed are on and off".to_owned()),
    }
}

fn parse_isa(text: &str) -> Result<Isa, String> {
    let names = || Isa::ALL.map(Isa::name).join(", ");
    Isa::of_name(text).ok_or_else(|| format!("allowed are {}", names()))
}

fn parse_load_format(text: &str) -> Result<LoadFormat, String> {
    match text {
        "auto" => Ok(LoadFormat::Auto),
        "dummy" => Ok(LoadFormat::Dummy { seed: 0 }),
        _ => Err("allowed are auto and dummy".to_owned()),
    }
}

#[derive(Serialize)]
struct Report {
    model: String,
    dtype: String,
    isa: String,
    threads: usize,
    load_s: f64,
    /// What of it was spent on what, in order.
    start: Vec<StartPart>,
    /// Median of reading as many bytes as the weights have, all threads.
    weight_read_gb_per_s: f64,
    /// Bytes of weights that one decode step must read.
    weight_bytes: u64,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct StartPart {
    what: &'static str,
    seconds: f64,
}

impl StartPart {
    fn new(what: &'static str, time: Duration) -> Self {
        Self { what, seconds: time.as_secs_f64() }
    }
}

#[derive(Serialize)]
struct Row {
    what: &'static str,
    batch: u32,
    tokens_each: u32,
    tokens_per_s_median: f64,
    tokens_per_s_all: Vec<f64>,
    /// Decode at batch 1 cannot be faster than reading the weights.
    share_of_weight_read: Option<f64>,
}

pub fn run(args: EngineArgs) -> Result<()> {
    ensure!(
        args.batch.iter().all(|batch| (1..=1024).contains(batch)),
        "--batch {:?}: allowed are 1 to 1024",
        args.batch
    );
    let json = output_file("--json", args.json.as_deref())?;
    let path = model_store::resolve(&args.models_dir, &args.model)?;
    let threads = match args.threads {
        Some(threads) => threads,
        None => std::thread::available_parallelism()?.get(),
    };
    let (mut bench, mut report, mut read_stream) = Bench::start(&args, &path, threads)?;
    if let Some(read_stream) = &mut read_stream {
        read_stream.measure();
    }
    let bar = ProgressBar::new(2 * args.batch.len() as u64 * u64::from(args.runs)).with_style(
        ProgressStyle::with_template("{pos}/{len} runs {wide_bar} {elapsed} {msg}")
            .expect("the template is constant"),
    );
    for what in ["prefill", "decode"] {
        for &batch in &args.batch {
            bar.set_message(format!("{what}, batch {batch}"));
            let mut all = Vec::new();
            let reads_alone = what == "decode" && batch == 1;
            for _ in 0..args.runs {
                if let (true, Some(read_stream)) = (reads_alone, &mut read_stream) {
                    // In turns, because neighbours of a machine come and go.
                    read_stream.measure();
                }
                all.push(match what {
                    "prefill" => bench.prefill(batch, args.prefill_tokens)?,
                    _ => bench.decode(batch, args.context_tokens, args.decode_tokens)?,
                });
                bar.inc(1);
            }
            let tokens_per_s_median = median(&all);
            if let Some(read_stream) = &read_stream {
                report.weight_read_gb_per_s = median(&read_stream.gb_per_s);
            }
            let share_of_weight_read = (reads_alone && read_stream.is_some()).then(|| {
                tokens_per_s_median * report.weight_bytes as f64 / 1e9 / report.weight_read_gb_per_s
            });
            report.rows.push(Row {
                what,
                batch,
                tokens_each: if what == "prefill" {
                    args.prefill_tokens
                } else {
                    args.decode_tokens
                },
                tokens_per_s_median,
                tokens_per_s_all: all,
                share_of_weight_read,
            });
        }
    }
    bar.finish_and_clear();
    if let Some(file) = json {
        serde_json::to_writer_pretty(file, &report).context("cannot write the report")?;
    }
    print_table(&report);
    Ok(())
}

struct Bench {
    engine: StepLoop<Box<dyn Executor>>,
    rng: WorkloadRng,
    vocabulary: u32,
    next_id: u128,
}

impl Bench {
    fn start(
        args: &EngineArgs,
        path: &std::path::Path,
        threads: usize,
    ) -> Result<(Self, Report, Option<ReadStream>)> {
        let started = Instant::now();
        let checkpoint = Checkpoint::open(path, args.load_format)?;
        let opened = StartPart::new("open", started.elapsed());
        let config = checkpoint.config();
        let batch_max = args.batch.iter().copied().max().unwrap_or(1);
        let sequence_tokens =
            args.prefill_tokens.max(args.context_tokens + args.decode_tokens) + BLOCK_TOKENS as u32;
        ensure!(
            sequence_tokens as usize <= config.context_tokens,
            "sequences of {sequence_tokens} tokens are longer than the model's {}",
            config.context_tokens
        );
        let is_gpu = args.device == "cuda";
        let limits = ExecutorLimits {
            slots: batch_max,
            step_tokens: if is_gpu { GPU_STEP_TOKENS } else { 512 }.max(batch_max),
            sequence_tokens,
            blocks: batch_max * (sequence_tokens.div_ceil(BLOCK_TOKENS as u32) + 1),
            depth: args.depth,
            vocabulary: config.vocab_size as u32,
            speculation: None,
        };
        let weight_bytes = args.dtype.bytes(config.parameter_count());
        let Started { executor, isa, read_stream, parts } = match is_gpu {
            true => on_gpu(args, &checkpoint, limits)?,
            false => on_cpu(args, &checkpoint, threads, weight_bytes, limits)?,
        };
        let seeds =
            CacheSeeds { model_fingerprint: checkpoint.model_fingerprint(), weight_version: 0 };
        let scheduler = Scheduler::new(SchedulerConfig::new(limits), seeds)?;
        let report = Report {
            model: args.model.clone(),
            dtype: args.dtype.to_string(),
            isa,
            threads,
            load_s: started.elapsed().as_secs_f64(),
            start: [opened].into_iter().chain(parts).collect(),
            weight_read_gb_per_s: 0.0,
            weight_bytes,
            rows: Vec::new(),
        };
        let bench = Self {
            engine: StepLoop::new(scheduler, executor),
            rng: WorkloadRng::new(1),
            vocabulary: limits.vocabulary,
            next_id: 0,
        };
        Ok((bench, report, read_stream))
    }

    /// Prompt tokens per second, to the last sequence's first token.
    fn prefill(&mut self, batch: u32, prompt_tokens: u32) -> Result<f64> {
        let started = Instant::now();
        self.submit(batch, prompt_tokens, 1)?;
        self.run_until_finished(batch, |_| {})?;
        Ok(f64::from(batch * prompt_tokens) / started.elapsed().as_secs_f64())
    }

    /// Tokens per second over the whole batch once every sequence decodes.
    fn decode(&mut self, batch: u32, context_tokens: u32, decode_tokens: u32) -> Result<f64> {
        self.submit(batch, context_tokens, decode_tokens)?;
        let (mut begun, mut all_begun, mut counted) = (0, None, 0);
        self.run_until_finished(batch, |action| {
            if let Action::Tokens { first_index, tokens, .. } = action {
                if all_begun.is_some() {
                    counted += tokens.len();
                }
                if *first_index == 0 {
                    begun += 1;
                    if begun == batch {
                        all_begun = Some(Instant::now());
                    }
                }
            }
        })?;
        let all_begun = all_begun.context("not every sequence began")?;
        Ok(counted as f64 / all_begun.elapsed().as_secs_f64())
    }

    fn submit(&mut self, batch: u32, prompt_tokens: u32, max_tokens: u32) -> Result<()> {
        let mut actions = Vec::new();
        for _ in 0..batch {
            self.next_id += 1;
            let sequence = NewSequence {
                id: SequenceId(self.next_id),
                kind: SequenceKind::Compute,
                tokens: (0..prompt_tokens)
                    .map(|_| self.rng.within(0, self.vocabulary - 1))
                    .collect(),
                prompt_len: prompt_tokens,
                sampling: Sampling::greedy(),
                max_tokens,
                ignore_stop_tokens: true,
                cache_salt: String::new(),
                constraint: None,
                deadline: Instant::now() + Duration::from_secs(3600),
            };
            self.engine.handle(Input::Arrived(sequence), &mut actions);
        }
        check(&actions)
    }

    fn run_until_finished(&mut self, batch: u32, mut seen: impl FnMut(&Action)) -> Result<()> {
        let (mut finished, mut progress) = (0, Instant::now());
        while finished < batch {
            let mut actions = Vec::new();
            match self.engine.turn(Duration::from_secs(1), &mut actions)? {
                Turn::Stepped => progress = Instant::now(),
                Turn::Pending | Turn::Idle => {
                    ensure!(progress.elapsed() < STALL_MAX, "no step for {STALL_MAX:?}");
                }
            }
            check(&actions)?;
            for action in &actions {
                seen(action);
                finished += u32::from(matches!(action, Action::Finished { .. }));
            }
        }
        // What is still in flight belongs to this run.
        while self.engine.steps_in_flight() > 0 {
            self.engine.turn(Duration::from_secs(1), &mut Vec::new())?;
        }
        Ok(())
    }
}

/// An executor whose model is loaded.
struct Started {
    executor: Box<dyn Executor>,
    /// What computes.
    isa: String,
    /// What the host's memory gives, where that is the bound.
    read_stream: Option<ReadStream>,
    parts: Vec<StartPart>,
}

/// Parameters that are loaded, as they are.
fn load_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{percent} % of the weights {wide_bar} {elapsed}");
    ProgressBar::new(0).with_style(style.expect("the template is constant"))
}

fn show(bar: &ProgressBar, progress: LoadProgress) {
    bar.set_length(progress.parameters_total);
    bar.set_position(progress.parameters_done);
}

fn on_cpu(
    args: &EngineArgs,
    checkpoint: &Checkpoint,
    threads: usize,
    weight_bytes: u64,
    limits: ExecutorLimits,
) -> Result<Started> {
    let backend = CpuBackend::new(CpuOptions { weights: args.dtype, threads, isa: args.isa })?;
    let isa = backend.isa_name().to_owned();
    let read_stream = ReadStream::new(&backend, weight_bytes, threads);
    let layout = checkpoint.config().kv_layout(args.dtype.kv_dtype());
    let arena = KvArena::host(layout, limits.blocks)?;
    let (started, bar) = (Instant::now(), load_bar());
    let progress = &mut |progress| show(&bar, progress);
    let executor = CpuExecutor::start_with_progress(checkpoint, backend, arena, limits, progress)?;
    bar.finish_and_clear();
    let parts = vec![StartPart::new("weights", started.elapsed())];
    Ok(Started { executor: Box::new(executor), isa, read_stream: Some(read_stream), parts })
}

fn on_gpu(args: &EngineArgs, checkpoint: &Checkpoint, limits: ExecutorLimits) -> Result<Started> {
    let options = CudaOptions {
        weights: args.dtype,
        attention: args.attention,
        fused: args.fused,
        graphs: args.graphs,
        dependent_launch: args.dependent_launch,
    };
    let kernels = args.kernels.path();
    let mut since = Instant::now();
    let mut lap = |what| {
        let begun = std::mem::replace(&mut since, Instant::now());
        StartPart::new(what, since - begun)
    };
    let backend = CudaBackend::open(args.gpu.as_deref(), kernels.as_deref(), options)?;
    let mut parts = vec![lap("gpu")];
    let context = Arc::clone(backend.context());
    let bar = load_bar();
    let model =
        CudaModel::load(checkpoint, backend, &limits, &mut |progress| show(&bar, progress))?;
    bar.finish_and_clear();
    lap("weights");
    parts.push(StartPart::new("memory", model.times().place));
    parts.push(StartPart::new("weights", model.times().weights));
    let layout = checkpoint.config().kv_layout(args.dtype.kv_dtype());
    let kv = DeviceKv::new(&context, layout, limits.blocks)?;
    let arena = KvArena::remote(kv.clone())?;
    parts.push(lap("kv"));
    let executor = CudaExecutor::start(model, kv, &arena, limits)?;
    parts.push(lap("executor"));
    let isa = context.device().name.clone();
    Ok(Started { executor: Box::new(executor), isa, read_stream: None, parts })
}

fn check(actions: &[Action]) -> Result<()> {
    for action in actions {
        if let Action::Failed { failure, .. } = action {
            bail!("a sequence failed: {failure}");
        }
    }
    Ok(())
}

/// What the memory gives: as many bytes as the weights have, read with every thread again and again
/// as decoding does. What of it the caches hold, they hold for decoding too.
struct ReadStream {
    /// In huge pages, as weights are.
    memory: CpuBuffer,
    threads: usize,
    gb_per_s: Vec<f64>,
}

impl ReadStream {
    fn new(backend: &CpuBackend, bytes: u64, threads: usize) -> Self {
        let mut memory = backend.buffer(1, (bytes as usize / size_of::<f32>()).max(1));
        // All different: a host may keep equal pages once, and would seem five times as fast.
        for (place, index) in memory.rows_mut(1).iter_mut().zip(0_u32..) {
            *place = f32::from_bits(index.wrapping_mul(0x9e37_79b9) >> 2);
        }
        Self { memory, threads, gb_per_s: Vec::new() }
    }

    /// Reads all of it a few times.
    fn measure(&mut self) {
        let words = self.memory.rows(1);
        let share = words.len().div_ceil(self.threads);
        for _ in 0..5 {
            let started = Instant::now();
            let sum = std::thread::scope(|scope| {
                let parts: Vec<_> =
                    words.chunks(share).map(|part| scope.spawn(move || sum(part))).collect();
                parts.into_iter().fold(0_u32, |sum, part| {
                    sum.wrapping_add(part.join().expect("adding does not panic"))
                })
            });
            std::hint::black_box(sum);
            self.gb_per_s.push(size_of_val(words) as f64 / 1e9 / started.elapsed().as_secs_f64());
        }
    }
}

/// With enough independent sums that adding is never what is waited for.
fn sum(words: &[f32]) -> u32 {
    let mut sums = [0_u32; 64];
    let (chunks, rest) = words.as_chunks::<64>();
    for chunk in chunks {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(word.to_bits());
        }
    }
    rest.iter().map(|word| word.to_bits()).chain(sums).fold(0, u32::wrapping_add)
}

fn print_table(report: &Report) {
    print!("{}  {}  {}  ", report.model, report.dtype, report.isa);
    match report.weight_read_gb_per_s {
        // A GPU's is not measured.
        0.0 => println!("loaded in {:.2} s", report.load_s),
        rate => println!(
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
        let limit = row
            .share_of_weight_read
            .map(|share| format!("{:.0} % of reading the weights and nothing else", share * 100.0))
            .unwrap_or_default();
        println!(
            "{:<8} {:>6} {:>8} {:>12.1} {:>12.1} {:>12.1}  {limit}",
            row.what, row.batch, row.tokens_each, row.tokens_per_s_median, least, most
        );
    }
}
