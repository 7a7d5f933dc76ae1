//! MiniMax-M2: experts with a correction bias in every layer, norms over all queries and all keys,
//! and RoPE over a part of each head.

use kernels::backend::{ExpertChoice, ExpertScore};

use super::{AbsentKeys, Family, mixtral, olmoe};
use crate::layer::ExpertSpec;

pub(super) static FAMILY: Family = Family {
    name: "minimax_m2",
    class: "MiniMaxM2ForCausalLM",
    absent: AbsentKeys {
        kv_head_count: Some(8),
        head_dim: Some(128),
        context_tokens: 196_608,
        rope_theta: 5_000_000.0,
        ..AbsentKeys::LLAMA
    },
    rotary_factor: Some(1.0),
    has_mtp_layers: true,
    layer: olmoe::FAMILY.layer,
    layers: |fields, layer, layer_count| {
        fields.check_word("scoring_func", &["sigmoid"], "\"sigmoid\"")?;
        let shared = fields.get::<usize>("shared_intermediate_size")?.unwrap_or(0);
        if shared != 0 {
            return Err(fields.unsupported("shared_intermediate_size", shared.to_string(), "0"));
        }
        // Linear attention has the number 0.
        let kinds = fields.get::<Vec<u32>>("attn_type_list")?.unwrap_or_default();
        if let Some(kind) = kinds.into_iter().find(|kind| *kind != 1) {
            return Err(fields.unsupported("attn_type_list", kind.to_string(), "1 for each layer"));
        }
        let choice = ExpertChoice {
            score: ExpertScore::Sigmoid,
            ..ExpertChoice::softmax(fields.get("num_experts_per_tok")?.unwrap_or(8), true)
        };
        let count = fields.get("num_local_experts")?.unwrap_or(256);
        let experts = ExpertSpec::new(count, fields.require("intermediate_size")?, choice);
        let experts = ExpertSpec { has_bias: true, ..experts };
        Ok(vec![layer.with_experts(experts); layer_count])
    },
    weight_name: mixtral::weight_name,
    ..Family::PLAIN
};
