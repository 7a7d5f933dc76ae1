//! Qwen3.5 and Qwen3.6, and the language model of their multimodal checkpoints: Qwen3-Next without
//! experts, with one tensor for each kind of projection.

use super::{AbsentKeys, Family, qwen3_next};
use crate::{
    config::ModelConfig,
    layer::LayerSpec,
    rope::RowPart,
    weight::{DeltaWeight, LayerWeight},
};

pub(super) static FAMILY: Family = Family {
    name: "qwen3_5_text",
    class: "Qwen3_5ForCausalLM",
    multimodal_class: Some("Qwen3_5ForConditionalGeneration"),
    absent: AbsentKeys { kv_head_count: Some(4), ..qwen3_next::FAMILY.absent },
    layers: |fields, layer, layer_count| {
        let mixers = qwen3_next::mixers(fields, layer.mixer, layer_count)?;
        Ok(mixers.into_iter().map(|mixer| LayerSpec { mixer, ..layer }).collect())
    },
    weight_name: |_| None,
    weight_part,
    ..qwen3_next::FAMILY
};

/// Returns the rows of the weights that share a tensor.
pub(super) fn weight_part(weight: LayerWeight, config: &ModelConfig) -> Option<RowPart> {
    let projection = |index| {
        let state = config.state_shape()?;
        let widths = [state.key_width(), state.key_width(), state.value_width()];
        Some(RowPart::of(widths, index, 1))
    };
    match weight {
        LayerWeight::Delta(DeltaWeight::Query) => projection(0),
        LayerWeight::Delta(DeltaWeight::Key) => projection(1),
        LayerWeight::Delta(DeltaWeight::Value) => projection(2),
        _ => qwen3_next::shared_part(weight, config),
    }
}
