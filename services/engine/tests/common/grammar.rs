//! Grammar over token ids: a hash of all previous tokens decides which tokens may follow.

use engine::constraint::{Constraint, ConstraintFailure, Matcher};
use kernels::sampling::TokenMask;

use super::VOCABULARY;

#[derive(Clone, Debug)]
pub(crate) struct HashGrammar {
    pub state: u64,
    /// Tokens until the answer is complete.
    pub left: u32,
    /// The failure to raise, and the number of tokens left when it is raised.
    pub fails_at: Option<(u32, ConstraintFailure)>,
}

impl HashGrammar {
    pub(crate) fn new(seed: u64, left: u32) -> Self {
        Self { state: mix(seed), left, fails_at: None }
    }

    /// Returns a matcher that has consumed `output`.
    pub(crate) fn after(mut self, output: &[u32]) -> Self {
        for &token in output {
            self.advance(token);
        }
        self
    }

    pub(crate) fn constraint(self) -> Constraint {
        Constraint::new(Box::new(self)).expect("the first mask is there")
    }

    fn advance(&mut self, token: u32) {
        self.state = mix(self.state ^ u64::from(token));
        self.left = self.left.saturating_sub(1);
    }

    /// Returns the token that is always allowed. No test uses it as a stop token.
    fn certain(&self) -> u32 {
        5 + (self.state % 30) as u32
    }

    /// Whether no other token is allowed.
    fn forces(&self) -> bool {
        !(self.state >> 32).is_multiple_of(3)
    }

    fn allows(&self, token: u32) -> bool {
        token == self.certain()
            || (!self.forces() && mix(self.state ^ !u64::from(token)).is_multiple_of(6))
    }
}

impl Matcher for HashGrammar {
    fn accept(&mut self, token: u32) -> Result<(), ConstraintFailure> {
        assert!(self.allows(token), "token {token} was not allowed");
        self.advance(token);
        Ok(())
    }

    fn allowed(&mut self) -> Result<TokenMask, ConstraintFailure> {
        match &self.fails_at {
            Some((left, failure)) if *left == self.left => return Err(failure.clone()),
            _ => {}
        }
        let mut words = vec![0; VOCABULARY.div_ceil(32) as usize];
        for token in (0..VOCABULARY).filter(|&token| self.allows(token)) {
            words[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(TokenMask::new(words, VOCABULARY))
    }

    fn is_complete(&self) -> bool {
        self.left == 0
    }

    fn forced(&self) -> Vec<u32> {
        let mut ahead = self.clone();
        let mut tokens = Vec::new();
        while ahead.forces() && ahead.left > 0 {
            tokens.push(ahead.certain());
            ahead.advance(ahead.certain());
        }
        tokens
    }

    fn boxed_clone(&self) -> Box<dyn Matcher> {
        Box::new(self.clone())
    }
}

fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value ^ (value >> 31)
}
