//! Llama 1 to 3.x, and every GGUF file of the `llama` architecture, including Mistral's and
//! Mixtral's.

use super::{AbsentKeys, Family, Gguf, GgufExperts, GgufRows};
use crate::layer::LayerSpec;

pub(super) static FAMILY: Family = Family {
    name: "llama",
    class: "LlamaForCausalLM",
    gguf: Some(Gguf {
        // Mixtral.
        experts: Some(GgufExperts { is_normalized: true, has_shared: false }),
        ..Gguf::new("llama", GgufRows::Pairs)
    }),
    absent: AbsentKeys { kv_head_count: None, head_dim: None, context_tokens: 2048 },
    rotary_factor: None,
    has_mtp_layers: false,
    refused: &["attention_bias", "mlp_bias"],
    layer: LayerSpec::LLAMA,
    layers: |_, layer, layer_count| Ok(vec![layer; layer_count]),
    weight_name: |_| None,
};
