//! A replay: recorded requests on a cluster of two pools, in virtual time.

use std::time::Duration;

use cluster::{Role, Selection};
use engine::{ItlLimit, SchedulerConfig, executor::ExecutorLimits};
use kv_transfer::TransferLimits;
use simulation_base::{NetworkFaults, Random};

use crate::{
    coverage::Coverage,
    device::StepCost,
    event_loop::Simulation,
    router::Router,
    scenario::{
        BLOCK_BYTES, Fault, LinkCost, NodePlan, RequestPlan, Scenario, Severity, VOCABULARY,
    },
    stats::{Histogram, ReplayStats, ServedRequest},
};

/// One-way delay of a message between two processes.
const MESSAGE_DELAY: Duration = Duration::from_micros(100);
/// Mean time between two faults.
const FAULT_INTERVAL: Duration = Duration::from_secs(30);
/// Default of `node.step_tokens` for an 8B model on a GPU, by role.
const PREFILL_STEP_TOKENS: u32 = 4096;
const DECODE_STEP_TOKENS: u32 = 1024;
/// Virtual time between two reports of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Every fault is repaired, and every resource is free, this long after the last request.
const SETTLE: Duration = Duration::from_secs(120);

/// Cluster of a replay.
#[derive(Clone, Debug)]
pub struct ReplayConfig {
    pub prefill: usize,
    pub decode: usize,
    pub selection: Selection,
    pub step_cost: StepCost,
    pub links: LinkCost,
    /// Blocks of a chunk of a transfer.
    pub chunk_blocks: usize,
    /// Rows of a node's batch.
    pub slots: u32,
    pub step_tokens: u32,
    /// Longest prompt with its answer.
    pub sequence_tokens: u32,
    /// KV blocks of each node.
    pub blocks: u32,
    /// Bound on the inter-token latency of a decode node that prefills.
    pub itl_max: Duration,
    /// Deadline of a request.
    pub timeout: Duration,
    /// Seed of step times and ids.
    pub seed: u64,
    /// Seed of the faults; `None`: no faults.
    pub faults: Option<u64>,
    /// Arrival of the last request: faults occur until then.
    pub duration: Duration,
}

/// A recorded request.
#[derive(Clone, Debug)]
pub struct TraceRequest {
    pub at: Duration,
    pub prompt: Vec<u32>,
    pub output_tokens: u32,
}

impl TraceRequest {
    /// Prompts have token ids below this number.
    pub const VOCABULARY: u32 = VOCABULARY;

    fn plan(self, timeout: Duration) -> RequestPlan {
        let request = RequestPlan::new(self.prompt, self.output_tokens, timeout);
        RequestPlan { at: self.at, ..request }
    }
}

/// Progress of a replay.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Virtual time.
    pub elapsed: Duration,
    pub arrived: usize,
}

/// Outcome of a replay.
#[derive(Clone, Debug)]
pub struct ReplayOutcome {
    /// Complete requests.
    pub requests: Vec<ServedRequest>,
    pub arrived: usize,
    pub failed: u64,
    pub inter_token: Histogram,
    /// Busy time of each prefill node's device, then of each decode node's.
    pub busy: Vec<Duration>,
    /// Virtual time from the first arrival to the end of the last request.
    pub elapsed: Duration,
    /// Wall-clock time in which the router handled its inputs, and the part that selected nodes.
    pub router_time: Duration,
    pub pick_time: Duration,
    pub attempts: u64,
    /// Bytes of the router's index of cached blocks, at the end and at most.
    pub index_bytes: usize,
    pub index_bytes_max: usize,
    pub events: u64,
    pub coverage: Coverage,
}

/// Replays the requests, which must be in the order of their arrival. Panics when an invariant does
/// not hold.
pub fn replay(
    config: &ReplayConfig,
    requests: impl Iterator<Item = TraceRequest> + Send + 'static,
    progress: impl FnMut(Progress),
) -> ReplayOutcome {
    replay_scenario(config, config.scenario(), requests, progress)
}

fn replay_scenario(
    config: &ReplayConfig,
    scenario: Scenario,
    requests: impl Iterator<Item = TraceRequest> + Send + 'static,
    mut progress: impl FnMut(Progress),
) -> ReplayOutcome {
    let mut simulation = Simulation::new(config.seed, scenario, false);
    for router in &mut simulation.routers {
        router.stats = Some(ReplayStats::default());
    }
    let timeout = config.timeout;
    simulation.arrivals = Box::new(requests.map(move |request| request.plan(timeout)));
    simulation.schedule_arrival();
    let mut index_bytes_max = 0;
    loop {
        let end = simulation.clock.now() + PROGRESS_INTERVAL;
        simulation.run_until(end);
        let elapsed = simulation.clock.elapsed();
        progress(Progress { elapsed, arrived: simulation.arrived_requests });
        index_bytes_max = index_bytes_max.max(index_bytes(&simulation));
        if simulation.has_no_arrivals && simulation.routers.iter().all(Router::all_ended) {
            break;
        }
    }
    let index_bytes = index_bytes(&simulation);
    let busy = busy(&simulation);
    simulation.run_until(simulation.clock.now() + SETTLE);
    simulation.check_idle();
    let coverage = simulation.outcome().coverage;
    let [router] = &mut simulation.routers[..] else { unreachable!("a replay has one router") };
    let stats = router.stats.take().unwrap_or_default();
    let elapsed = stats.first_arrival.zip(stats.last_end).map(|(first, last)| last - first);
    ReplayOutcome {
        arrived: simulation.arrived_requests,
        failed: stats.failed,
        requests: stats.requests,
        inter_token: stats.inter_token,
        busy,
        elapsed: elapsed.unwrap_or_default(),
        router_time: simulation.router_time,
        pick_time: stats.pick_time,
        attempts: coverage.get("attempts"),
        index_bytes,
        index_bytes_max,
        events: simulation.clock.scheduled(),
        coverage,
    }
}

fn index_bytes(simulation: &Simulation) -> usize {
    simulation.routers.iter().map(|router| router.cached_bytes()).sum()
}

fn busy(simulation: &Simulation) -> Vec<Duration> {
    let mut busy = vec![Duration::ZERO; simulation.hosts.len()];
    for process in &simulation.processes {
        busy[process.host] += process.device_busy();
    }
    busy
}

impl ReplayConfig {
    fn scenario(&self) -> Scenario {
        let roles = [(Role::Prefill, self.prefill), (Role::Decode, self.decode)];
        let nodes = roles.into_iter().flat_map(|(role, count)| vec![self.node(role); count]);
        let nodes = nodes.collect();
        Scenario {
            severity: Severity::Severe,
            network: NetworkFaults {
                delay_min: MESSAGE_DELAY,
                ..NetworkFaults::delays(MESSAGE_DELAY)
            },
            is_checked: false,
            links: Some(self.links),
            has_etcd: self.faults.is_some(),
            faults: self.faults.map(|seed| self.draw_faults(seed)).unwrap_or_default(),
            ..Scenario::fault_free(self.selection, nodes, Vec::new(), MESSAGE_DELAY)
        }
    }

    fn node(&self, role: Role) -> NodePlan {
        let step_tokens_max = match role {
            Role::Prefill => PREFILL_STEP_TOKENS,
            Role::Decode => DECODE_STEP_TOKENS,
        };
        let limits = ExecutorLimits {
            slots: self.slots,
            step_tokens: self.step_tokens.min(step_tokens_max.max(self.slots)),
            sequence_tokens: self.sequence_tokens,
            blocks: self.blocks,
            depth: 2,
            vocabulary: VOCABULARY,
            speculation: None,
        };
        let StepCost { prefill, decode, .. } = self.step_cost;
        let time = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        let itl = Some(ItlLimit {
            max: self.itl_max,
            decode: time(decode.step_ms + decode.row_ms),
            prefill: time(prefill.step_ms),
            token: time(prefill.token_ms),
            doubling_tokens: (prefill.token_ms / prefill.pair_ms).min(f64::from(u32::MAX)) as u32,
        });
        NodePlan {
            role,
            model: 0,
            scheduler: SchedulerConfig { itl, ..SchedulerConfig::new(limits) },
            transfers: TransferLimits {
                chunk_bytes_max: self.chunk_blocks * BLOCK_BYTES,
                ..Default::default()
            },
            transfer_events_max: 1024,
            step_cost: self.step_cost,
            tiers: None,
        }
    }

    /// Draws kills, partitions and etcd outages, one every 30 s on average.
    fn draw_faults(&self, seed: u64) -> Vec<(Duration, Fault)> {
        let mut random = Random::new(seed);
        let hosts = (self.prefill + self.decode) as u64;
        let count = self.duration.as_secs_f64() / FAULT_INTERVAL.as_secs_f64();
        let mut faults: Vec<_> = (0..count.ceil() as u64)
            .map(|_| {
                let at = random.up_to(self.duration);
                let fault = match random.below(10) {
                    0..=4 => Fault::Kill {
                        host: random.below(hosts) as usize,
                        resets_connections: random.chance(60),
                        restart_after: random.millis(1_000..=30_000),
                    },
                    5..=8 if self.prefill > 0 => Fault::Partition {
                        a: random.below(self.prefill as u64) as usize,
                        b: self.prefill + random.below(self.decode as u64) as usize,
                        duration: random.millis(1_000..=25_000),
                    },
                    _ => Fault::EtcdOutage { duration: random.millis(5_000..=60_000) },
                };
                (at, fault)
            })
            .collect();
        faults.sort_by_key(|(at, _)| *at);
        faults
    }
}

#[cfg(test)]
mod tests {
    use config::{Disaggregate, NodePolicy, Roles};

    use super::*;

    #[test]
    fn prefix_hits_of_a_retried_request_are_those_of_its_first_prefill() {
        let config = ReplayConfig {
            prefill: 1,
            decode: 1,
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
            duration: Duration::ZERO,
        };
        // The decode node dies while the request decodes.
        let kill = Fault::Kill {
            host: 1,
            resets_connections: true,
            restart_after: Duration::from_millis(900),
        };
        let faults = vec![(Duration::from_secs(1), kill)];
        let scenario = Scenario { faults, ..config.scenario() };
        let request = TraceRequest {
            at: Duration::ZERO,
            prompt: (0..1024).map(|position| position * 7 % VOCABULARY).collect(),
            output_tokens: 500,
        };
        let replayed = replay_scenario(&config, scenario, std::iter::once(request), |_| ());
        let [request] = &replayed.requests[..] else { panic!("{}", replayed.coverage) };
        assert!(request.attempts > 1 && request.ttft < Duration::from_secs(1), "{request:?}");
        // The prefill node has the whole prompt in its cache when the request comes again.
        assert_eq!(request.cached_tokens, 0, "{request:?}");
    }
}
