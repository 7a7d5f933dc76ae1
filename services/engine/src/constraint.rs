//! Grammar-constrained decoding, as the scheduler sees it.
//!
//! The token bitmask of a position depends on the token before it, which the host reads while the next
//! forward pass runs already. So a constrained row takes part in every forward pass, and only the step's
//! sampling waits for the bitmasks:
//!
//! 1. The scheduler collects a step and gives each sampled token to its [`Constraint`].
//! 2. Worker threads run the [`MaskJob`]s of the constrained rows.
//! 3. The step loop supplies the step in flight with the bitmasks, and the device samples.
//!
//! A row whose bitmask is late does not sample in this step. It computes its last token again in a later
//! step, when its bitmask is computed, so its output is the same. Late bitmasks delay no other row: sampling
//! starts when the forward pass has finished.
//!
//! The caller that creates a constraint compiles the grammar and computes the first bitmask. A constraint
//! fails closed: the scheduler ends a sequence whose constraint fails, and an executor never samples a
//! constrained row without a bitmask.

use std::{
    fmt::Debug,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use kernels::sampling::TokenMask;

use crate::{event::SequenceId, executor::panic_message};

/// Matcher of one answer.
pub trait Matcher: Debug + Send {
    /// Consumes the sampled token. The scheduler calls it between steps, so it must take microseconds only.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintFailure>;

    /// Computes the bitmask of the next token, on a worker thread. It includes the stop tokens if the answer
    /// may end here.
    fn allowed(&mut self) -> Result<TokenMask, ConstraintFailure>;

    /// Returns whether no token can follow, so that the answer ends without a stop token.
    fn is_complete(&self) -> bool;

    fn boxed_clone(&self) -> Box<dyn Matcher>;
}

/// Why a constrained sequence has no next token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintFailure {
    /// The grammar exceeds its time or memory bound, here and on every other node.
    #[error("{reason}")]
    TooComplex { reason: String },
    /// The grammar does not allow the sampled token, or the matcher panicked: a bug.
    #[error("{reason}")]
    Broken { reason: String },
}

impl Clone for Box<dyn Matcher> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

/// Grammar of a new sequence: a matcher and the bitmask of the next token.
#[derive(Clone, Debug)]
pub struct Constraint {
    matcher: Box<dyn Matcher>,
    allowed: Arc<TokenMask>,
}

impl Constraint {
    /// Creates a constraint. `matcher` must have consumed the output so far.
    pub fn new(mut matcher: Box<dyn Matcher>) -> Result<Self, ConstraintFailure> {
        let allowed = Arc::new(matcher.allowed()?);
        Ok(Self { matcher, allowed })
    }

    /// Returns the bitmask of the next token.
    pub fn allowed(&self) -> &Arc<TokenMask> {
        &self.allowed
    }

    pub fn into_matcher(self) -> Box<dyn Matcher> {
        self.matcher
    }
}

/// Compares the bitmask of the next token only: matchers cannot be compared.
impl PartialEq for Constraint {
    fn eq(&self, other: &Self) -> bool {
        self.allowed == other.allowed
    }
}

/// Grammar of a sequence in the scheduler. Lends its matcher to a [`MaskJob`], so a copy might never get a bitmask.
#[derive(Debug)]
pub(crate) struct ActiveConstraint {
    /// `None` while a job owns the matcher.
    matcher: Option<Box<dyn Matcher>>,
    /// `None` from the acceptance of a token until the next bitmask is computed.
    allowed: Option<Arc<TokenMask>>,
    /// Number of the last job. An earlier job belongs to an earlier sequence with the same id.
    job: u64,
    /// Time that the last job took.
    job_time: Duration,
}

impl From<Constraint> for ActiveConstraint {
    fn from(new: Constraint) -> Self {
        let (matcher, allowed) = (Some(new.matcher), Some(new.allowed));
        Self { matcher, allowed, job: 0, job_time: Duration::ZERO }
    }
}

impl ActiveConstraint {
    /// Returns the bitmask of the next token, once it is computed.
    pub fn allowed(&self) -> Option<&Arc<TokenMask>> {
        self.allowed.as_ref()
    }

    /// Consumes the sampled token and returns whether it completes the answer.
    pub fn accept(&mut self, token: u32) -> Result<bool, ConstraintFailure> {
        self.allowed = None;
        let missing =
            || ConstraintFailure::Broken { reason: "a token came before its bitmask".into() };
        let matcher = self.matcher.as_mut().ok_or_else(missing)?;
        matcher.accept(token)?;
        Ok(matcher.is_complete())
    }

    /// Returns the computation of the next bitmask, numbered `job`, unless the bitmask is known or being
    /// computed.
    pub fn mask_job(&mut self, id: SequenceId, job: u64) -> Option<MaskJob> {
        if self.allowed.is_some() {
            return None;
        }
        let matcher = self.matcher.take()?;
        self.job = job;
        Some(MaskJob { id, job, matcher, expected_time: self.job_time })
    }

    /// Takes the result of a job. Ignores a job that is not the last one.
    pub fn take_mask(&mut self, computed: ComputedMask) -> Result<(), ConstraintFailure> {
        if computed.job == self.job && self.matcher.is_none() {
            self.job_time = computed.time;
            let (matcher, allowed) = computed.outcome?;
            (self.matcher, self.allowed) = (Some(matcher), Some(allowed));
        }
        Ok(())
    }
}

/// Computation of one bitmask. Owns the matcher until the bitmask is computed.
#[derive(Debug)]
pub struct MaskJob {
    id: SequenceId,
    job: u64,
    matcher: Box<dyn Matcher>,
    /// Time that the sequence's job before took; zero for the first job.
    expected_time: Duration,
}

impl MaskJob {
    #[cfg(test)]
    pub(crate) fn new(
        id: SequenceId,
        job: u64,
        matcher: Box<dyn Matcher>,
        expected_time: Duration,
    ) -> Self {
        Self { id, job, matcher, expected_time }
    }

    pub(crate) fn expected_time(&self) -> Duration {
        self.expected_time
    }

    /// Computes the bitmask. A panic of the matcher fails this sequence only.
    pub fn run(mut self) -> ComputedMask {
        let started = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.matcher.allowed()));
        let outcome = outcome.unwrap_or_else(|panic| {
            Err(ConstraintFailure::Broken { reason: panic_message(panic.as_ref()) })
        });
        let outcome = outcome.map(|allowed| (self.matcher, Arc::new(allowed)));
        ComputedMask { id: self.id, job: self.job, outcome, time: started.elapsed() }
    }
}

/// The result of a [`MaskJob`].
#[derive(Debug)]
pub struct ComputedMask {
    pub id: SequenceId,
    job: u64,
    outcome: Result<(Box<dyn Matcher>, Arc<TokenMask>), ConstraintFailure>,
    time: Duration,
}
