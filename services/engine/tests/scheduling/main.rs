//! Scheduler behaviour, one situation at a time, on the sim executor.

#[path = "../common/mod.rs"]
mod common;
mod transfers;

use std::time::{Duration, Instant};

use common::{
    SEEDS, VOCABULARY, family_tokens, grammar::HashGrammar, limits, node::Node, scheduler,
    sequence, sim, unbounded_waits,
};
use engine::{
    ItlLimit, LoopOutcome, Scheduler, SchedulerConfig, SchedulerConfigError, StepKind, StepLoop,
    constraint::COMPILE_TIMEOUT,
    event::{
        Action, CacheChange, InFlight, Input, NewSequence, SequenceFailure, SequenceId,
        SequenceKind,
    },
    executor::Executor,
    plan::{RowPlan, RowResult, StepResult, StepRun},
};
use kernels::sampling::{SampledToken, Sampling};

const COMPUTE: SequenceKind = SequenceKind::Compute;
const SEND: SequenceKind = SequenceKind::Send;
const RECEIVE: SequenceKind = SequenceKind::Receive;

fn new(id: u128, kind: SequenceKind, len: usize, max_tokens: u32) -> NewSequence {
    let tokens = family_tokens(id as u32, len);
    NewSequence { max_tokens, ..sequence(id, kind, tokens, Instant::now()) }
}

fn node(slots: u32, step_tokens: u32, blocks: u32, depth: u32) -> Node {
    Node::new(unbounded_waits(limits(slots, step_tokens, blocks, depth)))
}

/// Returns the scheduler's immediate actions for one input.
fn actions(scheduler: &mut Scheduler, now: Instant, input: Input) -> Vec<Action> {
    let mut actions = Vec::new();
    scheduler.handle(now, input, &mut actions);
    scheduler.check();
    actions
}

fn failure_of(config: SchedulerConfig, new: NewSequence) -> String {
    let actions = actions(&mut scheduler(config), Instant::now(), Input::Arrived(new));
    match actions.as_slice() {
        [Action::Failed { failure, .. }] => failure.to_string(),
        actions => panic!("not refused: {actions:?}"),
    }
}

#[test]
fn prefill_is_chunked_within_the_step_budget() {
    let mut node =
        Node::new(SchedulerConfig { chunk_tokens: 16, ..unbounded_waits(limits(4, 24, 30, 1)) });
    node.arrive(new(1, COMPUTE, 70, 3));
    node.arrive(new(2, COMPUTE, 70, 3));
    node.run();
    let records = node.engine.take_records();
    assert_eq!((records[0].rows, records[0].tokens), (2, 24), "16 of the first, 8 of the second");
    assert!(records.iter().all(|record| record.tokens <= 24));
    node.assert_all_returned();
}

#[test]
fn a_long_prompt_delays_no_decoding_row() {
    let mut node = node(4, 8, 40, 1);
    // This prompt is older and would take the whole budget of every step.
    node.arrive(new(1, SEND, 90, 1));
    node.arrive(new(2, COMPUTE, 5, 40));
    node.turn();
    node.transfer_ready(SequenceId(1), 0);
    for _ in 0..8 {
        node.turn();
    }
    let both: Vec<_> =
        node.engine.take_records().into_iter().filter(|record| record.rows == 2).collect();
    assert!(both.len() >= 5);
    assert!(both.iter().all(|record| record.tokens == 8 && record.sampled == 1));
    node.run();
    node.transfer_ends(SequenceId(1));
    node.assert_all_returned();
}

#[test]
fn sequence_keeps_its_kv_at_new_weights_and_no_other_sequence_reads_it() {
    let mut node = node(2, 64, 20, 1);
    let answer = |id| NewSequence { id: SequenceId(id), ..new(1, COMPUTE, 40, 30) };
    node.arrive(NewSequence { ignore_stop_tokens: true, ..answer(1) });
    while node.received(SequenceId(1)) < 5 {
        node.turn();
    }
    node.engine.set_held(true);
    while node.engine.steps_in_flight() > 0 {
        node.turn();
    }
    node.change_weights(2, InFlight::KeepKv);
    node.engine.set_held(false);
    // The sim executor rejects a step that reads KV of other weights.
    node.arrive(answer(2));
    node.run();
    assert!(node.finished(SequenceId(1)) && node.finished(SequenceId(2)));
    assert_eq!(node.engine.scheduler().preemptions(), 0, "nothing is recomputed");
    node.assert_all_returned();
}

/// Returns a config that bounds decode steps by the sim executor's costs.
fn with_itl_max(itl_max: Duration, depth: u32) -> SchedulerConfig {
    let itl = ItlLimit {
        max: itl_max,
        decode: Duration::from_millis(5),
        prefill: Duration::from_millis(5),
        token: Duration::from_micros(500),
        doubling_tokens: 10_000,
    };
    SchedulerConfig { itl: Some(itl), ..unbounded_waits(limits(8, 128, 100, depth)) }
}

#[test]
fn prefill_with_decode_rows_keeps_the_step_within_itl_max() {
    let itl_max = Duration::from_millis(20);
    for (depth, decode_rows) in [(1, 1), (2, 1), (1, 5), (2, 5)] {
        let mut node = Node::new(with_itl_max(itl_max, depth));
        for id in 1..=decode_rows {
            node.arrive(NewSequence { ignore_stop_tokens: true, ..new(id, COMPUTE, 5, 60) });
        }
        // The rows' own cost is measured in these steps.
        (0..4).for_each(|_| _ = node.turn());
        node.engine.take_records();
        node.arrive(new(10, COMPUTE, 200, 2));
        node.arrive(new(11, COMPUTE, 200, 2));
        node.run();
        let records = node.engine.take_records();
        let mixed: Vec<_> =
            records.iter().filter(|record| record.kind == StepKind::Mixed).collect();
        assert!(mixed.len() >= 10, "{}", mixed.len());
        for record in mixed {
            // The measured cost of the decode rows lags behind rows that join and context that
            // grows.
            assert!(record.busy <= itl_max * 21 / 20, "{record:?}");
        }
        let longest = records.iter().map(|record| record.busy).max().unwrap();
        assert!(longest > itl_max * 9 / 10, "the bound is used: {longest:?}");
        node.assert_all_returned();
    }
}

/// Plans a step, completes it after `busy`, and returns the tokens of each row.
fn step(scheduler: &mut Scheduler, busy: Duration) -> Vec<u32> {
    let mut actions = Vec::new();
    let plan = scheduler.plan(&mut actions).expect("a row can advance");
    let result = |row: &RowPlan| RowResult {
        slot: row.slot,
        generation: row.generation,
        tokens: vec![
            SampledToken { id: 7, logprobs: None, pooled: None };
            usize::from(row.samples)
        ],
        prompt_logprobs: Vec::new(),
        drafted: 0,
        failure: None,
    };
    let rows = plan.rows.iter().map(result).collect();
    let step_id = plan.step_id;
    scheduler.complete(StepResult { step_id, rows, busy, run: StepRun::default() }, &mut actions);
    plan.rows.iter().map(|row| row.token_count).collect()
}

#[test]
fn one_slow_step_does_not_stop_prefill_with_decode_rows() {
    let milliseconds = Duration::from_millis;
    let mut scheduler = scheduler(with_itl_max(milliseconds(20), 1));
    let arrived =
        |id| Input::Arrived(NewSequence { ignore_stop_tokens: true, ..new(id, COMPUTE, 200, 60) });
    actions(&mut scheduler, Instant::now(), arrived(1));
    (0..8).for_each(|_| _ = step(&mut scheduler, milliseconds(5)));
    actions(&mut scheduler, Instant::now(), arrived(2));
    let within_bound = step(&mut scheduler, milliseconds(20));
    assert_eq!(within_bound, [30, 1]);
    let budgets: Vec<u32> =
        [35, 16, 16, 16].map(|busy| step(&mut scheduler, milliseconds(busy))[0]).into();
    assert!(budgets[0] > 28 && (20..25).contains(&budgets[1]), "{budgets:?}");
    assert!(budgets[1..].is_sorted_by(|slow, fast| slow < fast), "{budgets:?}");
    // The estimate follows the rows that decode now: one row again has the full prefill budget.
    actions(&mut scheduler, Instant::now(), Input::Abort { id: SequenceId(1) });
    while step(&mut scheduler, milliseconds(5))[0] > 1 {}
    actions(&mut scheduler, Instant::now(), arrived(3));
    assert_eq!(step(&mut scheduler, milliseconds(5)), [30, 1]);
}

#[test]
fn prefill_takes_the_whole_step_only_where_nothing_decodes_soon() {
    let mut node = Node::new(with_itl_max(Duration::from_millis(20), 1));
    node.arrive(new(1, COMPUTE, 200, 1));
    node.turn();
    node.turn();
    let tokens = |node: &mut Node| {
        let records = node.engine.take_records();
        records.iter().map(|record| record.tokens).collect::<Vec<_>>()
    };
    assert_eq!(tokens(&mut node), [128, 72]);
    // The KV of the second sequence may arrive during the next step.
    node.arrive(new(2, RECEIVE, 40, 3));
    node.arrive(new(3, COMPUTE, 200, 1));
    node.turn();
    assert_eq!(tokens(&mut node), [30]);
    node.kv_arrives(SequenceId(2));
    node.run();
    node.assert_all_returned();
}

/// A received sequence waits for the steps in flight when its KV arrives, so its first steps
/// prefill less.
#[test]
fn steps_prefill_less_until_a_received_sequence_has_caught_up() {
    for (depth, reduced) in [(1, 2), (2, 3)] {
        let mut node = Node::new(with_itl_max(Duration::from_millis(30), depth));
        node.arrive(NewSequence { ignore_stop_tokens: true, ..new(1, RECEIVE, 40, 60) });
        (2..6).for_each(|id| node.arrive(new(id, COMPUTE, 200, 1)));
        (0..2).for_each(|_| _ = node.turn());
        node.engine.take_records();
        node.kv_arrives(SequenceId(1));
        (0..12).for_each(|_| _ = node.turn());
        let records = node.engine.take_records();
        let mixed = records.iter().filter(|record| record.kind == StepKind::Mixed);
        let prefill: Vec<u32> = mixed.map(|record| record.tokens - 1).collect();
        // A step prefills 2 tokens a millisecond after its first 5 ms.
        let (first, later) = prefill.split_at(reduced);
        assert!(first.iter().all(|tokens| (16..=20).contains(tokens)), "{prefill:?}");
        assert!(later[..4].iter().all(|tokens| (40..=50).contains(tokens)), "{prefill:?}");
        node.run();
        node.assert_all_returned();
    }
}

#[test]
fn prefill_never_starves_with_decode_rows() {
    for doubling_tokens in [1, 10_000] {
        let mut config = with_itl_max(Duration::from_millis(1), 2);
        config.itl.as_mut().unwrap().doubling_tokens = doubling_tokens;
        let mut node = Node::new(config);
        node.arrive(NewSequence { ignore_stop_tokens: true, ..new(1, COMPUTE, 5, 240) });
        (0..3).for_each(|_| _ = node.turn());
        node.arrive(new(2, COMPUTE, 150, 1));
        while !node.finished(SequenceId(2)) {
            assert!(!node.finished(SequenceId(1)), "the prompt waits");
            node.turn();
        }
        node.run();
        node.assert_all_returned();
    }
}

#[test]
fn the_latest_arrival_is_preempted_and_finds_its_blocks_cached() {
    let mut node = node(4, 64, 8, 2);
    // 4 + 3 blocks at first; each sequence grows to 5.
    node.arrive(NewSequence { ignore_stop_tokens: true, ..new(1, COMPUTE, 60, 20) });
    node.arrive(NewSequence { ignore_stop_tokens: true, ..new(2, COMPUTE, 40, 38) });
    node.run();
    assert!(node.engine.scheduler().preemptions() >= 1);
    assert!(node.finished(SequenceId(1)) && node.finished(SequenceId(2)));
    // The first sequence was never preempted: its tokens came in consecutive steps.
    let recomputed: u32 = node.engine.take_records().into_iter().map(|record| record.tokens).sum();
    let needed = 60 + 19 + 40 + 37;
    assert!(recomputed < needed + 40, "{recomputed} tokens for {needed}: the cache was of use");
    node.assert_all_returned();
}

#[test]
fn a_preempted_sequence_finishes_while_the_batch_drains() {
    let mut node = node(2, 64, 8, 2);
    node.arrive(NewSequence { ignore_stop_tokens: true, ..new(1, COMPUTE, 60, 20) });
    node.arrive(NewSequence { ignore_stop_tokens: true, ..new(2, COMPUTE, 40, 38) });
    while node.engine.scheduler().load().running < 2 {
        node.turn();
    }
    node.arrive(new(3, COMPUTE, 40, 4));
    node.engine.scheduler_mut().stop_admitting(&mut Vec::new());
    node.run();
    let scheduler = node.engine.scheduler();
    assert!(scheduler.preemptions() >= 1 && !scheduler.has_running());
    assert_eq!(node.unfinished(), [SequenceId(3)]);
    assert!(node.finished(SequenceId(1)) && node.finished(SequenceId(2)));
    node.engine.scheduler_mut().admit_again();
    node.run();
    node.assert_all_returned();
}

#[test]
fn blocks_are_allocated_in_order_of_arrival() {
    let mut node = node(8, 64, 8, 1);
    node.arrive(new(1, COMPUTE, 90, 3));
    node.turn();
    // It needs 6 blocks and 2 are free, so it and all younger sequences wait.
    node.arrive(new(2, COMPUTE, 81, 3));
    node.turn();
    node.arrive(new(3, RECEIVE, 20, 3));
    node.arrive(new(4, COMPUTE, 10, 3));
    assert_eq!(node.receiving(), []);
    assert_eq!(node.engine.scheduler().load().running, 1);
    while !node.finished(SequenceId(1)) {
        assert_eq!(node.receiving(), []);
        node.turn();
    }
    node.run();
    assert_eq!(node.receiving(), [SequenceId(3)]);
    node.kv_arrives(SequenceId(3));
    node.run();
    node.assert_all_returned();
}

#[test]
fn a_stop_is_seen_one_step_late_and_leaks_nothing() {
    for depth in 1..=3 {
        let mut node = node(4, 64, 20, depth);
        let stops = (0..VOCABULARY / 2).collect();
        let sampling = Sampling { stop_token_ids: stops, ..Sampling::greedy() };
        for id in 0..6 {
            node.arrive(NewSequence { sampling: sampling.clone(), ..new(id, COMPUTE, 20, 40) });
        }
        node.run();
        node.assert_all_returned();
        let sampled: u32 =
            node.engine.take_records().into_iter().map(|record| record.sampled).sum();
        assert!(sampled >= 6);
    }
}

#[test]
fn a_length_stop_computes_no_surplus_token() {
    let mut node = node(4, 64, 20, 3);
    node.arrive(NewSequence { ignore_stop_tokens: true, ..new(1, COMPUTE, 20, 10) });
    node.run();
    let computed: u32 = node.engine.take_records().into_iter().map(|record| record.tokens).sum();
    assert_eq!(computed, 20 + 9, "the last token needs no KV");
}

#[test]
fn a_sequence_can_grow_to_the_whole_pool() {
    let mut node = node(2, 64, 4, 2);
    node.arrive(NewSequence { ignore_stop_tokens: true, ..new(1, COMPUTE, 60, 1000) });
    node.run();
    assert!(node.finished(SequenceId(1)), "with reason length, which the oracle knows");
    node.assert_all_returned();
}

#[test]
fn a_row_without_an_allowed_token_fails_alone() {
    let limits = limits(4, 64, 20, 2);
    let mut engine = StepLoop::new(scheduler(unbounded_waits(limits)), sim(limits, Instant::now()));
    let every_token = (0..VOCABULARY).collect();
    let sampling = Sampling { stop_token_ids: every_token, min_tokens: 5, ..Sampling::greedy() };
    let mut seen = Vec::new();
    engine.handle(Input::Arrived(NewSequence { sampling, ..new(1, COMPUTE, 20, 9) }), &mut seen);
    engine.handle(Input::Arrived(new(2, COMPUTE, 20, 9)), &mut seen);
    while engine.turn(Duration::from_secs(1), &mut seen).expect("sound plans") != LoopOutcome::Idle
    {
    }
    let failure = SequenceFailure::Invalid {
        reason: "no token can be chosen: every token is masked".to_owned(),
    };
    assert!(seen.contains(&Action::Failed { id: SequenceId(1), failure }));
    assert!(
        seen.iter().any(|action| matches!(
            action,
            Action::Finished { id: SequenceId(2), reason: Some(_) }
        ))
    );
    assert!(engine.scheduler().is_idle());
}

#[test]
fn invalid_requests_are_rejected_with_field_value_and_limit() {
    let config = unbounded_waits(limits(4, 64, 6, 2));
    let refusals = [
        (
            NewSequence { prompt_len: 0, ..new(1, COMPUTE, 8, 1) },
            "invalid prompt_len: 0; expected 1 to 8 (tokens)",
        ),
        (
            NewSequence { prompt_len: 9, ..new(1, COMPUTE, 8, 1) },
            "invalid prompt_len: 9; expected 1 to 8 (tokens)",
        ),
        (
            NewSequence { tokens: vec![], ..new(1, COMPUTE, 8, 1) },
            "invalid prompt_len: 8; expected 1 to 0 (tokens)",
        ),
        (
            NewSequence { tokens: vec![1, 2, 40], prompt_len: 3, ..new(1, COMPUTE, 8, 1) },
            "invalid tokens[2]: 40; expected less than 40 (vocabulary)",
        ),
        (new(1, COMPUTE, 96, 1), "invalid sequence: 96 tokens; expected at most 95"),
        (new(1, SEND, 97, 1), "invalid sequence: 97 tokens; expected at most 96"),
        (new(1, COMPUTE, 8, 0), "invalid max_tokens: 0; expected more than 0 (generated)"),
        (
            NewSequence { prompt_len: 6, ..new(1, COMPUTE, 8, 2) },
            "invalid max_tokens: 2; expected more than 2 (generated)",
        ),
        (
            NewSequence {
                deadline: Instant::now() - Duration::from_secs(1),
                ..new(1, COMPUTE, 8, 1)
            },
            "the deadline passed",
        ),
    ];
    for (new, message) in refusals {
        assert_eq!(failure_of(config, new), message);
    }
}

#[test]
fn every_queue_has_a_bound_and_a_known_id_is_a_duplicate() {
    let now = Instant::now();
    // One sequence gets the slot, one waits.
    let config = SchedulerConfig {
        waiting_max: 1,
        transfers_max: 1,
        ..unbounded_waits(limits(1, 64, 6, 2))
    };
    let mut scheduler = scheduler(config);
    let mut arrive = |new| actions(&mut scheduler, now, Input::Arrived(new));
    assert_eq!(arrive(new(1, SEND, 8, 1)), []);
    let refused = |id: u128, reason: &str| {
        let failure = SequenceFailure::Busy { reason: reason.to_owned() };
        vec![Action::Failed { id: SequenceId(id), failure }]
    };
    assert_eq!(arrive(new(2, SEND, 8, 1)), refused(2, "1 transfers are in flight"));
    assert_eq!(arrive(new(3, COMPUTE, 8, 1)), []);
    assert_eq!(arrive(new(4, COMPUTE, 8, 1)), []);
    assert_eq!(arrive(new(5, COMPUTE, 8, 1)), refused(5, "2 sequences wait already"));
    let failure = SequenceFailure::Duplicate;
    let duplicate = vec![Action::Failed { id: SequenceId(3), failure }];
    assert_eq!(arrive(new(3, COMPUTE, 8, 1)), duplicate);
    assert_eq!(scheduler.load().waiting, 3);
}

#[test]
fn an_id_stays_known_until_its_transfer_has_ended() {
    let now = Instant::now();
    let mut scheduler = scheduler(unbounded_waits(limits(1, 64, 6, 2)));
    let id = SequenceId(1);
    actions(&mut scheduler, now, Input::Arrived(new(1, SEND, 8, 1)));
    let aborted = actions(&mut scheduler, now, Input::Abort { id });
    assert!(matches!(aborted.as_slice(), [Action::AbortTransfer { .. }]));
    assert_eq!(actions(&mut scheduler, now, Input::Abort { id }), [], "told once");
    let failure = SequenceFailure::Duplicate;
    let again = actions(&mut scheduler, now, Input::Arrived(new(1, SEND, 8, 1)));
    assert_eq!(again, [Action::Failed { id, failure }]);
    actions(&mut scheduler, now, Input::TransferEnded { id });
    assert_eq!(actions(&mut scheduler, now, Input::Arrived(new(1, SEND, 8, 1))), []);
}

#[test]
fn inputs_about_unknown_sequences_change_nothing() {
    let now = Instant::now();
    let mut scheduler = scheduler(unbounded_waits(limits(1, 64, 6, 2)));
    let id = SequenceId(9);
    let token = kernels::sampling::SampledToken { id: 0, logprobs: None, pooled: None };
    let overtaken = [
        Input::Abort { id },
        Input::TransferReady { id, first_block: 0, block_count: 1 },
        Input::KvArrived { id, first_index: 0, token },
        Input::TransferEnded { id },
    ];
    for input in overtaken {
        assert_eq!(actions(&mut scheduler, now, input), []);
        assert!(scheduler.is_idle());
    }
}

#[test]
fn cache_changes_connect_snapshots() {
    let mut node = node(4, 64, 8, 2);
    let mut replica = std::collections::BTreeSet::new();
    for id in 0..12 {
        node.arrive(new(id, COMPUTE, 20 + 7 * id as usize % 50, 8));
        for _ in 0..5 {
            node.turn();
            for change in node.engine.scheduler_mut().take_cache_changes() {
                let changed = match change {
                    CacheChange::Added(hash) => replica.insert(hash),
                    CacheChange::Evicted(hash) => replica.remove(&hash),
                };
                assert!(changed, "{change:?} tells something new");
            }
            let snapshot = node.engine.scheduler().cached_hashes();
            assert!(replica.iter().eq(&snapshot));
        }
    }
    assert!(!replica.is_empty());
}

#[test]
fn prefix_cache_off_gives_no_hits() {
    let config = SchedulerConfig { prefix_cache: false, ..unbounded_waits(limits(2, 64, 8, 2)) };
    let mut node = Node::new(config);
    for id in 0..2 {
        node.arrive(NewSequence {
            id: SequenceId(id),
            ignore_stop_tokens: true,
            ..new(7, COMPUTE, 40, 3)
        });
        node.run();
    }
    let computed: u32 = node.engine.take_records().into_iter().map(|record| record.tokens).sum();
    assert_eq!(computed, 2 * (40 + 2));
    assert_eq!(node.engine.scheduler().load().blocks_free, 8);
    assert_eq!(node.engine.scheduler_mut().take_cache_changes(), []);
}

#[test]
fn load_counts_sequences_and_pending_prompt_tokens() {
    let mut node = node(2, 16, 20, 1);
    node.arrive(new(1, COMPUTE, 40, 4));
    node.arrive(new(2, SEND, 30, 4));
    node.arrive(new(3, RECEIVE, 50, 4));
    let load = node.engine.scheduler().load();
    assert_eq!((load.running, load.waiting, load.pending_prompt_tokens), (0, 3, 70));
    assert_eq!((load.blocks_reserved, load.blocks_free), (4, 16));
    node.turn();
    let load = node.engine.scheduler().load();
    assert_eq!((load.running, load.waiting), (1, 2));
    // One step is collected, the next is in flight.
    assert_eq!(load.pending_prompt_tokens, 40 - 16 + 30);
    let pairs = |tokens: u64| tokens * (tokens + 1) / 2;
    assert_eq!(load.pending_prompt_pairs, pairs(40) - pairs(16) + pairs(30));
    assert_eq!((load.prefilling, load.context_tokens), (1, 0));
    assert_eq!((load.blocks_held, load.blocks_free), (3, 13));
    while node.engine.scheduler().load().pending_prompt_tokens > 30 {
        node.turn();
    }
    let load = node.engine.scheduler().load();
    assert_eq!((load.running, load.prefilling, load.context_tokens), (1, 0, 40));
}

#[test]
fn records_have_the_work_of_their_steps() {
    let mut node = node(2, 16, 20, 1);
    node.arrive(new(1, COMPUTE, 40, 3));
    node.run();
    let work = |record: engine::StepRecord| {
        let work = record.work;
        (work.prefill_tokens, work.prefill_pairs, work.decode_rows, work.context_tokens)
    };
    let works: Vec<_> = node.engine.take_records().into_iter().map(work).take(5).collect();
    let pairs = |tokens: u64| tokens * (tokens + 1) / 2;
    assert_eq!(
        works,
        [
            (16, pairs(16), 0, 0),
            (16, pairs(32) - pairs(16), 0, 0),
            (8, pairs(40) - pairs(32), 0, 0),
            (0, 0, 1, 41),
            (0, 0, 1, 42),
        ]
    );
}

#[test]
fn equal_inputs_give_equal_plans_and_actions() {
    // Each run has its own hash seeds; the result must not depend on them.
    let run = || {
        let start = Instant::now();
        let limits = limits(3, 24, 14, 2);
        let mut scheduler = scheduler(unbounded_waits(limits));
        let mut executor = sim(limits, start);
        let (mut actions, mut log) = (Vec::new(), Vec::new());
        for id in 0..10 {
            let kind = if id % 3 == 2 { RECEIVE } else { COMPUTE };
            let new = NewSequence {
                deadline: start + Duration::from_secs(1000),
                ..new(id, kind, 10 + 6 * id as usize, 30)
            };
            scheduler.handle(start, Input::Arrived(new), &mut actions);
            while let Some(plan) = scheduler.plan(&mut actions) {
                log.push(format!("{plan:?}"));
                executor.launch(plan).expect("within the depth");
            }
            let result = executor.collect(Duration::from_secs(9)).expect("sound plans");
            scheduler.complete(result.expect("virtual time jumps"), &mut actions);
        }
        log.extend(actions.iter().map(|action| format!("{action:?}")));
        log.extend(scheduler.take_cache_changes().iter().map(|change| format!("{change:?}")));
        log
    };
    let first = run();
    assert!(first.len() > 20);
    assert_eq!(first, run());
}

#[test]
fn step_loop_returns_idle_pending_or_stepped_and_keeps_records() {
    let limits = limits(2, 64, 20, 2);
    let mut engine = StepLoop::new(scheduler(unbounded_waits(limits)), sim(limits, Instant::now()));
    let mut actions = Vec::new();
    let second = Duration::from_secs(1);
    assert_eq!(engine.turn(second, &mut actions).expect("nothing to do"), LoopOutcome::Idle);
    engine.handle(Input::Arrived(new(1, COMPUTE, 40, 3)), &mut actions);
    let glance = engine.turn(Duration::from_micros(1), &mut actions);
    assert_eq!(glance.expect("a sound plan"), LoopOutcome::Pending);
    assert_eq!(engine.steps_in_flight(), 2);
    assert_eq!(engine.turn(second, &mut actions).expect("a sound plan"), LoopOutcome::Stepped);
    while engine.turn(second, &mut actions).expect("a sound plan") != LoopOutcome::Idle {}
    let records = engine.take_records();
    assert_eq!(records.len(), 3);
    assert_eq!((records[0].rows, records[0].tokens, records[0].sampled), (1, 40, 1));
    assert!(records.is_sorted_by_key(|record| record.collect.end));
    assert!(records.iter().all(|record| record.busy > Duration::ZERO));
    let kinds: Vec<_> = records.iter().map(|record| record.kind).collect();
    assert_eq!(kinds, [StepKind::Prefill, StepKind::Decode, StepKind::Decode]);
    for record in &records {
        let device = record.device.expect("virtual time is known");
        assert!(record.plan.end <= record.launch.begin && record.launch.end <= device.begin);
        assert_eq!((device.duration(), record.results_at), (record.busy, Some(device.end)));
        assert!(device.end <= record.collect.begin && record.collect.begin <= record.collect.end);
    }
    assert_eq!(engine.take_records().len(), 0);
}

#[test]
fn contradictory_limits_are_rejected() {
    let good = unbounded_waits(limits(4, 64, 6, 2));
    let error = |config| Scheduler::new(config, SEEDS).expect_err("it contradicts itself");
    assert_eq!(
        error(SchedulerConfig { chunk_tokens: 0, ..good }),
        SchedulerConfigError::Zero { field: "chunk_tokens" }
    );
    assert_eq!(
        error(SchedulerConfig { step_tokens: 3, ..good }).to_string(),
        "invalid step_tokens: 3; expected 4 (one for each slot) to 64 (the executor's)"
    );
    assert!(Scheduler::new(SchedulerConfig { step_tokens: 65, ..good }, SEEDS).is_err());
}
