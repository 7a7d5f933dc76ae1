//! KV between GPUs, by every carrier that needs them, between this process and another: this program
//! again, which sends. With one GPU both processes are on it.

use std::{
    env,
    io::{BufRead, BufReader, Write},
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
    cuda::{Context, DeviceKv, Driver},
    sampling::SampledToken,
};
use kv_transfer::{
    Carrier, Carriers, Choice, ClusterSecret, Limits, TransferConfig, Transfers,
    api::{self, Epoch, Event, Identity, PeerAddress, TransferId},
    notice,
};

use super::bench::short;

/// Any wait; far beyond what anything takes.
const PATIENCE: Duration = Duration::from_secs(60);
const BLOCKS: u32 = 96;
/// In the environment of the other process: its GPU's index, and the carrier.
const PEER: &str = "BATON_TEST_LINKS_PEER";

/// What is tested: each needs GPUs.
const CARRIERS: [Carrier; 2] = [Carrier::Ipc, Carrier::Nccl];

/// 256 KiB a block.
fn layout() -> KvLayout {
    KvLayout { layer_count: 16, kv_head_count: 4, head_dim: 64, dtype: Dtype::Bf16 }
}

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

fn pattern(block: BlockId) -> Vec<u8> {
    let mut state = u64::from(block.0) ^ 0x9e37_79b9_7f4a_7c15;
    let mut bytes = Vec::with_capacity(layout().block_bytes());
    while bytes.len() < layout().block_bytes() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        bytes.extend_from_slice(&state.to_be_bytes());
    }
    bytes
}

/// Where a transfer's blocks lie at either side: apart, together, and mixed.
fn scattered(seed: u64, count: u32) -> Vec<BlockId> {
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

struct Node {
    transfers: Transfers,
    arena: Arc<KvArena>,
    address: PeerAddress,
}

impl Node {
    fn start(name: &str, gpu: usize, carrier: Carrier, sink: Sender<Event>) -> Self {
        let driver = Driver::open().unwrap();
        let device = driver.device_named(&gpu.to_string()).unwrap();
        let context = Context::new(driver, device).unwrap();
        let kv = DeviceKv::new(&context, layout(), BLOCKS).unwrap();
        let arena = KvArena::remote(kv).unwrap();
        static STARTED: AtomicU64 = AtomicU64::new(1);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let epoch = Epoch(u128::from(std::process::id()) << 64 | u128::from(number));
        let config = TransferConfig {
            node_id: name.to_owned(),
            epoch,
            identity: Identity {
                model_fingerprint: 1,
                weight_version: 1,
                kv_layout: layout().to_string(),
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
            limits: Limits { chunk_bytes_max: 7 * layout().block_bytes(), ..Limits::default() },
            carriers: Carriers {
                choice: Choice::Only(carrier),
                verify: true,
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
        Self { transfers, arena, address }
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

    fn abort(&self, transfer: TransferId) {
        let reason = "the client left".to_owned();
        self.transfers.command(api::Command::Abort { transfer, reason }).unwrap();
    }

    fn fill(&self, bytes: impl Fn(BlockId) -> Vec<u8>) {
        for block in (0..BLOCKS).map(BlockId) {
            self.arena.write(block).unwrap().copy_from_host(&bytes(block)).unwrap();
        }
    }

    fn assert_holds(&self, from: &[BlockId], to: &[BlockId]) {
        let mut found = vec![0; layout().block_bytes()];
        for (from, to) in from.iter().zip(to) {
            self.arena.read(*to).unwrap().copy_to_host(&mut found).unwrap();
            assert!(found == pattern(*from), "{to:?} holds what {from:?} held");
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
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "gpu::links::peer", "--nocapture"])
            .env(PEER, format!("{gpu} {carrier}"))
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
            node_id: "peer".to_owned(),
            epoch: Epoch(u128::from_str_radix(&words[0], 16).unwrap()),
            notice_endpoint: words[1].clone(),
        };
        let stdin = child.stdin.take().unwrap();
        Self { child, stdin, address }
    }

    /// Lets it send so many blocks as they lie by this seed; `finishes`: to the end.
    fn send(&mut self, transfer: TransferId, to: &Node, seed: u64, count: u32, finishes: bool) {
        let PeerAddress { node_id, epoch, notice_endpoint } = &to.address;
        writeln!(
            self.stdin,
            "{transfer} {node_id} {epoch} {notice_endpoint} {seed} {count} {finishes}"
        )
        .unwrap();
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
    let (gpu, carrier) = setting.split_once(' ').unwrap();
    let carrier = Carrier::offered(carrier).unwrap();
    let (sink, events) = channel();
    let node = Node::start("peer", gpu.parse().unwrap(), carrier, sink);
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
    let start = Instant::now();
    // Never left behind, whatever becomes of the parent.
    while start.elapsed() < 5 * PATIENCE {
        match lines.recv_timeout(Duration::from_micros(200)) {
            Ok(line) => {
                let words: Vec<&str> = line.split(' ').collect();
                let transfer = TransferId(u128::from_str_radix(words[0], 16).unwrap());
                let peer = PeerAddress {
                    node_id: words[1].to_owned(),
                    epoch: Epoch(u128::from_str_radix(words[2], 16).unwrap()),
                    notice_endpoint: words[3].to_owned(),
                };
                let blocks = scattered(words[4].parse().unwrap(), words[5].parse().unwrap());
                known.push((transfer, blocks, words[6] == "true"));
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
                let (_, blocks, finishes) = known.swap_remove(index);
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
    }
}

fn event(events: &Receiver<Event>) -> Event {
    events.recv_timeout(PATIENCE).expect("an event comes")
}

#[test]
fn kv_of_another_process_arrives_as_it_was_however_it_lies() {
    let Some((gpus, _alone)) = gpus() else { return };
    for carrier in CARRIERS {
        for (from, to) in pairs(carrier, gpus) {
            let mut peer = Peer::start(from, carrier);
            let (sink, events) = channel();
            let node = Node::start("node", to, carrier, sink);
            for seed in 0..if short() { 2 } else { 12 } {
                // What was there before is not what comes.
                node.fill(|_| vec![seed as u8; layout().block_bytes()]);
                let (count, transfer) =
                    ([1, 7, 8, 50, 96][seed as usize % 5], TransferId(seed.into()));
                let places = scattered(seed / 2 + 100, count);
                peer.send(transfer, &node, seed, count, true);
                node.receive(transfer, &peer.address, &places);
                let arrived = event(&events);
                assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
                node.assert_holds(&scattered(seed, count), &places);
            }
            node.assert_free();
            let metrics = node.transfers.metrics();
            assert_eq!((node.path().as_str(), metrics.fallbacks.len()), (carrier.name(), 0));
            println!("{carrier} from GPU {from} to GPU {to}: {} chunks", metrics.chunks_received);
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
    for carrier in CARRIERS {
        let Some((from, to)) = pairs(carrier, gpus).pop() else { continue };
        let (sink, events) = channel();
        let node = Node::start("node", to, carrier, sink);
        for round in 0..if short() { 2 } else { 3_u64 } {
            let mut peer = Peer::start(from, carrier);
            let transfer = TransferId(round.into());
            peer.send(transfer, &node, 1, 96, false);
            node.receive(transfer, &peer.address, &scattered(1, 96));
            thread::sleep(Duration::from_micros(round * 800));
            peer.kill();
            let failed = event(&events);
            assert!(matches!(failed, Event::ReceiveFailed { .. }), "{failed:?}");
            node.assert_free();
        }
        // The GPU, and this process on it, are as they were.
        let mut peer = Peer::start(from, carrier);
        let transfer = TransferId(1000);
        peer.send(transfer, &node, 1, 96, true);
        node.receive(transfer, &peer.address, &scattered(3, 96));
        let arrived = event(&events);
        assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
        node.assert_holds(&scattered(1, 96), &scattered(3, 96));
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
