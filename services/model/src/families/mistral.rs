//! Mistral: Llama with a sliding window. Converters write Mistral's models to GGUF as `llama`.

use super::{AbsentKeys, Family, RotaryRows};
use crate::layer::LayerSpec;

pub(super) static FAMILY: Family = Family {
    name: "mistral",
    class: "MistralForCausalLM",
    multimodal_class: None,
    gguf: None,
    absent: AbsentKeys { kv_head_count: Some(8), context_tokens: 131_072, ..AbsentKeys::LLAMA },
    rotary_factor: None,
    rows: RotaryRows::Halves,
    has_mtp_layers: false,
    has_stacked_experts: false,
    scales_embedding: false,
    has_norm_offset: false,
    refused: &[],
    layer: LayerSpec::LLAMA,
    layers: |fields, layer, layer_count| {
        Ok(vec![layer.with_window(fields.sliding_window()?); layer_count])
    },
    weight_name: |_| None,
};
