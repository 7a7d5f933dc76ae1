//! Recurrent state of linear attention (Gated DeltaNet), stored in the blocks of the pool.
//!
//! A sequence's state takes [`StateShape::block_count`] blocks, at any ids. The state is divided
//! into *lanes*, one for each KV head of a block. The lane of a KV head holds the states of an
//! equal share of the linear heads of every layer, in order. So a rank has the lanes of its KV
//! heads, and blocks of states are moved, sharded and checked as blocks of KV are.
//!
//! A block has `layers · 2` *pieces* of a lane: the [`KvLayout::head_bytes`] of one KV head, layer,
//! and K or V. A piece holds whole *rows* of f32. A row is as wide as the larger head dimension.
//! Row `i` of a lane is in block `i / (pieces · rows of a piece)`. For every layer, a lane has
//!
//! 1. for each of its value heads `key_dim` rows, each with `value_dim` elements of the state,
//! 2. for each of its key heads `conv_taps` rows with past inputs of the convolution of queries,
//! 3. the same of keys, and
//! 4. for each of its value heads the same of values.

use std::{fmt, ops::Range};

use super::KvLayout;

/// Sizes of the recurrent state of a sequence, in all layers with linear attention. Heads are those
/// of the model, or those of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateShape {
    /// Number of layers with linear attention.
    pub layer_count: usize,
    /// Heads of queries and of keys.
    pub key_heads: usize,
    /// Heads of values; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements of a head of queries or keys.
    pub key_dim: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
    /// Past inputs that the convolution reads: the size of its kernel − 1.
    pub conv_taps: usize,
}

impl StateShape {
    /// Returns the number of blocks of one sequence's state. `block` is the layout of a block with
    /// the KV heads of the model, or of the rank if the shape is that of a rank.
    ///
    /// # Panics
    /// When the KV heads do not divide the numbers of heads, or a piece of a lane is smaller than a
    /// row.
    pub fn block_count(&self, block: KvLayout) -> usize {
        let places = StatePlaces::new(*self, block);
        let rows = places.layer_rows() * self.layer_count;
        rows.div_ceil(places.pieces * places.piece_rows)
    }

    /// Returns the shape with an equal share of the heads: those of one of `parts` ranks or lanes.
    pub fn part(self, parts: usize) -> Self {
        let (key_heads, value_heads) = (self.key_heads / parts, self.value_heads / parts);
        Self { key_heads, value_heads, ..self }
    }

    /// Returns the width of the queries of all heads, and of the keys.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Returns the width of the values of all heads.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the width of a row of projections: queries, keys, values, output gates.
    pub fn projected_width(&self) -> usize {
        2 * self.key_width() + 2 * self.value_width()
    }

    /// Returns the channels of the convolution: the width of queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Returns the width of the values between the operations of a layer: queries, keys and values,
    /// then decay and update rate of each value head.
    pub fn mixed_width(&self) -> usize {
        self.channels() + 2 * self.value_heads
    }

    /// Returns the elements of a row.
    fn row_elements(&self) -> usize {
        self.key_dim.max(self.value_dim)
    }
}

/// Formats the description that nodes compare during the handshake.
impl fmt::Display for StateShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layer_count, key_heads, value_heads, key_dim, value_dim, conv_taps } = self;
        write!(
            f,
            "state=layers:{layer_count},keys:{key_heads}x{key_dim},\
             values:{value_heads}x{value_dim},taps:{conv_taps}"
        )
    }
}

/// Places of the rows of a lane in the blocks of a sequence's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StatePlaces {
    /// Shape with the heads of one lane.
    pub lane: StateShape,
    /// Pieces of a lane in a block.
    pub pieces: usize,
    /// Rows of a piece.
    pub piece_rows: usize,
}

/// Heads of one lane whose past inputs have rows of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaneHead {
    Query(usize),
    Key(usize),
    Value(usize),
}

impl StatePlaces {
    /// Returns the places in blocks of this layout.
    ///
    /// # Panics
    /// As [`StateShape::block_count`].
    pub(crate) fn new(shape: StateShape, block: KvLayout) -> Self {
        let lanes = block.kv_head_count;
        assert!(
            shape.key_heads.is_multiple_of(lanes) && shape.value_heads.is_multiple_of(lanes),
            "{lanes} KV heads divide {} key heads and {} value heads",
            shape.key_heads,
            shape.value_heads
        );
        let lane = shape.part(lanes);
        let piece_rows = block.head_bytes() / (shape.row_elements() * size_of::<f32>());
        assert!(piece_rows > 0, "{} bytes hold a row of {shape}", block.head_bytes());
        Self { lane, pieces: 2 * block.layer_count, piece_rows }
    }

    /// Returns the rows of a lane that belong to one layer.
    fn layer_rows(&self) -> usize {
        let StateShape { key_heads, value_heads, key_dim, conv_taps, .. } = self.lane;
        value_heads * key_dim + (2 * key_heads + value_heads) * conv_taps
    }

    /// Returns the rows with the state of a value head of the lane: `[key_dim][value_dim]`.
    pub(crate) fn state_rows(&self, layer: usize, value_head: usize) -> Range<usize> {
        let first = layer * self.layer_rows() + value_head * self.lane.key_dim;
        first..first + self.lane.key_dim
    }

    /// Returns the rows with the past inputs of a head of the lane: `[conv_taps][dim]`, the oldest
    /// first.
    pub(crate) fn conv_rows(&self, layer: usize, head: LaneHead) -> Range<usize> {
        let StateShape { key_heads, value_heads, key_dim, conv_taps, .. } = self.lane;
        let index = match head {
            LaneHead::Query(head) => head,
            LaneHead::Key(head) => key_heads + head,
            LaneHead::Value(head) => 2 * key_heads + head,
        };
        let first = layer * self.layer_rows() + value_heads * key_dim + index * conv_taps;
        first..first + conv_taps
    }

    /// Returns the place of a row of a lane: the block among those of the state, the piece in this
    /// block, and the first element in this piece.
    pub(crate) fn place(&self, row: usize) -> (usize, usize, usize) {
        let (piece, row) = (row / self.piece_rows, row % self.piece_rows);
        (piece / self.pieces, piece % self.pieces, row * self.lane.row_elements())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::layout::KvFormat;

    const QWEN3_NEXT: StateShape = StateShape {
        layer_count: 36,
        key_heads: 16,
        value_heads: 32,
        key_dim: 128,
        value_dim: 128,
        conv_taps: 3,
    };

    #[test]
    fn blocks_of_a_state_are_counted() {
        let block =
            KvLayout { layer_count: 12, kv_head_count: 2, head_dim: 256, format: KvFormat::Bf16 };
        // 24 pieces of 16 rows for 36 layers with 16 · 128 + 32 · 3 rows.
        assert_eq!(QWEN3_NEXT.block_count(block), (36_usize * 2144).div_ceil(24 * 16));
        // 4112 bytes hold 8 rows of 512 bytes.
        let fp8 = KvLayout { format: KvFormat::Fp8, ..block };
        assert_eq!(QWEN3_NEXT.block_count(fp8), (36_usize * 2144).div_ceil(24 * 8));
        let rank = StateShape { key_heads: 8, value_heads: 16, ..QWEN3_NEXT };
        assert_eq!(rank.block_count(block.with_heads(1)), QWEN3_NEXT.block_count(block));
    }

    /// The rows of all heads are distinct, fill the lane without a gap, and stay inside the pieces.
    #[test]
    fn every_row_of_a_lane_has_a_place_of_its_own() {
        let shape = StateShape {
            layer_count: 3,
            key_heads: 4,
            value_heads: 12,
            key_dim: 6,
            value_dim: 5,
            conv_taps: 3,
        };
        for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Fp8] {
            let block = KvLayout { layer_count: 2, kv_head_count: 2, head_dim: 10, format };
            let places = StatePlaces::new(shape, block);
            let mut rows = Vec::new();
            for layer in 0..3 {
                rows.extend((0..6).flat_map(|head| places.state_rows(layer, head)));
                let keys = (0..2).map(LaneHead::Query).chain((0..2).map(LaneHead::Key));
                let heads = keys.chain((0..6).map(LaneHead::Value));
                rows.extend(heads.flat_map(|head| places.conv_rows(layer, head)));
            }
            assert_eq!(rows, (0..rows.len()).collect::<Vec<_>>());
            let found: BTreeSet<_> = rows.iter().map(|&row| places.place(row)).collect();
            assert_eq!(found.len(), rows.len());
            for (block_index, piece, element) in found {
                assert!(block_index < shape.block_count(block) && piece < 4);
                assert!(4 * (element + 6) <= block.head_bytes() && element % 6 == 0);
            }
        }
    }

    #[test]
    #[should_panic(expected = "2 KV heads divide 3 key heads and 6 value heads")]
    fn kv_heads_that_do_not_divide_the_heads_are_rejected() {
        let block =
            KvLayout { layer_count: 1, kv_head_count: 2, head_dim: 64, format: KvFormat::F32 };
        StateShape { key_heads: 3, value_heads: 6, ..QWEN3_NEXT }.block_count(block);
    }
}
