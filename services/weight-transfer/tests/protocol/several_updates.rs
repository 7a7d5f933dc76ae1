//! Several updates at a time: of two operators, of nodes that catch up, and of coordinators that
//! die.

use proptest::prelude::*;
use weight_transfer::{ParticipantPhase, UpdateReport, UpdateState, WeightVersion};

use crate::{
    events::{Event, event},
    node::{Node, version_of},
    world::{FIRST_ID, World},
};

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_two_nodes_serve_different_bytes_under_one_version(
        nodes in 1usize..5,
        in_place in any::<u8>(),
        events in prop::collection::vec(event(), 1..250),
    ) {
        let mut world = World::new(nodes, in_place);
        events.into_iter().for_each(|event| world.apply(event));
        // Without further messages every node serves again after its deadline.
        world.updates.clear();
        world.calls.clear();
        world.apply(Event::Advance(60_000));
        world.settle();
        world.nodes.iter_mut().for_each(Node::restore);
        for node in &world.nodes {
            prop_assert!(matches!(node.participant.phase(), ParticipantPhase::Serving));
            prop_assert!(node.serves.is_some());
        }
    }

    /// The coordinators die at any message, and another update begins before the prepared nodes
    /// ask. No time passes until then, so no update ends by its deadline.
    #[test]
    fn prepared_nodes_commit_as_a_reachable_peer_did_whatever_began_since(
        nodes in 2usize..5,
        in_place in any::<u8>(),
        order in any::<u64>(),
        rounds in 0usize..60,
        events in prop::collection::vec(event(), 0..30),
        later_rounds in 0usize..20,
    ) {
        let mut world = World::new(nodes, in_place);
        world.apply(Event::Begin { commits_at_once: true, lower: false, seed: None });
        world.run_fairly_for(order, rounds);
        let takes_no_time = |event: &Event| !matches!(event, Event::Advance(_));
        events.into_iter().filter(takes_no_time).for_each(|event| world.apply(event));
        world.updates.clear();
        world.calls.clear();
        (0..nodes).for_each(|node| world.apply(Event::Heal(node)));
        world.apply(Event::Begin { commits_at_once: true, lower: false, seed: None });
        world.run_fairly_for(order, later_rounds);
        world.updates.clear();
        world.calls.clear();
        let prepared = |node: usize| match world.nodes[node].participant.report()? {
            UpdateReport { id, state: UpdateState::Prepared(_) } => Some((node, id)),
            _ => None,
        };
        let prepared: Vec<_> = (0..nodes).filter_map(prepared).collect();
        world.apply(Event::Advance(3_000));
        for (node, id) in prepared {
            let is_installed = world.nodes.iter().any(|peer| peer.installed.contains(&id));
            prop_assert_eq!(world.nodes[node].installed.contains(&id), is_installed);
        }
    }

    /// The coordinator dies after one node has committed. Another update begins before the prepared
    /// nodes ask.
    #[test]
    fn update_that_one_node_has_committed_commits_although_another_begins(
        nodes in 2usize..5,
        in_place in any::<u8>(),
        order in any::<u64>(),
        lower in any::<bool>(),
        rounds in 0usize..40,
    ) {
        let mut world = World::new(nodes, in_place);
        world.apply(Event::Begin { commits_at_once: false, lower: false, seed: None });
        world.run_fairly(order);
        let id = world.updates[0].id;
        world.apply(Event::Commit(0));
        world.apply(Event::Call(0));
        world.apply(Event::DeliverCall { index: 0, keep: false });
        world.apply(Event::CoordinatorDies(0));
        prop_assert_eq!(&world.nodes[0].installed, &[id]);
        world.apply(Event::Begin { commits_at_once: true, lower, seed: None });
        world.run_fairly_for(order, rounds);
        world.apply(Event::Advance(3_000));
        for node in &world.nodes {
            prop_assert_eq!(node.installed.first(), Some(&id));
        }
        // The other update commits, or aborts because the prepared nodes were busy.
        world.run_fairly(order);
        prop_assert!(world.updates.is_empty());
        world.nodes.iter_mut().for_each(Node::restore);
        for node in &world.nodes {
            prop_assert_eq!(node.version(), world.nodes[0].version());
        }
    }

    /// The routers of the catch-ups have died, so no call ends the catch-ups.
    #[test]
    fn update_of_an_operator_commits_although_nodes_catch_up(
        nodes in 1usize..5,
        in_place in any::<u8>(),
        order in any::<u64>(),
    ) {
        let mut world = World::new(nodes, in_place);
        for node in 0..nodes {
            world.apply(Event::CatchUp(node));
            world.apply(Event::Call(0));
            world.apply(Event::DeliverCall { index: 0, keep: false });
            world.apply(Event::CoordinatorDies(0));
        }
        prop_assert_eq!(world.receiving.len(), nodes);
        world.apply(Event::Begin { commits_at_once: true, lower: false, seed: None });
        world.run_fairly(order);
        prop_assert!(world.updates.is_empty());
        let version = version_of(&vec![(FIRST_ID + world.begun) as u8; 8]);
        for node in &world.nodes {
            prop_assert_eq!(node.version(), version);
        }
    }

    #[test]
    fn at_least_one_of_two_updates_that_begin_at_once_commits_on_every_node(
        nodes in 1usize..5,
        in_place in any::<u8>(),
        order in any::<u64>(),
        first_is_lower in any::<bool>(),
    ) {
        let mut world = World::new(nodes, in_place);
        world.apply(Event::Begin { commits_at_once: true, lower: first_is_lower, seed: None });
        world.apply(Event::Begin { commits_at_once: true, lower: !first_is_lower, seed: None });
        world.run_fairly(order);
        prop_assert!(world.updates.is_empty());
        // The other one runs after it, or aborts. Then nodes in place restore what they served.
        world.nodes.iter_mut().for_each(Node::restore);
        for node in &world.nodes {
            prop_assert_ne!(node.version(), WeightVersion::LOADED);
            prop_assert_eq!(node.version(), world.nodes[0].version());
        }
    }
}
