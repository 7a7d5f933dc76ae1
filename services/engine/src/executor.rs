//! Interface between scheduler and device.

mod batch;
mod chunks;
pub mod counting;
pub mod cpu;
pub mod cuda;
pub mod ngram;
pub mod sim;
mod step_times;
mod worker;

use std::{
    any::Any,
    fmt, hint,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, bounded};
use kernels::{KvGroups, KvLayout, cpu::CpuGroupError, cuda::ChunkSource};
use model::{Checkpoint, ModelConfig, ModelError};
use serde::{Deserialize, Serialize};

pub use self::{
    chunks::{
        ChunkReceiver, DeclaredError, DeclaredTensor, ReceivedWeights, TensorDigest, TensorPiece,
    },
    step_times::StepTimes,
};
use crate::{
    adapter_slots::AdapterSlots,
    plan::{RowMask, StepId, StepPlan, StepResult},
};

/// Maximum time to poll for a result. A longer step is not a decode step, and sleeping adds little
/// to its time.
pub const POLL_MAX: Duration = Duration::from_millis(100);

/// Spins until `is_ready` returns true, for at most `timeout` and [`POLL_MAX`] after `began`.
pub fn poll(began: Instant, timeout: Duration, is_ready: impl Fn() -> bool) {
    let until = began + timeout.min(POLL_MAX);
    while !is_ready() && Instant::now() < until {
        hint::spin_loop();
    }
}

/// Device that runs steps in order. Implementations: `cpu` (threads of this process), `cuda` (a
/// GPU), and in virtual time `sim` (checks tokens and KV) and `counting` (counts tokens).
pub trait Executor: Send {
    /// Starts a step and returns at once. The caller keeps at most `depth` steps in flight.
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError>;

    /// Supplies the token bitmasks of the step launched last, in the order of its rows and of the
    /// lengths of each row. Called once for every plan with `awaits_masks`, before the next launch.
    /// A constrained row without a bitmask does not sample; its next plan starts with its last
    /// token again. A row verifies draft tokens up to and including the first draft token that has
    /// no bitmask after it.
    fn supply(&mut self, step_id: StepId, masks: Vec<RowMask>) -> Result<(), ExecutorError>;

    /// Returns whether the step launched last waits for [`supply`](Self::supply) only: the device
    /// has finished its forward pass.
    fn masks_are_due(&self) -> bool;

    /// Waits for the result of the oldest step. Returns `None` after `timeout`, when a
    /// [`CollectWaker`] ended the wait, or when token bitmasks are due.
    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError>;

    fn limits(&self) -> ExecutorLimits;

    /// Returns the KV groups of the block tables.
    fn kv_groups(&self) -> KvGroups {
        KvGroups::default()
    }

    /// Returns the time on the clock of the steps.
    fn now(&self) -> Instant {
        Instant::now()
    }

    /// Returns a waker that ends a blocked `collect` from another thread. It has no effect where
    /// `collect` never blocks.
    fn waker(&self) -> CollectWaker {
        CollectWaker::default()
    }

    /// Returns the slots of LoRA adapters. `None`: the executor has no adapters, or cannot change
    /// them.
    fn adapter_slots(&self) -> Option<Arc<dyn AdapterSlots>> {
        None
    }

    /// Returns the interface that prepares new weights while steps run. `None`: the weights cannot
    /// change.
    fn weight_update(&self) -> Option<Arc<dyn WeightUpdate>> {
        None
    }

    /// Releases the weights in use, so that new weights can overwrite them. Called while no step is
    /// in flight. No step is launched before [`commit_weights`](Self::commit_weights).
    fn release_weights(&mut self) -> Result<(), ExecutorError> {
        Err(ExecutorError::Stopped { reason: "the weights cannot change in place".to_owned() })
    }

    /// Swaps the weights in use and the prepared weights. Called while no step is in flight. Fails
    /// without prepared weights.
    fn commit_weights(&mut self) -> Result<(), ExecutorError> {
        Err(ExecutorError::Stopped { reason: "the weights cannot change".to_owned() })
    }

    /// Checks that the executor can run a step. Called while no step is in flight, so that a dead
    /// device is detected before the next request.
    fn check(&mut self) -> Result<(), ExecutorError> {
        Ok(())
    }
}

impl<E: Executor + ?Sized> Executor for Box<E> {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        (**self).launch(plan)
    }

    fn supply(&mut self, step_id: StepId, masks: Vec<RowMask>) -> Result<(), ExecutorError> {
        (**self).supply(step_id, masks)
    }

    fn masks_are_due(&self) -> bool {
        (**self).masks_are_due()
    }

    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        (**self).collect(timeout)
    }

    fn limits(&self) -> ExecutorLimits {
        (**self).limits()
    }

    fn kv_groups(&self) -> KvGroups {
        (**self).kv_groups()
    }

    fn now(&self) -> Instant {
        (**self).now()
    }

    fn waker(&self) -> CollectWaker {
        (**self).waker()
    }

    fn adapter_slots(&self) -> Option<Arc<dyn AdapterSlots>> {
        (**self).adapter_slots()
    }

    fn weight_update(&self) -> Option<Arc<dyn WeightUpdate>> {
        (**self).weight_update()
    }

    fn release_weights(&mut self) -> Result<(), ExecutorError> {
        (**self).release_weights()
    }

    fn commit_weights(&mut self) -> Result<(), ExecutorError> {
        (**self).commit_weights()
    }

    fn check(&mut self) -> Result<(), ExecutorError> {
        (**self).check()
    }
}

/// Prepares new weights. Called from one thread at a time.
pub trait WeightUpdate: Send + Sync {
    /// Returns whether new weights overwrite the weights in use, after
    /// [`Executor::release_weights`]. Otherwise the executor runs steps meanwhile.
    fn is_in_place(&self) -> bool;

    /// Packs the weights of the opened model at `path`, and blocks until they are complete. On a
    /// GPU, the model must have the [`Checkpoint::int4_layout`] of the weights in use.
    /// [`Executor::commit_weights`] then uses them.
    fn prepare(&self, path: &Path, checkpoint: &Checkpoint) -> Result<(), PrepareError>;

    /// Begins to copy weights out of chunk buffers on a GPU. Checks the tensors, and maps the
    /// buffers or joins the trainer's communicator, but writes nothing before the first
    /// [`ChunkReceiver::scatter`]. After a successful update the executor keeps the communicator,
    /// and a later update with the same communicator id reuses it. [`Executor::commit_weights`]
    /// uses the weights after [`ChunkReceiver::finish`].
    fn receive(
        &self,
        _tensors: &[DeclaredTensor],
        _source: ChunkSource<'_>,
    ) -> Result<Box<dyn ChunkReceiver + '_>, PrepareError> {
        let found = "the node computes on a CPU";
        Err(PrepareError::Unsupported { found, expected: "a node on a GPU" })
    }

    /// Ends the communicator that [`receive`](Self::receive) has kept for another update of the
    /// same trainer.
    fn leave_trainer(&self) {}

    /// Frees the weights that are not in use.
    fn discard(&self);
}

/// Reason why weights could not be prepared. A second copy leaves the weights in use unchanged.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Declared(#[from] DeclaredError),
    #[error("cannot receive weights from a trainer's GPU: {found}; expected {expected}")]
    Unsupported { found: &'static str, expected: &'static str },
    #[error("cannot prepare the weights: {0}")]
    Device(String),
    /// The first rank that failed.
    #[error("{rank}: {reason}")]
    Rank { rank: String, reason: String },
}

/// Limits of an executor, which the scheduler observes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutorLimits {
    /// Rows of the running batch.
    pub slots: u32,
    /// Tokens in one forward pass.
    pub step_tokens: u32,
    /// Longest sequence, prompt and output.
    pub sequence_tokens: u32,
    /// Blocks of the arena.
    pub blocks: u32,
    /// Steps that may be in flight.
    pub depth: u32,
    /// Number of token ids.
    pub vocabulary: u32,
    /// `None`: a step samples at most one token per row.
    pub speculation: Option<Speculation>,
}

/// Arena or limits do not match the model.
#[derive(Debug, thiserror::Error)]
pub enum ModelMismatch {
    #[error("the arena's blocks are {found}, the model's KV is {wanted}")]
    Layout { found: KvLayout, wanted: KvLayout },
    #[error("limits.{field} is {value}; model and arena allow {min} to {max}")]
    Limit { field: &'static str, value: u32, min: usize, max: usize },
}

impl ExecutorLimits {
    /// Checks the limits against the model and the arena's number of blocks.
    fn check(&self, config: &ModelConfig, block_count: u32) -> Result<(), ModelMismatch> {
        let (blocks, vocabulary) = (block_count as usize, config.vocab_size);
        for (field, value, min, max) in [
            ("blocks", self.blocks, blocks, blocks),
            ("vocabulary", self.vocabulary, vocabulary, vocabulary),
            ("sequence_tokens", self.sequence_tokens, 0, config.context_tokens),
        ] {
            if !(min..=max).contains(&(value as usize)) {
                return Err(ModelMismatch::Limit { field, value, min, max });
            }
        }
        Ok(())
    }
}

/// Limits of speculative decoding. A row's forward pass then also verifies draft tokens. A draft
/// token is accepted if it equals the token sampled in its place, so the output does not depend on
/// drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Speculation {
    /// Upper bound on the draft tokens of one row in one step.
    pub row_drafts: u32,
    /// Upper bound on the tokens of a step with draft tokens. Small steps are bound by memory
    /// bandwidth, so more tokens cost little; large steps are bound by arithmetic.
    pub step_tokens: u32,
    /// Shortest n-gram that must have occurred before.
    pub ngram_min: u32,
    /// Longest n-gram that is compared to find the best occurrence.
    pub ngram_max: u32,
    /// Whether all rows of a step with draft tokens have the same number of tokens, because such a
    /// step replays a CUDA graph. The executor sets it.
    pub uniform: bool,
}

impl ExecutorLimits {
    /// Returns the maximum number of samples of a step.
    pub(crate) fn samples_max(&self) -> u32 {
        let verified = self.speculation.map_or(0, |speculation| speculation.step_tokens);
        self.slots.max(verified).min(self.step_tokens)
    }

    /// Returns how many draft tokens each row of a decode step of `rows` rows may verify, at most
    /// `wanted`.
    pub(crate) fn row_drafts(&self, rows: u32, wanted: u32) -> u32 {
        match self.speculation {
            Some(speculation) if speculation.uniform => {
                self.verified_tokens(rows, wanted).saturating_sub(1).min(wanted)
            }
            Some(_) => wanted,
            None => 0,
        }
    }

    /// Returns the tokens per row of a uniform step of `rows` rows that verifies up to `wanted`
    /// draft tokens per row. Returns 0 if no uniform step fits.
    fn verified_tokens(&self, rows: u32, wanted: u32) -> u32 {
        let sizes = self.verified_sizes();
        let Some(&(padded, _)) = sizes.iter().find(|size| size.0 >= rows) else { return 0 };
        let tokens = sizes.iter().filter(|size| size.0 == padded).map(|(_, tokens)| *tokens);
        let (enough, fewer): (Vec<_>, Vec<_>) = tokens.partition(|tokens| *tokens > wanted);
        enough.into_iter().min().or(fewer.into_iter().max()).unwrap_or(0)
    }

    /// Returns the numbers of rows and tokens per row of uniform steps, ascending: powers of two,
    /// and one token more than a power of two.
    fn verified_sizes(&self) -> Vec<(u32, u32)> {
        let Some(speculation) = self.speculation else { return Vec::new() };
        let tokens_max = speculation.step_tokens.min(self.step_tokens);
        // Powers of two below `most`, then `most`.
        let powers = |most: u32| {
            let last = most.next_power_of_two().trailing_zeros();
            (0..=last).map(move |power| (1 << power).min(most))
        };
        let rows_of = |rows| powers(speculation.row_drafts).map(move |drafts| (rows, 1 + drafts));
        let mut sizes: Vec<_> = powers(self.slots).flat_map(rows_of).collect();
        sizes.retain(|(rows, tokens)| rows * tokens <= tokens_max);
        sizes
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The executor's thread ended; no result follows.
    #[error("the executor stopped: {reason}")]
    Stopped { reason: String },
    /// A plan contradicts the executor's state: a bug of the scheduler, not of a request.
    #[error("step {step_id} does not fit the executor's state: {reason}")]
    BadPlan { step_id: u64, reason: String },
    /// A rank of the tensor-parallel group ended, timed out, or runs another step. The step has no
    /// result, and no step follows.
    #[error("step {step_id} ended: {source}")]
    Group { step_id: u64, source: CpuGroupError },
}

/// Handle that makes the current or the next `collect` return early. A thread that queues work for
/// the engine thread wakes it, so that a new request does not wait for the running step.
#[derive(Clone, Default)]
pub struct CollectWaker {
    wake: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl CollectWaker {
    /// Creates a waker and the channel that `collect` listens on.
    pub fn new() -> (Self, Receiver<()>) {
        // Holds at most one wake-up.
        let (wake, woken) = bounded(1);
        let wake = move || {
            // Full: a wake-up is pending already. Closed: the executor was dropped.
            let _ = wake.try_send(());
        };
        (Self::by(wake), woken)
    }

    /// Creates a waker that calls `wake`.
    pub fn by(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self { wake: Some(Arc::new(wake)) }
    }

    pub fn wake(&self) {
        if let Some(wake) = &self.wake {
            wake();
        }
    }
}

impl fmt::Debug for CollectWaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CollectWaker").field("wakes", &self.wake.is_some()).finish()
    }
}

/// Returns the message of a panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "it panicked".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_has_no_more_samples_than_tokens() {
        let samples_max = |step_tokens| {
            let (ngram_min, ngram_max) = (2, 4);
            let rules =
                Speculation { row_drafts: 8, step_tokens, ngram_min, ngram_max, uniform: false };
            let limits = ExecutorLimits {
                slots: 16,
                step_tokens: 64,
                sequence_tokens: 256,
                blocks: 40,
                depth: 1,
                vocabulary: 100,
                speculation: (step_tokens > 0).then_some(rules),
            };
            limits.samples_max()
        };
        assert_eq!([0, 8, 32, 64, 65, 65_536].map(samples_max), [16, 16, 32, 64, 64, 64]);
    }
}
