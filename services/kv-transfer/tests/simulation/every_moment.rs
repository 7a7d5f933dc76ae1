//! One transfer, with a fault at every moment.

use std::time::Duration;

use kv_transfer::{
    api::{Command, Event, TransferId},
    config::LEASE,
};

use simulation_base::NetworkFaults;

use crate::world::{CALM, Step, TransferPlan, World};

const SENDER: usize = 0;
const RECEIVER: usize = 1;
/// Slow enough that every pair of messages has a moment in between.
const SLOW: NetworkFaults = NetworkFaults { delay_max: Duration::from_millis(4), ..CALM };
const RELEASE_DELAY_MAX: Duration = Duration::from_millis(100);
/// Any control message may be lost, duplicated or reordered.
const LOSSY: NetworkFaults =
    NetworkFaults { loss: 30, duplication: 30, delay_max: Duration::from_millis(25), ..SLOW };
const BLOCKS_FREE_MAX: Duration = Duration::from_millis(2500);

fn begin(seed: u64) -> (World, TransferPlan) {
    begin_in(SLOW, seed)
}

/// Returns two nodes and a transfer for which neither has a command.
fn two_nodes(faults: NetworkFaults, seed: u64) -> (World, TransferPlan) {
    let mut world = World::new(seed, 2, 40, faults);
    world.release_delay_max = RELEASE_DELAY_MAX;
    let plan = TransferPlan {
        transfer: TransferId(9),
        sender: SENDER,
        receiver: RECEIVER,
        block_count: 12,
        cached: 2,
        deadline: Duration::from_secs(20),
    };
    (world, plan)
}

fn begin_in(faults: NetworkFaults, seed: u64) -> (World, TransferPlan) {
    let (mut world, plan) = two_nodes(faults, seed);
    let start = world.start();
    // The receiver begins first for even seeds, the sender for odd ones.
    let (first, second) = (Some(start), Some(start + Duration::from_millis(5)));
    let (receive, expect) = if seed.is_multiple_of(2) { (first, second) } else { (second, first) };
    world.plan(plan.clone(), receive, expect);
    (world, plan)
}

/// Returns every half millisecond of the first 250 ms, so that the last moments are after the end
/// of the transfer.
fn moments() -> impl Iterator<Item = Duration> {
    (0..500).map(|half| Duration::from_micros(500 * half))
}

/// Checks that all blocks of `node` were free within the bound after `over`.
fn assert_freed(world: &World, plan: &TransferPlan, node: usize, over: Duration) {
    let Some(begun) = world.nodes[node].begun.get(&plan.transfer) else { return };
    let (at, _) = world.end_of(node, plan.transfer).expect("the transfer ended");
    let by = (world.start() + over).max(*begun) + BLOCKS_FREE_MAX;
    assert!(at <= by, "over at {over:?}, back at {:?}, too late", at - world.start());
    assert_eq!(world.nodes[node].free_count(), 40);
}

#[test]
fn blocks_are_free_within_the_lease_after_a_peer_died() {
    for (step, moment) in moments().enumerate() {
        for (victim, survivor) in [(SENDER, RECEIVER), (RECEIVER, SENDER)] {
            for (reset, faults) in [(true, SLOW), (false, SLOW), (true, LOSSY), (false, LOSSY)] {
                let (mut world, plan) = begin_in(faults, step as u64);
                world.run_until(world.start() + moment);
                world.kill(victim, reset);
                world.run_until(world.start() + Duration::from_secs(10));
                assert_freed(&world, &plan, survivor, moment);
            }
        }
    }
}

#[test]
fn blocks_are_free_within_the_lease_after_a_peer_was_paused() {
    for (step, moment) in moments().enumerate() {
        for (victim, survivor, faults) in [
            (SENDER, RECEIVER, SLOW),
            (RECEIVER, SENDER, SLOW),
            (SENDER, RECEIVER, LOSSY),
            (RECEIVER, SENDER, LOSSY),
        ] {
            let (mut world, plan) = begin_in(faults, step as u64);
            world.run_until(world.start() + moment);
            world.pause(victim);
            world.run_until(world.start() + moment + Duration::from_secs(5));
            assert_freed(&world, &plan, survivor, moment);
            world.resume(victim);
            // A sender without RESERVE waits until its deadline.
            world.run_until(world.start() + Duration::from_secs(30));
            assert!(world.end_of(victim, plan.transfer).is_some());
            assert_eq!(world.nodes[victim].free_count(), 40);
        }
    }
}

#[test]
fn abort_from_either_side_ends_both_sides_within_a_heartbeat() {
    for (step, moment) in moments().enumerate() {
        for side in [SENDER, RECEIVER] {
            let (mut world, plan) = begin(step as u64);
            let (at, transfer) = (world.start() + moment, plan.transfer);
            let reason = "the client left".to_owned();
            world.at(at, side, Step::Command(Command::Abort { transfer, reason }));
            world.run_until(world.start() + Duration::from_secs(30));
            for node in [SENDER, RECEIVER] {
                let (ended, _) = world.end_of(node, transfer).expect("the transfer ended");
                let begun = world.nodes[node].begun[&transfer];
                // A heartbeat, if the abort came before the other side had begun. Then the abort,
                // and the release by the transport.
                let by = begun.max(at) + Duration::from_millis(700);
                assert!(ended <= by, "{:?} too late at moment {moment:?}", ended - by);
                assert_eq!(world.nodes[node].free_count(), 40);
            }
        }
    }
}

#[test]
fn abort_on_a_lossy_network_ends_both_sides_within_the_lease() {
    let mut ended_badly = 0;
    for (step, moment) in moments().enumerate() {
        for side in [SENDER, RECEIVER] {
            let (mut world, plan) = begin_in(LOSSY, step as u64);
            let (at, transfer) = (world.start() + moment, plan.transfer);
            let reason = "the client left".to_owned();
            world.at(at, side, Step::Command(Command::Abort { transfer, reason }));
            world.run_until(world.start() + Duration::from_secs(30));
            assert_freed(&world, &plan, side, moment);
            let other = if side == SENDER { RECEIVER } else { SENDER };
            // A sender without RESERVE holds no block and waits until its deadline.
            if world.has_held_blocks(other, transfer) {
                assert_freed(&world, &plan, other, moment);
            }
            assert_eq!(world.nodes[other].free_count(), 40);
            let failed =
                |node| world.end_of(node, transfer).is_some_and(|(_, succeeded)| !succeeded);
            ended_badly += usize::from(failed(SENDER) && failed(RECEIVER));
        }
    }
    assert!(ended_badly > 200, "{ended_badly} of 1000 were struck before they were complete");
}

/// The sender gets the receiver's RESERVE, but no command for the transfer.
#[test]
fn transfer_without_a_sender_ends_within_the_lease() {
    for seed in 0..500 {
        for faults in [SLOW, LOSSY, NetworkFaults { loss: 60, ..LOSSY }] {
            let (mut world, plan) = one_sided(faults, seed);
            world.run_until(world.start() + Duration::from_secs(20));
            assert_freed(&world, &plan, RECEIVER, Duration::ZERO);
            assert_eq!(world.nodes[SENDER].free_count(), 40);
            assert!(world.nodes[SENDER].events.is_empty(), "its node was never asked");
            assert_eq!(world.nodes[SENDER].core.table_sizes().0, 0);
        }
    }
}

/// Within the lease the transfer completes. After the lease both sides free their blocks.
#[test]
fn late_sender_finds_the_reservation_or_holds_no_block() {
    for late in (0..500).map(|step| Duration::from_millis(10 * step)) {
        for faults in [SLOW, LOSSY] {
            let (mut world, plan) = one_sided(faults, late.as_millis() as u64);
            let expect = world.expect_command(&plan);
            world.at(world.start() + late, SENDER, Step::Command(expect));
            world.run_until(world.start() + Duration::from_secs(40));
            let (ended, succeeded) =
                world.end_of(RECEIVER, plan.transfer).expect("the transfer ended");
            if late > BLOCKS_FREE_MAX {
                assert!(!succeeded);
                assert_freed(&world, &plan, RECEIVER, Duration::ZERO);
            }
            if faults.loss == 0 && late < LEASE - Duration::from_millis(100) {
                assert!(succeeded, "begun {late:?} late");
            }
            if world.has_held_blocks(SENDER, plan.transfer) {
                assert_freed(&world, &plan, SENDER, ended - world.start());
            }
            assert_eq!(world.nodes[RECEIVER].free_count(), 40);
            assert_eq!(world.nodes[SENDER].free_count(), 40);
        }
    }
}

/// A sender whose node compiles a grammar may start after the lease. A dead sender is still lost
/// after the lease.
#[test]
fn receiver_waits_for_a_live_sender_until_its_answer_timeout() {
    let within = 6 * LEASE;
    for late in (0..15).map(Duration::from_secs) {
        let (mut world, plan) = one_sided_within(within, late.as_secs());
        let expect = world.expect_command(&plan);
        world.at(world.start() + late, SENDER, Step::Command(expect));
        world.run_until(world.start() + Duration::from_secs(40));
        let (ended, succeeded) = world.end_of(RECEIVER, plan.transfer).expect("the transfer ended");
        if late < within {
            assert!(succeeded, "begun {late:?} late");
        } else if late > within {
            assert!(!succeeded, "begun {late:?} late");
            assert!(
                ended <= world.start() + within + BLOCKS_FREE_MAX,
                "{:?}",
                ended - world.start()
            );
            let events = &world.nodes[RECEIVER].events;
            let failure = events.iter().find_map(|(_, event)| match event {
                Event::ReceiveFailed { failure, .. } => Some(failure.to_string()),
                _ => None,
            });
            let failure = failure.expect("the transfer failed");
            let words = "has not named the transfer in a heartbeat for 12 s";
            assert!(failure.contains(words), "{failure}");
        }
        assert_eq!(world.nodes[RECEIVER].free_count(), 40);
        assert_eq!(world.nodes[SENDER].free_count(), 40);
    }
    for killed in moments() {
        let (mut world, plan) = one_sided_within(within, killed.as_micros() as u64);
        world.run_until(world.start() + killed);
        world.kill(SENDER, false);
        world.run_until(world.start() + Duration::from_secs(20));
        assert_freed(&world, &plan, RECEIVER, killed);
    }
}

/// Returns a transfer whose sender gets no command, and whose receiver waits for the sender's node
/// for `within`.
fn one_sided_within(within: Duration, seed: u64) -> (World, TransferPlan) {
    let (mut world, plan) = two_nodes(SLOW, seed);
    world.plan(plan.clone(), None, None);
    let reserved = world.nodes[RECEIVER].take(plan.transfer, plan.block_count - plan.cached);
    let mut receive = world.receive_command(&plan, reserved.expect("the receiver has blocks"));
    if let Command::Receive { answer_timeout, .. } = &mut receive {
        *answer_timeout = within;
    }
    world.at(world.start(), RECEIVER, Step::Command(receive));
    (world, plan)
}

/// Returns a transfer whose sender gets no command.
fn one_sided(faults: NetworkFaults, seed: u64) -> (World, TransferPlan) {
    let (mut world, plan) = two_nodes(faults, seed);
    let start = world.start();
    world.plan(plan.clone(), Some(start), None);
    (world, plan)
}

#[test]
fn idle_pair_sends_nothing_and_is_closed() {
    let (mut world, plan) = begin(1);
    world.run_until(world.start() + Duration::from_secs(10));
    assert!(world.end_of(RECEIVER, plan.transfer).is_some_and(|(_, succeeded)| succeeded));
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

/// The paused side still has the old pair when the other side sends another HELLO.
#[test]
fn transfers_succeed_after_either_side_was_paused() {
    for seed in 0..60 {
        for paused in [SENDER, RECEIVER] {
            let (mut world, first) = begin(seed);
            world.run_until(world.start() + Duration::from_millis(seed));
            world.pause(paused);
            world.run_until(world.start() + Duration::from_secs(4));
            world.resume(paused);
            let plans: Vec<TransferPlan> = (0..5u32)
                .map(|id| TransferPlan {
                    transfer: TransferId(100 + u128::from(id)),
                    ..first.clone()
                })
                .map(|plan| TransferPlan { block_count: 5, ..plan })
                .collect();
            for (index, plan) in plans.iter().enumerate() {
                let at = world.now() + Duration::from_millis(7 * index as u64);
                world.plan(plan.clone(), Some(at), Some(at));
            }
            world.run_until(world.start() + Duration::from_secs(10));
            // A transfer that begins when the loss of the peer is detected may fail at once. The
            // router's next attempt succeeds.
            for plan in &plans {
                for node in [SENDER, RECEIVER] {
                    let (at, _) = world.end_of(node, plan.transfer).expect("the transfer ended");
                    let elapsed = at - world.nodes[node].begun[&plan.transfer];
                    assert!(elapsed < Duration::from_millis(700), "seed {seed}: {elapsed:?}");
                }
            }
            let (_, succeeded) =
                world.end_of(RECEIVER, plans[4].transfer).expect("the transfer ended");
            assert!(succeeded, "seed {seed}, paused {paused}");
        }
    }
}
