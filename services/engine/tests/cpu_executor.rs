//! The CPU executor under random events: every sequence gives the tokens that it gives alone.
//! Weights are random and in f32, so that a single wrong bit would change an answer.

mod common;

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use common::{
    cpu::{CpuEngine, engine, limits_of, pair, run, tiny_model},
    sequence, unbounded_waits,
};
use engine::{
    LoopOutcome, SchedulerConfig,
    event::{Action, FinishReason, Input, NewSequence, SequenceId, SequenceKind},
    executor::{
        Executor, ExecutorError, StepTimes,
        cpu::{CpuExecutor, CpuExecutorError},
    },
    plan::{AdmittedRow, RowPlan, Slot, StepPlan},
};
use kernels::{
    BlockId, KvArena, KvFormat, WeightFormat,
    cpu::{CpuBackend, CpuOptions, Isa},
    sampling::{Sampling, TokenLogprobs},
};
use proptest::prelude::*;

fn tokens(family: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|index| (family * 31 + index * 7 + index / 3) % 96).collect()
}

fn request(id: u128, family: u32, len: usize, max_tokens: u32) -> NewSequence {
    NewSequence {
        max_tokens,
        sampling: Sampling { stop_token_ids: vec![5, 17, 40], ..Sampling::greedy() },
        ..sequence(id, SequenceKind::Compute, tokens(family, len), Instant::now())
    }
}

/// Returns the output of a single sequence without a cached prefix: the oracle.
fn alone(new: &NewSequence) -> (Vec<u32>, Option<FinishReason>) {
    type Known = HashMap<(Vec<u32>, u32, u32), (Vec<u32>, Option<FinishReason>)>;
    static ORACLE: Mutex<Option<(CpuEngine, u128, Known)>> = Mutex::new(None);
    let mut oracle: MutexGuard<'_, _> = ORACLE.lock().unwrap_or_else(PoisonError::into_inner);
    let (engine, uses, known) = oracle.get_or_insert_with(|| {
        let model = tiny_model();
        let limits = limits_of(&model, 1, 512, 40, 1);
        (engine(&model, unbounded_waits(limits), 1).0, 0, HashMap::new())
    });
    let key = (new.tokens.clone(), new.prompt_len, new.max_tokens);
    let answer = known.entry(key).or_insert_with(|| {
        *uses += 1;
        let salted = NewSequence {
            id: SequenceId(*uses),
            kind: SequenceKind::Compute,
            cache_salt: uses.to_string(),
            ..new.clone()
        };
        let outcomes = run(engine, vec![salted]);
        let outcome = &outcomes[&SequenceId(*uses)];
        assert_eq!((outcome.failure.as_ref(), outcome.cached_tokens), (None, 0));
        (outcome.ids(), outcome.finish)
    });
    answer.clone()
}

#[test]
fn test_requests_end_by_length_and_by_stop() {
    // Otherwise the random tests below would prove little.
    let mut reasons = Vec::new();
    for family in 0..12 {
        let (tokens, reason) = alone(&request(0, family, 20, 30));
        assert!(tokens.iter().any(|token| *token != tokens[0]) || tokens.len() < 8);
        reasons.push(reason);
    }
    assert!(reasons.contains(&Some(FinishReason::Length)));
    assert!(reasons.contains(&Some(FinishReason::Stop)));
}

#[test]
fn measured_executor_serves_as_if_it_was_not_measured() {
    let model = tiny_model();
    let limits = limits_of(&model, 2, 300, 40, 2);
    let (mut engine, _) = engine(&model, unbounded_waits(limits), 1);
    let times = StepTimes::measure(engine.executor_mut()).unwrap();
    let sizes: Vec<u32> = times.prefill.iter().map(|(tokens, _)| *tokens).collect();
    assert_eq!((sizes, times.context_tokens), (vec![256, 300], 300));
    assert!(times.decode > Duration::ZERO && times.at_start > Duration::ZERO);
    let requests: Vec<_> = (1..=3).map(|id| request(id, id as u32, 40, 20)).collect();
    let outcomes = run(&mut engine, requests.clone());
    for new in requests {
        let outcome = &outcomes[&new.id];
        assert_eq!((outcome.ids(), outcome.finish), alone(&new));
    }
}

#[test]
fn prompt_logprobs_are_those_of_each_prefix_sampled_alone() {
    const VOCABULARY: u32 = 96;
    let model = tiny_model();
    let prompt = tokens(3, 50);
    let (mut oracle, _) = engine(&model, unbounded_waits(limits_of(&model, 1, 512, 40, 1)), 1);
    let ids = 1..prompt.len() as u128;
    let prefix = |len: u128| {
        let mut new = request(len, 3, len as usize, 1);
        new.sampling.logprobs = Some(VOCABULARY);
        new
    };
    let outcomes = run(&mut oracle, ids.clone().map(prefix).collect());
    let expected: Vec<_> = ids
        .map(|len| {
            let mut top = outcomes[&SequenceId(len)].tokens[0].logprobs.clone().unwrap().top;
            let token = prompt[len as usize];
            let rank = top.iter().position(|(id, _)| *id == token).unwrap();
            let chosen = top[rank].1;
            top.truncate(4);
            TokenLogprobs { chosen, top, rank: Some(1 + rank as u32) }
        })
        .collect();
    // Few slots mean small chunks. The 12 blocks do not hold all sequences, so some are preempted.
    for (slots, blocks, depth) in [(2, 40, 1), (3, 12, 2), (8, 12, 2)] {
        let config = unbounded_waits(limits_of(&model, slots, 512, blocks, depth));
        let (mut engine, _) = engine(&model, config, 1);
        let mut requests: Vec<_> = (1..=6).map(|id| request(id, 3, prompt.len(), 25)).collect();
        for scored in requests.iter_mut().skip(1).step_by(2) {
            scored.sampling.prompt_logprobs = Some(4);
        }
        let outcomes = run(&mut engine, requests.clone());
        for new in &requests {
            let outcome = &outcomes[&new.id];
            assert_eq!((outcome.ids(), outcome.finish), alone(new), "{slots} slots");
            let wanted = new.sampling.prompt_logprobs.map(|_| expected.clone());
            assert_eq!(outcome.prompt_logprobs, wanted, "{slots} slots");
            if wanted.is_some() {
                assert_eq!(outcome.cached_tokens, 0, "cached tokens have no log-probabilities");
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Event {
    Submit {
        family: u32,
        len: usize,
        max_tokens: u32,
    },
    Cancel(prop::sample::Index),
    Turns(u8),
    /// Does not wait for the step in flight.
    ShortTurn,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0..4u32, 1..70usize, 1..30u32)
            .prop_map(|(family, len, max_tokens)| Event::Submit { family, len, max_tokens }),
        1 => any::<prop::sample::Index>().prop_map(Event::Cancel),
        4 => (1..6u8).prop_map(Event::Turns),
        1 => Just(Event::ShortTurn),
    ]
}

fn live_alone(config: SchedulerConfig, events: Vec<Event>) {
    let (mut engine, _) = engine(&tiny_model(), config, 1);
    let mut open: Vec<(NewSequence, Vec<u32>)> = Vec::new();
    let mut next_id = 0;
    let mut actions = Vec::new();
    let end = std::iter::repeat_n(Event::Turns(1), 10_000);
    for (count, event) in events.iter().cloned().chain(end).enumerate() {
        let winding_down = count >= events.len();
        match event {
            Event::Submit { family, len, max_tokens } => {
                next_id += 1;
                let new = request(next_id, family, len, max_tokens);
                open.push((new.clone(), Vec::new()));
                engine.handle(Input::Arrived(new), &mut actions);
            }
            Event::Cancel(index) if !open.is_empty() => {
                let (new, _) = open.swap_remove(index.index(open.len()));
                engine.handle(Input::Abort { id: new.id }, &mut actions);
            }
            Event::Cancel(_) => {}
            Event::Turns(turns) => {
                for _ in 0..turns {
                    let turn = engine.turn(Duration::from_secs(60), &mut actions);
                    if turn.expect("steps succeed") == LoopOutcome::Idle && winding_down {
                        assert!(open.is_empty(), "{open:?} never ended");
                        assert!(engine.scheduler().is_idle());
                        let load = engine.scheduler().load();
                        assert_eq!((load.blocks_held, load.blocks_reserved), (0, 0));
                        return;
                    }
                }
            }
            Event::ShortTurn => {
                engine.turn(Duration::ZERO, &mut actions).expect("steps succeed");
            }
        }
        engine.scheduler().check();
        for action in actions.drain(..) {
            match action {
                Action::Tokens { id, first_index, tokens, .. } => {
                    let (_, output) =
                        open.iter_mut().find(|(new, _)| new.id == id).expect("not cancelled");
                    assert_eq!(output.len(), first_index as usize);
                    output.extend(tokens.iter().map(|token| token.id));
                }
                Action::Finished { id, reason } => {
                    let index = open.iter().position(|(new, _)| new.id == id);
                    let (new, output) = open.swap_remove(index.expect("ends once"));
                    assert_eq!((output, reason), alone(&new));
                }
                Action::Admitted { .. } => {}
                action => panic!("{action:?}"),
            }
        }
    }
    panic!("no end: {:?}", engine.scheduler());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn any_events_give_the_tokens_of_each_sequence_alone(
        depth in 1..=2u32,
        slots in 1..=5u32,
        blocks in 7..25u32,
        step_tokens in 5..64u32,
        chunk_tokens in prop_oneof![Just(u32::MAX), Just(16), 1..20u32],
        events in prop::collection::vec(event(), 1..60),
    ) {
        let limits = limits_of(&tiny_model(), slots, step_tokens, blocks, depth);
        live_alone(SchedulerConfig { chunk_tokens, ..unbounded_waits(limits) }, events);
    }

    #[test]
    fn any_hand_over_gives_the_tokens_of_each_sequence_alone(
        depth in 1..=2u32,
        slots in 1..=4u32,
        blocks in 7..25u32,
        requests in prop::collection::vec(
            (0..3u32, 1..75usize, 0..3usize, 1..30u32, prop::bool::weighted(0.15), 0..40usize),
            1..12,
        ),
        luck in any::<u64>(),
    ) {
        let limits = limits_of(&tiny_model(), slots, 32, blocks, depth);
        let mut pair = pair(&tiny_model(), unbounded_waits(limits));
        let (mut all, mut cancels) = (Vec::new(), Vec::new());
        for (id, (family, len, emitted, max_tokens, cancelled, after)) in (0..).zip(requests) {
            let mut new = request(id, family, len, max_tokens);
            // An earlier attempt already emitted some tokens.
            new.prompt_len -= emitted.min(len - 1) as u32;
            new.max_tokens += emitted as u32;
            pair.submit(new.clone());
            cancels.push((new.id, cancelled.then_some(after)));
            all.push(new);
        }
        pair.run_randomly(&cancels, luck);
        for new in &all {
            let answer = &pair.answers[&new.id];
            if !answer.left {
                assert_eq!((answer.ids(), answer.finish), alone(new));
            }
        }
        pair.assert_all_returned();
    }
}

fn start(blocks: u32, vocabulary: u32) -> Result<CpuExecutor, CpuExecutorError> {
    let model = tiny_model();
    let options = CpuOptions { weights: WeightFormat::F32, threads: 1, isa: Isa::Auto };
    let backend = CpuBackend::new(options).expect("the options fit this machine");
    let arena = KvArena::host(model.config().kv_layout(KvFormat::F32), 8).expect("memory");
    let limits = limits_of(&model, 2, 16, blocks, 2);
    CpuExecutor::start(
        &model,
        backend,
        arena,
        engine::executor::ExecutorLimits { vocabulary, ..limits },
        &mut |_| {},
    )
}

#[test]
fn limits_that_contradict_arena_or_model_are_rejected_by_name() {
    let error = start(9, 96).err().expect("the arena has 8 blocks");
    assert_eq!(error.to_string(), "limits.blocks is 9; model and arena allow 8 to 8");
    let error = start(8, 95).err().expect("the model knows 96 tokens");
    assert_eq!(error.to_string(), "limits.vocabulary is 95; model and arena allow 96 to 96");
}

fn first_step(step_id: u64, token_count: u32) -> StepPlan {
    let admitted = AdmittedRow {
        slot: Slot(0),
        generation: 0,
        tokens: tokens(0, 10),
        prompt_len: 10,
        computed: 0,
        blocks: vec![BlockId(0)],
        sampling: Sampling::greedy(),
        constrained: false,
        adapter: None,
    };
    let row = RowPlan {
        slot: Slot(0),
        generation: 0,
        token_count,
        samples: token_count == 10,
        drafts_max: 0,
    };
    StepPlan { step_id, admitted: vec![admitted], rows: vec![row], ..StepPlan::default() }
}

#[test]
fn an_invalid_plan_stops_the_executor_with_the_reason() {
    let mut executor = start(8, 96).expect("everything fits");
    executor.launch(first_step(0, 11)).expect("launching checks nothing");
    let error = executor.collect(Duration::from_secs(10)).expect_err("11 of 10 tokens");
    assert!(matches!(error, ExecutorError::BadPlan { step_id: 0, .. }), "{error}");
    // The thread has ended; a later call returns the error instead of blocking.
    let error = executor.collect(Duration::from_secs(10)).expect_err("nothing comes any more");
    assert!(matches!(error, ExecutorError::Stopped { .. }), "{error}");
}

#[test]
fn more_steps_than_the_depth_are_rejected() {
    let mut executor = start(8, 96).expect("everything fits");
    let row =
        RowPlan { slot: Slot(0), generation: 0, token_count: 1, samples: true, drafts_max: 0 };
    let next = |step_id| StepPlan { step_id, rows: vec![row], ..StepPlan::default() };
    executor.launch(first_step(0, 10)).expect("the first of two");
    executor.launch(next(1)).expect("the second of two, whose token nobody has seen");
    let error = executor.launch(next(2)).expect_err("two are in flight");
    assert!(matches!(error, ExecutorError::BadPlan { step_id: 2, .. }), "{error}");
    for step_id in 0..2 {
        let result = executor.collect(Duration::from_secs(60)).expect("the thread lives");
        assert_eq!(result.expect("there in time").step_id, step_id);
    }
    executor.launch(next(2)).expect("there is room again");
}

#[test]
fn dropping_the_executor_joins_its_thread_and_releases_all_blocks() {
    let model = tiny_model();
    let (mut engine, arena) = engine(&model, unbounded_waits(limits_of(&model, 2, 16, 8, 2)), 1);
    let mut actions = Vec::new();
    engine.handle(Input::Arrived(request(1, 0, 40, 20)), &mut actions);
    engine.turn(Duration::ZERO, &mut actions).expect("launching succeeds");
    assert!(engine.steps_in_flight() > 0);
    drop(engine);
    // The thread held a reference to the arena.
    assert_eq!(std::sync::Arc::strong_count(&arena), 1);
    for block in 0..8 {
        assert_eq!(arena.pins(BlockId(block)).expect("in range"), 0);
    }
}

#[test]
fn a_waker_ends_a_blocked_collect() {
    let mut executor = start(8, 96).expect("everything fits");
    let waker = executor.waker();
    let begun = Instant::now();
    let waking = std::thread::spawn(move || waker.wake());
    let woken = executor.collect(Duration::from_secs(60)).expect("the thread lives");
    assert_eq!(woken, None);
    assert!(begun.elapsed() < Duration::from_secs(30));
    waking.join().expect("waking does not panic");
}
