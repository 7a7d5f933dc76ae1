//! Matches one output token by token.

use llguidance::api::StopReason;

use crate::{
    error::{MatchError, one_line},
    limits::{ITEM_WORK, MASK_WORK_BASE, MASK_WORK_PER_TOKEN},
};

/// The state of one output in its grammar. Do not use a matcher after an error other than a
/// mismatch.
pub struct OutputMatcher {
    inner: llguidance::Matcher,
    /// Fuel that all bitmasks have taken.
    work_done: u64,
    /// Fuel that all bitmasks may take.
    work_allowed: u64,
}

impl OutputMatcher {
    pub(crate) fn new(inner: llguidance::Matcher) -> Self {
        Self { inner, work_done: 0, work_allowed: MASK_WORK_BASE }
    }

    /// Returns the bitmask of the tokens that may come next: token `i` is bit `i % 32` of word `i /
    /// 32`. No bit is set when the output [is complete](Self::is_complete).
    pub fn allowed(&mut self) -> Result<Vec<u32>, MatchError> {
        if self.is_complete() {
            let words = self.inner.tok_env().map_err(|error| self.error(&error))?;
            return Ok(vec![0; words.tok_trie().vocab_size().div_ceil(32)]);
        }
        if self.work_done > self.work_allowed {
            let reason = "the bitmasks of the output together exceed their bound of work";
            return Err(MatchError::TooComplex { reason: reason.to_owned() });
        }
        let mask = self.inner.compute_mask().map_err(|error| self.error(&error))?;
        if let Ok(step) = self.inner.last_step_stats() {
            let work = step.lexer_cost + ITEM_WORK * step.all_items as u64;
            self.work_done += work;
        }
        Ok(Vec::from(mask))
    }

    /// Returns the bytes that the grammar forces next as tokens, as few as possible.
    pub fn forced(&self) -> Vec<u32> {
        // Finding the bytes changes the state, and with it the next bitmask.
        let mut ahead = self.inner.clone();
        let bytes = ahead.compute_ff_bytes();
        ahead.tok_env().map_or(Vec::new(), |tokens| tokens.tok_trie().greedy_tokenize(&bytes))
    }

    /// Accepts the next token.
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

    /// Returns whether the output so far matches the grammar. The output may still continue.
    pub fn may_end(&mut self) -> Result<bool, MatchError> {
        if self.is_complete() {
            return Ok(true);
        }
        self.inner.is_accepting().map_err(|error| self.error(&error))
    }

    /// Returns whether the output matches the grammar and no token can follow.
    pub fn is_complete(&self) -> bool {
        self.inner.is_stopped() && !self.inner.is_error()
    }

    fn error(&self, error: &impl ToString) -> MatchError {
        let reason = one_line(&error.to_string());
        let exceeds_bound = match self.inner.stop_reason() {
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => true,
            // llguidance reports some bounds only in the text of an error.
            _ => ["too complex", "too many", "exceeded", "limit"]
                .iter()
                .any(|words| reason.contains(words)),
        };
        match exceeds_bound {
            true => {
                MatchError::TooComplex { reason: "a bitmask exceeds its bound of work".to_owned() }
            }
            false => MatchError::Bug { reason },
        }
    }
}

impl Clone for OutputMatcher {
    /// Copies the state: both matchers continue independently. They share the lexer's cache.
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), ..*self }
    }
}

impl std::fmt::Debug for OutputMatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OutputMatcher")
            .field("is_complete", &self.is_complete())
            .finish_non_exhaustive()
    }
}
