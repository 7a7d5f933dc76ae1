//! Forward passes during transfers: the slow-down of the sender's prefill and of the receiver's decode
//! steps while KV is transferred.
//!
//! Each process runs a model with random weights on its GPU, in the CUDA context of its KV blocks: the
//! sender prefills prompts one after another, the receiver decodes a batch. Time windows with and without
//! transfers alternate, so that GPU temperature and sequence lengths affect both alike.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use engine::{
    CacheSeeds, LoopOutcome, Scheduler, SchedulerConfig, StepKind, StepLoop,
    event::{Action, Input, SequenceId},
    executor::{
        Executor, ExecutorLimits,
        cuda::{CudaExecutor, CudaModel},
    },
};
use kernels::{
    BLOCK_TOKENS, KvArena, WeightFormat,
    cuda::{CudaBackend, CudaOptions, DeviceKv, Driver, nccl_reserved_sms},
};
use model::{Checkpoint, LoadFormat};
use serde::{Deserialize, Serialize};

use super::{TransferArgs, TransportArg};
use baton::{
    bench::{
        engine::random_sequence,
        stats::{Percentiles, WorkloadRng},
    },
    doctor::KernelsArg,
};

/// Longest time without a step before the benchmark fails.
const STALL_MAX: Duration = Duration::from_secs(60);
/// Tokens that a sequence decodes: few, so that all decode steps take about equally long.
const ANSWER_TOKENS: u32 = 256;
/// Maximum tokens of a prefill step.
const STEP_TOKENS: u32 = 8192;

#[derive(Args)]
pub struct ModelLoadArgs {
    /// Also run forward passes on both GPUs, with this folder's config.json and random weights: the sender
    /// prefills, the receiver decodes.
    #[arg(long, value_name = "FOLDER", requires = "gpus")]
    pub model: Option<PathBuf>,
    /// Batch size of decode.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub model_batch: u32,
    /// Prompt tokens of each sequence that decodes.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub model_context: u32,
    /// SMs that forward passes leave free for transfers [default: with nccl as many as nodes reserve].
    #[arg(long)]
    pub model_reserved_sms: Option<u32>,
    /// Tokens of each prompt that the sender prefills.
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub model_prompt: u32,
    /// Milliseconds from the start of a transfer to the start of the next one; 0: a transfer starts when the previous
    /// one ends.
    #[arg(long, default_value_t = 180, value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    pub every_ms: u64,
    /// Number of windows with transfers, and of windows without.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub windows: u32,
    /// Seconds of a window.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub window_s: u64,
}

/// Forward passes of a GPU during transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardKind {
    Prefill,
    Decode,
}

/// One step, timed from the end of the previous step to its own end.
#[derive(Clone, Copy, Debug)]
struct TimedStep {
    begin: Instant,
    end: Instant,
    tokens: u32,
}

/// Step times and throughput in the windows of one kind.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct ComputeStats {
    /// Step times in ms.
    pub step_ms: Percentiles,
    pub tokens_per_s: f64,
}

/// Time windows of one kind.
#[derive(Debug, Default)]
pub struct Windows(Vec<(Instant, Instant)>);

impl Windows {
    pub fn begin(&mut self) {
        let now = Instant::now();
        self.0.push((now, now));
    }

    pub fn end(&mut self) {
        if let Some((_, end)) = self.0.last_mut() {
            *end = Instant::now();
        }
    }
}

/// Statistics of one GPU without transfers (`quiet`) and with transfers (`busy`).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct WindowStats {
    pub quiet: ComputeStats,
    pub busy: ComputeStats,
}

/// A model that runs forward passes until it is dropped.
pub struct ModelLoad {
    stop: Arc<AtomicBool>,
    steps: Arc<Mutex<Vec<TimedStep>>>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl ModelLoad {
    /// Starts the model on this GPU and waits for its first step.
    pub fn start(all: &TransferArgs, gpu: &str, work: ForwardKind) -> Result<Self> {
        let (args, kernels) = (&all.load, &all.kernels);
        let folder = args.model.as_deref().context("--model is missing")?;
        let checkpoint = Checkpoint::open(folder, LoadFormat::Dummy { seed: 0 })?;
        let shape = BatchShape::of(args, work, reserved_sms(all), &checkpoint)?;
        let engine = engine(&checkpoint, kernels, gpu, &shape)?;
        let (stop, steps) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let busy = ForwardThread {
            engine,
            shape,
            vocabulary: checkpoint.config().vocab_size as u32,
            rng: WorkloadRng::new(1),
            next_id: 0,
            stop: Arc::clone(&stop),
            steps: Arc::clone(&steps),
        };
        let thread = thread::Builder::new().name("forward".to_owned()).spawn(|| busy.run())?;
        let mut model_load = Self { stop, steps, thread: Some(thread) };
        let begin = Instant::now();
        while model_load.steps().is_empty() {
            model_load.check()?;
            ensure!(
                begin.elapsed() < STALL_MAX,
                "the model that runs during the transfers made no step for {STALL_MAX:?}"
            );
            thread::sleep(Duration::from_millis(10));
        }
        Ok(model_load)
    }

    fn steps(&self) -> Vec<TimedStep> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the error of a model that stopped.
    fn check(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take_if(|thread| thread.is_finished()) else {
            return Ok(());
        };
        let ended = thread.join().unwrap_or_else(|_| bail!("the thread panicked"));
        ended
            .and_then(|()| bail!("the thread ended without an error"))
            .context("the model that runs during the transfers has stopped")
    }

    /// Returns the statistics of both kinds of windows.
    ///
    /// # Errors
    /// No step is completely within the windows of one kind.
    pub fn stats(&mut self, [quiet, busy]: &[Windows; 2]) -> Result<WindowStats> {
        self.check()?;
        let steps = self.steps();
        Ok(WindowStats { quiet: step_stats(&steps, quiet)?, busy: step_stats(&steps, busy)? })
    }
}

/// Returns the statistics of the steps that are completely within these windows.
fn step_stats(steps: &[TimedStep], windows: &Windows) -> Result<ComputeStats> {
    let within = |step: &&TimedStep| {
        windows.0.iter().any(|(begin, end)| *begin <= step.begin && step.end <= *end)
    };
    let within: Vec<&TimedStep> = steps.iter().filter(within).collect();
    ensure!(!within.is_empty(), "no step is within a window: --window-s is too short");
    let seconds = |step: &&TimedStep| (step.end - step.begin).as_secs_f64();
    let tokens: u32 = within.iter().map(|step| step.tokens).sum();
    let tokens_per_s = f64::from(tokens) / within.iter().map(seconds).sum::<f64>();
    let step_ms = within.iter().map(|step| seconds(step) * 1e3).collect();
    Ok(ComputeStats { step_ms: Percentiles::of(step_ms), tokens_per_s })
}

impl Drop for ModelLoad {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // `stats` reports an error of the thread; here it no longer matters.
            let _ = thread.join();
        }
    }
}

/// Returns the SMs that steps leave free for transfers.
fn reserved_sms(args: &TransferArgs) -> u32 {
    let by_nccl = args.transport.contains(&TransportArg::Nccl) && args.ctas > 0;
    let as_nodes = if by_nccl { nccl_reserved_sms(args.ctas) } else { 0 };
    args.load.model_reserved_sms.unwrap_or(as_nodes)
}

/// Shape of the batch that the engine repeats.
struct BatchShape {
    work: ForwardKind,
    sequences: u32,
    prompt_tokens: u32,
    answer_tokens: u32,
    /// SMs left free for transfers.
    reserved_sms: u32,
    limits: ExecutorLimits,
}

impl BatchShape {
    fn of(
        args: &ModelLoadArgs,
        work: ForwardKind,
        reserved_sms: u32,
        checkpoint: &Checkpoint,
    ) -> Result<Self> {
        let config = checkpoint.config();
        let longest = config.context_tokens as u32;
        // Two prompts at a time, so that one is always waiting.
        let (sequences, prompt_tokens, answer_tokens) = match work {
            ForwardKind::Prefill => (2, args.model_prompt, 1),
            ForwardKind::Decode => (args.model_batch, args.model_context, ANSWER_TOKENS),
        };
        let room = longest.saturating_sub(prompt_tokens + BLOCK_TOKENS as u32);
        let answer_tokens = answer_tokens.min(room);
        ensure!(
            answer_tokens > 0,
            "invalid prompt length: {prompt_tokens}; expected less than the model's {longest} tokens"
        );
        let sequence_tokens = prompt_tokens + answer_tokens + BLOCK_TOKENS as u32;
        let limits = ExecutorLimits {
            slots: sequences,
            step_tokens: STEP_TOKENS.max(sequences),
            sequence_tokens,
            blocks: sequences * (sequence_tokens.div_ceil(BLOCK_TOKENS as u32) + 1),
            depth: 2,
            vocabulary: config.vocab_size as u32,
            speculation: None,
        };
        Ok(Self { work, sequences, prompt_tokens, answer_tokens, reserved_sms, limits })
    }
}

fn engine(
    checkpoint: &Checkpoint,
    kernels: &KernelsArg,
    gpu: &str,
    shape: &BatchShape,
) -> Result<StepLoop<Box<dyn Executor>>> {
    let weights = WeightFormat::Bf16;
    let device = Driver::open()?.device_named(gpu)?;
    let options = CudaOptions { reserved_sms: shape.reserved_sms, ..CudaOptions::new(weights) };
    let backend = CudaBackend::open(Some(&device.uuid), kernels.path().as_deref(), options)?;
    let context = Arc::clone(backend.context());
    let model = CudaModel::load(checkpoint, backend, &shape.limits, &mut |_| ())?;
    let layout = checkpoint.config().kv_layout(weights.kv_dtype());
    let kv = DeviceKv::new(&context, layout, shape.limits.blocks)?;
    let arena = KvArena::remote(kv.clone())?;
    let mut executor = CudaExecutor::start(model, kv, &arena, shape.limits)?;
    executor.set_polling(true);
    let seeds =
        CacheSeeds { model_fingerprint: checkpoint.model_fingerprint()?, weight_version: 0 };
    let scheduler = Scheduler::new(SchedulerConfig::new(shape.limits), seeds)?;
    Ok(StepLoop::new(scheduler, Box::new(executor)))
}

/// The thread that runs forward passes.
struct ForwardThread {
    engine: StepLoop<Box<dyn Executor>>,
    shape: BatchShape,
    vocabulary: u32,
    rng: WorkloadRng,
    next_id: u128,
    stop: Arc<AtomicBool>,
    steps: Arc<Mutex<Vec<TimedStep>>>,
}

impl ForwardThread {
    fn run(mut self) -> Result<()> {
        let mut actions = Vec::new();
        let (mut under_way, mut progress, mut before) = (0, Instant::now(), None);
        while !self.stop.load(Ordering::Acquire) {
            // Prompts are submitted one by one, a batch that decodes all at once.
            let wanted = match self.shape.work {
                ForwardKind::Prefill => self.shape.sequences - under_way,
                ForwardKind::Decode if under_way == 0 => self.shape.sequences,
                ForwardKind::Decode => 0,
            };
            for _ in 0..wanted {
                self.submit(&mut actions);
                under_way += 1;
            }
            match self.engine.turn(Duration::from_secs(1), &mut actions)? {
                LoopOutcome::Stepped => progress = Instant::now(),
                LoopOutcome::Pending | LoopOutcome::Idle => {
                    ensure!(progress.elapsed() < STALL_MAX, "no step for {STALL_MAX:?}");
                }
            }
            for step in self.engine.take_records() {
                let end = step.collect.end;
                let counts = match self.shape.work {
                    ForwardKind::Prefill => step.kind == StepKind::Prefill,
                    ForwardKind::Decode => {
                        step.kind == StepKind::Decode && step.rows == self.shape.sequences
                    }
                };
                // A step after a step of another kind includes a wait for that step.
                if let (true, Some(begin)) = (counts, before) {
                    let tokens = step.tokens;
                    let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
                    steps.push(TimedStep { begin, end, tokens });
                }
                before = counts.then_some(end);
            }
            for action in actions.drain(..) {
                match action {
                    Action::Finished { .. } => under_way -= 1,
                    Action::Failed { failure, .. } => bail!("a sequence failed: {failure}"),
                    _ => {}
                }
            }
            drop(self.engine.scheduler_mut().take_cache_changes());
        }
        Ok(())
    }

    fn submit(&mut self, actions: &mut Vec<Action>) {
        self.next_id += 1;
        let lengths = (self.shape.prompt_tokens, self.shape.answer_tokens);
        let id = SequenceId(self.next_id);
        let sequence = random_sequence(id, lengths, self.vocabulary, &mut self.rng);
        self.engine.handle(Input::Arrived(sequence), actions);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_cover_only_steps_completely_within_a_window() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let step = |begin, end| TimedStep { begin: at(begin), end: at(end), tokens: 10 };
        let steps = [step(0, 10), step(10, 20), step(20, 40), step(95, 105), step(110, 120)];
        let windows = Windows(vec![(at(10), at(45)), (at(100), at(120))]);
        let ComputeStats { step_ms, tokens_per_s } = step_stats(&steps, &windows).unwrap();
        assert_eq!((step_ms.count, step_ms.p50, step_ms.max), (3, 10.0, 20.0));
        assert_eq!(tokens_per_s.round(), 750.0);
        let error = step_stats(&steps, &Windows(vec![(at(96), at(104))])).unwrap_err();
        assert!(error.to_string().contains("--window-s"), "{error}");
    }
}
