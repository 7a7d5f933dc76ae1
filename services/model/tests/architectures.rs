//! Every architecture, from a folder and from a GGUF file, compared with outputs of transformers
//! for the same weights (`fixtures/architectures.py`).

mod common;

use std::{collections::BTreeMap, num::NonZeroUsize, path::PathBuf};

use common::{
    ranks::{group, together, whole_rows},
    sequence::{Runner, argmax},
};
use kernels::{Dtype, WeightFormat, cpu::Isa};
use model::{Checkpoint, Family, LoadFormat, ModelConfig};
use serde::Deserialize;

#[derive(Deserialize)]
struct Expected {
    tokens: Vec<u32>,
    positions: Vec<usize>,
    /// Logits by model, one row per position.
    logits: BTreeMap<String, Vec<Vec<f32>>>,
    /// Greedy tokens after `tokens`, by model.
    greedy: BTreeMap<String, Vec<u32>>,
}

fn expected() -> Expected {
    let path = common::fixture("architectures/logits.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Returns the folder of a model, and its GGUF file if there is one.
fn files(name: &str) -> Vec<PathBuf> {
    let folder = common::fixture("architectures").join(name);
    let gguf = folder.join("model.gguf");
    let has_gguf = gguf.is_file();
    std::iter::once(folder).chain(has_gguf.then_some(gguf)).collect()
}

fn open(path: &PathBuf) -> Checkpoint {
    Checkpoint::open(path, LoadFormat::Auto).unwrap()
}

/// Compares logits of every position, given those of `tokens` and of the greedy tokens after them,
/// with the expected ones. `what` names the model and how it ran.
fn check(expected: &Expected, name: &str, logits: &[Vec<f32>], what: &str) {
    for (&position, expected) in expected.positions.iter().zip(&expected.logits[name]) {
        let found = &logits[position];
        assert_eq!(found.len(), expected.len());
        let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
        let worst = differences.fold(0.0, f32::max);
        assert!(worst < 1e-4, "{what}: position {position} is off by {worst}");
    }
    let greedy = &expected.greedy[name];
    let found: Vec<u32> = logits[expected.tokens.len() - 1..].iter().map(|it| argmax(it)).collect();
    assert_eq!(found[..greedy.len()], *greedy, "{what}: greedy tokens");
}

/// Returns the tokens and the greedy tokens after them.
fn continued(expected: &Expected, name: &str) -> Vec<u32> {
    [expected.tokens.as_slice(), &expected.greedy[name]].concat()
}

#[test]
fn f32_logits_and_greedy_tokens_equal_those_of_transformers() {
    let expected = expected();
    let mut checked = Vec::new();
    for name in expected.logits.keys() {
        let tokens = continued(&expected, name);
        for path in files(name) {
            for isa in [Isa::Auto, Isa::Portable] {
                let mut runner = Runner::new(&open(&path), Dtype::F32, isa, 64);
                let mut sequence = runner.sequence(tokens.len());
                let count = tokens.len() as u32;
                let logits = runner.forward(&mut [(&mut sequence, &tokens, count)]);
                check(&expected, name, &logits, &format!("{}, {isa}", path.display()));
            }
            checked.push(path.strip_prefix(common::fixture("architectures")).unwrap().to_owned());
        }
    }
    let names: Vec<_> = checked.iter().map(|path| path.to_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "ernie4_5_moe",
            "ernie4_5_moe_fp8",
            "gemma3",
            "gemma3_multimodal",
            "glm4_moe",
            "glm4_moe_channel_fp8",
            "glm4_moe_fp8",
            "gpt_oss",
            "llama3",
            "llama3/model.gguf",
            "llama3_fp8",
            "minimax_m2",
            "minimax_m2_fp8",
            "mistral",
            "mistral/model.gguf",
            "mixtral",
            "mixtral/model.gguf",
            "olmoe",
            "qwen2",
            "qwen2/model.gguf",
            "qwen2_moe",
            "qwen2_moe/model.gguf",
            "qwen2_moe_dense",
            "qwen2_moe_fp8",
            "qwen2_window",
            "qwen3",
            "qwen3/model.gguf",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_moe",
            "qwen3_moe/model.gguf",
            "qwen3_moe_fp8",
            "qwen3_next",
            "qwen3_next_fp8",
        ]
    );
}

#[test]
fn two_ranks_have_the_logits_and_greedy_tokens_of_transformers() {
    let expected = expected();
    for name in expected.logits.keys() {
        let tokens = continued(&expected, name);
        for path in files(name) {
            let forward = |runner: &mut Runner| {
                let mut sequence = runner.sequence(tokens.len());
                runner.forward(&mut [(&mut sequence, &tokens, tokens.len() as u32)])
            };
            let checkpoint = open(&path);
            for has_whole_experts in [false, true] {
                if has_whole_experts && checkpoint.config().experts().is_none() {
                    continue;
                }
                let first = group(2).with_whole_experts(has_whole_experts);
                let (ranks, _) =
                    together(&checkpoint, WeightFormat::F32, first, "architectures", forward);
                let what =
                    format!("{}, 2 ranks, whole experts: {has_whole_experts}", path.display());
                check(&expected, name, &whole_rows(&ranks), &what);
            }
        }
    }
}

#[test]
fn chunks_and_single_tokens_change_no_bit_of_any_architecture() {
    let Expected { tokens, logits, .. } = expected();
    for name in logits.keys() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mut runner = Runner::new(&open(&files(name)[0]), dtype, Isa::Auto, 64);
            let mut sequence = runner.sequence(tokens.len());
            let count = tokens.len() as u32;
            let whole = runner.forward(&mut [(&mut sequence, &tokens, count)]);
            for chunk in [1, 3, 16, 40] {
                let mut sequence = runner.sequence(tokens.len());
                let logits = runner.prefill(&mut sequence, &tokens, chunk);
                assert_eq!(logits, whole[tokens.len() - 1], "{name}, {dtype}, chunks of {chunk}");
            }
        }
    }
}

#[test]
fn configurations_name_family_window_and_width() {
    let config = |name: &str| open(&files(name)[0]).config().clone();
    let windows = |config: &ModelConfig| -> Vec<usize> {
        config.layers.iter().map(|layer| layer.window().map_or(0, NonZeroUsize::get)).collect()
    };
    for (name, family, windows_of_layers) in [
        ("llama3", "llama", [0, 0]),
        ("mistral", "mistral", [7, 7]),
        ("qwen2_window", "qwen2", [0, 7]),
        ("qwen2", "qwen2", [0, 0]),
        ("qwen3", "qwen3", [0, 0]),
        ("mixtral", "mixtral", [0, 0]),
        ("glm4_moe", "glm4_moe", [0, 0]),
        ("gpt_oss", "gpt_oss", [7, 0]),
        ("gemma3", "gemma3_text", [7, 0]),
    ] {
        let config = config(name);
        assert_eq!(Some(config.family), Family::named(family));
        assert_eq!(windows(&config), windows_of_layers, "{name}");
        assert_eq!(config.window(1).map_or(0, NonZeroUsize::get), windows_of_layers[1]);
    }
    assert!(config("llama3").tied_output);
    assert_eq!(config("qwen3").head_dim, 16);
    assert_eq!((config("glm4_moe").head_dim, config("glm4_moe").rotary_dim), (16, 8));

    // Converters write Mistral's and Mixtral's models as Llama's; everything else is equal in both
    // formats.
    for name in ["llama3", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"] {
        let (folder, gguf) = (config(name), open(&files(name)[1]).config().clone());
        let is_llama = ["mistral", "mixtral"].contains(&name);
        assert_eq!(gguf.family.name(), if is_llama { "llama" } else { folder.family.name() });
        assert_eq!(gguf.experts(), folder.experts());
        assert_eq!(gguf.head_dim, folder.head_dim);
        assert_eq!(windows(&gguf), windows(&folder));
        assert_eq!(gguf.tied_output, folder.tied_output);
        assert_eq!(gguf.parameter_count(), folder.parameter_count());
    }
}

#[test]
fn dummy_weights_of_every_architecture_run() {
    let Expected { tokens, logits, .. } = expected();
    for name in logits.keys() {
        let config = common::fixture("architectures").join(name).join("config.json");
        let checkpoint = Checkpoint::open(config, LoadFormat::Dummy { seed: 3 }).unwrap();
        let mut runner = Runner::new(&checkpoint, Dtype::F32, Isa::Auto, 64);
        let mut sequence = runner.sequence(tokens.len());
        let logits = runner.prefill(&mut sequence, &tokens, 64);
        let square = logits.iter().map(|logit| logit * logit).sum::<f32>() / logits.len() as f32;
        assert!((0.1..10.0).contains(&square), "{name}: mean square {square}");
    }
}
