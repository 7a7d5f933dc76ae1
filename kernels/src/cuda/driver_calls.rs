//! Driver calls in flight, visible to threads that must not call the driver.
//!
//! A call that frees memory holds the context's lock until the whole GPU is idle. Meanwhile every
//! launch on that context waits: forward passes and transfers to other peers. If an operation is
//! stuck, such a call never returns and blocks them all. The watchdog therefore aborts the stuck
//! operation when a call is overdue.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Longest usual time of a call that frees memory, including NCCL's abort (0.4 to 0.7 s), while
/// nothing is stuck.
pub(super) const FREE_USUAL: Duration = Duration::from_secs(1);
/// A call that is overdue for this long is ignored: no abort makes it return.
const OVERDUE_MAX: Duration = Duration::from_secs(10);

/// Driver calls in flight, each with its longest usual time.
#[derive(Debug, Default)]
pub(super) struct DriverCalls {
    /// Time at which each call becomes overdue, by call number.
    overdue_at: Mutex<BTreeMap<u64, Instant>>,
    begun: AtomicU64,
}

/// A call in flight. Drop it when the call has returned.
#[must_use]
pub(super) struct DriverCall<'a> {
    calls: &'a DriverCalls,
    number: u64,
}

impl DriverCalls {
    pub(super) fn begin(&self, usual: Duration) -> DriverCall<'_> {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        self.overdue_at().insert(number, Instant::now() + usual);
        DriverCall { calls: self, number }
    }

    pub(super) fn any_is_overdue(&self, now: Instant) -> bool {
        self.overdue_at()
            .values()
            .any(|overdue_at| (*overdue_at..*overdue_at + OVERDUE_MAX).contains(&now))
    }

    fn overdue_at(&self) -> MutexGuard<'_, BTreeMap<u64, Instant>> {
        self.overdue_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for DriverCall<'_> {
    fn drop(&mut self) {
        self.calls.overdue_at().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_is_overdue_after_its_usual_time() {
        let calls = DriverCalls::default();
        let now = Instant::now;
        assert!(!calls.any_is_overdue(now()));
        let overdue = calls.begin(Duration::ZERO);
        let _early = calls.begin(Duration::from_secs(60));
        assert!(calls.any_is_overdue(now()));
        assert!(
            !calls.any_is_overdue(now() + OVERDUE_MAX),
            "a call that never returns does not count"
        );
        drop(overdue);
        assert!(!calls.any_is_overdue(now()));
        assert!(calls.any_is_overdue(now() + Duration::from_secs(60)));
    }
}
