//! Compares GPU attention with CPU attention: the attention output and the KV in the blocks, from
//! equal QKV inputs.

use std::{num::NonZeroUsize, sync::Arc};

use half::bf16;
use kernels::{
    Backend, BlockId, Dtype, KvArena, KvFormat, KvGroups, KvLayout,
    backend::{HeadShape, HeadWeights, LayerAttention, NormSpan},
    cpu::{CpuStep, StepSequence},
    cuda::{
        Admission, AttentionKind, BatchLimits, CudaOptions, CudaStep, DeviceBatch, Drafts,
        StepInput, StepRows,
    },
    kv_fp8,
    sampling::Sampling,
};

use super::bench::{Bench, Gpu, assert_near, blocks, cpu, gpu, numbers, tolerance};

const BLOCKS: u32 = 251;
const LAYERS: usize = 2;

/// One sequence of a step: tokens already in the KV cache, and new tokens.
#[derive(Clone, Copy, Debug)]
struct SequenceRows {
    position: u32,
    rows: u32,
}

#[derive(Clone, Copy)]
struct Case {
    shape: HeadShape,
    kv: KvFormat,
    window: Option<NonZeroUsize>,
    has_weights: bool,
    has_sinks: bool,
}

/// Returns the attention output of the last layer. Row i of the step gets generated QKV row
/// `picked[i]`.
fn attended<B: Bench>(
    backend: &mut B,
    case: &Case,
    step: &mut B::Step,
    inputs: &mut Inputs<B>,
    picked: &[usize],
) -> Vec<f32> {
    let (rows, width) = (backend.rows(step), case.shape.qkv_width());
    assert_eq!(rows, picked.len());
    let scale = 1.0 / (case.shape.head_dim as f32).sqrt();
    let most = picked.iter().max().map_or(0, |row| row + 1);
    for layer in 0..LAYERS {
        let all = numbers(20 + layer as u32, most * width);
        let of_row = |row: &usize| all[row * width..][..width].to_vec();
        backend.put(&mut inputs.qkv, &picked.iter().flat_map(of_row).collect::<Vec<_>>());
        backend.poison(&mut inputs.out);
        let (qkv, out) = (&mut inputs.qkv, &mut inputs.out);
        let has = case.has_weights;
        let weights = HeadWeights {
            frequencies: &inputs.frequencies,
            bias: has.then_some(&inputs.bias),
            norms: has.then_some((&inputs.query_norm, &inputs.key_norm)),
            norm_span: NormSpan::Head,
            eps: 1e-6,
        };
        backend.store_kv(layer, case.shape, weights, qkv, step);
        let attention = LayerAttention { layer, heads: case.shape, scale, window: case.window };
        let sinks = case.has_sinks.then_some(&inputs.sinks);
        backend.attention(attention, sinks, qkv, step, out);
    }
    backend.get(&inputs.out, rows)
}

struct Inputs<B: Backend> {
    frequencies: B::Vector,
    bias: B::Vector,
    query_norm: B::Vector,
    key_norm: B::Vector,
    sinks: B::Vector,
    qkv: B::Buffer,
    out: B::Buffer,
}

fn make<B: Backend>(backend: &B, shape: HeadShape, rows: usize) -> Inputs<B> {
    let frequencies: Vec<f32> = (0..shape.head_dim / 2)
        .map(|i| 0.7f32.powi(i as i32 * 32 / shape.head_dim as i32))
        .collect();
    Inputs {
        frequencies: backend.vector(&frequencies),
        bias: backend.vector(&numbers(11, shape.qkv_width())),
        query_norm: backend.vector(&numbers(12, shape.head_dim)),
        key_norm: backend.vector(&numbers(13, shape.head_dim)),
        sinks: backend.vector(&sinks(shape.query_heads)),
        qkv: backend.buffer(rows, shape.qkv_width()),
        out: backend.buffer(rows, shape.query_width()),
    }
}

/// Returns sinks of about the size of the greatest score, and some far above and below.
fn sinks(query_heads: usize) -> Vec<f32> {
    let sinks = numbers(14, query_heads).into_iter().enumerate();
    sinks.map(|(head, sink)| [sink * 3.0, 40.0, -60.0, 1.5][head % 4]).collect()
}

/// Fills an arena with values that differ between blocks and are equal in every arena.
fn fill(arena: &Arc<KvArena>) {
    let layout = arena.layout();
    let heads = layout.block_bytes() / layout.head_bytes();
    // Each block begins one head after the block before it.
    let values = numbers(1000, (heads + arena.block_count() as usize) * layout.head_elements());
    let of_heads = values.chunks_exact(layout.head_elements());
    let bytes: Vec<u8> = of_heads.flat_map(|head| stored_head(layout, head)).collect();
    for block in 0..arena.block_count() {
        let bytes = &bytes[block as usize * layout.head_bytes()..][..layout.block_bytes()];
        arena.write(BlockId(block)).unwrap().copy_from_host(bytes).unwrap();
    }
}

/// Returns the bytes of one head's 16 tokens.
fn stored_head(layout: KvLayout, values: &[f32]) -> Vec<u8> {
    let rounded = |value: &f32| bf16::from_f32(*value).to_ne_bytes();
    match layout.format {
        KvFormat::F32 => bytemuck::cast_slice(values).to_vec(),
        KvFormat::Bf16 => values.iter().flat_map(rounded).collect(),
        KvFormat::Fp8 => {
            let mut bytes = vec![0; layout.head_bytes()];
            let (elements, scales) = bytes.split_at_mut(layout.head_elements());
            let tokens = values.chunks(layout.head_dim).zip(elements.chunks_mut(layout.head_dim));
            for ((values, elements), scale) in tokens.zip(scales) {
                *scale = kv_fp8::quantize(values, elements);
            }
            bytes
        }
    }
}

fn contents(arena: &Arc<KvArena>, block: BlockId) -> Vec<u8> {
    let mut bytes = vec![0; arena.block_bytes()];
    arena.read(block).unwrap().copy_to_host(&mut bytes).unwrap();
    bytes
}

/// Returns the values of a block.
fn values(bytes: &[u8], layout: KvLayout) -> Vec<f32> {
    let of_f32 = |bytes: &[u8]| f32::from_ne_bytes(bytes.try_into().unwrap());
    let of_bf16 = |bytes: &[u8]| bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f32();
    match layout.format {
        KvFormat::F32 => bytes.chunks(4).map(of_f32).collect(),
        KvFormat::Bf16 => bytes.chunks(2).map(of_bf16).collect(),
        KvFormat::Fp8 => {
            let mut values = vec![bf16::ZERO; layout.head_dim];
            let mut all = Vec::new();
            for head in bytes.chunks(layout.head_bytes()) {
                let (elements, scales) = head.split_at(layout.head_elements());
                for (elements, scale) in elements.chunks(layout.head_dim).zip(scales) {
                    kv_fp8::dequantize(elements, *scale, &mut values);
                    all.extend(values.iter().map(|value| value.to_f32()));
                }
            }
            all
        }
    }
}

/// Prepares a step on the device with the blocks of the sequences. If `verified` is above 0, every
/// sequence has `verified` rows: one for its last token, one for each draft token, and padding
/// rows.
fn step(
    batch: &mut DeviceBatch,
    backend: &kernels::cuda::CudaBackend,
    parts: &[SequenceRows],
    verified: u32,
) -> CudaStep {
    let sampling = Sampling::greedy();
    let known = |part: &SequenceRows| part.position + if verified > 0 { 1 } else { part.rows };
    let known: Vec<Vec<u32>> = parts.iter().map(|part| vec![1; known(part) as usize]).collect();
    let tables: Vec<_> = tables(parts);
    let admissions: Vec<_> = parts
        .iter()
        .enumerate()
        .map(|(slot, part)| Admission {
            slot: slot as u32,
            tokens: &known[slot],
            prompt_len: known[slot].len() as u32,
            position: part.position,
            blocks: &tables[slot],
            sampling: &sampling,
            adapter: None,
        })
        .collect();
    let sequences: Vec<_> = parts
        .iter()
        .enumerate()
        .map(|(slot, part)| StepRows {
            slot: slot as u32,
            position: part.position,
            rows: part.rows,
            samples: if verified > 0 { part.rows } else { 1 },
        })
        .collect();
    let input = StepInput {
        step_id: 7,
        admissions: &admissions,
        extensions: &[],
        sequences: &sequences,
        rows_min: 0,
        drafts: (verified > 0).then_some(Drafts { rows: verified, ngram_min: 1, ngram_max: 1 }),
        known_drafts: &[],
        has_adapters: false,
    };
    batch.begin(backend, &input).unwrap()
}

/// Returns block tables that share no block.
fn tables(parts: &[SequenceRows]) -> Vec<Vec<BlockId>> {
    let mut first = 0;
    let mut table = |part: &SequenceRows| {
        let count = (part.position + part.rows).div_ceil(16);
        let table = blocks(first * 7, count as usize, BLOCKS);
        first += count;
        table
    };
    let tables: Vec<_> = parts.iter().map(&mut table).collect();
    assert!(first <= BLOCKS, "{first} blocks");
    tables
}

fn check(gpu: &Gpu, case: &Case, kind: AttentionKind, parts: &[SequenceRows]) {
    check_drafts(gpu, case, kind, parts, 0);
}

/// Compares a step with the CPU. If `verified` is above 0, the GPU step pads every sequence to
/// `verified` rows.
fn check_drafts(
    gpu: &Gpu,
    case: &Case,
    kind: AttentionKind,
    parts: &[SequenceRows],
    verified: u32,
) {
    let Case { shape, kv: format, .. } = *case;
    let dtype = if format == KvFormat::F32 { Dtype::F32 } else { Dtype::Bf16 };
    let layout = KvLayout {
        layer_count: LAYERS,
        kv_head_count: shape.kv_heads,
        head_dim: shape.head_dim,
        format,
    };
    let part_rows = |part: &SequenceRows| part.rows.max(verified) as usize;
    let rows: usize = parts.iter().map(part_rows).sum();
    let what = format!(
        "{format} {}/{} of {}, window {:?}, sinks {}, {kind:?}, {parts:?}, {verified} rows each",
        shape.query_heads, shape.kv_heads, shape.head_dim, case.window, case.has_sinks
    );
    let (mut cuda, mut on_gpu) = {
        let options = CudaOptions { attention: kind, kv: format, ..CudaOptions::new(dtype.into()) };
        gpu.backend_with(options, |backend| make(backend, shape, rows))
    };
    let (kv, remote) = gpu.kv(layout, BLOCKS);
    let limits = BatchLimits {
        hidden: 0,
        slots: parts.len() as u32,
        sequence_tokens: 4096,
        rows: rows as u32,
        samples: (parts.len() as u32).max(parts.len() as u32 * verified),
        stops: 4,
        vocabulary: 96,
        depth: 2,
    };
    // One group, so that blocks behind the window are replaced by zeros.
    let groups = KvGroups::of_windows(&vec![case.window; layout.layer_count]);
    let mut batch = DeviceBatch::new(&cuda, kv, groups, limits).unwrap();
    fill(&remote);
    let mut prepared = step(&mut batch, &cuda, parts, verified);
    let every: Vec<usize> = (0..rows).collect();
    let found = attended(&mut cuda, case, &mut prepared, &mut on_gpu, &every);
    let mut first = 0;
    let mut picked = Vec::new();
    for part in parts {
        picked.extend(first..first + part.rows as usize);
        first += part_rows(part);
    }
    let width = case.shape.query_width();
    let found: Vec<f32> =
        picked.iter().flat_map(|row| found[row * width..][..width].to_vec()).collect();

    let mut cpu = cpu(dtype);
    let arena = KvArena::host(layout, BLOCKS).unwrap();
    fill(&arena);
    let mut on_cpu = make(&cpu, shape, rows);
    let tables = tables(parts);
    let tokens: Vec<Vec<u32>> = parts.iter().map(|part| vec![1; part.rows as usize]).collect();
    let sequences: Vec<_> = parts
        .iter()
        .enumerate()
        .map(|(index, part)| StepSequence {
            first_position: part.position,
            tokens: &tokens[index],
            blocks: &tables[index],
            sampled_rows: 1,
            adapter: None,
        })
        .collect();
    let mut prepared = CpuStep::new(&arena, &sequences).unwrap();
    let wanted = attended(&mut cpu, case, &mut prepared, &mut on_cpu, &picked);
    drop(prepared);
    // RoPE at angles of hundreds of radians and head norms add rounding errors, so the bound for
    // f32 is larger here.
    let tolerance = match format {
        KvFormat::F32 => 2e-4,
        KvFormat::Bf16 => tolerance(dtype),
        // A value at the boundary of two elements of e4m3 becomes either of them.
        KvFormat::Fp8 => 0.13,
    };
    assert_near(&found, &wanted, tolerance, &what);
    for block in 0..BLOCKS {
        let (found, wanted) = (contents(&remote, BlockId(block)), contents(&arena, BlockId(block)));
        if found != wanted {
            let (found, wanted) = (values(&found, layout), values(&wanted, layout));
            assert_near(&found, &wanted, tolerance, &format!("block {block} of {what}"));
        }
    }
}

fn shape(query_heads: usize, kv_heads: usize, head_dim: usize) -> HeadShape {
    HeadShape { query_heads, kv_heads, head_dim }
}

const CASE: Case = Case {
    shape: HeadShape { query_heads: 6, kv_heads: 2, head_dim: 64 },
    kv: KvFormat::Bf16,
    window: None,
    has_weights: false,
    has_sinks: false,
};

/// Batches: one row, decode rows, prompts with a chunk after a prefix, and chunks with a decode
/// row.
const MIXES: [&[SequenceRows]; 4] = [
    &[SequenceRows { position: 0, rows: 1 }],
    &[
        SequenceRows { position: 15, rows: 1 },
        SequenceRows { position: 16, rows: 1 },
        SequenceRows { position: 700, rows: 1 },
        SequenceRows { position: 0, rows: 1 },
        SequenceRows { position: 1300, rows: 1 },
    ],
    &[
        SequenceRows { position: 0, rows: 130 },
        SequenceRows { position: 33, rows: 70 },
        SequenceRows { position: 0, rows: 16 },
    ],
    &[
        SequenceRows { position: 90, rows: 5 },
        SequenceRows { position: 511, rows: 1 },
        SequenceRows { position: 1, rows: 40 },
    ],
];

pub(crate) fn plain_attention_matches_cpu_for_every_group_and_head_dim() {
    let gpu = gpu();
    for kv in [KvFormat::F32, KvFormat::Bf16] {
        for (group, dim) in
            [(1, 64), (2, 128), (3, 64), (4, 16), (5, 64), (6, 40), (7, 128), (8, 256)]
        {
            let case = Case { shape: shape(2 * group, 2, dim), kv, has_weights: group > 3, ..CASE };
            check(&gpu, &case, AttentionKind::Plain, MIXES[1]);
            check(&gpu, &case, AttentionKind::Plain, MIXES[3]);
        }
    }
}

pub(crate) fn auto_selected_attention_matches_cpu() {
    let gpu = gpu();
    for (query_heads, kv_heads, dim) in
        [(9, 3, 64), (32, 8, 128), (14, 2, 64), (8, 8, 64), (16, 2, 128), (32, 2, 128), (8, 2, 256)]
    {
        for kv in [KvFormat::Bf16, KvFormat::Fp8] {
            for parts in MIXES {
                let shape = shape(query_heads, kv_heads, dim);
                let case = Case { shape, kv, has_weights: kv_heads == 2, ..CASE };
                check(&gpu, &case, AttentionKind::Auto, parts);
            }
        }
    }
    let shape = shape(9, 3, 64);
    let case = Case { shape, kv: KvFormat::F32, has_weights: true, ..CASE };
    check(&gpu, &case, AttentionKind::Auto, MIXES[2]);
}

pub(crate) fn sliding_window_masks_earlier_tokens() {
    let gpu = gpu();
    for (kv, kind) in [
        (KvFormat::F32, AttentionKind::Plain),
        (KvFormat::Bf16, AttentionKind::Plain),
        (KvFormat::Bf16, AttentionKind::Auto),
        (KvFormat::Fp8, AttentionKind::Auto),
    ] {
        for window in [1, 16, 33, 5000] {
            let window = NonZeroUsize::new(window);
            let case = Case { shape: shape(6, 2, 64), kv, window, ..CASE };
            check(&gpu, &case, kind, MIXES[1]);
            check(&gpu, &case, kind, MIXES[3]);
        }
    }
}

/// Sequences of one row and up to eight rows of draft tokens, most of them at block boundaries.
const DRAFTING: [SequenceRows; 9] = [
    SequenceRows { position: 0, rows: 1 },
    SequenceRows { position: 0, rows: 9 },
    SequenceRows { position: 7, rows: 2 },
    SequenceRows { position: 8, rows: 9 },
    SequenceRows { position: 15, rows: 3 },
    SequenceRows { position: 16, rows: 5 },
    SequenceRows { position: 31, rows: 1 },
    SequenceRows { position: 700, rows: 9 },
    SequenceRows { position: 1300, rows: 8 },
];

/// Tests that rows of draft tokens attend to the draft tokens before them and that padding rows
/// change nothing.
pub(crate) fn attention_of_draft_tokens_matches_cpu() {
    let gpu = gpu();
    let batches = |verified: u32| {
        let clamped = DRAFTING.map(|part| SequenceRows { rows: part.rows.min(verified), ..part });
        [clamped[7..8].to_vec(), clamped[3..5].to_vec(), clamped.to_vec()]
    };
    for (query_heads, kv_heads, dim) in
        [(9, 3, 64), (32, 8, 128), (14, 2, 64), (8, 8, 64), (16, 2, 128)]
    {
        for (verified, window) in [(2, 0), (3, 0), (5, 0), (9, 0), (5, 1), (9, 16), (5, 33)] {
            let window = NonZeroUsize::new(window);
            let shape = shape(query_heads, kv_heads, dim);
            for kv in [KvFormat::Bf16, KvFormat::Fp8] {
                let case = Case { shape, window, kv, ..CASE };
                for parts in batches(verified) {
                    check_drafts(&gpu, &case, AttentionKind::Auto, &parts, verified);
                }
            }
        }
    }
    for kind in [AttentionKind::Plain, AttentionKind::Flash] {
        let shape = shape(6, 2, 40);
        let case = Case { shape, has_weights: true, ..CASE };
        batches(9).iter().for_each(|parts| check_drafts(&gpu, &case, kind, parts, 9));
    }
}

/// Tests sinks in every kernel: plain, decode attention with one and several CTAs per sequence,
/// draft tokens, FA2, and FA3 for long prompts.
pub(crate) fn attention_sinks_match_cpu() {
    let gpu = gpu();
    let case = |shape, window| {
        let window = NonZeroUsize::new(window);
        Case { shape, window, has_sinks: true, ..CASE }
    };
    let long: &[_] =
        &[SequenceRows { position: 0, rows: 1100 }, SequenceRows { position: 40, rows: 600 }];
    for (query_heads, kv_heads, dim) in [(64, 8, 64), (9, 3, 64), (14, 2, 128), (5, 5, 128)] {
        for window in [0, 1, 33, 128] {
            let case = case(shape(query_heads, kv_heads, dim), window);
            // The CPU takes seconds for the long prompts.
            let long = [long].into_iter().filter(|_| [0, 33].contains(&window));
            for parts in MIXES.into_iter().chain(long) {
                check(&gpu, &case, AttentionKind::Auto, parts);
                check(&gpu, &Case { kv: KvFormat::Fp8, ..case }, AttentionKind::Auto, parts);
            }
            check(&gpu, &case, AttentionKind::Flash, MIXES[1]);
            for verified in [2, 5, 9] {
                let parts =
                    DRAFTING.map(|part| SequenceRows { rows: part.rows.min(verified), ..part });
                check_drafts(&gpu, &case, AttentionKind::Auto, &parts, verified);
            }
        }
    }
    for (kv, kind) in [(KvFormat::F32, AttentionKind::Auto), (KvFormat::Bf16, AttentionKind::Plain)]
    {
        for (group, dim) in [(8, 64), (3, 40), (1, 256)] {
            let case = Case { kv, ..case(shape(2 * group, 2, dim), 33) };
            check(&gpu, &case, kind, MIXES[1]);
            check(&gpu, &case, kind, MIXES[3]);
        }
    }
}

pub(crate) fn oversized_step_is_rejected_before_any_launch() {
    let gpu = gpu();
    let layout = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 64, format: KvFormat::F32 };
    let (cuda, ()) = gpu.backend(Dtype::F32, AttentionKind::Plain, |_| ());
    let (kv, _) = gpu.kv(layout, 8);
    let limits = BatchLimits {
        hidden: 0,
        slots: 2,
        sequence_tokens: 64,
        rows: 16,
        samples: 2,
        stops: 1,
        vocabulary: 96,
        depth: 1,
    };
    let mut batch = DeviceBatch::new(&cuda, kv, KvGroups::whole(1), limits).unwrap();
    let rows = |slot, position, rows| StepRows { slot, position, rows, samples: 1 };
    for (sequences, word) in [
        (vec![rows(2, 0, 1)], "slot"),
        (vec![rows(0, 0, 17)], "rows"),
        (vec![rows(0, 64, 1)], "end"),
        (vec![rows(0, 0, 0)], "end"),
    ] {
        let input = StepInput {
            step_id: 1,
            admissions: &[],
            extensions: &[],
            sequences: &sequences,
            rows_min: 0,
            drafts: None,
            known_drafts: &[],
            has_adapters: false,
        };
        let error = batch.begin(&cuda, &input).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    cuda.check().unwrap();
}
