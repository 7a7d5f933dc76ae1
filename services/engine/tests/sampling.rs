//! Sampling through the whole engine: a sequence's draws depend on the sequence only.

mod common;

use std::time::Instant;

use common::{
    cpu::{CpuEngine, Outcome, engine, limits_of, pair, run, tiny_model},
    sequence, unbounded_waits,
};
use engine::{
    SchedulerConfig,
    event::{FinishReason, NewSequence, SequenceFailure, SequenceId, SequenceKind},
};
use kernels::sampling::Sampling;

const VOCABULARY: u32 = 96;

fn config(slots: u32, depth: u32) -> SchedulerConfig {
    unbounded_waits(limits_of(&tiny_model(), slots, 128, 100, depth))
}

fn cpu_engine() -> CpuEngine {
    engine(&tiny_model(), config(8, 2), 2).0
}

fn random(seed: u64) -> Sampling {
    Sampling { temperature: 1.5, seed, ..Sampling::greedy() }
}

fn request(id: u128, sampling: Sampling) -> NewSequence {
    let tokens = (0..20).map(|index| (index * 7 + 3) % VOCABULARY).collect();
    NewSequence {
        sampling,
        max_tokens: 24,
        ..sequence(id, SequenceKind::Compute, tokens, Instant::now())
    }
}

/// Runs one sequence on its own engine.
fn alone(new: NewSequence) -> Outcome {
    let id = new.id;
    run(&mut cpu_engine(), vec![new]).remove(&id).expect("the sequence has an output")
}

fn repeats(tokens: &[u32]) -> usize {
    let mut distinct = tokens.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    tokens.len() - distinct.len()
}

#[test]
fn a_seed_gives_the_same_tokens_alone_in_a_batch_in_chunks_and_handed_over() {
    let expected: Vec<_> = (0..6).map(|seed| alone(request(0, random(seed))).ids()).collect();
    assert!(expected.windows(2).all(|pair| pair[0] != pair[1]), "seeds differ");
    let all = || (0..6).map(|seed| request(u128::from(seed), random(seed))).collect::<Vec<_>>();

    let batch = run(&mut cpu_engine(), all());
    let chunked = SchedulerConfig { chunk_tokens: 3, ..config(2, 1) };
    let chunks = run(&mut engine(&tiny_model(), chunked, 1).0, all());
    let mut pair = pair(&tiny_model(), config(8, 2));
    all().into_iter().for_each(|new| pair.submit(new));
    pair.run();
    for (id, expected) in (0..).map(SequenceId).zip(&expected) {
        assert_eq!(batch[&id].ids(), *expected);
        assert_eq!(chunks[&id].ids(), *expected);
        assert_eq!(pair.answers[&id].ids(), *expected);
    }
}

#[test]
fn a_retry_continues_with_equal_draws_penalties_and_logprobs() {
    let sampling = Sampling {
        top_k: 40,
        top_p: 0.95,
        min_p: 0.01,
        repetition_penalty: 1.2,
        presence_penalty: 0.3,
        frequency_penalty: 0.4,
        logprobs: Some(4),
        ..random(7)
    };
    let whole = alone(request(0, sampling.clone()));
    assert_eq!(whole.tokens.len(), 24);
    for emitted in [1, 8, 23] {
        let mut retry = request(1, sampling.clone());
        retry.tokens.extend(&whole.ids()[..emitted]);
        assert_eq!(alone(retry.clone()).tokens, whole.tokens[emitted..]);
        let mut pair = pair(&tiny_model(), config(8, 2));
        pair.submit(retry);
        pair.run();
        assert_eq!(pair.answers[&SequenceId(1)].tokens, whole.tokens[emitted..]);
    }
}

#[test]
fn one_candidate_is_greedy_at_any_temperature() {
    let greedy = alone(request(0, Sampling::greedy())).ids();
    assert_eq!(alone(request(0, Sampling { top_k: 1, ..random(3) })).ids(), greedy);
    assert_eq!(alone(request(0, Sampling { min_p: 1.0, ..random(3) })).ids(), greedy);
    assert_ne!(alone(request(0, random(3))).ids(), greedy);
}

#[test]
fn penalties_count_tokens_still_on_the_device() {
    // At depth 2 each step is planned before the previous token is known; a penalty that missed the
    // previous token would allow a repetition.
    for depth in [1, 2] {
        let (mut engine, _) = engine(&tiny_model(), config(4, depth), 1);
        let free = Sampling { temperature: 0.0, ..Sampling::greedy() };
        let presence = Sampling { presence_penalty: 2.0, ..free.clone() };
        let frequency = Sampling { frequency_penalty: 2.0, ..free.clone() };
        let repetition = Sampling { repetition_penalty: 100.0, ..free.clone() };
        let all = [free, presence, frequency, repetition];
        let requests = (0..).zip(all).map(|(id, sampling)| request(id, sampling)).collect();
        let outcomes = run(&mut engine, requests);
        let repeats: Vec<_> = (0..4).map(|id| repeats(&outcomes[&SequenceId(id)].ids())).collect();
        assert!(repeats[0] > 0, "without a penalty some token comes twice: {repeats:?}");
        assert!(repeats[1] < repeats[0] && repeats[2] < repeats[0], "{repeats:?}");
        assert_eq!(repeats[3], 0, "{repeats:?}");
        // The repetition penalty also applies to prompt tokens.
        let prompt = request(0, Sampling::greedy()).tokens;
        assert!(outcomes[&SequenceId(3)].ids().iter().all(|token| !prompt.contains(token)));
    }
}

#[test]
fn stop_tokens_respect_min_tokens_and_ignore_stop_tokens() {
    let free = alone(request(0, Sampling::greedy())).ids();
    let stop_token_ids = vec![free[2]];
    let first =
        free.iter().position(|token| *token == free[2]).expect("the token is in the output");
    let stopping = Sampling { stop_token_ids: stop_token_ids.clone(), ..Sampling::greedy() };

    let stopped = alone(request(0, stopping.clone()));
    assert_eq!(stopped.ids(), free[..=first]);
    assert_eq!(stopped.finish, Some(FinishReason::Stop));

    let ignored = alone(NewSequence { ignore_stop_tokens: true, ..request(0, stopping.clone()) });
    assert_eq!((ignored.ids(), ignored.finish), (free.clone(), Some(FinishReason::Length)));

    let held_off = alone(request(0, Sampling { min_tokens: 10, ..stopping }));
    assert!(held_off.ids().len() >= 10);
    assert!(held_off.ids()[..10].iter().all(|token| !stop_token_ids.contains(token)));
}

#[test]
fn logprobs_are_returned_for_every_token_if_requested() {
    let asked = Sampling { logprobs: Some(5), ..random(1) };
    let with = alone(request(0, asked));
    let without = alone(request(0, random(1)));
    assert_eq!(with.ids(), without.ids());
    assert!(without.tokens.iter().all(|token| token.logprobs.is_none()));
    for token in &with.tokens {
        let logprobs = token.logprobs.as_ref().expect("asked for");
        assert_eq!(logprobs.top.len(), 5);
        assert!(logprobs.top.is_sorted_by(|a, b| a.1 > b.1 || (a.1 == b.1 && a.0 < b.0)));
        assert!(logprobs.chosen <= logprobs.top[0].1 && logprobs.chosen < 0.0);
        if let Some((_, logprob)) = logprobs.top.iter().find(|(id, _)| *id == token.id) {
            assert_eq!(*logprob, logprobs.chosen);
        }
    }
    let greedy = alone(request(0, Sampling { logprobs: Some(0), ..Sampling::greedy() }));
    assert!(
        greedy.tokens.iter().all(|token| {
            token.logprobs.as_ref().is_some_and(|logprobs| logprobs.top.is_empty())
        })
    );
}

#[test]
fn a_parameter_outside_its_range_fails_its_sequence_alone() {
    let bad = Sampling { top_p: f32::NAN, ..random(1) };
    let outcomes = run(&mut cpu_engine(), vec![request(0, bad), request(1, random(1))]);
    let failure = outcomes[&SequenceId(0)].failure.as_ref().expect("top_p is not a number");
    assert!(matches!(failure, SequenceFailure::Invalid { .. }), "{failure}");
    assert!(failure.to_string().contains("top_p"), "{failure}");
    assert_eq!(outcomes[&SequenceId(1)].tokens.len(), 24);
}
