//! Behaviour that all transports share, and how two nodes agree on one.
//!
//! The GPU transports run here over fake device memory of this process. `integration-tests` runs
//! the same tests on real GPUs.

use std::{
    sync::{Arc, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

use kernels::BlockId;
use kv_transfer::{
    TransferKind, TransportChoice, TransportConfig,
    api::{Command, ConnectGuard, Epoch, Event, PeerAddress, TransferFailure, TransferId},
    config::LEASE,
};

use crate::{
    node::{Node, Reach, WAIT_TIMEOUT, blocks, fresh, run_transfer},
    stopped::until_failed,
};

fn reaching(name: &str) -> Node {
    Node::start_reaching(name, Reach::default(), TransportConfig::default())
}

fn verified(name: &str) -> Node {
    Node::start_reaching(
        name,
        Reach::default(),
        TransportConfig { verify: true, ..TransportConfig::default() },
    )
}

/// Minimum time for which a guard waits for the answer to `HELLO`.
const UNANSWERED_MIN: Duration = Duration::from_millis(500);

type Start = fn(&str) -> Node;

fn joining(name: &str) -> Node {
    Node::start_reaching(name, Reach::default(), only(TransferKind::Nccl, false))
}

fn joining_verified(name: &str) -> Node {
    Node::start_reaching(name, Reach::default(), only(TransferKind::Nccl, true))
}

fn only(kind: TransferKind, verify: bool) -> TransportConfig {
    TransportConfig { choice: TransportChoice::Only(kind), verify, ..TransportConfig::default() }
}

/// Every transport, and how to start a node that uses it.
const TRANSPORTS: [(&str, Start); 6] = [
    ("tcp", Node::start),
    ("tcp", Node::start_remote),
    ("ipc", reaching),
    ("ipc", verified),
    ("nccl", joining),
    ("nccl", joining_verified),
];

/// Transports between GPUs.
const GPU_TRANSPORTS: [TransferKind; 2] = [TransferKind::Ipc, TransferKind::Nccl];

fn path(node: &Node) -> String {
    node.transfers.metrics().peers[0].path.clone()
}

/// Blocks until `is_so` returns true; panics with `what` after the time-out.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn pinned(node: &Node, block: u32) -> bool {
    node.arena.pins(BlockId(block)).unwrap() > 0
}

/// Starts a transfer, waits for `Ready` and fills the sender's blocks.
fn begin(prefill: &Node, decode: &Node, count: u32) -> TransferId {
    let transfer = TransferId(fresh());
    decode.receive(transfer, prefill, 0, &blocks(0..count));
    prefill.expect(transfer, decode);
    assert!(matches!(prefill.event(), Event::Ready { .. }));
    prefill.compute(transfer, 0, &blocks(0..count));
    transfer
}

pub(crate) fn every_transport_preserves_contiguous_and_scattered_blocks() {
    for (kind, start) in TRANSPORTS {
        let (one, other) = (start("one"), start("other"));
        let scattered: Vec<BlockId> = (0..40).map(|index| BlockId(index * 37 % 256)).collect();
        for (from, to) in [
            (blocks(0..1), blocks(9..10)),
            (blocks(0..20), blocks(100..120)),
            (blocks(30..70), scattered.clone()),
            (scattered, blocks(0..40).into_iter().rev().collect()),
        ] {
            run_transfer(&one, &other, &from, &to);
            run_transfer(&other, &one, &to, &from);
        }
        for node in [&one, &other] {
            node.assert_free();
            let metrics = node.transfers.metrics();
            assert_eq!((path(node).as_str(), metrics.fallbacks.len()), (kind, 0));
            assert_eq!((metrics.protocol.arrived, metrics.protocol.delivered), (4, 4));
            assert_eq!(metrics.bytes_sent, metrics.bytes_received);
        }
        for node in [one, other] {
            node.transfers.shutdown().unwrap();
        }
    }
}

pub(crate) fn abort_at_any_moment_releases_all_blocks() {
    for (kind, start) in TRANSPORTS {
        let (prefill, decode) = (start("prefill"), start("decode"));
        for round in 0..40_u64 {
            let transfer = begin(&prefill, &decode, 64);
            prefill.written(transfer, 0, &blocks(0..64));
            let side = if round % 2 == 0 { &prefill } else { &decode };
            std::thread::sleep(Duration::from_micros(round * 50));
            let reason = "the client disconnected".to_owned();
            side.transfers.command(Command::Abort { transfer, reason }).unwrap();
            let failed = decode.event();
            assert!(matches!(failed, Event::ReceiveFailed { .. }), "{kind}: {failed:?}");
            decode.assert_free();
            let failed = prefill.event();
            assert!(matches!(failed, Event::SendFailed { .. }), "{kind}: {failed:?}");
            prefill.assert_free();
        }
        // The pair is still usable.
        run_transfer(&prefill, &decode, &blocks(0..20), &blocks(100..120));
    }
}

pub(crate) fn leaving_peer_releases_the_blocks_of_the_other_side() {
    for (kind, start) in TRANSPORTS {
        for decode_leaves in [true, false] {
            let (prefill, decode) = (start("prefill"), start("decode"));
            let transfer = begin(&prefill, &decode, 64);
            prefill.written(transfer, 0, &blocks(0..40));
            let (stays, leaves) =
                if decode_leaves { (&prefill, &decode) } else { (&decode, &prefill) };
            leaves.transfers.shutdown().unwrap();
            leaves.assert_free();
            let failed = stays.event();
            assert!(
                matches!(failed, Event::SendFailed { .. } | Event::ReceiveFailed { .. }),
                "{kind}: {failed:?}"
            );
            stays.assert_free();
        }
    }
}

pub(crate) fn transport_follows_the_settings_of_both_nodes() {
    let on = |host: Option<&str>, choice| {
        let transport = TransportConfig { choice, ..TransportConfig::default() };
        Node::start_reaching_on(host, "a node", Reach::default(), transport)
    };
    let with = |choice| on(Some("here"), choice);
    let [tcp, ipc, nccl] = TransferKind::ALL.map(TransportChoice::Only);
    for (one, other, kind) in [
        (with(TransportChoice::Auto), with(ipc), "ipc"),
        (with(TransportChoice::Auto), with(nccl), "nccl"),
        (with(TransportChoice::Auto), with(TransportChoice::Auto), "ipc"),
        (with(nccl), with(ipc), "tcp"),
        (with(tcp), with(TransportChoice::Auto), "tcp"),
        (with(ipc), with(tcp), "tcp"),
        (with(ipc), Node::start("on a CPU"), "tcp"),
        (Node::start_remote("elsewhere"), with(TransportChoice::Auto), "tcp"),
        (with(nccl), on(Some("there"), nccl), "nccl"),
        (with(nccl), on(None, nccl), "nccl"),
        (with(nccl), on(Some("there"), TransportChoice::Auto), "tcp"),
        (with(ipc), on(Some("there"), ipc), "tcp"),
        (with(TransportChoice::Auto), on(Some("there"), TransportChoice::Auto), "tcp"),
    ] {
        run_transfer(&one, &other, &blocks(0..20), &blocks(100..120));
        run_transfer(&other, &one, &blocks(0..20), &blocks(100..120));
        for node in [&one, &other] {
            assert_eq!(path(node), kind);
            assert_eq!(node.transfers.metrics().fallbacks.len(), 0);
        }
    }
}

/// Between hosts with RDMA adapters `auto` chooses `nccl`, unless its probe transfer is slow. A set
/// transport is used at any rate.
pub(crate) fn auto_uses_nccl_between_hosts_if_its_probe_is_fast() {
    let fast = || Reach::default();
    let slow = || Reach { probed_rate: 5_100_000_000, ..Reach::default() };
    let on = |host, reach, choice, has_rdma| {
        let transport = TransportConfig { choice, has_rdma, ..TransportConfig::default() };
        Node::start_reaching_on(Some(host), "a node", reach, transport)
    };
    let (auto, nccl) = (TransportChoice::Auto, TransportChoice::Only(TransferKind::Nccl));
    for (one, other, kind, fallbacks) in [
        (on("here", fast(), auto, true), on("there", fast(), auto, true), "nccl", vec![]),
        (on("here", fast(), auto, true), on("there", fast(), nccl, false), "nccl", vec![]),
        (on("here", fast(), auto, true), on("there", fast(), auto, false), "tcp", vec![]),
        (on("here", slow(), auto, true), on("there", slow(), auto, true), "tcp", vec![("nccl", 1)]),
        (on("here", slow(), nccl, true), on("there", slow(), nccl, true), "nccl", vec![]),
        (on("here", fast(), auto, true), Node::start("on a CPU"), "tcp", vec![]),
    ] {
        run_transfer(&one, &other, &blocks(0..20), &blocks(100..120));
        for node in [&one, &other] {
            let metrics = node.transfers.metrics();
            assert_eq!(path(node), kind);
            assert_eq!(metrics.fallbacks.into_iter().collect::<Vec<_>>(), fallbacks);
        }
        // The transfer is too short to be measured, so the rate is that of the probe.
        let rate = other.transfers.metrics().peers[0].receive_rate;
        assert_eq!(rate > 0, kind == "nccl", "{rate} bytes/s by {kind}");
    }
}

pub(crate) fn unreachable_memory_falls_back_to_tcp_and_is_counted() {
    for kind in GPU_TRANSPORTS {
        let no = Some("no peer access");
        let reach = Reach { refused: no, apart: no, ..Reach::default() };
        let apart = Node::start_reaching("apart", reach, only(kind, false));
        let near = Node::start_reaching("near", Reach::default(), only(kind, false));
        run_transfer(&near, &apart, &blocks(0..20), &blocks(100..120));
        run_transfer(&near, &apart, &blocks(0..20), &blocks(100..120));
        for node in [&near, &apart] {
            let metrics = node.transfers.metrics();
            assert_eq!(metrics.fallbacks.into_iter().collect::<Vec<_>>(), [(kind.name(), 1)]);
            assert_eq!(path(node), "tcp");
            node.assert_free();
        }
        // The opposite direction works.
        run_transfer(&apart, &near, &blocks(0..20), &blocks(100..120));
        assert_eq!(apart.transfers.metrics().fallbacks[kind.name()], 1);
    }
}

pub(crate) fn failed_transport_falls_back_to_the_next_common_one_before_tcp() {
    let no = Some("not here");
    let refusing = Reach { refused: no, ..Reach::default() };
    let apart = Reach { apart: no, ..Reach::default() };
    let neither = Reach { refused: no, apart: no, ..Reach::default() };
    for (choice, reach, failed, kind) in [
        (TransportChoice::Auto, refusing.clone(), vec!["ipc"], "nccl"),
        // A node never uses a transport that its settings exclude.
        (TransportChoice::Only(TransferKind::Nccl), apart, vec!["nccl"], "tcp"),
        (TransportChoice::Only(TransferKind::Ipc), refusing, vec!["ipc"], "tcp"),
        (TransportChoice::Auto, neither, vec!["ipc", "nccl"], "tcp"),
    ] {
        let prefill = Node::start_reaching("prefill", Reach::default(), TransportConfig::default());
        let transport = TransportConfig { choice, ..TransportConfig::default() };
        let decode = Node::start_reaching("decode", reach, transport);
        run_transfer(&prefill, &decode, &blocks(0..20), &blocks(100..120));
        for node in [&prefill, &decode] {
            let fallbacks = node.transfers.metrics().fallbacks;
            assert_eq!(fallbacks.keys().copied().collect::<Vec<_>>(), failed, "{kind}");
            assert_eq!(path(node), kind);
        }
    }
}

/// A node does not try transports that it cannot use, and counts no fallback for them.
pub(crate) fn unusable_transport_counts_as_no_fallback() {
    let without = [
        Reach { unloaded: Some("no library"), ..Reach::default() },
        Reach { channelless: true, ..Reach::default() },
    ];
    for reach in without {
        let prefill = Node::start_reaching("prefill", reach, TransportConfig::default());
        let refusing = Reach { refused: Some("not here"), ..Reach::default() };
        let decode = Node::start_reaching("decode", refusing, TransportConfig::default());
        run_transfer(&prefill, &decode, &blocks(0..20), &blocks(100..120));
        for node in [&prefill, &decode] {
            let fallbacks = node.transfers.metrics().fallbacks;
            assert_eq!(fallbacks.into_iter().collect::<Vec<_>>(), [("ipc", 1)]);
            assert_eq!(path(node), "tcp");
        }
    }
}

/// A peer that exits while it joins the communicator does not show that the transport fails.
pub(crate) fn peer_lost_while_joining_counts_as_no_fallback() {
    for sender_leaves in [true, false] {
        let absent = Reach { hangs: true, ..Reach::default() };
        let reach = Reach::default();
        let prefill = Node::start_reaching("prefill", absent, only(TransferKind::Nccl, false));
        let decode = Node::start_reaching("decode", reach.clone(), only(TransferKind::Nccl, false));
        let peer = decode.address.clone();
        prefill.transfers.command(Command::Connect { peer, sends: true, guard: None }).unwrap();
        until("the receiver waits for the sender", || reach.joining.load(Ordering::Acquire) == 1);
        let (leaves, stays) = if sender_leaves { (&prefill, &decode) } else { (&decode, &prefill) };
        leaves.transfers.shutdown().unwrap();
        // The time-out is much shorter than the time after which an idle pair is closed.
        until("the pair is over", || stays.transfers.metrics().peers.is_empty());
        for node in [leaves, stays] {
            assert_eq!(node.transfers.metrics().fallbacks.len(), 0, "{sender_leaves}");
        }
    }
}

/// A node that waits for its peer to join learns of the failure long before the time-out.
pub(crate) fn failed_join_is_reported_to_the_waiting_peer() {
    let failing = || Reach { fails: Some("out of memory"), ..Reach::default() };
    for (sender, receiver) in [(failing(), Reach::default()), (Reach::default(), failing())] {
        let prefill = Node::start_reaching("prefill", sender, only(TransferKind::Nccl, false));
        let decode = Node::start_reaching("decode", receiver, only(TransferKind::Nccl, false));
        // A receiver that kept waiting would block the next connection for a lease and lose the
        // pair.
        run_transfer(&prefill, &decode, &blocks(0..20), &blocks(100..120));
        assert_eq!((path(&prefill).as_str(), path(&decode).as_str()), ("tcp", "tcp"));
        assert_eq!(prefill.transfers.metrics().fallbacks["nccl"], 1);
        assert_eq!(decode.transfers.metrics().fallbacks["nccl"], 1);
    }
}

/// Connects the node to a peer. The returned guard has owners until the two are connected.
fn connect(node: &Node, peer: PeerAddress, sends: bool) -> Weak<impl Sized> {
    let guard = Arc::new(());
    let held = Arc::downgrade(&guard);
    let guard: ConnectGuard = guard;
    node.transfers.command(Command::Connect { peer, sends, guard: Some(guard) }).unwrap();
    held
}

/// When the guard is dropped, the GPU connection is ready, so the first transfer does not wait for
/// it.
pub(crate) fn nodes_connect_before_the_first_transfer() {
    for kind in GPU_TRANSPORTS {
        let reach = Reach::default();
        let prefill = Node::start_reaching("prefill", Reach::default(), only(kind, false));
        let decode = Node::start_reaching("decode", reach.clone(), only(kind, false));
        let start = Instant::now();
        let held = [
            connect(&prefill, decode.address.clone(), true),
            connect(&decode, prefill.address.clone(), false),
        ];
        until("both are connected", || held.iter().all(|held| held.strong_count() == 0));
        let took = start.elapsed();
        let reached = || reach.reached.load(Ordering::Acquire);
        // On a busy machine the guard may time out before the nodes are connected.
        let in_time = reached() == 1;
        assert!(in_time || took >= UNANSWERED_MIN, "over after {took:?}, and no connection");
        until("the receiver has reached the sender", || reached() == 1);
        run_transfer(&prefill, &decode, &blocks(0..20), &blocks(100..120));
        assert_eq!((path(&decode).as_str(), reached()), (kind.name(), 1));
        // Connecting again creates nothing.
        let held = connect(&prefill, decode.address.clone(), true);
        until("they are connected", || held.strong_count() == 0);
    }
}

pub(crate) fn connect_guard_is_dropped_if_the_peer_does_not_answer() {
    let wait_for_drop = |node: &Node, peer: PeerAddress| {
        let start = Instant::now();
        let held = connect(node, peer, true);
        until("the guard is dropped", || held.strong_count() == 0);
        let took = start.elapsed();
        assert!(took >= UNANSWERED_MIN, "dropped while an answer was still likely: {took:?}");
    };
    // A listener that accepts connections and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let control_endpoint = format!("tcp://{}", silent.local_addr().unwrap());
    let (node_id, epoch) = ("silent".to_owned(), Epoch(fresh()));
    wait_for_drop(&reaching("prefill"), PeerAddress { node_id, epoch, control_endpoint });

    let (hangs, other) = (Reach { hangs: true, ..Reach::default() }, Reach::default());
    let prefill = Node::start_reaching("prefill", hangs, only(TransferKind::Nccl, false));
    let decode = Node::start_reaching("decode", other, only(TransferKind::Nccl, false));
    wait_for_drop(&prefill, decode.address.clone());

    // With `tcp` alone the guard is dropped at once.
    let (prefill, decode) = (Node::start("prefill"), Node::start("decode"));
    let held = connect(&prefill, decode.address.clone(), true);
    until("the guard is dropped", || held.strong_count() == 0);
}

pub(crate) fn connecting_in_advance_creates_no_tcp_pair() {
    let (prefill, decode) = (Node::start("prefill"), Node::start("decode"));
    let peer = decode.address.clone();
    prefill.transfers.command(Command::Connect { peer, sends: true, guard: None }).unwrap();
    // Commands are handled in order, so after the transfer the connect command has been handled.
    let third = Node::start("third");
    run_transfer(&prefill, &third, &blocks(0..20), &blocks(100..120));
    assert_eq!(prefill.transfers.metrics().peers.len(), 1);
}

pub(crate) fn preconnected_pairs_are_bounded() {
    let prefill = reaching("prefill");
    let others: Vec<Node> = (0..6).map(|_| reaching("decode")).collect();
    for other in &others {
        let peer = other.address.clone();
        prefill.transfers.command(Command::Connect { peer, sends: true, guard: None }).unwrap();
    }
    // A transfer works with a connected peer and with the last peer, which is not connected.
    for other in [&others[0], &others[5]] {
        run_transfer(&prefill, other, &blocks(0..20), &blocks(100..120));
    }
    assert_eq!(prefill.transfers.metrics().peers.len(), 5);
}

fn blocks_stay_held(kind: TransferKind, decode_aborts: bool) {
    let reach = Reach::default();
    reach.open.store(false, Ordering::Release);
    let prefill = Node::start_reaching("prefill", Reach::default(), only(kind, false));
    let decode = Node::start_reaching("decode", reach.clone(), only(kind, false));
    // One chunk.
    let transfer = begin(&prefill, &decode, 8);
    let begun = Instant::now();
    prefill.written(transfer, 0, &blocks(0..8));
    until("the copy begins", || reach.begun.load(Ordering::Acquire) == 1);
    let side = if decode_aborts { &decode } else { &prefill };
    let reason = "the client disconnected".to_owned();
    side.transfers.command(Command::Abort { transfer, reason }).unwrap();
    // A wrong release would happen within this time.
    std::thread::sleep(Duration::from_millis(200));
    let (written, read) = (pinned(&decode, 7), pinned(&prefill, 7));
    let silent = decode.events.is_empty() && prefill.events.is_empty();
    // On a busy machine the pair's lease may have ended, which releases blocks.
    let lease_holds = begun.elapsed() < LEASE / 2;
    reach.open.store(true, Ordering::Release);
    if lease_holds {
        assert!(written, "blocks being written stay held");
        assert!(read, "blocks being read stay held");
        assert!(silent);
    }
    assert!(matches!(decode.event(), Event::ReceiveFailed { .. }));
    assert!(matches!(prefill.event(), Event::SendFailed { .. }));
    decode.assert_free();
    prefill.assert_free();
    run_transfer(&prefill, &decode, &blocks(0..20), &blocks(100..120));
}

pub(crate) fn blocks_stay_held_while_a_copy_is_in_flight() {
    for (kind, decode_aborts) in GPU_TRANSPORTS.into_iter().flat_map(|it| [(it, true), (it, false)])
    {
        blocks_stay_held(kind, decode_aborts);
    }
}

pub(crate) fn hung_copy_fails_after_a_lease_and_delays_no_other_pair() {
    let reach = Reach::default();
    reach.open.store(false, Ordering::Release);
    let prefill = reaching("prefill");
    let stuck = Node::start_reaching("stuck", reach.clone(), TransportConfig::default());
    let other = reaching("other");
    let transfer = begin(&prefill, &stuck, 8);
    prefill.written(transfer, 0, &blocks(0..8));
    until("the copy begins", || reach.begun.load(Ordering::Acquire) == 1);
    let (_, count) = until_failed(&prefill, &other, transfer);
    assert!(count >= 1, "the other pair waited for the stuck pair");
    prefill.assert_free();
    // Blocks that may still be written stay held after the pair is lost.
    assert!(pinned(&stuck, 7));
    reach.open.store(true, Ordering::Release);
    assert!(matches!(stuck.event(), Event::ReceiveFailed { .. }));
    stuck.assert_free();
}

/// The peer's GPU never launches its half: aborting the communicator releases the blocks, and the
/// next transfer creates a new communicator.
pub(crate) fn nccl_operation_without_its_peer_is_aborted() {
    let reach = Reach::default();
    let prefill = Node::start_reaching("prefill", reach.clone(), only(TransferKind::Nccl, false));
    let decode = Node::start_reaching("decode", Reach::default(), only(TransferKind::Nccl, false));
    run_transfer(&prefill, &decode, &blocks(0..20), &blocks(100..120));
    reach.open.store(false, Ordering::Release);
    let transfer = begin(&prefill, &decode, 8);
    prefill.written(transfer, 0, &blocks(0..8));
    assert!(matches!(prefill.event(), Event::SendFailed { .. }));
    assert!(matches!(decode.event(), Event::ReceiveFailed { .. }));
    prefill.assert_free();
    decode.assert_free();
    // A transfer that starts before both nodes have dropped the pair is lost with it.
    let has_lost_it = |node: &&Node| node.transfers.metrics().peers.is_empty();
    until("both lose the pair", || [&prefill, &decode].iter().all(has_lost_it));
    reach.open.store(true, Ordering::Release);
    run_transfer(&prefill, &decode, &blocks(0..20), &blocks(100..120));
}

/// A sender whose sends complete early does not make the receiver exceed its bound.
pub(crate) fn nccl_operations_in_flight_are_bounded() {
    let reach = Reach::default();
    reach.open.store(false, Ordering::Release);
    let hasty = Reach { hasty: true, ..Reach::default() };
    let prefill = Node::start_reaching("prefill", hasty, only(TransferKind::Nccl, false));
    let decode = Node::start_reaching("decode", reach.clone(), only(TransferKind::Nccl, false));
    // Twelve chunks.
    let transfer = begin(&prefill, &decode, 96);
    prefill.written(transfer, 0, &blocks(0..96));
    let begun = || reach.begun.load(Ordering::Acquire);
    // On a very slow machine the transfer fails first.
    until("operations begin", || begun() >= 8 || !decode.events.is_empty());
    // An operation beyond the bound would start within this time.
    std::thread::sleep(Duration::from_millis(200));
    assert!(begun() <= 8, "{} are in flight", begun());
    reach.open.store(true, Ordering::Release);
}

pub(crate) fn corruption_is_detected_if_either_side_verifies() {
    for (kind, receiver_asks) in GPU_TRANSPORTS.into_iter().flat_map(|it| [(it, true), (it, false)])
    {
        let transport = |verify| only(kind, verify);
        let damaging = Reach { damages: true, ..Reach::default() };
        let prefill = Node::start_reaching("prefill", Reach::default(), transport(!receiver_asks));
        let decode = Node::start_reaching("decode", damaging, transport(receiver_asks));
        let transfer = begin(&prefill, &decode, 8);
        prefill.written(transfer, 0, &blocks(0..8));
        prefill.finish(transfer);
        let failed = decode.event();
        let Event::ReceiveFailed { failure, .. } = failed else { panic!("{failed:?}") };
        assert_eq!(failure, TransferFailure::Damaged { chunk: 0 });
        decode.assert_free();
    }
}
