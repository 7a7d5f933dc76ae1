//! Exact recovery bounds in virtual time: each run kills a decode node at another moment of a few requests.
//! Other tests plant a bug into a core's outputs, which the checks must find.

use std::time::Duration;

use cluster::{Role, Selection};
use config::{Disaggregate, NodePolicy};
use engine::{SchedulerConfig, executor::ExecutorLimits};
use kernels::sampling::Sampling;
use kv_transfer::{TransferLimits, config::LEASE};
use simulation_base::NetworkFaults;

use crate::{
    checks::BLOCKS_FREE_MAX,
    device::StepCost,
    event_loop::Simulation,
    planted::PlantedBug,
    run_scenario,
    scenario::{
        BLOCK_BYTES, Fault, ModelPlan, NodePlan, RequestPlan, Scenario, Severity, VOCABULARY,
    },
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
    RequestPlan {
        at: Duration::from_millis(u64::from(index) * 40),
        router: 0,
        model: 0,
        prompt: (0..100).map(|position| (position * 7 + index) % VOCABULARY).collect(),
        sampling: Sampling::greedy(),
        max_tokens: 40,
        ignore_stop_tokens: true,
        grammar: None,
        cache_salt: String::new(),
        timeout: Duration::from_secs(30),
        leaves_after: None,
        stops_at: None,
        stalls: None,
        key: None,
    }
}

/// Returns a scenario with two prefill and two decode nodes and four requests. One decode node is killed at
/// `killed_at`.
fn scenario(killed_at: Duration, resets_connections: bool) -> Scenario {
    let restart_after = Duration::from_secs(8);
    Scenario {
        severity: Severity::Mild,
        network: NetworkFaults::delays(Duration::from_millis(1)),
        read_failure: 0,
        release_delay_max: Duration::from_millis(60),
        thread_delay_max: Duration::ZERO,
        is_checked: true,
        links: None,
        router_count: 1,
        has_etcd: false,
        selection: Selection { disaggregate: Disaggregate::Always, policy: NodePolicy::Predicted },
        models: vec![ModelPlan { name: "model-0".into(), fingerprint: 1, tp: 1 }],
        nodes: [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode].map(node).into(),
        requests: (0..4).map(request).collect(),
        faults: vec![(killed_at, Fault::Kill { host: 2, resets_connections, restart_after })],
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
