//! One answer, followed token by token.

use llguidance::api::StopReason;

use crate::error::{MatchError, one_line};

/// Where an answer stands in its grammar. After an error that is not a mismatch it is of no more use.
pub struct Matcher {
    inner: llguidance::Matcher,
}

impl Matcher {
    pub(crate) fn new(inner: llguidance::Matcher) -> Self {
        Self { inner }
    }

    /// The tokens that may come next as bits, token `i` in bit `i % 32` of word `i / 32`. None is
    /// set when the answer [is complete](Self::is_complete).
    ///
    /// # Errors
    /// See [`MatchError`].
    pub fn allowed(&mut self) -> Result<Vec<u32>, MatchError> {
        if self.is_complete() {
            let words = self.inner.tok_env().map_err(|error| self.error(&error))?;
            return Ok(vec![0; words.tok_trie().vocab_size().div_ceil(32)]);
        }
        self.inner.compute_mask().map(Vec::from).map_err(|error| self.error(&error))
    }

    /// Takes the next token.
    ///
    /// # Errors
    /// See [`MatchError`].
    pub fn accept(&mut self, token: u32) -> Result<(), MatchError> {
        match self.inner.try_consume_tokens(&[token]) {
            Ok(1) => Ok(()),
            Ok(_) => Err(MatchError::Mismatch { token }),
            Err(error) => Err(self.error(&error)),
        }
    }

    /// What there is of the answer is a whole one, though it may go on.
    ///
    /// # Errors
    /// See [`MatchError`].
    pub fn may_end(&mut self) -> Result<bool, MatchError> {
        if self.is_complete() {
            return Ok(true);
        }
        self.inner.is_accepting().map_err(|error| self.error(&error))
    }

    /// The answer is whole and nothing can follow.
    pub fn is_complete(&self) -> bool {
        self.inner.is_stopped() && !self.inner.is_error()
    }

    fn error(&self, error: &impl ToString) -> MatchError {
        let reason = one_line(&error.to_string());
        match self.inner.stop_reason() {
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
                MatchError::TooComplex { reason }
            }
            // Where it gives no other reason to stop than an error.
            _ if ["too complex", "too many", "exceeded", "limit"]
                .iter()
                .any(|said| reason.contains(said)) =>
            {
                MatchError::TooComplex { reason }
            }
            _ => MatchError::Defect { reason },
        }
    }
}

impl Clone for Matcher {
    /// Shares no state with the original.
    fn clone(&self) -> Self {
        Self { inner: self.inner.deep_clone() }
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("is_complete", &self.is_complete()).finish_non_exhaustive()
    }
}
