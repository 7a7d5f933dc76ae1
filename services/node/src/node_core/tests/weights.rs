//! Changes and releases of the weights.

use super::*;

/// A decode row is recomputed under the new weights. A `Receive` fails at once, before the
/// transfers learn of the change.
#[test]
fn weights_change_at_a_step_boundary_and_no_kv_survives() {
    let mut node = Node::new();
    node.core.handle_observe(ObserverId(1), node.now);
    node.call(1, SequenceKind::Compute);
    // Before the first step: a prefix hit on the other sequence would leave less than a block to
    // receive.
    node.call(2, SequenceKind::Receive);
    let mut begun = node.outputs();
    for _ in 0..2 {
        node.core.step(Duration::ZERO).unwrap();
        begun.extend(node.outputs());
    }
    let commands_begun = |output: &NodeOutput| match output {
        NodeOutput::Transfer { command, .. } => {
            Some(matches!(command, transfer::Command::Receive { .. }))
        }
        _ => None,
    };
    let receives: Vec<_> = begun.iter().filter_map(commands_begun).collect();
    assert_eq!(receives, [true], "{begun:?}");

    let old = node.core.scheduler().cached_hashes();
    assert!(!old.is_empty());

    node.core
        .handle_change_weights(7, "step 100".into(), InFlight::Recompute, false, node.now)
        .unwrap();
    let mut outputs = Vec::new();
    while !outputs.iter().any(|output| matches!(output, NodeOutput::WeightsChanged { .. })) {
        node.core.step(Duration::ZERO).unwrap();
        outputs.extend(node.outputs());
        assert!(outputs.len() < 1000, "the weights never change");
    }
    let commands = outputs.iter().filter_map(|output| match output {
        NodeOutput::Transfer { command, .. } => Some(command),
        _ => None,
    });
    let commands: Vec<_> = commands.collect();
    assert!(matches!(
        commands[..],
        [transfer::Command::Abort { .. }, transfer::Command::ChangeWeights { weight_version: 7 }]
    ));
    let changes: Vec<_> = observe_events(outputs.clone())
        .into_iter()
        .filter_map(|event| match event.event {
            Some(ObserveEvent::Delta(delta)) => delta.weights,
            _ => None,
        })
        .collect();
    let changed = v1::WeightsChanged { weight_version: 7, label: "step 100".into() };
    assert_eq!(changes, [changed]);
    let ended = replies(outputs);
    assert!(ended.contains(&Reply::Ended(AttemptEnd::failed(
        FailureKind::WeightsChanged,
        "the weights changed"
    ))));
    // The recomputed row may have cached its blocks again, under keys of the new weights.
    let cached = node.core.scheduler().cached_hashes();
    assert!(old.iter().all(|hash| !cached.contains(hash)), "{cached:?} {old:?}");

    let finished = |reply: &Reply| matches!(reply, Reply::Ended(AttemptEnd::Finished { .. }));
    assert!(ended.into_iter().chain(replies(node.run())).any(|reply| finished(&reply)));
    node.core.handle_transfer_event(
        transfer::Event::ReceiveFailed {
            transfer: TransferId(2),
            failure: TransferFailure::Aborted { reason: String::new() },
        },
        node.now,
    );
    node.run();
    assert!(node.core.is_empty() && node.core.scheduler().is_idle());
    node.core.scheduler().check();
}

/// Limits are checked before the call reaches the engine thread, and the weights may change in
/// between.
#[test]
fn call_for_other_weights_is_rejected() {
    let mut node = Node::new();
    node.core
        .handle_change_weights(7, String::new(), InFlight::Recompute, false, node.now)
        .unwrap();
    node.run();
    node.call(1, SequenceKind::Compute);
    let refusal = Refusal::OtherWeights { named: 1, own: 7 };
    assert_eq!(replies(node.outputs()), [Reply::Rejected(refusal)]);
}

#[test]
fn sequence_that_keeps_its_kv_continues_and_shares_no_block() {
    let (mut node, mut outputs) = node_with_running_sequence();
    let old = node.core.scheduler().cached_hashes();
    assert_eq!(old.len(), 1);
    node.core.handle_change_weights(7, String::new(), InFlight::KeepKv, false, node.now).unwrap();
    outputs.extend(node.run());
    let versions = versions_of(&outputs, 1);
    let before = versions.iter().take_while(|version| **version == 1).count();
    assert!(before > 0 && before < 40, "{versions:?}");
    assert_eq!(versions[before], 0);
    assert_eq!(versions[before + 1..], vec![7; 40 - before]);
    assert_eq!(node.core.scheduler().preemptions(), 0);
    // Blocks that were filled after the change depend on both weights.
    assert_eq!(node.core.scheduler().cached_hashes(), old);

    let second = Call { weight_version: 7, ..call(2, 2, SequenceKind::Compute, node.now) };
    node.core.handle_call(second, node.now);
    let fresh = AttemptEvent::Reserved { cached_tokens: 0, local_prefill: true };
    assert!(replies(node.run()).contains(&Reply::Event(fresh)));
    node.core.scheduler().check();
}

/// The answer of the second sequence names only the new weights.
#[test]
fn sequence_without_output_is_recomputed_although_others_keep_their_kv() {
    let mut node = Node::new();
    let long = |id: u128, token: u32, now| {
        let mut call = call(id, id as u64, SequenceKind::Compute, now);
        (call.sequence.tokens, call.sequence.prompt_len) = (vec![token; 50], 50);
        call
    };
    for (id, token) in [(1, 1), (2, 2)] {
        node.core.handle_call(long(id, token, node.now), node.now);
    }
    let mut outputs = node.outputs();
    // Steps of 32 tokens are in flight: the rest of the first prompt, and a part of the second one.
    node.core.step(Duration::ZERO).unwrap();
    node.core.handle_change_weights(7, String::new(), InFlight::KeepKv, false, node.now).unwrap();
    outputs.extend(node.run());
    assert_eq!(versions_of(&outputs, 1), [1, 1, 0, 7, 7]);
    assert_eq!(versions_of(&outputs, 2), [0, 7, 7, 7, 7]);
    assert_eq!(node.core.scheduler().preemptions(), 1);

    // The KV of the second prompt is of the new weights alone.
    let third = Call { weight_version: 7, ..long(3, 2, node.now) };
    node.core.handle_call(third, node.now);
    let cached = AttemptEvent::Reserved { cached_tokens: 48, local_prefill: true };
    assert!(replies(node.run()).contains(&Reply::Event(cached)));
    node.core.scheduler().check();
}

#[test]
fn running_sequence_finishes_before_the_weights_change_and_others_begin_after() {
    let (mut node, mut outputs) = node_with_running_sequence();
    node.core.handle_change_weights(7, String::new(), InFlight::Recompute, true, node.now).unwrap();
    node.call(2, SequenceKind::Compute);
    outputs.extend(node.run());
    assert_eq!(versions_of(&outputs, 1), [vec![1; 40], vec![0]].concat());
    assert_eq!(versions_of(&outputs, 2), [vec![0], vec![7; 4]].concat());
    node.core.scheduler().check();
}

/// One sender waits for its receiver, one for a step, and one arrives later.
#[test]
fn weights_change_without_waiting_for_senders_that_are_not_admitted() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Send);
    node.call(2, SequenceKind::Send);
    let ready = |id| transfer::Event::Ready {
        transfer: TransferId(id),
        first_block: 0,
        block_count: 2,
        traceparent: String::new(),
    };
    node.outputs();
    node.core.handle_transfer_event(ready(2), node.now);
    let mut outputs = node.outputs();
    node.core.handle_change_weights(7, String::new(), InFlight::Recompute, true, node.now).unwrap();
    outputs.extend(node.outputs());
    let failed = || {
        let message = SequenceFailure::WeightsChanged.to_string();
        Reply::Ended(AttemptEnd::failed(FailureKind::WeightsChanged, message))
    };
    assert_eq!(replies(outputs), [failed(), failed()]);

    node.call(3, SequenceKind::Send);
    node.call(4, SequenceKind::Send);
    node.outputs();
    node.core.handle_transfer_event(ready(4), node.now);
    assert_eq!(replies(node.outputs()), [failed()], "a ready sender fails during the wait");
    let mut outputs = node.run();
    outputs.extend(node.outputs());
    assert!(outputs.iter().any(|output| matches!(output, NodeOutput::WeightsChanged { .. })));
    assert_eq!(replies(outputs), [failed()]);
    node.core.scheduler().check();
}

/// The receiver waits for KV that this node sends: it must arrive.
#[test]
fn weights_change_after_an_admitted_sender_has_delivered_its_kv() {
    let mut node = Node::new();
    node.call(1, SequenceKind::Send);
    node.outputs();
    let ready = transfer::Event::Ready {
        transfer: TransferId(1),
        first_block: 0,
        block_count: 2,
        traceparent: String::new(),
    };
    node.core.handle_transfer_event(ready, node.now);
    node.outputs();
    node.core.step(Duration::ZERO).unwrap();
    node.core.handle_change_weights(7, String::new(), InFlight::Recompute, true, node.now).unwrap();
    let changes = |node: &mut Node| {
        let mut outputs = node.run();
        outputs.extend(node.outputs());
        outputs.iter().any(|output| matches!(output, NodeOutput::WeightsChanged { .. }))
    };
    assert!(!changes(&mut node));
    let delivered = transfer::Event::Delivered { transfer: TransferId(1), stats: STATS };
    node.core.handle_transfer_event(delivered, node.now);
    assert!(changes(&mut node));
    node.core.scheduler().check();
}

#[test]
fn aborted_sequence_ends_at_the_change_and_one_without_output_begins_after() {
    let (mut node, mut outputs) = node_with_running_sequence();
    node.call(2, SequenceKind::Compute);
    outputs.extend(node.outputs());
    node.core.handle_change_weights(7, String::new(), InFlight::Abort, false, node.now).unwrap();
    outputs.extend(node.run());
    let versions = versions_of(&outputs, 1);
    let tokens = versions.iter().filter(|version| **version == 1).count();
    assert!(tokens > 0 && tokens < 40, "{versions:?}");
    assert_eq!(versions, [vec![1; tokens], vec![0]].concat());
    assert_eq!(versions_of(&outputs, 2), [vec![0], vec![7; 4]].concat());
    let ended = replies(outputs).into_iter().filter_map(|reply| match reply {
        Reply::Ended(AttemptEnd::Finished { reason, .. }) => Some(reason),
        _ => None,
    });
    assert_eq!(ended.collect::<Vec<_>>(), [FinishReason::Abort, FinishReason::Length]);
    assert!(node.core.is_empty() && node.core.scheduler().is_idle());
    node.core.scheduler().check();
}

#[test]
fn weights_change_when_a_running_sequence_does_not_finish_in_time() {
    let (mut node, mut outputs) = node_with_running_sequence();
    node.core.handle_change_weights(7, String::new(), InFlight::Recompute, true, node.now).unwrap();
    assert!(node.core.next_deadline().unwrap() <= node.now + FINISH_WITHIN);
    node.core.step(Duration::ZERO).unwrap();
    outputs.extend(node.outputs());
    assert!(!outputs.iter().any(|output| matches!(output, NodeOutput::WeightsChanged { .. })));
    node.advance(FINISH_WITHIN);
    outputs.extend(node.run());
    let versions = versions_of(&outputs, 1);
    let before = versions.iter().take_while(|version| **version == 1).count();
    assert!(before < 40, "{versions:?}");
    assert_eq!(versions[before..], [vec![0], vec![7; 40 - before]].concat());
}

#[test]
fn change_of_the_weights_is_refused_while_another_one_is_pending() {
    let (mut node, mut outputs) = node_with_running_sequence();
    let change = |node: &mut Node, version: u64, waits: bool| {
        let (label, now) = (String::new(), node.now);
        node.core.handle_change_weights(version, label, InFlight::Recompute, waits, now)
    };
    assert_eq!(change(&mut node, 7, true), Ok(()));
    assert_eq!(change(&mut node, 8, false), Err(ChangePending));
    assert_eq!(node.core.handle_release_weights(false, node.now), Err(ChangePending));
    outputs.extend(node.run());
    outputs.extend(node.outputs());
    let changes = outputs.iter().filter(|it| matches!(it, NodeOutput::WeightsChanged { .. }));
    assert_eq!(changes.count(), 1);
    assert_eq!(versions_of(&outputs, 1), [vec![1; 40], vec![0]].concat(), "it may finish");
    assert!(!is_released(&outputs));

    assert_eq!(change(&mut node, 8, false), Ok(()));
    node.run();
    node.call(2, SequenceKind::Compute);
    let refusal = Refusal::OtherWeights { named: 1, own: 8 };
    assert_eq!(replies(node.outputs()), [Reply::Rejected(refusal)]);
}

fn is_released(outputs: &[NodeOutput]) -> bool {
    outputs.iter().any(|output| matches!(output, NodeOutput::WeightsReleased))
}

#[test]
fn released_weights_hold_sequences_where_they_are_until_the_change() {
    let (mut node, mut outputs) = node_with_running_sequence();
    node.core.handle_release_weights(false, node.now).unwrap();
    node.call(2, SequenceKind::Compute);
    outputs.extend(node.run());
    outputs.extend(node.outputs());
    assert!(is_released(&outputs));
    let tokens = versions_of(&outputs, 1).len();
    node.advance(Duration::from_secs(1));
    outputs.extend(node.run());
    assert_eq!((versions_of(&outputs, 1).len(), versions_of(&outputs, 2).len()), (tokens, 0));

    node.core.handle_change_weights(7, String::new(), InFlight::KeepKv, true, node.now).unwrap();
    outputs.extend(node.run());
    outputs.extend(node.outputs());
    let paused = outputs.iter().find_map(|output| match output {
        NodeOutput::WeightsChanged { paused } => Some(*paused),
        _ => None,
    });
    assert!(paused.unwrap() >= Duration::from_secs(1), "from the release on: {paused:?}");
    let kept = [vec![1; tokens], vec![0], vec![7; 40 - tokens]].concat();
    assert_eq!(versions_of(&outputs, 1), kept);
    node.core.scheduler().check();
}

#[test]
fn node_without_weights_fails_every_sequence_and_refuses_calls_until_it_has_some() {
    let (mut node, _) = node_with_running_sequence();
    node.core.handle_observe(ObserverId(1), node.now);
    node.core.handle_release_weights(false, node.now).unwrap();
    node.call(2, SequenceKind::Compute);
    node.run();
    node.outputs();
    assert!(node.core.handle_lost_weights(node.now));
    let outputs = node.outputs();
    let ended = replies(outputs.clone());
    let failed = |reply: &&Reply| {
        matches!(reply, Reply::Ended(AttemptEnd::Failed { kind: FailureKind::WeightsChanged, .. }))
    };
    assert_eq!(ended.iter().filter(failed).count(), 2, "{ended:?}");
    let deltas = |outputs: Vec<NodeOutput>| -> Vec<(Option<u64>, Option<bool>)> {
        let delta = |event: v1::ObserveEvent| match event.event {
            Some(ObserveEvent::Delta(delta)) => Some((
                delta.weights.map(|weights| weights.weight_version),
                delta.load.map(|load| load.draining),
            )),
            _ => None,
        };
        observe_events(outputs).into_iter().filter_map(delta).collect()
    };
    assert_eq!(deltas(outputs).last_chunk(), Some(&[(Some(0), None), (None, Some(true))]));
    for named in [0, 1] {
        let call = Call { weight_version: named, ..call(3, 3, SequenceKind::Compute, node.now) };
        node.core.handle_call(call, node.now);
        let refusal = Refusal::OtherWeights { named, own: 0 };
        assert_eq!(replies(node.outputs()), [Reply::Rejected(refusal)]);
    }

    node.core
        .handle_change_weights(1, String::new(), InFlight::Recompute, false, node.now)
        .unwrap();
    node.run();
    assert_eq!(deltas(node.outputs()).last_chunk(), Some(&[(Some(1), None), (None, Some(false))]));
    node.call(4, SequenceKind::Compute);
    assert_eq!(versions_of(&node.run(), 4), [1; 4]);
    node.core.scheduler().check();
}

#[test]
fn update_that_is_aborted_before_the_release_loses_nothing() {
    for waits in [false, true] {
        let (mut node, mut outputs) = node_with_running_sequence();
        node.core.handle_release_weights(waits, node.now).unwrap();
        assert!(!node.core.handle_lost_weights(node.now));
        node.call(2, SequenceKind::Compute);
        outputs.extend(node.run());
        assert!(!is_released(&outputs));
        assert_eq!(versions_of(&outputs, 1), [1; 40]);
        assert_eq!(versions_of(&outputs, 2), [1; 4]);
    }
}
