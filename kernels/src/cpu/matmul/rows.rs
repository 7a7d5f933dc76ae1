//! Rows of a GEMM's left operand, packed in blocks that a tile reads sequentially.

use super::{
    super::{
        aligned::Aligned,
        arithmetic::round_to_bf16,
        disjoint_slice::DisjointSlice,
        isa::{Level, per_level},
        threads::ThreadPool,
    },
    pack::INPUTS_STEP,
    q8,
};
use crate::layout::to_bf16_bits;

/// Storage format of the left operand's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowFormat {
    F32,
    /// f32 rounded to bf16.
    Rounded,
    /// As `Rounded`, padded with zeros to whole steps of 32 inputs; one row only.
    Stepped,
    /// Two bf16 inputs per word, the even one in the lower half.
    Pairs,
    /// Blocks of 32 inputs in the layout of [`q8::pack_inputs`].
    Q8,
}

impl RowFormat {
    /// Returns the number of 32-bit words of one packed row of `k` inputs.
    pub(super) fn row_words(self, k: usize) -> usize {
        match self {
            RowFormat::F32 | RowFormat::Rounded => k,
            RowFormat::Stepped => k.next_multiple_of(INPUTS_STEP),
            RowFormat::Pairs => k.div_ceil(2),
            RowFormat::Q8 => k.div_ceil(q8::BLOCK) * q8::INPUT_WORDS,
        }
    }
}

/// Row blocks as `[block][words of a row][rows of the block]`. A word is an input, a pair of
/// inputs, or a word of a Q8 block. All blocks but the last have equally many rows.
pub(super) struct PackedRows {
    /// f32 bits, bf16 pairs or words of Q8 blocks.
    words: Aligned<u32>,
    row_count: usize,
    block_rows: usize,
    /// Words of one row.
    row_words: usize,
}

impl Default for PackedRows {
    fn default() -> Self {
        Self { words: Aligned::zeroed(0), row_count: 0, block_rows: 1, row_words: 0 }
    }
}

impl PackedRows {
    /// Packs `x` (`[rows][k]`, at least one row) in blocks of at most `block_rows_max` rows.
    pub(super) fn pack(
        &mut self,
        level: Level,
        pool: &mut ThreadPool,
        x: &[f32],
        k: usize,
        block_rows_max: usize,
        format: RowFormat,
    ) {
        self.row_count = x.len() / k;
        // Evenly: 13 rows become 7 and 6 rather than 12 and 1.
        let block_count = self.row_count.div_ceil(block_rows_max);
        self.block_rows = self.row_count.div_ceil(block_count);
        self.row_words = format.row_words(k);
        let words = self.row_count * self.row_words;
        if self.words.len() < words {
            self.words = Aligned::zeroed(words.next_power_of_two());
        }
        let (count, block_rows, row_words) = (self.count(), self.block_rows, self.row_words);
        let parts = DisjointSlice::new(&mut self.words[..words]);
        let pack_block = |block: usize| {
            let x = &x[block * block_rows * k..];
            let x = &x[..(block_rows * k).min(x.len())];
            let length = x.len() / k * row_words;
            // SAFETY: each block is packed once, and blocks do not overlap.
            let out = unsafe { parts.slice(block * block_rows * row_words, length) };
            pack_block_rows(level, x, k, format, out);
        };
        // Packing a few rows is faster than waking another thread.
        if x.len() < 1 << 15 {
            (0..count).for_each(pack_block);
        } else {
            pool.run(count, &|_, block| pack_block(block));
        }
    }

    /// Returns the number of blocks.
    pub(super) fn count(&self) -> usize {
        self.row_count.div_ceil(self.block_rows)
    }

    /// Returns the bytes of every block but the last, which may be smaller.
    pub(super) fn block_bytes(&self) -> usize {
        self.block_rows * self.row_words * size_of::<u32>()
    }

    pub(super) fn first_row(&self, block: usize) -> usize {
        block * self.block_rows
    }

    pub(super) fn rows_in(&self, block: usize) -> usize {
        self.block_rows.min(self.row_count - self.first_row(block))
    }

    /// Returns one block, `[words of a row][rows_in(block)]`.
    pub(super) fn block(&self, block: usize) -> &[u32] {
        &self.words[self.first_row(block) * self.row_words..]
            [..self.rows_in(block) * self.row_words]
    }
}

/// Packs the rows of one block.
fn pack_block_rows(level: Level, x: &[f32], k: usize, format: RowFormat, out: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if level == Level::Avx512Bf16 && format == RowFormat::Pairs && x.len() > k {
        // SAFETY: the level was found on this machine.
        return unsafe { avx512_pairs(x, k, out) };
    }
    pack_any_rows(level, x, k, format, out);
}

per_level! {
    fn pack_any_rows(x: &[f32], k: usize, format: RowFormat, out: &mut [u32]) {
        match format {
            RowFormat::F32 => interleave::<1>(x, k, out, |[value]| value.to_bits()),
            RowFormat::Rounded => {
                interleave::<1>(x, k, out, |[value]| round_to_bf16(value).to_bits());
            }
            RowFormat::Stepped => {
                let (inputs, filling) = out.split_at_mut(k);
                interleave::<1>(x, k, inputs, |[value]| round_to_bf16(value).to_bits());
                filling.fill(0);
            }
            RowFormat::Pairs => interleave::<2>(x, k, out, |[even, odd]| {
                u32::from(to_bf16_bits(even)) | u32::from(to_bf16_bits(odd)) << 16
            }),
            RowFormat::Q8 => quantise(x, k, out),
        }
    }
}

/// Quantizes `[rows][k]` to `[block][INPUT_WORDS][rows]`; the last block is padded with zeros.
#[inline(always)]
fn quantise(x: &[f32], k: usize, out: &mut [u32]) {
    let rows = x.len() / k;
    for (row, x) in x.chunks_exact(k).enumerate() {
        let (whole, rest) = x.as_chunks::<{ q8::BLOCK }>();
        let mut last = [0.0; q8::BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(&last);
        for (block, out) in
            whole.iter().chain(last).zip(out.chunks_exact_mut(q8::INPUT_WORDS * rows))
        {
            for (word, packed) in q8::pack_inputs(block).into_iter().enumerate() {
                out[word * rows + row] = packed;
            }
        }
    }
}

/// Interleaves `[rows][k]` to `[group][rows]`, where a group is `N` inputs. Pads the last group
/// with zeros.
#[inline(always)]
fn interleave<const N: usize>(
    x: &[f32],
    k: usize,
    out: &mut [u32],
    convert: impl Fn([f32; N]) -> u32,
) {
    let rows = x.len() / k;
    for (row, x) in x.chunks_exact(k).enumerate() {
        let (groups, rest) = x.as_chunks::<N>();
        let (whole, last) = out.split_at_mut(groups.len() * rows);
        if rows == 1 {
            // A separate loop, so that the compiler vectorizes it.
            for (out, &group) in whole.iter_mut().zip(groups) {
                *out = convert(group);
            }
        } else {
            for (out, &group) in whole.chunks_exact_mut(rows).zip(groups) {
                out[row] = convert(group);
            }
        }
        if !rest.is_empty() {
            let mut group = [0.0; N];
            group[..rest.len()].copy_from_slice(rest);
            last[row] = convert(group);
        }
    }
}

/// Packs 1 to 16 rows as [`RowFormat::Pairs`] by transposing vectors of 16 pairs.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn avx512_pairs(x: &[f32], k: usize, out: &mut [u32]) {
    use std::arch::x86_64::{
        __m512, __m512bh, _mm512_cvtne2ps_pbh, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
        _mm512_setzero_ps,
    };

    use super::super::{arithmetic::LANES, vectors::transpose_vectors};

    let (rows, groups) = (x.len() / k, k.div_ceil(2));
    assert!(rows <= LANES && out.len() == rows * groups, "a block is [group][rows]");
    let mask = |count: usize| ((1_u32 << count.min(LANES)) - 1) as u16;
    for first in (0..groups).step_by(LANES) {
        let inputs = k - first * 2;
        let masks = [mask(inputs), mask(inputs.saturating_sub(LANES))];
        let mut pairs = [_mm512_setzero_ps(); LANES];
        for (row, pairs) in pairs.iter_mut().take(rows).enumerate() {
            // SAFETY: the masks select the rest of the row; both types are 64 bytes without
            // invalid values.
            *pairs = unsafe {
                let from = x.as_ptr().add(row * k + first * 2);
                let low = _mm512_maskz_loadu_ps(masks[0], from);
                let high = _mm512_maskz_loadu_ps(masks[1], from.wrapping_add(LANES));
                std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low))
            };
        }
        let count = LANES.min(groups - first);
        for (group, column) in transpose_vectors(pairs).into_iter().take(count).enumerate() {
            // SAFETY: the mask selects the group's rows.
            unsafe {
                let to = out.as_mut_ptr().add((first + group) * rows).cast();
                _mm512_mask_storeu_ps(to, mask(rows), column);
            }
        }
    }
}
