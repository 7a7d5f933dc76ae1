//! The order in which packed weights lie in memory, without their values.

use std::{convert::Infallible, ops::Range};

use kernels::Shard;

use crate::{
    config::ModelConfig,
    transformer::{PackedSource, TransformerWeights},
    weight::{Weight, WeightPart, WeightShape},
};

/// A packed matrix or vector: parts of weights, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedWeight {
    /// Vectors are packed in f32.
    pub is_vector: bool,
    pub parts: Vec<PackedPart>,
}

/// A part of a weight; a vector counts as one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedPart {
    pub weight: Weight,
    pub rows: Range<usize>,
    pub cols: Range<usize>,
    /// Columns of the whole weight.
    pub stored_cols: usize,
}

impl PackedPart {
    pub fn elements(&self) -> usize {
        self.rows.len() * self.cols.len()
    }
}

impl PackedWeight {
    pub fn elements(&self) -> usize {
        self.parts.iter().map(PackedPart::elements).sum()
    }
}

/// Returns what [`TransformerWeights::pack`] packs for a rank, in the same order.
///
/// # Panics
/// When the model cannot be sharded over these ranks; see [`Weight::part`].
pub fn packing_order(config: &ModelConfig, shard: Shard) -> Vec<PackedWeight> {
    let mut order = Order { config, shard, packed: Vec::new() };
    let Ok(TransformerWeights::<(), ()> { .. }) =
        TransformerWeights::in_order(config, shard, &mut order);
    order.packed
}

struct Order<'a> {
    config: &'a ModelConfig,
    shard: Shard,
    packed: Vec<PackedWeight>,
}

impl Order<'_> {
    /// Returns the rank's part of `weight`.
    fn part(&self, weight: Weight) -> PackedPart {
        let WeightPart { rows, cols } = weight.part(self.config, self.shard);
        let stored_cols = match weight.shape(self.config) {
            WeightShape::Vector { len } => len,
            WeightShape::Matrix { cols, .. } => cols,
        };
        PackedPart { weight, rows, cols, stored_cols }
    }

    fn push(&mut self, is_vector: bool, weights: &[Weight]) {
        let parts = weights.iter().map(|&weight| self.part(weight)).collect();
        self.packed.push(PackedWeight { is_vector, parts });
    }
}

impl PackedSource for Order<'_> {
    type Matrix = ();
    type Vector = ();
    type Error = Infallible;

    fn matrix(&mut self, weights: &[Weight]) -> Result<(), Infallible> {
        self.push(false, weights);
        Ok(())
    }

    fn router(&mut self, weight: Weight) -> Result<(), Infallible> {
        self.matrix(&[weight])
    }

    fn vector(&mut self, weights: &[Weight]) -> Result<(), Infallible> {
        self.push(true, weights);
        Ok(())
    }
}
