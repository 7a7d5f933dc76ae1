//! Causal attention over paged KV with grouped query heads.
//!
//! Keys are processed block by block, 16 tokens at a time counted from position 0, with one running
//! maximum and sum per query (online softmax; Milakov and Gimelshein 2018). Block boundaries depend
//! on the position only, so prefill of a whole prompt, in chunks or token by token gives the same
//! bits. At level `Avx512Bf16`, `pairs` processes bf16 KV 64 tokens at a time; the following
//! paragraphs describe the other kernels.
//!
//! A *tile* is some consecutive rows of one sequence with the query heads of one KV head. It loads
//! each block once and transposes its keys (`[dim][token]`), so that the 16 scores of a query are
//! one vector. All queries of the tile use the transposed keys.
//!
//! With a sliding window, blocks that no row of a tile sees are skipped, and within a block the
//! tokens before the window are masked like the tokens after the row. Blocks that the window has
//! left stay in the sequence's table: this module frees no blocks.

#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod portable;
mod reference;
mod tile;

use std::{
    num::NonZeroUsize,
    ops::Range,
    sync::{Mutex, PoisonError},
};

use half::bf16;

use self::tile::{BLOCKS_TOGETHER, TileMemory};
use super::{
    arithmetic::from_bf16,
    disjoint_slice::DisjointSlice,
    isa::Level,
    step::{CpuStep, SequenceRows},
    threads::ThreadPool,
};
use crate::{
    arena::{Element, HeldBlock, StepAccess},
    backend::{HeadShape, LayerAttention},
    kv_fp8,
    layout::{BLOCK_TOKENS, Dtype, KvFormat, KvHalf},
};

/// Query elements of one tile. Together with their accumulators, a block's keys and values they
/// fill an L1 cache.
const TILE_ELEMENTS: usize = 3072;
/// Minimum multiply-adds for which waking other threads pays.
const SHARED_WORK_MIN: usize = 200_000;

/// Memory that attention reuses, for each thread.
pub(crate) struct AttentionScratch {
    threads: Vec<Mutex<ThreadMemory>>,
    #[cfg(target_arch = "x86_64")]
    pairs: pairs::PairsScratch,
}

/// Memory of one thread: a tile, and keys and values of FP8 blocks in bf16.
#[derive(Default)]
struct ThreadMemory {
    tile: TileMemory,
    dequantized: Vec<bf16>,
}

impl AttentionScratch {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            threads: (0..threads).map(|_| Mutex::default()).collect(),
            #[cfg(target_arch = "x86_64")]
            pairs: pairs::PairsScratch::new(threads),
        }
    }
}

/// Rows of one sequence that are computed together.
struct RowTile<'a> {
    sequence: &'a SequenceRows,
    first_row: usize,
    row_count: usize,
}

impl RowTile<'_> {
    /// Returns the position of the first row.
    fn first_position(&self) -> usize {
        self.sequence.first_position + self.first_row - self.sequence.rows.start
    }

    /// Returns the indices of the sequence's blocks that the rows see.
    fn visible_blocks(&self, window: usize) -> Range<usize> {
        let first = self.first_position();
        let last = first + self.row_count - 1;
        (first + 1).saturating_sub(window) / BLOCK_TOKENS..last / BLOCK_TOKENS + 1
    }
}

/// Splits rows into tiles. Late rows of a sequence see most keys and begin first, so that no long
/// task is left for the end.
fn row_tiles(step: &CpuStep, tile_rows: usize) -> Vec<RowTile<'_>> {
    step.sequences
        .iter()
        .flat_map(|sequence| {
            sequence.rows.clone().step_by(tile_rows).rev().map(move |first_row| RowTile {
                sequence,
                first_row,
                row_count: tile_rows.min(sequence.rows.end - first_row),
            })
        })
        .collect()
}

/// Inputs that all tasks of one call share.
#[derive(Clone, Copy)]
struct AttentionCall<'a> {
    layer: usize,
    shape: HeadShape,
    scale: f32,
    window: usize,
    /// One logit for each query head.
    sinks: Option<&'a [f32]>,
    qkv: &'a [f32],
    step: &'a CpuStep,
}

impl<'a> AttentionCall<'a> {
    /// Returns the sinks of some query heads.
    fn sinks_of(&self, heads: Range<usize>) -> Option<&'a [f32]> {
        self.sinks.map(|sinks| &sinks[heads])
    }
}

/// Element type of keys and values that attention reads, and its conversion to f32.
trait KvElement: Element {
    const DTYPE: Dtype;
    fn widen(self) -> f32;
}

impl KvElement for f32 {
    const DTYPE: Dtype = Dtype::F32;
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl KvElement for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
    #[inline(always)]
    fn widen(self) -> f32 {
        from_bf16(self)
    }
}

/// Element type of KV blocks.
trait StoredKv: Element {
    /// Type in which attention reads the elements.
    type Read: KvElement;
    /// Returns how many elements of a head [`Self::read`] converts: none or all.
    fn converted_elements(head_elements: usize) -> usize;
    /// Returns the `[token][dim]` keys or values of a head. Converted elements are in `converted`.
    fn read<'a>(
        access: &'a StepAccess,
        place: HeadPlace,
        half: KvHalf,
        converted: &'a mut [bf16],
    ) -> &'a [Self::Read];
}

/// A head in a block.
#[derive(Clone, Copy)]
struct HeadPlace {
    block: HeldBlock,
    layer: usize,
    head: usize,
}

impl<T: KvElement> StoredKv for T {
    type Read = T;

    fn converted_elements(_head_elements: usize) -> usize {
        0
    }

    fn read<'a>(
        access: &'a StepAccess,
        HeadPlace { block, layer, head }: HeadPlace,
        half: KvHalf,
        _converted: &'a mut [bf16],
    ) -> &'a [T] {
        access.head(block, layer, half, head)
    }
}

impl StoredKv for u8 {
    type Read = bf16;

    fn converted_elements(head_elements: usize) -> usize {
        head_elements
    }

    fn read<'a>(
        access: &'a StepAccess,
        HeadPlace { block, layer, head }: HeadPlace,
        half: KvHalf,
        converted: &'a mut [bf16],
    ) -> &'a [bf16] {
        let elements = access.head::<u8>(block, layer, half, head);
        let dim = elements.len() / BLOCK_TOKENS;
        let tokens = elements.chunks_exact(dim).zip(converted.chunks_exact_mut(dim));
        for ((elements, values), &scale) in tokens.zip(access.scales(block, layer, half, head)) {
            kv_fp8::dequantize(elements, scale, values);
        }
        converted
    }
}

/// Computes attention of every row of `qkv` (`[rows][qkv_width]`) into `out`
/// (`[rows][query_width]`). `sinks` has a logit for each query head.
pub(crate) fn attention(
    level: Level,
    pool: &mut ThreadPool,
    scratch: &mut AttentionScratch,
    (attention, sinks, qkv): (LayerAttention, Option<&[f32]>, &[f32]),
    step: &CpuStep,
    out: &mut [f32],
) {
    let LayerAttention { layer, heads: shape, scale, window } = attention;
    let window = window.map_or(usize::MAX, NonZeroUsize::get);
    let call = AttentionCall { layer, shape, scale, window, sinks, qkv, step };
    if level == Level::Reference {
        return reference::attention(call, out);
    }
    #[cfg(target_arch = "x86_64")]
    if level == Level::Avx512Bf16 && step.layout().format == KvFormat::Bf16 && pairs::fits(shape) {
        // SAFETY: the level was found on this machine, and the heads fit.
        return unsafe { pairs::attention(pool, &mut scratch.pairs, call, out) };
    }
    let tiles = match step.layout().format {
        KvFormat::F32 => tiles::<f32>,
        KvFormat::Bf16 => tiles::<bf16>,
        KvFormat::Fp8 => tiles::<u8>,
    };
    tiles(level, pool, scratch, call, out);
}

fn tiles<T: StoredKv>(
    level: Level,
    pool: &mut ThreadPool,
    scratch: &mut AttentionScratch,
    call: AttentionCall<'_>,
    out: &mut [f32],
) {
    let AttentionCall { layer, shape, scale, window, qkv, step, .. } = call;
    let group = shape.query_heads / shape.kv_heads;
    let tiles = row_tiles(step, (TILE_ELEMENTS / (group * shape.head_dim)).max(1));
    // If there are fewer pairs of row tile and KV head than threads, the query heads of a KV head
    // are split too.
    let head_count = match tiles.len() * shape.kv_heads < pool.threads() {
        true => 1,
        false => group,
    };
    let splits = group / head_count;
    let tasks = tiles.len() * shape.kv_heads * splits;

    let (width, dim) = (shape.query_width(), shape.head_dim);
    let sums = DisjointSlice::new(out);
    let run = |thread: usize, task: usize| {
        let tile = &tiles[task / (shape.kv_heads * splits)];
        let kv_head = task / splits % shape.kv_heads;
        let first_head = kv_head * group + task % splits * head_count;
        let mut memory = scratch.threads[thread].lock().unwrap_or_else(PoisonError::into_inner);
        let ThreadMemory { tile: memory, dequantized } = &mut *memory;
        memory.begin(tile.row_count, head_count, dim, tile.first_position(), window);
        if let Some(sinks) = call.sinks_of(first_head..first_head + head_count) {
            memory.add_sinks(sinks);
        }
        for row in 0..tile.row_count {
            let qkv = &qkv[(tile.first_row + row) * shape.qkv_width()..];
            for head in 0..head_count {
                let query = &qkv[(first_head + head) * dim..][..dim];
                memory.set_query(row * head_count + head, scale, query);
            }
        }
        let converted_elements = T::converted_elements(BLOCK_TOKENS * dim);
        dequantized.resize(2 * BLOCKS_TOGETHER * converted_elements, bf16::ZERO);
        let visible = tile.visible_blocks(window);
        let first_block = visible.start;
        let (table, layer) = step.table(layer, tile.sequence);
        let table = &table[visible];
        for (number, blocks) in table.chunks(BLOCKS_TOGETHER).enumerate() {
            let mut parts: [(&[_], &[_]); BLOCKS_TOGETHER] = Default::default();
            let mut rest = &mut dequantized[..];
            for (part, &block) in parts.iter_mut().zip(blocks) {
                let place = HeadPlace { block, layer, head: kv_head };
                let (keys, others) = rest.split_at_mut(converted_elements);
                let (values, others) = others.split_at_mut(converted_elements);
                let keys = T::read(&step.access, place, KvHalf::Key, keys);
                let values = T::read(&step.access, place, KvHalf::Value, values);
                (*part, rest) = ((keys, values), others);
            }
            let first = first_block + number * BLOCKS_TOGETHER;
            memory.add_blocks(level, first, &parts[..blocks.len()]);
        }
        for row in 0..tile.row_count {
            for head in 0..head_count {
                let start = (tile.first_row + row) * width + (first_head + head) * dim;
                // SAFETY: this row and head belong to this task alone.
                let out = unsafe { sums.slice(start, dim) };
                memory.finish(level, row * head_count + head, out);
            }
        }
    };
    // Setting up a block costs about as much as attending with four queries.
    if tile_work(&tiles, step, window) * (group + 4) * shape.kv_heads * dim * 2 < SHARED_WORK_MIN {
        (0..tasks).for_each(|task| run(0, task));
    } else {
        pool.run(tasks, &run);
    }
}

/// Returns the tokens that the tiles' rows see, counting each row like its tile's last row.
fn tile_work(tiles: &[RowTile<'_>], step: &CpuStep, window: usize) -> usize {
    let tokens = |tile: &RowTile<'_>| {
        let last = tile.first_row + tile.row_count - 1;
        tile.row_count * (step.positions[last] as usize + 1).min(window)
    };
    tiles.iter().map(tokens).sum()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        arena::KvArena,
        cpu::{
            rope,
            step::StepSequence,
            testing::{bits, fuses, levels, numbers, pairs},
        },
        layout::{BlockId, KvLayout},
    };

    /// Blocks of the arena and of a sequence.
    const BLOCKS: u32 = 256;
    const TABLE_BLOCKS: u32 = 48;

    fn arena(shape: HeadShape, format: KvFormat) -> Arc<KvArena> {
        let layout = KvLayout {
            layer_count: 2,
            kv_head_count: shape.kv_heads,
            head_dim: shape.head_dim,
            format,
        };
        let arena = KvArena::host(layout, BLOCKS).unwrap();
        // Unwritten memory must not affect the result: all ones are NaN in all formats.
        for id in 0..BLOCKS {
            arena.write(BlockId(id)).unwrap().host_view_mut().unwrap().fill(0xff);
        }
        arena
    }

    /// Returns the block table of a sequence: unordered, and shared with no other sequence.
    fn table(sequence: u32) -> Vec<BlockId> {
        let first = sequence * TABLE_BLOCKS;
        (first..first + TABLE_BLOCKS).map(|block| BlockId((block * 29 + 5) % BLOCKS)).collect()
    }

    /// Returns fused rows that depend on sequence and position only, as in a model.
    fn rows(shape: HeadShape, sequence: u32, positions: std::ops::Range<u32>) -> Vec<f32> {
        positions
            .flat_map(|position| numbers(1000 * sequence + position + 1, shape.qkv_width()))
            .collect()
    }

    /// Runs one step that stores and attends the given pieces of sequences: (sequence, first,
    /// count).
    fn run(
        level: Level,
        threads: usize,
        arena: &Arc<KvArena>,
        shape: HeadShape,
        window: Option<NonZeroUsize>,
        pieces: &[(u32, u32, u32)],
    ) -> Vec<f32> {
        run_with(level, threads, arena, (shape, window, None), pieces).1
    }

    /// Returns sinks of about the size of the greatest score, and some far above and below.
    fn sinks(shape: HeadShape) -> Vec<f32> {
        let sinks = numbers(4, shape.query_heads).into_iter().enumerate();
        sinks.map(|(head, sink)| [sink * 3.0, 40.0, -60.0, 1.5][head % 4]).collect()
    }

    /// Runs as [`run`] does, with sinks. Returns the rotated rows, too.
    fn run_with(
        level: Level,
        threads: usize,
        arena: &Arc<KvArena>,
        (shape, window, sinks): (HeadShape, Option<NonZeroUsize>, Option<&[f32]>),
        pieces: &[(u32, u32, u32)],
    ) -> (Vec<f32>, Vec<f32>) {
        let mut pool = ThreadPool::new(threads, "test").unwrap();
        let tables: Vec<_> = pieces.iter().map(|&(sequence, ..)| table(sequence)).collect();
        let tokens = [0; (TABLE_BLOCKS as usize) * BLOCK_TOKENS];
        let sequences: Vec<_> = pieces
            .iter()
            .zip(&tables)
            .map(|(&(_, first, count), blocks)| StepSequence {
                first_position: first,
                tokens: &tokens[..count as usize],
                blocks,
                sampled_rows: 0,
                adapter: None,
            })
            .collect();
        let mut step = CpuStep::new(arena, &sequences).unwrap();
        let mut qkv: Vec<f32> = pieces
            .iter()
            .flat_map(|&(sequence, first, count)| rows(shape, sequence, first..first + count))
            .collect();
        let frequencies = numbers(9, shape.head_dim / 2);
        let mut out = vec![f32::NAN; step.rows() * shape.query_width()];
        let mut scratch = AttentionScratch::new(threads);
        let scale = 1.0 / (shape.head_dim as f32).sqrt();
        for layer in 0..2 {
            rope::rope_store_kv(level, &mut pool, layer, shape, &frequencies, &mut qkv, &mut step);
            let layer = LayerAttention { layer, heads: shape, scale, window };
            let input = (layer, sinks, &*qkv);
            attention(level, &mut pool, &mut scratch, input, &step, &mut out);
        }
        (qkv, out)
    }

    fn shapes() -> [HeadShape; 6] {
        [(9, 3, 64), (4, 4, 16), (8, 1, 48), (2, 1, 128), (3, 1, 20), (32, 2, 80)]
            .map(|(query_heads, kv_heads, head_dim)| HeadShape { query_heads, kv_heads, head_dim })
    }

    /// Returns window sizes: no window, the row alone, within a block, one block, and several
    /// blocks.
    fn windows() -> [Option<NonZeroUsize>; 5] {
        [0, 1, 5, 16, 37].map(NonZeroUsize::new)
    }

    fn assert_agrees(level: Level, format: KvFormat, got: &[f32], want: &[f32], context: &str) {
        assert!(want.iter().all(|value| value.is_finite()), "{context}");
        let rounds = format == KvFormat::Bf16 && pairs(level);
        if fuses(level) && !rounds {
            assert_eq!(bits(got), bits(want), "{context}");
        } else {
            let tolerance = if rounds { 1e-2 } else { 1e-4 };
            let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let is_near = got.iter().zip(want).all(|(a, b)| (a - b).abs() < tolerance);
            assert!(is_near, "{context}: off by {worst}");
        }
    }

    #[test]
    fn every_level_agrees_with_the_reference() {
        let pieces: [&[(u32, u32, u32)]; 6] = [
            &[(0, 0, 1)],
            &[(0, 0, 16)],
            &[(0, 0, 50)],
            &[(1, 0, 17), (0, 0, 3), (2, 0, 33)],
            &[(3, 0, 67)],
            &[(2, 0, 64), (1, 0, 257)],
        ];
        let pieces: Vec<_> = pieces
            .into_iter()
            .flat_map(|pieces| windows().map(|window| (pieces, window)))
            .collect();
        for shape in shapes() {
            for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Fp8] {
                for (index, &(pieces, window)) in pieces.iter().enumerate() {
                    // Every second case has sinks, so that all pieces and windows occur with them.
                    let all = sinks(shape);
                    let sinks = (index % 2 == 1).then_some(&*all);
                    let run = |level, threads| {
                        let how = (shape, window, sinks);
                        run_with(level, threads, &arena(shape, format), how, pieces).1
                    };
                    let want = run(Level::Reference, 1);
                    for level in levels() {
                        for threads in [1, 3] {
                            let (got, name) = (run(level, threads), level.name());
                            let context = format!(
                                "{shape:?} {format} {pieces:?} {window:?} {name} {sinks:?}"
                            );
                            assert_agrees(level, format, &got, &want, &context);
                        }
                    }
                }
            }
        }
    }

    /// Computes attention in f64 from its definition.
    #[test]
    fn sinks_count_in_the_denominator_and_have_no_value() {
        let count = 70;
        for shape in shapes() {
            for window in windows() {
                let (sinks, arena) = (sinks(shape), arena(shape, KvFormat::F32));
                let how = (shape, window, Some(&*sinks));
                let (qkv, out) = run_with(Level::Reference, 1, &arena, how, &[(0, 0, count)]);
                let (dim, scale) = (shape.head_dim, 1.0 / f64::from(shape.head_dim as f32).sqrt());
                let rows: Vec<&[f32]> = qkv.chunks_exact(shape.qkv_width()).collect();
                let element =
                    |row: usize, head: usize, at: usize| f64::from(rows[row][head * dim + at]);
                for row in 0..rows.len() {
                    let first =
                        (row + 1).saturating_sub(window.map_or(usize::MAX, NonZeroUsize::get));
                    for head in 0..shape.query_heads {
                        let key = shape.query_heads + head / (shape.query_heads / shape.kv_heads);
                        let score = |token: usize| {
                            let products =
                                (0..dim).map(|at| element(row, head, at) * element(token, key, at));
                            (products.sum::<f64>() * scale).exp()
                        };
                        let weights: Vec<f64> = (first..=row).map(score).collect();
                        let sum = weights.iter().sum::<f64>() + f64::from(sinks[head]).exp();
                        for at in [0, dim - 1] {
                            let value = |token: usize| element(token, key + shape.kv_heads, at);
                            let weighted =
                                weights.iter().zip(first..).map(|(it, token)| it * value(token));
                            let want = weighted.sum::<f64>() / sum;
                            let got = f64::from(out[row * shape.query_width() + head * dim + at]);
                            assert!(
                                (got - want).abs() < 1e-5,
                                "{shape:?} {window:?}: {got}, {want}"
                            );
                        }
                    }
                }
            }
        }
    }

    /// The error of a value is at most 1/16 of it, and that of a score changes its weight a little.
    #[test]
    fn kv_in_fp8_gives_nearly_the_results_of_f32() {
        for shape in shapes() {
            let run = |format| {
                run(Level::Reference, 1, &arena(shape, format), shape, None, &[(0, 0, 70)])
            };
            let (exact, got) = (run(KvFormat::F32), run(KvFormat::Fp8));
            let off = exact.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(exact != got && off < 0.1, "{shape:?}: off by {off}");
        }
    }

    #[test]
    fn a_step_without_rows_writes_nothing() {
        let shape = shapes()[0];
        for level in levels().into_iter().chain([Level::Reference]) {
            assert!(run(level, 2, &arena(shape, KvFormat::F32), shape, None, &[]).is_empty());
        }
    }

    #[test]
    fn blocks_before_the_window_are_never_read() {
        let last = 53;
        for shape in shapes() {
            for level in levels().into_iter().chain([Level::Reference]) {
                let arena = arena(shape, KvFormat::F32);
                let attend =
                    || run(level, 2, &arena, shape, NonZeroUsize::new(20), &[(0, last, 1)]);
                run(level, 2, &arena, shape, None, &[(0, 0, last)]);
                let before = attend();
                // The window begins at position 34, in the third block.
                for block in &table(0)[..2] {
                    arena.write(*block).unwrap().host_view_mut().unwrap().fill(0xff);
                }
                assert_eq!(bits(&attend()), bits(&before), "{}", level.name());
            }
        }
    }

    #[test]
    fn a_window_as_long_as_the_sequence_has_no_effect() {
        for shape in shapes() {
            for level in levels().into_iter().chain([Level::Reference]) {
                let attend = |window| {
                    run(level, 2, &arena(shape, KvFormat::F32), shape, window, &[(0, 0, 53)])
                };
                assert_eq!(bits(&attend(NonZeroUsize::new(53))), bits(&attend(None)));
                assert_ne!(bits(&attend(NonZeroUsize::new(52))), bits(&attend(None)));
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// Chunked prefill in a batch gives the same bits as prefill of the whole prompt alone.
        #[test]
        fn result_does_not_depend_on_chunks_and_neighbours(
            cuts in prop::collection::vec(prop_oneof![4 => 1_u32..40, 1 => 1_u32..300], 1..8),
            shape in prop::sample::select(shapes().to_vec()),
            format in prop::sample::select(vec![KvFormat::F32, KvFormat::Bf16, KvFormat::Fp8]),
            threads in 1_usize..4,
            window in prop_oneof![0_usize..70, 0_usize..400],
            has_sinks in any::<bool>(),
        ) {
            let sinks = sinks(shape);
            let sinks = has_sinks.then_some(&*sinks);
            let window = NonZeroUsize::new(window);
            let mut ends: Vec<u32> = Vec::new();
            for cut in cuts {
                ends.push((ends.last().unwrap_or(&0) + cut).min(600));
            }
            ends.dedup();
            let length = *ends.last().unwrap();
            for level in levels().into_iter().chain([Level::Reference]) {
                let run = |arena: &Arc<KvArena>, pieces: &[(u32, u32, u32)]| {
                    run_with(level, threads, arena, (shape, window, sinks), pieces).1
                };
                let whole = run(&arena(shape, format), &[(0, 0, length)]);
                let (chunked, mut got, mut first) = (arena(shape, format), Vec::new(), 0);
                for &end in &ends {
                    // Neighbours before and after the sequence start from position 0 in
                    // every step.
                    let pieces = [(1, 0, 2), (0, first, end - first), (2, 0, 5)];
                    let out = run(&chunked, &pieces);
                    let width = shape.query_width();
                    got.extend_from_slice(&out[2 * width..][..(end - first) as usize * width]);
                    first = end;
                }
                let differs = bits(&got).iter().zip(bits(&whole)).position(|(a, b)| *a != b);
                prop_assert_eq!(differs, None, "{}", level.name());
            }
        }
    }
}
