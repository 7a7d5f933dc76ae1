//! The attempts on nodes, from their pick to their release.

use std::time::Instant;

use proto::ids::TransferId;

use super::{
    Assignment, AssignmentId, Directory, Forecast, Health, NodeKey, candidate::AttemptLoad,
    member::UnreportedAttempt, milliseconds, select::NodeChoice,
};

/// Step size of the estimate of the router's overhead, as a fraction of the overhead.
const OVERHEAD_SHARE: f64 = 1.0 / 16.0;
/// Offset that lets the overhead grow from zero, in milliseconds.
const OVERHEAD_MS: f64 = 1.0;

impl Directory {
    /// Handles the first token of an attempt: updates the estimated overhead that predictions leave
    /// out, such as RPCs and the reservation. `assignment`: the decode node's. All options have the
    /// same overhead, so the estimate changes no choice.
    pub fn first_token(&mut self, now: Instant, assignment: AssignmentId) {
        let Some(assigned) = self.assignments.get_mut(&assignment) else { return };
        let Some(Forecast { at, ttft_ms }) = assigned.forecast.take() else { return };
        let taken_ms = milliseconds(now.saturating_duration_since(at)).max(1e-3);
        // Relative error: the error of a long time to first token comes mostly from the queue, not
        // from the overhead.
        let error = ((taken_ms - ttft_ms) / taken_ms).max(-1.0);
        let learnt_ms = OVERHEAD_SHARE * error * (self.overhead_ms + OVERHEAD_MS);
        self.overhead_ms = (self.overhead_ms + learnt_ms).max(0.0);
    }

    /// Handles the acceptance of an attempt by its node.
    pub fn accepted(&mut self, assignment: AssignmentId) {
        let Some(key) = self.node_of(assignment) else { return };
        let member = self.member(key);
        member.reset_busy();
        if let Some(attempt) = member.unseen.get_mut(&assignment) {
            attempt.accepted = true;
        }
    }

    /// Returns the time of the last load or cache change that the attempt's node reported.
    pub fn changed_at(&self, assignment: AssignmentId) -> Option<Instant> {
        self.members.get(&self.node_of(assignment)?)?.changed_at
    }

    /// Handles Busy, and releases the attempt.
    pub fn busy(&mut self, now: Instant, assignment: AssignmentId) {
        let Some(key) = self.node_of(assignment) else { return };
        let member = self.members.get_mut(&key).expect("every assignment has its member");
        member.busy(now, &mut self.jitter);
        self.release(assignment);
    }

    /// Releases an attempt. A second release, or one after the process was replaced, has no effect.
    pub fn release(&mut self, assignment: AssignmentId) {
        let Some(assigned) = self.assignments.remove(&assignment) else { return };
        self.breakers_released(assigned.node, assignment);
        let member = self.member(assigned.node);
        member.unseen.remove(&assignment);
        member.in_flight -= 1;
        self.check_member(assigned.node);
    }

    pub(super) fn node_of(&self, assignment: AssignmentId) -> Option<NodeKey> {
        self.assignments.get(&assignment).map(|assigned| assigned.node)
    }

    /// Returns the node whose call lost its connection; `None` if the node is not up, or a later
    /// stream shows that the node has another connection since.
    pub(super) fn node_of_lost_call(&self, assignment: AssignmentId) -> Option<NodeKey> {
        let Assignment { node, stream, .. } = *self.assignments.get(&assignment)?;
        let member = self.members.get(&node).filter(|member| member.health == Health::Up)?;
        member.stream.as_ref().is_some_and(|current| current.id == stream).then_some(node)
    }

    pub(super) fn assign(
        &mut self,
        now: Instant,
        transfer_id: TransferId,
        (key, need): (NodeKey, AttemptLoad),
        prefills: bool,
        forecast: Option<Forecast>,
    ) -> NodeChoice {
        let number = self.next();
        let assignment = AssignmentId(number);
        let member = self.members.get_mut(&key).expect("the node was just chosen");
        let seen = member.seen.as_ref().expect("an eligible node was seen");
        let choice = NodeChoice {
            address: member.address.clone(),
            record: seen.record.clone(),
            assignment,
            cached_tokens: need.cached_tokens,
        };
        let uncached_tokens = need.uncached_tokens;
        let unseen = UnreportedAttempt {
            prompt_tokens: if prefills { uncached_tokens } else { 0 },
            computed_tokens: need.cached_tokens.into(),
            blocks: need.blocks,
            since: now,
            transfer_id,
            accepted: false,
        };
        member.unseen.insert(assignment, unseen);
        member.in_flight += 1;
        member.breaker.assigned(now, assignment);
        member.last_picked = number;
        let stream = member.stream.as_ref().expect("an eligible node is up").id;
        let assigned = Assignment { node: key, stream, uncached_tokens, forecast };
        self.assignments.insert(assignment, assigned);
        self.check_member(key);
        choice
    }
}
