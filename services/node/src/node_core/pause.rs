//! Pauses of the node. A paused node admits no sequence and launches no step; if the pause waits,
//! running sequences finish first.
//!
//! `Serving → Pausing → Paused → Serving`. An operator's resume, or the deadline of the pause,
//! returns to serving from either state. The weights may change during a pause, and the pause
//! continues.

use std::time::Instant;

use engine::{event::InFlight, executor::Executor};
use proto::v1;

use super::{NodeCore, NodeOutput};

/// A pause that an operator began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pause {
    in_flight: InFlight,
    /// Whether running sequences finish first. Otherwise no step is launched.
    waits: bool,
    /// When the node serves again.
    pub until: Instant,
    /// Whether running sequences must still leave the batch.
    empties_batch: bool,
}

impl<E: Executor> NodeCore<E> {
    /// Pauses the node until [`Self::handle_resume`], at most until `until`. `waits`: lets running
    /// sequences finish. Otherwise `in_flight` decides whether running sequences stay in the batch
    /// with their KV or leave it.
    pub fn handle_pause(&mut self, in_flight: InFlight, waits: bool, until: Instant, now: Instant) {
        self.now = now;
        let empties_batch = !waits && in_flight != InFlight::KeepKv;
        self.pause = Some(Pause { in_flight, waits, until, empties_batch });
        self.stop_admitting();
        self.update_hold();
        self.report_pause();
    }

    /// Ends a pause. Does nothing while the node serves.
    pub fn handle_resume(&mut self, now: Instant) {
        self.now = now;
        if self.pause.take().is_some() {
            let waits = |change: &super::PendingWeightChange| change.wait_until.is_some();
            if !self.weight_change.as_ref().is_some_and(waits) {
                self.admit_unless_paused();
            }
            self.update_hold();
            self.report_pause();
        }
    }

    pub(super) fn stop_admitting(&mut self) {
        self.steps.scheduler_mut().stop_admitting(&mut self.new_actions);
        self.actions.extend(self.new_actions.drain(..));
    }

    pub(super) fn admit_unless_paused(&mut self) {
        if self.pause.is_none() {
            self.steps.scheduler_mut().admit_again();
        }
    }

    /// Launches steps unless a change of the weights or a pause holds them, or the weights are
    /// released.
    pub(super) fn update_hold(&mut self) {
        let change = self.weight_change.as_ref();
        let is_changing = change.is_some_and(|change| change.wait_until.is_none());
        let has_weights = self.released_at.is_none();
        self.steps.set_held(is_changing || self.is_held_by_pause() || !has_weights);
    }

    pub(super) fn is_held_by_pause(&self) -> bool {
        self.pause.as_ref().is_some_and(|pause| !pause.waits)
    }

    /// Takes running sequences out of the batch once no step is in flight.
    pub(super) fn empty_batch_if_due(&mut self) {
        if let Some(pause) = self.pause.as_mut().filter(|pause| pause.empties_batch)
            && self.steps.steps_in_flight() == 0
        {
            pause.empties_batch = false;
            self.steps.scheduler_mut().empty_batch(pause.in_flight, &mut self.new_actions);
            self.actions.extend(self.new_actions.drain(..));
        }
    }

    pub(super) fn end_pause_if_due(&mut self) {
        let now = self.steps.executor().now();
        if self.pause.as_ref().is_some_and(|pause| pause.until <= now) {
            self.handle_resume(now);
        }
    }

    /// Tells observers and the shell when the state of the pause has changed.
    pub(super) fn report_pause(&mut self) {
        let state = match &self.pause {
            None => v1::PauseState::None,
            Some(pause) => {
                let runs = self.steps.steps_in_flight() > 0
                    || pause.empties_batch
                    || pause.waits && self.steps.scheduler().has_running();
                if runs { v1::PauseState::Pausing } else { v1::PauseState::Paused }
            }
        };
        if state != self.pause_state {
            self.pause_state = state;
            let outputs = &mut self.attempts.outputs;
            self.observers.set_pause(state, self.now, &mut self.steps, outputs);
            outputs.push_back(NodeOutput::PauseChanged { state });
        }
    }
}
