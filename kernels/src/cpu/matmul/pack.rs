//! Weight matrices packed for the kernels.

use std::fmt;

use super::{
    super::{
        aligned::{Aligned, Slab},
        arithmetic::round_to_bf16,
        disjoint_slice::DisjointSlice,
        isa::Level,
        threads::ThreadPool,
    },
    int4, q8,
};
use crate::{
    backend::RowSource,
    int4::ColumnGroups,
    layout::{WeightFormat, to_bf16_bits},
};

/// Output features of one panel: two vectors of 16.
pub(crate) const PANEL: usize = 32;
/// Inputs per step: bf16 panels are padded to a multiple of this number, one row of an AMX tile.
pub(super) const INPUTS_STEP: usize = 32;

/// Weight matrix `[out][in]`, packed in panels of 32 output features that a kernel reads front to
/// back: f32 as `[panel][in][32]`, bf16 as `[panel][in / 2][32][2]` (a pair of inputs is one 32-bit
/// lane), q8 as `[panel][in / 32]` of `[8][32][4]` bytes and 32 scales. The last panel, and the
/// inputs of bf16 and q8 to a multiple of 32, are padded with zeros. Matrices in INT4 stay in the
/// panels of [`int4`], and are unpacked to these formats tile by tile.
pub struct CpuMatrix {
    /// Format of the panels that a kernel reads: for INT4 f32 or bf16.
    format: WeightFormat,
    rows: usize,
    cols: usize,
    /// Groups of the inputs of a matrix in INT4.
    groups: Option<ColumnGroups>,
    /// Bits of an f32; two bf16 with the even input in the lower half; or words in the layout of
    /// [`q8`] or [`int4`].
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

    pub(super) fn is_int4(&self) -> bool {
        self.groups.is_some()
    }

    /// Returns the bytes that a GEMM reads of this matrix.
    pub fn byte_count(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// Returns the words of a panel that a kernel reads.
    pub(super) fn panel_words(&self) -> usize {
        panel_words(self.format, self.cols)
    }

    /// Calls `with` with `count` panels from `first` on, in the format of the matrix.
    pub(super) fn with_panels<R>(
        &self,
        level: Level,
        first: usize,
        count: usize,
        with: impl FnOnce(&[u32]) -> R,
    ) -> R {
        let stored = self.stored_panels(first, count);
        match &self.groups {
            None => with(stored),
            Some(groups) => {
                let words = self.panel_words();
                int4::with_unpacked(level, self.format, (stored, groups), words, with)
            }
        }
    }

    /// Returns `count` panels from `first` on, as they are in memory.
    fn stored_panels(&self, first: usize, count: usize) -> &[u32] {
        let panel = stored_words(self.format, self.cols, self.groups.as_ref());
        &self.words[first * panel..(first + count) * panel]
    }

    pub(crate) fn panel_count(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    /// Copies row `row` as f32.
    pub(crate) fn copy_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "a row of the matrix");
        let (lane, panel) = (row % PANEL, self.stored_panels(row / PANEL, 1));
        if let Some(groups) = &self.groups {
            int4::copy_lane(panel, groups, lane, out);
            if self.format == WeightFormat::Bf16 {
                out.iter_mut().for_each(|value| *value = round_to_bf16(*value));
            }
            return;
        }
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
        q8::weights_of(&self.stored_panels(row / PANEL, 1).as_chunks().0[block], row % PANEL)
    }
}

impl fmt::Debug for CpuMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stored = if self.is_int4() { " in INT4" } else { "" };
        write!(f, "CpuMatrix[{}][{}] {}{stored}", self.rows, self.cols, self.format())
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

/// Returns the words of one panel in memory.
fn stored_words(format: WeightFormat, cols: usize, groups: Option<&ColumnGroups>) -> usize {
    match groups {
        None => panel_words(format, cols),
        Some(groups) => int4::panel_words(cols, groups.count()),
    }
}

/// Packs `source`, reading each row once, panels in parallel. `slab` provides the memory. A matrix
/// in INT4 keeps its form, and with [`WeightFormat::Q8`] is computed in bf16.
pub(crate) fn pack(
    pool: &mut ThreadPool,
    slab: &mut Slab,
    format: WeightFormat,
    source: &dyn RowSource,
) -> CpuMatrix {
    let (rows, cols, groups) = (source.rows(), source.cols(), source.int4_groups());
    let format = match format {
        WeightFormat::Q8 if groups.is_some() => WeightFormat::Bf16,
        format => format,
    };
    let panel_words = stored_words(format, cols, groups.as_ref());
    let elements =
        rows.div_ceil(PANEL).checked_mul(panel_words).expect("a matrix fits the address space");
    let mut words = slab.zeroed::<u32>(elements);
    let parts = DisjointSlice::new(&mut words);
    pool.run(rows.div_ceil(PANEL), &|_, panel| {
        let first = panel * PANEL;
        // SAFETY: every panel is packed by one task and panels do not overlap.
        let panel = unsafe { parts.slice(panel * panel_words, panel_words) };
        if let Some(groups) = &groups {
            return int4::pack_panel(source, groups, first, panel);
        }
        let lanes = PANEL.min(rows - first);
        let mut plain = vec![0.0_f32; cols * lanes];
        source.read_values(first, &mut plain);
        // Pads with zeros to whole blocks and pairs.
        let mut padded = vec![0.0; cols.next_multiple_of(INPUTS_STEP)];
        for (lane, row) in plain.chunks_exact(cols.max(1)).enumerate() {
            if padded.len() == cols {
                pack_row(format, lane, row, panel);
            } else {
                padded[..cols].copy_from_slice(row);
                pack_row(format, lane, &padded, panel);
            }
        }
    });
    CpuMatrix { format, rows, cols, groups, words }
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
