//! Random events on one simulated node, at every depth. A batch mixes rows with and without draft
//! tokens and grammars. After every input and every step, tokens equal those of a synchronous
//! oracle, block accounting balances, and handed-over blocks are unchanged.

mod common;

use std::time::Duration;

use common::{VOCABULARY, family_tokens, grammar::HashGrammar, limits, node::Node, speculation};
use engine::{
    ItlLimit, LoopOutcome, SchedulerConfig,
    event::{NewSequence, SequenceId, SequenceKind, SessionHint},
    executor::ExecutorLimits,
    tiers::{TierAdmission, TierConfig},
};
use kernels::{KvGroups, sampling::Sampling};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Event {
    Arrive {
        kind: SequenceKind,
        family: u32,
        len: usize,
        emitted: usize,
        shape: Shape,
    },
    Abort(prop::sample::Index),
    TransferReady(prop::sample::Index, u32),
    KvArrives(prop::sample::Index),
    TransferEnds(prop::sample::Index),
    /// One copy of the KV tiers advances or fails.
    Copy(usize, bool),
    Turns(u8),
    /// A turn that times out before the step in flight has finished.
    ShortTurn,
    Advance(u64),
}

#[derive(Clone, Debug)]
struct Shape {
    max_tokens: u32,
    min_tokens: u32,
    ignore_stop_tokens: bool,
    temperature: f32,
    seed: u64,
    salted: bool,
    /// Grammar seed and the length of a complete answer.
    grammar: Option<(u64, u32)>,
    deadline_ms: Option<u64>,
}

fn shape() -> impl Strategy<Value = Shape> {
    (
        1..40u32,
        prop_oneof![3 => Just(0), 1 => 0..8u32],
        any::<bool>(),
        prop_oneof![Just(0.0f32), Just(1.0)],
        0..3u64,
        prop::bool::weighted(0.1),
        prop::option::weighted(0.4, (0..3u64, 5..60u32)),
        prop::option::weighted(0.1, 1..2_000u64),
    )
        .prop_map(
            |(
                max_tokens,
                min_tokens,
                ignore_stop_tokens,
                temperature,
                seed,
                salted,
                grammar,
                deadline_ms,
            )| {
                Shape {
                    max_tokens,
                    min_tokens,
                    ignore_stop_tokens,
                    temperature,
                    seed,
                    salted,
                    grammar,
                    deadline_ms,
                }
            },
        )
}

fn event() -> impl Strategy<Value = Event> {
    let kind = prop_oneof![
        Just(SequenceKind::Compute),
        Just(SequenceKind::Send),
        Just(SequenceKind::Receive)
    ];
    let index = any::<prop::sample::Index>;
    prop_oneof![
        6 => (kind, 0..3u32, 1..100usize, 0..4usize, shape()).prop_map(
            |(kind, family, len, emitted, shape)| Event::Arrive { kind, family, len, emitted, shape }
        ),
        1 => index().prop_map(Event::Abort),
        4 => (index(), 0..8u32).prop_map(|(index, from)| Event::TransferReady(index, from)),
        4 => index().prop_map(Event::KvArrives),
        2 => index().prop_map(Event::TransferEnds),
        8 => (any::<usize>(), prop::bool::weighted(0.1))
            .prop_map(|(pick, fails)| Event::Copy(pick, fails)),
        8 => (1..8u8).prop_map(Event::Turns),
        1 => Just(Event::ShortTurn),
        1 => (0..300u64).prop_map(Event::Advance),
    ]
}

fn sequence(
    id: u128,
    node: &Node,
    kind: SequenceKind,
    family: u32,
    (len, emitted): (usize, usize),
    shape: Shape,
) -> NewSequence {
    let tokens = family_tokens(family, len);
    let emitted = emitted.min(len - 1);
    let constraint = shape.grammar.map(|(seed, answer_len)| {
        HashGrammar::new(seed, answer_len).after(&tokens[len - emitted..]).constraint()
    });
    NewSequence {
        id: SequenceId(id),
        kind,
        prompt_len: (len - emitted) as u32,
        tokens,
        sampling: Sampling {
            temperature: shape.temperature,
            seed: shape.seed,
            min_tokens: shape.min_tokens,
            stop_token_ids: vec![3, 4, VOCABULARY - 1],
            ..Sampling::greedy()
        },
        max_tokens: emitted as u32 + shape.max_tokens,
        ignore_stop_tokens: shape.ignore_stop_tokens,
        cache_salt: if shape.salted { "tenant".to_owned() } else { String::new() },
        adapter: None,
        session: SessionHint {
            session: id.is_multiple_of(3).then_some(family.into()),
            keep: id.is_multiple_of(4).then(|| Duration::from_millis(shape.seed % 500)),
        },
        constraint,
        deadline: node.now() + Duration::from_millis(shape.deadline_ms.unwrap_or(1_000_000_000)),
    }
}

fn run_events(
    config: SchedulerConfig,
    tiers: Option<TierConfig>,
    groups: KvGroups,
    host_slots: u32,
    events: Vec<Event>,
) {
    let mut node = Node::with_groups(config, tiers, groups);
    if tiers.is_some() {
        node.recover(Vec::new(), true);
    }
    node.grow_host(host_slots);
    let mut next_id = 0;
    for event in events {
        let ids = node.ids();
        let pick = |index: prop::sample::Index| (!ids.is_empty()).then(|| *index.get(&ids));
        match event {
            Event::Arrive { kind, family, len, emitted, shape } => {
                next_id += 1;
                node.arrive(sequence(next_id, &node, kind, family, (len, emitted), shape));
            }
            Event::Abort(index) => pick(index).into_iter().for_each(|id| node.abort(id)),
            Event::TransferReady(index, from) => {
                pick(index).into_iter().for_each(|id| node.transfer_ready(id, from));
            }
            Event::KvArrives(index) => pick(index).into_iter().for_each(|id| node.kv_arrives(id)),
            Event::TransferEnds(index) => {
                pick(index).into_iter().for_each(|id| node.transfer_ends(id));
            }
            Event::Copy(pick, fails) => {
                node.copy(pick, fails);
            }
            Event::Turns(count) => {
                for _ in 0..count {
                    node.turn();
                }
            }
            Event::ShortTurn => {
                node.turn_for(Duration::from_micros(1));
            }
            Event::Advance(ms) => node.advance(Duration::from_millis(ms)),
        }
    }
    wind_down(&mut node);
    node.assert_all_returned();
}

/// Completes all transfers and copies. Every sequence must then finish without further input.
fn wind_down(node: &mut Node) {
    for _ in 0..10_000 {
        let turn = node.turn();
        for id in node.unfinished() {
            node.transfer_ready(id, 0);
        }
        for id in node.receiving() {
            node.kv_arrives(id);
        }
        for id in node.transfers_to_end() {
            node.transfer_ends(id);
        }
        node.copy_all();
        if turn == LoopOutcome::Idle && node.unfinished().is_empty() && node.receiving().is_empty()
        {
            return;
        }
    }
    panic!("sequences never finish: {:?}\n{:?}", node.unfinished(), node.engine.scheduler());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn any_events_give_exact_tokens_and_leak_no_block(
        depth in 1..=3u32,
        slots in 1..=5u32,
        blocks in 7..30u32,
        step_tokens in 5..64u32,
        chunk_tokens in prop_oneof![Just(u32::MAX), Just(16), 1..20u32],
        tail_tokens in prop::option::of(1..20u32),
        prefix_cache in prop::bool::weighted(0.8),
        itl_max in prop::option::of(1..20u64),
        short_limits in any::<bool>(),
        drafts in prop::option::of((1..40u32, 1..64u32)),
        tiers in prop::option::of((0..40u32, 0..20u32, any::<bool>(), 1..500u64)),
        groups in common::kv_groups(),
        events in prop::collection::vec(event(), 1..120),
    ) {
        let drafts = drafts.filter(|_| groups.state_entries() == 0);
        let speculation = drafts.map(|(row_drafts, step_tokens)| speculation(row_drafts, step_tokens));
        let limits = ExecutorLimits { speculation, ..limits(slots, step_tokens, blocks, depth) };
        let itl = itl_max.map(|itl_max| ItlLimit {
            max: Duration::from_millis(itl_max),
            decode: Duration::from_millis(5),
            prefill: Duration::from_millis(5),
            token: Duration::from_micros(500),
            doubling_tokens: 50,
        });
        let config = SchedulerConfig {
            chunk_tokens,
            tail_tokens,
            prefix_cache,
            itl,
            ..common::unbounded_waits(limits)
        };
        let config = if short_limits {
            SchedulerConfig {
                waiting_max: 3,
                transfers_max: 4,
                reserve_timeout: Duration::from_millis(50),
                ready_timeout: Duration::from_millis(50),
                ..config
            }
        } else {
            config
        };
        let blocks_min = (7 * groups.count() + 3 * groups.state_entries()) as u32;
        let config = SchedulerConfig {
            limits: ExecutorLimits { blocks: blocks.max(blocks_min), ..limits },
            ..config
        };
        let tiers = tiers.filter(|_| groups.state_entries() == 0);
        let host_slots = tiers.map_or(0, |(_, host_slots, ..)| host_slots);
        let tiers = tiers.map(|(disk_slots, host_slots, always, timeout_ms)| TierConfig {
            admission: if always { TierAdmission::Always } else { TierAdmission::SecondTouch },
            host: host_slots > 0,
            sessions: always,
            disk_slots,
            load_timeout: Duration::from_millis(timeout_ms),
        });
        run_events(config, tiers, groups, host_slots, events);
    }
}
