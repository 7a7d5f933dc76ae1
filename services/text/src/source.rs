//! Sources of a model's text side: a GGUF file or a Hugging Face folder.

mod decoder;
mod frame;
mod gguf_file;
mod hugging_face;
mod packed_json;
mod pre_tokenizer;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::{
    error::{LoadError, VocabularyError},
    pooled_model::{NotPooled, PooledModel},
    sampling_defaults::SamplingDefaults,
    tokenizer::TokenizerParts,
};

/// Contents of a source.
pub(crate) struct TokenizerSource {
    pub parts: TokenizerParts,
    pub templates: TemplateSources,
    pub sampling_defaults: SamplingDefaults,
    pub pooled: Result<PooledModel, NotPooled>,
    /// Whether the checkpoint has an LM head.
    pub generates: bool,
    pub origin: VocabularyOrigin,
}

/// File of the vocabulary, for errors.
pub(crate) struct VocabularyOrigin {
    pub file: PathBuf,
    /// Keys of tokens and merges.
    pub keys: [&'static str; 2],
}

impl TokenizerSource {
    /// Reads a `.gguf` file, a folder with one such file, or a Hugging Face folder, without the
    /// weights.
    pub(crate) fn read(path: &Path) -> Result<Self, LoadError> {
        let io_error = |cause| LoadError::Io { path: path.into(), cause };
        if std::fs::metadata(path).map_err(io_error)?.is_dir() {
            return match gguf::model_file_in(path).map_err(io_error)? {
                Some(file) => gguf_file::read(&file),
                None => hugging_face::read(path),
            };
        }
        match path.extension().is_some_and(|name| name.eq_ignore_ascii_case("gguf")) {
            true => gguf_file::read(path),
            false => Err(LoadError::NotAModel { path: path.into() }),
        }
    }
}

impl VocabularyOrigin {
    /// Adds the file and the key to a vocabulary error.
    pub(crate) fn locate(self, cause: VocabularyError) -> LoadError {
        let [tokens, merges] = self.keys;
        let key = if cause.is_about_merges() { merges } else { tokens };
        LoadError::Vocabulary { path: self.file, key, cause }
    }
}

/// Chat templates of the model.
#[derive(Debug, Default)]
pub(crate) struct TemplateSources {
    pub default: Option<String>,
    /// Template that replaces the default when a request has tools.
    pub tool_use: Option<String>,
    /// Variables of templates: `bos_token`, `eos_token` and the like.
    pub special_tokens: BTreeMap<String, String>,
}

impl TemplateSources {
    /// Adds one of several named templates; unused names are dropped.
    pub(crate) fn insert(&mut self, name: &str, template: String) {
        match name {
            "default" => self.default = Some(template),
            "tool_use" => self.tool_use = Some(template),
            _ => {}
        }
    }
}
