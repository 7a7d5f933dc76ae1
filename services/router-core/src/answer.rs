//! One answer: its request core, composed with what the answer holds of the state that all requests
//! share.

use std::{sync::Arc, time::Instant};

use cluster::{Considered, NoNode, NodeChoice, NodeRecord};
use proto::{
    ids::TransferId,
    v1::{DecodeEvent, PrefillEvent, Token},
};

use crate::{
    admission::Overload,
    fair_queue::{
        Charge, ChargeEnd, Flow, PassReason, SessionTurn, StartLimit, WaitLimits, WaitRequest,
    },
    request_core::{
        AnswerSpec, AttemptCalls, AttemptOutcome, AttemptSide, CallError, EndedAttempt,
        FinishedAnswer, GiveUp, RecoveryPolicy, RequestCore, RequestOutput, StopCause,
    },
    router::{AnswerId, RouterCore},
};

/// Access to the router core that all answers share: a lock in a router, a reference in a
/// simulation.
pub trait SharedCore {
    fn with<T>(&mut self, work: impl FnOnce(&mut RouterCore) -> T) -> T;
}

impl SharedCore for RouterCore {
    fn with<T>(&mut self, work: impl FnOnce(&mut RouterCore) -> T) -> T {
        work(self)
    }
}

/// The nodes of an attempt, from the pick to the release.
#[derive(Clone, Debug)]
pub(crate) struct AttemptNodes {
    pub(crate) decode: NodeChoice,
    /// `None`: the decode node prefills the prompt, or the prefill node is released.
    pub(crate) prefill: Option<NodeChoice>,
}

impl AttemptNodes {
    /// Returns the node of a failure's side: the decode node, too, if it prefilled the prompt.
    pub(crate) fn of(&self, side: AttemptSide) -> &NodeChoice {
        match (side, &self.prefill) {
            (AttemptSide::Prefill, Some(prefill)) => prefill,
            (AttemptSide::Prefill, None) | (AttemptSide::Decode, _) => &self.decode,
        }
    }
}

/// A place among the answers that wait for a node.
#[derive(Debug)]
pub(crate) struct WaitingPlace {
    pub(crate) id: AnswerId,
    /// Limit that applied when the answer joined the queue; `None` outside of the queue.
    pub(crate) queued: Option<StartLimit>,
}

/// An attempt that begins: its calls, and the choice that led to its nodes.
#[derive(Debug)]
pub struct StartedAttempt {
    pub calls: AttemptCalls,
    pub decode: PickedNode,
    /// `None`: the decode node prefills the prompt.
    pub prefill: Option<PickedNode>,
    /// Predicted time from the pick to the first token.
    pub ttft: Option<std::time::Duration>,
    pub considered: Considered,
}

/// A node that an attempt uses.
#[derive(Clone, Debug)]
pub struct PickedNode {
    pub address: cluster::NodeAddress,
    pub record: Arc<NodeRecord>,
    /// Number of prompt tokens that the router expects in the cache of the node.
    pub cached_tokens: u32,
}

impl From<&NodeChoice> for PickedNode {
    fn from(choice: &NodeChoice) -> Self {
        Self {
            address: choice.address.clone(),
            record: choice.record.clone(),
            cached_tokens: choice.cached_tokens,
        }
    }
}

/// An operation for the owner of an answer to perform.
#[derive(Debug)]
pub enum AnswerOutput {
    /// Call [`AnswerCore::pick`] with a transfer id that no other attempt has.
    Pick,
    /// Drop the Prefill call, and keep the Decode call.
    DropPrefillCall,
    /// The attempt is over: drop its calls. `failed_node`: the node on the side of a failure.
    EndAttempt { ended: EndedAttempt, failed_node: Option<Arc<NodeRecord>>, has_prefill: bool },
    /// Deliver these new tokens to the client, then call [`AnswerCore::handle_emitted`].
    Emit {
        first_index: u32,
        tokens: Vec<Token>,
        /// Time since token 0, with the decode node's first token.
        hand_over_gap: Option<std::time::Duration>,
    },
    /// The answer is complete.
    Finish(FinishedAnswer),
    /// The answer failed. `retry_after_s`: predicted time until the answers that wait are served.
    Fail { reason: GiveUp, retry_after_s: u32 },
    /// The answer could not start in time, or too many answers wait.
    Refuse(Overload),
}

/// The open attempt of an answer.
#[derive(Debug)]
struct ChargedAttempt {
    nodes: AttemptNodes,
    charge: Charge,
}

/// One answer, with what it holds of the router core: the turn of its session, a place among the
/// waiting answers, the nodes of its attempt and the charge for it. [`Self::end`] returns all of
/// them.
#[derive(Debug)]
pub struct AnswerCore {
    id: AnswerId,
    model: Arc<str>,
    flow: Flow,
    /// Maximum wait for a free node.
    wait_max: std::time::Duration,
    deadline: Instant,
    request: RequestCore,
    /// The turn of the session, until the answer ends.
    turn: Option<SessionTurn<()>>,
    place: Option<WaitingPlace>,
    /// Reason to report if the next turn passes to other answers.
    pass: PassReason,
    attempt: Option<ChargedAttempt>,
    /// The ended attempt, until the owner has dropped its calls.
    ended_attempt: Option<(ChargedAttempt, ChargeEnd)>,
}

impl AnswerCore {
    /// Begins an answer of an admitted request.
    pub fn start(
        now: Instant,
        shared: &mut impl SharedCore,
        flow: Flow,
        spec: AnswerSpec,
        policy: RecoveryPolicy,
    ) -> Self {
        let (id, turn, is_queued) = shared.with(|router| {
            router.handle_arrival(now, &spec.model, &flow.name, spec.session_identity())
        });
        let (model, deadline) = (spec.model.clone(), spec.deadline);
        let mut request = RequestCore::new(spec, policy);
        request.start(now, is_queued);
        Self {
            id,
            model,
            flow,
            wait_max: policy.busy_timeout,
            deadline,
            request,
            turn: Some(turn),
            place: None,
            pass: PassReason::default(),
            attempt: None,
            ended_attempt: None,
        }
    }

    pub fn id(&self) -> AnswerId {
        self.id
    }

    pub fn request(&self) -> &RequestCore {
        &self.request
    }

    /// Returns whether the answer has a place among the waiting answers.
    pub fn is_waiting(&self) -> bool {
        self.place.is_some()
    }

    /// Returns the next action for the owner, who has performed the last one. Performing it may add
    /// more. Decisions that need the state of all requests are made here.
    pub fn poll_output(
        &mut self,
        now: Instant,
        shared: &mut impl SharedCore,
    ) -> Option<AnswerOutput> {
        // The calls of the ended attempt are dropped, so the next answer finds the nodes free.
        if let Some((ChargedAttempt { nodes, charge }, end)) = self.ended_attempt.take() {
            shared.with(|router| router.release_attempt(now, &self.model, &nodes, &charge, end));
        }
        while let Some(output) = self.request.poll_output() {
            let output = self.perform(now, shared, output);
            if output.is_some() {
                return output;
            }
        }
        None
    }

    /// Performs an output of the request core, up to what only the owner can do.
    fn perform(
        &mut self,
        now: Instant,
        shared: &mut impl SharedCore,
        output: RequestOutput,
    ) -> Option<AnswerOutput> {
        match output {
            RequestOutput::Pick => return Some(AnswerOutput::Pick),
            RequestOutput::DropPrefillCall => {
                let nodes = self.attempt.as_mut().map(|attempt| &mut attempt.nodes);
                if let Some(prefill) = nodes.and_then(|nodes| nodes.prefill.take()) {
                    shared.with(|router| router.release(&prefill));
                }
                return Some(AnswerOutput::DropPrefillCall);
            }
            RequestOutput::Delivered { elapsed } => {
                if let Some(ChargedAttempt { nodes, .. }) = &self.attempt {
                    shared.with(|router| router.handle_delivered(now, nodes, elapsed));
                }
            }
            RequestOutput::Served => {
                if let Some(ChargedAttempt { nodes, .. }) = &self.attempt {
                    shared.with(|router| router.handle_served(nodes));
                }
            }
            RequestOutput::EndAttempt(ended) => return self.end_attempt(now, shared, ended),
            RequestOutput::Emit { first_index, tokens, hand_over_gap } => {
                if let (0, Some(ChargedAttempt { nodes, .. })) = (first_index, &self.attempt) {
                    shared.with(|router| router.handle_first_token(now, nodes));
                }
                return Some(AnswerOutput::Emit { first_index, tokens, hand_over_gap });
            }
            RequestOutput::WaitForTurn => {
                if let Err(overload) = self.wait_for_turn(now, shared) {
                    self.request.handle_client_left();
                    return Some(AnswerOutput::Refuse(overload));
                }
            }
            RequestOutput::RetryPassed => {
                shared.with(|router| router.retry_passed(now, &self.model))
            }
            RequestOutput::WaitForNode => {
                if let Err(overload) = self.take_place(shared) {
                    self.request.handle_client_left();
                    return Some(AnswerOutput::Refuse(overload));
                }
                self.leave_queue(now, shared);
            }
            RequestOutput::StopWaiting => self.release_place(now, shared),
            RequestOutput::Finish(finished) => {
                // The client may send the next turn as soon as it receives the end of this one.
                self.end_turn(shared, self.request.last_block());
                return Some(AnswerOutput::Finish(finished));
            }
            RequestOutput::Fail(reason) => {
                let retry_after_s = shared.with(|router| router.retry_after_s(&self.model));
                return Some(AnswerOutput::Fail { reason, retry_after_s });
            }
        }
        None
    }

    /// Picks nodes and returns the calls of an attempt. If no node takes the answer, the answer
    /// waits.
    pub fn pick(
        &mut self,
        now: Instant,
        shared: &mut impl SharedCore,
        transfer_id: TransferId,
    ) -> Result<StartedAttempt, NoNode> {
        let requirements = self.request.requirements();
        let picked = shared
            .with(|router| router.pick(now, transfer_id, &self.flow, &self.model, requirements));
        let (picked, charge) = match picked {
            Ok(picked) => picked,
            Err(reason) => {
                self.pass = PassReason::of(&reason);
                self.request.handle_no_node(now, &reason);
                return Err(reason);
            }
        };
        self.leave_queue(now, shared);
        let cluster::Picked { decode, prefill, ttft, considered, .. } = picked;
        let records = (decode.record.clone(), prefill.as_ref().map(|node| node.record.clone()));
        let started = StartedAttempt {
            calls: self.request.handle_picked(now, transfer_id, records.0, records.1),
            decode: PickedNode::from(&decode),
            prefill: prefill.as_ref().map(PickedNode::from),
            ttft,
            considered,
        };
        let nodes = AttemptNodes { decode, prefill };
        self.attempt = Some(ChargedAttempt { nodes, charge });
        Ok(started)
    }

    fn end_attempt(
        &mut self,
        now: Instant,
        shared: &mut impl SharedCore,
        ended: EndedAttempt,
    ) -> Option<AnswerOutput> {
        let attempt = self.attempt.take()?;
        let nodes = &attempt.nodes;
        let failure = match &ended.outcome {
            AttemptOutcome::Failed(failure) => Some(failure),
            _ => None,
        };
        shared.with(|router| router.handle_attempt_ended(now, nodes, &ended.stats, failure));
        let failed_node = failure.map(|failure| nodes.of(failure.side).record.clone());
        let has_prefill = nodes.prefill.is_some();
        self.ended_attempt = Some((attempt, ended.outcome.charged_end()));
        Some(AnswerOutput::EndAttempt { ended, failed_node, has_prefill })
    }

    // Waiting.

    fn take_place(&mut self, shared: &mut impl SharedCore) -> Result<(), Overload> {
        if self.place.is_none() {
            let has_begun = self.request.outlasts_busy_nodes();
            let (model, flow) = (&self.model, &self.flow);
            let place = shared.with(|router| router.take_place(model, self.id, flow, has_begun));
            self.place = Some(place?);
        }
        Ok(())
    }

    fn wait_for_turn(
        &mut self,
        now: Instant,
        shared: &mut impl SharedCore,
    ) -> Result<(), Overload> {
        self.take_place(shared)?;
        let requirements = self.request.requirements();
        let request = WaitRequest {
            flow: self.flow.clone(),
            prompt_tokens: requirements.tokens,
            output_tokens_max: requirements.new_tokens_max,
            limits: WaitLimits::new(requirements.capacity, self.wait_max, self.deadline),
            has_begun: self.request.outlasts_busy_nodes(),
            session_since: self.turn.as_ref().and_then(SessionTurn::place).map(|place| place.at),
            priority: self.request.priority(),
        };
        let pass = std::mem::take(&mut self.pass);
        let place = self.place.as_mut().expect("a place was taken above");
        shared.with(|router| router.wait_for_turn(now, &self.model, place, &request, pass))
    }

    fn leave_queue(&mut self, now: Instant, shared: &mut impl SharedCore) {
        if let Some(place) = &mut self.place {
            shared.with(|router| router.leave_queue(now, &self.model, place));
        }
    }

    fn release_place(&mut self, now: Instant, shared: &mut impl SharedCore) {
        if let Some(place) = self.place.take() {
            let (model, flow) = (&self.model, &self.flow.name);
            shared.with(|router| router.release_place(now, model, flow, place));
        }
    }

    fn end_turn(&mut self, shared: &mut impl SharedCore, last_block: Option<u128>) {
        if let Some(turn) = self.turn.take() {
            shared.with(|router| router.end_turn(&self.model, &self.flow.name, turn, last_block));
        }
    }

    // Inputs.

    /// Handles [`RouterOutput::Wake`](crate::RouterOutput::Wake). A wake-up that comes after the
    /// answer has left the queue has no effect.
    pub fn handle_wake(&mut self, now: Instant, shared: &mut impl SharedCore) {
        let Some(WaitingPlace { id, queued }) = &mut self.place else { return };
        let Some(limit) = *queued else { return };
        match shared.with(|router| router.has_turn(&self.model, *id)) {
            Some(true) => self.request.handle_turn(),
            Some(false) => {}
            None => {
                *queued = None;
                self.request.handle_late_turn(now, limit);
            }
        }
    }

    /// Handles [`RouterOutput::NodesChanged`](crate::RouterOutput::NodesChanged).
    pub fn handle_nodes_changed(&mut self) {
        self.request.handle_nodes_changed();
    }

    /// Handles a call that the node of this side accepted: the stream is open.
    pub fn handle_accepted(&mut self, shared: &mut impl SharedCore, side: AttemptSide) {
        if let Some(ChargedAttempt { nodes, .. }) = &self.attempt {
            shared.with(|router| router.handle_accepted(nodes.of(side)));
        }
    }

    /// Handles a message of the Decode call: an event, the end of the stream, or an error.
    pub fn handle_decode(&mut self, now: Instant, message: Result<Option<DecodeEvent>, CallError>) {
        self.request.handle_decode(now, message);
    }

    /// Handles a message of the Prefill call. See [`Self::handle_decode`].
    pub fn handle_prefill(
        &mut self,
        now: Instant,
        message: Result<Option<PrefillEvent>, CallError>,
    ) {
        self.request.handle_prefill(now, message);
    }

    /// Charges tokens that are delivered to the client.
    pub fn charge_tokens(&mut self, now: Instant, count: u32) {
        if let Some(attempt) = &mut self.attempt {
            attempt.charge.emitted(now, count);
        }
    }

    /// Handles the delivery of the tokens of the last [`AnswerOutput::Emit`]. `stop` is the stop
    /// condition in them, if any.
    pub fn handle_emitted(&mut self, now: Instant, stop: Option<StopCause>) {
        self.request.handle_emitted(now, stop);
    }

    /// Handles a client that does not take the tokens of the last [`AnswerOutput::Emit`].
    pub fn handle_client_stalled(&mut self) {
        self.request.handle_client_stalled();
    }

    /// Returns when to call [`Self::handle_deadline`] if no other input comes first.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.request.next_deadline()
    }

    pub fn handle_deadline(&mut self, now: Instant, shared: &mut impl SharedCore) {
        let nodes = self.attempt.as_ref().map(|attempt| &attempt.nodes);
        if self.request.drain_check_is_due(now) {
            let requirements = self.request.requirements();
            let drain = nodes
                .and_then(|nodes| shared.with(|router| router.drain(now, nodes, &requirements)));
            self.request.handle_drain_check(now, drain);
        }
        self.request.handle_deadline(now, |side| {
            nodes.and_then(|nodes| shared.with(|router| router.changed_at(nodes, side)))
        });
    }

    /// Handles a client that disconnected, or a router that stops. The owner performs the outputs
    /// that follow, then calls [`Self::end`].
    pub fn handle_client_left(&mut self) {
        self.request.handle_client_left();
    }

    /// Returns everything that the answer holds of the router core. The owner calls it once, after
    /// the last output.
    pub fn end(&mut self, now: Instant, shared: &mut impl SharedCore) {
        debug_assert!(self.attempt.is_none() && self.ended_attempt.is_none(), "an attempt is open");
        self.release_place(now, shared);
        self.end_turn(shared, None);
    }
}
