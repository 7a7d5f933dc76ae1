//! Staging of scattered blocks for NCCL. Each NCCL operation has a fixed cost, so many small ones
//! reach a fraction of the bandwidth of a large one.
//!
//! The sender gathers blocks into a slot and sends the slot. The receiver receives into a slot and
//! scatters it to the blocks. With several slots, copies of one slot overlap the NCCL operation of
//! another slot. Blocks that are contiguous on both sides need no staging.

use std::{
    ops::Range as Indices,
    thread,
    time::{Duration, Instant},
};

use super::{
    context::{Event, Stream, StreamRole},
    error::CudaError,
    kv::DeviceKv,
    memory::{DeviceMemory, Range},
    moves::{BlockRows, Direction, move_blocks},
    stream_progress::{StreamMark, StreamProgress},
};
use crate::layout::BlockId;

/// The role of streams that copy between blocks and slots.
#[derive(Debug)]
pub(super) enum StagingCopies {}

impl StreamRole for StagingCopies {}

/// Pause between polls for the end of copies.
const PAUSE: Duration = Duration::from_micros(50);

/// The blocks of a chunk that one NCCL operation moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChannelOperation {
    /// Indices into the chunk's blocks.
    pub blocks: Indices<usize>,
    /// Whether the blocks go through a slot. Otherwise they are contiguous on both sides.
    pub is_staged: bool,
}

/// Cuts a chunk of these runs into operations, identically at both ends. A run of at least
/// `direct_min` blocks needs no staging, nor does a run alone in its operation. No operation is
/// larger than a slot, because NCCL uses more SMs for larger ones.
pub(super) fn operations(
    runs: &[u32],
    slot_blocks: usize,
    direct_min: usize,
) -> Vec<ChannelOperation> {
    assert!(slot_blocks > 0, "a slot holds at least one block");
    let mut operations: Vec<ChannelOperation> = Vec::new();
    let mut end = 0;
    for run in runs {
        let blocks = end..end + *run as usize;
        end = blocks.end;
        let is_staged = blocks.len() < direct_min;
        match operations.last_mut() {
            Some(last) if is_staged && last.is_staged => last.blocks.end = blocks.end,
            _ => operations.push(ChannelOperation { blocks, is_staged }),
        }
    }
    let is_alone = |operation: &ChannelOperation| {
        let mut start = 0;
        runs.iter().any(|run| {
            let blocks = start..start + *run as usize;
            start = blocks.end;
            blocks == operation.blocks
        })
    };
    operations
        .into_iter()
        .flat_map(|operation| {
            let is_staged = operation.is_staged && !is_alone(&operation);
            let Indices { start, end } = operation.blocks;
            (start..end).step_by(slot_blocks).map(move |first| {
                let blocks = first..end.min(first + slot_blocks);
                ChannelOperation { blocks, is_staged }
            })
        })
        .collect()
}

/// Slots and the stream of their copies. A staging outlives its channel and serves the next one:
/// freeing its memory would wait for an operation that is stuck on the GPU.
#[derive(Debug)]
pub(super) struct StagingMemory {
    memory: Range,
    slot_bytes: usize,
    slots: Vec<StagingSlot>,
    next: usize,
    /// High priority: the peer's kernel occupies SMs while it waits for these copies.
    copies: Stream<StagingCopies>,
    /// Progress of each lane's stream. Allocated in advance, because nothing may be allocated while
    /// an operation may be stuck.
    lanes: Vec<StreamProgress>,
    /// Progress of `copies`.
    copied: StreamProgress,
}

#[derive(Debug)]
struct StagingSlot {
    /// Recorded when the slot is full; its reader waits for it.
    filled: Event,
    /// Recorded when the slot is free; its writer waits for it.
    emptied: Event,
}

/// Offset in a range, and length, in bytes.
pub(super) type SlotRange = (usize, usize);

impl StagingMemory {
    /// Allocates the slots. `lanes` is the largest number of communicators per link.
    pub(super) fn new(
        kv: &DeviceKv,
        slots: usize,
        slot_bytes: usize,
        lanes: usize,
    ) -> Result<Self, CudaError> {
        assert!(slots > 0, "at least one slot");
        let context = kv.context();
        let bytes = slots * slot_bytes;
        let memory = DeviceMemory::new(context, "staging slots for NCCL", bytes)?.cut(bytes)?;
        let copies = Stream::urgent(context)?;
        let event = || Event::new(context);
        let slot = |_| Ok(StagingSlot { filled: event()?, emptied: event()? });
        let slots = (0..slots).map(slot).collect::<Result<Vec<_>, CudaError>>()?;
        kv.delay_in_tests(&copies)?;
        // The first message of a connection sends this memory before anything has written it.
        memory.fill(0, &copies)?;
        for slot in &slots {
            // Any later write, on any stream, waits for the fill.
            slot.emptied.record(&copies)?;
        }
        let lanes = (0..lanes).map(|_| StreamProgress::new(context)).collect::<Result<_, _>>()?;
        let copied = StreamProgress::new(context)?;
        Ok(Self { memory, slot_bytes, slots, next: 0, copies, lanes, copied })
    }

    /// Returns the memory of all slots, contiguous.
    pub(super) fn memory(&self) -> &Range {
        &self.memory
    }

    /// Makes `stream` wait until all slots are free.
    pub(super) fn await_all<R: StreamRole>(&self, stream: &Stream<R>) -> Result<(), CudaError> {
        self.slots.iter().try_for_each(|slot| stream.wait(&slot.emptied))
    }

    /// Gathers the blocks into the next slot and calls `send`, which launches an operation on
    /// `stream` that reads the slot at the given place in [`memory`](Self::memory).
    ///
    /// # Safety
    /// Nothing writes the blocks before that operation is complete.
    pub(super) unsafe fn send<R: StreamRole, E: From<CudaError>>(
        &mut self,
        kv: &DeviceKv,
        rows: &BlockRows,
        ids: &[BlockId],
        stream: &Stream<R>,
        send: impl FnOnce(&Range, SlotRange) -> Result<(), E>,
    ) -> Result<(), E> {
        let (index, place) = self.take_slot(rows, ids);
        let slot = &self.slots[index];
        self.copies.wait(&slot.emptied)?;
        // SAFETY: nothing else uses the slot until `emptied` is recorded, and nothing writes the
        // blocks before the operation is complete (`# Safety`).
        unsafe {
            move_blocks(kv, rows, ids, (&self.memory, place.0), Direction::Gather, &self.copies)
        }?;
        slot.filled.record(&self.copies)?;
        stream.wait(&slot.filled)?;
        send(&self.memory, place)?;
        Ok(slot.emptied.record(stream)?)
    }

    /// Calls `receive`, which launches an operation on `stream` that fills the next slot, and
    /// scatters the slot to the blocks. [`mark_copies`](Self::mark_copies) marks the end.
    ///
    /// # Safety
    /// Nothing else reads or writes the blocks until that mark is reached, or
    /// [`drain`](Self::drain) has returned.
    pub(super) unsafe fn receive<R: StreamRole, E: From<CudaError>>(
        &mut self,
        kv: &DeviceKv,
        rows: &BlockRows,
        ids: &[BlockId],
        direction: Direction,
        stream: &Stream<R>,
        receive: impl FnOnce(&Range, SlotRange) -> Result<(), E>,
    ) -> Result<(), E> {
        let (index, place) = self.take_slot(rows, ids);
        let slot = &self.slots[index];
        stream.wait(&slot.emptied)?;
        receive(&self.memory, place)?;
        slot.filled.record(stream)?;
        self.copies.wait(&slot.filled)?;
        // SAFETY: nothing else uses the slot until `emptied` is recorded, and nothing else accesses
        // the blocks until the copies are complete (`# Safety`).
        unsafe { move_blocks(kv, rows, ids, (&self.memory, place.0), direction, &self.copies) }?;
        Ok(slot.emptied.record(&self.copies)?)
    }

    /// Returns the stream of the copies.
    pub(super) fn copies(&self) -> &Stream<StagingCopies> {
        &self.copies
    }

    /// Marks the end of all work so far on the stream of a lane. Within a channel a lane always has
    /// the same stream.
    pub(super) fn mark_lane<R: StreamRole>(
        &mut self,
        lane: usize,
        stream: &Stream<R>,
    ) -> Result<StreamMark, CudaError> {
        self.lanes[lane].mark(stream)
    }

    /// Marks the end of all copies so far.
    pub(super) fn mark_copies(&mut self) -> Result<StreamMark, CudaError> {
        self.copied.mark(&self.copies)
    }

    fn take_slot(&mut self, rows: &BlockRows, ids: &[BlockId]) -> (usize, SlotRange) {
        let index = self.next;
        self.next = (index + 1) % self.slots.len();
        let bytes = ids.len() * rows.bytes();
        assert!(bytes <= self.slot_bytes, "{bytes} bytes fit a slot of {}", self.slot_bytes);
        (index, (index * self.slot_bytes, bytes))
    }

    /// Waits until the copies and the communicators' streams are idle.
    pub(super) fn drain<R: StreamRole>(
        &mut self,
        streams: &[Stream<R>],
        time_out: Duration,
    ) -> Result<(), String> {
        let lanes = streams.iter().enumerate();
        let last = lanes.map(|(lane, stream)| self.lanes[lane].mark(stream));
        let last: Result<Vec<_>, _> = last.chain([self.copied.mark(&self.copies)]).collect();
        let last = last.map_err(|error| error.to_string())?;
        let begin = Instant::now();
        while !last.iter().all(StreamMark::is_reached) {
            let waited = begin.elapsed();
            if waited >= time_out {
                return Err(format!(
                    "the copies of an aborted channel are not complete after {waited:?}"
                ));
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
        operations(runs, slot_blocks, direct_min)
            .into_iter()
            .map(|ChannelOperation { blocks, is_staged }| (blocks.start, blocks.len(), is_staged))
            .collect()
    }

    #[test]
    fn short_runs_share_slots_and_long_runs_are_not_staged() {
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
    fn operations_cover_all_blocks_in_order() {
        let mut state = 7_u64;
        for _ in 0..200 {
            let mut next = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((state >> 33) % below) as u32
            };
            let runs: Vec<u32> = (0..next(9)).map(|_| 1 + next(12)).collect();
            let (slot, direct) = (1 + next(8) as usize, 1 + next(8) as usize);
            let mut end = 0;
            for ChannelOperation { blocks, .. } in operations(&runs, slot, direct) {
                assert!(blocks.start == end && blocks.end > end);
                assert!(blocks.len() <= slot);
                end = blocks.end;
            }
            assert_eq!(end, runs.iter().sum::<u32>() as usize);
        }
    }
}
