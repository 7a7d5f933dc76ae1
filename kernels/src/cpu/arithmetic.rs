//! Arithmetic that all instruction-set levels share. Its results are bit-equal at all levels with
//! fused multiply-add (FMA), so a sequence that moves to another machine continues with the same
//! bits. Only [`multiply_add`] depends on FMA: at a level without FMA, its results may differ by
//! rounding.
//!
//! Sums over a row use [`LANES`] lanes: lane `j` adds the elements `j`, `j + 16`, …, in order, and
//! the lanes are then added as a tree. This order is the same for every level and thread count, and
//! suits vector instructions. [`exp`] consists of multiplications and additions that the compiler
//! does not fuse, so scalar and vector code give the same bits.

use half::bf16;

use crate::layout::to_bf16_bits;

/// Lanes of a sum: the f32 of an AVX-512 vector.
pub(crate) const LANES: usize = 16;

/// Adds the lanes as a tree: first lanes that are 8 apart, then 4, 2 and 1.
#[inline(always)]
pub(crate) fn sum_lanes(lanes: [f32; LANES]) -> f32 {
    let mut lanes = lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// Upper part of ln 2. It has so few significant bits that its product with an integer exponent is
/// exact.
pub(crate) const LN_2_HIGH: f32 = 0.693_359_4;
/// Lower part of ln 2: ln 2 - [`LN_2_HIGH`].
pub(crate) const LN_2_LOW: f32 = -2.121_944_4e-4;
/// 1.5 · 2²³. Adding and then subtracting this number rounds an f32 below 2²² to the nearest
/// integer, ties to even. After the addition, the low bits of the sum hold the integer.
pub(crate) const ROUND: f32 = 12_582_912.0;
/// Limit below which [`exp`] returns 0. The exact value there is under 2⁻¹²⁵.
pub(crate) const EXP_ZERO: f32 = -87.0;

/// Polynomial for (e^r - 1 - r) / r² with |r| ≤ ln 2 / 2, from the Cephes library, highest power
/// first.
pub(crate) const EXP_COEFFICIENTS: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5];

/// Returns e to the power of `x` for `x` ≤ 0, which is enough for softmax and sigmoid. The relative
/// error is below 2⁻²². Returns 0 for `x` below [`EXP_ZERO`], -∞ included. Callers do not use the
/// result for NaN, which is NaN or 0.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let is_zero = x < EXP_ZERO;
    let x = if is_zero { 0.0 } else { x };
    let shifted = x * LOG2_E + ROUND;
    let power = shifted - ROUND;
    let rest = (x - power * LN_2_HIGH) - power * LN_2_LOW;
    let mut sum = EXP_COEFFICIENTS[0];
    for &coefficient in &EXP_COEFFICIENTS[1..] {
        sum = sum * rest + coefficient;
    }
    let value = (sum * (rest * rest) + rest) + 1.0;
    // The low bits of `shifted` hold the integer; -126 ≤ power ≤ 0 here, so 2^power is normal.
    let power_bits = (shifted.to_bits().wrapping_add(127)) << 23;
    let result = value * f32::from_bits(power_bits);
    if is_zero { 0.0 } else { result }
}

/// Returns `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    // The power of a number that is not positive, which `exp` requires.
    let power = exp(-x.abs());
    if x < 0.0 { power / (1.0 + power) } else { 1.0 / (1.0 + power) }
}

/// Returns `x · sigmoid(x)`. Returns NaN for NaN and, as PyTorch, for -∞.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    // e^-|x| is at most 1, so it cannot overflow.
    let exp_of_minus_abs = exp(-x.abs());
    let numerator = if x < 0.0 { x * exp_of_minus_abs } else { x };
    numerator / (1.0 + exp_of_minus_abs)
}

/// Returns GELU of `x` with the tanh approximation: `x / 2 · (1 + tanh(z))` with
/// `z = sqrt(2 / π) · (x + 0.044715 · x³)`, which equals `x · sigmoid(2z)`. Returns NaN for NaN and
/// for -∞.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    /// 2 · sqrt(2 / π).
    const FACTOR: f32 = 1.595_769;
    let twice_z = FACTOR * (x + 0.044_715 * (x * x * x));
    let exp_of_minus_abs = exp(-twice_z.abs());
    let numerator = if x < 0.0 { x * exp_of_minus_abs } else { x };
    numerator / (1.0 + exp_of_minus_abs)
}

/// Rounds to the nearest bf16, ties to even.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> bf16 {
    bf16::from_bits(to_bf16_bits(x))
}

/// Widens a bf16 to f32, which is exact.
#[inline(always)]
pub(crate) fn from_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Rounds to the nearest bf16, ties to even, and widens the result to f32.
#[inline(always)]
pub(crate) fn round_to_bf16(x: f32) -> f32 {
    from_bf16(to_bf16(x))
}

/// Returns `a · b + c`. With `FUSED`, the result is rounded once. Without, product and sum are both
/// rounded, so the result may have other bits. Levels whose instruction set has FMA fuse.
#[inline(always)]
pub(crate) fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{isa::per_level, testing::levels};

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for step in 0..2_000_000 {
            let x = -(step as f32) * 4.4e-5;
            let exact = f64::from(x).exp();
            let got = f64::from(exp(x));
            if x < EXP_ZERO {
                assert_eq!(got, 0.0);
            } else {
                let relative = ((got - exact) / exact).abs();
                assert!(relative < 2.0 * f64::from(f32::EPSILON), "x {x}: {got} for {exact}");
            }
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
    }

    #[test]
    fn exp_silu_and_gelu_have_the_same_bits_at_every_level() {
        #[inline(always)]
        fn bits(x: f32) -> u32 {
            exp(-x.abs()).to_bits() ^ silu(x).to_bits() ^ gelu_tanh(x).to_bits()
        }
        let inputs: Vec<f32> = (0..4_096).map(|i| (i as f32 - 3_000.0) * 0.037).collect();
        let scalar: Vec<u32> = inputs.iter().map(|&x| std::hint::black_box(bits(x))).collect();
        per_level! {
            fn all(inputs: &[f32], out: &mut [u32]) {
                for (out, &x) in out.iter_mut().zip(inputs) {
                    *out = bits(x);
                }
            }
        }
        for level in levels() {
            let mut vector = vec![0_u32; inputs.len()];
            all(level, &inputs, &mut vector);
            assert_eq!(vector, scalar, "{}", level.name());
        }
    }

    #[test]
    fn silu_is_close_to_its_definition_and_finite_for_large_numbers() {
        for step in -2_000..2_000 {
            let x = step as f32 * 0.05;
            let exact = f64::from(x) / (1.0 + (-f64::from(x)).exp());
            assert!((f64::from(silu(x)) - exact).abs() <= 1e-6 * exact.abs().max(1e-3), "{x}");
        }
        assert_eq!(silu(1e30), 1e30);
        assert_eq!(silu(-1e30), 0.0);
        assert_eq!(silu(f32::INFINITY), f32::INFINITY);
        assert!(silu(f32::NAN).is_nan() && silu(f32::NEG_INFINITY).is_nan());
    }

    #[test]
    fn gelu_is_close_to_its_definition_and_finite_for_large_numbers() {
        for step in -2_000..2_000 {
            let x = step as f32 * 0.01;
            let of = f64::from(x);
            let z = (2.0 / std::f64::consts::PI).sqrt() * (of + 0.044_715 * of.powi(3));
            let exact = of / (1.0 + (-2.0 * z).exp());
            assert!((f64::from(gelu_tanh(x)) - exact).abs() <= 2e-6 * exact.abs().max(1e-3), "{x}");
        }
        assert_eq!(gelu_tanh(1e30), 1e30);
        assert_eq!(gelu_tanh(-1e30), 0.0);
        assert_eq!(gelu_tanh(f32::INFINITY), f32::INFINITY);
        assert!(gelu_tanh(f32::NAN).is_nan() && gelu_tanh(f32::NEG_INFINITY).is_nan());
    }

    #[test]
    fn bf16_rounding_agrees_with_the_half_crate() {
        for bits in (0..u32::MAX - 65_537).step_by(65_537).chain([
            0x7f80_0000,
            0xff80_0000,
            0x7fc0_0001,
            0x7f80_0001,
            0x0000_8000,
            0x0001_8000,
            0x7f7f_ffff,
        ]) {
            let x = f32::from_bits(bits);
            let (ours, theirs) = (to_bf16(x), bf16::from_f32(x));
            assert!(ours == theirs || (ours.is_nan() && theirs.is_nan()), "{bits:08x}");
        }
    }

    #[test]
    fn sum_of_lanes_has_every_lane_once() {
        let lanes: [f32; LANES] = std::array::from_fn(|lane| (1_u32 << lane) as f32);
        assert_eq!(sum_lanes(lanes), 65_535.0);
    }
}
