//! Peers with another model, invalid messages, and arbitrary messages.

use std::time::{Duration, Instant};

use kernels::{BlockId, sampling::SampledToken};
use kv_transfer::{
    api::{Command, Event, Identity, Peer, TransferFailure, TransferId},
    config::LEASE,
    control::{AbortCause, Body, Chunk, ControlMessage, Done, Hello, HelloOk, Reserve},
    protocol::{Action, Core, DataEvent, Local},
};
use proptest::prelude::*;
use simulation_base::Random;

use crate::{
    node::identity,
    world::{BLOCK_BYTES, CALM, TransferPlan, World},
};

#[test]
fn other_model_is_refused_on_both_sides_with_both_fingerprints() {
    let mut world = World::new(3, 2, 40, CALM);
    let other = Identity { model_fingerprint: 0xbeef, ..identity() };
    world.nodes[1].core = Core::new(
        world.now(),
        Local {
            epoch: world.nodes[1].epoch,
            identity: other,
            control_endpoint: "tcp://node-1:1".to_owned(),
            data_endpoint: "tcp://node-1:2".to_owned(),
            transports: vec!["tcp".to_owned()],
            integrity: vec!["xxh3".to_owned()],
            block_bytes: BLOCK_BYTES,
            limits: Default::default(),
        },
    );
    let plan = TransferPlan::of_three_blocks(TransferId(1), 0, 1);
    let now = world.now();
    world.plan(plan, Some(now), Some(now));
    world.run_until(now + Duration::from_millis(100));
    for node in &world.nodes {
        let [(_, event)] = node.events.as_slice() else { panic!("{:?}", node.events) };
        let (Event::ReceiveFailed { failure, .. } | Event::SendFailed { failure, .. }) = event
        else {
            panic!("{event:?}");
        };
        assert!(matches!(failure, TransferFailure::Refused { .. }), "{failure}");
        let line = failure.to_string();
        for fingerprint in ["0000feed", "0000beef"] {
            assert!(line.contains(fingerprint), "{line}");
        }
    }
    // The next attempt fails without a handshake.
    let again = TransferPlan { transfer: TransferId(2), ..world.plans[&TransferId(1)].clone() };
    let now = world.now();
    world.plan(again, Some(now), None);
    world.run_until(now);
    assert!(world.end_of(1, TransferId(2)).is_some());
}

/// Returns node 0 with one transfer in flight, as the receiver or as the sender.
fn begun(receives: bool) -> (Core, Peer, Instant) {
    let world = World::new(3, 2, 40, CALM);
    let (now, peer) = (world.now(), world.address(1));
    let from = Peer { node_id: peer.node_id.clone(), epoch: peer.epoch };
    let (transfer, deadline) = (TransferId(1), Duration::from_secs(5));
    let mut core = world.nodes.into_iter().next().expect("there are two").core;
    core.handle_control(now, &from, ControlMessage::untraced(hello(identity())));
    let traceparent = String::new();
    core.handle_command(
        now,
        if receives {
            let blocks = vec![BlockId(3)];
            let (prompt_hash, first_block) = (5, 0);
            Command::Receive {
                transfer,
                peer,
                prompt_hash,
                first_block,
                blocks,
                answer_timeout: LEASE,
                deadline,
                traceparent,
            }
        } else {
            Command::Send { transfer, peer, prompt_hash: 5, deadline, traceparent }
        },
    );
    while core.poll_action().is_some() {}
    (core, from, now)
}

/// Checks that the node gets `Refused` with these words, and the peer an abort with cause mismatch.
fn assert_refused(core: &mut Core, words: &str) {
    let actions: Vec<Action> = std::iter::from_fn(|| core.poll_action()).collect();
    let is_refusal = |action: &Action| match action {
        Action::Emit(
            Event::SendFailed { failure: TransferFailure::Refused { reason, .. }, .. }
            | Event::ReceiveFailed { failure: TransferFailure::Refused { reason, .. }, .. },
        ) => reason.contains(words),
        _ => false,
    };
    assert!(actions.iter().any(is_refusal), "{actions:?}");
    let tells_peer = |action: &Action| match action {
        Action::SendControl { message, .. } => {
            matches!(message.body, Body::Abort { cause: AbortCause::Mismatch, .. })
        }
        _ => false,
    };
    assert!(actions.iter().any(tells_peer), "{actions:?}");
    let has_arrived = |action: &Action| matches!(action, Action::Emit(Event::Arrived { .. }));
    assert!(!actions.iter().any(has_arrived), "{actions:?}");
}

#[test]
fn reserve_for_other_model_or_weights_is_refused_with_the_field() {
    for (model_fingerprint, weight_version, words) in [
        (0xfeed, 4, "weight_version 3 against 4"),
        (0xbeef, 3, "model_fingerprint 0000000000000000000000000000feed against"),
    ] {
        let (mut core, from, now) = begun(false);
        let reserve = Body::Reserve(Reserve {
            transfer: TransferId(1),
            model_fingerprint,
            weight_version,
            prompt_hash: 5,
            first_block: 0,
            blocks: vec![BlockId(3)],
        });
        core.handle_control(now, &from, ControlMessage::untraced(reserve));
        assert_refused(&mut core, words);
    }
}

#[test]
fn invalid_reserve_fails_its_transfer_with_the_reason() {
    for (prompt_hash, first_block, block_count, words) in [
        (5, 0, 100_001, "RESERVE has 100001 blocks; expected at most 100000"),
        (5, u32::MAX, 2, "RESERVE starts at block 4294967295 and overflows"),
        (
            6,
            0,
            2,
            "RESERVE has prompt hash 00000000000000000000000000000006; expected 00000000000000000000000000000005",
        ),
    ] {
        let (mut core, from, now) = begun(false);
        let transfer = TransferId(1);
        let reserve = Reserve {
            transfer,
            model_fingerprint: identity().model_fingerprint,
            weight_version: identity().weight_version,
            prompt_hash,
            first_block,
            blocks: (0..block_count).map(BlockId).collect(),
        };
        core.handle_control(now, &from, ControlMessage::untraced(Body::Reserve(reserve)));
        let actions: Vec<Action> = std::iter::from_fn(|| core.poll_action()).collect();
        let fails = |action: &Action| match action {
            Action::Emit(Event::SendFailed {
                failure: TransferFailure::Protocol { violation, .. },
                ..
            }) => violation.contains(words),
            _ => false,
        };
        assert!(actions.iter().any(fails), "{words}: {actions:?}");
        let is_ready = |action: &Action| matches!(action, Action::Emit(Event::Ready { .. }));
        assert!(!actions.iter().any(is_ready), "{words}: {actions:?}");
        let tells_peer = |action: &Action| match action {
            Action::SendControl { message, .. } => matches!(message.body, Body::Abort { .. }),
            _ => false,
        };
        assert!(actions.iter().any(tells_peer), "{words}: {actions:?}");
    }
}

#[test]
fn refused_reserve_fails_the_transfer_of_its_sender() {
    let (mut core, from, now) = begun(true);
    let (transfer, reason) = (TransferId(1), "weight_version 3 against 4".to_owned());
    let abort = Body::Abort { transfer, cause: AbortCause::Mismatch, reason };
    core.handle_control(now, &from, ControlMessage::untraced(abort));
    let events: Vec<Event> = std::iter::from_fn(|| core.poll_action())
        .filter_map(|action| match action {
            Action::Emit(event) => Some(event),
            _ => None,
        })
        .collect();
    let [Event::ReceiveFailed { failure: TransferFailure::Refused { peer, reason }, .. }] =
        events.as_slice()
    else {
        panic!("{events:?}");
    };
    assert_eq!((peer.as_str(), reason.as_str()), ("node-1", "weight_version 3 against 4"));
}

/// Every block has arrived intact. Only the weights that `DONE` names are wrong.
#[test]
fn kv_of_another_model_or_other_weights_never_arrives() {
    for (model_fingerprint, weight_version, is_ours) in
        [(0xfeed, 3, true), (0xfeed, 4, false), (0xbeef, 3, false)]
    {
        for done_first in [false, true] {
            let (mut core, from, now) = begun(true);
            let transfer = TransferId(1);
            let chunk = Body::Chunk(Chunk {
                transfer,
                chunk: 0,
                first_block: 0,
                block_count: 1,
                bytes: BLOCK_BYTES as u64,
            });
            core.handle_control(now, &from, ControlMessage::untraced(chunk));
            while core.poll_action().is_some() {}
            let done = ControlMessage::untraced(Body::Done(Done {
                transfer,
                chunk_count: 1,
                first_index: 0,
                token: SampledToken { id: 1, logprobs: None, pooled: None },
                integrity: vec![7],
                model_fingerprint,
                weight_version,
            }));
            let received = DataEvent::Received { transfer, chunk: 0, integrity: 7 };
            if done_first {
                core.handle_control(now, &from, done);
                if !is_ours {
                    core.handle_data(now, DataEvent::Released { transfer });
                }
                core.handle_data(now, received);
            } else {
                core.handle_data(now, received);
                core.handle_control(now, &from, done);
            }
            if is_ours {
                let mut actions = std::iter::from_fn(|| core.poll_action());
                assert!(
                    actions.any(|action| matches!(action, Action::Emit(Event::Arrived { .. })))
                );
            } else {
                assert_refused(&mut core, "DONE: ");
            }
        }
    }
}

fn hello(identity: Identity) -> Body {
    Body::Hello(Hello {
        identity,
        control_endpoint: "tcp://node-1:1".to_owned(),
        data_endpoint: "tcp://node-1:2".to_owned(),
        transports: vec!["tcp".to_owned()],
        integrity: vec!["xxh3".to_owned()],
        session: 1,
        in_advance: false,
    })
}

/// Returns any message that a peer can form, with one of few ids.
fn any_message(random: &mut Random) -> Body {
    let transfer = TransferId(u128::from(random.below(6)));
    let number = |random: &mut Random| match random.below(8) {
        0 => u32::MAX,
        1 => u32::MAX - 1,
        _ => random.below(12) as u32,
    };
    match random.below(13) {
        0 => hello(if random.chance(80) { identity() } else { Identity { tp: 2, ..identity() } }),
        1 => Body::HelloOk(HelloOk {
            identity: identity(),
            data_endpoint: "x".to_owned(),
            transport: if random.chance(80) { "tcp" } else { "pigeon" }.to_owned(),
            integrity: "xxh3".to_owned(),
            session: random.below(4),
            transports: Vec::new(),
        }),
        2 if random.chance(10) => Body::Reject { reason: "no".to_owned(), identity: identity() },
        2 | 3 => Body::Reserve(Reserve {
            transfer,
            model_fingerprint: if random.chance(90) { 0xfeed } else { 1 },
            weight_version: 3,
            prompt_hash: u128::from(random.below(2)),
            first_block: number(random),
            blocks: (0..random.below(5)).map(|block| BlockId(block as u32)).collect(),
        }),
        4..=6 => {
            let block_count = number(random);
            Body::Chunk(Chunk {
                transfer,
                chunk: number(random),
                first_block: number(random),
                block_count,
                bytes: if random.chance(80) {
                    u64::from(block_count) * BLOCK_BYTES as u64
                } else {
                    random.next()
                },
            })
        }
        7 => Body::ClearToSend { transfer, chunk: number(random) },
        8 => {
            let chunk_count = number(random);
            Body::Done(Done {
                transfer,
                chunk_count,
                first_index: 0,
                token: SampledToken { id: 1, logprobs: None, pooled: None },
                integrity: vec![7; chunk_count.min(20) as usize],
                model_fingerprint: identity().model_fingerprint,
                weight_version: if random.chance(90) { identity().weight_version } else { 9 },
            })
        }
        9 => Body::Ack { transfer },
        10 => Body::Abort {
            transfer,
            cause: if random.chance(50) { AbortCause::Unspecified } else { AbortCause::Mismatch },
            reason: String::new(),
        },
        11 => Body::AbortAck { transfer },
        _ => Body::Heartbeat { transfers: vec![transfer], awaited: vec![transfer] },
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 800, ..ProptestConfig::default() })]

    /// For any messages of an authenticated peer: no panic, no receive is posted outside the
    /// reservation, and each transfer that the node began ends once.
    #[test]
    fn arbitrary_messages_of_a_peer_harm_no_other_transfer(seed in any::<u64>(), length in 1usize..120) {
        let mut random = Random::new(seed);
        let mut world = World::new(seed, 2, 8, CALM);
        let (mut now, peer) = (world.now(), world.address(1));
        let from = Peer { node_id: peer.node_id.clone(), epoch: peer.epoch };
        let core = &mut world.nodes[0].core;
        core.handle_control(now, &from, ControlMessage::untraced(hello(identity())));
        let (mut begun, mut ended) = (Vec::new(), Vec::new());
        for step in 0..length {
            now += Duration::from_millis(random.below(60));
            let transfer = TransferId(u128::from(random.below(6)));
            match random.below(10) {
                0 if !begun.contains(&transfer) => {
                    begun.push(transfer);
                    core.handle_command(now, Command::Receive {
                        transfer,
                        peer: peer.clone(),
                        prompt_hash: 0,
                        first_block: 2,
                        blocks: vec![BlockId(100), BlockId(101), BlockId(102)],
                        answer_timeout: LEASE,
                        deadline: Duration::from_secs(60),
                        traceparent: String::new(),
                    });
                }
                1 if !begun.contains(&transfer) => {
                    begun.push(transfer);
                    core.handle_command(now, Command::Send {
                        transfer,
                        peer: peer.clone(),
                        prompt_hash: 0,
                        deadline: Duration::from_secs(60),
                        traceparent: String::new(),
                    });
                }
                2 => core.handle_command(now, Command::Written {
                    transfer,
                    first_block: random.below(6) as u32,
                    blocks: (0..random.below(6)).map(|block| BlockId(block as u32)).collect(),
                }),
                _ => core.handle_control(now, &from, ControlMessage::untraced(any_message(&mut random))),
            }
            if core.next_deadline(now).is_some_and(|at| at <= now) || step + 1 == length {
                core.on_deadline(now);
            }
            drain(core, now, &mut random, &mut ended);
        }
        for _ in 0..3000 {
            let Some(at) = core.next_deadline(now) else { break };
            now = now.max(at);
            core.on_deadline(now);
            drain(core, now, &mut random, &mut ended);
        }
        begun.sort();
        ended.sort();
        prop_assert_eq!(begun, ended);
        prop_assert_eq!(core.table_sizes(), (0, 0, 0));
    }
}

fn drain(
    core: &mut Core,
    now: std::time::Instant,
    random: &mut Random,
    ended: &mut Vec<TransferId>,
) {
    while let Some(action) = core.poll_action() {
        match action {
            Action::PostReceive { transfer, chunk, blocks, .. } => {
                assert!(!blocks.is_empty());
                assert!(blocks.iter().all(|block| (100..103).contains(&block.0)));
                if random.chance(50) {
                    let event = DataEvent::Received { transfer, chunk, integrity: 7 };
                    core.handle_data(now, event);
                }
            }
            Action::SendChunk { transfer, chunk, .. } if random.chance(50) => {
                core.handle_data(now, DataEvent::Sent { transfer, chunk, integrity: 7 });
            }
            Action::Cancel { transfer, .. } => {
                core.handle_data(now, DataEvent::Released { transfer });
            }
            Action::Emit(
                Event::Arrived { transfer, .. }
                | Event::ReceiveFailed { transfer, .. }
                | Event::Delivered { transfer, .. }
                | Event::SendFailed { transfer, .. },
            ) => ended.push(transfer),
            _ => {}
        }
    }
}
