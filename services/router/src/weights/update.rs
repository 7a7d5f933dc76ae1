//! One update: its coordinator, the calls to its nodes, and its report.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::Epoch;
use proto::v1::{InFlight, WeightsTransport};
use tokio::task::JoinSet;
use weight_transfer::{
    Coordinator, CoordinatorError, CoordinatorPhase, UpdateEnd, UpdateId, UpdateState,
    WeightVersion,
};

use super::{NewUpdate, ParticipantView, UpdateTransport, UpdateView, targets::TargetWeights};
use crate::nodes::{CopyFrom, Nodes, UpdateRequest, WeightNode, WeightsAnswer};

/// Minimum time between two calls to a node whose state has not changed.
const POLL_MIN: Duration = Duration::from_millis(20);
/// [`POLL_MIN`] while nodes prepare. A node that overwrites its weights in place serves nothing
/// from the first byte to the commit, which may take less than 50 ms.
const PREPARING_POLL_MIN: Duration = Duration::from_millis(5);
/// Maximum time between two calls: after a silence of 2 s a node asks its peers for the outcome.
const POLL_MAX: Duration = Duration::from_millis(500);
/// Before the commit, the time between two calls is 1/16 of the update's age.
const POLL_SHARE: u32 = 16;
/// Time by which the nodes' deadline is later than the coordinator's, so that a commit at the
/// deadline reaches the nodes.
const NODE_GRACE: Duration = Duration::from_secs(10);

/// Calls to nodes in flight: update, index of the node, and answer.
pub(super) type PendingCalls = JoinSet<(UpdateId, usize, WeightsAnswer)>;

pub(super) struct ModelUpdate {
    request: Arc<UpdateRequest>,
    pub model: Arc<str>,
    nodes: Arc<[WeightNode]>,
    coordinator: Coordinator,
    began: Instant,
    deadline: Instant,
    /// When the next call to each node is due; `None` while a call is in flight.
    due: Vec<Option<Instant>>,
    paused: Vec<Duration>,
    source: UpdateSource,
    /// A catch-up: commits only these weights.
    expected: Option<WeightVersion>,
}

/// Source of the weights of an update.
#[derive(Clone, Debug)]
pub(super) enum UpdateSource {
    Path,
    /// The node with this index reads the path, and the others copy from it.
    Seed(usize),
    /// A node that does not take part.
    Peer(CopyFrom),
}

impl ModelUpdate {
    pub(super) fn new(
        now: Instant,
        id: UpdateId,
        new: NewUpdate,
        nodes: Vec<WeightNode>,
        source: UpdateSource,
    ) -> Self {
        let names = nodes.iter().map(|node| node.id.clone()).collect();
        let deadline = now + new.timeout;
        let coordinator = Coordinator::new(now, id, names, deadline, new.commits);
        Self {
            request: Arc::new(UpdateRequest {
                id,
                label: new.label,
                path: new.path,
                in_flight: new.in_flight,
                transport: match new.transport {
                    UpdateTransport::Disk | UpdateTransport::Tcp { .. } => WeightsTransport::Files,
                    UpdateTransport::Ipc => WeightsTransport::Ipc,
                    UpdateTransport::Nccl => WeightsTransport::Nccl,
                },
            }),
            model: new.model,
            due: vec![Some(now); nodes.len()],
            paused: vec![Duration::ZERO; nodes.len()],
            nodes: nodes.into(),
            coordinator: match source {
                UpdateSource::Seed(seed) => coordinator.with_seed(seed),
                _ => coordinator,
            },
            began: now,
            deadline,
            source,
            expected: None,
        }
    }

    /// Returns an update of one node that missed an update.
    pub(super) fn catch_up(
        now: Instant,
        id: UpdateId,
        model: Arc<str>,
        target: TargetWeights,
        node: WeightNode,
        source: UpdateSource,
    ) -> Self {
        let (names, deadline) = (vec![node.id.clone()], now + target.timeout);
        let coordinator = Coordinator::new(now, id, names, deadline, false);
        Self {
            request: Arc::new(UpdateRequest {
                id,
                label: target.label,
                path: target.path,
                in_flight: target.in_flight,
                transport: WeightsTransport::Files,
            }),
            model,
            due: vec![Some(now)],
            paused: vec![Duration::ZERO],
            nodes: [node].into(),
            coordinator,
            began: now,
            deadline: now + target.timeout,
            source,
            expected: Some(target.version),
        }
    }

    pub(super) fn id(&self) -> UpdateId {
        self.request.id
    }

    pub(super) fn nodes(&self) -> &[WeightNode] {
        &self.nodes
    }

    pub(super) fn has(&self, node: Epoch) -> bool {
        self.nodes.iter().any(|it| it.epoch == node)
    }

    pub(super) fn phase(&self) -> &CoordinatorPhase {
        self.coordinator.phase()
    }

    pub(super) fn is_over(&self) -> bool {
        self.coordinator.is_over()
    }

    pub(super) fn in_flight(&self) -> InFlight {
        self.request.in_flight
    }

    pub(super) fn transport(&self) -> WeightsTransport {
        self.request.transport
    }

    /// Returns the path for logs and reports, without the token that keeps strangers out of a
    /// broadcast.
    pub(super) fn shown_path(&self) -> &str {
        let path = self.request.path.as_str();
        match self.request.transport {
            WeightsTransport::Nccl => path.split_once('/').map_or(path, |(address, _)| address),
            WeightsTransport::Files | WeightsTransport::Ipc => path,
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.deadline - self.began
    }

    pub(super) fn commit(&mut self, now: Instant) -> Result<(), CoordinatorError> {
        self.coordinator.commit(now)?;
        self.call_now(now);
        Ok(())
    }

    pub(super) fn abort(&mut self, now: Instant, reason: &str) -> Result<(), CoordinatorError> {
        self.coordinator.abort(now, reason)?;
        self.call_now(now);
        Ok(())
    }

    pub(super) fn answered(&mut self, now: Instant, node: usize, answer: WeightsAnswer) {
        self.due[node] = Some(now + self.poll_interval(now));
        self.paused[node] = answer.paused;
        let before = self.phase().clone();
        let was_prepared = self.coordinator.prepared(node).is_some();
        self.coordinator.handle(now, node, answer.reply);
        if let (CoordinatorPhase::Prepared(version), Some(expected)) =
            (self.phase().clone(), self.expected)
        {
            // A catch-up may not decide which weights the cluster has.
            let outcome = match version == expected {
                true => self.coordinator.commit(now),
                false => self.coordinator.abort(now, &format!(
                    "the weights at the path have changed: weight_version {version}; expected {expected}"
                )),
            };
            debug_assert!(outcome.is_ok(), "a prepared update can be committed and aborted");
        }
        // Nodes that wait for a seed begin when it is prepared.
        let is_prepared = self.coordinator.prepared(node).is_some();
        if *self.phase() != before || is_prepared && !was_prepared {
            self.call_now(now);
        }
    }

    pub(super) fn on_deadline(&mut self, now: Instant) {
        if self.coordinator.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.coordinator.on_deadline(now);
            self.call_now(now);
        }
    }

    /// Returns when a call or the deadline is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.due.iter().flatten().copied().chain(self.coordinator.next_deadline()).min()
    }

    /// Makes the calls that are due, except to nodes that are not free.
    pub(super) fn call_due(
        &mut self,
        now: Instant,
        nodes: &Nodes,
        calls: &mut PendingCalls,
        is_free: impl Fn(&WeightNode) -> bool,
    ) {
        for node in 0..self.nodes.len() {
            if self.due[node].is_none_or(|due| due > now) {
                continue;
            }
            let call = self.coordinator.call(node).filter(|_| is_free(&self.nodes[node]));
            let Some(call) = call else {
                // Another node or update may make a call necessary.
                self.due[node] = Some(now + POLL_MIN);
                continue;
            };
            self.due[node] = None;
            let (nodes, participants) = (nodes.clone(), self.nodes.clone());
            let (request, from) = (self.request.clone(), self.copy_from(node));
            let remaining = self.deadline.saturating_duration_since(now) + NODE_GRACE;
            calls.spawn(async move {
                let target = &participants[node];
                let from = from.as_ref();
                let answer =
                    nodes.call_weights(target, &participants, &request, from, call, remaining);
                (request.id, node, answer.await)
            });
        }
    }

    /// Returns the time until the next call to a node. It grows with the update's age, so that the
    /// end of a short update is noticed at once and a long update costs few calls. The commit is
    /// short.
    fn poll_interval(&self, now: Instant) -> Duration {
        match self.phase() {
            CoordinatorPhase::Committing(_) => POLL_MIN,
            _ => (self.age(now) / POLL_SHARE).clamp(PREPARING_POLL_MIN, POLL_MAX),
        }
    }

    /// Returns the node from which this node copies the weights; `None`: it reads the path.
    fn copy_from(&self, node: usize) -> Option<CopyFrom> {
        match &self.source {
            UpdateSource::Path => None,
            UpdateSource::Seed(seed) if *seed == node => None,
            UpdateSource::Seed(seed) => {
                let version = self.coordinator.prepared(*seed)?;
                Some(CopyFrom { node: self.nodes[*seed].clone(), version })
            }
            UpdateSource::Peer(from) => Some(from.clone()),
        }
    }

    /// Makes a call to every node that has no call in flight.
    fn call_now(&mut self, now: Instant) {
        self.due.iter_mut().flatten().for_each(|due| *due = now);
    }

    /// Returns the time since the update began.
    pub(super) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.began)
    }

    /// Returns the time for which each node that has committed ran no step.
    pub(super) fn pauses(&self) -> impl Iterator<Item = Duration> {
        let states = self.coordinator.states().zip(&self.paused);
        states.filter(|((_, state), _)| is_committed(*state)).map(|(_, paused)| *paused)
    }

    pub(super) fn view(&self) -> UpdateView {
        let name = |node: usize| self.nodes[node].id.clone();
        let (phase, version, reason, missed) = match self.phase() {
            CoordinatorPhase::Preparing => ("preparing", None, None, Vec::new()),
            CoordinatorPhase::Prepared(version) => ("prepared", Some(version), None, Vec::new()),
            CoordinatorPhase::Committing(version) => {
                ("committing", Some(version), None, Vec::new())
            }
            CoordinatorPhase::Committed { version, missed } => {
                let missed = missed.iter().copied().map(name).collect();
                ("committed", Some(version), None, missed)
            }
            CoordinatorPhase::Aborted { reason } => {
                // The next update can begin once the nodes know.
                let phase = if self.is_over() { "aborted" } else { "aborting" };
                (phase, None, Some(reason.clone()), Vec::new())
            }
        };
        let nodes = self.coordinator.states().zip(&self.paused).map(|((node, state), paused)| {
            ParticipantView {
                node: node.to_owned(),
                state: match state {
                    None => "unknown",
                    Some(UpdateState::Receiving) => "receiving",
                    Some(UpdateState::Prepared(_)) => "prepared",
                    Some(UpdateState::Installing(_)) => "installing",
                    Some(UpdateState::Ended(UpdateEnd::Committed(_))) => "committed",
                    Some(UpdateState::Ended(UpdateEnd::Aborted { .. })) => "aborted",
                },
                paused_ms: is_committed(state).then(|| paused.as_micros() as f64 / 1e3),
            }
        });
        UpdateView {
            id: self.request.id.to_string(),
            label: self.request.label.clone(),
            path: self.shown_path().to_owned(),
            model: self.model.to_string(),
            phase,
            weight_version: version.map(ToString::to_string),
            reason,
            missed,
            nodes: nodes.collect(),
        }
    }
}

fn is_committed(state: Option<&UpdateState>) -> bool {
    matches!(state, Some(UpdateState::Ended(UpdateEnd::Committed(_))))
}

#[cfg(test)]
mod tests {
    use weight_transfer::NodeReply;

    use proto::v1::PauseState;

    use super::*;

    fn node(number: u128) -> WeightNode {
        WeightNode {
            id: number.to_string(),
            role: "decode",
            epoch: Epoch(number),
            grpc: String::new(),
            model: "m".into(),
            version: WeightVersion::LOADED,
            pause: PauseState::None,
        }
    }

    #[test]
    fn catch_up_treats_requests_in_flight_as_the_update_did() {
        let target = TargetWeights {
            label: String::new(),
            path: "/new".into(),
            version: WeightVersion(70),
            timeout: Duration::from_secs(300),
            in_flight: InFlight::KeepKv,
        };
        let (now, id) = (Instant::now(), UpdateId(7));
        let update =
            ModelUpdate::catch_up(now, id, "m".into(), target, node(1), UpdateSource::Path);
        assert_eq!(update.request.in_flight, InFlight::KeepKv);
    }

    #[test]
    fn report_has_the_path_without_the_token_of_a_trainer() {
        for (transport, path, shown) in [
            (UpdateTransport::Nccl, "10.0.0.7:5000/secret", "10.0.0.7:5000"),
            (UpdateTransport::Ipc, "/run/trainer.sock", "/run/trainer.sock"),
            (UpdateTransport::Disk, "/new/model", "/new/model"),
        ] {
            let new = NewUpdate {
                model: "m".into(),
                label: String::new(),
                path: path.into(),
                timeout: Duration::from_secs(300),
                commits: true,
                transport,
                in_flight: InFlight::Recompute,
            };
            let nodes = vec![node(1)];
            let update =
                ModelUpdate::new(Instant::now(), UpdateId(7), new, nodes, UpdateSource::Path);
            assert_eq!(update.view().path, shown);
            assert_eq!(update.request.path, path, "the node gets the token");
        }
    }

    #[test]
    fn calls_become_rarer_until_the_commit_and_a_prepared_seed_starts_the_others_at_once() {
        let mut now = Instant::now();
        let new = NewUpdate {
            model: "m".into(),
            label: String::new(),
            path: "/new".into(),
            timeout: Duration::from_secs(300),
            commits: true,
            transport: UpdateTransport::Disk,
            in_flight: InFlight::Recompute,
        };
        let source = UpdateSource::Seed(0);
        let mut update = ModelUpdate::new(now, UpdateId(7), new, vec![node(1), node(2)], source);
        let answer =
            |state| WeightsAnswer { reply: NodeReply::State(Some(state)), paused: Duration::ZERO };
        let mut calls = 0;
        while now < update.began + Duration::from_secs(60) {
            update.answered(now, 0, answer(UpdateState::Receiving));
            now = update.due[0].unwrap();
            calls += 1;
        }
        assert!(calls < 200, "{calls} calls within a minute");
        update.due[1] = Some(now + POLL_MAX);
        let version = WeightVersion(70);
        update.answered(now, 0, answer(UpdateState::Prepared(version)));
        assert_eq!(update.due[1], Some(now));
        update.answered(now, 1, answer(UpdateState::Prepared(version)));
        update.answered(now, 1, answer(UpdateState::Installing(version)));
        assert_eq!(update.due[1], Some(now + POLL_MIN));
    }
}
