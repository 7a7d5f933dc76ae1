//! Qwen3-MoE: Qwen3 with experts in some or all layers.

use kernels::backend::ExpertChoice;

use super::{AbsentKeys, Family, qwen3};
use crate::{
    config::fields::Fields,
    error::ModelError,
    layer::{ExpertSpec, FeedForward, LayerSpec},
};

pub(super) static FAMILY: Family = Family {
    name: "qwen3_moe",
    class: "Qwen3MoeForCausalLM",
    gguf: None,
    absent: AbsentKeys { kv_head_count: Some(4), head_dim: None, context_tokens: 32_768 },
    refused: &["attention_bias", "use_sliding_window"],
    layer: qwen3::FAMILY.layer,
    layers,
    weight_name: |_| None,
};

fn layers(
    fields: &Fields<'_>,
    layer: LayerSpec,
    layer_count: usize,
) -> Result<Vec<LayerSpec>, ModelError> {
    let count = match fields.get("num_experts")? {
        Some(count) => count,
        // The key of transformers 5.
        None => fields.get("num_local_experts")?.unwrap_or(128),
    };
    let experts = ExpertSpec {
        count,
        size: fields.get("moe_intermediate_size")?.unwrap_or(768),
        choice: ExpertChoice {
            count: fields.get("num_experts_per_tok")?.unwrap_or(8),
            is_normalized: fields.get("norm_topk_prob")?.unwrap_or(false),
        },
    };
    let dense_layers = fields.get::<Vec<usize>>("mlp_only_layers")?.unwrap_or_default();
    let step = fields.get::<usize>("decoder_sparse_step")?.unwrap_or(1).max(1);
    let describe = |index: usize| match dense_layers.contains(&index) {
        false if count > 0 && (index + 1).is_multiple_of(step) => {
            LayerSpec { feed_forward: FeedForward::Experts(experts), ..layer }
        }
        _ => layer,
    };
    Ok((0..layer_count).map(describe).collect())
}
