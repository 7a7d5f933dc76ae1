//! KV groups: models whose layers have sliding windows. Blocks behind a window are released and
//! never read, and the tokens are those of an engine that keeps the KV of all tokens.

mod common;

use std::{
    collections::HashMap,
    num::NonZeroUsize,
    time::{Duration, Instant},
};

use common::{
    cpu::{Outcome, dummy_model, engine, engine_with_groups, limits_of, pair, run, run_with},
    family_tokens, limits,
    node::Node,
    sequence, unbounded_waits,
};
use engine::{
    SchedulerConfig,
    event::{NewSequence, SequenceId, SequenceKind},
    executor::{Executor, ExecutorLimits},
};
use kernels::{BLOCK_TOKENS, KvFormat, KvGroups, sampling::Sampling};
use model::Checkpoint;
use serde_json::json;

/// Returns models with one group, two groups of alternating layers, and three groups.
fn models() -> [(Checkpoint, usize); 3] {
    let qwen2 = |layers: &[usize]| {
        let kind = |&is_full| if is_full == 1 { "full_attention" } else { "sliding_attention" };
        dummy_model(json!({
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
            "num_hidden_layers": layers.len(), "use_sliding_window": true, "sliding_window": 40,
            "layer_types": layers.iter().map(kind).collect::<Vec<_>>(),
        }))
    };
    let mistral = json!({
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 40
    });
    [(dummy_model(mistral), 1), (qwen2(&[0, 1, 0, 1]), 2), (qwen2(&[0, 0, 1]), 3)]
}

/// Returns sequences of prompts up to four windows long that share prefixes.
fn requests(count: u128) -> Vec<NewSequence> {
    let request = |id: u128| {
        let tokens = family_tokens(id as u32 % 2, 20 + 37 * id as usize % 170);
        let sampling = Sampling { logprobs: Some(1), ..Sampling::greedy() };
        let new = sequence(id, SequenceKind::Compute, tokens, Instant::now());
        NewSequence { sampling, max_tokens: 60, ignore_stop_tokens: true, ..new }
    };
    (0..count).map(request).collect()
}

/// Returns the outcomes on an engine that keeps the KV of all tokens in all layers.
fn reference(model: &Checkpoint, all: &[NewSequence]) -> HashMap<SequenceId, Outcome> {
    let limits = limits_of(model, 4, 64, 200, 1);
    let (mut engine, _) = engine(model, unbounded_waits(limits), 1);
    run(&mut engine, all.to_vec())
}

fn tokens_of(outcomes: &HashMap<SequenceId, Outcome>, id: SequenceId) -> Vec<(u32, String)> {
    let tokens = &outcomes[&id].tokens;
    assert!(!tokens.is_empty(), "{:?}", outcomes[&id]);
    tokens.iter().map(|token| (token.id, format!("{:?}", token.logprobs))).collect()
}

#[test]
fn released_blocks_are_poisoned_and_never_read() {
    let mut preemptions = 0;
    for (model, groups) in models() {
        let all = requests(9);
        let expected = reference(&model, &all);
        // Small pools, so that blocks are used again and sequences are preempted.
        for (blocks, depth, prefix_cache) in [(40, 1, false), (17, 2, false), (60, 2, true)] {
            let limits = limits_of(&model, 4, 48, blocks * groups as u32, depth);
            let config = SchedulerConfig { prefix_cache, ..unbounded_waits(limits) };
            let (mut engine, arena) = engine_with_groups(&model, config);
            assert_eq!(engine.executor().kv_groups().count(), groups);
            let mut poisoned = 0;
            let outcomes = run_with(&mut engine, all.clone(), |engine| {
                engine.scheduler().check();
                for block in engine.scheduler().free_blocks() {
                    let mut block = arena.write(block).expect("no step uses a free block");
                    // All bits set is a NaN.
                    block.host_view_mut().expect("in host memory").fill(0xff);
                    poisoned += 1;
                }
            });
            assert!(poisoned > 0);
            for new in &all {
                assert_eq!(tokens_of(&outcomes, new.id), tokens_of(&expected, new.id));
            }
            preemptions += engine.scheduler().preemptions();
            let hits = outcomes.values().filter(|outcome| outcome.cached_tokens > 40).count();
            assert!(!prefix_cache || hits > 0, "no hit is longer than the window");
        }
    }
    assert!(preemptions > 0, "no sequence was preempted");
}

#[test]
fn transfer_sends_only_blocks_in_windows() {
    for (model, groups) in models() {
        let all = requests(9);
        let expected = reference(&model, &all);
        let config = unbounded_waits(limits_of(&model, 4, 48, 40 * groups as u32, 2));
        let mut pair = pair(&model, config);
        all.iter().for_each(|new| pair.submit(new.clone()));
        pair.run();
        let list = model.config().kv_groups(KvFormat::F32);
        for new in &all {
            let answer = &pair.answers[&new.id];
            let ids: Vec<_> = tokens_of(&expected, new.id).into_iter().map(|it| it.0).collect();
            assert_eq!(answer.ids(), ids);
            let len = new.tokens.len();
            let sent = list.sent(len, 0..len.div_ceil(BLOCK_TOKENS)).count();
            let cached = list.sent(len, 0..answer.cached_at_decode as usize / BLOCK_TOKENS);
            if answer.blocks_moved > 0 {
                assert_eq!(answer.blocks_moved as usize, sent - cached.count());
            }
        }
        assert!(pair.answers.values().any(|answer| answer.blocks_moved > 0));
        pair.assert_all_returned();
    }
}

#[test]
fn equal_prompt_hits_the_prefix_cache_of_a_decode_node_whichever_length_it_has() {
    let groups = KvGroups::of_windows(&[None, NonZeroUsize::new(32)]);
    for len in 62..=66 {
        let config = unbounded_waits(limits(4, 64, 40, 1));
        let mut node = Node::with_groups(config, None, groups.clone());
        let received = sequence(1, SequenceKind::Receive, family_tokens(1, len), node.start);
        let equal = NewSequence {
            id: SequenceId(2),
            kind: SequenceKind::Compute,
            max_tokens: 1,
            ..received.clone()
        };
        node.arrive(NewSequence { max_tokens: 1, ..received });
        node.kv_arrives(SequenceId(1));
        node.arrive(equal);
        node.run();
        let computed: u32 = node.engine.take_records().iter().map(|record| record.tokens).sum();
        assert_eq!(computed as usize, (len - 1) % BLOCK_TOKENS + 1, "{len} tokens");
        node.assert_all_returned();
    }
}

/// Returns the blocks of running sequences of `tokens` prompt tokens.
fn held_blocks(groups: KvGroups, tokens: usize) -> u32 {
    let sequence_tokens = tokens as u32 + 100;
    let blocks = 4 * (sequence_tokens.div_ceil(16)) * groups.count() as u32;
    let limits = ExecutorLimits { sequence_tokens, ..limits(4, 512, blocks, 1) };
    let config = SchedulerConfig { prefix_cache: false, ..unbounded_waits(limits) };
    let mut node = Node::with_groups(config, None, groups);
    for id in 1..=2 {
        let new = sequence(id, SequenceKind::Compute, family_tokens(id as u32, tokens), node.start);
        node.arrive(NewSequence { max_tokens: 90, ignore_stop_tokens: true, ..new });
    }
    while (1..=2).any(|id| node.received(SequenceId(id)) < 20) {
        node.turn_for(Duration::from_secs(10));
    }
    let load = node.engine.scheduler().load();
    assert_eq!(load.running, 2);
    load.blocks_held
}

/// As in gpt-oss: alternating layers with a window of 128 tokens. With two groups a block has half
/// the bytes of a block with one group.
#[test]
fn two_groups_hold_nearly_twice_the_tokens_in_the_same_memory() {
    let alternating = KvGroups::of_windows(&[NonZeroUsize::new(128), None].repeat(12));
    for (tokens, ratio_min) in [(1024, 1.7), (8192, 1.9)] {
        let one = held_blocks(KvGroups::whole(24), tokens);
        let two = held_blocks(alternating.clone(), tokens);
        let ratio = 2.0 * f64::from(one) / f64::from(two);
        println!("{tokens} tokens: {one} blocks of one group, {two} of two, ratio {ratio:.3}");
        assert!(ratio >= ratio_min, "{ratio}");
    }
}
