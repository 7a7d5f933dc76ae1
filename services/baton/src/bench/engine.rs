//! `baton bench engine`: prefill and decode throughput of one engine; no network.
//!
//! Prompts are random token ids, so the prefix cache never hits. Decoding is timed from the moment
//! when every sequence of the batch has its first token. Step records give the host time of each
//! step and the busy time of the device.

mod ranks;
mod read_stream;
mod report;

use std::{
    io::BufWriter,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use engine::{
    CacheSeeds, LoopOutcome, Scheduler, SchedulerConfig, StepLoop, StepRecord,
    defaults::int4_sizes,
    event::{Action, Input, NewSequence, SequenceId, SequenceKind},
    executor::{
        Executor, ExecutorLimits,
        cpu::CpuExecutor,
        cuda::{CudaExecutor, CudaModel},
    },
    plan::Span,
    trace::{Trace, TraceSpan},
};
use indicatif::{ProgressBar, ProgressStyle};
use kernels::{
    BLOCK_TOKENS, KvArena, KvFormat, Shard, WeightFormat,
    cpu::{CpuBackend, CpuOptions, Isa},
    cuda::{CudaBackend, CudaOptions, DeviceKv},
    sampling::Sampling,
};
use model::{Checkpoint, Int4Sizes, LoadFormat, LoadProgress, ModelConfig};

use self::{
    read_stream::ReadStream,
    report::{
        EngineMeasurement, EngineReport, EngineRun, StartPart, decode_row, prefill_row, print_table,
    },
};
use super::{
    output_file,
    stats::{WorkloadRng, median},
    tune::{self, TunedRows},
};
use crate::{doctor::KernelsArg, model_store};

/// Longest time without a step before the benchmark fails.
const STALL_MAX: Duration = Duration::from_secs(120);
/// GPU tensor cores need more rows for a step than a CPU.
const GPU_STEP_TOKENS: u32 = 8192;

#[derive(Args, Clone)]
pub struct EngineArgs {
    /// Model: a GGUF file, a Hugging Face folder, or a name that `baton model list` prints.
    #[arg(long, default_value = "smollm2-135m")]
    model: String,
    /// Folder of the models that were fetched by name.
    #[arg(long, env = "BATON_MODELS_DIR", default_value = "models")]
    models_dir: PathBuf,
    /// Source of the weights: auto (the model's files) or dummy (random weights; needs only
    /// config.json).
    #[arg(long, default_value = "auto", value_parser = parse_load_format)]
    load_format: LoadFormat,
    /// Number format of the weights: f32, bf16, q8 (CPUs) or fp8 (GPUs).
    #[arg(long, default_value = "bf16", value_parser = parse_dtype)]
    dtype: WeightFormat,
    /// Number format of KV: auto (f32 with --dtype f32, else bf16), bf16 or fp8.
    #[arg(long, value_parser = parse_kv_dtype, default_value = "auto")]
    kv_dtype: KvSetting,
    /// Compute threads on a CPU [default: one for each CPU that the process may use].
    #[arg(long)]
    threads: Option<usize>,
    /// Numbers of sequences that decode in one step, separated by commas. Each is measured.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64")]
    batch: Vec<u32>,
    /// Tokens of each prompt in the prefill measurements; several values, separated by commas, are
    /// measured one after another.
    #[arg(long, value_delimiter = ',', default_value = "512", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    prefill_tokens: Vec<u32>,
    /// Tokens of each prompt before the measured decode steps.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    context_tokens: u32,
    /// Tokens that each sequence generates in the decode measurement.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=65_536))]
    decode_tokens: u32,
    /// Runs of each measurement; the table shows medians.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Device of the forward pass: cpu or cuda.
    #[arg(long, default_value = "cpu", value_parser = ["cpu", "cuda"])]
    device: String,
    /// UUID of the GPU, as `baton doctor` prints it; with --tp one for each rank, separated by
    /// commas [default: the first GPUs].
    #[arg(long)]
    gpu: Option<String>,
    /// Tensor-parallel ranks, one process and one GPU each: 1, 2, 4 or 8.
    #[arg(long, default_value_t = 1)]
    tp: u32,
    /// Set for the process of one rank.
    #[arg(long, hide = true)]
    rank: Option<::ranks::RankSpec>,
    #[command(flatten)]
    kernels: KernelsArg,
    /// Also write the result as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also write every step to this file, as a trace for Perfetto or chrome://tracing.
    #[arg(long)]
    trace: Option<PathBuf>,
    #[arg(skip)]
    pub variant: EngineVariant,
}

impl EngineArgs {
    /// Returns the format of KV.
    fn kv_format(&self) -> KvFormat {
        self.kv_dtype.unwrap_or(self.dtype.kv_format())
    }
}

/// The engine's parts that `baton-bench engine` can change. The default is the engine of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineVariant {
    pub isa: Isa,
    /// Its weight format is ignored: `--dtype` sets the format.
    pub cuda: CudaOptions,
    /// The scheduling thread polls while a GPU step runs.
    pub poll: bool,
    /// Seconds to search for the fastest cuBLASLt algorithms.
    pub tune_s: u64,
    /// Folder that keeps the algorithms found; `None`: the cache folder of the user.
    pub tune_dir: Option<PathBuf>,
    /// Steps in flight.
    pub depth: u32,
    /// Peak bandwidth of the GPU's memory in GB/s; `None`: measured at the start.
    pub peak_gb_per_s: Option<f64>,
}

impl Default for EngineVariant {
    fn default() -> Self {
        Self {
            isa: Isa::Auto,
            cuda: CudaOptions::new(WeightFormat::Bf16),
            poll: true,
            tune_s: 2,
            tune_dir: None,
            depth: 2,
            peak_gb_per_s: None,
        }
    }
}

pub fn parse_dtype(text: &str) -> Result<WeightFormat, String> {
    match text {
        "f32" => Ok(WeightFormat::F32),
        "bf16" => Ok(WeightFormat::Bf16),
        "q8" => Ok(WeightFormat::Q8),
        "fp8" => Ok(WeightFormat::Fp8),
        _ => Err("expected f32, bf16, q8 or fp8".to_owned()),
    }
}

/// Format of KV; `None` is auto.
pub type KvSetting = Option<KvFormat>;

pub fn parse_kv_dtype(text: &str) -> Result<KvSetting, String> {
    match text {
        "auto" => Ok(None),
        "bf16" => Ok(Some(KvFormat::Bf16)),
        "fp8" => Ok(Some(KvFormat::Fp8)),
        _ => Err("expected auto, bf16 or fp8".to_owned()),
    }
}

fn parse_load_format(text: &str) -> Result<LoadFormat, String> {
    match text {
        "auto" => Ok(LoadFormat::Auto),
        "dummy" => Ok(LoadFormat::Dummy { seed: 0 }),
        _ => Err("expected auto or dummy".to_owned()),
    }
}

pub fn run(args: EngineArgs) -> Result<()> {
    ensure!(
        args.kv_format().fits(args.dtype.dtype()),
        "cannot use --kv-dtype {} with --dtype {}; expected auto",
        args.kv_format(),
        args.dtype
    );
    ensure!(
        args.batch.iter().all(|batch| (1..=1024).contains(batch)),
        "invalid --batch: {:?}; expected 1 to 1024",
        args.batch
    );
    ensure!(matches!(args.tp, 1 | 2 | 4 | 8), "invalid --tp: {}; expected 1, 2, 4 or 8", args.tp);
    ensure!(
        args.tp == 1 || args.device == "cuda",
        "invalid --tp: {}; tensor parallelism needs --device cuda",
        args.tp
    );
    if let Some(spec) = &args.rank {
        return ranks::run(&args, spec);
    }
    let json = output_file("--json", args.json.as_deref())?;
    let trace_file = output_file("--trace", args.trace.as_deref())?;
    let mut trace = trace_file.is_some().then(Trace::default);
    let path = model_store::resolve(&args.models_dir, &args.model)?;
    let threads = match args.threads {
        Some(threads) => threads,
        None => std::thread::available_parallelism()?.get(),
    };
    let (mut bench, mut report, mut read_stream) = EngineBench::start(&args, &path, threads)?;
    if let Some(read_stream) = &mut read_stream {
        read_stream.measure();
    }
    let prefill = args.prefill_tokens.iter().map(|tokens| ("prefill", *tokens, 1));
    let measurements: Vec<_> =
        prefill.chain([("decode", args.context_tokens, args.decode_tokens)]).collect();
    let run_count = measurements.len() as u64 * args.batch.len() as u64 * u64::from(args.runs);
    let bar = ProgressBar::new(run_count).with_style(
        ProgressStyle::with_template("{pos}/{len} runs {wide_bar} {elapsed} {msg}")
            .expect("the template is constant"),
    );
    for (what, prompt_tokens, max_tokens) in measurements {
        for &batch in &args.batch {
            bar.set_message(format!("{what}, batch {batch}"));
            let mut runs = Vec::new();
            let reads_alone = what == "decode" && batch == 1;
            for number in 1..=args.runs {
                if let (true, Some(read_stream)) = (reads_alone, &mut read_stream) {
                    // Measure the bandwidth before each run, because the load of other processes
                    // changes.
                    read_stream.measure();
                }
                let run = bench.run(batch, prompt_tokens, max_tokens)?;
                if let Some(trace) = &mut trace {
                    let name = format!("{what}, batch {batch}, run {number}");
                    trace.spans.push(measurement_span(name, trace.spans.len(), &run.steps));
                    trace.steps.extend_from_slice(&run.steps);
                }
                runs.push(run);
                bar.inc(1);
            }
            if let Some(read_stream) = &read_stream {
                report.weight_read_gb_per_s = median(&read_stream.gb_per_s);
            }
            report.rows.push(match what {
                "prefill" => prefill_row(&runs, batch, prompt_tokens),
                _ => {
                    let floor_ms = report.peak_gb_per_s.map(|peak| {
                        let bytes = bench.decode_bytes(&args, &report, batch);
                        bytes as f64 / f64::from(args.tp) / peak / 1e6
                    });
                    let row = decode_row(&runs, batch, (prompt_tokens, max_tokens), floor_ms);
                    let share_of_weight_read = (reads_alone && read_stream.is_some()).then(|| {
                        row.tokens_per_s_median * report.weight_bytes as f64
                            / 1e9
                            / report.weight_read_gb_per_s
                    });
                    EngineMeasurement { share_of_weight_read, ..row }
                }
            });
        }
    }
    bar.finish_and_clear();
    if let Some(file) = json {
        serde_json::to_writer_pretty(file, &report).context("cannot write the report")?;
    }
    if let (Some(file), Some(trace)) = (trace_file, trace) {
        trace.write(BufWriter::new(file)).context("cannot write the trace")?;
    }
    print_table(&report);
    Ok(())
}

/// Returns the span of a measurement in the trace.
fn measurement_span(name: String, id: usize, steps: &[StepRecord]) -> TraceSpan {
    let begin = steps.iter().map(|step| step.plan.begin).min().expect("a run has steps");
    let end = steps.iter().map(|step| step.collect.end).max().expect("a run has steps");
    let args = serde_json::json!({ "steps": steps.len() });
    let span = Span { begin, end };
    TraceSpan { track: "measurement", name: name.into(), id: id as u64, span, args }
}

struct EngineBench {
    engine: StepLoop<Box<dyn Executor>>,
    rng: WorkloadRng,
    config: ModelConfig,
    next_id: u128,
}

impl EngineBench {
    fn start(
        args: &EngineArgs,
        path: &std::path::Path,
        threads: usize,
    ) -> Result<(Self, EngineReport, Option<ReadStream>)> {
        let started = Instant::now();
        let checkpoint = Checkpoint::open(path, args.load_format)?;
        let opened = StartPart::new("open", started.elapsed());
        let config = checkpoint.config();
        let limits = limits(args, config)?;
        let int4 = match config.experts() {
            // The parameters of experts are not counted.
            Some(_) => Int4Sizes::default(),
            None => int4_sizes(&checkpoint, Shard::WHOLE, args.dtype, args.device == "cuda"),
        };
        // On CPUs an embedding in INT4 is packed, and is no parameter of a forward pass.
        let others = config.forward_parameter_count().saturating_sub(int4.packed_elements);
        let weight_bytes = args.dtype.bytes(others) + int4.packed_bytes;
        let LoadedExecutor { executor, isa, read_stream, peak_gb_per_s, parts, tuned } =
            match args.device.as_str() {
                "cuda" if args.tp > 1 => ranks::start(args, &checkpoint)?,
                "cuda" => on_gpu(args, &checkpoint, limits)?,
                _ => on_cpu(args, &checkpoint, threads, weight_bytes, limits)?,
            };
        let seeds =
            CacheSeeds { model_fingerprint: checkpoint.model_fingerprint()?, weight_version: 0 };
        let scheduler = Scheduler::new(SchedulerConfig::new(limits), seeds)?;
        let scheduler = scheduler.with_kv_groups(executor.kv_groups());
        let load = started.elapsed();
        // A node does not measure the memory bandwidth when it starts.
        let bandwidth = parts.iter().find(|part| part.what == "bandwidth");
        let report = EngineReport {
            model: args.model.clone(),
            dtype: {
                let int4 = if int4.packed_elements > 0 { " and INT4" } else { "" };
                let kv = args.kv_dtype.map(|kv| format!(", KV {kv}")).unwrap_or_default();
                format!("{}{int4}{kv}", args.dtype)
            },
            isa,
            threads,
            load_s: load.as_secs_f64() - bandwidth.map_or(0.0, |part| part.seconds),
            start: [opened].into_iter().chain(parts).collect(),
            tuned,
            weight_read_gb_per_s: 0.0,
            weight_bytes,
            peak_gb_per_s,
            depth: args.variant.depth,
            ranks: args.tp,
            step_tokens: limits.step_tokens,
            rows: Vec::new(),
        };
        let bench = Self {
            engine: StepLoop::new(scheduler, executor),
            rng: WorkloadRng::new(1),
            config: config.clone(),
            next_id: 0,
        };
        Ok((bench, report, read_stream))
    }

    /// Returns the bytes that a decode step reads at least: weights and the KV of all sequences
    /// half-way.
    fn decode_bytes(&self, args: &EngineArgs, report: &EngineReport, batch: u32) -> u64 {
        let tokens = args.context_tokens + args.decode_tokens / 2;
        let kv = self.config.kv_read_bytes(tokens as usize, args.kv_format());
        report.weight_bytes + u64::from(batch) * kv
    }

    fn submit(&mut self, batch: u32, prompt_tokens: u32, max_tokens: u32) -> Result<()> {
        let mut actions = Vec::new();
        for _ in 0..batch {
            self.next_id += 1;
            let vocabulary = self.config.vocab_size as u32;
            let lengths = (prompt_tokens, max_tokens);
            let sequence =
                random_sequence(SequenceId(self.next_id), lengths, vocabulary, &mut self.rng);
            self.engine.handle(Input::Arrived(sequence), &mut actions);
        }
        check(&actions)
    }

    /// Submits a batch of prompts at once and runs it until every sequence has decoded
    /// `tokens_each` tokens in steps of the whole batch.
    fn run(&mut self, batch: u32, prompt_tokens: u32, tokens_each: u32) -> Result<EngineRun> {
        let started = Instant::now();
        let step_tokens = self.engine.executor().limits().step_tokens;
        let overlap = match tokens_each {
            1 => 0,
            _ => prefill_steps(batch, prompt_tokens, step_tokens),
        };
        self.submit(batch, prompt_tokens, tokens_each + overlap)?;
        let (mut steps, mut firsts) = (Vec::<StepRecord>::with_capacity(1024), Vec::new());
        let (mut last, mut progress) = (usize::MAX, Instant::now());
        let mut actions = Vec::new();
        while steps.len() <= last {
            match self.engine.turn(Duration::from_secs(1), &mut actions)? {
                LoopOutcome::Stepped => progress = Instant::now(),
                LoopOutcome::Pending | LoopOutcome::Idle => {
                    ensure!(progress.elapsed() < STALL_MAX, "no step for {STALL_MAX:?}");
                }
            }
            steps.extend(self.engine.take_records());
            check(&actions)?;
            for action in actions.drain(..) {
                if let Action::Tokens { first_index: 0, .. } = action {
                    firsts.push(steps.len() - 1);
                }
            }
            if firsts.len() == batch as usize {
                last = firsts[firsts.len() - 1] + tokens_each as usize - 1;
            }
        }
        let decode = &steps[last + 2 - tokens_each as usize..=last];
        ensure!(decode.iter().all(|step| step.rows == batch), "a step lacks rows of the batch");
        for id in self.next_id + 1 - u128::from(batch)..=self.next_id {
            self.engine.handle(Input::Abort { id: SequenceId(id) }, &mut actions);
        }
        // Drop the cache changes, which a node would send to the routers.
        drop(self.engine.scheduler_mut().take_cache_changes());
        // Steps still in flight belong to this run.
        while self.engine.steps_in_flight() > 0 {
            self.engine.turn(Duration::from_secs(1), &mut Vec::new())?;
            steps.extend(self.engine.take_records());
        }
        Ok(EngineRun { started, steps, firsts, last })
    }
}

/// Returns an upper bound on the steps that prefill a batch. Sequences that have begun take one
/// token of each step. A sequence decodes this much longer, so that all sequences decode together
/// after the last prompt.
fn prefill_steps(batch: u32, prompt_tokens: u32, step_tokens: u32) -> u32 {
    let prompts = u64::from(batch) * u64::from(prompt_tokens);
    let each = u64::from(step_tokens.saturating_sub(batch).max(1));
    u32::try_from(prompts.div_ceil(each)).unwrap_or(u32::MAX).saturating_add(batch)
}

/// Returns the limits of the executor for the largest batch.
fn limits(args: &EngineArgs, config: &ModelConfig) -> Result<ExecutorLimits> {
    let batch_max = args.batch.iter().copied().max().unwrap_or(1);
    let step_tokens = if args.device == "cuda" { GPU_STEP_TOKENS } else { 512 };
    // At least half of each step prefills while prompts are left.
    let step_tokens = step_tokens.max(2 * batch_max);
    let overlap = prefill_steps(batch_max, args.context_tokens, step_tokens);
    let decoded = args.context_tokens + args.decode_tokens + overlap;
    let prefilled = args.prefill_tokens.iter().copied().max().unwrap_or(0);
    let sequence_tokens = prefilled.max(decoded) + BLOCK_TOKENS as u32;
    ensure!(
        sequence_tokens as usize <= config.context_tokens,
        "sequences reach {sequence_tokens} tokens by --prefill-tokens, or by --context-tokens, --decode-tokens and {overlap} \
         steps that prefill the rest of the batch; the model has at most {}",
        config.context_tokens
    );
    Ok(ExecutorLimits {
        slots: batch_max,
        step_tokens,
        sequence_tokens,
        blocks: batch_max
            * config.kv_groups(args.kv_format()).entries(sequence_tokens as usize + BLOCK_TOKENS)
                as u32,
        depth: args.variant.depth,
        vocabulary: config.vocab_size as u32,
        speculation: None,
    })
}

/// An executor whose model is loaded.
struct LoadedExecutor {
    executor: Box<dyn Executor>,
    /// Instruction set, or name of the GPU.
    isa: String,
    /// Measurement of the host's memory bandwidth, on a CPU.
    read_stream: Option<ReadStream>,
    /// Peak memory bandwidth of the GPU.
    peak_gb_per_s: Option<f64>,
    parts: Vec<StartPart>,
    tuned: Vec<TunedRows>,
}

/// Returns a progress bar of the weights.
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
) -> Result<LoadedExecutor> {
    let backend =
        CpuBackend::new(CpuOptions { weights: args.dtype, threads, isa: args.variant.isa })?;
    let isa = backend.isa_name().to_owned();
    let read_stream = ReadStream::new(&backend, weight_bytes, threads);
    let layout = checkpoint.config().block_layout(args.kv_format());
    let arena = KvArena::host(layout, limits.blocks)?;
    let (started, bar) = (Instant::now(), load_bar());
    let progress = &mut |progress| show(&bar, progress);
    let executor = CpuExecutor::start(checkpoint, backend, arena, limits, progress)?;
    bar.finish_and_clear();
    let parts = vec![StartPart::new("weights", started.elapsed())];
    let (executor, read_stream) = (Box::new(executor), Some(read_stream));
    Ok(LoadedExecutor { executor, isa, read_stream, peak_gb_per_s: None, parts, tuned: Vec::new() })
}

fn open_gpu(args: &EngineArgs, gpu: Option<&str>) -> Result<CudaBackend> {
    let options = CudaOptions { weights: args.dtype, kv: args.kv_format(), ..args.variant.cuda };
    Ok(CudaBackend::open(gpu, args.kernels.path().as_deref(), options)?)
}

fn on_gpu(
    args: &EngineArgs,
    checkpoint: &Checkpoint,
    limits: ExecutorLimits,
) -> Result<LoadedExecutor> {
    let mut since = Instant::now();
    let mut lap = |what| {
        let begun = std::mem::replace(&mut since, Instant::now());
        StartPart::new(what, since - begun)
    };
    let backend = open_gpu(args, args.gpu.as_deref())?;
    let mut parts = vec![lap("gpu")];
    let peak_gb_per_s = match args.variant.peak_gb_per_s {
        Some(peak) => Some(peak),
        None => backend.measure_read_gb_per_s()?,
    };
    parts.push(lap("bandwidth"));
    let context = Arc::clone(backend.context());
    let bar = load_bar();
    let mut model =
        CudaModel::load(checkpoint, backend, &limits, &mut |progress| show(&bar, progress))?;
    bar.finish_and_clear();
    lap("weights");
    parts.push(StartPart::new("memory", model.times().place));
    parts.push(StartPart::new("weights", model.times().weights));
    let tuned = tune::tune(&mut model, &limits, &args.variant)?;
    parts.push(lap("tune"));
    let layout = checkpoint.config().block_layout(args.kv_format());
    let kv = DeviceKv::new(&context, layout, limits.blocks)?;
    let arena = KvArena::remote(kv.clone())?;
    parts.push(lap("kv"));
    let mut executor = CudaExecutor::start(model, kv, &arena, limits)?;
    executor.set_polling(args.variant.poll);
    parts.push(lap("executor"));
    let isa = context.device().name.clone();
    let executor = Box::new(executor);
    Ok(LoadedExecutor { executor, isa, read_stream: None, peak_gb_per_s, parts, tuned })
}

/// Returns a sequence with a random prompt and an answer of exactly `max_tokens` tokens.
pub fn random_sequence(
    id: SequenceId,
    (prompt_len, max_tokens): (u32, u32),
    vocabulary: u32,
    rng: &mut WorkloadRng,
) -> NewSequence {
    NewSequence {
        id,
        kind: SequenceKind::Compute,
        tokens: (0..prompt_len).map(|_| rng.within(0, vocabulary - 1)).collect(),
        prompt_len,
        sampling: Sampling::greedy(),
        max_tokens,
        ignore_stop_tokens: true,
        cache_salt: String::new(),
        adapter: None,
        session: Default::default(),
        constraint: None,
        deadline: Instant::now() + Duration::from_secs(3600),
    }
}

fn check(actions: &[Action]) -> Result<()> {
    for action in actions {
        if let Action::Failed { failure, .. } = action {
            bail!("a sequence failed: {failure}");
        }
    }
    Ok(())
}
