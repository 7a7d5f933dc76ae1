//! Rotary position embedding (RoPE), and the stores of keys and values into the KV cache.

use half::bf16;

use super::{
    arithmetic::to_bf16,
    isa::{Level, per_level},
    step::CpuStep,
    threads::ThreadPool,
};
use crate::{
    arena::Element,
    backend::HeadShape,
    kv_fp8,
    layout::{BLOCK_TOKENS, KvFormat, KvHalf},
};

/// Cosines and sines of every row's angles, `[rows][frequencies]` each. All layers of a step share
/// them, so they are computed once.
#[derive(Debug)]
pub(crate) struct Rotation {
    frequencies: Box<[f32]>,
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl Rotation {
    /// Computes the table. Angles are computed in f32, as in Hugging Face Transformers. Sine and
    /// cosine are computed in f64 and rounded, so that they do not depend on the system's f32
    /// library.
    fn new(positions: &[u32], frequencies: &[f32]) -> Self {
        let angles = || {
            positions.iter().flat_map(|&position| {
                frequencies.iter().map(move |&frequency| f64::from(position as f32 * frequency))
            })
        };
        Self {
            frequencies: frequencies.into(),
            cosines: angles().map(|angle| angle.cos() as f32).collect(),
            sines: angles().map(|angle| angle.sin() as f32).collect(),
        }
    }

    /// Returns the cosines and sines of one row.
    fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let pairs = self.frequencies.len();
        let range = row * pairs..(row + 1) * pairs;
        (&self.cosines[range.clone()], &self.sines[range])
    }
}

/// Rotates queries and keys of every row of `qkv` in place, and stores keys and values.
pub(crate) fn rope_store_kv(
    level: Level,
    pool: &mut ThreadPool,
    layer: usize,
    shape: HeadShape,
    frequencies: &[f32],
    qkv: &mut [f32],
    step: &mut CpuStep,
) {
    let known = step.rotation.take().filter(|known| *known.frequencies == *frequencies);
    let rotation = known.unwrap_or_else(|| Rotation::new(&step.positions, frequencies));
    match step.layout().format {
        KvFormat::F32 => all_rows::<f32>(level, pool, layer, shape, &rotation, qkv, step),
        KvFormat::Bf16 => all_rows::<bf16>(level, pool, layer, shape, &rotation, qkv, step),
        KvFormat::Fp8 => all_rows::<u8>(level, pool, layer, shape, &rotation, qkv, step),
    }
    step.rotation = Some(rotation);
}

/// KV element type and its conversion from rows of f32.
trait StoredElement: Element {
    /// Writes the elements of one token of a head. Returns their scale, if the format has scales.
    fn store(level: Level, values: &[f32], to: &mut [Self]) -> Option<u8>;
}

impl StoredElement for f32 {
    fn store(_level: Level, values: &[f32], to: &mut [f32]) -> Option<u8> {
        to.copy_from_slice(values);
        None
    }
}

impl StoredElement for bf16 {
    fn store(level: Level, values: &[f32], to: &mut [bf16]) -> Option<u8> {
        round(level, values, to);
        None
    }
}

impl StoredElement for u8 {
    fn store(_level: Level, values: &[f32], to: &mut [u8]) -> Option<u8> {
        Some(kv_fp8::quantize(values, to))
    }
}

per_level! {
    fn round(values: &[f32], to: &mut [bf16]) {
        for (to, &value) in to.iter_mut().zip(values) {
            *to = to_bf16(value);
        }
    }
}

fn all_rows<T: StoredElement>(
    level: Level,
    pool: &mut ThreadPool,
    layer: usize,
    shape: HeadShape,
    rotation: &Rotation,
    qkv: &mut [f32],
    step: &mut CpuStep,
) {
    let (width, dim) = (shape.qkv_width(), shape.head_dim);
    let key_end = shape.query_width() + shape.kv_heads * dim;
    let step = &*step;
    let task_rows = pool.rows_per_task(step.rows(), width);
    pool.for_each_piece(qkv, task_rows * width, |_, task, piece| {
        for (index, qkv) in piece.chunks_exact_mut(width).enumerate() {
            let row = task * task_rows + index;
            let (cosines, sines) = rotation.row(row);
            let (rotated, values) = qkv.split_at_mut(key_end);
            match level {
                Level::Reference => reference::rotate_heads(rotated, dim, cosines, sines),
                _ => rotate_heads(level, rotated, dim, cosines, sines),
            }
            let keys = &rotated[shape.query_width()..];
            store_row::<T>(level, layer, dim, keys, values, step, row);
        }
    });
}

per_level! {
    /// Rotates the pairs (i, i + pairs) of every head of `dim` elements. Bit-equal to
    /// [`reference::rotate_heads`].
    fn rotate_heads(heads: &mut [f32], dim: usize, cosines: &[f32], sines: &[f32]) {
        for head in heads.chunks_exact_mut(dim) {
            let (low, high) = head.split_at_mut(cosines.len());
            for (((low, high), &cosine), &sine) in
                low.iter_mut().zip(high).zip(cosines).zip(sines)
            {
                (*low, *high) = (*low * cosine - *high * sine, *high * cosine + *low * sine);
            }
        }
    }
}

fn store_row<T: StoredElement>(
    level: Level,
    layer: usize,
    dim: usize,
    keys: &[f32],
    values: &[f32],
    step: &CpuStep,
    row: usize,
) {
    let (block, layer) = step.row_block(layer, row);
    let token = step.positions[row] as usize % BLOCK_TOKENS;
    for (half, data) in [(KvHalf::Key, keys), (KvHalf::Value, values)] {
        for (head, data) in data.chunks_exact(dim).enumerate() {
            // SAFETY: `all_rows` borrows the step exclusively, so no other function has slices of
            // its blocks. Two rows never have the same block and token: a written block belongs to
            // one sequence (the block was acquired once), and the positions of a sequence differ.
            let to = unsafe { step.access.token_mut(block, layer, half, head, token) };
            if let Some(scale) = T::store(level, data, to) {
                // SAFETY: as for the elements.
                unsafe { step.access.set_scale(block, layer, half, head, (token, scale)) };
            }
        }
    }
}

pub(crate) mod reference {
    /// Rotates every head: the point in dimensions `i` and `i + half` is rotated by angle `i`.
    pub(crate) fn rotate_heads(heads: &mut [f32], dim: usize, cosines: &[f32], sines: &[f32]) {
        let half = cosines.len();
        for head in heads.chunks_exact_mut(dim) {
            for i in 0..half {
                let (x, y) = (head[i], head[half + i]);
                head[i] = x * cosines[i] - y * sines[i];
                head[half + i] = y * cosines[i] + x * sines[i];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        arena::KvArena,
        cpu::{
            step::StepSequence,
            testing::{bits, levels, numbers},
        },
        layout::{BlockId, KvLayout},
    };

    const SHAPE: HeadShape = HeadShape { query_heads: 4, kv_heads: 2, head_dim: 10 };

    fn step(arena: &Arc<KvArena>, first: u32, rows: usize) -> CpuStep {
        let blocks: Vec<BlockId> = (0..20).rev().map(BlockId).collect();
        let tokens = vec![0; rows];
        let sequence = StepSequence {
            first_position: first,
            tokens: &tokens,
            blocks: &blocks,
            sampled_rows: 0,
            adapter: None,
        };
        CpuStep::new(arena, &[sequence]).unwrap()
    }

    fn arena(format: KvFormat) -> Arc<KvArena> {
        let layout = KvLayout { layer_count: 3, kv_head_count: 2, head_dim: 10, format };
        KvArena::host(layout, 20).unwrap()
    }

    /// Rotates `pairs` pairs of every head.
    fn run(level: Level, arena: &Arc<KvArena>, pairs: usize, first: u32, rows: usize) -> Vec<f32> {
        let mut pool = ThreadPool::new(2, "test").unwrap();
        let mut qkv = numbers(1, rows * SHAPE.qkv_width());
        let mut step = step(arena, first, rows);
        rope_store_kv(level, &mut pool, 1, SHAPE, &numbers(2, pairs), &mut qkv, &mut step);
        qkv
    }

    #[test]
    fn rotation_is_the_complex_product_and_values_stay() {
        let (first, rows) = (37, 30);
        let before = numbers(1, rows * SHAPE.qkv_width());
        let rotated = 6 * 10;
        for pairs in [5, 3, 1] {
            let after = run(Level::Reference, &arena(KvFormat::F32), pairs, first, rows);
            let frequencies = numbers(2, pairs);
            for row in 0..rows {
                let at = row * SHAPE.qkv_width();
                for i in 0..rotated {
                    let (head, dim) = (i / 10 * 10, i % 10);
                    if dim >= 2 * pairs {
                        assert_eq!(after[at + i], before[at + i]);
                        continue;
                    }
                    let position = (first as usize + row) as f32;
                    let angle = f64::from(position * frequencies[dim % pairs]);
                    let x = f64::from(before[at + head + dim % pairs]);
                    let y = f64::from(before[at + head + dim % pairs + pairs]);
                    let want = match dim < pairs {
                        true => x * angle.cos() - y * angle.sin(),
                        false => y * angle.cos() + x * angle.sin(),
                    };
                    assert!((f64::from(after[at + i]) - want).abs() < 1e-6);
                }
                let values = at + rotated..at + SHAPE.qkv_width();
                assert_eq!(after[values.clone()], before[values]);
            }
        }
    }

    #[test]
    fn keys_and_values_are_stored_at_their_positions_and_nowhere_else() {
        let (first, rows) = (37, 30);
        let arena = arena(KvFormat::F32);
        let qkv = run(Level::Reference, &arena, 5, first, rows);
        let step = step(&arena, first, rows);
        let mut stored = 0;
        for row in 0..rows {
            let position = first as usize + row;
            let held = step.access.find(BlockId(19 - position as u32 / 16)).unwrap();
            for head in 0..2 {
                for (half, start) in [(KvHalf::Key, 40), (KvHalf::Value, 60)] {
                    let at = row * SHAPE.qkv_width() + start + head * 10;
                    let got = &step.access.head::<f32>(held, 1, half, head)[position % 16 * 10..];
                    assert_eq!(got[..10], qkv[at..at + 10]);
                    stored += got[..10].iter().filter(|&&value| value != 0.0).count();
                }
            }
        }
        drop(step);
        let written: usize = (0..20)
            .map(|id| {
                let guard = arena.read(BlockId(id)).unwrap();
                let floats: &[f32] = bytemuck::cast_slice(guard.host_view().unwrap());
                floats.iter().filter(|&&value| value != 0.0).count()
            })
            .sum();
        assert_eq!(written, stored);
    }

    #[test]
    fn every_level_stores_the_same_bytes() {
        for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Fp8] {
            for (pairs, first, rows) in [(5, 0, 1), (5, 15, 2), (5, 3, 150), (2, 3, 150)] {
                let reference = arena(format);
                let want = run(Level::Reference, &reference, pairs, first, rows);
                for level in levels() {
                    let arena = arena(format);
                    let got = run(level, &arena, pairs, first, rows);
                    assert_eq!(bits(&got), bits(&want), "{}", level.name());
                    for id in 0..20 {
                        let (a, b) =
                            (arena.read(BlockId(id)).unwrap(), reference.read(BlockId(id)));
                        assert_eq!(a.host_view(), b.unwrap().host_view());
                    }
                }
            }
        }
    }

    #[test]
    fn rotation_cache_is_keyed_by_frequencies() {
        let arena = arena(KvFormat::F32);
        let mut pool = ThreadPool::new(1, "test").unwrap();
        let mut step = step(&arena, 5, 1);
        let mut rotate_with = |frequencies: &[f32]| {
            let mut qkv = numbers(1, SHAPE.qkv_width());
            rope_store_kv(Level::Baseline, &mut pool, 0, SHAPE, frequencies, &mut qkv, &mut step);
            qkv
        };
        let (a, b) = (numbers(2, 5), numbers(3, 5));
        let first = rotate_with(&a);
        assert_ne!(rotate_with(&b), first);
        assert_eq!(rotate_with(&a), first);
    }
}
