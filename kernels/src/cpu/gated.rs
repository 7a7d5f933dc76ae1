//! Activation of gated networks, such as `out[i] = silu(gate[i]) · up[i]`.

use super::{
    arithmetic::{gelu_tanh, sigmoid, silu},
    isa::{Level, per_level},
    threads::ThreadPool,
};
use crate::backend::GatedActivation;

/// Computes the activation; `gate_up` is `[rows][2 · width]`, gates first, and `out` is
/// `[rows][width]`. Bit-equal to [`reference::activate`] at every level.
pub(crate) fn activate(
    level: Level,
    pool: &mut ThreadPool,
    width: usize,
    (activation, gate_up): (GatedActivation, &[f32]),
    out: &mut [f32],
) {
    if level == Level::Reference || out.is_empty() {
        return reference::activate(activation, width, gate_up, out);
    }
    let task_rows = pool.rows_per_task(out.len() / width, width);
    pool.for_each_piece(out, task_rows * width, |_, task, out| {
        activate_rows(level, activation, width, &gate_up[task * task_rows * 2 * width..], out);
    });
}

per_level! {
    /// Computes as many rows as `out` has.
    fn activate_rows(activation: GatedActivation, width: usize, gate_up: &[f32], out: &mut [f32]) {
        let rows = gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width));
        for (gate_up, out) in rows {
            let (gate, up) = gate_up.split_at(width);
            let values = out.iter_mut().zip(gate).zip(up);
            match activation {
                GatedActivation::Silu => {
                    for ((out, &gate), &up) in values {
                        *out = silu(gate) * up;
                    }
                }
                GatedActivation::GeluTanh => {
                    for ((out, &gate), &up) in values {
                        *out = gelu_tanh(gate) * up;
                    }
                }
                GatedActivation::ClampedSwiGlu { alpha, limit } => {
                    for ((out, &gate), &up) in values {
                        *out = clamped_swiglu(alpha, limit, gate, up);
                    }
                }
            }
        }
    }
}

/// Computes `x[i] *= sigmoid(gate[i])`; both are `[rows][width]`.
pub(crate) fn apply_gate(
    level: Level,
    pool: &mut ThreadPool,
    width: usize,
    gate: &[f32],
    x: &mut [f32],
) {
    let piece = pool.rows_per_task(x.len() / width, width) * width;
    pool.for_each_piece(x, piece, |_, task, x| gate_values(level, &gate[task * piece..], x));
}

per_level! {
    fn gate_values(gate: &[f32], x: &mut [f32]) {
        for (x, &gate) in x.iter_mut().zip(gate) {
            *x *= sigmoid(gate);
        }
    }
}

/// Computes [`GatedActivation::ClampedSwiGlu`]. NaN stays NaN.
#[inline(always)]
fn clamped_swiglu(alpha: f32, limit: f32, gate: f32, up: f32) -> f32 {
    let gate = if gate > limit { limit } else { gate };
    silu(alpha * gate) / alpha * (up.clamp(-limit, limit) + 1.0)
}

mod reference {
    use super::{GatedActivation, clamped_swiglu, gelu_tanh, silu};

    pub(super) fn activate(
        activation: GatedActivation,
        width: usize,
        gate_up: &[f32],
        out: &mut [f32],
    ) {
        for (index, out) in out.iter_mut().enumerate() {
            let (row, i) = (index / width, index % width);
            let gate = gate_up[row * 2 * width + i];
            let up = gate_up[row * 2 * width + width + i];
            *out = match activation {
                GatedActivation::Silu => silu(gate) * up,
                GatedActivation::GeluTanh => gelu_tanh(gate) * up,
                GatedActivation::ClampedSwiGlu { alpha, limit } => {
                    clamped_swiglu(alpha, limit, gate, up)
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::testing::{bits, levels, numbers};

    const CLAMPED: GatedActivation = GatedActivation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };

    proptest! {
        #[test]
        fn any_shape_agrees_with_the_reference(
            rows in 0_usize..20, width in 1_usize..1600, threads in 1_usize..4
        ) {
            let mut pool = ThreadPool::new(threads, "test").unwrap();
            let gate_up: Vec<f32> =
                numbers(1, rows * 2 * width).iter().map(|x| x * 20.0).collect();
            for activation in [GatedActivation::Silu, GatedActivation::GeluTanh, CLAMPED] {
                let mut want = vec![0.0; rows * width];
                reference::activate(activation, width, &gate_up, &mut want);
                for level in levels() {
                    let mut got = vec![f32::NAN; rows * width];
                    activate(level, &mut pool, width, (activation, &gate_up), &mut got);
                    prop_assert_eq!(bits(&got), bits(&want), "{}", level.name());
                }
            }
        }
    }

    #[test]
    fn clamped_swiglu_is_close_to_its_definition_and_keeps_nan() {
        let values = || (-40..40).map(|step| step as f32 * 0.31);
        for (gate, up) in values().flat_map(|gate| values().map(move |up| (gate, up))) {
            let (g, u) = (f64::from(gate.min(7.0)), f64::from(up.clamp(-7.0, 7.0)));
            let want = (u + 1.0) * g / (1.0 + (-1.702 * g).exp());
            let mut out = [0.0];
            reference::activate(CLAMPED, 1, &[gate, up], &mut out);
            assert!((f64::from(out[0]) - want).abs() < 1e-5, "{gate}, {up}");
        }
        for gate_up in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
            let mut out = [0.0];
            reference::activate(CLAMPED, 1, &gate_up, &mut out);
            assert!(out[0].is_nan());
        }
    }
}
