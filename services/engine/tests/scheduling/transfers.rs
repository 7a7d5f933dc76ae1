//! Sequences whose KV is sent or received.

use super::*;

#[test]
fn a_send_is_never_preempted() {
    let config = SchedulerConfig { chunk_tokens: 4, ..unbounded_waits(limits(2, 8, 8, 1)) };
    let mut node = Node::new(config);
    node.arrive(NewSequence { ignore_stop_tokens: true, ..new(1, COMPUTE, 16, 60) });
    node.turn();
    node.arrive(new(2, SEND, 90, 5));
    node.transfer_ready(SequenceId(2), 1);
    // The older sequence needs its third block while the sender prefills, and waits. The harness
    // checks that each block is handed over once, without gaps, with the right contents.
    node.run();
    assert_eq!(node.engine.scheduler().preemptions(), 0);
    assert!(node.finished(SequenceId(2)) && !node.finished(SequenceId(1)));
    node.transfer_ends(SequenceId(2));
    node.run();
    assert!(node.finished(SequenceId(1)));
    node.assert_all_returned();
}

#[test]
fn the_youngest_row_is_preempted_even_during_a_send() {
    let config = SchedulerConfig { chunk_tokens: 4, ..unbounded_waits(limits(3, 12, 12, 2)) };
    let mut node = Node::new(config);
    node.arrive(NewSequence { ignore_stop_tokens: true, ..new(1, COMPUTE, 16, 60) });
    node.arrive(NewSequence { ignore_stop_tokens: true, ..new(3, COMPUTE, 16, 60) });
    node.turn();
    node.arrive(new(2, SEND, 90, 5));
    node.transfer_ready(SequenceId(2), 0);
    node.run();
    assert!(node.engine.scheduler().preemptions() > 0);
    assert!(node.finished(SequenceId(2)));
    node.transfer_ends(SequenceId(2));
    node.run();
    node.assert_all_returned();
}

#[test]
fn blocks_cached_at_the_sender_are_handed_over_at_once() {
    let mut node = node(4, 64, 20, 2);
    node.arrive(NewSequence { id: SequenceId(1), ..new(3, COMPUTE, 70, 2) });
    node.run();
    let mut scheduler_view = Vec::new();
    let send = NewSequence { id: SequenceId(2), ..new(3, SEND, 70, 2) };
    node.arrive(send);
    node.transfer_ready(SequenceId(2), 1);
    // The plan that admits the sender hands over blocks 1 to 3 before any computation.
    node.engine.turn(Duration::ZERO, &mut scheduler_view).expect("a sound plan");
    match scheduler_view.as_slice() {
        [Action::KvWritten { first_block: 1, blocks, .. }] => assert_eq!(blocks.len(), 3),
        actions => panic!("{actions:?}"),
    }
}

#[test]
fn a_receive_missing_less_than_a_block_is_alone() {
    let mut node = node(4, 64, 20, 2);
    node.arrive(NewSequence { id: SequenceId(1), ..new(3, COMPUTE, 40, 2) });
    node.run();
    for (id, len, alone) in [(2, 40, true), (3, 47, true), (4, 48, false), (5, 9, true)] {
        let receive = NewSequence { id: SequenceId(id), ..new(3, RECEIVE, len, 4) };
        node.arrive(receive);
        assert_eq!(node.receiving().is_empty(), alone, "{len} tokens, 32 of them cached");
        node.receiving().into_iter().for_each(|id| node.kv_arrives(id));
        node.run();
        assert!(node.finished(SequenceId(id)));
    }
    node.assert_all_returned();
}

#[test]
fn an_aborted_receive_keeps_its_blocks_until_the_transfer_ends() {
    let mut node = node(4, 64, 6, 2);
    node.arrive(new(1, RECEIVE, 90, 2));
    assert_eq!(node.engine.scheduler().load().blocks_reserved, 6);
    node.abort(SequenceId(1));
    assert_eq!(node.engine.scheduler().load().blocks_reserved, 6);
    node.arrive(new(2, COMPUTE, 30, 2));
    assert_eq!(node.turn(), LoopOutcome::Idle, "no block for anyone else");
    node.transfer_ends(SequenceId(1));
    node.run();
    assert!(node.finished(SequenceId(2)));
    node.assert_all_returned();
}

#[test]
fn kv_that_arrives_after_an_abort_is_dropped() {
    let mut node = node(4, 64, 6, 2);
    node.arrive(new(1, RECEIVE, 90, 2));
    node.abort(SequenceId(1));
    node.kv_arrives(SequenceId(1));
    node.assert_all_returned();
    assert_eq!(node.engine.scheduler().load().blocks_free, 6);
}

#[test]
fn kv_with_an_invalid_token_fails_its_sequence_alone() {
    let now = Instant::now();
    for (first_index, id) in [(1, 3), (0, VOCABULARY)] {
        let mut scheduler = scheduler(unbounded_waits(limits(4, 64, 6, 2)));
        actions(&mut scheduler, now, Input::Arrived(new(1, RECEIVE, 40, 4)));
        let token = kernels::sampling::SampledToken { id, logprobs: None, pooled: None };
        let arrived = Input::KvArrived { id: SequenceId(1), first_index, token };
        let failure = SequenceFailure::TransferFailed;
        let failed = vec![Action::Failed { id: SequenceId(1), failure }];
        assert_eq!(actions(&mut scheduler, now, arrived), failed);
        assert!(scheduler.is_idle());
        assert_eq!(scheduler.load().blocks_free, 6);
    }
}

#[test]
fn a_receive_that_arrives_again_with_fewer_tokens_gets_its_blocks() {
    let mut scheduler = scheduler(unbounded_waits(limits(4, 64, 6, 2)));
    let mut arrive = |input| actions(&mut scheduler, Instant::now(), input);
    arrive(Input::Arrived(new(1, RECEIVE, 60, 2)));
    let id = SequenceId(2);
    assert_eq!(arrive(Input::Arrived(new(2, RECEIVE, 60, 2))), [], "2 of 4 blocks are free");
    assert_eq!(arrive(Input::Abort { id }), []);
    let reserved = arrive(Input::Arrived(new(2, RECEIVE, 20, 2)));
    assert!(matches!(reserved[..], [Action::Reserve { .. }, Action::Admitted { .. }]));
}

#[test]
fn a_receive_without_blocks_in_time_is_busy() {
    let config = SchedulerConfig {
        reserve_timeout: Duration::from_millis(50),
        ..unbounded_waits(limits(4, 64, 6, 2))
    };
    let mut node = Node::new(config);
    node.arrive(new(1, RECEIVE, 90, 2));
    node.arrive(new(2, RECEIVE, 20, 2));
    node.advance(Duration::from_millis(49));
    node.turn();
    assert_eq!(node.failure(SequenceId(2)), None);
    node.advance(Duration::from_millis(1));
    node.turn();
    let failure = node.failure(SequenceId(2)).expect("its time is up").to_string();
    assert_eq!(failure, "busy: no room for the KV of 20 tokens within 50ms");
    node.kv_arrives(SequenceId(1));
    node.run();
    node.assert_all_returned();
}

/// If it waited, two nodes that prefill for each other could deadlock.
#[test]
fn a_send_waits_for_no_block_or_slot_beside_a_reservation() {
    for (slots, blocks) in [(4, 6), (1, 12)] {
        let mut node = node(slots, 64, blocks, 2);
        node.arrive(new(1, COMPUTE, 70, 2));
        node.arrive(new(2, SEND, 40, 2));
        node.turn();
        node.transfer_ready(SequenceId(2), 0);
        node.run();
        assert!(node.finished(SequenceId(2)), "{:?}", node.failure(SequenceId(2)));
        node.transfer_ends(SequenceId(2));
        node.arrive(new(3, RECEIVE, 70, 2));
        node.arrive(new(4, SEND, 40, 2));
        node.transfer_ready(SequenceId(4), 0);
        node.turn();
        let failure = node.failure(SequenceId(4)).expect("it does not wait").to_string();
        assert_eq!(failure, "busy: no room to prefill for a peer beside reservations");
        node.transfer_ends(SequenceId(4));
        node.kv_arrives(SequenceId(3));
        node.run();
        assert!(node.finished(SequenceId(3)));
        node.assert_all_returned();
    }
}

#[test]
fn a_send_without_a_reservation_times_out_and_ends_its_transfer() {
    let config = SchedulerConfig {
        ready_timeout: Duration::from_secs(2),
        ..unbounded_waits(limits(4, 64, 6, 2))
    };
    let mut node = Node::new(config);
    node.arrive(new(1, SEND, 40, 2));
    node.advance(Duration::from_secs(2));
    node.turn();
    assert_eq!(node.failure(SequenceId(1)), Some(&SequenceFailure::TransferFailed));
    assert_eq!(node.transfers_to_end(), [SequenceId(1)]);
    node.transfer_ends(SequenceId(1));
    node.assert_all_returned();
}

#[test]
fn a_send_with_a_grammar_waits_until_its_receiver_has_compiled_the_grammar() {
    let ready_timeout = Duration::from_secs(2);
    let config = SchedulerConfig { ready_timeout, ..unbounded_waits(limits(4, 64, 6, 2)) };
    let mut node = Node::new(config);
    for id in [1, 2] {
        let constraint = Some(HashGrammar::new(1, 5).constraint());
        node.arrive(NewSequence { constraint, ..new(id, SEND, 40, 2) });
    }
    node.advance(COMPILE_TIMEOUT);
    node.turn();
    assert_eq!(node.failure(SequenceId(1)), None);
    node.transfer_ready(SequenceId(1), 0);
    node.run();
    assert!(node.finished(SequenceId(1)));
    node.transfer_ends(SequenceId(1));
    node.advance(ready_timeout);
    node.turn();
    assert_eq!(node.failure(SequenceId(2)), Some(&SequenceFailure::TransferFailed));
    node.transfer_ends(SequenceId(2));
    node.assert_all_returned();
}

#[test]
fn an_invalid_reservation_fails_the_send() {
    let now = Instant::now();
    // The sender has three blocks.
    for (first_block, block_count) in [(3, 0), (3, 1), (1, 1), (1, 3), (1, u32::MAX)] {
        let mut scheduler = scheduler(unbounded_waits(limits(4, 64, 6, 2)));
        actions(&mut scheduler, now, Input::Arrived(new(1, SEND, 40, 2)));
        let ready = Input::TransferReady { id: SequenceId(1), first_block, block_count };
        let actions = actions(&mut scheduler, now, ready);
        assert!(
            matches!(
                actions.as_slice(),
                [
                    Action::AbortTransfer { .. },
                    Action::Failed { failure: SequenceFailure::TransferFailed, .. }
                ]
            ),
            "{actions:?}"
        );
    }
}

#[test]
fn a_first_token_that_ends_the_request_aborts_the_transfer() {
    let mut node = node(4, 64, 20, 2);
    // `max_tokens` is 1; the harness checks AbortTransfer and the reason.
    node.arrive(new(1, SEND, 40, 1));
    node.transfer_ready(SequenceId(1), 0);
    node.run();
    assert!(node.finished(SequenceId(1)));
    assert_eq!(node.transfers_to_end(), [SequenceId(1)]);
    node.transfer_ends(SequenceId(1));
    node.arrive(new(2, RECEIVE, 40, 1));
    node.kv_arrives(SequenceId(2));
    assert!(node.finished(SequenceId(2)), "its one token came with the KV");
    node.assert_all_returned();
}

#[test]
fn a_receive_is_not_delayed_by_a_wait_for_budget() {
    let mut node = node(8, 8, 40, 1);
    node.arrive(new(1, COMPUTE, 90, 2));
    node.turn();
    node.arrive(new(2, COMPUTE, 90, 2));
    node.turn();
    node.arrive(new(3, RECEIVE, 40, 2));
    assert_eq!(node.receiving(), [SequenceId(3)]);
    node.kv_arrives(SequenceId(3));
    node.run();
    node.assert_all_returned();
}
