//! Every table of the core is bounded, whatever peers and the node send.

use std::time::Duration;

use kernels::BlockId;
use kv_transfer::{
    TransferLimits,
    api::{Command, Epoch, Event, Peer, TransferFailure, TransferId},
    config::LEASE,
    control::{Body, ControlMessage, Hello, Reserve},
    protocol::Action,
};

use crate::{
    node::{Node, identity},
    world::{CALM, Step, TransferPlan, World},
};

const LIMITS: TransferLimits = TransferLimits {
    transfers_max: 10,
    pairs_max: 3,
    early_max: 4,
    tombstones_max: 20,
    chunk_bytes_max: 3000,
    pair_idle: Duration::from_secs(60),
    commands_max: 64,
};

fn world(nodes: usize) -> World {
    World::with_limits(7, nodes, 200, CALM, LIMITS)
}

fn source(world: &World, node: usize) -> Peer {
    Peer { node_id: world.nodes[node].name.clone(), epoch: world.nodes[node].epoch }
}

fn hello(node: usize) -> Body {
    hello_message(node, false)
}

fn hello_message(node: usize, in_advance: bool) -> Body {
    Body::Hello(Hello {
        identity: identity(),
        control_endpoint: format!("tcp://node-{node}:1"),
        data_endpoint: format!("tcp://node-{node}:2"),
        transports: vec!["ipc@here".to_owned(), "tcp".to_owned()],
        integrity: vec!["xxh3".to_owned()],
        session: 1,
        in_advance,
    })
}

/// Delivers a control message from `node` to node 0.
fn receive_message(world: &mut World, node: usize, body: Body) {
    let (now, from) = (world.now(), source(world, node));
    world.nodes[0].core.handle_control(now, &from, ControlMessage::untraced(body));
}

fn reserve(transfer: u128) -> Body {
    Body::Reserve(Reserve {
        transfer: TransferId(transfer),
        model_fingerprint: identity().model_fingerprint,
        weight_version: identity().weight_version,
        prompt_hash: transfer,
        first_block: 0,
        blocks: vec![BlockId(0)],
    })
}

#[test]
fn early_reservations_are_bounded_and_expire_after_the_lease() {
    let mut world = world(2);
    let peer = source(&world, 1);
    let now = world.now();
    let core = &mut world.nodes[0].core;
    core.handle_control(now, &peer, ControlMessage::untraced(hello(1)));
    for transfer in 0..50 {
        core.handle_control(now, &peer, ControlMessage::untraced(reserve(transfer)));
        assert!(core.table_sizes().1 <= LIMITS.early_max);
    }
    assert_eq!(core.table_sizes().1, LIMITS.early_max);
    assert_eq!(core.active_count(), 0, "the node knows of none of them");
    world.run_until(world.now() + Duration::from_secs(5));
    assert_eq!(world.nodes[0].core.table_sizes().1, 0);
    assert!(world.nodes[0].events.is_empty());
}

#[test]
fn reservation_over_the_limit_of_early_ones_is_rejected_with_the_limit() {
    let mut world = world(2);
    let (now, peer) = (world.now(), source(&world, 1));
    let core = &mut world.nodes[0].core;
    core.handle_control(now, &peer, ControlMessage::untraced(hello(1)));
    for transfer in 0..=LIMITS.early_max as u128 {
        core.handle_control(now, &peer, ControlMessage::untraced(reserve(transfer)));
    }
    let actions = std::iter::from_fn(|| core.poll_action());
    let reason_of = |action: Action| match action {
        Action::SendControl { message, .. } => match message.body {
            Body::Abort { reason, .. } => Some(reason),
            _ => None,
        },
        _ => None,
    };
    let reasons: Vec<String> = actions.filter_map(reason_of).collect();
    assert_eq!(reasons, ["4 RESERVEs wait for their Prefill calls, the maximum"]);
}

#[test]
fn tombstones_are_bounded_for_local_and_remote_aborts() {
    let mut world = world(2);
    let peer = source(&world, 1);
    let now = world.now();
    let core = &mut world.nodes[0].core;
    core.handle_control(now, &peer, ControlMessage::untraced(hello(1)));
    for id in 0..500 {
        let (transfer, reason) = (TransferId(id), "gone".to_owned());
        if id % 2 == 0 {
            core.handle_command(now, Command::Abort { transfer, reason });
        } else {
            core.handle_control(
                now,
                &peer,
                ControlMessage::untraced(Body::give_up(transfer, reason)),
            );
        }
        assert!(core.table_sizes().2 <= LIMITS.tombstones_max);
    }
    assert_eq!(core.table_sizes().2, LIMITS.tombstones_max);
}

#[test]
fn transfer_aborted_before_it_began_fails_at_once() {
    let mut world = world(2);
    let transfer = TransferId(4);
    let reason = "the client left".to_owned();
    world.at(world.now(), 0, Step::Command(Command::Abort { transfer, reason }));
    let plan = TransferPlan::of_three_blocks(transfer, 0, 1);
    let later = world.now() + Duration::from_millis(20);
    world.plan(plan, Some(later), Some(later));
    world.run_until(world.now() + Duration::from_millis(300));
    for node in [0, 1] {
        assert!(world.end_of(node, transfer).is_some_and(|(_, succeeded)| !succeeded));
    }
}

#[test]
fn transfer_over_the_limit_is_rejected_with_the_limit() {
    let mut world = world(2);
    let peer = world.address(1);
    for id in 0..=LIMITS.transfers_max as u128 {
        let command = Command::Send {
            transfer: TransferId(id),
            peer: peer.clone(),
            prompt_hash: 0,
            deadline: Duration::from_secs(5),
            traceparent: String::new(),
        };
        world.at(world.now(), 0, Step::Command(command));
    }
    world.run_until(world.now() + Duration::from_millis(1));
    assert_eq!(world.nodes[0].core.table_sizes().0, LIMITS.transfers_max);
    let [(_, Event::SendFailed { transfer, failure: TransferFailure::Aborted { reason } })] =
        world.nodes[0].events.as_slice()
    else {
        panic!("{:?}", world.nodes[0].events);
    };
    assert_eq!((transfer.0, reason.as_str()), (10, "10 transfers are in progress, the maximum"));
}

/// Time for which a pair that a request opened is not evicted.
const RESERVE_TIMEOUT: Duration = Duration::from_millis(500);

#[test]
fn pair_opened_for_a_request_is_not_evicted_before_its_reservation() {
    let mut world = world(6);
    for node in 1..6 {
        receive_message(&mut world, node, hello(node));
    }
    let first = [1, 2, 3].map(|node| world.nodes[node].epoch);
    assert!(first.iter().all(|epoch| peers(&world, 0).contains(epoch)), "{:?}", peers(&world, 0));
    // Pairs with a reservation stay. The fourth pair evicts one of the others.
    for node in [1, 2] {
        receive_message(&mut world, node, reserve(node as u128));
    }
    assert_eq!(world.nodes[0].core.table_sizes().1, 2);
    world.run_until(world.now() + RESERVE_TIMEOUT);
    receive_message(&mut world, 4, hello(4));
    let expected = [1, 2, 4].map(|node| world.nodes[node].epoch);
    assert!(expected.iter().all(|epoch| peers(&world, 0).contains(epoch)));
}

#[test]
fn early_handshakes_evict_no_pair_and_leave_room_for_requests() {
    let mut world = world(6);
    for node in 1..6 {
        receive_message(&mut world, node, hello_message(node, true));
    }
    let met = peers(&world, 0);
    assert_eq!(met.len(), LIMITS.pairs_max.div_ceil(2));
    // Requests open pairs, which then become idle.
    for node in 1..4 {
        receive_message(&mut world, node, hello(node));
    }
    world.run_until(world.now() + RESERVE_TIMEOUT * 2);
    let asked_for = peers(&world, 0);
    assert_eq!(asked_for.len(), LIMITS.pairs_max);
    for node in [4, 5] {
        receive_message(&mut world, node, hello_message(node, true));
        assert_eq!(peers(&world, 0), asked_for);
    }
    receive_message(&mut world, 5, hello(5));
    assert!(peers(&world, 0).contains(&world.nodes[5].epoch), "a request evicts an idle pair");
}

#[test]
fn few_pairs_with_gpu_memory_are_connected_early() {
    let limits = TransferLimits { pairs_max: 40, ..LIMITS };
    let mut world = World::with_limits(7, 12, 200, CALM, limits);
    for node in 1..12 {
        receive_message(&mut world, node, hello_message(node, true));
    }
    assert_eq!(peers(&world, 0).len(), 4);
}

/// Returns a world in which node 4 has sent an early HELLO to node 0, which accepts only pairs of
/// requests.
fn rejected_early_handshake() -> World {
    let mut world = world(5);
    for node in 1..4 {
        receive_message(&mut world, node, hello(node));
    }
    world.run_until(world.now() + RESERVE_TIMEOUT);
    connect(&mut world, 4, 0);
    world
}

#[test]
fn unanswered_early_handshake_is_repeated_by_the_first_transfer() {
    let mut world = rejected_early_handshake();
    assert!(!peers(&world, 0).contains(&world.nodes[4].epoch));
    assert_eq!(peers(&world, 4), [world.nodes[0].epoch]);
    let (now, transfer) = (world.now(), TransferId(1));
    let plan = TransferPlan::of_three_blocks(transfer, 0, 4);
    // The sender, node 0, learns of the transfer from node 4's HELLO, before its own command.
    world.plan(plan, Some(now), Some(now + Duration::from_millis(75)));
    world.run_until(now + Duration::from_millis(70));
    assert!(peers(&world, 0).contains(&world.nodes[4].epoch), "node 4 repeats the HELLO at once");
    world.run_until(now + Duration::from_secs(1));
    assert!(world.end_of(4, transfer).is_some_and(|(_, succeeded)| succeeded));
}

#[test]
fn transfer_during_an_early_handshake_gets_the_timeout_of_its_own_handshake() {
    let mut world = rejected_early_handshake();
    // A millisecond before the time-out of the unanswered early handshake.
    world.run_until(world.now() + LEASE - Duration::from_millis(21));
    assert!(!peers(&world, 0).contains(&world.nodes[4].epoch));
    assert_eq!(peers(&world, 4), [world.nodes[0].epoch]);
    let (now, transfer) = (world.now(), TransferId(1));
    let plan = TransferPlan::of_three_blocks(transfer, 0, 4);
    world.plan(plan, Some(now), Some(now + Duration::from_millis(75)));
    world.run_until(now + Duration::from_secs(1));
    assert!(world.end_of(4, transfer).is_some_and(|(_, succeeded)| succeeded));
}

#[test]
fn pairs_are_bounded_and_the_longest_idle_pair_is_evicted() {
    let mut world = world(6);
    for node in 1..6 {
        let from = source(&world, node);
        world.at(world.now(), 0, Step::ControlMessage(from, ControlMessage::untraced(hello(node))));
        world.run_until(world.now() + RESERVE_TIMEOUT);
        assert!(world.nodes[0].core.pairs().count() <= LIMITS.pairs_max);
    }
    let epochs: Vec<Epoch> = world.nodes[0].core.pairs().map(|pair| pair.peer.epoch).collect();
    for node in 3..6 {
        assert!(epochs.contains(&world.nodes[node].epoch), "node {node} came last and stays");
    }
}

/// Interval at which a router repeats its connect calls.
const CONNECT_INTERVAL: Duration = Duration::from_secs(20);

fn connect(world: &mut World, node: usize, other: usize) {
    let command = Command::Connect { peer: world.address(other), sends: true, guard: None };
    world.at(world.now(), node, Step::Command(command));
    world.run_until(world.now() + Duration::from_millis(20));
}

fn peers(world: &World, node: usize) -> Vec<Epoch> {
    world.nodes[node].core.pairs().map(|pair| pair.peer.epoch).collect()
}

#[test]
fn early_connects_evict_no_pair_and_leave_room_for_requests() {
    let mut world = world(6);
    let mut met = Vec::new();
    for round in 0..5 {
        for other in 1..6 {
            connect(&mut world, 0, other);
        }
        let now = peers(&world, 0);
        if round == 0 {
            met = now.clone();
            assert!(!met.is_empty() && met.len() < LIMITS.pairs_max, "{met:?}");
        }
        assert_eq!(now, met, "round {round}");
        for (other, node) in world.nodes.iter().enumerate().skip(1) {
            assert_eq!(world.is_connected(0, other), met.contains(&node.epoch), "node {other}");
        }
        world.run_until(world.now() + CONNECT_INTERVAL);
    }
    // A request of an unconnected peer is accepted without an eviction.
    let from = source(&world, 5);
    world.at(
        world.now(),
        0,
        Step::ControlMessage(from.clone(), ControlMessage::untraced(hello(5))),
    );
    world.run_until(world.now() + Duration::from_millis(5));
    let now = peers(&world, 0);
    assert!(now.contains(&from.epoch) && met.iter().all(|epoch| now.contains(epoch)), "{now:?}");
    // Repeated early connects do not evict the pair of the request.
    for other in 1..5 {
        connect(&mut world, 0, other);
    }
    assert_eq!(peers(&world, 0), now);
}

#[test]
fn early_pair_stays_while_connect_is_repeated() {
    let mut world = world(2);
    for _ in 0..6 {
        // Both nodes get the command.
        connect(&mut world, 0, 1);
        connect(&mut world, 1, 0);
        assert!(world.is_connected(0, 1) && world.is_connected(1, 0));
        world.run_until(world.now() + CONNECT_INTERVAL);
    }
    assert_eq!(peers(&world, 0).len(), 1, "it is {:?} old", world.now() - world.start());
    world.run_until(world.now() + LIMITS.pair_idle);
    assert_eq!((peers(&world, 0), peers(&world, 1)), (vec![], vec![]), "no connect is repeated");
}

#[test]
fn no_pair_is_connected_early_across_hosts() {
    let mut world = world(3);
    world.nodes[1] = Node::on_host("elsewhere", 1, 200, LIMITS);
    let end = world.start() + 3 * LIMITS.pair_idle;
    while world.now() < end {
        connect(&mut world, 0, 1);
        assert!(!world.is_connected(0, 1), "after {:?}", world.now() - world.start());
        world.run_until(world.now() + CONNECT_INTERVAL);
    }
    assert_eq!(peers(&world, 0), [], "no pair stays open across hosts");
    // A transfer connects the pair.
    let plan = TransferPlan::of_three_blocks(TransferId(1), 0, 1);
    let now = world.now();
    world.plan(plan, Some(now), Some(now));
    world.run_until(now + Duration::from_secs(1));
    assert!(world.end_of(1, TransferId(1)).is_some_and(|(_, succeeded)| succeeded));
}

#[test]
fn node_does_not_connect_to_itself() {
    let mut world = world(2);
    let command = Command::Send {
        transfer: TransferId(1),
        peer: world.address(0),
        prompt_hash: 0,
        deadline: Duration::from_secs(5),
        traceparent: String::new(),
    };
    world.at(world.now(), 0, Step::Command(command));
    world.run_until(world.now() + Duration::from_millis(1));
    let [(_, Event::SendFailed { failure: TransferFailure::Aborted { reason }, .. })] =
        world.nodes[0].events.as_slice()
    else {
        panic!("{:?}", world.nodes[0].events);
    };
    assert_eq!(reason, "the peer is this process; expected another node");
}
