//! Mixtral: Mistral with experts in every layer.

use std::num::NonZeroUsize;

use kernels::backend::ExpertChoice;

use super::{AbsentKeys, Family};
use crate::{
    layer::{ExpertSpec, FeedForward, LayerSpec},
    weight::{ExpertWeight, LayerWeight},
};

pub(super) static FAMILY: Family = Family {
    name: "mixtral",
    class: "MixtralForCausalLM",
    gguf: None,
    absent: AbsentKeys { kv_head_count: Some(8), head_dim: None, context_tokens: 131_072 },
    refused: &[],
    layer: LayerSpec::LLAMA,
    layers: |fields, layer, layer_count| {
        let experts = ExpertSpec {
            count: fields.get("num_local_experts")?.unwrap_or(8),
            size: fields.require("intermediate_size")?,
            choice: ExpertChoice {
                count: fields.get("num_experts_per_tok")?.unwrap_or(2),
                is_normalized: true,
            },
        };
        let window = fields.get::<usize>("sliding_window")?.and_then(NonZeroUsize::new);
        let layer = LayerSpec { feed_forward: FeedForward::Experts(experts), ..layer };
        Ok(vec![layer.with_window(window); layer_count])
    },
    weight_name: |weight| match weight {
        LayerWeight::Router => Some("block_sparse_moe.gate.weight".into()),
        LayerWeight::Expert(expert, weight) => {
            let name = match weight {
                ExpertWeight::Gate => "w1",
                ExpertWeight::Up => "w3",
                ExpertWeight::Down => "w2",
            };
            Some(format!("block_sparse_moe.experts.{expert}.{name}.weight"))
        }
        _ => None,
    },
};
