//! Exact recovery bounds in virtual time: each run kills a decode node at another moment of a few
//! requests. Other tests plant a bug into a core's outputs, which the checks must find.

use std::time::Duration;

use cluster::{Role, Selection};
use config::{Disaggregate, NodePolicy, Roles};
use engine::{SchedulerConfig, executor::ExecutorLimits};
use kv_transfer::{TransferLimits, config::LEASE};

use crate::{
    checks::BLOCKS_FREE_MAX,
    device::StepCost,
    event_loop::Simulation,
    planted::PlantedBug,
    run_scenario,
    scenario::{BLOCK_BYTES, Fault, NodePlan, RequestPlan, Scenario, VOCABULARY, prompt},
};

/// Maximum time until a client gets the next token after its decode node was killed.
const RECOVERY_MAX: Duration = Duration::from_secs(3);

fn node(role: Role) -> NodePlan {
    let limits = ExecutorLimits {
        slots: 4,
        step_tokens: 64,
        sequence_tokens: 200,
        blocks: 80,
        depth: 2,
        vocabulary: VOCABULARY,
        speculation: None,
    };
    NodePlan {
        role,
        model: 0,
        scheduler: SchedulerConfig { chunk_tokens: 32, ..SchedulerConfig::new(limits) },
        transfers: TransferLimits { chunk_bytes_max: 2 * BLOCK_BYTES, ..Default::default() },
        transfer_events_max: 1024,
        step_cost: StepCost::linear(Duration::from_millis(8), Duration::from_micros(100)),
        tiers: None,
    }
}

fn request(index: u32) -> RequestPlan {
    let request = RequestPlan::new(prompt(100, index), 40, Duration::from_secs(30));
    RequestPlan { at: Duration::from_millis(40) * index, ..request }
}

/// Returns a scenario with two prefill and two decode nodes and four requests. One decode node is
/// killed at `killed_at`.
fn scenario(killed_at: Duration, resets_connections: bool) -> Scenario {
    let restart_after = Duration::from_secs(8);
    let selection = Selection {
        disaggregate: Disaggregate::Always,
        roles: Roles::Fixed,
        policy: NodePolicy::Predicted,
    };
    let nodes = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode].map(node).into();
    let requests = (0..4).map(request).collect();
    Scenario {
        release_delay_max: Duration::from_millis(60),
        faults: vec![(killed_at, Fault::Kill { host: 2, resets_connections, restart_after })],
        ..Scenario::fault_free(selection, nodes, requests, Duration::from_millis(1))
    }
}

#[test]
fn killed_decode_node_meets_the_bounds_of_recovery_and_block_release() {
    let (mut recovery, mut release, mut retried) = (Duration::ZERO, Duration::ZERO, 0);
    for step in 0..120 {
        let killed_at = Duration::from_millis(5 * step);
        for resets_connections in [true, false] {
            let outcome = run_scenario(step, scenario(killed_at, resets_connections), false);
            assert!(outcome.longest_gap <= RECOVERY_MAX, "{:?}", outcome.longest_gap);
            assert!(outcome.longest_release <= BLOCKS_FREE_MAX, "{:?}", outcome.longest_release);
            recovery = recovery.max(outcome.longest_gap);
            release = release.max(outcome.longest_release);
            retried += outcome.coverage.get("complete after a retry");
        }
    }
    eprintln!("longest recovery {recovery:?}, longest release {release:?}, {retried} retries");
    assert!(recovery > LEASE && retried > 100, "the kills interrupted requests");
}

/// The first token after a hand-over does not wait until the outputs of the arrival are carried
/// out.
#[test]
fn kv_that_arrives_at_an_idle_node_is_launched_before_the_outputs_of_its_arrival() {
    let scenario = Scenario { faults: Vec::new(), ..scenario(Duration::ZERO, true) };
    let coverage = run_scenario(0, scenario, false).coverage;
    assert!(coverage.get("arrived KV launched at once") > 0, "{coverage}");
}

fn run_with(bug: PlantedBug) {
    for step in 0..40 {
        let killed_at = Duration::from_millis(5 * step);
        let mut simulation = Simulation::new(step, scenario(killed_at, true), false);
        simulation.planted = Some(bug);
        simulation.run();
        simulation.check_idle();
    }
}

#[test]
#[should_panic(expected = "wrong token")]
fn wrong_token_of_a_decode_node_is_found() {
    run_with(PlantedBug::WrongToken);
}

#[test]
#[should_panic(expected = "wrong token")]
fn duplicated_token_is_found() {
    run_with(PlantedBug::DuplicatedToken);
}

#[test]
#[should_panic(expected = "the scheduler is not idle")]
fn transfer_that_never_releases_its_blocks_is_found() {
    run_with(PlantedBug::NeverReleases);
}
