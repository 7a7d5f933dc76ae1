//! Random runs of coordinators and several participants: messages are lost, repeated and reordered, nodes receive damaged
//! bytes, and nodes, coordinators and trainers die at any message. Two updates of operators run at a time, and nodes
//! catch up. Some nodes overwrite their weights in place, and some updates have a seed node.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use proptest::prelude::*;
use weight_transfer::{
    BeginError, CommitError, Coordinator, CoordinatorCall, CoordinatorPhase, NodeReply,
    Participant, ParticipantAction, ParticipantInput, Phase, Plan, Proposal, Tensor, UpdateEnd,
    UpdateId, UpdateReport, UpdateState, WeightVersion, digest,
};

/// The ids of updates are above and below this one.
const FIRST_ID: u128 = 1000;

/// The bytes of weights.
type Bytes = Vec<u8>;
type Weights = (WeightVersion, Bytes);

fn version_of(bytes: &Bytes) -> WeightVersion {
    let tensor = Tensor {
        name: "weights".into(),
        dtype: "U8".into(),
        shape: vec![bytes.len() as u64],
        bytes: bytes.len() as u64,
    };
    let plan = Plan::new(vec![tensor], 4).unwrap();
    let digests: Vec<u128> = bytes.chunks(4).map(|chunk| digest([chunk])).collect();
    WeightVersion::of_content(&plan, &digests)
}

/// A node: what it serves and what it has prepared.
struct Node {
    participant: Participant,
    /// `None`: an update in place has overwritten the weights.
    serves: Option<Weights>,
    /// The weights to restore.
    last_served: Weights,
    prepared: Option<(UpdateId, Bytes)>,
    is_in_place: bool,
    /// The update in place that overwrites the weights.
    overwriting: Option<UpdateId>,
    /// Number of restarts. A new process loads the first weights.
    epoch: u32,
    is_reachable: bool,
}

impl Node {
    fn new(is_in_place: bool) -> Self {
        let loaded = (WeightVersion::LOADED, vec![0; 8]);
        Self {
            participant: Participant::default(),
            serves: Some(loaded.clone()),
            last_served: loaded,
            prepared: None,
            is_in_place,
            overwriting: None,
            epoch: 0,
            is_reachable: true,
        }
    }

    fn version(&self) -> WeightVersion {
        self.serves.as_ref().map_or(WeightVersion::NONE, |(version, _)| *version)
    }

    /// Restores overwritten weights unless an update brings weights.
    fn restore(&mut self) {
        if self.overwriting.is_none() {
            self.serves = Some(self.last_served.clone());
        }
    }

    /// Returns the bytes of an update that this node has received.
    fn bytes_of(&self, id: UpdateId) -> Option<Bytes> {
        let prepared = self.prepared.as_ref().filter(|(prepared, _)| *prepared == id);
        prepared.map(|(_, bytes)| bytes.clone())
    }

    fn check(&self) {
        match self.participant.report() {
            Some(UpdateReport { id, state: UpdateState::Receiving | UpdateState::Prepared(_) }) => {
                assert_eq!(self.overwriting, self.is_in_place.then_some(id));
            }
            _ => assert_eq!(self.overwriting, None, "nobody told the node to discard or install"),
        }
        let serves = self.serves.is_some();
        assert!(!serves || self.overwriting.is_none(), "it serves overwritten weights");
    }
}

/// A running update as its coordinator knows it.
struct Update {
    id: UpdateId,
    coordinator: Coordinator,
    /// Indices of the nodes that take part: all nodes, or the one that catches up.
    nodes: Vec<usize>,
    epochs: Vec<u32>,
    deadline: Instant,
}

/// A call on its way to a node.
#[derive(Clone, Copy)]
struct CallInFlight {
    id: UpdateId,
    /// Index of the node in the update.
    at: usize,
    node: usize,
    epoch: u32,
    call: CoordinatorCall,
}

struct World {
    now: Instant,
    nodes: Vec<Node>,
    /// Running updates, each of its own coordinator.
    updates: Vec<Update>,
    /// Calls and replies in flight: any of them may be next, lost or repeated.
    calls: Vec<CallInFlight>,
    replies: Vec<(UpdateId, usize, NodeReply)>,
    receiving: Vec<(usize, UpdateId)>,
    /// Updates whose trainer has died.
    without_trainer: HashSet<UpdateId>,
    /// The seed node of an update, and whether it has been prepared.
    seeds: HashMap<UpdateId, (usize, bool)>,
    begun: u128,
    /// The bytes that each version has had anywhere.
    seen: HashMap<WeightVersion, Bytes>,
    /// Updates whose coordinator decided to commit, with the version.
    decided: HashMap<UpdateId, WeightVersion>,
}

#[derive(Clone, Debug)]
enum Event {
    /// `lower`: with a lower id than every earlier update, otherwise with a higher one. `seed`: the node from which the
    /// others copy.
    Begin {
        commits_at_once: bool,
        lower: bool,
        seed: Option<usize>,
    },
    CatchUp(usize),
    Commit(usize),
    AbortUpdate(usize),
    CoordinatorDies(usize),
    NodeDies(usize),
    /// The trainer of an update that a node receives.
    TrainerDies(usize),
    Restore(usize),
    Partition(usize),
    Heal(usize),
    Call(usize),
    DeliverCall {
        index: usize,
        keep: bool,
    },
    DeliverReply {
        index: usize,
        keep: bool,
    },
    LoseCall(usize),
    Receive {
        index: usize,
        damaged: bool,
    },
    FailReceive(usize),
    Advance(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let index = any::<usize>;
    prop_oneof![
        2 => (any::<bool>(), any::<bool>(), prop::option::of(index()))
            .prop_map(|(commits_at_once, lower, seed)| Event::Begin { commits_at_once, lower, seed }),
        1 => index().prop_map(Event::CatchUp),
        1 => index().prop_map(Event::Commit),
        1 => index().prop_map(Event::AbortUpdate),
        1 => index().prop_map(Event::CoordinatorDies),
        1 => index().prop_map(Event::NodeDies),
        1 => index().prop_map(Event::TrainerDies),
        2 => index().prop_map(Event::Restore),
        1 => index().prop_map(Event::Partition),
        2 => index().prop_map(Event::Heal),
        12 => index().prop_map(Event::Call),
        12 => (index(), any::<bool>()).prop_map(|(index, keep)| Event::DeliverCall { index, keep }),
        12 => (index(), any::<bool>()).prop_map(|(index, keep)| Event::DeliverReply { index, keep }),
        2 => index().prop_map(Event::LoseCall),
        8 => (index(), prop::bool::weighted(0.05))
            .prop_map(|(index, damaged)| Event::Receive { index, damaged }),
        1 => index().prop_map(Event::FailReceive),
        4 => (1u64..4000).prop_map(Event::Advance),
    ]
}

impl World {
    /// `in_place`: a bit for each node.
    fn new(nodes: usize, in_place: u8) -> Self {
        let node = |index: usize| Node::new((in_place >> index) & 1 == 1);
        Self {
            now: Instant::now(),
            nodes: (0..nodes).map(node).collect(),
            updates: Vec::new(),
            calls: Vec::new(),
            replies: Vec::new(),
            receiving: Vec::new(),
            without_trainer: HashSet::new(),
            seeds: HashMap::new(),
            begun: 0,
            seen: HashMap::new(),
            decided: HashMap::new(),
        }
    }

    fn apply(&mut self, event: Event) {
        let pick = |index: usize, len: usize| (len > 0).then(|| index % len);
        match event {
            Event::Begin { commits_at_once, lower, seed } => {
                let is_of_operator = |update: &&Update| update.id.0 < 2 * FIRST_ID;
                if self.updates.iter().filter(is_of_operator).count() < 2 {
                    self.begun += 1;
                    let id = UpdateId::of_operator(match lower {
                        true => FIRST_ID - self.begun,
                        false => FIRST_ID + self.begun,
                    });
                    let seed = seed.map(|seed| seed % self.nodes.len());
                    self.begin(id, (0..self.nodes.len()).collect(), commits_at_once, seed);
                }
            }
            Event::CatchUp(index) => {
                if self.updates.len() < 4 {
                    self.begun += 1;
                    let id = UpdateId::of_catch_up(FIRST_ID + self.begun);
                    self.begin(id, vec![index % self.nodes.len()], true, None);
                }
            }
            Event::Commit(index) => {
                let now = self.now;
                if let Some(index) = pick(index, self.updates.len()) {
                    let _ = self.updates[index].coordinator.commit(now);
                }
            }
            Event::AbortUpdate(index) => {
                let now = self.now;
                if let Some(index) = pick(index, self.updates.len()) {
                    let _ = self.updates[index].coordinator.abort(now, "asked to");
                }
            }
            Event::CoordinatorDies(index) => {
                if let Some(index) = pick(index, self.updates.len()) {
                    self.updates.remove(index);
                }
            }
            Event::NodeDies(index) => {
                let index = index % self.nodes.len();
                let Node { epoch, is_in_place, .. } = self.nodes[index];
                self.nodes[index] = Node { epoch: epoch + 1, ..Node::new(is_in_place) };
                self.receiving.retain(|(node, _)| *node != index);
            }
            Event::TrainerDies(index) => {
                let Some(index) = pick(index, self.receiving.len()) else { return };
                let (_, id) = self.receiving[index];
                self.trainer_dies(id);
            }
            Event::Restore(index) => {
                let index = index % self.nodes.len();
                self.nodes[index].restore();
            }
            Event::Partition(index) => {
                let index = index % self.nodes.len();
                self.nodes[index].is_reachable = false;
            }
            Event::Heal(index) => {
                let index = index % self.nodes.len();
                self.nodes[index].is_reachable = true;
            }
            Event::Call(index) => {
                let Some(update) = pick(index, self.updates.len()) else { return };
                let update = &self.updates[update];
                let at = index / self.updates.len() % update.nodes.len();
                if let Some(call) = update.coordinator.call(at) {
                    let (id, node, epoch) = (update.id, update.nodes[at], update.epochs[at]);
                    self.calls.push(CallInFlight { id, at, node, epoch, call });
                }
            }
            Event::DeliverCall { index, keep } => {
                let Some(index) = pick(index, self.calls.len()) else { return };
                let call = self.calls[index];
                if !keep {
                    self.calls.swap_remove(index);
                }
                self.deliver(call);
            }
            Event::DeliverReply { index, keep } => {
                let Some(index) = pick(index, self.replies.len()) else { return };
                let (id, at, reply) = self.replies[index].clone();
                if !keep {
                    self.replies.swap_remove(index);
                }
                let now = self.now;
                if let Some(update) = self.updates.iter_mut().find(|update| update.id == id) {
                    update.coordinator.handle(now, at, reply);
                }
            }
            Event::LoseCall(index) => {
                let Some(index) = pick(index, self.calls.len()) else { return };
                let CallInFlight { id, at, .. } = self.calls.swap_remove(index);
                let reason = "lost".to_owned();
                self.replies.push((id, at, NodeReply::Unreachable { reason }));
            }
            Event::Receive { index, damaged } => {
                let Some(index) = pick(index, self.receiving.len()) else { return };
                let (node, id) = self.receiving.swap_remove(index);
                let source = match self.seeds.get(&id) {
                    Some((seed, _)) if *seed != node => self.nodes[*seed].bytes_of(id),
                    _ if self.without_trainer.contains(&id) => None,
                    _ => Some(vec![id.0 as u8; 8]),
                };
                let Some(mut bytes) = source else {
                    return self.received(node, id, Err("no source".to_owned()));
                };
                bytes[5] ^= u8::from(damaged);
                let version = version_of(&bytes);
                self.nodes[node].prepared = Some((id, bytes));
                if let Some((_, is_prepared)) =
                    self.seeds.get_mut(&id).filter(|(seed, _)| *seed == node)
                {
                    *is_prepared = true;
                }
                self.received(node, id, Ok(version));
            }
            Event::FailReceive(index) => {
                let Some(index) = pick(index, self.receiving.len()) else { return };
                let (node, id) = self.receiving.swap_remove(index);
                self.received(node, id, Err("shape".to_owned()));
            }
            Event::Advance(ms) => self.now += Duration::from_millis(ms),
        }
        self.settle();
    }

    fn received(&mut self, node: usize, id: UpdateId, outcome: Result<WeightVersion, String>) {
        self.nodes[node].participant.handle(ParticipantInput::Received { id, outcome });
        self.settle();
    }

    /// Fails every receive of this update in flight.
    fn trainer_dies(&mut self, id: UpdateId) {
        self.without_trainer.insert(id);
        while let Some(index) = self.receiving.iter().position(|(_, received)| *received == id) {
            let (node, _) = self.receiving.swap_remove(index);
            self.received(node, id, Err("the trainer died".to_owned()));
        }
    }

    /// `seed`: index of the seed node in `nodes`, which are all nodes.
    fn begin(
        &mut self,
        id: UpdateId,
        nodes: Vec<usize>,
        commits_at_once: bool,
        seed: Option<usize>,
    ) {
        let names = nodes.iter().map(|node| node.to_string()).collect();
        let deadline = self.now + Duration::from_secs(20);
        let coordinator = Coordinator::new(self.now, id, names, deadline, commits_at_once);
        self.seeds.extend(seed.map(|seed| (id, (seed, false))));
        self.updates.push(Update {
            id,
            coordinator: match seed {
                Some(seed) => coordinator.with_seed(seed),
                None => coordinator,
            },
            epochs: nodes.iter().map(|node| self.nodes[*node].epoch).collect(),
            nodes,
            deadline,
        });
    }

    fn deliver(&mut self, CallInFlight { id, at, node, epoch, call }: CallInFlight) {
        let update = self.updates.iter().find(|update| update.id == id);
        let (now, deadline) = (self.now, update.map(|update| update.deadline));
        let node = &mut self.nodes[node];
        if !node.is_reachable {
            let reason = "no route".to_owned();
            return self.replies.push((id, at, NodeReply::Unreachable { reason }));
        }
        if node.epoch != epoch {
            let reason = "another process".to_owned();
            return self.replies.push((id, at, NodeReply::Gone { reason }));
        }
        let participant = &mut node.participant;
        let outcome = match call {
            CoordinatorCall::Begin => {
                let deadline = deadline.unwrap_or(now) + Duration::from_secs(5);
                let proposal = Proposal { id, deadline };
                let busy = |BeginError::Running { running, .. }| NodeReply::Busy { running };
                participant.begin(now, proposal).map(drop).map_err(busy)
            }
            CoordinatorCall::Commit { version } => {
                let rejected =
                    |error: CommitError| NodeReply::Rejected { reason: error.to_string() };
                participant.commit(id, version).map_err(rejected)
            }
            CoordinatorCall::Abort => {
                participant.abort(id, "the coordinator aborted");
                Ok(())
            }
            CoordinatorCall::Status => Ok(()),
        };
        participant.heard(now, id);
        let report = participant.report().filter(|report| report.id == id);
        let reply = match outcome {
            Ok(()) => NodeReply::State(report.map(|report| report.state)),
            Err(reply) => reply,
        };
        self.replies.push((id, at, reply));
    }

    /// Delivers every message in a random order, and loses none.
    fn run_fairly(&mut self, order: u64) {
        self.run_fairly_for(order, 1000);
    }

    fn run_fairly_for(&mut self, order: u64, rounds: usize) {
        let mut random = order;
        for _ in 0..rounds {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let index = (random >> 33) as usize;
            self.apply(Event::Call(index));
            self.apply(Event::DeliverCall { index, keep: false });
            self.apply(Event::Receive { index, damaged: false });
            self.apply(Event::DeliverReply { index, keep: false });
        }
    }

    /// Carries out what is due, and checks the invariants.
    fn settle(&mut self) {
        let now = self.now;
        for update in &mut self.updates {
            if update.coordinator.next_deadline().is_some_and(|due| due <= now) {
                update.coordinator.on_deadline(now);
            }
            if let CoordinatorPhase::Committing(version) = update.coordinator.phase() {
                self.decided.insert(update.id, *version);
            }
        }
        self.updates.retain(|update| !update.coordinator.is_over());
        for index in 0..self.nodes.len() {
            while self.nodes[index].participant.next_deadline().is_some_and(|due| due <= now) {
                self.nodes[index].participant.on_deadline(now);
            }
            while let Some(action) = self.nodes[index].participant.poll_action() {
                self.act(index, action);
            }
        }
        for node in &self.nodes {
            node.check();
            let Some((version, bytes)) = &node.serves else { continue };
            if *version != WeightVersion::LOADED {
                assert_eq!(*version, version_of(bytes));
            }
            let first = self.seen.entry(*version).or_insert_with(|| bytes.clone());
            assert_eq!(*first, *bytes, "different bytes under version {version}");
        }
    }

    fn act(&mut self, index: usize, action: ParticipantAction) {
        match action {
            ParticipantAction::Receive { id } => {
                if let Some((seed, is_prepared)) = self.seeds.get(&id) {
                    assert!(*seed == index || *is_prepared, "node {index} begins before the seed");
                }
                let node = &mut self.nodes[index];
                if node.is_in_place {
                    (node.serves, node.overwriting) = (None, Some(id));
                }
                self.receiving.push((index, id));
            }
            ParticipantAction::Discard { id } => {
                let node = &mut self.nodes[index];
                node.overwriting = node.overwriting.filter(|overwriting| *overwriting != id);
                node.prepared = node.prepared.take().filter(|(prepared, _)| *prepared != id);
                self.receiving.retain(|receiving| *receiving != (index, id));
            }
            ParticipantAction::Install { id, version } => {
                assert_eq!(self.decided.get(&id), Some(&version), "installed without a decision");
                let node = &mut self.nodes[index];
                let (prepared, bytes) = node.prepared.clone().expect("prepared weights");
                assert_eq!((prepared, version_of(&bytes)), (id, version));
                assert_eq!(node.overwriting, node.is_in_place.then_some(id));
                (node.last_served, node.overwriting) = ((version, bytes), None);
                node.serves = Some(node.last_served.clone());
                node.participant.handle(ParticipantInput::Installed { id });
            }
            ParticipantAction::AskPeers { id } => {
                if !self.nodes[index].is_reachable {
                    return;
                }
                let committed =
                    self.nodes.iter().filter(|node| node.is_reachable).find_map(|node| {
                        let report = node.participant.report().filter(|report| report.id == id)?;
                        match report.state {
                            UpdateState::Ended(UpdateEnd::Committed(version))
                            | UpdateState::Installing(version) => Some(version),
                            _ => None,
                        }
                    });
                if let Some(version) = committed {
                    let input = ParticipantInput::PeerCommitted { id, version };
                    self.nodes[index].participant.handle(input);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_two_nodes_serve_different_bytes_under_one_version(
        nodes in 1usize..5,
        in_place in any::<u8>(),
        events in prop::collection::vec(event(), 1..250),
    ) {
        let mut world = World::new(nodes, in_place);
        events.into_iter().for_each(|event| world.apply(event));
        // Without further messages every node serves again after its deadline.
        world.updates.clear();
        world.calls.clear();
        world.apply(Event::Advance(60_000));
        world.settle();
        world.nodes.iter_mut().for_each(Node::restore);
        for node in &world.nodes {
            prop_assert!(matches!(node.participant.phase(), Phase::Serving));
            prop_assert!(node.serves.is_some());
        }
    }

    #[test]
    fn every_reachable_node_takes_up_a_committed_update(
        nodes in 1usize..5,
        in_place in any::<u8>(),
        seed in prop::option::of(0usize..5),
        order in any::<u64>(),
    ) {
        let mut world = World::new(nodes, in_place);
        world.apply(Event::Begin { commits_at_once: true, lower: false, seed });
        world.run_fairly(order);
        let version = version_of(&vec![(FIRST_ID + 1) as u8; 8]);
        for node in &world.nodes {
            prop_assert_eq!(node.version(), version);
        }
    }

    /// The update commits only if every node had received the weights.
    #[test]
    fn death_of_the_trainer_leaves_every_node_with_the_same_weights(
        nodes in 1usize..5,
        in_place in any::<u8>(),
        seed in prop::option::of(0usize..5),
        rounds in 0usize..80,
        order in any::<u64>(),
    ) {
        let mut world = World::new(nodes, in_place);
        world.apply(Event::Begin { commits_at_once: true, lower: false, seed });
        let id = world.updates[0].id;
        world.run_fairly_for(order, rounds);
        world.trainer_dies(id);
        world.run_fairly(order);
        prop_assert!(world.updates.is_empty());
        let version = world.decided.get(&id).copied().unwrap_or(WeightVersion::LOADED);
        world.nodes.iter_mut().for_each(Node::restore);
        for node in &world.nodes {
            prop_assert_eq!(node.version(), version);
        }
    }

    /// The routers of the catch-ups have died, so no call ends the catch-ups.
    #[test]
    fn update_of_an_operator_commits_although_nodes_catch_up(
        nodes in 1usize..5,
        in_place in any::<u8>(),
        order in any::<u64>(),
    ) {
        let mut world = World::new(nodes, in_place);
        for node in 0..nodes {
            world.apply(Event::CatchUp(node));
            world.apply(Event::Call(0));
            world.apply(Event::DeliverCall { index: 0, keep: false });
            world.apply(Event::CoordinatorDies(0));
        }
        prop_assert_eq!(world.receiving.len(), nodes);
        world.apply(Event::Begin { commits_at_once: true, lower: false, seed: None });
        world.run_fairly(order);
        prop_assert!(world.updates.is_empty());
        let version = version_of(&vec![(FIRST_ID + world.begun) as u8; 8]);
        for node in &world.nodes {
            prop_assert_eq!(node.version(), version);
        }
    }

    #[test]
    fn at_least_one_of_two_updates_that_begin_at_once_commits_on_every_node(
        nodes in 1usize..5,
        in_place in any::<u8>(),
        order in any::<u64>(),
        first_is_lower in any::<bool>(),
    ) {
        let mut world = World::new(nodes, in_place);
        world.apply(Event::Begin { commits_at_once: true, lower: first_is_lower, seed: None });
        world.apply(Event::Begin { commits_at_once: true, lower: !first_is_lower, seed: None });
        world.run_fairly(order);
        prop_assert!(world.updates.is_empty());
        // The other one runs after it, or aborts. Then nodes in place restore what they served.
        world.nodes.iter_mut().for_each(Node::restore);
        for node in &world.nodes {
            prop_assert_ne!(node.version(), WeightVersion::LOADED);
            prop_assert_eq!(node.version(), world.nodes[0].version());
        }
    }
}
