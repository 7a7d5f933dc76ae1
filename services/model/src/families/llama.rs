//! Llama 1 to 3.x, and every GGUF file of the `llama` architecture, including Mistral's.

use super::{AbsentKeys, Family, GgufRows};
use crate::layer::LayerSpec;

pub(super) static FAMILY: Family = Family {
    name: "llama",
    class: "LlamaForCausalLM",
    gguf: Some(GgufRows::Pairs),
    absent: AbsentKeys { kv_head_count: None, head_dim: None, context_tokens: 2048 },
    refused: &["attention_bias", "mlp_bias"],
    layer: LayerSpec::LLAMA,
    layers: |_, layer, layer_count| Ok(vec![layer; layer_count]),
    weight_name: |_| None,
};
