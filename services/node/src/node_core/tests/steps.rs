//! Calls, transfers and observers of a whole node.

use super::*;

#[test]
fn compute_call_is_accepted_decodes_and_leaves_nothing() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Compute);
    let replies = replies(node.run());
    assert_eq!(replies[0], Reply::Accepted);
    assert_eq!(
        replies[1],
        Reply::Event(AttemptEvent::Reserved { cached_tokens: 0, local_prefill: true })
    );
    let tokens = replies.iter().filter_map(|reply| match reply {
        Reply::Event(AttemptEvent::Tokens { tokens, .. }) => Some(tokens.len()),
        _ => None,
    });
    assert_eq!(tokens.sum::<usize>(), 4);
    assert!(matches!(replies.last(), Some(Reply::Ended(AttemptEnd::Finished { .. }))));
    assert!(node.core.is_empty() && node.core.scheduler().is_idle());
}

/// A `Receive` that finds the transfer queue full gives its blocks back at once.
#[test]
fn full_transfer_queue_frees_the_reserved_blocks() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Receive);
    let (call, command) = std::iter::from_fn(|| node.core.poll_output())
        .find_map(|output| match output {
            NodeOutput::Transfer { call, command } => Some((call, command)),
            _ => None,
        })
        .expect("a Receive command");
    assert_eq!(node.core.scheduler().load().blocks_reserved, 2);
    node.core.handle_transfer_queue_full(call, command, "full".into(), node.now);
    let replies = replies(node.outputs());
    assert_eq!(replies, [Reply::Ended(AttemptEnd::failed(FailureKind::Busy, "full"))]);
    assert_eq!(node.core.scheduler().load().blocks_reserved, 0);
    assert!(node.core.is_empty() && node.core.scheduler().is_idle());
}

/// A command on an active transfer is offered again in order, and no sooner than after
/// [`TRANSFER_RETRY_AFTER`].
#[test]
fn commands_keep_their_order_while_the_transfer_queue_is_full() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Receive);
    node.call(2, SequenceKind::Receive);
    assert_eq!(node.commands().len(), 2);
    for id in [1, 2] {
        node.core.handle_cancel(CallId { sequence: SequenceId(id), number: id as u64 });
    }
    let aborted = |command: &transfer::Command| match command {
        transfer::Command::Abort { transfer, .. } => transfer.0,
        other => panic!("{other:?}"),
    };
    for _ in 0..3 {
        let offered =
            std::iter::from_fn(|| node.core.poll_output()).find_map(|output| match output {
                NodeOutput::Transfer { call, command } => Some((call, command)),
                _ => None,
            });
        let (call, command) = offered.expect("an Abort command");
        assert_eq!(aborted(&command), 1);
        node.core.handle_transfer_queue_full(call, command, "full".into(), node.now);
        node.advance(Duration::ZERO);
        assert!(node.commands().is_empty());
        assert_eq!(node.core.next_deadline(), Some(node.now + TRANSFER_RETRY_AFTER));
        node.advance(TRANSFER_RETRY_AFTER);
    }
    assert_eq!(node.commands().iter().map(aborted).collect::<Vec<_>>(), [1, 2]);
}

/// Tokens of one step are separate actions: a full caller queue takes effect before the next one.
#[test]
fn slow_reader_gets_no_reply_after_the_one_that_did_not_fit() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Compute);
    let call = CallId { sequence: SequenceId(1), number: 1 };
    let mut after = None;
    loop {
        while let Some(output) = node.core.poll_output() {
            match output {
                NodeOutput::Reply { reply: Reply::Event(AttemptEvent::Tokens { .. }), .. } => {
                    assert_eq!(after, None, "no token follows");
                    node.core.handle_slow_reader(call);
                    after = Some(Vec::new());
                }
                NodeOutput::Reply { reply, .. } => {
                    if let Some(after) = &mut after {
                        after.push(reply);
                    }
                }
                _ => {}
            }
        }
        if node.core.step(Duration::ZERO).unwrap() == LoopOutcome::Idle {
            break;
        }
    }
    let after = after.expect("a token");
    assert!(
        matches!(
            after[..],
            [Reply::Ended(AttemptEnd::Failed { kind: FailureKind::SlowReader, .. })]
        ),
        "{after:?}"
    );
    assert!(node.core.scheduler().is_idle());
}

#[test]
fn deltas_follow_the_snapshot_in_order_and_at_most_every_interval() {
    let mut node = Node::new();
    node.core.executor_mut().is_hung = true;
    node.core.handle_observe(ObserverId(1), node.now);
    let events = observe_events(node.outputs());
    assert_eq!((events.len(), events[0].sequence), (1, 0));
    assert!(matches!(events[0].event, Some(ObserveEvent::Snapshot(_))));

    // Two changes within one interval are one delta.
    for id in [1, 2] {
        node.call(id, SequenceKind::Compute);
        node.core.handle_deadline(node.now);
        assert!(observe_events(node.outputs()).is_empty());
    }
    assert_eq!(node.core.next_deadline(), Some(node.now + observers::INTERVAL));
    node.advance(observers::INTERVAL);
    let events = observe_events(node.outputs());
    let [v1::ObserveEvent { sequence: 1, event: Some(ObserveEvent::Delta(delta)) }] = &events[..]
    else {
        panic!("one delta: {events:?}");
    };
    assert_eq!(delta.load.unwrap().waiting, 2);
    let ids = [1_u128, 2].map(|id| id.to_be_bytes().to_vec());
    assert!(delta.arrived.iter().eq(&ids), "the delta names the attempts: {delta:?}");

    // Without a change there is no delta.
    node.advance(observers::INTERVAL);
    assert!(observe_events(node.outputs()).is_empty());

    // A drain is told at once, and rejects new calls.
    node.core.handle_draining(true, None, node.now);
    node.call(3, SequenceKind::Compute);
    let outputs = node.outputs();
    assert_eq!(replies(outputs.clone()), [Reply::Rejected(Refusal::Draining)]);
    let events = observe_events(outputs);
    let [v1::ObserveEvent { sequence: 2, event: Some(ObserveEvent::Delta(delta)) }] = &events[..]
    else {
        panic!("one delta: {events:?}");
    };
    assert!(delta.load.unwrap().draining);

    // An operator ends the drain.
    node.core.handle_draining(false, None, node.now);
    node.call(4, SequenceKind::Compute);
    let outputs = node.outputs();
    assert!(!replies(outputs.clone()).contains(&Reply::Rejected(Refusal::Draining)));
    let Some(ObserveEvent::Delta(delta)) = &observe_events(outputs)[0].event else {
        panic!("the end of the drain is sent at once");
    };
    assert!(!delta.load.unwrap().draining);
}

#[test]
fn observers_get_the_limits_and_measured_costs_of_steps() {
    let mut node = Node::new();
    let costs = |node: &mut Node, observer| {
        node.core.handle_observe(ObserverId(observer), node.now);
        let events = observe_events(node.outputs());
        let Some(ObserveEvent::Snapshot(snapshot)) = &events.last().unwrap().event else {
            panic!("a new observer gets a snapshot: {events:?}");
        };
        snapshot.load.unwrap().step_costs.unwrap()
    };
    let before = costs(&mut node, 1);
    assert_eq!((before.step_tokens, before.chunk_tokens, before.itl_max_ms), (32, 32, 0));
    assert_eq!((before.prefill, before.decode), (None, None));
    // Each step takes 5 ms, but not the time between two requests.
    for id in 1..=4 {
        node.advance(Duration::from_secs(1));
        node.call(id, SequenceKind::Compute);
        node.outputs();
        while !node.core.is_empty() {
            node.core.executor_mut().is_hung = true;
            node.core.step(Duration::ZERO).unwrap();
            node.advance(Duration::from_millis(5));
            node.core.executor_mut().is_hung = false;
            node.core.step(Duration::ZERO).unwrap();
            node.outputs();
        }
    }
    node.core.handle_deadline(node.now);
    let after = costs(&mut node, 2);
    let decode = after.decode.expect("twelve decode steps");
    assert!((4_900_000_000..5_100_000_000).contains(&decode.step_ps), "{decode:?}");
    // Prompts of 20 tokens do not measure prefill throughput.
    assert_eq!(after.prefill, None);
}

#[test]
fn stalled_step_ends_the_observers_until_a_step_finishes() {
    let mut node = Node::new();
    node.core.handle_observe(ObserverId(1), node.now);
    // An idle node is not stalled.
    node.advance(2 * STALL_AFTER);
    node.core.executor_mut().is_hung = true;
    node.call(1, SequenceKind::Compute);
    node.outputs();
    assert_eq!(
        node.core.step(Duration::ZERO).unwrap(),
        LoopOutcome::Stepped,
        "the launch has outputs"
    );
    node.outputs();
    assert_eq!(node.core.step(Duration::ZERO).unwrap(), LoopOutcome::Pending);
    node.advance(STALL_AFTER - Duration::from_millis(1));
    let stalled = |outputs: Vec<NodeOutput>| {
        let ended = |output: &NodeOutput| matches!(output, NodeOutput::ObserveStalled { .. });
        outputs.iter().filter(|output| ended(output)).count()
    };
    assert_eq!(stalled(node.outputs()), 0);
    assert_eq!(node.core.next_deadline(), Some(node.now + Duration::from_millis(1)));
    node.advance(Duration::from_millis(1));
    assert_eq!(stalled(node.outputs()), 1);
    // A new observer is ended at once.
    node.core.handle_observe(ObserverId(2), node.now);
    assert_eq!(stalled(node.outputs()), 1);

    node.core.executor_mut().is_hung = false;
    node.run();
    node.advance(Duration::ZERO);
    let outputs = node.outputs();
    assert!(outputs.iter().any(|output| matches!(output, NodeOutput::Recovered)));
    node.core.handle_observe(ObserverId(3), node.now);
    assert_eq!(observe_events(node.outputs()).len(), 1);
}

#[test]
fn kv_that_arrives_at_an_idle_node_is_launched_before_its_events_leave() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Receive);
    node.outputs();
    let (transfer, first_index, stats) = (TransferId(1), 0, TransferStats::default());
    let arrived = transfer::Event::Arrived { transfer, first_index, token: token(3), stats };
    node.core.launch_arrived_kv().unwrap();
    assert_eq!(node.core.step_age(), None, "no KV has arrived");
    node.core.handle_transfer_event(arrived, node.now);
    node.core.launch_arrived_kv().unwrap();
    assert!(node.core.step_age().is_some(), "a step is in flight");
    let replies = replies(node.outputs());
    let [Reply::Event(AttemptEvent::Tokens { first_index: 0, tokens, .. })] = &replies[..] else {
        panic!("{replies:?}");
    };
    assert_eq!(tokens[..], [token(3)]);
}

#[test]
fn kv_that_arrives_during_a_change_of_the_weights_starts_no_step() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Receive);
    node.outputs();
    node.core.handle_change_weights(7, String::new(), InFlight::KeepKv, false, node.now).unwrap();
    let (transfer, first_index, stats) = (TransferId(1), 0, TransferStats::default());
    let arrived = transfer::Event::Arrived { transfer, first_index, token: token(3), stats };
    node.core.handle_transfer_event(arrived, node.now);
    node.core.launch_arrived_kv().unwrap();
    assert_eq!(node.core.step_age(), None, "a step would delay the change");
}

#[test]
fn kv_and_first_token_are_sent_before_the_caller_gets_the_token() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Send);
    node.outputs();
    let (transfer, traceparent) = (TransferId(1), String::new());
    let ready = transfer::Event::Ready { transfer, first_block: 0, block_count: 2, traceparent };
    node.core.handle_transfer_event(ready, node.now);
    let sent = node.run().into_iter().filter_map(|output| match output {
        NodeOutput::Transfer { command: transfer::Command::Written { .. }, .. } => Some("KV"),
        NodeOutput::Transfer { command: transfer::Command::Finish { .. }, .. } => Some("token 0"),
        NodeOutput::Reply { reply: Reply::Event(AttemptEvent::Tokens { .. }), .. } => Some("reply"),
        _ => None,
    });
    assert_eq!(sent.collect::<Vec<_>>(), ["KV", "token 0", "reply"]);
}
