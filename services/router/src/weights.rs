//! Coordinates weight updates over the nodes: one update at a time, and the catch-up of nodes that missed it.
//!
//! One task owns the [`Coordinator`] of the running update. It makes the calls that the coordinator names, each node's
//! calls one after the other.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use proto::ids::{NoRandomness, random_bits};
use serde::Serialize;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use weight_transfer::{
    Coordinator, CoordinatorError, CoordinatorPhase, UpdateEnd, UpdateId, UpdateState,
    WeightVersion,
};

use crate::nodes::{CopyFrom, Nodes, OwnedTask, UpdateRequest, WeightNode, WeightsAnswer};

/// Queued requests of operators.
const REQUESTS_MAX: usize = 16;
/// Time between two calls to a node whose state has not changed.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time by which nodes outlast the coordinator's deadline, so that a commit at the deadline reaches them.
const NODE_GRACE: Duration = Duration::from_secs(10);
/// Time between two looks for nodes that missed the last update.
const CATCH_UP_INTERVAL: Duration = Duration::from_secs(1);
/// Time after a failed catch-up until the next one.
const CATCH_UP_RETRY: Duration = Duration::from_secs(30);

/// An update that an operator begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewUpdate {
    pub model: Arc<str>,
    pub label: String,
    pub path: String,
    pub timeout: Duration,
    /// Whether the router commits as soon as every node is prepared.
    pub commits: bool,
    pub transport: Transport,
}

/// How the nodes obtain the weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Every node reads the path.
    Disk,
    /// One node reads the path, and the others copy its files. `seed`: its id; the first node if absent.
    Tcp { seed: Option<String> },
}

#[derive(Debug)]
enum Request {
    Begin(NewUpdate),
    Commit(UpdateId),
    Abort(UpdateId),
    Status,
}

#[derive(Debug, thiserror::Error)]
pub enum UpdateError {
    #[error("cannot begin an update: update {running} runs; expected one update at a time")]
    Running { running: UpdateId },
    #[error("cannot begin an update: no node of model {model:?} is up; expected at least one")]
    NoNode { model: String },
    #[error(
        "cannot begin an update: no node {node:?} of the model is up; expected one of: {known}"
    )]
    UnknownNode { node: String, known: String },
    #[error("cannot find update {id}; expected {known}")]
    Unknown { id: UpdateId, known: String },
    #[error(transparent)]
    Coordinator(#[from] CoordinatorError),
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
    #[error("busy: {REQUESTS_MAX} requests are queued")]
    Busy,
    #[error("the router stops")]
    Stopped,
}

/// The running or last update, and the weights of every node that is up.
#[derive(Clone, Debug, Serialize)]
pub struct WeightsReport {
    pub update: Option<UpdateView>,
    pub nodes: Vec<NodeView>,
}

#[derive(Clone, Debug, Serialize)]
pub struct UpdateView {
    pub id: String,
    pub label: String,
    pub path: String,
    pub model: String,
    /// preparing, prepared, committing, committed or aborted.
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
pub struct ParticipantView {
    pub node: String,
    pub state: &'static str,
    /// Time for which the node ran no step, in milliseconds; after its commit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused_ms: Option<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct NodeView {
    pub node: String,
    pub role: &'static str,
    pub model: String,
    pub weight_version: String,
}

type Reply = oneshot::Sender<Result<WeightsReport, UpdateError>>;

/// Sends requests of operators to the task. Cheap to clone.
#[derive(Clone)]
pub struct Weights {
    requests: mpsc::Sender<(Request, Reply)>,
}

impl Weights {
    /// Starts the task.
    pub fn start(nodes: Nodes) -> (Self, OwnedTask) {
        let (requests, received) = mpsc::channel(REQUESTS_MAX);
        let task = Task {
            nodes,
            running: None,
            last: None,
            target: None,
            catch_up_at: Instant::now(),
            calls: JoinSet::new(),
        };
        (Self { requests }, OwnedTask::start(|stop| task.run(received, stop)))
    }

    pub async fn begin(&self, update: NewUpdate) -> Result<WeightsReport, UpdateError> {
        self.request(Request::Begin(update)).await
    }

    pub async fn commit(&self, id: UpdateId) -> Result<WeightsReport, UpdateError> {
        self.request(Request::Commit(id)).await
    }

    pub async fn abort(&self, id: UpdateId) -> Result<WeightsReport, UpdateError> {
        self.request(Request::Abort(id)).await
    }

    pub async fn status(&self) -> Result<WeightsReport, UpdateError> {
        self.request(Request::Status).await
    }

    async fn request(&self, request: Request) -> Result<WeightsReport, UpdateError> {
        let (reply, answer) = oneshot::channel();
        self.requests.try_send((request, reply)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => UpdateError::Busy,
            mpsc::error::TrySendError::Closed(_) => UpdateError::Stopped,
        })?;
        answer.await.map_err(|_| UpdateError::Stopped)?
    }
}

/// The weights that every node of a model should have.
#[derive(Clone, Debug)]
struct Target {
    model: Arc<str>,
    label: String,
    path: String,
    version: WeightVersion,
}

struct Update {
    request: Arc<UpdateRequest>,
    model: Arc<str>,
    nodes: Arc<[WeightNode]>,
    coordinator: Coordinator,
    deadline: Instant,
    /// When the next call to each node is due; `None` while a call is in flight.
    due: Vec<Option<Instant>>,
    paused: Vec<Duration>,
    source: UpdateSource,
    /// A catch-up: commits only these weights.
    expected: Option<WeightVersion>,
}

/// Place where the nodes of an update obtain the weights.
#[derive(Clone, Debug)]
enum UpdateSource {
    Path,
    /// The node with this index reads the path, and the others copy from it.
    Seed(usize),
    /// A node that does not take part.
    Peer(CopyFrom),
}

struct Task {
    nodes: Nodes,
    running: Option<Update>,
    /// The last update of an operator that ended.
    last: Option<UpdateView>,
    target: Option<Target>,
    catch_up_at: Instant,
    calls: JoinSet<(UpdateId, usize, WeightsAnswer)>,
}

impl Task {
    async fn run(
        mut self,
        mut requests: mpsc::Receiver<(Request, Reply)>,
        stop: CancellationToken,
    ) {
        loop {
            let due = self.next_due();
            tokio::select! {
                () = stop.cancelled() => break,
                Some((request, reply)) = requests.recv() => {
                    let outcome = self.handle(request);
                    // The caller may be gone.
                    let _ = reply.send(outcome.map(|()| self.report()));
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

    fn next_due(&self) -> Instant {
        match &self.running {
            None => self.catch_up_at,
            Some(update) => {
                let calls = update.due.iter().flatten().copied();
                let due = calls.chain(update.coordinator.next_deadline()).min();
                due.unwrap_or_else(|| Instant::now() + CATCH_UP_INTERVAL)
            }
        }
    }

    fn handle(&mut self, request: Request) -> Result<(), UpdateError> {
        match request {
            Request::Begin(new) => self.begin(new),
            Request::Commit(id) => {
                let now = Instant::now();
                match self.running.as_mut().filter(|update| update.request.id == id) {
                    Some(update) => {
                        update.coordinator.commit(now)?;
                        update.call_now(now);
                        Ok(())
                    }
                    None => self.known(id),
                }
            }
            Request::Abort(id) => {
                match self.running.as_mut().filter(|update| update.request.id == id) {
                    Some(update) => {
                        update.coordinator.abort("an operator aborted it")?;
                        update.call_now(Instant::now());
                        Ok(())
                    }
                    None => self.known(id),
                }
            }
            Request::Status => Ok(()),
        }
    }

    /// Accepts a repeated request for the update that ended last.
    fn known(&self, id: UpdateId) -> Result<(), UpdateError> {
        let running = self.running.as_ref().map(|update| update.request.id.to_string());
        let last = self.last.as_ref().map(|update| update.id.clone());
        if last == Some(id.to_string()) {
            return Ok(());
        }
        let known = running.or(last).unwrap_or_else(|| "an update that was begun".to_owned());
        Err(UpdateError::Unknown { id, known })
    }

    fn begin(&mut self, new: NewUpdate) -> Result<(), UpdateError> {
        if let Some(update) = &self.running {
            return Err(UpdateError::Running { running: update.request.id });
        }
        let nodes = self.nodes.weight_nodes();
        let nodes: Vec<_> = nodes.into_iter().filter(|node| *node.model == *new.model).collect();
        if nodes.is_empty() {
            return Err(UpdateError::NoNode { model: new.model.to_string() });
        }
        let source = match &new.transport {
            Transport::Disk => UpdateSource::Path,
            Transport::Tcp { seed: None } => UpdateSource::Seed(0),
            Transport::Tcp { seed: Some(seed) } => {
                let index = nodes.iter().position(|node| node.id == *seed);
                UpdateSource::Seed(index.ok_or_else(|| {
                    let known: Vec<_> = nodes.iter().map(|node| node.id.as_str()).collect();
                    UpdateError::UnknownNode { node: seed.clone(), known: known.join(", ") }
                })?)
            }
        };
        self.start(new, nodes, source, None)
    }

    fn start(
        &mut self,
        new: NewUpdate,
        nodes: Vec<WeightNode>,
        source: UpdateSource,
        expected: Option<WeightVersion>,
    ) -> Result<(), UpdateError> {
        let now = Instant::now();
        let id = UpdateId(random_bits()?);
        let names = nodes.iter().map(|node| node.id.clone()).collect();
        let deadline = now + new.timeout;
        tracing::info!(
            update = %id, label = new.label, path = new.path, nodes = nodes.len(),
            catches_up = expected.is_some(), "begins a weight update"
        );
        let coordinator = Coordinator::new(now, names, deadline, new.commits);
        self.running = Some(Update {
            request: Arc::new(UpdateRequest { id, label: new.label, path: new.path }),
            model: new.model,
            due: vec![Some(now); nodes.len()],
            paused: vec![Duration::ZERO; nodes.len()],
            nodes: nodes.into(),
            coordinator: match source {
                UpdateSource::Seed(seed) => coordinator.with_seed(seed),
                _ => coordinator,
            },
            deadline,
            source,
            expected,
        });
        Ok(())
    }

    fn answered(&mut self, id: UpdateId, node: usize, answer: WeightsAnswer) {
        let now = Instant::now();
        let Some(update) = self.running.as_mut().filter(|it| it.request.id == id) else { return };
        update.due[node] = Some(now + POLL_INTERVAL);
        update.paused[node] = answer.paused;
        let before = update.coordinator.phase().clone();
        update.coordinator.handle(now, node, answer.reply);
        if let (CoordinatorPhase::Prepared(version), Some(expected)) =
            (update.coordinator.phase().clone(), update.expected)
        {
            // A catch-up may not decide which weights the cluster has.
            let outcome = match version == expected {
                true => update.coordinator.commit(now),
                false => update.coordinator.abort(&format!(
                    "the weights at the path have changed: weight_version {version}; expected {expected}"
                )),
            };
            debug_assert!(outcome.is_ok(), "a prepared update can be committed and aborted");
        }
        if *update.coordinator.phase() != before {
            update.call_now(now);
        }
    }

    /// Makes the calls that are due, and ends the update when it is over.
    fn advance(&mut self, now: Instant) {
        let Some(update) = &mut self.running else {
            if now >= self.catch_up_at {
                self.catch_up_at = now + CATCH_UP_INTERVAL;
                self.catch_up();
            }
            return;
        };
        if update.coordinator.next_deadline().is_some_and(|deadline| deadline <= now) {
            update.coordinator.on_deadline(now);
            update.call_now(now);
        }
        if update.coordinator.is_over() {
            return self.end();
        }
        for node in 0..update.nodes.len() {
            if update.due[node].is_none_or(|due| due > now) {
                continue;
            }
            let Some(call) = update.coordinator.call(node) else {
                // Another node's state may make a call necessary.
                update.due[node] = Some(now + POLL_INTERVAL);
                continue;
            };
            update.due[node] = None;
            let (nodes, participants) = (self.nodes.clone(), update.nodes.clone());
            let (request, from) = (update.request.clone(), update.copy_from(node));
            let remaining = update.deadline.saturating_duration_since(now) + NODE_GRACE;
            self.calls.spawn(async move {
                let target = &participants[node];
                let answer = nodes.call_weights(
                    target,
                    &participants,
                    &request,
                    from.as_ref(),
                    call,
                    remaining,
                );
                (request.id, node, answer.await)
            });
        }
    }

    fn end(&mut self) {
        let Some(update) = self.running.take() else { return };
        let view = update.view();
        let id = &view.id;
        match update.coordinator.phase() {
            CoordinatorPhase::Committed { version, missed } => {
                tracing::info!(update = id, weight_version = %version, missed = missed.len(), "committed a weight update");
                if update.expected.is_none() {
                    self.target = Some(Target {
                        model: update.model.clone(),
                        label: update.request.label.clone(),
                        path: update.request.path.clone(),
                        version: *version,
                    });
                }
            }
            CoordinatorPhase::Aborted { reason } => {
                tracing::warn!(update = id, reason, "aborted a weight update");
                if update.expected.is_some() {
                    self.catch_up_at = Instant::now() + CATCH_UP_RETRY;
                }
            }
            _ => unreachable!("the update is over"),
        }
        if update.expected.is_none() {
            self.last = Some(view);
        }
    }

    /// Updates the nodes that do not have the weights of the last committed update.
    fn catch_up(&mut self) {
        let Some(target) = self.target.clone() else { return };
        let behind =
            |node: &WeightNode| *node.model == *target.model && node.version != target.version;
        let all = self.nodes.weight_nodes();
        let nodes: Vec<_> = all.iter().filter(|node| behind(node)).cloned().collect();
        if nodes.is_empty() {
            return;
        }
        // A committed peer has the bytes even if the path is gone.
        let is_committed =
            |node: &&WeightNode| *node.model == *target.model && node.version == target.version;
        let source = match all.iter().find(is_committed) {
            Some(node) => {
                UpdateSource::Peer(CopyFrom { node: node.clone(), version: target.version })
            }
            None => UpdateSource::Path,
        };
        let new = NewUpdate {
            model: target.model,
            label: target.label,
            path: target.path,
            timeout: CATCH_UP_RETRY,
            commits: false,
            transport: Transport::Disk,
        };
        if let Err(error) = self.start(new, nodes, source, Some(target.version)) {
            tracing::warn!(%error, "cannot begin a catch-up");
        }
    }

    fn report(&self) -> WeightsReport {
        let running = self.running.as_ref().filter(|update| update.expected.is_none());
        let nodes = self.nodes.weight_nodes().into_iter().map(|node| NodeView {
            node: node.id,
            role: node.role,
            model: node.model,
            weight_version: node.version.to_string(),
        });
        let update = running.map(Update::view).or_else(|| self.last.clone());
        WeightsReport { update, nodes: nodes.collect() }
    }
}

impl Update {
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

    fn view(&self) -> UpdateView {
        let name = |node: usize| self.nodes[node].id.clone();
        let (phase, version, reason, missed) = match self.coordinator.phase() {
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
                ("aborted", None, Some(reason.clone()), Vec::new())
            }
        };
        let nodes = self.coordinator.states().zip(&self.paused).map(|((node, state), paused)| {
            let is_committed = matches!(state, Some(UpdateState::Ended(UpdateEnd::Committed(_))));
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
                paused_ms: is_committed.then(|| paused.as_micros() as f64 / 1e3),
            }
        });
        UpdateView {
            id: self.request.id.to_string(),
            label: self.request.label.clone(),
            path: self.request.path.clone(),
            model: self.model.to_string(),
            phase,
            weight_version: version.map(ToString::to_string),
            reason,
            missed,
            nodes: nodes.collect(),
        }
    }
}
