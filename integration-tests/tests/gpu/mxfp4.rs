//! Mixtures of experts in MXFP4 with biases and a clamped SwiGLU, against the CPU, which
//! dequantizes.

use kernels::{
    RowSource, WeightFormat,
    backend::{ExpertChoice, ExpertScore, ExpertShape, GatedActivation},
    cuda::CudaOptions,
    mxfp4::GROUP,
};

use super::{
    bench::{Random, cpu, gpu, numbers},
    experts::{Mixture, ROWS, ROWS_MAX, Scaled, Sources, Zeros, assert_close},
};

const NUMBERS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// A matrix in MXFP4.
struct Mxfp4 {
    rows: usize,
    cols: usize,
    seed: u32,
    parts: usize,
    /// Scale of a row's group.
    scale: fn(&Mxfp4, usize, usize) -> u8,
}

impl Mxfp4 {
    /// Returns the numbers of a row, two in a byte.
    fn bytes(&self, row: usize) -> Vec<u8> {
        let seed = self.seed.wrapping_mul(7919).wrapping_add(row as u32);
        let random = numbers(seed, self.cols / 2);
        random.iter().map(|value| (value * 128.0 + 128.0) as u8).collect()
    }
}

/// Returns one of three scales, with which outputs have about the magnitude of the inputs.
fn usual(matrix: &Mxfp4, row: usize, group: usize) -> u8 {
    let scale = (0.34 / (matrix.cols as f32).sqrt()).log2().round();
    (127.0 + scale) as u8 + ((row + group) % 3) as u8 - 1
}

impl RowSource for Mxfp4 {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        let bits = self.bytes(row).into_iter().flat_map(|byte| [byte & 15, byte >> 4]);
        for (col, (out, bits)) in out.iter_mut().zip(bits).enumerate() {
            let scale = 2.0_f32.powi(i32::from((self.scale)(self, row, col / GROUP)) - 127);
            let sign = if bits > 7 { -1.0 } else { 1.0 };
            *out = sign * NUMBERS[usize::from(bits & 7)] * scale;
        }
    }

    fn mxfp4_parts(&self) -> Option<usize> {
        Some(self.parts)
    }

    fn read_mxfp4(&self, first: usize, numbers: &mut [u8], scales: &mut [u8]) {
        for (row, out) in (first..).zip(numbers.chunks_exact_mut(self.cols / 2)) {
            out.copy_from_slice(&self.bytes(row));
        }
        for (row, out) in (first..).zip(scales.chunks_exact_mut(self.cols / GROUP)) {
            out.iter_mut().enumerate().for_each(|(at, out)| *out = (self.scale)(self, row, at));
        }
    }
}

fn shape(count: usize, chosen: usize, hidden: usize, size: usize) -> ExpertShape {
    ExpertShape { count, chosen, hidden, size, shared: 0 }
}

fn choice(shape: ExpertShape) -> ExpertChoice {
    let score = ExpertScore::BiasedSoftmax;
    ExpertChoice { score, ..ExpertChoice::softmax(shape.chosen, true) }
}

/// With 3,008 columns 32 rows of the inputs do not fit into shared memory.
fn shapes() -> [ExpertShape; 7] {
    [
        shape(32, 4, 96, 160),
        shape(8, 2, 544, 448),
        shape(5, 5, 64, 32),
        shape(1, 1, 32, 32),
        shape(128, 4, 160, 96),
        shape(4, 4, 3008, 96),
        shape(3, 1, 96, 2880),
    ]
}

/// Calls `body` with random matrices and biases.
fn with_sources<T>(
    shape: ExpertShape,
    router: &dyn RowSource,
    body: impl FnOnce(&Sources<'_>) -> T,
) -> T {
    let matrix = |rows, cols, seed, parts| -> Box<dyn RowSource> {
        Box::new(Mxfp4 { rows, cols, seed, parts, scale: usual })
    };
    let expert = |index: usize, size: usize| {
        let seed = 2 * index as u32;
        [matrix(2 * size, shape.hidden, seed, 2), matrix(shape.hidden, size, seed + 1, 1)]
    };
    let biases = |index| {
        let bias = |seed, len| numbers(seed, len).iter().map(|value| value * 0.25).collect();
        [bias(500 + 2 * index, 2 * shape.size), bias(501 + 2 * index, shape.hidden)]
    };
    body(&Sources {
        router,
        shared_router: None,
        bias: Some(numbers(499, shape.count)),
        expert: &expert,
        biases: (0..shape.count as u32).map(biases).collect(),
        activation: GatedActivation::ClampedSwiGlu { alpha: 1.702, limit: 0.75 },
    })
}

fn compare(shape: ExpertShape, router: &dyn RowSource, input: impl Fn(usize) -> Vec<f32>) {
    let gpu = gpu();
    with_sources(shape, router, |sources| {
        let mixture = (shape, choice(shape));
        let options = CudaOptions::new(WeightFormat::Bf16);
        let (mut cuda, mut on_gpu) =
            gpu.backend_with(options, |backend| Mixture::new(backend, ROWS_MAX, mixture, sources));
        let mut cpu = cpu(WeightFormat::F32);
        let mut on_cpu = Mixture::new(&cpu, ROWS_MAX, mixture, sources);
        for rows in ROWS {
            let x = input(rows);
            let found = on_gpu.run(&mut cuda, rows, &x);
            let wanted = on_cpu.run(&mut cpu, rows, &x);
            assert_close(&found, &wanted, false, &format!("{shape:?}, {rows} rows"));
        }
    });
}

pub(crate) fn mixtures_of_any_size_and_rows_match_cpu() {
    for shape in shapes() {
        let router = Scaled(Random { rows: shape.count, cols: shape.hidden, seed: 77 });
        compare(shape, &router, |rows| numbers(5 + rows as u32, rows * shape.hidden));
    }
}

/// All rows go to the same experts, and the other experts have no rows.
pub(crate) fn equal_rows_and_equal_logits_match_cpu() {
    for shape in [shape(32, 4, 96, 160), shape(128, 4, 160, 96)] {
        let router = Scaled(Random { rows: shape.count, cols: shape.hidden, seed: 77 });
        let row = numbers(9, shape.hidden);
        compare(shape, &router, |rows| row.repeat(rows));
        // The bias alone decides.
        let router = Zeros(shape.count, shape.hidden);
        compare(shape, &router, |rows| numbers(8, rows * shape.hidden));
    }
}

pub(crate) fn a_row_has_the_bits_that_it_has_alone() {
    const MOST: usize = 256;
    let gpu = gpu();
    for shape in shapes() {
        let router = Scaled(Random { rows: shape.count, cols: shape.hidden, seed: 77 });
        let options = CudaOptions::new(WeightFormat::Bf16);
        let (mut cuda, mut mixture) = with_sources(shape, &router, |sources| {
            gpu.backend_with(options, |backend| {
                Mixture::new(backend, MOST, (shape, choice(shape)), sources)
            })
        });
        let x = numbers(5, MOST * shape.hidden);
        let all = mixture.run(&mut cuda, MOST, &x);
        for rows in [1, 20, 90] {
            for row in [0, 1, 100, 160] {
                let part = row * shape.hidden..(row + rows) * shape.hidden;
                let alone = mixture.run(&mut cuda, rows, &x[part.clone()]);
                for (alone, all) in alone.iter().zip(&all) {
                    assert!(*alone == all[part.clone()], "{shape:?}, {rows} rows from {row} on");
                }
            }
        }
    }
}

/// Scales of 2^-127, and of 2^125, with which the greatest number is finite. The inputs undo them.
pub(crate) fn least_and_greatest_scales_are_exact() {
    const ROWS: usize = 40;
    let shape = shape(4, 2, 64, 32);
    let extreme = |matrix: &Mxfp4, row: usize, group: usize| match matrix.parts {
        2 if group == 0 => 252 - (row % 2) as u8,
        2 => (row % 2) as u8,
        _ => usual(matrix, row, group),
    };
    let expert = |index: usize, size: usize| -> [Box<dyn RowSource>; 2] {
        let matrix = |rows, cols, seed, parts| Mxfp4 { rows, cols, seed, parts, scale: extreme };
        let seed = 2 * index as u32;
        [
            Box::new(matrix(2 * size, shape.hidden, seed, 2)),
            Box::new(matrix(shape.hidden, size, seed + 1, 1)),
        ]
    };
    let router = Zeros(shape.count, shape.hidden);
    let sources = Sources {
        router: &router,
        shared_router: None,
        bias: None,
        expert: &expert,
        biases: Vec::new(),
        activation: GatedActivation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 },
    };
    let mut x = numbers(5, ROWS * shape.hidden);
    for (at, value) in x.iter_mut().enumerate() {
        *value *= 2.0_f32.powi(if at % shape.hidden < GROUP { -124 } else { 123 });
    }
    let gpu = gpu();
    let (mut cuda, mut on_gpu) = gpu
        .backend_with(CudaOptions::new(WeightFormat::Bf16), |backend| {
            Mixture::new(backend, ROWS, (shape, choice(shape)), &sources)
        });
    let mut cpu = cpu(WeightFormat::F32);
    let mut on_cpu = Mixture::new(&cpu, ROWS, (shape, choice(shape)), &sources);
    let [found, ..] = on_gpu.run(&mut cuda, ROWS, &x);
    let [wanted, ..] = on_cpu.run(&mut cpu, ROWS, &x);
    let size = wanted.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    assert!(size > 0.1 && size.is_finite(), "{size}");
    for (at, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
        let is_near = (found - wanted).abs() <= 0.02 * size;
        assert!(is_near, "element {at} is {found}, not {wanted}");
    }
}
