//! Bytes of a model's tokens, without the rest of its tokenizer.

use std::{collections::HashMap, path::Path};

use crate::{
    decoding::TokenBytes,
    error::{LoadError, VocabularyError},
    source::TokenizerSource,
    tokenizer::TokenizerParts,
};

/// Bytes that every token of a model represents. This suffices to match answers, but not to encode
/// or decode text.
#[derive(Clone, Debug)]
pub struct TokenTable {
    bytes: TokenBytes,
    /// Ids of special tokens, sorted.
    special: Vec<u32>,
    size: u32,
}

impl TokenTable {
    /// Reads a `.gguf` file or a Hugging Face folder, without the weights.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let TokenizerSource { parts, origin, .. } = TokenizerSource::read(path.as_ref())?;
        Self::new(parts).map_err(|error| origin.locate(error))
    }

    fn new(mut parts: TokenizerParts) -> Result<Self, VocabularyError> {
        let (vocabulary, special) = parts.take_vocabulary()?;
        let added = parts.added.into_iter().map(|(_, token)| token.content);
        let added: HashMap<u32, String> =
            added.filter_map(|content| Some((vocabulary.id(&content)?, content))).collect();
        let added_form = |id| added.get(&id).cloned();
        let bytes = TokenBytes::new(&vocabulary, added_form, &parts.decoding, &parts.silent)?;
        Ok(Self { bytes, special, size: vocabulary.size() })
    }

    /// Returns the highest token id + 1. A model may have more rows.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Returns the bytes that a token represents; for a special token, its name. Empty for
    /// placeholders, `None` outside the vocabulary.
    pub fn bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.special.binary_search(&id).is_ok()
    }
}
