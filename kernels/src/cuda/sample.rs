//! Choosing tokens on the device, by the rules of [`crate::sampling`].
//!
//! In a group every rank has the logits of its own tokens. All ranks choose, and choose alike.

use super::{
    backend::CudaBackend,
    batch::BatchLimits,
    buffer::{CudaBuffer, row_stride},
    context::{HostToDevice, Stream},
    error::CudaError,
    ffi::{self, SampleResult, TokenLogprob},
    memory::{DeviceMemory, Range},
    step::CudaStep,
};
use crate::{
    backend::Backend,
    layout::Dtype,
    sampling::{SampledToken, Sampling, TokenLogprobs},
};

/// What one sampled row brought.
#[derive(Clone, Debug, PartialEq)]
pub enum SampleOutcome {
    Token(SampledToken),
    /// The logit of this token is no finite number.
    BadLogit {
        token: u32,
        value: f32,
    },
    /// Every token is masked.
    NoCandidate,
}

/// What sampling reads and writes of a batch.
#[derive(Debug)]
pub(super) struct Sampler {
    vocabulary: usize,
    masks: Range,
    results: Range,
    top: Range,
    scratch: Range,
    /// Of ranks: logits of all tokens.
    whole: Option<Range>,
    rows_gathered: u64,
}

/// Of the mask of one row.
pub(super) fn mask_words(limits: &BatchLimits) -> usize {
    limits.vocabulary.div_ceil(32) as usize
}

impl Sampler {
    pub fn new(
        memory: &DeviceMemory,
        backend: &CudaBackend,
        limits: &BatchLimits,
    ) -> Result<Self, CudaError> {
        let (samples, vocabulary) = (limits.samples as usize, limits.vocabulary as usize);
        // SAFETY: a function of two numbers.
        let scratch_bytes = unsafe {
            (backend.library().functions().baton_sample_scratch_bytes)(
                limits.samples as i32,
                limits.vocabulary as i32,
            )
        } as usize;
        let whole_bytes = samples * row_stride(vocabulary, Dtype::F32) * size_of::<f32>();
        Ok(Self {
            vocabulary,
            masks: memory.cut(4 * samples * mask_words(limits))?,
            results: memory.cut(samples * size_of::<SampleResult>())?,
            top: memory.cut(samples * ffi::TOP_LOGPROBS_MAX * size_of::<TokenLogprob>())?,
            scratch: memory.cut(scratch_bytes)?,
            whole: backend.group().map(|_| memory.cut(whole_bytes)).transpose()?,
            rows_gathered: 0,
        })
    }

    /// As the kernels want it before the first call.
    pub fn clear(&self, stream: &Stream<HostToDevice>) -> Result<(), CudaError> {
        self.scratch.fill(0, stream)
    }

    pub fn masks(&self) -> &Range {
        &self.masks
    }

    /// One for every sample.
    pub fn results(&self) -> &Range {
        &self.results
    }

    /// Log-probabilities, so many places for every sample.
    pub fn top(&self) -> &Range {
        &self.top
    }

    pub fn rows_gathered(&self) -> u64 {
        self.rows_gathered
    }

    pub fn sample(
        &mut self,
        backend: &CudaBackend,
        logits: &CudaBuffer,
        step: &CudaStep,
        has_masks: bool,
    ) -> Result<(), CudaError> {
        let tokens = backend.shard().tokens(self.vocabulary);
        assert_eq!(logits.width, tokens.len(), "a logit for every token of the rank's");
        let own = logits.data.part(0, logits.bytes(step.samples()));
        let (address, stride) = match backend.group() {
            None => (own, logits.stride),
            Some(_) => self.gather(backend, logits, step.samples())?,
        };
        let args = ffi::SampleArgs {
            logits: address,
            logit_stride: stride as i64,
            masks: if has_masks { self.masks.address() } else { 0 },
            results: self.results.address(),
            top: self.top.address(),
            scratch: self.scratch.address(),
            scratch_bytes: self.scratch.bytes() as u64,
            vocabulary: self.vocabulary as i32,
            samples: step.samples() as i32,
            needs: step.needs(),
            reserved: 0,
        };
        // SAFETY: every range was made for the limits that the step is within.
        let code = unsafe {
            (backend.library().functions().baton_sample)(
                step.pool(),
                step.arrays(),
                &args,
                backend.compute().raw().cast(),
            )
        };
        backend.library().check("baton_sample", code)
    }

    /// Whole rows of all ranks' logits: where they are, and from one to the next.
    fn gather(
        &mut self,
        backend: &CudaBackend,
        logits: &CudaBuffer,
        rows: usize,
    ) -> Result<(ffi::Address, usize), CudaError> {
        let (group, whole) = (backend.group(), self.whole.as_ref());
        let (group, whole) = group.zip(whole).expect("a batch is made by a rank of the group");
        let stride = row_stride(self.vocabulary, Dtype::F32);
        let shards = backend.shard().all();
        let columns: Vec<_> = shards.map(|shard| shard.tokens(self.vocabulary)).collect();
        let from = (&logits.data, logits.stride);
        group.gather(&columns, from, (whole, stride), rows, backend.compute())?;
        self.rows_gathered += rows as u64;
        Ok((whole.part(0, rows * stride * size_of::<f32>()), stride))
    }
}

/// What the rules of one sequence want of sampling's kernels beside the choice of the best.
pub(super) fn needs(sampling: &Sampling) -> i32 {
    let Sampling { temperature, top_k, top_p, logprobs, .. } = sampling;
    let has_penalty = sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0;
    [
        (*temperature > 0.0, ffi::SAMPLE_DRAW),
        (*temperature > 0.0 && (*top_k > 0 || *top_p < 1.0), ffi::SAMPLE_CUT),
        (logprobs.is_some(), ffi::SAMPLE_LOGPROBS),
        (has_penalty, ffi::SAMPLE_PENALTIES),
    ]
    .iter()
    .fold(0, |all, (is_wanted, bit)| if *is_wanted { all | bit } else { all })
}

/// Of a sample that has come down.
pub(super) fn outcome(
    result: &SampleResult,
    top: &[TokenLogprob],
    wants_logprobs: bool,
) -> SampleOutcome {
    match result.status {
        0 => {
            let count = usize::try_from(result.top_count).unwrap_or(0);
            let top = top.iter().take(count).map(|top| (top.token as u32, top.logprob));
            let logprobs = TokenLogprobs { chosen: result.logprob, top: top.collect() };
            let logprobs = wants_logprobs.then_some(logprobs);
            SampleOutcome::Token(SampledToken { id: result.token as u32, logprobs })
        }
        2 => SampleOutcome::NoCandidate,
        _ => SampleOutcome::BadLogit { token: result.token as u32, value: result.logprob },
    }
}
