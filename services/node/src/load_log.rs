//! How far loading has come, in the log.

use std::time::{Duration, Instant};

use model::LoadProgress;
use tracing::info;

/// A model that is there sooner says so once.
const EVERY: Duration = Duration::from_secs(5);

/// Says it now and then.
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
        let is_due = now.saturating_duration_since(self.last) >= EVERY;
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
    fn it_is_said_once_in_a_while() {
        let mut log = LoadLog::new();
        let begun = log.last;
        let due: Vec<u64> =
            (0..20).filter(|seconds| log.is_due(begun + Duration::from_secs(*seconds))).collect();
        assert_eq!(due, [5, 10, 15]);
    }
}
