//! KV tiers behind the prefix cache, one situation at a time, on the sim executor.

#[path = "../common/mod.rs"]
mod common;
mod groups;
mod sessions;

use std::time::{Duration, Instant};

use common::{
    family_tokens, limits, node::Node, scheduler, sequence, speculation, unbounded_waits,
};
use engine::{
    LoopOutcome, SchedulerConfig,
    event::{Action, InFlight, Input, NewSequence, SequenceId, SequenceKind},
    executor::ExecutorLimits,
    plan::{RowPlan, RowResult, StepPlan, StepResult, StepRun},
    tiers::{COPYING_MAX, Tier, TierAdmission, TierConfig, TierEvent},
};
use kernels::sampling::SampledToken;

const COMPUTE: SequenceKind = SequenceKind::Compute;

fn config(disk_slots: u32) -> TierConfig {
    let load_timeout = Duration::from_secs(1_000);
    TierConfig {
        admission: TierAdmission::Always,
        host: false,
        disk_slots,
        sessions: false,
        load_timeout,
    }
}

fn node(blocks: u32, tiers: TierConfig) -> Node {
    Node::with_tiers(unbounded_waits(limits(4, 64, blocks, 1)), tiers)
}

/// Returns a sequence of a family of prompts, with one generated token.
fn new(id: u128, kind: SequenceKind, family: u32, len: usize) -> NewSequence {
    let new = sequence(id, kind, family_tokens(family, len), Instant::now());
    NewSequence { max_tokens: 1, ..new }
}

/// Runs everything to its end and returns the number of computed tokens.
fn run(node: &mut Node) -> u32 {
    loop {
        node.run();
        if !node.copy(0, false) {
            return node.engine.take_records().iter().map(|record| record.tokens).sum();
        }
    }
}

fn compute(node: &mut Node, id: u128, family: u32, len: usize) -> u32 {
    node.arrive(new(id, COMPUTE, family, len));
    run(node)
}

#[test]
fn evicted_prefix_is_loaded_instead_of_computed() {
    let mut node = node(6, config(20));
    assert_eq!(compute(&mut node, 1, 1, 70), 70);
    assert_eq!(compute(&mut node, 2, 2, 90), 90, "evicts the first prompt");
    assert_eq!(compute(&mut node, 3, 1, 70), 6, "four blocks are loaded");
    let stats = node.tier_stats();
    assert_eq!((stats.saved, stats.loaded, stats.hits, stats.stored), (9, 4, 4, 9));
    assert_eq!((stats.dropped, stats.cancelled, stats.failed, stats.damaged), (0, 0, 0, 0));
    node.assert_all_returned();
}

#[test]
fn second_touch_saves_no_prompt_that_never_returns() {
    let second_touch = TierConfig { admission: TierAdmission::SecondTouch, ..config(40) };
    let mut node = node(6, second_touch);
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 90);
    assert_eq!(node.tier_stats().saved, 0);
    // The second occurrence is computed and saved.
    assert_eq!(compute(&mut node, 3, 1, 70), 70);
    assert_eq!(node.tier_stats().saved, 4);
    compute(&mut node, 4, 2, 90);
    assert_eq!(node.tier_stats().saved, 9);
    // A prompt that begins with a hit is a conversation that continues: its new block is saved at
    // once.
    assert_eq!(compute(&mut node, 5, 1, 90), 26);
    assert_eq!(node.tier_stats().saved, 10);
    node.assert_all_returned();
}

#[test]
fn resident_blocks_are_saved_when_they_are_touched_again() {
    let second_touch = TierConfig { admission: TierAdmission::SecondTouch, ..config(40) };
    let mut node = node(12, second_touch);
    compute(&mut node, 1, 1, 70);
    assert_eq!(compute(&mut node, 2, 1, 70), 6);
    assert_eq!(node.tier_stats().saved, 4);
}

#[test]
fn damaged_block_means_computing_from_there_on() {
    let mut node = node(6, config(20));
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 90);
    node.arrive(new(3, COMPUTE, 1, 70));
    node.run();
    assert!(node.copy(2, true), "the load ends after two of four blocks");
    assert_eq!(run(&mut node), 70 - 32);
    let stats = node.tier_stats();
    assert_eq!((stats.loaded, stats.damaged), (2, 1));
    assert_eq!(stats.saved, 10, "the damaged block is saved again");
    node.assert_all_returned();
}

#[test]
fn failed_save_is_no_hit() {
    let mut node = node(6, config(20));
    node.arrive(new(1, COMPUTE, 1, 70));
    node.run();
    while node.copy(0, true) {}
    assert_eq!((node.tier_stats().failed, node.tier_stats().stored), (4, 0));
    compute(&mut node, 2, 2, 90);
    assert_eq!(compute(&mut node, 3, 1, 70), 70);
}

#[test]
fn sequences_run_while_another_sequence_loads() {
    let mut node = node(13, config(20));
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 200);
    node.arrive(new(3, COMPUTE, 1, 70));
    node.arrive(new(4, COMPUTE, 3, 40));
    node.run();
    assert!(node.finished(SequenceId(4)) && !node.finished(SequenceId(3)));
    run(&mut node);
    assert!(node.finished(SequenceId(3)));
    node.assert_all_returned();
}

/// A copy of minutes looks like a copy without end.
#[test]
fn step_times_do_not_move_when_copies_do_not_end() {
    let steps = |mut node: Node| {
        for family in 1..=9 {
            let new = new(family.into(), COMPUTE, family, 90);
            node.arrive(NewSequence { max_tokens: 20, ..new });
            if family % 3 == 0 {
                node.run();
            }
        }
        assert!((1..=9).all(|id| node.finished(SequenceId(id))));
        let since = |at: Instant| at - node.start;
        let records = node.engine.take_records();
        let steps = records
            .iter()
            .map(|step| (since(step.plan.begin), since(step.collect.end), step.tokens));
        (steps.collect::<Vec<_>>(), node.copy(0, false))
    };
    let (without, _) = steps(Node::new(unbounded_waits(limits(4, 64, 120, 1))));
    let both = TierConfig { host: true, ..config(200) };
    for (tiers, host_slots) in [(config(200), 0), (both, 100)] {
        let mut node = node(120, tiers);
        if host_slots > 0 {
            node.grow_host(host_slots);
        }
        let (with, copies) = steps(node);
        assert!(copies, "copies are in flight");
        assert_eq!(with, without);
    }
}

#[test]
fn step_times_do_not_move_while_a_load_does_not_end() {
    let steps = |loads: bool| {
        let mut node = node(60, config(60));
        compute(&mut node, 1, 1, 70);
        node.engine.scheduler_mut().reset_prefix_cache();
        if loads {
            node.arrive(new(2, COMPUTE, 1, 70));
            node.run();
            assert_eq!(node.engine.scheduler().load().blocks_reserved, 5);
        }
        // With the load, these sequences take the four slots.
        for id in 3..=5 {
            let new = new(id, COMPUTE, id as u32, 90);
            node.arrive(NewSequence { max_tokens: 20, ..new });
            node.turn();
        }
        node.run();
        assert!((3..=5).all(|id| node.finished(SequenceId(id))));
        let since = |at: Instant| at - node.start;
        let records = node.engine.take_records();
        let steps = records
            .iter()
            .map(|step| (since(step.plan.begin), since(step.collect.end), step.tokens));
        let steps: Vec<_> = steps.collect();
        assert_eq!(node.engine.scheduler().load().blocks_reserved, if loads { 5 } else { 0 });
        run(&mut node);
        node.assert_all_returned();
        steps
    };
    assert_eq!(steps(true), steps(false));
}

#[test]
fn kv_that_arrives_is_offered_to_the_tiers_after_the_launch_of_the_next_step() {
    let mut node = node(20, config(20));
    let receive = new(1, SequenceKind::Receive, 1, 70);
    node.arrive(NewSequence { max_tokens: 4, ignore_stop_tokens: true, ..receive });
    node.run();
    node.kv_arrives(SequenceId(1));
    assert!(!node.copy(0, false), "a step waits to be launched");
    node.turn();
    assert!(node.copy(0, false));
    run(&mut node);
    node.assert_all_returned();
}

#[test]
fn load_that_takes_too_long_is_given_up_and_its_blocks_stay_reserved() {
    let load_timeout = Duration::from_secs(2);
    let mut node = node(13, TierConfig { load_timeout, ..config(20) });
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 200);
    node.arrive(new(3, COMPUTE, 1, 70));
    node.run();
    node.advance(load_timeout);
    node.run();
    assert!(node.finished(SequenceId(3)));
    assert_eq!(node.engine.take_records().iter().map(|it| it.tokens).sum::<u32>(), 70);
    assert_eq!(node.engine.scheduler().load().blocks_reserved, 5);
    node.copy_all();
    let stats = node.tier_stats();
    assert_eq!((stats.loaded, stats.hits), (4, 0), "no sequence takes the blocks");
    node.assert_all_returned();
}

/// Returns a node with two evicted prompts: families 1 and 3, of 70 tokens.
fn node_with_evicted_prompts(tiers: TierConfig) -> Node {
    let mut node = node(13, tiers);
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 3, 70);
    compute(&mut node, 3, 2, 200);
    node
}

#[test]
fn tier_whose_load_is_late_starts_no_other_load_until_the_load_ends() {
    let load_timeout = Duration::from_secs(2);
    let mut node = node_with_evicted_prompts(TierConfig { load_timeout, ..config(40) });
    node.arrive(new(4, COMPUTE, 1, 70));
    node.run();
    assert!(!node.finished(SequenceId(4)), "it waits for its load");
    node.advance(load_timeout / 4);
    node.arrive(new(5, COMPUTE, 3, 70));
    node.run();
    assert!(node.finished(SequenceId(5)), "it computes its prompt");
    assert_eq!(node.tier_stats().refused, 4);
    run(&mut node);
    compute(&mut node, 6, 2, 200);
    assert_eq!(compute(&mut node, 7, 3, 70), 6, "loads start again");
    node.assert_all_returned();
}

#[test]
fn load_that_fails_slowly_is_measured() {
    let mut node = node_with_evicted_prompts(config(40));
    node.copies_take(Duration::from_secs(100));
    node.arrive(new(4, COMPUTE, 1, 70));
    node.run();
    assert!(node.copy(0, true), "no block is intact");
    assert_eq!(run(&mut node), 70);
    assert_eq!(compute(&mut node, 5, 3, 70), 70, "another load would take as long");
    assert_eq!(node.tier_stats().refused, 4);
    node.assert_all_returned();
}

#[test]
fn load_of_a_node_that_was_idle_has_its_whole_time() {
    let load_timeout = Duration::from_secs(2);
    let mut node = node(13, TierConfig { load_timeout, ..config(20) });
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 200);
    node.advance(10 * load_timeout);
    node.arrive(new(3, SequenceKind::Receive, 1, 100));
    node.run();
    assert_eq!(node.receiving(), [], "the reservation waits for the load");
    assert!(node.copy(0, false));
    assert_eq!(node.engine.scheduler().load().blocks_reserved, 3, "four of seven are loaded");
    node.kv_arrives(SequenceId(3));
    run(&mut node);
    node.assert_all_returned();
}

#[test]
fn cancelled_sequence_frees_its_blocks_when_its_load_ends() {
    let mut node = node(13, config(20));
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 200);
    node.arrive(new(3, COMPUTE, 1, 70));
    node.run();
    node.abort(SequenceId(3));
    assert_eq!(node.engine.scheduler().load().blocks_reserved, 5);
    run(&mut node);
    assert_eq!((node.tier_stats().loaded, node.tier_stats().hits), (4, 0));
    node.assert_all_returned();
}

#[test]
fn admission_cancels_saves_whose_copies_have_not_begun_and_waits_for_one_copy() {
    let mut node = node(6, config(20));
    node.arrive(new(1, COMPUTE, 1, 95));
    node.run();
    // Five full blocks: one is being copied, the copies of three follow, and one waits in the core.
    assert_eq!(node.engine.scheduler().load().blocks_cached, 5);
    node.arrive(new(2, COMPUTE, 2, 90));
    node.run();
    for _ in 1..COPYING_MAX {
        assert!(node.copy(1, false), "a save ends without a copy");
        node.run();
    }
    assert!(!node.finished(SequenceId(2)), "the admission waits for the copy");
    assert!(node.copy(0, false));
    node.run();
    assert!(node.finished(SequenceId(2)));
    let stats = node.tier_stats();
    assert_eq!((stats.cancelled, stats.failed), (4, 0));
    run(&mut node);
    assert_eq!(node.tier_stats().saved, 1 + 5);
    node.assert_all_returned();
}

#[test]
fn running_row_that_needs_a_block_cancels_saves_whose_copies_have_not_begun() {
    let mut node = node(6, config(20));
    node.arrive(new(1, COMPUTE, 1, 95));
    node.run();
    // One of five full blocks is being copied, the copies of three follow. The row takes the other
    // two blocks of the node and needs a third one.
    let row = new(2, COMPUTE, 2, 15);
    node.arrive(NewSequence { max_tokens: 20, ignore_stop_tokens: true, ..row });
    node.run();
    assert!(!node.finished(SequenceId(2)), "the row waits for the copies");
    assert!(node.copy(1, false), "a save ends without a copy");
    node.run();
    assert!(node.finished(SequenceId(2)), "no other save takes the block");
    let stats = node.tier_stats();
    assert_eq!((stats.cancelled, stats.failed), (2, 0), "the row took two cached blocks");
    run(&mut node);
    node.assert_all_returned();
}

#[test]
fn saves_wait_for_an_admission_that_keeps_their_blocks() {
    let mut node = node(12, config(40));
    node.arrive(new(1, COMPUTE, 1, 165));
    node.run();
    // Four of ten cached blocks are copied, and the next prompt needs all twelve blocks of the
    // node.
    node.arrive(new(2, COMPUTE, 1, 191));
    node.run();
    assert!(!node.finished(SequenceId(2)));
    run(&mut node);
    let stats = node.tier_stats();
    assert_eq!((stats.saved, stats.cancelled), (11, 0));
    node.assert_all_returned();
}

#[test]
fn sequence_that_waits_for_a_slot_cancels_no_save() {
    let mut node = Node::with_tiers(unbounded_waits(limits(1, 64, 12, 1)), config(40));
    node.arrive(new(1, COMPUTE, 1, 165));
    node.run();
    node.arrive(new(2, COMPUTE, 2, 140));
    node.run();
    assert!(!node.finished(SequenceId(2)), "it needs blocks");
    run(&mut node);
    let before = node.tier_stats();
    let long = NewSequence { max_tokens: 60, ignore_stop_tokens: true, ..new(3, COMPUTE, 3, 100) };
    node.arrive(long);
    node.arrive(new(4, COMPUTE, 4, 20));
    node.arrive(new(5, COMPUTE, 5, 10));
    (0..4).for_each(|_| _ = node.turn());
    node.abort(SequenceId(3));
    node.turn();
    assert!(node.copy(0, false) && node.unfinished().len() == 2);
    run(&mut node);
    let stats = node.tier_stats();
    assert_eq!((stats.saved - before.saved, stats.cancelled - before.cancelled), (6 + 1, 0));
    node.assert_all_returned();
}

/// Returns the result of a step all of whose draft tokens are accepted.
fn all_accepted(plan: &StepPlan) -> StepResult {
    let row = |row: &RowPlan| RowResult {
        slot: row.slot,
        generation: row.generation,
        tokens: (0..=row.drafts_max)
            .map(|_| SampledToken { id: 1, logprobs: None, pooled: None })
            .collect(),
        prompt_logprobs: Vec::new(),
        drafted: row.drafts_max,
        failure: None,
    };
    let (step_id, rows) = (plan.step_id, plan.rows.iter().map(row).collect());
    StepResult { step_id, rows, busy: Duration::from_millis(1), run: StepRun::default() }
}

#[test]
fn block_of_draft_tokens_is_saved_after_the_steps_that_may_write_it() {
    let now = Instant::now();
    let limits = ExecutorLimits { speculation: Some(speculation(8, 64)), ..limits(4, 64, 20, 2) };
    let tiers = TierConfig { host: true, ..config(0) };
    let mut scheduler = scheduler(unbounded_waits(limits)).with_tiers(tiers, now);
    let mut actions = Vec::new();
    let grown = TierEvent::Grown { tier: Tier::Host, slots: 20 };
    scheduler.handle(now, Input::Tier(grown), &mut actions);
    let long = NewSequence { max_tokens: 60, ignore_stop_tokens: true, ..new(1, COMPUTE, 1, 14) };
    scheduler.handle(now, Input::Arrived(long), &mut actions);
    let prefill = scheduler.plan(&mut actions).expect("the prompt is computed");
    scheduler.complete(all_accepted(&prefill), &mut actions);
    let first = scheduler.plan(&mut actions).expect("a step with a draft token");
    assert_eq!(first.rows[0].drafts_max, 1);
    // If the draft token is rejected, this step writes the last position of the first block.
    let second = scheduler.plan(&mut actions).expect("another step in flight");
    let mut saves = |step: &StepPlan| {
        let mut actions = Vec::new();
        scheduler.complete(all_accepted(step), &mut actions);
        scheduler.start_saves(now, &mut actions);
        actions.iter().filter(|action| matches!(action, Action::Save(_))).count()
    };
    assert_eq!(saves(&first), 0, "the second step is in flight");
    assert_eq!(saves(&second), 1);
}

#[test]
fn load_is_refused_when_computing_is_faster() {
    let mut node = node(13, config(40));
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 200);
    // The first load measures a slow disk: 100 ms a block. Computing a block takes 8 ms.
    node.copies_take(Duration::from_millis(100));
    assert_eq!(compute(&mut node, 3, 1, 70), 6);
    compute(&mut node, 4, 3, 200);
    assert_eq!(compute(&mut node, 5, 1, 70), 70);
    assert_eq!((node.tier_stats().loaded, node.tier_stats().refused), (4, 4));
    // After a while a small load measures the disk again.
    compute(&mut node, 6, 4, 200);
    node.advance(Duration::from_secs(10));
    assert_eq!(compute(&mut node, 7, 1, 70), 70 - 32);
    assert_eq!(node.tier_stats().loaded, 4 + 2);
}

#[test]
fn host_memory_is_saved_to_first_and_the_disk_from_there() {
    let mut node = node(6, TierConfig { host: true, ..config(40) });
    node.grow_host(5);
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 90);
    let (host, disk) = (node.stats_of(Tier::Host), node.stats_of(Tier::Disk));
    assert_eq!((host.saved, host.stored, host.slots), (9, 5, 5));
    assert_eq!((disk.saved, disk.stored), (9, 9));
    assert_eq!(compute(&mut node, 3, 2, 90), 90 - 80, "resident");
    assert_eq!(compute(&mut node, 4, 1, 70), 6, "the host memory has lost it, the disk has it");
    let (host, disk) = (node.stats_of(Tier::Host), node.stats_of(Tier::Disk));
    assert_eq!((host.loaded, disk.loaded), (0, 4));
    compute(&mut node, 5, 2, 90);
    assert_eq!(node.stats_of(Tier::Host).loaded, 4, "the faster tier is read");
    node.assert_all_returned();
}

#[test]
fn host_tier_without_slots_leaves_the_disk_in_use() {
    let mut node = node(6, TierConfig { host: true, ..config(40) });
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 90);
    assert_eq!(compute(&mut node, 3, 1, 70), 6, "four blocks are loaded");
    let (host, disk) = (node.stats_of(Tier::Host), node.stats_of(Tier::Disk));
    assert_eq!((host.dropped, disk.saved, disk.loaded), (0, 9, 4));
    node.assert_all_returned();
}

#[test]
fn tail_of_a_loaded_prefix_is_overwritten_before_its_head() {
    let mut node = node(6, config(9));
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 90);
    assert_eq!(compute(&mut node, 3, 1, 70), 6, "four blocks are loaded");
    // These overwrite the second prompt and one block of the first.
    compute(&mut node, 4, 3, 90);
    compute(&mut node, 5, 4, 20);
    assert_eq!(compute(&mut node, 6, 1, 70), 70 - 48, "the first three blocks are loaded");
    node.assert_all_returned();
}

#[test]
fn reset_counts_the_blocks_that_it_drops() {
    let mut node = node(6, config(20));
    node.arrive(new(1, COMPUTE, 1, 90));
    node.run();
    let scheduler = node.engine.scheduler_mut();
    assert_eq!(scheduler.reset_prefix_cache(), 1, "saves read the other four");
    assert_eq!(scheduler.load().blocks_cached, 4);
    node.copy_all();
    assert_eq!(node.engine.scheduler_mut().reset_prefix_cache(), 4);
    node.assert_all_returned();
}

#[test]
fn one_save_at_a_time_reads_a_block() {
    let limits = unbounded_waits(limits(4, 64, 6, 1));
    let mut node = Node::before_recovery(limits, TierConfig { host: true, ..config(40) });
    node.grow_host(1);
    // The disk is slow: both prompts wait for it when the second takes the only host slot.
    compute(&mut node, 1, 1, 20);
    compute(&mut node, 2, 2, 20);
    node.arrive(new(3, COMPUTE, 1, 20));
    node.run();
    // While the first prompt is saved to host memory again, the disk begins to take blocks.
    node.recover(Vec::new(), true);
    // The host slot becomes idle while the second prompt is still copied to the disk.
    assert!(node.copy(0, false) && node.copy(1, false) && node.copy(1, false));
    node.arrive(new(4, COMPUTE, 2, 20));
    run(&mut node);
    let (host, disk) = (node.stats_of(Tier::Host), node.stats_of(Tier::Disk));
    assert_eq!((host.saved, disk.saved, disk.stored), (3, 2, 2));
    assert_eq!((host.cancelled, disk.cancelled), (0, 0));
    node.assert_all_returned();
}

#[test]
fn receiver_waits_for_a_load_no_longer_than_for_blocks() {
    let reserve_timeout = Duration::from_millis(500);
    let limits = SchedulerConfig { reserve_timeout, ..unbounded_waits(limits(4, 64, 20, 1)) };
    let mut node = Node::with_tiers(limits, config(40));
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 200);
    compute(&mut node, 3, 3, 200);
    node.arrive(new(4, SequenceKind::Receive, 1, 100));
    node.run();
    assert_eq!(node.receiving(), [], "the reservation waits for the load");
    node.advance(reserve_timeout);
    node.run();
    assert_eq!(node.receiving(), [SequenceId(4)], "it requests every block");
    node.kv_arrives(SequenceId(4));
    run(&mut node);
    assert!(node.finished(SequenceId(4)));
    node.assert_all_returned();
}

#[test]
fn receiver_requests_only_the_blocks_that_no_tier_has() {
    let mut node = node(13, config(40));
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 200);
    node.arrive(new(3, SequenceKind::Receive, 1, 100));
    assert_eq!(node.receiving(), [], "the reservation waits for the load");
    assert!(node.copy(0, false));
    assert_eq!(node.receiving(), [SequenceId(3)]);
    assert_eq!(node.engine.scheduler().load().blocks_reserved, 3);
    node.kv_arrives(SequenceId(3));
    run(&mut node);
    node.assert_all_returned();
}

#[test]
fn sender_hands_over_loaded_blocks() {
    let mut node = node(13, config(40));
    compute(&mut node, 1, 1, 70);
    compute(&mut node, 2, 2, 200);
    node.arrive(new(3, SequenceKind::Send, 1, 100));
    node.transfer_ready(SequenceId(3), 1);
    assert_eq!(run(&mut node), 100 - 64);
    node.transfer_ends(SequenceId(3));
    node.assert_all_returned();
}

/// Returns a node without room for two long sequences, which both have arrived.
fn node_that_preempts() -> Node {
    let second_touch = TierConfig { admission: TierAdmission::SecondTouch, ..config(40) };
    let mut node = Node::with_tiers(unbounded_waits(limits(2, 64, 9, 1)), second_touch);
    for id in 1..=2 {
        let new = new(id, COMPUTE, id as u32, 60);
        node.arrive(NewSequence { max_tokens: 60, ignore_stop_tokens: true, ..new });
    }
    node
}

#[test]
fn preempted_sequence_resumes_by_a_load() {
    let mut node = node_that_preempts();
    while node.turn() != LoopOutcome::Idle {
        node.copy_all();
    }
    assert!(node.engine.scheduler().preemptions() > 0);
    assert!(node.tier_stats().saved > 0, "a preempted sequence returns, so its blocks are saved");
    run(&mut node);
    assert!(node.tier_stats().loaded > 0, "its evicted blocks are loaded");
    node.assert_all_returned();
}

#[test]
fn preempted_sequence_counts_its_blocks_once() {
    let mut node = node_that_preempts();
    while !node.finished(SequenceId(1)) {
        node.turn();
        // Nothing is saved because of the preemption.
        while node.copy(0, true) {}
    }
    assert!(node.engine.scheduler().preemptions() > 0 && node.tier_stats().failed > 0);
    run(&mut node);
    assert!(node.finished(SequenceId(2)));
    assert_eq!(
        node.tier_stats().saved,
        0,
        "blocks that are computed again occurred in one request"
    );
    // The second request with these tokens is the second touch.
    compute(&mut node, 3, 2, 60);
    assert!(node.tier_stats().saved > 0);
    node.assert_all_returned();
}

#[test]
fn blocks_of_an_earlier_start_are_loaded_and_no_block_is_saved_before_all_are_known() {
    let mut stopped = node(6, config(20));
    compute(&mut stopped, 1, 1, 70);
    let mut node = Node::before_recovery(unbounded_waits(limits(4, 64, 6, 1)), config(20));
    let blocks = node.take_disk(&stopped);
    assert_eq!(blocks.len(), 4);
    node.recover(blocks, false);
    assert_eq!(node.tier_stats().stored, 4);
    assert_eq!(compute(&mut node, 1, 1, 70), 6, "four blocks are loaded");
    compute(&mut node, 2, 2, 90);
    assert_eq!(node.tier_stats().saved, 0);
    node.recover(Vec::new(), true);
    run(&mut node);
    let stats = node.tier_stats();
    assert_eq!((stats.saved, stats.stored), (5, 9), "no recovered block is overwritten");
    assert_eq!(compute(&mut node, 3, 1, 70), 6);
    node.assert_all_returned();
}

/// Changes the weights once the sequence has output.
fn change_weights_after_output(node: &mut Node, id: SequenceId, in_flight: InFlight) {
    while node.received(id) == 0 {
        node.turn();
    }
    node.engine.set_held(true);
    while node.engine.steps_in_flight() > 0 {
        node.turn();
    }
    node.change_weights(2, in_flight);
    node.engine.set_held(false);
}

#[test]
fn change_of_weights_returns_the_blocks_of_a_load_in_flight() {
    for in_flight in [InFlight::Recompute, InFlight::KeepKv, InFlight::Abort] {
        let mut node = node(13, config(20));
        compute(&mut node, 1, 1, 70);
        compute(&mut node, 2, 2, 200);
        node.arrive(new(3, COMPUTE, 1, 70));
        node.run();
        node.change_weights(2, in_flight);
        assert_eq!(node.engine.scheduler().load().blocks_reserved, 5, "the load writes them");
        node.run();
        assert!(node.finished(SequenceId(3)), "{in_flight:?}: it is computed with the new weights");
        assert_eq!(node.engine.take_records().iter().map(|it| it.tokens).sum::<u32>(), 70);
        node.copy_all();
        node.assert_all_returned();
        assert_eq!(compute(&mut node, 4, 1, 70), 6, "its blocks are hit");
    }
}

#[test]
fn change_of_weights_offers_no_block_of_the_old_weights() {
    for admission in [TierAdmission::Always, TierAdmission::SecondTouch] {
        let mut node = node(40, TierConfig { admission, ..config(60) });
        let row = new(1, COMPUTE, 1, 200);
        node.arrive(NewSequence { max_tokens: 20, ignore_stop_tokens: true, ..row });
        change_weights_after_output(&mut node, SequenceId(1), InFlight::Recompute);
        run(&mut node);
        assert!(node.finished(SequenceId(1)));
        let stats = node.tier_stats();
        assert_eq!((stats.dropped, stats.cancelled), (0, 0), "{admission:?}");
        node.assert_all_returned();
    }
}

#[test]
fn blocks_of_a_request_count_anew_at_new_weights() {
    let second_touch = TierConfig { admission: TierAdmission::SecondTouch, ..config(40) };
    let mut node = node(30, second_touch);
    compute(&mut node, 1, 1, 70);
    let hit = new(2, COMPUTE, 1, 70);
    node.arrive(NewSequence { max_tokens: 8, ignore_stop_tokens: true, ..hit });
    change_weights_after_output(&mut node, SequenceId(2), InFlight::Recompute);
    run(&mut node);
    assert!(node.finished(SequenceId(2)));
    let before = node.tier_stats().saved;
    assert!(before <= 4, "the recomputed blocks occurred once: {before} are saved");
    assert_eq!(compute(&mut node, 3, 1, 70), 6, "its blocks are hit");
    assert_eq!(node.tier_stats().saved, before + 4, "and occur for the second time");
    node.assert_all_returned();
}
