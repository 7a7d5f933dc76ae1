//! What every transport promises, and how two nodes come to one.
//!
//! The transports between GPUs run here over memory of this process that is reached as that of a peer
//! is; with real GPUs the same is tested in `integration-tests`.

use std::{
    sync::{Arc, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

use kernels::BlockId;
use kv_transfer::{
    CONNECT_TIMEOUT, TransferKind, TransportChoice, TransportConfig,
    api::{Command, ConnectGuard, Epoch, Event, PeerAddress, TransferFailure, TransferId},
    config::LEASE,
};

use crate::node::{Node, PATIENCE, Reach, blocks, fresh, travel};

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

/// One of several tries: on a busy machine a step may take longer than the lease.
const TRIES: usize = 10;

/// A greeting without an answer is waited for no less.
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

/// Each way to carry, and how a node of it is started.
const CARRIERS: [(&str, Start); 6] = [
    ("tcp", Node::start),
    ("tcp", Node::start_remote),
    ("ipc", reaching),
    ("ipc", verified),
    ("nccl", joining),
    ("nccl", joining_verified),
];

/// Those between GPUs.
const LOCAL: [TransferKind; 2] = [TransferKind::Ipc, TransferKind::Nccl];

fn path(node: &Node) -> String {
    node.transfers.metrics().peers[0].path.clone()
}

/// Waits for something that the other side does.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn pinned(node: &Node, block: u32) -> bool {
    node.arena.pins(BlockId(block)).unwrap() > 0
}

/// Reserved and expected, up to `Ready`.
fn begin(prefill: &Node, decode: &Node, count: u32) -> TransferId {
    let transfer = TransferId(fresh());
    decode.receive(transfer, prefill, 0, &blocks(0..count));
    prefill.expect(transfer, decode);
    assert!(matches!(prefill.event(), Event::Ready { .. }));
    prefill.compute(transfer, 0, &blocks(0..count));
    transfer
}

#[test]
fn blocks_arrive_whole_whatever_carries_them_and_however_they_lie() {
    for (kind, start) in CARRIERS {
        let (one, other) = (start("one"), start("other"));
        let scattered: Vec<BlockId> = (0..40).map(|index| BlockId(index * 37 % 256)).collect();
        for (from, to) in [
            (blocks(0..1), blocks(9..10)),
            (blocks(0..20), blocks(100..120)),
            (blocks(30..70), scattered.clone()),
            (scattered, blocks(0..40).into_iter().rev().collect()),
        ] {
            travel(&one, &other, &from, &to);
            travel(&other, &one, &to, &from);
        }
        for node in [&one, &other] {
            node.assert_free();
            let metrics = node.transfers.metrics();
            assert_eq!((path(node).as_str(), metrics.fallbacks.len()), (kind, 0));
            assert_eq!((metrics.arrived, metrics.delivered), (4, 4));
            assert_eq!(metrics.bytes_sent, metrics.bytes_received);
        }
        for node in [one, other] {
            node.transfers.shutdown().unwrap();
        }
    }
}

#[test]
fn an_abort_at_any_moment_leaves_no_block_behind() {
    for (kind, start) in CARRIERS {
        let (prefill, decode) = (start("prefill"), start("decode"));
        for round in 0..40_u64 {
            let transfer = begin(&prefill, &decode, 64);
            prefill.written(transfer, 0, &blocks(0..64));
            let side = if round % 2 == 0 { &prefill } else { &decode };
            std::thread::sleep(Duration::from_micros(round * 50));
            let reason = "the client left".to_owned();
            side.transfers.command(Command::Abort { transfer, reason }).unwrap();
            let failed = decode.event();
            assert!(matches!(failed, Event::ReceiveFailed { .. }), "{kind}: {failed:?}");
            decode.assert_free();
            let failed = prefill.event();
            assert!(matches!(failed, Event::SendFailed { .. }), "{kind}: {failed:?}");
            prefill.assert_free();
        }
        // The pair has lived through all of it.
        travel(&prefill, &decode, &blocks(0..20), &blocks(100..120));
    }
}

#[test]
fn a_peer_that_leaves_lets_the_other_have_its_blocks_back() {
    for (kind, start) in CARRIERS {
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

#[test]
fn the_setting_and_the_other_node_decide_what_carries() {
    let with = |choice| {
        let transport = TransportConfig { choice, ..TransportConfig::default() };
        Node::start_reaching("a node", Reach::default(), transport)
    };
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
    ] {
        travel(&one, &other, &blocks(0..20), &blocks(100..120));
        travel(&other, &one, &blocks(0..20), &blocks(100..120));
        for node in [&one, &other] {
            assert_eq!(path(node), kind);
            assert_eq!(node.transfers.metrics().fallbacks.len(), 0);
        }
    }
}

#[test]
fn where_memory_cannot_be_reached_kv_goes_by_tcp_and_that_is_counted() {
    for kind in LOCAL {
        let no = Some("no peer access");
        let reach = Reach { refused: no, apart: no, ..Reach::default() };
        let apart = Node::start_reaching("apart", reach, only(kind, false));
        let near = Node::start_reaching("near", Reach::default(), only(kind, false));
        travel(&near, &apart, &blocks(0..20), &blocks(100..120));
        travel(&near, &apart, &blocks(0..20), &blocks(100..120));
        for node in [&near, &apart] {
            let metrics = node.transfers.metrics();
            assert_eq!(metrics.fallbacks.into_iter().collect::<Vec<_>>(), [(kind.name(), 1)]);
            assert_eq!(path(node), "tcp");
            node.assert_free();
        }
        // The other way it can.
        travel(&apart, &near, &blocks(0..20), &blocks(100..120));
        assert_eq!(apart.transfers.metrics().fallbacks[kind.name()], 1);
    }
}

#[test]
fn where_one_carrier_fails_the_next_that_both_offer_is_tried_before_tcp() {
    let no = Some("not here");
    let refusing = Reach { refused: no, ..Reach::default() };
    let apart = Reach { apart: no, ..Reach::default() };
    let neither = Reach { refused: no, apart: no, ..Reach::default() };
    for (choice, reach, failed, kind) in [
        (TransportChoice::Auto, refusing.clone(), vec!["ipc"], "nccl"),
        // Whoever has excluded a transport does not use it, whatever the other would do.
        (TransportChoice::Only(TransferKind::Nccl), apart, vec!["nccl"], "tcp"),
        (TransportChoice::Only(TransferKind::Ipc), refusing, vec!["ipc"], "tcp"),
        (TransportChoice::Auto, neither, vec!["ipc", "nccl"], "tcp"),
    ] {
        let prefill = Node::start_reaching("prefill", Reach::default(), TransportConfig::default());
        let transport = TransportConfig { choice, ..TransportConfig::default() };
        let decode = Node::start_reaching("decode", reach, transport);
        travel(&prefill, &decode, &blocks(0..20), &blocks(100..120));
        for node in [&prefill, &decode] {
            let fallbacks = node.transfers.metrics().fallbacks;
            assert_eq!(fallbacks.keys().copied().collect::<Vec<_>>(), failed, "{kind}");
            assert_eq!(path(node), kind);
        }
    }
}

/// What a node cannot do itself it does not try with another, and counts no failure of it.
#[test]
fn a_carrier_that_one_node_cannot_use_at_all_is_no_fallback() {
    let without = [
        Reach { unloaded: Some("no library"), ..Reach::default() },
        Reach { channelless: true, ..Reach::default() },
    ];
    for reach in without {
        let prefill = Node::start_reaching("prefill", reach, TransportConfig::default());
        let refusing = Reach { refused: Some("not here"), ..Reach::default() };
        let decode = Node::start_reaching("decode", refusing, TransportConfig::default());
        travel(&prefill, &decode, &blocks(0..20), &blocks(100..120));
        for node in [&prefill, &decode] {
            let fallbacks = node.transfers.metrics().fallbacks;
            assert_eq!(fallbacks.into_iter().collect::<Vec<_>>(), [("ipc", 1)]);
            assert_eq!(path(node), "tcp");
        }
    }
}

/// Who leaves or is closed while the two join has not found out that the transport fails.
#[test]
fn a_peer_that_leaves_in_a_join_is_lost_and_counts_as_no_fallback() {
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
        // Long before the pair would be closed for being idle.
        until("the pair is over", || stays.transfers.metrics().peers.is_empty());
        for node in [leaves, stays] {
            assert_eq!(node.transfers.metrics().fallbacks.len(), 0, "{sender_leaves}");
        }
    }
}

/// Who waits for the other end to join sees that it does not come: long before its patience ends.
#[test]
fn whoever_waits_in_a_join_hears_that_the_other_end_has_given_up() {
    let failing = || Reach { fails: Some("out of memory"), ..Reach::default() };
    for (sender, receiver) in [(failing(), Reach::default()), (Reach::default(), failing())] {
        let prefill = Node::start_reaching("prefill", sender, only(TransferKind::Nccl, false));
        let decode = Node::start_reaching("decode", receiver, only(TransferKind::Nccl, false));
        // A receiver that waited on would keep the next connection out for a lease, and lose the pair.
        travel(&prefill, &decode, &blocks(0..20), &blocks(100..120));
        assert_eq!((path(&prefill).as_str(), path(&decode).as_str()), ("tcp", "tcp"));
        assert_eq!(prefill.transfers.metrics().fallbacks["nccl"], 1);
        assert_eq!(decode.transfers.metrics().fallbacks["nccl"], 1);
    }
}

/// Tells the node of a peer; what is returned has owners until the two have met.
fn meet(node: &Node, peer: PeerAddress, sends: bool) -> Weak<impl Sized> {
    let guard = Arc::new(());
    let held = Arc::downgrade(&guard);
    let guard: ConnectGuard = guard;
    node.transfers.command(Command::Connect { peer, sends, guard: Some(guard) }).unwrap();
    held
}

/// What GPUs need for a pair is made before the first transfer, and is there for it when the two have met.
#[test]
fn nodes_that_meet_have_their_connection_before_the_first_transfer() {
    for kind in LOCAL {
        // On a busy machine they may be given up before they have met.
        let met_in_time = (0..TRIES).any(|_| {
            let reach = Reach::default();
            let prefill = Node::start_reaching("prefill", Reach::default(), only(kind, false));
            let decode = Node::start_reaching("decode", reach.clone(), only(kind, false));
            let start = Instant::now();
            let held = [
                meet(&prefill, decode.address.clone(), true),
                meet(&decode, prefill.address.clone(), false),
            ];
            until("both have met", || held.iter().all(|held| held.strong_count() == 0));
            let took = start.elapsed();
            let reached = || reach.reached.load(Ordering::Acquire);
            let in_time = reached() == 1;
            assert!(in_time || took >= UNANSWERED_MIN, "over after {took:?}, and no connection");
            until("the receiver has reached the sender", || reached() == 1);
            travel(&prefill, &decode, &blocks(0..20), &blocks(100..120));
            assert_eq!((path(&decode).as_str(), reached()), (kind.name(), 1));
            // Once more: nothing is to be made.
            let held = meet(&prefill, decode.address.clone(), true);
            until("they have met", || held.strong_count() == 0);
            in_time
        });
        assert!(met_in_time);
    }
}

#[test]
fn whoever_waits_for_a_meeting_hears_soon_that_there_will_be_none() {
    // Of several tries one is quick, on a busy machine too.
    let is_over_before = |most: Duration, meets: &dyn Fn() -> Duration| {
        (0..TRIES).any(|_| {
            let took = meets();
            assert!(took >= UNANSWERED_MIN, "it might have answered yet: {took:?}");
            took < most
        })
    };
    // A listener that takes connections and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let control_endpoint = format!("tcp://{}", silent.local_addr().unwrap());
    let prefill = reaching("prefill");
    let meets_nobody = || {
        let (node_id, epoch) = ("silent".to_owned(), Epoch(fresh()));
        let peer = PeerAddress { node_id, epoch, control_endpoint: control_endpoint.clone() };
        let start = Instant::now();
        let held = meet(&prefill, peer, true);
        until("the silent one is given up", || held.strong_count() == 0);
        start.elapsed()
    };
    assert!(is_over_before(CONNECT_TIMEOUT, &meets_nobody), "nothing is hoped for so long");

    let joins_in_vain = || {
        let (hangs, other) = (Reach { hangs: true, ..Reach::default() }, Reach::default());
        let prefill = Node::start_reaching("prefill", hangs, only(TransferKind::Nccl, false));
        let decode = Node::start_reaching("decode", other, only(TransferKind::Nccl, false));
        let start = Instant::now();
        let held = meet(&prefill, decode.address.clone(), true);
        until("the one that hangs is given up", || held.strong_count() == 0);
        start.elapsed()
    };
    assert!(is_over_before(2 * CONNECT_TIMEOUT, &joins_in_vain), "a join may take longer");

    // By tcp alone there is nothing to wait for.
    let (prefill, decode) = (Node::start("prefill"), Node::start("decode"));
    let held = meet(&prefill, decode.address.clone(), true);
    until("there is nothing to make", || held.strong_count() == 0);
}

#[test]
fn where_there_is_nothing_to_make_in_advance_meeting_makes_no_pair() {
    let (prefill, decode) = (Node::start("prefill"), Node::start("decode"));
    let peer = decode.address.clone();
    prefill.transfers.command(Command::Connect { peer, sends: true, guard: None }).unwrap();
    // Commands are taken in order: when the transfer is over, the guard has long been.
    let third = Node::start("third");
    travel(&prefill, &third, &blocks(0..20), &blocks(100..120));
    assert_eq!(prefill.transfers.metrics().peers.len(), 1);
}

#[test]
fn few_pairs_are_made_in_advance() {
    let prefill = reaching("prefill");
    let others: Vec<Node> = (0..6).map(|_| reaching("decode")).collect();
    for other in &others {
        let peer = other.address.clone();
        prefill.transfers.command(Command::Connect { peer, sends: true, guard: None }).unwrap();
    }
    // With one that was met and with the last, which was not.
    for other in [&others[0], &others[5]] {
        travel(&prefill, other, &blocks(0..20), &blocks(100..120));
    }
    assert_eq!(prefill.transfers.metrics().peers.len(), 5);
}

/// False when the machine was so slow that the transports may have given up by themselves.
fn blocks_stay_borrowed(kind: TransferKind, decode_aborts: bool) -> bool {
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
    let reason = "the client left".to_owned();
    side.transfers.command(Command::Abort { transfer, reason }).unwrap();
    // Nothing that can be waited for says that nothing happens.
    std::thread::sleep(Duration::from_millis(200));
    let (written, read) = (pinned(&decode, 7), pinned(&prefill, 7));
    let silent = decode.events.is_empty() && prefill.events.is_empty();
    let in_time = begun.elapsed() < LEASE / 2;
    reach.open.store(true, Ordering::Release);
    if in_time {
        assert!(written, "what is written is not given back");
        assert!(read, "nor what is read");
        assert!(silent);
    }
    assert!(matches!(decode.event(), Event::ReceiveFailed { .. }));
    assert!(matches!(prefill.event(), Event::SendFailed { .. }));
    decode.assert_free();
    prefill.assert_free();
    travel(&prefill, &decode, &blocks(0..20), &blocks(100..120));
    in_time
}

#[test]
fn blocks_stay_borrowed_while_a_copy_is_under_way() {
    for (kind, decode_aborts) in LOCAL.into_iter().flat_map(|it| [(it, true), (it, false)]) {
        let seen = (0..TRIES).any(|_| blocks_stay_borrowed(kind, decode_aborts));
        assert!(seen, "{kind}: no try was quick enough to see anything");
    }
}

/// Whether the other pair's transfer was delivered before the stuck pair's failed.
fn the_other_pair_goes_first() -> bool {
    let reach = Reach::default();
    reach.open.store(false, Ordering::Release);
    let prefill = reaching("prefill");
    let stuck = Node::start_reaching("stuck", reach.clone(), TransportConfig::default());
    let other = reaching("other");
    let transfer = begin(&prefill, &stuck, 8);
    prefill.written(transfer, 0, &blocks(0..8));
    until("the copy begins", || reach.begun.load(Ordering::Acquire) == 1);
    let free = TransferId(fresh());
    let places = blocks(100..120);
    prefill.expect(free, &other);
    other.receive(free, &prefill, 0, &places);
    let mut ended = Vec::new();
    while ended.len() < 2 {
        match prefill.event() {
            Event::Ready { transfer: ready, .. } => {
                assert_eq!(ready, free);
                prefill.compute(free, 0, &places);
                prefill.written(free, 0, &places);
                prefill.finish(free);
            }
            Event::Delivered { transfer: delivered, .. } => {
                assert_eq!(delivered, free);
                ended.push(delivered);
            }
            Event::SendFailed { transfer: failed, .. } => {
                assert_eq!(failed, transfer);
                ended.push(failed);
            }
            event => panic!("{event:?}"),
        }
    }
    assert!(matches!(other.event(), Event::Arrived { .. }));
    other.assert_holds(free, 0, &places);
    prefill.assert_free();
    // What may still be written is not given back, whatever the pair has come to.
    assert!(pinned(&stuck, 7));
    reach.open.store(true, Ordering::Release);
    assert!(matches!(stuck.event(), Event::ReceiveFailed { .. }));
    stuck.assert_free();
    ended[0] == free
}

#[test]
fn a_copy_that_does_not_end_costs_the_sender_a_lease_and_delays_no_other_pair() {
    assert!((0..TRIES).any(|_| the_other_pair_goes_first()), "it waits for the stuck pair");
}

/// As when the peer's GPU does not come to its half: the blocks come back with the channel's end, and the
/// next transfer makes another.
#[test]
fn an_operation_without_its_other_half_is_ended_with_its_channel() {
    let reach = Reach::default();
    let prefill = Node::start_reaching("prefill", reach.clone(), only(TransferKind::Nccl, false));
    let decode = Node::start_reaching("decode", Reach::default(), only(TransferKind::Nccl, false));
    travel(&prefill, &decode, &blocks(0..20), &blocks(100..120));
    reach.open.store(false, Ordering::Release);
    let transfer = begin(&prefill, &decode, 8);
    prefill.written(transfer, 0, &blocks(0..8));
    assert!(matches!(prefill.event(), Event::SendFailed { .. }));
    assert!(matches!(decode.event(), Event::ReceiveFailed { .. }));
    prefill.assert_free();
    decode.assert_free();
    // What begins before that is lost with the pair.
    let has_lost_it = |node: &&Node| node.transfers.metrics().peers.is_empty();
    until("both lose the pair", || [&prefill, &decode].iter().all(has_lost_it));
    reach.open.store(true, Ordering::Release);
    travel(&prefill, &decode, &blocks(0..20), &blocks(100..120));
}

/// A sender whose halves end before the receiver's does not lead the receiver to begin more.
#[test]
fn no_more_operations_of_a_pair_are_under_way_than_are_meant_to_be() {
    let reach = Reach::default();
    reach.open.store(false, Ordering::Release);
    let hasty = Reach { hasty: true, ..Reach::default() };
    let prefill = Node::start_reaching("prefill", hasty, only(TransferKind::Nccl, false));
    let decode = Node::start_reaching("decode", reach.clone(), only(TransferKind::Nccl, false));
    // Twelve chunks.
    let transfer = begin(&prefill, &decode, 96);
    prefill.written(transfer, 0, &blocks(0..96));
    let begun = || reach.begun.load(Ordering::Acquire);
    // On a very slow machine they are given up first.
    until("operations begin", || begun() >= 8 || !decode.events.is_empty());
    // Nothing that can be waited for says that no other begins.
    std::thread::sleep(Duration::from_millis(200));
    assert!(begun() <= 8, "{} are under way", begun());
    reach.open.store(true, Ordering::Release);
}

#[test]
fn damage_on_the_way_is_found_where_hashes_are_asked_for_by_either() {
    for (kind, receiver_asks) in LOCAL.into_iter().flat_map(|it| [(it, true), (it, false)]) {
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
