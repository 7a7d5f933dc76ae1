//! Forward pass of a small Llama-like model over the public interface of the backend. Hand-over
//! between nodes relies on its guarantees.

use std::sync::Arc;

use kernels::{
    Backend, BlockId, KvArena, KvLayout, RowSource, WeightFormat,
    backend::{GatedActivation, HeadShape, HeadWeights, LayerAttention},
    cpu::{
        CpuBackend, CpuBuffer, CpuMatrix, CpuOptions, CpuStep, CpuVector, Isa, SampleError,
        SampleRow, StepSequence,
    },
    sampling::Sampling,
};

const SHAPE: HeadShape = HeadShape { query_heads: 6, kv_heads: 2, head_dim: 16 };
const WIDTH: usize = 96;
const INNER: usize = 160;
const VOCABULARY: usize = 301;
const LAYERS: usize = 2;
const ROWS_MAX: usize = 128;

/// Reproducible weights.
struct Weights {
    rows: usize,
    cols: usize,
    seed: u32,
}

impl RowSource for Weights {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        let mut state = (self.seed * 7919 + row as u32).wrapping_mul(2_654_435_761) | 1;
        for value in out {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *value = ((state >> 8) as f32 / 8_388_608.0 - 1.0) * 0.2;
        }
    }
}

struct Layer {
    norm: CpuVector,
    qkv: CpuMatrix,
    out: CpuMatrix,
    gate_up: CpuMatrix,
    down: CpuMatrix,
}

struct Model {
    backend: CpuBackend,
    embedding: CpuMatrix,
    layers: Vec<Layer>,
    frequencies: CpuVector,
    arena: Arc<KvArena>,
    logits: CpuBuffer,
}

impl Model {
    fn new(weights: WeightFormat, isa: Isa, threads: usize) -> Option<Self> {
        let backend = CpuBackend::new(CpuOptions { weights, threads, isa }).ok()?;
        let matrix = |rows, cols, seed| backend.matrix(&Weights { rows, cols, seed });
        let layers = (0..LAYERS as u32)
            .map(|layer| Layer {
                norm: backend.vector(&[1.1; WIDTH]),
                qkv: matrix(SHAPE.qkv_width(), WIDTH, 10 * layer + 1),
                out: matrix(WIDTH, SHAPE.query_width(), 10 * layer + 2),
                gate_up: matrix(2 * INNER, WIDTH, 10 * layer + 3),
                down: matrix(WIDTH, INNER, 10 * layer + 4),
            })
            .collect();
        let layout = KvLayout {
            layer_count: LAYERS,
            kv_head_count: SHAPE.kv_heads,
            head_dim: SHAPE.head_dim,
            format: weights.kv_format(),
        };
        Some(Self {
            embedding: matrix(VOCABULARY, WIDTH, 99),
            layers,
            frequencies: backend.vector(&[1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.001]),
            arena: KvArena::host(layout, 64).unwrap(),
            logits: backend.buffer(ROWS_MAX, VOCABULARY),
            backend,
        })
    }

    /// Returns the logits of every row, one after the other.
    fn forward(&mut self, sequences: &[(u32, &[u32], &[BlockId])]) -> Vec<f32> {
        let sequences: Vec<_> = sequences
            .iter()
            .map(|&(first_position, tokens, blocks)| StepSequence {
                first_position,
                tokens,
                blocks,
                sampled_rows: tokens.len() as u32,
                adapter: None,
            })
            .collect();
        let mut step = CpuStep::new(&self.arena, &sequences).unwrap();
        let backend = &mut self.backend;
        let rows = backend.rows(&step);
        let buffer = |width| CpuBackend::buffer(backend, ROWS_MAX, width);
        let (mut residual, mut x, mut y) = (buffer(WIDTH), buffer(WIDTH), buffer(WIDTH));
        let (mut qkv, mut heads) = (buffer(SHAPE.qkv_width()), buffer(SHAPE.query_width()));
        let (mut gate_up, mut inner) = (buffer(2 * INNER), buffer(INNER));
        backend.embed(&self.embedding, VOCABULARY, 1.0, &step, &mut residual);
        for (index, layer) in self.layers.iter().enumerate() {
            match index {
                0 => backend.rms_norm(rows, &residual, &layer.norm, 1e-5, &mut x),
                _ => backend.add_rms_norm(rows, &mut residual, &y, &layer.norm, 1e-5, &mut x),
            }
            backend.matmul(rows, &x, &layer.qkv, &mut qkv);
            let rotary = HeadWeights::rotary(&self.frequencies);
            backend.store_kv(index, SHAPE, rotary, &mut qkv, &mut step);
            let attention =
                LayerAttention { layer: index, heads: SHAPE, scale: 0.25, window: None };
            backend.attention(attention, None, &qkv, &step, &mut heads);
            backend.matmul(rows, &heads, &layer.out, &mut y);
            backend.add_rms_norm(rows, &mut residual, &y, &layer.norm, 1e-5, &mut x);
            backend.matmul(rows, &x, &layer.gate_up, &mut gate_up);
            backend.activate(GatedActivation::Silu, rows, &gate_up, &mut inner);
            backend.matmul(rows, &inner, &layer.down, &mut y);
        }
        backend.add_rms_norm(rows, &mut residual, &y, &self.layers[0].norm, 1e-5, &mut x);
        backend.gather_sampled(&x, &step, &mut y);
        let sampled = backend.sampled_rows(&step);
        backend.matmul(sampled, &y, &self.embedding, &mut self.logits);
        self.logits.rows(sampled).to_vec()
    }
}

fn prompt(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| (i * 37 + seed * 101 + i * i) % VOCABULARY as u32).collect()
}

fn table(first: u32) -> Vec<BlockId> {
    (0..8).map(|i| BlockId((first + 5 * i) % 64)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

const ISAS: [Isa; 6] =
    [Isa::Reference, Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];

#[test]
fn f32_logits_do_not_depend_on_chunks_batches_or_threads() {
    check_chunks(WeightFormat::F32, &[1, 2, 3]);
}

#[test]
fn bf16_logits_do_not_depend_on_chunks_batches_or_threads() {
    check_chunks(WeightFormat::Bf16, &[2]);
}

#[test]
fn q8_logits_do_not_depend_on_chunks_batches_or_threads() {
    check_chunks(WeightFormat::Q8, &[2]);
}

fn check_chunks(format: WeightFormat, thread_counts: &[usize]) {
    let tokens = prompt(1, 75);
    for isa in ISAS {
        let Some(mut whole) = Model::new(format, isa, 1) else { continue };
        let want = whole.forward(&[(0, &tokens, &table(0))]);
        for &threads in thread_counts {
            for chunk in [1, 7, 16, 40] {
                let mut model = Model::new(format, isa, threads).unwrap();
                let (mut got, mut first) = (Vec::new(), 0);
                for piece in tokens.chunks(chunk) {
                    // Neighbours on both sides, which restart in every step.
                    let (a, b) = (prompt(2, 3), prompt(3, 17));
                    let logits = model.forward(&[
                        (0, &a, &table(1)),
                        (first, piece, &table(0)),
                        (0, &b, &table(2)),
                    ]);
                    got.extend_from_slice(&logits[3 * VOCABULARY..][..piece.len() * VOCABULARY]);
                    first += piece.len() as u32;
                }
                let context = format!("{format} {isa}, {threads} threads, chunks of {chunk}");
                assert_eq!(bits(&got), bits(&want), "{context}");
            }
        }
    }
}

#[test]
fn f32_logits_are_the_same_bits_at_every_level_with_fma() {
    let tokens = prompt(4, 60);
    let mut reference = Model::new(WeightFormat::F32, Isa::Reference, 1).unwrap();
    let want = reference.forward(&[(0, &tokens, &table(0))]);
    for isa in ISAS {
        let Some(mut model) = Model::new(WeightFormat::F32, isa, 2) else { continue };
        let got = model.forward(&[(0, &tokens, &table(0))]);
        if model.backend.isa_name() == "portable" && cfg!(target_arch = "x86_64") {
            assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-4), "{isa}");
        } else {
            assert_eq!(bits(&got), bits(&want), "{isa}");
        }
    }
}

#[test]
fn bf16_and_q8_logits_stay_near_f32() {
    let tokens = prompt(5, 60);
    let mut exact = Model::new(WeightFormat::F32, Isa::Auto, 1).unwrap();
    let want = exact.forward(&[(0, &tokens, &table(0))]);
    let spread = want.iter().fold(0.0_f32, |most, logit| most.max(logit.abs()));
    for format in [WeightFormat::Bf16, WeightFormat::Q8] {
        for isa in ISAS.into_iter().chain([Isa::Auto]) {
            let Some(mut model) = Model::new(format, isa, 2) else { continue };
            let got = model.forward(&[(0, &tokens, &table(0))]);
            let worst = got.iter().zip(&want).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(worst > 0.0 && worst < 0.05 * spread, "{format} {isa}: {worst} of {spread}");
        }
    }
}

#[test]
fn blocks_moved_to_another_arena_continue_the_sequence_to_the_bit() {
    let (tokens, blocks) = (prompt(6, 50), table(3));
    for format in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q8] {
        let mut alone = Model::new(format, Isa::Auto, 2).unwrap();
        alone.forward(&[(0, &tokens[..49], &blocks)]);
        let want = alone.forward(&[(49, &tokens[49..], &blocks)]);

        let mut sender = Model::new(format, Isa::Auto, 1).unwrap();
        sender.forward(&[(0, &tokens[..49], &blocks)]);
        let mut receiver = Model::new(format, Isa::Auto, 2).unwrap();
        let landing = table(20);
        for (&from, &to) in blocks.iter().zip(&landing).take(4) {
            let source = sender.arena.read(from).unwrap();
            let mut bytes = vec![0; source.byte_count()];
            source.copy_to_host(&mut bytes).unwrap();
            receiver.arena.write(to).unwrap().copy_from_host(&bytes).unwrap();
        }
        let got = receiver.forward(&[(49, &tokens[49..], &landing)]);
        assert_eq!(bits(&got), bits(&want), "{format}");
    }
}

#[test]
fn sequences_read_a_shared_prefix_even_in_the_step_that_writes_it() {
    let tokens = prompt(7, 40);
    let (first, mut second) = (table(0), table(30));
    second[..2].copy_from_slice(&first[..2]);
    let mut model = Model::new(WeightFormat::F32, Isa::Auto, 2).unwrap();
    let logits = model.forward(&[(0, &tokens, &first), (32, &tokens[32..], &second)]);
    let rest = 8 * VOCABULARY;
    assert_eq!(bits(&logits[32 * VOCABULARY..][..rest]), bits(&logits[40 * VOCABULARY..][..rest]));
}

#[test]
fn sampling_a_row_does_not_depend_on_the_batch() {
    let tokens = prompt(8, 20);
    let mut model = Model::new(WeightFormat::F32, Isa::Auto, 2).unwrap();
    let logits = model.forward(&[(0, &tokens, &table(0))]);
    let samplings: Vec<Sampling> = (0..20)
        .map(|seed| Sampling {
            temperature: 0.5 * (seed % 4) as f32,
            top_p: 0.95,
            seed,
            logprobs: Some(2),
            ..Sampling::greedy()
        })
        .collect();
    let rows: Vec<_> = samplings
        .iter()
        .zip(1..)
        .map(|(sampling, length)| SampleRow {
            sampling,
            tokens: &tokens[..length],
            prompt_len: 1,
            allowed: None,
            scored: None,
        })
        .collect();
    let together = model.backend.sample(&model.logits, &rows);
    for ((row, logits), token) in rows.iter().zip(logits.chunks(VOCABULARY)).zip(&together) {
        assert_eq!(&kernels::cpu::sample(logits, row), token);
        assert!((token.as_ref().unwrap().id as usize) < VOCABULARY);
    }
}

#[test]
fn invalid_logits_of_one_row_fail_that_row_alone() {
    let mut model = Model::new(WeightFormat::F32, Isa::Auto, 2).unwrap();
    model.forward(&[(0, &prompt(9, 3), &table(0))]);
    model.logits.rows_mut(2)[VOCABULARY + 5] = f32::NAN;
    let greedy = Sampling::greedy();
    let row =
        SampleRow { sampling: &greedy, tokens: &[1], prompt_len: 1, allowed: None, scored: None };
    let tokens = model.backend.sample(&model.logits, &[row; 3]);
    assert!(matches!(tokens[1], Err(SampleError::BadLogit { token: 5, .. })));
    assert!(tokens[0].is_ok() && tokens[2].is_ok());
}

#[test]
fn unsupported_isa_and_thread_count_are_rejected_by_name() {
    let options = |isa, threads| CpuOptions { weights: WeightFormat::Bf16, threads, isa };
    for isa in ISAS {
        if let Err(error) = CpuBackend::new(options(isa, 1)) {
            let expected = format!("cannot use isa {isa}");
            assert!(error.to_string().contains(&expected), "{error}");
        }
    }
    assert!(CpuBackend::new(options(Isa::Auto, 2)).is_ok());
    let error = CpuBackend::new(options(Isa::Auto, 0)).err().unwrap();
    assert_eq!(error.to_string(), "invalid threads: 0; expected 1 to 1024");
}
