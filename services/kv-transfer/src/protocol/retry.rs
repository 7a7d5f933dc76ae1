//! When to say something again.

use std::time::{Duration, Instant};

/// Well above a round trip inside a cluster, so that what is only slow is not repeated.
const FIRST: Duration = Duration::from_millis(100);
/// Four chances at least within one lease.
const MAX: Duration = Duration::from_millis(500);

/// A pause that doubles up to a maximum.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    at: Instant,
    pause: Duration,
}

impl Retry {
    pub fn start(now: Instant) -> Self {
        Self { at: now + FIRST, pause: FIRST }
    }

    pub fn at(&self) -> Instant {
        self.at
    }

    /// True when it is time; the next time is then set.
    pub fn is_due(&mut self, now: Instant) -> bool {
        if now < self.at {
            return false;
        }
        self.pause = (self.pause * 2).min(MAX);
        self.at = now + self.pause;
        true
    }
}
