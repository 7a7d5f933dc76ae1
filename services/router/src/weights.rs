//! Coordinates weight updates over the nodes: one update of an operator at a time, and the catch-up
//! of nodes that missed an update.
//!
//! One task owns the running updates. `update` makes the calls that the coordinator of an update
//! requests, one at a time for each node. `targets` selects the nodes that catch up. A catch-up is
//! an update of one node, so a node that fails does not stop others. An operator's update takes
//! precedence over a catch-up.

mod targets;
mod update;
mod update_metrics;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use proto::{
    ids::{NoRandomness, random_bits},
    v1::{InFlight, WeightsTransport},
};
use serde::Serialize;
use telemetry::metrics::WeightMetrics;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use weight_transfer::{
    CoordinatorCall, CoordinatorError, CoordinatorPhase, NodeReply, UpdateEnd, UpdateId,
    UpdateState,
};

use self::{
    targets::{CatchUp, TargetWeights, Targets},
    update::{ModelUpdate, PendingCalls, UpdateSource},
    update_metrics::UpdateMetrics,
};
use crate::nodes::{Nodes, OwnedTask, WeightNode, WeightsAnswer, pause_name};

/// Queued requests of operators.
const REQUESTS_MAX: usize = 16;
/// Maximum number of concurrent catch-ups. Each may copy a model from a serving node.
const CATCH_UPS_MAX: usize = 4;
/// Number of ended updates that the router reports by their ids.
const ENDED_MAX: usize = 16;
/// Interval of the search for nodes that missed an update. Also the time for nodes to report the
/// weights of an update that ended.
const CATCH_UP_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time for which a stopping router sends the outcomes of its updates to nodes.
const STOP_MAX: Duration = Duration::from_secs(5);

/// An update that an operator begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NewUpdate {
    pub model: Arc<str>,
    pub label: String,
    pub path: String,
    pub timeout: Duration,
    /// Whether the router commits as soon as every node is prepared.
    pub commits: bool,
    pub transport: UpdateTransport,
    pub in_flight: InFlight,
}

/// How the nodes obtain the weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UpdateTransport {
    /// Every node reads the path.
    Disk,
    /// One node reads the path, and the others copy its files. `seed`: its id; the first node if
    /// absent.
    Tcp { seed: Option<String> },
    /// Every node reads the memory of a trainer's GPU. The path is the trainer's Unix socket.
    Ipc,
    /// A trainer broadcasts to the GPUs of all nodes. The path is `host:port/token` of the trainer.
    Nccl,
}

#[derive(Debug)]
enum WeightsRequest {
    Begin(NewUpdate),
    Commit(UpdateId),
    Abort(UpdateId),
    /// Reports the update with this id; without an id, the running or last update.
    Status(Option<UpdateId>),
}

impl WeightsRequest {
    /// Returns the id of the update to report; `None` for the running or last update.
    fn update(&self) -> Option<UpdateId> {
        match self {
            Self::Begin(_) => None,
            Self::Commit(id) | Self::Abort(id) => Some(*id),
            Self::Status(id) => *id,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum UpdateError {
    #[error("cannot begin an update: update {running} runs; expected one update at a time")]
    Running { running: UpdateId },
    #[error("cannot find a node of model {model:?} that is up; expected at least one")]
    NoNode { model: String },
    #[error(
        "cannot begin an update: no node {node:?} of the model is up; expected one of: {known}"
    )]
    UnknownNode { node: String, known: String },
    #[error(
        "cannot begin an update: several nodes have the id {node}; expected the URL of one: {urls}"
    )]
    AmbiguousNode { node: String, urls: String },
    #[error("cannot find update {id}; expected {known}")]
    Unknown { id: UpdateId, known: String },
    #[error("cannot {call} node {node}: {reason}")]
    Pause { call: &'static str, node: String, reason: String },
    #[error(transparent)]
    Coordinator(#[from] CoordinatorError),
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
    #[error("busy: {REQUESTS_MAX} requests are queued")]
    Busy,
    #[error("the router stops")]
    Stopped,
}

/// An update, by default the running or last one, and the weights of every node that is up.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct WeightsReport {
    pub update: Option<UpdateView>,
    pub nodes: Vec<NodeView>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct UpdateView {
    pub id: String,
    pub label: String,
    /// With nccl: without the trainer's token.
    pub path: String,
    pub model: String,
    /// preparing, prepared, committing, committed, aborting or aborted.
    pub phase: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_version: Option<String>,
    /// Why the update was aborted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Nodes that missed the commit and catch up.
    pub missed: Vec<String>,
    pub nodes: Vec<ParticipantView>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct ParticipantView {
    pub node: String,
    pub state: &'static str,
    /// Time for which the node ran no step, in milliseconds; after its commit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused_ms: Option<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct NodeView {
    pub node: String,
    pub role: &'static str,
    pub model: String,
    pub weight_version: String,
    /// pausing or paused; absent while the node serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause: Option<&'static str>,
    /// Whether the router brings the node up to date.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub catches_up: bool,
}

type WeightsReportReply = oneshot::Sender<Result<WeightsReport, UpdateError>>;

/// Sends requests of operators to the task. Cheap to clone.
#[derive(Clone)]
pub(crate) struct WeightUpdates {
    nodes: Nodes,
    requests: mpsc::Sender<(WeightsRequest, WeightsReportReply)>,
}

impl WeightUpdates {
    /// Starts the task. `stop_max`: maximum time that the task needs to stop. `metrics`: those of
    /// each model by its name.
    pub(crate) fn start(
        nodes: Nodes,
        stop_max: Duration,
        metrics: HashMap<Arc<str>, WeightMetrics>,
    ) -> (Self, OwnedTask) {
        let (requests, received) = mpsc::channel(REQUESTS_MAX);
        let task = UpdateTask {
            nodes: nodes.clone(),
            metrics: UpdateMetrics(metrics),
            running: None,
            ended: VecDeque::new(),
            catch_ups: Vec::new(),
            targets: Targets::default(),
            catch_up_at: Instant::now(),
            stop_max: stop_max.min(STOP_MAX),
            stops_by: None,
            calls: JoinSet::new(),
        };
        (Self { nodes, requests }, OwnedTask::start(|stop| task.run(received, stop)))
    }

    pub(crate) async fn begin(&self, update: NewUpdate) -> Result<WeightsReport, UpdateError> {
        self.request(WeightsRequest::Begin(update)).await
    }

    pub(crate) async fn commit(&self, id: UpdateId) -> Result<WeightsReport, UpdateError> {
        self.request(WeightsRequest::Commit(id)).await
    }

    /// Aborts an update of this router, or of a router that has ended.
    pub(crate) async fn abort(&self, id: UpdateId) -> Result<WeightsReport, UpdateError> {
        match self.request(WeightsRequest::Abort(id)).await {
            Err(UpdateError::Unknown { id, known }) => self.abort_at_nodes(id, known).await,
            outcome => outcome,
        }
    }

    /// Aborts an update that this router does not know at every node that knows it, unless a node
    /// has committed it.
    async fn abort_at_nodes(
        &self,
        id: UpdateId,
        known: String,
    ) -> Result<WeightsReport, UpdateError> {
        let nodes = self.nodes.weight_nodes();
        let is_committed = |state: &UpdateState| {
            matches!(
                state,
                UpdateState::Installing(_) | UpdateState::Ended(UpdateEnd::Committed(_))
            )
        };
        // A prepared node commits once it learns that another node has committed, unless it was
        // told to abort.
        let states = self.call_by_id(&nodes, id, CoordinatorCall::Status).await;
        if states.iter().any(is_committed) {
            return Err(CoordinatorError::Committed.into());
        }
        let ends = self.call_by_id(&nodes, id, CoordinatorCall::Abort).await;
        if ends.is_empty() {
            return Err(UpdateError::Unknown { id, known });
        }
        if ends.iter().any(is_committed) {
            return Err(CoordinatorError::Committed.into());
        }
        tracing::warn!(update = %id, nodes = ends.len(), "aborted a weight update of another router");
        self.status(None).await
    }

    /// Makes a call of an update to every node. Returns the states of the update at the nodes that
    /// know it.
    async fn call_by_id(
        &self,
        nodes: &[WeightNode],
        id: UpdateId,
        call: CoordinatorCall,
    ) -> Vec<UpdateState> {
        let replies = join_all(nodes.iter().map(|node| self.nodes.call_by_id(node, id, call)));
        let states = replies.await.into_iter().filter_map(|reply| match reply {
            NodeReply::State(state) => state,
            _ => None,
        });
        states.collect()
    }

    /// Reports the update with this id if the router knows the update; without an id, the running
    /// or last update.
    pub(crate) async fn status(&self, id: Option<UpdateId>) -> Result<WeightsReport, UpdateError> {
        self.request(WeightsRequest::Status(id)).await
    }

    /// Pauses every node of the model, or none: after a failed call the other nodes serve again.
    pub(crate) async fn pause(
        &self,
        model: &str,
        in_flight: InFlight,
        at_most: Duration,
    ) -> Result<WeightsReport, UpdateError> {
        if let Err(error) = self.call_pause(model, Some((in_flight, at_most))).await {
            if let Err(resume) = self.call_pause(model, None).await {
                tracing::warn!(%resume, "a node stays paused for at most {at_most:?}");
            }
            return Err(error);
        }
        self.status(None).await
    }

    /// Lets every node of the model serve again.
    pub(crate) async fn resume(&self, model: &str) -> Result<WeightsReport, UpdateError> {
        self.call_pause(model, None).await?;
        self.status(None).await
    }

    /// Calls every node, and returns the first error.
    async fn call_pause(
        &self,
        model: &str,
        pause: Option<(InFlight, Duration)>,
    ) -> Result<(), UpdateError> {
        let nodes = self.nodes.weight_nodes();
        let nodes: Vec<_> = nodes.into_iter().filter(|node| node.model == model).collect();
        if nodes.is_empty() {
            return Err(UpdateError::NoNode { model: model.to_owned() });
        }
        let calls = nodes.iter().map(async |node| {
            let call = if pause.is_some() { "pause" } else { "resume" };
            let outcome = self.nodes.call_pause(node, pause).await;
            outcome.map_err(|reason| UpdateError::Pause { call, node: node.id.clone(), reason })
        });
        join_all(calls).await.into_iter().collect()
    }

    async fn request(&self, request: WeightsRequest) -> Result<WeightsReport, UpdateError> {
        let (reply, answer) = oneshot::channel();
        self.requests.try_send((request, reply)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => UpdateError::Busy,
            mpsc::error::TrySendError::Closed(_) => UpdateError::Stopped,
        })?;
        answer.await.map_err(|_| UpdateError::Stopped)?
    }
}

struct UpdateTask {
    nodes: Nodes,
    metrics: UpdateMetrics,
    /// The update of an operator.
    running: Option<ModelUpdate>,
    /// The last updates of operators that ended, of all models.
    ended: VecDeque<UpdateView>,
    /// Updates of one node each.
    catch_ups: Vec<ModelUpdate>,
    targets: Targets,
    catch_up_at: Instant,
    stop_max: Duration,
    /// Deadline of the shutdown; `None` while the router serves.
    stops_by: Option<Instant>,
    calls: PendingCalls,
}

impl UpdateTask {
    async fn run(
        mut self,
        mut requests: mpsc::Receiver<(WeightsRequest, WeightsReportReply)>,
        stop: CancellationToken,
    ) {
        while !self.has_stopped(Instant::now()) {
            let wakes_at = self.stops_by.unwrap_or(self.catch_up_at);
            let due = self.updates().filter_map(ModelUpdate::next_due).chain([wakes_at]).min();
            let due = due.expect("the next look for nodes has a time");
            tokio::select! {
                () = stop.cancelled(), if self.stops_by.is_none() => self.stop(Instant::now()),
                Some((request, reply)) = requests.recv() => {
                    let id = request.update();
                    let outcome = self.handle(Instant::now(), request);
                    // The caller may have stopped waiting.
                    let _ = reply.send(outcome.map(|()| self.report(id)));
                }
                Some(answered) = self.calls.join_next() => {
                    // Calls do not panic.
                    if let Ok((id, node, answer)) = answered {
                        self.answered(id, node, answer);
                    }
                }
                () = tokio::time::sleep_until(due.into()) => {}
            }
            self.advance(Instant::now());
        }
        self.calls.shutdown().await;
    }

    /// Aborts the updates that are not committed: nodes that change their weights in place serve
    /// nothing until their update ends.
    fn stop(&mut self, now: Instant) {
        self.stops_by = Some(now + self.stop_max);
        for update in self.updates_mut() {
            // Aborting a committed update fails: the router still sends the commit to its nodes.
            let _ = update.abort(now, "the router stops");
        }
    }

    fn has_stopped(&self, now: Instant) -> bool {
        self.stops_by.is_some_and(|by| now >= by || self.updates().next().is_none())
    }

    fn updates(&self) -> impl Iterator<Item = &ModelUpdate> {
        self.running.iter().chain(&self.catch_ups)
    }

    fn updates_mut(&mut self) -> impl Iterator<Item = &mut ModelUpdate> {
        self.running.iter_mut().chain(&mut self.catch_ups)
    }

    fn handle(&mut self, now: Instant, request: WeightsRequest) -> Result<(), UpdateError> {
        let running = |id: UpdateId| move |update: &&mut ModelUpdate| update.id() == id;
        match request {
            WeightsRequest::Begin(new) => self.begin(now, new),
            WeightsRequest::Commit(id) => match self.running.as_mut().filter(running(id)) {
                Some(update) => Ok(update.commit(now)?),
                None => self.known(id),
            },
            WeightsRequest::Abort(id) => match self.running.as_mut().filter(running(id)) {
                Some(update) => Ok(update.abort(now, "an operator aborted it")?),
                None => self.known(id),
            },
            WeightsRequest::Status(_) => Ok(()),
        }
    }

    /// Accepts a request for an ended update that the router remembers.
    fn known(&self, id: UpdateId) -> Result<(), UpdateError> {
        let running = self.running.as_ref().map(|update| update.id().to_string());
        let last = self.ended.back().map(|update| update.id.clone());
        if self.ended.iter().any(|update| update.id == id.to_string()) {
            return Ok(());
        }
        let known = running.or(last).unwrap_or_else(|| "an update that was begun".to_owned());
        Err(UpdateError::Unknown { id, known })
    }

    fn begin(&mut self, now: Instant, new: NewUpdate) -> Result<(), UpdateError> {
        if self.stops_by.is_some() {
            return Err(UpdateError::Stopped);
        }
        if let Some(update) = &self.running {
            return Err(UpdateError::Running { running: update.id() });
        }
        let nodes = self.nodes.weight_nodes();
        let nodes: Vec<_> = nodes.into_iter().filter(|node| *node.model == *new.model).collect();
        if nodes.is_empty() {
            return Err(UpdateError::NoNode { model: new.model.to_string() });
        }
        let source = match &new.transport {
            UpdateTransport::Disk | UpdateTransport::Ipc | UpdateTransport::Nccl => {
                UpdateSource::Path
            }
            UpdateTransport::Tcp { seed: None } => UpdateSource::Seed(0),
            UpdateTransport::Tcp { seed: Some(seed) } => {
                let is_seed = |node: &WeightNode| node.id == *seed || node.grpc == *seed;
                let found: Vec<usize> =
                    (0..nodes.len()).filter(|&index| is_seed(&nodes[index])).collect();
                let node = seed.clone();
                match found.as_slice() {
                    [index] => UpdateSource::Seed(*index),
                    [] => {
                        let known: Vec<_> = nodes.iter().map(|node| node.id.as_str()).collect();
                        return Err(UpdateError::UnknownNode { node, known: known.join(", ") });
                    }
                    several => {
                        let urls: Vec<_> =
                            several.iter().map(|&index| nodes[index].grpc.as_str()).collect();
                        return Err(UpdateError::AmbiguousNode { node, urls: urls.join(", ") });
                    }
                }
            }
        };
        let id = UpdateId::of_operator(random_bits()?);
        let (model, label) = (new.model.clone(), new.label.clone());
        let update = ModelUpdate::new(now, id, new, nodes, source);
        let (path, nodes) = (update.shown_path(), update.nodes().len());
        tracing::info!(update = %id, label, path, nodes, "began a weight update");
        for catch_up in self.catch_ups.iter_mut().filter(|it| it.model == model) {
            // A catch-up that is committed ends within moments.
            let _ = catch_up.abort(now, "an operator began another update");
        }
        self.running = Some(update);
        Ok(())
    }

    fn answered(&mut self, id: UpdateId, node: usize, answer: WeightsAnswer) {
        if let Some(update) = self.updates_mut().find(|update| update.id() == id) {
            update.answered(Instant::now(), node, answer);
        }
    }

    /// Makes the calls that are due, ends updates that are over, and begins catch-ups.
    fn advance(&mut self, now: Instant) {
        self.updates_mut().for_each(|update| update.on_deadline(now));
        if let Some(update) = self.running.take_if(|update| update.is_over()) {
            self.end(now, &update);
        }
        let over = |update: &mut ModelUpdate| update.is_over();
        for update in self.catch_ups.extract_if(.., over).collect::<Vec<_>>() {
            self.end_catch_up(now, &update);
        }
        if self.stops_by.is_none() && now >= self.catch_up_at {
            self.catch_up_at = now + CATCH_UP_INTERVAL;
            self.catch_up(now);
        }
        for update in &mut self.catch_ups {
            update.call_due(now, &self.nodes, &mut self.calls, |_| true);
        }
        if let Some(update) = &mut self.running {
            // A node runs one update at a time.
            let is_free = |node: &WeightNode| !self.catch_ups.iter().any(|it| it.has(node.epoch));
            update.call_due(now, &self.nodes, &mut self.calls, is_free);
        }
        self.metrics.set_phase(self.running.as_ref());
    }

    fn end(&mut self, now: Instant, update: &ModelUpdate) {
        self.metrics.update_ended(now, update);
        let view = update.view();
        let id = &view.id;
        match update.phase() {
            CoordinatorPhase::Committed { version, missed } => {
                tracing::info!(update = id, weight_version = %version, missed = missed.len(), "committed a weight update");
                let replaced = update.nodes().iter().map(|node| node.version);
                if update.transport() != WeightsTransport::Files {
                    // No node has files of these weights, and the trainer goes on training.
                    self.targets.forget(update.model.clone(), replaced);
                    self.remember(view);
                    return;
                }
                let target = TargetWeights {
                    label: view.label.clone(),
                    path: view.path.clone(),
                    version: *version,
                    timeout: update.timeout(),
                    in_flight: update.in_flight(),
                };
                self.targets.committed(update.model.clone(), target, replaced);
                self.catch_up_at = now + CATCH_UP_INTERVAL;
            }
            CoordinatorPhase::Aborted { reason } => {
                tracing::warn!(update = id, reason, "aborted a weight update");
            }
            _ => unreachable!("the update is over"),
        }
        self.remember(view);
    }

    fn remember(&mut self, ended: UpdateView) {
        if self.ended.len() == ENDED_MAX {
            self.ended.pop_front();
        }
        self.ended.push_back(ended);
    }

    fn end_catch_up(&mut self, now: Instant, update: &ModelUpdate) {
        self.metrics.catch_up_ended(update);
        let node = &update.nodes()[0];
        match update.phase() {
            CoordinatorPhase::Committed { version, missed } if missed.is_empty() => {
                tracing::info!(node = node.id, weight_version = %version, "a node caught up");
                // The node reports its new weights before the next look.
                self.catch_up_at = now + CATCH_UP_INTERVAL;
            }
            CoordinatorPhase::Aborted { reason } => {
                tracing::warn!(node = node.id, reason, "a node did not catch up");
                self.targets.failed(now, &update.model, node.epoch);
            }
            _ => self.targets.failed(now, &update.model, node.epoch),
        }
    }

    /// Begins to update nodes that do not have the weights of the last committed update of their
    /// model.
    fn catch_up(&mut self, now: Instant) {
        let nodes = self.nodes.weight_nodes();
        self.metrics.set_versions(&nodes);
        let updated = self.running.as_ref().map(|update| update.model.clone());
        let is_free = |node: &WeightNode| {
            updated.as_deref() != Some(node.model.as_str())
                && !self.catch_ups.iter().any(|it| it.has(node.epoch))
        };
        let room = CATCH_UPS_MAX.saturating_sub(self.catch_ups.len());
        for catch_up in self.targets.catch_ups(now, &nodes, is_free).into_iter().take(room) {
            let CatchUp { model, node, target, from } = catch_up;
            let id = match random_bits() {
                Ok(bits) => UpdateId::of_catch_up(bits),
                Err(error) => return tracing::warn!(%error, "cannot begin a catch-up"),
            };
            tracing::info!(update = %id, node = node.id, weight_version = %target.version, "a node catches up");
            let source = from.map_or(UpdateSource::Path, UpdateSource::Peer);
            let update = ModelUpdate::catch_up(now, id, model, target, node, source);
            self.catch_ups.push(update);
        }
    }

    fn report(&self, id: Option<UpdateId>) -> WeightsReport {
        let nodes = self.nodes.weight_nodes().into_iter().map(|node| NodeView {
            catches_up: self.catch_ups.iter().any(|it| it.has(node.epoch)),
            node: node.id,
            role: node.role,
            model: node.model,
            weight_version: node.version.to_string(),
            pause: pause_name(node.pause),
        });
        let ended = self.ended.iter().rev().cloned();
        let mut updates = self.running.iter().map(ModelUpdate::view).chain(ended);
        let update = updates.find(|update| id.is_none_or(|id| update.id == id.to_string()));
        WeightsReport { update, nodes: nodes.collect() }
    }
}
