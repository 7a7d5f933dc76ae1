//! Back-off of the calls to etcd.

use std::time::Duration;

use cluster::backoff::{Jitter, doubled};

const RETRY_DELAY_FIRST: Duration = Duration::from_millis(100);
/// Maximum delay, and thus the maximum time to detect that etcd has recovered.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(2);

/// Back-off after failed calls to etcd, and suppression of repeated log lines.
pub(crate) struct RetryBackoff {
    failures: u32,
    jitter: Jitter,
    reason: Option<String>,
}

impl RetryBackoff {
    /// Creates the state. `seed` spreads the calls of several processes; any number is valid.
    pub(crate) fn new(seed: u64) -> Self {
        Self { failures: 0, jitter: Jitter::new(seed), reason: None }
    }

    /// Returns the delay after this failure.
    pub(crate) fn delay(&mut self) -> Duration {
        let delay = self.jitter.spread(doubled(RETRY_DELAY_FIRST, self.failures, RETRY_DELAY_MAX));
        self.failures = self.failures.saturating_add(1);
        delay
    }

    /// Returns whether to log this failure: only if its reason differs from the last logged reason.
    pub(crate) fn is_news(&mut self, reason: &str) -> bool {
        let news = self.reason.as_deref() != Some(reason);
        if news {
            self.reason = Some(reason.to_owned());
        }
        news
    }

    /// Handles a success. Returns whether failures were logged before.
    pub(crate) fn succeeded(&mut self) -> bool {
        self.reason.take().is_some()
    }

    /// Resets the back-off after lasting success.
    pub(crate) fn stable(&mut self) {
        self.failures = 0;
    }
}
