//! KV in FP8 (e4m3), with one scale for each token and head of keys and of values.
//!
//! A scale is a power of two, stored as the biased exponent of an f32: scaling by it does not
//! round, so an element times its scale is exact in bf16, and prefill and decode attend to the same
//! values. With elements in floating point, other scales would be no more accurate. A head's 16
//! tokens are `[token][dim]` elements, then 16 scales of one byte.

use half::bf16;

use crate::fp8;

/// Greatest e4m3 number as mantissa and exponent: 1.75 · 2^8.
const GREATEST_MANTISSA: u32 = 0x0060_0000;
const GREATEST_EXPONENT: u32 = 8;
/// Greatest value: a number with three bits after the leading one, so that an element times its
/// scale does not overflow.
const GREATEST_VALUE: f32 = f32::from_bits(0x7f70_0000);

/// Returns the value of a scale.
pub fn scale(byte: u8) -> f32 {
    f32::from_bits(u32::from(byte) << 23)
}

/// Writes the elements of one token of a head to `elements`, and returns their scale: the smallest
/// with which no element exceeds the range of e4m3. Values are rounded to bf16 first. Values beyond
/// ±1.875 · 2^127 become this bound, and NaN becomes 0.
///
/// # Panics
/// When the lengths differ.
pub fn quantize(values: &[f32], elements: &mut [u8]) -> u8 {
    assert_eq!(values.len(), elements.len(), "each value becomes an element");
    let stored = |value: f32| match bf16::from_f32(value) {
        value if value.is_nan() => 0.0,
        value => value.to_f32().clamp(-GREATEST_VALUE, GREATEST_VALUE),
    };
    let greatest = values.iter().map(|&value| stored(value).abs()).fold(0.0, f32::max).to_bits();
    let carry = u32::from(greatest & 0x007f_ffff > GREATEST_MANTISSA);
    let scale = ((greatest >> 23) + carry).saturating_sub(GREATEST_EXPONENT).max(1);
    // 2^-e, whose biased exponent is 254 minus that of 2^e.
    let inverse = f32::from_bits((254 - scale) << 23);
    for (element, &value) in elements.iter_mut().zip(values) {
        *element = fp8::encode(stored(value) * inverse);
    }
    scale as u8
}

/// Writes the values of elements with this scale to `values`.
///
/// # Panics
/// When the lengths differ.
pub fn dequantize(elements: &[u8], scale: u8, values: &mut [bf16]) {
    assert_eq!(elements.len(), values.len(), "each element becomes a value");
    let scale = self::scale(scale);
    for (value, &element) in values.iter_mut().zip(elements) {
        *value = bf16::from_f32(fp8::decode(element) * scale);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the values after quantization.
    fn through(values: &[f32]) -> Vec<f32> {
        let mut elements = vec![0; values.len()];
        let scale = quantize(values, &mut elements);
        let mut out = vec![bf16::ZERO; values.len()];
        dequantize(&elements, scale, &mut out);
        out.into_iter().map(bf16::to_f32).collect()
    }

    #[test]
    fn scales_are_the_smallest_that_fit() {
        for (greatest, expected) in [
            (448.0, 127),
            (450.0, 128),
            (224.0, 126),
            (1.0, 119),
            (1.75, 119),
            (1.765_625, 120),
            (0.0, 1),
            (f32::MIN_POSITIVE, 1),
            (f32::INFINITY, 247),
            (f32::NAN, 1),
        ] {
            let mut elements = [0; 3];
            assert_eq!(quantize(&[0.0, greatest, 0.0], &mut elements), expected, "{greatest}");
            assert!(elements.iter().all(|it| !fp8::is_nan(*it)), "{greatest}: {elements:?}");
        }
        assert_eq!(through(&[448.0, -448.0, 0.0, 1.0]), [448.0, -448.0, 0.0, 1.0]);
        assert_eq!(through(&[f32::NAN, f32::NEG_INFINITY, 1e38])[0], 0.0);
        assert!(through(&[f32::NAN, f32::NEG_INFINITY, 1e38]).iter().all(|it| it.is_finite()));
    }

    proptest! {
        /// The error is at most 1/16 of a value plus the rounding to bf16 or, for the smallest
        /// values, 2^-17 of the greatest.
        #[test]
        fn errors_are_bounded(
            values in prop::collection::vec(-100.0_f32..100.0, 1..130),
            exponent in -40_i32..40,
        ) {
            let values: Vec<f32> = values.iter().map(|it| it * 2_f32.powi(exponent)).collect();
            let greatest = values.iter().map(|it| it.abs()).fold(0.0, f32::max);
            for (value, got) in values.iter().zip(through(&values)) {
                let bound = value.abs() * (1.0 / 16.0 + 0.005) + greatest * 2_f32.powi(-17);
                prop_assert!((value - got).abs() <= bound, "{value} became {got}");
            }
        }

        /// Values that were quantized before do not change.
        #[test]
        fn quantizing_again_changes_nothing(
            values in prop::collection::vec(-9.0_f32..9.0, 1..70),
        ) {
            let once = through(&values);
            prop_assert_eq!(through(&once), once);
        }
    }
}
