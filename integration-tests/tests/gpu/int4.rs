//! Weights in INT4: GEMMs of every number of rows against sums in f64, fused operations against the
//! CPU, an update of the weights, and whole models.

use half::bf16;
use kernels::{
    Backend, Dtype, Packer, RowSource, WeightFormat,
    backend::GatedActivation,
    cuda::{CudaOptions, CudaPacker},
    int4::{self, ColumnGroups},
};
use serde_json::json;

use super::{
    bench::{Bench, assert_near, cpu, gpu, numbers},
    model,
};

/// A matrix in INT4.
struct Int4Rows {
    rows: usize,
    groups: ColumnGroups,
    seed: u32,
    /// Whether zero points differ. If not, all are 8.
    has_zeros: bool,
}

impl Int4Rows {
    fn new(rows: usize, cols: usize, group_size: usize, seed: u32) -> Self {
        let groups = ColumnGroups::contiguous(cols, group_size);
        Self { rows, groups, seed, has_zeros: seed % 2 == 1 }
    }

    fn numbers(&self, row: usize) -> impl Iterator<Item = u8> {
        let seed = self.seed.wrapping_mul(7919).wrapping_add(row as u32);
        numbers(seed, self.cols())
            .into_iter()
            .map(|value| ((value + 1.0) * 8.0).clamp(0.0, 15.0) as u8)
    }

    /// Returns scale and zero point of a group. Rows have tiny, usual, negative and large scales.
    fn group(&self, row: usize, group: usize) -> (f32, u8) {
        let scale = [2.0_f32.powi(-100), 0.01, -3.0, 2.0_f32.powi(60)][(row + row / 8) % 4];
        let zero = if self.has_zeros { ((row * 3 + group * 5) % 16) as u8 } else { 8 };
        (bf16::from_f32(scale * (1.0 + 0.3 * (group % 5) as f32)).to_f32(), zero)
    }
}

impl RowSource for Int4Rows {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.groups.of_columns().len()
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        let numbers = self.numbers(row).zip(self.groups.of_columns());
        for (out, (number, group)) in out.iter_mut().zip(numbers) {
            let (scale, zero) = self.group(row, usize::from(*group));
            *out = int4::element(number, zero, scale);
        }
    }

    fn may_be_quantized(&self) -> bool {
        true
    }

    fn int4_groups(&self) -> Option<ColumnGroups> {
        Some(self.groups.clone())
    }

    fn read_int4(&self, first: usize, numbers: &mut [u8], scales: &mut [f32], zeros: &mut [u8]) {
        let count = self.groups.count();
        for (row, out) in numbers.chunks_exact_mut(self.cols()).enumerate() {
            out.iter_mut().zip(self.numbers(first + row)).for_each(|(out, number)| *out = number);
        }
        for (at, (scale, zero)) in scales.iter_mut().zip(zeros).enumerate() {
            (*scale, *zero) = self.group(first + at / count, at % count);
        }
    }
}

/// Numbers of rows of a GEMM: all up to 300, or few in a debug build.
fn row_counts() -> Vec<usize> {
    const FEW: [usize; 20] =
        [1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 24, 31, 32, 33, 64, 65, 128, 129, 200, 300];
    if cfg!(debug_assertions) { FEW.to_vec() } else { (1..=300).collect() }
}

/// Compares a GEMM with sums in f64 of products of `x` and the stored elements.
fn check_sums(found: &[f32], x: &[f32], weights: &[Vec<f32>], what: &str) {
    let (inputs, outputs) = (weights[0].len(), weights.len());
    // Comparing all outputs of large matrices takes minutes.
    let step = if inputs * outputs > 50_000 { 13 } else { 1 };
    for (row, x) in x.chunks_exact(inputs).enumerate() {
        for output in (row % step..outputs).step_by(step) {
            let (mut sum, mut magnitude) = (0.0, 0.0);
            for (x, w) in x.iter().zip(&weights[output]) {
                let product = f64::from(*x) * f64::from(*w);
                (sum, magnitude) = (sum + product, magnitude + product.abs());
            }
            // Output and widened weights are rounded to 8 bits.
            let error = (f64::from(found[row * outputs + output]) - sum).abs();
            assert!(
                error <= 5e-3 * magnitude + 1e-37,
                "{what}: row {row}, output {output} is {}, not {sum}",
                found[row * outputs + output]
            );
        }
    }
}

pub(crate) fn gemms_match_sums_of_the_stored_numbers() {
    let gpu = gpu();
    let rows_max = 300;
    for (seed, (inputs, outputs, group_size)) in (0..).zip([
        (8, 8, 8),
        (64, 80, 32),
        (136, 33, 136),
        (576, 961, 64),
        (1544, 577, 128),
        (328, 1008, 32),
        (144, 48, 48),  // kept in bf16: the groups do not fit
        (100, 47, 100), // kept in bf16: the columns do not fit
        (4096, 512, 128),
        (4096, 520, 4096),
    ]) {
        let source = Int4Rows::new(outputs, inputs, group_size, seed);
        let options = CudaOptions::new(WeightFormat::Bf16);
        let (mut cuda, (w, mut x, mut out, mut wide)) = gpu.backend_with(options, |backend| {
            (
                backend.matrix(&source),
                backend.buffer(rows_max, inputs),
                backend.buffer(rows_max, outputs),
                backend.wide_buffer(rows_max, outputs),
            )
        });
        let weights: Vec<Vec<f32>> = (0..outputs)
            .map(|row| {
                let mut values = vec![0.0; inputs];
                source.read_row(row, &mut values);
                values
            })
            .collect();
        for rows in row_counts() {
            let mut input = numbers(6 + rows as u32, rows * inputs);
            // A row of large values, and before it one of zeros.
            if rows > 1 {
                input[..inputs].fill(0.0);
            }
            input[(rows - 1) * inputs..].iter_mut().for_each(|value| *value *= 1024.0);
            input.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
            cuda.put(&mut x, &input);
            let what = format!("{rows} x {inputs} x {outputs}, groups of {group_size}");
            for out in [&mut out, &mut wide] {
                Bench::poison(&cuda, out);
                cuda.matmul(rows, &x, &w, out);
                check_sums(&cuda.get(out, rows), &input, &weights, &what);
            }
        }
    }
}

pub(crate) fn fused_operations_match_cpu() {
    for (seed, (width, ffn, group_size)) in (20..).zip([(576, 400, 32), (1024, 512, 128)]) {
        match_cpu(width, ffn, group_size, seed);
    }
}

/// A matrix whose elements are about as large as those of a model.
struct Scaled(Int4Rows);

impl RowSource for Scaled {
    fn rows(&self) -> usize {
        self.0.rows
    }

    fn cols(&self) -> usize {
        self.0.cols()
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        let numbers = self.0.numbers(row).zip(self.0.groups.of_columns());
        for (out, (number, group)) in out.iter_mut().zip(numbers) {
            *out = int4::element(number, self.0.group(row, usize::from(*group)).1, 0.01);
        }
    }

    fn may_be_quantized(&self) -> bool {
        true
    }

    fn int4_groups(&self) -> Option<ColumnGroups> {
        self.0.int4_groups()
    }

    fn read_int4(&self, first: usize, numbers: &mut [u8], scales: &mut [f32], zeros: &mut [u8]) {
        self.0.read_int4(first, numbers, scales, zeros);
        scales.fill(0.01);
    }
}

fn match_cpu(width: usize, ffn: usize, group_size: usize, seed: u32) {
    let gpu = gpu();
    let gate_up = Scaled(Int4Rows::new(2 * ffn, width, group_size, seed));
    let down = Scaled(Int4Rows::new(width, ffn, group_size, seed));
    let norm = numbers(3, width);
    fn run<B: Bench>(
        backend: &mut B,
        (gate_up, down, norm): (&B::Matrix, &B::Matrix, &B::Vector),
        buffers: [&mut B::Buffer; 6],
        (rows, input, before): (usize, &[f32], &[f32]),
    ) -> [Vec<f32>; 3] {
        let [x, both, activated, delta, residual, normed] = buffers;
        backend.put(x, input);
        backend.put(residual, before);
        let product = (&*x, gate_up);
        backend.project_gated(GatedActivation::Silu, rows, product, None, both, activated);
        let activations = backend.get(activated, rows);
        let product = (&*activated, down, None);
        let stream = (&mut *delta, &mut *residual);
        backend.project_onto_residual(rows, product, None, stream, (norm, 1e-5), normed);
        let after = backend.get(residual, rows);
        // The norm may be deferred to this GEMM.
        backend.matmul(rows, normed, gate_up, both);
        let of_norm = backend.get(both, rows);
        [activations, after, of_norm]
    }
    const MOST: usize = 300;
    let options = CudaOptions::new(WeightFormat::Bf16);
    for options in [options, CudaOptions { reserved_sms: 127, ..options }] {
        let (mut cuda, (gate_up_on_gpu, down_on_gpu, norm_on_gpu, mut buffers)) =
            gpu.backend_with(options, |backend| {
                let buffers =
                    [width, 2 * ffn, ffn, width, 0, width].map(
                        |width_or_wide| match width_or_wide {
                            0 => backend.wide_buffer(MOST, width),
                            width => backend.buffer(MOST, width),
                        },
                    );
                (backend.matrix(&gate_up), backend.matrix(&down), backend.vector(&norm), buffers)
            });
        for rows in [1, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, MOST] {
            let input: Vec<f32> = numbers(5, rows * width);
            let before = numbers(7, rows * width);
            let weights = (&gate_up_on_gpu, &down_on_gpu, &norm_on_gpu);
            let found = run(&mut cuda, weights, buffers.each_mut(), (rows, &input, &before));
            let mut cpu = cpu(Dtype::F32);
            let mut on_cpu =
                [width, 2 * ffn, ffn, width, width, width].map(|width| cpu.buffer(rows, width));
            let (gate_up, down, norm) =
                (cpu.matrix(&gate_up), cpu.matrix(&down), cpu.vector(&norm));
            let weights = (&gate_up, &down, &norm);
            let wanted = run(&mut cpu, weights, on_cpu.each_mut(), (rows, &input, &before));
            for (found, wanted) in found.iter().zip(&wanted) {
                let size = wanted.iter().fold(1.0_f32, |most, value| most.max(value.abs()));
                let scaled =
                    |values: &[f32]| values.iter().map(|value| value / size).collect::<Vec<_>>();
                let what = format!("{rows} rows, {width} x {ffn}, {options:?}");
                assert_near(&scaled(found), &scaled(wanted), 2e-2, &what);
            }
        }
    }
}

pub(crate) fn updated_weights_match_a_new_backend() {
    let gpu = gpu();
    let (rows, inputs, outputs) = (5, 320, 200);
    let [first, second] = [30, 31].map(|seed| Int4Rows::new(outputs, inputs, 64, seed));
    let options = CudaOptions::new(WeightFormat::Bf16);
    let run = |source: &Int4Rows, update: Option<&Int4Rows>| {
        let (mut cuda, (w, mut x, mut out)) = gpu.backend_with(options, |backend| {
            let buffers = (backend.buffer(rows, inputs), backend.buffer(rows, outputs));
            (backend.matrix(source), buffers.0, buffers.1)
        });
        if let Some(update) = update {
            let packer = CudaPacker::new(&cuda, (0, 0)).unwrap();
            packer.begin().unwrap();
            let _packed = packer.pack_matrix(update);
            packer.finish().unwrap();
            cuda.replace_weights(&packer).unwrap();
        }
        cuda.put(&mut x, &numbers(1, rows * inputs));
        cuda.matmul(rows, &x, &w, &mut out);
        cuda.get(&out, rows)
    };
    assert_eq!(run(&first, Some(&second)), run(&second, None));
    assert_ne!(run(&first, None), run(&second, None));
}

/// Compares models with the CPU, which dequantises the same weights to bf16.
pub(crate) fn models_in_int4_match_the_dequantised_model_with_and_without_graphs() {
    let gpu = gpu();
    for (architecture, model_type, sizes, group_size) in [
        ("LlamaForCausalLM", "llama", (96, 64), 32),
        ("LlamaForCausalLM", "llama", (256, 128), 128),
        ("Qwen2ForCausalLM", "qwen2", (192, 128), 64),
        ("Qwen3ForCausalLM", "qwen3", (96, 64), -1),
        ("Gemma3ForCausalLM", "gemma3_text", (96, 128), 32),
    ] {
        let quantization = json!({
            "quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm",
            "zero_point": true
        });
        let checkpoint =
            model::checkpoint_quantized(architecture, model_type, sizes, Some(quantization));
        assert!(checkpoint.has_int4());
        let wanted = model::by_cpu(&checkpoint, WeightFormat::Bf16);
        let best = CudaOptions { graphs: false, ..CudaOptions::new(WeightFormat::Bf16) };
        let sparing = CudaOptions { reserved_sms: 127, ..best };
        for options in [best, sparing, CudaOptions { fused: false, ..best }] {
            let found = model::by_gpu(&gpu, &checkpoint, options, 1);
            // Inputs are equal as long as the tokens are equal.
            let same = found.iter().zip(&wanted).take_while(|(a, b)| a.0 == b.0).count();
            let steps = found.iter().zip(&wanted).take(same + 1);
            let errors: Vec<f32> =
                steps.flat_map(|(found, wanted)| model::row_errors(&found.1, &wanted.1)).collect();
            let what = format!("{architecture}, groups of {group_size}, {options:?}");
            assert!(
                errors.iter().all(|error| *error < 0.05),
                "{what}: the relative errors of rows of logits are {errors:.3?}"
            );
            eprintln!("{what}: {same} steps chose the CPU's tokens");
            let late = CudaOptions { dependent_launch: false, ..options };
            assert_eq!(model::by_gpu(&gpu, &checkpoint, late, 1), found, "{what}, no early start");
            let graphs = CudaOptions { graphs: true, ..options };
            assert_eq!(model::by_gpu(&gpu, &checkpoint, graphs, 1), found, "{what}, replayed");
        }
    }
}
