//! Runs all-reduce and KV transfers concurrently for a given time. Two ranks all-reduce without a
//! pause, and KV goes from each GPU to the other by every transport, with random aborts on either
//! side. Nothing stalls, every all-reduce is correct, and received KV equals sent KV.

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
        AllReduceAlgorithm, AllReduceShape, Compute, CudaGroup, DeviceMemory, Graph, Range, Stream,
    },
    sampling::SampledToken,
};
use kv_transfer::{
    TransferKind,
    api::{self, Epoch, Event, PeerAddress, TransferId},
    config::LEASE,
};
use serde_json::{Value, json};

use super::{
    bench::{numbers, short},
    collective,
    nodes::{self, GPU_TRANSPORTS, Node, NodeKind},
    ranks::{Rank, on_ranks_for},
};

const SECONDS: &str = "BATON_TEST_SOAK_SECONDS";
/// Time without progress after which a task counts as stalled.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Deadline of a transfer.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(8);
/// Extra time for the first completed transfer of each transport.
const FIRST_WITHIN: Duration = Duration::from_secs(30);
/// Time for a transfer that is in flight at the end.
const GRACE: Duration = Duration::from_millis(500);
/// Transfers in flight per transport and direction.
const LANES: u32 = 3;
const LANE_BLOCKS: u32 = nodes::BLOCKS / LANES;
const SUM_BYTES: usize = 1 << 20;
const RANKS: usize = 2;

fn seconds() -> u64 {
    env::var(SECONDS).map_or(if short() { 2 } else { 5 }, |seconds| {
        seconds.parse().unwrap_or_else(|_| {
            panic!("invalid {SECONDS}: {seconds}; expected a number of seconds")
        })
    })
}

/// Pseudo-random number generator, equal in all processes for equal seeds.
struct Rng(u64);

impl Rng {
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

/// Progress of one task.
struct Progress {
    name: String,
    start: Instant,
    count: AtomicU64,
    /// Completed transfers.
    complete: AtomicU64,
    /// Time of the last progress, in µs since the start.
    last: AtomicU64,
    longest: AtomicU64,
}

impl Progress {
    fn new(name: impl Into<String>) -> Arc<Self> {
        let [count, complete, last, longest] = [(); 4].map(|()| AtomicU64::new(0));
        Arc::new(Self { name: name.into(), start: Instant::now(), count, complete, last, longest })
    }

    fn record(&self) {
        let now = self.start.elapsed().as_micros() as u64;
        let gap = now - self.last.swap(now, Ordering::Relaxed);
        // The time before the first progress is start-up.
        if self.count.fetch_add(1, Ordering::Relaxed) > 0 {
            self.longest.fetch_max(gap, Ordering::Relaxed);
        }
    }

    fn idle_time(&self) -> Duration {
        let last = Duration::from_micros(self.last.load(Ordering::Relaxed));
        self.start.elapsed().saturating_sub(last)
    }
}

/// Aborts the process, and with it the test, when a task stalls.
fn watch(tasks: Vec<Arc<Progress>>, is_over: Arc<AtomicBool>) {
    thread::spawn(move || {
        while !is_over.load(Ordering::Relaxed) {
            if let Some(progress) =
                tasks.iter().find(|progress| progress.idle_time() > STALL_TIMEOUT)
            {
                let count = progress.count.load(Ordering::Relaxed);
                println!("{} made no progress for {STALL_TIMEOUT:?}, after {count}", progress.name);
                // Does not wait for the stalled task.
                std::process::abort();
            }
            thread::sleep(Duration::from_millis(100));
        }
    });
}

/// Parameters of a transfer. Both sides derive them from its number.
struct Plan {
    blocks: Vec<BlockId>,
    places: Vec<BlockId>,
    /// Abort times of receiver and sender, as a fraction of the mean transfer time. An abort may
    /// come too late.
    receiver_abort: Option<f64>,
    sender_abort: Option<f64>,
}

impl Plan {
    fn of(way: u64, lane: u32, number: u64) -> Self {
        let mut rng = Rng::of(&[way, lane.into(), number]);
        let count = [1, 3, LANE_BLOCKS / 2, LANE_BLOCKS][rng.below(4) as usize];
        let (seed, turn) = (rng.below(1000), rng.below(LANE_BLOCKS.into()) as u32);
        let place = |index: u32| BlockId(lane * LANE_BLOCKS + (index * 5 + turn) % LANE_BLOCKS);
        let (who, part) = (rng.below(6), rng.below(1500) as f64 / 1000.0);
        Self {
            blocks: nodes::scattered(seed, count),
            places: (0..count).map(place).collect(),
            receiver_abort: (who == 0).then_some(part),
            sender_abort: (who == 1).then_some(part),
        }
    }

    fn is_aborted(&self) -> bool {
        self.receiver_abort.is_some() || self.sender_abort.is_some()
    }
}

/// A transfer, as one side sees it.
struct Lane {
    number: u64,
    plan: Plan,
    begun: Instant,
    abort_at: Option<Instant>,
    /// Whether the transfer has ended and no other follows in this lane.
    is_ended: bool,
}

/// One side of all transfers of one transport in one direction.
struct Side<'a> {
    /// Number of the transport and direction.
    way: u64,
    node: &'a Node,
    peer: PeerAddress,
    is_sender: bool,
    lanes: Vec<Lane>,
    /// Mean time of a completed transfer, in seconds.
    usual: f64,
    goes_on: bool,
}

#[derive(Default)]
struct Counts {
    complete: u64,
    aborted: u64,
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
        let (prompt_hash, deadline, traceparent) = (1, TRANSFER_TIMEOUT, String::new());
        let command = if self.is_sender {
            api::Command::Send { transfer, peer, prompt_hash, deadline, traceparent }
        } else {
            let (first_block, blocks) = (0, plan.places.clone());
            api::Command::Receive {
                transfer,
                peer,
                prompt_hash,
                first_block,
                blocks,
                answer_timeout: LEASE,
                deadline,
                traceparent,
            }
        };
        self.node.transfers.command(command).unwrap();
        let ends = if self.is_sender { plan.sender_abort } else { plan.receiver_abort };
        let begun = Instant::now();
        let abort_at = ends.map(|part| begun + Duration::from_secs_f64(part * self.usual));
        Lane { number, plan, begun, abort_at, is_ended: false }
    }

    /// Runs transfers until `is_over` is set, then waits for those in flight.
    fn run(
        mut self,
        events: &Receiver<Event>,
        progress: &Progress,
        is_over: &AtomicBool,
    ) -> Counts {
        let mut counts = Counts::default();
        let mut over_at = None;
        while self.lanes.iter().any(|lane| !lane.is_ended) {
            let now = Instant::now();
            let mut wait = Duration::from_millis(20);
            if over_at.is_none() && is_over.load(Ordering::Relaxed) {
                over_at = Some(now);
                self.goes_on = false;
                // The other side may have stopped before it began these transfers.
                for lane in self.lanes.iter_mut().filter(|lane| !lane.is_ended) {
                    lane.abort_at = Some(now + GRACE);
                }
            }
            assert!(
                over_at.is_none_or(|at| at.elapsed() < 2 * TRANSFER_TIMEOUT),
                "time-out: a transfer has not ended"
            );
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
                Ok(event) => self.handle(event, &mut counts, progress),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => panic!("no more events"),
            }
        }
        counts
    }

    fn handle(&mut self, event: Event, counts: &mut Counts, progress: &Progress) {
        let lane_of = |transfer: TransferId| ((transfer.0 >> 64) as u32, transfer.0 as u64);
        let (transfer, outcome) = match event {
            Event::Ready { transfer, .. } => {
                let (lane, number) = lane_of(transfer);
                let one = &self.lanes[lane as usize];
                assert_eq!(one.number, number, "lane {lane}");
                let blocks = one.plan.blocks.clone();
                let written = api::Command::Written { transfer, first_block: 0, blocks };
                self.node.transfers.command(written).unwrap();
                let token = SampledToken { id: 1, logprobs: None, pooled: None };
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
                counts.complete += 1;
                progress.complete.fetch_add(1, Ordering::Relaxed);
                counts.bytes += bytes;
                self.usual += (one.begun.elapsed().as_secs_f64() - self.usual) / 16.0;
                // Both sides have hashed all transfers.
                if !self.is_sender && number.is_multiple_of(4) {
                    self.node.assert_holds(&one.plan.blocks, &one.plan.places);
                }
            }
            Err(failure) => {
                let side = if self.is_sender { "sender" } else { "receiver" };
                // At the end a side aborts transfers that the other side has not begun.
                assert!(
                    one.plan.is_aborted() || !self.goes_on,
                    "{side}: transfer {lane}/{number} failed without an abort: {failure}"
                );
                counts.aborted += 1;
            }
        }
        progress.record();
        if self.goes_on {
            self.lanes[lane as usize] = self.begin(lane, number + 1);
        } else {
            self.lanes[lane as usize].is_ended = true;
        }
    }
}

/// Result of the all-reduce task. Keeps its memory allocated.
struct Reduced {
    _group: CudaGroup,
    _memory: [Range; 2],
    count: u64,
    /// All-reduces that this rank joined late on purpose.
    late: u64,
}

/// Runs all-reduces of random shape and checks each, until rank 0's time is over and `is_enough`
/// holds.
fn run_all_reduces(
    rank: &Rank,
    time: Duration,
    progress: &Progress,
    is_enough: impl Fn() -> bool,
) -> Reduced {
    const ELEMENTS: usize = SUM_BYTES / 2;
    let group = collective::group(rank, STALL_TIMEOUT);
    let stream: Stream<Compute> = Stream::new(&rank.context).unwrap();
    let memory = || DeviceMemory::new(&rank.context, "a test", SUM_BYTES).unwrap();
    let [x, out] = [(); 2].map(|()| memory().cut(SUM_BYTES).unwrap());
    let pools: Vec<Vec<f32>> =
        (0..RANKS as u32).map(|rank| numbers(70 + rank, 2 * ELEMENTS)).collect();
    let narrow: Vec<bf16> = pools[rank.rank].iter().copied().map(bf16::from_f32).collect();
    let (mut found, mut found_narrow) = (vec![0.0f32; ELEMENTS], vec![bf16::ZERO; ELEMENTS]);
    let mut own = Rng::of(&[9, rank.rank as u64]);
    let (begun, mut late) = (Instant::now(), 0);
    for number in 0_u64.. {
        // All ranks stop after the same all-reduce.
        if number.is_multiple_of(512) {
            let so_far = begun.elapsed();
            let goes_on = so_far < time || so_far < time + FIRST_WITHIN && !is_enough();
            if rank.exchange(&[u8::from(goes_on)])[0] == [0] {
                group.check().unwrap();
                // The caller frees the memory after all tasks have stopped. Freeing synchronizes
                // with the GPU, and a kernel may still wait for the other rank.
                return Reduced { _group: group, _memory: [x, out], count: number, late };
            }
        }
        let mut rng = Rng::of(&[3, number]);
        let dtype = [Dtype::F32, Dtype::Bf16][rng.below(2) as usize];
        // Small and large sizes are equally frequent.
        let elements = (8 << rng.below(15)) as u64;
        let elements = (elements + rng.below(elements)).min((SUM_BYTES / dtype.bytes()) as u64);
        let width = 8 * (1 + rng.below((elements / 8).min(2048))) as usize;
        let rows = (elements as usize / width).max(1);
        let shape = AllReduceShape { dtype, rows, width };
        let count = rows * width;
        let way = [
            AllReduceAlgorithm::Auto,
            AllReduceAlgorithm::Auto,
            AllReduceAlgorithm::OneShot,
            AllReduceAlgorithm::TwoShot,
        ];
        let way = way[rng.below(4) as usize];
        let is_captured = rng.below(32) == 0;
        let at: Vec<usize> = (0..RANKS).map(|_| rng.below(ELEMENTS as u64) as usize).collect();
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
        if is_captured {
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
                "all-reduce {number}: {dtype} {rows} x {width} {way:?}, captured: {is_captured}: element \
                 {wrong} is {found}, not {a} + {b}"
            );
        }
        progress.record();
    }
    unreachable!("the loop ends by time")
}

/// Encodes the address of a node for the other rank.
fn encode_address(address: &PeerAddress) -> Value {
    json!([address.node_id, address.epoch.to_string(), address.control_endpoint])
}

fn decode_address(encoded: &Value) -> PeerAddress {
    let word = |index: usize| encoded[index].as_str().unwrap().to_owned();
    PeerAddress {
        node_id: word(0),
        epoch: Epoch(u128::from_str_radix(&word(1), 16).unwrap()),
        control_endpoint: word(2),
    }
}

fn soak(rank: Rank) {
    let time = Duration::from_secs(seconds());
    let is_over = Arc::new(AtomicBool::new(false));
    // Each transport has one sender and one receiver.
    let node = |(transport, is_sender): (TransferKind, bool)| {
        let (sink, events) = channel();
        let name = format!("{transport}-{}-{}", if is_sender { "from" } else { "to" }, rank.rank);
        let node = Node::start_as(&name, rank.rank, transport, NodeKind::Verifying, sink);
        if is_sender {
            node.fill(nodes::pattern);
        }
        (name, node, events)
    };
    let sides: Vec<(TransferKind, bool)> = GPU_TRANSPORTS
        .into_iter()
        .flat_map(|transport| [(transport, true), (transport, false)])
        .collect();
    let nodes: Vec<(String, Node, Receiver<Event>)> = sides.iter().copied().map(node).collect();
    let all: Value = nodes.iter().map(|(_, node, _)| encode_address(&node.address)).collect();
    let received_all = rank.exchange(all.to_string().as_bytes());
    let others: Value = serde_json::from_slice(&received_all[1 - rank.rank]).unwrap();
    let reducing = Progress::new(format!("rank {}: all-reduce", rank.rank));
    let tasks: Vec<Arc<Progress>> = nodes.iter().map(|(name, ..)| Progress::new(name)).collect();
    let watched = tasks.iter().chain([&reducing]).cloned().collect();
    watch(watched, Arc::clone(&is_over));
    let (reduced, counts) = thread::scope(|scope| {
        let run = |(index, (_, node, events)): (usize, (String, Node, Receiver<Event>))| {
            let (transport, is_sender) = sides[index];
            // A sender connects to the other rank's receiver of the same transport.
            let peer = decode_address(&others[index ^ 1]);
            let from = if is_sender { rank.rank } else { 1 - rank.rank };
            let way =
                GPU_TRANSPORTS.iter().position(|one| *one == transport).unwrap() * RANKS + from;
            let (progress, is_over) = (Arc::clone(&tasks[index]), Arc::clone(&is_over));
            scope.spawn(move || {
                let side = Side::new(way as u64, &node, peer, is_sender);
                let counts = side.run(&events, &progress, &is_over);
                (node, events, counts)
            })
        };
        let threads: Vec<_> = nodes.into_iter().enumerate().map(run).collect();
        let has_any = |progress: &Arc<Progress>| progress.complete.load(Ordering::Relaxed) > 0;
        let reduced = run_all_reduces(&rank, time, &reducing, || tasks.iter().all(has_any));
        is_over.store(true, Ordering::Relaxed);
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        // No node stops while another node may still use it.
        rank.barrier();
        (reduced, ended.into_iter().map(|(.., counts)| counts).collect::<Vec<_>>())
    });
    let longest = |tasks: &[Arc<Progress>]| {
        tasks.iter().map(|progress| progress.longest.load(Ordering::Relaxed)).max()
    };
    let own = json!({
        "late": reduced.late,
        "all_reduce_gap": longest(&[reducing]),
        "kv_gap": longest(&tasks),
        "counts": counts.iter().map(|counts| [counts.complete, counts.aborted, counts.bytes])
            .collect::<Vec<_>>(),
    });
    let received_all = rank.exchange(own.to_string().as_bytes());
    if rank.rank > 0 {
        return;
    }
    let received_all: Vec<Value> = received_all
        .iter()
        .map(|received_all| serde_json::from_slice(received_all).unwrap())
        .collect();
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    // Transfers are counted at the receiver.
    let received = |transport: TransferKind, what: usize| -> u64 {
        let index = sides.iter().position(|side| *side == (transport, false)).unwrap();
        received_all.iter().map(|received_all| number(&received_all["counts"][index][what])).sum()
    };
    let transports: Vec<String> = GPU_TRANSPORTS
        .into_iter()
        .map(|transport| {
            let [complete, aborted, bytes] = [0, 1, 2].map(|what| received(transport, what));
            let is_long = time >= Duration::from_secs(20);
            assert!(
                complete > 0 && (aborted > 0 || !is_long),
                "{transport}: {complete} completed, {aborted} aborted"
            );
            let gigabytes = bytes as f64 / 1e9;
            format!("{transport} {complete} completed, {aborted} aborted, {gigabytes:.1} GB")
        })
        .collect();
    let most = |what: &str| {
        received_all.iter().map(|received_all| number(&received_all[what])).max().unwrap() as f64
            / 1e3
    };
    let late: u64 = received_all.iter().map(|received_all| number(&received_all["late"])).sum();
    println!(
        "soak: {} s, {} all-reduces of two ranks checked on both ({:.0}/s), a rank late in {late}; \
         transfers in both directions: {}; longest gap {:.1} ms of all-reduces, {:.1} ms of transfers",
        time.as_secs(),
        reduced.count,
        reduced.count as f64 / time.as_secs_f64().max(1.0),
        transports.join("; "),
        most("all_reduce_gap"),
        most("kv_gap"),
    );
}

pub(crate) fn all_reduce_during_kv_transfers_never_stalls() {
    let name = "soak::all_reduce_during_kv_transfers_never_stalls";
    on_ranks_for(name, RANKS, Duration::from_secs(seconds()), soak);
}
