//! Weight matrices as the kernels read them.

use std::fmt;

use super::super::{
    aligned::{Aligned, Slab},
    arithmetic::to_bf16_bits,
    parts::Parts,
    threads::ThreadPool,
};
use crate::{backend::RowSource, layout::Dtype};

/// Output features side by side in one panel: two vectors of 16.
pub(crate) const PANEL: usize = 32;
/// bf16 panels have a multiple of this many inputs: a row of a tile.
pub(super) const INPUTS_STEP: usize = 32;

/// A weight matrix `[out][in]`, packed in panels of 32 output features so that a kernel reads it
/// front to back: f32 as `[panel][in][32]`, bf16 as `[panel][in / 2][32][2]` (a pair of inputs
/// is one 32-bit lane). The last panel, and bf16's inputs to a multiple of 32, are filled up
/// with zeros.
pub struct CpuMatrix {
    rows: usize,
    cols: usize,
    panels: Panels,
}

enum Panels {
    F32(Aligned<f32>),
    /// Two bf16 in one word, the even input in the lower half.
    Bf16(Aligned<u32>),
}

/// Consecutive panels.
#[derive(Clone, Copy)]
pub(super) enum PanelRange<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u32]),
}

impl CpuMatrix {
    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn dtype(&self) -> Dtype {
        match self.panels {
            Panels::F32(_) => Dtype::F32,
            Panels::Bf16(_) => Dtype::Bf16,
        }
    }

    /// Bytes that a product with this matrix reads.
    pub fn byte_count(&self) -> usize {
        match &self.panels {
            Panels::F32(words) => words.len() * 4,
            Panels::Bf16(words) => words.len() * 4,
        }
    }

    /// `count` panels from `first` on.
    pub(super) fn panel_range(&self, first: usize, count: usize) -> PanelRange<'_> {
        match &self.panels {
            Panels::F32(words) => {
                let panel = self.cols * PANEL;
                PanelRange::F32(&words[first * panel..][..count * panel])
            }
            Panels::Bf16(words) => {
                let panel = groups(Dtype::Bf16, self.cols) * PANEL;
                PanelRange::Bf16(&words[first * panel..][..count * panel])
            }
        }
    }

    pub(crate) fn panel_count(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    /// Row `row` as f32.
    pub(crate) fn copy_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "a row of the matrix");
        let (panel, lane) = (row / PANEL, row % PANEL);
        match &self.panels {
            Panels::F32(words) => {
                let panel = &words[panel * self.cols * PANEL..][..self.cols * PANEL];
                for (out, group) in out.iter_mut().zip(panel.chunks_exact(PANEL)) {
                    *out = group[lane];
                }
            }
            Panels::Bf16(words) => {
                let pairs = groups(Dtype::Bf16, self.cols);
                let panel = &words[panel * pairs * PANEL..][..pairs * PANEL];
                for (out, group) in out.chunks_mut(2).zip(panel.chunks_exact(PANEL)) {
                    let word = group[lane];
                    out[0] = f32::from_bits(word << 16);
                    if let Some(odd) = out.get_mut(1) {
                        *odd = f32::from_bits(word & 0xffff_0000);
                    }
                }
            }
        }
    }
}

impl fmt::Debug for CpuMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuMatrix[{}][{}] {}", self.rows, self.cols, self.dtype())
    }
}

/// Words of one output feature: one per input in f32, one per pair of inputs in bf16.
fn groups(dtype: Dtype, cols: usize) -> usize {
    match dtype {
        Dtype::F32 => cols,
        Dtype::Bf16 => cols.next_multiple_of(INPUTS_STEP) / 2,
    }
}

/// Reads `source` once, row by row, panels in parallel. The matrix lies in `slab`'s memory.
pub(crate) fn pack(
    pool: &mut ThreadPool,
    slab: &mut Slab,
    dtype: Dtype,
    source: &dyn RowSource,
) -> CpuMatrix {
    let (rows, cols) = (source.rows(), source.cols());
    let groups = groups(dtype, cols);
    let elements = rows
        .checked_next_multiple_of(PANEL)
        .and_then(|rows| rows.checked_mul(groups))
        .expect("a matrix fits the address space");
    let mut words = slab.zeroed::<u32>(elements);
    let parts = Parts::new(&mut words);
    pool.run(rows.div_ceil(PANEL), &|_, panel| {
        let first = panel * PANEL;
        let lanes = PANEL.min(rows - first);
        // One row more than needed, of zeros: the partner of an odd last input.
        let mut plain = vec![0.0_f32; (cols + 1) * lanes];
        for (lane, row) in plain.chunks_exact_mut(cols + 1).enumerate() {
            source.read_row(first + lane, &mut row[..cols]);
        }
        // SAFETY: every panel is packed by one task and panels do not overlap.
        let panel = unsafe { parts.slice(panel * groups * PANEL, groups * PANEL) };
        // What is beyond the last input stays zero.
        let used = match dtype {
            Dtype::F32 => cols,
            Dtype::Bf16 => cols.div_ceil(2),
        };
        for (group, out) in panel.chunks_exact_mut(PANEL).take(used).enumerate() {
            for (lane, out) in out.iter_mut().take(lanes).enumerate() {
                let row = &plain[lane * (cols + 1)..][..cols + 1];
                *out = match dtype {
                    Dtype::F32 => row[group].to_bits(),
                    Dtype::Bf16 => {
                        let even = to_bf16_bits(row[group * 2]);
                        let odd = to_bf16_bits(row[group * 2 + 1]);
                        u32::from(even) | u32::from(odd) << 16
                    }
                };
            }
        }
    });
    let panels = match dtype {
        Dtype::F32 => Panels::F32(words.into_f32()),
        Dtype::Bf16 => Panels::Bf16(words),
    };
    CpuMatrix { rows, cols, panels }
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
            for dtype in [Dtype::F32, Dtype::Bf16] {
                let matrix = pack(&mut pool, &mut Slab::default(), dtype, &source);
                prop_assert_eq!((matrix.rows(), matrix.cols(), matrix.dtype()), (rows, cols, dtype));
                let mut row = vec![0.0; cols];
                for index in 0..rows {
                    matrix.copy_row(index, &mut row);
                    let want = source.values[index * cols..][..cols].iter().map(|&value| match dtype {
                        Dtype::F32 => value,
                        Dtype::Bf16 => half::bf16::from_f32(value).to_f32(),
                    });
                    prop_assert!(row.iter().copied().eq(want));
                }
            }
        }
    }
}
