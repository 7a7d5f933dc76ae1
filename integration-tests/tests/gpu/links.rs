//! KV between GPUs, by every carrier that needs them, between this process and another: this program
//! again, which sends. With one GPU both processes are on it.

use std::{
    collections::BTreeMap,
    env,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use kernels::{
    BlockId, Dtype, KvArena, KvLayout,
    arena::RemoteBlocks,
    cuda::{Context, Delays, DeviceKv, Driver, KernelLibrary, RankedKv},
    sampling::SampledToken,
};
use kv_transfer::{
    Carrier, Carriers, Choice, ClusterSecret, Limits, TransferConfig, Transfers,
    api::{self, Epoch, Event, Identity, PeerAddress, TransferId},
    config::LEASE,
    notice,
};
use ranks::RankGroup;

use super::{bench::short, tp::kv_group};

/// Any wait; far beyond what anything takes.
const PATIENCE: Duration = Duration::from_secs(60);
pub const BLOCKS: u32 = 96;
/// How many transfers the test with random ends makes, where it is set.
const TRANSFERS: &str = "BATON_TEST_TRANSFERS";
/// In the environment of the other process: its GPU's index, the carrier, and how its node is.
const PEER: &str = "BATON_TEST_LINKS_PEER";
/// Its node's id.
const PEER_NAME: &str = "peer";

/// What is tested: each needs GPUs.
pub const CARRIERS: [Carrier; 2] = [Carrier::Ipc, Carrier::Nccl];

/// Of the delays of streams that are late; the peer's is one more.
const LATE_SEED: u64 = 20;

/// How many GPUs there are, for one test at a time; `None` after saying that there is none.
fn gpus() -> Option<(usize, MutexGuard<'static, ()>)> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    match Driver::open().and_then(|driver| driver.devices()) {
        Ok(devices) => Some((devices.len(), alone)),
        Err(error) if env::var_os("BATON_TEST_GPU").is_some_and(|value| value == "1") => {
            panic!("no GPU to test: {error}")
        }
        Err(error) => {
            eprintln!("skipped, for there is no GPU to test: {error}");
            None
        }
    }
}

/// The sender's and the receiver's GPU: every pair on which the carrier works.
fn pairs(carrier: Carrier, gpus: usize) -> Vec<(usize, usize)> {
    let all = (0..gpus).flat_map(|from| (0..gpus).map(move |to| (from, to)));
    // NCCL joins no two processes on one GPU.
    let pairs: Vec<_> = all.filter(|(from, to)| carrier != Carrier::Nccl || from != to).collect();
    if pairs.is_empty() {
        eprintln!("skipped, for {carrier} needs two GPUs");
    }
    pairs
}

pub fn pattern(block: BlockId, block_bytes: usize) -> Vec<u8> {
    let mut state = u64::from(block.0) ^ 0x9e37_79b9_7f4a_7c15;
    let mut bytes = Vec::with_capacity(block_bytes);
    while bytes.len() < block_bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        bytes.extend_from_slice(&state.to_be_bytes());
    }
    bytes
}

/// The same, made once.
fn known_pattern(block: BlockId, block_bytes: usize) -> Arc<Vec<u8>> {
    type Known = BTreeMap<(u32, usize), Arc<Vec<u8>>>;
    static KNOWN: Mutex<Known> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let made = known.entry((block.0, block_bytes));
    Arc::clone(made.or_insert_with(|| Arc::new(pattern(block, block_bytes))))
}

/// Runs in which large blocks lie: they end within chunks, slots and each other's; some are brought
/// together, some go as they lie, and some of either are longer than a slot.
const RUNS: [u32; 19] = [3, 3, 3, 3, 3, 3, 20, 3, 5, 3, 3, 17, 3, 3, 3, 3, 3, 3, 9];

/// Runs as they are at both sides, each side's in places of its own.
fn in_runs(seed: u64) -> Vec<BlockId> {
    assert_eq!(RUNS.iter().sum::<u32>(), BLOCKS);
    let mut order: Vec<usize> = (0..RUNS.len()).collect();
    let mut state = seed;
    for last in (1..order.len()).rev() {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(last, (state >> 33) as usize % (last + 1));
    }
    let mut firsts = [0; RUNS.len()];
    let mut first = 0;
    for index in order {
        firsts[index] = first;
        first += RUNS[index];
    }
    let runs = firsts.into_iter().zip(RUNS);
    runs.flat_map(|(first, count)| (first..first + count).map(BlockId)).collect()
}

/// Where a transfer's blocks lie at either side: apart, together, and mixed.
pub fn scattered(seed: u64, count: u32) -> Vec<BlockId> {
    let mut ids: Vec<BlockId> = (0..BLOCKS).map(BlockId).collect();
    let mut state = seed;
    // Half of the seeds leave them in order.
    if seed % 2 == 1 {
        for last in (1..ids.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed | 1);
            ids.swap(last, (state >> 33) as usize % (last + 1));
        }
    }
    ids.truncate(count as usize);
    ids
}

/// How a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Hashes what comes and goes.
    Verifying,
    Quick,
    /// Its streams are late at random.
    Late,
    /// Blocks are brought together by a kernel.
    Kernel,
    /// Blocks as large as an 8B model's, in chunks longer than a slot.
    Large,
    LargeLate,
    LargeKernel,
    /// The same of several ranks, each on a GPU of its own: from the named one on, and round.
    Two,
    TwoLate,
    Four,
}

impl Manner {
    const ALL: [(Self, &str); 10] = [
        (Self::Verifying, "verifying"),
        (Self::Quick, "quick"),
        (Self::Late, "late"),
        (Self::Kernel, "kernel"),
        (Self::Large, "large"),
        (Self::LargeLate, "large-late"),
        (Self::LargeKernel, "large-kernel"),
        (Self::Two, "two"),
        (Self::TwoLate, "two-late"),
        (Self::Four, "four"),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(manner, _)| *manner == self).unwrap().1
    }

    fn named(name: &str) -> Self {
        Self::ALL.iter().find(|(_, known)| *known == name).unwrap().0
    }

    fn is_large(self) -> bool {
        !matches!(self, Self::Verifying | Self::Quick | Self::Late | Self::Kernel)
    }

    fn is_late(self) -> bool {
        matches!(self, Self::Late | Self::LargeLate | Self::TwoLate)
    }

    fn has_kernel(self) -> bool {
        matches!(self, Self::Kernel | Self::LargeKernel | Self::Two | Self::Four)
    }

    fn ranks(self) -> usize {
        match self {
            Self::Two | Self::TwoLate => 2,
            Self::Four => 4,
            _ => 1,
        }
    }

    /// Whether chunks are hashed on both sides.
    fn verifies(self) -> bool {
        matches!(self, Self::Verifying | Self::Two | Self::Four)
    }

    /// 2 MiB a block, or 256 KiB.
    fn layout(self) -> KvLayout {
        let dtype = Dtype::Bf16;
        match self.is_large() {
            true => KvLayout { layer_count: 32, kv_head_count: 8, head_dim: 128, dtype },
            false => KvLayout { layer_count: 16, kv_head_count: 4, head_dim: 64, dtype },
        }
    }

    fn chunk_blocks(self) -> usize {
        if self.is_large() { 40 } else { 7 }
    }

    /// Where so many blocks of a transfer lie, by a seed.
    fn places(self, seed: u64, count: u32) -> Vec<BlockId> {
        match self.is_large() {
            true => in_runs(seed)[..count as usize].to_vec(),
            false => scattered(seed, count),
        }
    }
}

pub struct Node {
    pub transfers: Transfers,
    arena: Arc<KvArena>,
    pub address: PeerAddress,
    block_bytes: usize,
    /// As long as their memory is used.
    _group: Option<RankGroup>,
}

impl Node {
    fn start(name: &str, gpu: usize, carrier: Carrier, sink: Sender<Event>) -> Self {
        Self::start_as(name, gpu, carrier, Manner::Verifying, sink)
    }

    pub fn start_as(
        name: &str,
        gpu: usize,
        carrier: Carrier,
        manner: Manner,
        sink: Sender<Event>,
    ) -> Self {
        let driver = Driver::open().unwrap();
        let layout = manner.layout();
        let library = (manner.is_late() || manner.has_kernel()).then(|| {
            let path = env::var_os("BATON_TEST_KERNELS").map(PathBuf::from);
            Arc::new(KernelLibrary::open(path.as_deref()).unwrap())
        });
        let mut seed = LATE_SEED + u64::from(name == PEER_NAME);
        let delays = |library: &Arc<KernelLibrary>, seed: u64| {
            println!("{name} is late by seed {seed}");
            Delays::new(Arc::clone(library), Duration::from_micros(500), seed)
        };
        let (blocks, group): (Arc<dyn RemoteBlocks>, _) = if manner.ranks() > 1 {
            let all = driver.devices().unwrap().len();
            let gpus: Vec<usize> = (0..manner.ranks()).map(|rank| (gpu + rank) % all).collect();
            let group = kv_group(&gpus, layout, BLOCKS);
            let kv = RankedKv::imported(layout, &group.said()).unwrap();
            match &library {
                Some(library) if manner.is_late() => kv.delay_streams(|| {
                    seed += 2;
                    delays(library, seed)
                }),
                Some(library) => {
                    kv.move_with(library).unwrap();
                    if name == PEER_NAME {
                        // One end by kernels, the other by copies.
                        kv.digest_with(library).unwrap();
                    }
                }
                None => {}
            }
            (kv, Some(group))
        } else {
            let device = driver.device_named(&gpu.to_string()).unwrap();
            let context = Context::new(driver, device).unwrap();
            let kv = DeviceKv::new(&context, layout, BLOCKS).unwrap();
            if manner == Manner::Verifying && name == PEER_NAME {
                // One end by a kernel, where there is one, the other by copies.
                let path = env::var_os("BATON_TEST_KERNELS").map(PathBuf::from);
                if let Ok(library) = KernelLibrary::open(path.as_deref()) {
                    kv.digest_with(Arc::new(library)).unwrap();
                }
            }
            if let Some(library) = &library {
                library.initialise(&context).unwrap();
                if manner.is_late() {
                    kv.delay_streams(delays(library, seed));
                } else {
                    kv.move_with(Arc::clone(library)).unwrap();
                }
            }
            (kv, None)
        };
        let arena = KvArena::remote(blocks).unwrap();
        static STARTED: AtomicU64 = AtomicU64::new(1);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let epoch = Epoch(u128::from(std::process::id()) << 64 | u128::from(number));
        let config = TransferConfig {
            node_id: name.to_owned(),
            epoch,
            identity: Identity {
                model_fingerprint: 1,
                weight_version: 1,
                kv_layout: layout.to_string(),
                block_size: 16,
                dtype: "bf16".to_owned(),
                tp: 1,
                protocol_min: notice::PROTOCOL_MIN,
                protocol_max: notice::PROTOCOL_MAX,
            },
            secret: ClusterSecret::new("the secret of these tests").unwrap(),
            notice_bind: "127.0.0.1:0".parse().unwrap(),
            data_bind: "127.0.0.1:0".parse().unwrap(),
            advertise_host: "127.0.0.1".to_owned(),
            limits: Limits {
                chunk_bytes_max: manner.chunk_blocks() * layout.block_bytes(),
                ..Limits::default()
            },
            carriers: Carriers {
                choice: Choice::Only(carrier),
                verify: manner.verifies(),
                nccl_blocks: Some(8),
            },
        };
        let sink = move |event| {
            // Fails when nobody waits any more.
            let _ = sink.send(event);
        };
        let transfers = Transfers::start(config, Arc::clone(&arena), sink).unwrap();
        let notice_endpoint = transfers.notice_endpoint().to_owned();
        let address = PeerAddress { node_id: name.to_owned(), epoch, notice_endpoint };
        Self { transfers, arena, address, block_bytes: layout.block_bytes(), _group: group }
    }

    fn receive(&self, transfer: TransferId, peer: &PeerAddress, blocks: &[BlockId]) {
        let command = api::Command::Receive {
            transfer,
            peer: peer.clone(),
            prompt_hash: 1,
            first_block: 0,
            blocks: blocks.to_vec(),
            deadline: PATIENCE,
            traceparent: String::new(),
        };
        self.transfers.command(command).unwrap();
    }

    pub fn abort(&self, transfer: TransferId) {
        let reason = "the client left".to_owned();
        self.transfers.command(api::Command::Abort { transfer, reason }).unwrap();
    }

    /// With the bytes that it gives for a block of so many.
    pub fn fill(&self, bytes: impl Fn(BlockId, usize) -> Vec<u8>) {
        for block in (0..BLOCKS).map(BlockId) {
            let bytes = bytes(block, self.block_bytes);
            self.arena.write(block).unwrap().copy_from_host(&bytes).unwrap();
        }
    }

    pub fn assert_holds(&self, from: &[BlockId], to: &[BlockId]) {
        let mut found = vec![0; self.block_bytes];
        for (from, to) in from.iter().zip(to) {
            self.arena.read(*to).unwrap().copy_to_host(&mut found).unwrap();
            assert!(
                found == *known_pattern(*from, self.block_bytes),
                "{to:?} holds what {from:?} held"
            );
        }
    }

    fn assert_free(&self) {
        for block in (0..BLOCKS).map(BlockId) {
            assert_eq!(self.arena.pins(block).unwrap(), 0, "{block:?}");
        }
    }

    fn path(&self) -> String {
        self.transfers.metrics().peers[0].path.clone()
    }
}

/// The sending process.
struct Peer {
    child: Child,
    stdin: ChildStdin,
    address: PeerAddress,
}

impl Peer {
    fn start(gpu: usize, carrier: Carrier) -> Self {
        Self::start_as(gpu, carrier, Manner::Verifying)
    }

    fn start_as(gpu: usize, carrier: Carrier, manner: Manner) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "gpu::links::peer", "--nocapture"])
            .env(PEER, format!("{gpu} {carrier} {}", manner.name()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let words = loop {
            let line = lines.next().expect("the other process starts").unwrap();
            // The harness prints its own words before ours, on the same line at times.
            if let Some((_, said)) = line.split_once("KV ") {
                break said.split(' ').map(str::to_owned).collect::<Vec<_>>();
            }
        };
        // Nothing more is said, but the pipe stays open.
        thread::spawn(move || lines.for_each(drop));
        let address = PeerAddress {
            node_id: PEER_NAME.to_owned(),
            epoch: Epoch(u128::from_str_radix(&words[0], 16).unwrap()),
            notice_endpoint: words[1].clone(),
        };
        let stdin = child.stdin.take().unwrap();
        Self { child, stdin, address }
    }

    /// Lets it send so many blocks as they lie by this seed; `finishes`: to the end.
    fn send(&mut self, transfer: TransferId, to: &Node, seed: u64, count: u32, finishes: bool) {
        self.send_until(transfer, to, seed, count, finishes, None);
    }

    /// It gives up so long after it was ready.
    fn send_until(
        &mut self,
        transfer: TransferId,
        to: &Node,
        seed: u64,
        count: u32,
        finishes: bool,
        abort: Option<Duration>,
    ) {
        let abort = abort.map_or("never".to_owned(), |after| after.as_micros().to_string());
        let PeerAddress { node_id, epoch, notice_endpoint } = &to.address;
        writeln!(
            self.stdin,
            "{transfer} {node_id} {epoch} {notice_endpoint} {seed} {count} {finishes} {abort}"
        )
        .unwrap();
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The other process's main function; without its variable it has nothing to do.
#[test]
fn peer() {
    let Ok(setting) = env::var(PEER) else { return };
    let words: Vec<&str> = setting.split(' ').collect();
    let (gpu, manner) = (words[0].parse().unwrap(), Manner::named(words[2]));
    let carrier = Carrier::offered(words[1]).unwrap();
    let (sink, events) = channel();
    let node = Node::start_as(PEER_NAME, gpu, carrier, manner, sink);
    node.fill(pattern);
    println!("KV {} {}", node.address.epoch, node.address.notice_endpoint);
    // Each transfer is announced by a line before it can be ready.
    let (sender, lines) = channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    let mut known = Vec::new();
    let mut to_abort: Vec<(Instant, TransferId)> = Vec::new();
    let mut asked = Instant::now();
    // Never left behind, whatever becomes of the parent.
    while asked.elapsed() < 5 * PATIENCE {
        match lines.recv_timeout(Duration::from_micros(200)) {
            Ok(line) => {
                asked = Instant::now();
                let words: Vec<&str> = line.split(' ').collect();
                let transfer = TransferId(u128::from_str_radix(words[0], 16).unwrap());
                let peer = PeerAddress {
                    node_id: words[1].to_owned(),
                    epoch: Epoch(u128::from_str_radix(words[2], 16).unwrap()),
                    notice_endpoint: words[3].to_owned(),
                };
                let blocks = manner.places(words[4].parse().unwrap(), words[5].parse().unwrap());
                let abort = words[7].parse().ok().map(Duration::from_micros);
                known.push((transfer, blocks, words[6] == "true", abort));
                let command = api::Command::Expect {
                    transfer,
                    peer,
                    prompt_hash: 1,
                    deadline: PATIENCE,
                    traceparent: String::new(),
                };
                node.transfers.command(command).unwrap();
            }
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
        }
        while let Ok(event) = events.try_recv() {
            if let Event::Ready { transfer, .. } = event {
                let index = known.iter().position(|(id, ..)| *id == transfer).unwrap();
                let (_, blocks, finishes, abort) = known.swap_remove(index);
                to_abort.extend(abort.map(|after| (Instant::now() + after, transfer)));
                let first_block = 0;
                let written = api::Command::Written { transfer, first_block, blocks };
                node.transfers.command(written).unwrap();
                if finishes {
                    let token = SampledToken { id: 1, logprobs: None };
                    let finish = api::Command::Finish { transfer, first_index: 0, token };
                    node.transfers.command(finish).unwrap();
                }
            }
        }
        let now = Instant::now();
        for (_, transfer) in to_abort.extract_if(.., |(at, _)| *at <= now) {
            node.abort(transfer);
        }
    }
}

fn event(events: &Receiver<Event>) -> Event {
    events.recv_timeout(PATIENCE).expect("an event comes")
}

#[test]
fn kv_of_another_process_arrives_as_it_was_however_it_lies() {
    let Some((gpus, _alone)) = gpus() else { return };
    let ways = [
        (Carrier::Ipc, Manner::Verifying),
        (Carrier::Nccl, Manner::Verifying),
        (Carrier::Nccl, Manner::Large),
    ];
    for (carrier, manner) in ways {
        for (from, to) in pairs(carrier, gpus) {
            let mut peer = Peer::start_as(from, carrier, manner);
            let (sink, events) = channel();
            let node = Node::start_as("node", to, carrier, manner, sink);
            for seed in 0..if short() { 2 } else { 12 } {
                // What was there before is not what comes.
                node.fill(|_, bytes| vec![seed as u8; bytes]);
                let counts =
                    if manner.is_large() { [96, 90, 41, 5, 17] } else { [1, 7, 8, 50, 96] };
                let (count, transfer) = (counts[seed as usize % 5], TransferId(seed.into()));
                let places = manner.places(seed / 2 + 100, count);
                peer.send(transfer, &node, seed, count, true);
                node.receive(transfer, &peer.address, &places);
                let arrived = event(&events);
                assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
                node.assert_holds(&manner.places(seed, count), &places);
            }
            node.assert_free();
            let metrics = node.transfers.metrics();
            assert_eq!((node.path().as_str(), metrics.fallbacks.len()), (carrier.name(), 0));
            let chunks = metrics.chunks_received;
            println!("{carrier}, {}, from GPU {from} to GPU {to}: {chunks} chunks", manner.name());
        }
    }
}

#[test]
fn aborts_at_any_moment_leave_no_block_behind() {
    let Some((gpus, _alone)) = gpus() else { return };
    for carrier in CARRIERS {
        let Some((from, to)) = pairs(carrier, gpus).pop() else { continue };
        let mut peer = Peer::start(from, carrier);
        let (sink, events) = channel();
        let node = Node::start("node", to, carrier, sink);
        let rounds = if short() { 5 } else { 200 };
        for round in 0..rounds {
            let transfer = TransferId(round);
            peer.send(transfer, &node, round as u64, 96, false);
            node.receive(transfer, &peer.address, &scattered(1, 96));
            thread::sleep(Duration::from_micros((round * 37 % 3000) as u64));
            node.abort(transfer);
            let failed = event(&events);
            assert!(matches!(failed, Event::ReceiveFailed { .. }), "{failed:?}");
            node.assert_free();
        }
        let transfer = TransferId(rounds);
        peer.send(transfer, &node, 1, 96, true);
        node.receive(transfer, &peer.address, &scattered(3, 96));
        let arrived = event(&events);
        assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
        node.assert_holds(&scattered(1, 96), &scattered(3, 96));
    }
}

#[test]
fn a_killed_sender_costs_its_transfers_alone() {
    let Some((gpus, _alone)) = gpus() else { return };
    let ways = [
        (Carrier::Ipc, Manner::Verifying),
        (Carrier::Nccl, Manner::Verifying),
        (Carrier::Nccl, Manner::Two),
    ];
    for (carrier, manner) in ways {
        let Some((from, to)) = pairs(carrier, gpus).pop() else { continue };
        let (sink, events) = channel();
        let node = Node::start_as("node", to, carrier, manner, sink);
        for round in 0..if short() { 2 } else { 3_u64 } {
            let mut peer = Peer::start_as(from, carrier, manner);
            let transfer = TransferId(round.into());
            peer.send(transfer, &node, 1, 96, false);
            node.receive(transfer, &peer.address, &manner.places(1, 96));
            thread::sleep(Duration::from_micros(round * 800));
            peer.kill();
            let failed = event(&events);
            assert!(matches!(failed, Event::ReceiveFailed { .. }), "{failed:?}");
            node.assert_free();
        }
        // The GPU, and this process on it, are as they were.
        let mut peer = Peer::start_as(from, carrier, manner);
        let transfer = TransferId(1000);
        peer.send(transfer, &node, 1, 96, true);
        node.receive(transfer, &peer.address, &manner.places(3, 96));
        let arrived = event(&events);
        assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
        node.assert_holds(&manner.places(1, 96), &manner.places(3, 96));
    }
}

/// The driver maps no memory into the process that owns it.
#[test]
fn within_one_process_kv_goes_by_tcp_and_that_is_counted() {
    let Some((gpus, _alone)) = gpus() else { return };
    let (one_sink, one_events) = channel();
    let (other_sink, other_events) = channel();
    let one = Node::start("one", 0, Carrier::Ipc, one_sink);
    let other = Node::start("other", gpus - 1, Carrier::Ipc, other_sink);
    one.fill(pattern);
    let transfer = TransferId(1);
    let expect = api::Command::Expect {
        transfer,
        peer: other.address.clone(),
        prompt_hash: 1,
        deadline: PATIENCE,
        traceparent: String::new(),
    };
    one.transfers.command(expect).unwrap();
    let blocks = scattered(1, 20);
    other.receive(transfer, &one.address, &blocks);
    assert!(matches!(event(&one_events), Event::Ready { .. }));
    let written = api::Command::Written { transfer, first_block: 0, blocks: blocks.clone() };
    one.transfers.command(written).unwrap();
    let token = SampledToken { id: 1, logprobs: None };
    one.transfers.command(api::Command::Finish { transfer, first_index: 0, token }).unwrap();
    assert!(matches!(event(&other_events), Event::Arrived { .. }));
    other.assert_holds(&blocks, &blocks);
    assert_eq!((one.path().as_str(), other.path().as_str()), ("tcp", "tcp"));
    assert_eq!(other.transfers.metrics().fallbacks["ipc"], 1);
}

/// One transfer of all blocks after another with this peer, for so long: how many, and the longest.
fn steadily(
    node: &Node,
    peer: &mut Peer,
    events: &Receiver<Event>,
    next: &mut u128,
    time: Duration,
    mut other: impl FnMut(Event),
) -> (usize, Duration) {
    let begin = Instant::now();
    let (mut count, mut longest) = (0, Duration::ZERO);
    while begin.elapsed() < time {
        *next += 1;
        let (transfer, begun) = (TransferId(*next), Instant::now());
        peer.send(transfer, node, 1, BLOCKS / 2, true);
        node.receive(transfer, &peer.address, &scattered(3, BLOCKS / 2));
        loop {
            match event(events) {
                Event::Arrived { transfer: arrived, .. } if arrived == transfer => break,
                event => other(event),
            }
        }
        count += 1;
        longest = longest.max(begun.elapsed());
    }
    (count, longest)
}

/// Those that [`steadily`] leaves alone.
fn other_places() -> Vec<BlockId> {
    let used = scattered(3, BLOCKS / 2);
    (0..BLOCKS).map(BlockId).filter(|block| !used.contains(block)).collect()
}

/// Transfers, one after another, until one with this peer arrives: how long that took.
fn until_arrived(
    node: &Node,
    peer: &mut Peer,
    events: &Receiver<Event>,
    next: &mut u128,
) -> Duration {
    let begin = Instant::now();
    loop {
        *next += 1;
        let transfer = TransferId(*next);
        peer.send(transfer, node, 1, 8, true);
        node.receive(transfer, &peer.address, &scattered(3, 8));
        if let Event::Arrived { .. } = event(events) {
            return begin.elapsed();
        }
        // It has not noticed yet that the pair was lost.
        assert!(begin.elapsed() < PATIENCE, "it comes back");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_stopped_peer_delays_no_other_pair_and_costs_its_transfers_a_lease() {
    let Some((gpus, _alone)) = gpus() else { return };
    for carrier in CARRIERS {
        let Some((from, to)) = pairs(carrier, gpus).pop() else { continue };
        let (sink, events) = channel();
        let node = Node::start_as("node", to, carrier, Manner::Quick, sink);
        let [mut steady, mut stopped] =
            [(); 2].map(|()| Peer::start_as(from, carrier, Manner::Quick));
        let mut next = 0;
        for peer in [&mut steady, &mut stopped] {
            until_arrived(&node, peer, &events, &mut next);
        }
        let nothing = |event| panic!("{event:?}");
        let time = Duration::from_millis(if short() { 500 } else { 2000 });
        let (before, longest_before) =
            steadily(&node, &mut steady, &events, &mut next, time, nothing);
        // Never finished, so that none arrives, wherever it is when its sender stops.
        const STUCK: u128 = 1 << 100;
        let places = other_places();
        let stuck: Vec<&[BlockId]> = places.chunks(8).collect();
        for (index, places) in stuck.iter().enumerate() {
            let transfer = TransferId(STUCK + index as u128);
            stopped.send(transfer, &node, 1, places.len() as u32, false);
            node.receive(transfer, &stopped.address, places);
        }
        stopped.signal("-STOP");
        let at = Instant::now();
        let (mut failed, mut last) = (0, Duration::ZERO);
        let lost = |event: Event| match event {
            Event::ReceiveFailed { transfer, .. } if transfer.0 >= STUCK => {
                failed += 1;
                last = at.elapsed();
            }
            other => panic!("{other:?}"),
        };
        let (after, longest) = steadily(&node, &mut steady, &events, &mut next, 2 * LEASE, lost);
        while failed < stuck.len() {
            assert!(matches!(event(&events), Event::ReceiveFailed { .. }));
            (failed, last) = (failed + 1, at.elapsed());
        }
        node.assert_free();
        node.assert_holds(&scattered(1, BLOCKS / 2), &scattered(3, BLOCKS / 2));
        let rate = |count: usize, time: Duration| count as f64 / time.as_secs_f64();
        println!(
            "{carrier}: the other pair makes {:.0} transfers/s, longest {longest_before:?}, and \
             {:.0} transfers/s, longest {longest:?} beside a stopped peer, whose blocks are back \
             after {last:?}",
            rate(before, time),
            rate(after, 2 * LEASE)
        );
        // Whoever waited for the stopped one would have waited for a lease.
        assert!(longest < longest_before + LEASE / 2, "{carrier}: {longest_before:?} {longest:?}");
        assert!(2.0 * rate(after, 2 * LEASE) >= rate(before, time), "{carrier}: {before} {after}");
        // A lease and what is allowed beyond it, an abort, and what a busy machine takes.
        assert!(last <= LEASE + Duration::from_secs(2), "{carrier}: {last:?}");
        stopped.signal("-CONT");
        let back = until_arrived(&node, &mut stopped, &events, &mut next);
        println!("{carrier}: it is back {back:?} after it goes on");
        stopped.kill();
        let mut again = Peer::start_as(from, carrier, Manner::Quick);
        let back = until_arrived(&node, &mut again, &events, &mut next);
        println!("{carrier}: its next process is connected {back:?} after it is ready");
    }
}

/// The end of one pair's channel waits for the whole GPU, and so for what another pair waits for in vain.
#[test]
fn peers_that_stop_or_die_together_again_and_again_delay_no_other_pair() {
    let Some((gpus, _alone)) = gpus() else { return };
    for carrier in CARRIERS {
        let Some((from, to)) = pairs(carrier, gpus).pop() else { continue };
        let (sink, events) = channel();
        let node = Node::start_as("node", to, carrier, Manner::Quick, sink);
        let mut steady = Peer::start_as(from, carrier, Manner::Quick);
        let mut next = 0;
        until_arrived(&node, &mut steady, &events, &mut next);
        let places = other_places();
        let time = Duration::from_millis(500);
        let nothing = |event| panic!("{event:?}");
        let (_, longest_before) = steadily(&node, &mut steady, &events, &mut next, time, nothing);
        for round in 0..if short() { 2 } else { 4_u128 } {
            let mut lost = [(); 2].map(|()| Peer::start_as(from, carrier, Manner::Quick));
            for peer in &mut lost {
                until_arrived(&node, peer, &events, &mut next);
            }
            let first = (1 << 100) + round * 100;
            let chunks: Vec<&[BlockId]> = places.chunks(4).collect();
            // Not all in one order: those of the two are under way at the same time.
            for (index, places) in chunks.iter().enumerate() {
                let (transfer, peer) = (TransferId(first + index as u128), &mut lost[index % 2]);
                peer.send(transfer, &node, 1, places.len() as u32, false);
                node.receive(transfer, &peer.address, places);
            }
            let (at, mut failed, mut last) = (Instant::now(), 0, Duration::ZERO);
            for peer in &mut lost {
                match round % 2 {
                    0 => peer.signal("-STOP"),
                    _ => peer.signal("-KILL"),
                }
            }
            let mut is_lost = |event: Event| match event {
                Event::ReceiveFailed { transfer, .. } if transfer.0 >= first => {
                    failed += 1;
                    last = at.elapsed();
                }
                other => panic!("{other:?}"),
            };
            let lease_and_more = LEASE + Duration::from_secs(1);
            let (count, longest) =
                steadily(&node, &mut steady, &events, &mut next, lease_and_more, &mut is_lost);
            while failed < chunks.len() {
                assert!(matches!(event(&events), Event::ReceiveFailed { .. }));
                (failed, last) = (failed + 1, at.elapsed());
            }
            println!(
                "{carrier}, two {}: {count} others, longest {longest:?} ({longest_before:?} alone), \
                 blocks back after {last:?}",
                ["stopped", "killed"][round as usize % 2]
            );
            node.assert_free();
            assert!(longest < longest_before + LEASE / 2, "{longest_before:?} {longest:?}");
            assert!(last <= LEASE + Duration::from_secs(2), "{carrier}: {last:?}");
        }
        node.assert_holds(&scattered(1, BLOCKS / 2), &scattered(3, BLOCKS / 2));
    }
}

/// Whatever it is about when it stops: whoever waits for it holds nothing that others need.
#[test]
fn a_peer_that_stops_while_it_joins_delays_no_other_pair() {
    let Some((gpus, _alone)) = gpus() else { return };
    let carrier = Carrier::Nccl;
    let Some((from, to)) = pairs(carrier, gpus).pop() else { return };
    let (sink, events) = channel();
    let node = Node::start_as("node", to, carrier, Manner::Quick, sink);
    let mut steady = Peer::start_as(from, carrier, Manner::Quick);
    let mut next = 0;
    until_arrived(&node, &mut steady, &events, &mut next);
    let time = Duration::from_millis(1500);
    let nothing = |event| panic!("{event:?}");
    let (before, longest_before) = steadily(&node, &mut steady, &events, &mut next, time, nothing);
    println!("alone: {before} transfers, longest {longest_before:?}");
    const JOINING: u128 = 1 << 100;
    let waits: &[u64] = if short() { &[20, 200] } else { &[0, 20, 60, 120, 200, 300, 400] };
    for (round, wait) in waits.iter().enumerate() {
        let mut joining = Peer::start_as(from, carrier, Manner::Quick);
        let transfer = TransferId(JOINING + round as u128);
        joining.send(transfer, &node, 1, 8, false);
        node.receive(transfer, &joining.address, &other_places()[..8]);
        thread::sleep(Duration::from_millis(*wait));
        joining.signal("-STOP");
        let failed = |event| assert!(matches!(event, Event::ReceiveFailed { .. }), "{event:?}");
        let (count, longest) = steadily(&node, &mut steady, &events, &mut next, time, failed);
        println!("stopped {wait} ms into its first transfer: {count} others, longest {longest:?}");
        assert!(longest < longest_before + LEASE / 2, "{wait} ms: {longest_before:?} {longest:?}");
        joining.kill();
    }
    node.assert_holds(&scattered(1, BLOCKS / 2), &scattered(3, BLOCKS / 2));
}

#[test]
fn transfers_that_either_side_ends_at_any_moment_leave_the_others_whole() {
    let Some((gpus, _alone)) = gpus() else { return };
    let count = env::var(TRANSFERS).map_or(if short() { 60 } else { 400 }, |count| {
        count.parse().expect("a count of transfers")
    });
    for carrier in CARRIERS {
        let Some((from, to)) = pairs(carrier, gpus).pop() else { continue };
        let mut peer = Peer::start(from, carrier);
        let (sink, events) = channel();
        let node = Node::start("node", to, carrier, sink);
        let (mut arrived, mut ended_by) = (0, [0, 0]);
        let mut state = 0x5eed_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        const COUNTS: [u32; 5] = [1, 7, 8, 50, BLOCKS];
        // How long a whole transfer of each of these takes, in microseconds.
        let mut usual = [5000.0; COUNTS.len()];
        let (begun, mut longest) = (Instant::now(), Duration::ZERO);
        for number in 0..count {
            let transfer = TransferId(number);
            let (seed, place) = (random(1000), random(1000));
            let which = random(COUNTS.len() as u64) as usize;
            let blocks = COUNTS[which];
            // At every moment of a transfer, however long it takes; some are longer than it is.
            let part = random(1300) as f64 / 1000.0;
            let after = Duration::from_micros((part * usual[which]) as u64);
            // The first two can only be ended, one by each side.
            let ends = if number < 2 { number as u64 } else { random(4) };
            let finishes = ends > 1 || number >= 2 && random(8) > 0;
            let (ours, theirs) = (ends == 0, (ends == 1).then_some(after));
            let sent = Instant::now();
            peer.send_until(transfer, &node, seed, blocks, finishes, theirs);
            let places = scattered(place, blocks);
            node.receive(transfer, &peer.address, &places);
            let mut ended = events.recv_timeout(if ours { after } else { PATIENCE });
            if ours && ended.is_err() {
                node.abort(transfer);
                ended = events.recv_timeout(PATIENCE);
            }
            match ended.expect("it ends") {
                Event::Arrived { .. } => {
                    arrived += 1;
                    usual[which] += (sent.elapsed().as_micros() as f64 - usual[which]) / 8.0;
                    // All were hashed at both sides.
                    if arrived % 4 == 0 {
                        node.assert_holds(&scattered(seed, blocks), &places);
                    }
                }
                Event::ReceiveFailed { failure, .. } => {
                    assert!(ends < 2, "nobody ended {number}: {failure}");
                    ended_by[ends as usize] += 1;
                }
                other => panic!("{other:?}"),
            }
            longest = longest.max(sent.elapsed());
            if number % 32 == 0 {
                node.assert_free();
            }
        }
        node.assert_free();
        let [by_us, by_them] = ended_by;
        let took = begun.elapsed();
        println!(
            "{carrier}: {arrived} transfers arrived whole, {by_us} were ended by the receiver and \
             {by_them} by the sender, in {:.1} s: {:.2} ms each, {longest:?} at most; usual are \
             {usual:.0?} microseconds for {COUNTS:?} blocks",
            took.as_secs_f64(),
            took.as_secs_f64() * 1e3 / count as f64
        );
        assert!(arrived > 0 && by_us > 0 && by_them > 0, "{arrived} {ended_by:?}");
    }
}

/// What one stream forgets to wait for comes late; and a kernel brings blocks together as copies do.
#[test]
fn streams_that_are_late_and_kernels_that_move_blocks_change_none() {
    let Some((gpus, _alone)) = gpus() else { return };
    let ways = [
        (Carrier::Ipc, Manner::Late),
        (Carrier::Nccl, Manner::Late),
        (Carrier::Nccl, Manner::Kernel),
        (Carrier::Nccl, Manner::LargeLate),
        (Carrier::Nccl, Manner::LargeKernel),
    ];
    for (carrier, manner) in ways {
        let Some((from, to)) = pairs(carrier, gpus).pop() else { continue };
        let mut peer = Peer::start_as(from, carrier, manner);
        let (sink, events) = channel();
        let node = Node::start_as("node", to, carrier, manner, sink);
        let rounds = match (short(), manner.is_large()) {
            (true, _) => 6,
            (false, true) => 15,
            (false, false) => 60_u64,
        };
        for round in 0..rounds {
            node.fill(|_, bytes| vec![round as u8; bytes]);
            let transfer = TransferId(round.into());
            let places = manner.places(round / 2 + 7, BLOCKS);
            peer.send(transfer, &node, round, BLOCKS, true);
            node.receive(transfer, &peer.address, &places);
            let arrived = event(&events);
            assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
            node.assert_holds(&manner.places(round, BLOCKS), &places);
        }
        node.assert_free();
    }
}

/// Every number of ranks to every other for which the GPUs suffice, the receiver's ranks on others than
/// those of the sender that have heads in common with them.
#[test]
fn kv_of_ranks_goes_between_their_gpus_by_nccl_as_it_was() {
    let Some((gpus, _alone)) = gpus() else { return };
    use Manner::{Four, LargeKernel, LargeLate, Two, TwoLate};
    let ways = [
        (2, Two, Two),
        (2, TwoLate, TwoLate),
        (3, LargeKernel, Two),
        (3, TwoLate, LargeLate),
        (4, Two, Four),
        (4, Four, Two),
        (4, Four, Four),
    ];
    for (needed, sender, receiver) in ways {
        let what = format!("{} to {}", sender.name(), receiver.name());
        if gpus < needed {
            eprintln!("skipped: {what} wants {needed} GPUs, there are {gpus}");
            continue;
        }
        let mut peer = Peer::start_as(0, Carrier::Nccl, sender);
        let (sink, events) = channel();
        let node = Node::start_as("node", 1, Carrier::Nccl, receiver, sink);
        for round in 0..if short() { 4 } else { 12_u64 } {
            node.fill(|_, bytes| vec![round as u8; bytes]);
            let (transfer, begun) = (TransferId(round.into()), Instant::now());
            let places = receiver.places(round / 2 + 7, BLOCKS);
            peer.send(transfer, &node, round, BLOCKS, true);
            node.receive(transfer, &peer.address, &places);
            let arrived = event(&events);
            assert!(matches!(arrived, Event::Arrived { .. }), "{what}: {arrived:?}");
            println!("{what}: transfer {round} took {:?}", begun.elapsed());
            node.assert_holds(&sender.places(round, BLOCKS), &places);
        }
        assert_eq!(node.path(), "nccl", "{what}");
        node.assert_free();
    }
}

/// One GPU would be at both ends of a communicator: said, counted, and KV goes all the same.
#[test]
fn ranks_on_one_gpu_with_those_that_send_to_them_go_by_another_carrier() {
    let Some((gpus, _alone)) = gpus() else { return };
    if gpus < 2 {
        return eprintln!("skipped, for two ranks want two GPUs");
    }
    // The sender's first rank and the receiver's.
    let mut peer = Peer::start_as(0, Carrier::Nccl, Manner::LargeKernel);
    let (sink, events) = channel();
    let node = Node::start_as("node", 0, Carrier::Nccl, Manner::Two, sink);
    let (transfer, places) = (TransferId(1), Manner::Two.places(3, BLOCKS));
    peer.send(transfer, &node, 1, BLOCKS, true);
    node.receive(transfer, &peer.address, &places);
    let arrived = event(&events);
    assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
    node.assert_holds(&Manner::Two.places(1, BLOCKS), &places);
    assert_eq!((node.path().as_str(), node.transfers.metrics().fallbacks["nccl"]), ("tcp", 1));
}
