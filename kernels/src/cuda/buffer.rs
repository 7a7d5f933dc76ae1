//! Matrices, vectors and activations in GPU memory.

use std::cell::Cell;

use super::{ffi::Address, memory::Range};
use crate::{
    backend::RowSource,
    int4,
    layout::{Dtype, WeightFormat},
    mxfp4,
};

/// A weight matrix `[rows][cols]`, row-major and contiguous.
#[derive(Debug)]
pub struct CudaMatrix {
    pub(super) data: Range,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Type of the GEMMs' inputs, and of the elements unless there are `scales`.
    pub(super) dtype: Dtype,
    /// The f32 scale of each row, for elements in FP8.
    pub(super) scales: Option<Range>,
    /// Whether `data` has numbers and scales in MXFP4, packed as [`mxfp4`] describes.
    pub(super) is_mxfp4: bool,
    /// Columns with a common scale, if `data` has numbers and scales in INT4, packed in chunks of
    /// [`int4`].
    pub(super) int4_block: Option<usize>,
}

impl CudaMatrix {
    /// Allocates a matrix for `source`. `cut` returns a range of the given number of bytes.
    /// `format` is that of the model's weights.
    pub(super) fn place(
        source: &dyn RowSource,
        (format, dtype): (WeightFormat, Dtype),
        cut: impl Fn(usize) -> Range,
    ) -> Self {
        let (rows, cols) = (source.rows(), source.cols());
        if dtype == Dtype::Bf16 && source.mxfp4_parts().is_some() {
            let data = cut(mxfp4::packed_bytes(rows, cols));
            return Self {
                data,
                rows,
                cols,
                dtype,
                scales: None,
                is_mxfp4: true,
                int4_block: None,
            };
        }
        if let Some(block) = int4_block(source, format) {
            let (data, int4_block) = (cut(int4::packed_bytes(rows, cols, block)), Some(block));
            return Self { data, rows, cols, dtype, scales: None, is_mxfp4: false, int4_block };
        }
        // cuBLASLt has FP8 GEMMs for multiples of 16 only.
        let is_fp8 = format == WeightFormat::Fp8
            && source.may_be_quantized()
            && rows.is_multiple_of(16)
            && cols.is_multiple_of(16);
        let element_bytes = if is_fp8 { 1 } else { dtype.bytes() };
        let bytes = rows.checked_mul(cols).and_then(|count| count.checked_mul(element_bytes));
        let data = cut(bytes.expect("a matrix fits the address space"));
        let scales = is_fp8.then(|| cut(rows * size_of::<f32>()));
        Self { data, rows, cols, dtype, scales, is_mxfp4: false, int4_block: None }
    }
}

/// Returns the columns with a common scale if a model with weights in `format` keeps the matrix in
/// INT4. With FP8, kernels take inputs in FP8, so matrices in INT4 are quantized to FP8.
fn int4_block(source: &dyn RowSource, format: WeightFormat) -> Option<usize> {
    let is_kept = format == WeightFormat::Bf16 && source.may_be_quantized() && source.rows() > 0;
    source.int4_groups().filter(|_| is_kept)?.block()
}

/// A small f32 vector.
#[derive(Debug)]
pub struct CudaVector {
    pub(super) data: Range,
    pub(super) len: usize,
}

/// Activations `[rows][stride]`, of which the first `width` elements of a row are used.
#[derive(Debug)]
pub struct CudaBuffer {
    pub(super) data: Range,
    pub(super) rows_max: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
    pub(super) dtype: Dtype,
    /// The deferred norm of the rows, if any.
    pub(super) pending: Cell<Option<DeferredNorm>>,
    /// Which rows quantized by the backend are those of this buffer, if any.
    pub(super) quantized: Cell<Option<QuantizedAs>>,
}

/// Identifies rows that the backend has quantized. The next quantization overwrites these rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct QuantizedAs {
    /// Number of quantizations up to this one, itself included.
    pub turn: u64,
    /// Number of FP8 numbers whose sum is an element.
    pub parts: usize,
    /// Whether the buffer has the rows in bf16 too, or can compute them from a deferred norm.
    pub is_mirrored: bool,
}

/// A deferred RMS norm: each row of a buffer is still to be divided by the root of the mean of its
/// squares plus `eps`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DeferredNorm {
    /// Number of partial sums of squares per row. 0: there are none, and the buffer does not have
    /// the rows: the whole norm is still to be computed from `residual`.
    pub count: usize,
    pub eps: f32,
    /// Address of the rows before the norm.
    pub residual: Address,
    /// Address of the norm's weight. Rows with sums of squares are already multiplied by this
    /// weight.
    pub norm: Address,
}

/// Returns the elements from one row to the next: rows are aligned for 16-byte loads.
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

    /// Clears the deferred norm and the quantized rows, before the rows are overwritten.
    pub(super) fn forget(&self) {
        self.pending.set(None);
        self.quantized.set(None);
    }

    /// Returns whether the buffer has its rows in bf16, or can compute them from a deferred norm.
    pub(super) fn is_mirrored(&self) -> bool {
        self.quantized.get().is_none_or(|quantized| quantized.is_mirrored)
    }

    /// Returns the address of the first `rows` rows, and the elements from one row to the next.
    pub(super) fn rows_of(&self, rows: usize) -> (Address, i64) {
        (self.data.part(0, self.bytes(rows)), self.stride as i64)
    }

    /// Returns the bytes of `rows` rows.
    ///
    /// # Panics
    /// When `rows` exceeds [`Self::rows_max`].
    pub(super) fn bytes(&self, rows: usize) -> usize {
        assert!(rows <= self.rows_max, "{rows} rows exceed the buffer's {}", self.rows_max);
        rows * self.stride * self.dtype.bytes()
    }
}
