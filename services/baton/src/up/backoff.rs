//! Decides how long a dead child stays down before it is restarted.

use std::time::Duration;

/// First delay.
const FIRST: Duration = Duration::from_millis(200);
/// Maximum delay.
const LONGEST: Duration = Duration::from_secs(10);
/// Minimum time in service after which a restart is not delayed.
const HEALTHY_AFTER: Duration = Duration::from_secs(5);

/// Delay of restarts of a child that dies soon after its start: 200 ms, doubling to 10 s.
#[derive(Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Returns the delay before the next start of a child that served for `served`, not counting
    /// the time that its start took.
    pub(super) fn delay(&mut self, served: Duration) -> Duration {
        if served >= HEALTHY_AFTER {
            self.failures = 0;
            return Duration::ZERO;
        }
        let delay = FIRST.saturating_mul(1 << self.failures.min(16)).min(LONGEST);
        self.failures += 1;
        delay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delays_ms(backoff: &mut Backoff, served_ms: &[u64]) -> Vec<u128> {
        let delays = served_ms.iter().map(|ms| backoff.delay(Duration::from_millis(*ms)));
        delays.map(|delay| delay.as_millis()).collect()
    }

    #[test]
    fn early_deaths_double_the_delay_up_to_its_limit() {
        let delays = delays_ms(&mut Backoff::default(), &[1000; 8]);
        assert_eq!(delays, [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
    }

    #[test]
    fn a_child_that_served_for_five_seconds_restarts_at_once_and_resets_the_delay() {
        let served_ms = [0, 0, 4999, 5000, 5000, 60_000, 4999, 0];
        let delays = delays_ms(&mut Backoff::default(), &served_ms);
        assert_eq!(delays, [200, 400, 800, 0, 0, 0, 200, 400]);
    }
}
