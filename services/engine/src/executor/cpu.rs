//! Executor that runs everywhere: the forward pass on threads of this process.
//!
//! One named thread owns model, backend and batch. Plans go to this thread and results come back through
//! bounded channels, so `launch` never blocks and the scheduler works while a step computes. The thread
//! ends when the channel of plans closes; dropping the executor closes the channel and joins the thread.
//!
//! With a backend in a group the executor is one of several ranks that run the same plans. Each rank has
//! its shard of the model and the KV of its heads, and all ranks return the same results.

use std::{
    io,
    ops::Range,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvError, Sender, bounded, select};
use kernels::{
    Backend, KvArena, KvLayout,
    cpu::{CpuBackend, CpuStep, GroupError, SampleError, SampleRow, StepSequence},
};
use model::{Checkpoint, Limits, Llama, LoadProgress, ModelError};

use super::{
    CollectWaker, Executor, ExecutorError, ExecutorLimits,
    batch::{Batch, ScheduledRow},
    ngram, panic_message,
};
use crate::plan::{RowFailure, RowResult, Span, StepPlan, StepResult, StepRun};

/// Error of starting a CPU executor.
#[derive(Debug, thiserror::Error)]
pub enum CpuExecutorError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("the arena's blocks are {found}, the model's KV is {wanted}")]
    Layout { found: KvLayout, wanted: KvLayout },
    #[error("limits.{field} is {value}, the {of} has {wanted}")]
    Limit { field: &'static str, value: u32, of: &'static str, wanted: usize },
    #[error("cannot start the engine's compute thread: {0}")]
    Spawn(#[from] io::Error),
}

type Answer = Result<StepResult, ExecutorError>;

#[derive(Debug)]
pub struct CpuExecutor {
    limits: ExecutorLimits,
    /// `None` once the executor stops the thread.
    plans: Option<Sender<StepPlan>>,
    results: Receiver<Answer>,
    in_flight: u32,
    waker: CollectWaker,
    woken: Receiver<()>,
    /// `None` once the thread was joined.
    thread: Option<JoinHandle<()>>,
}

impl CpuExecutor {
    /// Packs the model's weights (a rank: its shard of them) and starts the thread. KV is computed into
    /// `arena`, which transfers share. A rank's arena has the blocks of all heads, or of its own heads
    /// only.
    ///
    /// # Errors
    /// When a weight cannot be read, or arena and limits do not match the model.
    pub fn start(
        checkpoint: &Checkpoint,
        backend: CpuBackend,
        arena: Arc<KvArena>,
        limits: ExecutorLimits,
    ) -> Result<Self, CpuExecutorError> {
        Self::start_with_progress(checkpoint, backend, arena, limits, &mut |_| {})
    }

    /// Starts as [`Self::start`] does and calls `progress` after every matrix.
    pub fn start_with_progress(
        checkpoint: &Checkpoint,
        backend: CpuBackend,
        arena: Arc<KvArena>,
        limits: ExecutorLimits,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, CpuExecutorError> {
        let heads = check(checkpoint, &backend, &arena, limits)?;
        let speculating = limits.speculation.map_or(0, |speculation| speculation.step_tokens);
        let largest_step = Limits {
            rows_max: limits.step_tokens as usize,
            sampled_max: limits.slots.max(speculating) as usize,
        };
        let model = Llama::load(checkpoint, &backend, largest_step, progress)?;
        let runner = Runner { model, backend, arena, heads, limits, batch: Batch::new(limits) };
        // Room for every step in flight in both directions: neither side ever blocks on a send.
        let (plans, planned) = bounded(limits.depth as usize);
        let (answers, results) = bounded(limits.depth as usize);
        let thread = thread::Builder::new()
            .name("baton-engine-cpu".to_owned())
            .spawn(move || runner.run(&planned, &answers))?;
        let (waker, woken) = CollectWaker::new();
        let (plans, thread) = (Some(plans), Some(thread));
        Ok(Self { limits, plans, results, in_flight: 0, waker, woken, thread })
    }

    /// Joins the ended thread and returns why it ended.
    fn stopped(&mut self) -> ExecutorError {
        let reason = match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => panic_message(panic.as_ref()),
            Some(Ok(())) | None => "the thread ended".to_owned(),
        };
        ExecutorError::Stopped { reason }
    }
}

impl Executor for CpuExecutor {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        if self.in_flight == self.limits.depth {
            let reason = format!("{} steps are in flight already", self.in_flight);
            return Err(ExecutorError::BadPlan { step_id: plan.step_id, reason });
        }
        let is_sent = match &self.plans {
            Some(plans) => plans.try_send(plan).is_ok(),
            None => false,
        };
        if is_sent {
            self.in_flight += 1;
            return Ok(());
        }
        // The channel has room for every step in flight, so a failed send means that the thread ended. An
        // error of an earlier step tells the reason.
        match self.results.try_iter().find_map(Result::err) {
            Some(error) => Err(error),
            None => Err(self.stopped()),
        }
    }

    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        let answer = match self.results.try_recv() {
            Ok(answer) => Ok(answer),
            Err(_) => select! {
                recv(self.results) -> answer => answer,
                recv(self.woken) -> _ => return Ok(None),
                default(timeout) => return Ok(None),
            },
        };
        match answer {
            Ok(answer) => {
                self.in_flight -= 1;
                let mut result = answer?;
                result.run.taken_at = Some(Instant::now());
                Ok(Some(result))
            }
            Err(RecvError) => Err(self.stopped()),
        }
    }

    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn waker(&self) -> CollectWaker {
        self.waker.clone()
    }
}

impl Drop for CpuExecutor {
    fn drop(&mut self) {
        self.plans = None;
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
        {
            tracing::error!(reason = panic_message(panic.as_ref()), "the compute thread panicked");
        }
    }
}

/// State owned by the compute thread.
struct Runner {
    model: Llama<CpuBackend>,
    backend: CpuBackend,
    arena: Arc<KvArena>,
    /// The arena's heads that this rank computes.
    heads: Range<usize>,
    limits: ExecutorLimits,
    batch: Batch,
}

impl Runner {
    /// Runs steps until the channel of plans closes or a step fails.
    fn run(mut self, plans: &Receiver<StepPlan>, answers: &Sender<Answer>) {
        for plan in plans {
            let answer = self.step(&plan);
            let failed = answer.is_err();
            // The channel is closed while the executor is dropped.
            if answers.send(answer).is_err() || failed {
                break;
            }
        }
    }

    fn step(&mut self, plan: &StepPlan) -> Answer {
        let started = Instant::now();
        let scheduled = self.batch.apply(plan, |row, most| match &self.limits.speculation {
            Some(rules) => ngram::draft(&row.tokens, most, rules),
            None => Vec::new(),
        })?;
        let sequences: Vec<_> = scheduled
            .iter()
            .filter(|row| row.token_count > 0)
            .map(|row| step_sequence(&self.batch, row))
            .collect();
        let step = CpuStep::of_heads(&self.arena, self.heads.clone(), &sequences);
        let mut step = step.map_err(|error| ExecutorError::BadPlan {
            step_id: plan.step_id,
            reason: error.to_string(),
        })?;
        let rows = if sequences.is_empty() {
            scheduled.iter().map(|row| self.batch.unsampled(row)).collect()
        } else {
            self.forward(&mut step, &scheduled)
                .map_err(|source| ExecutorError::Group { step_id: plan.step_id, source })?
        };
        // Releases the blocks before the result reports that their KV is written.
        drop(step);
        let device = Span { begin: started, end: Instant::now() };
        let (busy, landed_at) = (device.duration(), Some(device.end));
        let run = StepRun { device: Some(device), landed_at, ..StepRun::default() };
        Ok(StepResult { step_id: plan.step_id, rows, busy, run })
    }

    fn forward(
        &mut self,
        step: &mut CpuStep,
        scheduled: &[ScheduledRow],
    ) -> Result<Vec<RowResult>, GroupError> {
        let logits = self.model.forward(&mut self.backend, step);
        let batch = &self.batch;
        let sampled: Vec<_> = scheduled
            .iter()
            .flat_map(|scheduled| {
                let row = batch.row(scheduled.slot);
                scheduled.sampled_lengths().map(move |length| SampleRow {
                    sampling: &row.sampling,
                    tokens: &row.tokens[..length],
                    prompt_len: row.prompt_len,
                    allowed: row.allowed.as_deref(),
                })
            })
            .collect();
        let vocabulary = self.limits.vocabulary as usize;
        let answers = self.backend.sample_gathered(logits, vocabulary, &sampled)?;
        let mut answers = answers.into_iter();
        let mut results = Vec::with_capacity(scheduled.len());
        for row in scheduled {
            let answers = answers.by_ref().take(row.sampled_lengths().len());
            results.push(if row.samples {
                let answers: Vec<_> = answers.map(|answer| answer.map_err(row_failure)).collect();
                self.batch.sampled(row, answers)
            } else {
                self.batch.unsampled(row)
            });
        }
        Ok(results)
    }
}

fn step_sequence<'a>(batch: &'a Batch, scheduled: &ScheduledRow) -> StepSequence<'a> {
    let row = batch.row(scheduled.slot);
    StepSequence {
        first_position: scheduled.start as u32,
        tokens: &row.tokens[scheduled.start..scheduled.end()],
        blocks: &row.blocks,
        sampled_rows: scheduled.sampled_lengths().len() as u32,
    }
}

fn row_failure(error: SampleError) -> RowFailure {
    let reason = error.to_string();
    match error {
        SampleError::BadLogit { .. } => RowFailure::Logits { reason },
        SampleError::BadSampling { .. }
        | SampleError::NoCandidate { .. }
        | SampleError::BadPromptLen { .. } => RowFailure::Sampling { reason },
    }
}

/// Checks arena and limits against the model and returns the arena's heads that this rank computes.
fn check(
    checkpoint: &Checkpoint,
    backend: &CpuBackend,
    arena: &KvArena,
    limits: ExecutorLimits,
) -> Result<Range<usize>, CpuExecutorError> {
    let (config, shard) = (checkpoint.config(), backend.shard());
    config.check_shard(shard)?;
    let (found, wanted) = (arena.layout(), config.kv_layout(backend.weights().kv_dtype()));
    let heads = shard.part(wanted.kv_head_count);
    let heads = match found {
        _ if found == wanted => heads,
        _ if found == wanted.with_heads(heads.len()) => 0..heads.len(),
        _ => return Err(CpuExecutorError::Layout { found, wanted }),
    };
    let equal = [
        ("blocks", limits.blocks, "arena", arena.block_count() as usize),
        ("vocabulary", limits.vocabulary, "model", config.vocab_size),
    ];
    for (field, value, of, wanted) in equal {
        if value as usize != wanted {
            return Err(CpuExecutorError::Limit { field, value, of, wanted });
        }
    }
    let (value, wanted) = (limits.sequence_tokens, config.context_tokens);
    if value as usize > wanted {
        let (field, of) = ("sequence_tokens", "model's context");
        return Err(CpuExecutorError::Limit { field, value, of, wanted });
    }
    Ok(heads)
}
