//! Mixtures of experts: routing, lists, grouped GEMMs and the weighted sum against the CPU.

use kernels::{
    Backend, RowSource, WeightFormat,
    backend::{ExpertChoice, ExpertShape, ExpertWeights},
    cuda::CudaOptions,
};

use super::{
    bench::{Bench, Random, cpu, gpu, numbers},
    model::rms,
};

const EPS: f32 = 1e-5;

/// A matrix whose outputs have about the magnitude of its inputs.
struct Scaled(Random);

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
struct Zeros(usize, usize);

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

/// A mixture of experts and its buffers on a backend.
struct Mixture<B: Backend> {
    router: B::Matrix,
    experts: Vec<(B::Matrix, B::Matrix)>,
    choice: ExpertChoice,
    norm: B::Vector,
    buffers: B::ExpertBuffers,
    x: B::Buffer,
    delta: B::Buffer,
    residual: B::Buffer,
}

impl<B: Bench> Mixture<B> {
    fn new(backend: &B, rows_max: usize, shape: ExpertShape, router: &dyn RowSource) -> Self {
        let ExpertShape { count, chosen, hidden, size } = shape;
        let matrix = |rows, cols, seed| backend.matrix(&Scaled(Random { rows, cols, seed }));
        let expert = |at: u32| (matrix(2 * size, hidden, 2 * at), matrix(hidden, size, 2 * at + 1));
        Self {
            router: backend.router(router),
            experts: (0..count as u32).map(expert).collect(),
            choice: ExpertChoice::softmax(chosen, count % 2 == 0),
            norm: backend.vector(&numbers(3, hidden)),
            buffers: backend.expert_buffers(rows_max, shape),
            x: backend.buffer(rows_max, hidden),
            delta: backend.buffer(rows_max, hidden),
            residual: backend.wide_buffer(rows_max, hidden),
        }
    }

    /// Returns the mixture, and residual stream and norm after its addition.
    fn run(&mut self, backend: &mut B, rows: usize, x: &[f32]) -> [Vec<f32>; 3] {
        let Self { router, experts, choice, norm, buffers, x: input, delta, residual } = self;
        let (bias, shared, choice) = (None, None, *choice);
        let weights = ExpertWeights { router, bias, experts, first: 0, shared, choice };
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

const SHAPES: [ExpertShape; 6] = [
    ExpertShape { count: 128, chosen: 8, hidden: 256, size: 96 },
    ExpertShape { count: 8, chosen: 2, hidden: 512, size: 448 },
    ExpertShape { count: 5, chosen: 5, hidden: 72, size: 40 },
    ExpertShape { count: 1, chosen: 1, hidden: 8, size: 8 },
    ExpertShape { count: 60, chosen: 4, hidden: 1032, size: 136 },
    ExpertShape { count: 512, chosen: 10, hidden: 64, size: 64 },
];
const ROWS: [usize; 17] = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 131, 256, 257, 300];
const ROWS_MAX: usize = 300;

fn assert_close(found: &[Vec<f32>; 3], wanted: &[Vec<f32>; 3], what: &str) {
    for (index, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        assert_eq!(found.len(), wanted.len(), "{what}");
        let size = rms(wanted.iter().copied());
        for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            let error = (found - wanted).abs();
            // A comparison with NaN is false.
            let is_near = error <= 0.03 * (size + wanted.abs());
            assert!(is_near, "{what}, result {index}: element {at} is {found}, not {wanted}");
        }
    }
}

fn compare(shape: ExpertShape, router: &dyn RowSource, input: impl Fn(usize) -> Vec<f32>) {
    let gpu = gpu();
    let options = CudaOptions::new(WeightFormat::Bf16);
    let (mut cuda, mut on_gpu) =
        gpu.backend_with(options, |backend| Mixture::new(backend, ROWS_MAX, shape, router));
    let mut cpu = cpu(WeightFormat::Bf16);
    let mut on_cpu = Mixture::new(&cpu, ROWS_MAX, shape, router);
    for rows in ROWS {
        let x = input(rows);
        let found = on_gpu.run(&mut cuda, rows, &x);
        let wanted = on_cpu.run(&mut cpu, rows, &x);
        assert_close(&found, &wanted, &format!("{shape:?}, {rows} rows"));
    }
}

pub(crate) fn mixtures_of_any_size_and_rows_match_cpu() {
    for shape in SHAPES {
        let router = Random { rows: shape.count, cols: shape.hidden, seed: 77 };
        let router = Scaled(router);
        compare(shape, &router, |rows| numbers(5 + rows as u32, rows * shape.hidden));
    }
}

/// All rows go to the same experts, and the other experts have no rows.
pub(crate) fn equal_rows_and_equal_logits_match_cpu() {
    for shape in &SHAPES[..3] {
        let router = Random { rows: shape.count, cols: shape.hidden, seed: 77 };
        let row = numbers(9, shape.hidden);
        compare(*shape, &Scaled(router), |rows| row.repeat(rows));
        // Ties go to the lowest experts.
        let router = Zeros(shape.count, shape.hidden);
        compare(*shape, &router, |rows| numbers(8, rows * shape.hidden));
    }
}

pub(crate) fn a_row_has_the_bits_that_it_has_alone() {
    const MOST: usize = 256;
    let gpu = gpu();
    for shape in SHAPES {
        let router = Scaled(Random { rows: shape.count, cols: shape.hidden, seed: 77 });
        let options = CudaOptions::new(WeightFormat::Bf16);
        let (mut cuda, mut mixture) =
            gpu.backend_with(options, |backend| Mixture::new(backend, MOST, shape, &router));
        let x = numbers(5, MOST * shape.hidden);
        let all = mixture.run(&mut cuda, MOST, &x);
        for row in [0, 1, 100, 255] {
            let part = row * shape.hidden..(row + 1) * shape.hidden;
            let alone = mixture.run(&mut cuda, 1, &x[part.clone()]);
            for (alone, all) in alone.iter().zip(&all) {
                assert!(*alone == all[part.clone()], "{shape:?}, row {row}");
            }
        }
    }
}
