//! Several updates at a time: of two operators, of nodes that catch up, and of coordinators that die.

use proptest::prelude::*;
use weight_transfer::{Phase, WeightVersion};

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
            prop_assert!(matches!(node.participant.phase(), Phase::Serving));
            prop_assert!(node.serves.is_some());
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
