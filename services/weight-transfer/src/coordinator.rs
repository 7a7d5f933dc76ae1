//! State machine of the process that runs an update over several nodes.
//!
//! `Preparing → Prepared → Committing → Committed`, or `Aborted` before the decision to commit. The
//! decision needs every node prepared with one version. After the decision, [`Coordinator::call`]
//! returns the commit for each node until the node has answered or the deadline has passed. The
//! outcome names the nodes that missed the commit.
//!
//! When two coordinators begin at once, the update with the lower id wins. Its coordinator retries
//! nodes that run the other update, and the other coordinator aborts.

use std::time::{Duration, Instant};

use crate::{UpdateEnd, UpdateId, UpdateState, WeightVersion};

/// Time after which a silent node counts as lost before the commit.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// Maximum number of nodes that a reason names.
const NAMED_MAX: usize = 4;
/// Time for which a node may run another update before this update is aborted. It suffices for the
/// other coordinator to abort its update.
const BUSY_MAX: Duration = Duration::from_secs(5);
/// Time to reach every node after the decision to commit.
const COMMIT_WITHIN: Duration = Duration::from_secs(60);

/// The next call to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoordinatorCall {
    Begin,
    Status,
    Commit { version: WeightVersion },
    Abort,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CoordinatorPhase {
    /// Nodes receive the weights.
    Preparing,
    /// Every node is prepared. Waits for [`Coordinator::commit`].
    Prepared(WeightVersion),
    Committing(WeightVersion),
    /// `missed`: indices of the nodes that were not reached.
    Committed {
        version: WeightVersion,
        missed: Vec<usize>,
    },
    Aborted {
        reason: String,
    },
}

/// Outcome of a call to a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeReply {
    /// The node's state of this update; `None`: it does not know the update.
    State(Option<UpdateState>),
    /// The node runs another update and did not begin this one.
    Busy { running: UpdateId },
    /// The node rejected the call.
    Rejected { reason: String },
    /// The node did not answer. It may have received the call.
    Unreachable { reason: String },
    /// The process that took part has ended.
    Gone { reason: String },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoordinatorError {
    #[error("cannot commit: nodes still receive the weights; expected a prepared update")]
    NotPrepared,
    #[error("cannot {call}: the update was aborted: {reason}")]
    Aborted { call: &'static str, reason: String },
    #[error("cannot abort: the update is committed; expected an update before its commit")]
    Committed,
}

#[derive(Debug)]
pub struct Coordinator {
    id: UpdateId,
    phase: CoordinatorPhase,
    nodes: Vec<CoordinatedNode>,
    /// Time at which the update is aborted or, after the decision to commit, at which nodes not
    /// reached count as missed.
    deadline: Instant,
    commits_at_once: bool,
    /// The node from which the other nodes copy the weights, once it is prepared.
    seed: Option<usize>,
}

#[derive(Clone, Debug)]
struct CoordinatedNode {
    name: String,
    state: CoordinatedNodeState,
    heard_at: Instant,
    /// When the node first said that it runs another update.
    busy_since: Option<Instant>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum CoordinatedNodeState {
    /// No answer yet.
    New,
    Known(UpdateState),
    Gone,
}

impl Coordinator {
    /// Starts the update `id` over the nodes with these names. `commits_at_once`: commit as soon as
    /// every node is prepared.
    pub fn new(
        now: Instant,
        id: UpdateId,
        names: Vec<String>,
        deadline: Instant,
        commits_at_once: bool,
    ) -> Self {
        let node = |name| CoordinatedNode {
            name,
            state: CoordinatedNodeState::New,
            heard_at: now,
            busy_since: None,
        };
        let nodes = names.into_iter().map(node).collect();
        Self {
            id,
            phase: CoordinatorPhase::Preparing,
            nodes,
            deadline,
            commits_at_once,
            seed: None,
        }
    }

    /// Lets the other nodes begin only when the node `seed` is prepared.
    pub fn with_seed(self, seed: usize) -> Self {
        assert!(seed < self.nodes.len(), "the seed is one of the nodes");
        Self { seed: Some(seed), ..self }
    }

    /// Returns the version that this node has prepared.
    pub fn prepared(&self, node: usize) -> Option<WeightVersion> {
        match self.nodes[node].state {
            CoordinatedNodeState::Known(UpdateState::Prepared(version)) => Some(version),
            _ => None,
        }
    }

    pub fn phase(&self) -> &CoordinatorPhase {
        &self.phase
    }

    /// Returns the state of each node; `None` before its first answer or after its end.
    pub fn states(&self) -> impl Iterator<Item = (&str, Option<&UpdateState>)> {
        self.nodes.iter().map(|node| match &node.state {
            CoordinatedNodeState::Known(state) => (node.name.as_str(), Some(state)),
            CoordinatedNodeState::New | CoordinatedNodeState::Gone => (node.name.as_str(), None),
        })
    }

    /// Returns whether the update has ended and no node needs a call.
    pub fn is_over(&self) -> bool {
        match self.phase {
            CoordinatorPhase::Committed { .. } => true,
            CoordinatorPhase::Aborted { .. } => {
                (0..self.nodes.len()).all(|node| self.call(node).is_none())
            }
            _ => false,
        }
    }

    /// Returns the next call to this node; `None` if it needs none now.
    pub fn call(&self, node: usize) -> Option<CoordinatorCall> {
        let state = &self.nodes[node].state;
        match self.phase {
            CoordinatorPhase::Preparing | CoordinatorPhase::Prepared(_) => match state {
                CoordinatedNodeState::New => {
                    (!self.waits_for_seed(node)).then_some(CoordinatorCall::Begin)
                }
                _ => Some(CoordinatorCall::Status),
            },
            CoordinatorPhase::Committing(version) => match state {
                CoordinatedNodeState::Gone | CoordinatedNodeState::Known(UpdateState::Ended(_)) => {
                    None
                }
                _ => Some(CoordinatorCall::Commit { version }),
            },
            CoordinatorPhase::Committed { .. } => None,
            CoordinatorPhase::Aborted { .. } => match state {
                CoordinatedNodeState::Gone | CoordinatedNodeState::Known(UpdateState::Ended(_)) => {
                    None
                }
                _ => Some(CoordinatorCall::Abort),
            },
        }
    }

    fn waits_for_seed(&self, node: usize) -> bool {
        let waits = |seed| seed != node && self.prepared(seed).is_none();
        self.nodes[node].state == CoordinatedNodeState::New && self.seed.is_some_and(waits)
    }

    pub fn handle(&mut self, now: Instant, node: usize, reply: NodeReply) {
        let name = self.nodes[node].name.clone();
        match reply {
            NodeReply::State(state) => {
                self.nodes[node].heard_at = now;
                // Nodes that wait for the seed are not called, so their silence begins when the
                // seed is prepared.
                for waiting in (0..self.nodes.len())
                    .filter(|node| self.waits_for_seed(*node))
                    .collect::<Vec<_>>()
                {
                    self.nodes[waiting].heard_at = now;
                }
                // An aborted update that the node does not know needs no abort.
                let unknown = UpdateEnd::Aborted { reason: "it does not know the update".into() };
                let state = state.unwrap_or(UpdateState::Ended(unknown));
                if let UpdateState::Ended(UpdateEnd::Aborted { reason }) = &state {
                    self.fail(now, format!("node {name}: {reason}"));
                }
                self.nodes[node].state = CoordinatedNodeState::Known(state);
            }
            NodeReply::Busy { running } => {
                self.nodes[node].heard_at = now;
                let busy_since = *self.nodes[node].busy_since.get_or_insert(now);
                if running < self.id || now.saturating_duration_since(busy_since) >= BUSY_MAX {
                    self.fail(
                        now,
                        format!(
                            "node {name}: update {running} runs; expected one update at a time"
                        ),
                    );
                }
            }
            NodeReply::Rejected { reason } => {
                self.nodes[node].heard_at = now;
                self.nodes[node].state = CoordinatedNodeState::Gone;
                self.fail(now, format!("node {name}: {reason}"));
            }
            NodeReply::Gone { reason } => {
                self.nodes[node].state = CoordinatedNodeState::Gone;
                self.fail(now, format!("node {name} ended: {reason}"));
            }
            NodeReply::Unreachable { reason } => {
                if now.saturating_duration_since(self.nodes[node].heard_at) >= SILENCE_MAX {
                    self.fail(now, format!("node {name} does not answer: {reason}"));
                }
            }
        }
        self.advance(now);
    }

    /// Decides to commit. Returns `Ok` if the update is already committed.
    pub fn commit(&mut self, now: Instant) -> Result<(), CoordinatorError> {
        match &self.phase {
            CoordinatorPhase::Preparing => Err(CoordinatorError::NotPrepared),
            CoordinatorPhase::Prepared(version) => {
                self.phase = CoordinatorPhase::Committing(*version);
                self.deadline = now + COMMIT_WITHIN;
                Ok(())
            }
            CoordinatorPhase::Committing(_) | CoordinatorPhase::Committed { .. } => Ok(()),
            CoordinatorPhase::Aborted { reason } => {
                Err(CoordinatorError::Aborted { call: "commit", reason: reason.clone() })
            }
        }
    }

    /// Aborts the update unless it is committed. Returns `Ok` if the update is already aborted.
    pub fn abort(&mut self, now: Instant, reason: &str) -> Result<(), CoordinatorError> {
        match self.phase {
            CoordinatorPhase::Committing(_) | CoordinatorPhase::Committed { .. } => {
                Err(CoordinatorError::Committed)
            }
            _ => {
                self.fail(now, reason.to_owned());
                Ok(())
            }
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        match self.phase {
            CoordinatorPhase::Committed { .. } => None,
            CoordinatorPhase::Aborted { .. } if self.is_over() => None,
            _ => Some(self.deadline),
        }
    }

    pub fn on_deadline(&mut self, now: Instant) {
        if now < self.deadline {
            return;
        }
        match self.phase {
            CoordinatorPhase::Committing(version) => self.end_commit(version),
            CoordinatorPhase::Aborted { .. } => {
                self.nodes.iter_mut().for_each(|node| node.state = CoordinatedNodeState::Gone);
            }
            CoordinatorPhase::Preparing => {
                let unprepared = self.unprepared();
                self.fail(now, format!("its deadline passed while {unprepared}"));
            }
            _ => self.fail(now, "its deadline passed without a commit".to_owned()),
        }
    }

    /// Returns the nodes that are not prepared, with their states.
    fn unprepared(&self) -> String {
        let state = |node: &CoordinatedNode| match node.state {
            CoordinatedNodeState::New => Some(format!("node {} had not begun", node.name)),
            CoordinatedNodeState::Known(UpdateState::Prepared(_)) => None,
            _ => Some(format!("node {} received the weights", node.name)),
        };
        let mut all: Vec<_> = self.nodes.iter().filter_map(state).collect();
        let more = all.len().saturating_sub(NAMED_MAX);
        all.truncate(NAMED_MAX);
        let more = if more > 0 { format!(", and {more} more") } else { String::new() };
        all.join(", ") + &more
    }

    /// Aborts the update before the decision to commit; does nothing after it.
    fn fail(&mut self, now: Instant, reason: String) {
        if matches!(self.phase, CoordinatorPhase::Preparing | CoordinatorPhase::Prepared(_)) {
            self.phase = CoordinatorPhase::Aborted { reason };
            // A node that the abort does not reach aborts by itself at its own deadline.
            self.deadline = now + SILENCE_MAX;
        }
    }

    fn advance(&mut self, now: Instant) {
        match self.phase {
            CoordinatorPhase::Preparing => self.check_prepared(now),
            CoordinatorPhase::Committing(version)
                if (0..self.nodes.len()).all(|node| self.call(node).is_none()) =>
            {
                self.end_commit(version);
            }
            _ => {}
        }
    }

    fn check_prepared(&mut self, now: Instant) {
        let mut versions = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let CoordinatedNodeState::Known(UpdateState::Prepared(version)) = node.state else {
                return;
            };
            versions.push((node.name.clone(), version));
        }
        let Some((first, version)) = versions.first().cloned() else {
            return self.fail(now, "no node takes part".to_owned());
        };
        if let Some((other, differing)) = versions.iter().find(|(_, found)| *found != version) {
            let reason = format!(
                "nodes {first} and {other} read different bytes: weight_version {version} and {differing}"
            );
            return self.fail(now, reason);
        }
        self.phase = CoordinatorPhase::Prepared(version);
        if self.commits_at_once {
            self.commit(now).expect("every node is prepared");
        }
    }

    fn end_commit(&mut self, version: WeightVersion) {
        let committed =
            CoordinatedNodeState::Known(UpdateState::Ended(UpdateEnd::Committed(version)));
        let missed = self.nodes.iter().enumerate();
        let missed = missed.filter(|(_, node)| node.state != committed).map(|(node, _)| node);
        self.phase = CoordinatorPhase::Committed { version, missed: missed.collect() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: UpdateId = UpdateId(7);
    const NEW: WeightVersion = WeightVersion(70);

    fn coordinator(nodes: usize) -> (Coordinator, Instant) {
        let now = Instant::now();
        let names = (0..nodes).map(|node| format!("node-{node}")).collect();
        (Coordinator::new(now, ID, names, now + Duration::from_secs(60), false), now)
    }

    fn state(state: UpdateState) -> NodeReply {
        NodeReply::State(Some(state))
    }

    #[test]
    fn commit_needs_every_node_prepared() {
        let (mut coordinator, now) = coordinator(2);
        assert_eq!(coordinator.call(0), Some(CoordinatorCall::Begin));
        coordinator.handle(now, 0, state(UpdateState::Prepared(NEW)));
        coordinator.handle(now, 1, state(UpdateState::Receiving));
        assert_eq!(coordinator.commit(now), Err(CoordinatorError::NotPrepared));
        coordinator.handle(now, 1, state(UpdateState::Prepared(NEW)));
        coordinator.commit(now).unwrap();
        assert_eq!(coordinator.call(1), Some(CoordinatorCall::Commit { version: NEW }));
        assert_eq!(coordinator.abort(now, ""), Err(CoordinatorError::Committed));
        for node in 0..2 {
            coordinator.handle(now, node, state(UpdateState::Installing(NEW)));
            coordinator.handle(now, node, state(UpdateState::Ended(UpdateEnd::Committed(NEW))));
        }
        let done = CoordinatorPhase::Committed { version: NEW, missed: vec![] };
        assert_eq!(*coordinator.phase(), done);
    }

    #[test]
    fn update_with_the_lower_id_waits_for_a_bounded_time_and_the_other_one_aborts() {
        let busy = |running| NodeReply::Busy { running: UpdateId(running) };
        let (mut lower, mut now) = coordinator(2);
        for _ in 0..2 {
            lower.handle(now, 1, busy(8));
            assert_eq!(lower.call(1), Some(CoordinatorCall::Begin));
            assert_eq!(*lower.phase(), CoordinatorPhase::Preparing);
            now += BUSY_MAX / 2;
        }
        lower.handle(now, 1, state(UpdateState::Receiving));
        assert_eq!(lower.call(1), Some(CoordinatorCall::Status));

        let aborted = |coordinator: &Coordinator| match coordinator.phase() {
            CoordinatorPhase::Aborted { reason } => reason.clone(),
            phase => panic!("{phase:?}"),
        };
        let (mut higher, now) = coordinator(2);
        higher.handle(now, 0, busy(6));
        assert!(aborted(&higher).contains("expected one update at a time"));
        let (mut late, now) = coordinator(1);
        late.handle(now, 0, busy(8));
        late.handle(now + BUSY_MAX, 0, busy(8));
        assert!(aborted(&late).starts_with("node node-0: update 0"));
    }

    #[test]
    fn other_nodes_begin_when_the_seed_is_prepared() {
        let (coordinator, now) = coordinator(3);
        let mut coordinator = coordinator.with_seed(1);
        let calls = |coordinator: &Coordinator| [0, 1, 2].map(|node| coordinator.call(node));
        let (begin, status) = (Some(CoordinatorCall::Begin), Some(CoordinatorCall::Status));
        assert_eq!(calls(&coordinator), [None, begin, None]);
        coordinator.handle(now, 1, state(UpdateState::Receiving));
        assert_eq!(calls(&coordinator), [None, status, None]);
        coordinator.handle(now, 1, state(UpdateState::Prepared(NEW)));
        assert_eq!(calls(&coordinator), [begin, status, begin]);
        assert_eq!(coordinator.prepared(1), Some(NEW));
        coordinator.abort(now, "").unwrap();
        let abort = Some(CoordinatorCall::Abort);
        assert_eq!(calls(&coordinator), [abort; 3]);
    }

    #[test]
    fn nodes_that_read_different_bytes_abort_the_update() {
        let (mut coordinator, now) = coordinator(2);
        coordinator.handle(now, 0, state(UpdateState::Prepared(NEW)));
        coordinator.handle(now, 1, state(UpdateState::Prepared(WeightVersion(71))));
        let CoordinatorPhase::Aborted { reason } = coordinator.phase() else { panic!() };
        assert!(reason.contains("node-0 and node-1 read different bytes"), "{reason}");
        assert_eq!(coordinator.call(0), Some(CoordinatorCall::Abort));
        let aborted = || state(UpdateState::Ended(UpdateEnd::Aborted { reason: String::new() }));
        (0..2).for_each(|node| coordinator.handle(now, node, aborted()));
        assert!(coordinator.is_over());
    }

    #[test]
    fn node_that_is_lost_before_the_decision_aborts_the_update_and_later_misses_it() {
        let gone = || NodeReply::Gone { reason: "restarted".into() };
        let (mut before, now) = coordinator(2);
        before.handle(now, 0, state(UpdateState::Prepared(NEW)));
        before.handle(now, 1, gone());
        assert!(matches!(before.phase(), CoordinatorPhase::Aborted { .. }));

        let (mut after, now) = coordinator(2);
        (0..2).for_each(|node| after.handle(now, node, state(UpdateState::Prepared(NEW))));
        after.commit(now).unwrap();
        after.handle(now, 1, gone());
        after.handle(now, 0, state(UpdateState::Ended(UpdateEnd::Committed(NEW))));
        let done = CoordinatorPhase::Committed { version: NEW, missed: vec![1] };
        assert_eq!(*after.phase(), done);
    }

    #[test]
    fn silent_node_aborts_the_update_although_others_answer() {
        for seed in [None, Some(0)] {
            let (coordinator, mut now) = coordinator(2);
            let mut coordinator = Coordinator { seed, ..coordinator };
            // A node that waits for the seed is not silent.
            for _ in 0..if seed.is_some() { 20 } else { 0 } {
                now += Duration::from_secs(1);
                coordinator.handle(now, 0, state(UpdateState::Receiving));
                assert_eq!(coordinator.call(1), None);
            }
            coordinator.handle(now, 0, state(UpdateState::Prepared(NEW)));
            assert_eq!(coordinator.call(1), Some(CoordinatorCall::Begin));
            let silent_from = now;
            while *coordinator.phase() == CoordinatorPhase::Preparing {
                now += Duration::from_secs(1);
                coordinator.handle(now, 0, state(UpdateState::Prepared(NEW)));
                let reason = "no route".to_owned();
                coordinator.handle(now, 1, NodeReply::Unreachable { reason });
            }
            assert_eq!(now - silent_from, SILENCE_MAX);
            let CoordinatorPhase::Aborted { reason } = coordinator.phase() else { panic!() };
            assert_eq!(reason, "node node-1 does not answer: no route");
        }
    }

    #[test]
    fn aborted_update_waits_for_a_silent_node_only_briefly() {
        let (mut coordinator, now) = coordinator(2);
        coordinator.handle(now, 0, state(UpdateState::Receiving));
        coordinator.handle(now, 1, state(UpdateState::Receiving));
        coordinator.abort(now, "").unwrap();
        let aborted = UpdateState::Ended(UpdateEnd::Aborted { reason: String::new() });
        coordinator.handle(now, 0, state(aborted));
        assert!(!coordinator.is_over());
        assert_eq!(coordinator.next_deadline(), Some(now + SILENCE_MAX));
        coordinator.on_deadline(now + SILENCE_MAX);
        assert!(coordinator.is_over());
    }

    #[test]
    fn passed_deadline_names_the_nodes_that_are_not_prepared() {
        let (mut coordinator, now) = coordinator(7);
        coordinator.handle(now, 0, state(UpdateState::Prepared(NEW)));
        coordinator.handle(now, 1, state(UpdateState::Receiving));
        coordinator.on_deadline(coordinator.next_deadline().unwrap());
        let CoordinatorPhase::Aborted { reason } = coordinator.phase() else { panic!() };
        assert_eq!(
            reason,
            "its deadline passed while node node-1 received the weights, node node-2 had not begun, node node-3 had not \
             begun, node node-4 had not begun, and 2 more"
        );
    }

    #[test]
    fn every_phase_ends_at_its_deadline() {
        let (mut coordinator, now) = coordinator(1);
        coordinator.handle(now, 0, state(UpdateState::Receiving));
        let mut deadlines = 0;
        while let Some(deadline) = coordinator.next_deadline() {
            coordinator.on_deadline(deadline);
            deadlines += 1;
        }
        assert_eq!(deadlines, 2, "the abort, and the wait for its confirmation");
        assert!(coordinator.is_over());
    }
}
