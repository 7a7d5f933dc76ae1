//! Models with a state for each sequence: a prefix is cached where its state is, and sequences that
//! continue from a cached state get the same tokens.

mod common;

use std::{collections::HashMap, time::Instant};

use common::{
    cpu::{Outcome, engine_with_groups, hybrid_model, limits_of, pair, run, run_with},
    family_tokens, limits,
    node::Node,
    sequence, unbounded_waits,
};
use engine::{
    SchedulerConfig,
    event::{CacheChange, NewSequence, SequenceId, SequenceKind},
    executor::Executor,
};
use kernels::{KvGroups, sampling::Sampling};

/// Blocks of a state.
const STATE: usize = 3;

fn node(blocks: u32) -> Node {
    let config = unbounded_waits(limits(4, 64, blocks, 2));
    Node::with_groups(config, None, KvGroups::default().with_state_entries(STATE))
}

fn compute(id: u128, node: &Node, tokens: Vec<u32>, max_tokens: u32) -> NewSequence {
    let new = sequence(id, SequenceKind::Compute, tokens, node.now());
    NewSequence { max_tokens, ignore_stop_tokens: true, ..new }
}

/// Runs a request alone, and returns the number of its tokens that were cached and its answer.
fn run_alone(node: &mut Node, new: NewSequence) -> (u32, Vec<u32>) {
    let id = new.id;
    node.arrive(new);
    node.run();
    assert!(node.finished(id));
    (node.cached_tokens(id), node.answer(id))
}

#[test]
fn a_prompt_that_was_computed_before_is_cached_up_to_its_last_full_block() {
    for (len, cached) in [(100, 96), (96, 80), (97, 96), (17, 16), (16, 0), (5, 0)] {
        let mut node = node(80);
        let tokens = family_tokens(1, len);
        let first = compute(1, &node, tokens.clone(), 4);
        assert_eq!(run_alone(&mut node, first).0, 0);
        let again = compute(2, &node, tokens, 4);
        assert_eq!(run_alone(&mut node, again).0, cached, "{len} tokens");
        node.assert_all_returned();
    }
}

#[test]
fn the_next_turn_is_cached_up_to_the_last_full_block_of_the_answer() {
    let mut node = node(80);
    let mut tokens = family_tokens(1, 50);
    for (turn, cached) in [(1, 0), (2, 80), (3, 128)] {
        let new = compute(turn, &node, tokens.clone(), 40);
        let (found, answer) = run_alone(&mut node, new);
        assert_eq!(found, cached, "turn {turn}");
        // The last token of an answer is not computed.
        tokens.extend(answer);
        tokens.extend(family_tokens(9, 10));
    }
    node.assert_all_returned();
}

#[test]
fn a_third_prompt_is_cached_up_to_where_the_first_two_differ() {
    let mut node = node(120);
    let prompt = |family| [family_tokens(1, 70), family_tokens(family, 50)].concat();
    for (id, cached) in [(2, 0), (3, 0), (4, 64), (5, 64)] {
        let new = compute(id, &node, prompt(id as u32), 2);
        assert_eq!(run_alone(&mut node, new).0, cached, "prompt {id}");
    }
    node.assert_all_returned();
}

/// A router finds the longest hit by the last key of a prompt that it knows.
#[test]
fn routers_know_the_blocks_after_which_a_state_is_cached() {
    let mut node = node(120);
    let prompt = |family| [family_tokens(1, 70), family_tokens(family, 50)].concat();
    for id in 2..5 {
        let new = compute(id, &node, prompt(id as u32), 2);
        run_alone(&mut node, new);
    }
    let mut known = node.engine.scheduler().cached_hashes();
    // Each prompt's end, and where they part.
    assert_eq!(known.len(), 4);
    let mut added = Vec::new();
    for change in node.engine.scheduler_mut().take_cache_changes() {
        let CacheChange::Added(key) = change else { panic!("{change:?}") };
        added.push(key);
    }
    known.sort_unstable();
    added.sort_unstable();
    assert_eq!(added, known);
}

#[test]
fn a_state_is_evicted_as_a_whole() {
    let mut node = node(24);
    for id in 1..40 {
        // Prompts of three families in turn evict each other's blocks and states.
        let new = compute(id, &node, family_tokens(id as u32 % 3, 60 + id as usize), 3);
        run_alone(&mut node, new);
    }
    let changes = node.engine.scheduler_mut().take_cache_changes();
    let known = node.engine.scheduler().cached_hashes();
    // Changes of one key cancel, so only states that are still cached are left.
    assert!(changes.iter().all(|it| matches!(it, CacheChange::Added(key) if known.contains(key))));
    assert!(known.len() < 39, "no state was evicted");
    node.assert_all_returned();
}

/// The node compares every token with those of a sequence alone.
#[test]
fn preempted_sequences_give_the_same_tokens() {
    let mut node = node(40);
    let ids: Vec<_> = (1..=4).map(SequenceId).collect();
    for id in &ids {
        let new = compute(id.0, &node, family_tokens(id.0 as u32, 40), 110);
        node.arrive(new);
    }
    node.run();
    assert!(node.engine.scheduler().preemptions() > 0);
    assert!(ids.iter().all(|id| node.finished(*id)));
    node.assert_all_returned();
}

#[test]
fn without_a_prefix_cache_nothing_is_cached() {
    let config = unbounded_waits(limits(4, 64, 80, 2));
    let config = SchedulerConfig { prefix_cache: false, ..config };
    let groups = KvGroups::default().with_state_entries(STATE);
    let mut node = Node::with_groups(config, None, groups);
    for id in 1..4 {
        let new = compute(id, &node, family_tokens(1, 70), 20);
        assert_eq!(run_alone(&mut node, new).0, 0);
    }
    node.assert_all_returned();
}

/// Returns prompts of two families that share prefixes, some of them equal.
fn requests(count: u128) -> Vec<NewSequence> {
    let request = |id: u128| {
        let tokens = family_tokens(id as u32 % 2, 20 + 37 * (id as usize % 6) % 110);
        let sampling = Sampling { logprobs: Some(1), ..Sampling::greedy() };
        let new = sequence(id, SequenceKind::Compute, tokens, Instant::now());
        NewSequence { sampling, max_tokens: 40, ignore_stop_tokens: true, ..new }
    };
    (0..count).map(request).collect()
}

fn tokens_of(outcome: &Outcome) -> Vec<(u32, String)> {
    assert_eq!(outcome.tokens.len(), 40, "{outcome:?}");
    outcome.tokens.iter().map(|token| (token.id, format!("{:?}", token.logprobs))).collect()
}

/// Returns the tokens of each request alone, without a prefix cache.
fn reference(all: &[NewSequence]) -> HashMap<SequenceId, Vec<(u32, String)>> {
    let model = hybrid_model();
    let config = unbounded_waits(limits_of(&model, 1, 256, 60, 1));
    let config = SchedulerConfig { prefix_cache: false, ..config };
    let (mut engine, _) = engine_with_groups(&model, config);
    let mut of = |new: &NewSequence| tokens_of(&run(&mut engine, vec![new.clone()])[&new.id]);
    all.iter().map(|new| (new.id, of(new))).collect()
}

#[test]
fn cached_and_reused_states_change_no_bit() {
    let (model, all) = (hybrid_model(), requests(12));
    let expected = reference(&all);
    let (mut preemptions, mut hits) = (0, 0);
    for (blocks, depth, chunk_tokens) in [(200, 1, 48), (40, 2, 48), (26, 2, 7)] {
        let config = unbounded_waits(limits_of(&model, 4, 48, blocks, depth));
        let config = SchedulerConfig { chunk_tokens, ..config };
        let (mut engine, arena) = engine_with_groups(&model, config);
        assert!(engine.executor().kv_groups().state_entries() > 0);
        for _ in 0..2 {
            let outcomes = run_with(&mut engine, all.clone(), |engine| {
                engine.scheduler().check();
                for block in engine.scheduler().free_blocks() {
                    let mut block = arena.write(block).expect("no step uses a free block");
                    // All bits set is a NaN.
                    block.host_view_mut().expect("in host memory").fill(0xff);
                }
            });
            for (id, outcome) in &outcomes {
                assert_eq!(tokens_of(outcome), expected[id], "{id:?}, {blocks} blocks");
                hits += u32::from(outcome.cached_tokens > 0);
            }
        }
        preemptions += engine.scheduler().preemptions();
    }
    assert!(preemptions > 0 && hits > 12, "{preemptions} preemptions, {hits} hits");
}

#[test]
fn states_are_handed_over_with_the_kv() {
    let (model, all) = (hybrid_model(), requests(12));
    let expected = reference(&all);
    let config = unbounded_waits(limits_of(&model, 4, 48, 120, 2));
    let mut pair = pair(&model, config);
    // The second round finds KV and states on both nodes.
    for round in 0..2 {
        for new in &all {
            let id = SequenceId(new.id.0 + 100 * round);
            pair.submit(NewSequence { id, ..new.clone() });
        }
        pair.run();
    }
    let (mut moved, mut hits) = (0, 0);
    for new in &all {
        for round in 0..2 {
            let answer = &pair.answers[&SequenceId(new.id.0 + 100 * round)];
            let ids: Vec<_> = expected[&new.id].iter().map(|(id, _)| *id).collect();
            assert_eq!(answer.ids(), ids, "{:?} of round {round}", new.id);
            moved += u32::from(answer.blocks_moved > 0);
            hits += u32::from(round == 1 && answer.cached_at_prefill > 0);
        }
    }
    assert!(moved > 12 && hits > 0, "{moved} prompts were handed over, {hits} hits");
    pair.assert_all_returned();
}
