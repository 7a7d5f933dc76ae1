//! Tests that draft tokens change the number of steps and not the output.

mod common;

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use common::{
    cpu::{CpuEngine, Outcome, engine, engine_with, limits_of, pair, run, tiny_model},
    family_tokens, limits,
    node::Node,
    oracle, sequence, speculation, unbounded_waits,
};
use engine::{
    SchedulerConfig, SchedulerConfigError, SpeculationStats, StepKind,
    event::{FinishReason, Input, NewSequence, SequenceId, SequenceKind},
    executor::{ExecutorLimits, Speculation},
    plan::{RowPlan, RowResult, StepResult, StepRun},
};
use kernels::{
    WeightFormat,
    sampling::{SampledToken, Sampling},
};
use proptest::prelude::*;

const COMPUTE: SequenceKind = SequenceKind::Compute;

fn sim_node(blocks: u32, drafts: Option<Speculation>) -> Node {
    Node::new(unbounded_waits(ExecutorLimits { speculation: drafts, ..limits(4, 64, blocks, 2) }))
}

fn long(id: u128, len: usize, max_tokens: u32) -> NewSequence {
    let new = sequence(id, COMPUTE, family_tokens(id as u32, len), Instant::now());
    NewSequence { max_tokens, ignore_stop_tokens: true, ..new }
}

#[test]
fn speculation_saves_steps_and_counts_draft_tokens() {
    let mut steps = Vec::new();
    for drafts in [None, Some(speculation(6, 64))] {
        let mut node = sim_node(40, drafts);
        node.arrive(long(1, 30, 120));
        node.run();
        assert!(node.finished(SequenceId(1)));
        node.assert_all_returned();
        steps.push(node.engine.take_records().len());
        let SpeculationStats { rows, drafted, accepted, accepted_at } =
            node.engine.take_speculated();
        if drafts.is_none() {
            assert_eq!((rows, drafted, accepted), (0, 0, 0));
            continue;
        }
        assert!(rows > 0 && accepted > 0 && accepted < drafted, "{accepted} of {drafted}");
        assert_eq!(accepted_at.iter().sum::<u64>(), accepted);
        assert!(accepted_at.is_sorted_by(|first, second| first >= second), "{accepted_at:?}");
        assert!(accepted_at[0] <= rows && accepted_at.len() <= 6);
        assert_eq!(node.engine.take_speculated(), SpeculationStats::default(), "taken once");
    }
    assert_eq!(steps[0], 120);
    assert!(steps[1] < 80, "{} steps", steps[1]);
}

#[test]
fn draft_tokens_stay_within_the_token_budget_of_a_step() {
    let mut node = sim_node(60, Some(speculation(8, 10)));
    for id in 1..=4 {
        node.arrive(long(id, 30, 60));
    }
    node.run();
    let records = node.engine.take_records();
    let (reading, decoding) = records.split_at(2);
    assert_eq!(reading.iter().map(|record| record.tokens).collect::<Vec<_>>(), [64, 58]);
    let most = decoding.iter().filter(|record| record.rows == 4).map(|record| record.tokens).max();
    assert_eq!(most, Some(10));
    node.assert_all_returned();
}

/// Returns the result of a row all of whose draft tokens are accepted.
fn all_accepted(row: &RowPlan) -> RowResult {
    let count = if row.samples { 1 + row.drafts_max } else { 0 };
    RowResult {
        slot: row.slot,
        generation: row.generation,
        tokens: (0..count).map(|_| SampledToken { id: 1, logprobs: None, pooled: None }).collect(),
        prompt_logprobs: Vec::new(),
        drafted: row.drafts_max,
        failure: None,
    }
}

#[test]
fn row_is_extended_once_by_the_blocks_of_its_token_and_of_its_draft_tokens() {
    let drafts = Some(speculation(32, 64));
    let limits = ExecutorLimits { speculation: drafts, ..limits(4, 64, 60, 1) };
    let mut scheduler = common::scheduler(unbounded_waits(limits));
    let mut actions = Vec::new();
    // After 1, 2, 4 and 8 draft tokens the row is at position 32, and has two blocks.
    scheduler.handle(Instant::now(), Input::Arrived(long(1, 13, 200)), &mut actions);
    let mut added = Vec::new();
    while let Some(plan) = scheduler.plan(&mut actions) {
        assert!(plan.extended.len() <= 1, "the only row has {} entries", plan.extended.len());
        added.extend(plan.extended.iter().map(|(_, blocks)| blocks.len()));
        let rows = plan.rows.iter().map(all_accepted).collect();
        let (step_id, run) = (plan.step_id, StepRun::default());
        let result = StepResult { step_id, rows, busy: Duration::from_millis(1), run };
        scheduler.complete(result, &mut actions);
        scheduler.check();
    }
    assert!(added.contains(&2), "no step added two blocks: {added:?}");
    assert!(scheduler.is_idle());
}

#[test]
fn draft_tokens_are_granted_only_where_a_uniform_step_fits() {
    let rules = Speculation { uniform: true, ..speculation(8, 64) };
    let limits = ExecutorLimits { speculation: Some(rules), ..limits(64, 1024, 400, 2) };
    for (rows, tokens_max) in [(1, 9), (3, 3 * 9), (16, 16 * 3), (32, 64), (33, 33), (62, 62)] {
        let mut node = Node::new(unbounded_waits(limits));
        for id in 1..=u128::from(rows) {
            node.arrive(long(id, 10, 40));
        }
        node.run();
        let records = node.engine.take_records();
        let decoding = records.iter().filter(|record| record.kind == StepKind::Decode);
        let most = decoding.filter(|record| record.rows == rows).map(|record| record.tokens).max();
        // Several rows seldom have as many draft tokens as each of them may have.
        let most = most.expect("all rows decode together");
        assert!(most <= tokens_max, "{most} tokens in {rows} rows");
        assert_eq!(most > rows, tokens_max > rows, "{most} tokens in {rows} rows");
        node.assert_all_returned();
    }
}

#[test]
fn the_prefix_cache_holds_exactly_the_answer_after_speculation() {
    for stops in [false, true] {
        let mut node = sim_node(40, Some(speculation(7, 64)));
        let stop_token_ids = if stops { (0..8).collect() } else { Vec::new() };
        let sampling = Sampling { stop_token_ids, min_tokens: 20, ..Sampling::greedy() };
        let first = NewSequence {
            ignore_stop_tokens: false,
            sampling: sampling.clone(),
            ..long(1, 30, 60)
        };
        let (answer, reason) = oracle(&first, 256);
        assert_eq!(reason == Some(FinishReason::Stop), stops);
        node.arrive(first.clone());
        node.run();
        let full_blocks = (30 + answer.len() - 1) / 16;
        assert_eq!(node.engine.scheduler().cached_hashes().len(), full_blocks);
        // The sim executor verifies that the cached KV belongs to exactly these tokens.
        let mut tokens = first.tokens;
        tokens.extend(&answer);
        tokens.extend([9, 9, 9]);
        let computed: u32 = node.engine.take_records().iter().map(|record| record.tokens).sum();
        assert!(computed > 0);
        node.arrive(NewSequence { prompt_len: tokens.len() as u32, tokens, ..long(2, 1, 1) });
        node.run();
        let computed: u32 = node.engine.take_records().iter().map(|record| record.tokens).sum();
        assert_eq!(computed as usize, 33 + answer.len() - 16 * full_blocks);
        node.assert_all_returned();
    }
}

#[test]
fn a_sender_does_not_speculate_and_its_receiver_does() {
    let limits = ExecutorLimits { speculation: Some(speculation(5, 64)), ..real_limits(8, 2) };
    let mut pair = pair(&tiny_model(), unbounded_waits(limits));
    pair.submit(request(1, Sampling::greedy()));
    pair.run();
    pair.assert_all_returned();
    assert_eq!(pair.prefill.take_speculated(), SpeculationStats::default());
    assert!(pair.decode.take_speculated().accepted > 0);
    let alone = run(&mut cpu_engine(None), vec![request(1, Sampling::greedy())]);
    assert_eq!(pair.answers[&SequenceId(1)].tokens, alone[&SequenceId(1)].tokens);
}

#[test]
fn zero_speculation_limits_are_rejected_by_name() {
    let rules = speculation(4, 64);
    for (field, rules) in [
        ("limits.speculation.row_drafts", Speculation { row_drafts: 0, ..rules }),
        ("limits.speculation.ngram_min", Speculation { ngram_min: 0, ..rules }),
    ] {
        let limits = ExecutorLimits { speculation: Some(rules), ..limits(4, 64, 40, 2) };
        let error = engine::Scheduler::new(SchedulerConfig::new(limits), common::SEEDS);
        assert_eq!(error.expect_err(field), SchedulerConfigError::Zero { field });
    }
}

fn real_limits(slots: u32, depth: u32) -> ExecutorLimits {
    limits_of(&tiny_model(), slots, 128, 160, depth)
}

fn cpu_engine(drafts: Option<Speculation>) -> CpuEngine {
    let limits = ExecutorLimits { speculation: drafts, ..real_limits(8, 2) };
    engine(&tiny_model(), unbounded_waits(limits), 2).0
}

/// Returns a request with a periodic prompt; the output of the random model soon repeats.
fn request(id: u128, sampling: Sampling) -> NewSequence {
    let tokens = (0..24).map(|index| (index % 6 * 7 + 3 + id as u32) % 96).collect();
    NewSequence { sampling, max_tokens: 60, ..sequence(id, COMPUTE, tokens, Instant::now()) }
}

/// Returns sampling parameters that use every rule.
fn demanding(seed: u64, temperature: f32) -> Sampling {
    Sampling {
        temperature,
        seed,
        top_k: 20,
        top_p: 0.98,
        min_p: 0.001,
        repetition_penalty: 1.02,
        presence_penalty: 0.05,
        frequency_penalty: 0.01,
        stop_token_ids: vec![1, 2, 3, 40, 41],
        min_tokens: 12,
        logprobs: Some(3),
        pooling: None,
        prompt_logprobs: None,
        logit_bias: vec![(3, 0.5), (5, -0.5)],
        allowed_token_ids: (0..45).collect(),
        bad_words: vec![vec![7], vec![8, 9], vec![10, 10]],
    }
}

#[test]
fn speculation_keeps_tokens_logprobs_penalties_and_stops_bit_equal() {
    let requests = || -> Vec<_> {
        let samplings = [
            Sampling::greedy(),
            demanding(1, 0.0),
            demanding(2, 0.05),
            demanding(3, 0.3),
            Sampling { temperature: 0.1, seed: 4, logprobs: Some(0), ..Sampling::greedy() },
            Sampling { temperature: 1.5, seed: 5, ..Sampling::greedy() },
        ];
        (1..).zip(samplings).map(|(id, sampling)| request(id, sampling)).collect()
    };
    let plain: HashMap<SequenceId, Outcome> = run(&mut cpu_engine(None), requests());
    for drafts in [1, 3, 8] {
        let mut engine = cpu_engine(Some(speculation(drafts, 128)));
        assert_eq!(run(&mut engine, requests()), plain, "{drafts} drafts");
        let SpeculationStats { accepted, drafted, .. } = engine.take_speculated();
        assert!(accepted > 20 && accepted < drafted, "{accepted} of {drafted}");
    }
}

/// The documentation guarantees bit-equal results in f32 only. The CPU kernels give bit-equal
/// results in the other formats too, because the order in which a row is accumulated does not
/// depend on other rows.
#[test]
fn speculation_changes_no_token_in_any_weight_format() {
    let requests = || -> Vec<_> {
        let samplings = [Sampling::greedy(), demanding(1, 0.0), demanding(2, 0.05)];
        (1..).zip(samplings).map(|(id, sampling)| request(id, sampling)).collect()
    };
    let of = |weights, drafts| {
        let limits = ExecutorLimits { speculation: drafts, ..real_limits(8, 2) };
        engine_with(&tiny_model(), unbounded_waits(limits), 2, weights).0
    };
    for weights in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q8] {
        let plain = run(&mut of(weights, None), requests());
        let mut ahead = of(weights, Some(speculation(8, 128)));
        let outcomes = run(&mut ahead, requests());
        for (id, outcome) in &plain {
            assert_eq!(outcomes[id].ids(), outcome.ids(), "{weights:?}, {id:?}");
            assert_eq!(outcomes[id].finish, outcome.finish, "{weights:?}, {id:?}");
        }
        let SpeculationStats { accepted, .. } = ahead.take_speculated();
        assert!(accepted > 20, "{accepted} in {weights:?}");
    }
}

#[test]
fn preemption_with_speculation_keeps_tokens() {
    // Each of the four sequences needs six blocks in the end. The pool has 16 blocks, so sequences
    // are preempted.
    let requests = || -> Vec<_> {
        let greedy = || Sampling { logprobs: Some(2), ..Sampling::greedy() };
        (1..=4)
            .map(|id| NewSequence { ignore_stop_tokens: true, ..request(id, greedy()) })
            .collect()
    };
    let plain = run(&mut cpu_engine(None), requests());
    for weights in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q8] {
        let limits = ExecutorLimits {
            speculation: Some(speculation(8, 128)),
            ..limits_of(&tiny_model(), 4, 128, 16, 2)
        };
        let mut engine = engine_with(&tiny_model(), unbounded_waits(limits), 2, weights).0;
        let outcomes = run(&mut engine, requests());
        assert!(engine.scheduler().preemptions() > 0, "no sequence was preempted");
        assert!(engine.take_speculated().accepted > 20);
        for (id, outcome) in &outcomes {
            assert_eq!(outcome.failure, None);
            assert_eq!(outcome.finish, Some(FinishReason::Length));
            assert_eq!(outcome.tokens.len(), 60, "{id:?}");
            // Recomputed KV is bit-equal to the first.
            if weights == WeightFormat::F32 {
                assert_eq!(outcome.tokens, plain[id].tokens, "{id:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Tests f32 with random batches, chunk sizes, pool sizes, depths and numbers of draft tokens.
    #[test]
    fn any_batch_gives_the_tokens_of_each_sequence_alone(
        row_drafts in 1..40u32,
        step_tokens in 2..128u32,
        (ngram_min, more) in (1..4u32, 0..4u32),
        depth in 1..=3u32,
        slots in 1..=4u32,
        blocks in 8..40u32,
        chunk_tokens in prop_oneof![Just(64u32), Just(5)],
        requests in prop::collection::vec((0..3u64, prop_oneof![Just(0.0f32), Just(0.2)]), 1..5),
    ) {
        let requests: Vec<_> = (1..)
            .zip(requests)
            .map(|(id, (seed, temperature))| request(id, demanding(seed, temperature)))
            .collect();
        let rules = Speculation { row_drafts, step_tokens, ngram_min, ngram_max: ngram_min + more, uniform: false };
        let limits = ExecutorLimits {
            speculation: Some(rules),
            ..limits_of(&tiny_model(), slots, 64, blocks, depth)
        };
        let config = SchedulerConfig { chunk_tokens, ..unbounded_waits(limits) };
        let outcomes = run(&mut engine(&tiny_model(), config, 1).0, requests.clone());
        for new in requests {
            let id = new.id;
            let alone = run(&mut cpu_engine(None), vec![new]);
            prop_assert_eq!(&outcomes[&id].tokens, &alone[&id].tokens);
            prop_assert_eq!(&outcomes[&id].finish, &alone[&id].finish);
        }
    }
}
