//! The gated activation: `out[i] = silu(gate[i]) · up[i]`.

use super::{arithmetic::silu, isa::Level};

/// `gate_up` is `[rows][2 · width]`, gates first; `out` is `[rows][width]`. Bit-equal to
/// [`reference::silu_mul`] at every level.
pub(crate) fn silu_mul(level: Level, width: usize, gate_up: &[f32], out: &mut [f32]) {
    if level == Level::Reference {
        return reference::silu_mul(width, gate_up, out);
    }
    level.run(|| {
        for (gate_up, out) in gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
            let (gate, up) = gate_up.split_at(width);
            for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                *out = silu(gate) * up;
            }
        }
    });
}

pub(crate) mod reference {
    use super::silu;

    pub(crate) fn silu_mul(width: usize, gate_up: &[f32], out: &mut [f32]) {
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            for (i, out) in out.iter_mut().enumerate() {
                let gate = gate_up[row * 2 * width + i];
                let up = gate_up[row * 2 * width + width + i];
                *out = silu(gate) * up;
            }
        }
    }
}
