//! Sequences with a grammar skip a frame per token, delay no neighbour, and never sample without a token
//! bitmask.

mod common;

use std::time::Instant;

use common::{
    cpu::{engine, limits_of, run, tiny_model},
    family_tokens,
    grammar::HashGrammar,
    limits,
    node::Node,
    oracle, patient, sequence, speculation,
};
use engine::{
    Speculated,
    constraint::{Constraint, ConstraintFailure, Matcher},
    event::{FinishReason, Input, NewSequence, SequenceFailure, SequenceId, SequenceKind},
    executor::ExecutorLimits,
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
    Node::new(patient(limits(4, 64, 60, depth)))
}

#[test]
fn a_constrained_row_takes_every_other_step_and_its_neighbour_every_step() {
    for (depth, steps_per_token) in [(1, 1), (2, 2), (3, 3)] {
        let mut node = node(depth);
        node.arrive(plain(1, 60));
        node.arrive(constrained(2, 15));
        node.run();
        assert!(node.finished(SequenceId(1)) && node.finished(SequenceId(2)));
        let rows: Vec<u32> = node.engine.take_records().iter().map(|step| step.rows).collect();
        // The neighbour alone determines the number of steps.
        assert_eq!(rows.len(), 60, "depth {depth}");
        assert!(rows.iter().all(|&rows| rows >= 1));
        let shared = rows.iter().enumerate().filter(|(_, rows)| **rows == 2).map(|(step, _)| step);
        let expected: Vec<usize> = (0..15).map(|token| token * steps_per_token).collect();
        assert_eq!(shared.collect::<Vec<_>>(), expected, "depth {depth}");
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
    let mut node = Node::new(patient(limits(4, 64, 11, 2)));
    for id in 1..=4 {
        node.arrive(constrained(id, 50));
    }
    node.run();
    assert!(node.engine.scheduler().preemptions() > 0);
    assert!((1..=4).all(|id| node.finished(SequenceId(id))));
    node.assert_all_returned();
}

#[test]
fn constrained_rows_get_no_draft_tokens_and_their_neighbours_do() {
    let drafting = ExecutorLimits { speculation: Some(speculation(6, 64)), ..limits(4, 64, 60, 2) };
    let mut node = Node::new(patient(drafting));
    node.arrive(constrained(1, 30));
    node.run();
    assert_eq!(node.engine.take_speculated(), Speculated::default());
    node.arrive(constrained(2, 30));
    node.arrive(plain(3, 60));
    node.run();
    assert!(node.engine.take_speculated().accepted > 0);
    node.assert_all_returned();
}

/// Runs until the matcher fails, and returns the typed failure. No token may follow.
fn fails_with(failure: ConstraintFailure) -> SequenceFailure {
    let grammar = HashGrammar { fails_at: Some((6, failure)), ..HashGrammar::new(1, 10) };
    let new = NewSequence { constraint: Some(grammar.constraint()), ..plain(1, 40) };
    let limits = limits(4, 64, 60, 2);
    let mut scheduler = common::scheduler(patient(limits));
    let mut actions = Vec::new();
    let now = Instant::now();
    let mut executor = common::sim(limits, now);
    scheduler.handle(now, Input::Arrived(new), &mut actions);
    scheduler.handle(now, Input::Arrived(plain(2, 30)), &mut actions);
    use engine::{event::Action, executor::Executor};
    let (mut tokens, mut neighbours, mut failed) = (0, 0, None);
    loop {
        while let Some(plan) = scheduler.plan(&mut actions) {
            executor.launch(plan).expect("a sound plan");
        }
        let Some(result) = executor.collect(std::time::Duration::from_secs(9)).expect("sound")
        else {
            break;
        };
        scheduler.complete(result, &mut actions);
        scheduler.check();
        for action in actions.drain(..) {
            match action {
                Action::Tokens { id: SequenceId(1), .. } => tokens += 1,
                Action::Tokens { .. } => neighbours += 1,
                Action::Failed { id: SequenceId(1), failure } => failed = Some(failure),
                _ => {}
            }
        }
    }
    assert_eq!((tokens, neighbours), (3, 30), "the neighbour's answer is whole");
    assert!(scheduler.is_idle());
    failed.expect("it ended with a failure")
}

#[test]
fn a_failing_matcher_ends_its_own_sequence_with_a_typed_failure() {
    let reason = "beyond its bounds".to_owned();
    let complex = fails_with(ConstraintFailure::TooComplex { reason: reason.clone() });
    assert_eq!(complex, SequenceFailure::Invalid { reason: reason.clone() });
    let broken = fails_with(ConstraintFailure::Broken { reason: reason.clone() });
    assert_eq!(broken, SequenceFailure::Internal { reason });
}

/// Allows every token and fails to consume any.
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
    let constraint = Some(Constraint::new(Box::new(Refuses)).expect("it has a mask"));
    let new = NewSequence { kind: SequenceKind::Receive, constraint, ..plain(1, 10) };
    let mut scheduler = common::scheduler(patient(limits(4, 64, 60, 2)));
    let (mut actions, now) = (Vec::new(), Instant::now());
    scheduler.handle(now, Input::Arrived(new), &mut actions);
    actions.clear();
    let (id, token) = (SequenceId(1), SampledToken { id: 9, logprobs: None });
    scheduler.handle(now, Input::KvArrived { id, first_index: 0, token }, &mut actions);
    let failure = SequenceFailure::Internal { reason: "not 9".to_owned() };
    assert_eq!(actions, [engine::event::Action::Failed { id, failure }]);
    scheduler.check();
    assert!(scheduler.is_idle() && scheduler.plan(&mut actions).is_none());
}

/// With a real model, penalties, logprobs and draws, a mixed batch in steps of any size gives the output of
/// each sequence alone at depth 1.
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
    let engine_of = |slots, step_tokens, depth| {
        let limits = limits_of(&tiny_model(), slots, step_tokens, 60, depth);
        engine(&tiny_model(), patient(limits), 2).0
    };
    let mut alone = std::collections::HashMap::new();
    for request in requests() {
        alone.extend(run(&mut engine_of(1, 64, 1), vec![request]));
    }
    for (slots, step_tokens, depth) in [(6, 64, 2), (6, 7, 3), (3, 16, 2)] {
        let together = run(&mut engine_of(slots, step_tokens, depth), requests().collect());
        assert_eq!(together, alone, "{slots} slots, steps of {step_tokens}, depth {depth}");
    }
}
