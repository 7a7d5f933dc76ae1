//! One request of a client, and what its answer must be.

use std::time::{Duration, Instant};

use engine::{event::FinishReason, executor::sim::next_token};
use proto::v1;
use router::request_core::{EmittedTokens, GiveUp, Recovery, RecoveryPolicy};

use crate::{
    attempt::Attempt,
    scenario::{RequestPlan, VOCABULARY},
};

/// As the router's configuration has them.
const POLICY: RecoveryPolicy = RecoveryPolicy {
    attempts_max: 4,
    busy_timeout: Duration::from_secs(30),
    idle_timeout: Duration::from_secs(60),
};

pub struct Request {
    pub id: u64,
    pub plan: RequestPlan,
    pub deadline: Instant,
    /// What the client was shown: the only truth.
    pub emitted: EmittedTokens,
    pub recovery: Recovery,
    pub state: State,
    /// What the prompt alone determines.
    answer: Vec<u32>,
    reason: FinishReason,
    /// Tokens that the client has seen.
    shown: u32,
    /// A stop string is complete.
    is_stopped: bool,
}

#[derive(Debug)]
pub enum State {
    Waiting {
        until: Instant,
        for_node: bool,
    },
    /// `complete_by`: every token is shown, and the node's last event is awaited. `token_0_by`: the
    /// transfer failed, and only token 0 is awaited.
    Trying {
        attempt: Attempt,
        complete_by: Option<Instant>,
        token_0_by: Option<Instant>,
    },
    Ended(End),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    Complete,
    /// The client went away.
    ClientLeft,
    Deadline,
    GaveUp(GiveUp),
}

impl Request {
    pub fn new(now: Instant, plan: RequestPlan, id: u64) -> Self {
        let (answer, reason) = answer(&plan);
        Self {
            id,
            deadline: now + plan.timeout,
            emitted: EmittedTokens::new(plan.max_tokens, VOCABULARY),
            plan,
            recovery: Recovery::new(POLICY),
            state: State::Waiting { until: now, for_node: false },
            answer,
            reason,
            shown: 0,
            is_stopped: false,
        }
    }

    pub fn has_ended(&self) -> bool {
        matches!(self.state, State::Ended(_))
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Waiting { until, .. } => Some(self.deadline.min(*until)),
            State::Trying { complete_by, token_0_by, .. } => {
                [Some(self.deadline), *complete_by, *token_0_by].into_iter().flatten().min()
            }
            State::Ended(_) => None,
        }
    }

    /// The client sees tokens `first_index..`; true when that completes a stop string.
    pub fn show(&mut self, first_index: u32, tokens: &[v1::Token]) -> bool {
        assert!(!tokens.is_empty() && first_index == self.shown, "shown twice, or a gap");
        for (index, token) in (first_index as usize..).zip(tokens) {
            assert_eq!(Some(&token.id), self.answer.get(index), "request {} at {index}", self.id);
            self.shown += 1;
            self.is_stopped |= self.plan.stops_at == Some(self.shown);
        }
        self.is_stopped
    }

    /// Every token of the answer is shown, whatever the nodes may still say.
    pub fn is_complete(&self) -> bool {
        self.is_stopped || self.emitted.ids().len() == self.answer.len()
    }

    /// The answer is complete, and for the right reason where a node has said so.
    pub fn check_complete(&self, reason: Option<FinishReason>) {
        assert!(self.is_complete(), "request {} is cut at {}", self.id, self.shown);
        if let (Some(reason), false) = (reason, self.is_stopped) {
            assert_eq!(reason, self.reason, "request {}", self.id);
        }
    }

    /// What was shown is the beginning of the answer: the whole of it, if the request says so.
    pub fn check_ended(&self) {
        let State::Ended(end) = &self.state else {
            panic!("request {} never ended: {:?}", self.id, self.state)
        };
        assert_eq!(self.emitted.ids(), &self.answer[..self.shown as usize]);
        if *end == End::Complete {
            self.check_complete(None);
        }
    }
}

/// One token at a time, with nothing else going on.
fn answer(plan: &RequestPlan) -> (Vec<u32>, FinishReason) {
    let (mut tokens, mut answer) = (plan.prompt.clone(), Vec::new());
    loop {
        let token = next_token(&tokens, plan.prompt.len(), &plan.sampling, None, VOCABULARY);
        let token = token.expect("some token is not masked");
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
