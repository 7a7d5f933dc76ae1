//! Two nodes that KV goes between, by a carrier that needs GPUs: one in this process, and its peer in
//! another, this program again, which sends. With one GPU both processes are on it.

use std::{
    collections::BTreeMap,
    env,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
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
    ClusterSecret, TransferConfig, TransferKind, TransferLimits, Transfers, TransportChoice,
    TransportConfig,
    api::{self, Epoch, Event, Identity, PeerAddress, TransferId},
    control,
};
use ranks::RankGroup;

use super::{bench::require_gpus, tp::kv_group};

/// Any wait; far beyond what anything takes.
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const BLOCKS: u32 = 96;
/// In the environment of the other process: its GPU's index, the carrier, and how its node is.
const PEER: &str = "BATON_TEST_LINKS_PEER";
pub const PEER_HELPER: &str = "kv-peer";
/// Its node's id.
const PEER_NAME: &str = "peer";

/// What is tested: each needs GPUs.
pub const CARRIERS: [TransferKind; 2] = [TransferKind::Ipc, TransferKind::Nccl];

/// Of the delays of streams that are late; the peer's is one more.
const LATE_SEED: u64 = 20;

/// Returns the number of GPUs, for one test at a time. Skips the running test if there is none.
pub fn gpus() -> (usize, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    (require_gpus(1), alone)
}

/// The sender's and the receiver's GPU: every pair on which the carrier works, those of two GPUs last.
pub fn pairs(carrier: TransferKind, gpus: usize) -> Vec<(usize, usize)> {
    let all = (0..gpus).flat_map(|from| (0..gpus).map(move |to| (from, to)));
    // NCCL joins no two processes on one GPU.
    let works = |(from, to): &(usize, usize)| carrier != TransferKind::Nccl || from != to;
    let mut pairs: Vec<_> = all.filter(works).collect();
    pairs.sort_by_key(|(from, to)| from != to);
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

    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(manner, _)| *manner == self).unwrap().1
    }

    fn named(name: &str) -> Self {
        Self::ALL.iter().find(|(_, known)| *known == name).unwrap().0
    }

    pub fn is_large(self) -> bool {
        !matches!(self, Self::Verifying | Self::Quick | Self::Late | Self::Kernel)
    }

    fn is_late(self) -> bool {
        matches!(self, Self::Late | Self::LargeLate | Self::TwoLate)
    }

    fn has_kernel(self) -> bool {
        matches!(self, Self::Kernel | Self::LargeKernel | Self::Two | Self::Four)
    }

    /// Of nccl: what nodes take where nothing else is said, whose receivers scatter by copies, and more where a kernel
    /// is to.
    fn multiprocessors(self) -> u32 {
        if self.has_kernel() { 8 } else { 4 }
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
    pub fn places(self, seed: u64, count: u32) -> Vec<BlockId> {
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
    pub fn start(name: &str, gpu: usize, carrier: TransferKind, sink: Sender<Event>) -> Self {
        Self::start_as(name, gpu, carrier, Manner::Verifying, sink)
    }

    pub fn start_as(
        name: &str,
        gpu: usize,
        carrier: TransferKind,
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
                protocol_min: control::PROTOCOL_MIN,
                protocol_max: control::PROTOCOL_MAX,
            },
            secret: ClusterSecret::new("the secret of these tests").unwrap(),
            control_bind: "127.0.0.1:0".parse().unwrap(),
            data_bind: "127.0.0.1:0".parse().unwrap(),
            advertise_host: "127.0.0.1".to_owned(),
            limits: TransferLimits {
                chunk_bytes_max: manner.chunk_blocks() * layout.block_bytes(),
                ..TransferLimits::default()
            },
            transport: TransportConfig {
                choice: TransportChoice::Only(carrier),
                verify: manner.verifies(),
                nccl_max_ctas: Some(manner.multiprocessors()),
            },
        };
        let sink = move |event| {
            // Fails when nobody waits any more.
            let _ = sink.send(event);
        };
        let transfers = Transfers::start(config, Arc::clone(&arena), sink).unwrap();
        let control_endpoint = transfers.control_endpoint().to_owned();
        let address = PeerAddress { node_id: name.to_owned(), epoch, control_endpoint };
        Self { transfers, arena, address, block_bytes: layout.block_bytes(), _group: group }
    }

    pub fn receive(&self, transfer: TransferId, peer: &PeerAddress, blocks: &[BlockId]) {
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

    pub fn assert_free(&self) {
        for block in (0..BLOCKS).map(BlockId) {
            assert_eq!(self.arena.pins(block).unwrap(), 0, "{block:?}");
        }
    }

    pub fn path(&self) -> String {
        self.transfers.metrics().peers[0].path.clone()
    }

    pub fn chunks(&self) -> u64 {
        self.transfers.metrics().chunks_received
    }

    /// Until it has received more chunks than so many.
    pub fn until_more_chunks(&self, than: u64) {
        let begun = Instant::now();
        while self.chunks() <= than {
            assert!(begun.elapsed() < PATIENCE, "no chunk comes after {than}");
            thread::sleep(Duration::from_micros(100));
        }
    }
}

/// The sending process.
pub struct Peer {
    child: Child,
    stdin: ChildStdin,
    pub address: PeerAddress,
}

impl Peer {
    pub fn start(gpu: usize, carrier: TransferKind) -> Self {
        Self::start_as(gpu, carrier, Manner::Verifying)
    }

    pub fn start_as(gpu: usize, carrier: TransferKind, manner: Manner) -> Self {
        let mut child = test_harness::helper(PEER_HELPER)
            .env(PEER, format!("{gpu} {carrier} {}", manner.name()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, said) = channel();
        // Nothing more is said, but the pipe stays open.
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Some((_, words)) = line.split_once("KV ") {
                    let _ = sender.send(words.split(' ').map(str::to_owned).collect::<Vec<_>>());
                }
            }
        });
        let Ok(words) = said.recv_timeout(2 * PATIENCE) else {
            let _ = child.kill();
            panic!("the other process does not start, and is ended: {:?}", child.wait());
        };
        let address = PeerAddress {
            node_id: PEER_NAME.to_owned(),
            epoch: Epoch(u128::from_str_radix(&words[0], 16).unwrap()),
            control_endpoint: words[1].clone(),
        };
        let stdin = child.stdin.take().unwrap();
        Self { child, stdin, address }
    }

    /// Lets it send so many blocks as they lie by this seed; `finishes`: to the end.
    pub fn send(&mut self, transfer: TransferId, to: &Node, seed: u64, count: u32, finishes: bool) {
        self.send_until(transfer, to, seed, count, finishes, None);
    }

    /// It gives up so long after it was ready.
    pub fn send_until(
        &mut self,
        transfer: TransferId,
        to: &Node,
        seed: u64,
        count: u32,
        finishes: bool,
        abort: Option<Duration>,
    ) {
        let abort = abort.map_or("never".to_owned(), |after| after.as_micros().to_string());
        let PeerAddress { node_id, epoch, control_endpoint } = &to.address;
        writeln!(
            self.stdin,
            "{transfer} {node_id} {epoch} {control_endpoint} {seed} {count} {finishes} {abort}"
        )
        .unwrap();
    }

    pub fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    pub fn kill(mut self) {
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

/// Runs the sending node of a test, in a process of its own.
pub fn run_peer() {
    let setting = env::var(PEER).expect("the test sets it");
    let words: Vec<&str> = setting.split(' ').collect();
    let (gpu, manner) = (words[0].parse().unwrap(), Manner::named(words[2]));
    let carrier = TransferKind::from_offer(words[1]).unwrap();
    let (sink, events) = channel();
    let node = Node::start_as(PEER_NAME, gpu, carrier, manner, sink);
    node.fill(pattern);
    println!("KV {} {}", node.address.epoch, node.address.control_endpoint);
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
                    control_endpoint: words[3].to_owned(),
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
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
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

pub fn event(events: &Receiver<Event>) -> Event {
    events.recv_timeout(PATIENCE).expect("an event comes")
}
