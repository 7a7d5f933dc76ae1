//! Tiles of 8-bit weights in plain Rust, for processors without AVX2.

use half::f16;

use super::{
    super::{MatmulTile, TileOutput},
    BLOCK, CORRECTION_WORD, INPUT_WORDS, NUMBER_WORDS, PANEL_BLOCK_WORDS, SCALE_WORD,
};
use crate::cpu::{arithmetic::multiply_add, isa::BASELINE_FUSES, matmul::pack::PANEL};

/// Multiplies one row block with one panel. Adds the products of one block of 32 inputs as
/// integers, and then the scaled sum to the row's result.
///
/// # Safety
/// `target` may be written in the tile's rows and columns.
pub(in crate::cpu::matmul) unsafe fn tile(
    tile: &MatmulTile<'_>,
    target: &TileOutput,
    panel_count: usize,
) {
    let rows = tile.row_count;
    assert!(
        panel_count == 1 && tile.columns <= PANEL,
        "this kernel multiplies one panel at a time"
    );
    let row_words = tile.k.div_ceil(BLOCK) * INPUT_WORDS;
    assert_eq!(tile.x.len(), rows * row_words, "a row block is [words of a row][rows]");
    for row in 0..rows {
        let mut sums = [0.0_f32; PANEL];
        let blocks = tile.x.chunks_exact(rows * INPUT_WORDS);
        for (x, weights) in blocks.zip(tile.panels.as_chunks::<PANEL_BLOCK_WORDS>().0) {
            let word = |index: usize| x[index * rows + row];
            // The weights have an offset. The correction removes it from the integer sums.
            let mut integer_sums = [word(CORRECTION_WORD).cast_signed(); PANEL];
            let (numbers, scales) = weights.split_at(NUMBER_WORDS);
            for (group, numbers) in numbers.as_chunks::<PANEL>().0.iter().enumerate() {
                let x = word(group).to_le_bytes().map(|byte| i32::from(byte.cast_signed()));
                for (integer_sum, numbers) in integer_sums.iter_mut().zip(numbers) {
                    for (x, number) in x.iter().zip(numbers.to_le_bytes()) {
                        *integer_sum += x * i32::from(number);
                    }
                }
            }
            let x_scale = f32::from_bits(word(SCALE_WORD));
            for (lane, (sum, integer_sum)) in sums.iter_mut().zip(integer_sums).enumerate() {
                // A word has the f16 scales of two output features, the even one in the lower half.
                let scale = f16::from_bits((scales[lane / 2] >> (16 * (lane % 2))) as u16);
                let scale = scale.to_f32() * x_scale;
                *sum = multiply_add::<BASELINE_FUSES>(integer_sum as f32, scale, *sum);
            }
        }
        // SAFETY: the target has `tile.columns` columns in each of the block's rows, and the
        // accumulators do not overlap it.
        unsafe { sums.as_ptr().copy_to_nonoverlapping(target.at(row, 0), tile.columns) };
    }
}
