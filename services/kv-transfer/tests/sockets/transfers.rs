//! Successful and aborted transfers.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use kernels::KvArena;
use kv_transfer::{
    Overloaded, StartError, TransferConfig, Transfers,
    api::{Command, Epoch, Event, PeerAddress, TransferFailure, TransferId, TransferStats},
    config::LEASE,
};

use crate::node::{
    BLOCK_COUNT, Node, SECRET, WAIT_TIMEOUT, blocks, config, fresh, identity, layout, run_transfer,
};

pub(crate) fn blocks_arrive_unchanged_in_several_chunks() {
    let (prefill, decode) = (Node::start("prefill"), Node::start("decode"));
    let transfer = TransferId(fresh());
    // The receiver has the first 3 of 43 blocks cached, and reserves the others in reverse order.
    let to: Vec<_> = blocks(100..140).into_iter().rev().collect();
    decode.receive(transfer, &prefill, 3, &to);
    prefill.expect(transfer, &decode);
    let ready = prefill.event();
    assert_eq!(
        ready,
        Event::Ready {
            transfer,
            first_block: 3,
            block_count: 40,
            traceparent: "00-receive".to_owned()
        }
    );
    let from = blocks(0..43);
    for range in [0..10, 10..11, 11..43] {
        let (first, part) = (range.start as u32, &from[range]);
        prefill.compute(transfer, first, part);
        prefill.written(transfer, first, part);
    }
    prefill.finish(transfer);
    let Event::Arrived { first_index, token, stats, .. } = decode.event() else {
        panic!("the transfer did not arrive");
    };
    assert_eq!((first_index, token.id), (3, 42));
    // Chunks have eight blocks, however many are written at a time.
    let bytes = 40 * layout().block_bytes() as u64;
    assert_eq!(stats, TransferStats { bytes, chunks: 5, elapsed: stats.elapsed });
    assert!(stats.elapsed > Duration::ZERO && stats.elapsed < WAIT_TIMEOUT);
    decode.assert_holds(transfer, 3, &to);
    assert!(matches!(prefill.event(), Event::Delivered { stats, .. } if stats.bytes == bytes));
    for node in [&prefill, &decode] {
        node.assert_free();
        node.transfers.shutdown().unwrap();
    }
    let metrics = prefill.transfers.metrics();
    assert_eq!(
        (metrics.protocol.delivered, metrics.bytes_sent, metrics.chunks_sent),
        (1, bytes, 5)
    );
    let metrics = decode.transfers.metrics();
    assert_eq!((metrics.protocol.arrived, metrics.bytes_received), (1, bytes));
}

pub(crate) fn tcp_copies_device_blocks_through_host_memory() {
    let host = Node::start("host");
    let remote = [Node::start_remote("remote-0"), Node::start_remote("remote-1")];
    for (from, to) in [(&host, &remote[0]), (&remote[0], &remote[1]), (&remote[1], &host)] {
        run_transfer(from, to, &blocks(0..20), &blocks(100..120));
    }
    for node in [&host, &remote[0], &remote[1]] {
        node.assert_free();
        node.transfers.shutdown().unwrap();
    }
}

pub(crate) fn many_transfers_share_a_pair_in_both_directions() {
    let (one, other) = (Node::start("one"), Node::start("other"));
    let ids: Vec<TransferId> = (0..24).map(|_| TransferId(fresh())).collect();
    // Even transfers go from `one` to `other`. Each transfer has eight blocks of its own on both
    // sides.
    let sides =
        |index: usize| if index.is_multiple_of(2) { (&one, &other) } else { (&other, &one) };
    let place = |index: usize| blocks(8 * index as u32..8 * (index as u32 + 1));
    for (index, id) in ids.iter().enumerate() {
        let (sender, receiver) = sides(index);
        sender.expect(*id, receiver);
        receiver.receive(*id, sender, 0, &place(index));
    }
    let mut ended = 0;
    let deadline = Instant::now() + Duration::from_secs(10);
    while ended < 2 * ids.len() && Instant::now() < deadline {
        for node in [&one, &other] {
            while let Ok(event) = node.events.try_recv() {
                match event {
                    Event::Ready { transfer, .. } => {
                        let index = ids.iter().position(|id| *id == transfer).unwrap();
                        node.compute(transfer, 0, &place(index));
                        node.written(transfer, 0, &place(index));
                        node.finish(transfer);
                    }
                    Event::Arrived { transfer, .. } => {
                        let index = ids.iter().position(|id| *id == transfer).unwrap();
                        node.assert_holds(transfer, 0, &place(index));
                        ended += 1;
                    }
                    Event::Delivered { .. } => ended += 1,
                    other => panic!("{other:?}"),
                }
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(ended, 2 * ids.len());
    let metrics = one.transfers.metrics();
    assert_eq!((metrics.transfers_active, metrics.peers.len()), (0, 1));
    assert_eq!(
        (metrics.peers[0].path.as_str(), metrics.peers[0].node_id.as_str()),
        ("tcp", "other")
    );
}

pub(crate) fn abort_on_either_side_releases_both_at_once() {
    let (prefill, decode) = (Node::start("prefill"), Node::start("decode"));
    for decode_aborts in [true, false] {
        let transfer = TransferId(fresh());
        decode.receive(transfer, &prefill, 0, &blocks(0..64));
        prefill.expect(transfer, &decode);
        assert!(matches!(prefill.event(), Event::Ready { .. }));
        prefill.compute(transfer, 0, &blocks(0..40));
        prefill.written(transfer, 0, &blocks(0..40));
        let side = if decode_aborts { &decode } else { &prefill };
        let reason = "the client left".to_owned();
        side.transfers.command(Command::Abort { transfer, reason }).unwrap();
        let failures = [decode.event(), prefill.event()];
        // A message ends the other side, not an expired lease.
        for (event, at_decode) in failures.iter().zip([true, false]) {
            let (Event::ReceiveFailed { failure, .. } | Event::SendFailed { failure, .. }) = event
            else {
                panic!("{event:?}");
            };
            if at_decode == decode_aborts {
                assert!(matches!(failure, TransferFailure::Aborted { .. }), "{failure}");
            } else {
                assert!(matches!(failure, TransferFailure::PeerAborted { .. }), "{failure}");
                assert!(failure.to_string().contains("the client left"), "{failure}");
            }
        }
        prefill.assert_free();
        decode.assert_free();
    }
    // The pair is still usable.
    run_transfer(&prefill, &decode, &blocks(0..64), &blocks(0..64));
}

pub(crate) fn different_model_is_rejected_with_both_fingerprints() {
    let prefill = Node::start("prefill");
    let mut other = identity();
    other.model_fingerprint = 0xbeef;
    let decode = Node::start_with("decode", SECRET, other);
    let transfer = TransferId(fresh());
    decode.receive(transfer, &prefill, 0, &blocks(0..4));
    let Event::ReceiveFailed { failure, .. } = decode.event() else {
        panic!("the transfer did not fail")
    };
    assert!(matches!(failure, TransferFailure::Refused { .. }), "{failure}");
    let line = failure.to_string();
    assert!(line.contains("0000feed") && line.contains("0000beef"), "{line}");
}

pub(crate) fn wrong_cluster_secret_is_rejected_by_zap() {
    let prefill = Node::start("prefill");
    let decode = Node::start_with("decode", "the secret of another cluster", identity());
    let transfer = TransferId(fresh());
    decode.receive(transfer, &prefill, 0, &blocks(0..4));
    let Event::ReceiveFailed { failure, .. } = decode.event() else {
        panic!("the transfer did not fail")
    };
    // Rejected at once, not by an expired lease.
    assert!(failure.to_string().contains("expected the same cluster secret"), "{failure}");
    assert!(prefill.transfers.metrics().control_refused["zap_auth"] > 0);
    decode.assert_free();
}

pub(crate) fn unreachable_peer_fails_after_one_lease() {
    let decode = Node::start("decode");
    let gone = {
        let prefill = Node::start("prefill");
        prefill.transfers.shutdown().unwrap();
        prefill.address.clone()
    };
    let start = Instant::now();
    decode.receive_from(TransferId(fresh()), gone.clone(), 0, &blocks(0..4));
    decode.expect_from(TransferId(fresh()), gone);
    for _ in 0..2 {
        let (Event::ReceiveFailed { failure, .. } | Event::SendFailed { failure, .. }) =
            decode.event()
        else {
            panic!("a transfer did not fail");
        };
        assert!(matches!(failure, TransferFailure::PeerLost { .. }), "{failure}");
    }
    let elapsed = start.elapsed();
    // Not at the deadline of the transfer.
    assert!(elapsed >= LEASE && elapsed < WAIT_TIMEOUT - LEASE, "{elapsed:?}");
    decode.assert_free();
}

pub(crate) fn peer_shutdown_is_detected_at_once() {
    let (prefill, decode) = (Node::start("prefill"), Node::start("decode"));
    let transfer = TransferId(fresh());
    decode.receive(transfer, &prefill, 0, &blocks(0..BLOCK_COUNT));
    prefill.expect(transfer, &decode);
    assert!(matches!(prefill.event(), Event::Ready { .. }));
    prefill.transfers.shutdown().unwrap();
    assert!(matches!(prefill.event(), Event::SendFailed { .. }), "the final event still comes");
    let Event::ReceiveFailed { failure, .. } = decode.event() else {
        panic!("the transfer did not fail")
    };
    // Detected by a message or a closed connection. An expired lease would be named as the reason.
    let is_told = match &failure {
        TransferFailure::PeerAborted { .. } => true,
        TransferFailure::PeerLost { reason, .. } => reason.contains("data connection"),
        _ => false,
    };
    assert!(is_told, "{failure}");
    decode.assert_free();
    prefill.assert_free();
}

pub(crate) fn shutdown_joins_all_threads_and_is_idempotent() {
    let (prefill, decode) = (Node::start("prefill"), Node::start("decode"));
    run_transfer(&prefill, &decode, &blocks(0..16), &blocks(0..16));
    for node in [prefill, decode] {
        node.transfers.shutdown().unwrap();
        node.transfers.shutdown().unwrap();
    }
}

pub(crate) fn invalid_endpoint_fails_the_transfer_at_once() {
    let decode = Node::start("decode");
    let nowhere = PeerAddress {
        node_id: "nowhere".to_owned(),
        epoch: Epoch(fresh()),
        control_endpoint: "kind pigeon".to_owned(),
    };
    decode.receive_from(TransferId(fresh()), nowhere, 0, &blocks(0..4));
    let Event::ReceiveFailed { failure, .. } = decode.event() else {
        panic!("the transfer did not fail")
    };
    // The reason names the endpoint, not an expired lease.
    assert!(failure.to_string().contains("kind pigeon"), "{failure}");
}

pub(crate) fn port_in_use_is_named_and_all_ports_are_released() {
    let node = Node::start("node");
    let bound = |endpoint: &str| endpoint.strip_prefix("tcp://").unwrap().parse().unwrap();
    let taken: SocketAddr = bound(node.transfers.control_endpoint());
    let (mut config, free) = (config("other", SECRET, identity()), {
        let other = Node::start("free");
        let port: SocketAddr = bound(other.transfers.data_endpoint());
        other.transfers.shutdown().unwrap();
        port
    });
    config.control_bind = taken;
    config.data_bind = free;
    let start = |config: &TransferConfig| {
        Transfers::start(config.clone(), Arc::clone(&node.arena), |_| {}).err()
    };
    let error = start(&config).expect("the control port is taken");
    assert!(matches!(error, StartError::ControlBind { address, .. } if address == taken));
    assert!(error.to_string().contains(&taken.to_string()), "{error}");
    // The data port, bound before the failure, is free again.
    config.control_bind = "127.0.0.1:0".parse().unwrap();
    assert!(start(&config).is_none());
    config.data_bind = bound(node.transfers.data_endpoint());
    let error = start(&config).expect("the data port is taken");
    assert!(matches!(error, StartError::DataBind { .. }), "{error}");
    config.data_bind = free;
    config.node_id = String::new();
    let error = start(&config).expect("an empty node id is rejected");
    assert_eq!(error.to_string(), "invalid node_id \"\"; expected 1 to 200 bytes");
}

/// A node that does not take its events gets `Overloaded` and loses none of them.
pub(crate) fn blocked_event_sink_rejects_commands_and_loses_no_event() {
    let mut config = config("slow", SECRET, identity());
    config.limits.commands_max = 8;
    let (sender, events) = crossbeam_channel::bounded(1);
    let arena = KvArena::host(layout(), 8).unwrap();
    let transfers = Transfers::start(config, arena, sender).unwrap();
    // Each transfer fails at once, with one event.
    let peer = PeerAddress {
        node_id: "nowhere".to_owned(),
        epoch: Epoch(fresh()),
        control_endpoint: "nowhere".to_owned(),
    };
    let expect = |transfer| {
        transfers.command(Command::Send {
            transfer,
            peer: peer.clone(),
            prompt_hash: 0,
            deadline: Duration::from_secs(9),
            traceparent: String::new(),
        })
    };
    let (mut taken, mut refused) = (Vec::new(), 0);
    let start = Instant::now();
    while refused == 0 {
        let transfer = TransferId(fresh());
        match expect(transfer) {
            Ok(()) => taken.push(transfer),
            Err(Overloaded { queued }) => {
                assert!(queued >= 4, "{queued}");
                refused += 1;
            }
        }
        std::thread::sleep(Duration::from_millis(2));
        assert!(start.elapsed() < Duration::from_secs(10), "the sink is full");
    }
    // Half of the queue is reserved for transfers that have started.
    let (transfer, reason) = (TransferId(fresh()), String::new());
    transfers.command(Command::Abort { transfer, reason }).unwrap();
    let mut ended = Vec::new();
    while ended.len() < taken.len() {
        match events.recv_timeout(Duration::from_secs(20)).expect("every event comes") {
            Event::SendFailed { transfer, .. } => ended.push(transfer),
            other => panic!("{other:?}"),
        }
    }
    ended.sort();
    assert_eq!(ended, taken);
}

/// Reading metrics never blocks on the driver.
pub(crate) fn metrics_are_readable_while_the_driver_is_blocked() {
    let (entered, in_sink) = crossbeam_channel::bounded(1);
    let (release, held) = crossbeam_channel::bounded::<()>(0);
    let sink = move |_: Event| {
        let _ = entered.try_send(());
        let _ = held.recv();
    };
    let arena = KvArena::host(layout(), 8).unwrap();
    let transfers = Transfers::start(config("held", SECRET, identity()), arena, sink).unwrap();
    let peer = PeerAddress {
        node_id: "nowhere".to_owned(),
        epoch: Epoch(fresh()),
        control_endpoint: "nowhere".to_owned(),
    };
    let reader = transfers.metrics_reader();
    assert_eq!(reader.read().unwrap().protocol.send_failed, 0);
    let expect = Command::Send {
        transfer: TransferId(fresh()),
        peer,
        prompt_hash: 0,
        deadline: Duration::from_secs(9),
        traceparent: String::new(),
    };
    transfers.command(expect).unwrap();
    in_sink.recv_timeout(WAIT_TIMEOUT).expect("the transfer fails");
    // The driver is blocked in the sink with the event, and the event is already counted.
    let stats = reader.read().expect("the transfers exist");
    assert_eq!((stats.protocol.send_failed, stats.transfers_active), (1, 0));
    assert_eq!(transfers.metrics(), stats);
    drop(release);
    transfers.shutdown().unwrap();
    assert_eq!(
        reader.read().map(|stats| stats.protocol.send_failed),
        Some(1),
        "the last values are kept"
    );
    drop(transfers);
    assert_eq!(reader.read(), None);
}
