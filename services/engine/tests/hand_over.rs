//! Two schedulers joined by an in-memory transfer. Late messages hang no request, and the tokens
//! equal those of a single engine.

mod common;

use std::time::{Duration, Instant};

use common::{
    family_tokens, limits, node::Node, oracle, pair::Pair, scheduler, sequence, sim,
    unbounded_waits,
};
use engine::{
    LoopOutcome, SchedulerConfig, StepLoop, StepRecord,
    event::{NewSequence, SequenceId, SequenceKind},
    executor::sim::SimExecutor,
};
use kernels::KvGroups;
use proptest::prelude::*;

fn pair(prefill_blocks: u32, decode_blocks: u32, slots: u32, depth: u32) -> Pair<SimExecutor> {
    let limits = |blocks| limits(slots, 32, blocks, depth);
    pair_of([limits(prefill_blocks), limits(decode_blocks)].map(unbounded_waits))
}

fn pair_of(configs: [SchedulerConfig; 2]) -> Pair<SimExecutor> {
    pair_with_groups(configs, &KvGroups::default())
}

fn pair_with_groups(configs: [SchedulerConfig; 2], groups: &KvGroups) -> Pair<SimExecutor> {
    let start = Instant::now();
    let [prefill, decode] = configs.map(|config| {
        let executor = sim(config.limits, start).with_kv_groups(groups.clone());
        StepLoop::new(scheduler(config).with_kv_groups(groups.clone()), executor)
    });
    let arenas = (prefill.executor().arena(), decode.executor().arena());
    Pair::new(prefill, decode, arenas)
}

fn request(id: u128, len: usize, max_tokens: u32) -> NewSequence {
    let tokens = family_tokens(id as u32, len);
    NewSequence { max_tokens, ..sequence(id, SequenceKind::Receive, tokens, Instant::now()) }
}

fn assert_exact(pair: &Pair<SimExecutor>, new: &NewSequence) {
    let (expected, reason) = oracle(new, pair.decode.scheduler().sequence_tokens_max());
    let answer = &pair.answers[&new.id];
    assert_eq!(answer.ids(), expected);
    assert_eq!(answer.finish, reason);
}

#[test]
fn a_full_prefill_node_and_a_full_decode_node_do_not_deadlock() {
    // Each node has room for two prompts, and twelve arrive at once. No message is delivered before
    // both nodes are stuck: the prefill node is full of finished sequences, the decode node is full
    // of reservations.
    let mut pair = pair(6, 7, 4, 2);
    let requests: Vec<_> = (0..12).map(|id| request(id, 40, 6)).collect();
    requests.iter().for_each(|new| pair.submit(new.clone()));
    let mut stuck_full = 0;
    for _ in 0..10_000 {
        // Both run until they are stuck.
        while !pair.turn() {}
        let (prefill, decode) = (pair.prefill.scheduler().load(), pair.decode.scheduler().load());
        stuck_full += u32::from(prefill.blocks_held == 6 && decode.blocks_reserved == 6);
        if !pair.deliver(|| true) {
            break;
        }
    }
    assert!(stuck_full > 0, "both nodes never ran out of blocks at once");
    requests.iter().for_each(|new| assert_exact(&pair, new));
    pair.assert_all_returned();
}

#[test]
fn reservations_in_reverse_order_do_not_deadlock() {
    let mut pair = pair(3, 30, 8, 2);
    let requests: Vec<_> = (0..8).map(|id| request(id, 40, 6)).collect();
    requests.iter().for_each(|new| pair.submit(new.clone()));
    // Round 1 delivers only messages of the last request. Each later round includes one more
    // request.
    for late in (0..8).rev() {
        let mut visited = 0;
        pair.deliver(|| {
            visited += 1;
            visited > late * 3
        });
        pair.turn();
    }
    pair.run();
    requests.iter().for_each(|new| assert_exact(&pair, new));
    pair.assert_all_returned();
}

#[test]
fn preemption_during_waiting_reservations_does_not_deadlock() {
    // Outputs grow until only preemption frees blocks, and reserved blocks cannot be preempted.
    let mut pair = pair(30, 12, 6, 2);
    let requests: Vec<_> = (0..10).map(|id| request(id, 33, 60)).collect();
    requests.iter().for_each(|new| pair.submit(new.clone()));
    pair.run();
    requests.iter().for_each(|new| assert_exact(&pair, new));
    assert!(pair.decode.scheduler().preemptions() > 0, "no sequence was preempted");
    pair.assert_all_returned();
}

#[test]
fn a_cached_prompt_needs_no_prefill_node() {
    let mut pair = pair(30, 30, 4, 2);
    let first = request(1, 40, 6);
    pair.submit(first.clone());
    pair.run();
    let again = NewSequence { id: SequenceId(2), ..first.clone() };
    pair.submit(again.clone());
    pair.run();
    assert_exact(&pair, &again);
    assert_eq!(pair.answers[&again.id].cached_at_decode, 32);
    assert_eq!(pair.answers[&again.id].blocks_moved, 0);
    assert_eq!(pair.answers[&first.id].blocks_moved, 3);
    pair.assert_all_returned();
}

#[test]
fn only_blocks_not_cached_at_the_decode_node_are_transferred() {
    let mut pair = pair(30, 30, 4, 2);
    let short = request(1, 40, 6);
    pair.submit(short.clone());
    pair.run();
    let mut long = NewSequence { id: SequenceId(2), ..request(1, 70, 6) };
    long.tokens[..40].copy_from_slice(&short.tokens);
    pair.submit(long.clone());
    pair.run();
    assert_exact(&pair, &long);
    let answer = &pair.answers[&long.id];
    assert_eq!((answer.cached_at_prefill, answer.cached_at_decode), (32, 32));
    assert_eq!(answer.blocks_moved, 3, "five blocks, two of them known");
    pair.assert_all_returned();
}

/// Returns the tokens of the prefill node's steps since the last call.
fn prefill_steps(pair: &mut Pair<SimExecutor>) -> Vec<u32> {
    pair.prefill.take_records().iter().map(|step| step.tokens).collect()
}

#[test]
fn prompt_alone_is_sent_while_its_last_part_is_computed() {
    let limits = limits(4, 128, 60, 2);
    let config = unbounded_waits(limits);
    let prefill = SchedulerConfig { tail_tokens: Some(32), ..config };
    let mut pair = pair_of([prefill, config]);
    let alone = request(1, 200, 6);
    pair.submit(alone.clone());
    pair.run();
    assert_exact(&pair, &alone);
    assert_eq!(prefill_steps(&mut pair), [112, 64, 24], "the first part ends with a block");
    // The largest step does not leave a shorter last part.
    let longer = request(5, 130, 6);
    pair.submit(longer.clone());
    pair.run();
    assert_exact(&pair, &longer);
    assert_eq!(prefill_steps(&mut pair), [112, 18]);
    // A step of twice the tail is not split, and neither is a prompt that shares its steps.
    let (short, first, second) = (request(2, 64, 6), request(3, 120, 6), request(4, 120, 6));
    pair.submit(short);
    pair.run();
    assert_eq!(prefill_steps(&mut pair), [64]);
    for new in [&first, &second] {
        pair.submit(new.clone());
    }
    pair.run();
    [&first, &second].into_iter().for_each(|new| assert_exact(&pair, new));
    assert_eq!(prefill_steps(&mut pair), [128, 112]);
    pair.assert_all_returned();
}

#[test]
fn last_part_of_a_prompt_waits_for_no_other_prompt() {
    let limits = limits(4, 128, 60, 1);
    let config = unbounded_waits(limits);
    let mut pair = pair_of([SchedulerConfig { tail_tokens: Some(32), ..config }, config]);
    let (first, second) = (request(1, 120, 6), request(2, 60, 6));
    pair.submit(first.clone());
    pair.deliver(|| true);
    pair.turn();
    assert_eq!(prefill_steps(&mut pair), [96]);
    pair.submit(second.clone());
    pair.run();
    [&first, &second].into_iter().for_each(|new| assert_exact(&pair, new));
    assert_eq!(prefill_steps(&mut pair), [24, 60]);
    pair.assert_all_returned();
}

/// Runs turns until the node has collected a step.
fn collect_step(node: &mut Node) -> StepRecord {
    for _ in 0..10 {
        if node.turn() == LoopOutcome::Stepped {
            return node.engine.take_records().pop().expect("the step has a record");
        }
    }
    panic!("no step ends");
}

#[test]
fn kv_that_arrives_during_a_step_joins_the_next_step() {
    let mut node = Node::new(unbounded_waits(limits(4, 64, 60, 2)));
    let kind = |id, kind| NewSequence { kind, ..request(id, 40, 20) };
    node.arrive(kind(1, SequenceKind::Compute));
    for _ in 0..4 {
        collect_step(&mut node);
    }
    assert_eq!(node.engine.steps_in_flight(), 2, "no KV is expected");
    let awaited = kind(2, SequenceKind::Receive);
    node.arrive(awaited.clone());
    collect_step(&mut node);
    assert_eq!(node.engine.steps_in_flight(), 1, "the next step is not launched yet");
    node.kv_arrives(awaited.id);
    let before = collect_step(&mut node);
    let joined = collect_step(&mut node);
    assert_eq!((before.rows, joined.rows), (1, 2));
    node.run();
    node.assert_all_returned();
}

#[test]
fn device_is_never_idle_while_kv_is_awaited() {
    let mut node = Node::new(unbounded_waits(limits(4, 64, 60, 2)));
    let kind = |id, kind| NewSequence { kind, ..request(id, 40, 20) };
    node.arrive(kind(1, SequenceKind::Compute));
    let awaited = kind(2, SequenceKind::Receive);
    node.arrive(awaited.clone());
    let steps: Vec<StepRecord> = (0..15).map(|_| collect_step(&mut node)).collect();
    let spans: Vec<_> = steps.iter().filter_map(|step| step.device).collect();
    assert_eq!(spans.len(), 15);
    for pair in spans.windows(2) {
        assert_eq!(pair[0].end, pair[1].begin);
    }
    // After the last token nothing can be launched beside the last step.
    while !node.finished(SequenceId(1)) {
        collect_step(&mut node);
    }
    node.kv_arrives(awaited.id);
    node.run();
    node.assert_all_returned();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn delays_and_cancels_keep_tokens_exact_and_leak_nothing(
        prefill_blocks in 5..20u32,
        decode_blocks in 5..20u32,
        slots in 1..=4u32,
        depth in 1..=2u32,
        tail_tokens in prop::option::of(1..20u32),
        requests in prop::collection::vec(
            (1..75usize, 1..30u32, prop::bool::weighted(0.15), 0..40usize, any::<bool>()),
            1..15,
        ),
        groups in common::kv_groups(),
        luck in any::<u64>(),
    ) {
        let config = |blocks| SchedulerConfig {
            tail_tokens,
            ..unbounded_waits(limits(slots, 32, blocks, depth))
        };
        let (count, state) = (groups.count() as u32, groups.state_entries() as u32);
        let configs = [prefill_blocks, decode_blocks].map(|blocks| config(blocks * count + state));
        let mut pair = pair_with_groups(configs, &groups);
        let (mut all, mut cancels) = (Vec::new(), Vec::new());
        for (id, (len, max_tokens, cancelled, cancel_after, alone)) in (0..).zip(requests) {
            // Few distinct prompts, so that prefixes are shared.
            let new = NewSequence { id: SequenceId(id), ..request(id % 3, len, max_tokens) };
            match alone && id % 4 == 0 {
                true => pair.submit_alone(new.clone()),
                false => pair.submit(new.clone()),
            }
            cancels.push((new.id, cancelled.then_some(cancel_after)));
            all.push(new);
        }
        pair.run_randomly(&cancels, luck);
        for new in &all {
            if !pair.answers[&new.id].left {
                assert_exact(&pair, new);
            }
        }
        pair.assert_all_returned();
    }
}

/// Each node has its own virtual clock. Here requests can end only at their deadline.
#[test]
fn requests_without_a_connection_end_at_their_deadline() {
    let mut pair = pair(30, 30, 4, 2);
    let mut lost = request(1, 40, 6);
    lost.deadline = Instant::now() + Duration::from_secs(5);
    pair.submit(lost.clone());
    for node in [&mut pair.prefill, &mut pair.decode] {
        node.executor_mut().advance(Duration::from_secs(10));
    }
    pair.turn();
    assert!(pair.answers[&lost.id].failure.is_some());
    pair.turn();
    pair.assert_all_returned();
}
