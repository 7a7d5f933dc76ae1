//! Download buffers, and the results of a step.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::pooled::PooledValues;
use crate::cuda::{
    clock::DeviceClock,
    context::{Context, Event},
    error::CudaError,
    ffi::{self, SampleResult, TopToken},
    memory::{CopyInFlight, PinnedMemory},
    sample::{self, SampleOutcome},
};

/// Download buffers of one step.
#[derive(Debug)]
pub struct DownloadBuffers {
    pub(super) results: (PinnedMemory<SampleResult>, Event),
    pub(super) top: (PinnedMemory<TopToken>, Event),
    pub(super) pooled: (PinnedMemory<u8>, Event),
    pub(super) begin: Event,
    pub(super) end: Event,
    pub(super) mask_wait: MaskWait,
    pub(super) launched_at: Instant,
    /// Sampled rows of the downloaded step whose whole logits were gathered from all ranks.
    pub(super) rows_gathered: u64,
    pub(super) samples: u64,
}

/// Events around the time in which a step waits for its token bitmasks.
#[derive(Debug)]
pub(super) struct MaskWait {
    /// Whether the step awaits bitmasks.
    pub(super) awaits: bool,
    /// Recorded when the forward pass has finished.
    pub(super) forwarded: Event,
    /// Recorded when the bitmasks were supplied.
    pub(super) supplied: Event,
}

impl MaskWait {
    /// Returns the time that the GPU waited for token bitmasks.
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
    pub(super) step_id: u64,
    /// Whether each sample wants log-probabilities.
    pub(super) wants_logprobs: Vec<bool>,
    pub(super) results: CopyInFlight<SampleResult>,
    pub(super) top: Result<CopyInFlight<TopToken>, (PinnedMemory<TopToken>, Event)>,
    pub(super) pooled: Result<(CopyInFlight<u8>, PooledValues), (PinnedMemory<u8>, Event)>,
    pub(super) begin: Event,
    pub(super) end: Event,
    pub(super) mask_wait: MaskWait,
    pub(super) launched_at: Instant,
    pub(super) uploaded_bytes: u64,
}

/// Results of a step.
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
    /// Buffers to pass to [`DeviceBatch::recycle`](super::DeviceBatch::recycle).
    pub output: DownloadBuffers,
}

impl Finished {
    /// Returns the time that the GPU worked on the step.
    pub fn busy(&self) -> Duration {
        self.ended_at.saturating_duration_since(self.began_at).saturating_sub(self.mask_wait)
    }
}

impl DownloadBuffers {
    pub(super) fn new(
        context: &Arc<Context>,
        samples: usize,
        pooled_bytes: usize,
    ) -> Result<Self, CudaError> {
        let top = samples * ffi::TOP_LOGPROBS_MAX;
        Ok(Self {
            results: (
                PinnedMemory::zeroed(context, "a step's results", samples)?,
                Event::new(context)?,
            ),
            top: (
                PinnedMemory::zeroed(context, "a step's log-probabilities", top)?,
                Event::new(context)?,
            ),
            pooled: (
                PinnedMemory::zeroed(context, "a step's pooled values", pooled_bytes)?,
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
        match (&self.pooled, &self.top) {
            (Ok((pooled, _)), _) => pooled.is_done(),
            (_, Ok(top)) => top.is_done(),
            _ => self.results.is_done(),
        }
    }

    /// Waits for the results.
    pub fn finish(self, clock: &mut DeviceClock) -> Result<Finished, CudaError> {
        let Self { wants_logprobs, begin, mut end, mask_wait, launched_at, .. } = self;
        // Waits for the stream's last copy first, so that the host blocks once.
        let (pooled, values) = match self.pooled {
            Ok((copy, values)) => (copy.finish()?, values),
            Err(idle) => (idle, PooledValues::default()),
        };
        let top = match self.top {
            Ok(top) => top.finish()?,
            Err(idle) => idle,
        };
        let results = self.results.finish()?;
        let downloaded_at = Instant::now();
        let tops = top.0.chunks(ffi::TOP_LOGPROBS_MAX);
        let samples = results.0.iter().zip(tops).zip(&wants_logprobs);
        let mut outcomes: Vec<_> =
            samples.map(|((result, top), wants)| sample::outcome(result, top, *wants)).collect();
        let bytes = values.bytes();
        for (sample, values) in values.decode(&pooled.0[..bytes]) {
            if let Some(SampleOutcome::Token(token)) = outcomes.get_mut(sample as usize) {
                token.pooled = Some(values);
            }
        }
        let (began_at, ended_at) = clock.span(&begin, &mut end, launched_at, downloaded_at)?;
        let samples = wants_logprobs.len() as u64;
        let gathered = results.0.iter().take(wants_logprobs.len());
        let rows_gathered = gathered.filter(|result| result.detail == 1).count() as u64;
        let waited = mask_wait.duration()?;
        let output = DownloadBuffers {
            results,
            top,
            pooled,
            begin,
            end,
            mask_wait,
            launched_at,
            rows_gathered,
            samples,
        };
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
