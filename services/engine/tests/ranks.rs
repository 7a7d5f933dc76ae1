//! One model on several ranks: all ranks return equal results for any batching, and the results
//! equal those of a single rank wherever the margin is sufficient.

mod common;

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use common::{
    cpu::{
        GoldenRun, Outcome, dummy_model, engine, golden, hybrid_model, limits_of, real_model, run,
    },
    pair::Pair,
    ranks::{AllRanks, Kv, engine_of_ranks, engine_of_ranks_with},
    sequence, speculation, unbounded_waits,
};
use engine::{
    SchedulerConfig,
    event::{FinishReason, NewSequence, SequenceId, SequenceKind},
    executor::{Executor, ExecutorError, ExecutorLimits},
    plan::{AdmittedRow, RowPlan, Slot, StepPlan},
};
use kernels::{
    BlockId, KvFormat,
    cpu::CpuGroupError,
    sampling::{SampledToken, Sampling},
};
use model::Checkpoint;
use serde_json::json;

/// Minimum margin for comparing tokens; the logits on several ranks differ from those on one rank
/// by far less.
const SURE_MARGIN: f32 = 1e-3;

fn models() -> Vec<(Checkpoint, Vec<usize>)> {
    let eight = json!({
        "hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 301
    });
    let four = |architecture: &str, name: &str, tied: bool| {
        dummy_model(json!({
            "architectures": [architecture], "model_type": name, "tie_word_embeddings": tied,
            "num_attention_heads": 8, "num_key_value_heads": 4
        }))
    };
    vec![
        (dummy_model(eight), vec![2, 4]),
        (four("Qwen2ForCausalLM", "qwen2", true), vec![2, 4]),
        (four("Qwen3ForCausalLM", "qwen3", false), vec![4]),
        // Two KV groups.
        (
            dummy_model(json!({
                "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
                "use_sliding_window": true, "sliding_window": 24,
                "layer_types": ["sliding_attention", "full_attention"]
            })),
            vec![2],
        ),
        // Layers with linear attention.
        (hybrid_model(), vec![2]),
        // Ranks have whole experts: no number of ranks divides their width.
        (
            dummy_model(json!({
                "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                "num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 8,
                "num_experts_per_tok": 3, "moe_intermediate_size": 43
            })),
            vec![2, 4],
        ),
    ]
}

/// Returns requests with every sampling rule; some prompts share a prefix.
fn requests(checkpoint: &Checkpoint, salt: &str) -> Vec<NewSequence> {
    let vocabulary = checkpoint.config().vocab_size as u32;
    let warm = |seed| Sampling { temperature: 0.8, seed, ..Sampling::greedy() };
    let samplings = [
        Sampling { logprobs: Some(2), ..Sampling::greedy() },
        warm(1),
        Sampling { top_k: 7, logprobs: Some(3), ..warm(2) },
        Sampling { top_p: 0.7, min_p: 0.01, ..warm(3) },
        Sampling { repetition_penalty: 1.2, frequency_penalty: 0.1, ..Sampling::greedy() },
        Sampling { stop_token_ids: vec![3, 9], min_tokens: 30, top_k: 40, top_p: 0.9, ..warm(4) },
    ];
    let request = |(number, sampling): (usize, Sampling)| {
        let length = 21 + number * 9;
        let tokens = (0..length).map(|at| match at < 20 {
            true => (at * 7 % 19) as u32,
            false => (at * (number + 3)) as u32 % vocabulary,
        });
        let sequence =
            sequence(number as u128, SequenceKind::Compute, tokens.collect(), Instant::now());
        NewSequence {
            sampling,
            max_tokens: 40,
            ignore_stop_tokens: true,
            cache_salt: salt.to_owned(),
            ..sequence
        }
    };
    samplings.into_iter().enumerate().map(request).collect()
}

fn tokens_of(outcomes: HashMap<SequenceId, Outcome>) -> Vec<Outcome> {
    let mut outcomes: Vec<_> = outcomes.into_iter().collect();
    outcomes.sort_by_key(|(id, _)| *id);
    outcomes.into_iter().map(|(_, outcome)| Outcome { cached_tokens: 0, ..outcome }).collect()
}

#[test]
fn scheduling_changes_no_bit_on_several_ranks() {
    for (checkpoint, counts) in models() {
        // Blocks of a recurrent state.
        let state = checkpoint.config().kv_groups(KvFormat::F32).state_entries() as u32;
        let blocks = 64 + 20 * state;
        for of in counts {
            let config = |slots, step_tokens, blocks, depth| {
                unbounded_waits(limits_of(&checkpoint, slots, step_tokens, blocks, depth))
            };
            // One request at a time, without chunks.
            let (mut alone, _) = engine_of_ranks(&checkpoint, config(1, 256, 64, 1), of);
            let expected: Vec<Outcome> = requests(&checkpoint, "")
                .into_iter()
                .flat_map(|new| {
                    let salted = NewSequence { cache_salt: new.id.0.to_string(), ..new };
                    tokens_of(run(&mut alone, vec![salted]))
                })
                .collect();
            assert!(expected.iter().all(|outcome| outcome.tokens.len() == 40));

            let (mut all, arena) = engine_of_ranks(&checkpoint, config(8, 256, blocks, 2), of);
            assert_eq!(tokens_of(run(&mut all, requests(&checkpoint, ""))), expected);
            let again = run(&mut all, requests(&checkpoint, ""));
            assert!(again.values().all(|outcome| outcome.cached_tokens >= 16));
            assert_eq!(tokens_of(again), expected);
            assert!((0..blocks).all(|block| arena.pins(BlockId(block)).expect("in range") == 0));

            let chunked = SchedulerConfig { chunk_tokens: 5, ..config(8, 16, blocks, 2) };
            let (mut chunked, _) = engine_of_ranks(&checkpoint, chunked, of);
            assert_eq!(tokens_of(run(&mut chunked, requests(&checkpoint, ""))), expected);

            let (mut few_blocks, _) =
                engine_of_ranks(&checkpoint, config(8, 256, 16 + 2 * state, 2), of);
            assert_eq!(tokens_of(run(&mut few_blocks, requests(&checkpoint, ""))), expected);
            assert!(few_blocks.scheduler().preemptions() > 0, "no sequence was preempted");

            if state > 0 {
                continue;
            }
            let drafts = config(8, 256, 64, 2);
            let limits = ExecutorLimits { speculation: Some(speculation(4, 64)), ..drafts.limits };
            let drafts = SchedulerConfig { limits, ..drafts };
            let (mut drafts, _) = engine_of_ranks(&checkpoint, drafts, of);
            assert_eq!(tokens_of(run(&mut drafts, requests(&checkpoint, ""))), expected);
            assert!(drafts.take_speculated().drafted > 0, "no token was drafted");
        }
    }
}

/// Compares two greedy outputs with two log-probabilities each, and returns how many tokens were
/// compared: after the first uncertain token the outputs may differ.
fn compare(found: &[SampledToken], expected: &[SampledToken]) -> usize {
    let mut compared = 0;
    for (found, expected) in found.iter().zip(expected) {
        let logprobs = expected.logprobs.as_ref().expect("log probabilities were requested");
        if logprobs.top[0].1 - logprobs.top[1].1 < SURE_MARGIN {
            break;
        }
        assert_eq!(found.id, expected.id);
        let chosen = found.logprobs.as_ref().expect("log probabilities were requested").chosen;
        assert!((chosen - logprobs.chosen).abs() < SURE_MARGIN / 4.0);
        compared += 1;
    }
    compared
}

#[test]
fn ranks_give_the_tokens_of_one_rank_where_the_margin_suffices() {
    let mut compared = 0;
    for (checkpoint, counts) in models() {
        let config = || unbounded_waits(limits_of(&checkpoint, 8, 256, 64, 2));
        let (mut one, _) = engine(&checkpoint, config(), 1);
        let expected = run(&mut one, requests(&checkpoint, ""));
        for of in counts {
            let (mut several, _) = engine_of_ranks(&checkpoint, config(), of);
            let found = run(&mut several, requests(&checkpoint, ""));
            let id = SequenceId(0);
            compared += compare(&found[&id].tokens, &expected[&id].tokens);
        }
    }
    assert!(compared > 100, "{compared}");
}

#[test]
fn kv_transfers_between_any_numbers_of_ranks() {
    let heads = json!({
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 301
    });
    check_transfers(&dummy_model(heads));
}

#[test]
fn kv_of_two_groups_transfers_between_any_numbers_of_ranks() {
    check_transfers(&dummy_model(json!({
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 301,
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "use_sliding_window": true, "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention"]
    })));
}

/// Prefills on some number of ranks and decodes on another; whole blocks are transferred.
fn check_transfers(checkpoint: &Checkpoint) {
    let config = || {
        let config = unbounded_waits(limits_of(checkpoint, 8, 64, 64, 2));
        SchedulerConfig { chunk_tokens: 16, ..config }
    };
    let asked = || {
        (0..5_u32).map(|number| {
            let tokens = (0..20 + number * 13).map(|at| (at * (number + 5) + number) % 301);
            let id = u128::from(number);
            let new = sequence(id, SequenceKind::Compute, tokens.collect(), Instant::now());
            let sampling = Sampling { logprobs: Some(2), ..Sampling::greedy() };
            NewSequence { sampling, max_tokens: 30, ignore_stop_tokens: true, ..new }
        })
    };
    let (mut one, _) = engine(checkpoint, config(), 1);
    let expected = run(&mut one, asked().collect());
    let kinds = [
        ((1, Kv::Shared), (2, Kv::Shared)),
        ((2, Kv::Shared), (1, Kv::Shared)),
        ((2, Kv::PerRank), (4, Kv::PerRank)),
        ((4, Kv::Shared), (2, Kv::PerRank)),
        ((4, Kv::PerRank), (1, Kv::PerRank)),
        ((1, Kv::PerRank), (4, Kv::Shared)),
        ((2, Kv::Shared), (2, Kv::PerRank)),
    ];
    let mut compared = 0;
    for ((readers, from), (writers, to)) in kinds {
        let (prefill, sent) = engine_of_ranks_with(checkpoint, config(), readers, from);
        let (decode, received) = engine_of_ranks_with(checkpoint, config(), writers, to);
        let mut pair = Pair::new(prefill, decode, (sent, received));
        asked().for_each(|new| pair.submit(new));
        pair.run();
        let same = (readers == writers).then(|| {
            let (mut alone, _) = engine_of_ranks(checkpoint, config(), readers);
            run(&mut alone, asked().collect())
        });
        for id in (0..5).map(SequenceId) {
            let answer = &pair.answers[&id];
            assert_eq!((&answer.failure, answer.tokens.len()), (&None, 30));
            assert!(answer.blocks_moved > 0);
            compared += compare(&answer.tokens, &expected[&id].tokens);
            if let Some(same) = &same {
                assert_eq!(answer.tokens, same[&id].tokens, "{readers} ranks, to the bit");
            }
        }
        pair.assert_all_returned();
    }
    assert!(compared > 200, "{compared}");
}

fn attempt(id: u128, golden: &GoldenRun) -> NewSequence {
    NewSequence {
        max_tokens: golden.output_ids.len() as u32,
        ignore_stop_tokens: true,
        ..sequence(id, SequenceKind::Compute, golden.prompt_ids.clone(), Instant::now())
    }
}

#[test]
fn smollm2_on_three_ranks_gives_the_golden_tokens() {
    let checkpoint = real_model();
    // 62 MiB of KV in shared memory.
    let limits = limits_of(&checkpoint, 8, 512, 88, 2);
    let limits = ExecutorLimits { speculation: Some(speculation(8, 64)), ..limits };
    let config = SchedulerConfig { chunk_tokens: 128, ..unbounded_waits(limits) };
    let (mut engine, _) = engine_of_ranks(&checkpoint, config, 3);
    let mut sure_tokens = 0;
    for first_id in [0, 10] {
        let all = (first_id..).zip(golden()).map(|(id, golden)| attempt(id, &golden)).collect();
        let outcomes = run(&mut engine, all);
        for (id, golden) in (first_id..).zip(golden()) {
            let outcome = &outcomes[&SequenceId(id)];
            assert_eq!((&outcome.failure, outcome.finish), (&None, Some(FinishReason::Length)));
            let sure = golden.margins.iter().take_while(|margin| **margin >= SURE_MARGIN).count();
            assert_eq!(outcome.ids()[..sure], golden.output_ids[..sure], "{}", golden.name);
            assert_eq!(outcome.cached_tokens > 0, first_id > 0 && golden.prompt_ids.len() > 16);
            sure_tokens += sure;
        }
    }
    assert!(sure_tokens > 100, "{sure_tokens}");
}

fn first_step(token_count: u32) -> StepPlan {
    let (slot, generation) = (Slot(0), 0);
    let admitted = AdmittedRow {
        slot,
        generation,
        tokens: (0..10).collect(),
        prompt_len: 10,
        computed: 0,
        blocks: vec![BlockId(0)],
        sampling: Sampling::greedy(),
        constrained: false,
        adapter: None,
    };
    let samples = token_count == 10;
    let row = RowPlan { slot, generation, token_count, samples, drafts_max: 0 };
    StepPlan { admitted: vec![admitted], rows: vec![row], ..StepPlan::default() }
}

const WAIT: Duration = Duration::from_secs(60);

fn fault(outcome: Result<Option<engine::plan::StepResult>, ExecutorError>) -> CpuGroupError {
    match outcome {
        Err(ExecutorError::Group { step_id: 0, source }) => source,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_dead_late_or_diverged_rank_fails_the_step_of_the_others() {
    let checkpoint = dummy_model(json!({}));
    let limits = limits_of(&checkpoint, 2, 16, 8, 2);
    let start = |timeout| AllRanks::start(&checkpoint, limits, 2, Kv::Shared, timeout).0.ranks;

    let mut ranks = start(WAIT);
    ranks[0].launch(first_step(10)).expect("launching waits for nobody");
    drop(ranks.pop());
    let error = fault(ranks[0].collect(WAIT));
    assert_eq!(error, CpuGroupError::Left { rank: 1, of: 2, exchange: 1 });
    // A later call returns the error instead of blocking.
    assert!(matches!(ranks[0].collect(WAIT), Err(ExecutorError::Stopped { .. })));

    let timeout = Duration::from_millis(50);
    let mut ranks = start(timeout);
    ranks[0].launch(first_step(10)).expect("launching waits for nobody");
    let error = fault(ranks[0].collect(WAIT));
    assert_eq!(error, CpuGroupError::Late { rank: 1, of: 2, exchange: 1, timeout });
    // The late rank detects in its next exchange that the other rank has left.
    ranks[1].launch(first_step(10)).expect("launching waits for nobody");
    let error = fault(ranks[1].collect(WAIT));
    assert_eq!(error, CpuGroupError::Left { rank: 0, of: 2, exchange: 2 });

    let mut ranks = start(WAIT);
    for (rank, tokens) in ranks.iter_mut().zip([10, 9]) {
        rank.launch(first_step(tokens)).expect("launching waits for nobody");
    }
    for (number, rank) in ranks.iter_mut().enumerate() {
        let error = fault(rank.collect(WAIT));
        let is_mismatch = matches!(error, CpuGroupError::Mismatch { rank, .. } if rank != number);
        assert!(is_mismatch, "{error}");
    }
}
