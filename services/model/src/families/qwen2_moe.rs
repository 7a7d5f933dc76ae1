//! Qwen2-MoE: Qwen2 with experts in some or all layers, and a shared expert with a router of its
//! own.

use super::{AbsentKeys, Family, Gguf, GgufExperts, RotaryRows, qwen2, qwen3_moe};
use crate::layer::{ExpertSpec, SharedExpertSpec};

pub(super) static FAMILY: Family = Family {
    name: "qwen2_moe",
    class: "Qwen2MoeForCausalLM",
    gguf: Some(Gguf {
        experts: Some(GgufExperts { is_normalized: false, has_shared: true }),
        ..Gguf::new("qwen2moe", RotaryRows::Halves)
    }),
    absent: AbsentKeys { kv_head_count: Some(16), context_tokens: 32_768, ..AbsentKeys::LLAMA },
    refused: &["use_sliding_window"],
    layer: qwen2::FAMILY.layer,
    layers: |fields, layer, layer_count| {
        let shared = SharedExpertSpec {
            size: fields.get("shared_expert_intermediate_size")?.unwrap_or(5632),
            has_router: true,
        };
        let count = fields.get("num_experts")?.unwrap_or(60);
        let size = fields.get("moe_intermediate_size")?.unwrap_or(1408);
        let experts = ExpertSpec::new(count, size, qwen3_moe::choice(fields, 4)?);
        let experts = ExpertSpec { shared: Some(shared), ..experts };
        let layer = layer.with_qkv_bias(fields.get("qkv_bias")?.unwrap_or(true));
        qwen3_moe::sparse_layers(fields, layer, experts, layer_count)
    },
    ..Family::PLAIN
};
