//! Health of members.

use std::time::Duration;

use crate::world::*;
use cluster::{
    DirectoryInput, Health, Load, NoNode, NodeRecord, NodeRequirements, Role,
    directory::{PROBE_TIMEOUT, SILENCE_MAX},
};
use proto::v1;

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_member_is_up_from_its_snapshot_on() {
    let mut world = World::new();
    let node = decode(1);
    world.join(&node);
    assert_eq!(world.health_of(&node), Some(Health::Unknown));
    assert!(matches!(world.pick(&requirements(8)), Err(NoNode::NoneUp { listed: 1, .. })));
    world.send(&node, snapshot(&record(Role::Decode, 1), idle(), &[]));
    assert_eq!(world.health_of(&node), Some(Health::Up));
    assert_eq!(world.pick(&requirements(8)).unwrap().address, node);
    let next = world.directory.next_deadline();
    assert_eq!(next, Some(world.now + SILENCE_MAX), "a node that is up needs no probing");
}

#[test]
fn a_lost_stream_makes_a_node_suspect_and_is_probed_at_once() {
    let mut world = World::new();
    let node = decode(1);
    world.up(&node, &record(Role::Decode, 1), idle());
    world.advance(3 * SECOND);
    world.end_stream(&node);
    assert_eq!(world.health_of(&node), Some(Health::Suspect));
    assert!(world.stream_of(&node).is_some(), "the probe is in flight");
    assert!(world.pick(&requirements(8)).is_err());
    world.send(&node, snapshot(&record(Role::Decode, 1), idle(), &[]));
    assert_eq!(world.health_of(&node), Some(Health::Up));
}

#[test]
fn probes_of_a_dead_node_back_off_and_find_it_within_two_seconds_of_its_return() {
    let mut world = World::new();
    let node = decode(1);
    world.up(&node, &record(Role::Decode, 1), idle());
    world.advance(3 * SECOND);
    world.end_stream(&node);
    let mut waits = Vec::new();
    for _ in 0..10 {
        world.end_stream(&node);
        assert_eq!(world.health_of(&node), Some(Health::Down));
        let wait = world.directory.next_deadline().unwrap() - world.now;
        waits.push(wait);
        world.advance(wait);
    }
    assert!(waits[0] <= Duration::from_millis(100), "{waits:?}");
    assert!(waits.iter().all(|wait| *wait <= 2 * SECOND), "{waits:?}");
    assert!(waits[9] >= SECOND, "{waits:?}");
    world.send(&node, snapshot(&record(Role::Decode, 2), idle(), &[]));
    assert_eq!(world.health_of(&node), Some(Health::Up));
}

#[test]
fn a_probe_that_is_not_answered_fails() {
    let mut world = World::new();
    let node = decode(1);
    world.join(&node);
    let probe = world.stream_of(&node).unwrap();
    world.advance(2 * SECOND);
    assert_eq!(world.health_of(&node), Some(Health::Down));
    assert!(!world.open.contains_key(&probe));
    // The late answer of a timed-out probe is ignored.
    let event = snapshot(&record(Role::Decode, 1), idle(), &[]);
    world.input(DirectoryInput::Observed { stream: probe, event });
    assert_eq!(world.health_of(&node), Some(Health::Down));
}

#[test]
fn a_silent_node_is_asked_again_and_stays_up_if_it_answers() {
    let mut world = World::new();
    let node = decode(1);
    world.up(&node, &record(Role::Decode, 1), idle());
    for round in 0..3 {
        let before = world.stream_of(&node).unwrap();
        world.advance(SILENCE_MAX - SECOND);
        assert_eq!(world.stream_of(&node), Some(before), "round {round}");
        world.advance(SECOND);
        assert_ne!(world.stream_of(&node).unwrap(), before);
        assert_eq!(world.pick(&requirements(8)).unwrap().address, node);
        world.send(&node, snapshot(&record(Role::Decode, 1), idle(), &[]));
        // A node that sends events is not silent.
        world.advance(SILENCE_MAX - SECOND);
        world.send(&node, delta(1, Some(idle()), &[], &[]));
        world.advance(2 * SECOND);
        world.send(&node, delta(2, Some(idle()), &[], &[]));
    }
    assert_eq!(world.health.len(), 1, "the node was up all the time: {:?}", world.health);
}

#[test]
fn a_node_that_hangs_is_down_although_its_connection_lives() {
    let mut world = World::new();
    let node = decode(1);
    world.up(&node, &record(Role::Decode, 1), idle());
    world.advance(SILENCE_MAX + PROBE_TIMEOUT);
    assert_eq!(world.health_of(&node), Some(Health::Suspect));
    assert!(world.pick(&requirements(8)).is_err());
    world.advance(PROBE_TIMEOUT);
    assert_eq!(world.health_of(&node), Some(Health::Down));
    // The node recovers.
    world.advance(2 * SECOND);
    world.send(&node, snapshot(&record(Role::Decode, 1), idle(), &[]));
    assert_eq!(world.health_of(&node), Some(Health::Up));
}

#[test]
fn deltas_prove_progress_and_snapshots_do_not() {
    let mut world = World::new();
    let node = decode(1);
    world.up(&node, &record(Role::Decode, 1), idle());
    let picked = world.pick(&requirements(8)).unwrap().assignment;
    assert_eq!(world.directory.changed_at(picked), None);
    world.advance(SECOND);
    world.send(&node, delta(1, Some(idle()), &[], &[]));
    let changed = world.now;
    world.advance(SILENCE_MAX);
    world.send(&node, snapshot(&record(Role::Decode, 1), idle(), &[]));
    assert_eq!(world.directory.changed_at(picked), Some(changed));
}

#[test]
fn a_call_that_lost_its_connection_makes_exactly_that_process_suspect() {
    let mut world = World::new();
    let (one, two) = (decode(1), decode(2));
    world.up(&one, &record(Role::Decode, 1), idle());
    world.up(&two, &record(Role::Decode, 2), idle());
    world.advance(3 * SECOND);
    let other = [epoch(2)];
    let of_one = NodeRequirements { exclude_decode: &other, ..requirements(8) };
    let assignment = world.pick(&of_one).unwrap().assignment;
    let lost = || DirectoryInput::CallLost { assignment, reason: "reset".into() };
    world.input(lost());
    assert_eq!(world.health_of(&one), Some(Health::Suspect));
    assert_eq!(world.health_of(&two), Some(Health::Up));
    // The node answers on another connection, of which the lost call says nothing.
    world.send(&one, snapshot(&record(Role::Decode, 1), idle(), &[]));
    let stream = world.stream_of(&one);
    world.input(lost());
    assert_eq!((world.health_of(&one), world.stream_of(&one)), (Some(Health::Up), stream));
}

#[test]
fn a_node_that_flaps_is_not_probed_in_a_tight_loop() {
    let mut world = World::new();
    let node = decode(1);
    world.join(&node);
    let began = world.now;
    let mut probes = 0;
    while world.now < began + 20 * SECOND {
        if world.stream_of(&node).is_some() {
            probes += 1;
            world.send(&node, snapshot(&record(Role::Decode, 1), idle(), &[]));
            world.end_stream(&node);
        }
        let wait = world.directory.next_deadline().map_or(SECOND, |next| next - world.now);
        world.advance(wait);
    }
    assert!(probes < 25, "{probes} probes in 20 s");
}

#[test]
fn a_gap_in_the_deltas_restarts_the_observation() {
    let mut world = World::new();
    let node = decode(1);
    world.up(&node, &record(Role::Decode, 1), idle());
    world.advance(3 * SECOND);
    let first = world.stream_of(&node).unwrap();
    world.send(&node, delta(1, None, &[1], &[]));
    world.send(&node, delta(3, None, &[2], &[]));
    let second = world.stream_of(&node).unwrap();
    assert_ne!(first, second);
    assert_eq!(world.health_of(&node), Some(Health::Suspect));
    // Deltas of the old stream are ignored, the new one begins at 0.
    world.input(DirectoryInput::Observed { stream: first, event: delta(4, None, &[3], &[]) });
    world.send(&node, snapshot(&record(Role::Decode, 1), idle(), &[9]));
    assert_eq!(world.directory.nodes().next().unwrap().cached_blocks(), 1);
    assert_eq!(world.health_of(&node), Some(Health::Up));
}

#[test]
fn a_new_epoch_at_an_address_is_a_new_node() {
    let mut world = World::new();
    let node = decode(1);
    world.join(&node);
    world.send(&node, snapshot(&record(Role::Decode, 1), idle(), &[1, 2, 3]));
    let choice = world.pick(&requirements(8)).unwrap();
    world.advance(3 * SECOND);
    world.end_stream(&node);
    world.send(&node, snapshot(&record(Role::Decode, 2), idle(), &[]));
    let view = world.directory.nodes().next().unwrap();
    assert_eq!((view.in_flight, view.cached_blocks()), (0, 0));
    // A failed attempt at the old process does not exclude the new process.
    let exclude = [choice.record.epoch];
    let again =
        world.pick(&cluster::NodeRequirements { exclude_decode: &exclude, ..requirements(8) });
    assert_eq!(again.unwrap().record.epoch, epoch(2));
    // The end of the old attempt does not change the count of the new process.
    world.directory.release(choice.assignment);
    assert_eq!(world.directory.nodes().next().unwrap().in_flight, 1);
}

#[test]
fn leaving_the_list_is_no_proof_of_death() {
    let mut world = World::new();
    let node = decode(1);
    world.up(&node, &record(Role::Decode, 1), idle());
    world.advance(3 * SECOND);
    world.leave(&node);
    assert_eq!(world.health_of(&node), Some(Health::Up));
    world.end_stream(&node);
    assert_eq!(world.health_of(&node), Some(Health::Suspect));
    world.end_stream(&node);
    assert_eq!(world.health_of(&node), None);
    assert_eq!(world.forgotten, [node]);
}

#[test]
fn a_member_that_returns_to_the_list_is_probed_at_once() {
    let mut world = World::new();
    let node = decode(1);
    world.join(&node);
    world.end_stream(&node);
    assert!(world.stream_of(&node).is_none());
    world.leave(&node);
    assert_eq!(world.forgotten.len(), 1);
    world.join(&node);
    assert!(world.stream_of(&node).is_some());
}

#[test]
fn invalid_records_keep_a_node_down() {
    let good = record(Role::Decode, 1);
    let with = |change: fn(&mut v1::NodeSnapshot)| {
        let mut event = snapshot(&good, idle(), &[]);
        match &mut event.event {
            Some(v1::observe_event::Event::Snapshot(snapshot)) => change(snapshot),
            _ => unreachable!("it was just made"),
        }
        event
    };
    let bad = [
        v1::ObserveEvent { sequence: 0, event: None },
        delta(0, None, &[], &[]),
        delta(1, None, &[], &[]),
        v1::ObserveEvent { sequence: 5, ..snapshot(&good, idle(), &[]) },
        snapshot(&NodeRecord { role: Role::Prefill, ..good.clone() }, idle(), &[]),
        with(|snapshot| snapshot.record = None),
        with(|snapshot| snapshot.load = None),
        with(|snapshot| snapshot.record.as_mut().unwrap().epoch = vec![0; 16].into()),
        with(|snapshot| snapshot.record.as_mut().unwrap().node_id = "\u{1b}[31m".into()),
        with(|snapshot| snapshot.cached_blocks = vec![vec![1; 15].into()]),
        with(|snapshot| {
            snapshot.cached_blocks =
                (0..1001u128).map(|hash| hash.to_be_bytes().to_vec().into()).collect()
        }),
    ];
    for (index, event) in bad.into_iter().enumerate() {
        let mut world = World::new();
        let node = decode(1);
        world.join(&node);
        world.send(&node, event);
        assert_eq!(world.health_of(&node), Some(Health::Down), "event {index}");
        let wait = world.directory.next_deadline().unwrap() - world.now;
        assert!(wait >= SECOND, "a wrong node is not asked in a tight loop");
        world.advance(wait);
        world.send(&node, snapshot(&good, idle(), &[]));
        assert_eq!(world.health_of(&node), Some(Health::Up), "event {index}");
    }
}

#[test]
fn one_process_under_two_addresses_counts_once() {
    let mut world = World::new();
    let (one, two) = (decode(1), decode(2));
    world.up(&one, &record(Role::Decode, 1), idle());
    world.up(&two, &record(Role::Decode, 1), idle());
    assert_eq!(world.health_of(&one), Some(Health::Up));
    assert_eq!(world.health_of(&two), Some(Health::Down));
    let view = world.directory.nodes().nth(1).unwrap();
    assert!(view.reason.contains("127.0.0.1:1"), "{}", view.reason);
}

#[test]
fn a_draining_node_is_not_picked_but_stays_up() {
    let mut world = World::new();
    let node = decode(1);
    world.up(&node, &record(Role::Decode, 1), idle());
    world.send(&node, delta(1, Some(Load { draining: true, ..idle() }), &[], &[]));
    assert_eq!(world.health_of(&node), Some(Health::Up));
    assert!(matches!(world.pick(&requirements(8)), Err(NoNode::Draining { .. })));
    assert_eq!(world.directory.serving(Role::Decode).count(), 0);
    // The directory says so once, and again when the node serves or has other weights.
    world.send(&node, delta(2, Some(Load { draining: true, ..idle() }), &[], &[]));
    assert_eq!(world.serving_changed.len(), 1);
    world.send(&node, delta(3, Some(idle()), &[], &[]));
    assert_eq!(world.serving_changed.len(), 2);
    let weights = Some(v1::WeightsChanged { weight_version: 2, ..Default::default() });
    let delta = v1::NodeDelta { weights, ..Default::default() };
    let event = Some(v1::observe_event::Event::Delta(delta));
    world.send(&node, v1::ObserveEvent { sequence: 4, event });
    assert_eq!(world.serving_changed.len(), 3);
}
