//! Several nodes and the coordinators of their updates, with messages in flight and the invariants
//! of all nodes.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use weight_transfer::{
    BeginError, CommitError, Coordinator, CoordinatorCall, CoordinatorPhase, NodeReply,
    ParticipantAction, ParticipantInput, Proposal, UpdateEnd, UpdateId, UpdateState, WeightVersion,
};

use crate::{
    events::Event,
    node::{Bytes, Node, version_of},
};

/// The ids of updates are above and below this one.
pub(crate) const FIRST_ID: u128 = 1000;

/// A running update as its coordinator knows it.
pub(crate) struct Update {
    pub id: UpdateId,
    pub coordinator: Coordinator,
    /// Indices of the nodes that take part: all nodes, or the one that catches up.
    pub nodes: Vec<usize>,
    pub epochs: Vec<u32>,
    pub deadline: Instant,
}

/// A call on its way to a node.
#[derive(Clone, Copy)]
pub(crate) struct CallInFlight {
    id: UpdateId,
    /// Index of the node in the update.
    at: usize,
    node: usize,
    epoch: u32,
    call: CoordinatorCall,
}

/// All nodes, updates and messages.
pub(crate) struct World {
    pub now: Instant,
    pub nodes: Vec<Node>,
    /// Running updates, each of its own coordinator.
    pub updates: Vec<Update>,
    /// Calls and replies in flight: any of them may be next, lost or repeated.
    pub calls: Vec<CallInFlight>,
    pub replies: Vec<(UpdateId, usize, NodeReply)>,
    pub receiving: Vec<(usize, UpdateId)>,
    /// Updates whose trainer has died.
    pub without_trainer: HashSet<UpdateId>,
    /// The seed node of an update, and whether it has been prepared.
    pub seeds: HashMap<UpdateId, (usize, bool)>,
    pub begun: u128,
    /// The bytes that each version has had anywhere.
    pub seen: HashMap<WeightVersion, Bytes>,
    /// Updates whose coordinator decided to commit, with the version.
    pub decided: HashMap<UpdateId, WeightVersion>,
}

impl World {
    /// `in_place`: a bit for each node.
    pub(crate) fn new(nodes: usize, in_place: u8) -> Self {
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

    pub(crate) fn apply(&mut self, event: Event) {
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
    pub(crate) fn trainer_dies(&mut self, id: UpdateId) {
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
        let reply = match outcome {
            Ok(()) => NodeReply::State(participant.state_of(id)),
            Err(reply) => reply,
        };
        self.replies.push((id, at, reply));
    }

    /// Delivers every message in a random order, and loses none.
    pub(crate) fn run_fairly(&mut self, order: u64) {
        self.run_fairly_for(order, 1000);
    }

    pub(crate) fn run_fairly_for(&mut self, order: u64, rounds: usize) {
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
    pub(crate) fn settle(&mut self) {
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

    /// Returns the version with which a reachable node has committed the update.
    fn committed(&self, id: UpdateId) -> Option<WeightVersion> {
        let mut reachable = self.nodes.iter().filter(|node| node.is_reachable);
        reachable.find_map(|node| match node.participant.state_of(id)? {
            UpdateState::Ended(UpdateEnd::Committed(version))
            | UpdateState::Installing(version) => Some(version),
            _ => None,
        })
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
                node.installed.push(id);
                node.participant.handle(ParticipantInput::Installed { id });
            }
            ParticipantAction::AskPeers { id } => {
                if !self.nodes[index].is_reachable {
                    return;
                }
                if let Some(version) = self.committed(id) {
                    let input = ParticipantInput::PeerCommitted { id, version };
                    self.nodes[index].participant.handle(input);
                }
            }
        }
    }
}
