//! Reference definition: each output element is one accumulation over the inputs in order, each
//! step one fused multiply-add. Other rows do not affect it, so the result does not depend on the
//! batch.

use super::{pack::CpuMatrix, q8};
use crate::{cpu::arithmetic::round_to_bf16, layout::WeightFormat};

/// Computes `out[row][n] = Σ_k x[row][k] · w[n][k]` for `k` ascending. With bf16 weights `x` is
/// rounded to bf16 first, and the arithmetic is f32. 8-bit weights use [`q8_matmul`].
pub(crate) fn matmul(x: &[f32], w: &CpuMatrix, out: &mut [f32]) {
    if w.format() == WeightFormat::Q8 {
        return q8_matmul(x, w, out);
    }
    let mut weights = vec![0.0; w.cols()];
    for n in 0..w.rows() {
        w.copy_row(n, &mut weights);
        for (x, out) in x.chunks_exact(w.cols()).zip(out.chunks_exact_mut(w.rows())) {
            out[n] = x.iter().zip(&weights).fold(0.0, |sum: f32, (&x, &weight)| match w.format() {
                WeightFormat::F32 => x.mul_add(weight, sum),
                WeightFormat::Bf16 | WeightFormat::Fp8 | WeightFormat::Q8 => {
                    round_to_bf16(x).mul_add(weight, sum)
                }
            });
        }
    }
}

/// Computes `out[row][n]` = Σ over blocks of 32 inputs, in order, of the integer dot product of the
/// block's quantized inputs and weights times both scales, each step one fused multiply-add.
fn q8_matmul(x: &[f32], w: &CpuMatrix, out: &mut [f32]) {
    for (x, out) in x.chunks_exact(w.cols()).zip(out.chunks_exact_mut(w.rows())) {
        let inputs: Vec<_> = x
            .chunks(q8::BLOCK)
            .map(|x| {
                let mut block = [0.0; q8::BLOCK];
                block[..x.len()].copy_from_slice(x);
                q8::quantise_inputs(&block)
            })
            .collect();
        for (n, out) in out.iter_mut().enumerate() {
            *out = inputs.iter().enumerate().fold(0.0, |sum, (block, inputs)| {
                let (weights, scale) = w.q8_block(n, block);
                let products = inputs.numbers.iter().zip(weights);
                let whole: i32 = products.map(|(x, weight)| x * i32::from(weight)).sum();
                (whole as f32).mul_add(scale * inputs.scale, sum)
            });
        }
    }
}
