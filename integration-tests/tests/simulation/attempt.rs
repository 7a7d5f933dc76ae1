//! One attempt as the router follows it, by the rules of `services/router/src/journey/attempt.rs`.
//!
//! Nodes are our own here: what the protocol does not allow is a defect and panics.

use engine::event::FinishReason;
use kv_transfer::api::TransferId;

use crate::{
    journey::{Failed, Said},
    nodes::Assigned,
    recovery::{Cause, Failure, Side},
};

#[derive(Debug)]
pub struct Attempt {
    pub transfer: TransferId,
    pub decode_node: Assigned,
    pub prefill_node: Option<Assigned>,
    first_index: u32,
    decode: Decode,
    prefill: Prefill,
    delivered: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decode {
    Opening,
    Reserved,
    Writing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prefill {
    Reading,
    /// Token 0 is here; `Reserved` is awaited.
    Waiting(u32),
    /// Token 0 is shown.
    Sending,
    Ended,
}

/// What is to be done, in this order.
#[derive(Debug, PartialEq)]
pub enum Next {
    Show { first_index: u32, ids: Vec<u32> },
    Admitted { alone: bool },
    DropPrefill,
    Finish(FinishReason),
    Fail(Failure),
}

impl Attempt {
    pub fn new(
        transfer: TransferId,
        first_index: u32,
        decode_node: Assigned,
        prefill_node: Option<Assigned>,
    ) -> Self {
        let prefill = if prefill_node.is_some() { Prefill::Reading } else { Prefill::Ended };
        Self {
            transfer,
            decode_node,
            prefill_node,
            first_index,
            decode: Decode::Opening,
            prefill,
            delivered: false,
        }
    }

    pub fn said(&mut self, side: Side, said: Said) -> Vec<Next> {
        match (side, said) {
            (Side::Decode, Said::Failed { kind, message }) => {
                vec![Next::Fail(failure(side, kind, message))]
            }
            (Side::Decode, Said::Cut) => vec![Next::Fail(lost(side))],
            (Side::Decode, said) => self.decode_said(said),
            (Side::Prefill, Said::Failed { kind, message }) => {
                self.prefill_failed(failure(side, kind, message))
            }
            (Side::Prefill, Said::Cut) => self.prefill_failed(lost(side)),
            (Side::Prefill, said) => self.prefill_said(said),
        }
    }

    fn decode_said(&mut self, said: Said) -> Vec<Next> {
        match (said, self.decode) {
            (Said::Reserved { alone }, Decode::Opening) => {
                self.decode = Decode::Reserved;
                let mut next = vec![Next::Admitted { alone }];
                match self.prefill {
                    Prefill::Ended => {}
                    _ if alone => {
                        self.prefill = Prefill::Ended;
                        next.push(Next::DropPrefill);
                    }
                    Prefill::Waiting(token) => {
                        self.prefill = Prefill::Sending;
                        next.push(Next::Show { first_index: self.first_index, ids: vec![token] });
                    }
                    Prefill::Reading | Prefill::Sending => {}
                }
                next
            }
            (Said::Tokens { first_index, ids, finish: None }, decode)
                if decode == Decode::Writing
                    || decode == Decode::Reserved && first_index == self.first_index =>
            {
                self.decode = Decode::Writing;
                vec![Next::Show { first_index, ids }]
            }
            (Said::Finished { reason }, Decode::Writing) => vec![Next::Finish(reason)],
            (said, decode) => panic!("{}: {said:?} in {decode:?}", self.transfer),
        }
    }

    fn prefill_said(&mut self, said: Said) -> Vec<Next> {
        match (said, self.prefill) {
            (_, Prefill::Ended) => vec![],
            (Said::Tokens { first_index, ids, finish }, Prefill::Reading)
                if first_index == self.first_index && ids.len() == 1 =>
            {
                match (finish, self.decode) {
                    (Some(reason), _) => {
                        self.prefill = Prefill::Ended;
                        vec![Next::Show { first_index, ids }, Next::Finish(reason)]
                    }
                    (None, Decode::Opening) => {
                        self.prefill = Prefill::Waiting(ids[0]);
                        vec![]
                    }
                    (None, Decode::Reserved | Decode::Writing) => {
                        self.prefill = Prefill::Sending;
                        vec![Next::Show { first_index, ids }]
                    }
                }
            }
            (Said::Delivered, Prefill::Waiting(_) | Prefill::Sending) => {
                self.delivered = true;
                vec![]
            }
            (said, prefill) => panic!("{}: {said:?} in {prefill:?}", self.transfer),
        }
    }

    fn prefill_failed(&mut self, failure: Failure) -> Vec<Next> {
        if !self.expects_prefill() {
            return vec![];
        }
        if self.decode != Decode::Writing {
            return vec![Next::Fail(failure)];
        }
        self.prefill = Prefill::Ended;
        vec![]
    }

    /// Whether the prefill node's stream is still worth reading.
    pub fn expects_prefill(&self) -> bool {
        self.prefill != Prefill::Ended && !self.delivered
    }

    pub fn node(&self, side: Side) -> &Assigned {
        match (side, &self.prefill_node) {
            (Side::Prefill, Some(prefill)) => prefill,
            (Side::Prefill, None) | (Side::Decode, _) => &self.decode_node,
        }
    }
}

fn failure(side: Side, kind: Failed, message: String) -> Failure {
    Failure { side, cause: Cause::of(kind), message }
}

fn lost(side: Side) -> Failure {
    Failure { side, cause: Cause::Lost, message: "the connection ended".to_owned() }
}
