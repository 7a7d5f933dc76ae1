//! LoRA adapters on the GPU: GEMMs with updates over odd sizes, and an engine whose steps have rows
//! of several adapters, with and without CUDA graphs, also while adapters are loaded.

use std::{collections::HashMap, sync::Arc, thread};

use engine::{
    SchedulerConfig, StepLoop,
    adapter::LoadedAdapter,
    adapter_slots::AdapterSlots,
    event::{NewSequence, SequenceId},
    executor::Executor,
};
use half::bf16;
use kernels::{
    Backend, BlockId, KvArena, KvFormat, KvGroups, KvLayout, WeightFormat,
    backend::{GatedActivation, HeadShape, HeadWeights, LowRankShape, LowRankUpdate},
    cpu::{CpuStep, StepSequence},
    cuda::{
        AdapterSizes, Admission, BatchLimits, CudaOptions, CudaStep, DeviceBatch, StepInput,
        StepRows,
    },
    sampling::{SampledToken, Sampling},
};
use model::Checkpoint;
use test_harness::adapter::{self, ModelShape};

use super::{
    bench::{Bench, Gpu, Random, cpu, gpu, numbers, short},
    executor::{config, on_cpu, on_gpu, run, sequence},
    model::checkpoint,
};

/// Rank of the adapter in each slot; 0: the slot is empty.
const RANKS: [usize; 4] = [3, 16, 0, 40];

/// Rows and adapter of each sequence of a step.
type Parts = Vec<(u32, Option<u32>)>;

fn parts(rows: usize) -> Parts {
    let adapters = [Some(1), None, Some(0), Some(3), Some(3), Some(2), Some(1)];
    // One row each, or sequences of a prefill step.
    let (count, each) = if rows <= 64 { (rows, 1) } else { (rows / 13, 13) };
    let mut parts: Parts = (0..count).map(|i| (each, adapters[i % adapters.len()])).collect();
    let rest = rows as u32 - count as u32 * each;
    if rest > 0 {
        parts.push((rest, Some(1)));
    }
    parts
}

/// Returns updates of a matrix by an adapter, in numbers that bf16 has.
fn updates(rank: usize, shape: &LowRankShape, seed: u32) -> Vec<LowRankUpdate> {
    let rounded = |seed, count, scale: f32| -> Vec<f32> {
        let values = numbers(seed, count).into_iter();
        values.map(|value| bf16::from_f32(value * scale).to_f32()).collect()
    };
    let mut first = 0;
    let mut updates = Vec::new();
    for (index, &outputs) in (0..).zip(&shape.ranges) {
        // The adapter in slot 0 does not change the second range.
        if rank > 0 && !(rank == RANKS[0] && index == 1) {
            let a = rounded(seed + index, rank * shape.inputs, 1.0);
            let b = rounded(seed + 100 + index, rank * outputs, 0.2);
            updates.push(LowRankUpdate { rank, a, b, first });
        }
        first += outputs;
    }
    updates
}

/// Inputs, heads and feed-forward size of a layer.
#[derive(Clone, Copy, Debug)]
struct Layer {
    hidden: usize,
    heads: HeadShape,
    ffn: usize,
}

impl Layer {
    fn shapes(&self) -> [LowRankShape; 3] {
        let HeadShape { query_heads, kv_heads, head_dim } = self.heads;
        let [q, kv] = [query_heads, kv_heads].map(|heads| heads * head_dim);
        let shape = |inputs, ranges: &[usize]| LowRankShape { inputs, ranges: ranges.to_vec() };
        [
            shape(self.hidden, &[q, kv, kv]),
            shape(self.hidden, &[self.ffn, self.ffn]),
            shape(self.ffn, &[self.hidden]),
        ]
    }
}

/// Runs the GEMMs of a layer. Returns queries, activations, the residual stream and the norm.
fn forward<B: Bench>(
    backend: &mut B,
    layer: &Layer,
    rows: usize,
    matrices: &[(B::Matrix, B::LowRank); 3],
    (norm, frequencies): (&B::Vector, &B::Vector),
    buffers: &mut [B::Buffer; 6],
    step: &mut B::Step,
) -> [Vec<f32>; 3] {
    let [x, qkv, gate_up, activated, delta, residual] = buffers;
    backend.put(x, &numbers(7, rows * layer.hidden).map_bf16());
    backend.put(residual, &numbers(8, rows * layer.hidden));
    let [(heads, of_heads), (gated, of_gated), (down, of_down)] = matrices;
    let weights = HeadWeights::rotary(frequencies);
    backend.project_heads(0, layer.heads, (x, heads, Some(of_heads)), weights, qkv, step);
    let width = layer.heads.qkv_width();
    let queries = backend.get(qkv, rows);
    let queries = queries.chunks(width).flat_map(|row| &row[..layer.heads.query_width()]).copied();
    let queries = queries.collect();
    let updates = Some((of_gated, &*step));
    backend.project_gated(GatedActivation::Silu, rows, (x, gated), updates, gate_up, activated);
    let activations = backend.get(activated, rows);
    let product = (&*activated, down, None);
    let (updates, stream) = (Some((of_down, &*step)), (&mut *delta, &mut *residual));
    backend.project_onto_residual(rows, product, updates, stream, (norm, 1e-5), x);
    [queries, activations, backend.get(residual, rows)]
}

trait MapBf16 {
    fn map_bf16(self) -> Self;
}

impl MapBf16 for Vec<f32> {
    fn map_bf16(self) -> Self {
        self.into_iter().map(|value| bf16::from_f32(value).to_f32()).collect()
    }
}

/// Weights and updates of the GEMMs of a layer, norm and frequencies, and buffers.
type Made<B> = (
    [(<B as Backend>::Matrix, <B as Backend>::LowRank); 3],
    [<B as Backend>::Vector; 2],
    [<B as Backend>::Buffer; 6],
);

fn made<B: Backend>(backend: &B, layer: &Layer, rows: usize) -> Made<B> {
    let shapes = layer.shapes();
    let matrices = [1, 2, 3].map(|seed| {
        let shape = &shapes[seed as usize - 1];
        let random = Random { rows: shape.ranges.iter().sum(), cols: shape.inputs, seed };
        (backend.matrix(&random), backend.low_rank(RANKS.len(), shape))
    });
    let norm: Vec<f32> = numbers(5, layer.hidden).into_iter().map(|value| 1.0 + value).collect();
    let frequencies: Vec<f32> =
        (0..layer.heads.head_dim / 2).map(|i| 0.5 / (1 + i) as f32).collect();
    let buffers = [
        backend.buffer(rows, layer.hidden),
        backend.buffer(rows, layer.heads.qkv_width()),
        backend.buffer(rows, 2 * layer.ffn),
        backend.buffer(rows, layer.ffn),
        backend.buffer(rows, layer.hidden),
        backend.wide_buffer(rows, layer.hidden),
    ];
    (matrices, [backend.vector(&norm), backend.vector(&frequencies)], buffers)
}

fn by_cpu(layer: &Layer, rows: usize, layout: KvLayout) -> [Vec<f32>; 3] {
    let mut backend = cpu(WeightFormat::Bf16);
    let (mut matrices, [norm, frequencies], mut buffers) = made(&backend, layer, rows);
    for (matrix, shape) in (0..).zip(layer.shapes()) {
        let slots = &mut matrices[matrix as usize].1;
        for (slot, rank) in RANKS.into_iter().enumerate() {
            slots[slot] = updates(rank, &shape, 10 * matrix + 1000 * slot as u32);
        }
    }
    let parts = parts(rows);
    let arena = KvArena::host(layout, 2 * parts.len() as u32).unwrap();
    let tokens = vec![0; rows];
    let tables: Vec<_> =
        (0..parts.len() as u32).map(|i| [BlockId(2 * i), BlockId(2 * i + 1)]).collect();
    let sequences: Vec<_> = parts
        .iter()
        .zip(&tables)
        .map(|(&(rows, adapter), blocks)| StepSequence {
            first_position: 0,
            tokens: &tokens[..rows as usize],
            blocks: &blocks[..(rows as usize).div_ceil(16)],
            sampled_rows: 1,
            adapter,
        })
        .collect();
    let mut step = CpuStep::new(&arena, &sequences).unwrap();
    forward(&mut backend, layer, rows, &matrices, (&norm, &frequencies), &mut buffers, &mut step)
}

/// Prepares the step of `parts` on the GPU.
fn step_of(batch: &mut DeviceBatch, backend: &kernels::cuda::CudaBackend, rows: usize) -> CudaStep {
    let (parts, tokens, sampling) = (parts(rows), vec![0; rows], Sampling::greedy());
    let tables: Vec<_> =
        (0..parts.len() as u32).map(|i| [BlockId(2 * i), BlockId(2 * i + 1)]).collect();
    let of_slot = |slot: usize| {
        let (rows, adapter) = parts[slot];
        let blocks = &tables[slot][..(rows as usize).div_ceil(16)];
        let tokens = &tokens[..rows as usize];
        let admission = Admission {
            slot: slot as u32,
            tokens,
            prompt_len: rows,
            position: 0,
            blocks,
            sampling: &sampling,
            adapter,
        };
        (admission, StepRows { slot: slot as u32, position: 0, rows, samples: 1 })
    };
    let (admissions, sequences): (Vec<_>, Vec<_>) = (0..parts.len()).map(of_slot).unzip();
    let input = StepInput {
        step_id: 1,
        admissions: &admissions,
        extensions: &[],
        sequences: &sequences,
        rows_min: 0,
        drafts: None,
        known_drafts: &[],
        has_adapters: true,
    };
    batch.begin(backend, &input).unwrap()
}

pub(crate) fn gemms_with_updates_match_cpu_for_any_size_and_rows() {
    let gpu = gpu();
    let heads = |query_heads, kv_heads, head_dim| HeadShape { query_heads, kv_heads, head_dim };
    let layers = [
        // No kernel for few rows, then those of wgmma.
        Layer { hidden: 72, heads: heads(3, 1, 24), ffn: 88 },
        Layer { hidden: 200, heads: heads(5, 1, 64), ffn: 344 },
        Layer { hidden: 576, heads: heads(9, 3, 64), ffn: 1536 },
        Layer { hidden: 1152, heads: heads(8, 2, 128), ffn: 2176 },
    ];
    let all_rows: &[usize] = match short() {
        true => &[1, 17, 130],
        false => &[1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 130, 257, 300],
    };
    for layer in &layers {
        for (&rows, fused) in all_rows.iter().zip([true, true, false].into_iter().cycle()) {
            let HeadShape { kv_heads: kv_head_count, head_dim, .. } = layer.heads;
            let layout =
                KvLayout { layer_count: 1, kv_head_count, head_dim, format: KvFormat::Bf16 };
            let wanted = by_cpu(layer, rows, layout);
            let adapters = AdapterSizes { slots: RANKS.len(), rank_max: 40 };
            let options = CudaOptions { adapters, fused, ..CudaOptions::new(WeightFormat::Bf16) };
            let (mut backend, (matrices, [norm, frequencies], mut buffers)) =
                gpu.backend_with(options, |backend| made(backend, layer, rows));
            let writer = backend.low_rank_writer().unwrap().expect("there are slots");
            for (slot, rank) in RANKS.into_iter().enumerate() {
                let of_slot: Vec<_> = (0..)
                    .zip(layer.shapes())
                    .map(|(matrix, shape)| updates(rank, &shape, 10 * matrix + 1000 * slot as u32))
                    .collect();
                let lists = matrices.iter().map(|(_, updates)| updates).zip(of_slot.iter());
                writer.write(slot, rank, lists.map(|(to, from)| (to, from.as_slice()))).unwrap();
            }
            let count = parts(rows).len() as u32;
            let (kv, _) = gpu.kv(layout, 2 * count);
            let limits = BatchLimits {
                slots: count,
                sequence_tokens: 32,
                rows: rows as u32,
                samples: count,
                stops: 1,
                vocabulary: 100,
                hidden: 0,
                depth: 1,
            };
            let mut batch = DeviceBatch::new(&backend, kv, KvGroups::default(), limits).unwrap();
            let mut step = step_of(&mut batch, &backend, rows);
            let vectors = (&norm, &frequencies);
            let found =
                forward(&mut backend, layer, rows, &matrices, vectors, &mut buffers, &mut step);
            backend.check().unwrap();
            for (what, (found, wanted)) in
                ["queries", "activations", "residual"].iter().zip(found.iter().zip(&wanted))
            {
                assert_eq!(found.len(), wanted.len(), "{what}");
                let scale = wanted.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
                for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
                    assert!(
                        (found - wanted).abs() < 0.02 * scale,
                        "{layer:?}, {rows} rows, fused {fused}, {what} {at}: {found} {wanted}"
                    );
                }
            }
        }
    }
}

/// Writes an adapter of the test's model.
fn opened(checkpoint: &Checkpoint, slots: &dyn AdapterSlots, seed: u64) -> model::Adapter {
    let (folder, config) = (tempfile::tempdir().unwrap(), checkpoint.config());
    let heads = config.head_shape_of(kernels::Shard::WHOLE);
    let shape = ModelShape {
        layers: config.layer_count,
        hidden: config.hidden_size,
        queries: heads.query_width(),
        keys: heads.kv_heads * heads.head_dim,
        ffn: config.ffn_size_of(kernels::Shard::WHOLE),
    };
    adapter::write(folder.path(), shape, 3 + seed as usize, seed, 0.1).unwrap();
    slots.open(folder.path(), 16).unwrap()
}

/// Loads two adapters.
fn load<E: Executor>(engine: &mut StepLoop<E>, checkpoint: &Checkpoint) -> [Arc<LoadedAdapter>; 2] {
    let slots = engine.executor_mut().adapter_slots().unwrap();
    [(0, 1), (1, 2)].map(|(slot, seed)| {
        let adapter = opened(checkpoint, &*slots, seed);
        let content_hash = adapter.content_hash();
        slots.set(slot, Some(adapter)).unwrap();
        Arc::new(LoadedAdapter { slot, content_hash })
    })
}

/// Returns sequences of the base model and of both adapters.
fn mix(adapters: &[Arc<LoadedAdapter>; 2]) -> Vec<NewSequence> {
    let of = |id: u32| {
        let sampling = Sampling { logprobs: Some(0), ..Sampling::greedy() };
        let tokens = (0..1 + 29 * id % 83).map(|i| (i * 37 + id * 5) % 1003).collect();
        let adapter = (!id.is_multiple_of(3)).then(|| adapters[id as usize % 3 - 1].clone());
        NewSequence { adapter, ..sequence(u128::from(id), tokens, 24, sampling) }
    };
    (0..9).map(of).collect()
}

type Answers = HashMap<SequenceId, Vec<SampledToken>>;

fn answers<E: Executor>(engine: &mut StepLoop<E>, mix: Vec<NewSequence>) -> Answers {
    let outcomes = run(engine, mix, &HashMap::new());
    outcomes.into_iter().map(|(id, outcome)| (id, outcome.tokens)).collect()
}

/// Asserts that log-probabilities are near until an answer diverges, and returns the number of
/// compared tokens.
fn compare(found: &Answers, wanted: &Answers, tolerance: f32, what: &str) -> usize {
    let mut compared = 0;
    for (id, found) in found {
        for (index, (found, wanted)) in found.iter().zip(&wanted[id]).enumerate() {
            if found.id != wanted.id {
                break;
            }
            let chosen = |token: &SampledToken| token.logprobs.as_ref().unwrap().chosen;
            let (found, wanted) = (chosen(found), chosen(wanted));
            let what = format!("{what}, sequence {}, token {index}", id.0);
            assert!((found - wanted).abs() < tolerance, "{what}: {found} {wanted}");
            compared += 1;
        }
    }
    compared
}

fn on_gpu_with(
    gpu: &Gpu,
    checkpoint: &Checkpoint,
    options: CudaOptions,
    config: SchedulerConfig,
) -> StepLoop<engine::executor::cuda::CudaExecutor> {
    let adapters = AdapterSizes { slots: 3, rank_max: 16 };
    on_gpu(gpu, checkpoint, CudaOptions { adapters, ..options }, config, |_| ()).0
}

pub(crate) fn steps_of_several_adapters_match_cpu_with_and_without_graphs() {
    let gpu = gpu();
    for (architecture, name) in [("LlamaForCausalLM", "llama"), ("Qwen3ForCausalLM", "qwen3")] {
        let checkpoint = checkpoint(architecture, name);
        let config = || config(&checkpoint, 8, 200, 2);
        let mut reference = on_cpu(&checkpoint, config());
        let adapters = load(&mut reference, &checkpoint);
        let wanted = answers(&mut reference, mix(&adapters));
        let first = |id| &wanted[&SequenceId(id)][0];
        assert!(first(0) != first(1), "the adapter changes the answer");
        // Answers diverge early where weights and inputs are rounded to three bits.
        for (weights, tolerance, tokens_min) in
            [(WeightFormat::Bf16, 0.1, 54), (WeightFormat::Fp8, 0.4, 18)]
        {
            for (graphs, fused) in [(true, true), (false, true), (true, false)] {
                let options = CudaOptions { graphs, fused, ..CudaOptions::new(weights) };
                let mut engine = on_gpu_with(&gpu, &checkpoint, options, config());
                let adapters = load(&mut engine, &checkpoint);
                let found = answers(&mut engine, mix(&adapters));
                let what = format!("{name}, {weights}, graphs {graphs}, fused {fused}");
                let compared = compare(&found, &wanted, tolerance, &what);
                println!("{what}: compared {compared} tokens");
                assert!(compared > tokens_min, "{what}: compared {compared} tokens");
                // Without adapters the same engine replays the graphs of the base model.
                let base =
                    || mix(&adapters).into_iter().filter(|it| it.adapter.is_none()).collect();
                let mut alone = on_gpu(&gpu, &checkpoint, options, config(), |_| ()).0;
                // The second run finds its prompts in the prefix cache, as the engine above does.
                answers(&mut alone, base());
                let (found, wanted) = (answers(&mut engine, base()), answers(&mut alone, base()));
                let what = format!("{what}, base");
                let compared = compare(&found, &wanted, 0.1, &what);
                let all: usize = wanted.values().map(Vec::len).sum();
                assert!(2 * compared > all, "{what}: compared {compared} of {all} tokens");
            }
        }
    }
}

pub(crate) fn adapters_are_replaced_while_steps_of_others_run() {
    let gpu = gpu();
    let checkpoint = checkpoint("Qwen3ForCausalLM", "qwen3");
    let options = CudaOptions::new(WeightFormat::Bf16);
    let mut engine = on_gpu_with(&gpu, &checkpoint, options, config(&checkpoint, 8, 200, 2));
    let adapters = load(&mut engine, &checkpoint);
    let wanted = answers(&mut engine, mix(&adapters));
    let slots = engine.executor_mut().adapter_slots().unwrap();
    thread::scope(|scope| {
        let replacing = scope.spawn(|| {
            for count in 0..if short() { 20 } else { 60 } {
                let adapter = opened(&checkpoint, &*slots, 3 + count % 4);
                slots.set(2, (count % 3 > 0).then_some(adapter)).unwrap();
            }
        });
        let mut rounds = 0;
        while !replacing.is_finished() {
            let compared =
                compare(&answers(&mut engine, mix(&adapters)), &wanted, 0.1, "replacing");
            assert!(compared > 9 * 24 / 4, "compared {compared} tokens");
            rounds += 1;
        }
        assert!(rounds > 0, "no answer while adapters are replaced");
    });
    // The last adapter of the slot computes like the same adapter in another slot.
    slots.set(2, Some(opened(&checkpoint, &*slots, 2))).unwrap();
    let moved = Arc::new(LoadedAdapter { slot: 2, content_hash: 77 });
    let moved = [adapters[0].clone(), moved];
    let compared = compare(&answers(&mut engine, mix(&moved)), &wanted, 0.1, "the last adapter");
    assert!(compared > 9 * 24 / 4, "compared {compared} tokens");
}
