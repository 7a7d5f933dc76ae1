//! The work that the actor starts. Each piece of work ends with an [`ActorTaskOutcome`], which the
//! actor handles.

use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use ::engine::executor::WeightUpdate;
use model::ModelConfig;
use tokio::{runtime, sync::mpsc};
use tokio_util::sync::CancellationToken;
use weight_transfer::{ParticipantInput, UpdateEnd, UpdateId, UpdateState, WeightVersion};

use super::{Actor, ActorTaskOutcome, Obtained, PreparedWeights, RunningUpdate};
use crate::{
    inbox::EngineInbox,
    weights::{
        calls::{FileParts, WeightsCallError, WeightsOrigin},
        copy::{self, PARTS_MAX, SILENCE_MAX, WeightFiles},
        engine::{ChangeError, change_weights, lose_weights, release_weights},
        of_requests_in_flight,
        peers::PeerCredentials,
        receive::{ReceiveError, receive},
        restore::{LostWeights, restore},
        standby::CANCELLED,
        trainer,
    },
};

/// Time-out of a question to a peer.
const ASK_MAX: Duration = Duration::from_secs(1);
/// Interval of the check whether a kept trainer has left.
const TRAINER_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Delay before a failed restoration is repeated: doubles with each try.
const RESTORE_RETRY_MIN: Duration = Duration::from_secs(1);
const RESTORE_RETRY_MAX: Duration = Duration::from_secs(30);
/// Owner of the prepared weights while they are restored. Coordinators choose ids at random.
const RESTORE: UpdateId = UpdateId(0);

impl Actor {
    /// Removes copies of processes that were killed.
    pub(super) fn remove_leftovers(&mut self) {
        let folder = self.settings.folder.clone();
        self.work.spawn(async move {
            // A panic leaves the copies on the disk.
            let _ = tokio::task::spawn_blocking(move || copy::remove_leftovers(&folder)).await;
            ActorTaskOutcome::Quiet
        });
    }

    /// Removes the files of weights, unless a peer still copies them. Gigabytes take a while.
    pub(super) fn remove(&mut self, (_, files): Obtained) {
        let Some(files) = files else { return };
        self.work.spawn(async move {
            // A panic leaves the files on the disk.
            let _ = tokio::task::spawn_blocking(move || drop(files)).await;
            ActorTaskOutcome::Quiet
        });
    }

    /// Ends the communicator of a kept trainer that has left.
    pub(super) fn watch_trainer(&mut self) {
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
            ActorTaskOutcome::TrainerLeft
        });
    }

    /// Streams the files of weights to a peer.
    pub(super) fn copy(&mut self, version: WeightVersion) -> Result<FileParts, WeightsCallError> {
        let sources = [&self.prepared, &self.committed];
        let source = sources.into_iter().flatten().find(|(found, _)| *found == version);
        let source = source.and_then(|(_, source)| source.clone());
        let source = source.ok_or(WeightsCallError::NoSource { version })?;
        let (parts, received) = mpsc::channel(PARTS_MAX);
        self.work.spawn(async move {
            // A panic ends the stream, and the peer fails.
            let runtime = runtime::Handle::current();
            let send = move || copy::send(&source, &parts, &runtime, SILENCE_MAX);
            let _ = tokio::task::spawn_blocking(send).await;
            ActorTaskOutcome::Quiet
        });
        Ok(received)
    }

    pub(super) fn receive(&mut self, id: UpdateId) {
        let Some(running) = self.running.as_ref().filter(|it| it.begin.id == id) else { return };
        let Some(standby) = self.standby.clone() else { return };
        let RunningUpdate { begin, cancelled, .. } = running;
        tracing::info!(update = %id, label = begin.label, origin = ?begin.origin, "receiving weights");
        let (origin, cancelled) = (begin.origin.clone(), cancelled.clone());
        let limits = self.settings.limits;
        let model = self.settings.model.clone();
        let release = {
            let (inbox, is_released) = (self.settings.inbox.clone(), self.released.clone());
            let (_, waits) = of_requests_in_flight(begin.in_flight);
            let cancelled = cancelled.clone();
            move || release(id, &inbox, waits, &is_released, &cancelled)
        };
        let credentials = self.settings.credentials.clone();
        let folder = self.settings.folder.clone();
        let (kept, inbox) = (self.trainer.clone(), self.settings.inbox.clone());
        self.work.spawn(async move {
            if let WeightsOrigin::Trainer(address) = origin {
                let prepare = move |update: &dyn WeightUpdate, cancelled: &CancellationToken| {
                    let is_serving = || inbox.attempt_count() > 0;
                    let version =
                        trainer::receive(&address, &kept, update, &release, &is_serving, cancelled);
                    let version = version.map_err(|error| error.to_string())?;
                    Ok(PreparedWeights { version, files: None })
                };
                let outcome = standby.prepare(id, cancelled, prepare).await;
                return ActorTaskOutcome::Received { id, outcome };
            }
            let source = cancelled
                .run_until_cancelled(obtain(origin, &model, &credentials, &folder))
                .await
                .unwrap_or_else(|| Err(CANCELLED.to_owned()));
            let (source, expected) = match source {
                Ok(source) => source,
                Err(reason) => return ActorTaskOutcome::Received { id, outcome: Err(reason) },
            };
            let prepare = move |update: &dyn WeightUpdate, cancelled: &CancellationToken| {
                let version =
                    receive(&source.path, (&model, limits), update, &release, cancelled)
                        .map_err(|error| error.to_string())?;
                match expected.filter(|expected| *expected != version) {
                    Some(expected) => Err(format!(
                        "the copy has weight_version {version}; expected {expected}, the peer's version"
                    )),
                    None => Ok(PreparedWeights { version, files: Some(source) }),
                }
            };
            let outcome = standby.prepare(id, cancelled, prepare).await;
            ActorTaskOutcome::Received { id, outcome }
        });
    }

    /// Frees the weights that are not in use.
    pub(super) fn discard(&mut self, id: UpdateId) {
        // Cancels the work of this update. The work of a committed update has finished.
        if self.running.take_if(|running| running.begin.id == id).is_some() {
            if let Some(UpdateState::Ended(UpdateEnd::Aborted { reason })) =
                self.participant.state_of(id)
            {
                tracing::warn!(update = %id, reason, "the weight update was aborted");
            }
            if let Some(prepared) = self.prepared.take() {
                self.remove(prepared);
            }
            self.lose_if_released(id);
        }
        let Some(standby) = self.standby.clone() else { return };
        self.work.spawn(async move {
            standby.discard(id).await;
            ActorTaskOutcome::Quiet
        });
    }

    /// Lets the engine thread swap the weights.
    pub(super) fn install(&mut self, id: UpdateId, version: WeightVersion) {
        let begin = self.running.as_ref().map(|running| &running.begin);
        let label = begin.map(|begin| begin.label.clone()).unwrap_or_default();
        let in_flight = begin.map(|begin| begin.in_flight).unwrap_or_default();
        let (in_flight, waits) = of_requests_in_flight(in_flight);
        let inbox = self.settings.inbox.clone();
        self.work.spawn(async move {
            match change_weights(&inbox, version, &label, in_flight, waits).await {
                Ok(paused) => ActorTaskOutcome::Installed { id, paused },
                Err(ChangeError::Ended) => ActorTaskOutcome::Quiet,
                Err(error @ ChangeError::Pending(_)) => {
                    let reason = format!("cannot use the new weights: {error}");
                    ActorTaskOutcome::Input(ParticipantInput::InstallFailed { id, reason })
                }
            }
        });
    }

    /// Ends an update in place without a commit: tells the engine thread, and restores the weights
    /// if they are lost.
    pub(super) fn lose_if_released(&mut self, id: UpdateId) {
        if released(&self.released).take_if(|released| *released == id).is_some() {
            let inbox = self.settings.inbox.clone();
            self.work.spawn(async move { ActorTaskOutcome::Lost(lose_weights(&inbox, id).await) });
        } else if self.serving.version == WeightVersion::NONE {
            self.restore();
        }
    }

    /// Restores the weights from before an aborted update in place, unless another update brings
    /// weights or a restoration runs. Repeats a failed restoration until another update begins or
    /// the node stops.
    pub(super) fn restore(&mut self) {
        if self.running.is_some() || self.restoring.is_some() {
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
        let limits = self.settings.limits;
        let model = self.settings.model.clone();
        self.work.spawn(async move {
            let mut retry_after = RESTORE_RETRY_MIN;
            let version = loop {
                // Set once the restored weights are in use, even if an update cancels the
                // restoration at that moment.
                let restored = Arc::new(OnceLock::new());
                let changed = restored.clone();
                let (lost, model, inbox) = (lost.clone(), model.clone(), inbox.clone());
                // The aborted update may still write: the weights have one owner at a time.
                let restore = move |update: &dyn WeightUpdate, cancelled: &CancellationToken| {
                    let settings = (&model, limits);
                    let outcome = restore(lost, settings, update, &inbox, cancelled);
                    outcome.inspect(|version| _ = changed.set(*version))
                };
                let outcome = standby.prepare(RESTORE, cancelled.clone(), restore).await;
                match restored.get().copied().map_or(outcome, Ok) {
                    Ok(version) => break Some(version),
                    Err(_) if cancelled.is_cancelled() => break None,
                    Err(reason) => tracing::error!(
                        "cannot restore the weights: {reason}; the next try follows after {} s, unless an update begins",
                        retry_after.as_secs()
                    ),
                }
                let delay = tokio::time::sleep(retry_after);
                if cancelled.run_until_cancelled(delay).await.is_none() {
                    break None;
                }
                retry_after = (2 * retry_after).min(RESTORE_RETRY_MAX);
            };
            ActorTaskOutcome::Restored { version, cancelled }
        });
    }

    pub(super) fn ask_peers(&mut self, id: UpdateId) {
        let Some(running) = self.running.as_mut().filter(|it| it.begin.id == id) else { return };
        for peer in running.peers_to_ask() {
            let credentials = self.settings.credentials.clone();
            self.work.spawn(async move {
                match tokio::time::timeout(ASK_MAX, credentials.committed_by(&peer, id)).await {
                    Ok(Ok(Some(version))) => {
                        ActorTaskOutcome::Input(ParticipantInput::PeerCommitted { id, version })
                    }
                    Ok(Ok(None)) => ActorTaskOutcome::Quiet,
                    Ok(Err(error)) => {
                        tracing::debug!(update = %id, peer = peer.grpc, error, "cannot ask a peer");
                        ActorTaskOutcome::Quiet
                    }
                    Err(_) => ActorTaskOutcome::Quiet,
                }
            });
        }
    }
}

/// Releases the weights in use for the update `id`. Blocks. Fails once `cancelled` is cancelled.
fn release(
    id: UpdateId,
    inbox: &EngineInbox,
    waits: bool,
    is_released: &Mutex<Option<UpdateId>>,
    cancelled: &CancellationToken,
) -> Result<(), ReceiveError> {
    let runtime = runtime::Handle::current();
    *released(is_released) = Some(id);
    let release = cancelled.run_until_cancelled(release_weights(inbox, id, waits));
    let outcome = runtime.block_on(release);
    if cancelled.is_cancelled() {
        // The abort may have told the engine before the release was sent.
        if runtime.block_on(lose_weights(inbox, id)) {
            *released(is_released) = Some(id);
        }
        return Err(ReceiveError::Cancelled);
    }
    outcome.unwrap_or(Err(ChangeError::Ended)).map_err(ReceiveError::Release)
}

pub(super) fn released(released: &Mutex<Option<UpdateId>>) -> MutexGuard<'_, Option<UpdateId>> {
    // An id: a panic elsewhere leaves it valid.
    released.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the place of new weights on this machine, and the version that they must have.
async fn obtain(
    origin: WeightsOrigin,
    model: &ModelConfig,
    credentials: &PeerCredentials,
    folder: &Path,
) -> Result<(WeightFiles, Option<WeightVersion>), String> {
    match origin {
        WeightsOrigin::Path(path) => Ok((WeightFiles { path, _copy: None }, None)),
        WeightsOrigin::Trainer(_) => unreachable!("a trainer sends no files"),
        WeightsOrigin::Peer { peer, version } => {
            // Twice the size of f32 weights, and 64 MiB for the headers of files.
            let bytes_max = 8 * model.parameter_count() + (1 << 26);
            let source = copy::pull(&peer, version, credentials, folder, bytes_max).await?;
            Ok((source, Some(version)))
        }
    }
}

#[cfg(test)]
mod tests {
    use ::engine::executor::CollectWaker;
    use tokio::task::spawn_blocking;

    use super::*;
    use crate::inbox::EngineCommand;

    const ID: UpdateId = UpdateId(7);
    const WITHIN: Duration = Duration::from_secs(10);

    /// The abort told the engine before the release reached it.
    #[tokio::test]
    async fn release_that_an_abort_overtook_is_followed_by_the_loss_of_the_weights() {
        let (inbox, commands) = EngineInbox::new(1, CollectWaker::default());
        let is_released = Arc::new(Mutex::new(None));
        let cancelled = CancellationToken::new();
        let work = {
            let (is_released, cancelled) = (is_released.clone(), cancelled.clone());
            spawn_blocking(move || release(ID, &inbox, false, &is_released, &cancelled))
        };
        let engine = {
            let is_released = is_released.clone();
            spawn_blocking(move || {
                let release = commands.recv_timeout(WITHIN).unwrap();
                assert!(matches!(release, EngineCommand::ReleaseWeights { update: ID, .. }));
                assert_eq!(released(&is_released).take(), Some(ID));
                cancelled.cancel();
                match commands.recv_timeout(WITHIN).unwrap() {
                    EngineCommand::LoseWeights { update: ID, lost, .. } => lost.send(true).unwrap(),
                    command => panic!("{command:?}"),
                }
            })
        };
        engine.await.unwrap();
        assert!(matches!(work.await.unwrap(), Err(ReceiveError::Cancelled)));
        assert_eq!(*released(&is_released), Some(ID), "the actor restores the weights");
    }
}
