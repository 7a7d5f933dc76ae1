//! Models that return vectors or scores: the description that their checkpoint gives.

use std::collections::BTreeMap;

/// A model that returns vectors or scores.
#[derive(Clone, Debug, PartialEq)]
pub enum PooledModel {
    Embedding(EmbeddingModel),
    Reranker(RerankerModel),
}

/// An embedding model: the hidden state of the last token is the vector.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingModel {
    /// Whether vectors are scaled to length 1.
    pub normalize: bool,
    /// Texts that may precede an input, by name.
    pub prompts: BTreeMap<String, String>,
    /// Name of the prompt of requests that name none.
    pub default_prompt: Option<String>,
    pub dimensions: Dimensions,
}

/// Lengths to which a vector may be cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dimensions {
    /// The model was not trained for shorter vectors.
    Whole,
    /// Every length up to this one.
    UpTo(u32),
    Listed(Vec<u32>),
}

/// A reranker: the logits of two tokens after the last token give the score of a document.
#[derive(Clone, Debug, PartialEq)]
pub struct RerankerModel {
    pub true_token: u32,
    pub false_token: u32,
    /// System message of the chat template; `None`: the template's own.
    pub instruction: Option<String>,
}

/// Reason why a model returns neither vectors nor scores.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotPooled {
    #[error(
        "the model has no modules.json; expected the sentence-transformers files of an embedding model or a reranker"
    )]
    NoModules,
    #[error(
        "the model is a GGUF file; expected a folder with the sentence-transformers files of its checkpoint"
    )]
    Gguf,
    #[error("{file}: {key} is {found}; expected {expected}")]
    Unsupported { file: String, key: &'static str, found: String, expected: &'static str },
}
