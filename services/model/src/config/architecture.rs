//! Supported model architectures and their differences.

/// Supported architecture. All are pre-norm decoders with grouped-query attention, rope over whole heads
/// and a gated feed-forward network; the methods return the differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 1 to 3.x, and every GGUF file of the `llama` architecture, including Mistral's.
    Llama,
    /// Llama with a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    Qwen3,
}

impl Architecture {
    /// Every architecture, in the order of the enum, with its name and its class in transformers.
    const ALL: [(Architecture, &str, &str); 4] = [
        (Architecture::Llama, "llama", "LlamaForCausalLM"),
        (Architecture::Mistral, "mistral", "MistralForCausalLM"),
        (Architecture::Qwen2, "qwen2", "Qwen2ForCausalLM"),
        (Architecture::Qwen3, "qwen3", "Qwen3ForCausalLM"),
    ];

    /// Returns the name as in Hugging Face's `model_type` and, where it occurs, GGUF's
    /// `general.architecture`.
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    pub(crate) fn of_class(class: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|row| row.2 == class).map(|row| row.0)
    }

    pub(crate) fn of_model_type(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// Returns the architecture with this name in GGUF files. Converters write Mistral's models as `llama`.
    pub(crate) fn of_gguf(name: &str) -> Option<Self> {
        Self::of_model_type(name).filter(|&architecture| architecture != Architecture::Mistral)
    }

    /// Returns all class names, for error messages.
    pub(crate) fn classes() -> String {
        Self::ALL.map(|(_, _, class)| format!("{class:?}")).join(", ")
    }

    /// Returns all GGUF names, for error messages.
    pub(crate) fn gguf_names() -> String {
        let names = Self::ALL.into_iter().filter(|row| Self::of_gguf(row.1).is_some());
        names.map(|row| format!("{:?}", row.1)).collect::<Vec<_>>().join(", ")
    }

    /// Returns whether queries, keys and values have biases.
    pub fn has_qkv_bias(self) -> bool {
        self == Architecture::Qwen2
    }

    /// Returns whether every query and key head is normalized before the rotary embedding.
    pub fn has_head_norms(self) -> bool {
        self == Architecture::Qwen3
    }

    /// Returns whether GGUF files store the rows of query and key projections with rotary pairs
    /// adjacent.
    pub(crate) fn pairs_rows_in_gguf(self) -> bool {
        self == Architecture::Llama
    }
}
