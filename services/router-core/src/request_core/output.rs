//! The outputs of a [`RequestCore`](super::RequestCore) to its owner.

use std::time::Duration;

use proto::v1::{DecodeRequest, FinishReason, PrefillRequest, Token};
use schemars::JsonSchema;
use serde::Serialize;

use super::{AttemptFailure, AttemptStats, GiveUp};
use crate::fair_queue::ChargeEnd;

/// The calls of one attempt.
#[derive(Debug)]
pub struct AttemptCalls {
    /// Number of the attempt, from 1.
    pub number: u32,
    pub decode: DecodeRequest,
    /// `None` when the decode node prefills the prompt itself.
    pub prefill: Option<PrefillRequest>,
}

/// An action that the owner must perform.
#[derive(Debug, PartialEq)]
pub enum RequestOutput {
    /// Pick nodes for the next attempt.
    Pick,
    /// Drop the Prefill call, release its node, and keep the Decode call.
    DropPrefillCall,
    /// The KV of the attempt was transferred in this time: report it to the directory.
    Delivered { elapsed: Duration },
    /// The decode node sent its first token: report it to the directory.
    Served,
    /// The attempt is over: drop its calls, release its nodes, count it.
    EndAttempt(EndedAttempt),
    /// Deliver these new tokens to the client. `hand_over_gap` is set with the decode node's first
    /// token: the time since token 0.
    Emit { first_index: u32, tokens: Vec<Token>, hand_over_gap: Option<Duration> },
    /// Every node is busy: join the queue of requests that wait for a free node. A request that is
    /// in the queue already keeps its place and passes its turn to another request.
    WaitForTurn,
    /// Nodes may have capacity again: give another turn to the requests whose turn has passed.
    RetryPassed,
    /// No node can take the request: release the turn, and wait for a change of nodes.
    WaitForNode,
    /// A node took the request: leave the queue.
    StopWaiting,
    /// The answer is complete.
    Finish(FinishedAnswer),
    /// The request failed.
    Fail(GiveUp),
}

/// Outcome and statistics of an attempt.
#[derive(Debug, PartialEq)]
pub struct EndedAttempt {
    pub outcome: AttemptOutcome,
    pub stats: AttemptStats,
}

#[derive(Debug, PartialEq)]
pub enum AttemptOutcome {
    Complete,
    /// A node refused the attempt, because earlier attempts had completed the answer.
    AlreadyComplete,
    /// A weight update ended the answer, maybe before the attempt's first token.
    Aborted,
    Failed(AttemptFailure),
    /// The client did not read, so the attempt ended to release its slot and KV.
    Paused,
    /// The request ended before the attempt did.
    Cancelled,
}

impl AttemptOutcome {
    /// Returns how the end of the attempt is charged to its flow.
    pub fn charged_end(&self) -> ChargeEnd {
        match self {
            Self::Complete => ChargeEnd::Complete,
            Self::AlreadyComplete => ChargeEnd::Refused,
            Self::Failed(failure) if failure.is_refusal() => ChargeEnd::Refused,
            Self::Aborted | Self::Failed(_) | Self::Paused | Self::Cancelled => ChargeEnd::Cut,
        }
    }
}

#[derive(Debug, PartialEq)]
pub struct FinishedAnswer {
    pub reason: FinishReason,
    pub prompt_tokens: u32,
    /// Prompt tokens found in a prefix cache.
    pub cached_tokens: u32,
    pub hand_over: HandOverStats,
}

/// Statistics of the hand-over from the prefill node to the decode node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "HandOver")]
pub struct HandOverStats {
    /// KV bytes transferred from prefill nodes to decode nodes.
    pub kv_bytes: u64,
    /// Duration of the last transfer, from the reservation to the KV's arrival, in µs.
    pub transfer_us: u64,
    pub attempts: u32,
    /// Prefill node of the last attempt; `null` when the decode node prefilled the prompt itself.
    pub prefill_node: Option<String>,
    /// Decode node of the last attempt.
    pub decode_node: Option<String>,
}

impl HandOverStats {
    /// Adds another answer of the same request.
    pub fn add(&mut self, other: &Self) {
        self.kv_bytes += other.kv_bytes;
        self.transfer_us = self.transfer_us.max(other.transfer_us);
        self.attempts += other.attempts;
        self.prefill_node.clone_from(&other.prefill_node);
        self.decode_node.clone_from(&other.decode_node);
    }
}
