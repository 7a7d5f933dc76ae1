//! Qwen3.5 and Qwen3.6 with experts in all layers, and the language model of their multimodal
//! checkpoints.

use kernels::backend::ExpertChoice;

use super::{AbsentKeys, Family, qwen3_5, qwen3_next};
use crate::layer::{ExpertSpec, LayerSpec, SharedExpertSpec};

pub(super) static FAMILY: Family = Family {
    name: "qwen3_5_moe_text",
    class: "Qwen3_5MoeForCausalLM",
    multimodal_class: Some("Qwen3_5MoeForConditionalGeneration"),
    // No layer has a network of this width.
    absent: AbsentKeys { ffn_size: Some(512), ..qwen3_next::FAMILY.absent },
    layers: |fields, layer, layer_count| {
        let count = fields.get("num_experts")?.unwrap_or(256);
        let size = fields.get("moe_intermediate_size")?.unwrap_or(512);
        let shared = SharedExpertSpec {
            size: fields.get("shared_expert_intermediate_size")?.unwrap_or(512),
            has_router: true,
        };
        let chosen = fields.get("num_experts_per_tok")?.unwrap_or(8);
        let experts = ExpertSpec::new(count, size, ExpertChoice::softmax(chosen, true));
        let layer = layer.with_experts(ExpertSpec { shared: Some(shared), ..experts });
        let mixers = qwen3_next::mixers(fields, layer.mixer, layer_count)?;
        Ok(mixers.into_iter().map(|mixer| LayerSpec { mixer, ..layer }).collect())
    },
    ..qwen3_5::FAMILY
};
