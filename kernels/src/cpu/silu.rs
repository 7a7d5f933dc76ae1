//! Gated activation: `out[i] = silu(gate[i]) · up[i]`.

use super::{
    arithmetic::silu,
    isa::{Level, per_level},
    threads::ThreadPool,
};

/// Computes the activation; `gate_up` is `[rows][2 · width]`, gates first, and `out` is
/// `[rows][width]`. Bit-equal to [`reference::silu_mul`] at every level.
pub(crate) fn silu_mul(
    level: Level,
    pool: &mut ThreadPool,
    width: usize,
    gate_up: &[f32],
    out: &mut [f32],
) {
    if level == Level::Reference || out.is_empty() {
        return reference::silu_mul(width, gate_up, out);
    }
    let task_rows = pool.rows_per_task(out.len() / width, width);
    pool.for_each_piece(out, task_rows * width, |_, task, out| {
        silu_mul_rows(level, width, &gate_up[task * task_rows * 2 * width..], out);
    });
}

per_level! {
    /// Computes as many rows as `out` has.
    fn silu_mul_rows(width: usize, gate_up: &[f32], out: &mut [f32]) {
        let rows = gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width));
        for (gate_up, out) in rows {
            let (gate, up) = gate_up.split_at(width);
            for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                *out = silu(gate) * up;
            }
        }
    }
}

pub(crate) mod reference {
    use super::silu;

    pub(crate) fn silu_mul(width: usize, gate_up: &[f32], out: &mut [f32]) {
        for (index, out) in out.iter_mut().enumerate() {
            let (row, i) = (index / width, index % width);
            let gate = gate_up[row * 2 * width + i];
            let up = gate_up[row * 2 * width + width + i];
            *out = silu(gate) * up;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::testing::{bits, levels, numbers};

    proptest! {
        #[test]
        fn any_shape_agrees_with_the_reference(
            rows in 0_usize..20, width in 1_usize..1600, threads in 1_usize..4
        ) {
            let mut pool = ThreadPool::new(threads, "test").unwrap();
            let gate_up: Vec<f32> =
                numbers(1, rows * 2 * width).iter().map(|x| x * 20.0).collect();
            let mut want = vec![0.0; rows * width];
            reference::silu_mul(width, &gate_up, &mut want);
            for level in levels() {
                let mut got = vec![f32::NAN; rows * width];
                silu_mul(level, &mut pool, width, &gate_up, &mut got);
                prop_assert_eq!(bits(&got), bits(&want), "{}", level.name());
            }
        }
    }
}
