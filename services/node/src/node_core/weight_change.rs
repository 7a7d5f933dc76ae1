//! Changes of the weights at a step boundary.
//!
//! With a second copy the node swaps the weights at once. In place the node first releases the
//! weights in use: it launches no step, and sequences keep their state, until the new weights are
//! ready. If the update is aborted meanwhile, the node has no valid weights: every sequence fails,
//! and the node refuses calls until it has weights again.

use std::time::{Duration, Instant};

use engine::{
    event::InFlight,
    executor::{Executor, ExecutorError},
};
use proto::v1;

use super::{NodeCore, NodeOutput};

/// Time for running sequences to finish before a change of the weights: half of the time that a
/// router gives a commit.
pub(super) const FINISH_WITHIN: Duration = Duration::from_secs(30);

/// An earlier change or release of the weights has not taken place yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an earlier change of the weights is pending; expected one change at a time")]
pub struct ChangePending;

/// The change of the weights at the next step boundary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PendingWeightChange {
    kind: WeightChangeKind,
    /// Time until which running sequences may finish; `None` once the node has stopped launching
    /// steps.
    pub wait_until: Option<Instant>,
    /// When the node stopped launching steps.
    held_at: Instant,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum WeightChangeKind {
    /// Release the weights in use, so that new weights can overwrite them.
    Release,
    /// Use the weights that the executor has prepared.
    Use { version: u64, label: String, in_flight: InFlight },
}

impl<E: Executor> NodeCore<E> {
    /// Switches to the prepared weights at the next step boundary, then emits
    /// [`NodeOutput::WeightsChanged`]. No step is launched before. `waits`: lets running sequences
    /// finish first, for at most [`FINISH_WITHIN`], and admits no other sequence meanwhile.
    pub fn handle_change_weights(
        &mut self,
        version: u64,
        label: String,
        in_flight: InFlight,
        waits: bool,
        now: Instant,
    ) -> Result<(), ChangePending> {
        self.begin_change(WeightChangeKind::Use { version, label, in_flight }, waits, now)
    }

    /// Releases the weights in use at the next step boundary, then emits
    /// [`NodeOutput::WeightsReleased`]. Launches no step until [`Self::handle_change_weights`],
    /// which describes `waits`.
    pub fn handle_release_weights(
        &mut self,
        waits: bool,
        now: Instant,
    ) -> Result<(), ChangePending> {
        self.begin_change(WeightChangeKind::Release, waits, now)
    }

    fn begin_change(
        &mut self,
        kind: WeightChangeKind,
        waits: bool,
        now: Instant,
    ) -> Result<(), ChangePending> {
        self.now = now;
        if self.weight_change.is_some() {
            return Err(ChangePending);
        }
        // Without weights nothing finishes.
        let waits = waits && self.released_at.is_none();
        let wait_until = waits.then(|| now + FINISH_WITHIN);
        self.weight_change = Some(PendingWeightChange { kind, wait_until, held_at: now });
        self.update_hold();
        if waits {
            self.stop_admitting();
        }
        Ok(())
    }

    /// Handles the abort of an update that has requested the release of the weights. Returns
    /// whether the node has no valid weights now: then every sequence has failed, and calls are
    /// refused until the weights change. A pending release is cancelled.
    pub fn handle_lost_weights(&mut self, now: Instant) -> bool {
        self.now = now;
        if self.weight_change.take_if(|change| change.kind == WeightChangeKind::Release).is_some()
            && self.released_at.is_none()
        {
            self.admit_unless_paused();
            self.update_hold();
        }
        if self.released_at.is_none() {
            return false;
        }
        self.steps.scheduler_mut().fail_all(&mut self.new_actions);
        self.actions.extend(self.new_actions.drain(..));
        self.tell_weights(v1::WeightsChanged::default());
        true
    }

    /// Stops launching steps once the sequences that may finish before the change have finished.
    pub(super) fn end_wait_if_due(&mut self) {
        let now = self.steps.executor().now();
        // Nothing finishes during a pause that holds the steps.
        let can_finish = !self.is_held_by_pause() && self.steps.scheduler().has_running();
        let waits = |change: &&mut PendingWeightChange| {
            change.wait_until.is_some_and(|until| until <= now || !can_finish)
        };
        if let Some(change) = self.weight_change.as_mut().filter(waits) {
            change.wait_until = None;
            change.held_at = now;
            self.update_hold();
        }
    }

    /// Returns whether the weights can change now: no step is in flight, and no earlier command for
    /// the transfers waits.
    pub(super) fn may_change_weights(&self) -> bool {
        self.weight_change.as_ref().is_some_and(|change| change.wait_until.is_none())
            && self.steps.steps_in_flight() == 0
            && self.transfer_retry_at.is_none()
    }

    pub(super) fn change_weights_if_due(&mut self) -> Result<(), ExecutorError> {
        if !self.may_change_weights() {
            return Ok(());
        }
        let Some(change) = self.weight_change.take() else { return Ok(()) };
        // The steps in flight ran on after the hold.
        let stopped_at =
            self.steps.collected_at().map_or(change.held_at, |at| at.max(change.held_at));
        let WeightChangeKind::Use { version, label, in_flight } = change.kind else {
            if self.released_at.is_none() {
                self.steps.release_weights()?;
                self.released_at = Some(stopped_at);
            }
            self.attempts.outputs.push_back(NodeOutput::WeightsReleased);
            return Ok(());
        };
        self.seeds.weight_version = version;
        self.steps.change_weights(self.seeds, in_flight, &mut self.new_actions)?;
        self.actions.extend(self.new_actions.drain(..));
        let stopped_at = self.released_at.take().unwrap_or(stopped_at);
        self.update_hold();
        if self.pause.is_some() {
            self.stop_admitting();
        }
        self.now = self.steps.executor().now();
        self.tell_weights(v1::WeightsChanged { weight_version: version, label });
        let paused = self.now.saturating_duration_since(stopped_at);
        self.attempts.outputs.push_back(NodeOutput::WeightsChanged { paused });
        Ok(())
    }

    /// Reports the new weights to callers, transfers and observers, after the actions so far, which
    /// abort the transfers.
    fn tell_weights(&mut self, changed: v1::WeightsChanged) {
        while let Some(action) = self.actions.pop_front() {
            self.attempts.on_action(action, self.now);
        }
        self.attempts.change_weights(changed.weight_version);
        let outputs = &mut self.attempts.outputs;
        self.observers.change_weights(changed, self.now, &mut self.steps, outputs);
    }
}
