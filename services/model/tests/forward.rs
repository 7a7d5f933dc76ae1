//! Forward pass of a tiny model compared with an independent computation in f64, and one model
//! compared across all formats.

mod common;

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use common::{
    Element,
    sequence::{Runner, Sequence},
};
use kernels::{WeightFormat, cpu::Isa};
use model::{Checkpoint, Limits, LoadFormat, LoadProgress, ModelError, Transformer};

/// Returns the reference's tokens, and (position, logits) of some of them.
fn reference() -> (Vec<u32>, Vec<(usize, Vec<f32>)>) {
    let reference = common::reference();
    let case = &reference["tiny_llama3"];
    assert_eq!(case["seed"].as_u64(), Some(common::SEED));
    let tokens = serde_json::from_value(case["tokens"].clone()).unwrap();
    let logits = case["logits"].as_array().unwrap().iter().map(|row| {
        let position = row["position"].as_u64().unwrap() as usize;
        (position, serde_json::from_value(row["values"].clone()).unwrap())
    });
    (tokens, logits.collect())
}

fn worst_difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Returns the logits of every token in f32, with prefill in one chunk.
fn all_logits(
    checkpoint: &Checkpoint,
    weights: WeightFormat,
    isa: Isa,
    tokens: &[u32],
) -> Vec<Vec<f32>> {
    let mut runner = Runner::new(checkpoint, weights, isa, 64);
    let mut sequence = runner.sequence(tokens.len());
    runner.forward(&mut [(&mut sequence, tokens, tokens.len() as u32)])
}

#[test]
fn f32_logits_equal_the_reference() {
    let (tokens, expected) = reference();
    for isa in [Isa::Auto, Isa::Portable] {
        let logits = all_logits(&common::tiny_llama3(), WeightFormat::F32, isa, &tokens);
        for (position, expected) in &expected {
            let worst = worst_difference(&logits[*position], expected);
            assert!(worst < 1e-5, "{isa}: position {position} is off by {worst}");
        }
    }
}

#[test]
fn bf16_logits_are_near_the_reference() {
    let (tokens, expected) = reference();
    for isa in [Isa::Auto, Isa::Portable] {
        let logits = all_logits(&common::tiny_llama3(), WeightFormat::Bf16, isa, &tokens);
        for (position, expected) in &expected {
            // Logits are about 1; each dot product over 32 rounded inputs adds an error of
            // about 2^-9.
            let worst = worst_difference(&logits[*position], expected);
            assert!(worst < 0.1, "{isa}: position {position} is off by {worst}");
            let squares = logits[*position].iter().zip(expected).map(|(a, b)| (a - b).powi(2));
            let rms = (squares.sum::<f32>() / expected.len() as f32).sqrt();
            assert!(rms < 0.025, "{isa}: position {position} is off by {rms} (RMS)");
        }
    }
}

#[test]
fn chunks_and_batches_change_no_bit_in_f32() {
    let (tokens, _) = reference();
    let checkpoint = common::tiny_llama3();
    let whole = all_logits(&checkpoint, WeightFormat::F32, Isa::Auto, &tokens);
    let mut runner = Runner::new(&checkpoint, WeightFormat::F32, Isa::Auto, 64);
    for chunk in [1, 5, 16, 36] {
        let mut sequence = runner.sequence(tokens.len());
        let logits = runner.prefill(&mut sequence, &tokens, chunk);
        assert_eq!(logits, whole[tokens.len() - 1], "chunks of {chunk}");
    }

    // Three sequences in one step at different positions, one of them without sampling.
    let mut sequences: Vec<Sequence> = (0..3).map(|_| runner.sequence(tokens.len())).collect();
    let [a, b, c] = &mut sequences[..] else { unreachable!() };
    runner.forward(&mut [(a, &tokens[..20], 0), (b, &tokens[..3], 1)]);
    let logits =
        runner.forward(&mut [(c, &tokens[..9], 2), (b, &tokens[3..7], 0), (a, &tokens[20..21], 1)]);
    assert_eq!(logits, [whole[7].clone(), whole[8].clone(), whole[20].clone()]);
}

#[test]
fn every_format_of_one_model_gives_the_same_logits() {
    let (tokens, _) = reference();
    let dummy = common::tiny_llama3();
    let folder = tempfile::tempdir().unwrap();
    let logits =
        |checkpoint: &Checkpoint| all_logits(checkpoint, WeightFormat::F32, Isa::Auto, &tokens);
    let from_dummy = logits(&dummy);
    let mut rounded = Vec::new();
    for (element, shards) in
        [(Element::F32, 1), (Element::F32, 4), (Element::Bf16, 2), (Element::F16, 1)]
    {
        let folder = folder.path().join(format!("{element:?}-{shards}"));
        fs::create_dir(&folder).unwrap();
        let tensors = common::hugging_face_tensors(&dummy, element);
        common::write_folder(&folder, &tensors, shards);
        let checkpoint = Checkpoint::open(&folder, LoadFormat::Auto).unwrap();
        let from_folder = logits(&checkpoint);
        match element {
            Element::F32 => assert_eq!(from_folder, from_dummy, "{shards} shards"),
            _ => rounded.push((element, checkpoint, from_folder)),
        }
    }

    // The GGUF file made of a rounded folder gives that folder's logits: the row order is restored,
    // and the norms, here in f32, hold the rounded values.
    for (element, checkpoint, from_folder) in rounded {
        let path = folder.path().join(format!("{element:?}.gguf"));
        let tensors = common::gguf_tensors(&checkpoint, element);
        fs::write(&path, common::gguf(checkpoint.config(), &tensors)).unwrap();
        let from_gguf = logits(&Checkpoint::open(&path, LoadFormat::Auto).unwrap());
        for (found, expected) in from_gguf.iter().zip(&from_folder) {
            // Rope divisors are rounded once more than the formula's frequencies.
            let worst = worst_difference(found, expected);
            assert!(worst < 1e-5, "{element:?}: off by {worst}");
        }
    }
}

/// Loads the model on a CPU.
fn load(checkpoint: &Checkpoint, progress: &mut dyn FnMut(LoadProgress)) -> Result<(), ModelError> {
    let backend = kernels::cpu::CpuBackend::new(kernels::cpu::CpuOptions {
        weights: WeightFormat::F32,
        threads: 1,
        isa: Isa::Auto,
    })
    .unwrap();
    let limits = Limits { rows_max: 1, sampled_max: 1, adapter_slots: 0 };
    Transformer::load(checkpoint, &backend, limits, progress).map(drop)
}

#[test]
fn cancelled_packing_stops_before_the_next_matrix() {
    let is_cancelled = Arc::new(AtomicBool::new(false));
    let seen = is_cancelled.clone();
    let checkpoint = common::tiny_llama3().cancelled_by(move || seen.load(Ordering::Relaxed));
    let mut packed = 0;
    let loaded = load(&checkpoint, &mut |_| {
        packed += 1;
        is_cancelled.store(true, Ordering::Relaxed);
    });
    assert!(matches!(loaded, Err(ModelError::Cancelled)));
    assert_eq!(packed, 2, "the embedding, and the norm before the next matrix");
}

#[test]
fn progress_counts_every_parameter_once() {
    let checkpoint = common::tiny_llama3();
    let mut seen: Vec<LoadProgress> = Vec::new();
    load(&checkpoint, &mut |progress| seen.push(progress)).unwrap();
    let total = checkpoint.config().parameter_count();
    assert!(seen.iter().all(|progress| progress.parameters_total == total));
    assert!(seen.is_sorted_by(|a, b| a.parameters_done < b.parameters_done));
    assert_eq!(seen.last().unwrap().parameters_done, total);
}
