//! Forwards beside transfers: what the sender's prompts and the receiver's decoding steps lose while KV moves.
//!
//! Each process has a model of random weights on its GPU, in the context that its blocks are in, and keeps it
//! busy: the sender reads prompts one after another, the receiver decodes a batch. Time passes in windows, with
//! and without transfers in turn, so that neither has the warmer GPU or the longer sequences.

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
    CacheSeeds, Scheduler, SchedulerConfig, StepKind, StepLoop, Turn,
    event::{Action, Input, SequenceId},
    executor::{
        Executor, ExecutorLimits,
        cuda::{CudaExecutor, CudaModel},
    },
};
use kernels::{
    BLOCK_TOKENS, KvArena, WeightFormat,
    cuda::{CudaBackend, CudaOptions, DeviceKv, Driver, nccl_spare},
};
use model::{Checkpoint, LoadFormat};
use serde::{Deserialize, Serialize};

use super::{TransferArgs, Transport};
use baton::{
    bench::{
        engine::random_sequence,
        stats::{Percentiles, WorkloadRng},
    },
    doctor::KernelsArg,
};

/// A model that makes no step for so long is broken.
const STALL_MAX: Duration = Duration::from_secs(60);
/// Of a sequence that decodes: few, so that its steps are about equally long.
const ANSWER_TOKENS: u32 = 256;
/// Of a prompt's step.
const STEP_TOKENS: u32 = 8192;

#[derive(Args)]
pub struct BesideArgs {
    /// Keeps both GPUs busy with a model of this folder's config.json and random weights: the sender reads
    /// prompts, the receiver decodes.
    #[arg(long, value_name = "FOLDER", requires = "gpus")]
    pub beside: Option<PathBuf>,
    /// Sequences that decode.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub beside_batch: u32,
    /// Tokens that each has at the beginning.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub beside_context: u32,
    /// Multiprocessors that decoding steps leave to transfers [default: with nccl those that nodes leave
    /// to it].
    #[arg(long)]
    pub beside_spare: Option<u32>,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub beside_prompt: u32,
    /// Milliseconds from one transfer's begin to the next; 0: each begins when the one before has arrived.
    #[arg(long, default_value_t = 180, value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    pub every_ms: u64,
    /// Windows with transfers, and as many without.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub windows: u32,
    /// Seconds of each.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub window_s: u64,
}

/// What a GPU does beside transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Prompts,
    Decoding,
}

/// One step, from the end of the one before it to its own.
#[derive(Clone, Copy, Debug)]
struct Step {
    begin: Instant,
    end: Instant,
    tokens: u32,
}

/// What was done in some windows.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Pace {
    /// In milliseconds.
    pub step_ms: Percentiles,
    pub tokens_per_s: f64,
}

/// Windows of time of one kind.
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

/// One GPU's work without transfers and beside them.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Paces {
    pub quiet: Pace,
    pub busy: Pace,
}

/// A model at work, until it is dropped.
pub struct Forwards {
    stop: Arc<AtomicBool>,
    steps: Arc<Mutex<Vec<Step>>>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Forwards {
    /// On this GPU; returns when the first steps have been made.
    pub fn start(all: &TransferArgs, gpu: &str, work: Work) -> Result<Self> {
        let (args, kernels) = (&all.beside, &all.kernels);
        let folder = args.beside.as_deref().context("there is a model")?;
        let checkpoint = Checkpoint::open(folder, LoadFormat::Dummy { seed: 0 })?;
        let shape = Shape::of(args, work, spare(all), &checkpoint)?;
        let engine = engine(&checkpoint, kernels, gpu, &shape)?;
        let (stop, steps) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let busy = Busy {
            engine,
            shape,
            vocabulary: checkpoint.config().vocab_size as u32,
            rng: WorkloadRng::new(1),
            next_id: 0,
            stop: Arc::clone(&stop),
            steps: Arc::clone(&steps),
        };
        let thread = thread::Builder::new().name("forwards".to_owned()).spawn(|| busy.run())?;
        let mut forwards = Self { stop, steps, thread: Some(thread) };
        let begin = Instant::now();
        while forwards.steps().is_empty() {
            forwards.check()?;
            ensure!(begin.elapsed() < STALL_MAX, "no step beside the transfers for {STALL_MAX:?}");
            thread::sleep(Duration::from_millis(10));
        }
        Ok(forwards)
    }

    fn steps(&self) -> Vec<Step> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Says why it has ended, if it has.
    fn check(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take_if(|thread| thread.is_finished()) else {
            return Ok(());
        };
        let ended = thread.join().unwrap_or_else(|_| bail!("its thread panicked"));
        ended
            .and_then(|()| bail!("nobody asked it to"))
            .context("the model beside the transfers has stopped")
    }

    /// # Errors
    /// When there is a kind of windows in which no step lies from begin to end.
    pub fn paces(&mut self, [quiet, busy]: &[Windows; 2]) -> Result<Paces> {
        self.check()?;
        let steps = self.steps();
        Ok(Paces { quiet: pace(&steps, quiet)?, busy: pace(&steps, busy)? })
    }
}

/// Of the steps that lie in these windows from begin to end.
fn pace(steps: &[Step], windows: &Windows) -> Result<Pace> {
    let within = |step: &&Step| {
        windows.0.iter().any(|(begin, end)| *begin <= step.begin && step.end <= *end)
    };
    let within: Vec<&Step> = steps.iter().filter(within).collect();
    ensure!(!within.is_empty(), "no step lies in a window: --window-s is too short");
    let seconds = |step: &&Step| (step.end - step.begin).as_secs_f64();
    let tokens: u32 = within.iter().map(|step| step.tokens).sum();
    let tokens_per_s = f64::from(tokens) / within.iter().map(seconds).sum::<f64>();
    let step_ms = within.iter().map(|step| seconds(step) * 1e3).collect();
    Ok(Pace { step_ms: Percentiles::of(step_ms), tokens_per_s })
}

impl Drop for Forwards {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // Whoever asks for its pace hears what it failed with; now nobody does.
            let _ = thread.join();
        }
    }
}

/// Multiprocessors that steps leave to transfers.
fn spare(args: &TransferArgs) -> u32 {
    let by_nccl = args.transport.contains(&Transport::Nccl) && args.ctas > 0;
    let as_nodes = if by_nccl { nccl_spare(args.ctas) } else { 0 };
    args.beside.beside_spare.unwrap_or(as_nodes)
}

/// What is asked of the engine again and again.
struct Shape {
    work: Work,
    sequences: u32,
    prompt_tokens: u32,
    answer_tokens: u32,
    /// Multiprocessors.
    spare: u32,
    limits: ExecutorLimits,
}

impl Shape {
    fn of(args: &BesideArgs, work: Work, spare: u32, checkpoint: &Checkpoint) -> Result<Self> {
        let config = checkpoint.config();
        let longest = config.context_tokens as u32;
        // Two prompts at a time: there is always a next one.
        let (sequences, prompt_tokens, answer_tokens) = match work {
            Work::Prompts => (2, args.beside_prompt, 1),
            Work::Decoding => (args.beside_batch, args.beside_context, ANSWER_TOKENS),
        };
        let room = longest.saturating_sub(prompt_tokens + BLOCK_TOKENS as u32);
        let answer_tokens = answer_tokens.min(room);
        ensure!(answer_tokens > 0, "a prompt of {prompt_tokens}: the model has {longest} tokens");
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
        Ok(Self { work, sequences, prompt_tokens, answer_tokens, spare, limits })
    }
}

fn engine(
    checkpoint: &Checkpoint,
    kernels: &KernelsArg,
    gpu: &str,
    shape: &Shape,
) -> Result<StepLoop<Box<dyn Executor>>> {
    let weights = WeightFormat::Bf16;
    let device = Driver::open()?.device_named(gpu)?;
    let options = CudaOptions { spare_multiprocessors: shape.spare, ..CudaOptions::new(weights) };
    let backend = CudaBackend::open(Some(&device.uuid), kernels.path().as_deref(), options)?;
    let context = Arc::clone(backend.context());
    let model = CudaModel::load(checkpoint, backend, &shape.limits, &mut |_| ())?;
    let layout = checkpoint.config().kv_layout(weights.kv_dtype());
    let kv = DeviceKv::new(&context, layout, shape.limits.blocks)?;
    let arena = KvArena::remote(kv.clone())?;
    let mut executor = CudaExecutor::start(model, kv, &arena, shape.limits)?;
    executor.poll(true);
    let seeds = CacheSeeds { model_fingerprint: checkpoint.model_fingerprint(), weight_version: 0 };
    let scheduler = Scheduler::new(SchedulerConfig::new(shape.limits), seeds)?;
    Ok(StepLoop::new(scheduler, Box::new(executor)))
}

/// The thread that keeps a GPU busy.
struct Busy {
    engine: StepLoop<Box<dyn Executor>>,
    shape: Shape,
    vocabulary: u32,
    rng: WorkloadRng,
    next_id: u128,
    stop: Arc<AtomicBool>,
    steps: Arc<Mutex<Vec<Step>>>,
}

impl Busy {
    fn run(mut self) -> Result<()> {
        let mut actions = Vec::new();
        let (mut under_way, mut progress, mut before) = (0, Instant::now(), None);
        while !self.stop.load(Ordering::Acquire) {
            // Prompts follow one another; a batch that decodes begins together.
            let wanted = match self.shape.work {
                Work::Prompts => self.shape.sequences - under_way,
                Work::Decoding if under_way == 0 => self.shape.sequences,
                Work::Decoding => 0,
            };
            for _ in 0..wanted {
                self.submit(&mut actions);
                under_way += 1;
            }
            match self.engine.turn(Duration::from_secs(1), &mut actions)? {
                Turn::Stepped => progress = Instant::now(),
                Turn::Pending | Turn::Idle => {
                    ensure!(progress.elapsed() < STALL_MAX, "no step for {STALL_MAX:?}");
                }
            }
            while let Some(step) = self.engine.take_record() {
                let end = step.collect.end;
                let counts = match self.shape.work {
                    Work::Prompts => step.kind == StepKind::Prefill,
                    Work::Decoding => {
                        step.kind == StepKind::Decode && step.rows == self.shape.sequences
                    }
                };
                // What follows a step of another kind has waited for it.
                if let (true, Some(begin)) = (counts, before) {
                    let tokens = step.tokens;
                    let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
                    steps.push(Step { begin, end, tokens });
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
    fn a_pace_is_of_steps_that_lie_in_a_window_from_begin_to_end() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let step = |begin, end| Step { begin: at(begin), end: at(end), tokens: 10 };
        let steps = [step(0, 10), step(10, 20), step(20, 40), step(95, 105), step(110, 120)];
        let windows = Windows(vec![(at(10), at(45)), (at(100), at(120))]);
        let Pace { step_ms, tokens_per_s } = pace(&steps, &windows).unwrap();
        assert_eq!((step_ms.count, step_ms.p50, step_ms.max), (3, 10.0, 20.0));
        assert_eq!(tokens_per_s.round(), 750.0);
        let error = pace(&steps, &Windows(vec![(at(96), at(104))])).unwrap_err();
        assert!(error.to_string().contains("--window-s"), "{error}");
    }
}
