//! Weight matrices packed for the kernels.

use std::fmt;

use super::{
    super::{
        aligned::{Aligned, Slab},
        disjoint_slice::DisjointSlice,
        threads::ThreadPool,
    },
    q8,
};
use crate::{
    backend::RowSource,
    layout::{WeightFormat, to_bf16_bits},
};

/// Output features of one panel: two vectors of 16.
pub(crate) const PANEL: usize = 32;
/// Inputs per step: bf16 panels are padded to a multiple of this number, one row of an AMX tile.
pub(super) const INPUTS_STEP: usize = 32;

/// Weight matrix `[out][in]`, packed in panels of 32 output features that a kernel reads front to
/// back: f32 as `[panel][in][32]`, bf16 as `[panel][in / 2][32][2]` (a pair of inputs is one 32-bit
/// lane), q8 as `[panel][in / 32]` of `[8][32][4]` bytes and 32 scales. The last panel, and the
/// inputs of bf16 and q8 to a multiple of 32, are padded with zeros.
pub struct CpuMatrix {
    format: WeightFormat,
    rows: usize,
    cols: usize,
    /// Bits of an f32; two bf16 with the even input in the lower half; or words in the layout of
    /// [`q8`].
    words: Aligned<u32>,
}

impl CpuMatrix {
    /// Returns the number of output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Returns the bytes that a GEMM reads of this matrix.
    pub fn byte_count(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// Returns `count` panels from `first` on.
    pub(super) fn panels(&self, first: usize, count: usize) -> &[u32] {
        let panel = panel_words(self.format, self.cols);
        &self.words[first * panel..(first + count) * panel]
    }

    pub(crate) fn panel_count(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    /// Copies row `row` as f32.
    pub(crate) fn copy_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "a row of the matrix");
        let (lane, panel) = (row % PANEL, self.panels(row / PANEL, 1));
        match self.format {
            WeightFormat::F32 => {
                for (out, group) in out.iter_mut().zip(panel.chunks_exact(PANEL)) {
                    *out = f32::from_bits(group[lane]);
                }
            }
            WeightFormat::Bf16 | WeightFormat::Fp8 => {
                for (out, group) in out.chunks_mut(2).zip(panel.chunks_exact(PANEL)) {
                    let word = group[lane];
                    out[0] = f32::from_bits(word << 16);
                    if let Some(odd) = out.get_mut(1) {
                        *odd = f32::from_bits(word & 0xffff_0000);
                    }
                }
            }
            WeightFormat::Q8 => {
                let blocks = panel.as_chunks::<{ q8::PANEL_BLOCK_WORDS }>().0;
                for (out, block) in out.chunks_mut(q8::BLOCK).zip(blocks) {
                    let (numbers, scale) = q8::weights_of(block, lane);
                    for (out, number) in out.iter_mut().zip(numbers) {
                        *out = f32::from(number) * scale;
                    }
                }
            }
        }
    }

    /// Returns block `block` of row `row`: integers and scale.
    ///
    /// # Panics
    /// When the matrix is not 8-bit.
    pub(super) fn q8_block(&self, row: usize, block: usize) -> ([i8; q8::BLOCK], f32) {
        assert_eq!(self.format, WeightFormat::Q8, "the matrix is 8-bit");
        q8::weights_of(&self.panels(row / PANEL, 1).as_chunks().0[block], row % PANEL)
    }
}

impl fmt::Debug for CpuMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuMatrix[{}][{}] {}", self.rows, self.cols, self.format())
    }
}

/// Returns the words of one panel.
fn panel_words(format: WeightFormat, cols: usize) -> usize {
    match format {
        WeightFormat::F32 => cols * PANEL,
        WeightFormat::Bf16 | WeightFormat::Fp8 => cols.next_multiple_of(INPUTS_STEP) / 2 * PANEL,
        WeightFormat::Q8 => cols.div_ceil(q8::BLOCK) * q8::PANEL_BLOCK_WORDS,
    }
}

/// Packs `source`, reading each row once, panels in parallel. `slab` provides the memory.
pub(crate) fn pack(
    pool: &mut ThreadPool,
    slab: &mut Slab,
    format: WeightFormat,
    source: &dyn RowSource,
) -> CpuMatrix {
    let (rows, cols) = (source.rows(), source.cols());
    let panel_words = panel_words(format, cols);
    let elements =
        rows.div_ceil(PANEL).checked_mul(panel_words).expect("a matrix fits the address space");
    let mut words = slab.zeroed::<u32>(elements);
    let parts = DisjointSlice::new(&mut words);
    pool.run(rows.div_ceil(PANEL), &|_, panel| {
        let first = panel * PANEL;
        let lanes = PANEL.min(rows - first);
        let mut plain = vec![0.0_f32; cols * lanes];
        source.read_values(first, &mut plain);
        // Pads with zeros to whole blocks and pairs.
        let mut padded = vec![0.0; cols.next_multiple_of(INPUTS_STEP)];
        // SAFETY: every panel is packed by one task and panels do not overlap.
        let panel = unsafe { parts.slice(panel * panel_words, panel_words) };
        for (lane, row) in plain.chunks_exact(cols.max(1)).enumerate() {
            if padded.len() == cols {
                pack_row(format, lane, row, panel);
            } else {
                padded[..cols].copy_from_slice(row);
                pack_row(format, lane, &padded, panel);
            }
        }
    });
    CpuMatrix { format, rows, cols, words }
}

/// Writes a row, padded with zeros to a multiple of 32 inputs, to its lane of a panel.
fn pack_row(format: WeightFormat, lane: usize, row: &[f32], panel: &mut [u32]) {
    let words = panel.iter_mut().skip(lane).step_by(PANEL);
    match format {
        WeightFormat::F32 => {
            for (word, value) in words.zip(row) {
                *word = value.to_bits();
            }
        }
        WeightFormat::Bf16 | WeightFormat::Fp8 => {
            for (word, pair) in words.zip(row.as_chunks::<2>().0) {
                let [even, odd] = pair.map(|value| u32::from(to_bf16_bits(value)));
                *word = even | odd << 16;
            }
        }
        WeightFormat::Q8 => {
            let blocks = panel.as_chunks_mut::<{ q8::PANEL_BLOCK_WORDS }>().0;
            for (block, values) in blocks.iter_mut().zip(row.as_chunks::<{ q8::BLOCK }>().0) {
                q8::set_weights(block, lane, values);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::matmul::testing::Plain;

    proptest! {
        #[test]
        fn packing_keeps_every_row(rows in 0_usize..70, cols in 1_usize..70, threads in 1_usize..3) {
            let values: Vec<f32> = (0..rows * cols).map(|i| i as f32 * 0.25 - 100.0).collect();
            let source = Plain { rows, cols, values };
            let mut pool = ThreadPool::new(threads, "test").unwrap();
            for format in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q8] {
                let matrix = pack(&mut pool, &mut Slab::default(), format, &source);
                prop_assert_eq!((matrix.rows(), matrix.cols(), matrix.format()), (rows, cols, format));
                let mut row = vec![0.0; cols];
                for index in 0..rows {
                    matrix.copy_row(index, &mut row);
                    let values = &source.values[index * cols..][..cols];
                    let greatest = values.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
                    for (found, &value) in row.iter().zip(values) {
                        match format {
                            WeightFormat::F32 => prop_assert_eq!(*found, value),
                            WeightFormat::Bf16 | WeightFormat::Fp8 => {
                                prop_assert_eq!(*found, half::bf16::from_f32(value).to_f32());
                            }
                            WeightFormat::Q8 => {
                                prop_assert!((found - value).abs() <= greatest / 250.0);
                            }
                        }
                    }
                }
            }
        }
    }
}
