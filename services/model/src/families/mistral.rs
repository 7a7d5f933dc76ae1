//! Mistral: Llama with a sliding window. Converters write Mistral's models to GGUF as `llama`.

use super::{AbsentKeys, Family};
use crate::layer::LayerSpec;

pub(super) static FAMILY: Family = Family {
    name: "mistral",
    class: "MistralForCausalLM",
    gguf: None,
    absent: AbsentKeys { kv_head_count: Some(8), head_dim: None, context_tokens: 131_072 },
    rotary_factor: None,
    has_mtp_layers: false,
    refused: &[],
    layer: LayerSpec::LLAMA,
    layers: |fields, layer, layer_count| {
        Ok(vec![layer.with_window(fields.sliding_window()?); layer_count])
    },
    weight_name: |_| None,
};
