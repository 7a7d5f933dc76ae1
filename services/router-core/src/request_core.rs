//! The router's request core: every decision about one answer, without I/O.
//!
//! A request with `n` choices has `n` cores, each owned by an [`AnswerCore`](crate::AnswerCore).
//!
//! Life of a [`RequestCore`], as its owner sees it:
//! 1. [`RequestCore::start`] begins the request.
//! 2. The owner performs every [`RequestOutput`] that [`RequestCore::poll_output`] returns, in
//!    order, before it passes the next input:
//!    * [`RequestOutput::Pick`]: the owner picks nodes by [`RequestCore::requirements`], and calls
//!      [`RequestCore::handle_picked`] or [`RequestCore::handle_no_node`]. `handle_picked` returns
//!      the calls of an attempt. The owner opens the calls and passes their messages to
//!      [`RequestCore::handle_decode`] and [`RequestCore::handle_prefill`].
//!    * [`RequestOutput::Emit`]: the owner delivers tokens to the client, then calls
//!      [`RequestCore::handle_emitted`]. No other output follows until then. If the client takes no
//!      tokens for a while, the owner calls [`RequestCore::handle_client_stalled`], which ends the
//!      attempt. The next attempt starts after `handle_emitted`.
//!    * [`RequestOutput::WaitForTurn`] and [`RequestOutput::WaitForNode`]: no node takes the
//!      request now. The owner calls [`RequestCore::handle_turn`], in the order of a
//!      [`FairQueue`](crate::fair_queue::FairQueue), or [`RequestCore::handle_nodes_changed`].
//! 3. The owner calls [`RequestCore::handle_deadline`] at [`RequestCore::next_deadline`].
//! 4. The last output is [`RequestOutput::Finish`] or [`RequestOutput::Fail`], exactly once. If the
//!    client disconnects, the owner calls [`RequestCore::handle_client_left`] instead, and neither
//!    output follows.
//!
//! States: `Picking` → `Attempting` → `Ended`. A failed attempt returns to `Picking`, after lost
//! nodes through `WaitingToRetry`. A pick without a node leads to `WaitingForTurn` or
//! `WaitingForNode`, and from there back to `Picking`. A stalled client leads from `Attempting` to
//! `Paused`, and its next read to `WaitingForTurn`.
//!
//! [`AttemptState`] checks the order of the nodes' events in one attempt. [`EmittedTokens`] is the
//! list of tokens that the client has received. [`Recovery`] decides what follows a failed attempt.

mod attempt;
mod emitted;
mod failure;
mod output;
mod recovery;
mod spec;
#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use cluster::{
    Drain, Epoch, ModelIdentity, NoNode, NodeRecord, NodeRequirements, RequiredCapacity,
};
use proto::{
    ids::TransferId,
    v1::{
        Attempt, DecodeEvent, DecodeRequest, FinishReason, Peer, PrefillEvent, PrefillRequest,
        Sampling,
    },
};

use crate::fair_queue::{StartLimit, TooLate};
use attempt::{AttemptAction, AttemptState, LAST_EVENT_MAX, TOKEN_0_MAX};
pub use attempt::{AttemptStats, NodeStats};
use emitted::EmittedTokens;
pub use failure::{
    AttemptFailure, AttemptSide, Blame, CallError, FailureCause, GrpcCode, NodeFeedback,
};
pub(crate) use output::RequestOutput;
pub use output::{AttemptCalls, AttemptOutcome, EndedAttempt, FinishedAnswer, HandOverStats};
pub use recovery::GiveUp;
use recovery::{NextStep, Recovery};
pub use spec::{AnswerSpec, RecoveryPolicy, RequestSession, StopCause, sampling_version};

/// Minimum and maximum time until requests whose turn has passed get another turn. The maximum is
/// one or two steps of a busy node; a shorter time follows from a predicted end of a node's queue.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(25));
/// Interval at which an attempt checks whether its decode node drains: short compared with any
/// grace period. Attempts check at different times, so that they do not all move at once. An answer
/// that ends within this time does not move.
const DRAIN_CHECK: Duration = Duration::from_millis(500);
/// Minimum number of decoded tokens for predicting the rest of the answer from an attempt's
/// inter-token latency.
const DRAIN_TOKENS_MIN: u32 = 8;
/// Minimum and maximum interval between two picks of a request that waits for a node. A change of a
/// node's health ends the wait at once. Only a new pick finds a node that stopped draining, or one
/// that failed this request before.
const PICK_AGAIN_ABSENT: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// State machine of one answer.
#[derive(Debug)]
pub struct RequestCore {
    spec: AnswerSpec,
    policy: RecoveryPolicy,
    state: RequestCoreState,
    emitted: EmittedTokens,
    recovery: Recovery,
    /// Identity of the nodes that computed the first emitted token. Nodes with another identity
    /// could continue with different tokens.
    identity: Option<ModelIdentity>,
    /// Whether nodes of another weight version may continue, because no node has the version of
    /// `identity` any more.
    any_weights: bool,
    /// Whether a stop token was delivered.
    has_stopped: bool,
    /// Draining decode node of the previous attempt, which sends its KV to the next one.
    moves_from: Option<Epoch>,
    /// Whether the previous attempt ended because the client, or the router, read too slowly.
    was_paused: bool,
    stats: HandOverStats,
    cached_tokens: Option<u32>,
    outputs: VecDeque<RequestOutput>,
}

#[derive(Debug)]
enum RequestCoreState {
    Picking,
    /// `retry_at`: time to give another turn to passed requests, after a turn that found every node
    /// busy.
    WaitingForTurn {
        retry_at: Option<Instant>,
    },
    WaitingForNode {
        pick_at: Instant,
    },
    WaitingToRetry {
        pick_at: Instant,
    },
    /// No attempt is open until the client reads.
    Paused,
    Attempting(Box<OpenAttempt>),
    Ended,
}

/// The attempt whose calls are open.
#[derive(Debug)]
struct OpenAttempt {
    state: AttemptState,
    decode: Arc<NodeRecord>,
    prefill: Option<Arc<NodeRecord>>,
    /// Actions to perform after the current delivery.
    actions: VecDeque<AttemptAction>,
    /// Whether tokens are being delivered to the client.
    is_emitting: bool,
    /// Time of the last event of a node or the last delivery to the client, whichever is later.
    active_at: Instant,
    /// Time of the last sign of work on the attempt: `active_at`, or a later load report of the
    /// node.
    silent_since: Instant,
    token_0_at: Option<Instant>,
    drain_check_at: Instant,
    /// The rest of the decode node's grace period when the router first saw that the node drains.
    grace_seen: Option<Duration>,
}

impl OpenAttempt {
    /// Restarts the timers after an event or a delivery. A slow client thus does not count as a
    /// silent node.
    fn restart_timers(&mut self, now: Instant) {
        (self.active_at, self.silent_since) = (now, now);
    }
}

impl RequestCore {
    pub fn new(spec: AnswerSpec, policy: RecoveryPolicy) -> Self {
        Self {
            emitted: EmittedTokens::new(spec.sampling.max_tokens, spec.vocabulary_size),
            recovery: Recovery::new(policy, spec.is_further),
            state: RequestCoreState::Picking,
            identity: None,
            any_weights: false,
            has_stopped: false,
            moves_from: None,
            was_paused: false,
            stats: HandOverStats::default(),
            cached_tokens: None,
            outputs: VecDeque::new(),
            spec,
            policy,
        }
    }

    /// Begins the request. `is_queued`: other requests wait for a free node and come first.
    pub fn start(&mut self, now: Instant, is_queued: bool) {
        match is_queued {
            true => {
                let next = self.recovery.all_busy(now);
                self.follow(now, next, None);
            }
            false => self.pick(),
        }
    }

    /// Returns the next action. Performing it may add more.
    pub fn poll_output(&mut self) -> Option<RequestOutput> {
        self.outputs.pop_front()
    }

    /// Returns the tokens that the client has received.
    pub fn emitted(&self) -> &[u32] {
        self.emitted.ids()
    }

    /// Returns the cache key of the last full block of the prompt and the emitted tokens, without
    /// the last token, whose KV no node has computed.
    pub fn last_block(&self) -> Option<u128> {
        let output = self.emitted.ids();
        let computed = &output[..output.len().saturating_sub(1)];
        self.spec.prefix.first()?.last_after(&self.spec.prompt, computed)
    }

    /// Returns whether the answer waits for busy nodes until its deadline: it has emitted tokens, or
    /// is a further answer of its request.
    pub(crate) fn outlasts_busy_nodes(&self) -> bool {
        self.recovery.outlasts_busy_nodes()
    }

    pub fn priority(&self) -> i32 {
        self.spec.priority
    }

    pub fn has_ended(&self) -> bool {
        matches!(self.state, RequestCoreState::Ended)
    }

    /// Returns whether an event of the decode node is awaited.
    pub fn expects_decode(&self) -> bool {
        matches!(&self.state, RequestCoreState::Attempting(attempt) if attempt.state.expects_decode())
    }

    /// Returns whether an event of the prefill node is awaited.
    pub fn expects_prefill(&self) -> bool {
        matches!(&self.state, RequestCoreState::Attempting(attempt) if attempt.state.expects_prefill())
    }

    /// Returns whether the sequence moves with its KV from the draining node of the last attempt.
    /// The owner keeps the Decode call of the last attempt open, and does not read it, until the
    /// node accepts the Prefill call of the next attempt. If the next attempt begins without this
    /// Prefill call, drops it ([`RequestOutput::DropPrefillCall`]), or ends, the owner drops the
    /// Decode call then.
    pub fn moves(&self) -> bool {
        self.moves_from.is_some()
    }

    /// Returns whether [`Self::handle_turn`] is awaited.
    pub fn expects_turn(&self) -> bool {
        matches!(self.state, RequestCoreState::WaitingForTurn { .. })
    }

    /// Returns whether [`Self::handle_nodes_changed`] is awaited.
    pub fn expects_node(&self) -> bool {
        matches!(self.state, RequestCoreState::WaitingForNode { .. })
    }

    /// Returns the requirements on the nodes of the next attempt.
    pub fn requirements(&self) -> NodeRequirements<'_> {
        let emitted = self.emitted.next_index();
        let pooling = self.spec.sampling.pooling.is_some();
        NodeRequirements {
            model: &self.spec.model,
            prompt_tokens: self.spec.prompt_tokens(),
            tokens: self.spec.prompt_tokens() + emitted,
            new_tokens_max: self.spec.sampling.max_tokens - emitted,
            local_prefill: self.recovery.local_prefill(),
            moves_from: self.moves_from,
            prefix: &self.spec.prefix,
            identity: self.identity.as_ref(),
            any_weights: self.any_weights,
            grammar_version: self.spec.grammar_version,
            sampling_version: sampling_version(&self.spec.sampling),
            pooling,
            adapter: self.spec.adapter,
            exclude_decode: self.recovery.avoid_decode(),
            // The node of a pooled attempt may have either role.
            exclude_prefill: match pooling {
                true => self.recovery.avoid_decode(),
                false => self.recovery.avoid_prefill(),
            },
            // An answer that has emitted tokens continues at once, unless its client paused it.
            capacity: match emitted > 0 && !self.was_paused {
                true => RequiredCapacity::Any,
                false => RequiredCapacity::Start { headroom: false },
            },
            waits_since: self.recovery.waits_since(),
        }
    }

    /// Handles the picked nodes: begins an attempt and returns the calls that the owner must open.
    /// `transfer_id` must be unique among all attempts.
    pub fn handle_picked(
        &mut self,
        now: Instant,
        transfer_id: TransferId,
        decode: Arc<NodeRecord>,
        prefill: Option<Arc<NodeRecord>>,
    ) -> AttemptCalls {
        debug_assert!(matches!(self.state, RequestCoreState::Picking));
        self.stats.attempts = self.recovery.attempts();
        self.stats.decode_node = Some(decode.node_id.to_string());
        self.stats.prefill_node = prefill.as_ref().map(|node| node.node_id.to_string());
        let calls = AttemptCalls {
            number: self.stats.attempts,
            decode: DecodeRequest {
                attempt: Some(self.attempt_for(now, transfer_id, &decode)),
                prefill: prefill.as_deref().map(peer),
            },
            prefill: prefill.as_deref().map(|prefill| PrefillRequest {
                attempt: Some(self.attempt_for(now, transfer_id, prefill)),
                decode: Some(peer(&decode)),
            }),
        };
        // If the attempt fails, the next one is an ordinary attempt.
        let moves_from = self.moves_from.take();
        let moves = prefill.as_ref().is_some_and(|node| Some(node.epoch) == moves_from);
        let moved_tokens =
            if moves { self.spec.prompt_tokens() + self.emitted.next_index() } else { 0 };
        self.state = RequestCoreState::Attempting(Box::new(OpenAttempt {
            state: AttemptState::new(self.emitted.next_index(), prefill.is_some())
                .awaiting_prompt(self.sampling().prompt_logprobs.is_some())
                .moving(moved_tokens),
            decode,
            prefill,
            actions: VecDeque::new(),
            is_emitting: false,
            active_at: now,
            silent_since: now,
            token_0_at: None,
            drain_check_at: now + DRAIN_CHECK,
            grace_seen: None,
        }));
        calls
    }

    /// Returns the sampling parameters of the next attempt. Token 0 has the log-probabilities of
    /// the prompt, so later attempts compute none.
    fn sampling(&self) -> Sampling {
        let prompt_logprobs = match self.emitted.next_index() {
            0 => self.spec.sampling.prompt_logprobs,
            _ => None,
        };
        Sampling { prompt_logprobs, ..self.spec.sampling.clone() }
    }

    /// Returns the attempt as this node receives it: the prompt and all emitted tokens.
    fn attempt_for(&self, now: Instant, transfer_id: TransferId, node: &NodeRecord) -> Attempt {
        let spec = &self.spec;
        let remaining = spec.deadline.saturating_duration_since(now);
        Attempt {
            request_id: Bytes::copy_from_slice(&spec.request_id.to_bytes()),
            transfer_id: Bytes::copy_from_slice(&transfer_id.to_bytes()),
            tokens: [&spec.prompt, self.emitted.ids()].concat(),
            prompt_len: spec.prompt_tokens(),
            sampling: Some(self.sampling()),
            // 0 would mean that no time is left.
            remaining_ms: (remaining.as_millis() as u64).max(1),
            cache_salt: spec.cache_salt.to_string(),
            session: spec.session.name.to_string(),
            keep_ms: spec.session.keep_ms,
            node_epoch: Bytes::copy_from_slice(&node.epoch.to_bytes()),
            weight_version: node.identity.weight_version,
            grammar: spec.grammar.as_deref().cloned(),
            adapter: spec
                .adapter
                .map_or_else(Bytes::new, |hash| Bytes::copy_from_slice(&hash.to_be_bytes())),
        }
    }

    /// Handles a pick that found no decode node.
    pub fn handle_no_node(&mut self, now: Instant, reason: &NoNode) {
        debug_assert!(matches!(self.state, RequestCoreState::Picking));
        self.moves_from = None;
        // A weight update may leave no node of the version that made the first tokens.
        if matches!(reason, NoNode::NoneFits { .. })
            && self.identity.is_some()
            && !std::mem::replace(&mut self.any_weights, true)
        {
            return self.pick();
        }
        let next = self.recovery.no_node(reason, now);
        let after = match reason {
            NoNode::Busy { retry_after, .. } => *retry_after,
            _ => RETRY_AFTER.1,
        };
        self.follow(now, next, Some(now + after.clamp(RETRY_AFTER.0, RETRY_AFTER.1)));
    }

    /// Handles a message of the Decode call: an event, the end of the stream, or an error. The
    /// owner calls this only while [`Self::expects_decode`].
    pub fn handle_decode(&mut self, now: Instant, message: Result<Option<DecodeEvent>, CallError>) {
        let RequestCoreState::Attempting(attempt) = &mut self.state else { return };
        let actions = match message {
            Ok(Some(event)) => {
                // Measure from the last delivery, so that a slow client is not mistaken for a slow
                // node.
                let waited = now.saturating_duration_since(attempt.active_at);
                attempt.state.on_decode_wait(event.event.as_ref(), waited);
                let was_decoding = attempt.state.is_decoding();
                attempt.state.on_stages(AttemptSide::Decode, event.stages);
                let actions = attempt.state.on_decode_event(event.event, &mut self.emitted);
                if attempt.state.is_decoding() && !was_decoding {
                    self.outputs.push_back(RequestOutput::Served);
                }
                actions
            }
            end => vec![AttemptAction::Fail(AttemptFailure::stream_end(
                AttemptSide::Decode,
                end.err(),
            ))],
        };
        self.act(now, actions);
    }

    /// Handles a message of the Prefill call. See [`Self::handle_decode`].
    pub fn handle_prefill(
        &mut self,
        now: Instant,
        message: Result<Option<PrefillEvent>, CallError>,
    ) {
        let RequestCoreState::Attempting(attempt) = &mut self.state else { return };
        let actions = match message {
            Ok(Some(event)) => {
                attempt.state.on_stages(AttemptSide::Prefill, event.stages);
                // Tokens of the decode node may have waited for this event.
                let was_decoding = attempt.state.is_decoding();
                let actions = attempt.state.on_prefill_event(event.event, &mut self.emitted);
                if attempt.state.is_decoding() && !was_decoding {
                    self.outputs.push_back(RequestOutput::Served);
                }
                actions
            }
            end => attempt
                .state
                .on_prefill_end(AttemptFailure::stream_end(AttemptSide::Prefill, end.err())),
        };
        self.act(now, actions);
    }

    /// Handles the delivery of the tokens of the last [`RequestOutput::Emit`]. `stop` is the stop
    /// condition in them, if any.
    pub fn handle_emitted(&mut self, now: Instant, stop: Option<StopCause>) {
        match &mut self.state {
            RequestCoreState::Attempting(attempt) => {
                debug_assert!(attempt.is_emitting);
                attempt.is_emitting = false;
            }
            RequestCoreState::Paused => {}
            _ => return,
        }
        match stop {
            Some(StopCause::Text) => return self.complete(FinishReason::Stop),
            Some(StopCause::Token) => self.has_stopped = true,
            None => {}
        }
        match self.state {
            RequestCoreState::Paused if self.has_stopped => {
                self.complete(self.reason_without_node())
            }
            RequestCoreState::Paused => {
                let next = self.recovery.all_busy(now);
                self.follow(now, next, None);
            }
            _ => self.act(now, Vec::new()),
        }
    }

    /// Handles a client that does not take the tokens of the last [`RequestOutput::Emit`]: ends the
    /// attempt, which holds a slot and KV. An attempt whose last token is sampled holds neither and
    /// goes on.
    pub fn handle_client_stalled(&mut self) {
        let is_complete = self.is_complete();
        let RequestCoreState::Attempting(attempt) = &self.state else { return };
        if !is_complete && attempt.is_emitting && attempt.actions.is_empty() {
            self.end_attempt(AttemptOutcome::Paused);
            self.recovery.progressed();
            (self.state, self.was_paused) = (RequestCoreState::Paused, true);
        }
    }

    /// Handles this request's turn to pick among busy nodes.
    pub fn handle_turn(&mut self) {
        if let RequestCoreState::WaitingForTurn { .. } = self.state {
            self.pick();
        }
    }

    /// Handles a turn that comes too late: the request could no longer start within this limit.
    pub fn handle_late_turn(&mut self, now: Instant, limit: StartLimit) {
        if !self.expects_turn() {
            return;
        }
        if now >= self.spec.deadline {
            return self.expire(now);
        }
        let waited = self.recovery.waited(now);
        self.fail(match limit {
            StartLimit::Wait(_) => GiveUp::Busy { waited },
            StartLimit::Deadline { service_time, .. } => {
                let time_left = self.spec.deadline.saturating_duration_since(now);
                let limit = StartLimit::Deadline { time_left, service_time };
                let wait = Duration::ZERO;
                GiveUp::Late(TooLate { wait, waited, limit, is_over_share: false })
            }
        });
    }

    /// Handles a change of a node's health.
    pub fn handle_nodes_changed(&mut self) {
        if let RequestCoreState::WaitingForNode { .. } = self.state {
            self.pick();
        }
    }

    /// Handles a client that disconnected, or a router that stops.
    pub fn handle_client_left(&mut self) {
        self.end_attempt(AttemptOutcome::Cancelled);
        self.state = RequestCoreState::Ended;
    }

    /// Returns when to call [`Self::handle_deadline`] if no other input comes first.
    pub fn next_deadline(&self) -> Option<Instant> {
        let timer = match &self.state {
            RequestCoreState::Ended => return None,
            RequestCoreState::Picking | RequestCoreState::Paused => None,
            RequestCoreState::WaitingForTurn { retry_at } => {
                self.recovery.busy_until().into_iter().chain(*retry_at).min()
            }
            RequestCoreState::WaitingForNode { pick_at }
            | RequestCoreState::WaitingToRetry { pick_at } => Some(*pick_at),
            RequestCoreState::Attempting(attempt) if attempt.is_emitting => None,
            RequestCoreState::Attempting(attempt) => {
                let last_event = self.is_complete().then(|| attempt.active_at + LAST_EVENT_MAX);
                let token_0 =
                    attempt.state.awaits_late_token_0().then(|| attempt.active_at + TOKEN_0_MAX);
                let silence = attempt.silent_since + self.policy.idle_timeout;
                let drain = attempt.state.is_decoding().then_some(attempt.drain_check_at);
                [last_event, token_0, drain, Some(silence)].into_iter().flatten().min()
            }
        };
        timer.into_iter().chain([self.spec.deadline]).min()
    }

    /// Returns whether [`Self::handle_drain_check`] is due. It is not at the deadline, which ends
    /// the request.
    pub fn drain_check_is_due(&self, now: Instant) -> bool {
        let RequestCoreState::Attempting(attempt) = &self.state else { return false };
        let is_due = attempt.drain_check_at <= now && now < self.spec.deadline;
        is_due && attempt.state.is_decoding() && !attempt.is_emitting
    }

    /// Handles a drain of the decode node, if another node can take the request. An answer that
    /// does not end within [`DRAIN_CHECK`] moves with its KV. If the node cannot send the KV, an
    /// answer that would not end in the grace period migrates, and another node recomputes its KV.
    /// Answers migrate at different times in the first half of the grace period, so that the other
    /// nodes do not recompute all of them at once.
    pub fn handle_drain_check(&mut self, now: Instant, drain: Option<Drain>) {
        let tokens_left = self.spec.sampling.max_tokens - self.emitted.next_index();
        let is_complete = self.is_complete();
        let RequestCoreState::Attempting(attempt) = &mut self.state else { return };
        attempt.drain_check_at = now + DRAIN_CHECK;
        let stats = attempt.state.stats();
        let Some(Drain { grace, sends_kv }) =
            drain.filter(|_| stats.decoded_tokens >= DRAIN_TOKENS_MIN)
        else {
            return;
        };
        let needed =
            stats.decode_wait.mul_f64(f64::from(tokens_left) / f64::from(stats.decoded_tokens));
        let outlasts = |grace: Duration| {
            let first = *attempt.grace_seen.get_or_insert(grace);
            let spread = (self.spec.request_id.0 as u8) as f64 / 512.0;
            needed > grace && grace <= first.mul_f64(1.0 - spread)
        };
        let moves = sends_kv && needed > DRAIN_CHECK;
        if !is_complete && (moves || grace.is_some_and(outlasts)) {
            self.moves_from = sends_kv.then_some(attempt.decode.epoch);
            let failure = AttemptFailure::migrated(needed);
            self.act(now, vec![AttemptAction::Fail(failure)]);
        }
    }

    /// Handles the deadline that [`Self::next_deadline`] returned. `last_report` returns the time
    /// of the last load or cache report by the attempt's node on a side.
    pub fn handle_deadline(
        &mut self,
        now: Instant,
        last_report: impl FnOnce(AttemptSide) -> Option<Instant>,
    ) {
        if now >= self.spec.deadline {
            return self.expire(now);
        }
        let is_complete = self.is_complete();
        match &mut self.state {
            RequestCoreState::Picking | RequestCoreState::Paused | RequestCoreState::Ended => {}
            RequestCoreState::WaitingForTurn { retry_at } => {
                if self.recovery.busy_until().is_some_and(|until| until <= now) {
                    let next = self.recovery.all_busy(now);
                    self.follow(now, next, None);
                } else if retry_at.is_some_and(|at| at <= now) {
                    *retry_at = Some(now + RETRY_AFTER.1);
                    self.outputs.push_back(RequestOutput::RetryPassed);
                }
            }
            RequestCoreState::WaitingForNode { pick_at }
            | RequestCoreState::WaitingToRetry { pick_at } => {
                if *pick_at <= now {
                    self.pick();
                }
            }
            RequestCoreState::Attempting(attempt) if attempt.is_emitting => {}
            RequestCoreState::Attempting(attempt) => {
                let idle_timeout = self.policy.idle_timeout;
                if is_complete && now >= attempt.active_at + LAST_EVENT_MAX {
                    self.complete(self.reason_without_node());
                } else if attempt.state.awaits_late_token_0()
                    && now >= attempt.active_at + TOKEN_0_MAX
                {
                    let actions = attempt.state.on_token_0_late();
                    self.act(now, actions);
                } else if now >= attempt.silent_since + idle_timeout {
                    let side = attempt.state.awaits();
                    let reported = last_report(side).filter(|at| *at > attempt.silent_since);
                    match reported {
                        Some(at) if !attempt.state.is_decoding() => attempt.silent_since = at,
                        _ => {
                            let failure = AttemptFailure::silent(side, idle_timeout);
                            self.act(now, vec![AttemptAction::Fail(failure)]);
                        }
                    }
                }
            }
        }
    }

    /// Performs the attempt's actions, up to the next tokens to deliver.
    fn act(&mut self, now: Instant, actions: Vec<AttemptAction>) {
        let is_complete = self.is_complete();
        let RequestCoreState::Attempting(attempt) = &mut self.state else { return };
        attempt.restart_timers(now);
        attempt.actions.extend(actions);
        while !attempt.is_emitting {
            match attempt.actions.pop_front() {
                None => return,
                Some(AttemptAction::Admitted) => {
                    if self.recovery.admitted() {
                        self.outputs.push_back(RequestOutput::StopWaiting);
                    }
                }
                Some(AttemptAction::Emit { by, first_index, tokens }) => {
                    let hand_over_gap = match by {
                        AttemptSide::Prefill => {
                            attempt.token_0_at = Some(now);
                            None
                        }
                        AttemptSide::Decode => attempt.token_0_at.take().map(|at| now - at),
                    };
                    attempt.is_emitting = true;
                    self.outputs.push_back(RequestOutput::Emit {
                        first_index,
                        tokens,
                        hand_over_gap,
                    });
                }
                Some(AttemptAction::Delivered { elapsed }) => {
                    self.outputs.push_back(RequestOutput::Delivered { elapsed });
                }
                Some(AttemptAction::DropPrefill) => {
                    self.outputs.push_back(RequestOutput::DropPrefillCall);
                }
                Some(AttemptAction::Finish(reason)) => return self.complete(reason),
                // The client has every token, so the failure does not matter.
                Some(AttemptAction::Fail(_)) if is_complete => {
                    return self.complete(self.reason_without_node());
                }
                // The emitted tokens complete the grammar: an earlier attempt failed after its last
                // token.
                Some(AttemptAction::Fail(failure))
                    if failure.cause == FailureCause::AnswerComplete
                        && self.spec.grammar.is_some()
                        && self.emitted.next_index() > 0 =>
                {
                    return self.finish(AttemptOutcome::AlreadyComplete, FinishReason::Stop);
                }
                Some(AttemptAction::Fail(failure)) => return self.fail_attempt(now, failure),
            }
        }
    }

    /// Returns whether the client has every token of the answer. The nodes may still send events.
    fn is_complete(&self) -> bool {
        self.has_stopped || self.emitted.is_full()
    }

    /// Returns the finish reason of a complete answer whose node did not report one.
    fn reason_without_node(&self) -> FinishReason {
        if self.has_stopped { FinishReason::Stop } else { FinishReason::Length }
    }

    fn pick(&mut self) {
        self.state = RequestCoreState::Picking;
        self.outputs.push_back(RequestOutput::Pick);
    }

    fn fail_attempt(&mut self, now: Instant, failure: AttemptFailure) {
        let failure = failure.before_deadline(self.spec.deadline.saturating_duration_since(now));
        let ended = self.end_attempt(AttemptOutcome::Failed(failure.clone()));
        let attempt = ended.expect("only an open attempt fails");
        let prefill = attempt.prefill.as_ref().map(|node| node.epoch);
        if self.emitted.next_index() > attempt.state.first_index() {
            self.recovery.progressed();
            self.was_paused = false;
        }
        self.was_paused |= failure.cause == FailureCause::SlowReader;
        let next = self.recovery.failed(failure, prefill, attempt.decode.epoch, now);
        self.follow(now, next, None);
    }

    fn follow(&mut self, now: Instant, next: NextStep, retry_at: Option<Instant>) {
        match next {
            NextStep::Retry => self.pick(),
            NextStep::RetryAfter(wait) => {
                self.state = RequestCoreState::WaitingToRetry { pick_at: now + wait };
            }
            NextStep::WaitForTurn => {
                self.state = RequestCoreState::WaitingForTurn { retry_at };
                self.outputs.push_back(RequestOutput::WaitForTurn);
            }
            NextStep::WaitForNode { waited } => {
                let (min, max) = PICK_AGAIN_ABSENT;
                self.state = RequestCoreState::WaitingForNode {
                    pick_at: now + (waited / 4).clamp(min, max),
                };
                self.outputs.push_back(RequestOutput::WaitForNode);
            }
            NextStep::GiveUp(reason) => self.fail(reason),
        }
    }

    fn complete(&mut self, reason: FinishReason) {
        let outcome = match reason {
            FinishReason::Abort => AttemptOutcome::Aborted,
            _ => AttemptOutcome::Complete,
        };
        self.finish(outcome, reason);
    }

    fn finish(&mut self, outcome: AttemptOutcome, reason: FinishReason) {
        self.end_attempt(outcome);
        self.state = RequestCoreState::Ended;
        self.outputs.push_back(RequestOutput::Finish(FinishedAnswer {
            reason,
            prompt_tokens: self.spec.prompt_tokens(),
            cached_tokens: self.cached_tokens.unwrap_or(0).min(self.spec.prompt_tokens()),
            hand_over: self.stats.clone(),
        }));
    }

    fn expire(&mut self, now: Instant) {
        let reason = match self.state {
            RequestCoreState::Ended => return,
            RequestCoreState::WaitingForNode { .. } => self.recovery.no_decode_node(now),
            _ => GiveUp::Deadline,
        };
        self.end_attempt(AttemptOutcome::Cancelled);
        self.fail(reason);
    }

    fn fail(&mut self, reason: GiveUp) {
        self.state = RequestCoreState::Ended;
        self.outputs.push_back(RequestOutput::Fail(reason));
    }

    /// Ends the open attempt, if one is open, and returns it.
    fn end_attempt(&mut self, outcome: AttemptOutcome) -> Option<OpenAttempt> {
        let state = std::mem::replace(&mut self.state, RequestCoreState::Picking);
        let RequestCoreState::Attempting(attempt) = state else {
            self.state = state;
            return None;
        };
        let has_progressed = self.emitted.next_index() > attempt.state.first_index();
        if self.identity.is_none() && has_progressed {
            self.identity = Some(attempt.decode.identity.clone());
        }
        let stats = attempt.state.stats();
        self.stats.kv_bytes += stats.kv_bytes;
        if stats.kv_bytes > 0 {
            self.stats.transfer_us = stats.transfer_us;
        }
        if has_progressed || outcome == AttemptOutcome::Complete {
            self.cached_tokens.get_or_insert(stats.cached_tokens);
        }
        self.outputs.push_back(RequestOutput::EndAttempt(EndedAttempt { outcome, stats }));
        Some(*attempt)
    }
}

/// Returns the node as its peers receive it.
pub fn peer(node: &NodeRecord) -> Peer {
    Peer {
        node_id: node.node_id.to_string(),
        epoch: Bytes::copy_from_slice(&node.epoch.to_bytes()),
        control_endpoint: node.control_endpoint.clone(),
        tag: Bytes::copy_from_slice(&node.peer_tag),
    }
}
