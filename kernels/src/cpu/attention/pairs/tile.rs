//! State of one tile: its queries, the current span, and the accumulators.

use crate::{
    cpu::{aligned::Aligned, arithmetic::LANES},
    layout::{BLOCK_TOKENS, to_bf16_bits},
};

/// Blocks of one span.
pub(super) const SPAN_BLOCKS: usize = 4;
/// Tokens of one span: four vectors of scores.
pub(super) const SPAN: usize = SPAN_BLOCKS * BLOCK_TOKENS;
/// Blocks of one segment.
pub(super) const SEGMENT_BLOCKS: usize = 4 * SPAN_BLOCKS;
/// Queries whose accumulators are in registers together: 6 · 4 vectors.
pub(super) const STRIP: usize = 6;
/// Initial maximum. Finite, so that differences are numbers.
pub(super) const NO_SCORE: f32 = -1e30;

/// Returns the floats of one query's partial result in memory: the maximum, the sum of weights, padding to
/// a vector, the weighted values.
pub(super) fn sums_len(dim: usize) -> usize {
    LANES + dim
}

/// Memory of one tile, reused for the next tile. Queries are numbered row by row, and within a row head by
/// head, so their positions do not decrease.
pub(super) struct PairsTile {
    pub dim: usize,
    pub query_count: usize,
    /// Query heads of one row.
    head_count: usize,
    /// Factor from scores to exponents of 2: the softmax's scale divided by ln 2.
    pub log2_scale: f32,
    /// `[strip][dim / 2][STRIP]`: pairs of a query's elements.
    pub queries: Aligned<u32>,
    /// `[dim / 2][SPAN]` of the current span: pairs of a key's elements.
    pub keys: Aligned<u32>,
    /// `[SPAN / 2][dim]` of the current span: pairs of tokens.
    pub values: Aligned<u32>,
    /// `[STRIP][SPAN / 2]` of the current strip and span: pairs of tokens.
    pub weights: Aligned<u32>,
    /// Tokens of the current span that each query sees, one bit per token.
    pub seen: Vec<u64>,
    /// Number of tokens of the current span up to the last token that any query sees.
    pub known: usize,
    /// Greatest score in the current segment, per query.
    pub maxima: Vec<f32>,
    /// Sums of weights in the current segment by lane: `[query][16]`.
    pub sums: Aligned<f32>,
    /// Weighted sums of values in the current segment: `[query][dim]`.
    pub weighted: Aligned<f32>,
    /// Result of all merged segments: `[query][sums_len(dim)]`.
    pub merged: Aligned<f32>,
}

impl Default for PairsTile {
    fn default() -> Self {
        Self {
            dim: 0,
            query_count: 0,
            head_count: 1,
            log2_scale: 0.0,
            queries: Aligned::zeroed(0),
            keys: Aligned::zeroed(0),
            values: Aligned::zeroed(0),
            weights: Aligned::zeroed(STRIP * SPAN / 2),
            seen: Vec::new(),
            known: 0,
            maxima: Vec::new(),
            sums: Aligned::zeroed(0),
            weighted: Aligned::zeroed(0),
            merged: Aligned::zeroed(0),
        }
    }
}

impl PairsTile {
    /// Makes room for `row_count` rows of `head_count` queries and clears the last tile.
    pub fn begin(&mut self, row_count: usize, head_count: usize, dim: usize, scale: f32) {
        let query_count = row_count * head_count;
        let room = query_count.next_multiple_of(STRIP);
        if self.dim != dim || self.sums.len() < room * LANES {
            self.queries = Aligned::zeroed(room * dim / 2);
            self.keys = Aligned::zeroed(dim / 2 * SPAN);
            self.values = Aligned::zeroed(SPAN / 2 * dim);
            self.sums = Aligned::zeroed(room * LANES);
            self.weighted = Aligned::zeroed(room * dim);
            self.merged = Aligned::zeroed(room * sums_len(dim));
        }
        (self.dim, self.query_count, self.head_count) = (dim, query_count, head_count);
        self.log2_scale = scale * std::f32::consts::LOG2_E;
        for merged in self.merged.chunks_exact_mut(sums_len(dim)).take(query_count) {
            merged.fill(0.0);
            merged[0] = NO_SCORE;
        }
        self.seen.clear();
        self.seen.resize(query_count, 0);
    }

    pub fn set_query(&mut self, query: usize, elements: &[f32]) {
        let strip_words = self.dim / 2 * STRIP;
        let strip = &mut self.queries[query / STRIP * strip_words..][..strip_words];
        let places = strip.iter_mut().skip(query % STRIP).step_by(STRIP);
        for (place, pair) in places.zip(elements.as_chunks::<2>().0) {
            let [even, odd] = pair.map(|element| u32::from(to_bf16_bits(element)));
            *place = even | odd << 16;
        }
    }

    /// Clears the accumulators for a new segment.
    pub fn begin_segment(&mut self) {
        self.maxima.clear();
        self.maxima.resize(self.query_count, NO_SCORE);
        self.sums[..self.query_count * LANES].fill(0.0);
        self.weighted[..self.query_count * self.dim].fill(0.0);
    }

    /// Sets which tokens each query sees of the span that begins with token `first`. The first row is
    /// at `position`, and a row sees `window` tokens including itself.
    pub fn set_visible(&mut self, first: usize, position: usize, window: usize) {
        let in_span = |token: usize| token.saturating_sub(first).min(SPAN);
        let below = |token: usize| ((1_u128 << in_span(token)) - 1) as u64;
        for (row, seen) in self.seen.chunks_mut(self.head_count).enumerate() {
            let end = position + row + 1;
            seen.fill(below(end) & !below(end.saturating_sub(window)));
        }
        self.known = in_span(position + self.query_count / self.head_count);
    }
}
