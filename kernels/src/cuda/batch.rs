//! The running batch in GPU memory, and the transfers of each step's plan and results.
//!
//! The device keeps each slot's tokens, block table, position and sampling state; a step uploads
//! only changes. There are three streams: plan uploads, kernels, and result downloads. A stream
//! that overwrites a buffer waits on the device for the buffer's readers. The host waits only for
//! results, and for the upload from a pinned buffer that it fills again.

mod check;
mod copies;
mod frame;
mod pooled;
mod sizes;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

pub use frame::{CudaFrame, DownloadBuffers, Finished};
use pooled::{PooledValues, pooled_bytes};
use sizes::{BatchArraySizes, input_words, lay_out, plan_words};

use super::{
    backend::CudaBackend,
    batch_memory::{BatchLimits, BatchMemory},
    buffer::CudaBuffer,
    context::{DeviceToHost, Event, HostToDevice, Stream, StreamRole},
    error::CudaError,
    ffi,
    kv::DeviceKv,
    library::KernelLibrary,
    memory::{CopyInFlight, DeviceMemory, PinnedMemory, Range},
    plan::{self, Admission, Extension, KnownDrafts, StepRows},
    sample::{SampleNeeds, Sampler},
    step::CudaStep,
    stream_delays::StreamDelays,
};
use crate::{
    layout::{KvGroups, KvLayout},
    sampling::TokenMask,
};

/// Input of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    pub step_id: u64,
    pub admissions: &'a [Admission<'a>],
    pub extensions: &'a [Extension<'a>],
    pub sequences: &'a [StepRows],
    /// Minimum rows of a decode step; the device pads the step.
    pub rows_min: u32,
    /// Draft tokens that a decode step verifies.
    pub drafts: Option<Drafts>,
    /// Draft tokens from the host, for slots in which the device does not look for an earlier
    /// occurrence. Only a step with `drafts` has them.
    pub known_drafts: &'a [KnownDrafts<'a>],
    /// Whether a sequence has an adapter.
    pub has_adapters: bool,
}

/// Draft tokens of a step, by prompt lookup: the tokens after the longest earlier occurrence of a
/// slot's last tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drafts {
    /// Rows of every sequence: its last token, and the maximum number of draft tokens of the step. A
    /// sequence's [`StepRows::rows`] is one more than the number of draft tokens allowed for this
    /// sequence.
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
    inputs: VecDeque<UploadBuffer>,
    sampler: Sampler,
    /// Recorded when the compute stream has written the results.
    sampled: Event,
    /// Recorded when the results were downloaded.
    downloaded: Event,
    outputs: Vec<DownloadBuffers>,
    /// Output buffers of the step between `begin` and `end`.
    output: Option<DownloadBuffers>,
    uploaded_bytes: u64,
    /// For each slot, the sampling kernels that its sequence needs.
    needs: Vec<SampleNeeds>,
    /// Whether the step was supplied with token bitmasks.
    has_masks: bool,
    pooled: Range,
    /// Pooled values of the step between `pool` and `end`.
    pooled_values: Option<PooledValues>,
    /// Random delays, in tests only.
    delays: Option<StreamDelays>,
}

/// An upload buffer: pinned memory and its device copy.
#[derive(Debug)]
struct UploadBuffer {
    pinned: InputState,
    device: Range,
    /// Recorded when the kernels that read `device` have run.
    consumed: Event,
}

#[derive(Debug)]
enum InputState {
    Free(PinnedMemory<u32>, Event),
    InFlight(CopyInFlight<u32>),
    /// An error lost the pinned memory.
    Lost,
}

impl DeviceBatch {
    /// Allocates all memory of the batch. `groups` are those of the model's layers.
    ///
    /// # Panics
    /// When the blocks of `kv` do not have the layers of one group.
    pub fn new(
        backend: &CudaBackend,
        kv: Arc<DeviceKv>,
        groups: KvGroups,
        limits: BatchLimits,
    ) -> Result<Self, CudaError> {
        let (context, layout) = (backend.context(), kv.layout());
        assert_eq!(groups.block_layout(layout), layout, "a block has the layers of one KV group");
        if limits.slots as usize > ffi::SEQUENCES_MAX
            || limits.samples as usize > ffi::SEQUENCES_MAX
        {
            return Err(CudaError::Unsupported {
                what: "the number of slots",
                value: limits.slots.max(limits.samples).to_string(),
                allowed: "up to 4,096",
            });
        }
        let shape = (layout, &groups);
        let sizes = BatchArraySizes::of(&limits, shape);
        let (plan_words, input_words, samples) =
            (plan_words(&limits), input_words(&limits), limits.samples as usize);
        let memory = DeviceMemory::new(context, "the batch", Self::bytes(backend, &limits, shape))?;
        let (ranges, devices, sampler, pooled) = lay_out(&memory, backend, &limits, shape)?;
        let up = Stream::new(context)?;
        for range in &ranges {
            range.fill(0, &up)?;
        }
        sampler.clear(&up)?;
        up.synchronize()?;
        let pages: Vec<i32> = (0..sizes.dequantized_pages() as i32).collect();
        ranges[BatchArraySizes::DEQUANTIZED_PAGES].write(0, &pages)?;
        let mut inputs = VecDeque::new();
        for device in devices {
            inputs.push_back(UploadBuffer {
                pinned: InputState::Free(
                    PinnedMemory::zeroed(context, "a step's plan", input_words)?,
                    Event::new(context)?,
                ),
                device,
                consumed: Event::new(context)?,
            });
        }
        let outputs = (0..limits.depth.max(1))
            .map(|_| DownloadBuffers::new(context, samples, pooled.bytes()));
        Ok(Self {
            limits,
            memory: Arc::new(sizes.memory(&limits, ranges, kv, groups)),
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
            needs: vec![SampleNeeds::default(); limits.slots as usize],
            has_masks: false,
            pooled,
            pooled_values: None,
            delays: None,
        })
    }

    /// Adds random delays between the work of the streams. For tests.
    pub fn delay_streams(&mut self, delays: StreamDelays) {
        self.delays = Some(delays);
    }

    fn pass<R: StreamRole>(&self, stream: &Stream<R>) -> Result<(), CudaError> {
        self.delays.as_ref().map_or(Ok(()), |delays| delays.pass(stream))
    }

    /// Returns the GPU memory in bytes that these limits and KV groups need.
    pub fn bytes(
        backend: &CudaBackend,
        limits: &BatchLimits,
        shape: (KvLayout, &KvGroups),
    ) -> usize {
        let counting = DeviceMemory::counting("the batch");
        lay_out(&counting, backend, limits, shape).expect("counting cannot fail");
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
            (self.plan_words, self.limits.vocabulary, self.memory.groups.state_entries()),
        );
        let (last, before) = plans.split_last().expect("a step has a plan");
        for words in before {
            self.upload_plan(backend, words, (0, 0, 0, 0))?;
        }
        self.has_masks = false;
        self.pooled_values = None;
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let rows_min = input.rows_min as usize;
        for admission in input.admissions {
            let needs = SampleNeeds::new(admission.sampling, admission.prompt_len);
            self.needs[admission.slot as usize] = needs;
        }
        let sampled = input.sequences.iter().filter(|sequence| sequence.samples > 0);
        let needs = |row: &StepRows| self.needs[row.slot as usize].at(row.position);
        let needs = sampled.fold(0, |all, row| all | needs(row));
        let memory = Arc::clone(&self.memory);
        let verified = input.drafts.map_or(0, |drafts| drafts.rows as usize);
        let extras = (needs, input.has_adapters);
        let step = CudaStep::new(memory, serial, input.sequences, rows_min, verified, extras);
        let sizes = (step.rows(), step.sequences(), step.samples(), verified);
        self.upload_plan(backend, last, sizes)?;
        if let Some(Drafts { rows, ngram_min, ngram_max }) = input.drafts {
            let (pool, arrays) = (step.pool(), step.arrays());
            let numbers =
                (step.sequences() as i32, rows as i32, ngram_min as i32, ngram_max as i32);
            let (sequences, rows, ngram_min, ngram_max) = numbers;
            // SAFETY: the sequences are those of the prepared step, whose tokens and blocks have
            // room for the draft tokens.
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
                // The step's GPU time excludes waiting for its plan. The last of several plans
                // counts.
                output.begin.record(compute)?;
            }
            let BatchMemory { pool, step, .. } = &*batch.memory;
            let (rows, sequences, samples) = (rows as i32, sequences as i32, samples as i32);
            let verified = verified as i32;
            // SAFETY: the plan was encoded within the limits of pool and step, and its slots and
            // blocks were checked. The plan is uploaded before the kernels run, and overwritten
            // after them.
            unsafe {
                launch!(
                    library,
                    compute,
                    baton_step_prepare(pool, plan, step, rows, sequences, samples, verified)
                )
            }
        })
    }

    /// Marks the end of the forward pass of a step whose bitmasks are supplied later. The step's
    /// GPU time excludes the wait for bitmasks.
    pub fn await_masks(&mut self, backend: &CudaBackend) -> Result<(), CudaError> {
        let wait = &mut self.output.as_mut().expect("`begin` comes first").mask_wait;
        wait.awaits = true;
        wait.forwarded.record(backend.compute())
    }

    /// Supplies the bitmasks of constrained samples, before the step is sampled. `masks` has the
    /// index of each constrained sample, ascending. A sample without a bitmask is withdrawn: its
    /// slot goes back by one position. In a step that verifies draft tokens, the slot keeps only
    /// the samples before the withdrawn one.
    ///
    /// # Errors
    /// When the samples are not ascending or do not belong to the step, or after a GPU error.
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

    /// Uploads words and masks. Then calls `launch` with the device address of the words, to launch
    /// the kernels that read them.
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

    /// Uploads as [`Self::upload`], through `input`. Returns the number of uploaded words.
    fn upload_through(
        &self,
        input: &mut UploadBuffer,
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

    /// Returns a step of padding sequences for a graph capture, with the same addresses as every
    /// other step. With `verified` above 0, each has this many rows. With `has_adapters`, the forward
    /// pass of the step adds the updates of adapters.
    pub fn filling(&self, sequences: u32, verified: u32, has_adapters: bool) -> CudaStep {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let memory = Arc::clone(&self.memory);
        let (sequences, verified) = (sequences as usize, verified as usize);
        CudaStep::new(memory, serial, &[], sequences, verified, (0, has_adapters))
    }

    /// Samples a token for every sampled row and appends it to its slot's tokens. A step that
    /// verifies draft tokens appends the samples up to the first that differs from the draft token
    /// in its place. In a group, `logits` covers the rank's vocabulary shard, and all ranks sample
    /// the same token.
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

    /// Samples within a graph capture, which may not wait for another stream. Before a replay, the
    /// caller makes sure that the previous results were downloaded, and that the rows need the same
    /// sampling kernels as the captured step.
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
        let DownloadBuffers {
            results: (results, done),
            top: (top, top_done),
            pooled: (pooled, pooled_done),
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
        let pooled = match self.pooled_values.take() {
            Some(values) => {
                let copy =
                    pooled.download(values.bytes(), &self.pooled, 0, &self.down, pooled_done)?;
                Ok((copy, values))
            }
            None => Err((pooled, pooled_done)),
        };
        self.pass(&self.down)?;
        self.downloaded.record(&self.down)?;
        let uploaded_bytes = std::mem::take(&mut self.uploaded_bytes);
        Ok(CudaFrame {
            step_id,
            wants_logprobs,
            results,
            top,
            pooled,
            begin,
            end,
            mask_wait,
            launched_at,
            uploaded_bytes,
        })
    }

    /// Takes back the download buffers of a finished frame.
    pub fn recycle(&mut self, output: DownloadBuffers) {
        self.sampler.add_gathered(output.rows_gathered, output.samples);
        self.outputs.push(output);
    }
}
