//! Borrows of the KV blocks of the steps in flight on one device.

use std::sync::{Arc, atomic::Ordering};

use super::{ArenaError, Borrow, BorrowState, KvArena, WRITTEN};
use crate::layout::{BLOCK_TOKENS, BlockId, KvGroups, NO_BLOCK};

/// Borrows blocks for all steps in flight on one device. The device runs steps in order, so one
/// borrow of a block serves all steps that use the block. The borrow is exclusive as long as a step
/// in flight writes the block, and shared as long as steps in flight only read the block. The arena
/// rejects other borrowers in the same way as for any borrowed block.
///
/// The first step in flight of a sequence borrows the blocks of the sequence, and the last step in
/// flight releases them. So the cost of a step in between does not depend on the sequence's length.
/// A step in between releases the blocks that have fallen behind the window of their KV group.
#[derive(Debug)]
pub struct StreamAccess {
    arena: Arc<KvArena>,
    groups: KvGroups,
    /// Users of each block, by block index.
    users: Vec<BlockUsers>,
    /// Sequences with steps in flight, by slot. A slot rarely has more than one: the previous
    /// sequence's last step may still run when the next sequence of the slot starts.
    slots: Vec<Vec<SlotSequence>>,
    /// Number of calls of [`Self::acquire`] so far, which numbers the steps.
    step_count: u64,
}

/// Numbers of sequences and steps that use a block.
#[derive(Clone, Copy, Debug, Default)]
struct BlockUsers {
    /// Number of sequences with steps in flight whose block tables contain the block.
    sequences: u32,
    /// Number of steps in flight that write the block.
    writing_steps: u32,
    /// Number of the last step that wrote the block, to detect two writes in one step.
    last_writing_step: u64,
}

/// A sequence in a slot, with steps in flight.
#[derive(Debug)]
struct SlotSequence {
    generation: u32,
    /// Number of steps in flight.
    step_count: u32,
    /// Front of the block table, as far as steps in flight use it. The sequence has borrowed these
    /// blocks; entries behind windows are [`NO_BLOCK`].
    table: Vec<BlockId>,
}

/// Blocks of one row (one sequence) that a step accesses.
#[derive(Clone, Copy, Debug)]
pub struct RowBlocks<'a> {
    /// Index of the executor's slot that holds the sequence.
    pub slot: u32,
    /// Number that distinguishes the sequences that use the slot one after another.
    pub generation: u32,
    /// Front of the block table, as far as the step uses it. The table of a sequence only grows;
    /// its entries behind windows are ignored.
    pub table: &'a [BlockId],
    /// Lower bound on the position of the step's first token. The step writes the recurrent state
    /// and all blocks from this position on. Of the earlier blocks it reads those in a window.
    pub position_min: usize,
}

/// Blocks of one step. The caller returns them to [`StreamAccess::release`] when the step has run.
#[derive(Debug, Default)]
#[must_use = "blocks of a step that is not released stay borrowed"]
pub struct StreamStep {
    rows: Vec<StepRow>,
    /// Blocks that the step writes.
    writes: Vec<BlockId>,
    /// Blocks that the step copies, and the copies.
    copied: Vec<BlockId>,
}

/// Row of a step.
#[derive(Debug)]
struct StepRow {
    slot: u32,
    generation: u32,
    /// Length of the sequence's table before the step.
    table_len_before: usize,
}

impl StreamAccess {
    /// Creates an empty set of borrows for a model with these KV groups.
    pub fn new(arena: &Arc<KvArena>, groups: KvGroups) -> Self {
        let users = vec![BlockUsers::default(); arena.block_count() as usize];
        Self { arena: Arc::clone(arena), groups, users, slots: Vec::new(), step_count: 0 }
    }

    /// Borrows all blocks of a step or, if it returns an error, none. Rows may share blocks that
    /// none of them writes. The caller lists every row once, and no block is written by two rows.
    /// Before the rows are computed, the step copies the first block of each pair in `copies` to the
    /// second one, which a row may write too.
    pub fn acquire<'a>(
        &mut self,
        rows: impl IntoIterator<Item = RowBlocks<'a>>,
        copies: &[(BlockId, BlockId)],
    ) -> Result<StreamStep, ArenaError> {
        self.step_count += 1;
        let mut step = StreamStep::default();
        let acquired = rows.into_iter().try_for_each(|row| self.acquire_row(&mut step, row));
        let all = acquired.and_then(|()| self.acquire_copies(&mut step, copies));
        match all {
            Ok(()) => Ok(step),
            Err(error) => {
                self.undo(step);
                Err(error)
            }
        }
    }

    /// Releases the blocks of a step that has run. `computed(slot, generation)` returns the number
    /// of tokens of the sequence whose KV is computed. No later step begins before this position.
    pub fn release(&mut self, step: StreamStep, computed: impl Fn(u32, u32) -> usize) {
        for block in step.writes {
            self.release_block(block, |users| &mut users.writing_steps);
        }
        self.release_table(step.copied);
        for StepRow { slot, generation, .. } in step.rows {
            let sequences = &mut self.slots[slot as usize];
            let index = sequences.iter().position(|sequence| sequence.generation == generation);
            let index = index.expect("acquire added the sequence of every row");
            sequences[index].step_count -= 1;
            let unneeded = match sequences[index].step_count {
                0 => sequences.swap_remove(index).table,
                _ => {
                    let (table, mut unneeded) = (&mut sequences[index].table, Vec::new());
                    let computed = computed(slot, generation);
                    self.groups.remove_behind(table, computed, |block| unneeded.push(block));
                    unneeded
                }
            };
            self.release_table(unneeded);
        }
    }

    /// Releases the blocks of a step that was not acquired completely. An older step of the same
    /// sequence may be in flight, so the sequence's table gets its former length.
    fn undo(&mut self, step: StreamStep) {
        for StepRow { slot, generation, table_len_before } in &step.rows {
            let sequences = self.slots[*slot as usize].iter_mut();
            let mut tables =
                sequences.filter(|it| it.generation == *generation).map(|it| &mut it.table);
            let table = tables.next().expect("acquire_row added the sequence of every row");
            let added = table.split_off(table.len().min(*table_len_before));
            self.release_table(added);
        }
        self.release(step, |_, _| 0);
    }

    fn acquire_row(&mut self, step: &mut StreamStep, row: RowBlocks<'_>) -> Result<(), ArenaError> {
        let RowBlocks { slot, generation, table, position_min } = row;
        if self.slots.len() <= slot as usize {
            self.slots.resize_with(slot as usize + 1, Vec::new);
        }
        let sequences = &mut self.slots[slot as usize];
        let index = match sequences.iter().position(|sequence| sequence.generation == generation) {
            Some(index) => index,
            None => {
                sequences.push(SlotSequence { generation, step_count: 0, table: Vec::new() });
                sequences.len() - 1
            }
        };
        let sequence = &mut sequences[index];
        sequence.step_count += 1;
        let table_len_before = sequence.table.len();
        step.rows.push(StepRow { slot, generation, table_len_before });
        let (known, added) = table.split_at(table_len_before.min(table.len()));
        let is_same = |(&held, &block): (&BlockId, &BlockId)| held == block || held == NO_BLOCK;
        debug_assert!(sequence.table.iter().zip(known).all(is_same), "a block table only grows");
        for (entry, &block) in (known.len()..).zip(added) {
            let is_state = entry < self.groups.state_entries();
            let is_needed = is_state || self.groups.is_needed(entry, position_min);
            if is_needed {
                self.read(block)?;
            }
            let held = if is_needed { block } else { NO_BLOCK };
            self.slots[slot as usize][index].table.push(held);
        }
        let (state, _) = self.groups.split(table);
        let first_written = position_min / BLOCK_TOKENS;
        let first_written = self.groups.entries_of(first_written..first_written).start;
        for &block in state.iter().chain(&table[first_written.min(table.len())..]) {
            self.write(block)?;
            step.writes.push(block);
        }
        Ok(())
    }

    fn acquire_copies(
        &mut self,
        step: &mut StreamStep,
        copies: &[(BlockId, BlockId)],
    ) -> Result<(), ArenaError> {
        for &(from, to) in copies {
            for block in [from, to] {
                self.read(block)?;
                step.copied.push(block);
            }
            if self.users[to.index()].last_writing_step != self.step_count {
                self.write(to)?;
                step.writes.push(to);
            }
        }
        Ok(())
    }

    /// Borrows a block for the current step to write. The row has already borrowed the block for
    /// reading.
    fn write(&mut self, block: BlockId) -> Result<(), ArenaError> {
        let users = &mut self.users[block.index()];
        let last = std::mem::replace(&mut users.last_writing_step, self.step_count);
        if last == self.step_count {
            let (wanted, state) = (Borrow::Write, BorrowState::Written);
            return Err(ArenaError::Conflict { block, wanted, state });
        }
        if users.writing_steps == 0 {
            self.arena.upgrade(block)?;
        }
        users.writing_steps += 1;
        Ok(())
    }

    /// Borrows a block for a sequence to read.
    fn read(&mut self, block: BlockId) -> Result<(), ArenaError> {
        match self.users.get_mut(block.index()) {
            Some(users) if users.sequences + users.writing_steps > 0 => users.sequences += 1,
            _ => {
                // Rejects a block outside the arena.
                self.arena.acquire_read(block)?;
                self.users[block.index()].sequences = 1;
            }
        }
        Ok(())
    }

    fn release_table(&mut self, table: Vec<BlockId>) {
        for block in table.into_iter().filter(|block| *block != NO_BLOCK) {
            self.release_block(block, |users| &mut users.sequences);
        }
    }

    /// Removes one user of a block from the count that `count` selects, and narrows or ends the
    /// arena's borrow.
    fn release_block(&mut self, block: BlockId, count: fn(&mut BlockUsers) -> &mut u32) {
        let users = &mut self.users[block.index()];
        let was_written = users.writing_steps > 0;
        *count(users) -= 1;
        match (users.sequences, users.writing_steps) {
            (0, 0) if was_written => self.arena.release_write(block),
            (0, 0) => self.arena.release_read(block),
            (_, 0) if was_written => self.arena.downgrade(block),
            _ => {}
        }
    }
}

impl Drop for StreamAccess {
    fn drop(&mut self) {
        for (block, users) in (0..).map(BlockId).zip(&self.users) {
            if users.writing_steps > 0 {
                self.arena.release_write(block);
            } else if users.sequences > 0 {
                self.arena.release_read(block);
            }
        }
    }
}

impl KvArena {
    /// Turns the only reader of a block into its writer. Returns an error if the block has other
    /// readers.
    fn upgrade(&self, block: BlockId) -> Result<(), ArenaError> {
        self.acquire(block, Borrow::Write, |raw| (raw == 1).then_some(WRITTEN))
    }

    /// Turns the writer of a block into its only reader.
    fn downgrade(&self, block: BlockId) {
        let before = self.borrows[block.index()].swap(1, Ordering::AcqRel);
        debug_assert_eq!(before, WRITTEN, "only the writer of a block downgrades its borrow");
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::layout::{KvFormat, KvLayout};

    fn arena() -> Arc<KvArena> {
        let layout =
            KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 4, format: KvFormat::F32 };
        KvArena::host(layout, 4).unwrap()
    }

    const A: BlockId = BlockId(0);
    const B: BlockId = BlockId(1);
    const C: BlockId = BlockId(2);

    /// Returns a row of the first sequence of a slot, which writes from the block of this index on.
    fn row(slot: u32, table: &[BlockId], first_written: usize) -> RowBlocks<'_> {
        RowBlocks { slot, generation: 0, table, position_min: first_written * BLOCK_TOKENS }
    }

    fn whole(arena: &Arc<KvArena>) -> StreamAccess {
        StreamAccess::new(arena, KvGroups::whole(1))
    }

    fn states(arena: &KvArena) -> [BorrowState; 3] {
        [A, B, C].map(|block| arena.state(block).unwrap())
    }

    const FREE: BorrowState = BorrowState::Free;
    const READ: BorrowState = BorrowState::Read { readers: 1 };
    const WRITTEN: BorrowState = BorrowState::Written;

    #[test]
    fn steps_in_flight_share_written_blocks_and_exclude_other_borrowers() {
        let arena = arena();
        let mut access = whole(&arena);
        let first = access.acquire([row(0, &[A, B], 1)], &[]).unwrap();
        let second = access.acquire([row(0, &[A, B], 1), row(1, &[A, C], 1)], &[]).unwrap();
        assert!(arena.write(A).is_err() && arena.read(B).is_err());
        let beside = arena.read(A).unwrap();
        access.release(first, |_, _| 0);
        assert_eq!(arena.state(B).unwrap(), WRITTEN);
        // A third step only reads what the second step writes. Other readers are accepted once the
        // second step has run.
        let third = access.acquire([row(0, &[A, B], 2)], &[]).unwrap();
        access.release(second, |_, _| 0);
        drop(beside);
        assert_eq!(states(&arena), [READ, READ, FREE], "the other row has no step in flight");
        arena.read(B).unwrap();
        access.release(third, |_, _| 0);
        assert_eq!(states(&arena), [FREE; 3]);
    }

    #[test]
    fn states_are_written_by_every_step_and_copied_blocks_stay_borrowed() {
        let arena = arena();
        let groups = KvGroups::whole(1).with_state_entries(1);
        let mut access = StreamAccess::new(&arena, groups);
        // The state is A, the first block of the KV is B, and C is a cached state.
        let table = [A, B, BlockId(3)];
        let first = access.acquire([row(0, &table[..2], 0)], &[(C, A)]).unwrap();
        assert_eq!(states(&arena), [WRITTEN, WRITTEN, READ]);
        // A step cannot copy to a block that another owner reads.
        let beside = arena.read(C).unwrap();
        assert!(access.acquire([row(0, &table, 1)], &[(A, C)]).is_err());
        drop(beside);
        assert_eq!(states(&arena), [WRITTEN, WRITTEN, READ]);
        access.release(first, |_, _| 0);
        assert_eq!(states(&arena), [FREE; 3]);
        let second = access.acquire([row(0, &table, 1)], &[(A, C)]).unwrap();
        assert_eq!(states(&arena), [WRITTEN, READ, WRITTEN]);
        let third = access.acquire([row(0, &table, 1)], &[]).unwrap();
        access.release(second, |_, _| 16);
        assert_eq!(states(&arena), [WRITTEN, READ, FREE]);
        access.release(third, |_, _| 16);
        assert_eq!(states(&arena), [FREE; 3]);
    }

    #[test]
    fn a_growing_block_table_borrows_its_new_blocks() {
        let arena = arena();
        let mut access = whole(&arena);
        let first = access.acquire([row(0, &[A], 0)], &[]).unwrap();
        let second = access.acquire([row(0, &[A, B], 1)], &[]).unwrap();
        assert_eq!(states(&arena), [WRITTEN, WRITTEN, FREE]);
        access.release(first, |_, _| 0);
        assert_eq!(states(&arena), [READ, WRITTEN, FREE]);
        access.release(second, |_, _| 0);
        assert_eq!(states(&arena), [FREE; 3]);
    }

    #[test]
    fn blocks_behind_a_window_are_released_while_steps_are_in_flight() {
        let arena = arena();
        let windows = [None, NonZeroUsize::new(16)];
        let mut access = StreamAccess::new(&arena, KvGroups::of_windows(&windows));
        let at = |position_min| RowBlocks { position_min, ..row(0, &[A, B, NO_BLOCK, C], 0) };
        assert!(access.acquire([at(16)], &[]).is_err(), "NO_BLOCK is written");
        let table = [A, B, BlockId(3), C];
        let at = |position_min| RowBlocks { slot: 0, generation: 0, table: &table, position_min };
        let first = access.acquire([at(20)], &[]).unwrap();
        let second = access.acquire([at(31)], &[]).unwrap();
        assert_eq!(states(&arena), [READ, READ, WRITTEN]);
        // The token at position 31 does not attend to the first 16 tokens of the second group.
        access.release(first, |slot, generation| 31 + (slot + generation) as usize);
        assert_eq!(states(&arena), [READ, FREE, WRITTEN]);
        // The next step's table still names the released block, which has another owner now.
        let writer = arena.write(B).unwrap();
        let third = access.acquire([at(31)], &[]).unwrap();
        access.release(second, |_, _| 31);
        access.release(third, |_, _| 31);
        assert_eq!(states(&arena), [FREE, WRITTEN, FREE]);
        // The first step in flight of a sequence does not borrow the block either.
        let fourth = access.acquire([at(31)], &[]).unwrap();
        access.release(fourth, |_, _| 32);
        drop(writer);
        assert!((0..4).all(|id| arena.pins(BlockId(id)).unwrap() == 0));
    }

    #[test]
    fn the_next_sequence_of_a_slot_borrows_its_own_blocks() {
        let arena = arena();
        let mut access = whole(&arena);
        let first = access.acquire([row(0, &[A, B], 1)], &[]).unwrap();
        let next = RowBlocks { generation: 1, ..row(0, &[C], 0) };
        let second = access.acquire([next], &[]).unwrap();
        let third = access.acquire([next], &[]).unwrap();
        access.release(first, |_, _| 0);
        assert_eq!(states(&arena), [FREE, FREE, WRITTEN]);
        access.release(second, |_, _| 0);
        assert_eq!(states(&arena), [FREE, FREE, WRITTEN]);
        access.release(third, |_, _| 0);
        assert_eq!(states(&arena), [FREE; 3]);
    }

    #[test]
    fn a_block_read_by_earlier_steps_may_be_written_by_a_later_step() {
        let arena = arena();
        let mut access = whole(&arena);
        let first = access.acquire([row(0, &[A], 1)], &[]).unwrap();
        // The block's reader has left, and another row owns the block.
        let second = access.acquire([row(1, &[A], 0)], &[]).unwrap();
        access.release(first, |_, _| 0);
        assert_eq!(arena.state(A).unwrap(), WRITTEN);
        access.release(second, |_, _| 0);
        assert_eq!(arena.state(A).unwrap(), FREE);
        let third = access.acquire([row(0, &[A], 1)], &[]).unwrap();
        let beside = arena.read(A).unwrap();
        assert!(access.acquire([row(1, &[A], 0)], &[]).is_err(), "another borrower reads it");
        drop(beside);
        access.release(third, |_, _| 0);
        assert_eq!(arena.pins(A).unwrap(), 0);
    }

    #[test]
    fn a_rejected_stream_step_borrows_nothing() {
        let arena = arena();
        let mut access = whole(&arena);
        let writer = arena.write(B).unwrap();
        assert!(access.acquire([row(0, &[C], 0), row(1, &[A, B], 2)], &[]).is_err());
        assert!(access.acquire([row(0, &[A, B], 1)], &[]).is_err());
        let twice = access.acquire([row(0, &[A], 0), row(1, &[A], 0)], &[]);
        assert!(twice.is_err(), "two rows write it");
        assert!(access.acquire([row(0, &[BlockId(9)], 1)], &[]).is_err());
        drop(writer);
        assert!((0..4).all(|id| arena.pins(BlockId(id)).unwrap() == 0));
        let step = access.acquire([row(0, &[A, B], 0)], &[]).unwrap();
        access.release(step, |_, _| 0);
        assert_eq!(states(&arena), [FREE; 3]);
    }

    #[test]
    fn a_rejected_step_leaves_no_blocks_in_the_table_of_an_older_step_in_flight() {
        let arena = arena();
        let mut access = whole(&arena);
        let first = access.acquire([row(0, &[A], 1)], &[]).unwrap();
        let writer = arena.write(C).unwrap();
        // The step has borrowed B when it fails to borrow C, or to borrow the block of another row.
        assert!(access.acquire([row(0, &[A, B, C], 1)], &[]).is_err());
        assert!(access.acquire([row(0, &[A, B], 1), row(1, &[C], 1)], &[]).is_err());
        assert_eq!(states(&arena), [READ, FREE, WRITTEN]);
        drop(writer);
        // The retry has another block at the same index of the table.
        let retry = access.acquire([row(0, &[A, C], 1)], &[]).unwrap();
        assert_eq!(states(&arena), [READ, FREE, WRITTEN]);
        access.release(first, |_, _| 0);
        access.release(retry, |_, _| 0);
        assert_eq!(states(&arena), [FREE; 3]);
    }

    #[test]
    fn dropping_the_stream_access_releases_all_blocks() {
        let arena = arena();
        let mut access = whole(&arena);
        let first = access.acquire([row(0, &[A, B], 1)], &[]).unwrap();
        let forgotten = [first, access.acquire([row(1, &[B], 1)], &[]).unwrap()];
        drop((forgotten, access));
        assert_eq!(states(&arena), [FREE; 3]);
    }
}
