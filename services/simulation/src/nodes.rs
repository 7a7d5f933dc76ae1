//! The nodes as one router sees them: the shipped directory, and a numbered connection to each host.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::{
    AssignmentId, BreakerChange, Directory, DirectoryAction, DirectoryInput, Failed, Health,
    Member, MemberChange, ModelIdentity, NoNode, NodeAddress, NodeChoice, NodeRecord, Role,
    Selection, StreamId, Wanted,
};
use kv_transfer::api::Epoch;
use proto::{ids::TransferId, v1::ObserveEvent};
use weight_transfer::WeightVersion;

/// A connection of a router to a host. A closed connection is replaced by one with another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Connection {
    pub router: usize,
    pub host: usize,
    number: u64,
}

/// One `Observe` stream of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stream {
    pub connection: Connection,
    pub id: StreamId,
}

/// A node picked for an attempt.
#[derive(Clone, Debug)]
pub struct Assigned {
    pub host: usize,
    pub record: Arc<NodeRecord>,
    assignment: AssignmentId,
}

/// A node that can take part in an update of the weights.
#[derive(Clone, Copy, Debug)]
pub struct WeightNode {
    pub host: usize,
    pub epoch: Epoch,
    pub version: WeightVersion,
}

/// The nodes of an attempt.
#[derive(Debug)]
pub struct PickedNodes {
    pub decode: Assigned,
    /// `None`: the decode node prefills the prompt.
    pub prefill: Option<Assigned>,
    /// Predicted time to first token.
    pub ttft: Option<Duration>,
    /// Tokens that the attempt must prefill.
    pub uncached_tokens: u32,
}

/// The directory's actions, in order.
#[derive(Debug)]
pub enum NodesAction {
    Observe(Stream),
    StopObserving(Stream),
}

pub struct Nodes {
    directory: Directory,
    selection: Selection,
    connections: Vec<Connection>,
    /// Host of each address.
    hosts: HashMap<NodeAddress, usize>,
    streams: BTreeMap<StreamId, Stream>,
    actions: Vec<NodesAction>,
    has_changed: bool,
}

impl Nodes {
    pub fn new(
        router: usize,
        addresses: Vec<NodeAddress>,
        selection: Selection,
        seed: u64,
    ) -> Self {
        let connection = |host| Connection { router, host, number: 0 };
        Self {
            directory: Directory::new(seed, selection),
            selection,
            connections: (0..addresses.len()).map(connection).collect(),
            hosts: (0..).zip(&addresses).map(|(host, address)| (address.clone(), host)).collect(),
            streams: BTreeMap::new(),
            actions: Vec::new(),
            has_changed: false,
        }
    }

    /// Replaces the directory by the one of a new router process: empty, with new connections.
    pub fn restart(&mut self, seed: u64) {
        self.directory = Directory::new(seed, self.selection);
        self.connections.iter_mut().for_each(|connection| connection.number += 1);
        self.streams.clear();
        self.actions.clear();
    }

    pub fn member(&mut self, now: Instant, change: MemberChange) {
        self.handle(now, DirectoryInput::Member(change));
    }

    pub fn take_actions(&mut self) -> Vec<NodesAction> {
        std::mem::take(&mut self.actions)
    }

    /// Returns whether the health of any node has changed since the last call.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.has_changed)
    }

    /// Returns the identity of the nodes that serve the model.
    pub fn cache_identity(&self, model: &str) -> Option<&ModelIdentity> {
        let mut records = self.directory.serving(Role::Decode);
        records.find(|record| record.model == model).map(|record| &record.identity)
    }

    /// Returns the nodes of the model that are up and not draining. A node that has lost its weights counts as draining,
    /// but needs weights.
    pub fn weight_nodes(&self, model: &str) -> Vec<WeightNode> {
        let up = self.directory.nodes().filter(|member| member.health == Health::Up);
        let nodes = up.filter_map(|member| {
            let record = member.record()?;
            let version = WeightVersion(record.identity.weight_version);
            let takes_part = !member.load().draining || version == WeightVersion::NONE;
            let host = self.host_of(&member.address);
            let node = WeightNode { host, epoch: record.epoch, version };
            (record.model == model && takes_part).then_some(node)
        });
        nodes.collect()
    }

    /// Returns the bytes that the directory keeps of the nodes' cached blocks.
    pub fn cached_bytes(&self) -> usize {
        self.directory.nodes().map(Member::cached_bytes).sum()
    }

    /// Returns the open connection to a host.
    pub fn connection(&self, host: usize) -> Connection {
        self.connections[host]
    }

    pub fn is_open(&self, connection: Connection) -> bool {
        self.connections[connection.host] == connection
    }

    /// Handles the end of the connection to this host, with the streams on it.
    pub fn connection_lost(&mut self, now: Instant, host: usize) {
        let ended = self.connections[host];
        self.connections[host].number += 1;
        let streams = self.streams.values().filter(|stream| stream.connection == ended);
        for stream in streams.map(|stream| stream.id).collect::<Vec<_>>() {
            self.stream_ended(now, stream, "the connection ended");
        }
    }

    pub fn stream_ended(&mut self, now: Instant, stream: StreamId, reason: &str) {
        if self.streams.remove(&stream).is_some() {
            self.handle(now, DirectoryInput::StreamEnded { stream, reason: reason.to_owned() });
        }
    }

    pub fn observed(&mut self, now: Instant, stream: StreamId, event: ObserveEvent) {
        self.handle(now, DirectoryInput::Observed { stream, event });
    }

    /// Handles a call that lost its connection to this process, or found another process there.
    pub fn call_lost(&mut self, now: Instant, node: &Assigned, reason: String) {
        self.handle(now, DirectoryInput::CallLost { epoch: node.record.epoch, reason });
    }

    pub fn pick(
        &mut self,
        now: Instant,
        transfer_id: TransferId,
        wanted: &Wanted<'_>,
    ) -> Result<PickedNodes, NoNode> {
        let picked = self.directory.pick(now, transfer_id, wanted)?;
        let assigned = |choice: NodeChoice| Assigned {
            host: self.host_of(&choice.address),
            record: choice.record,
            assignment: choice.assignment,
        };
        Ok(PickedNodes {
            decode: assigned(picked.decode),
            prefill: picked.prefill.map(assigned),
            ttft: picked.ttft,
            uncached_tokens: picked.uncached_tokens,
        })
    }

    pub fn first_token(&mut self, now: Instant, decode: &Assigned) {
        self.directory.first_token(now, decode.assignment);
    }

    pub fn delivered(
        &mut self,
        now: Instant,
        prefill: &Assigned,
        decode: &Assigned,
        elapsed: Duration,
    ) {
        self.directory.delivered(now, prefill.assignment, decode.assignment, elapsed);
    }

    pub fn served(&mut self, decode: &Assigned) {
        self.directory.served(decode.assignment);
    }

    pub fn decoded(&mut self, now: Instant, decode: &Assigned, tokens: u32, waited: Duration) {
        self.directory.decoded(now, decode.assignment, tokens, waited);
    }

    pub fn failed(&mut self, now: Instant, node: &Assigned) {
        self.directory.failed(now, Failed::Node(node.assignment));
    }

    pub fn transfer_failed(&mut self, now: Instant, prefill: &Assigned, decode: &Assigned) {
        let (prefill, decode) = (prefill.assignment, decode.assignment);
        self.directory.failed(now, Failed::Transfer { prefill, decode });
    }

    /// Returns the breakers that opened since the last call.
    pub fn take_opened(&mut self) -> impl Iterator<Item = BreakerChange> {
        let changes = self.directory.take_breaker_changes();
        self.has_changed |= !changes.is_empty();
        changes.into_iter().filter(|change| change.opened.is_some())
    }

    pub fn accepted(&mut self, node: &Assigned) {
        self.directory.accepted(node.assignment);
    }

    pub fn grace_left(
        &self,
        now: Instant,
        node: &Assigned,
        wanted: &Wanted<'_>,
    ) -> Option<Duration> {
        self.directory.grace_left(now, node.assignment, wanted)
    }

    pub fn changed_at(&self, node: &Assigned) -> Option<Instant> {
        self.directory.changed_at(node.assignment)
    }

    pub fn busy(&mut self, now: Instant, node: &Assigned) {
        self.directory.busy(now, node.assignment);
    }

    pub fn release(&mut self, node: &Assigned) {
        self.directory.release(node.assignment);
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.directory.next_deadline()
    }

    pub fn on_deadline(&mut self, now: Instant) {
        let mut actions = Vec::new();
        self.directory.on_deadline(now, &mut actions);
        self.follow(actions);
    }

    /// Checks that every node is up and has no assignment.
    pub fn check_idle(&self) {
        assert_eq!(self.directory.nodes().count(), self.connections.len());
        for node in self.directory.nodes() {
            assert_eq!(node.health, Health::Up, "{node:?}");
            assert_eq!(node.in_flight, 0, "{node:?}");
            assert!(!node.load().draining, "{node:?}");
        }
    }

    fn handle(&mut self, now: Instant, input: DirectoryInput) {
        let mut actions = Vec::new();
        self.directory.handle(now, input, &mut actions);
        self.follow(actions);
    }

    fn follow(&mut self, actions: Vec<DirectoryAction>) {
        for action in actions {
            match action {
                DirectoryAction::Observe { stream, address, .. } => {
                    let connection = self.connections[self.host_of(&address)];
                    let stream = Stream { connection, id: stream };
                    self.streams.insert(stream.id, stream);
                    self.actions.push(NodesAction::Observe(stream));
                }
                DirectoryAction::StopObserving { stream } => {
                    let stopped = self.streams.remove(&stream);
                    self.actions.extend(stopped.map(NodesAction::StopObserving));
                }
                DirectoryAction::HealthChanged { .. }
                | DirectoryAction::ServingChanged { .. }
                | DirectoryAction::Forgotten { .. } => self.has_changed = true,
                DirectoryAction::Rejected { address, reason } => {
                    panic!("the report of {address} was rejected: {reason}")
                }
            }
        }
    }

    fn host_of(&self, address: &NodeAddress) -> usize {
        *self.hosts.get(address).expect("every host is known")
    }
}
