//! The rules of a node, without I/O.
//!
//! A [`NodeCore`] owns the scheduler and its step loop, the record of every attempt, the commands
//! for the transfers, and the observers. It holds every rule of a node: the order of replies, what
//! a full transfer queue means, duplicate ids, slow readers, drain and close, stalled steps, and
//! when observers get a delta. Equal inputs give equal outputs.
//!
//! In the shell (`engine_thread`, or a simulation) are: channels to callers and observers, the
//! transfer queue, spans, metrics, logs, the clock, and waiting. The core names a caller by
//! [`CallId`] and an observer by [`ObserverId`]. The executor is the seam to the device: `cpu` and
//! `cuda` compute, `sim` runs in virtual time. Only [`take_turn`] calls the executor, which may
//! block.
//!
//! The shell gives the core its inputs (`handle_call`, `handle_cancel`, `handle_transfer_event`,
//! …), then calls [`take_turn`], which carries out the core's outputs and runs the device. When the
//! turn returns [`LoopOutcome::Idle`], the shell waits for an input, at most until
//! [`NodeCore::next_deadline`].
//!
//! The core handles one scheduler action, scheduler input or transfer command per poll. So a full
//! queue that the shell reports takes effect before the next output is made.

mod attempts;
mod observers;
mod output;
mod pause;
#[cfg(test)]
mod tests;
mod turn;
mod weight_change;

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use cluster::{Adapter, NodeRecord};
use engine::{
    CacheSeeds, LoopOutcome, Scheduler, SpeculationStats, StepLoop,
    event::{Action, Input, SequenceId},
    executor::{Executor, ExecutorError},
    tiers::TierEvent,
};
use kv_transfer::api as transfer;
use proto::v1;

pub use output::{
    AttemptEnd, AttemptEvent, AttemptStage, Call, CallId, CloseReason, Metric, NodeOutput,
    ObserverId, Refusal, Reply, SequenceOutcome, StageAttributes, StageChange,
};
pub use turn::{NodeShell, close, take_turn};
pub use weight_change::ChangePending;

use attempts::Attempts;
use observers::LoadObservers;
use pause::Pause;
use weight_change::PendingWeightChange;

/// Delay before a command is offered again after the transfer queue was full.
pub const TRANSFER_RETRY_AFTER: Duration = Duration::from_millis(2);
/// Time after which a step counts as hung. Routers move requests to other nodes after the same time
/// without an event (`router.idle_timeout`).
pub const STALL_AFTER: Duration = Duration::from_secs(60);
/// The stall time-out is at least this many times the longest step so far: slow hardware is not a
/// stall.
const STALL_STEPS: u32 = 4;

/// The state machine of one node.
pub struct NodeCore<E> {
    steps: StepLoop<E>,
    attempts: Attempts,
    observers: LoadObservers,
    /// Actions of the scheduler, in order.
    actions: VecDeque<Action>,
    /// Scratch list that each call of the step loop fills and empties.
    new_actions: Vec<Action>,
    /// The sequence whose arrival the scheduler has just seen.
    arrived: Option<SequenceId>,
    /// Time before which no command is offered, because the transfer queue was full.
    transfer_retry_at: Option<Instant>,
    stall_after: Duration,
    is_stalled: bool,
    seeds: CacheSeeds,
    /// The change of the weights at the next step boundary.
    weight_change: Option<PendingWeightChange>,
    /// End of the last step before the weights were released; `None` once new weights are in use.
    released_at: Option<Instant>,
    pause: Option<Pause>,
    /// The state that observers were last sent.
    pause_state: v1::PauseState,
    /// Number of preemptions that the metrics have reported.
    preemptions: u64,
    /// The latest time that the core was given.
    now: Instant,
}

impl<E: Executor> NodeCore<E> {
    /// `stall_after`: a longer step is a stall ([`STALL_AFTER`]).
    pub fn new(steps: StepLoop<E>, record: &NodeRecord, stall_after: Duration) -> Self {
        Self {
            attempts: Attempts::new(record.identity.weight_version),
            observers: LoadObservers::new(record),
            actions: VecDeque::new(),
            new_actions: Vec::new(),
            arrived: None,
            transfer_retry_at: None,
            stall_after,
            is_stalled: false,
            seeds: CacheSeeds {
                model_fingerprint: record.identity.model_fingerprint,
                weight_version: record.identity.weight_version,
            },
            weight_change: None,
            released_at: None,
            pause: None,
            pause_state: v1::PauseState::None,
            preemptions: 0,
            now: steps.executor().now(),
            steps,
        }
    }

    /// Handles a `Prefill` or `Decode` call that arrived.
    pub fn handle_call(&mut self, call: Call, now: Instant) {
        self.now = now;
        self.attempts.call(call, now);
    }

    /// Handles a caller that dropped its call.
    pub fn handle_cancel(&mut self, call: CallId) {
        self.attempts.cancel(call);
    }

    /// Handles a caller whose queue was full when the last [`NodeOutput::Reply`] was sent.
    pub fn handle_slow_reader(&mut self, call: CallId) {
        self.attempts.slow_reader(call);
    }

    pub fn handle_transfer_event(&mut self, event: transfer::Event, now: Instant) {
        self.now = now;
        self.attempts.on_transfer_event(event, now);
    }

    /// Handles the result of a copy of the KV tiers.
    pub fn handle_tier_event(&mut self, event: TierEvent, now: Instant) {
        self.now = now;
        self.give_to_scheduler(Input::Tier(event));
    }

    /// Handles a full transfer queue that has rejected the last [`NodeOutput::Transfer`]. A command
    /// that begins a transfer fails, and its caller gets Busy. For any other command returns true,
    /// and offers the command again after [`TRANSFER_RETRY_AFTER`], before all later commands.
    pub fn handle_transfer_queue_full(
        &mut self,
        call: Option<CallId>,
        command: transfer::Command,
        reason: String,
        now: Instant,
    ) -> bool {
        self.now = now;
        let is_offered_again = self.attempts.transfer_queue_full(call, command, reason);
        if is_offered_again {
            self.transfer_retry_at = Some(now + TRANSFER_RETRY_AFTER);
        }
        is_offered_again
    }

    /// Handles a router that observes this node from now on.
    pub fn handle_observe(&mut self, observer: ObserverId, now: Instant) {
        self.now = now;
        let outputs = &mut self.attempts.outputs;
        if self.is_stalled {
            return outputs.push_back(NodeOutput::ObserveStalled { observer });
        }
        self.observers.add(observer, now, &mut self.steps, outputs);
    }

    /// Handles an observer that disconnected, or whose queue is full.
    pub fn handle_observe_ended(&mut self, observer: ObserverId) {
        self.observers.remove(observer);
    }

    /// Rejects new calls from now on, or accepts them again, and tells the observers. `grace`: time
    /// until the shell ends the attempts in flight, so that routers may migrate longer ones.
    pub fn handle_draining(&mut self, is_draining: bool, grace: Option<Duration>, now: Instant) {
        self.now = now;
        self.attempts.set_draining(is_draining);
        let outputs = &mut self.attempts.outputs;
        let until = grace.map(|grace| now + grace);
        self.observers.set_draining(is_draining, until, now, &mut self.steps, outputs);
    }

    /// Tells the observers which adapters the node has.
    pub fn handle_adapters(&mut self, adapters: &[Adapter]) {
        self.observers.change_adapters(adapters, &mut self.attempts.outputs);
    }

    /// Drops the cached blocks that no sequence uses, and returns their number.
    pub fn handle_reset_prefix_cache(&mut self) -> u32 {
        self.observers.mark_changed();
        self.steps.scheduler_mut().reset_prefix_cache()
    }

    /// Fails every attempt and rejects new calls. Tokens of earlier steps still reach their
    /// callers.
    pub fn handle_close(&mut self, reason: &CloseReason) {
        while let Some(action) = self.actions.pop_front() {
            self.attempts.on_action(action, self.now);
        }
        self.attempts.close(reason);
    }

    /// Reports finished steps, detects a stall, sends a due delta and lets commands be offered
    /// again.
    fn handle_deadline(&mut self, now: Instant) {
        self.now = now;
        self.report_steps();
        self.detect_stall();
        self.report_pause();
        let outputs = &mut self.attempts.outputs;
        self.observers.publish_if_due(now, &mut self.steps, outputs);
        if self.transfer_retry_at.is_some_and(|at| at <= now) {
            self.transfer_retry_at = None;
        }
    }

    /// Launches a step with KV that has arrived, if the device is idle. Without this call the node
    /// would first carry out the outputs of the arrival, which would delay the first token after a
    /// hand-over.
    fn launch_arrived_kv(&mut self) -> Result<(), ExecutorError> {
        if self.steps.steps_in_flight() > 0 || self.has_actions() {
            return Ok(());
        }
        let mut has_arrived = false;
        while let Some(input) = self.attempts.next_arrived_kv() {
            self.give_to_scheduler(input);
            has_arrived = true;
        }
        if !has_arrived {
            return Ok(());
        }
        let launched = self.steps.launch(&mut self.new_actions);
        self.actions.extend(self.new_actions.drain(..));
        launched
    }

    /// Launches every step that can be launched, then waits up to `timeout` for the oldest step in
    /// flight. After `Stepped` another step may be due at once. After `Idle` no step is in flight
    /// and no output is due.
    fn step(&mut self, timeout: Duration) -> Result<LoopOutcome, ExecutorError> {
        // `handle_deadline` must not end the pause: the shell may sleep after it, and the steps
        // would not be launched.
        self.end_pause_if_due();
        self.end_wait_if_due();
        self.change_weights_if_due()?;
        self.empty_batch_if_due();
        let turn = self.steps.turn(timeout, &mut self.new_actions);
        self.actions.extend(self.new_actions.drain(..));
        self.now = self.steps.executor().now();
        Ok(match turn? {
            // A handled action may let the scheduler plan a step. Without a step in flight the
            // weights change.
            LoopOutcome::Idle | LoopOutcome::Pending
                if self.has_actions() || self.may_change_weights() =>
            {
                LoopOutcome::Stepped
            }
            turn => turn,
        })
    }

    /// Returns the next output, in order. `None` means that the core waits for an input, a step or
    /// a deadline.
    fn poll_output(&mut self) -> Option<NodeOutput> {
        loop {
            // Sends of KV and token 0 come before replies: the receiving node waits longer for them
            // than callers for events.
            if self.transfer_retry_at.is_none()
                && let Some((call, command)) = self.attempts.next_send()
            {
                return Some(NodeOutput::Transfer { call, command });
            }
            if let Some(output) = self.attempts.outputs.pop_front() {
                return Some(output);
            }
            if let Some(action) = self.actions.pop_front() {
                self.attempts.on_action(action, self.now);
            } else if let Some(id) = self.arrived.take() {
                self.attempts.scheduled(id, self.now);
            } else if let Some(input) = self.attempts.next_input() {
                self.give_to_scheduler(input);
            } else if self.transfer_retry_at.is_none() {
                let (call, command) = self.attempts.next_command()?;
                return Some(NodeOutput::Transfer { call, command });
            } else {
                return None;
            }
        }
    }

    /// Returns when the next turn is due if no input comes before.
    pub fn next_deadline(&self) -> Option<Instant> {
        let observers = self.observers.due(self.now);
        let wait_until = self.weight_change.as_ref().and_then(|change| change.wait_until);
        let deadlines = [
            self.steps.next_deadline(),
            observers,
            self.transfer_retry_at,
            self.stall_deadline(),
            wait_until,
            self.pause.as_ref().map(|pause| pause.until),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// Returns whether actions of the scheduler wait for [`poll_output`](Self::poll_output).
    fn has_actions(&self) -> bool {
        !self.actions.is_empty()
    }

    /// Returns whether no attempt is known.
    pub fn is_empty(&self) -> bool {
        self.attempts.is_empty()
    }

    /// Returns how long the device has worked on the oldest step in flight.
    pub fn step_age(&self) -> Option<Duration> {
        self.steps.step_age()
    }

    pub fn scheduler(&self) -> &Scheduler {
        self.steps.scheduler()
    }

    pub fn executor(&self) -> &E {
        self.steps.executor()
    }

    /// Returns the executor, for executors in virtual time.
    pub fn executor_mut(&mut self) -> &mut E {
        self.steps.executor_mut()
    }

    fn give_to_scheduler(&mut self, input: Input) {
        if let Input::Arrived(sequence) = &input {
            self.arrived = Some(sequence.id);
            self.observers.arrived(sequence.id);
        }
        self.observers.mark_changed();
        self.steps.handle(input, &mut self.new_actions);
        self.actions.extend(self.new_actions.drain(..));
    }

    fn report_steps(&mut self) {
        for step in self.steps.take_records() {
            self.observers.add_step(&step);
            self.stall_after = self.stall_after.max(STALL_STEPS * step.busy);
            self.attempts.outputs.push_back(NodeOutput::Metric(Metric::Step(step)));
        }
        let speculated: SpeculationStats = self.steps.take_speculated();
        if speculated.rows > 0 {
            self.attempts.outputs.push_back(NodeOutput::Metric(Metric::Speculated(speculated)));
        }
        let preemptions = self.steps.scheduler().preemptions();
        if preemptions > self.preemptions {
            let metric = Metric::Preempted(preemptions - self.preemptions);
            self.attempts.outputs.push_back(NodeOutput::Metric(metric));
            self.preemptions = preemptions;
        }
    }

    /// Detects a stall. A hung device blocks no thread, so the node would look healthy without this
    /// check.
    fn detect_stall(&mut self) {
        let is_stalled = self.steps.step_age().is_some_and(|age| age >= self.stall_after);
        if is_stalled == self.is_stalled {
            return;
        }
        self.is_stalled = is_stalled;
        let outputs = &mut self.attempts.outputs;
        if is_stalled {
            self.observers.stall(outputs);
            outputs.push_back(NodeOutput::Stalled { after: self.stall_after });
        } else {
            outputs.push_back(NodeOutput::Recovered);
        }
    }

    /// Returns when the oldest step in flight becomes a stall.
    fn stall_deadline(&self) -> Option<Instant> {
        let age = self.steps.step_age().filter(|_| !self.is_stalled)?;
        Some(self.steps.executor().now() + self.stall_after.saturating_sub(age))
    }
}
