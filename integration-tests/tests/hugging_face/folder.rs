//! Writes models in the Hugging Face folder format.

use std::{borrow::Cow, collections::HashMap, fs, path::Path};

use anyhow::Result;
use gguf::Header;
use kernels::RowSource;
use model::{Checkpoint, LoadFormat, ModelConfig, RopeScaling, Weight};
use safetensors::{Dtype, View};
use serde_json::{Map, Value, json};

/// Type of a special token in a GGUF token list.
const SPECIAL: i32 = 3;

/// Converts the model of a GGUF file to f32 safetensors, in one file or in `shards` files.
pub(crate) fn write(gguf: &Path, folder: &Path, shards: usize) -> Result<()> {
    let checkpoint = Checkpoint::open(gguf, LoadFormat::Auto)?;
    write_config(checkpoint.config(), folder)?;
    write_tokenizer(gguf, folder)?;
    write_weights(&checkpoint, folder, shards)
}

fn write_config(config: &ModelConfig, folder: &Path) -> Result<()> {
    assert_eq!(config.rope_scaling, RopeScaling::None);
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.layer_count,
        "num_attention_heads": config.query_head_count,
        "num_key_value_heads": config.kv_head_count,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_output,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids,
        "torch_dtype": "float32",
    });
    Ok(fs::write(folder.join("config.json"), config.to_string())?)
}

/// Writes the config.json of a model of a few kilobytes with SmolLM2's vocabulary.
pub(crate) fn write_tiny_config(folder: &Path, context_tokens: usize) -> Result<()> {
    let config = json!({
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 49_152,
        "max_position_embeddings": context_tokens,
        "tie_word_embeddings": true,
        "eos_token_id": 2,
    });
    Ok(fs::write(folder.join("config.json"), config.to_string())?)
}

/// Writes config.json and the tokenizer of a small model with linear attention in three of four
/// layers.
pub(crate) fn write_hybrid(gguf: &Path, folder: &Path) -> Result<()> {
    let config = json!({
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "vocab_size": 49_152,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": false,
        "eos_token_id": 2,
    });
    fs::write(folder.join("config.json"), config.to_string())?;
    write_tokenizer(gguf, folder)
}

/// Tokens of gpt-oss that the tokenizer of [`write_gpt_oss`] has after SmolLM2's. The last two end
/// an answer.
pub(crate) const HARMONY: [&str; 7] = [
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|start|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
];
/// Id of the first of [`HARMONY`].
pub(crate) const HARMONY_FIRST: usize = 49_152;

/// Writes config.json, tokenizer.json and tokenizer_config.json of a small gpt-oss with this chat
/// template.
pub(crate) fn write_gpt_oss(gguf: &Path, folder: &Path, template: &str) -> Result<()> {
    let config = json!({
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 128,
        "attention_bias": true,
        "swiglu_limit": 7.0,
        "vocab_size": HARMONY_FIRST + 8,
        "max_position_embeddings": 8192,
        "rope_theta": 150_000,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": false},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false,
        "eos_token_id": [HARMONY_FIRST + 5, HARMONY_FIRST + 6],
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert":
            ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
    });
    fs::write(folder.join("config.json"), config.to_string())?;
    write_tokenizer(gguf, folder)?;
    let path = folder.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path)?)?;
    let added = tokenizer["added_tokens"].as_array_mut().expect("it is a list");
    for (index, content) in HARMONY.iter().enumerate() {
        added.push(json!({"id": HARMONY_FIRST + index, "content": content, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false, "special": true}));
    }
    fs::write(path, tokenizer.to_string())?;
    let config = json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>", "chat_template": template});
    Ok(fs::write(folder.join("tokenizer_config.json"), config.to_string())?)
}

/// Writes SmolLM2's tokenizer.json and tokenizer_config.json: byte-level BPE that splits off
/// digits.
pub(crate) fn write_tokenizer(gguf: &Path, folder: &Path) -> Result<()> {
    let Header { metadata, .. } = Header::read_from(gguf)?;
    let tokens: &[String] = metadata.require("tokenizer.ggml.tokens")?;
    let merges: &[String] = metadata.require("tokenizer.ggml.merges")?;
    let types: &[i32] = metadata.require("tokenizer.ggml.token_type")?;
    let template: &str = metadata.require("tokenizer.chat_template")?;
    let special = tokens.iter().zip(types).enumerate().filter(|(_, (_, kind))| **kind == SPECIAL);
    let added: Vec<Value> = special
        .map(|(id, (content, _))| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let vocab: Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
    let byte_level = |add_prefix_space: bool| {
        json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true,
            "use_regex": true})
    };
    let digits = json!({"type": "Digits", "individual_digits": true});
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level(false)]},
        "post_processor": null,
        "decoder": byte_level(true),
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string())?;
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": template,
    });
    Ok(fs::write(folder.join("tokenizer_config.json"), config.to_string())?)
}

fn write_weights(checkpoint: &Checkpoint, folder: &Path, shards: usize) -> Result<()> {
    let tensors: Vec<Tensor> =
        Weight::all(checkpoint.config()).map(|weight| Tensor::new(checkpoint, weight)).collect();
    if shards == 1 {
        return write_file(&tensors, &folder.join("model.safetensors"));
    }
    let mut weight_map = Map::new();
    for (index, shard) in tensors.chunks(tensors.len().div_ceil(shards)).enumerate() {
        let file = format!("model-{:05}-of-{shards:05}.safetensors", index + 1);
        write_file(shard, &folder.join(&file))?;
        weight_map.extend(shard.iter().map(|tensor| (tensor.name(), file.clone().into())));
    }
    let bytes: usize = tensors.iter().map(|tensor| tensor.data_len()).sum();
    let index = json!({"metadata": {"total_size": bytes}, "weight_map": weight_map});
    Ok(fs::write(folder.join("model.safetensors.index.json"), index.to_string())?)
}

fn write_file(tensors: &[Tensor<'_>], path: &Path) -> Result<()> {
    let named = tensors.iter().map(|tensor| (tensor.name(), tensor));
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    Ok(safetensors::serialize_to_file(named, Some(format), path)?)
}

/// A weight that is dequantized when it is written.
struct Tensor<'a> {
    checkpoint: &'a Checkpoint,
    weight: Weight,
    shape: Vec<usize>,
}

impl<'a> Tensor<'a> {
    fn new(checkpoint: &'a Checkpoint, weight: Weight) -> Self {
        let dims = weight.shape(checkpoint.config()).dims();
        Self { checkpoint, weight, shape: dims.into_iter().map(|dim| dim as usize).collect() }
    }

    fn name(&self) -> String {
        self.weight.hugging_face_name(self.checkpoint.config())
    }
}

impl View for &Tensor<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let values = match self.shape[..] {
            [_] => self.checkpoint.vector(self.weight).expect("the weight is whole"),
            [rows, cols] => {
                let matrix = self.checkpoint.matrix(self.weight).expect("the weight is whole");
                let mut values = vec![0.0; rows * cols];
                for (row, out) in values.chunks_mut(cols).enumerate() {
                    matrix.read_row(row, out);
                }
                values
            }
            _ => unreachable!("weights are vectors and matrices"),
        };
        Cow::Owned(bytemuck::cast_slice(&values).to_vec())
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * size_of::<f32>()
    }
}
