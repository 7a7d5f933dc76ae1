//! The simulated network: datagrams with loss, delay, duplication and reordering, ordered
//! connections, and partitions between two endpoints.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::Random;

/// Maximum delay of a late datagram: longer than every lease of its sender and its receiver.
const LATE_MAX: Duration = Duration::from_secs(6);

/// Faults that the network applies to messages. Probabilities are in percent.
#[derive(Clone, Copy, Debug)]
pub struct NetworkFaults {
    /// A datagram is lost.
    pub loss: u64,
    /// A datagram arrives twice.
    pub duplication: u64,
    /// A datagram arrives seconds late.
    pub lateness: u64,
    /// One bit of the data flips.
    pub corruption: u64,
    /// Shortest and longest delay of a message. Delays are independent, so datagrams overtake each
    /// other.
    pub delay_min: Duration,
    pub delay_max: Duration,
}

impl NetworkFaults {
    /// Returns the faults of a network that only delays messages.
    pub fn delays(delay_max: Duration) -> Self {
        let delay_min = Duration::ZERO;
        Self { loss: 0, duplication: 0, lateness: 0, corruption: 0, delay_min, delay_max }
    }

    /// Returns whether the delay of each message is the same.
    pub fn has_equal_delays(&self) -> bool {
        self.delay_min == self.delay_max && self.lateness == 0
    }
}

/// Number of one connection between two endpoints; a number is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId(u64);

/// The state of the network between endpoints of type `N`. The caller schedules the deliveries.
#[derive(Debug)]
pub struct Network<N> {
    pub faults: NetworkFaults,
    random: Random,
    /// Pairs of endpoints between which nothing passes, smaller one first.
    partitions: BTreeSet<(N, N)>,
    /// Connections by the end that opened each, and its peer.
    connections: BTreeMap<(N, N), ConnectionId>,
    opened: u64,
}

impl<N: Copy + Ord> Network<N> {
    pub fn new(faults: NetworkFaults, random: Random) -> Self {
        let (partitions, connections) = (BTreeSet::new(), BTreeMap::new());
        Self { faults, random, partitions, connections, opened: 0 }
    }

    /// Returns the delay of one message.
    pub fn delay(&mut self) -> Duration {
        let NetworkFaults { delay_min, delay_max, .. } = self.faults;
        delay_min + self.random.up_to(delay_max - delay_min)
    }

    /// Returns the delay of each copy of a datagram that arrives: none, one or two.
    pub fn datagram(&mut self, from: N, to: N) -> Vec<Duration> {
        if self.is_cut(from, to) || self.random.chance(self.faults.loss) {
            return Vec::new();
        }
        let mut delays = Vec::with_capacity(2);
        if self.random.chance(self.faults.duplication) {
            delays.push(self.delay());
        }
        let is_late = self.random.chance(self.faults.lateness);
        delays.push(if is_late { self.random.up_to(LATE_MAX) } else { self.delay() });
        delays
    }

    /// Flips a bit of `word` with the probability of corruption. Returns whether a bit was flipped.
    pub fn corrupt(&mut self, word: &mut u64) -> bool {
        let corrupts = self.random.chance(self.faults.corruption);
        if corrupts {
            *word ^= 1 << self.random.below(64);
        }
        corrupts
    }

    /// Partitions two endpoints. Returns false if they were partitioned already.
    pub fn cut(&mut self, a: N, b: N) -> bool {
        self.partitions.insert((a.min(b), a.max(b)))
    }

    pub fn heal(&mut self, a: N, b: N) {
        self.partitions.remove(&(a.min(b), a.max(b)));
    }

    pub fn is_cut(&self, a: N, b: N) -> bool {
        self.partitions.contains(&(a.min(b), a.max(b)))
    }

    /// Opens a connection on which `from` sends to `to`.
    pub fn connect(&mut self, from: N, to: N) {
        self.opened += 1;
        self.connections.insert((from, to), ConnectionId(self.opened));
    }

    pub fn connection(&self, from: N, to: N) -> Option<ConnectionId> {
        self.connections.get(&(from, to)).copied()
    }

    /// Closes the connections between two endpoints, in both directions. Returns whether there was
    /// one.
    pub fn disconnect(&mut self, a: N, b: N) -> bool {
        let forward = self.connections.remove(&(a, b)).is_some();
        let backward = self.connections.remove(&(b, a)).is_some();
        forward || backward
    }

    /// Closes every connection of an endpoint. Returns the peer of each.
    pub fn disconnect_all(&mut self, endpoint: N) -> Vec<N> {
        let mut peers = Vec::new();
        self.connections.retain(|&(from, to), _| {
            if from == endpoint {
                peers.push(to);
            } else if to == endpoint {
                peers.push(from);
            }
            from != endpoint && to != endpoint
        });
        peers
    }
}
