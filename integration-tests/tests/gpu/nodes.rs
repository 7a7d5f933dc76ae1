//! Two nodes with a GPU transport between them. The receiver is in this process. The sender, the
//! peer, runs this program again in another process. With one GPU both processes use it.

use std::{
    collections::BTreeMap,
    env,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{ChildStdin, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use kernels::{
    BlockId, KvArena, KvFormat, KvLayout,
    arena::RemoteBlocks,
    cuda::{Context, DeviceKv, Driver, KernelLibrary, RankedKv, StreamDelays},
    sampling::SampledToken,
};
use kv_transfer::{
    ClusterSecret, TransferConfig, TransferKind, TransferLimits, Transfers, TransportChoice,
    TransportConfig,
    api::{self, Epoch, Event, Identity, PeerAddress, TransferId},
    config::LEASE,
    control,
};
use ranks::RankGroup;
use test_harness::KilledOnDrop;

use super::{
    bench::{lacks, require_gpus},
    tp::kv_group,
};

/// Time-out of every wait.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const BLOCKS: u32 = 96;
/// Environment variable of the peer process: GPU index, transport and kind of node.
const PEER: &str = "BATON_TEST_LINKS_PEER";
pub(crate) const PEER_HELPER: &str = "kv-peer";
/// Environment variable by which NCCL, and the nodes of these tests, distinguish hosts.
const NCCL_HOST: &str = "NCCL_HOSTID";
/// Node id of the peer.
const PEER_NAME: &str = "peer";

/// Transports that need GPUs.
pub(crate) const GPU_TRANSPORTS: [TransferKind; 2] = [TransferKind::Ipc, TransferKind::Nccl];

/// Seed of the stream delays of this process; the peer's seed is one higher.
const DELAY_SEED: u64 = 20;

/// Returns the number of GPUs, for one test at a time. Skips the running test if there is none.
pub(crate) fn gpus() -> (usize, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    (require_gpus(1), alone)
}

/// Returns the GPUs of sender and receiver: every pair that the transport supports, pairs of two
/// GPUs last. Skips the running test if there is no pair.
pub(crate) fn pairs(transport: TransferKind, gpus: usize) -> Vec<(usize, usize)> {
    let all = (0..gpus).flat_map(|from| (0..gpus).map(move |to| (from, to)));
    // NCCL rejects two ranks on one GPU.
    let works = |(from, to): &(usize, usize)| transport != TransferKind::Nccl || from != to;
    let mut pairs: Vec<_> = all.filter(works).collect();
    pairs.sort_by_key(|(from, to)| from != to);
    if pairs.is_empty() {
        lacks(2, &format!("{transport} needs 2 GPUs, found {gpus}"));
    }
    pairs
}

/// Returns the last of these [`pairs`].
pub(crate) fn last_pair(transport: TransferKind, gpus: usize) -> (usize, usize) {
    pairs(transport, gpus).pop().expect("a test without a pair is skipped")
}

pub(crate) fn pattern(block: BlockId, block_bytes: usize) -> Vec<u8> {
    let mut state = u64::from(block.0) ^ 0x9e37_79b9_7f4a_7c15;
    let mut bytes = Vec::with_capacity(block_bytes);
    while bytes.len() < block_bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        bytes.extend_from_slice(&state.to_be_bytes());
    }
    bytes
}

/// Returns `pattern`, computed once per block.
fn known_pattern(block: BlockId, block_bytes: usize) -> Arc<Vec<u8>> {
    type Known = BTreeMap<(u32, usize), Arc<Vec<u8>>>;
    static KNOWN: Mutex<Known> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let made = known.entry((block.0, block_bytes));
    Arc::clone(made.or_insert_with(|| Arc::new(pattern(block, block_bytes))))
}

/// Lengths of contiguous runs of large blocks. Runs end within chunks, slots and each other. Some
/// are gathered, some are sent in place, and some of either kind are longer than a slot.
const RUNS: [u32; 19] = [3, 3, 3, 3, 3, 3, 20, 3, 5, 3, 3, 17, 3, 3, 3, 3, 3, 3, 9];

/// Returns all blocks as the runs of `RUNS`, placed by the seed.
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

/// Returns blocks in random order for odd seeds, and in order for even ones.
pub(crate) fn scattered(seed: u64, count: u32) -> Vec<BlockId> {
    let mut ids: Vec<BlockId> = (0..BLOCKS).map(BlockId).collect();
    let mut state = seed;
    if seed % 2 == 1 {
        for last in (1..ids.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed | 1);
            ids.swap(last, (state >> 33) as usize % (last + 1));
        }
    }
    ids.truncate(count as usize);
    ids
}

/// Kind of a test node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeKind {
    /// Hashes every chunk.
    Verifying,
    Plain,
    /// Delays its streams at random.
    Delayed,
    /// Gathers and scatters blocks with a kernel.
    GatherKernel,
    /// Has blocks of an 8B model's size, in chunks longer than a slot.
    Large,
    LargeDelayed,
    LargeGatherKernel,
    /// Has large blocks over several ranks. The ranks use consecutive GPUs from the named one on,
    /// modulo the number of GPUs.
    TwoRanks,
    TwoRanksDelayed,
    FourRanks,
}

impl NodeKind {
    const ALL: [(Self, &str); 10] = [
        (Self::Verifying, "verifying"),
        (Self::Plain, "plain"),
        (Self::Delayed, "delayed"),
        (Self::GatherKernel, "gather-kernel"),
        (Self::Large, "large"),
        (Self::LargeDelayed, "large-delayed"),
        (Self::LargeGatherKernel, "large-gather-kernel"),
        (Self::TwoRanks, "two-ranks"),
        (Self::TwoRanksDelayed, "two-ranks-delayed"),
        (Self::FourRanks, "four-ranks"),
    ];

    pub(crate) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).unwrap().1
    }

    fn named(name: &str) -> Self {
        Self::ALL.iter().find(|(_, known)| *known == name).unwrap().0
    }

    pub(crate) fn is_large(self) -> bool {
        !matches!(self, Self::Verifying | Self::Plain | Self::Delayed | Self::GatherKernel)
    }

    fn is_delayed(self) -> bool {
        matches!(self, Self::Delayed | Self::LargeDelayed | Self::TwoRanksDelayed)
    }

    fn has_kernel(self) -> bool {
        matches!(
            self,
            Self::GatherKernel | Self::LargeGatherKernel | Self::TwoRanks | Self::FourRanks
        )
    }

    /// Returns the CTAs of the NCCL communicator. The default is enough for receivers that scatter
    /// by copies, and receivers with a scatter kernel use more.
    fn nccl_max_ctas(self) -> u32 {
        if self.has_kernel() { 8 } else { 4 }
    }

    pub(crate) fn ranks(self) -> usize {
        match self {
            Self::TwoRanks | Self::TwoRanksDelayed => 2,
            Self::FourRanks => 4,
            _ => 1,
        }
    }

    /// Returns whether chunks are hashed on both sides.
    fn verifies(self) -> bool {
        matches!(self, Self::Verifying | Self::TwoRanks | Self::FourRanks)
    }

    /// Returns the KV layout: 2 MiB a block for large blocks, otherwise 256 KiB.
    fn layout(self) -> KvLayout {
        let format = KvFormat::Bf16;
        match self.is_large() {
            true => KvLayout { layer_count: 32, kv_head_count: 8, head_dim: 128, format },
            false => KvLayout { layer_count: 16, kv_head_count: 4, head_dim: 64, format },
        }
    }

    fn chunk_blocks(self) -> usize {
        if self.is_large() { 40 } else { 7 }
    }

    /// Returns the blocks of a transfer, placed by a seed.
    pub(crate) fn places(self, seed: u64, count: u32) -> Vec<BlockId> {
        match self.is_large() {
            true => in_runs(seed)[..count as usize].to_vec(),
            false => scattered(seed, count),
        }
    }
}

pub(crate) struct Node {
    pub transfers: Transfers,
    arena: Arc<KvArena>,
    pub address: PeerAddress,
    block_bytes: usize,
    /// Owns the memory of the ranks.
    _group: Option<RankGroup>,
}

impl Node {
    pub(crate) fn start(
        name: &str,
        gpu: usize,
        transport: TransferKind,
        sink: Sender<Event>,
    ) -> Self {
        Self::start_as(name, gpu, transport, NodeKind::Verifying, sink)
    }

    pub(crate) fn start_as(
        name: &str,
        gpu: usize,
        transport: TransferKind,
        kind: NodeKind,
        sink: Sender<Event>,
    ) -> Self {
        let driver = Driver::open().unwrap();
        let layout = kind.layout();
        let library = (kind.is_delayed() || kind.has_kernel()).then(|| {
            let path = env::var_os("BATON_TEST_KERNELS").map(PathBuf::from);
            Arc::new(KernelLibrary::open(path.as_deref()).unwrap())
        });
        let mut seed = DELAY_SEED + u64::from(name == PEER_NAME);
        let delays = |library: &Arc<KernelLibrary>, seed: u64| {
            println!("{name} delays its streams with seed {seed}");
            StreamDelays::new(Arc::clone(library), Duration::from_micros(500), seed)
        };
        let (blocks, group): (Arc<dyn RemoteBlocks>, _) = if kind.ranks() > 1 {
            let all = driver.devices().unwrap().len();
            let gpus: Vec<usize> = (0..kind.ranks()).map(|rank| (gpu + rank) % all).collect();
            let group = kv_group(&gpus, layout, BLOCKS);
            let kv = RankedKv::imported(layout, &group.ready_messages()).unwrap();
            match &library {
                Some(library) if kind.is_delayed() => kv.delay_streams(|| {
                    seed += 2;
                    delays(library, seed)
                }),
                Some(library) => {
                    kv.move_with(library).unwrap();
                    if name == PEER_NAME {
                        // The peer computes digests with a kernel, this process by copies.
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
            if kind == NodeKind::Verifying && name == PEER_NAME {
                // The peer computes digests with a kernel if there is one, this process by copies.
                let path = env::var_os("BATON_TEST_KERNELS").map(PathBuf::from);
                if let Ok(library) = KernelLibrary::open(path.as_deref()) {
                    kv.digest_with(Arc::new(library)).unwrap();
                }
            }
            if let Some(library) = &library {
                library.initialise(&context).unwrap();
                if kind.is_delayed() {
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
                chunk_bytes_max: kind.chunk_blocks() * layout.block_bytes(),
                ..TransferLimits::default()
            },
            transport: TransportConfig {
                choice: TransportChoice::Only(transport),
                verify: kind.verifies(),
                nccl_max_ctas: Some(kind.nccl_max_ctas()),
                ..TransportConfig::default()
            },
            host: env::var(NCCL_HOST).ok().or_else(kv_transfer::host_id),
            tls: None,
        };
        let sink = move |event| {
            // Fails once the receiver of the events is dropped.
            let _ = sink.send(event);
        };
        let transfers = Transfers::start(config, Arc::clone(&arena), sink).unwrap();
        let control_endpoint = transfers.control_endpoint().to_owned();
        let address = PeerAddress { node_id: name.to_owned(), epoch, control_endpoint };
        Self { transfers, arena, address, block_bytes: layout.block_bytes(), _group: group }
    }

    pub(crate) fn receive(&self, transfer: TransferId, peer: &PeerAddress, blocks: &[BlockId]) {
        let command = api::Command::Receive {
            transfer,
            peer: peer.clone(),
            prompt_hash: 1,
            first_block: 0,
            blocks: blocks.to_vec(),
            answer_timeout: LEASE,
            deadline: TIMEOUT,
            traceparent: String::new(),
        };
        self.transfers.command(command).unwrap();
    }

    pub(crate) fn abort(&self, transfer: TransferId) {
        let reason = "the client left".to_owned();
        self.transfers.command(api::Command::Abort { transfer, reason }).unwrap();
    }

    /// Fills every block with `bytes(block, block_bytes)`.
    pub(crate) fn fill(&self, bytes: impl Fn(BlockId, usize) -> Vec<u8>) {
        for block in (0..BLOCKS).map(BlockId) {
            let bytes = bytes(block, self.block_bytes);
            self.arena.write(block).unwrap().copy_from_host(&bytes).unwrap();
        }
    }

    pub(crate) fn assert_holds(&self, from: &[BlockId], to: &[BlockId]) {
        let mut found = vec![0; self.block_bytes];
        for (from, to) in from.iter().zip(to) {
            self.arena.read(*to).unwrap().copy_to_host(&mut found).unwrap();
            assert!(
                found == *known_pattern(*from, self.block_bytes),
                "{to:?} differs from {from:?} of the sender"
            );
        }
    }

    pub(crate) fn assert_free(&self) {
        for block in (0..BLOCKS).map(BlockId) {
            assert_eq!(self.arena.pins(block).unwrap(), 0, "{block:?}");
        }
    }

    pub(crate) fn path(&self) -> String {
        self.transfers.metrics().peers[0].path.clone()
    }

    /// Waits until the node has no peer.
    pub(crate) fn until_alone(&self) {
        let begun = Instant::now();
        while !self.transfers.metrics().peers.is_empty() {
            assert!(begun.elapsed() < TIMEOUT, "the lost peer is still connected");
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn chunks(&self) -> u64 {
        self.transfers.metrics().chunks_received
    }

    /// Waits until the node has received more than `than` chunks.
    pub(crate) fn until_more_chunks(&self, than: u64) {
        let begun = Instant::now();
        while self.chunks() <= than {
            assert!(begun.elapsed() < TIMEOUT, "no chunk received after {than}");
            thread::sleep(Duration::from_micros(100));
        }
    }
}

/// Handle of the sending process.
pub(crate) struct Peer {
    child: KilledOnDrop,
    stdin: ChildStdin,
    pub address: PeerAddress,
}

impl Peer {
    pub(crate) fn start(gpu: usize, transport: TransferKind) -> Self {
        Self::start_as(gpu, transport, NodeKind::Verifying)
    }

    pub(crate) fn start_as(gpu: usize, transport: TransferKind, kind: NodeKind) -> Self {
        Self::spawn(test_harness::helper(PEER_HELPER), gpu, transport, kind)
    }

    /// Starts a peer that claims to run on another host, so that NCCL uses its transports between
    /// hosts.
    pub(crate) fn start_elsewhere(gpu: usize, kind: NodeKind) -> Self {
        Self::start_with(gpu, kind, &[(NCCL_HOST, "elsewhere")])
    }

    /// Starts a peer with these environment variables, which NCCL reads.
    pub(crate) fn start_with(gpu: usize, kind: NodeKind, variables: &[(&str, &str)]) -> Self {
        let mut command = test_harness::helper(PEER_HELPER);
        command.envs(variables.iter().copied());
        Self::spawn(command, gpu, TransferKind::Nccl, kind)
    }

    fn spawn(mut command: Command, gpu: usize, transport: TransferKind, kind: NodeKind) -> Self {
        let child = command
            .env(PEER, format!("{gpu} {transport} {}", kind.name()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut child = KilledOnDrop(child);
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, addresses) = channel();
        // The pipe must stay open after the only message.
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Some((_, words)) = line.split_once("KV ") {
                    let _ = sender.send(words.split(' ').map(str::to_owned).collect::<Vec<_>>());
                }
            }
        });
        let Ok(words) = addresses.recv_timeout(2 * TIMEOUT) else {
            let _ = child.kill();
            panic!("the peer process has not started and was killed: {:?}", child.wait());
        };
        let address = PeerAddress {
            node_id: PEER_NAME.to_owned(),
            epoch: Epoch(u128::from_str_radix(&words[0], 16).unwrap()),
            control_endpoint: words[1].clone(),
        };
        let stdin = child.stdin.take().unwrap();
        Self { child, stdin, address }
    }

    /// Tells the peer to send `count` blocks, placed by the seed. Without `finishes` the transfer
    /// never completes.
    pub(crate) fn send(
        &mut self,
        transfer: TransferId,
        to: &Node,
        seed: u64,
        count: u32,
        finishes: bool,
    ) {
        self.send_until(transfer, to, seed, count, finishes, None);
    }

    /// Tells the peer to send, and to abort the transfer after `abort` if it is given.
    pub(crate) fn send_until(
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

    pub(crate) fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Runs the sending node of a test in a process of its own.
pub(crate) fn run_peer() {
    let setting = env::var(PEER).expect("the test sets it");
    let words: Vec<&str> = setting.split(' ').collect();
    let (gpu, kind) = (words[0].parse().unwrap(), NodeKind::named(words[2]));
    let transport = TransferKind::from_offer(words[1]).unwrap();
    let (sink, events) = channel();
    let node = Node::start_as(PEER_NAME, gpu, transport, kind, sink);
    node.fill(pattern);
    println!("KV {} {}", node.address.epoch, node.address.control_endpoint);
    // A line announces each transfer before the transfer can be ready.
    let (sender, lines) = channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    let mut known = Vec::new();
    let mut to_abort: Vec<(Instant, TransferId)> = Vec::new();
    let mut asked = Instant::now();
    // The process ends even if its parent never closes the pipe.
    while asked.elapsed() < 5 * TIMEOUT {
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
                let blocks = kind.places(words[4].parse().unwrap(), words[5].parse().unwrap());
                let abort = words[7].parse().ok().map(Duration::from_micros);
                known.push((transfer, blocks, words[6] == "true", abort));
                let command = api::Command::Send {
                    transfer,
                    peer,
                    prompt_hash: 1,
                    deadline: TIMEOUT,
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
                    let token = SampledToken { id: 1, logprobs: None, pooled: None };
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

pub(crate) fn event(events: &Receiver<Event>) -> Event {
    events.recv_timeout(TIMEOUT).expect("time-out: no event")
}
