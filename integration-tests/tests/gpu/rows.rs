//! Row operations with odd sizes.

use kernels::{Backend, backend::GatedActivation};

use super::bench::{Bench, DTYPES, Random, assert_near, cpu, gpu, numbers, tolerance};
use kernels::cuda::AttentionKind;

const ROWS: [usize; 5] = [1, 2, 7, 33, 130];
const WIDTHS: [usize; 5] = [8, 72, 576, 1032, 4096];
const EPS: f32 = 1e-5;

/// Returns the outputs of the plain norm, of the norm after a residual addition with the sum, and
/// of the norm in place.
fn norms<B: Bench>(
    backend: &mut B,
    (x, delta, normed): (&mut B::Buffer, &mut B::Buffer, &mut B::Buffer),
    weight: &B::Vector,
    (rows, width): (usize, usize),
) -> [Vec<f32>; 4] {
    backend.put(x, &numbers(1, rows * width));
    backend.put(delta, &numbers(2, rows * width));
    backend.poison(normed);
    backend.rms_norm(rows, x, weight, EPS, normed);
    let plain = backend.get(normed, rows);
    backend.poison(normed);
    backend.add_rms_norm(rows, x, delta, weight, EPS, normed);
    let after_addition = backend.get(normed, rows);
    backend.rms_norm_in_place(rows, delta, weight, EPS);
    [plain, after_addition, backend.get(x, rows), backend.get(delta, rows)]
}

pub(crate) fn norms_match_cpu() {
    let gpu = gpu();
    for dtype in DTYPES {
        for width in WIDTHS {
            let weights = numbers(3, width);
            let make = |backend: &kernels::cuda::CudaBackend| {
                let rows = ROWS[ROWS.len() - 1];
                let buffers = (
                    backend.wide_buffer(rows, width),
                    backend.buffer(rows, width),
                    backend.buffer(rows, width),
                );
                (buffers, backend.vector(&weights))
            };
            let (mut cuda, ((mut x, mut delta, mut out), weight)) =
                gpu.backend(dtype, AttentionKind::Plain, make);
            for rows in ROWS {
                let buffers = (&mut x, &mut delta, &mut out);
                let found = norms(&mut cuda, buffers, &weight, (rows, width));
                let mut cpu = cpu(dtype);
                let buffer = || cpu.buffer(rows, width);
                let (mut x, mut delta, mut out) = (buffer(), buffer(), buffer());
                let weight = cpu.vector(&weights);
                let buffers = (&mut x, &mut delta, &mut out);
                let wanted = norms(&mut cpu, buffers, &weight, (rows, width));
                for (index, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                    let what = format!("{dtype} {rows} x {width}, result {index}");
                    // Both backends compute the sum in f32.
                    let tolerance = if index == 2 { 1e-6 } else { tolerance(dtype) };
                    assert_near(found, wanted, tolerance, &what);
                }
            }
        }
    }
}

pub(crate) fn activations_match_cpu() {
    let gpu = gpu();
    for dtype in DTYPES {
        for width in WIDTHS {
            let most = ROWS[ROWS.len() - 1];
            let (mut cuda, (mut on_gpu, mut result)) =
                gpu.backend(dtype, AttentionKind::Plain, |backend| {
                    (backend.buffer(most, 2 * width), backend.buffer(most, width))
                });
            for rows in ROWS {
                let input: Vec<f32> =
                    numbers(5, rows * 2 * width).iter().map(|value| value * 8.0).collect();
                cuda.put(&mut on_gpu, &input);
                let mut cpu = cpu(dtype);
                let (mut from, mut to) = (cpu.buffer(rows, 2 * width), cpu.buffer(rows, width));
                cpu.put(&mut from, &input);
                for activation in [GatedActivation::Silu, GatedActivation::GeluTanh] {
                    Bench::poison(&cuda, &mut result);
                    cuda.activate(activation, rows, &on_gpu, &mut result);
                    let found = cuda.get(&result, rows);
                    cpu.activate(activation, rows, &from, &mut to);
                    let what = format!("{activation:?} {dtype} {rows} x {width}");
                    assert_near(&found, &cpu.get(&to, rows), tolerance(dtype), &what);
                }
            }
        }
    }
}

/// Compares GEMMs with f64 sums of the same inputs, so that only the GEMM's own rounding differs.
pub(crate) fn gemm_matches_cpu_for_both_output_types() {
    let gpu = gpu();
    for dtype in DTYPES {
        for (rows, inputs, outputs) in
            [(1, 576, 960), (3, 64, 72), (17, 1536, 576), (130, 576, 1000), (5, 8, 49_155)]
        {
            let source = Random { rows: outputs, cols: inputs, seed: 4 };
            let (mut cuda, (w, mut x, mut out, mut wide)) =
                gpu.backend(dtype, AttentionKind::Plain, |backend| {
                    (
                        backend.matrix(&source),
                        backend.buffer(rows, inputs),
                        backend.buffer(rows, outputs),
                        backend.wide_buffer(rows, outputs),
                    )
                });
            let input = numbers(6, rows * inputs);
            cuda.put(&mut x, &input);
            Bench::poison(&cuda, &mut out);
            Bench::poison(&cuda, &mut wide);
            cuda.matmul(rows, &x, &w, &mut out);
            cuda.matmul(rows, &x, &w, &mut wide);
            let mut wanted = vec![0.0f32; rows * outputs];
            for output in 0..outputs {
                let weights = numbers(4u32.wrapping_mul(7919) + output as u32, inputs);
                for row in 0..rows {
                    let products = input[row * inputs..][..inputs].iter().zip(&weights);
                    let sum: f64 = products.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    wanted[row * outputs + output] = sum as f32;
                }
            }
            let what = format!("{dtype} {rows} x {inputs} x {outputs}");
            assert_near(&cuda.get(&out, rows), &wanted, tolerance(dtype), &what);
            // Tolerance of sums of a thousand f32 products.
            assert_near(&cuda.get(&wide, rows), &wanted, 2e-4, &what);
        }
    }
}
