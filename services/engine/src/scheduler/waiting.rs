//! Queue of sequences that wait for blocks or a slot, first come first served.
//!
//! A `Receive` is admitted between steps; it needs blocks and a claim to a slot. Other sequences
//! are admitted when a step is planned; they need blocks, a slot and a share of the step's token
//! budget. The two kinds wait in separate queues, so that a long prompt that waits for budget does
//! not delay reservations. Blocks are still given in order of arrival: a sequence that cannot get
//! blocks stops all younger sequences in both queues.

use std::collections::VecDeque;

use super::sequence::Arrival;
use crate::event::SequenceId;

#[derive(Debug, Default)]
pub(super) struct WaitingSequences {
    receives: Queue,
    computes: Queue,
    /// Whether the first of `computes` could not get blocks.
    compute_starved: bool,
}

/// Sequences in order of arrival. Turns of a session have one arrival, so their ids make the order
/// total.
type Queue = VecDeque<(Arrival, SequenceId)>;

impl WaitingSequences {
    pub(super) fn len(&self) -> usize {
        self.receives.len() + self.computes.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
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

    /// Puts a preempted sequence back to its place. It waits for blocks.
    pub(super) fn push_preempted(&mut self, arrival: Arrival, id: SequenceId) {
        insert(&mut self.computes, arrival, id);
        if self.computes.front() == Some(&(arrival, id)) {
            self.compute_starved = true;
        }
    }

    /// Returns the `Receive` that may try to reserve blocks now: none while an older sequence lacks
    /// blocks.
    pub(super) fn next_receive(&self) -> Option<SequenceId> {
        let first = *self.receives.front()?;
        let starved = self.computes.front().filter(|_| self.compute_starved);
        starved.is_none_or(|older| first < *older).then_some(first.1)
    }

    /// Returns the sequence that may try to join the batch now: none while an older `Receive` waits
    /// for blocks or a slot.
    pub(super) fn next_compute(&self) -> Option<SequenceId> {
        let first = *self.computes.front()?;
        let refused = self.receives.front();
        refused.is_none_or(|older| first < *older).then_some(first.1)
    }

    /// Returns the sequences that join the batch from this queue and for which `applies` returns
    /// true, oldest first.
    pub(super) fn computes(
        &self,
        applies: impl Fn(SequenceId) -> bool,
    ) -> impl Iterator<Item = SequenceId> {
        self.computes.iter().map(|&(_, id)| id).filter(move |&id| applies(id))
    }

    pub(super) fn compute_lacks_blocks(&mut self) {
        self.compute_starved = true;
    }

    pub(super) fn remove(&mut self, arrival: Arrival, id: SequenceId) {
        if self.computes.front() == Some(&(arrival, id)) {
            self.compute_starved = false;
        }
        for queue in [&mut self.receives, &mut self.computes] {
            if let Ok(index) = queue.binary_search(&(arrival, id)) {
                queue.remove(index);
            }
        }
    }
}

fn insert(queue: &mut Queue, arrival: Arrival, id: SequenceId) {
    let index = queue.partition_point(|&other| other < (arrival, id));
    queue.insert(index, (arrival, id));
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SequenceId = SequenceId(1);
    const B: SequenceId = SequenceId(2);
    const C: SequenceId = SequenceId(3);

    #[test]
    fn a_preempted_sequence_returns_to_its_place() {
        let mut waiting = WaitingSequences::default();
        waiting.push_compute(5, B);
        waiting.push_compute(9, C);
        waiting.push_receive(3, SequenceId(4));
        waiting.push_preempted(2, A);
        assert_eq!(waiting.next_compute(), Some(A));
        assert_eq!(waiting.next_receive(), None, "an older sequence lacks blocks");
        waiting.remove(2, A);
        assert_eq!(waiting.next_receive(), Some(SequenceId(4)));
        waiting.remove(3, SequenceId(4));
        assert_eq!(waiting.next_compute(), Some(B));
        assert_eq!(waiting.len(), 2);
    }

    #[test]
    fn a_receive_overtakes_a_wait_for_budget_but_not_a_wait_for_blocks() {
        let mut waiting = WaitingSequences::default();
        waiting.push_compute(1, A);
        waiting.push_receive(2, B);
        assert_eq!(waiting.next_receive(), Some(B));
        waiting.compute_lacks_blocks();
        assert_eq!(waiting.next_receive(), None);
        waiting.remove(1, A);
        assert_eq!(waiting.next_receive(), Some(B));
    }

    #[test]
    fn turns_of_one_arrival_do_not_wait_for_each_other() {
        let mut waiting = WaitingSequences::default();
        waiting.push_compute(1, B);
        waiting.compute_lacks_blocks();
        waiting.push_receive(1, C);
        waiting.push_receive(1, A);
        assert_eq!((waiting.next_receive(), waiting.next_compute()), (Some(A), None));
        waiting.remove(1, A);
        assert_eq!((waiting.next_receive(), waiting.next_compute()), (None, Some(B)));
        waiting.remove(1, B);
        assert_eq!(waiting.next_receive(), Some(C));
        waiting.remove(1, C);
        assert_eq!(waiting.len(), 0);
    }

    #[test]
    fn a_receive_without_blocks_stops_younger_sequences_of_the_other_queue() {
        let mut waiting = WaitingSequences::default();
        waiting.push_receive(1, A);
        waiting.push_compute(2, B);
        assert_eq!(waiting.next_compute(), None);
        waiting.remove(1, A);
        assert_eq!(waiting.next_compute(), Some(B));
    }
}
