//! Sources of a model's text side: a GGUF file or a Hugging Face folder.

mod decoder;
mod frame;
pub(crate) mod gguf_file;
pub(crate) mod hugging_face;
mod packed_json;
mod pre_tokenizer;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::{
    error::{LoadError, VocabularyError},
    sampling_defaults::SamplingDefaults,
    tokenizer::TokenizerParts,
};

/// A source that was read, with the keys of its vocabulary for errors.
pub(crate) struct Opened {
    pub source: Source,
    pub file: PathBuf,
    pub keys: VocabularyKeys,
}

/// Keys of tokens and merges.
pub(crate) struct VocabularyKeys([&'static str; 2]);

impl Opened {
    /// Reads a `.gguf` file, a folder with one such file, or a Hugging Face folder, without the weights.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        if let Some(file) = gguf::file_of_folder(path) {
            return Self::read(&file);
        }
        let is_folder = std::fs::metadata(path)
            .map_err(|source| LoadError::Io { path: path.into(), source })?
            .is_dir();
        let is_gguf = path.extension().is_some_and(|name| name.eq_ignore_ascii_case("gguf"));
        let (source, file, keys) = match (is_folder, is_gguf) {
            (true, _) => {
                let file = path.join(hugging_face::TOKENIZER_FILE);
                (hugging_face::read(path)?, file, hugging_face::KEYS)
            }
            (false, true) => (gguf_file::read(path)?, path.into(), gguf_file::KEYS),
            (false, false) => return Err(LoadError::NotAModel { path: path.into() }),
        };
        Ok(Self { source, file, keys: VocabularyKeys(keys) })
    }
}

impl VocabularyKeys {
    /// Adds the file and the key to a vocabulary error.
    pub fn blame(&self, path: PathBuf, source: VocabularyError) -> LoadError {
        let [tokens, merges] = self.0;
        let key = if source.is_about_merges() { merges } else { tokens };
        LoadError::Vocabulary { path, key, source }
    }
}

/// Contents of a source.
pub(crate) struct Source {
    pub parts: TokenizerParts,
    pub templates: TemplateSources,
    pub sampling_defaults: SamplingDefaults,
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
    pub fn insert(&mut self, name: &str, template: String) {
        match name {
            "default" => self.default = Some(template),
            "tool_use" => self.tool_use = Some(template),
            _ => {}
        }
    }
}
