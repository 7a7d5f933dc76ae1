//! Nodes that misbehave: the shipped router excludes them, and every request completes.

use std::{collections::BTreeSet, time::Duration};

use cluster::{Role, Selection};
use config::{Disaggregate, NodePolicy, Roles};
use engine::{SchedulerConfig, executor::ExecutorLimits};
use kv_transfer::TransferLimits;

use crate::{
    Outcome,
    device::StepCost,
    event_loop::Simulation,
    planted::PlantedBug,
    scenario::{BLOCK_BYTES, Fault, NodePlan, RequestPlan, Scenario, VOCABULARY, prompt},
};

pub(crate) const STEP: Duration = Duration::from_millis(8);
const REQUESTS: u32 = 300;
/// Host of the decode node that misbehaves. Hosts 0 and 1 are prefill nodes, 2 to 4 decode nodes.
const BAD: usize = 3;

pub(crate) fn node(role: Role, step: Duration) -> NodePlan {
    let limits = ExecutorLimits {
        slots: 128,
        step_tokens: 128,
        sequence_tokens: 200,
        blocks: 1600,
        depth: 2,
        vocabulary: VOCABULARY,
        speculation: None,
    };
    NodePlan {
        role,
        model: 0,
        scheduler: SchedulerConfig { prefix_cache: false, ..SchedulerConfig::new(limits) },
        transfers: TransferLimits { chunk_bytes_max: 8 * BLOCK_BYTES, ..Default::default() },
        transfer_events_max: 1024,
        step_cost: StepCost::linear(step, Duration::from_micros(100)),
        tiers: None,
    }
}

pub(crate) fn request(index: u32) -> RequestPlan {
    let request = RequestPlan::new(prompt(64, index), 30, Duration::from_secs(100));
    RequestPlan { at: Duration::from_millis(100) * index, ..request }
}

/// Runs one request each 100 ms for 30 s. `slow`: step time of the node on host [`BAD`].
fn run(slow: Duration, bug: Option<PlantedBug>) -> Outcome {
    let mut nodes = vec![node(Role::Prefill, STEP); 2];
    nodes.extend(vec![node(Role::Decode, STEP); 3]);
    nodes[BAD] = node(Role::Decode, slow);
    // Without predictions, which avoid a slow node by themselves.
    let selection = Selection {
        disaggregate: Disaggregate::Always,
        roles: Roles::Fixed,
        policy: NodePolicy::LeastLoad,
    };
    let requests = (0..REQUESTS).map(request).collect();
    let scenario = Scenario::fault_free(selection, nodes, requests, Duration::from_micros(300));
    let mut simulation = Simulation::new(1, scenario, false);
    simulation.planted = bug;
    simulation.run();
    simulation.check_idle();
    simulation.outcome()
}

fn attempts_on_bad(outcome: &Outcome) -> usize {
    outcome.picks.iter().filter(|pick| pick.decode == BAD).count()
}

#[test]
fn node_that_fails_every_attempt_costs_one_attempt_per_pause() {
    let outcome = run(STEP, Some(PlantedBug::FailsAttempts { host: BAD }));
    let ends = ["complete", "complete after a retry"].map(|end| outcome.coverage.get(end));
    assert_eq!(ends.iter().sum::<u64>(), u64::from(REQUESTS));
    // Three failures, then probes after pauses of 1, 2, 4, 8 and 16 s, each at least half as long.
    let attempts = attempts_on_bad(&outcome);
    assert!((6..=10).contains(&attempts), "{attempts} attempts on the failing node");
    // Each failure costs its request one recomputation, and no other request anything.
    assert!(outcome.longest_gap < Duration::from_millis(200), "{:?}", outcome.longest_gap);
}

#[test]
fn slow_node_is_excluded_and_probed() {
    let even = run(STEP, None);
    assert_eq!(even.coverage.get("slow node excluded"), 0);
    assert!(attempts_on_bad(&even) > 80);
    let outcome = run(5 * STEP, None);
    assert_eq!(outcome.coverage.get("complete"), u64::from(REQUESTS));
    assert!(outcome.coverage.get("slow node excluded") >= 2, "probed, and still slow");
    let attempts = attempts_on_bad(&outcome);
    assert!(attempts < 20, "{attempts} attempts on the slow node");
}

/// Runs the requests on two prefill nodes and this many decode nodes, with the fault four times.
/// Returns the 99th percentile of the time between two tokens of the streams that never were on the
/// node of host [`BAD`].
fn token_gap_of_others(decode: usize, fault: Option<Fault>) -> Duration {
    let mut nodes = vec![node(Role::Prefill, STEP); 2];
    nodes.extend(vec![node(Role::Decode, STEP); decode]);
    let selection = Selection {
        disaggregate: Disaggregate::Always,
        roles: Roles::Fixed,
        policy: NodePolicy::LeastLoad,
    };
    let requests = (0..REQUESTS).map(request).collect();
    let times = [5, 10, 15, 20].map(Duration::from_secs);
    let faults = fault.iter().flat_map(|fault| times.map(|at| (at, *fault))).collect();
    let scenario = Scenario {
        faults,
        ..Scenario::fault_free(selection, nodes, requests, Duration::from_micros(300))
    };
    let mut simulation = Simulation::new(1, scenario, false);
    simulation.run();
    simulation.check_idle();
    let outcome = simulation.outcome();
    let ends = ["complete", "complete after a retry"].map(|end| outcome.coverage.get(end));
    assert_eq!(ends.iter().sum::<u64>(), u64::from(REQUESTS));
    assert_eq!(ends[1] > 0, fault.is_some(), "the fault interrupts streams: {ends:?}");
    let picks = outcome.picks.iter();
    let on_bad: BTreeSet<usize> =
        picks.filter(|pick| pick.decode == BAD).map(|pick| pick.request).collect();
    let gaps = simulation.routers[0].decode_gaps.iter();
    let mut gaps: Vec<Duration> =
        gaps.filter(|(request, _)| !on_bad.contains(request)).map(|(_, gap)| *gap).collect();
    gaps.sort();
    gaps[(gaps.len() * 99).div_ceil(100) - 1]
}

#[test]
fn hung_or_killed_node_delays_no_token_of_other_streams() {
    let hung = Fault::Pause { host: BAD, duration: Duration::from_secs(4) };
    let killed =
        Fault::Kill { host: BAD, resets_connections: true, restart_after: Duration::from_secs(1) };
    let [usual, while_hung] = [None, Some(hung)].map(|fault| token_gap_of_others(3, fault));
    // The baseline of the kill is two decode nodes: their batches are as large as those of three
    // nodes of which one is dead.
    let (larger_batch, while_killed) =
        (token_gap_of_others(2, None), token_gap_of_others(3, Some(killed)));
    eprintln!(
        "time between two tokens, p99: {usual:?}, another node hung {while_hung:?}; larger batch \
         {larger_batch:?}, another node killed {while_killed:?}"
    );
    assert!(while_hung <= usual.mul_f64(1.05), "{usual:?} {while_hung:?}");
    assert!(while_killed <= larger_batch.mul_f64(1.05), "{larger_batch:?} {while_killed:?}");
}
