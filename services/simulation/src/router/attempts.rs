//! The attempts of a router's requests: their calls, and what a run keeps of them.

use std::time::{Duration, Instant};

use cluster::Placement;
use kernels::BLOCK_TOKENS;
use proto::ids::TransferId;
use router_core::{
    AnswerOutput, AttemptOutcome, AttemptSide, EndedAttempt, PickedNode, StartedAttempt,
};

use super::{End, OpenCall, Router, RouterAction};
use crate::calls::{CallKey, NodeCall};

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
    /// Performs the outputs of the answer's core until the core waits for an input.
    pub(super) fn perform(&mut self, now: Instant, id: usize) {
        while let Some(output) = self.poll_output(now, id) {
            match output {
                AnswerOutput::Pick => self.pick(now, id),
                AnswerOutput::DropPrefillCall => {
                    self.end_move(id);
                    let transfer = self.answer(id).transfer;
                    self.drop_call(transfer, AttemptSide::Prefill);
                }
                AnswerOutput::EndAttempt { ended, .. } => self.end_attempt(id, &ended),
                AnswerOutput::Emit { first_index, tokens, .. } => {
                    self.emit(now, id, first_index, &tokens);
                }
                AnswerOutput::Finish(finished) => self.finish(now, id, finished.reason),
                AnswerOutput::Fail { reason, retry_after_s } => {
                    assert!((1..=60).contains(&retry_after_s), "{retry_after_s}");
                    self.end(now, id, End::Failed(reason));
                }
                AnswerOutput::Refuse(overload) => self.end(now, id, End::Refused(overload)),
            }
        }
        self.set_due(id);
    }

    fn poll_output(&mut self, now: Instant, id: usize) -> Option<AnswerOutput> {
        self.answers.get_mut(&id)?.core.poll_output(now, &mut self.core)
    }

    /// Picks nodes and opens the calls of an attempt.
    fn pick(&mut self, now: Instant, id: usize) {
        let answer = self.answers.get_mut(&id).expect("requests are kept");
        let transfer = TransferId(self.random.id());
        let started = self.stats.is_some().then(Instant::now);
        let picked = answer.core.pick(now, &mut self.core, transfer);
        if let (Some(stats), Some(started)) = (&mut self.stats, started) {
            stats.pick_time += started.elapsed();
        }
        // Without a node the answer waits.
        let Ok(StartedAttempt { calls, decode, prefill, ttft, considered }) = picked else {
            return self.end_move(id);
        };
        if considered.placement == Placement::Moved {
            self.coverage.count("sequences that move");
        }
        let host_of = |node: &PickedNode| self.nodes.host_of(&node.address);
        let (decode, prefill) = (host_of(&decode), prefill.as_ref().map(host_of));
        let pick = Pick { request: id, decode, prefill, predicted: ttft, ttft: None };
        self.picks.extend(self.stats.is_none().then_some(pick));
        if ttft.is_some() {
            self.coverage.count(match prefill {
                Some(_) => "predicted hand-over",
                None => "predicted local prefill",
            });
        }
        answer.picked_at = Some(now);
        (answer.transfer, answer.attempts) = (Some(transfer), calls.number);
        self.coverage.count("attempts");
        if calls.number > 1 && answer.plan.grammar.is_some() {
            self.coverage.count("structured output migrated");
        }
        let key = CallKey { transfer, side: AttemptSide::Decode };
        self.open_call(id, key, decode, NodeCall::Decode(calls.decode));
        if let (Some(prefill), Some(call)) = (prefill, calls.prefill) {
            let key = CallKey { transfer, side: AttemptSide::Prefill };
            self.open_call(id, key, prefill, NodeCall::Prefill(call));
        } else {
            self.end_move(id);
        }
    }

    /// Drops the Decode call of the attempt whose node sent its KV to the open attempt.
    pub(super) fn end_move(&mut self, id: usize) {
        let moving = self.answer(id).moving.take();
        self.drop_call(moving, AttemptSide::Decode);
    }

    fn open_call(&mut self, request: usize, key: CallKey, host: usize, call: NodeCall) {
        let connection = self.nodes.connection(host);
        self.calls.insert(key, OpenCall { request, connection });
        self.actions.push(RouterAction::Call { connection, key, call: Box::new(call) });
    }

    /// Drops the calls of the attempt.
    fn end_attempt(&mut self, id: usize, ended: &EndedAttempt) {
        self.end_move(id);
        let answer = self.answer(id);
        let transfer = answer.transfer.take();
        match answer.core.request().moves() {
            true => answer.moving = transfer,
            false => self.drop_call(transfer, AttemptSide::Decode),
        }
        self.drop_call(transfer, AttemptSide::Prefill);
        // The prefix hits of the prefill node, or of the decode node if it prefilled. A retry finds
        // the KV that its request computed before, so the first report counts.
        let stats = &ended.stats;
        let local = stats.decode.cached_tokens.filter(|_| stats.local_prefill);
        let cached = stats.prefill.cached_tokens.or(local);
        let answer = self.answer(id);
        answer.cached_tokens = answer.cached_tokens.or(cached);
        if stats.moved_tokens > 0 {
            let recomputed = (stats.moved_tokens - 1).saturating_sub(stats.cached_tokens);
            self.coverage.count("sequences moved");
            if recomputed as usize >= BLOCK_TOKENS {
                self.coverage.count("moved sequences that were recomputed");
            }
        }
        match &ended.outcome {
            AttemptOutcome::Failed(failure) => self.coverage.count_failure(failure),
            AttemptOutcome::Paused => self.coverage.count("paused"),
            _ => {}
        }
    }

    fn drop_call(&mut self, transfer: Option<TransferId>, side: AttemptSide) {
        let Some(key) = transfer.map(|transfer| CallKey { transfer, side }) else { return };
        if let Some(OpenCall { connection, .. }) = self.calls.remove(&key) {
            self.actions.push(RouterAction::Cancel { connection, key });
        }
    }
}
