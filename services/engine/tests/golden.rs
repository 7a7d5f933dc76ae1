//! SmolLM2 in f32 generates the golden tokens under any batching.

mod common;

use std::{collections::HashMap, time::Instant};

use common::{
    cpu::{CpuEngine, GoldenRun, Outcome, engine, golden, limits_of, pair, real_model, run},
    sequence, speculation, unbounded_waits,
};
use engine::{
    SchedulerConfig,
    event::{FinishReason, NewSequence, SequenceId, SequenceKind},
    executor::ExecutorLimits,
};

fn config(step_tokens: u32, depth: u32) -> SchedulerConfig {
    unbounded_waits(limits_of(&real_model(), 16, step_tokens, 240, depth))
}

/// Returns a sequence for a golden prompt, retried after `emitted` output tokens.
fn attempt(id: u128, golden: &GoldenRun, emitted: usize) -> NewSequence {
    let mut tokens = golden.prompt_ids.clone();
    tokens.extend_from_slice(&golden.output_ids[..emitted]);
    NewSequence {
        prompt_len: golden.prompt_ids.len() as u32,
        max_tokens: golden.output_ids.len() as u32,
        ignore_stop_tokens: true,
        ..sequence(id, SequenceKind::Compute, tokens, Instant::now())
    }
}

fn check(golden: &GoldenRun, emitted: usize, outcome: &Outcome) {
    assert_eq!(outcome.failure, None, "{}", golden.name);
    assert_eq!(outcome.ids(), golden.output_ids[emitted..], "{} after {emitted}", golden.name);
    assert_eq!(outcome.finish, Some(FinishReason::Length), "{}", golden.name);
}

/// Returns the golden prompts that are computed within seconds.
fn short() -> Vec<GoldenRun> {
    golden().into_iter().filter(|golden| golden.prompt_ids.len() < 100).collect()
}

/// Runs all golden prompts at once.
fn check_batch(engine: &mut CpuEngine, first_id: u128) -> HashMap<SequenceId, Outcome> {
    let all = golden();
    let attempts = (first_id..).zip(&all).map(|(id, golden)| attempt(id, golden, 0)).collect();
    let outcomes = run(engine, attempts);
    for (id, golden) in (first_id..).zip(&all) {
        check(golden, 0, &outcomes[&SequenceId(id)]);
    }
    outcomes
}

#[test]
fn golden_tokens_one_prompt_at_a_time_with_cached_prefixes_and_retries() {
    let (mut engine, _) = engine(&real_model(), config(512, 2), 2);
    for (id, golden) in (0..).zip(golden()) {
        let outcomes = run(&mut engine, vec![attempt(id, &golden, 0)]);
        check(&golden, 0, &outcomes[&SequenceId(id)]);
        assert_eq!(outcomes[&SequenceId(id)].cached_tokens, 0);
    }
    for (id, golden) in (10..).zip(golden()) {
        let outcomes = run(&mut engine, vec![attempt(id, &golden, 0)]);
        check(&golden, 0, &outcomes[&SequenceId(id)]);
        let expected = (golden.prompt_ids.len() as u32 - 1) / 16 * 16;
        assert_eq!(outcomes[&SequenceId(id)].cached_tokens, expected, "{}", golden.name);
    }
    // Retries begin with a part of the output. Each number of emitted tokens has its own cache
    // salt. So the first retries find nothing cached, and the second retries find the blocks of the
    // first retries.
    for (first_id, emitted) in [(20, 0), (30, 1), (40, 20)] {
        for again in [0, 100] {
            let attempts = (first_id + again..).zip(short()).map(|(id, golden)| NewSequence {
                cache_salt: format!("retry {emitted}"),
                adapter: None,
                ..attempt(id, &golden, emitted)
            });
            let outcomes = run(&mut engine, attempts.collect());
            for (id, golden) in (first_id + again..).zip(short()) {
                let outcome = &outcomes[&SequenceId(id)];
                check(&golden, emitted, outcome);
                assert_eq!(
                    outcome.cached_tokens > 0,
                    again > 0 && golden.prompt_ids.len() + emitted > 16
                );
            }
        }
    }
}

#[test]
fn golden_tokens_in_one_batch_and_with_cached_prefixes() {
    let (mut engine, _) = engine(&real_model(), config(512, 2), 2);
    check_batch(&mut engine, 0);
    let again = check_batch(&mut engine, 10);
    assert!(again.values().any(|outcome| outcome.cached_tokens >= 592));
}

#[test]
fn golden_tokens_with_prefill_chunks_of_16_at_depth_1() {
    let config = SchedulerConfig { chunk_tokens: 16, ..config(64, 1) };
    let (mut engine, _) = engine(&real_model(), config, 2);
    check_batch(&mut engine, 0);
    let records = engine.take_records();
    assert!(records.iter().all(|record| record.tokens <= 16 * record.rows));
    assert!(
        records.len() >= 600 / 16 + 47,
        "a step for each chunk of the long prompt and for each output token"
    );
}

#[test]
fn golden_tokens_with_speculation_alone_batched_and_handed_over() {
    let with_drafts = |config: SchedulerConfig| {
        let speculation = Some(speculation(8, 64));
        let limits = ExecutorLimits { speculation, ..config.limits };
        SchedulerConfig { limits, ..config }
    };
    let (mut engine, _) = engine(&real_model(), with_drafts(config(512, 2)), 2);
    check_batch(&mut engine, 0);
    for (id, golden) in (10..).zip(golden()) {
        let outcomes = run(&mut engine, vec![attempt(id, &golden, 0)]);
        check(&golden, 0, &outcomes[&SequenceId(id)]);
    }
    let speculated = engine.take_speculated();
    assert!(speculated.accepted > 0, "{speculated:?}");

    let mut pair = pair(&real_model(), with_drafts(config(512, 2)));
    for (id, golden) in (20..).zip(golden()) {
        pair.submit(attempt(id, &golden, 0));
    }
    pair.run();
    for (id, golden) in (20..).zip(golden()) {
        assert_eq!(pair.answers[&SequenceId(id)].ids(), golden.output_ids, "{}", golden.name);
    }
}

#[test]
fn golden_tokens_with_preemption() {
    // All short prompts are admitted. While they decode, they outgrow the pool of 16 blocks.
    let short = short();
    let limits = limits_of(&real_model(), 8, 512, 16, 2);
    let (mut engine, _) = engine(&real_model(), unbounded_waits(limits), 2);
    let copies = |copy: u32| {
        let of_copy = (10 * u128::from(copy)..).zip(&short).map(move |(id, golden)| NewSequence {
            cache_salt: copy.to_string(),
            adapter: None,
            ..attempt(id, golden, 0)
        });
        of_copy.collect::<Vec<_>>()
    };
    let outcomes = run(&mut engine, [copies(1), copies(2)].concat());
    for copy in [10, 20] {
        for (id, golden) in (copy..).zip(&short) {
            check(golden, 0, &outcomes[&SequenceId(id)]);
        }
    }
    assert!(engine.scheduler().preemptions() > 0, "no sequence was preempted");
}

#[test]
fn golden_tokens_with_hand_over_and_cached_prefixes() {
    let mut pair = pair(&real_model(), config(512, 2));
    let mut submit = |first_id: u128, salt: &str| {
        let all = golden();
        for (id, golden) in (first_id..).zip(&all) {
            let new = attempt(id, golden, 0);
            pair.submit(NewSequence { cache_salt: salt.to_owned(), ..new });
        }
        pair.run();
        pair.assert_all_returned();
        let mut cached = (0, 0, 0);
        for (id, golden) in (first_id..).zip(&all) {
            let answer = &pair.answers[&SequenceId(id)];
            assert_eq!(answer.ids(), golden.output_ids, "{}", golden.name);
            cached.0 += answer.cached_at_prefill;
            cached.1 += answer.cached_at_decode;
            cached.2 += answer.blocks_moved;
        }
        cached
    };
    // The first prompt is shorter than one block, so no transfer is needed.
    assert_eq!(submit(0, ""), (0, 0, 2 + 3 + 38));
    // Now both engines have every full block cached: the rest of each prompt is less than one
    // block, so no block is transferred.
    let (_, at_decode, moved) = submit(10, "");
    assert_eq!((at_decode, moved), (16 + 32 + 592, 0));
}

#[test]
fn prompt_logprobs_equal_those_of_transformers() {
    let (mut engine, _) = engine(&real_model(), config(512, 2), 2);
    // The second time the prefix cache has the prompts.
    for first_id in [0, 10] {
        let scored = |(id, golden): (u128, GoldenRun)| {
            let mut new = attempt(id, &golden, golden.output_ids.len() - 1);
            new.prompt_len = new.tokens.len() as u32;
            new.max_tokens = 1;
            new.sampling.prompt_logprobs = Some(5);
            new
        };
        let outcomes = run(&mut engine, (first_id..).zip(golden()).map(scored).collect());
        for (id, golden) in (first_id..).zip(golden()) {
            let outcome = &outcomes[&SequenceId(id)];
            assert_eq!((outcome.failure.as_ref(), outcome.cached_tokens), (None, 0));
            let found = outcome.prompt_logprobs.as_ref().unwrap();
            let prompt_len = golden.prompt_ids.len();
            assert_eq!(found.len(), prompt_len + golden.output_ids.len() - 2);
            let first = &found[prompt_len - 1];
            for ((id, logprob), expected) in first.top.iter().zip(&golden.first_step_top5) {
                assert_eq!(*id, expected.id, "{}", golden.name);
                assert!((logprob - expected.logprob).abs() < 1e-3, "{}: {logprob}", golden.name);
            }
            // Each token of the greedy output is the most likely one, by the margin of the logits.
            let outputs = found[prompt_len - 1..].iter().zip(&golden.margins);
            for ((token, margin), id) in outputs.zip(&golden.output_ids) {
                assert_eq!((token.top[0].0, token.rank), (*id, Some(1)), "{}", golden.name);
                assert_eq!(token.chosen, token.top[0].1);
                let found = token.top[0].1 - token.top[1].1;
                assert!((found - margin).abs() < 1e-3, "{}: {found}, not {margin}", golden.name);
            }
        }
    }
}
