//! The seam between deciding and computing.

use std::time::Duration;

use crate::plan::{StepPlan, StepResult};

/// Runs steps in order. Implementations: `cpu` (threads of this process) and `sim` (virtual time).
pub trait Executor: Send {
    /// Starts a step and returns at once. The caller keeps at most `depth` steps in flight.
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError>;

    /// The oldest step's result; `None` when it is not there within `timeout`.
    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError>;

    fn limits(&self) -> ExecutorLimits;
}

/// What the scheduler must stay within.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
}

#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The executor's thread is gone; nothing more will come.
    #[error("the executor stopped: {reason}")]
    Stopped { reason: String },
    /// A plan contradicts what the executor holds. A defect, never a request's fault.
    #[error("step {step_id} does not fit the executor's state: {reason}")]
    BadPlan { step_id: u64, reason: String },
}
