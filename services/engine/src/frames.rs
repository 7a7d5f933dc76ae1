//! Steps in flight, and the blocks that must wait for them.
//!
//! A launched step is a frame until its result is collected, in order. A row of a frame names its
//! slot *and* the slot's generation. Vacating a slot bumps its generation, so the row of a sequence
//! that left in the meantime is recognized as stale. Blocks that a stale row may read or write are
//! released only when its frame has been collected.

use std::collections::VecDeque;

use kernels::BlockId;

use crate::{
    event::SequenceId,
    plan::{Generation, RowPlan, Slot, StepId},
};

/// A launched step whose result is not collected.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub step_id: StepId,
    pub rows: Vec<RowPlan>,
    /// The sequence of each row.
    pub sequences: Vec<SequenceId>,
    /// Cost of the step's prefill, in tokens at the start of a prompt; `None` if the step has no
    /// time bound.
    pub prefill_cost: Option<u32>,
}

/// Frames of one engine, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    next_step: StepId,
    in_flight: VecDeque<Frame>,
    /// Blocks whose last owner left while the step was in flight; ascending by step.
    deferred: VecDeque<(StepId, Vec<BlockId>)>,
}

impl Frames {
    /// Returns the number of steps in flight.
    pub(crate) fn len(&self) -> usize {
        self.in_flight.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns the id of the step that is launched next.
    pub(crate) fn next_step(&self) -> StepId {
        self.next_step
    }

    /// Adds the frame of a launched step and returns its id.
    pub(crate) fn launch(
        &mut self,
        rows: Vec<RowPlan>,
        sequences: Vec<SequenceId>,
        prefill_cost: Option<u32>,
    ) -> StepId {
        let step_id = self.next_step;
        self.next_step += 1;
        self.in_flight.push_back(Frame { step_id, rows, sequences, prefill_cost });
        step_id
    }

    /// Removes the oldest frame.
    pub(crate) fn collect(&mut self) -> Option<Frame> {
        self.in_flight.pop_front()
    }

    /// Returns whether this step is in flight.
    pub(crate) fn is_in_flight(&self, step: StepId) -> bool {
        self.in_flight.front().is_some_and(|oldest| step >= oldest.step_id)
    }

    /// Keeps the references of `blocks` until every step launched so far is collected.
    pub(crate) fn defer(&mut self, blocks: Vec<BlockId>) {
        debug_assert!(!self.in_flight.is_empty());
        self.deferred.push_back((self.next_step - 1, blocks));
    }

    /// Takes a table of references that can be released now.
    pub(crate) fn take_due(&mut self) -> Option<Vec<BlockId>> {
        let &(step, _) = self.deferred.front()?;
        if self.is_in_flight(step) {
            return None;
        }
        self.deferred.pop_front().map(|(_, blocks)| blocks)
    }

    /// Returns whether blocks wait for a frame.
    pub(crate) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Returns the tables of blocks that wait for a frame.
    pub(crate) fn deferred(&self) -> impl Iterator<Item = &[BlockId]> {
        self.deferred.iter().map(|(_, blocks)| blocks.as_slice())
    }
}

/// Slots of the running batch: which are free, and how many occupants each has had.
#[derive(Debug)]
pub(crate) struct Slots {
    generations: Vec<Generation>,
    free: Vec<Slot>,
    /// Slots vacated since the last plan.
    released: Vec<Slot>,
}

impl Slots {
    pub(crate) fn new(slot_count: u32) -> Self {
        Self {
            generations: vec![0; slot_count as usize],
            free: (0..slot_count).rev().map(Slot).collect(),
            released: Vec::new(),
        }
    }

    /// Returns the number of slots, free and occupied.
    pub(crate) fn total(&self) -> u32 {
        self.generations.len() as u32
    }

    pub(crate) fn free_count(&self) -> u32 {
        self.free.len() as u32
    }

    /// Takes a free slot and returns it with the generation of its new occupant.
    pub(crate) fn occupy(&mut self) -> Option<(Slot, Generation)> {
        let slot = self.free.pop()?;
        Some((slot, self.generations[slot.0 as usize]))
    }

    /// Vacates a slot. `announced` says that the executor knows the occupant, so the next plan must
    /// release the slot.
    pub(crate) fn vacate(&mut self, slot: Slot, announced: bool) {
        debug_assert!(!self.free.contains(&slot));
        let generation = &mut self.generations[slot.0 as usize];
        *generation = generation.wrapping_add(1);
        self.free.push(slot);
        if announced {
            self.released.push(slot);
        }
    }

    /// Returns whether the slot has the occupant of this generation.
    pub(crate) fn is_current(&self, slot: Slot, generation: Generation) -> bool {
        self.generations[slot.0 as usize] == generation
    }

    /// Takes the slots that the executor must release.
    pub(crate) fn take_released(&mut self) -> Vec<Slot> {
        std::mem::take(&mut self.released)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vacating_a_slot_makes_earlier_rows_stale() {
        let mut slots = Slots::new(1);
        let (slot, first) = slots.occupy().expect("one is free");
        assert!(slots.is_current(slot, first));
        slots.vacate(slot, true);
        assert!(!slots.is_current(slot, first));
        let (again, second) = slots.occupy().expect("the slot is free again");
        assert_eq!(again, slot);
        assert_ne!(first, second);
        assert_eq!(slots.take_released(), [slot]);
        assert_eq!(slots.take_released(), []);
    }

    #[test]
    fn deferred_blocks_wait_for_every_frame_launched_before() {
        let mut frames = Frames::default();
        frames.launch(Vec::new(), Vec::new(), None);
        frames.launch(Vec::new(), Vec::new(), None);
        frames.defer(vec![BlockId(3)]);
        frames.launch(Vec::new(), Vec::new(), None);
        assert_eq!(frames.take_due(), None);
        frames.collect();
        assert_eq!(frames.take_due(), None);
        frames.collect();
        assert_eq!(frames.take_due(), Some(vec![BlockId(3)]));
        assert!(!frames.has_deferred());
        assert_eq!(frames.len(), 1);
    }
}
