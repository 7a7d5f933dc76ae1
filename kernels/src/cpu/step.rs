//! Rows of one forward pass on the CPU, and the KV blocks that they may access.

use std::{ops::Range, sync::Arc};

use super::rope::Rotation;
use crate::{
    arena::{ArenaError, HeldBlock, KvArena, StepAccess},
    layout::{BLOCK_TOKENS, BlockId, KvGroups, KvLayout, StatePlaces},
};

/// Part of a step that belongs to one sequence: `tokens` at consecutive positions.
#[derive(Clone, Copy, Debug)]
pub struct StepSequence<'a> {
    /// Position of the first of `tokens`. `blocks` holds the KV of all earlier positions in the
    /// windows of the KV groups.
    pub first_position: u32,
    /// At least one token. Ids must be below the vocabulary's size, or the embedding panics; the
    /// code that admits a sequence checks them.
    pub tokens: &'a [u32],
    /// The sequence's block table from position 0 on. Entries after the last token's block, and
    /// entries behind the windows, are ignored. The blocks of a recurrent state hold the state after
    /// all earlier positions, and the step writes them. At position 0 a sequence starts from zeros,
    /// whatever they hold.
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
/// blocks from its first row's position on are borrowed for writing, earlier blocks in the windows
/// for reading.
#[derive(Debug)]
pub struct CpuStep {
    pub(crate) tokens: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    /// For each row: index, in each of `tables`, of the block with the row's position.
    row_blocks: Vec<usize>,
    pub(crate) sequences: Vec<SequenceRows>,
    /// For each KV group the block tables of all sequences, concatenated.
    tables: Vec<Vec<HeldBlock>>,
    /// KV group of each layer with attention, and index of the layer in the group's blocks.
    places: Vec<(usize, usize)>,
    /// The blocks of the recurrent states of all sequences, concatenated.
    states: Vec<HeldBlock>,
    /// Places of the rows of a recurrent state, if the model has one.
    state_places: Option<StatePlaces>,
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
    /// Range of the sequence in each of `CpuStep::tables`: every block up to the last row's.
    pub table: Range<usize>,
    /// Range of the sequence in `CpuStep::states`.
    pub state: Range<usize>,
}

impl CpuStep {
    /// Borrows all blocks of the sequences, or none. A step without sequences has no rows.
    pub fn new(arena: &Arc<KvArena>, sequences: &[StepSequence<'_>]) -> Result<Self, StepError> {
        let layout = arena.layout();
        let groups = KvGroups::whole(layout.layer_count);
        Self::of_heads(arena, 0..layout.kv_head_count, &groups, sequences)
    }

    /// Creates a step as [`Self::new`] does, but of a model with these KV groups, and with access
    /// to these heads of the arena only: a rank computes some of the heads. The groups' recurrent
    /// state has all heads of the arena.
    ///
    /// # Panics
    /// When the arena does not have these heads.
    pub fn of_heads(
        arena: &Arc<KvArena>,
        heads: Range<usize>,
        groups: &KvGroups,
        sequences: &[StepSequence<'_>],
    ) -> Result<Self, StepError> {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for (index, sequence) in sequences.iter().enumerate() {
            let (table, first) = (checked_table(index, groups, sequence)?, sequence.first_position);
            let written = first as usize / BLOCK_TOKENS..groups.blocks(table.len());
            let read = groups.needed(first as usize, 0..written.start);
            reads.extend(read.map(|entry| table[entry]));
            writes.extend_from_slice(&table[groups.entries_of(written)]);
            writes.extend_from_slice(groups.split(table).0);
        }
        let access = StepAccess::acquire_heads(arena, heads, &reads, &writes)?;
        let row_count = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        let mut step = Self {
            tokens: Vec::with_capacity(row_count),
            positions: Vec::with_capacity(row_count),
            row_blocks: Vec::with_capacity(row_count),
            sequences: Vec::with_capacity(sequences.len()),
            tables: vec![Vec::new(); groups.count()],
            places: groups.places(),
            states: Vec::new(),
            state_places: groups.state().map(|state| StatePlaces::new(state, arena.layout())),
            sampled: Vec::new(),
            adapters: Vec::with_capacity(row_count),
            access,
            rotation: None,
        };
        for (index, sequence) in sequences.iter().enumerate() {
            step.append(sequence, groups, checked_table(index, groups, sequence)?);
        }
        Ok(step)
    }

    fn append(&mut self, sequence: &StepSequence<'_>, groups: &KvGroups, table: &[BlockId]) {
        let (state, blocks) = groups.split(table);
        let rows = self.tokens.len()..self.tokens.len() + sequence.tokens.len();
        let (first_position, count) = (sequence.first_position as usize, groups.count());
        let begin = self.tables[0].len();
        let table = begin..begin + blocks.len() / count;
        self.tokens.extend_from_slice(sequence.tokens);
        self.adapters.extend(sequence.tokens.iter().map(|_| sequence.adapter));
        for (group, held) in self.tables.iter_mut().enumerate() {
            held.resize(table.end, HeldBlock::NONE);
            for index in groups.first_needed(group, first_position)..table.len() {
                let found = self.access.find(blocks[index * count + group]);
                held[begin + index] = found.expect("every needed block was acquired");
            }
        }
        self.sampled.extend(rows.end - sequence.sampled_rows as usize..rows.end);
        for position in (first_position..).take(rows.len()) {
            self.positions.push(position as u32);
            self.row_blocks.push(begin + position / BLOCK_TOKENS);
        }
        let find = |&block| self.access.find(block).expect("every state was acquired");
        let first_state = self.states.len();
        self.states.extend(state.iter().map(find));
        let state = first_state..self.states.len();
        self.sequences.push(SequenceRows { rows, first_position, table, state });
    }

    /// Returns the number of token rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the rows that yield logits, ascending.
    pub fn sampled(&self) -> &[usize] {
        &self.sampled
    }

    /// Returns the layout of the KV of all layers, with the step's heads only.
    pub fn layout(&self) -> KvLayout {
        KvLayout { layer_count: self.places.len(), ..self.access.layout() }
    }

    /// Returns the places of the rows of a recurrent state.
    ///
    /// # Panics
    /// When the model has no recurrent state.
    pub(crate) fn state_places(&self) -> StatePlaces {
        self.state_places.expect("a model with linear attention has a recurrent state")
    }

    /// Returns `len` elements of a row of a lane of a sequence's recurrent state.
    ///
    /// # Safety
    /// While the slice lives, no other slice of this row exists on any thread.
    #[allow(clippy::mut_from_ref)] // Exclusive by the caller's promise: threads share a step.
    pub(crate) unsafe fn state_row(
        &self,
        sequence: &SequenceRows,
        (lane, row): (usize, usize),
        len: usize,
    ) -> &mut [f32] {
        let (block, piece, first) = self.state_places().place(row);
        let held = self.states[sequence.state.clone()][block];
        // SAFETY: rows do not overlap, and the caller ensures exclusive access to this row.
        unsafe { self.access.state_mut(held, (piece, lane), first, len) }
    }

    /// Returns a sequence's block table in the layer's KV group, and the index of the layer in
    /// these blocks.
    pub(crate) fn table(&self, layer: usize, sequence: &SequenceRows) -> (&[HeldBlock], usize) {
        let (group, index) = self.places[layer];
        (&self.tables[group][sequence.table.clone()], index)
    }

    /// Returns the block of a row's position in the layer's KV group, and the index of the layer in
    /// this block.
    pub(crate) fn row_block(&self, layer: usize, row: usize) -> (HeldBlock, usize) {
        let (group, index) = self.places[layer];
        (self.tables[group][self.row_blocks[row]], index)
    }
}

/// Returns the block table up to the sequence's last token.
fn checked_table<'a>(
    index: usize,
    groups: &KvGroups,
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
    let needed = usize::try_from(last_position + 1).ok().map(|tokens| groups.entries(tokens));
    let blocks = groups.blocks(sequence.blocks.len());
    needed.and_then(|needed| sequence.blocks.get(..needed)).ok_or(StepError::TableTooShort {
        sequence: index,
        last_position,
        blocks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::KvFormat;

    fn arena() -> Arc<KvArena> {
        let layout =
            KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 4, format: KvFormat::F32 };
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
