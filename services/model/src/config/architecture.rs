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
    const ALL: [Architecture; 4] =
        [Architecture::Llama, Architecture::Mistral, Architecture::Qwen2, Architecture::Qwen3];
    /// GGUF architectures. Converters write Mistral's models as `llama`.
    const IN_GGUF: [Architecture; 3] =
        [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3];

    /// Returns the name as in Hugging Face's `model_type` and, where it occurs, GGUF's
    /// `general.architecture`.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Mistral => "mistral",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
        }
    }

    /// Returns the name of the class in transformers.
    pub(crate) fn class(self) -> &'static str {
        match self {
            Architecture::Llama => "LlamaForCausalLM",
            Architecture::Mistral => "MistralForCausalLM",
            Architecture::Qwen2 => "Qwen2ForCausalLM",
            Architecture::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    pub(crate) fn of_class(class: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|architecture| architecture.class() == class)
    }

    pub(crate) fn of_model_type(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|architecture| architecture.name() == name)
    }

    pub(crate) fn of_gguf(name: &str) -> Option<Self> {
        Self::IN_GGUF.into_iter().find(|architecture| architecture.name() == name)
    }

    /// Returns all class names, for error messages.
    pub(crate) fn classes() -> String {
        Self::ALL.map(|architecture| format!("{:?}", architecture.class())).join(", ")
    }

    /// Returns all GGUF names, for error messages.
    pub(crate) fn gguf_names() -> String {
        Self::IN_GGUF.map(|architecture| format!("{:?}", architecture.name())).join(", ")
    }

    /// Returns whether queries, keys and values have biases.
    pub fn has_qkv_bias(self) -> bool {
        self == Architecture::Qwen2
    }

    /// Returns whether every query and key head is normalised before the rotary embedding.
    pub fn has_head_norms(self) -> bool {
        self == Architecture::Qwen3
    }

    /// Returns whether GGUF files store the rows of query and key projections with rotary pairs
    /// adjacent.
    pub(crate) fn pairs_rows_in_gguf(self) -> bool {
        self == Architecture::Llama
    }
}
