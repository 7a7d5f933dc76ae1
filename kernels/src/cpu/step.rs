//! Rows of one forward pass on the CPU, and the KV blocks that they may access.

use std::{ops::Range, sync::Arc};

use super::rope::Rotation;
use crate::{
    arena::{ArenaError, HeldBlock, KvArena, StepAccess},
    layout::{BLOCK_TOKENS, BlockId, KvLayout},
};

/// Part of a step that belongs to one sequence: `tokens` at consecutive positions.
#[derive(Clone, Copy, Debug)]
pub struct StepSequence<'a> {
    /// Position of the first of `tokens`; `blocks` holds the KV of all positions before it.
    pub first_position: u32,
    /// At least one token. Ids must be below the vocabulary's size, or the embedding panics; the
    /// code that admits a sequence checks them.
    pub tokens: &'a [u32],
    /// The sequence's block table from position 0 on. Entries beyond the last token's are ignored.
    pub blocks: &'a [BlockId],
    /// Number of last tokens that yield logits: 0 within a prompt, 1 to sample, more to score or to
    /// verify draft tokens.
    pub sampled_rows: u32,
    /// Slot of the sequence's adapter; `None`: the base model.
    pub adapter: Option<u32>,
}

/// Error of creating a step.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error("sequence {sequence} of the step has no token")]
    NoToken { sequence: usize },
    #[error("sequence {sequence} samples {sampled_rows} rows of {rows}")]
    TooManySampled { sequence: usize, sampled_rows: u32, rows: usize },
    #[error("sequence {sequence} reaches position {last_position} with {blocks} blocks of 16")]
    TableTooShort { sequence: usize, last_position: u64, blocks: usize },
    /// A block is out of range, written by two sequences, or borrowed by another owner.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

/// Rows of one forward pass. Holds the borrows of all its blocks until dropped.
///
/// The rows of the first sequence come first, then those of the second, and so on. A sequence's
/// blocks from its first row's position on are borrowed for writing, earlier blocks for reading.
#[derive(Debug)]
pub struct CpuStep {
    pub(crate) tokens: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    /// Block of each row's position.
    pub(crate) row_blocks: Vec<HeldBlock>,
    pub(crate) sequences: Vec<SequenceRows>,
    /// Block tables of all sequences, concatenated.
    pub(crate) tables: Vec<HeldBlock>,
    /// Rows that yield logits, ascending.
    pub(crate) sampled: Vec<usize>,
    /// Slot of each row's adapter.
    pub(crate) adapters: Vec<Option<u32>>,
    pub(crate) access: StepAccess,
    /// Cosines and sines of this step's positions, computed by the first layer.
    pub(crate) rotation: Option<Rotation>,
}

/// Place of one sequence in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SequenceRows {
    pub rows: Range<usize>,
    pub first_position: usize,
    /// Range of the sequence in `CpuStep::tables`: every block up to the last row's.
    pub table: Range<usize>,
}

impl CpuStep {
    /// Borrows all blocks of the sequences, or none. A step without sequences has no rows.
    pub fn new(arena: &Arc<KvArena>, sequences: &[StepSequence<'_>]) -> Result<Self, StepError> {
        Self::of_heads(arena, 0..arena.layout().kv_head_count, sequences)
    }

    /// Creates a rank's step, which accesses some of the arena's heads only; otherwise as
    /// [`Self::new`].
    ///
    /// # Panics
    /// When the arena does not have these heads.
    pub fn of_heads(
        arena: &Arc<KvArena>,
        heads: Range<usize>,
        sequences: &[StepSequence<'_>],
    ) -> Result<Self, StepError> {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for (index, sequence) in sequences.iter().enumerate() {
            let blocks = checked_table(index, sequence)?;
            let (read, written) = blocks.split_at(sequence.first_position as usize / BLOCK_TOKENS);
            reads.extend_from_slice(read);
            writes.extend_from_slice(written);
        }
        let access = StepAccess::acquire_heads(arena, heads, &reads, &writes)?;
        let row_count = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        let mut step = Self {
            tokens: Vec::with_capacity(row_count),
            positions: Vec::with_capacity(row_count),
            row_blocks: Vec::with_capacity(row_count),
            sequences: Vec::with_capacity(sequences.len()),
            tables: Vec::with_capacity(reads.len() + writes.len()),
            sampled: Vec::new(),
            adapters: Vec::with_capacity(row_count),
            access,
            rotation: None,
        };
        for (index, sequence) in sequences.iter().enumerate() {
            step.append(sequence, checked_table(index, sequence)?);
        }
        Ok(step)
    }

    fn append(&mut self, sequence: &StepSequence<'_>, blocks: &[BlockId]) {
        let rows = self.tokens.len()..self.tokens.len() + sequence.tokens.len();
        let table = self.tables.len()..self.tables.len() + blocks.len();
        self.tokens.extend_from_slice(sequence.tokens);
        self.adapters.extend(sequence.tokens.iter().map(|_| sequence.adapter));
        self.tables.extend(blocks.iter().map(|&block| {
            self.access.find(block).expect("every block of every table was acquired")
        }));
        self.sampled.extend(rows.end - sequence.sampled_rows as usize..rows.end);
        let first_position = sequence.first_position as usize;
        for position in (first_position..).take(rows.len()) {
            self.positions.push(position as u32);
            self.row_blocks.push(self.tables[table.start + position / BLOCK_TOKENS]);
        }
        self.sequences.push(SequenceRows { rows, first_position, table });
    }

    /// Returns the number of token rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the rows that yield logits, ascending.
    pub fn sampled(&self) -> &[usize] {
        &self.sampled
    }

    pub fn layout(&self) -> KvLayout {
        self.access.layout()
    }
}

/// Returns the blocks up to the sequence's last token.
fn checked_table<'a>(
    index: usize,
    sequence: &StepSequence<'a>,
) -> Result<&'a [BlockId], StepError> {
    let rows = sequence.tokens.len();
    if rows == 0 {
        return Err(StepError::NoToken { sequence: index });
    }
    if sequence.sampled_rows as usize > rows {
        let sampled_rows = sequence.sampled_rows;
        return Err(StepError::TooManySampled { sequence: index, sampled_rows, rows });
    }
    let last_position = u64::from(sequence.first_position) + rows as u64 - 1;
    let needed = last_position / BLOCK_TOKENS as u64 + 1;
    usize::try_from(needed).ok().and_then(|needed| sequence.blocks.get(..needed)).ok_or(
        StepError::TableTooShort { sequence: index, last_position, blocks: sequence.blocks.len() },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Dtype;

    fn arena() -> Arc<KvArena> {
        let layout = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 4, dtype: Dtype::F32 };
        KvArena::host(layout, 8).unwrap()
    }

    fn ids(ids: &[u32]) -> Vec<BlockId> {
        ids.iter().copied().map(BlockId).collect()
    }

    #[test]
    fn rows_follow_the_sequences_in_order() {
        let arena = arena();
        let (a, b) = (ids(&[2, 0, 5]), ids(&[2, 1]));
        let step = CpuStep::new(
            &arena,
            &[
                StepSequence {
                    first_position: 30,
                    tokens: &[7, 8, 9],
                    blocks: &a,
                    sampled_rows: 2,
                    adapter: None,
                },
                StepSequence {
                    first_position: 16,
                    tokens: &[1],
                    blocks: &b,
                    sampled_rows: 1,
                    adapter: None,
                },
            ],
        )
        .unwrap();
        assert_eq!(step.tokens, [7, 8, 9, 1]);
        assert_eq!(step.positions, [30, 31, 32, 16]);
        assert_eq!(step.sampled(), [1, 2, 3]);
        assert_eq!(step.sequences[1].table, 3..5);
        // Block 2 is the shared prefix: it is read once, although two sequences use it.
        assert_eq!(arena.pins(BlockId(2)).unwrap(), 1);
        for written in [0, 5, 1] {
            let held = step.access.find(BlockId(written)).unwrap();
            assert!(step.access.is_written(held));
        }
        drop(step);
        assert!((0..8).all(|id| arena.pins(BlockId(id)).unwrap() == 0));
    }

    #[test]
    fn an_invalid_step_is_rejected_with_the_sequence() {
        let arena = arena();
        let blocks = ids(&[0]);
        let good = StepSequence {
            first_position: 0,
            tokens: &[1],
            blocks: &blocks,
            sampled_rows: 1,
            adapter: None,
        };
        let second = ids(&[1]);
        let make = |bad| CpuStep::new(&arena, &[good, bad]).unwrap_err().to_string();
        let good_too = StepSequence { blocks: &second, ..good };
        assert_eq!(
            make(StepSequence { tokens: &[], sampled_rows: 0, ..good_too }),
            "sequence 1 of the step has no token"
        );
        assert_eq!(
            make(StepSequence { sampled_rows: 2, ..good_too }),
            "sequence 1 samples 2 rows of 1"
        );
        assert_eq!(
            make(StepSequence { first_position: 16, ..good_too }),
            "sequence 1 reaches position 16 with 1 blocks of 16"
        );
        assert_eq!(
            make(StepSequence { first_position: u32::MAX, tokens: &[1, 2], ..good_too }),
            "sequence 1 reaches position 4294967296 with 1 blocks of 16"
        );
        assert!(make(good).contains("cannot borrow block 0 for writing"));
        assert_eq!(arena.pins(BlockId(0)).unwrap(), 0);
    }

    #[test]
    fn a_step_without_sequences_has_no_rows() {
        let step = CpuStep::new(&arena(), &[]).unwrap();
        assert_eq!((step.rows(), step.sampled().len()), (0, 0));
    }
}
