//! Calls to the engine thread, which changes the weights between steps.

use std::time::Duration;

use engine::event::InFlight;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use weight_transfer::{UpdateId, WeightVersion};

use crate::{
    inbox::{EngineCommand, EngineInbox},
    node_core::{ChangePending, Refusal},
};

/// Delay before a command is offered again to a full queue of the engine thread.
const RETRY_AFTER: Duration = Duration::from_millis(5);

/// Reason why the engine thread does not change or release the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ChangeError {
    /// The engine has ended, which also ends the node.
    #[error("the engine has ended")]
    Ended,
    #[error(transparent)]
    Pending(#[from] ChangePending),
}

/// Lets the engine thread use the prepared weights. Returns the time for which no step ran.
pub(super) async fn change_weights(
    inbox: &EngineInbox,
    version: WeightVersion,
    label: &str,
    in_flight: InFlight,
    waits: bool,
) -> Result<Duration, ChangeError> {
    let change = |changed, _permit| EngineCommand::ChangeWeights {
        weight_version: version.0,
        label: label.to_owned(),
        in_flight,
        waits,
        changed,
        _permit,
    };
    Ok(call(inbox, change).await.ok_or(ChangeError::Ended)??)
}

/// Releases the weights in use, so that new weights can overwrite them. `waits`: lets running
/// sequences finish first. Returns [`ChangeError::Ended`] also if the update was aborted.
pub(super) async fn release_weights(
    inbox: &EngineInbox,
    update: UpdateId,
    waits: bool,
) -> Result<(), ChangeError> {
    let release =
        |released, _permit| EngineCommand::ReleaseWeights { update, waits, released, _permit };
    Ok(call(inbox, release).await.ok_or(ChangeError::Ended)??)
}

/// Ends an update that may have released the weights. Returns whether the node has no valid weights
/// now; `false` also if the update did not release them, or another update has done so since.
pub(super) async fn lose_weights(inbox: &EngineInbox, update: UpdateId) -> bool {
    let lose = |lost, _permit| EngineCommand::LoseWeights { update, lost, _permit };
    call(inbox, lose).await.unwrap_or(false)
}

/// Sends a command and waits for its outcome.
async fn call<T>(
    inbox: &EngineInbox,
    command: impl Fn(oneshot::Sender<T>, OwnedSemaphorePermit) -> EngineCommand,
) -> Option<T> {
    loop {
        let (reply, answer) = oneshot::channel();
        match inbox.send_for_router(|permit| command(reply, permit)) {
            Ok(()) => return answer.await.ok(),
            Err(Refusal::Busy { .. }) => tokio::time::sleep(RETRY_AFTER).await,
            Err(_) => return None,
        }
    }
}
