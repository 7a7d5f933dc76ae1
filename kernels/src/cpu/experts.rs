//! Mixture of experts: routing, the experts' feed-forward networks, and their weighted sum.
//!
//! Experts run one after the other over their rows, the shared expert last over all rows. A row's
//! outputs are added in this order, so the sum does not depend on the other rows.

use super::{
    arithmetic::{exp, sigmoid},
    bias::add_bias,
    buffer::CpuVector,
    gated::activate,
    isa::Level,
    matmul::{CpuMatrix, MatmulScratch, matmul},
    threads::ThreadPool,
};
use crate::{
    backend::{
        ExpertChoice, ExpertLoad, ExpertScore, ExpertWeights, GatedActivation, SharedExpert,
    },
    shard::Shard,
};

/// Memory that steps reuse.
#[derive(Default)]
pub struct ExpertScratch {
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

impl ExpertScratch {
    /// Returns the load of the last mixture.
    pub(crate) fn load(&self, shard: Shard) -> ExpertLoad {
        let rows: Vec<u64> = self.lists.iter().map(|list| list.len() as u64).collect();
        let (_, rows) = rows.split_last().expect("a mixture was computed");
        let of_rank = |rank: Shard| rows[rank.experts(rows.len())].iter().sum::<u64>();
        ExpertLoad {
            layers: 1,
            distinct: rows.iter().filter(|rows| **rows > 0).count() as u64,
            rows: shard.all().map(of_rank).sum(),
            rows_max: shard.all().map(of_rank).max().unwrap_or(0) * shard.rank_count() as u64,
        }
    }
}

/// Computes the mixture; `x` and `out` are `[rows][hidden]`.
pub(crate) fn experts(
    level: Level,
    pool: &mut ThreadPool,
    (scratch, gemms): (&mut ExpertScratch, &mut MatmulScratch),
    x: &[f32],
    weights: &ExpertWeights<'_, CpuMatrix, CpuVector>,
    out: &mut [f32],
) {
    let ExpertWeights { router, bias, experts, biases, activation, first, shared, choice } =
        weights;
    let (hidden, count) = (router.cols(), router.rows());
    let rows = x.len() / hidden;
    let ExpertScratch { logits, lists, inputs, gate_up, activated, outputs } = scratch;
    logits.resize(rows * count, 0.0);
    matmul(level, pool, gemms, x, router, logits);
    lists.resize_with(count + 1, Vec::new);
    lists.iter_mut().for_each(Vec::clear);
    let bias = bias.map(CpuVector::values);
    for (row, logits) in logits.chunks_exact(count).enumerate() {
        for (expert, weight) in choose(logits, bias, *choice) {
            lists[expert].push((row, weight));
        }
    }
    let own = *first..first + experts.len();
    let experts = experts.iter().enumerate();
    let experts =
        experts.map(|(index, (gate_up, down))| (gate_up, down, biases.get(index), *activation));
    let shared = shared.as_ref().map(|SharedExpert { gate_up: to_gate_up, down, router }| {
        logits.resize(rows, 0.0);
        if let Some(router) = router {
            matmul(level, pool, gemms, x, router, logits);
        }
        let weight = |logit: &f32| if router.is_some() { sigmoid(*logit) } else { 1.0 };
        lists[count].extend(logits.iter().map(weight).enumerate());
        (*to_gate_up, *down, None, GatedActivation::Silu)
    });
    out.fill(0.0);
    let (lists, of_shared) = lists.split_at(count);
    let lists = lists[own].iter().chain(of_shared);
    for ((to_gate_up, down, biases, activation), list) in experts.chain(shared).zip(lists) {
        if list.is_empty() {
            continue;
        }
        inputs.clear();
        list.iter().for_each(|(row, _)| inputs.extend(&x[row * hidden..][..hidden]));
        gate_up.resize(list.len() * to_gate_up.rows(), 0.0);
        matmul(level, pool, gemms, inputs, to_gate_up, gate_up);
        if let Some((bias, _)) = biases {
            add_bias(level, pool, bias.values(), gate_up);
        }
        activated.resize(list.len() * down.cols(), 0.0);
        activate(level, pool, down.cols(), (activation, gate_up), activated);
        outputs.resize(list.len() * hidden, 0.0);
        matmul(level, pool, gemms, activated, down, outputs);
        if let Some((_, bias)) = biases.filter(|(_, bias)| !bias.values().is_empty()) {
            add_bias(level, pool, bias.values(), outputs);
        }
        for ((row, weight), output) in list.iter().zip(outputs.chunks_exact(hidden)) {
            let out = &mut out[row * hidden..][..hidden];
            out.iter_mut().zip(output).for_each(|(out, output)| *out += weight * output);
        }
    }
}

/// Returns the experts of a row and their weights, by falling score. Among equal scores the lowest
/// expert comes first.
fn choose(logits: &[f32], bias: Option<&[f32]>, choice: ExpertChoice) -> Vec<(usize, f32)> {
    /// Keeps the division finite when all scores are 0, as the families with sigmoid scores do.
    const SUM_MIN: f32 = 1e-20;
    /// The bound of ERNIE. Without a bias the greatest scores add up to more.
    const SOFTMAX_SUM_MIN: f32 = 1e-12;
    let with_bias = |values: &[f32]| {
        let mut biased = values.to_vec();
        biased.iter_mut().zip(bias.unwrap_or_default()).for_each(|(value, bias)| *value += bias);
        biased
    };
    let scores = match choice.score {
        ExpertScore::Softmax => softmax(logits),
        ExpertScore::BiasedSoftmax => softmax(&with_bias(logits)),
        ExpertScore::Sigmoid => logits.iter().copied().map(sigmoid).collect(),
    };
    let biased = match choice.score {
        ExpertScore::BiasedSoftmax => scores.clone(),
        ExpertScore::Softmax | ExpertScore::Sigmoid => with_bias(&scores),
    };
    let mut order: Vec<usize> = if choice.groups == 1 {
        (0..scores.len()).collect()
    } else {
        let size = scores.len() / choice.groups;
        let mut groups: Vec<(usize, f32)> =
            biased.chunks_exact(size).map(best_two).enumerate().collect();
        groups.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        groups.truncate(choice.groups_chosen);
        groups.sort_unstable_by_key(|(group, _)| *group);
        groups.iter().flat_map(|(group, _)| group * size..(group + 1) * size).collect()
    };
    // The sorts of scores are stable.
    order.sort_by(|a, b| biased[*b].total_cmp(&biased[*a]));
    order.truncate(choice.count);
    let sum = match (choice.is_normalized, choice.score) {
        (false, _) => 1.0,
        // A bias may choose experts of scores near 0.
        (true, ExpertScore::Softmax | ExpertScore::BiasedSoftmax) => {
            order.iter().map(|expert| scores[*expert]).sum::<f32>().max(SOFTMAX_SUM_MIN)
        }
        (true, ExpertScore::Sigmoid) => {
            order.iter().map(|expert| scores[*expert]).sum::<f32>() + SUM_MIN
        }
    };
    order.into_iter().map(|expert| (expert, scores[expert] / sum * choice.scale)).collect()
}

fn softmax(logits: &[f32]) -> Vec<f32> {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f32> = logits.iter().map(|logit| exp(logit - greatest)).collect();
    let sum: f32 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

/// Returns the sum of the two greatest scores.
fn best_two(scores: &[f32]) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &score in scores {
        if score > first {
            (first, second) = (score, first);
        } else {
            second = second.max(score);
        }
    }
    first + second
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
        shared_router: CpuMatrix,
        has_shared: bool,
        choice: ExpertChoice,
        router_bias: Option<CpuVector>,
        biases: Vec<(CpuVector, CpuVector)>,
        activation: GatedActivation,
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
                shared_router: matrix(WeightFormat::F32, 1, HIDDEN, 998),
                has_shared: false,
                choice: ExpertChoice::softmax(chosen, true),
                router_bias: None,
                biases: Vec::new(),
                activation: GatedActivation::Silu,
            }
        }

        /// Gives the mixture the biases and the activation of gpt-oss.
        fn with_biases(self) -> Self {
            let bias = |seed, len| CpuVector::new(&numbers(seed, len));
            let biases = |at: u32| (bias(2 * at + 500, 2 * SIZE), bias(2 * at + 501, HIDDEN));
            Self {
                choice: ExpertChoice { score: ExpertScore::BiasedSoftmax, ..self.choice },
                router_bias: Some(bias(499, self.experts.len())),
                biases: (0..self.experts.len() as u32).map(biases).collect(),
                activation: GatedActivation::ClampedSwiGlu { alpha: 1.702, limit: 0.5 },
                ..self
            }
        }

        /// Makes the first expert a shared expert, too.
        fn with_shared(self) -> Self {
            Self { has_shared: true, ..self }
        }

        fn run(&self, level: Level, threads: usize, x: &[f32]) -> Vec<f32> {
            let Self { router, experts: matrices, shared_router, has_shared, choice, .. } = self;
            let (bias, biases, activation) =
                (self.router_bias.as_ref(), &*self.biases, self.activation);
            let (gate_up, down) = &matrices[0];
            let shared = SharedExpert { gate_up, down, router: Some(shared_router) };
            let shared = has_shared.then_some(shared);
            let (experts_of, choice) = (matrices.as_slice(), *choice);
            let weights = ExpertWeights {
                router,
                bias,
                experts: experts_of,
                biases,
                activation,
                first: 0,
                shared,
                choice,
            };
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
            let mixture = Mixture::new(format, 16, 4).with_shared().with_biases();
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
        let add = |values: Vec<f64>, bias: Option<&CpuVector>| -> Vec<f64> {
            let bias =
                bias.map_or(&[][..], CpuVector::values).iter().chain(std::iter::repeat(&0.0));
            values.into_iter().zip(bias).map(|(value, bias)| value + f64::from(*bias)).collect()
        };
        let logits = add(product(&rows_of(&mixture.router), &x), mixture.router_bias.as_ref());
        let powers: Vec<f64> = logits.into_iter().map(f64::exp).collect();
        let mut order: Vec<usize> = (0..powers.len()).collect();
        order.sort_by(|a, b| powers[*b].total_cmp(&powers[*a]));
        let chosen = &order[..mixture.choice.count];
        let sum: f64 = chosen.iter().map(|expert| powers[*expert]).sum();
        let mut weights: Vec<_> =
            chosen.iter().map(|expert| (*expert, powers[*expert] / sum)).collect();
        if mixture.has_shared {
            let logit = product(&rows_of(&mixture.shared_router), &x)[0];
            weights.push((0, 1.0 / (1.0 + (-logit).exp())));
        }
        let mut out = vec![0.0; x.len()];
        for (expert, weight) in weights {
            let (gate_up, down) = &mixture.experts[expert];
            let biases = mixture.biases.get(expert);
            let gate_up = add(product(&rows_of(gate_up), &x), biases.map(|it| &it.0));
            let (gate, up) = gate_up.split_at(SIZE);
            let sigmoid = |gate: f64| 1.0 / (1.0 + (-gate).exp());
            let activate = |(&g, &u): (&f64, &f64)| match mixture.activation {
                GatedActivation::Silu => g * sigmoid(g) * u,
                GatedActivation::GeluTanh => unreachable!("no mixture has it"),
                GatedActivation::ClampedSwiGlu { alpha, limit } => {
                    let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                    let g = g.min(limit);
                    g * sigmoid(alpha * g) * (u.clamp(-limit, limit) + 1.0)
                }
            };
            let activated: Vec<f64> = gate.iter().zip(up).map(activate).collect();
            let outputs = add(product(&rows_of(down), &activated), biases.map(|it| &it.1));
            out.iter_mut().zip(outputs).for_each(|(out, it)| *out += it * weight);
        }
        out
    }

    #[test]
    fn mixture_equals_its_definition() {
        let x = numbers(3, 20 * HIDDEN);
        for (count, chosen) in [(1, 1), (5, 2), (16, 4), (16, 16)] {
            let mixture = Mixture::new(WeightFormat::F32, count, chosen);
            let mixture = match chosen {
                2 => mixture.with_shared(),
                4 => mixture.with_biases(),
                _ => mixture,
            };
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
        let choice = ExpertChoice::softmax;
        let chosen = choose(&[1.0, 3.0, 3.0, 0.0, 3.0], None, choice(2, true));
        assert_eq!(chosen, [(1, 0.5), (2, 0.5)]);
        let chosen = choose(&[0.0; 4], None, choice(3, false));
        assert_eq!(chosen, [(0, 0.25), (1, 0.25), (2, 0.25)]);
        // Large logits do not overflow.
        assert_eq!(choose(&[1e30, -1e30], None, choice(1, false)), [(0, 1.0)]);
        // Equal groups: the lowest group, and in it the lowest expert.
        let grouped = ExpertChoice { groups: 3, groups_chosen: 1, ..choice(1, true) };
        assert_eq!(choose(&[0.0; 6], None, grouped), [(0, 1.0)]);
        assert_eq!(choose(&[0.0, 0.0, 1.0, 2.0, 2.0, 1.0], None, grouped), [(3, 1.0)]);
    }

    fn sigmoid_choice(count: usize) -> ExpertChoice {
        ExpertChoice { score: ExpertScore::Sigmoid, ..ExpertChoice::softmax(count, true) }
    }

    #[test]
    fn correction_bias_changes_the_choice_but_not_the_weights() {
        let logits = [1.0, 0.0, -1.0, 0.5];
        let weights = logits.map(sigmoid);
        let without = choose(&logits, None, sigmoid_choice(2));
        assert_eq!(without.iter().map(|it| it.0).collect::<Vec<_>>(), [0, 3]);
        let bias = [0.0, 0.0, 2.0, 0.0];
        let sum = weights[2] + weights[0];
        let chosen = choose(&logits, Some(&bias), sigmoid_choice(2));
        assert_eq!(chosen, [(2, weights[2] / sum), (0, weights[0] / sum)]);
        let scaled = ExpertChoice { is_normalized: false, scale: 2.5, ..sigmoid_choice(1) };
        assert_eq!(choose(&logits, Some(&bias), scaled), [(2, weights[2] * 2.5)]);
        // Scores of 0 have no weight, and none is NaN.
        assert_eq!(choose(&[-200.0; 2], None, sigmoid_choice(1)), [(0, 0.0)]);
    }

    /// The best expert is in a group whose two best experts have a lower sum than those of the
    /// other group.
    #[test]
    fn experts_come_from_the_groups_with_the_greatest_sums() {
        let logits = [3.0, -4.0, -4.0, 1.0, 1.0, -4.0];
        let grouped = ExpertChoice { groups: 2, groups_chosen: 1, ..sigmoid_choice(2) };
        let chosen = choose(&logits, None, grouped);
        assert_eq!(chosen.iter().map(|it| it.0).collect::<Vec<_>>(), [3, 4]);
        let both = choose(&logits, None, ExpertChoice { groups_chosen: 2, ..grouped });
        assert_eq!(both, choose(&logits, None, sigmoid_choice(2)));
        // The bias counts in the sums of the groups.
        let bias = [0.0, 0.9, 0.0, 0.0, 0.0, 0.0];
        let chosen = choose(&logits, Some(&bias), grouped);
        assert_eq!(chosen.iter().map(|it| it.0).collect::<Vec<_>>(), [0, 1]);
    }
}
