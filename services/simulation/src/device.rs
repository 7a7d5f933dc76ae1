//! The device of a simulated node: the engine's `sim` executor on the cluster's clock.
//!
//! The `sim` executor has its own clock, which jumps to the end of a step. Here many nodes share one
//! clock. So the executor gets a cost model of zero, and [`Device`] decides when each step is due.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use engine::{
    executor::{
        Executor, ExecutorError, ExecutorLimits,
        sim::{CostModel, SimArena, SimExecutor},
    },
    plan::{RowMask, StepId, StepPlan, StepResult},
};

/// The duration of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepCost {
    /// Time of any step.
    pub step: Duration,
    /// Time of each token of the step.
    pub token: Duration,
    /// Whether a step is computed when it is launched, instead of when its result is due. A real device
    /// computes in between.
    pub is_eager: bool,
}

pub struct Device {
    sim: SimExecutor,
    cost: StepCost,
    now: Instant,
    /// Due time and duration of each step in flight, oldest first.
    due: VecDeque<(Instant, Duration)>,
    /// Results of steps in flight that are computed already.
    computed: VecDeque<StepResult>,
    /// Whether the step launched last awaits its token bitmasks.
    is_awaiting: bool,
    is_rank_lost: bool,
}

impl Device {
    pub fn new(limits: ExecutorLimits, cost: StepCost, now: Instant) -> Self {
        let no_cost = CostModel {
            step: Duration::ZERO,
            token: Duration::ZERO,
            context_token: Duration::ZERO,
        };
        let sim = SimExecutor::new(limits, no_cost, now);
        let (due, computed) = (VecDeque::new(), VecDeque::new());
        Self { sim, cost, now, due, computed, is_awaiting: false, is_rank_lost: false }
    }

    pub fn arena(&self) -> SimArena {
        self.sim.arena()
    }

    pub fn set_now(&mut self, now: Instant) {
        debug_assert!(now >= self.now);
        self.now = now;
    }

    /// Makes every later call fail, as after the death of a rank process.
    pub fn lose_rank(&mut self) {
        self.is_rank_lost = true;
    }

    /// Returns when the oldest step in flight is done.
    pub fn next_due(&self) -> Option<Instant> {
        self.due.front().map(|&(due, _)| due)
    }

    /// Computes the step launched last if steps are computed when they are launched.
    fn compute_early(&mut self) -> Result<(), ExecutorError> {
        if self.cost.is_eager {
            self.computed.extend(self.sim.collect(Duration::ZERO)?);
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
        let tokens: u32 = plan.rows.iter().map(|row| row.token_count).sum();
        let busy = self.cost.step + self.cost.token * tokens;
        let free_at = self.due.back().map_or(self.now, |&(due, _)| due.max(self.now));
        self.is_awaiting = plan.awaits_masks;
        self.sim.launch(plan)?;
        self.due.push_back((free_at + busy, busy));
        if !self.is_awaiting {
            self.compute_early()?;
        }
        Ok(())
    }

    fn supply(&mut self, step_id: StepId, masks: Vec<RowMask>) -> Result<(), ExecutorError> {
        self.check_ranks()?;
        self.sim.supply(step_id, masks)?;
        self.is_awaiting = false;
        self.compute_early()
    }

    fn masks_are_due(&self) -> bool {
        self.sim.masks_are_due()
    }

    /// Returns a completed step, if any. Never waits: the cluster's clock does not move meanwhile.
    fn collect(&mut self, _timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        self.check_ranks()?;
        let Some(&(_, busy)) = self.due.front().filter(|(due, _)| *due <= self.now) else {
            return Ok(None);
        };
        let result = match self.computed.pop_front() {
            Some(result) => Some(result),
            None => self.sim.collect(Duration::ZERO)?,
        };
        Ok(result.map(|result| {
            self.due.pop_front();
            StepResult { busy, ..result }
        }))
    }

    fn limits(&self) -> ExecutorLimits {
        self.sim.limits()
    }

    fn now(&self) -> Instant {
        self.now
    }
}
