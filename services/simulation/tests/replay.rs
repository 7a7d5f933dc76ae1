//! Replays of a few requests on small clusters.

use std::time::Duration;

use cluster::Selection;
use config::{Disaggregate, NodePolicy, Roles};
use simulation::{LinkCost, ReplayConfig, ReplayOutcome, StepCost, TraceRequest, replay};

fn config(prefill: usize, decode: usize) -> ReplayConfig {
    ReplayConfig {
        prefill,
        decode,
        selection: Selection {
            disaggregate: Disaggregate::Always,
            roles: Roles::Fixed,
            policy: NodePolicy::Predicted,
        },
        step_cost: StepCost::linear(Duration::from_millis(4), Duration::from_micros(20)),
        links: LinkCost {
            connect: Duration::from_millis(10),
            latency: Duration::from_micros(200),
            bytes_per_s: 10e9,
            block_bytes: 1 << 20,
        },
        chunk_blocks: 16,
        slots: 32,
        step_tokens: 2048,
        sequence_tokens: 8192,
        blocks: 4096,
        itl_max: Duration::from_millis(20),
        timeout: Duration::from_secs(60),
        seed: 1,
        faults: None,
        duration: Duration::from_secs(30),
    }
}

/// Returns requests every 100 ms with 1,024 prompt tokens, half of which the prompts of a family
/// share.
fn requests(count: u32) -> impl Iterator<Item = TraceRequest> + Send + 'static {
    (0..count).map(|index| TraceRequest {
        at: Duration::from_millis(100) * index,
        prompt: (0..1024).map(|position| token(index, position)).collect(),
        output_tokens: 10 + index % 7,
    })
}

fn token(index: u32, position: u32) -> u32 {
    let own = if position < 512 { index % 4 } else { index + 9 };
    let mixed = (own * 4096 + position).wrapping_mul(0x9e37_79b9);
    (mixed ^ mixed >> 15) % TraceRequest::VOCABULARY
}

fn run(config: &ReplayConfig, count: u32) -> ReplayOutcome {
    run_requests(config, requests(count), count)
}

fn run_requests(
    config: &ReplayConfig,
    requests: impl Iterator<Item = TraceRequest> + Send + 'static,
    count: u32,
) -> ReplayOutcome {
    let mut arrived = 0;
    let replayed = replay(config, requests, |progress| arrived = progress.arrived);
    assert_eq!(arrived, count as usize);
    assert_eq!(replayed.requests.len() as u64 + replayed.failed, u64::from(count));
    replayed
}

#[test]
fn requests_complete_with_the_tokens_and_prefix_hits_of_the_trace() {
    let replayed = run(&config(2, 2), 100);
    assert_eq!(replayed.failed, 0);
    let mut requests = replayed.requests;
    requests.sort_by_key(|request| request.request);
    for (index, request) in (0..).zip(&requests) {
        assert_eq!((request.prompt_tokens, request.output_tokens), (1024, 10 + index % 7));
        assert!([0, 512].contains(&request.cached_tokens), "{request:?}");
        // The first prompts of a family find nothing, on either node.
        assert!(index < 24 || request.cached_tokens == 512, "{request:?}");
        assert!(request.ttft > Duration::from_millis(4) && request.duration > request.ttft);
        assert!(request.longest_gap < Duration::from_millis(60), "{request:?}");
    }
    let cached: u32 = requests.iter().map(|request| request.cached_tokens).sum();
    assert!((80 * 512..=96 * 512).contains(&cached), "{cached}");
    assert!(replayed.busy.iter().all(|busy| *busy > Duration::from_millis(100)));
    // The last request arrives 9.9 s after the first one.
    let after_last = replayed.elapsed - Duration::from_millis(9900);
    assert!((requests[99].duration..Duration::from_millis(500)).contains(&after_last));
    assert!(replayed.index_bytes > 0 && replayed.router_time >= replayed.pick_time);
}

#[test]
fn slower_links_lengthen_the_gap_of_the_hand_over_only() {
    let gap = |bytes_per_s| {
        let mut config = config(1, 1);
        config.links.bytes_per_s = bytes_per_s;
        let replayed = run(&config, 20);
        let longest = replayed.requests.iter().map(|request| request.longest_gap).min().unwrap();
        let ttft = replayed.requests.iter().map(|request| request.ttft).min().unwrap();
        (longest, ttft)
    };
    // 32 uncached blocks of 1 MiB take 34 ms at 1 GB/s.
    let ((fast_gap, fast_ttft), (slow_gap, slow_ttft)) = (gap(10e9), gap(1e9));
    assert!(slow_gap > fast_gap + Duration::from_millis(15), "{slow_gap:?} {fast_gap:?}");
    assert!(slow_ttft < fast_ttft + Duration::from_millis(5), "{slow_ttft:?} {fast_ttft:?}");
}

#[test]
fn equal_seeds_give_equal_replays() {
    let times = |seed| {
        let mut config = ReplayConfig { seed, ..config(2, 2) };
        config.step_cost.deviation = 0.1;
        let replayed = run(&config, 50);
        let times = replayed.requests.iter().map(|request| (request.request, request.duration));
        (times.collect::<Vec<_>>(), replayed.events)
    };
    assert_eq!(times(1), times(1));
    assert_ne!(times(1), times(2));
}

#[test]
fn every_request_ends_once_under_faults() {
    let mut retried = 0;
    // These seeds kill a prefill node and three decode nodes, cut a pair and stop etcd.
    for seed in 0..6 {
        let config = ReplayConfig { faults: Some(seed), ..config(3, 3) };
        // Long answers: at any time some requests decode.
        let requests = requests(300).map(|request| TraceRequest { output_tokens: 120, ..request });
        let replayed = run_requests(&config, requests, 300);
        let faults = ["kills", "partitions", "etcd outages"];
        let faults: u64 = faults.iter().map(|fault| replayed.coverage.get(fault)).sum();
        assert!(faults > 0, "seed {seed}");
        assert_eq!(replayed.failed, 0, "seed {seed}: {}", replayed.coverage);
        retried += replayed.requests.iter().filter(|request| request.attempts > 1).count();
    }
    assert!(retried > 0, "no fault hit a request");
}
