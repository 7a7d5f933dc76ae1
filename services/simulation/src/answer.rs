//! The answer that a request must get, and the tokens that its client has received.

use std::time::Instant;

use engine::{
    constraint::Constraint,
    event::{NewSequence, SequenceId, SequenceKind},
    executor::sim::next_token,
};
use proto::v1;
use router_core::StopCause;

use crate::{
    grammars,
    scenario::{RequestPlan, VOCABULARY},
};

/// The client's side of one request.
pub(crate) struct Client {
    /// Tokens that the prompt, the sampling parameters and the grammar determine, and what ends
    /// them; `None` if tokens are not checked.
    answer: Option<(Vec<u32>, AnswerEnd)>,
    received: usize,
    /// The number of tokens after which a stop string is complete.
    stops_at: Option<usize>,
    stop: Option<StopCause>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnswerEnd {
    StopToken,
    /// The grammar allows no further token.
    Grammar,
    Length,
}

impl Client {
    pub(crate) fn new(plan: &RequestPlan, is_checked: bool) -> Self {
        let answer = is_checked.then(|| expected_answer(plan));
        let stops_at = plan.stops_at.map(|count| count as usize);
        Self { answer, received: 0, stops_at, stop: None }
    }

    /// Receives tokens `first_index..`. Returns the stop condition that they complete.
    pub(crate) fn receive(&mut self, first_index: u32, tokens: &[v1::Token]) -> Option<StopCause> {
        assert!(!tokens.is_empty(), "an event without tokens");
        assert_eq!(first_index as usize, self.received, "a token is duplicated or lost");
        let Some((answer, end)) = &self.answer else {
            self.received += tokens.len();
            return None;
        };
        for token in tokens {
            let expected = answer.get(self.received);
            assert_eq!(Some(&token.id), expected, "wrong token at index {}", self.received);
            self.received += 1;
            let is_last = self.received == answer.len();
            if self.stops_at == Some(self.received) {
                self.stop = Some(StopCause::Text);
            } else if is_last && *end == AnswerEnd::StopToken {
                self.stop.get_or_insert(StopCause::Token);
            }
        }
        self.stop
    }

    /// Checks that a complete answer has all its tokens and the right finish reason.
    pub(crate) fn check_complete(&self, reason: v1::FinishReason) {
        let Some((answer, end)) = &self.answer else { return };
        if self.stop == Some(StopCause::Text) {
            return assert_eq!(reason, v1::FinishReason::Stop);
        }
        if reason == v1::FinishReason::Abort {
            // An update of the weights ended the answer.
            return;
        }
        assert_eq!(self.received, answer.len(), "the answer is truncated");
        let expected = match end {
            AnswerEnd::StopToken | AnswerEnd::Grammar => v1::FinishReason::Stop,
            AnswerEnd::Length => v1::FinishReason::Length,
        };
        assert_eq!(reason, expected);
    }
}

/// Computes the answer one token at a time.
fn expected_answer(plan: &RequestPlan) -> (Vec<u32>, AnswerEnd) {
    let mut sequence = plan.sequence();
    if let Some(grammar) = &plan.grammar {
        grammars::constrain(&mut sequence, grammar).expect("the grammar is valid");
    }
    let NewSequence { mut tokens, prompt_len, constraint, .. } = sequence;
    let mut matcher = constraint.map(Constraint::into_matcher);
    let prompt_len = prompt_len as usize;
    let end = loop {
        let allowed =
            matcher.as_mut().map(|matcher| matcher.allowed().expect("the grammar continues"));
        let token = next_token(&tokens, prompt_len, &plan.sampling, allowed.as_ref(), VOCABULARY);
        let token = token.expect("a token is allowed");
        tokens.push(token);
        if !plan.ignore_stop_tokens && plan.sampling.stop_token_ids.contains(&token) {
            break AnswerEnd::StopToken;
        }
        if let Some(matcher) = &mut matcher {
            matcher.accept(token).expect("the token is allowed");
            if matcher.is_complete() {
                break AnswerEnd::Grammar;
            }
        }
        if tokens.len() == prompt_len + plan.max_tokens as usize {
            break AnswerEnd::Length;
        }
    };
    (tokens.split_off(prompt_len), end)
}

impl RequestPlan {
    fn sequence(&self) -> NewSequence {
        NewSequence {
            id: SequenceId(1),
            kind: SequenceKind::Compute,
            tokens: self.prompt.clone(),
            prompt_len: self.prompt.len() as u32,
            sampling: self.sampling.clone(),
            max_tokens: self.max_tokens,
            ignore_stop_tokens: self.ignore_stop_tokens,
            cache_salt: String::new(),
            adapter: None,
            session: Default::default(),
            constraint: None,
            deadline: Instant::now(),
        }
    }
}
