//! GLM-4.5, 4.6 and 4.7: experts with sigmoid scores, chosen by group with a correction bias; a
//! shared expert; dense first layers; partial RoPE (half of each head).

use kernels::backend::{ExpertChoice, ExpertScore, NormSpan};

use super::{AbsentKeys, Family};
use crate::{
    layer::{AttentionSpec, ExpertSpec, LayerSpec, Mixer, SharedExpertSpec},
    weight::{ExpertWeight, LayerWeight},
};

pub(super) static FAMILY: Family = Family {
    name: "glm4_moe",
    class: "Glm4MoeForCausalLM",
    absent: AbsentKeys {
        kv_head_count: Some(8),
        context_tokens: 131_072,
        rms_eps: 1e-5,
        ..AbsentKeys::LLAMA
    },
    rotary_factor: Some(0.5),
    has_mtp_layers: true,
    layers: |fields, layer, layer_count| {
        let qk_norm = fields.get("use_qk_norm")?.unwrap_or(false).then_some(NormSpan::Head);
        let has_bias = fields.get("attention_bias")?.unwrap_or(false);
        let attention = AttentionSpec { has_bias, qk_norm, ..AttentionSpec::LLAMA };
        let dense = LayerSpec { mixer: Mixer::Attention(attention), ..layer };
        let size: usize = fields.get("moe_intermediate_size")?.unwrap_or(1408);
        let count = match fields.get("n_routed_experts")? {
            Some(count) => count,
            None => fields.get("num_local_experts")?.unwrap_or(128),
        };
        let shared_count = fields.get::<usize>("n_shared_experts")?.unwrap_or(1);
        // The checkpoint stores a layer's shared experts as one network of their total size.
        let shared =
            SharedExpertSpec { size: size.saturating_mul(shared_count), has_router: false };
        let choice = ExpertChoice {
            count: fields.get("num_experts_per_tok")?.unwrap_or(8),
            score: ExpertScore::Sigmoid,
            groups: fields.get("n_group")?.unwrap_or(1),
            groups_chosen: fields.get("topk_group")?.unwrap_or(1),
            is_normalized: fields.get("norm_topk_prob")?.unwrap_or(true),
            scale: fields.get("routed_scaling_factor")?.unwrap_or(1.0),
        };
        let experts = ExpertSpec::new(count, size, choice);
        let experts = ExpertSpec { has_bias: true, shared: Some(shared), ..experts };
        let sparse = dense.with_experts(experts);
        let dense_count = fields.get::<usize>("first_k_dense_replace")?.unwrap_or(1);
        let describe = |index| if index < dense_count { dense } else { sparse };
        Ok((0..layer_count).map(describe).collect())
    },
    weight_name: |weight| {
        let name = match weight {
            LayerWeight::Shared(ExpertWeight::Gate) => "gate",
            LayerWeight::Shared(ExpertWeight::Up) => "up",
            LayerWeight::Shared(ExpertWeight::Down) => "down",
            _ => return None,
        };
        Some(format!("mlp.shared_experts.{name}_proj.weight"))
    },
    ..Family::PLAIN
};
