//! Models with linear attention (Gated DeltaNet) in some layers: recurrent states of sequences, and
//! tensors with several weights.

mod common;

use std::{collections::BTreeMap, fs, path::Path};

use common::sequence::Runner;
use kernels::{KvFormat, KvLayout, StateShape, WeightFormat, cpu::Isa};
use model::{Checkpoint, LoadFormat, StoredWeight, Weight};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

const FOLDERS: [&str; 4] = ["qwen3_next", "qwen3_next_fp8", "qwen3_5", "qwen3_5_moe"];

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(common::fixture("architectures").join(name), LoadFormat::Auto).unwrap()
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count).map(|index| ((index * 37 + index / 3 + 5) % 128) as u32).collect()
}

fn runner(checkpoint: &Checkpoint, formats: (WeightFormat, KvFormat)) -> Runner {
    Runner::with_kv(checkpoint, formats, Isa::Auto, 64)
}

const F32: (WeightFormat, KvFormat) = (WeightFormat::F32, KvFormat::F32);

#[test]
fn kv_covers_layers_with_attention_and_the_groups_name_the_state() {
    let config = open("qwen3_next").config().clone();
    let state = StateShape {
        layer_count: 2,
        key_heads: 2,
        value_heads: 6,
        key_dim: 12,
        value_dim: 10,
        conv_taps: 3,
    };
    assert_eq!(config.state_shape(), Some(state));
    assert_eq!(config.kv_groups(KvFormat::F32).state(), Some(state));
    let block = KvLayout { layer_count: 1, kv_head_count: 2, head_dim: 16, format: KvFormat::F32 };
    assert_eq!(config.block_layout(KvFormat::F32), block);
    assert_eq!(config.kv_read_bytes(5, KvFormat::F32), 5 * 2 * 2 * 16 * 4);
    // 2 pieces of 21 rows for 2 layers with 3 · 12 + 5 · 3 rows.
    assert_eq!(state.block_count(block), 3);
    let described = config.kv_groups(KvFormat::F32).describe(config.kv_layout(KvFormat::F32));
    assert!(described.ends_with(" state=layers:2,keys:2x12,values:6x10,taps:3"), "{described}");
    assert!(!config.takes_adapters());
    let elements = read(&common::fixture("architectures/qwen3_next"));
    let elements = elements.values().map(|(_, shape, _)| shape.iter().product::<usize>() as u64);
    assert_eq!(config.parameter_count(), elements.sum::<u64>());
}

#[test]
fn layers_without_types_have_attention_at_an_interval() {
    let folder = tempfile::tempdir().unwrap();
    for (interval, expected) in [(json!(null), vec![3, 7]), (json!(3), vec![2, 5])] {
        let mut config = config("qwen3_next");
        let changes = json!({"layer_types": null, "full_attention_interval": interval,
            "num_hidden_layers": 8});
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let path = folder.path().join("config.json");
        fs::write(&path, config.to_string()).unwrap();
        let checkpoint = Checkpoint::open(&path, LoadFormat::Dummy { seed: 1 }).unwrap();
        let layers = checkpoint.config().layers.iter().enumerate();
        let found: Vec<_> = layers.filter(|(_, layer)| layer.attention().is_some()).collect();
        assert_eq!(found.iter().map(|(index, _)| *index).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn chunks_at_every_boundary_change_no_bit() {
    let tokens = tokens(40);
    for name in FOLDERS {
        let checkpoint = open(name);
        for formats in
            [F32, (WeightFormat::Bf16, KvFormat::Bf16), (WeightFormat::Bf16, KvFormat::Fp8)]
        {
            let whole = {
                let mut runner = runner(&checkpoint, formats);
                let mut sequence = runner.sequence(40);
                runner.forward(&mut [(&mut sequence, &tokens, 40)])
            };
            let mut runner = runner(&checkpoint, formats);
            for boundary in 1..40 {
                // A sequence begins with zeros in blocks of any contents.
                runner.clear();
                let mut sequence = runner.sequence(40);
                let (first, second) = tokens.split_at(boundary);
                runner.forward(&mut [(&mut sequence, first, 0)]);
                let rest = runner.forward(&mut [(&mut sequence, second, second.len() as u32)]);
                assert!(rest == whole[boundary..], "{name}, {formats:?}, boundary {boundary}");
            }
        }
    }
}

#[test]
fn sequences_of_a_batch_have_their_own_states() {
    let tokens = tokens(40);
    for name in FOLDERS {
        let mut runner = runner(&open(name), F32);
        let lengths = [40, 17, 1, 29];
        let alone: Vec<_> = lengths
            .iter()
            .map(|&length| {
                let mut sequence = runner.sequence(40);
                let tokens = &tokens[40 - length..];
                runner.forward(&mut [(&mut sequence, tokens, length as u32)])
            })
            .collect();
        // In turns: one token of some sequences, several of others.
        let mut sequences: Vec<_> = lengths.iter().map(|_| runner.sequence(40)).collect();
        let mut done = [0; 4];
        let mut found: [Vec<Vec<f32>>; 4] = Default::default();
        for turn in 0.. {
            let mut parts = Vec::new();
            let mut counts = Vec::new();
            for (index, sequence) in sequences.iter_mut().enumerate() {
                let count = [1, 7, 3][(index + turn) % 3].min(lengths[index] - done[index]);
                if count > 0 {
                    let first = 40 - lengths[index] + done[index];
                    parts.push((sequence, &tokens[first..first + count], count as u32));
                    counts.push((index, count));
                }
            }
            if parts.is_empty() {
                break;
            }
            let mut logits = runner.forward(&mut parts).into_iter();
            for (index, count) in counts {
                found[index].extend(logits.by_ref().take(count));
                done[index] += count;
            }
        }
        assert!(found[..] == alone[..], "{name}");
    }
}

#[test]
fn moved_blocks_continue_with_equal_bits() {
    let tokens = tokens(40);
    for name in FOLDERS {
        let checkpoint = open(name);
        for formats in [F32, (WeightFormat::Bf16, KvFormat::Fp8)] {
            let (mut sender, mut receiver) =
                (runner(&checkpoint, formats), runner(&checkpoint, formats));
            let mut sequence = sender.sequence(40);
            sender.forward(&mut [(&mut sequence, &tokens[..27], 1)]);
            let mut received = receiver.receive(&sender, &sequence);
            for token in &tokens[27..] {
                let expected = sender.decode(&mut sequence, *token);
                assert!(receiver.decode(&mut received, *token) == expected, "{name}, {formats:?}");
            }
        }
    }
}

/// A tensor of a file: element type, dimensions, bytes.
type Stored = (Dtype, Vec<usize>, Vec<u8>);

fn read(folder: &Path) -> BTreeMap<String, Stored> {
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let stored =
        |tensor: TensorView<'_>| (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec());
    tensors.tensors().into_iter().map(|(name, tensor)| (name, stored(tensor))).collect()
}

fn write(folder: &Path, config: &Value, tensors: &BTreeMap<String, Stored>) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

fn config(name: &str) -> Value {
    let path = common::fixture("architectures").join(name).join("config.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Returns the error of opening a model with changed tensors and configuration.
fn refusal(change: impl FnOnce(&mut Value, &mut BTreeMap<String, Stored>)) -> String {
    let mut config = config("qwen3_next");
    let mut tensors = read(&common::fixture("architectures/qwen3_next"));
    change(&mut config, &mut tensors);
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &config, &tensors);
    let error = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap_err().to_string();
    error.replace(folder.path().to_str().unwrap(), "MODEL")
}

#[test]
fn invalid_configurations_are_rejected_by_name() {
    let cases = [
        (
            json!({"layer_types": ["linear_attention", "mamba", "full_attention"]}),
            "key \"layer_types\": unknown variant `mamba`, \
             expected `full_attention` or `linear_attention`",
        ),
        (
            json!({"layer_types": ["linear_attention", "full_attention"]}),
            "number of layer types is 2; expected 3 (one for each layer)",
        ),
        (
            json!({"layer_types": ["linear_attention", "linear_attention", "linear_attention"]}),
            "layer_types is linear_attention only; expected a layer with attention",
        ),
        (json!({"linear_num_key_heads": null}), "key \"linear_num_key_heads\": is missing"),
        (json!({"linear_num_value_heads": null}), "key \"linear_num_value_heads\": is missing"),
        (json!({"linear_key_head_dim": null}), "key \"linear_key_head_dim\": is missing"),
        (json!({"linear_value_head_dim": null}), "key \"linear_value_head_dim\": is missing"),
        (json!({"linear_conv_kernel_dim": null}), "key \"linear_conv_kernel_dim\": is missing"),
        (
            json!({"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
            "linear_num_key_heads is 3; expected a multiple of the 2 KV heads",
        ),
        (
            json!({"linear_num_value_heads": 7}),
            "linear_num_value_heads is 7; expected a multiple of the 2 key heads",
        ),
        (json!({"linear_num_key_heads": 0}), "linear_num_key_heads is 0; expected 1 to 4096"),
        (json!({"linear_conv_kernel_dim": 0}), "linear_conv_kernel_dim is 0; expected 1 to 64"),
        (json!({"linear_value_head_dim": 65}), "linear_value_head_dim is 65; expected 1 to 64"),
        (json!({"attention_bias": true}), "unsupported attention_bias: true; expected false"),
    ];
    for (changes, message) in cases {
        let error = refusal(|config, _| {
            config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        });
        assert!(error.ends_with(message), "{error}");
    }
}

#[test]
fn tensors_of_other_shapes_are_rejected_by_name() {
    let name = |suffix: &str| format!("model.layers.0.linear_attn.{suffix}");
    let cases = [
        ("in_proj_qkvz.weight", vec![160, 32], "[168, 32]"),
        ("in_proj_ba.weight", vec![12, 30], "[12, 32]"),
        ("conv1d.weight", vec![108, 4], "[108, 1, 4]"),
        ("A_log", vec![5], "[6]"),
        ("out_proj.weight", vec![60, 32], "[32, 60]"),
    ];
    for (suffix, shape, expected) in cases {
        let elements: usize = shape.iter().product();
        let found = format!("{shape:?}");
        let error = refusal(|_, tensors| {
            tensors.insert(name(suffix), (Dtype::BF16, shape, vec![0; 2 * elements]));
        });
        assert!(
            error.contains(&name(suffix)) && error.contains(&found) && error.contains(expected),
            "{error}"
        );
        let error = refusal(|_, tensors| _ = tensors.remove(&name(suffix)));
        assert!(error.contains(&name(suffix)) && error.contains("missing"), "{error}");
    }
    let error = refusal(|_, tensors| {
        tensors.insert(name("conv1d.bias"), (Dtype::BF16, vec![108], vec![0; 216]));
    });
    assert!(error.contains("conv1d.bias"), "{error}");
}

#[test]
fn tensors_for_multi_token_prediction_are_ignored() {
    let mut tensors = read(&common::fixture("architectures/qwen3_next"));
    tensors.insert("mtp.fc.weight".into(), (Dtype::BF16, vec![2, 2], vec![0; 8]));
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &config("qwen3_next"), &tensors);
    let checkpoint = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap();
    assert_eq!(checkpoint.config(), open("qwen3_next").config());
}

/// Tensors with several weights are listed, and hashed, once.
#[test]
fn fingerprint_and_stored_weights_cover_every_tensor_once() {
    for name in FOLDERS {
        let checkpoint = open(name);
        let folder = common::fixture("architectures").join(name);
        let mut expected = read(&folder);
        expected.retain(|name, _| !name.starts_with("model.visual."));
        let stored = checkpoint.stored_weights().unwrap();
        let mut names: Vec<_> = stored.iter().map(|weight| weight.name.clone()).collect();
        names.sort_unstable();
        assert_eq!(names, expected.keys().cloned().collect::<Vec<_>>());
        assert_eq!(
            stored.iter().map(StoredWeight::bytes).sum::<u64>(),
            expected.values().map(|(_, _, bytes)| bytes.len() as u64).sum::<u64>()
        );

        // Hashes of packed matrices do not change the fingerprint, and every tensor does.
        let expected_print = checkpoint.model_fingerprint().unwrap();
        let packed = open(name).hashing_packed();
        let _runner = Runner::new(&packed, WeightFormat::F32, Isa::Auto, 4);
        assert_eq!(packed.model_fingerprint().unwrap(), expected_print);
        let other = tempfile::tempdir().unwrap();
        for changed in expected.keys().filter(|name| !name.contains("experts")) {
            let mut tensors = read(&folder);
            let bytes = &mut tensors.get_mut(changed).unwrap().2;
            *bytes.last_mut().unwrap() ^= 1;
            write(other.path(), &config(name), &tensors);
            let print = Checkpoint::open(other.path(), LoadFormat::Auto).unwrap();
            assert_ne!(print.model_fingerprint().unwrap(), expected_print, "{changed}");
        }
    }
}

/// Checkpoints may have one tensor for each projection of all experts of a layer.
#[test]
fn stacked_experts_are_the_experts_of_single_tensors() {
    let mut tensors = read(&common::fixture("architectures/qwen3_5_moe"));
    let single = open("qwen3_5_moe");
    for layer in 0..3 {
        let begin = format!("model.language_model.layers.{layer}.mlp.experts.");
        for (to, parts) in
            [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])]
        {
            let mut all = Vec::new();
            for expert in 0..6 {
                for part in parts {
                    let (.., bytes) =
                        tensors.remove(&format!("{begin}{expert}.{part}.weight")).unwrap();
                    all.extend(bytes);
                }
            }
            // The sizes of hidden states and of experts are 32 and 16.
            let shape = if parts.len() == 2 { vec![6, 32, 32] } else { vec![6, 32, 16] };
            tensors.insert(format!("{begin}{to}"), (Dtype::BF16, shape, all));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &config("qwen3_5_moe"), &tensors);
    let stacked = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap();
    assert_eq!(stacked.config(), single.config());
    for weight in Weight::all(single.config()) {
        assert_eq!(
            common::elements(&stacked, weight),
            common::elements(&single, weight),
            "{weight:?}"
        );
    }
    tensors.retain(|name, _| !name.starts_with("model.visual."));
    assert_eq!(stacked.stored_weights().unwrap().len(), tensors.len());

    let name = "model.language_model.layers.1.mlp.experts.gate_up_proj";
    tensors.insert(name.into(), (Dtype::BF16, vec![6, 16, 32], vec![0; 6 * 16 * 32 * 2]));
    write(folder.path(), &config("qwen3_5_moe"), &tensors);
    let error = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap_err().to_string();
    assert!(
        error.contains(name) && error.contains("[6, 16, 32]") && error.contains("[6, 32, 32]"),
        "{error}"
    );
}

/// Stores the matrices of mixers in INT4 as compressed-tensors, and returns the same tensors
/// dequantized.
fn quantized(tensors: &BTreeMap<String, Stored>) -> [BTreeMap<String, Stored>; 2] {
    let (mut packed, mut plain) = (tensors.clone(), tensors.clone());
    for (name, (_, shape, bytes)) in tensors {
        let is_mixer = name.contains("linear_attn.") || name.contains("self_attn.");
        let [rows, cols] = shape[..] else { continue };
        if !is_mixer {
            continue;
        }
        let values: Vec<f32> = bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|it| half::bf16::from_le_bytes(*it).to_f32())
            .collect();
        let (mut words, mut scales, mut dequantized) = (Vec::new(), Vec::new(), Vec::new());
        for row in values.chunks(cols) {
            let greatest = row.iter().fold(0.0_f32, |greatest, it| greatest.max(it.abs()));
            let scale = half::bf16::from_f32(greatest / 7.0);
            let number = |value: &f32| (value / scale.to_f32()).round().clamp(-8.0, 7.0) + 8.0;
            scales.extend(scale.to_le_bytes());
            for eight in row.chunks(8) {
                let word = eight
                    .iter()
                    .enumerate()
                    .fold(0_u32, |word, (at, it)| word | (number(it) as u32) << (4 * at));
                words.extend(word.to_le_bytes());
            }
            let values = row.iter().map(|it| (number(it) - 8.0) * scale.to_f32());
            dequantized.extend(values.flat_map(f32::to_le_bytes));
        }
        plain.insert(name.clone(), (Dtype::F32, shape.clone(), dequantized));
        packed.remove(name);
        let shape = [rows, cols].map(|len| (len as i64).to_le_bytes()).concat();
        packed.insert(format!("{name}_packed"), (Dtype::I32, vec![rows, cols.div_ceil(8)], words));
        packed.insert(format!("{name}_scale"), (Dtype::BF16, vec![rows, 1], scales));
        packed.insert(format!("{name}_shape"), (Dtype::I64, vec![2], shape));
    }
    [packed, plain]
}

#[test]
fn matrices_in_int4_have_the_logits_of_dequantized_weights() {
    let tokens = tokens(40);
    for name in FOLDERS {
        if name.ends_with("fp8") {
            continue;
        }
        let [packed, plain] = quantized(&read(&common::fixture("architectures").join(name)));
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let mut described = config(name);
        write(folders[1].path(), &described, &plain);
        described["quantization_config"] = json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int",
                "strategy": "channel", "symmetric": true}}}
        });
        write(folders[0].path(), &described, &packed);
        let [packed, plain] = folders.each_ref().map(|folder| {
            let checkpoint = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap();
            let mut runner = runner(&checkpoint, F32);
            let mut sequence = runner.sequence(40);
            let logits = runner.forward(&mut [(&mut sequence, &tokens, 40)]);
            (checkpoint, logits)
        });
        assert!(packed.0.has_int4() && !plain.0.has_int4());
        let elements = |(checkpoint, _): &(Checkpoint, _)| -> Vec<Vec<f32>> {
            let all = Weight::all(checkpoint.config());
            all.map(|weight| common::elements(checkpoint, weight)).collect()
        };
        assert!(elements(&packed) == elements(&plain), "{name}");
        let rows = packed.1.iter().flatten().zip(plain.1.iter().flatten());
        let worst = rows.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-3, "{name} is off by {worst}");
    }
}
