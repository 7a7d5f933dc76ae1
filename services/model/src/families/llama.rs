//! Llama 1 to 3.x, and every GGUF file of the `llama` architecture, including Mistral's and
//! Mixtral's.

use super::{AbsentKeys, Family, Gguf, GgufExperts, RotaryRows};
use crate::layer::LayerSpec;

pub(super) static FAMILY: Family = Family {
    name: "llama",
    class: "LlamaForCausalLM",
    multimodal_class: None,
    gguf: Some(Gguf {
        // Mixtral.
        experts: Some(GgufExperts { is_normalized: true, has_shared: false }),
        ..Gguf::new("llama", RotaryRows::Pairs)
    }),
    absent: AbsentKeys { context_tokens: 2048, ..AbsentKeys::LLAMA },
    rotary_factor: None,
    rows: RotaryRows::Halves,
    has_mtp_layers: false,
    has_stacked_experts: false,
    scales_embedding: false,
    has_norm_offset: false,
    refused: &["attention_bias", "mlp_bias"],
    layer: LayerSpec::LLAMA,
    layers: |_, layer, layer_count| Ok(vec![layer; layer_count]),
    weight_name: |_| None,
};
