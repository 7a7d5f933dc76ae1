//! Where blocks that lie apart come together, so that NCCL moves them as one: each operation of its has
//! a price, and many small ones reach a fraction of what a long one does.
//!
//! The sender copies blocks into a slot and sends the slot; the receiver receives into a slot and copies the
//! blocks to their places. With several slots an end the copies of one run under the operation of the
//! other. What lies together on both sides goes without.

use std::{
    ops::Range as Indices,
    thread,
    time::{Duration, Instant},
};

use super::{
    context::{Event, Role, Stream},
    error::CudaError,
    kv::DeviceKv,
    memory::{DeviceMemory, Range},
    moves::{Rows, Way, move_blocks},
    tally::{Mark, Tally},
};
use crate::layout::BlockId;

/// Blocks to and from staging.
#[derive(Debug)]
pub(super) enum Together {}

impl Role for Together {}

/// The pause between looks for the end of copies.
const PAUSE: Duration = Duration::from_micros(50);

/// Blocks of a chunk that go in one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    /// Of the chunk's blocks.
    pub blocks: Indices<usize>,
    /// Else they lie together on both sides.
    pub is_staged: bool,
}

/// How a chunk of these runs goes: the same at both ends. Runs of `direct_min` blocks go as they lie,
/// and so does one that has no other to go with; the rest in order. All go as many at a time as a slot
/// takes: for longer operations NCCL takes more multiprocessors.
pub(super) fn stretches(runs: &[u32], slot_blocks: usize, direct_min: usize) -> Vec<Stretch> {
    assert!(slot_blocks > 0, "a slot takes a block at least");
    let mut stretches: Vec<Stretch> = Vec::new();
    let mut end = 0;
    for run in runs {
        let blocks = end..end + *run as usize;
        end = blocks.end;
        let is_staged = blocks.len() < direct_min;
        match stretches.last_mut() {
            Some(last) if is_staged && last.is_staged => last.blocks.end = blocks.end,
            _ => stretches.push(Stretch { blocks, is_staged }),
        }
    }
    let is_alone = |stretch: &Stretch| {
        let mut start = 0;
        runs.iter().any(|run| {
            let blocks = start..start + *run as usize;
            start = blocks.end;
            blocks == stretch.blocks
        })
    };
    stretches
        .into_iter()
        .flat_map(|stretch| {
            let is_staged = stretch.is_staged && !is_alone(&stretch);
            let Indices { start, end } = stretch.blocks;
            (start..end).step_by(slot_blocks).map(move |first| {
                let blocks = first..end.min(first + slot_blocks);
                Stretch { blocks, is_staged }
            })
        })
        .collect()
}

/// Slots, and the stream of the copies to and from them. It is made with a channel and serves another one
/// afterwards: giving memory back would wait for whatever is stuck on the GPU.
#[derive(Debug)]
pub(super) struct Staging {
    memory: Range,
    slot_bytes: usize,
    slots: Vec<Slot>,
    next: usize,
    /// Urgent, as the peer's kernel waits for what comes of it, and holds multiprocessors meanwhile.
    copies: Stream<Together>,
    /// How far the streams have come, of operations and of copies: by memory, which is not made while
    /// something may be stuck.
    lanes: Vec<Tally>,
    copied: Tally,
}

#[derive(Debug)]
struct Slot {
    /// Whoever reads it waits for this.
    filled: Event,
    /// Whoever fills it waits for this.
    emptied: Event,
}

/// Where in a range, and how many bytes from there on.
pub(super) type Place = (usize, usize);

impl Staging {
    /// For channels of at most so many communicators a link.
    pub fn new(
        kv: &DeviceKv,
        slots: usize,
        slot_bytes: usize,
        lanes: usize,
    ) -> Result<Self, CudaError> {
        assert!(slots > 0, "there is a slot");
        let context = kv.context();
        let bytes = slots * slot_bytes;
        let memory = DeviceMemory::new(context, "slots for KV by NCCL", bytes)?.cut(bytes)?;
        let copies = Stream::urgent(context)?;
        let event = || Event::new(context);
        let slot = |_| Ok(Slot { filled: event()?, emptied: event()? });
        let slots = (0..slots).map(slot).collect::<Result<Vec<_>, CudaError>>()?;
        kv.pass_time(&copies)?;
        // The first greeting sends what nobody has written, later ones what a transfer of this node has left.
        memory.fill(0, &copies)?;
        for slot in &slots {
            // The fill is over before anything else writes there, in whatever stream.
            slot.emptied.record(&copies)?;
        }
        let lanes = (0..lanes).map(|_| Tally::new(context)).collect::<Result<_, _>>()?;
        let copied = Tally::new(context)?;
        Ok(Self { memory, slot_bytes, slots, next: 0, copies, lanes, copied })
    }

    /// All slots, one behind the other.
    pub fn memory(&self) -> &Range {
        &self.memory
    }

    /// Lets what follows in `stream` use all slots.
    pub fn await_all<R: Role>(&self, stream: &Stream<R>) -> Result<(), CudaError> {
        self.slots.iter().try_for_each(|slot| stream.wait(&slot.emptied))
    }

    /// Copies these blocks into the next slot, and lets `send` put what reads it into `stream`; it is told
    /// where in [`memory`](Self::memory) they lie.
    ///
    /// # Safety
    /// The blocks are not written before what is put into `stream` is done.
    pub unsafe fn send<R: Role, E: From<CudaError>>(
        &mut self,
        kv: &DeviceKv,
        rows: &Rows,
        ids: &[BlockId],
        stream: &Stream<R>,
        send: impl FnOnce(&Range, Place) -> Result<(), E>,
    ) -> Result<(), E> {
        let (index, place) = self.take_slot(rows, ids);
        let slot = &self.slots[index];
        self.copies.wait(&slot.emptied)?;
        // SAFETY: nothing else uses the slot until it is emptied; the rest is the caller's promise.
        unsafe { move_blocks(kv, rows, ids, (&self.memory, place.0), Way::Gather, &self.copies) }?;
        slot.filled.record(&self.copies)?;
        stream.wait(&slot.filled)?;
        send(&self.memory, place)?;
        Ok(slot.emptied.record(stream)?)
    }

    /// Lets `receive` put what fills the next slot into `stream`, and copies these blocks from there, behind
    /// which [`mark_copies`](Self::mark_copies) marks the end.
    ///
    /// # Safety
    /// Nothing else reads or writes the blocks until that mark is seen, or [`drain`](Self::drain) has
    /// returned.
    pub unsafe fn receive<R: Role, E: From<CudaError>>(
        &mut self,
        kv: &DeviceKv,
        rows: &Rows,
        ids: &[BlockId],
        way: Way,
        stream: &Stream<R>,
        receive: impl FnOnce(&Range, Place) -> Result<(), E>,
    ) -> Result<(), E> {
        let (index, place) = self.take_slot(rows, ids);
        let slot = &self.slots[index];
        stream.wait(&slot.emptied)?;
        receive(&self.memory, place)?;
        slot.filled.record(stream)?;
        self.copies.wait(&slot.filled)?;
        // SAFETY: as above.
        unsafe { move_blocks(kv, rows, ids, (&self.memory, place.0), way, &self.copies) }?;
        Ok(slot.emptied.record(&self.copies)?)
    }

    /// The stream of the copies.
    pub fn copies(&self) -> &Stream<Together> {
        &self.copies
    }

    /// Marks the end of all that was put into the stream of this communicator so far: of a channel the same one
    /// at each call.
    pub fn mark_lane<R: Role>(
        &mut self,
        lane: usize,
        stream: &Stream<R>,
    ) -> Result<Mark, CudaError> {
        self.lanes[lane].mark(stream)
    }

    /// Marks the end of all copies so far.
    pub fn mark_copies(&mut self) -> Result<Mark, CudaError> {
        self.copied.mark(&self.copies)
    }

    fn take_slot(&mut self, rows: &Rows, ids: &[BlockId]) -> (usize, Place) {
        let index = self.next;
        self.next = (index + 1) % self.slots.len();
        let bytes = ids.len() * rows.bytes();
        assert!(bytes <= self.slot_bytes, "{bytes} bytes fit a slot of {}", self.slot_bytes);
        (index, (index * self.slot_bytes, bytes))
    }

    /// Waits until nothing is under way, there and in the communicators' streams: what it waited for is over.
    pub fn drain<R: Role>(
        &mut self,
        streams: &[Stream<R>],
        patience: Duration,
    ) -> Result<(), String> {
        let lanes = streams.iter().enumerate();
        let last = lanes.map(|(lane, stream)| self.lanes[lane].mark(stream));
        let last: Result<Vec<_>, _> = last.chain([self.copied.mark(&self.copies)]).collect();
        let last = last.map_err(|error| error.to_string())?;
        let begin = Instant::now();
        while !last.iter().all(Mark::is_reached) {
            let waited = begin.elapsed();
            if waited >= patience {
                return Err(format!("what a channel moved is not done after {waited:?}"));
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(runs: &[u32], slot_blocks: usize, direct_min: usize) -> Vec<(usize, usize, bool)> {
        stretches(runs, slot_blocks, direct_min)
            .into_iter()
            .map(|Stretch { blocks, is_staged }| (blocks.start, blocks.len(), is_staged))
            .collect()
    }

    #[test]
    fn short_runs_share_slots_and_long_ones_go_as_they_lie() {
        assert_eq!(found(&[], 4, 3), []);
        assert_eq!(found(&[1, 1, 1], 4, 3), [(0, 3, true)]);
        assert_eq!(found(&[1; 9], 4, 3), [(0, 4, true), (4, 4, true), (8, 1, true)]);
        let cut = [(0, 3, false), (3, 3, true), (6, 4, false), (10, 3, false)];
        assert_eq!(found(&[3, 1, 2, 7], 4, 3), cut, "no operation is longer than a slot");
        assert_eq!(found(&[2, 2, 2], 4, 3), [(0, 4, true), (4, 2, true)], "a run may be cut");
        assert_eq!(found(&[2], 4, 3), [(0, 2, false)], "one alone needs no slot");
        assert_eq!(found(&[3, 2, 3], 4, 3), [(0, 3, false), (3, 2, false), (5, 3, false)]);
    }

    #[test]
    fn stretches_are_all_blocks_in_order() {
        let mut state = 7_u64;
        for _ in 0..200 {
            let mut next = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((state >> 33) % below) as u32
            };
            let runs: Vec<u32> = (0..next(9)).map(|_| 1 + next(12)).collect();
            let (slot, direct) = (1 + next(8) as usize, 1 + next(8) as usize);
            let mut end = 0;
            for Stretch { blocks, .. } in stretches(&runs, slot, direct) {
                assert!(blocks.start == end && blocks.end > end);
                assert!(blocks.len() <= slot);
                end = blocks.end;
            }
            assert_eq!(end, runs.iter().sum::<u32>() as usize);
        }
    }
}
