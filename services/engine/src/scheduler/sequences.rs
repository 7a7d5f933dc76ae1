//! The sequences of a node by phase.
//!
//! [`Sequences`] alone moves a sequence from phase to phase, so that queues, batch, counts and
//! alarms always agree with the phases. Blocks and slots that a phase owns are the scheduler's: it
//! gets the old phase back and releases them.

use std::{collections::BTreeSet, ops::Index, time::Instant};

use foldhash::HashMap;

use super::{
    sequence::{Arrival, Row, Sequence, SequencePhase},
    waiting::WaitingSequences,
};
use crate::{
    event::{SequenceId, SequenceKind},
    plan::{Generation, Slot},
};

/// Sequences in order of arrival. Turns of a session have one arrival, so their ids make the order
/// total.
type ByArrival = Vec<(Arrival, SequenceId)>;

#[derive(Debug, Default)]
pub(super) struct Sequences {
    by_id: HashMap<SequenceId, Sequence>,
    waiting: WaitingSequences,
    /// Number of sequences of kind `Send` in `waiting`.
    waiting_send_count: u32,
    reserved_count: u32,
    loading_count: u32,
    ready: ByArrival,
    running: ByArrival,
    /// `(Sequence::alarm, id)` of every sequence.
    alarms: BTreeSet<(Instant, SequenceId)>,
}

impl Index<SequenceId> for Sequences {
    type Output = Sequence;

    /// Returns a sequence that the caller knows to be here.
    fn index(&self, id: SequenceId) -> &Sequence {
        &self.by_id[&id]
    }
}

impl Sequences {
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    pub(super) fn contains(&self, id: SequenceId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub(super) fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.by_id.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.by_id.get_mut(&id)
    }

    /// Returns a sequence that the caller knows to be here.
    pub(super) fn known_mut(&mut self, id: SequenceId) -> &mut Sequence {
        self.by_id.get_mut(&id).expect("the caller knows the sequence")
    }

    /// Returns the row of a sequence of the batch.
    pub(super) fn row_mut(&mut self, id: SequenceId) -> &mut Row {
        self.known_mut(id).row_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SequenceId, &Sequence)> {
        self.by_id.iter().map(|(&id, sequence)| (id, sequence))
    }

    /// Returns every sequence, in no order.
    pub(super) fn values(&self) -> impl Iterator<Item = &Sequence> {
        self.by_id.values()
    }

    /// Returns every sequence, in no order.
    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.by_id.values_mut()
    }

    /// Returns the sequences for which `applies` returns true, oldest first.
    pub(super) fn by_age(&self, applies: impl Fn(&Sequence) -> bool) -> Vec<SequenceId> {
        let chosen = self.iter().filter(|(_, sequence)| applies(sequence));
        let mut chosen: ByArrival = chosen.map(|(id, it)| (it.arrival, id)).collect();
        chosen.sort_unstable();
        chosen.into_iter().map(|(_, id)| id).collect()
    }

    /// Adds a sequence in its phase.
    pub(super) fn insert(&mut self, id: SequenceId, sequence: Sequence) {
        self.alarms.insert((sequence.alarm, id));
        self.by_id.insert(id, sequence);
        self.enter(id, false);
    }

    /// Removes a sequence in any phase.
    pub(super) fn remove(&mut self, id: SequenceId) -> Option<Sequence> {
        if self.contains(id) {
            self.leave(id);
        }
        let sequence = self.by_id.remove(&id)?;
        self.alarms.remove(&(sequence.alarm, id));
        Some(sequence)
    }

    /// Moves a sequence to another phase, and returns the old one. A sequence that returns from the
    /// batch to the queue was preempted and waits for blocks.
    pub(super) fn set_phase(&mut self, id: SequenceId, phase: SequencePhase) -> SequencePhase {
        self.leave(id);
        let old = self.known_mut(id).replace_phase(phase);
        self.enter(id, matches!(old, SequencePhase::Running(_)));
        old
    }

    /// Moves a sequence in phase `Ready` into the batch, and returns its row.
    pub(super) fn join_batch(
        &mut self,
        id: SequenceId,
        slot: Slot,
        generation: Generation,
    ) -> &mut Row {
        self.leave(id);
        let sequence = self.known_mut(id);
        let SequencePhase::Ready(table) = sequence.replace_phase(SequencePhase::Waiting) else {
            unreachable!("the caller knows that the sequence is ready");
        };
        let row = Row::new(slot, generation, table, sequence.tokens.len());
        sequence.replace_phase(SequencePhase::Running(row));
        self.enter(id, false);
        self.row_mut(id)
    }

    /// Adds the sequence to the queue, list or count of its phase.
    fn enter(&mut self, id: SequenceId, is_preempted: bool) {
        let sequence = &self.by_id[&id];
        let arrival = sequence.arrival;
        self.waiting_send_count += u32::from(sequence.is_waiting_send());
        match (sequence.phase(), sequence.kind) {
            (SequencePhase::AwaitingReady, _) => {}
            (SequencePhase::Waiting, SequenceKind::Receive) => {
                self.waiting.push_receive(arrival, id)
            }
            (SequencePhase::Waiting, _) if is_preempted => self.waiting.push_preempted(arrival, id),
            (SequencePhase::Waiting, _) => self.waiting.push_compute(arrival, id),
            (SequencePhase::Reserved { .. }, _) => self.reserved_count += 1,
            (SequencePhase::Loading { .. }, _) => self.loading_count += 1,
            (SequencePhase::Ready(_), _) => insert(&mut self.ready, (arrival, id)),
            (SequencePhase::Running(_), _) => insert(&mut self.running, (arrival, id)),
        }
    }

    /// Removes the sequence from the queue, list or count of its phase.
    fn leave(&mut self, id: SequenceId) {
        let sequence = &self.by_id[&id];
        let entry = (sequence.arrival, id);
        self.waiting_send_count -= u32::from(sequence.is_waiting_send());
        match sequence.phase() {
            SequencePhase::AwaitingReady => {}
            SequencePhase::Waiting => self.waiting.remove(sequence.arrival, id),
            SequencePhase::Reserved { .. } => self.reserved_count -= 1,
            SequencePhase::Loading { .. } => self.loading_count -= 1,
            SequencePhase::Ready(_) => remove(&mut self.ready, entry),
            SequencePhase::Running(_) => remove(&mut self.running, entry),
        }
    }

    /// Returns the queue.
    pub(super) fn waiting(&self) -> &WaitingSequences {
        &self.waiting
    }

    /// Records that the first sequence that joins the batch from the queue cannot get blocks.
    pub(super) fn compute_lacks_blocks(&mut self) {
        self.waiting.compute_lacks_blocks();
    }

    /// Returns the first sequence that was preempted and waits to join the batch again.
    pub(super) fn first_preempted(&self) -> Option<SequenceId> {
        self.waiting.computes(|id| self[id].was_admitted()).next()
    }

    /// Returns the sequences of kind `Send` in the queue, oldest first.
    pub(super) fn waiting_sends(&self) -> Vec<SequenceId> {
        match self.waiting_send_count {
            0 => Vec::new(),
            _ => self.waiting.computes(|id| self[id].is_waiting_send()).collect(),
        }
    }

    /// Returns the number of sequences in phase `Reserved`.
    pub(super) fn reserved_count(&self) -> u32 {
        self.reserved_count
    }

    /// Returns the number of sequences in phase `Loading`.
    pub(super) fn loading_count(&self) -> u32 {
        self.loading_count
    }

    /// Returns the sequences in phase `Ready`.
    pub(super) fn ready(&self) -> &[(Arrival, SequenceId)] {
        &self.ready
    }

    /// Returns the sequences in phase `Running`: the batch.
    pub(super) fn running(&self) -> &[(Arrival, SequenceId)] {
        &self.running
    }

    /// Returns the number of sequences outside the batch that have a claim to a slot.
    pub(super) fn claims(&self) -> u32 {
        self.ready.len() as u32 + self.reserved_count + self.loading_count
    }

    /// Sets when a sequence is due: at `alarm`, or at its deadline if that is earlier.
    pub(super) fn set_alarm(&mut self, id: SequenceId, alarm: Instant) {
        let sequence = self.by_id.get_mut(&id).expect("the caller knows the sequence");
        self.alarms.remove(&(sequence.alarm, id));
        sequence.alarm = alarm.min(sequence.deadline);
        self.alarms.insert((sequence.alarm, id));
    }

    /// Ends the wait of a sequence: only its deadline remains.
    pub(super) fn clear_alarm(&mut self, id: SequenceId) {
        let deadline = self[id].deadline;
        self.set_alarm(id, deadline);
    }

    /// Returns the sequence that is due first.
    pub(super) fn next_alarm(&self) -> Option<(Instant, SequenceId)> {
        self.alarms.first().copied()
    }

    /// Panics when queue, lists, counts or alarms disagree with the phases.
    pub(super) fn check(&self) {
        let (mut waiting, mut reserved, mut loading, mut ready, mut running) = (0, 0, 0, 0, 0);
        let waiting_sends = self.values().filter(|sequence| sequence.is_waiting_send()).count();
        assert_eq!(waiting_sends, self.waiting_send_count as usize);
        for (id, sequence) in self.iter() {
            assert!(self.alarms.contains(&(sequence.alarm, id)));
            let entry = (sequence.arrival, id);
            match sequence.phase() {
                SequencePhase::AwaitingReady => {}
                SequencePhase::Waiting => waiting += 1,
                SequencePhase::Reserved { .. } => reserved += 1,
                SequencePhase::Loading { .. } => loading += 1,
                SequencePhase::Ready(_) => {
                    assert!(self.ready.contains(&entry));
                    ready += 1;
                }
                SequencePhase::Running(_) => {
                    assert!(self.running.contains(&entry));
                    running += 1;
                }
            }
        }
        assert_eq!(self.alarms.len(), self.len());
        assert_eq!((running, ready), (self.running.len(), self.ready.len()));
        assert_eq!((reserved, waiting), (self.reserved_count, self.waiting.len()));
        assert_eq!(loading, self.loading_count);
        assert!(self.running.is_sorted() && self.ready.is_sorted());
    }
}

fn insert(sorted: &mut ByArrival, entry: (Arrival, SequenceId)) {
    sorted.insert(sorted.partition_point(|&other| other < entry), entry);
}

fn remove(sorted: &mut ByArrival, entry: (Arrival, SequenceId)) {
    if let Ok(index) = sorted.binary_search(&entry) {
        sorted.remove(index);
    }
}
