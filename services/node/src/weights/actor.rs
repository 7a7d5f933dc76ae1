//! The task that owns the node's part in weight updates: it handles calls and deadlines, and starts the work.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use ::engine::executor::WeightUpdate;
use model::{Checkpoint, ModelConfig};
use proto::v1;
use tokio::{
    runtime,
    sync::{mpsc, oneshot},
    task::{JoinHandle, JoinSet},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Status;
use weight_transfer::{
    BeginError, CommitError, Participant, ParticipantAction, ParticipantInput, Proposal, UpdateEnd,
    UpdateId, UpdateReport, UpdateState, WeightVersion,
};

use super::{
    copy::{self, PARTS_MAX, SILENCE_MAX, WeightFiles},
    engine::{change_weights, lose_weights, release_weights},
    of_requests_in_flight,
    peers::{Peer, PeerCredentials},
    receive::{ReceiveError, Received, receive},
    restore::{LoadedModel, LostWeights, restore},
    standby::{CANCELLED, Standby},
    trainer::{self, KeptTrainer, TrainerAddress},
};
use crate::{inbox::Inbox, memory_limit::MemoryShare};

/// Maximum number of queued calls of coordinators and peers.
const CALLS_MAX: usize = 64;
/// Time-out of a question to a peer.
const ASK_MAX: Duration = Duration::from_secs(1);
/// Number of peers asked in a round; rounds rotate over all peers.
const ASKED_MAX: usize = 8;
/// Interval at which a kept trainer is checked for having left.
const TRAINER_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Owner of the prepared weights while they are restored. Coordinators choose ids at random.
const RESTORE: UpdateId = UpdateId(0);

/// The parts of the node that the actor uses.
pub(crate) struct WeightSettings {
    pub model: ModelConfig,
    /// The weights to restore after an aborted update in place, unless an update was committed.
    pub loaded: LoadedModel,
    /// Host memory that a second copy of the weights takes.
    pub host_bytes: u64,
    pub share: Option<MemoryShare>,
    /// `None`: the device cannot change its weights.
    pub update: Option<Arc<dyn WeightUpdate>>,
    pub inbox: Inbox,
    pub credentials: PeerCredentials,
    /// Folder for weights that are copied from peers.
    pub folder: PathBuf,
}

/// An update whose fields are checked.
#[derive(Clone, Debug)]
pub(super) struct Begin {
    pub id: UpdateId,
    pub label: String,
    pub origin: Origin,
    pub remaining: Duration,
    pub peers: Vec<Peer>,
    pub in_flight: v1::InFlight,
}

/// Place of new weights.
#[derive(Clone, Debug)]
pub(super) enum Origin {
    Path(PathBuf),
    Trainer(TrainerAddress),
    /// A node that has prepared or committed weights of this version.
    Peer {
        peer: Peer,
        version: WeightVersion,
    },
}

#[derive(Debug)]
pub(super) enum Call {
    Begin(Begin),
    Commit {
        id: UpdateId,
        version: WeightVersion,
    },
    Abort {
        id: UpdateId,
        reason: String,
    },
    /// `of`: the update whose coordinator calls.
    Status {
        of: Option<UpdateId>,
    },
}

#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    #[error(
        "cannot change the weights: weights.place is auto on a GPU; expected shadow or in_place"
    )]
    Unsupported,
    #[error(transparent)]
    Begin(#[from] BeginError),
    #[error(transparent)]
    Commit(#[from] CommitError),
    #[error(
        "cannot copy weights of weight_version {version}: expected a version that this node has prepared or committed"
    )]
    NoSource { version: WeightVersion },
    #[error("busy: {CALLS_MAX} calls are queued")]
    Busy,
    #[error("the node stops")]
    Stopped,
}

/// The weights in use, and the update that runs or ran last.
#[derive(Clone, Debug)]
pub(super) struct NodeWeights {
    pub version: WeightVersion,
    pub label: String,
    pub report: Option<UpdateReport>,
    /// Time for which no step ran during the last commit.
    pub paused: Option<Duration>,
}

type Reply = oneshot::Sender<Result<NodeWeights, CallError>>;
/// Files of weights on their way to a peer.
type FileParts = mpsc::Receiver<Result<v1::WeightsPart, Status>>;

#[derive(Debug)]
enum Message {
    Call(Call, Reply),
    /// A peer copies weights of this version.
    Copy(WeightVersion, oneshot::Sender<Result<FileParts, CallError>>),
}

/// Sends calls to the actor.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    messages: mpsc::Sender<Message>,
}

impl Handle {
    pub(super) async fn call(&self, call: Call) -> Result<NodeWeights, CallError> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Call(call, reply))?;
        answer.await.map_err(|_| CallError::Stopped)?
    }

    /// Returns the files of weights of this version.
    pub(super) async fn copy(&self, version: WeightVersion) -> Result<FileParts, CallError> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Copy(version, reply))?;
        answer.await.map_err(|_| CallError::Stopped)?
    }

    fn send(&self, message: Message) -> Result<(), CallError> {
        self.messages.try_send(message).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => CallError::Busy,
            mpsc::error::TrySendError::Closed(_) => CallError::Stopped,
        })
    }
}

/// The running task. Dropping it stops the task without waiting.
#[derive(Debug)]
pub(crate) struct WeightActor {
    stop: DropGuard,
    task: JoinHandle<()>,
    handle: Handle,
}

impl WeightActor {
    pub fn start(settings: WeightSettings) -> Self {
        let (messages, received) = mpsc::channel(CALLS_MAX);
        let stop = CancellationToken::new();
        let mut actor = Actor {
            standby: settings.update.clone().map(Standby::new),
            settings,
            participant: Participant::default(),
            running: None,
            released: Arc::default(),
            restoring: None,
            trainer: Arc::default(),
            watches_trainer: false,
            prepared: None,
            committed: None,
            serving: NodeWeights {
                version: WeightVersion::LOADED,
                label: String::new(),
                report: None,
                paused: None,
            },
            work: JoinSet::new(),
        };
        actor.remove_leftovers();
        let task = tokio::spawn(actor.run(received, stop.clone()));
        Self { stop: stop.drop_guard(), task, handle: Handle { messages } }
    }

    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Stops the task. Work that blocks a thread, such as reading weights, ends at its next check.
    pub async fn shutdown(self) {
        drop(self.stop);
        // A panic of the actor was logged by the runtime; the node stops anyway.
        let _ = self.task.await;
    }
}

struct Actor {
    settings: WeightSettings,
    participant: Participant,
    /// The update that runs.
    running: Option<RunningUpdate>,
    /// The update that has released or will release the weights in use, until it is committed or lost.
    released: Arc<Mutex<Option<UpdateId>>>,
    /// Stops the restoration of lost weights when dropped.
    restoring: Option<DropGuard>,
    /// The trainer whose connection and communicator the next update may use.
    trainer: Arc<KeptTrainer>,
    /// Whether a task waits for this trainer to leave.
    watches_trainer: bool,
    /// Weights that peers may copy: the prepared weights, and the weights in use.
    prepared: Option<Obtained>,
    committed: Option<Obtained>,
    serving: NodeWeights,
    work: JoinSet<Done>,
    /// `None`: the device cannot change its weights.
    standby: Option<Standby>,
}

/// Version and files of weights; no files if a trainer sent the weights.
type Obtained = (WeightVersion, Option<Arc<WeightFiles>>);

/// Prepared weights, and the files that are still mapped.
struct Prepared {
    version: WeightVersion,
    files: Option<(WeightFiles, Checkpoint)>,
}

struct RunningUpdate {
    begin: Begin,
    /// Cancelled when this value is dropped.
    cancelled: CancellationToken,
    _cancel: DropGuard,
    /// Index of the peer that the next round of questions asks first.
    next_peer: usize,
}

impl RunningUpdate {
    fn new(begin: Begin) -> Self {
        let cancelled = CancellationToken::new();
        Self { begin, _cancel: cancelled.clone().drop_guard(), cancelled, next_peer: 0 }
    }

    /// Returns the peers that a round of questions asks.
    fn peers_to_ask(&mut self) -> Vec<Peer> {
        let peers = &self.begin.peers;
        let asked = peers.iter().cycle().skip(self.next_peer).take(peers.len().min(ASKED_MAX));
        let asked: Vec<_> = asked.cloned().collect();
        self.next_peer = (self.next_peer + asked.len()) % peers.len().max(1);
        asked
    }
}

/// Outcome of work that the actor started.
enum Done {
    Input(ParticipantInput),
    Received {
        id: UpdateId,
        outcome: Result<Prepared, String>,
    },
    Installed {
        id: UpdateId,
        paused: Duration,
    },
    /// An update in place ended without a commit. Whether the node has no valid weights now.
    Lost(bool),
    /// The weights from before an aborted update in place are in use again, or the reason why not.
    Restored(Result<WeightVersion, String>),
    /// The kept trainer has left.
    TrainerLeft,
    /// Nothing to report.
    Quiet,
}

impl Actor {
    async fn run(mut self, mut messages: mpsc::Receiver<Message>, stop: CancellationToken) {
        loop {
            let due = async {
                match self.participant.next_deadline() {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => break,
                Some(message) = messages.recv() => match message {
                    Message::Call(call, reply) => {
                        let outcome = self.call(call);
                        self.act();
                        // The caller may be gone.
                        let _ = reply.send(outcome.map(|()| self.weights()));
                    }
                    Message::Copy(version, reply) => {
                        let _ = reply.send(self.copy(version));
                    }
                },
                Some(done) = self.work.join_next() => {
                    // A panic while reading weights counts as a failed read.
                    self.done(done.unwrap_or(Done::Quiet));
                }
                () = due => self.participant.on_deadline(Instant::now()),
            }
            self.act();
        }
        (self.running, self.restoring) = (None, None);
        self.work.shutdown().await;
    }

    fn weights(&self) -> NodeWeights {
        NodeWeights { report: self.participant.report(), ..self.serving.clone() }
    }

    fn call(&mut self, call: Call) -> Result<(), CallError> {
        let now = Instant::now();
        match call {
            Call::Begin(begin) => {
                if self.standby.is_none() {
                    return Err(CallError::Unsupported);
                }
                let proposal = Proposal { id: begin.id, deadline: now + begin.remaining };
                let is_new = self.participant.begin(now, proposal)?;
                self.participant.heard(now, begin.id);
                if is_new {
                    self.restoring = None;
                    self.running = Some(RunningUpdate::new(begin));
                }
            }
            Call::Commit { id, version } => {
                self.participant.heard(now, id);
                self.participant.commit(id, version)?;
            }
            Call::Abort { id, reason } => {
                self.participant.abort(id, &reason);
            }
            Call::Status { of } => {
                if let Some(id) = of {
                    self.participant.heard(now, id);
                }
            }
        }
        Ok(())
    }

    fn done(&mut self, done: Done) {
        match done {
            Done::Input(input) => self.participant.handle(input),
            Done::Received { id, outcome } => {
                let outcome = outcome.map(|Prepared { version, files }| {
                    let source = files.map(|(source, checkpoint)| {
                        self.unmap(checkpoint);
                        Arc::new(source)
                    });
                    if self.running.as_ref().is_some_and(|running| running.begin.id == id) {
                        self.prepared = Some((version, source));
                    }
                    version
                });
                self.participant.handle(ParticipantInput::Received { id, outcome });
                self.watch_trainer();
                if self.running.as_ref().is_none_or(|running| running.begin.id != id) {
                    // The update was aborted before it gave up the weights.
                    self.lose_if_released(id);
                }
            }
            Done::Lost(false) => {}
            Done::Lost(true) => {
                tracing::warn!("the node has no valid weights: an update in place was aborted");
                self.serving.version = WeightVersion::NONE;
                self.restore();
            }
            Done::Restored(outcome) => match outcome {
                Ok(version) => {
                    self.serving.version = version;
                    tracing::info!(weight_version = %version, "restored the weights");
                }
                Err(reason) if reason == CANCELLED => {}
                Err(reason) => tracing::error!(
                    "cannot restore the weights: {reason}; the node serves after the next update or a restart"
                ),
            },
            Done::Installed { id, paused } => {
                *released(&self.released) = None;
                if let Some(running) = self.running.take().filter(|it| it.begin.id == id) {
                    self.serving.label.clone_from(&running.begin.label);
                }
                self.serving.paused = Some(paused);
                self.committed = self.prepared.take();
                self.participant.handle(ParticipantInput::Installed { id });
                if let Some(UpdateState::Ended(UpdateEnd::Committed(version))) =
                    self.participant.report().map(|report| report.state)
                {
                    self.serving.version = version;
                    tracing::info!(
                        update = %id,
                        weight_version = %version,
                        label = self.serving.label,
                        paused_ms = paused.as_secs_f64() * 1e3,
                        "the weights changed"
                    );
                }
            }
            Done::TrainerLeft => {
                self.watches_trainer = false;
                self.watch_trainer();
            }
            Done::Quiet => {}
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.participant.poll_action() {
            match action {
                ParticipantAction::Receive { id } => self.receive(id),
                ParticipantAction::Discard { id } => self.discard(id),
                ParticipantAction::Install { id, version } => self.install(id, version),
                ParticipantAction::AskPeers { id } => self.ask_peers(id),
            }
        }
    }

    /// Removes copies of processes that were killed.
    fn remove_leftovers(&mut self) {
        let folder = self.settings.folder.clone();
        self.work.spawn(async move {
            // A panic leaves the copies on the disk.
            let _ = tokio::task::spawn_blocking(move || copy::remove_leftovers(&folder)).await;
            Done::Quiet
        });
    }

    /// Ends the communicator of a kept trainer that has left.
    fn watch_trainer(&mut self) {
        if self.watches_trainer || self.trainer.is_empty() {
            return;
        }
        let Some(standby) = self.standby.clone() else { return };
        self.watches_trainer = true;
        let kept = self.trainer.clone();
        self.work.spawn(async move {
            while !kept.is_empty() {
                tokio::time::sleep(TRAINER_CHECK_INTERVAL).await;
                let kept = kept.clone();
                let leave = move |update: &dyn WeightUpdate| {
                    if kept.close_if_left() {
                        update.leave_trainer();
                    }
                };
                standby.between_updates(leave).await;
            }
            Done::TrainerLeft
        });
    }

    /// Unmaps files of weights that were prepared.
    fn unmap(&mut self, checkpoint: Checkpoint) {
        self.work.spawn(async move {
            // Dropping does not panic.
            let _ = tokio::task::spawn_blocking(move || drop(checkpoint)).await;
            Done::Quiet
        });
    }

    /// Streams the files of weights to a peer.
    fn copy(&mut self, version: WeightVersion) -> Result<FileParts, CallError> {
        let sources = [&self.prepared, &self.committed];
        let source = sources.into_iter().flatten().find(|(found, _)| *found == version);
        let source = source.and_then(|(_, source)| source.clone());
        let source = source.ok_or(CallError::NoSource { version })?;
        let (parts, received) = mpsc::channel(PARTS_MAX);
        self.work.spawn(async move {
            // A panic ends the stream, and the peer fails.
            let runtime = runtime::Handle::current();
            let send = move || copy::send(&source, &parts, &runtime, SILENCE_MAX);
            let _ = tokio::task::spawn_blocking(send).await;
            Done::Quiet
        });
        Ok(received)
    }

    fn receive(&mut self, id: UpdateId) {
        let Some(running) = self.running.as_ref().filter(|it| it.begin.id == id) else { return };
        let Some(standby) = self.standby.clone() else { return };
        let RunningUpdate { begin, cancelled, .. } = running;
        tracing::info!(update = %id, label = begin.label, origin = ?begin.origin, "receives weights");
        let (origin, cancelled) = (begin.origin.clone(), cancelled.clone());
        let WeightSettings { host_bytes, share, .. } = self.settings;
        let model = self.settings.model.clone();
        let release = {
            let (inbox, is_released) = (self.settings.inbox.clone(), self.released.clone());
            let (_, waits) = of_requests_in_flight(begin.in_flight);
            let cancelled = cancelled.clone();
            move || {
                *released(&is_released) = Some(id);
                let release = cancelled.run_until_cancelled(release_weights(&inbox, waits));
                match runtime::Handle::current().block_on(release) {
                    Some(Some(())) => Ok(()),
                    Some(None) => Err(ReceiveError::Release("the engine has ended")),
                    None => Err(ReceiveError::Cancelled),
                }
            }
        };
        let credentials = self.settings.credentials.clone();
        let folder = self.settings.folder.clone();
        let kept = self.trainer.clone();
        self.work.spawn(async move {
            if let Origin::Trainer(address) = origin {
                let prepare = move |update: &dyn WeightUpdate, cancelled: &CancellationToken| {
                    let version = trainer::receive(&address, &kept, update, &release, cancelled);
                    let version = version.map_err(|error| error.to_string())?;
                    Ok(Prepared { version, files: None })
                };
                let outcome = standby.prepare(id, cancelled, prepare).await;
                return Done::Received { id, outcome };
            }
            let source = cancelled
                .run_until_cancelled(obtain(origin, &model, &credentials, &folder))
                .await
                .unwrap_or_else(|| Err(CANCELLED.to_owned()));
            let (source, expected) = match source {
                Ok(source) => source,
                Err(reason) => return Done::Received { id, outcome: Err(reason) },
            };
            let prepare = move |update: &dyn WeightUpdate, cancelled: &CancellationToken| {
                let Received { version, checkpoint } =
                    receive(&source.path, (&model, host_bytes, share), update, &release, cancelled)
                        .map_err(|error| error.to_string())?;
                match expected.filter(|expected| *expected != version) {
                    Some(expected) => Err(format!(
                        "the copy has weight_version {version}; expected {expected}, that of the peer"
                    )),
                    None => Ok(Prepared { version, files: Some((source, checkpoint)) }),
                }
            };
            let outcome = standby.prepare(id, cancelled, prepare).await;
            Done::Received { id, outcome }
        });
    }

    /// Frees the weights that are not in use.
    fn discard(&mut self, id: UpdateId) {
        if let Some(report) = self.participant.report()
            && report.id == id
            && let UpdateState::Ended(UpdateEnd::Aborted { reason }) = report.state
        {
            tracing::warn!(update = %id, reason, "the weight update was aborted");
        }
        // Cancels the work of this update. The work of a committed update has finished.
        if self.running.take_if(|running| running.begin.id == id).is_some() {
            self.prepared = None;
            self.lose_if_released(id);
        }
        let Some(standby) = self.standby.clone() else { return };
        self.work.spawn(async move {
            standby.discard(id).await;
            Done::Quiet
        });
    }

    /// Lets the engine thread swap the weights.
    fn install(&mut self, id: UpdateId, version: WeightVersion) {
        let begin = self.running.as_ref().map(|running| &running.begin);
        let label = begin.map(|begin| begin.label.clone()).unwrap_or_default();
        let in_flight = begin.map(|begin| begin.in_flight).unwrap_or_default();
        let (in_flight, waits) = of_requests_in_flight(in_flight);
        let inbox = self.settings.inbox.clone();
        self.work.spawn(async move {
            match change_weights(&inbox, version, &label, in_flight, waits).await {
                Some(paused) => Done::Installed { id, paused },
                None => Done::Quiet,
            }
        });
    }

    /// Ends an update in place without a commit: tells the engine thread, and restores the weights if they are lost.
    fn lose_if_released(&mut self, id: UpdateId) {
        if released(&self.released).take_if(|released| *released == id).is_some() {
            let inbox = self.settings.inbox.clone();
            self.work.spawn(async move { Done::Lost(lose_weights(&inbox).await) });
        } else if self.serving.version == WeightVersion::NONE {
            self.restore();
        }
    }

    /// Restores the weights from before an aborted update in place, unless another update brings weights.
    fn restore(&mut self) {
        if self.running.is_some() {
            return;
        }
        let Some(standby) = self.standby.clone() else { return };
        let lost = match &self.committed {
            Some((version, Some(source))) => LostWeights::Updated {
                version: *version,
                label: self.serving.label.clone(),
                source: source.clone(),
            },
            Some((version, None)) => {
                return tracing::error!(
                    weight_version = %version,
                    "cannot restore the weights: a trainer's GPU sent them; the node serves after the next update or a restart"
                );
            }
            None => LostWeights::Loaded(self.settings.loaded.clone()),
        };
        let cancelled = CancellationToken::new();
        self.restoring = Some(cancelled.clone().drop_guard());
        let inbox = self.settings.inbox.clone();
        let WeightSettings { host_bytes, share, .. } = self.settings;
        let model = self.settings.model.clone();
        self.work.spawn(async move {
            // The aborted update may still write: the weights have one owner at a time.
            let restore = move |update: &dyn WeightUpdate, cancelled: &CancellationToken| {
                restore(lost, (&model, host_bytes, share), update, &inbox, cancelled)
            };
            Done::Restored(standby.prepare(RESTORE, cancelled, restore).await)
        });
    }

    fn ask_peers(&mut self, id: UpdateId) {
        let Some(running) = self.running.as_mut().filter(|it| it.begin.id == id) else { return };
        for peer in running.peers_to_ask() {
            let credentials = self.settings.credentials.clone();
            self.work.spawn(async move {
                match tokio::time::timeout(ASK_MAX, credentials.committed_by(&peer, id)).await {
                    Ok(Ok(Some(version))) => {
                        Done::Input(ParticipantInput::PeerCommitted { id, version })
                    }
                    Ok(Ok(None)) => Done::Quiet,
                    Ok(Err(error)) => {
                        tracing::debug!(update = %id, peer = peer.grpc, error, "cannot ask a peer");
                        Done::Quiet
                    }
                    Err(_) => Done::Quiet,
                }
            });
        }
    }
}

fn released(released: &Mutex<Option<UpdateId>>) -> MutexGuard<'_, Option<UpdateId>> {
    // An id: a panic elsewhere leaves it valid.
    released.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the place of new weights on this machine, and the version that they must have.
async fn obtain(
    origin: Origin,
    model: &ModelConfig,
    credentials: &PeerCredentials,
    folder: &Path,
) -> Result<(WeightFiles, Option<WeightVersion>), String> {
    match origin {
        Origin::Path(path) => Ok((WeightFiles { path, _copy: None }, None)),
        Origin::Trainer(_) => unreachable!("a trainer sends no files"),
        Origin::Peer { peer, version } => {
            // Every element may take 4 bytes, and files have headers.
            let bytes_max = 8 * model.parameter_count() + (1 << 26);
            let source = copy::pull(&peer, version, credentials, folder, bytes_max).await?;
            Ok((source, Some(version)))
        }
    }
}

#[cfg(test)]
mod tests {
    use cluster::Epoch;

    use super::*;

    #[test]
    fn rounds_of_questions_ask_every_peer_in_turn() {
        let peer = |number: u128| Peer { epoch: Epoch(number), grpc: String::new() };
        let begin = |peers| Begin {
            id: UpdateId(7),
            label: String::new(),
            origin: Origin::Path("/new".into()),
            remaining: Duration::from_secs(1),
            peers,
            in_flight: v1::InFlight::Recompute,
        };
        let mut many = RunningUpdate::new(begin((0..20).map(peer).collect()));
        let mut asked = Vec::new();
        for _ in 0..5 {
            let round = many.peers_to_ask();
            assert_eq!(round.len(), ASKED_MAX);
            asked.extend(round.into_iter().map(|peer| peer.epoch.0));
        }
        assert_eq!(asked, (0..20).chain(0..20).collect::<Vec<_>>());
        assert_eq!(RunningUpdate::new(begin(vec![peer(1)])).peers_to_ask().len(), 1);
        assert!(RunningUpdate::new(begin(Vec::new())).peers_to_ask().is_empty());
    }
}
