//! gpt-oss: experts with biases and a clamped activation, attention sinks, biases of all attention
//! projections, a sliding window in every second layer, and YaRN.

use std::num::NonZeroUsize;

use kernels::backend::{ExpertChoice, ExpertScore, GatedActivation};
use serde_json::Value;

use super::{AbsentKeys, Family, qwen2::AttentionKind};
use crate::{
    layer::{AttentionSpec, ExpertSpec, LayerSpec, Mixer},
    weight::LayerWeight,
};

const WINDOW_DEFAULT: usize = 128;

pub(super) static FAMILY: Family = Family {
    name: "gpt_oss",
    class: "GptOssForCausalLM",
    absent: AbsentKeys {
        kv_head_count: Some(8),
        head_dim: Some(64),
        context_tokens: 131_072,
        rope_theta: 150_000.0,
        rms_eps: 1e-5,
        ..AbsentKeys::LLAMA
    },
    has_stacked_experts: true,
    layer: LayerSpec {
        mixer: Mixer::Attention(AttentionSpec {
            has_bias: true,
            has_output_bias: true,
            has_sinks: true,
            ..AttentionSpec::LLAMA
        }),
        ..LayerSpec::LLAMA
    },
    layers: |fields, layer, layer_count| {
        // Without either key, transformers scales RoPE as in the published models; refuse that.
        if fields.get::<Value>("rope_parameters")?.is_none() {
            fields.require::<Value>("rope_scaling")?;
        }
        let has_bias = fields.get("attention_bias")?.unwrap_or(true);
        let choice = ExpertChoice {
            score: ExpertScore::BiasedSoftmax,
            ..ExpertChoice::softmax(fields.get("num_experts_per_tok")?.unwrap_or(4), true)
        };
        let count = fields.get("num_local_experts")?.unwrap_or(128);
        let experts = ExpertSpec {
            has_bias: true,
            has_expert_biases: true,
            activation: GatedActivation::ClampedSwiGlu {
                alpha: fields.get("swiglu_alpha")?.unwrap_or(1.702),
                limit: fields.get("swiglu_limit")?.unwrap_or(7.0),
            },
            ..ExpertSpec::new(count, fields.require("intermediate_size")?, choice)
        };
        let layer = layer.with_attention(|attention| AttentionSpec {
            has_bias,
            has_output_bias: has_bias,
            ..attention
        });
        let full = layer.with_experts(experts);
        let window = fields.get("sliding_window")?.unwrap_or(WINDOW_DEFAULT);
        let windowed = full.with_window(NonZeroUsize::new(window));
        Ok(match fields.get::<Vec<AttentionKind>>("layer_types")? {
            Some(kinds) => kinds
                .into_iter()
                .map(|kind| match kind {
                    AttentionKind::FullAttention => full,
                    AttentionKind::SlidingAttention => windowed,
                })
                .collect(),
            None => [windowed, full].into_iter().cycle().take(layer_count).collect(),
        })
    },
    weight_name: |weight| match weight {
        LayerWeight::Router => Some("mlp.router.weight".to_owned()),
        LayerWeight::RouterBias => Some("mlp.router.bias".to_owned()),
        _ => None,
    },
    ..Family::PLAIN
};
