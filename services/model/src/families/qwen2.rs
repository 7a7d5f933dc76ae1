//! Qwen2 and Qwen2.5: biases of queries, keys and values, and a sliding window in some layers.

use serde::Deserialize;

use super::{AbsentKeys, Family, Gguf, RotaryRows};
use crate::{
    config::fields::Fields,
    error::ModelError,
    layer::{AttentionSpec, LayerSpec, Mixer},
};

pub(super) static FAMILY: Family = Family {
    name: "qwen2",
    class: "Qwen2ForCausalLM",
    gguf: Some(Gguf::new("qwen2", RotaryRows::Halves)),
    absent: AbsentKeys { kv_head_count: Some(32), context_tokens: 32_768, ..AbsentKeys::LLAMA },
    layer: LayerSpec {
        mixer: Mixer::Attention(AttentionSpec { has_bias: true, ..AttentionSpec::LLAMA }),
        ..LayerSpec::LLAMA
    },
    layers: layers_with_windows,
    ..Family::PLAIN
};

/// Describes layers of which some have a sliding window.
pub(super) fn layers_with_windows(
    fields: &Fields<'_>,
    layer: LayerSpec,
    layer_count: usize,
) -> Result<Vec<LayerSpec>, ModelError> {
    const FULL_LAYERS_DEFAULT: usize = 28;
    let full = vec![layer; layer_count];
    if fields.get("use_sliding_window")? != Some(true) {
        return Ok(full);
    }
    let Some(window) = fields.sliding_window()? else { return Ok(full) };
    let windowed = layer.with_window(Some(window));
    if let Some(kinds) = fields.get::<Vec<AttentionKind>>("layer_types")? {
        let describe = |kind| match kind {
            AttentionKind::FullAttention => layer,
            AttentionKind::SlidingAttention => windowed,
        };
        return Ok(kinds.into_iter().map(describe).collect());
    }
    let full_count = fields.get("max_window_layers")?.unwrap_or(FULL_LAYERS_DEFAULT);
    let describe = |index| if index < full_count { layer } else { windowed };
    Ok((0..layer_count).map(describe).collect())
}

/// An element of `layer_types`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum AttentionKind {
    FullAttention,
    SlidingAttention,
}
