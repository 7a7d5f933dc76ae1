//! Nodes on which an attempt could start now.

use std::time::Duration;

use cluster::{
    Load, NoNode, NodeRecord, NodeRequirements, Placement, RequiredCapacity, Role, Selection,
};
use config::{Disaggregate, Roles};
use proto::v1;

use crate::world::*;

fn load(slots: u32, running: u32) -> Load {
    let costs = v1::StepCosts {
        step_tokens: 512,
        chunk_tokens: 512,
        slots,
        prefill: Some(v1::PrefillCosts { token_ps: 100_000_000, ..Default::default() }),
        decode: Some(v1::DecodeCosts { step_ps: 5_000_000_000, ..Default::default() }),
        ..Default::default()
    };
    Load { running, step_costs: Some(costs), ..idle() }
}

fn starting(headroom: bool) -> NodeRequirements<'static> {
    NodeRequirements { capacity: RequiredCapacity::Start { headroom }, ..requirements(8) }
}

fn is_busy(world: &mut World, requirements: &NodeRequirements<'_>) -> bool {
    match world.pick_nodes(requirements) {
        Ok(_) => false,
        Err(NoNode::Busy { .. }) => true,
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn attempts_start_only_on_nodes_with_a_free_slot() {
    let mut world = World::new();
    // Another router has a sequence on the first node.
    world.up(&decode(11), &record(Role::Decode, 11), load(4, 1));
    world.up(&decode(12), &record(Role::Decode, 12), load(4, 0));
    let picked: Vec<_> = (0..7).map(|_| world.pick_nodes(&starting(false)).unwrap()).collect();
    assert!(is_busy(&mut world, &starting(false)));
    assert!(!is_busy(&mut world, &requirements(8)), "the node may queue it");
    // An ended attempt frees its slot at once, although the node has not reported it.
    world.directory.release(picked[0].decode.assignment);
    world.directory.release(picked[1].decode.assignment);
    assert!(!is_busy(&mut world, &starting(false)));
    assert!(is_busy(&mut world, &starting(false)));
}

#[test]
fn node_with_both_roles_has_a_free_slot_once_it_delivered_its_kv() {
    let (disaggregate, roles) = (Disaggregate::Always, Roles::Fluid);
    let mut world = World::with(Selection { disaggregate, roles, ..DEFAULT });
    for (node, role, number) in [(prefill(1), Role::Prefill, 1), (decode(11), Role::Decode, 11)] {
        let both = NodeRecord { both_roles: true, ..record(role, number) };
        world.up(&node, &both, load(1, 0));
    }
    let capacity = RequiredCapacity::Start { headroom: false };
    let long = NodeRequirements { capacity, ..requirements(100) };
    let picked = world.pick_nodes(&long).unwrap();
    let (from, to) = (picked.prefill.unwrap().assignment, picked.decode.assignment);
    let local = NodeRequirements { local_prefill: true, ..long };
    assert!(is_busy(&mut world, &local));
    world.directory.delivered(world.now, from, to, Duration::from_millis(1));
    assert!(!is_busy(&mut world, &local));
}

#[test]
fn headroom_is_an_eighth_of_all_slots() {
    let mut world = World::new();
    world.up(&decode(11), &record(Role::Decode, 11), load(8, 0));
    world.up(&decode(12), &record(Role::Decode, 12), load(8, 0));
    for _ in 0..14 {
        assert!(!is_busy(&mut world, &starting(true)));
    }
    assert!(is_busy(&mut world, &starting(true)));
    assert!(!is_busy(&mut world, &starting(false)) && !is_busy(&mut world, &starting(false)));
    assert!(is_busy(&mut world, &starting(false)));
}

#[test]
fn node_without_free_blocks_takes_no_attempt_while_it_has_sequences() {
    let full = |running| Load { blocks_free: 0, ..load(8, running) };
    for (running, busy) in [(1, true), (0, false)] {
        let mut world = World::new();
        world.up(&decode(11), &record(Role::Decode, 11), full(running));
        assert_eq!(is_busy(&mut world, &starting(false)), busy, "{running} running");
    }
}

#[test]
fn an_attempt_needs_blocks_of_every_kv_group() {
    let request = NodeRequirements { capacity: starting(false).capacity, ..requirements(160) };
    // 10 blocks of the prompt and one of the answer in a group without a window.
    let needs = [(vec![0], 0, 11), (vec![0, 0], 0, 22), (vec![0, 32], 0, 14), (vec![0], 5, 16)];
    for (kv_windows, state_blocks, needed) in needs {
        for (blocks_free, busy) in [(needed, false), (needed - 1, true)] {
            let mut world = World::new();
            let kv_windows = kv_windows.clone();
            let node = NodeRecord { kv_windows, state_blocks, ..record(Role::Decode, 11) };
            world.up(&decode(11), &node, Load { blocks_free, ..load(8, 1) });
            assert_eq!(
                is_busy(&mut world, &request),
                busy,
                "{:?}: {blocks_free} free",
                node.kv_windows
            );
        }
    }
    // A prefill node holds the whole prompt in every group until its KV is sent.
    let mut world = World::with(Selection { disaggregate: Disaggregate::Always, ..DEFAULT });
    let of = |role, number| NodeRecord { kv_windows: vec![0, 32], ..record(role, number) };
    world.up(&decode(11), &of(Role::Decode, 11), load(8, 0));
    for (port, blocks_free) in [(1, 19), (2, 20)] {
        let load = Load { blocks_free, ..load(8, 1) };
        world.up(&prefill(port), &of(Role::Prefill, port.into()), load);
    }
    let picked = world.pick_nodes(&request).unwrap();
    assert_eq!(picked.prefill.unwrap().record.epoch, epoch(2));
}

#[test]
fn moving_sequence_avoids_full_nodes_while_another_node_has_room() {
    let mut world = World::new();
    let draining = NodeRecord { both_roles: true, ..record(Role::Decode, 11) };
    world.up(&decode(11), &draining, Load { draining: true, ..load(4, 1) });
    world.up(&decode(12), &record(Role::Decode, 12), load(1, 1));
    let moving = NodeRequirements { moves_from: Some(epoch(11)), ..requirements(100) };
    let picked = world.pick_nodes(&moving).unwrap();
    assert_eq!(picked.decode.record.epoch, epoch(12), "no node has room");
    world.up(&decode(13), &record(Role::Decode, 13), load(64, 60));
    for _ in 0..4 {
        assert_eq!(world.pick_nodes(&moving).unwrap().decode.record.epoch, epoch(13));
    }
}

#[test]
fn node_of_an_older_release_is_never_full() {
    let mut world = World::new();
    world.up(&decode(11), &record(Role::Decode, 11), load(0, 500));
    assert!(!is_busy(&mut world, &starting(true)));
}

#[test]
fn queue_of_a_node_with_impossible_costs_is_long() {
    let costs = v1::PrefillCosts { pair_ps: u64::MAX, ..Default::default() };
    let of_node = load(8, 1).step_costs.unwrap();
    let step_costs = Some(v1::StepCosts { prefill: Some(costs), ..of_node });
    let queue = Load {
        pending_prompt_tokens: 100,
        pending_prompt_pairs: u64::MAX,
        step_costs,
        ..load(8, 1)
    };
    let mut world = World::new();
    world.up(&decode(11), &record(Role::Decode, 11), queue);
    assert!(is_busy(&mut world, &starting(false)));
}

#[test]
fn attempts_wait_while_the_queue_of_prompts_is_long() {
    for (pending, busy) in [(400, false), (600, true)] {
        let mut world = World::new();
        let queue = Load { waiting: 1, pending_prompt_tokens: pending, ..load(8, 0) };
        world.up(&prefill(1), &record(Role::Prefill, 1), queue);
        world.up(&decode(11), &record(Role::Decode, 11), Load { running: 1, ..queue });
        let long = NodeRequirements {
            capacity: RequiredCapacity::Start { headroom: false },
            ..requirements(200)
        };
        assert_eq!(is_busy(&mut world, &long), busy, "{pending} tokens of 0.1 ms");
    }
}

#[test]
fn pooled_attempt_goes_to_a_decode_node_while_all_prefill_nodes_are_busy() {
    let pooled = |role, number| NodeRecord { pooling: true, ..record(role, number) };
    let capacity = RequiredCapacity::Start { headroom: false };
    let requirements = NodeRequirements { pooling: true, capacity, ..requirements(200) };
    let long = Load { waiting: 1, pending_prompt_tokens: 600, ..load(8, 0) };
    for (of_prefill, of_decode, role) in [
        (load(8, 0), load(8, 0), Some(Role::Prefill)),
        (long, load(8, 0), Some(Role::Decode)),
        (load(8, 8), load(8, 0), Some(Role::Decode)),
        (long, load(8, 8), None),
    ] {
        let mut world = World::new();
        world.up(&prefill(1), &pooled(Role::Prefill, 1), of_prefill);
        world.up(&decode(11), &pooled(Role::Decode, 11), of_decode);
        match world.pick_nodes(&requirements) {
            Ok(picked) => {
                assert_eq!(Some(picked.decode.record.role), role);
                assert!(picked.prefill.is_none());
            }
            Err(NoNode::Busy { role: busy, .. }) => {
                assert_eq!((busy, None), (Role::Prefill, role));
            }
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn caller_that_leaves_headroom_gets_a_prefill_node_although_local_prefill_is_cheaper() {
    let mut world = World::new();
    world.up(
        &prefill(1),
        &record(Role::Prefill, 1),
        Load { pending_prompt_tokens: 40, ..load(8, 1) },
    );
    world.up(&decode(11), &record(Role::Decode, 11), load(8, 0));
    for (headroom, is_local) in [(false, true), (true, false)] {
        let requirements =
            NodeRequirements { capacity: RequiredCapacity::Start { headroom }, ..requirements(32) };
        let picked = world.pick_nodes(&requirements).unwrap();
        let placement = &picked.considered.placement;
        assert_eq!(picked.prefill.is_none(), is_local, "{placement}");
        assert_eq!(*placement == Placement::Headroom, headroom, "{placement}");
    }
}
