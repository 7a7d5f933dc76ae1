//! Rotary position embedding, and storing keys and values.

use half::bf16;

use super::{arithmetic::to_bf16, isa::Level, step::CpuStep, threads::ThreadPool};
use crate::{
    arena::Element,
    backend::HeadShape,
    layout::{BLOCK_TOKENS, Dtype, KvHalf},
};

/// Cosines and sines of every row's angles, `[rows][dim / 2]` each. The same for all layers of a
/// step, so they are computed once.
#[derive(Debug)]
pub(crate) struct Rotation {
    frequencies: Box<[f32]>,
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl Rotation {
    /// The angle is an f32 product, as Hugging Face has it; its sine and cosine are taken in f64
    /// and rounded, so that they do not depend on the system's f32 library.
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
}

/// Rows whose rotation is worth another thread.
const ROWS_PER_TASK: usize = 16;

/// Rotates queries and keys of every row of `qkv` in place and stores keys and values.
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
    match step.layout().dtype {
        Dtype::F32 => all_rows(level, pool, layer, shape, &rotation, qkv, step, |x: f32| x),
        Dtype::Bf16 => all_rows::<bf16>(level, pool, layer, shape, &rotation, qkv, step, to_bf16),
    }
    step.rotation = Some(rotation);
}

fn all_rows<T: Element>(
    level: Level,
    pool: &mut ThreadPool,
    layer: usize,
    shape: HeadShape,
    rotation: &Rotation,
    qkv: &mut [f32],
    step: &mut CpuStep,
    convert: impl Fn(f32) -> T + Copy + Sync,
) {
    let (width, half) = (shape.qkv_width(), shape.head_dim / 2);
    let key_end = shape.query_width() + shape.kv_heads * shape.head_dim;
    let step = &*step;
    pool.for_each_piece(qkv, ROWS_PER_TASK * width, |_, task, piece| {
        level.run(|| {
            for (index, qkv) in piece.chunks_exact_mut(width).enumerate() {
                let row = task * ROWS_PER_TASK + index;
                let cosines = &rotation.cosines[row * half..][..half];
                let sines = &rotation.sines[row * half..][..half];
                let (rotated, values) = qkv.split_at_mut(key_end);
                for head in rotated.chunks_exact_mut(shape.head_dim) {
                    match level {
                        Level::Reference => reference::rotate(head, cosines, sines),
                        _ => rotate(head, cosines, sines),
                    }
                }
                let keys = &rotated[shape.query_width()..];
                store_row(layer, shape, keys, values, step, row, convert);
            }
        });
    });
}

/// Rotates the pairs (i, i + dim/2) of one head. Bit-equal to [`reference::rotate`].
#[inline(always)]
fn rotate(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let (low, high) = head.split_at_mut(cosines.len());
    for (((low, high), &cosine), &sine) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
        (*low, *high) = (*low * cosine - *high * sine, *high * cosine + *low * sine);
    }
}

#[inline(always)]
fn store_row<T: Element>(
    layer: usize,
    shape: HeadShape,
    keys: &[f32],
    values: &[f32],
    step: &CpuStep,
    row: usize,
    convert: impl Fn(f32) -> T + Copy,
) {
    let block = step.row_blocks[row];
    let token = step.positions[row] as usize % BLOCK_TOKENS;
    for (half, data) in [(KvHalf::Key, keys), (KvHalf::Value, values)] {
        for (head, data) in data.chunks_exact(shape.head_dim).enumerate() {
            let elements = data.iter().map(|&value| convert(value));
            // SAFETY: the step is borrowed exclusively, so no slice of its blocks is alive; a
            // (block, token) belongs to one row, because a written block belongs to one sequence
            // (it was acquired once) and positions of a sequence differ.
            unsafe { step.access.store(block, layer, half, head, token, elements) };
        }
    }
}

pub(crate) mod reference {
    /// One head: dimension `i` and `i + dim/2` are a point that is turned by angle `i`.
    pub(crate) fn rotate(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
        let half = head.len() / 2;
        for i in 0..half {
            let (x, y) = (head[i], head[half + i]);
            head[i] = x * cosines[i] - y * sines[i];
            head[half + i] = y * cosines[i] + x * sines[i];
        }
    }
}
