//! Back-off after failed calls to etcd, and suppression of repeated log lines.

use std::time::Duration;

use crate::backoff::{Jitter, doubled};

const DELAY_FIRST: Duration = Duration::from_millis(100);
/// Maximum delay, so the maximum time until a recovered etcd is noticed.
const DELAY_MAX: Duration = Duration::from_secs(2);

pub(super) struct Retry {
    failures: u32,
    jitter: Jitter,
    reason: Option<String>,
}

impl Retry {
    /// Creates the state. `seed` spreads the calls of several processes; any number is valid.
    pub fn new(seed: u64) -> Self {
        Self { failures: 0, jitter: Jitter::new(seed), reason: None }
    }

    /// Returns the delay after this failure.
    pub fn delay(&mut self) -> Duration {
        let delay = self.jitter.spread(doubled(DELAY_FIRST, self.failures, DELAY_MAX));
        self.failures = self.failures.saturating_add(1);
        delay
    }

    /// Returns whether to log this failure: only if it differs from the last logged one.
    pub fn is_news(&mut self, reason: &str) -> bool {
        let news = self.reason.as_deref() != Some(reason);
        if news {
            self.reason = Some(reason.to_owned());
        }
        news
    }

    /// Handles a success. Returns whether failures were logged before.
    pub fn succeeded(&mut self) -> bool {
        self.reason.take().is_some()
    }

    /// Resets the back-off after lasting success.
    pub fn stable(&mut self) {
        self.failures = 0;
    }
}
