//! State of one tile: its queries and their accumulators.

use std::ops::Range;

use super::{KvElement, portable};
use crate::{
    cpu::{
        aligned::Aligned,
        isa::{Level, per_level},
    },
    layout::BLOCK_TOKENS,
};

/// Queries whose scores are computed together. Their elements are interleaved.
pub(super) const QUERY_GROUP: usize = 16;
/// Maximum blocks that a tile with few queries processes together.
pub(super) const BLOCKS_TOGETHER: usize = 4;
/// Maximum queries for processing blocks together: about one row of grouped query heads.
pub(super) const FEW_QUERIES: usize = 4;

/// Memory of one tile, reused for the next tile. Queries are numbered row by row, and within a row
/// head by head, so their positions do not decrease.
pub(super) struct TileMemory {
    pub dim: usize,
    pub query_count: usize,
    /// Query heads of one row.
    head_count: usize,
    first_position: usize,
    /// Tokens that a query sees, including itself as the last.
    window: usize,
    /// `[group][dim][QUERY_GROUP]`, scaled; unused entries are zero.
    pub queries: Aligned<f32>,
    /// `[query][dim]`: weighted sums of values.
    pub weighted: Aligned<f32>,
    /// `[query][token]`: scores, then weights, of the current block; with few queries
    /// `[block][FEW_QUERIES][token]`.
    pub weights: Aligned<f32>,
    /// Greatest score so far, per query.
    pub maxima: Vec<f32>,
    /// Sum of weights so far, per query.
    pub sums: Vec<f32>,
    /// Factor for the accumulators from before the current block, per query.
    pub corrections: Vec<f32>,
    /// Tokens of the current block that each query sees.
    pub seen: Vec<SeenTokens>,
    /// `[dim][token]` of the current block, or `[block][dim][token]`.
    pub keys: Aligned<f32>,
    /// `[token][dim]` of the current block.
    pub values: Aligned<f32>,
}

/// Range of tokens of a block; may be empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SeenTokens {
    pub begin: usize,
    pub end: usize,
}

impl SeenTokens {
    pub(super) fn is_empty(self) -> bool {
        self.begin >= self.end
    }

    pub(super) fn is_whole(self) -> bool {
        self == SeenTokens { begin: 0, end: BLOCK_TOKENS }
    }
}

impl Default for TileMemory {
    fn default() -> Self {
        let empty = || Aligned::zeroed(0);
        Self {
            dim: 0,
            query_count: 0,
            head_count: 1,
            first_position: 0,
            window: usize::MAX,
            queries: empty(),
            weighted: empty(),
            weights: empty(),
            maxima: Vec::new(),
            sums: Vec::new(),
            corrections: Vec::new(),
            seen: Vec::new(),
            keys: empty(),
            values: empty(),
        }
    }
}

impl TileMemory {
    /// Makes room for `row_count` rows of `head_count` queries and clears the last tile.
    pub(super) fn begin(
        &mut self,
        row_count: usize,
        head_count: usize,
        dim: usize,
        first_position: usize,
        window: usize,
    ) {
        let query_count = row_count * head_count;
        let groups = query_count.div_ceil(QUERY_GROUP);
        if self.dim != dim || self.queries.len() < groups * QUERY_GROUP * dim {
            self.queries = Aligned::zeroed(groups * QUERY_GROUP * dim);
            self.weighted = Aligned::zeroed(groups * QUERY_GROUP * dim);
            self.weights = Aligned::zeroed(groups * QUERY_GROUP * BLOCK_TOKENS);
            self.keys = Aligned::zeroed(BLOCKS_TOGETHER * dim * BLOCK_TOKENS);
            self.values = Aligned::zeroed(dim * BLOCK_TOKENS);
        }
        self.queries[(groups - 1) * QUERY_GROUP * dim..groups * QUERY_GROUP * dim].fill(0.0);
        self.weighted[..query_count * dim].fill(0.0);
        for (values, first) in [
            (&mut self.maxima, f32::NEG_INFINITY),
            (&mut self.sums, 0.0),
            (&mut self.corrections, 0.0),
        ] {
            values.clear();
            values.resize(query_count, first);
        }
        self.seen.clear();
        self.seen.resize(query_count, SeenTokens::default());
        (self.dim, self.query_count) = (dim, query_count);
        (self.head_count, self.first_position, self.window) = (head_count, first_position, window);
    }

    /// Adds the sink of each query head to the softmax of the head's queries. Called before the
    /// first block.
    pub(super) fn add_sinks(&mut self, sinks: &[f32]) {
        for (maximum, sink) in self.maxima.iter_mut().zip(sinks.iter().cycle()) {
            *maximum = *sink;
        }
        self.sums.fill(1.0);
    }

    pub(super) fn set_query(&mut self, query: usize, scale: f32, elements: &[f32]) {
        let group = &mut self.queries[query / QUERY_GROUP * QUERY_GROUP * self.dim..]
            [..QUERY_GROUP * self.dim];
        for (place, &element) in group.chunks_exact_mut(QUERY_GROUP).zip(elements) {
            place[query % QUERY_GROUP] = element * scale;
        }
    }

    /// Processes the sequence's blocks from index `first` on, as far as each query sees them. Each
    /// is (keys, values), `[token][dim]`; at most [`BLOCKS_TOGETHER`].
    pub(super) fn add_blocks<T: KvElement>(
        &mut self,
        level: Level,
        first: usize,
        blocks: &[(&[T], &[T])],
    ) {
        #[cfg(target_arch = "x86_64")]
        if matches!(level, Level::Avx512 | Level::Avx512Bf16 | Level::Amx)
            && self.dim.is_multiple_of(16)
        {
            if self.query_count <= FEW_QUERIES {
                // SAFETY: the level was found on this machine; width and count were
                // checked.
                return unsafe { super::avx512::add_few(self, first, blocks) };
            }
            for (index, (keys, values)) in (first..).zip(blocks) {
                self.set_visible(index);
                // SAFETY: the level was found on this machine, and `dim` is a multiple of 16.
                unsafe { super::avx512::add_block(self, keys, values) };
            }
            return;
        }
        for (index, (keys, values)) in (first..).zip(blocks) {
            self.set_visible(index);
            portable::add_block(level, self, keys, values);
        }
    }

    /// Sets which tokens of the sequence's block `index` each query sees.
    #[inline]
    pub(super) fn set_visible(&mut self, index: usize) {
        let in_block =
            |position: usize| position.saturating_sub(index * BLOCK_TOKENS).min(BLOCK_TOKENS);
        for (query, seen) in self.seen.iter_mut().enumerate() {
            let end = self.first_position + query / self.head_count + 1;
            let begin = end.saturating_sub(self.window);
            *seen = SeenTokens { begin: in_block(begin), end: in_block(end) };
        }
    }

    /// Returns whether one of `queries` sees a token of the current block.
    #[inline]
    pub(super) fn any_sees(&self, queries: Range<usize>) -> bool {
        self.seen[queries].iter().any(|seen| !seen.is_empty())
    }

    /// Returns whether each of `queries` sees all tokens of the current block.
    #[inline]
    pub(super) fn all_see_all(&self, queries: Range<usize>) -> bool {
        self.seen[queries].iter().all(|seen| seen.is_whole())
    }

    /// Writes the attention of one query, after its last block.
    pub(super) fn finish(&self, level: Level, query: usize, out: &mut [f32]) {
        let weighted = &self.weighted[query * self.dim..][..self.dim];
        divide(level, weighted, self.sums[query], out);
    }
}

per_level! {
    fn divide(values: &[f32], by: f32, out: &mut [f32]) {
        for (out, value) in out.iter_mut().zip(values) {
            *out = value / by;
        }
    }
}
