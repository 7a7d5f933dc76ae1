//! Layout of INT4 on GPUs: chunks of 8 rows and 128 columns, the chunks of the first 8 rows first.
//! The numbers and scales of a chunk are in the order in which the lanes of a warp read them.

use super::{ColumnGroups, MAX};
use crate::backend::RowSource;

/// Rows of a chunk.
const ROWS: usize = 8;
/// Columns of a chunk.
const COLS: usize = 128;
/// Columns of a word of numbers.
const WORD: usize = 8;
/// Bytes of the numbers of a chunk. A lane has four words of one row, 32 columns apart.
const NUMBER_BYTES: usize = ROWS * COLS / 2;

/// Returns the bytes of a chunk with a scale for every `block` columns of a row.
fn chunk_bytes(block: usize) -> usize {
    NUMBER_BYTES + COLS / block * ROWS * size_of::<u32>()
}

/// Returns the bytes of 8 packed rows.
pub(crate) fn unit_bytes(cols: usize, block: usize) -> usize {
    cols.div_ceil(COLS) * chunk_bytes(block)
}

/// Returns the bytes of a packed matrix, whose rows and columns are padded to whole chunks.
pub fn packed_bytes(rows: usize, cols: usize, block: usize) -> usize {
    rows.div_ceil(ROWS) * unit_bytes(cols, block)
}

impl ColumnGroups {
    /// Returns how many columns share a scale in chunks: the greatest of 128, 64 and 32 for which
    /// blocks of neighbouring columns are in one group each. `None`: the columns do not fit chunks,
    /// because a group has other columns, or their number is no multiple of 8.
    pub fn block(&self) -> Option<usize> {
        let columns = self.of_columns();
        let fits = |block: &usize| {
            columns.chunks(*block).all(|block| block.iter().all(|group| *group == block[0]))
        };
        let is_whole = !columns.is_empty() && columns.len().is_multiple_of(WORD);
        [COLS, COLS / 2, COLS / 4].into_iter().find(|block| is_whole && fits(block))
    }
}

/// Returns a scale and a zero point in a word: the scale in f32, whose last four bits are the zero
/// point. A scale that was stored in f16 or bf16 stays exact.
fn scale_word(scale: f32, zero: u8) -> u32 {
    let low = u32::from(MAX);
    let rounded = f32::from_bits((scale.to_bits() + low.div_ceil(2)) & !low);
    // The largest scales would round to infinity.
    let rounded = if rounded.is_finite() { rounded.to_bits() } else { scale.to_bits() & !low };
    rounded | u32::from(zero)
}

/// Returns eight numbers in a word: those of even columns in the low half, those of odd columns in
/// the high half.
fn number_word(numbers: &[u8]) -> u32 {
    let places = numbers.iter().enumerate();
    places.fold(0, |word, (at, number)| word | u32::from(*number) << (at / 2 * 4 + at % 2 * 16))
}

/// Packs 8 rows of a matrix in INT4 with these groups from row `unit * 8` on, with a scale for
/// every `block` columns. `out` has [`unit_bytes`] bytes.
pub(crate) fn pack_unit(
    source: &dyn RowSource,
    (groups, block): (&ColumnGroups, usize),
    unit: usize,
    out: &mut [u8],
) {
    let (cols, first) = (source.cols(), unit * ROWS);
    let rows = ROWS.min(source.rows() - first);
    let mut numbers = vec![0; rows * cols];
    let (mut scales, mut zeros) =
        (vec![0.0; rows * groups.count()], vec![0; rows * groups.count()]);
    source.read_int4(first, &mut numbers, &mut scales, &mut zeros);
    for (slice, chunk) in out.chunks_exact_mut(chunk_bytes(block)).enumerate() {
        let (of_numbers, of_scales) = chunk.split_at_mut(NUMBER_BYTES);
        for (at, word) in of_numbers.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let (lane, piece) = (at / 4, at % 4);
            let (row, col) = (lane / 4, slice * COLS + piece * 32 + lane % 4 * WORD);
            let is_inside = row < rows && col < cols;
            let inside = is_inside.then(|| number_word(&numbers[row * cols + col..][..WORD]));
            *word = inside.unwrap_or(0).to_le_bytes();
        }
        for (at, word) in of_scales.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let (row, col) = (at % ROWS, slice * COLS + at / ROWS * block);
            let is_inside = row < rows && col < cols;
            let inside = is_inside.then(|| {
                let at = row * groups.count() + usize::from(groups.of_columns()[col]);
                scale_word(scales[at], zeros[at])
            });
            *word = inside.unwrap_or(0).to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::int4;

    /// Number of row r and column c: (7r + 3c + c / 8) mod 16. Scale of group g: 2^(g - r), zero
    /// point: (r + 5g) mod 16.
    struct Pattern {
        rows: usize,
        groups: ColumnGroups,
    }

    fn number(row: usize, col: usize) -> u8 {
        ((row * 7 + col * 3 + col / 8) % 16) as u8
    }

    fn group(row: usize, group: usize) -> (f32, u8) {
        (2.0_f32.powi(group as i32 - row as i32), ((row + 5 * group) % 16) as u8)
    }

    impl RowSource for Pattern {
        fn rows(&self) -> usize {
            self.rows
        }

        fn cols(&self) -> usize {
            self.groups.of_columns().len()
        }

        fn read_row(&self, _row: usize, _out: &mut [f32]) {
            panic!("numbers are packed as they are");
        }

        fn read_int4(
            &self,
            first: usize,
            numbers: &mut [u8],
            scales: &mut [f32],
            zeros: &mut [u8],
        ) {
            let (cols, count) = (self.cols(), self.groups.count());
            for (at, to) in numbers.iter_mut().enumerate() {
                *to = number(first + at / cols, at % cols);
            }
            for (at, to) in scales.iter_mut().zip(zeros).enumerate() {
                (*to.0, *to.1) = group(first + at / count, at % count);
            }
        }
    }

    /// Returns an element as `int4_gemm.cu` reads it.
    fn element(packed: &[u8], cols: usize, block: usize, row: usize, col: usize) -> f32 {
        let unit = &packed[row / ROWS * unit_bytes(cols, block)..];
        let chunk = &unit[col / COLS * chunk_bytes(block)..];
        let word = |at: usize| u32::from_le_bytes(chunk[at..][..4].try_into().unwrap());
        let (lane, piece) = (row % ROWS * 4 + col % 32 / WORD, col % COLS / 32);
        // The kernel takes the pairs of columns from a word, one after the other.
        let (pair, is_odd) = (col % WORD / 2, col % 2);
        let numbers = word(lane * 16 + piece * 4) >> (4 * pair) & 0x000f_000f;
        let scale = word(NUMBER_BYTES + (col % COLS / block * ROWS + row % ROWS) * 4);
        let number = (numbers >> (16 * is_odd)) as u8 & MAX;
        int4::element(number, scale as u8 & MAX, f32::from_bits(scale & !0xf))
    }

    #[test]
    fn packed_rows_have_the_numbers_and_scales_where_the_kernel_reads_them() {
        for (rows, cols, size, block) in
            [(8, 128, 128, 128), (13, 328, 32, 32), (3, 192, 64, 64), (20, 136, 136, 128)]
        {
            let source = Pattern { rows, groups: ColumnGroups::contiguous(cols, size) };
            assert_eq!(source.groups.block(), Some(block));
            let mut packed = vec![0xff; packed_bytes(rows, cols, block)];
            for (unit, out) in packed.chunks_exact_mut(unit_bytes(cols, block)).enumerate() {
                pack_unit(&source, (&source.groups, block), unit, out);
            }
            for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
                let (scale, zero) = group(row, col / size);
                let wanted = int4::element(number(row, col), zero, scale);
                assert_eq!(element(&packed, cols, block, row, col), wanted, "{row} {col}");
            }
            // The padding adds nothing to a sum.
            let padded = (rows.next_multiple_of(ROWS), cols.next_multiple_of(COLS));
            for (row, col) in (0..padded.0).flat_map(|row| (0..padded.1).map(move |c| (row, c))) {
                if row >= rows || col >= cols.next_multiple_of(block) {
                    assert_eq!(element(&packed, cols, block, row, col), 0.0, "{row} {col}");
                }
            }
        }
    }

    #[test]
    fn only_groups_of_neighbouring_columns_fit_chunks() {
        let block = |cols, size| ColumnGroups::contiguous(cols, size).block();
        assert_eq!(block(4096, 128), Some(128));
        assert_eq!(block(4096, 4096), Some(128));
        assert_eq!(block(4096, 256), Some(128));
        assert_eq!((block(4096, 64), block(4096, 32)), (Some(64), Some(32)));
        assert_eq!((block(4096, 48), block(4096, 16), block(100, 100)), (None, None, None));
        let part = ColumnGroups::contiguous(512, 128).part(64..320).1;
        assert_eq!(part.block(), Some(64));
        assert_eq!(ColumnGroups::new(vec![1; 128]).block(), Some(128));
        let reordered = (0..256).map(|col| (col % 2) as u16).collect();
        assert_eq!(ColumnGroups::new(reordered).block(), None);
        assert_eq!(ColumnGroups::new(Vec::new()).block(), None);
    }

    #[test]
    fn scales_of_sixteen_bits_stay_exact_beside_the_zero_point() {
        for scale in [0.0, 1.5, -0.007_812_5, 65504.0, 2.0_f32.powi(-24), 3.0e38] {
            let scale = half::bf16::from_f32(scale).to_f32();
            let word = scale_word(scale, 11);
            assert_eq!((f32::from_bits(word & !0xf), word & 0xf), (scale, 11));
        }
        let rounded = f32::from_bits(scale_word(0.1, 15) & !0xf);
        assert!((rounded / 0.1 - 1.0).abs() < 1e-6, "{rounded}");
    }
}
