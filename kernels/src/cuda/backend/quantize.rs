//! Rows quantized to FP8, the inputs of FP8 GEMMs.

use super::{CudaBackend, QuantizedRows};
use crate::cuda::{buffer::CudaBuffer, library::KernelLibrary};

impl CudaBackend {
    /// Quantizes rows of `x` to FP8, for experts.
    pub(in crate::cuda) fn quantize_for_experts(
        &self,
        rows: usize,
        x: &CudaBuffer,
    ) -> &QuantizedRows {
        let quantized = self.quantized.as_ref().expect("placed with the weights");
        self.quantize_rows(rows, x, quantized);
        quantized
    }

    /// Quantizes rows of `x` to FP8.
    pub(super) fn quantize_rows(&self, rows: usize, x: &CudaBuffer, to: &QuantizedRows) {
        let from = x.data.part(0, x.bytes(rows));
        let data = to.data.part(0, rows * x.width);
        let scales = to.scales.part(0, rows * size_of::<f32>());
        let (stride, rows, width) = (x.stride as i64, rows as i32, x.width as i32);
        self.run(|library, stream| {
            // SAFETY: the three ranges have the sizes checked above.
            unsafe {
                launch!(
                    library,
                    stream,
                    baton_quantize_rows(from, stride, data, scales, rows, width)
                )
            }
        });
    }
}
