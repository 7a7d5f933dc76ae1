//! Mixture of experts: routing, the experts' feed-forward networks, and their weighted sum.
//!
//! Experts run one after the other over their rows. A row's outputs are added in the order of the experts, so the sum
//! does not depend on the other rows.

use super::{
    arithmetic::exp,
    isa::Level,
    matmul::{CpuMatrix, MatmulScratch, matmul},
    silu::silu_mul,
    threads::ThreadPool,
};
use crate::backend::{ExpertChoice, ExpertWeights};

/// Memory that steps reuse.
#[derive(Default)]
pub(crate) struct ExpertScratch {
    /// `[rows][experts]`.
    logits: Vec<f32>,
    /// Rows of each expert and their weights.
    lists: Vec<Vec<(usize, f32)>>,
    /// Inputs, intermediate values and outputs of one expert.
    inputs: Vec<f32>,
    gate_up: Vec<f32>,
    activated: Vec<f32>,
    outputs: Vec<f32>,
}

/// Computes the mixture; `x` and `out` are `[rows][hidden]`.
pub(crate) fn experts(
    level: Level,
    pool: &mut ThreadPool,
    (scratch, gemms): (&mut ExpertScratch, &mut MatmulScratch),
    x: &[f32],
    weights: &ExpertWeights<'_, CpuMatrix>,
    out: &mut [f32],
) {
    let ExpertWeights { router, experts, choice } = weights;
    let (hidden, count) = (router.cols(), router.rows());
    let rows = x.len() / hidden;
    let ExpertScratch { logits, lists, inputs, gate_up, activated, outputs } = scratch;
    logits.resize(rows * count, 0.0);
    matmul(level, pool, gemms, x, router, logits);
    lists.resize_with(count, Vec::new);
    lists.iter_mut().for_each(Vec::clear);
    for (row, logits) in logits.chunks_exact(count).enumerate() {
        for (expert, weight) in choose(logits, *choice) {
            lists[expert].push((row, weight));
        }
    }
    out.fill(0.0);
    for ((to_gate_up, down), list) in experts.iter().zip(lists).filter(|(_, list)| !list.is_empty())
    {
        inputs.clear();
        list.iter().for_each(|(row, _)| inputs.extend(&x[row * hidden..][..hidden]));
        gate_up.resize(list.len() * to_gate_up.rows(), 0.0);
        matmul(level, pool, gemms, inputs, to_gate_up, gate_up);
        activated.resize(list.len() * down.cols(), 0.0);
        silu_mul(level, pool, down.cols(), gate_up, activated);
        outputs.resize(list.len() * hidden, 0.0);
        matmul(level, pool, gemms, activated, down, outputs);
        for ((row, weight), output) in list.iter().zip(outputs.chunks_exact(hidden)) {
            let out = &mut out[row * hidden..][..hidden];
            out.iter_mut().zip(output).for_each(|(out, output)| *out += weight * output);
        }
    }
}

/// Returns the experts of a row and their weights, by falling probability. Among equal probabilities the lowest expert
/// comes first.
fn choose(
    logits: &[f32],
    ExpertChoice { count, is_normalized }: ExpertChoice,
) -> Vec<(usize, f32)> {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f32> = logits.iter().map(|logit| exp(logit - greatest)).collect();
    let sum: f32 = powers.iter().sum();
    let mut chosen: Vec<(usize, f32)> =
        powers.into_iter().map(|power| power / sum).enumerate().collect();
    // The sort is stable.
    chosen.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    chosen.truncate(count);
    if is_normalized {
        let sum: f32 = chosen.iter().map(|(_, weight)| weight).sum();
        chosen.iter_mut().for_each(|(_, weight)| *weight /= sum);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::{
            aligned::Slab,
            matmul::{pack, testing::Plain},
            testing::{levels, numbers},
        },
        layout::WeightFormat,
    };

    const HIDDEN: usize = 40;
    const SIZE: usize = 24;

    struct Mixture {
        router: CpuMatrix,
        experts: Vec<(CpuMatrix, CpuMatrix)>,
        choice: ExpertChoice,
    }

    impl Mixture {
        fn new(format: WeightFormat, count: usize, chosen: usize) -> Self {
            let matrix = |format, rows, cols, seed| {
                let source = Plain { rows, cols, values: numbers(seed, rows * cols) };
                let mut pool = ThreadPool::new(1, "test").unwrap();
                pack(&mut pool, &mut Slab::default(), format, &source)
            };
            let expert = |at: u32| {
                (matrix(format, 2 * SIZE, HIDDEN, 2 * at), matrix(format, HIDDEN, SIZE, 2 * at + 1))
            };
            Self {
                router: matrix(WeightFormat::F32, count, HIDDEN, 999),
                experts: (0..count as u32).map(expert).collect(),
                choice: ExpertChoice { count: chosen, is_normalized: true },
            }
        }

        fn run(&self, level: Level, threads: usize, x: &[f32]) -> Vec<f32> {
            let Self { router, experts: matrices, choice } = self;
            let weights = ExpertWeights { router, experts: matrices, choice: *choice };
            let mut pool = ThreadPool::new(threads, "test").unwrap();
            let mut scratch = (ExpertScratch::default(), MatmulScratch::default());
            let mut out = vec![f32::NAN; x.len()];
            experts(level, &mut pool, (&mut scratch.0, &mut scratch.1), x, &weights, &mut out);
            out
        }
    }

    #[test]
    fn a_row_has_the_bits_that_it_has_alone() {
        for format in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q8] {
            let mixture = Mixture::new(format, 16, 4);
            let x = numbers(5, 256 * HIDDEN);
            for level in levels() {
                let all = mixture.run(level, 2, &x);
                for row in [0, 1, 100, 255] {
                    let alone = mixture.run(level, 1, &x[row * HIDDEN..][..HIDDEN]);
                    assert!(
                        alone == all[row * HIDDEN..][..HIDDEN],
                        "{format}, {}, row {row}",
                        level.name()
                    );
                }
            }
        }
    }

    /// Computes the mixture in f64 from its definition.
    fn defined(mixture: &Mixture, x: &[f32]) -> Vec<f64> {
        let rows_of = |matrix: &CpuMatrix| -> Vec<Vec<f64>> {
            let mut row = vec![0.0; matrix.cols()];
            let rows = 0..matrix.rows();
            rows.map(|index| {
                matrix.copy_row(index, &mut row);
                row.iter().map(|value| f64::from(*value)).collect()
            })
            .collect()
        };
        let product = |rows: &[Vec<f64>], x: &[f64]| -> Vec<f64> {
            rows.iter().map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
        };
        let x: Vec<f64> = x.iter().map(|value| f64::from(*value)).collect();
        let powers: Vec<f64> =
            product(&rows_of(&mixture.router), &x).into_iter().map(f64::exp).collect();
        let mut order: Vec<usize> = (0..powers.len()).collect();
        order.sort_by(|a, b| powers[*b].total_cmp(&powers[*a]));
        let chosen = &order[..mixture.choice.count];
        let sum: f64 = chosen.iter().map(|expert| powers[*expert]).sum();
        let mut out = vec![0.0; x.len()];
        for expert in chosen {
            let (gate_up, down) = &mixture.experts[*expert];
            let gate_up = product(&rows_of(gate_up), &x);
            let (gate, up) = gate_up.split_at(SIZE);
            let silu = |gate: f64| gate / (1.0 + (-gate).exp());
            let activated: Vec<f64> = gate.iter().zip(up).map(|(g, up)| silu(*g) * up).collect();
            let outputs = product(&rows_of(down), &activated);
            out.iter_mut().zip(outputs).for_each(|(out, it)| *out += it * powers[*expert] / sum);
        }
        out
    }

    #[test]
    fn mixture_equals_its_definition() {
        let x = numbers(3, 20 * HIDDEN);
        for (count, chosen) in [(1, 1), (5, 2), (16, 4), (16, 16)] {
            let mixture = Mixture::new(WeightFormat::F32, count, chosen);
            let out = mixture.run(Level::Reference, 1, &x);
            for (x, out) in x.chunks_exact(HIDDEN).zip(out.chunks_exact(HIDDEN)) {
                for (found, expected) in out.iter().zip(defined(&mixture, x)) {
                    let difference = (f64::from(*found) - expected).abs();
                    assert!(difference < 1e-3, "{chosen} of {count}: {difference}");
                }
            }
        }
    }

    /// All rows are equal, so all go to the same experts, and the other experts have no rows.
    #[test]
    fn experts_without_rows_add_nothing() {
        let mixture = Mixture::new(WeightFormat::F32, 8, 1);
        let row = numbers(7, HIDDEN);
        let out = mixture.run(Level::Reference, 1, &row.repeat(33));
        assert!(out.chunks_exact(HIDDEN).all(|it| *it == out[..HIDDEN]));
        assert!(out.iter().any(|value| *value != 0.0));
    }

    #[test]
    fn ties_go_to_the_lowest_experts() {
        let choice = |count, is_normalized| ExpertChoice { count, is_normalized };
        let chosen = choose(&[1.0, 3.0, 3.0, 0.0, 3.0], choice(2, true));
        assert_eq!(chosen, [(1, 0.5), (2, 0.5)]);
        let chosen = choose(&[0.0; 4], choice(3, false));
        assert_eq!(chosen, [(0, 0.25), (1, 0.25), (2, 0.25)]);
        // Large logits do not overflow.
        assert_eq!(choose(&[1e30, -1e30], choice(1, false)), [(0, 1.0)]);
    }
}
