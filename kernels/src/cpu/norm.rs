//! Root-mean-square normalization of rows or heads: `x / sqrt(mean(x²) + eps) · weight`.

use super::{
    arithmetic::{LANES, sum_lanes},
    disjoint_slice::DisjointSlice,
    isa::{Level, per_level},
    threads::ThreadPool,
};
use crate::backend::HeadShape;

/// Normalizes every row of `x` (`[rows][weight.len()]`) into `out`. Bit-equal to
/// [`reference::rms_norm`] at every level.
pub(crate) fn rms_norm(
    level: Level,
    pool: &mut ThreadPool,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    if level == Level::Reference || x.is_empty() {
        return reference::rms_norm(x, weight, eps, out);
    }
    let width = weight.len();
    let task_len = pool.rows_per_task(x.len() / width, width) * width;
    pool.for_each_piece(out, task_len, |_, task, out| {
        norm_rows(level, &x[task * task_len..], weight, eps, out);
    });
}

/// Normalizes every row of `x` (`[rows][weight.len()]`) in place. Bit-equal to
/// [`reference::rms_norm`] at every level.
pub(crate) fn rms_norm_in_place(
    level: Level,
    pool: &mut ThreadPool,
    weight: &[f32],
    eps: f32,
    x: &mut [f32],
) {
    if level == Level::Reference || x.is_empty() {
        let input = x.to_vec();
        return reference::rms_norm(&input, weight, eps, x);
    }
    let width = weight.len();
    let task_len = pool.rows_per_task(x.len() / width, width) * width;
    pool.for_each_piece(x, task_len, |_, _, rows| norm_in_place(level, rows, weight, eps));
}

/// Computes `residual += x`, then normalizes `residual` into `out`. Bit-equal to
/// [`reference::add_rms_norm`] at every level.
pub(crate) fn add_rms_norm(
    level: Level,
    pool: &mut ThreadPool,
    residual: &mut [f32],
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    if level == Level::Reference || x.is_empty() {
        return reference::add_rms_norm(residual, x, weight, eps, out);
    }
    let width = weight.len();
    let task_len = pool.rows_per_task(x.len() / width, width) * width;
    let residual = DisjointSlice::new(residual);
    pool.for_each_piece(out, task_len, |_, task, out| {
        let start = task * task_len;
        // SAFETY: the same rows as `out`'s, which belong to this task alone.
        let residual = unsafe { residual.slice(start, out.len()) };
        add_and_norm_rows(level, residual, &x[start..], weight, eps, out);
    });
}

per_level! {
    /// Normalizes as many rows of `x` as `out` has.
    fn norm_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let width = weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            norm_row(x, weight, eps, out);
        }
    }
}

per_level! {
    /// Adds and normalizes as many rows as `out` has.
    fn add_and_norm_rows(
        residual: &mut [f32],
        x: &[f32],
        weight: &[f32],
        eps: f32,
        out: &mut [f32],
    ) {
        let width = weight.len();
        let rows = residual.chunks_exact_mut(width).zip(x.chunks_exact(width));
        for ((residual, x), out) in rows.zip(out.chunks_exact_mut(width)) {
            for (residual, &x) in residual.iter_mut().zip(x) {
                *residual += x;
            }
            norm_row(residual, weight, eps, out);
        }
    }
}

/// Normalizes each query head of every row of `qkv` (`[rows][qkv_width]`) with `query_weight` and
/// each key head with `key_weight`; value heads do not change. Bit-equal to
/// [`reference::norm_heads`] at every level.
pub(crate) fn norm_heads(
    level: Level,
    pool: &mut ThreadPool,
    shape: HeadShape,
    query_weight: &[f32],
    key_weight: &[f32],
    eps: f32,
    qkv: &mut [f32],
) {
    let width = shape.qkv_width();
    if level == Level::Reference || qkv.is_empty() {
        return reference::norm_heads(shape, query_weight, key_weight, eps, qkv);
    }
    let task_rows = pool.rows_per_task(qkv.len() / width, width);
    pool.for_each_piece(qkv, task_rows * width, |_, _, rows| {
        for row in rows.chunks_exact_mut(width) {
            let (queries, rest) = row.split_at_mut(shape.query_width());
            let (keys, _values) = rest.split_at_mut(shape.kv_heads * shape.head_dim);
            norm_in_place(level, queries, query_weight, eps);
            norm_in_place(level, keys, key_weight, eps);
        }
    });
}

per_level! {
    /// Normalizes each `weight.len()` elements in place.
    fn norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
        for x in x.chunks_exact_mut(weight.len()) {
            let scale = scale(x, eps);
            for (x, &weight) in x.iter_mut().zip(weight) {
                *x = *x * scale * weight;
            }
        }
    }
}

/// Returns the sums of squares of all queries and of all keys of every row of `qkv`: `[rows][2]`.
pub(crate) fn projection_squares(shape: HeadShape, qkv: &[f32]) -> Vec<f32> {
    let key_end = shape.query_width() + shape.kv_heads * shape.head_dim;
    let squares = |row: &[f32]| {
        let (queries, keys) = row[..key_end].split_at(shape.query_width());
        [sum_of_squares(queries), sum_of_squares(keys)]
    };
    qkv.chunks_exact(shape.qkv_width()).flat_map(squares).collect()
}

/// Normalizes the queries of every row of `qkv` together, and the keys. `squares` are the sums of
/// [`projection_squares`] over `ranks` ranks.
pub(crate) fn norm_projections(
    shape: HeadShape,
    weights: (&[f32], &[f32]),
    squares: &[f32],
    ranks: usize,
    eps: f32,
    qkv: &mut [f32],
) {
    for (row, squares) in qkv.chunks_exact_mut(shape.qkv_width()).zip(squares.as_chunks::<2>().0) {
        let (queries, rest) = row.split_at_mut(shape.query_width());
        for (x, weight, sum) in [(queries, weights.0, squares[0]), (rest, weights.1, squares[1])] {
            let scale = 1.0 / (sum / (weight.len() * ranks) as f32 + eps).sqrt();
            x.iter_mut().zip(weight).for_each(|(x, weight)| *x = *x * scale * weight);
        }
    }
}

#[inline(always)]
fn norm_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = scale(x, eps);
    for ((out, &value), &weight) in out.iter_mut().zip(x).zip(weight) {
        *out = value * scale * weight;
    }
}

/// Returns the factor that makes the mean square of `x` one.
#[inline(always)]
pub(super) fn scale(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
pub(super) fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (groups, rest) = x.as_chunks::<LANES>();
    for group in groups {
        for (lane, &value) in lanes.iter_mut().zip(group) {
            *lane += value * value;
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane += value * value;
    }
    sum_lanes(lanes)
}

pub(crate) mod reference {
    use super::{HeadShape, LANES, sum_lanes};

    pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let width = weight.len();
        for row in 0..x.len() / width {
            let (x, out) = (&x[row * width..][..width], &mut out[row * width..][..width]);
            let mut lanes = [0.0; LANES];
            for (i, value) in x.iter().enumerate() {
                lanes[i % LANES] += value * value;
            }
            let scale = 1.0 / (sum_lanes(lanes) / width as f32 + eps).sqrt();
            for i in 0..width {
                out[i] = x[i] * scale * weight[i];
            }
        }
    }

    pub(crate) fn add_rms_norm(
        residual: &mut [f32],
        x: &[f32],
        weight: &[f32],
        eps: f32,
        out: &mut [f32],
    ) {
        for (residual, x) in residual.iter_mut().zip(x) {
            *residual += x;
        }
        rms_norm(residual, weight, eps, out);
    }

    pub(crate) fn norm_heads(
        shape: HeadShape,
        query_weight: &[f32],
        key_weight: &[f32],
        eps: f32,
        qkv: &mut [f32],
    ) {
        for row in qkv.chunks_exact_mut(shape.qkv_width()) {
            for head in 0..shape.query_heads + shape.kv_heads {
                let weight = if head < shape.query_heads { query_weight } else { key_weight };
                let head = &mut row[head * shape.head_dim..][..shape.head_dim];
                let x = head.to_vec();
                rms_norm(&x, weight, eps, head);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::testing::{bits, levels, numbers};

    fn check(rows: usize, width: usize, threads: usize) {
        let mut pool = ThreadPool::new(threads, "test").unwrap();
        let (x, weight) = (numbers(1, rows * width), numbers(2, width));
        let first = numbers(3, rows * width);
        let mut want = vec![0.0; x.len()];
        reference::rms_norm(&x, &weight, 1e-5, &mut want);
        let (mut want_sum, mut want_out) = (first.clone(), want.clone());
        reference::add_rms_norm(&mut want_sum, &x, &weight, 1e-5, &mut want_out);
        for level in levels() {
            let mut got = vec![f32::NAN; x.len()];
            rms_norm(level, &mut pool, &x, &weight, 1e-5, &mut got);
            assert_eq!(bits(&got), bits(&want), "{rows}x{width} {}", level.name());
            let mut in_place = x.clone();
            rms_norm_in_place(level, &mut pool, &weight, 1e-5, &mut in_place);
            assert_eq!(bits(&in_place), bits(&want), "{rows}x{width} {}", level.name());
            let mut sum = first.clone();
            add_rms_norm(level, &mut pool, &mut sum, &x, &weight, 1e-5, &mut got);
            assert_eq!(bits(&sum), bits(&want_sum), "{rows}x{width} {}", level.name());
            assert_eq!(bits(&got), bits(&want_out), "{rows}x{width} {}", level.name());
        }
    }

    #[test]
    fn rows_and_widths_of_models_agree_with_the_reference() {
        for (rows, width) in [(0, 576), (1, 576), (1, 1), (3, 2048), (100, 576), (300, 577)] {
            check(rows, width, 2);
        }
    }

    #[test]
    fn a_row_of_zeros_stays_zero() {
        let mut pool = ThreadPool::new(1, "test").unwrap();
        let mut out = [1.0; 4];
        rms_norm(Level::Baseline, &mut pool, &[0.0; 4], &[1.0; 4], 1e-5, &mut out);
        assert_eq!(out, [0.0; 4]);
    }

    #[test]
    fn the_mean_square_of_a_normalised_row_is_one() {
        let mut pool = ThreadPool::new(1, "test").unwrap();
        let x = numbers(5, 1000);
        let mut out = vec![0.0; 1000];
        rms_norm(Level::Baseline, &mut pool, &x, &vec![1.0; 1000], 0.0, &mut out);
        let mean: f32 = out.iter().map(|x| x * x).sum::<f32>() / 1000.0;
        assert!((mean - 1.0).abs() < 1e-4, "{mean}");
    }

    /// Two ranks with two of four query heads and one of two key heads each have the values of one
    /// rank.
    #[test]
    fn ranks_normalize_the_projection_of_the_whole_model() {
        let shape = HeadShape { query_heads: 4, kv_heads: 2, head_dim: 6 };
        let half = HeadShape { query_heads: 2, kv_heads: 1, ..shape };
        let (rows, width) = (5, shape.qkv_width());
        let x = numbers(1, rows * width);
        let (query, key) = (numbers(2, 24), numbers(3, 12));
        let mut whole = x.clone();
        let squares = projection_squares(shape, &x);
        norm_projections(shape, (&query, &key), &squares, 1, 1e-5, &mut whole);
        for (row, x) in whole.chunks_exact(width).zip(x.chunks_exact(width)) {
            let mut expected = vec![0.0; 24];
            reference::rms_norm(&x[..24], &query, 1e-5, &mut expected);
            assert_eq!(row[..24], expected);
            reference::rms_norm(&x[24..36], &key, 1e-5, &mut expected[..12]);
            assert_eq!(row[24..36], expected[..12]);
            assert_eq!(row[36..], x[36..]);
        }

        let of_rank = |rank: usize| -> Vec<f32> {
            let heads = [12 * rank, 24 + 6 * rank, 36 + 6 * rank].into_iter().zip([12, 6, 6]);
            let heads: Vec<_> = heads.map(|(first, len)| first..first + len).collect();
            let row = |row: &[f32]| -> Vec<f32> {
                heads.iter().flat_map(|heads| row[heads.clone()].to_vec()).collect()
            };
            x.chunks_exact(width).flat_map(row).collect()
        };
        let ranks = [of_rank(0), of_rank(1)];
        let sums = ranks.each_ref().map(|x| projection_squares(half, x));
        let squares: Vec<f32> = sums[0].iter().zip(&sums[1]).map(|(a, b)| a + b).collect();
        for (rank, mut x) in ranks.into_iter().enumerate() {
            let weights = (&query[12 * rank..][..12], &key[6 * rank..][..6]);
            norm_projections(half, weights, &squares, 2, 1e-5, &mut x);
            for (row, whole) in x.chunks_exact(width / 2).zip(whole.chunks_exact(width)) {
                let expected = whole[12 * rank..][..12].iter().chain(&whole[24 + 6 * rank..][..6]);
                for (found, expected) in row.iter().zip(expected) {
                    assert!((found - expected).abs() < 1e-6, "rank {rank}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_shape_agrees_with_the_reference(
            rows in 0_usize..40, width in 1_usize..700, threads in 1_usize..4
        ) {
            check(rows, width, threads);
        }

        #[test]
        fn heads_of_any_shape_agree_with_the_reference(
            rows in 0_usize..20,
            kv_heads in 1_usize..4,
            group in 1_usize..4,
            half in 1_usize..70,
            threads in 1_usize..4,
        ) {
            let shape = HeadShape { query_heads: kv_heads * group, kv_heads, head_dim: 2 * half };
            let mut pool = ThreadPool::new(threads, "test").unwrap();
            let qkv = numbers(1, rows * shape.qkv_width());
            let (query, key) = (numbers(2, shape.head_dim), numbers(3, shape.head_dim));
            let mut want = qkv.clone();
            reference::norm_heads(shape, &query, &key, 1e-6, &mut want);
            let values = shape.query_width() + kv_heads * shape.head_dim;
            for (row, before) in
                want.chunks(shape.qkv_width()).zip(qkv.chunks(shape.qkv_width()))
            {
                prop_assert_eq!(&row[values..], &before[values..]);
            }
            for level in levels() {
                let mut got = qkv.clone();
                norm_heads(level, &mut pool, shape, &query, &key, 1e-6, &mut got);
                prop_assert_eq!(bits(&got), bits(&want), "{}", level.name());
            }
        }
    }
}
