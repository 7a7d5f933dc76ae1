//! The text side of one model.

use std::{path::Path, sync::Arc};

use crate::{
    error::LoadError,
    source::{Source, gguf_file, hugging_face},
    template::{ChatTemplate, TemplateError},
    tokenizer::Tokenizer,
};

/// A model's tokenizer and chat template.
#[derive(Debug)]
pub struct ModelText {
    tokenizer: Arc<Tokenizer>,
    chat_template: Result<ChatTemplate, TemplateError>,
}

impl ModelText {
    /// Reads a `.gguf` file or a Hugging Face folder, without the weights.
    ///
    /// A chat template that is missing or does not compile is no error here: the model can still
    /// complete plain prompts. [`chat_template`](Self::chat_template) says what is wrong with it.
    ///
    /// # Errors
    /// See [`LoadError`]; each names the file, the key and what is allowed.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let path = path.as_ref();
        let is_folder = std::fs::metadata(path)
            .map_err(|source| LoadError::Io { path: path.into(), source })?
            .is_dir();
        let is_gguf = path.extension().is_some_and(|name| name.eq_ignore_ascii_case("gguf"));
        let (source, file, [tokens_key, merges_key]) = match (is_folder, is_gguf) {
            (true, _) => {
                let file = path.join(hugging_face::TOKENIZER_FILE);
                (hugging_face::read(path)?, file, hugging_face::KEYS)
            }
            (false, true) => (gguf_file::read(path)?, path.into(), gguf_file::KEYS),
            (false, false) => return Err(LoadError::NotAModel { path: path.into() }),
        };
        let Source { parts, templates } = source;
        let tokenizer = Tokenizer::new(parts).map_err(|source| {
            let key = if source.is_about_merges() { merges_key } else { tokens_key };
            LoadError::Vocabulary { path: file, key, source }
        })?;
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            chat_template: ChatTemplate::from_sources(templates),
        })
    }

    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// # Errors
    /// `Missing` when the model brings no template, `Syntax` when it does not compile.
    pub fn chat_template(&self) -> Result<&ChatTemplate, &TemplateError> {
        self.chat_template.as_ref()
    }
}
