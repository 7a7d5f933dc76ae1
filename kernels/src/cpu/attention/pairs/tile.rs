//! State of one tile: its queries, the keys and values of the current span, and the accumulators.

use crate::{
    cpu::{aligned::Aligned, arithmetic::LANES},
    layout::{BLOCK_TOKENS, to_bf16_bits},
};

/// KV blocks of one span.
pub(super) const SPAN_BLOCKS: usize = 4;
/// Tokens of one span: four vectors of scores.
pub(super) const SPAN: usize = SPAN_BLOCKS * BLOCK_TOKENS;
/// KV blocks of one segment: four spans.
pub(super) const SEGMENT_BLOCKS: usize = 4 * SPAN_BLOCKS;
/// Queries of one strip, whose scores are computed together: 6 queries with 4 vectors of scores
/// each take 24 of the 32 vector registers.
pub(super) const STRIP: usize = 6;
/// Initial maximum of the scores. Finite, because -∞ minus -∞ would be NaN.
pub(super) const NO_SCORE: f32 = -1e30;

/// Returns the number of f32 of one query's partial result: the maximum and the sum of weights,
/// padded to one vector, and then the weighted sum of values.
pub(super) fn sums_len(dim: usize) -> usize {
    LANES + dim
}

/// State of one tile: the queries of consecutive rows of a sequence that share a KV head (GQA). The
/// next tile reuses the memory. Queries are numbered row by row, and within a row head by head, so
/// their positions do not decrease.
pub(super) struct PairsTile {
    /// Dimension of a head.
    pub dim: usize,
    pub query_count: usize,
    /// Queries of one row: the query heads that share the KV head.
    head_count: usize,
    /// Factor from dot products to exponents of 2: the softmax scale divided by ln 2.
    pub log2_scale: f32,
    /// `[strip][dim / 2][STRIP]`: pairs of a query's elements in bf16, the even element in the
    /// lower half of the word.
    pub queries: Aligned<u32>,
    /// Keys of the current span, transposed: `[dim / 2][SPAN]` pairs of a key's elements.
    pub keys: Aligned<u32>,
    /// Values of the current span: `[SPAN / 2][dim]` pairs of the elements of two successive
    /// tokens.
    pub values: Aligned<u32>,
    /// Softmax weights of the current strip and span: `[STRIP][SPAN / 2]` pairs of the weights of
    /// two successive tokens.
    pub weights: Aligned<u32>,
    /// Tokens of the current span that each query sees: bit i is token i of the span.
    pub visible: Vec<u64>,
    /// Index in the current span after the last token that any query sees.
    pub visible_end: usize,
    /// Running maximum of the scores in the current segment, per query.
    pub maxima: Vec<f32>,
    /// Running sums of the weights in the current segment, `[query][LANES]`: each lane sums the
    /// tokens of its lane.
    pub sums: Aligned<f32>,
    /// Running weighted sums of the values in the current segment: `[query][dim]`.
    pub weighted: Aligned<f32>,
    /// Partial result of all segments so far, `[query][sums_len(dim)]`.
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
            visible: Vec::new(),
            visible_end: 0,
            maxima: Vec::new(),
            sums: Aligned::zeroed(0),
            weighted: Aligned::zeroed(0),
            merged: Aligned::zeroed(0),
        }
    }
}

impl PairsTile {
    /// Starts a tile of `row_count` rows with `head_count` queries each. Grows the memory if
    /// needed.
    pub(super) fn begin(&mut self, row_count: usize, head_count: usize, dim: usize, scale: f32) {
        let query_count = row_count * head_count;
        let capacity = query_count.next_multiple_of(STRIP);
        if self.dim != dim || self.sums.len() < capacity * LANES {
            self.queries = Aligned::zeroed(capacity * dim / 2);
            self.keys = Aligned::zeroed(dim / 2 * SPAN);
            self.values = Aligned::zeroed(SPAN / 2 * dim);
            self.sums = Aligned::zeroed(capacity * LANES);
            self.weighted = Aligned::zeroed(capacity * dim);
            self.merged = Aligned::zeroed(capacity * sums_len(dim));
        }
        (self.dim, self.query_count, self.head_count) = (dim, query_count, head_count);
        self.log2_scale = scale * std::f32::consts::LOG2_E;
        for merged in self.merged.chunks_exact_mut(sums_len(dim)).take(query_count) {
            merged.fill(0.0);
            merged[0] = NO_SCORE;
        }
        self.visible.clear();
        self.visible.resize(query_count, 0);
    }

    /// Adds the sink of each query head to the merged softmax of the head's queries. Called before
    /// the first segment. Maxima are scores before the multiplication by `scale`.
    pub(super) fn add_sinks(&mut self, sinks: &[f32], scale: f32) {
        let merged = self.merged.chunks_exact_mut(sums_len(self.dim)).take(self.query_count);
        for (merged, sink) in merged.zip(sinks.iter().cycle()) {
            (merged[0], merged[1]) = (sink / scale, 1.0);
        }
    }

    /// Rounds the elements of a query to bf16 and stores them in pairs.
    pub(super) fn set_query(&mut self, query: usize, elements: &[f32]) {
        let strip_words = self.dim / 2 * STRIP;
        let strip = &mut self.queries[query / STRIP * strip_words..][..strip_words];
        let words = strip.iter_mut().skip(query % STRIP).step_by(STRIP);
        for (word, pair) in words.zip(elements.as_chunks::<2>().0) {
            let [even, odd] = pair.map(|element| u32::from(to_bf16_bits(element)));
            *word = even | odd << 16;
        }
    }

    /// Clears the accumulators for a new segment.
    pub(super) fn begin_segment(&mut self) {
        self.maxima.clear();
        self.maxima.resize(self.query_count, NO_SCORE);
        self.sums[..self.query_count * LANES].fill(0.0);
        self.weighted[..self.query_count * self.dim].fill(0.0);
    }

    /// Sets which tokens of the span each query sees. The span begins with token `first` of the
    /// sequence. The tile's first row is token `position`. A row sees the last `window` tokens up
    /// to and including itself.
    pub(super) fn set_visible(&mut self, first: usize, position: usize, window: usize) {
        let in_span = |token: usize| token.saturating_sub(first).min(SPAN);
        // The bits of the span's tokens before `token`. `u128`, because all 64 bits may be set.
        let below = |token: usize| ((1_u128 << in_span(token)) - 1) as u64;
        for (row, visible) in self.visible.chunks_mut(self.head_count).enumerate() {
            let end = position + row + 1;
            visible.fill(below(end) & !below(end.saturating_sub(window)));
        }
        self.visible_end = in_span(position + self.query_count / self.head_count);
    }
}
