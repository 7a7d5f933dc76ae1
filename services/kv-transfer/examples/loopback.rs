//! Measures transfers between two nodes of one machine over real sockets.
//!
//! `cargo run --release -p kv-transfer --example loopback`
//!
//! * one hop of a signed control message: half of a ping-pong of 200 bytes through the listener's
//!   and the senders' sockets, with tag and parsing;
//! * KV of 512 and 4,096 tokens in the layout of SmolLM2-135M: latency from `Written` at the sender
//!   to `Arrived` at the receiver, and bandwidth;
//! * as baselines, xxh3 alone and one TCP connection alone.

use std::{
    error::Error,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, unbounded};
use kernels::{BlockId, Dtype, KvArena, KvLayout, sampling::SampledToken};
use kv_transfer::{
    ClusterSecret, TransferConfig, TransferLimits, Transfers, TransportConfig,
    api::{Command, Epoch, Event, Identity, PeerAddress, TransferId},
    control::{Body, ControlMessage, Keys, Signer, Source, Verifier},
    testing::sockets::{self, ZapAuth},
};

type Outcome<T> = Result<T, Box<dyn Error>>;

const WAIT_TIMEOUT: Duration = Duration::from_secs(10);
const BLOCK_TOKENS: u32 = 16;

fn main() -> Outcome<()> {
    println!("bare parts");
    xxh3_alone();
    tcp_alone()?;
    println!("messages");
    hops()?;
    println!("transfers, bf16, 368,640 bytes a block");
    for tokens in [16, 512, 4096] {
        transfers(tokens, 4 << 20)?;
    }
    println!("transfers of 512 tokens by largest chunk");
    for chunk_bytes_max in [1 << 20, 2 << 20, 4 << 20, 16 << 20] {
        print!("{:>3} MiB ", chunk_bytes_max >> 20);
        transfers(512, chunk_bytes_max)?;
    }
    Ok(())
}

/// Prints p50 and tail percentiles. Returns p50.
fn percentiles(what: &str, mut times: Vec<Duration>) -> Duration {
    times.sort();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    print!("  {what}: p50 {:?}, p99 {:?} of {}", at(50), at(99), times.len());
    at(50)
}

fn rate(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

fn xxh3_alone() {
    let bytes = vec![7u8; 12 << 20];
    let times = (0..30)
        .map(|_| {
            let start = Instant::now();
            std::hint::black_box(xxhash_rust::xxh3::xxh3_64(&bytes));
            start.elapsed()
        })
        .collect();
    let p50 = percentiles("xxh3 of 12 MiB", times);
    println!(", {:.1} GB/s", rate(bytes.len(), p50));
}

fn tcp_alone() -> Outcome<()> {
    const BYTES: usize = 12 << 20;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    let (mut receiver, _) = listener.accept()?;
    let reader = thread::spawn(move || {
        let mut bytes = vec![0; BYTES];
        while receiver.read_exact(&mut bytes).is_ok() && receiver.write_all(&[1]).is_ok() {}
    });
    let bytes = vec![7u8; BYTES];
    let mut times = Vec::new();
    for _ in 0..30 {
        let start = Instant::now();
        sender.write_all(&bytes)?;
        sender.read_exact(&mut [0])?;
        times.push(start.elapsed());
    }
    drop(sender);
    reader.join().map_err(|_| "the reader panicked")?;
    let p50 = percentiles("12 MiB over one TCP connection", times);
    println!(", {:.1} GB/s", rate(BYTES, p50));
    Ok(())
}

/// One side of the ping-pong.
struct End {
    router: zmq::Socket,
    dealer: zmq::Socket,
    signer: Arc<Signer>,
    verifier: Verifier,
    peer: Epoch,
}

impl End {
    fn send(&self, message: &ControlMessage) -> Outcome<()> {
        let signed = self.signer.sign(self.peer, message)?;
        Ok(self.dealer.send_multipart([&signed.frame, &signed.tag], 0)?)
    }

    fn receive(&mut self) -> Outcome<ControlMessage> {
        self.router.poll(zmq::POLLIN, 5_000)?;
        let (parts, _) = sockets::receive(&self.router)?.ok_or("nothing came")?;
        let frames: Vec<&[u8]> = parts[1..].iter().map(|part| &part[..]).collect();
        Ok(self.verifier.verify(&frames)?.message)
    }
}

fn hops() -> Outcome<()> {
    let keys = Keys::derive(&ClusterSecret::new("the secret of this measurement")?);
    let (one, other) = (Epoch(1), Epoch(2));
    let mut ports = Vec::new();
    let mut routers = Vec::new();
    // The ZAP handler belongs to a context, so each side has its own context, as in two processes.
    for me in [one, other] {
        let context = zmq::Context::new();
        let zap = ZapAuth::open(&context, keys.clone(), me)?;
        let (router, port) = sockets::listener(&context, "127.0.0.1:0".parse()?)?;
        thread::spawn(move || {
            // Runs until the process exits.
            while zap.socket().poll(zmq::POLLIN, -1).is_ok() && zap.answer().is_ok() {}
        });
        ports.push(port);
        routers.push((context, router));
    }
    let mut ends = Vec::new();
    for ((context, router), (me, peer, port)) in
        routers.into_iter().zip([(one, other, ports[1]), (other, one, ports[0])])
    {
        let dealer =
            sockets::outbound(&context, &keys, peer, format!("127.0.0.1:{port}").parse()?)?;
        dealer.connect(&format!("tcp://127.0.0.1:{port}"))?;
        let source = Source { node_id: "node".to_owned(), epoch: me };
        ends.push(End {
            router,
            dealer,
            signer: Signer::new(keys.clone(), source),
            verifier: Verifier::new(keys.clone(), me),
            peer,
        });
    }
    // About 200 bytes when signed.
    let reason = "x".repeat(100);
    let message = ControlMessage::untraced(Body::give_up(TransferId(1), reason));
    let (mut far, mut near) = (ends.pop().ok_or("two")?, ends.pop().ok_or("two")?);
    const ROUNDS: usize = 4_000;
    let echo = thread::spawn(move || {
        for _ in 0..ROUNDS {
            let Ok(message) = far.receive() else { return };
            if far.send(&message).is_err() {
                return;
            }
        }
    });
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        near.send(&message)?;
        near.receive()?;
        times.push(start.elapsed() / 2);
    }
    echo.join().map_err(|_| "the echo panicked")?;
    percentiles("one hop of a signed message of 200 bytes", times.split_off(ROUNDS / 10));
    println!();
    Ok(())
}

struct Node {
    transfers: Transfers,
    arena: Arc<KvArena>,
    events: Receiver<Event>,
    address: PeerAddress,
}

impl Node {
    fn start(name: &str, epoch: u128, chunk_bytes_max: usize) -> Outcome<Self> {
        let layout =
            KvLayout { layer_count: 30, kv_head_count: 3, head_dim: 64, dtype: Dtype::Bf16 };
        let arena = KvArena::host(layout, 256)?;
        let (sender, events) = unbounded();
        let config = TransferConfig {
            node_id: name.to_owned(),
            epoch: Epoch(epoch),
            identity: Identity {
                model_fingerprint: 1,
                weight_version: 1,
                kv_layout: layout.to_string(),
                block_size: BLOCK_TOKENS,
                dtype: "bf16".to_owned(),
                tp: 1,
                protocol_min: 1,
                protocol_max: 1,
            },
            secret: ClusterSecret::new("the secret of this measurement")?,
            control_bind: "127.0.0.1:0".parse()?,
            data_bind: "127.0.0.1:0".parse()?,
            advertise_host: "127.0.0.1".to_owned(),
            limits: TransferLimits { chunk_bytes_max, ..TransferLimits::default() },
            transport: TransportConfig::default(),
        };
        let transfers = Transfers::start(config, Arc::clone(&arena), sender)?;
        let address = PeerAddress {
            node_id: name.to_owned(),
            epoch: Epoch(epoch),
            control_endpoint: transfers.control_endpoint().to_owned(),
        };
        Ok(Self { transfers, arena, events, address })
    }
}

fn transfers(tokens: u32, chunk_bytes_max: usize) -> Outcome<()> {
    let prefill = Node::start("prefill", 11, chunk_bytes_max)?;
    let decode = Node::start("decode", 12, chunk_bytes_max)?;
    let blocks: Vec<BlockId> = (0..tokens / BLOCK_TOKENS).map(BlockId).collect();
    let bytes = blocks.len() * prefill.arena.block_bytes();
    for block in &blocks {
        let mut block = prefill.arena.write(*block)?;
        block.host_view_mut().ok_or("host memory")?.fill(block_byte(tokens));
    }
    let (mut hand_overs, mut latencies) = (Vec::new(), Vec::new());
    for round in 0..60u32 {
        let transfer = TransferId(u128::from(round) + 1);
        let begin = Instant::now();
        prefill.transfers.command(Command::Expect {
            transfer,
            peer: decode.address.clone(),
            prompt_hash: 1,
            deadline: WAIT_TIMEOUT,
            traceparent: String::new(),
        })?;
        decode.transfers.command(Command::Receive {
            transfer,
            peer: prefill.address.clone(),
            prompt_hash: 1,
            first_block: 0,
            blocks: blocks.clone(),
            deadline: WAIT_TIMEOUT,
            traceparent: String::new(),
        })?;
        prefill.events.recv_timeout(WAIT_TIMEOUT)?;
        let written = Instant::now();
        let blocks = blocks.clone();
        prefill.transfers.command(Command::Written { transfer, first_block: 0, blocks })?;
        let token = SampledToken { id: 1, logprobs: None };
        prefill.transfers.command(Command::Finish { transfer, first_index: 0, token })?;
        match decode.events.recv_timeout(WAIT_TIMEOUT)? {
            Event::Arrived { .. } => {}
            other => return Err(format!("{other:?}").into()),
        }
        // The first rounds fault in pages and connect the pair.
        if round >= 10 {
            hand_overs.push(written.elapsed());
            latencies.push(begin.elapsed());
        }
        prefill.events.recv_timeout(WAIT_TIMEOUT)?;
    }
    let p50 = percentiles(&format!("{tokens:>4} tokens, Written to Arrived"), hand_overs);
    print!(", {:.2} GB/s;", rate(bytes, p50));
    percentiles("from Expect and Receive to Arrived", latencies);
    println!();
    prefill.transfers.shutdown()?;
    decode.transfers.shutdown()?;
    Ok(())
}

fn block_byte(tokens: u32) -> u8 {
    tokens.to_le_bytes()[0] | 1
}
