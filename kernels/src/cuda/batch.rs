//! The running batch in GPU memory, and the transfers of each step's plan and results.
//!
//! The device keeps each slot's tokens, block table, position and sampling state; a step uploads only
//! changes. There are three streams: plan uploads, kernels, and result downloads. A stream that overwrites a
//! buffer waits on the device for the buffer's readers; the host only waits for results.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    attention::dtype_code,
    backend::CudaBackend,
    buffer::CudaBuffer,
    clock::DeviceClock,
    context::{Context, DeviceToHost, Event, HostToDevice, Role, Stream},
    error::CudaError,
    ffi::{self, SampleResult, TokenLogprob},
    kv::DeviceKv,
    library::KernelLibrary,
    memory::{DeviceMemory, InFlight, Pinned, Range},
    plan::{self, Admission, Extension, KnownDrafts, StepRows},
    sample::{self, SampleOutcome, Sampler},
    step::CudaStep,
    testing::Delays,
};
use crate::{
    layout::{BLOCK_TOKENS, KvLayout},
    sampling::TokenMask,
};

/// Capacity of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    pub slots: u32,
    /// Tokens of the longest sequence, including those that a step in flight adds.
    pub sequence_tokens: u32,
    /// Maximum token rows of one step.
    pub rows: u32,
    pub samples: u32,
    /// Maximum stop tokens of one slot.
    pub stops: u32,
    pub vocabulary: u32,
    /// Maximum number of steps in flight.
    pub depth: u32,
}

/// Words of a plan for the prompt tokens of admitted sequences, beyond the minimum.
const PLAN_WORDS: usize = 1 << 16;

/// GPU memory of the batch. The addresses in `pool`, `step` and `kv` point into the other fields' memory.
#[derive(Debug)]
pub(super) struct BatchMemory {
    pub kv: ffi::Kv,
    pub pool: ffi::Pool,
    pub step: ffi::Step,
    blocks: Arc<DeviceKv>,
    _ranges: Vec<Range>,
}

impl BatchMemory {
    pub fn kv_layout(&self) -> KvLayout {
        self.blocks.layout()
    }
}

/// Input of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    pub step_id: u64,
    pub admissions: &'a [Admission<'a>],
    pub extensions: &'a [Extension<'a>],
    pub sequences: &'a [StepRows],
    /// The device pads a decode step to this number of rows.
    pub rows_min: u32,
    /// Draft tokens that a decode step verifies.
    pub drafts: Option<Drafts>,
    /// Draft tokens from the host, for slots in which the device does not look for an earlier occurrence.
    /// Only a step with `drafts` has them.
    pub known_drafts: &'a [KnownDrafts<'a>],
}

/// Draft tokens of a step, by prompt lookup: the tokens after the longest earlier occurrence of a slot's last
/// tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drafts {
    /// Rows of every sequence: its last token, and the maximum number of draft tokens. A sequence's
    /// [`StepRows::rows`] is one more than its own maximum.
    pub rows: u32,
    pub ngram_min: u32,
    pub ngram_max: u32,
}

/// A batch on one backend's GPU.
#[derive(Debug)]
pub struct DeviceBatch {
    limits: BatchLimits,
    memory: Arc<BatchMemory>,
    serial: Arc<AtomicU64>,
    up: Stream<HostToDevice>,
    down: Stream<DeviceToHost>,
    plan_words: usize,
    inputs: VecDeque<Input>,
    sampler: Sampler,
    /// Recorded when the compute stream has written the results.
    sampled: Event,
    /// Recorded when the results were downloaded.
    downloaded: Event,
    outputs: Vec<Output>,
    /// Output buffers of the step between `begin` and `end`.
    output: Option<Output>,
    uploaded_bytes: u64,
    /// For each slot, the sampling kernels that its sequence needs.
    needs: Vec<i32>,
    /// Whether the step was supplied with token bitmasks.
    has_masks: bool,
    /// Random delays, in tests only.
    delays: Option<Delays>,
}

/// An upload buffer: pinned memory and its device copy.
#[derive(Debug)]
struct Input {
    pinned: InputState,
    device: Range,
    /// Recorded when the kernels that read `device` have run.
    consumed: Event,
}

#[derive(Debug)]
enum InputState {
    Free(Pinned<u32>, Event),
    InFlight(InFlight<u32>),
    /// An error lost the pinned memory.
    Lost,
}

/// Download buffers of one frame.
#[derive(Debug)]
pub struct Output {
    results: (Pinned<SampleResult>, Event),
    top: (Pinned<TokenLogprob>, Event),
    begin: Event,
    end: Event,
    mask_wait: MaskWait,
    launched_at: Instant,
    /// Sampled rows of the downloaded frame whose whole logits were gathered from all ranks.
    rows_gathered: u64,
    samples: u64,
}

/// Events around the time in which a step waits for its token bitmasks.
#[derive(Debug)]
struct MaskWait {
    /// Whether the step awaits bitmasks.
    awaits: bool,
    /// Recorded when the forward pass has finished.
    forwarded: Event,
    /// Recorded when the bitmasks were supplied.
    supplied: Event,
}

impl MaskWait {
    /// Returns the time that the GPU was idle.
    fn duration(&self) -> Result<Duration, CudaError> {
        match self.awaits {
            true => DeviceClock::between(&self.forwarded, &self.supplied),
            false => Ok(Duration::ZERO),
        }
    }
}

/// A launched step whose results are in flight.
#[derive(Debug)]
pub struct CudaFrame {
    step_id: u64,
    /// Whether each sample wants log-probabilities.
    wants_logprobs: Vec<bool>,
    results: InFlight<SampleResult>,
    top: Result<InFlight<TokenLogprob>, (Pinned<TokenLogprob>, Event)>,
    begin: Event,
    end: Event,
    mask_wait: MaskWait,
    launched_at: Instant,
    uploaded_bytes: u64,
}

/// Results of a frame.
#[derive(Debug)]
pub struct Finished {
    /// Outcomes of all sampled rows, in the step's order.
    pub outcomes: Vec<SampleOutcome>,
    /// Host times at which the GPU began and ended the step.
    pub began_at: Instant,
    pub ended_at: Instant,
    /// Time in this interval in which the GPU waited for token bitmasks.
    pub mask_wait: Duration,
    /// Host time at which the results were in host memory.
    pub downloaded_at: Instant,
    /// Bytes of the step's plan and masks.
    pub uploaded_bytes: u64,
    /// Buffers to pass to [`DeviceBatch::recycle`].
    pub output: Output,
}

impl Finished {
    /// Returns the time that the GPU worked on the step.
    pub fn busy(&self) -> Duration {
        self.ended_at.saturating_duration_since(self.began_at).saturating_sub(self.mask_wait)
    }
}

fn plan_words(limits: &BatchLimits) -> usize {
    plan::words_min(limits.slots as usize) + PLAN_WORDS
}

/// Returns the maximum number of words of a plan and its token masks.
fn input_words(limits: &BatchLimits) -> usize {
    plan_words(limits) + 4 + limits.samples as usize * sample::mask_words(limits)
}

/// The ranges of [`Sizes`], the device copies of the upload buffers, and the sampler.
type Ranges = (Vec<Range>, [Range; 2], Sampler);

fn lay_out(
    memory: &DeviceMemory,
    backend: &CudaBackend,
    limits: &BatchLimits,
) -> Result<Ranges, CudaError> {
    let input_words = input_words(limits);
    let ranges = Sizes::of(limits).all().into_iter().map(|bytes| memory.cut(bytes));
    Ok((
        ranges.collect::<Result<_, _>>()?,
        [memory.cut(4 * input_words)?, memory.cut(4 * input_words)?],
        Sampler::new(memory, backend, limits)?,
    ))
}

impl DeviceBatch {
    /// Allocates all memory of the batch.
    pub fn new(
        backend: &CudaBackend,
        kv: Arc<DeviceKv>,
        limits: BatchLimits,
    ) -> Result<Self, CudaError> {
        let context = backend.context();
        if limits.slots as usize > ffi::SEQUENCES_MAX
            || limits.samples as usize > ffi::SEQUENCES_MAX
        {
            return Err(CudaError::Unsupported {
                what: "the number of slots",
                value: limits.slots.max(limits.samples).to_string(),
                allowed: "up to 4,096",
            });
        }
        let sizes = Sizes::of(&limits);
        let (plan_words, input_words, samples) =
            (plan_words(&limits), input_words(&limits), limits.samples as usize);
        let memory = DeviceMemory::new(context, "the batch", Self::bytes(backend, &limits))?;
        let (ranges, devices, sampler) = lay_out(&memory, backend, &limits)?;
        let up = Stream::new(context)?;
        for range in &ranges {
            range.fill(0, &up)?;
        }
        sampler.clear(&up)?;
        up.synchronize()?;
        let mut inputs = VecDeque::new();
        for device in devices {
            inputs.push_back(Input {
                pinned: InputState::Free(
                    Pinned::zeroed(context, "a step's plan", input_words)?,
                    Event::new(context)?,
                ),
                device,
                consumed: Event::new(context)?,
            });
        }
        let outputs = (0..limits.depth.max(1)).map(|_| Output::new(context, samples));
        Ok(Self {
            limits,
            memory: Arc::new(sizes.memory(&limits, ranges, kv)),
            serial: Arc::new(AtomicU64::new(1)),
            up,
            down: Stream::new(context)?,
            plan_words,
            inputs,
            sampler,
            sampled: Event::new(context)?,
            downloaded: Event::new(context)?,
            outputs: outputs.collect::<Result<_, _>>()?,
            output: None,
            uploaded_bytes: 0,
            needs: vec![0; limits.slots as usize],
            has_masks: false,
            delays: None,
        })
    }

    /// Adds random delays between the work of the streams. For tests.
    pub fn delay_streams(&mut self, delays: Delays) {
        self.delays = Some(delays);
    }

    fn pass<R: Role>(&self, stream: &Stream<R>) -> Result<(), CudaError> {
        self.delays.as_ref().map_or(Ok(()), |delays| delays.pass(stream))
    }

    /// Returns the GPU memory in bytes that these limits need.
    pub fn bytes(backend: &CudaBackend, limits: &BatchLimits) -> usize {
        let counting = DeviceMemory::counting("the batch");
        lay_out(&counting, backend, limits).expect("counting cannot fail");
        counting.used_bytes()
    }

    pub fn limits(&self) -> &BatchLimits {
        &self.limits
    }

    /// Uploads a step's plan and prepares the step's rows on the device.
    ///
    /// # Errors
    /// When the input exceeds the limits, or after a GPU error.
    pub fn begin(
        &mut self,
        backend: &CudaBackend,
        input: &StepInput<'_>,
    ) -> Result<CudaStep, CudaError> {
        self.check(input)?;
        // `self.output` is still set after a step that failed.
        let output = self.output.take().or_else(|| self.outputs.pop());
        let mut output = output.expect("there is an output per step in flight");
        output.launched_at = Instant::now();
        output.mask_wait.awaits = false;
        self.output = Some(output);
        let step_id = input.step_id as u32;
        backend.use_dependent_launch();
        let plans = plan::encode(
            step_id,
            input.admissions,
            input.extensions,
            input.known_drafts,
            input.sequences,
            self.plan_words,
        );
        let (last, before) = plans.split_last().expect("a step has a plan");
        for words in before {
            self.upload_plan(backend, words, (0, 0, 0, 0))?;
        }
        self.has_masks = false;
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let rows_min = input.rows_min as usize;
        for admission in input.admissions {
            self.needs[admission.slot as usize] = sample::needs(admission.sampling);
        }
        let sampled = input.sequences.iter().filter(|sequence| sequence.samples > 0);
        let needs = sampled.fold(0, |all, sequence| all | self.needs[sequence.slot as usize]);
        let memory = Arc::clone(&self.memory);
        let verified = input.drafts.map_or(0, |drafts| drafts.rows as usize);
        let step = CudaStep::new(memory, serial, input.sequences, rows_min, verified, needs);
        let sizes = (step.rows(), step.sequences(), step.samples(), verified);
        self.upload_plan(backend, last, sizes)?;
        if let Some(Drafts { rows, ngram_min, ngram_max }) = input.drafts {
            let (pool, arrays) = (step.pool(), step.arrays());
            let numbers =
                (step.sequences() as i32, rows as i32, ngram_min as i32, ngram_max as i32);
            let (sequences, rows, ngram_min, ngram_max) = numbers;
            // SAFETY: the sequences are those of the prepared step, whose tokens and blocks have room for the
            // draft tokens.
            unsafe {
                launch!(
                    backend.library(),
                    backend.compute(),
                    baton_draft(pool, arrays, sequences, rows, ngram_min, ngram_max)
                )
            }?;
        }
        Ok(step)
    }

    /// Uploads a plan and applies it on the device.
    fn upload_plan(
        &mut self,
        backend: &CudaBackend,
        words: &[u32],
        (rows, sequences, samples, verified): (usize, usize, usize, usize),
    ) -> Result<(), CudaError> {
        self.upload(backend, words, &[], |batch, plan, library| {
            let compute = backend.compute();
            if let Some(output) = &batch.output {
                // The step's GPU time excludes waiting for its plan. The last of several plans counts.
                output.begin.record(compute)?;
            }
            let BatchMemory { pool, step, .. } = &*batch.memory;
            let (rows, sequences, samples) = (rows as i32, sequences as i32, samples as i32);
            let verified = verified as i32;
            // SAFETY: the plan was encoded within the limits of pool and step, and its slots and blocks were
            // checked. The plan is uploaded before the kernels run, and overwritten after them.
            unsafe {
                launch!(
                    library,
                    compute,
                    baton_step_prepare(pool, plan, step, rows, sequences, samples, verified)
                )
            }
        })
    }

    /// Marks the end of the forward pass of a step whose bitmasks are supplied later. The step's GPU time excludes
    /// the wait.
    pub fn await_masks(&mut self, backend: &CudaBackend) -> Result<(), CudaError> {
        let wait = &mut self.output.as_mut().expect("`begin` comes first").mask_wait;
        wait.awaits = true;
        wait.forwarded.record(backend.compute())
    }

    /// Supplies the bitmasks of constrained samples, before the step is sampled. `masks` has the index of
    /// each constrained sample, ascending. A sample without a bitmask is withdrawn: its slot goes back by one
    /// position or, in a step that verifies draft tokens, keeps only the samples before it.
    ///
    /// # Errors
    /// When the samples are not ascending or not of the step, or after a GPU error.
    pub fn supply(
        &mut self,
        backend: &CudaBackend,
        step: &CudaStep,
        masks: &[(u32, Option<Arc<TokenMask>>)],
    ) -> Result<(), CudaError> {
        if let Some(output) = &self.output
            && output.mask_wait.awaits
        {
            output.mask_wait.supplied.record(backend.compute())?;
        }
        if masks.is_empty() {
            return Ok(());
        }
        let is_ascending = masks.is_sorted_by(|(before, _), (after, _)| before < after);
        let last = masks.last().map_or(0, |(sample, _)| *sample as usize + 1);
        if !is_ascending || last > step.samples() {
            let (what, value) = ("the samples of token bitmasks", format!("up to {last}"));
            return Err(CudaError::Unsupported { what, value, allowed: "ascending samples" });
        }
        let (mut words, mut present) = (Vec::with_capacity(2 * masks.len()), Vec::new());
        for (sample, mask) in masks {
            words.extend([*sample, if mask.is_some() { present.len() as u32 } else { u32::MAX }]);
            present.extend(mask.as_deref());
        }
        self.has_masks = !present.is_empty();
        self.upload(backend, &words, &present, |batch, words, library| {
            let BatchMemory { pool, step, .. } = &*batch.memory;
            let count = masks.len() as i32;
            // SAFETY: the samples are those of the prepared step, and there is a mask for each row.
            unsafe {
                launch!(library, backend.compute(), baton_step_supply(pool, words, step, count))
            }
        })
    }

    /// Uploads words and masks. Then calls `launch` with their device address, to launch the kernels that read
    /// them.
    fn upload(
        &mut self,
        backend: &CudaBackend,
        words: &[u32],
        masks: &[&TokenMask],
        launch: impl FnOnce(&Self, ffi::Address, &KernelLibrary) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut input = self.inputs.pop_front().expect("every input is returned");
        let outcome = self.upload_through(&mut input, backend, words, masks, launch);
        self.inputs.push_back(input);
        self.uploaded_bytes += 4 * outcome? as u64;
        Ok(())
    }

    /// Returns the number of uploaded words.
    fn upload_through(
        &self,
        input: &mut Input,
        backend: &CudaBackend,
        words: &[u32],
        masks: &[&TokenMask],
        launch: impl FnOnce(&Self, ffi::Address, &KernelLibrary) -> Result<(), CudaError>,
    ) -> Result<usize, CudaError> {
        let (mut pinned, done) = match std::mem::replace(&mut input.pinned, InputState::Lost) {
            InputState::Free(pinned, done) => (pinned, done),
            InputState::InFlight(copy) => copy.finish()?,
            InputState::Lost => {
                backend.check()?;
                return Err(CudaError::EarlierCallFailed);
            }
        };
        pinned[..words.len()].copy_from_slice(words);
        let masks_at = words.len().next_multiple_of(4);
        let mut end = masks_at;
        for mask in masks {
            pinned[end..end + mask.words().len()].copy_from_slice(mask.words());
            end += mask.words().len();
        }
        let compute = backend.compute();
        self.up.wait(&input.consumed)?;
        self.pass(&self.up)?;
        let copy = pinned.upload(end, &input.device, 0, &self.up, done)?;
        compute.wait(copy.event())?;
        self.pass(compute)?;
        input.pinned = InputState::InFlight(copy);
        if end > masks_at {
            self.sampler.masks().copy(
                0,
                &input.device,
                masks_at * 4,
                (end - masks_at) * 4,
                compute,
            )?;
        }
        launch(self, input.device.address(), backend.library())?;
        input.consumed.record(compute)?;
        Ok(end)
    }

    /// Returns a step of padding sequences for a graph capture, with the same addresses as every other step.
    /// With `verified` above 0, each has this many rows.
    pub fn filling(&self, sequences: u32, verified: u32) -> CudaStep {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let memory = Arc::clone(&self.memory);
        CudaStep::new(memory, serial, &[], sequences as usize, verified as usize, 0)
    }

    /// Samples a token for every sampled row and appends it to its slot's tokens. A step that verifies draft
    /// tokens appends the samples up to the first that differs from the draft token in its place. In a group,
    /// `logits` covers the rank's vocabulary shard, and all ranks sample the same token.
    pub fn sample(
        &mut self,
        backend: &CudaBackend,
        logits: &CudaBuffer,
        step: &CudaStep,
    ) -> Result<(), CudaError> {
        backend.check()?;
        let compute = backend.compute();
        // The previous step's results must be downloaded before they are overwritten.
        compute.wait(&self.downloaded)?;
        self.pass(compute)?;
        self.sampler.sample(backend, logits, step, self.has_masks)?;
        if step.verified() == 0 {
            return Ok(());
        }
        let (pool, arrays, results) =
            (step.pool(), step.arrays(), self.sampler.results().address());
        let (sequences, rows) = (step.sequences() as i32, step.verified() as i32);
        // SAFETY: the results are those of the step's samples, `rows` for each sequence.
        unsafe {
            launch!(
                backend.library(),
                compute,
                baton_accept(pool, arrays, sequences, rows, results)
            )
        }
    }

    /// Samples within a graph capture, which may not wait for another stream. Before a replay, the caller
    /// makes sure that the previous results were downloaded, and that the rows need the same sampling
    /// kernels as the captured step.
    pub fn capture_sample(
        &mut self,
        backend: &CudaBackend,
        logits: &CudaBuffer,
        step: &CudaStep,
    ) -> Result<(), CudaError> {
        self.sampler.sample(backend, logits, step, true)
    }

    /// Returns the number of rows so far whose whole logits were gathered from all ranks.
    pub fn rows_gathered(&self) -> u64 {
        self.sampler.rows_gathered()
    }

    /// Downloads the results of the step's samples.
    pub fn end(
        &mut self,
        backend: &CudaBackend,
        step_id: u64,
        wants_logprobs: Vec<bool>,
    ) -> Result<CudaFrame, CudaError> {
        let compute = backend.compute();
        let output = self.output.take().expect("`begin` precedes `end`");
        output.end.record(compute)?;
        self.sampled.record(compute)?;
        self.down.wait(&self.sampled)?;
        self.pass(&self.down)?;
        let Output {
            results: (results, done),
            top: (top, top_done),
            begin,
            end,
            mask_wait,
            launched_at,
            ..
        } = output;
        let samples = wants_logprobs.len();
        let results = results.download(samples, self.sampler.results(), 0, &self.down, done)?;
        let top = if wants_logprobs.contains(&true) {
            let count = samples * ffi::TOP_LOGPROBS_MAX;
            Ok(top.download(count, self.sampler.top(), 0, &self.down, top_done)?)
        } else {
            Err((top, top_done))
        };
        self.pass(&self.down)?;
        self.downloaded.record(&self.down)?;
        let uploaded_bytes = std::mem::take(&mut self.uploaded_bytes);
        Ok(CudaFrame {
            step_id,
            wants_logprobs,
            results,
            top,
            begin,
            end,
            mask_wait,
            launched_at,
            uploaded_bytes,
        })
    }

    /// Takes back the download buffers of a finished frame.
    pub fn recycle(&mut self, output: Output) {
        self.sampler.add_gathered(output.rows_gathered, output.samples);
        self.outputs.push(output);
    }

    /// Checks the input values that the device does not check.
    fn check(&self, input: &StepInput<'_>) -> Result<(), CudaError> {
        let BatchLimits { slots, sequence_tokens, rows, samples, stops, vocabulary, .. } =
            self.limits;
        let blocks = self.memory.blocks.block_count();
        let table = (sequence_tokens as usize).div_ceil(BLOCK_TOKENS);
        let check = |is_allowed: bool, what, value: u64, allowed| match is_allowed {
            true => Ok(()),
            false => Err(CudaError::Unsupported { what, value: value.to_string(), allowed }),
        };
        let StepInput { admissions, extensions, sequences, .. } = *input;
        let all_slots = admissions.iter().map(|admission| admission.slot);
        let all_slots = all_slots
            .chain(extensions.iter().map(|extension| extension.slot))
            .chain(sequences.iter().map(|sequence| sequence.slot));
        let slot = all_slots.max().unwrap_or(0);
        check(slot < slots, "a slot of the step", slot.into(), "a slot of the batch")?;
        let tables = admissions.iter().map(|admission| (0, admission.blocks));
        let tables = tables.chain(extensions.iter().map(|e| (e.first as usize, e.blocks)));
        for (first, ids) in tables {
            let block = ids.iter().map(|block| block.0).max().unwrap_or(0);
            check(block < blocks, "a block of the step", block.into(), "a block of the arena")?;
            let (length, allowed) = (first + ids.len(), "that of the longest sequence or less");
            check(length <= table, "a block table's length", length as u64, allowed)?;
        }
        for Admission { tokens, sampling, .. } in admissions {
            let (count, allowed) = (tokens.len(), "the longest sequence's tokens or fewer");
            let is_allowed = count <= sequence_tokens as usize;
            check(is_allowed, "a sequence's tokens", count as u64, allowed)?;
            let token = tokens.iter().copied().max().unwrap_or(0);
            let (what, allowed) = ("a token of the step", "a token of the vocabulary");
            check(token < vocabulary, what, token.into(), allowed)?;
            let count = sampling.stop_token_ids.len();
            let is_allowed = sampling.min_tokens == 0 || count <= stops as usize;
            check(is_allowed, "the number of stop tokens", count as u64, "the limit or fewer")?;
        }
        for KnownDrafts { slot, length, tokens } in input.known_drafts {
            let count = length.saturating_add(tokens.len() as u32);
            let (what, allowed) = ("a draft token of the step", "a token of the vocabulary");
            let token = tokens.iter().copied().max().unwrap_or(0);
            check(token < vocabulary, what, token.into(), allowed)?;
            let row = sequences.iter().find(|sequence| sequence.slot == *slot);
            let is_allowed = input.drafts.is_some()
                && count <= sequence_tokens
                && row.is_some_and(|row| row.rows as usize == 1 + tokens.len());
            check(is_allowed, "the draft tokens of a slot", count.into(), "those of its rows")?;
        }
        let sum = |count: fn(&StepRows) -> u32| -> u64 {
            sequences.iter().map(|sequence| u64::from(count(sequence))).sum()
        };
        let (all_rows, all_samples) = (sum(|sequence| sequence.rows), sum(|s| s.samples));
        check(all_rows <= rows.into(), "the number of rows", all_rows, "the limit or fewer")?;
        let is_allowed = all_samples <= samples.into();
        check(is_allowed, "the number of samples", all_samples, "the limit or fewer")?;
        let (rows_min, what) = (input.rows_min, "the padded number of rows");
        let verified = input.drafts.map_or(0, |drafts| drafts.rows);
        let padded = rows_min.max(sequences.len() as u32).saturating_mul(verified);
        let is_allowed = rows_min <= rows.min(samples).min(slots) && padded <= rows.min(samples);
        check(is_allowed, what, rows_min.into(), "the limit or fewer")?;
        for &StepRows { position, rows, samples, .. } in sequences {
            let is_allowed = match verified {
                0 => rows_min == 0 || (rows, samples) == (1, 1),
                _ => rows <= verified && samples == rows,
            };
            let what = "the rows of a padded step's sequence";
            let allowed = "one row and its draft tokens, which sample";
            check(is_allowed, what, rows.into(), allowed)?;
            let end = u64::from(position) + u64::from(rows);
            let is_allowed = rows > 0 && samples <= rows && end <= sequence_tokens.into();
            let allowed =
                "an end within the longest sequence, at least one row and at most one sample a row";
            check(is_allowed, "a sequence's end", end, allowed)?;
        }
        Ok(())
    }
}

impl Output {
    fn new(context: &Arc<Context>, samples: usize) -> Result<Self, CudaError> {
        let top = samples * ffi::TOP_LOGPROBS_MAX;
        Ok(Self {
            results: (Pinned::zeroed(context, "a step's results", samples)?, Event::new(context)?),
            top: (
                Pinned::zeroed(context, "a step's log-probabilities", top)?,
                Event::new(context)?,
            ),
            begin: Event::timed(context)?,
            end: Event::timed(context)?,
            mask_wait: MaskWait {
                awaits: false,
                forwarded: Event::timed(context)?,
                supplied: Event::timed(context)?,
            },
            launched_at: Instant::now(),
            rows_gathered: 0,
            samples: 0,
        })
    }
}

impl CudaFrame {
    pub fn step_id(&self) -> u64 {
        self.step_id
    }

    pub fn is_done(&self) -> Result<bool, CudaError> {
        match &self.top {
            Ok(top) => top.is_done(),
            Err(_) => self.results.is_done(),
        }
    }

    /// Waits for the results.
    pub fn finish(self, clock: &mut DeviceClock) -> Result<Finished, CudaError> {
        let Self { wants_logprobs, begin, mut end, mask_wait, launched_at, .. } = self;
        // Waits for the stream's last copy first, so that the host blocks once.
        let top = match self.top {
            Ok(top) => top.finish()?,
            Err(idle) => idle,
        };
        let results = self.results.finish()?;
        let downloaded_at = Instant::now();
        let tops = top.0.chunks(ffi::TOP_LOGPROBS_MAX);
        let samples = results.0.iter().zip(tops).zip(&wants_logprobs);
        let outcomes =
            samples.map(|((result, top), wants)| sample::outcome(result, top, *wants)).collect();
        let (began_at, ended_at) = clock.span(&begin, &mut end, launched_at, downloaded_at)?;
        let samples = wants_logprobs.len() as u64;
        let gathered = results.0.iter().take(wants_logprobs.len());
        let rows_gathered = gathered.filter(|result| result.is_gathered == 1).count() as u64;
        let waited = mask_wait.duration()?;
        let output =
            Output { results, top, begin, end, mask_wait, launched_at, rows_gathered, samples };
        Ok(Finished {
            outcomes,
            began_at,
            ended_at,
            mask_wait: waited,
            downloaded_at,
            uploaded_bytes: self.uploaded_bytes,
            output,
        })
    }
}

/// Byte sizes of the arrays of pool and step, in the order of their structs.
struct Sizes {
    pool: [usize; 5],
    step: [usize; 14],
    table_width: usize,
    pages: usize,
}

impl Sizes {
    fn of(limits: &BatchLimits) -> Self {
        let (slots, rows) = (limits.slots as usize, limits.rows as usize);
        let samples = limits.samples as usize;
        let tokens = limits.sequence_tokens as usize;
        let table_width = tokens.div_ceil(BLOCK_TOKENS);
        // Sequences may share blocks, and each sequence lists all of its blocks.
        let pages = slots * table_width;
        let pool = [
            slots * size_of::<ffi::SlotState>(),
            slots * size_of::<ffi::SlotSampling>(),
            slots * tokens * 4,
            slots * table_width * 4,
            slots * limits.stops as usize * 4,
        ];
        let step = [
            rows,
            rows,
            rows,
            rows,
            slots + 1,
            slots + 1,
            pages,
            slots,
            slots,
            slots,
            samples,
            samples,
            samples,
            8,
        ]
        .map(|count| count * 4);
        Self { pool, step, table_width, pages }
    }

    fn all(&self) -> Vec<usize> {
        self.pool.iter().chain(&self.step).copied().collect()
    }

    /// Fills the structs from the ranges of [`Self::all`].
    fn memory(
        &self,
        limits: &BatchLimits,
        ranges: Vec<Range>,
        blocks: Arc<DeviceKv>,
    ) -> BatchMemory {
        let at: Vec<ffi::Address> = ranges.iter().map(Range::address).collect();
        let layout = blocks.layout();
        let kv = ffi::Kv {
            base: blocks.data().address(),
            block_elements: layout.block_elements() as i64,
            block_count: blocks.block_count() as i32 + 1,
            layer_count: layout.layer_count as i32,
            head_count: layout.kv_head_count as i32,
            head_dim: layout.head_dim as i32,
            dtype: dtype_code(layout.dtype),
            reserved: 0,
        };
        let pool = ffi::Pool {
            slots: at[0],
            sampling: at[1],
            tokens: at[2],
            block_tables: at[3],
            stop_tokens: at[4],
            slot_count: limits.slots as i32,
            token_width: limits.sequence_tokens as i32,
            table_width: self.table_width as i32,
            stop_width: limits.stops as i32,
            trash_block: blocks.block_count() as i32,
            reserved: 0,
        };
        let step = ffi::Step {
            row_tokens: at[5],
            row_positions: at[6],
            row_destinations: at[7],
            row_sequences: at[8],
            row_indptr: at[9],
            page_indptr: at[10],
            page_indices: at[11],
            last_page_tokens: at[12],
            kv_lengths: at[13],
            sequence_slots: at[14],
            sampled_rows: at[15],
            sample_slots: at[16],
            sample_masks: at[17],
            counts: at[18],
            rows_max: limits.rows as i32,
            sequences_max: limits.slots as i32,
            pages_max: self.pages as i32,
            samples_max: limits.samples as i32,
        };
        BatchMemory { kv, pool, step, blocks, _ranges: ranges }
    }
}
