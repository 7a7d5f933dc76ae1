use std::time::Duration;

use engine::{
    CacheSeeds, SchedulerConfig,
    event::{FinishReason, InFlight, NewSequence, SequenceFailure, SequenceKind},
    executor::{
        ExecutorLimits,
        sim::{CostModel, SimExecutor},
    },
    tiers::{JobId, LoadJob},
};
use kernels::{
    BlockId,
    sampling::{SampledToken, Sampling},
};
use kv_transfer::api::{PeerAddress, TransferFailure, TransferId, TransferStats};
use proto::v1::{self, FailureKind, observe_event::Event as ObserveEvent};

use super::{weight_change::FINISH_WITHIN, *};
use crate::testing;

const ID: SequenceId = SequenceId(0xabc);
const CALL: CallId = CallId { sequence: ID, number: 1 };
const TRANSFER: TransferId = TransferId(0xabc);
const STATS: TransferStats =
    TransferStats { bytes: 4096, chunks: 1, elapsed: Duration::from_micros(750) };

/// Returns a call with a prompt of 20 tokens.
fn call(id: u128, number: u64, kind: SequenceKind, now: Instant) -> Call {
    let peer = PeerAddress {
        node_id: "peer".into(),
        epoch: transfer::Epoch(9),
        control_endpoint: "tcp://127.0.0.1:9".into(),
    };
    let sequence = NewSequence {
        id: SequenceId(id),
        kind,
        tokens: vec![1; 20],
        prompt_len: 20,
        sampling: Sampling::greedy(),
        max_tokens: 4,
        ignore_stop_tokens: true,
        cache_salt: String::new(),
        session: Default::default(),
        constraint: None,
        deadline: now + Duration::from_secs(600),
    };
    let peer = (kind != SequenceKind::Compute).then_some(peer);
    Call { number, weight_version: 1, sequence, peer, prompt_hash: 0 }
}

/// The attempts without their scheduler: the test makes the actions and reads the inputs.
struct Scene {
    attempts: Attempts,
    now: Instant,
}

impl Scene {
    fn new() -> Self {
        Self { attempts: Attempts::new(1), now: Instant::now() }
    }

    /// Starts a call that the scheduler accepts.
    fn accepted(kind: SequenceKind) -> Self {
        let mut scene = Self::new();
        scene.call(1, kind);
        assert!(matches!(scene.input(), Input::Arrived(sequence) if sequence.id == ID));
        scene.attempts.scheduled(ID, scene.now);
        assert_eq!(scene.replies(), [Reply::Accepted]);
        scene
    }

    /// Starts a `Receive` whose reservation has been sent.
    fn reserved() -> Self {
        let mut scene = Self::accepted(SequenceKind::Receive);
        scene.act(Action::Reserve { id: ID, first_block: 0, blocks: vec![BlockId(3)] });
        assert!(matches!(scene.command(), transfer::Command::Receive { .. }));
        scene
    }

    fn call(&mut self, number: u64, kind: SequenceKind) {
        self.attempts.call(call(ID.0, number, kind, self.now), self.now);
    }

    fn act(&mut self, action: Action) {
        self.attempts.on_action(action, self.now);
    }

    fn transfer_event(&mut self, event: transfer::Event) {
        self.attempts.on_transfer_event(event, self.now);
    }

    fn input(&mut self) -> Input {
        self.attempts.next_input().expect("an input for the scheduler")
    }

    fn command(&mut self) -> transfer::Command {
        self.attempts.next_command().expect("a command for the transfers").1
    }

    /// Returns the replies since the previous call.
    fn replies(&mut self) -> Vec<Reply> {
        replies(self.attempts.outputs.drain(..))
    }

    fn failure(&mut self) -> (FailureKind, String) {
        match self.replies().pop() {
            Some(Reply::Ended(AttemptEnd::Failed { kind, message })) => (kind, message),
            other => panic!("no failure: {other:?}"),
        }
    }

    /// Asserts that no input and no command is left.
    fn assert_quiet(&mut self) {
        assert_eq!(self.attempts.next_input(), None);
        assert!(self.attempts.next_command().is_none());
    }

    fn assert_forgotten(&self) {
        assert!(self.attempts.is_empty());
    }
}

fn replies(outputs: impl IntoIterator<Item = Output>) -> Vec<Reply> {
    let reply = |output| match output {
        Output::Reply { reply, .. } => Some(reply),
        _ => None,
    };
    outputs.into_iter().filter_map(reply).collect()
}

fn token(id: u32) -> SampledToken {
    SampledToken { id, logprobs: None }
}

fn tokens(first_index: u32, ids: &[u32]) -> Action {
    let tokens = ids.iter().map(|&id| token(id)).collect();
    Action::Tokens { id: ID, first_index, tokens, cached_tokens: 0 }
}

fn tokens_reply(first_index: u32, ids: &[u32], finish: Option<FinishReason>) -> Reply {
    let tokens = ids.iter().map(|&id| token(id)).collect();
    let stages = None;
    Reply::Event(AttemptEvent::Tokens {
        first_index,
        tokens,
        cached_tokens: 0,
        weight_version: 1,
        finish,
        stages,
    })
}

/// Returns the first tokens' reply, which has the times of the stages.
fn first_reply(ids: &[u32], finish: Option<FinishReason>, times: v1::StageTimes) -> Reply {
    match tokens_reply(0, ids, finish) {
        Reply::Event(AttemptEvent::Tokens {
            first_index, tokens, cached_tokens, finish, ..
        }) => {
            let stages = Some(times);
            Reply::Event(AttemptEvent::Tokens {
                first_index,
                tokens,
                cached_tokens,
                weight_version: 1,
                finish,
                stages,
            })
        }
        other => other,
    }
}

#[test]
fn prefill_sends_token_0_and_ends_with_delivered() {
    let mut scene = Scene::accepted(SequenceKind::Send);
    assert!(matches!(scene.command(), transfer::Command::Expect { transfer: TRANSFER, .. }));

    scene.now += Duration::from_millis(3);
    scene.transfer_event(transfer::Event::Ready {
        transfer: TRANSFER,
        first_block: 2,
        block_count: 3,
        traceparent: String::new(),
    });
    assert_eq!(scene.input(), Input::TransferReady { id: ID, first_block: 2 });

    scene.act(Action::KvWritten { id: ID, first_block: 2, blocks: vec![BlockId(7)] });
    assert!(matches!(scene.command(), transfer::Command::Written { first_block: 2, .. }));

    scene.now += Duration::from_millis(5);
    scene.act(tokens(0, &[42]));
    assert!(scene.replies().is_empty(), "token 0 may be the last token");
    scene.act(Action::Finished { id: ID, reason: None });
    let times = v1::StageTimes { queue_us: Some(3000), reserve_us: None, prefill_us: Some(5000) };
    assert_eq!(scene.replies(), [first_reply(&[42], None, times)]);
    assert!(matches!(scene.command(), transfer::Command::Finish { first_index: 0, .. }));

    scene.transfer_event(transfer::Event::Delivered { transfer: TRANSFER, stats: STATS });
    assert_eq!(scene.input(), Input::TransferEnded { id: ID });
    assert_eq!(scene.replies(), [Reply::Ended(AttemptEnd::Delivered(STATS))]);
    scene.assert_quiet();
    scene.assert_forgotten();
}

#[test]
fn decode_reserves_receives_and_ends_with_finished() {
    let mut scene = Scene::accepted(SequenceKind::Receive);
    scene.now += Duration::from_millis(2);
    scene.act(Action::Reserve { id: ID, first_block: 1, blocks: vec![BlockId(3)] });
    scene.act(Action::Admitted { id: ID, cached_tokens: 16, local_prefill: false });
    assert!(matches!(
        scene.command(),
        transfer::Command::Receive { transfer: TRANSFER, first_block: 1, .. }
    ));
    let reserved = AttemptEvent::Reserved { cached_tokens: 16, local_prefill: false };
    assert_eq!(scene.replies(), [Reply::Event(reserved)]);

    scene.transfer_event(transfer::Event::Arrived {
        transfer: TRANSFER,
        first_index: 0,
        token: token(42),
        stats: STATS,
    });
    let arrived = Input::KvArrived { id: ID, first_index: 0, token: token(42) };
    assert_eq!(scene.input(), arrived);
    scene.act(tokens(0, &[42]));
    scene.act(tokens(1, &[43, 44]));
    scene.act(Action::Finished { id: ID, reason: Some(FinishReason::Length) });
    let end = AttemptEnd::Finished { reason: FinishReason::Length, received: STATS };
    let times = v1::StageTimes { queue_us: None, reserve_us: Some(2000), prefill_us: None };
    let first = first_reply(&[42], None, times);
    let expected = [first, tokens_reply(1, &[43, 44], None), Reply::Ended(end)];
    assert_eq!(scene.replies(), expected);
    scene.assert_quiet();
    scene.assert_forgotten();
}

#[test]
fn load_from_a_tier_is_a_stage_of_its_attempt() {
    let mut scene = Scene::accepted(SequenceKind::Compute);
    let stages = |scene: &mut Scene| -> Vec<StageChange> {
        let change = |output| match output {
            Output::Stage { call: CALL, change } => Some(change),
            _ => None,
        };
        scene.attempts.outputs.drain(..).filter_map(change).collect()
    };
    stages(&mut scene);
    let load = LoadJob { job: JobId(5), id: ID, blocks: Vec::new() };
    scene.act(Action::Load(load));
    assert_eq!(stages(&mut scene), [StageChange::Began(Stage::Load)]);
    scene.attempts.loaded(JobId(4), 9);
    assert_eq!(stages(&mut scene), []);
    scene.attempts.loaded(JobId(5), 2);
    let attributes = StageAttributes { loaded_tokens: Some(32), ..StageAttributes::default() };
    assert_eq!(stages(&mut scene), [StageChange::Ended { stage: Stage::Load, attributes }]);
    scene.attempts.loaded(JobId(5), 2);
    assert_eq!(stages(&mut scene), []);
}

#[test]
fn token_0_that_ends_the_request_aborts_the_transfer() {
    let mut scene = Scene::accepted(SequenceKind::Send);
    scene.command();
    scene.act(tokens(0, &[2]));
    scene.act(Action::AbortTransfer { id: ID, reason: "not needed".into() });
    scene.act(Action::Finished { id: ID, reason: Some(FinishReason::Stop) });
    assert!(matches!(scene.command(), transfer::Command::Abort { .. }));
    let finish = Some(FinishReason::Stop);
    let first = first_reply(&[2], finish, v1::StageTimes::default());
    let expected = [first, Reply::Ended(AttemptEnd::Complete)];
    assert_eq!(scene.replies(), expected);

    let failure = TransferFailure::Aborted { reason: "not needed".into() };
    scene.transfer_event(transfer::Event::SendFailed { transfer: TRANSFER, failure });
    assert_eq!(scene.input(), Input::TransferEnded { id: ID });
    scene.assert_quiet();
    scene.assert_forgotten();
}

#[test]
fn cancelled_decode_keeps_its_record_until_its_transfer_ends() {
    let failure = TransferFailure::Aborted { reason: "cancelled".into() };
    let failed = transfer::Event::ReceiveFailed { transfer: TRANSFER, failure };
    // The KV may arrive before the transfers take the abort.
    let (first_index, token, stats) = (0, token(1), STATS);
    let arrived = transfer::Event::Arrived { transfer: TRANSFER, first_index, token, stats };
    for event in [failed, arrived] {
        let mut scene = Scene::reserved();
        scene.attempts.cancel(CALL);
        assert_eq!(scene.input(), Input::Abort { id: ID });
        scene.act(Action::AbortTransfer { id: ID, reason: "cancelled".into() });
        assert!(matches!(scene.command(), transfer::Command::Abort { .. }));
        assert!(!scene.attempts.is_empty());

        scene.transfer_event(event);
        assert!(matches!(scene.input(), Input::TransferEnded { .. } | Input::KvArrived { .. }));
        assert!(scene.replies().is_empty());
        scene.assert_quiet();
        scene.assert_forgotten();
    }
}

#[test]
fn second_call_with_a_known_id_is_rejected_and_its_cancel_changes_nothing() {
    let mut scene = Scene::accepted(SequenceKind::Compute);
    scene.call(2, SequenceKind::Compute);
    let rejected = Reply::Rejected(Refusal::Duplicate { id: ID.0 });
    assert_eq!(scene.replies(), std::slice::from_ref(&rejected));
    scene.attempts.cancel(CallId { number: 2, ..CALL });
    scene.assert_quiet();
    assert!(!scene.attempts.is_empty());
    scene.attempts.cancel(CALL);
    assert_eq!(scene.input(), Input::Abort { id: ID });
    scene.assert_forgotten();

    // The id stays known after its attempt.
    scene.call(3, SequenceKind::Compute);
    assert_eq!(scene.replies(), [rejected]);
}

#[test]
fn sequence_that_fails_on_arrival_is_rejected() {
    let busy = SequenceFailure::Busy { reason: "full".into() };
    let invalid = SequenceFailure::Invalid { reason: "too long".into() };
    for (failure, refusal) in [
        (busy, Refusal::Busy { reason: "full".into() }),
        (invalid, Refusal::Invalid { reason: "too long".into() }),
    ] {
        let mut scene = Scene::new();
        scene.call(1, SequenceKind::Send);
        scene.input();
        scene.act(Action::Failed { id: ID, failure });
        scene.attempts.scheduled(ID, scene.now);
        assert_eq!(scene.replies(), [Reply::Rejected(refusal)]);
        scene.assert_quiet();
        scene.assert_forgotten();
    }
}

#[test]
fn sequence_that_fails_later_ends_its_stream_with_the_failure() {
    let mut scene = Scene::accepted(SequenceKind::Receive);
    scene.act(Action::Failed { id: ID, failure: SequenceFailure::Deadline });
    assert_eq!(scene.failure().0, FailureKind::Deadline);
    scene.assert_forgotten();
}

#[test]
fn failed_transfer_fails_its_attempt_with_the_reason() {
    let lost = TransferFailure::PeerLost { peer: "p".into(), reason: "it is silent".into() };
    let refused =
        TransferFailure::Refused { peer: "p".into(), reason: "model aa against bb".into() };
    for (failure, kind, text) in [
        (lost, FailureKind::TransferFailed, "it is silent"),
        (refused, FailureKind::Mismatch, "model aa against bb"),
    ] {
        let mut scene = Scene::reserved();
        scene.transfer_event(transfer::Event::ReceiveFailed { transfer: TRANSFER, failure });
        let (found, message) = scene.failure();
        assert!(found == kind && message.contains(text), "{found:?} {message}");
        assert_eq!(scene.input(), Input::TransferEnded { id: ID });
        // The scheduler's own failure comes later and is ignored.
        scene.act(Action::Failed { id: ID, failure: SequenceFailure::TransferFailed });
        scene.assert_quiet();
        scene.assert_forgotten();
    }
}

/// The scheduler answers only the first abort with `AbortTransfer`, so the end of a rejected transfer
/// is reported whether or not the scheduler aborted the transfer before.
#[test]
fn full_transfer_queue_aborts_the_sequence_and_ends_its_transfer() {
    for is_aborted_before in [false, true] {
        let mut scene = Scene::accepted(SequenceKind::Receive);
        scene.act(Action::Reserve { id: ID, first_block: 0, blocks: vec![BlockId(3)] });
        let (call, command) = scene.attempts.next_command().unwrap();
        let abort = || Action::AbortTransfer { id: ID, reason: "cancelled".into() };
        if is_aborted_before {
            scene.act(abort());
        }
        let reason = "the transfer queue is full".to_owned();
        assert!(!scene.attempts.transfer_queue_full(call, command, reason.clone()));
        assert_eq!(scene.failure(), (FailureKind::Busy, reason));
        assert_eq!(scene.input(), Input::Abort { id: ID });
        assert_eq!(scene.input(), Input::TransferEnded { id: ID });
        if !is_aborted_before {
            scene.act(abort());
            assert_eq!(scene.input(), Input::TransferEnded { id: ID });
            scene.assert_quiet();
        }
        scene.assert_forgotten();
    }
}

#[test]
fn slow_reader_is_ended_alone() {
    let mut scene = Scene::accepted(SequenceKind::Compute);
    scene.act(tokens(0, &[1]));
    scene.attempts.slow_reader(CallId { number: 2, ..CALL });
    scene.assert_quiet();
    scene.attempts.slow_reader(CALL);
    assert_eq!(scene.input(), Input::Abort { id: ID });
    assert_eq!(scene.failure().0, FailureKind::SlowReader);
    scene.assert_quiet();
    scene.assert_forgotten();
}

#[test]
fn close_ends_every_attempt_and_rejects_new_calls() {
    let mut scene = Scene::accepted(SequenceKind::Send);
    scene.command();
    scene.attempts.close(&CloseReason::Stopped);
    assert_eq!(scene.input(), Input::Abort { id: ID });
    assert_eq!(scene.failure(), (FailureKind::Draining, "the node shuts down".into()));
    assert!(!scene.attempts.is_empty(), "its transfer is still active");
    scene.call(2, SequenceKind::Send);
    assert_eq!(scene.replies(), [Reply::Rejected(Refusal::Draining)]);
}

/// The caller of a rejected call waits for a status, not for a stream.
#[test]
fn close_rejects_a_call_that_is_not_accepted_yet() {
    let mut scene = Scene::new();
    scene.call(1, SequenceKind::Compute);
    scene.attempts.close(&CloseReason::DrainTimeout);
    assert_eq!(scene.replies(), [Reply::Rejected(Refusal::Draining)]);
    scene.assert_forgotten();
}

#[test]
fn prefill_without_token_0_fails_as_an_internal_error() {
    let mut scene = Scene::accepted(SequenceKind::Send);
    scene.command();
    scene.act(Action::Finished { id: ID, reason: None });
    assert_eq!(scene.failure().0, FailureKind::Internal);
    assert_eq!(scene.input(), Input::Abort { id: ID });
}

const LIMITS: ExecutorLimits = ExecutorLimits {
    slots: 2,
    step_tokens: 32,
    sequence_tokens: 64,
    blocks: 16,
    depth: 2,
    vocabulary: 10,
    speculation: None,
};

/// A device in the test's own time whose steps finish when the test says so.
struct Device {
    sim: SimExecutor,
    now: Instant,
    is_hung: bool,
}

impl Executor for Device {
    fn launch(&mut self, plan: engine::plan::StepPlan) -> Result<(), ExecutorError> {
        self.sim.launch(plan)
    }

    fn supply(
        &mut self,
        step_id: engine::plan::StepId,
        masks: Vec<engine::plan::RowMask>,
    ) -> Result<(), ExecutorError> {
        self.sim.supply(step_id, masks)
    }

    fn masks_are_due(&self) -> bool {
        self.sim.masks_are_due()
    }

    fn collect(
        &mut self,
        timeout: Duration,
    ) -> Result<Option<engine::plan::StepResult>, ExecutorError> {
        if self.is_hung { Ok(None) } else { self.sim.collect(timeout) }
    }

    fn release_weights(&mut self) -> Result<(), ExecutorError> {
        Ok(())
    }

    fn commit_weights(&mut self) -> Result<(), ExecutorError> {
        self.sim.commit_weights()
    }

    fn limits(&self) -> ExecutorLimits {
        LIMITS
    }

    fn now(&self) -> Instant {
        self.now
    }
}

/// A core with its scheduler and a simulated device.
struct Node {
    core: NodeCore<Device>,
    now: Instant,
}

impl Node {
    fn new() -> Self {
        let now = Instant::now();
        let no_cost = CostModel {
            step: Duration::ZERO,
            token: Duration::ZERO,
            context_token: Duration::ZERO,
        };
        let device = Device { sim: SimExecutor::new(LIMITS, no_cost, now), now, is_hung: false };
        let seeds = CacheSeeds { model_fingerprint: 1, weight_version: 1 };
        let scheduler = Scheduler::new(SchedulerConfig::new(LIMITS), seeds).unwrap();
        let steps = StepLoop::new(scheduler, device);
        Self { core: NodeCore::new(steps, &testing::record(), STALL_AFTER), now }
    }

    fn call(&mut self, id: u128, kind: SequenceKind) {
        self.core.handle_call(call(id, id as u64, kind, self.now), self.now);
    }

    fn advance(&mut self, time: Duration) {
        self.now += time;
        self.core.executor_mut().now = self.now;
        self.core.handle_deadline(self.now);
    }

    fn outputs(&mut self) -> Vec<Output> {
        std::iter::from_fn(|| self.core.poll_output()).collect()
    }

    /// Steps until the device has no work.
    fn run(&mut self) -> Vec<Output> {
        let mut outputs = self.outputs();
        while self.core.step(Duration::ZERO).unwrap() != Turn::Idle {
            outputs.extend(self.outputs());
            assert!(outputs.len() < 1000, "the core never becomes idle");
        }
        outputs
    }

    fn commands(&mut self) -> Vec<transfer::Command> {
        let command = |output| match output {
            Output::Transfer { command, .. } => Some(command),
            _ => None,
        };
        self.outputs().into_iter().filter_map(command).collect()
    }
}

fn observe_events(outputs: impl IntoIterator<Item = Output>) -> Vec<v1::ObserveEvent> {
    let event = |output| match output {
        Output::Observe { event, .. } => Some(event),
        _ => None,
    };
    outputs.into_iter().filter_map(event).collect()
}

#[test]
fn compute_call_is_accepted_decodes_and_leaves_nothing() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Compute);
    let replies = replies(node.run());
    assert_eq!(replies[0], Reply::Accepted);
    assert_eq!(
        replies[1],
        Reply::Event(AttemptEvent::Reserved { cached_tokens: 0, local_prefill: true })
    );
    let tokens = replies.iter().filter_map(|reply| match reply {
        Reply::Event(AttemptEvent::Tokens { tokens, .. }) => Some(tokens.len()),
        _ => None,
    });
    assert_eq!(tokens.sum::<usize>(), 4);
    assert!(matches!(replies.last(), Some(Reply::Ended(AttemptEnd::Finished { .. }))));
    assert!(node.core.is_empty() && node.core.scheduler().is_idle());
}

/// A `Receive` that finds the transfer queue full gives its blocks back at once.
#[test]
fn full_transfer_queue_frees_the_reserved_blocks() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Receive);
    let (call, command) = std::iter::from_fn(|| node.core.poll_output())
        .find_map(|output| match output {
            Output::Transfer { call, command } => Some((call, command)),
            _ => None,
        })
        .expect("a Receive command");
    assert_eq!(node.core.scheduler().load().blocks_reserved, 2);
    node.core.handle_transfer_queue_full(call, command, "full".into(), node.now);
    let replies = replies(node.outputs());
    assert_eq!(replies, [Reply::Ended(AttemptEnd::failed(FailureKind::Busy, "full"))]);
    assert_eq!(node.core.scheduler().load().blocks_reserved, 0);
    assert!(node.core.is_empty() && node.core.scheduler().is_idle());
}

/// A command on an active transfer is offered again in order, and no sooner than after
/// [`TRANSFER_RETRY_AFTER`].
#[test]
fn commands_keep_their_order_while_the_transfer_queue_is_full() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Receive);
    node.call(2, SequenceKind::Receive);
    assert_eq!(node.commands().len(), 2);
    for id in [1, 2] {
        node.core.handle_cancel(CallId { sequence: SequenceId(id), number: id as u64 });
    }
    let aborted = |command: &transfer::Command| match command {
        transfer::Command::Abort { transfer, .. } => transfer.0,
        other => panic!("{other:?}"),
    };
    for _ in 0..3 {
        let offered =
            std::iter::from_fn(|| node.core.poll_output()).find_map(|output| match output {
                Output::Transfer { call, command } => Some((call, command)),
                _ => None,
            });
        let (call, command) = offered.expect("an Abort command");
        assert_eq!(aborted(&command), 1);
        node.core.handle_transfer_queue_full(call, command, "full".into(), node.now);
        node.advance(Duration::ZERO);
        assert!(node.commands().is_empty());
        assert_eq!(node.core.next_deadline(), Some(node.now + TRANSFER_RETRY_AFTER));
        node.advance(TRANSFER_RETRY_AFTER);
    }
    assert_eq!(node.commands().iter().map(aborted).collect::<Vec<_>>(), [1, 2]);
}

/// Tokens of one step are separate actions: a full caller queue takes effect before the next one.
#[test]
fn slow_reader_gets_no_reply_after_the_one_that_did_not_fit() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Compute);
    let call = CallId { sequence: SequenceId(1), number: 1 };
    let mut after = None;
    loop {
        while let Some(output) = node.core.poll_output() {
            match output {
                Output::Reply { reply: Reply::Event(AttemptEvent::Tokens { .. }), .. } => {
                    assert_eq!(after, None, "no token follows");
                    node.core.handle_slow_reader(call);
                    after = Some(Vec::new());
                }
                Output::Reply { reply, .. } => {
                    if let Some(after) = &mut after {
                        after.push(reply);
                    }
                }
                _ => {}
            }
        }
        if node.core.step(Duration::ZERO).unwrap() == Turn::Idle {
            break;
        }
    }
    let after = after.expect("a token");
    assert!(
        matches!(
            after[..],
            [Reply::Ended(AttemptEnd::Failed { kind: FailureKind::SlowReader, .. })]
        ),
        "{after:?}"
    );
    assert!(node.core.scheduler().is_idle());
}

#[test]
fn deltas_follow_the_snapshot_in_order_and_at_most_every_interval() {
    let mut node = Node::new();
    node.core.executor_mut().is_hung = true;
    node.core.handle_observe(ObserverId(1), node.now);
    let events = observe_events(node.outputs());
    assert_eq!((events.len(), events[0].sequence), (1, 0));
    assert!(matches!(events[0].event, Some(ObserveEvent::Snapshot(_))));

    // Two changes within one interval are one delta.
    for id in [1, 2] {
        node.call(id, SequenceKind::Compute);
        node.core.handle_deadline(node.now);
        assert!(observe_events(node.outputs()).is_empty());
    }
    assert_eq!(node.core.next_deadline(), Some(node.now + observers::INTERVAL));
    node.advance(observers::INTERVAL);
    let events = observe_events(node.outputs());
    let [v1::ObserveEvent { sequence: 1, event: Some(ObserveEvent::Delta(delta)) }] = &events[..]
    else {
        panic!("one delta: {events:?}");
    };
    assert_eq!(delta.load.unwrap().waiting, 2);
    let ids = [1_u128, 2].map(|id| id.to_be_bytes().to_vec());
    assert!(delta.arrived.iter().eq(&ids), "the delta names the attempts: {delta:?}");

    // Without a change there is no delta.
    node.advance(observers::INTERVAL);
    assert!(observe_events(node.outputs()).is_empty());

    // A drain is told at once, and rejects new calls.
    node.core.handle_draining(true, None, node.now);
    node.call(3, SequenceKind::Compute);
    let outputs = node.outputs();
    assert_eq!(replies(outputs.clone()), [Reply::Rejected(Refusal::Draining)]);
    let events = observe_events(outputs);
    let [v1::ObserveEvent { sequence: 2, event: Some(ObserveEvent::Delta(delta)) }] = &events[..]
    else {
        panic!("one delta: {events:?}");
    };
    assert!(delta.load.unwrap().draining);

    // An operator ends the drain.
    node.core.handle_draining(false, None, node.now);
    node.call(4, SequenceKind::Compute);
    let outputs = node.outputs();
    assert!(!replies(outputs.clone()).contains(&Reply::Rejected(Refusal::Draining)));
    let Some(ObserveEvent::Delta(delta)) = &observe_events(outputs)[0].event else {
        panic!("the end of the drain is sent at once");
    };
    assert!(!delta.load.unwrap().draining);
}

#[test]
fn observers_get_the_limits_and_measured_costs_of_steps() {
    let mut node = Node::new();
    let costs = |node: &mut Node, observer| {
        node.core.handle_observe(ObserverId(observer), node.now);
        let events = observe_events(node.outputs());
        let Some(ObserveEvent::Snapshot(snapshot)) = &events.last().unwrap().event else {
            panic!("a new observer gets a snapshot: {events:?}");
        };
        snapshot.load.unwrap().step_costs.unwrap()
    };
    let before = costs(&mut node, 1);
    assert_eq!((before.step_tokens, before.chunk_tokens, before.itl_max_ms), (32, 32, 0));
    assert_eq!((before.prefill, before.decode), (None, None));
    // Each step takes 5 ms, but not the time between two requests.
    for id in 1..=4 {
        node.advance(Duration::from_secs(1));
        node.call(id, SequenceKind::Compute);
        node.outputs();
        while !node.core.is_empty() {
            node.core.executor_mut().is_hung = true;
            node.core.step(Duration::ZERO).unwrap();
            node.advance(Duration::from_millis(5));
            node.core.executor_mut().is_hung = false;
            node.core.step(Duration::ZERO).unwrap();
            node.outputs();
        }
    }
    node.core.handle_deadline(node.now);
    let after = costs(&mut node, 2);
    let decode = after.decode.expect("twelve decode steps");
    assert!((4_900_000_000..5_100_000_000).contains(&decode.step_ps), "{decode:?}");
    // Prompts of 20 tokens do not measure prefill throughput.
    assert_eq!(after.prefill, None);
}

#[test]
fn stalled_step_ends_the_observers_until_a_step_finishes() {
    let mut node = Node::new();
    node.core.handle_observe(ObserverId(1), node.now);
    // An idle node is not stalled.
    node.advance(2 * STALL_AFTER);
    node.core.executor_mut().is_hung = true;
    node.call(1, SequenceKind::Compute);
    node.outputs();
    assert_eq!(node.core.step(Duration::ZERO).unwrap(), Turn::Pending);
    node.advance(STALL_AFTER - Duration::from_millis(1));
    let stalled = |outputs: Vec<Output>| {
        let ended = |output: &Output| matches!(output, Output::ObserveStalled { .. });
        outputs.iter().filter(|output| ended(output)).count()
    };
    assert_eq!(stalled(node.outputs()), 0);
    assert_eq!(node.core.next_deadline(), Some(node.now + Duration::from_millis(1)));
    node.advance(Duration::from_millis(1));
    assert_eq!(stalled(node.outputs()), 1);
    // A new observer is ended at once.
    node.core.handle_observe(ObserverId(2), node.now);
    assert_eq!(stalled(node.outputs()), 1);

    node.core.executor_mut().is_hung = false;
    node.run();
    node.advance(Duration::ZERO);
    let outputs = node.outputs();
    assert!(outputs.iter().any(|output| matches!(output, Output::Recovered)));
    node.core.handle_observe(ObserverId(3), node.now);
    assert_eq!(observe_events(node.outputs()).len(), 1);
}

/// A decode row is recomputed under the new weights. A `Receive` fails at once, before the transfers learn of the
/// change.
#[test]
fn weights_change_at_a_step_boundary_and_no_kv_survives() {
    let mut node = Node::new();
    node.core.handle_observe(ObserverId(1), node.now);
    node.call(1, SequenceKind::Compute);
    // Before the first step: a prefix hit on the other sequence would leave less than a block to receive.
    node.call(2, SequenceKind::Receive);
    let mut begun = node.outputs();
    for _ in 0..2 {
        node.core.step(Duration::ZERO).unwrap();
        begun.extend(node.outputs());
    }
    let commands_begun = |output: &Output| match output {
        Output::Transfer { command, .. } => {
            Some(matches!(command, transfer::Command::Receive { .. }))
        }
        _ => None,
    };
    let receives: Vec<_> = begun.iter().filter_map(commands_begun).collect();
    assert_eq!(receives, [true], "{begun:?}");

    let old = node.core.scheduler().cached_hashes();
    assert!(!old.is_empty());

    node.core.handle_change_weights(7, "step 100".into(), InFlight::Recompute, false, node.now);
    let mut outputs = Vec::new();
    while !outputs.iter().any(|output| matches!(output, Output::WeightsChanged { .. })) {
        node.core.step(Duration::ZERO).unwrap();
        outputs.extend(node.outputs());
        assert!(outputs.len() < 1000, "the weights never change");
    }
    let commands = outputs.iter().filter_map(|output| match output {
        Output::Transfer { command, .. } => Some(command),
        _ => None,
    });
    let commands: Vec<_> = commands.collect();
    assert!(matches!(
        commands[..],
        [transfer::Command::Abort { .. }, transfer::Command::ChangeWeights { weight_version: 7 }]
    ));
    let changes: Vec<_> = observe_events(outputs.clone())
        .into_iter()
        .filter_map(|event| match event.event {
            Some(ObserveEvent::Delta(delta)) => delta.weights,
            _ => None,
        })
        .collect();
    let changed = v1::WeightsChanged { weight_version: 7, label: "step 100".into() };
    assert_eq!(changes, [changed]);
    let ended = replies(outputs);
    assert!(ended.contains(&Reply::Ended(AttemptEnd::failed(
        FailureKind::WeightsChanged,
        "the weights changed"
    ))));
    // The recomputed row may have cached its blocks again, under keys of the new weights.
    let cached = node.core.scheduler().cached_hashes();
    assert!(old.iter().all(|hash| !cached.contains(hash)), "{cached:?} {old:?}");

    let finished = |reply: &Reply| matches!(reply, Reply::Ended(AttemptEnd::Finished { .. }));
    assert!(ended.into_iter().chain(replies(node.run())).any(|reply| finished(&reply)));
    node.core.handle_transfer_event(
        transfer::Event::ReceiveFailed {
            transfer: TransferId(2),
            failure: TransferFailure::Aborted { reason: String::new() },
        },
        node.now,
    );
    node.run();
    assert!(node.core.is_empty() && node.core.scheduler().is_idle());
    node.core.scheduler().check();
}

/// Limits are checked before the call reaches the engine thread, and the weights may change in between.
#[test]
fn call_for_other_weights_is_rejected() {
    let mut node = Node::new();
    node.core.handle_change_weights(7, String::new(), InFlight::Recompute, false, node.now);
    node.run();
    node.call(1, SequenceKind::Compute);
    let refusal = Refusal::OtherWeights { named: 1, own: 7 };
    assert_eq!(replies(node.outputs()), [Reply::Rejected(refusal)]);
}

/// Starts a sequence of 40 tokens and runs two steps. Returns the node and the outputs.
fn node_with_running_sequence() -> (Node, Vec<Output>) {
    let mut node = Node::new();
    let mut call = call(1, 1, SequenceKind::Compute, node.now);
    call.sequence.max_tokens = 40;
    node.core.handle_call(call, node.now);
    let mut outputs = node.outputs();
    for _ in 0..2 {
        node.core.step(Duration::ZERO).unwrap();
        outputs.extend(node.outputs());
    }
    (node, outputs)
}

/// Returns the weight version of each token of a sequence, in order, and 0 for the change of the weights.
fn versions_of(outputs: &[Output], id: u128) -> Vec<u64> {
    let versions = outputs.iter().flat_map(|output| match output {
        Output::Reply {
            call,
            reply: Reply::Event(AttemptEvent::Tokens { tokens, weight_version, .. }),
        } if call.sequence == SequenceId(id) => {
            vec![*weight_version; tokens.len()]
        }
        Output::WeightsChanged { .. } => vec![0],
        _ => vec![],
    });
    versions.collect()
}

#[test]
fn sequence_that_keeps_its_kv_continues_and_shares_no_block() {
    let (mut node, mut outputs) = node_with_running_sequence();
    let old = node.core.scheduler().cached_hashes();
    assert_eq!(old.len(), 1);
    node.core.handle_change_weights(7, String::new(), InFlight::KeepKv, false, node.now);
    outputs.extend(node.run());
    let versions = versions_of(&outputs, 1);
    let before = versions.iter().take_while(|version| **version == 1).count();
    assert!(before > 0 && before < 40, "{versions:?}");
    assert_eq!(versions[before], 0);
    assert_eq!(versions[before + 1..], vec![7; 40 - before]);
    assert_eq!(node.core.scheduler().preemptions(), 0);
    // Blocks that were filled after the change depend on both weights.
    assert_eq!(node.core.scheduler().cached_hashes(), old);

    let second = Call { weight_version: 7, ..call(2, 2, SequenceKind::Compute, node.now) };
    node.core.handle_call(second, node.now);
    let fresh = AttemptEvent::Reserved { cached_tokens: 0, local_prefill: true };
    assert!(replies(node.run()).contains(&Reply::Event(fresh)));
    node.core.scheduler().check();
}

#[test]
fn running_sequence_finishes_before_the_weights_change_and_others_begin_after() {
    let (mut node, mut outputs) = node_with_running_sequence();
    node.core.handle_change_weights(7, String::new(), InFlight::Recompute, true, node.now);
    node.call(2, SequenceKind::Compute);
    outputs.extend(node.run());
    assert_eq!(versions_of(&outputs, 1), [vec![1; 40], vec![0]].concat());
    assert_eq!(versions_of(&outputs, 2), [vec![0], vec![7; 4]].concat());
    node.core.scheduler().check();
}

/// One sender waits for its receiver, one for a step, and one arrives later.
#[test]
fn weights_change_without_waiting_for_senders_that_are_not_admitted() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Send);
    node.call(2, SequenceKind::Send);
    let ready = |id| transfer::Event::Ready {
        transfer: TransferId(id),
        first_block: 0,
        block_count: 2,
        traceparent: String::new(),
    };
    node.outputs();
    node.core.handle_transfer_event(ready(2), node.now);
    let mut outputs = node.outputs();
    node.core.handle_change_weights(7, String::new(), InFlight::Recompute, true, node.now);
    outputs.extend(node.outputs());
    let failed = || {
        let message = SequenceFailure::WeightsChanged.to_string();
        Reply::Ended(AttemptEnd::failed(FailureKind::WeightsChanged, message))
    };
    assert_eq!(replies(outputs), [failed(), failed()]);

    node.call(3, SequenceKind::Send);
    node.call(4, SequenceKind::Send);
    node.outputs();
    node.core.handle_transfer_event(ready(4), node.now);
    assert_eq!(replies(node.outputs()), [failed()], "a ready sender fails during the wait");
    let mut outputs = node.run();
    outputs.extend(node.outputs());
    assert!(outputs.iter().any(|output| matches!(output, Output::WeightsChanged { .. })));
    assert_eq!(replies(outputs), [failed()]);
    node.core.scheduler().check();
}

/// The receiver waits for KV that this node sends: it must arrive.
#[test]
fn weights_change_after_an_admitted_sender_has_delivered_its_kv() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Send);
    node.outputs();
    let ready = transfer::Event::Ready {
        transfer: TransferId(1),
        first_block: 0,
        block_count: 2,
        traceparent: String::new(),
    };
    node.core.handle_transfer_event(ready, node.now);
    node.outputs();
    node.core.step(Duration::ZERO).unwrap();
    node.core.handle_change_weights(7, String::new(), InFlight::Recompute, true, node.now);
    let changes = |node: &mut Node| {
        let mut outputs = node.run();
        outputs.extend(node.outputs());
        outputs.iter().any(|output| matches!(output, Output::WeightsChanged { .. }))
    };
    assert!(!changes(&mut node));
    let delivered = transfer::Event::Delivered { transfer: TransferId(1), stats: STATS };
    node.core.handle_transfer_event(delivered, node.now);
    assert!(changes(&mut node));
    node.core.scheduler().check();
}

#[test]
fn aborted_sequence_ends_at_the_change_and_one_without_output_begins_after() {
    let (mut node, mut outputs) = node_with_running_sequence();
    node.call(2, SequenceKind::Compute);
    outputs.extend(node.outputs());
    node.core.handle_change_weights(7, String::new(), InFlight::Abort, false, node.now);
    outputs.extend(node.run());
    let versions = versions_of(&outputs, 1);
    let tokens = versions.iter().filter(|version| **version == 1).count();
    assert!(tokens > 0 && tokens < 40, "{versions:?}");
    assert_eq!(versions, [vec![1; tokens], vec![0]].concat());
    assert_eq!(versions_of(&outputs, 2), [vec![0], vec![7; 4]].concat());
    let ended = replies(outputs).into_iter().filter_map(|reply| match reply {
        Reply::Ended(AttemptEnd::Finished { reason, .. }) => Some(reason),
        _ => None,
    });
    assert_eq!(ended.collect::<Vec<_>>(), [FinishReason::Abort, FinishReason::Length]);
    assert!(node.core.is_empty() && node.core.scheduler().is_idle());
    node.core.scheduler().check();
}

#[test]
fn weights_change_when_a_running_sequence_does_not_finish_in_time() {
    let (mut node, mut outputs) = node_with_running_sequence();
    node.core.handle_change_weights(7, String::new(), InFlight::Recompute, true, node.now);
    assert!(node.core.next_deadline().unwrap() <= node.now + FINISH_WITHIN);
    node.core.step(Duration::ZERO).unwrap();
    outputs.extend(node.outputs());
    assert!(!outputs.iter().any(|output| matches!(output, Output::WeightsChanged { .. })));
    node.advance(FINISH_WITHIN);
    outputs.extend(node.run());
    let versions = versions_of(&outputs, 1);
    let before = versions.iter().take_while(|version| **version == 1).count();
    assert!(before < 40, "{versions:?}");
    assert_eq!(versions[before..], [vec![0], vec![7; 40 - before]].concat());
}

/// Returns the states of the pause, in order.
fn pauses(outputs: &[Output]) -> Vec<v1::PauseState> {
    let states = outputs.iter().filter_map(|output| match output {
        Output::PauseChanged { state } => Some(*state),
        _ => None,
    });
    states.collect()
}

const PAUSE_MAX: Duration = Duration::from_secs(30);

impl Node {
    /// Pauses, runs until nothing runs, and lets a new call arrive.
    fn pause(&mut self, in_flight: InFlight, waits: bool) -> Vec<Output> {
        self.core.handle_pause(in_flight, waits, self.now + PAUSE_MAX, self.now);
        let mut outputs = self.run();
        self.advance(Duration::ZERO);
        self.call(2, SequenceKind::Compute);
        outputs.extend(self.run());
        outputs
    }
}

#[test]
fn paused_node_admits_nothing_until_it_resumes() {
    use v1::PauseState::{None, Paused, Pausing};
    for (in_flight, waits) in [
        (InFlight::Recompute, false),
        (InFlight::KeepKv, false),
        (InFlight::Recompute, true),
        (InFlight::Abort, false),
    ] {
        let (mut node, mut outputs) = node_with_running_sequence();
        node.core.handle_observe(ObserverId(1), node.now);
        let before = versions_of(&outputs, 1).len();
        outputs.extend(node.pause(in_flight, waits));
        assert_eq!(pauses(&outputs), [Pausing, Paused]);
        assert_eq!(versions_of(&outputs, 2), [] as [u64; 0], "{in_flight:?}");
        let tokens = versions_of(&outputs, 1).len();
        let is_done = |outputs: &[Output], id| {
            outputs.iter().any(|output| {
                matches!(output, Output::Reply { call, reply: Reply::Ended(_) } if call.sequence == SequenceId(id))
            })
        };
        match (in_flight, waits) {
            (_, true) => assert_eq!(tokens, 40),
            _ => assert!(tokens <= before + LIMITS.depth as usize && tokens < 40, "{tokens}"),
        }
        assert_eq!(is_done(&outputs, 1), waits || in_flight == InFlight::Abort);
        let states =
            observe_events(outputs.clone()).into_iter().filter_map(|event| match event.event {
                Some(ObserveEvent::Delta(delta)) => delta.load.map(|load| load.pause()),
                _ => Option::None,
            });
        assert_eq!(states.last(), Some(Paused));

        node.core.handle_resume(node.now);
        outputs.extend(node.run());
        assert_eq!(pauses(&outputs), [Pausing, Paused, None]);
        assert!(is_done(&outputs, 1) && is_done(&outputs, 2));
        assert_eq!(versions_of(&outputs, 2).len(), 4);
        if in_flight != InFlight::Abort {
            assert_eq!(versions_of(&outputs, 1).len(), 40);
        }
        assert_eq!(
            node.core.scheduler().preemptions(),
            u64::from(in_flight != InFlight::KeepKv && !waits && in_flight != InFlight::Abort)
        );
        node.core.scheduler().check();
    }
}

#[test]
fn pause_ends_at_its_deadline() {
    let (mut node, _) = node_with_running_sequence();
    node.pause(InFlight::KeepKv, false);
    assert!(node.core.next_deadline().unwrap() <= node.now + PAUSE_MAX);
    // A second pause replaces the deadline.
    node.core.handle_pause(InFlight::KeepKv, false, node.now + 2 * PAUSE_MAX, node.now);
    node.advance(PAUSE_MAX);
    assert_eq!(pauses(&node.outputs()), []);
    node.advance(PAUSE_MAX);
    let mut outputs = node.outputs();
    assert_eq!(pauses(&outputs), [v1::PauseState::None]);
    outputs.extend(node.run());
    assert_eq!(versions_of(&outputs, 2).len(), 4);
}

#[test]
fn weights_change_during_a_pause_and_the_pause_goes_on() {
    for waits in [false, true] {
        let (mut node, mut outputs) = node_with_running_sequence();
        outputs.extend(node.pause(InFlight::KeepKv, false));
        node.core.handle_change_weights(7, String::new(), InFlight::Recompute, waits, node.now);
        outputs.extend(node.run());
        outputs.extend(node.outputs());
        let versions = versions_of(&outputs, 1);
        assert_eq!(versions.last(), Some(&0), "changed, and no token since: {versions:?}");
        node.core.handle_resume(node.now);
        outputs.extend(node.run());
        let versions = versions_of(&outputs, 1);
        assert_eq!(versions.len(), 41);
        assert_eq!(versions.last(), Some(&7));
        node.core.scheduler().check();
    }
}

fn is_released(outputs: &[Output]) -> bool {
    outputs.iter().any(|output| matches!(output, Output::WeightsReleased))
}

#[test]
fn released_weights_hold_sequences_where_they_are_until_the_change() {
    let (mut node, mut outputs) = node_with_running_sequence();
    node.core.handle_release_weights(false, node.now);
    node.call(2, SequenceKind::Compute);
    outputs.extend(node.run());
    outputs.extend(node.outputs());
    assert!(is_released(&outputs));
    let tokens = versions_of(&outputs, 1).len();
    node.advance(Duration::from_secs(1));
    outputs.extend(node.run());
    assert_eq!((versions_of(&outputs, 1).len(), versions_of(&outputs, 2).len()), (tokens, 0));

    node.core.handle_change_weights(7, String::new(), InFlight::KeepKv, true, node.now);
    outputs.extend(node.run());
    outputs.extend(node.outputs());
    let paused = outputs.iter().find_map(|output| match output {
        Output::WeightsChanged { paused } => Some(*paused),
        _ => None,
    });
    assert!(paused.unwrap() >= Duration::from_secs(1), "from the release on: {paused:?}");
    let kept = [vec![1; tokens], vec![0], vec![7; 40 - tokens]].concat();
    assert_eq!(versions_of(&outputs, 1), kept);
    node.core.scheduler().check();
}

#[test]
fn node_without_weights_fails_every_sequence_and_refuses_calls_until_it_has_some() {
    let (mut node, _) = node_with_running_sequence();
    node.core.handle_observe(ObserverId(1), node.now);
    node.core.handle_release_weights(false, node.now);
    node.call(2, SequenceKind::Compute);
    node.run();
    node.outputs();
    assert!(node.core.handle_lost_weights(node.now));
    let outputs = node.outputs();
    let ended = replies(outputs.clone());
    let failed = |reply: &&Reply| {
        matches!(reply, Reply::Ended(AttemptEnd::Failed { kind: FailureKind::WeightsChanged, .. }))
    };
    assert_eq!(ended.iter().filter(failed).count(), 2, "{ended:?}");
    let deltas = |outputs: Vec<Output>| -> Vec<(Option<u64>, Option<bool>)> {
        let delta = |event: v1::ObserveEvent| match event.event {
            Some(ObserveEvent::Delta(delta)) => Some((
                delta.weights.map(|weights| weights.weight_version),
                delta.load.map(|load| load.draining),
            )),
            _ => None,
        };
        observe_events(outputs).into_iter().filter_map(delta).collect()
    };
    assert_eq!(deltas(outputs).last_chunk(), Some(&[(Some(0), None), (None, Some(true))]));
    for named in [0, 1] {
        let call = Call { weight_version: named, ..call(3, 3, SequenceKind::Compute, node.now) };
        node.core.handle_call(call, node.now);
        let refusal = Refusal::OtherWeights { named, own: 0 };
        assert_eq!(replies(node.outputs()), [Reply::Rejected(refusal)]);
    }

    node.core.handle_change_weights(1, String::new(), InFlight::Recompute, false, node.now);
    node.run();
    assert_eq!(deltas(node.outputs()).last_chunk(), Some(&[(Some(1), None), (None, Some(false))]));
    node.call(4, SequenceKind::Compute);
    assert_eq!(versions_of(&node.run(), 4), [1; 4]);
    node.core.scheduler().check();
}

#[test]
fn update_that_is_aborted_before_the_release_loses_nothing() {
    for waits in [false, true] {
        let (mut node, mut outputs) = node_with_running_sequence();
        node.core.handle_release_weights(waits, node.now);
        assert!(!node.core.handle_lost_weights(node.now));
        node.call(2, SequenceKind::Compute);
        outputs.extend(node.run());
        assert!(!is_released(&outputs));
        assert_eq!(versions_of(&outputs, 1), [1; 40]);
        assert_eq!(versions_of(&outputs, 2), [1; 4]);
    }
}
