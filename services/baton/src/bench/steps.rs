//! Statistics of step records: host time, device time and idle time.

use engine::{StepRecord, plan::Dispatch};
use serde::Serialize;

use super::stats::{Percentiles, median};

/// Time in µs that the engine thread works on a step, without waiting for the device, over the
/// steps of all runs.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct HostTimes {
    pub plan: Percentiles,
    pub launch: Percentiles,
    pub collect: Percentiles,
    pub all: Percentiles,
}

/// Numbers of steps by launch mode, and number of padding rows.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Dispatches {
    pub eager: u64,
    pub graph: u64,
    pub fallback: u64,
    pub padding_rows: u64,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct DecodeStats {
    /// Mean step time of each run over its [`DecodeSteps`].
    pub step_ms_all: Vec<f64>,
    pub step_ms_median: f64,
    pub host_us: HostTimes,
    pub device_busy_us: Percentiles,
    /// Fraction of the time in which the device is idle, over the [`DecodeSteps`]. Median of the
    /// runs.
    pub device_idle_share: Option<f64>,
    pub dispatches: Dispatches,
    /// Median of the bytes sent to the device for a step.
    pub uploaded_bytes_p50: f64,
    /// Memory-bound minimum of the step time: the bytes that a step reads, at peak bandwidth.
    pub floor_ms: Option<f64>,
    pub share_of_floor: Option<f64>,
}

/// The part of a run in which every sequence decodes: from the end of the first step, which gives
/// the last sequence its first token, to the end of the last step.
#[derive(Clone, Debug)]
pub(super) struct DecodeSteps {
    pub steps: Vec<StepRecord>,
    /// Tokens that each sequence has after its first.
    pub tokens_after_first: u32,
}

impl DecodeSteps {
    fn step_ms(&self) -> f64 {
        let [first, .., last] = &self.steps[..] else { return 0.0 };
        let wall = last.collect.end.saturating_duration_since(first.collect.end);
        wall.as_secs_f64() * 1e3 / f64::from(self.tokens_after_first)
    }

    /// Returns the idle fraction; `None` if the device does not report times.
    fn idle_share(&self) -> Option<f64> {
        let [first, rest @ ..] = &self.steps[..] else { return None };
        let begin = first.device?.end;
        let wall = rest.last()?.device?.end.saturating_duration_since(begin);
        let busy = rest.iter().map(|step| {
            step.device.map(|device| {
                device.end.saturating_duration_since(device.begin.max(begin)).as_secs_f64()
            })
        });
        Some(1.0 - busy.sum::<Option<f64>>()? / wall.as_secs_f64())
    }
}

impl DecodeStats {
    pub(super) fn of(runs: &[DecodeSteps], floor_ms: Option<f64>) -> Self {
        let steps = || runs.iter().flat_map(|run| &run.steps[run.steps.len().min(1)..]);
        let spread =
            |value: &dyn Fn(&StepRecord) -> f64| Percentiles::of(steps().map(value).collect());
        let plan = |step: &StepRecord| step.plan.duration().as_secs_f64() * 1e6;
        let launch = |step: &StepRecord| step.launch.duration().as_secs_f64() * 1e6;
        let collect = |step: &StepRecord| step.collect.duration().as_secs_f64() * 1e6;
        let mut dispatches = Dispatches::default();
        for step in steps() {
            dispatches.padding_rows += u64::from(step.padding_rows());
            match step.dispatch {
                Dispatch::Eager => dispatches.eager += 1,
                Dispatch::Graph { .. } => dispatches.graph += 1,
                Dispatch::Fallback => dispatches.fallback += 1,
            }
        }
        let step_ms_all: Vec<f64> = runs.iter().map(DecodeSteps::step_ms).collect();
        let step_ms_median = median(&step_ms_all);
        let idle: Option<Vec<f64>> = runs.iter().map(DecodeSteps::idle_share).collect();
        Self {
            step_ms_all,
            step_ms_median,
            host_us: HostTimes {
                plan: spread(&plan),
                launch: spread(&launch),
                collect: spread(&collect),
                all: spread(&|step| plan(step) + launch(step) + collect(step)),
            },
            device_busy_us: spread(&|step| step.busy.as_secs_f64() * 1e6),
            device_idle_share: idle.map(|shares| median(&shares)),
            dispatches,
            uploaded_bytes_p50: spread(&|step| step.uploaded_bytes as f64).p50,
            floor_ms,
            share_of_floor: floor_ms.map(|floor| floor / step_ms_median),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use engine::{StepKind, StepWork, plan::Span};

    use super::*;

    /// Returns a step of the device from `begin` to `end` in ms. The host collects the step 0.5 ms
    /// later.
    fn step(origin: Instant, begin: u64, end: u64) -> StepRecord {
        let at = |us: u64| origin + Duration::from_micros(us);
        let span = |begin, end| Span { begin: at(begin), end: at(end) };
        let (begin, end) = (1000 * begin, 1000 * end);
        StepRecord {
            step_id: 0,
            rows: 3,
            tokens: 3,
            sampled: 3,
            kind: StepKind::Decode,
            work: StepWork::default(),
            dispatch: Dispatch::Graph { rows: 4 },
            uploaded_bytes: 100,
            experts: Default::default(),
            busy: Duration::from_micros(end - begin),
            plan: span(begin, begin + 10),
            launch: span(begin, begin + 20),
            collect: span(end + 470, end + 500),
            device: Some(span(begin, end)),
            results_at: None,
        }
    }

    #[test]
    fn step_time_is_the_mean_between_the_last_first_token_and_the_last_token() {
        let origin = Instant::now();
        // 1 ms idle before the last step; the first step does not count.
        let steps = [(0, 9), (9, 13), (14, 19)].map(|(begin, end)| step(origin, begin, end));
        let run = DecodeSteps { steps: steps.into(), tokens_after_first: 2 };
        let stats = DecodeStats::of(&[run.clone(), run], Some(2.0));
        assert_eq!(stats.step_ms_all, [5.0, 5.0]);
        assert_eq!(stats.share_of_floor, Some(0.4));
        assert!((stats.device_idle_share.unwrap() - 0.1).abs() < 1e-9, "{stats:?}");
        let HostTimes { plan, launch, collect, all } = stats.host_us;
        for (found, wanted) in [(plan, 10.0), (launch, 20.0), (collect, 30.0), (all, 60.0)] {
            assert!((found.p50 - wanted).abs() < 1e-6 && (found.p99 - wanted).abs() < 1e-6);
        }
        let Dispatches { graph, padding_rows, .. } = stats.dispatches;
        assert_eq!((graph, padding_rows), (4, 4));
        assert_eq!(stats.device_busy_us.p50, 4000.0);
    }

    #[test]
    fn run_without_steps_has_no_statistics() {
        let run = DecodeSteps { steps: Vec::new(), tokens_after_first: 1 };
        let stats = DecodeStats::of(&[run], None);
        assert_eq!((stats.step_ms_median, stats.device_idle_share), (0.0, None));
    }
}
