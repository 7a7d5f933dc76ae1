//! Executor that runs everywhere: the forward pass on threads of this process.
//!
//! One named thread owns model, backend and batch, so `launch` never blocks and the scheduler works
//! while a step computes.
//!
//! With a backend in a group the executor is one of several ranks that run the same plans. Each
//! rank has its shard of the model and the KV of its heads, and all ranks return the same results.

use std::{
    io,
    ops::Range,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use kernels::{
    Backend, KvArena, KvGroups, Shard,
    cpu::{
        CpuBackend, CpuError, CpuGroupError, CpuLowRank, CpuMatrix, CpuStep, CpuVector,
        SampleError, SampleRow, StepSequence,
    },
    sampling::{Pooling, SampledToken, TokenLogprobs},
};
use model::{
    Adapter, AdapterTable, Checkpoint, Limits, LoadProgress, ModelConfig, ModelError, Transformer,
    TransformerWeights,
};

use super::{
    CollectWaker, Executor, ExecutorError, ExecutorLimits, ModelMismatch, PrepareError,
    WeightUpdate,
    batch::{Batch, ScheduledRow},
    ngram,
    worker::Worker,
};
use crate::{
    adapter_slots::{ADAPTER_SLOTS_MAX, AdapterSlots},
    plan::{RowFailure, RowMask, RowResult, Span, StepId, StepPlan, StepResult, StepRun},
};

/// Error of starting a CPU executor.
#[derive(Debug, thiserror::Error)]
pub enum CpuExecutorError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Misfit(#[from] ModelMismatch),
    #[error(transparent)]
    Backend(#[from] CpuError),
    #[error("cannot start the engine's compute thread: {0}")]
    Spawn(#[from] io::Error),
}

pub struct CpuExecutor {
    limits: ExecutorLimits,
    kv_groups: KvGroups,
    shadow: Arc<CpuShadow>,
    adapters: Arc<CpuAdapters>,
    worker: Worker<ComputeJob, ComputeResult, ExecutorError>,
    in_flight: u32,
    /// The step launched last, until its token bitmasks are supplied.
    awaiting: Option<StepId>,
    masks_are_due: bool,
}

/// Work of the compute thread.
#[derive(Debug)]
enum ComputeJob {
    Step(StepPlan),
    /// The token bitmasks of the step launched last.
    Masks(StepId, Vec<RowMask>),
    /// Free the weights in use.
    ReleaseWeights,
    /// Swap the weights in use and the prepared weights.
    CommitWeights,
}

#[derive(Debug)]
enum ComputeResult {
    /// The forward pass of a step that awaits its token bitmasks.
    Forward(StepId),
    Step(StepResult),
    /// The weights in use were freed or swapped.
    WeightsChanged,
}

/// Time-out of the swap of weights, which only swaps pointers or frees memory.
const COMMIT_MAX: Duration = Duration::from_secs(10);

type CpuWeights = TransformerWeights<CpuMatrix, CpuVector>;

/// The weights that are not in use: prepared, or replaced by a commit.
struct CpuShadow {
    /// Backend that packs weights on one thread while steps run.
    packer: CpuBackend,
    is_in_place: AtomicBool,
    weights: Mutex<Option<CpuWeights>>,
}

impl CpuShadow {
    fn weights(&self) -> MutexGuard<'_, Option<CpuWeights>> {
        self.weights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WeightUpdate for CpuShadow {
    fn is_in_place(&self) -> bool {
        self.is_in_place.load(Ordering::Relaxed)
    }

    fn prepare(&self, _path: &Path, checkpoint: &Checkpoint) -> Result<(), PrepareError> {
        self.discard();
        let weights = TransformerWeights::pack(checkpoint, &self.packer, &mut |_| ())?;
        *self.weights() = Some(weights);
        Ok(())
    }

    fn discard(&self) {
        let weights = self.weights().take();
        // Dropped after the lock is released: freeing gigabytes takes a while.
        drop(weights);
    }
}

/// The adapters of the model, or of one rank's shard of it.
struct CpuAdapters {
    table: AdapterTable<CpuLowRank>,
    config: ModelConfig,
    shard: Shard,
}

impl AdapterSlots for CpuAdapters {
    fn open(&self, folder: &Path, rank_max: u32) -> Result<Adapter, ModelError> {
        Adapter::open(folder, &self.config, self.shard, rank_max as usize)
    }

    fn set(&self, slot: u32, adapter: Option<Adapter>) -> Result<(), ExecutorError> {
        self.table.set(slot as usize, adapter);
        Ok(())
    }

    fn bytes(&self, adapter: &Adapter) -> u64 {
        adapter.bytes()
    }
}

impl CpuExecutor {
    /// Packs the model's weights (a rank: its shard of them) and starts the thread. KV is computed
    /// into `arena`, which transfers share. A rank's arena has the blocks of all heads, or of its
    /// own heads only. The blocks hold the layers of one KV group, or all layers. Calls `progress`
    /// after every matrix.
    ///
    /// # Errors
    /// When a weight cannot be read, or arena and limits do not match the model.
    pub fn start(
        checkpoint: &Checkpoint,
        backend: CpuBackend,
        arena: Arc<KvArena>,
        limits: ExecutorLimits,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, CpuExecutorError> {
        let (heads, kv_groups) = check(checkpoint, &backend, &arena, limits)?;
        let largest_step = Limits {
            rows_max: limits.step_tokens as usize,
            sampled_max: limits.samples_max() as usize,
            adapter_slots: ADAPTER_SLOTS_MAX as usize,
        };
        let model = Transformer::load(checkpoint, &backend, largest_step, progress)?;
        let adapters = Arc::new(CpuAdapters {
            table: model.adapters().clone(),
            config: checkpoint.config().clone(),
            shard: backend.shard(),
        });
        let batch = Batch::new(limits).with_kv_groups(kv_groups.clone());
        let packer = backend.packer()?;
        let shadow = CpuShadow { packer, is_in_place: false.into(), weights: Mutex::default() };
        let shadow = Arc::new(shadow);
        let mut runner = CpuRunner {
            model,
            backend,
            arena,
            heads,
            kv_groups: kv_groups.clone(),
            limits,
            batch,
            awaiting: None,
            shadow: Arc::clone(&shadow),
        };
        // A step has a second job if it awaits bitmasks.
        let worker =
            Worker::start("baton-engine-cpu", 2 * limits.depth, move |job| runner.run(job))?;
        let (in_flight, awaiting, masks_are_due) = (0, None, false);
        Ok(Self { limits, kv_groups, worker, in_flight, awaiting, masks_are_due, shadow, adapters })
    }
}

impl CpuExecutor {
    /// Lets updates free the weights in use before they pack new weights, so that memory holds one
    /// copy.
    pub fn update_in_place(&self) {
        self.shadow.is_in_place.store(true, Ordering::Relaxed);
    }

    /// Runs a job that changes the weights, and waits for its end.
    fn change_weights(&mut self, job: ComputeJob) -> Result<(), ExecutorError> {
        assert_eq!(self.in_flight, 0, "weights change between steps");
        self.worker.send(job)?;
        let deadline = Instant::now() + COMMIT_MAX;
        while Instant::now() < deadline {
            // A wake-up ends the wait early.
            if let Some(ComputeResult::WeightsChanged) = self.worker.receive(COMMIT_MAX)? {
                return Ok(());
            }
        }
        let reason = format!("the weights were not swapped within {COMMIT_MAX:?}");
        Err(ExecutorError::Stopped { reason })
    }
}

impl Executor for CpuExecutor {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        if self.in_flight == self.limits.depth {
            let reason = format!("{} steps are in flight already", self.in_flight);
            return Err(ExecutorError::BadPlan { step_id: plan.step_id, reason });
        }
        self.awaiting = plan.awaits_masks.then_some(plan.step_id);
        self.worker.send(ComputeJob::Step(plan))?;
        self.in_flight += 1;
        Ok(())
    }

    fn supply(&mut self, step_id: StepId, masks: Vec<RowMask>) -> Result<(), ExecutorError> {
        self.worker.send(ComputeJob::Masks(step_id, masks))?;
        (self.awaiting, self.masks_are_due) = (None, false);
        Ok(())
    }

    fn masks_are_due(&self) -> bool {
        self.masks_are_due
    }

    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        let mut result = match self.worker.receive(timeout)? {
            None => return Ok(None),
            Some(ComputeResult::Forward(step_id)) => {
                self.masks_are_due |= self.awaiting == Some(step_id);
                return Ok(None);
            }
            Some(ComputeResult::Step(result)) => result,
            Some(ComputeResult::WeightsChanged) => return Ok(None),
        };
        self.in_flight -= 1;
        result.run.collected_at = Some(Instant::now());
        Ok(Some(result))
    }

    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn kv_groups(&self) -> KvGroups {
        self.kv_groups.clone()
    }

    fn waker(&self) -> CollectWaker {
        self.worker.waker()
    }

    fn weight_update(&self) -> Option<Arc<dyn WeightUpdate>> {
        Some(self.shadow.clone())
    }

    fn adapter_slots(&self) -> Option<Arc<dyn AdapterSlots>> {
        Some(self.adapters.clone())
    }

    fn commit_weights(&mut self) -> Result<(), ExecutorError> {
        self.change_weights(ComputeJob::CommitWeights)
    }

    fn release_weights(&mut self) -> Result<(), ExecutorError> {
        self.change_weights(ComputeJob::ReleaseWeights)
    }
}

/// State owned by the compute thread.
struct CpuRunner {
    model: Transformer<CpuBackend>,
    backend: CpuBackend,
    arena: Arc<KvArena>,
    /// The arena's heads that this rank computes.
    heads: Range<usize>,
    kv_groups: KvGroups,
    limits: ExecutorLimits,
    batch: Batch,
    /// The step whose token bitmasks come with the next job.
    awaiting: Option<UnsampledStep>,
    shadow: Arc<CpuShadow>,
}

/// A step between its forward pass and its sampling.
struct UnsampledStep {
    step_id: StepId,
    begin: Instant,
    busy: Duration,
    scheduled: Vec<ScheduledRow>,
}

impl CpuRunner {
    fn run(&mut self, job: ComputeJob) -> Result<ComputeResult, ExecutorError> {
        match job {
            ComputeJob::Step(plan) => {
                let step = self.forward(&plan)?;
                if plan.awaits_masks {
                    self.awaiting = Some(step);
                    return Ok(ComputeResult::Forward(plan.step_id));
                }
                self.sample(step)
            }
            ComputeJob::Masks(step_id, masks) => {
                let bad = |reason: String| ExecutorError::BadPlan { step_id, reason };
                let step = self.awaiting.take().filter(|step| step.step_id == step_id);
                let mut step = step.ok_or_else(|| bad("the step awaits no bitmasks".to_owned()))?;
                self.batch.supply(&mut step.scheduled, masks).map_err(bad)?;
                self.sample(step)
            }
            ComputeJob::ReleaseWeights => {
                drop(self.model.take_weights());
                Ok(ComputeResult::WeightsChanged)
            }
            ComputeJob::CommitWeights => {
                let mut shadow = self.shadow.weights();
                let Some(weights) = shadow.take() else {
                    let reason = "no weights are prepared".to_owned();
                    return Err(ExecutorError::Stopped { reason });
                };
                *shadow = self.model.replace_weights(weights);
                Ok(ComputeResult::WeightsChanged)
            }
        }
    }

    /// Computes the logits of a step, which stay in the model.
    fn forward(&mut self, plan: &StepPlan) -> Result<UnsampledStep, ExecutorError> {
        let (step_id, begin) = (plan.step_id, Instant::now());
        if !self.model.has_weights() {
            let reason = "the weights were released".to_owned();
            return Err(ExecutorError::BadPlan { step_id, reason });
        }
        let scheduled = self.batch.apply(
            plan,
            |_| None,
            |row, most| match &self.limits.speculation {
                Some(rules) => ngram::draft(&row.tokens, most, rules),
                None => Vec::new(),
            },
        )?;
        let sequences: Vec<_> = scheduled
            .iter()
            .filter(|row| row.token_count > 0)
            .map(|row| step_sequence(&self.batch, row))
            .collect();
        let bad = |reason| ExecutorError::BadPlan { step_id, reason };
        for &copy in &plan.copies {
            let copied = self.arena.copy_heads(self.heads.clone(), copy);
            copied.map_err(|error| bad(error.to_string()))?;
        }
        let step = CpuStep::of_heads(&self.arena, self.heads.clone(), &self.kv_groups, &sequences);
        let mut step = step.map_err(|error| bad(error.to_string()))?;
        if !sequences.is_empty() {
            self.model.forward(&mut self.backend, &mut step);
        }
        Ok(UnsampledStep { step_id, begin, busy: begin.elapsed(), scheduled })
    }

    fn sample(&mut self, step: UnsampledStep) -> Result<ComputeResult, ExecutorError> {
        let UnsampledStep { step_id, begin, busy, scheduled } = step;
        let started = Instant::now();
        let sampled = self.sampled(&scheduled);
        let rows = sampled.map_err(|source| ExecutorError::Group { step_id, source })?;
        let end = Instant::now();
        let (device, results_at) = (Some(Span { begin, end }), Some(end));
        let experts = self.backend.take_expert_load();
        let run = StepRun { experts, device, results_at, ..StepRun::default() };
        Ok(ComputeResult::Step(StepResult { step_id, rows, busy: busy + (end - started), run }))
    }

    fn sampled(&mut self, scheduled: &[ScheduledRow]) -> Result<Vec<RowResult>, CpuGroupError> {
        if scheduled.iter().all(|row| row.token_count == 0) {
            return Ok(scheduled.iter().map(|row| self.batch.unsampled(row)).collect());
        }
        let rows: Vec<_> = scheduled.iter().flat_map(|row| sample_rows(&self.batch, row)).collect();
        let vocabulary = self.limits.vocabulary as usize;
        let answers = self.backend.sample_gathered(self.model.logits(), vocabulary, &rows)?;
        let pooled = |(row, answer): (usize, Result<SampledToken, SampleError>)| {
            let pooled = rows[row].sampling.pooling.as_ref().map(|pooling| match pooling {
                Pooling::Hidden => self.model.hidden().row(row).into(),
                Pooling::Logits(tokens) => {
                    let logits = self.model.logits().row(row);
                    tokens.iter().map(|token| logits[*token as usize]).collect()
                }
            });
            answer.map(|token| SampledToken { pooled, ..token }).map_err(row_failure)
        };
        let answers: Vec<_> = answers.into_iter().enumerate().map(pooled).collect();
        let mut answers = answers.into_iter();
        let mut results = Vec::with_capacity(scheduled.len());
        for row in scheduled {
            let count = logit_rows(&self.batch, row);
            let mut answers: Vec<_> = answers.by_ref().take(count).collect();
            // The logits after the last token of the row are sampled.
            let scored = answers.len() - row.sampled_lengths().len();
            let prompt_logprobs = self.prompt_logprobs(row, answers.drain(..scored));
            let mut result = match row.samples && !row.is_late {
                true => self.batch.sampled(row, answers),
                false => self.batch.unsampled(row),
            };
            match prompt_logprobs {
                Ok(logprobs) => result.prompt_logprobs = logprobs,
                Err(failure) => result.failure = Some(failure),
            }
            results.push(result);
        }
        Ok(results)
    }

    /// Returns the log-probabilities of the prompt tokens among the tokens that follow tokens of
    /// the row.
    fn prompt_logprobs(
        &self,
        row: &ScheduledRow,
        scored: impl Iterator<Item = Result<SampledToken, RowFailure>>,
    ) -> Result<Vec<TokenLogprobs>, RowFailure> {
        let prompt_len = self.batch.row(row.slot).prompt_len;
        let left = prompt_len.saturating_sub(row.start + 1);
        scored
            .take(left)
            .filter_map(|token| token.map(|token| token.logprobs).transpose())
            .collect()
    }
}

/// Returns the number of the row's last tokens after which the step computes logits.
fn logit_rows(batch: &Batch, scheduled: &ScheduledRow) -> usize {
    match batch.row(scheduled.slot).scores_prompt(scheduled) {
        true => scheduled.token_count,
        false => scheduled.sampled_lengths().len(),
    }
}

/// Returns what is sampled from the row's logits, in their order.
fn sample_rows<'a>(
    batch: &'a Batch,
    scheduled: &ScheduledRow,
) -> impl Iterator<Item = SampleRow<'a>> + use<'a> {
    let row = batch.row(scheduled.slot);
    let sampled = scheduled.sampled_lengths();
    let count = logit_rows(batch, scheduled);
    let is_late = scheduled.is_late;
    // The lengths of the row after which the next token is scored, then those after which it is
    // sampled.
    let scored_end = sampled.start + usize::from(!scheduled.samples);
    let scored = scheduled.end() + 1 - count..scored_end;
    let scored = scored.map(move |length| (length, None, row.tokens.get(length).copied()));
    let sampled = sampled.enumerate().map(|(index, length)| (length, row.allowed.get(index), None));
    scored.chain(sampled).map(move |(length, allowed, scored)| SampleRow {
        sampling: &row.sampling,
        tokens: if is_late || scored.is_some() { &row.tokens } else { &row.tokens[..length] },
        prompt_len: row.prompt_len,
        allowed: allowed.map(Arc::as_ref),
        scored,
    })
}

fn step_sequence<'a>(batch: &'a Batch, scheduled: &ScheduledRow) -> StepSequence<'a> {
    let row = batch.row(scheduled.slot);
    StepSequence {
        first_position: scheduled.start as u32,
        tokens: &row.tokens[scheduled.start..scheduled.end()],
        blocks: &row.blocks,
        sampled_rows: logit_rows(batch, scheduled) as u32,
        adapter: row.adapter,
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

/// Checks arena and limits against the model. Returns the arena's heads that this rank computes,
/// and the KV groups of the arena's blocks.
fn check(
    checkpoint: &Checkpoint,
    backend: &CpuBackend,
    arena: &KvArena,
    limits: ExecutorLimits,
) -> Result<(Range<usize>, KvGroups), CpuExecutorError> {
    let (config, shard) = (checkpoint.config(), backend.shard());
    config.check_shard(shard)?;
    let (found, whole) = (arena.layout(), config.kv_layout(arena.layout().format));
    let groups = config.kv_groups(found.format);
    let groups = match groups.block_layout(whole).layer_count == found.layer_count {
        true => groups,
        false => KvGroups::whole(config.kv_layer_count()),
    };
    let wanted = groups.block_layout(whole);
    let heads = shard.part(wanted.kv_head_count);
    let (heads, groups) = match found {
        _ if found == wanted => (heads, groups),
        _ if found == wanted.with_heads(heads.len()) => {
            let state = groups.state().map(|state| state.part(shard.rank_count()));
            (0..heads.len(), groups.with_state(state, found))
        }
        _ => return Err(ModelMismatch::Layout { found, wanted }.into()),
    };
    limits.check(config, arena.block_count())?;
    Ok((heads, groups))
}
