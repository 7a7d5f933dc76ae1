//! The rows of the left side, packed in blocks so that a tile reads them front to back.

use super::super::{
    aligned::Aligned, arithmetic::round_to_bf16, isa::Level, parts::Parts, threads::ThreadPool,
};

/// Row blocks as `[block][k][rows of the block]`. All blocks but the last have equally many rows.
pub(super) struct RowBlocks {
    words: Aligned<f32>,
    row_count: usize,
    block_rows: usize,
    k: usize,
}

impl Default for RowBlocks {
    fn default() -> Self {
        Self { words: Aligned::zeroed(0), row_count: 0, block_rows: 1, k: 0 }
    }
}

impl RowBlocks {
    /// Packs `x` (`[rows][k]`, at least one row) in blocks of at most `block_rows_max` rows;
    /// `rounded` passes every element through bf16.
    pub fn pack(
        &mut self,
        level: Level,
        pool: &mut ThreadPool,
        x: &[f32],
        k: usize,
        block_rows_max: usize,
        rounded: bool,
    ) {
        self.row_count = x.len() / k;
        // Evenly: 13 rows are 7 and 6 rather than 12 and a lonely one.
        let block_count = self.row_count.div_ceil(block_rows_max);
        self.block_rows = self.row_count.div_ceil(block_count);
        self.k = k;
        if self.words.len() < x.len() {
            self.words = Aligned::zeroed(x.len().next_power_of_two());
        }
        let block_elements = self.block_rows * k;
        let count = self.count();
        let parts = Parts::new(&mut self.words[..x.len()]);
        let pack_block = |block: usize| {
            let x = &x[block * block_elements..];
            let x = &x[..block_elements.min(x.len())];
            // SAFETY: each block is packed once, and blocks do not overlap.
            let out = unsafe { parts.slice(block * block_elements, x.len()) };
            level.run(|| match rounded {
                true => interleave(x, k, out, round_to_bf16),
                false => interleave(x, k, out, |value| value),
            });
        };
        // A few rows are packed sooner than another thread would have begun.
        if x.len() < 1 << 15 {
            (0..count).for_each(pack_block);
        } else {
            pool.run(count, &|_, block| pack_block(block));
        }
    }

    /// Blocks.
    pub fn count(&self) -> usize {
        self.row_count.div_ceil(self.block_rows)
    }

    /// Bytes of every block but the last, which may be smaller.
    pub fn block_bytes(&self) -> usize {
        self.block_rows * self.k * size_of::<f32>()
    }

    pub fn first_row(&self, block: usize) -> usize {
        block * self.block_rows
    }

    pub fn rows_in(&self, block: usize) -> usize {
        self.block_rows.min(self.row_count - self.first_row(block))
    }

    /// `[k][rows_in(block)]`.
    pub fn block(&self, block: usize) -> &[f32] {
        &self.words[self.first_row(block) * self.k..][..self.rows_in(block) * self.k]
    }
}

/// `[rows][k]` to `[k][rows]`.
#[inline(always)]
fn interleave(x: &[f32], k: usize, out: &mut [f32], convert: impl Fn(f32) -> f32) {
    let rows = x.len() / k;
    if rows == 1 {
        for (out, &value) in out.iter_mut().zip(x) {
            *out = convert(value);
        }
        return;
    }
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (group, &value) in out.chunks_exact_mut(rows).zip(x) {
            group[row] = convert(value);
        }
    }
}
