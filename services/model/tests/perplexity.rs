//! Perplexity of SmolLM2 over Baton's documentation, in windows of 512 tokens: with weights and KV
//! in bf16, with KV in FP8, and with weights in FP8 as a GPU quantizes them while it loads a model
//! with `model.dtype = "fp8"`. `BATON_TEST_WINDOWS` (5) is the number of windows, at most 16.
//!
//! The tokens in `fixtures/perplexity.tokens` are the first of docs/architecture.md and
//! docs/operations, each in 16 bits.

mod common;

use std::fs;

use common::sequence::Runner;
use kernels::{
    Backend as _, KvFormat, Packer, RowSource, Shard, WeightFormat,
    cpu::{CpuBackend, CpuMatrix, CpuVector, Isa},
    fp8,
};
use model::{Checkpoint, LoadFormat};

const WINDOW: usize = 512;
const CHUNK: usize = 256;

fn tokens() -> Vec<u32> {
    let bytes = fs::read(common::fixture("perplexity.tokens")).unwrap();
    let windows = std::env::var("BATON_TEST_WINDOWS");
    let windows = windows.map_or(5, |count| count.parse().expect("a number of windows"));
    let tokens = bytes.as_chunks().0.iter().take(windows * WINDOW);
    tokens.map(|bytes| u16::from_le_bytes(*bytes).into()).collect()
}

/// Rows in FP8 with a scale for each, dequantized.
struct Fp8Rows<'a>(&'a dyn RowSource);

impl RowSource for Fp8Rows<'_> {
    fn rows(&self) -> usize {
        self.0.rows()
    }

    fn cols(&self) -> usize {
        self.0.cols()
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        self.0.read_row(row, out);
        let most = out.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let scale = if most > 0.0 { (most / fp8::E4M3_MAX).max(f32::MIN_POSITIVE) } else { 1.0 };
        out.iter_mut().for_each(|value| *value = fp8::decode(fp8::encode(*value / scale)) * scale);
    }
}

/// Packs the matrices that may be quantized in FP8, dequantized to the backend's format.
struct Fp8Packer<'a>(&'a CpuBackend);

impl Packer for Fp8Packer<'_> {
    type Matrix = CpuMatrix;
    type Vector = CpuVector;

    fn pack_matrix(&self, source: &dyn RowSource) -> CpuMatrix {
        match source.may_be_quantized() {
            true => self.0.matrix(&Fp8Rows(source)),
            false => self.0.matrix(source),
        }
    }

    fn pack_vector(&self, values: &[f32]) -> CpuVector {
        self.0.vector(values)
    }

    fn pack_shard(&self) -> Shard {
        Shard::WHOLE
    }
}

/// Returns the logarithm of the probability of `token`, negated.
fn surprise(logits: &[f32], token: u32) -> f64 {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = logits.iter().map(|logit| (logit - greatest).exp()).sum();
    f64::from(sum.ln() + greatest - logits[token as usize])
}

fn perplexity(runner: &mut Runner) -> f64 {
    let (tokens, mut sum, mut count) = (tokens(), 0.0, 0);
    for window in tokens.chunks_exact(WINDOW) {
        let mut sequence = runner.sequence(WINDOW);
        for (index, chunk) in window.chunks(CHUNK).enumerate() {
            let logits = runner.forward(&mut [(&mut sequence, chunk, CHUNK as u32)]);
            let next = &window[index * CHUNK + 1..];
            for (logits, token) in logits.iter().zip(next) {
                sum += surprise(logits, *token);
                count += 1;
            }
        }
    }
    assert_eq!(count, tokens.len() / WINDOW * (WINDOW - 1));
    (sum / f64::from(count as u32)).exp()
}

#[test]
fn perplexity_in_fp8_is_near_that_in_bf16() {
    let checkpoint = Checkpoint::open(common::smollm2_path(), LoadFormat::Auto).unwrap();
    let runner = |kv| Runner::with_kv(&checkpoint, (WeightFormat::Bf16, kv), Isa::Auto, CHUNK);
    let in_bf16 = perplexity(&mut runner(KvFormat::Bf16));
    let kv_in_fp8 = perplexity(&mut runner(KvFormat::Fp8));
    let ratio = kv_in_fp8 / in_bf16;
    println!("perplexity: bf16 {in_bf16:.4}, KV in fp8 {kv_in_fp8:.4}, ratio {ratio:.5}");
    assert_ne!(kv_in_fp8, in_bf16, "the KV was not quantized");
    assert!(ratio <= 1.01, "bf16 {in_bf16}, KV in fp8 {kv_in_fp8}: {ratio}");

    let mut quantized = runner(KvFormat::Bf16);
    quantized.repack(&checkpoint, Fp8Packer);
    let in_fp8 = perplexity(&mut quantized);
    let ratio = in_fp8 / in_bf16;
    println!("perplexity: bf16 {in_bf16:.4}, weights in fp8 {in_fp8:.4}, ratio {ratio:.5}");
    assert!((2.0..100.0).contains(&in_bf16), "perplexity in bf16: {in_bf16}");
    assert_ne!(in_fp8, in_bf16, "the weights were not quantized");
    // 1.0165 was measured with 16 windows. The quantizer of a GPU rounds to the same numbers.
    assert!(ratio <= 1.02, "bf16 {in_bf16}, fp8 {in_fp8}: {ratio}");
}
