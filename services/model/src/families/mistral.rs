//! Mistral: Llama with a sliding window. Converters write Mistral's models to GGUF as `llama`.

use super::{AbsentKeys, Family};

pub(super) static FAMILY: Family = Family {
    name: "mistral",
    class: "MistralForCausalLM",
    absent: AbsentKeys { kv_head_count: Some(8), context_tokens: 131_072, ..AbsentKeys::LLAMA },
    layers: |fields, layer, layer_count| {
        Ok(vec![layer.with_window(fields.sliding_window()?); layer_count])
    },
    ..Family::PLAIN
};
