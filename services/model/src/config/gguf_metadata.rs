//! The configuration from a GGUF file's metadata.

use std::path::Path;

use gguf::{FromValue, GgufError, Header};

use super::{Architecture, ModelConfig, RopeScaling};
use crate::error::ModelError;

/// `rope_divisors` are the elements of the tensor `rope_freqs.weight`, where the file has it.
pub(crate) fn from_gguf(
    path: &Path,
    header: &Header,
    rope_divisors: Option<Vec<f32>>,
) -> Result<ModelConfig, ModelError> {
    let metadata = Metadata { path, header };
    let architecture = metadata.require::<&str>("general.architecture")?;
    if architecture != "llama" {
        return Err(ModelError::Architecture {
            path: path.into(),
            found: format!("{architecture:?}"),
            supported: "\"llama\"",
        });
    }
    if let Some(experts) = metadata.get::<u32>("llama.expert_count")?
        && experts > 0
    {
        return Err(metadata.unsupported("llama.expert_count", experts.to_string(), "0"));
    }

    let hidden_size = metadata.require::<usize>("llama.embedding_length")?;
    let query_head_count = metadata.require::<usize>("llama.attention.head_count")?;
    let head_dim = match metadata.get("llama.attention.key_length")? {
        Some(key_length) => key_length,
        None if query_head_count > 0 && hidden_size.is_multiple_of(query_head_count) => {
            hidden_size / query_head_count
        }
        None => {
            return Err(ModelError::ConfigValue {
                path: path.into(),
                name: "attention head count",
                found: query_head_count.to_string(),
                allowed: format!("a divisor of the hidden size {hidden_size}"),
            });
        }
    };
    // A head's values are as wide as its keys, and all of it is rotated.
    for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
        if let Some(found) = metadata.get::<usize>(key)?
            && found != head_dim
        {
            return Err(metadata.unsupported(key, found.to_string(), "the head dimension"));
        }
    }
    let vocab_size = match metadata.get("llama.vocab_size")? {
        Some(size) => size,
        None => metadata.require::<&[String]>("tokenizer.ggml.tokens")?.len(),
    };
    let mut eos_token_ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        if let Some(id) = metadata.get::<u32>(key)?
            && !eos_token_ids.contains(&id)
        {
            eos_token_ids.push(id);
        }
    }

    ModelConfig {
        architecture: Architecture::Llama,
        hidden_size,
        layer_count: metadata.require("llama.block_count")?,
        query_head_count,
        kv_head_count: metadata.get("llama.attention.head_count_kv")?.unwrap_or(query_head_count),
        head_dim,
        ffn_size: metadata.require("llama.feed_forward_length")?,
        vocab_size,
        context_tokens: metadata.require("llama.context_length")?,
        rms_eps: metadata.require("llama.attention.layer_norm_rms_epsilon")?,
        rope_theta: metadata.get("llama.rope.freq_base")?.unwrap_or(10_000.0),
        rope_scaling: rope_scaling(&metadata, rope_divisors)?,
        tied_output: header.tensor("output.weight").is_none(),
        bos_token_id: metadata.get("tokenizer.ggml.bos_token_id")?,
        eos_token_ids,
    }
    .validate(path)
}

fn rope_scaling(
    metadata: &Metadata<'_>,
    divisors: Option<Vec<f32>>,
) -> Result<RopeScaling, ModelError> {
    const TYPE: &str = "llama.rope.scaling.type";
    let factor = match metadata.get("llama.rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // Its name before there were other kinds of scaling.
        None => metadata.get("llama.rope.scale_linear")?,
    };
    // As llama.cpp: a factor without a type is linear, and 0 is no factor.
    let factor = factor.filter(|&factor: &f32| factor != 0.0 && factor != 1.0);
    let scaling = match metadata.get::<&str>(TYPE)? {
        Some("none") => RopeScaling::None,
        Some("linear") | None => match factor {
            Some(factor) => RopeScaling::Linear { factor },
            None => RopeScaling::None,
        },
        Some(other) => {
            let found = format!("{other:?}");
            return Err(metadata.unsupported(TYPE, found, "\"none\" and \"linear\""));
        }
    };
    match (scaling, divisors) {
        (scaling, None) => Ok(scaling),
        (RopeScaling::None, Some(divisors)) => Ok(RopeScaling::Divisors(divisors)),
        (_, Some(_)) => {
            let found = "\"linear\" beside the tensor \"rope_freqs.weight\"".into();
            Err(metadata.unsupported(TYPE, found, "one of the two"))
        }
    }
}

/// The metadata with errors that name the file.
struct Metadata<'a> {
    path: &'a Path,
    header: &'a Header,
}

impl<'a> Metadata<'a> {
    fn get<T: FromValue<'a>>(&self, key: &str) -> Result<Option<T>, ModelError> {
        self.header.metadata.get(key).map_err(|source| self.error(source))
    }

    fn require<T: FromValue<'a>>(&self, key: &str) -> Result<T, ModelError> {
        self.header.metadata.require(key).map_err(|source| self.error(source))
    }

    fn error(&self, source: GgufError) -> ModelError {
        ModelError::Gguf { path: self.path.into(), source }
    }

    fn unsupported(&self, key: &str, found: String, supported: &'static str) -> ModelError {
        ModelError::Unsupported { path: self.path.into(), key: key.into(), found, supported }
    }
}
