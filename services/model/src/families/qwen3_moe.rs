//! Qwen3-MoE: Qwen3 with experts in some or all layers.

use kernels::backend::ExpertChoice;

use super::{AbsentKeys, Family, Gguf, GgufExperts, RotaryRows, qwen3};
use crate::{
    config::fields::Fields,
    error::ModelError,
    layer::{ExpertSpec, LayerSpec},
};

pub(super) static FAMILY: Family = Family {
    name: "qwen3_moe",
    class: "Qwen3MoeForCausalLM",
    gguf: Some(Gguf {
        experts: Some(GgufExperts { is_normalized: true, has_shared: false }),
        ..Gguf::new("qwen3moe", RotaryRows::Halves)
    }),
    absent: AbsentKeys { kv_head_count: Some(4), context_tokens: 32_768, ..AbsentKeys::LLAMA },
    refused: &["attention_bias", "use_sliding_window"],
    layer: qwen3::FAMILY.layer,
    layers: |fields, layer, layer_count| {
        let count = match fields.get("num_experts")? {
            Some(count) => count,
            // The key of transformers 5.
            None => fields.get("num_local_experts")?.unwrap_or(128),
        };
        let size = fields.get("moe_intermediate_size")?.unwrap_or(768);
        let experts = ExpertSpec::new(count, size, choice(fields, 8)?);
        sparse_layers(fields, layer, experts, layer_count)
    },
    ..Family::PLAIN
};

/// Reads the choice of experts; `count` is the number of experts of a token if the key is absent.
pub(super) fn choice(fields: &Fields<'_>, count: usize) -> Result<ExpertChoice, ModelError> {
    let count = fields.get("num_experts_per_tok")?.unwrap_or(count);
    let is_normalized = fields.get("norm_topk_prob")?.unwrap_or(false);
    Ok(ExpertChoice::softmax(count, is_normalized))
}

/// Describes layers of which some have experts.
pub(super) fn sparse_layers(
    fields: &Fields<'_>,
    layer: LayerSpec,
    experts: ExpertSpec,
    layer_count: usize,
) -> Result<Vec<LayerSpec>, ModelError> {
    let dense_layers = fields.get::<Vec<usize>>("mlp_only_layers")?.unwrap_or_default();
    let step = fields.get::<usize>("decoder_sparse_step")?.unwrap_or(1).max(1);
    let describe = |index: usize| match dense_layers.contains(&index) {
        false if experts.count > 0 && (index + 1).is_multiple_of(step) => {
            layer.with_experts(experts)
        }
        _ => layer,
    };
    Ok((0..layer_count).map(describe).collect())
}
