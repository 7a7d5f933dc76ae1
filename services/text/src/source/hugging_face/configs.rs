//! The configuration files of a Hugging Face folder, with the keys that this crate reads.

use std::path::Path;

use serde::Deserialize;
use serde_json::Number;
use tokenizers::AddedToken;

use crate::sampling_defaults::{SamplingDefaults, UncheckedDefaults};

/// `tokenizer_config.json`.
#[derive(Default, Deserialize)]
pub(super) struct TokenizerConfig {
    #[serde(flatten)]
    pub named: NamedTokens,
    /// Jinja source of the chat template, or several named ones.
    pub chat_template: Option<ChatTemplates>,
    pub add_bos_token: Option<bool>,
    pub add_eos_token: Option<bool>,
    /// Added tokens by id.
    pub added_tokens_decoder: Option<std::collections::BTreeMap<u32, AddedTokenConfig>>,
}

/// Names of special tokens, in `tokenizer_config.json` or `special_tokens_map.json`.
#[derive(Default, Deserialize)]
pub(super) struct NamedTokens {
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
    /// Returns the tokens of which there is one each, with their keys.
    pub(super) fn single(&self) -> impl Iterator<Item = (&'static str, &str)> {
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

    /// Returns all tokens, the additional special tokens included.
    pub(super) fn all(&self) -> impl Iterator<Item = &str> {
        let additional = self.additional_special_tokens.iter().flatten().map(NamedToken::content);
        self.single().map(|(_, token)| token).chain(additional)
    }
}

/// A named token: its text, or an object with the text as `content` and flags that this crate does
/// not need.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum NamedToken {
    Text(String),
    Object { content: String },
}

impl NamedToken {
    fn content(&self) -> &str {
        match self {
            NamedToken::Text(content) | NamedToken::Object { content } => content,
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum ChatTemplates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
pub(super) struct NamedTemplate {
    pub name: String,
    pub template: String,
}

/// Entry of `added_tokens_decoder`. Absent flags have the defaults of Hugging Face's tokenizers.
#[derive(Deserialize)]
pub(super) struct AddedTokenConfig {
    pub content: String,
    #[serde(default)]
    pub single_word: bool,
    #[serde(default)]
    pub lstrip: bool,
    #[serde(default)]
    pub rstrip: bool,
    /// Whether the token is searched for in normalized text. The default is `!special`.
    pub normalized: Option<bool>,
    #[serde(default)]
    pub special: bool,
}

impl AddedTokenConfig {
    pub(super) fn token(&self) -> AddedToken {
        let Self { content, single_word, lstrip, rstrip, normalized, special } = self;
        AddedToken::from(content.as_str(), *special)
            .single_word(*single_word)
            .lstrip(*lstrip)
            .rstrip(*rstrip)
            .normalized(normalized.unwrap_or(!special))
    }
}

/// `config.json`.
#[derive(Deserialize)]
pub(super) struct ModelConfigFile {
    /// Number of rows of the embedding. A float, because some exports write `32000.0`.
    pub vocab_size: Option<f64>,
    pub eos_token_id: Option<OneOrMany>,
    #[serde(default)]
    architectures: Option<Vec<String>>,
}

impl ModelConfigFile {
    /// Returns false if the classes are base models, such as `MistralModel`.
    pub(super) fn has_lm_head(&self) -> bool {
        let classes = self.architectures.as_deref().unwrap_or_default();
        classes.is_empty() || classes.iter().any(|class| !class.ends_with("Model"))
    }
}

/// `generation_config.json`. Like vLLM, the loader uses the sampling parameters and ignores
/// `do_sample`: a request chooses greedy sampling with temperature 0.
#[derive(Default, Deserialize)]
pub(super) struct GenerationConfig {
    pub eos_token_id: Option<OneOrMany>,
    temperature: Option<f64>,
    top_k: Option<f64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
}

impl GenerationConfig {
    /// Returns the valid sampling defaults. `file` is the path of this configuration, for warnings.
    pub(super) fn sampling_defaults(&self, file: &Path) -> SamplingDefaults {
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

/// Token ids of a key that has one id or a list.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany {
    One(Number),
    Many(Vec<Option<Number>>),
}

impl OneOrMany {
    /// Returns the ids. Ignores null and negative whole numbers, which exports write for "no such
    /// token". The error names an id that is fractional or too large.
    pub(super) fn ids(self) -> Result<Vec<u32>, String> {
        let ids = match self {
            OneOrMany::One(id) => vec![Some(id)],
            OneOrMany::Many(ids) => ids,
        };
        let numbers = ids.into_iter().flatten().filter_map(|id| id.as_f64());
        let id = |number: f64| match number.fract() == 0.0 && number <= f64::from(u32::MAX) {
            true if number < 0.0 => None,
            true => Some(Ok(number as u32)),
            false => Some(Err(format!("is {number}; expected token ids from 0 to {}", u32::MAX))),
        };
        numbers.filter_map(id).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn added_token_without_normalized_is_normalized_unless_special() {
        let is_normalized = |flags: serde_json::Value| {
            let mut entry = json!({"content": "<a>"});
            entry.as_object_mut().unwrap().extend(flags.as_object().unwrap().clone());
            serde_json::from_value::<AddedTokenConfig>(entry).unwrap().token().normalized
        };
        assert!(is_normalized(json!({})));
        assert!(is_normalized(json!({"special": false})));
        assert!(!is_normalized(json!({"special": true})));
        assert!(!is_normalized(json!({"normalized": false})));
        assert!(is_normalized(json!({"special": true, "normalized": true})));
    }

    #[test]
    fn token_ids_are_whole_and_negative_ids_are_ignored() {
        let ids = |value| serde_json::from_value::<OneOrMany>(value).unwrap().ids();
        assert_eq!(ids(json!(2.0)), Ok(vec![2]));
        assert_eq!(ids(json!([1, null, -1, -2.0])), Ok(vec![1]));
        for (invalid, shown) in
            [(json!(1.5), "1.5"), (json!(-0.5), "-0.5"), (json!([-1.5]), "-1.5")]
        {
            let expected = format!("is {shown}; expected token ids from 0 to 4294967295");
            assert_eq!(ids(invalid), Err(expected));
        }
        assert!(ids(json!(4_294_967_296_u64)).is_err());
    }
}
