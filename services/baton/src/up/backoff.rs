//! How long to wait before a dead child is started again.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(10);
/// A run this long was a healthy one: waiting starts over.
const HEALTHY: Duration = Duration::from_secs(30);

/// Doubles from 200 ms to 10 s; a healthy run resets it.
#[derive(Default)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    pub fn after_run_of(&mut self, lasted: Duration) -> Duration {
        if lasted >= HEALTHY {
            self.failures = 0;
        }
        let wait = FIRST.saturating_mul(1 << self.failures.min(16)).min(LONGEST);
        self.failures += 1;
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_deaths_wait_longer_and_a_healthy_run_starts_over() {
        let mut backoff = Backoff::default();
        let waits: Vec<u128> =
            (0..8).map(|_| backoff.after_run_of(Duration::from_secs(1)).as_millis()).collect();
        assert_eq!(waits, [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(backoff.after_run_of(HEALTHY), FIRST);
    }
}
