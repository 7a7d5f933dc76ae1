//! OLMoE: experts in every layer, and norms over all queries and all keys.

use kernels::backend::NormSpan;

use super::{AbsentKeys, Family, qwen3_moe};
use crate::layer::{AttentionSpec, ExpertSpec, LayerSpec, Mixer};

pub(super) static FAMILY: Family = Family {
    name: "olmoe",
    class: "OlmoeForCausalLM",
    absent: AbsentKeys { context_tokens: 4096, rms_eps: 1e-5, ..AbsentKeys::LLAMA },
    refused: &["attention_bias"],
    layer: LayerSpec {
        mixer: Mixer::Attention(AttentionSpec {
            qk_norm: Some(NormSpan::Projection),
            ..AttentionSpec::LLAMA
        }),
        ..LayerSpec::LLAMA
    },
    layers: |fields, layer, layer_count| {
        if let Some(limit) = fields.get::<f64>("clip_qkv")? {
            return Err(fields.unsupported("clip_qkv", limit.to_string(), "null"));
        }
        let count = fields.get("num_experts")?.unwrap_or(64);
        let size = fields.require("intermediate_size")?;
        let experts = ExpertSpec::new(count, size, qwen3_moe::choice(fields, 8)?);
        Ok(vec![layer.with_experts(experts); layer_count])
    },
    ..Family::PLAIN
};
