//! What a seed means: the nodes, the weather, the requests, and what goes wrong when.

use std::time::Duration;

use cluster::Role;
use engine::{
    SchedulerConfig,
    executor::{ExecutorLimits, Speculation},
};
use kernels::{BLOCK_TOKENS, sampling::Sampling};
use kv_transfer::Limits;

use crate::{device::Pace, random::Random};

pub const VOCABULARY: u32 = 40;
/// Bytes of a block on the simulated wire: each of its positions is one number.
pub const BLOCK_BYTES: usize = 8 * BLOCK_TOKENS;

/// Everything that a run is made of.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub temper: Temper,
    pub weather: Weather,
    pub nodes: Vec<NodePlan>,
    pub requests: Vec<RequestPlan>,
    pub blows: Vec<(Duration, Blow)>,
}

/// How much may go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Temper {
    /// One blow at most, which the cluster survives, and a network that loses little.
    Mild,
    /// Anything, but decode nodes live and are reached.
    DecodeSpared,
    /// Anything may befall anyone, who may have little room and patience.
    Wild,
}

impl Temper {
    /// Every request whose client stays must complete.
    pub fn must_complete(self) -> bool {
        self != Self::Wild
    }
}

/// How the network misbehaves, in percent and time.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    pub loss: u64,
    pub duplication: u64,
    /// Of chunks: they arrive changed, or cannot be sent at all.
    pub damage: u64,
    pub failure: u64,
    /// Of notices: they come seconds late, when everything may be over.
    pub straggling: u64,
    pub delay_max: Duration,
    /// How long a transport takes to let go of a block.
    pub release_max: Duration,
    /// Between the threads of one process.
    pub hop_max: Duration,
}

/// One place where a node runs; whatever process stands there is made by this.
#[derive(Clone, Debug)]
pub struct NodePlan {
    pub role: Role,
    pub scheduler: SchedulerConfig,
    pub transfers: Limits,
    pub pace: Pace,
}

#[derive(Clone, Debug)]
pub struct RequestPlan {
    pub at: Duration,
    pub prompt: Vec<u32>,
    pub sampling: Sampling,
    pub max_tokens: u32,
    pub ignore_stop_tokens: bool,
    pub cache_salt: String,
    pub timeout: Duration,
    /// When the client goes away, counted from `at`.
    pub leaves_after: Option<Duration>,
    /// A stop string is complete with this many tokens: only the router knows.
    pub stops_at: Option<u32>,
}

/// Places are numbers into [`Scenario::nodes`].
#[derive(Clone, Copy, Debug)]
pub enum Blow {
    /// The process dies, and another one starts in its place. Peers and router find their
    /// connections reset, or just silent.
    Kill { place: usize, is_heard: bool, back_after: Duration },
    /// The process is stopped, and goes on as if nothing had happened.
    Freeze { place: usize, for_: Duration },
    /// Nothing passes between two nodes.
    Cut { a: usize, b: usize, for_: Duration },
    /// The data connections between two nodes end.
    BreakData { a: usize, b: usize },
    /// The outbound queue of one node to another is full.
    QueueFull { from: usize, to: usize },
    /// The router's connection to a node ends.
    BreakCalls { place: usize },
    /// The router dies, its clients with it, and another one starts.
    RestartRouter,
    /// SIGTERM: what is in work ends, at most for `patience`; then another process starts.
    Drain { place: usize, patience: Duration, back_after: Duration },
}

impl Scenario {
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let temper = match random.below(10) {
            0..=3 => Temper::Mild,
            4 | 5 => Temper::DecodeSpared,
            _ => Temper::Wild,
        };
        // Many requests at once for few blocks, or room for all.
        let is_crowded = random.chance(40);
        let (depth, sequence_tokens) = (random.within(1..=3), random.within(64..=200));
        let mut nodes = Vec::new();
        for role in Role::ALL {
            for _ in 0..random.within(1..=3) {
                let blocks = match is_crowded {
                    true => random.within(6..=16),
                    false => random.within(14..=60),
                };
                nodes.push(node(&mut random, temper, role, blocks, depth, sequence_tokens));
            }
        }
        let longest = longest_sequence(&nodes);
        let request_count = random.within(1..=if is_crowded { 20 } else { 8 });
        let rush = random.millis(1..=if is_crowded { 300 } else { 3000 });
        let requests =
            (0..request_count).map(|_| request(&mut random, temper, longest, rush)).collect();
        let weather = weather(&mut random, temper);
        let blow_count = random.below(if temper == Temper::Mild { 2 } else { 7 });
        let mut blows: Vec<_> = (0..blow_count)
            .map(|_| (random.millis(0..=5000), blow(&mut random, &nodes)))
            .filter(|(_, blow)| match temper {
                Temper::Mild => is_survived(blow, &nodes),
                Temper::DecodeSpared => spares_decode_nodes(blow, &nodes),
                Temper::Wild => true,
            })
            .collect();
        blows.sort_by_key(|&(at, _)| at);
        Self { temper, weather, nodes, requests, blows }
    }
}

/// Whether every request completes in spite of it: there is another decode node, or the one is back
/// before requests stop waiting for it.
fn is_survived(blow: &Blow, nodes: &[NodePlan]) -> bool {
    let has_spare = |place: usize| {
        nodes[place].role == Role::Prefill
            || nodes.iter().filter(|node| node.role == Role::Decode).count() > 1
    };
    match *blow {
        Blow::Kill { place, is_heard, back_after } => {
            has_spare(place) || is_heard && back_after < Duration::from_secs(1)
        }
        Blow::Freeze { place, for_ } => has_spare(place) || for_ < Duration::from_millis(1500),
        Blow::Drain { place, .. } => has_spare(place),
        Blow::Cut { .. }
        | Blow::BreakData { .. }
        | Blow::QueueFull { .. }
        | Blow::BreakCalls { .. }
        | Blow::RestartRouter => true,
    }
}

/// Whether decode nodes and the way to them stay as they are.
fn spares_decode_nodes(blow: &Blow, nodes: &[NodePlan]) -> bool {
    match *blow {
        Blow::Kill { place, .. }
        | Blow::Freeze { place, .. }
        | Blow::BreakCalls { place }
        | Blow::Drain { place, .. } => nodes[place].role == Role::Prefill,
        Blow::Cut { .. }
        | Blow::BreakData { .. }
        | Blow::QueueFull { .. }
        | Blow::RestartRouter => true,
    }
}

impl NodePlan {
    /// In tokens.
    pub fn longest_sequence(&self) -> u32 {
        let limits = self.scheduler.limits;
        limits.sequence_tokens.min(limits.blocks * BLOCK_TOKENS as u32)
    }
}

/// The longest sequence that every decode node takes: the router refuses longer ones.
fn longest_sequence(nodes: &[NodePlan]) -> u32 {
    let decode = nodes.iter().filter(|node| node.role == Role::Decode);
    decode.map(NodePlan::longest_sequence).min().expect("there is a decode node")
}

fn node(
    random: &mut Random,
    temper: Temper,
    role: Role,
    blocks: u32,
    depth: u32,
    sequence_tokens: u32,
) -> NodePlan {
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
    let mut transfers = Limits {
        chunk_bytes_max: random.within(1..=4) as usize * BLOCK_BYTES,
        pair_idle: random.pick(&[Duration::from_secs(60), Duration::from_millis(200)]),
        ..Limits::default()
    };
    if temper == Temper::Wild && random.chance(20) {
        scheduler.waiting_max = random.within(1..=3);
        scheduler.transfers_max = random.within(1..=3);
        transfers.early_max = random.within(0..=2) as usize;
        transfers.transfers_max = random.within(1..=8) as usize;
        transfers.pairs_max = random.within(1..=3) as usize;
        transfers.commands_max = random.within(2..=6) as usize;
        transfers.tombstones_max = random.within(1..=4) as usize;
    }
    let pace = Pace {
        step: random.millis(1..=12),
        token: Duration::from_micros(random.within(0..=500).into()),
        is_eager: random.chance(50),
    };
    NodePlan { role, scheduler, transfers, pace }
}

/// Some nodes guess ahead, prefill and decode nodes alike. Not drawn: a seed's story stays what it was.
fn speculation(slots: u32, blocks: u32) -> Option<Speculation> {
    (slots + blocks).is_multiple_of(3).then_some(Speculation {
        row_drafts: 1 + blocks % 8,
        step_tokens: 8 + blocks % 57,
        ngram_min: 2,
        ngram_max: 4,
    })
}

fn request(random: &mut Random, temper: Temper, longest: u32, rush: Duration) -> RequestPlan {
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
    // Families share prefixes.
    let (family, tail) = (random.within(0..=3), random.within(0..=2));
    let prompt =
        (0..prompt_len).map(|index| prompt_token(family, tail, prompt_len, index)).collect();
    let sampling = Sampling {
        temperature: random.pick(&[0.0, 1.0]),
        seed: random.below(3),
        min_tokens: if random.chance(25) { random.within(0..=max_tokens.min(6)) } else { 0 },
        stop_token_ids: if random.chance(60) { vec![3, 4] } else { vec![] },
        ..Sampling::greedy()
    };
    let patience = match temper.must_complete() {
        true => Duration::from_secs(120),
        false => random.millis(2_000..=25_000),
    };
    let is_hurried = temper == Temper::Wild && random.chance(10);
    RequestPlan {
        at: random.up_to(rush),
        prompt,
        sampling,
        max_tokens,
        ignore_stop_tokens: random.chance(20),
        cache_salt: if random.chance(10) { "tenant".to_owned() } else { String::new() },
        timeout: if is_hurried { random.millis(1..=400) } else { patience },
        leaves_after: random
            .chance(if temper == Temper::Mild { 5 } else { 15 })
            .then(|| random.millis(0..=1500)),
        stops_at: random.chance(10).then(|| random.within(1..=10)),
    }
}

/// Equal families have equal tokens up to the last few, which are the tail's own.
fn prompt_token(family: u32, tail: u32, prompt_len: u32, index: u32) -> u32 {
    let own = if index + 5 >= prompt_len { tail * 17 } else { 0 };
    (family * 11 + index * 7 + index / 5 + own) % VOCABULARY
}

fn weather(random: &mut Random, temper: Temper) -> Weather {
    let is_mild = temper == Temper::Mild;
    let mut sometimes = |most: u64| match random.chance(50) {
        true => random.below(most),
        false => 0,
    };
    let (loss, duplication) = (sometimes(25), sometimes(30));
    let (damage, failure) = (sometimes(8), sometimes(4));
    let straggling = if random.chance(20) { random.below(20) } else { 0 };
    Weather {
        loss: if is_mild { loss.min(3) } else { loss },
        duplication,
        damage: if is_mild { 0 } else { damage },
        failure: if is_mild { 0 } else { failure },
        straggling: if is_mild { 0 } else { straggling },
        delay_max: random.pick(&[
            Duration::from_micros(300),
            Duration::from_millis(5),
            Duration::from_millis(100),
        ]),
        release_max: random.millis(0..=60),
        hop_max: random.pick(&[
            Duration::ZERO,
            Duration::from_micros(100),
            Duration::from_millis(2),
            Duration::from_millis(40),
        ]),
    }
}

fn blow(random: &mut Random, nodes: &[NodePlan]) -> Blow {
    let place = random.below(nodes.len() as u64) as usize;
    let of_role = |role| {
        let of_role = |(_, node): &(usize, &NodePlan)| node.role == role;
        nodes.iter().enumerate().filter(of_role).map(|(place, _)| place).collect::<Vec<_>>()
    };
    let (prefill, decode) = (of_role(Role::Prefill), of_role(Role::Decode));
    let (mut a, mut b) = (random.pick(&prefill), random.pick(&decode));
    if random.chance(50) {
        std::mem::swap(&mut a, &mut b);
    }
    let is_short = random.chance(50);
    let back_after = random.millis(20..=if is_short { 900 } else { 4000 });
    match random.below(17) {
        0..=3 => Blow::Kill { place, is_heard: random.chance(60), back_after },
        4 | 5 => {
            Blow::Freeze { place, for_: random.millis(20..=if is_short { 1400 } else { 7000 }) }
        }
        6 | 7 => Blow::BreakData { a, b },
        8 | 9 => Blow::QueueFull { from: a, to: b },
        10 | 11 => Blow::BreakCalls { place },
        12 | 13 => Blow::Cut { a, b, for_: random.millis(20..=6000) },
        14 => Blow::RestartRouter,
        _ => Blow::Drain { place, patience: random.millis(0..=3000), back_after },
    }
}
