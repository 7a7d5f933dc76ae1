//! Overload and fairness in virtual time, with the shipped router and nodes: goodput at several
//! times the capacity, and the time to first token of one API key while another key floods the
//! router.

use std::time::Duration;

use cluster::{Role, Selection};
use config::{Disaggregate, NodePolicy, Roles};
use engine::{SchedulerConfig, executor::ExecutorLimits};
use kv_transfer::TransferLimits;
use simulation_base::Random;

use crate::{
    device::StepCost,
    event_loop::Simulation,
    scenario::{BLOCK_BYTES, Fault, NodePlan, RequestPlan, Scenario, VOCABULARY, prompt},
};

const SLOTS: u32 = 16;
const PROMPT_TOKENS: u32 = 192;
const OUTPUT_TOKENS: u32 = 20;
/// Time of a step, and the time that each token adds.
const STEP: Duration = Duration::from_millis(30);
const TOKEN: Duration = Duration::from_micros(300);
const GOOD: (&str, u32, u32) = ("good", 1, 0);
const FLOOD: (&str, u32, u32) = ("flood", 1, 0);

fn node(role: Role) -> NodePlan {
    let limits = ExecutorLimits {
        slots: SLOTS,
        step_tokens: 256,
        sequence_tokens: 400,
        blocks: 500,
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
        tiers: None,
        step_cost: StepCost::linear(STEP, TOKEN),
    }
}

/// Returns requests of a key at random times, `per_second` on average.
fn load(
    seed: u64,
    key: (&'static str, u32, u32),
    per_second: f64,
    duration: Duration,
    timeout: Duration,
) -> Vec<RequestPlan> {
    let mut random = Random::new(seed);
    let mut at = Duration::ZERO;
    let mut requests = Vec::new();
    loop {
        let percent: u32 = random.within(1..=199);
        at += Duration::from_secs_f64(f64::from(percent) / 100.0 / per_second);
        if at >= duration {
            return requests;
        }
        let index = requests.len() as u32 + seed as u32;
        let request = RequestPlan::new(prompt(PROMPT_TOKENS, index), OUTPUT_TOKENS, timeout);
        requests.push(RequestPlan { at, key: Some(key), ..request });
    }
}

struct Run {
    complete: u64,
    refused: u64,
    late: u64,
    /// Times to first token of the requests with the key [`GOOD`], sorted.
    ttfts: Vec<Duration>,
}

impl Run {
    fn percentile(&self, percent: usize) -> Duration {
        self.ttfts[(self.ttfts.len() * percent / 100).min(self.ttfts.len() - 1)]
    }
}

/// Returns a scenario of `pairs` prefill and `pairs` decode nodes with these requests.
fn scenario(pairs: usize, requests: Vec<RequestPlan>) -> Scenario {
    let roles = [Role::Prefill, Role::Decode].into_iter().flat_map(|role| vec![role; pairs]);
    let selection = Selection {
        disaggregate: Disaggregate::Auto,
        roles: Roles::Fixed,
        policy: NodePolicy::Predicted,
    };
    let nodes = roles.map(node).collect();
    Scenario::fault_free(selection, nodes, requests, Duration::from_micros(300))
}

fn run(scenario: Scenario) -> Run {
    let is_good: Vec<bool> = scenario.requests.iter().map(|plan| plan.key == Some(GOOD)).collect();
    let mut simulation = Simulation::new(1, scenario, false);
    simulation.run();
    simulation.check_idle();
    let router = &simulation.routers[0];
    let first_tokens = router.first_tokens.iter().filter(|(request, _)| is_good[**request]);
    let mut ttfts: Vec<Duration> = first_tokens.map(|(_, ttft)| *ttft).collect();
    ttfts.sort();
    let count = |states: &[&str]| states.iter().map(|state| router.coverage.get(state)).sum();
    Run {
        complete: count(&["complete", "complete after a retry"]),
        refused: count(&["refused", "busy"]),
        late: count(&["deadline"]),
        ttfts,
    }
}

/// Returns the requests that the cluster completes in a second: 200 requests at once, without
/// deadlines.
fn capacity() -> f64 {
    let (count, at_once) = (200, Duration::from_millis(50));
    let requests = load(7, GOOD, f64::from(count) / 0.05, at_once, Duration::from_secs(1000));
    let count = requests.len() as f64;
    let run = run(scenario(1, requests));
    // Requests that cannot start within `router.waiting_timeout` are refused.
    assert!(run.complete as f64 > count / 2.0, "{} of {count}", run.complete);
    let last = run.ttfts.last().expect("requests completed");
    run.complete as f64 / last.as_secs_f64()
}

#[test]
fn goodput_at_three_times_the_capacity_is_the_goodput_at_capacity() {
    let (minutes_5, timeout) = (Duration::from_secs(300), Duration::from_secs(8));
    let capacity = capacity();
    let at = |factor: f64| run(scenario(1, load(3, FLOOD, factor * capacity, minutes_5, timeout)));
    let (at_capacity, over) = (at(1.0), at(3.0));
    let ratio = over.complete as f64 / at_capacity.complete as f64;
    eprintln!(
        "capacity {capacity:.1}/s; offered 1x: {} complete, {} refused, {} late; offered 3x: {} complete, {} refused, \
         {} late; goodput ratio {ratio:.3}",
        at_capacity.complete,
        at_capacity.refused,
        at_capacity.late,
        over.complete,
        over.refused,
        over.late
    );
    assert!(ratio >= 0.95, "{ratio}");
    assert!(over.late * 50 <= over.complete, "refused before they queue, not late");
}

/// The load is 1.8 times the capacity of a pair, and 2.5 times after 15 s. The cluster has one
/// pair, and three after 15 s.
#[test]
fn nothing_is_refused_while_a_cluster_grows_to_fit_its_load() {
    let (starts, timeout) = (Duration::from_secs(15), Duration::from_secs(120));
    let capacity = capacity();
    let mut requests = load(5, GOOD, 1.8 * capacity, starts, timeout);
    let more = load(6, GOOD, 2.5 * capacity, 4 * starts, timeout);
    requests.extend(more.into_iter().map(|plan| RequestPlan { at: plan.at + starts, ..plan }));
    let count = requests.len() as u64;
    let mut scenario = scenario(3, requests);
    let later = |host| {
        (Duration::ZERO, Fault::Kill { host, resets_connections: true, restart_after: starts })
    };
    scenario.faults.extend([1, 2, 4, 5].map(later));
    let run = run(scenario);
    assert_eq!((run.complete, run.refused, run.late), (count, 0, 0));
}

/// Small requests at 1.5 times the capacity take each KV block that becomes free. A request of the
/// same flow that needs most of the blocks starts all the same.
#[test]
fn large_request_starts_beside_a_flood_of_small_requests() {
    let timeout = Duration::from_secs(60);
    let mut requests = load(9, FLOOD, 6.0, timeout, timeout);
    let large = RequestPlan::new(prompt(380, 1_000_000), OUTPUT_TOKENS, timeout);
    requests.push(RequestPlan { at: Duration::from_secs(5), ..large });
    requests.iter_mut().for_each(|plan| plan.key = None);
    requests.sort_by_key(|plan| plan.at);
    let large = requests.iter().position(|plan| plan.prompt.len() == 380);
    let mut scenario = scenario(1, requests);
    for node in &mut scenario.nodes {
        node.scheduler.limits.blocks = 40;
    }
    let mut simulation = Simulation::new(1, scenario, false);
    simulation.run();
    let router = &simulation.routers[0];
    assert!(router.coverage.get("refused") + router.coverage.get("busy") > 0, "no overload");
    let ttft = router.first_tokens.get(&large.expect("it was added above"));
    eprintln!("TTFT of the large request {ttft:?}");
    assert!(ttft.is_some(), "the large request is refused");
}

/// Time of a step that prefills one prompt.
fn prompt_step() -> Duration {
    STEP + TOKEN * PROMPT_TOKENS
}

/// Returns the 99th percentile of the time to first token of these requests if prefill nodes always
/// run a step of another key's prompt, cannot interrupt the step, and then take these requests
/// first: no queue is fairer to them.
fn ideal_p99(pairs: usize, requests: &[RequestPlan]) -> Duration {
    let step = prompt_step();
    // When the running step of each node ends.
    let mut free_at: Vec<Duration> =
        (0..pairs as u32).map(|node| step * node / pairs as u32).collect();
    let mut ttfts: Vec<Duration> = requests
        .iter()
        .map(|request| {
            for free_at in &mut free_at {
                while *free_at < request.at {
                    *free_at += step;
                }
            }
            let first = free_at.iter_mut().min().expect("there is a node");
            *first += step;
            *first - request.at
        })
        .collect();
    ttfts.sort();
    ttfts[ttfts.len() * 99 / 100]
}

/// Prints the time to first token of a key at 80 % of its share, alone and beside a key that sends
/// 20 times its share.
#[test]
fn flood_of_one_key_lengthens_p99_ttft_of_another_key_by_a_step() {
    let timeout = Duration::from_secs(20);
    let share = capacity() / 2.0;
    for (pairs, seed, seconds) in [(1, 21, 80), (4, 11, 40)] {
        let (share, duration) = (share * pairs as f64, Duration::from_secs(seconds));
        let good = load(seed, GOOD, 0.8 * share, duration, timeout);
        let ideal = ideal_p99(pairs, &good);
        let alone = run(scenario(pairs, good.clone()));
        let mut both = good;
        both.extend(load(seed + 1, FLOOD, 20.0 * share, duration, timeout).into_iter().map(
            |plan| {
                // The nodes have measured their steps by then.
                RequestPlan { at: plan.at + Duration::from_secs(3), ..plan }
            },
        ));
        let flooded = run(scenario(pairs, both));
        assert_eq!(flooded.ttfts.len(), alone.ttfts.len(), "no request of the key is refused");
        let [alone, flooded] = [alone, flooded].map(|run| [50, 90, 99].map(|p| run.percentile(p)));
        let ratio = flooded[2].as_secs_f64() / alone[2].as_secs_f64();
        eprintln!(
            "{pairs} pairs, share {share:.1}/s: TTFT p50, p90, p99 alone {alone:?}, flooded {flooded:?}; p99 ratio \
             {ratio:.2}; ideal p99 {ideal:?}"
        );
        // Without fair queueing the flood would delay the key by the time-out of 20 s.
        assert!(ratio <= 1.5, "{ratio}");
        assert!(flooded[2] <= alone[2] + prompt_step(), "{flooded:?}");
        assert!(flooded[2].as_secs_f64() <= 1.3 * ideal.as_secs_f64(), "{flooded:?}");
    }
}
