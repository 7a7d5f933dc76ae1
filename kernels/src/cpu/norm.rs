//! Root-mean-square normalisation: `out = x / sqrt(mean(x²) + eps) · weight`.

use super::{
    arithmetic::{LANES, sum_lanes},
    isa::{Level, per_level},
    parts::Parts,
    threads::ThreadPool,
};

/// Normalises every row of `x` (`[rows][weight.len()]`) into `out`. Bit-equal to
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

/// `residual += x`, then normalises `residual` into `out`. Bit-equal to
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
    let residual = Parts::new(residual);
    pool.for_each_piece(out, task_len, |_, task, out| {
        let start = task * task_len;
        // SAFETY: the same rows as `out`'s, which this task alone has.
        let residual = unsafe { residual.slice(start, out.len()) };
        add_and_norm_rows(level, residual, &x[start..], weight, eps, out);
    });
}

per_level! {
    /// As many rows as `out` has.
    fn norm_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let width = weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            norm_row(x, weight, eps, out);
        }
    }
}

per_level! {
    /// As many rows as `out` has.
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

#[inline(always)]
fn norm_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
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
    let scale = 1.0 / (sum_lanes(lanes) / x.len() as f32 + eps).sqrt();
    for ((out, &value), &weight) in out.iter_mut().zip(x).zip(weight) {
        *out = value * scale * weight;
    }
}

pub(crate) mod reference {
    use super::{LANES, sum_lanes};

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

    proptest! {
        #[test]
        fn any_shape_agrees_with_the_reference(
            rows in 0_usize..40, width in 1_usize..700, threads in 1_usize..4
        ) {
            check(rows, width, threads);
        }
    }
}
