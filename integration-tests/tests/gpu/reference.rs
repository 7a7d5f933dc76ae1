//! Compares random Llama, Qwen2 and Qwen3 models with transformers on the same GPU: the logits of
//! every step after three prompts, with the tokens that transformers sampled.
//!
//! `transformers_reference.py` writes the folder that `BATON_TEST_REFERENCE` names.

use std::path::{Path, PathBuf};

use kernels::{
    BlockId, WeightFormat,
    cuda::{
        Admission, AttentionKind, BatchLimits, CudaOptions, DeviceBatch, DeviceClock, StepInput,
        StepRows,
    },
    sampling::Sampling,
};
use model::{Checkpoint, Limits, LoadFormat, Transformer};
use safetensors::SafeTensors;

use test_harness::skip;

use super::bench::{Bench, Gpu, assert_near, gpu};

const PROMPTS: usize = 3;
const STEPS: usize = 32;
const BLOCKS: u32 = 16;

/// Results of transformers for one prompt.
struct Reference {
    tokens: Vec<u32>,
    prompt_len: usize,
    f32: Vec<f32>,
    bf16: Vec<f32>,
}

fn references(folder: &Path) -> Vec<Reference> {
    let bytes = std::fs::read(folder.join("reference.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let four = |name: &str| -> Vec<[u8; 4]> {
        let data = file.tensor(name).unwrap().data();
        data.chunks_exact(4).map(|bytes| bytes.try_into().expect("chunks of 4")).collect()
    };
    let words = |name: &str| four(name).into_iter().map(u32::from_le_bytes).collect::<Vec<_>>();
    let numbers = |name: &str| four(name).into_iter().map(f32::from_le_bytes).collect::<Vec<_>>();
    let lengths = words("prompts");
    assert_eq!(lengths.len(), PROMPTS);
    (0..PROMPTS)
        .map(|index| Reference {
            tokens: words(&format!("tokens.{index}")),
            prompt_len: lengths[index] as usize,
            f32: numbers(&format!("f32.{index}")),
            bf16: numbers(&format!("bf16.{index}")),
        })
        .collect()
}

/// Returns the logits of every step of each prompt.
fn logits(
    gpu: &Gpu,
    checkpoint: &Checkpoint,
    options: CudaOptions,
    references: &[Reference],
) -> Vec<Vec<f32>> {
    let vocabulary = checkpoint.config().vocab_size;
    let rows: usize = references.iter().map(|reference| reference.prompt_len).sum();
    let limits = Limits { rows_max: rows, sampled_max: 4, adapter_slots: 0 };
    let (mut cuda, mut llama) = gpu.backend_with(options, |backend| {
        Transformer::load(checkpoint, backend, limits, &mut |_| ()).unwrap()
    });
    let layout = checkpoint.config().block_layout(options.kv);
    let (kv, _) = gpu.kv(layout, PROMPTS as u32 * BLOCKS);
    let limits = BatchLimits {
        hidden: 0,
        slots: 4,
        sequence_tokens: 256,
        rows: rows as u32,
        samples: 4,
        stops: 1,
        vocabulary: vocabulary as u32,
        depth: 1,
    };
    let groups = checkpoint.config().kv_groups(options.kv);
    let mut batch = DeviceBatch::new(&cuda, kv, groups, limits).unwrap();
    let mut clock = DeviceClock::start(cuda.context(), cuda.compute()).unwrap();
    let table = |index: u32| -> Vec<BlockId> {
        (0..BLOCKS).map(|i| BlockId(index * BLOCKS + (i * 5) % BLOCKS)).collect()
    };
    let (tables, sampling) = ([0, 1, 2].map(table), Sampling::greedy());
    let admissions = references.iter().zip(&tables).zip(0..).map(|((reference, blocks), slot)| {
        let (tokens, prompt_len) = (&reference.tokens[..], reference.prompt_len as u32);
        Admission {
            slot,
            tokens,
            prompt_len,
            position: 0,
            blocks,
            sampling: &sampling,
            adapter: None,
        }
    });
    let admissions: Vec<_> = admissions.collect();
    let mut all = vec![Vec::new(); PROMPTS];
    for step_id in 0..STEPS {
        let sequences: Vec<_> = references
            .iter()
            .zip(0..)
            .map(|(reference, slot)| {
                let prompt = reference.prompt_len as u32;
                let (position, rows) =
                    if step_id == 0 { (0, prompt) } else { (prompt + step_id as u32 - 1, 1) };
                StepRows { slot, position, rows, samples: 1 }
            })
            .collect();
        let input = StepInput {
            step_id: step_id as u64,
            admissions: if step_id == 0 { &admissions } else { &[] },
            extensions: &[],
            sequences: &sequences,
            rows_min: if step_id == 0 { 0 } else { 4 },
            drafts: None,
            known_drafts: &[],
            has_adapters: false,
        };
        let mut step = batch.begin(&cuda, &input).unwrap();
        llama.forward(&mut cuda, &mut step);
        let found = cuda.get(llama.logits(), PROMPTS);
        all.iter_mut().zip(found.chunks(vocabulary)).for_each(|(all, row)| all.extend(row));
        // The sampled token is ignored: transformers' token is the next input.
        batch.sample(&cuda, llama.logits(), &step).unwrap();
        let frame = batch.end(&cuda, step_id as u64, vec![false; PROMPTS]).unwrap();
        batch.recycle(frame.finish(&mut clock).unwrap().output);
    }
    all
}

/// Returns the root mean square of the differences.
fn error(found: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(found.len(), wanted.len());
    let squares = found.iter().zip(wanted).map(|(a, b)| (a - b) * (a - b));
    (squares.sum::<f32>() / found.len() as f32).sqrt()
}

pub(crate) fn random_models_match_logits_of_transformers() {
    let gpu = gpu();
    let Some(folder) = std::env::var_os("BATON_TEST_REFERENCE").map(PathBuf::from) else {
        skip(
            "BATON_TEST_REFERENCE does not name a folder: python3 has no torch with CUDA, or no transformers",
        );
    };
    let exact =
        CudaOptions { attention: AttentionKind::Plain, ..CudaOptions::new(WeightFormat::F32) };
    let best = CudaOptions::new(WeightFormat::Bf16);
    let flash = CudaOptions { attention: AttentionKind::Flash, ..best };
    for name in ["llama", "qwen2", "qwen3"] {
        let folder = folder.join(name);
        let references = references(&folder);
        let checkpoint = Checkpoint::open(&folder, LoadFormat::Auto).unwrap();
        for (found, reference) in
            logits(&gpu, &checkpoint, exact, &references).iter().zip(&references)
        {
            let what = format!("{name}, prompt of {}", reference.prompt_len);
            assert_eq!(found.len(), STEPS * checkpoint.config().vocab_size, "{what}");
            assert_near(found, &reference.f32, 1e-3, &what);
        }
        let sparing = CudaOptions { reserved_sms: 127, ..best };
        for options in [best, sparing, CudaOptions { fused: false, ..best }, flash] {
            let all = logits(&gpu, &checkpoint, options, &references);
            for (found, reference) in all.iter().zip(&references) {
                let what = format!("{name}, prompt of {}, {options:?}", reference.prompt_len);
                let size = error(&reference.f32, &vec![0.0; reference.f32.len()]);
                let ours = error(found, &reference.f32);
                let theirs = error(&reference.bf16, &reference.f32);
                eprintln!("{what}: error {ours:.4} of {size:.2}, of transformers {theirs:.4}");
                // Both implementations round to bf16, at different places.
                assert!(ours < 1.5 * theirs && theirs < 0.05 * size, "{what}");
            }
        }
    }
}
