//! Retransmission timer.

use std::time::{Duration, Instant};

/// Far longer than a round trip within a cluster, so that slow answers cause no retransmission.
const FIRST: Duration = Duration::from_millis(100);
/// At least four retransmissions within a lease.
const MAX: Duration = Duration::from_millis(500);

/// Exponential back-off up to a maximum.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    /// Time of the next retransmission.
    pub at: Instant,
    pause: Duration,
}

impl Retry {
    pub fn start(now: Instant) -> Self {
        Self { at: now + FIRST, pause: FIRST }
    }

    /// Returns whether to retransmit now, and then sets the next time.
    pub fn is_due(&mut self, now: Instant) -> bool {
        if now < self.at {
            return false;
        }
        self.pause = (self.pause * 2).min(MAX);
        self.at = now + self.pause;
        true
    }
}
