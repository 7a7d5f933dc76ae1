//! Node selection by predictions: where a prompt is prefilled, and on which pair.

use std::{collections::BTreeMap, time::Duration};

use cluster::{
    CacheIdentity, IneligibleNode, Load, NoNode, NodeRecord, NodeRequirements, Picked, Placement,
    PrefixKeys, RequiredCapacity, Role, Selection,
};
use config::{Disaggregate, NodePolicy, Roles};
use proto::v1;

use crate::world::*;

/// Returns the step costs of an 8B model on a GPU: prefill 1 ms and 20 µs a token, decode 4.5 ms
/// and 30 µs a row.
fn costs() -> v1::StepCosts {
    v1::StepCosts {
        step_tokens: 512,
        chunk_tokens: 512,
        itl_max_ms: 0,
        slots: 0,
        prefill: Some(v1::PrefillCosts {
            step_ps: 1_000_000_000,
            token_ps: 20_000_000,
            pair_ps: 1_000,
        }),
        decode: Some(v1::DecodeCosts {
            step_ps: 4_500_000_000,
            row_ps: 30_000_000,
            context_token_ps: 30_000,
        }),
    }
}

fn load() -> Load {
    Load { step_costs: Some(costs()), ..idle() }
}

/// Returns the load of a queue of prompts.
fn queued(pending_prompt_tokens: u64) -> Load {
    let pending_prompt_pairs = pending_prompt_tokens * 500;
    let waiting = pending_prompt_tokens.div_ceil(SEQUENCE_TOKENS_MAX) as u32;
    Load { waiting, pending_prompt_tokens, pending_prompt_pairs, ..load() }
}

fn decoding(running: u32) -> Load {
    Load { running, context_tokens: u64::from(running) * 1000, ..load() }
}

/// Returns a world with pairs of prefill nodes (ports 1, 2, …) and decode nodes (ports 11, 12, …)
/// with these loads.
fn cluster(selection: Selection, prefill_loads: &[Load], decode_loads: &[Load]) -> World {
    let mut world = World::with(selection);
    for (port, load) in (1..).zip(prefill_loads) {
        world.up(&prefill(port), &record(Role::Prefill, port.into()), *load);
    }
    for (port, load) in decode_ports(prefill_loads).zip(decode_loads) {
        world.up(&decode(port), &record(Role::Decode, port.into()), *load);
    }
    world
}

fn decode_ports(prefill_loads: &[Load]) -> impl Iterator<Item = u16> {
    if prefill_loads.len() < 10 { 11.. } else { 101.. }
}

fn pair(prefill_load: Load, decode_load: Load) -> World {
    cluster(DEFAULT, &[prefill_load], &[decode_load])
}

fn pick(world: &mut World, tokens: u32) -> Picked {
    world.pick_nodes(&requirements(tokens)).unwrap()
}

fn is_local(world: &mut World, tokens: u32) -> bool {
    pick(world, tokens).prefill.is_none()
}

#[test]
fn idle_prefill_node_prefills_and_a_loaded_one_leaves_prompts_to_the_decode_node() {
    for running in [0, 10] {
        assert!(!is_local(&mut pair(load(), decoding(running)), 200));
        assert!(!is_local(&mut pair(queued(200), decoding(running)), 1500));
        assert!(is_local(&mut pair(queued(20_000), decoding(running)), 200));
    }
    // A long prompt on a full decode node delays more than the queue does.
    assert!(!is_local(&mut pair(queued(20_000), decoding(60)), 1800));
    // The decode node has a queue too.
    let busy = Load { running: 5, ..queued(30_000) };
    assert!(!is_local(&mut pair(queued(20_000), busy), 200));
}

#[test]
fn large_cluster_compares_the_pairs_of_its_best_nodes() {
    // Queues of 4,000 prompt tokens, except at the last prefill node; many rows, except at the last
    // decode node.
    let mut prefill_loads = [queued(4000); 40];
    prefill_loads[39] = load();
    let mut decode_loads = [decoding(60); 40];
    decode_loads[39] = decoding(1);
    let mut world = cluster(DEFAULT, &prefill_loads, &decode_loads);
    let picked = pick(&mut world, 1500);
    assert_eq!(picked.prefill.unwrap().address, prefill(40));
    assert_eq!(picked.decode.address, decode(140));
    // Equal nodes share a burst.
    let selection = Selection { disaggregate: Disaggregate::Always, ..DEFAULT };
    let mut world = cluster(selection, &[load(); 40], &[load(); 40]);
    let mut counts = BTreeMap::new();
    for _ in 0..80 {
        let picked = pick(&mut world, 200);
        *counts.entry(picked.decode.address.grpc).or_insert(0) += 1;
        *counts.entry(picked.prefill.unwrap().address.grpc).or_insert(0) += 1;
    }
    assert_eq!(counts.len(), 80, "{counts:?}");
    assert!(counts.values().all(|count| (1..=3).contains(count)), "{counts:?}");
}

#[test]
fn decode_node_at_its_inter_token_latency_bound_prefills_no_prompt() {
    let bounded = |running, itl_max_ms| Load {
        step_costs: Some(v1::StepCosts { itl_max_ms, ..costs() }),
        ..decoding(running)
    };
    // A decode step with 5 rows takes 4.8 ms.
    assert!(is_local(&mut pair(queued(40_000), bounded(5, 6)), 400));
    assert!(!is_local(&mut pair(queued(40_000), bounded(5, 4)), 400));
    assert!(is_local(&mut pair(queued(40_000), bounded(0, 4)), 400));
    // Prompts that the decode node took already lengthen its queue, not its steps.
    let mut world = pair(queued(40_000), bounded(5, 6));
    let ttfts: Vec<_> = (0..3).map(|_| pick(&mut world, 400).ttft.unwrap()).collect();
    assert!(ttfts.is_sorted() && ttfts[2] > ttfts[0] + Duration::from_millis(10), "{ttfts:?}");
    // No other node could prefill.
    assert!(is_local(&mut cluster(DEFAULT, &[], &[bounded(5, 4)]), 400));
}

#[test]
fn running_sequences_that_prefill_delay_a_prompt_by_their_tokens_only() {
    let step_costs = Some(v1::StepCosts { itl_max_ms: 6, ..costs() });
    let queue = Load { step_costs, ..queued(500) };
    let prefills = Load { running: 1, waiting: 0, prefilling: 1, ..queue };
    let ttft = |load| pick(&mut cluster(DEFAULT, &[], &[load]), 400).ttft.unwrap();
    assert_eq!(ttft(prefills), ttft(queue));
    let decodes = Load { prefilling: 0, ..prefills };
    assert!(ttft(decodes) > ttft(queue), "the prompt waits for the step in flight");
}

#[test]
fn always_picks_a_pair_and_never_does_not() {
    let with = |disaggregate| Selection { disaggregate, ..DEFAULT };
    for policy in [NodePolicy::Predicted, NodePolicy::CacheAware] {
        let always = Selection { policy, ..with(Disaggregate::Always) };
        let never = Selection { policy, ..with(Disaggregate::Never) };
        let auto = Selection { policy, ..DEFAULT };
        for (prefill_load, auto_is_local) in [(queued(40_000), true), (load(), false)] {
            let world = |selection| cluster(selection, &[prefill_load], &[load()]);
            assert_eq!(is_local(&mut world(auto), 200), auto_is_local);
            assert!(!is_local(&mut world(always), 200));
            assert!(is_local(&mut world(never), 200));
        }
        // Without a prefill node the decode node prefills.
        assert!(is_local(&mut cluster(always, &[], &[load()]), 200));
    }
    let mut world = cluster(with(Disaggregate::Always), &[load()], &[load()]);
    let local = NodeRequirements { local_prefill: true, ..requirements(200) };
    assert!(world.pick_nodes(&local).unwrap().prefill.is_none());
}

/// Node 11 has the prompt cached, node 12 has the fewest requests, node 13 was picked least
/// recently, and node 14 computes twice as fast.
#[test]
fn each_policy_picks_by_its_own_criterion() {
    let tokens: Vec<u32> = (0..805).collect();
    let identity = CacheIdentity::of(&record(Role::Decode, 1).identity);
    let prefix = [PrefixKeys::new(identity, None, "", &tokens)];
    let picked_by = |policy| {
        let mut world = World::with(Selection {
            disaggregate: Disaggregate::Auto,
            roles: Roles::Fixed,
            policy,
        });
        let with = |running, pending_prompt_tokens, divisor| {
            let mut costs = costs();
            let (prefill, decode) =
                (costs.prefill.as_mut().unwrap(), costs.decode.as_mut().unwrap());
            prefill.token_ps /= divisor;
            decode.step_ps /= divisor;
            let step_costs = Some(costs);
            let waiting = u64::div_ceil(pending_prompt_tokens, SEQUENCE_TOKENS_MAX) as u32;
            Load { running, waiting, pending_prompt_tokens, step_costs, ..load() }
        };
        let nodes = [
            (11, with(8, 0, 1)),
            (12, with(4, 4000, 1)),
            (13, with(9, 4000, 1)),
            (14, with(8, 500, 8)),
        ];
        for (port, load) in nodes {
            let record = record(Role::Decode, u128::from(port));
            let cached = if port == 11 { prefix[0].keys() } else { &[] };
            world.join(&decode(port));
            world.send(&decode(port), snapshot(&record, load, cached));
        }
        // Nodes 11, 12 and 14 were picked before.
        for port in [11, 12, 14] {
            let others = [11, 12, 13, 14].map(epoch);
            let others: Vec<_> = others.into_iter().filter(|other| *other != epoch(port)).collect();
            let only = NodeRequirements { exclude_decode: &others, ..requirements(16) };
            let assignment = world.pick(&only).unwrap().assignment;
            world.directory.release(assignment);
        }
        let request = NodeRequirements { prefix: &prefix, ..requirements(805) };
        world.pick(&request).unwrap().record.epoch
    };
    assert_eq!(picked_by(NodePolicy::CacheAware), epoch(11));
    assert_eq!(picked_by(NodePolicy::LeastLoad), epoch(12));
    assert_eq!(picked_by(NodePolicy::RoundRobin), epoch(13));
    assert_eq!(picked_by(NodePolicy::Predicted), epoch(14));
}

/// Each node computes at the same speed; 800 tokens take 16 ms.
#[test]
fn prefix_in_memory_is_preferred_to_a_tier_and_a_tier_to_computing() {
    let tokens: Vec<u32> = (0..805).collect();
    let identity = CacheIdentity::of(&record(Role::Decode, 1).identity);
    let prefix = [PrefixKeys::new(identity, None, "", &tokens)];
    let bytes = |keys: &[u128]| keys.iter().map(|key| key.to_be_bytes().to_vec().into()).collect();
    // Node 11 has the prefix in memory, node 12 on its disk, node 14 in host memory, and node 13
    // nowhere.
    let picked_of = |ports: &[u16], host_block_ns: u64, disk_block_ns: u64| {
        let mut world = World::with(DEFAULT);
        for &port in ports {
            let record = record(Role::Decode, u128::from(port));
            let load = Load { host_block_ns, disk_block_ns, ..load() };
            let cached = if port == 11 { prefix[0].keys() } else { &[] };
            world.join(&decode(port));
            world.send(&decode(port), snapshot(&record, load, cached));
            let tier = match port {
                12 => Some(v1::KvTier::Disk),
                14 => Some(v1::KvTier::Host),
                _ => None,
            };
            if let Some(tier) = tier {
                let (tier, stored) = (tier.into(), bytes(prefix[0].keys()));
                let tiers = vec![v1::TierBlocks { tier, stored, lost: vec![] }];
                let delta = v1::NodeDelta { tiers, ..Default::default() };
                let event = Some(v1::observe_event::Event::Delta(delta));
                world.send(&decode(port), v1::ObserveEvent { sequence: 1, event });
            }
        }
        let request = NodeRequirements { prefix: &prefix, ..requirements(805) };
        let picked = world.pick(&request).unwrap();
        (picked.record.epoch, picked.cached_tokens)
    };
    let picked = |ports: &[u16], disk_block_ns| picked_of(ports, 0, disk_block_ns);
    // 50 blocks of 0.1 ms.
    assert_eq!(picked(&[13, 12, 11], 100_000), (epoch(11), 800));
    assert_eq!(picked(&[13, 12], 100_000), (epoch(12), 800));
    // A node computes what it would load more slowly.
    assert_eq!(picked(&[12], 1_000_000).1, 0);
    // Two nodes hold the prefix in tiers: the node with the faster tier is chosen.
    assert_eq!(picked_of(&[13, 12, 14], 10_000, 100_000), (epoch(14), 800));
    assert_eq!(picked_of(&[13, 14, 12], 200_000, 100_000), (epoch(12), 800));
}

#[test]
fn decode_node_without_a_fitting_prefill_node_is_chosen_by_its_own_prefill() {
    let tokens: Vec<u32> = (0..805).collect();
    let identity = CacheIdentity::of(&record(Role::Decode, 1).identity);
    let prefix = [PrefixKeys::new(identity, None, "", &tokens)];
    let mut other = record(Role::Prefill, 1);
    other.identity.weight_version += 1;
    for prefill_record in [None, Some(other)] {
        let policy = NodePolicy::CacheAware;
        let mut world = World::with(Selection { policy, ..DEFAULT });
        if let Some(record) = prefill_record {
            world.up(&prefill(1), &record, load());
        }
        world.up(&decode(11), &record(Role::Decode, 11), load());
        // Two rows are less work than the prompt, but more than its transfer.
        world.join(&decode(12));
        let cached = prefix[0].keys();
        world.send(&decode(12), snapshot(&record(Role::Decode, 12), decoding(2), cached));
        let picked =
            world.pick_nodes(&NodeRequirements { prefix: &prefix, ..requirements(805) }).unwrap();
        assert_eq!((picked.decode.record.epoch, picked.prefill.is_none()), (epoch(12), true));
    }
}

#[test]
fn request_waits_for_the_node_with_its_prefix_if_another_node_computes_much_more() {
    let slow = v1::PrefillCosts { step_ps: 0, token_ps: 200_000_000, pair_ps: 0 };
    let costs = v1::StepCosts { prefill: Some(slow), ..costs() };
    let with = |load: Load| Load { step_costs: Some(costs), ..load };
    let tokens: Vec<u32> = (0..1600).collect();
    let identity = CacheIdentity::of(&record(Role::Prefill, 1).identity);
    let prefix = [PrefixKeys::new(identity, None, "", &tokens)];
    let pick = |cached: usize, waited: u64| {
        let selection = Selection { disaggregate: Disaggregate::Always, ..DEFAULT };
        let mut world = cluster(selection, &[], &[with(load())]);
        // The queue takes 100 ms, the whole prompt 320 ms.
        world.join(&prefill(1));
        let keys = &prefix[0].keys()[..cached];
        world.send(&prefill(1), snapshot(&record(Role::Prefill, 1), with(queued(500)), keys));
        world.up(&prefill(2), &record(Role::Prefill, 2), with(load()));
        let capacity = RequiredCapacity::Start { headroom: false };
        let waits_since = Some(world.now - Duration::from_millis(waited));
        world.pick_nodes(&NodeRequirements {
            prefix: &prefix,
            capacity,
            waits_since,
            ..requirements(1600)
        })
    };
    for waited in [0, 150] {
        let busy = pick(99, waited).unwrap_err();
        assert!(matches!(busy, NoNode::Busy { role: Role::Prefill, by_choice: true, .. }));
    }
    // A node of an overloaded prefix gets help: the other node costs about 220 ms more.
    for picked in [pick(20, 0), pick(99, 300)] {
        assert_eq!(picked.unwrap().prefill.unwrap().address, prefill(2));
    }
}

#[test]
fn without_measurements_a_prefill_node_prefills() {
    let unmeasured = v1::StepCosts { prefill: None, decode: None, ..costs() };
    let fresh = |load: Load| Load { step_costs: Some(unmeasured), ..load };
    let older = |load: Load| Load { step_costs: None, ..load };
    for (prefill_load, decode_load) in [
        (fresh(queued(40_000)), fresh(load())),
        (older(queued(40_000)), load()),
        (queued(40_000), older(load())),
    ] {
        let picked = pick(&mut pair(prefill_load, decode_load), 200);
        assert!(picked.prefill.is_some() && picked.ttft.is_none());
    }
    // Measurements of another node replace those of a node that has not run a step yet.
    let fresh_decode = v1::StepCosts { prefill: None, ..costs() };
    let decode_load = Load { step_costs: Some(fresh_decode), ..load() };
    let picked = pick(&mut pair(queued(40_000), decode_load), 200);
    assert!(picked.prefill.is_none() && picked.ttft.is_some());
}

#[test]
fn burst_spreads_over_the_nodes_before_any_load_is_reported() {
    let mut world = cluster(DEFAULT, &[load(); 2], &[load(); 2]);
    let mut local = 0;
    let mut by_node = BTreeMap::new();
    for _ in 0..40 {
        let picked = pick(&mut world, 800);
        local += u32::from(picked.prefill.is_none());
        let prefills = picked.prefill.unwrap_or(picked.decode);
        *by_node.entry(prefills.address.to_string()).or_insert(0) += 1;
    }
    // Decode nodes help once the prefill nodes have a queue.
    assert!((5..35).contains(&local), "{local}");
    assert_eq!(by_node.len(), 4);
    assert!(by_node.values().all(|count| (4..=16).contains(count)), "{by_node:?}");
}

#[test]
fn two_equal_pairs_share_a_steady_load() {
    let mut world = cluster(DEFAULT, &[load(); 2], &[load(); 2]);
    let mut counts = BTreeMap::new();
    let mut open = Vec::new();
    for index in 0..400_u64 {
        let picked = pick(&mut world, 400);
        for choice in picked.prefill.iter().chain([&picked.decode]) {
            *counts.entry(choice.address.to_string()).or_insert(0) += 1;
        }
        open.push(picked);
        world.advance(Duration::from_millis(20));
        if open.len() > 6 {
            let ended = open.remove(0);
            for choice in ended.prefill.into_iter().chain([ended.decode]) {
                world.directory.release(choice.assignment);
            }
        }
        // Measurements differ a little between the nodes, and change with every report.
        for (port, role) in
            [(1, Role::Prefill), (2, Role::Prefill), (11, Role::Decode), (12, Role::Decode)]
        {
            let noise = 1000 + (index * 7 + u64::from(port) * 13) % 21;
            let mut costs = costs();
            costs.prefill.as_mut().unwrap().token_ps = 20_000 * noise;
            costs.decode.as_mut().unwrap().step_ps = 4_500_000 * noise;
            let in_flight = |world: &World| {
                let node = address(role, port);
                world.directory.nodes().find(|view| view.address == node).unwrap().in_flight
            };
            let running = if role == Role::Decode { in_flight(&world) as u32 } else { 0 };
            let report = Load { step_costs: Some(costs), ..decoding(running) };
            world.send(&address(role, port), delta(index + 1, Some(report), &[], &[]));
        }
    }
    assert!(counts.values().all(|count| (160..=240).contains(count)), "{counts:?}");
}

#[test]
fn queue_shrinks_while_the_node_works_on_it() {
    let always = Selection { disaggregate: Disaggregate::Always, ..DEFAULT };
    let ttft_after = |waited| {
        let mut world = cluster(always, &[queued(5_000)], &[load()]);
        world.advance(waited);
        // The second prompt waits for the first one, which began when the queue was empty.
        let first = pick(&mut world, 1000).ttft.unwrap();
        world.advance(Duration::from_millis(10));
        (first, pick(&mut world, 16).ttft.unwrap())
    };
    let (at_once, later) = (ttft_after(Duration::ZERO), ttft_after(Duration::from_millis(60)));
    let millis = |duration: Duration| duration.as_secs_f64() * 1e3;
    assert!((millis(at_once.0) - millis(later.0) - 60.0).abs() < 0.1, "{at_once:?} {later:?}");
    let idle = ttft_after(Duration::from_secs(1));
    assert!(millis(idle.0) < 25.0 && idle.1 < idle.0, "{idle:?}");
    assert!((millis(idle.0) - millis(idle.1) - 10.0).abs() < 6.0, "{idle:?}");
}

#[test]
fn attempt_is_counted_until_a_report_names_it() {
    let always = Selection { disaggregate: Disaggregate::Always, ..DEFAULT };
    let mut world = cluster(always, &[load()], &[load()]);
    let next_ttft = |world: &mut World| {
        let picked = pick(world, 1000);
        let ttft = picked.ttft.unwrap();
        world.directory.accepted(picked.prefill.unwrap().assignment);
        ttft.as_secs_f64() * 1e3
    };
    let first = next_ttft(&mut world);
    // A report on its way when the node accepted the attempt does not include the attempt.
    world.send(&prefill(1), arrived(1, load(), &[]));
    let second = next_ttft(&mut world);
    assert!(second > 1.9 * first, "{first} {second}");
    // The node has prefilled the first prompt, and worked 10 ms on a step of the second one.
    let report = Load { step_age_us: 10_000, ..queued(1000) };
    world.send(&prefill(1), arrived(2, report, &[1, 2]));
    let third = next_ttft(&mut world);
    assert!((third - second + 10.0).abs() < 0.5, "{second} {third}");
}

#[test]
fn slow_link_turns_hand_overs_into_local_prefill() {
    let (mut world, prefill_1) = (pair(load(), decoding(2)), prefill(1));
    let picked = pick(&mut world, 1024);
    let sender = picked.prefill.expect("the link is not measured yet");
    let slow = Duration::from_millis(1000);
    world.directory.delivered(world.now, sender.assignment, picked.decode.assignment, slow);
    for choice in [&sender, &picked.decode] {
        world.directory.release(choice.assignment);
    }
    assert!(is_local(&mut world, 1024));
    // Another process behind the address has another link.
    world.end_stream(&prefill_1);
    world.advance(Duration::from_millis(10));
    world.send(&prefill_1, snapshot(&record(Role::Prefill, 9), load(), &[]));
    assert!(!is_local(&mut world, 1024));
}

#[test]
fn predictions_learn_the_time_outside_of_steps() {
    let mut world = pair(load(), load());
    let mut error = Duration::MAX;
    for _ in 0..200 {
        let picked = pick(&mut world, 500);
        let took = Duration::from_millis(20);
        world.advance(took);
        world.directory.first_token(world.now, picked.decode.assignment);
        // Only the first token counts.
        world.directory.first_token(world.now + took, picked.decode.assignment);
        for choice in picked.prefill.into_iter().chain([picked.decode]) {
            world.directory.release(choice.assignment);
        }
        error = picked.ttft.unwrap().abs_diff(took);
    }
    assert!(error < Duration::from_millis(1), "{error:?}");
    // One of eight requests waits in a queue that the prediction does not know.
    let mut predicted = Duration::ZERO;
    for number in 0..200 {
        let picked = pick(&mut world, 500);
        world.advance(Duration::from_millis(if number % 8 == 7 { 200 } else { 20 }));
        world.directory.first_token(world.now, picked.decode.assignment);
        for choice in picked.prefill.into_iter().chain([picked.decode]) {
            world.directory.release(choice.assignment);
        }
        predicted = predicted.max(picked.ttft.unwrap());
    }
    assert!(predicted < Duration::from_millis(24), "{predicted:?}");
}

#[test]
fn account_of_a_pick_has_every_option_with_its_terms_from_the_lowest_cost() {
    let mut world = cluster(DEFAULT, &[load(), queued(4000)], &[decoding(10)]);
    let picked = pick(&mut world, 400);
    let options = &picked.considered.options;
    let names: Vec<_> = options
        .iter()
        .map(|option| (option.prefill.as_ref().map(|node| node.as_str()), option.decode.as_str()))
        .collect();
    assert_eq!(names[0], (Some("prefill-1"), "decode-11"));
    assert!(names.contains(&(Some("prefill-2"), "decode-11")), "{names:?}");
    assert!(names.contains(&(None, "decode-11")) && names.len() == 3, "{names:?}");
    let predictions: Vec<_> = options.iter().map(|option| option.prediction.unwrap()).collect();
    assert!(predictions[1..].is_sorted_by(|a, b| a.cost_ms() <= b.cost_ms()));
    let chosen = predictions[0];
    let ttft_ms = chosen.queue_ms + chosen.prompt_ms + chosen.blocks_ms;
    assert_eq!(picked.ttft, Some(Duration::from_secs_f64(ttft_ms / 1e3)));
    // The other prefill node has a queue, and the decode node's own prefill delays its rows.
    let of = |prefill| names.iter().position(|(name, _)| *name == prefill).unwrap();
    assert!(predictions[of(Some("prefill-2"))].queue_ms > 80.0);
    assert!(predictions[of(None)].slowdown_ms > 10.0 && chosen.slowdown_ms == 0.0);
    let Placement::Predicted { disaggregated_ms, local_ms } = picked.considered.placement else {
        panic!("{:?}", picked.considered.placement)
    };
    assert_eq!((disaggregated_ms, local_ms), (chosen.cost_ms(), predictions[of(None)].cost_ms()));
}

#[test]
fn account_of_a_pick_is_bounded_and_counts_the_rest() {
    let loads: Vec<_> = (0..6).map(|index| queued(400 * index)).collect();
    let mut world = cluster(DEFAULT, &loads, &loads);
    (20..40).for_each(|port| world.join(&prefill(port)));
    let considered = pick(&mut world, 400).considered;
    assert_eq!((considered.options.len(), considered.options_left_out), (16, 42 - 16));
    assert_eq!((considered.ineligible.len(), considered.ineligible_left_out), (16, 4));
    let costs: Vec<_> =
        considered.options[1..].iter().map(|option| option.prediction.unwrap().cost_ms()).collect();
    assert!(costs.is_sorted(), "{costs:?}");
}

#[test]
fn account_of_a_pick_says_why_the_prompt_is_prefilled_there() {
    let placement = |selection, loads: &[Load], requirements: &NodeRequirements<'_>| {
        let mut world = cluster(selection, loads, &[load()]);
        world.pick_nodes(requirements).unwrap().considered.placement
    };
    let with = |disaggregate| Selection { disaggregate, ..DEFAULT };
    let (prompt, short) = (requirements(400), requirements(15));
    let local = NodeRequirements { local_prefill: true, ..requirements(400) };
    let busy = queued(4000);
    assert_eq!(placement(with(Disaggregate::Always), &[busy], &prompt), Placement::Always);
    assert_eq!(placement(with(Disaggregate::Never), &[busy], &local), Placement::Never);
    assert_eq!(placement(DEFAULT, &[busy], &local), Placement::AfterFailure);
    let short_prompt = Placement::ShortPrompt { tokens: 15, block_tokens: 16 };
    assert_eq!(placement(with(Disaggregate::Always), &[busy], &short), short_prompt);
    let none = placement(DEFAULT, &[], &prompt);
    assert_eq!(none.to_string(), "no prefill node is listed");
    assert_eq!(placement(DEFAULT, &[idle()], &prompt), Placement::Unmeasured);

    let mut world = cluster(DEFAULT, &[], &[load()]);
    let mut other = record(Role::Prefill, 1);
    other.identity.weight_version = 2;
    world.up(&prefill(1), &other, load());
    assert_eq!(pick(&mut world, 400).considered.placement, Placement::NoPartner);
}

#[test]
fn account_of_a_pick_names_ineligible_nodes_with_their_reason() {
    let mut world = cluster(DEFAULT, &[load(), load(), load()], &[load()]);
    let busy = pick(&mut world, 400).prefill.unwrap();
    world.directory.busy(world.now, busy.assignment);
    world.end_stream(&prefill(2));
    world.join(&prefill(9));
    let failed = [epoch(3)];
    let picked = world
        .pick_nodes(&NodeRequirements { exclude_prefill: &failed, ..requirements(400) })
        .unwrap();
    let of = |node: &str, reason: &str| IneligibleNode {
        node: node.into(),
        role: Role::Prefill,
        reason: reason.into(),
    };
    let Placement::NoPrefillNode(NoNode::Busy { retry_after, .. }) = picked.considered.placement
    else {
        panic!("{:?}", picked.considered.placement)
    };
    let pause = format!("busy for another {:.0} ms", retry_after.as_secs_f64() * 1e3);
    let expected = [
        of("prefill-1", &pause),
        of("prefill-2", "not up"),
        of("prefill-3", "failed this request before"),
        of("http://127.0.0.1:9", "not up"),
    ];
    assert_eq!(picked.considered.ineligible, expected);
    let reason = picked.considered.placement.to_string();
    assert_eq!(reason, format!("every prefill node is busy, for another {retry_after:?}"));
}

/// Returns a fluid cluster of a prefill node and a decode node that serve both roles.
fn fluid(prefill_load: Load, decode_load: Load) -> World {
    both_roles(Selection { roles: Roles::Fluid, ..DEFAULT }, prefill_load, decode_load)
}

fn both_roles(selection: Selection, prefill_load: Load, decode_load: Load) -> World {
    let mut world = World::with(selection);
    let both = |role, number| NodeRecord { both_roles: true, ..record(role, number) };
    world.up(&prefill(1), &both(Role::Prefill, 1), prefill_load);
    world.up(&decode(11), &both(Role::Decode, 11), decode_load);
    world
}

#[test]
fn fluid_node_without_a_free_slot_prefills_for_no_peer() {
    let costs = Some(v1::StepCosts { slots: 4, ..costs() });
    let running = |running| Load { running, step_costs: costs, ..idle() };
    let capacity = RequiredCapacity::Start { headroom: false };
    let disaggregate = Disaggregate::Always;
    for (roles, is_disaggregated) in [(Roles::Fixed, true), (Roles::Fluid, false)] {
        let selection = Selection { roles, disaggregate, ..DEFAULT };
        let mut world = both_roles(selection, running(4), running(0));
        let picked = world.pick_nodes(&NodeRequirements { capacity, ..requirements(200) }).unwrap();
        assert_eq!(picked.decode.address, decode(11));
        assert_eq!(picked.prefill.is_some(), is_disaggregated, "{roles:?}");
    }
}

#[test]
fn fluid_nodes_serve_the_other_role_where_that_costs_less() {
    // The decode node is full of rows: the idle prefill node also decodes.
    let picked = pick(&mut fluid(load(), decoding(60)), 200);
    assert_eq!(
        (picked.decode.address, picked.prefill.map(|node| node.address)),
        (prefill(1), None)
    );
    // The prefill node has a queue: the decode node prefills, and keeps the sequence.
    let picked = pick(&mut fluid(queued(20_000), load()), 200);
    assert_eq!(
        (picked.decode.address, picked.prefill.map(|node| node.address)),
        (decode(11), None)
    );
    // Rows that the prompt would delay move the prefill to the other node.
    let mut world = fluid(decoding(30), decoding(1));
    let picked = pick(&mut world, 1500);
    assert_eq!(picked.decode.address, decode(11));
    // With fixed roles no prefill node decodes.
    let picked = pick(&mut pair(load(), decoding(60)), 200);
    assert_eq!(picked.decode.address, decode(11));
}

#[test]
fn fluid_cluster_serves_without_a_decode_node_and_never_pairs_a_node_with_itself() {
    let mut world = fluid(load(), load());
    for index in 0..40 {
        let picked = pick(&mut world, 100 + index * 40);
        assert_ne!(picked.prefill.map(|node| node.address), Some(picked.decode.address));
    }
    let failed = [epoch(11)];
    let without =
        NodeRequirements { exclude_decode: &failed, exclude_prefill: &failed, ..requirements(200) };
    let picked = world.pick_nodes(&without).unwrap();
    assert_eq!(
        (picked.decode.address, picked.prefill.map(|node| node.address)),
        (prefill(1), None)
    );
}

#[test]
fn nodes_of_one_role_and_choices_without_predictions_follow_fixed_roles() {
    // A node of an older release.
    let mut world = World::with(Selection { roles: Roles::Fluid, ..DEFAULT });
    world.up(&prefill(1), &record(Role::Prefill, 1), load());
    world.up(&decode(11), &record(Role::Decode, 11), decoding(60));
    assert_eq!(pick(&mut world, 200).decode.address, decode(11));
    // Nodes that have measured no steps.
    let mut world = fluid(idle(), idle());
    for _ in 0..4 {
        let picked = pick(&mut world, 200);
        let nodes = (picked.decode.address, picked.prefill.map(|node| node.address));
        assert_eq!(nodes, (decode(11), Some(prefill(1))));
    }
}
