//! LoRA adapters: forward passes compared with weights into which the adapter is merged, several
//! adapters in one step, ranks, and invalid folders.

mod common;

use std::{collections::BTreeMap, fs, path::Path};

use common::{
    Element, Tensor, elements, hugging_face_tensors,
    ranks::{group, together, whole_rows},
    safetensors,
    sequence::{Runner, argmax},
};
use kernels::{Dtype, Shard, WeightFormat, cpu::Isa};
use model::{Adapter, Checkpoint, LayerWeight, LoadFormat, ModelError, Weight, WeightShape};
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

const RANK: usize = 3;
const RANK_MAX: usize = 8;
const TOKENS: [u32; 21] =
    [5, 9, 2, 77, 31, 8, 64, 100, 3, 3, 17, 42, 90, 11, 60, 7, 25, 33, 81, 56, 12];
const TARGETS: [LayerWeight; 7] = [
    LayerWeight::Query,
    LayerWeight::Key,
    LayerWeight::Value,
    LayerWeight::AttentionOutput,
    LayerWeight::Gate,
    LayerWeight::Up,
    LayerWeight::Down,
];

fn base(name: &str) -> Checkpoint {
    let folder = common::fixture("architectures").join(name);
    Checkpoint::open(folder, LoadFormat::Auto).unwrap()
}

/// Returns reproducible numbers between -0.25 and 0.25.
fn numbers(seed: usize, count: usize) -> Vec<f32> {
    let number = |i: usize| (((i * 7919 + seed * 104_729 + 13) * 2_654_435_761) >> 7) % 1000;
    (0..count).map(|i| number(i) as f32 / 2000.0 - 0.25).collect()
}

fn shape(weight: Weight, checkpoint: &Checkpoint) -> (usize, usize) {
    match weight.shape(checkpoint.config()) {
        WeightShape::Matrix { rows, cols } => (rows, cols),
        WeightShape::Vector { .. } => panic!("an adapter changes matrices"),
    }
}

/// Returns A and B of some weights of every layer.
fn updates(checkpoint: &Checkpoint, targets: &[LayerWeight], seed: usize) -> Vec<Update> {
    let mut updates = Vec::new();
    for layer in 0..checkpoint.config().layer_count {
        for (index, &target) in targets.iter().enumerate() {
            let weight = Weight::Layer(layer, target);
            let (rows, cols) = shape(weight, checkpoint);
            let seed = seed + 100 * layer + 10 * index;
            let (a, b) = (numbers(seed, RANK * cols), numbers(seed + 1, rows * RANK));
            updates.push(Update { weight, a, b });
        }
    }
    updates
}

struct Update {
    weight: Weight,
    a: Vec<f32>,
    b: Vec<f32>,
}

fn config() -> Value {
    json!({"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", "use_rslora": false,
           "target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "modules_to_save": null,
           "rank_pattern": {}, "use_dora": false, "init_lora_weights": true})
}

fn tensors(checkpoint: &Checkpoint, updates: &[Update], element: Element) -> Vec<Tensor> {
    let tensors = updates.iter().flat_map(|Update { weight, a, b }| {
        let (rows, cols) = shape(*weight, checkpoint);
        let name = weight.hugging_face_name(checkpoint.config());
        let module = name.strip_suffix(".weight").unwrap().to_owned();
        let tensor = move |part: &str, values: &[f32], dims: [usize; 2]| Tensor {
            name: format!("base_model.model.{module}.{part}.weight"),
            dims: dims.map(|dim| dim as u64).to_vec(),
            element,
            bytes: element.encode(values),
        };
        [tensor("lora_A", a, [RANK, cols]), tensor("lora_B", b, [rows, RANK])]
    });
    tensors.collect()
}

fn write(folder: &Path, config: &Value, tensors: &[Tensor]) {
    fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    fs::write(folder.join("adapter_model.safetensors"), safetensors(tensors)).unwrap();
}

/// Writes an adapter and opens it.
fn adapter(checkpoint: &Checkpoint, updates: &[Update], config: &Value, shard: Shard) -> Adapter {
    let folder = TempDir::new().unwrap();
    write(folder.path(), config, &tensors(checkpoint, updates, Element::F32));
    Adapter::open(folder.path(), checkpoint.config(), shard, RANK_MAX).unwrap()
}

/// Returns the checkpoint with `scale · B · A` added to its weights.
fn merged(name: &str, updates: &[Update], scale: f64) -> (TempDir, Checkpoint) {
    let checkpoint = base(name);
    let folder = TempDir::new().unwrap();
    let mut tensors = hugging_face_tensors(&checkpoint, Element::F32);
    for Update { weight, a, b } in updates {
        let (rows, cols) = shape(*weight, &checkpoint);
        let mut values = elements(&checkpoint, *weight);
        for row in 0..rows {
            for col in 0..cols {
                let products =
                    (0..RANK).map(|r| f64::from(b[row * RANK + r]) * f64::from(a[r * cols + col]));
                values[row * cols + col] += (scale * products.sum::<f64>()) as f32;
            }
        }
        let name = weight.hugging_face_name(checkpoint.config());
        let tensor = tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
        tensor.bytes = Element::F32.encode(&values);
    }
    let config = common::fixture("architectures").join(name).join("config.json");
    fs::copy(config, folder.path().join("config.json")).unwrap();
    fs::write(folder.path().join("model.safetensors"), safetensors(&tensors)).unwrap();
    let checkpoint = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap();
    (folder, checkpoint)
}

/// Returns the logits of every position.
fn logits(runner: &mut Runner, adapter: Option<u32>) -> Vec<Vec<f32>> {
    let mut sequence = runner.sequence(TOKENS.len());
    sequence.adapter = adapter;
    runner.forward(&mut [(&mut sequence, &TOKENS, TOKENS.len() as u32)])
}

fn worst(found: &[Vec<f32>], wanted: &[Vec<f32>]) -> f32 {
    let pairs = found.iter().flatten().zip(wanted.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn adapter_gives_the_logits_of_merged_weights() {
    for name in ["llama3", "qwen2", "qwen3", "mistral"] {
        for (targets, is_stabilized) in [(&TARGETS[..], false), (&TARGETS[1..3], true)] {
            let checkpoint = base(name);
            let updates = updates(&checkpoint, targets, 1);
            let mut config = config();
            config["use_rslora"] = json!(is_stabilized);
            let scale = if is_stabilized { 6.0 / (RANK as f64).sqrt() } else { 2.0 };
            let (_folder, merged) = merged(name, &updates, scale);
            let wanted = logits(&mut Runner::new(&merged, Dtype::F32, Isa::Auto, 64), None);

            let mut runner = Runner::new(&checkpoint, Dtype::F32, Isa::Auto, 64);
            runner.set_adapter(1, Some(adapter(&checkpoint, &updates, &config, Shard::WHOLE)));
            let found = logits(&mut runner, Some(1));
            let difference = worst(&found, &wanted);
            assert!(difference < 2e-4, "{name} is off by {difference}");
            let tokens = |logits: &[Vec<f32>]| -> Vec<u32> {
                logits.iter().map(|row| argmax(row)).collect()
            };
            assert_eq!(tokens(&found), tokens(&wanted), "{name}");
            assert!(worst(&logits(&mut runner, None), &wanted) > 0.05, "{name} has no effect");
            runner.set_adapter(1, None);
            assert_eq!(logits(&mut runner, Some(1)), logits(&mut runner, None));
        }
    }
}

#[derive(Deserialize)]
struct Expected {
    tokens: Vec<u32>,
    adapters: BTreeMap<String, ExpectedLogits>,
}

/// Logits of every eighth position of `base` with an adapter.
#[derive(Deserialize)]
struct ExpectedLogits {
    base: String,
    logits: Vec<Vec<f32>>,
}

#[test]
fn logits_of_adapters_that_peft_saved_equal_those_of_peft() {
    let folder = common::fixture("adapters");
    let expected: Expected =
        serde_json::from_slice(&fs::read(folder.join("logits.json")).unwrap()).unwrap();
    assert_eq!(expected.adapters.len(), 3);
    for (name, ExpectedLogits { base: model, logits: wanted }) in &expected.adapters {
        let checkpoint = base(model);
        let mut runner = Runner::new(&checkpoint, Dtype::F32, Isa::Auto, 64);
        let config = checkpoint.config();
        let adapter = Adapter::open(&folder.join(name), config, Shard::WHOLE, RANK_MAX).unwrap();
        runner.set_adapter(1, Some(adapter));
        let len = expected.tokens.len();
        let mut sequence = runner.sequence(len);
        sequence.adapter = Some(1);
        let found = runner.forward(&mut [(&mut sequence, &expected.tokens, len as u32)]);
        let found: Vec<Vec<f32>> = found.into_iter().step_by(8).collect();
        assert_eq!(found.len(), wanted.len());
        let difference = worst(&found, wanted);
        assert!(difference < 1e-4, "{name} is off by {difference}");
    }
}

#[test]
fn two_adapters_and_the_base_in_one_step_equal_each_alone() {
    let checkpoint = base("llama3");
    let mut runner = Runner::new(&checkpoint, Dtype::F32, Isa::Auto, 64);
    for (slot, targets) in [&TARGETS[..], &TARGETS[3..5]].into_iter().enumerate() {
        let updates = updates(&checkpoint, targets, 5 * slot);
        runner.set_adapter(slot, Some(adapter(&checkpoint, &updates, &config(), Shard::WHOLE)));
    }
    let all = [Some(1), None, Some(0)];
    let alone = all.map(|adapter| logits(&mut runner, adapter));
    assert!(alone[0] != alone[1] && alone[1] != alone[2] && alone[0] != alone[2]);

    // Chunks of several sizes, and the last row of each chunk alone samples.
    let mut sequences = all.map(|adapter| {
        let mut sequence = runner.sequence(TOKENS.len());
        sequence.adapter = adapter;
        sequence
    });
    let [a, b, c] = &mut sequences;
    let mut begin = 0;
    for len in [7, 1, 12, 1] {
        let chunk = &TOKENS[begin..begin + len];
        let together =
            runner.forward(&mut [(&mut *a, chunk, 1), (&mut *b, chunk, 1), (&mut *c, chunk, 1)]);
        begin += len;
        for (together, alone) in together.iter().zip(&alone) {
            assert_eq!(together, &alone[begin - 1]);
        }
    }
}

#[test]
fn two_ranks_have_the_logits_of_one() {
    let checkpoint = base("qwen2");
    let updates = updates(&checkpoint, &TARGETS, 3);
    let mut runner = Runner::new(&checkpoint, Dtype::F32, Isa::Auto, 64);
    runner.set_adapter(0, Some(adapter(&checkpoint, &updates, &config(), Shard::WHOLE)));
    let wanted = logits(&mut runner, Some(0));
    let forward = |runner: &mut Runner| {
        let adapter = adapter(&checkpoint, &updates, &config(), runner.shard());
        runner.set_adapter(0, Some(adapter));
        logits(runner, Some(0))
    };
    let (ranks, _) = together(&checkpoint, WeightFormat::F32, group(2), "adapters", forward);
    let difference = worst(&whole_rows(&ranks), &wanted);
    assert!(difference < 1e-4, "{difference}");
}

#[test]
fn content_hash_covers_weights_and_scale() {
    let checkpoint = base("llama3");
    let updates_of = |seed| updates(&checkpoint, &TARGETS[..2], seed);
    let hash = |seed, config: &Value| {
        adapter(&checkpoint, &updates_of(seed), config, Shard::WHOLE).content_hash()
    };
    let mut renamed = config();
    renamed["base_model_name_or_path"] = json!("elsewhere");
    let mut scaled = config();
    scaled["lora_alpha"] = json!(7);
    assert_eq!(hash(1, &config()), hash(1, &renamed));
    assert_ne!(hash(1, &config()), hash(2, &config()));
    assert_ne!(hash(1, &config()), hash(1, &scaled));
}

#[test]
fn invalid_adapter_is_rejected_with_file_and_field() {
    let checkpoint = base("llama3");
    let updates = updates(&checkpoint, &TARGETS[..1], 1);
    let good = tensors(&checkpoint, &updates, Element::Bf16);
    let open = |config: &Value, tensors: &[Tensor]| -> Result<Adapter, ModelError> {
        let folder = TempDir::new().unwrap();
        write(folder.path(), config, tensors);
        Adapter::open(folder.path(), checkpoint.config(), Shard::WHOLE, RANK_MAX)
    };
    open(&config(), &good).unwrap();
    for (key, value, wanted) in [
        ("r", json!(9), "r is 9; expected 1 to 8, the limit model.adapter_rank_max"),
        ("r", json!(0), "r is 0; expected 1 to 8"),
        ("r", json!("3"), "r is \"3\"; expected 1 to 8"),
        ("lora_alpha", json!(null), "lora_alpha is absent; expected a finite number"),
        ("peft_type", json!("IA3"), "unsupported peft_type: \"IA3\"; expected \"LORA\""),
        ("bias", json!("all"), "unsupported bias: \"all\"; expected \"none\""),
        ("use_dora", json!(true), "unsupported use_dora: true; expected absent, null, false"),
        (
            "kasa_config",
            json!({"beta": 1}),
            "unsupported kasa_config: {\"beta\":1}; expected absent",
        ),
        ("modules_to_save", json!(["lm_head"]), "unsupported modules_to_save: [\"lm_head\"]"),
        ("rank_pattern", json!({"q_proj": 4}), "unsupported rank_pattern: {\"q_proj\":4}"),
        ("init_lora_weights", json!("pissa"), "unsupported init_lora_weights: \"pissa\""),
        ("target_modules", json!(["lm_head"]), "unsupported target_modules: \"lm_head\""),
    ] {
        let mut config = config();
        config[key] = value;
        let found = open(&config, &good).unwrap_err().to_string();
        let file = "adapter_config.json: ";
        assert!(found.contains(&format!("{file}{wanted}")) && !found.contains('\n'), "{found}");
    }
    let changed = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = good.clone();
        change(&mut tensors);
        let found = open(&config(), &tensors).unwrap_err().to_string();
        assert!(found.contains("adapter_model.safetensors: ") && !found.contains('\n'), "{found}");
        found
    };
    let a = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    let found = changed(&|tensors| tensors[0].dims = vec![RANK as u64 * 2, 16]);
    assert!(found.contains(a) && found.contains("has shape [6, 16]; expected [3, 32]"), "{found}");
    let found = changed(&|tensors| drop(tensors.remove(0)));
    assert!(found.contains(&format!("tensor {a:?} is missing; expected shape [3, 32]")), "{found}");
    let found = changed(&|tensors| tensors[1].name = a.replace("lora_A", "lora_magnitude"));
    assert!(found.contains("lora_B.weight\" is missing"), "{found}");
    let found = changed(&|tensors| {
        for tensor in tensors {
            tensor.name = tensor.name.replace("layers.1", "layers.2");
        }
    });
    assert!(found.contains("layers.2.self_attn.q_proj.lora_"), "{found}");
    assert!(found.contains("is not part of the llama architecture"), "{found}");
    let found = changed(&|tensors| tensors[0].bytes[..2].copy_from_slice(&[0x80, 0x7f]));
    assert!(found.contains("is corrupt: element 0 is inf; expected a finite number"), "{found}");
    let found = changed(&|tensors| tensors.clear());
    assert!(found.contains(&format!("tensor {a:?} is missing")), "{found}");

    let experts = base("mixtral");
    let folder = TempDir::new().unwrap();
    write(folder.path(), &config(), &good);
    let found = Adapter::open(folder.path(), experts.config(), Shard::WHOLE, RANK_MAX);
    let found = found.unwrap_err().to_string();
    assert!(
        found.contains("unsupported base model: \"mixtral\"; expected a model without experts")
    );
    fs::remove_file(folder.path().join("adapter_model.safetensors")).unwrap();
    let found = Adapter::open(folder.path(), checkpoint.config(), Shard::WHOLE, RANK_MAX);
    let found = found.unwrap_err().to_string();
    assert!(found.starts_with("cannot open ") && found.contains("adapter_model.safetensors"));
    let file = fs::File::create(folder.path().join("adapter_model.safetensors")).unwrap();
    file.set_len(1 << 40).unwrap();
    let found = Adapter::open(folder.path(), checkpoint.config(), Shard::WHOLE, RANK_MAX);
    let found = found.unwrap_err().to_string();
    assert!(found.starts_with("cannot read ") && found.contains("is larger than "), "{found}");
}
