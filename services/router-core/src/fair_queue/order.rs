//! The flows with queued requests, in the order of service.

use std::{
    cmp::{Ordering, Reverse},
    collections::BTreeSet,
};

use super::FlowName;

/// Place of a flow in the order of service. Ties go to the flow whose last start is oldest.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlowRank {
    pub(super) priority: u32,
    pub(super) virtual_time: f64,
    /// Number of the last start of the flow.
    pub(super) started: u64,
}

/// A finite number with a total order.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Finite(f64);

impl Eq for Finite {}

impl PartialOrd for Finite {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Finite {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

type ByTime = (Finite, u64, FlowName);

/// Flows in two orders: with and without priorities.
#[derive(Debug, Default)]
pub(super) struct FlowOrder {
    by_priority: BTreeSet<(Reverse<u32>, ByTime)>,
    by_time: BTreeSet<ByTime>,
}

impl FlowOrder {
    pub(super) fn insert(&mut self, name: &FlowName, rank: FlowRank) {
        let by_time = (Finite(rank.virtual_time), rank.started, name.clone());
        self.by_priority.insert((Reverse(rank.priority), by_time.clone()));
        self.by_time.insert(by_time);
    }

    /// Removes a flow with the rank that was inserted.
    pub(super) fn remove(&mut self, name: &FlowName, rank: FlowRank) {
        let by_time = (Finite(rank.virtual_time), rank.started, name.clone());
        self.by_time.remove(&by_time);
        self.by_priority.remove(&(Reverse(rank.priority), by_time));
    }

    /// Returns the flows, the one that is served next first.
    pub(super) fn flows(&self, ignores_priority: bool) -> impl Iterator<Item = &FlowName> {
        let by_time = self.by_time.iter().filter(move |_| ignores_priority);
        let by_priority = self.by_priority.iter().filter(move |_| !ignores_priority);
        by_time.chain(by_priority.map(|(_, by_time)| by_time)).map(|(.., name)| name)
    }

    /// Returns the lowest virtual time.
    pub(super) fn least_virtual_time(&self) -> Option<f64> {
        self.by_time.first().map(|(virtual_time, ..)| virtual_time.0)
    }
}
