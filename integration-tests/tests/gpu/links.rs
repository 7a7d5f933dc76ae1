//! KV transfers between this process and another, by every transport that needs GPUs.

use std::{
    env,
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use kernels::{BlockId, sampling::SampledToken};
use kv_transfer::{
    TransferKind,
    api::{self, Event, TransferId},
    config::LEASE,
};

use super::{
    bench::{lacks, require_gpus, short},
    nodes::{
        BLOCKS, GPU_TRANSPORTS, Node, NodeKind, Peer, TIMEOUT, event, gpus, last_pair, pairs,
        pattern, scattered,
    },
};

/// Environment variable: number of transfers of the test with random aborts.
const TRANSFERS: &str = "BATON_TEST_TRANSFERS";

/// Maximum time until the blocks of a lost transfer are free. The abort of an nccl communicator
/// takes 0.51 s of it.
const BLOCKS_FREE_MAX: Duration = LEASE.saturating_add(Duration::from_millis(500));

pub(crate) fn kv_transfer_between_processes_preserves_kv_in_any_block_order() {
    let (gpus, _alone) = gpus();
    let cases = [
        (TransferKind::Ipc, NodeKind::Verifying),
        (TransferKind::Nccl, NodeKind::Verifying),
        (TransferKind::Nccl, NodeKind::Large),
    ];
    for (transport, kind) in cases {
        for (from, to) in pairs(transport, gpus) {
            let mut peer = Peer::start_as(from, transport, kind);
            let (sink, events) = channel();
            let node = Node::start_as("node", to, transport, kind, sink);
            for seed in 0..if short() { 2 } else { 12 } {
                // Overwrites the KV of the previous transfer.
                node.fill(|_, bytes| vec![seed as u8; bytes]);
                let counts = if kind.is_large() { [96, 90, 41, 5, 17] } else { [1, 7, 8, 50, 96] };
                let (count, transfer) = (counts[seed as usize % 5], TransferId(seed.into()));
                let places = kind.places(seed / 2 + 100, count);
                peer.send(transfer, &node, seed, count, true);
                node.receive(transfer, &peer.address, &places);
                let arrived = event(&events);
                assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
                node.assert_holds(&kind.places(seed, count), &places);
            }
            node.assert_free();
            let metrics = node.transfers.metrics();
            assert_eq!((node.path().as_str(), metrics.fallbacks.len()), (transport.name(), 0));
            let chunks = metrics.chunks_received;
            println!("{transport}, {}, from GPU {from} to GPU {to}: {chunks} chunks", kind.name());
        }
    }
}

pub(crate) fn nccl_between_hosts_preserves_kv_and_fails_with_its_peer() {
    let (gpus, _alone) = gpus();
    let (from, to) = last_pair(TransferKind::Nccl, gpus);
    let (sink, events) = channel();
    let node = Node::start_as("node", to, TransferKind::Nccl, NodeKind::Large, sink);
    let mut next = 0_u128..;
    for signal in ["-KILL", "-STOP", "-KILL"] {
        let mut peer = Peer::start_elsewhere(from, NodeKind::Large);
        for seed in 0..4 {
            node.fill(|_, bytes| vec![seed as u8; bytes]);
            let transfer = TransferId(next.next().unwrap());
            let (places, begun) = (NodeKind::Large.places(seed + 100, BLOCKS), Instant::now());
            peer.send(transfer, &node, seed, BLOCKS, true);
            node.receive(transfer, &peer.address, &places);
            let arrived = event(&events);
            assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
            println!("{BLOCKS} blocks of 2 MiB between hosts: {:?}", begun.elapsed());
            node.assert_holds(&NodeKind::Large.places(seed, BLOCKS), &places);
        }
        assert_eq!((node.path(), node.transfers.metrics().fallbacks.len()), ("nccl".to_owned(), 0));
        let (transfer, chunks) = (TransferId(next.next().unwrap()), node.chunks());
        peer.send(transfer, &node, 1, BLOCKS, false);
        node.receive(transfer, &peer.address, &NodeKind::Large.places(1, BLOCKS));
        node.until_more_chunks(chunks);
        let lost = Instant::now();
        peer.signal(signal);
        let failed = event(&events);
        let after = lost.elapsed();
        assert!(matches!(failed, Event::ReceiveFailed { .. }), "{failed:?}");
        node.assert_free();
        println!("between hosts, {signal}: blocks free after {after:?}");
        assert!(after <= BLOCKS_FREE_MAX, "{signal}: {after:?}");
        peer.kill();
        node.until_alone();
    }
}

/// The peer's environment has variables with which NCCL finds no network, or has other limits of
/// CTAs than in this process. KV still arrives: by tcp without a network, and by either transport
/// with other limits. A later pair uses nccl again.
pub(crate) fn unusable_nccl_environment_falls_back_to_tcp() {
    let (gpus, _alone) = gpus();
    let (from, to) = last_pair(TransferKind::Nccl, gpus);
    let (sink, events) = channel();
    let node = Node::start_as("node", to, TransferKind::Nccl, NodeKind::Large, sink);
    let mut next = 0_u128;
    for (variables, path) in [
        ([("NCCL_SOCKET_IFNAME", "none0"), ("NCCL_HOSTID", "elsewhere")], Some("tcp")),
        ([("NCCL_NET", "IB"), ("NCCL_HOSTID", "elsewhere")], Some("tcp")),
        ([("NCCL_MAX_CTAS", "1"), ("NCCL_MIN_CTAS", "1")], None),
        ([("NCCL_HOSTID", "elsewhere"), ("NCCL_DEBUG", "WARN")], Some("nccl")),
    ] {
        let mut peer = Peer::start_with(from, NodeKind::Large, &variables);
        node.fill(|_, bytes| vec![1; bytes]);
        next += 1;
        let (transfer, begun) = (TransferId(next), Instant::now());
        let places = NodeKind::Large.places(7, BLOCKS);
        peer.send(transfer, &node, 1, BLOCKS, true);
        node.receive(transfer, &peer.address, &places);
        let arrived = event(&events);
        assert!(matches!(arrived, Event::Arrived { .. }), "{variables:?}: {arrived:?}");
        node.assert_holds(&NodeKind::Large.places(1, BLOCKS), &places);
        let used = node.path();
        println!("{variables:?}: {used}, {:?}", begun.elapsed());
        assert!(path.is_none_or(|path| path == used), "{variables:?}: {used}");
        peer.kill();
        node.until_alone();
        node.assert_free();
    }
}

pub(crate) fn abort_at_any_time_leaks_no_block() {
    let (gpus, _alone) = gpus();
    for transport in GPU_TRANSPORTS {
        let (from, to) = last_pair(transport, gpus);
        let mut peer = Peer::start(from, transport);
        let (sink, events) = channel();
        let node = Node::start("node", to, transport, sink);
        let mut next = 0;
        // Without a connection every transfer would be aborted during the connection setup.
        until_arrived(&node, &mut peer, &events, &mut next);
        let whole = |peer: &mut Peer, number: u128| {
            let (transfer, begun) = (TransferId(number), Instant::now());
            peer.send(transfer, &node, 1, 96, true);
            node.receive(transfer, &peer.address, &scattered(3, 96));
            let arrived = event(&events);
            assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
            begun.elapsed()
        };
        let usual = whole(&mut peer, next + 1);
        let rounds = if short() { 5 } else { 200_u64 };
        let (chunks, mut longest) = (node.chunks(), Duration::ZERO);
        for round in 0..=rounds {
            let transfer = TransferId(next + 2 + u128::from(round));
            peer.send(transfer, &node, round, 96, false);
            node.receive(transfer, &peer.address, &scattered(1, 96));
            if round < rounds {
                // Aborts at every moment of a transfer's usual time, and after it.
                thread::sleep(usual.mul_f64((round * 389 % 1300) as f64 / 1000.0));
            } else {
                node.until_more_chunks(chunks);
            }
            let aborted = Instant::now();
            node.abort(transfer);
            let failed = event(&events);
            longest = longest.max(aborted.elapsed());
            assert!(matches!(failed, Event::ReceiveFailed { .. }), "{failed:?}");
            node.assert_free();
        }
        println!(
            "{transport}: {} chunks received before aborts, blocks free after at most {longest:?}",
            node.chunks() - chunks
        );
        assert!(longest <= BLOCKS_FREE_MAX, "{transport}: {longest:?}");
        whole(&mut peer, next + 3 + u128::from(rounds));
        node.assert_holds(&scattered(1, 96), &scattered(3, 96));
    }
}

pub(crate) fn killed_sender_fails_only_its_own_transfers() {
    let (gpus, _alone) = gpus();
    let cases = [
        (TransferKind::Ipc, NodeKind::Verifying),
        (TransferKind::Nccl, NodeKind::Verifying),
        (TransferKind::Nccl, NodeKind::TwoRanks),
    ];
    for (transport, kind) in cases {
        let (from, to) = last_pair(transport, gpus);
        let (sink, events) = channel();
        let node = Node::start_as("node", to, transport, kind, sink);
        for round in 0..if short() { 2 } else { 4_u64 } {
            let mut peer = Peer::start_as(from, transport, kind);
            let (transfer, chunks) = (TransferId(round.into()), node.chunks());
            peer.send(transfer, &node, 1, 96, false);
            node.receive(transfer, &peer.address, &kind.places(1, 96));
            // Kills the sender during connection setup in even rounds and during chunks in odd
            // rounds.
            if round % 2 == 1 {
                node.until_more_chunks(chunks);
            }
            // The exit of the process is not awaited: it may outlast the transfer.
            peer.signal("-KILL");
            let killed = Instant::now();
            let failed = event(&events);
            let after = killed.elapsed();
            assert!(matches!(failed, Event::ReceiveFailed { .. }), "{failed:?}");
            node.assert_free();
            println!(
                "{transport}, {}: blocks of a killed sender free after {after:?}",
                kind.name()
            );
            assert!(after <= BLOCKS_FREE_MAX, "{transport}, {}: {after:?}", kind.name());
        }
        // The GPU and this process's context still work.
        let mut peer = Peer::start_as(from, transport, kind);
        let transfer = TransferId(1000);
        peer.send(transfer, &node, 1, 96, true);
        node.receive(transfer, &peer.address, &kind.places(3, 96));
        let arrived = event(&events);
        assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
        node.assert_holds(&kind.places(1, 96), &kind.places(3, 96));
    }
}

/// Falls back to tcp: the driver cannot map IPC memory into the process that owns the memory.
pub(crate) fn nodes_in_one_process_fall_back_to_tcp_and_count_it() {
    let (gpus, _alone) = gpus();
    let (one_sink, one_events) = channel();
    let (other_sink, other_events) = channel();
    let one = Node::start("one", 0, TransferKind::Ipc, one_sink);
    let other = Node::start("other", gpus - 1, TransferKind::Ipc, other_sink);
    one.fill(pattern);
    let transfer = TransferId(1);
    let expect = api::Command::Send {
        transfer,
        peer: other.address.clone(),
        prompt_hash: 1,
        deadline: TIMEOUT,
        traceparent: String::new(),
    };
    one.transfers.command(expect).unwrap();
    let blocks = scattered(1, 20);
    other.receive(transfer, &one.address, &blocks);
    assert!(matches!(event(&one_events), Event::Ready { .. }));
    let written = api::Command::Written { transfer, first_block: 0, blocks: blocks.clone() };
    one.transfers.command(written).unwrap();
    let token = SampledToken { id: 1, logprobs: None, pooled: None };
    one.transfers.command(api::Command::Finish { transfer, first_index: 0, token }).unwrap();
    assert!(matches!(event(&other_events), Event::Arrived { .. }));
    other.assert_holds(&blocks, &blocks);
    assert_eq!((one.path().as_str(), other.path().as_str()), ("tcp", "tcp"));
    assert_eq!(other.transfers.metrics().fallbacks["ipc"], 1);
}

/// Runs transfers with the peer one after the other for `time`. Returns their number and the
/// longest duration.
fn run_transfers(
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

/// Returns the blocks that [`run_transfers`] does not use.
fn other_places() -> Vec<BlockId> {
    let used = scattered(3, BLOCKS / 2);
    (0..BLOCKS).map(BlockId).filter(|block| !used.contains(block)).collect()
}

/// A pair of nodes whose transfers other peers must not delay.
struct SteadyPair {
    node: Node,
    steady: Peer,
    events: Receiver<Event>,
    /// Number of the last transfer.
    next: u128,
    /// Longest transfer of this pair alone.
    longest: Duration,
}

impl SteadyPair {
    /// Measures the pair's transfers for `time`, without other peers.
    fn start(transport: TransferKind, from: usize, to: usize, time: Duration) -> Self {
        let (sink, events) = channel();
        let node = Node::start_as("node", to, transport, NodeKind::Plain, sink);
        let mut steady = Peer::start_as(from, transport, NodeKind::Plain);
        let mut next = 0;
        until_arrived(&node, &mut steady, &events, &mut next);
        let nothing = |event| panic!("{event:?}");
        let (count, longest) = run_transfers(&node, &mut steady, &events, &mut next, time, nothing);
        println!("{transport}, alone: {count} transfers in {time:?}, longest {longest:?}");
        Self { node, steady, events, next, longest }
    }
}

/// Repeats transfers with the peer until one arrives. Returns the time taken.
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
        // The peer has not detected yet that the pair was lost.
        assert!(begin.elapsed() < TIMEOUT, "time-out: no transfer arrives");
        thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn stopped_peer_delays_no_other_pair_and_frees_blocks_after_the_lease() {
    let (gpus, _alone) = gpus();
    for transport in GPU_TRANSPORTS {
        let (from, to) = last_pair(transport, gpus);
        let (sink, events) = channel();
        let node = Node::start_as("node", to, transport, NodeKind::Plain, sink);
        let [mut steady, mut stopped] =
            [(); 2].map(|()| Peer::start_as(from, transport, NodeKind::Plain));
        let mut next = 0;
        for peer in [&mut steady, &mut stopped] {
            until_arrived(&node, peer, &events, &mut next);
        }
        let nothing = |event| panic!("{event:?}");
        let time = Duration::from_millis(if short() { 500 } else { 2000 });
        let (before, longest_before) =
            run_transfers(&node, &mut steady, &events, &mut next, time, nothing);
        // These transfers are never finished, so none arrives before its sender stops.
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
        let (after, longest) =
            run_transfers(&node, &mut steady, &events, &mut next, 2 * LEASE, lost);
        while failed < stuck.len() {
            assert!(matches!(event(&events), Event::ReceiveFailed { .. }));
            (failed, last) = (failed + 1, at.elapsed());
        }
        node.assert_free();
        node.assert_holds(&scattered(1, BLOCKS / 2), &scattered(3, BLOCKS / 2));
        let rate = |count: usize, time: Duration| count as f64 / time.as_secs_f64();
        println!(
            "{transport}: {:.0} transfers/s alone, longest {longest_before:?}; \
             {:.0} transfers/s, longest {longest:?} beside a stopped peer; its blocks are free \
             after {last:?}",
            rate(before, time),
            rate(after, 2 * LEASE)
        );
        // A transfer that waits for the stopped peer takes a lease or longer.
        assert!(
            longest < longest_before + LEASE / 2,
            "{transport}: {longest_before:?} {longest:?}"
        );
        // Throughput may fall by half on a busy machine.
        assert!(
            2.0 * rate(after, 2 * LEASE) >= rate(before, time),
            "{transport}: {before} {after}"
        );
        assert!(last <= BLOCKS_FREE_MAX, "{transport}: {last:?}");
        stopped.signal("-CONT");
        let back = until_arrived(&node, &mut stopped, &events, &mut next);
        println!("{transport}: connected {back:?} after the peer continued");
        stopped.kill();
        let mut again = Peer::start_as(from, transport, NodeKind::Plain);
        let back = until_arrived(&node, &mut again, &events, &mut next);
        println!("{transport}: the next process connected {back:?} after it was ready");
    }
}

/// Destroying one pair's channel waits for the whole GPU, and with it for operations of another
/// stuck pair.
pub(crate) fn peers_stopped_or_killed_together_delay_no_other_pair() {
    let (gpus, _alone) = gpus();
    for transport in GPU_TRANSPORTS {
        let (from, to) = last_pair(transport, gpus);
        let pair = SteadyPair::start(transport, from, to, Duration::from_millis(500));
        let SteadyPair { node, mut steady, events, mut next, longest: longest_before } = pair;
        let places = other_places();
        for round in 0..if short() { 2 } else { 4_u128 } {
            let mut lost = [(); 2].map(|()| Peer::start_as(from, transport, NodeKind::Plain));
            for peer in &mut lost {
                until_arrived(&node, peer, &events, &mut next);
            }
            let first = (1 << 100) + round * 100;
            let chunks: Vec<&[BlockId]> = places.chunks(4).collect();
            // Alternates between the two peers, so that transfers of both are in flight.
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
            let beyond_lease = LEASE + Duration::from_secs(1);
            let (count, longest) =
                run_transfers(&node, &mut steady, &events, &mut next, beyond_lease, &mut is_lost);
            while failed < chunks.len() {
                assert!(matches!(event(&events), Event::ReceiveFailed { .. }));
                (failed, last) = (failed + 1, at.elapsed());
            }
            println!(
                "{transport}, two {}: {count} transfers of the other pair, longest {longest:?} ({longest_before:?} alone), \
                 blocks free after {last:?}",
                ["stopped", "killed"][round as usize % 2]
            );
            node.assert_free();
            assert!(longest < longest_before + LEASE / 2, "{longest_before:?} {longest:?}");
            assert!(last <= BLOCKS_FREE_MAX, "{transport}: {last:?}");
        }
        node.assert_holds(&scattered(1, BLOCKS / 2), &scattered(3, BLOCKS / 2));
    }
}

/// The driver synchronizes with the whole GPU when memory is freed: at teardown, and sometimes at
/// setup. An operation that was launched in part when its peer died would delay other pairs longer.
pub(crate) fn teardown_or_setup_with_a_stopped_peer_delays_no_other_pair() {
    let (gpus, _alone) = gpus();
    let transport = TransferKind::Nccl;
    let (from, to) = last_pair(transport, gpus);
    let pair = SteadyPair::start(transport, from, to, Duration::from_millis(500));
    let SteadyPair { node, mut steady, events, mut next, longest: longest_before } = pair;
    let places = other_places();
    let (others, places) = places.split_at(8);
    let mut in_the_middle = 0;
    for round in 0..if short() { 4 } else { 10_u64 } {
        let is_end = round % 2 == 0;
        // Delayed streams make this peer's transfers slow enough to stop one in flight.
        let [mut stopped, mut other] =
            [NodeKind::Delayed, NodeKind::Plain].map(|kind| Peer::start_as(from, transport, kind));
        until_arrived(&node, &mut stopped, &events, &mut next);
        if is_end {
            until_arrived(&node, &mut other, &events, &mut next);
        }
        let (first, chunks) = ((1 << 100) + u128::from(round) * 100, node.chunks());
        // Many short, unfinished transfers, so that the peer stops within one.
        for (index, place) in places.iter().enumerate() {
            let transfer = TransferId(first + index as u128);
            stopped.send(transfer, &node, 1, 1, false);
            node.receive(transfer, &stopped.address, &[*place]);
        }
        stopped.signal("-STOP");
        let came = node.chunks() - chunks;
        in_the_middle += usize::from(is_end && came < places.len() as u64);
        let last = TransferId(first + 99);
        other.send(last, &node, 1, others.len() as u32, !is_end);
        node.receive(last, &other.address, others);
        if is_end {
            other.signal("-KILL");
        }
        let (begun, mut failed, mut arrived) = (Instant::now(), 0, None);
        let mut ended = |event: Event| match event {
            Event::ReceiveFailed { transfer, .. } if transfer.0 >= first && transfer < last => {
                failed += 1;
            }
            Event::ReceiveFailed { transfer, .. } if transfer == last && is_end => failed += 1,
            Event::Arrived { transfer, .. } if transfer == last && !is_end => {
                arrived = Some(begun.elapsed());
            }
            other => panic!("{other:?}"),
        };
        let beyond_lease = LEASE + Duration::from_secs(1);
        let (count, longest) =
            run_transfers(&node, &mut steady, &events, &mut next, beyond_lease, &mut ended);
        println!(
            "stopped after {came} chunks, another peer {}: {count} transfers of the other pair, longest {longest:?} \
             ({longest_before:?} alone)",
            match arrived {
                _ if is_end => "killed".to_owned(),
                Some(time) => format!("connected within {time:?}"),
                None => "not connected".to_owned(),
            }
        );
        while failed + usize::from(arrived.is_some()) < places.len() + 1 {
            match event(&events) {
                Event::ReceiveFailed { .. } => failed += 1,
                Event::Arrived { .. } => arrived = Some(begun.elapsed()),
                other => panic!("{other:?}"),
            }
        }
        // The pair uses nccl, without a fallback.
        let fallbacks = node.transfers.metrics().fallbacks;
        assert!((is_end || arrived.is_some()) && fallbacks.is_empty(), "{arrived:?} {fallbacks:?}");
        node.assert_free();
        assert!(longest < longest_before + LEASE / 4, "{longest_before:?} {longest:?}");
    }
    assert!(in_the_middle > 0, "no peer was stopped in the middle of its transfers");
    node.assert_holds(&scattered(1, BLOCKS / 2), &scattered(3, BLOCKS / 2));
}

/// Stops a peer at several moments of its connection setup. A wait for this peer must not hold a
/// resource that other pairs need.
pub(crate) fn peer_stopped_during_setup_delays_no_other_pair() {
    let (gpus, _alone) = gpus();
    let transport = TransferKind::Nccl;
    let (from, to) = last_pair(transport, gpus);
    let time = Duration::from_millis(1500);
    let pair = SteadyPair::start(transport, from, to, time);
    let SteadyPair { node, mut steady, events, mut next, longest: longest_before } = pair;
    const JOINING: u128 = 1 << 100;
    let waits: &[u64] = if short() { &[20, 200] } else { &[0, 20, 60, 120, 200, 300, 400] };
    for (round, wait) in waits.iter().enumerate() {
        let mut joining = Peer::start_as(from, transport, NodeKind::Plain);
        let transfer = TransferId(JOINING + round as u128);
        joining.send(transfer, &node, 1, 8, false);
        node.receive(transfer, &joining.address, &other_places()[..8]);
        thread::sleep(Duration::from_millis(*wait));
        joining.signal("-STOP");
        let mut is_lost = false;
        let mut lost = |event: Event| match event {
            Event::ReceiveFailed { transfer: failed, .. } if failed == transfer => is_lost = true,
            other => panic!("{other:?}"),
        };
        let (count, longest) =
            run_transfers(&node, &mut steady, &events, &mut next, time, &mut lost);
        println!(
            "stopped {wait} ms into its first transfer: {count} transfers of the other pair, longest {longest:?}"
        );
        assert!(longest < longest_before + LEASE / 2, "{wait} ms: {longest_before:?} {longest:?}");
        joining.kill();
        // The next peer uses the same blocks.
        if !is_lost {
            let failed = event(&events);
            assert!(matches!(failed, Event::ReceiveFailed { .. }), "{failed:?}");
        }
        node.assert_free();
    }
    node.assert_holds(&scattered(1, BLOCKS / 2), &scattered(3, BLOCKS / 2));
}

pub(crate) fn random_aborts_from_either_side_leave_other_transfers_intact() {
    let (gpus, _alone) = gpus();
    let count = env::var(TRANSFERS).map_or(if short() { 60 } else { 400 }, |count| {
        count.parse().expect("a count of transfers")
    });
    for transport in GPU_TRANSPORTS {
        let (from, to) = last_pair(transport, gpus);
        let mut peer = Peer::start(from, transport);
        let (sink, events) = channel();
        let node = Node::start("node", to, transport, sink);
        let (mut arrived, mut aborted_by) = (0, [0, 0]);
        let mut state = 0x5eed_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        const COUNTS: [u32; 5] = [1, 7, 8, 50, BLOCKS];
        // Mean time of a completed transfer of each size, in microseconds.
        let mut usual = [5000.0; COUNTS.len()];
        let (begun, mut longest) = (Instant::now(), Duration::ZERO);
        for number in 0..count {
            let transfer = TransferId(number);
            let (seed, place) = (random(1000), random(1000));
            let which = random(COUNTS.len() as u64) as usize;
            let blocks = COUNTS[which];
            // Aborts at every moment of a transfer; some aborts come too late.
            let part = random(1300) as f64 / 1000.0;
            let after = Duration::from_micros((part * usual[which]) as u64);
            // The first transfer is aborted by the receiver, the second by the sender.
            let ends = if number < 2 { number as u64 } else { random(4) };
            let finishes = ends > 1 || number >= 2 && random(8) > 0;
            let (ours, theirs) = (ends == 0, (ends == 1).then_some(after));
            let sent = Instant::now();
            peer.send_until(transfer, &node, seed, blocks, finishes, theirs);
            let places = scattered(place, blocks);
            node.receive(transfer, &peer.address, &places);
            let mut ended = events.recv_timeout(if ours { after } else { TIMEOUT });
            if ours && ended.is_err() {
                node.abort(transfer);
                ended = events.recv_timeout(TIMEOUT);
            }
            match ended.expect("time-out: the transfer has not ended") {
                Event::Arrived { .. } => {
                    arrived += 1;
                    usual[which] += (sent.elapsed().as_micros() as f64 - usual[which]) / 8.0;
                    // Both sides have hashed all of the transfers.
                    if arrived % 4 == 0 {
                        node.assert_holds(&scattered(seed, blocks), &places);
                    }
                }
                Event::ReceiveFailed { failure, .. } => {
                    assert!(ends < 2, "transfer {number} failed without an abort: {failure}");
                    aborted_by[ends as usize] += 1;
                }
                other => panic!("{other:?}"),
            }
            longest = longest.max(sent.elapsed());
            if number % 32 == 0 {
                node.assert_free();
            }
        }
        node.assert_free();
        let [by_us, by_them] = aborted_by;
        let took = begun.elapsed();
        println!(
            "{transport}: {arrived} transfers completed, {by_us} were aborted by the receiver and \
             {by_them} by the sender, in {:.1} s: {:.2} ms each, {longest:?} at most; mean times \
             {usual:.0?} µs for {COUNTS:?} blocks",
            took.as_secs_f64(),
            took.as_secs_f64() * 1e3 / count as f64
        );
        assert!(arrived > 0 && by_us > 0 && by_them > 0, "{arrived} {aborted_by:?}");
    }
}

/// Delayed streams expose a missing synchronization, and the gather kernel must match the copies.
pub(crate) fn delayed_streams_and_gather_kernels_preserve_kv() {
    let (gpus, _alone) = gpus();
    let cases = [
        (TransferKind::Ipc, NodeKind::Delayed),
        (TransferKind::Nccl, NodeKind::Delayed),
        (TransferKind::Nccl, NodeKind::GatherKernel),
        (TransferKind::Nccl, NodeKind::LargeDelayed),
        (TransferKind::Nccl, NodeKind::LargeGatherKernel),
    ];
    for (transport, kind) in cases {
        let (from, to) = last_pair(transport, gpus);
        let mut peer = Peer::start_as(from, transport, kind);
        let (sink, events) = channel();
        let node = Node::start_as("node", to, transport, kind, sink);
        let rounds = match (short(), kind.is_large()) {
            (true, _) => 6,
            (false, true) => 15,
            (false, false) => 60_u64,
        };
        for round in 0..rounds {
            node.fill(|_, bytes| vec![round as u8; bytes]);
            let transfer = TransferId(round.into());
            let places = kind.places(round / 2 + 7, BLOCKS);
            peer.send(transfer, &node, round, BLOCKS, true);
            node.receive(transfer, &peer.address, &places);
            let arrived = event(&events);
            assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
            node.assert_holds(&kind.places(round, BLOCKS), &places);
        }
        node.assert_free();
    }
}

/// Returns the first GPU of a receiver whose ranks share no GPU with the sender ranks that have
/// heads in common with them; NCCL does not connect a GPU to itself. The ranks of a node use
/// consecutive GPUs, modulo their number, and the sender begins at GPU 0.
fn receiver_gpu(gpus: usize, senders: usize, receivers: usize) -> Option<usize> {
    let has_common_heads = |from: usize, to: usize| match senders >= receivers {
        true => from / (senders / receivers) == to,
        false => to / (receivers / senders) == from,
    };
    let is_apart = |place: &usize| {
        let mut pairs = (0..senders).flat_map(|from| (0..receivers).map(move |to| (from, to)));
        pairs.all(|(from, to)| !has_common_heads(from, to) || from % gpus != (place + to) % gpus)
    };
    (0..gpus).find(is_apart)
}

/// Needs no GPU.
pub(crate) fn ranks_with_common_heads_find_different_gpus() {
    for (gpus, senders, receivers, place) in [
        (1, 1, 1, None),
        (2, 1, 1, Some(1)),
        (2, 2, 2, Some(1)),
        // GPU 1 has a sender rank already.
        (2, 2, 1, None),
        (3, 2, 1, Some(2)),
        (4, 2, 1, Some(2)),
        (2, 1, 2, None),
        (3, 1, 2, Some(1)),
        (4, 2, 4, Some(1)),
        (4, 4, 2, Some(3)),
        (4, 4, 4, Some(1)),
    ] {
        let found = receiver_gpu(gpus, senders, receivers);
        assert_eq!(found, place, "{senders} to {receivers} ranks on {gpus} GPUs");
    }
}

/// Transfers between all supported rank counts that the GPUs allow. Sender and receiver ranks with
/// common heads are on different GPUs.
pub(crate) fn nccl_transfer_between_tp_ranks_preserves_kv() {
    let (gpus, _alone) = gpus();
    use NodeKind::{FourRanks, LargeDelayed, LargeGatherKernel, TwoRanks, TwoRanksDelayed};
    let cases = [
        (2, TwoRanks, TwoRanks),
        (2, TwoRanksDelayed, TwoRanksDelayed),
        (3, LargeGatherKernel, TwoRanks),
        (3, TwoRanksDelayed, LargeDelayed),
        (4, TwoRanks, FourRanks),
        (4, FourRanks, TwoRanks),
        (4, FourRanks, FourRanks),
    ];
    for (needed, sender, receiver) in cases {
        let what = format!("{} to {}", sender.name(), receiver.name());
        if gpus < needed {
            lacks(needed, &format!("{what} needs {needed} GPUs, found {gpus}"));
        }
        let place = receiver_gpu(gpus, sender.ranks(), receiver.ranks());
        let place = place.expect("the case names enough GPUs");
        let mut peer = Peer::start_as(0, TransferKind::Nccl, sender);
        let (sink, events) = channel();
        let node = Node::start_as("node", place, TransferKind::Nccl, receiver, sink);
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

/// A rank that shares its GPU with its peer rank cannot use NCCL: the pair counts a fallback and
/// uses another transport.
pub(crate) fn ranks_sharing_a_gpu_with_their_sender_fall_back_to_another_transport() {
    let (_, _alone) = gpus();
    require_gpus(2);
    // The first ranks of sender and receiver share GPU 0; the sender's second rank and the receiver
    // share GPU 1.
    for (sender, receiver, place) in [
        (NodeKind::LargeGatherKernel, NodeKind::TwoRanks, 0),
        (NodeKind::TwoRanksDelayed, NodeKind::LargeDelayed, 1),
    ] {
        let mut peer = Peer::start_as(0, TransferKind::Nccl, sender);
        let (sink, events) = channel();
        let node = Node::start_as("node", place, TransferKind::Nccl, receiver, sink);
        let (transfer, places) = (TransferId(1), receiver.places(3, BLOCKS));
        peer.send(transfer, &node, 1, BLOCKS, true);
        node.receive(transfer, &peer.address, &places);
        let arrived = event(&events);
        assert!(matches!(arrived, Event::Arrived { .. }), "{arrived:?}");
        node.assert_holds(&sender.places(1, BLOCKS), &places);
        assert_eq!((node.path().as_str(), node.transfers.metrics().fallbacks["nccl"]), ("tcp", 1));
    }
}
