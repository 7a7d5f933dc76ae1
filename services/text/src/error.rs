//! Errors of loading a model's text side.

use std::path::{Path, PathBuf};

use crate::vocabulary::VOCABULARY_SIZE_MAX;

/// Error of [`ModelText::open`](crate::ModelText::open). Each message names the file, the key and
/// what is allowed.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("{}: cannot be read: {cause}", path.display())]
    Io { path: PathBuf, cause: std::io::Error },
    #[error(
        "{}: no model text here; expected a .gguf file, or a folder with a tokenizer.json or exactly one .gguf file",
        path.display()
    )]
    NotAModel { path: PathBuf },
    #[error("{}: has {bytes} bytes; at most {limit} are read", path.display())]
    FileTooLarge { path: PathBuf, bytes: u64, limit: u64 },
    /// The container is broken, or a key is missing or of the wrong type.
    #[error("{}: {cause}", path.display())]
    Gguf { path: PathBuf, cause: gguf::GgufError },
    /// Not JSON, or a key is missing or of the wrong type.
    #[error("{}: {cause}", path.display())]
    Json { path: PathBuf, cause: serde_json::Error },
    /// The key has an unsupported value.
    #[error("{}: {key} is {found:?}; supported: {supported}", path.display())]
    Unsupported { path: PathBuf, key: String, found: String, supported: String },
    /// The key's value contradicts itself or the rest of the file.
    #[error("{}: {key}: {problem}", path.display())]
    Invalid { path: PathBuf, key: String, problem: String },
    #[error("{}: {key}: {cause}", path.display())]
    Vocabulary { path: PathBuf, key: &'static str, cause: VocabularyError },
}

impl LoadError {
    pub(crate) fn unsupported(path: &Path, key: &str, found: String, supported: &str) -> Self {
        let (key, supported) = (key.to_owned(), supported.to_owned());
        Self::Unsupported { path: path.into(), key, found, supported }
    }

    pub(crate) fn invalid(path: &Path, key: &str, problem: String) -> Self {
        Self::Invalid { path: path.into(), key: key.to_owned(), problem }
    }
}

/// Error in a vocabulary or its merges.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    #[error("there are no tokens")]
    Empty,
    #[error("the tokens' text is larger than {} bytes", u32::MAX)]
    TooLarge,
    #[error("token {token:?} has id {id}; ids are less than {VOCABULARY_SIZE_MAX}")]
    IdTooLarge { id: u32, token: String },
    #[error("tokens {first:?} and {second:?} have the same id {id}")]
    IdTwice { id: u32, first: String, second: String },
    #[error("there are {found} merges; at most {max} are supported")]
    TooManyMerges { found: usize, max: usize },
    #[error("merge {index} is {found:?}; it must be two tokens with one space between")]
    MalformedMerge { index: usize, found: String },
    #[error("merge {index}: token {token:?} is not in the vocabulary")]
    UnknownMergeToken { index: usize, token: String },
    #[error("the unknown token {token:?} is not in the vocabulary")]
    UnknownToken { token: String },
    #[error("added token {token:?} has id {id}, but {other:?} has it in the vocabulary")]
    AddedTokenTakesId { id: u32, token: String, other: String },
    #[error("the added tokens cannot be searched for: {reason}")]
    AddedTokens { reason: String },
    #[error("tokens {first} and {second} are both {token:?}")]
    TokenTwice { first: u32, second: u32, token: String },
    #[error("token {id} has {bytes} bytes; non-control tokens have at most {max}")]
    TokenTooLong { id: u32, bytes: usize, max: usize },
    #[error("there is neither a token <0x{byte:02X}> nor an unknown token: some texts have no ids")]
    NoUnknownToken { byte: u8 },
    #[error("{name} is {id}; the vocabulary has {size} tokens")]
    NoSuchId { name: &'static str, id: u64, size: u32 },
}

impl VocabularyError {
    /// Returns true when the error is in the merges, false when it is in the tokens.
    pub(crate) fn is_about_merges(&self) -> bool {
        matches!(
            self,
            Self::TooManyMerges { .. }
                | Self::MalformedMerge { .. }
                | Self::UnknownMergeToken { .. }
        )
    }
}
