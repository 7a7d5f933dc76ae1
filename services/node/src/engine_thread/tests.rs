use std::sync::atomic::{AtomicBool, Ordering};

use engine::{
    CacheSeeds, Scheduler, SchedulerConfig, StepLoop,
    event::{NewSequence, SequenceId, SequenceKind},
    executor::{
        CollectWaker, ExecutorLimits,
        sim::{CostModel, SimExecutor},
    },
    plan::{RowMask, StepId, StepPlan, StepResult},
};
use futures_util::StreamExt;
use kernels::{KvArena, KvFormat, KvGroups, KvLayout, WeightFormat, sampling::Sampling};
use kv_transfer::{ClusterSecret, TransferConfig, TransferLimits, TransportConfig};
use proto::v1::{FailureKind, ObserveEvent};
use tonic::Code;
use weight_transfer::UpdateId;

use super::*;
use crate::{
    attempt::NewAttempt,
    identity,
    inbox::{EngineInbox, TransferEvents},
    node_core::{AttemptEnd, Refusal, Reply, STALL_AFTER},
    observe::{self, ObserveStream},
    testing,
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

/// A device whose first launch fails, and whose weights new ones may overwrite.
#[derive(Default)]
struct BrokenDevice {
    /// Blocks the drop until the other end is dropped or sends.
    released: Option<Receiver<()>>,
}

impl Executor for BrokenDevice {
    fn launch(&mut self, _plan: StepPlan) -> Result<(), ExecutorError> {
        Err(ExecutorError::Stopped { reason: "the device burnt down".into() })
    }

    fn supply(&mut self, _step_id: StepId, _masks: Vec<RowMask>) -> Result<(), ExecutorError> {
        unreachable!("no step was launched")
    }

    fn masks_are_due(&self) -> bool {
        false
    }

    fn collect(&mut self, _timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        Ok(None)
    }

    fn limits(&self) -> ExecutorLimits {
        LIMITS
    }

    fn release_weights(&mut self) -> Result<(), ExecutorError> {
        Ok(())
    }
}

impl Drop for BrokenDevice {
    fn drop(&mut self) {
        let _ = self.released.as_ref().map(Receiver::recv);
    }
}

/// A device whose steps do not finish until it is released.
struct HangingDevice {
    sim: SimExecutor,
    released: Arc<AtomicBool>,
}

impl Executor for HangingDevice {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        self.sim.launch(plan)
    }

    fn supply(&mut self, step_id: StepId, masks: Vec<RowMask>) -> Result<(), ExecutorError> {
        self.sim.supply(step_id, masks)
    }

    fn masks_are_due(&self) -> bool {
        self.sim.masks_are_due()
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

fn engine<E: Executor>(executor: E) -> (Engine<E>, EngineInbox) {
    engine_that_stalls_after(STALL_AFTER, executor)
}

fn engine_that_stalls_after<E: Executor>(
    stall_after: Duration,
    executor: E,
) -> (Engine<E>, EngineInbox) {
    let seeds = CacheSeeds { model_fingerprint: 1, weight_version: 1 };
    let scheduler = Scheduler::new(SchedulerConfig::new(LIMITS), seeds).unwrap();
    let layout = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 2, format: KvFormat::F32 };
    let identity = identity::model_identity(1, WeightFormat::F32, layout, &KvGroups::default());
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
            host: None,
            tls: None,
        },
        KvArena::host(layout, LIMITS.blocks).unwrap(),
        sink,
    )
    .unwrap();
    let (inbox, commands) = EngineInbox::new(4, CollectWaker::default());
    let steps = StepLoop::new(scheduler, executor);
    let core = NodeCore::new(steps, &testing::record(), stall_after);
    let metrics = testing::metrics();
    (
        Engine::new(
            core,
            Arc::new(transfers),
            commands,
            events,
            metrics,
            Arc::default(),
            Arc::default(),
        ),
        inbox,
    )
}

fn attempt(id: u128) -> NewAttempt {
    NewAttempt {
        request_id: id,
        weight_version: 1,
        sequence: NewSequence {
            id: SequenceId(id),
            kind: SequenceKind::Compute,
            tokens: vec![1, 2, 3],
            prompt_len: 3,
            sampling: Sampling::greedy(),
            max_tokens: 4,
            ignore_stop_tokens: true,
            cache_salt: String::new(),
            adapter: None,
            session: Default::default(),
            constraint: None,
            deadline: Instant::now() + Duration::from_secs(60),
        },
        adapter: None,
        grammar: None,
        peer: None,
        traceparent: String::new(),
    }
}

#[tokio::test]
async fn failed_device_fails_every_attempt_and_ends_the_thread() {
    let (engine, inbox) = engine(BrokenDevice::default());
    let mut engine = EngineThread::start(engine).unwrap();
    // Rejected when the device fails before the call is accepted, else failed.
    let kind = match inbox.begin(attempt(1)).await {
        Ok(stream) => match stream.collect::<Vec<Reply>>().await.pop() {
            Some(Reply::Ended(AttemptEnd::Failed { kind, message })) => {
                assert!(message.contains("the device burnt down"), "{message}");
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
    assert!(error.contains("the device burnt down"), "{error}");
    inbox.idle().await;
}

#[tokio::test]
async fn device_that_blocks_when_dropped_delays_no_caller() {
    let (release, released) = crossbeam_channel::bounded(0);
    let (engine, inbox) = engine(BrokenDevice { released: Some(released) });
    let mut engine = EngineThread::start(engine).unwrap();
    let end = async {
        // Rejected when the device fails before the call is accepted, else failed.
        if let Ok(stream) = inbox.begin(attempt(1)).await {
            stream.collect::<Vec<Reply>>().await;
        }
        engine.ended().await;
        inbox.idle().await;
    };
    tokio::time::timeout(WITHIN, end).await.expect("no caller waits for the device");
    assert!(engine.has_ended());
    assert_eq!(inbox.begin(attempt(2)).await.unwrap_err(), Refusal::Stopped);
    drop(release);
    let error = engine.join().0.unwrap_err().to_string();
    assert!(error.contains("the device burnt down"), "{error}");
}

#[tokio::test]
async fn queued_arrival_is_rejected_when_the_thread_ends() {
    let (inbox, commands) = EngineInbox::new(4, CollectWaker::default());
    let (refusal, ()) = tokio::join!(inbox.begin(attempt(1)), async { drop(commands) });
    assert_eq!(refusal.unwrap_err(), Refusal::Stopped);
    tokio::time::timeout(WITHIN, inbox.idle()).await.expect("no permit is held");
}

/// Observes the node; the engine thread always answers.
async fn first_observed(inbox: &EngineInbox) -> (ObserveStream, Result<ObserveEvent, Code>) {
    let (observer, mut stream) = observe::observer(observe::permits().try_acquire_owned().unwrap());
    inbox.send_for_router(|_permit| EngineCommand::Observe { observer, _permit }).unwrap();
    let first = tokio::time::timeout(WITHIN, stream.next()).await;
    let first = first.expect("an answer in time").expect("an event or an end");
    (stream, first.map_err(|status| status.code()))
}

#[tokio::test]
async fn stalled_node_ends_observers_until_a_step_finishes() {
    let released = Arc::new(AtomicBool::new(false));
    let sim = SimExecutor::new(LIMITS, CostModel::default(), Instant::now());
    let stall_after = Duration::from_millis(200);
    let device = HangingDevice { sim, released: released.clone() };
    let (engine, inbox) = engine_that_stalls_after(stall_after, device);
    let engine = EngineThread::start(engine).unwrap();
    // An idle node is not stalled, however long it is idle.
    tokio::time::sleep(2 * stall_after).await;
    let (mut observed, first) = first_observed(&inbox).await;
    assert!(first.is_ok(), "{first:?}");

    let answer = inbox.begin(attempt(1)).await.unwrap();
    let end = async {
        loop {
            if let Err(status) = observed.next().await.expect("the stream ends with an error") {
                return status;
            }
        }
    };
    let end = tokio::time::timeout(WITHIN, end).await.expect("the call ends in time");
    assert_eq!(end.code(), Code::Unavailable);
    assert!(end.message().contains("the node is stalled"), "{end}");
    assert_eq!(first_observed(&inbox).await.1, Err(Code::Unavailable));

    released.store(true, Ordering::Release);
    let heard = tokio::time::timeout(WITHIN, answer.collect::<Vec<Reply>>()).await.unwrap();
    assert!(matches!(heard.last(), Some(Reply::Ended(AttemptEnd::Finished { .. }))), "{heard:?}");
    let back = async { while first_observed(&inbox).await.1.is_err() {} };
    tokio::time::timeout(WITHIN, back).await.expect("the node can be observed again");
    inbox.send(EngineCommand::Stop).unwrap();
    tokio::task::spawn_blocking(|| engine.join().0).await.unwrap().unwrap();
}

async fn release(inbox: &EngineInbox, update: UpdateId) {
    let (released, answer) = oneshot::channel();
    let command =
        |_permit| EngineCommand::ReleaseWeights { update, waits: false, released, _permit };
    inbox.send_for_router(command).unwrap();
    tokio::time::timeout(WITHIN, answer).await.unwrap().unwrap().unwrap();
}

async fn lose(inbox: &EngineInbox, update: UpdateId) -> bool {
    let (lost, answer) = oneshot::channel();
    inbox.send_for_router(|_permit| EngineCommand::LoseWeights { update, lost, _permit }).unwrap();
    tokio::time::timeout(WITHIN, answer).await.unwrap().unwrap()
}

#[tokio::test]
async fn abort_that_the_next_update_has_overtaken_loses_no_weights() {
    let (engine, inbox) = engine(BrokenDevice::default());
    let engine = EngineThread::start(engine).unwrap();
    let (first, next) = (UpdateId(1), UpdateId(2));
    assert!(!lose(&inbox, first).await, "nothing was released");
    release(&inbox, first).await;
    release(&inbox, next).await;
    assert!(!lose(&inbox, first).await, "the next update brings weights");
    assert!(lose(&inbox, next).await);
    inbox.send(EngineCommand::Stop).unwrap();
    tokio::task::spawn_blocking(|| engine.join().0).await.unwrap().unwrap();
}

#[tokio::test]
async fn idle_thread_stops_on_command_and_when_every_sender_is_dropped() {
    for tell in [true, false] {
        let (engine, inbox) = engine(BrokenDevice::default());
        let mut engine = EngineThread::start(engine).unwrap();
        if tell {
            inbox.send(EngineCommand::Stop).unwrap();
        }
        drop(inbox);
        engine.ended().await;
        engine.join().0.unwrap();
    }
}
