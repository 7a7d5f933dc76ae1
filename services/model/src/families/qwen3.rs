//! Qwen3: norms of query and key heads, and a sliding window in some layers.

use kernels::backend::NormSpan;

use super::{AbsentKeys, Family, Gguf, RotaryRows, qwen2::layers_with_windows};
use crate::layer::{AttentionSpec, LayerSpec, Mixer};

pub(super) static FAMILY: Family = Family {
    name: "qwen3",
    class: "Qwen3ForCausalLM",
    multimodal_class: None,
    gguf: Some(Gguf::new("qwen3", RotaryRows::Halves)),
    absent: AbsentKeys {
        kv_head_count: Some(32),
        head_dim: Some(128),
        context_tokens: 32_768,
        ..AbsentKeys::LLAMA
    },
    rotary_factor: None,
    rows: RotaryRows::Halves,
    has_mtp_layers: false,
    has_stacked_experts: false,
    scales_embedding: false,
    has_norm_offset: false,
    refused: &["attention_bias"],
    layer: LayerSpec {
        mixer: Mixer::Attention(AttentionSpec {
            qk_norm: Some(NormSpan::Head),
            ..AttentionSpec::LLAMA
        }),
        ..LayerSpec::LLAMA
    },
    layers: layers_with_windows,
    weight_name: |_| None,
};
