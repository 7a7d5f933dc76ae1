//! What an answer must match, as the scheduler sees it.
//!
//! Which token may come next depends on the one before it. So a row with a [`Constraint`] is planned
//! only once its last token is here: it is held back for a frame, the other rows of the batch are
//! not. Whoever makes a constraint has compiled it and computed its first mask; the others are
//! computed when a step's result is taken, while the next step runs.
//!
//! It fails closed: no mask, no token. The scheduler ends a sequence whose constraint fails, and an
//! executor refuses to sample a constrained row without the mask of just this position.

use std::{fmt::Debug, sync::Arc};

use kernels::sampling::TokenMask;

/// Follows one answer through its grammar. Called between steps, so it must be quick: tens of
/// microseconds.
pub trait Matcher: Debug + Send {
    /// Takes the token that was chosen.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintFailure>;

    /// What may be chosen next, the stop tokens where the answer may end here included.
    fn allowed(&mut self) -> Result<TokenMask, ConstraintFailure>;

    /// Nothing can follow: the answer ends without a stop token.
    fn is_complete(&self) -> bool;

    fn boxed_clone(&self) -> Box<dyn Matcher>;
}

/// Why a constrained sequence has no next token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintFailure {
    /// Following the grammar takes more than its bounds allow. It would elsewhere, too.
    #[error("{reason}")]
    TooComplex { reason: String },
    /// A token that the grammar does not allow, or a defect.
    #[error("{reason}")]
    Broken { reason: String },
}

/// The matcher of one sequence, with the mask of its next token.
#[derive(Debug)]
pub struct Constraint {
    matcher: Box<dyn Matcher>,
    allowed: Arc<TokenMask>,
}

impl Constraint {
    /// `matcher` has taken the output there is.
    pub fn new(mut matcher: Box<dyn Matcher>) -> Result<Self, ConstraintFailure> {
        let allowed = Arc::new(matcher.allowed()?);
        Ok(Self { matcher, allowed })
    }

    /// What may be chosen next.
    pub fn allowed(&self) -> &Arc<TokenMask> {
        &self.allowed
    }

    /// Takes the chosen token; true when it completes the answer. The mask is now the old one, until
    /// [`renew`](Self::renew).
    pub fn accept(&mut self, token: u32) -> Result<bool, ConstraintFailure> {
        self.matcher.accept(token)?;
        Ok(self.matcher.is_complete())
    }

    /// Computes the mask of the next token.
    pub fn renew(&mut self) -> Result<(), ConstraintFailure> {
        self.allowed = Arc::new(self.matcher.allowed()?);
        Ok(())
    }
}

/// As far as the next token goes: what follows it cannot be compared.
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
