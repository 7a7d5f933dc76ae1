//! The definition: one sum per output element, over the inputs in order, each step one fused
//! multiply-add. Elements of other rows play no part, so the result does not depend on the batch.

use super::pack::CpuMatrix;
use crate::{cpu::arithmetic::round_to_bf16, layout::Dtype};

/// `out[row][n] = Σ_k x[row][k] · w[n][k]` for `k` ascending. With bf16 weights `x` is rounded to
/// bf16 first; products and sums are f32.
pub(crate) fn matmul(x: &[f32], w: &CpuMatrix, out: &mut [f32]) {
    let mut weights = vec![0.0; w.cols()];
    for n in 0..w.rows() {
        w.copy_row(n, &mut weights);
        for (x, out) in x.chunks_exact(w.cols()).zip(out.chunks_exact_mut(w.rows())) {
            out[n] = x.iter().zip(&weights).fold(0.0, |sum: f32, (&x, &weight)| match w.dtype() {
                Dtype::F32 => x.mul_add(weight, sum),
                Dtype::Bf16 => round_to_bf16(x).mul_add(weight, sum),
            });
        }
    }
}
