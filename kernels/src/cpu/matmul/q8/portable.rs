//! 8-bit tiles in plain Rust, for the compiler's target.

use half::f16;

use super::{
    super::{MatmulTile, TileOutput},
    BLOCK, GROUP, INPUT_WORDS, NUMBER_WORDS, PANEL_BLOCK_WORDS,
};
use crate::cpu::{arithmetic::multiply_add, isa::BASELINE_FUSES, matmul::pack::PANEL};

/// Multiplies one row block with one panel.
///
/// # Safety
/// `target` may be written in the tile's rows and columns.
pub(in crate::cpu::matmul) unsafe fn tile(
    tile: &MatmulTile<'_>,
    target: &TileOutput,
    _panel_count: usize,
) {
    let rows = tile.row_count;
    assert_eq!(tile.x.len(), rows * tile.k.div_ceil(BLOCK) * INPUT_WORDS);
    for row in 0..rows {
        let mut sums = [0.0_f32; PANEL];
        let blocks = tile.x.chunks_exact(rows * INPUT_WORDS);
        for (x, weights) in blocks.zip(tile.panels.as_chunks::<PANEL_BLOCK_WORDS>().0) {
            let word = |group: usize| x[group * rows + row];
            let mut whole = [word(BLOCK / GROUP + 1).cast_signed(); PANEL];
            let (numbers, scales) = weights.split_at(NUMBER_WORDS);
            for (group, numbers) in numbers.as_chunks::<PANEL>().0.iter().enumerate() {
                let x = word(group).to_le_bytes().map(|byte| i32::from(byte.cast_signed()));
                for (whole, numbers) in whole.iter_mut().zip(numbers) {
                    for (x, number) in x.iter().zip(numbers.to_le_bytes()) {
                        *whole += x * i32::from(number);
                    }
                }
            }
            let x_scale = f32::from_bits(word(BLOCK / GROUP));
            for (lane, (sum, whole)) in sums.iter_mut().zip(whole).enumerate() {
                let scale = f16::from_bits((scales[lane / 2] >> (16 * (lane % 2))) as u16);
                let scale = scale.to_f32() * x_scale;
                *sum = multiply_add::<BASELINE_FUSES>(whole as f32, scale, *sum);
            }
        }
        // SAFETY: the target has `tile.columns` columns in each of the block's rows, and the
        // accumulators do not overlap it.
        unsafe { sums.as_ptr().copy_to_nonoverlapping(target.at(row, 0), tile.columns) };
    }
}
