//! The task that owns the node's part in updates: calls, deadlines, and the work that they start.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use cluster::{Epoch, Tls};
use engine::executor::WeightUpdate;
use http::Uri;
use hyper_util::rt::TokioIo;
use model::ModelConfig;
use proto::{
    auth::{CallSigner, ClusterSecret},
    v1::{self, weights_client::WeightsClient},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::{JoinHandle, JoinSet},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Endpoint;
use weight_transfer::{
    BeginError, CommitError, Participant, ParticipantAction, ParticipantInput, Proposal, UpdateEnd,
    UpdateId, UpdateReport, UpdateState, WeightVersion,
};

use super::receive::receive;
use crate::{
    inbox::{Command, Inbox},
    node_core::Refusal,
};

/// Queued calls: those of a few coordinators and of the peers of an update.
const CALLS_MAX: usize = 64;
/// Time-out of a question to a peer.
const ASK_MAX: Duration = Duration::from_secs(1);
/// Delay before the commit is offered again to a full queue of the engine thread.
const RETRY_AFTER: Duration = Duration::from_millis(5);

/// The parts of the node that the actor uses.
pub(crate) struct WeightSettings {
    pub model: ModelConfig,
    /// Host memory that a second copy of the weights takes.
    pub host_bytes: u64,
    /// `None`: the device cannot change its weights.
    pub update: Option<Arc<dyn WeightUpdate>>,
    pub inbox: Inbox,
    pub secret: ClusterSecret,
    /// Encrypts the questions to peers, if the cluster has certificates.
    pub tls: Option<Tls>,
}

/// An update whose fields are checked.
#[derive(Clone, Debug)]
pub(super) struct Begin {
    pub id: UpdateId,
    pub label: String,
    pub path: PathBuf,
    pub chunk_bytes: u64,
    pub remaining: Duration,
    pub peers: Vec<Peer>,
}

/// Another node of the update.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub epoch: Epoch,
    pub grpc: String,
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
        "cannot change the weights: this node holds no second copy; expected a node without node.tp on a CPU, or on a GPU \
         with weights.place = shadow"
    )]
    Unsupported,
    #[error(transparent)]
    Begin(#[from] BeginError),
    #[error(transparent)]
    Commit(#[from] CommitError),
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

/// Sends calls to the actor.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    calls: mpsc::Sender<(Call, Reply)>,
}

impl Handle {
    pub(super) async fn call(&self, call: Call) -> Result<NodeWeights, CallError> {
        let (reply, answer) = oneshot::channel();
        self.calls.try_send((call, reply)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => CallError::Busy,
            mpsc::error::TrySendError::Closed(_) => CallError::Stopped,
        })?;
        answer.await.map_err(|_| CallError::Stopped)?
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
        let (calls, received) = mpsc::channel(CALLS_MAX);
        let stop = CancellationToken::new();
        let actor = Actor {
            settings,
            participant: Participant::default(),
            running: None,
            serving: NodeWeights {
                version: WeightVersion::LOADED,
                label: String::new(),
                report: None,
                paused: None,
            },
            work: JoinSet::new(),
            device: Arc::default(),
        };
        let task = tokio::spawn(actor.run(received, stop.clone()));
        Self { stop: stop.drop_guard(), task, handle: Handle { calls } }
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
    serving: NodeWeights,
    work: JoinSet<Done>,
    /// Held while weights are prepared or freed: one at a time.
    device: Arc<tokio::sync::Mutex<()>>,
}

struct RunningUpdate {
    begin: Begin,
    cancelled: Arc<AtomicBool>,
}

impl Drop for RunningUpdate {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Release);
    }
}

/// The end of a piece of work.
enum Done {
    Input(ParticipantInput),
    Installed {
        id: UpdateId,
        paused: Duration,
    },
    /// Nothing to report.
    Quiet,
}

impl Actor {
    async fn run(mut self, mut calls: mpsc::Receiver<(Call, Reply)>, stop: CancellationToken) {
        loop {
            let due = async {
                match self.participant.next_deadline() {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => break,
                Some((call, reply)) = calls.recv() => {
                    let outcome = self.call(call);
                    self.act();
                    // The caller may be gone.
                    let _ = reply.send(outcome.map(|()| self.weights()));
                }
                Some(done) = self.work.join_next() => {
                    // A panic while reading weights counts as a failed read.
                    self.done(done.unwrap_or(Done::Quiet));
                }
                () = due => self.participant.on_deadline(Instant::now()),
            }
            self.act();
        }
        self.running = None;
        self.work.shutdown().await;
    }

    fn weights(&self) -> NodeWeights {
        NodeWeights { report: self.participant.report(), ..self.serving.clone() }
    }

    fn call(&mut self, call: Call) -> Result<(), CallError> {
        let now = Instant::now();
        match call {
            Call::Begin(begin) => {
                if self.settings.update.is_none() {
                    return Err(CallError::Unsupported);
                }
                let proposal = Proposal { id: begin.id, deadline: now + begin.remaining };
                self.participant.begin(now, proposal)?;
                self.participant.heard(now, begin.id);
                if self.running.as_ref().is_none_or(|running| running.begin.id != begin.id) {
                    self.running = Some(RunningUpdate { begin, cancelled: Arc::default() });
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
            Done::Installed { id, paused } => {
                if let Some(running) = self.running.take().filter(|it| it.begin.id == id) {
                    self.serving.label.clone_from(&running.begin.label);
                }
                self.serving.paused = Some(paused);
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

    fn receive(&mut self, id: UpdateId) {
        let Some(running) = self.running.as_ref().filter(|it| it.begin.id == id) else { return };
        let Some(update) = self.settings.update.clone() else { return };
        let RunningUpdate { begin, cancelled } = running;
        tracing::info!(update = %id, label = begin.label, path = %begin.path.display(), "receives weights");
        let (begin, cancelled) = (begin.clone(), cancelled.clone());
        let (model, device) = (self.settings.model.clone(), self.device.clone());
        let host_bytes = self.settings.host_bytes;
        self.work.spawn(async move {
            let device = device.lock_owned().await;
            let read = tokio::task::spawn_blocking(move || {
                let _device = device;
                let outcome = receive(
                    &begin.path,
                    begin.chunk_bytes,
                    (&model, host_bytes),
                    &*update,
                    &cancelled,
                );
                if outcome.is_err() || cancelled.load(Ordering::Acquire) {
                    update.discard();
                }
                outcome.map_err(|error| error.to_string())
            });
            let outcome =
                read.await.unwrap_or_else(|panic| Err(format!("reading failed: {panic}")));
            Done::Input(ParticipantInput::Received { id, outcome })
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
        // Cancels the work of this update.
        self.running.take_if(|running| running.begin.id == id);
        let Some(update) = self.settings.update.clone() else { return };
        let device = self.device.clone();
        self.work.spawn(async move {
            let device = device.lock_owned().await;
            let free = tokio::task::spawn_blocking(move || {
                let _device = device;
                update.discard();
            });
            // A panic leaves the memory allocated.
            let _ = free.await;
            Done::Quiet
        });
    }

    /// Lets the engine thread exchange the weights.
    fn install(&mut self, id: UpdateId, version: WeightVersion) {
        let label = self.running.as_ref().map(|running| running.begin.label.clone());
        let label = label.unwrap_or_default();
        let inbox = self.settings.inbox.clone();
        self.work.spawn(async move {
            let mut changed = loop {
                let (reply, changed) = oneshot::channel();
                let label = label.clone();
                let sent = inbox.send_for_router(|_permit| Command::ChangeWeights {
                    weight_version: version.0,
                    label,
                    changed: reply,
                    _permit,
                });
                match sent {
                    Ok(()) => break changed,
                    Err(Refusal::Busy { .. }) => tokio::time::sleep(RETRY_AFTER).await,
                    // The engine has ended, and the node ends.
                    Err(_) => return Done::Quiet,
                }
            };
            match (&mut changed).await {
                Ok(paused) => Done::Installed { id, paused },
                Err(_) => Done::Quiet,
            }
        });
    }

    fn ask_peers(&mut self, id: UpdateId) {
        let Some(running) = self.running.as_ref().filter(|it| it.begin.id == id) else { return };
        for peer in running.begin.peers.clone() {
            let (secret, tls) = (self.settings.secret.clone(), self.settings.tls.clone());
            self.work.spawn(async move {
                match tokio::time::timeout(ASK_MAX, committed_by(peer, id, &secret, tls)).await {
                    Ok(Some(version)) => {
                        Done::Input(ParticipantInput::PeerCommitted { id, version })
                    }
                    _ => Done::Quiet,
                }
            });
        }
    }
}

/// Returns the version with which the peer has committed the update, if it has.
async fn committed_by(
    peer: Peer,
    id: UpdateId,
    secret: &ClusterSecret,
    tls: Option<Tls>,
) -> Option<WeightVersion> {
    let endpoint = Endpoint::from_shared(peer.grpc).ok()?;
    let signer = CallSigner::new(secret).ok()?.to(peer.epoch);
    let connect = move |url: Uri| {
        let tls = tls.clone();
        async move { cluster::connect(&url, tls.as_ref()).await.map(TokioIo::new) }
    };
    let channel = endpoint.connect_with_connector(tower::service_fn(connect)).await.ok()?;
    let mut client = WeightsClient::with_interceptor(channel, signer);
    let node_epoch = peer.epoch.to_bytes().to_vec().into();
    let request = v1::WeightsStatusRequest { node_epoch, ..Default::default() };
    let status = client.status(request).await.ok()?.into_inner();
    let update = status.update.filter(|update| *update.update_id == id.0.to_be_bytes())?;
    match update.state() {
        v1::UpdateState::Committed | v1::UpdateState::Installing => {
            Some(WeightVersion(update.weight_version))
        }
        _ => None,
    }
}
