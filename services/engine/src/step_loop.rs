//! Drives a scheduler and its executor, a turn at a time, for whoever owns the thread.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::{
    event::{Action, Input},
    executor::{CollectWaker, Executor, ExecutorError},
    plan::{RowResult, StepId, StepPlan},
    scheduler::Scheduler,
};

/// Steps whose figures are kept.
const RECORDS_MAX: usize = 1024;

/// What a turn found to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// A step's result was taken.
    Stepped,
    /// Steps are in flight and none was done within the time given, or a waker ended the wait.
    Pending,
    /// Nothing is in flight and nothing can be planned: wait for inputs, at most until
    /// [`StepLoop::next_deadline`], then take another turn.
    Idle,
}

/// Figures of one collected step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRecord {
    pub step_id: StepId,
    /// Rows of the forward, their tokens with drafts, and how many of them sampled.
    pub rows: u32,
    pub tokens: u32,
    pub sampled: u32,
    pub planned_at: Instant,
    /// Time that making the plan took.
    pub planning: Duration,
    pub launched_at: Instant,
    pub collected_at: Instant,
    /// Time the device worked on it.
    pub busy: Duration,
}

/// What guessing ahead has come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Speculated {
    /// Rows of steps that had drafts.
    pub rows: u64,
    /// Their drafts, and those that were right.
    pub drafted: u64,
    pub accepted: u64,
    /// How often the first draft of a row was right, the first two, and so on.
    pub accepted_at: Vec<u64>,
}

impl Speculated {
    fn add(&mut self, row: &RowResult) {
        if row.drafted == 0 {
            return;
        }
        let accepted = row.tokens.len().saturating_sub(1);
        self.rows += 1;
        self.drafted += u64::from(row.drafted);
        self.accepted += accepted as u64;
        if self.accepted_at.len() < accepted {
            self.accepted_at.resize(accepted, 0);
        }
        self.accepted_at[..accepted].iter_mut().for_each(|count| *count += 1);
    }
}

/// A scheduler with its executor, `depth` steps in flight. One thread owns it.
#[derive(Debug)]
pub struct StepLoop<E> {
    scheduler: Scheduler,
    executor: E,
    /// Figures of the steps in flight.
    launched: VecDeque<StepRecord>,
    records: VecDeque<StepRecord>,
    /// When the last result came.
    collected_at: Option<Instant>,
    speculated: Speculated,
}

impl<E: Executor> StepLoop<E> {
    /// The scheduler was made with the executor's limits.
    pub fn new(scheduler: Scheduler, executor: E) -> Self {
        assert_eq!(scheduler.config().limits, executor.limits(), "they share one set of limits");
        Self {
            scheduler,
            executor,
            launched: VecDeque::new(),
            records: VecDeque::with_capacity(RECORDS_MAX),
            collected_at: None,
            speculated: Speculated::default(),
        }
    }

    pub fn handle(&mut self, input: Input, actions: &mut Vec<Action>) {
        self.scheduler.handle(self.executor.now(), input, actions);
    }

    /// Launches what can be launched, then waits up to `timeout` for the oldest step and takes its
    /// result. Never waits when nothing is in flight. An error is final: the engine is of no more
    /// use.
    pub fn turn(
        &mut self,
        timeout: Duration,
        actions: &mut Vec<Action>,
    ) -> Result<Turn, ExecutorError> {
        let now = self.executor.now();
        if self.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.scheduler.on_deadline(now, actions);
        }
        self.launch_planned(actions)?;
        if self.launched.is_empty() {
            return Ok(Turn::Idle);
        }
        let Some(result) = self.executor.collect(timeout)? else {
            return Ok(Turn::Pending);
        };
        let mut record = self.launched.pop_front().expect("a result belongs to a launched step");
        record.collected_at = self.executor.now();
        self.collected_at = Some(record.collected_at);
        record.busy = result.busy;
        for row in &result.rows {
            record.tokens += row.drafted;
            self.speculated.add(row);
        }
        if self.records.len() == RECORDS_MAX {
            self.records.pop_front();
        }
        self.records.push_back(record);
        self.scheduler.complete(result, actions);
        // Keep the device fed before anyone looks at the actions.
        self.launch_planned(actions)?;
        Ok(Turn::Stepped)
    }

    /// When a turn is due if nothing else happens first.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.scheduler.next_deadline()
    }

    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    pub fn scheduler_mut(&mut self) -> &mut Scheduler {
        &mut self.scheduler
    }

    pub fn executor(&self) -> &E {
        &self.executor
    }

    pub fn executor_mut(&mut self) -> &mut E {
        &mut self.executor
    }

    /// Ends a turn's wait early, from another thread.
    pub fn waker(&self) -> CollectWaker {
        self.executor.waker()
    }

    pub fn steps_in_flight(&self) -> usize {
        self.launched.len()
    }

    /// For how long the device has worked on the oldest step in flight, if there is one.
    pub fn step_age(&self) -> Option<Duration> {
        let launched_at = self.launched.front()?.launched_at;
        // It began when the one before it was done.
        let since = self.collected_at.map_or(launched_at, |before| before.max(launched_at));
        Some(self.executor.now().saturating_duration_since(since))
    }

    /// Figures of the last steps, oldest first; at most 1,024.
    pub fn records(&self) -> impl ExactSizeIterator<Item = &StepRecord> {
        self.records.iter()
    }

    /// Takes the figures of the steps since the last call.
    pub fn take_records(&mut self) -> Vec<StepRecord> {
        self.records.drain(..).collect()
    }

    /// Takes what guessing ahead has come to since the last call.
    pub fn take_speculated(&mut self) -> Speculated {
        std::mem::take(&mut self.speculated)
    }

    fn launch_planned(&mut self, actions: &mut Vec<Action>) -> Result<(), ExecutorError> {
        loop {
            let planned_at = self.executor.now();
            let Some(plan) = self.scheduler.plan(actions) else { return Ok(()) };
            let record = self.record(&plan, planned_at);
            self.executor.launch(plan)?;
            self.launched.push_back(record);
        }
    }

    fn record(&self, plan: &StepPlan, planned_at: Instant) -> StepRecord {
        let launched_at = self.executor.now();
        StepRecord {
            step_id: plan.step_id,
            rows: plan.rows.len() as u32,
            tokens: plan.rows.iter().map(|row| row.token_count).sum(),
            sampled: plan.rows.iter().filter(|row| row.samples).count() as u32,
            planned_at,
            planning: launched_at.saturating_duration_since(planned_at),
            launched_at,
            collected_at: launched_at,
            busy: Duration::ZERO,
        }
    }
}
