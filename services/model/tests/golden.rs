//! The real model compared with transformers' outputs in `integration-tests/golden`.

mod common;

use std::{fs, path::Path};

use common::sequence::{Runner, argmax};
use kernels::{WeightFormat, cpu::Isa};
use model::{Checkpoint, LoadFormat};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    name: String,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    first_step_top5: Vec<Candidate>,
    top1_top2_margin_per_step: Vec<f32>,
}

#[derive(Deserialize)]
struct Candidate {
    id: u32,
    logit: f32,
}

impl Run {
    fn total_tokens(&self) -> usize {
        self.prompt_ids.len() + self.output_ids.len()
    }

    /// Returns the greatest difference between the five best logits of the first step and the
    /// golden ones.
    fn worst_top5(&self, logits: &[f32]) -> f32 {
        let off = |candidate: &Candidate| (candidate.logit - logits[candidate.id as usize]).abs();
        self.first_step_top5.iter().map(off).fold(0.0, f32::max)
    }
}

fn golden() -> Vec<Run> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../integration-tests/golden/smollm2_greedy.json");
    let golden: Golden = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    assert_eq!(golden.runs.len(), 4);
    assert!(golden.runs.iter().all(|run| run.output_ids.len() == 48));
    golden.runs
}

fn smollm2() -> Checkpoint {
    Checkpoint::open(common::smollm2_path(), LoadFormat::Auto).unwrap()
}

/// Checks the greedy tokens of every prompt in f32 with chunked prefill.
fn check_greedy(chunk: usize, rows_max: usize) {
    let mut runner = Runner::new(&smollm2(), WeightFormat::F32, Isa::Auto, rows_max);
    for run in golden() {
        let mut sequence = runner.sequence(run.total_tokens());
        let mut logits = runner.prefill(&mut sequence, &run.prompt_ids, chunk);
        let worst = run.worst_top5(&logits);
        assert!(worst < 1e-3, "{}: first step's top 5 are off by {worst}", run.name);
        let mut output = vec![argmax(&logits)];
        while output.len() < run.output_ids.len() {
            logits = runner.decode(&mut sequence, output[output.len() - 1]);
            output.push(argmax(&logits));
        }
        assert_eq!(output, run.output_ids, "{}", run.name);
        println!("{}: 48 tokens equal, first step's top 5 off by {worst:.1e}", run.name);
    }
}

#[test]
fn f32_greedy_tokens_of_whole_prompts_are_the_golden_ones() {
    check_greedy(usize::MAX, 640);
}

#[test]
fn f32_greedy_tokens_of_chunks_of_16_are_the_golden_ones() {
    check_greedy(16, 16);
}

#[test]
fn bf16_gives_the_golden_ids_where_the_margin_suffices() {
    check_forced(WeightFormat::Bf16, 0.15, 0.15);
}

#[test]
fn q8_gives_the_golden_ids_where_the_margin_suffices() {
    check_forced(WeightFormat::Q8, 0.3, 0.6);
}

/// Checks with teacher forcing: every step sees the golden tokens before it. Where the golden
/// margin is at least `sure_margin`, the best token must be the golden one.
fn check_forced(weights: WeightFormat, sure_margin: f32, top5_tolerance: f32) {
    let mut runner = Runner::new(&smollm2(), weights, Isa::Auto, 640);
    let (mut failures, mut steps, mut equal) = (Vec::new(), 0, 0);
    for run in golden() {
        let mut sequence = runner.sequence(run.total_tokens());
        let mut logits = runner.prefill(&mut sequence, &run.prompt_ids, usize::MAX);
        let worst = run.worst_top5(&logits);
        println!("{}: first step's top 5 off by {worst:.3}", run.name);
        if worst > top5_tolerance {
            failures.push(format!("{}: first step's top 5 off by {worst}", run.name));
        }
        for (step, (&id, &margin)) in
            run.output_ids.iter().zip(&run.top1_top2_margin_per_step).enumerate()
        {
            let found = argmax(&logits);
            steps += 1;
            equal += usize::from(found == id);
            if found != id {
                let mismatch = format!(
                    "{} step {step}: {found} instead of {id}, golden margin {margin}",
                    run.name
                );
                println!("{mismatch}");
                if margin >= sure_margin {
                    failures.push(mismatch);
                }
            }
            logits = runner.decode(&mut sequence, id);
        }
    }
    println!("{weights}: {equal} of {steps} best tokens are the golden ones");
    assert!(failures.is_empty(), "{failures:#?}");
}
