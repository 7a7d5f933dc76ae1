//! Executor for GPUs: the engine thread launches the forward pass on the device.
//!
//! `launch` enqueues a step on the GPU's streams and returns. Tokens, positions and lengths stay on
//! the device, so the next step is launched before the tokens of this step are known. A thread
//! waits for the results (the only blocking call of a step) and passes them to `collect`. The host
//! mirrors lengths and blocks of every slot, but no tokens. With speculative decoding the device
//! finds the draft tokens and accepts them, so the mirrored lengths of rows with draft tokens in
//! flight are upper bounds.

mod adapters;
mod graphs;
mod kernel_support;
mod kv_size;
mod loaded_model;
mod rank;
mod rows;
mod scatter;
mod shadow;

use std::{
    collections::VecDeque,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use kernels::{
    Dtype, KvArena, KvFormat, KvGroups, Shard,
    arena::{StreamAccess, StreamStep},
    backend::ExpertLoad,
    cuda::{
        Admission, BatchLimits, CudaBackend, CudaError, CudaFrame, CudaStep, DeviceBatch,
        DeviceClock, DeviceKv, Drafts, Event, Extension, Finished, GemmShape, KnownDrafts,
        SampleOutcome, StepInput, StreamDelays, row_steps,
    },
    sampling::{Pooling, STOP_TOKENS_MAX},
};
use model::{FeedForward, ModelConfig, ModelError, Transformer};

pub use self::kernel_support::check_model;
pub use self::kv_size::{KvRoom, KvShare, kv_blocks};
pub use self::loaded_model::{CudaModel, LoadTimes};
pub use self::rank::{CudaRank, join};
use self::{
    adapters::CudaAdapters,
    graphs::{CaptureTarget, Graphs},
};
use self::{
    rows::{DeviceRows, RowSamples},
    shadow::CudaShadow,
};
use super::{
    CollectWaker, Executor, ExecutorError, ExecutorLimits, ModelMismatch, POLL_MAX, Speculation,
    WeightUpdate, batch::ScheduledRow, poll, worker::Worker,
};
use crate::{
    adapter_slots::AdapterSlots,
    plan::{Dispatch, RowFailure, RowMask, RowResult, Span, StepId, StepPlan, StepResult, StepRun},
};

/// Error of starting a CUDA executor.
#[derive(Debug, thiserror::Error)]
pub enum CudaExecutorError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Misfit(#[from] ModelMismatch),
    #[error(
        "cannot hold the KV of a sequence of {tokens} tokens: it takes {wanted} bytes, and the GPU's memory has {left} \
         bytes left for KV ({free} are free); expected a larger node.gpu_memory_percent, a smaller node.gpu_reserve, \
         node.sequence_tokens_max, node.slots or node.step_tokens, a smaller model, or fewer other processes on the GPU"
    )]
    KvTooSmall { left: u64, free: u64, tokens: u32, wanted: u64 },
    #[error("cannot start the thread that waits for the GPU: {0}")]
    Spawn(#[from] io::Error),
    /// The ranks of a group could not connect at the start.
    #[error("cannot connect the ranks: {0}")]
    Connect(String),
}

/// Deadline of a launch that waits for the steps in flight. The engine thread is blocked until
/// then, and a node whose GPU hangs must end.
const LAUNCH_WAIT_MAX: Duration = Duration::from_secs(60);

/// Deadline of the copy of the prepared weights, which takes milliseconds.
const COMMIT_MAX: Duration = Duration::from_secs(10);

pub struct CudaExecutor {
    limits: ExecutorLimits,
    kv_groups: KvGroups,
    model: Transformer<CudaBackend>,
    backend: CudaBackend,
    batch: DeviceBatch,
    graphs: Graphs,
    access: StreamAccess,
    rows: DeviceRows,
    launched: VecDeque<LaunchedStep>,
    /// Results that `launch` has collected, until `collect` returns them.
    collected: VecDeque<StepResult>,
    /// Step launched last, while it awaits its token bitmasks.
    awaiting: Option<AwaitingSampling>,
    masks_are_due: bool,
    /// Events recorded after the forward passes of steps that await bitmasks, one for each step in
    /// flight.
    forwarded: Vec<Event>,
    /// Waits for the GPU. Closed before the other fields are dropped.
    worker: Worker<GpuJob, GpuResult, CudaError>,
    /// Whether `collect` polls instead of sleeping.
    polls: bool,
    /// `None`: the weights cannot change.
    shadow: Option<Arc<CudaShadow>>,
    adapters: Arc<CudaAdapters>,
}

/// Host state of a step in flight.
struct LaunchedStep {
    step_id: u64,
    scheduled: Vec<ScheduledRow>,
    /// The samples of each row.
    samples: Vec<RowSamples>,
    /// The results of the plan's rows without their tokens.
    results: Vec<RowResult>,
    blocks: StreamStep,
    dispatch: Dispatch,
}

/// A step between its forward pass and its sampling.
struct AwaitingSampling {
    step_id: StepId,
    prepared: CudaStep,
    outputs: SampleOutputs,
}

/// Values that a step returns beside its tokens.
struct SampleOutputs {
    /// Whether each sample has log-probabilities.
    wants_logprobs: Vec<bool>,
    /// Samples with pooled values.
    pooled: Vec<(u32, Pooling)>,
}

/// Work of the GPU that the worker waits for.
enum GpuJob {
    Forward(StepId, Event),
    Frame(CudaFrame),
}

enum GpuResult {
    Forward(StepId, Event),
    Frame(Finished),
}

impl CudaExecutor {
    /// Allocates the batch, runs a forward pass of every kind once, captures CUDA graphs of decode
    /// steps, and starts the thread. KV is computed into `kv`; transfers use the same memory
    /// through `arena`.
    ///
    /// # Errors
    /// When arena and limits do not fit the model, or the GPU's memory is too small.
    pub fn start(
        loaded: CudaModel,
        kv: Arc<DeviceKv>,
        arena: &Arc<KvArena>,
        limits: ExecutorLimits,
    ) -> Result<Self, CudaExecutorError> {
        let CudaModel { mut model, mut backend, shadow, .. } = loaded;
        let speculation = limits.speculation;
        let speculation = speculation.map(|rules| Speculation { uniform: true, ..rules });
        let limits = ExecutorLimits { speculation, ..limits };
        let format = backend.options().kv;
        let kv_groups = model.config().kv_groups(format);
        check(model.config(), model.shard(), (&kv, format), arena, limits)?;
        let sizes = batch_limits(&limits, model.config());
        let mut batch = DeviceBatch::new(&backend, kv, kv_groups.clone(), sizes)?;
        let mut clock = DeviceClock::start(backend.context(), backend.compute())?;
        let parts = CaptureTarget {
            model: &mut model,
            backend: &mut backend,
            batch: &mut batch,
            clock: &mut clock,
        };
        let graphs = Graphs::capture(parts, &limits)?;
        let adapters = Arc::new(CudaAdapters {
            table: model.adapters().clone(),
            writer: backend.low_rank_writer()?,
            config: model.config().clone(),
            shard: model.shard(),
        });
        let context = Arc::clone(backend.context());
        let mut bound = None;
        let wait = move |job: GpuJob| {
            bound.get_or_insert_with(|| context.bind()).clone()?;
            Ok(match job {
                GpuJob::Forward(step_id, event) => {
                    event.synchronize()?;
                    GpuResult::Forward(step_id, event)
                }
                GpuJob::Frame(frame) => GpuResult::Frame(frame.finish(&mut clock)?),
            })
        };
        // A step has a second job if it awaits bitmasks.
        let worker = Worker::start("baton-engine-gpu", 2 * limits.depth, wait)?;
        let events = (0..limits.depth).map(|_| Event::new(backend.context()));
        let forwarded = events.collect::<Result<_, _>>()?;
        Ok(Self {
            limits,
            model,
            backend,
            batch,
            graphs,
            access: StreamAccess::new(arena, kv_groups.clone()),
            rows: DeviceRows::new(limits, kv_groups.clone()),
            kv_groups,
            launched: VecDeque::new(),
            collected: VecDeque::new(),
            awaiting: None,
            masks_are_due: false,
            forwarded,
            worker,
            polls: true,
            shadow,
            adapters,
        })
    }

    /// Sets whether `collect` polls for a result (the default) or sleeps. A core that slept during
    /// a step finds its caches cold, and the host work between steps takes twice as long.
    pub fn set_polling(&mut self, polls: bool) {
        self.polls = polls;
    }

    /// Returns how many calls have made the host wait for the GPU.
    pub fn waits(&self) -> u64 {
        self.backend.context().waits()
    }

    /// Inserts delays between the work of the streams. For tests.
    pub fn delay_streams(&mut self, delays: StreamDelays) {
        self.batch.delay_streams(delays);
    }

    fn launch_step(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let step_id = plan.step_id;
        let library = Arc::clone(self.backend.library());
        let range = |name| library.range(name, step_id);
        let planning = range(c"plan");
        let bad = |reason: String| ExecutorError::BadPlan { step_id, reason };
        let verified = self.graphs.verified_tokens(plan);
        if verified == 0 && !self.graphs.replays(plan) && self.rows.has_unknown() {
            self.collect_launched()?;
        }
        let step = self.rows.apply(plan, verified)?;
        let blocks = self.access.acquire(self.rows.blocks(&step), &plan.copies);
        let blocks = blocks.map_err(|error| bad(error.to_string()))?;
        let (rows_min, dispatch) = match step.pooled.is_empty() {
            true => self.graphs.dispatch(&step.sequences, verified),
            // After a replay it is unknown whether a norm of the hidden states is still deferred.
            false => (0, Dispatch::Eager),
        };
        let input = StepInput {
            step_id,
            admissions: &step
                .admitted
                .iter()
                .map(|&index| admission(&plan.admitted[index]))
                .collect::<Vec<_>>(),
            extensions: &step
                .extended
                .iter()
                .map(|&(index, first)| {
                    let (slot, blocks) = &plan.extended[index];
                    Extension { slot: slot.0, first, blocks }
                })
                .collect::<Vec<_>>(),
            sequences: &step.sequences,
            rows_min,
            drafts: self.limits.speculation.filter(|_| verified > 0).map(|speculation| Drafts {
                rows: verified,
                ngram_min: speculation.ngram_min,
                ngram_max: speculation.ngram_max,
            }),
            known_drafts: &step
                .drafts
                .iter()
                .filter_map(|&(slot, length)| {
                    let (_, tokens) = plan.drafts.iter().find(|(other, _)| *other == slot)?;
                    Some(KnownDrafts { slot: slot.0, length, tokens })
                })
                .collect::<Vec<_>>(),
            has_adapters: step.has_adapters,
        };
        let outputs = SampleOutputs { wants_logprobs: step.wants_logprobs, pooled: step.pooled };
        let results = step.scheduled.iter().map(|row| self.rows.unsampled(row)).collect();
        let scheduled = step.scheduled;
        self.launched.push_back(LaunchedStep {
            step_id,
            scheduled,
            samples: step.samples,
            results,
            blocks,
            dispatch,
        });
        let job = (|| {
            let backend = &mut self.backend;
            backend.context().bind()?;
            let mut prepared = self.batch.begin(backend, &input)?;
            self.batch.copy_blocks(backend, &plan.copies)?;
            drop(planning);
            let _launching = range(c"launch");
            if prepared.rows() > 0 {
                match self.graphs.of(dispatch, verified, input.has_adapters) {
                    Some(graph) => graph.launch(backend.compute())?,
                    None => _ = self.model.forward(backend, &mut prepared),
                }
                backend.check()?;
            }
            if plan.awaits_masks {
                let event = self.forwarded.pop().expect("there is an event per step in flight");
                event.record(backend.compute())?;
                self.batch.await_masks(backend)?;
                self.awaiting = Some(AwaitingSampling { step_id, prepared, outputs });
                return Ok(GpuJob::Forward(step_id, event));
            }
            self.sample(&prepared, step_id, outputs).map(GpuJob::Frame)
        })();
        self.worker.send(job.map_err(|error: CudaError| ExecutorError::from(error))?)
    }

    fn sample(
        &mut self,
        step: &CudaStep,
        step_id: StepId,
        SampleOutputs { wants_logprobs, pooled }: SampleOutputs,
    ) -> Result<CudaFrame, CudaError> {
        let backend = &self.backend;
        if step.samples() > 0 && step.rows() > 0 {
            self.batch.sample(backend, self.model.logits(), step)?;
        }
        if !pooled.is_empty() {
            let values = (self.model.hidden(), self.model.logits());
            self.batch.pool(backend, values, &pooled)?;
        }
        self.batch.end(backend, step_id, wants_logprobs)
    }

    /// Blocks until every step in flight is collected. A step with prefill rows needs this:
    /// FlashInfer plans its attention on the host with the exact length of every row, and the host
    /// knows these lengths only after it has collected the steps with draft tokens. Decode
    /// attention reads the lengths from the device.
    fn collect_launched(&mut self) -> Result<(), ExecutorError> {
        let deadline = Instant::now() + LAUNCH_WAIT_MAX;
        while !self.launched.is_empty() {
            if Instant::now() >= deadline {
                let reason = format!("a step has not finished within {LAUNCH_WAIT_MAX:?}");
                return Err(ExecutorError::Stopped { reason });
            }
            if let Some(result) = self.receive(POLL_MAX)? {
                self.collected.push_back(result);
            }
        }
        Ok(())
    }

    /// Waits for the worker's next message. Returns a result if the message is a finished step.
    fn receive(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        match self.worker.receive(timeout)? {
            Some(GpuResult::Frame(finished)) => self.result(finished).map(Some),
            Some(GpuResult::Forward(step_id, event)) => {
                self.forwarded.push(event);
                let awaiting = self.awaiting.as_ref();
                self.masks_are_due |= awaiting.is_some_and(|awaiting| awaiting.step_id == step_id);
                Ok(None)
            }
            None => Ok(None),
        }
    }

    fn result(&mut self, finished: Finished) -> Result<StepResult, ExecutorError> {
        let collected_at = Some(Instant::now());
        // An all-reduce may have timed out.
        self.backend.check()?;
        let busy = finished.busy();
        let launched = self.launched.pop_front().expect("a result belongs to a launched step");
        let _collecting = self.backend.library().range(c"collect", launched.step_id);
        let run = StepRun {
            dispatch: launched.dispatch,
            uploaded_bytes: finished.uploaded_bytes,
            experts: ExpertLoad::default(),
            device: Some(Span { begin: finished.began_at, end: finished.ended_at }),
            results_at: Some(finished.downloaded_at),
            collected_at,
        };
        self.batch.recycle(finished.output);
        let mut outcomes = finished.outcomes.into_iter();
        let mut rows = launched.results;
        let scheduled = launched.scheduled.iter().zip(&launched.samples);
        for (row, (scheduled, samples)) in rows.iter_mut().zip(scheduled) {
            let scored: Vec<_> = outcomes.by_ref().take(samples.scored).collect();
            let outcomes: Vec<_> = outcomes.by_ref().take(samples.sampled).collect();
            if !scheduled.is_late {
                sampled(row, outcomes);
            }
            add_prompt_logprobs(row, scored);
            self.rows.collect(scheduled, row);
        }
        // Releases the blocks before the result reports that their KV is written.
        let rows_in_flight = &self.rows;
        self.access
            .release(launched.blocks, |slot, generation| rows_in_flight.computed(slot, generation));
        Ok(StepResult { step_id: launched.step_id, rows, busy, run })
    }
}

impl CudaExecutor {
    /// Waits for the work enqueued so far.
    fn wait_for_compute(&self) -> Result<(), ExecutorError> {
        let done = Event::new(self.backend.context())?;
        done.record(self.backend.compute())?;
        let deadline = Instant::now() + COMMIT_MAX;
        while !done.is_done()? {
            if Instant::now() >= deadline {
                let reason = "the GPU did not finish before a change of weights".to_owned();
                return Err(ExecutorError::Stopped { reason });
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Executor for CudaExecutor {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        if self.launched.len() == self.limits.depth as usize {
            let reason = format!("{} steps are in flight already", self.launched.len());
            return Err(ExecutorError::BadPlan { step_id: plan.step_id, reason });
        }
        self.launch_step(&plan)
    }

    fn supply(&mut self, step_id: StepId, masks: Vec<RowMask>) -> Result<(), ExecutorError> {
        let bad = |reason: String| ExecutorError::BadPlan { step_id, reason };
        let awaiting = self.awaiting.take().filter(|awaiting| awaiting.step_id == step_id);
        let awaiting = awaiting.ok_or_else(|| bad("the step awaits no bitmasks".to_owned()))?;
        self.masks_are_due = false;
        let launched =
            self.launched.back_mut().expect("the step that awaits bitmasks is in flight");
        let masks = self.rows.supply(&mut launched.scheduled, masks, &launched.samples);
        let masks = masks.map_err(bad)?;
        let _supplying = self.backend.library().range(c"supply", step_id);
        self.backend.context().bind()?;
        let AwaitingSampling { prepared, outputs, .. } = awaiting;
        self.batch.supply(&self.backend, &prepared, &masks)?;
        let frame = self.sample(&prepared, step_id, outputs)?;
        self.worker.send(GpuJob::Frame(frame))
    }

    fn masks_are_due(&self) -> bool {
        self.masks_are_due
    }

    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        if let Some(result) = self.collected.pop_front() {
            return Ok(Some(result));
        }
        let deadline = Instant::now().checked_add(timeout);
        if self.polls && !self.launched.is_empty() {
            poll(Instant::now(), timeout, || self.worker.is_ready());
        }
        let left = deadline.map_or(timeout, |at| at.saturating_duration_since(Instant::now()));
        self.receive(left)
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

    fn adapter_slots(&self) -> Option<Arc<dyn AdapterSlots>> {
        Some(self.adapters.clone())
    }

    fn weight_update(&self) -> Option<Arc<dyn WeightUpdate>> {
        self.shadow.clone().map(|shadow| shadow as Arc<dyn WeightUpdate>)
    }

    fn release_weights(&mut self) -> Result<(), ExecutorError> {
        assert!(self.launched.is_empty(), "weights change between steps");
        self.backend.context().bind()?;
        // A kernel of the last step may still read the weights.
        self.wait_for_compute()
    }

    fn commit_weights(&mut self) -> Result<(), ExecutorError> {
        assert!(self.launched.is_empty(), "weights change between steps");
        self.backend.context().bind()?;
        let is_prepared = match &self.shadow {
            Some(shadow) => shadow.commit(&self.backend)?,
            None => false,
        };
        if !is_prepared {
            return Err(ExecutorError::Stopped { reason: "no weights are prepared".to_owned() });
        }
        // Wait: the caller reports the pause, and the shadow may be overwritten after this call.
        self.wait_for_compute()
    }
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        if let (Some(group), false) = (self.backend.group(), self.launched.is_empty()) {
            // The other ranks may have ended.
            let _ = group.stop();
        }
        self.worker.close();
    }
}

impl From<CudaError> for ExecutorError {
    fn from(error: CudaError) -> Self {
        Self::Stopped { reason: error.to_string() }
    }
}

fn admission(row: &crate::plan::AdmittedRow) -> Admission<'_> {
    Admission {
        slot: row.slot.0,
        tokens: &row.tokens,
        prompt_len: row.prompt_len,
        position: row.computed,
        blocks: &row.blocks,
        sampling: &row.sampling,
        adapter: row.adapter,
    }
}

/// Adds the log-probabilities of prompt tokens to a row's result.
fn add_prompt_logprobs(result: &mut RowResult, outcomes: Vec<SampleOutcome>) {
    for outcome in outcomes {
        match outcome {
            SampleOutcome::Token(token) => {
                // Only prompt tokens have a rank.
                let logprobs = token.logprobs.filter(|logprobs| logprobs.rank.is_some());
                result.prompt_logprobs.extend(logprobs);
            }
            failed => result.failure = result.failure.take().or_else(|| failure(failed)),
        }
    }
}

/// Returns the reason why a sample has no token; `None` for draft tokens that are not accepted.
fn failure(outcome: SampleOutcome) -> Option<RowFailure> {
    match outcome {
        SampleOutcome::BadLogit { token, value } => {
            Some(RowFailure::Logits { reason: format!("invalid logit of token {token}: {value}") })
        }
        SampleOutcome::NoCandidate => {
            Some(RowFailure::Sampling { reason: "every token is masked".to_owned() })
        }
        SampleOutcome::Token(_) | SampleOutcome::Rejected | SampleOutcome::NotDrafted => None,
    }
}

/// Adds the outcomes of a row's samples to its result. The samples after the first verify draft
/// tokens.
fn sampled(result: &mut RowResult, outcomes: Vec<SampleOutcome>) {
    for (index, outcome) in outcomes.into_iter().enumerate() {
        result.drafted += u32::from(index > 0 && outcome != SampleOutcome::NotDrafted);
        match outcome {
            SampleOutcome::Token(token) => result.tokens.push(token),
            failed => result.failure = failure(failed).or(result.failure.take()),
        }
    }
}

/// Returns the limits of the device's batch. Steps in flight may add tokens to the longest
/// sequence.
fn batch_limits(limits: &ExecutorLimits, config: &ModelConfig) -> BatchLimits {
    BatchLimits {
        slots: limits.slots,
        sequence_tokens: limits.sequence_tokens + limits.depth + 1,
        rows: limits.step_tokens,
        samples: limits.samples_max(),
        stops: STOP_TOKENS_MAX as u32,
        vocabulary: limits.vocabulary,
        hidden: config.hidden_size as u32,
        depth: limits.depth,
    }
}

/// Returns every GEMM shape of a forward pass for each distinct number of rows: decode steps first,
/// then the largest prefill chunks, because tuning time is bounded.
fn gemm_shapes(
    config: &ModelConfig,
    shard: Shard,
    (dtype, is_fp8): (Dtype, bool),
    limits: &ExecutorLimits,
) -> Vec<GemmShape> {
    let heads = config.head_shape_of(shard);
    let ffn_size = config.ffn_size_of(shard);
    let tokens = shard.tokens(config.vocab_size).len();
    let mut layer =
        vec![(config.hidden_size, heads.qkv_width()), (heads.query_width(), config.hidden_size)];
    if config.layers.iter().any(|it| it.attention().is_some_and(|it| it.has_output_gate)) {
        layer.push((config.hidden_size, heads.query_width()));
    }
    // The rates of linear attention have few outputs and are not quantized, so they are not tuned.
    if let Some(state) = config.state_shape().map(|state| state.part(shard.rank_count())) {
        let projection = (config.hidden_size, state.projected_width());
        layer.extend([projection, (state.value_width(), config.hidden_size)]);
    }
    // Experts have kernels of their own. The shared expert runs on the GEMMs of dense layers.
    let shared = config.experts().and_then(|experts| experts.shared);
    if let Some(size) = shared.map(|shared| shard.part(shared.size).len()) {
        layer.extend([(config.hidden_size, 2 * size), (size, config.hidden_size)]);
    }
    if config.layers.iter().any(|layer| matches!(layer.feed_forward, FeedForward::Gated(_))) {
        layer.extend([(config.hidden_size, 2 * ffn_size), (ffn_size, config.hidden_size)]);
    }
    let (mut decode, mut prefill) = (Vec::new(), Vec::new());
    for rows in row_steps(limits.step_tokens as usize) {
        let shapes = if rows <= limits.slots as usize { &mut decode } else { &mut prefill };
        shapes.extend(layer.iter().map(|&(inputs, outputs)| (rows, inputs, outputs, dtype)));
    }
    for rows in row_steps(limits.samples_max() as usize) {
        decode.push((rows, config.hidden_size, tokens, Dtype::F32));
    }
    decode.extend(prefill.into_iter().rev());
    // The head, with f32 outputs, is not quantized.
    let packed = |(rows, inputs, outputs, to)| {
        let shape = GemmShape::packed(rows, inputs, outputs, dtype, to);
        if is_fp8 && to == dtype { shape.with_fp8() } else { shape }
    };
    decode.into_iter().map(packed).collect()
}

fn check(
    config: &ModelConfig,
    shard: Shard,
    (kv, format): (&DeviceKv, KvFormat),
    arena: &KvArena,
    limits: ExecutorLimits,
) -> Result<(), CudaExecutorError> {
    let whole = config.kv_layout_of(format, shard);
    let (found, wanted) = (kv.layout(), config.kv_groups(format).block_layout(whole));
    if found != wanted || arena.layout() != found {
        return Err(ModelMismatch::Layout { found, wanted }.into());
    }
    for blocks in [kv.block_count(), arena.block_count()] {
        limits.check(config, blocks)?;
    }
    Ok(())
}
