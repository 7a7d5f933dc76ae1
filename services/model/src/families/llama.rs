//! Llama 1 to 3.x, and every GGUF file of the `llama` architecture, including Mistral's and
//! Mixtral's.

use super::{AbsentKeys, Family, Gguf, GgufExperts, RotaryRows};

pub(super) static FAMILY: Family = Family {
    name: "llama",
    class: "LlamaForCausalLM",
    gguf: Some(Gguf {
        // Mixtral.
        experts: Some(GgufExperts { is_normalized: true, has_shared: false }),
        ..Gguf::new("llama", RotaryRows::Pairs)
    }),
    absent: AbsentKeys { context_tokens: 2048, ..AbsentKeys::LLAMA },
    refused: &["attention_bias", "mlp_bias"],
    ..Family::PLAIN
};
