//! The running updates of the weights: the shipped `Coordinator` of each, and its calls.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kv_transfer::api::Epoch;
use simulation_base::{Network, NetworkFaults, Random};
use weight_transfer::{
    Coordinator, CoordinatorCall, CoordinatorPhase, NodeReply, UpdateId, WeightVersion,
};

use super::plan::{Decision, UpdatePlan};
use crate::{calls::UpdatedNode, scenario::Scenario};

/// Time-out of a call.
const CALL_MAX: Duration = Duration::from_secs(2);
/// Time from the coordinator's deadline to the nodes' deadline.
const NODE_GRACE: Duration = Duration::from_secs(5);
/// Maximum delay of a message in runs in which every request must complete, so that nodes change
/// their weights at almost the same time.
const MILD_DELAY_MAX: Duration = Duration::from_millis(10);

/// A call of a coordinator to a node.
#[derive(Clone, Debug)]
pub(crate) struct UpdateCall {
    pub id: UpdateId,
    pub plan: UpdatePlan,
    /// Index of the node in the update.
    pub node: usize,
    pub host: usize,
    pub epoch: Epoch,
    pub call: CoordinatorCall,
    /// Time until the node aborts the update by itself.
    pub remaining: Duration,
    pub trainer_dies_at: Option<Instant>,
    /// The other nodes of the update.
    pub peers: Vec<Epoch>,
}

#[derive(Debug)]
pub(crate) enum UpdateEvent {
    /// The coordinator makes the calls that are due.
    Tick(UpdateId),
    /// A call reaches the process that runs on the host at this time.
    Call(Box<UpdateCall>),
    Reply {
        id: UpdateId,
        node: usize,
        reply: NodeReply,
    },
    /// The router looks for nodes that missed its committed update.
    CatchUp {
        plan: UpdatePlan,
        version: WeightVersion,
    },
}

/// A running update.
pub(crate) struct Update {
    pub id: UpdateId,
    pub plan: UpdatePlan,
    pub nodes: Vec<UpdatedNode>,
    pub coordinator: Coordinator,
    pub began: Instant,
    /// When the call in flight to each node was made.
    pub called_at: Vec<Option<Instant>>,
    /// Number of calls that began or committed the update.
    pub decisive_calls: u32,
    /// The only weights that a catch-up commits; `None` for an operator's update.
    pub expected: Option<WeightVersion>,
}

impl Update {
    /// Acts on an expired deadline and on the operator's decision once it is due.
    pub(crate) fn advance(&mut self, now: Instant) {
        if self.coordinator.next_deadline().is_some_and(|at| at <= now) {
            self.coordinator.on_deadline(now);
        }
        let commits = match (self.expected, self.plan.decision) {
            (Some(expected), _) => match *self.coordinator.phase() {
                CoordinatorPhase::Prepared(version) => version == expected,
                _ => return,
            },
            (None, Decision::Commit { after }) if now >= self.began + after => true,
            (None, Decision::Abort { after }) if now >= self.began + after => false,
            _ => return,
        };
        // The coordinator rejects a commit before every node is prepared, and an abort after the
        // commit.
        let _ = match commits {
            true => self.coordinator.commit(now),
            false => self.coordinator.abort(now, "the operator aborted it"),
        };
    }

    pub(crate) fn due_calls(&mut self, now: Instant) -> Vec<UpdateCall> {
        let mut due = Vec::new();
        for node in 0..self.nodes.len() {
            match self.called_at[node] {
                Some(at) if now < at + CALL_MAX => continue,
                Some(_) => {
                    let reason = "no answer".to_owned();
                    self.coordinator.handle(now, node, NodeReply::Unreachable { reason });
                }
                None => {}
            }
            let call = self.coordinator.call(node);
            self.called_at[node] = call.map(|_| now);
            due.extend(call.map(|call| self.call(now, node, call)));
        }
        due
    }

    fn call(&self, now: Instant, node: usize, call: CoordinatorCall) -> UpdateCall {
        let UpdatedNode { host, epoch, .. } = self.nodes[node];
        let deadline = self.began + self.plan.timeout;
        let epochs = self.nodes.iter().map(|node| node.epoch);
        UpdateCall {
            id: self.id,
            plan: self.plan,
            node,
            host,
            epoch,
            call,
            remaining: deadline.saturating_duration_since(now) + NODE_GRACE,
            trainer_dies_at: self.plan.trainer_dies_after.map(|after| self.began + after),
            peers: epochs.filter(|peer| *peer != epoch).collect(),
        }
    }
}

/// The updates of all routers.
pub(crate) struct Updates {
    pub running: Vec<Update>,
    /// Router and version of the last committed update of each model.
    pub committed: BTreeMap<usize, (usize, WeightVersion)>,
    /// The bytes that nodes of each model have used under each version.
    pub used: BTreeMap<(usize, WeightVersion), Vec<u8>>,
    pub network: Network<()>,
    pub random: Random,
}

impl Updates {
    pub(crate) fn new(seed: u64, scenario: &Scenario) -> Self {
        let mut random = Random::new(seed ^ 0x7570_6461_7465_7321);
        let faults = match scenario.severity.must_complete() {
            true => NetworkFaults::delays(scenario.network.delay_max.min(MILD_DELAY_MAX)),
            false => scenario.network,
        };
        Self {
            running: Vec::new(),
            committed: BTreeMap::new(),
            used: BTreeMap::new(),
            network: Network::new(faults, random.fork()),
            random,
        }
    }

    /// Checks after the run that no update runs, except one that still sends its commit.
    pub(crate) fn check_idle(&self) {
        for update in &self.running {
            let phase = update.coordinator.phase();
            assert!(
                matches!(phase, CoordinatorPhase::Committing(_)),
                "update {}: {phase:?}",
                update.id
            );
        }
    }
}
