//! The CPU backend's operations at SmolLM2-135M's shapes, compared with the memory bandwidth.
//!
//! `cargo bench -p kernels` prints GiB/s where memory is the limit, and Gelem/s where arithmetic is: a
//! multiply-add counts as two elements, so Gelem/s are GFLOP/s. A name after `--` selects benchmarks.

use std::{hint::black_box, sync::Arc, time::Duration};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kernels::{
    Backend, BlockId, Dtype, KvArena, KvLayout, RowSource, WeightFormat,
    backend::{HeadShape, HeadWeights},
    cpu::{
        CpuBackend, CpuBuffer, CpuMatrix, CpuOptions, CpuStep, CpuVector, Isa, SampleRow,
        StepSequence, threads::ThreadPool,
    },
    sampling::Sampling,
};

const LAYERS: usize = 30;
const WIDTH: usize = 576;
const INNER: usize = 1536;
const VOCABULARY: usize = 49_152;
const SHAPE: HeadShape = HeadShape { query_heads: 9, kv_heads: 3, head_dim: 64 };
const THREADS: usize = 2;
const ROWS_MAX: usize = 512;
const CONTEXT_BLOCKS: u32 = 64;

struct Weights {
    rows: usize,
    cols: usize,
}

impl RowSource for Weights {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        let mut state = (row as u32).wrapping_mul(2_654_435_761) | 1;
        for value in out {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *value = ((state >> 8) as f32 / 8_388_608.0 - 1.0) * 0.05;
        }
    }
}

const FORMATS: [WeightFormat; 3] = [WeightFormat::Bf16, WeightFormat::Q8, WeightFormat::F32];

fn backend(weights: WeightFormat) -> CpuBackend {
    CpuBackend::new(CpuOptions { weights, threads: THREADS, isa: Isa::Auto }).unwrap()
}

fn arena(dtype: Dtype, layer_count: usize) -> Arc<KvArena> {
    let layout = KvLayout { layer_count, kv_head_count: 3, head_dim: 64, dtype };
    KvArena::host(layout, 32 * CONTEXT_BLOCKS).unwrap()
}

fn step(arena: &Arc<KvArena>, batch: usize, first_position: u32, tokens: &[u32]) -> CpuStep {
    let tables: Vec<Vec<BlockId>> = (0..batch as u32)
        .map(|row| (0..CONTEXT_BLOCKS).map(|i| BlockId(row * CONTEXT_BLOCKS + i)).collect())
        .collect();
    let sequences: Vec<_> = tables
        .iter()
        .map(|blocks| StepSequence { first_position, tokens, blocks, sampled_rows: 1 })
        .collect();
    CpuStep::new(arena, &sequences).unwrap()
}

fn filled(backend: &CpuBackend, rows: usize, width: usize) -> CpuBuffer {
    let mut buffer = backend.buffer(rows, width);
    let source = Weights { rows, cols: width };
    for (row, out) in buffer.rows_mut(rows).chunks_exact_mut(width).enumerate() {
        source.read_row(row, out);
    }
    buffer
}

/// Measures peak bandwidth: all threads together read memory that no cache holds. Each thread reads four
/// streams, because one stream does not keep enough cache lines in flight.
fn memory(c: &mut Criterion) {
    const BYTES: usize = 1 << 30;
    const PIECE: usize = 1 << 19;
    let mut group = c.benchmark_group("memory");
    group.throughput(Throughput::Bytes(BYTES as u64));
    let words = vec![1_u64; BYTES / 8];
    for threads in [1, THREADS] {
        let mut pool = ThreadPool::new(threads, "bench").unwrap();
        group.bench_function(BenchmarkId::new("read", format!("{threads} threads")), |b| {
            b.iter(|| {
                pool.run(words.len() / PIECE, &|_, piece| {
                    let piece = &words[piece * PIECE..][..PIECE];
                    let mut lanes = [0_u64; 8];
                    let mut streams = piece.chunks_exact(PIECE / 4).map(|s| s.as_chunks::<8>().0);
                    let streams: [&[[u64; 8]]; 4] =
                        std::array::from_fn(|_| streams.next().expect("four streams"));
                    for line in 0..PIECE / 32 {
                        for stream in streams {
                            for (lane, word) in lanes.iter_mut().zip(&stream[line]) {
                                *lane ^= word;
                            }
                        }
                    }
                    black_box(lanes);
                });
            });
        });
    }
    group.finish();
}

fn fork_join(c: &mut Criterion) {
    let mut pool = ThreadPool::new(THREADS, "bench").unwrap();
    c.bench_function("fork-join/empty region", |b| {
        b.iter(|| {
            pool.run(THREADS, &|thread, task| {
                black_box((thread, task));
            });
        });
    });
}

fn matmul(c: &mut Criterion) {
    for format in FORMATS {
        let mut backend = backend(format);
        let mut group = c.benchmark_group(format!("matmul {format}"));
        for (name, n, k) in
            [("gate_up", 2 * INNER, WIDTH), ("down", WIDTH, INNER), ("logits", VOCABULARY, WIDTH)]
        {
            // Several copies, so that weights come from memory, as in a forward pass.
            let mut matrices: Vec<CpuMatrix> = Vec::new();
            while matrices.iter().map(CpuMatrix::byte_count).sum::<usize>() < 64 << 20 {
                matrices.push(backend.matrix(&Weights { rows: n, cols: k }));
            }
            let copies = matrices.len();
            for rows in [1, 8, 64, 512] {
                if name == "logits" && rows > 64 {
                    continue;
                }
                let x = filled(&backend, rows, k);
                let mut out = backend.buffer(rows, n);
                group.throughput(match rows {
                    1 => Throughput::Bytes(matrices[0].byte_count() as u64),
                    _ => Throughput::Elements((2 * n * k * rows) as u64),
                });
                let mut next = 0;
                group.bench_function(BenchmarkId::new(name, format!("{rows} rows")), |b| {
                    b.iter(|| {
                        backend.matmul(rows, &x, &matrices[next % copies], &mut out);
                        next += 1;
                    });
                });
            }
        }
        group.finish();
    }
}

fn attention(c: &mut Criterion) {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let mut backend = backend(dtype.into());
        let arena = arena(dtype, 1);
        let mut group = c.benchmark_group(format!("attention {dtype}"));
        for (name, batch, first, rows) in [
            ("prefill 512", 1, 0, 512),
            ("prefill 128 after 896", 1, 896, 128),
            ("decode at 1000", 1, 1000, 1),
            ("decode at 200, batch 8", 8, 200, 1),
        ] {
            let tokens = vec![0; rows];
            let mut step = step(&arena, batch, first, &tokens);
            let mut qkv = filled(&backend, batch * rows, SHAPE.qkv_width());
            let mut out = backend.buffer(batch * rows, SHAPE.query_width());
            let frequencies = backend.vector(&[0.1; 32]);
            backend.store_kv(0, SHAPE, HeadWeights::none(), &frequencies, &mut qkv, &mut step);
            let keys: usize = (0..rows).map(|row| first as usize + row + 1).sum::<usize>() * batch;
            group.throughput(Throughput::Elements((2 * 2 * keys * SHAPE.query_width()) as u64));
            group.bench_function(name, |b| {
                b.iter(|| backend.attention(0, SHAPE, 0.125, None, &qkv, &step, &mut out));
            });
        }
        group.finish();
    }
}

fn sampling(c: &mut Criterion) {
    let mut backend = backend(WeightFormat::F32);
    let mut logits = filled(&backend, 8, VOCABULARY);
    for logit in logits.rows_mut(8) {
        *logit = (*logit * 200.0).powi(3) / 100.0;
    }
    let warm = Sampling { temperature: 0.8, ..Sampling::greedy() };
    let tokens: Vec<u32> = (0..500).collect();
    let mut group = c.benchmark_group("sample");
    for (name, sampling) in [
        ("greedy", Sampling::greedy()),
        ("temperature", warm.clone()),
        ("top-k 50, top-p 0.95", Sampling { top_k: 50, top_p: 0.95, ..warm.clone() }),
        ("top-p 0.95", Sampling { top_p: 0.95, ..warm.clone() }),
        ("flat, top-p 0.95", Sampling { temperature: 50.0, top_p: 0.95, ..warm.clone() }),
        (
            "greedy, penalties, 20 logprobs",
            Sampling { repetition_penalty: 1.1, logprobs: Some(20), ..Sampling::greedy() },
        ),
    ] {
        let row =
            SampleRow { sampling: &sampling, tokens: &tokens, prompt_len: 400, allowed: None };
        for rows in [1, 8] {
            group.bench_function(BenchmarkId::new(name, format!("{rows} rows")), |b| {
                b.iter(|| backend.sample(&logits, &vec![row; rows]));
            });
        }
    }
    group.finish();
}

struct Layer {
    qkv: CpuMatrix,
    out: CpuMatrix,
    gate_up: CpuMatrix,
    down: CpuMatrix,
}

/// Every operation of a forward pass. Each layer has its own weights.
struct Model {
    backend: CpuBackend,
    layers: Vec<Layer>,
    table: CpuMatrix,
    norm: CpuVector,
    frequencies: CpuVector,
    arena: Arc<KvArena>,
    residual: CpuBuffer,
    x: CpuBuffer,
    y: CpuBuffer,
    qkv: CpuBuffer,
    gate_up: CpuBuffer,
    inner: CpuBuffer,
    logits: CpuBuffer,
}

impl Model {
    fn new(format: WeightFormat) -> Self {
        let backend = backend(format);
        let matrix = |rows, cols| backend.matrix(&Weights { rows, cols });
        let layers = (0..LAYERS)
            .map(|_| Layer {
                qkv: matrix(SHAPE.qkv_width(), WIDTH),
                out: matrix(WIDTH, WIDTH),
                gate_up: matrix(2 * INNER, WIDTH),
                down: matrix(WIDTH, INNER),
            })
            .collect();
        let buffer = |width| backend.buffer(ROWS_MAX, width);
        Self {
            table: matrix(VOCABULARY, WIDTH),
            norm: backend.vector(&[1.0; WIDTH]),
            frequencies: backend
                .vector(&std::array::from_fn::<f32, 32, _>(|i| 10_000_f32.powf(i as f32 / -32.0))),
            arena: arena(format.kv_dtype(), LAYERS),
            residual: buffer(WIDTH),
            x: buffer(WIDTH),
            y: buffer(WIDTH),
            qkv: buffer(SHAPE.qkv_width()),
            gate_up: buffer(2 * INNER),
            inner: buffer(INNER),
            logits: backend.buffer(32, VOCABULARY),
            layers,
            backend,
        }
    }

    fn forward(&mut self, batch: usize, first_position: u32, tokens: &[u32]) {
        let mut step = step(&self.arena, batch, first_position, tokens);
        let Self { backend, norm, residual, x, y, .. } = self;
        let rows = step.rows();
        backend.embed(&self.table, &step, residual);
        backend.rms_norm(rows, residual, norm, 1e-5, x);
        for (index, layer) in self.layers.iter().enumerate() {
            let (qkv, inner) = (&mut self.qkv, &mut self.inner);
            backend.matmul(rows, x, &layer.qkv, qkv);
            backend.store_kv(index, SHAPE, HeadWeights::none(), &self.frequencies, qkv, &mut step);
            backend.attention(index, SHAPE, 0.125, None, qkv, &step, x);
            backend.matmul(rows, x, &layer.out, y);
            backend.add_rms_norm(rows, residual, y, norm, 1e-5, x);
            backend.matmul(rows, x, &layer.gate_up, &mut self.gate_up);
            backend.silu_mul(rows, &self.gate_up, inner);
            backend.matmul(rows, inner, &layer.down, y);
            backend.add_rms_norm(rows, residual, y, norm, 1e-5, x);
        }
        backend.gather_sampled(x, &step, y);
        backend.matmul(batch, y, &self.table, &mut self.logits);
    }
}

/// Measures tokens per second of a whole forward pass. Greedy sampling would add some microseconds.
fn model(c: &mut Criterion) {
    for format in FORMATS {
        let mut model = Model::new(format);
        let mut group = c.benchmark_group(format!("smollm2-135m {format}"));
        for length in [128, 512] {
            let tokens = vec![7; length];
            group.throughput(Throughput::Elements(length as u64));
            group.bench_function(BenchmarkId::new("prefill", length), |b| {
                b.iter(|| model.forward(1, 0, &tokens));
            });
        }
        for batch in [1, 8, 32] {
            group.throughput(Throughput::Elements(batch as u64));
            group.bench_function(BenchmarkId::new("decode at 128, batch", batch), |b| {
                b.iter(|| model.forward(batch, 128, &[7]));
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = ops;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2));
    targets = memory, fork_join, matmul, attention, sampling, model
}
criterion_main!(ops);
