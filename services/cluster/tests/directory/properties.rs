//! The invariants of a directory hold for any sequence of events.

use std::time::Duration;

use crate::world::*;
use cluster::{
    Directory, DirectoryAction, DirectoryInput, Failed, Health, Load, MemberChange, NodeChoice,
    NodeRequirements, Role,
};
use proptest::prelude::*;
use proto::v1;

const NODES: u16 = 4;

/// An event. Nodes 0 and 1 are prefill nodes, 2 and 3 decode nodes.
#[derive(Clone, Debug)]
enum Event {
    Join(u16),
    Leave(u16),
    Snapshot { node: u16, process: u8, load: Load, cached: Vec<u128> },
    Delta { node: u16, sequence: u64, load: Option<Load>, cached: Vec<u128> },
    NextDelta { node: u16, load: Load },
    Garbage { node: u16, event: Box<v1::ObserveEvent> },
    EndStream(u16),
    CallLost(usize),
    Pick { tokens: u32, exclude: u8, local_prefill: bool },
    Answered(usize),
    Busy(usize),
    Release(usize),
    Failed(usize),
    Served { which: usize, tokens: u32, itl_ms: u64 },
    Wait { millis: u64 },
}

fn loads() -> impl Strategy<Value = Load> {
    // Some loads are impossible: more blocks than the node has, or tokens of no sequence.
    let pending = prop_oneof![20 => 0..5000u64, 1 => Just(u64::MAX)];
    let counts = (1..50u32, 0..50u32, pending, 0..510u32);
    let costs = prop::option::weighted(0.9, step_costs());
    (counts, 0..500u32, prop::bool::weighted(0.1), costs).prop_map(
        |(counts, blocks_cached, draining, step_costs)| {
            let (running, waiting, pending_prompt_tokens, blocks_free) = counts;
            Load {
                running,
                waiting,
                pending_prompt_tokens,
                blocks_free,
                blocks_cached,
                draining,
                pending_prompt_pairs: pending_prompt_tokens.saturating_mul(100),
                context_tokens: u64::from(running) * 700,
                step_costs,
                ..Load::default()
            }
        },
    )
}

/// Returns costs of any size, including impossible costs.
fn step_costs() -> impl Strategy<Value = v1::StepCosts> {
    let ps = || prop_oneof![4 => 0..10_000_000_000u64, 1 => any::<u64>()];
    let prefill = (ps(), ps(), ps()).prop_map(|(step_ps, token_ps, pair_ps)| v1::PrefillCosts {
        step_ps,
        token_ps,
        pair_ps,
    });
    let decode = (ps(), ps(), ps()).prop_map(|(step_ps, row_ps, context_token_ps)| {
        v1::DecodeCosts { step_ps, row_ps, context_token_ps }
    });
    let limits = (0..9000u32, 0..9000u32, 0..100u32, 0..9u32);
    (limits, prop::option::of(prefill), prop::option::of(decode)).prop_map(
        |((step_tokens, chunk_tokens, itl_max_ms, slots), prefill, decode)| v1::StepCosts {
            step_tokens,
            chunk_tokens,
            itl_max_ms,
            prefill,
            decode,
            slots,
        },
    )
}

fn tier_blocks(hashes: &[bytes::Bytes]) -> v1::TierBlocks {
    let (stored, lost) = (hashes.to_vec(), hashes.to_vec());
    v1::TierBlocks { tier: hashes.len() as i32, stored, lost }
}

fn garbage() -> impl Strategy<Value = v1::ObserveEvent> {
    let hashes = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..4)
        .prop_map(|hashes| hashes.into_iter().map(Into::into).collect::<Vec<_>>());
    let record =
        ("[a-z ]{0,3}", prop::collection::vec(any::<u8>(), 14..18), -1..4i32, any::<u32>());
    (any::<u64>(), record, hashes, 0..3u8).prop_map(|(sequence, record, hashes, kind)| {
        let (node_id, epoch, role, prompt_tokens_max) = record;
        let record = v1::NodeRecord {
            node_id,
            epoch: epoch.into(),
            role,
            prompt_tokens_max,
            ..v1::NodeRecord::default()
        };
        let event = match kind {
            0 => None,
            1 => Some(v1::observe_event::Event::Snapshot(v1::NodeSnapshot {
                record: Some(record),
                load: Some(v1::NodeLoad::default()),
                tiers: vec![tier_blocks(&hashes)],
                cached_blocks: hashes,
            })),
            _ => Some(v1::observe_event::Event::Delta(v1::NodeDelta {
                load: None,
                cached: hashes.clone(),
                evicted: hashes.clone(),
                tiers: vec![tier_blocks(&hashes)],
                adapters: hashes.first().map(|hash| v1::AdaptersChanged {
                    adapters: vec![v1::Adapter { name: "a".into(), content_hash: hash.clone() }],
                }),
                arrived: hashes,
                weights: None,
            })),
        };
        v1::ObserveEvent { sequence: sequence % 4, event }
    })
}

fn events() -> impl Strategy<Value = Event> {
    let node = 0..NODES;
    let hashes = || prop::collection::vec(0..40u128, 0..6);
    prop_oneof![
        2 => node.clone().prop_map(Event::Join),
        1 => node.clone().prop_map(Event::Leave),
        6 => (node.clone(), 0..3u8, loads(), hashes()).prop_map(|(node, process, load, cached)| {
            Event::Snapshot { node, process, load, cached }
        }),
        2 => (node.clone(), 0..5u64, prop::option::of(loads()), hashes()).prop_map(
            |(node, sequence, load, cached)| Event::Delta { node, sequence, load, cached }
        ),
        4 => (node.clone(), loads()).prop_map(|(node, load)| Event::NextDelta { node, load }),
        1 => (node.clone(), garbage().prop_map(Box::new))
            .prop_map(|(node, event)| Event::Garbage { node, event }),
        2 => node.prop_map(Event::EndStream),
        1 => any::<usize>().prop_map(Event::CallLost),
        8 => (1..2100u32, 0..12u8, prop::bool::weighted(0.2))
            .prop_map(|(tokens, exclude, local_prefill)| Event::Pick { tokens, exclude, local_prefill }),
        3 => any::<usize>().prop_map(Event::Answered),
        2 => any::<usize>()
            .prop_map(Event::Busy),
        4 => any::<usize>().prop_map(Event::Release),
        2 => any::<usize>().prop_map(Event::Failed),
        2 => (any::<usize>(), 0..40u32, 0..200u64)
            .prop_map(|(which, tokens, itl_ms)| Event::Served { which, tokens, itl_ms }),
        4 => (0..4000u64).prop_map(|millis| Event::Wait { millis }),
    ]
}

fn node_address(node: u16) -> cluster::NodeAddress {
    address(if node < NODES / 2 { Role::Prefill } else { Role::Decode }, 1 + node)
}

/// Returns the epoch of a process: each node has processes 0..3, and epochs are numbered from 1
/// over all nodes.
fn process_of(node: u16, process: u8) -> u128 {
    1 + u128::from(node) * 3 + u128::from(process)
}

struct Run {
    world: World,
    /// Last sequence number of each node's stream, as a correct node counts.
    sequences: [u64; NODES as usize],
    attempts: Vec<NodeChoice>,
    log: Vec<String>,
}

impl Run {
    fn new() -> Self {
        Self {
            world: World::new(),
            sequences: [0; NODES as usize],
            attempts: Vec::new(),
            log: Vec::new(),
        }
    }

    fn step(&mut self, event: &Event) {
        let world = &mut self.world;
        match event {
            Event::Join(node) => world.join(&node_address(*node)),
            Event::Leave(node) => world.leave(&node_address(*node)),
            Event::Snapshot { node, process, load, cached } => {
                let address = node_address(*node);
                if world.stream_of(&address).is_some() {
                    self.sequences[usize::from(*node)] = 0;
                    let record = record(address.role, process_of(*node, *process));
                    world.send(&address, snapshot(&record, *load, cached));
                }
            }
            Event::Delta { node, sequence, load, cached } => {
                let address = node_address(*node);
                if world.stream_of(&address).is_some() {
                    world.send(
                        &address,
                        delta(*sequence, *load, cached, &cached[cached.len() / 2..]),
                    );
                }
            }
            Event::NextDelta { node, load } => {
                let address = node_address(*node);
                if world.health_of(&address) == Some(Health::Up) {
                    self.sequences[usize::from(*node)] += 1;
                    let sequence = self.sequences[usize::from(*node)];
                    world.send(&address, delta(sequence, Some(*load), &[], &[]));
                }
            }
            Event::Garbage { node, event } => {
                let address = node_address(*node);
                if world.stream_of(&address).is_some() {
                    world.send(&address, (**event).clone());
                }
            }
            Event::EndStream(node) => {
                let address = node_address(*node);
                if world.stream_of(&address).is_some() {
                    world.end_stream(&address);
                }
            }
            Event::CallLost(which) => {
                if let Some(&NodeChoice { assignment, .. }) = pick_one(&self.attempts, *which) {
                    world.input(DirectoryInput::CallLost { assignment, reason: "reset".into() });
                }
            }
            Event::Pick { tokens, exclude, local_prefill } => {
                let exclude = [epoch(1 + u128::from(*exclude))];
                let request = NodeRequirements {
                    exclude_decode: &exclude,
                    exclude_prefill: &exclude,
                    local_prefill: *local_prefill,
                    ..requirements(*tokens)
                };
                match world.pick_nodes(&request) {
                    Ok(picked) => {
                        assert!(!local_prefill || picked.prefill.is_none());
                        let roles = [Role::Decode, Role::Prefill];
                        let choices = [Some(picked.decode), picked.prefill];
                        for (role, choice) in roles.into_iter().zip(choices) {
                            let Some(choice) = choice else { continue };
                            let view =
                                world.directory.nodes().find(|view| view.address == choice.address);
                            let view = view.expect("a picked node is a member");
                            assert_eq!(view.health, Health::Up);
                            assert_eq!(view.address.role, role);
                            assert!(!view.load().draining);
                            assert!(!exclude.contains(&choice.record.epoch));
                            assert!(view.busy_until.is_none_or(|until| until <= world.now));
                            assert!(*tokens <= choice.record.prompt_tokens_max);
                            assert!(choice.cached_tokens < *tokens);
                            self.log.push(format!("{} {:?}", choice.address, picked.ttft));
                            self.attempts.push(choice);
                        }
                    }
                    Err(refusal) => self.log.push(refusal.to_string()),
                }
            }
            Event::Answered(which) => {
                if let Some(choice) = pick_one(&self.attempts, *which) {
                    world.directory.accepted(choice.assignment);
                    world.directory.first_token(world.now, choice.assignment);
                    let other = pick_one(&self.attempts, *which / 2).expect("one is there");
                    let elapsed = Duration::from_micros(*which as u64 % 1_000_000);
                    let (from, to) = (choice.assignment, other.assignment);
                    world.directory.delivered(world.now, from, to, elapsed);
                }
            }
            Event::Busy(which) => {
                if let Some(choice) = pick_one(&self.attempts, *which).cloned() {
                    world.directory.busy(world.now, choice.assignment);
                    self.attempts.retain(|other| other.assignment != choice.assignment);
                }
            }
            Event::Release(which) => {
                if let Some(choice) = pick_one(&self.attempts, *which).cloned() {
                    world.directory.release(choice.assignment);
                    // A second release has no effect.
                    world.directory.release(choice.assignment);
                    self.attempts.retain(|other| other.assignment != choice.assignment);
                }
            }
            Event::Failed(which) => {
                if let Some(choice) = pick_one(&self.attempts, *which) {
                    world.directory.failed(world.now, Failed::Node(choice.assignment));
                }
            }
            Event::Served { which, tokens, itl_ms } => {
                if let Some(choice) = pick_one(&self.attempts, *which) {
                    let waited = Duration::from_millis(itl_ms * u64::from(*tokens));
                    world.directory.served(choice.assignment);
                    world.directory.decoded(world.now, choice.assignment, *tokens, waited);
                }
            }
            Event::Wait { millis } => world.advance(Duration::from_millis(*millis)),
        }
        self.check();
    }

    fn check(&self) {
        let directory = &self.world.directory;
        let all_settled = directory.nodes().all(|view| view.health == Health::Up);
        assert!(
            all_settled || directory.next_deadline().is_some(),
            "every node that is not up has a deadline"
        );
        for view in directory.nodes() {
            let ours = self.attempts.iter().filter(|choice| {
                choice.address == view.address
                    && Some(choice.record.epoch) == view.record().map(|record| record.epoch)
            });
            assert!(view.in_flight <= ours.count(), "finished attempts are not counted");
        }
        if self.attempts.is_empty() {
            assert!(directory.nodes().all(|view| view.in_flight == 0));
        }
    }
}

fn pick_one(attempts: &[NodeChoice], which: usize) -> Option<&NodeChoice> {
    (!attempts.is_empty()).then(|| &attempts[which % attempts.len()])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// All assertions hold at every step. Afterwards every listed node that answers is up within
    /// the longest back-off, and every attempt can be released.
    #[test]
    fn any_history_keeps_the_invariants_and_recovers(history in prop::collection::vec(events(), 1..120)) {
        let mut run = Run::new();
        for event in &history {
            run.step(event);
        }
        for node in 0..NODES {
            run.step(&Event::Join(node));
        }
        // Each node answers every new probe, also when the node is up.
        let mut answered = [0, 1, 2, 3].map(|node| {
            let address = node_address(node);
            let is_up = run.world.health_of(&address) == Some(Health::Up);
            run.world.stream_of(&address).filter(|_| is_up)
        });
        let until = run.world.now + Duration::from_secs(20);
        while run.world.now < until {
            for (node, answered) in (0..NODES).zip(&mut answered) {
                let asked = run.world.stream_of(&node_address(node));
                if asked.is_some() && asked != *answered {
                    run.step(&Event::Snapshot { node, process: 0, load: idle(), cached: vec![] });
                    *answered = asked;
                }
            }
            run.step(&Event::Wait { millis: 100 });
        }
        for node in 0..NODES {
            prop_assert_eq!(run.world.health_of(&node_address(node)), Some(Health::Up));
        }
        for choice in std::mem::take(&mut run.attempts) {
            run.world.directory.release(choice.assignment);
        }
        run.check();
    }

    /// Choices do not depend on hash order or the clock.
    #[test]
    fn equal_histories_give_equal_choices(history in prop::collection::vec(events(), 1..80)) {
        let (mut one, mut two) = (Run::new(), Run::new());
        for event in &history {
            one.step(event);
            two.step(event);
        }
        prop_assert_eq!(one.log, two.log);
    }
}

#[test]
fn actions_do_not_depend_on_anything_but_seed_and_inputs() {
    let run = |seed| {
        let mut directory = Directory::new(seed, DEFAULT);
        let start = std::time::Instant::now();
        let mut actions: Vec<DirectoryAction> = Vec::new();
        for node in 0..NODES {
            let joined = MemberChange::Joined(node_address(node));
            directory.handle(start, DirectoryInput::Member(joined), &mut actions);
        }
        let mut waits = Vec::new();
        let mut now = start;
        for _ in 0..50 {
            now = directory.next_deadline().unwrap();
            waits.push(now - start);
            directory.on_deadline(now, &mut actions);
        }
        assert!(now > start);
        (actions, waits)
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3).1, run(4).1, "two routers do not probe in step");
}
