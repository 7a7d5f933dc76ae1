//! Root-mean-square normalisation: `out = x / sqrt(mean(x²) + eps) · weight`.

use super::{
    arithmetic::{LANES, sum_lanes},
    isa::Level,
};

/// One row. Bit-equal to [`reference::rms_norm`] at every level.
#[inline(always)]
fn row_of(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
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

/// Normalises every row of `x` (`[rows][weight.len()]`) into `out`.
pub(crate) fn rms_norm(level: Level, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    if level == Level::Reference {
        return reference::rms_norm(x, weight, eps, out);
    }
    level.run(|| {
        let width = weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            row_of(x, weight, eps, out);
        }
    });
}

/// `residual += x`, then normalises `residual` into `out`.
pub(crate) fn add_rms_norm(
    level: Level,
    residual: &mut [f32],
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    if level == Level::Reference {
        return reference::add_rms_norm(residual, x, weight, eps, out);
    }
    level.run(|| {
        let width = weight.len();
        for ((residual, x), out) in residual
            .chunks_exact_mut(width)
            .zip(x.chunks_exact(width))
            .zip(out.chunks_exact_mut(width))
        {
            for (residual, &x) in residual.iter_mut().zip(x) {
                *residual += x;
            }
            row_of(residual, weight, eps, out);
        }
    });
}

pub(crate) mod reference {
    use super::{LANES, sum_lanes};

    pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let width = weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
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
