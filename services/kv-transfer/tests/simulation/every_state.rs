//! One transfer, struck at every moment of its life.

use std::time::Duration;

use kv_transfer::{
    api::{Command, Event, TransferFailure, TransferId},
    config::LEASE,
};

use simulation_base::NetworkFaults;

use crate::world::{CALM, Journey, Step, World};

const SENDER: usize = 0;
const RECEIVER: usize = 1;
/// Slow enough that moments fall between all messages.
const SLOW: NetworkFaults = NetworkFaults { delay_max: Duration::from_millis(4), ..CALM };
const RELEASE_DELAY_MAX: Duration = Duration::from_millis(100);
/// Any control message may be lost, duplicated or reordered.
const LOSSY: NetworkFaults =
    NetworkFaults { loss: 30, duplication: 30, delay_max: Duration::from_millis(25), ..SLOW };
const BACK: Duration = Duration::from_millis(2500);

fn begin(seed: u64) -> (World, Journey) {
    begin_in(SLOW, seed)
}

fn begin_in(faults: NetworkFaults, seed: u64) -> (World, Journey) {
    let mut world = World::new(seed, 2, 40, faults);
    world.release_delay_max = RELEASE_DELAY_MAX;
    let journey = Journey {
        transfer: TransferId(9),
        sender: SENDER,
        receiver: RECEIVER,
        block_count: 12,
        cached: 2,
        deadline: Duration::from_secs(20),
    };
    let start = world.start();
    // Now the one, now the other is first.
    let (first, second) = (Some(start), Some(start + Duration::from_millis(5)));
    let (receive, expect) = if seed.is_multiple_of(2) { (first, second) } else { (second, first) };
    world.journey(journey.clone(), receive, expect);
    (world, journey)
}

/// Every half millisecond until the transfer is long over.
fn moments() -> impl Iterator<Item = Duration> {
    (0..500).map(|half| Duration::from_micros(500 * half))
}

/// Everything that `node` had is back a lease and a half second after `over`.
fn assert_back(world: &World, journey: &Journey, node: usize, over: Duration) {
    let Some(begun) = world.nodes[node].begun.get(&journey.transfer) else { return };
    let (at, _) = world.end_of(node, journey.transfer).expect("it ended");
    let by = (world.start() + over).max(*begun) + BACK;
    assert!(at <= by, "over at {over:?}, back at {:?}, too late", at - world.start());
    assert_eq!(world.nodes[node].free_count(), 40);
}

#[test]
fn a_peer_that_dies_costs_a_lease_at_most() {
    for (step, moment) in moments().enumerate() {
        for (victim, survivor) in [(SENDER, RECEIVER), (RECEIVER, SENDER)] {
            for (reset, faults) in [(true, SLOW), (false, SLOW), (true, LOSSY), (false, LOSSY)] {
                let (mut world, journey) = begin_in(faults, step as u64);
                world.run_until(world.start() + moment);
                world.kill(victim, reset);
                world.run_until(world.start() + Duration::from_secs(10));
                assert_back(&world, &journey, survivor, moment);
            }
        }
    }
}

#[test]
fn a_peer_that_stops_costs_a_lease_at_most_and_finds_its_way_when_it_wakes() {
    for (step, moment) in moments().enumerate() {
        for (victim, survivor, faults) in [
            (SENDER, RECEIVER, SLOW),
            (RECEIVER, SENDER, SLOW),
            (SENDER, RECEIVER, LOSSY),
            (RECEIVER, SENDER, LOSSY),
        ] {
            let (mut world, journey) = begin_in(faults, step as u64);
            world.run_until(world.start() + moment);
            world.stop(victim);
            world.run_until(world.start() + moment + Duration::from_secs(5));
            assert_back(&world, &journey, survivor, moment);
            world.resume(victim);
            // A sender that had no RESERVE keeps waiting for it as long as its node says.
            world.run_until(world.start() + Duration::from_secs(30));
            assert!(world.end_of(victim, journey.transfer).is_some());
            assert_eq!(world.nodes[victim].free_count(), 40);
        }
    }
}

#[test]
fn an_abort_from_either_side_ends_both_within_a_heartbeat() {
    for (step, moment) in moments().enumerate() {
        for side in [SENDER, RECEIVER] {
            let (mut world, journey) = begin(step as u64);
            let (at, transfer) = (world.start() + moment, journey.transfer);
            let reason = "the client left".to_owned();
            world.at(at, side, Step::Command(Command::Abort { transfer, reason }));
            world.run_until(world.start() + Duration::from_secs(30));
            for node in [SENDER, RECEIVER] {
                let (ended, _) = world.end_of(node, transfer).expect("it ended");
                let begun = world.nodes[node].begun[&transfer];
                // At most a heartbeat, if the abort came before the other side had begun; then the
                // abort, and the transport's letting go.
                let by = begun.max(at) + Duration::from_millis(700);
                assert!(ended <= by, "{:?} too late at moment {moment:?}", ended - by);
                assert_eq!(world.nodes[node].free_count(), 40);
            }
        }
    }
}

#[test]
fn an_abort_on_a_lossy_network_ends_both_within_a_lease() {
    let mut ended_badly = 0;
    for (step, moment) in moments().enumerate() {
        for side in [SENDER, RECEIVER] {
            let (mut world, journey) = begin_in(LOSSY, step as u64);
            let (at, transfer) = (world.start() + moment, journey.transfer);
            let reason = "the client left".to_owned();
            world.at(at, side, Step::Command(Command::Abort { transfer, reason }));
            world.run_until(world.start() + Duration::from_secs(30));
            assert_back(&world, &journey, side, moment);
            let other = if side == SENDER { RECEIVER } else { SENDER };
            // A sender that never had a RESERVE holds nothing and waits as long as its node says.
            if world.has_held_blocks(other, transfer) {
                assert_back(&world, &journey, other, moment);
            }
            assert_eq!(world.nodes[other].free_count(), 40);
            let failed = |node| world.end_of(node, transfer).is_some_and(|(_, well)| !well);
            ended_badly += usize::from(failed(SENDER) && failed(RECEIVER));
        }
    }
    assert!(ended_badly > 200, "{ended_badly} of 1000 were struck before they were complete");
}

/// The sender hears of it from the receiver alone, and tells it nothing of the sort that the router
/// has asked it for anything.
#[test]
fn what_the_receiver_alone_has_begun_is_over_within_a_lease() {
    for seed in 0..500 {
        for faults in [SLOW, LOSSY, NetworkFaults { loss: 60, ..LOSSY }] {
            let (mut world, journey) = one_sided(faults, seed);
            world.run_until(world.start() + Duration::from_secs(20));
            assert_back(&world, &journey, RECEIVER, Duration::ZERO);
            assert_eq!(world.nodes[SENDER].free_count(), 40);
            assert!(world.nodes[SENDER].events.is_empty(), "its node was never asked");
            assert_eq!(world.nodes[SENDER].core.table_sizes().0, 0);
        }
    }
}

/// Within the lease the two still find each other; after it each side's blocks come back.
#[test]
fn a_sender_that_begins_late_finds_the_reservation_or_leaves_no_block_behind() {
    for late in (0..500).map(|step| Duration::from_millis(10 * step)) {
        for faults in [SLOW, LOSSY] {
            let (mut world, journey) = one_sided(faults, late.as_millis() as u64);
            let expect = world.expect_command(&journey);
            world.at(world.start() + late, SENDER, Step::Command(expect));
            world.run_until(world.start() + Duration::from_secs(40));
            let (ended, well) = world.end_of(RECEIVER, journey.transfer).expect("it ended");
            if late > BACK {
                assert!(!well);
                assert_back(&world, &journey, RECEIVER, Duration::ZERO);
            }
            if faults.loss == 0 && late < LEASE - Duration::from_millis(100) {
                assert!(well, "begun {late:?} late");
            }
            if world.has_held_blocks(SENDER, journey.transfer) {
                assert_back(&world, &journey, SENDER, ended - world.start());
            }
            assert_eq!(world.nodes[RECEIVER].free_count(), 40);
            assert_eq!(world.nodes[SENDER].free_count(), 40);
        }
    }
}

/// The router reached the receiver alone.
fn one_sided(faults: NetworkFaults, seed: u64) -> (World, Journey) {
    let mut world = World::new(seed, 2, 40, faults);
    world.release_delay_max = RELEASE_DELAY_MAX;
    let journey = Journey {
        transfer: TransferId(9),
        sender: SENDER,
        receiver: RECEIVER,
        block_count: 12,
        cached: 2,
        deadline: Duration::from_secs(20),
    };
    let start = world.start();
    world.journey(journey.clone(), Some(start), None);
    (world, journey)
}

/// The world compares what arrives with what the receiver's weights would have written.
#[test]
fn weights_that_change_at_any_moment_fail_what_has_begun_and_nothing_later() {
    for (step, moment) in moments().enumerate() {
        for changing in [&[SENDER][..], &[RECEIVER], &[SENDER, RECEIVER], &[RECEIVER, SENDER]] {
            let (mut world, journey) = begin(step as u64);
            let at = world.start() + moment;
            for node in changing {
                let changed = Command::WeightsChanged { weight_version: 4 };
                world.at(at, *node, Step::Command(changed));
            }
            world.run_until(world.start() + Duration::from_secs(30));
            for node in [SENDER, RECEIVER] {
                let (ended, well) = world.end_of(node, journey.transfer).expect("it ended");
                assert!(!well || ended <= at || !changing.contains(&node), "{moment:?}");
                // Begun after the other has changed, it may find the pair refused, or wait for a
                // RESERVE that the tombstone has answered.
                let begun = world.nodes[node].begun[&journey.transfer];
                assert!(ended <= begun.max(at) + BACK, "{moment:?}: {:?}", ended - at);
                assert_eq!(world.nodes[node].free_count(), 40);
                if !well {
                    assert_mismatch(&world, node, &format!("at {moment:?} with {changing:?}"));
                }
            }
            // With the same weights again the next attempt succeeds.
            for node in [SENDER, RECEIVER] {
                let changed = Command::WeightsChanged { weight_version: 5 };
                world.at(world.now(), node, Step::Command(changed));
            }
            let next = Journey { transfer: TransferId(10), ..journey };
            let now = world.now();
            world.journey(next, Some(now), Some(now));
            world.run_until(now + Duration::from_secs(5));
            for node in [SENDER, RECEIVER] {
                let (_, well) = world.end_of(node, TransferId(10)).expect("it ended");
                assert!(well, "{moment:?}: {:?}", world.nodes[node].events);
            }
        }
    }
}

/// One side is updated, then the other: what lies between is refused at HELLO.
#[test]
fn a_pair_that_was_refused_comes_up_as_soon_as_the_weights_agree() {
    for seed in 0..20 {
        let mut world = World::new(seed, 2, 40, SLOW);
        let change = |world: &mut World, node| {
            let changed = Command::WeightsChanged { weight_version: 4 };
            world.at(world.now(), node, Step::Command(changed));
        };
        let attempt = |world: &mut World, id| {
            let journey = Journey {
                transfer: TransferId(id),
                sender: SENDER,
                receiver: RECEIVER,
                block_count: 3,
                cached: 0,
                deadline: Duration::from_secs(5),
            };
            let now = world.now();
            world.journey(journey, Some(now), Some(now + SLOW.delay_max * 2));
            world.run_until(now + LEASE / 4);
            [SENDER, RECEIVER].map(|node| world.end_of(node, TransferId(id)).map(|(_, well)| well))
        };
        change(&mut world, SENDER);
        assert_eq!(attempt(&mut world, 1), [Some(false); 2], "seed {seed}");
        for node in [SENDER, RECEIVER] {
            assert_mismatch(&world, node, &format!("seed {seed}"));
        }
        change(&mut world, RECEIVER);
        assert_eq!(attempt(&mut world, 2), [Some(true); 2], "seed {seed}");
    }
}

/// Every transfer that failed at `node` did so because of the weights.
fn assert_mismatch(world: &World, node: usize, when: &str) {
    for (_, event) in &world.nodes[node].events {
        let (Event::ReceiveFailed { failure, .. } | Event::SendFailed { failure, .. }) = event
        else {
            continue;
        };
        let named = matches!(
            failure,
            TransferFailure::Refused { .. } | TransferFailure::WeightsChanged { from: 3, to: 4 }
        );
        assert!(named, "{when}: {failure}");
    }
}

#[test]
fn a_pair_without_work_falls_silent_and_is_closed() {
    let (mut world, journey) = begin(1);
    world.run_until(world.start() + Duration::from_secs(10));
    assert!(world.end_of(RECEIVER, journey.transfer).is_some_and(|(_, well)| well));
    assert_eq!(world.nodes[SENDER].core.pairs().count(), 1);
    let before = world.steps();
    world.run_until(world.start() + Duration::from_secs(50));
    assert_eq!(world.steps(), before, "nothing is said");
    world.run_until(world.start() + Duration::from_secs(100));
    for node in &world.nodes {
        assert_eq!(node.core.pairs().count(), 0);
        assert_eq!(node.core.table_sizes(), (0, 0, 0));
        assert_eq!(node.core.next_deadline(world.now()), None);
    }
}

/// The one that slept still has the old pair when the other greets it anew.
#[test]
fn after_a_sleep_the_next_transfers_succeed_whoever_slept() {
    for seed in 0..60 {
        for sleeper in [SENDER, RECEIVER] {
            let (mut world, first) = begin(seed);
            world.run_until(world.start() + Duration::from_millis(seed));
            world.stop(sleeper);
            world.run_until(world.start() + Duration::from_secs(4));
            world.resume(sleeper);
            let journeys: Vec<Journey> = (0..5u32)
                .map(|id| Journey { transfer: TransferId(100 + u128::from(id)), ..first.clone() })
                .map(|journey| Journey { block_count: 5, ..journey })
                .collect();
            for (index, journey) in journeys.iter().enumerate() {
                let at = world.now() + Duration::from_millis(7 * index as u64);
                world.journey(journey.clone(), Some(at), Some(at));
            }
            world.run_until(world.start() + Duration::from_secs(10));
            // What is begun in the instant in which the loss is found out may share its fate, at
            // once: the router's next attempt comes through.
            for journey in &journeys {
                for node in [SENDER, RECEIVER] {
                    let (at, _) = world.end_of(node, journey.transfer).expect("it ended");
                    let elapsed = at - world.nodes[node].begun[&journey.transfer];
                    assert!(elapsed < Duration::from_millis(700), "seed {seed}: {elapsed:?}");
                }
            }
            let (_, well) = world.end_of(RECEIVER, journeys[4].transfer).expect("it ended");
            assert!(well, "seed {seed}, sleeper {sleeper}");
        }
    }
}
