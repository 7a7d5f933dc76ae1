//! Properties of node selection by predictions, with the shipped router and nodes in virtual time.

use std::{collections::BTreeMap, time::Duration};

use cluster::{Role, Selection};
use config::{Disaggregate, NodePolicy, Roles};
use engine::{ItlLimit, SchedulerConfig, executor::ExecutorLimits};
use kv_transfer::TransferLimits;
use simulation_base::Random;

use crate::{
    device::StepCost,
    event_loop::Simulation,
    router::Pick,
    scenario::{BLOCK_BYTES, NodePlan, RequestPlan, Scenario, VOCABULARY, prompt},
};

const STEP: Duration = Duration::from_millis(8);
const TOKEN: Duration = Duration::from_micros(100);
/// Steps of a prefill node: a prompt of 256 tokens takes two steps of 20.8 ms.
const CHUNK_TOKENS: u32 = 128;
const AUTO: Selection = Selection {
    disaggregate: Disaggregate::Auto,
    roles: Roles::Fixed,
    policy: NodePolicy::Predicted,
};

fn node(role: Role, itl_max: Option<Duration>) -> NodePlan {
    let limits = ExecutorLimits {
        slots: 32,
        step_tokens: CHUNK_TOKENS,
        sequence_tokens: 700,
        blocks: 1400,
        depth: 2,
        vocabulary: VOCABULARY,
        speculation: None,
    };
    let itl = itl_max.map(|max| ItlLimit {
        max,
        decode: STEP + TOKEN,
        prefill: STEP,
        token: TOKEN,
        doubling_tokens: u32::MAX,
    });
    NodePlan {
        role,
        model: 0,
        scheduler: SchedulerConfig { prefix_cache: false, itl, ..SchedulerConfig::new(limits) },
        transfers: TransferLimits { chunk_bytes_max: 8 * BLOCK_BYTES, ..Default::default() },
        transfer_events_max: 1024,
        step_cost: StepCost::linear(STEP, TOKEN),
        tiers: None,
    }
}

fn request(index: u32, at: Duration, prompt_tokens: u32, max_tokens: u32) -> RequestPlan {
    let prompt = prompt(prompt_tokens, index);
    RequestPlan { at, ..RequestPlan::new(prompt, max_tokens, Duration::from_secs(100)) }
}

/// Returns the attempts of all requests on `pairs` prefill and decode nodes, and the longest time
/// between two tokens of a decode node.
fn run(
    seed: u64,
    selection: Selection,
    pairs: usize,
    itl_max: Option<Duration>,
    requests: Vec<RequestPlan>,
) -> (Vec<Pick>, Duration) {
    let nodes = [Role::Prefill, Role::Decode].into_iter().flat_map(|role| vec![role; pairs]);
    let count = requests.len();
    let nodes = nodes.map(|role| node(role, itl_max)).collect();
    let scenario = Scenario::fault_free(selection, nodes, requests, Duration::from_micros(300));
    let mut simulation = Simulation::new(seed, scenario, false);
    simulation.run();
    simulation.check_idle();
    let outcome = simulation.outcome();
    assert_eq!(outcome.coverage.get("complete"), count as u64, "every request completes");
    assert_eq!(outcome.picks.len(), count, "no attempt fails");
    (outcome.picks, outcome.longest_decode_gap)
}

/// Returns arrivals at random times with this mean distance.
fn arrivals(
    seed: u64,
    count: u32,
    mean: Duration,
) -> impl Iterator<Item = (u32, Duration, Random)> {
    let mut random = Random::new(seed);
    let mut at = Duration::ZERO;
    (0..count).map(move |index| {
        let percent = random.within(1..=199);
        at += mean * percent / 100;
        (index, at, random.fork())
    })
}

fn ttfts(picks: &[Pick]) -> Vec<Duration> {
    let ttfts = picks.iter().map(|pick| pick.ttft.expect("every request completes"));
    let mut ttfts: Vec<_> = ttfts.collect();
    ttfts.sort();
    ttfts
}

fn local(picks: &[Pick]) -> usize {
    picks.iter().filter(|pick| pick.prefill.is_none()).count()
}

#[test]
fn idle_prefill_node_prefills_every_prompt() {
    let spaced = (0..60).map(|index| {
        let at = Duration::from_millis(700) * index;
        request(index, at, 40 + 8 * index, 20)
    });
    let (picks, _) = run(1, AUTO, 1, None, spaced.collect());
    assert_eq!(local(&picks), 0);
    assert!(picks.iter().filter(|pick| pick.predicted.is_some()).count() > 50);
}

#[test]
fn short_prompts_behind_long_ones_are_prefilled_on_the_decode_node() {
    let mut requests: Vec<_> =
        (0..30).map(|index| request(index, Duration::from_millis(300) * index, 200, 20)).collect();
    // A long prompt occupies the prefill node for 104 ms; a short one follows.
    for index in 0..10 {
        let at = Duration::from_secs(12) + Duration::from_secs(4) * index;
        requests.push(request(100 + index, at, 640, 4));
        requests.push(request(200 + index, at + Duration::from_millis(20), 48, 4));
    }
    let selection = |disaggregate| Selection { disaggregate, ..AUTO };
    let short = |picks: &[Pick]| -> Vec<Pick> {
        let short = |pick: &&Pick| requests[pick.request].prompt.len() == 48;
        picks.iter().filter(short).cloned().collect()
    };
    let (auto, _) = run(2, AUTO, 1, None, requests.clone());
    assert_eq!(local(&auto[..30]), 0, "nothing is queued");
    assert!(local(&short(&auto)) >= 9, "{:?}", short(&auto));
    let (always, _) = run(2, selection(Disaggregate::Always), 1, None, requests.clone());
    assert_eq!(local(&always), 0);
    let (never, _) = run(2, selection(Disaggregate::Never), 1, None, requests.clone());
    assert_eq!(local(&never), never.len());
    let median = |picks: &[Pick]| ttfts(&short(picks))[5];
    assert!(median(&auto) * 3 < median(&always), "{:?} {:?}", median(&auto), median(&always));
}

#[test]
fn two_equal_pairs_share_a_steady_load() {
    for seed in 0..4 {
        for mean in [60, 25] {
            let steady = arrivals(seed, 400, Duration::from_millis(mean));
            let requests = steady.map(|(index, at, _)| request(index, at, 256, 24)).collect();
            let (picks, _) = run(seed, AUTO, 2, None, requests);
            let mut counts: BTreeMap<usize, u32> = BTreeMap::new();
            for pick in &picks {
                *counts.entry(pick.decode).or_insert(0) += 1;
                *counts.entry(pick.prefill.unwrap_or(pick.decode + 10)).or_insert(0) += 1;
            }
            let decode = (counts[&2], counts[&3]);
            assert!(decode.0.abs_diff(decode.1) < 80, "seed {seed}, mean {mean} ms: {counts:?}");
            let prefill = (counts[&0], counts[&1]);
            assert!(prefill.0.abs_diff(prefill.1) < 80, "seed {seed}, mean {mean} ms: {counts:?}");
            // Herding (many consecutive requests to one node) would leave the other node idle for a
            // while.
            let longest_run = picks.chunk_by(|a, b| a.decode == b.decode).map(<[_]>::len).max();
            assert!(longest_run <= Some(12), "seed {seed}, mean {mean} ms: {longest_run:?}");
        }
    }
}

#[test]
fn auto_is_at_least_as_fast_as_the_better_fixed_split_and_nobody_starves() {
    // Utilization of one prefill node: 45, 75 and 105 %.
    for mean in [93, 56, 40] {
        let requests: Vec<_> = arrivals(3, 300, Duration::from_millis(mean))
            .map(|(index, at, mut random)| {
                let tokens = random.pick(&[64, 128, 256, 256, 512]);
                request(index, at, tokens, 24)
            })
            .collect();
        let times = |selection| {
            let ttfts = ttfts(&run(3, selection, 1, None, requests.clone()).0);
            [150, 270, 299].map(|index| ttfts[index])
        };
        let fixed = |disaggregate| times(Selection { disaggregate, ..AUTO });
        let (always, never) = (fixed(Disaggregate::Always), fixed(Disaggregate::Never));
        let (auto, fluid) = (times(AUTO), times(Selection { roles: Roles::Fluid, ..AUTO }));
        eprintln!(
            "mean {mean} ms: p50, p90, max: fluid {fluid:?}, auto {auto:?}, always {always:?}, \
             never {never:?}"
        );
        let better = |index: usize| always[index].min(never[index]);
        assert!(auto[0] <= better(0).mul_f64(1.05), "{auto:?} {always:?} {never:?}");
        assert!(auto[1] <= better(1).mul_f64(1.10), "{auto:?} {always:?} {never:?}");
        assert!(auto[2] <= better(2).mul_f64(1.25), "{auto:?} {always:?} {never:?}");
        // Fluid nodes accept a longer time to first token for shorter decode steps.
        assert!(fluid[1] <= never[1], "{fluid:?} {never:?}");
        assert!(fluid[2] <= better(2).mul_f64(1.25), "{fluid:?} {always:?} {never:?}");
    }
}

#[test]
fn predictions_are_close() {
    let requests = arrivals(5, 300, Duration::from_millis(60))
        .map(|(index, at, mut random)| request(index, at, random.pick(&[64, 128, 256, 512]), 24))
        .collect();
    let (picks, _) = run(5, AUTO, 1, None, requests);
    let error = |pick: &Pick| {
        let took = pick.ttft?.as_secs_f64();
        Some((pick.predicted?.as_secs_f64() - took).abs() / took)
    };
    let mut errors: Vec<_> = picks.iter().skip(30).filter_map(error).collect();
    errors.sort_by(f64::total_cmp);
    let at = |percent: usize| errors[errors.len() * percent / 100];
    eprintln!(
        "relative error of {} predictions: p50 {:.3}, p90 {:.3}",
        errors.len(),
        at(50),
        at(90)
    );
    assert!(errors.len() > 250 && at(50) <= 0.05 && at(90) <= 0.15);
}

#[test]
fn local_prefill_keeps_running_streams_within_the_inter_token_latency_bound() {
    let requests: Vec<_> = arrivals(4, 250, Duration::from_millis(17))
        .map(|(index, at, _)| request(index, at, 128, 24))
        .collect();
    let itl_max = Duration::from_millis(14);
    let (picks, bounded) = run(4, AUTO, 1, Some(itl_max), requests.clone());
    assert!(local(&picks) > 5, "{}", local(&picks));
    // The scheduler takes the time of decode rows from the previous step; the network delays tokens
    // too.
    assert!(bounded <= itl_max.mul_f64(1.1), "{bounded:?}");
    let never = Selection { disaggregate: Disaggregate::Never, ..AUTO };
    let (_, unbounded) = run(4, never, 1, None, requests.into_iter().step_by(4).collect());
    assert!(unbounded > bounded, "the prompts of this load need the bound: {unbounded:?}");
}
