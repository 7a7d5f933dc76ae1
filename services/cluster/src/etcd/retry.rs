//! When to call etcd again after a failure, and when a failure is worth a line in the log.

use std::time::Duration;

use crate::backoff::{Jitter, doubled};

const DELAY_FIRST: Duration = Duration::from_millis(100);
/// An etcd that is back is noticed at most so late.
const DELAY_MAX: Duration = Duration::from_secs(2);

pub(super) struct Retry {
    failures: u32,
    jitter: Jitter,
    reason: Option<String>,
}

impl Retry {
    /// `seed` spreads the calls of many processes; any number will do.
    pub fn new(seed: u64) -> Self {
        Self { failures: 0, jitter: Jitter::new(seed), reason: None }
    }

    /// How long to wait after this failure.
    pub fn delay(&mut self) -> Duration {
        let delay = self.jitter.spread(doubled(DELAY_FIRST, self.failures, DELAY_MAX));
        self.failures = self.failures.saturating_add(1);
        delay
    }

    /// Whether this differs from what was said last; a failure that repeats itself is said once.
    pub fn is_news(&mut self, reason: &str) -> bool {
        let news = self.reason.as_deref() != Some(reason);
        if news {
            self.reason = Some(reason.to_owned());
        }
        news
    }

    /// A call succeeded. Returns whether failures were told of before.
    pub fn succeeded(&mut self) -> bool {
        self.reason.take().is_some()
    }

    /// Successes have lasted: the next failure is a first one.
    pub fn stable(&mut self) {
        self.failures = 0;
    }
}
