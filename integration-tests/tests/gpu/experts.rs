//! Mixtures of experts: routing, lists, grouped GEMMs and the weighted sum against the CPU.

use kernels::{
    Backend, RowSource, WeightFormat,
    backend::{
        ExpertChoice, ExpertScore, ExpertShape, ExpertWeights, GatedActivation, SharedExpert,
    },
    cuda::CudaOptions,
    fp8::{self, BlockScales},
};

use super::{
    bench::{Bench, Random, cpu, gpu, numbers},
    model::rms,
};

const EPS: f32 = 1e-5;

/// A matrix whose outputs have about the magnitude of its inputs.
pub(super) struct Scaled(pub Random);

impl RowSource for Scaled {
    fn rows(&self) -> usize {
        self.0.rows
    }

    fn cols(&self) -> usize {
        self.0.cols
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        self.0.read_row(row, out);
        // A power of two keeps the values exact in bf16.
        let scale = (1.7 / (self.cols() as f32).sqrt()).log2().round().exp2();
        out.iter_mut().for_each(|value| *value *= scale);
    }
}

/// A router whose logits are all 0.
pub(super) struct Zeros(pub usize, pub usize);

impl RowSource for Zeros {
    fn rows(&self) -> usize {
        self.0
    }

    fn cols(&self) -> usize {
        self.1
    }

    fn read_row(&self, _row: usize, out: &mut [f32]) {
        out.fill(0.0);
    }
}

/// A matrix in FP8 with a scale for each row, whose outputs have about the magnitude of its inputs.
struct Fp8Scaled(Random);

impl Fp8Scaled {
    fn scale(&self, row: usize) -> f32 {
        let scale = (1.7 / (self.cols() as f32).sqrt()).log2().round().exp2();
        [0.7, 1.0, 1.3][row % 3] * scale / fp8::E4M3_MAX
    }

    fn bits(&self, row: usize) -> Vec<u8> {
        let mut values = vec![0.0; self.cols()];
        self.0.read_row(row, &mut values);
        values.iter().map(|value| fp8::encode(value * fp8::E4M3_MAX)).collect()
    }
}

impl RowSource for Fp8Scaled {
    fn rows(&self) -> usize {
        self.0.rows
    }

    fn cols(&self) -> usize {
        self.0.cols
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        for (out, bits) in out.iter_mut().zip(self.bits(row)) {
            *out = fp8::decode(bits) * self.scale(row);
        }
    }

    fn may_be_quantized(&self) -> bool {
        true
    }

    fn fp8_scales(&self) -> Option<Vec<BlockScales>> {
        let (rows, cols) = (self.rows(), self.cols());
        let scales = (0..rows).map(|row| self.scale(row)).collect();
        Some(vec![BlockScales::new([rows, cols], [1, cols], scales)])
    }

    fn read_fp8(&self, first: usize, out: &mut [u8]) {
        for (row, out) in out.chunks_exact_mut(self.cols()).enumerate() {
            out.copy_from_slice(&self.bits(first + row));
        }
    }
}

/// A sparse matrix, given by its elements that are not 0.
struct Sparse {
    rows: usize,
    cols: usize,
    elements: Vec<(usize, usize, f32)>,
}

impl RowSource for Sparse {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        out.fill(0.0);
        for &(_, col, value) in self.elements.iter().filter(|(at, ..)| *at == row) {
            out[col] = value;
        }
    }
}

/// Multiples of 1/8, so that logits of whole numbers are exact, and many are equal.
struct Eighths(Random);

impl RowSource for Eighths {
    fn rows(&self) -> usize {
        self.0.rows
    }

    fn cols(&self) -> usize {
        self.0.cols
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        self.0.read_row(row, out);
        out.iter_mut().for_each(|value| *value = (*value * 1.5).round() / 8.0);
    }
}

/// Matrices and biases of a mixture.
pub(super) struct Sources<'a> {
    pub router: &'a dyn RowSource,
    pub shared_router: Option<&'a dyn RowSource>,
    pub bias: Option<Vec<f32>>,
    /// Gate and up, and down, of an expert; the shared expert follows the last one.
    pub expert: &'a dyn Fn(usize, usize) -> [Box<dyn RowSource>; 2],
    /// Biases of gate and up, and of down, of each expert.
    pub biases: Vec<[Vec<f32>; 2]>,
    pub activation: GatedActivation,
}

/// A mixture of experts and its buffers on a backend.
pub(super) struct Mixture<B: Backend> {
    router: B::Matrix,
    shared_router: Option<B::Matrix>,
    bias: Option<B::Vector>,
    experts: Vec<(B::Matrix, B::Matrix)>,
    biases: Vec<(B::Vector, B::Vector)>,
    activation: GatedActivation,
    shared: Option<(B::Matrix, B::Matrix)>,
    choice: ExpertChoice,
    norm: B::Vector,
    buffers: B::ExpertBuffers,
    x: B::Buffer,
    delta: B::Buffer,
    residual: B::Buffer,
}

impl<B: Bench> Mixture<B> {
    pub(super) fn new(
        backend: &B,
        rows_max: usize,
        (shape, choice): (ExpertShape, ExpertChoice),
        sources: &Sources<'_>,
    ) -> Self {
        let ExpertShape { count, hidden, size, shared, .. } = shape;
        let expert = |index: usize, size: usize| {
            let [gate_up, down] = (sources.expert)(index, size);
            (backend.matrix(&*gate_up), backend.matrix(&*down))
        };
        Self {
            router: backend.router(sources.router),
            shared_router: sources.shared_router.map(|router| backend.router(router)),
            bias: sources.bias.as_ref().map(|bias| backend.vector(bias)),
            experts: (0..count).map(|index| expert(index, size)).collect(),
            biases: sources
                .biases
                .iter()
                .map(|[gate_up, down]| (backend.vector(gate_up), backend.vector(down)))
                .collect(),
            activation: sources.activation,
            shared: (shared > 0).then(|| expert(count, shared)),
            choice,
            norm: backend.vector(&numbers(3, hidden)),
            buffers: backend.expert_buffers(rows_max, shape),
            x: backend.buffer(rows_max, hidden),
            delta: backend.buffer(rows_max, hidden),
            residual: backend.wide_buffer(rows_max, hidden),
        }
    }

    /// Returns the mixture, and residual stream and norm after its addition.
    pub(super) fn run(&mut self, backend: &mut B, rows: usize, x: &[f32]) -> [Vec<f32>; 3] {
        let shared = self.shared.as_ref().map(|(gate_up, down)| SharedExpert {
            gate_up,
            down,
            router: self.shared_router.as_ref(),
        });
        let Self { router, bias, experts, biases, activation, choice, .. } = self;
        let (bias, activation, choice) = (bias.as_ref(), *activation, *choice);
        let weights =
            ExpertWeights { router, bias, experts, biases, activation, first: 0, shared, choice };
        let Self { norm, buffers, x: input, delta, residual, .. } = self;
        backend.put(input, x);
        backend.put(residual, &x.iter().map(|value| value * 0.5).collect::<Vec<_>>());
        backend.poison(delta);
        backend.experts(rows, input, &weights, buffers, delta);
        let mixed = backend.get(delta, rows);
        let scratch = (buffers, delta);
        backend.experts_onto_residual(rows, input, &weights, scratch, residual, (norm, EPS));
        [mixed, backend.get(residual, rows), backend.get(input, rows)]
    }
}

/// All sizes are multiples of 16, except in the third and fifth shape, which FP8 kernels reject.
const SHAPES: [ExpertShape; 8] = [
    ExpertShape { count: 128, chosen: 8, hidden: 256, size: 96, shared: 0 },
    ExpertShape { count: 8, chosen: 2, hidden: 512, size: 448, shared: 0 },
    ExpertShape { count: 5, chosen: 5, hidden: 72, size: 40, shared: 24 },
    ExpertShape { count: 1, chosen: 1, hidden: 16, size: 16, shared: 0 },
    ExpertShape { count: 60, chosen: 4, hidden: 1032, size: 136, shared: 264 },
    ExpertShape { count: 512, chosen: 10, hidden: 64, size: 64, shared: 32 },
    ExpertShape { count: 5, chosen: 3, hidden: 80, size: 48, shared: 48 },
    ExpertShape { count: 60, chosen: 4, hidden: 1040, size: 144, shared: 272 },
];
pub(super) const ROWS: [usize; 17] =
    [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 131, 256, 257, 300];
pub(super) const ROWS_MAX: usize = 300;
/// Maximum rows of a mixture in FP8 whose inputs are not rounded to FP8.
const FEW_ROWS_MAX: usize = 256;

/// Returns whether all matrices of the shape are kept in FP8.
fn fits_fp8(shape: &ExpertShape) -> bool {
    [shape.hidden, shape.size, shape.shared].iter().all(|size| size.is_multiple_of(16))
}

/// Calls `body` with random matrices. Every second shape's shared expert has a router.
fn with_sources<T>(
    shape: ExpertShape,
    weights: WeightFormat,
    router: &dyn RowSource,
    body: impl FnOnce(&Sources<'_>) -> T,
) -> T {
    let matrix = |rows, cols, seed| -> Box<dyn RowSource> {
        let random = Random { rows, cols, seed };
        match weights {
            WeightFormat::Fp8 => Box::new(Fp8Scaled(random)),
            _ => Box::new(Scaled(random)),
        }
    };
    let expert = |index: usize, size: usize| {
        let seed = 2 * index as u32;
        [matrix(2 * size, shape.hidden, seed), matrix(shape.hidden, size, seed + 1)]
    };
    let shared_router = Scaled(Random { rows: 1, cols: shape.hidden, seed: 78 });
    let has_router = shape.shared > 0 && shape.count.is_multiple_of(2);
    body(&Sources {
        router,
        shared_router: has_router.then_some(&shared_router),
        bias: None,
        expert: &expert,
        biases: Vec::new(),
        activation: GatedActivation::Silu,
    })
}

/// `rounds`: inputs are rounded to FP8, with a relative error of 1/38 (root mean square).
pub(super) fn assert_close(
    found: &[Vec<f32>; 3],
    wanted: &[Vec<f32>; 3],
    rounds: bool,
    what: &str,
) {
    let tolerance = if rounds { 0.5 } else { 0.03 };
    for (index, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        assert_eq!(found.len(), wanted.len(), "{what}");
        let size = rms(wanted.iter().copied());
        let error = rms(found.iter().zip(wanted).map(|(found, wanted)| found - wanted));
        assert!(error <= 0.1 * size, "{what}, result {index}: errors of {error}, not of {size}");
        for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            let error = (found - wanted).abs();
            // A comparison with NaN is false.
            let is_near = error <= tolerance * (size + wanted.abs());
            assert!(is_near, "{what}, result {index}: element {at} is {found}, not {wanted}");
        }
    }
}

fn compare(
    shape: ExpertShape,
    weights: WeightFormat,
    router: &dyn RowSource,
    input: impl Fn(usize) -> Vec<f32>,
) {
    let gpu = gpu();
    let choice = ExpertChoice::softmax(shape.chosen, shape.count.is_multiple_of(2));
    with_sources(shape, weights, router, |sources| {
        let mixture = (shape, choice);
        let (mut cuda, mut on_gpu) = gpu.backend_with(CudaOptions::new(weights), |backend| {
            Mixture::new(backend, ROWS_MAX, mixture, sources)
        });
        let mut cpu = cpu(WeightFormat::F32);
        let mut on_cpu = Mixture::new(&cpu, ROWS_MAX, mixture, sources);
        for rows in ROWS {
            let x = input(rows);
            let found = on_gpu.run(&mut cuda, rows, &x);
            let wanted = on_cpu.run(&mut cpu, rows, &x);
            // The inputs of the shared expert are rounded above 32 rows already.
            let rounds = rows > FEW_ROWS_MAX || shape.shared > 0 && rows > 32;
            let rounds = weights == WeightFormat::Fp8 && rounds;
            assert_close(&found, &wanted, rounds, &format!("{shape:?}, {weights}, {rows} rows"));
        }
    });
}

pub(crate) fn mixtures_of_any_size_and_rows_match_cpu() {
    for shape in SHAPES {
        let router = Scaled(Random { rows: shape.count, cols: shape.hidden, seed: 77 });
        for weights in [WeightFormat::Bf16, WeightFormat::Fp8] {
            if weights == WeightFormat::Fp8 && !fits_fp8(&shape) {
                continue;
            }
            compare(shape, weights, &router, |rows| numbers(5 + rows as u32, rows * shape.hidden));
        }
    }
}

/// All rows go to the same experts, and the other experts have no rows.
pub(crate) fn equal_rows_and_equal_logits_match_cpu() {
    for (shape, weights) in [
        (SHAPES[0], WeightFormat::Bf16),
        (SHAPES[1], WeightFormat::Bf16),
        (SHAPES[2], WeightFormat::Bf16),
        (SHAPES[0], WeightFormat::Fp8),
        (SHAPES[6], WeightFormat::Fp8),
    ] {
        let router = Random { rows: shape.count, cols: shape.hidden, seed: 77 };
        let row = numbers(9, shape.hidden);
        compare(shape, weights, &Scaled(router), |rows| row.repeat(rows));
        // Ties go to the lowest experts.
        let router = Zeros(shape.count, shape.hidden);
        compare(shape, weights, &router, |rows| numbers(8, rows * shape.hidden));
    }
}

pub(crate) fn a_row_has_the_bits_that_it_has_alone() {
    const MOST: usize = 256;
    let gpu = gpu();
    for (shape, weights) in SHAPES
        .iter()
        .flat_map(|shape| [(*shape, WeightFormat::Bf16), (*shape, WeightFormat::Fp8)])
        // GEMMs of the shared expert depend on the number of rows.
        .map(|(shape, weights)| (ExpertShape { shared: 0, ..shape }, weights))
        .filter(|(shape, weights)| *weights == WeightFormat::Bf16 || fits_fp8(shape))
    {
        let router = Scaled(Random { rows: shape.count, cols: shape.hidden, seed: 77 });
        let mixture = (shape, ExpertChoice::softmax(shape.chosen, true));
        let (mut cuda, mut mixture) = with_sources(shape, weights, &router, |sources| {
            gpu.backend_with(CudaOptions::new(weights), |backend| {
                Mixture::new(backend, MOST, mixture, sources)
            })
        });
        let x = numbers(5, MOST * shape.hidden);
        let all = mixture.run(&mut cuda, MOST, &x);
        for row in [0, 1, 100, 255] {
            let part = row * shape.hidden..(row + 1) * shape.hidden;
            let alone = mixture.run(&mut cuda, 1, &x[part.clone()]);
            for (alone, all) in alone.iter().zip(&all) {
                assert!(*alone == all[part.clone()], "{shape:?}, {weights}, row {row}");
            }
        }
    }
}

/// Expert e adds its weight to element e of the output. So outputs show all choices and weights.
/// Logits are exact, and many are equal.
pub(crate) fn chosen_experts_and_weights_match_cpu() {
    const SIZE: usize = 8;
    let gpu = gpu();
    let softmax = ExpertChoice::softmax;
    let sigmoid = |count| ExpertChoice { score: ExpertScore::Sigmoid, ..softmax(count, true) };
    let grouped = |choice, groups, groups_chosen| ExpertChoice { groups, groups_chosen, ..choice };
    for (count, choice, has_bias) in [
        (128, softmax(8, true), false),
        (64, softmax(8, false), false),
        (64, softmax(6, true), true),
        (160, ExpertChoice { scale: 2.5, ..sigmoid(8) }, true),
        (24, grouped(sigmoid(4), 6, 2), true),
        (256, grouped(ExpertChoice { scale: 2.5, ..sigmoid(8) }, 8, 4), true),
        (256, grouped(softmax(6, false), 32, 3), false),
        (40, ExpertChoice { is_normalized: false, ..sigmoid(32) }, true),
        (6, grouped(sigmoid(2), 6, 2), true),
        (32, ExpertChoice { score: ExpertScore::BiasedSoftmax, ..softmax(4, true) }, true),
        (128, ExpertChoice { score: ExpertScore::BiasedSoftmax, ..softmax(4, true) }, true),
    ] {
        let hidden = 264;
        let shape = ExpertShape { count, chosen: choice.count, hidden, size: SIZE, shared: 0 };
        // silu(4 x0) * x0 with x0 = 1.
        let expert = |index: usize, _: usize| -> [Box<dyn RowSource>; 2] {
            let elements = vec![(0, 0, 4.0), (SIZE, 0, 1.0)];
            let gate_up = Sparse { rows: 2 * SIZE, cols: hidden, elements };
            let elements = vec![(index, 0, 1.0)];
            [Box::new(gate_up), Box::new(Sparse { rows: hidden, cols: SIZE, elements })]
        };
        let bias = numbers(12, count).iter().map(|value| (value * 16.0).round() / 64.0).collect();
        let router = Eighths(Random { rows: count, cols: hidden, seed: 77 });
        let bias = has_bias.then_some(bias);
        let sources = Sources {
            router: &router,
            shared_router: None,
            bias,
            expert: &expert,
            biases: Vec::new(),
            activation: GatedActivation::Silu,
        };
        let options = CudaOptions::new(WeightFormat::Bf16);
        let (mut cuda, mut on_gpu) = gpu.backend_with(options, |backend| {
            Mixture::new(backend, ROWS_MAX, (shape, choice), &sources)
        });
        let mut cpu = cpu(WeightFormat::F32);
        let mut on_cpu = Mixture::new(&cpu, ROWS_MAX, (shape, choice), &sources);
        for rows in [1, 16, 33, 256, 300] {
            let mut x = numbers(5 + rows as u32, rows * hidden);
            x.iter_mut().for_each(|value| *value = (*value * 2.5).round());
            x.chunks_exact_mut(hidden).for_each(|row| row[0] = 1.0);
            let [found, ..] = on_gpu.run(&mut cuda, rows, &x);
            let [wanted, ..] = on_cpu.run(&mut cpu, rows, &x);
            for (at, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                let (row, expert) = (at / hidden, at % hidden);
                assert!(
                    (found - wanted).abs() <= 0.01 * wanted.abs(),
                    "{choice:?} of {count}, {rows} rows: row {row} has expert {expert} with {found}, not {wanted}"
                );
            }
        }
    }
}
