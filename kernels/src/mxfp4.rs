//! MXFP4: numbers of 4 bits (e2m1). Each group of [`GROUP`] numbers of a row has a block scale, a
//! power of two (e8m0). GPUs read a matrix in chunks of 64 rows and 64 columns. The numbers and
//! scales of a chunk are in the order in which the threads of a warpgroup read them.

use std::array;

use crate::backend::RowSource;

/// Numbers of a row that share a scale.
pub const GROUP: usize = 32;

/// Rows and columns of a chunk.
const CHUNK: usize = 64;
/// Rows of a chunk that a warp reads.
const WARP_ROWS: usize = 16;
const CHUNK_NUMBER_BYTES: usize = CHUNK * CHUNK / 2;
const CHUNK_BYTES: usize = CHUNK_NUMBER_BYTES + CHUNK * CHUNK / GROUP;

/// Returns the bytes of this number of MXFP4 numbers, scales included.
pub fn bytes(numbers: u64) -> u64 {
    numbers / 2 + numbers / GROUP as u64
}

/// Returns the bytes of 64 packed rows.
pub(crate) fn tile_bytes(cols: usize) -> usize {
    cols.div_ceil(CHUNK) * CHUNK_BYTES
}

/// Returns the bytes of a packed matrix, whose rows and columns are padded to whole chunks.
pub(crate) fn packed_bytes(rows: usize, cols: usize) -> usize {
    rows.div_ceil(CHUNK) * tile_bytes(cols)
}

/// Returns a word for each byte, which has two numbers. `bits` are the places in the word for the
/// bits of the number in the low half of the byte, the sign first. The places for the number in the
/// high half are greater by 16, modulo 32.
const fn spread(bits: [u32; 4]) -> [u32; 256] {
    let mut words = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut word = 0;
        let mut at = 0;
        while at < 4 {
            word |= (byte >> (3 - at) & 1) << bits[at];
            word |= (byte >> (7 - at) & 1) << ((bits[at] + 16) % 32);
            at += 1;
        }
        words[byte as usize] = word;
        byte += 1;
    }
    words
}

/// The four fields of a word. Each field has one byte, the numbers of two neighbouring columns. The
/// bytes are those of a row, of the row eight below, and of the same two rows eight columns to the
/// right. The first field has its bits where bf16 has sign, exponent and mantissa. Rotations by 10
/// and 13 bits to the left move the second and the third field there. Shifts by 2, 7 and 12 bits
/// move the bits of the fourth. `kernels/cuda/experts/mxfp4_tile.cuh` reads these fields.
static FIELDS: [[u32; 256]; 4] =
    [spread([15, 8, 7, 6]), spread([5, 30, 29, 28]), spread([2, 27, 26, 25]), spread([3, 1, 0, 4])];

/// Packs tile `tile` (64 rows) of a matrix stored in MXFP4 with this number of
/// [parts](RowSource::mxfp4_parts). Rows of two parts alternate: eight rows of the first part, then
/// eight of the second. `out` has [`tile_bytes`] bytes.
pub(crate) fn pack_tile(source: &dyn RowSource, parts: usize, tile: usize, out: &mut [u8]) {
    let (part_rows, cols) = (source.rows() / parts, source.cols());
    let (row_bytes, groups) = (cols.div_ceil(CHUNK) * CHUNK / 2, cols.div_ceil(CHUNK) * 2);
    let (mut numbers, mut scales) = (vec![0; CHUNK * row_bytes], vec![0; CHUNK * groups]);
    let own = CHUNK / parts;
    let first = (tile * own).min(part_rows);
    let rows = own.min(part_rows - first);
    let (stored_bytes, stored_groups) = (cols / 2, cols / GROUP);
    let (mut of_rows, mut of_groups) =
        (vec![0; rows * stored_bytes], vec![0; rows * stored_groups]);
    for part in 0..parts {
        source.read_mxfp4(part * part_rows + first, &mut of_rows, &mut of_groups);
        for row in 0..rows {
            let to = part * own + row;
            numbers[to * row_bytes..][..stored_bytes]
                .copy_from_slice(&of_rows[row * stored_bytes..][..stored_bytes]);
            scales[to * groups..][..stored_groups]
                .copy_from_slice(&of_groups[row * stored_groups..][..stored_groups]);
        }
    }
    // Returns the rows of `numbers` that are row `row` of the upper and of the lower eight rows of a
    // warp.
    let halves = |warp: usize, row: usize| match parts {
        1 => [warp * WARP_ROWS + row, warp * WARP_ROWS + 8 + row],
        _ => [warp * 8 + row, own + warp * 8 + row],
    };
    for (step, chunk) in out.chunks_exact_mut(CHUNK_BYTES).enumerate() {
        let (words, of_scales) = chunk.split_at_mut(CHUNK_NUMBER_BYTES);
        let (threads, of_rows) = (words.as_chunks_mut::<16>().0, of_scales.as_chunks_mut::<4>().0);
        for (thread, words) in threads.iter_mut().enumerate() {
            let (column, [upper, lower]) = (thread % 4, halves(thread / 32, thread / 4 % 8));
            for (q, word) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let byte = |row: usize, at: usize| {
                    numbers[row * row_bytes + step * (CHUNK / 2) + q * 8 + column + at]
                };
                let bytes = [byte(upper, 0), byte(lower, 0), byte(upper, 4), byte(lower, 4)];
                let fields = array::from_fn::<u32, 4, _>(|at| FIELDS[at][usize::from(bytes[at])]);
                *word = fields.iter().fold(0, |word, field| word | field).to_le_bytes();
            }
        }
        for (row, scale) in of_rows.iter_mut().enumerate() {
            let [upper, lower] = halves(row / 8, row % 8);
            let at = |row: usize, group: usize| scales[row * groups + 2 * step + group];
            *scale = [at(upper, 0), at(upper, 1), at(lower, 0), at(lower, 1)];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of row r and column c: (7r + 3c) mod 16; scale of group g: (r + 5g) mod 255.
    struct Pattern {
        rows: usize,
        cols: usize,
    }

    fn number(row: usize, col: usize) -> u32 {
        ((row * 7 + col * 3) % 16) as u32
    }

    fn scale(row: usize, group: usize) -> u8 {
        ((row + 5 * group) % 255) as u8
    }

    impl RowSource for Pattern {
        fn rows(&self) -> usize {
            self.rows
        }

        fn cols(&self) -> usize {
            self.cols
        }

        fn read_row(&self, _row: usize, _out: &mut [f32]) {
            panic!("numbers are packed as they are");
        }

        fn read_mxfp4(&self, first: usize, numbers: &mut [u8], scales: &mut [u8]) {
            for (row, numbers) in (first..).zip(numbers.chunks_exact_mut(self.cols / 2)) {
                for (at, byte) in numbers.iter_mut().enumerate() {
                    *byte = (number(row, 2 * at) | number(row, 2 * at + 1) << 4) as u8;
                }
            }
            for (row, scales) in (first..).zip(scales.chunks_exact_mut(self.cols / GROUP)) {
                scales.iter_mut().enumerate().for_each(|(at, bits)| *bits = scale(row, at));
            }
        }
    }

    /// Returns the numbers of a word as the kernel decodes them, by field and half.
    fn numbers_of(word: u32) -> [[u32; 2]; 4] {
        const FIELD: u32 = 0x81c0_81c0;
        const MOVES: u32 = 1 << 2 | 1 << 7 | 1 << 12;
        let fields = [
            word & FIELD,
            word.rotate_left(10) & FIELD,
            word.rotate_left(13) & FIELD,
            (word & 0x001b_001b).wrapping_mul(MOVES) & FIELD,
        ];
        fields
            .map(|pair| [pair & 0xffff, pair >> 16].map(|half| (half >> 15) << 3 | (half >> 6 & 7)))
    }

    #[test]
    fn packed_tiles_have_every_number_at_the_place_of_its_thread() {
        for (rows, cols, parts) in
            [(64, 64, 1), (72, 96, 1), (200, 32, 1), (16, 64, 2), (80, 160, 2), (144, 2880, 2)]
        {
            let source = Pattern { rows, cols };
            let bytes = tile_bytes(cols);
            let mut packed = vec![0xee; packed_bytes(rows, cols)];
            for (tile, out) in packed.chunks_exact_mut(bytes).enumerate() {
                pack_tile(&source, parts, tile, out);
            }
            for packed_row in 0..packed.len() / bytes * CHUNK {
                let block = packed_row / 8;
                let row = match parts {
                    1 => packed_row,
                    _ => block % 2 * (rows / 2) + block / 2 * 8 + packed_row % 8,
                };
                let is_row = if parts == 1 { row < rows } else { block / 2 * 8 < rows / 2 };
                for col in 0..cols.next_multiple_of(CHUNK) {
                    let is_stored = is_row && col < cols;
                    let wanted = if is_stored { number(row, col) } else { 0 };
                    let (tile, chunk) = (packed_row / CHUNK, col / CHUNK);
                    let chunk = &packed[tile * bytes + chunk * CHUNK_BYTES..][..CHUNK_BYTES];
                    let (warp, half) = (packed_row % CHUNK / 16, packed_row % 16 / 8);
                    let lane = packed_row % 8 * 4 + col % 8 / 2;
                    let at = (warp * 32 + lane) * 16 + col % CHUNK / 16 * 4;
                    let word = u32::from_le_bytes(chunk[at..at + 4].try_into().unwrap());
                    let field = half + col % 16 / 8 * 2;
                    let found = numbers_of(word)[field][col % 2];
                    assert_eq!(found, wanted, "{rows} x {cols}: row {row}, column {col}");
                    let scale_at = CHUNK_NUMBER_BYTES + (warp * 8 + packed_row % 8) * 4;
                    let found = chunk[scale_at + half * 2 + col % CHUNK / GROUP];
                    let wanted = if is_stored { scale(row, col / GROUP) } else { 0 };
                    assert_eq!(found, wanted, "{rows} x {cols}: scale of row {row}, column {col}");
                }
            }
        }
    }
}
