//! Sampling on the device, by the rules of [`crate::sampling`].
//!
//! In a group every rank has the logits of its vocabulary shard. All ranks sample and choose the
//! same token: they exchange intermediate results between the kernels. Two cases gather the whole
//! logits instead, and those rows are counted: vocabularies too small to be sharded, and rows in
//! which too many tokens tie with the last token that top-k or top-p keeps.

use std::ops;

use super::{
    backend::CudaBackend,
    batch_memory::BatchLimits,
    buffer::{CudaBuffer, row_stride},
    context::{HostToDevice, Stream},
    error::CudaError,
    ffi::{self, SampleResult, TopToken},
    library::KernelLibrary,
    memory::{DeviceMemory, Range},
    step::CudaStep,
};
use crate::{
    backend::Backend,
    layout::Dtype,
    sampling::{LISTED_TOKENS_MAX, LOGIT_BIASES_MAX, SampledToken, Sampling, TokenLogprobs},
    shard::cuts_between_runs,
};

/// Outcome of one sampled row.
#[derive(Clone, Debug, PartialEq)]
pub enum SampleOutcome {
    Token(SampledToken),
    /// The logit of this token is not finite.
    BadLogit {
        token: u32,
        value: f32,
    },
    /// Every token is masked.
    NoCandidate,
    /// A draft token before the row was not accepted.
    Rejected,
    /// The row verifies no draft token.
    NotDrafted,
}

/// Buffers of sampling.
#[derive(Debug)]
pub(super) struct Sampler {
    vocabulary: usize,
    masks: Range,
    results: Range,
    top: Range,
    scratch: Range,
    /// Logits of the whole vocabulary, where ranks gather them.
    whole: Option<Range>,
    /// Vocabulary range of every rank.
    tokens: Vec<ops::Range<usize>>,
    rows_gathered: u64,
}

/// Returns the words of a row's token mask.
pub(super) fn mask_words(limits: &BatchLimits) -> usize {
    limits.vocabulary.div_ceil(32) as usize
}

/// Returns the words of a slot's rules: biases, bad words, and allowed tokens.
pub(super) fn rule_words(limits: &BatchLimits) -> usize {
    2 * LOGIT_BIASES_MAX + LISTED_TOKENS_MAX + mask_words(limits)
}

impl Sampler {
    pub(super) fn new(
        memory: &DeviceMemory,
        backend: &CudaBackend,
        limits: &BatchLimits,
    ) -> Result<Self, CudaError> {
        let (samples, vocabulary) = (limits.samples as usize, limits.vocabulary as usize);
        let shard = backend.shard();
        let is_gathered = !cuts_between_runs(vocabulary, shard.rank_count());
        let ranks = if is_gathered { 1 } else { shard.rank_count() };
        // SAFETY: the function only computes a number.
        let scratch_bytes = unsafe {
            (backend.library().functions().baton_group_sample_scratch_bytes)(
                ranks as i32,
                limits.samples as i32,
                limits.vocabulary as i32,
            )
        } as usize;
        let whole_bytes = samples * row_stride(vocabulary, Dtype::F32) * size_of::<f32>();
        Ok(Self {
            vocabulary,
            masks: memory.cut(4 * samples * mask_words(limits))?,
            results: memory.cut(samples * size_of::<SampleResult>())?,
            top: memory.cut(samples * ffi::TOP_LOGPROBS_MAX * size_of::<TopToken>())?,
            scratch: memory.cut(scratch_bytes)?,
            whole: is_gathered.then(|| memory.cut(whole_bytes)).transpose()?,
            tokens: shard.all().map(|shard| shard.tokens(vocabulary)).collect(),
            rows_gathered: 0,
        })
    }

    /// Clears the scratch memory before the first launch.
    pub(super) fn clear(&self, stream: &Stream<HostToDevice>) -> Result<(), CudaError> {
        self.scratch.fill(0, stream)
    }

    pub(super) fn masks(&self) -> &Range {
        &self.masks
    }

    /// Returns the range of the results, one per sample.
    pub(super) fn results(&self) -> &Range {
        &self.results
    }

    /// Returns the range of the log-probabilities, a fixed number per sample.
    pub(super) fn top(&self) -> &Range {
        &self.top
    }

    pub(super) fn rows_gathered(&self) -> u64 {
        self.rows_gathered
    }

    /// Adds gathered rows: `reported`, which the device has counted, or all `samples` if logits are
    /// always gathered.
    pub(super) fn add_gathered(&mut self, reported: u64, samples: u64) {
        self.rows_gathered += if self.whole.is_some() { samples } else { reported };
    }

    pub(super) fn sample(
        &self,
        backend: &CudaBackend,
        logits: &CudaBuffer,
        step: &CudaStep,
        has_masks: bool,
    ) -> Result<(), CudaError> {
        let tokens = &self.tokens[backend.shard().rank()];
        assert_eq!(logits.width, tokens.len(), "one logit per token of the rank's shard");
        let own = logits.data.part(0, logits.bytes(step.samples()));
        let (address, stride) = match &self.whole {
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
            verifies: (step.verified() > 0).into(),
        };
        if let (Some(group), None) = (backend.group(), &self.whole) {
            let places = (step.pool(), step.arrays());
            // SAFETY: every range was allocated for the limits that the step is within.
            return unsafe { group.sample(&self.tokens, places, &args, backend.compute()) };
        }
        // SAFETY: every range was allocated for the limits that the step is within.
        unsafe {
            launch!(
                backend.library(),
                backend.compute(),
                baton_sample(step.pool(), step.arrays(), &args)
            )
        }
    }

    /// Launches a gather of all ranks' logits. Returns the address of the rows and their stride.
    fn gather(
        &self,
        backend: &CudaBackend,
        logits: &CudaBuffer,
        rows: usize,
    ) -> Result<(ffi::Address, usize), CudaError> {
        let (group, whole) = (backend.group(), self.whole.as_ref());
        let (group, whole) = group.zip(whole).expect("the batch belongs to a rank of the group");
        let stride = row_stride(self.vocabulary, Dtype::F32);
        let from = (&logits.data, logits.stride);
        group.gather(&self.tokens, from, (whole, stride), rows, backend.compute())?;
        Ok((whole.part(0, rows * stride * size_of::<f32>()), stride))
    }
}

/// Bits of `baton_sample_needs` that a sequence needs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SampleNeeds {
    /// Bits for sampled tokens; 0: the argmax suffices.
    sampled: i32,
    /// Length of a prompt whose log-probabilities are reported; 0 without them.
    scored_len: u32,
}

impl SampleNeeds {
    pub(super) fn new(sampling: &Sampling, prompt_len: u32) -> Self {
        let scored_len = sampling.prompt_logprobs.map_or(0, |_| prompt_len);
        Self { sampled: needs(sampling), scored_len }
    }

    /// Returns the needs of a step whose first row of the sequence is at `position`.
    pub(super) fn at(&self, position: u32) -> i32 {
        let scores = position + 1 < self.scored_len;
        self.sampled | if scores { ffi::SAMPLE_LOGPROBS } else { 0 }
    }
}

fn needs(sampling: &Sampling) -> i32 {
    let Sampling { temperature, top_k, top_p, logprobs, .. } = sampling;
    let has_penalty = sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0;
    let has_rules = !sampling.logit_bias.is_empty()
        || !sampling.allowed_token_ids.is_empty()
        || !sampling.bad_words.is_empty();
    [
        (*temperature > 0.0, ffi::SAMPLE_DRAW),
        (*temperature > 0.0 && (*top_k > 0 || *top_p < 1.0), ffi::SAMPLE_CUT),
        (logprobs.is_some(), ffi::SAMPLE_LOGPROBS),
        (has_penalty, ffi::SAMPLE_PENALTIES),
        (has_rules, ffi::SAMPLE_RULES),
    ]
    .iter()
    .fold(0, |all, (is_wanted, bit)| if *is_wanted { all | bit } else { all })
}

/// Converts a downloaded sample.
pub(super) fn outcome(
    result: &SampleResult,
    top: &[TopToken],
    wants_logprobs: bool,
) -> SampleOutcome {
    match result.status {
        0 => {
            let count = usize::try_from(result.top_count).unwrap_or(0);
            let top = top.iter().take(count).map(|top| (top.token as u32, top.logprob));
            let rank = (result.detail < 0).then_some(result.detail.unsigned_abs());
            let logprobs = TokenLogprobs { chosen: result.logprob, top: top.collect(), rank };
            let logprobs = wants_logprobs.then_some(logprobs);
            SampleOutcome::Token(SampledToken { id: result.token as u32, logprobs, pooled: None })
        }
        2 => SampleOutcome::NoCandidate,
        3 => SampleOutcome::Rejected,
        4 => SampleOutcome::NotDrafted,
        _ => SampleOutcome::BadLogit { token: result.token as u32, value: result.logprob },
    }
}
