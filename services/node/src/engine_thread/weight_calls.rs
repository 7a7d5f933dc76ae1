//! The callers that wait until the core has changed or released the weights.

use std::time::Duration;

use tokio::sync::oneshot;
use weight_transfer::UpdateId;

use crate::node_core::ChangePending;

/// The callers of the change and of the release that the core has begun. A caller may have stopped
/// waiting.
#[derive(Debug, Default)]
pub(super) struct WeightCalls {
    changed: Option<oneshot::Sender<Result<Duration, ChangePending>>>,
    /// The last update that released the weights or will release them.
    releasing: Option<UpdateId>,
    released: Option<oneshot::Sender<Result<(), ChangePending>>>,
}

impl WeightCalls {
    pub(super) fn await_change(
        &mut self,
        begun: Result<(), ChangePending>,
        changed: oneshot::Sender<Result<Duration, ChangePending>>,
    ) {
        match begun {
            Ok(()) => self.changed = Some(changed),
            Err(pending) => _ = changed.send(Err(pending)),
        }
    }

    pub(super) fn await_release(
        &mut self,
        update: UpdateId,
        begun: Result<(), ChangePending>,
        released: oneshot::Sender<Result<(), ChangePending>>,
    ) {
        match begun {
            Ok(()) => (self.releasing, self.released) = (Some(update), Some(released)),
            Err(pending) => _ = released.send(Err(pending)),
        }
    }

    /// Returns whether the aborted update has released the weights last: the release by the next
    /// update may have overtaken the abort. Then nobody waits for the release.
    pub(super) fn lose(&mut self, update: UpdateId) -> bool {
        let is_last = self.releasing == Some(update);
        if is_last {
            self.released = None;
        }
        is_last
    }

    pub(super) fn changed(&mut self, paused: Duration) {
        if let Some(changed) = self.changed.take() {
            let _ = changed.send(Ok(paused));
        }
    }

    pub(super) fn released(&mut self) {
        if let Some(released) = self.released.take() {
            let _ = released.send(Ok(()));
        }
    }
}
