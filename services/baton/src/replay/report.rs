//! The results of a replay, as a table and as JSON.

use std::time::Duration;

use cluster::Role;
use config::NodePolicy;
use serde::Serialize;
use simulation::{ReplayOutcome, ServedRequest};

use crate::bench::{serve::GoodputLimits, stats::Percentiles};

/// Results of one policy.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PolicyPoint {
    pub policy: &'static str,
    pub rate_scale: f64,
    pub arrived: usize,
    pub completed: usize,
    pub failed: u64,
    pub retried: usize,
    /// Virtual time from the first arrival to the last token.
    pub elapsed_s: f64,
    pub ttft_ms: Percentiles,
    pub tpot_ms: Percentiles,
    pub itl_ms: Itl,
    /// Fraction of the requests within the limits, and these requests per second.
    pub goodput_share: Option<f64>,
    pub goodput_per_s: Option<f64>,
    /// Fraction of prompt tokens that the node that prefilled had cached.
    pub hit_rate: f64,
    /// Hit rate of one LRU cache with the KV blocks of all nodes, and of the prefill nodes; `None`
    /// without recorded prefixes.
    pub lru_hit_rate: Option<f64>,
    pub lru_prefill_hit_rate: Option<f64>,
    pub prefill_nodes: BusyFractions,
    pub decode_nodes: BusyFractions,
    pub router: RouterUse,
    pub wall_s: f64,
    /// CPU time of the simulation's thread.
    pub cpu_s: f64,
    pub events: u64,
    /// Resident memory of this process so far, at most.
    pub peak_rss_mib: f64,
}

/// Percentiles of the times between two tokens of a request.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Itl {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
}

/// Busy fractions of the devices of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct BusyFractions {
    pub nodes: usize,
    pub mean: f64,
    pub min: f64,
    pub max: f64,
    /// Standard deviation over the mean.
    pub variation: f64,
}

impl BusyFractions {
    fn of(busy: &[Duration], elapsed: Duration) -> Self {
        let shares: Vec<f64> =
            busy.iter().map(|busy| busy.as_secs_f64() / elapsed.as_secs_f64().max(1e-9)).collect();
        if shares.is_empty() {
            return Self::default();
        }
        let count = shares.len() as f64;
        let mean = shares.iter().sum::<f64>() / count;
        let variance = shares.iter().map(|share| (share - mean).powi(2)).sum::<f64>() / count;
        Self {
            nodes: shares.len(),
            mean,
            min: shares.iter().copied().fold(f64::INFINITY, f64::min),
            max: shares.iter().copied().fold(0.0, f64::max),
            variation: if mean > 0.0 { variance.sqrt() / mean } else { 0.0 },
        }
    }
}

/// CPU time and memory of the router's cores on this machine.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct RouterUse {
    /// CPU time of a request, without HTTP, gRPC, chat template and tokenizer.
    pub request_us: f64,
    /// CPU time of node selection for one attempt; part of `request_us`.
    pub pick_us: f64,
    /// CPU seconds in a virtual second.
    pub cores: f64,
    /// Index of cached blocks at the end, and at most.
    pub index_mib: f64,
    pub index_max_mib: f64,
}

/// Time that a simulation took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub wall: Duration,
    pub cpu: Duration,
}

impl PolicyPoint {
    pub(super) fn new(
        policy: NodePolicy,
        rate_scale: f64,
        replayed: &ReplayOutcome,
        prefill_nodes: usize,
        limits: Option<GoodputLimits>,
        cost: Cost,
    ) -> Self {
        let requests = &replayed.requests;
        let millis = |of: fn(&ServedRequest) -> Duration| {
            Percentiles::of(
                requests.iter().map(|request| of(request).as_secs_f64() * 1e3).collect(),
            )
        };
        let sum = |of: fn(&ServedRequest) -> u32| {
            requests.iter().map(|request| u64::from(of(request))).sum::<u64>() as f64
        };
        let good = limits.map(|limits| {
            let is_good = |request: &&ServedRequest| {
                let times = [request.ttft, request.time_per_token(), request.duration];
                let [ttft, tpot, end] = times.map(|time| time.as_secs_f64());
                limits.are_met(ttft, tpot, end)
            };
            requests.iter().filter(is_good).count() as f64
        });
        let elapsed_s = replayed.elapsed.as_secs_f64();
        let (prefill, decode) = replayed.busy.split_at(prefill_nodes);
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        // The times in the router are wall-clock times: other processes on the CPU lengthen them.
        let share = cost.cpu.as_secs_f64() / cost.wall.as_secs_f64().max(1e-9);
        let router_s = replayed.router_time.as_secs_f64() * share;
        let percentile = |percent| replayed.inter_token.percentile_ms(percent);
        Self {
            policy: policy.as_str(),
            rate_scale,
            arrived: replayed.arrived,
            completed: requests.len(),
            failed: replayed.failed,
            retried: requests.iter().filter(|request| request.attempts > 1).count(),
            elapsed_s,
            ttft_ms: millis(|request| request.ttft),
            tpot_ms: millis(ServedRequest::time_per_token),
            itl_ms: Itl { p50: percentile(50.0), p90: percentile(90.0), p99: percentile(99.0) },
            goodput_share: good.map(|good| good / replayed.arrived.max(1) as f64),
            goodput_per_s: good.map(|good| good / elapsed_s.max(1e-9)),
            hit_rate: sum(|request| request.cached_tokens)
                / sum(|request| request.prompt_tokens).max(1.0),
            lru_hit_rate: None,
            lru_prefill_hit_rate: None,
            prefill_nodes: BusyFractions::of(prefill, replayed.elapsed),
            decode_nodes: BusyFractions::of(decode, replayed.elapsed),
            router: RouterUse {
                request_us: router_s * 1e6 / replayed.arrived.max(1) as f64,
                pick_us: replayed.pick_time.as_secs_f64() * share * 1e6
                    / replayed.attempts.max(1) as f64,
                cores: router_s / elapsed_s.max(1e-9),
                index_mib: mib(replayed.index_bytes),
                index_max_mib: mib(replayed.index_bytes_max),
            },
            wall_s: cost.wall.as_secs_f64(),
            cpu_s: cost.cpu.as_secs_f64(),
            events: replayed.events,
            peak_rss_mib: peak_rss_mib(),
        }
    }

    /// Returns the hit rate over the hit rate of one LRU cache with all nodes' blocks.
    pub(super) fn share_of_lru(&self) -> Option<f64> {
        self.lru_hit_rate.filter(|lru| *lru > 0.0).map(|lru| self.hit_rate / lru)
    }

    pub(super) fn print(&self) {
        println!(
            "\npolicy {}, rate scale {}: {} of {} requests complete, {} failed, {} retried, in {:.0} s",
            self.policy,
            self.rate_scale,
            self.completed,
            self.arrived,
            self.failed,
            self.retried,
            self.elapsed_s
        );
        println!("{:<28} {:>10} {:>10} {:>10} {:>10}", "", "p50", "p90", "p99", "max");
        for (name, times) in [("TTFT, ms", &self.ttft_ms), ("TPOT of a request, ms", &self.tpot_ms)]
        {
            let Percentiles { p50, p90, p99, max, .. } = times;
            println!("{name:<28} {p50:>10.1} {p90:>10.1} {p99:>10.1} {max:>10.1}");
        }
        let Itl { p50, p90, p99 } = self.itl_ms;
        println!("{:<28} {p50:>10.1} {p90:>10.1} {p99:>10.1}", "inter-token latency, ms");
        if let (Some(share), Some(per_s)) = (self.goodput_share, self.goodput_per_s) {
            println!("goodput: {per_s:.2} requests/s, {:.1} % of all", share * 100.0);
        }
        print!("cache hit rate: {:.1} % of prompt tokens", self.hit_rate * 100.0);
        match (self.lru_hit_rate, self.share_of_lru(), self.lru_prefill_hit_rate) {
            (Some(all), Some(share), Some(prefill)) => println!(
                "; one LRU of all nodes' KV: {:.1} % (ratio {share:.3}), of the prefill nodes': {:.1} %",
                all * 100.0,
                prefill * 100.0
            ),
            _ => println!(),
        }
        for (role, balance) in
            [(Role::Prefill, &self.prefill_nodes), (Role::Decode, &self.decode_nodes)]
        {
            let BusyFractions { nodes, mean, min, max, variation } = balance;
            println!(
                "{nodes} {role} nodes busy: mean {:.1} %, min {:.1} %, max {:.1} %, variation {variation:.3}",
                mean * 100.0,
                min * 100.0,
                max * 100.0
            );
        }
        let RouterUse { request_us, pick_us, cores, index_mib, index_max_mib } = self.router;
        println!(
            "router cores: {request_us:.0} µs a request, {pick_us:.0} µs of them to select nodes, {cores:.3} CPUs; index \
             of cached blocks {index_mib:.0} MiB (max {index_max_mib:.0})"
        );
        println!(
            "simulated in {:.1} s ({:.1} s of CPU), {:.1} million events, peak memory of this process {:.0} MiB",
            self.wall_s,
            self.cpu_s,
            self.events as f64 / 1e6,
            self.peak_rss_mib
        );
    }
}

/// Prints the main statistics of several policies side by side.
pub(super) fn print_comparison(points: &[PolicyPoint]) {
    let [first, _, ..] = points else { return };
    println!("\nratios are to {}", first.policy);
    println!(
        "{:<14} {:>17} {:>17} {:>17} {:>17} {:>10} {:>8}",
        "", "TTFT p50, ms", "TTFT p90, ms", "TPOT p50, ms", "TPOT p99, ms", "hit rate", "÷ LRU"
    );
    let columns = |point: &PolicyPoint| {
        [point.ttft_ms.p50, point.ttft_ms.p90, point.tpot_ms.p50, point.tpot_ms.p99]
    };
    for point in points {
        let cells: String = columns(point)
            .iter()
            .zip(columns(first))
            .map(|(value, first)| format!(" {value:>10.1} {:>6.3}", value / first))
            .collect();
        let share = point.share_of_lru().map_or("-".into(), |share| format!("{share:.3}"));
        println!("{:<14}{cells} {:>10.3} {share:>8}", point.policy, point.hit_rate);
    }
}

/// Returns the largest resident memory of this process so far; 0 where the system does not report
/// it.
fn peak_rss_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balance_is_over_the_elapsed_time() {
        let busy = [1, 3].map(Duration::from_secs);
        let balance = BusyFractions::of(&busy, Duration::from_secs(4));
        let wanted = BusyFractions { nodes: 2, mean: 0.5, min: 0.25, max: 0.75, variation: 0.5 };
        assert_eq!(balance, wanted);
        assert_eq!(BusyFractions::of(&[], Duration::ZERO), BusyFractions::default());
    }
}
