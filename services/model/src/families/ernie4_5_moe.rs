//! ERNIE 4.5 with experts: softmax scores with a correction bias, a shared expert, dense first
//! layers, and rotary pairs in adjacent rows.

use kernels::backend::ExpertChoice;

use super::{AbsentKeys, Family, RotaryRows, glm4_moe};
use crate::{
    layer::{ExpertSpec, SharedExpertSpec},
    weight::LayerWeight,
};

pub(super) static FAMILY: Family = Family {
    name: "ernie4_5_moe",
    class: "Ernie4_5_MoeForCausalLM",
    absent: AbsentKeys {
        kv_head_count: Some(4),
        context_tokens: 131_072,
        rope_theta: 500_000.0,
        rms_eps: 1e-5,
        tied_output: true,
        ..AbsentKeys::LLAMA
    },
    rows: RotaryRows::Pairs,
    has_mtp_layers: true,
    refused: &["use_bias"],
    layers: |fields, layer, layer_count| {
        // The least sum of the weights of chosen experts.
        let least = fields.get::<f32>("moe_norm_min")?.unwrap_or(1e-12);
        if least != 1e-12 {
            return Err(fields.unsupported("moe_norm_min", least.to_string(), "1e-12"));
        }
        let count = fields.get("moe_num_experts")?.unwrap_or(64);
        let size = fields.get::<usize>("moe_intermediate_size")?.unwrap_or(1536);
        let choice = ExpertChoice::softmax(fields.get("moe_k")?.unwrap_or(6), true);
        // The checkpoint stores a layer's shared experts as one network of their total size.
        let shared = match fields.get("moe_num_shared_experts")?.unwrap_or(2) {
            0 => None,
            count => Some(SharedExpertSpec { size: size.saturating_mul(count), has_router: false }),
        };
        let experts = ExpertSpec::new(count, size, choice);
        let sparse = layer.with_experts(ExpertSpec { has_bias: true, shared, ..experts });
        let first = fields.get("moe_layer_start_index")?.unwrap_or(1);
        // -1: the last layer.
        let last = match fields.get::<i64>("moe_layer_end_index")?.unwrap_or(-1) {
            -1 => usize::MAX,
            last => last as usize,
        };
        let step = fields.get::<usize>("moe_layer_interval")?.unwrap_or(1).max(1);
        let describe = |index: usize| match (first..=last).contains(&index) {
            true if (index + 1).is_multiple_of(step) => sparse,
            _ => layer,
        };
        Ok((0..layer_count).map(describe).collect())
    },
    weight_name: |weight| match weight {
        LayerWeight::RouterBias => Some("mlp.moe_statics.e_score_correction_bias".to_owned()),
        _ => (glm4_moe::FAMILY.weight_name)(weight),
    },
    ..Family::PLAIN
};
