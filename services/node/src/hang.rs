//! Detection of a device that hangs, for the liveness probe.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Start time of the oldest step in flight. The engine thread writes the time, and probes read it:
/// probes must answer while the engine thread is blocked in a call of the device's driver.
#[derive(Debug, Default)]
pub(crate) struct StepInFlight(Mutex<Option<Instant>>);

impl StepInFlight {
    /// Stores `now` as the start time unless a step is in flight. Called before the engine thread
    /// calls the executor.
    pub(crate) fn begin_turn(&self, now: Instant) {
        self.lock().get_or_insert(now);
    }

    /// Stores the start time of the oldest step in flight, which is `step_age` ago. Called after
    /// the executor has returned.
    pub(crate) fn end_turn(&self, now: Instant, step_age: Option<Duration>) {
        *self.lock() = step_age.and_then(|age| now.checked_sub(age));
    }

    /// Returns how long the oldest step has been in flight, if that is at least `limit`.
    pub(crate) fn hung_for(&self, now: Instant, limit: Duration) -> Option<Duration> {
        let age = now.saturating_duration_since((*self.lock())?);
        (age >= limit).then_some(age)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_that_does_not_finish_is_a_hang_and_an_idle_engine_is_not() {
        const LIMIT: Duration = Duration::from_secs(10);
        let (steps, start) = (StepInFlight::default(), Instant::now());
        let hung = |seconds| steps.hung_for(start + Duration::from_secs(seconds), LIMIT).is_some();
        assert!(!hung(1000), "no step was launched");
        steps.begin_turn(start);
        assert!(!hung(9));
        assert!(hung(10), "the launch itself may block");
        // The engine thread waits for the step in short turns.
        for second in 0..20 {
            let now = start + Duration::from_secs(second);
            steps.begin_turn(now);
            steps.end_turn(now, Some(Duration::from_secs(second)));
        }
        assert!(hung(20));
        steps.end_turn(start + Duration::from_secs(30), Some(Duration::from_secs(3)));
        assert!(!hung(36), "a later step is the oldest now");
        steps.end_turn(start + Duration::from_secs(40), None);
        assert!(!hung(1000));
    }
}
