//! The attempts of a router's requests: picks of nodes, calls, and feedback about the nodes.

use std::time::{Duration, Instant};

use cluster::{BreakerReason, Room};
use proto::ids::TransferId;
use router::{
    fair_queue::{Pass, StartedPrompt},
    request_core::{AttemptOutcome, Blame, EndedAttempt, NodeFeedback, Side},
};

use super::{CallKey, NodeCall, OpenCall, Router, RouterAction};
use crate::nodes::{Assigned, PickedNodes};

/// The nodes of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pick {
    pub request: usize,
    /// Host of the decode node.
    pub decode: usize,
    /// Host of the prefill node; `None` when the decode node prefilled.
    pub prefill: Option<usize>,
    /// Predicted time to first token.
    pub predicted: Option<Duration>,
    /// Time from the pick to the first token.
    pub ttft: Option<Duration>,
}

impl Router {
    /// Picks nodes and opens the calls of an attempt.
    pub(super) fn pick(&mut self, now: Instant, id: usize) {
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        let transfer = TransferId(self.random.id());
        let queue = self.waiting.entry(answer.model.clone()).or_default();
        let mut wanted = answer.core.wanted();
        if let Room::Start { headroom } = &mut wanted.room {
            *headroom = queue.is_over_share(now, &answer.flow.name);
        }
        let (tokens, output_tokens_max) = (wanted.tokens, wanted.new_tokens_max);
        let started = self.stats.is_some().then(Instant::now);
        let picked = self.nodes.pick(now, transfer, &wanted);
        if let (Some(stats), Some(started)) = (&mut self.stats, started) {
            stats.pick_time += started.elapsed();
        }
        let picked = match picked {
            Ok(picked) => picked,
            Err(reason) => {
                answer.pass = Pass::of(&reason);
                return answer.core.handle_no_node(now, &reason);
            }
        };
        let PickedNodes { decode, prefill, ttft, uncached_tokens } = picked;
        let prompt = StartedPrompt { tokens, uncached_tokens };
        let charge = queue.start(now, &answer.flow, prompt, output_tokens_max);
        queue.leave(id);
        answer.queued = None;
        answer.charge = Some(charge);
        self.picks.extend(self.stats.is_none().then(|| Pick {
            request: id,
            decode: decode.host,
            prefill: prefill.as_ref().map(|node| node.host),
            predicted: ttft,
            ttft: None,
        }));
        if ttft.is_some() {
            self.coverage.count(match prefill {
                Some(_) => "predicted hand-over",
                None => "predicted local prefill",
            });
        }
        let records = (decode.record.clone(), prefill.as_ref().map(|node| node.record.clone()));
        answer.picked_at = Some(now);
        answer.nodes = Some((decode.clone(), prefill.clone()));
        let calls = answer.core.handle_picked(now, transfer, records.0, records.1);
        (answer.transfer, answer.attempts) = (Some(transfer), calls.number);
        self.coverage.count("attempts");
        if calls.number > 1 && answer.plan.grammar.is_some() {
            self.coverage.count("structured output migrated");
        }
        let key = CallKey { transfer, side: Side::Decode };
        self.open_call(id, key, &decode, NodeCall::Decode(calls.decode));
        if let (Some(prefill), Some(call)) = (prefill, calls.prefill) {
            let key = CallKey { transfer, side: Side::Prefill };
            self.open_call(id, key, &prefill, NodeCall::Prefill(call));
        }
    }

    /// Drops the call to the prefill node, whose part of the attempt has ended, and releases the node.
    pub(super) fn drop_prefill_call(&mut self, id: usize) {
        let answer = self.answer(id);
        let prefill = answer.nodes.as_mut().and_then(|(_, prefill)| prefill.take());
        let transfer = answer.transfer;
        if let (Some(prefill), Some(transfer)) = (prefill, transfer) {
            self.drop_call(CallKey { transfer, side: Side::Prefill });
            self.nodes.release(&prefill);
        }
    }

    fn open_call(&mut self, request: usize, key: CallKey, node: &Assigned, call: NodeCall) {
        let connection = self.nodes.connection(node.host);
        self.calls.insert(key, OpenCall { request, connection });
        self.actions.push(RouterAction::Call { connection, key, call: Box::new(call) });
    }

    /// Drops the calls of the attempt and releases its nodes.
    pub(super) fn end_attempt(&mut self, now: Instant, id: usize, ended: &EndedAttempt) {
        let answer = self.answer(id);
        let transfer = answer.transfer.take();
        let Some((decode, prefill)) = answer.nodes.take() else { return };
        if let Some(transfer) = transfer {
            self.drop_call(CallKey { transfer, side: Side::Decode });
            self.drop_call(CallKey { transfer, side: Side::Prefill });
        }
        // The prefix hits of the prefill node, or of the decode node if it prefilled. A retry finds the KV that its
        // request computed before, so the first report counts.
        let stats = &ended.stats;
        let local = stats.decode.cached_tokens.filter(|_| stats.local_prefill);
        let cached = stats.prefill.cached_tokens.or(local);
        let answer = self.answer(id);
        answer.cached_tokens = answer.cached_tokens.or(cached);
        self.nodes.decoded(now, &decode, ended.stats.decoded_tokens, ended.stats.decode_wait);
        if let AttemptOutcome::Failed(failure) = &ended.outcome {
            self.coverage.count_failure(failure);
            let node = match (failure.side, &prefill) {
                (Side::Prefill, Some(prefill)) => prefill,
                (Side::Prefill, None) | (Side::Decode, _) => &decode,
            };
            match (failure.blame(), &prefill) {
                (Some(Blame::Node), _) => self.nodes.failed(now, node),
                (Some(Blame::Pair), Some(prefill)) => {
                    self.nodes.transfer_failed(now, prefill, &decode);
                }
                _ => {}
            }
            match failure.node_feedback() {
                Some(NodeFeedback::Busy) => self.nodes.busy(now, node),
                Some(NodeFeedback::Lost) => {
                    self.nodes.call_lost(now, node, failure.message.clone());
                }
                None => {}
            }
        }
        for node in [Some(decode), prefill].into_iter().flatten() {
            self.nodes.release(&node);
        }
        for change in self.nodes.take_opened() {
            self.coverage.count(match (change.partner, change.opened) {
                (Some(_), _) => "breaker of a pair opened",
                (None, Some(BreakerReason::Slow)) => "slow node excluded",
                (None, _) => "breaker of a node opened",
            });
        }
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        let charge = answer.charge.take().expect("an attempt is charged");
        let queue = self.waiting.get_mut(&answer.model).expect("the attempt was charged");
        queue.ended(now, &charge, ended.outcome.charged_end());
        queue.retry_passed();
        if ended.outcome == AttemptOutcome::Paused {
            self.coverage.count("paused");
        }
    }

    fn drop_call(&mut self, key: CallKey) {
        if let Some(OpenCall { connection, .. }) = self.calls.remove(&key) {
            self.actions.push(RouterAction::Cancel { connection, key });
        }
    }
}
