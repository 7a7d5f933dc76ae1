//! The thread that drives the [`NodeCore`].
//!
//! The loop gives the core commands of callers and events of transfers and KV tiers, carries out the core's outputs,
//! and runs the device one step at a time. It sleeps while the core has no work. It waits only for the
//! device; a command, and an event of transfers or of the KV tiers, wakes it.

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
    Speculated, StepRecord, Turn,
    executor::{Executor, ExecutorError, panic_message},
    plan::Dispatch,
    tiers::TierEvent,
};
use kv_transfer::{Transfers, api as transfer};
use proto::v1;
use telemetry::{
    NodeMetrics,
    metrics::{LoadStats, StepDispatch, StepStats},
};
use tokio::sync::oneshot;
use tracing::{info, warn};
use weight_transfer::UpdateId;

use crate::{
    callers::Callers,
    hang::StepInFlight,
    inbox::{Command, CommandReceiver},
    node_core::{ChangePending, CloseReason, Metric, NodeCore, Output},
    observe::Observers,
    stream::QueueFull,
    tiers::{TierCopies, TierMetrics},
    trace::Recorder,
};

/// Maximum sleep. Commands, events and deadlines end a sleep earlier, so no rule depends on this time.
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

/// The device that the engine computed with. Transfers may still access its memory, so it is dropped
/// after them. Dropping a broken device may block.
pub(crate) type Device = Option<Box<dyn Any + Send>>;

/// A running engine thread. End it with [`Command::Stop`], then [`EngineThread::join`].
#[derive(Debug)]
pub(crate) struct EngineThread {
    thread: JoinHandle<(Result<(), EngineError>, Device)>,
    ended: oneshot::Receiver<()>,
}

impl EngineThread {
    pub fn start<E: Executor + 'static>(mut engine: Engine<E>) -> io::Result<Self> {
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
    pub async fn ended(&mut self) {
        // Nothing is ever sent: the drop is the message.
        let _ = (&mut self.ended).await;
    }

    /// Returns whether [`ended`](Self::ended) returns at once.
    pub fn has_ended(&mut self) -> bool {
        self.ended.try_recv() != Err(oneshot::error::TryRecvError::Empty)
    }

    /// Blocks until the thread has ended.
    pub fn join(self) -> (Result<(), EngineError>, Device) {
        self.thread.join().unwrap_or_else(|panic| {
            (Err(EngineError::Panicked { reason: panic_message(&*panic) }), None)
        })
    }
}

/// Everything that the thread owns.
pub(crate) struct Engine<E> {
    core: NodeCore<E>,
    callers: Callers,
    observers: Observers,
    transfers: Arc<Transfers>,
    commands: CommandReceiver,
    events: Receiver<transfer::Event>,
    metrics: NodeMetrics,
    step_in_flight: Arc<StepInFlight>,
    /// Whether the node is paused, for its readiness.
    is_paused: Arc<AtomicBool>,
    /// Caller that waits for the change of weights.
    weights_changed: Option<oneshot::Sender<Result<Duration, ChangePending>>>,
    /// The last update that released the weights or will release them.
    releasing: Option<UpdateId>,
    /// Caller that waits for the release of the weights.
    weights_released: Option<oneshot::Sender<Result<(), ChangePending>>>,
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
    pub fn new(
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
            observers: Observers::default(),
            transfers,
            commands,
            events,
            metrics,
            step_in_flight,
            is_paused,
            weights_changed: None,
            releasing: None,
            weights_released: None,
            tiers: None,
            recorder: Recorder::default(),
            is_stopping: false,
        }
    }

    pub fn with_tiers(mut self, tiers: Option<TierThreads>) -> Self {
        self.tiers = tiers;
        self
    }

    /// Runs until the stop command or a failure of the device. A failure ends every attempt.
    fn run(&mut self) -> Result<(), EngineError> {
        let ended = self.step_until_stopped();
        if let Err(error) = &ended {
            self.core.handle_close(&CloseReason::EngineFailed { reason: error.to_string() });
            self.carry_out();
        }
        ended
    }

    fn step_until_stopped(&mut self) -> Result<(), EngineError> {
        loop {
            self.take_queued()?;
            self.step_in_flight.begin_turn(Instant::now());
            let launched = self.core.launch_arrived_kv();
            self.step_in_flight.end_turn(Instant::now(), self.core.step_age());
            launched?;
            self.carry_out();
            if self.is_stopping {
                return Ok(());
            }
            self.step_in_flight.begin_turn(Instant::now());
            let turn = self.core.step(self.time_until_due());
            self.step_in_flight.end_turn(Instant::now(), self.core.step_age());
            let turn = turn?;
            self.carry_out();
            self.core.handle_deadline(Instant::now());
            self.carry_out();
            self.recorder.finish_if_due();
            if turn == Turn::Idle {
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
        if let Some(tiers) = &self.tiers {
            // The threads of the tiers outlive the engine thread, so the queue is never closed.
            for event in tiers.events.try_iter().take(TAKEN_PER_STEP_MAX) {
                self.recorder.tier_event(&event);
                self.core.handle_tier_event(event, Instant::now());
            }
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
                self.recorder.tier_event(&event);
                self.core.handle_tier_event(event, Instant::now());
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
            default(self.time_until_due()) => {}
        }
        Ok(())
    }

    fn time_until_due(&self) -> Duration {
        let due = self.core.next_deadline().into_iter().chain(self.recorder.deadline()).min();
        due.map_or(SLEEP_MAX, |due| due.saturating_duration_since(Instant::now())).min(SLEEP_MAX)
    }

    fn handle(&mut self, command: Command) {
        let now = Instant::now();
        match command {
            Command::Begin(arrival) => self.core.handle_call(self.callers.add(*arrival), now),
            Command::Cancel { call, _permit } => self.core.handle_cancel(call),
            Command::Observe { observer, _permit } => {
                // On an idle node no event finds the dropped streams.
                for closed in self.observers.take_closed() {
                    self.core.handle_observe_ended(closed);
                }
                self.core.handle_observe(self.observers.add(observer), now);
            }
            Command::Connect { commands, _permit } => {
                for command in commands {
                    // A full queue drops the command; routers repeat it.
                    let _ = self.transfers.command(command);
                }
            }
            Command::Drain { grace } => self.core.handle_draining(true, Some(grace), now),
            Command::SetDraining { draining, _permit } => {
                self.core.handle_draining(draining, None, now);
            }
            Command::ResetPrefixCache { dropped, _permit } => {
                // The caller may have stopped waiting.
                let _ = dropped.send(self.core.handle_reset_prefix_cache());
            }
            Command::Trace { request, _permit } => self.recorder.start(request),
            Command::ChangeWeights {
                weight_version,
                label,
                in_flight,
                waits,
                changed,
                _permit,
            } => {
                let begun =
                    self.core.handle_change_weights(weight_version, label, in_flight, waits, now);
                match begun {
                    Ok(()) => self.weights_changed = Some(changed),
                    // The caller may have stopped waiting.
                    Err(pending) => _ = changed.send(Err(pending)),
                }
            }
            Command::ReleaseWeights { update, waits, released, _permit } => {
                match self.core.handle_release_weights(waits, now) {
                    Ok(()) => {
                        self.releasing = Some(update);
                        self.weights_released = Some(released);
                    }
                    // The caller may have stopped waiting.
                    Err(pending) => _ = released.send(Err(pending)),
                }
            }
            Command::LoseWeights { update, lost, _permit } => {
                // The release by the next update may have overtaken this command.
                let is_lost = self.releasing == Some(update) && {
                    self.weights_released = None;
                    self.core.handle_lost_weights(now)
                };
                // The caller may have stopped waiting.
                let _ = lost.send(is_lost);
            }
            Command::Pause { in_flight, waits, at_most, _permit } => {
                self.core.handle_pause(in_flight, waits, now + at_most, now);
            }
            Command::Resume { _permit } => self.core.handle_resume(now),
            Command::EndAll => self.core.handle_close(&CloseReason::DrainTimeout),
            Command::Stop => {
                self.core.handle_close(&CloseReason::Stopped);
                self.is_stopping = true;
            }
        }
    }

    /// Carries out the core's outputs until it has none.
    fn carry_out(&mut self) {
        while let Some(output) = self.core.poll_output() {
            match output {
                Output::Reply { call, reply } => {
                    if let Err(QueueFull) = self.callers.reply(call, reply) {
                        self.core.handle_slow_reader(call);
                    }
                }
                Output::Forgotten { call } => self.callers.remove(call),
                Output::Transfer { call, mut command } => {
                    if let Some(call) = call {
                        self.callers.set_traceparent(call, &mut command);
                    }
                    if let Err(full) = self.transfers.command(command.clone()) {
                        let (reason, now) = (full.to_string(), Instant::now());
                        self.core.handle_transfer_queue_full(call, command, reason, now);
                    }
                }
                Output::Stage { call, change } => {
                    self.recorder.stage(call, &change);
                    self.callers.change_stage(call, change);
                }
                Output::Observe { observer, event } => {
                    if !self.observers.send(observer, event) {
                        self.core.handle_observe_ended(observer);
                    }
                }
                Output::ObserveStalled { observer } => self.observers.stalled(observer),
                Output::Save(job) => {
                    self.recorder.save_began(&job);
                    let failed = self.tiers.as_ref().and_then(|tiers| tiers.copies.save(job));
                    if let Some(event) = failed {
                        self.recorder.tier_event(&event);
                        self.core.handle_tier_event(event, Instant::now());
                    }
                }
                Output::CancelSaves { last } => {
                    if let Some(tiers) = &self.tiers {
                        tiers.copies.cancel_saves(last);
                    }
                }
                Output::Load(job) => {
                    self.recorder.load_began(&job);
                    let failed = self.tiers.as_ref().and_then(|tiers| tiers.copies.load(job));
                    if let Some(event) = failed {
                        self.recorder.tier_event(&event);
                        self.core.handle_tier_event(event, Instant::now());
                    }
                }
                Output::Metric(Metric::Tier(tier, stats)) => {
                    if let Some(tiers) = &self.tiers {
                        tiers.metrics.set(tier, stats);
                    }
                }
                Output::Metric(metric) => {
                    if let Metric::Step(step) = &metric {
                        self.recorder.add_step(step);
                    }
                    record(&self.metrics, &metric);
                }
                Output::WeightsChanged { paused } => {
                    self.recorder.weights_changed(paused);
                    if let Some(changed) = self.weights_changed.take() {
                        // The caller may have stopped waiting.
                        let _ = changed.send(Ok(paused));
                    }
                }
                Output::WeightsReleased => {
                    if let Some(released) = self.weights_released.take() {
                        // The caller may have stopped waiting.
                        let _ = released.send(Ok(()));
                    }
                }
                Output::PauseChanged { state } => {
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
                Output::Stalled { after } => {
                    let seconds = after.as_secs_f64();
                    warn!("the node is stalled: no step has finished for {seconds} s");
                }
                Output::Recovered => info!("the node recovered: steps finish again"),
            }
        }
        self.callers.wake();
    }
}

/// Records a measurement of the core in the node's instruments.
fn record(metrics: &NodeMetrics, metric: &Metric) {
    match metric {
        Metric::QueueTime(waited) => metrics.queued(*waited),
        Metric::PrefillTime(took) => metrics.prefilled(*took),
        Metric::PrefixLookup { prompt_tokens, cached_tokens } => {
            metrics.prefix_lookup((*prompt_tokens).into(), (*cached_tokens).into());
        }
        Metric::SequenceFinished(end) => metrics.sequence_ended(*end),
        Metric::TransferFinished { side, end, stats } => {
            metrics.transfer_ended(*side, *end, stats.bytes, stats.elapsed);
        }
        Metric::Step(step) => metrics.step(&step_stats(step)),
        Metric::Speculated(Speculated { rows, drafted, accepted, accepted_at }) => {
            metrics.speculated(*rows, *drafted, *accepted, accepted_at);
        }
        Metric::Preempted(count) => metrics.preempted(*count),
        Metric::Load(load) => metrics.set_load(&LoadStats {
            running: load.running,
            waiting: load.waiting,
            pending_prompt_tokens: load.pending_prompt_tokens,
            blocks_free: load.blocks_free,
            blocks_cached: load.blocks_cached,
            blocks_kept: load.blocks_kept,
            blocks_held: load.blocks_held,
            blocks_reserved: load.blocks_reserved,
        }),
        // `TierMetrics` exports these statistics.
        Metric::Tier(..) => {}
    }
}

fn step_stats(step: &StepRecord) -> StepStats {
    StepStats {
        rows: step.rows,
        tokens: step.tokens,
        padding_rows: step.padding_rows(),
        dispatch: match step.dispatch {
            Dispatch::Eager => StepDispatch::Eager,
            Dispatch::Graph { rows } => StepDispatch::Graph { rows },
            Dispatch::Fallback => StepDispatch::Fallback,
        },
        busy: step.busy,
        plan: step.plan.duration(),
        launch: step.launch.duration(),
        collect: step.collect.duration(),
    }
}

#[cfg(test)]
mod tests;
