//! The scenario of a seed: nodes, network, requests and faults.

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

use cluster::{NodeAddress, Role, Selection};
use config::{Disaggregate, NodePolicy, Roles};
use engine::{
    SchedulerConfig,
    executor::{ExecutorLimits, Speculation},
};
use grammar::Grammar;
use kernels::{BLOCK_TOKENS, KvGroups, sampling::Sampling};
use kv_transfer::TransferLimits;

use router_core::{Flow, FlowName, RequestSession, RouterLimits};
use simulation_base::{NetworkFaults, Random, mix};

use crate::{
    device::StepCost,
    grammars,
    tiers::TierPlan,
    updates::plan::{self, UpdatePlan},
};

pub(crate) const VOCABULARY: u32 = 40;
/// Bytes of a block: the KV of a position is one number.
pub(crate) const BLOCK_BYTES: usize = 8 * BLOCK_TOKENS;

/// Every input of a run.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub severity: Severity,
    pub network: NetworkFaults,
    /// Chance in percent that the blocks of a chunk cannot be read.
    pub read_failure: u64,
    /// Longest time until a transport releases the blocks of a cancelled transfer.
    pub release_delay_max: Duration,
    /// Longest delay between the threads of one process.
    pub thread_delay_max: Duration,
    /// Whether every token, every KV block and the invariants of each process are checked. A replay
    /// of many requests checks only the ends.
    pub is_checked: bool,
    /// Cost of data connections; `None`: only the delay of messages.
    pub links: Option<LinkCost>,
    pub router_count: usize,
    /// Whether nodes register in etcd; otherwise the routers have a static list.
    pub has_etcd: bool,
    /// How routers choose nodes.
    pub selection: Selection,
    /// Bounds on the requests of each router.
    pub limits: RouterLimits,
    pub models: Vec<ModelPlan>,
    pub nodes: Vec<NodePlan>,
    pub requests: Vec<RequestPlan>,
    pub faults: Vec<(Duration, Fault)>,
}

/// The faults that a scenario may contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Severity {
    /// At most one fault, which costs no request, and a network that loses few messages.
    Mild,
    /// Any fault that leaves the decode nodes alive and reachable by the router.
    PrefillOnly,
    /// Any fault, and small limits and timeouts.
    Severe,
}

impl Severity {
    /// Returns whether every request whose client stays must complete.
    pub(crate) fn must_complete(self) -> bool {
        self != Self::Severe
    }
}

#[derive(Clone, Debug)]
pub(crate) struct ModelPlan {
    pub name: Arc<str>,
    pub fingerprint: u128,
    /// Tensor parallel ranks of each node.
    pub tp: u32,
    pub kv_groups: KvGroups,
}

/// Cost model of the data connections between nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkCost {
    /// Time until a new connection can send.
    pub connect: Duration,
    /// Time until a chunk that was sent has arrived.
    pub latency: Duration,
    /// Bandwidth of each node, for all its connections together, in each direction.
    pub bytes_per_s: f64,
    /// Bytes of a KV block.
    pub block_bytes: u64,
}

/// Configuration of every process on one host.
#[derive(Clone, Debug)]
pub(crate) struct NodePlan {
    pub role: Role,
    /// Index of the model in [`Scenario::models`].
    pub model: usize,
    pub scheduler: SchedulerConfig,
    pub transfers: TransferLimits,
    /// Bound of the queue of transfer events to the engine thread.
    pub transfer_events_max: usize,
    pub step_cost: StepCost,
    pub tiers: Option<TierPlan>,
}

#[derive(Clone, Debug)]
pub(crate) struct RequestPlan {
    pub at: Duration,
    pub router: usize,
    pub model: usize,
    pub prompt: Vec<u32>,
    pub sampling: Sampling,
    pub max_tokens: u32,
    pub ignore_stop_tokens: bool,
    pub grammar: Option<Grammar>,
    pub cache_salt: String,
    pub timeout: Duration,
    /// Time from `at` until the client disconnects.
    pub leaves_after: Option<Duration>,
    /// A stop string is complete after this many tokens. Nodes do not know stop strings.
    pub stops_at: Option<u32>,
    /// After the token with this index, the client reads nothing for this time.
    pub stalls: Option<(u32, Duration)>,
    /// Name, weight and priority of the client's API key.
    pub key: Option<(&'static str, u32, u32)>,
}

impl RequestPlan {
    /// Returns a greedy request of an unnamed client that arrives at once and reads to the end.
    pub(crate) fn new(prompt: Vec<u32>, max_tokens: u32, timeout: Duration) -> Self {
        Self {
            at: Duration::ZERO,
            router: 0,
            model: 0,
            prompt,
            sampling: Sampling::greedy(),
            max_tokens,
            ignore_stop_tokens: true,
            grammar: None,
            cache_salt: String::new(),
            timeout,
            leaves_after: None,
            stops_at: None,
            stalls: None,
            key: None,
        }
    }

    /// Returns the client's hints about the conversation. Prompts with an equal beginning belong to
    /// one session.
    pub(crate) fn session(&self) -> RequestSession {
        let is_named = self.prompt.len().is_multiple_of(3);
        let name = self.prompt.first().filter(|_| is_named).map(u32::to_string);
        let keep_ms = self.prompt.len().is_multiple_of(4).then_some(self.max_tokens.into());
        RequestSession { name: name.unwrap_or_default().into(), keep_ms }
    }

    /// Returns the flow of the client.
    pub(crate) fn flow(&self) -> Flow {
        match self.key {
            Some((name, weight, priority)) => {
                Flow { name: FlowName::Key(name.into()), weight, priority }
            }
            None => Flow::new(FlowName::Shared),
        }
    }
}

/// Fault of a scenario. Hosts are indices of [`Scenario::nodes`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The process dies, and another one starts on the host. Peers and routers see a connection
    /// reset, or nothing.
    Kill {
        host: usize,
        resets_connections: bool,
        restart_after: Duration,
    },
    /// A rank process of a tensor parallel node dies: the node exits, and another one starts.
    LoseRank {
        host: usize,
    },
    /// Routers and nodes cannot reach etcd.
    EtcdOutage {
        duration: Duration,
    },
    /// The process is suspended (SIGSTOP) and resumed.
    Pause {
        host: usize,
        duration: Duration,
    },
    /// No message passes between two nodes.
    Partition {
        a: usize,
        b: usize,
        duration: Duration,
    },
    CloseDataConnections {
        a: usize,
        b: usize,
    },
    /// The outbound queue of one node to another overflows.
    OutboundQueueFull {
        from: usize,
        to: usize,
    },
    CloseRouterConnection {
        router: usize,
        host: usize,
    },
    /// The router dies with its requests, and another one starts.
    RestartRouter {
        router: usize,
    },
    /// An operator begins an update of the weights.
    UpdateWeights(UpdatePlan),
    /// SIGTERM: in-flight requests finish within `timeout`; then another process starts.
    Drain {
        host: usize,
        timeout: Duration,
        restart_after: Duration,
    },
}

impl Scenario {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let severity = match random.below(10) {
            0..=3 => Severity::Mild,
            4 | 5 => Severity::PrefillOnly,
            _ => Severity::Severe,
        };
        // Many requests at once for few blocks, or blocks for all.
        let is_crowded = random.chance(40);
        let (depth, sequence_tokens) = (random.within(1..=3), random.within(64..=200));
        let router_count = if random.chance(30) { 2 } else { 1 };
        let has_etcd = random.chance(40);
        let models = models(&mut random, seed);
        let mut nodes = Vec::new();
        for model in 0..models.len() {
            for role in Role::ALL {
                for _ in 0..random.within(1..=if model == 0 { 3 } else { 2 }) {
                    let blocks = match is_crowded {
                        true => random.within(6..=16),
                        false => random.within(14..=60),
                    };
                    let limits = NodeLimits { blocks, depth, sequence_tokens };
                    nodes.push(node(&mut random, severity, role, model, limits));
                }
            }
        }
        let request_count = random.within(1..=if is_crowded { 20 } else { 8 });
        let arrivals = random.millis(1..=if is_crowded { 300 } else { 3000 });
        let requests = (0..request_count)
            .map(|_| {
                let model = random.below(models.len() as u64) as usize;
                let router = random.below(router_count) as usize;
                let longest = longest_sequence(&nodes, model);
                let mut plan = request(&mut random, severity, longest);
                (plan.at, plan.router, plan.model) = (random.up_to(arrivals), router, model);
                plan
            })
            .collect();
        let is_mild = severity == Severity::Mild;
        let network = network(&mut random, is_mild);
        let read_failure = if is_mild { 0 } else { sometimes(&mut random, 4) };
        let release_delay_max = random.millis(0..=60);
        let thread_delay_max = random.pick(&[
            Duration::ZERO,
            Duration::from_micros(100),
            Duration::from_millis(2),
            Duration::from_millis(40),
        ]);
        let fault_count = random.below(if is_mild { 2 } else { 7 });
        let mut faults: Vec<_> = (0..fault_count)
            .map(|_| (random.millis(0..=5000), fault(&mut random, &nodes, &models, router_count)))
            .filter(|(_, fault)| match severity {
                Severity::Mild => is_survived(fault, &nodes),
                Severity::PrefillOnly => spares_decode_nodes(fault, &nodes),
                Severity::Severe => true,
            })
            .collect();
        let counts = (router_count, models.len() as u64);
        faults.extend(plan::of_seed(seed, severity, counts, fault_count));
        faults.sort_by_key(|&(at, _)| at);
        let selection = Selection {
            disaggregate: random.pick(&[
                Disaggregate::Auto,
                Disaggregate::Auto,
                Disaggregate::Always,
                Disaggregate::Never,
            ]),
            // Drawn apart, so that the seeds keep their other draws.
            roles: Random::new(!seed).pick(&[Roles::Fixed, Roles::Fluid]),
            policy: random.pick(&[
                NodePolicy::Predicted,
                NodePolicy::Predicted,
                NodePolicy::CacheAware,
                NodePolicy::LeastLoad,
                NodePolicy::RoundRobin,
            ]),
        };
        Self {
            severity,
            network,
            read_failure,
            release_delay_max,
            thread_delay_max,
            is_checked: true,
            links: None,
            router_count: router_count as usize,
            has_etcd,
            selection,
            limits: router_limits(seed, severity),
            models,
            nodes,
            requests,
            faults,
        }
    }
}

impl Scenario {
    /// Returns a scenario without faults: one router with a static list of nodes of one model, and
    /// messages that take up to `delay_max`.
    pub(crate) fn fault_free(
        selection: Selection,
        nodes: Vec<NodePlan>,
        requests: Vec<RequestPlan>,
        delay_max: Duration,
    ) -> Self {
        Self {
            severity: Severity::Mild,
            network: NetworkFaults::delays(delay_max),
            read_failure: 0,
            release_delay_max: Duration::ZERO,
            thread_delay_max: Duration::ZERO,
            is_checked: true,
            links: None,
            router_count: 1,
            has_etcd: false,
            selection,
            limits: RouterLimits::from(&config::Router::default()),
            models: vec![ModelPlan {
                name: "model-0".into(),
                fingerprint: 1,
                tp: 1,
                kv_groups: KvGroups::default(),
            }],
            nodes,
            requests,
            faults: Vec::new(),
        }
    }

    /// Returns the address of each host.
    pub(crate) fn addresses(&self) -> Vec<NodeAddress> {
        let address = |(host, node): (usize, &NodePlan)| NodeAddress {
            role: node.role,
            grpc: format!("http://host-{host}:3"),
        };
        self.nodes.iter().enumerate().map(address).collect()
    }
}

/// Returns small bounds for a part of the seeds whose requests need not complete. The random
/// numbers of the rest of the scenario do not depend on them.
fn router_limits(seed: u64, severity: Severity) -> RouterLimits {
    let mut random = Random::new(mix(seed));
    if severity.must_complete() || !random.chance(40) {
        return RouterLimits::from(&config::Router::default());
    }
    RouterLimits { requests_max: random.within(1..=12), waiting_max: random.within(1..=4) }
}

fn models(random: &mut Random, seed: u64) -> Vec<ModelPlan> {
    let count = if random.chance(25) { 2 } else { 1 };
    let model = |index: usize| ModelPlan {
        name: format!("model-{index}").into(),
        fingerprint: 0xfeed + index as u128,
        tp: if random.chance(25) { 2 } else { 1 },
        kv_groups: kv_groups(seed.rotate_left(32) ^ index as u64),
    };
    (0..count).map(model).collect()
}

/// Returns the KV groups of a model: for half of the seeds one group without a window, for a sixth
/// with a state. `seed` is for the groups alone, so that they do not change the other random
/// numbers of a scenario.
fn kv_groups(seed: u64) -> KvGroups {
    let mut random = Random::new(seed);
    let list = random.below(6);
    let mut window = || NonZeroUsize::new(random.within(2..=60) as usize);
    let windows = match list {
        0 => vec![window()],
        1 => vec![window(), None],
        2 => vec![window(), window(), None],
        _ => vec![None],
    };
    let state_entries = if list == 3 { random.within(1..=4) as usize } else { 0 };
    KvGroups::of_windows(&windows).with_state_entries(state_entries)
}

/// Returns whether every request completes despite the fault: another decode node is up, or the
/// node is back before requests stop waiting for it.
fn is_survived(fault: &Fault, nodes: &[NodePlan]) -> bool {
    let has_spare = |host: usize| {
        let NodePlan { role, model, .. } = nodes[host];
        let same = |node: &&NodePlan| (node.role, node.model) == (Role::Decode, model);
        role == Role::Prefill || nodes.iter().filter(same).count() > 1
    };
    match *fault {
        Fault::Kill { host, resets_connections, restart_after } => {
            has_spare(host) || resets_connections && restart_after < Duration::from_secs(1)
        }
        Fault::Pause { host, duration } => {
            has_spare(host) || duration < Duration::from_millis(1500)
        }
        Fault::Drain { host, .. } | Fault::LoseRank { host } => has_spare(host),
        Fault::Partition { .. }
        | Fault::CloseDataConnections { .. }
        | Fault::OutboundQueueFull { .. }
        | Fault::CloseRouterConnection { .. }
        | Fault::EtcdOutage { .. }
        | Fault::UpdateWeights(_)
        | Fault::RestartRouter { .. } => true,
    }
}

/// Returns whether the fault affects neither decode nodes nor the router's connections to decode
/// nodes.
fn spares_decode_nodes(fault: &Fault, nodes: &[NodePlan]) -> bool {
    match *fault {
        Fault::Kill { host, .. }
        | Fault::Pause { host, .. }
        | Fault::CloseRouterConnection { host, .. }
        | Fault::LoseRank { host }
        | Fault::Drain { host, .. } => nodes[host].role == Role::Prefill,
        Fault::UpdateWeights(_) => false,
        Fault::Partition { .. }
        | Fault::CloseDataConnections { .. }
        | Fault::OutboundQueueFull { .. }
        | Fault::EtcdOutage { .. }
        | Fault::RestartRouter { .. } => true,
    }
}

impl NodePlan {
    /// Returns the scheduler's limits with the plan's number of blocks for each KV group, and the
    /// blocks of a state. With a state no row has draft tokens.
    pub(crate) fn scheduler_of(&self, groups: &KvGroups) -> SchedulerConfig {
        let blocks = self.scheduler.limits.blocks * groups.count() as u32;
        let blocks = blocks + groups.state_entries() as u32;
        let speculation = self.scheduler.limits.speculation;
        let speculation = speculation.filter(|_| groups.state_entries() == 0);
        let limits = ExecutorLimits { blocks, speculation, ..self.scheduler.limits };
        SchedulerConfig { limits, ..self.scheduler }
    }

    /// Returns the length of the longest sequence that fits, in tokens.
    pub(crate) fn longest_sequence(&self) -> u32 {
        let limits = self.scheduler.limits;
        limits.sequence_tokens.min(limits.blocks * BLOCK_TOKENS as u32)
    }
}

/// Returns the longest sequence that fits every decode node of the model: the router rejects longer
/// ones.
fn longest_sequence(nodes: &[NodePlan], model: usize) -> u32 {
    let decode = |node: &&NodePlan| (node.role, node.model) == (Role::Decode, model);
    let decode = nodes.iter().filter(decode);
    decode.map(NodePlan::longest_sequence).min().expect("there is a decode node")
}

struct NodeLimits {
    blocks: u32,
    depth: u32,
    sequence_tokens: u32,
}

fn node(
    random: &mut Random,
    severity: Severity,
    role: Role,
    model: usize,
    limits: NodeLimits,
) -> NodePlan {
    let NodeLimits { blocks, depth, sequence_tokens } = limits;
    let slots = random.within(1..=6);
    let limits = ExecutorLimits {
        slots,
        step_tokens: slots.max(random.within(8..=64)),
        sequence_tokens,
        blocks,
        depth,
        vocabulary: VOCABULARY,
        speculation: speculation(slots, blocks),
    };
    let any_chunk = random.within(1..=40);
    let chunk_tokens = random.pick(&[u32::MAX, 16, any_chunk]);
    let mut scheduler = SchedulerConfig {
        chunk_tokens,
        prefix_cache: random.chance(90),
        ..SchedulerConfig::new(limits)
    };
    let mut transfers = TransferLimits {
        chunk_bytes_max: random.within(1..=4) as usize * BLOCK_BYTES,
        pair_idle: random.pick(&[Duration::from_secs(60), Duration::from_millis(200)]),
        ..TransferLimits::default()
    };
    let mut transfer_events_max = transfers.transfers_max;
    if severity == Severity::Severe && random.chance(20) {
        scheduler.waiting_max = random.within(1..=3);
        scheduler.transfers_max = random.within(1..=3);
        transfers.early_max = random.within(0..=2) as usize;
        transfers.transfers_max = random.within(1..=8) as usize;
        transfers.pairs_max = random.within(1..=3) as usize;
        transfers.commands_max = random.within(2..=6) as usize;
        transfers.tombstones_max = random.within(1..=4) as usize;
        transfer_events_max = random.within(1..=3) as usize;
    }
    let step = random.millis(1..=12);
    let token = Duration::from_micros(random.within(0..=500).into());
    let step_cost = StepCost { is_eager: random.chance(50), ..StepCost::linear(step, token) };
    let tiers = TierPlan::of(any_chunk).filter(|_| scheduler.prefix_cache);
    NodePlan { role, model, scheduler, transfers, transfer_events_max, step_cost, tiers }
}

/// Turns speculative decoding on for a third of the nodes.
fn speculation(slots: u32, blocks: u32) -> Option<Speculation> {
    (slots + blocks).is_multiple_of(3).then_some(Speculation {
        row_drafts: 1 + blocks % 8,
        step_tokens: 8 + blocks % 57,
        ngram_min: 2,
        ngram_max: 4,
        uniform: blocks.is_multiple_of(2),
    })
}

fn request(random: &mut Random, severity: Severity, longest: u32) -> RequestPlan {
    let prompt_len = match random.below(4) {
        0 => random.within(1..=20),
        _ => random.within(1..=longest - 2),
    }
    .min(longest - 2);
    let room = longest - prompt_len;
    let max_tokens = match random.below(8) {
        0 => 1,
        1 | 2 => room,
        _ => random.within(1..=30),
    }
    .min(room);
    // Prompts of a family share a prefix.
    let (family, tail) = (random.within(0..=3), random.within(0..=2));
    let prompt =
        (0..prompt_len).map(|index| prompt_token(family, tail, prompt_len, index)).collect();
    let grammar = random.chance(15).then(|| grammars::pick(random));
    let has_min_tokens = grammar.is_none() && random.chance(25);
    let sampling = Sampling {
        temperature: random.pick(&[0.0, 1.0]),
        seed: random.below(3),
        min_tokens: if has_min_tokens { random.within(0..=max_tokens.min(6)) } else { 0 },
        stop_token_ids: if random.chance(60) { vec![3, 4] } else { vec![] },
        ..Sampling::greedy()
    };
    let timeout = match severity.must_complete() {
        true => Duration::from_secs(120),
        false => random.millis(2_000..=25_000),
    };
    let has_short_timeout = severity == Severity::Severe && random.chance(10);
    RequestPlan {
        at: Duration::ZERO,
        router: 0,
        model: 0,
        prompt,
        sampling,
        max_tokens,
        ignore_stop_tokens: random.chance(20),
        grammar,
        cache_salt: if random.chance(10) { "tenant".to_owned() } else { String::new() },
        timeout: if has_short_timeout { random.millis(1..=400) } else { timeout },
        leaves_after: random
            .chance(if severity == Severity::Mild { 5 } else { 15 })
            .then(|| random.millis(0..=1500)),
        stops_at: random.chance(10).then(|| random.within(1..=10)),
        stalls: prompt_len
            .is_multiple_of(5)
            .then(|| (max_tokens / 3, Duration::from_millis(u64::from(prompt_len) * 7))),
        key: [None, Some(("a", 1, 0)), Some(("b", 4, 0)), Some(("c", 1, 1))]
            [prompt_len as usize % 4],
    }
}

/// Returns a prompt that differs from those of other indices.
#[cfg(test)]
pub(crate) fn prompt(tokens: u32, index: u32) -> Vec<u32> {
    (0..tokens).map(|position| (position * 7 + index) % VOCABULARY).collect()
}

/// Returns a token of a prompt. Prompts of a family differ only in their last tokens, which depend
/// on the tail.
fn prompt_token(family: u32, tail: u32, prompt_len: u32, index: u32) -> u32 {
    let own = if index + 5 >= prompt_len { tail * 17 } else { 0 };
    (family * 11 + index * 7 + index / 5 + own) % VOCABULARY
}

/// Returns 0 in half of all cases.
fn sometimes(random: &mut Random, end: u64) -> u64 {
    if random.chance(50) { random.below(end) } else { 0 }
}

fn network(random: &mut Random, is_mild: bool) -> NetworkFaults {
    let (loss, duplication) = (sometimes(random, 25), sometimes(random, 30));
    let corruption = sometimes(random, 8);
    let lateness = if random.chance(20) { random.below(20) } else { 0 };
    NetworkFaults {
        loss: if is_mild { loss.min(3) } else { loss },
        duplication,
        corruption: if is_mild { 0 } else { corruption },
        lateness: if is_mild { 0 } else { lateness },
        delay_min: Duration::ZERO,
        delay_max: random.pick(&[
            Duration::from_micros(300),
            Duration::from_millis(5),
            Duration::from_millis(100),
        ]),
    }
}

fn fault(
    random: &mut Random,
    nodes: &[NodePlan],
    models: &[ModelPlan],
    router_count: u64,
) -> Fault {
    let router = random.below(router_count) as usize;
    let host = random.below(nodes.len() as u64) as usize;
    let of_role = |role| {
        let of_role = |(_, node): &(usize, &NodePlan)| node.role == role;
        nodes.iter().enumerate().filter(of_role).map(|(host, _)| host).collect::<Vec<_>>()
    };
    let (prefill, decode) = (of_role(Role::Prefill), of_role(Role::Decode));
    let (mut a, mut b) = (random.pick(&prefill), random.pick(&decode));
    if random.chance(50) {
        std::mem::swap(&mut a, &mut b);
    }
    let is_short = random.chance(50);
    let restart_after = random.millis(20..=if is_short { 900 } else { 4000 });
    match random.below(20) {
        0..=3 => Fault::Kill { host, resets_connections: random.chance(60), restart_after },
        4 | 5 => {
            Fault::Pause { host, duration: random.millis(20..=if is_short { 1400 } else { 7000 }) }
        }
        6 | 7 => Fault::CloseDataConnections { a, b },
        8 | 9 => Fault::OutboundQueueFull { from: a, to: b },
        10 | 11 => Fault::CloseRouterConnection { router, host },
        12 | 13 => Fault::Partition { a, b, duration: random.millis(20..=6000) },
        14 => Fault::RestartRouter { router },
        15 | 16 => Fault::EtcdOutage { duration: random.millis(50..=6000) },
        17 if models[nodes[host].model].tp > 1 => Fault::LoseRank { host },
        _ => Fault::Drain { host, timeout: random.millis(0..=3000), restart_after },
    }
}
