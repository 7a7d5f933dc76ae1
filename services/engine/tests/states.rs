//! Models with a state for each sequence: a prefix is cached where its state is, and sequences that
//! continue from a cached state get the same tokens.

mod common;

use common::{family_tokens, limits, node::Node, sequence, unbounded_waits};
use engine::{
    SchedulerConfig,
    event::{NewSequence, SequenceId, SequenceKind},
};
use kernels::KvGroups;

/// Blocks of a state.
const STATE: usize = 3;

fn node(blocks: u32) -> Node {
    let config = unbounded_waits(limits(4, 64, blocks, 2));
    Node::with_groups(config, None, KvGroups::default().with_state_entries(STATE))
}

fn request(id: u128, node: &Node, tokens: Vec<u32>, max_tokens: u32) -> NewSequence {
    let new = sequence(id, SequenceKind::Compute, tokens, node.now());
    NewSequence { max_tokens, ignore_stop_tokens: true, ..new }
}

/// Runs a request alone, and returns the number of its tokens that were cached and its answer.
fn run(node: &mut Node, new: NewSequence) -> (u32, Vec<u32>) {
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
        let first = request(1, &node, tokens.clone(), 4);
        assert_eq!(run(&mut node, first).0, 0);
        let again = request(2, &node, tokens, 4);
        assert_eq!(run(&mut node, again).0, cached, "{len} tokens");
        node.assert_all_returned();
    }
}

#[test]
fn the_next_turn_is_cached_up_to_the_last_full_block_of_the_answer() {
    let mut node = node(80);
    let mut tokens = family_tokens(1, 50);
    for (turn, cached) in [(1, 0), (2, 80), (3, 128)] {
        let new = request(turn, &node, tokens.clone(), 40);
        let (found, answer) = run(&mut node, new);
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
        let new = request(id, &node, prompt(id as u32), 2);
        assert_eq!(run(&mut node, new).0, cached, "prompt {id}");
    }
    node.assert_all_returned();
}

#[test]
fn a_state_is_evicted_as_a_whole() {
    let mut node = node(24);
    for id in 1..40 {
        // Prompts of three families in turn evict each other's blocks and states.
        let new = request(id, &node, family_tokens(id as u32 % 3, 60 + id as usize), 3);
        run(&mut node, new);
    }
    node.assert_all_returned();
}

#[test]
fn preempted_sequences_continue_from_their_last_state() {
    let mut node = node(40);
    let ids: Vec<_> = (1..=4).map(SequenceId).collect();
    for id in &ids {
        let new = request(id.0, &node, family_tokens(id.0 as u32, 40), 110);
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
        let new = request(id, &node, family_tokens(1, 70), 20);
        assert_eq!(run(&mut node, new).0, 0);
    }
    node.assert_all_returned();
}
