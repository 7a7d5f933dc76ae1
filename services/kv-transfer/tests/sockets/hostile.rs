//! Invalid input on both ports, from strangers and from peers that know the cluster secret.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kv_transfer::{
    ClusterSecret, TransferKind, TransportChoice, TransportConfig,
    api::{Epoch, Peer, TransferId},
    config::TCP_CONNECTIONS_MAX,
    control::{Body, ControlMessage, Credential, Hello, Keys, Sealer},
};
use test_harness::noise;

use crate::node::{Node, Reach, SECRET, WAIT_TIMEOUT, blocks, fresh, identity, run_transfer};

/// Far longer than the attack takes on a busy machine.
const ATTACK_TIMEOUT: Duration = Duration::from_secs(120);

fn keys() -> Keys {
    Keys::derive(&ClusterSecret::new(SECRET).unwrap())
}

fn host(endpoint: &str) -> &str {
    endpoint.strip_prefix("tcp://").unwrap()
}

/// Waits until the node has counted a rejection.
fn refused(node: &Node, reason: &str) {
    let start = Instant::now();
    loop {
        let metrics = node.transfers.metrics();
        let counts = [metrics.control_refused, metrics.data_refused];
        if counts.iter().any(|counts| counts.get(reason).is_some_and(|count| *count > 0)) {
            return;
        }
        assert!(start.elapsed() < WAIT_TIMEOUT, "no {reason} in {counts:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the ZMTP 3.1 greeting of a client with this mechanism.
fn greeting(mechanism: &[u8]) -> Vec<u8> {
    let mut greeting = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1];
    greeting.extend_from_slice(mechanism);
    greeting.resize(64, 0);
    greeting
}

/// Runs hostile clients one after another until told to stop, and counts them.
fn attack_until_stopped(
    endpoint: String,
    stop: Arc<AtomicBool>,
    attacks: Arc<AtomicUsize>,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let (mut held, mut count) = (Vec::new(), 0);
        while !stop.load(Ordering::Relaxed) {
            let Ok(mut stream) = TcpStream::connect(host(&endpoint)) else { continue };
            stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
            // Header of a long-form frame of 2^62 bytes.
            let huge = [&[2, 0x40][..], &[0; 7]].concat();
            let attack: Vec<u8> = match count % 6 {
                0 => noise(count, 300),
                1 => [greeting(b"NULL"), huge].concat(),
                2 => [greeting(b"PLAIN"), huge].concat(),
                3 => greeting(b"PLAIN")[..20].to_vec(),
                4 => [b"BATONKV2".to_vec(), noise(count, 400)].concat(),
                _ => Vec::new(),
            };
            // The node may have closed the connection already.
            let _ = stream.write_all(&attack);
            count += 1;
            attacks.fetch_add(1, Ordering::Relaxed);
            // Some clients stay connected and send nothing more.
            held.push(stream);
            if held.len() > 60 {
                held.drain(..30);
            }
            thread::sleep(Duration::from_millis(1));
        }
    })
}

pub(crate) fn garbage_on_both_ports_disturbs_no_transfer() {
    let (prefill, decode) = (Node::start("prefill"), Node::start("decode"));
    // The pair is connected before the attack; a new pair must connect during it, below.
    run_transfer(&prefill, &decode, &blocks(0..64), &blocks(0..64));
    let (stop, attacks) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let attackers: Vec<_> = [&prefill, &decode]
        .iter()
        .flat_map(|node| [node.transfers.control_endpoint(), node.transfers.data_endpoint()])
        .map(|endpoint| attack_until_stopped(endpoint.to_owned(), stop.clone(), attacks.clone()))
        .collect();
    // A transfer that is delayed for a lease would fail.
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 50 || attacks.load(Ordering::Relaxed) < 1000 {
        times.push(run_transfer(&prefill, &decode, &blocks(0..64), &blocks(0..64)));
        assert!(start.elapsed() < ATTACK_TIMEOUT, "{} transfers, {attacks:?} attacks", times.len());
    }
    let late = Node::start("late");
    let first = run_transfer(&prefill, &late, &blocks(0..64), &blocks(0..64));
    stop.store(true, Ordering::Relaxed);
    attackers.into_iter().for_each(|thread| thread.join().unwrap());
    times.sort();
    let (p50, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    println!(
        "{} transfers of 1 MiB during {} attacks: p50 {p50:?}, p99 {p99:?}; new pair {first:?}",
        times.len(),
        attacks.load(Ordering::Relaxed),
    );
    refused(&decode, "handshake_io");
}

pub(crate) fn zap_blocks_frames_of_unauthenticated_peers() {
    let node = Node::start("node");
    let context = zmq::Context::new();
    for password in [None, Some("guess"), Some("0".repeat(64).as_str())] {
        let dealer = context.socket(zmq::DEALER).unwrap();
        dealer.set_linger(0).unwrap();
        dealer.set_immediate(true).unwrap();
        dealer.set_sndtimeo(300).unwrap();
        if let Some(password) = password {
            dealer.set_plain_username(Some("baton")).unwrap();
            dealer.set_plain_password(Some(password)).unwrap();
        }
        dealer.connect(node.transfers.control_endpoint()).unwrap();
        // An endless message would fill the memory of a receiver that accepts it.
        assert_eq!(dealer.send(vec![0; 1 << 19], zmq::SNDMORE), Err(zmq::Error::EAGAIN));
    }
    refused(&node, "zap_auth");
    assert_eq!(node.transfers.metrics().control_received, 0);
}

/// Returns a DEALER with this credential for the node.
fn dealer(context: &zmq::Context, credential: &Credential, node: &Node) -> zmq::Socket {
    let dealer = context.socket(zmq::DEALER).unwrap();
    dealer.set_linger(0).unwrap();
    dealer.set_immediate(true).unwrap();
    dealer.set_plain_username(Some(&credential.user)).unwrap();
    dealer.set_plain_password(Some(&credential.password)).unwrap();
    dealer.connect(node.transfers.control_endpoint()).unwrap();
    dealer
}

pub(crate) fn recorded_credential_is_rejected() {
    let node = Node::start("node");
    let source = Peer { node_id: "peer".to_owned(), epoch: Epoch(fresh()) };
    let credential = Sealer::new(keys(), source).credential(node.address.epoch);
    let context = zmq::Context::new();
    let first = dealer(&context, &credential, &node);
    first.send("one frame", 0).unwrap();
    refused(&node, "frames");
    let second = dealer(&context, &credential, &node);
    second.set_sndtimeo(300).unwrap();
    assert_eq!(second.send(vec![0; 1 << 19], zmq::SNDMORE), Err(zmq::Error::EAGAIN));
    refused(&node, "zap_auth");
}

pub(crate) fn zap_credential_does_not_replace_message_tags() {
    let node = Node::start("node");
    let me = node.address.epoch;
    let context = zmq::Context::new();
    let source = Peer { node_id: "peer".to_owned(), epoch: Epoch(fresh()) };
    let sealer = Sealer::new(keys(), source);
    let dealer = dealer(&context, &sealer.credential(me), &node);
    let message = ControlMessage::untraced(Body::Ack { transfer: TransferId(1) });
    let sealed = sealer.seal(me, &message).unwrap();
    for _ in 0..2 {
        dealer.send_multipart(sealed.frames(), 0).unwrap();
    }
    refused(&node, "replayed");
    let elsewhere = sealer.seal(Epoch(5), &message).unwrap();
    dealer.send_multipart(elsewhere.frames(), 0).unwrap();
    refused(&node, "epoch");
    let mut forged = sealer.seal(me, &message).unwrap();
    forged.body[0] ^= 1;
    dealer.send_multipart(forged.frames(), 0).unwrap();
    refused(&node, "tag");
    dealer.send_multipart([noise(1, 100), noise(2, 32)], 0).unwrap();
    refused(&node, "malformed");
    dealer.send("one frame", 0).unwrap();
    refused(&node, "frames");
    let many: Vec<Vec<u8>> = (0..500).map(|seed| noise(seed, 100)).collect();
    dealer.send_multipart(many, 0).unwrap();
    // Larger than the message bound: libzmq closes the connection.
    dealer.send_multipart([noise(1, 2 << 20), noise(2, 32)], 0).unwrap();
    let start = Instant::now();
    while node.transfers.metrics().control_refused["frames"] != 2 {
        assert!(start.elapsed() < WAIT_TIMEOUT, "{:?}", node.transfers.metrics().control_refused);
        thread::sleep(Duration::from_millis(5));
    }
    run_transfer(&Node::start("prefill"), &node, &blocks(0..16), &blocks(0..16));
    assert_eq!(node.transfers.metrics().control_refused["frames"], 2);
}

/// Registers `from` with the node as a peer by a HELLO.
fn send_hello(to: &Node, from: Epoch) -> (zmq::Context, zmq::Socket) {
    let hello = Body::Hello(Hello {
        identity: identity(),
        control_endpoint: "tcp://127.0.0.1:9".to_owned(),
        data_endpoint: "tcp://127.0.0.1:9".to_owned(),
        transports: vec!["tcp".to_owned()],
        integrity: vec!["xxh3+digest1".to_owned()],
        session: 1,
        in_advance: false,
    });
    // Checked by name, because another peer may be evicted at the same time.
    let name = format!("peer-{}", from.0);
    let source = Peer { node_id: name.clone(), epoch: from };
    let sealer = Sealer::new(keys(), source);
    let context = zmq::Context::new();
    let dealer = dealer(&context, &sealer.credential(to.address.epoch), to);
    let sealed = sealer.seal(to.address.epoch, &ControlMessage::untraced(hello)).unwrap();
    dealer.send_multipart(sealed.frames(), 0).unwrap();
    let start = Instant::now();
    while !to.transfers.metrics().peers.iter().any(|peer| peer.node_id == name) {
        assert!(start.elapsed() < WAIT_TIMEOUT, "{name} was not let in");
        thread::sleep(Duration::from_millis(5));
    }
    (context, dealer)
}

/// Opens an authenticated data connection to `to` as process `from`.
fn data_connection(to: &Node, from: Epoch, keys: &Keys) -> TcpStream {
    data_connection_by(b"s", to, from, keys)
}

/// Opens a data connection for the transport with this handshake label.
fn data_connection_by(label: &[u8], to: &Node, from: Epoch, keys: &Keys) -> TcpStream {
    data_connection_in(1, label, to, from, keys)
}

/// Opens a data connection of this group.
fn data_connection_in(group: u64, label: &[u8], to: &Node, from: Epoch, keys: &Keys) -> TcpStream {
    let mut stream = TcpStream::connect(host(to.transfers.data_endpoint())).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let mut greeting = [0; 40];
    stream.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..8], b"BATONKV2");
    let nonce = noise(9, 32);
    let (from, to, group) = (from.to_bytes(), to.address.epoch.to_bytes(), group.to_be_bytes());
    let tag = keys.tag_data(&[label, &greeting[8..], &nonce, &from, &to, &group]);
    stream.write_all(&[&nonce[..], &from, &to, &group, &tag].concat()).unwrap();
    stream
}

fn is_closed(stream: &mut TcpStream) -> bool {
    matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_))
}

pub(crate) fn data_connections_authenticate_and_write_only_posted_blocks() {
    let node = Node::start("node");
    let stranger = Keys::derive(&ClusterSecret::new("the secret of another cluster").unwrap());
    let mut wrong = data_connection(&node, Epoch(fresh()), &stranger);
    assert!(is_closed(&mut wrong));
    refused(&node, "handshake_tag");

    let peer = Epoch(fresh());
    let mut early = data_connection(&node, peer, &keys());
    early.read_exact(&mut [0; 32]).unwrap();
    assert!(is_closed(&mut early));
    refused(&node, "peer_not_admitted");

    let (_context, greeting) = send_hello(&node, peer);
    let mut stream = data_connection(&node, peer, &keys());
    stream.read_exact(&mut [0; 32]).unwrap();
    // A valid frame without a posted receive is skipped.
    let header = |payload_bytes: u64| {
        let mut bytes = b"BKV1".to_vec();
        bytes.extend_from_slice(&7u32.to_le_bytes());
        bytes.extend_from_slice(&TransferId(1).to_bytes());
        bytes.extend_from_slice(&payload_bytes.to_le_bytes());
        bytes.extend_from_slice(&xxhash_rust::xxh3::xxh3_64(&bytes).to_le_bytes());
        bytes
    };
    for _ in 0..3 {
        stream.write_all(&header(100_000)).unwrap();
        stream.write_all(&noise(3, 100_000)).unwrap();
    }
    refused(&node, "frame_not_posted");
    // An endless frame closes the connection.
    stream.write_all(&header(u64::MAX)).unwrap();
    assert!(is_closed(&mut stream));

    let other = Epoch(fresh());
    let _other = send_hello(&node, other);
    let mut stream = data_connection(&node, other, &keys());
    stream.read_exact(&mut [0; 32]).unwrap();
    stream.write_all(&noise(4, 400)).unwrap();
    drop(greeting);
    assert!(is_closed(&mut stream), "an invalid frame header closes the connection");
    for block in blocks(0..crate::node::BLOCK_COUNT) {
        let guard = node.arena.read(block).unwrap();
        assert!(guard.host_view().unwrap().iter().all(|byte| *byte == 0));
    }
}

pub(crate) fn group_of_connections_is_bounded_and_ends_when_a_newer_group_begins() {
    let node = Node::start("node");
    let peer = Epoch(fresh());
    let _greeting = send_hello(&node, peer);
    let connect = |group| {
        let mut stream = data_connection_in(group, b"s", &node, peer, &keys());
        stream.read_exact(&mut [0; 32]).unwrap();
        stream
    };
    let is_open = |stream: &mut TcpStream| {
        stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let read = stream.read(&mut [0; 1]);
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    let mut group: Vec<TcpStream> = (0..TCP_CONNECTIONS_MAX).map(|_| connect(2)).collect();
    assert!(is_closed(&mut connect(2)), "the group has the maximum number of connections");
    assert!(is_closed(&mut connect(1)), "the group is older");
    assert!(group.iter_mut().all(is_open));
    let mut newer = connect(3);
    assert!(group.iter_mut().all(is_closed));
    assert!(is_open(&mut newer));
}

pub(crate) fn connection_by_a_transport_that_was_not_offered_is_refused() {
    for label in [b"i", b"n"] {
        let transport = TransportConfig {
            choice: TransportChoice::Only(TransferKind::Tcp),
            ..TransportConfig::default()
        };
        let node = Node::start_reaching("node", Reach::default(), transport);
        let peer = Epoch(fresh());
        let _greeting = send_hello(&node, peer);
        let mut stream = data_connection_by(label, &node, peer, &keys());
        stream.read_exact(&mut [0; 32]).unwrap();
        // An offer of one byte, without verification.
        let (mut offer, body) = (b"BKI1".to_vec(), [0, 7]);
        offer.extend_from_slice(&1u32.to_le_bytes());
        offer.extend_from_slice(&2u32.to_le_bytes());
        let check = xxhash_rust::xxh3::xxh3_64(&[&offer[..], &body].concat());
        stream.write_all(&[&offer[..], &check.to_le_bytes(), &body].concat()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert_eq!(&answer[4..8], 3u32.to_le_bytes(), "Refused");
        let reason = String::from_utf8_lossy(&answer[20..]);
        assert!(reason.contains("does not offer"), "{reason}");
        refused(&node, "transport_not_offered");
        assert_eq!(node.transfers.metrics().fallbacks.len(), 0);
    }
}

pub(crate) fn incomplete_handshakes_time_out_and_free_their_slots() {
    let node = Node::start("node");
    let held: Vec<TcpStream> = (0..150)
        .map(|_| TcpStream::connect(host(node.transfers.data_endpoint())).unwrap())
        .collect();
    refused(&node, "handshakes_full");
    // They time out after one second; then other clients are accepted.
    for mut stream in held {
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        let _ = stream.read(&mut [0; 40]);
        assert!(is_closed(&mut stream));
    }
    run_transfer(&Node::start("prefill"), &node, &blocks(0..16), &blocks(0..16));
}
