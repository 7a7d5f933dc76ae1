//! Who waits for blocks or a slot, first come first served.
//!
//! A `Receive` needs blocks and a claim to a slot at once, between steps; everyone else needs blocks,
//! a slot and a share of a step's budget, in a plan. They stand in two lines so that a long prompt
//! that waits for budget does not keep reservations waiting. Blocks are still given in one order:
//! whoever is refused for want of blocks stops everyone younger, in either line.

use std::collections::VecDeque;

use super::sequence::Arrival;
use crate::event::SequenceId;

#[derive(Debug, Default)]
pub(super) struct Waiting {
    receives: Line,
    computes: Line,
    /// The first of `computes` was refused for want of blocks.
    compute_starved: bool,
}

/// Sorted by arrival.
type Line = VecDeque<(Arrival, SequenceId)>;

impl Waiting {
    pub(super) fn len(&self) -> usize {
        self.receives.len() + self.computes.len()
    }

    pub(super) fn push_receive(&mut self, arrival: Arrival, id: SequenceId) {
        insert(&mut self.receives, arrival, id);
    }

    pub(super) fn push_compute(&mut self, arrival: Arrival, id: SequenceId) {
        insert(&mut self.computes, arrival, id);
        if self.computes.front() == Some(&(arrival, id)) {
            self.compute_starved = false;
        }
    }

    /// One that had to make room comes back to its place. What it waits for is blocks.
    pub(super) fn push_preempted(&mut self, arrival: Arrival, id: SequenceId) {
        insert(&mut self.computes, arrival, id);
        if self.computes.front() == Some(&(arrival, id)) {
            self.compute_starved = true;
        }
    }

    /// The `Receive` that may try to reserve now.
    pub(super) fn next_receive(&self) -> Option<SequenceId> {
        let &(arrival, id) = self.receives.front()?;
        let starved = self.computes.front().filter(|_| self.compute_starved);
        starved.is_none_or(|&(older, _)| arrival < older).then_some(id)
    }

    /// The one that may try to join the batch now. An older `Receive` has already been refused.
    pub(super) fn next_compute(&self) -> Option<SequenceId> {
        let &(arrival, id) = self.computes.front()?;
        let refused = self.receives.front();
        refused.is_none_or(|&(older, _)| arrival < older).then_some(id)
    }

    pub(super) fn admitted_receive(&mut self) {
        self.receives.pop_front();
    }

    pub(super) fn admitted_compute(&mut self) {
        self.computes.pop_front();
        self.compute_starved = false;
    }

    pub(super) fn compute_lacks_blocks(&mut self) {
        self.compute_starved = true;
    }

    pub(super) fn remove(&mut self, arrival: Arrival, id: SequenceId) {
        if self.computes.front() == Some(&(arrival, id)) {
            self.compute_starved = false;
        }
        for line in [&mut self.receives, &mut self.computes] {
            if let Ok(index) = line.binary_search(&(arrival, id)) {
                line.remove(index);
            }
        }
    }
}

fn insert(line: &mut Line, arrival: Arrival, id: SequenceId) {
    let index = line.partition_point(|&(other, _)| other < arrival);
    line.insert(index, (arrival, id));
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SequenceId = SequenceId(1);
    const B: SequenceId = SequenceId(2);
    const C: SequenceId = SequenceId(3);

    #[test]
    fn a_preempted_sequence_returns_to_its_place() {
        let mut waiting = Waiting::default();
        waiting.push_compute(5, B);
        waiting.push_compute(9, C);
        waiting.push_receive(3, SequenceId(4));
        waiting.push_preempted(2, A);
        assert_eq!(waiting.next_compute(), Some(A));
        assert_eq!(waiting.next_receive(), None, "the older one lacks blocks");
        waiting.remove(2, A);
        assert_eq!(waiting.next_receive(), Some(SequenceId(4)));
        waiting.admitted_receive();
        assert_eq!(waiting.next_compute(), Some(B));
        assert_eq!(waiting.len(), 2);
    }

    #[test]
    fn a_receive_passes_one_that_waits_for_budget_but_not_one_that_waits_for_blocks() {
        let mut waiting = Waiting::default();
        waiting.push_compute(1, A);
        waiting.push_receive(2, B);
        assert_eq!(waiting.next_receive(), Some(B));
        waiting.compute_lacks_blocks();
        assert_eq!(waiting.next_receive(), None);
        waiting.admitted_compute();
        assert_eq!(waiting.next_receive(), Some(B));
    }

    #[test]
    fn a_refused_receive_stops_younger_ones_of_the_other_line() {
        let mut waiting = Waiting::default();
        waiting.push_receive(1, A);
        waiting.push_compute(2, B);
        assert_eq!(waiting.next_compute(), None);
        waiting.admitted_receive();
        assert_eq!(waiting.next_compute(), Some(B));
    }
}
