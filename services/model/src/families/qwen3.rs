//! Qwen3: norms of query and key heads, and a sliding window in some layers.

use kernels::backend::NormSpan;

use super::{AbsentKeys, Family, Gguf, RotaryRows, qwen2::layers_with_windows};
use crate::layer::{AttentionSpec, LayerSpec, Mixer};

pub(super) static FAMILY: Family = Family {
    name: "qwen3",
    class: "Qwen3ForCausalLM",
    gguf: Some(Gguf::new("qwen3", RotaryRows::Halves)),
    absent: AbsentKeys {
        kv_head_count: Some(32),
        head_dim: Some(128),
        context_tokens: 32_768,
        ..AbsentKeys::LLAMA
    },
    refused: &["attention_bias"],
    layer: LayerSpec {
        mixer: Mixer::Attention(AttentionSpec {
            qk_norm: Some(NormSpan::Head),
            ..AttentionSpec::LLAMA
        }),
        ..LayerSpec::LLAMA
    },
    layers: layers_with_windows,
    ..Family::PLAIN
};
