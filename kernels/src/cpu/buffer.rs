//! Activations and small vectors.

use std::fmt;

use super::aligned::Aligned;

/// Activations `[rows][width]` in f32, row-major and contiguous. Rows beyond those that an
/// operation wrote keep data of earlier steps.
pub struct CpuBuffer {
    data: Aligned<f32>,
    rows_max: usize,
    width: usize,
}

impl CpuBuffer {
    pub(crate) fn zeroed(rows_max: usize, width: usize) -> Self {
        let elements = rows_max.checked_mul(width).expect("a buffer fits the address space");
        Self { data: Aligned::zeroed(elements), rows_max, width }
    }

    /// Returns the capacity in rows.
    pub fn rows_max(&self) -> usize {
        self.rows_max
    }

    /// Returns the elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns one row. Panics beyond [`Self::rows_max`].
    pub fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.width..][..self.width]
    }

    /// Returns the first `rows` rows, contiguous. Panics beyond [`Self::rows_max`].
    pub fn rows(&self, rows: usize) -> &[f32] {
        &self.data[..rows * self.width]
    }

    /// Returns the first `rows` rows for writing. Panics beyond [`Self::rows_max`].
    pub fn rows_mut(&mut self, rows: usize) -> &mut [f32] {
        &mut self.data[..rows * self.width]
    }
}

impl fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuBuffer[{}][{}]", self.rows_max, self.width)
    }
}

/// Small f32 vector: a norm's weight, a bias, rope frequencies.
#[derive(Clone, Debug, PartialEq)]
pub struct CpuVector(Box<[f32]>);

impl CpuVector {
    pub(crate) fn new(values: &[f32]) -> Self {
        Self(values.into())
    }

    pub fn values(&self) -> &[f32] {
        &self.0
    }
}
