//! The thread that drives the [`NodeCore`].
//!
//! The loop gives the core commands of callers and events of transfers and KV tiers, then lets the
//! core [take a turn](node_core::take_turn). It sleeps while the core has no work. It waits only
//! for the device; a command, and an event of transfers or of the KV tiers, wakes it.

mod metrics;
#[cfg(test)]
mod tests;
mod weight_calls;

use std::{
    any::Any,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, TryRecvError, never, select};
use engine::{
    LoopOutcome,
    executor::{Executor, ExecutorError, panic_message},
    tiers::TierEvent,
};
use kv_transfer::{Transfers, api as transfer};
use proto::v1;
use telemetry::NodeMetrics;
use tokio::sync::oneshot;
use tracing::{info, warn};
use weight_calls::WeightCalls;

use crate::{
    callers::Callers,
    hang::StepInFlight,
    inbox::{CommandReceiver, EngineCommand},
    node_core::{self, CallId, CloseReason, Metric, NodeCore, NodeOutput, NodeShell},
    observe::ObserverSenders,
    stream::QueueFull,
    tiers::{TierCopies, TierMetrics},
    trace::Recorder,
};

/// Maximum sleep. Commands, events and deadlines end a sleep earlier, so no rule depends on this
/// time.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// Commands and events taken between two steps, so that a flood of them cannot starve the device.
const TAKEN_PER_STEP_MAX: usize = 256;

/// Reason why the thread ended without a stop command.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    #[error("the transfers stopped")]
    TransfersStopped,
    #[error("the engine thread panicked: {reason}")]
    Panicked { reason: String },
}

/// The device that the engine computed with. Transfers may still access its memory, so it is
/// dropped after them. Dropping a broken device may block.
pub(crate) type Device = Option<Box<dyn Any + Send>>;

/// A running engine thread. End it with [`EngineCommand::Stop`], then [`EngineThread::join`].
#[derive(Debug)]
pub(crate) struct EngineThread {
    thread: JoinHandle<(Result<(), EngineError>, Device)>,
    ended: oneshot::Receiver<()>,
}

impl EngineThread {
    pub(crate) fn start<E: Executor + 'static>(mut engine: Engine<E>) -> io::Result<Self> {
        // Dropped when the thread ends, also by a panic.
        let (ending, ended) = oneshot::channel();
        let thread = thread::Builder::new().name("baton-engine".to_owned()).spawn(move || {
            let _ending: oneshot::Sender<()> = ending;
            let ended = engine.run();
            (ended, Some(Box::new(engine.core) as Box<dyn Any + Send>))
        })?;
        Ok(Self { thread, ended })
    }

    /// Waits until the thread has ended.
    pub(crate) async fn ended(&mut self) {
        // Nothing is ever sent: the drop is the message.
        let _ = (&mut self.ended).await;
    }

    /// Returns whether [`ended`](Self::ended) returns at once.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.ended.try_recv() != Err(oneshot::error::TryRecvError::Empty)
    }

    /// Blocks until the thread has ended.
    pub(crate) fn join(self) -> (Result<(), EngineError>, Device) {
        self.thread.join().unwrap_or_else(|panic| {
            (Err(EngineError::Panicked { reason: panic_message(&*panic) }), None)
        })
    }
}

/// Everything that the thread owns.
pub(crate) struct Engine<E> {
    core: NodeCore<E>,
    callers: Callers,
    observers: ObserverSenders,
    transfers: Arc<Transfers>,
    commands: CommandReceiver,
    events: Receiver<transfer::Event>,
    metrics: NodeMetrics,
    step_in_flight: Arc<StepInFlight>,
    /// Whether the node is paused, for its readiness.
    is_paused: Arc<AtomicBool>,
    weight_calls: WeightCalls,
    /// Copies of the KV tiers; `None` without tiers.
    tiers: Option<TierThreads>,
    recorder: Recorder,
    is_stopping: bool,
}

/// The KV tiers as the engine thread uses them.
pub(crate) struct TierThreads {
    pub copies: Arc<TierCopies>,
    pub events: Receiver<TierEvent>,
    pub metrics: TierMetrics,
}

impl<E: Executor> Engine<E> {
    pub(crate) fn new(
        core: NodeCore<E>,
        transfers: Arc<Transfers>,
        commands: CommandReceiver,
        events: Receiver<transfer::Event>,
        metrics: NodeMetrics,
        step_in_flight: Arc<StepInFlight>,
        is_paused: Arc<AtomicBool>,
    ) -> Self {
        Self {
            core,
            callers: Callers::default(),
            observers: ObserverSenders::default(),
            transfers,
            commands,
            events,
            metrics,
            step_in_flight,
            is_paused,
            weight_calls: WeightCalls::default(),
            tiers: None,
            recorder: Recorder::default(),
            is_stopping: false,
        }
    }

    pub(crate) fn with_tiers(mut self, tiers: Option<TierThreads>) -> Self {
        self.tiers = tiers;
        self
    }

    /// Runs until the stop command or a failure of the device, and then ends every attempt.
    fn run(&mut self) -> Result<(), EngineError> {
        let ended = self.step_until_stopped();
        let reason = match &ended {
            Ok(()) => CloseReason::Stopped,
            Err(error) => CloseReason::EngineFailed { reason: error.to_string() },
        };
        node_core::close(self, &reason);
        ended
    }

    fn step_until_stopped(&mut self) -> Result<(), EngineError> {
        loop {
            self.take_queued()?;
            if self.is_stopping {
                return Ok(());
            }
            let turn = node_core::take_turn(self)?;
            self.recorder.finish_if_due();
            if turn == LoopOutcome::Idle {
                self.sleep()?;
            }
        }
    }

    /// Takes commands and events without waiting.
    fn take_queued(&mut self) -> Result<(), EngineError> {
        for _ in 0..TAKEN_PER_STEP_MAX {
            match self.events.try_recv() {
                Ok(event) => self.core.handle_transfer_event(event, Instant::now()),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err(EngineError::TransfersStopped),
            }
        }
        for _ in 0..TAKEN_PER_STEP_MAX {
            // The threads of the tiers outlive the engine thread, so the queue is never closed.
            let event = self.tiers.as_ref().and_then(|tiers| tiers.events.try_recv().ok());
            let Some(event) = event else { break };
            self.on_tier_event(event);
        }
        for _ in 0..TAKEN_PER_STEP_MAX {
            match self.commands.try_recv() {
                Ok(command) => self.handle(command),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.is_stopping = true;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Waits for a command, an event or a deadline. No step is in flight.
    fn sleep(&mut self) -> Result<(), EngineError> {
        let tier_events = self.tiers.as_ref().map_or_else(never, |tiers| tiers.events.clone());
        select! {
            recv(tier_events) -> event => if let Ok(event) = event {
                self.on_tier_event(event);
            },
            recv(*self.commands) -> command => match command {
                Ok(command) => self.handle(command),
                // Every sender is dropped.
                Err(_) => self.is_stopping = true,
            },
            recv(self.events) -> event => {
                let event = event.map_err(|_| EngineError::TransfersStopped)?;
                self.core.handle_transfer_event(event, Instant::now());
            },
            default(self.wait_max(self.core.next_deadline())) => {}
        }
        Ok(())
    }

    fn on_tier_event(&mut self, event: TierEvent) {
        self.recorder.tier_event(&event);
        self.core.handle_tier_event(event, Instant::now());
    }

    fn handle(&mut self, command: EngineCommand) {
        let now = Instant::now();
        match command {
            EngineCommand::Begin(arrival) => self.core.handle_call(self.callers.add(*arrival), now),
            EngineCommand::Cancel { call, _permit } => self.core.handle_cancel(call),
            EngineCommand::Observe { observer, _permit } => {
                // On an idle node no event finds the dropped streams.
                for closed in self.observers.take_closed() {
                    self.core.handle_observe_ended(closed);
                }
                self.core.handle_observe(self.observers.add(observer), now);
            }
            EngineCommand::Connect { commands, _permit } => {
                for command in commands {
                    // A full queue drops the command; routers repeat it.
                    let _ = self.transfers.command(command);
                }
            }
            EngineCommand::Drain { grace } => self.core.handle_draining(true, Some(grace), now),
            EngineCommand::SetDraining { draining, _permit } => {
                self.core.handle_draining(draining, None, now);
            }
            EngineCommand::ResetPrefixCache { dropped, _permit } => {
                // The caller may have stopped waiting.
                let _ = dropped.send(self.core.handle_reset_prefix_cache());
            }
            EngineCommand::AdaptersChanged { adapters, _permit } => {
                self.core.handle_adapters(&adapters.listed());
            }
            EngineCommand::Trace { request, _permit } => self.recorder.start(request),
            EngineCommand::ChangeWeights {
                weight_version,
                label,
                in_flight,
                waits,
                changed,
                _permit,
            } => {
                let begun =
                    self.core.handle_change_weights(weight_version, label, in_flight, waits, now);
                self.weight_calls.await_change(begun, changed);
            }
            EngineCommand::ReleaseWeights { update, waits, released, _permit } => {
                let begun = self.core.handle_release_weights(waits, now);
                self.weight_calls.await_release(update, begun, released);
            }
            EngineCommand::LoseWeights { update, lost, _permit } => {
                let is_lost = self.weight_calls.lose(update) && self.core.handle_lost_weights(now);
                // The caller may have stopped waiting.
                let _ = lost.send(is_lost);
            }
            EngineCommand::Pause { in_flight, waits, at_most, _permit } => {
                self.core.handle_pause(in_flight, waits, now + at_most, now);
            }
            EngineCommand::Resume { _permit } => self.core.handle_resume(now),
            EngineCommand::EndAll => self.core.handle_close(&CloseReason::DrainTimeout),
            EngineCommand::Stop => self.is_stopping = true,
        }
    }

    fn command_transfers(&mut self, call: Option<CallId>, mut command: transfer::Command) {
        if let Some(call) = call {
            self.callers.set_traceparent(call, &mut command);
        }
        if let Err(full) = self.transfers.command(command.clone()) {
            let (reason, now) = (full.to_string(), Instant::now());
            self.core.handle_transfer_queue_full(call, command, reason, now);
        }
    }

    fn measure(&mut self, metric: Metric) {
        if let Metric::Step(step) = &metric {
            self.recorder.add_step(step);
        }
        match (metric, &self.tiers) {
            (Metric::Tier(tier, stats), Some(tiers)) => tiers.metrics.set(tier, stats),
            (metric, _) => metrics::record(&self.metrics, metric),
        }
    }

    fn pause_changed(&self, state: v1::PauseState) {
        info!(
            "{}",
            match state {
                v1::PauseState::None => "the node serves again after a pause",
                v1::PauseState::Pausing => "the node pauses: it admits nothing",
                v1::PauseState::Paused => "the node is paused: nothing runs",
            }
        );
        self.is_paused.store(state != v1::PauseState::None, Ordering::Release);
    }
}

impl<E: Executor> NodeShell for Engine<E> {
    type Executor = E;

    fn core(&mut self) -> &mut NodeCore<E> {
        &mut self.core
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wait_max(&self, due: Option<Instant>) -> Duration {
        let due = due.into_iter().chain(self.recorder.deadline()).min();
        due.map_or(SLEEP_MAX, |due| due.saturating_duration_since(Instant::now())).min(SLEEP_MAX)
    }

    fn device_call_begins(&mut self) {
        self.step_in_flight.begin_turn(Instant::now());
    }

    fn device_call_ends(&mut self) {
        self.step_in_flight.end_turn(Instant::now(), self.core.step_age());
    }

    fn carry_out(&mut self, output: NodeOutput) {
        match output {
            NodeOutput::Reply { call, reply } => {
                if let Err(QueueFull) = self.callers.reply(call, reply) {
                    self.core.handle_slow_reader(call);
                }
            }
            NodeOutput::Forgotten { call } => self.callers.remove(call),
            NodeOutput::Transfer { call, command } => self.command_transfers(call, command),
            NodeOutput::Stage { call, change } => {
                self.recorder.stage(call, &change);
                self.callers.change_stage(call, change);
            }
            NodeOutput::Observe { observer, event } => {
                if !self.observers.send(observer, event) {
                    self.core.handle_observe_ended(observer);
                }
            }
            NodeOutput::ObserveStalled { observer } => self.observers.stalled(observer),
            NodeOutput::Save(job) => {
                self.recorder.save_began(&job);
                let failed = self.tiers.as_ref().and_then(|tiers| tiers.copies.save(job));
                failed.into_iter().for_each(|event| self.on_tier_event(event));
            }
            NodeOutput::CancelSaves { last } => {
                if let Some(tiers) = &self.tiers {
                    tiers.copies.cancel_saves(last);
                }
            }
            NodeOutput::Load(job) => {
                self.recorder.load_began(&job);
                let failed = self.tiers.as_ref().and_then(|tiers| tiers.copies.load(job));
                failed.into_iter().for_each(|event| self.on_tier_event(event));
            }
            NodeOutput::Metric(metric) => self.measure(metric),
            NodeOutput::WeightsChanged { paused } => {
                self.recorder.weights_changed(paused);
                self.weight_calls.changed(paused);
            }
            NodeOutput::WeightsReleased => self.weight_calls.released(),
            NodeOutput::PauseChanged { state } => self.pause_changed(state),
            NodeOutput::Stalled { after } => {
                let seconds = after.as_secs_f64();
                warn!("the node is stalled: no step has finished for {seconds} s");
            }
            NodeOutput::Recovered => info!("the node recovered: steps finish again"),
        }
    }

    fn flush(&mut self) {
        self.callers.wake();
    }
}
