//! Logs the progress of loading the weights.

use std::time::{Duration, Instant};

use model::LoadProgress;
use tracing::info;

/// Time between two log lines.
const INTERVAL: Duration = Duration::from_secs(5);

/// Logs at most every [`INTERVAL`].
pub(crate) struct LoadLog {
    last: Instant,
}

impl LoadLog {
    pub fn new() -> Self {
        Self { last: Instant::now() }
    }

    pub fn at(&mut self, progress: LoadProgress) {
        let LoadProgress { parameters_done, parameters_total } = progress;
        if self.is_due(Instant::now()) && parameters_done < parameters_total {
            let percent = 100 * u128::from(parameters_done) / u128::from(parameters_total);
            info!(percent, parameters = parameters_done, "loading the weights");
        }
    }

    fn is_due(&mut self, now: Instant) -> bool {
        let is_due = now.saturating_duration_since(self.last) >= INTERVAL;
        if is_due {
            self.last = now;
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_logged_once_per_interval() {
        let mut log = LoadLog::new();
        let start = log.last;
        let due: Vec<u64> =
            (0..20).filter(|seconds| log.is_due(start + Duration::from_secs(*seconds))).collect();
        assert_eq!(due, [5, 10, 15]);
    }
}
