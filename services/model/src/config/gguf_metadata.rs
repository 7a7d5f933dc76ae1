//! Model configuration from a GGUF file's metadata.

use std::{num::NonZeroUsize, path::Path};

use gguf::{FromValue, GgufError, Header};
use kernels::backend::ExpertChoice;

use super::{LAYERS_MAX, ModelConfig, default_head_dim};
use crate::{
    error::ModelError,
    families::{Family, Gguf, GgufExperts},
    layer::{ExpertSpec, SharedExpertSpec},
    rope::RopeScaling,
};

/// Reads the configuration. `has_output` says whether the file has an output projection.
/// `rope_divisors` are the elements of `rope_freqs.weight`, if the file has this tensor.
pub(crate) fn from_gguf(
    path: &Path,
    header: &Header,
    has_output: bool,
    rope_divisors: Option<Vec<f32>>,
) -> Result<ModelConfig, ModelError> {
    let name = header.metadata.require::<&str>("general.architecture");
    let name = name.map_err(|cause| ModelError::Gguf { path: path.into(), cause })?;
    let (family, gguf) = Family::of_gguf(name).ok_or_else(|| ModelError::Architecture {
        path: path.into(),
        found: format!("{name:?}"),
        supported: Family::gguf_names(),
    })?;
    let metadata = Metadata { path, header, architecture: gguf.name };
    let layer = match experts(&metadata, gguf)? {
        Some(experts) => family.layer().with_experts(experts),
        None => family.layer(),
    };

    let hidden_size = metadata.require::<usize>("embedding_length")?;
    let query_head_count = metadata.require::<usize>("attention.head_count")?;
    let head_dim = match metadata.of_model("attention.key_length")? {
        Some(key_length) => key_length,
        None => default_head_dim(path, "attention head count", query_head_count, hidden_size)?,
    };
    // A head's values must be as wide as its keys, and the whole head must be rotated.
    for key in ["attention.value_length", "rope.dimension_count"] {
        if let Some(found) = metadata.of_model::<usize>(key)?
            && found != head_dim
        {
            return Err(metadata.unsupported(key, found.to_string(), "the head dimension"));
        }
    }
    const TOKENS: &str = "tokenizer.ggml.tokens";
    let token_count = metadata.get::<&[String]>(TOKENS)?.map(<[String]>::len);
    let vocab_size = match (metadata.of_model("vocab_size")?, token_count) {
        // The file's tokenizer would have ids without a row in the embedding.
        (Some(size), Some(tokens)) if tokens > size => {
            return Err(ModelError::ConfigValue {
                path: path.into(),
                name: "vocabulary size",
                found: usize::to_string(&size),
                allowed: format!("at least the {tokens} tokens of the file's tokenizer"),
            });
        }
        (Some(size), _) | (None, Some(size)) => size,
        (None, None) => {
            let (key, wanted) = (TOKENS.into(), <&[String]>::WANTED);
            return Err(metadata.error(GgufError::MissingKey { key, wanted }));
        }
    };
    let layer_count = metadata.require::<usize>("block_count")?;
    let window = metadata.of_model::<usize>("attention.sliding_window")?;
    let window = window.and_then(NonZeroUsize::new);
    // Some writers store −1 in 32 bits for "none".
    let token_id =
        |key: &str| Ok::<_, ModelError>(metadata.get::<u32>(key)?.filter(|&id| id != u32::MAX));
    let mut eos_token_ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        if let Some(id) = token_id(key)?
            && !eos_token_ids.contains(&id)
        {
            eos_token_ids.push(id);
        }
    }

    ModelConfig {
        family,
        hidden_size,
        layer_count,
        query_head_count,
        kv_head_count: metadata.of_model("attention.head_count_kv")?.unwrap_or(query_head_count),
        head_dim,
        rotary_dim: head_dim,
        ffn_size: metadata.require("feed_forward_length")?,
        vocab_size,
        context_tokens: metadata.require("context_length")?,
        rms_eps: metadata.require("attention.layer_norm_rms_epsilon")?,
        query_pre_attn_scalar: head_dim as f32,
        window_rope_theta: None,
        rope_theta: metadata.of_model("rope.freq_base")?.unwrap_or(10_000.0),
        rope_scaling: rope_scaling(&metadata, rope_divisors)?,
        rope_attention_factor: 1.0,
        // No known file of these families limits the window to some layers, so all layers have it.
        layers: vec![layer.with_window(window); layer_count.min(LAYERS_MAX)],
        tied_output: !has_output,
        bos_token_id: token_id("tokenizer.ggml.bos_token_id")?,
        eos_token_ids,
    }
    .validate(path)
}

/// Returns the experts of all layers, if there are any.
fn experts(metadata: &Metadata<'_>, gguf: Gguf) -> Result<Option<ExpertSpec>, ModelError> {
    let count = metadata.of_model::<usize>("expert_count")?.unwrap_or(0);
    let Some(GgufExperts { is_normalized, has_shared }) = gguf.experts else {
        return match count {
            0 => Ok(None),
            _ => Err(metadata.unsupported("expert_count", count.to_string(), "0")),
        };
    };
    if count == 0 {
        return Ok(None);
    }
    let choice = ExpertChoice::softmax(metadata.require("expert_used_count")?, is_normalized);
    let size = match metadata.of_model("expert_feed_forward_length")? {
        Some(size) => size,
        // Files of Mixtral have no other size.
        None => metadata.require("feed_forward_length")?,
    };
    let shared = match has_shared {
        false => None,
        true => Some(SharedExpertSpec {
            size: metadata.require("expert_shared_feed_forward_length")?,
            has_router: true,
        }),
    };
    Ok(Some(ExpertSpec { shared, ..ExpertSpec::new(count, size, choice) }))
}

fn rope_scaling(
    metadata: &Metadata<'_>,
    divisors: Option<Vec<f32>>,
) -> Result<RopeScaling, ModelError> {
    const TYPE: &str = "rope.scaling.type";
    let factor = match metadata.of_model("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // Older name of the key, from when all scaling was linear.
        None => metadata.of_model("rope.scale_linear")?,
    };
    // As in llama.cpp: a factor without a type is linear, and 0 means no factor.
    let factor = factor.filter(|&factor: &f32| factor != 0.0 && factor != 1.0);
    let scaling = match metadata.of_model::<&str>(TYPE)? {
        Some("none") => RopeScaling::None,
        Some("linear") | None => match factor {
            Some(factor) => RopeScaling::Linear { factor },
            None => RopeScaling::None,
        },
        Some(other) => {
            let found = format!("{other:?}");
            return Err(metadata.unsupported(TYPE, found, "\"none\" or \"linear\""));
        }
    };
    match (scaling, divisors) {
        (scaling, None) => Ok(scaling),
        (RopeScaling::None, Some(divisors)) => Ok(RopeScaling::Divisors(divisors)),
        (_, Some(_)) => {
            let found = "\"linear\" and the tensor \"rope_freqs.weight\"".into();
            Err(metadata.unsupported(TYPE, found, "only one of the two"))
        }
    }
}

/// Metadata of a file. Errors name the file. Methods with a `key` prefix it with the architecture.
struct Metadata<'a> {
    path: &'a Path,
    header: &'a Header,
    /// `general.architecture`.
    architecture: &'static str,
}

impl<'a> Metadata<'a> {
    fn get<T: FromValue<'a>>(&self, full_key: &str) -> Result<Option<T>, ModelError> {
        self.header.metadata.get(full_key).map_err(|cause| self.error(cause))
    }

    fn of_model<T: FromValue<'a>>(&self, key: &str) -> Result<Option<T>, ModelError> {
        self.get(&self.full_key(key))
    }

    fn require<T: FromValue<'a>>(&self, key: &str) -> Result<T, ModelError> {
        self.header.metadata.require(&self.full_key(key)).map_err(|cause| self.error(cause))
    }

    fn full_key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn error(&self, cause: GgufError) -> ModelError {
        ModelError::Gguf { path: self.path.into(), cause }
    }

    fn unsupported(&self, key: &str, found: String, supported: &'static str) -> ModelError {
        let key = self.full_key(key);
        ModelError::Unsupported { path: self.path.into(), key, found, supported }
    }
}
