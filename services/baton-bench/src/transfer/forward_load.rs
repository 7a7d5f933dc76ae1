//! Forward passes during KV transfers. They measure how much transfers slow down the prefill steps
//! of the sender and the decode steps of the receiver.
//!
//! Each process runs a model with random weights on its GPU, in the CUDA context of its KV blocks.
//! The sender prefills prompts one after another, and the receiver decodes a batch. Time windows
//! with and without transfers alternate, so that GPU temperature and sequence lengths affect both
//! kinds of windows equally.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
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
    BLOCK_TOKENS, KvArena, KvFormat, WeightFormat,
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
const OUTPUT_TOKENS: u32 = 256;
/// Maximum tokens of a prefill step.
const STEP_TOKENS: u32 = 8192;
/// Sequences of a prefill batch: while one is prefilled, the other one waits, so that the GPU is
/// never idle.
const PREFILL_SEQUENCES: u32 = 2;
/// Interval at which the start looks for the first step.
const FIRST_STEP_POLL: Duration = Duration::from_millis(10);
/// Maximum time for which the forward thread waits for a step before it checks whether it should
/// stop.
const TURN_MAX: Duration = Duration::from_secs(1);

/// Options of forward passes during transfers.
#[derive(Args)]
pub(super) struct ForwardArgs {
    /// Also run forward passes on both GPUs, with this folder's config.json and random weights: the
    /// sender prefills, the receiver decodes.
    #[arg(long, value_name = "FOLDER", requires = "gpus")]
    pub model: Option<PathBuf>,
    /// Batch size of decode.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub model_batch: u32,
    /// Prompt tokens of each sequence that decodes.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub model_context: u32,
    /// SMs that forward passes leave free for transfers [default: with nccl as many as nodes
    /// reserve].
    #[arg(long)]
    pub model_reserved_sms: Option<u32>,
    /// Tokens of each prompt that the sender prefills.
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub model_prompt: u32,
    /// Milliseconds from the start of a transfer to the start of the next one; 0: a transfer starts
    /// when the previous one ends.
    #[arg(long, default_value_t = 180, value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    pub every_ms: u64,
    /// Number of windows with transfers, and of windows without.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub windows: u32,
    /// Seconds of a window.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub window_s: u64,
}

/// Kind of the forward passes of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForwardKind {
    Prefill,
    Decode,
}

/// Time of one step.
#[derive(Clone, Copy, Debug)]
struct TimedStep {
    /// End of the previous step.
    begin: Instant,
    end: Instant,
    tokens: u32,
}

/// Step times and throughput of all steps that are completely within the windows of one kind.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct ComputeStats {
    /// Step times in ms.
    pub step_ms: Percentiles,
    pub tokens_per_s: f64,
}

/// Begin and end of each time window of one kind: with or without transfers.
#[derive(Debug, Default)]
pub(super) struct Windows(Vec<(Instant, Instant)>);

impl Windows {
    /// Begins a window. The caller ends the previous one first.
    pub(super) fn begin(&mut self) {
        let now = Instant::now();
        self.0.push((now, now));
    }

    /// Ends the window that began last.
    pub(super) fn end(&mut self) {
        if let Some((_, end)) = self.0.last_mut() {
            *end = Instant::now();
        }
    }
}

/// Statistics of one GPU.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct WindowStats {
    /// Windows without transfers.
    pub quiet: ComputeStats,
    /// Windows with transfers.
    pub busy: ComputeStats,
}

/// A model on a GPU that runs forward passes in a thread until this value is dropped.
pub(super) struct ForwardLoad {
    /// Tells the thread to stop.
    stop: Arc<AtomicBool>,
    /// Steps so far, which the thread appends.
    steps: Arc<Mutex<Vec<TimedStep>>>,
    /// `None` after [`Self::check`] has returned the error of a thread that stopped.
    thread: Option<JoinHandle<Result<()>>>,
}

impl ForwardLoad {
    /// Starts the model on this GPU and waits for its first step.
    pub(super) fn start(all: &TransferArgs, gpu: &str, kind: ForwardKind) -> Result<Self> {
        let (args, kernels) = (&all.forward, &all.kernels);
        let folder = args.model.as_deref().context("--model is missing")?;
        let checkpoint = Checkpoint::open(folder, LoadFormat::Dummy { seed: 0 })?;
        let shape = BatchShape::new(args, kind, reserved_sms(all), &checkpoint)?;
        let engine = engine(&checkpoint, kernels, gpu, &shape)?;
        let (stop, steps) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let forward = ForwardThread {
            engine,
            shape,
            vocabulary: checkpoint.config().vocab_size as u32,
            rng: WorkloadRng::new(1),
            next_id: 0,
            stop: Arc::clone(&stop),
            steps: Arc::clone(&steps),
        };
        let thread = thread::Builder::new().name("forward".to_owned()).spawn(|| forward.run())?;
        let mut load = Self { stop, steps, thread: Some(thread) };
        let begin = Instant::now();
        while load.steps().is_empty() {
            load.check()?;
            ensure!(
                begin.elapsed() < STALL_MAX,
                "the model that runs during the transfers made no step for {STALL_MAX:?}"
            );
            thread::sleep(FIRST_STEP_POLL);
        }
        Ok(load)
    }

    fn steps(&self) -> Vec<TimedStep> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns an error if the thread has stopped.
    fn check(&mut self) -> Result<()> {
        let cause = match self.thread.take_if(|thread| thread.is_finished()) {
            Some(thread) => thread.join().unwrap_or_else(|_| bail!("the thread panicked")),
            None if self.thread.is_some() => return Ok(()),
            None => Err(anyhow!("an earlier error has the cause")),
        };
        cause
            .and_then(|()| bail!("the thread ended without an error"))
            .context("the model that runs during the transfers has stopped")
    }

    /// Returns the statistics of the windows without transfers (first) and with transfers (second).
    ///
    /// # Errors
    /// The model has stopped, or no step is completely within the windows of one kind.
    pub(super) fn stats(&mut self, [quiet, busy]: &[Windows; 2]) -> Result<WindowStats> {
        self.check()?;
        let steps = self.steps();
        Ok(WindowStats { quiet: step_stats(&steps, quiet)?, busy: step_stats(&steps, busy)? })
    }
}

/// Returns the statistics of the steps that are completely within a window.
fn step_stats(steps: &[TimedStep], windows: &Windows) -> Result<ComputeStats> {
    let is_in_window = |step: &&TimedStep| {
        windows.0.iter().any(|(begin, end)| *begin <= step.begin && step.end <= *end)
    };
    let counted: Vec<&TimedStep> = steps.iter().filter(is_in_window).collect();
    ensure!(
        !counted.is_empty(),
        "cannot measure steps: no step is completely within a window; expected a longer --window-s"
    );
    let seconds = |step: &&TimedStep| (step.end - step.begin).as_secs_f64();
    let tokens: u32 = counted.iter().map(|step| step.tokens).sum();
    let tokens_per_s = f64::from(tokens) / counted.iter().map(seconds).sum::<f64>();
    let step_ms = counted.iter().map(|step| seconds(step) * 1e3).collect();
    Ok(ComputeStats { step_ms: Percentiles::of(step_ms), tokens_per_s })
}

impl Drop for ForwardLoad {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // The measurement is over, so an error of the thread no longer matters. `stats` reports
            // earlier errors.
            let _ = thread.join();
        }
    }
}

/// Returns the number of SMs that steps leave free for transfers.
fn reserved_sms(args: &TransferArgs) -> u32 {
    let uses_nccl = args.transport.contains(&TransportArg::Nccl) && args.ctas > 0;
    let node_default = if uses_nccl { nccl_reserved_sms(args.ctas) } else { 0 };
    args.forward.model_reserved_sms.unwrap_or(node_default)
}

/// Shape of the batch that the engine repeats.
struct BatchShape {
    kind: ForwardKind,
    /// Sequences in flight at once.
    sequences: u32,
    prompt_tokens: u32,
    output_tokens: u32,
    /// SMs that steps leave free for transfers.
    reserved_sms: u32,
    limits: ExecutorLimits,
}

impl BatchShape {
    fn new(
        args: &ForwardArgs,
        kind: ForwardKind,
        reserved_sms: u32,
        checkpoint: &Checkpoint,
    ) -> Result<Self> {
        let config = checkpoint.config();
        let (option, sequences, prompt_tokens, output_tokens) = match kind {
            ForwardKind::Prefill => ("--model-prompt", PREFILL_SEQUENCES, args.model_prompt, 1),
            ForwardKind::Decode => {
                ("--model-context", args.model_batch, args.model_context, OUTPUT_TOKENS)
            }
        };
        let free_tokens = tokens_after_prompt(option, prompt_tokens, config.context_tokens as u32)?;
        let output_tokens = output_tokens.min(free_tokens);
        let sequence_tokens = prompt_tokens + output_tokens + BLOCK_TOKENS as u32;
        let limits = ExecutorLimits {
            slots: sequences,
            step_tokens: STEP_TOKENS.max(sequences),
            sequence_tokens,
            blocks: sequences
                * config.kv_groups(KvFormat::Bf16).entries(sequence_tokens as usize + BLOCK_TOKENS)
                    as u32,
            depth: 2,
            vocabulary: config.vocab_size as u32,
            speculation: None,
        };
        Ok(Self { kind, sequences, prompt_tokens, output_tokens, reserved_sms, limits })
    }
}

/// Returns the number of tokens that fit after a prompt into the model's context, with a KV block
/// to spare. Rejects a prompt length without a token after it. `option` is the name of the command
/// line option.
fn tokens_after_prompt(option: &str, prompt_tokens: u32, context_tokens: u32) -> Result<u32> {
    let prompt_tokens_end = context_tokens.saturating_sub(BLOCK_TOKENS as u32);
    ensure!(
        prompt_tokens < prompt_tokens_end,
        "invalid {option}: {prompt_tokens}; expected less than {prompt_tokens_end} tokens with this model"
    );
    Ok(prompt_tokens_end - prompt_tokens)
}

/// Loads the model onto a GPU and starts its engine.
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
    let layout = checkpoint.config().block_layout(weights.kv_format());
    let kv = DeviceKv::new(&context, layout, shape.limits.blocks)?;
    let arena = KvArena::remote(kv.clone())?;
    let mut executor = CudaExecutor::start(model, kv, &arena, shape.limits)?;
    executor.set_polling(true);
    let seeds =
        CacheSeeds { model_fingerprint: checkpoint.model_fingerprint()?, weight_version: 0 };
    let scheduler = Scheduler::new(SchedulerConfig::new(shape.limits), seeds)?;
    Ok(StepLoop::new(scheduler.with_kv_groups(executor.kv_groups()), Box::new(executor)))
}

/// State of the thread that runs forward passes.
struct ForwardThread {
    engine: StepLoop<Box<dyn Executor>>,
    shape: BatchShape,
    /// Number of tokens of the model.
    vocabulary: u32,
    rng: WorkloadRng,
    next_id: u128,
    stop: Arc<AtomicBool>,
    steps: Arc<Mutex<Vec<TimedStep>>>,
}

impl ForwardThread {
    /// Runs forward passes until the stop flag is set.
    fn run(mut self) -> Result<()> {
        let mut actions = Vec::new();
        let (mut in_flight, mut last_progress) = (0, Instant::now());
        // End of the previous step, if that step was of the measured kind.
        let mut previous_end = None;
        while !self.stop.load(Ordering::Acquire) {
            // A prefilled prompt is replaced at once. A decode batch is replaced when all its
            // sequences have finished.
            let missing = match self.shape.kind {
                ForwardKind::Prefill => self.shape.sequences - in_flight,
                ForwardKind::Decode if in_flight == 0 => self.shape.sequences,
                ForwardKind::Decode => 0,
            };
            for _ in 0..missing {
                self.submit(&mut actions);
                in_flight += 1;
            }
            match self.engine.turn(TURN_MAX, &mut actions)? {
                LoopOutcome::Stepped => last_progress = Instant::now(),
                LoopOutcome::Pending | LoopOutcome::Idle => {
                    ensure!(last_progress.elapsed() < STALL_MAX, "no step for {STALL_MAX:?}");
                }
            }
            for step in self.engine.take_records() {
                let end = step.collect.end;
                // Decode steps count only with the full batch.
                let is_measured = match self.shape.kind {
                    ForwardKind::Prefill => step.kind == StepKind::Prefill,
                    ForwardKind::Decode => {
                        step.kind == StepKind::Decode && step.rows == self.shape.sequences
                    }
                };
                // After a step of another kind, the time from end to end would include that step.
                if let (true, Some(begin)) = (is_measured, previous_end) {
                    let tokens = step.tokens;
                    let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
                    steps.push(TimedStep { begin, end, tokens });
                }
                previous_end = is_measured.then_some(end);
            }
            for action in actions.drain(..) {
                match action {
                    Action::Finished { .. } => in_flight -= 1,
                    Action::Failed { failure, .. } => bail!("a sequence failed: {failure}"),
                    _ => {}
                }
            }
            drop(self.engine.scheduler_mut().take_cache_changes());
        }
        Ok(())
    }

    /// Submits a sequence with a random prompt.
    fn submit(&mut self, actions: &mut Vec<Action>) {
        self.next_id += 1;
        let lengths = (self.shape.prompt_tokens, self.shape.output_tokens);
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

    #[test]
    fn prompt_leaves_a_block_and_a_token_of_the_context() {
        let block = BLOCK_TOKENS as u32;
        let free = |prompt| tokens_after_prompt("--model-prompt", prompt, 1000);
        assert_eq!(free(1000 - block - 1).unwrap(), 1);
        let error = free(1000 - block).unwrap_err().to_string();
        let expected = "invalid --model-prompt: 984; expected less than 984 tokens with this model";
        assert_eq!(error, expected);
    }

    #[test]
    fn stopped_thread_is_an_error_of_every_check() {
        let thread = thread::spawn(|| bail!("a step failed"));
        while !thread.is_finished() {
            thread::yield_now();
        }
        let (stop, steps) = (Arc::default(), Arc::default());
        let mut load = ForwardLoad { stop, steps, thread: Some(thread) };
        let error = format!("{:#}", load.check().unwrap_err());
        assert!(error.ends_with("has stopped: a step failed"), "{error}");
        assert!(load.check().is_err() && load.stats(&Default::default()).is_err());
    }
}
