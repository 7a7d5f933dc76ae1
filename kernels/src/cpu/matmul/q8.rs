//! 8-bit numbers: 32 consecutive inputs share a scale.
//!
//! A weight is an integer from -127 to 127 times its block's scale, an f16, so a GGUF Q8_0 file
//! keeps its weights bit for bit. Inputs are quantized the same way when they are packed, with f32
//! scales. Integer dot products within a block have no rounding, so their order does not matter.
//! Blocks are then added in order, one multiply-add each. So every level with fused multiply-add is
//! bit-equal to the reference.
//!
//! Weights are stored with 128 added, because the instructions multiply unsigned with signed bytes.
//! This adds 128 times the sum of the block's inputs to a dot product. The packed inputs contain
//! this term, so that the kernels subtract it.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
pub(super) mod portable;

use half::f16;

use super::pack::PANEL;
use crate::cpu::arithmetic::{LANES, ROUND};

/// Inputs that share a scale.
pub(super) const BLOCK: usize = 32;
/// Inputs of one word.
pub(super) const GROUP: usize = 4;
/// Index of the scale in the words of a row's block of inputs. The integers come first.
pub(super) const SCALE_WORD: usize = BLOCK / GROUP;
/// Index of the correction: the sum of the block's inputs times -[`OFFSET`], with which a dot
/// product starts.
pub(super) const CORRECTION_WORD: usize = SCALE_WORD + 1;
/// Words of a row's block of inputs.
pub(super) const INPUT_WORDS: usize = CORRECTION_WORD + 1;
/// Words of a panel's block before the scales: `[group][PANEL]`.
pub(super) const NUMBER_WORDS: usize = BLOCK / GROUP * PANEL;
/// Words of a panel's block: the numbers, then `PANEL` scales, two to a word.
pub(super) const PANEL_BLOCK_WORDS: usize = NUMBER_WORDS + PANEL / 2;
/// Offset that is added to stored weights.
pub(super) const OFFSET: i32 = 128;
const NUMBER_MAX: f32 = 127.0;

/// Returns the integers of a block of weights and their scale.
pub(super) fn quantise_weights(weights: &[f32; BLOCK]) -> ([i8; BLOCK], f16) {
    let greatest = weights.iter().fold(0.0, |greatest: f32, weight| greatest.max(weight.abs()));
    let scale = f16::from_f32((greatest / NUMBER_MAX).min(f16::MAX.to_f32()));
    let (numbers, divisor) = ([0; BLOCK], scale.to_f32());
    if divisor == 0.0 {
        return (numbers, scale);
    }
    let number = |weight: f32| (weight / divisor).round_ties_even().clamp(-NUMBER_MAX, NUMBER_MAX);
    (weights.map(|weight| number(weight) as i8), scale)
}

/// Quantizes a row's block of weights into its lane of a panel's block.
pub(super) fn set_weights(
    block: &mut [u32; PANEL_BLOCK_WORDS],
    lane: usize,
    weights: &[f32; BLOCK],
) {
    let (numbers, scale) = quantise_weights(weights);
    for (group, numbers) in numbers.as_chunks::<GROUP>().0.iter().enumerate() {
        let bytes = numbers.map(|number| (i32::from(number) + OFFSET) as u8);
        block[group * PANEL + lane] = u32::from_le_bytes(bytes);
    }
    block[NUMBER_WORDS + lane / 2] |= u32::from(scale.to_bits()) << (16 * (lane % 2));
}

/// Returns the integers and the scale that [`set_weights`] stored.
pub(super) fn weights_of(block: &[u32; PANEL_BLOCK_WORDS], lane: usize) -> ([i8; BLOCK], f32) {
    let numbers = std::array::from_fn(|input| {
        let bytes = block[input / GROUP * PANEL + lane].to_le_bytes();
        (i32::from(bytes[input % GROUP]) - OFFSET) as i8
    });
    let scale = f16::from_bits((block[NUMBER_WORDS + lane / 2] >> (16 * (lane % 2))) as u16);
    (numbers, scale.to_f32())
}

/// Block of inputs, each rounded to an integer multiple of the scale.
#[derive(Clone, Copy, Debug)]
pub(super) struct Q8Inputs {
    pub numbers: [i32; BLOCK],
    pub scale: f32,
}

/// Quantizes a block of inputs. The scale is NaN when an input is NaN or infinite.
#[inline(always)]
pub(super) fn quantise_inputs(inputs: &[f32; BLOCK]) -> Q8Inputs {
    let mut lanes = [0.0_f32; LANES];
    let mut poison = [0.0_f32; LANES];
    for half in inputs.as_chunks::<LANES>().0 {
        for ((lane, poison), input) in lanes.iter_mut().zip(&mut poison).zip(half) {
            let size = input.abs();
            *lane = if size > *lane { size } else { *lane };
            *poison += input * 0.0;
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            let other = lanes[lane + width];
            lanes[lane] = if other > lanes[lane] { other } else { lanes[lane] };
            poison[lane] += poison[lane + width];
        }
        width /= 2;
    }
    let greatest = lanes[0];
    let inverse = if greatest > 0.0 { NUMBER_MAX / greatest } else { 0.0 };
    // When the greatest input is so small that its inverse is infinite, it counts as zero.
    let inverse = if inverse < f32::INFINITY { inverse } else { 0.0 };
    let mut numbers = [0; BLOCK];
    for (number, input) in numbers.iter_mut().zip(inputs) {
        // The low bits hold the nearest integer, ties to even.
        let shifted = input * inverse + ROUND;
        *number = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    }
    Q8Inputs { numbers, scale: greatest / NUMBER_MAX + poison[0] }
}

/// Packs one block of one row for the kernels: `INPUT_WORDS` words.
#[inline(always)]
pub(super) fn pack_inputs(inputs: &[f32; BLOCK]) -> [u32; INPUT_WORDS] {
    let Q8Inputs { numbers, scale } = quantise_inputs(inputs);
    let mut words = [0; INPUT_WORDS];
    for (word, group) in words.iter_mut().zip(numbers.as_chunks::<GROUP>().0) {
        let [a, b, c, d] = group.map(|number| number as u32 & 0xff);
        *word = a | b << 8 | c << 16 | d << 24;
    }
    let sum: i32 = numbers.iter().fold(0, |sum, number| sum.wrapping_add(*number));
    words[SCALE_WORD] = scale.to_bits();
    words[CORRECTION_WORD] = sum.wrapping_mul(-OFFSET).cast_unsigned();
    words
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn q8_error_is_at_most_half_a_scale(
            values in prop::array::uniform32(-1e3_f32..1e3), power in -20_i32..=12
        ) {
            // The greatest scale, 65,504 in f16, reaches 2^23; no model has such weights.
            let values = values.map(|value| value * 2_f32.powi(power));
            let inputs = quantise_inputs(&values);
            for (number, value) in inputs.numbers.iter().zip(values) {
                prop_assert!((-127..=127).contains(number));
                let error = (*number as f32 * inputs.scale - value).abs();
                prop_assert!(error <= inputs.scale * 0.501, "{number} {value} {}", inputs.scale);
            }
            let (numbers, scale) = quantise_weights(&values);
            let (scale, greatest) =
                (scale.to_f32(), values.iter().fold(0.0, |a: f32, b| a.max(b.abs())));
            for (number, value) in numbers.iter().zip(values) {
                let error = (f32::from(*number) * scale - value).abs();
                // Rounding the scale to f16 may put the greatest weight slightly outside
                // the range.
                prop_assert!(error <= scale * 0.5 + greatest * 1e-3 + 1e-5, "{number} {value}");
            }
        }

        /// Checks that Q8_0 weights round-trip bit for bit.
        #[test]
        fn q8_0_weights_round_trip_bit_for_bit(
            mut numbers in prop::array::uniform32(-127_i8..=127), place in 0_usize..32, bits in 1_u16..0x7000
        ) {
            numbers[place] = 127;
            let scale = f16::from_bits(bits);
            let (found, found_scale) =
                quantise_weights(&numbers.map(|number| f32::from(number) * scale.to_f32()));
            prop_assert_eq!((found, found_scale), (numbers, scale));
        }
    }

    #[test]
    fn q8_of_zeros_and_subnormals_is_zero() {
        for value in [0.0, -0.0, 1e-45] {
            let inputs = quantise_inputs(&[value; BLOCK]);
            assert_eq!(inputs.numbers, [0; BLOCK]);
            assert!(inputs.scale.abs() < 1e-44);
            assert_eq!(quantise_weights(&[value; BLOCK]).0, [0; BLOCK]);
        }
    }

    #[test]
    fn nan_inputs_stay_nan() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in 0..BLOCK {
                let mut inputs = [0.5; BLOCK];
                inputs[place] = bad;
                assert!(quantise_inputs(&inputs).scale.is_nan());
            }
        }
    }
}
