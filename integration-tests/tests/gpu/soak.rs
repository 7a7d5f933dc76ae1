//! All at once, for as long as is wished: two ranks that sum without a pause, and KV from each of their
//! GPUs to the other by every carrier, of which either side gives some up. Nothing stops for long, every
//! sum is right, and all KV that arrives is what was sent.

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use half::bf16;
use kernels::{
    BlockId, Dtype,
    cuda::{
        AllReduceAlgorithm, AllReduceShape, Compute, DeviceMemory, Graph, Group, Range, Stream,
    },
    sampling::SampledToken,
};
use kv_transfer::{
    TransferKind,
    api::{self, Epoch, Event, PeerAddress, TransferId},
};
use serde_json::{Value, json};

use super::{
    bench::{numbers, short},
    collective,
    nodes::{self, CARRIERS, Manner, Node},
    ranks::{Rank, on_ranks_for},
};

const SECONDS: &str = "BATON_TEST_SOAK_SECONDS";
/// Whatever makes no progress for so long has stopped.
const STOPPED: Duration = Duration::from_secs(10);
/// Of a transfer; nothing waits for it where all is well.
const PATIENCE: Duration = Duration::from_secs(8);
/// Beyond the time given: until one transfer of each carrier has arrived. Then it has failed.
const FIRST_WITHIN: Duration = Duration::from_secs(30);
/// How long a transfer that is under way at the end may take.
const GRACE: Duration = Duration::from_millis(500);
/// Transfers under way at a time, of one carrier in one direction.
const LANES: u32 = 3;
const LANE_BLOCKS: u32 = nodes::BLOCKS / LANES;
const SUM_BYTES: usize = 1 << 20;
const RANKS: usize = 2;

fn seconds() -> u64 {
    env::var(SECONDS).map_or(if short() { 2 } else { 5 }, |seconds| {
        seconds.parse().unwrap_or_else(|_| panic!("{SECONDS} = {seconds}: no count of seconds"))
    })
}

/// Numbers that come as if by chance, alike wherever the seed is.
struct Chance(u64);

impl Chance {
    fn of(words: &[u64]) -> Self {
        let mix = |seed: u64, word: &u64| {
            let mixed = (seed ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed ^ mixed >> 29
        };
        Self(words.iter().fold(0x5eed, mix))
    }

    fn below(&mut self, count: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % count
    }
}

/// What shows that something goes on.
struct Heart {
    name: String,
    start: Instant,
    beats: AtomicU64,
    /// What went well among them, where it may not.
    whole: AtomicU64,
    /// In microseconds since the start.
    last: AtomicU64,
    longest: AtomicU64,
}

impl Heart {
    fn new(name: impl Into<String>) -> Arc<Self> {
        let [beats, whole, last, longest] = [(); 4].map(|()| AtomicU64::new(0));
        Arc::new(Self { name: name.into(), start: Instant::now(), beats, whole, last, longest })
    }

    fn beat(&self) {
        let now = self.start.elapsed().as_micros() as u64;
        let gap = now - self.last.swap(now, Ordering::Relaxed);
        // What comes before the first is the start.
        if self.beats.fetch_add(1, Ordering::Relaxed) > 0 {
            self.longest.fetch_max(gap, Ordering::Relaxed);
        }
    }

    fn silent(&self) -> Duration {
        let last = Duration::from_micros(self.last.load(Ordering::Relaxed));
        self.start.elapsed().saturating_sub(last)
    }
}

/// Ends the process, and with it the test, once one of them has stopped.
fn watch(hearts: Vec<Arc<Heart>>, is_over: Arc<AtomicBool>) {
    thread::spawn(move || {
        while !is_over.load(Ordering::Relaxed) {
            if let Some(heart) = hearts.iter().find(|heart| heart.silent() > STOPPED) {
                let beats = heart.beats.load(Ordering::Relaxed);
                println!("{} made no progress for {STOPPED:?}, after {beats}", heart.name);
                // Whatever it is that hangs, nothing of it is waited for.
                std::process::abort();
            }
            thread::sleep(Duration::from_millis(100));
        }
    });
}

/// One transfer, as both sides know it without a word.
struct Plan {
    blocks: Vec<BlockId>,
    places: Vec<BlockId>,
    /// The side that gives it up after such a part of a usual transfer's time; both may be too late.
    receiver_ends: Option<f64>,
    sender_ends: Option<f64>,
}

impl Plan {
    fn of(way: u64, lane: u32, number: u64) -> Self {
        let mut chance = Chance::of(&[way, lane.into(), number]);
        let count = [1, 3, LANE_BLOCKS / 2, LANE_BLOCKS][chance.below(4) as usize];
        let (seed, turn) = (chance.below(1000), chance.below(LANE_BLOCKS.into()) as u32);
        let place = |index: u32| BlockId(lane * LANE_BLOCKS + (index * 5 + turn) % LANE_BLOCKS);
        let (who, part) = (chance.below(6), chance.below(1500) as f64 / 1000.0);
        Self {
            blocks: nodes::scattered(seed, count),
            places: (0..count).map(place).collect(),
            receiver_ends: (who == 0).then_some(part),
            sender_ends: (who == 1).then_some(part),
        }
    }

    fn is_given_up(&self) -> bool {
        self.receiver_ends.is_some() || self.sender_ends.is_some()
    }
}

/// A transfer at one of its sides.
struct Lane {
    number: u64,
    plan: Plan,
    begun: Instant,
    abort_at: Option<Instant>,
    /// And no other follows.
    is_ended: bool,
}

/// All transfers of one carrier in one direction, at one of their sides.
struct Side<'a> {
    /// Tells directions and carriers apart.
    way: u64,
    node: &'a Node,
    peer: PeerAddress,
    is_sender: bool,
    lanes: Vec<Lane>,
    /// How long a whole transfer takes, in seconds.
    usual: f64,
    goes_on: bool,
}

#[derive(Default)]
struct Counts {
    whole: u64,
    given_up: u64,
    bytes: u64,
}

impl<'a> Side<'a> {
    fn new(way: u64, node: &'a Node, peer: PeerAddress, is_sender: bool) -> Self {
        let (lanes, usual, goes_on) = (Vec::new(), 0.002, true);
        let mut side = Self { way, node, peer, is_sender, lanes, usual, goes_on };
        for lane in 0..LANES {
            let next = side.begin(lane, 0);
            side.lanes.push(next);
        }
        side
    }

    fn id(lane: u32, number: u64) -> TransferId {
        TransferId(u128::from(lane) << 64 | u128::from(number))
    }

    fn begin(&self, lane: u32, number: u64) -> Lane {
        let plan = Plan::of(self.way, lane, number);
        let (transfer, peer) = (Self::id(lane, number), self.peer.clone());
        let (prompt_hash, deadline, traceparent) = (1, PATIENCE, String::new());
        let command = if self.is_sender {
            api::Command::Expect { transfer, peer, prompt_hash, deadline, traceparent }
        } else {
            let (first_block, blocks) = (0, plan.places.clone());
            api::Command::Receive {
                transfer,
                peer,
                prompt_hash,
                first_block,
                blocks,
                deadline,
                traceparent,
            }
        };
        self.node.transfers.command(command).unwrap();
        let ends = if self.is_sender { plan.sender_ends } else { plan.receiver_ends };
        let begun = Instant::now();
        let abort_at = ends.map(|part| begun + Duration::from_secs_f64(part * self.usual));
        Lane { number, plan, begun, abort_at, is_ended: false }
    }

    /// Until it is over; what is under way then ends first.
    fn run(mut self, events: &Receiver<Event>, heart: &Heart, is_over: &AtomicBool) -> Counts {
        let mut counts = Counts::default();
        let mut over_at = None;
        while self.lanes.iter().any(|lane| !lane.is_ended) {
            let now = Instant::now();
            let mut wait = Duration::from_millis(20);
            if over_at.is_none() && is_over.load(Ordering::Relaxed) {
                over_at = Some(now);
                self.goes_on = false;
                // The other side may have ended before it began what this one has begun.
                for lane in self.lanes.iter_mut().filter(|lane| !lane.is_ended) {
                    lane.abort_at = Some(now + GRACE);
                }
            }
            assert!(over_at.is_none_or(|at| at.elapsed() < 2 * PATIENCE), "transfers end");
            for lane in 0..LANES {
                let one = &mut self.lanes[lane as usize];
                if one.abort_at.is_some_and(|at| at <= now) {
                    one.abort_at = None;
                    self.node.abort(Self::id(lane, one.number));
                } else if let Some(at) = one.abort_at {
                    wait = wait.min(at - now);
                }
            }
            match events.recv_timeout(wait) {
                Ok(event) => self.heard(event, &mut counts, heart),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => panic!("no more events"),
            }
        }
        counts
    }

    fn heard(&mut self, event: Event, counts: &mut Counts, heart: &Heart) {
        let lane_of = |transfer: TransferId| ((transfer.0 >> 64) as u32, transfer.0 as u64);
        let (transfer, outcome) = match event {
            Event::Ready { transfer, .. } => {
                let (lane, number) = lane_of(transfer);
                let one = &self.lanes[lane as usize];
                assert_eq!(one.number, number, "lane {lane}");
                let blocks = one.plan.blocks.clone();
                let written = api::Command::Written { transfer, first_block: 0, blocks };
                self.node.transfers.command(written).unwrap();
                let token = SampledToken { id: 1, logprobs: None };
                let finish = api::Command::Finish { transfer, first_index: 0, token };
                return self.node.transfers.command(finish).unwrap();
            }
            Event::Delivered { transfer, stats } | Event::Arrived { transfer, stats, .. } => {
                (transfer, Ok(stats.bytes))
            }
            Event::SendFailed { transfer, failure }
            | Event::ReceiveFailed { transfer, failure } => (transfer, Err(failure)),
        };
        let (lane, number) = lane_of(transfer);
        let one = &self.lanes[lane as usize];
        assert_eq!(one.number, number, "lane {lane}");
        match outcome {
            Ok(bytes) => {
                counts.whole += 1;
                heart.whole.fetch_add(1, Ordering::Relaxed);
                counts.bytes += bytes;
                self.usual += (one.begun.elapsed().as_secs_f64() - self.usual) / 16.0;
                // All of it was hashed at both sides.
                if !self.is_sender && number.is_multiple_of(4) {
                    self.node.assert_holds(&one.plan.blocks, &one.plan.places);
                }
            }
            Err(failure) => {
                let side = if self.is_sender { "sender" } else { "receiver" };
                // At the end either side gives up what the other has not begun.
                assert!(
                    one.plan.is_given_up() || !self.goes_on,
                    "nobody gave up {lane}/{number}, {side}: {failure}"
                );
                counts.given_up += 1;
            }
        }
        heart.beat();
        if self.goes_on {
            self.lanes[lane as usize] = self.begin(lane, number + 1);
        } else {
            self.lanes[lane as usize].is_ended = true;
        }
    }
}

/// What sums are made with.
struct Summed {
    _group: Group,
    _memory: [Range; 2],
    count: u64,
    /// Before so many of them this rank was late.
    late: u64,
}

/// Sums of random shape, each looked at, until rank 0 has had its time and `is_enough`.
fn sums(rank: &Rank, time: Duration, heart: &Heart, is_enough: impl Fn() -> bool) -> Summed {
    const ELEMENTS: usize = SUM_BYTES / 2;
    let group = collective::group(rank, STOPPED);
    let stream: Stream<Compute> = Stream::new(&rank.context).unwrap();
    let memory = || DeviceMemory::new(&rank.context, "a test", SUM_BYTES).unwrap();
    let [x, out] = [(); 2].map(|()| memory().cut(SUM_BYTES).unwrap());
    let pools: Vec<Vec<f32>> =
        (0..RANKS as u32).map(|rank| numbers(70 + rank, 2 * ELEMENTS)).collect();
    let narrow: Vec<bf16> = pools[rank.rank].iter().copied().map(bf16::from_f32).collect();
    let (mut found, mut found_narrow) = (vec![0.0f32; ELEMENTS], vec![bf16::ZERO; ELEMENTS]);
    let mut own = Chance::of(&[9, rank.rank as u64]);
    let (begun, mut late) = (Instant::now(), 0);
    for number in 0_u64.. {
        // All ranks stop after the same sum.
        if number.is_multiple_of(512) {
            let so_far = begun.elapsed();
            let goes_on = so_far < time || so_far < time + FIRST_WITHIN && !is_enough();
            if rank.exchange(&[u8::from(goes_on)])[0] == [0] {
                group.check().unwrap();
                // Memory is given back once nothing moves any more: the driver waits for everything then,
                // and so would kernels that wait for those of the other rank.
                return Summed { _group: group, _memory: [x, out], count: number, late };
            }
        }
        let mut chance = Chance::of(&[3, number]);
        let dtype = [Dtype::F32, Dtype::Bf16][chance.below(2) as usize];
        // As many small ones as large ones.
        let elements = (8 << chance.below(15)) as u64;
        let elements = (elements + chance.below(elements)).min((SUM_BYTES / dtype.bytes()) as u64);
        let width = 8 * (1 + chance.below((elements / 8).min(2048))) as usize;
        let rows = (elements as usize / width).max(1);
        let shape = AllReduceShape { dtype, rows, width };
        let count = rows * width;
        let way = [
            AllReduceAlgorithm::Auto,
            AllReduceAlgorithm::Auto,
            AllReduceAlgorithm::OneShot,
            AllReduceAlgorithm::TwoShot,
        ];
        let way = way[chance.below(4) as usize];
        let is_recorded = chance.below(32) == 0;
        let at: Vec<usize> = (0..RANKS).map(|_| chance.below(ELEMENTS as u64) as usize).collect();
        let mine = at[rank.rank]..at[rank.rank] + count;
        match dtype {
            Dtype::F32 => x.write(0, &pools[rank.rank][mine]).unwrap(),
            Dtype::Bf16 => x.write(0, &narrow[mine]).unwrap(),
        }
        if own.below(1000) == 0 {
            late += 1;
            let longest = if own.below(20) == 0 { 50_000 } else { 3_000 };
            thread::sleep(Duration::from_micros(own.below(longest)));
        }
        if is_recorded {
            let sum = || group.all_reduce(shape, &x, &out, way, true, &stream);
            let mut graph = Graph::capture(&stream, || sum().and_then(|()| sum())).unwrap();
            graph.launch(&stream).unwrap();
        } else {
            group.all_reduce(shape, &x, &out, way, false, &stream).unwrap();
        }
        stream.synchronize().unwrap();
        group.check().unwrap();
        let (one, other) = (&pools[0][at[0]..at[0] + count], &pools[1][at[1]..at[1] + count]);
        let sums = one.iter().zip(other).map(|(one, other)| one + other);
        let wrong = match dtype {
            Dtype::F32 => {
                out.read(0, &mut found[..count]).unwrap();
                found.iter().zip(sums).position(|(found, sum)| *found != sum)
            }
            Dtype::Bf16 => {
                out.read(0, &mut found_narrow[..count]).unwrap();
                let sums = sums.map(bf16::from_f32);
                found_narrow.iter().zip(sums).position(|(found, sum)| *found != sum)
            }
        };
        if let Some(wrong) = wrong {
            let (a, b) = (one[wrong], other[wrong]);
            let found = match dtype {
                Dtype::F32 => found[wrong],
                Dtype::Bf16 => found_narrow[wrong].to_f32(),
            };
            panic!(
                "sum {number}: {dtype} {rows} x {width} {way:?}, recorded: {is_recorded}: element \
                 {wrong} is {found}, not {a} + {b}"
            );
        }
        heart.beat();
    }
    unreachable!("there are more numbers than time")
}

/// What others need to reach a node.
fn told(address: &PeerAddress) -> Value {
    json!([address.node_id, address.epoch.to_string(), address.control_endpoint])
}

fn heard(told: &Value) -> PeerAddress {
    let word = |index: usize| told[index].as_str().unwrap().to_owned();
    PeerAddress {
        node_id: word(0),
        epoch: Epoch(u128::from_str_radix(&word(1), 16).unwrap()),
        control_endpoint: word(2),
    }
}

fn soak(rank: Rank) {
    let time = Duration::from_secs(seconds());
    let is_over = Arc::new(AtomicBool::new(false));
    // Of each carrier one that sends and one that receives.
    let node = |(carrier, is_sender): (TransferKind, bool)| {
        let (sink, events) = channel();
        let name = format!("{carrier}-{}-{}", if is_sender { "from" } else { "to" }, rank.rank);
        let node = Node::start_as(&name, rank.rank, carrier, Manner::Verifying, sink);
        if is_sender {
            node.fill(nodes::pattern);
        }
        (name, node, events)
    };
    let sides: Vec<(TransferKind, bool)> =
        CARRIERS.into_iter().flat_map(|carrier| [(carrier, true), (carrier, false)]).collect();
    let nodes: Vec<(String, Node, Receiver<Event>)> = sides.iter().copied().map(node).collect();
    let all: Value = nodes.iter().map(|(_, node, _)| told(&node.address)).collect();
    let said = rank.exchange(all.to_string().as_bytes());
    let others: Value = serde_json::from_slice(&said[1 - rank.rank]).unwrap();
    let summing = Heart::new(format!("rank {}: sums", rank.rank));
    let hearts: Vec<Arc<Heart>> = nodes.iter().map(|(name, ..)| Heart::new(name)).collect();
    let watched = hearts.iter().chain([&summing]).cloned().collect();
    watch(watched, Arc::clone(&is_over));
    let (summed, counts) = thread::scope(|scope| {
        let run = |(index, (_, node, events)): (usize, (String, Node, Receiver<Event>))| {
            let (carrier, is_sender) = sides[index];
            // Whoever sends reaches the other's receiver of the same carrier.
            let peer = heard(&others[index ^ 1]);
            let from = if is_sender { rank.rank } else { 1 - rank.rank };
            let way = CARRIERS.iter().position(|one| *one == carrier).unwrap() * RANKS + from;
            let (heart, is_over) = (Arc::clone(&hearts[index]), Arc::clone(&is_over));
            scope.spawn(move || {
                let side = Side::new(way as u64, &node, peer, is_sender);
                let counts = side.run(&events, &heart, &is_over);
                (node, events, counts)
            })
        };
        let threads: Vec<_> = nodes.into_iter().enumerate().map(run).collect();
        let has_any = |heart: &Arc<Heart>| heart.whole.load(Ordering::Relaxed) > 0;
        let summed = sums(&rank, time, &summing, || hearts.iter().all(has_any));
        is_over.store(true, Ordering::Relaxed);
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        // No node leaves while another still hears it.
        rank.meet();
        (summed, ended.into_iter().map(|(.., counts)| counts).collect::<Vec<_>>())
    });
    let longest = |hearts: &[Arc<Heart>]| {
        hearts.iter().map(|heart| heart.longest.load(Ordering::Relaxed)).max()
    };
    let own = json!({
        "late": summed.late,
        "sums_gap": longest(&[summing]),
        "kv_gap": longest(&hearts),
        "counts": counts.iter().map(|counts| [counts.whole, counts.given_up, counts.bytes])
            .collect::<Vec<_>>(),
    });
    let said = rank.exchange(own.to_string().as_bytes());
    if rank.rank > 0 {
        return;
    }
    let said: Vec<Value> = said.iter().map(|said| serde_json::from_slice(said).unwrap()).collect();
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    // Transfers are counted where they arrive.
    let received = |carrier: TransferKind, what: usize| -> u64 {
        let index = sides.iter().position(|side| *side == (carrier, false)).unwrap();
        said.iter().map(|said| number(&said["counts"][index][what])).sum()
    };
    let carriers: Vec<String> = CARRIERS
        .into_iter()
        .map(|carrier| {
            let [whole, given_up, bytes] = [0, 1, 2].map(|what| received(carrier, what));
            let is_long = time >= Duration::from_secs(20);
            assert!(
                whole > 0 && (given_up > 0 || !is_long),
                "{carrier}: {whole} whole, {given_up} given up"
            );
            let gigabytes = bytes as f64 / 1e9;
            format!("{carrier} {whole} whole, {given_up} given up, {gigabytes:.1} GB")
        })
        .collect();
    let most = |what: &str| said.iter().map(|said| number(&said[what])).max().unwrap() as f64 / 1e3;
    let late: u64 = said.iter().map(|said| number(&said["late"])).sum();
    println!(
        "soak: {} s, {} sums of two ranks checked on both ({:.0} a second), one of them late {late} \
         times; transfers, both ways: {}; longest gap {:.1} ms of sums, {:.1} ms of transfers",
        time.as_secs(),
        summed.count,
        summed.count as f64 / time.as_secs_f64().max(1.0),
        carriers.join("; "),
        most("sums_gap"),
        most("kv_gap"),
    );
}

pub fn all_reduce_beside_kv_transfers_never_stalls() {
    let name = "soak::all_reduce_beside_kv_transfers_never_stalls";
    on_ranks_for(name, RANKS, Duration::from_secs(seconds()), soak);
}
