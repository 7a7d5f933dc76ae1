//! One attempt: the router's own state machine, and the nodes it is made with.
//!
//! What nodes say is put into the words of the wire, as their gRPC face would.

use cluster::Role;
use engine::event::FinishReason;
use kv_transfer::api::TransferId;
use proto::v1::{
    self, DecodeFinished, DecodeTokens, Delivered, PrefillToken, Reserved, Token,
    decode_event::Event as DecodeEvent, prefill_event::Event as PrefillEvent,
};
use router::request_core::{AttemptAction, AttemptFailure, AttemptState, EmittedTokens, Side};
use tonic::Status;

use crate::{
    journey::{Failed, Said},
    nodes::Assigned,
};

#[derive(Debug)]
pub struct Attempt {
    pub transfer: TransferId,
    pub decode_node: Assigned,
    pub prefill_node: Option<Assigned>,
    pub machine: AttemptState,
}

impl Attempt {
    pub fn new(
        transfer: TransferId,
        first_index: u32,
        decode_node: Assigned,
        prefill_node: Option<Assigned>,
    ) -> Self {
        let machine = AttemptState::new(first_index, prefill_node.is_some());
        Self { transfer, decode_node, prefill_node, machine }
    }

    pub fn said(
        &mut self,
        side: Side,
        said: Said,
        emitted: &mut EmittedTokens,
    ) -> Vec<AttemptAction> {
        let broken = match &said {
            Said::Cut => Some(AttemptFailure::cut(side)),
            Said::Failed { kind: Failed::Stale, message } => {
                Some(AttemptFailure::status(side, &Status::failed_precondition(message)))
            }
            _ => None,
        };
        match (side, broken) {
            (Side::Decode, Some(failure)) => self.machine.on_decode_end(failure),
            (Side::Prefill, Some(failure)) => self.machine.on_prefill_end(failure),
            (Side::Decode, None) => self.machine.on_decode_event(Some(decode_event(said)), emitted),
            (Side::Prefill, None) => {
                self.machine.on_prefill_event(Some(prefill_event(said)), emitted)
            }
        }
    }

    /// Whether this side's stream is still read.
    pub fn expects(&self, side: Side) -> bool {
        match side {
            Side::Decode => self.machine.expects_decode(),
            Side::Prefill => self.machine.expects_prefill(),
        }
    }

    pub fn node(&self, side: Side) -> &Assigned {
        match (side, &self.prefill_node) {
            (Side::Prefill, Some(prefill)) => prefill,
            (Side::Prefill, None) | (Side::Decode, _) => &self.decode_node,
        }
    }
}

pub fn side_of(role: Role) -> Side {
    match role {
        Role::Prefill => Side::Prefill,
        Role::Decode => Side::Decode,
    }
}

fn decode_event(said: Said) -> DecodeEvent {
    match said {
        Said::Reserved { alone } => DecodeEvent::Reserved(Reserved { cached_tokens: 0, alone }),
        Said::Tokens { first_index, ids, finish: None } => {
            let tokens = ids.into_iter().map(token).collect();
            DecodeEvent::Tokens(DecodeTokens { first_index, tokens })
        }
        Said::Finished { reason } => DecodeEvent::Finished(DecodeFinished {
            reason: on_the_wire(reason).into(),
            ..Default::default()
        }),
        Said::Failed { kind: Failed::Reported(kind), message } => {
            DecodeEvent::Failure(v1::Failure { kind: kind.into(), message })
        }
        said => panic!("a decode node says {said:?}"),
    }
}

fn prefill_event(said: Said) -> PrefillEvent {
    match said {
        Said::Tokens { first_index, ids, finish } => PrefillEvent::Token(PrefillToken {
            first_index,
            token: ids.first().copied().map(token),
            finish: finish.map(|reason| on_the_wire(reason).into()),
            cached_tokens: 0,
        }),
        Said::Delivered => PrefillEvent::Delivered(Delivered::default()),
        Said::Failed { kind: Failed::Reported(kind), message } => {
            PrefillEvent::Failure(v1::Failure { kind: kind.into(), message })
        }
        said => panic!("a prefill node says {said:?}"),
    }
}

fn token(id: u32) -> Token {
    Token { id, logprobs: None }
}

fn on_the_wire(reason: FinishReason) -> v1::FinishReason {
    match reason {
        FinishReason::Stop => v1::FinishReason::Stop,
        FinishReason::Length => v1::FinishReason::Length,
    }
}
