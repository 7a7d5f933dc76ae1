//! Blocks of the steps in flight on one device.

use std::sync::{Arc, atomic::Ordering};

use super::{ArenaError, Borrow, BorrowState, KvArena, WRITTEN};
use crate::layout::BlockId;

/// Borrows of all steps in flight. The device runs steps in order, so one borrow of a block serves all
/// steps that use it. The borrow is exclusive as long as one of the steps writes the block, then shared as
/// long as one reads it. Other borrowers are rejected as for any borrowed block.
///
/// A row's blocks are borrowed with its first step in flight and released with its last one. The cost of a
/// step in between does not depend on the length of its rows.
#[derive(Debug)]
pub struct StreamAccess {
    arena: Arc<KvArena>,
    /// Uses of each block, by block index.
    uses: Vec<BlockUses>,
    /// Occupants with steps in flight, by slot; rarely more than one per slot.
    rows: Vec<Vec<SlotSequence>>,
    /// Number of steps so far.
    steps: u64,
}

/// Users of a block.
#[derive(Clone, Copy, Debug, Default)]
struct BlockUses {
    /// Rows with steps in flight that have the block in their tables.
    rows: u32,
    /// Steps in flight that write the block.
    writers: u32,
    /// Number of the last step that wrote the block.
    written_by: u64,
}

/// A sequence that occupies a slot.
#[derive(Debug)]
struct SlotSequence {
    generation: u32,
    steps: u32,
    /// Front of the block table, as far as steps in flight use it.
    blocks: Vec<BlockId>,
}

/// Blocks of one row that a step accesses.
#[derive(Clone, Copy, Debug)]
pub struct RowBlocks<'a> {
    pub slot: u32,
    pub generation: u32,
    /// Front of the block table, as far as the step uses it. An occupant's table only grows.
    pub table: &'a [BlockId],
    /// Index in the table of the first block that the step writes; later blocks are written too.
    pub first_written: usize,
}

/// Blocks of one step. The caller returns them to [`StreamAccess::release`] when the step has run.
#[derive(Debug, Default)]
#[must_use = "blocks of a step that is forgotten stay borrowed"]
pub struct StreamStep {
    /// Slot and generation of each row.
    rows: Vec<(u32, u32)>,
    writes: Vec<BlockId>,
}

impl StreamAccess {
    pub fn new(arena: &Arc<KvArena>) -> Self {
        let uses = vec![BlockUses::default(); arena.block_count() as usize];
        Self { arena: Arc::clone(arena), uses, rows: Vec::new(), steps: 0 }
    }

    /// Borrows all blocks of a step or none. Rows may share blocks that none of them writes. A block
    /// written by two rows, or a row listed twice, is a caller's bug.
    pub fn acquire<'a>(
        &mut self,
        rows: impl IntoIterator<Item = RowBlocks<'a>>,
    ) -> Result<StreamStep, ArenaError> {
        self.steps += 1;
        let mut step = StreamStep::default();
        match rows.into_iter().try_for_each(|row| self.acquire_row(&mut step, row)) {
            Ok(()) => Ok(step),
            Err(error) => {
                self.release(step);
                Err(error)
            }
        }
    }

    /// Releases the blocks of a step that has run.
    pub fn release(&mut self, step: StreamStep) {
        for block in step.writes {
            self.release_block(block, |uses| &mut uses.writers);
        }
        for (slot, generation) in step.rows {
            let occupants = &mut self.rows[slot as usize];
            let place = occupants.iter().position(|row| row.generation == generation);
            let place = place.expect("released rows were acquired");
            occupants[place].steps -= 1;
            if occupants[place].steps == 0 {
                let row = occupants.swap_remove(place);
                row.blocks
                    .into_iter()
                    .for_each(|block| self.release_block(block, |uses| &mut uses.rows));
            }
        }
    }

    fn acquire_row(&mut self, step: &mut StreamStep, row: RowBlocks<'_>) -> Result<(), ArenaError> {
        let RowBlocks { slot, generation, table, first_written } = row;
        if self.rows.len() <= slot as usize {
            self.rows.resize_with(slot as usize + 1, Vec::new);
        }
        let occupants = &mut self.rows[slot as usize];
        let place = match occupants.iter().position(|row| row.generation == generation) {
            Some(place) => place,
            None => {
                occupants.push(SlotSequence { generation, steps: 0, blocks: Vec::new() });
                occupants.len() - 1
            }
        };
        occupants[place].steps += 1;
        step.rows.push((slot, generation));
        let known = occupants[place].blocks.len().min(table.len());
        debug_assert_eq!(occupants[place].blocks[..known], table[..known], "tables only grow");
        for &block in &table[known..] {
            self.read(block)?;
            self.rows[slot as usize][place].blocks.push(block);
        }
        for &block in &table[first_written.min(table.len())..] {
            self.write(block)?;
            step.writes.push(block);
        }
        Ok(())
    }

    fn write(&mut self, block: BlockId) -> Result<(), ArenaError> {
        // The row has already borrowed the block for reading.
        let uses = &mut self.uses[block.index()];
        if std::mem::replace(&mut uses.written_by, self.steps) == self.steps {
            let (wanted, state) = (Borrow::Write, BorrowState::Written);
            return Err(ArenaError::Conflict { block, wanted, state });
        }
        if uses.writers == 0 {
            self.arena.upgrade(block)?;
        }
        uses.writers += 1;
        Ok(())
    }

    fn read(&mut self, block: BlockId) -> Result<(), ArenaError> {
        match self.uses.get_mut(block.index()) {
            Some(uses) if uses.rows + uses.writers > 0 => uses.rows += 1,
            _ => {
                self.arena.acquire_read(block)?;
                self.uses[block.index()].rows = 1;
            }
        }
        Ok(())
    }

    fn release_block(&mut self, block: BlockId, count: fn(&mut BlockUses) -> &mut u32) {
        let uses = &mut self.uses[block.index()];
        let was_written = uses.writers > 0;
        *count(uses) -= 1;
        match *uses {
            BlockUses { rows: 0, writers: 0, .. } if was_written => self.arena.release_write(block),
            BlockUses { rows: 0, writers: 0, .. } => self.arena.release_read(block),
            BlockUses { writers: 0, .. } if was_written => self.arena.downgrade(block),
            _ => {}
        }
    }
}

impl Drop for StreamAccess {
    fn drop(&mut self) {
        for (block, uses) in (0..).map(BlockId).zip(&self.uses) {
            if uses.writers > 0 {
                self.arena.release_write(block);
            } else if uses.rows > 0 {
                self.arena.release_read(block);
            }
        }
    }
}

impl KvArena {
    /// Turns the only reader of a block into its writer.
    fn upgrade(&self, block: BlockId) -> Result<(), ArenaError> {
        self.acquire(block, Borrow::Write, |raw| (raw == 1).then_some(WRITTEN))
    }

    /// Turns the writer of a block into its only reader.
    fn downgrade(&self, block: BlockId) {
        let before = self.borrows[block.index()].swap(1, Ordering::AcqRel);
        debug_assert_eq!(before, WRITTEN, "a writer gives back what it borrowed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Dtype, KvLayout};

    fn arena() -> Arc<KvArena> {
        let layout = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 4, dtype: Dtype::F32 };
        KvArena::host(layout, 4).unwrap()
    }

    const A: BlockId = BlockId(0);
    const B: BlockId = BlockId(1);
    const C: BlockId = BlockId(2);

    /// Returns a row of the first occupant of a slot.
    fn row(slot: u32, table: &[BlockId], first_written: usize) -> RowBlocks<'_> {
        RowBlocks { slot, generation: 0, table, first_written }
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
        let mut access = StreamAccess::new(&arena);
        let first = access.acquire([row(0, &[A, B], 1)]).unwrap();
        let second = access.acquire([row(0, &[A, B], 1), row(1, &[A, C], 1)]).unwrap();
        assert!(arena.write(A).is_err() && arena.read(B).is_err());
        let beside = arena.read(A).unwrap();
        access.release(first);
        assert_eq!(arena.state(B).unwrap(), WRITTEN);
        // A third step only reads what the second step writes. Other readers are accepted once the
        // second step has run.
        let third = access.acquire([row(0, &[A, B], 2)]).unwrap();
        access.release(second);
        drop(beside);
        assert_eq!(states(&arena), [READ, READ, FREE], "the other row has no step in flight");
        arena.read(B).unwrap();
        access.release(third);
        assert_eq!(states(&arena), [FREE; 3]);
    }

    #[test]
    fn a_growing_block_table_borrows_its_new_blocks() {
        let arena = arena();
        let mut access = StreamAccess::new(&arena);
        let first = access.acquire([row(0, &[A], 0)]).unwrap();
        let second = access.acquire([row(0, &[A, B], 1)]).unwrap();
        assert_eq!(states(&arena), [WRITTEN, WRITTEN, FREE]);
        access.release(first);
        assert_eq!(states(&arena), [READ, WRITTEN, FREE]);
        access.release(second);
        assert_eq!(states(&arena), [FREE; 3]);
    }

    #[test]
    fn the_next_occupant_of_a_slot_borrows_its_own_blocks() {
        let arena = arena();
        let mut access = StreamAccess::new(&arena);
        let first = access.acquire([row(0, &[A, B], 1)]).unwrap();
        let next = RowBlocks { generation: 1, ..row(0, &[C], 0) };
        let second = access.acquire([next]).unwrap();
        let third = access.acquire([next]).unwrap();
        access.release(first);
        assert_eq!(states(&arena), [FREE, FREE, WRITTEN]);
        access.release(second);
        assert_eq!(states(&arena), [FREE, FREE, WRITTEN]);
        access.release(third);
        assert_eq!(states(&arena), [FREE; 3]);
    }

    #[test]
    fn a_block_read_by_earlier_steps_may_be_written_by_a_later_step() {
        let arena = arena();
        let mut access = StreamAccess::new(&arena);
        let first = access.acquire([row(0, &[A], 1)]).unwrap();
        // The block's reader has left, and another row owns the block.
        let second = access.acquire([row(1, &[A], 0)]).unwrap();
        access.release(first);
        assert_eq!(arena.state(A).unwrap(), WRITTEN);
        access.release(second);
        assert_eq!(arena.state(A).unwrap(), FREE);
        let third = access.acquire([row(0, &[A], 1)]).unwrap();
        let beside = arena.read(A).unwrap();
        assert!(access.acquire([row(1, &[A], 0)]).is_err(), "another borrower reads it");
        drop(beside);
        access.release(third);
        assert_eq!(arena.pins(A).unwrap(), 0);
    }

    #[test]
    fn a_rejected_stream_step_borrows_nothing() {
        let arena = arena();
        let mut access = StreamAccess::new(&arena);
        let writer = arena.write(B).unwrap();
        assert!(access.acquire([row(0, &[C], 0), row(1, &[A, B], 2)]).is_err());
        assert!(access.acquire([row(0, &[A, B], 1)]).is_err());
        let twice = access.acquire([row(0, &[A], 0), row(1, &[A], 0)]);
        assert!(twice.is_err(), "two rows write it");
        assert!(access.acquire([row(0, &[BlockId(9)], 1)]).is_err());
        drop(writer);
        assert!((0..4).all(|id| arena.pins(BlockId(id)).unwrap() == 0));
        let step = access.acquire([row(0, &[A, B], 0)]).unwrap();
        access.release(step);
        assert_eq!(states(&arena), [FREE; 3]);
    }

    #[test]
    fn dropping_the_stream_access_releases_all_blocks() {
        let arena = arena();
        let mut access = StreamAccess::new(&arena);
        let first = access.acquire([row(0, &[A, B], 1)]).unwrap();
        let forgotten = [first, access.acquire([row(1, &[B], 1)]).unwrap()];
        drop((forgotten, access));
        assert_eq!(states(&arena), [FREE; 3]);
    }
}
