//! The device of a simulated node: the engine's own `sim` executor, on the cluster's clock.
//!
//! The `sim` executor has a clock of its own that jumps to the end of a step. Here many nodes share
//! one clock, so it is given no cost at all, and this wrapper says when each step is due.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use engine::{
    executor::{
        Executor, ExecutorError, ExecutorLimits,
        sim::{CostModel, SimArena, SimExecutor},
    },
    plan::{StepPlan, StepResult},
};

/// How fast a device is.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Any step, and each token of it.
    pub step: Duration,
    pub token: Duration,
    /// Steps are carried out when they are launched, and not only when their result is due: the
    /// two ends of what a real device may do.
    pub is_eager: bool,
}

pub struct Device {
    sim: SimExecutor,
    pace: Pace,
    now: Instant,
    /// When each step in flight is done, and how long it takes; oldest first.
    due: VecDeque<(Instant, Duration)>,
    /// Results of steps in flight that were carried out already.
    early: VecDeque<StepResult>,
}

impl Device {
    pub fn new(limits: ExecutorLimits, pace: Pace, now: Instant) -> Self {
        let no_cost = CostModel {
            step: Duration::ZERO,
            token: Duration::ZERO,
            context_token: Duration::ZERO,
        };
        let sim = SimExecutor::new(limits, no_cost, now);
        Self { sim, pace, now, due: VecDeque::new(), early: VecDeque::new() }
    }

    pub fn arena(&self) -> SimArena {
        self.sim.arena()
    }

    pub fn set_now(&mut self, now: Instant) {
        debug_assert!(now >= self.now);
        self.now = now;
    }

    /// When the oldest step is done.
    pub fn next_due(&self) -> Option<Instant> {
        self.due.front().map(|&(due, _)| due)
    }

    fn carry_out(&mut self) -> Result<StepResult, ExecutorError> {
        let result = self.sim.collect(Duration::ZERO)?;
        Ok(result.expect("a step without cost is done at once"))
    }
}

impl Executor for Device {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        let tokens: u32 = plan.rows.iter().map(|row| row.token_count).sum();
        let busy = self.pace.step + self.pace.token * tokens;
        let free_at = self.due.back().map_or(self.now, |&(due, _)| due.max(self.now));
        self.sim.launch(plan)?;
        self.due.push_back((free_at + busy, busy));
        if self.pace.is_eager {
            let result = self.carry_out()?;
            self.early.push_back(result);
        }
        Ok(())
    }

    /// Never waits: the cluster's clock stands still meanwhile.
    fn collect(&mut self, _timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        let Some((_, busy)) = self.due.pop_front_if(|(due, _)| *due <= self.now) else {
            return Ok(None);
        };
        let result = match self.early.pop_front() {
            Some(result) => result,
            None => self.carry_out()?,
        };
        Ok(Some(StepResult { busy, ..result }))
    }

    fn limits(&self) -> ExecutorLimits {
        self.sim.limits()
    }

    fn now(&self) -> Instant {
        self.now
    }
}
