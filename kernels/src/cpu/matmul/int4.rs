//! Panels of matrices in INT4. They stay packed in memory. A GEMM unpacks the panels of a tile to
//! f32 or bf16, and then multiplies like with panels in this format, so the results are equal.

use std::cell::Cell;

use super::{
    super::{
        aligned::Aligned,
        isa::{Level, per_level},
    },
    pack::PANEL,
};
use crate::{
    backend::RowSource,
    int4::{self, ColumnGroups},
    layout::WeightFormat,
};

/// Words of the scales, and of the zero points, of a group of a panel.
const SCALE_WORDS: usize = PANEL;
const ZERO_WORDS: usize = PANEL / size_of::<u32>();
/// Words of the numbers of two inputs of a panel.
const PAIR_WORDS: usize = PANEL / size_of::<u32>();

thread_local! {
    /// Unpacked panels: memory that the next tile of the thread reuses.
    static UNPACKED: Cell<Aligned<u32>> = Cell::new(Aligned::zeroed(0));
}

/// Returns the words of a packed panel: scales `[group][32]` in f32, zero points `[group][32]` in
/// bytes, and numbers `[cols / 2][32]`, the even input in the lower half of a byte.
pub(super) fn panel_words(cols: usize, groups: usize) -> usize {
    groups * (SCALE_WORDS + ZERO_WORDS) + cols.div_ceil(2) * PAIR_WORDS
}

/// A packed panel.
struct Panel<'a> {
    scales: &'a [[f32; PANEL]],
    zeros: &'a [[u8; PANEL]],
    numbers: &'a [[u8; PANEL]],
    /// Group of each input.
    groups: &'a [u16],
}

impl<'a> Panel<'a> {
    fn new(words: &'a [u32], groups: &'a ColumnGroups) -> Self {
        let (scales, words) = words.split_at(groups.count() * SCALE_WORDS);
        let (zeros, numbers) = words.split_at(groups.count() * ZERO_WORDS);
        Self {
            scales: bytemuck::cast_slice::<_, f32>(scales).as_chunks().0,
            zeros: bytemuck::cast_slice::<_, u8>(zeros).as_chunks().0,
            numbers: bytemuck::cast_slice::<_, u8>(numbers).as_chunks().0,
            groups: groups.of_columns(),
        }
    }

    /// Returns scales and zero points of the group of an input.
    #[inline(always)]
    fn group_of(&self, input: usize) -> (&'a [f32; PANEL], &'a [u8; PANEL]) {
        let group = usize::from(self.groups[input]);
        (&self.scales[group], &self.zeros[group])
    }
}

/// Returns the element of a lane. `numbers` has two of the lane, and `shift` selects one.
#[inline(always)]
fn element(
    numbers: &[u8; PANEL],
    shift: u32,
    (scales, zeros): (&[f32; PANEL], &[u8; PANEL]),
    lane: usize,
) -> f32 {
    int4::element(numbers[lane] >> shift & int4::MAX, zeros[lane], scales[lane])
}

/// Packs the rows of a panel from row `first` on.
pub(super) fn pack_panel(
    source: &dyn RowSource,
    groups: &ColumnGroups,
    first: usize,
    words: &mut [u32],
) {
    let (cols, group_count) = (source.cols(), groups.count());
    let lanes = PANEL.min(source.rows() - first);
    let mut numbers = vec![0; lanes * cols];
    let (mut scales, mut zeros) = (vec![0.0; lanes * group_count], vec![0; lanes * group_count]);
    source.read_int4(first, &mut numbers, &mut scales, &mut zeros);
    let (of_scales, words) = words.split_at_mut(group_count * SCALE_WORDS);
    let (of_zeros, of_numbers) = words.split_at_mut(group_count * ZERO_WORDS);
    let of_zeros = bytemuck::cast_slice_mut::<_, u8>(of_zeros);
    let of_numbers = bytemuck::cast_slice_mut::<_, u8>(of_numbers);
    for lane in 0..lanes {
        for group in 0..group_count {
            let at = lane * group_count + group;
            of_scales[group * PANEL + lane] = scales[at].to_bits();
            of_zeros[group * PANEL + lane] = zeros[at];
        }
        for (input, number) in numbers[lane * cols..][..cols].iter().enumerate() {
            of_numbers[input / 2 * PANEL + lane] |= number << (input % 2 * 4);
        }
    }
}

/// Calls `with` with the unpacked panels of `words`, in `format` and with `unpacked_words` words
/// each.
pub(super) fn with_unpacked<R>(
    level: Level,
    format: WeightFormat,
    (words, groups): (&[u32], &ColumnGroups),
    unpacked_words: usize,
    with: impl FnOnce(&[u32]) -> R,
) -> R {
    let packed_words = panel_words(groups.of_columns().len(), groups.count());
    let panels = words.chunks_exact(packed_words);
    let length = panels.len() * unpacked_words;
    let mut unpacked = UNPACKED.replace(Aligned::zeroed(0));
    if unpacked.len() < length {
        unpacked = Aligned::zeroed(length);
    }
    for (panel, out) in panels.zip(unpacked.chunks_exact_mut(unpacked_words)) {
        let panel = Panel::new(panel, groups);
        match format {
            WeightFormat::F32 => unpack_f32(level, &panel, out),
            _ => unpack_bf16(level, &panel, out),
        }
    }
    let result = with(&unpacked[..length]);
    UNPACKED.set(unpacked);
    result
}

/// Rounds to the nearest bf16, ties to even, in the upper half of the word. The value is no NaN,
/// because scales are finite. This is several times as fast as a conversion that keeps NaN.
#[inline(always)]
fn rounded(value: f32) -> u32 {
    let bits = value.to_bits();
    bits.wrapping_add(0x7fff + (bits >> 16 & 1))
}

per_level! {
    fn unpack_f32(panel: &Panel<'_>, out: &mut [u32]) {
        for (input, words) in out.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
            let (numbers, shift) = (&panel.numbers[input / 2], input as u32 % 2 * 4);
            let group = panel.group_of(input);
            for (lane, word) in words.iter_mut().enumerate() {
                *word = element(numbers, shift, group, lane).to_bits();
            }
        }
    }
}

per_level! {
    /// Unpacks to pairs of inputs, padded with zeros.
    fn unpack_bf16(panel: &Panel<'_>, out: &mut [u32]) {
        let cols = panel.groups.len();
        let (pairs, padding) = out.split_at_mut(cols.div_ceil(2) * PANEL);
        for (pair, words) in pairs.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
            let (numbers, even) = (&panel.numbers[pair], panel.group_of(2 * pair));
            // The number after the last input is 0, and so is its product with a scale of 0.
            let is_pair = 2 * pair + 1 < cols;
            let odd = if is_pair { panel.group_of(2 * pair + 1) } else { (&[0.0; PANEL], &[0; PANEL]) };
            for (lane, word) in words.iter_mut().enumerate() {
                let even = rounded(element(numbers, 0, even, lane));
                let odd = rounded(element(numbers, 4, odd, lane));
                *word = even >> 16 | odd & 0xffff_0000;
            }
        }
        padding.fill(0);
    }
}

/// Copies the elements of a lane of a panel, not yet rounded to the format.
pub(super) fn copy_lane(words: &[u32], groups: &ColumnGroups, lane: usize, out: &mut [f32]) {
    let panel = Panel::new(words, groups);
    for (input, out) in out.iter_mut().enumerate() {
        let shift = input as u32 % 2 * 4;
        *out = element(&panel.numbers[input / 2], shift, panel.group_of(input), lane);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::{
        aligned::Slab,
        isa::Level,
        matmul::{CpuMatrix, MatmulScratch, matmul, pack, testing::Plain},
        testing::{bits, levels, numbers},
        threads::ThreadPool,
    };

    /// A matrix in INT4 whose numbers, scales and zero points differ everywhere.
    struct Stored {
        rows: usize,
        groups: ColumnGroups,
    }

    impl Stored {
        fn number(row: usize, col: usize) -> u8 {
            ((row * 7 + col * 11 + row * col / 5) % 16) as u8
        }

        /// Scale and zero point.
        fn group(row: usize, group: usize) -> (f32, u8) {
            let scale = half::f16::from_f32(0.01 * (1 + (row * 3 + group * 5) % 23) as f32);
            (scale.to_f32(), ((row + 3 * group) % 16) as u8)
        }

        fn dequantised(&self) -> Plain {
            let (rows, cols) = (self.rows, self.cols());
            let mut values = vec![0.0; rows * cols];
            for (row, out) in values.chunks_mut(cols).enumerate() {
                self.read_row(row, out);
            }
            Plain { rows, cols, values }
        }
    }

    impl RowSource for Stored {
        fn rows(&self) -> usize {
            self.rows
        }

        fn cols(&self) -> usize {
            self.groups.of_columns().len()
        }

        fn read_row(&self, row: usize, out: &mut [f32]) {
            for (col, out) in out.iter_mut().enumerate() {
                let (scale, zero) = Self::group(row, self.groups.of_columns()[col].into());
                *out = (f32::from(Self::number(row, col)) - f32::from(zero)) * scale;
            }
        }

        fn int4_groups(&self) -> Option<ColumnGroups> {
            Some(self.groups.clone())
        }

        fn read_int4(
            &self,
            first: usize,
            numbers: &mut [u8],
            scales: &mut [f32],
            zeros: &mut [u8],
        ) {
            let count = self.groups.count();
            for (at, number) in numbers.iter_mut().enumerate() {
                *number = Self::number(first + at / self.cols(), at % self.cols());
            }
            for (at, (scale, zero)) in scales.iter_mut().zip(zeros).enumerate() {
                (*scale, *zero) = Self::group(first + at / count, at % count);
            }
        }
    }

    fn gemm(level: Level, x: &[f32], w: &CpuMatrix) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.len() / w.cols() * w.rows()];
        let mut pool = ThreadPool::new(2, "test").unwrap();
        matmul(level, &mut pool, &mut MatmulScratch::default(), x, w, &mut out);
        out
    }

    /// Compares with the same matrix dequantized before it is packed.
    fn check(rows: usize, n: usize, groups: ColumnGroups) {
        let source = Stored { rows: n, groups };
        let (k, dequantised) = (source.cols(), source.dequantised());
        let x = numbers(2, rows * k);
        let mut pool = ThreadPool::new(1, "test").unwrap();
        for (format, computed) in [
            (WeightFormat::F32, WeightFormat::F32),
            (WeightFormat::Bf16, WeightFormat::Bf16),
            (WeightFormat::Q8, WeightFormat::Bf16),
        ] {
            let w = pack(&mut pool, &mut Slab::default(), format, &source);
            let plain = pack(&mut pool, &mut Slab::default(), computed, &dequantised);
            assert_eq!(w.format(), computed);
            let (mut found, mut expected) = (vec![0.0; k], vec![0.0; k]);
            for row in 0..n {
                w.copy_row(row, &mut found);
                plain.copy_row(row, &mut expected);
                assert_eq!(bits(&found), bits(&expected), "{format} row {row}");
            }
            for level in levels() {
                let context = format!("{rows}x{k}x{n} {format} {}", level.name());
                assert_eq!(bits(&gemm(level, &x, &w)), bits(&gemm(level, &x, &plain)), "{context}");
            }
        }
    }

    #[test]
    fn gemms_equal_those_of_the_dequantized_matrix() {
        for rows in [1, 2, 5, 16, 17, 40] {
            check(rows, 100, ColumnGroups::contiguous(256, 128));
            check(rows, 33, ColumnGroups::contiguous(96, 96));
        }
        check(3, 70, ColumnGroups::new((0..192).map(|col| (col * 7 % 6) as u16).collect()));
        // A panel of f32 is larger than the memory of several panels.
        check(1, 70, ColumnGroups::contiguous(4352, 128));
    }

    #[test]
    fn packed_matrices_take_little_more_than_their_numbers_and_scales() {
        let mut pool = ThreadPool::new(1, "test").unwrap();
        let source = Stored { rows: 64, groups: ColumnGroups::contiguous(1024, 128) };
        let w = pack(&mut pool, &mut Slab::default(), WeightFormat::Bf16, &source);
        assert_eq!(w.byte_count() as u64, int4::bytes(64, 1024, 8));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn any_shape_and_order_of_groups_equals_the_dequantized_matrix(
            rows in 1_usize..20,
            n in 1_usize..100,
            groups in prop::collection::vec(0_u16..5, 1..90),
        ) {
            check(rows, n, ColumnGroups::new(groups));
        }
    }
}
