//! The thread that owns the step loop.
//!
//! It takes commands of callers and events of transfers, turns the scheduler and its device, and
//! hands on what comes out ([`Journey`] says to whom). It sleeps while there is nothing to do and
//! waits for nobody but its device; whoever puts something into one of its two queues wakes it.

use std::{
    any::Any,
    io,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use cluster::NodeRecord;
use crossbeam_channel::{Receiver, TryRecvError, select};
use engine::{
    Speculated, StepLoop, StepRecord, Turn,
    event::{Action, Input},
    executor::{Executor, ExecutorError},
    plan::Dispatch,
};
use kv_transfer::{Transfers, api as transfer};
use telemetry::{
    NodeMetrics,
    metrics::{StepDispatch, StepStats},
};
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::{
    inbox::{Command, CommandReceiver},
    journey::Journey,
    observe::Observers,
};

/// Longest sleep; nothing depends on it.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// How soon a command is offered again to transfers that had no room.
const RETRY_AFTER: Duration = Duration::from_millis(2);
/// A step that takes longer is one that hangs, as far as routers are concerned: without a word for so
/// long they give its requests to other nodes (`router.idle_timeout`).
pub(crate) const STALL_AFTER: Duration = Duration::from_secs(60);
/// Where the model and the machine make steps slow they stay so.
const STALL_STEPS: u32 = 4;
/// Commands and events taken between two turns, so that a flood of them cannot stop the device.
const TAKEN_PER_TURN_MAX: usize = 256;

/// Why the thread ended before it was told to.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    #[error("the transfers stopped")]
    TransfersStopped,
    #[error("the engine thread panicked: {reason}")]
    Panicked { reason: String },
}

/// What the thread needs.
pub(crate) struct Parts<E> {
    pub steps: StepLoop<E>,
    pub transfers: Arc<Transfers>,
    pub commands: CommandReceiver,
    pub events: Receiver<transfer::Event>,
    pub record: NodeRecord,
    pub metrics: NodeMetrics,
    /// [`STALL_AFTER`].
    pub stall_after: Duration,
}

/// A running engine thread. End it with [`Command::Stop`], then [`EngineThread::join`].
#[derive(Debug)]
pub(crate) struct EngineThread {
    thread: JoinHandle<(Result<(), EngineError>, Device)>,
    ended: oneshot::Receiver<()>,
}

/// What the engine computed with. Transfers may still move what lies in its memory, so it goes after
/// them; one that is broken may take its time for that.
#[must_use = "it is dropped when the transfers have ended"]
#[derive(Debug, Default)]
pub(crate) struct Device(Option<Box<dyn Any + Send>>);

impl Device {
    /// Lets go of it.
    pub fn close(self) {
        drop(self.0);
    }
}

impl EngineThread {
    pub fn start<E: Executor + 'static>(parts: Parts<E>) -> io::Result<Self> {
        // Dropped when the thread ends, however it ends.
        let (ending, ended) = oneshot::channel();
        let thread = thread::Builder::new().name("baton-engine".to_owned()).spawn(move || {
            let mut engine = Engine::new(parts);
            let _ending: oneshot::Sender<()> = ending;
            let ended = engine.run();
            (ended, Device(Some(Box::new(engine.steps))))
        })?;
        Ok(Self { thread, ended })
    }

    /// Comes back when the engine has ended.
    pub async fn ended(&mut self) {
        // Nothing is ever sent: the drop is the message.
        let _ = (&mut self.ended).await;
    }

    /// Whether [`ended`](Self::ended) comes back at once.
    pub fn has_ended(&mut self) -> bool {
        self.ended.try_recv() != Err(oneshot::error::TryRecvError::Empty)
    }

    /// Blocks until the thread has ended.
    pub fn join(self) -> (Result<(), EngineError>, Device) {
        self.thread.join().unwrap_or_else(|panic| {
            (Err(EngineError::Panicked { reason: message_of(&*panic) }), Device::default())
        })
    }
}

struct Engine<E> {
    transfers: Arc<Transfers>,
    commands: CommandReceiver,
    events: Receiver<transfer::Event>,
    journey: Journey,
    observers: Observers,
    metrics: NodeMetrics,
    /// Reused by every turn.
    actions: Vec<Action>,
    preemptions: u64,
    /// A step that takes longer hangs: the node takes no new work until it ends.
    stall_after: Duration,
    /// A command that the transfers had no room for waits in the journey.
    transfers_are_full: bool,
    stopping: bool,
    steps: StepLoop<E>,
}

impl<E: Executor> Engine<E> {
    fn new(parts: Parts<E>) -> Self {
        let Parts { steps, transfers, commands, events, record, metrics, stall_after } = parts;
        Self {
            steps,
            transfers,
            commands,
            events,
            journey: Journey::new(metrics.clone()),
            observers: Observers::new(&record, metrics.clone()),
            metrics,
            actions: Vec::new(),
            preemptions: 0,
            stall_after,
            transfers_are_full: false,
            stopping: false,
        }
    }

    /// Until it is told to stop, or the device fails. Then all that is in work here ends, and peers
    /// hear that their transfers do.
    fn run(&mut self) -> Result<(), EngineError> {
        let ended = self.turn_until_stopped();
        if let Err(error) = &ended {
            // What was computed before is still to be told.
            self.settle();
            self.journey.fail_all(&format!("the engine ended: {error}"));
            self.settle();
        }
        ended
    }

    fn turn_until_stopped(&mut self) -> Result<(), EngineError> {
        loop {
            self.take_what_waits()?;
            self.settle();
            if self.stopping {
                return Ok(());
            }
            let turn = self.steps.turn(self.patience(), &mut self.actions)?;
            let is_idle = turn == Turn::Idle && self.actions.is_empty();
            self.settle();
            self.record_steps();
            self.watch_for_stall();
            self.observers.publish_if_due(Instant::now(), self.steps.scheduler_mut());
            if is_idle {
                self.sleep()?;
            }
        }
    }

    /// Takes commands and events without waiting.
    fn take_what_waits(&mut self) -> Result<(), EngineError> {
        for _ in 0..TAKEN_PER_TURN_MAX {
            match self.events.try_recv() {
                Ok(event) => self.on_event(event),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err(EngineError::TransfersStopped),
            }
        }
        for _ in 0..TAKEN_PER_TURN_MAX {
            match self.commands.try_recv() {
                Ok(command) => self.on_command(command),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.stopping = true;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Nothing is in flight: waits for a command, an event or a deadline.
    fn sleep(&mut self) -> Result<(), EngineError> {
        let patience = self.patience();
        select! {
            recv(*self.commands) -> command => match command {
                Ok(command) => self.on_command(command),
                // Every caller is gone.
                Err(_) => self.stopping = true,
            },
            recv(self.events) -> event => match event {
                Ok(event) => self.on_event(event),
                Err(_) => return Err(EngineError::TransfersStopped),
            },
            default(patience) => {}
        }
        Ok(())
    }

    /// How long nothing is due.
    fn patience(&self) -> Duration {
        let now = Instant::now();
        let due = [self.steps.next_deadline(), self.observers.due()].into_iter().flatten().min();
        let patience = due.map_or(SLEEP_MAX, |due| due.saturating_duration_since(now));
        let longest = if self.transfers_are_full { RETRY_AFTER } else { SLEEP_MAX };
        patience.min(longest)
    }

    fn on_command(&mut self, command: Command) {
        let now = Instant::now();
        match command {
            Command::Begin(arrival) => self.journey.begin(*arrival, now),
            Command::Cancel { id, place } => self.journey.cancel(id, &place),
            Command::Observe(observer) => {
                self.observers.add(observer, now, self.steps.scheduler_mut());
            }
            Command::Connect { peers, sends, guard } => {
                for peer in peers {
                    // Where there is no room now it is said again.
                    let guard = Some(guard.clone());
                    let _ =
                        self.transfers.command(transfer::Command::Connect { peer, sends, guard });
                }
            }
            Command::Drain => self.observers.drain(now, self.steps.scheduler_mut()),
            Command::EndAll => self.journey.end_all("the node stops; its time to drain is over"),
            Command::Stop => {
                self.journey.end_all("the node stops");
                self.stopping = true;
            }
        }
    }

    fn on_event(&mut self, event: transfer::Event) {
        self.journey.on_transfer_event(event, Instant::now());
    }

    /// Carries words between scheduler, callers and transfers until nobody has anything to say.
    fn settle(&mut self) {
        loop {
            self.hand_on_actions();
            if let Some(input) = self.journey.next_input() {
                self.handle(input);
            } else if !self.command_transfers() {
                return;
            }
        }
    }

    fn handle(&mut self, input: Input) {
        let arrived = match &input {
            Input::Arrived(sequence) => Some(sequence.id),
            _ => None,
        };
        self.observers.mark_changed();
        self.steps.handle(input, &mut self.actions);
        self.hand_on_actions();
        if let Some(id) = arrived {
            self.journey.taken(id, Instant::now());
        }
    }

    fn hand_on_actions(&mut self) {
        let now = Instant::now();
        for action in self.actions.drain(..) {
            self.journey.on_action(action, now);
        }
    }

    /// True when there is something new for the scheduler.
    fn command_transfers(&mut self) -> bool {
        self.transfers_are_full = false;
        while let Some(command) = self.journey.next_command() {
            let Err(full) = self.transfers.command(command.clone()) else { continue };
            match command {
                // A transfer that has not begun is refused; its sequence ends at once.
                transfer::Command::Receive { transfer, .. }
                | transfer::Command::Expect { transfer, .. } => {
                    self.journey.transfer_refused(transfer, full.to_string());
                    return true;
                }
                transfer::Command::Connect { .. } => {}
                // One that has begun must be told: its words keep their order until there is room.
                transfer::Command::Written { .. }
                | transfer::Command::Finish { .. }
                | transfer::Command::Abort { .. }
                | transfer::Command::WeightsChanged { .. } => {
                    self.journey.put_back(command);
                    self.transfers_are_full = true;
                    return false;
                }
            }
        }
        false
    }

    /// A device that hangs lets this thread go on: all else looks well.
    fn watch_for_stall(&mut self) {
        let stalled = self.steps.step_age().is_some_and(|age| age > self.stall_after);
        if stalled == self.observers.is_stalled() {
            return;
        }
        if stalled {
            let seconds = self.stall_after.as_secs_f64();
            warn!("no step has ended for {seconds} s; routers are told that this node is down");
        } else {
            info!("steps end again");
        }
        self.observers.set_stalled(stalled);
    }

    fn record_steps(&mut self) {
        while let Some(step) = self.steps.take_record() {
            self.observers.mark_changed();
            self.stall_after = self.stall_after.max(STALL_STEPS * step.busy);
            self.metrics.step(&figures(&step));
        }
        let Speculated { rows, drafted, accepted, accepted_at } = self.steps.take_speculated();
        if rows > 0 {
            self.metrics.speculated(rows, drafted, accepted, &accepted_at);
        }
        let preemptions = self.steps.scheduler().preemptions();
        if preemptions > self.preemptions {
            self.metrics.preempted(preemptions - self.preemptions);
            self.preemptions = preemptions;
        }
    }
}

fn figures(step: &StepRecord) -> StepStats {
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

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use engine::{
        CacheSeeds, Scheduler, SchedulerConfig,
        event::{NewSequence, SequenceId, SequenceKind},
        executor::{
            CollectWaker, ExecutorLimits,
            sim::{CostModel, SimExecutor},
        },
        plan::{StepPlan, StepResult},
    };
    use futures_util::StreamExt;
    use kernels::{Dtype, KvArena, KvLayout, WeightFormat, sampling::Sampling};
    use kv_transfer::{ClusterSecret, TransferConfig, TransferLimits, TransportConfig};
    use proto::v1::{FailureKind, ObserveEvent};
    use tonic::Code;

    use super::*;
    use crate::{
        attempt::Attempt,
        identity,
        inbox::Inbox,
        observe::{self, ObserveStream},
        refusal::Refusal,
        stream::{AttemptEnd, Heard},
        testing,
        transfer_events::TransferEvents,
    };

    const WITHIN: Duration = Duration::from_secs(60);
    const LIMITS: ExecutorLimits = ExecutorLimits {
        slots: 2,
        step_tokens: 16,
        sequence_tokens: 64,
        blocks: 8,
        depth: 2,
        vocabulary: 10,
        speculation: None,
    };

    /// A device that fails with its first step.
    struct BrokenDevice;

    impl Executor for BrokenDevice {
        fn launch(&mut self, _plan: StepPlan) -> Result<(), ExecutorError> {
            Err(ExecutorError::Stopped { reason: "it burnt down".into() })
        }

        fn collect(&mut self, _timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
            Ok(None)
        }

        fn limits(&self) -> ExecutorLimits {
            LIMITS
        }
    }

    /// A device that fails with its first step, and whose end waits until it is released.
    struct ClingingDevice {
        released: Receiver<()>,
    }

    impl Executor for ClingingDevice {
        fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
            BrokenDevice.launch(plan)
        }

        fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
            BrokenDevice.collect(timeout)
        }

        fn limits(&self) -> ExecutorLimits {
            LIMITS
        }
    }

    impl Drop for ClingingDevice {
        fn drop(&mut self) {
            let _ = self.released.recv();
        }
    }

    /// A device whose steps do not end until it is released.
    struct HangingDevice {
        sim: SimExecutor,
        released: Arc<AtomicBool>,
    }

    impl Executor for HangingDevice {
        fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
            self.sim.launch(plan)
        }

        fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
            if self.released.load(Ordering::Acquire) {
                return self.sim.collect(Duration::from_secs(3600));
            }
            thread::sleep(timeout.min(Duration::from_millis(10)));
            Ok(None)
        }

        fn limits(&self) -> ExecutorLimits {
            LIMITS
        }
    }

    fn parts<E: Executor>(executor: E) -> (Parts<E>, Inbox) {
        let seeds = CacheSeeds { model_fingerprint: 1, weight_version: 1 };
        let scheduler = Scheduler::new(SchedulerConfig::new(LIMITS), seeds).unwrap();
        let layout = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 2, dtype: Dtype::F32 };
        let identity = identity::identity(1, WeightFormat::F32, layout);
        let (sink, events) = TransferEvents::new(8, CollectWaker::default());
        let transfers = Transfers::start(
            TransferConfig {
                node_id: "decode-1".into(),
                epoch: transfer::Epoch(1),
                identity,
                secret: ClusterSecret::new([7; 32]).unwrap(),
                control_bind: "127.0.0.1:0".parse().unwrap(),
                data_bind: "127.0.0.1:0".parse().unwrap(),
                advertise_host: "127.0.0.1".into(),
                limits: TransferLimits::default(),
                transport: TransportConfig::default(),
            },
            KvArena::host(layout, LIMITS.blocks).unwrap(),
            sink,
        )
        .unwrap();
        let (inbox, commands) = Inbox::new(4, CollectWaker::default());
        let parts = Parts {
            steps: StepLoop::new(scheduler, executor),
            transfers: Arc::new(transfers),
            commands,
            events,
            record: testing::record(),
            metrics: testing::metrics(),
            stall_after: STALL_AFTER,
        };
        (parts, inbox)
    }

    fn attempt(id: u128) -> Attempt {
        Attempt {
            request_id: id,
            sequence: NewSequence {
                id: SequenceId(id),
                kind: SequenceKind::Compute,
                tokens: vec![1, 2, 3],
                prompt_len: 3,
                sampling: Sampling::greedy(),
                max_tokens: 4,
                ignore_stop_tokens: true,
                cache_salt: String::new(),
                constraint: None,
                deadline: Instant::now() + Duration::from_secs(60),
            },
            grammar: None,
            peer: None,
            traceparent: String::new(),
        }
    }

    #[tokio::test]
    async fn a_broken_device_ends_every_request_with_a_typed_failure_and_then_the_thread() {
        let (parts, inbox) = parts(BrokenDevice);
        let mut engine = EngineThread::start(parts).unwrap();
        // Refused when the device breaks before the answer is out, failed when after.
        let kind = match inbox.begin(attempt(1)).await {
            Ok(stream) => match stream.collect::<Vec<Heard>>().await.pop() {
                Some(Heard::End(AttemptEnd::Failed { kind, message })) => {
                    assert!(message.contains("it burnt down"), "{message}");
                    kind
                }
                other => panic!("{other:?}"),
            },
            Err(refusal) => {
                assert_eq!(refusal, Refusal::Stopped);
                FailureKind::Internal
            }
        };
        assert_eq!(kind, FailureKind::Internal);
        engine.ended().await;
        assert_eq!(inbox.begin(attempt(2)).await.unwrap_err(), Refusal::Stopped);
        let error = engine.join().0.unwrap_err().to_string();
        assert!(error.contains("it burnt down"), "{error}");
        inbox.idle().await;
    }

    #[tokio::test]
    async fn a_lost_device_that_does_not_go_keeps_nobody_waiting() {
        let (release, released) = crossbeam_channel::bounded(0);
        let (parts, inbox) = parts(ClingingDevice { released });
        let mut engine = EngineThread::start(parts).unwrap();
        let end = async {
            // Refused when the device breaks before the answer is out, failed when after.
            if let Ok(stream) = inbox.begin(attempt(1)).await {
                stream.collect::<Vec<Heard>>().await;
            }
            engine.ended().await;
            inbox.idle().await;
        };
        tokio::time::timeout(WITHIN, end).await.expect("nobody waits for the device");
        assert!(engine.has_ended());
        assert_eq!(inbox.begin(attempt(2)).await.unwrap_err(), Refusal::Stopped);
        drop(release);
        let error = engine.join().0.unwrap_err().to_string();
        assert!(error.contains("it burnt down"), "{error}");
    }

    /// The thread went while a command was on its way.
    #[tokio::test]
    async fn what_waits_when_the_thread_goes_is_refused() {
        let (inbox, commands) = Inbox::new(4, CollectWaker::default());
        let (refusal, ()) = tokio::join!(inbox.begin(attempt(1)), async { drop(commands) });
        assert_eq!(refusal.unwrap_err(), Refusal::Stopped);
        tokio::time::timeout(WITHIN, inbox.idle()).await.expect("no place is taken");
    }

    /// Asks the engine; its thread answers in any case.
    async fn first_observed(inbox: &Inbox) -> (ObserveStream, Result<ObserveEvent, Code>) {
        let (ends, mut stream) = observe::observer(observe::places().try_acquire_owned().unwrap());
        inbox.send(Command::Observe(ends)).unwrap();
        let first = tokio::time::timeout(WITHIN, stream.next()).await;
        let first = first.expect("an answer in time").expect("an event or an end");
        (stream, first.map_err(|status| status.code()))
    }

    #[tokio::test]
    async fn a_node_whose_steps_do_not_end_is_not_to_be_observed_until_they_do() {
        let released = Arc::new(AtomicBool::new(false));
        let sim = SimExecutor::new(LIMITS, CostModel::default(), Instant::now());
        let (parts, inbox) = parts(HangingDevice { sim, released: released.clone() });
        let stall_after = Duration::from_millis(200);
        let engine = EngineThread::start(Parts { stall_after, ..parts }).unwrap();
        // A node without work does not stand still, however long that lasts.
        tokio::time::sleep(2 * stall_after).await;
        let (mut observed, first) = first_observed(&inbox).await;
        assert!(first.is_ok(), "{first:?}");

        let answer = inbox.begin(attempt(1)).await.unwrap();
        let end = async {
            loop {
                if let Err(status) = observed.next().await.expect("it ends with an error") {
                    return status;
                }
            }
        };
        let end = tokio::time::timeout(WITHIN, end).await.expect("it ends in time");
        assert_eq!(end.code(), Code::Unavailable);
        assert!(end.message().contains("no step of this node ends"), "{end}");
        assert_eq!(first_observed(&inbox).await.1, Err(Code::Unavailable));

        released.store(true, Ordering::Release);
        let heard = tokio::time::timeout(WITHIN, answer.collect::<Vec<Heard>>()).await.unwrap();
        assert!(matches!(heard.last(), Some(Heard::End(AttemptEnd::Finished { .. }))), "{heard:?}");
        let back = async { while first_observed(&inbox).await.1.is_err() {} };
        tokio::time::timeout(WITHIN, back).await.expect("it is observed again");
        inbox.send(Command::Stop).unwrap();
        tokio::task::spawn_blocking(|| engine.join().0).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn an_idle_thread_stops_when_told_and_when_everyone_left() {
        for tell in [true, false] {
            let (parts, inbox) = parts(BrokenDevice);
            let mut engine = EngineThread::start(parts).unwrap();
            if tell {
                inbox.send(Command::Stop).unwrap();
            }
            drop(inbox);
            engine.ended().await;
            engine.join().0.unwrap();
        }
    }
}
