//! Sequences that return pooled values: the values are those of transformers, do not depend on the
//! batch, and leave nothing in the prefix cache.

mod common;

use std::{collections::HashMap, path::PathBuf, time::Instant};

use common::{
    cpu::{CpuEngine, Outcome, engine, limits_of, run, tiny_model},
    sequence, unbounded_waits,
};
use engine::event::{NewSequence, SequenceId, SequenceKind};
use kernels::{
    RowSource,
    sampling::{Pooling, Sampling},
};
use model::{Checkpoint, LoadFormat, Weight};
use serde::Deserialize;

const BLOCKS: u32 = 60;

fn pooled(id: u128, tokens: Vec<u32>, pooling: Pooling) -> NewSequence {
    NewSequence {
        max_tokens: 1,
        sampling: Sampling { pooling: Some(pooling), ..Sampling::greedy() },
        ..sequence(id, SequenceKind::Compute, tokens, Instant::now())
    }
}

fn started(model: &Checkpoint, slots: u32, step_tokens: u32) -> CpuEngine {
    engine(model, unbounded_waits(limits_of(model, slots, step_tokens, BLOCKS, 1)), 1).0
}

fn values(outcomes: &HashMap<SequenceId, Outcome>, id: u128) -> Vec<f32> {
    let outcome = &outcomes[&SequenceId(id)];
    assert_eq!((&outcome.failure, outcome.tokens.len()), (&None, 1));
    outcome.tokens[0].pooled.as_ref().expect("the sequence pools").to_vec()
}

/// Logits that transformers computed for the models in this crate's neighbour.
#[derive(Deserialize)]
struct Logits {
    tokens: Vec<u32>,
    positions: Vec<usize>,
    logits: HashMap<String, Vec<Vec<f32>>>,
}

#[test]
fn pooled_values_are_those_of_transformers() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let folder = folder.join("../model/tests/fixtures/architectures");
    let text = std::fs::read(folder.join("logits.json")).unwrap();
    let golden: Logits = serde_json::from_slice(&text).unwrap();
    for name in ["qwen3", "mistral"] {
        let model = Checkpoint::open(folder.join(name), LoadFormat::Auto).unwrap();
        let mut engine = started(&model, 4, 64);
        let (vocabulary, hidden_size) = (model.config().vocab_size, model.config().hidden_size);
        let mut head = vec![0.0; vocabulary * hidden_size];
        for (token, row) in head.chunks_exact_mut(hidden_size).enumerate() {
            model.matrix(Weight::Output).unwrap().read_row(token, row);
        }
        for (number, (&position, expected)) in
            golden.positions.iter().zip(&golden.logits[name]).enumerate()
        {
            let tokens = golden.tokens[..=position].to_vec();
            let all = (0..vocabulary as u32).rev().collect();
            let id = 2 * number as u128;
            let outcomes = run(
                &mut engine,
                vec![
                    pooled(id, tokens.clone(), Pooling::Hidden),
                    pooled(id + 1, tokens, Pooling::Logits(all)),
                ],
            );
            let (hidden, mut logits) = (values(&outcomes, id), values(&outcomes, id + 1));
            logits.reverse();
            assert_eq!(hidden.len(), hidden_size);
            for (token, expected) in expected.iter().enumerate() {
                let row = &head[token * hidden_size..][..hidden_size];
                let product: f32 = row.iter().zip(&hidden).map(|(a, b)| a * b).sum();
                for found in [logits[token], product] {
                    let error = (found - expected).abs();
                    assert!(error < 1e-4, "{name}, {position}, {token}: {found}, not {expected}");
                }
            }
        }
    }
}

#[test]
fn pooled_values_do_not_depend_on_the_batch() {
    let model = tiny_model();
    let tokens = |family: u32, len: u32| (0..len).map(|i| (family * 31 + i * 7) % 96).collect();
    let texts: Vec<Vec<u32>> = (0..12).map(|family| tokens(family, 1 + family * 5)).collect();
    let text = |id: usize| pooled(id as u128, texts[id].clone(), Pooling::Hidden);
    let mut alone = started(&model, 1, 64);
    let alone: Vec<_> =
        (0..texts.len()).map(|id| values(&run(&mut alone, vec![text(id)]), id as u128)).collect();
    assert_ne!(alone[3], alone[4]);
    // Chunks of all sizes, and sequences that decode in the same steps.
    for step_tokens in [16, 33, 512] {
        let mut engine = started(&model, 8, step_tokens);
        let answer = |id: u128| NewSequence {
            max_tokens: 20,
            ..sequence(id, SequenceKind::Compute, tokens(id as u32, 9), Instant::now())
        };
        let mut all: Vec<_> = (0..texts.len()).map(text).collect();
        all.splice(4..4, [answer(100), answer(101)]);
        let outcomes = run(&mut engine, all);
        for (id, alone) in alone.iter().enumerate() {
            assert_eq!(values(&outcomes, id as u128), *alone, "steps of {step_tokens}");
        }
        assert!(outcomes[&SequenceId(100)].tokens.iter().all(|token| token.pooled.is_none()));
    }
}

#[test]
fn pooled_sequences_leave_nothing_in_the_prefix_cache() {
    let model = tiny_model();
    let mut engine = started(&model, 4, 64);
    let texts = (0..6).map(|id| pooled(id, vec![5 + id as u32; 100], Pooling::Hidden));
    run(&mut engine, texts.collect());
    let load = engine.scheduler().load();
    assert_eq!((load.blocks_free, load.blocks_cached), (BLOCKS, 0));
    // The KV of an ordinary prompt stays.
    run(&mut engine, vec![sequence(9, SequenceKind::Compute, vec![5; 100], Instant::now())]);
    assert!(engine.scheduler().load().blocks_cached > 0);
}
