//! Weights in FP8: GEMMs of every kind of kernel against sums in f64, fused operations against the
//! CPU, and whole models.

use kernels::{
    Backend, Dtype, RowSource, WeightFormat,
    backend::GatedActivation,
    cuda::CudaOptions,
    fp8::{self, BlockScales},
};

use super::{
    bench::{Bench, assert_near, cpu, gpu, numbers},
    model,
};

/// A matrix in FP8 with a scale for each row. `stored`: the backend gets numbers and scales, not
/// values to quantize.
struct Fp8Rows {
    rows: usize,
    cols: usize,
    seed: u32,
    stored: bool,
}

impl Fp8Rows {
    fn scale(&self, row: usize) -> f32 {
        // Tiny, usual and large scales.
        [2.0_f32.powi(-30), 0.01, 3.0, 1e-4][(row + self.seed as usize) % 4]
    }

    fn row(&self, row: usize) -> Vec<u8> {
        let seed = self.seed.wrapping_mul(7919).wrapping_add(row as u32);
        let mut bits: Vec<u8> =
            numbers(seed, self.cols).iter().map(|value| fp8::encode(value * 500.0)).collect();
        // Quantization of the values gives these numbers again: the largest is 448.
        bits[row % self.cols] = 0x7e;
        bits
    }
}

impl RowSource for Fp8Rows {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        for (out, bits) in out.iter_mut().zip(self.row(row)) {
            *out = fp8::decode(bits) * self.scale(row);
        }
    }

    fn may_be_quantized(&self) -> bool {
        true
    }

    fn fp8_scales(&self) -> Option<Vec<BlockScales>> {
        let scales = (0..self.rows).map(|row| self.scale(row)).collect();
        self.stored.then(|| vec![BlockScales::new([self.rows, self.cols], [1, self.cols], scales)])
    }

    fn read_fp8(&self, first: usize, out: &mut [u8]) {
        for (row, out) in out.chunks_exact_mut(self.cols).enumerate() {
            out.copy_from_slice(&self.row(first + row));
        }
    }
}

/// Maximum rows of the kernel that does not quantize its input.
const WEIGHT_ONLY_ROWS: usize = 16;

/// Returns a row of inputs as the GEMM reads it.
fn input_of(row: &[f32], rows: usize) -> Vec<f64> {
    if rows <= WEIGHT_ONLY_ROWS {
        return row.iter().map(|value| f64::from(*value)).collect();
    }
    let most = row.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let scale = if most > 0.0 { most / fp8::E4M3_MAX } else { 1.0 };
    // As the kernel does: a quotient would round to another number where it is a tie.
    let factor = 1.0 / scale;
    let quantized = |value: &f32| f64::from(fp8::decode(fp8::encode(value * factor)) * scale);
    row.iter().map(quantized).collect()
}

pub(crate) fn gemms_match_sums_of_the_stored_numbers() {
    let gpu = gpu();
    let options = CudaOptions::new(WeightFormat::Fp8);
    for (inputs, outputs) in [(16, 16), (64, 80), (576, 960), (1536, 576), (144, 1008), (4096, 512)]
    {
        for stored in [true, false] {
            let source = Fp8Rows { rows: outputs, cols: inputs, seed: 4, stored };
            const ROWS: [usize; 12] = [1, 2, 5, 8, 9, 13, 16, 17, 31, 64, 130, 300];
            let (mut cuda, (w, mut x, mut out)) = gpu.backend_with(options, |backend| {
                let rows = ROWS[ROWS.len() - 1];
                (
                    backend.matrix(&source),
                    backend.buffer(rows, inputs),
                    backend.wide_buffer(rows, outputs),
                )
            });
            let weights: Vec<Vec<f32>> = (0..outputs)
                .map(|row| {
                    let mut values = vec![0.0; inputs];
                    source.read_row(row, &mut values);
                    values
                })
                .collect();
            for rows in ROWS {
                let mut input = numbers(6 + rows as u32, rows * inputs);
                // A row of zeros, and one of large values.
                input[..inputs].fill(0.0);
                input[(rows - 1) * inputs..].iter_mut().for_each(|value| *value *= 1024.0);
                cuda.put(&mut x, &input);
                Bench::poison(&cuda, &mut out);
                cuda.matmul(rows, &x, &w, &mut out);
                let found = cuda.get(&out, rows);
                for row in 0..rows {
                    let x = input_of(&input[row * inputs..][..inputs], rows);
                    // Comparing all outputs of large matrices takes minutes.
                    let step = if inputs * outputs > 100_000 { 13 } else { 1 };
                    for output in (row % step..outputs).step_by(step) {
                        let products = x.iter().zip(&weights[output]);
                        let (mut sum, mut magnitude) = (0.0, 0.0);
                        for (x, w) in products {
                            let product = x * f64::from(*w);
                            (sum, magnitude) = (sum + product, magnitude + product.abs());
                        }
                        let bound = 5e-3 * magnitude;
                        let error = (f64::from(found[row * outputs + output]) - sum).abs();
                        assert!(
                            error <= bound + 1e-30,
                            "{rows} x {inputs} x {outputs}, stored {stored}: row {row}, output {output} is {}, not {sum}",
                            found[row * outputs + output]
                        );
                    }
                }
            }
        }
    }
}

pub(crate) fn fused_operations_match_cpu() {
    // The kernels that take inputs in FP8 need multiples of 128. The first case has none.
    for (width, ffn) in [(576, 400), (512, 384), (1024, 512)] {
        match_cpu(width, ffn);
    }
}

fn match_cpu(width: usize, ffn: usize) {
    let gpu = gpu();
    let gate_up = Fp8Rows { rows: 2 * ffn, cols: width, seed: 1, stored: true };
    let down = Fp8Rows { rows: width, cols: ffn, seed: 2, stored: true };
    let norm = numbers(3, width);
    fn run<B: Bench>(
        backend: &mut B,
        (gate_up, down, norm): (&B::Matrix, &B::Matrix, &B::Vector),
        buffers: [&mut B::Buffer; 6],
        (rows, input, before): (usize, &[f32], &[f32]),
    ) -> [Vec<f32>; 2] {
        let [x, both, activated, delta, residual, normed] = buffers;
        backend.put(x, input);
        backend.put(residual, before);
        let product = (&*x, gate_up);
        backend.project_gated(GatedActivation::Silu, rows, product, None, both, activated);
        let activations = match rows {
            ..=MIRRORED_MAX => backend.get(activated, rows),
            _ => Vec::new(),
        };
        let product = (&*activated, down, None);
        let stream = (&mut *delta, &mut *residual);
        backend.project_onto_residual(rows, product, None, stream, (norm, 1e-5), normed);
        [activations, backend.get(residual, rows)]
    }
    let options = CudaOptions::new(WeightFormat::Fp8);
    const MOST: usize = 300;
    /// Rows up to which there are activations in bf16 beside those in FP8, which cannot be read.
    const MIRRORED_MAX: usize = 256;
    let (mut cuda, (gate_up_on_gpu, down_on_gpu, norm_on_gpu, mut buffers)) =
        gpu.backend_with(options, |backend| {
            let buffers =
                [width, 2 * ffn, ffn, width, 0, width].map(|width_or_wide| match width_or_wide {
                    0 => backend.wide_buffer(MOST, width),
                    width => backend.buffer(MOST, width),
                });
            (backend.matrix(&gate_up), backend.matrix(&down), backend.vector(&norm), buffers)
        });
    for rows in [1, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 200, MOST] {
        let input: Vec<f32> = numbers(5, rows * width).iter().map(|value| value * 0.01).collect();
        let before = numbers(7, rows * width);
        let weights = (&gate_up_on_gpu, &down_on_gpu, &norm_on_gpu);
        let found = run(&mut cuda, weights, buffers.each_mut(), (rows, &input, &before));
        let mut cpu = cpu(Dtype::F32);
        let mut on_cpu =
            [width, 2 * ffn, ffn, width, width, width].map(|width| cpu.buffer(rows, width));
        let (gate_up, down, norm) = (cpu.matrix(&gate_up), cpu.matrix(&down), cpu.vector(&norm));
        let weights = (&gate_up, &down, &norm);
        let wanted = run(&mut cpu, weights, on_cpu.each_mut(), (rows, &input, &before));
        for (found, wanted) in found.iter().zip(&wanted) {
            let size = wanted.iter().fold(1.0_f32, |most, value| most.max(value.abs()));
            let scaled =
                |values: &[f32]| values.iter().map(|value| value / size).collect::<Vec<_>>();
            // Above 32 rows inputs are rounded to FP8, with three bits of mantissa.
            let bound = if rows <= 32 { 2e-2 } else { 8e-2 };
            let what = format!("{rows} rows, {width} x {ffn}");
            assert_near(&scaled(found), &scaled(wanted), bound, &what);
        }
    }
}

pub(crate) fn models_in_fp8_are_close_to_bf16_with_and_without_graphs() {
    let gpu = gpu();
    // GEMMs of up to 32 rows take inputs in FP8 if the hidden size is a multiple of 128.
    for (architecture, model_type, sizes) in [
        ("LlamaForCausalLM", "llama", (96, 64)),
        ("Qwen2ForCausalLM", "qwen2", (96, 128)),
        ("Qwen3ForCausalLM", "qwen3", (96, 64)),
        ("Gemma3ForCausalLM", "gemma3_text", (96, 128)),
        ("Qwen3MoeForCausalLM", "qwen3_moe", (96, 64)),
        ("Qwen3MoeForCausalLM", "qwen3_moe", (256, 64)),
        ("Glm4MoeForCausalLM", "glm4_moe", (96, 128)),
    ] {
        let checkpoint = model::checkpoint_of_size(architecture, model_type, sizes);
        let wanted = model::by_cpu(&checkpoint, WeightFormat::Bf16);
        let options = CudaOptions { graphs: false, ..CudaOptions::new(WeightFormat::Fp8) };
        let found = model::by_gpu(&gpu, &checkpoint, options, 1);
        // Inputs are equal as long as the tokens are equal.
        let same = found.iter().zip(&wanted).take_while(|(a, b)| a.0 == b.0).count();
        let steps = found.iter().zip(&wanted).take(same + 1);
        let errors: Vec<f32> =
            steps.flat_map(|(found, wanted)| model::row_errors(&found.1, &wanted.1)).collect();
        // Rounding of weights and inputs to three bits changes the logits of a random model by an
        // eighth, and by more where it chooses another expert.
        let bound = if checkpoint.config().experts().is_some() { 0.4 } else { 0.2 };
        assert!(
            errors.iter().all(|error| *error < bound),
            "{architecture}: the relative errors of rows of logits are {errors:.3?}"
        );
        eprintln!("{architecture}: {same} steps chose the tokens of bf16");
        let replayed = model::by_gpu(&gpu, &checkpoint, CudaOptions { graphs: true, ..options }, 1);
        assert_eq!(replayed, found, "{architecture}, replayed");
    }
}
