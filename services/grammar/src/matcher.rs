//! One answer, followed token by token.

use llguidance::api::StopReason;

use crate::{
    error::{MatchError, one_line},
    limits::{ITEM_WORK, MASK_WORK_BESIDE, MASK_WORK_PER_TOKEN},
};

/// Where an answer stands in its grammar. After an error that is not a mismatch it is of no more use.
pub struct Matcher {
    inner: llguidance::Matcher,
    /// What all masks have taken and may take, in units of the lexer's fuel.
    work_done: u64,
    work_allowed: u64,
}

impl Matcher {
    pub(crate) fn new(inner: llguidance::Matcher) -> Self {
        Self { inner, work_done: 0, work_allowed: MASK_WORK_BESIDE }
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
        if self.work_done > self.work_allowed {
            let reason = "its masks together exceeded the work that an answer may take";
            return Err(MatchError::TooComplex { reason: reason.to_owned() });
        }
        let mask = self.inner.compute_mask().map_err(|error| self.error(&error))?;
        if let Ok(step) = self.inner.last_step_stats() {
            let work = step.lexer_cost + ITEM_WORK * step.all_items as u64;
            self.work_done += work;
        }
        Ok(Vec::from(mask))
    }

    /// Takes the next token.
    ///
    /// # Errors
    /// See [`MatchError`].
    pub fn accept(&mut self, token: u32) -> Result<(), MatchError> {
        match self.inner.try_consume_tokens(&[token]) {
            Ok(1) => {
                self.work_allowed += MASK_WORK_PER_TOKEN;
                Ok(())
            }
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
        Self { inner: self.inner.deep_clone(), ..*self }
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("is_complete", &self.is_complete()).finish_non_exhaustive()
    }
}
