//! Node selection.

use std::{collections::BTreeMap, time::Duration};

use crate::world::*;
use cluster::{
    Adapter, CacheIdentity, Load, ModelIdentity, NoNode, NodeRecord, NodeRequirements, PrefixKeys,
    Role,
};

fn three() -> World {
    let mut world = World::new();
    for number in 1..=3 {
        world.up(&decode(number), &record(Role::Decode, number.into()), idle());
    }
    world
}

#[test]
fn a_burst_spreads_evenly_before_any_load_is_reported() {
    let mut world = three();
    let mut picked = BTreeMap::new();
    for _ in 0..30 {
        let choice = world.pick(&requirements(100)).unwrap();
        *picked.entry(choice.address).or_insert(0) += 1;
    }
    assert_eq!(picked.into_values().collect::<Vec<_>>(), [10, 10, 10]);
}

#[test]
fn single_requests_to_idle_nodes_take_turns() {
    let mut world = three();
    let mut ports = Vec::new();
    for _ in 0..6 {
        let choice = world.pick(&requirements(100)).unwrap();
        world.directory.release(choice.assignment);
        ports.push(choice.address.grpc);
    }
    assert_eq!(ports[..3], ports[3..]);
    ports.sort();
    ports.dedup();
    assert_eq!(ports.len(), 3);
}

#[test]
fn long_prompts_in_the_queue_outweigh_many_short_ones() {
    let mut world = World::new();
    world.up(&decode(3), &record(Role::Decode, 3), idle());
    let (one, two) = (record(Role::Prefill, 1), record(Role::Prefill, 2));
    let long = Load { waiting: 2, pending_prompt_tokens: 4000, ..idle() };
    let short = Load { waiting: 4, running: 4, pending_prompt_tokens: 400, ..idle() };
    world.up(&prefill(1), &one, long);
    world.up(&prefill(2), &two, short);
    let picked = world.pick_nodes(&requirements(100)).unwrap();
    assert_eq!(picked.prefill.unwrap().record.epoch, two.epoch);
}

#[test]
fn a_node_without_room_is_picked_last() {
    let mut world = World::new();
    let full = Load { blocks_held: 1000, ..Load::default() };
    let busy = Load { running: 3, blocks_free: 800, blocks_held: 200, ..Load::default() };
    world.up(&decode(1), &record(Role::Decode, 1), full);
    world.up(&decode(2), &record(Role::Decode, 2), busy);
    assert_eq!(world.pick(&requirements(160)).unwrap().record.epoch, epoch(2));
}

#[test]
fn a_cached_prefix_draws_a_request_until_load_outweighs_it() {
    let mut world = World::new();
    let tokens: Vec<u32> = (0..805).collect();
    let identity = CacheIdentity::of(&record(Role::Decode, 1).identity);
    let prefix = [PrefixKeys::new(identity, None, "", &tokens)];
    let keys = prefix[0].keys();
    for number in 1..=2 {
        let node = decode(number);
        world.join(&node);
        let cached = if number == 2 { keys } else { &[] };
        world.send(&node, snapshot(&record(Role::Decode, number.into()), idle(), cached));
    }
    let request = NodeRequirements { prefix: &prefix, ..requirements(805) };
    let choice = world.pick(&request).unwrap();
    assert_eq!((choice.record.epoch, choice.cached_tokens), (epoch(2), 800));
    // A cache hit never covers the whole prompt: the node always computes the last token.
    let whole = NodeRequirements { tokens: 800, prompt_tokens: 800, ..request };
    assert_eq!(world.pick(&whole).unwrap().cached_tokens, 799);
    let loaded = Load { running: 40, ..idle() };
    world.send(&decode(2), delta(1, Some(loaded), &[], &[]));
    assert_eq!(world.pick(&request).unwrap().record.epoch, epoch(1));
    // Evicted blocks attract no requests.
    world.send(&decode(2), delta(2, Some(idle()), &[], keys));
    assert_eq!(world.directory.nodes().nth(1).unwrap().cached_blocks(), 0);
}

#[test]
fn prefix_keys_of_another_identity_have_no_effect() {
    let mut world = World::new();
    let tokens: Vec<u32> = (0..805).collect();
    let ours = record(Role::Decode, 1);
    let mut retrained = record(Role::Decode, 2);
    retrained.identity.weight_version += 1;
    let [keys_of_ours, keys_of_retrained] = [&ours, &retrained]
        .map(|record| PrefixKeys::new(CacheIdentity::of(&record.identity), None, "", &tokens));
    for (port, record) in [(1, &ours), (2, &retrained)] {
        world.join(&decode(port));
        // Both nodes report the keys of the new weights.
        world.send(&decode(port), snapshot(record, idle(), keys_of_retrained.keys()));
    }
    let mut cached_at = |prefix: &[PrefixKeys], record: &NodeRecord| {
        let identity = Some(&record.identity);
        let request = NodeRequirements { prefix, identity, ..requirements(805) };
        world.pick(&request).unwrap().cached_tokens
    };
    let both = [keys_of_ours, keys_of_retrained];
    assert_eq!((cached_at(&both, &ours), cached_at(&both, &retrained)), (0, 800));
    assert_eq!(cached_at(&both[..1], &retrained), 0);
}

#[test]
fn a_request_goes_to_nodes_of_its_model_only() {
    let mut world = three();
    let other = NodeRecord { model: "other".into(), ..record(Role::Decode, 4) };
    world.up(&decode(4), &other, Load { running: 40, ..idle() });
    let of_model = |model| NodeRequirements { model, ..requirements(100) };
    for _ in 0..8 {
        assert_eq!(world.pick(&of_model("other")).unwrap().record.epoch, other.epoch);
        assert_ne!(world.pick(&of_model("smollm2")).unwrap().record.epoch, other.epoch);
    }
    let nobody = world.pick(&of_model("nobody")).unwrap_err();
    assert_eq!(nobody, NoNode::OtherModel { role: Role::Decode });
    // The unreachable node may serve the requested model.
    world.end_stream(&decode(4));
    assert!(matches!(world.pick(&of_model("other")), Err(NoNode::NoneUp { .. })));
}

#[test]
fn an_attempt_is_counted_until_the_node_reports_it_and_not_twice() {
    let mut world = World::new();
    let (one, two) = (decode(1), decode(2));
    world.up(&one, &record(Role::Decode, 1), idle());
    world.up(&two, &record(Role::Decode, 2), idle());
    let first = world.pick(&requirements(100)).unwrap();
    assert_eq!(first.address, one);
    // A load report that was in flight does not include the attempt.
    world.send(&one, delta(1, Some(idle()), &[], &[]));
    assert_eq!(world.pick(&requirements(100)).unwrap().address, two);
    // A report after the acceptance includes the attempt, so the router no longer adds it.
    world.directory.accepted(first.assignment);
    world.send(&one, delta(2, Some(Load { running: 1, ..idle() }), &[], &[]));
    assert_eq!(world.pick(&requirements(100)).unwrap().address, one);
    // A report that arrives late enough includes the attempt even without an event.
    world.advance(Duration::from_millis(200));
    world.send(&one, delta(3, Some(Load { running: 2, ..idle() }), &[], &[]));
    world.send(&two, delta(1, Some(Load { running: 3, ..idle() }), &[], &[]));
    assert_eq!(world.pick(&requirements(100)).unwrap().address, one);
}

#[test]
fn attempts_on_a_busy_node_back_off_up_to_two_seconds() {
    let mut world = World::new();
    world.up(&decode(1), &record(Role::Decode, 1), idle());
    let mut pauses = Vec::new();
    for _ in 0..12 {
        let choice = world.pick(&requirements(8)).unwrap();
        world.directory.busy(world.now, choice.assignment);
        let NoNode::Busy { retry_after, .. } = world.pick(&requirements(8)).unwrap_err() else {
            panic!("the only node is busy")
        };
        pauses.push(retry_after);
        world.advance(retry_after);
    }
    assert!(pauses[0] <= Duration::from_millis(50) && pauses[11] >= Duration::from_secs(1));
    assert!(pauses.iter().all(|pause| *pause <= Duration::from_secs(2)), "{pauses:?}");
    // One accepted attempt resets the pause.
    let choice = world.pick(&requirements(8)).unwrap();
    world.directory.accepted(choice.assignment);
    let next = world.pick(&requirements(8)).unwrap();
    world.directory.busy(world.now, next.assignment);
    let NoNode::Busy { retry_after, .. } = world.pick(&requirements(8)).unwrap_err() else {
        panic!("the only node is busy")
    };
    assert!(retry_after <= Duration::from_millis(50));
}

#[test]
fn only_nodes_of_equal_identity_are_paired() {
    let mut world = World::new();
    let odd = record(Role::Prefill, 1);
    let identity = ModelIdentity { weight_version: 9, ..odd.identity.clone() };
    let retrained = |record| NodeRecord { identity: identity.clone(), ..record };
    world.up(&prefill(1), &odd, idle());
    world.up(&decode(3), &retrained(record(Role::Decode, 3)), idle());
    let request = NodeRequirements { identity: Some(&identity), ..requirements(80) };
    assert!(world.pick_nodes(&request).unwrap().prefill.is_none());
    let loaded = Load { waiting: 50, pending_prompt_tokens: 100_000, ..idle() };
    world.up(&prefill(2), &retrained(record(Role::Prefill, 2)), loaded);
    let picked = world.pick_nodes(&request).unwrap();
    assert_eq!(picked.prefill.unwrap().record.epoch, epoch(2));
    let other = NodeRequirements { identity: Some(&odd.identity), ..request };
    assert!(matches!(world.pick(&other), Err(NoNode::NoneFits { .. })));
    // A request continues after a weight update, but never with another model.
    assert!(world.pick(&NodeRequirements { any_weights: true, ..other }).is_ok());
    let model = ModelIdentity { model_fingerprint: 9, ..odd.identity.clone() };
    let stranger = NodeRequirements { identity: Some(&model), any_weights: true, ..other };
    assert!(matches!(world.pick(&stranger), Err(NoNode::NoneFits { .. })));
}

/// The router waits for the fitting node until the deadline, and for an unfit one only for a
/// bounded time.
#[test]
fn fitting_node_that_restarts_or_drains_outranks_an_unfit_one() {
    let role = Role::Decode;
    let mut world = World::new();
    let fitting = record(role, 1);
    let identity = ModelIdentity { weight_version: 9, ..fitting.identity.clone() };
    let unfit = NodeRecord { identity, ..record(role, 2) };
    world.up(&decode(1), &fitting, idle());
    world.up(&decode(2), &unfit, idle());
    let request = NodeRequirements { identity: Some(&fitting.identity), ..requirements(8) };
    world.send(&decode(1), delta(1, Some(Load { draining: true, ..idle() }), &[], &[]));
    assert_eq!(world.pick(&request).unwrap_err(), NoNode::Draining { role });
    world.end_stream(&decode(1));
    assert_eq!(world.pick(&request).unwrap_err(), NoNode::NoneUp { role, listed: 2 });
    // The last record of the absent node does not fit a longer prompt either.
    assert!(matches!(world.pick(&requirements(3000)), Err(NoNode::TooLong { .. })));
    // The directory has no record of a node that was never observed.
    let mut world = World::new();
    world.join(&decode(1));
    world.up(&decode(2), &unfit, idle());
    assert_eq!(world.pick(&request).unwrap_err(), NoNode::NoneFits { role });
}

#[test]
fn sampling_parameters_go_to_nodes_that_announce_their_version() {
    let request = NodeRequirements { sampling_version: 1, ..requirements(8) };
    let of =
        |number, sampling_version| NodeRecord { sampling_version, ..record(Role::Decode, number) };
    let mut world = World::new();
    world.up(&decode(1), &of(1, 0), idle());
    let none = NoNode::NoSampling { role: Role::Decode, version: 1 };
    assert_eq!(world.pick(&request).unwrap_err(), none);
    let busy = Load { waiting: 50, pending_prompt_tokens: 100_000, ..idle() };
    world.up(&decode(2), &of(2, 1), busy);
    assert_eq!(world.pick(&request).unwrap().record.epoch, epoch(2));
}

/// A node that announces no version would ignore the grammar and generate any text.
#[test]
fn a_grammar_goes_to_nodes_that_announce_its_version() {
    let mut world = World::new();
    let with = |version| NodeRequirements { grammar_version: version, ..requirements(8) };
    let of =
        |number, version| NodeRecord { grammar_version: version, ..record(Role::Decode, number) };
    world.up(&decode(1), &of(1, 0), idle());
    let none = NoNode::NoGrammar { role: Role::Decode, version: 1 };
    assert_eq!(world.pick(&with(1)).unwrap_err(), none);
    assert_eq!(world.pick(&with(0)).unwrap().record.epoch, epoch(1));
    let busy = Load { waiting: 50, pending_prompt_tokens: 100_000, ..idle() };
    world.up(&decode(2), &of(2, 1), busy);
    assert_eq!(world.pick(&with(1)).unwrap().record.epoch, epoch(2));
    assert!(matches!(world.pick(&with(2)), Err(NoNode::NoGrammar { version: 2, .. })));
    world.up(&decode(3), &of(3, 2), busy);
    assert_eq!(world.pick(&with(2)).unwrap().record.epoch, epoch(3));
}

#[test]
fn an_adapter_is_computed_by_nodes_that_have_its_content() {
    let mut world = World::new();
    let with = |adapter| NodeRequirements { adapter, ..requirements(800) };
    let of = |role, number, hashes: &[u128]| {
        let adapter = |&content_hash| Adapter { name: "sql".into(), content_hash };
        NodeRecord { adapters: hashes.iter().map(adapter).collect(), ..record(role, number) }
    };
    world.up(&decode(1), &of(Role::Decode, 1, &[8]), idle());
    assert_eq!(world.pick(&with(Some(7))).unwrap_err(), NoNode::NoAdapter { role: Role::Decode });
    assert_eq!(world.pick(&with(None)).unwrap().record.epoch, epoch(1));
    let busy = Load { waiting: 50, pending_prompt_tokens: 100_000, ..idle() };
    world.up(&decode(2), &of(Role::Decode, 2, &[6, 7]), busy);
    assert_eq!(world.pick(&with(Some(7))).unwrap().record.epoch, epoch(2));
    // A prefill node without the adapter cannot prefill for it.
    world.up(&prefill(3), &of(Role::Prefill, 3, &[]), idle());
    assert!(world.pick_nodes(&with(Some(7))).unwrap().prefill.is_none());
    assert!(world.pick_nodes(&with(None)).unwrap().prefill.is_some());
    world.up(&prefill(4), &of(Role::Prefill, 4, &[7]), idle());
    let picked = world.pick_nodes(&with(Some(7))).unwrap();
    assert_eq!(picked.prefill.unwrap().record.epoch, epoch(4));
}

#[test]
fn an_adapter_that_is_loaded_or_unloaded_changes_the_choice_at_once() {
    let mut world = World::new();
    world.up(&decode(1), &record(Role::Decode, 1), idle());
    let with = NodeRequirements { adapter: Some(7), ..requirements(800) };
    let none = NoNode::NoAdapter { role: Role::Decode };
    assert_eq!(world.pick(&with).unwrap_err(), none);
    let sql = Adapter { name: "sql".into(), content_hash: 7 };
    world.send(&decode(1), adapters_changed(1, &[sql]));
    assert_eq!(world.pick(&with).unwrap().record.epoch, epoch(1));
    world.send(&decode(1), adapters_changed(2, &[]));
    assert_eq!(world.pick(&with).unwrap_err(), none);
}

#[test]
fn no_node_error_has_the_reason_of_the_closest_candidate() {
    let mut world = World::new();
    let request = requirements(1500);
    assert_eq!(world.pick(&request).unwrap_err(), NoNode::NoneListed { role: Role::Decode });
    world.join(&decode(1));
    assert_eq!(world.pick(&request).unwrap_err(), NoNode::NoneUp { role: Role::Decode, listed: 1 });
    let small = NodeRecord { prompt_tokens_max: 512, ..record(Role::Decode, 1) };
    world.send(&decode(1), snapshot(&small, idle(), &[]));
    let smaller = NodeRecord { prompt_tokens_max: 100, ..record(Role::Decode, 2) };
    world.up(&decode(2), &smaller, idle());
    let too_long = NoNode::TooLong { role: Role::Decode, tokens: 1500, tokens_max: 512 };
    assert_eq!(world.pick(&request).unwrap_err(), too_long);
    world.up(&decode(3), &record(Role::Decode, 3), idle());
    let exclude = [epoch(3)];
    let tried = NodeRequirements { exclude_decode: &exclude, ..request };
    assert_eq!(world.pick(&tried).unwrap_err(), NoNode::Excluded { role: Role::Decode });
    assert_eq!(world.pick(&request).unwrap().record.epoch, epoch(3));
}

#[test]
fn a_retry_may_be_longer_than_a_prompt_and_goes_only_where_its_answer_fits() {
    let mut world = World::new();
    world.up(&decode(1), &record(Role::Decode, 1), idle());
    let grown = NodeRequirements { tokens: 2040, new_tokens_max: 8, ..requirements(2000) };
    assert!(world.pick(&grown).is_ok());
    let longer = NodeRequirements { new_tokens_max: 9, ..grown };
    let too_long = NoNode::TooLong { role: Role::Decode, tokens: 2049, tokens_max: 2048 };
    assert_eq!(world.pick(&longer).unwrap_err(), too_long);
}

#[test]
fn kv_of_less_than_a_block_needs_no_prefill_node() {
    let mut world = three();
    world.up(&prefill(9), &record(Role::Prefill, 9), idle());
    assert!(world.pick_nodes(&requirements(16)).unwrap().prefill.is_some());
    assert!(world.pick_nodes(&requirements(15)).unwrap().prefill.is_none());
}
