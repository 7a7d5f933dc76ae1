//! Drives a scheduler and its executor, one turn at a time. The caller provides the thread.

use std::{
    collections::VecDeque,
    io,
    time::{Duration, Instant},
};

use kernels::backend::ExpertLoad;

use crate::{
    event::{Action, InFlight, Input},
    executor::{CollectWaker, Executor, ExecutorError},
    mask_workers::MaskWorkers,
    plan::{Dispatch, RowResult, Span, StepPlan},
    prefix_cache::CacheSeeds,
    scheduler::Scheduler,
    step_record::{StepKind, StepRecord, StepWork},
};

/// Step records kept until their reader takes them; the oldest is dropped first.
const RECORDS_MAX: usize = 1024;

/// Safety margin of a launch that waits for KV, in addition to twice the time of plan and launch:
/// the device's clock is known to a few µs, and step times vary by a few percent. A late launch
/// idles the device only for the time of the launch, because the loop collects a finished step at
/// once.
const LAUNCH_AHEAD: Duration = Duration::from_micros(200);

/// Outcome of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoopOutcome {
    /// The loop collected the result of a step.
    Stepped,
    /// Steps or bitmasks are in flight, and no step finished within the timeout or a waker ended
    /// the wait.
    Pending,
    /// No step or bitmask is in flight and nothing can be planned: wait for inputs, at most until
    /// [`StepLoop::next_deadline`], then take another turn.
    Idle,
}

/// Statistics of speculative decoding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpeculationStats {
    /// Rows that had draft tokens, over all steps.
    pub rows: u64,
    /// Draft tokens verified.
    pub drafted: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// Entry `n` counts the rows whose first `n + 1` draft tokens were accepted.
    pub accepted_at: Vec<u64>,
}

impl SpeculationStats {
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

/// A scheduler with its executor and up to `depth` steps in flight. One thread owns it.
#[derive(Debug)]
pub struct StepLoop<E> {
    scheduler: Scheduler,
    executor: E,
    mask_workers: MaskWorkers,
    /// Records of the steps in flight.
    launched: VecDeque<StepRecord>,
    /// Records of the last collected steps.
    records: VecDeque<StepRecord>,
    /// When the last result was collected.
    collected_at: Option<Instant>,
    /// Measured times of the last collected step, if it only decoded.
    decode_times: Option<DecodeTimes>,
    speculated: SpeculationStats,
    /// Whether no step is launched until the weights are changed.
    is_held: bool,
}

/// Measured times of a decode step.
#[derive(Clone, Copy, Debug)]
struct DecodeTimes {
    /// When the device ended the step.
    ended_at: Instant,
    device: Duration,
    /// Time of the host for plan and launch.
    host: Duration,
}

impl DecodeTimes {
    fn of(step: &StepRecord) -> Option<Self> {
        let device = step.device.filter(|_| step.kind == StepKind::Decode)?;
        let host = step.plan.duration() + step.launch.duration();
        Some(Self { ended_at: device.end, device: device.duration(), host })
    }
}

impl<E: Executor> StepLoop<E> {
    /// Creates a loop that computes token bitmasks on its own thread. `scheduler` must have the
    /// limits of `executor`.
    pub fn new(scheduler: Scheduler, executor: E) -> Self {
        assert_eq!(
            scheduler.config().limits,
            executor.limits(),
            "scheduler and executor must have the same limits"
        );
        Self {
            scheduler,
            executor,
            mask_workers: MaskWorkers::default(),
            launched: VecDeque::new(),
            records: VecDeque::with_capacity(RECORDS_MAX),
            collected_at: None,
            decode_times: None,
            speculated: SpeculationStats::default(),
            is_held: false,
        }
    }

    /// Starts threads that compute token bitmasks from now on.
    pub fn with_mask_threads(mut self, threads: usize) -> io::Result<Self> {
        self.mask_workers = MaskWorkers::start(threads, &self.executor.waker())?;
        Ok(self)
    }

    pub fn handle(&mut self, input: Input, actions: &mut Vec<Action>) {
        self.scheduler.handle(self.executor.now(), input, actions);
    }

    /// Launches the steps that can be planned, then waits up to `timeout` for the oldest step and
    /// collects its result. Returns at once when neither a step nor a bitmask is in flight.
    /// Computed or due bitmasks end the wait. After an error the engine is unusable.
    pub fn turn(
        &mut self,
        timeout: Duration,
        actions: &mut Vec<Action>,
    ) -> Result<LoopOutcome, ExecutorError> {
        let now = self.executor.now();
        if self.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.scheduler.on_deadline(now, actions);
        }
        self.launch_planned(actions)?;
        if self.launched.is_empty() && !self.mask_workers.is_busy() {
            self.executor.check()?;
            return Ok(LoopOutcome::Idle);
        }
        // A launch that is due but cannot be planned waits for a result.
        let due = self.launch_due().filter(|due| *due > now);
        let timeout = due.map_or(timeout, |due| due.duration_since(now).min(timeout));
        let Some(result) = self.executor.collect(timeout)? else {
            return Ok(LoopOutcome::Pending);
        };
        let mut record = self.launched.pop_front().expect("a result belongs to a launched step");
        let collected_at = self.executor.now();
        self.collected_at = Some(collected_at);
        for row in &result.rows {
            record.tokens += row.drafted;
            self.speculated.add(row);
        }
        record.busy = result.busy;
        let run = result.run;
        (record.dispatch, record.uploaded_bytes) = (run.dispatch, run.uploaded_bytes);
        record.experts = run.experts;
        (record.device, record.results_at) = (run.device, run.results_at);
        self.scheduler.complete(result, actions);
        let begin = run.collected_at.unwrap_or(collected_at);
        record.collect = Span { begin, end: self.executor.now() };
        self.decode_times = DecodeTimes::of(&record);
        if self.records.len() == RECORDS_MAX {
            self.records.pop_front();
        }
        self.records.push_back(record);
        // Launches before the caller handles the actions, so that the device stays busy.
        self.launch_planned(actions)?;
        self.scheduler.start_saves(collected_at, actions);
        Ok(LoopOutcome::Stepped)
    }

    /// Launches the steps that can be planned, and waits for none.
    pub fn launch(&mut self, actions: &mut Vec<Action>) -> Result<(), ExecutorError> {
        self.launch_planned(actions)
    }

    /// Stops launching steps, or launches them again. The steps in flight finish.
    pub fn set_held(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    /// Releases the weights in use, so that new weights can overwrite them. The loop must be held
    /// until the weights change.
    ///
    /// # Panics
    /// When a step is in flight.
    pub fn release_weights(&mut self) -> Result<(), ExecutorError> {
        assert!(self.launched.is_empty(), "weights change between steps");
        self.executor.release_weights()
    }

    /// Computes with the prepared weights from the next step on, and moves the sequences to them.
    ///
    /// # Panics
    /// When a step is in flight.
    pub fn change_weights(
        &mut self,
        seeds: CacheSeeds,
        in_flight: InFlight,
        actions: &mut Vec<Action>,
    ) -> Result<(), ExecutorError> {
        self.executor.commit_weights()?;
        self.scheduler.change_weights(seeds, in_flight, actions);
        Ok(())
    }

    /// Returns the time of the next turn if no input arrives earlier.
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

    /// Returns a waker that ends a turn's wait early, from another thread.
    pub fn waker(&self) -> CollectWaker {
        self.executor.waker()
    }

    pub fn steps_in_flight(&self) -> usize {
        self.launched.len()
    }

    /// Returns when the last step was collected.
    pub fn collected_at(&self) -> Option<Instant> {
        self.collected_at
    }

    /// Returns how long the device has worked on the oldest step in flight.
    pub fn step_age(&self) -> Option<Duration> {
        let launched_at = self.launched.front()?.launch.begin;
        // The step began when the previous step had finished.
        let since = self.collected_at.map_or(launched_at, |before| before.max(launched_at));
        Some(self.executor.now().saturating_duration_since(since))
    }

    /// Takes the records of the last steps, oldest first; at most 1,024.
    pub fn take_records(&mut self) -> Vec<StepRecord> {
        self.records.drain(..).collect()
    }

    /// Takes the statistics of speculative decoding since the last call.
    pub fn take_speculated(&mut self) -> SpeculationStats {
        std::mem::take(&mut self.speculated)
    }

    fn launch_planned(&mut self, actions: &mut Vec<Action>) -> Result<(), ExecutorError> {
        loop {
            self.supply_masks(actions)?;
            if self.is_held {
                return Ok(());
            }
            let begin = self.executor.now();
            if self.launch_due().is_some_and(|due| begin < due) {
                return Ok(());
            }
            let Some(plan) = self.scheduler.plan(actions) else { return Ok(()) };
            let planned = Span { begin, end: self.executor.now() };
            let mut record = planned_record(&plan, self.scheduler.planned_work(), planned);
            record.launch.begin = self.executor.now();
            self.executor.launch(plan)?;
            record.launch.end = self.executor.now();
            self.launched.push_back(record);
        }
    }

    /// Returns when to launch the next step, if the next step should wait for KV. KV that arrives
    /// while steps are in flight joins the batch only after them. So while a prefill peer is
    /// expected to send KV, the next decode step is launched shortly before the device becomes
    /// idle. `None`: launch as soon as a step can be planned.
    fn launch_due(&self) -> Option<Instant> {
        let DecodeTimes { ended_at, device, host } = self.decode_times?;
        let in_flight = self.launched.len() as u32;
        let decodes = self.launched.iter().all(|step| step.kind == StepKind::Decode);
        let waits = decodes
            && (1..self.scheduler.config().limits.depth).contains(&in_flight)
            && self.scheduler.expects_kv();
        waits.then(|| ended_at + (device * in_flight).saturating_sub(2 * host + LAUNCH_AHEAD))
    }

    /// Passes new bitmask jobs to the workers, and bitmasks to the step that awaits them.
    fn supply_masks(&mut self, actions: &mut Vec<Action>) -> Result<(), ExecutorError> {
        for job in self.scheduler.take_mask_jobs() {
            self.mask_workers.submit(job);
        }
        while let Some(computed) = self.mask_workers.poll() {
            self.scheduler.handle_mask(computed, actions);
        }
        match self.scheduler.supply(self.executor.masks_are_due()) {
            Some((step_id, masks)) => self.executor.supply(step_id, masks),
            None => Ok(()),
        }
    }
}

/// Returns the record of a step before its launch.
fn planned_record(plan: &StepPlan, work: StepWork, planned: Span) -> StepRecord {
    let (mut tokens, mut sampled) = (0, 0);
    for row in &plan.rows {
        tokens += row.token_count;
        sampled += u32::from(row.samples);
    }
    let rows = plan.rows.len() as u32;
    let at_once = Span { begin: planned.end, end: planned.end };
    StepRecord {
        step_id: plan.step_id,
        rows,
        tokens,
        sampled,
        kind: match work.decode_rows {
            0 => StepKind::Prefill,
            decoding if decoding == rows => StepKind::Decode,
            _ => StepKind::Mixed,
        },
        work,
        dispatch: Dispatch::Eager,
        uploaded_bytes: 0,
        experts: ExpertLoad::default(),
        busy: Duration::ZERO,
        plan: planned,
        launch: at_once,
        collect: at_once,
        device: None,
        results_at: None,
    }
}
