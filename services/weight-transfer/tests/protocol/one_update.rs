//! One update of an operator, whose coordinator lives.

use proptest::prelude::*;
use weight_transfer::WeightVersion;

use crate::{
    events::Event,
    node::{Node, version_of},
    world::{FIRST_ID, World},
};

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_reachable_node_takes_up_a_committed_update(
        nodes in 1usize..5,
        in_place in any::<u8>(),
        seed in prop::option::of(0usize..5),
        order in any::<u64>(),
    ) {
        let mut world = World::new(nodes, in_place);
        world.apply(Event::Begin { commits_at_once: true, lower: false, seed });
        world.run_fairly(order);
        let version = version_of(&vec![(FIRST_ID + 1) as u8; 8]);
        for node in &world.nodes {
            prop_assert_eq!(node.version(), version);
        }
    }

    /// The update commits only if every node had received the weights.
    #[test]
    fn death_of_the_trainer_leaves_every_node_with_the_same_weights(
        nodes in 1usize..5,
        in_place in any::<u8>(),
        seed in prop::option::of(0usize..5),
        rounds in 0usize..80,
        order in any::<u64>(),
    ) {
        let mut world = World::new(nodes, in_place);
        world.apply(Event::Begin { commits_at_once: true, lower: false, seed });
        let id = world.updates[0].id;
        world.run_fairly_for(order, rounds);
        world.trainer_dies(id);
        world.run_fairly(order);
        prop_assert!(world.updates.is_empty());
        let version = world.decided.get(&id).copied().unwrap_or(WeightVersion::LOADED);
        world.nodes.iter_mut().for_each(Node::restore);
        for node in &world.nodes {
            prop_assert_eq!(node.version(), version);
        }
    }
}
