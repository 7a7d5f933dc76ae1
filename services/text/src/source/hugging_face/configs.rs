//! The configuration files of a Hugging Face folder, with the keys that this crate reads.

use std::path::Path;

use serde::Deserialize;
use serde_json::Number;

use crate::sampling_defaults::{SamplingDefaults, UncheckedDefaults};

/// `tokenizer_config.json`.
#[derive(Default, Deserialize)]
pub struct TokenizerConfig {
    #[serde(flatten)]
    pub named: NamedTokens,
    pub chat_template: Option<ChatTemplates>,
    pub add_bos_token: Option<bool>,
    pub add_eos_token: Option<bool>,
    pub added_tokens_decoder: Option<std::collections::BTreeMap<u32, AddedTokenConfig>>,
}

/// Names of special tokens, in `tokenizer_config.json` or `special_tokens_map.json`.
#[derive(Default, Deserialize)]
pub struct NamedTokens {
    bos_token: Option<NamedToken>,
    eos_token: Option<NamedToken>,
    unk_token: Option<NamedToken>,
    sep_token: Option<NamedToken>,
    pad_token: Option<NamedToken>,
    cls_token: Option<NamedToken>,
    mask_token: Option<NamedToken>,
    additional_special_tokens: Option<Vec<NamedToken>>,
}

impl NamedTokens {
    /// Returns the single tokens with their keys.
    pub fn single(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let tokens = [
            ("bos_token", &self.bos_token),
            ("eos_token", &self.eos_token),
            ("unk_token", &self.unk_token),
            ("sep_token", &self.sep_token),
            ("pad_token", &self.pad_token),
            ("cls_token", &self.cls_token),
            ("mask_token", &self.mask_token),
        ];
        tokens.into_iter().filter_map(|(key, token)| Some((key, token.as_ref()?.content())))
    }

    /// Returns all tokens.
    pub fn all(&self) -> impl Iterator<Item = &str> {
        let additional = self.additional_special_tokens.iter().flatten().map(NamedToken::content);
        self.single().map(|(_, token)| token).chain(additional)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
pub enum NamedToken {
    Plain(String),
    Full { content: String },
}

impl NamedToken {
    fn content(&self) -> &str {
        match self {
            NamedToken::Plain(content) | NamedToken::Full { content } => content,
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
pub enum ChatTemplates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
pub struct NamedTemplate {
    pub name: String,
    pub template: String,
}

#[derive(Deserialize)]
pub struct AddedTokenConfig {
    pub content: String,
    #[serde(default)]
    pub single_word: bool,
    #[serde(default)]
    pub lstrip: bool,
    #[serde(default)]
    pub rstrip: bool,
    #[serde(default)]
    pub normalized: bool,
    #[serde(default)]
    pub special: bool,
}

/// `config.json`.
#[derive(Deserialize)]
pub struct ModelConfigFile {
    /// Number of rows of the embedding. Some tools write integers as floats.
    pub vocab_size: Option<f64>,
    pub eos_token_id: Option<OneOrMany>,
}

/// `generation_config.json`. Like vLLM, the loader uses its numbers and ignores `do_sample`: a request
/// chooses greedy sampling by its temperature.
#[derive(Default, Deserialize)]
pub struct GenerationConfig {
    pub eos_token_id: Option<OneOrMany>,
    temperature: Option<f64>,
    top_k: Option<f64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
}

impl GenerationConfig {
    /// Returns the sampling defaults of the configuration, which is that of `file`.
    pub fn sampling_defaults(&self, file: &Path) -> SamplingDefaults {
        UncheckedDefaults {
            temperature: ("temperature", self.temperature),
            top_k: ("top_k", self.top_k),
            top_p: ("top_p", self.top_p),
            min_p: ("min_p", self.min_p),
            repetition_penalty: ("repetition_penalty", self.repetition_penalty),
        }
        .check(file)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
pub enum OneOrMany {
    One(Number),
    Many(Vec<Option<Number>>),
}

impl OneOrMany {
    /// Returns the ids. A null or negative id means none. The error is the problem of an id that is not whole.
    pub fn ids(self) -> Result<Vec<u32>, String> {
        let ids = match self {
            OneOrMany::One(id) => vec![Some(id)],
            OneOrMany::Many(ids) => ids,
        };
        let numbers = ids.into_iter().flatten().filter_map(|id| id.as_f64());
        let id = |id: f64| match id.fract() == 0.0 && id <= f64::from(u32::MAX) {
            true => Ok(id as u32),
            false => Err(format!("has {id}; allowed: token ids")),
        };
        numbers.filter(|id| *id >= 0.0).map(id).collect()
    }
}
