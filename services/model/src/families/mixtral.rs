//! Mixtral: Mistral with experts in every layer. Converters write Mixtral's models to GGUF as
//! `llama`.

use std::num::NonZeroUsize;

use kernels::backend::ExpertChoice;

use super::{AbsentKeys, Family};
use crate::{
    layer::ExpertSpec,
    weight::{ExpertWeight, LayerWeight},
};

pub(super) static FAMILY: Family = Family {
    name: "mixtral",
    class: "MixtralForCausalLM",
    absent: AbsentKeys {
        kv_head_count: Some(8),
        context_tokens: 131_072,
        rope_theta: 1_000_000.0,
        rms_eps: 1e-5,
        ..AbsentKeys::LLAMA
    },
    layers: |fields, layer, layer_count| {
        let choice = ExpertChoice::softmax(fields.get("num_experts_per_tok")?.unwrap_or(2), true);
        let count = fields.get("num_local_experts")?.unwrap_or(8);
        let experts = ExpertSpec::new(count, fields.require("intermediate_size")?, choice);
        let window = fields.get::<usize>("sliding_window")?.and_then(NonZeroUsize::new);
        Ok(vec![layer.with_experts(experts).with_window(window); layer_count])
    },
    weight_name,
    ..Family::PLAIN
};

pub(super) fn weight_name(weight: LayerWeight) -> Option<String> {
    let name = match weight {
        LayerWeight::Router => "gate.weight".into(),
        LayerWeight::RouterBias => "e_score_correction_bias".into(),
        LayerWeight::Expert(expert, weight) => {
            let name = match weight {
                ExpertWeight::Gate => "w1",
                ExpertWeight::Up => "w3",
                ExpertWeight::Down => "w2",
            };
            format!("experts.{expert}.{name}.weight")
        }
        _ => return None,
    };
    Some(format!("block_sparse_moe.{name}"))
}
