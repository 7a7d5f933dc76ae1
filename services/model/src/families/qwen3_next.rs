//! Qwen3-Next: linear attention (Gated DeltaNet) in most layers, attention with an output gate in
//! the others, and experts with a shared expert in some or all layers.

use kernels::backend::{ExpertChoice, NormSpan};
use serde::Deserialize;

use super::{AbsentKeys, Family, qwen3_moe};
use crate::{
    config::{ModelConfig, fields::Fields},
    error::ModelError,
    layer::{AttentionSpec, DeltaSpec, ExpertSpec, LayerSpec, Mixer, SharedExpertSpec},
    rope::RowPart,
    weight::{DeltaWeight, LayerWeight},
};

/// Without `full_attention_interval`, every layer of this number has attention.
const INTERVAL_DEFAULT: usize = 4;

pub(super) static FAMILY: Family = Family {
    name: "qwen3_next",
    class: "Qwen3NextForCausalLM",
    absent: AbsentKeys {
        query_head_count: Some(16),
        kv_head_count: Some(2),
        head_dim: Some(256),
        context_tokens: 32_768,
        ..AbsentKeys::LLAMA
    },
    rotary_factor: Some(0.25),
    has_mtp_layers: true,
    has_norm_offset: true,
    refused: &["attention_bias"],
    layer: LayerSpec {
        mixer: Mixer::Attention(AttentionSpec {
            qk_norm: Some(NormSpan::Head),
            has_output_gate: true,
            ..AttentionSpec::LLAMA
        }),
        ..LayerSpec::LLAMA
    },
    layers: |fields, layer, layer_count| {
        let mixers = mixers(fields, layer.mixer, layer_count)?;
        let layers = qwen3_moe::sparse_layers(fields, layer, experts(fields)?, mixers.len())?;
        let layers = layers.into_iter().zip(mixers);
        Ok(layers.map(|(layer, mixer)| LayerSpec { mixer, ..layer }).collect())
    },
    weight_name: |weight| match weight {
        LayerWeight::Delta(weight) => match weight {
            DeltaWeight::Query | DeltaWeight::Key | DeltaWeight::Value | DeltaWeight::Gate => {
                Some("linear_attn.in_proj_qkvz.weight".to_owned())
            }
            DeltaWeight::UpdateRate | DeltaWeight::Decay => {
                Some("linear_attn.in_proj_ba.weight".to_owned())
            }
            _ => None,
        },
        _ => None,
    },
    weight_part: |weight, config| {
        let delta = config.linear_attention();
        let LayerWeight::Delta(weight) = weight else { return shared_part(weight, config) };
        let DeltaSpec { key_heads, value_heads, key_dim, value_dim, .. } = delta?;
        // Each key head and its value heads are a group of rows.
        let values = value_heads / key_heads;
        let projections = [key_dim, key_dim, values * value_dim, values * value_dim];
        let projection = |index| Some(RowPart::of(projections, index, key_heads));
        let rate = |index| Some(RowPart::of([values, values], index, key_heads));
        match weight {
            DeltaWeight::Query => projection(0),
            DeltaWeight::Key => projection(1),
            DeltaWeight::Value => projection(2),
            DeltaWeight::Gate => projection(3),
            DeltaWeight::UpdateRate => rate(0),
            DeltaWeight::Decay => rate(1),
            _ => shared_part(LayerWeight::Delta(weight), config),
        }
    },
    ..Family::PLAIN
};

/// Kind of a layer in `layer_types`.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum MixerKind {
    FullAttention,
    LinearAttention,
}

/// Returns the mixer of each layer. `attention` is that of the family.
pub(super) fn mixers(
    fields: &Fields<'_>,
    attention: Mixer,
    layer_count: usize,
) -> Result<Vec<Mixer>, ModelError> {
    let kinds = match fields.get::<Vec<MixerKind>>("layer_types")? {
        Some(kinds) => kinds,
        None => {
            let key = "full_attention_interval";
            let interval: usize = fields.get(key)?.unwrap_or(INTERVAL_DEFAULT);
            if !(1..=layer_count).contains(&interval) {
                let reason =
                    format!("{interval}; expected 1 to {layer_count} (the number of layers)");
                return Err(fields.bad(key, reason));
            }
            let kind = |layer: usize| match (layer + 1).is_multiple_of(interval) {
                true => MixerKind::FullAttention,
                false => MixerKind::LinearAttention,
            };
            (0..layer_count).map(kind).collect()
        }
    };
    let mixer = |kind| match kind {
        MixerKind::FullAttention => Ok(attention),
        MixerKind::LinearAttention => Ok(Mixer::GatedDelta(DeltaSpec {
            key_heads: fields.require("linear_num_key_heads")?,
            value_heads: fields.require("linear_num_value_heads")?,
            key_dim: fields.require("linear_key_head_dim")?,
            value_dim: fields.require("linear_value_head_dim")?,
            conv_size: fields.require("linear_conv_kernel_dim")?,
        })),
    };
    kinds.into_iter().map(mixer).collect()
}

fn experts(fields: &Fields<'_>) -> Result<ExpertSpec, ModelError> {
    let count = fields.get("num_experts")?.unwrap_or(512);
    let size = fields.get("moe_intermediate_size")?.unwrap_or(512);
    let choice = ExpertChoice::softmax(
        fields.get("num_experts_per_tok")?.unwrap_or(10),
        fields.get("norm_topk_prob")?.unwrap_or(true),
    );
    let shared = SharedExpertSpec {
        size: fields.get("shared_expert_intermediate_size")?.unwrap_or(512),
        has_router: true,
    };
    Ok(ExpertSpec { shared: Some(shared), ..ExpertSpec::new(count, size, choice) })
}

/// Returns the rows of the weights that share a tensor in all families with linear attention: the
/// query and the output gate of a head, and the convolution of queries, keys and values.
pub(super) fn shared_part(weight: LayerWeight, config: &ModelConfig) -> Option<RowPart> {
    let head = [config.head_dim, config.head_dim];
    let conv = |index| {
        let state = config.state_shape()?;
        let channels = [state.key_width(), state.key_width(), state.value_width()];
        Some(RowPart::of(channels.map(|it| it * (state.conv_taps + 1)), index, 1))
    };
    match weight {
        LayerWeight::Query => Some(RowPart::of(head, 0, config.query_head_count)),
        LayerWeight::QueryGate => Some(RowPart::of(head, 1, config.query_head_count)),
        LayerWeight::Delta(DeltaWeight::QueryConv) => conv(0),
        LayerWeight::Delta(DeltaWeight::KeyConv) => conv(1),
        LayerWeight::Delta(DeltaWeight::ValueConv) => conv(2),
        _ => None,
    }
}
