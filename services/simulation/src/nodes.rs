//! The nodes as the router sees them: the real directory, and one numbered connection to each host.

use std::{collections::BTreeMap, time::Instant};

use cluster::{
    Action, AssignmentId, Directory, Health, Input, MemberChange, NoNode, NodeAddress, NodeChoice,
    Role, StreamId, Wanted,
};
use proto::v1::ObserveEvent;

/// A node that an attempt uses.
#[derive(Clone, Debug)]
pub struct Assigned {
    pub host: usize,
    pub epoch: cluster::Epoch,
    pub assignment: AssignmentId,
}

/// What the directory wants done, in order.
#[derive(Debug)]
pub enum Watch {
    Observe { host: usize, connection: u64, stream: StreamId },
    StopObserving { host: usize, stream: StreamId },
}

pub struct Nodes {
    directory: Directory,
    addresses: Vec<NodeAddress>,
    connections: Vec<u64>,
    streams: BTreeMap<StreamId, usize>,
    watches: Vec<Watch>,
    has_changed: bool,
}

impl Nodes {
    /// Every host is listed from the start, and stays listed.
    pub fn new(now: Instant, roles: &[Role], seed: u64) -> Self {
        let address = |(host, &role): (usize, &Role)| NodeAddress {
            role,
            grpc: format!("http://host-{host}:3"),
        };
        let mut nodes = Self {
            directory: Directory::new(seed),
            addresses: roles.iter().enumerate().map(address).collect(),
            connections: vec![0; roles.len()],
            streams: BTreeMap::new(),
            watches: Vec::new(),
            has_changed: false,
        };
        nodes.join_all(now);
        nodes
    }

    /// Everything is forgotten; each connection is a new one.
    pub fn restart(&mut self, now: Instant, seed: u64) {
        self.directory = Directory::new(seed);
        self.connections.iter_mut().for_each(|connection| *connection += 1);
        self.streams.clear();
        self.watches.clear();
        self.join_all(now);
    }

    fn join_all(&mut self, now: Instant) {
        for address in self.addresses.clone() {
            self.tell(now, Input::Member(MemberChange::Joined(address)));
        }
    }

    pub fn take_watches(&mut self) -> Vec<Watch> {
        std::mem::take(&mut self.watches)
    }

    /// Whether any node's health has, since the last call.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.has_changed)
    }

    pub fn role(&self, host: usize) -> Role {
        self.addresses[host].role
    }

    pub fn connection(&self, host: usize) -> u64 {
        self.connections[host]
    }

    /// The connection to this host has ended, with the streams on it; the next is a new one.
    pub fn connection_lost(&mut self, now: Instant, host: usize) {
        self.connections[host] += 1;
        let streams: Vec<StreamId> =
            self.streams.iter().filter(|(_, at)| **at == host).map(|(id, _)| *id).collect();
        for stream in streams {
            self.streams.remove(&stream);
            let reason = "the connection ended".to_owned();
            self.tell(now, Input::StreamEnded { stream, reason });
        }
    }

    pub fn observed(&mut self, now: Instant, stream: StreamId, event: ObserveEvent) {
        self.tell(now, Input::Observed { stream, event });
    }

    /// A call to this process lost its connection, or found another process there.
    pub fn call_lost(&mut self, now: Instant, node: &Assigned) {
        let (epoch, reason) = (node.epoch, "the call was lost".to_owned());
        self.tell(now, Input::CallLost { epoch, reason });
    }

    pub fn pick(
        &mut self,
        now: Instant,
        wanted: &Wanted<'_>,
    ) -> Result<(Assigned, NodeChoice), NoNode> {
        let choice = self.directory.pick(now, wanted)?;
        let host = self.host_of(&choice.address);
        let (epoch, assignment) = (choice.record.epoch, choice.assignment);
        Ok((Assigned { host, epoch, assignment }, choice))
    }

    pub fn answered(&mut self, node: &Assigned) {
        self.directory.answered(node.assignment);
    }

    pub fn busy(&mut self, now: Instant, node: &Assigned) {
        self.directory.busy(now, node.assignment, None);
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

    /// All nodes are there, and nothing is counted as being in work.
    pub fn check_idle(&self) {
        for node in self.directory.nodes() {
            assert_eq!(node.health, Health::Up, "{node:?}");
            assert_eq!(node.in_flight, 0, "{node:?}");
            assert!(!node.load.draining, "{node:?}");
        }
    }

    fn tell(&mut self, now: Instant, input: Input) {
        let mut actions = Vec::new();
        self.directory.handle(now, input, &mut actions);
        self.follow(actions);
    }

    fn follow(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Observe { stream, address, .. } => {
                    let host = self.host_of(&address);
                    self.streams.insert(stream, host);
                    let connection = self.connections[host];
                    self.watches.push(Watch::Observe { host, connection, stream });
                }
                Action::StopObserving { stream } => {
                    if let Some(host) = self.streams.remove(&stream) {
                        self.watches.push(Watch::StopObserving { host, stream });
                    }
                }
                Action::HealthChanged { .. } => self.has_changed = true,
                Action::Forgotten { .. } => unreachable!("every host stays listed"),
            }
        }
    }

    fn host_of(&self, address: &NodeAddress) -> usize {
        self.addresses.iter().position(|known| known == address).expect("it is listed")
    }
}
