//! The blocks of steps that are in flight together, one after the other on one device.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, atomic::Ordering},
};

use super::{ArenaError, BorrowState, KvArena, WRITTEN};
use crate::layout::BlockId;

/// Borrows of all steps in flight. The device runs them in order, so a block that several of them
/// read and write is borrowed once for all: for writing as long as one of them writes it, then for
/// reading as long as one reads it. Everybody else is kept away as from any borrowed block.
#[derive(Debug)]
pub struct StreamAccess {
    arena: Arc<KvArena>,
    held: HashMap<BlockId, Uses>,
}

/// Steps in flight that use a block.
#[derive(Clone, Copy, Debug, Default)]
struct Uses {
    readers: u32,
    writers: u32,
}

/// The blocks of one step, to be given back when it has run.
#[derive(Debug)]
#[must_use = "blocks of a step that is forgotten stay borrowed"]
pub struct StreamStep {
    reads: Vec<BlockId>,
    writes: Vec<BlockId>,
}

impl StreamAccess {
    pub fn new(arena: &Arc<KvArena>) -> Self {
        Self { arena: Arc::clone(arena), held: HashMap::new() }
    }

    /// Borrows all blocks of a step or none. A block may be among both, and among the reads more than
    /// once; two rows that write one block are a defect.
    pub fn acquire(
        &mut self,
        reads: &[BlockId],
        writes: &[BlockId],
    ) -> Result<StreamStep, ArenaError> {
        let mut step = StreamStep { reads: Vec::new(), writes: Vec::new() };
        let outcome = self.acquire_into(&mut step, reads, writes);
        match outcome {
            Ok(()) => Ok(step),
            Err(error) => {
                self.release(step);
                Err(error)
            }
        }
    }

    /// Gives back the blocks of a step that has run.
    pub fn release(&mut self, step: StreamStep) {
        for block in step.writes {
            self.give_back(block, |uses| &mut uses.writers);
        }
        for block in step.reads {
            self.give_back(block, |uses| &mut uses.readers);
        }
    }

    fn acquire_into(
        &mut self,
        step: &mut StreamStep,
        reads: &[BlockId],
        writes: &[BlockId],
    ) -> Result<(), ArenaError> {
        let mut sorted = writes.to_vec();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            let (wanted, state) = (super::Borrow::Write, BorrowState::Written);
            return Err(ArenaError::Conflict { block: twice[0], wanted, state });
        }
        for &block in writes {
            self.write(block)?;
            step.writes.push(block);
        }
        for &block in reads {
            self.read(block)?;
            step.reads.push(block);
        }
        Ok(())
    }

    fn write(&mut self, block: BlockId) -> Result<(), ArenaError> {
        match self.held.entry(block) {
            Entry::Vacant(place) => {
                self.arena.acquire_write(block)?;
                place.insert(Uses { readers: 0, writers: 1 });
            }
            Entry::Occupied(mut uses) => {
                if uses.get().writers == 0 {
                    self.arena.upgrade(block)?;
                }
                uses.get_mut().writers += 1;
            }
        }
        Ok(())
    }

    fn read(&mut self, block: BlockId) -> Result<(), ArenaError> {
        match self.held.entry(block) {
            Entry::Vacant(place) => {
                self.arena.acquire_read(block)?;
                place.insert(Uses { readers: 1, writers: 0 });
            }
            Entry::Occupied(mut uses) => uses.get_mut().readers += 1,
        }
        Ok(())
    }

    fn give_back(&mut self, block: BlockId, count: fn(&mut Uses) -> &mut u32) {
        let uses = self.held.get_mut(&block).expect("what is given back was borrowed");
        let was_written = uses.writers > 0;
        *count(uses) -= 1;
        match *uses {
            Uses { readers: 0, writers: 0 } => {
                self.held.remove(&block);
                if was_written {
                    self.arena.release_write(block);
                } else {
                    self.arena.release_read(block);
                }
            }
            Uses { writers: 0, .. } if was_written => self.arena.downgrade(block),
            _ => {}
        }
    }
}

impl Drop for StreamAccess {
    fn drop(&mut self) {
        for (block, uses) in self.held.drain() {
            if uses.writers > 0 {
                self.arena.release_write(block);
            } else {
                self.arena.release_read(block);
            }
        }
    }
}

impl KvArena {
    /// The only reader of a block becomes its writer.
    fn upgrade(&self, block: BlockId) -> Result<(), ArenaError> {
        self.borrow_of(block)?
            .compare_exchange(1, WRITTEN, Ordering::Acquire, Ordering::Relaxed)
            .map(drop)
            .map_err(|raw| ArenaError::Conflict {
                block,
                wanted: super::Borrow::Write,
                state: BorrowState::of(raw),
            })
    }

    /// The writer of a block becomes its only reader.
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

    #[test]
    fn steps_in_flight_share_what_each_other_writes_and_keep_others_away() {
        let arena = arena();
        let mut access = StreamAccess::new(&arena);
        let first = access.acquire(&[A], &[B]).unwrap();
        let second = access.acquire(&[A, A, B], &[B]).unwrap();
        assert!(arena.write(A).is_err() && arena.read(B).is_err());
        let beside = arena.read(A).unwrap();
        access.release(first);
        assert_eq!(arena.state(B).unwrap(), BorrowState::Written);
        // A third one only reads it: others may as well once the second has run.
        let third = access.acquire(&[B], &[]).unwrap();
        access.release(second);
        assert_eq!(arena.state(B).unwrap(), BorrowState::Read { readers: 1 });
        arena.read(B).unwrap();
        access.release(third);
        drop(beside);
        assert_eq!((arena.pins(A).unwrap(), arena.pins(B).unwrap()), (0, 0));
    }

    #[test]
    fn a_block_that_only_steps_read_may_be_written_by_a_later_one() {
        let arena = arena();
        let mut access = StreamAccess::new(&arena);
        let first = access.acquire(&[A], &[]).unwrap();
        let second = access.acquire(&[], &[A]).unwrap();
        access.release(first);
        assert_eq!(arena.state(A).unwrap(), BorrowState::Written);
        access.release(second);
        assert_eq!(arena.state(A).unwrap(), BorrowState::Free);
        let third = access.acquire(&[A], &[]).unwrap();
        let beside = arena.read(A).unwrap();
        assert!(access.acquire(&[], &[A]).is_err(), "someone else reads it");
        drop(beside);
        access.release(third);
        assert_eq!(arena.pins(A).unwrap(), 0);
    }

    #[test]
    fn a_step_that_is_refused_borrows_nothing() {
        let arena = arena();
        let mut access = StreamAccess::new(&arena);
        let writer = arena.write(B).unwrap();
        assert!(access.acquire(&[A, B], &[BlockId(2)]).is_err());
        assert!(access.acquire(&[A], &[B]).is_err());
        assert!(access.acquire(&[], &[A, A]).is_err(), "two rows write it");
        assert!(access.acquire(&[BlockId(9)], &[]).is_err());
        drop(writer);
        assert!((0..4).all(|id| arena.pins(BlockId(id)).unwrap() == 0));
    }

    #[test]
    fn what_is_in_flight_is_given_back_with_the_whole() {
        let arena = arena();
        let mut access = StreamAccess::new(&arena);
        let forgotten = [access.acquire(&[A], &[B]).unwrap(), access.acquire(&[B], &[]).unwrap()];
        drop((forgotten, access));
        assert_eq!((arena.pins(A).unwrap(), arena.pins(B).unwrap()), (0, 0));
    }
}
