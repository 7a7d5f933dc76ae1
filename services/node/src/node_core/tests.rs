use std::time::Duration;

use engine::{
    CacheSeeds, SchedulerConfig,
    event::{FinishReason, InFlight, NewSequence, SequenceFailure, SequenceKind},
    executor::{
        ExecutorLimits,
        sim::{CostModel, SimExecutor},
    },
    tiers::{JobId, LoadJob, TierConfig},
};
use kernels::{
    BlockId,
    sampling::{SampledToken, Sampling},
};
use kv_transfer::api::{PeerAddress, TransferFailure, TransferId, TransferStats};
use proto::v1::{self, FailureKind, observe_event::Event as ObserveEvent};

use super::{weight_change::FINISH_WITHIN, *};
use crate::testing;

mod attempts;
mod pause;
mod steps;
mod tiers;
mod weights;

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
        adapter: None,
        session: Default::default(),
        constraint: None,
        deadline: now + Duration::from_secs(600),
    };
    let peer = (kind != SequenceKind::Compute).then_some(peer);
    Call { number, request_id: id, weight_version: 1, sequence, peer, prompt_hash: 0 }
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
        scene.act(Action::Reserve {
            id: ID,
            cached_tokens: 0,
            first_block: 0,
            blocks: vec![BlockId(3)],
        });
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

fn replies(outputs: impl IntoIterator<Item = NodeOutput>) -> Vec<Reply> {
    let reply = |output| match output {
        NodeOutput::Reply { reply, .. } => Some(reply),
        _ => None,
    };
    outputs.into_iter().filter_map(reply).collect()
}

fn token(id: u32) -> SampledToken {
    SampledToken { id, logprobs: None, pooled: None }
}

fn tokens(first_index: u32, ids: &[u32]) -> Action {
    let tokens = ids.iter().map(|&id| token(id)).collect();
    Action::Tokens { id: ID, first_index, tokens, cached_tokens: 0, prompt_logprobs: None }
}

fn tokens_reply(first_index: u32, ids: &[u32], finish: Option<FinishReason>) -> Reply {
    let tokens = ids.iter().map(|&id| token(id)).collect();
    let stages = None;
    Reply::Event(AttemptEvent::Tokens {
        first_index,
        tokens,
        cached_tokens: 0,
        prompt_logprobs: None,
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
                prompt_logprobs: None,
                weight_version: 1,
                finish,
                stages,
            })
        }
        other => other,
    }
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
        Self::over(|scheduler, _| scheduler)
    }

    fn with_tiers(tiers: TierConfig) -> Self {
        Self::over(|scheduler, now| scheduler.with_tiers(tiers, now))
    }

    fn over(prepare: impl FnOnce(Scheduler, Instant) -> Scheduler) -> Self {
        let now = Instant::now();
        let no_cost = CostModel {
            step: Duration::ZERO,
            token: Duration::ZERO,
            context_token: Duration::ZERO,
        };
        let device = Device { sim: SimExecutor::new(LIMITS, no_cost, now), now, is_hung: false };
        let seeds = CacheSeeds { model_fingerprint: 1, weight_version: 1 };
        let scheduler = Scheduler::new(SchedulerConfig::new(LIMITS), seeds).unwrap();
        let steps = StepLoop::new(prepare(scheduler, now), device);
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

    fn outputs(&mut self) -> Vec<NodeOutput> {
        std::iter::from_fn(|| self.core.poll_output()).collect()
    }

    /// Steps until the device has no work.
    fn run(&mut self) -> Vec<NodeOutput> {
        let mut outputs = self.outputs();
        while self.core.step(Duration::ZERO).unwrap() != LoopOutcome::Idle {
            outputs.extend(self.outputs());
            assert!(outputs.len() < 1000, "the core never becomes idle");
        }
        outputs
    }

    fn commands(&mut self) -> Vec<transfer::Command> {
        let command = |output| match output {
            NodeOutput::Transfer { command, .. } => Some(command),
            _ => None,
        };
        self.outputs().into_iter().filter_map(command).collect()
    }
}

fn observe_events(outputs: impl IntoIterator<Item = NodeOutput>) -> Vec<v1::ObserveEvent> {
    let event = |output| match output {
        NodeOutput::Observe { event, .. } => Some(event),
        _ => None,
    };
    outputs.into_iter().filter_map(event).collect()
}

/// Starts a sequence of 40 tokens and runs two steps. Returns the node and the outputs.
fn node_with_running_sequence() -> (Node, Vec<NodeOutput>) {
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

/// Returns the weight version of each token of a sequence, in order, and 0 for the change of the
/// weights.
fn versions_of(outputs: &[NodeOutput], id: u128) -> Vec<u64> {
    let versions = outputs.iter().flat_map(|output| match output {
        NodeOutput::Reply {
            call,
            reply: Reply::Event(AttemptEvent::Tokens { tokens, weight_version, .. }),
        } if call.sequence == SequenceId(id) => {
            vec![*weight_version; tokens.len()]
        }
        NodeOutput::WeightsChanged { .. } => vec![0],
        _ => vec![],
    });
    versions.collect()
}

/// Returns the states of the pause, in order.
fn pauses(outputs: &[NodeOutput]) -> Vec<v1::PauseState> {
    let states = outputs.iter().filter_map(|output| match output {
        NodeOutput::PauseChanged { state } => Some(*state),
        _ => None,
    });
    states.collect()
}

const PAUSE_MAX: Duration = Duration::from_secs(30);

impl Node {
    /// Pauses, runs until nothing runs, and lets a new call arrive.
    fn pause(&mut self, in_flight: InFlight, waits: bool) -> Vec<NodeOutput> {
        self.core.handle_pause(in_flight, waits, self.now + PAUSE_MAX, self.now);
        let mut outputs = self.run();
        self.advance(Duration::ZERO);
        self.call(2, SequenceKind::Compute);
        outputs.extend(self.run());
        outputs
    }
}
