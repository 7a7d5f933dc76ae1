use cluster::{Role, Selection};
use config::{Disaggregate, NodePolicy, Roles};
use engine::event::InFlight;

use super::*;
use crate::{
    Coverage,
    misbehaving::{STEP, node, request},
    run_scenario,
    scenario::Scenario,
};

const NODES: u64 = 4;

fn plan() -> UpdatePlan {
    UpdatePlan {
        router: 0,
        model: 0,
        weights: 7,
        in_flight: InFlight::Recompute,
        waits: false,
        has_seed: false,
        decision: Decision::CommitAtOnce,
        timeout: Duration::from_secs(5),
        receive_max: Duration::from_millis(300),
        in_place_percent: 0,
        damage_percent: 0,
        trainer_dies_after: None,
        router_dies_after: None,
    }
}

/// Returns a scenario with two prefill and two decode nodes, ten requests, and an update in the
/// midst of them.
fn scenario(plan: UpdatePlan) -> Scenario {
    let disaggregate = Disaggregate::Always;
    let selection = Selection { disaggregate, roles: Roles::Fixed, policy: NodePolicy::LeastLoad };
    let nodes = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    let nodes = nodes.map(|role| node(role, STEP)).into();
    let requests = (0..10).map(request).collect();
    Scenario {
        faults: vec![(Duration::from_millis(300), Fault::UpdateWeights(plan))],
        ..Scenario::fault_free(selection, nodes, requests, Duration::from_millis(1))
    }
}

fn run(plan: UpdatePlan) -> Coverage {
    run_scenario(1, scenario(plan), false).coverage
}

#[test]
fn every_node_changes_to_the_weights_of_an_update() {
    for in_flight in [InFlight::Recompute, InFlight::KeepKv] {
        for has_seed in [false, true] {
            let coverage = run(UpdatePlan { in_flight, has_seed, ..plan() });
            assert_eq!(coverage.get("updates committed"), 1, "{coverage}");
            assert_eq!(coverage.get("weights changed"), NODES, "{coverage}");
        }
    }
}

#[test]
fn nodes_commit_as_their_peer_did_after_the_death_of_the_coordinator() {
    let first_commit = NODES as u32 + 1;
    let coverage = run(UpdatePlan { router_dies_after: Some(first_commit), ..plan() });
    assert_eq!(coverage.get("coordinators lost"), 1, "{coverage}");
    assert_eq!(coverage.get("commits learned from a peer"), NODES - 1, "{coverage}");
    assert_eq!(coverage.get("weights changed"), NODES, "{coverage}");
}

#[test]
fn nodes_restore_overwritten_weights_after_the_death_of_the_trainer() {
    let trainer_dies_after = Some(Duration::from_millis(200));
    let receive_max = Duration::from_secs(4);
    let in_place_percent = 100;
    let coverage = run(UpdatePlan { trainer_dies_after, receive_max, in_place_percent, ..plan() });
    assert_eq!(coverage.get("updates aborted"), 1, "{coverage}");
    assert!(coverage.get("weights not received") > 0, "{coverage}");
    assert_eq!(coverage.get("weights lost"), NODES, "{coverage}");
    assert_eq!(coverage.get("weights restored"), NODES, "{coverage}");
}

#[test]
#[should_panic(expected = "different bytes under version")]
fn different_bytes_under_one_version_are_found() {
    let mut simulation = Simulation::new(1, scenario(plan()), false);
    let version = WeightVersion::LOADED;
    simulation.updates.used.insert((0, version), vec![1; 8]);
    simulation.run();
}
