//! Random weights from a seed: equal on every machine, and each row is computed independently.

use std::collections::HashMap;

use half::bf16;
use kernels::int4::ColumnGroups;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::{
    config::{ModelConfig, quantization::Int4Format},
    weight::{DeltaWeight, ExpertWeight, LayerWeight, Weight, WeightShape},
};

/// Generated weights without a file.
#[derive(Clone, Debug)]
pub(crate) struct DummyWeights {
    pub seed: u64,
    fingerprint: u64,
    /// Groups of the columns of the matrices in INT4.
    pub column_groups: HashMap<Weight, ColumnGroups>,
}

/// Rows of one random weight: `mean ± amplitude`, uniform.
///
/// Element c of row r depends on (seed, weight, r, c) only. The code uses integer arithmetic, one
/// exact conversion and two IEEE operations, so that all machines get equal bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RandomRows {
    key: u64,
    mean: f32,
    amplitude: f32,
}

impl DummyWeights {
    /// Returns weights that are in INT4 where such a checkpoint has INT4: the matrices of layers
    /// except routers.
    pub(crate) fn new(seed: u64, config: &ModelConfig, int4: Option<Int4Format>) -> Self {
        let (mut column_groups, mut of_width) = (HashMap::new(), HashMap::new());
        for weight in Weight::all(config).filter(Weight::may_be_quantized) {
            let (Some(int4), WeightShape::Matrix { cols, .. }) = (int4, weight.shape(config))
            else {
                continue;
            };
            let size = int4.group_size.unwrap_or(cols);
            // Most matrices share one list.
            let groups =
                of_width.entry(cols).or_insert_with(|| ColumnGroups::contiguous(cols, size));
            column_groups.insert(weight, groups.clone());
        }
        let fingerprint = match int4 {
            None => seed,
            Some(format) => {
                // 0: a group has all columns.
                let size = format.group_size.unwrap_or(0) as u64;
                xxh3_64_with_seed(&size.to_le_bytes(), seed)
            }
        };
        Self { seed, fingerprint, column_groups }
    }

    /// Returns a number that tells different weights of the same configuration apart.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    pub(crate) fn rows(&self, weight: Weight, config: &ModelConfig) -> RandomRows {
        let name = match weight {
            // These weights are parts of one tensor in files.
            Weight::Layer(layer, LayerWeight::QueryGate | LayerWeight::Delta(_)) => {
                format!("{layer}.{weight:?}")
            }
            _ => weight.hugging_face_name(config),
        };
        let key = xxh3_64_with_seed(name.as_bytes(), self.seed);
        let (mean, deviation) = match weight.shape(config) {
            WeightShape::Vector { .. } if is_bias(weight) => (0.0, 0.05),
            WeightShape::Vector { .. } if is_conv(weight) => (0.0, 0.5),
            // Norms near 1, so that activations keep their magnitude.
            WeightShape::Vector { .. } => (1.0, 0.05),
            WeightShape::Matrix { cols, .. } => {
                // Inputs of unit variance give outputs of unit variance. Outputs that are added to
                // the residual stream are scaled down by the number of additions, so that
                // activations do not grow with depth.
                let additions = match weight {
                    Weight::Layer(
                        _,
                        LayerWeight::AttentionOutput
                        | LayerWeight::Delta(DeltaWeight::Output)
                        | LayerWeight::Down
                        | LayerWeight::Shared(ExpertWeight::Down)
                        | LayerWeight::Expert(_, ExpertWeight::Down),
                    ) => 2 * config.layer_count,
                    _ => 1,
                };
                (0.0, 1.0 / ((cols * additions) as f32).sqrt())
            }
        };
        // A uniform distribution with this standard deviation.
        RandomRows { key, mean, amplitude: deviation * 3.0f32.sqrt() }
    }
}

fn is_bias(weight: Weight) -> bool {
    let Weight::Layer(_, weight) = weight else { return false };
    use DeltaWeight::{DecayLog, TimeBias};
    use LayerWeight::{
        Delta, ExpertBias, KeyBias, OutputBias, QueryBias, RouterBias, Sinks, ValueBias,
    };
    matches!(
        weight,
        QueryBias
            | KeyBias
            | ValueBias
            | OutputBias
            | RouterBias
            | Sinks
            | ExpertBias(..)
            | Delta(DecayLog | TimeBias)
    )
}

fn is_conv(weight: Weight) -> bool {
    use DeltaWeight::{KeyConv, QueryConv, ValueConv};
    matches!(weight, Weight::Layer(_, LayerWeight::Delta(QueryConv | KeyConv | ValueConv)))
}

impl RandomRows {
    /// Writes the elements of a row from column `first` on.
    pub(crate) fn read_part(&self, row: usize, first: usize, out: &mut [f32]) {
        // One 64-bit random number gives four 16-bit elements.
        const LANES: usize = 4;
        let row_key = mix(self.key ^ mix(row as u64));
        let fill = |counter: usize, first_lane: usize, lanes: &mut [f32]| {
            let draw = mix(row_key.wrapping_add(counter as u64)) >> (16 * first_lane);
            for (lane, value) in lanes.iter_mut().enumerate() {
                let uniform = (draw >> (16 * lane)) as i16;
                *value = self.mean + f32::from(uniform) * (self.amplitude / 32768.0);
            }
        };
        let (counter, lane) = (first / LANES, first % LANES);
        let begun = if lane == 0 { 0 } else { (LANES - lane).min(out.len()) };
        let (begun, whole) = out.split_at_mut(begun);
        fill(counter, lane, begun);
        for (counter, lanes) in (first.div_ceil(LANES)..).zip(whole.chunks_mut(LANES)) {
            fill(counter, 0, lanes);
        }
    }

    /// Writes numbers of 4 bits of a row from column `first` on. All numbers are equally likely.
    pub(crate) fn read_numbers(&self, row: usize, first: usize, out: &mut [u8]) {
        let mut values = vec![0.0; out.len()];
        self.read_part(row, first, &mut values);
        for (out, value) in out.iter_mut().zip(values) {
            *out = (((value / self.amplitude + 1.0) * 8.0) as u8).min(15);
        }
    }
}

/// Rows of a random matrix in MXFP4: all numbers are equally likely, and all groups have the same
/// scale.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RandomMxfp4 {
    pub rows: RandomRows,
    pub scale: u8,
}

/// Rows of a random matrix in INT4: all numbers are equally likely, and all groups have the same
/// scale. Zero points are 7 or 8, so that elements have a mean of about 0.
#[derive(Clone, Debug)]
pub(crate) struct RandomInt4 {
    pub rows: RandomRows,
    pub groups: ColumnGroups,
    pub scale: f32,
}

impl RandomInt4 {
    /// Returns rows of about the same magnitude as `rows`.
    pub(crate) fn new(rows: RandomRows, groups: ColumnGroups) -> Self {
        let scale = bf16::from_f32(rows.amplitude / 8.0).to_f32();
        Self { rows, groups, scale }
    }

    /// Returns the zero point of a group of a row.
    pub(crate) fn zero(row: usize, group: usize) -> u8 {
        7 + ((row + group) % 2) as u8
    }
}

impl RandomMxfp4 {
    /// Returns rows of about the same magnitude as `rows`.
    pub(crate) fn new(rows: RandomRows) -> Self {
        /// Root mean square of the 16 numbers, divided by that of uniform numbers from -1 to 1.
        const SIZE: f32 = 2.925 * 1.732;
        let scale = 127.0 + (rows.amplitude / SIZE).log2().round();
        Self { rows, scale: scale as u8 }
    }
}

/// Computes SplitMix64's step: a bijection that spreads every input bit over all output bits.
fn mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values, computed independently from the definition of SplitMix64.
    const PINNED: [f32; 6] = [12020.0, 24779.0, -29022.0, -14466.0, 10479.0, -26948.0];

    #[test]
    fn dummy_rows_are_the_same_on_every_machine() {
        let rows = RandomRows { key: 42, mean: 0.0, amplitude: 32768.0 };
        let mut out = [0.0; 6];
        rows.read_part(3, 0, &mut out);
        assert_eq!(out, PINNED);
        // A shorter row has equal first elements.
        let mut short = [0.0; 3];
        rows.read_part(3, 0, &mut short);
        assert_eq!(short, PINNED[..3]);
        // A part of a row equals the same part of the whole row.
        for first in 0..6 {
            for end in first..=6 {
                let mut part = vec![0.0; end - first];
                rows.read_part(3, first, &mut part);
                assert_eq!(part, PINNED[first..end]);
            }
        }
    }

    #[test]
    fn dummy_values_have_the_requested_standard_deviation() {
        let rows = RandomRows { key: 7, mean: 0.0, amplitude: 3.0f32.sqrt() };
        let mut out = vec![0.0; 1 << 16];
        rows.read_part(0, 0, &mut out);
        let mean = out.iter().map(|&v| f64::from(v)).sum::<f64>() / out.len() as f64;
        let square = out.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / out.len() as f64;
        assert!(mean.abs() < 0.02, "mean {mean}");
        assert!((square - 1.0).abs() < 0.02, "mean square {square}");
        let mut next = vec![0.0; 1 << 16];
        rows.read_part(1, 0, &mut next);
        let product: f64 =
            out.iter().zip(&next).map(|(&a, &b)| f64::from(a * b)).sum::<f64>() / out.len() as f64;
        assert!(product.abs() < 0.02, "rows correlate by {product}");
    }
}
