//! Running sequences that leave a draining node with their KV, in virtual time.

use std::time::Duration;

use cluster::{Role, Selection};
use config::{Disaggregate, NodePolicy, Roles};
use engine::SchedulerConfig;

use crate::{
    Coverage, Outcome,
    misbehaving::{STEP, node, request},
    run_scenario,
    scenario::{Fault, NodePlan, RequestPlan, Scenario},
};

const STREAMS: u32 = 32;
/// Hosts of the decode nodes. Host 0 is a prefill node.
const DRAINING: usize = 1;
const OTHER: usize = 2;
/// All streams begin before this time. They move 500 ms to 1 s after their first tokens.
const DRAIN_AT: Duration = Duration::from_millis(500);
/// Longer than the streams take after [`DRAIN_AT`].
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);

/// Runs streams of 130 tokens on two decode nodes, one of which drains. `fault`: a fault besides
/// the drain.
fn run(seed: u64, roles: Roles, fault: Option<(Duration, Fault)>) -> Outcome {
    let selection =
        Selection { disaggregate: Disaggregate::Auto, roles, policy: NodePolicy::Predicted };
    let stream = |index| RequestPlan {
        at: Duration::from_millis(8) * index,
        max_tokens: 130,
        ..request(index)
    };
    let with_cache = |role| {
        let node = node(role, STEP);
        NodePlan { scheduler: SchedulerConfig { prefix_cache: true, ..node.scheduler }, ..node }
    };
    let nodes = [Role::Prefill, Role::Decode, Role::Decode].map(with_cache).into();
    let requests = (0..STREAMS).map(stream).collect();
    let restart_after = Duration::from_secs(1);
    let drain = Fault::Drain { host: DRAINING, timeout: DRAIN_TIMEOUT, restart_after };
    let scenario = Scenario {
        faults: [(DRAIN_AT, drain)].into_iter().chain(fault).collect(),
        ..Scenario::fault_free(selection, nodes, requests, Duration::from_micros(300))
    };
    let outcome = run_scenario(seed, scenario, false);
    let ends = ["complete", "complete after a retry"].map(|end| outcome.coverage.get(end));
    assert_eq!(ends.iter().sum::<u64>(), u64::from(STREAMS), "{}", outcome.coverage);
    outcome
}

#[test]
fn sequences_of_a_draining_node_move_with_their_kv() {
    for roles in [Roles::Fixed, Roles::Fluid] {
        let Outcome { coverage, longest_gap, .. } = run(1, roles, None);
        let moved = coverage.get("sequences moved");
        assert!(moved >= u64::from(STREAMS) / 3, "{roles:?}: {coverage}");
        assert_eq!(coverage.get("sequences that move"), moved, "{roles:?}: {coverage}");
        assert_eq!(coverage.get("moved sequences that were recomputed"), 0, "{coverage}");
        assert_eq!(coverage.get("drained in time"), 1, "{roles:?}: {coverage}");
        // The reservation, the transfer and a few steps.
        assert!(longest_gap < 8 * STEP, "{roles:?}: {longest_gap:?}");
    }
}

#[test]
fn faults_during_a_move_lose_no_token() {
    let restart_after = Duration::from_secs(3);
    let kill = |host, resets_connections| Fault::Kill { host, resets_connections, restart_after };
    let duration = Duration::from_secs(3);
    let faults = [
        kill(DRAINING, true),
        kill(DRAINING, false),
        kill(OTHER, true),
        kill(OTHER, false),
        Fault::Pause { host: DRAINING, duration },
        Fault::Pause { host: OTHER, duration },
        Fault::Partition { a: DRAINING, b: OTHER, duration },
        Fault::CloseDataConnections { a: DRAINING, b: OTHER },
        Fault::OutboundQueueFull { from: DRAINING, to: OTHER },
        Fault::OutboundQueueFull { from: OTHER, to: DRAINING },
        Fault::CloseRouterConnection { router: 0, host: DRAINING },
        Fault::CloseRouterConnection { router: 0, host: OTHER },
    ];
    let mut coverage = Coverage::default();
    for (number, fault) in (0..).zip(faults) {
        for moment in 0..6 {
            let at = DRAIN_AT + Duration::from_millis(80) * moment;
            let roles = [Roles::Fixed, Roles::Fluid][moment as usize % 2];
            coverage
                .merge(&run(100 * number + u64::from(moment), roles, Some((at, fault))).coverage);
        }
    }
    // Some moves were interrupted and became ordinary attempts.
    let (begun, moved) = (coverage.get("sequences that move"), coverage.get("sequences moved"));
    assert!(moved > 0 && moved < begun, "{coverage}");
}
