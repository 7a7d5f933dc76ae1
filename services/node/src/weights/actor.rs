//! The task that owns the node's part in weight updates: it handles calls and deadlines, and starts
//! the work.

mod work;

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use ::engine::executor::WeightUpdate;
use model::ModelConfig;
use tokio::{
    sync::mpsc,
    task::{JoinHandle, JoinSet},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use weight_transfer::{
    Participant, ParticipantAction, ParticipantInput, Proposal, UpdateEnd, UpdateId, UpdateReport,
    UpdateState, WeightVersion,
};

use self::work::released;
use super::{
    calls::{
        CALLS_MAX, CheckedUpdate, Handle, WeightsCall, WeightsCallError, WeightsMessage,
        WeightsStatus,
    },
    copy::WeightFiles,
    peers::{PeerCredentials, UpdatePeer},
    receive::UpdateLimits,
    restore::LoadedModel,
    standby::Standby,
    trainer::KeptTrainer,
};
use crate::inbox::EngineInbox;

/// Number of peers asked in a round; rounds rotate over all peers.
const ASKED_MAX: usize = 8;

/// The parts of the node that the actor uses.
pub(crate) struct WeightSettings {
    pub model: ModelConfig,
    /// The weights to restore after an aborted update in place, unless an update was committed.
    pub loaded: LoadedModel,
    pub limits: UpdateLimits,
    /// `None`: the device cannot change its weights.
    pub update: Option<Arc<dyn WeightUpdate>>,
    pub inbox: EngineInbox,
    pub credentials: PeerCredentials,
    /// Folder for weights that are copied from peers.
    pub folder: PathBuf,
}

/// The running task. Dropping it stops the task without waiting.
#[derive(Debug)]
pub(crate) struct WeightActor {
    stop: DropGuard,
    task: JoinHandle<()>,
    handle: Handle,
}

impl WeightActor {
    pub(crate) fn start(settings: WeightSettings) -> Self {
        let (messages, received) = mpsc::channel(CALLS_MAX);
        let stop = CancellationToken::new();
        let mut actor = Actor::new(settings);
        actor.remove_leftovers();
        let task = tokio::spawn(actor.run(received, stop.clone()));
        Self { stop: stop.drop_guard(), task, handle: Handle { messages } }
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Stops the task. Work that blocks a thread, such as reading weights, ends at its next check.
    pub(crate) async fn shutdown(self) {
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
    /// The update that has released or will release the weights in use, until it is committed or
    /// lost.
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
    serving: WeightsStatus,
    work: JoinSet<ActorTaskOutcome>,
    /// `None`: the device cannot change its weights.
    standby: Option<Standby>,
}

/// Version and files of weights; no files if a trainer sent the weights.
type Obtained = (WeightVersion, Option<Arc<WeightFiles>>);

/// Prepared weights, and their files unless a trainer sent the weights.
struct PreparedWeights {
    version: WeightVersion,
    files: Option<WeightFiles>,
}

struct RunningUpdate {
    begin: CheckedUpdate,
    /// Cancelled when this value is dropped.
    cancelled: CancellationToken,
    _cancel: DropGuard,
    /// Index of the peer that the next round of questions asks first.
    next_peer: usize,
}

impl RunningUpdate {
    fn new(begin: CheckedUpdate) -> Self {
        let cancelled = CancellationToken::new();
        Self { begin, _cancel: cancelled.clone().drop_guard(), cancelled, next_peer: 0 }
    }

    /// Returns the peers that a round of questions asks.
    fn peers_to_ask(&mut self) -> Vec<UpdatePeer> {
        let peers = &self.begin.peers;
        let asked = peers.iter().cycle().skip(self.next_peer).take(peers.len().min(ASKED_MAX));
        let asked: Vec<_> = asked.cloned().collect();
        self.next_peer = (self.next_peer + asked.len()) % peers.len().max(1);
        asked
    }
}

/// Outcome of work that the actor started.
enum ActorTaskOutcome {
    Input(ParticipantInput),
    Received {
        id: UpdateId,
        outcome: Result<PreparedWeights, String>,
    },
    Installed {
        id: UpdateId,
        paused: Duration,
    },
    /// An update in place ended without a commit. Whether the node lost its weights by this update.
    Lost(bool),
    /// The weights from before an aborted update in place are in use again. `None`: the restoration
    /// was cancelled.
    Restored {
        version: Option<WeightVersion>,
        cancelled: CancellationToken,
    },
    /// The kept trainer has left.
    TrainerLeft,
    /// Nothing to report.
    Quiet,
}

impl Actor {
    fn new(settings: WeightSettings) -> Self {
        Self {
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
            serving: WeightsStatus {
                version: WeightVersion::LOADED,
                label: String::new(),
                report: None,
                paused: None,
            },
            work: JoinSet::new(),
        }
    }

    async fn run(mut self, mut messages: mpsc::Receiver<WeightsMessage>, stop: CancellationToken) {
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
                    WeightsMessage::Call(call, reply) => {
                        let update = call.update();
                        let outcome = self.call(call);
                        self.act();
                        // The caller may have stopped waiting.
                        let _ = reply.send(outcome.map(|()| self.weights(update)));
                    }
                    WeightsMessage::Copy(version, reply) => {
                        let _ = reply.send(self.copy(version));
                    }
                },
                Some(done) = self.work.join_next() => {
                    // A panic while reading weights counts as a failed read.
                    self.done(done.unwrap_or(ActorTaskOutcome::Quiet));
                }
                () = due => self.participant.on_deadline(Instant::now()),
            }
            self.act();
        }
        (self.running, self.restoring) = (None, None);
        self.work.shutdown().await;
    }

    /// Returns the weights in use with the state of this update, or of the running or last one.
    fn weights(&self, update: Option<UpdateId>) -> WeightsStatus {
        let report = match update {
            Some(id) => self.participant.state_of(id).map(|state| UpdateReport { id, state }),
            None => self.participant.report(),
        };
        WeightsStatus { report, ..self.serving.clone() }
    }

    fn call(&mut self, call: WeightsCall) -> Result<(), WeightsCallError> {
        let now = Instant::now();
        match call {
            WeightsCall::Begin(begin) => {
                if self.standby.is_none() {
                    return Err(WeightsCallError::Unsupported);
                }
                let proposal = Proposal { id: begin.id, deadline: now + begin.remaining };
                let is_new = self.participant.begin(now, proposal)?;
                self.participant.heard(now, begin.id);
                if is_new {
                    if let Some(replaced) = self.running.as_ref().map(|it| it.begin.id) {
                        // An operator's update replaces a catch-up.
                        self.discard(replaced);
                    }
                    self.restoring = None;
                    self.running = Some(RunningUpdate::new(begin));
                }
            }
            WeightsCall::Commit { id, version } => {
                self.participant.heard(now, id);
                self.participant.commit(id, version)?;
            }
            WeightsCall::Abort { id, reason } => {
                self.participant.abort(id, &reason);
            }
            WeightsCall::Status { coordinated, .. } => {
                if let Some(id) = coordinated {
                    self.participant.heard(now, id);
                }
            }
        }
        Ok(())
    }

    fn done(&mut self, done: ActorTaskOutcome) {
        match done {
            ActorTaskOutcome::Input(input) => self.participant.handle(input),
            ActorTaskOutcome::Received { id, outcome } => {
                let outcome = outcome.map(|PreparedWeights { version, files }| {
                    let obtained = (version, files.map(Arc::new));
                    match self.running.as_ref().is_some_and(|running| running.begin.id == id) {
                        true => self.prepared = Some(obtained),
                        false => self.remove(obtained),
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
            ActorTaskOutcome::Lost(is_lost) => {
                if is_lost {
                    tracing::warn!("the node has no valid weights: an update in place was aborted");
                    self.serving.version = WeightVersion::NONE;
                }
                // An earlier update may have lost the weights.
                if self.serving.version == WeightVersion::NONE {
                    self.restore();
                }
            }
            ActorTaskOutcome::Restored { version, cancelled } => {
                // The guard of a cancelled restoration was dropped. `restoring` may have the guard
                // of the next one.
                if !cancelled.is_cancelled() {
                    self.restoring = None;
                }
                if let Some(version) = version {
                    self.serving.version = version;
                    tracing::info!(weight_version = %version, "restored the weights");
                }
            }
            ActorTaskOutcome::Installed { id, paused } => {
                *released(&self.released) = None;
                if let Some(running) = self.running.take().filter(|it| it.begin.id == id) {
                    self.serving.label.clone_from(&running.begin.label);
                }
                self.serving.paused = Some((id, paused));
                let before = std::mem::replace(&mut self.committed, self.prepared.take());
                before.into_iter().for_each(|before| self.remove(before));
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
            ActorTaskOutcome::TrainerLeft => {
                self.watches_trainer = false;
                self.watch_trainer();
            }
            ActorTaskOutcome::Quiet => {}
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
}

#[cfg(test)]
mod tests {
    use std::{
        path::Path,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use ::engine::executor::{CollectWaker, PrepareError};
    use cluster::Epoch;
    use model::{Checkpoint, Family, LoadFormat, RopeScaling};
    use proto::{auth::ClusterSecret, v1};

    use super::*;
    use crate::{
        inbox::EngineCommand,
        node_core::ChangePending,
        weights::{calls::WeightsOrigin, copy::CopiedFiles, standby::CANCELLED},
    };

    #[derive(Default)]
    struct Device {
        /// Number of calls of `prepare` that fail.
        failures: AtomicUsize,
    }

    impl WeightUpdate for Device {
        fn is_in_place(&self) -> bool {
            true
        }

        fn prepare(&self, _: &Path, _: &Checkpoint) -> Result<(), PrepareError> {
            let failures = self.failures.load(Ordering::Relaxed);
            if failures == 0 {
                return Ok(());
            }
            self.failures.store(failures - 1, Ordering::Relaxed);
            Err(PrepareError::Device("input/output error".to_owned()))
        }

        fn discard(&self) {}
    }

    /// Returns the actor of a node whose model files were removed.
    fn actor() -> Actor {
        let loaded =
            LoadedModel { path: "/removed".into(), format: LoadFormat::Auto, fingerprint: 1 };
        actor_with(loaded, EngineInbox::new(1, CollectWaker::default()).0)
    }

    fn actor_with(loaded: LoadedModel, inbox: EngineInbox) -> Actor {
        actor_on(Device::default(), loaded, inbox)
    }

    fn actor_on(device: Device, loaded: LoadedModel, inbox: EngineInbox) -> Actor {
        let model = ModelConfig {
            family: Family::named("llama").unwrap(),
            hidden_size: 64,
            layer_count: 1,
            query_head_count: 1,
            kv_head_count: 1,
            head_dim: 64,
            rotary_dim: 64,
            ffn_size: 64,
            vocab_size: 10,
            context_tokens: 64,
            rms_eps: 1e-6,
            query_pre_attn_scalar: 64.0,
            rope_theta: 1e4,
            window_rope_theta: None,
            rope_scaling: RopeScaling::None,
            rope_attention_factor: 1.0,
            layers: Vec::new(),
            tied_output: true,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
        };
        let secret = ClusterSecret::new("the secret of the cluster").unwrap();
        Actor::new(WeightSettings {
            model,
            loaded,
            limits: UpdateLimits::default(),
            update: Some(Arc::new(device)),
            inbox,
            credentials: PeerCredentials { secret, tls: None },
            folder: "/removed".into(),
        })
    }

    /// Returns a model of random weights.
    fn random_model() -> LoadedModel {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../model/tests/fixtures/tiny_llama3/config.json");
        let format = LoadFormat::Dummy { seed: 7 };
        let fingerprint = Checkpoint::open(&path, format).unwrap().model_fingerprint().unwrap();
        LoadedModel { path, format, fingerprint }
    }

    #[tokio::test]
    async fn restored_weights_count_although_an_update_begins_at_that_moment() {
        let (inbox, commands) = EngineInbox::new(1, CollectWaker::default());
        let mut actor = actor_with(random_model(), inbox);
        actor.done(ActorTaskOutcome::Lost(true));
        assert_eq!(actor.serving.version, WeightVersion::NONE);
        let restoring = actor.restoring.take().unwrap();
        let engine = tokio::task::spawn_blocking(move || {
            match commands.recv_timeout(Duration::from_secs(60)).unwrap() {
                EngineCommand::ChangeWeights { changed, .. } => {
                    // A new update stops the restoration while the engine changes the weights.
                    drop(restoring);
                    changed.send(Ok(Duration::ZERO)).unwrap();
                }
                command => panic!("{command:?}"),
            }
        });
        let done = actor.work.join_next().await.unwrap().unwrap();
        engine.await.unwrap();
        actor.done(done);
        assert_eq!(actor.serving.version, WeightVersion::LOADED);
    }

    #[tokio::test]
    async fn lost_weights_have_one_restoration_at_a_time() {
        let mut actor = actor();
        // An abort takes effect in the engine before the work of the update ends.
        actor.done(ActorTaskOutcome::Lost(true));
        let outcome = Err(CANCELLED.to_owned());
        actor.done(ActorTaskOutcome::Received { id: UpdateId(7), outcome });
        assert_eq!(actor.work.len(), 1);
        // Another update begins.
        actor.restoring = None;
        let restored = actor.work.join_next().await.unwrap().unwrap();
        assert!(matches!(restored, ActorTaskOutcome::Restored { version: None, .. }));
        actor.done(restored);
        assert_eq!(actor.serving.version, WeightVersion::NONE);
        actor.done(ActorTaskOutcome::Lost(true));
        assert_eq!(actor.work.len(), 1, "the end of this update begins another restoration");
    }

    #[tokio::test]
    async fn node_without_weights_restores_them_after_an_update_that_released_nothing() {
        let mut actor = actor();
        actor.done(ActorTaskOutcome::Lost(false));
        assert!(actor.restoring.is_none(), "the node has its weights");
        actor.serving.version = WeightVersion::NONE;
        actor.done(ActorTaskOutcome::Lost(false));
        assert!(actor.restoring.is_some());
    }

    #[tokio::test]
    async fn failed_restoration_is_repeated() {
        let (inbox, commands) = EngineInbox::new(1, CollectWaker::default());
        let device = Device { failures: AtomicUsize::new(1) };
        let mut actor = actor_on(device, random_model(), inbox);
        actor.done(ActorTaskOutcome::Lost(true));
        let engine = tokio::task::spawn_blocking(move || {
            match commands.recv_timeout(Duration::from_secs(60)).unwrap() {
                EngineCommand::ChangeWeights { changed, .. } => {
                    changed.send(Ok(Duration::ZERO)).unwrap()
                }
                command => panic!("{command:?}"),
            }
        });
        let done = actor.work.join_next().await.unwrap().unwrap();
        assert!(matches!(
            done,
            ActorTaskOutcome::Restored { version: Some(WeightVersion::LOADED), .. }
        ));
        actor.done(done);
        engine.await.unwrap();
        assert_eq!(actor.serving.version, WeightVersion::LOADED);
        assert!(actor.restoring.is_none());
    }

    fn begin_of(id: UpdateId) -> CheckedUpdate {
        CheckedUpdate {
            id,
            label: String::new(),
            origin: WeightsOrigin::Path("/new".into()),
            remaining: Duration::from_secs(1),
            peers: Vec::new(),
            in_flight: v1::InFlight::Recompute,
        }
    }

    #[tokio::test]
    async fn committed_update_fails_if_the_engine_refuses_the_change() {
        let (inbox, commands) = EngineInbox::new(1, CollectWaker::default());
        let loaded =
            LoadedModel { path: "/removed".into(), format: LoadFormat::Auto, fingerprint: 1 };
        let mut actor = actor_with(loaded, inbox);
        let (id, version) = (UpdateId::of_operator(7), WeightVersion(70));
        actor.call(WeightsCall::Begin(begin_of(id))).unwrap();
        assert_eq!(actor.participant.poll_action(), Some(ParticipantAction::Receive { id }));
        actor.done(ActorTaskOutcome::Received {
            id,
            outcome: Ok(PreparedWeights { version, files: None }),
        });
        actor.call(WeightsCall::Commit { id, version }).unwrap();
        actor.act();
        let engine = tokio::task::spawn_blocking(move || {
            match commands.recv_timeout(Duration::from_secs(60)).unwrap() {
                EngineCommand::ChangeWeights { changed, .. } => {
                    changed.send(Err(ChangePending)).unwrap();
                }
                command => panic!("{command:?}"),
            }
        });
        let done = actor.work.join_next().await.unwrap().unwrap();
        engine.await.unwrap();
        actor.done(done);
        actor.act();
        let reason = format!("cannot use the new weights: {ChangePending}");
        let state = actor.participant.report().unwrap().state;
        assert_eq!(state, UpdateState::Ended(UpdateEnd::Aborted { reason }));
        assert!(actor.running.is_none() && actor.prepared.is_none());
        assert_eq!(actor.serving.version, WeightVersion::LOADED);
    }

    #[tokio::test]
    async fn committed_update_is_reported_by_its_id_while_another_runs() {
        let mut actor = actor();
        let (id, version) = (UpdateId::of_operator(7), WeightVersion(70));
        actor.call(WeightsCall::Begin(begin_of(id))).unwrap();
        actor.done(ActorTaskOutcome::Received {
            id,
            outcome: Ok(PreparedWeights { version, files: None }),
        });
        actor.call(WeightsCall::Commit { id, version }).unwrap();
        let paused = Duration::from_millis(3);
        actor.done(ActorTaskOutcome::Installed { id, paused });
        let other = UpdateId::of_operator(8);
        actor.call(WeightsCall::Begin(begin_of(other))).unwrap();
        for call in [
            WeightsCall::Status { coordinated: None, asked: Some(id) },
            WeightsCall::Abort { id, reason: String::new() },
            WeightsCall::Commit { id, version },
        ] {
            let update = call.update();
            actor.call(call).unwrap();
            let weights = actor.weights(update);
            let state = UpdateState::Ended(UpdateEnd::Committed(version));
            assert_eq!(weights.report, Some(UpdateReport { id, state }));
            assert_eq!(weights.paused, Some((id, paused)));
        }
        let report = UpdateReport { id: other, state: UpdateState::Receiving };
        assert_eq!(actor.weights(None).report, Some(report));
    }

    #[tokio::test]
    async fn update_of_an_operator_cancels_a_catch_up_in_place() {
        let mut actor = actor();
        let catch_up = UpdateId::of_catch_up(7);
        actor.call(WeightsCall::Begin(begin_of(catch_up))).unwrap();
        actor.act();
        *released(&actor.released) = Some(catch_up);
        let cancelled = actor.running.as_ref().unwrap().cancelled.clone();
        let id = UpdateId::of_operator(8);
        actor.call(WeightsCall::Begin(begin_of(id))).unwrap();
        actor.act();
        assert!(cancelled.is_cancelled());
        assert_eq!(
            *released(&actor.released),
            None,
            "the engine is told that the weights are lost"
        );
        let running = actor.running.as_ref().unwrap();
        assert_eq!(running.begin.id, id);
        assert!(!running.cancelled.is_cancelled());
    }

    #[tokio::test]
    async fn replaced_files_are_removed_on_another_thread() {
        let folder = tempfile::tempdir().unwrap();
        let copy = CopiedFiles::new(folder.path()).unwrap();
        let files = WeightFiles { path: folder.path().to_owned(), _copy: Some(copy) };
        let copies = || std::fs::read_dir(folder.path()).unwrap().count();
        let mut actor = actor();
        actor.committed = Some((WeightVersion(1), Some(Arc::new(files))));
        actor.done(ActorTaskOutcome::Installed { id: UpdateId(7), paused: Duration::ZERO });
        assert_eq!(copies(), 1, "removing gigabytes would block the thread");
        actor.work.join_next().await.unwrap().unwrap();
        assert_eq!(copies(), 0);
    }

    #[test]
    fn rounds_of_questions_ask_every_peer_in_turn() {
        let peer = |number: u128| UpdatePeer { epoch: Epoch(number), grpc: String::new() };
        let begin = |peers| CheckedUpdate { peers, ..begin_of(UpdateId(7)) };
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
