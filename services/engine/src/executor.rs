//! The seam between deciding and computing.

pub mod batch;
pub mod cpu;
pub mod cuda;
pub mod ngram;
pub mod sim;

use std::{
    any::Any,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, bounded};
use kernels::cpu::GroupError;
use serde::{Deserialize, Serialize};

use crate::plan::{StepPlan, StepResult};

/// Runs steps in order. Implementations: `cpu` (threads of this process), `cuda` (a GPU) and
/// `sim` (virtual time).
pub trait Executor: Send {
    /// Starts a step and returns at once. The caller keeps at most `depth` steps in flight.
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError>;

    /// The oldest step's result; `None` when it is not there within `timeout`, or when a
    /// [`CollectWaker`] ended the wait.
    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError>;

    fn limits(&self) -> ExecutorLimits;

    /// The clock that its steps run by.
    fn now(&self) -> Instant {
        Instant::now()
    }

    /// Ends a blocked `collect` from another thread. Without effect where `collect` never blocks.
    fn waker(&self) -> CollectWaker {
        CollectWaker::default()
    }

    /// Whether it could run a step, asked while none is in flight. A device that is gone would
    /// otherwise be missed by the next request only.
    fn check(&mut self) -> Result<(), ExecutorError> {
        Ok(())
    }
}

impl<E: Executor + ?Sized> Executor for Box<E> {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        (**self).launch(plan)
    }

    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        (**self).collect(timeout)
    }

    fn limits(&self) -> ExecutorLimits {
        (**self).limits()
    }

    fn now(&self) -> Instant {
        (**self).now()
    }

    fn waker(&self) -> CollectWaker {
        (**self).waker()
    }

    fn check(&mut self) -> Result<(), ExecutorError> {
        (**self).check()
    }
}

/// What the scheduler must stay within.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutorLimits {
    /// Rows of the running batch.
    pub slots: u32,
    /// Tokens in one forward.
    pub step_tokens: u32,
    /// Longest sequence, prompt and output.
    pub sequence_tokens: u32,
    /// Blocks of the arena.
    pub blocks: u32,
    /// Steps that may be in flight.
    pub depth: u32,
    /// Token ids are below it.
    pub vocabulary: u32,
    /// `None`: a step brings at most one token a row.
    pub speculation: Option<Speculation>,
}

/// Guessing tokens ahead. A row's forward then also holds tokens that the executor believes to come
/// next (drafts), and each is kept if it is the token that would have been sampled in its place: the
/// output is the same with and without, only sooner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Speculation {
    /// Most drafts of one row in one step.
    pub row_drafts: u32,
    /// A step takes drafts up to this many tokens in all. Small steps wait for the weights to be
    /// read, and tokens more cost little; large ones wait for arithmetic.
    pub step_tokens: u32,
    /// How many of the last tokens must have occurred before, at least,
    pub ngram_min: u32,
    /// and how many are compared to find the best occurrence.
    pub ngram_max: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The executor's thread is gone; nothing more will come.
    #[error("the executor stopped: {reason}")]
    Stopped { reason: String },
    /// A plan contradicts what the executor holds. A defect, never a request's fault.
    #[error("step {step_id} does not fit the executor's state: {reason}")]
    BadPlan { step_id: u64, reason: String },
    /// A rank of the group that computes together is gone, too late, or does something else. The
    /// step brought nothing, and no other will.
    #[error("step {step_id} ended: {source}")]
    Group { step_id: u64, source: GroupError },
}

/// Makes a `collect` that waits for a result, or the next one, return early. Whoever puts work into
/// the engine thread's inbox wakes it, so that a newcomer does not wait for the running step.
#[derive(Clone, Default)]
pub struct CollectWaker {
    wake: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl CollectWaker {
    /// A waker and what `collect` listens on.
    pub fn new() -> (Self, Receiver<()>) {
        // Holds at most one wake-up.
        let (wake, woken) = bounded(1);
        let wake = move || {
            // Full: a wake-up is pending already. Closed: nobody collects any more.
            let _ = wake.try_send(());
        };
        (Self::by(wake), woken)
    }

    /// A waker that does this.
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

/// What a thread said when it panicked.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "it panicked".to_owned())
}
