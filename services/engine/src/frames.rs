//! Steps in flight, and what must wait for them.
//!
//! A launched step is a frame until its result is collected, in order. A row of a frame names its
//! slot *and* the slot's generation; whoever vacates a slot bumps the generation, so the row of a
//! sequence that left in the meantime is stale by comparison. Blocks that such a row may still
//! read or write are handed back only when its frame has been collected.

use std::collections::VecDeque;

use kernels::BlockId;

use crate::{
    event::SequenceId,
    plan::{Generation, Slot, StepId},
};

/// A row whose result is still out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameRow {
    pub slot: Slot,
    pub generation: Generation,
    pub sequence: SequenceId,
    pub token_count: u32,
    pub samples: bool,
    pub drafts_max: u32,
}

#[derive(Clone, Debug)]
pub struct Frame {
    pub step_id: StepId,
    pub rows: Vec<FrameRow>,
}

/// The frames of one engine, oldest first.
#[derive(Debug, Default)]
pub struct Frames {
    next_step: StepId,
    in_flight: VecDeque<Frame>,
    /// Blocks whose last owner left while the step was in flight; ascending by step.
    deferred: VecDeque<(StepId, Vec<BlockId>)>,
}

impl Frames {
    /// Steps in flight.
    pub fn len(&self) -> usize {
        self.in_flight.len()
    }

    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// The step that is launched next.
    pub fn next_step(&self) -> StepId {
        self.next_step
    }

    /// A step with these rows goes out; returns its number.
    pub fn launch(&mut self, rows: Vec<FrameRow>) -> StepId {
        let step_id = self.next_step;
        self.next_step += 1;
        self.in_flight.push_back(Frame { step_id, rows });
        step_id
    }

    /// The oldest frame; results come in order.
    pub fn collect(&mut self) -> Option<Frame> {
        self.in_flight.pop_front()
    }

    /// True while the result of this step is out.
    pub fn is_in_flight(&self, step: StepId) -> bool {
        self.in_flight.front().is_some_and(|oldest| step >= oldest.step_id)
    }

    /// Keeps the references of `blocks` until everything launched so far is collected.
    pub fn defer(&mut self, blocks: Vec<BlockId>) {
        debug_assert!(!self.in_flight.is_empty());
        self.deferred.push_back((self.next_step - 1, blocks));
    }

    /// References that can go now, a table at a time.
    pub fn take_due(&mut self) -> Option<Vec<BlockId>> {
        let &(step, _) = self.deferred.front()?;
        if self.is_in_flight(step) {
            return None;
        }
        self.deferred.pop_front().map(|(_, blocks)| blocks)
    }

    /// True while some blocks wait for a frame.
    pub fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Blocks that wait, a table at a time.
    pub fn deferred(&self) -> impl Iterator<Item = &[BlockId]> {
        self.deferred.iter().map(|(_, blocks)| blocks.as_slice())
    }
}

/// The rows of the running batch: which are free, and how many occupants each has had.
#[derive(Debug)]
pub struct Slots {
    generations: Vec<Generation>,
    free: Vec<Slot>,
    /// Vacated since the last plan.
    released: Vec<Slot>,
}

impl Slots {
    pub fn new(slot_count: u32) -> Self {
        Self {
            generations: vec![0; slot_count as usize],
            free: (0..slot_count).rev().map(Slot).collect(),
            released: Vec::new(),
        }
    }

    /// Free and occupied ones.
    pub fn total(&self) -> u32 {
        self.generations.len() as u32
    }

    pub fn free_count(&self) -> u32 {
        self.free.len() as u32
    }

    /// A free slot, with the generation of its new occupant.
    pub fn occupy(&mut self) -> Option<(Slot, Generation)> {
        let slot = self.free.pop()?;
        Some((slot, self.generations[slot.0 as usize]))
    }

    /// The occupant leaves. `announced`: the executor knows of it and must be told.
    pub fn vacate(&mut self, slot: Slot, announced: bool) {
        debug_assert!(!self.free.contains(&slot));
        let generation = &mut self.generations[slot.0 as usize];
        *generation = generation.wrapping_add(1);
        self.free.push(slot);
        if announced {
            self.released.push(slot);
        }
    }

    /// Whether the slot still has the occupant of that generation.
    pub fn is_current(&self, slot: Slot, generation: Generation) -> bool {
        self.generations[slot.0 as usize] == generation
    }

    /// Slots whose occupants the executor must forget, each once.
    pub fn take_released(&mut self) -> Vec<Slot> {
        std::mem::take(&mut self.released)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vacated_slot_makes_earlier_rows_stale() {
        let mut slots = Slots::new(1);
        let (slot, first) = slots.occupy().expect("one is free");
        assert!(slots.is_current(slot, first));
        slots.vacate(slot, true);
        assert!(!slots.is_current(slot, first));
        let (again, second) = slots.occupy().expect("it is free again");
        assert_eq!(again, slot);
        assert_ne!(first, second);
        assert_eq!(slots.take_released(), [slot]);
        assert_eq!(slots.take_released(), []);
    }

    #[test]
    fn deferred_blocks_wait_for_every_frame_launched_before() {
        let mut frames = Frames::default();
        frames.launch(Vec::new());
        frames.launch(Vec::new());
        frames.defer(vec![BlockId(3)]);
        frames.launch(Vec::new());
        assert_eq!(frames.take_due(), None);
        frames.collect();
        assert_eq!(frames.take_due(), None);
        frames.collect();
        assert_eq!(frames.take_due(), Some(vec![BlockId(3)]));
        assert!(!frames.has_deferred());
        assert_eq!(frames.len(), 1);
    }
}
