//! Causal attention over paged KV, several query heads to one KV head.
//!
//! Keys are taken block by block, 16 tokens at a time counted from position 0, with one running
//! maximum and sum per query ("online softmax"). That order belongs to the position, not to the
//! step, so a prompt read whole, in chunks or token by token gives the same bits.
//!
//! A *tile* is some consecutive rows of one sequence with the query heads of one KV head. It loads
//! each block once, turns its keys on their side (`[dim][token]`) so that the 16 scores of a query
//! are one vector, and serves all of its queries from that.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
pub(crate) mod reference;
mod tile;

use std::sync::{Mutex, PoisonError};

use half::bf16;

use self::tile::{BLOCKS_TOGETHER, TileMemory};
use super::{
    arithmetic::from_bf16,
    isa::Level,
    parts::Parts,
    step::{CpuStep, SequenceRows},
    threads::ThreadPool,
};
use crate::{
    arena::Element,
    backend::HeadShape,
    layout::{BLOCK_TOKENS, Dtype, KvHalf},
};

/// Query elements of one tile: with their sums, a block's keys and values they fill a first-level
/// cache.
const TILE_ELEMENTS: usize = 3072;
/// Multiply-adds below which waking other threads costs more than it brings.
const SHARED_WORK_MIN: usize = 200_000;

/// Memory that attention reuses: one tile's per thread.
pub(crate) struct Scratch {
    tiles: Vec<Mutex<TileMemory>>,
}

impl Scratch {
    pub fn new(threads: usize) -> Self {
        Self { tiles: (0..threads).map(|_| Mutex::default()).collect() }
    }
}

/// Rows of one sequence that are computed together.
struct RowTile<'a> {
    sequence: &'a SequenceRows,
    first_row: usize,
    row_count: usize,
}

/// A KV element type and how it becomes f32.
trait Kv: Element {
    fn widen(self) -> f32;
}

impl Kv for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Kv for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        from_bf16(self)
    }
}

/// Attention of every row of `qkv` (`[rows][qkv_width]`) into `out` (`[rows][query_width]`).
pub(crate) fn attention(
    level: Level,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    layer: usize,
    shape: HeadShape,
    scale: f32,
    qkv: &[f32],
    step: &CpuStep,
    out: &mut [f32],
) {
    if level == Level::Reference {
        return reference::attention(layer, shape, scale, qkv, step, out);
    }
    match step.layout().dtype {
        Dtype::F32 => tiles::<f32>(level, pool, scratch, layer, shape, scale, qkv, step, out),
        Dtype::Bf16 => tiles::<bf16>(level, pool, scratch, layer, shape, scale, qkv, step, out),
    }
}

fn tiles<T: Kv>(
    level: Level,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    layer: usize,
    shape: HeadShape,
    scale: f32,
    qkv: &[f32],
    step: &CpuStep,
    out: &mut [f32],
) {
    let group = shape.query_heads / shape.kv_heads;
    let tile_rows = (TILE_ELEMENTS / (group * shape.head_dim)).max(1);
    // Late rows see most keys: they begin first, so that no long task is left for the end.
    let tiles: Vec<RowTile<'_>> = step
        .sequences
        .iter()
        .flat_map(|sequence| {
            sequence.rows.clone().step_by(tile_rows).rev().map(move |first_row| RowTile {
                sequence,
                first_row,
                row_count: tile_rows.min(sequence.rows.end - first_row),
            })
        })
        .collect();
    // With fewer KV heads than threads, the query heads of one are shared out too.
    let head_count = match tiles.len() * shape.kv_heads < pool.threads() {
        true => 1,
        false => group,
    };
    let splits = group / head_count;
    let tasks = tiles.len() * shape.kv_heads * splits;

    let (width, dim) = (shape.query_width(), shape.head_dim);
    let sums = Parts::new(out);
    let run = |thread: usize, task: usize| {
        let tile = &tiles[task / (shape.kv_heads * splits)];
        let kv_head = task / splits % shape.kv_heads;
        let first_head = kv_head * group + task % splits * head_count;
        let mut memory = scratch.tiles[thread].lock().unwrap_or_else(PoisonError::into_inner);
        let first_position =
            tile.sequence.first_position + tile.first_row - tile.sequence.rows.start;
        memory.begin(tile.row_count, head_count, dim, first_position);
        for row in 0..tile.row_count {
            let qkv = &qkv[(tile.first_row + row) * shape.qkv_width()..];
            for head in 0..head_count {
                let query = &qkv[(first_head + head) * dim..][..dim];
                memory.set_query(row * head_count + head, scale, query);
            }
        }
        let last_block = (first_position + tile.row_count - 1) / BLOCK_TOKENS;
        let table = &step.tables[tile.sequence.table.clone()][..=last_block];
        for (number, blocks) in table.chunks(BLOCKS_TOGETHER).enumerate() {
            let mut parts: [(&[T], &[T]); BLOCKS_TOGETHER] = [(&[], &[]); BLOCKS_TOGETHER];
            for (part, &block) in parts.iter_mut().zip(blocks) {
                let keys = step.access.head(block, layer, KvHalf::Key, kv_head);
                let values = step.access.head(block, layer, KvHalf::Value, kv_head);
                *part = (keys, values);
            }
            memory.add_blocks(level, number * BLOCKS_TOGETHER, &parts[..blocks.len()]);
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
    let work: usize = tiles
        .iter()
        .map(|tile| {
            let last = tile.first_row + tile.row_count - 1;
            tile.row_count * (step.positions[last] as usize + 1)
        })
        .sum();
    // Setting up a block costs about as much as serving four queries from it.
    if work * (group + 4) * shape.kv_heads * dim * 2 < SHARED_WORK_MIN {
        (0..tasks).for_each(|task| run(0, task));
    } else {
        pool.run(tasks, &run);
    }
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
            testing::{bits, fuses, levels, numbers},
        },
        layout::{BlockId, KvLayout},
    };

    const BLOCKS: u32 = 64;

    fn arena(shape: HeadShape, dtype: Dtype) -> Arc<KvArena> {
        let layout = KvLayout {
            layer_count: 2,
            kv_head_count: shape.kv_heads,
            head_dim: shape.head_dim,
            dtype,
        };
        let arena = KvArena::host(layout, BLOCKS).unwrap();
        // Memory that nobody wrote must not matter: all ones are NaN in both types.
        for id in 0..BLOCKS {
            arena.write(BlockId(id)).unwrap().host_view_mut().unwrap().fill(0xff);
        }
        arena
    }

    /// Block table of a sequence: blocks in no particular order, none shared.
    fn table(sequence: u32) -> Vec<BlockId> {
        (0..8).map(|block| BlockId(((sequence * 8 + block) * 29 + 5) % BLOCKS)).collect()
    }

    /// A fused row depends on sequence and position alone, as in a model.
    fn rows(shape: HeadShape, sequence: u32, positions: std::ops::Range<u32>) -> Vec<f32> {
        positions
            .flat_map(|position| numbers(1000 * sequence + position + 1, shape.qkv_width()))
            .collect()
    }

    /// Stores and attends the given pieces of sequences in one step: (sequence, first, count).
    fn run(
        level: Level,
        threads: usize,
        arena: &Arc<KvArena>,
        shape: HeadShape,
        pieces: &[(u32, u32, u32)],
    ) -> Vec<f32> {
        let mut pool = ThreadPool::new(threads, "test").unwrap();
        let tables: Vec<_> = pieces.iter().map(|&(sequence, ..)| table(sequence)).collect();
        let tokens = [0; 128];
        let sequences: Vec<_> = pieces
            .iter()
            .zip(&tables)
            .map(|(&(_, first, count), blocks)| StepSequence {
                first_position: first,
                tokens: &tokens[..count as usize],
                blocks,
                sampled_rows: 0,
            })
            .collect();
        let mut step = CpuStep::new(arena, &sequences).unwrap();
        let mut qkv: Vec<f32> = pieces
            .iter()
            .flat_map(|&(sequence, first, count)| rows(shape, sequence, first..first + count))
            .collect();
        let frequencies = numbers(9, shape.head_dim / 2);
        let mut out = vec![f32::NAN; step.rows() * shape.query_width()];
        let mut scratch = Scratch::new(threads);
        let scale = 1.0 / (shape.head_dim as f32).sqrt();
        for layer in 0..2 {
            rope::rope_store_kv(level, &mut pool, layer, shape, &frequencies, &mut qkv, &mut step);
            attention(level, &mut pool, &mut scratch, layer, shape, scale, &qkv, &step, &mut out);
        }
        out
    }

    fn shapes() -> [HeadShape; 6] {
        [(9, 3, 64), (4, 4, 16), (8, 1, 48), (2, 1, 128), (3, 1, 20), (32, 2, 80)]
            .map(|(query_heads, kv_heads, head_dim)| HeadShape { query_heads, kv_heads, head_dim })
    }

    fn assert_agrees(level: Level, got: &[f32], want: &[f32], context: &str) {
        assert!(want.iter().all(|value| value.is_finite()), "{context}");
        if fuses(level) {
            assert_eq!(bits(got), bits(want), "{context}");
        } else {
            assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-4), "{context}");
        }
    }

    #[test]
    fn every_level_agrees_with_the_reference() {
        let pieces: [&[(u32, u32, u32)]; 5] = [
            &[(0, 0, 1)],
            &[(0, 0, 16)],
            &[(0, 0, 50)],
            &[(1, 0, 17), (0, 0, 3), (2, 0, 33)],
            &[(3, 0, 67)],
        ];
        for shape in shapes() {
            for dtype in [Dtype::F32, Dtype::Bf16] {
                for pieces in pieces {
                    let fresh = || arena(shape, dtype);
                    let want = run(Level::Reference, 1, &fresh(), shape, pieces);
                    for level in levels() {
                        for threads in [1, 3] {
                            let got = run(level, threads, &fresh(), shape, pieces);
                            let name = level.name();
                            let context = format!("{shape:?} {dtype} {pieces:?} {name}");
                            assert_agrees(level, &got, &want, &context);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_step_without_rows_writes_nothing() {
        let shape = shapes()[0];
        for level in levels().into_iter().chain([Level::Reference]) {
            assert!(run(level, 2, &arena(shape, Dtype::F32), shape, &[]).is_empty());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// Whole, in any chunks, or token by token; alone or beside others: the same bits.
        #[test]
        fn chunks_and_neighbours_do_not_matter(
            cuts in prop::collection::vec(1_u32..40, 1..8),
            shape in prop::sample::select(shapes().to_vec()),
            is_bf16 in any::<bool>(),
            threads in 1_usize..4,
        ) {
            let dtype = if is_bf16 { Dtype::Bf16 } else { Dtype::F32 };
            let mut ends: Vec<u32> = Vec::new();
            for cut in cuts {
                ends.push((ends.last().unwrap_or(&0) + cut).min(120));
            }
            ends.dedup();
            let length = *ends.last().unwrap();
            for level in levels().into_iter().chain([Level::Reference]) {
                let whole = run(level, threads, &arena(shape, dtype), shape, &[(0, 0, length)]);
                let (chunked, mut got, mut first) = (arena(shape, dtype), Vec::new(), 0);
                for &end in &ends {
                    // A neighbour before and one behind, which start anew in every step.
                    let pieces = [(1, 0, 2), (0, first, end - first), (2, 0, 5)];
                    let out = run(level, threads, &chunked, shape, &pieces);
                    let width = shape.query_width();
                    got.extend_from_slice(&out[2 * width..][..(end - first) as usize * width]);
                    first = end;
                }
                prop_assert_eq!(bits(&got), bits(&whole), "{}", level.name());
            }
        }
    }
}
