//! Attention over bf16 KV with `vdpbf16ps`: queries, keys, softmax weights and values are
//! multiplied in pairs of bf16 and accumulated in f32.
//!
//! Keys are processed in *spans* of 64 tokens counted from position 0, with one running maximum and
//! sum per query. Four spans are a *segment*. Each segment starts with empty accumulators, and the
//! segments of a query are merged in order at the end. Span and segment boundaries depend on the
//! position only, so the result does not depend on prefill chunks, and the threads can share a long
//! context by segments.
//!
//! Queries and softmax weights are rounded to bf16, so the result differs from the reference by
//! rounding.

mod kernel;
mod tile;

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use self::{
    kernel::SpanParts,
    tile::{PairsTile, SEGMENT_BLOCKS, SPAN_BLOCKS, STRIP},
};
use super::{AttentionCall, RowTile, SHARED_WORK_MIN, row_tiles, tile_work};
use crate::{
    backend::HeadShape,
    cpu::{disjoint_slice::DisjointSlice, threads::ThreadPool},
    layout::{BLOCK_TOKENS, KvHalf},
};

/// Maximum queries of a tile. Transposing a span's keys costs as much as about ten queries; twice
/// as many queries would push their accumulators out of the L1 cache.
const TILE_QUERIES_MAX: usize = 96;
/// Target number of tasks per thread, so that no thread waits long for the last task.
const TASKS_PER_THREAD: usize = 4;

/// Memory that all calls reuse: one tile per thread, and partial results.
pub(super) struct PairsScratch {
    tiles: Vec<Mutex<PairsTile>>,
    /// Partial results per segment, for tiles that are split by segments.
    partial: Vec<f32>,
}

impl PairsScratch {
    pub(super) fn new(threads: usize) -> Self {
        Self { tiles: (0..threads).map(|_| Mutex::default()).collect(), partial: Vec::new() }
    }
}

/// Queries of one tile and one KV head.
struct TileWork<'a> {
    tile: &'a RowTile<'a>,
    kv_head: usize,
    /// Indices of the sequence's blocks that the queries see.
    blocks: Range<usize>,
}

impl TileWork<'_> {
    /// Returns the segments that the queries see.
    fn segments(&self) -> Range<usize> {
        self.blocks.start / SEGMENT_BLOCKS..self.blocks.end.div_ceil(SEGMENT_BLOCKS)
    }
}

/// Returns whether these kernels support the head dimension.
pub(super) fn fits(shape: HeadShape) -> bool {
    shape.head_dim.is_multiple_of(16)
}

/// Computes [`super::attention`] over bf16 KV.
///
/// # Safety
/// The machine has AVX-512 (F, BW, DQ, VL) and AVX-512-BF16; [`fits`] holds.
pub(super) unsafe fn attention(
    pool: &mut ThreadPool,
    scratch: &mut PairsScratch,
    call: AttentionCall<'_>,
    out: &mut [f32],
) {
    let AttentionCall { shape, window, step, .. } = call;
    let group = shape.query_heads / shape.kv_heads;
    let tile_queries = tile_queries(pool, step.rows() * shape.query_heads);
    let rows = row_tiles(step, (tile_queries / group).max(1));
    let works: Vec<TileWork<'_>> = rows
        .iter()
        .flat_map(|tile| {
            let blocks = tile.visible_blocks(window);
            (0..shape.kv_heads).map(move |kv_head| TileWork {
                tile,
                kv_head,
                blocks: blocks.clone(),
            })
        })
        .collect();
    let PairsScratch { tiles, partial } = scratch;
    let out = DisjointSlice::new(out);
    let threads = pool.threads();
    let multiply_adds = tile_work(&rows, step, window) * (group + 4) * shape.kv_heads;
    let is_small = multiply_adds * shape.head_dim * 2 < SHARED_WORK_MIN;
    let mut share = |tasks: usize, task: &(dyn Fn(usize, usize) + Sync)| match is_small {
        true => (0..tasks).for_each(|number| task(0, number)),
        false => pool.run(tasks, task),
    };
    let memory = |thread: usize| tiles[thread].lock().unwrap_or_else(PoisonError::into_inner);

    if is_small || works.len() >= 2 * threads {
        share(works.len(), &|thread, number| {
            let (work, mut tile) = (&works[number], memory(thread));
            // SAFETY: the caller promises the features and `fits`; rows and heads belong to
            // this task alone.
            unsafe {
                call.begin(work, &mut tile);
                let segments = work.segments();
                for segment in segments {
                    call.segment(work, segment, &mut tile);
                    kernel::merge_own(&mut tile);
                }
                call.finish(work, &mut tile, &out);
            }
        });
        return;
    }

    // With few tiles, each segment is a task. Its partial results stay in memory until the merge.
    let pieces: Vec<(usize, usize)> = works
        .iter()
        .enumerate()
        .flat_map(|(index, work)| work.segments().map(move |segment| (index, segment)))
        .collect();
    let query_floats = tile::sums_len(shape.head_dim);
    let piece_floats = TILE_QUERIES_MAX.max(group) * query_floats;
    if partial.len() < pieces.len() * piece_floats {
        partial.resize(pieces.len() * piece_floats, 0.0);
    }
    let parts = DisjointSlice::new(partial);
    share(pieces.len(), &|thread, number| {
        let (index, segment) = pieces[number];
        let (work, mut tile) = (&works[index], memory(thread));
        let length = work.tile.row_count * group * query_floats;
        // SAFETY: the machine has the features and `fits` holds (`# Safety`); every piece has a
        // range of its own in `parts`.
        unsafe {
            call.begin(work, &mut tile);
            call.segment(work, segment, &mut tile);
            kernel::write_sums(&tile, parts.slice(number * piece_floats, length));
        }
    });
    share(works.len(), &|thread, index| {
        let (work, mut tile) = (&works[index], memory(thread));
        let length = work.tile.row_count * group * query_floats;
        call.begin_merge(work, &mut tile);
        for (number, _) in pieces.iter().enumerate().filter(|(_, piece)| piece.0 == index) {
            // SAFETY: the machine has the features (`# Safety`). The previous parallel region wrote
            // the pieces, and the merges only read them.
            unsafe {
                kernel::merge(&mut tile, parts.slice(number * piece_floats, length));
            }
        }
        // SAFETY: the machine has the features and `fits` holds (`# Safety`); rows and heads belong
        // to this task alone.
        unsafe { call.finish(work, &mut tile, &out) };
    });
}

impl AttentionCall<'_> {
    /// Returns the query heads per KV head.
    fn group(&self) -> usize {
        self.shape.query_heads / self.shape.kv_heads
    }

    /// Clears the previous tile's result.
    fn begin_merge(&self, work: &TileWork<'_>, tile: &mut PairsTile) {
        let group = self.group();
        tile.begin(work.tile.row_count, group, self.shape.head_dim, self.scale);
        let first_head = work.kv_head * group;
        if let Some(sinks) = self.sinks_of(first_head..first_head + group) {
            tile.add_sinks(sinks, self.scale);
        }
    }

    /// Loads the queries and clears the previous tile's result.
    fn begin(&self, work: &TileWork<'_>, tile: &mut PairsTile) {
        let (group, dim) = (self.group(), self.shape.head_dim);
        self.begin_merge(work, tile);
        for row in 0..work.tile.row_count {
            let qkv = &self.qkv[(work.tile.first_row + row) * self.shape.qkv_width()..];
            for head in 0..group {
                let query = &qkv[(work.kv_head * group + head) * dim..][..dim];
                tile.set_query(row * group + head, query);
            }
        }
    }

    /// Computes the partial result of one segment.
    ///
    /// # Safety
    /// As [`attention`].
    unsafe fn segment(&self, work: &TileWork<'_>, segment: usize, tile: &mut PairsTile) {
        let blocks = work.blocks.start.max(segment * SEGMENT_BLOCKS)
            ..work.blocks.end.min((segment + 1) * SEGMENT_BLOCKS);
        let (table, layer) = self.step.table(self.layer, work.tile.sequence);
        let first_position = work.tile.first_position();
        tile.begin_segment();
        let span_parts = |span: usize| -> SpanParts<'_> {
            std::array::from_fn(|index| {
                let number = span * SPAN_BLOCKS + index;
                if !blocks.contains(&number) {
                    return (&[][..], &[][..]);
                }
                let head = |half| self.step.access.head(table[number], layer, half, work.kv_head);
                (head(KvHalf::Key), head(KvHalf::Value))
            })
        };
        let spans = blocks.start / SPAN_BLOCKS..blocks.end.div_ceil(SPAN_BLOCKS);
        for span in spans {
            let parts = span_parts(span);
            let first_token = span * SPAN_BLOCKS * BLOCK_TOKENS;
            tile.set_visible(first_token, first_position, self.window);
            // SAFETY: the machine has the features, and `fits` makes `tile.dim` a multiple of 16
            // (`# Safety`).
            unsafe { kernel::add_span(tile, &parts) };
        }
    }

    /// Writes the merged results.
    ///
    /// # Safety
    /// As [`attention`]; rows and heads belong to this task alone.
    unsafe fn finish(
        &self,
        work: &TileWork<'_>,
        tile: &mut PairsTile,
        out: &DisjointSlice<'_, f32>,
    ) {
        let (group, dim) = (self.group(), self.shape.head_dim);
        for row in 0..work.tile.row_count {
            let start =
                (work.tile.first_row + row) * self.shape.query_width() + work.kv_head * group * dim;
            // SAFETY: these heads of the row belong to this task alone (`# Safety`).
            let out = unsafe { out.slice(start, group * dim) };
            for (head, out) in out.chunks_exact_mut(dim).enumerate() {
                // SAFETY: the machine has the features, and `fits` makes `tile.dim` a multiple of
                // 16 (`# Safety`).
                unsafe { kernel::finish(tile, row * group + head, out) };
            }
        }
    }
}

/// Returns the queries per tile, chosen so that a step has a few tiles for every thread.
fn tile_queries(pool: &ThreadPool, query_count: usize) -> usize {
    let even = query_count / (pool.threads() * TASKS_PER_THREAD);
    (even / STRIP * STRIP).clamp(STRIP, TILE_QUERIES_MAX)
}
