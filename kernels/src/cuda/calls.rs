//! Who is within the driver, for threads that never go there.
//!
//! What gives memory back holds the context's lock until the whole GPU is idle, and whatever else is put into its
//! streams waits for that lock: transfers of other peers, and forwards. So what a GPU waits for in vain holds all of
//! them up, and whoever can end it has to know.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// What gives memory back, an abort of NCCL's (0.4 to 0.7 s) included, takes no longer while nothing is stuck, and no
/// forward in a stream does.
pub(super) const GIVING_BACK: Duration = Duration::from_secs(1);
/// A call that is late for so long will not come back, whatever ends.
const LATE_MAX: Duration = Duration::from_secs(10);

/// Calls under way that say how long they usually take at most.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// By number: from when on it takes longer.
    late_at: Mutex<BTreeMap<u64, Instant>>,
    begun: AtomicU64,
}

/// One of them, over when this is dropped.
#[must_use]
pub(super) struct Call<'a> {
    calls: &'a Calls,
    number: u64,
}

impl Calls {
    pub fn begin(&self, usual: Duration) -> Call<'_> {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        self.late_at().insert(number, Instant::now() + usual);
        Call { calls: self, number }
    }

    pub fn any_is_late(&self, now: Instant) -> bool {
        self.late_at().values().any(|late_at| (*late_at..*late_at + LATE_MAX).contains(&now))
    }

    fn late_at(&self) -> MutexGuard<'_, BTreeMap<u64, Instant>> {
        self.late_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.calls.late_at().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_late_while_they_take_longer_than_usual() {
        let calls = Calls::default();
        let now = Instant::now;
        assert!(!calls.any_is_late(now()));
        let late = calls.begin(Duration::ZERO);
        let _early = calls.begin(Duration::from_secs(60));
        assert!(calls.any_is_late(now()));
        assert!(!calls.any_is_late(now() + LATE_MAX), "it never ends");
        drop(late);
        assert!(!calls.any_is_late(now()));
        assert!(calls.any_is_late(now() + Duration::from_secs(60)));
    }
}
