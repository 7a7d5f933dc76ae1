//! Sequences that leave a draining node.

use std::time::Duration;

use cluster::{Drain, Load, NodeRecord, NodeRequirements, Placement, Role, Selection};
use config::{Disaggregate, Roles};

use crate::world::{DEFAULT, World, decode, delta, epoch, idle, prefill, record, requirements};

const GRACE: Duration = Duration::from_secs(4);

/// Returns two decode nodes, whose records announce both roles if `sends`, and a prefill node.
fn world(selection: Selection, sends: bool) -> World {
    let mut world = World::with(selection);
    world.up(&prefill(9), &record(Role::Prefill, 9), idle());
    for number in [1, 2] {
        let both = NodeRecord { both_roles: sends, ..record(Role::Decode, number.into()) };
        world.up(&decode(number), &both, idle());
    }
    world
}

/// Lets the node drain. `grace`: without a limit if zero.
fn drain(world: &mut World, number: u16, grace: Duration) {
    let load = Load { draining: true, drain_ms: grace.as_millis() as u64, ..idle() };
    world.send(&decode(number), delta(1, Some(load), &[], &[]));
}

fn moving(tokens: u32, from: u16) -> NodeRequirements<'static> {
    NodeRequirements { moves_from: Some(epoch(from.into())), ..requirements(tokens) }
}

#[test]
fn sequence_moves_from_its_draining_node_under_every_selection() {
    for disaggregate in [Disaggregate::Auto, Disaggregate::Always, Disaggregate::Never] {
        for roles in [Roles::Fixed, Roles::Fluid] {
            let mut world = world(Selection { disaggregate, roles, ..DEFAULT }, true);
            drain(&mut world, 1, GRACE);
            let picked = world.pick_nodes(&moving(100, 1)).unwrap();
            assert_eq!(picked.decode.record.epoch, epoch(2));
            let sender = picked.prefill.expect("the draining node sends the KV");
            assert_eq!((sender.record.epoch, sender.cached_tokens), (epoch(1), 96));
            assert_eq!(
                (picked.uncached_tokens, picked.considered.placement),
                (4, Placement::Moved)
            );
            // No other request uses the draining node.
            let picked = world.pick_nodes(&requirements(100)).unwrap();
            assert!(picked.prefill.is_none_or(|node| node.record.epoch != epoch(1)));
        }
    }
}

#[test]
fn sequence_whose_node_cannot_send_kv_is_an_ordinary_attempt() {
    let mut world = world(DEFAULT, false);
    drain(&mut world, 1, GRACE);
    let picked = world.pick_nodes(&moving(100, 1)).unwrap();
    assert_eq!(picked.prefill.unwrap().record.epoch, epoch(9));

    let mut world = self::world(DEFAULT, true);
    drain(&mut world, 1, GRACE);
    world.end_stream(&decode(1));
    let picked = world.pick_nodes(&moving(100, 1)).unwrap();
    assert_eq!(picked.prefill.unwrap().record.epoch, epoch(9));
}

#[test]
fn drain_tells_grace_period_and_whether_kv_can_move() {
    for (sends, grace) in [(true, GRACE), (true, Duration::ZERO), (false, GRACE)] {
        let mut world = world(DEFAULT, sends);
        world.send(&decode(2), delta(1, Some(Load { draining: true, ..idle() }), &[], &[]));
        let assignment = world.pick(&requirements(100)).unwrap().assignment;
        let found = |world: &World, tokens| {
            world.directory.drain(world.now, assignment, &requirements(tokens))
        };
        assert_eq!(found(&world, 100), None, "it does not drain");
        drain(&mut world, 1, grace);
        assert_eq!(found(&world, 100), None, "no other node");
        world.send(&decode(2), delta(2, Some(idle()), &[], &[]));
        let grace = (!grace.is_zero()).then_some(grace);
        assert_eq!(found(&world, 100), Some(Drain { grace, sends_kv: sends }));
        // KV of less than one block is never transferred.
        assert_eq!(found(&world, 8), Some(Drain { grace, sends_kv: false }));
    }
}
