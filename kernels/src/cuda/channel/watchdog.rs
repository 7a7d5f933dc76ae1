//! Watchdog of a channel: aborts a channel whose oldest operation is stuck.

use std::{
    sync::{
        Arc, Weak,
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use super::{message_of, operations::ChannelControl};

/// Interval between two polls. Time is counted in polls, so that a pause of this process or machine
/// counts as one poll.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Maximum numbers of polls of an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct StuckLimits {
    /// Limit for any operation. Callers time out earlier.
    pub polls_max: u32,
    /// Limit for an operation that is launched completely while another thread is blocked in the
    /// driver. An operation that is not launched completely may itself be blocked.
    pub blocking_polls_max: u32,
}

/// Limits for an operation: 2.5 s and 0.2 s. An operation takes milliseconds.
const OPERATION: StuckLimits = StuckLimits { polls_max: 50, blocking_polls_max: 4 };

/// Thread that aborts a stuck channel. It never calls the CUDA driver itself: the driver may be
/// blocked on this very channel. Then other pairs and forward passes are blocked too, so the limit
/// is much shorter.
pub(super) struct Watchdog {
    /// Dropping the sender ends the thread.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(super) fn start(shared: &Arc<ChannelControl>) -> Result<Self, String> {
        let (stop, stopped) = mpsc::channel();
        let shared = Arc::downgrade(shared);
        let named = thread::Builder::new().name("nccl-watchdog".to_owned());
        let thread = named.spawn(move || watch(&shared, &stopped)).map_err(message_of)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the watchdog has been printed; the channel ends anyway.
            let _ = thread.join();
        }
    }
}

fn watch(shared: &Weak<ChannelControl>, stopped: &mpsc::Receiver<()>) {
    let mut detector = StuckDetector::new(OPERATION);
    while stopped.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let Some(shared) = shared.upgrade() else { return };
        if let Some(reason) = detector.is_stuck(shared.oldest(), || shared.is_driver_blocked()) {
            // Callers that wait for the operation get the reason.
            let _ = shared.abort_because(reason);
            return;
        }
    }
}

/// The oldest operation in flight on a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OldestOperation {
    pub number: u64,
    /// Whether every part of the operation is in its stream.
    pub is_launched: bool,
}

/// Counter of the polls for which the oldest operation has stayed the same.
pub(super) struct StuckDetector {
    limits: StuckLimits,
    oldest: Option<OldestOperation>,
    polls: u32,
    /// Polls since the operation was launched completely.
    polls_launched: u32,
}

impl StuckDetector {
    pub(super) fn new(limits: StuckLimits) -> Self {
        Self { limits, oldest: None, polls: 0, polls_launched: 0 }
    }

    /// Counts one poll. Returns why the channel must be aborted, if the operation is stuck.
    pub(super) fn is_stuck(
        &mut self,
        oldest: Option<OldestOperation>,
        is_blocked: impl Fn() -> bool,
    ) -> Option<&'static str> {
        let number = |oldest: Option<OldestOperation>| oldest.map(|oldest| oldest.number);
        let is_same = number(oldest) == number(self.oldest);
        self.polls = if is_same { self.polls.saturating_add(1) } else { 0 };
        self.polls_launched =
            if oldest == self.oldest { self.polls_launched.saturating_add(1) } else { 0 };
        self.oldest = oldest;
        let oldest = oldest?;
        let StuckLimits { polls_max, blocking_polls_max } = self.limits;
        if oldest.is_launched && self.polls_launched >= blocking_polls_max && is_blocked() {
            return Some(
                "the channel was aborted: an operation hung and blocked other work on the GPU",
            );
        }
        (self.polls >= polls_max).then_some("the channel was aborted: an operation hung")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of polls until an operation counts as stuck.
    fn polls_until_stuck(is_launched: impl Fn(u32) -> bool, is_blocked: bool) -> u32 {
        let mut detector = StuckDetector::new(OPERATION);
        let oldest = |poll| Some(OldestOperation { number: 7, is_launched: is_launched(poll) });
        (0..1000).find(|poll| detector.is_stuck(oldest(*poll), || is_blocked).is_some()).unwrap()
    }

    #[test]
    fn stuck_operation_is_detected_sooner_while_the_driver_is_blocked() {
        let StuckLimits { polls_max, blocking_polls_max } = OPERATION;
        assert_eq!(polls_until_stuck(|_| true, false), polls_max);
        assert_eq!(polls_until_stuck(|_| false, false), polls_max);
        assert_eq!(polls_until_stuck(|_| true, true), blocking_polls_max);
        assert_eq!(polls_until_stuck(|_| false, true), polls_max);
        assert_eq!(polls_until_stuck(|poll| poll >= 10, true), 10 + blocking_polls_max);
        // A late launch does not reset the limit for any operation.
        assert_eq!(polls_until_stuck(|poll| poll >= 30, false), polls_max);
    }

    #[test]
    fn finished_operations_are_not_stuck() {
        let mut detector = StuckDetector::new(OPERATION);
        for poll in 0..1000 {
            // Another operation at every third poll, and sometimes none.
            let oldest = OldestOperation { number: poll / 3, is_launched: true };
            let oldest = (poll % 7 > 0).then_some(oldest);
            assert_eq!(detector.is_stuck(oldest, || true), None, "{poll}");
        }
    }
}
