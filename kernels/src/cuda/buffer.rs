//! What a forward names on the GPU: matrices, vectors, activations.

use std::{cell::Cell, fmt};

use super::{memory::Range, skinny::Pending};
use crate::layout::Dtype;

/// A weight matrix `[rows][cols]`, row-major without gaps.
pub struct CudaMatrix {
    pub(super) data: Range,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) dtype: Dtype,
}

/// A small vector, f32.
pub struct CudaVector {
    pub(super) data: Range,
    pub(super) len: usize,
}

/// Activations `[rows][stride]`, of which `width` elements are used.
pub struct CudaBuffer {
    pub(super) data: Range,
    pub(super) rows_max: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
    pub(super) dtype: Dtype,
    /// Of the rows that a product left unfinished for the one that reads them.
    pub(super) pending: Cell<Option<Pending>>,
}

/// Elements from one row to the next: rows begin where 16-byte loads may.
pub(super) fn row_stride(width: usize, dtype: Dtype) -> usize {
    width.next_multiple_of(16 / dtype.bytes())
}

impl CudaBuffer {
    pub fn width(&self) -> usize {
        self.width
    }

    pub fn rows_max(&self) -> usize {
        self.rows_max
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bytes of so many rows.
    ///
    /// # Panics
    /// Beyond [`Self::rows_max`], as slices do.
    pub(super) fn bytes(&self, rows: usize) -> usize {
        assert!(rows <= self.rows_max, "{rows} rows are within the {} there are", self.rows_max);
        rows * self.stride * self.dtype.bytes()
    }
}

impl fmt::Debug for CudaMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaMatrix[{}][{}] {}", self.rows, self.cols, self.dtype)
    }
}

impl fmt::Debug for CudaVector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaVector[{}]", self.len)
    }
}

impl fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaBuffer[{}][{}] {}", self.rows_max, self.width, self.dtype)
    }
}
