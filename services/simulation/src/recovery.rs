//! Pauses that clients see when a node is lost, in virtual time: the table of
//! docs/benchmarks/faults.md.

use std::time::Duration;

use cluster::{Role, Selection};
use config::{Disaggregate, NodePolicy, Roles};
use kv_transfer::config::LEASE;

use crate::{
    checks::BLOCKS_FREE_MAX,
    misbehaving::{STEP, node, request},
    run_scenario,
    scenario::{Fault, RequestPlan, Scenario},
};

/// Runs of each fault, at other moments.
const RUNS: u64 = 20;
const SECOND: Duration = Duration::from_secs(1);
/// Hosts 0 and 1 are prefill nodes, 2 and 3 decode nodes.
const PREFILL: usize = 0;
const DECODE: usize = 2;

/// Returns a scenario on two pairs: streams of 100 tokens, 10 ms apart, and one fault.
fn scenario(streams: u32, at: Duration, fault: Fault) -> Scenario {
    let stream = |index| RequestPlan {
        at: Duration::from_millis(10) * index,
        max_tokens: 100,
        ..request(index)
    };
    let selection = Selection {
        disaggregate: Disaggregate::Always,
        roles: Roles::Fixed,
        policy: NodePolicy::Predicted,
    };
    let nodes = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    let nodes = nodes.map(|role| node(role, STEP)).into();
    let requests = (0..streams).map(stream).collect();
    Scenario {
        release_delay_max: Duration::from_millis(60),
        faults: vec![(at, fault)],
        ..Scenario::fault_free(selection, nodes, requests, Duration::from_millis(1))
    }
}

/// When a fault occurs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    /// Prompts are handed over, so prefill nodes hold blocks for the decode nodes.
    HandOver,
    /// All streams decode.
    Decode,
}

/// Runs the fault at several moments and prints the pauses of all streams. Every token was
/// compared, and every request completed. Returns the 99th percentile and the longest pause.
fn pauses(what: &str, when: When, streams: u32, runs: u64, fault: Fault) -> [Duration; 2] {
    let (first_ms, span_ms) = match when {
        When::HandOver => (20, 200),
        When::Decode => (300, 1000),
    };
    let (mut pauses, mut release) = (Vec::new(), Duration::ZERO);
    for run in 0..runs {
        let at = Duration::from_millis(first_ms + span_ms * run / runs);
        let outcome = run_scenario(run, scenario(streams, at, fault), false);
        let ends = ["complete", "complete after a retry"].map(|end| outcome.coverage.get(end));
        assert_eq!(ends.iter().sum::<u64>(), u64::from(streams), "{what}");
        pauses.extend(outcome.pauses);
        release = release.max(outcome.longest_release);
    }
    let outlasts_lease = !matches!(fault, Fault::Partition { duration, .. } if duration < LEASE);
    let frees = when == When::HandOver && outlasts_lease;
    assert!(release > Duration::ZERO || !frees, "{what}: no transfer was interrupted");
    assert!(release <= BLOCKS_FREE_MAX, "{what}: {release:?}");
    pauses.sort();
    let at = |percent: usize| pauses[(pauses.len() * percent).div_ceil(100) - 1];
    let seconds = [50, 99, 100].map(|percent| at(percent).as_secs_f64());
    let [p50, p99, longest] = seconds;
    let release = if frees { format!("{:.2}", release.as_secs_f64()) } else { "–".to_owned() };
    eprintln!("| {what} | {streams} | {p50:.2} | {p99:.2} | {longest:.2} | {release} |");
    [at(99), at(100)]
}

#[test]
fn lost_nodes_and_cut_links_pause_streams_within_the_bounds() {
    let kill = |resets_connections| {
        let restart_after = 3 * SECOND;
        Fault::Kill { host: DECODE, resets_connections, restart_after }
    };
    let pause = |host, duration| Fault::Pause { host, duration };
    let cut = |duration| Fault::Partition { a: PREFILL, b: DECODE, duration };
    eprintln!(
        "| fault | streams | pause p50 (s) | p99 (s) | longest (s) | blocks free after (s) |"
    );
    eprintln!("| --- | --- | --- | --- | --- | --- |");
    for (streams, runs) in [(24, RUNS), (100, 3)] {
        let [p99, _] = pauses("D killed", When::Decode, streams, runs, kill(true));
        assert!(p99 <= Duration::from_millis(2500), "{p99:?}");
    }
    for (what, when, fault) in [
        ("host of D lost", When::Decode, kill(false)),
        ("D stopped, 1 s", When::Decode, pause(DECODE, SECOND)),
        ("D stopped, 5 s", When::Decode, pause(DECODE, 5 * SECOND)),
        ("D stopped, 5 s, in hand-over", When::HandOver, pause(DECODE, 5 * SECOND)),
        ("P stopped, 5 s", When::HandOver, pause(PREFILL, 5 * SECOND)),
        ("P – D cut, 1 s", When::HandOver, cut(SECOND)),
        ("P – D cut, 5 s", When::HandOver, cut(5 * SECOND)),
        ("P – D cut, 25 s", When::HandOver, cut(25 * SECOND)),
    ] {
        let [_, longest] = pauses(what, when, 24, RUNS, fault);
        // The lease or the time-out of a ping, the next ping, and the recomputation of the lost
        // streams.
        assert!(longest <= 3 * SECOND, "{what}: {longest:?}");
    }
}

#[test]
fn requests_complete_when_the_only_decode_node_is_back() {
    const STREAMS: u32 = 24;
    for run in 0..RUNS {
        let at = Duration::from_millis(300 + 25 * run);
        let kill = Fault::Kill { host: 1, resets_connections: true, restart_after: 3 * SECOND };
        let nodes = [Role::Prefill, Role::Decode].map(|role| node(role, STEP)).into();
        let scenario = Scenario { nodes, ..scenario(STREAMS, at, kill) };
        let coverage = run_scenario(run, scenario, false).coverage;
        let ends = ["complete", "complete after a retry"].map(|end| coverage.get(end));
        assert_eq!(ends.iter().sum::<u64>(), u64::from(STREAMS), "run {run}: {coverage}");
        assert!(ends[1] > 0, "run {run}: the kill interrupts no stream");
    }
}

#[test]
fn etcd_outage_of_ten_minutes_disturbs_no_request() {
    const REQUESTS: u32 = 320;
    let outage = Fault::EtcdOutage { duration: 600 * SECOND };
    // A decode node starts again while etcd is down.
    let kill = Fault::Kill { host: DECODE, resets_connections: true, restart_after: 3 * SECOND };
    let request = |index: u32| RequestPlan { at: 2 * SECOND * index, ..request(index) };
    let scenario = Scenario {
        has_etcd: true,
        requests: (0..REQUESTS).map(request).collect(),
        faults: vec![(10 * SECOND, outage), (300 * SECOND, kill)],
        ..scenario(0, Duration::ZERO, outage)
    };
    let coverage = run_scenario(1, scenario, false).coverage;
    assert_eq!((coverage.get("etcd outages"), coverage.get("kills")), (1, 1));
    let ends = ["complete", "complete after a retry"].map(|end| coverage.get(end));
    assert_eq!(ends.iter().sum::<u64>(), u64::from(REQUESTS), "{coverage}");
}
