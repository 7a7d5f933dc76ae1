//! Groups of real rank processes with the `sim` executor. A group generates the same tokens as one
//! executor in this process, and changes its weights as one. A group fails with a typed error when
//! a rank dies, hangs, diverges or cannot start. Ranks end with their node.
//!
//! A rank process is this program again, running a helper that reads its rank spec from an
//! environment variable.

use std::{
    env, fs,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use engine::{
    CacheSeeds, Scheduler, SchedulerConfig, StepLoop,
    constraint::{Constraint, ConstraintFailure, Matcher},
    event::{Action, Input, NewSequence, SequenceId, SequenceKind},
    executor::{
        ChunkReceiver, CollectWaker, DeclaredTensor, Executor, ExecutorError, ExecutorLimits,
        PrepareError, ReceivedWeights, Speculation, TensorDigest, TensorPiece, WeightUpdate,
        sim::{CostModel, SimExecutor},
    },
    plan::{RowMask, StepId, StepPlan, StepResult},
};
use kernels::{
    cuda::{ChunkSource, ExportedMemory},
    peer::WaitLimit,
    sampling::{Sampling, TokenMask},
    shared::RegionName,
};
use model::Checkpoint;
use ranks::{GroupError, GroupSettings, RankGroup, RankSpec, run_rank};

const RANK_HELPER: &str = "rank";
const NODE_HELPER: &str = "node";
/// Environment variable: a rank helper's rank spec.
const RANK_SPEC: &str = "BATON_TEST_RANK_SPEC";
/// Environment variable: the file to which a node helper writes the process ids of its ranks.
const PROCESS_IDS: &str = "BATON_TEST_PROCESS_IDS";
const WITHIN: Duration = Duration::from_secs(60);
const LIMITS: ExecutorLimits = ExecutorLimits {
    slots: 6,
    step_tokens: 64,
    sequence_tokens: 256,
    blocks: 64,
    depth: 2,
    vocabulary: 50,
    speculation: Some(Speculation {
        row_drafts: 4,
        step_tokens: 24,
        ngram_min: 1,
        ngram_max: 4,
        uniform: false,
    }),
};

/// How a group runs. With a fault, one rank injects it. All ranks receive the scenario in the start
/// message.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scenario {
    None,
    /// The rank returns a different token in this step.
    Differs(u64),
    /// The executor fails in this step.
    Stops(u64),
    /// The process exits in this step without a message.
    Exits(u64),
    /// This step never ends.
    Hangs(u64),
    /// The executor cannot start.
    Refuses,
    /// The executor has other limits.
    OtherLimits,
    /// No fault; limits for long prompts.
    Long,
}

const FAULTY_RANK: u32 = 1;

impl Scenario {
    fn encode(self) -> Vec<u8> {
        let (kind, step) = match self {
            Self::None => (0, 0),
            Self::Differs(step) => (1, step),
            Self::Stops(step) => (2, step),
            Self::Exits(step) => (3, step),
            Self::Hangs(step) => (4, step),
            Self::Refuses => (5, 0),
            Self::OtherLimits => (6, 0),
            Self::Long => (7, 0),
        };
        vec![kind, u8::try_from(step).unwrap()]
    }

    fn decode(bytes: &[u8]) -> Self {
        let step = bytes[1].into();
        match bytes[0] {
            1 => Self::Differs(step),
            2 => Self::Stops(step),
            3 => Self::Exits(step),
            4 => Self::Hangs(step),
            5 => Self::Refuses,
            6 => Self::OtherLimits,
            7 => Self::Long,
            _ => Self::None,
        }
    }
}

struct FaultyDevice {
    sim: SimExecutor,
    fault: Scenario,
    collected: u64,
    weights: Arc<Weights>,
}

/// A buffer from which rank 1 cannot copy, and one whose copies do not end.
const DAMAGED_BUFFER: usize = 7;
const STUCK_BUFFER: usize = 8;

/// New weights of a rank. The first tensor is in parts, and each rank has the whole of the second
/// one.
struct Weights {
    rank: u64,
    is_prepared: AtomicBool,
}

struct Copies<'a> {
    weights: &'a Weights,
    bytes: u64,
}

impl WeightUpdate for Weights {
    fn is_in_place(&self) -> bool {
        false
    }

    fn prepare(&self, _: &std::path::Path, _: &Checkpoint) -> Result<(), PrepareError> {
        unreachable!("the tests read no files")
    }

    fn receive(
        &self,
        tensors: &[DeclaredTensor],
        source: ChunkSource<'_>,
    ) -> Result<Box<dyn ChunkReceiver + '_>, PrepareError> {
        let ChunkSource::Mapped(buffers) = source else { unreachable!("ranks map buffers") };
        assert_eq!((buffers, tensors), (&[trainer_buffer()][..], &trainer_tensors()[..]));
        Ok(Box::new(Copies { weights: self, bytes: 0 }))
    }

    fn discard(&self) {
        self.is_prepared.store(false, Ordering::Relaxed);
    }
}

impl ChunkReceiver for Copies<'_> {
    fn fill(&mut self, _: usize, _: usize, _: WaitLimit<'_>) -> Result<(), PrepareError> {
        unreachable!("ranks map buffers")
    }

    fn scatter(&mut self, buffer: usize, pieces: &[TensorPiece]) -> Result<(), PrepareError> {
        if buffer == DAMAGED_BUFFER && self.weights.rank == 1 {
            return Err(PrepareError::Device("the copy failed".to_owned()));
        }
        self.bytes += pieces.iter().map(|piece| piece.range.len() as u64).sum::<u64>();
        Ok(())
    }

    fn wait(&mut self, buffer: usize, limit: WaitLimit<'_>) -> Result<(), PrepareError> {
        while buffer == STUCK_BUFFER && !(limit.cancelled)() {
            if Instant::now() > limit.deadline {
                return Err(PrepareError::Device("the copies did not end".to_owned()));
            }
            thread::yield_now();
        }
        Ok(())
    }

    fn finish(&mut self, _: WaitLimit<'_>) -> Result<ReceivedWeights, PrepareError> {
        self.weights.is_prepared.store(true, Ordering::Relaxed);
        let part = TensorDigest { value: self.weights.rank + 1, is_whole: false };
        let whole = TensorDigest { value: 9, is_whole: true };
        let bytes = self.bytes * (1 + self.weights.rank);
        Ok(ReceivedWeights { digests: vec![Some(part), Some(whole)], bytes })
    }
}

fn trainer_buffer() -> ExportedMemory {
    ExportedMemory {
        uuid: "GPU-1".to_owned(),
        handle: std::array::from_fn(|at| at as u8),
        offset: 5,
        bytes: 100,
    }
}

fn trainer_tensors() -> Vec<DeclaredTensor> {
    ["up", "norm"]
        .map(|name| DeclaredTensor { name: name.into(), dtype: "BF16".into(), shape: vec![50] })
        .to_vec()
}

impl Executor for FaultyDevice {
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
        let step = self.collected;
        match self.fault {
            Scenario::Stops(at) if at == step => {
                return Err(ExecutorError::Stopped { reason: "the device burnt down".into() });
            }
            Scenario::Exits(at) if at == step => std::process::exit(3),
            Scenario::Hangs(at) if at == step => {
                thread::sleep(timeout.min(Duration::from_millis(10)));
                return Ok(None);
            }
            _ => {}
        }
        let mut result = self.sim.collect(Duration::from_secs(3600))?;
        self.collected += 1;
        if let Some(result) = &mut result
            && self.fault == Scenario::Differs(step)
        {
            let mut tokens = result.rows.iter_mut().flat_map(|row| &mut row.tokens);
            tokens.next().expect("a step that samples").id ^= 1;
        }
        Ok(result)
    }

    fn limits(&self) -> ExecutorLimits {
        self.sim.limits()
    }

    fn weight_update(&self) -> Option<Arc<dyn WeightUpdate>> {
        Some(self.weights.clone())
    }

    fn commit_weights(&mut self) -> Result<(), ExecutorError> {
        match self.weights.is_prepared.swap(false, Ordering::Relaxed) {
            true => Ok(()),
            false => Err(ExecutorError::Stopped { reason: "no weights are prepared".to_owned() }),
        }
    }
}

fn long() -> ExecutorLimits {
    ExecutorLimits {
        step_tokens: 65_536,
        sequence_tokens: 120_000,
        blocks: 8_000,
        speculation: None,
        ..LIMITS
    }
}

fn run_rank_process() {
    let spec: RankSpec = env::var(RANK_SPEC).unwrap().parse().unwrap();
    let outcome = run_rank(&spec, |told| {
        let is_faulty = spec.rank == FAULTY_RANK.min(spec.of - 1);
        let fault = Scenario::decode(told);
        let limits = match fault {
            Scenario::Refuses if is_faulty => return Err("there is no such GPU".to_owned()),
            Scenario::OtherLimits if is_faulty => ExecutorLimits { blocks: 63, ..LIMITS },
            Scenario::Long => long(),
            _ => LIMITS,
        };
        let sim = SimExecutor::new(limits, CostModel::default(), Instant::now());
        let fault = if is_faulty { fault } else { Scenario::None };
        let weights = Weights { rank: spec.rank.into(), is_prepared: false.into() };
        let weights = Arc::new(weights);
        Ok((FaultyDevice { sim, fault, collected: 0, weights }, vec![spec.rank as u8]))
    });
    if let Err(error) = &outcome {
        eprintln!("rank {}: {error}", spec.rank);
    }
    std::process::exit(i32::from(outcome.is_err()));
}

fn helper(name: &str, variable: &str, value: &str) -> Command {
    let mut command = test_harness::helper(name);
    command.env(variable, value).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

fn rank_command(spec: &RankSpec) -> Command {
    helper(RANK_HELPER, RANK_SPEC, &spec.to_string())
}

fn settings(ranks: u32, fault: Scenario) -> GroupSettings {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    GroupSettings {
        number: NUMBER.fetch_add(1, Ordering::Relaxed),
        start_within: WITHIN,
        silence_max: WITHIN,
        unread_max: WITHIN,
        stop_within: WITHIN,
        ..GroupSettings::new(77, ranks, fault.encode())
    }
}

fn group(ranks: u32, fault: Scenario) -> RankGroup {
    let group = RankGroup::start(settings(ranks, fault), rank_command).unwrap();
    assert_eq!(group.ready_messages(), (0..ranks).map(|rank| vec![rank as u8]).collect::<Vec<_>>());
    group
}

fn sequence(id: u128, prompt: usize, max_tokens: u32) -> NewSequence {
    NewSequence {
        id: SequenceId(id),
        kind: SequenceKind::Compute,
        tokens: (0..prompt).map(|at| ((at * 7 + id as usize * 3) % 50) as u32).collect(),
        prompt_len: prompt as u32,
        sampling: Sampling {
            temperature: if id.is_multiple_of(2) { 0.0 } else { 1.0 },
            seed: id as u64,
            ..Sampling::greedy()
        },
        max_tokens,
        ignore_stop_tokens: true,
        cache_salt: String::new(),
        adapter: None,
        session: Default::default(),
        constraint: None,
        deadline: Instant::now() + Duration::from_secs(1 << 20),
    }
}

/// Grammar of alternating even and odd tokens.
#[derive(Clone, Debug)]
struct Alternating {
    is_odd: bool,
}

impl Matcher for Alternating {
    fn accept(&mut self, token: u32) -> Result<(), ConstraintFailure> {
        assert_eq!(token % 2 == 1, self.is_odd, "token {token} was not allowed");
        self.is_odd = !self.is_odd;
        Ok(())
    }

    fn allowed(&mut self) -> Result<TokenMask, ConstraintFailure> {
        let word = if self.is_odd { 0xaaaa_aaaa } else { 0x5555_5555 };
        Ok(TokenMask::new(vec![word; 2], LIMITS.vocabulary))
    }

    fn is_complete(&self) -> bool {
        false
    }

    fn boxed_clone(&self) -> Box<dyn Matcher> {
        Box::new(self.clone())
    }
}

fn step_loop<E: Executor>(executor: E) -> StepLoop<E> {
    let seeds = CacheSeeds { model_fingerprint: 1, weight_version: 1 };
    let config = SchedulerConfig::new(executor.limits());
    let steps = StepLoop::new(Scheduler::new(config, seeds).unwrap(), executor);
    steps.with_mask_threads(2).unwrap()
}

/// Runs all sequences at once and returns the tokens of each.
fn outputs<E: Executor>(
    executor: E,
    sequences: Vec<NewSequence>,
) -> Result<Vec<Vec<u32>>, ExecutorError> {
    run(&mut step_loop(executor), sequences)
}

fn run<E: Executor>(
    steps: &mut StepLoop<E>,
    sequences: Vec<NewSequence>,
) -> Result<Vec<Vec<u32>>, ExecutorError> {
    let mut outputs = vec![Vec::new(); sequences.len()];
    let (mut left, mut actions) = (sequences.len(), Vec::new());
    for sequence in sequences {
        steps.handle(Input::Arrived(sequence), &mut actions);
    }
    let deadline = Instant::now() + WITHIN;
    while left > 0 {
        assert!(Instant::now() < deadline, "the sequences did not finish");
        steps.turn(Duration::from_secs(1), &mut actions)?;
        for action in actions.drain(..) {
            match action {
                Action::Tokens { id, tokens, .. } => {
                    outputs[id.0 as usize].extend(tokens.iter().map(|token| token.id));
                }
                Action::Finished { .. } => left -= 1,
                Action::Failed { failure, .. } => panic!("{failure}"),
                _ => {}
            }
        }
    }
    Ok(outputs)
}

fn sequences() -> Vec<NewSequence> {
    (0..9).map(|id| sequence(id, 5 + 17 * id as usize, 40)).collect()
}

/// Runs a group until it fails and returns the error.
fn failure_of(ranks: u32, fault: Scenario) -> String {
    let group = group(ranks, fault);
    let ids = group.process_ids();
    let error = outputs(group, sequences()).unwrap_err().to_string();
    assert_gone(&ids);
    error
}

fn is_alive(id: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{id}/stat")) else { return false };
    // The state follows the name, which is in parentheses.
    stat.rsplit(") ").next().is_some_and(|rest| !rest.starts_with(['Z', 'X']))
}

fn assert_gone(ids: &[u32]) {
    assert!(!ids.is_empty());
    let deadline = Instant::now() + WITHIN;
    while ids.iter().any(|id| is_alive(*id)) {
        assert!(Instant::now() < deadline, "all processes of {ids:?} end");
        thread::sleep(Duration::from_millis(5));
    }
}

fn signal(id: u32, signal: &str) {
    let status = Command::new("kill").args([signal, &id.to_string()]).status().unwrap();
    assert!(status.success());
}

fn groups_of_any_size_match_one_executor() {
    let sim = SimExecutor::new(LIMITS, CostModel::default(), Instant::now());
    // Every third sequence has a grammar.
    let sequences = || {
        let mut sequences = sequences();
        for sequence in sequences.iter_mut().step_by(3) {
            let constraint = Constraint::new(Box::new(Alternating { is_odd: false })).unwrap();
            sequence.constraint = Some(constraint);
        }
        sequences
    };
    let expected = outputs(sim, sequences()).unwrap();
    assert!(expected.iter().all(|output| output.len() == 40));
    let parities = expected[3].iter().map(|token| token % 2);
    assert!(parities.eq([0, 1].into_iter().cycle().take(40)));
    for ranks in [1, 2, 4] {
        let group = group(ranks, Scenario::None);
        let ids = group.process_ids();
        assert_eq!(ids.len(), ranks as usize);
        assert_eq!(outputs(group, sequences()).unwrap(), expected, "{ranks} ranks");
        // The group has stopped its processes.
        assert_gone(&ids);
    }
}

fn a_prompt_of_a_hundred_thousand_tokens_passes_the_ring() {
    let sequences = || vec![sequence(0, 100_000, 3), sequence(1, 3_000, 3)];
    let expected =
        outputs(SimExecutor::new(long(), CostModel::default(), Instant::now()), sequences());
    assert_eq!(outputs(group(2, Scenario::Long), sequences()).unwrap(), expected.unwrap());
}

fn rank_with_a_different_token_is_detected_in_the_same_step() {
    let error = failure_of(4, Scenario::Differs(6));
    assert_eq!(
        error,
        "the executor stopped: step 6: the tokens of rank 1 differ from those of rank 0"
    );
}

fn failed_rank_reports_its_reason() {
    let error = failure_of(2, Scenario::Stops(3));
    assert!(error.ends_with("rank 1 of 2: the device burnt down"), "{error}");
    let error = failure_of(2, Scenario::Exits(3));
    assert!(error.contains("rank 1 of 2 ended: exit code 3"), "{error}");
    let error = failure_of(1, Scenario::Exits(0));
    assert!(error.contains("rank 0 of 1 ended: exit code 3"), "{error}");
}

fn a_killed_rank_ends_the_group_in_the_middle_of_a_step_and_when_idle() {
    for is_idle in [false, true] {
        let group = group(3, if is_idle { Scenario::None } else { Scenario::Hangs(2) });
        let ids = group.process_ids();
        let mut steps = step_loop(group);
        let mut actions = Vec::new();
        if !is_idle {
            steps.handle(Input::Arrived(sequence(0, 20, 20)), &mut actions);
            let deadline = Instant::now() + WITHIN;
            while steps.steps_in_flight() < 2 {
                assert!(Instant::now() < deadline, "two steps are launched");
                steps.turn(Duration::from_millis(1), &mut actions).unwrap();
            }
        }
        signal(ids[2], "-KILL");
        let deadline = Instant::now() + WITHIN;
        let error = loop {
            assert!(Instant::now() < deadline, "the group did not report the failure");
            match steps.turn(Duration::from_secs(1), &mut actions) {
                Ok(_) => thread::sleep(Duration::from_millis(1)),
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.ends_with("rank 2 of 3 ended: killed by signal 9"), "{error}");
        // The other ranks have ended too, before the group is dropped.
        assert_gone(&ids);
        // Later calls return the same error.
        assert_eq!(steps.executor_mut().check().unwrap_err().to_string(), error);
        let again = steps.executor_mut().launch(StepPlan::default()).unwrap_err();
        assert_eq!(again.to_string(), error);
    }
}

fn stopped_rank_counts_as_dead_and_is_killed() {
    let settings =
        GroupSettings { silence_max: Duration::from_secs(2), ..settings(2, Scenario::None) };
    let mut group = RankGroup::start(settings, rank_command).unwrap();
    let ids = group.process_ids();
    signal(ids[1], "-STOP");
    let deadline = Instant::now() + WITHIN;
    let error = loop {
        assert!(Instant::now() < deadline, "the group did not report the failure");
        match group.collect(Duration::from_secs(1)) {
            Ok(_) => {}
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("rank 1 of 2 sent no heartbeat for 2"), "{error}");
    assert_gone(&ids);
}

fn waker_ends_a_wait_for_results_and_a_stuck_group_is_killed() {
    let settings = GroupSettings {
        stop_within: Duration::from_millis(100),
        ..settings(2, Scenario::Hangs(0))
    };
    let mut group = RankGroup::start(settings, rank_command).unwrap();
    let ids = group.process_ids();
    let waker: CollectWaker = group.waker();
    let began = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| waker.wake());
        assert_eq!(group.collect(2 * WITHIN).unwrap(), None);
    });
    assert!(began.elapsed() < WITHIN);
    assert_eq!(group.collect(Duration::from_millis(5)).unwrap(), None);
    let mut steps = step_loop(group);
    steps.handle(Input::Arrived(sequence(0, 20, 20)), &mut Vec::new());
    steps.turn(Duration::from_millis(5), &mut Vec::new()).unwrap();
    assert!(steps.steps_in_flight() > 0);
    drop(steps);
    assert_gone(&ids);
}

fn plan_that_no_rank_can_run_is_a_bad_plan_error() {
    let mut group = group(2, Scenario::None);
    group.launch(StepPlan::default()).unwrap();
    let deadline = Instant::now() + WITHIN;
    let error = loop {
        assert!(Instant::now() < deadline, "the group did not report the failure");
        match group.collect(WITHIN) {
            Ok(result) => assert_eq!(result, None),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, ExecutorError::BadPlan { step_id: 0, .. }), "{error}");
    assert!(error.to_string().contains("0 rows with 0 tokens"), "{error}");
}

fn failed_group_start_reports_the_reason_and_leaks_nothing() {
    // An epoch of its own: other tests of this program run groups at the same time.
    const EPOCH: u128 = 78;
    let settings = |ranks, fault| GroupSettings { epoch: EPOCH, ..settings(ranks, fault) };
    let start = |fault| RankGroup::start(settings(2, fault), rank_command).unwrap_err().to_string();
    assert_eq!(
        start(Scenario::Refuses),
        "the ranks did not start: rank 1 of 2: cannot start: there is no such GPU"
    );
    let error = start(Scenario::OtherLimits);
    assert!(error.contains("the ranks have different limits: rank 0 has "), "{error}");
    let missing = |_: &RankSpec| Command::new("/no/such/program");
    let error = RankGroup::start(settings(2, Scenario::None), missing).unwrap_err();
    assert!(matches!(error, GroupError::Failed(_)), "{error}");
    assert!(error.to_string().contains(": No such file"), "{error}");
    // A process that never reads its rank spec.
    let asleep = |_: &RankSpec| {
        let mut command = Command::new("sleep");
        command.arg("3600").stdin(Stdio::null());
        command
    };
    let settings =
        GroupSettings { start_within: Duration::from_millis(50), ..settings(2, Scenario::None) };
    let error = RankGroup::start(settings, asleep).unwrap_err().to_string();
    assert!(error.contains("rank 0 of 2 was not ready after 0 s"), "{error}");
    let own = RegionName::own(EPOCH, "x").file_name();
    let own = own.trim_end_matches('x');
    let is_left = || {
        let files = fs::read_dir("/dev/shm").unwrap().flatten();
        files.map(|file| file.file_name()).find(|name| name.to_string_lossy().starts_with(own))
    };
    // A keeper thread may release the memory a moment later.
    let deadline = Instant::now() + WITHIN;
    while let Some(name) = is_left() {
        assert!(Instant::now() < deadline, "{name:?} is left");
        thread::sleep(Duration::from_millis(5));
    }
}

fn limit(within: Duration, cancelled: &(dyn Fn() -> bool + Sync)) -> WaitLimit<'_> {
    WaitLimit { deadline: Instant::now() + within, cancelled }
}

fn ranks_copy_their_parts_of_chunks_and_commit_together() {
    let group = group(2, Scenario::None);
    let update = group.weight_update().unwrap();
    let pieces = |tensor| vec![TensorPiece { tensor, range: 10..40, at: 3 }];
    let receive = || {
        let buffers = [trainer_buffer()];
        update.receive(&trainer_tensors(), ChunkSource::Mapped(&buffers)).unwrap()
    };
    // The failure of one rank fails the update, and the next update begins anew.
    let mut receiver = receive();
    receiver.scatter(DAMAGED_BUFFER, &pieces(0)).unwrap();
    let error = receiver.wait(0, limit(WITHIN, &|| false)).unwrap_err().to_string();
    assert_eq!(error, "rank 1 of 2: cannot prepare the weights: the copy failed");
    drop(receiver);
    // A trainer that leaves ends the wait of every rank, and so does a deadline.
    let left = AtomicBool::new(false);
    for (is_left, within, words) in [
        (true, WITHIN, ["the update was cancelled"; 2]),
        // On a busy machine the rank's own answer may come too late.
        (false, Duration::from_millis(20), ["the copies did not end", "did not answer in time"]),
    ] {
        left.store(is_left, Ordering::Relaxed);
        let mut receiver = receive();
        let is_over = || left.load(Ordering::Relaxed);
        let error = receiver.wait(STUCK_BUFFER, limit(within, &is_over)).unwrap_err().to_string();
        assert!(words.iter().any(|words| error.contains(words)), "{error}");
    }
    update.discard();
    let mut receiver = receive();
    for tensor in [0, 1] {
        receiver.scatter(0, &pieces(tensor)).unwrap();
        receiver.wait(0, limit(WITHIN, &|| false)).unwrap();
    }
    let received = receiver.finish(limit(WITHIN, &|| false)).unwrap();
    let whole = |value| Some(TensorDigest { value, is_whole: true });
    assert_eq!(received, ReceivedWeights { digests: vec![whole(3), whole(9)], bytes: 120 });
    drop(receiver);
    let mut steps = step_loop(group);
    steps.executor_mut().commit_weights().unwrap();
    let expected =
        outputs(SimExecutor::new(LIMITS, CostModel::default(), Instant::now()), sequences());
    thread::scope(|scope| {
        let running = scope.spawn(|| run(&mut steps, sequences()));
        // A second update while steps run.
        let mut receiver = receive();
        receiver.finish(limit(WITHIN, &|| false)).unwrap();
        drop(receiver);
        assert_eq!(running.join().unwrap().unwrap(), expected.unwrap());
    });
    steps.executor_mut().commit_weights().unwrap();
    let error = steps.executor_mut().commit_weights().unwrap_err().to_string();
    assert!(error.contains("no weights are prepared"), "{error}");
    assert!(update.receive(&[], ChunkSource::Mapped(&[])).is_err(), "the group has failed");
}

fn panic_while_weights_are_prepared_ends_the_group_with_its_reason() {
    let mut group = group(2, Scenario::None);
    let update = group.weight_update().unwrap();
    // The ranks expect other tensors.
    let error = update.receive(&[], ChunkSource::Mapped(&[])).err().unwrap().to_string();
    assert!(error.contains("the ranks have ended"), "{error}");
    let error = group.check().unwrap_err().to_string();
    assert!(error.contains("of 2: preparing weights: assertion"), "{error}");
}

/// Starts three ranks, reports their process ids and sleeps until it is killed.
fn run_node() {
    let path = env::var(PROCESS_IDS).unwrap();
    let group = RankGroup::start(settings(3, Scenario::None), rank_command).unwrap();
    let ids: Vec<String> = group.process_ids().iter().map(u32::to_string).collect();
    let unfinished = format!("{path}.new");
    fs::write(&unfinished, ids.join(" ")).unwrap();
    fs::rename(unfinished, path).unwrap();
    thread::sleep(Duration::from_secs(3600));
}

fn ranks_end_with_their_node_even_if_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ids");
    let mut node = helper(NODE_HELPER, PROCESS_IDS, path.to_str().unwrap()).spawn().unwrap();
    let deadline = Instant::now() + WITHIN;
    let ids = loop {
        if let Ok(text) = fs::read_to_string(&path) {
            break text.split(' ').map(|id| id.parse().unwrap()).collect::<Vec<u32>>();
        }
        assert!(Instant::now() < deadline, "the node starts");
        thread::sleep(Duration::from_millis(5));
    };
    // A supervisor or a terminal signals the whole process group. Ranks ignore these signals: their
    // node stops them.
    signal(ids[0], "-TERM");
    signal(ids[0], "-INT");
    signal(ids[1], "-STOP");
    assert!(ids.iter().all(|id| is_alive(*id)));
    node.kill().unwrap();
    node.wait().unwrap();
    assert_gone(&ids);
}

fn main() -> std::process::ExitCode {
    let tests = test_harness::tests![
        groups_of_any_size_match_one_executor,
        a_prompt_of_a_hundred_thousand_tokens_passes_the_ring,
        rank_with_a_different_token_is_detected_in_the_same_step,
        failed_rank_reports_its_reason,
        a_killed_rank_ends_the_group_in_the_middle_of_a_step_and_when_idle,
        stopped_rank_counts_as_dead_and_is_killed,
        waker_ends_a_wait_for_results_and_a_stuck_group_is_killed,
        plan_that_no_rank_can_run_is_a_bad_plan_error,
        failed_group_start_reports_the_reason_and_leaks_nothing,
        ranks_copy_their_parts_of_chunks_and_commit_together,
        panic_while_weights_are_prepared_ends_the_group_with_its_reason,
        ranks_end_with_their_node_even_if_stopped,
    ];
    test_harness::main(&[(RANK_HELPER, run_rank_process), (NODE_HELPER, run_node)], tests)
}
