//! Circuit breakers of nodes and pairs, slow nodes and impossible reports.

use std::time::Duration;

use crate::world::*;
use cluster::{
    BreakerReason, Failed, Health, Load, NoNode, NodeAddress, NodeChoice, NodeRequirements, Picked,
    Placement, Role, Selection,
};
use config::{Disaggregate, NodePolicy, Roles};

const SECOND: Duration = Duration::from_secs(1);
/// Longest pause of a breaker.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Returns a world with this many nodes of each role, and pairs wherever possible.
fn world(prefill_nodes: u16, decode_nodes: u16) -> World {
    let mut world = World::with(Selection {
        disaggregate: Disaggregate::Always,
        roles: Roles::Fixed,
        policy: NodePolicy::LeastLoad,
    });
    for port in 1..=prefill_nodes {
        world.up(&prefill(port), &record(Role::Prefill, port.into()), idle());
    }
    for port in 100..100 + decode_nodes {
        world.up(&decode(port), &record(Role::Decode, port.into()), idle());
    }
    world
}

impl World {
    /// Lets time pass while every node reports its load each second.
    fn wait(&mut self, by: Duration) {
        let until = self.now + by;
        while self.now < until {
            self.advance(SECOND.min(until - self.now));
            let nodes: Vec<_> = self.open.values().cloned().collect();
            self.reports += 1;
            for node in nodes {
                self.send(&node, delta(self.reports, Some(idle()), &[], &[]));
            }
        }
    }

    fn next(&mut self) -> Picked {
        self.pick_nodes(&requirements(100)).unwrap()
    }

    fn release(&mut self, picked: &Picked) {
        for choice in [Some(&picked.decode), picked.prefill.as_ref()].into_iter().flatten() {
            self.directory.release(choice.assignment);
        }
    }

    /// Lets every attempt fail that picks this node, until the breaker of the node is open.
    fn open_breaker(&mut self, node: &NodeAddress) {
        for _ in 0..20 {
            let picked = self.next();
            if picked.decode.address == *node {
                self.fails(&picked.decode);
            }
            self.release(&picked);
        }
        assert_eq!(self.directory.excluded(Role::Decode), 1);
    }

    fn fails(&mut self, choice: &NodeChoice) {
        self.directory.failed(self.now, Failed::Node(choice.assignment));
    }

    fn transfer_fails(&mut self, picked: &Picked) {
        let prefill = picked.prefill.as_ref().expect("the attempt has a prefill node").assignment;
        let failed = Failed::Transfer { prefill, decode: picked.decode.assignment };
        self.directory.failed(self.now, failed);
    }

    fn delivers(&mut self, picked: &Picked, millis: u64) {
        let prefill = picked.prefill.as_ref().expect("the attempt has a prefill node").assignment;
        let elapsed = Duration::from_millis(millis);
        self.directory.delivered(self.now, prefill, picked.decode.assignment, elapsed);
    }

    /// Lets an attempt decode 20 tokens, this many milliseconds apart.
    fn decodes(&mut self, picked: &Picked, itl_ms: u64) {
        self.directory.served(picked.decode.assignment);
        let waited = Duration::from_millis(20 * itl_ms);
        self.directory.decoded(self.now, picked.decode.assignment, 20, waited);
    }

    fn opened(&mut self) -> Vec<(String, BreakerReason)> {
        let changes = self.directory.take_breaker_changes().into_iter();
        changes.filter_map(|change| Some((change.address.grpc, change.opened?))).collect()
    }
}

#[test]
fn node_that_fails_every_attempt_gets_one_attempt_per_pause() {
    let mut world = world(0, 2);
    let bad = decode(100);
    let (mut on_bad, mut on_good) = (0, 0);
    for _ in 0..600 {
        let picked = world.next();
        if picked.decode.address == bad {
            on_bad += 1;
            world.fails(&picked.decode);
        } else {
            on_good += 1;
            world.decodes(&picked, 10);
        }
        world.release(&picked);
        world.wait(SECOND / 10);
    }
    // Three failures, then probes after pauses of 1, 2, 4, 8, 16, 30 s (each at least half as
    // long).
    assert!((6..=12).contains(&on_bad), "{on_bad} attempts on the failing node, {on_good} others");
    assert_eq!(world.opened().len(), on_bad - 2, "each probe opened the breaker again");
    // The node recovers: the next probe succeeds, and the node takes its share again.
    world.wait(PAUSE_MAX);
    for _ in 0..4 {
        let picked = world.next();
        world.decodes(&picked, 10);
        world.release(&picked);
    }
    let shares: Vec<_> = (0..10).map(|_| world.next()).collect();
    assert_eq!(shares.iter().filter(|picked| picked.decode.address == bad).count(), 5);
}

#[test]
fn half_open_node_gets_a_single_probe() {
    let mut world = world(0, 2);
    world.open_breaker(&decode(100));
    world.advance(SECOND);
    let burst: Vec<_> = (0..10).map(|_| world.next()).collect();
    let probes: Vec<_> =
        burst.iter().filter(|picked| picked.decode.address == decode(100)).collect();
    assert_eq!(probes.len(), 1);
    let why = &burst.last().unwrap().considered.ineligible[0].reason;
    assert!(why.starts_with("circuit breaker half-open: failed attempts"), "{why}");
    // A probe without a verdict, such as a cancelled request, is followed by another probe.
    let probe = (*probes[0]).clone();
    world.release(&probe);
    let again: Vec<_> = (0..10).map(|_| world.next().decode.address).collect();
    assert_eq!(again.iter().filter(|address| **address == decode(100)).count(), 1);
}

#[test]
fn only_decode_node_is_used_although_its_breaker_is_open() {
    let mut world = world(0, 1);
    for _ in 0..50 {
        let picked = world.next();
        world.fails(&picked.decode);
        world.release(&picked);
    }
    assert_eq!(world.opened(), [(decode(100).grpc, BreakerReason::Failures)]);
    assert_eq!(world.directory.excluded(Role::Decode), 1);
    // A busy node that works comes before one whose breaker is open.
    world.up(&decode(101), &record(Role::Decode, 101), idle());
    let picked = world.next();
    assert_eq!(picked.decode.address, decode(101));
    world.directory.busy(world.now, picked.decode.assignment);
    assert!(matches!(world.pick(&requirements(100)), Err(NoNode::Busy { .. })));
}

#[test]
fn new_process_has_a_closed_breaker() {
    let mut world = world(0, 2);
    world.open_breaker(&decode(100));
    world.end_stream(&decode(100));
    world.advance(3 * SECOND);
    world.send(&decode(100), snapshot(&record(Role::Decode, 200), idle(), &[]));
    assert_eq!(world.directory.excluded(Role::Decode), 0);
}

#[test]
fn pair_whose_transfers_fail_is_avoided_and_both_nodes_serve_in_other_pairs() {
    let mut world = world(2, 2);
    let cut = (prefill(1), decode(100));
    let mut failures = 0;
    for _ in 0..400 {
        let picked = world.next();
        let Some(from) = &picked.prefill else { continue };
        if (&from.address, &picked.decode.address) == (&cut.0, &cut.1) {
            failures += 1;
            world.transfer_fails(&picked);
        } else {
            world.delivers(&picked, 10);
            world.decodes(&picked, 10);
        }
        world.release(&picked);
        world.wait(SECOND / 10);
    }
    assert!((3..=9).contains(&failures), "{failures} transfers over the cut link in 40 s");
    let used: Vec<_> = (0..12)
        .map(|_| {
            let picked = world.next();
            (picked.prefill.unwrap().address, picked.decode.address)
        })
        .collect();
    assert!(!used.contains(&cut), "{used:?}");
    assert!(used.iter().any(|(from, _)| *from == cut.0), "{used:?}");
    assert!(used.iter().any(|(_, to)| *to == cut.1), "{used:?}");
}

#[test]
fn decode_node_prefills_while_its_only_link_is_cut() {
    let mut world = world(1, 1);
    for _ in 0..3 {
        let picked = world.next();
        world.transfer_fails(&picked);
        world.release(&picked);
    }
    // The breaker of the prefill node is open, too; other nodes could not tell the link from the
    // node.
    let picked = world.next();
    assert!(picked.prefill.is_none());
    assert!(matches!(picked.considered.placement, Placement::NoPrefillNode(NoNode::Broken { .. })));
    world.decodes(&picked, 10);
    world.release(&picked);
    // One probe after the pause; its delivery ends the exclusion.
    world.advance(SECOND);
    let probe = world.next();
    assert!(probe.prefill.is_some());
    assert!(world.next().prefill.is_none());
    world.delivers(&probe, 10);
    assert!(world.next().prefill.is_some());
}

#[test]
fn slow_nodes_are_excluded_up_to_a_third_of_the_pool() {
    for (nodes, slow, excluded) in [(2, 1, 0), (3, 1, 1), (4, 2, 1), (6, 2, 2), (9, 4, 3)] {
        let mut world = world(0, nodes);
        let is_slow = |picked: &Picked| picked.decode.address.grpc < decode(100 + slow).grpc;
        for _ in 0..300 {
            let picked = world.next();
            let itl_ms = if is_slow(&picked) { 80 } else { 10 };
            world.decodes(&picked, itl_ms);
            world.release(&picked);
        }
        let opened = world.opened();
        assert_eq!(world.directory.excluded(Role::Decode), excluded, "{nodes} nodes: {opened:?}");
        assert!(opened.iter().all(|(_, reason)| *reason == BreakerReason::Slow), "{opened:?}");
        // The probes after the pauses find normal nodes. A second slow node may be excluded when
        // the first is back.
        for _ in 0..4 {
            world.wait(PAUSE_MAX);
            for _ in 0..100 {
                let picked = world.next();
                world.decodes(&picked, 10);
                world.release(&picked);
            }
        }
        assert_eq!(world.directory.excluded(Role::Decode), 0, "{nodes} nodes, {slow} recovered");
    }
}

#[test]
fn moderate_difference_of_latency_excludes_no_node() {
    let mut world = world(0, 4);
    for _ in 0..200 {
        let picked = world.next();
        // 2.5 times the median, and 9 ms more than the median of short steps.
        let itl_ms = if picked.decode.address == decode(100) { 25 } else { 10 };
        world.decodes(&picked, itl_ms);
        world.release(&picked);
    }
    assert_eq!(world.opened(), []);
}

#[test]
fn prefill_node_with_slow_transfers_is_excluded() {
    let mut world = world(3, 2);
    for _ in 0..300 {
        let picked = world.next();
        let is_slow = picked.prefill.as_ref().is_some_and(|node| node.address == prefill(2));
        if picked.prefill.is_some() {
            world.delivers(&picked, if is_slow { 900 } else { 10 });
        }
        world.release(&picked);
    }
    assert_eq!(world.opened(), [(prefill(2).grpc, BreakerReason::Slow)]);
}

#[test]
fn transfers_of_a_probe_do_not_end_the_exclusion_for_a_slow_inter_token_latency() {
    let mut world = world(2, 3);
    let attempt = |world: &mut World, itl_ms: u64| {
        let picked = world.next();
        let is_slow = picked.decode.address == decode(100);
        if picked.prefill.is_some() {
            world.delivers(&picked, 10);
        }
        let excluded = world.directory.excluded(Role::Decode);
        world.decodes(&picked, if is_slow { itl_ms } else { 10 });
        world.release(&picked);
        is_slow.then_some(excluded)
    };
    for _ in 0..100 {
        attempt(&mut world, 80);
    }
    assert_eq!(world.directory.excluded(Role::Decode), 1);
    // A probe's transfer says nothing about its decode steps.
    for (itl_ms, excluded_after) in [(80, 1), (10, 0)] {
        world.wait(PAUSE_MAX);
        let probe = (0..20).find_map(|_| attempt(&mut world, itl_ms));
        assert_eq!(probe, Some(1), "excluded after the transfer");
        assert_eq!(world.directory.excluded(Role::Decode), excluded_after);
    }
    assert_eq!(world.opened().len(), 2);
}

#[test]
fn node_with_slow_transfers_returns_after_probes_without_a_transfer() {
    let mut world = world(2, 3);
    let is_slow = |picked: &Picked| picked.decode.address == decode(100);
    for _ in 0..100 {
        let picked = world.next();
        world.delivers(&picked, if is_slow(&picked) { 900 } else { 10 });
        world.release(&picked);
    }
    assert_eq!(world.opened(), [(decode(100).grpc, BreakerReason::Slow)]);
    world.wait(PAUSE_MAX);
    let local = NodeRequirements { local_prefill: true, ..requirements(100) };
    let probe = |world: &mut World, is_served: bool| {
        // The excluded node gets one attempt at a time.
        let all: Vec<_> = (0..6).map(|_| world.pick_nodes(&local).unwrap()).collect();
        assert_eq!(all.iter().filter(|picked| is_slow(picked)).count(), 1);
        for picked in &all {
            if is_served {
                world.decodes(picked, 10);
            }
            world.release(picked);
        }
        world.directory.excluded(Role::Decode)
    };
    assert_eq!(probe(&mut world, false), 1, "a cancelled probe says nothing");
    let excluded: Vec<_> = (0..3).map(|_| probe(&mut world, true)).collect();
    assert_eq!(excluded, [1, 1, 0]);
    // The next slow transfer excludes the node again.
    for _ in 0..20 {
        let picked = world.next();
        world.delivers(&picked, if is_slow(&picked) { 900 } else { 10 });
        world.release(&picked);
    }
    assert_eq!(world.opened(), [(decode(100).grpc, BreakerReason::Slow)]);
}

#[test]
fn impossible_load_excludes_the_node_and_names_it() {
    let more_blocks = Load { blocks_free: 900, blocks_held: 101, ..Load::default() };
    let more_prefilling = Load { prefilling: 2, running: 1, ..idle() };
    let tokens_of_nobody = Load { pending_prompt_tokens: 1, ..idle() };
    for (load, names) in [
        (more_blocks, "blocks in all states = 1001; expected at most 1000"),
        (more_prefilling, "prefilling = 2; expected at most 1"),
        (tokens_of_nobody, "pending_prompt_tokens = 1; expected at most 0"),
    ] {
        let mut world = world(0, 2);
        world.send(&decode(100), delta(1, Some(load), &[], &[]));
        assert_eq!(world.health_of(&decode(100)), Some(Health::Down));
        let [(address, reason)] = &world.rejected[..] else { panic!("{:?}", world.rejected) };
        assert!(*address == decode(100) && reason.contains(names), "{reason}");
        assert!((0..10).all(|_| world.next().decode.address == decode(101)));
    }
}

#[test]
fn node_that_repeats_impossible_reports_is_probed_less_often() {
    let mut world = world(0, 1);
    let wrong = Load { blocks_free: 1001, ..Load::default() };
    let start = world.now;
    let mut times = Vec::new();
    while world.now < start + 120 * SECOND {
        if world.stream_of(&decode(100)).is_some() {
            times.push(world.now - start);
            if world.health_of(&decode(100)) != Some(Health::Up) {
                world.send(&decode(100), snapshot(&record(Role::Decode, 100), idle(), &[]));
            }
            world.send(&decode(100), delta(1, Some(wrong), &[], &[]));
        }
        world.advance(SECOND / 10);
    }
    assert!((8..=20).contains(&times.len()), "{times:?}");
}
