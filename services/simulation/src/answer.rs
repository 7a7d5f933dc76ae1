//! The answer that a request must get, and the tokens that its client has received.

use engine::{event::FinishReason, executor::sim::next_token};
use proto::v1;
use router::request_core::Stop;

use crate::scenario::{RequestPlan, VOCABULARY};

/// The client's side of one request.
pub struct Client {
    /// Tokens that the prompt, the sampling parameters and the grammar determine.
    answer: Vec<u32>,
    reason: FinishReason,
    received: usize,
    /// The number of tokens after which a stop string is complete.
    stops_at: Option<usize>,
    is_stopped: bool,
}

impl Client {
    pub fn new(plan: &RequestPlan) -> Self {
        let (answer, reason) = expected_answer(plan);
        let stops_at = plan.stops_at.map(|count| count as usize);
        Self { answer, reason, received: 0, stops_at, is_stopped: false }
    }

    /// Receives tokens `first_index..`. Returns the stop condition that they complete.
    pub fn receive(&mut self, first_index: u32, tokens: &[v1::Token]) -> Option<Stop> {
        assert!(!tokens.is_empty(), "an event without tokens");
        assert_eq!(first_index as usize, self.received, "a token is duplicated or lost");
        for token in tokens {
            let expected = self.answer.get(self.received);
            assert_eq!(Some(&token.id), expected, "wrong token at index {}", self.received);
            self.received += 1;
            self.is_stopped |= self.stops_at == Some(self.received);
        }
        match self.received == self.answer.len() && self.reason == FinishReason::Stop {
            _ if self.is_stopped => Some(Stop::Text),
            true => Some(Stop::Token),
            false => None,
        }
    }

    /// Checks that a complete answer has all its tokens and the right finish reason.
    pub fn check_complete(&self, reason: v1::FinishReason) {
        if self.is_stopped {
            return assert_eq!(reason, v1::FinishReason::Stop);
        }
        assert_eq!(self.received, self.answer.len(), "the answer is truncated");
        let expected = match self.reason {
            FinishReason::Stop => v1::FinishReason::Stop,
            FinishReason::Length => v1::FinishReason::Length,
        };
        assert_eq!(reason, expected);
    }
}

/// Computes the answer one token at a time.
fn expected_answer(plan: &RequestPlan) -> (Vec<u32>, FinishReason) {
    let (mut tokens, mut answer) = (plan.prompt.clone(), Vec::new());
    loop {
        let token = next_token(&tokens, plan.prompt.len(), &plan.sampling, None, VOCABULARY);
        let token = token.expect("a token is allowed");
        tokens.push(token);
        answer.push(token);
        if !plan.ignore_stop_tokens && plan.sampling.stop_token_ids.contains(&token) {
            return (answer, FinishReason::Stop);
        }
        if answer.len() == plan.max_tokens as usize {
            return (answer, FinishReason::Length);
        }
    }
}
