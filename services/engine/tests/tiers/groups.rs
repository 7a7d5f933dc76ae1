//! KV tiers of a model with several KV groups: one group without a window, and groups whose tokens
//! attend to 40 tokens.

use std::num::NonZeroUsize;

use kernels::{BLOCK_TOKENS, KvGroups};

use super::*;

const RECEIVE: SequenceKind = SequenceKind::Receive;

/// Returns the groups of `whole` layers without a window and `windowed` layers with one.
fn groups(whole: usize, windowed: usize) -> KvGroups {
    groups_of(whole, windowed, 40)
}

fn groups_of(whole: usize, windowed: usize, window: usize) -> KvGroups {
    let windowed = vec![NonZeroUsize::new(window); windowed];
    KvGroups::of_windows(&[vec![None; whole], windowed].concat())
}

/// Returns a node with room for one prompt of 90 tokens.
fn grouped(groups: KvGroups, admission: TierAdmission) -> Node {
    grouped_with(6, groups, TierConfig { admission, ..config(60) })
}

/// Returns a node with room for this many blocks of each group.
fn grouped_with(blocks: u32, groups: KvGroups, tiers: TierConfig) -> Node {
    let limits = limits(4, 64, blocks * groups.count() as u32, 1);
    let mut node = Node::with_groups(unbounded_waits(limits), Some(tiers), groups);
    node.recover(Vec::new(), true);
    node
}

/// Runs everything to its end. The copies advance after each step.
fn run_with_copies(node: &mut Node) -> u32 {
    while node.turn() != LoopOutcome::Idle {
        node.copy_all();
    }
    run(node)
}

/// Returns a sequence that generates this many tokens.
fn answered(id: u128, family: u32, len: usize, tokens: u32) -> NewSequence {
    let new = new(id, COMPUTE, family, len);
    NewSequence { max_tokens: tokens, ignore_stop_tokens: true, ..new }
}

#[test]
fn load_reads_the_blocks_in_windows_and_all_others() {
    for (groups, count) in [(groups(1, 1), 2), (groups(3, 2), 5), (groups(0, 1), 1)] {
        assert_eq!(groups.count(), count);
        let mut node = grouped(groups.clone(), TierAdmission::Always);
        assert_eq!(compute(&mut node, 1, 1, 70), 70);
        // The first group is saved whole.
        let needed = groups.needed(64, 0..4).count();
        let saved = if count == 1 { 4 } else { needed };
        assert_eq!(node.tier_stats().saved as usize, saved, "{groups}");
        assert_eq!(compute(&mut node, 2, 2, 90), 90, "evicts the first prompt");
        assert_eq!(compute(&mut node, 3, 1, 70), 6, "{groups}");
        let stats = node.tier_stats();
        assert_eq!((stats.loaded, stats.hits), (needed as u64, needed as u64), "{groups}");
        assert_eq!((stats.dropped, stats.failed, stats.damaged), (0, 0, 0));
        assert_eq!(node.loaded_tokens, [64], "{groups}");
        node.assert_all_returned();
    }
}

#[test]
fn prompt_that_ends_elsewhere_has_no_blocks_in_its_window_and_is_computed() {
    let mut node = grouped(groups(1, 1), TierAdmission::Always);
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 90);
    assert_eq!(compute(&mut node, 3, 1, 50), 50);
    assert_eq!(node.tier_stats().loaded, 0);
    // Now the windows of both ends are saved.
    compute(&mut node, 4, 2, 90);
    assert_eq!(compute(&mut node, 5, 1, 50), 2);
    node.assert_all_returned();
}

#[test]
fn load_with_a_damaged_block_in_a_window_computes_the_prompt() {
    for groups in [groups(1, 1), groups(3, 2)] {
        let mut node = grouped(groups, TierAdmission::Always);
        compute(&mut node, 1, 1, 70);
        compute(&mut node, 2, 2, 90);
        node.arrive(new(3, COMPUTE, 1, 70));
        node.run();
        assert!(node.copy(0, true), "the load is in flight");
        assert_eq!(run(&mut node), 70);
        assert_eq!(node.tier_stats().damaged, 1);
        assert_eq!(node.tier_stats().hits, 0);
        assert_eq!(node.loaded_tokens, [0]);
        node.assert_all_returned();
    }
}

#[test]
fn turn_after_a_hit_saves_its_windows_at_the_first_touch() {
    let mut node = grouped(groups(1, 1), TierAdmission::SecondTouch);
    compute(&mut node, 1, 1, 40);
    assert_eq!(node.tier_stats().saved, 0);
    assert_eq!(compute(&mut node, 2, 1, 70), 38, "two blocks are in the prefix cache");
    let saved = groups(1, 1).needed(64, 0..4).count() as u64;
    // Block 0 of the window before the hit occurs in both requests.
    assert_eq!(node.tier_stats().saved, saved + 1);
    compute(&mut node, 3, 2, 90);
    assert_eq!(compute(&mut node, 4, 1, 80), 16, "the next turn");
    node.assert_all_returned();
}

#[test]
fn answer_saves_the_windows_at_its_two_ends_and_no_block_between() {
    let mut node = grouped_with(12, groups(1, 1), config(60));
    node.arrive(answered(1, 1, 70, 100));
    run_with_copies(&mut node);
    // Ten full blocks without the window, and the blocks 1 to 3 and 7 to 9 of the other group.
    assert_eq!(node.tier_stats().saved, 10 + 3 + 3);
    node.assert_all_returned();
}

#[test]
fn window_of_a_prompt_is_saved_before_its_long_answer_evicts_it() {
    let mut node = grouped_with(12, groups(1, 1), config(60));
    node.arrive(answered(1, 1, 70, 100));
    // Its blocks and those that the answer takes are more than the node has.
    node.arrive(answered(2, 2, 30, 30));
    run_with_copies(&mut node);
    assert_eq!(node.engine.scheduler().preemptions(), 0);
    compute(&mut node, 3, 3, 180);
    assert_eq!(compute(&mut node, 4, 1, 70), 6);
    node.assert_all_returned();
}

/// The first window of the second prompt is the last window of the first one.
#[test]
fn windows_in_one_request_are_one_touch() {
    let second_touch = TierConfig { admission: TierAdmission::SecondTouch, ..config(60) };
    let mut node = grouped_with(12, groups(1, 1), second_touch);
    node.arrive(answered(1, 1, 70, 20));
    run_with_copies(&mut node);
    assert_eq!(node.tier_stats().saved, 0, "both windows have blocks of one request");
    node.arrive(answered(2, 1, 70, 20));
    run_with_copies(&mut node);
    // Five full blocks, and the blocks 1 to 4 of the other group.
    assert_eq!(node.tier_stats().saved, 5 + 4);
    node.assert_all_returned();
}

#[test]
fn preempted_sequence_resumes_by_a_load_of_its_windows() {
    let second_touch = TierConfig { admission: TierAdmission::SecondTouch, ..config(80) };
    let mut node = grouped_with(9, groups(1, 1), second_touch);
    (1..=2).for_each(|id| node.arrive(answered(id, id as u32, 60, 60)));
    run_with_copies(&mut node);
    assert!(node.engine.scheduler().preemptions() > 0);
    assert!(node.tier_stats().hits > 0, "{:?}", node.tier_stats());
    node.assert_all_returned();
}

#[test]
fn preempted_sequence_counts_its_windows_once() {
    let second_touch = TierConfig { admission: TierAdmission::SecondTouch, ..config(80) };
    let mut node = grouped_with(9, groups(1, 1), second_touch);
    (1..=2).for_each(|id| node.arrive(answered(id, id as u32, 60, 60)));
    while !node.finished(SequenceId(1)) {
        node.turn();
        // Nothing is saved because of the preemption.
        while node.copy(0, true) {}
    }
    assert!(node.engine.scheduler().preemptions() > 0 && node.tier_stats().failed > 0);
    run(&mut node);
    assert_eq!(node.tier_stats().saved, 0);
    node.assert_all_returned();
}

#[test]
fn probe_of_a_slow_tier_loads_two_blocks() {
    let mut node = grouped(groups(1, 1), TierAdmission::Always);
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 90);
    // The first load measures a slow disk: 100 ms a block. Computing a block takes 8 ms.
    node.copies_take(Duration::from_millis(100));
    assert_eq!(compute(&mut node, 3, 1, 70), 6);
    compute(&mut node, 4, 3, 90);
    assert_eq!(compute(&mut node, 5, 1, 70), 70);
    let needed = groups(1, 1).needed(64, 0..4).count() as u64;
    let stats = node.tier_stats();
    assert_eq!((stats.loaded, stats.refused), (needed, needed));
    compute(&mut node, 6, 4, 90);
    node.advance(Duration::from_secs(10));
    assert_eq!(compute(&mut node, 7, 1, 70), 70, "two blocks are not a window");
    assert_eq!((node.tier_stats().loaded, node.tier_stats().hits), (needed + 2, needed));
    assert_eq!(node.loaded_tokens, [64, 0]);
    node.assert_all_returned();
}

#[test]
fn decode_node_reserves_only_blocks_in_windows_and_loads_only_if_all_blocks_fit() {
    let mut node = grouped_with(12, groups(1, 1), config(60));
    compute(&mut node, 1, 1, 100);
    node.engine.scheduler_mut().reset_prefix_cache();
    // 7 + 4 of 14 blocks. After the first reservation 13 of 24 blocks are left.
    node.arrive(new(2, RECEIVE, 2, 100));
    node.arrive(new(3, RECEIVE, 1, 100));
    assert_eq!(node.receiving(), [SequenceId(2), SequenceId(3)]);
    assert_eq!(node.engine.scheduler().load().blocks_reserved, 22);
    assert_eq!(node.tier_stats().refused, 0);
    (2..=3).for_each(|id| node.kv_arrives(SequenceId(id)));
    run(&mut node);
    node.engine.scheduler_mut().reset_prefix_cache();
    node.arrive(new(4, RECEIVE, 1, 100));
    assert_eq!(run(&mut node), 4);
    assert_eq!(node.loaded_tokens, [96]);
    node.assert_all_returned();
}

#[test]
fn first_token_that_ends_the_request_on_a_decode_node_saves_both_windows() {
    let mut node = grouped(groups(1, 1), TierAdmission::Always);
    // An equal prompt hits at most three blocks, a later turn four.
    node.arrive(new(1, RECEIVE, 1, 64));
    node.kv_arrives(SequenceId(1));
    assert!(node.finished(SequenceId(1)));
    run(&mut node);
    compute(&mut node, 2, 2, 90);
    assert_eq!(compute(&mut node, 3, 1, 90), 26);
    compute(&mut node, 4, 2, 90);
    assert_eq!(compute(&mut node, 5, 1, 64), 16);
    node.assert_all_returned();
}

/// The windows of the branches have the last block of this window only.
#[test]
fn branches_from_the_end_of_one_prompt_keep_its_window() {
    // The blocks of the prompt and of two branches.
    let mut node = grouped_with(8, groups(1, 1), config(7 + 2 * 4));
    compute(&mut node, 1, 1, 70);
    for branch in 2..8_u32 {
        node.engine.scheduler_mut().reset_prefix_cache();
        let mut new = new(branch.into(), COMPUTE, 1, 104);
        new.tokens[64..].fill(branch);
        node.arrive(new);
        assert_eq!(run(&mut node), 40, "branch {branch}");
    }
    node.assert_all_returned();
}

/// The window is whole blocks. So the token after a prompt of such a length attends to one block
/// less than the first token that an equal prompt computes.
#[test]
fn equal_prompt_hits_whichever_length_it_has() {
    for (kind, len) in [(COMPUTE, 63), (COMPUTE, 64), (RECEIVE, 63), (RECEIVE, 64), (RECEIVE, 65)] {
        let mut node = grouped(groups_of(1, 1, 32), TierAdmission::Always);
        node.arrive(new(1, kind, 1, len));
        node.kv_arrives(SequenceId(1));
        run(&mut node);
        let computed = (len - 1) as u32 % BLOCK_TOKENS as u32 + 1;
        assert_eq!(compute(&mut node, 2, 1, len), computed, "{len} tokens, from the prefix cache");
        compute(&mut node, 3, 2, 90);
        assert_eq!(compute(&mut node, 4, 1, len), computed, "{len} tokens, by a load");
        node.assert_all_returned();
    }
}

#[test]
fn sequence_holds_the_window_of_an_equal_prompt_at_its_first_token() {
    // The 65th token takes two blocks.
    for (len, more) in [(62, 0), (63, 0), (64, 2)] {
        let mut node = grouped(groups_of(1, 1, 32), TierAdmission::Always);
        node.arrive(answered(1, 1, len, 20));
        while node.received(SequenceId(1)) == 0 {
            node.turn();
        }
        // Three blocks of the window, of which an equal prompt computes the last one again.
        assert_eq!(node.engine.scheduler().load().blocks_held, 4 + 3 + more, "{len} tokens");
        run(&mut node);
    }
}

#[test]
fn routers_learn_the_blocks_of_the_first_group() {
    let mut node = grouped(groups(1, 1), TierAdmission::Always);
    compute(&mut node, 1, 1, 70);
    let scheduler = node.engine.scheduler_mut();
    assert_eq!(scheduler.tier_hashes(Tier::Disk, 100).len(), 4);
    assert_eq!(scheduler.take_tier_changes(Tier::Disk).len(), 4);
    // After a restart too.
    let mut restarted = grouped(groups(1, 1), TierAdmission::Always);
    let blocks = restarted.take_disk(&node);
    restarted.recover(blocks, true);
    assert_eq!(restarted.tier_stats().stored, 7);
    assert_eq!(restarted.engine.scheduler().tier_hashes(Tier::Disk, 100).len(), 4);
}
