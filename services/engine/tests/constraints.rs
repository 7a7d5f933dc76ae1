//! Sequences with a grammar take part in every step, delay no other sequence, and never sample
//! without a token bitmask.

mod common;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use common::{
    cpu::{engine, limits_of, run, tiny_model},
    family_tokens,
    grammar::HashGrammar,
    limits,
    node::Node,
    oracle, sequence, speculation, unbounded_waits,
};
use crossbeam_channel::{Receiver, Sender, unbounded};
use engine::{
    LoopOutcome, SpeculationStats, StepLoop,
    constraint::{Constraint, ConstraintFailure, MaskJob, Matcher},
    event::{Action, FinishReason, Input, NewSequence, SequenceFailure, SequenceId, SequenceKind},
    executor::{Executor, ExecutorLimits, Speculation, cpu::CpuExecutor},
};
use kernels::sampling::{SampledToken, Sampling, TokenMask};

const COMPUTE: SequenceKind = SequenceKind::Compute;

fn plain(id: u128, max_tokens: u32) -> NewSequence {
    let new = sequence(id, COMPUTE, family_tokens(id as u32, 20), Instant::now());
    NewSequence { max_tokens, ignore_stop_tokens: true, ..new }
}

fn constrained(id: u128, max_tokens: u32) -> NewSequence {
    let constraint = Some(HashGrammar::new(id as u64, 1000).constraint());
    NewSequence { constraint, ..plain(id, max_tokens) }
}

fn node(depth: u32) -> Node {
    Node::new(unbounded_waits(limits(4, 64, 60, depth)))
}

#[test]
fn a_constrained_row_takes_part_in_every_step() {
    for depth in [1, 2, 3] {
        let mut node = node(depth);
        node.arrive(plain(1, 60));
        node.arrive(constrained(2, 40));
        node.run();
        assert!(node.finished(SequenceId(1)) && node.finished(SequenceId(2)));
        let rows: Vec<u32> = node.engine.take_records().iter().map(|step| step.rows).collect();
        let expected: Vec<u32> = (0..60).map(|step| if step < 40 { 2 } else { 1 }).collect();
        assert_eq!(rows, expected, "depth {depth}");
        node.assert_all_returned();
    }
}

#[test]
fn a_complete_grammar_ends_the_answer_even_before_min_tokens() {
    let constraint = Some(HashGrammar::new(7, 12).constraint());
    let sampling =
        Sampling { min_tokens: 30, stop_token_ids: vec![3, 4, 39], ..Sampling::greedy() };
    let new = NewSequence { constraint, sampling, ignore_stop_tokens: false, ..plain(1, 40) };
    let (answer, reason) = oracle(&new, 256);
    assert_eq!((answer.len(), reason), (12, Some(FinishReason::Stop)));
    let mut node = node(2);
    node.arrive(new.clone());
    // `max_tokens` ends a constrained answer like any other.
    let cut = NewSequence { id: SequenceId(2), max_tokens: 5, ..new };
    assert_eq!(oracle(&cut, 256).1, Some(FinishReason::Length));
    node.arrive(cut);
    node.run();
    node.assert_all_returned();
}

#[test]
fn an_answer_resumed_anywhere_continues_equally() {
    let whole =
        NewSequence { constraint: Some(HashGrammar::new(3, 25).constraint()), ..plain(1, 60) };
    let (answer, _) = oracle(&whole, 256);
    assert_eq!(answer.len(), 25);
    for emitted in [1, 2, 13, 24] {
        let mut tokens = whole.tokens.clone();
        tokens.extend(&answer[..emitted]);
        let grammar = HashGrammar::new(3, 25).after(&answer[..emitted]);
        let resumed =
            NewSequence { tokens, constraint: Some(grammar.constraint()), ..whole.clone() };
        assert_eq!(oracle(&resumed, 256).0, answer[emitted..]);
        let mut node = node(2);
        node.arrive(resumed);
        node.run();
        node.assert_all_returned();
    }
}

#[test]
fn preempted_rows_keep_their_place_in_the_grammar() {
    let mut node = Node::new(unbounded_waits(limits(4, 64, 11, 2)));
    for id in 1..=4 {
        node.arrive(constrained(id, 50));
    }
    node.run();
    assert!(node.engine.scheduler().preemptions() > 0);
    assert!((1..=4).all(|id| node.finished(SequenceId(id))));
    node.assert_all_returned();
}

/// Returns limits of an executor that verifies draft tokens.
fn drafting(uniform: bool) -> ExecutorLimits {
    let rules = Speculation { uniform, ..speculation(6, 64) };
    ExecutorLimits { speculation: Some(rules), ..limits(4, 64, 60, 2) }
}

#[test]
fn tokens_that_the_grammar_forces_save_steps() {
    let mut steps = Vec::new();
    for limits in [limits(4, 64, 60, 2), drafting(false)] {
        let mut node = Node::new(unbounded_waits(limits));
        node.arrive(constrained(1, 90));
        node.run();
        node.assert_all_returned();
        steps.push(node.engine.take_records().len());
        let SpeculationStats { drafted, accepted, .. } = node.engine.take_speculated();
        if limits.speculation.is_some() {
            assert!(accepted > 20 && accepted < drafted, "{accepted} of {drafted}");
        }
    }
    assert!(steps[0] == 90 && steps[1] < 75, "{steps:?}");
}

#[test]
fn rows_with_and_without_a_grammar_verify_draft_tokens_together() {
    for uniform in [false, true] {
        let mut node = Node::new(unbounded_waits(drafting(uniform)));
        for id in 1..=4 {
            node.arrive(if id % 2 == 0 { constrained(id, 60) } else { plain(id, 60) });
        }
        node.run();
        assert!(node.engine.take_speculated().accepted > 0);
        node.assert_all_returned();
    }
}

/// Sampled tokens of each sequence, and the sequences that failed.
type Outcomes = (BTreeMap<SequenceId, Vec<u32>>, Vec<(SequenceId, SequenceFailure)>);

/// Drives a scheduler and the sim executor by hand until both are idle. `computes` decides in each
/// round whether the waiting bitmasks are computed now.
fn drive(
    limits: ExecutorLimits,
    arrivals: Vec<NewSequence>,
    mut computes: impl FnMut(usize) -> bool,
) -> Outcomes {
    let (mut scheduler, now) = (common::scheduler(unbounded_waits(limits)), Instant::now());
    let mut executor = common::sim(limits, now);
    let (mut actions, mut jobs) = (Vec::new(), Vec::new());
    let (mut tokens, mut failures) = (BTreeMap::<_, Vec<u32>>::new(), Vec::new());
    for new in arrivals {
        scheduler.handle(now, Input::Arrived(new), &mut actions);
    }
    for round in 0.. {
        jobs.append(&mut scheduler.take_mask_jobs());
        if computes(round) {
            jobs.drain(..).for_each(|job: MaskJob| {
                scheduler.handle_mask(job.run(Duration::MAX), &mut actions)
            });
        }
        if let Some((step_id, masks)) = scheduler.supply(executor.masks_are_due()) {
            executor.supply(step_id, masks).expect("sound bitmasks");
        }
        while let Some(plan) = scheduler.plan(&mut actions) {
            executor.launch(plan).expect("a sound plan");
        }
        if let Some(result) = executor.collect(Duration::from_secs(9)).expect("sound") {
            scheduler.complete(result, &mut actions);
        }
        scheduler.check();
        for action in actions.drain(..) {
            match action {
                Action::Tokens { id, tokens: new, .. } => {
                    tokens.entry(id).or_default().extend(new.iter().map(|token| token.id));
                }
                Action::Failed { id, failure } => failures.push((id, failure)),
                _ => {}
            }
        }
        if scheduler.is_idle() {
            break;
        }
        assert!(round < 10_000, "the sequences never end");
    }
    (tokens, failures)
}

#[test]
fn a_late_bitmask_delays_its_own_row_and_changes_no_token() {
    let arrivals = || vec![plain(1, 30), constrained(2, 30), constrained(3, 30), plain(4, 45)];
    let (expected, failures) = drive(limits(4, 64, 60, 2), arrivals(), |_| true);
    assert_eq!((expected.len(), failures.len()), (4, 0));
    for (id, tokens) in &expected {
        let new = arrivals().into_iter().find(|new| new.id == *id).expect("the sequence arrived");
        assert_eq!(*tokens, oracle(&new, 256).0, "{id:?}");
    }
    // Bitmasks come in every second to seventh round, or hardly ever.
    for (limits, every) in [1, 2, 3, 5, 7, 50]
        .into_iter()
        .flat_map(|every| [limits(4, 64, 60, 2), drafting(false)].map(|limits| (limits, every)))
    {
        let (tokens, failures) = drive(limits, arrivals(), |round| round % every == every - 1);
        assert_eq!((tokens, failures), (expected.clone(), vec![]), "every {every}");
    }
}

/// Runs until the matcher fails, and returns the typed failure. No token follows its last bitmask.
fn fails_with(failure: ConstraintFailure) -> SequenceFailure {
    let grammar = HashGrammar { fails_at: Some((6, failure)), ..HashGrammar::new(1, 10) };
    let new = NewSequence { constraint: Some(grammar.constraint()), ..plain(1, 40) };
    let (tokens, failures) = drive(limits(4, 64, 60, 2), vec![new, plain(2, 30)], |_| true);
    let counts = [1, 2].map(|id| tokens[&SequenceId(id)].len());
    assert_eq!(counts, [4, 30], "the neighbour's answer is whole");
    let [(SequenceId(1), failure)] = &failures[..] else { panic!("{failures:?}") };
    failure.clone()
}

#[test]
fn a_failing_matcher_ends_its_own_sequence_with_a_typed_failure() {
    let reason = "beyond its bounds".to_owned();
    let complex = fails_with(ConstraintFailure::TooComplex { reason: reason.clone() });
    assert_eq!(complex, SequenceFailure::Invalid { reason: reason.clone() });
    let broken = fails_with(ConstraintFailure::Broken { reason: reason.clone() });
    assert_eq!(broken, SequenceFailure::Internal { reason });
}

/// A matcher whose bitmasks wait for a message, or panic when the sender was dropped.
#[derive(Clone, Debug)]
struct Slow {
    grammar: HashGrammar,
    turns: Receiver<()>,
}

impl Matcher for Slow {
    fn accept(&mut self, token: u32) -> Result<(), ConstraintFailure> {
        self.grammar.accept(token)
    }

    fn allowed(&mut self) -> Result<TokenMask, ConstraintFailure> {
        self.turns.recv().expect("the test sends a turn");
        self.grammar.allowed()
    }

    fn is_complete(&self) -> bool {
        self.grammar.is_complete()
    }

    fn boxed_clone(&self) -> Box<dyn Matcher> {
        Box::new(self.clone())
    }
}

/// Returns a sequence whose bitmasks wait for turns, with one turn for the first bitmask.
fn slow(id: u128) -> (NewSequence, Sender<()>) {
    let (sender, turns) = unbounded();
    sender.send(()).expect("the receiver lives");
    let matcher = Slow { grammar: HashGrammar::new(id as u64, 12), turns };
    let constraint = Some(Constraint::new(Box::new(matcher)).expect("the first bitmask"));
    (NewSequence { constraint, ..plain(id, 40) }, sender)
}

fn engine_with_mask_threads() -> StepLoop<CpuExecutor> {
    let limits = limits_of(&tiny_model(), 4, 64, 60, 2);
    let engine = engine(&tiny_model(), unbounded_waits(limits), 1).0;
    engine.with_mask_threads(2).expect("threads start")
}

#[test]
fn a_blocked_mask_worker_holds_up_its_own_row_only() {
    let mut engine = engine_with_mask_threads();
    let (blocked, turns) = slow(1);
    let expected = run(&mut engine_with_mask_threads(), vec![constrained(2, 20), plain(3, 30)]);
    let (mut actions, mut tokens) = (Vec::new(), BTreeMap::<_, Vec<_>>::new());
    for new in [blocked, constrained(2, 20), plain(3, 30)] {
        engine.handle(Input::Arrived(new), &mut actions);
    }
    let mut finished = 0;
    while finished < 3 {
        if finished == 2 {
            // Only now can the blocked row continue.
            let _ = turns.send(());
        }
        let turn = engine.turn(Duration::from_millis(50), &mut actions).expect("sound steps");
        assert_ne!(turn, LoopOutcome::Idle, "rows are left");
        for action in actions.drain(..) {
            match action {
                Action::Tokens { id, tokens: new, .. } => tokens.entry(id).or_default().extend(new),
                Action::Finished { id, .. } => {
                    assert_eq!(id == SequenceId(1), finished == 2);
                    finished += 1;
                }
                _ => {}
            }
        }
    }
    assert_eq!(tokens[&SequenceId(1)].len(), 12);
    for id in [2, 3].map(SequenceId) {
        assert_eq!(tokens[&id], expected[&id].tokens);
    }
}

#[test]
fn a_mask_worker_that_panics_fails_its_own_sequence() {
    let mut engine = engine_with_mask_threads();
    let (doomed, turns) = slow(1);
    drop(turns);
    let mut actions = Vec::new();
    for new in [doomed, constrained(2, 20)] {
        engine.handle(Input::Arrived(new), &mut actions);
    }
    let (mut failure, mut tokens) = (None, 0);
    loop {
        let turn = engine.turn(Duration::from_secs(60), &mut actions).expect("sound steps");
        for action in actions.drain(..) {
            match action {
                Action::Failed { id: SequenceId(1), failure: why } => failure = Some(why),
                Action::Tokens { id: SequenceId(2), tokens: new, .. } => tokens += new.len(),
                _ => {}
            }
        }
        if turn == LoopOutcome::Idle {
            break;
        }
    }
    let Some(SequenceFailure::Internal { reason }) = failure else { panic!("{failure:?}") };
    assert!(reason.contains("the test sends a turn"), "{reason}");
    assert_eq!(tokens, 20);
}

/// Matcher that allows every token and fails to consume any.
#[derive(Clone, Debug)]
struct Refuses;

impl Matcher for Refuses {
    fn accept(&mut self, token: u32) -> Result<(), ConstraintFailure> {
        Err(ConstraintFailure::Broken { reason: format!("not {token}") })
    }

    fn allowed(&mut self) -> Result<TokenMask, ConstraintFailure> {
        Ok(TokenMask::new(vec![u32::MAX; 2], common::VOCABULARY))
    }

    fn is_complete(&self) -> bool {
        false
    }

    fn boxed_clone(&self) -> Box<dyn Matcher> {
        Box::new(self.clone())
    }
}

#[test]
fn a_received_token_that_the_grammar_rejects_fails_the_sequence() {
    let constraint = Some(Constraint::new(Box::new(Refuses)).expect("the grammar has a mask"));
    let new = NewSequence { kind: SequenceKind::Receive, constraint, ..plain(1, 10) };
    let mut scheduler = common::scheduler(unbounded_waits(limits(4, 64, 60, 2)));
    let (mut actions, now) = (Vec::new(), Instant::now());
    scheduler.handle(now, Input::Arrived(new), &mut actions);
    actions.clear();
    let (id, token) = (SequenceId(1), SampledToken { id: 9, logprobs: None, pooled: None });
    scheduler.handle(now, Input::KvArrived { id, first_index: 0, token }, &mut actions);
    let failure = SequenceFailure::Internal { reason: "not 9".to_owned() };
    assert_eq!(actions, [Action::Failed { id, failure }]);
    scheduler.check();
    assert!(scheduler.is_idle() && scheduler.plan(&mut actions).is_none());
}

/// A mixed batch in steps of any size gives the output of each sequence alone at depth 1. The CPU
/// executor runs forward passes, and the requests use penalties, logprobs and random sampling.
#[test]
fn a_mixed_batch_of_real_forwards_equals_its_sequences_alone() {
    let sampling = |seed, temperature| Sampling {
        temperature,
        seed,
        top_k: 20,
        top_p: 0.98,
        repetition_penalty: 1.1,
        presence_penalty: 0.1,
        stop_token_ids: vec![1, 2, 3],
        min_tokens: 4,
        logprobs: Some(2),
        ..Sampling::greedy()
    };
    let requests = || {
        (1..=6_u128).map(|id| {
            let constraint =
                (id % 2 == 0).then(|| HashGrammar::new(id as u64, 10 + id as u32).constraint());
            let temperature = if id % 3 == 0 { 0.0 } else { 0.9 };
            let sampling = sampling(id as u64, temperature);
            NewSequence { constraint, sampling, ignore_stop_tokens: false, ..plain(id, 30) }
        })
    };
    let engine_of = |slots, step_tokens, depth, speculation| {
        let limits = limits_of(&tiny_model(), slots, step_tokens, 60, depth);
        engine(&tiny_model(), unbounded_waits(ExecutorLimits { speculation, ..limits }), 2).0
    };
    let mut alone = std::collections::HashMap::new();
    for request in requests() {
        alone.extend(run(&mut engine_of(1, 64, 1, None), vec![request]));
    }
    let drafts = Some(speculation(5, 64));
    for (slots, step_tokens, depth, mask_threads, speculation) in [
        (6, 64, 2, 0, None),
        (6, 64, 2, 2, None),
        (6, 7, 3, 1, None),
        (3, 16, 2, 2, None),
        (6, 64, 2, 0, drafts),
        (6, 64, 3, 2, drafts),
        (3, 16, 1, 2, drafts),
    ] {
        let mut engine = engine_of(slots, step_tokens, depth, speculation);
        if mask_threads > 0 {
            engine = engine.with_mask_threads(mask_threads).expect("threads start");
        }
        let together = run(&mut engine, requests().collect());
        assert_eq!(together, alone, "{slots} slots, steps of {step_tokens}, depth {depth}");
        assert_eq!(engine.take_speculated().accepted > 0, speculation.is_some());
    }
}
