//! Pauses.

use super::*;

#[test]
fn paused_node_admits_nothing_until_it_resumes() {
    use v1::PauseState::{None, Paused, Pausing};
    for (in_flight, waits) in [
        (InFlight::Recompute, false),
        (InFlight::KeepKv, false),
        (InFlight::Recompute, true),
        (InFlight::Abort, false),
    ] {
        let (mut node, mut outputs) = node_with_running_sequence();
        node.core.handle_observe(ObserverId(1), node.now);
        let before = versions_of(&outputs, 1).len();
        outputs.extend(node.pause(in_flight, waits));
        assert_eq!(pauses(&outputs), [Pausing, Paused]);
        assert_eq!(versions_of(&outputs, 2), [] as [u64; 0], "{in_flight:?}");
        let tokens = versions_of(&outputs, 1).len();
        let is_done = |outputs: &[NodeOutput], id| {
            outputs.iter().any(|output| {
                matches!(output, NodeOutput::Reply { call, reply: Reply::Ended(_) } if call.sequence == SequenceId(id))
            })
        };
        match (in_flight, waits) {
            (_, true) => assert_eq!(tokens, 40),
            _ => assert!(tokens <= before + LIMITS.depth as usize && tokens < 40, "{tokens}"),
        }
        assert_eq!(is_done(&outputs, 1), waits || in_flight == InFlight::Abort);
        let states =
            observe_events(outputs.clone()).into_iter().filter_map(|event| match event.event {
                Some(ObserveEvent::Delta(delta)) => delta.load.map(|load| load.pause()),
                _ => Option::None,
            });
        assert_eq!(states.last(), Some(Paused));

        node.core.handle_resume(node.now);
        outputs.extend(node.run());
        assert_eq!(pauses(&outputs), [Pausing, Paused, None]);
        assert!(is_done(&outputs, 1) && is_done(&outputs, 2));
        assert_eq!(versions_of(&outputs, 2).len(), 4);
        if in_flight != InFlight::Abort {
            assert_eq!(versions_of(&outputs, 1).len(), 40);
        }
        assert_eq!(
            node.core.scheduler().preemptions(),
            u64::from(in_flight != InFlight::KeepKv && !waits && in_flight != InFlight::Abort)
        );
        node.core.scheduler().check();
    }
}

#[test]
fn pause_ends_at_its_deadline() {
    let (mut node, _) = node_with_running_sequence();
    node.pause(InFlight::KeepKv, false);
    assert!(node.core.next_deadline().unwrap() <= node.now + PAUSE_MAX);
    // A second pause replaces the deadline.
    node.core.handle_pause(InFlight::KeepKv, false, node.now + 2 * PAUSE_MAX, node.now);
    node.advance(PAUSE_MAX);
    assert_eq!(node.core.step(Duration::ZERO).unwrap(), LoopOutcome::Idle);
    assert_eq!(pauses(&node.outputs()), []);
    // The shell sleeps if the step after the deadline is idle.
    node.now += PAUSE_MAX;
    node.core.executor_mut().now = node.now;
    assert_ne!(node.core.step(Duration::ZERO).unwrap(), LoopOutcome::Idle);
    let mut outputs = node.outputs();
    assert_eq!(pauses(&outputs), [v1::PauseState::None]);
    outputs.extend(node.run());
    assert_eq!(versions_of(&outputs, 2).len(), 4);
}

#[test]
fn weights_change_during_a_pause_and_the_pause_goes_on() {
    for waits in [false, true] {
        let (mut node, mut outputs) = node_with_running_sequence();
        outputs.extend(node.pause(InFlight::KeepKv, false));
        node.core
            .handle_change_weights(7, String::new(), InFlight::Recompute, waits, node.now)
            .unwrap();
        outputs.extend(node.run());
        outputs.extend(node.outputs());
        let versions = versions_of(&outputs, 1);
        assert_eq!(versions.last(), Some(&0), "changed, and no token since: {versions:?}");
        node.core.handle_resume(node.now);
        outputs.extend(node.run());
        let versions = versions_of(&outputs, 1);
        assert_eq!(versions.len(), 41);
        assert_eq!(versions.last(), Some(&7));
        node.core.scheduler().check();
    }
}
