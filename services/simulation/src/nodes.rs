//! The connections of one router to the hosts, and its `Observe` streams on them.

use std::collections::{BTreeMap, HashMap};

use cluster::{DirectoryAction, NodeAddress, StreamId};

/// A connection of a router to a host. A closed connection is replaced by one with another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Connection {
    pub router: usize,
    pub host: usize,
    number: u64,
}

/// One `Observe` stream of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stream {
    pub connection: Connection,
    pub id: StreamId,
}

/// The directory's actions, in order.
#[derive(Debug)]
pub(crate) enum NodesAction {
    Observe(Stream),
    StopObserving(Stream),
}

pub(crate) struct NodeConnections {
    connections: Vec<Connection>,
    /// Host of each address.
    hosts: HashMap<NodeAddress, usize>,
    streams: BTreeMap<StreamId, Stream>,
}

impl NodeConnections {
    pub(crate) fn new(router: usize, addresses: &[NodeAddress]) -> Self {
        let connection = |host| Connection { router, host, number: 0 };
        Self {
            connections: (0..addresses.len()).map(connection).collect(),
            hosts: (0..).zip(addresses).map(|(host, address)| (address.clone(), host)).collect(),
            streams: BTreeMap::new(),
        }
    }

    /// Replaces every connection by one of a new router process.
    pub(crate) fn restart(&mut self) {
        self.connections.iter_mut().for_each(|connection| connection.number += 1);
        self.streams.clear();
    }

    /// Returns the open connection to a host.
    pub(crate) fn connection(&self, host: usize) -> Connection {
        self.connections[host]
    }

    pub(crate) fn is_open(&self, connection: Connection) -> bool {
        self.connections[connection.host] == connection
    }

    /// Closes the connection to this host. Returns the streams that end with it.
    pub(crate) fn close(&mut self, host: usize) -> Vec<StreamId> {
        let ended = self.connections[host];
        self.connections[host].number += 1;
        let streams = self.streams.values().filter(|stream| stream.connection == ended);
        let streams: Vec<_> = streams.map(|stream| stream.id).collect();
        self.streams.retain(|id, _| !streams.contains(id));
        streams
    }

    /// Ends a stream. Returns whether the stream was open.
    pub(crate) fn end_stream(&mut self, stream: StreamId) -> bool {
        self.streams.remove(&stream).is_some()
    }

    /// Opens or drops the stream of an action.
    pub(crate) fn follow(&mut self, action: DirectoryAction) -> Option<NodesAction> {
        match action {
            DirectoryAction::Observe { stream, address, .. } => {
                let connection = self.connections[self.host_of(&address)];
                let stream = Stream { connection, id: stream };
                self.streams.insert(stream.id, stream);
                Some(NodesAction::Observe(stream))
            }
            DirectoryAction::StopObserving { stream } => {
                self.streams.remove(&stream).map(NodesAction::StopObserving)
            }
            DirectoryAction::HealthChanged { .. }
            | DirectoryAction::ServingChanged { .. }
            | DirectoryAction::Forgotten { .. } => None,
            DirectoryAction::Rejected { address, reason } => {
                panic!("the report of {address} was rejected: {reason}")
            }
        }
    }

    pub(crate) fn host_of(&self, address: &NodeAddress) -> usize {
        *self.hosts.get(address).expect("every host is known")
    }
}
