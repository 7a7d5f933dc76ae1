//! Grammar-constrained decoding, as the scheduler sees it.
//!
//! The token bitmask of a position depends on the token before it. The scheduler therefore plans a row
//! with a [`Constraint`] only after it has collected the row's last token: the row skips a frame, and
//! the other rows of the batch do not. The caller that creates a constraint compiles the grammar and
//! computes the first bitmask. Later bitmasks are computed when a result is collected, while the next
//! step runs.
//!
//! A constraint fails closed: the scheduler ends a sequence whose constraint fails, and an executor
//! refuses to sample a constrained row without the bitmask of its position.

use std::{fmt::Debug, sync::Arc};

use kernels::sampling::TokenMask;

/// Matcher of one answer. The scheduler calls it between steps, so a call may take some tens of
/// microseconds.
pub trait Matcher: Debug + Send {
    /// Consumes the sampled token.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintFailure>;

    /// Computes the bitmask of the next token. It includes the stop tokens if the answer may end here.
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
    /// The grammar does not allow the sampled token: a bug.
    #[error("{reason}")]
    Broken { reason: String },
}

/// The matcher of one sequence with the bitmask of its next token.
#[derive(Debug)]
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

    /// Consumes the sampled token and returns whether it completes the answer. The bitmask is stale until
    /// [`renew`](Self::renew).
    pub fn accept(&mut self, token: u32) -> Result<bool, ConstraintFailure> {
        self.matcher.accept(token)?;
        Ok(self.matcher.is_complete())
    }

    /// Computes the bitmask of the next token.
    pub fn renew(&mut self) -> Result<(), ConstraintFailure> {
        self.allowed = Arc::new(self.matcher.allowed()?);
        Ok(())
    }
}

/// Compares the bitmask of the next token only: matchers cannot be compared.
impl PartialEq for Constraint {
    fn eq(&self, other: &Self) -> bool {
        self.allowed == other.allowed
    }
}

impl Clone for Constraint {
    fn clone(&self) -> Self {
        Self { matcher: self.matcher.boxed_clone(), allowed: self.allowed.clone() }
    }
}
