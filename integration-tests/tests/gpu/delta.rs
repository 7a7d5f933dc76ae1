//! Linear attention and its recurrent states: layers against the CPU, copies of blocks, and whole
//! engines whose sequences continue from cached states.

use std::{collections::HashMap, sync::Arc, time::Instant};

use engine::event::NewSequence;
use kernels::{
    Backend, BlockId, KvArena, KvFormat, KvGroups, KvLayout, StateShape, WeightFormat,
    backend::GatedDelta,
    cpu::{CpuStep, StepSequence},
    cuda::{Admission, AttentionKind, BatchLimits, CudaOptions, DeviceBatch, StepInput, StepRows},
    sampling::Sampling,
};
use test_harness::skip;

use super::{
    bench::{Bench, Gpu, assert_near, cpu, gpu, numbers, short},
    executor::{config, mix, on_cpu, on_gpu, run, run_with, sequence},
    model::checkpoint_with,
};

const EPS: f32 = 1e-6;
const SEQUENCES: usize = 3;
/// New tokens of each sequence in each step. Two steps decode. The last has enough rows for another
/// variant of the convolution.
const STEPS: [[u32; SEQUENCES]; 6] =
    [[1, 16, 2], [40, 1, 1], [29, 16, 2], [1, 1, 1], [1, 1, 1], [440, 70, 9]];
const ROWS: usize = 519;
const TOKENS: usize = 640;
/// Rows of decode steps, padding included.
const PADDED: u32 = 5;

/// Weights and activations of a layer.
struct Layer<B: Backend> {
    conv: B::Vector,
    decay_log: B::Vector,
    time_bias: B::Vector,
    norm: B::Vector,
    projected: B::Buffer,
    rates: B::Buffer,
    mixed: B::Buffer,
    out: B::Buffer,
}

impl<B: Bench> Layer<B> {
    fn new(backend: &B, shape: StateShape, rows: usize) -> Self {
        let vector = |seed, len| backend.vector(&numbers(seed, len));
        Self {
            conv: vector(1, shape.channels() * (shape.conv_taps + 1)),
            decay_log: vector(2, shape.value_heads),
            time_bias: vector(3, shape.value_heads),
            norm: vector(4, shape.value_dim),
            projected: backend.buffer(rows, shape.projected_width()),
            rates: backend.buffer(rows, 2 * shape.value_heads),
            mixed: backend.delta_buffer(rows, shape),
            out: backend.buffer(rows, shape.value_width()),
        }
    }

    fn launch(&mut self, backend: &mut B, shape: StateShape, layer: usize, step: &mut B::Step) {
        let delta = GatedDelta {
            layer,
            shape,
            conv: &self.conv,
            decay_log: &self.decay_log,
            time_bias: &self.time_bias,
            norm: &self.norm,
            eps: EPS,
        };
        let (mixed, out) = (&mut self.mixed, &mut self.out);
        backend.gated_delta(delta, &self.projected, &self.rates, mixed, step, out);
    }

    /// Runs every layer over a step with inputs of this seed. Returns the outputs of all.
    fn run(
        &mut self,
        backend: &mut B,
        shape: StateShape,
        step: &mut B::Step,
        seed: u32,
    ) -> Vec<f32> {
        let rows = backend.rows(step);
        let of_layer = |layer: usize| {
            let seed = 100 * seed + layer as u32;
            let rates: Vec<_> = numbers(seed + 50, rows * 2 * shape.value_heads);
            backend.put(&mut self.projected, &numbers(seed, rows * shape.projected_width()));
            backend.put(&mut self.rates, &rates.iter().map(|rate| 4.0 * rate).collect::<Vec<_>>());
            backend.poison(&mut self.out);
            self.launch(backend, shape, layer, step);
            backend.get(&self.out, rows)
        };
        (0..shape.layer_count).flat_map(of_layer).collect()
    }
}

/// Compares every step of [`STEPS`] with the CPU. All blocks hold NaN before.
fn check(gpu: &Gpu, shape: StateShape, layout: KvLayout) {
    let weights = match layout.format {
        KvFormat::F32 => WeightFormat::F32,
        KvFormat::Bf16 | KvFormat::Fp8 => WeightFormat::Bf16,
    };
    let groups = KvGroups::whole(layout.layer_count).with_state(Some(shape), layout);
    let count = groups.entries(TOKENS) as u32;
    let blocks = SEQUENCES as u32 * count;
    let tables = [0, 1, 2].map(|sequence| -> Vec<BlockId> {
        (0..count).rev().map(|entry| BlockId(entry * SEQUENCES as u32 + sequence)).collect()
    });
    let options = CudaOptions { kv: layout.format, ..CudaOptions::new(weights) };
    let (mut cuda, mut on_gpu) =
        gpu.backend_with(options, |backend| Layer::new(backend, shape, ROWS));
    let (kv, remote) = gpu.kv(layout, blocks);
    let limits = BatchLimits {
        hidden: 0,
        slots: 8,
        sequence_tokens: TOKENS as u32,
        rows: ROWS as u32,
        samples: 8,
        stops: 1,
        vocabulary: 96,
        depth: 1,
    };
    let mut batch = DeviceBatch::new(&cuda, kv, groups.clone(), limits).unwrap();
    let mut cpu = cpu(weights);
    let mut on_cpu = Layer::new(&cpu, shape, ROWS);
    let arena = KvArena::host(layout, blocks).unwrap();
    for (arena, block) in
        [&remote, &arena].into_iter().flat_map(|it| (0..blocks).map(move |id| (it, id)))
    {
        let nan = vec![0xff; arena.block_bytes()];
        arena.write(BlockId(block)).unwrap().copy_from_host(&nan).unwrap();
    }
    let (sampling, tokens) = (Sampling::greedy(), vec![1; TOKENS]);
    let slots = [6, 0, 3];
    let mut positions = [0; SEQUENCES];
    for (number, rows) in STEPS.into_iter().enumerate() {
        let parts: Vec<_> = (0..SEQUENCES).map(|i| (i, positions[i], rows[i])).collect();
        let admissions: Vec<_> = parts
            .iter()
            .map(|&(i, position, _)| Admission {
                slot: slots[i],
                tokens: &tokens,
                prompt_len: TOKENS as u32,
                position,
                blocks: &tables[i],
                sampling: &sampling,
                adapter: None,
            })
            .collect();
        let sequences: Vec<_> = parts
            .iter()
            .map(|&(i, position, rows)| StepRows { slot: slots[i], position, rows, samples: 1 })
            .collect();
        let is_decode = rows == [1; SEQUENCES];
        let input = StepInput {
            step_id: number as u64,
            admissions: if number == 0 { &admissions } else { &[] },
            extensions: &[],
            sequences: &sequences,
            rows_min: if is_decode { PADDED } else { 0 },
            drafts: None,
            known_drafts: &[],
            has_adapters: false,
        };
        let mut step = batch.begin(&cuda, &input).unwrap();
        let found = on_gpu.run(&mut cuda, shape, &mut step, number as u32);
        let sequences: Vec<_> = parts
            .iter()
            .map(|&(i, first_position, rows)| StepSequence {
                first_position,
                tokens: &tokens[..rows as usize],
                blocks: &tables[i],
                sampled_rows: 1,
                adapter: None,
            })
            .collect();
        let heads = 0..layout.kv_head_count;
        let mut step = CpuStep::of_heads(&arena, heads, &groups, &sequences).unwrap();
        let wanted = on_cpu.run(&mut cpu, shape, &mut step, number as u32);
        let (width, all_rows) = (shape.value_width(), rows.iter().sum::<u32>() as usize);
        let tolerance = if weights == WeightFormat::F32 { 1e-3 } else { 2e-2 };
        let of_layers = found.chunks(found.len() / shape.layer_count);
        for (layer, found) in of_layers.enumerate() {
            let (found, padding) = found.split_at(all_rows * width);
            let wanted = &wanted[layer * all_rows * width..][..all_rows * width];
            let what = format!("{shape} in {layout}, layer {layer}, step {number}");
            assert_near(found, wanted, tolerance, &what);
            assert!(padding.iter().all(|value| *value == 0.0), "{what}: padding");
        }
        (0..SEQUENCES).for_each(|i| positions[i] += rows[i]);
    }
}

pub(crate) fn linear_attention_matches_cpu_for_any_shape_and_chunk() {
    let gpu = gpu();
    let odd = StateShape {
        layer_count: 3,
        key_heads: 2,
        value_heads: 6,
        key_dim: 12,
        value_dim: 20,
        conv_taps: 3,
    };
    let qwen = StateShape { key_heads: 4, value_heads: 8, key_dim: 128, value_dim: 128, ..odd };
    let wide = StateShape { layer_count: 1, value_heads: 4, key_dim: 36, value_dim: 256, ..odd };
    let tall = StateShape { layer_count: 2, key_dim: 256, value_dim: 64, conv_taps: 0, ..odd };
    let short = StateShape { key_dim: 64, value_dim: 68, conv_taps: 1, ..odd };
    for (shape, head_dim) in [(odd, 16), (qwen, 256), (wide, 64), (tall, 64), (short, 32)] {
        for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Fp8] {
            if format == KvFormat::Fp8 && head_dim < 64 {
                continue;
            }
            check(&gpu, shape, KvLayout { layer_count: 2, kv_head_count: 2, head_dim, format });
        }
    }
}

pub(crate) fn output_gate_matches_cpu() {
    let gpu = gpu();
    for weights in [WeightFormat::F32, WeightFormat::Bf16] {
        for (rows, width) in [(1, 8), (7, 96), (70, 4096)] {
            let make = |cuda: &kernels::cuda::CudaBackend| {
                (cuda.buffer(rows, width), cuda.buffer(rows, width))
            };
            let (mut cuda, (mut gate, mut x)) = gpu.backend_with(CudaOptions::new(weights), make);
            let gates: Vec<_> = numbers(1, rows * width).iter().map(|gate| 16.0 * gate).collect();
            let values = numbers(2, rows * width);
            cuda.put(&mut gate, &gates);
            cuda.put(&mut x, &values);
            cuda.apply_gate(rows, &gate, &mut x);
            let mut cpu = cpu(weights);
            let (mut cpu_gate, mut cpu_x) = (cpu.buffer(rows, width), cpu.buffer(rows, width));
            cpu.put(&mut cpu_gate, &gates);
            cpu.put(&mut cpu_x, &values);
            cpu.apply_gate(rows, &cpu_gate, &mut cpu_x);
            let tolerance = if weights == WeightFormat::F32 { 1e-6 } else { 5e-3 };
            let what = format!("{weights}, {rows} rows of {width}");
            assert_near(&cuda.get(&x, rows), &cpu.get(&cpu_x, rows), tolerance, &what);
        }
    }
}

pub(crate) fn copies_of_blocks_run_in_order() {
    let gpu = gpu();
    const BLOCKS: u32 = 1100;
    let layout =
        KvLayout { layer_count: 3, kv_head_count: 2, head_dim: 24, format: KvFormat::Bf16 };
    let (cuda, ()) = gpu.backend_with(CudaOptions::new(WeightFormat::Bf16), |_| ());
    let (kv, arena) = gpu.kv(layout, BLOCKS);
    let limits = BatchLimits {
        hidden: 0,
        slots: 1,
        sequence_tokens: 16,
        rows: 16,
        samples: 1,
        stops: 1,
        vocabulary: 96,
        depth: 1,
    };
    let batch = DeviceBatch::new(&cuda, kv, KvGroups::whole(3), limits).unwrap();
    let bytes = |id: u32| {
        (0..arena.block_bytes()).map(move |at| (id as usize * 31 + at * 7 + at / 256) as u8)
    };
    let mut wanted: Vec<Vec<u8>> = (0..BLOCKS).map(|id| bytes(id).collect()).collect();
    for (id, bytes) in (0..).zip(&wanted) {
        arena.write(BlockId(id)).unwrap().copy_from_host(bytes).unwrap();
    }
    // More than one launch takes, then chains: copies of copies, and to blocks that were copied.
    let many = (0..500).map(|id| (id, 1000 - id));
    let chain = (1..40).map(|id| (1000 + id, 1001 + id)).chain((0..20).map(|id| (id + 1, id)));
    let copies: Vec<_> = many.chain(chain).map(|(from, to)| (BlockId(from), BlockId(to))).collect();
    batch.copy_blocks(&cuda, &copies).unwrap();
    for (from, to) in copies {
        wanted[to.index()] = wanted[from.index()].clone();
    }
    cuda.compute().synchronize().unwrap();
    let mut found = vec![0; arena.block_bytes()];
    for (id, wanted) in (0..).zip(&wanted) {
        arena.read(BlockId(id)).unwrap().copy_to_host(&mut found).unwrap();
        assert_eq!(&found, wanted, "block {id}");
    }
    let beyond = batch.copy_blocks(&cuda, &[(BlockId(0), BlockId(BLOCKS))]).unwrap_err();
    assert!(beyond.to_string().contains("a block of a copy is 1100"), "{beyond}");
}

/// Prints the time of the 30 linear layers of Qwen3.6-35B-A3B, and the bandwidth of reading and
/// writing their states.
pub(crate) fn linear_attention_time_is_reported() {
    let gpu = gpu();
    if short() {
        skip("BATON_TEST_SHORT is set");
    }
    let shape = StateShape {
        layer_count: 30,
        key_heads: 16,
        value_heads: 32,
        key_dim: 128,
        value_dim: 128,
        conv_taps: 3,
    };
    let layout =
        KvLayout { layer_count: 10, kv_head_count: 2, head_dim: 256, format: KvFormat::Bf16 };
    let groups = KvGroups::whole(10).with_state(Some(shape), layout);
    // Sequences with a state, which is read and written.
    const START: u32 = 16;
    for (sequences, rows) in
        [(1, 1), (8, 1), (32, 1), (128, 1), (1, 512), (8, 512), (1, 2048), (1, 4096)]
    {
        let all_rows = sequences * rows;
        let options = CudaOptions::new(WeightFormat::Bf16);
        let (mut cuda, mut layer) =
            gpu.backend_with(options, |backend| Layer::new(backend, shape, all_rows));
        let length = START as usize + rows;
        let count = groups.entries(length) as u32;
        let (kv, _) = gpu.kv(layout, sequences as u32 * count);
        let limits = BatchLimits {
            hidden: 0,
            slots: sequences as u32,
            sequence_tokens: length as u32,
            rows: all_rows as u32,
            samples: sequences as u32,
            stops: 1,
            vocabulary: 96,
            depth: 1,
        };
        let mut batch = DeviceBatch::new(&cuda, kv, groups.clone(), limits).unwrap();
        let (sampling, tokens) = (Sampling::greedy(), vec![1; length]);
        let tables: Vec<Vec<BlockId>> = (0..sequences as u32)
            .map(|sequence| (0..count).map(|entry| BlockId(sequence * count + entry)).collect())
            .collect();
        let admission = |(slot, blocks)| Admission {
            slot,
            tokens: &tokens,
            prompt_len: length as u32,
            position: START,
            blocks,
            sampling: &sampling,
            adapter: None,
        };
        let blocks = tables.iter().map(Vec::as_slice);
        let admissions: Vec<_> = (0..).zip(blocks).map(admission).collect();
        let of_slot = |slot| StepRows { slot, position: START, rows: rows as u32, samples: 1 };
        let input = StepInput {
            step_id: 0,
            admissions: &admissions,
            extensions: &[],
            sequences: &(0..sequences as u32).map(of_slot).collect::<Vec<_>>(),
            rows_min: 0,
            drafts: None,
            known_drafts: &[],
            has_adapters: false,
        };
        let mut step = batch.begin(&cuda, &input).unwrap();
        let times = (0..5).map(|_| {
            cuda.compute().synchronize().unwrap();
            let began = Instant::now();
            (0..30).for_each(|number| layer.launch(&mut cuda, shape, number, &mut step));
            cuda.compute().synchronize().unwrap();
            began.elapsed().as_secs_f64() / 30.0
        });
        let best = times.fold(f64::MAX, f64::min);
        cuda.check().unwrap();
        let state_bytes = sequences * shape.value_heads * shape.key_dim * shape.value_dim * 4;
        println!(
            "linear attention, {sequences} sequences of {rows} rows: {:.1} us a layer, {:.0} GB/s",
            best * 1e6,
            2.0 * state_bytes as f64 / best / 1e9
        );
    }
}

/// Fills every block without an owner with NaN.
fn poison_free_blocks<E: engine::executor::Executor>(
    engine: &engine::StepLoop<E>,
    arena: &Arc<KvArena>,
) {
    let nan = vec![0xff; arena.block_bytes()];
    for block in engine.scheduler().free_blocks() {
        let mut block = arena.write(block).expect("no step uses a free block");
        block.copy_from_host(&nan).unwrap();
    }
}

/// Returns prompts of two families that share prefixes, some of them equal.
fn requests() -> Vec<NewSequence> {
    let request = |id: u128| {
        let (family, length) = (id as u32 % 2, 20 + 37 * (id as u32 % 6) % 110);
        let tokens = (0..length).map(|i| (i * 31 + family * 101 + i / 7) % 1003).collect();
        NewSequence { ignore_stop_tokens: true, ..sequence(id, tokens, 90, Sampling::greedy()) }
    };
    (0..12).map(request).collect()
}

/// Sequences continue from cached states, are preempted, and share steps with prompts. Free blocks
/// hold NaN. Every token is that of the CPU.
pub(crate) fn cached_and_reused_states_match_cpu_tokens() {
    let gpu = gpu();
    let checkpoint = checkpoint_with("Qwen3_5ForCausalLM", "qwen3_5_text", 64);
    let mut reference = on_cpu(&checkpoint, config(&checkpoint, 8, 400, 1));
    let options =
        CudaOptions { attention: AttentionKind::Plain, ..CudaOptions::new(WeightFormat::F32) };
    let wanted = run(&mut reference, requests(), &HashMap::new());
    let mut preemptions = 0;
    for (depth, blocks) in [(1, 400), (2, 400), (2, 40)] {
        let config = config(&checkpoint, 8, blocks, depth);
        let (mut engine, arena) = on_gpu(&gpu, &checkpoint, options, config, |_| ());
        // The second time prompts are cached.
        for time in 0..2 {
            let found = run_with(&mut engine, requests(), 4, &HashMap::new(), |engine| {
                engine.scheduler().check();
                poison_free_blocks(engine, &arena);
            });
            for (id, found) in &found {
                let what = format!("{id:?}, time {time}, depth {depth}, {blocks} blocks");
                assert!(!found.is_failed, "{what} failed");
                assert_eq!(found.ids(), wanted[id].ids(), "{what}");
            }
        }
        preemptions += engine.scheduler().preemptions();
        let pins = |id| arena.pins(BlockId(id)).unwrap();
        assert!((0..blocks).all(|id| pins(id) == 0), "a block is still pinned");
    }
    assert!(preemptions > 0);
}

/// With experts in bf16 and CUDA graphs, NaN in free blocks changes no token.
pub(crate) fn free_blocks_of_states_are_never_read() {
    let gpu = gpu();
    for (architecture, name) in
        [("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"), ("Qwen3NextForCausalLM", "qwen3_next")]
    {
        let checkpoint = checkpoint_with(architecture, name, 64);
        let config = config(&checkpoint, 8, 120, 2);
        let start =
            || on_gpu(&gpu, &checkpoint, CudaOptions::new(WeightFormat::Bf16), config, |_| ());
        let ((mut engine, _), (mut poisoned, arena)) = (start(), start());
        for round in 0..if short() { 1 } else { 4 } {
            for _ in 0..2 {
                let wanted = run(&mut engine, mix(round, 14), &HashMap::new());
                let found = run_with(&mut poisoned, mix(round, 14), 2, &HashMap::new(), |engine| {
                    poison_free_blocks(engine, &arena);
                });
                assert_eq!(found, wanted, "{architecture}, round {round}");
                assert!(found.values().all(|outcome| !outcome.is_failed));
            }
        }
    }
}
