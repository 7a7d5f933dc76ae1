//! The device of a simulated node: an executor of the engine on the cluster's virtual clock.
//!
//! All nodes share the clock, so no executor may advance it. [`Device`] only decides when each step
//! is due, by a cost model. An inner executor computes the step's result. It is the `sim` executor,
//! which checks tokens and KV, or in the replay of a trace the `counting` executor.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use cluster::predict::{DecodeCosts, PrefillCosts};
use engine::{
    StepWork,
    event::InFlight,
    executor::{
        Executor, ExecutorError, ExecutorLimits,
        counting::CountingExecutor,
        sim::{CostModel, SimArena, SimExecutor},
    },
    plan::{RowMask, StepId, StepPlan, StepResult},
};
use kernels::KvGroups;
use simulation_base::Random;

/// Cost model of a device: the time of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    pub prefill: PrefillCosts,
    pub decode: DecodeCosts,
    /// Standard deviation of a step's time, as a fraction of the mean time.
    pub deviation: f64,
    /// Whether a step's result is computed when the step is launched, instead of when the result is
    /// due. A real device computes it at a time in between.
    pub is_eager: bool,
}

impl StepCost {
    /// Returns a cost model in which each step and each token take a fixed time.
    pub fn linear(step: Duration, token: Duration) -> Self {
        let [step_ms, token_ms] = [step, token].map(|time| time.as_secs_f64() * 1e3);
        Self {
            prefill: PrefillCosts { step_ms, token_ms, pair_ms: 0.0 },
            decode: DecodeCosts { step_ms, row_ms: token_ms, context_token_ms: 0.0 },
            deviation: 0.0,
            is_eager: false,
        }
    }

    /// Returns the mean time of a step in ms. A step with prefill takes at least as long as a step
    /// with the same decode rows and no prefill, because every step reads all weights.
    pub fn step_ms(&self, work: &StepWork) -> f64 {
        let Self { prefill, decode, .. } = self;
        let rows_ms = decode.row_ms * f64::from(work.decode_rows)
            + decode.context_token_ms * work.context_tokens as f64;
        if work.prefill_tokens == 0 {
            return decode.step_ms + rows_ms;
        }
        let prefill_ms = prefill.step_ms
            + prefill.token_ms * f64::from(work.prefill_tokens)
            + prefill.pair_ms * work.prefill_pairs as f64;
        prefill_ms.max(decode.step_ms) + rows_ms
    }
}

/// The executor that computes the results of steps.
enum InnerExecutor {
    Checked(SimExecutor),
    Counted(CountingExecutor),
}

impl InnerExecutor {
    fn executor(&self) -> &dyn Executor {
        match self {
            Self::Checked(executor) => executor,
            Self::Counted(executor) => executor,
        }
    }

    fn executor_mut(&mut self) -> &mut dyn Executor {
        match self {
            Self::Checked(executor) => executor,
            Self::Counted(executor) => executor,
        }
    }

    /// Launches the step and returns its work. The `sim` executor does not report the work, so it
    /// is estimated from the plan: a row with one token counts as a decode row, and contexts as
    /// empty.
    fn launch(&mut self, plan: StepPlan) -> Result<StepWork, ExecutorError> {
        match self {
            Self::Counted(executor) => {
                executor.launch(plan)?;
                Ok(executor.work())
            }
            Self::Checked(executor) => {
                let mut work = StepWork::default();
                for row in &plan.rows {
                    match row.token_count {
                        1 => work.decode_rows += 1,
                        count => work.prefill_tokens += count,
                    }
                }
                executor.launch(plan)?;
                Ok(work)
            }
        }
    }
}

pub(crate) struct Device {
    inner: InnerExecutor,
    cost: StepCost,
    random: Random,
    now: Instant,
    /// Due time and duration of each step in flight, oldest first.
    due: VecDeque<(Instant, Duration)>,
    /// Results of steps in flight that were computed before they are due, oldest first.
    computed: VecDeque<StepResult>,
    /// Total duration of all launched steps.
    busy: Duration,
    /// Whether the step launched last awaits its token bitmasks.
    is_awaiting: bool,
    is_rank_lost: bool,
    /// Whether the weights were released and none are committed since, so that no step can run.
    is_released: bool,
}

impl Device {
    /// Creates a device. `is_checked`: whether the device keeps tokens and KV, and checks them.
    pub(crate) fn new(
        limits: ExecutorLimits,
        groups: &KvGroups,
        cost: StepCost,
        is_checked: bool,
        random: Random,
        now: Instant,
    ) -> Self {
        let no_cost = CostModel {
            step: Duration::ZERO,
            token: Duration::ZERO,
            context_token: Duration::ZERO,
        };
        let inner = match is_checked {
            true => {
                let executor = SimExecutor::new(limits, no_cost, now);
                InnerExecutor::Checked(executor.with_kv_groups(groups.clone()))
            }
            false => InnerExecutor::Counted(CountingExecutor::new(limits, now)),
        };
        Self {
            inner,
            cost,
            random,
            now,
            due: VecDeque::new(),
            computed: VecDeque::new(),
            busy: Duration::ZERO,
            is_awaiting: false,
            is_rank_lost: false,
            is_released: false,
        }
    }

    /// Returns the device's KV memory; `None` if the device keeps no KV.
    pub(crate) fn arena(&self) -> Option<SimArena> {
        match &self.inner {
            InnerExecutor::Checked(executor) => Some(executor.arena()),
            InnerExecutor::Counted(_) => None,
        }
    }

    /// Returns the total duration of all launched steps.
    pub(crate) fn busy(&self) -> Duration {
        self.busy
    }

    pub(crate) fn set_now(&mut self, now: Instant) {
        debug_assert!(now >= self.now);
        self.now = now;
    }

    /// Prepares weights of this version for the next commit. `in_flight`: the treatment of running
    /// sequences at that commit.
    pub(crate) fn prepare_weights(&mut self, version: u64, in_flight: InFlight) {
        if let InnerExecutor::Checked(executor) = &mut self.inner {
            executor.prepare_weights(version, in_flight);
        }
    }

    /// Makes every later call fail, as after the death of a rank process.
    pub(crate) fn lose_rank(&mut self) {
        self.is_rank_lost = true;
    }

    /// Returns when the oldest step in flight is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due.front().map(|&(due, _)| due)
    }

    fn step_time(&mut self, work: &StepWork) -> Duration {
        let mean_ms = self.cost.step_ms(work);
        let factor = match self.cost.deviation {
            0.0 => 1.0,
            deviation => (1.0 + deviation * self.random.normal()).max(0.1),
        };
        Duration::from_nanos((mean_ms * factor * 1e6) as u64)
    }

    /// Computes the result of the step launched last, if results are computed at the launch.
    fn compute_early(&mut self) -> Result<(), ExecutorError> {
        if self.cost.is_eager {
            self.computed.extend(self.inner.executor_mut().collect(Duration::ZERO)?);
        }
        Ok(())
    }

    fn check_ranks(&self) -> Result<(), ExecutorError> {
        match self.is_rank_lost {
            true => Err(ExecutorError::Stopped { reason: "rank 1 exited".to_owned() }),
            false => Ok(()),
        }
    }
}

impl Executor for Device {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        self.check_ranks()?;
        assert!(!self.is_released, "a step is launched without weights");
        self.is_awaiting = plan.awaits_masks;
        let work = self.inner.launch(plan)?;
        let busy = self.step_time(&work);
        self.busy += busy;
        let free_at = self.due.back().map_or(self.now, |&(due, _)| due.max(self.now));
        self.due.push_back((free_at + busy, busy));
        if !self.is_awaiting {
            self.compute_early()?;
        }
        Ok(())
    }

    fn supply(&mut self, step_id: StepId, masks: Vec<RowMask>) -> Result<(), ExecutorError> {
        self.check_ranks()?;
        self.inner.executor_mut().supply(step_id, masks)?;
        self.is_awaiting = false;
        self.compute_early()
    }

    fn masks_are_due(&self) -> bool {
        self.inner.executor().masks_are_due()
    }

    /// Returns the result of the oldest step if it is due. Never waits, because the cluster's clock
    /// stands still during the call.
    fn collect(&mut self, _timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        self.check_ranks()?;
        let Some(&(_, busy)) = self.due.front().filter(|(due, _)| *due <= self.now) else {
            return Ok(None);
        };
        let result = match self.computed.pop_front() {
            Some(result) => Some(result),
            None => self.inner.executor_mut().collect(Duration::ZERO)?,
        };
        Ok(result.map(|result| {
            self.due.pop_front();
            StepResult { busy, ..result }
        }))
    }

    fn release_weights(&mut self) -> Result<(), ExecutorError> {
        self.check_ranks()?;
        self.is_released = true;
        Ok(())
    }

    fn commit_weights(&mut self) -> Result<(), ExecutorError> {
        self.check_ranks()?;
        self.is_released = false;
        self.inner.executor_mut().commit_weights()
    }

    fn limits(&self) -> ExecutorLimits {
        self.inner.executor().limits()
    }

    fn now(&self) -> Instant {
        self.now
    }
}
