//! FP8 numbers (e4m3) and their scales.
//!
//! A number has a sign, 4 bits of exponent and 3 of mantissa. There is no infinity; NaN has all
//! bits but the sign set. A weight is a number times the scale of its block.

use std::sync::Arc;

/// Greatest finite number.
pub const E4M3_MAX: f32 = 448.0;
/// Bits of NaN without its sign.
const NAN: u8 = 0x7f;
const SIGN: u8 = 0x80;

/// Value of each number, by its bits.
static VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut bits = 0;
    while bits < values.len() {
        values[bits] = value(bits as u8);
        bits += 1;
    }
    values
};

const fn value(bits: u8) -> f32 {
    if is_nan(bits) {
        return f32::NAN;
    }
    // The exponent bias of f32 is greater by 120. The multiplication by 2^120 is exact, for subnormal
    // numbers too.
    let magnitude =
        f32::from_bits(((bits & !SIGN) as u32) << 20) * f32::from_bits((120 + 127) << 23);
    if bits & SIGN == 0 { magnitude } else { -magnitude }
}

/// Returns whether these are the bits of NaN.
pub const fn is_nan(bits: u8) -> bool {
    bits & !SIGN == NAN
}

/// Returns the value of a number.
pub fn decode(bits: u8) -> f32 {
    VALUES[usize::from(bits)]
}

/// Returns the nearest number, ties to even. Values outside the range, infinite values included,
/// become the greatest number with their sign. NaN becomes 0.
pub fn encode(value: f32) -> u8 {
    if value.is_nan() {
        return 0;
    }
    let sign = if value.is_sign_negative() { SIGN } else { 0 };
    let magnitude = value.abs().min(E4M3_MAX);
    // Numbers below 2^-6 are multiples of 2^-9. Greater numbers have three bits after the leading one.
    let exponent = (magnitude.to_bits() >> 23).max(127 - 6);
    let unit = f32::from_bits((exponent - 3) << 23);
    // The carry of a mantissa that rounds up to the next power of two increments the exponent.
    let steps = (magnitude / unit).round_ties_even() as u32;
    sign | (((exponent - (127 - 6)) << 3) + steps) as u8
}

/// Scales of a matrix, or of a part of one: each block of rows and columns has one. A part may
/// begin inside a block.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockScales {
    /// Row and column of the whole matrix with which the part begins.
    first: [usize; 2],
    /// Rows of the part.
    rows: usize,
    /// Rows and columns of a block.
    block: [usize; 2],
    /// Number of blocks side by side in the whole matrix.
    stride: usize,
    /// Scales of the whole matrix.
    values: Arc<[f32]>,
}

impl BlockScales {
    /// Creates the scales of a matrix `[rows][cols]` with blocks `[rows][cols]`. The last blocks of
    /// both directions may be smaller.
    ///
    /// # Panics
    /// When the number of scales is not the number of blocks.
    pub fn new([rows, cols]: [usize; 2], block: [usize; 2], values: Vec<f32>) -> Self {
        let stride = cols.div_ceil(block[1]);
        assert_eq!(values.len(), rows.div_ceil(block[0]) * stride, "each block has a scale");
        Self { first: [0, 0], rows, block, stride, values: values.into() }
    }

    /// Returns the scales of `rows` rows from a row and column on.
    pub fn part(&self, [row, col]: [usize; 2], rows: usize) -> Self {
        let first = [self.first[0] + row, self.first[1] + col];
        Self { first, rows, ..self.clone() }
    }

    /// Returns the rows and columns of a block.
    pub fn block(&self) -> [usize; 2] {
        self.block
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns whether all columns of a row have the same scale, if the part has `cols` columns.
    pub fn is_per_row(&self, cols: usize) -> bool {
        let (first, block_cols) = (self.first[1], self.block[1]);
        cols == 0 || first / block_cols == (first + cols - 1) / block_cols
    }

    /// Returns the scale of an element.
    pub fn at(&self, row: usize, col: usize) -> f32 {
        let [block_rows, block_cols] = self.block;
        let (row, col) = (self.first[0] + row, self.first[1] + col);
        self.values[row / block_rows * self.stride + col / block_cols]
    }

    /// Multiplies elements of a row, from column `first` on, by their scales.
    pub fn apply(&self, row: usize, first: usize, out: &mut [f32]) {
        let block_cols = self.block[1];
        let mut done = 0;
        while done < out.len() {
            let scale = self.at(row, first + done);
            let left = block_cols - (self.first[1] + first + done) % block_cols;
            let end = out.len().min(done + left);
            out[done..end].iter_mut().for_each(|value| *value *= scale);
            done = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes a value from the definition of the format.
    fn defined(bits: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
        let magnitude = match exponent {
            0 => mantissa / 8.0 * 2_f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
        };
        if bits & SIGN == 0 { magnitude } else { -magnitude }
    }

    fn numbers() -> impl Iterator<Item = u8> {
        (0..=u8::MAX).filter(|&bits| !is_nan(bits))
    }

    #[test]
    fn numbers_have_the_values_of_the_format_and_round_trip() {
        assert!(decode(0x7f).is_nan() && decode(0xff).is_nan());
        assert_eq!(decode(0x7e), E4M3_MAX);
        assert_eq!((decode(1), decode(0x08)), (2_f32.powi(-9), 2_f32.powi(-6)));
        for bits in numbers() {
            assert_eq!(f64::from(decode(bits)), defined(bits), "{bits:#x}");
            assert_eq!(encode(decode(bits)), bits, "{bits:#x}");
        }
    }

    #[test]
    fn encoding_saturates_and_never_gives_nan() {
        for value in [448.1, 464.0, 1e30, f32::MAX, f32::INFINITY] {
            assert_eq!((encode(value), encode(-value)), (0x7e, 0xfe), "{value}");
        }
        assert_eq!(encode(f32::NAN), 0);
        assert_eq!((encode(1e-30), encode(f32::from_bits(1))), (0, 0));
        for bits in (0..=u32::MAX).step_by(65_537) {
            assert!(!is_nan(encode(f32::from_bits(bits))), "{bits:#x}");
        }
    }

    #[test]
    fn encoding_gives_the_nearest_number_and_ties_are_even() {
        let mut positive: Vec<u8> = numbers().filter(|bits| bits & SIGN == 0).collect();
        positive.sort_by(|a, b| defined(*a).total_cmp(&defined(*b)));
        for pair in positive.windows(2) {
            let [low, high] = [pair[0], pair[1]].map(decode);
            let middle = (low + high) / 2.0;
            let even = if pair[0] & 1 == 0 { pair[0] } else { pair[1] };
            assert_eq!(encode(middle), even, "between {low} and {high}");
            assert_eq!(encode(middle.next_down()), pair[0], "between {low} and {high}");
            assert_eq!(encode(-middle.next_up()), pair[1] | SIGN, "between {low} and {high}");
        }
    }

    #[test]
    fn parts_of_scales_are_those_of_the_whole() {
        let (rows, cols) = (7_usize, 11_usize);
        for block in [[7, 11], [1, 11], [3, 4], [4, 3]] {
            let count = rows.div_ceil(block[0]) * cols.div_ceil(block[1]);
            let whole =
                BlockScales::new([rows, cols], block, (0..count).map(|it| it as f32).collect());
            for (first, rows) in [([0, 0], 7), ([2, 5], 4), ([6, 10], 1)] {
                let part = whole.part(first, rows);
                assert_eq!(part.rows(), rows);
                let scales = |row| (first[1]..cols).map(move |col| (row, col));
                let is_per_row = (first[0]..first[0] + rows)
                    .flat_map(scales)
                    .all(|(row, col)| whole.at(row, col) == whole.at(row, first[1]));
                assert_eq!(part.is_per_row(cols - first[1]), is_per_row);
                for row in 0..rows {
                    let mut scaled = vec![1.0; cols - first[1]];
                    part.apply(row, 0, &mut scaled);
                    for (col, &scaled) in scaled.iter().enumerate() {
                        let expected = whole.at(first[0] + row, first[1] + col);
                        assert_eq!((part.at(row, col), scaled), (expected, expected));
                    }
                    let mut tail = vec![1.0; cols - first[1] - 1];
                    part.apply(row, 1, &mut tail);
                    assert_eq!(tail, scaled[1..]);
                }
            }
        }
    }
}
