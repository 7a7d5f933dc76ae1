//! Helpers of several test files: generated models and the real model.
#![allow(dead_code, reason = "no test file uses all of it")]

pub(crate) mod ranks;
pub(crate) mod sequence;

use std::{
    fs,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use kernels::{RowSource, fp8};
use model::{Checkpoint, LayerWeight, LoadFormat, ModelConfig, RopeScaling, Weight, WeightShape};
use serde_json::{Value, json};

/// Seed of the dummy weights that `reference.json` was computed with.
pub(crate) const SEED: u64 = 7;

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

pub(crate) fn reference() -> Value {
    serde_json::from_slice(&fs::read(fixture("reference.json")).unwrap()).unwrap()
}

pub(crate) fn tiny_llama3() -> Checkpoint {
    Checkpoint::open(fixture("tiny_llama3"), LoadFormat::Dummy { seed: SEED }).unwrap()
}

/// Returns the path of the real model, which is downloaded and not part of the repository.
pub(crate) fn smollm2_path() -> PathBuf {
    let path = std::env::var_os("BATON_TEST_MODEL").map(PathBuf::from).unwrap_or_else(|| {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf")
    });
    assert!(path.is_file(), "{} is not there: run `make model`", path.display());
    path
}

/// Returns all elements of a weight, row after row.
pub(crate) fn elements(checkpoint: &Checkpoint, weight: Weight) -> Vec<f32> {
    match weight.shape(checkpoint.config()) {
        WeightShape::Vector { .. } => checkpoint.vector(weight).unwrap(),
        WeightShape::Matrix { rows, cols } => {
            let matrix = checkpoint.matrix(weight).unwrap();
            assert_eq!((matrix.rows(), matrix.cols()), (rows, cols));
            let mut values = vec![f32::NAN; rows * cols];
            for (row, out) in values.chunks_mut(cols).enumerate() {
                matrix.read_row(row, out);
            }
            values
        }
    }
}

/// Encoding that both formats support.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Element {
    F32,
    F16,
    Bf16,
    /// In safetensors only.
    F8E4m3,
}

impl Element {
    pub(crate) fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Element::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Element::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            Element::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
            Element::F8E4m3 => values.iter().map(|&v| fp8::encode(v)).collect(),
        }
    }

    pub(crate) fn round(self, value: f32) -> f32 {
        match self {
            Element::F32 => value,
            Element::F16 => f16::from_f32(value).to_f32(),
            Element::Bf16 => bf16::from_f32(value).to_f32(),
            Element::F8E4m3 => fp8::decode(fp8::encode(value)),
        }
    }

    fn safetensors_name(self) -> &'static str {
        match self {
            Element::F32 => "F32",
            Element::F16 => "F16",
            Element::Bf16 => "BF16",
            Element::F8E4m3 => "F8_E4M3",
        }
    }

    fn gguf_number(self) -> u32 {
        match self {
            Element::F32 => 0,
            Element::F16 => 1,
            Element::Bf16 => 30,
            Element::F8E4m3 => unreachable!("GGUF has no FP8"),
        }
    }
}

/// Tensor to write: name, dimensions with the slowest first, bytes.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub name: String,
    pub dims: Vec<u64>,
    pub element: Element,
    pub bytes: Vec<u8>,
}

/// Returns the weights of `checkpoint` under their Hugging Face names.
pub(crate) fn hugging_face_tensors(checkpoint: &Checkpoint, element: Element) -> Vec<Tensor> {
    Weight::all(checkpoint.config())
        .map(|weight| Tensor {
            name: weight.hugging_face_name(checkpoint.config()),
            dims: weight.shape(checkpoint.config()).dims(),
            element,
            bytes: element.encode(&elements(checkpoint, weight)),
        })
        .collect()
}

pub(crate) fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut data: Vec<u8> = Vec::new();
    for tensor in tensors {
        let begin = data.len();
        data.extend(&tensor.bytes);
        let dtype = tensor.element.safetensors_name();
        let entry =
            json!({"dtype": dtype, "shape": tensor.dims, "data_offsets": [begin, data.len()]});
        header.insert(tensor.name.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    file
}

/// Writes the fixture's config.json and the weights, in one file or in `shards` files.
pub(crate) fn write_folder(folder: &Path, tensors: &[Tensor], shards: usize) {
    fs::copy(fixture("tiny_llama3/config.json"), folder.join("config.json")).unwrap();
    if shards == 1 {
        return fs::write(folder.join("model.safetensors"), safetensors(tensors)).unwrap();
    }
    let mut weight_map = serde_json::Map::new();
    for (index, shard) in tensors.chunks(tensors.len().div_ceil(shards)).enumerate() {
        let file = format!("model-{:05}-of-{shards:05}.safetensors", index + 1);
        for tensor in shard {
            weight_map.insert(tensor.name.clone(), json!(file));
        }
        fs::write(folder.join(file), safetensors(shard)).unwrap();
    }
    let index = json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Returns the weights of `checkpoint` as llama.cpp's converter stores them.
pub(crate) fn gguf_tensors(checkpoint: &Checkpoint, element: Element) -> Vec<Tensor> {
    let config = checkpoint.config();
    let mut tensors: Vec<Tensor> = Weight::all(config)
        .map(|weight| {
            let mut values = elements(checkpoint, weight);
            let mut element = element;
            match weight {
                Weight::Layer(_, LayerWeight::Query | LayerWeight::Key) => {
                    values = neighbouring_pairs(&values, config.head_dim, config.hidden_size);
                }
                Weight::OutputNorm
                | Weight::Layer(_, LayerWeight::AttentionNorm | LayerWeight::FfnNorm) => {
                    element = Element::F32;
                }
                _ => {}
            }
            Tensor {
                name: weight.gguf_name(),
                dims: weight.shape(config).dims(),
                element,
                bytes: element.encode(&values),
            }
        })
        .collect();
    if config.rope_scaling != RopeScaling::None {
        let plain = ModelConfig { rope_scaling: RopeScaling::None, ..config.clone() };
        let divisors: Vec<f32> = plain
            .rope_frequencies()
            .iter()
            .zip(config.rope_frequencies())
            .map(|(plain, scaled)| plain / scaled)
            .collect();
        tensors.push(Tensor {
            name: "rope_freqs.weight".into(),
            dims: vec![divisors.len() as u64],
            element: Element::F32,
            bytes: Element::F32.encode(&divisors),
        });
    }
    tensors
}

/// Applies the converter's permutation: within a head, rows i and i + dim/2 become adjacent.
fn neighbouring_pairs(values: &[f32], head_dim: usize, cols: usize) -> Vec<f32> {
    let rows: Vec<&[f32]> = values.chunks(cols).collect();
    let heads = rows.chunks(head_dim);
    heads
        .flat_map(|head| {
            (0..head_dim / 2).flat_map(move |pair| [head[pair], head[head_dim / 2 + pair]])
        })
        .flatten()
        .copied()
        .collect()
}

/// Metadata value to write.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Entry<'a> {
    U32(u32),
    F32(f32),
    Text(&'a str),
}

/// Returns the bytes of a GGUF file with this configuration and these weights.
pub(crate) fn gguf(config: &ModelConfig, tensors: &[Tensor]) -> Vec<u8> {
    gguf_with(config, tensors, &[])
}

/// Returns a file as [`gguf`] does, with entries changed, added, or (with `None`) omitted.
pub(crate) fn gguf_with(
    config: &ModelConfig,
    tensors: &[Tensor],
    changes: &[(&str, Option<Entry<'_>>)],
) -> Vec<u8> {
    let number = |number: usize| Entry::U32(number as u32);
    let mut entries = vec![
        ("general.architecture", Entry::Text("llama")),
        ("llama.embedding_length", number(config.hidden_size)),
        ("llama.block_count", number(config.layer_count)),
        ("llama.attention.head_count", number(config.query_head_count)),
        ("llama.attention.head_count_kv", number(config.kv_head_count)),
        ("llama.attention.key_length", number(config.head_dim)),
        ("llama.feed_forward_length", number(config.ffn_size)),
        ("llama.vocab_size", number(config.vocab_size)),
        ("llama.context_length", number(config.context_tokens)),
        ("llama.attention.layer_norm_rms_epsilon", Entry::F32(config.rms_eps)),
        ("llama.rope.freq_base", Entry::F32(config.rope_theta)),
    ];
    for &(key, entry) in changes {
        entries.retain(|(known, _)| *known != key);
        entries.extend(entry.map(|entry| (key, entry)));
    }

    let text = |file: &mut Vec<u8>, text: &str| {
        file.extend((text.len() as u64).to_le_bytes());
        file.extend(text.as_bytes());
    };
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend((entries.len() as u64).to_le_bytes());
    for (key, entry) in entries {
        text(&mut file, key);
        match entry {
            Entry::U32(value) => {
                file.extend(4u32.to_le_bytes());
                file.extend(value.to_le_bytes());
            }
            Entry::F32(value) => {
                file.extend(6u32.to_le_bytes());
                file.extend(value.to_le_bytes());
            }
            Entry::Text(value) => {
                file.extend(8u32.to_le_bytes());
                text(&mut file, value);
            }
        }
    }
    let mut offset = 0;
    for tensor in tensors {
        text(&mut file, &tensor.name);
        file.extend((tensor.dims.len() as u32).to_le_bytes());
        for dim in tensor.dims.iter().rev() {
            file.extend(dim.to_le_bytes());
        }
        file.extend(tensor.element.gguf_number().to_le_bytes());
        file.extend((offset as u64).to_le_bytes());
        offset += tensor.bytes.len().next_multiple_of(32);
    }
    file.resize(file.len().next_multiple_of(32), 0);
    for tensor in tensors {
        file.extend(&tensor.bytes);
        file.resize(file.len().next_multiple_of(32), 0);
    }
    file
}
